"""Score functions that hold functions of Python: derivatives of their own, callbacks, arrays that
rules close over. Values and gradients are those of the reference, or somebody says why not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxflash
from jaxflash import _derivatives, masks

_ATTENTIONS = jaxflash.dot_product_attention, jaxflash.reference.dot_product_attention


def _qkv():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((1, 6, 2, 4)), jnp.float32) for _ in range(3)]


def _loss(attention, qkv, score_mod):
    return jnp.sum(jnp.sin(attention(*qkv, score_mod=score_mod)))


def _assert_equal(of):
    """A function of the attention to call, with ours and with the reference."""
    for x, y in zip(*(jax.tree.leaves(of(f)) for f in _ATTENTIONS), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


def _times(factor):
    def host(x):
        return np.asarray(factor * x, np.float32)

    def score_mod(score, b, h, q, kv):
        type_ = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.pure_callback(host, type_, score, vmap_method="expand_dims")

    return score_mod


def test_callbacks_are_told_apart():
    """Programs of one text: what a callback computes, that does not say."""
    for factor in (1.0, 30.0):
        _assert_equal(lambda f, factor=factor: f(*_qkv(), score_mod=_times(factor)))


def test_callbacks_of_masks_are_told_apart():
    def mask(array):
        def host(q, kv):
            return np.asarray(array[q, kv])

        def visible(b, h, q, kv):
            type_ = jax.ShapeDtypeStruct((), jnp.bool_)
            return jax.pure_callback(host, type_, q, kv, vmap_method="broadcast_all")

        return masks.function(visible)

    for array in (np.tri(6, dtype=bool), np.eye(6, dtype=bool)):
        _assert_equal(lambda f, array=array: f(*_qkv(), mask=mask(array)))


@pytest.mark.parametrize("jit", [False, True])
def test_debug_callbacks_are_called(jit):
    seen = []

    def score_mod(score, b, h, q, kv):
        jax.debug.callback(lambda h, q, kv: seen.append((int(h), int(q), int(kv))), h, q, kv)
        return score

    def call(*qkv):
        return jaxflash.dot_product_attention(*qkv, score_mod=score_mod, implementation="xla")

    jax.block_until_ready((jax.jit(call) if jit else call)(*_qkv()))
    jax.effects_barrier()
    assert set(seen) == set(np.ndindex(2, 6, 6))


def test_debug_callbacks_of_captured_arrays():
    """Which have no result that a view could be."""
    seen = []
    table = jnp.arange(6, dtype=jnp.float32)

    def score_mod(score, b, h, q, kv):
        jax.debug.callback(lambda x: seen.append(float(x)), table[kv])
        jax.debug.callback(lambda x: seen.append(float(x[0])), table)
        return score + table[kv]

    out = jaxflash.dot_product_attention(*_qkv(), score_mod=score_mod, implementation="xla")
    jax.block_until_ready(out)
    jax.effects_barrier()
    assert set(seen) == set(range(6))
    assert jaxflash.supported(*_qkv(), score_mod=score_mod)


def _cap_of(array):
    """With a derivative of its own, in reverse only, and not by the array that it closes over."""

    @jax.custom_vjp
    def cap(x):
        return jnp.tanh(x) * array[0, 1]

    def forward(x):
        return cap(x), x

    def backward(x, cotangent):
        return (cotangent * (1 - jnp.tanh(x) ** 2) * array[0, 1],)

    cap.defvjp(forward, backward)
    return lambda score, b, h, q, kv: cap(score)


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_array_in_the_value_of_a_custom_vjp(implementation):
    score_mod = _cap_of(jnp.linspace(0.5, 1.0, 8, dtype=jnp.float32).reshape(2, 4))

    def value_and_gradients(attention):
        options = {}
        if attention is _ATTENTIONS[0]:
            options = dict(implementation=implementation)

        def loss(qkv):
            return jnp.sum(jnp.sin(attention(*qkv, score_mod=score_mod, **options)))

        return jax.value_and_grad(loss)(_qkv())

    _assert_equal(value_and_gradients)


def test_no_gradient_of_an_array_in_the_value_of_a_custom_vjp():
    """Nor is it 0 without a word."""

    def loss(array):
        return _loss(_ATTENTIONS[0], _qkv(), _cap_of(array))

    array = jnp.ones((2, 4), jnp.float32)
    np.testing.assert_allclose(jax.jit(loss)(array), loss(array), rtol=1e-5)
    with pytest.raises(NotImplementedError, match=r"closes over an array, float32\[2,4\]"):
        jax.grad(loss)(array)


def _scaled_gradient(kind, array):
    if kind == "jvp":
        function = jax.custom_jvp(lambda x: x * 2.0)
        function.defjvp(lambda primals, tangents: (primals[0] * 2.0, tangents[0] * array[0, 0]))
    else:
        function = jax.custom_vjp(lambda x: x * 2.0)
        function.defvjp(lambda x: (x * 2.0, None), lambda _, t: (t * array[0, 0],))
    return lambda score, b, h, q, kv: function(score)


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_traced_arrays_of_rules(kind):
    def loss(attention, qkv, array):
        return _loss(attention, qkv, _scaled_gradient(kind, array))

    array = jnp.full((2, 4), 3.0)
    _assert_equal(lambda f: jax.jit(lambda *xs: loss(f, *xs))(_qkv(), array))
    _assert_equal(lambda f: jax.grad(lambda qkv: loss(f, qkv, array))(_qkv()))
    gradient = jax.jit(lambda *xs: jax.grad(lambda qkv: loss(_ATTENTIONS[0], qkv, xs[1]))(xs[0]))
    with pytest.raises(NotImplementedError, match="rule closes over a traced array"):
        gradient(_qkv(), array)


def test_rules_that_are_not_linear_in_the_cotangent():
    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, t: (jnp.clip(t, -0.01, 0.01),))

    def score_mod(score, b, h, q, kv):
        return clipped(score)

    _assert_equal(lambda f: f(*_qkv(), score_mod=score_mod))
    with pytest.raises(NotImplementedError, match="not linear in the cotangent"):
        jax.grad(lambda qkv: _loss(_ATTENTIONS[0], qkv, score_mod))(_qkv())


def _sine(second):
    """Of one value and slope, whose second derivative is what a rule within its rule says."""
    slope = jax.custom_jvp(jnp.cos)
    slope.defjvp(lambda x, t: (jnp.cos(*x), second(*x) * t[0]))
    sine = jax.custom_jvp(jnp.sin)
    sine.defjvp(lambda x, t: (jnp.sin(*x), slope(*x) * t[0]))
    return lambda score, b, h, q, kv: sine(score)


def test_rules_of_second_derivatives_are_told_apart():
    qkv = _qkv()

    def of(second):
        def curvature(attention):
            gradient = jax.grad(lambda qkv: _loss(attention, qkv, _sine(second)))
            return jax.jvp(gradient, (qkv,), (qkv,))[1]

        return curvature

    for second in (lambda x: -jnp.sin(x), lambda x: 3 * x):
        _assert_equal(of(second))


def _softplus():
    """Of functions whose rules call them."""
    return lambda score, b, h, q, kv: jax.nn.softplus(2 * score) + jax.nn.relu(score)


def _family():
    """Of functions each of whose rules calls others, without an end."""

    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def shifted(n, x):
        return jnp.sin(x + 0.5 * n)

    @shifted.defjvp
    def _(n, primals, tangents):
        slope = shifted(n + 1, *primals) - shifted(n - 1, *primals)
        return shifted(n, *primals), slope * tangents[0]

    return lambda score, b, h, q, kv: shifted(0, score)


@pytest.mark.parametrize("make", [_softplus, lambda: _sine(jnp.sin), _family])
def test_equal_rules_compile_once(make, compilations):
    qkv = _qkv()
    jaxflash.dot_product_attention(*qkv, score_mod=make())
    compilations.clear()
    jaxflash.dot_product_attention(*qkv, score_mod=make())
    assert not compilations


@pytest.mark.parametrize(
    "score_mod",
    [
        lambda score, b, h, q, kv: score + jax.lax.axis_index("x").astype(score.dtype),
        lambda score, b, h, q, kv: score - jax.lax.pmean(score, "x"),
    ],
    ids=["axis_index", "pmean"],
)
def test_axes_of_vmap_are_refused(score_mod):
    def one(x):
        return jaxflash.dot_product_attention(x, x, x, score_mod=score_mod)

    with pytest.raises(NotImplementedError, match=r"cannot use the axis 'x' of jax\.vmap"):
        jax.vmap(one, axis_name="x")(jnp.stack(_qkv()))


def test_random_functions_are_compiled_once(compilations):
    """Keys hold functions of Python, which are always the same."""
    key = jax.random.key(1)

    def call():
        def noise(score, b, h, q, kv):
            return score + jax.random.uniform(jax.random.fold_in(key, q), dtype=score.dtype)

        return jaxflash.dot_product_attention(*_qkv(), score_mod=noise)

    call()
    compilations.clear()
    call()
    assert not compilations


def test_large_arrays_of_rules_do_not_become_text():
    array = jnp.zeros(1 << 16)
    seen = []
    attention = _derivatives.attention

    def spied(spec, *rest):
        seen.append(spec.program.text)
        return attention(spec, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_derivatives, "attention", spied)
        score_mod = _scaled_gradient("jvp", array.reshape(256, 256))
        jaxflash.dot_product_attention(*_qkv(), score_mod=score_mod)
    (text,) = seen
    assert len(text) < 1 << 12
