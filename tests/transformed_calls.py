"""Calls of attention that transformations of JAX are tested on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import jaxflash

B, T, S, N, K, H = 2, 24, 20, 4, 2, 16

dense = jaxflash.reference.dot_product_attention


def random_qkv(*batch, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((*batch, T, N, H), (*batch, S, K, H), (*batch, S, K, H))
    return tuple(rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes)


def uneven_loss(attend, **options):
    """A scalar function of query, key, value that depends on out and lse, unevenly."""

    def loss(query, key, value):
        out, lse = attend(query, key, value, return_residual=True, **options)
        weights = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
        seen = jnp.where(jnp.isfinite(lse), lse, 0)
        return jnp.sum(jnp.sin(out) * weights) + jnp.sum(seen**2).astype(out.dtype)

    return loss


def on_cpu(tree):
    return jax.device_put(tree, jax.devices("cpu")[0])
