"""Packed sequences that are short, as a batch: the blockwise path on tiles of many sequences.

A tile of packed sequences holds one stretch of rows and of keys; where sequences are shorter than
it, most of what it computes is hidden, and smaller tiles are too small for what a step costs.
Here a tile has a sequence in each batch element. Sequences longer than the batch was made for are
found when the program runs, which then takes the tiles of `_blockwise` for packed ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxflash import _blockwise, _ranges
from jaxflash._loops import blocks, filled, loop
from jaxflash._spec import AttentionSpec, Operands
from jaxflash._tile import largest


def forward(spec: AttentionSpec, operands: Operands):
    """What `_blockwise.forward` returns."""

    def packed(operands):
        return _blockwise.forward(spec, operands)

    def batched(lengths, operands):
        rows, keys = _sides(operands, lengths)

        def of_group(group):
            return _blockwise.forward(spec, _as_batch(spec, operands, rows, keys, group))

        out, lse = _of_groups(operands, lengths, of_group)
        return rows.joined(out, 0), rows.joined(lse, -jnp.inf)

    return _by_length(spec, packed, batched, operands)


def backward(
    spec: AttentionSpec, operands: Operands, out, lse, dout, dlse, wanted: frozenset[str]
) -> Operands:
    """What `_blockwise.backward` returns."""

    def packed(operands, out, lse, dout, dlse):
        return _blockwise.backward(spec, operands, out, lse, dout, dlse, wanted)

    def batched(lengths, operands, out, lse, dout, dlse):
        rows, keys = _sides(operands, lengths)
        of_sequences = wanted - {"sink"}

        def of_group(group):
            # -inf: what lies after a sequence is alive in the next one.
            lse_here = rows.cut(lse, group, fill=-jnp.inf)
            out_here, dout_here = rows.cut(out, group), rows.cut(dout, group)
            dlse_here = None if dlse is None else rows.cut(dlse, group)
            gradients = _blockwise.backward(
                spec,
                _as_batch(spec, operands, rows, keys, group),
                out_here,
                lse_here,
                dout_here,
                dlse_here,
                of_sequences,
            )
            return gradients.named()

        found = {}
        if of_sequences:
            found = _of_groups(operands, lengths, of_group)
        gradients = {
            name: (rows if name == "query" else keys).joined(x, 0) for name, x in found.items()
        }
        if "sink" in wanted:
            gradients["sink"] = _blockwise.sink_gradient(operands, out, lse, dout, dlse)
        return operands.holding(gradients)

    return _by_length(spec, packed, batched, operands, out, lse, dout, dlse)


def _by_length(spec: AttentionSpec, packed: Callable, batched: Callable, operands: Operands, *rest):
    """`packed` of the arguments, or `batched` of the smallest lengths of queries and of keys that
    no sequence exceeds, and of them."""
    sizes = _sizes(spec, operands)
    if not sizes:
        return packed(operands, *rest)
    longest = [
        largest(jnp.diff(boundaries))
        for boundaries in (operands.query_boundaries, operands.key_boundaries)
    ]
    number = jnp.int32(0)
    for q_len, kv_len in sizes:
        number += ((longest[0] > q_len) | (longest[1] > kv_len)).astype(jnp.int32)
    packed = jax.jit(packed, inline=True)  # traced once, for the types and to run
    branches = [*(functools.partial(batched, lengths) for lengths in sizes), packed]
    results = jax.tree.map(
        lambda x: filled(0, operands.query, x.shape, x.dtype),
        jax.eval_shape(packed, operands, *rest),
    )
    for i, branch in enumerate(branches):

        def run(step, _, branch=branch):
            # XLA would move what is the same in all steps to before the loop, there to run always.
            _, arguments = jax.lax.optimization_barrier((step, (operands, *rest)))
            return branch(*arguments)

        # Loops of one step or none: XLA for CPUs (jax 0.11) runs what a conditional contains on one
        # core.
        results = loop(0, number == i, run, results)
    return results


def _sizes(spec: AttentionSpec, operands: Operands) -> list[tuple[int, int]]:
    """The lengths of queries and of keys that a batch may be made for, ascending; none where tiles
    of packed sequences are to be taken."""
    if operands.query_boundaries is None:
        return []
    # Score functions and dropout count along the packed arrays.
    if spec.program is not None or spec.predicate is not None or spec.dropout_rate > 0.0:
        return []
    q_len, kv_len = operands.query.shape[0], operands.key.shape[0]
    count = operands.query_boundaries.shape[0] - 1
    is_known = all(isinstance(n, int) and n > 0 for n in (q_len, kv_len, count))
    # Gathers along an axis that may be split need more than the types of explicit meshes say.
    if not is_known or _ranges.is_partly_explicit(operands.query):
        return []
    return _blockwise.lengths_together(q_len, kv_len, count)


def _as_batch(spec: AttentionSpec, operands: Operands, rows: _Side, keys: _Side, group) -> Operands:
    """The call of a group of sequences."""
    has_positions = spec.left is not None or spec.right is not None
    has_positions &= operands.query_positions is not None
    return Operands(
        query=rows.cut(operands.query, group),
        key=keys.cut(operands.key, group),
        value=keys.cut(operands.value, group),
        query_seq_lengths=rows.lengths[group],
        key_value_seq_lengths=keys.lengths[group],
        query_positions=rows.cut(operands.query_positions, group) if has_positions else None,
        key_positions=keys.cut(operands.key_positions, group) if has_positions else None,
        sink=operands.sink,
    )


def _of_groups(operands: Operands, lengths: tuple[int, int], of_group: Callable):
    """The results of a function of the numbers of a few sequences, (sequences, length, ...) each,
    for all sequences."""
    count = operands.query_boundaries.shape[0] - 1
    *_, heads, head_dim = operands.query.shape
    at_most = _blockwise.count_together(heads, head_dim, *lengths)
    groups = blocks(count, at_most, multiple=1)

    of_number = groups.traced_once(
        lambda group: of_group(group.start + jnp.arange(group.size, dtype=jnp.int32))
    )
    if groups.count == 1:
        return of_number(0)

    def body(i, results):
        return jax.tree.map(
            lambda x, of: jax.lax.dynamic_update_slice_in_dim(x, of, groups[i].start, 0),
            results,
            of_number(i),
        )

    like = operands.query
    results = jax.tree.map(
        lambda x: filled(0, like, (count, *x.shape[1:]), x.dtype),
        jax.eval_shape(lambda: of_number(0)),
    )
    return loop(0, groups.count, body, results)


def _sides(operands: Operands, lengths: tuple[int, int]) -> tuple[_Side, _Side]:
    """(queries, keys)"""

    def side(boundaries, sequence, length):
        boundaries = jnp.clip(boundaries, 0, sequence.shape[0])
        return _Side(boundaries[:-1], jnp.diff(boundaries), sequence, length)

    return (
        side(operands.query_boundaries, operands.query_segment_ids, lengths[0]),
        side(operands.key_boundaries, operands.key_segment_ids, lengths[1]),
    )


class _Side(NamedTuple):
    """The queries or the keys of packed sequences."""

    begins: Any  # (n)
    lengths: Any  # (n)
    sequence: Any  # (tokens), of each token; negative outside of all
    length: int  # of the batch

    def cut(self, x, group, fill=None):
        """(tokens, ...) to (sequences of the group, length, ...). After a sequence comes anything,
        or `fill`."""
        place = jnp.arange(self.length, dtype=jnp.int32)[None, :]
        token = self.begins[group][:, None] + place
        found = x.at[token].get(mode="clip")
        if fill is None:
            return found
        inside = place < self.lengths[group][:, None]
        return jnp.where(inside.reshape(*inside.shape, *(1,) * (found.ndim - 2)), found, fill)

    def joined(self, x, fill):
        """(n, length, ...) to (tokens, ...), `fill` outside of all sequences."""
        sequence = jnp.maximum(self.sequence, 0)
        token = jnp.arange(self.sequence.shape[0], dtype=jnp.int32)
        number = sequence * self.length + token - self.begins[sequence]
        found = x.reshape(-1, *x.shape[2:]).at[number].get(mode="clip")
        inside = self.sequence >= 0
        return jnp.where(inside.reshape(-1, *(1,) * (found.ndim - 1)), found, fill)
