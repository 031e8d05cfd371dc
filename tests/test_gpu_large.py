"""Long, wide and large calls on the GPU: offsets past 2^31, grids past 65,535, sampled checks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxflash
from sampled import check, run

pytestmark = pytest.mark.gpu


def _samples(call, count=4, seed=0):
    """First and last positions, and some between: (rows, keys)."""
    rng = np.random.default_rng(seed)

    def of(batch, length, heads):
        corners = [(0, 0, 0), (batch - 1, length - 1, heads - 1), (0, length - 1, 0)]
        drawn = [tuple(int(rng.integers(n)) for n in (batch, length, heads)) for _ in range(count)]
        return corners + drawn

    return of(*call.query.shape[:3]), of(*call.key.shape[:3])


def _check(call, **samples):
    check(call, *_samples(call, **samples))


def test_past_2_31_elements():
    """Each of q, k, v, out and the gradients has more than 2^31 elements."""
    shape = (1, 131_072 + 72, 128, 128)
    assert np.prod(shape) > 2**31
    call = run([shape] * 3, jnp.bfloat16, "bfloat16", left=128, right=0)
    rows, keys = _samples(call)
    # Rows on both sides of the element 2^31.
    boundary = 2**31 // (128 * 128)
    rows += [(0, boundary - 1, 127), (0, boundary, 0), (0, boundary + 1, 5)]
    keys += [(0, boundary - 1, 127), (0, boundary, 0)]
    check(call, rows, keys)


def test_past_2_31_elements_in_the_batch():
    shape = (1024 + 3, 64, 256, 128)
    assert np.prod(shape) > 2**31
    call = run([shape] * 3, jnp.bfloat16, "bfloat16", right=0)
    _check(call)


def test_batch_stride_past_2_31_elements():
    """From one sequence of keys to the next; few queries, so that the rest of dk and dv is 0."""
    keys = (2, 1_048_576 + 8, 16, 128)
    assert np.prod(keys[1:]) > 2**31
    call = run([(2, 300, 16, 128), keys, keys], jnp.bfloat16, "bfloat16", right=0)
    rows = [(1, 0, 0), (1, 299, 15), (0, 299, 3), (1, 150, 7)]
    check(call, rows, [(0, 0, 0), (1, 0, 15), (1, 299, 0), (1, 150, 9), (1, keys[1] - 1, 15)])
    assert not bool(jnp.any(call.dkey[:, 300:])), "keys that no query sees have a gradient"


def test_65536_times_32_batch_heads():
    call = run([(65_536, 16, 32, 16)] * 3, jnp.bfloat16, "bfloat16")
    _check(call)
    assert bool(jnp.isfinite(call.dkey).all())


def test_a_million_tokens_in_a_window():
    call = run([(1, 1_048_576, 1, 128)] * 3, jnp.bfloat16, "bfloat16", left=4096, right=0)
    _check(call)


def test_131072_tokens_of_float32():
    """Within 1 GB beyond inputs and outputs."""
    attend = functools.partial(jaxflash.dot_product_attention, implementation="cuda")
    shape = jax.ShapeDtypeStruct((131_072, 1, 128), jnp.float32)

    def step(query, key, value, dout):
        out, pull = jax.vjp(attend, query, key, value)
        return out, pull(dout)

    compiled = jax.jit(step).lower(shape, shape, shape, shape).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 1e9
    _check(run([(1, 131_072, 1, 128)] * 3, jnp.float32, "tf32"), count=1)


def test_batch_32_of_4096():
    _check(run([(32, 4096, 16, 128)] * 3, jnp.bfloat16, "bfloat16", right=0))


def test_one_query_and_a_million_keys():
    call = run(
        [(1, 1, 32, 128), (1, 1_048_576, 1, 128), (1, 1_048_576, 1, 128)], jnp.bfloat16, "bfloat16"
    )
    _check(call)


def test_many_queries_and_one_key():
    call = run([(2, 300_000, 8, 64), (2, 1, 2, 64), (2, 1, 2, 64)], jnp.float16, "float16")
    check(call, _samples(call)[0], [])


def test_highest_precision():
    """Within 2e-6 of a float64 reference, forward and gradients."""
    rng = np.random.default_rng(0)
    qkv = [rng.standard_normal((2, 1024, 4, 64), np.float32) for _ in range(3)]
    dout = rng.standard_normal((2, 1024, 4, 64), np.float32)

    def step(attend, *qkv):
        out, pull = jax.vjp(attend, *qkv)
        return out, *pull(dout.astype(out.dtype))

    attend = functools.partial(
        jaxflash.dot_product_attention, implementation="cuda", precision="highest"
    )
    actual = jax.jit(functools.partial(step, attend))(*qkv)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        reference = functools.partial(step, jaxflash.reference.dot_product_attention)
        expected = jax.jit(reference)(*(x.astype(np.float64) for x in qkv))
    for name, x, y in zip(("out", "dquery", "dkey", "dvalue"), actual, expected, strict=True):
        y = np.asarray(y)
        error = np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y)
        assert error <= 2e-6, f"{name}: {error:.2g}"
