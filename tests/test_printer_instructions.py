"""Which instructions a printed program has, and what cannot be printed."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxflash import _printer, _program
from jaxflash._printer import cuda
from jaxflash._printer.request import Request
from printed_programs import SIZES, SLOPES, print_function, trace_function

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


_BIAS = np.zeros((2, SIZES.heads, SIZES.q_len, SIZES.kv_len), jnp.bfloat16)


def test_soft_cap_is_a_product_a_tanh_and_a_product():
    printed, _ = print_function(lambda s, b, h, q, kv: 30.0 * jnp.tanh(s / 30.0))
    assert not printed.unit_slope
    assert _operations(printed) == ["x * s", "tanh_approx(x)", "43.28085f * x"]
    slope = _operations(printed, "logit_and_slope")
    assert slope[3:] == ["-x", "fmaf(x, x, 1.0f)", "x"]  # 1 - t * t of the same t


@pytest.mark.parametrize(
    ("function", "bounded"),
    [
        (lambda s, b, h, q, kv: 50.0 * jnp.tanh(s / 50.0), True),
        (lambda s, b, h, q, kv: 60.0 * jnp.tanh(s / 60.0), False),
        (lambda s, b, h, q, kv: 20.0 * jnp.tanh(jnp.asarray(SLOPES)[h] * s) - 30.0, True),
        (lambda s, b, h, q, kv: 20.0 * jnp.tanh(s) + jnp.asarray(SLOPES)[h], False),
        (lambda s, b, h, q, kv: jnp.clip(s, -40.0, 50.0), True),
        (lambda s, b, h, q, kv: jnp.minimum(s, 50.0), False),
        (lambda s, b, h, q, kv: jnp.where(q > kv, 4.0 * jnp.sin(s) * jnp.cos(s), 50.0), True),
        (lambda s, b, h, q, kv: jnp.where(q > kv, s, 50.0), False),
        (lambda s, b, h, q, kv: s, False),
        (lambda s, b, h, q, kv: 50.0 * jax.nn.sigmoid(s), True),
        (lambda s, b, h, q, kv: 50.0 - jnp.exp(s), False),
        (lambda s, b, h, q, kv: jnp.minimum(s * s + jnp.abs(s), 50.0), True),
        (lambda s, b, h, q, kv: jnp.minimum(s * s * s, 50.0), False),
        (lambda s, b, h, q, kv: jnp.sqrt(jnp.minimum(s, 50.0)), False),
    ],
)
def test_bounded_logits(function, bounded):
    """Their exponentials need no reference."""
    printed, _ = print_function(function)
    assert printed.bounded == bounded
    assert f"kBounded = {str(bounded).lower()}" in printed.source


@pytest.mark.parametrize("of", [lambda s: s, jnp.tanh], ids=["score", "tanh"])
def test_squares_of_squares_are_not_multiplied_out(of):
    """Of a power of 2^12 there are some thirty products, of its derivative as many again."""

    def function(s, b, h, q, kv):
        x = of(s)
        for _ in range(12):
            x = x * x
        return x

    printed, _ = print_function(function)
    assert len(_operations(printed)) < 40
    assert len(_operations(printed, "logit_and_slope")) < 80


@pytest.mark.parametrize(
    ("function", "quotient"),
    [
        (lambda s: jax.nn.sigmoid(s), "rcp_approx(x)"),
        (lambda s: 3.0 / (1.0 + s * s), "rcp_approx(x)"),
        (lambda s: -2.0 / (-1.0 - jnp.abs(s)), "rcp_approx(x)"),
        (lambda s: s / (1.0 + jnp.abs(s)), "divide_by_normal(x, x)"),
        (lambda s: 1e38 / (1.0 + jnp.abs(s)), "divide_by_normal(1e+38f, x)"),
        (lambda s: s / jnp.abs(s), "divide_approx(x, x)"),
        (lambda s: 1.0 / (2.0 + s), "divide_approx(1.0f, x)"),
    ],
)
def test_quotients(function, quotient):
    """Shorter by what is known not to be 0 or subnormal."""
    printed, _ = print_function(lambda s, b, h, q, kv: function(s))
    assert quotient in _operations(printed)


def test_alibi_is_one_fma_and_the_distance():
    def alibi(s, b, h, q, kv, distance):
        return s - jnp.asarray(SLOPES)[h] * jnp.abs(distance).astype(jnp.float32)

    program, _ = _program.trace(alibi, (), jnp.float32)
    for is_difference in (True, False):
        printed = cuda.print_program(Request(program, distance_is_difference=is_difference))
        assert printed.unit_slope
        assert printed.exact_length is None
        assert _operations(printed) == ["fabsf(distance)", "x * x", "fmaf(x, s, x)"]


def test_differences_of_positions_are_not_converted_element_by_element():
    def function(s, b, h, q, kv):
        return s - 0.1 * jnp.abs(q - kv).astype(jnp.float32)

    printed, _ = print_function(function)
    expected = ["fabsf(distance)", "-0.14426951f * x", "fmaf(x, s, x)"]
    assert _operations(printed) == expected
    assert printed.exact_length is None

    # With an alignment at the bottom right, the distance is another one.
    program, _ = trace_function(function)
    printed = cuda.print_program(Request(program, distance_is_difference=False))
    assert _operations(printed) == ["x + x", "fabsf(x)", *expected[1:]]
    assert printed.exact_length == 2**24


def test_sums_of_what_rows_and_columns_add_are_not_kept_together():
    """Differences are: they may be small where both are large."""
    a, b = (jnp.ones(64, jnp.float32) for _ in range(2))
    printed, _ = print_function(lambda s, _, h, q, kv: s + (a[q] + b[kv]))
    assert _operations(printed) == ["x + x", "fmaf(x, s, x)"]
    printed, _ = print_function(lambda s, _, h, q, kv: s + (a[q] - b[kv]))
    assert _operations(printed) == ["x + x", "1.442695f * x", "fmaf(x, s, x)"]


def test_dense_bias_is_one_load_and_one_fma():
    printed, _ = print_function(
        lambda s, b, h, q, kv: s + jnp.asarray(_BIAS)[b, h, q, kv].astype("float32")
    )
    assert printed.unit_slope
    assert _operations(printed) == ["load_capture(x, x)", "1.442695f * x", "fmaf(x, s, x)"]


def test_all_built_in_features_together():
    def function(s, b, h, q, kv):
        s = s + jnp.asarray(_BIAS)[b, h, q, kv].astype(jnp.float32)
        s = s - jnp.asarray(SLOPES)[h] * jnp.abs(q - kv).astype(jnp.float32)
        return 30.0 * jnp.tanh(s / 30.0)

    printed, _ = print_function(function)
    of_the_score = _operations(printed)[-3:]
    assert of_the_score == ["fmaf(x, s, x)", "tanh_approx(x)", "43.28085f * x"]


def test_floor_division_of_positions_is_division():
    """Nobody asks of positions whether a quotient has to be rounded down, or a rest is negative."""

    def of_positions(s, b, h, q, kv):
        return s + jnp.float32((q // 128 + kv // 128) % 2) + jnp.float32(q // 3 - kv % 5)

    printed, _ = print_function(of_positions)
    assert all(x in printed.source for x in ("/ 128u", "% 2u", "/ 3u", "% 5u"))
    assert "&&" not in printed.source
    printed, _ = print_function(lambda s, b, h, q, kv: s + jnp.float32((q - kv) // 3))
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
    printed, _ = print_function(lambda s, b, h, q, kv: s + jnp.float32(function(q, kv)))
    assert set(operations) <= set(_operations(printed))
    assert "&&" not in printed.source


def test_a_mask_written_as_a_score_function_has_slope_one():
    printed, _ = print_function(lambda s, b, h, q, kv: jnp.where(q >= kv, 2.0 * s / 2.0, -jnp.inf))
    assert printed.unit_slope
    assert _operations(printed) == ["q >= kv", "x * s", "x ? x : -INFINITY"]
    assert _operations(printed, "addend") == ["q >= kv", "x ? 0.0f : -INFINITY"]


def test_a_choice_by_the_score_has_no_addend():
    printed, _ = print_function(lambda s, b, h, q, kv: jnp.where(s > 0.0, s, -jnp.inf))
    assert not printed.unit_slope
    assert _operations(printed, "logit_and_slope")[-1] == "1.0f"


def test_another_size_prints_the_same():
    def function(table):
        return print_function(lambda s, b, h, q, kv: s + table[h, q - kv] * table[0, kv])[0].source

    assert function(jnp.zeros((4, 9), jnp.float32)) == function(jnp.zeros((16, 100), jnp.float32))


def test_dropout_is_the_last_capture():
    program, _ = trace_function(lambda s, b, h, q, kv: s + jnp.asarray(SLOPES)[h])
    for sink_dtype, number in ((None, 1), ("float32", 2)):
        printed = cuda.print_program(
            Request(program, distance_is_difference=True, sink_dtype=sink_dtype, drops=True)
        )
        assert "kDrops = true" in printed.source
        (result,) = _body(printed, "dropout")
        parameters = f"capture_data<uint32_t>(captures, {number}, problem, batch)"
        assert result == f"return Dropout({parameters}, b, h);"


def test_sink_is_a_capture_of_its_own():
    program, _ = trace_function(lambda s, b, h, q, kv: s + jnp.asarray(SLOPES)[h])
    request = Request(program, distance_is_difference=True, sink_dtype="bfloat16")
    printed = cuda.print_program(request)
    assert "kHasSink = true" in printed.source
    assert "kAdds = true" in printed.source
    assert printed.unit_slope
    assert "capture_data<BFloat16>(captures, 1, problem, batch)" in printed.source
    (result,) = _body(printed, "sink")
    assert result.startswith("return head.")

    # A program that is a sink alone.
    program, _ = trace_function(lambda s, b, h, q, kv: s)
    request = Request(program, distance_is_difference=True, sink_dtype="float32")
    printed = cuda.print_program(request)
    assert "kAdds = false" in printed.source
    assert _body(printed, "addend") == ["return 0.0f;"]


# ---- What cannot be printed ----------------------------------------------------------------------

_ROWS = jnp.ones((8, 8), jnp.float32)
_REFUSED = {
    "while": lambda s, b, h, q, kv: jax.lax.while_loop(lambda x: x < 3.0, lambda x: x + 1.0, s),
    "scan": lambda s, b, h, q, kv: jax.lax.fori_loop(0, 3, lambda i, x: x * 1.1, s),
    "platform": lambda s, b, h, q, kv: jax.lax.platform_dependent(
        s, cpu=jnp.sin, default=lambda s: s
    ),
    "cond": lambda s, b, h, q, kv: jax.lax.cond(q > kv, lambda: _ROWS[0], lambda: _ROWS[1])[h],
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
        print_function(_REFUSED[primitive])
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
    assert len(print_function(function)) < 1 << 17


def test_deep_functions_are_refused():
    """Before Python's recursion ends."""

    def chain(s, b, h, q, kv):
        for _ in range(2000):
            s = jnp.tanh(s)
        return s

    with pytest.raises(_printer.NotPrintable, match="201 operations one within the other"):
        print_function(chain)


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
        print_function(function)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda s, b, h, q, kv: s + jnp.float64(0.1), "computes in float64"),
        (lambda s, b, h, q, kv: s + (q - kv).astype(jnp.float64), "computes in float64"),
        (lambda s, b, h, q, kv: s + jnp.int64(q) * 3, "computes in int64, and 32 bits may not"),
        (lambda s, b, h, q, kv: jnp.where(jnp.int64(q) * 3 > kv, s, 0), "32 bits may not hold"),
        (lambda s, b, h, q, kv: s + (jnp.int64(q) - (-(2**31))), "computes in int64"),
        (lambda s, b, h, q, kv: s + ((jnp.int64(q) & 7) - 2**30 - 2**30 - 2**30), "in int64"),
        (lambda s, b, h, q, kv: s + jnp.where(q > kv, 2**31, 0), "operand of dtype int64"),
        (lambda s, b, h, q, kv: s + jnp.where(q > kv, 2**30, 0) * 5, "may not hold"),
    ],
    ids=[
        "constant",
        "conversion",
        "index",
        "comparison",
        "lowest",
        "wrapped twice",
        "beyond",
        "product",
    ],
)
def test_explicit_64_bits_are_refused(function, said):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        with pytest.raises(_printer.NotPrintable, match=said):
            print_function(function)
        captured = jnp.ones(8, jnp.float64)
        with pytest.raises(_printer.NotPrintable, match="captures an array of dtype float64"):
            print_function(lambda s, b, h, q, kv: s + captured[h].astype(jnp.float32))
