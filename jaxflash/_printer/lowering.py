"""From the nodes of a graph to nodes of one instruction each.

A node belongs to the earliest place that knows what it depends on; sums, products and offsets are
taken apart so that each place does what it can.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence

from jaxflash._printer import CAPTURE_DTYPES
from jaxflash._printer.graph import Graph, along_diagonals
from jaxflash._printer.node import (
    COLUMN,
    ELEMENT,
    ROW,
    SCORE,
    Node,
    depends_on_difference,
    is_bounded,
)
from jaxflash._printer.starts import is_of_neighbours

# Where a node is computed, from early to late.
PLACES: tuple[str, ...] = ("head", "row", "column", "element")


def place_of(x: Node) -> str:
    """The earliest one that knows what a node depends on."""
    return {0: "head", ROW: "row", COLUMN: "column"}.get(x.deps, "element")


def _is_not_a_quotient(x: Node) -> bool:
    return x.op not in ("divide", "divide_by_normal", "reciprocal")


def _may_be_large(x: Node) -> bool:
    """Not the product of query and key by itself, nor the scale."""
    return x.op != "input" and _is_not_a_quotient(x) and not is_bounded(x)


@dataclasses.dataclass(frozen=True)
class DiagonalLoad:
    """What is behind a load whose index is `sign` * (q - kv) + `offset` along an axis of `extent`
    elements from `address` on."""

    sign: int
    offset: Node
    address: Node
    extent: Node


class Lowering:
    """Chooses instructions for the nodes.

    Args:
        graph: of the nodes, which gets those of instructions.
        paired: captures of whose rows, an element for each column, a thread takes neighbours.
    """

    def __init__(self, graph: Graph, paired: Collection[int]):
        self.graph = graph
        self._paired = paired
        self._instructions: dict[Node, Node] = {}
        self.diagonals: dict[Node, DiagonalLoad] = {}  # by their instruction

    def lowered(self, x: Node) -> Node:
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
                result = self.graph.node(
                    "wrap", (self.lowered(x.args[0]), self.extent(*x.value)), "int32"
                )
            else:
                args = tuple(map(self.lowered, x.args))
                result = self.graph.node(x.op, args, x.dtype, x.value)
            self._instructions[x] = result
        return self._instructions[x]

    def _lowered_sum(self, x: Node) -> Node:
        constant, coefficients = x.value
        groups: dict[str, list[tuple[float, Node]]] = {}
        for coefficient, term in zip(coefficients, x.args, strict=True):
            place = "score" if term.deps & SCORE else place_of(term)
            groups.setdefault(place, []).append((coefficient, term))
        total = None if constant == 0.0 else self.graph.constant(constant)
        for place in (*PLACES, "score"):
            part = None
            if place == "column" and total is not None and place_of(total) == "row":
                # Summed by itself, so that an element adds once.
                part, total = total, None
            for coefficient, term in groups.get(place, ()):
                total = self._plus_term(total, coefficient, term)
            if part is not None:
                total = part if total is None else self.graph.atom("add", part, total)
        assert total is not None
        return total

    def _plus_term(self, total: Node | None, coefficient: float, term: Node) -> Node:
        """total + coefficient * term; the factors known earlier are multiplied first."""
        atom = self.graph.atom
        groups: dict[str, list[Node]] = {}
        factors = term.args if term.op == "product" else (term,)
        # What is large may be infinite once it is multiplied, unless it is divided before.
        if sum(map(_may_be_large, factors)) > 1:
            factors = sorted(factors, key=_is_not_a_quotient)
        for factor in factors:
            place = "score" if factor.deps & SCORE else place_of(factor)
            groups.setdefault(place, []).append(self.lowered(factor))
        *before, last = (groups[place] for place in (*PLACES, "score") if place in groups)
        if not before and len(last) > 1 and abs(coefficient) > 1.0:  # likewise
            last = [self._product(last)]
        early = None if coefficient == 1.0 else self.graph.constant(coefficient)
        for factor in (factor for group in before for factor in group):
            early = self._scaled_by(early, factor)
        if total is None:
            for factor in last:
                early = self._scaled_by(early, factor)
            assert early is not None
            return early
        x, *rest = last
        if rest:
            x = self._product([x, *rest[1:]])
            return atom("fma", self._scaled_by(early, x), rest[0], total)
        if early is None:
            return atom("add", total, x)
        if early is self.graph.constant(-1.0):
            return atom("sub", total, x)
        return atom("fma", early, x, total)

    def _product(self, factors: Sequence[Node]) -> Node:
        return functools.reduce(functools.partial(self.graph.atom, "times"), factors)

    def _scaled_by(self, factor: Node | None, x: Node) -> Node:
        if factor is None:
            return x
        if factor is self.graph.constant(-1.0):
            return self.graph.atom("neg", x)
        return self.graph.atom("times", factor, x)

    def extent(self, capture: int, axis: int) -> Node:
        return self.graph.node("extent", (), "int32", (capture, axis))

    def offset(self, capture: int, index: tuple[Node, ...], owned: Collection[int] = ()) -> Node:
        """Of an element by the first axes of a capture, without what the owned axes add."""
        node = self.graph.node
        offsets = self._offsets(capture, index, owned, {})
        total = None
        for offset in (offsets[place] for place in PLACES if place in offsets):
            total = offset if total is None else node("add_offset", (total, offset), "int64_t")
        return self.graph.constant(0, "int32") if total is None else total

    def _offsets(
        self,
        capture: int,
        index: tuple[Node, ...],
        owned: Collection[int],
        clamps: Mapping[str, str],
    ) -> dict[str, Node]:
        """What the indices of each place add to an offset; `clamps`: how that of the last axis is
        clamped in some places, to 32 bits."""
        node = self.graph.node
        offsets: dict[str, Node] = {}
        stride = None
        for axis in reversed(range(len(index))):
            i, extent = self.lowered(index[axis]), self.extent(capture, axis)
            is_zero = i.op == "constant" and i.value == 0
            if axis not in owned and not is_zero:
                place = place_of(i)
                if stride is None and place in clamps:
                    offset = node(clamps[place], (i, extent), "int32")
                else:
                    offset = node("clamp_index", (i, extent), "int64_t")
                if stride is not None:
                    offset = node("scale_offset", (offset, stride), "int64_t")
                if place in offsets:
                    offset = node("add_offset", (offsets[place], offset), "int64_t")
                offsets[place] = offset
            wide = node("widen", (extent,), "int64_t")
            stride = wide if stride is None else node("scale_offset", (stride, wide), "int64_t")
        return offsets

    def _lowered_load(self, x: Node) -> Node:
        paired = is_of_neighbours(x, self._paired)
        address, index = self.address(x, paired)
        if paired:
            return self.graph.node("load_of_pair", (address, index, x.args[-1]), x.dtype)
        result = self.graph.node("load_capture", (address, index), x.dtype, x.value[1])
        if x.args and not any(i.deps for i in x.args[:-1]):
            last = x.args[-1].args[0] if x.args[-1].op == "wrap" else x.args[-1]
            found = along_diagonals(self.graph, last)
            if found is not None:
                offset, extent = self.lowered(found[1]), self.extent(x.value[0], len(x.args) - 1)
                self.diagonals[result] = DiagonalLoad(found[0], offset, address, extent)
        return result

    def address(self, x: Node, paired: bool) -> tuple[Node, Node]:
        """(address, index) of a load. What the head knows is added to the address there, then what
        the row knows; the index is what is left, of pairs if `paired`."""
        node = self.graph.node
        capture, dtype = x.value
        stored = CAPTURE_DTYPES[dtype]
        pointer = f"const {stored}*"
        address = node("capture_data", (), pointer, (capture, stored))
        clamps = {"column": "clamp_column"}
        if paired:
            clamps = {place: "clamp_pair" for place in PLACES}
        offsets = self._offsets(capture, x.args, (), clamps)
        early = [offsets[place] for place in ("head", "row") if place in offsets]
        late = [offsets[place] for place in ("column", "element") if place in offsets]
        if not late:
            late = [early.pop() if early else self.graph.constant(0, "int32")]
        for offset in early:
            address = node("shift", (address, offset), pointer)
        index = late[0]
        for offset in late[1:]:
            index = node("add_offset", (index, offset), "int64_t")
        return address, index

    def shares_loads(self) -> bool:
        """Whether neighbours take parts of one load: pairs, or words of bits."""
        return any(
            x.op == "load_of_pair" or (x.op == "load_capture" and x.dtype == "uint32")
            for x in self._instructions.values()
        )

    def shares_diagonals(self) -> bool:
        """Whether the elements of a diagonal load the same, others something else."""
        return any(
            x.op == "load" and x.deps & ELEMENT and all(map(depends_on_difference, x.args))
            for x in self._instructions
        )
