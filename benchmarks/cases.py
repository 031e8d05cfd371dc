"""What is timed, and the bar that each row has to reach.

A bar is a ratio of speeds from one run: ours over a peer's, or over ours of another row. Ratios,
because clocks and heat move absolute figures by up to 5 % from run to run. Where nothing that runs
beside a row has a recorded time, its goal alone is the bar.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import numpy as np

OURS = ("jaxflash", "blockwise")  # our peers of timing.PEERS: the kernels, the path in plain JAX

# Where the recorded figures come from.
SOURCE = (
    "Recorded on one NVIDIA H200 (driver 580, CUDA 13.0): jax.nn with cuDNN 9.19 (jax 0.11.2), "
    "best of cuDNN 9.19 (torch 2.11.0), FlashAttention-3 (0251105a), FlashAttention-4 4.0.0b36 and "
    "Pallas Mosaic GPU, and FlashAttention-2 (torch 2.11.0). jax.nn with its cost of a call, which "
    "shows at S = 512; the others are device times."
)


@dataclasses.dataclass(frozen=True)
class Bar:
    """`ratio` is how many times as fast as the yardstick ours has to be."""

    ratio: float | None
    peer: str = "cudnn"  # the yardstick: a peer, or the name of a case, whose call by ours it is
    portable: float | None = None  # the ratio that is enough for the portable kernels
    best: float | None = None  # TFLOP/s that the best peer was recorded with
    goal: float | None = None  # ms of a call that were set as the goal; the bar without a ratio


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of attention; letters as in CONTRIBUTING.md."""

    name: str
    batch: int | None  # None: no batch axis
    q_len: int
    q_heads: int
    head_dim: int
    kv_len: int | None = None  # None: q_len
    kv_heads: int | None = None  # None: q_heads
    value_dim: int | None = None  # None: head_dim
    dtype: str = "bfloat16"
    is_causal: bool = False
    local_window_size: tuple[int, int] | None = None
    kv_lengths: tuple[int, ...] | None = None  # keys of each sequence; None: all
    # "random": (B, 1, T, S); "keys": random, too, (B, 1, 1, S); "causal": (1, 1, T, S);
    # "padding": kv_lengths as (B, 1, 1, S); "prefix": a value, of the first quarter of the keys and
    # the causal ones
    mask: Literal["random", "keys", "causal", "padding", "prefix"] | None = None
    segments: int | None = None  # documents of one length in each sequence
    packed: tuple[int, ...] | None = None  # lengths of sequences in one axis of tokens
    page_size: int | None = None  # keys and values lie in pages of so many, anywhere in a pool
    logits_soft_cap: float | None = None
    sink: bool = False
    alibi: bool = False
    dropout_rate: float = 0.0
    bias: str | None = None  # shape, in the letters B, N, T, S and 1
    relative: bool = False  # a score_mod: bias of (N, T + S), read by q - kv
    capture_gradient: bool = True  # that of bias or table is computed too
    deterministic_backward: bool = False
    passes: tuple[str, ...] = ("forward", "backward")
    platform: str = "gpu"
    by_default: bool = True
    beside: tuple[str, ...] = ()  # timed in turns with it: peers, and ours of other cases
    forward: Bar | None = None
    backward: Bar | None = None
    gradient: Bar | None = None
    jvp: Bar | None = None
    hvp: Bar | None = None

    @property
    def function(self) -> str:
        if self.page_size is not None:
            return "paged_attention"
        return "dot_product_attention" if self.packed is None else "varlen_attention"

    @property
    def operand_shapes(self) -> dict[str, tuple[int, ...]]:
        """By name, of what has a gradient."""
        return {**self.qkv_shapes, **(self.capture_shapes if self.capture_gradient else {})}

    @property
    def qkv_shapes(self) -> dict[str, tuple[int, ...]]:
        lead = () if self.batch is None else (self.batch,)
        keys = (*lead, self.kv_len or self.q_len, self.kv_heads or self.q_heads)
        suffix = ""
        if self.page_size is not None:
            keys = (math.prod(self.page_table_shape), self.page_size, keys[-1])
            suffix = "_pages"
        return {
            "query": (*lead, self.q_len, self.q_heads, self.head_dim),
            f"key{suffix}": (*keys, self.head_dim),
            f"value{suffix}": (*keys, self.value_dim or self.head_dim),
        }

    @property
    def page_table_shape(self) -> tuple[int, int]:
        return (self.batch or 1, (self.kv_len or self.q_len) // (self.page_size or 1))

    @property
    def capture_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {}
        if self.bias is not None:
            sizes = {"B": self.batch or 1, "N": self.q_heads, "T": self.q_len, "1": 1}
            sizes["S"] = self.kv_len or self.q_len
            shapes["bias"] = tuple(sizes[letter] for letter in self.bias)
        if self.relative:
            shapes["table"] = (self.q_heads, self.q_len + (self.kv_len or self.q_len))
        return shapes

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.qkv_shapes["query"][:-1], self.value_dim or self.head_dim)

    @property
    def options(self) -> dict[str, Any]:
        """The static arguments of the call that differ from their defaults."""
        options = dict(
            is_causal=self.is_causal,
            local_window_size=self.local_window_size,
            logits_soft_cap=self.logits_soft_cap,
            dropout_rate=self.dropout_rate,
            deterministic_backward=self.deterministic_backward,
        )
        return {name: option for name, option in options.items() if option}

    @property
    def boundaries(self) -> np.ndarray:
        """Of the packed sequences."""
        return np.cumsum((0, *(self.packed or ())))

    @property
    def plain(self) -> bool:
        """Whether the kernels compiled ahead of time take it."""
        layouts = (self.segments, self.packed, self.page_size)
        changes = (self.mask, self.logits_soft_cap, self.bias, self.sink, self.alibi, self.relative)
        return not any((*layouts, *changes, self.dropout_rate))

    @property
    def compiled_at_run_time(self) -> bool:
        return not self.plain or any(pass_name in TANGENTS for pass_name in self.passes)

    @property
    def visible_pairs(self) -> float:
        """Query/key pairs of one head that the definition computes; plain causal counts half."""
        kv_len = self.kv_len or self.q_len
        if self.packed is not None:
            squares = sum(length**2 for length in self.packed)
            return squares * (0.5 if self.is_causal else 1.0)
        if self.segments is not None:
            return self.q_len * kv_len / self.segments * (0.5 if self.is_causal else 1.0)
        if self.mask in _SHARES:
            return self.q_len * kv_len * _SHARES[self.mask]
        if self.kv_lengths is not None:
            assert not self.is_causal, "not counted"
            assert self.local_window_size is None, "not counted"
            return self.q_len * sum(self.kv_lengths) / len(self.kv_lengths)
        if self.local_window_size is None:
            assert not self.is_causal or kv_len == self.q_len, "not counted"
            return self.q_len * kv_len * (0.5 if self.is_causal else 1.0)
        left, right = self.local_window_size
        rows = np.arange(self.q_len)
        last = np.minimum(rows + (0 if self.is_causal else right), kv_len - 1)
        return float(np.maximum(last - np.maximum(rows - left, 0) + 1, 0).sum())

    def flops(self, pass_name: str) -> float:
        """The usual count: two products forward, five backward (one of them computed again), and
        the products of tangents: four beside the forward pass, fifteen beside the gradient."""
        heads = (self.batch or 1) * self.q_heads
        products = self.head_dim + (self.value_dim or self.head_dim)
        factor = _PRODUCTS[pass_name] / 2
        return factor * 2.0 * heads * self.visible_pairs * products

    @property
    def cache_bytes(self) -> float | None:
        """Of the keys and values that a forward pass of few queries reads; else None."""
        if self.q_len > 64 or self.local_window_size is not None:
            return None
        keys = self.visible_pairs / self.q_len * (self.batch or 1) * (self.kv_heads or self.q_heads)
        columns = self.head_dim + (self.value_dim or self.head_dim)
        return keys * columns * (4 if self.dtype == "float32" else 2)

    @property
    def dense_bytes(self) -> float:
        """What a peer that stores logits and probabilities needs, twice in float32."""
        kv_len = self.kv_len or self.q_len
        return 8.0 * math.prod((self.batch or 1, self.q_heads, self.q_len, kv_len))

    def tiny(self, platform: str) -> Case:
        """The same call at a size of no meaning, to see that it runs there and is right."""
        group = min(self.q_heads // (self.kv_heads or self.q_heads), 2)
        q_len, batch = min(self.q_len, 32), min(self.batch or 1, 2)
        kv_len = None if self.kv_len is None else min(self.kv_len, 64)
        packed = None if self.packed is None else (q_len - 20, 3, 17)
        lengths = self.kv_lengths
        if lengths is not None:
            lengths = tuple((kv_len or q_len) * n // max(lengths) for n in lengths[-batch:])
        window = self.local_window_size
        return dataclasses.replace(
            self,
            batch=None if self.batch is None else batch,
            q_len=q_len,
            q_heads=2 * group,
            head_dim=min(self.head_dim, 16),
            kv_len=kv_len,
            kv_heads=None if self.kv_heads is None else 2,
            value_dim=None if self.value_dim is None else 8,
            local_window_size=window and (min(window[0], 7), min(window[1], 7)),
            kv_lengths=lengths,
            segments=self.segments and min(self.segments, 4),
            packed=packed,
            page_size=self.page_size and 16,
            platform=platform,
        )


RANDOM_SHARE = 0.7  # of a random mask that is True
PREFIX = 4  # one in so many keys
_SHARES = {
    "random": RANDOM_SHARE,
    "keys": RANDOM_SHARE,
    "causal": 0.5,
    "prefix": 0.5 + 0.5 / PREFIX**2,
}
_PRODUCTS = {"forward": 2, "backward": 5, "gradient": 7, "jvp": 6, "hvp": 22}
PASSES = tuple(_PRODUCTS)
TANGENTS = ("jvp", "hvp")


# The grid: 16,384 tokens a call, 2048 / head size heads, bfloat16. TFLOP/s of jax.nn with cuDNN,
# of the best peer, and of FlashAttention-2; forward, then backward.
_GRID = (
    (64, 512, False, (338, 392, 258), (244, 331, 204)),
    (64, 512, True, (223, 264, 154), (144, 196, 135)),
    (64, 2048, False, (423, 503, 295), (382, 491, 263)),
    (64, 2048, True, (354, 433, 241), (298, 425, 216)),
    (64, 8192, False, (450, 531, 307), (433, 524, 285)),
    (64, 8192, True, (419, 538, 286), (392, 517, 260)),
    (64, 16384, False, (455, 534, 308), (444, 535, 290)),
    (64, 16384, True, (433, 521, 292), (421, 541, 276)),
    (128, 512, False, (423, 542, 289), (286, 360, 215)),
    (128, 512, True, (271, 347, 180), (176, 228, 151)),
    (128, 2048, False, (557, 697, 350), (453, 556, 283)),
    (128, 2048, True, (436, 626, 254), (356, 481, 238)),
    (128, 8192, False, (601, 694, 342), (521, 596, 306)),
    (128, 8192, True, (527, 706, 305), (471, 570, 289)),
    (128, 16384, False, (607, 684, 345), (531, 608, 312)),
    (128, 16384, True, (552, 698, 319), (514, 600, 314)),
    (256, 512, False, (433, 546, 268), (212, 294, 192)),
    (256, 512, True, (280, 355, 205), (151, 200, 137)),
    (256, 2048, False, (592, 756, 317), (330, 427, 239)),
    (256, 2048, True, (471, 644, 254), (280, 380, 203)),
    (256, 8192, False, (649, 782, 318), (350, 461, 259)),
    (256, 8192, True, (564, 784, 283), (368, 452, 247)),
    (256, 16384, False, (660, 744, 319), (353, 466, 261)),
    (256, 16384, True, (588, 768, 271), (372, 465, 258)),
)


def _grid_bar(jax_nn: int, best: int, flash2: int) -> Bar:
    return Bar(best / jax_nn, portable=flash2 / jax_nn, best=best)


GRID = tuple(
    Case(
        f"grid/{head_dim}-{length}{'-causal' if is_causal else ''}",
        batch=16384 // length,
        q_len=length,
        q_heads=2048 // head_dim,
        head_dim=head_dim,
        is_causal=is_causal,
        forward=_grid_bar(*forward),
        backward=_grid_bar(*backward),
    )
    for head_dim, length, is_causal, forward, backward in _GRID
)


def _bar(peer_ms: float, goal_ms: float | None = None, peer: str = "cudnn") -> Bar:
    """From a recorded time of the peer and the time set as the goal; without one, the peer's."""
    return Bar(peer_ms / (goal_ms or peer_ms), peer, goal=goal_ms)


# Where cuDNN does not take the call, the yardstick is jax.nn's XLA path.
SHAPES = (
    Case("shape/gqa-8192", 2, 8192, 32, 128, kv_heads=8, is_causal=True,
         forward=_bar(2.03, 1.60), backward=_bar(5.74, 4.6)),
    Case("shape/gqa-2048", 8, 2048, 32, 128, kv_heads=8, is_causal=True,
         forward=_bar(0.596), backward=_bar(1.96, 1.4)),
    Case("shape/gqa-256", 4, 4096, 16, 256, kv_heads=8, is_causal=True,
         forward=_bar(0.982), backward=_bar(4.22, 3.2)),
    Case("shape/window", 1, 16384, 16, 128, is_causal=True, local_window_size=(1023, 0),
         forward=_bar(0.323, 0.26), backward=_bar(0.982, 0.75)),
    Case("shape/bias", 8, 2048, 16, 64, bias="1NTS",
         forward=_bar(0.602, 0.37), backward=_bar(3.032, 1.6)),
    Case("shape/pair-bias", 384, 384, 4, 32, bias="1NTS",
         forward=_bar(0.307, 0.14), backward=_bar(1.540, 0.75)),
    Case("shape/vision-197", 256, 197, 12, 64,
         forward=_bar(0.189, 0.12), backward=_bar(1.69, peer="xla")),
    Case("shape/causal-128", 128, 128, 16, 64, is_causal=True,
         forward=_bar(0.116, 0.07), backward=_bar(0.253, 0.14)),
    Case("shape/decode", 64, 1, 32, 128, kv_len=8192, kv_heads=8,
         forward=_bar(0.489), backward=_bar(3.57, peer="xla")),
    Case("shape/float32", 2, 4096, 16, 64, dtype="float32",
         forward=_bar(2.40, 1.6, peer="xla"), backward=_bar(5.16, 3.5, peer="xla")),
    Case("shape/even-4096", 4, 4096, 16, 128, is_causal=True),
    Case("shape/odd-4095", 4, 4095, 16, 128, is_causal=True,
         forward=Bar(1 / 1.03, "shape/even-4096"), backward=_bar(11.4, peer="xla")),
)  # fmt: skip


def _decode(
    name: str,
    batch: int,
    kv_len: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    bar: Bar | None,
    q_len: int = 1,
    kv_lengths: tuple[int, ...] | None = None,
) -> Case:
    return Case(f"decode/{name}", batch, q_len, heads, head_dim, kv_len=kv_len, kv_heads=kv_heads,
                kv_lengths=kv_lengths, passes=("forward",), forward=bar)  # fmt: skip


# Half of the sequences are short, one is as long as the cache.
_RAGGED = tuple(100 + 29 * i for i in range(32)) + tuple(2047 + 991 * i for i in range(32))

# Few queries against a cache: batch x keys, query heads / key heads, head size.
DECODE = (
    _decode("1-32768", 1, 32768, 32, 8, 128, _bar(0.067, 0.055)),
    _decode("1-131072", 1, 131072, 32, 8, 128, _bar(0.138, 0.135)),
    _decode("4-8192", 4, 8192, 32, 8, 128, _bar(0.063, 0.057)),
    _decode("16-8192", 16, 8192, 32, 8, 128, _bar(0.135, 0.132)),
    _decode("8-8192-64/8-64", 8, 8192, 64, 8, 64, _bar(0.064, 0.057)),
    _decode("8-8192-16/1-256", 8, 8192, 16, 1, 256, _bar(0.063, 0.045)),
    _decode("8-8192-4-queries", 8, 8192, 32, 8, 128, _bar(0.267, 0.085), q_len=4),
    _decode("1-65536-64-queries", 1, 65536, 32, 8, 128, _bar(0.999, 0.18), q_len=64),
    _decode("ragged-64", 64, 32768, 32, 8, 128, None, kv_lengths=_RAGGED),
)


_CHANGES = {
    "cap": dict(logits_soft_cap=30.0),
    "sink": dict(sink=True),
    "alibi": dict(alibi=True),
    "bias": dict(bias="1NTS"),
}

# The same with what changes scores, which may take 1.1 times as long: keys still have to arrive. 64
# queries are bound by the softmax.
_DECODE_BY_NAME = {case.name: case for case in DECODE}
DECODE_SCORES = tuple(
    dataclasses.replace(
        plain,
        name=f"{plain.name}-{change}",
        by_default=False,
        forward=Bar(1 / (1.3 if plain.q_len == 64 else 1.1), plain.name),
        **_CHANGES[change],
    )
    for name, changes in (
        ("1-131072", ("cap", "sink", "alibi")),
        ("16-8192", ("cap", "sink")),
        ("8-8192-64/8-64", ("cap", "sink")),
        ("8-8192-16/1-256", ("cap", "sink")),
        ("8-8192-4-queries", ("cap", "sink", "alibi", "bias")),
        ("1-65536-64-queries", ("cap", "sink")),
        ("ragged-64", ("cap", "sink")),
    )
    for plain in [_DECODE_BY_NAME[f"decode/{name}"]]
    for change in changes
)


def _paged(page_size: int, contiguous: Case) -> Case:
    """The same cache in pages, which may take 1.25 times as long where they are small."""
    bar = Bar(1 / (1.25 if page_size == 16 else 1.08), contiguous.name)
    name = f"paged/{contiguous.name.removeprefix('decode/')}-{page_size}"
    return dataclasses.replace(
        contiguous, name=name, page_size=page_size, by_default=False, forward=bar
    )


PAGED = tuple(
    _paged(page_size, case)
    for case in DECODE
    if case.name.removeprefix("decode/") in ("1-131072", "16-8192", "8-8192-4-queries", "ragged-64")
    for page_size in (16, 64, 256)
)


def _size(
    head_dim: int,
    forward: Bar | None = None,
    backward: Bar | None = None,
    value_dim: int | None = None,
) -> Case:
    name = f"size/{head_dim}" if value_dim is None else f"size/{head_dim}-{value_dim}"
    return Case(name, 4, 4096, 16, head_dim, value_dim=value_dim, is_causal=True, by_default=False,
                forward=forward, backward=backward)  # fmt: skip


# Head sizes between the powers of two, which have to be cheaper than the next power.
SIZES = (
    _size(80, Bar(1.0, "size/96"), Bar(1.0, "size/96")),
    _size(96, Bar(1 / 0.85, "size/128"), Bar(1 / 0.9, "size/128")),
    _size(112, Bar(1.0, "size/128"), Bar(1.0, "size/128")),
    _size(128),
    _size(160, Bar(1 / 0.85, "size/256"), Bar(1 / 0.85, "size/256")),
    _size(192, Bar(1 / 0.95, "size/256"), Bar(1 / 0.85, "size/256")),
    _size(192, value_dim=128),
    _size(256),
)

# Repeatable gradients, against ours in the free order.
DETERMINISTIC = tuple(
    dataclasses.replace(
        case,
        name=case.name.replace("grid/", "deterministic/"),
        deterministic_backward=True,
        passes=("backward",),
        by_default=False,
        forward=None,
        backward=Bar(1 / (1.4 if case.head_dim == 256 else 1.25), case.name),
    )
    for case in GRID
    if case.q_len == 8192
)

# The blockwise path on a CPU: at most 1.25 x the time of jax.nn.
_CPU = dict(dtype="float32", platform="cpu", passes=("forward", "gradient"),
            forward=Bar(1 / 1.25, "xla"), gradient=Bar(1 / 1.25, "xla"))  # fmt: skip
CPU = (
    Case("cpu/512", 1, 512, 2, 64, **_CPU),
    Case("cpu/4096", 1, 4096, 8, 64, **_CPU),
)

# What changes scores and what hides them, beside ours of the same call without it; goals in ms.
_CALL = (4, 4096, 16, 128)  # batch, length, heads, head size
_CAUSAL = dict(is_causal=True)


def _feature(
    name: str,
    forward: Bar | float | None = None,
    backward: Bar | float | None = None,
    beside: tuple[str, ...] = (),
    call: tuple[int | None, int, int, int] = _CALL,
    **changes: Any,
) -> Case:
    """A number is a goal, where no peer has the feature."""
    yardstick = beside[0] if beside else "cudnn"
    bars = {
        pass_name: Bar(None, yardstick, goal=bar) if isinstance(bar, float) else bar
        for pass_name, bar in (("forward", forward), ("backward", backward))
        if bar is not None
    }
    return Case(name, *call, by_default=False, beside=beside, **bars, **changes)


_PLAIN, _BAND = ("score/plain",), ("score/causal",)
_RELATIVE_BIAS = dict(bias="1NTS", beside=("score/plain", "xla"))
_KEY_BIAS = dict(bias="BN1S", beside=("score/plain", "xla"))
_ROW_BIAS = dict(bias="B11S", beside=("score/plain", "xla"))
_BACKWARD = ("backward",)

SCORES = (
    _feature("score/plain", _bar(0.939, 0.826), _bar(2.758, 2.448)),
    _feature("score/causal", _bar(0.549, 0.464), _bar(1.605, 1.330), **_CAUSAL),
    _feature("score/window", _bar(0.196, 0.161), _bar(0.651, 0.532), local_window_size=(511, 0),
             **_CAUSAL),
    _feature("score/cap", 1.0, 2.95, _PLAIN, logits_soft_cap=30.0),
    _feature("score/cap-causal", 0.55, 1.60, _BAND, logits_soft_cap=30.0, **_CAUSAL),
    _feature("score/gemma", 0.95, 3.4, ("score/gemma-uncapped",), (4, 4096, 16, 256), kv_heads=8,
             logits_soft_cap=50.0, local_window_size=(4095, 0), **_CAUSAL),
    _feature("score/gemma-uncapped", call=(4, 4096, 16, 256), kv_heads=8,
             local_window_size=(4095, 0), **_CAUSAL),
    _feature("score/sink-causal", 0.48, 1.40, _BAND, sink=True, **_CAUSAL),
    _feature("score/alibi", beside=_PLAIN, alibi=True),
    _feature("score/alibi-causal", 0.50, 1.45, _BAND, alibi=True, **_CAUSAL),
    _feature("score/dropout", 1.05, 3.0, _PLAIN, dropout_rate=0.1),
    _feature("score/dropout-causal", 0.60, 1.65, _BAND, dropout_rate=0.1, **_CAUSAL),
    _feature("score/bias-1NTS", _bar(1.882, 1.05), capture_gradient=False, **_RELATIVE_BIAS),
    _feature("score/bias-1NTS-gradient", None, _bar(6.909, 3.6), passes=_BACKWARD,
             **_RELATIVE_BIAS),
    _feature("score/bias-BNTS", bias="BNTS", beside=_PLAIN, capture_gradient=False),
    _feature("score/bias-BNTS-gradient", None, 3.0, _PLAIN, bias="BNTS", passes=_BACKWARD),
    _feature("score/bias-BNTS-gradient-causal", None, 2.0, _BAND, bias="BNTS", passes=_BACKWARD,
             **_CAUSAL),
    _feature("score/bias-BN1S", _bar(3.98, 0.95, "xla"), capture_gradient=False, **_KEY_BIAS),
    _feature("score/bias-BN1S-gradient", None, _bar(10.5, 2.8, "xla"), passes=_BACKWARD,
             **_KEY_BIAS),
    _feature("score/bias-B11S", capture_gradient=False, **_ROW_BIAS),
    _feature("score/bias-B11S-gradient", passes=_BACKWARD, **_ROW_BIAS),
    _feature("score/relative", 1.05, None, _PLAIN, relative=True, capture_gradient=False),
    _feature("score/relative-gradient", None, 3.3, _PLAIN, relative=True, passes=_BACKWARD),
)  # fmt: skip

_LONG = (2, 8192, 16, 128)
_LENGTHS = (4096, 3000, 2000, 1000)
# 27 lengths drawn from 100 to 1070.
_PACKED = (
    558, 596, 832, 1021, 133, 239, 898, 1020, 341, 402, 942, 510, 364, 902, 349, 496, 724, 633,
    183, 126, 939, 830, 912, 621, 893, 419, 501,
)  # fmt: skip

MASKS = (
    _feature("mask/random", _bar(1.773, 1.0), _bar(4.771, 2.9), ("score/plain", "xla"),
             mask="random"),
    _feature("mask/keys", beside=_PLAIN, mask="keys"),
    _feature("mask/causal", _bar(1.703, 0.56), _bar(4.775, 1.6), ("score/causal", "xla"),
             mask="causal"),
    _feature("mask/causal-8192", Bar(1 / 1.25, "mask/is-causal-8192"),
             Bar(1 / 1.25, "mask/is-causal-8192"), call=_LONG, mask="causal"),
    _feature("mask/is-causal-8192", call=_LONG, **_CAUSAL),
    _feature("mask/prefix", beside=_BAND, mask="prefix"),
    _feature("mask/lengths", beside=_PLAIN, kv_lengths=_LENGTHS),
    _feature("mask/padding", Bar(1 / 1.1, "mask/lengths"), Bar(1 / 1.1, "mask/lengths"), ("xla",),
             mask="padding", kv_lengths=_LENGTHS),
    _feature("mask/segments", 0.165, 0.52, _PLAIN, segments=8),
    _feature("mask/segments-causal", 0.125, 0.42, _BAND, segments=8, **_CAUSAL),
    _feature("mask/packed-causal", 0.18, 0.48, ("mask/segments-causal",),
             (None, sum(_PACKED), 16, 128), packed=_PACKED, **_CAUSAL),
    _feature("mask/packed-equal-causal", Bar(1.0, "score/causal"), Bar(1.0, "score/causal"),
             call=(None, 4 * 4096, 16, 128), packed=(4096,) * 4, **_CAUSAL),
)  # fmt: skip

# FlashAttention-4 (fa4-jax 0.1.0) took 5.31 ms, causal 2.87, and 4.96 at head size 64.
_TANGENTS = dict(passes=TANGENTS, beside=("xla",))
DERIVATIVES = (
    _feature("derivative/128", jvp=Bar(None, "xla", goal=3.0), **_TANGENTS),
    _feature("derivative/128-causal", jvp=Bar(None, "xla", goal=1.7), **_TANGENTS, **_CAUSAL),
    _feature("derivative/64", jvp=Bar(None, "xla", goal=3.5), call=(4, 4096, 32, 64), **_TANGENTS),
    _feature("derivative/cap-causal", logits_soft_cap=30.0, **_TANGENTS, **_CAUSAL),
)  # fmt: skip

CASES = (
    *GRID, *SHAPES, *DECODE, *DECODE_SCORES, *PAGED, *SIZES, *DETERMINISTIC, *SCORES, *MASKS,
    *DERIVATIVES, *CPU,
)  # fmt: skip
BY_NAME = {case.name: case for case in CASES}

# Bytes a second that a copy reaches, by device: what the share of a cache's bytes is taken of.
COPY_RATES = {"NVIDIA H200": 4.28e12}

# What is measured beside the cases (extra.py). Microseconds of a call of a tiny shape, and bytes:
# on the GPU beyond inputs and outputs, on the CPU of the whole process.
HOST_LIMITS = {"host/jit": 78.0, "host/eager": 200.0, "host/chain": 15.0}
MEMORY_LIMITS = {"memory/float32-131072": 1e9, "memory/cpu-32768": 2e9}
