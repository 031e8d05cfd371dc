"""Small calls of attention, with masks or score functions, and whether the reference agrees."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxflash
import mask_values
from check import assert_close
from mask_values import MASK_VALUES
from score_mods import Sizes

B, T, S, N, K, H = 2, 12, 20, 4, 2, 8
SHAPE = (B, N, T, S)

ATTENTIONS = (jaxflash.dot_product_attention, jaxflash.reference.dot_product_attention)


def random_qkv(seed=0, q_len=T, kv_len=S, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = ((B, q_len, N, H), (B, kv_len, K, H), (B, kv_len, K, H))
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def assert_equal(transformed, *arguments):
    """A function of the attention to call, with ours and with the reference."""
    ours, theirs = (jax.jit(functools.partial(transformed, f))(*arguments) for f in ATTENTIONS)
    assert_close(ours, theirs)


# ---- Masks ---------------------------------------------------------------------------------------


def value_and_meaning(name, shape=SHAPE):
    """(mask, what it means)."""
    row = MASK_VALUES[name]
    batch, heads, q_len, kv_len = shape
    arrays = row.arrays(Sizes(batch, heads, q_len, kv_len), np.random.default_rng(1))
    return row.bind(arrays, (batch,)), mask_values.visible(row, arrays, shape)


def sum_of_sines(attention, mask, qkv, **options):
    return jnp.sum(jnp.sin(attention(*qkv, mask=mask, **options)))


# ---- Score functions -----------------------------------------------------------------------------


def random_table(seed=1):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((N, T + S)), jnp.float32)


def relative_positions(table):
    return lambda score, b, h, q, kv: 2.0 * jnp.tanh(score) + table[h, q - kv + S - 1]


# ---- Derivatives ---------------------------------------------------------------------------------


def _moved(qkv):
    return jax.tree.map(jnp.cos, qkv)


ORDERS = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (_moved(x),)),
    "hvp": lambda f, x: jax.jvp(jax.grad(f), (x,), (_moved(x),)),
    "grad of jvp": lambda f, x: jax.grad(lambda y: jax.jvp(f, (y,), (_moved(x),))[1])(x),
}
