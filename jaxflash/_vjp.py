"""The differentiation rule, and the choice between kernels and blockwise path.

Residuals are the operands, out and lse; out and lse carry `CHECKPOINT_NAME`, so that
``jax.checkpoint(policy=save_only_these_names(CHECKPOINT_NAME))`` does not run attention twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jaxflash import _blockwise, _ffi, _sharding, _support
from jaxflash._spec import AttentionSpec, Operands

CHECKPOINT_NAME = "context"


class Fallback(tuple):
    """The blockwise path where the caller left the choice to us: the reasons against the kernels,
    of which a program for CUDA warns."""

    def warn(self) -> None:
        _support.warn_of_slow_path(self)


# "auto": the kernels on CUDA, the blockwise path elsewhere, decided when the platform is known.
Path = Literal["cuda", "xla", "auto"] | Fallback


# Compiled once per spec and shapes, so that an eager call costs a dispatch and no retracing.
@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def attention(spec: AttentionSpec, path: Path, operands: Operands):
    """(out (*B, T, N, h), lse (*B, T, N)) of checked operands."""
    # jax 0.10 does not take NumPy arrays for residuals, which they may be under vmap; a copy costs
    # nothing in a compiled program.
    operands = _with_scaled_query(jax.tree.map(jnp.copy, operands))
    results: Any = _attention(spec, path, _sharding.alike(operands))
    return _sharding.as_of_query(operands.query, *results)


def _with_scaled_query(operands: Operands) -> Operands:
    """A factor of the logits that only the program knows multiplies the query, in float32."""
    query, scale = operands.query, operands.scale
    if scale is None:
        return operands
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    query = (query.astype(dtype) * scale.astype(dtype)).astype(query.dtype)
    return operands._replace(query=query, scale=None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(spec: AttentionSpec, path: Path, operands: Operands):
    return _forward(spec, path, operands)


@jax.tree_util.register_static
class _Wanted(frozenset):
    """Names of the operands whose gradient somebody asked for."""


class _Residuals(NamedTuple):
    operands: Operands
    out: Any
    lse: Any
    wanted: _Wanted


def _forward_rule(spec: AttentionSpec, path: Path, primals: Operands):
    given = {name: x for name, x in primals._asdict().items() if x is not None}
    wanted = _Wanted(name for name, x in given.items() if x.perturbed)
    operands = Operands(**{name: x.value for name, x in given.items()})
    results: Any = _forward(spec, path, operands)
    out, lse = (checkpoint_name(x, CHECKPOINT_NAME) for x in results)
    return (out, lse), _Residuals(operands, out, lse, wanted)


def _backward_rule(spec: AttentionSpec, path: Path, residuals: _Residuals, cotangents):
    dout, dlse = cotangents
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros_like(residuals.out)
    if isinstance(dlse, SymbolicZero):
        dlse = None
    wanted = frozenset(residuals.wanted)
    saved = (residuals.operands, residuals.out, residuals.lse)
    return (_backward(spec, path, wanted, saved, dout, dlse),)


_attention.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _forward(spec: AttentionSpec, path: Path, operands: Operands):
    @_mapped_together
    def blockwise(operands):
        return _blockwise.forward(spec, operands)

    def kernels(operands):
        return _ffi.forward(
            spec,
            operands.query,
            operands.key,
            operands.value,
            operands.query_seq_lengths,
            operands.key_value_seq_lengths,
        )

    return _on_path(path, kernels, blockwise)(operands)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _backward(spec: AttentionSpec, path: Path, wanted: frozenset[str], saved, dout, dlse):
    def blockwise(saved, dout, dlse):
        operands, out, lse = saved
        return _blockwise.backward(spec, operands, out, lse, dout, dlse, wanted)

    def kernels(saved, dout, dlse):
        operands, out, lse = saved
        dq, dk, dv = _ffi.backward(
            spec,
            operands.query,
            operands.key,
            operands.value,
            operands.query_seq_lengths,
            operands.key_value_seq_lengths,
            out,
            lse,
            dout,
            dlse,
        )
        gradients = {"query": dq, "key": dk, "value": dv}
        return Operands(**{name: gradients.get(name) if name in wanted else None for name in _ALL})

    return _on_path(path, kernels, blockwise)(saved, dout, dlse)


_ALL = Operands._fields


# Only a derivative of the rules above comes here.
def _no_second_derivative(*_):
    raise NotImplementedError(
        "jaxflash.dot_product_attention has first derivatives only; for higher ones use "
        "jaxflash.reference.dot_product_attention, which is plain jax.numpy"
    )


_forward.defjvp(_no_second_derivative)
_backward.defjvp(_no_second_derivative)


def _mapped_together(function):
    """`function` of one pytree with two results, both of which `vmap` maps if it maps anything.

    Otherwise lse is not mapped where only the values are, and the rule of a custom_vjp with one
    mapped result and one that is not counts the cotangent of the latter once for every element.
    """
    op = jax.custom_batching.custom_vmap(function)

    @op.def_vmap
    def _(axis_size, mapped, operands):
        _, tree = jax.tree.flatten(operands)
        in_axes = [0 if is_mapped else None for is_mapped in jax.tree.leaves(mapped)]

        def batched(operands):
            return jax.vmap(
                lambda *arrays: function(tree.unflatten(arrays)), in_axes, axis_size=axis_size
            )(*jax.tree.leaves(operands))

        return _mapped_together(batched)(operands), (True, True)

    return op


def _on_path(path: Path, kernels: Callable, blockwise: Callable) -> Callable[..., Any]:
    if path == "xla":
        return blockwise
    if isinstance(path, Fallback):
        return lambda first, *others: blockwise(_ffi.announced(first, path.warn), *others)

    def checked(first, *others):
        return kernels(_ffi.checked(first, only_cuda=path == "cuda"), *others)

    if path == "cuda":
        return checked
    return functools.partial(jax.lax.platform_dependent, cuda=checked, default=blockwise)
