"""The dropout mask: which probabilities are kept.

The mask is a function of (seed, batch, head, row, column) alone, so that every implementation,
whatever its tiles, and every pass draws the same one. `cuda/common/dropout.cuh` is its other home.

- A call of the generator decides on eight elements: two rows 8 apart, and two neighbouring columns
  with those 8 after them.
- Its words are ``permute(start + (column, row))`` of the call's first element, where the start of a
  batch element and head is ``permute(permute(seed + pi) + (head, batch))``; sums are by word.
- Word w of the two holds the columns with column % 2 == w, in byte 2 * (row // 8 % 2) +
  column // 8 % 2. Its lower 7 bits are the element's own; the upper one goes unused.
- An element is dropped where its bits are below (``threshold(rate)`` + r) >> 8. The random number
  r is the call's: the upper 8 bits of word 0 ahead of the last round. Given these, the 7 bits of
  each element are uniform over what the other bits can be. So each is dropped at exactly the rate,
  and two of a call are both dropped at one that differs from the square by 2**-16 at most.
- What is kept is multiplied by ``kept_scale(rate)``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

_MULTIPLIER = np.uint32(0x9E3779B1)
_ROUNDS = 7
_PI = (np.uint32(0x243F6A88), np.uint32(0x85A308D3))  # digits; permute() leaves 0 as it is
_LEVELS = 1 << 15  # rates are multiples of 2**-15
_SHARED = 8  # of the 15 bits
_COLUMNS = 16  # of the calls that are next to each other


def threshold(rate: float) -> int:
    """The rate in steps of 2**-15: the nearest number, but not all of them."""
    return min(round(rate * _LEVELS), _LEVELS - 1)


def kept_scale(rate: float) -> float:
    """What a kept probability is multiplied by."""
    return _LEVELS / (_LEVELS - threshold(rate))


def kernel_parameters(seed, rate: float):
    """(3,) uint32: the mask as the kernels are told of it. Another rate compiles nothing."""
    return jnp.concatenate([seed, jnp.full((1,), threshold(rate), jnp.uint32)])


def permute(x0, x1):
    """A permutation of 64 bits whose values at neighbouring numbers look independent.

    Seven rounds of a product and of a byte permutation: the one carries differences to all bits
    above, the other back to the low ones. It stands where Philox2x32-7 or Threefry2x32-13 would
    (Salmon et al. 2011), which take a GPU longer. docs/experiments.md has the tests it passes.

    Args:
        x0, x1: uint32, which broadcast against each other.

    Returns:
        Word 0 ahead of the last round, and the two words after it.
    """
    # Inside `shard_map` one word may vary over mesh axes that the other does not vary over, and the
    # loop wants one type for both.
    zero = (x0 ^ x0) | (x1 ^ x1)

    def cipher_round(_, state):
        x0, x1, multiplier = state
        x0 = x0 * multiplier + x1
        return x0, x1 ^ _reversed_bytes(x0), multiplier * _MULTIPLIER

    # A loop: of a chain, XLA's CPU compiler repeats each round for each use of it, for minutes.
    state = (x0 | zero, x1 | zero, jnp.asarray(_MULTIPLIER))
    state = jax.lax.fori_loop(0, _ROUNDS - 1, cipher_round, state)
    before = state[0]
    x0, x1, _ = cipher_round(_ROUNDS - 1, state)
    return before, x0, x1


def _reversed_bytes(x):
    x = (x << np.uint32(16)) | (x >> np.uint32(16))
    odd = np.uint32(0x00FF00FF)
    return ((x & odd) << np.uint32(8)) | ((x >> np.uint32(8)) & odd)


def keep(seed, rate: float, batch, head, row, first_column, num_columns: int):
    """Which probabilities are kept, for all combinations of what is given.

    Args:
        seed: (2,) uint32.
        rate: dropout rate.
        batch: flat batch indices, int32.
        head: query heads, int32, same rank.
        row: query rows, int32, same rank. The last axis of all three has size 1.
        first_column: first key column, a scalar.
        num_columns: how many columns.

    Returns:
        bool, the broadcast shape of batch, head and row with `num_columns` as its last axis.
    """
    rank = row.ndim
    aligned = isinstance(first_column, int) and first_column % _COLUMNS == 0
    # A first column inside of a group needs one more.
    groups = -(-num_columns // _COLUMNS) + (0 if aligned else 1)
    first_column = jnp.asarray(first_column, jnp.int32)
    first_group, skipped = first_column // _COLUMNS, first_column % _COLUMNS

    batch, head, row = (x.astype(jnp.uint32) for x in (batch, head, row))
    _, *key = permute(*((seed[i] + _PI[i]).reshape((1,) * rank) for i in range(2)))
    _, *start = permute(key[0] + head, key[1] + batch)
    # Of a group the calls that begin in its columns 0, 2, 4 and 6.
    calls = jnp.arange(groups * 4, dtype=jnp.uint32).reshape((1,) * (rank - 1) + (-1,))
    columns = calls // np.uint32(4) * np.uint32(_COLUMNS) + calls % np.uint32(4) * np.uint32(2)
    columns = columns + (first_group * _COLUMNS).astype(jnp.uint32)
    before, *words = permute(start[0] + columns, start[1] + (row & ~np.uint32(8)))

    shared = before >> np.uint32(32 - _SHARED)
    limit = (np.uint32(threshold(rate)) + shared) >> np.uint32(_SHARED)
    upper_half = row // np.uint32(8) % np.uint32(2) * np.uint32(16)

    # Four calls decide on eight columns and on the eight after them, in pairs. An axis that is only
    # split or only joined may be next to others that are sharded explicitly.
    def of_groups(word, byte):
        kept = ((word >> (upper_half + np.uint32(byte))) & np.uint32(0x7F)) >= limit
        return kept.reshape(*kept.shape[:-1], groups, 4)

    kept = [jnp.stack([of_groups(word, byte) for word in words], axis=-1) for byte in (0, 8)]
    kept = jnp.stack(kept, axis=-3)
    kept = kept.reshape(*kept.shape[: rank - 1], groups * _COLUMNS)
    return jax.lax.dynamic_slice_in_dim(kept, skipped, num_columns, axis=rank - 1)
