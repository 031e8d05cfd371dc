"""Gradients of captures as they are printed: loads and what they make, sums along diagonals, over
queries and over the batch."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxflash
from jaxflash import _kernel_program, _scores
from jaxflash._printer import cuda
from jaxflash._printer.gradients import KeyLoad
from jaxflash._printer.request import Request
from printed_programs import (
    LENGTHS,
    POINTS,
    SCALE,
    SIZES,
    compile_library,
    given_captures,
    random_points,
    trace_function,
)
from score_mods import SCORE_MODS

# ---- Loads ---------------------------------------------------------------------------------------

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
        program, captures = trace_function(function)
        gradients = cuda.print_gradients(
            Request(program, wanted=(capture,), lengths=LENGTHS, distance_is_difference=True)
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
    library = compile_library(text, folder)

    def run(number: int, indices, s, weights):
        loads, capture, captures = printed[number]
        captures = [np.ascontiguousarray(x) for x in captures]
        gradient = np.zeros(captures[capture].shape, np.float64)
        if loads:
            q, kv = indices[2:]
            arrays = (*indices, (q - kv).astype(np.float32), s, weights, gradient)
            failed = getattr(library, f"accumulate_{number}")(
                ctypes.c_int64(len(s)),
                given_captures(captures),
                ctypes.c_float(SCALE),
                *(x.ctypes.data_as(ctypes.c_void_p) for x in arrays),
            )
            assert failed == 0
        return gradient

    return [loads for loads, _, _ in printed], run


def _with_captures(name):
    """(arrays, (numbers of the captures of floats, in the program's order, by name))."""
    row = SCORE_MODS[name]
    arrays = jax.tree.map(jnp.asarray, row.arrays(SIZES, np.random.default_rng(0)))
    _, captures = trace_function(row.bind(arrays))
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
    functions = []
    for name, key in _WITH_FLOATS:
        arrays, numbers = _with_captures(name)
        functions.append((SCORE_MODS[name].bind(arrays), numbers[key]))
    return _gradients(functions, tmp_path_factory.mktemp("gradients"))


@pytest.mark.parametrize(("name", "key"), _WITH_FLOATS)
def test_printed_loads_make_the_gradient(compiled_gradients, name, key):
    _, run = compiled_gradients
    indices, s = random_points(np.random.default_rng(3))
    weights = np.random.default_rng(4).standard_normal(POINTS).astype(np.float32)
    arrays, _ = _with_captures(name)

    def weighted(x):
        function = SCORE_MODS[name].bind({**arrays, key: x})
        logits = jax.vmap(function)(jnp.float32(SCALE) * s, *indices).astype(jnp.float32)
        return jnp.sum(jnp.where(logits == -jnp.inf, 0.0, logits) * weights)

    with jax.default_device(jax.devices("cpu")[0]):
        expected = np.asarray(jax.grad(weighted)(arrays[key].astype(jnp.float32)))
    actual = run(_WITH_FLOATS.index((name, key)), indices, s, weights)
    scale = max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(actual, expected, rtol=2e-3, atol=2e-5 * scale)


def test_gradients_in_branches(tmp_path):
    """Of elements that one of them reads, whatever another makes of its own."""
    table = np.random.default_rng(5).standard_normal((SIZES.heads, SIZES.q_len))
    table = jnp.asarray(table, jnp.float32)

    def function(s, b, h, q, kv, table=table):
        def outer(s):
            kept = jax.jit(lambda i: table[h, i])(q)
            inner = jax.lax.cond(kept > 0.0, lambda x: jnp.log(x), lambda x: 1.0 - x, kept)
            return s * inner + table[h, kv]

        branches = [lambda s: s, outer, lambda s: jnp.where(s > 0.0, s, 1.0) * table[0, 3] ** 2]
        return jax.lax.switch((q + kv) % 4, branches, s)

    (loads,), run = _gradients([(function, 0)], tmp_path)
    assert [(x.query_axis, x.key_axis) for x in loads] == [(1, -1), (-1, 1), (-1, -1)]
    indices, s = random_points(np.random.default_rng(3))
    weights = np.random.default_rng(4).standard_normal(POINTS).astype(np.float32)

    def gradient(s, b, h, q, kv, weight):
        return weight * jax.grad(lambda x: function(s, b, h, q, kv, x))(table)

    with jax.default_device(jax.devices("cpu")[0]):
        points = jnp.float32(SCALE) * s, *indices, weights
        expected = np.asarray(jax.vmap(gradient)(*points).sum(0))
    assert np.isfinite(expected).all()
    actual = run(0, indices, s, weights)
    scale = max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(actual, expected, rtol=2e-3, atol=2e-5 * scale)


def _loads(function):
    program, _ = trace_function(function)
    request = Request(program, wanted=(0,), lengths=LENGTHS, distance_is_difference=True)
    return cuda.print_gradients(request)


def test_blocks_own_what_rows_columns_and_heads_index():
    bias = jnp.ones((SIZES.heads, SIZES.q_len, SIZES.kv_len), jnp.float32)
    for function, axes in (
        (lambda s, b, h, q, kv: s + bias[h, q, kv], (1, 2)),
        (lambda s, b, h, q, kv: s + bias[h, q, 3], (1, -1)),
        (lambda s, b, h, q, kv: s + bias[b, 0, kv], (-1, 2)),
        (lambda s, b, h, q, kv: s * bias[h // 2, 0, 0], (-1, -1)),
    ):
        (load,) = _loads(function).loads
        assert (load.query_axis, load.key_axis, load.scatter) == (*axes, False)


def test_what_clamping_brings_together_is_not_owned():
    short = jnp.ones((SIZES.q_len - 1, SIZES.kv_len), jnp.float32)
    (load,) = _loads(lambda s, b, h, q, kv: s + short[q, kv]).loads
    assert load.scatter


def test_what_has_no_derivative_has_no_load():
    table = jnp.ones((SIZES.heads, SIZES.q_len), jnp.float32)
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
    bias = jnp.ones((SIZES.heads, SIZES.q_len, SIZES.kv_len), jnp.float32)
    program, _ = trace_function(lambda s, b, h, q, kv: jnp.tanh(s) + bias[h, q, kv])
    mask = _scores.dense_predicate((1, 2), jax.ShapeDtypeStruct(LENGTHS, jnp.bool_), packed=None)
    options = dict(lengths=LENGTHS, distance_is_difference=True, sink_dtype="float32", drops=True)
    printed = cuda.print_gradients(Request(program, (mask,), wanted=(0,), **options))
    (load,) = printed.loads
    assert (load.capture, load.query_axis, load.key_axis, load.scatter) == (0, 1, 2, False)
    assert re.search(r"float partial\(.*\n *return 1\.0f;", printed.source)
    assert "capture_data<bool>(captures, 1, problem, batch)" in printed.source
    assert "capture_data<uint32_t>(captures, 3, problem, batch)" in printed.source


def test_gradients_of_a_dense_bias_are_as_narrow_as_it():
    for shape, narrow in (((2, 64, 64), False), ((2, 2048, 2048), True)):
        bias = jnp.zeros(shape, jnp.bfloat16)
        program, _ = trace_function(
            lambda s, b, h, q, kv, x=bias: s + x[h, q, kv].astype(jnp.float32)
        )
        (load,) = cuda.print_gradients(
            Request(program, wanted=(0,), lengths=shape[1:], distance_is_difference=True)
        ).loads
        assert load.narrow == narrow


def test_a_slope_with_a_coefficient_of_nothing():
    """What cancels stays where it may be infinite; no factor leads to the gradient from there."""
    x = jax.ShapeDtypeStruct((2, 64, 4, 64), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((64,), jnp.float32)
    score_mod = SCORE_MODS["cancelled"].function

    def loss(table, x):
        function = functools.partial(score_mod, table=table)
        out = jaxflash.dot_product_attention(x, x, x, score_mod=function)
        return jnp.sum(out.astype(jnp.float32))

    jax.jit(jax.grad(loss)).trace(table, x).lower(lowering_platforms=("cuda",))


def test_equal_loads_are_one():
    bias = jnp.ones((SIZES.q_len, SIZES.kv_len), jnp.float32)
    gradients = _loads(lambda s, b, h, q, kv: s * bias[q, kv] + jnp.sin(bias[q, kv]))
    assert len(gradients.loads) == 1


# ---- Sums along diagonals ------------------------------------------------------------------------


def test_an_index_of_the_difference_is_summed_along_diagonals():
    table = jnp.ones((SIZES.heads, 17), jnp.float32)
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
    table = jnp.ones((SIZES.heads, 17), jnp.float32)

    def function(factor, shift):
        def score_mod(s, b, h, q, kv):
            index = factor * q.astype(jnp.float32) + shift - factor * kv.astype(jnp.float32)
            return s + table[h, index.astype(jnp.int32)]

        return score_mod

    for factor, shift, diagonal in ((1.0, 0.0, True), (1.0, 0.1, False), (0.1, 0.0, False)):
        program, _ = trace_function(function(factor, shift))
        gradients = cuda.print_gradients(
            Request(program, wanted=(0,), lengths=LENGTHS, distance_is_difference=False)
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
    text, captures_of = [], {}
    for number, (name, row) in enumerate(SCORE_MODS.items()):
        arrays = jax.tree.map(jnp.asarray, row.arrays(SIZES, np.random.default_rng(0)))
        program, captures = trace_function(row.bind(arrays))
        floats = [i for i, x in enumerate(captures) if jnp.issubdtype(x.dtype, jnp.floating)]
        options = dict(distance_is_difference=True, sums_diagonals=True, wanted=floats)
        printed = cuda.print_program(Request(program, **options))
        summed = "kSumsDiagonals = true" in printed.source
        gradients = cuda.print_gradients(Request(program, lengths=LENGTHS, **options))
        assert [x.summed for x in gradients.loads].count(True) == summed
        assert summed == (name in _SUMMED), name
        if summed:
            assert ("kSumsBuckets = true" in printed.source) == _SUMMED[name]
            text.append(f"#define Program Program{number}\n{printed.source}\n#undef Program")
            text.append(_SUM_ALONG.replace("NUMBER", str(number)))
            captures_of[name] = number, arrays["table"], captures
    library = compile_library(['#include "program.h"', *text], tmp_path)
    indices, s = random_points(np.random.default_rng(3))
    weights = np.random.default_rng(4).standard_normal(POINTS).astype(np.float32)
    q, kv = indices[2:]
    for name, (number, table, captures) in captures_of.items():
        captures = [np.ascontiguousarray(x) for x in captures]

        def weighted(x, name=name):
            function = SCORE_MODS[name].bind({"table": x})
            logits = jax.vmap(function)(jnp.float32(SCALE) * s, *indices)
            return jnp.sum(logits * weights)

        with jax.default_device(jax.devices("cpu")[0]):
            expected = np.asarray(jax.grad(weighted)(table.astype(jnp.float32)))
        gradient = np.zeros(table.shape, np.float64)
        arrays = (*indices, (q - kv).astype(np.float32), s, weights, gradient)
        getattr(library, f"accumulate_{number}")(
            ctypes.c_int64(len(s)),
            given_captures(captures),
            ctypes.c_float(SCALE),
            *(x.ctypes.data_as(ctypes.c_void_p) for x in arrays),
        )
        np.testing.assert_allclose(gradient, expected, rtol=2e-3, atol=1e-3, err_msg=name)


def test_one_load_is_summed_along_diagonals():
    """The first whose capture has no other, and whose factor of d score a head knows."""
    table, other = (jnp.ones((SIZES.heads, 99), jnp.float32) for _ in range(2))
    for function, summed in (
        (lambda s, b, h, q, kv: s + table[h, q - kv + 40] + other[h, kv - q + 40], [True, False]),
        (lambda s, b, h, q, kv: s + table[h, q - kv + 40] * h.astype("float32"), [True]),
        (lambda s, b, h, q, kv: s + table[h, q - kv + 40] + table[h, kv - q + 40], [False, False]),
        (lambda s, b, h, q, kv: s + table[h, q - kv + 40] * kv.astype("float32"), [False]),
        (lambda s, b, h, q, kv: s * table[h, q - kv + 40], [False]),
        (lambda s, b, h, q, kv: s + table[h, q + kv], [False]),
        (lambda s, b, h, q, kv: 9.0 * jnp.tanh(s) + table[h, q - kv + 40], [False]),
    ):
        program, captures = trace_function(function)
        request = Request(
            program,
            wanted=range(len(captures)),
            lengths=LENGTHS,
            distance_is_difference=True,
            sums_diagonals=True,
        )
        gradients = cuda.print_gradients(request)
        assert [x.summed for x in gradients.loads] == summed


# ---- Sums over queries and over the batch --------------------------------------------------------


def test_sums_over_queries():
    """What adds to the score, indexed by batch element, head and key alone."""
    batch, heads, kv_len = 3, SIZES.heads, SIZES.kv_len
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
        (
            lambda s, b, h, q, kv: (
                (s + 0.3 * keys[b, kv]) * (1.0 + jnp.exp(-h.astype(jnp.float32)))
            ),
            [(0, of_keys)],
        ),
        # Of the score, of other captures, of another index, of an index clamped or computed.
        (lambda s, b, h, q, kv: s * own[h], []),
        (lambda s, b, h, q, kv: s + keys[b, kv] * own[h], []),
        (lambda s, b, h, q, kv: s + keys[b, q], []),
        (lambda s, b, h, q, kv: s + keys[h, kv], []),
        (lambda s, b, h, q, kv: s + own[h // 2], []),
        (lambda s, b, h, q, kv: 30.0 * jnp.tanh(s / 30.0) + keys[b, kv], []),
    ):
        program, _ = trace_function(function)
        wanted = range(len(program.capture_types))
        options = dict(wanted=wanted, sizes=tuple(sizes.items()), distance_is_difference=True)
        gradients = cuda.print_gradients(Request(program, lengths=LENGTHS, **options))
        assert [(x.sum, x.axes) for x in gradients.key_loads] == sums
        assert len(gradients.loads) == (0 if sums else len(wanted))
        printed = cuda.print_program(Request(program, **options))
        assert f"kKeySums = {gradients.key_sums};" in printed.source
        assert gradients.source.count("kKeySum = true;") == gradients.key_sums


def test_gradients_that_are_those_of_the_score():
    """Of an element for each of the logits, added to the score itself."""
    batch, heads, kv_len = 3, SIZES.heads, SIZES.kv_len
    own = jnp.ones((heads, *LENGTHS), jnp.float32)
    numbered = jnp.ones((batch, heads, *LENGTHS), jnp.float32)
    swapped = jnp.ones((heads, batch, *LENGTHS), jnp.float32)
    more = jnp.ones((batch, heads + 1, *LENGTHS), jnp.float32)
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
        program, _ = trace_function(function)
        options = dict(sizes=tuple(sizes.items()), storable=(0,), distance_is_difference=True)
        request = Request(program, wanted=(0,), lengths=LENGTHS, **options)
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
    batch, heads, kv_len = 3, SIZES.heads, SIZES.kv_len
    own = jnp.ones((heads, *LENGTHS), jnp.float32)
    numbered = jnp.ones((batch, heads, *LENGTHS), jnp.float32)
    of_all = jnp.ones((1, *LENGTHS), jnp.float32)
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
        program, _ = trace_function(function)
        options = dict(sizes=tuple(counts.items()), storable=(0,), sums_batch=True)
        options |= dict(wanted=(0,), lengths=LENGTHS, distance_is_difference=True)
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
