"""What a call asks for: one frozen description of everything static, and one place of validation.

Letters: B batch (any number of leading axes, written ``*B``), T query length, S key/value length,
N query heads, K key/value heads, H query/key head size, h value head size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxflash import _predicate
from jaxflash._arguments import (
    array,
    broadcastable,
    flag,
    is_abstract,
    number,
    one_of,
    takes,
    unwrapped,
    window,
    with_one_dtype,
)
from jaxflash._mask import ALIGNMENTS, LOGITS, Alignment, Mask, Sizes, array_of
from jaxflash._program import Program

Implementation = Literal["cuda", "xla"]
CausalAlignment = Alignment
ScoreMod = Callable[..., Any]
Window = int | tuple[int | None, int | None] | None

IMPLEMENTATIONS = ("cuda", "xla")
DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Everything static about a call except shapes and dtypes, which the operands carry.

    Attributes:
        scale: factor of the logits; `Operands.scale` is another one.
        left: keys visible before a query's own position, or None without a limit.
        right: keys visible after it (0 when causal), or None without a limit.
        bottom_right: query i stands at key position i + S - T instead of i; with sequence lengths,
            S and T are those of the sequence.
        logits_soft_cap: cap c in c * tanh(logits / c), or None; part of a `program` then.
        dropout_rate: probability that a probability is dropped.
        highest_precision: float32 products accurate to float32; otherwise TF32 where there is
            hardware for it.
        deterministic_backward: gradients are bitwise the same from run to run.
        program: what changes scores before the mask (`_scores.compose`), or None: nothing does.
        predicate: what of a mask is a function (`_scores.compose`), or None. Its result is a bool.
        dilation: keys are visible whose distance from a query is a multiple of it; more than 1 only
            in a call whose masks and scores know of distances alone, and where it divides both
            lengths.
    """

    scale: float
    left: int | None
    right: int | None
    bottom_right: bool
    logits_soft_cap: float | None
    dropout_rate: float
    highest_precision: bool
    deterministic_backward: bool
    program: Program | None = None
    predicate: Program | None = None
    dilation: int = 1


# Operands that `_plan` finds for all passes of a call, or the caller's plan has.
PLANNED = ("rows_hull", "keys_hull", "rows_inside", "keys_inside", "rows_visits", "keys_visits")


class Operands(NamedTuple):
    """The arrays of a call; what was not given is None. A pytree, also used for its gradients.

    ``bias`` and ``alibi_slopes`` become ``captures`` with the program of the spec, and
    ``mask_value`` becomes ``mask_captures`` with its predicate.
    ``query_positions`` and ``key_positions`` replace the row and column numbers that the band of
    the spec (causal, window) compares; they come from packed sequences, not from the caller, and so
    do the boundaries. There are no positions if the caller gave one object for the boundaries of
    queries and of keys: row and column numbers are then as far apart as positions are.
    """

    query: Any  # (*B, T, N, H)
    key: Any  # (*B, S, K, H)
    value: Any  # (*B, S, K, h)
    bias: Any = None  # (*#B, #N, #T, #S), # meaning "or 1"
    mask: Any = None  # (*#B, #N, #T, #S) bool, True = attend
    query_seq_lengths: Any = None  # (*B) int32
    key_value_seq_lengths: Any = None  # (*B) int32
    query_segment_ids: Any = None  # (*B, T) int32, or int64 as the caller's are
    key_segment_ids: Any = None  # (*B, S) likewise
    sink: Any = None  # (N)
    alibi_slopes: Any = None  # (*B, N) or (N)
    dropout_seed: Any = None  # (2) uint32
    query_positions: Any = None  # (*B, T) int32
    key_positions: Any = None  # (*B, S) int32
    query_boundaries: Any = None  # (n + 1) int32, begins of packed sequences, and the last end
    key_boundaries: Any = None  # (n + 1) int32
    scale: Any = None  # (), a factor of the logits that is not known at trace time
    mask_value: Mask | None = None  # what of the caller's has no other place
    rows_hull: Any = None  # (*#B, #N, T, 2) int32, interval of the keys that the predicate shows
    keys_hull: Any = None  # (*#B, #N, S, 2) likewise, of the rows to which it shows a key
    # (*#B, #N, ceil(T / 64), 4), of keys that it shows to all of 64 rows, and to none; and of rows
    rows_inside: Any = None
    keys_inside: Any = None  # (*#B, #N, ceil(S / 64), 4)
    # (*#B, #N, ceil(T / 64), ceil(S / 2048), 2), bits of blocks of 64 keys: of which it shows some
    # to 64 rows, and which it shows to all of them; and of blocks of rows
    rows_visits: Any = None
    keys_visits: Any = None  # (*#B, #N, ceil(S / 64), ceil(T / 2048), 2)
    first_element: Any = None  # () int32, number of the first batch element, of a part of a batch
    captures: tuple[Any, ...] = ()  # (*#B, *own shape) each
    mask_captures: tuple[Any, ...] = ()  # likewise, without a gradient

    def named(self) -> dict[str, Any]:
        """What was given, by name; captures are captures[0], captures[1] ..."""
        given = {name: x for name, x in self._asdict().items() if name not in _CAPTURES}
        for captures in _CAPTURES:
            given |= {f"{captures}[{i}]": x for i, x in enumerate(getattr(self, captures))}
        return {name: x for name, x in given.items() if x is not None}

    @classmethod
    def of_named(cls, named: dict[str, Any]) -> Operands:
        """The operands that `named` made these of."""
        counts = {x: sum(name.startswith(f"{x}[") for name in named) for x in _CAPTURES}
        empty: dict[str, Any] = {captures: (None,) * count for captures, count in counts.items()}
        return cls(None, None, None, **empty).replacing(named)

    def replacing(self, named: dict[str, Any]) -> Operands:
        """The same with other arrays under these names."""
        replaced = {name: x for name, x in named.items() if "[" not in name}
        for captures in _CAPTURES:
            given = enumerate(getattr(self, captures))
            replaced[captures] = tuple(named.get(f"{captures}[{i}]", x) for i, x in given)
        return self._replace(**replaced)

    def holding(self, named: dict[str, Any]) -> Operands:
        """These arrays in the places of their names, None in all others."""
        empty: dict[str, Any] = {
            captures: (None,) * len(getattr(self, captures)) for captures in _CAPTURES
        }
        return Operands(None, None, None, **empty).replacing(named)

    def differentiable(self) -> tuple[str, ...]:
        """Names of what has a gradient: all that is floating, but for what a mask captures."""
        return tuple(
            name
            for name, x in self.named().items()
            if jnp.issubdtype(x.dtype, jnp.floating) and not name.startswith("mask_captures[")
        )


_CAPTURES = ("captures", "mask_captures")


def compute_dtype(*dtypes):
    """That of sums, and of what is computed for each logit, of arrays of these dtypes."""
    return jnp.float64 if any(dtype == jnp.float64 for dtype in dtypes) else jnp.float32


class PagedOperands(NamedTuple):
    """The arrays of a call whose keys and values lie in pages; what was not given is None."""

    query: Any  # (*B, T, N, H)
    key_pages: Any  # (P, page size, K, H)
    value_pages: Any  # (P, page size, K, h)
    page_table: Any  # (*B, M) int32
    lengths: Any  # (*B) int32
    sink: Any = None  # (N)
    scale: Any = None  # ()


def make(
    query,
    key,
    value,
    bias,
    mask,
    *,
    scale,
    is_causal,
    query_seq_lengths,
    key_value_seq_lengths,
    local_window_size,
    segment_ids,
    causal_alignment,
    logits_soft_cap,
    sink,
    alibi_slopes,
    dropout_rate,
    dropout_rng,
    precision,
    deterministic_backward,
) -> tuple[AttentionSpec, Operands]:
    """Checks the arguments of `jaxflash.dot_product_attention` and sorts them into a spec (static)
    and operands (arrays, lengths and segment ids brought to their full shapes).

    Raises:
        ValueError: an argument is wrong; the text names it, what came and what is allowed.
    """
    query, key, value = array("query", query), array("key", key), array("value", value)
    mask, scale, dropout_rng = unwrapped(mask), unwrapped(scale), unwrapped(dropout_rng)
    _check_qkv(query, key, value)
    batch = query.shape[:-3]
    q_len, q_heads, head_dim = query.shape[-3:]
    kv_len = key.shape[-3]
    logits_shape = (*batch, q_heads, q_len, kv_len)

    if bias is not None:
        bias = array("bias", bias)
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            hint = ": pass it as mask (True = attend)" if bias.dtype == jnp.bool_ else ""
            raise ValueError(f"bias must have a floating dtype, got {bias.dtype}{hint}")
        bias = broadcastable("bias", bias, logits_shape, LOGITS)

    left, right = _band(is_causal, local_window_size)
    causal_alignment = one_of("causal_alignment", causal_alignment, ALIGNMENTS)
    who_sees_whom = _predicate.Placed(
        left=left,
        right=right,
        bottom_right=causal_alignment == "bottom_right",
        query_lengths=checked_lengths("query_seq_lengths", query_seq_lengths, batch),
        kv_lengths=checked_lengths("key_value_seq_lengths", key_value_seq_lengths, batch),
        segment_ids=_segment_ids(segment_ids, batch, q_len, kv_len),
        dense=None if mask is None or isinstance(mask, Mask) else _dense_mask(mask, logits_shape),
    )
    if isinstance(mask, Mask):
        who_sees_whom = _predicate.place(
            mask,
            who_sees_whom,
            Sizes(batch, q_heads, q_len, kv_len),
            alignment_is_free=left is None and right is None and alibi_slopes is None,
        )
    dropout_rate = _dropout_rate(dropout_rate)
    if dropout_rate > 0.0 and dropout_rng is None:
        raise ValueError(f"dropout_rng must be a PRNG key when dropout_rate > 0 ({dropout_rate})")

    spec = AttentionSpec(
        scale=1.0 if _is_traced_scale(scale) else _scale(scale, head_dim, query.dtype),
        left=who_sees_whom.left,
        right=who_sees_whom.right,
        bottom_right=who_sees_whom.bottom_right,
        logits_soft_cap=_soft_cap(logits_soft_cap, query.dtype),
        dropout_rate=dropout_rate,
        highest_precision=_highest_precision(precision),
        deterministic_backward=flag("deterministic_backward", deterministic_backward),
    )
    operands = Operands(
        query=query,
        key=key,
        value=value,
        bias=bias,
        mask=who_sees_whom.dense,
        query_seq_lengths=who_sees_whom.query_lengths,
        key_value_seq_lengths=who_sees_whom.kv_lengths,
        query_segment_ids=who_sees_whom.segment_ids[0],
        key_segment_ids=who_sees_whom.segment_ids[1],
        mask_value=who_sees_whom.rest,
        **({} if who_sees_whom.plan is None else who_sees_whom.plan.found),
        sink=_per_head("sink", sink, ((q_heads,),)),
        alibi_slopes=_per_head("alibi_slopes", alibi_slopes, ((q_heads,), (*batch, q_heads))),
        dropout_seed=_dropout_seed(dropout_rng) if dropout_rate > 0.0 else None,
        scale=scale if _is_traced_scale(scale) else None,
    )
    return spec, operands


# Powers of two: kernels load whole pages, or whole parts of one, into a tile.
# cuda/problem.h: Pages.
PAGE_SIZES = (16, 32, 64, 128, 256)


def make_paged(
    query,
    key_pages,
    value_pages,
    page_table,
    lengths,
    *,
    scale,
    is_causal,
    local_window_size,
    logits_soft_cap,
    sink,
    precision,
) -> tuple[AttentionSpec, PagedOperands]:
    """As `make`, of the arguments of `jaxflash.paged_attention`."""
    query = array("query", query)
    key_pages, value_pages = array("key_pages", key_pages), array("value_pages", value_pages)
    page_table = array("page_table", page_table)
    _check_pages(query, key_pages, value_pages, page_table)
    batch = query.shape[:-3]
    if lengths is None:
        raise ValueError("lengths must be an int32 array of the valid keys, got None")
    lengths = checked_lengths("lengths", lengths, batch)

    # The cache as the contiguous arrays that the pages stand for.
    kv_len = page_table.shape[-1] * key_pages.shape[1]
    key, value = (
        jax.ShapeDtypeStruct((*batch, kv_len, *x.shape[2:]), x.dtype)
        for x in (key_pages, value_pages)
    )
    spec, operands = make(
        query,
        key,
        value,
        None,
        None,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=None,
        key_value_seq_lengths=lengths,
        local_window_size=local_window_size,
        segment_ids=None,
        causal_alignment="bottom_right",
        logits_soft_cap=logits_soft_cap,
        sink=sink,
        alibi_slopes=None,
        dropout_rate=0.0,
        dropout_rng=None,
        precision=precision,
        deterministic_backward=False,
    )
    arrays = PagedOperands(
        query, key_pages, value_pages, page_table, lengths, operands.sink, operands.scale
    )
    return spec, arrays


def _check_pages(query, key_pages, value_pages, page_table) -> None:
    for name, x in (("key_pages", key_pages), ("value_pages", value_pages)):
        if len(x.shape) != 4:
            raise ValueError(
                f"{name} must have shape (pages, page_size, heads, head_size), got {x.shape}"
            )
        if x.dtype != query.dtype:
            raise ValueError(f"{name} must have the dtype of query, {query.dtype}, got {x.dtype}")
        if x.shape[0] == 0:
            raise ValueError(f"{name} must hold at least one page, got shape {x.shape}")
        if x.shape[1] not in PAGE_SIZES:
            raise ValueError(
                f"{name} page size must be one of {', '.join(map(str, PAGE_SIZES))}, "
                f"got {x.shape[1]} (shape {x.shape}; pages, page_size, heads, head_size)"
            )
    if value_pages.shape[:-1] != key_pages.shape[:-1]:
        raise ValueError(
            "value_pages must have the pages, page size and heads of key_pages "
            f"{key_pages.shape[:-1]}, got {value_pages.shape[:-1]}"
        )
    if len(query.shape) < 3:
        raise ValueError(
            f"query must have shape (*batch, length, heads, head_size), got {query.shape}"
        )
    head_size, heads, kv_heads = query.shape[-1], query.shape[-2], key_pages.shape[2]
    if key_pages.shape[-1] != head_size:
        raise ValueError(
            f"key_pages must have the head size of query ({head_size}), got shape {key_pages.shape}"
        )
    if kv_heads == 0 or heads % kv_heads != 0:
        raise ValueError(
            f"the heads of key_pages must divide those of query ({heads}), got {kv_heads} (shape "
            f"{key_pages.shape})"
        )
    batch = query.shape[:-3]
    if page_table.dtype != jnp.int32:
        raise ValueError(f"page_table must have dtype int32, got {page_table.dtype}")
    if len(page_table.shape) == 0 or page_table.shape[:-1] != batch:
        raise ValueError(
            f"page_table must have shape (*batch, pages of a sequence), batch {batch} as query, "
            f"got {page_table.shape}"
        )


def check_implementation(implementation) -> Implementation | None:
    if implementation is None:
        return None
    return one_of("implementation", implementation, IMPLEMENTATIONS, extra=" or None")


def checked_score_mod(score_mod: ScoreMod) -> ScoreMod:
    """`score_mod`, whose results are checked when it is traced: floating scalars."""
    if not callable(score_mod):
        raise ValueError(
            "score_mod must be a function (score, b, h, q, kv) -> score, "
            f"got {type(score_mod).__name__}"
        )
    takes("score_mod", score_mod, "(score, b, h, q, kv)", 5)

    def checked(*arguments):
        result = score_mod(*arguments)
        expected = "score_mod must return one floating scalar"
        if not isinstance(result, jax.Array | np.ndarray | np.generic | float | int):
            raise ValueError(f"{expected}, got {type(result).__name__}")
        result = jnp.asarray(result)
        if result.shape != ():
            raise ValueError(f"{expected}, got an array of shape {result.shape}")
        if not jnp.issubdtype(result.dtype, jnp.floating):
            raise ValueError(f"{expected}, got dtype {result.dtype}")
        return result

    return checked


def _check_qkv(query, key, value) -> None:
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    layout = f" ({shapes}; each is (*batch, length, heads, head_size), heads after the length)"
    for name, x in (("query", query), ("key", key), ("value", value)):
        if len(x.shape) < 3:
            raise ValueError(
                f"{name} must have shape (*batch, length, heads, head_size), got {x.shape}"
            )
        if x.dtype.name not in DTYPES:
            raise ValueError(f"{name} dtype must be one of {', '.join(DTYPES)}, got {x.dtype}")
        if x.dtype != query.dtype:
            raise ValueError(
                f"query, key and value must have one dtype, got query {query.dtype} "
                f"and {name} {x.dtype}"
            )
        if x.shape[-1] == 0:
            raise ValueError(f"{name} head size must be at least 1, got shape {x.shape}")
        if x.shape[:-3] != query.shape[:-3]:
            raise ValueError(
                f"{name} must have the leading (batch) axes of query {query.shape[:-3]}, "
                f"got {x.shape[:-3]}{layout}"
            )
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"key head size must be that of query ({query.shape[-1]}), got {key.shape[-1]}{layout}"
        )
    if value.shape[-3:-1] != key.shape[-3:-1]:
        raise ValueError(
            f"value must have the length and heads of key {key.shape[-3:-1]}, "
            f"got {value.shape[-3:-1]}{layout}"
        )
    q_heads, kv_heads = query.shape[-2], key.shape[-2]
    if kv_heads == 0 or q_heads % kv_heads != 0:
        raise ValueError(
            "the number of query heads must be a multiple of the number of key heads, "
            f"got {q_heads} query heads and {kv_heads} key heads{layout}"
        )


def _dense_mask(mask, logits_shape):
    mask = array_of(mask)
    if mask.dtype != jnp.bool_:
        raise ValueError(f"mask must have dtype bool (True = attend), got {mask.dtype}")
    return broadcastable("mask", mask, logits_shape, LOGITS)


def checked_lengths(name: str, lengths, batch) -> Any:
    """Those of a call with these batch axes."""
    if lengths is None:
        return None
    lengths = array(name, lengths)
    if lengths.dtype != jnp.int32:
        raise ValueError(f"{name} must have dtype int32, got {lengths.dtype}")
    if lengths.shape == batch:
        return lengths
    # jax.nn counts unbatched arrays as a batch of one.
    if batch == () and lengths.shape == (1,):
        return jax.ShapeDtypeStruct((), jnp.int32) if is_abstract(lengths) else lengths.reshape(())
    raise ValueError(f"{name} must have the batch shape {batch}, got {lengths.shape}")


def _segment_ids(segment_ids, batch, q_len, kv_len):
    if segment_ids is None:
        return None, None
    if isinstance(segment_ids, (tuple, list)):
        if len(segment_ids) != 2:
            raise ValueError(
                "segment_ids must be one array or a pair (query ids, key ids), "
                f"got {len(segment_ids)} of them"
            )
        query_ids, key_ids = segment_ids
    else:
        segment_ids = array("segment_ids", segment_ids)
        if q_len != kv_len:
            raise ValueError(
                f"segment_ids must be a pair, for queries {(*batch, q_len)} and for keys "
                f"{(*batch, kv_len)}, where their lengths differ; got one array "
                f"{segment_ids.shape}, {segment_ids.dtype}"
            )
        query_ids = key_ids = segment_ids
    query_ids = array("segment_ids of the query side", query_ids)
    key_ids = array("segment_ids of the key side", key_ids)
    for which, ids, length in (("query", query_ids, q_len), ("key", key_ids, kv_len)):
        if ids.shape != (*batch, length):
            raise ValueError(
                f"segment_ids of the {which} side must have shape {(*batch, length)}, "
                f"got {ids.shape}"
            )
    return with_one_dtype("segment_ids", query_ids, key_ids)


def _band(is_causal, local_window_size) -> tuple[int | None, int | None]:
    """(left, right) of the keys that a query sees around its position."""
    left = right = None
    if local_window_size is not None:
        left, right = window("local_window_size", local_window_size)
    if flag("is_causal", is_causal):
        right = 0
    return left, right


def _is_traced_scale(scale) -> bool:
    if not isinstance(scale, jax.core.Tracer | jax.ShapeDtypeStruct):
        return False
    is_real = any(jnp.issubdtype(scale.dtype, kind) for kind in (jnp.floating, jnp.integer))
    if scale.shape != () or not is_real:
        raise ValueError(f"scale must be a real scalar, got {scale.dtype} of shape {scale.shape}")
    return True


def _scale(scale, head_dim, query_dtype) -> float:
    if scale is None:
        if not isinstance(head_dim, int):
            raise ValueError(f"scale must be given for a symbolic head size ({head_dim}), got None")
        return 1.0 / math.sqrt(head_dim)
    scale, computed = number("scale", scale), jnp.finfo(compute_dtype(query_dtype))
    if not abs(scale) <= float(computed.max):
        raise ValueError(f"scale must be finite in {computed.dtype}, got {scale}")
    return scale


def _soft_cap(cap, query_dtype) -> float | None:
    if cap is None:
        return None
    cap, computed = number("logits_soft_cap", cap), jnp.finfo(compute_dtype(query_dtype))
    if not float(computed.tiny) <= cap <= float(computed.max):
        raise ValueError(
            f"logits_soft_cap must be positive, from {computed.tiny} to {computed.max} in "
            f"{computed.dtype}, got {cap}"
        )
    return cap


def _dropout_rate(rate) -> float:
    rate = number("dropout_rate", rate)
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout_rate must lie in [0, 1), got {rate}")
    return rate


def _per_head(name: str, x, shapes):
    if x is None:
        return None
    x = array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name} must have a floating dtype, got {x.dtype}")
    if x.shape not in shapes:
        allowed = " or ".join(map(str, dict.fromkeys(shapes)))
        raise ValueError(f"{name} must have shape {allowed}, got {x.shape}")
    return x


def _dropout_seed(rng):
    """The first two words of a PRNG key, old style (uint32 array) or new (jax.random.key)."""
    is_array = isinstance(rng, jax.Array) or is_abstract(rng)
    if is_array and jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        if rng.shape != ():
            raise ValueError(f"dropout_rng must be a single PRNG key, got key shape {rng.shape}")
        if is_abstract(rng):
            return jax.ShapeDtypeStruct((2,), jnp.uint32)
        rng = jax.random.key_data(rng)
    if not hasattr(rng, "dtype"):
        raise ValueError(f"dropout_rng must be a PRNG key, got {type(rng).__name__}")
    rng = array("dropout_rng", rng)
    if rng.dtype != jnp.uint32 or len(rng.shape) != 1 or rng.shape[0] < 2:
        raise ValueError(
            f"dropout_rng must be a PRNG key, got an array of shape {rng.shape}, dtype {rng.dtype}"
        )
    return jax.ShapeDtypeStruct((2,), jnp.uint32) if is_abstract(rng) else rng[:2]


# The names of jax.lax.Precision, jax.lax.DotAlgorithmPreset and jax_default_matmul_precision that
# ask for products of float32 inputs as accurate as float32, or nearly so; others ask for less.
_HIGHEST = frozenset(
    {"high", "highest", "float32", "f32_f32_f32", "f64_f64_f64"}
    | {"tf32_tf32_f32_x3", "bf16_bf16_f32_x3", "bf16_bf16_f32_x6", "bf16_bf16_f32_x9"}
)


def _highest_precision(precision) -> bool:
    """Whether float32 products must be accurate to float32; None follows jax's own default."""
    if precision is None:
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore
        return precision is not None and _highest_precision(precision)
    if isinstance(precision, (tuple, list)) and len(precision) == 2:
        return any(_highest_precision(p) for p in precision)
    if isinstance(precision, jax.lax.DotAlgorithm):
        wide = (np.dtype(np.float32), np.dtype(np.float64))
        operands = (precision.lhs_precision_type, precision.rhs_precision_type)
        return (
            all(np.dtype(dtype) in wide for dtype in operands)
            or precision.num_primitive_operations >= 3
        )
    if isinstance(precision, str) and precision in jax.lax.DotAlgorithmPreset.__members__:
        precision = jax.lax.DotAlgorithmPreset[precision]
    if not isinstance(precision, jax.lax.DotAlgorithmPreset):
        try:
            precision = jax.lax.Precision(precision)
        except (ValueError, TypeError) as error:
            raise ValueError(
                "precision must be a jax.lax.Precision, DotAlgorithmPreset or DotAlgorithm, a name "
                f"of one, a pair of them or None, got {precision!r}"
            ) from error
    return precision.name.lower() in _HIGHEST
