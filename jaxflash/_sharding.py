"""Operands brought to types that go together: on explicit meshes, and inside `shard_map`.

Both steps are ordinary JAX outside of the differentiation rule, so that their transposes bring each
gradient back to the type of what the caller passed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import (
    AxisType,
    NamedSharding,
    PartitionSpec,
    get_abstract_mesh,
    reshard,
    use_abstract_mesh,
)

from jaxflash import _split
from jaxflash._spec import AttentionSpec, Operands, PagedOperands

# The trailing axes of each operand, after its batch axes: T, S lengths, N query heads, K key/value
# heads, H, h head sizes.
_TRAILING = {
    "query": "TNH",
    "key": "SKH",
    "value": "SKh",
    "mask": "NTS",
    "query_seq_lengths": "",
    "key_value_seq_lengths": "",
    "query_segment_ids": "T",
    "key_segment_ids": "S",
    "sink": "N",
    "rows_hull": "NT_",
    "keys_hull": "NS_",
    "rows_inside": "N__",
    "keys_inside": "N__",
    "rows_visits": "N___",
    "keys_visits": "N___",
    "query_positions": "T",
    "key_positions": "S",
}


def alike(spec: AttentionSpec, operands: Operands) -> Operands:
    """Operands of which each is split as the query is, and that vary over the same mesh axes."""
    axes = {
        "captures": spec.program.axes if spec.program else (),
        "mask_captures": spec.predicate.axes if spec.predicate else (),
    }
    return _varying_alike(_split_alike(operands, axes))


def alike_in_mask(spec: AttentionSpec, captures: Sequence[Any], batch_rank: int) -> list[Any]:
    """What a mask captures, without the operands of a call: split as it is over batch axes and
    heads where they are known, and whole along everything else; varying over the same mesh axes."""
    varying = _varying_alike(list(captures))
    mesh, predicate = _mesh_of_parts(varying), spec.predicate
    if mesh is None or predicate is None:
        return varying

    def place(number: int, x):
        known = predicate.axes[number : number + 1]
        trailing = known[0] if known else "_" * (x.ndim - batch_rank)
        axes = zip(_parts(x), "B" * batch_rank + trailing, strict=True)
        return _resharded(x, mesh, [part if axis in "BN" else None for part, axis in axes])

    return [place(number, x) for number, x in enumerate(varying)]


def whole(arrays):
    """Arrays that no explicit mesh splits."""
    mesh = _mesh_of_parts(arrays)
    if mesh is None:
        return arrays
    return jax.tree.map(lambda x: _resharded(x, mesh, (None,) * x.ndim), arrays)


def alike_in_pages(operands: PagedOperands) -> PagedOperands:
    """Likewise of a call with pages, each of which stays where its heads are: pages are whole along
    all other axes, and so are heads that more devices hold than there are key heads."""
    return _varying_alike(_paged_split_alike(operands))


def mesh_of(*arrays) -> contextlib.AbstractContextManager:
    """A context with the explicit mesh of these arrays, in which new ones go together with them;
    without an effect under `jax.set_mesh`."""
    if get_abstract_mesh().empty:
        for x in arrays:
            mesh = jax.typeof(x).sharding.mesh
            if AxisType.Explicit in mesh.axis_types:
                return use_abstract_mesh(mesh)
    return contextlib.nullcontext()


def as_of_query(query, out, lse):
    """(out, lse) split as the caller's query is, where that is an axis that `alike` gathered."""
    mesh = _mesh_of_parts(query)
    if mesh is None:
        return out, lse
    parts = _parts(query)[:-1]
    return _resharded(out, mesh, (*parts, None)), _resharded(lse, mesh, parts)


def _varying_alike(operands):
    """Inside `shard_map`, everything varies over the mesh axes that something varies over: loops
    and custom calls want one type, and the gradient of the cast sums what was replicated.
    """
    axes = frozenset().union(
        *(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(operands))
    )

    def vary(x):
        missing = axes - jax.typeof(x).manual_axis_type.varying
        return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x

    return jax.tree.map(vary, operands)


class _Split(NamedTuple):
    """Explicit mesh axes of the batch axes and of the heads, of which the keys may have fewer."""

    batch: tuple
    heads: tuple[str, ...]
    key_repeats: int  # how often each key head stands in the split key and value


def _split_alike(operands: Operands, capture_axes: dict[str, tuple[str, ...]]) -> Operands:
    """On an explicit mesh, operands split over batch and heads as query, key and value are, and
    whole along everything else: a loop over tiles slices the lengths.

    Args:
        operands: of the call.
        capture_axes: trailing axes of the first captures, and of the first that a mask has. Of
            others only the batch axes are known.
    """
    mesh = _mesh_of_parts(operands)
    if mesh is None:
        return operands
    split = _split_of(operands)
    if split.key_repeats > 1:
        operands = operands._replace(
            key=_repeated_heads(operands.key, split.key_repeats),
            value=_repeated_heads(operands.value, split.key_repeats),
        )

    trailing_axes = {**_TRAILING}
    for captures, axes in capture_axes.items():
        for number, x in enumerate(getattr(operands, captures)):
            unknown = "_" * (x.ndim - (operands.query.ndim - 3))
            known = axes[number : number + 1]
            trailing_axes[f"{captures}[{number}]"] = known[0] if known else unknown

    def part_of(axis: str, size: int):
        return split.heads if axis in "NK" and size != 1 else None

    def place(name, x):
        if name not in trailing_axes:
            return x
        trailing = trailing_axes[name]
        num_batch = x.ndim - len(trailing)
        batch = split.batch if num_batch else ()
        parts = [
            *(None if size == 1 else part for size, part in zip(x.shape, batch, strict=False)),
            *map(part_of, trailing, x.shape[num_batch:]),
        ]
        return _resharded(x, mesh, parts)

    named = operands.named()
    return operands.replacing({name: place(name, x) for name, x in named.items()})


def _split_of(operands: Operands) -> _Split:
    query, key, value = operands.query, operands.key, operands.value
    batch = _batch_of(*(_parts(x)[:-3] for x in (query, key, value)))
    q_heads, kv_heads = query.shape[-2], key.shape[-2]
    in_batch = {name for part in batch for name in _split.names_of(part)}
    for x in (query, key, value):
        heads = tuple(name for name in _split.names_of(_parts(x)[-2]) if name not in in_batch)
        sizes = jax.typeof(x).sharding.mesh.shape
        shards = math.prod(sizes[name] for name in heads)
        if shards == 1:
            continue
        if kv_heads % shards == 0:
            return _Split(batch, heads, 1)
        if shards % kv_heads == 0 and q_heads % shards == 0:
            return _Split(batch, heads, shards // kv_heads)
    return _Split(batch, (), 1)


def _batch_of(*parts: tuple) -> tuple:
    """Of each batch axis the first split that some operand has and no axis before."""
    batch: list[Any] = []
    taken: set[str] = set()
    for candidates in zip(*parts, strict=True):
        names = (names for names in map(_split.names_of, candidates) if taken.isdisjoint(names))
        batch.append(next(filter(None, names), None))
        taken.update(batch[-1] or ())
    return tuple(batch)


def _paged_split_alike(operands: PagedOperands) -> PagedOperands:
    query, key_pages, value_pages, page_table, lengths, sink, _ = operands
    mesh = _mesh_of_parts(operands)
    if mesh is None:
        return operands
    batch_rank = query.ndim - 3
    batch = _batch_of(*(_parts(x)[:batch_rank] for x in (query, page_table, lengths)))
    taken = {name for part in batch for name in _split.names_of(part)}
    heads: tuple[str, ...] = ()
    for x in (query, key_pages, value_pages):
        names = tuple(name for name in _split.names_of(_parts(x)[-2]) if name not in taken)
        sizes = jax.typeof(x).sharding.mesh.shape
        if names and key_pages.shape[-2] % math.prod(sizes[name] for name in names) == 0:
            heads = names
            break
    return operands._replace(
        query=_resharded(query, mesh, (*batch, None, heads, None)),
        key_pages=_resharded(key_pages, mesh, (None, None, heads, None)),
        value_pages=_resharded(value_pages, mesh, (None, None, heads, None)),
        page_table=_resharded(page_table, mesh, (*batch, None)),
        lengths=_resharded(lengths, mesh, batch),
        sink=None if sink is None else _resharded(sink, mesh, (heads,)),
    )


def _repeated_heads(x, repeats: int):
    """Each of the heads (axis -2) `repeats` times, whole: what follows splits them."""
    x = _resharded(x, _mesh_of_parts(x), (*_parts(x)[:-2], None, None))
    shape = (*x.shape[:-2], x.shape[-2], repeats, x.shape[-1])
    x = jnp.broadcast_to(x[..., None, :], shape)
    return x.reshape(*shape[:-3], shape[-3] * repeats, shape[-1])


def _parts(x) -> tuple:
    """The explicit mesh axes that split each axis of `x`."""
    return _split.padded(jax.typeof(x).sharding.spec, x.ndim)


def _mesh_of_parts(arrays):
    """The explicit mesh over which some of the arrays are split, whichever these are; None if none
    is."""
    split = (x for x in jax.tree.leaves(arrays) if any(_parts(x)))
    return next((jax.typeof(x).sharding.mesh for x in split), None)


def _resharded(x, mesh, parts):
    """`x` split in this way over the mesh."""
    if list(map(_split.names_of, parts)) == list(map(_split.names_of, _parts(x))):
        return x
    return reshard(x, NamedSharding(mesh, PartitionSpec(*(part or None for part in parts))))
