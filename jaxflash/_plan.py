"""What the kernels can skip of a predicate: keys before the first and behind the last one that it
shows some of 64 rows, blocks between them, rows likewise for 64 keys, and its evaluation where it
shows everything. Found in one pass over it on the device.

It is evaluated once for all batch elements and heads where it does not ask for them. On CUDA a
kernel does that; elsewhere a block of rows is evaluated against all keys at a time, in memory
linear in the lengths but for two bools for each 64 rows and 64 keys.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxflash import _jaxpr, _ranges
from jaxflash._loops import Block, blocks, cut, filled, loop, put
from jaxflash._mask import Sizes
from jaxflash._program import ARGUMENTS, Program
from jaxflash._ranges import BLOCK, Shown
from jaxflash._sizes import is_one
from jaxflash._spec import PLANNED, AttentionSpec, Operands
from jaxflash._tile import Tiles

# Elements that are evaluated at a time, or twice as many where these are all.
_BLOCK_ELEMENTS = 1 << 26


def with_plan(
    spec: AttentionSpec,
    operands: Operands,
    shown: Callable[[AttentionSpec, Sizes, Sequence[Any]], Sequence[Any]],
) -> Operands:
    """The operands with those of `PLANNED`, of the predicate and of the band of the spec, if there
    is a predicate and no plan that the caller made: for all passes of the call. `shown`: that of
    this module, or another that does the same."""
    has_plan = operands.rows_hull is not None
    if spec.predicate is None or has_plan or 0 in (*operands.query.shape, *operands.key.shape):
        return operands
    # A band of each sequence's own would be a pass for each sequence.
    lengths = operands.query_seq_lengths, operands.key_value_seq_lengths
    if spec.bottom_right and any(x is not None for x in lengths):
        spec = dataclasses.replace(spec, left=None, right=None)
    # Calls that differ in other things have one plan.
    spec = AttentionSpec(
        scale=1.0,
        left=spec.left,
        right=spec.right,
        bottom_right=spec.bottom_right,
        logits_soft_cap=None,
        dropout_rate=0.0,
        highest_precision=False,
        deterministic_backward=False,
        predicate=spec.predicate,
    )
    *batch, q_len, heads, _ = operands.query.shape
    sizes = Sizes(tuple(batch), heads, q_len, operands.key.shape[-3])
    found = shown(spec, sizes, operands.mask_captures)
    return operands._replace(**dict(zip(PLANNED, found, strict=True)))


def lead(predicate: Program, sizes: Sizes, captures: Sequence[Any]) -> tuple[tuple, tuple]:
    """(*#B, #N) of the numbers of batch elements and of heads that a predicate asks for, and
    (*#B, #N) of what it shows, given what it captures."""
    reads = dict(zip(ARGUMENTS, _jaxpr.inputs_read(predicate.jaxpr), strict=False))
    ones = (1,) * len(sizes.batch)
    numbers = (*(sizes.batch if reads["b"] else ones), sizes.heads if reads["h"] else 1)
    rank = len(ones)
    shapes = [numbers[:rank], *(x.shape[:rank] for x in captures)]
    batch = tuple(next((n for n in of if not is_one(n)), 1) for of in zip(*shapes, strict=True))
    return numbers, (*batch, numbers[-1])


def types(spec: AttentionSpec, sizes: Sizes, captures: Sequence[Any]) -> list[Any]:
    """Those of `Shown`."""
    assert spec.predicate is not None
    _, full = lead(spec.predicate, sizes, captures)
    own = _ranges.shown_shapes(sizes.q_len, sizes.kv_len)
    return [jax.ShapeDtypeStruct((*full, *shape), jnp.int32) for shape in own]


def shown(spec: AttentionSpec, sizes: Sizes, captures: Sequence[Any]) -> Shown:
    """What the predicate and the band of a spec show, which has nothing else, on any platform."""
    batch, heads, q_len, kv_len = sizes
    query, key = (jax.ShapeDtypeStruct((*batch, n, heads, 1), jnp.float32) for n in (q_len, kv_len))
    operands = Operands(query, key, key, mask_captures=tuple(captures))
    columns = blocks(kv_len, kv_len)

    def visible(rows: Block):
        """(*#B, #N, 1, rows, S)"""
        tiles = Tiles(spec, operands, blocks(q_len, rows.size), columns)
        return tiles.at(rows, columns[0], fresh_rows=False).visible

    # What is wanted is its type: how large it is, and how it is split.
    of_row = visible(Block(jnp.int32(0), jnp.int32(0), 1))
    leading = of_row.shape[:-2]
    elements = math.prod(n for n in of_row.shape if isinstance(n, int))

    at_most = max(_BLOCK_ELEMENTS // elements // BLOCK, 1) * BLOCK
    if isinstance(q_len, int) and q_len <= 2 * at_most:
        at_most = q_len
    rows = blocks(q_len, at_most, multiple=BLOCK)
    q_blocks, kv_blocks = (-(-n // BLOCK) for n in (q_len, kv_len))

    def of_rows(i, found):
        row_sees, key_is_seen, whole, empty = found
        block = rows[i]
        first = block.start % BLOCK if rows.ragged else None
        of_block = _ranges.blocks_of_rows(visible(block), first)

        def met(array, x):
            groups = Block(block.start // BLOCK, block.start // BLOCK, x.shape[-2])
            return put(array, groups, -2, cut(array, groups, -2) & x)

        return (
            put(row_sees, block, -1, of_block.row_sees),
            key_is_seen | of_block.key_is_seen,
            met(whole, of_block.whole),
            met(empty, of_block.empty),
        )

    def start(value, *shape):
        return filled(value, of_row, (*leading, *shape), jnp.bool_)

    # One group more than there are, of the rows that follow a ragged block.
    groups = (start(True, q_blocks + 1, kv_blocks),) * 2
    found = start(False, q_len), start(False, kv_len), *groups
    found = loop(0, rows.count, of_rows, found)
    # Heads and batch axes alone.
    row_sees, key_is_seen, *groups = (jnp.squeeze(x, len(leading) - 1) for x in found)
    whole, empty = (x[..., :q_blocks, :] for x in groups)
    found = _ranges.of_blocks(whole, empty, row_sees, key_is_seen, q_len=q_len, kv_len=kv_len)
    assert spec.predicate is not None
    # What asks for a number may not depend on it, as an element of an array of one.
    _, full = lead(spec.predicate, sizes, captures)
    return Shown(*(jnp.broadcast_to(x, (*full, *x.shape[len(full) :])) for x in found))
