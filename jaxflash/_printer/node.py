"""Nodes of the graph of scalar expressions, and what is known of one by itself."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxflash._printer import MAX_LENGTH

# What a node depends on, beyond batch element and head.
ROW, COLUMN, DISTANCE, SCORE = 1, 2, 4, 8
ELEMENT = ROW | COLUMN | DISTANCE

FLOAT_MAX = float(np.finfo(np.float32).max)
FLOATS = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """A scalar expression; equal expressions are one node.

    Floats are constants, atoms (any operation but the next two), `product` of two or more atoms, or
    `sum`, whose value is (constant, coefficients) for its arguments, which are atoms, products and
    sums that stay as they are.
    """

    op: str
    args: tuple[Node, ...]
    dtype: str
    deps: int
    value: Any
    number: int
    depth: int  # the most operations one within the other
    facts: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)  # see `_fact`


def _fact(function: Callable[[Node], Any]) -> Callable[[Node], Any]:
    """A function of a node, computed once for each: as many paths lead to what several expressions
    share as it has uses, multiplied."""

    @functools.wraps(function)
    def once(x: Node):
        if function.__name__ not in x.facts:
            x.facts[function.__name__] = function(x)
        return x.facts[function.__name__]

    return once


def is_hoistable(x: Node) -> bool:
    """Whether a head, a row or a column knows it."""
    return x.deps in (0, ROW, COLUMN)


_INT32_RANGE = (-(2**31), 2**31 - 1)
# A ragged tile reaches a little beyond the longest sequence.
_LARGEST_INPUT = MAX_LENGTH + 2**16
_RANGED = ("add", "sub", "mul", "neg", "abs", "min", "max", "select", "div", "rem", "and", "sra")


@_fact
def _range(x: Node) -> tuple[int, int]:
    """Bounds of an int32."""
    if x.op == "constant":
        return x.value, x.value
    if x.op == "input":
        return (-_LARGEST_INPUT if x.value == "distance" else 0), _LARGEST_INPUT
    if x.op == "to_int" and x.args[0].dtype == "bool":
        return 0, 1
    if x.op == "to_int" and x.args[0].op == "srl":
        bits = max(32 - _range(x.args[0].args[1])[0], 0)
        return (0, 2**bits - 1) if bits < 32 else _INT32_RANGE
    if x.op == "extent":
        return 0, 2**31 - 1
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
        result = 0, high // other_low if x.op == "div" else min(high, other_high - 1)
    elif x.op == "and" and other_low >= 0:
        result = 0, other_high
    elif x.op == "sra" and 0 <= other_low == other_high < 32:
        result = low >> other_low, high >> other_low
    else:
        result = _INT32_RANGE
    inside = _INT32_RANGE[0] <= result[0] and result[1] <= _INT32_RANGE[1]
    return result if inside else _INT32_RANGE


def is_nonnegative(x: Node) -> bool:
    """Of an int32."""
    return _range(x)[0] >= 0


def _is_zero(x: Node) -> bool:
    return x.op == "constant" and x.value == 0


def chooses_constants(x: Node, of: int = 3) -> bool:
    """Whether it is one of so many constants at most."""
    if x.op == "constant":
        return True
    if x.op != "select" or of < 2:
        return False
    yes, no = x.args[1:]
    return any(
        a.op == "constant" and chooses_constants(b, of - 1) for a, b in ((yes, no), (no, yes))
    )


def rounds_down(condition: Node, yes: Node, no: Node) -> bool:
    """Whether a choice is `%` or `//` of `jax.numpy` by a power of two: XLA rounds to zero."""
    if no.op not in ("rem", "div") or no.dtype != "int32" or no.args[1].op != "constant":
        return False
    divisor = no.args[1]
    correction = divisor.value if no.op == "rem" else -1
    is_power = divisor.value > 1 and divisor.value & (divisor.value - 1) == 0
    if not is_power or condition.op != "and" or yes.op != "add" or yes.args[0] is not no:
        return False
    if yes.args[1].op != "constant" or yes.args[1].value != correction:
        return False
    return any(
        _is_inexact(inexact, no) and _is_negative(negative, no)
        for negative, inexact in (condition.args, condition.args[::-1])
    )


def _is_inexact(x: Node, division: Node) -> bool:
    """Whether it says that a division leaves a rest."""
    if x.op != "ne" or not _is_zero(x.args[1]):
        return False
    rest = x.args[0]
    return rest.op == "rem" and rest.args == division.args


def _is_negative(x: Node, division: Node) -> bool:
    """Whether it says, of a division that leaves a rest, that its number is negative."""
    if division.op == "rem":
        return x.op == "lt" and x.args[0] is division and _is_zero(x.args[1])
    if x.op != "not" or x.args[0].op != "gt":
        return False
    number, zero = x.args[0].args
    return number is division.args[0] and _is_zero(zero)


def is_low_bits_of_difference(x: Node) -> bool:
    """Whether it is the lowest bits of a difference, 0 where both numbers have the same ones."""
    difference, mask = x.args
    return (
        difference.op == "sub"
        and difference.dtype == "int32"
        and mask.op == "constant"
        and mask.value & (mask.value + 1) == 0
        and mask.value > 0
    )


def excludes(x: Node, y: Node) -> bool:
    """Whether a number of 0 or more is not positive by `x`, and has a rest by `y`: where floor
    division of positions rounds down."""
    if x.op != "not" or x.args[0].op != "gt" or y.op != "ne" or y.args[0].op != "rem":
        return False
    (number, bound), (divided, _), rest = x.args[0].args, y.args[0].args, y.args[1]
    zeros = all(a.op == "constant" and a.value == 0 for a in (bound, rest))
    return zeros and number is divided and number.dtype == "int32" and is_nonnegative(number)


def wraps(x: Node) -> bool:
    """Whether a sum or difference may leave int32."""
    return x.dtype != "int32" or _range(x) == _INT32_RANGE


@_fact
def fits_float(x: Node) -> bool:
    """Whether float32 has an int32 without rounding it, in calls in which it has positions."""
    low, high = _range(x)
    if x.op == "input" or max(-low, high) <= 2**24:
        return True
    if x.op in ("div", "sra"):
        # They are nearer to 0, or -1.
        return fits_float(x.args[0])
    if x.op == "select":
        return all(map(fits_float, x.args[1:]))
    return x.op in ("neg", "abs", "min", "max", "rem") and all(map(fits_float, x.args))


def below(x: Node) -> set[Node]:
    """A node and those that it is made of."""
    found, left = {x}, [x]
    while left:
        new = set(left.pop().args) - found
        found |= new
        left += new
    return found


# A constant, and the coefficients of terms.
Terms = tuple[float, dict[Node, float]]


def linear(x: Node) -> Terms:
    """The constant and the coefficients of the terms of a float."""
    if x.op == "constant":
        return x.value, {}
    if x.op == "sum":
        return x.value[0], dict(zip(x.args, x.value[1], strict=True))
    return 0.0, {x: 1.0}


def multiple_of(x: Node, y: Node) -> float | None:
    """The factor that makes a float of another one, if they are sums of the same terms."""
    (constant, terms), (other_constant, others) = linear(x), linear(y)
    if terms.keys() == {y}:  # a sum that is one term of its multiples
        other_constant, others = 0.0, {y: 1.0}
    # What cancels stays with a coefficient of 0 where it may be infinite.
    if terms.keys() != others.keys() or 0.0 in others.values():
        return None
    factors = {terms[x] / others[x] for x in terms}
    is_multiple = len(factors) == 1 and constant == other_constant * min(factors)
    return factors.pop() if is_multiple else None


@_fact
def may_cancel(x: Node) -> bool:
    """Whether the terms of a sum may be larger than it is, as in `1 - mask` times -1e9 or between
    times: it is computed as it is, before others are added or it is scaled. Not so sums with the
    score, which is rounded itself, unless they jump or meet themselves."""
    if x.op != "sum" or not _jumps(x):
        return _meets_itself(x)
    constant, terms = linear(x)
    if all(map(_is_number, terms)):
        places = {(c > 0.0, term.deps) for term, c in terms.items()}
        return ((True, ROW) in places and (False, COLUMN) in places) or (
            (False, ROW) in places and (True, COLUMN) in places
        )
    # Choices have taken the signs of their coefficients.
    return constant != 0.0 or is_difference(x)


@_fact
def is_difference(x: Node) -> bool:
    """Whether a sum may cancel without its constant, which others may not join then: by its
    coefficients, as nothing says what sign a load has. Numbers of queries and keys are exact
    together with a constant."""
    if x.op != "sum" or not _jumps(x):
        return _meets_itself(x)
    signs = {coefficient > 0.0 for coefficient in x.value[1]}
    return len(signs) > 1 and not all(map(_is_number, x.args))


def as_terms(x: Node, beside: Node) -> Terms:
    """Of a float as another one is added to it."""
    within = x.op == "sum" and _bit(x) & _applied_to(beside)
    return (0.0, {x: 1.0}) if within or may_cancel(x) else linear(x)


@_fact
def _meets_itself(x: Node) -> bool:
    """Whether what a sum adds is also within other terms of it, as in `x - max(x, 0)`: that is 0
    however `x` is rounded, if it is the same in both."""
    if x.op != "sum" or len(x.args) < 2:
        return False
    within = [_applied_to(term) for term in x.args]
    once = twice = 0
    for nodes in within:
        once, twice = once | nodes, twice | once & nodes
    return any(
        _parts(term) & (twice | once & ~own) for term, own in zip(x.args, within, strict=True)
    )


# Sets of nodes that depend on the score, as bits by number: programs have hundreds of terms.


def _bit(x: Node) -> int:
    return 1 << x.number if x.deps & SCORE else 0


@_fact
def _made_of(x: Node) -> int:
    """What is below a node, and itself."""
    return functools.reduce(operator.or_, map(_made_of, x.args), _bit(x)) if x.deps & SCORE else 0


def _summands(x: Node) -> tuple[Node, ...]:
    """Of a float that is a sum or a choice."""
    return x.args if x.op == "sum" else x.args[1:] if x.op == "select" else ()


@_fact
def _parts(x: Node) -> int:
    """What a float is a sum or a choice of, in any order, and itself."""
    return functools.reduce(operator.or_, map(_parts, _summands(x)), _bit(x))


@_fact
def _applied_to(x: Node) -> int:
    """What the functions are applied to that are parts of a float. Not those of bounded ones, as
    tanh: they cancel nothing that is large."""
    found = 0
    if summands := _summands(x):
        parts = map(_applied_to, summands)
    elif is_bounded(x):
        return 0
    else:
        functions = x.args if x.op == "product" else (x,)
        parts = (_made_of(a) for f in functions if not _summands(f) for a in f.args)
    for part in parts:
        found |= part
    return found


@_fact
def _jumps(x: Node) -> bool:
    """Whether a float knows the score by comparisons and whole numbers alone, if at all: it is as
    exact as one without the score, as `1 - (score > threshold)` is."""
    if not x.deps & SCORE or x.op in ("round", "round_even", "floor", "ceil", "to_float"):
        return True
    if x.op == "select":
        return _is_sign(x) or all(map(_jumps, x.args[1:]))
    keeps = x.op in ("sum", "product", "times", "min", "max", "abs", "sqrt")
    return keeps and all(map(_jumps, x.args))


def _is_sign(x: Node) -> bool:
    """Whether a choice is one of two constants, or a multiple of a number that is 0 or NaN."""
    condition, yes, no = x.args
    if no.op != "select" or {yes.op, no.args[1].op} != {"constant"}:
        return False
    (other, _, last), zeros = no.args, (condition.args[-1], no.args[0].args[-1])
    same = condition.args[0] is other.args[0] and multiple_of(other.args[0], last) is not None
    return same and all(zero.op == "constant" and zero.value == 0.0 for zero in zeros)


def _is_number(x: Node) -> bool:
    """Whether it is the number of a query, a key, a head or a batch element, or a distance."""
    number = x.args[0] if x.op == "to_float" else x
    return number.op == "input" and number.value in ("b", "h", "q", "kv", "distance")


def polynomial(x: Node) -> tuple[Node, dict[int, float]] | None:
    """(tanh, coefficients by power) of a polynomial of one tanh."""
    constant, terms = linear(x)
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


@_fact
def absorbs(x: Node) -> bool:
    """Whether a factor costs nothing: there is one already, or it is applied before the score."""
    if not x.deps & SCORE:
        return True
    if x.op == "product":
        return not all(factor.deps & SCORE for factor in x.args)
    if x.op == "sum":
        return all(
            coefficient != 1.0 or absorbs(term)
            for coefficient, term in zip(x.value[1], x.args, strict=True)
        )
    if x.op in ("select", "min", "max"):
        return all(map(absorbs, x.args[-2:]))
    return False


@_fact
def is_finite(x: Node) -> bool:
    """Whether a float is finite whatever the score and the captures are, unless one is NaN."""
    if x.op == "constant":
        return math.isfinite(x.value)
    if x.op in ("tanh", "to_float", "input"):
        return x.value != "score"
    if x.op in ("sin", "cos"):
        return is_finite(x.args[0])
    if x.op == "sum":
        constant, coefficients = x.value
        return all(map(is_finite, x.args)) and all(map(math.isfinite, (constant, *coefficients)))
    if x.op in ("product", "times", "abs", "min", "max"):
        return all(map(is_finite, x.args))
    if x.op == "select":
        return all(map(is_finite, x.args[1:]))
    return False


@_fact
def bounds(x: Node) -> tuple[float, float]:
    """What a float lies between unless it is NaN, whatever the score and the captures are."""
    if x.op == "constant":
        return x.value, x.value
    if x.op in ("tanh", "sin", "cos", "erf"):
        return -1.0, 1.0
    if x.op in ("exp2", "sqrt", "rsqrt"):
        return 0.0, math.inf
    of_args = [bounds(arg) for arg in x.args] if x.op in _BOUNDED_BY_ARGS else []
    if x.op == "sum":
        constant, coefficients = x.value
        ends = [
            sorted(_times(coefficient, end) for end in of_arg)
            for coefficient, of_arg in zip(coefficients, of_args, strict=True)
        ]
        return constant + sum(least for least, _ in ends), constant + sum(most for _, most in ends)
    if x.op in ("product", "times"):
        least = most = 1.0
        for arg, power in collections.Counter(x.args).items():
            ends = [_times(a, b) for a in (least, most) for b in _to_the(power, bounds(arg))]
            least, most = min(ends), max(ends)
        return least, most
    if x.op == "abs":
        return max(0.0, of_args[0][0], -of_args[0][1]), max(map(abs, of_args[0]))
    if x.op == "reciprocal" and (of_args[0][0] > 0.0 or of_args[0][1] < 0.0):
        return 1.0 / of_args[0][1], 1.0 / of_args[0][0]
    if x.op in ("min", "max"):
        of = min if x.op == "min" else max
        return of(least for least, _ in of_args), of(most for _, most in of_args)
    if x.op == "select":
        return min(least for least, _ in of_args[1:]), max(most for _, most in of_args[1:])
    return -math.inf, math.inf


_BOUNDED_BY_ARGS = ("sum", "abs", "reciprocal", "min", "max", "select")


def is_bounded(x: Node) -> bool:
    return math.isfinite(max(map(abs, bounds(x))))


def _to_the(power: int, interval: tuple[float, float]) -> tuple[float, float]:
    if power % 2 == 0:  # of the absolute value
        least, most = interval
        interval = max(0.0, least, -most), max(map(abs, interval))
    least, most = (math.prod((end,) * power) for end in interval)
    return least, most


def _times(a: float, b: float) -> float:
    """Of ends of intervals, where infinity stands for what is large."""
    return 0.0 if 0.0 in (a, b) else a * b


@_fact
def depends_on_difference(x: Node) -> bool:
    """Whether a node depends on the numbers of row and column through their difference alone."""
    if not x.deps & ELEMENT:
        return True
    if x.op == "input":
        return x.value == "distance"
    if x.op == "sum":
        constant, terms = linear(x)
        numbers = {
            term.args[0].value: coefficient
            for term, coefficient in terms.items()
            if term.op == "to_float" and term.args[0].op == "input"
        }
        if numbers.keys() & {"q", "kv"}:
            # Nothing else, whose sum with one of them would be rounded.
            exact = numbers in ({"q": 1.0, "kv": -1.0}, {"q": -1.0, "kv": 1.0})
            return exact and len(terms) == 2 and constant.is_integer()
        return all(map(depends_on_difference, terms))
    if x.dtype == "int32":
        coefficients = affine(x)
        if coefficients is not None:
            return sum(coefficients) == 0
    return bool(x.args) and all(map(depends_on_difference, x.args))


def is_along_diagonals(x: Node) -> bool:
    """Whether an integer is q - kv or kv - q, plus what the head knows."""
    return not wraps(x) and affine(x) in ((1, -1), (-1, 1))


@_fact
def affine(x: Node) -> tuple[int, int] | None:
    """Coefficients of q and kv of an integer that is linear in them; None for another."""
    if not x.deps:
        return 0, 0
    if x.op == "input":
        return {"q": (1, 0), "kv": (0, 1), "distance": (1, -1)}.get(x.value)
    if x.op not in ("add", "sub", "neg"):
        return None
    q, kv = 0, 0
    for number, a in enumerate(x.args):
        part = affine(a)
        if part is None:
            return None
        sign = -1 if x.op == "neg" or (x.op == "sub" and number == 1) else 1
        q, kv = q + sign * part[0], kv + sign * part[1]
    return q, kv
