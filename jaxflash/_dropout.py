"""The dropout mask: which probabilities are kept, drawn by Philox4x32-10.

The mask is a function of (seed, batch, head, row, column) alone, so that every implementation,
whatever its tiles, and every pass draws the same one:

- key: the two words of the seed;
- counter: (column // 8, row, query head, flat batch index), the batch axes counted row-major;
- output word w in 0 ... 3 holds column 8 * (column // 8) + 2 * w in its low 16 bits and the column
  after it in its high 16 bits;
- a probability is kept where its 16 bits are at least ``threshold(rate)``, and then multiplied by
  ``1 / (1 - threshold(rate) / 65536)``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
COLUMNS_PER_COUNTER = 8


def threshold(rate: float) -> int:
    """Of the 65536 values of a 16-bit number, how many mean 'dropped'."""
    return min(round(rate * 65536), 65535)


def kept_scale(rate: float) -> float:
    """What a kept probability is multiplied by."""
    return 65536 / (65536 - threshold(rate))


def philox4x32(key, counter):
    """Philox4x32-10: two key words and four counter words (uint32) to four random words.

    The words broadcast against each other.
    """
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + np.uint32(_WEYL[0]), k1 + np.uint32(_WEYL[1])
    return c0, c1, c2, c3


def _multiply(constant: int, x):
    """(high, low) words of the 64-bit product, in 16-bit halves: JAX has no uint64 by default."""
    mask, half = np.uint32(0xFFFF), np.uint32(16)
    a_low, a_high = np.uint32(constant & 0xFFFF), np.uint32(constant >> 16)
    x_low, x_high = x & mask, x >> half
    middle = a_high * x_low + ((a_low * x_low) >> half)  # at most 2**32 - 2**16: no carry is lost
    middle_low = a_low * x_high + (middle & mask)
    high = a_high * x_high + (middle >> half) + (middle_low >> half)
    return high, np.uint32(constant) * x


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
    aligned = isinstance(first_column, int) and first_column % COLUMNS_PER_COUNTER == 0
    # A first column inside a group of eight needs one more group.
    groups = -(-num_columns // COLUMNS_PER_COUNTER) + (0 if aligned else 1)
    first_column = jnp.asarray(first_column, jnp.int32)
    first_group, skipped = first_column // COLUMNS_PER_COUNTER, first_column % COLUMNS_PER_COUNTER
    group = first_group + jax.lax.broadcasted_iota(
        jnp.int32, (1,) * (rank - 1) + (groups,), rank - 1
    )
    key = tuple(seed[i].reshape((1,) * rank) for i in range(2))
    words = philox4x32(key, tuple(x.astype(jnp.uint32) for x in (group, row, head, batch)))
    words = jnp.stack(words, axis=-1)
    halves = jnp.stack((words & np.uint32(0xFFFF), words >> np.uint32(16)), axis=-1)
    kept = halves >= np.uint32(threshold(rate))
    kept = kept.reshape(*words.shape[: rank - 1], groups * COLUMNS_PER_COUNTER)
    return jax.lax.dynamic_slice_in_dim(kept, skipped, num_columns, axis=rank - 1)
