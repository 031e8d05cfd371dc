"""Attention inside Flax and Equinox, against the same modules with their own attention."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jaxflash

B, T, FEATURES, HEADS = 2, 12, 32, 4


def _x(seed=0):
    return np.random.default_rng(seed).standard_normal((B, T, FEATURES), np.float32)


def _close(actual, expected):
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5),
        jax.device_get(actual),
        jax.device_get(expected),
    )


# ---- Flax nnx -----------------------------------------------------------------------------------


def _nnx_module(**options):
    return nnx.MultiHeadAttention(
        num_heads=HEADS, in_features=FEATURES, decode=False, rngs=nnx.Rngs(0), **options
    )


def _nnx_loss_and_gradient(module, x, **call):
    def loss(module):
        return jnp.sum(jnp.sin(module(x, **call)))

    value, gradient = nnx.jit(nnx.value_and_grad(loss))(module)
    return value, nnx.to_pure_dict(nnx.state(gradient, nnx.Param))


@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
def test_nnx(mask):
    masks = {
        "none": None,
        "causal": nnx.make_causal_mask(np.ones((B, T))),
        "padding": nnx.make_attention_mask(
            np.ones((B, T), np.float32), (np.arange(T) < np.array([[T], [5]])).astype(np.float32)
        ),
    }
    call = dict(mask=masks[mask])
    # Flax's helpers make float32 masks, which its own attention turns into bool.
    assert mask == "none" or call["mask"].dtype == jnp.float32
    expected = _nnx_loss_and_gradient(
        _nnx_module(), _x(), mask=None if masks[mask] is None else masks[mask].astype(bool)
    )
    actual = _nnx_loss_and_gradient(_nnx_module(attention_fn=jaxflash.attention_fn), _x(), **call)
    _close(actual, expected)


def test_nnx_bfloat16():
    module = _nnx_module(attention_fn=jaxflash.attention_fn, dtype=jnp.bfloat16)
    assert nnx.jit(module)(_x()).dtype == jnp.bfloat16


def test_nnx_dropout():
    module = _nnx_module(attention_fn=jaxflash.attention_fn, dropout_rate=0.5)
    run = nnx.jit(lambda module, rngs: module(_x(), deterministic=False, rngs=rngs))
    first, second = run(module, nnx.Rngs(1)), run(module, nnx.Rngs(2))
    assert not np.allclose(first, second)
    np.testing.assert_array_equal(first, run(module, nnx.Rngs(1)))
    _close(module(_x(), deterministic=True), _nnx_module()(_x()))


def test_nnx_sowing_is_refused():
    module = _nnx_module(attention_fn=jaxflash.attention_fn)
    with pytest.raises(ValueError, match="sow_weights"):
        module(_x(), sow_weights=True)


# ---- Flax linen ---------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_linen(causal):
    mask = linen.make_causal_mask(np.ones((B, T))) if causal else None
    module = functools.partial(linen.MultiHeadDotProductAttention, num_heads=HEADS)
    own = module()
    parameters = own.init(jax.random.key(0), _x())

    def run(module):
        def loss(parameters):
            return jnp.sum(jnp.sin(module.apply(parameters, _x(), mask=mask)))

        return jax.jit(jax.value_and_grad(loss))(parameters)

    _close(run(module(attention_fn=jaxflash.attention_fn)), run(own))


def test_linen_dropout():
    module = linen.MultiHeadDotProductAttention(
        num_heads=HEADS, dropout_rate=0.5, attention_fn=jaxflash.attention_fn
    )
    parameters = module.init(jax.random.key(0), _x(), deterministic=True)

    def run(seed):
        return module.apply(
            parameters, _x(), deterministic=False, rngs={"dropout": jax.random.key(seed)}
        )

    assert not np.allclose(run(1), run(2))
    np.testing.assert_array_equal(run(1), run(1))


# ---- The adapter itself -------------------------------------------------------------------------


def _qkv():
    return (_x().reshape(B, T, HEADS, -1),) * 3


@pytest.mark.parametrize("dtype", [bool, np.int32, np.float32])
def test_masks_of_numbers(dtype):
    mask = np.tril(np.ones((T, T))).astype(dtype)
    _close(
        jaxflash.attention_fn(*_qkv(), mask=mask),
        jaxflash.dot_product_attention(*_qkv(), is_causal=True),
    )


def test_bias_and_causal():
    bias = np.random.default_rng(0).standard_normal((HEADS, T, T), np.float32)
    _close(
        jaxflash.attention_fn(*_qkv(), bias, is_causal=True),
        jaxflash.dot_product_attention(*_qkv(), bias, is_causal=True),
    )


def test_deterministic_means_no_dropout():
    plain = jaxflash.dot_product_attention(*_qkv())
    key = jax.random.key(0)
    options = dict(dropout_rate=0.5, dropout_rng=key)
    _close(jaxflash.attention_fn(*_qkv(), **options, deterministic=True), plain)
    dropped = jaxflash.attention_fn(*_qkv(), **options)
    _close(dropped, jaxflash.dot_product_attention(*_qkv(), **options))
    assert not np.allclose(dropped, plain)


@pytest.mark.parametrize("name", ["qk_attn_weights_einsum", "attn_weights_value_einsum", "module"])
def test_what_a_fused_kernel_cannot_do(name):
    with pytest.raises(ValueError, match=name):
        jaxflash.attention_fn(*_qkv(), **{name: jnp.einsum})


# ---- Equinox ------------------------------------------------------------------------------------


class _Attention(eqx.Module):
    """The recipe: an unbatched module, (T, N, H) arrays, `vmap` outside."""

    projections: eqx.nn.Linear
    output: eqx.nn.Linear
    fused: bool = eqx.field(static=True)

    def __init__(self, fused, *, key):
        first, second = jax.random.split(key)
        self.projections = eqx.nn.Linear(FEATURES, 3 * FEATURES, key=first, dtype=jnp.float32)
        self.output = eqx.nn.Linear(FEATURES, FEATURES, key=second, dtype=jnp.float32)
        self.fused = fused

    def __call__(self, x):
        qkv = jax.vmap(self.projections)(x).reshape(x.shape[0], 3, HEADS, -1)
        attend = jaxflash.dot_product_attention if self.fused else jax.nn.dot_product_attention
        out = attend(qkv[:, 0], qkv[:, 1], qkv[:, 2], is_causal=True)
        return jax.vmap(self.output)(out.reshape(x.shape))


@pytest.mark.parametrize("per_example", [False, True])
def test_equinox(per_example):
    """Gradients of the batch, and of each example (vmap of grad)."""

    def run(fused):
        module = _Attention(fused, key=jax.random.key(0))

        def loss(module, x):
            return jnp.sum(jnp.sin(jax.vmap(module)(x) if not per_example else module(x)))

        gradient = eqx.filter_grad(loss)
        if per_example:
            gradient = eqx.filter_vmap(gradient, in_axes=(None, 0))
        return jax.tree.leaves(eqx.filter_jit(gradient)(module, _x()))

    _close(run(True), run(False))
