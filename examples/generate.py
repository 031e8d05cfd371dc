"""Trains a small character-level GPT and generates text with it, token by token through a cache.

The attention of Flax's layers is jaxflash's, which reads of the cache what has been written, and
then plain jnp attention, which reads all of it: tokens per second of both.
"""

import functools
import math
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

import jaxflash

sys.path.append(str(Path(__file__).parent))  # which `python -P` and `-m` leave out
import char_gpt
import train_gpt_flax

# A module's mask then says how much of its cache is filled, instead of being read as an array.
attention_fn = functools.partial(jaxflash.attention_fn, mask_is_prefix=True)


def plain_attention_fn(query, key, value, *, mask, **_):
    """Attention by its definition, (*B, T, N, H) each; the mask is that of the cache."""
    logits = jnp.einsum("...tnh,...snh->...nts", query, key, preferred_element_type=jnp.float32)
    logits = jnp.where(mask, logits / math.sqrt(query.shape[-1]), -jnp.inf)
    probabilities = jax.nn.softmax(logits).astype(value.dtype)
    return jnp.einsum("...nts,...snh->...tnh", probabilities, value)


def decoder(shape: char_gpt.Shape, params, attention_fn, sequences: int, temperature: float):
    """A function of (tokens (sequences, T), how many of them are given, key) that returns all T of
    them, those after the given ones drawn one by one, and the logits that each token led to."""
    model = train_gpt_flax.GPT(shape, attention_fn, nnx.Rngs(0))
    nnx.update(model, params)
    for block in model.blocks:
        block.attention.init_cache((sequences, shape.length, shape.width), dtype=shape.dtype)
    graph, params, empty, others = nnx.split(model, nnx.Param, nnx.Cache, ...)

    @jax.jit
    def decode(params, tokens, given, key):
        def step(state, i):
            cache, token, key = state
            model = nnx.merge(graph, params, cache, others)
            logits = model(token[:, None], position=i)[:, 0].astype(jnp.float32)
            cache = nnx.state(model, nnx.Cache)
            key, own = jax.random.split(key)
            drawn = jax.random.categorical(own, logits / temperature).astype(tokens.dtype)
            following = tokens[:, jnp.minimum(i + 1, shape.length - 1)]
            return (cache, jnp.where(i + 1 < given, following, drawn), key), (token, logits)

        positions = jnp.arange(shape.length)
        _, (all_tokens, logits) = jax.lax.scan(step, (empty, tokens[:, 0], key), positions)
        return all_tokens.T, logits

    return functools.partial(decode, params)


def main() -> None:
    parser = char_gpt.parser(__doc__, steps=200, batch=8, length=128)
    parser.add_argument("--prompt", default="The ", help="how the text begins")
    parser.add_argument(
        "--sequences", type=char_gpt.positive(int), default=4, help="texts at a time"
    )
    parser.add_argument(
        "--temperature", type=char_gpt.positive(float), default=0.8, help="of the drawn characters"
    )
    options = char_gpt.parse(parser)
    text = char_gpt.Text(options)
    if unknown := sorted(set(options.prompt) - set(text.characters)):
        options.error(f"--prompt has characters that the text has not: {unknown}")
    if not 1 <= len(options.prompt) < options.length:
        options.error(f"--prompt must have 1 to {options.length - 1} characters")

    shape = text.shape(options)
    build = train_gpt_flax.build(shape, jaxflash.attention_fn, options.seed)
    params = char_gpt.train("jaxflash", options, text, *build).params

    prompt = [text.characters.index(character) for character in options.prompt]
    tokens = jnp.zeros((options.sequences, shape.length), jnp.int32)
    tokens = tokens.at[:, : len(prompt)].set(jnp.array(prompt, jnp.int32))
    key = jax.random.key(options.seed)
    results = {}
    for name, attend in (("jaxflash", attention_fn), ("plain jnp", plain_attention_fn)):
        decode = decoder(shape, params, attend, options.sequences, options.temperature)
        given = len(prompt)
        if results:  # the same text, so that logits can be compared
            tokens, given = results["jaxflash"][0], shape.length
        results[name] = jax.block_until_ready(decode(tokens, given, key))  # compiles
        start = time.perf_counter()
        jax.block_until_ready(decode(tokens, given, key))
        rate = options.sequences * shape.length / (time.perf_counter() - start)
        print(f"{name}: {rate:,.0f} tokens/s, {options.sequences} texts at a time")

    generated = "".join(text.characters[token] for token in results["jaxflash"][0][0].tolist())
    print(f"\n---- one of the texts\n{generated}\n----")
    ours, plain = (logits for _, logits in results.values())
    largest = float(jnp.max(jnp.abs(ours - plain)))
    exact = options.dtype == "float32" and jax.default_backend() == "cpu"
    tolerance = 1e-3 if exact else 0.5  # the largest logits are about 20
    print(f"largest difference of a logit: {largest:.2g} (allowed: {tolerance:g})")
    if not largest <= tolerance:
        sys.exit(f"{options.prog}: error: the logits of jaxflash and of plain jnp disagree")


if __name__ == "__main__":
    main()
