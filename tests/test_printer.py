"""Score programs as CUDA: what is printed for the kernels, compiled for the host, against JAX."""

from __future__ import annotations

import ctypes
import dataclasses
import pathlib
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mask_values
from jaxflash import (
    _api,
    _dense_mask,
    _kernel_program,
    _printer,
    _program,
    _scores,
    masks,
    reference,
)
from jaxflash._printer import cuda
from jaxflash._printer.gradients import KeyLoad
from jaxflash._printer.request import Request
from mask_values import MASK_VALUES
from score_mods import SCORE_MODS, Sizes

_COMPILER = shutil.which("g++") or shutil.which("c++")
_FOLDER = pathlib.Path(__file__).parent
_SIZES = Sizes(batch=2, heads=4, q_len=40, kv_len=30)
_LENGTHS = (_SIZES.q_len, _SIZES.kv_len)
_SCALE = 0.3
_POINTS = 2000

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


def _library(text, folder):
    (folder / "programs.cc").write_text("\n".join(text))
    command = [_COMPILER, "-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Werror"]
    command += ["-shared", "-fPIC", f"-I{_FOLDER}", "programs.cc", "-o", "programs.so"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "programs.so"))


def _given(captures):
    given = (_Capture * 8)()
    for x, capture in zip(captures, given, strict=False):
        capture.data, capture.batch_stride = x.ctypes.data, 0
        capture.extent[: x.ndim] = x.shape
    return given


class _Compiled:
    """Printed programs in one library."""

    def __init__(self, sources, folder):
        text = [_EVALUATE_ANY]
        for number, source in enumerate(sources):
            text.append(f"#define Program Program{number}\n{source}")
            text.append(_EVALUATE.replace("NUMBER", str(number)) + "#undef Program")
        self._library = _library(text, folder)

    def __call__(self, number: int, captures, indices, s):
        """What logit(), logit_and_slope(), addend() and start() make the logit, and the slope; all
        in natural units."""
        captures = [np.ascontiguousarray(x) for x in captures]
        results = [np.empty(len(s), np.float32) for _ in range(5)]
        q, kv = indices[2:]
        arrays = [*indices, (q - kv).astype(np.float32), s.astype(np.float32), *results]
        getattr(self._library, f"evaluate_{number}")(
            ctypes.c_int64(len(s)),
            _given(captures),
            ctypes.c_float(_SCALE),
            *(x.ctypes.data_as(ctypes.c_void_p) for x in arrays),
        )
        logit, alone, added, started, slope = results
        return *(x * np.log(2.0) for x in (alone, logit, added, started)), slope


def _points(rng, beyond: int = 0):
    """b, h, q, kv and products; rows and columns of a ragged tile reach beyond the lengths."""
    sizes = (_SIZES.batch, _SIZES.heads, _SIZES.q_len + beyond, _SIZES.kv_len + beyond)
    indices = [rng.integers(0, n, _POINTS).astype(np.int32) for n in sizes]
    return indices, (rng.standard_normal(_POINTS) * 8.0).astype(np.float32)


def _traced(function):
    return _program.trace(lambda s, b, h, q, kv, _: function(s, b, h, q, kv), (), jnp.float32)


def _printed(function, **options):
    program, captures = _traced(function)
    return cuda.print_program(Request(program, distance_is_difference=True, **options)), captures


def _expected(function, indices, s):
    """Value and slope as JAX has them."""

    def value(score, *indices):
        return jnp.asarray(function(score, *indices), jnp.float32)

    with jax.default_device(jax.devices("cpu")[0]):
        both = jax.jit(jax.vmap(jax.value_and_grad(value)))
        return jax.device_get(both(jnp.float32(_SCALE) * s, *indices))


def _check(compiled, number, printed, captures, function, points) -> None:
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


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    if _COMPILER is None:
        pytest.skip("needs a C++ compiler")
    rng = np.random.default_rng(0)
    programs = {}
    for name, row in SCORE_MODS.items():
        function = row.bind(jax.tree.map(jnp.asarray, row.arrays(_SIZES, rng)))
        programs[name] = (function, *_printed(function))
    library = _Compiled([p.source for _, p, _ in programs.values()], tmp_path_factory.mktemp("all"))
    return library, programs


@pytest.mark.parametrize("name", SCORE_MODS)
def test_printed_program_is_the_function(compiled, name):
    library, programs = compiled
    function, printed, captures = programs[name]
    points = _points(np.random.default_rng(1))
    _check(library, list(programs).index(name), printed, captures, function, points)


@pytest.mark.parametrize("name", SCORE_MODS)
def test_indices_of_ragged_tiles_are_safe(compiled, name):
    """Rows and columns beyond the lengths read the last element, as JAX's indexing does."""
    library, programs = compiled
    function, printed, captures = programs[name]
    points = _points(np.random.default_rng(2), beyond=50)
    _check(library, list(programs).index(name), printed, captures, function, points)


def test_loads_along_diagonals(compiled):
    """Whose elements share them, and whose indices are the distance but for what heads know."""
    _, programs = compiled
    distances = {"distances", "distances-of-batch", "few-distances", "clipped-take"}
    sources = {name: printed.source for name, (_, printed, _) in programs.items()}
    assert {x for x, text in sources.items() if "kHasDiagonals = true" in text} == distances
    sharing = {x for x, text in sources.items() if "kSharesDiagonals = true" in text}
    assert sharing == distances | {"relative-table", "buckets"}


# ---- Masks ---------------------------------------------------------------------------------------


def _masked(name):
    """Of a mask value without batch axes: (predicate, captures, who sees whom, and where the parts
    of it that have another place in a call allow that), the latter (N, T, S). None where it has no
    other parts."""
    row, shape = MASK_VALUES[name], (1, _SIZES.heads, *_LENGTHS)
    arrays = row.arrays(Sizes(*shape), np.random.default_rng(0))
    query, key = (jnp.zeros((n, _SIZES.heads, 8), jnp.float32) for n in _LENGTHS)
    spec, operands = _api.described(query, key, key, mask=row.bind(arrays, ()))
    if spec.predicate is None:
        return None
    others = dataclasses.replace(spec, predicate=None), operands._replace(mask_captures=())
    distance = reference._query_minus_key_position(*others)
    elsewhere = np.broadcast_to(reference._visible(*others, distance), shape[1:])
    visible = mask_values.visible(row, arrays, shape)[0]
    return spec.predicate, operands.mask_captures, visible, elsewhere


def test_printed_masks(tmp_path):
    """All that kernels take, in one library: what a mask hides is not visible, and the logit is the
    score."""
    if _COMPILER is None:
        pytest.skip("needs a C++ compiler")
    rows = {name: _masked(name) for name, row in MASK_VALUES.items() if row.on_kernels}
    rows = {name: row for name, row in rows.items() if row is not None}
    assert len(rows) > 15
    score = _kernel_program._identity()
    printed = [
        cuda.print_program(Request(score, (predicate,), distance_is_difference=True))
        for predicate, *_ in rows.values()
    ]
    library = _Compiled([x.source for x in printed], tmp_path)
    points = _points(np.random.default_rng(1))
    (_, h, q, kv), s = points
    b = np.zeros_like(h)
    for number, (name, row) in enumerate(rows.items()):
        _, captures, visible, elsewhere = row
        alone, logit, added, _, slope = library(number, captures, [b, h, q, kv], s)
        shown, asked = visible[h, q, kv], elsewhere[h, q, kv]
        assert not (shown & ~asked).any(), name
        expected = np.where(shown, _SCALE * s, -np.inf)[asked]
        assert printed[number].unit_slope, name
        for x in (alone, logit, added):
            np.testing.assert_allclose(x[asked], expected, rtol=2e-5, atol=2e-5, err_msg=name)
        assert (slope[asked & shown] == 1.0).all(), name


@pytest.mark.parametrize("beside", [None, lambda b, h, q, kv: (q + kv) % 3 != h])
@pytest.mark.parametrize("axes", [(0, 1, 2), (1, 2), (0, 2), (2,), (0, 1)])
@pytest.mark.parametrize("kv_len", [30, 300])
def test_masks_in_words(kv_len, axes, beside, tmp_path):
    """A part of a mask array lies in words of keys, if it has keys, and what there is beside it in
    another part."""
    if _COMPILER is None:
        pytest.skip("needs a C++ compiler")
    rng = np.random.default_rng(3)
    full = (_SIZES.heads, _SIZES.q_len, kv_len)
    array = rng.random([n if axis in axes else 1 for axis, n in enumerate(full)]) < 0.6
    mask = masks.dense(jnp.asarray(array)[None])
    expected = np.broadcast_to(array, full).copy()
    if beside is not None:
        mask &= masks.function(beside)
        h, q, kv = np.indices(full)
        expected &= beside(0, h, q, kv)
    query, key = (jnp.zeros((1, n, _SIZES.heads, 8), jnp.float32) for n in full[1:])
    spec, operands = _api.described(query, key, key, mask=mask)
    program = _kernel_program.make(spec, operands, "forward")
    assert program is not None
    assert ("kHasWords = true" in program.source) == (2 in axes)
    assert ("kAllInWords = true" in program.source) == (2 in axes and beside is None)
    own = _dense_mask.own_type(array, "forward")
    words = mask_values.packed(array[None], "forward").reshape(1, *own.shape)
    read = _dense_mask.DenseMask(words, (), (), ())
    captures = jax.device_get(_kernel_program.captures(spec, operands, read))
    library = _Compiled([program.source], tmp_path)
    h, q, kv = (rng.integers(0, n, _POINTS).astype(np.int32) for n in full)
    s = rng.standard_normal(_POINTS).astype(np.float32)
    alone, logit, *_ = library(0, [x[0] for x in captures], [np.zeros_like(h), h, q, kv], s)
    logits = np.where(expected[h, q, kv], s * spec.scale, -np.inf)
    np.testing.assert_allclose(logit * spec.scale / _SCALE, logits, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(alone, logit)


# ---- Gradients of captures -----------------------------------------------------------------------

_ACCUMULATE = """
extern "C" int accumulate_NUMBER(int64_t points, const jaxflash::Captures* captures, float scale,
    const int* b, const int* h, const int* q, const int* kv, const float* distance, const float* s,
    const float* weights, double* gradient) {
  return accumulate<jaxflash::ProgramNUMBER, jaxflash::ProgramNUMBER::Load0>(
      points, *captures, {scale}, b, h, q, kv, distance, s, weights, gradient)LOADS;
}
"""
_ACCUMULATE_ANY = """
#include "program.h"
template <class P, class L>
int accumulate(int64_t points, const jaxflash::Captures& captures, jaxflash::Problem problem,
    const int* b, const int* h, const int* q, const int* kv, const float* distance, const float* s,
    const float* weights, double* gradient) {
  int64_t stride = 1, on_row = 0, on_column = 0;
  for (int axis = L::kRank - 1; axis >= 0; --axis) {
    if (axis == L::kQueryAxis) on_row = stride;
    if (axis == L::kKeyAxis) on_column = stride;
    stride *= captures.of[L::kCapture].extent[axis];
  }
  for (int64_t i = 0; i < points; ++i) {
    const auto head = P::head(captures, problem, b[i], b[i], h[i]);
    const auto row = P::row(head, q[i]);
    const auto column = P::column(head, kv[i]);
    int64_t offset = 0;
    if constexpr (L::kScatter) {
      offset = L::index(head, row, column, q[i], kv[i], distance[i]);
    } else {
      offset = L::slice(head) + q[i] * on_row + kv[i] * on_column;
    }
    if constexpr (L::kDiagonal) {
      const auto next_row = P::row(head, q[i] + 1);
      const auto next_column = P::column(head, kv[i] + 1);
      if (L::index(head, next_row, next_column, q[i] + 1, kv[i] + 1, distance[i]) != offset) {
        return 2;
      }
    }
    if (offset < 0 || offset >= stride) return 1;
    const float partial = L::partial(head, row, column, q[i], kv[i], distance[i], s[i]);
    gradient[offset] += double{weights[i]} * partial;
  }
  return 0;
}
"""


def _gradients(functions, folder):
    """For each (function, capture): its loads, and a way to the gradient that they make."""
    printed, text = [], [_ACCUMULATE_ANY]
    for number, (function, capture) in enumerate(functions):
        program, captures = _traced(function)
        gradients = cuda.print_gradients(
            Request(program, wanted=(capture,), lengths=_LENGTHS, distance_is_difference=True)
        )
        printed.append((gradients.loads, capture, captures))
        if not gradients.loads:
            continue
        more = "".join(
            f" + accumulate<jaxflash::ProgramNUMBER, jaxflash::ProgramNUMBER::Load{i}>("
            "points, *captures, {scale}, b, h, q, kv, distance, s, weights, gradient)"
            for i in range(1, len(gradients.loads))
        )
        text.append(f"#define Program Program{number}\n{gradients.source}")
        text.append(_ACCUMULATE.replace("LOADS", more).replace("NUMBER", str(number)))
        text.append("#undef Program")
    library = _library(text, folder)

    def run(number: int, indices, s, weights):
        loads, capture, captures = printed[number]
        captures = [np.ascontiguousarray(x) for x in captures]
        gradient = np.zeros(captures[capture].shape, np.float64)
        if loads:
            q, kv = indices[2:]
            arrays = (*indices, (q - kv).astype(np.float32), s, weights, gradient)
            failed = getattr(library, f"accumulate_{number}")(
                ctypes.c_int64(len(s)),
                _given(captures),
                ctypes.c_float(_SCALE),
                *(x.ctypes.data_as(ctypes.c_void_p) for x in arrays),
            )
            assert failed == 0
        return gradient

    return [loads for loads, _, _ in printed], run


def _with_captures(name):
    """(arrays, (numbers of the captures of floats, in the program's order, by name))."""
    row = SCORE_MODS[name]
    arrays = jax.tree.map(jnp.asarray, row.arrays(_SIZES, np.random.default_rng(0)))
    _, captures = _traced(row.bind(arrays))
    numbers = {}
    for key, array in arrays.items():
        if jnp.issubdtype(array.dtype, jnp.floating):
            for number, capture in enumerate(captures):
                same = capture.shape == array.shape and capture.dtype == array.dtype
                if same and (capture == array).all():
                    numbers.setdefault(key, number)
    return arrays, numbers


_WITH_FLOATS = [(name, key) for name in SCORE_MODS for key in _with_captures(name)[1]]


@pytest.fixture(scope="module")
def compiled_gradients(tmp_path_factory):
    if _COMPILER is None:
        pytest.skip("needs a C++ compiler")
    functions = []
    for name, key in _WITH_FLOATS:
        arrays, numbers = _with_captures(name)
        functions.append((SCORE_MODS[name].bind(arrays), numbers[key]))
    return _gradients(functions, tmp_path_factory.mktemp("gradients"))


@pytest.mark.parametrize(("name", "key"), _WITH_FLOATS)
def test_printed_loads_make_the_gradient(compiled_gradients, name, key):
    _, run = compiled_gradients
    indices, s = _points(np.random.default_rng(3))
    weights = np.random.default_rng(4).standard_normal(_POINTS).astype(np.float32)
    arrays, _ = _with_captures(name)

    def weighted(x):
        function = SCORE_MODS[name].bind({**arrays, key: x})
        logits = jax.vmap(function)(jnp.float32(_SCALE) * s, *indices).astype(jnp.float32)
        return jnp.sum(jnp.where(logits == -jnp.inf, 0.0, logits) * weights)

    with jax.default_device(jax.devices("cpu")[0]):
        expected = np.asarray(jax.grad(weighted)(arrays[key].astype(jnp.float32)))
    actual = run(_WITH_FLOATS.index((name, key)), indices, s, weights)
    scale = max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(actual, expected, rtol=2e-3, atol=2e-5 * scale)


def _loads(function):
    program, _ = _traced(function)
    request = Request(program, wanted=(0,), lengths=_LENGTHS, distance_is_difference=True)
    return cuda.print_gradients(request)


def test_blocks_own_what_rows_columns_and_heads_index():
    bias = jnp.ones((_SIZES.heads, _SIZES.q_len, _SIZES.kv_len), jnp.float32)
    for function, axes in (
        (lambda s, b, h, q, kv: s + bias[h, q, kv], (1, 2)),
        (lambda s, b, h, q, kv: s + bias[h, q, 3], (1, -1)),
        (lambda s, b, h, q, kv: s + bias[b, 0, kv], (-1, 2)),
        (lambda s, b, h, q, kv: s * bias[h // 2, 0, 0], (-1, -1)),
    ):
        (load,) = _loads(function).loads
        assert (load.query_axis, load.key_axis, load.scatter) == (*axes, False)


def test_what_clamping_brings_together_is_not_owned():
    short = jnp.ones((_SIZES.q_len - 1, _SIZES.kv_len), jnp.float32)
    (load,) = _loads(lambda s, b, h, q, kv: s + short[q, kv]).loads
    assert load.scatter


def test_an_index_of_the_difference_is_summed_along_diagonals():
    table = jnp.ones((_SIZES.heads, 17), jnp.float32)
    for index, diagonal in (
        (lambda q, kv: jnp.clip(q + 1 - kv + 7, 0, 16), True),
        (
            lambda q, kv: jnp.minimum(jnp.sqrt(jnp.abs(q - kv).astype(jnp.float32)), 16.0).astype(
                jnp.int32
            ),
            True,
        ),
        (lambda q, kv: (q + kv) % 17, False),
        (lambda q, kv: (2 * q - kv) % 17, False),
    ):
        source = _loads(lambda s, b, h, q, kv, index=index: s + table[h, index(q, kv)]).source
        assert f"kDiagonal = {'true' if diagonal else 'false'};" in source


def test_rounded_differences_are_not_summed_along_diagonals():
    """Elements of a diagonal would be read at different places."""
    table = jnp.ones((_SIZES.heads, 17), jnp.float32)

    def function(factor, shift):
        def score_mod(s, b, h, q, kv):
            index = factor * q.astype(jnp.float32) + shift - factor * kv.astype(jnp.float32)
            return s + table[h, index.astype(jnp.int32)]

        return score_mod

    for factor, shift, diagonal in ((1.0, 0.0, True), (1.0, 0.1, False), (0.1, 0.0, False)):
        program, _ = _traced(function(factor, shift))
        gradients = cuda.print_gradients(
            Request(program, wanted=(0,), lengths=_LENGTHS, distance_is_difference=False)
        )
        (load,) = gradients.loads
        assert (load.scatter, load.diagonal) == (True, diagonal)


_SUM_ALONG = """
#include "program.h"
#define P jaxflash::ProgramNUMBER
extern "C" void accumulate_NUMBER(int64_t points, const jaxflash::Captures* captures, float scale,
    const int* b, const int* h, const int* q, const int* kv, const float* distance, const float* s,
    const float* weights, double* gradient) {
  const jaxflash::Problem problem = {scale};
  for (int64_t i = 0; i < points; ++i) {
    const auto head = P::head(*captures, problem, b[i], b[i], h[i]);
    const auto row = P::row(head, q[i]);
    const auto column = P::column(head, kv[i]);
    float slope = 0.f;
    P::logit_and_slope(head, row, column, q[i], kv[i], distance[i], s[i], &slope);
    // Any element of the diagonal says which one it is.
    const int further = q[i] < 7 ? 3 : -7;
    const int64_t index =
        P::diagonal_index(head, P::row(head, q[i] + further), P::column(head, kv[i] + further),
                          q[i] + further, kv[i] + further, distance[i]);
    gradient[index] += double{weights[i]} * slope * P::diagonal_weight(head);
  }
}
#undef P
"""
_SUMMED = {"distances": False, "distances-of-batch": False, "few-distances": False,
           "relative-table": True, "buckets": True, "clipped-take": False}  # fmt: skip


def test_sums_along_diagonals(tmp_path):
    """What the backward kernel adds up makes the gradient; buckets have several diagonals."""
    if _COMPILER is None:
        pytest.skip("needs a C++ compiler")
    text, captures_of = [], {}
    for number, (name, row) in enumerate(SCORE_MODS.items()):
        arrays = jax.tree.map(jnp.asarray, row.arrays(_SIZES, np.random.default_rng(0)))
        program, captures = _traced(row.bind(arrays))
        floats = [i for i, x in enumerate(captures) if jnp.issubdtype(x.dtype, jnp.floating)]
        options = dict(distance_is_difference=True, sums_diagonals=True, wanted=floats)
        printed = cuda.print_program(Request(program, **options))
        summed = "kSumsDiagonals = true" in printed.source
        gradients = cuda.print_gradients(Request(program, lengths=_LENGTHS, **options))
        assert [x.summed for x in gradients.loads].count(True) == summed
        assert summed == (name in _SUMMED), name
        if summed:
            assert ("kSumsBuckets = true" in printed.source) == _SUMMED[name]
            text.append(f"#define Program Program{number}\n{printed.source}\n#undef Program")
            text.append(_SUM_ALONG.replace("NUMBER", str(number)))
            captures_of[name] = number, arrays["table"], captures
    library = _library(['#include "program.h"', *text], tmp_path)
    indices, s = _points(np.random.default_rng(3))
    weights = np.random.default_rng(4).standard_normal(_POINTS).astype(np.float32)
    q, kv = indices[2:]
    for name, (number, table, captures) in captures_of.items():
        captures = [np.ascontiguousarray(x) for x in captures]

        def weighted(x, name=name):
            function = SCORE_MODS[name].bind({"table": x})
            logits = jax.vmap(function)(jnp.float32(_SCALE) * s, *indices)
            return jnp.sum(logits * weights)

        with jax.default_device(jax.devices("cpu")[0]):
            expected = np.asarray(jax.grad(weighted)(table.astype(jnp.float32)))
        gradient = np.zeros(table.shape, np.float64)
        arrays = (*indices, (q - kv).astype(np.float32), s, weights, gradient)
        getattr(library, f"accumulate_{number}")(
            ctypes.c_int64(len(s)),
            _given(captures),
            ctypes.c_float(_SCALE),
            *(x.ctypes.data_as(ctypes.c_void_p) for x in arrays),
        )
        np.testing.assert_allclose(gradient, expected, rtol=2e-3, atol=1e-3, err_msg=name)


def test_one_load_is_summed_along_diagonals():
    """The first whose capture has no other, and whose factor of d score a head knows."""
    table, other = (jnp.ones((_SIZES.heads, 99), jnp.float32) for _ in range(2))
    for function, summed in (
        (lambda s, b, h, q, kv: s + table[h, q - kv + 40] + other[h, kv - q + 40], [True, False]),
        (lambda s, b, h, q, kv: s + table[h, q - kv + 40] * h.astype("float32"), [True]),
        (lambda s, b, h, q, kv: s + table[h, q - kv + 40] + table[h, kv - q + 40], [False, False]),
        (lambda s, b, h, q, kv: s + table[h, q - kv + 40] * kv.astype("float32"), [False]),
        (lambda s, b, h, q, kv: s * table[h, q - kv + 40], [False]),
        (lambda s, b, h, q, kv: s + table[h, q + kv], [False]),
        (lambda s, b, h, q, kv: 9.0 * jnp.tanh(s) + table[h, q - kv + 40], [False]),
    ):
        program, captures = _traced(function)
        request = Request(
            program,
            wanted=range(len(captures)),
            lengths=_LENGTHS,
            distance_is_difference=True,
            sums_diagonals=True,
        )
        gradients = cuda.print_gradients(request)
        assert [x.summed for x in gradients.loads] == summed


def test_what_has_no_derivative_has_no_load():
    table = jnp.ones((_SIZES.heads, _SIZES.q_len), jnp.float32)
    for function in (
        lambda s, b, h, q, kv: s + jax.lax.stop_gradient(table)[h, q],
        lambda s, b, h, q, kv: s + jax.lax.stop_gradient(table[h, q]),
        lambda s, b, h, q, kv: s + table[h, q].astype(jnp.int32).astype(jnp.float32),
        lambda s, b, h, q, kv: jnp.where(table[h, q] > 0, s, -jnp.inf),
    ):
        assert _loads(function).loads == ()
    (load,) = _loads(
        lambda s, b, h, q, kv: s * jax.lax.stop_gradient(table[h, q]) + table[h, kv]
    ).loads
    assert load.query_axis == -1


def test_gradients_under_a_mask():
    """The mask's captures follow the program's, whose gradients do not look at it."""
    bias = jnp.ones((_SIZES.heads, _SIZES.q_len, _SIZES.kv_len), jnp.float32)
    program, _ = _traced(lambda s, b, h, q, kv: jnp.tanh(s) + bias[h, q, kv])
    mask = _scores.dense_predicate((1, 2), jax.ShapeDtypeStruct(_LENGTHS, jnp.bool_), packed=None)
    options = dict(lengths=_LENGTHS, distance_is_difference=True, sink_dtype="float32", drops=True)
    printed = cuda.print_gradients(Request(program, (mask,), wanted=(0,), **options))
    (load,) = printed.loads
    assert (load.capture, load.query_axis, load.key_axis, load.scatter) == (0, 1, 2, False)
    assert re.search(r"float partial\(.*\n *return 1\.0f;", printed.source)
    assert "capture_data<bool>(captures, 1, problem, batch)" in printed.source
    assert "capture_data<uint32_t>(captures, 3, problem, batch)" in printed.source


def test_gradients_of_a_dense_bias_are_as_narrow_as_it():
    for shape, narrow in (((2, 64, 64), False), ((2, 2048, 2048), True)):
        bias = jnp.zeros(shape, jnp.bfloat16)
        program, _ = _traced(lambda s, b, h, q, kv, x=bias: s + x[h, q, kv].astype(jnp.float32))
        (load,) = cuda.print_gradients(
            Request(program, wanted=(0,), lengths=shape[1:], distance_is_difference=True)
        ).loads
        assert load.narrow == narrow


def test_sums_over_queries():
    """What adds to the score, indexed by batch element, head and key alone."""
    batch, heads, kv_len = 3, _SIZES.heads, _SIZES.kv_len
    sizes = {"b": batch, "h": heads, "kv": kv_len}
    keys, own = jnp.ones((batch, kv_len), jnp.float32), jnp.ones(heads, jnp.float32)
    of_keys, of_head = ("b", "kv"), ("h",)
    for function, sums in (
        (lambda s, b, h, q, kv: s + keys[b, kv], [(0, of_keys)]),
        (lambda s, b, h, q, kv: s + keys[b, kv] - 2.0 * own[h], [(0, of_keys), (1, of_head)]),
        (lambda s, b, h, q, kv: s + keys[b, kv] + own[h], [(0, of_keys), (0, of_head)]),
        (lambda s, b, h, q, kv: s + own[h] * (q - kv).astype(jnp.float32), [(0, of_head)]),
        (lambda s, b, h, q, kv: 30.0 * jnp.tanh((s + keys[b, kv]) / 30.0), [(0, of_keys)]),
        (lambda s, b, h, q, kv: jnp.where(q >= kv, s + keys[b, kv], -jnp.inf), [(0, of_keys)]),
        # Of the score, of other captures, of another index, of an index clamped or computed.
        (lambda s, b, h, q, kv: s * own[h], []),
        (lambda s, b, h, q, kv: s + keys[b, kv] * own[h], []),
        (lambda s, b, h, q, kv: s + keys[b, q], []),
        (lambda s, b, h, q, kv: s + keys[h, kv], []),
        (lambda s, b, h, q, kv: s + own[h // 2], []),
        (lambda s, b, h, q, kv: 30.0 * jnp.tanh(s / 30.0) + keys[b, kv], []),
    ):
        program, _ = _traced(function)
        wanted = range(len(program.capture_types))
        options = dict(wanted=wanted, sizes=tuple(sizes.items()), distance_is_difference=True)
        gradients = cuda.print_gradients(Request(program, lengths=_LENGTHS, **options))
        assert [(x.sum, x.axes) for x in gradients.key_loads] == sums
        assert len(gradients.loads) == (0 if sums else len(wanted))
        printed = cuda.print_program(Request(program, **options))
        assert f"kKeySums = {gradients.key_sums};" in printed.source
        assert gradients.source.count("kKeySum = true;") == gradients.key_sums


def test_gradients_that_are_those_of_the_score():
    """Of an element for each of the logits, added to the score itself."""
    batch, heads, kv_len = 3, _SIZES.heads, _SIZES.kv_len
    own = jnp.ones((heads, *_LENGTHS), jnp.float32)
    numbered = jnp.ones((batch, heads, *_LENGTHS), jnp.float32)
    swapped = jnp.ones((heads, batch, *_LENGTHS), jnp.float32)
    more = jnp.ones((batch, heads + 1, *_LENGTHS), jnp.float32)
    factor = jnp.ones((), jnp.float32)

    def cap(s):
        return 30.0 * jnp.tanh(s / 30.0)

    of_batch = {"h": heads, "kv": kv_len}  # captures have batch axes of their own
    of_numbers = {"b": batch, **of_batch}
    for sizes, function, matrix in (
        (of_batch, lambda s, b, h, q, kv: s + own[h, q, kv], r"clamp_index\(h, \w+\)"),
        (of_batch, lambda s, b, h, q, kv: cap(s + own[h, q, kv]), "clamp_index"),
        (of_batch, lambda s, b, h, q, kv: jnp.where(q >= kv, s + own[h, q, kv], -jnp.inf), ""),
        (of_numbers, lambda s, b, h, q, kv: s + numbered[b, h, q, kv], r"clamp_index\(b, \w+\)"),
        (of_numbers, lambda s, b, h, q, kv: s + swapped[h, b, q, kv], ""),
        (of_numbers | {"b": 1}, lambda s, b, h, q, kv: s + own[h, q, kv], ""),
        # Some batch elements or heads share elements, or leave some out.
        (of_numbers, lambda s, b, h, q, kv: s + own[h, q, kv], None),
        (of_batch, lambda s, b, h, q, kv: s + own[0, q, kv], None),
        (of_numbers, lambda s, b, h, q, kv: s + numbered[b, h // 2, q, kv], None),
        (of_numbers, lambda s, b, h, q, kv: s + more[b, h, q, kv], None),
        # Not the score's, or of several places.
        (of_batch, lambda s, b, h, q, kv: s * own[h, q, kv], None),
        (of_batch, lambda s, b, h, q, kv: s + 2.0 * own[h, q, kv], None),
        (of_batch, lambda s, b, h, q, kv: s + own[h, q, kv] * factor, None),
        (of_batch, lambda s, b, h, q, kv: cap(s) + own[h, q, kv], None),
        (of_batch, lambda s, b, h, q, kv: s + own[h, q, kv] + own[h, q, 0], None),
        (of_batch, lambda s, b, h, q, kv: s + own[h, kv, q], None),
    ):
        program, _ = _traced(function)
        options = dict(sizes=tuple(sizes.items()), storable=(0,), distance_is_difference=True)
        request = Request(program, wanted=(0,), lengths=_LENGTHS, **options)
        printed = cuda.print_program(request)
        loads = cuda.print_gradients(request).loads
        stores = "true" if matrix is not None else "false"
        assert f"kStoresGradient = {stores};" in printed.source
        assert [x.stored for x in loads].count(True) == (matrix is not None)
        assert all(x.narrow for x in loads if x.stored)
        assert "kSumsBatch = false;" in printed.source
        if matrix is not None:
            assert "int64_t gradient_matrix(const Head& head)" in printed.source
            assert re.search(matrix, printed.source)
        # Only where it is wanted, and can be.
        for fewer in (dict(storable=()), dict(wanted=())):
            source = cuda.print_program(dataclasses.replace(request, **fewer)).source
            assert "kStoresGradient = false;" in source


def test_gradients_that_are_sums_over_the_batch():
    """Of an element for each of the logits of a batch element, which all of them share."""
    batch, heads, kv_len = 3, _SIZES.heads, _SIZES.kv_len
    own = jnp.ones((heads, *_LENGTHS), jnp.float32)
    numbered = jnp.ones((batch, heads, *_LENGTHS), jnp.float32)
    of_all = jnp.ones((1, *_LENGTHS), jnp.float32)
    sizes = {"b": batch, "h": heads, "kv": kv_len}
    for counts, function, stored, sums in (
        (sizes, lambda s, b, h, q, kv: s + own[h, q, kv], True, True),
        (sizes, lambda s, b, h, q, kv: s + numbered[b, h, q, kv], True, False),
        (sizes | {"b": 1}, lambda s, b, h, q, kv: s + own[h, q, kv], True, False),
        (sizes | {"h": 1}, lambda s, b, h, q, kv: s + of_all[0, q, kv], True, True),
        # Heads share elements as well, or it is not the score's.
        (sizes, lambda s, b, h, q, kv: s + of_all[0, q, kv], False, False),
        (sizes, lambda s, b, h, q, kv: s * own[h, q, kv], False, False),
    ):
        program, _ = _traced(function)
        options = dict(sizes=tuple(counts.items()), storable=(0,), sums_batch=True)
        options |= dict(wanted=(0,), lengths=_LENGTHS, distance_is_difference=True)
        source = cuda.print_program(Request(program, **options)).source
        (load,) = cuda.print_gradients(Request(program, **options)).loads
        assert (load.stored, load.sums_batch) == (stored, sums)
        assert f"kSumsBatch = {str(sums).lower()};" in source
        assert f"kStoresGradient = {str(stored).lower()};" in source


@pytest.mark.parametrize(
    ("batch", "shape", "axes"),
    [
        ((3, 2), (3, 2), ("h", "kv")),
        ((3, 2), (1, 2), ("kv", "h")),
        ((3, 2), (1, 1), ("h", None)),
        ((3, 2), (1, 1), (None, "b", "kv")),
        ((3, 2), (1, 1), ("kv", "b")),
        ((3, 2), (3, 1), ()),
        ((), (), ("b", "h")),
    ],
)
def test_gradients_made_of_sums(batch, shape, axes):
    """The transpose of reading an array where only batch element, head and key count."""
    heads, kv_len = 4, 5
    numbers = {"b": int(np.prod(batch)), "h": heads, "kv": kv_len}
    capture = np.zeros((*shape, *(numbers.get(name, 1) for name in axes)), np.float32)

    def read(x):
        x = jnp.broadcast_to(x, (*batch, *x.shape[len(batch) :]))
        places = np.indices((*batch, heads, kv_len))
        *of_batch, h, kv = places
        b = np.zeros_like(h)
        for number, extent in zip(of_batch, batch, strict=True):
            b = b * extent + number
        own = {"b": b, "h": h, "kv": kv, None: np.zeros_like(h)}
        return x[(*of_batch, *(own[name] for name in axes))]

    sums = np.random.default_rng(0).standard_normal((*batch, heads, kv_len)).astype(np.float32)
    actual = _kernel_program.gradient_of_sum(KeyLoad(0, 0, axes), jnp.asarray(sums), capture)
    (expected,) = jax.vjp(read, capture)[1](sums)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_equal_loads_are_one():
    bias = jnp.ones((_SIZES.q_len, _SIZES.kv_len), jnp.float32)
    gradients = _loads(lambda s, b, h, q, kv: s * bias[q, kv] + jnp.sin(bias[q, kv]))
    assert len(gradients.loads) == 1


# ---- Instructions --------------------------------------------------------------------------------


def _body(printed, function="logit") -> list[str]:
    """The statements of a function of the struct."""
    lines = printed.source.splitlines()
    begin = next(i for i, line in enumerate(lines) if re.search(rf"static \w+ {function}\(", line))
    return [line.strip() for line in lines[begin + 1 : lines.index("  }", begin)]]


def _operations(printed, function="logit") -> list[str]:
    """What follows the `=` of each statement, every name of a value as x."""
    lines = [line.split(" = ")[1] for line in _body(printed, function) if " = " in line]
    return [re.sub(r"(head|row|column)\.\w+|\bx\d+\b", "x", line).rstrip(";") for line in lines]


_SLOPES = np.linspace(0.1, 0.8, _SIZES.heads, dtype=np.float32)
_BIAS = np.zeros((2, _SIZES.heads, _SIZES.q_len, _SIZES.kv_len), jnp.bfloat16)


def test_soft_cap_is_a_product_a_tanh_and_a_product():
    printed, _ = _printed(lambda s, b, h, q, kv: 30.0 * jnp.tanh(s / 30.0))
    assert not printed.unit_slope
    assert _operations(printed) == ["x * s", "tanh_approx(x)", "43.28085f * x"]
    slope = _operations(printed, "logit_and_slope")
    assert slope[3:] == ["-x", "fmaf(x, x, 1.0f)", "x"]  # 1 - t * t of the same t


def test_alibi_is_one_fma_and_the_distance():
    def alibi(s, b, h, q, kv, distance):
        return s - jnp.asarray(_SLOPES)[h] * jnp.abs(distance).astype(jnp.float32)

    program, _ = _program.trace(alibi, (), jnp.float32)
    for is_difference in (True, False):
        printed = cuda.print_program(Request(program, distance_is_difference=is_difference))
        assert printed.unit_slope
        assert printed.exact_length is None
        assert _operations(printed) == ["fabsf(distance)", "x * x", "fmaf(x, s, x)"]


def test_differences_of_positions_are_not_converted_element_by_element():
    def function(s, b, h, q, kv):
        return s - 0.1 * jnp.abs(q - kv).astype(jnp.float32)

    printed, _ = _printed(function)
    expected = ["fabsf(distance)", "-0.14426951f * x", "fmaf(x, s, x)"]
    assert _operations(printed) == expected
    assert printed.exact_length is None

    # With an alignment at the bottom right, the distance is another one.
    program, _ = _traced(function)
    printed = cuda.print_program(Request(program, distance_is_difference=False))
    assert _operations(printed) == ["x + x", "fabsf(x)", *expected[1:]]
    assert printed.exact_length == 2**24


def test_sums_of_what_rows_and_columns_add_are_not_kept_together():
    """Differences are: they may be small where both are large."""
    a, b = (jnp.ones(64, jnp.float32) for _ in range(2))
    printed, _ = _printed(lambda s, _, h, q, kv: s + (a[q] + b[kv]))
    assert _operations(printed) == ["x + x", "fmaf(x, s, x)"]
    printed, _ = _printed(lambda s, _, h, q, kv: s + (a[q] - b[kv]))
    assert _operations(printed)[0] in ("x - x", "x + x", "fmaf(-1.f, x, x)")
    assert len(_operations(printed)) == 3


def test_dense_bias_is_one_load_and_one_fma():
    printed, _ = _printed(
        lambda s, b, h, q, kv: s + jnp.asarray(_BIAS)[b, h, q, kv].astype("float32")
    )
    assert printed.unit_slope
    assert _operations(printed) == ["load_capture(x, x)", "1.442695f * x", "fmaf(x, s, x)"]


def test_all_built_in_features_together():
    def function(s, b, h, q, kv):
        s = s + jnp.asarray(_BIAS)[b, h, q, kv].astype(jnp.float32)
        s = s - jnp.asarray(_SLOPES)[h] * jnp.abs(q - kv).astype(jnp.float32)
        return 30.0 * jnp.tanh(s / 30.0)

    printed, _ = _printed(function)
    of_the_score = _operations(printed)[-3:]
    assert of_the_score == ["fmaf(x, s, x)", "tanh_approx(x)", "43.28085f * x"]


def test_floor_division_of_positions_is_division():
    """Nobody asks of positions whether a quotient has to be rounded down, or a rest is negative."""

    def of_positions(s, b, h, q, kv):
        return s + jnp.float32((q // 128 + kv // 128) % 2) + jnp.float32(q // 3 - kv % 5)

    printed, _ = _printed(of_positions)
    assert all(x in printed.source for x in ("/ 128u", "% 2u", "/ 3u", "% 5u"))
    assert "&&" not in printed.source
    printed, _ = _printed(lambda s, b, h, q, kv: s + jnp.float32((q - kv) // 3))
    assert all(x in printed.source for x in ("/ 3;", "&&"))


@pytest.mark.parametrize(
    ("function", "operations"),
    [
        (lambda q, kv: (q - kv) % 8, ["q - kv", "x & 7"]),
        (lambda q, kv: (q - kv) // 64, ["q - kv", "x >> 6"]),
        (lambda q, kv: (q - kv) % 4 == 0, ["q ^ kv", "x & 3", "x == 0"]),
    ],
    ids=["rest", "quotient", "dilated"],
)
def test_divisions_by_powers_of_two_are_of_bits(function, operations):
    """Rounded down, negative numbers included, where `lax.div` and `lax.rem` round to zero."""
    printed, _ = _printed(lambda s, b, h, q, kv: s + jnp.float32(function(q, kv)))
    assert set(operations) <= set(_operations(printed))
    assert "&&" not in printed.source


def test_a_mask_written_as_a_score_function_has_slope_one():
    printed, _ = _printed(lambda s, b, h, q, kv: jnp.where(q >= kv, 2.0 * s / 2.0, -jnp.inf))
    assert printed.unit_slope
    assert _operations(printed) == ["q >= kv", "x * s", "x ? x : -INFINITY"]
    assert _operations(printed, "addend") == ["q >= kv", "x ? 0.0f : -INFINITY"]


def test_a_choice_by_the_score_has_no_addend():
    printed, _ = _printed(lambda s, b, h, q, kv: jnp.where(s > 0.0, s, -jnp.inf))
    assert not printed.unit_slope
    assert _operations(printed, "logit_and_slope")[-1] == "1.0f"


def test_another_size_prints_the_same():
    def function(table):
        return _printed(lambda s, b, h, q, kv: s + table[h, q - kv] * table[0, kv])[0].source

    assert function(jnp.zeros((4, 9), jnp.float32)) == function(jnp.zeros((16, 100), jnp.float32))


def test_slope_where_the_logit_is_minus_infinity_is_finite(tmp_path):
    def function(s, b, h, q, kv):
        return jnp.log(jnp.maximum(s, 0.0)) + jnp.sqrt(jnp.maximum(s, 0.0))

    printed, captures = _printed(function)
    indices = [np.zeros(3, np.int32)] * 4
    _, logit, *_, slope = _Compiled([printed.source], tmp_path)(
        0, captures, indices, np.array([-1.0, 0.0, 4.0], np.float32)
    )
    assert (logit[:2] == -np.inf).all()
    assert np.isfinite(logit[2])
    assert (slope[:2] == 0.0).all()
    assert slope[2] > 0.0


def test_nan_passes_through_minimum_and_maximum(tmp_path):
    printed, captures = _printed(lambda s, b, h, q, kv: jnp.clip(s, -1.0, 1.0))
    indices = [np.zeros(2, np.int32)] * 4
    s = np.array([np.nan, 100.0], np.float32)
    alone, logit, *_ = _Compiled([printed.source], tmp_path)(0, captures, indices, s)
    assert np.isnan([alone[0], logit[0]]).all()
    assert abs(logit[1] - 1.0) < 1e-6


def test_dropout_is_the_last_capture():
    program, _ = _traced(lambda s, b, h, q, kv: s + jnp.asarray(_SLOPES)[h])
    for sink_dtype, number in ((None, 1), ("float32", 2)):
        printed = cuda.print_program(
            Request(program, distance_is_difference=True, sink_dtype=sink_dtype, drops=True)
        )
        assert "kDrops = true" in printed.source
        (result,) = _body(printed, "dropout")
        parameters = f"capture_data<uint32_t>(captures, {number}, problem, batch)"
        assert result == f"return Dropout({parameters}, b, h);"


def test_sink_is_a_capture_of_its_own():
    program, _ = _traced(lambda s, b, h, q, kv: s + jnp.asarray(_SLOPES)[h])
    request = Request(program, distance_is_difference=True, sink_dtype="bfloat16")
    printed = cuda.print_program(request)
    assert "kHasSink = true" in printed.source
    assert "kAdds = true" in printed.source
    assert printed.unit_slope
    assert "capture_data<BFloat16>(captures, 1, problem, batch)" in printed.source
    (result,) = _body(printed, "sink")
    assert result.startswith("return head.")

    # A program that is a sink alone.
    program, _ = _traced(lambda s, b, h, q, kv: s)
    request = Request(program, distance_is_difference=True, sink_dtype="float32")
    printed = cuda.print_program(request)
    assert "kAdds = false" in printed.source
    assert _body(printed, "addend") == ["return 0.0f;"]


# ---- 64-bit types --------------------------------------------------------------------------------

_OF_PYTHON_NUMBERS = {
    "constant": lambda s, b, h, q, kv: s * 0.5 + jnp.asarray(_SLOPES)[h],
    "infinity": lambda s, b, h, q, kv: jnp.where(q >= kv, s, -jnp.inf),
    "integer": lambda s, b, h, q, kv: jnp.where(q >= kv, s, -(10**9)),
    "clip": lambda s, b, h, q, kv: jnp.clip(s, -3, 3),
    "times indices": lambda s, b, h, q, kv: s - 0.1 * jnp.abs(q - kv),
    "functions": lambda s, b, h, q, kv: s * jnp.sqrt(2.0) + jnp.exp(-0.5 * h) * jnp.sin(0.1 * q),
    "choice": lambda s, b, h, q, kv: s + jnp.where(q > kv, 0.0, 1.0) * jnp.where(q > h, 2, -1),
    "division": lambda s, b, h, q, kv: s + jnp.asarray(_SLOPES)[q // 3 % 4] * (kv / 7),
    "truth": lambda s, b, h, q, kv: s + (q > kv) * 3,
    # As indices become where they are compared with symbolic sizes.
    "index": lambda s, b, h, q, kv: s + jnp.asarray(_SLOPES)[q.astype(int) // 3 % 4],
}


def test_python_numbers_of_64_bits_are_of_32(tmp_path):
    """What JAX_ENABLE_X64 makes of them is weakly typed: it yields to the score."""
    if _COMPILER is None:
        pytest.skip("needs a C++ compiler")
    functions = _OF_PYTHON_NUMBERS.values()
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        narrow = [_printed(function)[0].source for function in functions]
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        printed = [_printed(function) for function in functions]
        library, points = (
            _Compiled([p.source for p, _ in printed], tmp_path),
            _points(np.random.default_rng(4)),
        )
        for number, function in enumerate(functions):
            _check(library, number, *printed[number], function, points)
    assert [p.source for p, _ in printed] == narrow


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda s, b, h, q, kv: s + jnp.float64(0.1), "computes in float64"),
        (lambda s, b, h, q, kv: s + (q - kv).astype(jnp.float64), "computes in float64"),
        (lambda s, b, h, q, kv: s + jnp.int64(q) * 3, "computes in int64, and 32 bits may not"),
        (lambda s, b, h, q, kv: jnp.where(jnp.int64(q) * 3 > kv, s, 0), "32 bits may not hold"),
        (lambda s, b, h, q, kv: s + jnp.where(q > kv, 2**31, 0), "operand of dtype int64"),
        (lambda s, b, h, q, kv: s + jnp.where(q > kv, 2**30, 0) * 5, "may not hold"),
    ],
    ids=["constant", "conversion", "index", "comparison", "beyond", "product"],
)
def test_explicit_64_bits_are_refused(function, said):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        with pytest.raises(_printer.NotPrintable, match=said):
            _printed(function)
        captured = jnp.ones(8, jnp.float64)
        with pytest.raises(_printer.NotPrintable, match="captures an array of dtype float64"):
            _printed(lambda s, b, h, q, kv: s + captured[h].astype(jnp.float32))


# ---- What cannot be printed ----------------------------------------------------------------------

_ROWS = jnp.ones((8, 8), jnp.float32)
_REFUSED = {
    "while": lambda s, b, h, q, kv: jax.lax.while_loop(lambda x: x < 3.0, lambda x: x + 1.0, s),
    "scan": lambda s, b, h, q, kv: jax.lax.fori_loop(0, 3, lambda i, x: x * 1.1, s),
    "cond": lambda s, b, h, q, kv: jax.lax.cond(q > kv, lambda: s, lambda: -s),
    "random_bits": lambda s, b, h, q, kv: s + jax.random.uniform(jax.random.key(0), (), "float32"),
    "reduce_sum": lambda s, b, h, q, kv: s + jnp.sum(_ROWS[h] * _ROWS[q]),
    "dot_general": lambda s, b, h, q, kv: s + _ROWS[q] @ _ROWS[kv],
    "digamma": lambda s, b, h, q, kv: jax.lax.lgamma(s),
    "dynamic_slice": lambda s, b, h, q, kv: s + _ROWS[0, s.astype(jnp.int32)],
    "convert_element_type": lambda s, b, h, q, kv: s.astype(jnp.bfloat16).astype(jnp.float32),
    "debug_callback": lambda s, b, h, q, kv: (jax.debug.print("{}", s), s)[1],
}


@pytest.mark.parametrize("primitive", _REFUSED)
def test_refusal_names_the_primitive_and_shows_the_equation(primitive):
    with pytest.raises(_printer.NotPrintable) as refusal:
        _printed(_REFUSED[primitive])
    text = str(refusal.value)
    if primitive == "debug_callback":
        assert "effect" in text.lower()
    else:
        assert "`" in text
        assert "in: " in text
        assert primitive.split("_")[0] in text or primitive == "reduce_sum"


def _doubled(s, b, h, q, kv):
    x = q
    for _ in range(60):
        x = jnp.maximum(x + kv, x - kv)
    return s + x.astype(jnp.float32)


def _remainders(s, b, h, q, kv):
    x = q - kv
    for i in range(20):
        x = (x + i) % (101 - i)
    return s + _ROWS[0, x]


def _hidden_parts(s, b, h, q, kv):
    x = s
    for _ in range(20):
        x = x * (x + 1.0)
    return jnp.where(q >= kv, x, -jnp.inf)


def _choices(s, b, h, q, kv):
    for i in range(30):
        s = jnp.where(q > kv + i, s + 1.0, s * 0.5)
    return s


@pytest.mark.parametrize("function", [_doubled, _remainders, _hidden_parts, _choices])
def test_shared_expressions_are_visited_once(function):
    """As many paths as they have uses, multiplied, would take for ever."""
    assert len(_printed(function)) < 1 << 17


def test_deep_functions_are_refused():
    """Before Python's recursion ends."""

    def chain(s, b, h, q, kv):
        for _ in range(2000):
            s = jnp.tanh(s)
        return s

    with pytest.raises(_printer.NotPrintable, match="201 operations one within the other"):
        _printed(chain)


@pytest.mark.parametrize(
    ("capture", "said"),
    [
        (lambda: jnp.zeros(4, jnp.int8), "int8"),
        (lambda: jnp.zeros((1,) * 7, jnp.float32), "7 axes"),
        (lambda: jax.random.split(jax.random.key(0), 4), "key"),
    ],
)
def test_captures_that_kernels_do_not_take(capture, said):
    array = capture()

    def function(s, b, h, q, kv):
        element = array[(h,) + (0,) * (array.ndim - 1)]
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            return s + jax.random.uniform(element, (), jnp.float32)
        return s + element.astype(jnp.float32)

    with pytest.raises(_printer.NotPrintable, match=said):
        _printed(function)


# ---- Random programs -----------------------------------------------------------------------------

_LEAVES = (
    lambda e: e["s"],
    lambda e: e["table"][e["h"], e["q"] - e["kv"]],
    lambda e: e["bias"][e["b"], e["h"], e["q"], e["kv"]].astype(jnp.float32),
    lambda e: (e["q"] - e["kv"]).astype(jnp.float32) / 16.0,
    lambda e: (e["ids"][e["q"]] % 3).astype(jnp.float32),
    lambda e: (e["kv"] // 3 + e["h"]).astype(jnp.float32) * 0.1,
)
_UNARY = (
    jnp.tanh,
    jnp.abs,
    lambda x: -x,
    lambda x: x * 0.5 + 1.0,
    lambda x: 3.0 * jnp.tanh(x / 3.0),
    lambda x: jnp.exp(-jnp.abs(x)),
    lambda x: jnp.log(1.0 + x * x),
    lambda x: x / (1.0 + jnp.abs(x)),
    jax.nn.sigmoid,
)
_BINARY = (
    jnp.add,
    jnp.subtract,
    jnp.multiply,
    jnp.maximum,
    jnp.minimum,
    lambda x, y: jnp.where(x < y, x, y * 0.25),
)


def _expressions():
    def larger(smaller):
        return st.one_of(
            st.tuples(st.sampled_from(_UNARY), smaller),
            st.tuples(st.sampled_from(_BINARY), smaller, smaller),
        )

    leaves = st.sampled_from(_LEAVES).map(lambda leaf: (leaf,))
    return st.recursive(leaves, larger, max_leaves=6)


def _evaluate(expression, environment):
    function, *inner = expression
    if not inner:
        return function(environment)
    return function(*(_evaluate(x, environment) for x in inner))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_neighbours_of_a_row_are_loaded_in_pairs(tmp_path, dtype):
    """Where each key has an element, and no other index knows the key."""
    if _COMPILER is None:
        pytest.skip("needs a C++ compiler")
    rng = np.random.default_rng(5)
    kv_len = _SIZES.kv_len // 2 * 2
    bias = jnp.asarray(rng.standard_normal((_SIZES.heads, _SIZES.q_len, kv_len)), dtype)
    square = jnp.asarray(rng.standard_normal((kv_len, kv_len)), dtype)

    def function(s, b, h, q, kv):
        return s + bias[h, q, kv].astype(jnp.float32) + square[kv, kv].astype(jnp.float32)

    printed, captures = _printed(function, paired=(0, 1))
    assert all(load in printed.source for load in ("load_of_pair(", "load_capture("))
    assert "kSharesLoads = true" in printed.source
    assert "kSharesLoads = false" in _printed(function)[0].source
    library = _Compiled([printed.source], tmp_path)
    indices, s = _points(rng)
    indices[3] %= kv_len
    _check(library, 0, printed, captures, function, (indices, s))


_STARTING = {
    "bias": lambda e: e["s"] + e["bias"],
    "factors": lambda e: 0.25 + e["s"] - 0.5 * e["slopes"] * e["bias"],
    "others": lambda e: (
        e["s"] + e["bias"] + e["slopes"] * (e["kv"] - e["q"]).astype("float32") + e["keys"]
    ),
    "masked": lambda e: jnp.where(e["q"] >= e["kv"], e["s"] + e["bias"], -jnp.inf),
    "chosen": lambda e: e["s"] + jnp.where(e["kv"] > 3, e["bias"], 0.5),
    "twice": lambda e: e["s"] + e["bias"] + e["bias"],
    "capped": lambda e: 3.0 * jnp.tanh((e["s"] + e["bias"]) / 3.0),
    "capped with others": lambda e: (
        7.0 * jnp.tanh((e["s"] + e["slopes"] - 0.5 * e["bias"]) / 7.0) + e["keys"]
    ),
    "capped and masked": lambda e: jnp.where(
        e["q"] >= e["kv"], 3.0 * jnp.tanh((e["s"] + e["bias"]) / 3.0), -jnp.inf
    ),
}
_NOT_STARTING = {
    "none": lambda e: e["s"] + e["slopes"],
    "two": lambda e: e["s"] + e["bias"] + e["other"],
    "function": lambda e: e["s"] + jnp.tanh(e["bias"]),
    "condition": lambda e: e["s"] + jnp.where(e["bias"] > 0.5, e["bias"], 0.0),
    "factor": lambda e: (e["s"] + e["bias"]) * e["slopes"],
    "beside the score": lambda e: jnp.tanh(e["s"] + e["bias"]) + 0.1 * e["s"],
    "two sums": lambda e: jnp.tanh(e["s"] + e["bias"]) + jnp.tanh(e["s"] + 0.5 * e["bias"]),
    "lowest": lambda e: e["s"] + e["bias"] + jnp.where(e["q"] > 3, 0.0, -1e38),
}


def _of_neighbours(expression, dtype):
    rng = np.random.default_rng(6)
    bias, other = jnp.asarray(rng.standard_normal((2, _SIZES.heads, *_LENGTHS)), dtype)
    slopes = jnp.asarray(rng.standard_normal(_SIZES.heads), jnp.float32)
    keys = jnp.asarray(rng.standard_normal(_SIZES.kv_len // 2), jnp.float32)

    def function(s, b, h, q, kv):
        loaded = {"bias": bias[h, q, kv], "other": other[h, q, kv]}
        loaded = {name: x.astype(jnp.float32) for name, x in loaded.items()}
        others = {"slopes": slopes[h], "keys": keys[kv // 2]}
        return expression(dict(loaded, **others, s=s, q=q, kv=kv))

    _, captures = _traced(function)
    paired = [i for i, x in enumerate(captures) if x.ndim == 3]
    return function, *_printed(function, paired=paired, starts=paired)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_products_start_from_neighbours(tmp_path, dtype):
    """Loaded before the products, where all that is added to them is known then."""
    if _COMPILER is None:
        pytest.skip("needs a C++ compiler")
    rows = [_of_neighbours(expression, dtype) for expression in _STARTING.values()]
    library = _Compiled([printed.source for _, printed, _ in rows], tmp_path)
    for number, (function, printed, captures) in enumerate(rows):
        assert "kStarts = true" in printed.source
        indices, s = _points(np.random.default_rng(7), beyond=50)
        indices[3] %= _SIZES.kv_len
        _check(library, number, printed, captures, function, (indices, s))


@pytest.mark.parametrize("name", _NOT_STARTING)
def test_products_start_from_no_others(name):
    _, printed, _ = _of_neighbours(_NOT_STARTING[name], "bfloat16")
    assert "kStarts = false" in printed.source


@settings(max_examples=6)
@given(st.lists(_expressions(), min_size=4, max_size=4))
def test_random_programs(tmp_path_factory, expressions):
    if _COMPILER is None:
        pytest.skip("needs a C++ compiler")
    rng = np.random.default_rng(3)
    arrays = {
        "table": jnp.asarray(rng.standard_normal((_SIZES.heads, 50)), jnp.float32),
        "bias": jnp.asarray(
            rng.standard_normal((2, _SIZES.heads, _SIZES.q_len, _SIZES.kv_len)), jnp.bfloat16
        ),
        "ids": jnp.asarray(rng.integers(0, 9, 64), jnp.int32),
    }
    functions = [
        lambda s, b, h, q, kv, e=e: _evaluate(e, dict(arrays, s=s, b=b, h=h, q=q, kv=kv))
        for e in expressions
    ]
    programs = [_printed(function) for function in functions]
    library = _Compiled([p.source for p, _ in programs], tmp_path_factory.mktemp("random"))
    points = _points(rng)
    for number, (function, (printed, captures)) in enumerate(zip(functions, programs, strict=True)):
        _check(library, number, printed, captures, function, points)
