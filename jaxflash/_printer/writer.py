"""From instructions to text: what an earlier place computes is a member of that place's struct."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxflash._printer.formats import (
    ADDRESS_FORMATS,
    BOOL_FORMATS,
    COMPUTED,
    FLOAT_FORMATS,
    INTEGER_FORMATS,
    UNSIGNED_FORMATS,
)
from jaxflash._printer.interface import INSIDE, PARAMETERS, SIGNATURES
from jaxflash._printer.lowering import PLACES, DiagonalLoad, Lowering, place_of
from jaxflash._printer.node import FLOAT_MAX, Node, is_nonnegative, wraps


class Writer:
    """Writes instructions where they belong, all of which it has to be told that somebody needs."""

    def __init__(self, lowering: Lowering):
        self.lowering = lowering
        self._names: dict[Node, str] = {}
        self._members: dict[str, list[Node]] = {place: [] for place in PLACES}
        self._seen: set[Node] = set()

    @property
    def asks_for_numbers(self) -> bool:
        """Of batch element and head."""
        return any(x.op == "input" and x.value in ("b", "h") for x in self._seen)

    def need(self, x: Node, place: str) -> None:
        """Names an instruction that something asks for there, and those below it."""
        self._hold(x, place)
        if x in self._seen:
            return
        self._seen.add(x)
        for a in x.args:
            self.need(a, place_of(x))
        if x.op not in ("constant", "input"):
            self._names[x] = f"x{len(self._names)}"

    def _hold(self, x: Node, place: str) -> None:
        """In a struct, where an earlier place computes it."""
        home = place_of(x)
        if x.op == "constant" or home == place or home == "element":
            return
        if x.op == "input" and x.value in PARAMETERS.get(place, ()):
            return
        if x not in self._members[home]:
            self._members[home].append(x)

    def members(self) -> list[str]:
        """The structs of the places before an element, and the functions that make them."""
        lines = []
        for place in PLACES[:3]:
            fields = [f"    {self._field(x)};" for x in self._members[place]]
            lines += [f"  struct {place.capitalize()} {{", *fields, "  };"]
        for place in PLACES[:3]:
            members = self._members[place]
            results = ", ".join(self.text(x, place) for x in members)
            lines += self.function(place, place, members, f"{{{results}}}")
        return lines

    def function(
        self,
        name: str,
        place: str,
        roots: Sequence[Node],
        result: str,
        *last: str,
        inside: Mapping[Node, DiagonalLoad] | None = None,
    ) -> list[str]:
        """One of the struct.

        Args:
            name: one of `SIGNATURES`.
            place: where it is called.
            roots: what it computes for its result and its last statements.
            result: the text; empty where it returns nothing.
            *last: statements before that.
            inside: loads that it takes along diagonals, of all of which it knows where they are.
        """
        signature = f"  __device__ __forceinline__ static {SIGNATURES[name]} {{"
        if inside is not None:
            signature = signature.replace(") {", f", {INSIDE} {{")
        body: list[str] = []
        done: set[Node] = set()
        for root in roots:
            self._define(root, place, done, body, inside or {})
        last = (*last, f"return {result};") if result else last
        return [signature, *(f"    {x}" for x in (*body, *last)), "  }"]

    def weighed(self, x: Node, guarded: bool, logit: Node) -> tuple[list[Node], str]:
        """(the nodes that it takes, the text) of what is multiplied with a probability: where the
        logit is -inf, that is 0, but `x` may be infinite or NaN."""
        text = self.text(x, "element")
        if not guarded:
            return [x], text
        return [logit, x], f"{self.text(logit, 'element')} == -INFINITY ? 0.0f : {text}"

    def _field(self, x: Node) -> str:
        kind = "int" if x.dtype == "bool" else COMPUTED.get(x.dtype, x.dtype)
        return f"{kind} {self.name(x)}"

    def name(self, x: Node) -> str:
        return x.value if x.op == "input" else self._names[x]

    def text(self, x: Node, place: str) -> str:
        if x.op == "constant":
            return _literal(x)
        if x.op == "input" and x.value in PARAMETERS.get(place, ()):
            return PARAMETERS[place][x.value]
        home = place_of(x)
        if home == place:
            return self._names[x]
        member = f"{home}.{self.name(x)}"
        return f"({member} != 0)" if x.dtype == "bool" else member

    def _define(
        self,
        x: Node,
        place: str,
        done: set[Node],
        lines: list[str],
        inside: Mapping[Node, DiagonalLoad],
    ) -> None:
        if x in done or x.op in ("constant", "input") or place_of(x) != place:
            return
        done.add(x)
        name = self._names[x]
        if x in inside:
            step = "step" if inside[x].sign > 0 else "-step"
            expression = f"load_capture(diagonal.{name}, {step})"
        else:
            for a in x.args:
                self._define(a, place, done, lines, inside)
            expression = self._expression(x, [self.text(a, place) for a in x.args])
        kind = COMPUTED.get(x.dtype, x.dtype)
        kind = kind if kind.endswith("*") else f"const {kind}"
        lines.append(f"{kind} {name} = {expression};")

    @staticmethod
    def _expression(x: Node, args: list[str]) -> str:
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
            return f"rcp_approx({args[0]})" if place_of(x) == "element" else f"1.0f / {args[0]}"
        if op in ADDRESS_FORMATS:
            return ADDRESS_FORMATS[op].format(*args)
        if x.dtype == "float32":
            return FLOAT_FORMATS[op].format(*args)
        if x.dtype == "bool":
            return BOOL_FORMATS[op].format(*args)
        if x.dtype == "uint32" and op in UNSIGNED_FORMATS:
            return UNSIGNED_FORMATS[op].format(*args)
        if op in ("div", "rem") and x.args[1].op == "constant" and x.args[1].value not in (0, -1):
            sign = "/" if op == "div" else "%"
            if is_nonnegative(x.args[0]) and x.args[1].value > 0:  # fewer instructions than signed
                return f"static_cast<int>(static_cast<uint32_t>({args[0]}) {sign} {args[1]}u)"
            return f"{args[0]} {sign} {args[1]}"
        if op == "sra" and x.args[1].op == "constant" and 0 <= x.args[1].value < 32:
            return f"{args[0]} >> {args[1]}"
        if op in ("add", "sub") and not wraps(x):
            return f"{args[0]} {'+' if op == 'add' else '-'} {args[1]}"
        return INTEGER_FORMATS[op].format(*args)


def constants(values: Mapping[str, bool | int]) -> list[str]:
    """Members of a struct."""
    return [
        f"  static constexpr bool {name} = {'true' if value else 'false'};"
        if isinstance(value, bool)
        else f"  static constexpr int {name} = {value};"
        for name, value in values.items()
    ]


def _literal(x: Node) -> str:
    if x.dtype == "bool":
        return "true" if x.value else "false"
    if x.dtype == "uint32":
        return f"{x.value}u"
    if x.dtype != "float32":
        # There is no negative literal, and 2147483648 is no int.
        return "(-2147483647 - 1)" if x.value == -(2**31) else str(x.value)
    if math.isnan(x.value):
        return "__int_as_float(0x7fffffff)"
    if math.isinf(x.value) or abs(x.value) > FLOAT_MAX:
        return "INFINITY" if x.value > 0 else "-INFINITY"
    return f"{np.float32(x.value)!s}f"
