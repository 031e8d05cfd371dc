"""From a score program to the struct that the kernels are compiled with."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxflash._printer import MAX_KEY_SUMS
from jaxflash._printer.builder import LOG2_E, Builder
from jaxflash._printer.gradients import (
    DiagonalSum,
    KeyLoad,
    KeySum,
    Load,
    LoadRoots,
    StoredLoad,
    is_stored,
    key_axes,
    key_weight,
)
from jaxflash._printer.graph import Graph
from jaxflash._printer.heads import head_axes
from jaxflash._printer.node import ROW, Node, depends_on_difference
from jaxflash._printer.request import Request
from jaxflash._printer.sections import (
    CaptureTangent,
    Diagonals,
    DistanceSlopes,
    Dropout,
    KeyWeights,
    Loads,
    Logits,
    Section,
    Sink,
    Started,
    Starts,
    StoredGradient,
    SumAlongDiagonals,
    Visible,
    Words,
    struct,
)
from jaxflash._printer.starts import Slopes, Start, slopes_of, start_of
from jaxflash._program import Program


class KeyTerms(NamedTuple):
    """What products start from is a number for each key.

    Attributes:
        of_distance: it is a part of what is proportional to the distance, by `Slopes`; otherwise
            it is all that is added.
        of_head: whether it differs from head to head.
    """

    of_distance: bool
    of_head: bool


@dataclasses.dataclass(frozen=True)
class Printed:
    """A program for the kernels.

    Attributes:
        source: the C++ struct.
        numbered: whether it asks for the numbers of batch element and head.
        unit_slope: the logit is the score plus what does not depend on it.
        bounded: see `Logits.bounded`.
        exact_length: number of rows and columns up to which differences of their numbers are
            computed exactly, or None without a limit.
        start_capture: the capture that products start from, if its row of a query is the one after
            that of the query before.
        start_of_batch: see `Start.is_of_batch`.
        key_terms: see there; None where it is not, or nothing is added.
        head_axes: see `heads.head_axes`; sink and dropout count, too.
    """

    source: str
    numbered: bool
    unit_slope: bool
    bounded: bool
    exact_length: int | None
    start_capture: int | None
    start_of_batch: bool
    key_terms: KeyTerms | None
    head_axes: Mapping[int, int | None] | None


def print_program(request: Request) -> Printed:
    """The struct `jaxflash::Program` for a score program.

    Raises:
        NotPrintable: the text says why, naming the equation.
    """
    program, predicates = request.program, request.predicates
    graph = Graph(request.distance_is_difference)
    roots = _Roots(graph, program)
    logit, slope = roots.logit, roots.shown_slope
    visible, captures = _visible(graph, predicates, len(program.capture_types))
    words = _words(graph, predicates, len(program.capture_types)) if request.words else None
    tangent = graph.constant(0.0)
    for capture in request.moving:
        dtype = str(program.capture_types[capture].dtype)
        for index, partial in roots.partials(capture).items():
            moved = graph.multiply(partial, graph.load(captures, dtype, index))
            tangent = graph.add(tangent, moved)
        captures += 1
    sink = None
    if request.sink_dtype is not None:
        head = graph.input("h", "int32", 0)
        sink = graph.load(captures, request.sink_dtype, (head,))
        captures += 1
        sink = graph.scaled(sink, LOG2_E)
    addend, start = _added(graph, logit, slope, request)
    slopes = None if addend is None else slopes_of(graph, addend, request.sides)
    started = None
    if addend is None and request.starts:
        start, started = _started(graph, logit, slope, request)
    logits = _logits(graph, logit, slope, addend)
    sums, _ = _key_sums(roots, request)
    sections = _given(
        logits,
        _of(Visible, visible),
        _of(Sink, sink),
        CaptureTangent(tangent, logits.logit) if request.moving else None,
        _of(Starts, start),
        Started(*started, logits) if started else None,
        _of(DistanceSlopes, slopes),
        words,
        KeyWeights(tuple(x.weight for x in sums)) if sums else None,
        _of(StoredGradient, _stored(roots, request)),
        Diagonals(logits),
        _of(SumAlongDiagonals, _diagonal_sum(roots, request)),
        Dropout(captures) if request.drops else None,
    )
    source, numbered = struct(graph, sections, request.paired)
    return Printed(
        source,
        numbered,
        unit_slope=addend is not None,
        bounded=logits.bounded,
        exact_length=1 << 24 if graph.subtracts_positions else None,
        start_capture=start.neighbours.value[0] if start and start.follows_queries else None,
        start_of_batch=start is not None and start.is_of_batch,
        key_terms=_key_terms(start, slopes),
        head_axes=head_axes(sections),
    )


def _key_terms(start: Start | None, slopes: Slopes | None) -> KeyTerms | None:
    if slopes is not None:
        return KeyTerms(True, slopes.is_of_head)
    if start is None or not start.is_of_key:
        return None
    return KeyTerms(False, start.is_of_head)


@dataclasses.dataclass(frozen=True)
class PrintedGradients:
    """A program with what the gradients of some captures take.

    Attributes:
        source: the C++ struct, with a struct `Load0`, `Load1` ... for each load.
        numbered: as in `Printed`.
        loads: one kernel each, in this order; those of one capture are neighbours. A capture that
            the logit does not depend on has none.
        key_sums: how many sums over the queries there are beside, whose structs follow.
        key_loads: loads whose gradients are made of these.
        head_axes: as in `Printed`.
    """

    source: str
    numbered: bool
    loads: tuple[Load, ...]
    key_sums: int
    key_loads: tuple[KeyLoad, ...]
    head_axes: Mapping[int, int | None] | None


def print_gradients(request: Request) -> PrintedGradients:
    """The struct `jaxflash::Program` with a struct for each load of the captures `wanted`.

    Raises:
        NotPrintable: the text says why, naming the equation.
    """
    program = request.program
    graph = Graph(request.distance_is_difference)
    loads: list[LoadRoots] = []
    roots = _Roots(graph, program)
    sums, key_loads = _key_sums(roots, request)
    summed = {x.capture for x in key_loads}
    stored = _stored(roots, request)
    for capture in (i for i in request.wanted if i not in summed):
        array = program.capture_types[capture]
        partials = roots.partials(capture)
        loads += [
            LoadRoots.of(
                capture,
                array,
                index,
                partial,
                request.lengths,
                alone=len(partials) == 1,
                stored=stored if stored and stored.capture == capture else None,
            )
            for index, partial in partials.items()
        ]
    along = _diagonal_sum(roots, request)
    if along is not None:
        (at,) = (i for i, x in enumerate(loads) if x.load.capture == along.capture)
        load = dataclasses.replace(loads[at].load, summed=True)
        loads[at] = dataclasses.replace(loads[at], load=load)
    visible, captures = _visible(graph, request.predicates, len(program.capture_types))
    addend, start = _added(graph, roots.logit, roots.slope, request)
    logits = _logits(graph, roots.logit, roots.slope, addend)
    all_loads = (*loads, *map(LoadRoots.of_key_sum, sums))
    # Gradients do not ask for the sink.
    dropout = captures + (request.sink_dtype is not None)
    sections = _given(
        logits,
        _of(Visible, visible),
        _of(Starts, start),
        Diagonals(logits),
        Dropout(dropout) if request.drops else None,
        Loads(all_loads, logits.logit, start),
    )
    source, numbered = struct(graph, sections, request.paired)
    return PrintedGradients(
        source,
        numbered,
        tuple(x.load for x in loads),
        len(sums),
        tuple(key_loads),
        head_axes(sections),
    )


def _logits(graph: Graph, logit: Node, slope: Node, addend: Node | None) -> Logits:
    adds = addend is not graph.constant(0.0)
    return Logits(graph.scaled(logit, LOG2_E), slope, addend, adds)


def _of(kind: Callable[[Any], Section], x: Any) -> Section | None:
    return None if x is None else kind(x)


def _given(*sections: Section | None) -> list[Section]:
    """Those that there are."""
    return [x for x in sections if x is not None]


class _Roots:
    """The logit of a program and its derivatives, each built once."""

    def __init__(self, graph: Graph, program: Program):
        self.graph, self._program = graph, program
        self.logit, self.slope = Builder(graph).build(program)
        self._partials: dict[int, dict[tuple[Node, ...], Node]] = {}

    @functools.cached_property
    def shown_slope(self) -> Node:
        """The slope, 0 where the program hides."""
        return self.graph.shown(self.slope, self.logit)

    def partials(self, capture: int) -> dict[tuple[Node, ...], Node]:
        """d logit / d loaded value by the indices of the loads of a capture, where it is not 0."""
        if capture not in self._partials:
            logit, partials = Builder(self.graph).build_partials(self._program, capture)
            shown = {i: self.graph.shown(x, logit) for i, x in partials.items()}
            zero = self.graph.constant(0.0)
            self._partials[capture] = {i: x for i, x in shown.items() if x is not zero}
        return self._partials[capture]


def _key_sums(roots: _Roots, request: Request) -> tuple[list[KeySum], list[KeyLoad]]:
    """The sums over the queries that the backward kernel computes for the gradients that are
    wanted, and the loads that they serve: all those of a capture, or none."""
    sums: dict[Node, KeySum] = {}
    loads: list[KeyLoad] = []
    program = request.program
    if request.sizes is None or not request.wanted:
        return [], []
    sizes = dict(request.sizes)
    for capture in request.wanted:
        shape = program.capture_types[capture].shape
        partials = roots.partials(capture)
        axes = [a for index in partials if (a := key_axes(index, shape, sizes)) is not None]
        weights = [
            w
            for x in partials.values()
            if (w := key_weight(roots.graph, x, roots.shown_slope)) is not None
        ]
        if not len(axes) == len(weights) == len(partials):
            continue
        more = {w: KeySum(w, x) for w, x in zip(weights, partials.values(), strict=True)}
        if len({**sums, **more}) > MAX_KEY_SUMS:
            continue
        sums |= more
        numbers = {w: number for number, w in enumerate(sums)}
        loads += [KeyLoad(capture, numbers[w], a) for w, a in zip(weights, axes, strict=True)]
    return list(sums.values()), loads


def _stored(roots: _Roots, request: Request) -> StoredLoad | None:
    """The first capture whose gradient is wanted and that of the score; None without one."""
    program = request.program
    if request.sizes is None or not request.storable:
        return None
    sizes = dict(request.sizes)
    for capture in (i for i in request.wanted if i in request.storable):
        shape = program.capture_types[capture].shape
        partials = roots.partials(capture)
        if len(partials) != 1:
            continue
        ((index, partial),) = partials.items()
        of_one = {name: count for name, count in sizes.items() if name != "b"}
        for sums, counts in ((False, sizes), (True, of_one)):
            if sums and not request.sums_batch:
                continue
            if is_stored(roots.graph, index, shape, partial, roots.shown_slope, counts):
                return StoredLoad(capture, index, sums)
    return None


def _diagonal_sum(roots: _Roots, request: Request) -> DiagonalSum | None:
    """What the backward kernel sums along diagonals: for the first capture whose gradient is wanted
    and whose only load has one value there, and a factor of d score that the head knows."""
    if not (request.wanted and request.sums_diagonals):
        return None
    for capture in request.wanted:
        partials = roots.partials(capture)
        if len(partials) != 1:
            continue
        ((index, partial),) = partials.items()
        weight = key_weight(roots.graph, partial, roots.shown_slope)
        if (
            any(i.deps for i in index)
            and all(map(depends_on_difference, index))
            and weight is not None
            and not weight.deps
        ):
            return DiagonalSum(capture, index, weight)
    return None


def _added(
    graph: Graph, logit: Node, slope: Node, request: Request
) -> tuple[Node | None, Start | None]:
    """(what a logit adds to the score, in log 2, what products start from), or None for each."""
    if slope is not graph.constant(1.0):
        return None, None
    addend = graph.without_score(graph.scaled(logit, LOG2_E), LOG2_E)
    added = graph.without_score(logit) if request.starts and addend is not None else None
    if added is None:
        return addend, None
    # A thread that has two keys loads what is theirs once.
    return addend, start_of(graph, added, request.starts, of_rows=request.keys_are_rows)


def _started(
    graph: Graph, logit: Node, slope: Node, request: Request
) -> tuple[Start | None, tuple[Node, Node] | None]:
    """(what products start from, logit in log 2 and slope of those that did), where what is added
    to the score goes through something else; or None for both."""
    found = graph.started(logit, slope)
    if found is None:
        return None, None
    added, (logit, slope) = found
    start = start_of(graph, added, request.starts, of_rows=request.keys_are_rows)
    return start, None if start is None else (graph.scaled(logit, LOG2_E), slope)


def _visible(graph: Graph, predicates: Sequence[Program], captures: int) -> tuple[Node | None, int]:
    """(what all predicates show, the number of captures when theirs follow so many)."""
    visible = None
    for predicate in predicates:
        shown = Builder(graph).build_predicate(predicate, captures)
        visible = shown if visible is None else graph.logical("and", visible, shown)
        captures += len(predicate.capture_types)
    return visible, captures


def _words(graph: Graph, predicates: Sequence[Program], captures: int) -> Words:
    """As `_visible`, in two parts, of predicates of which the first asks for a bit of a word."""
    first, *others = predicates
    shown = Builder(graph).build_predicate(first, captures)
    # ((load >> bit) >> further) & 1 != 0
    shifted, further = shown.args[0].args[0].args
    load, bit = shifted.args
    assert (load.op, load.dtype) == ("load", "uint32")
    beside, _ = _visible(graph, others, captures + len(first.capture_types))
    of_rows = load.args[-2].deps == ROW
    return Words(load, of_rows, graph.integer("add", bit, further), beside)
