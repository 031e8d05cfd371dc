"""What the kernels can skip of a predicate: the first and the last key that it shows each row, and
the same of rows for each key, found in one pass over it on the device.

The pass evaluates a block of rows against all keys at a time, in memory linear in the lengths, and
once for all batch elements and heads where the predicate does not ask for them.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from jaxflash import _dense_mask
from jaxflash._blockwise import filled, loop
from jaxflash._dense_mask import Pass
from jaxflash._spec import AttentionSpec, Operands
from jaxflash._tile import Block, Tiles, blocks, put

# Elements that are evaluated at a time: enough for a GPU, little beside any call that is so long.
_BLOCK_ELEMENTS = 1 << 22


def with_hulls(spec: AttentionSpec, operands: Operands) -> Operands:
    """The operands with the hulls of the predicate and of the band of the spec, if there is a
    predicate and no plan that the caller made: for all passes of the call."""
    has_plan = operands.rows_hull is not None
    if spec.predicate is None or has_plan or 0 in (*operands.query.shape, *operands.key.shape):
        return operands
    rows, keys = _hulls(spec, operands)
    return operands._replace(rows_hull=rows, keys_hull=keys)


def _hulls(spec: AttentionSpec, operands: Operands):
    *_, q_len, q_heads, _ = operands.query.shape
    kv_len = operands.key.shape[-3]
    # A band of each sequence's own would be a pass for each sequence.
    lengths = operands.query_seq_lengths, operands.key_value_seq_lengths
    if spec.bottom_right and any(x is not None for x in lengths):
        spec = dataclasses.replace(spec, left=None, right=None)
    spec = dataclasses.replace(spec, program=None, dropout_rate=0.0)
    operands = Operands(
        operands.query, operands.key, operands.value, mask_captures=operands.mask_captures
    )
    columns = blocks(kv_len, kv_len)

    def visible(rows: Block):
        """(*#B, #K, #G, rows, S)"""
        tiles = Tiles(spec, operands, blocks(q_len, rows.size), columns)
        return tiles.at(rows, columns[0], fresh_rows=False).visible

    # What is wanted is its type: how large it is, and how it is split.
    of_row = visible(Block(jnp.int32(0), jnp.int32(0), 1))
    lead = of_row.shape[:-2]
    elements = math.prod(n for n in of_row.shape if isinstance(n, int))
    rows = blocks(q_len, max(_BLOCK_ELEMENTS // elements, 1))

    def of_rows(i, hulls):
        row_begin, row_end, key_begin, key_end = hulls
        block = rows[i]
        sees = visible(block)
        row = block.start + jnp.arange(block.size, dtype=jnp.int32)[:, None]
        row, column = (
            x.reshape((1,) * len(lead) + x.shape)
            for x in (row, jnp.arange(kv_len, dtype=jnp.int32)[None, :])
        )
        first_key = jnp.min(jnp.where(sees, column, kv_len), axis=-1)
        last_key = jnp.max(jnp.where(sees, column + 1, 0), axis=-1)
        first_row = jnp.min(jnp.where(sees, row, q_len), axis=-2)
        last_row = jnp.max(jnp.where(sees, row + 1, 0), axis=-2)
        return (
            put(row_begin, block, -1, first_key),
            put(row_end, block, -1, last_key),
            jnp.minimum(key_begin, first_row),
            jnp.maximum(key_end, last_row),
        )

    def start(value, length):
        return filled(value, of_row, (*lead, length), jnp.int32)

    hulls = start(0, q_len), start(0, q_len), start(q_len, kv_len), start(0, kv_len)
    row_begin, row_end, key_begin, key_end = loop(0, rows.count, of_rows, hulls)

    def intervals(begin, end):
        """(*#B, #N, length, 2)"""
        pairs = jnp.stack((jnp.where(begin < end, begin, 0), end), axis=-1)
        *batch, kv_heads, group, length, two = pairs.shape
        if 1 in (kv_heads, group) and kv_heads * group not in (1, q_heads):
            kv_heads, group = operands.key.shape[-2], q_heads // operands.key.shape[-2]
            pairs = jnp.broadcast_to(pairs, (*batch, kv_heads, group, length, two))
        return pairs.reshape(*batch, kv_heads * group, length, two)

    return intervals(row_begin, row_end), intervals(key_begin, key_end)


def seeing_rows(operands: Operands, pass_: Pass):
    """Rows that see a key by dense mask and predicate, (*#B, #T, #N, 1); None: all."""
    seeing = []
    if operands.mask is not None:
        seeing.append(_dense_mask.seeing_rows(operands.mask, pass_))
    if operands.rows_hull is not None:
        seeing.append(operands.rows_hull[..., 1] > 0)
    return _all(jnp.swapaxes(x, -1, -2)[..., None] for x in seeing)


def seen_keys(operands: Operands, pass_: Pass):
    """Keys that a row of some head sees likewise, (*#B, #S, 1, 1); None: all."""
    seen = []
    if operands.mask is not None:
        seen.append(_dense_mask.seen_keys(operands.mask, pass_))
    if operands.keys_hull is not None:
        seen.append(jnp.any(operands.keys_hull[..., 1] > 0, axis=-2))
    return _all(x[..., None, None] for x in seen)


def _all(arrays):
    result = None
    for x in arrays:
        result = x if result is None else result & x
    return result
