"""The blockwise path never holds anything of size T x S, and its memory grows linearly."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

import jaxflash
from jaxflash import _extension, _ffi
from jaxprs import equations


def _gradient(**options):
    attend = functools.partial(jaxflash.dot_product_attention, implementation="xla", **options)

    def loss(*qkv):
        return jnp.sum(attend(*qkv) ** 2)

    return jax.grad(loss, (0, 1, 2))


def _tangents(**options):
    attend = functools.partial(jaxflash.dot_product_attention, implementation="xla", **options)
    return lambda *qkv: jax.jvp(attend, qkv, tuple(map(jnp.cos, qkv)))


def _gradient_of_tangents(**options):
    """By the operands and by their tangents."""

    def loss(*qkv):
        out, t_out = _tangents(**options)(*qkv)
        return jnp.sum(out * t_out)

    return jax.grad(loss, (0, 1, 2))


def _shapes(length, dtype=jnp.float32, heads=4, head_dim=64):
    return [jax.ShapeDtypeStruct((1, length, heads, head_dim), dtype)] * 3


_OPTIONS = {
    "plain": dict(),
    "causal": dict(is_causal=True),
    "window": dict(local_window_size=(100, 100)),
    "soft cap": dict(logits_soft_cap=10.0, is_causal=True),
}


def _temporary_bytes(length, **options):
    compiled = jax.jit(_gradient(**options)).lower(*_shapes(length)).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize("options", _OPTIONS.values(), ids=_OPTIONS)
def test_no_array_of_logits(options):
    """The largest array anywhere in the traced gradient of (1, 8192, 8192, 4, 64)."""
    length, heads, head_dim = 8192, 4, 64
    largest = max(
        math.prod(variable.aval.shape)
        for equation in equations(_gradient(**options), *_shapes(length))
        for variable in equation.outvars
        if hasattr(variable.aval, "shape")
    )
    # Room for a block of keys against all queries; the logits have 64 times the inputs' size here.
    operand = length * heads * head_dim
    assert largest <= 8 * operand
    assert largest < heads * length * length / 16


def test_tiles_of_a_narrow_window():
    """Most of a larger tile would be beside it."""
    products = [
        math.prod(equation.outvars[0].aval.shape)
        for equation in equations(_gradient(local_window_size=(32, 0)), *_shapes(4096))
        if equation.primitive.name == "dot_general"
    ]
    assert max(products) == 4 * 128 * 128


def test_compiled_memory_is_linear():
    if jax.default_backend() != "cpu":
        pytest.skip("measures the CPU compiler")
    small, large = _temporary_bytes(4096, is_causal=True), _temporary_bytes(16384, is_causal=True)
    operand = 4 * 16384 * 4 * 64
    assert large <= 5 * small  # 4 times the length; quadratic would be 16
    assert large <= 24 * operand  # dq dk dv out lse, and blocks


_AT_32K = {
    "causal gradient": (_gradient(is_causal=True), 2e9),
    "tangents": (_tangents(), 3e9),
    "gradient of tangents": (_gradient_of_tangents(), 3e9),
}


@pytest.mark.parametrize(("function", "most"), _AT_32K.values(), ids=_AT_32K)
def test_bytes_at_32k(function, most):
    """(1, 32768, 32768, 4, 64) float32, all included."""
    if jax.default_backend() != "cpu":
        pytest.skip("measures the CPU compiler")
    memory = jax.jit(function).lower(*_shapes(32768)).compile().memory_analysis()
    assert memory is not None
    total = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    assert total < most


def _workspace(function, *operands) -> tuple[int, str]:
    """Bytes of the CUDA backward pass in a function's derivative, and its call."""
    if not _extension.kernels:
        pytest.skip("the library was built without kernels")
    traced = jax.jit(function).trace(*operands)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    call = rf"@{_ffi.BACKWARD_TARGET}\(.*-> .*tensor<(\d+)xui8>.*"
    (found,) = re.finditer(call, text)
    return int(found.group(1)), found.group(0)


def test_workspace_of_short_sequences():
    """Of the CUDA backward pass: queries are not padded to whole tiles."""

    def loss(*qkv):
        return jnp.sum(jaxflash.dot_product_attention(*qkv, implementation="cuda"))

    query = jax.ShapeDtypeStruct((4096, 16, 8, 32), jnp.bfloat16)
    workspace, _ = _workspace(jax.grad(loss, (0, 1, 2)), query, query, query)
    assert workspace < 4 * query.size * query.dtype.itemsize


@pytest.mark.parametrize(
    ("shape", "kv_heads"), [((4, 4096, 16, 128), 16), ((4, 512, 8, 128), 8), ((4, 4096, 16, 64), 2)]
)
def test_workspace_of_sums_over_the_batch(shape, kv_heads):
    """Beside the sum, two numbers for each tile of 128 keys and its batch element and head."""
    batch, length, heads, head_dim = shape
    query = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    key = jax.ShapeDtypeStruct((batch, length, kv_heads, head_dim), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((1, heads, length, length), jnp.bfloat16)

    def loss(bias, *qkv):
        return jnp.sum(jaxflash.dot_product_attention(*qkv, bias=bias, implementation="cuda"))

    operands = bias, query, key, key
    with_bias, call = _workspace(jax.grad(loss, (0, 1, 2, 3)), *operands)
    without, _ = _workspace(jax.grad(loss, (1, 2, 3)), *operands)
    assert "kSumsBatch = true;" in call
    assert with_bias - without == batch * kv_heads * (length // 128) * 8
