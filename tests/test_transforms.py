"""Transformations of JAX, against the same transformation of the plain reference; exported programs
are in test_export.py, several devices in test_sharding.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxflash
from check import assert_close, assert_same_bits, on_gpu
from jaxflash import _ffi
from jaxprs import calls_of, equations, products
from marks import needs_kernels
from transformed_calls import B, H, K, N, S, T, dense, random_qkv, uneven_loss

pytestmark = pytest.mark.usefixtures("accurate_products", "quick_compilation")


def _both(attend, transform, *arguments):
    """`transform(attention)` on arguments gives what it gives for the reference."""
    actual = jax.jit(transform(attend))(*arguments)
    expected = jax.jit(transform(dense))(*arguments)
    assert_close(actual, expected)


# ---- jit, grad, vmap -----------------------------------------------------------------------------


def test_jit_is_eager(attend):
    """To the bit; XLA's own products on a GPU follow what surrounds them."""
    qkv = random_qkv(B)
    compare = (
        assert_close
        if on_gpu() and attend.keywords["implementation"] == "xla"
        else assert_same_bits
    )
    compare(jax.jit(attend)(*qkv), attend(*qkv))


def test_residual_changes_nothing(attend):
    qkv = random_qkv(B)
    assert_same_bits(attend(*qkv), attend(*qkv, return_residual=True)[0])


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_bias_of_the_lowest_number_hides(attend, dtype):
    """As models make masks of it; its logits leave the range of float32 on the kernels."""
    visible = np.tri(T, S, k=1, dtype=bool)
    bias = jnp.where(visible, 0, jnp.finfo(dtype).min).astype(dtype)

    def value_and_gradients(**options):
        loss = uneven_loss(attend, **options)
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*random_qkv())

    assert_close(value_and_gradients(bias=bias), value_and_gradients(mask=visible))


def test_new_lengths_do_not_compile_again(attend, compilations):
    compiled = jax.jit(attend)
    for length in (S, 3, 0):
        compiled(*random_qkv(B), key_value_seq_lengths=np.array([length, S], np.int32))
        if length == S:
            compilations.clear()
    assert not compilations


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_some_gradients(attend, wanted):
    _both(attend, lambda f: jax.grad(uneven_loss(f, is_causal=True), wanted), *random_qkv(B))


@pytest.mark.parametrize("result", [0, 1], ids=["out", "lse"])
def test_gradient_of_one_result(attend, result):
    """The other one has a symbolic zero for its cotangent."""

    def transform(f):
        def loss(*qkv):
            return jnp.sum(jnp.cos(f(*qkv, return_residual=True)[result]))

        return jax.grad(loss, (0, 1, 2))

    _both(attend, transform, *random_qkv(B))


_IN_AXES = {
    "query": (0, None, None),
    "key": (None, 0, None),
    "value": (None, None, 0),
    "key and value": (None, 0, 0),
    "odd axes": (1, 2, 4),
    "last axes": (-1, None, -2),
}


def _mapped_arrays(in_axes, size=3):
    arrays = []
    for axis, x, i in zip(in_axes, random_qkv(B), range(3), strict=True):
        if axis is not None:
            rng = np.random.default_rng(i)
            x = np.stack([x, *rng.standard_normal((size - 1, *x.shape), np.float32)], axis)
        arrays.append(x)
    return arrays


@pytest.mark.parametrize("in_axes", _IN_AXES.values(), ids=_IN_AXES)
def test_vmap(attend, in_axes):
    """vmap, vmap of grad and grad of vmap in one program."""

    def transform(f):
        f = functools.partial(f, is_causal=True)
        gradient = jax.grad(uneven_loss(f), (0, 1, 2))

        def total(*qkv):
            losses = jax.vmap(uneven_loss(f), in_axes)(*qkv)
            return jnp.vdot(jnp.cos(jnp.arange(losses.size, dtype=losses.dtype)), losses)

        def run(*qkv):
            return (
                jax.vmap(f, in_axes)(*qkv),
                jax.vmap(gradient, in_axes)(*qkv),
                jax.grad(total, (0, 1, 2))(*qkv),
            )

        return run

    _both(attend, transform, *_mapped_arrays(in_axes))


def test_nested_vmap(attend):
    """Every operand mapped by another subset of three maps, unbatched inside."""
    rng = np.random.default_rng(0)
    query = rng.standard_normal((2, 3, T, N, H), np.float32)
    key = rng.standard_normal((S, 2, K, H), np.float32)
    value = rng.standard_normal((3, S, 2, K, H), np.float32)

    def transform(f):
        inner = jax.grad(uneven_loss(f), (0, 1, 2))
        inner = jax.vmap(inner, (0, None, 1))
        inner = jax.vmap(inner, (None, 1, None))
        return jax.vmap(inner, (1, None, 0))

    _both(attend, transform, query, key, value)


def test_numpy_constants_under_vmap(attend):
    """Mapped, inside a compiled function: they reach the differentiation rule as they are."""
    arrays = _mapped_arrays((0, 0, 0))
    gradient = jax.vmap(jax.grad(uneven_loss(attend), (0, 1, 2)))
    assert_close(jax.jit(lambda: gradient(*arrays))(), gradient(*map(jnp.asarray, arrays)))


def test_vmap_over_lengths(attend):
    lengths = np.array([[S, 3], [0, 7], [5, 5]], np.int32)

    def transform(f):
        def run(query, key, value, lengths):
            def loss(*qkv):
                return uneven_loss(f, key_value_seq_lengths=lengths)(*qkv)

            return jax.grad(loss, (0, 1, 2))(query, key, value)

        return jax.vmap(run, (None, None, None, 0))

    _both(attend, transform, *random_qkv(B), lengths)


def test_vmap_over_lengths_of_several_blocks():
    """The loops end at the longest sequence, whatever is mapped; what follows stays 0."""
    rng = np.random.default_rng(0)
    shapes = ((1, 300, 16, 4), (1, 700, 16, 4), (1, 700, 16, 4))
    qkv = [rng.standard_normal(shape, np.float32) for shape in shapes]
    q_lengths = np.array([[3], [140], [0]], np.int32)
    kv_lengths = np.array([[700], [5], [600]], np.int32)

    def transform(f):
        def run(q_length, kv_length):
            options = dict(query_seq_lengths=q_length, key_value_seq_lengths=kv_length)
            return jax.value_and_grad(uneven_loss(f, **options), (0, 1, 2))(*qkv)

        return lambda q, kv: (jax.vmap(run)(q, kv), jax.vmap(run, (None, 0))(q[1], kv))

    attend = functools.partial(jaxflash.dot_product_attention, implementation="xla")
    _both(attend, transform, q_lengths, kv_lengths)


def test_vmap_over_features():
    """A mapped bias and mapped sinks on shared arrays, and their gradients."""
    rng = np.random.default_rng(0)
    bias = rng.standard_normal((3, N, T, S), np.float32)
    sink = rng.standard_normal((N, 3), np.float32)
    ids = np.sort(rng.integers(0, 3, (3, B, T)), axis=-1)

    def transform(f):
        def loss(query, key, value, bias, sink, ids):
            options = dict(bias=bias, sink=sink, segment_ids=(ids, ids[:, :S]))
            return uneven_loss(f, **options)(query, key, value)

        gradient = jax.grad(loss, (0, 1, 2, 3, 4))
        return jax.vmap(gradient, (None, None, None, 0, 1, 0))

    attend = functools.partial(jaxflash.dot_product_attention, implementation="xla")
    _both(attend, transform, *random_qkv(B), bias, sink, ids)


def test_vmap_draws_dropout_per_key():
    """Mapped keys give what each key gives alone."""
    keys = jax.random.split(jax.random.key(0), 3)
    qkv = random_qkv(B)

    def dropped(key):
        return jaxflash.dot_product_attention(
            *qkv, dropout_rate=0.5, dropout_rng=key, implementation="xla"
        )

    mapped = jax.jit(jax.vmap(dropped))(keys)
    assert not np.allclose(mapped[0], mapped[1])
    for i in range(3):
        np.testing.assert_allclose(mapped[i], dropped(keys[i]), rtol=1e-5, atol=1e-6)


def test_many_leading_axes(attend):
    """More axes than the kernels have strides for."""
    axes = (2, *(1,) * 8, 2)
    _both(attend, lambda f: jax.grad(uneven_loss(f), (0, 1, 2)), *random_qkv(*axes))


def test_jacrev(attend):
    """Only the cotangent is mapped."""
    qkv = tuple(x[:3] for x in random_qkv())

    def transform(f):
        return jax.jacrev(lambda *qkv: jnp.sum(f(*qkv), axis=(0, 1)), (0, 1, 2))

    _both(attend, transform, *qkv)


def test_scan(attend):
    """Layers with and without rematerialisation of what has no name."""
    policy = jax.checkpoint_policies.save_only_these_names(jaxflash.CHECKPOINT_NAME)

    def transform(f):
        def run(query, key, value):
            def layer(x, scale):
                x = x + f(x, key * scale, value, is_causal=True)
                return jnp.tanh(x), None

            layer = jax.checkpoint(layer, policy=policy)
            scales = jnp.arange(1, 4, dtype=query.dtype)
            return jnp.sum(jax.lax.scan(layer, query, scales)[0] ** 2)

        return jax.grad(run, (0, 1, 2))

    _both(attend, transform, *random_qkv(B))


@pytest.mark.parametrize("path", ["xla", pytest.param("cuda", marks=needs_kernels)])
def test_checkpoint_runs_the_forward_once(path):
    qkv = random_qkv(B)
    forward = functools.partial(jaxflash.dot_product_attention, implementation=path)

    def loss(wrap):
        return jax.grad(lambda *qkv: jnp.sum(jnp.sin(wrap(forward)(*qkv))), (0, 1, 2))

    saves = jax.checkpoint_policies.save_only_these_names(jaxflash.CHECKPOINT_NAME)
    once = products(forward, *qkv)
    without = products(loss(lambda f: f), *qkv)
    assert 0 < once < without
    assert products(loss(functools.partial(jax.checkpoint, policy=saves)), *qkv) == without
    assert products(loss(jax.checkpoint), *qkv) == without + once
    if path == "cuda":
        named = loss(functools.partial(jax.checkpoint, policy=saves))
        assert calls_of(_ffi.FORWARD_TARGET, named, *qkv) == 1
        assert calls_of(_ffi.BACKWARD_TARGET, named, *qkv) == 1


def test_no_bias_gradient_unless_asked_for():
    bias = np.zeros((B, N, T, S), np.float32)

    def count(wanted):
        def loss(query, key, value, bias):
            return jnp.sum(jaxflash.dot_product_attention(query, key, value, bias))

        return sum(1 for _ in equations(jax.grad(loss, wanted), *random_qkv(B), bias))

    assert count((0, 1, 2)) < count((0, 1, 2, 3))


def test_traced_scale(attend, compilations):
    """Its value and gradient, mapped too; another one compiles nothing new."""
    query, key, value = random_qkv(B)
    scales = np.array([0.1, -1.5, 0.0], np.float32)

    def transform(f):
        def loss(scale, query, key, value):
            return uneven_loss(f, is_causal=True, scale=scale)(query, key, value)

        return jax.vmap(jax.value_and_grad(loss, (0, 1, 2, 3)), (0, None, None, None))

    _both(attend, transform, scales, query, key, value)
    compiled = jax.jit(lambda scale: attend(query, key, value, scale=scale))
    expected = [attend(query, key, value, scale=float(scale)) for scale in scales]
    compilations.clear()
    for scale, out in zip(scales, expected, strict=True):
        assert_close(compiled(scale), out)
    assert len(compilations) == 1


def test_traced_scale_beside_unseen_queries(attend):
    """Their NaN reaches no derivative by the scale."""
    query, key, value = random_qkv(2)
    lengths = jnp.array([3, 5], jnp.int32)
    unseen = (np.arange(query.shape[1], dtype=np.int32)[None] >= lengths[:, None])[..., None, None]

    def derivatives(query):
        def loss(scale):
            return jnp.sum(attend(query, key, value, scale=scale, query_seq_lengths=lengths) ** 2)

        return jax.jit(jax.value_and_grad(loss))(0.3), jax.jvp(loss, (0.3,), (1.0,))[1]

    for poison in (np.nan, np.inf):
        assert_close(derivatives(np.where(unseen, poison, query)), derivatives(query))


def test_traced_scale_that_is_a_whole_number(attend):
    qkv = random_qkv(B)
    assert_close(jax.jit(lambda scale: attend(*qkv, scale=scale))(2), attend(*qkv, scale=2))


@pytest.mark.parametrize("options", [dict(is_causal=True), dict(key_value_seq_lengths=0)], ids=str)
def test_no_nan_on_the_way(options):
    """Which people hunt operation by operation; a row that sees no key has none, either."""
    qkv = [x[:, :5] for x in random_qkv(2)]
    if "key_value_seq_lengths" in options:
        options = dict(key_value_seq_lengths=jnp.array([3, 0], jnp.int32))
    attend = functools.partial(jaxflash.dot_product_attention, **options)
    gradient = jax.grad(lambda qkv: jnp.sum(jnp.sin(attend(*qkv))))
    with jax.debug_nans(True), jax.disable_jit():
        jax.jvp(gradient, (qkv,), (qkv,))


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_donated_arguments(attend):
    expected = jax.jit(jax.grad(uneven_loss(attend), (0, 1, 2)))(*random_qkv(B))
    donated = jax.jit(jax.grad(uneven_loss(attend), (0, 1, 2)), donate_argnums=(0, 1, 2))
    assert_same_bits(donated(*map(jnp.array, random_qkv(B))), expected)


# ---- Other dtypes --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_traced_scale_of_other_dtypes(attend, dtype):
    """Neither is promoted to the other: JAX may be told not to."""
    qkv = [x.astype(dtype) for x in random_qkv(B)]
    scaled = jax.jit(lambda scale: attend(*qkv, scale=scale))(np.float32(0.5))
    assert scaled.dtype == dtype
    # A power of two: rounding the scaled query changes nothing.
    np.testing.assert_allclose(
        scaled.astype(np.float32), attend(*qkv, scale=0.5).astype(np.float32), 1e-2, 1e-2
    )


def test_float64():
    with jax.enable_x64(True):
        qkv = tuple(x.astype(np.float64) for x in random_qkv(B))
        options = dict(is_causal=True)
        loss = uneven_loss(jaxflash.dot_product_attention, **options)
        actual = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*qkv)
        expected = jax.jit(jax.value_and_grad(uneven_loss(dense, **options), (0, 1, 2)))(*qkv)
        for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            assert x.dtype == np.float64
            np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-12)
        out, lse = jaxflash.dot_product_attention(*qkv, return_residual=True)
        assert out.dtype == lse.dtype == np.float64
        scaled = jax.jit(lambda scale: jaxflash.dot_product_attention(*qkv, scale=scale))
        expected = jaxflash.dot_product_attention(*qkv, scale=0.5)
        np.testing.assert_allclose(scaled(np.float32(0.5)), expected, rtol=1e-11, atol=1e-12)


def test_x64_mode_changes_nothing(attend):
    """Nothing of the call turns into int64 or float64 because it could."""
    qkv = random_qkv(B)
    options = dict(is_causal=True, local_window_size=7, causal_alignment="bottom_right")
    run = functools.partial(attend, return_residual=True, **options)
    expected = run(*qkv)
    with jax.enable_x64(True):
        lengths = np.full(B, S, np.int32)
        actual = jax.jit(run)(*qkv, key_value_seq_lengths=lengths)
        gradients = jax.jit(jax.grad(uneven_loss(attend, **options), (0, 1, 2)))(*qkv)
    assert [x.dtype for x in jax.tree.leaves((actual, gradients))] == [np.float32] * 5
    assert_close(actual, expected)
