"""Which captures a program asks for elements of its own head alone: a device that has some of the
heads needs no others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxflash._printer.node import Node
from jaxflash._printer.sections import Section


def head_axes(sections: Sequence[Section]) -> Mapping[int, int | None] | None:
    """Of each capture that is loaded the axis whose index is the head, None for one without.

    Returns:
        None where the head is more than such an index, or the loads of a capture differ.
    """
    if any(x.asks_for_numbers for x in sections):
        return None
    axes: dict[int, int | None] = {}
    seen: set[Node] = set()
    left = [node for x in sections for node in x.nodes()]
    loads = [load for x in sections for load in x.indices()]
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
