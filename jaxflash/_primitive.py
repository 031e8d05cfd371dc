"""JAX primitives from objects that own their rules.

An `Op` is a function of arrays with a tangent rule and, where it is linear, a transpose rule, both
written with `bind`: whatever they return can be differentiated again. Mapped by `jax.vmap`, it is
another one, whose unmapped arguments are neither copied nor broadcast.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir
from jax.sharding import get_abstract_mesh

from jaxflash import _sharding

try:
    # Before it lowers, JAX collects the primitives whose lowering asks for devices, such as
    # custom_partitioning, and cannot see them inside ours. There is no public way to say so.
    from jax._src.dispatch import prim_requires_devices_during_lowering as _needing_devices
except ImportError:
    _needing_devices = None

# Without it, custom calls inside a primitive do not lower.
available = _needing_devices is not None


class Op:
    """A function of arrays; subclasses are frozen dataclasses, that is hashable."""

    # Whether it lowers to something that is partitioned over devices by a rule of its own.
    partitioned = False

    def on_platform(self, platform: str) -> Op:
        """The op for a program of one platform alone."""
        return self

    def on_one_cpu(self, types: Sequence, calls: int = 1) -> Op:
        """The op for a program of one CPU device, where no axis has a sharding to keep: for
        arguments of such types, when `jax.vmap` maps so many calls."""
        return self

    def result_types(self, types: Sequence) -> list[jax.ShapeDtypeStruct] | None:
        """Shapes and dtypes of the results, given those of the arguments; None where only a trace
        of the op tells."""
        return None

    def __call__(self, *args) -> list:
        """The results, in operations that JAX lowers."""
        raise NotImplementedError

    def mapped(self, in_axes: tuple[int | None, ...], args: Sequence) -> list:
        """What `jax.vmap` of the op gives, in such operations."""
        return jax.vmap(self, in_axes)(*args)

    def jvp(self, primals: Sequence, results: Sequence, tangents: Sequence) -> list:
        """Tangents of all results. A tangent that is None is zero, among those of results, too."""
        raise NotImplementedError

    def transpose(self, cotangents: Sequence, args: Sequence) -> list:
        """Cotangents of the arguments that are None, in which the op is linear; None for the
        others, and where a cotangent is zero. A cotangent that is None is zero."""
        raise NotImplementedError


def bind(op: Op, *args) -> list:
    """The results of `op`, to be differentiated by its rules."""
    return _primitive(op.partitioned).bind(*args, op=op)


@dataclasses.dataclass(frozen=True)
class _Mapped(Op):
    """An op under `jax.vmap`; results are mapped along their first axis."""

    op: Op
    in_axes: tuple[int | None, ...]

    @property
    def partitioned(self):
        return self.op.partitioned

    def on_platform(self, platform):
        return self._of(self.op.on_platform(platform))

    def on_one_cpu(self, types, calls=1):
        return self._of(self.op.on_one_cpu(self._of_one(types), calls * self._count(types)))

    def result_types(self, types):
        results = self.op.result_types(self._of_one(types))
        count = self._count(types)
        return results and [jax.ShapeDtypeStruct((count, *x.shape), x.dtype) for x in results]

    def _of(self, op: Op) -> Op:
        return self if op is self.op else dataclasses.replace(self, op=op)

    def _of_one(self, types) -> list:
        return [one_of(x, axis) for x, axis in zip(types, self.in_axes, strict=True)]

    def _count(self, types):
        pairs = zip(types, self.in_axes, strict=True)
        return next(x.shape[axis] for x, axis in pairs if axis is not None)

    def __call__(self, *args):
        return self.op.mapped(self.in_axes, args)

    def jvp(self, primals, results, tangents):
        moved = [i for i, tangent in enumerate(tangents) if tangent is not None]

        def one(primals, results, moving):
            return self.op.jvp(primals, results, _placed(moving, moved, len(primals)))

        axes = list(self.in_axes)
        return jax.vmap(one, (axes, 0, [axes[i] for i in moved]))(
            list(primals), list(results), [tangents[i] for i in moved]
        )

    def transpose(self, cotangents, args):
        given = [i for i, cotangent in enumerate(cotangents) if cotangent is not None]
        known = [i for i, arg in enumerate(args) if arg is not None]

        def one(cotangents_given, args_known):
            return self.op.transpose(
                _placed(cotangents_given, given, len(cotangents)),
                _placed(args_known, known, len(args)),
            )

        results = jax.vmap(
            one,
            ([0] * len(given), [self.in_axes[i] for i in known]),
            [0 if axis is None else axis for axis in self.in_axes],
        )([cotangents[i] for i in given], [args[i] for i in known])
        return [
            x.sum(axis=0) if x is not None and axis is None else x
            for x, axis in zip(results, self.in_axes, strict=True)
        ]


def one_of(mapped, axis: int | None):
    """The type of what `jax.vmap` maps, given that of all."""
    shape = [n for i, n in enumerate(mapped.shape) if axis is None or i != axis % mapped.ndim]
    return jax.ShapeDtypeStruct(shape, mapped.dtype)


def _placed(values: Sequence, places: Sequence[int], count: int) -> list[Any]:
    """`count` times None, but the values in their places."""
    placed: list[Any] = [None] * count
    for i, value in zip(places, values, strict=True):
        placed[i] = value
    return placed


# ---- The primitive -------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _traced_once(op: Op):
    """`op`, traced once for its type and its lowering."""

    @functools.partial(jax.jit, inline=True)
    def traced(*args):
        with _sharding.mesh_of(*args):
            return op(*args)

    return traced


def _is_zero(tangent) -> bool:
    return type(tangent) is ad.Zero or tangent.dtype == jax.dtypes.float0


def _jvp_rule(primals, tangents, *, op: Op):
    tangents = [None if _is_zero(tangent) else tangent for tangent in tangents]
    results = bind(op, *primals)
    moved = [None] * len(results)
    if any(tangent is not None for tangent in tangents):
        moved = op.jvp(primals, results, tangents)
    return results, [_zero(x) if t is None else t for x, t in zip(results, moved, strict=True)]


def _zero(x):
    """The tangent of a result that does not move."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


def _transpose_rule(cotangents, *args, op: Op):
    return op.transpose(
        [None if type(x) is ad.Zero else x for x in cotangents],
        [None if ad.is_undefined_primal(x) else x for x in args],
    )


def _batching_rule(args, axes, *, op: Op):
    results = bind(_Mapped(op, tuple(axes)), *args)
    return results, [0] * len(results)


def _result_types(*types, op: Op) -> list:
    # Shardings of explicit meshes and what varies inside `shard_map` only a trace finds.
    plain = all(x.sharding.mesh.empty and not x.manual_axis_type.varying for x in types)
    plain = plain and (types or get_abstract_mesh().empty)
    results = op.result_types(types) if plain else None
    if results is None:
        return list(jax.make_jaxpr(_traced_once(op))(*types).out_avals)
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in results]


def _lowered(ctx, *args, op: Op):
    platforms = tuple(ctx.platforms or ctx.module_context.platforms)
    if len(platforms) == 1:
        op = op.on_platform(*platforms)
    if platforms == ("cpu",) and _is_of_one_device(ctx):
        op = op.on_one_cpu(ctx.avals_in)
    return mlir.lower_fun(_traced_once(op), multiple_results=True)(ctx, *args)


def _is_of_one_device(ctx) -> bool:
    """Whether what is lowered is known to run on one device."""
    module = ctx.module_context
    # What is exported may be called on several devices.
    parameters = getattr(module, "lowering_parameters", None)
    if parameters is None or getattr(parameters, "for_export", False):
        return False
    return getattr(module.axis_context, "num_devices", None) == 1


@functools.cache
def _primitive(partitioned: bool):
    from jax.extend.core import Primitive  # takes as long to import as the rest of the package

    primitive = Primitive("jaxflash_partitioned" if partitioned else "jaxflash")
    primitive.multiple_results = True
    # Also where nothing is compiled (`jax.disable_jit`).
    primitive.def_impl(lambda *args, op: _traced_once(op)(*args))
    primitive.def_abstract_eval(_result_types)
    mlir.register_lowering(primitive, _lowered)
    ad.primitive_jvps[primitive] = _jvp_rule
    ad.primitive_transposes[primitive] = _transpose_rule
    batching.primitive_batchers[primitive] = _batching_rule
    if partitioned and _needing_devices is not None:
        _needing_devices.add(primitive)
    return primitive
