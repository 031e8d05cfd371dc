"""Prints a score program as the CUDA struct that the kernels are compiled with.

The value of the program and its derivative become one graph of scalar expressions, in which equal
ones are one node. Sums and products of floats are kept as linear combinations of monomials, so that
constant factors, log2(e) of the result among them, end up in coefficients. Each node belongs to the
earliest place that knows what it depends on: batch element and head, row, column, element, score;
what an earlier place computes is a member of that place's struct.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from jaxflash._scores import ARGUMENTS, Program, View, is_literal

if TYPE_CHECKING:
    from jax.extend import core

# What a node depends on, beyond batch element and head.
_ROW, _COLUMN, _DISTANCE, _SCORE = 1, 2, 4, 8
_ELEMENT = _ROW | _COLUMN | _DISTANCE

_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2.0)
_FLOAT_MAX = float(np.finfo(np.float32).max)

_FLOATS = ("float32", "bfloat16", "float16")
_INTEGERS = ("int32", "uint32")
# As the kernels store a capture, and as they compute with it.
_STORED = {
    "float32": "float",
    "bfloat16": "BFloat16",
    "float16": "Float16",
    "int32": "int32_t",
    "uint32": "uint32_t",
    "bool": "bool",
}
_COMPUTED = {"float32": "float", "int32": "int", "uint32": "uint32_t", "bool": "bool"}

MAX_CAPTURES, MAX_CAPTURE_RANK = 8, 6
CAPTURE_DTYPES = tuple(_STORED)


class NotPrintable(Exception):
    """Why a program cannot run in a kernel."""


@dataclasses.dataclass(frozen=True)
class Printed:
    """A program for the kernels.

    Attributes:
        source: the C++ struct.
        unit_slope: the logit is the score plus what does not depend on it (-inf included).
        exact_length: number of rows and columns up to which differences of their numbers are
            computed exactly, or None without a limit.
    """

    source: str
    unit_slope: bool
    exact_length: int | None


def print_cuda(
    program: Program,
    *,
    distance_is_difference: bool,
    sink_dtype: str | None = None,
    drops: bool = False,
) -> Printed:
    """The struct `jaxflash::Program` for a score program.

    Args:
        program: of float32 scores.
        distance_is_difference: whether `distance` is q - kv in this call.
        sink_dtype: of the sink's logits (heads), the capture after those of the program; or None.
        drops: whether the last capture is `_dropout.kernel_parameters`.

    Raises:
        NotPrintable: the text says why, naming the equation.
    """
    graph = _Graph(distance_is_difference)
    logit, slope = _Builder(graph).build(program)
    if logit.op == "select" and logit.args[2] is graph.constant(-math.inf):
        slope = graph.given(slope, logit.args[0])  # elsewhere nobody asks for it
    sink = None
    captures = len(program.capture_types)
    if sink_dtype is not None:
        head = graph.input("h", "int32", 0)
        sink = graph.load(captures, sink_dtype, (head,))
        captures += 1
        sink = graph.scaled(sink, _LOG2_E)
    logit = graph.scaled(logit, _LOG2_E)
    addend = graph.without_score(logit) if slope is graph.constant(1.0) else None
    writer = _Writer(graph, _Roots(logit, slope, addend, sink))
    return Printed(
        writer.struct(captures if drops else None),
        unit_slope=addend is not None,
        exact_length=1 << 24 if graph.subtracts_positions else None,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Node:
    """A scalar expression; equal expressions are one node.

    Floats are constants, atoms (any operation but the next two), `product` of two or more atoms, or
    `sum`, whose value is (constant, coefficients) for its arguments, which are atoms and products.
    """

    op: str
    args: tuple[_Node, ...]
    dtype: str
    deps: int
    value: Any
    number: int


class _Graph:
    """Makes nodes, simplified."""

    def __init__(self, distance_is_difference: bool):
        self._nodes: dict[Any, _Node] = {}
        self._distance_is_difference = distance_is_difference
        self.subtracts_positions = False

    # ---- Any dtype --------------------------------------------------------------------------

    def node(self, op: str, args: tuple[_Node, ...], dtype: str, value: Any = None, deps=0):
        """The node as it is, without simplification."""
        # repr tells -0.0 from 0.0 and finds NaN again.
        key = (op, tuple(a.number for a in args), dtype, repr(value))
        if key not in self._nodes:
            for a in args:
                deps |= a.deps
            self._nodes[key] = _Node(op, args, dtype, deps, value, len(self._nodes))
        return self._nodes[key]

    def constant(self, value, dtype: str = "float32") -> _Node:
        if dtype == "float32":
            value = float(value)
        elif dtype == "bool":
            value = bool(value)
        else:
            value = int(np.array(int(value) & 0xFFFFFFFF, np.uint32).astype(dtype))
        return self.node("constant", (), dtype, value)

    def input(self, name: str, dtype: str, deps: int) -> _Node:
        return self.node("input", (), dtype, name, deps)

    def load(self, capture: int, dtype: str, index: tuple[_Node, ...]) -> _Node:
        """An element of a capture, its indices clamped; narrow floats come as float32."""
        computed = "float32" if dtype in _FLOATS else dtype
        return self.node("load", index, computed, (capture, dtype))

    def select(self, condition: _Node, yes: _Node, no: _Node) -> _Node:
        if condition.op == "constant":
            return yes if condition.value else no
        if yes is no:
            return yes
        if condition.op == "not":
            return self.select(condition.args[0], no, yes)
        if yes.dtype == "bool":
            return self.logical(
                "or",
                self.logical("and", condition, yes),
                self.logical("and", self.negation(condition), no),
            )
        return self.node("select", (condition, yes, no), yes.dtype)

    def compare(self, op: str, x: _Node, y: _Node) -> _Node:
        if x.op == y.op == "constant":
            return self.constant(_COMPARE[op](x.value, y.value), "bool")
        zero = y.op == "constant" and y.value == 0
        nonnegative = x.dtype == "uint32" or (x.dtype == "int32" and _range(x)[0] >= 0)
        if zero and op in ("lt", "ge") and nonnegative:
            return self.constant(op == "ge", "bool")
        if x.dtype == "bool":
            different = self.logical("xor", x, y)
            return different if op == "ne" else self.negation(different)
        return self.node(op, (x, y), "bool")

    def logical(self, op: str, x: _Node, y: _Node) -> _Node:
        for a, b in ((x, y), (y, x)):
            if a.op == "constant":
                if op == "and":
                    return b if a.value else a
                if op == "or":
                    return a if a.value else b
                return self.negation(b) if a.value else b
        if x is y:
            return x if op != "xor" else self.constant(False, "bool")
        return self.node(op, (x, y), "bool")

    def negation(self, x: _Node) -> _Node:
        if x.op == "constant":
            return self.constant(not x.value, "bool")
        return x.args[0] if x.op == "not" else self.node("not", (x,), "bool")

    # ---- Integers ---------------------------------------------------------------------------

    def integer(self, op: str, *args: _Node) -> _Node:
        """Wraps around, as in JAX."""
        dtype = args[0].dtype
        if all(a.op == "constant" for a in args) and op in _FOLD:
            return self.constant(_FOLD[op](*(a.value for a in args)), dtype)
        x, y = args[0], args[-1]
        if op == "sub" and y.op == "constant":
            return self.integer("add", x, self.constant(-y.value, dtype))
        if op in ("add", "mul") and x.op == "constant":
            x, y = y, x
        if y.op == "constant" and (op, y.value) in (("add", 0), ("mul", 1), ("div", 1)):
            return x
        if op == "add" and y.op == "constant" and x.op == "add" and x.args[1].op == "constant":
            return self.integer("add", x.args[0], self.integer("add", x.args[1], y))
        return self.node(op, (x, y) if len(args) == 2 else args, dtype)

    def to_float(self, x: _Node) -> _Node:
        if x.op == "constant":
            return self.constant(x.value)
        if x.dtype == "bool":
            return self.select(x, self.constant(1.0), self.constant(0.0))
        pushed = None if _hoistable(x) else self._to_float_by_parts(x)
        return self.node("to_float", (x,), "float32") if pushed is None else pushed

    def _to_float_by_parts(self, x: _Node) -> _Node | None:
        """Converted where the parts are known: conversions are slow, adding floats is not."""
        if _wraps(x):
            return None
        if x.op == "input" and x.value == "distance":
            return self.input("distance", "float32", _DISTANCE)
        if _hoistable(x):
            return self.to_float(x)
        if x.op not in ("add", "sub", "neg", "abs", "min", "max"):
            return None
        parts = []
        for a in x.args:
            part = self._to_float_by_parts(a)
            if part is None:
                return None
            parts.append(part)
        if x.op == "neg":
            return self.scaled(parts[0], -1.0)
        if x.op == "abs":
            return self.absolute(parts[0])
        if x.op in ("min", "max"):
            return self.extremum(x.op, *parts)
        result = self.add(parts[0], parts[1] if x.op == "add" else self.scaled(parts[1], -1.0))
        return self._with_distance(result)

    def _with_distance(self, x: _Node) -> _Node:
        """`x` with float(q) - float(kv) replaced by the distance, where that is the same."""
        constant, terms = _linear(x)
        q, kv = (
            self.node("to_float", (self.input(name, "int32", deps),), "float32")
            for name, deps in (("q", _ROW), ("kv", _COLUMN))
        )
        if not (q in terms and kv in terms and terms[q] == -terms[kv]):
            self.subtracts_positions = True
            return x
        if not self._distance_is_difference:
            self.subtracts_positions = True
            return x
        coefficient = terms.pop(q)
        del terms[kv]
        distance = self.input("distance", "float32", _DISTANCE)
        return self._sum(constant, {**terms, distance: terms.get(distance, 0.0) + coefficient})

    # ---- Floats -----------------------------------------------------------------------------

    def atom(self, op: str, *args: _Node) -> _Node:
        return self.node(op, args, "float32")

    def add(self, x: _Node, y: _Node) -> _Node:
        constant, terms = _linear(x)
        other_constant, other_terms = _linear(y)
        for term, coefficient in other_terms.items():
            terms[term] = terms.get(term, 0.0) + coefficient
            if terms[term] == 0.0 and _finite(term):
                del terms[term]
        return self._sum(constant + other_constant, terms)

    def scaled(self, x: _Node, factor: float) -> _Node:
        if factor == 1.0:
            return x
        constant, terms = _linear(x)
        return self._sum(
            _times(constant, factor) if constant or not terms else 0.0,
            {term: _times(coefficient, factor) for term, coefficient in terms.items()},
        )

    def multiply(self, x: _Node, y: _Node) -> _Node:
        if y.op == "constant":
            return self.scaled(x, y.value)
        if x.op == "constant":
            return self.scaled(y, x.value)
        polynomial = self._multiply_polynomials(x, y)
        if polynomial is not None:
            return polynomial
        for a, b in ((x, y), (y, x)):
            # What is hoisted goes into the terms of a sum, one of which then has a coefficient.
            if (
                b.op == "sum"
                and b.deps & _SCORE
                and _hoistable(a)
                and len(b.args) > 1 - (b.value[0] != 0.0)
            ):
                constant, terms = _linear(b)
                result = self.scaled(a, constant) if constant else self.constant(0.0)
                for term, coefficient in terms.items():
                    result = self.add(result, self.scaled(self.multiply(a, term), coefficient))
                return result
        factor = 1.0
        factors: list[_Node] = []
        for a in (x, y):
            constant, terms = _linear(a)
            if len(terms) == 1 and constant == 0.0:
                ((a, coefficient),) = terms.items()
                factor = _times(factor, coefficient)
            factors += a.args if a.op == "product" else (a,)
        factors.sort(key=lambda n: n.number)
        return self.scaled(self.atom("product", *factors), factor)

    def _multiply_polynomials(self, x: _Node, y: _Node) -> _Node | None:
        """Multiplied out where both are polynomials of one tanh: its derivative cancels then."""
        of_x, of_y = _polynomial(x), _polynomial(y)
        if of_x is None or of_y is None or of_x[0] is not of_y[0]:
            return None
        atom, left = of_x
        powers: dict[int, float] = {}
        for i, a in left.items():
            for j, b in of_y[1].items():
                powers[i + j] = powers.get(i + j, 0.0) + a * b
        terms = {
            atom if power == 1 else self.atom("product", *(atom,) * power): coefficient
            for power, coefficient in powers.items()
            if power and coefficient
        }
        return self._sum(powers.get(0, 0.0), terms)

    def _sum(self, constant: float, terms: dict[_Node, float]) -> _Node:
        if not terms:
            return self.constant(constant)
        for term, coefficient in terms.items():
            # A coefficient of a selection goes into its branches where it costs nothing.
            if coefficient in (0.0, 1.0) or term.op not in ("select", "min", "max"):
                continue
            a, b = term.args[-2:]
            if not (_absorbs(a) and _absorbs(b)) or (term.op != "select" and coefficient < 0.0):
                continue
            a, b = self.scaled(a, coefficient), self.scaled(b, coefficient)
            if term.op == "select":
                chosen = self.select(term.args[0], a, b)
            else:
                chosen = self.extremum(term.op, a, b)
            others = {t: c for t, c in terms.items() if t is not term}
            return self.add(self._sum(constant, others), chosen)
        if constant == 0.0 and len(terms) == 1:
            ((term, coefficient),) = terms.items()
            if coefficient == 1.0:
                return term
        ordered = sorted(terms, key=lambda n: n.number)
        value = (constant, tuple(terms[t] for t in ordered))
        return self.node("sum", tuple(ordered), "float32", value)

    def divide(self, x: _Node, y: _Node) -> _Node:
        if y.op == "constant" and y.value != 0.0:
            return self.scaled(x, 1.0 / y.value)
        if y.deps & _SCORE or y.op == "constant":
            return self.atom("divide", x, y)
        return self.multiply(x, self.atom("reciprocal", y))

    def absolute(self, x: _Node) -> _Node:
        return x if x.op == "abs" else self.atom("abs", x)

    def extremum(self, op: str, x: _Node, y: _Node) -> _Node:
        return x if x is y else self.atom(op, x, y)

    def power(self, x: _Node, exponent: int) -> _Node:
        if exponent < 0:
            return self.divide(self.constant(1.0), self.power(x, -exponent))
        if exponent == 0:
            return self.constant(1.0)
        if exponent <= 3:
            result = x
            for _ in range(exponent - 1):
                result = self.multiply(result, x)
            return result
        # Not flattened to a product: by repeated squaring.
        half = self.power(x, exponent // 2)
        result = self.atom("times", half, half)
        return self.atom("times", result, x) if exponent % 2 else result

    def without_score(self, x: _Node) -> _Node | None:
        """`x` less its term in the score, if the rest does not depend on the score."""
        if not x.deps & _SCORE:
            return x if x is self.constant(-math.inf) else None
        if x.op == "select":
            condition, yes, no = x.args
            yes, no = self.without_score(yes), self.without_score(no)
            if condition.deps & _SCORE or yes is None or no is None:
                return None
            return self.select(condition, yes, no)
        constant, terms = _linear(x)
        terms = {term: c for term, c in terms.items() if not term.deps & _SCORE}
        in_score = [term for term in _linear(x)[1] if term.deps & _SCORE]
        scale = self.input("scale", "float32", 0)
        score = self.multiply(self.input("score", "float32", _SCORE), scale)
        return self._sum(constant, terms) if in_score == [score] else None

    def given(self, x: _Node, condition: _Node) -> _Node:
        """`x` where a condition holds."""
        if x.op == "select" and x.args[0] is condition:
            return self.given(x.args[1], condition)
        if x.op == "sum":
            result = self.constant(x.value[0])
            for coefficient, term in zip(x.value[1], x.args, strict=True):
                term = self.given(term, condition)
                result = self.add(result, self.scaled(term, coefficient))
            return result
        if x.op == "product":
            result = self.constant(1.0)
            for factor in x.args:
                result = self.multiply(result, self.given(factor, condition))
            return result
        return x


_COMPARE: dict[str, Callable] = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
}

_FOLD: dict[str, Callable] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "min": min,
    "max": max,
    "neg": lambda x: -x,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
}


def _hoistable(x: _Node) -> bool:
    """Whether a head, a row or a column knows it."""
    return x.deps in (0, _ROW, _COLUMN)


_INT32_RANGE = (-(2**31), 2**31 - 1)
# Lengths are at most 2**30, and a ragged tile reaches a little beyond.
_LARGEST_INPUT = 2**30 + 2**16


_RANGED = ("add", "sub", "mul", "neg", "abs", "min", "max", "select", "div", "rem", "and")


def _range(x: _Node) -> tuple[int, int]:
    """Bounds of an int32."""
    if x.op == "constant":
        return x.value, x.value
    if x.op == "input":
        return (-_LARGEST_INPUT if x.value == "distance" else 0), _LARGEST_INPUT
    if x.dtype != "int32" or x.op not in _RANGED:
        return _INT32_RANGE
    ranges = [_range(a) for a in x.args if a.dtype == "int32"]
    (low, high), (other_low, other_high) = ranges[0], ranges[-1]
    if x.op == "add":
        result = low + other_low, high + other_high
    elif x.op == "sub":
        result = low - other_high, high - other_low
    elif x.op == "mul":
        ends = [i * j for i in (low, high) for j in (other_low, other_high)]
        result = min(ends), max(ends)
    elif x.op == "neg":
        result = -high, -low
    elif x.op == "abs":
        result = 0, max(-low, high)
    elif x.op == "min":
        result = min(low, other_low), min(high, other_high)
    elif x.op == "max":
        result = max(low, other_low), max(high, other_high)
    elif x.op == "select":
        result = min(low, other_low), max(high, other_high)
    elif x.op in ("div", "rem") and low >= 0 and other_low > 0:
        result = 0, high if x.op == "div" else min(high, other_high - 1)
    elif x.op == "and" and other_low >= 0:
        result = 0, other_high
    else:
        result = _INT32_RANGE
    inside = _INT32_RANGE[0] <= result[0] and result[1] <= _INT32_RANGE[1]
    return result if inside else _INT32_RANGE


def _wraps(x: _Node) -> bool:
    """Whether a sum or difference may leave int32."""
    return x.dtype != "int32" or _range(x) == _INT32_RANGE


def _times(x: float, factor: float) -> float:
    """Finite values stay finite: -finfo.max times log2(e) still means a finite logit."""
    result = x * factor
    if math.isfinite(x) and math.isfinite(factor):
        return min(max(result, -_FLOAT_MAX), _FLOAT_MAX)
    return result


def _linear(x: _Node) -> tuple[float, dict[_Node, float]]:
    """The constant and the coefficients of the terms of a float."""
    if x.op == "constant":
        return x.value, {}
    if x.op == "sum":
        return x.value[0], dict(zip(x.args, x.value[1], strict=True))
    return 0.0, {x: 1.0}


def _polynomial(x: _Node) -> tuple[_Node, dict[int, float]] | None:
    """(tanh, coefficients by power) of a polynomial of one tanh."""
    constant, terms = _linear(x)
    powers = {0: constant} if constant else {}
    atoms = set()
    for term, coefficient in terms.items():
        factors = term.args if term.op == "product" else (term,)
        atoms.update(factors)
        powers[len(factors)] = coefficient
    if len(atoms) != 1:
        return None
    (atom,) = atoms
    return (atom, powers) if atom.op == "tanh" else None


def _absorbs(x: _Node) -> bool:
    """Whether a factor costs nothing: there is one already, or it is applied before the score."""
    if not x.deps & _SCORE:
        return True
    if x.op == "product":
        return not all(factor.deps & _SCORE for factor in x.args)
    if x.op == "sum":
        return all(
            coefficient != 1.0 or _absorbs(term)
            for coefficient, term in zip(x.value[1], x.args, strict=True)
        )
    if x.op in ("select", "min", "max"):
        return all(map(_absorbs, x.args[-2:]))
    return False


def _finite(x: _Node) -> bool:
    """Whether a float is finite whatever the score and the captures are."""
    if x.op == "constant":
        return math.isfinite(x.value)
    if x.op in ("tanh", "sin", "cos", "to_float", "input"):
        return x.value != "score"
    if x.op == "sum":
        return all(map(_finite, x.args)) and math.isfinite(x.value[0])
    if x.op in ("product", "times", "abs", "min", "max"):
        return all(map(_finite, x.args))
    if x.op == "select":
        return all(map(_finite, x.args[1:]))
    return False


# ---- From JAX to the graph ----------------------------------------------------------------------

# Primitives on floats that are one function of CUDA, the same name with an f.
_WITH_SUFFIX = (
    *("sqrt", "rsqrt", "cbrt", "floor", "ceil", "log1p", "expm1", "erf", "erfc", "lgamma"),
    *("tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh"),
)
# Those that are one entry of `_FLOAT_FORMATS`.
_SAME = ("exp2", "tanh", "erf_inv", "pow", "atan2", *_WITH_SUFFIX)
_PASSED_ON = ("stop_gradient", "copy", "copy_p", "pvary", "optimization_barrier")


class _Builder:
    """Turns the equations of a program into nodes."""

    def __init__(self, graph: _Graph):
        self._graph = graph
        self._values: dict[core.Var, _Node | View] = {}
        self._capture_dtypes: list[str] = []

    def build(self, program: Program) -> tuple[_Node, _Node]:
        """(logit, d logit / d score)."""
        self._check_captures(program)
        try:
            closed = program.value_and_slope()
        except (TypeError, ValueError, NotImplementedError) as error:
            # What has no derivative has an equation that is refused, most likely.
            self._results(program.jaxpr, program)
            raise NotPrintable(f"has no derivative in reverse mode: {error}") from error
        if closed.consts:
            raise NotPrintable("has arrays inside a function with a derivative of its own")
        if closed.effects:
            raise NotPrintable(f"has side effects: {', '.join(map(str, closed.effects))}")
        logit, slope = self._results(closed, program)
        return logit, slope

    def _results(self, closed: core.ClosedJaxpr, program: Program) -> list[_Node]:
        """Nodes of the results of a jaxpr of the program's arguments."""
        graph, jaxpr = self._graph, closed.jaxpr
        scale = graph.input("scale", "float32", 0)
        product = graph.input("score", "float32", _SCORE)
        arguments = (
            graph.multiply(product, scale),
            graph.input("b", "int32", 0),
            graph.input("h", "int32", 0),
            graph.input("q", "int32", _ROW),
            graph.input("kv", "int32", _COLUMN),
            graph.input("distance", "int32", _DISTANCE),
        )
        self._values.update(zip(jaxpr.invars, arguments, strict=False))
        captures = zip(jaxpr.invars[len(ARGUMENTS) :], program.capture_types, strict=True)
        for number, (variable, capture) in enumerate(captures):
            self._values[variable] = View.whole(number, capture.shape)
            self._capture_dtypes.append(str(capture.dtype))
        for eqn in jaxpr.eqns:
            self._values.update(zip(eqn.outvars, self._equation(eqn), strict=True))
        return [self._scalar(atom, None) for atom in jaxpr.outvars]

    @staticmethod
    def _check_captures(program: Program) -> None:
        for capture in program.capture_types:
            if str(capture.dtype) not in CAPTURE_DTYPES:
                raise NotPrintable(
                    f"captures an array of dtype {capture.dtype}; allowed are "
                    f"{', '.join(CAPTURE_DTYPES)}"
                )
            if len(capture.shape) > MAX_CAPTURE_RANK:
                raise NotPrintable(
                    f"captures an array of {len(capture.shape)} axes; allowed are "
                    f"{MAX_CAPTURE_RANK}"
                )
            if any(size >= 2**31 for size in capture.shape):
                raise NotPrintable(f"captures an array with an axis of 2**31: {capture.shape}")

    def _equation(self, eqn) -> list[_Node | View]:
        name = eqn.primitive.name
        first = self._values.get(eqn.invars[0]) if _is_variable(eqn.invars[:1]) else None
        if isinstance(first, View) and first.axes:
            view = first.after(eqn, eqn.invars[1:])
            if view is None:
                _refuse(eqn, "is not the choice of single elements of a captured array")
            index = tuple(
                i if i is None or isinstance(i, _Node) else self._index(i, eqn) for i in view.index
            )
            return [dataclasses.replace(view, index=index)]
        if len(eqn.outvars) != 1:
            _refuse(eqn, "has no counterpart in CUDA")
        out = eqn.outvars[0].aval
        if out.shape != () and name not in ("reshape", "broadcast_in_dim", "squeeze"):
            _refuse(eqn, "works on arrays")
        if math.prod(out.shape) != 1:
            _refuse(eqn, "makes an array")
        args = [self._scalar(atom, eqn) for atom in eqn.invars]
        narrow = str(out.dtype) in _FLOATS and (name == "select_n" or name in _PASSED_ON)
        if str(out.dtype) not in _COMPUTED and not narrow:
            _refuse(eqn, f"computes in {out.dtype}; allowed are {', '.join(_COMPUTED)}")
        result = self._operation(eqn, name, str(out.dtype), args)
        if result is None:
            _refuse(eqn, "has no counterpart in CUDA")
        return [result]

    def _index(self, atom, eqn) -> _Node:
        if isinstance(atom, int):
            return self._graph.constant(atom, "int32")
        node = self._scalar(atom, eqn)
        if node.deps & _SCORE:
            _refuse(eqn, "has an index that depends on the score")
        if node.dtype == "uint32":
            largest = self._graph.constant(2**31 - 1, "uint32")
            node = self._graph.integer("min", node, largest)
            return self._graph.node("to_int", (node,), "int32")
        return node

    def _scalar(self, atom, eqn) -> _Node:
        graph = self._graph
        if is_literal(atom):
            if np.size(atom.val) != 1:
                _refuse(eqn, "works on a constant array")
            aval: Any = atom.aval
            dtype = str(aval.dtype)
            if dtype not in _COMPUTED and dtype not in _FLOATS:
                _refuse(eqn, f"has an operand of dtype {dtype}")
            return graph.constant(
                np.asarray(atom.val).reshape(()).item(),
                "float32" if dtype in _FLOATS else dtype,
            )
        value = self._values[atom]
        if isinstance(value, _Node):
            return value
        if math.prod(atom.aval.shape) != 1 or any(axis is not None for axis in value.axes):
            _refuse(eqn, "works on a captured array; only single elements can be taken of one")
        return self._element(value, eqn)

    def _element(self, view: View, eqn) -> _Node:
        """The one element that a view has."""
        graph = self._graph
        dtype = self._capture_dtypes[view.capture]
        index = tuple(self._wrapped(i, view, axis) for axis, i in enumerate(view.index))
        node = graph.load(view.capture, dtype, index)
        for cast in view.casts:
            if str(cast) not in _COMPUTED:
                _refuse(eqn, f"converts to {cast}; allowed are {', '.join(_COMPUTED)}")
            node = self._convert(node, str(cast))
        return node

    def _wrapped(self, i: _Node, view: View, axis: int) -> _Node:
        """An index, whose wrapping by the size of its axis knows the size at run time."""
        if i.op == "select" and i.args[0].op == "lt":
            _, moved, same = i.args
            size = view.shape[axis]
            zero, extent = (self._graph.constant(n, "int32") for n in (0, size))
            if i.args[0].args == (same, zero) and moved is self._graph.integer("add", same, extent):
                return self._graph.node("wrap", (same,), "int32", (view.capture, axis))
        return i

    def _convert(self, x: _Node, dtype: str) -> _Node:
        graph = self._graph
        if x.dtype == dtype:
            return x
        if dtype == "float32":
            return graph.to_float(x)
        if dtype == "bool":
            return graph.compare("ne", x, graph.constant(0, x.dtype))
        if x.op == "constant" and x.dtype != "float32":
            return graph.constant(x.value, dtype)
        return graph.node("to_int" if dtype == "int32" else "to_uint", (x,), dtype)

    def _operation(self, eqn, name: str, dtype: str, args: list[_Node]) -> _Node | None:
        graph = self._graph
        if name in ("reshape", "broadcast_in_dim", "squeeze") or name in _PASSED_ON:
            return args[0]
        if name == "convert_element_type":
            return self._convert(args[0], dtype)
        if name == "select_n":
            if len(args) != 3 or args[0].dtype != "bool":
                return None
            return graph.select(args[0], args[2], args[1])
        if name in _COMPARE:
            return graph.compare(name, *args)
        if name == "clamp":
            low, x, high = args
            name, args = "min", [self._operation(eqn, "max", dtype, [low, x]) or x, high]
        if name == "is_finite":
            infinity = graph.constant(math.inf)
            return graph.compare("lt", graph.absolute(args[0]), infinity)
        if args[0].dtype == "bool":
            return self._of_bools(name, args)
        if dtype in _INTEGERS:
            return self._of_integers(name, dtype, args)
        if dtype == "float32":
            return self._of_floats(eqn, name, args)
        return None

    def _of_bools(self, name: str, args: list[_Node]) -> _Node | None:
        graph = self._graph
        if name == "not":
            return graph.negation(args[0])
        name = {"max": "or", "min": "and", "add": "or", "mul": "and"}.get(name, name)
        return graph.logical(name, *args) if name in ("and", "or", "xor") else None

    def _of_integers(self, name: str, dtype: str, args: list[_Node]) -> _Node | None:
        graph = self._graph
        if name == "square":
            return graph.integer("mul", args[0], args[0])
        if name == "sign":
            if dtype == "uint32":
                return None
            positive, negative = (
                graph.compare(op, args[0], graph.constant(0, dtype)) for op in ("gt", "lt")
            )
            one, zero, minus_one = (graph.constant(n, dtype) for n in (1, 0, -1))
            return graph.select(positive, one, graph.select(negative, minus_one, zero))
        if name == "abs" and dtype == "uint32":
            return args[0]
        name = {"add_any": "add", "shift_right_arithmetic": "sra", "shift_left": "sll"}.get(
            name, name
        )
        name = {"shift_right_logical": "srl", "population_count": "popc"}.get(name, name)
        return graph.integer(name, *args) if name in _INTEGER_FORMATS else None

    def _of_floats(self, eqn, name: str, args: list[_Node]) -> _Node | None:
        graph = self._graph
        x, y = args[0], args[-1]
        constant = graph.constant
        if name in ("add", "add_any"):
            return graph.add(x, y)
        if name == "sub":
            return graph.add(x, graph.scaled(y, -1.0))
        if name == "neg":
            return graph.scaled(x, -1.0)
        if name == "mul":
            return graph.multiply(x, y)
        if name == "div":
            return graph.divide(x, y)
        if name == "square":
            return graph.multiply(x, x)
        if name == "one_minus_square":
            return graph.add(constant(1.0), graph.scaled(graph.multiply(x, x), -1.0))
        if name == "integer_pow":
            return graph.power(x, eqn.params["y"])
        if name in ("max", "min"):
            return graph.extremum(name, x, y)
        if name == "abs":
            return graph.absolute(x)
        if name == "sign":
            positive, negative = (graph.compare(op, x, constant(0.0)) for op in ("gt", "lt"))
            # Zero and NaN are their own signs.
            negated = graph.select(negative, constant(-1.0), x)
            return graph.select(positive, constant(1.0), negated)
        if name == "exp":
            return graph.atom("exp2", graph.scaled(x, _LOG2_E))
        if name == "log":
            return graph.scaled(graph.atom("log2", x), _LN_2)
        if name == "logistic":
            e = graph.atom("exp2", graph.scaled(x, -_LOG2_E))
            return graph.divide(constant(1.0), graph.add(constant(1.0), e))
        if name in ("sin", "cos"):
            return graph.atom(name, self._within_a_turn(x))
        if name == "rem":
            return graph.atom("fmod", x, y)
        if name == "round":
            to_even = int(eqn.params["rounding_method"]) == 1
            return graph.atom("round_even" if to_even else "round", x)
        if name in _SAME:
            return graph.atom(name, *args)
        return None

    def _within_a_turn(self, x: _Node) -> _Node:
        """`x` less a multiple of 2 pi: the fast sine and cosine are accurate from -pi to pi."""
        graph = self._graph
        turns = graph.atom("round_even", graph.scaled(x, 1.0 / (2.0 * math.pi)))
        # 2 pi in two parts, so that the product with the first is exact.
        high = 6.28125
        for part in (high, 2.0 * math.pi - high):
            x = graph.atom("fma", turns, graph.constant(-part), x)
        return x


def _is_variable(atoms) -> bool:
    return bool(atoms) and not is_literal(atoms[0])


def _refuse(eqn, why: str) -> NoReturn:
    text = " ".join(str(eqn).split())
    text = text if len(text) <= 200 else text[:200] + " ..."
    raise NotPrintable(f"`{eqn.primitive.name}` {why}, in: {text}")


# ---- From the graph to text ---------------------------------------------------------------------

_FLOAT_FORMATS = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "times": "{0} * {1}",
    "neg": "-{0}",
    "fma": "fmaf({0}, {1}, {2})",
    "divide": "__fdividef({0}, {1})",
    "abs": "fabsf({0})",
    "max": "max_nan({0}, {1})",
    "min": "min_nan({0}, {1})",
    "tanh": "tanh_approx({0})",
    "exp2": "exp2_approx({0})",
    "log2": "log2_approx({0})",
    "sin": "__sinf({0})",
    "cos": "__cosf({0})",
    "fmod": "fmodf({0}, {1})",
    "round": "roundf({0})",
    "round_even": "rintf({0})",
    "erf_inv": "erfinvf({0})",
    "to_float": "static_cast<float>({0})",
    **{name: f"{name}f({{0}})" for name in _WITH_SUFFIX},
    "atan2": "atan2f({0}, {1})",
    "pow": "powf({0}, {1})",
}

# Overflow and shifts beyond the width are undefined in C++, and division by 0 on a host.
_INTEGER_FORMATS = {
    "add": "static_cast<int>(static_cast<uint32_t>({0}) + static_cast<uint32_t>({1}))",
    "sub": "static_cast<int>(static_cast<uint32_t>({0}) - static_cast<uint32_t>({1}))",
    "mul": "static_cast<int>(static_cast<uint32_t>({0}) * static_cast<uint32_t>({1}))",
    "neg": "static_cast<int>(0u - static_cast<uint32_t>({0}))",
    "abs": "({0} < 0 ? static_cast<int>(0u - static_cast<uint32_t>({0})) : {0})",
    "div": "({1} == 0 ? -1 : {1} == -1 ? static_cast<int>(0u - static_cast<uint32_t>({0}))"
    " : {0} / {1})",
    "rem": "({1} == 0 ? {0} : {1} == -1 ? 0 : {0} % {1})",
    "max": "({0} > {1} ? {0} : {1})",
    "min": "({0} < {1} ? {0} : {1})",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
    "not": "~{0}",
    "sll": "(static_cast<uint32_t>({1}) < 32u"
    " ? static_cast<int>(static_cast<uint32_t>({0}) << {1}) : 0)",
    "sra": "{0} >> (static_cast<uint32_t>({1}) < 32u ? {1} : 31)",
    "srl": "(static_cast<uint32_t>({1}) < 32u"
    " ? static_cast<int>(static_cast<uint32_t>({0}) >> {1}) : 0)",
    "popc": "__popc({0})",
    "clz": "__clz({0})",
}
_UNSIGNED_FORMATS = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "neg": "0u - {0}",
    "div": "({1} == 0u ? 0xffffffffu : {0} / {1})",
    "rem": "({1} == 0u ? {0} : {0} % {1})",
    "sll": "({1} < 32u ? {0} << {1} : 0u)",
    "sra": "static_cast<uint32_t>(static_cast<int>({0}) >> ({1} < 32u ? {1} : 31u))",
    "srl": "({1} < 32u ? {0} >> {1} : 0u)",
    "clz": "static_cast<uint32_t>(__clz(static_cast<int>({0})))",
    "popc": "static_cast<uint32_t>(__popc({0}))",
}
_BOOL_FORMATS = {
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "and": "{0} && {1}",
    "or": "{0} || {1}",
    "xor": "{0} != {1}",
    "not": "!{0}",
}
_ADDRESS_FORMATS = {
    "shift": "{0} + {1}",
    "scale_offset": "{0} * {1}",
    "add_offset": "{0} + {1}",
    "widen": "static_cast<int64_t>({0})",
    "clamp_index": "clamp_index({0}, {1})",
    "clamp_column": "static_cast<int>(clamp_index({0}, {1}))",
    "load_capture": "load_capture({0}, {1})",
}

# Where a node is computed, from early to late, and which of its inputs are parameters there.
_PLACES = ("head", "row", "column", "element")
_PARAMETERS = {
    "head": {"b": "b", "h": "h", "scale": "problem.scale"},
    "row": {"q": "q"},
    "column": {"kv": "kv"},
    "element": {"q": "q", "kv": "kv", "distance": "distance", "score": "s"},
}

_SIGNATURES = {
    "head": "Head head(const Captures& captures, const Problem& problem, int64_t batch, int b,"
    " int h)",
    "row": "Row row(const Head& head, int q)",
    "column": "Column column(const Head& head, int kv)",
    "logit": "float logit(const Head& head, const Row& row, const Column& column, int q, int kv,"
    " float distance, float s)",
    "addend": "float addend(const Head& head, const Row& row, const Column& column, int q, int kv,"
    " float distance)",
    "logit_and_slope": "float logit_and_slope(const Head& head, const Row& row,"
    " const Column& column, int q, int kv, float distance, float s, float* slope)",
    "sink": "float sink(const Head& head)",
    "dropout": "Dropout dropout(const Captures& captures, const Problem& problem, int64_t batch,"
    " int b, int h)",
}


def _place(x: _Node) -> str:
    return {0: "head", _ROW: "row", _COLUMN: "column"}.get(x.deps, "element")


@dataclasses.dataclass(frozen=True)
class _Roots:
    """What the struct computes; the addend with a slope of 1 alone, the sink where there is one."""

    logit: _Node
    slope: _Node
    addend: _Node | None
    sink: _Node | None


class _Writer:
    """Chooses instructions for the nodes and writes them where they belong."""

    def __init__(self, graph: _Graph, roots: _Roots):
        self._graph = graph
        self._instructions: dict[_Node, _Node] = {}
        self._names: dict[_Node, str] = {}
        self._adds = roots.addend is not graph.constant(0.0)
        self._guards_slope = not _finite(roots.slope)
        self._logit, self._slope = self._lowered(roots.logit), self._lowered(roots.slope)
        self._addend = None if roots.addend is None else self._lowered(roots.addend)
        self._sink = None if roots.sink is None else self._lowered(roots.sink)
        self._members: dict[str, list[_Node]] = {place: [] for place in _PLACES}
        seen: set[_Node] = set()
        for root in (self._logit, self._slope, self._addend, self._sink):
            if root is not None:
                self._need(root, "end" if root is self._sink else "element")
                self._visit(root, seen)

    def struct(self, dropout: int | None) -> str:
        """The text; `dropout` is the capture that says what is dropped."""
        members, sink = self._members, self._sink
        lines = ["namespace jaxflash {", "struct Program {"]
        for name, value in (
            ("kUnitSlope", self._addend is not None),
            ("kAdds", self._adds),
            ("kHasSink", sink is not None),
            ("kDrops", dropout is not None),
        ):
            lines.append(f"  static constexpr bool {name} = {'true' if value else 'false'};")
        for place in _PLACES[:3]:
            fields = [f"    {self._field(x)};" for x in members[place]]
            lines += [f"  struct {place.capitalize()} {{", *fields, "  };"]
        for place in _PLACES[:3]:
            results = ", ".join(self._text(x, place) for x in members[place])
            lines += self._function(place, place, members[place], f"{{{results}}}")
        logit = self._text(self._logit, "element")
        lines += self._function("logit", "element", [self._logit], logit)
        if self._addend is not None:
            addend = self._text(self._addend, "element")
            lines += self._function("addend", "element", [self._addend], addend)
            lines += self._function(
                "logit_and_slope",
                "element",
                [],
                "logit(head, row, column, q, kv, distance, s)",
                "*slope = 1.0f;",
            )
        else:
            slope = self._text(self._slope, "element")
            if self._guards_slope:
                # Where the logit is -inf, the slope may be infinite or NaN; its weight is 0.
                slope = f"{logit} == -INFINITY ? 0.0f : {slope}"
            lines += self._function(
                "logit_and_slope",
                "element",
                [self._logit, self._slope],
                logit,
                f"*slope = {slope};",
            )
        if sink is not None:
            lines += self._function("sink", "end", [], self._text(sink, "end"))
        if dropout is not None:
            parameters = f"capture_data<uint32_t>(captures, {dropout}, problem, batch)"
            lines += self._function("dropout", "end", [], f"Dropout({parameters}, b, h)")
        return "\n".join([*lines, "};", "}  // namespace jaxflash", ""])

    def _function(self, name: str, place: str, roots, result: str, *last: str) -> list[str]:
        signature = f"  __device__ __forceinline__ static {_SIGNATURES[name]} {{"
        body: list[str] = []
        done: set[_Node] = set()
        for root in roots:
            self._define(root, place, done, body)
        return [signature, *(f"    {x}" for x in (*body, *last, f"return {result};")), "  }"]

    # ---- Text -------------------------------------------------------------------------------

    def _visit(self, x: _Node, seen: set[_Node]) -> None:
        """Names the nodes below one, and finds the members of the structs."""
        if x in seen:
            return
        seen.add(x)
        for a in x.args:
            self._need(a, _place(x))
            self._visit(a, seen)
        if x.op not in ("constant", "input"):
            self._names[x] = f"x{len(self._names)}"

    def _need(self, x: _Node, place: str) -> None:
        home = _place(x)
        if x.op == "constant" or home == place or home == "element":
            return
        if x.op == "input" and x.value in _PARAMETERS.get(place, ()):
            return
        if x not in self._members[home]:
            self._members[home].append(x)

    def _field(self, x: _Node) -> str:
        kind = "int" if x.dtype == "bool" else _COMPUTED.get(x.dtype, x.dtype)
        return f"{kind} {self._name(x)}"

    def _name(self, x: _Node) -> str:
        return x.value if x.op == "input" else self._names[x]

    def _text(self, x: _Node, place: str) -> str:
        if x.op == "constant":
            return _literal(x)
        if x.op == "input" and x.value in _PARAMETERS.get(place, ()):
            return _PARAMETERS[place][x.value]
        home = _place(x)
        if home == place:
            return self._names[x]
        member = f"{home}.{self._name(x)}"
        return f"({member} != 0)" if x.dtype == "bool" else member

    def _define(self, x: _Node, place: str, done: set[_Node], lines: list[str]) -> None:
        if x in done or x.op in ("constant", "input") or _place(x) != place:
            return
        done.add(x)
        for a in x.args:
            self._define(a, place, done, lines)
        kind = _COMPUTED.get(x.dtype, x.dtype)
        args = [self._text(a, place) for a in x.args]
        kind = kind if kind.endswith("*") else f"const {kind}"
        lines.append(f"{kind} {self._names[x]} = {self._expression(x, args)};")

    @staticmethod
    def _expression(x: _Node, args: list[str]) -> str:
        op = x.op
        if op == "select":
            return f"{args[0]} ? {args[1]} : {args[2]}"
        if op == "wrap":
            return f"{args[0]} < 0 ? {args[0]} + {args[1]} : {args[0]}"
        if op == "capture_data":
            capture, stored = x.value
            return f"capture_data<{stored}>(captures, {capture}, problem, batch)"
        if op == "extent":
            return f"capture_extent(captures, {x.value[0]}, {x.value[1]})"
        if op in ("to_int", "to_uint"):
            signed = op == "to_int"
            if x.args[0].dtype == "float32":
                return f"__float2{'int' if signed else 'uint'}_rz({args[0]})"
            return f"static_cast<{'int' if signed else 'uint32_t'}>({args[0]})"
        if op == "reciprocal":
            return f"rcp_approx({args[0]})" if _place(x) == "element" else f"1.0f / {args[0]}"
        if op in _ADDRESS_FORMATS:
            return _ADDRESS_FORMATS[op].format(*args)
        if x.dtype == "float32":
            return _FLOAT_FORMATS[op].format(*args)
        if x.dtype == "bool":
            return _BOOL_FORMATS[op].format(*args)
        if x.dtype == "uint32" and op in _UNSIGNED_FORMATS:
            return _UNSIGNED_FORMATS[op].format(*args)
        if op in ("div", "rem") and x.args[1].op == "constant" and x.args[1].value not in (0, -1):
            return f"{args[0]} {'/' if op == 'div' else '%'} {args[1]}"
        if op in ("add", "sub") and not _wraps(x):
            return f"{args[0]} {'+' if op == 'add' else '-'} {args[1]}"
        return _INTEGER_FORMATS[op].format(*args)

    # ---- Instructions -----------------------------------------------------------------------

    def _lowered(self, x: _Node) -> _Node:
        """The same value in nodes of one instruction each."""
        if x.op in ("constant", "input"):
            return x
        if x not in self._instructions:
            if x.op == "sum":
                result = self._lowered_sum(x)
            elif x.op == "product":
                result = self._plus_term(None, 1.0, x)
            elif x.op == "load":
                result = self._lowered_load(x)
            elif x.op == "wrap":
                result = self._graph.node(
                    "wrap", (self._lowered(x.args[0]), self._extent(*x.value)), "int32"
                )
            else:
                args = tuple(map(self._lowered, x.args))
                result = self._graph.node(x.op, args, x.dtype, x.value)
            self._instructions[x] = result
        return self._instructions[x]

    def _lowered_sum(self, x: _Node) -> _Node:
        constant, coefficients = x.value
        groups: dict[str, list[tuple[float, _Node]]] = {}
        for coefficient, term in zip(coefficients, x.args, strict=True):
            place = "score" if term.deps & _SCORE else _place(term)
            groups.setdefault(place, []).append((coefficient, term))
        total = None if constant == 0.0 else self._graph.constant(constant)
        for place in (*_PLACES, "score"):
            part = None
            if place == "column" and total is not None and _place(total) == "row":
                # Summed by itself, so that an element adds once.
                part, total = total, None
            for coefficient, term in groups.get(place, ()):
                total = self._plus_term(total, coefficient, term)
            if part is not None:
                total = part if total is None else self._graph.atom("add", part, total)
        assert total is not None
        return total

    def _plus_term(self, total: _Node | None, coefficient: float, term: _Node) -> _Node:
        """total + coefficient * term; the factors known earlier are multiplied first."""
        atom = self._graph.atom
        groups: dict[str, list[_Node]] = {}
        for factor in term.args if term.op == "product" else (term,):
            place = "score" if factor.deps & _SCORE else _place(factor)
            groups.setdefault(place, []).append(self._lowered(factor))
        early = None if coefficient == 1.0 else self._graph.constant(coefficient)
        *before, last = (groups[place] for place in (*_PLACES, "score") if place in groups)
        for factor in (factor for group in before for factor in group):
            early = self._scaled_by(early, factor)
        if total is None:
            for factor in last:
                early = self._scaled_by(early, factor)
            assert early is not None
            return early
        x, *rest = last
        for factor in rest[1:]:
            x = atom("times", x, factor)
        if rest:
            return atom("fma", self._scaled_by(early, x), rest[0], total)
        if early is None:
            return atom("add", total, x)
        if early is self._graph.constant(-1.0):
            return atom("sub", total, x)
        return atom("fma", early, x, total)

    def _scaled_by(self, factor: _Node | None, x: _Node) -> _Node:
        if factor is None:
            return x
        if factor is self._graph.constant(-1.0):
            return self._graph.atom("neg", x)
        return self._graph.atom("times", factor, x)

    def _extent(self, capture: int, axis: int) -> _Node:
        return self._graph.node("extent", (), "int32", (capture, axis))

    def _lowered_load(self, x: _Node) -> _Node:
        """What the head knows of the address is added there, then what the row knows."""
        node = self._graph.node
        capture, dtype = x.value
        stored = _STORED[dtype]
        pointer = f"const {stored}*"
        address = node("capture_data", (), pointer, (capture, stored))
        offsets: dict[str, _Node] = {}
        stride = None
        for axis in reversed(range(len(x.args))):
            i, extent = self._lowered(x.args[axis]), self._extent(capture, axis)
            if not (i.op == "constant" and i.value == 0):
                place = _place(i)
                if stride is None and place == "column":
                    offset = node("clamp_column", (i, extent), "int32")
                else:
                    offset = node("clamp_index", (i, extent), "int64_t")
                if stride is not None:
                    offset = node("scale_offset", (offset, stride), "int64_t")
                if place in offsets:
                    offset = node("add_offset", (offsets[place], offset), "int64_t")
                offsets[place] = offset
            wide = node("widen", (extent,), "int64_t")
            stride = wide if stride is None else node("scale_offset", (stride, wide), "int64_t")
        early = [offsets[place] for place in ("head", "row") if place in offsets]
        late = [offsets[place] for place in ("column", "element") if place in offsets]
        if not late:
            late = [early.pop() if early else self._graph.constant(0, "int32")]
        for offset in early:
            address = node("shift", (address, offset), pointer)
        index = late[0]
        for offset in late[1:]:
            index = node("add_offset", (index, offset), "int64_t")
        return node("load_capture", (address, index), x.dtype)


def _literal(x: _Node) -> str:
    if x.dtype == "bool":
        return "true" if x.value else "false"
    if x.dtype == "uint32":
        return f"{x.value}u"
    if x.dtype != "float32":
        # There is no negative literal, and 2147483648 is no int.
        return "(-2147483647 - 1)" if x.value == -(2**31) else str(x.value)
    if math.isnan(x.value):
        return "__int_as_float(0x7fffffff)"
    if math.isinf(x.value) or abs(x.value) > _FLOAT_MAX:
        return "INFINITY" if x.value > 0 else "-INFINITY"
    return f"{np.float32(x.value)!s}f"
