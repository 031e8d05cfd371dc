"""From a score program to the struct that the kernels are compiled with."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

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
from jaxflash._printer.starts import Start, start_of
from jaxflash._printer.writer import Roots, Words, Writer
from jaxflash._scores import Program


@dataclasses.dataclass(frozen=True)
class Printed:
    """A program for the kernels.

    Attributes:
        source: the C++ struct.
        numbered: whether it asks for the numbers of batch element and head.
        unit_slope: the logit is the score plus what does not depend on it.
        exact_length: number of rows and columns up to which differences of their numbers are
            computed exactly, or None without a limit.
        start_capture: the capture that products start from, if its row of a query is the one after
            that of the query before.
        key_terms: whether they start from what depends on the key alone: of all heads "together",
            or of each "head".
        head_axes: see `heads.head_axes`; sink and dropout count, too.
    """

    source: str
    numbered: bool
    unit_slope: bool
    exact_length: int | None
    start_capture: int | None
    key_terms: Literal["together", "head"] | None
    head_axes: Mapping[int, int | None] | None


def print_program(
    program: Program,
    predicates: Sequence[Program] = (),
    *,
    distance_is_difference: bool,
    sink_dtype: str | None = None,
    drops: bool = False,
    paired: Collection[int] = (),
    starts: Collection[int] = (),
    moving: Sequence[int] = (),
    words: bool = False,
    keys_are_rows: bool = False,
    wanted: Sequence[int] = (),
    sizes: Mapping[str, Any] | None = None,
    storable: Collection[int] = (),
    sums_batch: bool = False,
    sums_diagonals: bool = False,
) -> Printed:
    """The struct `jaxflash::Program` for a score program.

    Args:
        program: of float32 scores.
        predicates: of bools, which all have to show an element. Their captures follow those of the
            program.
        distance_is_difference: whether `distance` is q - kv in this call.
        sink_dtype: of the sink's logits (heads), the capture after those; or None.
        drops: whether the last capture is `_dropout.kernel_parameters`.
        paired: captures whose last axis has an even number of elements, one for each key, in a pass
            whose threads have neighbouring keys of a row.
        starts: captures of such rows that are all loaded before the products, if these can start
            from what the logit adds to them, over the scale: that is neither 0 nor so small that
            quotients overflow.
        moving: captures of the program whose tangents are the captures after those of the
            predicates.
        words: whether the first predicate is a `_scores.dense_predicate` of words of keys.
        keys_are_rows: whether threads have many queries of few keys, as in the backward pass.
        wanted: captures of the program whose gradients are wanted, in the backward pass.
        sizes: as for `print_gradients`.
        storable: likewise.
        sums_batch: likewise.
        sums_diagonals: likewise.

    Raises:
        NotPrintable: the text says why, naming the equation.
    """
    graph = Graph(distance_is_difference)
    logit, slope = Builder(graph).build(program)
    slope = graph.shown(slope, logit)
    sink = None
    visible, captures = _visible(graph, predicates, len(program.capture_types))
    in_words = _words(graph, predicates, len(program.capture_types)) if words else None
    tangent = graph.constant(0.0)
    for capture in moving:
        dtype = str(program.capture_types[capture].dtype)
        for index, partial in Builder(graph).build_partials(program, capture)[1].items():
            moved = graph.multiply(graph.shown(partial, logit), graph.load(captures, dtype, index))
            tangent = graph.add(tangent, moved)
        captures += 1
    if sink_dtype is not None:
        head = graph.input("h", "int32", 0)
        sink = graph.load(captures, sink_dtype, (head,))
        captures += 1
        sink = graph.scaled(sink, LOG2_E)
    addend, start = _added(graph, logit, slope, starts, keys_are_rows)
    started = None
    if addend is None and starts:
        start, started = _started(graph, logit, slope, starts, keys_are_rows)
    logit = graph.scaled(logit, LOG2_E)
    capture_tangent = tangent if moving else None
    sums, _ = _key_sums(graph, program, wanted, sizes)
    weights = tuple(x.weight for x in sums)
    stored = _stored(graph, program, wanted, sizes, storable, sums_batch)
    along = _diagonal_sum(graph, program, wanted) if sums_diagonals else None
    roots = Roots(
        logit, slope, addend, visible, in_words, sink, capture_tangent, start, started, weights,
        stored, along, paired=paired,
    )  # fmt: skip
    writer = Writer(graph, roots)
    dropout = captures if drops else None
    return Printed(
        writer.struct(dropout),
        numbered=writer.asks_for_numbers(dropout),
        unit_slope=addend is not None,
        exact_length=1 << 24 if graph.subtracts_positions else None,
        start_capture=start.neighbours.value[0] if start and start.follows_queries else None,
        key_terms=_key_terms(start),
        head_axes=None if drops else head_axes(roots),
    )


def _key_terms(start: Start | None) -> Literal["together", "head"] | None:
    if start is None or not start.is_of_key:
        return None
    return "head" if start.is_of_head else "together"


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


def print_gradients(
    program: Program,
    captures: Sequence[int],
    predicates: Sequence[Program] = (),
    *,
    lengths: tuple,
    distance_is_difference: bool,
    dropout: int | None = None,
    paired: Collection[int] = (),
    starts: Collection[int] = (),
    sizes: Mapping[str, Any] | None = None,
    storable: Collection[int] = (),
    sums_batch: bool = False,
    sums_diagonals: bool = False,
) -> PrintedGradients:
    """The struct `jaxflash::Program` with a struct for each load of some captures.

    Args:
        program: of float32 scores.
        captures: numbers of captures of the program, of floats.
        predicates: as for `print_program`.
        lengths: of queries and of keys.
        distance_is_difference: as for `print_program`.
        dropout: the number of `_dropout.kernel_parameters` among the captures, or None.
        paired: as for `print_program`.
        starts: as for `print_program`.
        sizes: how many numbers "b", "h" and "kv" there are, without those that a capture's gradient
            must not be indexed by; None: no sums over the queries.
        storable: captures whose last axes are those of queries and keys, and whose gradients have
            the form in which the backward kernel has that of the score. They have an element of
            their own for each batch element, or are asked for it by "b".
        sums_batch: whether it can also have the sum of all batch elements.
        sums_diagonals: whether backward kernels may add sums along diagonals to a gradient.

    Raises:
        NotPrintable: the text says why, naming the equation.
    """
    graph = Graph(distance_is_difference)
    loads: list[LoadRoots] = []
    logit, slope = Builder(graph).build(program)
    sums, key_loads = _key_sums(graph, program, captures, sizes)
    summed = {x.capture for x in key_loads}
    stored = _stored(graph, program, captures, sizes, storable, sums_batch)
    for capture in (i for i in captures if i not in summed):
        array = program.capture_types[capture]
        partials = _partials(graph, program, capture)
        loads += [
            LoadRoots.of(
                capture,
                array,
                index,
                partial,
                lengths,
                alone=len(partials) == 1,
                stored=stored if stored and stored.capture == capture else None,
            )
            for index, partial in partials.items()
        ]
    along = _diagonal_sum(graph, program, captures) if sums_diagonals else None
    if along is not None:
        (at,) = (i for i, x in enumerate(loads) if x.load.capture == along.capture)
        load = dataclasses.replace(loads[at].load, summed=True)
        loads[at] = dataclasses.replace(loads[at], load=load)
    visible, _ = _visible(graph, predicates, len(program.capture_types))
    addend, start = _added(graph, logit, slope, starts)
    roots = Roots(
        graph.scaled(logit, LOG2_E),
        slope,
        addend,
        visible,
        start=start,
        loads=(*loads, *(LoadRoots.of_key_sum(x) for x in sums)),
        paired=paired,
    )
    writer = Writer(graph, roots)
    return PrintedGradients(
        writer.struct(dropout),
        writer.asks_for_numbers(dropout),
        tuple(x.load for x in loads),
        len(sums),
        tuple(key_loads),
        head_axes(roots) if dropout is None else None,
    )


def _partials(graph: Graph, program: Program, capture: int) -> dict[tuple[Node, ...], Node]:
    """d logit / d loaded value by the indices of the loads of a capture, where it is not 0."""
    logit, partials = Builder(graph).build_partials(program, capture)
    shown = {i: graph.shown(x, logit) for i, x in partials.items()}
    return {i: x for i, x in shown.items() if x is not graph.constant(0.0)}


def _key_sums(
    graph: Graph, program: Program, captures: Sequence[int], sizes: Mapping[str, Any] | None
) -> tuple[list[KeySum], list[KeyLoad]]:
    """The sums over the queries that the backward kernel computes for gradients of some captures,
    and the loads that they serve: all those of a capture, or none."""
    sums: dict[Node, KeySum] = {}
    loads: list[KeyLoad] = []
    if sizes is None or not captures:
        return [], []
    logit, slope = Builder(graph).build(program)
    slope = graph.shown(slope, logit)
    for capture in captures:
        shape = program.capture_types[capture].shape
        partials = _partials(graph, program, capture)
        axes = [a for index in partials if (a := key_axes(index, shape, sizes)) is not None]
        weights = [w for x in partials.values() if (w := key_weight(graph, x, slope)) is not None]
        if not len(axes) == len(weights) == len(partials):
            continue
        more = {w: KeySum(w, x) for w, x in zip(weights, partials.values(), strict=True)}
        if len({**sums, **more}) > MAX_KEY_SUMS:
            continue
        sums |= more
        numbers = {w: number for number, w in enumerate(sums)}
        loads += [KeyLoad(capture, numbers[w], a) for w, a in zip(weights, axes, strict=True)]
    return list(sums.values()), loads


def _stored(
    graph: Graph,
    program: Program,
    captures: Sequence[int],
    sizes: Mapping[str, Any] | None,
    storable: Collection[int],
    sums_batch: bool,
) -> StoredLoad | None:
    """The first of some captures whose gradient is that of the score; None without one."""
    if sizes is None or not storable:
        return None
    logit, slope = Builder(graph).build(program)
    slope = graph.shown(slope, logit)
    for capture in (i for i in captures if i in storable):
        shape = program.capture_types[capture].shape
        partials = _partials(graph, program, capture)
        if len(partials) != 1:
            continue
        ((index, partial),) = partials.items()
        of_one = {name: count for name, count in sizes.items() if name != "b"}
        for sums, counts in ((False, sizes), (True, of_one)):
            if sums and not sums_batch:
                continue
            if is_stored(graph, index, shape, partial, slope, counts):
                return StoredLoad(capture, index, sums)
    return None


def _diagonal_sum(graph: Graph, program: Program, captures: Sequence[int]) -> DiagonalSum | None:
    """What the backward kernel sums along diagonals: for the first of some captures whose only load
    has one value there, and a factor of d score that the head knows."""
    if not captures:
        return None
    logit, slope = Builder(graph).build(program)
    slope = graph.shown(slope, logit)
    for capture in captures:
        partials = _partials(graph, program, capture)
        if len(partials) != 1:
            continue
        ((index, partial),) = partials.items()
        weight = key_weight(graph, partial, slope)
        if (
            any(i.deps for i in index)
            and all(map(depends_on_difference, index))
            and weight is not None
            and not weight.deps
        ):
            return DiagonalSum(capture, index, weight)
    return None


def _added(
    graph: Graph, logit: Node, slope: Node, starts: Collection[int], keys_are_rows: bool = False
) -> tuple[Node | None, Start | None]:
    """(what a logit adds to the score, in log 2, what products start from), or None for each."""
    if slope is not graph.constant(1.0):
        return None, None
    addend = graph.without_score(graph.scaled(logit, LOG2_E))
    added = graph.without_score(logit) if starts and addend is not None else None
    if added is None:
        return addend, None
    # A thread that has two keys loads what is theirs once.
    return addend, start_of(graph, added, starts, of_rows=keys_are_rows)


def _started(
    graph: Graph, logit: Node, slope: Node, starts: Collection[int], keys_are_rows: bool
) -> tuple[Start | None, tuple[Node, Node] | None]:
    """(what products start from, logit in log 2 and slope of those that did), where what is added
    to the score goes through something else; or None for both."""
    found = graph.started(logit, slope)
    if found is None:
        return None, None
    added, (logit, slope) = found
    start = start_of(graph, added, starts, of_rows=keys_are_rows)
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
