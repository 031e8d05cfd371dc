"""Custom calls under `jax.vmap` and sharding: ``custom_vmap(custom_partitioning(ffi_call))``, or
`shard_map` on explicit meshes. Under `vmap` an operand that is not mapped gets a leading axis of
size 1, which the kernels read with stride 0, so nothing is copied unless they are too many
(`_batch_axes`); under sharding the batch axes and the heads split, and the body stays a bare
`ffi_call`.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard

from jaxflash import _batch_axes, _split
from jaxflash._batch_calls import BatchCall
from jaxflash._passes import Pass

# Ops and what they keep alive are of one program and scale each. One that leaves its cache lives as
# long as a traced, lowered or compiled program has it.
_MAX_CACHED = 256

# ---- vmap ----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=_MAX_CACHED)
def mapped(kernel: Pass) -> Callable:
    op = jax.custom_batching.custom_vmap(sharded(kernel))

    @op.def_vmap
    def rule(axis_size: int, mapped: Sequence[bool], *operands):
        operands = [
            x
            if is_mapped or i in kernel.unbatched
            else jnp.broadcast_to(x, (axis_size, *x.shape))
            if dense
            else jnp.expand_dims(x, 0)
            for i, (x, is_mapped, dense) in enumerate(
                zip(operands, mapped, kernel.dense, strict=True)
            )
        ]
        return op(*operands), (True,) * len(kernel.result_axes)

    return op


@functools.lru_cache(maxsize=_MAX_CACHED)
def over_batch(call: BatchCall) -> Callable:
    @jax.custom_batching.custom_vmap
    def op(*operands):
        lead = [n for n, _ in call.lead(operands)]
        # Here: within what is partitioned, copies on explicit meshes would ask for a sharding.
        merged = _batch_axes.merged([x.shape for x in operands], lead)
        operands = _batch_axes.with_lead(operands, merged)
        broadcasts = tuple(
            tuple(n != full for n, full in zip(x.shape, lead, strict=False)) for x in operands
        )
        return _partitioned_over_batch(call, broadcasts, _automatic_devices(operands))(*operands)

    @op.def_vmap
    def rule(axis_size: int, mapped: Sequence[bool], *operands):
        size = 1 if call.broadcasts else axis_size
        operands = (
            x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
            for x, is_mapped in zip(operands, mapped, strict=True)
        )
        return op(*operands), (True,) * len(call.result_axes)

    return op


# ---- Sharding ------------------------------------------------------------------------------------


def sharded(kernel: Pass) -> Callable:
    """The custom call, which splits as its operands do."""

    def op(*operands):
        mesh = _explicit_mesh(operands)
        if mesh is not None:
            return _on_explicit_mesh(kernel, mesh, operands)
        return _partitioned(
            kernel,
            _batch_pattern(kernel, operands),
            _groups(operands),
            _automatic_devices(operands),
        )(*operands)

    return op


def _explicit_mesh(operands):
    """The mesh that splits operands by their types, or None."""
    split = (jax.typeof(x).sharding for x in operands)
    return next((s.mesh for s in split if any(s.spec)), None)


def _on_explicit_mesh(kernel: Pass, mesh, operands) -> tuple:
    """The call in a `jax.shard_map`: sums over devices within a partitioned call would have
    shardings on explicit meshes, too, which XLA does not take there."""
    broadcasts = _batch_pattern(kernel, operands)
    query, key = operands[:2]
    like_query = kernel.result(operands, query, query.shape[-3:], query.dtype)
    split = _split.of(mesh, like_query, jax.typeof(key), _groups(operands), None)
    operand_shardings, result_shardings = _shardings(kernel, split, broadcasts)

    def call(*operands):
        return _summed(kernel, split, broadcasts, sharded(kernel)(*kernel.of_device(operands)))

    # By default all but those that a `jax.vmap` maps, which JAX does not name.
    axes = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = {name for name, kind in axes.items() if kind == AxisType.Explicit}
    mapped = jax.shard_map(
        call,
        mesh=mesh,
        in_specs=tuple(s.spec for s in operand_shardings),
        out_specs=tuple(s.spec for s in result_shardings),
        axis_names=set() if len(explicit) == len(axes) else explicit,
        check_vma=False,
    )
    results = mapped(*map(reshard, operands, operand_shardings))
    # Gradients of captures as these are.
    first = len(results) - len(kernel.captures)
    specs = (jax.typeof(operands[i]).sharding.spec for i in kernel.captures)
    shardings = (NamedSharding(mesh, spec) for spec in specs)
    return (*results[:first], *map(reshard, results[first:], shardings))


def _groups(operands) -> tuple[int, int]:
    """(key/value heads, query heads of each)."""
    q_heads, kv_heads = operands[0].shape[-2], operands[1].shape[-2]
    return kv_heads, q_heads // kv_heads


def _batch_pattern(kernel: Pass, operands) -> tuple[tuple[bool, ...], ...]:
    """For each operand and batch axis: whether the operand broadcasts there."""
    full = kernel.full_batch(operands)
    return tuple(
        ()
        if i in kernel.unbatched
        else tuple(n != full_n for n, full_n in zip(x.shape, full, strict=False))
        for i, x in enumerate(operands)
    )


def _automatic_devices(operands) -> int | None:
    """Inside a `shard_map` over some of the mesh's axes: how many devices the others span."""
    mesh = jax.typeof(operands[0]).sharding.mesh
    manual = [kind == jax.sharding.AxisType.Manual for kind in mesh.axis_types]
    if not any(manual):
        return None
    return math.prod(
        n for n, is_manual in zip(mesh.axis_sizes, manual, strict=True) if not is_manual
    )


@functools.lru_cache(maxsize=_MAX_CACHED)
def _partitioned(
    kernel: Pass, broadcasts, groups: tuple[int, int], automatic_devices: int | None
) -> Callable:
    """The custom call under a sharding rule: batch axes and heads may be split."""
    sums = kernel.full_sums(len(broadcasts[0]))
    of_captures = sums[len(sums) - len(kernel.captures) :]

    def partition(mesh, operand_types, result_types):
        # dq or out, (*B, T, N, ·), and the key, (*B, S, K, H).
        split = _split.of(mesh, result_types[0], operand_types[1], groups, automatic_devices)
        if automatic_devices and kernel.captures:
            # A sum over devices could not name them.
            split = split.gathered(
                (any(summed) for summed in zip(*of_captures, strict=True)),
                heads=any("n" not in kernel.operand_axes[i] for i in kernel.captures),
            )
        operand_shardings, result_shardings = _shardings(kernel, split, broadcasts)

        def call(*operands):
            return _summed(kernel, split, broadcasts, kernel.call(*kernel.of_device(operands)))

        return split.mesh, call, result_shardings, operand_shardings

    op = custom_partitioning(kernel.call)
    rule, replicated = _sharding_rule(kernel, broadcasts)
    op.def_partition(partition=partition, sharding_rule=rule, need_replication_factors=replicated)
    return op


def _shardings(kernel: Pass, split: _split.Split, broadcasts) -> tuple[tuple, tuple]:
    """Those of the operands and of the results."""
    sums = kernel.full_sums(len(broadcasts[0]))
    operands = zip(kernel.operand_axes, broadcasts, strict=True)
    results = zip(kernel.result_axes, sums, strict=True)
    return tuple(itertools.starmap(split.of, operands)), tuple(itertools.starmap(split.of, results))


def _summed(kernel: Pass, split: _split.Split, broadcasts, results) -> tuple:
    """A device's results, added to those of the devices that have parts of them: those that share a
    key head each have the part of their own query heads, and gradients of captures are sums over
    all heads that do not have a part of their own."""
    sums = kernel.full_sums(len(broadcasts[0]))
    first_capture = len(sums) - len(kernel.captures)
    by_heads = [
        split.group
        if "k" in axes
        else split.heads
        if i >= first_capture and "n" not in axes
        else ()
        for i, axes in enumerate(kernel.result_axes)
    ]
    return tuple(
        _sum_over((*split.batch_of(summed), *heads), x)
        for x, summed, heads in zip(results, sums, by_heads, strict=True)
    )


@functools.lru_cache(maxsize=_MAX_CACHED)
def _partitioned_over_batch(
    call: BatchCall, broadcasts: tuple[tuple[bool, ...], ...], automatic_devices: int | None
) -> Callable:
    """`broadcasts`: for each operand and leading axis, whether it does there."""
    full = (False,) * len(broadcasts[0])

    def partition(mesh, operand_types, result_types):
        like = result_types[0] if call.broadcasts else operand_types[0]
        mesh, spec = _split.on_mesh(mesh, like, automatic_devices)

        def sharding(of: tuple[bool, ...]):
            parts = zip(of, _split.padded(spec, len(full)), strict=False)
            return NamedSharding(mesh, PartitionSpec(*(None if one else x for one, x in parts)))

        results = (sharding(full),) * len(call.result_axes)
        return mesh, call.call, results, tuple(map(sharding, broadcasts))

    op = custom_partitioning(call.call)

    def factors(kind: str, all_axes, of) -> str:
        return ", ".join(
            " ".join(
                [
                    *(
                        f"one{kind}{i}x{axis}" if one else f"b{axis}"
                        for axis, one in enumerate(lead)
                    ),
                    *(f"{kind}{i}{axis}" for axis in axes),
                ]
            )
            for i, (axes, lead) in enumerate(zip(all_axes, of, strict=True))
        )

    operands = factors("operand", call.operand_axes, broadcasts)
    rule = f"{operands} -> {factors('result', call.result_axes, (full,) * len(call.result_axes))}"
    names = dict.fromkeys(re.findall(r"\w+", rule))
    whole = tuple(name for name in names if not re.fullmatch(r"b\d+", name))
    op.def_partition(partition=partition, sharding_rule=rule, need_replication_factors=whole)
    return op


def _sum_over(mesh_axes: tuple[str, ...], x):
    if not mesh_axes:
        return x
    return jax.lax.psum(x.astype(jnp.float32), mesh_axes).astype(x.dtype)


def _sharding_rule(kernel: Pass, broadcasts) -> tuple[str, tuple[str, ...]]:
    """Shardy's einsum-like rule, and its factors that must stay whole.

    Query heads and key heads are factors of their own: one that they shared would split key heads
    over a part of a mesh axis, which JAX cannot name. `_split.of` brings them together.
    """

    def factors(array: str, axes: Sequence[str], broadcast: Sequence[bool]) -> str:
        batch = (f"one{array}x{i}" if is_one else f"b{i}" for i, is_one in enumerate(broadcast))
        return " ".join([*batch, *axes])

    sums = kernel.full_sums(len(broadcasts[0]))
    operands, results = (
        ", ".join(
            factors(f"{kind}{i}", axes, broadcast)
            for i, (axes, broadcast) in enumerate(zip(all_axes, all_broadcasts, strict=True))
        )
        for kind, all_axes, all_broadcasts in (
            ("operand", kernel.operand_axes, broadcasts),
            ("result", kernel.result_axes, sums),
        )
    )
    rule = f"{operands} -> {results}"
    names = dict.fromkeys(re.findall(r"\w+", rule))  # in order of appearance, as Shardy wants
    return rule, tuple(filter(_stays_whole, names))


def _stays_whole(factor: str) -> bool:
    """Lengths and head sizes (see `_passes.Pass`), axes of size 1, and those of a capture."""
    return factor in {"t", "s", "h", "v"} or factor.startswith(("one", "c"))
