"""The parts of the struct: what each computes, what it says of itself, and its functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from jaxflash._printer import CAPTURE_DTYPES
from jaxflash._printer.gradients import DiagonalSum, LoadRoots, StoredLoad
from jaxflash._printer.graph import Graph
from jaxflash._printer.interface import CONSTANTS
from jaxflash._printer.lowering import DiagonalLoad, Lowering
from jaxflash._printer.node import Node, below, bounds, is_finite
from jaxflash._printer.starts import Slopes, Start
from jaxflash._printer.writer import Writer, constants


class Section:
    """A part of the struct. What is not here is not in the struct, but for `CONSTANTS`."""

    # Whether it asks for the numbers of batch element and head beside what it computes.
    asks_for_numbers = False

    def nodes(self) -> Iterable[Node]:
        """What it computes."""
        return ()

    def indices(self) -> Iterable[tuple[int, Sequence[Node]]]:
        """Where it adds to gradients of captures."""
        return ()

    def results(self, lowering: Lowering) -> Mapping[str, tuple[Node, str]]:
        """Of its functions, in instructions, and the places where these are called."""
        return {}

    def needs(self, lowering: Lowering) -> Iterable[tuple[Node, str]]:
        """Instructions, and the places that ask for them."""
        return self.results(lowering).values()

    def constants(self, lowering: Lowering) -> Mapping[str, bool | int]:
        """Its part of `CONSTANTS`."""
        return {}

    def lines(self, writer: Writer) -> list[str]:
        """Its functions, and what other members it has."""
        lines = []
        for name, (x, place) in self.results(writer.lowering).items():
            lines += writer.function(name, place, [x], writer.text(x, place))
        return lines


# Of a logit in units of log 2, either way from 0; a soft cap of 50 is 72.1. What stays exact within
# it is said in docs/experiments.md (bounded programs).
_BOUND = 73.0


@dataclasses.dataclass(frozen=True)
class Logits(Section):
    """The logit of an element and its derivative by the score.

    Attributes:
        logit: in units of log 2.
        slope: d logit / d score.
        addend: what the logit adds to the score, with a slope of 1 alone; else None.
        adds: whether that may be other than 0.
    """

    logit: Node
    slope: Node
    addend: Node | None
    adds: bool

    @property
    def bounded(self) -> bool:
        """Whether the exponentials of all logits that are not hidden can be added up as they are:
        sums, and outputs of values up to 2^34, stay within float32, and a row of the least logits
        leaves values down to 2^-53 as they are. Holds for soft caps up to 50."""
        least, most = bounds(self.logit)
        return least >= -_BOUND and most <= _BOUND

    @property
    def guards_slope(self) -> bool:
        return not is_finite(self.slope)

    def nodes(self):
        return (x for x in (self.logit, self.slope, self.addend) if x is not None)

    def needs(self, lowering):
        return [(lowering.lowered(x), "element") for x in self.nodes()]

    def constants(self, lowering):
        return {
            "kUnitSlope": self.addend is not None,
            "kAdds": self.adds,
            "kBounded": self.bounded,
        }

    def diagonals(self, lowering: Lowering) -> dict[Node, DiagonalLoad]:
        """Its loads along diagonals."""
        shown = below(lowering.lowered(self.logit)) | below(lowering.lowered(self.slope))
        return {x: load for x, load in lowering.diagonals.items() if x in shown}

    def lines(self, writer):
        diagonals = self.diagonals(writer.lowering)
        inside = self._lines(writer, diagonals) if diagonals else []
        return [*self._lines(writer, None), *inside]

    def _lines(self, writer: Writer, inside: Mapping[Node, DiagonalLoad] | None) -> list[str]:
        logit = writer.lowering.lowered(self.logit)
        if self.addend is None:
            slope = writer.lowering.lowered(self.slope)
            return _sloped_functions(writer, "", logit, slope, self.guards_slope, inside)
        addend = writer.lowering.lowered(self.addend)
        lines = []
        for name, x in (("logit", logit), ("addend", addend)):
            text = writer.text(x, "element")
            lines += writer.function(name, "element", [x], text, inside=inside)
        more = "" if inside is None else ", diagonal, step"
        call = f"logit(head, row, column, q, kv, distance, s{more})"
        slope = "*slope = 1.0f;"
        return lines + writer.function("logit_and_slope", "element", [], call, slope, inside=inside)


def _sloped_functions(
    writer: Writer,
    prefix: str,
    logit: Node,
    slope: Node,
    guarded: bool,
    inside: Mapping[Node, DiagonalLoad] | None = None,
) -> list[str]:
    text = writer.text(logit, "element")
    _, factor = writer.weighed(slope, guarded, logit)
    store, both = f"*slope = {factor};", f"{prefix}logit_and_slope"
    return [
        *writer.function(f"{prefix}logit", "element", [logit], text, inside=inside),
        *writer.function(both, "element", [logit, slope], text, store, inside=inside),
    ]


@dataclasses.dataclass(frozen=True)
class Diagonals(Section):
    """Where the loads along diagonals are, and whether they are in bounds."""

    of: Logits

    def needs(self, lowering):
        return [(load.offset, "end") for load in self.of.diagonals(lowering).values()]

    def constants(self, lowering):
        return {"kHasDiagonals": bool(self.of.diagonals(lowering))}

    def lines(self, writer):
        fields, addresses, tests = [], [], []
        for x, load in self.of.diagonals(writer.lowering).items():
            address, offset, extent = (
                writer.text(x, "element") for x in (load.address, load.offset, load.extent)
            )
            sign, ends = ("+", ("least", "most")) if load.sign > 0 else ("-", ("most", "least"))
            fields.append(f"    const {CAPTURE_DTYPES[x.value]}* {writer.name(x)};")
            addresses.append(f"{address} + ({offset} {sign} difference)")
            tests += [f"{offset} {sign} {ends[0]} >= 0", f"{offset} {sign} {ends[1]} < {extent}"]
        return [
            *("  struct Diagonal {", *fields, "  };"),
            *writer.function("diagonal", "end", [], f"{{{', '.join(addresses)}}}"),
            *writer.function("inside", "end", [], " && ".join(tests) or "true"),
        ]


@dataclasses.dataclass(frozen=True)
class Starts(Section):
    """What products start from."""

    start: Start

    def nodes(self):
        return self.start.neighbours, self.start.value, self.start.added

    def results(self, lowering):
        load = self.start.neighbours
        address, _ = lowering.address(load, paired=True)
        end = lowering.extent(load.value[0], len(load.args) - 1)
        return {
            "start": (lowering.lowered(self.start.value), "element"),
            "neighbours": (address, "element"),
            "neighbours_end": (end, "element"),
        }

    def constants(self, lowering):
        return {"kStarts": True}

    def lines(self, writer):
        capture, dtype = self.start.neighbours.value
        return [
            f"  static constexpr int kStartCapture = {capture};",
            f"  using Neighbour = {CAPTURE_DTYPES[dtype]};",
            *super().lines(writer),
        ]


@dataclasses.dataclass(frozen=True)
class Started(Section):
    """Logit, in log 2, and slope of the products that did, where the slope is not 1."""

    logit: Node
    slope: Node
    logits: Logits  # of the others

    def nodes(self):
        return self.logit, self.slope

    def needs(self, lowering):
        return [(lowering.lowered(x), "element") for x in self.nodes()]

    def lines(self, writer):
        logit, slope = (writer.lowering.lowered(x) for x in self.nodes())
        return _sloped_functions(writer, "started_", logit, slope, self.logits.guards_slope)


@dataclasses.dataclass(frozen=True)
class DistanceSlopes(Section):
    """What the addend, in log 2, is proportional to the distance by."""

    slopes: Slopes

    def nodes(self):
        return self.slopes.before, self.slopes.behind

    def results(self, lowering):
        return {
            "slope_before": (lowering.lowered(self.slopes.before), "end"),
            "slope_behind": (lowering.lowered(self.slopes.behind), "end"),
        }

    def constants(self, lowering):
        return {"kFollowsDistance": True, "kBends": self.slopes.before is not self.slopes.behind}


@dataclasses.dataclass(frozen=True)
class CaptureTangent(Section):
    """What tangents of captures add to that of the logit, in natural units."""

    tangent: Node
    logit: Node

    def nodes(self):
        return (self.tangent,)

    def results(self, lowering):
        return {"capture_tangent": (lowering.lowered(self.tangent), "element")}

    def constants(self, lowering):
        return {"kCapturesMove": True}

    def lines(self, writer):
        tangent, logit = (writer.lowering.lowered(x) for x in (self.tangent, self.logit))
        needed, text = writer.weighed(tangent, not is_finite(self.tangent), logit)
        return writer.function("capture_tangent", "element", needed, text)


@dataclasses.dataclass(frozen=True)
class KeyWeights(Section):
    """Factors of d score in sums over the queries."""

    weights: tuple[Node, ...]

    def nodes(self):
        return self.weights

    def needs(self, lowering):
        return [(lowering.lowered(x), "element") for x in self.weights]

    def constants(self, lowering):
        return {"kKeySums": len(self.weights)}

    def lines(self, writer):
        weights = [writer.lowering.lowered(x) for x in self.weights]
        texts = (writer.text(x, "element") for x in weights)
        stores = [f"weights[{i}] = {text};" for i, text in enumerate(texts)]
        return writer.function("key_weights", "element", weights, "", *stores)


@dataclasses.dataclass(frozen=True)
class StoredGradient(Section):
    """A load whose gradient d score is."""

    load: StoredLoad

    def indices(self):
        return ((self.load.capture, self.load.index),)

    def results(self, lowering):
        *of_head, _, _ = self.load.index
        return {"gradient_matrix": (lowering.offset(self.load.capture, tuple(of_head)), "end")}

    def constants(self, lowering):
        return {"kStoresGradient": True, "kSumsBatch": self.load.sums_batch}


@dataclasses.dataclass(frozen=True)
class SumAlongDiagonals(Section):
    """One of d score."""

    sum: DiagonalSum

    def nodes(self):
        return (self.sum.weight,)

    def indices(self):
        return ((self.sum.capture, self.sum.index),)

    def results(self, lowering):
        return {
            "diagonal_index": (lowering.offset(self.sum.capture, self.sum.index), "element"),
            "diagonal_weight": (lowering.lowered(self.sum.weight), "end"),
        }

    def constants(self, lowering):
        return {"kSumsDiagonals": True, "kSumsBuckets": self.sum.has_buckets}


@dataclasses.dataclass(frozen=True)
class Visible(Section):
    """What is not hidden, where something may be."""

    visible: Node

    def nodes(self):
        return (self.visible,)

    def results(self, lowering):
        return {"visible": (lowering.lowered(self.visible), "element")}

    def constants(self, lowering):
        return {"kMasks": True}


@dataclasses.dataclass(frozen=True)
class Words(Section):
    """What is visible in two parts, of which one lies in words of keys.

    Attributes:
        load: of a key's word.
        of_rows: whether its index has the row, behind the number of 128 keys.
        bit: a key's bit, which depends on the key alone.
        beside: what has to hold, too, if anything has.
    """

    load: Node
    of_rows: bool
    bit: Node
    beside: Node | None

    def nodes(self):
        return (x for x in (self.load, self.bit, self.beside) if x is not None)

    def results(self, lowering):
        capture, rank = self.load.value[0], len(self.load.args)
        address, _ = lowering.address(self.load, paired=False)
        rows, groups = lowering.graph.constant(1, "int32"), lowering.extent(capture, rank - 2)
        if self.of_rows:
            rows, groups = groups, lowering.extent(capture, rank - 3)
            address = address.args[0]  # without the row, which is the last shift
        results = {
            "words": (address, "element"),
            "word_rows": (rows, "element"),
            "word_groups": (groups, "element"),
            "bit": (lowering.lowered(self.bit), "column"),
        }
        if self.beside is not None:
            results["visible_beside"] = lowering.lowered(self.beside), "element"
        return results

    def constants(self, lowering):
        return {"kHasWords": True, "kAllInWords": self.beside is None}


@dataclasses.dataclass(frozen=True)
class Sink(Section):
    """One more logit, in log 2."""

    logit: Node

    def nodes(self):
        return (self.logit,)

    def results(self, lowering):
        return {"sink": (lowering.lowered(self.logit), "end")}

    def constants(self, lowering):
        return {"kHasSink": True}


@dataclasses.dataclass(frozen=True)
class Dropout(Section):
    """By the capture that is `_dropout.kernel_parameters`."""

    capture: int
    asks_for_numbers = True

    def constants(self, lowering):
        return {"kDrops": True}

    def lines(self, writer):
        parameters = f"capture_data<uint32_t>(captures, {self.capture}, problem, batch)"
        return writer.function("dropout", "end", [], f"Dropout({parameters}, b, h)")


@dataclasses.dataclass(frozen=True)
class Loads(Section):
    """Loads whose gradients are wanted, a struct for each.

    Attributes:
        loads: in their order.
        logit: in units of log 2.
        start: what products start from.
    """

    loads: tuple[LoadRoots, ...]
    logit: Node
    start: Start | None

    def nodes(self):
        return (x.partial for x in self.loads)

    def indices(self):
        return ((x.load.capture, x.index) for x in self.loads if not x.load.is_key_sum)

    def needs(self, lowering):
        for x in self.loads:
            yield _offset(x, lowering), "element" if x.load.scatter else "end"
            yield lowering.lowered(x.partial), "element"

    def lines(self, writer):
        lines = []
        for number, x in enumerate(self.loads):
            struct = [f"struct Load{number} {{", *self._members(x, writer), "};"]
            lines += [f"  {line}" for line in struct]
        return lines

    def _members(self, x: LoadRoots, writer: Writer) -> list[str]:
        load = x.load
        start = None if self.start is None else self.start.neighbours
        lines = constants(
            {
                "kCapture": load.capture,
                "kRank": 2 if load.is_key_sum else len(x.index),
                "kQueryAxis": load.query_axis,
                "kKeyAxis": load.key_axis,
                "kScatter": load.scatter,
                "kDiagonal": load.diagonal,
                "kKeySum": load.is_key_sum,
                "kOfStart": start is not None
                and (load.capture, x.index) == (start.value[0], start.args),
            }
        )
        lines.append(f"  using Result = {x.result};")
        offset = _offset(x, writer.lowering)
        if load.scatter:
            lines += writer.function("index", "element", [offset], writer.text(offset, "element"))
        elif not load.is_key_sum:
            lines += writer.function("slice", "end", [], writer.text(offset, "end"))
        partial, logit = (writer.lowering.lowered(node) for node in (x.partial, self.logit))
        needed, text = writer.weighed(partial, not is_finite(x.partial), logit)
        return lines + writer.function("partial", "element", needed, text)


def _offset(x: LoadRoots, lowering: Lowering) -> Node:
    """Of a slice or of an element."""
    return lowering.offset(x.load.capture, x.index, (x.load.query_axis, x.load.key_axis))


# As they follow each other in the struct.
_ORDER = (
    *(Diagonals, Logits, Starts, Started, DistanceSlopes, CaptureTangent, KeyWeights),
    *(StoredGradient, SumAlongDiagonals, Visible, Words, Sink, Dropout, Loads),
)


def struct(graph: Graph, sections: Sequence[Section], paired: Collection[int]) -> tuple[str, bool]:
    """(text, whether it asks for the numbers of batch element and head) of these sections.

    Args:
        graph: of the nodes, which gets those of instructions.
        sections: one of a kind, in the order in which what they need is named.
        paired: captures of whose rows, an element for each column, a thread takes neighbours.
    """
    lowering = Lowering(graph, paired)
    writer = Writer(lowering)
    for section in sections:
        for x, place in section.needs(lowering):
            writer.need(x, place)
    own = {k: value for x in sections for k, value in x.constants(lowering).items()}
    own["kSharesLoads"] = lowering.shares_loads()
    own["kSharesDiagonals"] = lowering.shares_diagonals()
    lines = [*constants({**CONSTANTS, **own}), *writer.members()]
    for section in sorted(sections, key=lambda x: _ORDER.index(type(x))):
        lines += section.lines(writer)
    text = [
        "namespace jaxflash {",
        "struct Program {",
        *lines,
        "};",
        "}  // namespace jaxflash",
        "",
    ]
    asks = writer.asks_for_numbers or any(x.asks_for_numbers for x in sections)
    return "\n".join(text), asks
