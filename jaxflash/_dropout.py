"""The dropout mask: which probabilities are kept, drawn by Philox2x32-7 (Salmon et al. 2011).

The mask is a function of (seed, batch, head, row, column) alone, so that every implementation,
whatever its tiles, and every pass draws the same one. `cuda/common/dropout.cuh` is its other home.

- A call of the generator decides on eight elements: two rows 8 apart, and two neighbouring columns
  with those 8 after them.
- Counter: (start_0 + row, start_1 + column) of the call's first element. The two starts of a batch
  element and head come from the generator itself: counter (head, batch), enciphered with the
  first word of the seed as the key, then with the second.
- Key: a constant, whose last round key is 0.
- Word w of the two holds the columns with column % 2 == w, in byte 2 * (row // 8 % 2) +
  column // 8 % 2. Its lower 7 bits are the element's own; the upper one goes unused.
- An element is dropped where its bits are below (``threshold(rate)`` + r) >> 8. The random number
  r is the call's: the upper 8 bits of what the last round multiplies, which depend on no element's
  own bits. So each is dropped at exactly the rate (but for 2**-27 in the upper byte of word 1), and
  two of a call are both dropped at one that differs from the square by 2**-16 at most.
- What is kept is multiplied by ``kept_scale(rate)``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

_MULTIPLIER = 0xD256D193
_INVERSE = pow(_MULTIPLIER, -1, 2**32)
_WEYL = 0x9E3779B9
_ROUNDS = 7
_KEY = -(_ROUNDS - 1) * _WEYL % 2**32
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


def philox2x32(key, counter):
    """Philox2x32-7: a key word and two counter words (uint32) to two random words.

    The words broadcast against each other.
    """
    shape = jnp.broadcast_shapes(*(x.shape for x in (key, *counter)))
    # Inside `shard_map` the key may vary over mesh axes, and the loop wants one type for all three.
    zero = (key ^ key) | (counter[0] ^ counter[0]) | (counter[1] ^ counter[1])
    key, c0, c1 = (jnp.broadcast_to(x, shape) | zero for x in (key, *counter))

    def cipher_round(_, state):
        key, c0, c1 = state
        high, low = _multiply(_MULTIPLIER, c0)
        return key + np.uint32(_WEYL), high ^ c1 ^ key, low

    # A loop: of a chain, XLA's CPU compiler repeats each round for each use of it, for minutes.
    _, c0, c1 = jax.lax.fori_loop(0, _ROUNDS, cipher_round, (key, c0, c1))
    return c0, c1


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
    aligned = isinstance(first_column, int) and first_column % _COLUMNS == 0
    # A first column inside of a group needs one more.
    groups = -(-num_columns // _COLUMNS) + (0 if aligned else 1)
    first_column = jnp.asarray(first_column, jnp.int32)
    first_group, skipped = first_column // _COLUMNS, first_column % _COLUMNS

    key = [seed[i].reshape((1,) * rank) for i in range(2)]
    batch, head, row = (x.astype(jnp.uint32) for x in (batch, head, row))
    starts = philox2x32(key[1], philox2x32(key[0], (head, batch)))
    # Of a group the calls that begin in its columns 0, 2, 4 and 6.
    calls = jnp.arange(groups * 4, dtype=jnp.uint32).reshape((1,) * (rank - 1) + (-1,))
    columns = calls // np.uint32(4) * np.uint32(_COLUMNS) + calls % np.uint32(4) * np.uint32(2)
    columns = columns + (first_group * _COLUMNS).astype(jnp.uint32)
    words = philox2x32(jnp.uint32(_KEY), (starts[0] + (row & ~np.uint32(8)), starts[1] + columns))

    # The last round makes word 1 of this.
    shared = (words[1] * np.uint32(_INVERSE)) >> np.uint32(32 - _SHARED)
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
