"""A dense mask as the kernels read it: words of bits, and what can be skipped.

A kernel of its own packs 32 elements to a word along the axis along which a thread has neighbouring
ones, and finds in the same pass what blocks of 64 rows and keys show. In the forward pass four
threads share a row: of 128 keys each has a word of its own, and the words of the next row follow,
so that what a warp loads at once are 128 bytes.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxflash._ranges import Shown

PassName = Literal["forward", "backward"]

# Of a mask's axes (h, q, kv): what runs along a fragment's rows in the kernels of a pass.
_PACKED = {"forward": 2, "backward": 1}
# cuda/problem.h: DenseMaskParams.
_BITS = 32  # of a word
_SHARERS = 4  # threads that have the keys of a row


class DenseMask(NamedTuple):
    """What a pass reads of a mask (*#B, #N, #T, #S) in a call of T queries and S keys.

    Attributes:
        elements: (*#B, *those of `own_type`): words along the packed axis, bits behind an end
            False; bools where no axis is packed.
        shown: what is visible.
    """

    elements: Any
    shown: Shown


def axes(mask) -> tuple[int, ...]:
    """Which of (h, q, kv) a mask depends on."""
    return tuple(i for i, size in enumerate(mask.shape[-3:]) if size != 1)


def packed_axis(mask, pass_: PassName) -> int | None:
    """Which of (h, q, kv) is in words, if one is."""
    axis = _PACKED[pass_]
    return axis if axis in axes(mask) else None


def word_shape(rows, keys, pass_: PassName) -> tuple[Any, ...]:
    """Of the words that a pass reads of a mask (rows, keys): see DenseMaskParams in
    cuda/problem.h."""
    if pass_ == "backward":
        return -(-rows // _BITS), keys
    return -(-keys // (_BITS * _SHARERS)), rows, _SHARERS


# Which of (h, q, kv) index the axes of such words.
_WORD_AXES = {"forward": (2, 1, 2), "backward": (1, 2)}


def own_type(mask, pass_: PassName) -> jax.ShapeDtypeStruct:
    """That of a pass's elements, without batch axes."""
    own = axes(mask)
    if packed_axis(mask, pass_) is None:
        return jax.ShapeDtypeStruct(tuple(mask.shape[axis - 3] for axis in own), jnp.bool_)
    heads, rows, keys = mask.shape[-3:]
    words = zip(_WORD_AXES[pass_], word_shape(rows, keys, pass_), strict=True)
    sizes = (0, heads), *words
    return jax.ShapeDtypeStruct(tuple(n for axis, n in sizes if axis in own), jnp.uint32)


def place_of(mask_axes: tuple[int, ...], packed: int, h, q, kv):
    """(index, bit) of an element in words packed along an axis: the word of elements of such a
    type, and the bit as two terms: of what depends on a thread or a tile, and of a number that the
    compiler knows. Of 16 columns of a matrix product's fragment a thread holds two pairs."""

    def part(i, shift, mask, factor=1):
        return ((i >> np.uint32(shift)) & np.uint32(mask)) * np.uint32(factor)

    i = (h, q, kv)[packed].astype(jnp.uint32)  # negative ones would cost an instruction
    known = part(i, 3, 1, 2) + part(i, 0, 1)
    if packed == _PACKED["forward"]:
        sharer = (kv >> np.int32(1)) & np.int32(_SHARERS - 1)
        index = (0, h), (2, i >> np.uint32(7)), (1, q), (2, sharer)
        bit = part(i, 4, 7, 4)
    else:
        index = (0, h), (1, i >> np.uint32(5)), (2, kv)
        bit = part(i, 4, 1, 16) + part(i, 1, 3, 4)
    return tuple(i for axis, i in index if axis in mask_axes), (bit, known)
