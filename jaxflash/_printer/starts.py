"""What the accumulators of products start from, where a logit adds what is known before them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

from jaxflash._printer.graph import Graph
from jaxflash._printer.node import COLUMN, DISTANCE, FLOATS, ROW, Node, below, linear

# Quotients of larger ones might overflow, where the sum does not.
_MAX_CONSTANT = 1e30


@dataclasses.dataclass(frozen=True)
class Start:
    """An addend over the scale, as the kernels are to begin with.

    Attributes:
        neighbours: the one load of a capture that has an element for each key: a thread loads those
            of all its elements at once.
        value: in units of the products; of `neighbours` it knows the input `neighbour`.
        added: what it is made of, in units of the logits.
    """

    neighbours: Node
    value: Node
    added: Node

    @property
    def is_of_key(self) -> bool:
        """Whether all queries of a head start from the same."""
        return not self.added.deps & (ROW | DISTANCE)

    @property
    def is_of_head(self) -> bool:
        return any((x.op, x.value) == ("input", "h") for x in below(self.added))

    @property
    def follows_queries(self) -> bool:
        """Whether the row of a query is the one after that of the query before."""
        if len(self.neighbours.args) < 2:
            return False
        *others, row, _ = self.neighbours.args
        return (row.op, row.value) == ("input", "q") and all(i.deps == 0 for i in others)

    @property
    def is_of_batch(self) -> bool:
        """Whether batch elements may have rows of their own even in a capture that has no axes for
        them: by their number, or by what another capture says."""
        nodes = set[Node]().union(*map(below, self.neighbours.args))
        return any(x.op == "load" or (x.op, x.value) == ("input", "b") for x in nodes)


@dataclasses.dataclass(frozen=True)
class Slopes:
    """An addend that is proportional to the distance, on each side of a query.

    Attributes:
        before: by which number where keys come before the query.
        behind: where they come behind it.
    """

    before: Node
    behind: Node

    @property
    def is_of_head(self) -> bool:
        nodes = below(self.before) | below(self.behind)
        return any((x.op, x.value) == ("input", "h") for x in nodes)


def slopes_of(graph: Graph, addend: Node, sides: Sequence[str]) -> Slopes | None:
    """Of an addend, of keys on these sides; None where it is something else."""
    constant, terms = linear(addend)
    if constant != 0.0 or not terms or not sides:
        return None
    slopes: dict[str, Node] = {"before": graph.constant(0.0), "behind": graph.constant(0.0)}
    for term, coefficient in terms.items():
        factors = term.args if term.op == "product" else (term,)
        of_distance = [x for x in map(_slopes_of_factor, factors) if x is not None]
        others = [x for x in factors if _slopes_of_factor(x) is None]
        if len(of_distance) != 1 or any(x.deps for x in others):
            return None
        slope = graph.constant(coefficient)
        for x in others:
            slope = graph.multiply(slope, x)
        for side, factor in of_distance[0].items():
            slopes[side] = graph.add(slopes[side], graph.scaled(slope, factor))
    return Slopes(*(slopes[x if x in sides else sides[0]] for x in slopes))


def _slopes_of_factor(x: Node) -> dict[str, float] | None:
    """Of the distance, times a number, or of the absolute value of that."""
    is_absolute = x.op == "abs"
    constant, terms = linear(x.args[0] if is_absolute else x)
    if constant != 0.0 or [(t.op, t.value) for t in terms] != [("input", "distance")]:
        return None
    (factor,) = terms.values()
    if is_absolute:
        return {"before": abs(factor), "behind": -abs(factor)}
    return {"before": factor, "behind": factor}


def is_of_neighbours(x: Node, paired: Collection[int]) -> bool:
    """Whether a load is of neighbours of a thread: in a `paired` capture, side by side along the
    last axis."""
    capture, dtype = x.value
    if capture not in paired or dtype not in FLOATS:
        return False
    *others, last = x.args
    return (last.op, last.value) == ("input", "kv") and all(i.deps in (0, ROW) for i in others)


def start_of(
    graph: Graph, addend: Node, paired: Collection[int], *, of_rows: bool = False
) -> Start | None:
    """Of an addend; None where it does not have one such load, in terms or as a factor of them.
    `of_rows`: only where rows have loads of their own."""
    nodes = below(addend)
    of_neighbours = [x for x in nodes if x.op == "load" and is_of_neighbours(x, paired)]
    if of_rows and not any(x.deps & ROW for x in of_neighbours):
        return None
    if len(of_neighbours) != 1 or any(map(_has_large_number, nodes)):
        return None
    value = _over_scale(graph, addend, of_neighbours[0])
    return None if value is None else Start(of_neighbours[0], value, addend)


def _has_large_number(x: Node) -> bool:
    numbers = [x.value] if x.op == "constant" and x.dtype == "float32" else []
    if x.op == "sum":
        constant, coefficients = x.value
        numbers = [constant, *coefficients]
    return any(_MAX_CONSTANT < abs(number) < math.inf for number in numbers)


def _over_scale(graph: Graph, addend: Node, load: Node) -> Node | None:
    neighbour = graph.input("neighbour", "float32", ROW | COLUMN)
    reciprocal = graph.atom("reciprocal", graph.input("scale", "float32", 0))
    if addend.op == "select":
        condition, *branches = addend.args
        yes, no = (_over_scale(graph, x, load) for x in branches)
        if load in below(condition) or yes is None or no is None:
            return None
        return graph.select(condition, yes, no)
    constant, terms = linear(addend)
    value = graph.scaled(reciprocal, constant) if constant else graph.constant(0.0)
    for term, coefficient in terms.items():
        product = reciprocal
        for factor in term.args if term.op == "product" else (term,):
            if factor is load:
                factor = neighbour
            elif load in below(factor):
                return None
            product = graph.multiply(product, factor)
        value = graph.add(value, graph.scaled(product, coefficient))
    return value
