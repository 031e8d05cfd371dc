"""What printed programs compute, against JAX: values and slopes of score functions, masks, random
programs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mask_values
from jaxflash import _api, _dense_mask, _kernel_program, masks, reference
from jaxflash._printer import cuda
from jaxflash._printer.request import Request
from mask_values import MASK_VALUES
from printed_programs import (
    LENGTHS,
    POINTS,
    SCALE,
    SIZES,
    SLOPES,
    CompiledPrograms,
    check_program,
    print_function,
    random_points,
    trace_function,
)
from score_mods import SCORE_MODS, Sizes


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    rng = np.random.default_rng(0)
    programs = {}
    for name, row in SCORE_MODS.items():
        function = row.bind(jax.tree.map(jnp.asarray, row.arrays(SIZES, rng)))
        programs[name] = (function, *print_function(function, sides=("before", "behind")))
    library = CompiledPrograms(
        [p.source for _, p, _ in programs.values()], tmp_path_factory.mktemp("all")
    )
    return library, programs


@pytest.mark.parametrize("name", SCORE_MODS)
def test_printed_program_is_the_function(compiled, name):
    library, programs = compiled
    function, printed, captures = programs[name]
    points = random_points(np.random.default_rng(1))
    check_program(library, list(programs).index(name), printed, captures, function, points)


@pytest.mark.parametrize("name", SCORE_MODS)
def test_indices_of_ragged_tiles_are_safe(compiled, name):
    """Rows and columns beyond the lengths read the last element, as JAX's indexing does."""
    library, programs = compiled
    function, printed, captures = programs[name]
    points = random_points(np.random.default_rng(2), beyond=50)
    check_program(library, list(programs).index(name), printed, captures, function, points)


def test_loads_along_diagonals(compiled):
    """Whose elements share them, and whose indices are the distance but for what heads know."""
    _, programs = compiled
    distances = {"distances", "distances-of-batch", "few-distances", "clipped-take"}
    sources = {name: printed.source for name, (_, printed, _) in programs.items()}
    assert {x for x, text in sources.items() if "kHasDiagonals = true" in text} == distances
    sharing = {x for x, text in sources.items() if "kSharesDiagonals = true" in text}
    assert sharing == distances | {"relative-table", "buckets"}


def test_addends_that_follow_the_distance(compiled):
    _, programs = compiled
    sources = {name: printed.source for name, (_, printed, _) in programs.items()}
    following = {x for x, text in sources.items() if "kFollowsDistance = true" in text}
    assert following == {"rows-of-heads", "slope-of-all-heads", "slopes-of-all-kinds"}


_FOLLOWS = {
    "both sides": (lambda s, b, h, q, kv: s + 0.5 * (q - kv), False),
    "bends": (lambda s, b, h, q, kv: s - jnp.asarray(SLOPES)[h] * jnp.abs(kv - q), True),
    "both": (
        lambda s, b, h, q, kv: s + jnp.asarray(SLOPES)[h] * abs(q - kv) - 0.3 * (q - kv),
        True,
    ),
    "one side": (lambda s, b, h, q, kv: s - 0.1 * abs(q - kv) - 0.1 * (q - kv), True),
    "a constant beside it": (lambda s, b, h, q, kv: s - 0.1 * (q - kv) + 1.0, None),
    "a key beside it": (lambda s, b, h, q, kv: s - 0.1 * (q - kv) + 0.2 * kv, None),
    "by rows": (lambda s, b, h, q, kv: s - 0.1 * q * (q - kv), None),
    "squared": (lambda s, b, h, q, kv: s - 0.01 * jnp.square((q - kv) * 1.0), None),
    "capped": (lambda s, b, h, q, kv: 5.0 * jnp.tanh(s - 0.1 * (q - kv)), None),
    "scaled": (lambda s, b, h, q, kv: 2.0 * s - 0.1 * (q - kv), None),
    "nothing": (lambda s, b, h, q, kv: s, None),
}

_OF_HEADS = [_FOLLOWS[name][0] for name in ("bends", "both")]


@pytest.mark.parametrize(("function", "bends"), _FOLLOWS.values(), ids=_FOLLOWS)
def test_which_addends_follow_the_distance(function, bends, tmp_path):
    """`bends`: whether by another slope behind the query; None: they do not."""
    with jax.numpy_dtype_promotion("standard"):
        prints = [
            print_function(function, sides=sides)
            for sides in (("before", "behind"), ("before",), ("behind",), ())
        ]
    sources = [printed.source for printed, _ in prints]
    follows = ["kFollowsDistance = true" in source for source in sources]
    assert follows == [bends is not None] * 3 + [False]
    assert ["kBends = true" in source for source in sources] == [bool(bends)] + [False] * 3
    printed, captures = prints[0]
    assert prints[3][0].key_terms is None
    if bends is None:
        assert printed.key_terms is None
        return
    assert printed.key_terms is not None
    assert printed.key_terms.of_distance
    assert printed.key_terms.of_head == (function in _OF_HEADS)

    def promoted(*arguments):
        with jax.numpy_dtype_promotion("standard"):
            return function(*arguments)

    (b, h, q, kv), s = random_points(np.random.default_rng(3), beyond=50)
    library = CompiledPrograms(sources[:3], tmp_path)
    for number, side in enumerate((q == q, q >= kv, q <= kv)):
        points = [x[side] for x in (b, h, q, kv)], s[side]
        check_program(library, number, printed, captures, promoted, points)


def test_slope_where_the_logit_is_minus_infinity_is_finite(tmp_path):
    def function(s, b, h, q, kv):
        return jnp.log(jnp.maximum(s, 0.0)) + jnp.sqrt(jnp.maximum(s, 0.0))

    printed, captures = print_function(function)
    indices = [np.zeros(3, np.int32)] * 4
    _, logit, *_, slope = CompiledPrograms([printed.source], tmp_path)(
        0, captures, indices, np.array([-1.0, 0.0, 4.0], np.float32)
    )
    assert (logit[:2] == -np.inf).all()
    assert np.isfinite(logit[2])
    assert (slope[:2] == 0.0).all()
    assert slope[2] > 0.0


_NOT_TAKEN = {
    "cond": lambda s, b, h, q, kv: jax.lax.cond(s > 0.0, jnp.log, lambda s: 0.5 * s - 9.0, s),
    "switch": lambda s, b, h, q, kv: jax.lax.switch(
        jnp.sign(s).astype(jnp.int32) + 1,
        [lambda: jnp.sqrt(-s), lambda: jnp.float32(-1.0), lambda: 1.0 / s + jnp.sqrt(s)],
    ),
    "one within the other": lambda s, b, h, q, kv: jax.lax.cond(
        q > kv, lambda s: s, lambda s: jax.lax.cond(s < 0.0, jnp.tanh, jnp.sqrt, s), s
    ),
}


def _distance(q, kv):
    return (q - kv).astype(jnp.float32)


def _hidden_by(visible):
    return (1.0 - visible.astype(jnp.float32)) * -1e9


_WIDTHS = jnp.array([7.0, 11.0, 13.0, 9.0], jnp.float32)
_KEYS = jnp.linspace(-1.0, 1.0, SIZES.kv_len, dtype=jnp.float32)
_TIMES = 3e7 + 2.0 * jnp.arange(SIZES.q_len, dtype=jnp.float32)


def _share(s, kv):
    """Of odds whose squares are infinite for every other key."""
    log_odds = 0.4 * s + 60.0 * (kv % 2).astype(jnp.float32)
    return jnp.exp(log_odds) / (1.0 + jnp.exp(log_odds))


# What is said of each is of its sums, quotients and steps.
_EXACT = {
    "threshold": lambda s, b, h, q, kv: s + _hidden_by((s > 0.5) & (q >= kv)),
    "threshold, bias": lambda s, b, h, q, kv: s + _KEYS[kv] + _hidden_by(s > 0.5),
    "sign, bias": lambda s, b, h, q, kv: (
        s + _KEYS[kv] + (1.0 - (jnp.sign(s - 0.3) + 1.0) / 2.0) * -1e9
    ),
    "rounded": lambda s, b, h, q, kv: s + _hidden_by(jnp.round(jax.nn.sigmoid(s))),
    "time": lambda s, b, h, q, kv: s - 0.5 * (_TIMES[q] - _TIMES[kv]),
    "time of keys": lambda s, b, h, q, kv: s + (_TIMES[kv] - 3e7),
    "taper": lambda s, b, h, q, kv: (
        s + jnp.where(q - kv <= 11, jnp.log((11.0 - _distance(q, kv)) / 11.0), -jnp.inf)
    ),
    "taper of heads": lambda s, b, h, q, kv: s + jnp.where(
        jnp.abs(_distance(q, kv)) <= _WIDTHS[h],
        jnp.sqrt(1.0 - jnp.square(_distance(q, kv) / _WIDTHS[h])),
        0.0,
    ),
    "product": lambda s, b, h, q, kv: s + jnp.where(
        jnp.abs(_distance(q, kv)) <= _WIDTHS[h],
        jnp.sqrt(1.0 - (_distance(q, kv) / _WIDTHS[h]) * (_distance(q, kv) / _WIDTHS[h])),
        0.0,
    ),
    "negated twice": lambda s, b, h, q, kv: (
        s + jnp.sqrt(jnp.maximum(1.0 - (-(_distance(q, kv) / _WIDTHS[h])), 0.0))
        - jnp.where(jnp.negative(-(_distance(q, kv) / 7.0)) >= 1.0, 1.0, 0.0)
    ),
    "floor": lambda s, b, h, q, kv: s - jnp.floor(_distance(q - 5, kv) * 0.7),
    "floor of a multiple": lambda s, b, h, q, kv: (
        s - jnp.floor(_distance(q, kv) / _WIDTHS[h] * 4.0)
        + jnp.floor(jnp.minimum(_distance(q, kv) / _WIDTHS[h], 2.0))
    ),
    "rest": lambda s, b, h, q, kv: s - jax.lax.rem(_distance(q, kv) / _WIDTHS[h], jnp.float32(1.0)),
    "multiplied and divided": lambda s, b, h, q, kv: (
        s + 1e-3 * ((_distance(q, kv) * 41.0) / 41.0) - jnp.floor(_distance(q, kv))
    ),
    "power": lambda s, b, h, q, kv: 1e-9 + 0.3 * (1.0 - jnp.tanh(0.1 * s)) ** 3,
    "hidden below a function": lambda s, b, h, q, kv: (
        jax.nn.log_sigmoid(s + _hidden_by(q >= kv))
        + jax.nn.softplus(s + 1e-3 * _hidden_by(kv % 2 > 0))
    ),
    "divided by large numbers": lambda s, b, h, q, kv: _share(s, kv),
    "multiple of a quotient": lambda s, b, h, q, kv: s + 1.5 * _share(s, kv),
    "steep": lambda s, b, h, q, kv: 0.01 * jax.nn.softplus(1000.0 * s),
    "infinite factor": lambda s, b, h, q, kv: jnp.where(
        q > kv, (jnp.abs(jax.lax.stop_gradient(s)) + 1.0) * -jnp.inf, s
    ),
}  # fmt: skip


def test_what_is_exact_stays_exact(tmp_path):
    """Where the terms of a sum cancel, and a step, a root or a logarithm tells zero from almost."""
    prints = [print_function(function) for function in _EXACT.values()]
    library = CompiledPrograms([printed.source for printed, _ in prints], tmp_path)
    points = random_points(np.random.default_rng(5))
    for number, (function, (printed, captures)) in enumerate(
        zip(_EXACT.values(), prints, strict=True)
    ):
        check_program(library, number, printed, captures, function, points)


def test_decimal_numbers_are_compared_as_they_are_rounded(tmp_path):
    def function(s, b, h, q, kv):
        equal = (
            jnp.where(q > kv, 0.1, 1.0) == jnp.float32(0.1),
            jnp.where(q > kv, 0.1, 1.0) * 3.0 == 0.3,
            jnp.where(q > kv, 7.0, 1.0) * 0.1 <= 0.7,
            jnp.where(q > kv, 0.57, 1.0) * 100.0 >= 57.0,
            jnp.where(q > kv, 1.0, 2.0) / 49.0 * 49.0 >= 1.0,
        )
        return s + sum(jnp.where(holds, 1.0, 0.0) for holds in equal)

    with jax.enable_x64(False):  # or the numbers would have 64 bits
        printed, captures = print_function(function)
        library = CompiledPrograms([printed.source], tmp_path)
        points = random_points(np.random.default_rng(5))
        check_program(library, 0, printed, captures, function, points)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_logits_beyond_the_range_are_infinite(dtype, tmp_path):
    """As docs/jax_nn.md says of a bias of the lowest number."""
    bias = jnp.full((SIZES.kv_len,), jnp.finfo(dtype).min, dtype)
    printed, captures = print_function(lambda s, b, h, q, kv: s + bias[kv].astype(jnp.float32))
    points = random_points(np.random.default_rng(6))
    logit, *_ = CompiledPrograms([printed.source], tmp_path)(0, captures, *points)
    assert (logit == -np.inf).all()


def test_roundings_are_not_left_to_the_compiler():
    """Which makes one operation of a product and a sum."""
    for function, rounded in (
        (_EXACT["taper of heads"], "__fdiv_rn("),
        (_EXACT["negated twice"], "__fmul_rn("),
        (lambda s, b, h, q, kv: s + jnp.sqrt(1.0 - (_distance(q, kv) + 1.0) / 12.0), "__fmul_rn("),
    ):
        assert rounded in print_function(function)[0].source


def test_what_needs_no_rounding_stays_simple():
    for function, follows in (
        (lambda s, b, h, q, kv: s - sum([_distance(q, kv) / _WIDTHS[h]]), True),
        (lambda s, b, h, q, kv: s + (1.0 - jnp.abs(_distance(q, kv)) / _WIDTHS[h]), False),
        (lambda s, b, h, q, kv: (s + 1e-6) - 0.1 * _distance(q, kv) + 1.0, False),
    ):
        printed, _ = print_function(function, sides=("before", "behind"))
        assert printed.unit_slope
        assert ("kFollowsDistance = true" in printed.source) == follows
        assert "_rn(" not in printed.source


def test_branches_that_are_not_taken(tmp_path):
    """Where they are not finite they reach neither the logit nor the slope."""
    printed = [print_function(function) for function in _NOT_TAKEN.values()]
    library = CompiledPrograms([x.source for x, _ in printed], tmp_path)
    indices, s = random_points(np.random.default_rng(7))
    s[:9] = 0.0
    for number, function in enumerate(_NOT_TAKEN.values()):
        points = indices, s
        if function is _NOT_TAKEN["one within the other"]:
            points = [x[9:] for x in indices], s[9:]  # sqrt has no slope at 0
        check_program(library, number, *printed[number], function, points)


def test_any_number_chooses_a_case(tmp_path):
    """The first or the last one, where it is beyond them; so do the results of several choices."""
    steps = [float(x) for x in range(1, 101)]
    functions = [
        lambda s, b, h, q, kv: s + jax.lax.select_n(q - kv, *map(jnp.float32, steps)),
        lambda s, b, h, q, kv: jax.lax.switch(q - kv, [lambda s, x=x: s * x for x in steps], s),
        lambda s, b, h, q, kv: s * jax.lax.select_n(jnp.int32(q > kv), *map(jnp.float32, steps)),
        lambda s, b, h, q, kv: s + jax.lax.select_n(q - kv, jnp.float32(2.0)),
    ]
    printed = [print_function(function) for function in functions]
    library = CompiledPrograms([x.source for x, _ in printed], tmp_path)
    indices, s = random_points(np.random.default_rng(8), beyond=100)
    s = np.abs(s) + 1.0
    _, _, q, kv = indices
    scaled, case = SCALE * s, 1.0 + np.clip(q - kv, 0, 99)
    expected = scaled + case, scaled * case, scaled * (1.0 + (q > kv)), scaled + 2.0
    for number, logits in enumerate(expected):
        _, logit, *_ = library(number, printed[number][1], indices, s)
        np.testing.assert_allclose(logit, logits, rtol=2e-5)


def test_nan_passes_through_minimum_and_maximum(tmp_path):
    printed, captures = print_function(lambda s, b, h, q, kv: jnp.clip(s, -1.0, 1.0))
    indices = [np.zeros(2, np.int32)] * 4
    s = np.array([np.nan, 100.0], np.float32)
    alone, logit, *_ = CompiledPrograms([printed.source], tmp_path)(0, captures, indices, s)
    assert np.isnan([alone[0], logit[0]]).all()
    assert abs(logit[1] - 1.0) < 1e-6


_OF_PYTHON_NUMBERS = {
    "constant": lambda s, b, h, q, kv: s * 0.5 + jnp.asarray(SLOPES)[h],
    "infinity": lambda s, b, h, q, kv: jnp.where(q >= kv, s, -jnp.inf),
    "integer": lambda s, b, h, q, kv: jnp.where(q >= kv, s, -(10**9)),
    "clip": lambda s, b, h, q, kv: jnp.clip(s, -3, 3),
    "times indices": lambda s, b, h, q, kv: s - 0.1 * jnp.abs(q - kv),
    "functions": lambda s, b, h, q, kv: s * jnp.sqrt(2.0) + jnp.exp(-0.5 * h) * jnp.sin(0.1 * q),
    "choice": lambda s, b, h, q, kv: s + jnp.where(q > kv, 0.0, 1.0) * jnp.where(q > h, 2, -1),
    "division": lambda s, b, h, q, kv: s + jnp.asarray(SLOPES)[q // 3 % 4] * (kv / 7),
    "truth": lambda s, b, h, q, kv: s + (q > kv) * 3,
    "branches": lambda s, b, h, q, kv: (
        s + jax.lax.cond(q > kv, lambda: 0.5, lambda: 2.0) * jax.lax.switch(h, [lambda: 3] * 2)
    ),
    # As indices become where they are compared with symbolic sizes.
    "index": lambda s, b, h, q, kv: s + jnp.asarray(SLOPES)[q.astype(int) // 3 % 4],
}


def test_python_numbers_of_64_bits_are_of_32(tmp_path):
    """What JAX_ENABLE_X64 makes of them is weakly typed: it yields to the score."""
    functions = _OF_PYTHON_NUMBERS.values()
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        narrow = [print_function(function)[0].source for function in functions]
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        printed = [print_function(function) for function in functions]
        library, points = (
            CompiledPrograms([p.source for p, _ in printed], tmp_path),
            random_points(np.random.default_rng(4)),
        )
        for number, function in enumerate(functions):
            check_program(library, number, *printed[number], function, points)
    assert [p.source for p, _ in printed] == narrow


# ---- Masks ---------------------------------------------------------------------------------------


def _masked(name):
    """Of a mask value without batch axes: (predicate, captures, who sees whom, and where the parts
    of it that have another place in a call allow that), the latter (N, T, S). None where it has no
    other parts."""
    row, shape = MASK_VALUES[name], (1, SIZES.heads, *LENGTHS)
    arrays = row.arrays(Sizes(*shape), np.random.default_rng(0))
    query, key = (jnp.zeros((n, SIZES.heads, 8), jnp.float32) for n in LENGTHS)
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
    rows = {name: _masked(name) for name, row in MASK_VALUES.items() if row.on_kernels}
    rows = {name: row for name, row in rows.items() if row is not None}
    assert len(rows) > 15
    score = _kernel_program.identity()
    printed = [
        cuda.print_program(Request(score, (predicate,), distance_is_difference=True))
        for predicate, *_ in rows.values()
    ]
    library = CompiledPrograms([x.source for x in printed], tmp_path)
    points = random_points(np.random.default_rng(1))
    (_, h, q, kv), s = points
    b = np.zeros_like(h)
    for number, (name, row) in enumerate(rows.items()):
        _, captures, visible, elsewhere = row
        alone, logit, added, _, slope = library(number, captures, [b, h, q, kv], s)
        shown, asked = visible[h, q, kv], elsewhere[h, q, kv]
        assert not (shown & ~asked).any(), name
        expected = np.where(shown, SCALE * s, -np.inf)[asked]
        assert printed[number].unit_slope, name
        for x in (alone, logit, added):
            np.testing.assert_allclose(x[asked], expected, rtol=2e-5, atol=2e-5, err_msg=name)
        assert (slope[asked & shown] == 1.0).all(), name


def test_arrays_of_more_than_2_31_elements(tmp_path):
    """Among other masks, read at their indices: no offset is one of 32 bits."""
    length = 2**15 + 8
    array = np.zeros((2, length, length), bool)  # in memory where it is written
    assert array.size > 2**31
    rng = np.random.default_rng(9)
    h, q, kv = (rng.integers(0, n, POINTS).astype(np.int32) for n in array.shape)
    h[:9], q[:9], kv[:9] = 1, length - 1 - np.arange(9) // 3, length - 1 - np.arange(9) % 3
    shown = rng.random(POINTS) < 0.5
    array[h[shown], q[shown], kv[shown]] = True
    query = jax.ShapeDtypeStruct((length, 2, 8), jnp.float32)
    nothing = masks.function(lambda b, h, q, kv: q < 0)
    mask = ~masks.dense(jax.ShapeDtypeStruct(array.shape, bool)) | nothing
    spec, _ = _api.described(query, query, query, mask=mask)
    assert spec.predicate is not None
    request = Request(_kernel_program.identity(), (spec.predicate,), distance_is_difference=True)
    library = CompiledPrograms([cuda.print_program(request).source], tmp_path)
    s = rng.standard_normal(POINTS).astype(np.float32)
    _, logit, *_ = library(0, [array], [np.zeros_like(h), h, q, kv], s)
    np.testing.assert_array_equal(logit == -np.inf, array[h, q, kv])


@pytest.mark.parametrize("beside", [None, lambda b, h, q, kv: (q + kv) % 3 != h])
@pytest.mark.parametrize("axes", [(0, 1, 2), (1, 2), (0, 2), (2,), (0, 1)])
@pytest.mark.parametrize("kv_len", [30, 300])
def test_masks_in_words(kv_len, axes, beside, tmp_path):
    """A part of a mask array lies in words of keys, if it has keys, and what there is beside it in
    another part."""
    rng = np.random.default_rng(3)
    full = (SIZES.heads, SIZES.q_len, kv_len)
    array = rng.random([n if axis in axes else 1 for axis, n in enumerate(full)]) < 0.6
    mask = masks.dense(jnp.asarray(array)[None])
    expected = np.broadcast_to(array, full).copy()
    if beside is not None:
        mask &= masks.function(beside)
        h, q, kv = np.indices(full)
        expected &= beside(0, h, q, kv)
    query, key = (jnp.zeros((1, n, SIZES.heads, 8), jnp.float32) for n in full[1:])
    spec, operands = _api.described(query, key, key, mask=mask)
    program = _kernel_program.make(spec, operands, "forward")
    assert program is not None
    assert ("kHasWords = true" in program.source) == (2 in axes)
    assert ("kAllInWords = true" in program.source) == (2 in axes and beside is None)
    own = _dense_mask.own_type(array, "forward")
    words = mask_values.packed(array[None], "forward").reshape(1, *own.shape)
    read = _dense_mask.DenseMask(words, ())
    captures = jax.device_get(_kernel_program.captures(spec, operands, read))
    library = CompiledPrograms([program.source], tmp_path)
    h, q, kv = (rng.integers(0, n, POINTS).astype(np.int32) for n in full)
    s = rng.standard_normal(POINTS).astype(np.float32)
    alone, logit, *_ = library(0, [x[0] for x in captures], [np.zeros_like(h), h, q, kv], s)
    logits = np.where(expected[h, q, kv], s * spec.scale, -np.inf)
    np.testing.assert_allclose(logit * spec.scale / SCALE, logits, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(alone, logit)


# ---- Loads in pairs, products that start from them -----------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_neighbours_of_a_row_are_loaded_in_pairs(tmp_path, dtype):
    """Where each key has an element, and no other index knows the key."""
    rng = np.random.default_rng(5)
    kv_len = SIZES.kv_len // 2 * 2
    bias = jnp.asarray(rng.standard_normal((SIZES.heads, SIZES.q_len, kv_len)), dtype)
    square = jnp.asarray(rng.standard_normal((kv_len, kv_len)), dtype)

    def function(s, b, h, q, kv):
        return s + bias[h, q, kv].astype(jnp.float32) + square[kv, kv].astype(jnp.float32)

    printed, captures = print_function(function, paired=(0, 1))
    assert all(load in printed.source for load in ("load_of_pair(", "load_capture("))
    assert "kSharesLoads = true" in printed.source
    assert "kSharesLoads = false" in print_function(function)[0].source
    library = CompiledPrograms([printed.source], tmp_path)
    indices, s = random_points(rng)
    indices[3] %= kv_len
    check_program(library, 0, printed, captures, function, (indices, s))


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
    "large factor": lambda e: e["s"] - 3e38 * e["bias"],
    "capped with a large factor": lambda e: 5.0 * jnp.tanh((e["s"] - 3e38 * e["bias"]) / 5.0),
}


def _of_neighbours(expression, dtype):
    rng = np.random.default_rng(6)
    bias, other = jnp.asarray(rng.standard_normal((2, SIZES.heads, *LENGTHS)), dtype)
    slopes = jnp.asarray(rng.standard_normal(SIZES.heads), jnp.float32)
    keys = jnp.asarray(rng.standard_normal(SIZES.kv_len // 2), jnp.float32)

    def function(s, b, h, q, kv):
        loaded = {"bias": bias[h, q, kv], "other": other[h, q, kv]}
        loaded = {name: x.astype(jnp.float32) for name, x in loaded.items()}
        others = {"slopes": slopes[h], "keys": keys[kv // 2]}
        return expression(dict(loaded, **others, s=s, q=q, kv=kv))

    _, captures = trace_function(function)
    paired = [i for i, x in enumerate(captures) if x.ndim == 3]
    return function, *print_function(function, paired=paired, starts=paired)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_products_start_from_neighbours(tmp_path, dtype):
    """Loaded before the products, where all that is added to them is known then."""
    rows = [_of_neighbours(expression, dtype) for expression in _STARTING.values()]
    library = CompiledPrograms([printed.source for _, printed, _ in rows], tmp_path)
    for number, (function, printed, captures) in enumerate(rows):
        assert "kStarts = true" in printed.source
        indices, s = random_points(np.random.default_rng(7), beyond=50)
        indices[3] %= SIZES.kv_len
        check_program(library, number, printed, captures, function, (indices, s))


@pytest.mark.parametrize("name", _NOT_STARTING)
def test_products_start_from_no_others(name):
    _, printed, _ = _of_neighbours(_NOT_STARTING[name], "bfloat16")
    assert "kStarts = false" in printed.source


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


@settings(max_examples=6)
@given(st.lists(_expressions(), min_size=4, max_size=4))
def test_random_programs(tmp_path_factory, expressions):
    rng = np.random.default_rng(3)
    arrays = {
        "table": jnp.asarray(rng.standard_normal((SIZES.heads, 50)), jnp.float32),
        "bias": jnp.asarray(
            rng.standard_normal((2, SIZES.heads, SIZES.q_len, SIZES.kv_len)), jnp.bfloat16
        ),
        "ids": jnp.asarray(rng.integers(0, 9, 64), jnp.int32),
    }
    functions = [
        lambda s, b, h, q, kv, e=e: _evaluate(e, dict(arrays, s=s, b=b, h=h, q=q, kv=kv))
        for e in expressions
    ]
    programs = [print_function(function) for function in functions]
    library = CompiledPrograms([p.source for p, _ in programs], tmp_path_factory.mktemp("random"))
    points = random_points(rng)
    for number, (function, (printed, captures)) in enumerate(zip(functions, programs, strict=True)):
        check_program(library, number, printed, captures, function, points)
