"""A length in blocks of one size, and loops over them that write arrays block by block."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec


class Block(NamedTuple):
    """`size` neighbouring rows or columns.

    The last block is moved back to end with the array, so that nothing is padded; it then repeats
    elements before `fresh`, which belong to the block before it.
    """

    start: Any  # int32 scalar
    fresh: Any  # int32 scalar, start <= fresh
    size: int


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A length cut into blocks of one size."""

    length: int
    size: int
    count: int
    ragged: bool

    def __getitem__(self, i) -> Block:
        fresh = jnp.asarray(i, jnp.int32) * self.size
        start = jnp.minimum(fresh, self.length - self.size) if self.ragged else fresh
        return Block(start, fresh, self.size)

    def traced_once(self, function: Callable[[Block], Any]) -> Callable[[Any], Any]:
        """`function` of the block of a number, traced once however many of them are asked for."""

        @functools.partial(jax.jit, inline=True)
        def of_block(start, fresh):
            return function(Block(start, fresh, self.size))

        def of_number(i):
            block = self[i]
            return of_block(block.start, block.fresh)

        return of_number


class Visits(NamedTuple):
    """The blocks that a loop visits: numbers begin ... end - 1, or what an array has there."""

    begin: Any
    end: Any
    numbers: Any = None


def blocks(length: int, at_most: int, multiple: int = 16) -> Blocks:
    """Blocks as even as their sizes, multiples of a number, allow: the fewest elements are computed
    twice."""
    if not isinstance(length, int):  # symbolic (jax.export), at least 1
        size = jax.core.min_dim(length, at_most)
        return Blocks(length, size, -(-length // size), ragged=True)
    count = -(-length // at_most)
    size = min(-(-length // (multiple * count)) * multiple, length)
    count = -(-length // size)
    return Blocks(length, size, count, ragged=count * size != length)


def cut(x, block: Block, axis: int):
    """The block of an array along one axis; an axis of size 1 is broadcast and stays."""
    if x.shape[axis] == 1:
        return x
    return jax.lax.dynamic_slice_in_dim(x, block.start, block.size, axis % x.ndim)


def put(x, block: Block, axis: int, update):
    """`x` with its block along one axis replaced."""
    return jax.lax.dynamic_update_slice_in_dim(
        x, update.astype(x.dtype), block.start, axis % x.ndim
    )


def loop_over(visits: Visits, body, state):
    begin, end, numbers = visits
    if numbers is None:
        return loop(begin, end, body, state)
    return loop(begin, end, lambda i, state: body(numbers[i], state), state)


def loop(begin, end, body, state):
    if isinstance(begin, int) and isinstance(end, int) and end - begin == 1:
        return body(begin, state)
    begin, end = (jnp.asarray(x, jnp.int32) for x in (begin, end))
    return jax.lax.fori_loop(begin, end, body, state)


def filled(value, like, shape, dtype):
    """An array of one value for a loop to update with what comes from `like`: sharded like it in
    the axes that it shares, and varying over the same mesh axes.
    """
    of_like = jax.typeof(like)
    parts = [
        part if size == like_size else None
        for size, like_size, part in zip(shape, of_like.shape, of_like.sharding.spec, strict=False)
    ]
    sharding = None
    if any(part is not None for part in parts):
        sharding = NamedSharding(of_like.sharding.mesh, PartitionSpec(*parts))
    x = jax.lax.full(shape, value, dtype, sharding=sharding)
    axes = of_like.manual_axis_type.varying
    return jax.lax.pcast(x, tuple(axes), to="varying") if axes else x
