"""The dropout mask in the kernels' fragments, compiled for the host, against jaxflash._dropout."""

import ctypes
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
_Q_LEN, _KV_LEN = 48, 256
_SOURCE = """
#include <cstdint>
#define __device__
#define __forceinline__ inline
static uint32_t __ldg(const uint32_t* x) { return *x; }
static uint32_t __umulhi(uint32_t x, uint32_t y) { return uint64_t{x} * y >> 32; }
#include "common/dropout.cuh"

template <bool kRowsAreQueries, int kColumns>
void draw(const uint32_t* parameters, int batch, int head, int first_row, int first_column,
          float* kept) {
  const jaxflash::Dropout dropout(parameters, batch, head);
  for (int lane = 0; lane < 32; ++lane) {
    jaxflash::KeepBits<kRowsAreQueries, kColumns> bits, all;
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
#define DRAW(NAME, ROWS_ARE_QUERIES, COLUMNS)                                                \\
  extern "C" void NAME(const uint32_t* parameters, int batch, int head, int row, int column, \\
                       float* kept) {                                                        \\
    draw<ROWS_ARE_QUERIES, COLUMNS>(parameters, batch, head, row, column, kept);         \\
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
_FRAGMENTS = [(by_rows, columns) for by_rows in (True, False) for columns in (16, 64, 80, 128)]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if _COMPILER is None or not _CUDA.is_dir():
        pytest.skip("needs a C++ compiler and the sources")
    folder = tmp_path_factory.mktemp("dropout")
    lines = [
        f"DRAW(draw_{int(by_rows)}_{columns}, {str(by_rows).lower()}, {columns})"
        for by_rows, columns in _FRAGMENTS
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


@pytest.mark.parametrize(("by_rows", "columns"), _FRAGMENTS)
def test_fragments(library, masks, by_rows, columns):
    for rate, mask in masks.items():
        parameters = np.asarray(_dropout.kernel_parameters(_seed(), rate))
        expected = mask if by_rows else mask.T
        for first_row in range(0, 48, 16):
            for first_column in range(0, expected.shape[1] - columns + 1, 16):
                kept = np.full((16, columns), np.nan, np.float32)
                pointers = [x.ctypes.data_as(ctypes.c_void_p) for x in (parameters, kept)]
                getattr(library, f"draw_{int(by_rows)}_{columns}")(
                    pointers[0], _BATCH, _HEAD, first_row, first_column, pointers[1]
                )
                part = expected[first_row : first_row + 16, first_column : first_column + columns]
                np.testing.assert_array_equal(kept, part.astype(np.float32))


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
    for rows, columns in ((0, 1), (1, 0), (0, 8), (8, 0), (8, 8), (0, 16), (16, 0), (1, 1), (8, 1)):
        shifted = np.roll(kept, (rows, columns), (0, 1))
        assert abs((kept == shifted).mean() - 0.5) < 5 * 0.5 / np.sqrt(n), (rows, columns)
    assert abs(kept.mean() - 0.5) < 5 * 0.5 / np.sqrt(n)


def test_a_part_of_the_columns(masks):
    """From a column known when the program runs, inside of a group of columns."""
    row = jnp.arange(20, _Q_LEN).reshape(1, 1, -1, 1)
    number = jnp.ones((1, 1, 1, 1), jnp.int32)
    kept = jax.jit(
        lambda first: _dropout.keep(
            _seed(), 0.1, _BATCH * number, _HEAD * number, row, first, num_columns=30
        )
    )(jnp.int32(21))
    np.testing.assert_array_equal(kept[0, 0], masks[0.1][20:, 21:51])
