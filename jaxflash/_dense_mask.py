"""A dense mask as the kernels read it: words of bits, and what can be skipped.

A kernel of its own packs 32 elements to a word along the axis along which a thread has neighbouring
ones, and finds in the same pass what blocks of 64 rows and keys show.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxflash._ranges import Shown

Pass = Literal["forward", "backward"]

# Of a mask's axes (h, q, kv): what runs along a fragment's rows in the kernels of a pass.
_PACKED = {"forward": 2, "backward": 1}
_BITS = 32


class DenseMask(NamedTuple):
    """What a pass reads of a mask (*#B, #N, #T, #S).

    Attributes:
        elements: uint32, 32 each along the packed axis, those behind the end False; bool where no
            axis is packed: (*#B, *those of #N, #T and #S that the mask depends on).
        shown: what is visible.
        sees: which rows see a key, (*#B, #N, #T).
        is_seen: which keys a row of some head sees, (*#B, #S).
    """

    elements: Any
    shown: Shown
    sees: Any
    is_seen: Any


def axes(mask) -> tuple[int, ...]:
    """Which of (h, q, kv) a mask depends on."""
    return tuple(i for i, size in enumerate(mask.shape[-3:]) if size != 1)


def packed_axis(mask, pass_: Pass) -> int | None:
    """Which of (h, q, kv) is in words, if one is."""
    axis = _PACKED[pass_]
    return axis if axis in axes(mask) else None


def own_type(mask, pass_: Pass) -> jax.ShapeDtypeStruct:
    """That of a pass's elements, without batch axes."""
    packed = packed_axis(mask, pass_)
    sizes = {axis: mask.shape[axis - 3] for axis in axes(mask)}
    if packed is not None:
        sizes[packed] = -(-sizes[packed] // _BITS)
    dtype = jnp.bool_ if packed is None else jnp.uint32
    return jax.ShapeDtypeStruct(tuple(sizes.values()), dtype)


def bit_of(i):
    """The bit of element i of a word, as a sum: of what depends on a thread, and of a number that
    the compiler knows. Of 16 columns of a matrix product's fragment a thread holds two pairs."""

    def part(shift, mask, factor):
        return ((i >> np.uint32(shift)) & np.uint32(mask)) * np.uint32(factor)

    return part(4, 1, 16) + part(1, 3, 4), part(3, 1, 2) + part(0, 1, 1)
