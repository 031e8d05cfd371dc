"""From the equations of a program to the graph."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from jaxflash._jaxpr import is_literal
from jaxflash._printer import CAPTURE_DTYPES, MAX_CAPTURE_RANK, MAX_DEPTH, NotPrintable
from jaxflash._printer.formats import COMPUTED, INTEGER_FORMATS, WITH_SUFFIX
from jaxflash._printer.graph import COMPARE, Graph
from jaxflash._printer.node import COLUMN, DISTANCE, FLOATS, ROW, SCORE, Node, wraps
from jaxflash._program import Program, Result, View

if TYPE_CHECKING:
    from jax.extend import core

LOG2_E = math.log2(math.e)
_LN_2 = math.log(2.0)
_INTEGERS = ("int32", "uint32")
# Of numbers that are steps, or steep at zero.
_STEEP = ("floor", "ceil", "round", "rem", "sqrt", "rsqrt", "cbrt", "log", "log2", "log1p", "pow")
# Each is one entry of `FLOAT_FORMATS`.
_SAME = ("exp2", "tanh", "erf_inv", "pow", "atan2", *WITH_SUFFIX)
_UNSET = ("empty", "empty2")
_PASSED_ON = ("stop_gradient", "copy", "copy_p", "pvary", "reshard", "optimization_barrier")


class Builder:
    """Turns the equations of a program into nodes."""

    def __init__(self, graph: Graph):
        self._graph = graph
        self._values: dict[core.Var, Node | View] = {}
        self._capture_dtypes: dict[int, str] = {}
        self._symbolic_sizes: dict[Any, Node] = {}  # of captures: known at run time
        self._too_wide: dict[core.Var, Any] = {}  # int64 that 32 bits may not hold, from where
        self._unset: set[core.Var] = set()  # what a branch leaves to others, in derivatives

    def build(self, program: Program) -> tuple[Node, Node]:
        """(logit, d logit / d score)."""
        self._check_captures(program)
        try:
            closed = program.value_and_slope()
        except (TypeError, ValueError, NotImplementedError) as error:
            # What has no derivative has an equation that is refused, most likely.
            self._results(program.value(), program)
            raise NotPrintable(f"has no derivative in reverse mode: {error}") from error
        logit, slope = self._results(closed, program)
        return logit, slope

    def build_predicate(self, predicate: Program, first_capture: int) -> Node:
        """Whether something is visible, by a program whose captures are numbered from
        `first_capture` on."""
        self._check_captures(predicate)
        (visible,) = self._results(predicate.value(), predicate, first_capture=first_capture)
        return visible

    def build_partials(
        self, program: Program, capture: int
    ) -> tuple[Node, dict[tuple[Node, ...], Node]]:
        """(logit, d logit / d loaded value by the indices of each element of a capture that is
        loaded)."""
        self._check_captures(program)
        try:
            closed, views = program.value_and_partials(capture)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise NotPrintable(f"has no derivative in reverse mode: {error}") from error
        graph = self._graph
        zeros = (graph.constant(0.0),) * len(views)
        logit, *results = self._results(closed, program, zeros)
        partials: dict[tuple[Node, ...], Node] = {}
        for view, partial in zip(views, results, strict=False):
            if any(axis is not None for axis in view.axes):
                raise NotPrintable(f"uses capture {capture} otherwise than by single elements")
            index = []
            for axis, i in enumerate(view.index):
                if isinstance(i, Result):
                    node = self._signed(results[i.number - 1])
                else:
                    node = graph.constant(i or 0, "int32")
                index.append(self._wrapped(node, view, axis))
            key = tuple(index)
            partials[key] = graph.add(partials[key], partial) if key in partials else partial
        return logit, partials

    def _results(
        self,
        closed: core.ClosedJaxpr,
        program: Program,
        leading: Sequence[Node] = (),
        first_capture: int = 0,
    ) -> list[Node]:
        """Nodes of the results of a jaxpr of `leading` and the program's arguments."""
        if closed.consts:
            raise NotPrintable("has arrays inside a function with a derivative of its own")
        if closed.effects:
            raise NotPrintable(f"has side effects: {', '.join(map(str, closed.effects))}")
        graph, jaxpr = self._graph, closed.jaxpr
        scale = graph.input("scale", "float32", 0)
        product = graph.input("score", "float32", SCORE)
        arguments = (
            *leading,
            graph.multiply(product, scale),
            graph.input("b", "int32", 0),
            graph.input("h", "int32", 0),
            graph.input("q", "int32", ROW),
            graph.input("kv", "int32", COLUMN),
            graph.input("distance", "int32", DISTANCE),
        )
        self._values.update(zip(jaxpr.invars, arguments, strict=False))
        captures = zip(jaxpr.invars[len(arguments) :], program.capture_types, strict=True)
        for number, (variable, capture) in enumerate(captures, first_capture):
            self._values[variable] = View.whole(number, capture.shape)
            self._capture_dtypes[number] = str(capture.dtype)
            for axis, size in enumerate(capture.shape):
                if not isinstance(size, int):
                    extent = graph.node("extent", (), "int32", (number, axis))
                    self._symbolic_sizes.setdefault(size, extent)
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
            if any(isinstance(size, int) and size >= 2**31 for size in capture.shape):
                raise NotPrintable(f"captures an array with an axis of 2**31: {capture.shape}")

    def _equation(self, eqn) -> list[Node | View]:
        name = eqn.primitive.name
        first = self._values.get(eqn.invars[0]) if _is_variable(eqn.invars[:1]) else None
        if isinstance(first, View) and first.axes:
            view = first.after(eqn, eqn.invars[1:])
            if view is None:
                _refuse(eqn, "is not the choice of single elements of a captured array")
            index = tuple(
                i if i is None or isinstance(i, Node) else self._index(i, eqn) for i in view.index
            )
            return [dataclasses.replace(view, index=index)]
        if len(eqn.outvars) != 1:
            _refuse(eqn, "has no counterpart in CUDA")
        out = eqn.outvars[0].aval
        if out.shape != () and name not in ("reshape", "broadcast_in_dim", "squeeze"):
            _refuse(eqn, "works on arrays")
        if math.prod(out.shape) != 1:
            _refuse(eqn, "makes an array")
        if name == "dim_as_value":
            size = eqn.params["dim"]
            if size not in self._symbolic_sizes:
                raise NotPrintable(f"depends on a symbolic size that no array has, {size}")
            return [self._symbolic_sizes[size]]
        if name in _UNSET and (dtype := _computed_in(out)) in (*COMPUTED, *FLOATS):
            self._unset.add(eqn.outvars[0])
            return [self._graph.constant(0, "float32" if dtype in FLOATS else dtype)]
        if not eqn.invars:
            _refuse(eqn, "has no operands")
        args = [self._scalar(atom, eqn) for atom in eqn.invars]
        dtype = _computed_in(out)
        narrow = dtype in FLOATS and (name == "select_n" or name in _PASSED_ON)
        if dtype not in COMPUTED and not narrow:
            _refuse(eqn, f"computes in {out.dtype}; allowed are {', '.join(COMPUTED)}")
        result = self._operation(eqn, name, dtype, args)
        if result is None:
            _refuse(eqn, "has no counterpart in CUDA")
        if result.depth > MAX_DEPTH:
            raise NotPrintable(
                f"has {result.depth} operations one within the other as printed, with what its "
                f"derivative needs; allowed are {MAX_DEPTH}"
            )
        if str(out.dtype) == "int64":
            # As it is written, too: simplified, it may have wrapped around twice.
            written = self._graph.node(name, tuple(args), "int32")
            if wraps(result) or (name in ("add", "sub") and wraps(written)):
                self._too_wide[eqn.outvars[0]] = eqn
        return [result]

    def _index(self, atom, eqn) -> Node:
        if isinstance(atom, int):
            return self._graph.constant(atom, "int32")
        node = self._scalar(atom, eqn)
        if node.deps & SCORE:
            _refuse(eqn, "has an index that depends on the score")
        return self._signed(node)

    def _signed(self, index: Node) -> Node:
        if index.dtype != "uint32":
            return index
        largest = self._graph.constant(2**31 - 1, "uint32")
        return self._graph.node("to_int", (self._graph.integer("min", index, largest),), "int32")

    def _scalar(self, atom, eqn) -> Node:
        graph = self._graph
        if is_literal(atom):
            if np.size(atom.val) != 1:
                _refuse(eqn, "works on a constant array")
            aval: Any = atom.aval
            dtype = _computed_in(aval)
            value = np.asarray(atom.val).reshape(()).item()
            is_held = dtype == str(aval.dtype) or dtype != "int32" or -(2**31) <= value < 2**31
            if (dtype not in COMPUTED and dtype not in FLOATS) or not is_held:
                _refuse(eqn, f"has an operand of dtype {aval.dtype}")
            return graph.constant(value, "float32" if dtype in FLOATS else dtype)
        # Of an index and a symbolic size, a choice takes the sum where the index is negative only.
        if atom in self._too_wide and (eqn is None or eqn.primitive.name != "select_n"):
            _refuse(self._too_wide[atom], "computes in int64, and 32 bits may not hold the result")
        value = self._values[atom]
        if isinstance(value, Node):
            return value
        if math.prod(atom.aval.shape) != 1 or any(axis is not None for axis in value.axes):
            _refuse(eqn, "works on a captured array; only single elements can be taken of one")
        return self._element(value, eqn)

    def _element(self, view: View, eqn) -> Node:
        """The one element that a view has."""
        graph = self._graph
        dtype = self._capture_dtypes[view.capture]
        index = tuple(self._wrapped(i, view, axis) for axis, i in enumerate(view.index))
        node = graph.load(view.capture, dtype, index)
        for cast in filter(None, view.casts):
            if str(cast) not in COMPUTED:
                _refuse(eqn, f"converts to {cast}; allowed are {', '.join(COMPUTED)}")
            node = self._convert(node, str(cast))
        return node

    def _wrapped(self, i: Node, view: View, axis: int) -> Node:
        """An index, whose wrapping by the size of its axis knows the size at run time."""
        if i.op == "select" and i.args[0].op == "lt":
            _, moved, same = i.args
            size = view.shape[axis]
            zero = self._graph.constant(0, "int32")
            extent = self._symbolic_sizes.get(size) or self._graph.constant(size, "int32")
            if i.args[0].args == (same, zero) and moved is self._graph.integer("add", same, extent):
                return self._graph.node("wrap", (same,), "int32", (view.capture, axis))
        return i

    def _convert(self, x: Node, dtype: str) -> Node:
        graph = self._graph
        if x.dtype == dtype:
            return x
        if dtype == "float32":
            return graph.to_float(x)
        if dtype == "bool":
            return graph.compare("ne", x, graph.constant(0, x.dtype))
        if x.op == "constant" and x.dtype != "float32":
            return graph.constant(x.value, dtype)
        x = graph.rounded(x)
        return graph.node("to_int" if dtype == "int32" else "to_uint", (x,), dtype)

    def _operation(self, eqn, name: str, dtype: str, args: list[Node]) -> Node | None:
        graph = self._graph
        if name in ("reshape", "broadcast_in_dim", "squeeze") or name in _PASSED_ON:
            return args[0]
        if name == "convert_element_type":
            return self._convert(args[0], dtype)
        if name == "select_n":
            atoms = zip(eqn.invars[1:], args[1:], strict=True)
            chosen = self._choice(args[0], [None if self._is_unset(x) else y for x, y in atoms])
            if chosen is None:
                self._unset.add(eqn.outvars[0])
            return chosen or args[1]
        if name in COMPARE:
            return graph.compare(name, *map(graph.rounded, args))
        if name == "clamp":
            low, x, high = args
            name, args = "min", [self._operation(eqn, "max", dtype, [low, x]) or x, high]
        if name == "is_finite":
            infinity = graph.constant(math.inf)
            return graph.compare("lt", graph.absolute(args[0]), infinity)
        if args[0].dtype == "bool":
            return self._of_bools(name, args)
        if dtype in _INTEGERS:
            return self._of_integers(eqn, name, dtype, args)
        if dtype == "float32":
            return self._of_floats(eqn, name, args)
        return None

    def _is_unset(self, atom) -> bool:
        return not is_literal(atom) and atom in self._unset

    def _choice(self, which: Node, cases: list[Node | None], first: int = 0) -> Node | None:
        """Of `cases`, numbered from `first` on, the one of a number that is clamped to theirs;
        anything where that is None."""
        if len(cases) == 1:
            return cases[0]
        which = _unclamped(which, first + len(cases) - 1)
        if which.op == "to_int" and which.args[0].dtype == "bool":
            which = which.args[0]
        if which.dtype == "bool":
            cases = cases[:2]
        half = len(cases) // 2
        below, above = cases[:half], cases[half:]
        less, more = self._choice(which, below, first), self._choice(which, above, first + half)
        if less is None or more is None:
            return less or more
        if which.dtype == "bool":
            return self._graph.select(which, more, less)
        bound = self._graph.constant(first + half, "int32")
        return self._graph.select(self._graph.compare("lt", which, bound), less, more)

    def _of_bools(self, name: str, args: list[Node]) -> Node | None:
        graph = self._graph
        if name == "not":
            return graph.negation(args[0])
        name = {"max": "or", "min": "and", "add": "or", "mul": "and"}.get(name, name)
        return graph.logical(name, *args) if name in ("and", "or", "xor") else None

    def _of_integers(self, eqn, name: str, dtype: str, args: list[Node]) -> Node | None:
        graph = self._graph
        if name == "square":
            return graph.integer("mul", args[0], args[0])
        if name == "integer_pow":
            return graph.integer_power(args[0], eqn.params["y"])
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
        return graph.integer(name, *args) if name in INTEGER_FORMATS else None

    def _of_floats(self, eqn, name: str, args: list[Node]) -> Node | None:
        graph = self._graph
        if name in _STEEP:
            args = list(map(graph.rounded, args))
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
            return graph.atom("exp2", graph.scaled(x, LOG2_E))
        if name == "log2":
            return graph.atom("log2", x)
        if name == "log":
            return graph.scaled(graph.atom("log2", x), _LN_2)
        if name == "logistic":
            e = graph.atom("exp2", graph.scaled(x, -LOG2_E))
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

    def _within_a_turn(self, x: Node) -> Node:
        """`x` less a multiple of 2 pi: the fast sine and cosine are accurate from -pi to pi."""
        graph = self._graph
        turns = graph.atom("round_even", graph.scaled(x, 1.0 / (2.0 * math.pi)))
        # 2 pi in two parts, so that the product with the first is exact.
        high = 6.28125
        for part in (high, 2.0 * math.pi - high):
            x = graph.atom("fma", turns, graph.constant(-part), x)
        return x


def _computed_in(aval) -> str:
    """The dtype that stands for the one of a value: under JAX_ENABLE_X64 a Python number is of 64
    bits, and so is what it makes of int32, both weakly: they yield to the score's float32. Sizes
    and the indices that are compared with them are int64, as long as 32 bits hold them.
    """
    dtype = str(aval.dtype)
    if dtype == "int64":
        return "int32"
    return "float32" if dtype == "float64" and aval.weak_type else dtype


def _unclamped(which: Node, last: int) -> Node:
    """A number that is clamped to 0 to `last`, perhaps several times, by which JAX chooses."""
    while which.op in ("min", "max"):
        constants = [a.value for a in which.args if a.op == "constant"]
        others = [a for a in which.args if a.op != "constant"]
        if constants != [last if which.op == "min" else 0]:
            break
        (which,) = others
    return which


def _is_variable(atoms) -> bool:
    return bool(atoms) and not is_literal(atoms[0])


def _refuse(eqn, why: str) -> NoReturn:
    text = " ".join(str(eqn).split())
    text = text if len(text) <= 200 else text[:200] + " ..."
    raise NotPrintable(f"`{eqn.primitive.name}` {why}, in: {text}")
