"""Batch axes as the kernels count them: neighbouring ones are one, unless an array broadcasts along
some of them alone. They take a few; where there are more, arrays are copied."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxflash._sizes import is_one

# cuda/problem.h: kMaxBatchAxes.
MAX_COUNT = 8


def merged(shapes: Sequence[tuple], batch: Sequence[Any]) -> list[tuple]:
    """For each array (*#batch, ...) of a call the leading axes with which kernels take it: its own,
    or more of them of full size, so that neighbours count as one. Few elements are copied then."""
    rank = len(batch)
    lead = [list(shape[:rank]) for shape in shapes]
    if rank <= MAX_COUNT:
        return list(map(tuple, lead))
    axes = [axis for axis, n in enumerate(batch) if not is_one(n)]

    def broadcast(axis: int) -> tuple[bool, ...]:
        return tuple(is_one(sizes[axis]) for sizes in lead)

    def copies(left: list[int], right: list[int]) -> list[tuple[int, list[int]]]:
        """(array, axes along which it is copied) where two neighbours become one."""
        pairs = zip(broadcast(left[0]), broadcast(right[0]), strict=True)
        return [
            (i, left if of_left else right)
            for i, (of_left, of_right) in enumerate(pairs)
            if of_left != of_right
        ]

    def cost(neighbours: tuple[list[int], list[int]]) -> int:
        return sum(
            _elements((*lead[i], *shapes[i][rank:], *(batch[axis] for axis in along)))
            for i, along in copies(*neighbours)
        )

    while True:
        counted = [list(of_one) for _, of_one in itertools.groupby(axes, broadcast)]
        if len(counted) <= MAX_COUNT:
            return list(map(tuple, lead))
        for i, along in copies(*min(itertools.pairwise(counted), key=cost)):
            for axis in along:
                lead[i][axis] = batch[axis]


def with_lead(arrays: Sequence[Any], leads: Sequence[tuple]) -> list[Any]:
    """The arrays with these leading axes."""
    return [
        x if x.shape[: len(lead)] == lead else jnp.broadcast_to(x, (*lead, *x.shape[len(lead) :]))
        for x, lead in zip(arrays, leads, strict=True)
    ]


def _elements(sizes) -> int:
    """Without those that are symbolic."""
    return math.prod(n for n in sizes if isinstance(n, int))
