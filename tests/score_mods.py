"""Score functions as named rows: what users write, and what is easy to get wrong.

Each makes its captured arrays for the sizes of a call, and the function of them. The function takes
(score, b, h, q, kv), as `score_mod` does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a call: batch elements, query heads, queries, keys."""

    batch: int
    heads: int
    q_len: int
    kv_len: int


@dataclasses.dataclass(frozen=True)
class ScoreMod:
    """A score function: its arrays, by name, and the function of score, indices and these."""

    name: str
    function: Callable  # (score, b, h, q, kv, **arrays)
    arrays: Callable = lambda sizes, rng: {}

    def bind(self, arrays: dict) -> Callable:
        def score_mod(*arguments):
            # As users write them: the package itself must do without.
            with jax.numpy_dtype_promotion("standard"):
                return self.function(*arguments, **arrays)

        return score_mod


def _normal(rng, *shape, dtype="float32"):
    return rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))


def _integers(rng, low, high, *shape, dtype="int32"):
    return rng.integers(low, high, shape).astype(dtype)


def _row(function, arrays=None) -> ScoreMod:
    name = function.__name__.strip("_").replace("_", "-")
    return ScoreMod(name, function, arrays or (lambda sizes, rng: {}))


def _rows_of_heads(score, b, h, q, kv, slopes):
    return score - slopes[h] * jnp.abs(q - kv)


# Among them some that leave a row one key, and one that prefers what is far away.
_SLOPES = np.array([0.3, -0.02, 0.0, 20.0, 400.0, 1e6, 2.0, 0.05], np.float32)


def _slope_of_all_heads(score, b, h, q, kv):
    return score - 0.05 * (q - kv)


def _slopes_of_all_kinds(score, b, h, q, kv, slopes):
    return score - slopes[h] * jnp.abs(q - kv)


def _cap(score, b, h, q, kv):
    return 5.0 * jnp.tanh(score / 5.0)


def _learned_cap(score, b, h, q, kv, cap):
    return cap * jnp.tanh(score / cap)


def _temperature(score, b, h, q, kv, temperature, shift):
    return score * temperature[h] + shift[h, q]


def _dense_bias(score, b, h, q, kv, bias):
    return score + bias[b, h, q, kv]


def _dense_bias_by_parts(score, b, h, q, kv, bias):
    return score + bias[b][h, q][kv]


def _key_bias(score, b, h, q, kv, bias):
    return score + bias[b, kv].astype(jnp.float32)


def _relative_table(score, b, h, q, kv, table):
    half = table.shape[-1] // 2
    return score + table[h, jnp.clip(q - kv, -half, half) + half]


def _distances(score, b, h, q, kv, table):
    return score + table[h, q - kv + table.shape[1] // 2]


def _distances_of_batch(score, b, h, q, kv, table):
    offset = kv - q + (table.shape[2] // 2 - 1)
    return 5.0 * jnp.tanh((score - 2.0 * table[b, h // 2, offset]) / 5.0)


def _few_distances(score, b, h, q, kv, table):
    """Indices beyond both ends: negative ones count from the end, then all are clamped."""
    return score + table[h, q - kv + 20].astype(jnp.float32)


def _buckets(score, b, h, q, kv, table):
    distance = jnp.maximum(q - kv, 0)
    large = 4 + (jnp.log(jnp.maximum(distance, 1) / 4.0) * 2.0).astype(jnp.int32)
    bucket = jnp.where(distance < 4, distance, jnp.minimum(large, table.shape[1] - 1))
    return score + table[h, bucket]


def _clipped_take(score, b, h, q, kv, table):
    """Negative indices are clipped to 0, where indexing counts them from the end."""
    return score + jnp.take(table, q - kv, mode="clip")


def _times(score, b, h, q, kv, query_times, key_times):
    """Their differences are small, they are larger than what float32 holds."""
    return score - 0.01 * jnp.abs(query_times[q] // 4 - key_times[kv] // 4)


def _times_as_floats(score, b, h, q, kv, query_times, key_times):
    """The same of floats, which are rounded once they are scaled."""
    return score - 0.7 * (query_times[q] - key_times[kv])


def _log_of_times(score, b, h, q, kv, query_times, key_times):
    """Whose difference is there before anything is added to it."""
    return score - jnp.log(query_times[q] - key_times[kv] + 1001.0)


def _padding(score, b, h, q, kv, table, keep):
    """What hides is large, and nothing where it does not: others are added to that."""
    return score + table[h, kv] + (1.0 - keep[b, kv].astype(jnp.float32)) * -1e9


def _quotients(score, b, h, q, kv, widths):
    """Of whole numbers, rounded down and compared where they are whole."""
    product = q.astype(jnp.float32) * kv.astype(jnp.float32)
    bucket = (product / widths[h]).astype(jnp.int32) - (product / 10.0 >= 1.0)
    return score + 0.1 * jnp.floor(product / 49.0) + 0.1 * bucket


def _softsign(score, b, h, q, kv, table, keep, gain):
    """With divisors from 2^126 on, whose products with what is beside them are infinite."""
    score = 0.2 * score + jnp.where(keep[h, kv], table[h, kv], -1e38)
    return gain[h] * (score / (1.0 + jnp.abs(score)))


def _squared_distance(score, b, h, q, kv):
    return score - 1e-3 * (q - kv) ** 2 + 1e-5 * (q - kv) ** 3


def _documents(score, b, h, q, kv, query_ids, key_ids):
    return jnp.where(query_ids[b, q] == key_ids[b, kv], score, -jnp.inf)


def _documents_finite(score, b, h, q, kv, query_ids, key_ids):
    return jnp.where(query_ids[b, q] == key_ids[b, kv], score, jnp.finfo(jnp.float32).min)


def _lookup_of_lookup(score, b, h, q, kv, kinds, table):
    return score + table[kinds[q], kinds[kv]]


def _integer_arithmetic(score, b, h, q, kv):
    mixed = (q * 31 + kv * 17) // 5 % 7 - (q - kv) // 3 % 4 + (q ^ kv) % 3
    bits = ((q << 2) | (kv >> 1)) & 5
    return score + 0.1 * mixed - 0.05 * bits + jnp.where((q + kv) % 2 == 0, 0.25, -0.25)


def _powers_of_two(score, b, h, q, kv):
    """Divisions of negative numbers as well, rounded down and towards zero."""
    distance = q - kv
    down = distance // 16 + distance % 8 - (-distance) // 2 % 2 + (kv // 4 - q // 2) % 16
    to_zero = jax.lax.rem(distance, jnp.int32(4)) - jax.lax.div(distance, jnp.int32(8))
    dilated = (distance % 4 == 0) | ((h * 3 - kv) % 8 != 0) | (distance % 1 != 0)
    return score + 0.05 * down - 0.1 * to_zero + jnp.where(dilated, 0.25, -0.25)


def _wrapping_hash(score, b, h, q, kv):
    x = (q * 1103515245 + kv * 12345 + h * 777767777) ^ (b * 97)
    x = x.astype(jnp.uint32) * jnp.uint32(2654435761)
    return score + (x >> 24).astype(jnp.float32) / 256.0


def _from_the_end(score, b, h, q, kv, table):
    return score + table[-1 - h, -kv - 1] + table[0, -2]


def _matrix_of_element(score, b, h, q, kv, biases):
    return score + biases[b, q, kv]


def _matrix_by_number(score, b, h, q, kv, biases, numbers):
    return score + biases[numbers[b], q, kv]


def _both_ways(score, b, h, q, kv, table):
    return score + table[h, q, kv] + table[0, kv, q]


def _out_of_bounds(score, b, h, q, kv, table):
    return score + table[h + 1000, q - 5 * kv]


def _strided(score, b, h, q, kv):
    visible = ((q - kv) % 3 == 0) | (jnp.abs(q - kv) < 4) | ((h == 0) & (kv < 2))
    return jnp.where(visible, score, -jnp.inf)


def _branches(score, b, h, q, kv):
    tilted = jax.lax.select(h % 2 == 0, score * 0.5, score - 0.01 * q)
    return jnp.minimum(jnp.maximum(tilted, -3.0), 4.0) + jnp.sign(score) * 0.1


def _cond(score, b, h, q, kv, table):
    """By positions and, within a branch, by the score, where both are the same."""

    def behind(s):
        gain = table[h, -1]
        return jax.lax.cond(
            score > 1.0, lambda s: gain * (2.0 * s - 1.0), lambda s: gain * s * s, s
        )

    return jax.lax.cond(q >= kv, lambda s: s + table[h, kv], behind, score)


def _switch(score, b, h, q, kv, table, slopes):
    """By numbers that are clamped at both ends."""
    branches = [
        lambda s: 0.5 * s + table[h, kv],
        lambda s: s - slopes[h] * jnp.abs(q - kv),
        lambda s: jnp.tanh(s * slopes[h]) + table[0, q],
        lambda s: jnp.where(kv % 2 == 0, -s, table[h, (q + kv) // 2]),
    ]
    return jax.lax.switch((q + 2 * kv) % 7 - 1, branches, score)


def _cases(score, b, h, q, kv, kinds, table):
    kind, gain = kinds[h, q], table[h, kv]
    score = jax.lax.select_n(kind, score, gain * score, jnp.sin(score), gain - score)
    return jax.lax.select_n((kv > q).astype(jnp.int32), score, 0.5 * score)


def _elementary(score, b, h, q, kv):
    x = 0.3 * score
    y = jnp.sin(x) + 0.1 * jnp.exp(-jnp.square(x)) + jnp.log1p(jnp.abs(x)) + jnp.power(x, 3)
    y = y + jnp.sqrt(x * x + 1.0) + jax.nn.sigmoid(x) / (1.0 + x**2) - jnp.expm1(0.1 * x) + x**5
    y = y + jnp.cos(0.5 * q) * jax.lax.rsqrt(1.0 + kv.astype(jnp.float32))
    return y - jnp.log(2.0 + x * x) + 0.1 * jnp.log2(3.0 + x * x)


def _custom_derivative(score, b, h, q, kv):
    return jax.nn.relu(score) + jax.nn.silu(score) - 0.2 * jax.nn.softplus(score)


@jax.custom_jvp
def _rounded(x):
    return jnp.round(x)


_rounded.defjvp(lambda primals, tangents: (jnp.round(primals[0]), tangents[0]))


def _straight_through(score, b, h, q, kv, table):
    """Of slope 1, but not the score and what is added to it."""
    return score + 0.5 * jax.lax.stop_gradient(score) + table[h, kv]


def _straight_through_rounding(score, b, h, q, kv):
    return _rounded(2.0 * score) - score


def _cancelled(score, b, h, q, kv, table):
    """A slope in which the score is left with a coefficient of 0."""
    return (score - table[kv]) ** 2 - score**2


def _factor_of_one(score, b, h, q, kv, gate):
    """A capture that moves, and nothing that it adds or multiplies with."""
    return score * jnp.where(gate[h] > 0, 1.0, 1.0)


def _ignores_the_score(score, b, h, q, kv, table):
    return table[h, q]


def _constant(score, b, h, q, kv):
    return 0.0


def _scalar_arrays(score, b, h, q, kv, gain, flag, shift):
    return jnp.where(flag, score * gain, score) + shift.astype(jnp.float32)


def _flags(score, b, h, q, kv, keep, weights):
    return jnp.where(keep[h, kv] & (weights[q] > 0), score + weights[q] % 3, score - 1.0)


def _compared_flags(score, b, h, q, kv, rows, columns):
    """Bools are in an order, too: False before True."""
    row, column = rows[q], columns[kv]
    visible = (row >= column) & ((row < column) | (row <= column) | (column > (kv < q)))
    return jnp.where(visible | (row != column), score, -jnp.inf)


def _per_head_and_arrays(sizes, rng):
    return {
        "temperature": 1.0 + 0.3 * rng.random(sizes.heads).astype(np.float32),
        "shift": _normal(rng, sizes.heads, sizes.q_len),
    }


def _times_of(sizes, rng, first):
    return {
        "query_times": first + np.sort(_integers(rng, 0, 500, sizes.q_len)),
        "key_times": first + np.sort(_integers(rng, 0, 500, sizes.kv_len)),
    }


def _ids(sizes, rng):
    return {
        "query_ids": np.sort(_integers(rng, 0, 4, sizes.batch, sizes.q_len)),
        "key_ids": np.sort(_integers(rng, 0, 4, sizes.batch, sizes.kv_len)),
    }


def _square_table(sizes, rng):
    length = max(sizes.q_len, sizes.kv_len)
    return {"table": _normal(rng, sizes.heads, length, length, dtype="bfloat16")}


def _full(sizes, rng):
    return {"bias": _normal(rng, sizes.batch, sizes.heads, sizes.q_len, sizes.kv_len)}


SCORE_MODS = {
    row.name: row
    for row in (
        _row(_rows_of_heads, lambda s, r: {"slopes": 0.3 * r.random(s.heads).astype(np.float32)}),
        _row(_slope_of_all_heads),
        _row(_slopes_of_all_kinds, lambda s, r: {"slopes": np.resize(_SLOPES, s.heads)}),
        _row(_cap),
        _row(_learned_cap, lambda s, r: {"cap": np.float32(4.0) + np.zeros((), np.float32)}),
        _row(_temperature, _per_head_and_arrays),
        _row(_dense_bias, _full),
        _row(_dense_bias_by_parts, _full),
        _row(_key_bias, lambda s, r: {"bias": _normal(r, s.batch, s.kv_len, dtype="bfloat16")}),
        _row(_relative_table, lambda s, r: {"table": _normal(r, s.heads, 21)}),
        _row(_distances, lambda s, r: {"table": _normal(r, s.heads, s.q_len + s.kv_len + 2)}),
        _row(
            _distances_of_batch,
            lambda s, r: {"table": _normal(r, s.batch, s.heads, 2 * max(s.q_len, s.kv_len))},
        ),
        _row(_few_distances, lambda s, r: {"table": _normal(r, s.heads, 45, dtype="bfloat16")}),
        _row(_buckets, lambda s, r: {"table": _normal(r, s.heads, 10, dtype="float16")}),
        _row(_clipped_take, lambda s, r: {"table": _normal(r, 9)}),
        _row(_times, lambda s, r: _times_of(s, r, 1_700_000_000)),
        _row(
            _times_as_floats,
            lambda s, r: {k: x.astype(np.float32) for k, x in _times_of(s, r, 131_072).items()},
        ),
        _row(
            _log_of_times,
            lambda s, r: {k: x.astype(np.float32) for k, x in _times_of(s, r, 30_000_000).items()},
        ),
        _row(
            _padding,
            lambda s, r: {
                "table": _normal(r, s.heads, s.kv_len),
                "keep": r.random((s.batch, s.kv_len)) < 0.7,
            },
        ),
        _row(_quotients, lambda s, r: {"widths": np.float32(49.0) + np.zeros(s.heads, np.float32)}),
        _row(
            _softsign,
            lambda s, r: {
                "table": _normal(r, s.heads, s.kv_len),
                "keep": r.random((s.heads, s.kv_len)) < 0.7,
                "gain": 20.0 + r.random(s.heads).astype(np.float32),
            },
        ),
        _row(_squared_distance),
        _row(_documents, _ids),
        _row(_documents_finite, _ids),
        _row(
            _lookup_of_lookup,
            lambda s, r: {
                "kinds": _integers(r, 0, 5, max(s.q_len, s.kv_len)),
                "table": _normal(r, 5, 5),
            },
        ),
        _row(_integer_arithmetic),
        _row(_powers_of_two),
        _row(_wrapping_hash),
        _row(_from_the_end, lambda s, r: {"table": _normal(r, s.heads, s.kv_len)}),
        _row(
            _matrix_of_element,
            lambda s, rng: {"biases": _normal(rng, s.batch, s.q_len, s.kv_len, dtype="bfloat16")},
        ),
        _row(
            _matrix_by_number,
            lambda s, rng: {
                "biases": _normal(rng, 3, s.q_len, s.kv_len, dtype="bfloat16"),
                "numbers": _integers(rng, 0, 3, s.batch),
            },
        ),
        _row(_both_ways, _square_table),
        _row(_out_of_bounds, lambda s, r: {"table": _normal(r, s.heads, 7)}),
        _row(_strided),
        _row(_branches),
        _row(_cond, lambda s, r: {"table": _normal(r, s.heads, s.kv_len)}),
        _row(
            _switch,
            lambda s, r: {
                "table": _normal(r, s.heads, max(s.q_len, s.kv_len)),
                "slopes": 0.3 * r.random(s.heads).astype(np.float32),
            },
        ),
        _row(
            _cases,
            lambda s, r: {
                "kinds": _integers(r, 0, 4, s.heads, s.q_len),
                "table": _normal(r, s.heads, s.kv_len),
            },
        ),
        _row(_elementary),
        _row(_custom_derivative),
        _row(_straight_through, lambda s, r: {"table": _normal(r, s.heads, s.kv_len)}),
        _row(_straight_through_rounding),
        _row(_cancelled, lambda s, r: {"table": _normal(r, s.kv_len)}),
        _row(_factor_of_one, lambda s, r: {"gate": _normal(r, s.heads)}),
        _row(_ignores_the_score, lambda s, r: {"table": _normal(r, s.heads, s.q_len)}),
        _row(_constant),
        _row(
            _scalar_arrays,
            lambda s, r: {
                "gain": np.asarray(0.7, np.float32),
                "flag": np.asarray(True),
                "shift": np.asarray(0.5, jnp.bfloat16),
            },
        ),
        _row(
            _compared_flags,
            lambda s, r: {
                "rows": r.random(s.q_len) < 0.5,
                "columns": r.random(s.kv_len) < 0.5,
            },
        ),
        _row(
            _flags,
            lambda s, r: {
                "keep": r.random((s.heads, s.kv_len)) < 0.6,
                "weights": _integers(r, 0, 9, s.q_len, dtype="uint32"),
            },
        ),
    )
}
