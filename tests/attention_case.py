"""An attention call as one value, its arrays, and which keys its queries see.

It holds everything that a call of `jaxflash.dot_product_attention`, or of `varlen_attention`,
depends on: sizes, dtype, every argument, and the seed of its arrays. Letters: B batch, T query
length, S key length, N query heads, K key/value heads, H query/key head size, h value head size.
The rows that tests run over are in cases.py.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
import numpy as np

import mask_values
from mask_values import MASK_VALUES
from score_mods import SCORE_MODS, Sizes

KERNEL_DTYPES = ("float16", "bfloat16", "float32")
KERNEL_MAX_HEAD_SIZE = 256

# Operands with a gradient, in the order in which tests name them.
DIFFERENTIABLE = ("query", "key", "value", "bias", "sink", "alibi_slopes")
# Arrays that a score function captures are named with it in front; floating ones have a gradient.
CAPTURED = "score_mod."
# Arrays of a mask value, which have none.
OF_MASK = "mask_value."


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """One call. `bias` and `mask` are shapes in letters ("BNTS", "1NTS", "TS", "B11S"): B stands
    for all batch axes, 1 for an axis of size one. Lengths are flat over the batch axes."""

    name: str
    q_len: int = 48
    kv_len: int | None = None  # None: q_len
    q_heads: int = 2
    kv_heads: int | None = None  # None: q_heads
    head_dim: int = 32
    value_dim: int | None = None  # None: head_dim
    batch: tuple[int, ...] = (2,)
    dtype: str = "float32"
    scale: float | None = None
    is_causal: bool = False
    causal_alignment: str = "top_left"
    local_window_size: int | tuple[int | None, int | None] | None = None
    query_lengths: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    bias: str | None = None
    bias_dtype: str | None = None  # None: dtype
    bias_hides: bool = False  # some entries of the bias are -inf, and a whole row
    mask: str | None = None
    mask_value: str | None = None  # a name of mask_values.MASK_VALUES; beside a mask: & it
    # "shared": one array; "pair": (query ids, key ids); "apart": one, ids that come back, some of
    # them a multiple of twice the length apart
    segments: str | None = None
    # Packed sequences: how many queries and how many keys each has. One tuple for both: they have
    # the same boundaries.
    packed: tuple[tuple[int, ...], tuple[int, ...]] | tuple[tuple[int, ...]] | None = None
    logits_soft_cap: float | None = None
    sink: bool = False
    alibi: str | None = None  # "N" or "BN"
    score_mod: str | None = None  # a name of score_mods.SCORE_MODS
    dropout_rate: float = 0.0
    precision: str | None = None
    deterministic_backward: bool = False
    magnitude: float = 1.0  # standard deviation of the logits, before scale changes it
    # NaN and infinity in keys, values, query rows and cotangents that nothing may read; "keys":
    # in keys and values alone, where only two masks together hide rows.
    poison: bool | Literal["keys"] = False
    visible_nan: bool = False  # NaN in one query row: exactly that row of the output is NaN
    gpu_only: bool = False  # too large for two CPU cores
    seed: int = 0

    def __repr__(self) -> str:
        """Only what differs from the defaults, so that a failing row reads as one line."""
        changed = (
            f"{f.name}={getattr(self, f.name)!r}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        )
        return f"AttentionCase({', '.join(changed)})"

    # ---- sizes ----------------------------------------------------------------------------------

    @property
    def kv_length(self) -> int:
        return self.q_len if self.kv_len is None else self.kv_len

    @property
    def num_kv_heads(self) -> int:
        return self.q_heads if self.kv_heads is None else self.kv_heads

    @property
    def value_size(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "query": (*self.batch, self.q_len, self.q_heads, self.head_dim),
            "key": (*self.batch, self.kv_length, self.num_kv_heads, self.head_dim),
            "value": (*self.batch, self.kv_length, self.num_kv_heads, self.value_size),
            "out": (*self.batch, self.q_len, self.q_heads, self.value_size),
            "lse": (*self.batch, self.q_len, self.q_heads),
            "logits": (*self.batch, self.q_heads, self.q_len, self.kv_length),
        }

    @property
    def _sizes(self) -> Sizes:
        if self.packed is not None:
            longest = max(self.packed[0], default=0), max(self.packed[-1], default=0)
            return Sizes(len(self.packed[0]), self.q_heads, *longest)
        return Sizes(math.prod(self.batch), self.q_heads, self.q_len, self.kv_length)

    def _broadcast_shape(self, letters: str) -> tuple[int, ...]:
        sizes = {
            "B": self.batch,
            "N": (self.q_heads,),
            "T": (self.q_len,),
            "S": (self.kv_length,),
            "1": (1,),
        }
        return tuple(size for letter in letters for size in sizes[letter])

    # ---- what the kernels cover -----------------------------------------------------------------

    @property
    def missing_in_kernels(self) -> tuple[str, ...]:
        """Names that the error of implementation="cuda" must mention; empty if it must run."""
        missing = []
        if self.dtype not in KERNEL_DTYPES:
            missing.append(self.dtype)
        if max(self.head_dim, self.value_size) > KERNEL_MAX_HEAD_SIZE:
            missing.append("head size")
        if self.mask_value is not None and not MASK_VALUES[self.mask_value].on_kernels:
            missing.append("mask")
        return tuple(missing)

    # ---- the call -------------------------------------------------------------------------------

    def function(self, module):
        """What is called, of `jaxflash` or of `jaxflash.reference`."""
        return module.dot_product_attention if self.packed is None else module.varlen_attention

    @property
    def options(self) -> dict:
        """The static keyword arguments of the call that differ from their defaults."""
        options = dict(
            scale=self.scale,
            is_causal=self.is_causal or None,
            local_window_size=self.local_window_size,
            logits_soft_cap=self.logits_soft_cap,
            dropout_rate=self.dropout_rate or None,
            precision=self.precision,
            deterministic_backward=self.deterministic_backward or None,
            causal_alignment=None if self.causal_alignment == "top_left" else self.causal_alignment,
        )
        return {name: value for name, value in options.items() if value is not None}

    def arrays(self, clean: bool = False) -> dict[str, np.ndarray]:
        """The array arguments by name, as numpy arrays of their final dtypes. `clean` leaves the
        poison out, for a truth that does not depend on how it is dealt with."""
        rng = np.random.default_rng(self.seed)

        def normal(shape, dtype, factor=1.0):
            return (factor * rng.standard_normal(shape, np.float32)).astype(jnp.dtype(dtype))

        shapes = self.shapes
        arrays = {
            "query": normal(shapes["query"], self.dtype, self.magnitude),
            "key": normal(shapes["key"], self.dtype),
            "value": normal(shapes["value"], self.dtype),
        }
        if self.bias is not None:
            bias = normal(self._broadcast_shape(self.bias), self.bias_dtype or self.dtype)
            if self.bias_hides:
                bias[rng.random(bias.shape) < 0.3] = -np.inf
                bias[..., : bias.shape[-2] // 4, :] = -np.inf
            arrays["bias"] = bias
        if self.mask is not None:
            mask = rng.random(self._broadcast_shape(self.mask)) < 0.7
            if mask.shape[-2] > 4:
                mask[..., 2, :] = False  # a row that sees nothing
            if mask.shape[-1] > 4:
                mask[..., 3] = False  # a key that nothing sees
            arrays["mask"] = mask
        for name, lengths in (
            ("query_seq_lengths", self.query_lengths),
            ("key_value_seq_lengths", self.kv_lengths),
        ):
            if lengths is not None:
                arrays[name] = np.array(lengths, np.int32).reshape(self.batch)
        if self.segments is not None:
            query_ids = self._segments(rng, self.q_len)
            arrays["segment_ids"] = query_ids
            if self.segments == "pair":
                # Starts at another id, so that some queries and some keys find no partner.
                arrays["segment_ids"] = (query_ids, self._segments(rng, self.kv_length) + 1)
            elif self.segments == "holes":
                arrays["segment_ids"] = (
                    _without_some(rng, query_ids, -1),
                    _without_some(rng, self._segments(rng, self.kv_length), -2),
                )
        if self.sink:
            arrays["sink"] = normal((self.q_heads,), "float32")
        if self.alibi is not None:
            shape = self._broadcast_shape(self.alibi)
            arrays["alibi_slopes"] = (0.02 + 0.3 * rng.random(shape)).astype(np.float32)
        if self.score_mod is not None:
            captured = SCORE_MODS[self.score_mod].arrays(self._sizes, rng)
            arrays |= {CAPTURED + name: x for name, x in captured.items()}
        if self.mask_value is not None:
            own = MASK_VALUES[self.mask_value].arrays(self._sizes, rng)
            arrays |= {OF_MASK + name: x for name, x in own.items()}
        if self.dropout_rate:
            arrays["dropout_rng"] = np.array([self.seed, 7], np.uint32)
        if self.visible_nan:
            arrays["query"][..., self.q_len // 2, :, :] = np.nan
        if self.poison and not clean:
            self._poison(arrays)
        return arrays

    def arguments(self, arrays: dict) -> dict:
        """Keyword arguments of a call with these arrays, or others of their names."""
        arguments = {
            name: x for name, x in arrays.items() if not name.startswith((CAPTURED, OF_MASK))
        }
        if self.mask_value is not None:
            mask = MASK_VALUES[self.mask_value].bind(_of_mask(arrays), self.batch)
            arguments["mask"] = mask & arguments["mask"] if "mask" in arguments else mask
        if self.score_mod is not None:
            arguments["score_mod"] = self.bound_score_mod(arrays)
        if self.packed is not None:
            edges = [_edges(lengths) for lengths in self.packed]
            arguments |= {"cu_seqlens_q": edges[0], "cu_seqlens_kv": edges[-1]}
        return arguments | self.options

    def bound_score_mod(self, arrays: dict):
        """The score function of these captured arrays."""
        captured = {
            name.removeprefix(CAPTURED): x
            for name, x in arrays.items()
            if name.startswith(CAPTURED)
        }
        return SCORE_MODS[self.score_mod].bind(captured)

    def _segments(self, rng, length) -> np.ndarray:
        starts = rng.random((*self.batch, length)) < 4.0 / max(length, 1)
        numbers = np.cumsum(starts, axis=-1).astype(np.int32)
        if self.segments == "apart":
            apart = np.array([3, 3 + 2 * length, -(2**31), 3 - 4 * length, 2**31 - 1])
            numbers = apart[numbers % 5]
        return numbers.astype(np.int32)

    def _poison(self, arrays) -> None:
        visible = visibility(self, arrays)
        group = self.q_heads // self.num_kv_heads
        by_key = visible.any(axis=-2)  # (*B, N, S)
        by_key = by_key.reshape(*self.batch, self.num_kv_heads, group, self.kv_length).any(axis=-2)
        hidden = ~np.moveaxis(by_key, -1, -2)  # (*B, S, K)
        assert hidden.any() or self.query_lengths is not None, "nothing to poison"
        arrays["key"][hidden] = np.nan
        arrays["value"][hidden] = np.inf
        arrays["value"][hidden & (np.arange(self.kv_length)[:, None] % 2 == 0)] = np.nan
        if self.poison != "keys":
            arrays["query"][_blind(visible)] = np.nan

    def cotangents(self, clean: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Random cotangents of out and lse; where lse is -inf, its own must be ignored. `clean` as
        of `arrays`."""
        rng = np.random.default_rng(self.seed + 1)
        out = rng.standard_normal(self.shapes["out"], np.float32).astype(jnp.dtype(self.dtype))
        lse = rng.standard_normal(self.shapes["lse"], np.float32)
        if self.poison and self.poison != "keys" and not clean:
            rows = _blind(visibility(self, self.arrays(clean=True)))
            out[rows] = lse[rows] = np.nan
        return out, lse


def _blind(visible) -> np.ndarray:
    """Rows that see no key, in no head, (*B, T)."""
    return ~visible.any(axis=(-3, -1))


def _without_some(rng, ids, nobodys: int) -> np.ndarray:
    """Ids with one that nobody else has in a fifth of the places, single ones and runs."""
    single = rng.random(ids.shape) < 0.1
    start = rng.integers(ids.shape[-1] // 2)
    run = np.arange(ids.shape[-1]) - start
    return np.where(single | ((run >= 0) & (run < ids.shape[-1] // 8)), nobodys, ids).astype(
        np.int32
    )


def _edges(lengths: tuple[int, ...]) -> np.ndarray:
    return np.cumsum((0, *lengths)).astype(np.int32)


def sequences(lengths: tuple[int, ...], tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each packed token its sequence, -1 behind the last, and where that begins."""
    edges = _edges(lengths)
    number = np.searchsorted(edges, np.arange(tokens), side="right") - 1
    return np.where(number < len(lengths), number, -1), edges[number]


def local_indices(case: AttentionCase, b, q, kv):
    """Those of a score function, given the numbers of batch element, row and column."""
    if case.packed is None:
        return b, q, kv
    (number, q_begins), (_, kv_begins) = (
        sequences(lengths, tokens)
        for lengths, tokens in zip(
            (case.packed[0], case.packed[-1]), (case.q_len, case.kv_length), strict=True
        )
    )
    return number[q], q - q_begins[q], kv - kv_begins[kv]


def _of_mask(arrays) -> dict:
    return {n.removeprefix(OF_MASK): x for n, x in arrays.items() if n.startswith(OF_MASK)}


def positions(case: AttentionCase, arrays) -> np.ndarray:
    """The key position (*B, T) at which each query stands."""
    rows = np.broadcast_to(np.arange(case.q_len), (*case.batch, case.q_len))
    if case.packed is not None:
        number, begin = sequences(case.packed[0], case.q_len)
        q_lengths, kv_lengths = (np.array((*x, 0)) for x in (case.packed[0], case.packed[-1]))
        key_begin = _edges(case.packed[-1])[number]
        shift = (kv_lengths - q_lengths)[number] if case.causal_alignment != "top_left" else 0
        return rows - begin + key_begin + shift
    if case.causal_alignment == "top_left":
        return rows
    q_lengths = np.clip(arrays.get("query_seq_lengths", case.q_len), 0, case.q_len)
    kv_lengths = np.clip(arrays.get("key_value_seq_lengths", case.kv_length), 0, case.kv_length)
    return rows + np.asarray(kv_lengths - q_lengths)[..., None]


def visibility(case: AttentionCase, arrays) -> np.ndarray:
    """Which keys each query sees, (*B, N, T, S): the definition, written with numpy alone."""
    keys = np.arange(case.kv_length)
    position = positions(case, arrays)[..., :, None]  # (*B, T, 1)
    visible = np.ones((*case.batch, case.q_len, case.kv_length), bool)
    window = case.local_window_size
    left, right = window if isinstance(window, tuple) else (window, window)
    if left is not None:
        visible &= keys >= position - left
    if right is not None:
        visible &= keys <= position + right
    if case.is_causal:
        visible &= keys <= position
    if "query_seq_lengths" in arrays:
        rows = np.arange(case.q_len)[:, None]
        visible &= rows < arrays["query_seq_lengths"][..., None, None]
    if "key_value_seq_lengths" in arrays:
        visible &= keys < arrays["key_value_seq_lengths"][..., None, None]
    if "segment_ids" in arrays:
        ids = arrays["segment_ids"]
        query_ids, key_ids = ids if isinstance(ids, tuple) else (ids, ids)
        visible &= query_ids[..., :, None] == key_ids[..., None, :]
    if case.packed is not None:
        query_ids, _ = sequences(case.packed[0], case.q_len)
        key_ids, _ = sequences(case.packed[-1], case.kv_length)
        visible &= (query_ids[:, None] == key_ids) & (query_ids >= 0)[:, None]
    visible = np.broadcast_to(visible[..., None, :, :], case.shapes["logits"])
    if "mask" in arrays:
        visible = visible & to_rank(arrays["mask"], visible.ndim)
    if case.mask_value is not None:
        *batch, heads, q_len, kv_len = case.shapes["logits"]
        shape = math.prod(batch), heads, q_len, kv_len
        of_call = (arrays.get(name) for name in ("query_seq_lengths", "key_value_seq_lengths"))
        lengths = tuple(None if x is None else x.reshape(-1) for x in of_call)
        own = mask_values.visible(MASK_VALUES[case.mask_value], _of_mask(arrays), shape, lengths)
        visible = visible & own.reshape(case.shapes["logits"])
    return visible


def to_rank(x, rank: int):
    """A bias or mask with as many axes as the logits: leading axes of one come or go."""
    return x.reshape((1,) * (rank - x.ndim) + x.shape[max(x.ndim - rank, 0) :])
