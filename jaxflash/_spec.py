"""What a call asks for: one frozen description of everything static, and one place of validation.

Letters: B batch (any number of leading axes, written ``*B``), T query length, S key/value length,
N query heads, K key/value heads, H query/key head size, h value head size.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jaxflash import _scores

Implementation = Literal["cuda", "xla"]
CausalAlignment = Literal["top_left", "bottom_right"]
ScoreMod = Callable[..., Any]

IMPLEMENTATIONS = ("cuda", "xla")
CAUSAL_ALIGNMENTS = ("top_left", "bottom_right")
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
    """

    scale: float
    left: int | None
    right: int | None
    bottom_right: bool
    logits_soft_cap: float | None
    dropout_rate: float
    highest_precision: bool
    deterministic_backward: bool
    program: _scores.Program | None = None


class Operands(NamedTuple):
    """The arrays of a call; what was not given is None. A pytree, also used for its gradients.

    ``bias`` and ``alibi_slopes`` become ``captures`` with the program of the spec.
    ``query_positions`` and ``key_positions`` replace the row and column numbers that the band of
    the spec (causal, window) and ``alibi_slopes`` compare; they come from packed sequences, not
    from the caller, and so do the boundaries.
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
    captures: tuple[Any, ...] = ()  # (*#B, *own shape) each

    def named(self) -> dict[str, Any]:
        """What was given, by name; captures are captures[0], captures[1] ..."""
        given = {name: x for name, x in self._asdict().items() if name != "captures"}
        given |= {f"captures[{i}]": x for i, x in enumerate(self.captures)}
        return {name: x for name, x in given.items() if x is not None}

    @classmethod
    def of_named(cls, named: dict[str, Any]) -> Operands:
        """The operands that `named` made these of."""
        return cls(None, None, None, captures=(None,) * len(_captures(named))).replacing(named)

    def replacing(self, named: dict[str, Any]) -> Operands:
        """The same with other arrays under these names."""
        captures = [named.get(f"captures[{i}]", x) for i, x in enumerate(self.captures)]
        others = {name: x for name, x in named.items() if name not in _captures(named)}
        return self._replace(**others, captures=tuple(captures))

    def holding(self, named: dict[str, Any]) -> Operands:
        """These arrays in the places of their names, None in all others."""
        return Operands(None, None, None, captures=(None,) * len(self.captures)).replacing(named)

    def differentiable(self) -> tuple[str, ...]:
        """Names of what has a gradient: all that is floating."""
        return tuple(n for n, x in self.named().items() if jnp.issubdtype(x.dtype, jnp.floating))


def _captures(named: dict[str, Any]) -> list[str]:
    return [name for name in named if name.startswith("captures[")]


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
    query, key, value = _array("query", query), _array("key", key), _array("value", value)
    _check_qkv(query, key, value)
    batch = query.shape[:-3]
    q_len, q_heads, head_dim = query.shape[-3:]
    kv_len = key.shape[-3]
    logits_shape = (*batch, q_heads, q_len, kv_len)

    if bias is not None:
        bias = _array("bias", bias)
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            hint = ": pass it as mask (True = attend)" if bias.dtype == jnp.bool_ else ""
            raise ValueError(f"bias must have a floating dtype, got {bias.dtype}{hint}")
        bias = _broadcastable("bias", bias, logits_shape)
    if mask is not None:
        mask = _array("mask", mask)
        if mask.dtype != jnp.bool_:
            raise ValueError(f"mask must have dtype bool (True = attend), got {mask.dtype}")
        mask = _broadcastable("mask", mask, logits_shape)

    query_segment_ids, key_segment_ids = _segment_ids(segment_ids, batch, q_len, kv_len)
    left, right = _band(is_causal, local_window_size)
    dropout_rate = _dropout_rate(dropout_rate)
    if dropout_rate > 0.0 and dropout_rng is None:
        raise ValueError(f"dropout_rng must be a PRNG key when dropout_rate > 0 ({dropout_rate})")

    spec = AttentionSpec(
        scale=1.0 if _is_traced_scale(scale) else _scale(scale, head_dim),
        left=left,
        right=right,
        bottom_right=_one_of("causal_alignment", causal_alignment, CAUSAL_ALIGNMENTS)
        == "bottom_right",
        logits_soft_cap=_soft_cap(logits_soft_cap),
        dropout_rate=dropout_rate,
        highest_precision=_highest_precision(precision),
        deterministic_backward=_flag("deterministic_backward", deterministic_backward),
    )
    operands = Operands(
        query=query,
        key=key,
        value=value,
        bias=bias,
        mask=mask,
        query_seq_lengths=_lengths("query_seq_lengths", query_seq_lengths, batch),
        key_value_seq_lengths=_lengths("key_value_seq_lengths", key_value_seq_lengths, batch),
        query_segment_ids=query_segment_ids,
        key_segment_ids=key_segment_ids,
        sink=_per_head("sink", sink, q_heads, ((q_heads,),)),
        alibi_slopes=_per_head(
            "alibi_slopes", alibi_slopes, q_heads, ((q_heads,), (*batch, q_heads))
        ),
        dropout_seed=_dropout_seed(dropout_rng) if dropout_rate > 0.0 else None,
        scale=scale if _is_traced_scale(scale) else None,
    )
    return spec, operands


# Powers of two: kernels load whole pages, or whole parts of one, into a tile.
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
    query = _array("query", query)
    key_pages, value_pages = _array("key_pages", key_pages), _array("value_pages", value_pages)
    page_table = _array("page_table", page_table)
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
    batch = query.shape[:-3]
    if page_table.dtype != jnp.int32:
        raise ValueError(f"page_table must have dtype int32, got {page_table.dtype}")
    if len(page_table.shape) == 0 or page_table.shape[:-1] != batch:
        raise ValueError(
            f"page_table must have shape (*batch, pages of a sequence), batch {batch} as query, "
            f"got {page_table.shape}"
        )
    if lengths is None:
        raise ValueError("lengths must be an int32 array of the valid keys, got None")
    lengths = _lengths("lengths", lengths, batch)

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


def check_implementation(implementation) -> Implementation | None:
    if implementation is None:
        return None
    return _one_of("implementation", implementation, IMPLEMENTATIONS, extra=" or None")


def checked_score_mod(score_mod: ScoreMod) -> ScoreMod:
    """`score_mod`, whose results are checked when it is traced: floating scalars."""
    if not callable(score_mod):
        raise ValueError(
            "score_mod must be a function (score, b, h, q, kv) -> score, "
            f"got {type(score_mod).__name__}"
        )

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


def _array(name: str, x) -> Any:
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return x
    if x is None:
        raise ValueError(f"{name} must be an array, got None")
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be an array, got {type(x).__name__}: {error}") from error


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


def _broadcastable(name: str, x, logits_shape):
    """`x` with leading axes of size 1 added or removed, so that it has the rank of the logits."""
    padded = (1,) * (len(logits_shape) - len(x.shape)) + x.shape
    while len(padded) > len(logits_shape) and padded[0] == 1:
        padded = padded[1:]
    if len(padded) != len(logits_shape) or any(
        size not in (1, full) for size, full in zip(padded, logits_shape, strict=True)
    ):
        raise ValueError(
            f"{name} must broadcast to (*batch, query heads, T, S) = {logits_shape}, each axis "
            f"1 or full, got shape {x.shape}"
        )
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(padded, x.dtype)
    return x if padded == x.shape else x.reshape(padded)


def _lengths(name: str, lengths, batch):
    if lengths is None:
        return None
    lengths = _array(name, lengths)
    if lengths.dtype != jnp.int32:
        raise ValueError(f"{name} must have dtype int32, got {lengths.dtype}")
    if lengths.shape == batch:
        return lengths
    # jax.nn counts unbatched arrays as a batch of one.
    if batch == () and lengths.shape == (1,):
        return jax.ShapeDtypeStruct((), jnp.int32) if _is_abstract(lengths) else lengths.reshape(())
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
        segment_ids = _array("segment_ids", segment_ids)
        if q_len != kv_len:
            raise ValueError(
                f"segment_ids must be a pair, for queries {(*batch, q_len)} and for keys "
                f"{(*batch, kv_len)}, where their lengths differ; got one array "
                f"{segment_ids.shape}, {segment_ids.dtype}"
            )
        query_ids = key_ids = segment_ids
    query_ids, key_ids = _array("segment_ids", query_ids), _array("segment_ids", key_ids)
    for which, ids, length in (("query", query_ids, q_len), ("key", key_ids, kv_len)):
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(f"segment_ids must have an integer dtype, got {ids.dtype}")
        if ids.shape != (*batch, length):
            raise ValueError(
                f"segment_ids of the {which} side must have shape {(*batch, length)}, "
                f"got {ids.shape}"
            )
    # One dtype for both, and none narrower than the ids: different ones must stay different.
    dtypes = query_ids.dtype, key_ids.dtype
    size = max(dtype.itemsize for dtype in dtypes)
    unsigned = [jnp.issubdtype(dtype, jnp.unsignedinteger) for dtype in dtypes]
    if any(unsigned) and not all(unsigned):
        large = dtypes[unsigned.index(True)].itemsize
        if large >= (8 if jax.config.jax_enable_x64 else 4):  # pyright: ignore
            raise ValueError(
                f"segment_ids must have one integer dtype, got {dtypes[0]} and {dtypes[1]}: no "
                "dtype has the values of both"
            )
        size = max(size, 2 * large)
    dtype = jnp.int64 if size > 4 else jnp.int32
    return _cast(query_ids, dtype), _cast(key_ids, dtype)


def _cast(ids, dtype):
    return jax.ShapeDtypeStruct(ids.shape, dtype) if _is_abstract(ids) else ids.astype(dtype)


def _band(is_causal, local_window_size) -> tuple[int | None, int | None]:
    """(left, right) of the keys that a query sees around its position."""
    left = right = None
    if local_window_size is not None:
        sides = local_window_size
        if not isinstance(sides, (tuple, list)):
            sides = (sides, sides)
        if len(sides) != 2:
            raise ValueError(
                f"local_window_size must be an int or a pair (left, right), got {local_window_size}"
            )
        left, right = (_window_side(side, local_window_size) for side in sides)
    if _flag("is_causal", is_causal):
        right = 0
    return left, right


def _window_side(side, window) -> int | None:
    if side is None:
        return None
    try:
        side = operator.index(side)
    except TypeError:
        side = -1
    if side < 0:
        raise ValueError(
            "local_window_size must be a non-negative int or a pair (left, right) of non-negative "
            f"ints or None (no limit), got {window}"
        )
    return side


def _is_traced_scale(scale) -> bool:
    if not isinstance(scale, jax.core.Tracer | jax.ShapeDtypeStruct):
        return False
    if scale.shape != () or not jnp.issubdtype(scale.dtype, jnp.floating):
        raise ValueError(
            "scale must be a Python number or a floating scalar, got "
            f"{scale.dtype} of shape {scale.shape}"
        )
    return True


def _scale(scale, head_dim) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    scale = _number("scale", scale)
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    return scale


def _soft_cap(cap) -> float | None:
    if cap is None:
        return None
    cap = _number("logits_soft_cap", cap)
    if not (math.isfinite(cap) and cap > 0.0):
        raise ValueError(f"logits_soft_cap must be positive and finite, got {cap}")
    return cap


def _dropout_rate(rate) -> float:
    rate = _number("dropout_rate", rate)
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout_rate must lie in [0, 1), got {rate}")
    return rate


def _number(name: str, x) -> float:
    if isinstance(x, bool | str | jax.core.Tracer):
        raise ValueError(f"{name} must be a Python number known at trace time, got {x!r}")
    try:
        return float(x)
    except TypeError as error:
        raise ValueError(f"{name} must be a number, got {type(x).__name__}") from error


def _flag(name: str, x) -> bool:
    if isinstance(x, jax.core.Tracer):
        raise ValueError(
            f"{name} must be known at trace time, got a traced {x.dtype}: name it in "
            "static_argnames of jax.jit, or choose between two calls with jax.lax.cond"
        )
    if not isinstance(x, (bool, np.bool_)):
        raise ValueError(f"{name} must be True or False, got {x!r}")
    return bool(x)


def _one_of(name: str, x, allowed, extra: str = "") -> Any:
    if not isinstance(x, str) or x not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}{extra}, got {x!r}")
    return x


def _per_head(name: str, x, q_heads, shapes):
    if x is None:
        return None
    x = _array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name} must have a floating dtype, got {x.dtype}")
    if x.shape not in shapes:
        allowed = " or ".join(map(str, dict.fromkeys(shapes)))
        raise ValueError(f"{name} must have shape {allowed}, got {x.shape}")
    return x


def _dropout_seed(rng):
    """The first two words of a PRNG key, old style (uint32 array) or new (jax.random.key)."""
    is_array = isinstance(rng, jax.Array) or _is_abstract(rng)
    if is_array and jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        if rng.shape != ():
            raise ValueError(f"dropout_rng must be a single PRNG key, got key shape {rng.shape}")
        if _is_abstract(rng):
            return jax.ShapeDtypeStruct((2,), jnp.uint32)
        rng = jax.random.key_data(rng)
    rng = _array("dropout_rng", rng)
    if rng.dtype != jnp.uint32 or len(rng.shape) != 1 or rng.shape[0] < 2:
        raise ValueError(
            f"dropout_rng must be a PRNG key, got an array of shape {rng.shape}, dtype {rng.dtype}"
        )
    return jax.ShapeDtypeStruct((2,), jnp.uint32) if _is_abstract(rng) else rng[:2]


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


def _is_abstract(x) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)
