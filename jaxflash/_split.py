"""How the arrays of a kernel call are split over a mesh: batch axes and heads, in which no sum over
devices is needed but for key heads that devices share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True)
class Split:
    """Mesh axes of the batch axes, of the key heads, and of the query heads of each key head."""

    mesh: Mesh
    batch: tuple
    kv_heads: tuple[str, ...]
    group: tuple[str, ...]

    @property
    def heads(self) -> tuple[str, ...]:
        """Of all query heads."""
        return (*self.kv_heads, *self.group)

    def batch_of(self, which: Sequence[bool]) -> tuple[str, ...]:
        """Mesh axes of some batch axes."""
        parts = zip(self.batch, which, strict=True)
        return tuple(name for part, is_wanted in parts if is_wanted for name in names_of(part))

    def gathered(self, whole: Iterable[bool], *, heads: bool) -> Split:
        """With some batch axes whole, and all heads together if `heads`."""
        parts = zip(self.batch, whole, strict=True)
        batch = tuple(None if is_whole else part for part, is_whole in parts)
        of_heads = ((), ()) if heads else (self.kv_heads, self.group)
        return Split(self.mesh, batch, *of_heads)

    def of(self, axes: Sequence[str], broadcast: Sequence[bool] | None = None) -> NamedSharding:
        """The sharding of an array with these trailing axes. `broadcast` tells of its batch axes
        which are of size 1; one that has none broadcasts in none."""
        if broadcast is None:
            broadcast = (False,) * len(self.batch)
        lead = (
            None if is_one else part for part, is_one in zip(self.batch, broadcast, strict=False)
        )
        heads = {"n": self.heads, "k": self.kv_heads}
        trail = (heads.get(axis) or None for axis in axes)
        return NamedSharding(self.mesh, PartitionSpec(*lead, *trail))


def of(mesh, result, key, groups: tuple[int, int], automatic_devices: int | None) -> Split:
    """How the arrays split: as `result` does, over heads else as the key does."""
    is_named = not mesh.empty
    mesh, spec = on_mesh(mesh, result, automatic_devices)
    heads = (spec[-2], padded(key.sharding.spec, key.ndim)[-2]) if is_named else (spec[-2],)
    batch = spec[:-3]
    taken = {name for part in batch for name in names_of(part)}
    kv_heads, group = groups
    for part in heads:
        names = tuple(name for name in names_of(part) if name not in taken)
        shards = math.prod(mesh.shape[name] for name in names)
        if shards == 1:
            continue
        if kv_heads % shards == 0:
            return Split(mesh, batch, names, ())
        # More devices than key heads: each takes some query heads of one key head. Not inside
        # shard_map, where a sum could not name the devices.
        if shards % kv_heads == 0 and group % (shards // kv_heads) == 0 and not automatic_devices:
            divided = _divided(mesh, names, kv_heads)
            if divided is not None:
                return Split(divided[0], batch, *divided[1:])
    return Split(mesh, batch, (), ())


def on_mesh(mesh, array, automatic_devices: int | None) -> tuple[Mesh, tuple]:
    """(mesh, parts of the spec of `array`)."""
    if mesh.empty:  # JAX does not say how the axes are named that shard_map leaves automatic
        return _mesh_of(array, automatic_devices or 1)
    return mesh, padded(array.sharding.spec, array.ndim)


def padded(spec, rank: int) -> tuple:
    """A part for each of so many axes."""
    return tuple(spec) + (None,) * (rank - len(spec))


def names_of(part) -> tuple[str, ...]:
    """The mesh axes in one part of a spec."""
    return (part,) if isinstance(part, str) else tuple(part or ())


def _mesh_of(array, num_devices: int) -> tuple[Mesh, tuple]:
    """A mesh with one axis for each axis of `array` that is split, and the spec on it."""
    counts = [
        whole // shard
        for whole, shard in zip(array.shape, array.sharding.shard_shape(array.shape), strict=True)
    ]
    sizes = [*counts, num_devices // math.prod(counts)]
    names = [f"axis{i}" for i in range(len(sizes))]
    devices = sorted(array.sharding.device_set, key=lambda device: device.id)[:num_devices]
    spec = tuple(name if n > 1 else None for name, n in zip(names, counts, strict=False))
    return Mesh(np.array(devices).reshape(sizes), names), spec


def _divided(mesh: Mesh, names: tuple[str, ...], kv_heads: int):
    """(mesh, axes of the key heads, axes within a key head): `mesh` with the axis in two over which
    the key heads end, the others and the order of the devices as they are. None if there is none.
    """
    shape: dict[Any, tuple[int, ...]] = {name: (n,) for name, n in mesh.shape.items()}
    left = kv_heads
    of_keys, of_group = [], []
    for name in names:
        n = mesh.shape[name]
        keys = math.gcd(left, n)
        if keys not in (left, n):
            return None
        left //= keys
        if keys == n:
            of_keys.append(name)
        elif keys == 1:
            of_group.append(name)
        else:
            shape[name] = (keys, n // keys)
            of_keys.append(f"{name}_keys")
            of_group.append(f"{name}_group")
    divided = [
        part
        for name, sizes in shape.items()
        for part in ((name,) if len(sizes) == 1 else (f"{name}_keys", f"{name}_group"))
    ]
    sizes = [n for sizes in shape.values() for n in sizes]
    return Mesh(mesh.devices.reshape(sizes), divided), tuple(of_keys), tuple(of_group)
