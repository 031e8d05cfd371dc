"""The platform, known when a program is lowered."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax.interpreters import batching, mlir

NO_PARTITIONER = (
    "the CUDA kernels need the Shardy partitioner, which tells them how arrays are split: leave "
    "jax_use_shardy_partitioner at True"
)


def checked(arrays, only_cuda: bool):
    """The pytree `arrays`, in a program that will hold the kernels: its lowering raises
    NotImplementedError for another platform than CUDA, unless it has something else to run there.
    """
    return _bind_first(_platform_primitives()[0], arrays, only_cuda=only_cuda)


def announced(arrays, announce: Callable[[], None]):
    """The pytree `arrays`; a program that holds it calls `announce` (hashable) if it is lowered for
    CUDA."""
    return _bind_first(_platform_primitives()[1], arrays, announce=announce)


def _bind_first(primitive, arrays, **options):
    (first, *others), tree = jax.tree.flatten(arrays)
    return tree.unflatten([primitive.bind(first, **options), *others])


@functools.cache
def _platform_primitives():
    """(checked, announced): identities whose lowering knows the platform."""
    # Here, because its import takes longer than that of all the rest.
    from jax.extend.core import Primitive

    primitives = checked, announced = Primitive("jaxflash_checked"), Primitive("jaxflash_announced")
    for primitive in primitives:
        primitive.def_impl(lambda x, **_: x)  # under `jax.disable_jit`
        primitive.def_abstract_eval(lambda x, **_: x)
        batching.primitive_batchers[primitive] = functools.partial(_batch_identity, primitive)
    mlir.register_lowering(checked, _check_on_cuda, platform="cuda")
    mlir.register_lowering(checked, _check_elsewhere)
    # Not from a cache: a program is to warn however much of it was lowered before. A rule for each
    # platform JAX takes for several at once (jax.export) from its cache alone.
    mlir.register_lowering(announced, _announce, cacheable=False)
    return primitives


def has_partitioner() -> bool:
    """Whether programs have the partitioner that custom calls need."""
    # A JAX without the choice has no other one.
    return getattr(jax.config, "jax_use_shardy_partitioner", True)


def _check_on_cuda(ctx, x, *, only_cuda):
    if not has_partitioner():
        raise NotImplementedError(f"{NO_PARTITIONER}, or use implementation='xla'")
    return [x]


def _check_elsewhere(ctx, x, *, only_cuda):
    if only_cuda:
        raise NotImplementedError(
            "implementation='cuda' needs an NVIDIA GPU and JAX's CUDA platform (pip install "
            "'jax[cuda13]'); this computation is compiled for another platform. Use "
            "implementation='xla' or None; jaxflash.show_config() prints what is there"
        )
    return [x]


def _announce(ctx, x, *, announce):
    if "cuda" in (ctx.platforms or ctx.module_context.platforms):
        announce()
    return [x]


def _batch_identity(primitive, args, axes, **options):
    return primitive.bind(*args, **options), axes[0]
