"""The dropout mask in the kernels' fragments, compiled for the host, against jaxflash._dropout."""

import ctypes
import functools
import itertools
import pathlib
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxflash import _dropout

_CUDA = pathlib.Path(__file__).parents[1] / "cuda"
_COMPILER = shutil.which("g++") or shutil.which("c++")
_HEAD, _BATCH = 5, 3
_Q_LEN, _KV_LEN = 144, 256
_SOURCE = """
#include <cstdint>
#define __device__
#define __forceinline__ inline
static uint32_t __ldg(const uint32_t* x) { return *x; }
// Lanes run one after another, twice: what they receive the second time has been sent before.
static int lane, exchanges;
static uint32_t sent[32][8];
static uint32_t __shfl_xor_sync(uint32_t, uint32_t x, int mask) {
  sent[lane][exchanges] = x;
  return sent[lane ^ mask][exchanges++];
}
#include "common/dropout.cuh"

template <bool kRowsAreQueries, int kColumns, bool kDense>
void draw(const uint32_t* parameters, int batch, int head, int first_row, int first_column,
          float* kept) {
  const jaxflash::Dropout dropout(parameters, batch, head);
  for (int turn = 0; turn < 64; ++turn) {
    lane = turn % 32, exchanges = 0;
    jaxflash::KeepBits<kRowsAreQueries, kColumns, kDense> bits, all;
    all.keep_all();
    const int row = lane / 4, column = lane % 4 * 2;
    dropout.draw(bits, first_row + row, first_column + column);
    for (int i = 0; i < kColumns / 2; ++i) {
      const int r = row + i / 2 % 2 * 8, c = column + i / 4 * 8 + i % 2;
      const uint32_t half = bits.of_pair(i / 2 * 2, ~0u) >> i % 2 * 16 & 0xffff;
      const float one = bits.of(i, 1.f);
      const bool agree = half == (one == 1.f ? 0xffff : 0) && all.of(i, 1.f) == 1.f;
      kept[r * kColumns + c] = agree && (one == 1.f || dropout.drops()) ? one : NAN;
    }
  }
}
#define DRAW(NAME, ROWS_ARE_QUERIES, COLUMNS, DENSE)                                         \\
  extern "C" void NAME(const uint32_t* parameters, int batch, int head, int row, int column, \\
                       float* kept) {                                                        \\
    draw<ROWS_ARE_QUERIES, COLUMNS, DENSE>(parameters, batch, head, row, column, kept);      \\
  }
"""
# For the instruction that common/bytes.cuh is made of.
_BYTES = """
#pragma once
#include <cstdint>
namespace jaxflash {
template <uint32_t kSelector>
uint32_t permute_bytes(uint32_t low, uint32_t high) {
  const uint64_t both = uint64_t{high} << 32 | low;
  uint32_t bytes = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t digit = kSelector >> 4 * i & 15, byte = both >> digit % 8 * 8 & 0xff;
    bytes |= (digit < 8 ? byte : byte < 0x80 ? 0u : 0xffu) << 8 * i;
  }
  return bytes;
}
}
"""
_FRAGMENTS = [
    (by_rows, columns, dense)
    for by_rows, dense in ((True, False), (True, True), (False, True))
    for columns in (16, 64, 80, 128)
]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if _COMPILER is None or not _CUDA.is_dir():
        pytest.skip("needs a C++ compiler and the sources")
    folder = tmp_path_factory.mktemp("dropout")
    lines = [
        f"DRAW(draw_{by_rows:d}_{columns}_{dense:d}, {by_rows:d}, {columns}, {dense:d})"
        for by_rows, columns, dense in _FRAGMENTS
    ]
    (folder / "draw.cc").write_text(_SOURCE + "\n".join(lines) + "\n")
    (folder / "common").mkdir()
    (folder / "common" / "bytes.cuh").write_text(_BYTES)
    command = [_COMPILER, "-std=c++17", "-O1", "-Wall", "-shared", "-fPIC", "-I.", f"-I{_CUDA}"]
    done = subprocess.run(
        [*command, "draw.cc", "-o", "draw.so"], cwd=folder, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "draw.so"))


@pytest.fixture(scope="module")
def masks():
    """(queries, keys) of one batch element and head, by rate."""
    rates = (2.0**-17, 0.1, 0.5, 1.0 - 2.0**-17)
    row = jnp.arange(_Q_LEN).reshape(1, 1, -1, 1)
    number = jnp.ones((1, 1, 1, 1), jnp.int32)

    @jax.jit
    def draw(seed):
        return [
            _dropout.keep(seed, rate, _BATCH * number, _HEAD * number, row, 0, _KV_LEN)[0, 0]
            for rate in rates
        ]

    return dict(zip(rates, map(np.asarray, draw(_seed())), strict=True))


def _seed():
    return jnp.array([123456789, 4000000000], jnp.uint32)


@pytest.mark.parametrize(("by_rows", "columns", "dense"), _FRAGMENTS)
def test_fragments(library, masks, by_rows, columns, dense):
    for rate, mask in masks.items():
        parameters = np.asarray(_dropout.kernel_parameters(_seed(), rate))
        expected = mask if by_rows else mask.T
        first_columns = range(0, expected.shape[1] - columns + 1, 16)
        assert first_columns
        for first_row in range(0, 48, 16):
            for first_column in first_columns:
                kept = np.full((16, columns), np.nan, np.float32)
                pointers = [x.ctypes.data_as(ctypes.c_void_p) for x in (parameters, kept)]
                getattr(library, f"draw_{by_rows:d}_{columns}_{dense:d}")(
                    pointers[0], _BATCH, _HEAD, first_row, first_column, pointers[1]
                )
                part = expected[first_row : first_row + 16, first_column : first_column + columns]
                np.testing.assert_array_equal(kept, part.astype(np.float32))


def test_permutation():
    """Against Python's integers."""
    numbers = (0, 1, 0x243F6A88, 0xFFFFFFFF)
    for x0, x1 in itertools.product(numbers, numbers):
        words, multiplier = (x0, x1), 1
        for _ in range(7):
            before, multiplier = words[0], multiplier * 0x9E3779B1 % 2**32
            word = (words[0] * multiplier + words[1]) % 2**32
            words = word, words[1] ^ int.from_bytes(word.to_bytes(4, "little"), "big")
        expected = before, *words
        assert tuple(map(int, _dropout.permute(jnp.uint32(x0), jnp.uint32(x1)))) == expected


@pytest.mark.parametrize("rounds", [4, 7])
def test_differences_leave_no_trace(monkeypatch, rounds):
    """Of two counters a power of two apart, each bit of one word is independent of each of the
    other's. Four rounds leave something to be seen."""
    monkeypatch.setattr(_dropout, "_ROUNDS", rounds)
    count = 2**16
    random = np.random.default_rng(0)

    @jax.jit
    def signs(counters, key):
        words = _dropout.permute(counters[0] + key[0], counters[1] + key[1])[1:]
        places = jnp.arange(32, dtype=jnp.uint32)[:, None]
        bits = jnp.concatenate([w[None] >> places & 1 for w in words])
        return 1.0 - 2.0 * bits.astype(jnp.float32)

    worst = 0.0
    for axis, power in itertools.product(range(2), range(16)):
        counters = random.integers(0, 2**16, (2, count)).astype(np.uint32)
        key = random.integers(0, 2**32, 2).astype(np.uint32)
        others = counters.copy()
        others[axis] += 2**power
        products = np.asarray(signs(counters, key)) @ np.asarray(signs(others, key)).T
        worst = max(worst, np.abs(products).max() / np.sqrt(count))
    assert (worst < 6.0) == (rounds == 7), worst


def test_rates_at_both_ends(masks):
    """Below half of a step of 2**-15 nothing is dropped; something is kept at every rate."""
    assert masks[2.0**-17].all()
    assert _dropout.kept_scale(2.0**-17) == 1.0
    assert _dropout.threshold(1.0 - 2.0**-17) == 2**15 - 1
    assert _dropout.kept_scale(1.0 - 2.0**-17) == 2.0**15


def test_bits_are_independent(masks):
    """Of elements that come from one call of the generator, and of neighbours."""
    kept = masks[0.5]
    n = kept.size
    for rows, columns in (
        *((0, 1), (0, 2), (0, 8), (0, 9), (0, 16), (1, 0), (8, 0), (16, 0)),
        *((1, 1), (8, 1), (8, 8), (8, 9)),
    ):
        shifted = np.roll(kept, (rows, columns), (0, 1))
        assert abs((kept == shifted).mean() - 0.5) < 5 * 0.5 / np.sqrt(n), (rows, columns)
    assert abs(kept.mean() - 0.5) < 5 * 0.5 / np.sqrt(n)


@pytest.fixture(scope="module")
def dropped():
    """By rate, (heads, queries, keys): far from 0 and 1, and below what 7 bits can say."""
    heads = jnp.arange(8).reshape(1, -1, 1, 1)
    row = jnp.arange(512).reshape(1, 1, -1, 1)

    @functools.partial(jax.jit, static_argnums=0)
    def draw(rate):
        return ~_dropout.keep(_seed(), rate, jnp.zeros_like(heads), heads, row, 0, 1024)[0]

    return {rate: np.asarray(draw(rate)) for rate in (0.001, 0.1, 0.5, 0.999)}


def _deviation(counts, size, share):
    """How far the counts of parts of `size` are from binomial ones, in standard deviations: of
    their sum of squares from its mean."""
    squares = (counts - size * share) ** 2 / (size * share * (1.0 - share))
    # Of a count's square: 2, and more where little is counted.
    variance = 2.0 + (1.0 / (share * (1.0 - share)) - 6.0) / size
    return (squares.mean() - 1.0) * np.sqrt(squares.size / variance)


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.999])
def test_counts(dropped, rate):
    """Rates are exact, and each part has its share: no row, column, block or head sticks out."""
    drops = dropped[rate]
    share = _dropout.threshold(rate) / 2**15
    heads, rows, columns = drops.shape
    deviation = np.sqrt(drops.size * share * (1.0 - share))
    assert abs(drops.sum() - drops.size * share) < 4.0 * deviation
    for axes in ((1, 2), (0, 2), (0, 1), (0,), (1,), (2,)):
        size = drops.size // np.sum(drops, axes).size
        assert abs(_deviation(drops.sum(axes), size, share)) < 5.0, axes
    for height, width in ((2, 2), (8, 8), (16, 16), (64, 64), (1, 16), (16, 1)):
        parts = drops.reshape(heads, rows // height, height, columns // width, width).sum((2, 4))
        assert abs(_deviation(parts, height * width, share)) < 5.0, (height, width)
    # The place of an element among those of a call, and of a call in a block.
    places = drops.reshape(heads, rows // 16, 16, columns // 16, 16).sum((0, 1, 3))
    assert abs(_deviation(places, drops.size // 256, share)) < 5.0


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.999])
def test_pairs(dropped, rate):
    """Two elements of a call share what their thresholds are rounded by, others nothing."""
    drops = dropped[rate]
    share = _dropout.threshold(rate) / 2**15
    rest = share * 128 % 1.0
    shared = rest * (1.0 - rest) / 2**14
    assert shared <= 2.0**-16
    heads, rows, columns = drops.shape
    blocks = drops.reshape(heads, rows // 16, 2, 8, columns // 16, 2, 4, 2)
    calls = blocks.transpose(0, 1, 3, 4, 6, 2, 5, 7).reshape(-1, 8)
    inside = calls.sum(1)
    pairs = (inside * (inside - 1) // 2).sum()
    expected = calls.shape[0] * 28 * (share**2 + shared)
    assert abs(pairs - expected) < 5.0 * np.sqrt(expected * (1.0 + 7.0 * share))
    for shift in ((0, 0, 2), (0, 0, 16), (0, 1, 0), (0, 16, 0), (0, 1, 2), (1, 0, 0)):
        both = (drops & np.roll(drops, shift, (0, 1, 2))).sum()
        expected = drops.size * share**2
        assert abs(both - expected) < 5.0 * np.sqrt(expected * (1.0 + 4.0 * share)), shift


def test_a_part_of_the_columns(masks):
    """From a column known when the program runs, inside of a group of columns."""
    row = jnp.arange(20, 48).reshape(1, 1, -1, 1)
    number = jnp.ones((1, 1, 1, 1), jnp.int32)
    kept = jax.jit(
        lambda first: _dropout.keep(
            _seed(), 0.1, _BATCH * number, _HEAD * number, row, first, num_columns=30
        )
    )(jnp.int32(21))
    np.testing.assert_array_equal(kept[0, 0], masks[0.1][20:48, 21:51])


def test_without_jit(masks):
    """Scalars of NumPy would warn of the products' overflow."""
    one = jnp.ones((1, 1, 1, 1), jnp.int32)
    row = jnp.arange(3).reshape(1, 1, -1, 1)
    with jax.disable_jit():
        kept = _dropout.keep(_seed(), 0.1, _BATCH * one, _HEAD * one, row, 0, _KV_LEN)
    np.testing.assert_array_equal(kept[0, 0], masks[0.1][:3])
