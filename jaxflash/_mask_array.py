"""Masks as arrays: what they mean, element by element. `as_array` is part of `jaxflash.masks`."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jaxflash import _mask, _sharding
from jaxflash._mask import Mask


def as_array(mask: Mask, shape: tuple[int, ...]) -> jax.Array:
    """What a mask means: a bool array ``(*B, N, T, S)``, True where the query sees the key.

    For inspection and tests: it takes memory for all queries and keys.

    Args:
      mask: a value of `jaxflash.masks`.
      shape: ``(*B, N, T, S)``, the sizes of a call.

    Raises:
      ValueError: the mask does not fit the shape.

    Examples:
      A window that reaches back over two keys::

          masks.as_array(masks.window(2, 0), (1, 5, 5))[0]
    """
    mask, (batch, heads, q_len, kv_len) = checked(mask, shape)
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


def checked(mask, shape) -> tuple[Mask, _mask.Sizes]:
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
