"""Masks as values: which query sees which key, without an array over queries and keys.

Each function makes an immutable value, a pytree whose leaves are the arrays that it was given. It
can be an argument of `jax.jit`, `jax.vmap` or `jax.lax.scan`; other arrays compile nothing new.
Values are combined with ``&``, ``|`` and ``~``, also with bool arrays, and the argument `mask` of
`jaxflash.dot_product_attention` takes the result::

    from jaxflash import masks

    mask = masks.causal() & masks.segments(ids) | masks.function(lambda b, h, q, kv: kv < 4)
    out = jaxflash.dot_product_attention(query, key, value, mask=mask)

In shapes, ``*B`` is any number of batch axes, ``N`` query heads, ``T`` query length and ``S`` key
length.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jaxflash import _api, _arguments, _derivatives, _mask, _platform, _sharding, _support
from jaxflash._mask import (
    Mask,
    causal,
    dense,
    function,
    intervals,
    lengths,
    segments,
    window,
)

__all__ = [
    "Mask",
    "as_array",
    "causal",
    "dense",
    "function",
    "intervals",
    "lengths",
    "plan",
    "segments",
    "window",
]


def plan(mask: Mask, shape: tuple[int, ...]) -> Mask:
    """The same mask, together with what a call would first find out: which tiles it can skip.

    To find that out, a call evaluates a mask function, or a mask made with ``|`` or ``~``, once for
    each query and key. If several calls share a mask, such as the layers of a network, they can
    share a plan that is made once. A plan is itself a mask. ``plan & other`` keeps what was found,
    ``|`` and ``~`` discard it.

    Args:
      mask: a value of this module. Those made of bands, lengths, segments and arrays with ``&``
        alone need no plan.
      shape: ``(*B, N, T, S)``, the sizes of the calls; a 1 does not stand for others.

    Raises:
      ValueError: the mask does not fit the shape; or, in a call, what the plan holds does not fit
        its sizes (that of a mask which is the same for all batch elements fits any number of them).

    Examples:
      One plan for all layers of a scan::

          mask = masks.plan(prefix_lm, (batch, heads, length, length))
          x, _ = jax.lax.scan(lambda x, weights: (layer(weights, x, mask), None), x, layers)
    """
    mask, (batch, heads, q_len, kv_len) = _checked(mask, shape)
    query = jax.ShapeDtypeStruct((*batch, q_len, heads, 1), jnp.float32)
    key_heads = 1 if heads == 0 else heads
    key = jax.ShapeDtypeStruct((*batch, kv_len, key_heads, 1), jnp.float32)
    with _sharding.mesh_of(*jax.tree.leaves(mask)):
        # Calls may have more than masks, beside which a dilated one is evaluated.
        spec, operands = _api.described(query, key, key, mask=mask, in_classes=False)
        if spec.predicate is None:
            return _mask.Planned(mask, {}, (*batch, heads))
        # Whatever path the calls will take.
        by_kernel = _platform.has_partitioner() and _support.plans_by_kernel(spec, operands)
        path = "auto" if by_kernel else "xla"
        given = operands.named().items()
        types = tuple((name, x) for name, x in given if _arguments.is_abstract(x))
        arrays = {name: x for name, x in given if not _arguments.is_abstract(x)}
        found = _derivatives.planned(spec, path, types, arrays)
    return _mask.Planned(mask, found, (*batch, heads))


def as_array(mask: Mask, shape: tuple[int, ...]) -> jax.Array:
    """What a mask means: a bool array ``(*B, N, T, S)``, True where the query sees the key.

    For inspection and tests: it takes memory for all queries and keys.

    Args:
      mask: a value of this module.
      shape: ``(*B, N, T, S)``, the sizes of a call.

    Raises:
      ValueError: the mask does not fit the shape.

    Examples:
      A window that reaches back over two keys::

          masks.as_array(masks.window(2, 0), (1, 5, 5))[0]
    """
    mask, (batch, heads, q_len, kv_len) = _checked(mask, shape)
    shape = (*batch, heads, q_len, kv_len)
    if 0 in shape:
        return jnp.zeros(shape, jnp.bool_)
    return _meaning(_sharding.whole(mask), shape)


def _meaning(mask: Mask, shape: tuple[Any, ...]) -> jax.Array:
    *batch, _, q_len, kv_len = shape
    # The last query stands at the last key.
    valid_queries, valid_keys = _mask.valid_lengths(mask, q_len, kv_len)
    offset = (valid_keys - valid_queries)[..., None, None, None]
    row = jnp.arange(q_len, dtype=jnp.int32)[:, None]
    column = jnp.arange(kv_len, dtype=jnp.int32)[None, :]

    def meaning(mask: Mask):
        match mask:
            case _mask.And(terms):
                return functools.reduce(jnp.logical_and, map(meaning, terms))
            case _mask.Or(terms):
                return functools.reduce(jnp.logical_or, map(meaning, terms))
            case _mask.Not(of):
                return ~meaning(of)
            case _mask.Planned(of):
                return meaning(of)
            case _mask.Window(left, right, alignment):
                position = full(row)
                if alignment == "bottom_right":
                    position = position + full(offset)
                distance = position - full(column)
                visible = jnp.ones(shape, jnp.bool_)
                if left is not None:
                    visible &= distance <= min(left, _mask.INT32_MAX)
                if right is not None:
                    visible &= distance >= -min(right, _mask.INT32_MAX)
                return visible
            case _mask.Lengths(query, key_value):
                visible = jnp.ones(shape, jnp.bool_)
                if query is not None:
                    visible &= full(row) < full(query[..., None, None, None])
                if key_value is not None:
                    visible &= full(column) < full(key_value[..., None, None, None])
                return visible
            case _mask.Segments(query_ids, key_ids):
                return full(query_ids[..., None, :, None]) == full(key_ids[..., None, None, :])
            case _mask.Intervals(begin, end, "query"):
                begin, end = full(begin[..., :, None]), full(end[..., :, None])
                return (begin <= full(column)) & (full(column) < end)
            case _mask.Intervals(begin, end, _):
                begin, end = full(begin[..., None, :]), full(end[..., None, :])
                return (begin <= full(row)) & (full(row) < end)
            case _mask.Dense(array):
                return full(array)
            case _mask.Function():
                numbers = (jnp.arange(n, dtype=jnp.int32) for n in (math.prod(batch), *shape[-3:]))
                of_element = mask
                for axis in reversed(range(4)):
                    in_axes = [0 if i == axis else None for i in range(4)]
                    in_axes += [None] * len(mask.captures)
                    of_element = jax.vmap(of_element, in_axes)
                return of_element(*numbers, *mask.captures).reshape(shape)
        raise ValueError(f"{type(mask).__name__} is no mask of jaxflash.masks")

    def full(x):
        return jnp.broadcast_to(x, shape)

    return meaning(mask)


def _checked(mask, shape) -> tuple[Mask, _mask.Sizes]:
    """A mask that fits (*batch, query heads, T, S)."""
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a value of jaxflash.masks, got {type(mask).__name__}")
    *batch, heads, q_len, kv_len = _sizes_in(shape)
    sizes = _mask.Sizes(tuple(batch), heads, q_len, kv_len)
    return _mask.fitted(mask, sizes), sizes


def _sizes_in(shape) -> tuple[Any, ...]:
    """The sizes that a shape holds."""

    def is_size(n) -> bool:
        if isinstance(n, (int, np.integer)):
            return int(n) >= 0
        return bool(export.is_symbolic_dim(n))

    sizes = tuple(shape) if isinstance(shape, (Sequence, np.ndarray)) else ()
    if len(sizes) < 3 or not all(map(is_size, sizes)):
        raise ValueError(
            f"shape must be (*batch, query heads, T, S), integers of 0 or more, got {shape!r}"
        )
    return tuple(int(n) if isinstance(n, np.integer) else n for n in sizes)
