"""Which captures a program asks for elements of its own head alone: a device that has some of the
heads needs no others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from jaxflash._printer.node import Node
from jaxflash._printer.writer import Roots


def head_axes(roots: Roots) -> Mapping[int, int | None] | None:
    """Of each capture that is loaded the axis whose index is the head, None for one without.

    Returns:
        None where the head is more than such an index, or the loads of a capture differ.
    """
    axes: dict[int, int | None] = {}
    seen: set[Node] = set()
    left = list(_nodes(roots))
    loads = list(_indices(roots))
    while left or loads:
        while left:
            x = left.pop()
            if x in seen:
                continue
            seen.add(x)
            if _is_head(x):
                return None
            if x.op == "load":
                loads.append((x.value[0], x.args))
            else:
                left += x.args
        while loads:
            capture, index = loads.pop()
            of_head = [axis for axis, i in enumerate(index) if _is_head(i)] or [None]
            if len(of_head) > 1 or axes.setdefault(capture, of_head[0]) != of_head[0]:
                return None
            left += (i for i in index if not _is_head(i))
    return axes


def _is_head(x: Node) -> bool:
    return (x.op, x.value) == ("input", "h")


def _nodes(roots: Roots) -> Iterator[Node]:
    """What the struct computes."""
    start, words, diagonal = roots.start, roots.words, roots.diagonal_sum
    for x in (
        roots.logit, roots.slope, roots.addend, roots.visible, roots.sink, roots.capture_tangent,
        *(() if start is None else (start.neighbours, start.value, start.added)),
        *(roots.started or ()), *roots.key_weights,
        *(() if words is None else (words.load, words.bit, words.beside)),
        *(() if diagonal is None else (diagonal.weight,)), *(x.partial for x in roots.loads),
    ):  # fmt: skip
        if x is not None:
            yield x


def _indices(roots: Roots) -> Iterator[tuple[int, Sequence[Node]]]:
    """Where it adds to gradients of captures."""
    for x in (roots.stored, roots.diagonal_sum):
        if x is not None:
            yield x.capture, x.index
    for x in roots.loads:
        if not x.load.is_key_sum:
            yield x.load.capture, x.index
