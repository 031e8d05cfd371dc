"""The blockwise path on one CPU: a batch in parts, so that what a tile computes stays in caches.

A tile of `_blockwise` spans all batch elements, and all that `jax.vmap` maps over, so that axes
keep their sharding. A program of one device has none to keep, and tiles of few batch elements take
down to half of the time.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxflash import _blockwise, _short
from jaxflash._loops import Block, Blocks, blocks, cut, filled, loop, put
from jaxflash._spec import AttentionSpec, Operands, compute_dtype

# Logits of a part's tile, for each core; where those of all elements together are no more than
# _AT_ONCE, there are no parts. Two cores of a server CPU, float32, ms of forward and gradients in
# such parts, at once, and with jax.nn's xla in the same run:
#   (16, 197, 197, 12, 64)    19, 53;     45, 110;     46, 91
#   (16, 128, 128, 12, 64)    9.0, 25;    12, 50;      12, 39
#   (64, 64, 64, 8, 64)       9.3, 27;    9.9, 34;     10, 31
_ELEMENTS = 1 << 18
_AT_ONCE = _blockwise.TILE_ELEMENTS
# Of fewer queries it takes longer to cut their keys than to use them: 8 elements of 4096 keys, 135
# and 315 ms at once, 195 and 601 one by one.
_FEW_ROWS = 16

# What has no batch axes.
_SHARED = ("sink", "dropout_seed", "scale")


def forward(spec: AttentionSpec, operands: Operands):
    """What `_blockwise.forward` returns."""

    def of_part(block: Block):
        return _blockwise.forward(spec, _part(operands, block)), ()

    parts = _parts(spec, operands)
    if parts is None:
        return _short.forward(spec, operands)
    return _in_turn(parts, operands.query, of_part)[0]


def backward(
    spec: AttentionSpec, operands: Operands, out, lse, dout, dlse, wanted: frozenset[str]
) -> Operands:
    """What `_blockwise.backward` returns."""
    parts = _parts(spec, operands)
    if parts is None:
        return _short.backward(spec, operands, out, lse, dout, dlse, wanted)
    given = operands.named()
    in_parts = wanted - {"sink"}
    # Captures that batch elements share: all parts add to their gradients, which are not rounded in
    # between, and none may have an element of another one.
    shared = [name for name in in_parts if given[name].shape[0] != parts.length]
    if shared:
        size = next(n for n in range(parts.size, 0, -1) if parts.length % n == 0)
        parts = blocks(parts.length, size, multiple=1)
    dtypes = {name: compute_dtype(operands.query.dtype, given[name].dtype) for name in shared}
    wide = operands.replacing({name: given[name].astype(dtypes[name]) for name in shared})

    def of_part(block: Block):
        out_here, lse_here, dout_here, dlse_here = (
            None if x is None else cut(x, block, 0) for x in (out, lse, dout, dlse)
        )
        part = _part(wide, block)
        gradients = _blockwise.backward(
            spec, part, out_here, lse_here, dout_here, dlse_here, in_parts
        ).named()
        sums = {name: gradients.pop(name) for name in shared}
        return gradients, sums

    gradients = {}
    if in_parts:
        gradients, sums = _in_turn(parts, operands.query, of_part)
        gradients |= {name: x.astype(given[name].dtype) for name, x in sums.items()}
    if "sink" in wanted:
        gradients["sink"] = _blockwise.sink_gradient(operands, out, lse, dout, dlse)
    return operands.holding(gradients)


def tangent(spec: AttentionSpec, operands: Operands, out, lse, tangents: dict[str, Any]):
    """What `_blockwise.tangent` returns."""

    def of_part(block: Block):
        out_here, lse_here = (cut(x, block, 0) for x in (out, lse))
        moved = {name: _cut(name, x, block) for name, x in tangents.items()}
        return _blockwise.tangent(spec, _part(operands, block), out_here, lse_here, moved), ()

    parts = _parts(spec, operands)
    if parts is None:
        return _blockwise.tangent(spec, operands, out, lse, tangents)
    return _in_turn(parts, operands.query, of_part)[0]


def mapped(
    spec: AttentionSpec,
    one: Operands,
    op: Callable[..., list],
    in_axes: Sequence[int | None],
    args: Sequence[Any],
) -> list:
    """What `jax.vmap` of `op` gives, a pass over a call of operands of the types `one`."""
    count = next(x.shape[axis] for x, axis in zip(args, in_axes, strict=True) if axis is not None)
    of_all = jax.vmap(op, in_axes)
    parts = _of_calls(spec, one, count) if _is_whole(args[0]) else None
    if parts is None:
        return of_all(*args)

    def of_part(block: Block):
        cut_along = functools.partial(
            jax.lax.dynamic_slice_in_dim, start_index=block.start, slice_size=block.size
        )
        return of_all(
            *(
                x if axis is None else cut_along(x, axis=axis)
                for x, axis in zip(args, in_axes, strict=True)
            )
        ), ()

    return _in_turn(parts, args[0], of_part)[0]


def divides(spec: AttentionSpec, operands: Operands, calls: int) -> bool:
    """Whether there is something to be divided: a batch of operands of such types, or the calls
    with operands like these that `jax.vmap` maps."""
    of_batch, of_calls = _of_batch(spec, operands), _of_calls(spec, operands, calls)
    return of_batch is not None or of_calls is not None


def _parts(spec: AttentionSpec, operands: Operands) -> Blocks | None:
    """Parts of the first batch axis, if there are to be more than one."""
    return _of_batch(spec, operands) if _is_whole(operands.query) else None


def _of_batch(spec: AttentionSpec, operands: Operands) -> Blocks | None:
    query = operands.query
    if len(query.shape) == 3 or operands.query_boundaries is not None:
        return None
    first = {
        name: x if name in _SHARED else jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)
        for name, x in operands.named().items()
    }
    return _of_calls(spec, operands.replacing(first), query.shape[0])


def _is_whole(x) -> bool:
    """Whether the type of an array tells of no mesh."""
    return jax.typeof(x).sharding.mesh.empty


def _of_calls(spec: AttentionSpec, one: Operands, count) -> Blocks | None:
    """Parts of so many calls with such operands, if there are to be more than one."""
    *lead, q_len, heads, _ = one.query.shape
    sizes = (*lead, heads, q_len, one.key.shape[-3])
    is_known = all(isinstance(n, int) and n > 0 for n in (count, *sizes))
    if not is_known or one.query_boundaries is not None:
        return None
    rows, columns = _blockwise.tiling(spec, one)
    elements = math.prod(lead) * heads * rows.size * columns.size
    if count * elements <= _AT_ONCE or rows.size < _FEW_ROWS:
        return None
    parts = blocks(count, max(_cores() * _ELEMENTS // elements, 1), multiple=1)
    return parts if parts.count > 1 else None


def _cores() -> int:
    """How many there are for this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cut(name: str, x, block: Block):
    return x if name in _SHARED else cut(x, block, 0)


def _part(operands: Operands, block: Block) -> Operands:
    part = {name: _cut(name, x, block) for name, x in operands.named().items()}
    first = block.start * math.prod(operands.query.shape[1:-3])
    return operands.replacing(part)._replace(first_element=first)


def _in_turn(parts: Blocks, like, of_part: Callable[[Block], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Of two pytrees of each part: the first ones along their first axes, the others added up."""

    def empty(shape, x):
        return filled(0, like, shape, x.dtype)

    of_number = parts.traced_once(of_part)

    def body(i, state):
        (results, sums), block = state, parts[i]
        of, added = of_number(i)
        results = jax.tree.map(lambda x, of: put(x, block, 0, of), results, of)
        return results, jax.tree.map(jnp.add, sums, added)

    results, sums = jax.eval_shape(lambda: of_number(0))
    results = jax.tree.map(lambda x: empty((parts.length, *x.shape[1:]), x), results)
    sums = jax.tree.map(lambda x: empty(x.shape, x), sums)
    return loop(0, parts.count, body, (results, sums))
