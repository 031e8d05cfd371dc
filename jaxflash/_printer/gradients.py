"""How the gradient of a captured array is divided, as cuda/common/capture_gradient.h has it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxflash._printer import CAPTURE_DTYPES
from jaxflash._printer.graph import Graph
from jaxflash._printer.node import (
    SCORE,
    Node,
    depends_on_difference,
    is_along_diagonals,
    is_finite,
    multiple_of,
)
from jaxflash._sizes import at_most

# Elements of the gradient that blocks own side by side, each of which looks for its heads.
_MAX_SLICES = 1 << 16
# Elements of a gradient that has a block for every multiprocessor, for tiles of 128 x 128.
_MIN_NARROW = 1 << 23


@dataclasses.dataclass(frozen=True)
class Load:
    """How the gradient of one load of a captured array is computed.

    Attributes:
        capture: number of the capture.
        query_axis: its axis whose index is q, each value of which one row has; or -1.
        key_axis: its axis whose index is kv, likewise.
        scattered: why nothing orders the additions, in words that follow "an array that is read";
            empty where blocks own its elements.
        diagonal: whether nothing does, and indices depend on q and kv through their difference
            alone.
        narrow: whether the gradient has the capture's dtype, not float32.
        stored: whether it is the gradient of the score, which the backward kernel may store.
        summed: whether backward kernels may compute it themselves: it is the only load of its
            capture, and the only such one.
        sums_batch: whether what is stored is the sum over the batch elements.
    """

    capture: int
    query_axis: int
    key_axis: int
    scattered: str
    diagonal: bool
    narrow: bool
    stored: bool = False
    summed: bool = False
    sums_batch: bool = False

    @property
    def scatter(self) -> bool:
        """Whether nothing orders the additions."""
        return bool(self.scattered)

    @property
    def numbers(self) -> tuple[int, ...]:
        """What the custom call is told of it: `BackwardAttributes` in cuda/ffi/attributes.h."""
        return (
            self.capture, self.query_axis, self.key_axis, self.scatter, self.narrow, self.stored,
            self.summed, self.sums_batch,
        )  # fmt: skip

    @property
    def is_key_sum(self) -> bool:
        """Whether it stands for a sum over the queries: for each head, and key."""
        return self.capture < 0


@dataclasses.dataclass(frozen=True)
class LoadRoots:
    """A load as the struct has it.

    Attributes:
        load: see there.
        dtype: of the capture.
        index: for each axis of the capture.
        partial: d logit / d loaded value, in natural units.
    """

    load: Load
    dtype: str
    index: tuple[Node, ...]
    partial: Node

    @classmethod
    def of(
        cls,
        capture: int,
        array,
        index: tuple[Node, ...],
        partial: Node,
        lengths,
        *,
        alone: bool,
        stored: StoredLoad | None,
    ) -> LoadRoots:
        """A load of a capture of some type, in a call of `lengths`, of queries and of keys; `alone`
        if the capture has no other, `stored` if that is it."""
        axes = [-1, -1]
        scattered = ""
        for axis, i in enumerate(index):
            if i.op == "input" and i.value in ("q", "kv"):
                which = ("q", "kv").index(i.value)
                if axes[which] >= 0:
                    scattered = f"at {i.value} in two axes"
                elif at_most(lengths[which], array.shape[axis]):
                    axes[which] = axis
                else:
                    # Where clamping brings several rows to one element, they do not own it.
                    scattered = f"at {i.value} along an axis that is not as long as the call"
            elif i.deps:
                scattered = "at an index computed of q or kv"
        slices = math.prod(n for axis, n in enumerate(array.shape) if axis not in axes)
        if not scattered and not at_most(slices, _MAX_SLICES):
            scattered = (
                f"and whose axes that neither q nor kv indexes have {slices} elements (blocks own "
                f"at most {_MAX_SLICES})"
            )
        query_axis, key_axis = (-1, -1) if scattered else axes
        diagonal = bool(scattered) and all(map(depends_on_difference, index))
        dtype = str(array.dtype)
        # Each element is stored once, by one of many blocks.
        once = query_axis >= 0 and key_axis >= 0 and alone and dtype != "float32"
        is_stored = stored is not None
        narrow = is_stored or (once and at_most(_MIN_NARROW, math.prod(array.shape)))
        load = Load(
            capture, query_axis, key_axis, scattered, diagonal, narrow, is_stored,
            sums_batch=is_stored and stored.sums_batch,
        )  # fmt: skip
        return cls(load, dtype, index, partial)

    @classmethod
    def of_key_sum(cls, key_sum: KeySum) -> LoadRoots:
        """As if an array (heads, keys) of each batch element had been added, with that factor."""
        load = Load(-1, -1, 1, scattered="", diagonal=False, narrow=False)
        return cls(load, "float32", (), key_sum.partial)

    @property
    def result(self) -> str:
        """C++ type of the gradient's elements."""
        return CAPTURE_DTYPES[self.dtype] if self.load.narrow else "float"


@dataclasses.dataclass(frozen=True)
class KeyLoad:
    """A load of a captured array whose gradient is made of a sum over the queries, for each batch
    element, head and key, that the backward kernel computes.

    Attributes:
        capture: number of the capture.
        sum: number of the sum.
        axes: for each axis of the capture which number is its index: "b", "h" or "kv"; None for one
            of size 1.
    """

    capture: int
    sum: int
    axes: tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class KeySum:
    """A sum over the queries.

    Attributes:
        weight: of d score, the product of d logit with the slope; finite, and without the score.
        partial: of d logit: weight times slope.
    """

    weight: Node
    partial: Node


@dataclasses.dataclass(frozen=True)
class StoredLoad:
    """The load of a captured array whose gradient is that of the score, element by element.

    Attributes:
        capture: number of the capture.
        index: for each axis of the capture; the last two are the query's and the key's.
        sums_batch: whether it is that of the sum of the scores of all batch elements.
    """

    capture: int
    index: tuple[Node, ...]
    sums_batch: bool


@dataclasses.dataclass(frozen=True)
class DiagonalSum:
    """A sum of d score along diagonals.

    Attributes:
        capture: to the gradient of which it is added.
        index: of the element.
        weight: its factor, which the head knows.
    """

    capture: int
    index: tuple[Node, ...]
    weight: Node

    @property
    def has_buckets(self) -> bool:
        """Whether several diagonals may have one element."""
        *others, last = self.index
        last = last.args[0] if last.op == "wrap" else last
        return any(i.deps for i in others) or not is_along_diagonals(last)


def is_stored(
    graph: Graph,
    index: tuple[Node, ...],
    shape: tuple,
    partial: Node,
    slope: Node,
    sizes: Mapping[str, Any],
) -> bool:
    """Whether each element of the score's gradient is that of another element of a capture, a
    matrix of queries and keys for each head: `sizes` as of `key_axes`."""
    *others, q, kv = index
    if (q.op, q.value, kv.op, kv.value) != ("input", "q", "input", "kv"):
        return False
    counts = {name: count for name, count in sizes.items() if name != "kv"}
    axes = key_axes(tuple(others), shape[:-2], counts)
    if axes is None or not all(name in axes or count == 1 for name, count in counts.items()):
        return False
    return key_weight(graph, partial, slope) is graph.constant(1.0)


def key_axes(
    index: tuple[Node, ...], shape: tuple, sizes: Mapping[str, Any]
) -> tuple[str | None, ...] | None:
    """The axes of a `KeyLoad`, given how many numbers of each kind there are; None for an index
    that has none, or whose numbers an axis does not hold exactly."""
    axes: list[str | None] = []
    for i, extent in zip(index, shape, strict=True):
        name = i.value if i.op == "input" and i.value in sizes else None
        count = 1 if name is None else sizes[name]
        if name in axes and name is not None:
            return None
        if name is None and not (i.op == "constant" and i.value == 0):
            return None
        if not (at_most(count, extent) and at_most(extent, count)):
            return None
        axes.append(name)
    return tuple(axes)


def key_weight(graph: Graph, partial: Node, slope: Node) -> Node | None:
    """What d score is multiplied with to get a term of a gradient; None if there is no such factor
    without the score, or one that may not be finite where there is no probability."""
    if slope is graph.constant(1.0):
        weight = partial
    else:
        # What is added to the score itself, or a multiple of it, has a multiple of the slope.
        factor = multiple_of(partial, slope)
        if factor is None:
            return None
        weight = graph.constant(factor)
    return None if weight.deps & SCORE or not is_finite(weight) else weight
