"""Attention calls as named rows, shared by the tests and the benchmarks.

A row holds everything that a call of `jaxflash.dot_product_attention`, or of `varlen_attention`,
depends on: sizes, dtype, every argument, and the seed of its arrays. Letters: B batch, T query
length, S key length, N query heads, K key/value heads, H query/key head size, h value head size.
"""

from __future__ import annotations

import dataclasses
import math

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
    poison: bool = False  # NaN and infinity in keys, values and query rows that nothing may read
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

    @property
    def flops(self) -> float:
        """Floating-point operations of the forward pass over the whole rectangle of logits."""
        products = self.head_dim + self.value_size
        return 2.0 * math.prod(self.shapes["logits"]) * products

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
        if "query_seq_lengths" in arrays:
            rows = np.arange(self.q_len) >= arrays["query_seq_lengths"][..., None]
            arrays["query"][rows] = np.nan

    def cotangents(self) -> tuple[np.ndarray, np.ndarray]:
        """Random cotangents of out and lse; where lse is -inf, its own must be ignored."""
        rng = np.random.default_rng(self.seed + 1)
        out = rng.standard_normal(self.shapes["out"], np.float32).astype(jnp.dtype(self.dtype))
        return out, rng.standard_normal(self.shapes["lse"], np.float32)


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


# ---- The rows -----------------------------------------------------------------------------------


def _row(name: str, **fields) -> AttentionCase:
    # Every row has its own data: a seed that depends on the name alone, not on the order.
    return AttentionCase(name, seed=sum(map(ord, name)) % 1000, **fields)


# Plain calls: dtypes, head sizes (native and odd ones), lengths around tile edges.
BASE = (
    _row("plain", q_len=128, head_dim=64),
    _row("bfloat16", q_len=128, head_dim=64, dtype="bfloat16"),
    _row("float16", q_len=128, head_dim=64, dtype="float16"),
    _row("float32-highest", q_len=128, head_dim=64, precision="highest"),
    _row("bfloat16-causal-128", q_len=160, head_dim=128, dtype="bfloat16", is_causal=True),
    _row("float16-causal-256", q_len=100, head_dim=256, dtype="float16", is_causal=True),
    _row("float32-causal-256", q_len=70, head_dim=256, is_causal=True, batch=(1,)),
    _row("head-1", head_dim=1, dtype="bfloat16"),
    _row("head-7-value-3", head_dim=7, value_dim=3, dtype="float16"),
    _row("head-40", head_dim=40, dtype="bfloat16", is_causal=True),
    _row("head-80-value-112", head_dim=80, value_dim=112, dtype="bfloat16"),
    _row("head-96-float32", head_dim=96, value_dim=33, precision="highest"),
    _row("head-192-value-128", head_dim=192, value_dim=128, dtype="bfloat16", is_causal=True),
    _row("head-16-value-256", head_dim=16, value_dim=256, dtype="float16"),
    _row("head-256-value-1", head_dim=256, value_dim=1, dtype="bfloat16"),
    _row("head-320", q_len=20, head_dim=320, dtype="bfloat16"),
    _row("T-1", q_len=1, kv_len=77, head_dim=64, dtype="bfloat16"),
    _row("S-1", q_len=77, kv_len=1, head_dim=64, dtype="bfloat16"),
    _row("T-1-S-1", q_len=1, kv_len=1, dtype="float16"),
    _row("T-63-S-65", q_len=63, kv_len=65, head_dim=64, dtype="bfloat16"),
    _row("T-129-S-127", q_len=129, kv_len=127, head_dim=64, dtype="float16"),
    # Tiles of three units of rows, which such numbers of queries fill better than those of four.
    _row("T-264-S-320-64", q_len=264, kv_len=320, head_dim=64, dtype="bfloat16"),
    _row("T-384-64", q_len=384, head_dim=64, dtype="bfloat16"),
    _row("T-330-lengths-64", q_len=330, head_dim=64, dtype="float16", kv_lengths=(330, 200)),
    _row("T-570-causal-64", q_len=570, head_dim=64, dtype="bfloat16", is_causal=True),
    _row("T-193-S-97", q_len=193, kv_len=97, head_dim=128, dtype="bfloat16", is_causal=True),
    _row("T-65-float32", q_len=65, kv_len=33),
    _row("unbatched", batch=(), dtype="bfloat16"),
    _row("unbatched-one-head", batch=(), q_heads=1, q_len=90, head_dim=64, is_causal=True),
    _row("three-batch-axes", batch=(2, 1, 3), q_len=17, dtype="bfloat16"),
    _row("large-logits", magnitude=3e3, dtype="bfloat16"),
    _row("large-logits-float32", magnitude=1e4, precision="highest", is_causal=True),
    _row("large-logits-64", q_len=200, head_dim=64, magnitude=1e4, dtype="float16"),
    _row(
        "large-logits-128", q_len=200, head_dim=128, magnitude=1e4, dtype="bfloat16", is_causal=True
    ),
    _row("large-logits-256", q_len=140, head_dim=256, magnitude=1e4, dtype="bfloat16"),
    _row("scale", scale=0.37, dtype="bfloat16"),
    _row("scale-negative", scale=-0.2, is_causal=True),
    _row("scale-zero", scale=0.0, dtype="bfloat16"),
    _row("deterministic", q_len=150, head_dim=64, dtype="bfloat16", deterministic_backward=True),
)

# Every pair of head sizes that has a kernel of its own on some GPU, and sizes that fill it in part;
# lengths past one tile of rows and several of keys.
HEADS = (
    _row("head-64-value-128", q_len=200, head_dim=64, value_dim=128, dtype="bfloat16"),
    _row("head-80", q_len=195, kv_len=230, head_dim=80, dtype="bfloat16", is_causal=True),
    _row("head-96", q_len=200, kv_len=225, head_dim=96, dtype="bfloat16",
         local_window_size=(90, 40)),
    _row("head-96-float16", q_len=193, head_dim=96, dtype="float16", is_causal=True, q_heads=4,
         kv_heads=2, query_lengths=(193, 100), kv_lengths=(113, 193)),
    _row("head-112", q_len=130, head_dim=112, dtype="float16"),
    _row("head-128-value-192", q_len=130, head_dim=128, value_dim=192, dtype="bfloat16"),
    _row("head-160", q_len=129, kv_len=230, head_dim=160, dtype="bfloat16", is_causal=True,
         causal_alignment="bottom_right"),
    _row("head-192", q_len=140, kv_len=225, head_dim=192, dtype="float16", kv_lengths=(225, 111)),
    _row("head-192-value-128-long", q_len=200, kv_len=245, head_dim=192, value_dim=128,
         dtype="bfloat16", kv_lengths=(160, 245)),
    _row("head-192-value-64", q_len=100, head_dim=192, value_dim=64, dtype="float16",
         is_causal=True),
)  # fmt: skip

# Each feature of the kernels alone, and the pairs that share code.
BANDS = (
    _row("gqa", q_heads=6, kv_heads=2, dtype="bfloat16"),
    _row("mqa-causal", q_heads=5, kv_heads=1, dtype="float16", is_causal=True),
    _row("causal-T<S", q_len=40, kv_len=100, is_causal=True, dtype="bfloat16"),
    _row("causal-T>S", q_len=100, kv_len=40, is_causal=True, dtype="bfloat16"),
    _row("bottom-right-T<S", q_len=40, kv_len=130, is_causal=True,
         causal_alignment="bottom_right", dtype="bfloat16"),
    # The first 60 rows see nothing.
    _row("bottom-right-T>S", q_len=100, kv_len=40, is_causal=True,
         causal_alignment="bottom_right"),
    _row("window", q_len=150, local_window_size=(20, 10), dtype="bfloat16"),
    _row("window-int", local_window_size=5),
    _row("window-left", q_len=150, local_window_size=(33, None), dtype="bfloat16"),
    _row("window-right", q_len=70, kv_len=150, local_window_size=(None, 7), dtype="float16"),
    _row("window-zero", local_window_size=0, dtype="bfloat16"),
    _row("window-causal", q_len=200, local_window_size=(64, 0), is_causal=True, head_dim=64,
         dtype="bfloat16"),
    _row("window-causal-right", local_window_size=(9, 4), is_causal=True),
    # Rows past key 40 + 3 see nothing; no key tile is visible to the last query tile.
    _row("window-T>S", q_len=200, kv_len=40, local_window_size=(3, 3), dtype="bfloat16"),
    _row("window-bottom-right", q_len=50, kv_len=120, local_window_size=(16, 3),
         causal_alignment="bottom_right", dtype="bfloat16"),
    _row("lengths", q_len=70, kv_len=90, query_lengths=(70, 33), kv_lengths=(41, 90),
         dtype="bfloat16"),
    _row("lengths-kv", kv_lengths=(0, 48), dtype="bfloat16"),
    _row("lengths-q", query_lengths=(0, 1), dtype="float16"),
    _row("lengths-unbatched", batch=(), query_lengths=(30,), kv_lengths=(20,)),
    # Negative lengths count as none, lengths past the arrays as all.
    _row("lengths-outside", query_lengths=(-3, 500), kv_lengths=(500, -1)),
    _row("lengths-batch-axes", batch=(2, 2), query_lengths=(48, 3, 20, 0),
         kv_lengths=(1, 48, 17, 30), is_causal=True, dtype="bfloat16"),
    _row("lengths-causal", q_len=130, query_lengths=(130, 65), kv_lengths=(64, 129),
         is_causal=True, head_dim=64, dtype="bfloat16"),
    _row("lengths-bottom-right", q_len=60, kv_len=100, query_lengths=(60, 21),
         kv_lengths=(80, 15), is_causal=True, causal_alignment="bottom_right"),
    _row("lengths-window-gqa", q_len=80, kv_len=80, q_heads=4, kv_heads=2,
         query_lengths=(80, 41), kv_lengths=(64, 80), local_window_size=(12, 5), dtype="bfloat16"),
    _row("gqa-causal-deterministic", q_len=140, q_heads=4, kv_heads=1, head_dim=64,
         is_causal=True, dtype="bfloat16", deterministic_backward=True),
)  # fmt: skip

# What changes scores and who sees whom beyond a band: each alone, every broadcast shape, and the
# pairs that interact.
SCORES = (
    _row("bias", bias="BNTS"),
    _row("bias-bfloat16", bias="1NTS", dtype="bfloat16", q_heads=4, kv_heads=2),
    _row("bias-float32-of-bfloat16", bias="B1TS", bias_dtype="float32", dtype="bfloat16"),
    _row("bias-3d", bias="NTS", is_causal=True),
    _row("bias-2d", bias="TS"),
    _row("bias-4d-unbatched", bias="1NTS", batch=()),
    _row("bias-rows", bias="BNT1"),
    _row("bias-keys", bias="B11S", batch=(2, 2), q_len=20),
    _row("bias-hides", bias="11TS", bias_hides=True),
    _row("mask", mask="BNTS", dtype="bfloat16"),
    _row("mask-keys", mask="B11S", q_heads=4, kv_heads=1),
    _row("mask-rows", mask="1NT1"),
    _row("mask-2d", mask="TS", is_causal=True),
    _row("mask-4d-unbatched", mask="1NTS", batch=()),
    _row("segments", segments="shared", dtype="bfloat16"),
    _row("segments-pair", segments="pair", kv_len=70),
    _row("segments-apart", segments="apart", q_len=50),
    _row("segments-causal-gqa", segments="shared", is_causal=True, q_heads=4, kv_heads=2, q_len=80),
    _row("soft-cap", logits_soft_cap=1.5),
    _row("soft-cap-bias-mask", logits_soft_cap=2.0, bias="BNTS", mask="B1TS"),
    _row("soft-cap-large-logits", logits_soft_cap=30.0, magnitude=1e3, is_causal=True),
    _row("sink", sink=True, dtype="bfloat16"),
    _row("sink-causal-gqa-window", sink=True, q_heads=4, kv_heads=2, is_causal=True,
         local_window_size=(8, None)),
    # Rows without a key: the sink must not bring them to life.
    _row("sink-lengths", sink=True, kv_lengths=(0, 20), query_lengths=(48, 7)),
    _row("alibi", alibi="N"),
    _row("alibi-batch-causal", alibi="BN", is_causal=True, q_heads=4, kv_heads=2,
         dtype="bfloat16"),
    _row("alibi-bottom-right", alibi="N", q_len=20, kv_len=50, is_causal=True,
         causal_alignment="bottom_right"),
    _row("dropout", dropout_rate=0.3),
    _row("dropout-causal-gqa", dropout_rate=0.1, is_causal=True, q_heads=4, kv_heads=2,
         dtype="bfloat16"),
    _row("everything", bias="BNTS", mask="11TS", segments="shared", logits_soft_cap=3.0, sink=True,
         alibi="N", dropout_rate=0.2, is_causal=True, local_window_size=(30, 2), q_heads=4,
         kv_heads=2, query_lengths=(48, 40), kv_lengths=(48, 44), scale=0.3, dtype="bfloat16"),
)  # fmt: skip

# The same past one tile of rows and of keys, at the kernels' head sizes.
SCORES_OF_TILES = (
    _row("tiles-segments-64", segments="shared", q_len=330, q_heads=4, kv_heads=2, head_dim=64,
         dtype="bfloat16", gpu_only=True),
    _row("tiles-segments-apart-128", segments="apart", q_len=700, head_dim=128, dtype="bfloat16"),
    _row("tiles-segments-causal-128", segments="shared", q_len=400, head_dim=128, is_causal=True,
         dtype="float16"),
    _row("tiles-segments-pair-256", segments="pair", q_len=200, kv_len=330, head_dim=256,
         dtype="bfloat16", gpu_only=True),
    _row("tiles-segments-window-128", segments="shared", q_len=500, head_dim=128,
         local_window_size=(70, 20), dtype="bfloat16", gpu_only=True),
    _row("tiles-dropout-128", dropout_rate=0.3, q_len=300, kv_len=410, head_dim=128,
         dtype="bfloat16", gpu_only=True),
    _row("tiles-dropout-causal-64", dropout_rate=0.1, q_len=300, q_heads=4, kv_heads=2,
         head_dim=64, is_causal=True, dtype="float16", gpu_only=True),
    _row("tiles-dropout-256", dropout_rate=0.5, q_len=150, kv_len=300, head_dim=256,
         dtype="bfloat16", gpu_only=True),
    _row("tiles-bias-128", bias="1NTS", q_len=300, kv_len=350, head_dim=128, dtype="bfloat16",
         gpu_only=True),
    # Of a multiple of 8 keys and 16 bits: it comes beside the keys.
    _row("tiles-bias-loaded-64", bias="BNTS", q_len=300, kv_len=360, q_heads=4, kv_heads=2,
         head_dim=64, dtype="bfloat16", is_causal=True, gpu_only=True),
    _row("tiles-bias-loaded-96", bias="B1TS", batch=(2, 2), q_len=200, kv_len=264, head_dim=96,
         dtype="float16", local_window_size=(70, 20), gpu_only=True),
    _row("tiles-bias-loaded-128", bias="1NTS", q_len=300, kv_len=344, q_heads=4, kv_heads=2,
         head_dim=128, dtype="bfloat16", gpu_only=True),
    # 6 units of rows, which fill other tiles.
    _row("tiles-bias-loaded-6-units-64", bias="1NTS", q_len=370, kv_len=264, head_dim=64,
         dtype="bfloat16", gpu_only=True),
    _row("tiles-bias-loaded-6-units-96", bias="1NTS", q_len=340, kv_len=200, head_dim=96,
         dtype="bfloat16", is_causal=True, gpu_only=True),
    _row("tiles-bias-loaded-6-units-128", bias="BNTS", q_len=384, kv_len=400, head_dim=128,
         dtype="float16", gpu_only=True),
    _row("tiles-dropout-6-units-64", dropout_rate=0.2, q_len=380, kv_len=300, head_dim=64,
         dtype="bfloat16", gpu_only=True),
    # Steps of which one warpgroup's keys see none.
    _row("tiles-bias-loaded-causal-128", bias="1NTS", q_len=330, kv_len=400, q_heads=4, kv_heads=2,
         head_dim=128, dtype="bfloat16", is_causal=True, gpu_only=True),
    _row("tiles-bias-loaded-hides-128", bias="BNTS", bias_hides=True, q_len=1000, kv_len=1000,
         head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("tiles-bias-loaded-192-128", bias="TS", q_len=260, kv_len=320, head_dim=192, value_dim=128,
         dtype="bfloat16", sink=True, gpu_only=True),
    _row("tiles-bias-loaded-192", bias="1NTS", q_len=130, kv_len=136, head_dim=192,
         dtype="float16", is_causal=True, causal_alignment="bottom_right", gpu_only=True),
    _row("tiles-bias-loaded-256", bias="NTS", q_len=200, kv_len=312, head_dim=256,
         dtype="bfloat16", is_causal=True, gpu_only=True),
    _row("tiles-bias-loaded-few-128", bias="BNTS", q_len=9, kv_len=24, head_dim=128,
         dtype="bfloat16", gpu_only=True),
    _row("tiles-bias-loaded-mask-dropout-128", bias="1NTS", mask="B1TS", dropout_rate=0.3,
         q_len=200, kv_len=336, head_dim=128, dtype="bfloat16", gpu_only=True),
    # What goes through a soft cap starts products as well.
    _row("tiles-bias-loaded-cap-64", bias="1NTS", logits_soft_cap=2.0, q_len=400, kv_len=336,
         q_heads=4, kv_heads=2, head_dim=64, dtype="bfloat16", gpu_only=True),
    _row("tiles-bias-loaded-cap-causal-128", bias="BNTS", logits_soft_cap=2.0, alibi="N",
         q_len=330, kv_len=400, head_dim=128, is_causal=True, dtype="float16", gpu_only=True),
    _row("tiles-bias-loaded-cap-hides-128", bias="BNTS", bias_hides=True, logits_soft_cap=2.0,
         q_len=400, kv_len=400, head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("tiles-bias-loaded-cap-mask-dropout-192-128", bias="TS", logits_soft_cap=2.0,
         mask="B1TS", dropout_rate=0.3, q_len=260, kv_len=320, head_dim=192, value_dim=128,
         dtype="bfloat16", sink=True, gpu_only=True),
    _row("tiles-bias-loaded-cap-256", bias="NTS", logits_soft_cap=2.0, q_len=200, kv_len=312,
         head_dim=256, is_causal=True, dtype="bfloat16", gpu_only=True),
    _row("tiles-bias-key-columns-cap-128", bias="BN1S", logits_soft_cap=2.0, q_len=600,
         kv_len=350, head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("tiles-bias-keys-cap-256", bias="BN1S", logits_soft_cap=2.0, q_len=200, kv_len=310,
         head_dim=256, dtype="float16", gpu_only=True),
    _row("tiles-bias-loaded-mask-64", bias="1NTS", mask="BNTS", q_len=400, kv_len=336, q_heads=4,
         kv_heads=2, head_dim=64, dtype="bfloat16", gpu_only=True),
    _row("tiles-bias-loaded-padding-64", bias="1NTS", mask="B11S", poison=True, q_len=300,
         kv_len=400, head_dim=40, dtype="float16", sink=True, gpu_only=True),
    _row("tiles-bias-loaded-padding-causal-64", bias="BNTS", mask="B11S", q_len=400, head_dim=64,
         is_causal=True, dropout_rate=0.2, deterministic_backward=True, dtype="bfloat16",
         gpu_only=True),
    _row("tiles-bias-loaded-segments-64", bias="1NTS", segments="shared", q_len=304, q_heads=4,
         kv_heads=2, head_dim=64, dtype="bfloat16", gpu_only=True),
    _row("tiles-bias-loaded-segments-128", bias="BNTS", segments="pair", q_len=300, kv_len=400,
         head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("tiles-bias-loaded-lengths-128", bias="1NTS", poison=True, q_len=200, kv_len=336,
         query_lengths=(200, 77), kv_lengths=(100, 320), head_dim=128, dtype="bfloat16",
         gpu_only=True),
    _row("tiles-bias-keys-256", bias="BN1S", q_len=200, kv_len=310, head_dim=256, is_causal=True,
         dtype="float16", gpu_only=True),
    # What is added for the key alone comes as columns of K, where that is of bfloat16.
    _row("tiles-bias-key-columns-64", bias="BN1S", q_len=370, kv_len=334, head_dim=64,
         dtype="bfloat16", gpu_only=True),
    _row("tiles-bias-key-columns-few-rows-64", bias="BN1S", q_len=90, kv_len=400, head_dim=40,
         dtype="bfloat16", sink=True, gpu_only=True),
    _row("tiles-bias-key-columns-96", bias="B11S", batch=(2, 2), q_len=200, kv_len=390, q_heads=4,
         kv_heads=2, head_dim=96, dtype="bfloat16", local_window_size=(70, 20), gpu_only=True),
    _row("tiles-bias-key-columns-128", bias="BN1S", q_len=600, kv_len=1350, head_dim=128,
         dtype="bfloat16", gpu_only=True),
    _row("tiles-bias-key-columns-causal-128", bias="1N1S", q_len=1000, head_dim=128,
         dtype="bfloat16", is_causal=True, gpu_only=True),
    _row("tiles-bias-key-columns-grouped-128", bias="1N1S", q_len=500, kv_len=350, q_heads=4,
         kv_heads=2, head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("tiles-bias-key-columns-shared-128", bias="111S", bias_dtype="float32", q_len=500,
         kv_len=350, q_heads=8, kv_heads=2, head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("tiles-bias-key-columns-hides-128", bias="BN1S", bias_hides=True, q_len=300, kv_len=350,
         head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("tiles-bias-key-columns-lengths-128", bias="BN1S", poison=True, q_len=300, kv_len=336,
         query_lengths=(300, 77), kv_lengths=(100, 320), head_dim=128, dtype="bfloat16",
         gpu_only=True),
    _row("tiles-bias-key-columns-mask-dropout-128", bias="B11S", mask="B1TS", dropout_rate=0.3,
         q_len=200, kv_len=336, head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("tiles-bias-key-columns-segments-128", bias="BN1S", segments="shared", q_len=300,
         head_dim=128, dtype="bfloat16", is_causal=True, gpu_only=True),
    _row("tiles-bias-key-columns-few-128", bias="BN1S", q_len=70, kv_len=24, head_dim=128,
         dtype="bfloat16", gpu_only=True),
    _row("tiles-bias-key-columns-192-128", bias="BN1S", q_len=260, kv_len=320, head_dim=192,
         value_dim=128, dtype="bfloat16", sink=True, gpu_only=True),
    _row("tiles-bias-key-columns-192", bias="BN1S", q_len=130, kv_len=336, head_dim=192,
         dtype="bfloat16", is_causal=True, causal_alignment="bottom_right", gpu_only=True),
    _row("tiles-bias-key-columns-256", bias="BN1S", q_len=200, kv_len=310, head_dim=256,
         dtype="bfloat16", gpu_only=True),
    _row("tiles-bias-hides-64", bias="11TS", bias_hides=True, q_len=260, head_dim=64,
         dtype="bfloat16", gpu_only=True),
    _row("tiles-alibi-64", alibi="N", q_len=333, kv_len=290, head_dim=64, dtype="bfloat16",
         gpu_only=True),
    _row("tiles-alibi-causal-128", alibi="BN", q_len=300, q_heads=4, kv_heads=2, head_dim=128,
         is_causal=True, dtype="bfloat16"),
    # Backward in steps of 64 rows, of whose dq a warpgroup has 32 columns.
    _row("tiles-cap-causal-64", logits_soft_cap=2.0, q_len=400, kv_len=300, q_heads=4, kv_heads=2,
         head_dim=64, is_causal=True, dtype="bfloat16", gpu_only=True),
    _row("tiles-cap-narrow-64", logits_soft_cap=2.0, q_len=200, kv_len=300, head_dim=24,
         dtype="float16", sink=True, gpu_only=True),
    _row("tiles-cap-deterministic-64", logits_soft_cap=2.0, q_len=300, kv_len=390, head_dim=40,
         local_window_size=(150, 40), deterministic_backward=True, dtype="bfloat16",
         gpu_only=True),
    _row("tiles-cap-one-key-tile-64", logits_soft_cap=2.0, q_len=200, kv_len=100, head_dim=64,
         dtype="bfloat16", gpu_only=True),
    _row("tiles-cap-one-key-tile-narrow-64", logits_soft_cap=2.0, q_len=90, kv_len=128, q_heads=4,
         kv_heads=2, head_dim=40, dtype="float16", gpu_only=True),
    _row("tiles-cap-one-key-tile-32", logits_soft_cap=2.0, q_len=90, kv_len=128, head_dim=32,
         dtype="bfloat16", gpu_only=True),
    _row("tiles-cap-sink-256", logits_soft_cap=2.0, sink=True, q_len=210, kv_len=300, head_dim=256,
         dtype="bfloat16", gpu_only=True),
    _row("tiles-everything-128", bias="BNTS", segments="shared", logits_soft_cap=3.0, sink=True,
         alibi="N", dropout_rate=0.2, is_causal=True, q_len=300, q_heads=4, kv_heads=2,
         head_dim=128, dtype="bfloat16", gpu_only=True),
)  # fmt: skip

# Packed sequences, some of them empty; padding behind the last one.
_SEQUENCES = (7, 0, 20, 1, 13)
_KEYS_OF_SEQUENCES = (9, 4, 20, 0, 5)
_LONG_SEQUENCES = (3, 130, 0, 64, 200, 1, 77)
PACKED = tuple(
    _row(name, **{**dict(batch=(), q_len=44), **fields})
    for name, fields in {
        "packed": dict(packed=(_SEQUENCES,), dtype="bfloat16"),
        "packed-keys": dict(packed=(_SEQUENCES, _KEYS_OF_SEQUENCES), is_causal=True),
        "packed-bottom-right": dict(packed=(_SEQUENCES, _KEYS_OF_SEQUENCES), is_causal=True,
                                    causal_alignment="bottom_right", q_heads=4, kv_heads=2),
        "packed-poison": dict(packed=(_SEQUENCES,), poison=True, local_window_size=(3, 2),
                              sink=True),
        "packed-alibi": dict(packed=(_SEQUENCES,), alibi="N", is_causal=True),
        "packed-keys-alibi": dict(packed=(_SEQUENCES, _KEYS_OF_SEQUENCES), alibi="N", kv_len=40,
                                  causal_alignment="bottom_right", local_window_size=(4, 9)),
        "packed-relative": dict(packed=(_SEQUENCES,), score_mod="relative-table", alibi="N",
                                logits_soft_cap=3.0),
        "packed-keys-relative": dict(packed=(_SEQUENCES, _KEYS_OF_SEQUENCES), kv_len=40,
                                     score_mod="relative-table", alibi="N", dtype="bfloat16"),
        "packed-bias": dict(packed=(_SEQUENCES, _KEYS_OF_SEQUENCES), score_mod="dense-bias"),
        "packed-deterministic": dict(packed=(_SEQUENCES, _KEYS_OF_SEQUENCES), dtype="bfloat16",
                                     deterministic_backward=True),
        **{
            f"tiles-packed-{name}": dict(q_len=490, dtype="bfloat16", gpu_only=True) | fields
            for name, fields in {
                "64": dict(packed=(_LONG_SEQUENCES,), head_dim=64, q_heads=4, kv_heads=2,
                           poison=True),
                "causal-128": dict(packed=(_LONG_SEQUENCES,), head_dim=128, is_causal=True),
                "few-causal-128": dict(q_len=3300, packed=((200, 3090),), head_dim=128,
                                       is_causal=True),
                "few-128": dict(q_len=3300, packed=((3000, 290),), head_dim=128),
                "keys-128": dict(packed=(_LONG_SEQUENCES, _LONG_SEQUENCES[::-1]), head_dim=128,
                                 is_causal=True, causal_alignment="bottom_right"),
                "256": dict(packed=(_LONG_SEQUENCES,), head_dim=256, local_window_size=(70, 20)),
                "float32": dict(packed=(_LONG_SEQUENCES, _LONG_SEQUENCES[::-1]), head_dim=40,
                                dtype="float32"),
                "distances-128": dict(packed=(_LONG_SEQUENCES,), score_mod="distances",
                                      head_dim=128, is_causal=True),
                "keys-distances-64": dict(packed=(_LONG_SEQUENCES, _LONG_SEQUENCES[::-1]),
                                          score_mod="distances", head_dim=64, dtype="float16"),
                "alibi-causal-64": dict(packed=(_LONG_SEQUENCES,), alibi="N", head_dim=64,
                                        is_causal=True, q_heads=4, kv_heads=2),
                "keys-alibi-128": dict(packed=(_LONG_SEQUENCES, _LONG_SEQUENCES[::-1]), alibi="N",
                                       head_dim=128, causal_alignment="bottom_right", sink=True),
                "key-bias-256": dict(packed=(_LONG_SEQUENCES,), score_mod="key-bias",
                                     head_dim=256, is_causal=True),
                "deterministic-64": dict(packed=(_LONG_SEQUENCES, _LONG_SEQUENCES[::-1]),
                                         head_dim=64, q_heads=4, kv_heads=2,
                                         deterministic_backward=True),
                "deterministic-causal-128": dict(packed=(_LONG_SEQUENCES,), head_dim=128,
                                                 is_causal=True, deterministic_backward=True),
                "deterministic-256": dict(packed=(_LONG_SEQUENCES,), head_dim=256,
                                          local_window_size=(90, 30), deterministic_backward=True),
                "deterministic-float32": dict(packed=(_LONG_SEQUENCES, _LONG_SEQUENCES[::-1]),
                                              head_dim=64, dtype="float32",
                                              deterministic_backward=True),
            }.items()
        },
    }.items()
)  # fmt: skip

# Score functions of the caller's own (score_mods.py), beside everything else.
SCORE_MOD_ROWS = (
    _row("score-mod-bias", score_mod="dense-bias", q_len=33, kv_len=40, q_heads=4, kv_heads=2),
    _row("score-mod-bias-batch-axes", score_mod="dense-bias-by-parts", batch=(2, 2), q_len=20),
    _row("score-mod-bias-unbatched", score_mod="dense-bias", batch=(), dtype="float16"),
    _row("score-mod-key-bias", score_mod="key-bias", dtype="bfloat16", kv_lengths=(48, 31)),
    _row("score-mod-relative", score_mod="relative-table", q_heads=4, kv_heads=2, is_causal=True,
         q_len=150, kv_len=140),
    _row("score-mod-relative-bottom-right", score_mod="buckets", q_len=20, kv_len=60,
         is_causal=True, causal_alignment="bottom_right", dtype="bfloat16"),
    _row("score-mod-slopes", score_mod="rows-of-heads", local_window_size=(9, 5), q_heads=3),
    _row("score-mod-learned-cap", score_mod="learned-cap", query_lengths=(48, 20)),
    _row("score-mod-temperature", score_mod="temperature", mask="B1TS"),
    _row("score-mod-documents", score_mod="documents", dtype="bfloat16", is_causal=True),
    _row("score-mod-documents-finite", score_mod="documents-finite"),
    _row("score-mod-lookup", score_mod="lookup-of-lookup", kv_len=30),
    _row("score-mod-integers", score_mod="integer-arithmetic"),
    _row("score-mod-hash", score_mod="wrapping-hash", batch=(2, 1)),
    _row("score-mod-negative-index", score_mod="from-the-end"),
    _row("score-mod-out-of-bounds", score_mod="out-of-bounds"),
    _row("score-mod-strided", score_mod="strided", q_len=70),
    _row("score-mod-branches", score_mod="branches", sink=True),
    _row("score-mod-elementary", score_mod="elementary", q_len=24, kv_len=20),
    _row("score-mod-custom-derivative", score_mod="custom-derivative"),
    _row("score-mod-without-score", score_mod="ignores-the-score"),
    _row("score-mod-constant", score_mod="constant", is_causal=True),
    _row("score-mod-scalars", score_mod="scalar-arrays"),
    _row("score-mod-flags", score_mod="flags", deterministic_backward=True),
    _row("score-mod-compared-flags", score_mod="compared-flags"),
    _row("score-mod-poison", score_mod="temperature", poison=True, is_causal=True, kv_len=80),
    _row("score-mod-poison-nonlinear", score_mod="elementary", poison=True, q_len=20,
         kv_lengths=(48, 7), kv_len=48),
    _row("score-mod-everything", score_mod="cap", bias="BNTS", mask="11TS", alibi="BN",
         logits_soft_cap=3.0, sink=True, dropout_rate=0.2, is_causal=True, q_heads=4, kv_heads=2),
)  # fmt: skip

# Values of jaxflash.masks (mask_values.py), alone and beside everything else.
MASK_VALUE_ROWS = (
    *(_row(f"mask-value-{name}", mask_value=name, q_heads=4, kv_heads=2, kv_len=60)
      for name in MASK_VALUES),
    _row("mask-value-square", mask_value="both-alignments", dtype="bfloat16"),
    _row("mask-value-unbatched", mask_value="prefix", batch=(), dtype="float16"),
    _row("mask-value-batch-axes", mask_value="whole-lengths", batch=(2, 2), q_len=20),
    _row("mask-value-batch-axes-intervals", mask_value="intervals", batch=(2, 1, 2), q_len=20),
    _row("mask-value-causal-window", mask_value="prefix", is_causal=True, local_window_size=(30, 5),
         dtype="bfloat16"),
    _row("mask-value-bottom-right", mask_value="array-or-band", is_causal=True, kv_len=70,
         causal_alignment="bottom_right", query_lengths=(48, 30), kv_lengths=(70, 41)),
    _row("mask-value-other-alignment", mask_value="causal", local_window_size=(30, 30), kv_len=70,
         causal_alignment="bottom_right"),
    _row("mask-value-lengths-twice", mask_value="whole-lengths", query_lengths=(48, 30),
         kv_lengths=(20, 48)),
    _row("mask-value-segments", mask_value="segments-twice", segments="shared"),
    _row("mask-value-array", mask_value="two-arrays", mask="B1TS"),
    _row("mask-value-function-array-segments", mask_value="head-windows", mask="11TS",
         segments="pair", kv_len=70, q_heads=4, kv_heads=2),
    _row("mask-value-alibi-bottom-right", mask_value="causal", alibi="N", kv_len=70,
         causal_alignment="bottom_right"),
    _row("mask-value-score-mod", mask_value="documents", score_mod="relative-table"),
    _row("mask-value-bias-cap-sink", mask_value="float-captures", bias="1NTS", sink=True,
         logits_soft_cap=2.0, dropout_rate=0.2),
    _row("mask-value-deterministic", mask_value="global-tokens", deterministic_backward=True),
    _row("mask-value-float32-highest", mask_value="dilated", precision="highest"),
    # Of distances alone.
    _row("mask-value-band-grouped", mask_value="band", kv_len=70, q_heads=4, kv_heads=2),
    _row("mask-value-band-everything-else", mask_value="band", is_causal=True, segments="shared",
         mask="B1TS", bias="1NTS", kv_lengths=(48, 30), alibi="N", sink=True, dropout_rate=0.2),
    _row("mask-value-band-bottom-right", mask_value="band", is_causal=True, kv_len=70,
         causal_alignment="bottom_right"),
    _row("mask-value-every-fourth-grouped", mask_value="every-fourth", kv_len=72,
         q_heads=4, kv_heads=2),
    _row("mask-value-every-fourth-cap", mask_value="every-fourth", batch=(2, 1, 2), q_len=20,
         is_causal=True, logits_soft_cap=2.0, deterministic_backward=True),
    _row("mask-value-every-fourth-no-batch", mask_value="every-fourth", batch=(),
         local_window_size=(30, 9)),
    # Of more than distances, or of lengths that four does not divide.
    _row("mask-value-every-fourth-lengths", mask_value="every-fourth", kv_lengths=(48, 30)),
    _row("mask-value-every-fourth-segments", mask_value="every-fourth", segments="shared"),
    _row("mask-value-every-fourth-array", mask_value="every-fourth", mask="B1TS"),
    _row("mask-value-every-fourth-bias", mask_value="every-fourth", bias="1NTS"),
    _row("mask-value-every-fourth-alibi", mask_value="every-fourth", alibi="N"),
    _row("mask-value-every-fourth-sink", mask_value="every-fourth", sink=True),
    _row("mask-value-every-fourth-score-mod", mask_value="every-fourth",
         score_mod="relative-table"),
    _row("mask-value-every-fourth-dropout", mask_value="every-fourth", dropout_rate=0.2),
    _row("mask-value-every-fourth-odd", mask_value="every-fourth", q_len=50),
    _row("mask-value-empty-S", mask_value="documents", q_len=16, kv_len=0),
    _row("mask-value-empty-T", mask_value="lengths-or", q_len=0, kv_len=16),
    _row("mask-value-empty-batch", batch=(2, 0), mask_value="prefix", logits_soft_cap=2.0),
    _row("mask-value-one-row", mask_value="prefix", q_len=1, kv_len=70),
    _row("mask-value-poison", mask_value="closed-over", poison=True, kv_len=70),
    _row("mask-value-poison-dense", mask_value="documents", mask="B11S", poison=True, kv_len=70),
    _row("tiles-mask-value-prefix-64", mask_value="prefix", q_len=330, q_heads=4, kv_heads=2,
         head_dim=64, dtype="bfloat16", gpu_only=True),
    _row("tiles-mask-value-global-128", mask_value="global-tokens", q_len=500, head_dim=128,
         dtype="bfloat16"),
    _row("tiles-mask-value-global-float32", mask_value="global-tokens", q_len=500, head_dim=64,
         gpu_only=True),
    _row("tiles-mask-value-global-deterministic-60", mask_value="global-tokens", q_len=500,
         head_dim=60, dtype="bfloat16", deterministic_backward=True, gpu_only=True),
    _row("tiles-mask-value-global-array-60", mask_value="global-tokens", mask="B1TS", q_len=500,
         q_heads=4, kv_heads=2, head_dim=60, dtype="bfloat16", gpu_only=True),
    _row("tiles-mask-value-documents-128", mask_value="documents-causal", q_len=600, q_heads=4,
         kv_heads=2, head_dim=128, dtype="float16", gpu_only=True),
    _row("tiles-mask-value-checkerboard-128", mask_value="checkerboard", q_len=600, kv_len=700,
         head_dim=128, dtype="bfloat16", gpu_only=True),
    # For the kernels that walk, see test_conformance.
    *(_row(f"walk-mask-value-{name}-{head_dim}", mask_value=name, q_len=1100, kv_len=1300,
           q_heads=4, kv_heads=2, head_dim=head_dim, dtype="bfloat16", gpu_only=True)
      for name in ("some-blocks", "checkerboard") for head_dim in (32, 64, 96, 128, 192, 256)),
    # A head of keys for each of queries: rows that see the same go together.
    *(_row(f"walk-mask-value-same-rows-{head_dim}", mask_value="checkerboard", q_len=1100,
           head_dim=head_dim, dtype="bfloat16", gpu_only=True) for head_dim in (64, 128, 256)),
    _row("walk-mask-value-same-rows-512-128", mask_value="checkerboard-512", q_len=3300,
         kv_len=1100, head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("walk-mask-value-same-rows-poison-128", mask_value="checkerboard", poison=True,
         q_len=1300, kv_len=900, kv_lengths=(900, 300), head_dim=128, dtype="float16",
         gpu_only=True),
    _row("walk-mask-value-192-128", mask_value="some-blocks", q_len=1300, kv_len=1100,
         head_dim=192, value_dim=128, dtype="float16", gpu_only=True),
    _row("walk-mask-value-causal-lengths-128", mask_value="checkerboard", is_causal=True,
         q_len=1100, query_lengths=(1100, 700), kv_lengths=(900, 1), head_dim=128,
         dtype="bfloat16", gpu_only=True),
    _row("walk-mask-value-window-array-64", mask_value="some-blocks", mask="B1TS", q_len=1100,
         local_window_size=(500, 300), head_dim=64, dtype="bfloat16", gpu_only=True),
    _row("walk-mask-value-segments-128", mask_value="checkerboard", segments="shared", q_len=1100,
         q_heads=4, kv_heads=1, head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("walk-mask-value-deterministic-128", mask_value="some-blocks", q_len=1100, kv_len=1300,
         head_dim=128, deterministic_backward=True, dtype="bfloat16", gpu_only=True),
    _row("walk-mask-value-deterministic-256", mask_value="checkerboard", q_len=1100, head_dim=256,
         deterministic_backward=True, dtype="bfloat16", gpu_only=True),
    _row("walk-mask-value-bias-64", mask_value="some-blocks", bias="1NTS", q_len=1100, kv_len=1304,
         head_dim=64, dtype="bfloat16", gpu_only=True),
    _row("walk-mask-value-bias-dropout-128", mask_value="checkerboard", bias="BNTS", q_len=1100,
         kv_len=1304, dropout_rate=0.2, head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("walk-mask-value-bias-key-columns-128", mask_value="some-blocks", bias="B11S", q_len=1100,
         head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("walk-mask-value-cap-sink-alibi-256", mask_value="some-blocks", logits_soft_cap=2.0,
         sink=True, alibi="N", q_len=1100, head_dim=256, dtype="bfloat16", gpu_only=True),
    _row("walk-mask-value-poison-128", mask_value="some-blocks", poison=True, q_len=1100,
         kv_len=1300, head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("tiles-mask-value-checkerboard-64", mask_value="checkerboard-16", q_len=300, kv_len=330,
         head_dim=64, dtype="bfloat16", gpu_only=True),
    _row("tiles-mask-value-dilated-256", mask_value="dilated", q_len=300, kv_len=333, head_dim=256,
         dtype="bfloat16", gpu_only=True),
    _row("tiles-mask-value-every-fourth-64", mask_value="every-fourth", q_len=1300, q_heads=4,
         kv_heads=2, head_dim=64, dtype="bfloat16", gpu_only=True),
    _row("tiles-mask-value-every-fourth-causal-128", mask_value="every-fourth", q_len=900,
         kv_len=1000, is_causal=True, head_dim=128, deterministic_backward=True, dtype="float16",
         gpu_only=True),
    _row("tiles-mask-value-every-fourth-cap-256", mask_value="every-fourth", q_len=600,
         logits_soft_cap=2.0, head_dim=256, dtype="bfloat16", gpu_only=True),
    _row("tiles-mask-value-every-fourth-float32", mask_value="every-fourth", q_len=300,
         head_dim=64, gpu_only=True),
    _row("tiles-mask-value-every-fourth-odd-128", mask_value="every-fourth", q_len=601,
         kv_len=700, head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("decode-mask-value-every-fourth", mask_value="every-fourth", q_len=4, kv_len=1500,
         q_heads=8, kv_heads=2, head_dim=128, dtype="bfloat16"),
    _row("tiles-mask-value-random-96", mask_value="random", q_len=260, kv_len=333, q_heads=4,
         kv_heads=2, head_dim=96, dtype="float16", gpu_only=True),
    _row("tiles-mask-value-heads-64", mask_value="head-windows", q_len=400, q_heads=8, kv_heads=2,
         head_dim=64, dtype="bfloat16", gpu_only=True),
    _row("tiles-mask-value-intervals-128", mask_value="intervals", q_len=300, kv_len=400,
         head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("tiles-mask-value-intervals-keys-128", mask_value="intervals-of-keys", q_len=300,
         kv_len=400, head_dim=128, dtype="float16", gpu_only=True),
    _row("tiles-mask-value-float32", mask_value="prefix", q_len=200, kv_len=333, gpu_only=True),
    _row("tiles-mask-value-segments-128", mask_value="other-segments", segments="shared",
         q_len=400, head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("tiles-mask-value-deterministic-128", mask_value="prefix", q_len=400, head_dim=128,
         dtype="bfloat16", deterministic_backward=True, gpu_only=True),
    _row("tiles-mask-value-everything-128", mask_value="documents", mask="B1TS", bias="1NTS",
         segments="shared", logits_soft_cap=3.0, sink=True, alibi="N", dropout_rate=0.2,
         is_causal=True, q_len=300, q_heads=4, kv_heads=2, head_dim=128, dtype="bfloat16",
         gpu_only=True),
    _row("tiles-mask-value-poison-128", mask_value="closed-over", poison=True, q_len=200,
         kv_len=400, head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("decode-mask-value", mask_value="dilated", q_len=1, kv_len=1500, q_heads=8, kv_heads=2,
         head_dim=128, dtype="bfloat16"),
)  # fmt: skip

# Gradients of captured arrays past one tile: a tile of the gradient that a block owns, sums over
# rows, over keys and over both, diagonals of a table, two loads of one array; sums over batch
# elements and heads that share an array, divided among blocks, in turns where they have an order.
GRADIENTS_OF_CAPTURES = (
    _row("capture-bias-64", bias="1NTS", q_len=200, kv_len=333, q_heads=4, kv_heads=2, head_dim=64,
         dtype="bfloat16", is_causal=True, gpu_only=True),
    _row("capture-bias-256", bias="BNTS", q_len=200, kv_len=333, head_dim=256, dtype="float16",
         gpu_only=True),
    # Of an even number of keys: products start from pairs.
    _row("capture-bias-pairs-128", bias="1NTS", q_len=200, kv_len=334, q_heads=4, kv_heads=2,
         head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("capture-bias-pairs-256", bias="BNTS", q_len=200, kv_len=334, head_dim=256,
         dtype="bfloat16", is_causal=True, gpu_only=True),
    _row("capture-bias-float32", bias="NTS", q_len=200, kv_len=333, head_dim=128, gpu_only=True),
    _row("capture-bias-highest", bias="11TS", q_len=100, kv_len=133, head_dim=64,
         precision="highest", gpu_only=True),
    _row("capture-bias-shared", bias="TS", batch=(3, 2), q_len=200, kv_len=333, q_heads=4,
         head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("capture-bias-shared-deterministic", bias="TS", batch=(3, 2), q_len=200, kv_len=333,
         q_heads=4, head_dim=128, dtype="bfloat16", deterministic_backward=True, gpu_only=True),
    # In bfloat16 from the kernel: a block for every multiprocessor.
    _row("capture-bias-narrow", bias="1NTS", batch=(1,), q_len=2048, q_heads=2, head_dim=64,
         dtype="bfloat16", is_causal=True, gpu_only=True),
    # Of an element for each of the logits: the backward kernel stores the score's. Of tiles that
    # queries or keys do not fill, of heads that share keys, behind a cap; cleared before where some
    # steps are skipped. In another dtype, or without TMA, the kernel of gradients has them.
    _row("capture-bias-stored-64", bias="BNTS", q_len=200, kv_len=328, q_heads=4, kv_heads=2,
         head_dim=64, dtype="bfloat16", gpu_only=True),
    _row("capture-bias-stored-128", bias="BNTS", batch=(3, 2), q_len=200, kv_len=344, q_heads=6,
         kv_heads=2, head_dim=128, dtype="float16", gpu_only=True),
    _row("capture-bias-stored-256", bias="BNTS", q_len=130, kv_len=200, head_dim=256,
         dtype="bfloat16", gpu_only=True),
    _row("capture-bias-stored-one-head", bias="TS", batch=(1,), q_len=70, kv_len=600, q_heads=1,
         head_dim=96, dtype="bfloat16", gpu_only=True),
    _row("capture-bias-stored-few", bias="BNTS", q_len=9, kv_len=24, head_dim=128,
         dtype="bfloat16", gpu_only=True),
    _row("capture-bias-stored-two-rows", bias="BNTS", q_len=2, kv_len=136, head_dim=64,
         dtype="float16", gpu_only=True),
    _row("capture-bias-stored-causal-64", bias="BNTS", q_len=400, kv_len=520, q_heads=4,
         kv_heads=2, head_dim=64, dtype="bfloat16", is_causal=True,
         causal_alignment="bottom_right", gpu_only=True),
    _row("capture-bias-stored-causal-128", bias="BNTS", q_len=330, kv_len=400, head_dim=128,
         dtype="bfloat16", is_causal=True, deterministic_backward=True, gpu_only=True),
    _row("capture-bias-stored-window-128", bias="BNTS", q_len=500, kv_len=296, head_dim=128,
         dtype="bfloat16", local_window_size=(50, 60), gpu_only=True),
    _row("capture-bias-stored-lengths-64", bias="BNTS", poison=True, q_len=300, kv_len=328,
         query_lengths=(300, 77), kv_lengths=(100, 328), head_dim=64, dtype="bfloat16",
         gpu_only=True),
    _row("capture-bias-stored-poison-128", bias="BNTS", poison=True, q_len=200, kv_len=400,
         query_lengths=(200, 77), kv_lengths=(100, 320), q_heads=4, kv_heads=2, head_dim=128,
         dtype="float16", gpu_only=True),
    _row("capture-bias-stored-hides-128", bias="BNTS", bias_hides=True, q_len=300, kv_len=304,
         head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("capture-bias-stored-mask-dropout-128", bias="BNTS", mask="B1TS", dropout_rate=0.3,
         q_len=200, kv_len=336, head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("capture-bias-stored-segments-64", bias="BNTS", segments="shared", q_len=304, q_heads=4,
         kv_heads=2, head_dim=64, dtype="bfloat16", is_causal=True, gpu_only=True),
    _row("capture-bias-stored-gaps-128", bias="BNTS", mask_value="global-tokens", q_len=600,
         head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("capture-bias-stored-cap-64", bias="BNTS", logits_soft_cap=2.0, sink=True, q_len=200,
         kv_len=152, head_dim=64, dtype="bfloat16", gpu_only=True),
    _row("capture-bias-stored-cap-dropout-128", bias="BNTS", logits_soft_cap=2.0, alibi="N",
         dropout_rate=0.2, q_len=200, kv_len=152, q_heads=4, kv_heads=2, head_dim=128,
         dtype="float16", is_causal=True, gpu_only=True),
    _row("capture-bias-stored-unaligned", bias="BNTS", q_len=200, kv_len=152, head_dim=20,
         dtype="bfloat16", gpu_only=True),
    # Batch elements share it: the last block of each tile of keys adds up what all have stored. Of
    # more tiles than have room at the same time, of some without rows, of heads that share keys.
    _row("capture-bias-summed-96", bias="1NTS", q_len=200, kv_len=328, q_heads=4, kv_heads=2,
         head_dim=96, dtype="bfloat16", gpu_only=True),
    _row("capture-bias-summed-three-128", bias="NTS", batch=(3,), q_len=200, kv_len=344, q_heads=6,
         kv_heads=3, head_dim=128, dtype="float16", gpu_only=True),
    _row("capture-bias-summed-axes-128", bias="1NTS", batch=(2, 2), q_len=130, kv_len=264,
         head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("capture-bias-summed-many-tiles-72", bias="1NTS", q_len=70, kv_len=1300, q_heads=16,
         head_dim=72, dtype="bfloat16", gpu_only=True),
    _row("capture-bias-summed-causal-128", bias="1NTS", batch=(4,), q_len=130, kv_len=600,
         q_heads=4, kv_heads=2, head_dim=128, dtype="bfloat16", is_causal=True, gpu_only=True),
    _row("capture-bias-summed-window-96", bias="1NTS", q_len=500, kv_len=296, head_dim=96,
         dtype="float16", local_window_size=(50, 60), gpu_only=True),
    _row("capture-bias-summed-cap-dropout-128", bias="1NTS", logits_soft_cap=2.0, sink=True,
         alibi="N", dropout_rate=0.2, q_len=200, kv_len=152, q_heads=4, kv_heads=2, head_dim=128,
         dtype="bfloat16", gpu_only=True),
    # In order, the kernel of gradients sums.
    _row("capture-bias-shared-deterministic-128", bias="1NTS", q_len=330, kv_len=400,
         head_dim=128, dtype="bfloat16", is_causal=True, deterministic_backward=True,
         gpu_only=True),
    _row("capture-bias-other-dtype", bias="BNTS", bias_dtype="bfloat16", q_len=200, kv_len=152,
         head_dim=64, dtype="float16", gpu_only=True),
    # The same where TMA stores tiles whose edges are ragged, of what products start from or not;
    # and where it cannot: rows of no multiple of 16 bytes.
    _row("capture-bias-narrow-ragged", bias="1NTS", batch=(3,), q_len=2050, kv_len=2056, q_heads=2,
         kv_heads=1, head_dim=128, dtype="float16", gpu_only=True),
    _row("capture-bias-narrow-batch", bias="BNTS", q_len=2050, kv_len=2056, q_heads=2, head_dim=96,
         dtype="bfloat16", local_window_size=(300, 200), gpu_only=True),
    _row("capture-bias-narrow-256", bias="1NTS", q_len=2049, kv_len=2056, q_heads=2, head_dim=256,
         dtype="bfloat16", is_causal=True, gpu_only=True),
    _row("capture-bias-narrow-cap", bias="1NTS", logits_soft_cap=2.0, q_len=2050, kv_len=2056,
         q_heads=2, head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("capture-bias-narrow-dropout", bias="1NTS", segments="shared", dropout_rate=0.2,
         q_len=2056, q_heads=2, head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("capture-bias-narrow-poison", bias="1NTS", poison=True, q_len=2050, kv_len=2056,
         query_lengths=(2050, 77), kv_lengths=(100, 2040), q_heads=2, head_dim=64,
         dtype="bfloat16", gpu_only=True),
    _row("capture-bias-narrow-pairs", bias="1NTS", q_len=2056, kv_len=2050, q_heads=2, head_dim=64,
         dtype="bfloat16", gpu_only=True),
    _row("capture-bias-narrow-odd", bias="1NTS", q_len=2056, kv_len=2051, q_heads=2, head_dim=128,
         dtype="bfloat16", gpu_only=True),
    # In float32, of tiles that TMA loads: one or several blocks for each, in turns.
    _row("capture-bias-tiles", bias="1NTS", q_len=200, kv_len=336, q_heads=4, kv_heads=2,
         head_dim=128, dtype="bfloat16", is_causal=True, gpu_only=True),
    _row("capture-bias-tiles-256", bias="BNTS", q_len=200, kv_len=40, head_dim=256,
         dtype="float16", gpu_only=True),
    _row("capture-bias-tiles-deterministic", bias="TS", batch=(3, 2), q_len=200, kv_len=336,
         q_heads=4, head_dim=64, dtype="bfloat16", deterministic_backward=True, gpu_only=True),
    # Small enough for shared memory, and the same for all batch elements, of which each block has
    # one after the other: several blocks for a query tile, or some; the last round is not full.
    _row("capture-bias-held", bias="1NTS", batch=(7,), q_len=192, kv_len=384, q_heads=66,
         dtype="bfloat16", gpu_only=True),
    _row("capture-bias-held-264", bias="1NTS", batch=(11,), q_len=160, kv_len=264, q_heads=44,
         dtype="float16", gpu_only=True),
    _row("capture-bias-held-small", bias="1NTS", batch=(7,), q_len=350, kv_len=328, q_heads=32,
         head_dim=24, value_dim=16, dtype="bfloat16", gpu_only=True),
    _row("capture-bias-held-grouped", bias="1NTS", batch=(7,), q_len=192, kv_len=320, q_heads=64,
         kv_heads=32, dtype="bfloat16", gpu_only=True),
    _row("capture-bias-held-two-axes", bias="TS", batch=(3, 3), q_len=192, kv_len=384, q_heads=60,
         dtype="bfloat16", gpu_only=True),
    _row("capture-bias-held-lengths", bias="1NTS", poison=True, batch=(8,), q_len=192, kv_len=384,
         query_lengths=(192, 0, 1, 64, 65, 128, 192, 100),
         kv_lengths=(1, 384, 0, 64, 65, 200, 300, 128), q_heads=66, dtype="bfloat16",
         gpu_only=True),
    _row("capture-bias-held-window", bias="1NTS", batch=(7,), q_len=192, kv_len=384, q_heads=66,
         dtype="bfloat16", local_window_size=(50, 100), gpu_only=True),
    _row("capture-bias-held-mask", bias="1NTS", mask="B11S", batch=(7,), q_len=192, kv_len=384,
         q_heads=66, dtype="bfloat16", gpu_only=True),
    _row("capture-bias-held-dropout", bias="1NTS", dropout_rate=0.2, batch=(7,), q_len=192,
         kv_len=384, q_heads=66, dtype="bfloat16", gpu_only=True),
    _row("capture-bias-held-sink", bias="1NTS", sink=True, batch=(7,), q_len=192, kv_len=384,
         q_heads=66, dtype="bfloat16", gpu_only=True),
    # Not held: larger heads; of each batch element; under a causal mask; rows of no multiple of 16
    # bytes.
    _row("capture-bias-held-not-64", bias="1NTS", batch=(7,), q_len=192, kv_len=384, q_heads=66,
         head_dim=64, dtype="bfloat16", gpu_only=True),
    _row("capture-bias-held-not", bias="B1TS", batch=(7,), q_len=192, kv_len=384, q_heads=66,
         dtype="bfloat16", gpu_only=True),
    _row("capture-bias-held-not-causal", bias="1NTS", batch=(7,), q_len=192, kv_len=384,
         q_heads=66, dtype="bfloat16", is_causal=True, gpu_only=True),
    _row("capture-bias-held-not-257", bias="1NTS", batch=(5,), q_len=192, kv_len=257, q_heads=32,
         dtype="bfloat16", gpu_only=True),
    _row("capture-bias-held-not-300", bias="1NTS", batch=(5,), q_len=384, kv_len=300, q_heads=16,
         dtype="bfloat16", gpu_only=True),
    # Read at (q, kv), which products start from, and at (kv, q), for all heads.
    _row("capture-both-ways", score_mod="both-ways", q_len=200, q_heads=4, head_dim=64,
         dtype="bfloat16"),
    _row("capture-rows", bias="BNT1", q_len=300, kv_len=200, head_dim=128, dtype="bfloat16",
         local_window_size=(50, 60), gpu_only=True),
    _row("capture-keys-deterministic", bias="B11S", q_len=300, kv_len=200, q_heads=4, head_dim=64,
         dtype="float16", deterministic_backward=True, gpu_only=True),
    _row("capture-heads", bias="1N11", q_len=300, kv_len=200, q_heads=4, kv_heads=2, head_dim=128,
         dtype="bfloat16", gpu_only=True),
    _row("capture-slopes-deterministic", alibi="N", q_len=200, kv_len=333, q_heads=4, head_dim=64,
         dtype="bfloat16", deterministic_backward=True, gpu_only=True),
    # Sums over the queries that the backward kernel makes: for several heads of a key head, in both
    # kinds of blocks, of two factors, behind a cap, under masks; keys that nobody sees.
    _row("capture-keys-128", bias="BN1S", q_len=200, kv_len=333, q_heads=6, kv_heads=2,
         head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("capture-keys-256", bias="1N1S", q_len=200, kv_len=334, q_heads=4, kv_heads=2,
         head_dim=256, dtype="bfloat16", is_causal=True, gpu_only=True),
    _row("capture-keys-slopes", bias="B11S", alibi="N", q_len=300, kv_len=200, q_heads=4,
         kv_heads=2, head_dim=128, dtype="bfloat16", is_causal=True,
         causal_alignment="bottom_right", deterministic_backward=True, gpu_only=True),
    _row("capture-keys-cap-dropout", bias="BN1S", logits_soft_cap=2.0, dropout_rate=0.2,
         batch=(3, 2), q_len=150, kv_len=200, head_dim=64, dtype="float16", gpu_only=True),
    _row("capture-keys-window", bias="1N1S", q_len=500, kv_len=300, head_dim=64,
         dtype="bfloat16", local_window_size=(50, 0), gpu_only=True),
    _row("capture-keys-window-256", bias="1N1S", alibi="N", q_len=100, kv_len=500, q_heads=4,
         kv_heads=2, head_dim=256, dtype="bfloat16", local_window_size=(50, 20), gpu_only=True),
    _row("capture-keys-segments", bias="BN1S", segments="shared", q_len=300, q_heads=4,
         kv_heads=2, head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("capture-keys-mask", bias="BN1S", mask="B1TS", q_len=200, kv_len=333, head_dim=128,
         dtype="bfloat16", gpu_only=True),
    _row("capture-keys-poison", bias="BN1S", poison=True, q_len=200, kv_len=333,
         query_lengths=(200, 77), kv_lengths=(100, 320), q_heads=4, kv_heads=2, head_dim=128,
         dtype="bfloat16", gpu_only=True),
    _row("capture-keys-float32", bias="BN1S", q_len=200, kv_len=333, head_dim=64, gpu_only=True),
    # A row of 40 bytes, which TMA does not take.
    _row("capture-keys-unaligned", bias="BN1S", q_len=200, kv_len=333, head_dim=20,
         dtype="bfloat16", gpu_only=True),
    _row("capture-bias-mask-dropout", bias="1NTS", mask="B1TS", dropout_rate=0.3, q_len=200,
         kv_len=333, head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("capture-bias-segments-dropout", bias="1NTS", segments="shared", dropout_rate=0.2,
         q_len=300, q_heads=4, kv_heads=2, head_dim=64, dtype="bfloat16", is_causal=True,
         gpu_only=True),
    _row("capture-bias-lengths", bias="1NTS", q_len=200, kv_len=333, query_lengths=(200, 77),
         kv_lengths=(100, 333), head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("capture-bias-poison", bias="1NTS", poison=True, q_len=200, kv_len=333,
         query_lengths=(200, 77), kv_lengths=(100, 320), head_dim=64, dtype="bfloat16",
         gpu_only=True),
    _row("capture-bias-cap-sink", bias="BNTS", logits_soft_cap=2.0, sink=True, q_len=200,
         kv_len=150, head_dim=256, dtype="bfloat16", gpu_only=True),
    _row("capture-table", score_mod="relative-table", q_len=200, kv_len=333, q_heads=4, kv_heads=2,
         head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("capture-table-window", score_mod="relative-table", q_len=300, head_dim=64,
         dtype="float16", is_causal=True, local_window_size=(60, 0), gpu_only=True),
    _row("capture-table-segments", score_mod="relative-table", segments="shared", q_len=300,
         head_dim=128, dtype="bfloat16", dropout_rate=0.2, gpu_only=True),
    _row("capture-table-256", score_mod="relative-table", q_len=150, kv_len=200, head_dim=256,
         dtype="bfloat16", gpu_only=True),
    _row("capture-table-bottom-right", score_mod="buckets", q_len=150, kv_len=200, head_dim=64,
         is_causal=True, causal_alignment="bottom_right", dtype="bfloat16", gpu_only=True),
    _row("capture-table-deterministic", score_mod="relative-table", q_len=60,
         deterministic_backward=True),
    # Tables whose index is the distance: sums along diagonals in the backward kernel, up to head
    # size 128; indices that leave the table at both ends; a table for each batch element.
    _row("capture-distances-128", score_mod="distances", q_len=330, kv_len=533, q_heads=6,
         kv_heads=2, head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("capture-distances-64", score_mod="distances", q_len=300, kv_len=411, q_heads=4,
         kv_heads=2, head_dim=64, dtype="float16", is_causal=True, gpu_only=True),
    _row("capture-distances-256", score_mod="distances", q_len=200, kv_len=233, head_dim=256,
         dtype="bfloat16", gpu_only=True),
    _row("capture-distances-96", score_mod="distances", q_len=77, kv_len=150, head_dim=96,
         dtype="bfloat16", gpu_only=True),
    _row("capture-distances-few-rows", score_mod="distances", q_len=9, kv_len=200, q_heads=8,
         kv_heads=2, head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("capture-distances-window", score_mod="distances", q_len=500, head_dim=128,
         dtype="float16", local_window_size=(60, 0), gpu_only=True),
    _row("capture-distances-lengths", score_mod="distances", q_len=200, kv_len=333,
         query_lengths=(200, 77), kv_lengths=(100, 333), q_heads=4, kv_heads=2, head_dim=128,
         dtype="bfloat16", is_causal=True, causal_alignment="bottom_right", poison=True,
         gpu_only=True),
    _row("capture-distances-dropout", score_mod="distances", segments="shared", q_len=300,
         head_dim=128, dtype="bfloat16", dropout_rate=0.2, gpu_only=True),
    _row("capture-distances-float32", score_mod="distances", q_len=200, kv_len=133, head_dim=64,
         gpu_only=True),
    _row("capture-distances-bias", score_mod="distances", bias="1NTS", q_len=200, kv_len=334,
         head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("capture-distances-of-batch-128", score_mod="distances-of-batch", batch=(3,), q_len=300,
         kv_len=200, q_heads=4, kv_heads=2, head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("capture-distances-of-batch-64", score_mod="distances-of-batch", q_len=333, kv_len=300,
         head_dim=64, dtype="bfloat16", gpu_only=True),
    _row("capture-few-distances-128", score_mod="few-distances", q_len=300, kv_len=400,
         head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("capture-few-distances-64", score_mod="few-distances", q_len=300, kv_len=200, head_dim=64,
         dtype="float16", is_causal=True, gpu_only=True),
    _row("capture-buckets-128", score_mod="buckets", q_len=300, kv_len=400, q_heads=4, kv_heads=2,
         head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("capture-buckets-64", score_mod="buckets", q_len=300, head_dim=64, dtype="bfloat16",
         is_causal=True, causal_alignment="bottom_right", kv_len=411, gpu_only=True),
    _row("capture-distances-no-keys", score_mod="distances", q_len=16, kv_len=0, head_dim=64,
         dtype="bfloat16"),
    _row("capture-scalar", score_mod="learned-cap", q_len=200, kv_len=333, q_heads=4, head_dim=128,
         dtype="bfloat16", gpu_only=True),
    _row("capture-scalar-deterministic", score_mod="learned-cap", q_len=200, kv_len=333,
         head_dim=64, dtype="bfloat16", deterministic_backward=True, gpu_only=True),
    _row("capture-head-vector", score_mod="temperature", q_len=200, kv_len=333, q_heads=4,
         kv_heads=2, head_dim=64, dtype="bfloat16", is_causal=True, gpu_only=True),
    _row("capture-two-loads", score_mod="from-the-end", q_len=200, kv_len=133, head_dim=64,
         dtype="bfloat16", gpu_only=True),
    _row("capture-factor-of-one-64", score_mod="factor-of-one", q_len=100, kv_len=150, q_heads=4,
         kv_heads=2, head_dim=64, dtype="bfloat16"),
    _row("capture-factor-of-one-256", score_mod="factor-of-one", q_len=100, kv_len=150,
         head_dim=256, is_causal=True, dtype="float16"),
    _row("capture-lookup", score_mod="lookup-of-lookup", q_len=200, kv_len=133, head_dim=64,
         dtype="bfloat16", gpu_only=True),
)  # fmt: skip

# Faults: empty arrays, and what must not leak.
FAULTS = (
    _row("empty-batch", batch=(0,), dtype="bfloat16"),
    _row("empty-T", q_len=0, kv_len=16, dtype="bfloat16"),
    _row("empty-S", q_len=16, kv_len=0, dtype="bfloat16"),
    _row("empty-S-dropout", q_len=16, kv_len=0, dropout_rate=0.2),
    _row("empty-S-features", q_len=16, kv_len=0, sink=True, alibi="N", bias="BN11"),
    _row("empty-T-S", q_len=0, kv_len=0, is_causal=True),
    _row("empty-T-S-features", q_len=0, kv_len=0, bias="BNTS", alibi="BN", logits_soft_cap=2.0),
    _row("empty-T-bias", q_len=0, kv_len=16, bias="1NTS", dtype="bfloat16"),
    _row("empty-T-segments", q_len=0, kv_len=16, segments="pair", dtype="bfloat16"),
    _row("empty-S-segments", q_len=16, kv_len=0, segments="pair", is_causal=True),
    _row("one-head-features", q_heads=1, bias="BNTS", alibi="BN"),
    _row("empty-S-mask", q_len=16, kv_len=0, mask="BNTS"),
    _row("empty-T-mask", q_len=0, kv_len=16, mask="1NTS", dtype="bfloat16"),
    _row("empty-batch-mask", batch=(0,), mask="BNTS", bias="BNTS", dtype="bfloat16"),
    _row("empty-batch-lengths", batch=(0, 2), query_lengths=(), kv_lengths=()),
    _row("no-heads", q_heads=0, kv_heads=1, dtype="bfloat16"),
    _row("no-heads-mask", q_heads=0, kv_heads=1, mask="1NTS", dtype="bfloat16"),
    _row("poison-lengths", poison=True, q_len=70, kv_len=150, query_lengths=(70, 40),
         kv_lengths=(100, 13), head_dim=64, dtype="bfloat16"),
    _row("poison-lengths-96", poison=True, q_len=70, kv_len=150, query_lengths=(70, 40),
         kv_lengths=(113, 13), head_dim=96, dtype="float16"),
    _row("poison-lengths-192-128", poison=True, q_len=70, kv_len=150, query_lengths=(70, 40),
         kv_lengths=(81, 13), head_dim=192, value_dim=128, dtype="bfloat16"),
    _row("poison-lengths-zero", poison=True, query_lengths=(0, 48), kv_lengths=(48, 0)),
    _row("poison-causal", poison=True, q_len=40, kv_len=150, is_causal=True, dtype="bfloat16"),
    _row("poison-window", poison=True, q_len=40, kv_len=150, local_window_size=(7, 20),
         causal_alignment="bottom_right", dtype="float16"),
    _row("poison-mask", poison=True, mask="B11S"),
    # Keys that nobody sees among those that some do, in several tiles.
    *(_row(f"poison-mask-{size}", poison=True, mask="B11S", q_len=200, kv_len=427, q_heads=4,
           kv_heads=2, head_dim=size, dtype=dtype, **options)
      for size, dtype, options in (
          (64, "float16", {}), (96, "bfloat16", {}), (128, "bfloat16", dict(is_causal=True)),
          (192, "bfloat16", dict(segments="pair")), (256, "bfloat16", dict(logits_soft_cap=5.0)),
      )),
    _row("decode-poison-mask", poison=True, mask="B11S", batch=(3,), q_len=1, kv_len=2000,
         q_heads=4, kv_heads=2, head_dim=128, dtype="bfloat16"),
    _row("poison-segments", poison=True, segments="pair"),
    _row("visible-nan", visible_nan=True, q_len=70, dtype="bfloat16"),
)  # fmt: skip

# Few queries and more than 1024 keys: blocks of the kernels share the keys of a query tile, whose
# parts are merged. One tile a kv head or several, lengths that end anywhere or see nothing.
_BOTTOM_RIGHT = dict(is_causal=True, causal_alignment="bottom_right")
DECODE = (
    _row("decode-1", q_len=1, kv_len=3001, q_heads=8, kv_heads=2, head_dim=128, dtype="bfloat16"),
    _row("decode-1-float16", q_len=1, kv_len=1100, q_heads=3, head_dim=64, dtype="float16"),
    _row("decode-1-float32", q_len=1, kv_len=1200, q_heads=4, kv_heads=1, head_dim=64),
    _row("decode-1-unbatched", batch=(), q_len=1, kv_len=2000, q_heads=4, kv_heads=4, head_dim=128,
         dtype="float16"),
    _row("decode-1-mqa-256", q_len=1, kv_len=1500, q_heads=16, kv_heads=1, head_dim=256,
         dtype="bfloat16"),
    _row("decode-2-ragged", batch=(2, 3), q_len=2, kv_len=1800, q_heads=8, kv_heads=2, head_dim=64,
         kv_lengths=(1800, 0, 1, 64, 1217, 129), dtype="bfloat16", **_BOTTOM_RIGHT),
    _row("decode-4-ragged-queries", batch=(5,), q_len=4, kv_len=1400, q_heads=4, kv_heads=2,
         head_dim=128, query_lengths=(4, 0, 1, 3, 4), kv_lengths=(1400, 900, 2, 700, 0),
         dtype="float16", **_BOTTOM_RIGHT),
    _row("decode-3-window", batch=(3,), q_len=3, kv_len=2500, q_heads=6, kv_heads=3, head_dim=128,
         local_window_size=(1200, 0), kv_lengths=(2500, 1300, 100), dtype="bfloat16",
         causal_alignment="bottom_right"),
    _row("decode-4-96", q_len=4, kv_len=1300, q_heads=4, kv_heads=2, head_dim=96, dtype="bfloat16",
         kv_lengths=(1299, 40)),
    _row("decode-5-192", q_len=5, kv_len=1250, q_heads=4, kv_heads=2, head_dim=192,
         dtype="float16", **_BOTTOM_RIGHT),
    _row("decode-1-192-value-128", q_len=1, kv_len=1500, q_heads=16, kv_heads=1, head_dim=192,
         value_dim=128, dtype="bfloat16"),
    _row("decode-1-72-value-40", q_len=1, kv_len=1500, q_heads=4, kv_heads=2, head_dim=72,
         value_dim=40, dtype="bfloat16", kv_lengths=(1490, 77)),
    # 48 rows of 64 are in use, so one of the heads' copies is not.
    _row("decode-9-group-3", q_len=9, kv_len=1100, q_heads=6, kv_heads=2, head_dim=64,
         dtype="bfloat16"),
    # Several tiles of rows a kv head, the last one in part.
    _row("decode-12-group-8", q_len=12, kv_len=1200, q_heads=16, kv_heads=2, head_dim=128,
         dtype="bfloat16", **_BOTTOM_RIGHT),
    _row("decode-64", batch=(1,), q_len=64, kv_len=1600, q_heads=4, kv_heads=2, head_dim=128,
         dtype="bfloat16", **_BOTTOM_RIGHT),
    _row("decode-64-256", batch=(1,), q_len=64, kv_len=1100, q_heads=3, kv_heads=1, head_dim=256,
         dtype="float16"),
    # A chunk of a prompt: tiles of a head see more and more keys; the first rows see none.
    _row("decode-chunk", batch=(2,), q_len=300, kv_len=1900, q_heads=2, kv_heads=1, head_dim=64,
         kv_lengths=(1900, 200), dtype="bfloat16", **_BOTTOM_RIGHT),
    _row("decode-causal", q_len=1100, q_heads=1, batch=(1,), head_dim=128, dtype="bfloat16",
         is_causal=True, gpu_only=True),
    _row("decode-poison", poison=True, batch=(3,), q_len=1, kv_len=2000, q_heads=4, kv_heads=2,
         head_dim=64, kv_lengths=(1999, 0, 333), dtype="bfloat16"),
    _row("decode-poison-window", poison=True, q_len=2, kv_len=2200, q_heads=4, kv_heads=1,
         head_dim=128, local_window_size=(1100, 3), causal_alignment="bottom_right",
         kv_lengths=(2100, 1500), dtype="float16"),
    _row("decode-visible-nan", visible_nan=True, q_len=4, kv_len=1500, q_heads=2, head_dim=128,
         dtype="bfloat16"),
    _row("decode-large-logits", q_len=2, kv_len=1500, q_heads=4, kv_heads=2, head_dim=128,
         magnitude=1e4, dtype="bfloat16"),
    _row("gpu-decode-32-8", batch=(2,), q_len=1, kv_len=10000, q_heads=32, kv_heads=8,
         head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("gpu-decode-64-8-ragged", batch=(16,), q_len=4, kv_len=5000, q_heads=64, kv_heads=8,
         head_dim=64, kv_lengths=(5000, 0, 0, 1, 63, 64, 65, 4999, 100, 0, 2500, 127, 128, 129,
                                  1024, 4097), dtype="float16", gpu_only=True, **_BOTTOM_RIGHT),
    _row("gpu-decode-16-1-256", batch=(3,), q_len=2, kv_len=9000, q_heads=16, kv_heads=1,
         head_dim=256, kv_lengths=(9000, 31, 6007), dtype="bfloat16", gpu_only=True),
    _row("gpu-decode-64-queries", batch=(1,), q_len=64, kv_len=9001, q_heads=32, kv_heads=8,
         head_dim=128, dtype="bfloat16", gpu_only=True, **_BOTTOM_RIGHT),
)  # fmt: skip

# The same with what changes scores or hides them: a unit's rows are of several heads, positions or
# both, of which each has its own sink, slope, bias and dropped elements. On a CPU they are rows as
# any others, and some of them are enough.
DECODE_SCORES = (
    _row("decode-cap-1", logits_soft_cap=2.0, q_len=1, kv_len=3001, q_heads=8, kv_heads=2,
         head_dim=128, dtype="bfloat16"),
    _row("decode-cap-12-group-8", logits_soft_cap=2.0, q_len=12, kv_len=1200, q_heads=16,
         kv_heads=2, head_dim=128, dtype="float16", gpu_only=True, **_BOTTOM_RIGHT),
    _row("decode-cap-64-256", logits_soft_cap=2.0, batch=(1,), q_len=64, kv_len=1100, q_heads=3,
         kv_heads=1, head_dim=256, dtype="bfloat16", gpu_only=True),
    _row("decode-cap-chunk", logits_soft_cap=2.0, batch=(2,), q_len=300, kv_len=1900, q_heads=2,
         kv_heads=1, head_dim=64, kv_lengths=(1900, 200), dtype="bfloat16", gpu_only=True,
         **_BOTTOM_RIGHT),
    # Parts without a sink, and whole tiles with theirs; rows without a key stay so.
    _row("decode-sink-1", sink=True, batch=(4,), q_len=1, kv_len=2000, q_heads=8, kv_heads=2,
         head_dim=64, kv_lengths=(2000, 0, 1, 130), dtype="bfloat16"),
    _row("decode-sink-3-window", sink=True, batch=(3,), q_len=3, kv_len=2500, q_heads=6, kv_heads=3,
         head_dim=128, local_window_size=(1200, 0), kv_lengths=(2500, 1300, 100), dtype="float16",
         causal_alignment="bottom_right", gpu_only=True),
    _row("decode-sink-small-logits", sink=True, q_len=2, kv_len=1500, q_heads=4, kv_heads=1,
         head_dim=256, magnitude=1e-3, dtype="bfloat16", gpu_only=True),
    _row("decode-sink-large-logits", sink=True, q_len=2, kv_len=1500, q_heads=4, kv_heads=2,
         head_dim=128, magnitude=1e4, dtype="bfloat16", gpu_only=True),
    _row("decode-alibi-2-ragged", alibi="BN", batch=(2, 3), q_len=2, kv_len=1800, q_heads=8,
         kv_heads=2, head_dim=64, kv_lengths=(1800, 0, 1, 64, 1217, 129), dtype="bfloat16",
         **_BOTTOM_RIGHT),
    _row("decode-bias-4", bias="BNTS", q_len=4, kv_len=1300, q_heads=4, kv_heads=2, head_dim=96,
         dtype="bfloat16", gpu_only=True),
    _row("decode-bias-keys-9-group-3", bias="BN1S", bias_dtype="float32", q_len=9, kv_len=1101,
         q_heads=6, kv_heads=2, head_dim=64, dtype="bfloat16", gpu_only=True),
    _row("decode-bias-hides", bias="11TS", bias_hides=True, q_len=8, kv_len=1200, q_heads=4,
         kv_heads=1, head_dim=128, dtype="float16"),
    _row("decode-relative-5-192", score_mod="relative-table", q_len=5, kv_len=1250, q_heads=4,
         kv_heads=2, head_dim=192, dtype="bfloat16", gpu_only=True),
    _row("decode-temperature-16-192-value-128", score_mod="temperature", q_len=2, kv_len=1500,
         q_heads=16, kv_heads=1, head_dim=192, value_dim=128, dtype="bfloat16", gpu_only=True),
    # Rows 8 apart are of two heads, of one head and 8 positions apart, and of a part of a tile.
    _row("decode-dropout-1", dropout_rate=0.3, q_len=1, kv_len=1400, q_heads=16, kv_heads=1,
         head_dim=128, dtype="bfloat16"),
    _row("decode-dropout-8", dropout_rate=0.1, q_len=8, kv_len=1100, q_heads=8, kv_heads=2,
         head_dim=64, dtype="float16", gpu_only=True),
    _row("decode-dropout-20-group-3", dropout_rate=0.5, q_len=20, kv_len=1200, q_heads=3,
         kv_heads=1, head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("decode-mask-keys", mask="B11S", q_len=1, kv_len=1500, q_heads=8, kv_heads=2, head_dim=64,
         dtype="bfloat16"),
    _row("decode-mask-rows", mask="BNTS", q_len=6, kv_len=1300, q_heads=4, kv_heads=2,
         head_dim=128, dtype="float16", gpu_only=True),
    _row("decode-mask-value-gap", mask_value="first-and-last", q_len=3, kv_len=3000, q_heads=4,
         kv_heads=2, head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("decode-mask-value-gap-chunk", mask_value="first-and-last", batch=(1,), q_len=150,
         kv_len=3000, q_heads=2, kv_heads=1, head_dim=64, dtype="bfloat16", gpu_only=True),
    _row("decode-mask-value-checkerboard", mask_value="checkerboard", q_len=2, kv_len=2100,
         q_heads=4, kv_heads=1, head_dim=256, dtype="bfloat16", gpu_only=True),
    _row("decode-mask-value-intervals", mask_value="intervals", q_len=5, kv_len=1500, q_heads=4,
         kv_heads=2, head_dim=64, dtype="bfloat16", gpu_only=True),
    _row("decode-segments", segments="pair", q_len=4, kv_len=1500, q_heads=4, kv_heads=2,
         head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("decode-everything", bias="BNTS", mask="B1TS", segments="shared", logits_soft_cap=3.0,
         sink=True, alibi="N", dropout_rate=0.2, q_len=1100, is_causal=True, batch=(1,), q_heads=2,
         kv_heads=1, head_dim=64, dtype="bfloat16", gpu_only=True),
    _row("decode-everything-few", bias="BNTS", mask="B1TS", segments="pair", logits_soft_cap=3.0,
         sink=True, alibi="N", dropout_rate=0.2, q_len=4, kv_len=1300, q_heads=8, kv_heads=2,
         head_dim=128, kv_lengths=(1300, 400), dtype="bfloat16", **_BOTTOM_RIGHT),
    _row("decode-cap-poison", logits_soft_cap=2.0, poison=True, batch=(3,), q_len=1, kv_len=2000,
         q_heads=4, kv_heads=2, head_dim=64, kv_lengths=(1999, 0, 333), dtype="bfloat16",
         gpu_only=True),
    _row("gpu-decode-cap-sink-32-8", logits_soft_cap=20.0, sink=True, batch=(2,), q_len=1,
         kv_len=10000, q_heads=32, kv_heads=8, head_dim=128, dtype="bfloat16", gpu_only=True),
    _row("gpu-decode-alibi-64-8-ragged", alibi="N", batch=(16,), q_len=4, kv_len=5000, q_heads=64,
         kv_heads=8, head_dim=64, kv_lengths=(5000, 0, 0, 1, 63, 64, 65, 4999, 100, 0, 2500, 127,
                                              128, 129, 1024, 4097), dtype="float16",
         gpu_only=True, **_BOTTOM_RIGHT),
    _row("gpu-decode-bias-16-1-256", bias="BNTS", batch=(3,), q_len=2, kv_len=9000, q_heads=16,
         kv_heads=1, head_dim=256, dtype="bfloat16", gpu_only=True),
    _row("gpu-decode-cap-64-queries", logits_soft_cap=5.0, batch=(1,), q_len=64, kv_len=9001,
         q_heads=32, kv_heads=8, head_dim=128, dtype="bfloat16", gpu_only=True, **_BOTTOM_RIGHT),
)  # fmt: skip

# What the portable kernels read by words and by pairs of neighbours, past a tile of keys and from
# the middle of one on: float32, and on Hopper head sizes whose rows are no multiple of 16 bytes.
PORTABLE = (
    _row("portable-mask-60", mask="BNTS", q_len=200, kv_len=421, head_dim=60, dtype="bfloat16"),
    _row("portable-mask-window-60", mask="B1TS", q_len=300, kv_len=500, head_dim=60,
         local_window_size=(170, 30), dtype="bfloat16", gpu_only=True),
    _row("portable-mask-window-100", mask="B1TS", q_len=300, kv_len=420, head_dim=100,
         local_window_size=(120, 60), kv_lengths=(420, 333), dtype="float16",
         causal_alignment="bottom_right", gpu_only=True),
    _row("portable-mask-poison-100", mask="B1TS", poison=True, q_len=300, kv_len=420, head_dim=100,
         kv_lengths=(420, 333), dtype="float16", gpu_only=True),
    _row("portable-mask-gqa-lengths-100", mask="BNTS", q_len=150, kv_len=330, head_dim=100,
         q_heads=4, kv_heads=2, query_lengths=(150, 70), kv_lengths=(129, 330), dtype="bfloat16",
         gpu_only=True),
    _row("portable-mask-segments-dropout-60", mask="11TS", segments="pair", q_len=150, kv_len=300,
         head_dim=60, dropout_rate=0.2, dtype="bfloat16", gpu_only=True),
    _row("portable-mask-function-100", mask="BNTS", mask_value="head-windows", q_len=170,
         kv_len=290, head_dim=100, dtype="float16", gpu_only=True),
    _row("portable-mask-keys-250", mask="B11S", is_causal=True, q_len=140, kv_len=270,
         head_dim=250, causal_alignment="bottom_right", dtype="bfloat16", gpu_only=True),
    _row("portable-mask-float32-64", mask="B1TS", q_len=200, kv_len=321, head_dim=64),
    _row("portable-mask-window-float32-128", mask="BNTS", q_len=150, kv_len=300, head_dim=128,
         local_window_size=(90, 20), gpu_only=True),
    _row("portable-mask-float32-highest-64", mask="B1TS", q_len=150, kv_len=260, head_dim=64,
         precision="highest", is_causal=True, gpu_only=True),
    _row("portable-bias-window-60", bias="BNTS", q_len=200, kv_len=300, head_dim=60,
         local_window_size=(111, 17), dtype="bfloat16"),
    _row("portable-bias-mask-100", bias="1NTS", mask="B1TS", poison=True, q_len=200, kv_len=318,
         head_dim=100, dtype="float16", gpu_only=True),
    _row("portable-bias-mask-window-100", bias="1NTS", mask="B1TS", q_len=200, kv_len=318,
         head_dim=100, local_window_size=(77, 40), dtype="bfloat16", gpu_only=True),
    _row("portable-bias-cap-float32-64", bias="BNTS", logits_soft_cap=3.0, q_len=200, kv_len=302,
         head_dim=64, local_window_size=(131, None), gpu_only=True),
    _row("portable-bias-odd-float32-128", bias="1NTS", q_len=130, kv_len=301, head_dim=128,
         is_causal=True, gpu_only=True),
)  # fmt: skip

# Shapes of real models, too large for the dense truth on two CPU cores.
LARGE = (
    _row("gpu-causal-1k", batch=(1,), q_len=1024, q_heads=4, head_dim=128, is_causal=True,
         dtype="bfloat16", gpu_only=True),
    _row("gpu-gqa-1k", batch=(2,), q_len=1000, kv_len=1100, q_heads=8, kv_heads=2, head_dim=64,
         dtype="float16", gpu_only=True),
    _row("gpu-256-2k", batch=(1,), q_len=2048, q_heads=2, head_dim=256, dtype="bfloat16",
         is_causal=True, deterministic_backward=True, gpu_only=True),
    _row("gpu-96-1k", batch=(1,), q_len=1030, q_heads=4, kv_heads=2, head_dim=96, dtype="float16",
         is_causal=True, gpu_only=True),
    _row("gpu-96-2k", batch=(1,), q_len=1300, kv_len=2100, q_heads=2, head_dim=96, dtype="float16",
         is_causal=True, causal_alignment="bottom_right", gpu_only=True),
    _row("gpu-128-2k", batch=(1,), q_len=1300, kv_len=2100, q_heads=2, head_dim=128,
         dtype="bfloat16", gpu_only=True),
    _row("gpu-128-cross-77", batch=(2,), q_len=1300, kv_len=77, q_heads=4, head_dim=128,
         dtype="bfloat16", gpu_only=True),
    _row("gpu-192-1k", batch=(1,), q_len=1024, q_heads=4, head_dim=192, dtype="bfloat16",
         gpu_only=True),
    _row("gpu-192-128-1k", batch=(1,), q_len=1025, q_heads=4, head_dim=192, value_dim=128,
         dtype="bfloat16", is_causal=True, gpu_only=True),
    _row("gpu-float32-1k", batch=(1,), q_len=1024, q_heads=4, head_dim=64, gpu_only=True),
    _row("gpu-float32-highest-1k", batch=(1,), q_len=1024, q_heads=4, head_dim=64,
         precision="highest", is_causal=True, gpu_only=True),
    _row("gpu-vision", batch=(8,), q_len=197, q_heads=12, head_dim=64, dtype="bfloat16",
         gpu_only=True),
    _row("gpu-window-4k", batch=(1,), q_len=4096, q_heads=1, head_dim=128, is_causal=True,
         local_window_size=(1023, 0), dtype="bfloat16", gpu_only=True),
)  # fmt: skip

CASES = (
    *BASE, *HEADS, *BANDS, *SCORES, *SCORES_OF_TILES, *PACKED, *SCORE_MOD_ROWS, *MASK_VALUE_ROWS,
    *GRADIENTS_OF_CAPTURES, *FAULTS, *DECODE, *DECODE_SCORES, *PORTABLE, *LARGE
)  # fmt: skip
