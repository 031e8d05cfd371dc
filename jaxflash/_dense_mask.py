"""A dense mask as the kernels read it: words of bits, and from these what can be skipped.

A pass packs the axis along which a thread has neighbouring elements, 32 to a word, if the mask
depends on it. What else is asked of a mask is asked of the words, an eighth of its bytes.
"""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

Pass = Literal["forward", "backward"]

# Of a mask's axes (h, q, kv): what runs along a fragment's rows in the kernels of a pass.
_PACKED = {"forward": 2, "backward": 1}
_BITS = 32


def axes(mask) -> tuple[int, ...]:
    """Which of (h, q, kv) a mask depends on."""
    return tuple(i for i, size in enumerate(mask.shape[-3:]) if size != 1)


def packed_axis(mask, pass_: Pass) -> int | None:
    """Which of (h, q, kv) is in words, if one is."""
    axis = _PACKED[pass_]
    return axis if axis in axes(mask) else None


def words(mask, pass_: Pass):
    """A mask of uint32, 32 elements each along the packed axis; bool where no axis is packed."""
    axis = packed_axis(mask, pass_)
    return mask if axis is None else _pack(mask, axis - 3)


def bit_of(i):
    """The bit of element i of a word, as a sum: of what depends on a thread, and of a number that
    the compiler knows. Of 16 columns of a matrix product's fragment a thread holds two pairs."""

    def part(shift, mask, factor):
        return ((i >> np.uint32(shift)) & np.uint32(mask)) * np.uint32(factor)

    return part(4, 1, 16) + part(1, 3, 4), part(3, 1, 2) + part(0, 1, 1)


def _place(i):
    first, further = bit_of(i)
    return first + further


def blocks(mask, pass_: Pass, size: int):
    """Of blocks of `size` rows and as many keys, a multiple of 32: which are visible as a whole,
    and which hidden. (..., #N, #ceil(T / size), #ceil(S / size)) each."""
    packed = packed_axis(mask, pass_)
    x = words(mask, pass_)
    # Elements behind the end are hidden in words, elsewhere they are what the others are.
    whole = x if packed is None else x == np.uint32(0xFFFFFFFF)
    empty = ~x if packed is None else x == np.uint32(0)
    for axis in (1, 2):
        if mask.shape[axis - 3] != 1:
            group = size // (_BITS if axis == packed else 1)
            # As of the length itself, which is another expression where it is symbolic.
            count = -(-mask.shape[axis - 3] // size)
            whole, empty = (all_of_groups(x, axis - 3, group, count) for x in (whole, empty))
    return whole, empty


def all_of_groups(x, axis: int, size: int, count=None):
    """Whether all of `size` neighbours along an axis are true; the last ones may be fewer. `count`:
    of these groups, by default as the axis has them."""
    return jnp.all(_in_groups(x, axis, size, True, count), axis=axis)


def any_of_groups(x, axis: int, size: int):
    """Whether one of them is."""
    return jnp.any(_in_groups(x, axis, size, False), axis=axis)


def _in_groups(x, axis: int, size: int, padding: bool, count=None):
    """Groups come before `axis`, which is counted from the end, and takes what is in them."""
    count = -(-x.shape[axis] // size) if count is None else count
    before, after = x.shape[:axis], x.shape[x.ndim + axis + 1 :]
    amounts = [(0, 0)] * x.ndim
    amounts[axis] = (0, size * count - x.shape[axis])
    return jnp.pad(x, amounts, constant_values=padding).reshape(*before, count, size, *after)


def seeing_rows(mask, pass_: Pass):
    """Rows that see a key, (..., #N, #T)."""
    return _any(mask, pass_, 2)


def seen_keys(mask, pass_: Pass):
    """Keys that a row of some head sees, (..., #S)."""
    return jnp.any(_any(mask, pass_, 1), axis=-2)


def _any(mask, pass_: Pass, axis: int):
    """Whether there is an element along one of (h, q, kv)."""
    packed = packed_axis(mask, pass_)
    if packed is None:
        return jnp.any(mask, axis=axis - 3)
    x = words(mask, pass_)
    if packed == axis:
        return jnp.any(x != 0, axis=axis - 3)
    x = jax.lax.reduce_or(x, (x.ndim + axis - 3,))
    return _unpack(x)[..., : mask.shape[packed - 3]]


def _pack(mask, axis: int):
    """Those behind the end are False."""
    axis %= mask.ndim
    count = -(-mask.shape[axis] // _BITS)
    padding = [(0, 0)] * mask.ndim
    padding[axis] = (0, _BITS * count - mask.shape[axis])
    shape = (*mask.shape[:axis], count, _BITS, *mask.shape[axis + 1 :])
    bits = jnp.pad(mask, padding).reshape(shape)
    if axis < mask.ndim - 1:
        # Not as a reduction, for which XLA reads bytes one by one.
        parts = jnp.unstack(bits, axis=axis + 1)
        numbers = _place(np.arange(_BITS, dtype=np.uint32))
        shifted = (x.astype(jnp.uint32) << n for x, n in zip(parts, numbers, strict=True))
        return functools.reduce(jax.lax.bitwise_or, shifted)
    numbers = jax.lax.broadcasted_iota(jnp.uint32, shape, axis + 1)
    return jnp.sum(bits.astype(jnp.uint32) << _place(numbers), axis=-1, dtype=jnp.uint32)


def _unpack(x):
    """Along the last axis."""
    numbers = jax.lax.broadcasted_iota(jnp.uint32, (*x.shape, _BITS), x.ndim)
    bits = (x[..., None] >> _place(numbers)) & np.uint32(1)
    return (bits != 0).reshape(*x.shape[:-1], -1)
