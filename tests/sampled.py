"""Checks of results whose dense truth does not fit: chosen rows and keys recomputed in float64.

A row of out, lse and dq needs the keys that it sees; a key's dk and dv the rows that see it, with
their lse and out, which the rows before have shown to be right.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxflash
import larger_machine
from check import UNIT
from naive import softmax_sum

# Relative error of one rounding of an operand of a product.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "tf32": 2.0**-10, "float32": 4 * UNIT}


@dataclasses.dataclass
class Call:
    """Device arrays (B, length, heads, size) of one call and its results."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    dout: jax.Array
    out: jax.Array
    lse: jax.Array
    dquery: jax.Array
    dkey: jax.Array
    dvalue: jax.Array
    arithmetic: str
    left: int | None = None
    right: int | None = None  # 0: causal

    @property
    def scale(self) -> float:
        return self.query.shape[-1] ** -0.5

    @property
    def group(self) -> int:
        return self.query.shape[2] // self.key.shape[2]

    def keys_of(self, row: int) -> tuple[int, int]:
        """The keys that a row sees, as a range."""
        first = 0 if self.left is None else max(0, row - self.left)
        last = self.key.shape[1] - 1
        return first, (last if self.right is None else min(last, row + self.right)) + 1

    def rows_of(self, key: int) -> tuple[int, int]:
        """The rows that see a key, as a range."""
        first = 0 if self.right is None else max(0, key - self.right)
        last = self.query.shape[1] - 1
        return first, (last if self.left is None else min(last, key + self.left)) + 1


def random_array(seed: int, shape, dtype) -> jax.Array:
    """Roughly normal numbers that differ everywhere, made without temporaries of their size."""
    batch, length, heads, size = shape
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((997, size), np.float32)
    sizes = rng.standard_normal((8191, heads), np.float32)

    @jax.jit
    def make(vectors, sizes):
        token = jnp.arange(length)[None, :] + 31 * jnp.arange(batch)[:, None]
        head = jnp.arange(heads)[None, None]
        directions = vectors[(token[..., None] * 7 + head * 13) % 997]
        return (directions * sizes[token % 8191][..., None]).astype(dtype)

    return make(vectors, sizes)


def run(shapes, dtype, arithmetic, seed=0, left=None, right=None, implementation="cuda") -> Call:
    """Forward and gradients of one call; `shapes` of query, key and value. Skips the test where JAX
    may not take as much memory as that."""
    shapes = *shapes, (*shapes[0][:3], shapes[2][3])
    causal = right == 0
    window = None if left is None and (right is None or causal) else (left, right)
    attend = functools.partial(
        jaxflash.dot_product_attention,
        implementation=implementation, return_residual=True, is_causal=causal,
        local_window_size=window,
    )  # fmt: skip

    @jax.jit
    def step(query, key, value, dout):
        (out, lse), pull = jax.vjp(attend, query, key, value)
        return out, lse, *pull((dout, jnp.zeros_like(lse)))

    lowered = step.lower(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))
    compiled = lowered.compile()
    _need_memory(compiled)
    query, key, value, dout = (random_array(seed + i, x, dtype) for i, x in enumerate(shapes))
    results = compiled(query, key, value, dout)
    return Call(query, key, value, dout, *results, arithmetic, left, right)


def _need_memory(compiled) -> None:
    sizes, of_device = compiled.memory_analysis(), jax.devices()[0].memory_stats()
    if of_device is None:  # a CPU's
        return
    needed = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
    limit = of_device["bytes_limit"]  # XLA_PYTHON_CLIENT_MEM_FRACTION of the GPU's
    if needed > limit:
        larger_machine.skip(f"{needed / 2**30:.1f} GiB, and JAX may take {limit / 2**30:.1f}")


def _slice(x, batch, first, last, head) -> np.ndarray:
    """Of (B, length, heads, ...), some positions of one head, in float64."""
    index = np.arange(first, last, dtype=np.int32)
    return np.asarray(_gather(x, batch, index, head)).astype(np.float64)


@jax.jit
def _gather(x, batch, index, head):
    return x[batch][:, head][index] if x.size < 2**28 else x[batch, index, head]


def check(call: Call, rows, keys) -> None:
    """`rows` as (batch, row, query head), `keys` as (batch, key, key head)."""
    for row in rows:
        _check_row(call, *row)
    for key in keys:
        _check_key(call, *key)


def _check_row(call: Call, batch: int, row: int, head: int) -> None:
    where = f"batch {batch}, row {row}, head {head}"
    first, last = call.keys_of(row)
    k = _slice(call.key, batch, first, last, head // call.group)
    v = _slice(call.value, batch, first, last, head // call.group)
    q, dout, out, dq = (
        _slice(x, batch, row, row + 1, head)[0]
        for x in (call.query, call.dout, call.out, call.dquery)
    )
    lse = _slice(call.lse[..., None], batch, row, row + 1, head)[0, 0]
    logits = call.scale * (k @ q)
    true_out, true_lse = softmax_sum(logits, v)
    p = np.exp(logits - true_lse)
    rounding = ROUNDING[call.arithmetic]
    # Each logit is a sum of rounded products, and lse their mean in a way.
    logit_error = 0.0 if call.arithmetic in ("float16", "bfloat16") else rounding
    allowed = 1e-5 * (1 + abs(true_lse)) + logit_error * call.scale * np.max(
        np.linalg.norm(k * q, axis=-1)
    )
    assert abs(lse - true_lse) <= 4 * allowed, f"lse, {where}: got {lse}, expected {true_lse}"
    _compare("out", where, out, true_out, p[:, None] * v, rounding)
    delta = dout @ true_out
    ds = p * (v @ dout - delta)
    coherent = np.linalg.norm(dout * true_out) * np.linalg.norm(call.scale * (p @ k))
    terms = call.scale * (p * (np.abs(v @ dout) + abs(delta)))[:, None] * k
    _compare("dquery", where, dq, call.scale * (ds @ k), terms, rounding, coherent)


def _check_key(call: Call, batch: int, key: int, kv_head: int) -> None:
    where = f"batch {batch}, key {key}, key head {kv_head}"
    first, last = call.rows_of(key)
    k = _slice(call.key, batch, key, key + 1, kv_head)[0]
    v = _slice(call.value, batch, key, key + 1, kv_head)[0]
    true_dk, true_dv = np.zeros(k.shape), np.zeros(v.shape)
    dk_terms, dv_terms = [], []
    for head in range(kv_head * call.group, (kv_head + 1) * call.group):
        q, dout, out = (
            _slice(x, batch, first, last, head) for x in (call.query, call.dout, call.out)
        )
        lse = _slice(call.lse[..., None], batch, first, last, head)[:, 0]
        p = np.exp(call.scale * (q @ k) - lse)
        delta = np.sum(dout * out, axis=-1)
        ds = call.scale * p * (dout @ v - delta)
        true_dv += p @ dout
        true_dk += ds @ q
        dv_terms.append(p[:, None] * dout)
        dk_terms.append((call.scale * p * (np.abs(dout @ v) + np.abs(delta)))[:, None] * q)
    rounding = ROUNDING[call.arithmetic]
    dk, dv = (_slice(x, batch, key, key + 1, kv_head)[0] for x in (call.dkey, call.dvalue))
    _compare("dvalue", where, dv, true_dv, np.concatenate(dv_terms), rounding)
    _compare("dkey", where, dk, true_dk, np.concatenate(dk_terms), rounding)


def _compare(name, where, actual, truth, terms, rounding, coherent=0.0) -> None:
    """Independent roundings of the summands, of the result, and float32's own summation."""
    error = np.linalg.norm(actual - truth)
    allowed = 4 * rounding * (np.linalg.norm(truth) + np.linalg.norm(terms) + coherent)
    allowed += 64 * UNIT * np.linalg.norm(np.sum(np.abs(terms), axis=0))
    assert error <= allowed, (
        f"{name}, {where}: error {error:.3g}, allowed {allowed:.3g}; starts with "
        f"{actual[:4]}, expected {truth[:4]}"
    )
