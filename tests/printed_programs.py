"""Printed programs, compiled for the host: what each makes of indices and products, and a check
against the function in JAX."""

from __future__ import annotations

import ctypes
import pathlib
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxflash import _program
from jaxflash._printer import cuda
from jaxflash._printer.request import Request
from score_mods import Sizes

_COMPILER = shutil.which("g++") or shutil.which("c++")
_FOLDER = pathlib.Path(__file__).parent

SIZES = Sizes(batch=2, heads=4, q_len=40, kv_len=30)
LENGTHS = (SIZES.q_len, SIZES.kv_len)
SCALE = 0.3
POINTS = 2000
SLOPES = np.linspace(0.1, 0.8, SIZES.heads, dtype=np.float32)

_EVALUATE = """
extern "C" void evaluate_NUMBER(int64_t points, const jaxflash::Captures* captures, float scale,
    const int* b, const int* h, const int* q, const int* kv, const float* distance, const float* s,
    float* logit, float* alone, float* added, float* started, float* slope) {
  evaluate<jaxflash::ProgramNUMBER>(points, *captures, {scale}, b, h, q, kv, distance, s, logit,
                                    alone, added, started, slope);
}
"""
_EVALUATE_ANY = """
#include "program.h"
template <class P>
void evaluate(int64_t points, const jaxflash::Captures& captures, jaxflash::Problem problem,
    const int* b, const int* h, const int* q, const int* kv, const float* distance, const float* s,
    float* logit, float* alone, float* added, float* started, float* slope) {
  for (int64_t i = 0; i < points; ++i) {
    const auto head = P::head(captures, problem, b[i], b[i], h[i]);
    const auto row = P::row(head, q[i]);
    const auto column = P::column(head, kv[i]);
    alone[i] = P::logit(head, row, column, q[i], kv[i], distance[i], s[i]);
    logit[i] = P::logit_and_slope(head, row, column, q[i], kv[i], distance[i], s[i], &slope[i]);
    added[i] = alone[i];
    if constexpr (P::kUnitSlope) {
      const float addend = P::addend(head, row, column, q[i], kv[i], distance[i]);
      added[i] = fmaf(s[i], problem.scale * 1.4426950408889634f, P::kAdds ? addend : 0.f);
    }
    started[i] = added[i];
    if constexpr (P::kStarts) {
      const int last = P::neighbours_end(head) - 1;
      const int known = kv[i] < last ? kv[i] : last;
      const float neighbour = jaxflash::load_capture(P::neighbours(head, row), known);
      const float start = P::start(head, row, column, q[i], kv[i], distance[i], neighbour);
      const float product = start + s[i];
      if constexpr (P::kUnitSlope) {
        started[i] = product * (problem.scale * 1.4426950408889634f);
      } else {
        float also = 0.f;
        started[i] = P::started_logit_and_slope(head, row, column, q[i], kv[i], distance[i],
                                                product, &also);
        const float same = P::started_logit(head, row, column, q[i], kv[i], distance[i], product);
        const float difference = also < slope[i] ? slope[i] - also : also - slope[i];
        if (same != started[i] || !(difference < 1e-4f)) alone[i] = NAN;
      }
    }
    if constexpr (P::kFollowsDistance) {
      const float before = P::slope_before(head), behind = P::slope_behind(head);
      if (!P::kBends && before != behind) alone[i] = NAN;
      const float addend = (distance[i] > 0.f ? before : behind) * distance[i];
      started[i] = fmaf(s[i], problem.scale * 1.4426950408889634f, addend);
    }
    if constexpr (P::kHasDiagonals) {
      // From the diagonal three before, where both are inside.
      const int difference = q[i] - kv[i];
      if (P::inside(head, difference - 3, difference)) {
        const auto diagonal = P::diagonal(head, difference - 3);
        float also = 0.f;
        const float same =
            P::logit_and_slope(head, row, column, q[i], kv[i], distance[i], s[i], &also,
                               diagonal, 3);
        if (same != logit[i] || also != slope[i]) alone[i] = NAN;
        if constexpr (P::kUnitSlope) {
          const float addend = P::addend(head, row, column, q[i], kv[i], distance[i]);
          if (addend != P::addend(head, row, column, q[i], kv[i], distance[i], diagonal, 3)) {
            alone[i] = NAN;
          }
        }
      }
    }
    if constexpr (P::kMasks) {
      const bool visible = P::visible(head, row, column, q[i], kv[i], distance[i]);
      if (!visible) alone[i] = logit[i] = added[i] = started[i] = -INFINITY;
      if constexpr (P::kHasWords) {
        // Of an element, of where a tile begins.
        const uint32_t bit = P::bit(kv[i] % 16) + kv[i] % 128 / 16 * 4;
        if (bit != P::bit(kv[i]) || kv[i] / 128 >= P::word_groups(head)) alone[i] = NAN;
        const int rows = P::word_rows(head), of_row = q[i] < rows ? q[i] : rows - 1;
        const int word = (kv[i] / 128 * rows + of_row) * 4 + kv[i] / 2 % 4;
        bool shown = (P::words(head)[word] >> bit & 1) != 0;
        if constexpr (!P::kAllInWords) {
          shown = shown && P::visible_beside(head, row, column, q[i], kv[i], distance[i]);
        }
        if (shown != visible) alone[i] = NAN;
      }
    }
  }
}
"""


class _Capture(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch_stride", ctypes.c_int64),
        ("extent", ctypes.c_int32 * 6),
    )


def compile_library(text, folder):
    """The text in C++, compiled; a test that needs it is skipped where there is no compiler."""
    if _COMPILER is None:
        pytest.skip("needs a C++ compiler")
    (folder / "programs.cc").write_text("\n".join(text))
    command = [_COMPILER, "-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Werror"]
    command += ["-shared", "-fPIC", f"-I{_FOLDER}", "programs.cc", "-o", "programs.so"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "programs.so"))


def given_captures(captures):
    given = (_Capture * 8)()
    for x, capture in zip(captures, given, strict=False):
        capture.data, capture.batch_stride = x.ctypes.data, 0
        capture.extent[: x.ndim] = x.shape
    return given


class CompiledPrograms:
    """Printed programs in one library."""

    def __init__(self, sources, folder):
        text = [_EVALUATE_ANY]
        for number, source in enumerate(sources):
            text.append(f"#define Program Program{number}\n{source}")
            text.append(_EVALUATE.replace("NUMBER", str(number)) + "#undef Program")
        self._library = compile_library(text, folder)

    def __call__(self, number: int, captures, indices, s):
        """What logit(), logit_and_slope(), addend() and start(), or slopes along the distance, make
        the logit, and the slope; all in natural units."""
        captures = [np.ascontiguousarray(x) for x in captures]
        results = [np.empty(len(s), np.float32) for _ in range(5)]
        q, kv = indices[2:]
        arrays = [*indices, (q - kv).astype(np.float32), s.astype(np.float32), *results]
        getattr(self._library, f"evaluate_{number}")(
            ctypes.c_int64(len(s)),
            given_captures(captures),
            ctypes.c_float(SCALE),
            *(x.ctypes.data_as(ctypes.c_void_p) for x in arrays),
        )
        logit, alone, added, started, slope = results
        return *(x * np.log(2.0) for x in (alone, logit, added, started)), slope


def random_points(rng, beyond: int = 0):
    """b, h, q, kv and products; rows and columns of a ragged tile reach beyond the lengths."""
    sizes = (SIZES.batch, SIZES.heads, SIZES.q_len + beyond, SIZES.kv_len + beyond)
    indices = [rng.integers(0, n, POINTS).astype(np.int32) for n in sizes]
    return indices, (rng.standard_normal(POINTS) * 8.0).astype(np.float32)


def trace_function(function):
    return _program.trace(lambda s, b, h, q, kv, _: function(s, b, h, q, kv), (), jnp.float32)


def print_function(function, **options):
    program, captures = trace_function(function)
    return cuda.print_program(Request(program, distance_is_difference=True, **options)), captures


def _expected(function, indices, s):
    """Value and slope as JAX has them."""

    def value(score, *indices):
        return jnp.asarray(function(score, *indices), jnp.float32)

    with jax.default_device(jax.devices("cpu")[0]):
        both = jax.jit(jax.vmap(jax.value_and_grad(value)))
        return jax.device_get(both(jnp.float32(SCALE) * s, *indices))


def check_program(compiled, number, printed, captures, function, points) -> None:
    indices, s = points
    alone, logit, added, started, slope = compiled(number, captures, indices, s)
    value, derivative = _expected(function, indices, s)
    np.testing.assert_array_equal(alone, logit)
    hidden = value == -np.inf
    # finfo.min is clipped to finfo.min in units of log 2.
    value = np.where(hidden, value, np.maximum(value, np.finfo(np.float32).min * np.log(2.0)))
    np.testing.assert_allclose(logit, value, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(added, value, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(started, value, rtol=2e-5, atol=2e-5)
    assert np.isfinite(slope).all()
    np.testing.assert_allclose(slope[~hidden], derivative[~hidden], rtol=1e-4, atol=1e-4)
    if printed.unit_slope:
        assert (derivative[~hidden] == 1.0).all()
