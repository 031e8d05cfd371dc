"""Scalar expressions as a graph in which equal ones are one node, simplified as it is made.

Sums and products of floats are kept as linear combinations of monomials, so that constant factors
end up in coefficients. Sums that may cancel are terms of others as they are (`is_difference`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxflash._printer.node import (
    COLUMN,
    DISTANCE,
    FLOAT_MAX,
    FLOATS,
    ROW,
    SCORE,
    Node,
    Terms,
    absorbs,
    affine,
    as_terms,
    bounds,
    chooses_constants,
    excludes,
    fits_float,
    is_along_diagonals,
    is_difference,
    is_finite,
    is_hoistable,
    is_low_bits_of_difference,
    is_nonnegative,
    linear,
    may_cancel,
    polynomial,
    rounds_down,
    wraps,
)

_LEAST_NORMAL = 2.0**-126
_NEGLIGIBLE = 2.0**-24  # of a score

# Of a monomial: products of more are instructions as they come, one within the other, so that a
# square of a square of ... is not multiplied out.
_MOST_FACTORS = 8


class Graph:
    """Makes nodes, simplified."""

    def __init__(self, distance_is_difference: bool):
        self._nodes: dict[Any, Node] = {}
        self._floats_by_parts: dict[Node, Node | None] = {}
        self._scaled: dict[tuple[Node, str], Node] = {}
        self._quotients: dict[Node, Callable[[], Node]] = {}  # see `rounded`
        self._distance_is_difference = distance_is_difference
        self.subtracts_positions = False

    # ---- Any dtype --------------------------------------------------------------------------

    def node(self, op: str, args: tuple[Node, ...], dtype: str, value: Any = None, deps=0):
        """The node as it is, without simplification."""
        # repr tells -0.0 from 0.0 and finds NaN again.
        key = (op, tuple(a.number for a in args), dtype, repr(value))
        if key not in self._nodes:
            for a in args:
                deps |= a.deps
            depth = 1 + max((a.depth for a in args), default=0)
            self._nodes[key] = Node(op, args, dtype, deps, value, len(self._nodes), depth)
        return self._nodes[key]

    def constant(self, value, dtype: str = "float32") -> Node:
        if dtype == "float32":
            # Rounded, as comparisons are made of it; finite values stay finite.
            value = float(value)
            if abs(value) <= FLOAT_MAX:
                value = float(np.float32(value))
        elif dtype == "bool":
            value = bool(value)
        else:
            value = int(np.array(int(value) & 0xFFFFFFFF, np.uint32).astype(dtype))
        return self.node("constant", (), dtype, value)

    def input(self, name: str, dtype: str, deps: int) -> Node:
        return self.node("input", (), dtype, name, deps)

    def load(self, capture: int, dtype: str, index: tuple[Node, ...]) -> Node:
        """An element of a capture, its indices clamped; narrow floats come as float32."""
        computed = "float32" if dtype in FLOATS else dtype
        return self.node("load", index, computed, (capture, dtype))

    def select(self, condition: Node, yes: Node, no: Node) -> Node:
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
        if rounds_down(condition, yes, no):
            number, divisor = no.args
            low_bits = divisor.value - 1
            if no.op == "rem":
                return self.integer("and", number, self.constant(low_bits, "int32"))
            return self.integer("sra", number, self.constant(low_bits.bit_length(), "int32"))
        return self.node("select", (condition, yes, no), yes.dtype)

    def compare(self, op: str, x: Node, y: Node) -> Node:
        if x.op == y.op == "constant":
            return self.constant(COMPARE[op](x.value, y.value), "bool")
        zero = y.op == "constant" and y.value == 0
        nonnegative = x.dtype == "uint32" or (x.dtype == "int32" and is_nonnegative(x))
        if zero and op in ("lt", "ge") and nonnegative:
            return self.constant(op == "ge", "bool")
        if x.op == "select" and y.op == "constant" and chooses_constants(x):
            condition, *branches = x.args
            return self.select(condition, *(self.compare(op, a, y) for a in branches))
        if zero and op in ("eq", "ne") and x.op == "and" and is_low_bits_of_difference(x):
            # One instruction for both, where a difference has to be there first.
            (a, b), mask = x.args[0].args, x.args[1]
            return self.compare(op, self.integer("and", self.integer("xor", a, b), mask), y)
        if x.dtype == "bool":
            different = self.logical("xor", x, y)
            if op in ("eq", "ne"):
                return different if op == "ne" else self.negation(different)
            less, more = (x, y) if op in ("lt", "le") else (y, x)
            return self.logical("and" if op in ("lt", "gt") else "or", self.negation(less), more)
        return self.node(op, (x, y), "bool")

    def logical(self, op: str, x: Node, y: Node) -> Node:
        for a, b in ((x, y), (y, x)):
            if a.op == "constant":
                if op == "and":
                    return b if a.value else a
                if op == "or":
                    return a if a.value else b
                return self.negation(b) if a.value else b
        if x is y:
            return x if op != "xor" else self.constant(False, "bool")
        if op == "and" and (excludes(x, y) or excludes(y, x)):
            return self.constant(False, "bool")
        return self.node(op, (x, y), "bool")

    def negation(self, x: Node) -> Node:
        if x.op == "constant":
            return self.constant(not x.value, "bool")
        return x.args[0] if x.op == "not" else self.node("not", (x,), "bool")

    # ---- Integers ---------------------------------------------------------------------------

    def integer(self, op: str, *args: Node) -> Node:
        """Wraps around, as in JAX."""
        dtype = args[0].dtype
        if all(a.op == "constant" for a in args) and op in _FOLD:
            return self.constant(_FOLD[op](*(a.value for a in args)), dtype)
        x, y = args[0], args[-1]
        if op == "sub" and y.op == "constant":
            return self.integer("add", x, self.constant(-y.value, dtype))
        if op == "sub" and x.op == y.op == "sub" and x.args[1] is y.args[1]:
            # Positions within a packed sequence: both are counted from where that begins.
            return self.integer("sub", x.args[0], y.args[0])
        if op in ("add", "mul") and x.op == "constant":
            x, y = y, x
        if y.op == "constant" and (op, y.value) in (("add", 0), ("mul", 1), ("div", 1)):
            return x
        if op == "add" and y.op == "constant" and x.op == "add" and x.args[1].op == "constant":
            return self.integer("add", x.args[0], self.integer("add", x.args[1], y))
        return self.node(op, (x, y) if len(args) == 2 else args, dtype)

    def integer_power(self, x: Node, exponent: int) -> Node:
        """By repeated squaring; JAX has negative exponents for floats alone."""
        result = self.constant(1, x.dtype)
        for bit in f"{exponent:b}":
            result = self.integer("mul", result, result)
            result = self.integer("mul", result, x) if bit == "1" else result
        return result

    def to_float(self, x: Node) -> Node:
        if x.op == "constant":
            return self.constant(x.value)
        if x.dtype == "bool":
            return self.select(x, self.constant(1.0), self.constant(0.0))
        pushed = None if is_hoistable(x) else self._to_float_by_parts(x)
        return self.node("to_float", (x,), "float32") if pushed is None else pushed

    def _to_float_by_parts(self, x: Node) -> Node | None:
        """Converted where the parts are known: conversions are slow, adding floats is not."""
        if x not in self._floats_by_parts:
            self._floats_by_parts[x] = self._sum_of_converted(x)
        return self._floats_by_parts[x]

    def _sum_of_converted(self, x: Node) -> Node | None:
        if wraps(x):
            return None
        if x.op == "input" and x.value == "distance":
            return self.input("distance", "float32", DISTANCE)
        if is_hoistable(x) and fits_float(x):
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

    def _with_distance(self, x: Node) -> Node:
        """`x` with float(q) - float(kv) replaced by the distance, where that is the same."""
        constant, terms = linear(x)
        q, kv = (
            self.node("to_float", (self.input(name, "int32", deps),), "float32")
            for name, deps in (("q", ROW), ("kv", COLUMN))
        )
        if not (q in terms and kv in terms and terms[q] == -terms[kv]):
            self.subtracts_positions = True
            return x
        if not self._distance_is_difference:
            self.subtracts_positions = True
            return x
        coefficient = terms.pop(q)
        del terms[kv]
        distance = self.input("distance", "float32", DISTANCE)
        return self._sum(constant, {**terms, distance: terms.get(distance, 0.0) + coefficient})

    # ---- Floats -----------------------------------------------------------------------------

    def atom(self, op: str, *args: Node) -> Node:
        return self.node(op, args, "float32")

    def add(self, x: Node, y: Node) -> Node:
        if x.op == "constant":
            x, y = y, x
        if y.op != "constant":
            return self._sum(*_added(as_terms(x, y), as_terms(y, x)))
        if x.op == "constant":
            return self.constant(x.value + y.value)
        if y.value == 0.0:
            return x
        result = self._sum(*_added((0.0, {x: 1.0}) if is_difference(x) else linear(x), linear(y)))
        self._pass_on(result, x, lambda x: self.add(x, y))
        return result

    def scaled(self, x: Node, factor: float) -> Node:
        if factor == 1.0:
            return x
        # Of choices among choices the factor goes into all branches, which they share.
        key = x, repr(factor)
        if key not in self._scaled:
            constant, terms = linear(x)
            # 0.7 * 5 - 3.5 is not 0 where 0.7 * (5 - 5) is.
            offset = constant != 0.0 and not x.deps & SCORE
            rounds = (offset or may_cancel(x)) and not _is_power_of_two(factor)
            if x.op == "sum" and (rounds or not math.isfinite(factor)):
                constant, terms = 0.0, {x: 1.0}
            self._scaled[key] = self._sum(
                _times(constant, factor) if constant or not terms else 0.0,
                {term: _times(coefficient, factor) for term, coefficient in terms.items()},
            )
            if _is_power_of_two(factor):
                self._pass_on(self._scaled[key], x, lambda x: self.scaled(x, factor))
        return self._scaled[key]

    def multiply(self, x: Node, y: Node) -> Node:
        result = self._product(x, y)
        if x is y:
            self._pass_on(result, x, lambda x: self.multiply(x, x))
        return result

    def _product(self, x: Node, y: Node) -> Node:
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
                and b.deps & SCORE
                and is_hoistable(a)
                and not may_cancel(b)
                and len(b.args) > 1 - (b.value[0] != 0.0)
            ):
                constant, terms = linear(b)
                result = self.scaled(a, constant) if constant else self.constant(0.0)
                for term, coefficient in terms.items():
                    result = self.add(result, self.scaled(self.multiply(a, term), coefficient))
                return result
        factor = 1.0
        factors: list[Node] = []
        for a in (x, y):
            constant, terms = linear(a)
            if len(terms) == 1 and constant == 0.0:
                ((a, coefficient),) = terms.items()
                factor = _times(factor, coefficient)
            factors += a.args if a.op == "product" else (a,)
        if len(factors) > _MOST_FACTORS:
            return self.atom("times", x, y)
        factors.sort(key=lambda n: n.number)
        return self.scaled(self.atom("product", *factors), factor)

    def _multiply_polynomials(self, x: Node, y: Node) -> Node | None:
        """Multiplied out where both are linear in one tanh and not the same, as in its derivative.
        Powers of `1 - tanh` would be rounded where they are near 0."""
        if x is y and x.op == "sum":
            return None
        of_x, of_y = polynomial(x), polynomial(y)
        if of_x is None or of_y is None or of_x[0] is not of_y[0]:
            return None
        atom, left = of_x
        if max(left) + max(of_y[1]) > 2:
            return None
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

    def _sum(self, constant: float, terms: dict[Node, float]) -> Node:
        if not terms:
            return self.constant(constant)
        for term, coefficient in terms.items():
            # A coefficient of a selection goes into its branches where it costs nothing.
            if coefficient in (0.0, 1.0) or term.op not in ("select", "min", "max"):
                continue
            a, b = term.args[-2:]
            if not (absorbs(a) and absorbs(b)) or (term.op != "select" and coefficient < 0.0):
                continue
            a, b = self.scaled(a, coefficient), self.scaled(b, coefficient)
            if term.op == "select":
                chosen = self.select(term.args[0], a, b)
            else:
                chosen = self.extremum(term.op, a, b)
            others = {t: c for t, c in terms.items() if t is not term}
            return self._sum(*_added((constant, others), linear(chosen)))
        if constant == 0.0 and len(terms) == 1:
            ((term, coefficient),) = terms.items()
            if coefficient == 1.0:
                return term
        ordered = sorted(terms, key=lambda n: n.number)
        value = (constant, tuple(terms[t] for t in ordered))
        return self.node("sum", tuple(ordered), "float32", value)

    def divide(self, x: Node, y: Node) -> Node:
        if y.op == "constant" and y.value != 0.0:
            result = self.scaled(x, 1.0 / y.value)
        elif y.deps & SCORE or y.op == "constant":
            return self._divide_by_score(x, y)
        else:
            result = self.multiply(x, self.atom("reciprocal", y))
        # Of a multiple of something the quotient may be that itself, which is not rounded.
        constant, terms = linear(x)
        is_multiple = y.op == "constant" and x.op == "sum" and constant == 0.0 and len(terms) == 1
        is_exact = y.op == "constant" and _is_power_of_two(y.value)
        if not (is_exact or is_multiple or x.deps & SCORE or result.op == "constant"):
            self._quotients.setdefault(result, lambda: self._rounded_quotient(x, y))
        return result

    def _divide_by_score(self, x: Node, y: Node) -> Node:
        """A quotient; with fewer instructions where the divisor is neither 0 nor subnormal."""
        least, most = bounds(y)
        if not (least >= _LEAST_NORMAL or most <= -_LEAST_NORMAL):
            return self.atom("divide", x, y)
        # A reciprocal that would be subnormal is 0.
        if x.op == "constant" and abs(x.value) * _LEAST_NORMAL < _NEGLIGIBLE:
            return self.scaled(self.atom("reciprocal", y), x.value)
        return self.atom("divide_by_normal", x, y)

    def rounded(self, x: Node) -> Node:
        """`x`; what is made of a quotient without the score, with that as JAX rounds it, ahead of
        what is done with it: it may be a whole number, or almost."""
        return self._quotients[x]() if x in self._quotients else x

    def _rounded_quotient(self, x: Node, y: Node) -> Node:
        if y.op == "constant":  # as XLA does
            return self.atom("rounded_times", x, self.constant(1.0 / y.value))
        return self.atom("quotient", x, y)

    def _pass_on(self, result: Node, x: Node, make: Callable[[Node], Node]) -> None:
        """Notes that `make` makes the result of `x`, and is to be given that rounded."""
        if x in self._quotients:
            # What is there stays: the negative of a negative would be made of itself.
            self._quotients.setdefault(result, lambda: make(self.rounded(x)))

    def absolute(self, x: Node) -> Node:
        result = x if x.op == "abs" else self.atom("abs", x)
        self._pass_on(result, x, self.absolute)
        return result

    def extremum(self, op: str, x: Node, y: Node) -> Node:
        result = x if x is y else self.atom(op, x, y)
        for a, other in ((x, y), (y, x)):
            self._pass_on(result, a, lambda a, other=other: self.atom(op, a, self.rounded(other)))
        return result

    def power(self, x: Node, exponent: int) -> Node:
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

    def _score(self) -> Node:
        """Scaled, as the caller's function gets it."""
        scale = self.input("scale", "float32", 0)
        return self.multiply(self.input("score", "float32", SCORE), scale)

    def without_score(self, x: Node, factor: float = 1.0) -> Node | None:
        """`x` less `factor` times the score, if the rest does not depend on the score."""
        if not x.deps & SCORE:
            return x if x is self.constant(-math.inf) else None
        if x.op == "select":
            condition, yes, no = x.args
            yes, no = self.without_score(yes, factor), self.without_score(no, factor)
            if condition.deps & SCORE or yes is None or no is None:
                return None
            return self.select(condition, yes, no)
        constant, terms = linear(x)
        score = self._score()
        # The slope does not tell: a derivative may be the caller's, or that of a part.
        if terms.pop(score, None) != factor or any(term.deps & SCORE for term in terms):
            return None
        return self._rest(constant, terms)

    def _rest(self, constant: float, terms: dict[Node, float]) -> Node:
        """What is left of a sum, of which each term stays one."""
        if constant == 0.0 and len(terms) == 1:
            ((term, coefficient),) = terms.items()
            if coefficient == 1.0 and term.op == "sum":
                return self.node("sum", (term,), "float32", (0.0, (1.0,)))
        return self._sum(constant, terms)

    def started(self, *roots: Node) -> tuple[Node, tuple[Node, ...]] | None:
        """(what is added to the scaled score, the roots in the place of the sum in the score's), if
        they know the score by such a sum alone."""
        score = self._score()
        added: Node | None = None
        found: dict[Node, Node | None] = {}

        def replaced(x: Node) -> Node | None:
            nonlocal added
            if not x.deps & SCORE:
                return x
            if x in found:
                return found[x]
            found[x] = None  # where the score is alone
            if x.op == "sum" and score in x.args:
                constant, terms = linear(x)
                factor = terms.pop(score)
                if factor and math.isfinite(factor) and not any(t.deps & SCORE for t in terms):
                    rest = {term: c / factor for term, c in terms.items()}
                    own = self._rest(constant / factor, rest)
                    added = own if added is None else added
                    found[x] = self._sum(0.0, {score: factor}) if own is added else None
            elif x is not score and x.op != "input":
                args = all_replaced(x.args)
                found[x] = None if args is None else self.node(x.op, args, x.dtype, x.value)
            return found[x]

        def all_replaced(nodes: tuple[Node, ...]) -> tuple[Node, ...] | None:
            results = tuple(y for x in nodes if (y := replaced(x)) is not None)
            return results if len(results) == len(nodes) else None

        results = all_replaced(roots)
        return None if added is None or results is None else (added, results)

    def shown(self, x: Node, logit: Node) -> Node:
        """`x` where a logit is not -inf because of a choice: elsewhere nobody asks for it."""
        if logit.op == "select":
            condition, yes, no = logit.args
            hidden = self.constant(-math.inf)
            if hidden in (yes, no):
                return self.given(x, condition, holds=no is hidden)
        return x

    def given(self, x: Node, condition: Node, holds: bool = True) -> Node:
        """`x` where a condition holds, or where it does not."""
        found: dict[Node, Node] = {}

        def given(x: Node) -> Node:
            if x not in found:
                found[x] = replaced(x)
            return found[x]

        def replaced(x: Node) -> Node:
            if x.op == "select" and x.args[0] is condition:
                return given(x.args[1 if holds else 2])
            if x.op == "sum":
                result = x.value[0], {}
                for coefficient, term in zip(x.value[1], x.args, strict=True):
                    other = given(term)
                    part = 0.0, {term: coefficient}
                    if other is not term:
                        part = as_terms(self.scaled(other, coefficient), x)
                    result = _added(result, part)
                return self._sum(*result)
            if x.op == "product":
                result = self.constant(1.0)
                for factor in x.args:
                    result = self.multiply(result, given(factor))
                return result
            return x

        return given(x)


COMPARE: dict[str, Callable] = {
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


def _added(x: Terms, y: Terms) -> Terms:
    terms = dict(x[1])
    for term, coefficient in y[1].items():
        terms[term] = terms.get(term, 0.0) + coefficient
        if terms[term] == 0.0 and is_finite(term):
            del terms[term]
    return x[0] + y[0], terms


def _is_power_of_two(x: float) -> bool:
    """Whether products and quotients by it are exact."""
    return math.frexp(x)[0] in (0.5, -0.5)


def _times(x: float, factor: float) -> float:
    """Finite values stay finite: -finfo.max times log2(e) still means a finite logit."""
    result = x * factor
    if math.isfinite(x) and math.isfinite(factor):
        return min(max(result, -FLOAT_MAX), FLOAT_MAX)
    return result


def along_diagonals(graph: Graph, x: Node) -> tuple[int, Node] | None:
    """(sign, offset) of an integer that is `sign` * (q - kv) plus what the head knows, and does not
    leave int32; None for another."""
    coefficients = affine(x)
    if not is_along_diagonals(x) or x.deps & DISTANCE or coefficients is None:
        return None
    return coefficients[0], _at_origin(graph, x)


def _at_origin(graph: Graph, x: Node) -> Node:
    """An affine integer where q and kv are 0."""
    if not x.deps:
        return x
    if x.op == "input":
        return graph.constant(0, "int32")
    return graph.integer(x.op, *(_at_origin(graph, a) for a in x.args))
