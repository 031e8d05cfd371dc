"""Trains a character-level GPT written in Flax NNX whose attention is jaxflash's."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

import jaxflash

sys.path.append(str(Path(__file__).parent))  # which `python -P` and `-m` leave out
import char_gpt


class Block(nnx.Module):
    def __init__(self, shape: char_gpt.Shape, attention_fn, rngs: nnx.Rngs):
        width, dtype = shape.width, shape.dtype
        self.attention_norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=shape.heads,
            in_features=width,
            dtype=dtype,
            attention_fn=attention_fn,  # all that jaxflash needs
            decode=False,
            rngs=rngs,
        )
        self.mlp_norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.expand = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.contract = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x, decode=False):
        x = x + self.attention(self.attention_norm(x), is_causal=not decode, decode=decode)
        return x + self.contract(jax.nn.gelu(self.expand(self.mlp_norm(x))))


class GPT(nnx.Module):
    def __init__(self, shape: char_gpt.Shape, attention_fn, rngs: nnx.Rngs):
        width, dtype = shape.width, shape.dtype
        small = nnx.initializers.normal(0.1)
        self.tokens = nnx.Embed(
            shape.vocabulary, width, embedding_init=small, dtype=dtype, rngs=rngs
        )
        self.positions = nnx.Embed(
            shape.length, width, embedding_init=small, dtype=dtype, rngs=rngs
        )
        self.blocks = nnx.List(Block(shape, attention_fn, rngs) for _ in range(shape.layers))
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(width, shape.vocabulary, dtype=dtype, rngs=rngs)

    def __call__(self, tokens, position=None):
        """Logits of whole sequences or, where a position is given, of the one token there, which
        sees the caches of the layers."""
        decode = position is not None
        numbers = position[None] if decode else jnp.arange(tokens.shape[-1])
        x = self.tokens(tokens) + self.positions(numbers)
        for block in self.blocks:
            x = block(x, decode)
        return self.head(self.norm(x))


def build(shape: char_gpt.Shape, attention_fn, seed: int):
    graph, params = nnx.split(GPT(shape, attention_fn, nnx.Rngs(seed)), nnx.Param)
    return params, lambda params, tokens: nnx.merge(graph, params)(tokens)


def plain_attention_fn(query, key, value, **_):
    return char_gpt.plain_attention(query, key, value)


if __name__ == "__main__":
    char_gpt.main(__doc__, build, jaxflash.attention_fn, plain_attention_fn)
