"""Trains a character-level GPT written in Equinox whose attention is jaxflash's."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp

import jaxflash

sys.path.append(str(Path(__file__).parent))  # which `python -P` and `-m` leave out
import char_gpt


class Attention(eqx.Module):
    """Causal self-attention on one sequence, (T, width).

    Equinox modules take one example, and the caller maps them over the batch. `jaxflash` takes
    arrays without a batch axis, (T, N, H), and under `jax.vmap` becomes one call for the batch.
    """

    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    heads: int = eqx.field(static=True)
    attention: Callable = eqx.field(static=True)

    def __init__(self, shape: char_gpt.Shape, attention: Callable, key: jax.Array):
        qkv_key, out_key = jax.random.split(key)
        self.qkv = eqx.nn.Linear(shape.width, 3 * shape.width, key=qkv_key)
        self.out = eqx.nn.Linear(shape.width, shape.width, key=out_key)
        self.heads = shape.heads
        self.attention = attention

    def __call__(self, x):
        length, width = x.shape
        query, key, value = (
            part.reshape(length, self.heads, width // self.heads)
            for part in jnp.split(jax.vmap(self.qkv)(x), 3, axis=-1)
        )
        out = self.attention(query, key, value)
        return jax.vmap(self.out)(out.reshape(length, width))


class Block(eqx.Module):
    attention_norm: eqx.nn.LayerNorm
    attention: Attention
    mlp_norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, shape: char_gpt.Shape, attention: Callable, key: jax.Array):
        attention_key, mlp_key = jax.random.split(key)
        width = shape.width
        self.attention_norm = eqx.nn.LayerNorm(width)
        self.attention = Attention(shape, attention, attention_key)
        self.mlp_norm = eqx.nn.LayerNorm(width)
        self.mlp = eqx.nn.MLP(width, width, 4 * width, depth=1, activation=jax.nn.gelu, key=mlp_key)

    def __call__(self, x):
        x = x + self.attention(jax.vmap(self.attention_norm)(x))
        return x + jax.vmap(self.mlp)(jax.vmap(self.mlp_norm)(x))


class GPT(eqx.Module):
    tokens: jax.Array  # (vocabulary, width)
    positions: jax.Array  # (length, width)
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, shape: char_gpt.Shape, attention: Callable, key: jax.Array):
        tokens_key, positions_key, head_key, *keys = jax.random.split(key, 3 + shape.layers)
        width = shape.width
        self.tokens = 0.1 * jax.random.normal(tokens_key, (shape.vocabulary, width))
        self.positions = 0.1 * jax.random.normal(positions_key, (shape.length, width))
        self.blocks = [Block(shape, attention, key) for key in keys]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, shape.vocabulary, key=head_key)

    def __call__(self, tokens):
        """Logits (T, vocabulary) of one sequence of tokens (T)."""
        x = self.tokens[tokens] + self.positions[: tokens.shape[0]]
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def build(shape: char_gpt.Shape, attention: Callable, seed: int):
    model = GPT(shape, attention, jax.random.key(seed))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def apply(params, tokens):
        # The parameters stay float32; activations and matrix products are in the chosen dtype.
        params = jax.tree.map(lambda x: x.astype(shape.dtype), params)
        return jax.vmap(eqx.combine(params, static))(tokens)

    return params, apply


if __name__ == "__main__":
    char_gpt.main(
        __doc__,
        build,
        functools.partial(jaxflash.dot_product_attention, is_causal=True),
        char_gpt.plain_attention,
    )
