"""What is timed, and the bar that each row has to reach.

A bar is a ratio of speeds from one run: ours over a peer's, or over ours of another row. Ratios,
because clocks and heat move absolute figures by up to 5 % from run to run.
"""

from __future__ import annotations

import dataclasses
import math

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

    ratio: float
    peer: str = "cudnn"  # the yardstick, in the same row
    row: str | None = None  # instead: ours in this row
    portable: float | None = None  # the ratio that is enough for the portable kernels
    best: float | None = None  # TFLOP/s that the best peer was recorded with


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
    bias: tuple[int, ...] | None = None  # shape; its gradient is computed too
    deterministic_backward: bool = False
    passes: tuple[str, ...] = ("forward", "backward")
    platform: str = "gpu"
    by_default: bool = True
    forward: Bar | None = None
    backward: Bar | None = None
    gradient: Bar | None = None

    @property
    def operand_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of query, key, value and, where there is one, bias."""
        lead = () if self.batch is None else (self.batch,)
        kv_len = self.kv_len or self.q_len
        kv_heads = self.kv_heads or self.q_heads
        query = (*lead, self.q_len, self.q_heads, self.head_dim)
        key = (*lead, kv_len, kv_heads, self.head_dim)
        value = (*lead, kv_len, kv_heads, self.value_dim or self.head_dim)
        return (query, key, value) if self.bias is None else (query, key, value, self.bias)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.operand_shapes[0][:-1], self.value_dim or self.head_dim)

    @property
    def visible_pairs(self) -> float:
        """Query/key pairs of one head that the definition computes; plain causal counts half."""
        kv_len = self.kv_len or self.q_len
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
        """The usual count: two products forward, five backward (one of them computed again)."""
        heads = (self.batch or 1) * self.q_heads
        products = self.head_dim + (self.value_dim or self.head_dim)
        factor = {"forward": 1.0, "backward": 2.5, "gradient": 3.5}[pass_name]
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
    return Bar(peer_ms / (goal_ms or peer_ms), peer)


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
    Case("shape/bias", 8, 2048, 16, 64, bias=(1, 16, 2048, 2048),
         forward=_bar(0.615), backward=_bar(2.97)),
    Case("shape/pair-bias", 384, 384, 4, 32, bias=(1, 4, 384, 384),
         forward=_bar(0.304), backward=_bar(1.52)),
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
         forward=Bar(1 / 1.03, row="shape/even-4096"), backward=_bar(11.4, peer="xla")),
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


def _size(head_dim: int, bar: Bar | None = None, value_dim: int | None = None) -> Case:
    name = f"size/{head_dim}" if value_dim is None else f"size/{head_dim}-{value_dim}"
    return Case(name, 4, 4096, 16, head_dim, value_dim=value_dim, is_causal=True, by_default=False,
                forward=bar)  # fmt: skip


# Head sizes between the powers of two, which have to be cheaper than the next power.
SIZES = (
    _size(80, Bar(1.0, row="size/96")),
    _size(96, Bar(1 / 0.85, row="size/128")),
    _size(112, Bar(1.0, row="size/128")),
    _size(128),
    _size(160, Bar(1 / 0.85, row="size/256")),
    _size(192, Bar(1 / 0.95, row="size/256")),
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
        backward=Bar(1 / (1.4 if case.head_dim == 256 else 1.25), row=case.name),
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

CASES = (*GRID, *SHAPES, *DECODE, *SIZES, *DETERMINISTIC, *CPU)
PASSES = ("forward", "backward", "gradient")

# Bytes a second that a copy reaches, by device: what the share of a cache's bytes is taken of.
COPY_RATES = {"NVIDIA H200": 4.28e12}

# What is measured beside the cases (extra.py). Microseconds of a call of a tiny shape, and bytes:
# on the GPU beyond inputs and outputs, on the CPU of the whole process.
HOST_LIMITS = {"host/jit": 78.0, "host/eager": 200.0, "host/chain": 15.0}
MEMORY_LIMITS = {"memory/float32-131072": 1e9, "memory/cpu-32768": 2e9}
