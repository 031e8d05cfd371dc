"""Milliseconds of tracing and of lowering a gradient, on any machine: what a first call takes
beside compiling.

    python -m benchmarks.tracing > tracing.json

Each figure is the median of calls of lengths not seen before, in a process that is warm.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time

import jax
import jax.numpy as jnp

import jaxflash
from jaxflash import masks

_BATCH, _HEADS, _HEAD_DIM, _MAPPED, _TURNS = 2, 8, 64, 3, 5


def _options(length: int) -> dict[str, dict]:
    table = jnp.zeros((_HEADS, 2 * length), jnp.float32)
    few = jnp.array([3, 4], jnp.int32)
    return {
        "causal": dict(is_causal=True),
        "segments": dict(is_causal=True, segment_ids=jnp.zeros((_BATCH, length), jnp.int32)),
        "mask function": dict(
            mask=masks.causal() | masks.function(lambda b, h, q, kv, n: kv < n[b], few)
        ),
        "score_mod": dict(
            is_causal=True, score_mod=lambda s, b, h, q, kv: s + table[h, q - kv + length]
        ),
    }


def _measured(name: str, transform: str, platform: str, length: int) -> tuple[float, float]:
    options = _options(length)[name]

    def loss(query, key, value):
        out = jaxflash.dot_product_attention(query, key, value, **options)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    gradient = jax.grad(loss, (0, 1, 2))
    shape = (_BATCH, length, _HEADS, _HEAD_DIM)
    if transform == "vmap of grad":
        gradient, shape = jax.vmap(gradient), (_MAPPED, *shape)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    start = time.perf_counter()
    traced = jax.jit(gradient).trace(x, x, x)
    middle = time.perf_counter()
    traced.lower(lowering_platforms=(platform,))
    return (middle - start) * 1e3, (time.perf_counter() - middle) * 1e3


def main() -> None:
    rows = []
    lengths = itertools.count(512, 16)
    for name in _options(16):
        for transform in ("grad", "vmap of grad"):
            for platform in ("cpu", "cuda"):
                _, *turns = (
                    _measured(name, transform, platform, next(lengths)) for _ in range(1 + _TURNS)
                )
                trace, lower = (round(statistics.median(x), 1) for x in zip(*turns, strict=True))
                row = dict(call=name, transform=transform, platform=platform)
                rows.append(row | dict(trace=trace, lower=lower))
    print(json.dumps(dict(jax=jax.__version__, rows=rows), indent=1))


if __name__ == "__main__":
    main()
