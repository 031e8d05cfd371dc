"""score_mod: what may be captured, how it is told apart, and what is wrong with it."""

from __future__ import annotations

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxflash
from jaxflash import _extension, _program
from marks import needs_kernels
from small_calls import (
    ATTENTIONS,
    N,
    S,
    T,
    assert_equal,
    random_qkv,
    random_table,
    relative_positions,
)

pytestmark = pytest.mark.usefixtures("accurate_products", "quick_compilation")


def _loss(attention, table, qkv, make=relative_positions, **options):
    return jnp.sum(jnp.sin(attention(*qkv, score_mod=make(table), **options)))


# ---- Captures ------------------------------------------------------------------------------------


def _assert_own_arrays(make):
    """Programs that differ in the arrays of inner functions alone are different programs."""
    arrays = (jnp.arange(N, dtype=jnp.float32), 5.0 + jnp.arange(N, dtype=jnp.float32))

    def value_and_gradient(attention, array, **options):
        def loss(q, k, v):
            return jnp.sum(jnp.sin(attention(q, k, v, score_mod=make(array), **options)))

        return jax.value_and_grad(loss, (0, 1))(*random_qkv())

    for array in arrays:
        ours, theirs = (value_and_gradient(f, array) for f in ATTENTIONS)
        for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


def test_arrays_of_functions_within_branches():
    def make(array):
        inner = jax.jit(lambda score, h: score * (1 + 0.1 * array[h]))
        return lambda score, b, h, q, kv: jax.lax.cond(
            q > kv, lambda: inner(score, h), lambda: score
        )

    _assert_own_arrays(make)


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_arrays_of_custom_derivatives(kind):
    def make(array):
        if kind == "jvp":
            function = jax.custom_jvp(lambda score: score)
            function.defjvp(lambda primals, tangents: (primals[0], tangents[0] * jnp.sum(array)))
        else:
            function = jax.custom_vjp(lambda score: score)
            function.defvjp(lambda score: (score, None), lambda _, t: (t * jnp.sum(array),))
        return lambda score, b, h, q, kv: function(score)

    _assert_own_arrays(make)


@pytest.mark.parametrize("inside", [True, False])
def test_stop_gradient_of_a_capture(inside):
    def make(table):
        def score_mod(score, b, h, q, kv):
            element = (
                jax.lax.stop_gradient(table[h, q])
                if inside
                else (jax.lax.stop_gradient(table)[h, q])
            )
            return score * element + table[h, kv]

        return score_mod

    def gradients(attention, qkv, table):
        return jax.grad(lambda table: _loss(attention, table, qkv, make))(table)

    assert_equal(gradients, random_qkv(), random_table())


def test_whole_capture_with_a_reverse_derivative_of_its_own():
    @jax.custom_vjp
    def cap(x):
        return jnp.tanh(x)

    cap.defvjp(lambda x: (jnp.tanh(x), jnp.tanh(x)), lambda t, g: (g * (1 - t * t),))

    def make(table):
        return lambda score, b, h, q, kv: cap(score * jnp.sum(table))

    def gradients(attention, qkv, table):
        return jax.grad(lambda table: _loss(attention, table, qkv, make))(table)

    assert_equal(gradients, random_qkv(), 0.01 * random_table())


_WHOLE = {
    "sum": lambda s, root, w: s * jnp.sum(w) + root,
    "product": lambda s, root, w: s - jnp.prod(w[:2]) * root,
    "branch": lambda s, root, w: jax.lax.cond(s > 2.0, lambda: s, lambda: s - w[0] * w[1] * root),
}


@pytest.mark.parametrize(
    ("name", "size"), [("sum", 2), ("sum", 100), ("product", 2), ("branch", 2), ("branch", 100)]
)
def test_gradient_of_a_whole_capture_beside_hidden_keys(name, size):
    """Their slopes may be infinite or NaN, and reach nothing; of an array of more than a few
    elements if it is because of what the keys hold, or in a branch."""
    query, key, value = random_qkv()
    options = dict(is_causal=True, key_value_seq_lengths=jnp.full(query.shape[:1], 4, jnp.int32))
    hidden = jnp.arange(key.shape[1])[:, None, None] >= 4
    capture = jnp.linspace(0.5, 0.7, size, dtype=jnp.float32)

    def loss(capture, key, least):
        def score_mod(score, b, h, q, kv):
            root = jnp.sqrt(jnp.maximum(q - kv, least).astype(jnp.float32) + 1.0)
            return _WHOLE[name](score, root, capture)

        out = jaxflash.dot_product_attention(query, key, value, score_mod=score_mod, **options)
        return jnp.sum(jnp.sin(out))

    expected = jax.grad(loss)(capture, key, 0)
    actual = jax.grad(loss)(capture, jnp.where(hidden, jnp.nan, key), -S)
    np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("size", [2, 100])
@pytest.mark.parametrize("loops", [False, True])
def test_whole_captures_that_others_divide(size, loops):
    capture = jnp.linspace(0.5, 0.7, size, dtype=jnp.float32) / size

    def make(capture):
        widths = jnp.array([0.7, 1.3, 0.9, 1.1], jnp.float32)

        def score_mod(score, b, h, q, kv):
            waves = jnp.sum(capture * jnp.cos(0.3 * (q - kv).astype(jnp.float32)))
            if loops:
                waves = jax.lax.fori_loop(0, h + 1, lambda i, x: jnp.tanh(x), waves)
            return (score + waves) / widths[h % 4]

        return score_mod

    def derivative(attention, qkv, capture):
        def loss(capture):
            return _loss(attention, capture, qkv, make, is_causal=True)

        # In reverse, JAX differentiates no such loop.
        return jax.jvp(loss, (capture,), (capture,)) if loops else jax.grad(loss)(capture)

    assert_equal(derivative, random_qkv(), capture)


def test_gradient_of_a_capture_of_branches():
    def make(table):
        return lambda score, b, h, q, kv: jax.lax.cond(
            q > kv, lambda: score * table[h, q], lambda: jnp.sin(score) - table[h, kv]
        )

    def gradients(attention, qkv, table):
        gradient = jax.grad(lambda table: _loss(attention, table, qkv, make))
        return gradient(table), jax.jvp(gradient, (table,), (jnp.cos(table),))

    assert_equal(gradients, random_qkv(), random_table())


def test_without_jit():
    def gradients(attention, qkv, table):
        return jax.grad(lambda q: _loss(attention, table, (q, *qkv[1:])))(qkv[0])

    expected = gradients(ATTENTIONS[1], random_qkv(), random_table())
    with jax.disable_jit():
        np.testing.assert_allclose(
            gradients(ATTENTIONS[0], random_qkv(), random_table()), expected, rtol=2e-4, atol=2e-5
        )


def test_gradient_of_a_capture_under_scan():
    def step(attention, qkv, table, _):
        gradient = jax.grad(_loss, argnums=1)(attention, table, qkv)
        return table - 0.1 * gradient, jnp.sum(gradient**2)

    def trained(attention, qkv, table):
        return jax.lax.scan(functools.partial(step, attention, qkv), table, length=2)

    assert_equal(trained, random_qkv(), random_table())


@pytest.mark.parametrize("mapped", ["capture", "query", "both"])
def test_vmap(mapped):
    axes = (0 if mapped != "query" else None, (0, None, None) if mapped != "capture" else None)
    table, (q, k, v) = random_table(), random_qkv()
    if axes[0] == 0:
        table = jnp.stack([table, 2 * table])
    if axes[1] is not None:
        q = jnp.stack([q, -q])

    def gradients(attention, table, qkv):
        one = jax.grad(lambda table, qkv: _loss(attention, table, qkv), argnums=(0, 1))
        return jax.vmap(one, axes)(table, qkv)

    assert_equal(gradients, table, (q, k, v))


def test_second_derivatives():
    def product(attention, table, qkv):
        loss = jax.grad(lambda table, qkv: _loss(attention, table, qkv), argnums=(0, 1))
        return jax.jvp(loss, (table, qkv), (jnp.cos(table), jax.tree.map(jnp.cos, qkv)))[1]

    assert_equal(product, random_table(), random_qkv())


def test_forward_mode():
    def tangent(attention, table, qkv):
        moved = (jnp.cos(table), jax.tree.map(jnp.cos, qkv))
        return jax.jvp(lambda table, qkv: _loss(attention, table, qkv), (table, qkv), moved)

    assert_equal(tangent, random_table(), random_qkv())


def test_packed_sequences():
    edges = np.array([0, 5, 12], np.int32)
    q, k, v = (x[0, :T] for x in random_qkv())

    def loss(attention, table):
        return jnp.sum(
            jnp.sin(attention(q, k, v, edges, edges, score_mod=relative_positions(table)))
        )

    ours, theirs = (
        jax.value_and_grad(functools.partial(loss, f))(random_table())
        for f in (jaxflash.varlen_attention, jaxflash.reference.varlen_attention)
    )
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


def _unprintable(table):
    """What no kernel will do; its while loop has derivatives in forward mode alone."""

    def score_mod(score, b, h, q, kv):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(3), q), kv)
        noise = jax.random.uniform(key, (), jnp.float32)
        x = jax.lax.while_loop(lambda x: jnp.abs(x) > 0.5, lambda x: 0.5 * x, score)
        return x + noise + jnp.mean(table[h] * table[0])

    return score_mod


def test_loops_random_numbers_and_whole_arrays_take_the_blockwise_path():
    def gradients(attention, table, qkv):
        def loss(table, qkv):
            return _loss(attention, table, qkv, _unprintable)

        moved = (jnp.cos(table), jax.tree.map(jnp.cos, qkv))
        return jax.jvp(loss, (table, qkv), moved)

    assert_equal(gradients, random_table(), random_qkv())


@needs_kernels
def test_kernels_say_which_equation_they_do_not_take():
    q, k, v = random_qkv()
    with pytest.raises(NotImplementedError, match=r"`random_\w+`.*in: .* = random_"):
        jaxflash.dot_product_attention(
            q, k, v, score_mod=_unprintable(random_table()), implementation="cuda"
        )


@needs_kernels
def test_refusals_keep_no_arrays():
    """What is kept is the reason, not the frames of those who were told."""

    def refused(seed):
        query, key, value = random_qkv(seed)
        table = random_table()
        assert jaxflash.supported(query, key, value, score_mod=_unprintable(table))
        return weakref.ref(query)

    seen = [refused(seed) for seed in range(3)]
    gc.collect()
    assert [of() is None for of in seen] == 3 * [True]


def test_keys_can_be_captured():
    key = jax.random.key(5)

    def out(attention, qkv):
        def score_mod(score, b, h, q, kv):
            return score + jax.random.normal(jax.random.fold_in(key, q * S + kv), (), jnp.float32)

        return attention(*qkv, score_mod=score_mod)

    assert_equal(out, random_qkv())


def test_float64_captures():
    with jax.enable_x64(True):
        table = random_table().astype(jnp.float64)

        def make(table):
            return lambda score, b, h, q, kv: (score + table[h, q]).astype(jnp.float32)

        with jax.numpy_dtype_promotion("standard"):
            assert_equal(lambda f, table: jax.grad(_loss, 1)(f, table, random_qkv(), make), table)
            reasons = jaxflash.supported(*random_qkv(), score_mod=make(table))
        if _extension.kernels:
            assert any("float64" in reason for reason in reasons)


@pytest.mark.parametrize("whole", [False, True], ids=["elements", "whole"])
def test_float64_captures_keep_their_precision(whole):
    """Time stamps in seconds, which float32 rounds to multiples of 128. The tangents of elements as
    well: those of whole arrays are of float32 where they meet them."""

    def make(times):
        def score_mod(score, b, h, q, kv):
            since = jnp.abs((times if whole else times[q]) - times[kv])
            return score - 0.1 * jnp.max(since).astype(jnp.float32)

        return score_mod

    def derivatives(attention, times):
        def loss(times):
            return _loss(attention, times, random_qkv(), make)

        moved = jnp.cos(times) if whole else times
        return jax.jvp(loss, (times,), (moved,)), jax.jvp(jax.grad(loss), (times,), (moved,))

    with jax.enable_x64(True):
        assert_equal(derivatives, 1.7e9 + jnp.arange(S, dtype=jnp.float64) ** 2)


@pytest.mark.parametrize("whole", [False, True], ids=["elements", "whole"])
@pytest.mark.parametrize("x64", [False, True])
def test_complex_captures(x64, whole):
    """As of rotary embeddings: derivatives by what they are made of, and by themselves."""

    def make(turns):
        def score_mod(score, b, h, q, kv):
            turned = turns[q] * jnp.conj(turns[kv])
            if whole:
                turned = turned * jnp.mean(turns)
            return score + turned.real.astype(jnp.float32)

        return score_mod

    def derivatives(attention, angles):
        def loss(angles):
            return _loss(
                attention, jnp.exp(jax.lax.complex(0.1 * angles, angles)), random_qkv(), make
            )

        by_themselves = jax.grad(_loss, 1)(
            attention, jax.lax.complex(angles, 1 - angles), random_qkv(), make
        )
        return by_themselves, jax.jvp(jax.value_and_grad(loss), (angles,), (jnp.cos(angles),))

    with jax.enable_x64(x64):
        angles = jnp.linspace(0.0, 2.0, S)
        assert_equal(derivatives, angles)
        turns = jnp.exp(jax.lax.complex(angles, angles))
        if _extension.kernels:
            reason, *_ = jaxflash.supported(*random_qkv(), score_mod=make(turns))
            assert ("dtype float64" if x64 else "`complex`") in reason


@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "size"), [("int8", 1000), ("uint8", 1000), ("int16", 40000), ("uint16", 70000)]
)
def test_indices_read_from_narrow_captures(dtype, size):
    """Which hold all that is read, but not the end of the array that it is read with."""
    numbers = jnp.asarray(np.random.default_rng(0).integers(0, 100, S), dtype)

    def value_and_gradient(attention, qkv, table):
        def loss(table):
            return _loss(attention, table, qkv, lambda x: lambda s, b, h, q, kv: s + x[numbers[kv]])

        return jax.value_and_grad(loss)(table)

    assert_equal(value_and_gradient, random_qkv(), jnp.sin(jnp.arange(size, dtype=jnp.float32)))


@pytest.fixture
def arrays_as_literals():
    jax.config.update("jax_use_simplified_jaxpr_constants", True)
    yield
    jax.config.update("jax_use_simplified_jaxpr_constants", False)


@pytest.mark.usefixtures("arrays_as_literals")
def test_arrays_that_are_literals_tell_programs_apart():
    """What JAX shows of large ones is their ends."""

    def gradient(attention, table):
        def loss(qkv):
            return jnp.sum(attention(*qkv, score_mod=lambda s, b, h, q, kv: s + table[50 * kv + q]))

        return jax.grad(loss)(random_qkv())

    table = jnp.sin(jnp.arange(3000, dtype=jnp.float32))
    for array in (table, table.at[500:700].add(1.0)):
        ours, theirs = (gradient(attention, array) for attention in ATTENTIONS)
        for x, y in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


def test_more_captures_than_kernels_take():
    arrays = [jnp.full(N, float(i)) for i in range(9)]

    def score_mod(score, b, h, q, kv):
        return score + sum(x[h] for x in arrays)

    assert any(
        "9 arrays" in reason for reason in jaxflash.supported(*random_qkv(), score_mod=score_mod)
    )


# ---- One program, whichever function -------------------------------------------------------------


def test_equal_functions_compile_once(compilations):
    qkv = random_qkv()

    def call(scale, table):
        return jaxflash.dot_product_attention(
            *qkv, score_mod=lambda s, b, h, q, kv: jax.nn.relu(scale * s) + table[h, q]
        )

    call(2.0, random_table(1))
    compilations.clear()
    call(2.0, random_table(2))
    assert not compilations
    call(3.0, random_table(2))
    assert len(compilations) == 1


def test_custom_derivatives_tell_programs_apart():
    def program(slope):
        @jax.custom_jvp
        def function(x):
            return jnp.abs(x)

        function.defjvp(lambda x, t: (jnp.abs(x[0]), slope * t[0]))
        return _program.trace(lambda s, *_: function(s), (), jnp.float32)[0]

    assert program(1.0) == program(1.0)
    assert program(1.0) != program(2.0)


# ---- Faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("score_mod", "said"),
    [
        ("tanh", "str"),
        (lambda s, b, h, q, kv: q - kv, "int32"),
        (lambda s, b, h, q, kv: s > 0, "bool"),
        (lambda s, b, h, q, kv: jnp.stack([s, s]), r"\(2,\)"),
        (lambda s, b, h, q, kv: (s, s), "tuple"),
        (lambda s, b, h, q, kv: None, "None"),
        (lambda s, q, kv: s, "must take .*too many positional"),
        (lambda s, b, h, q, kv, table: s, "must take .*'table'"),
    ],
)
def test_wrong_functions(score_mod, said):
    for attention in ATTENTIONS:
        with pytest.raises(ValueError, match=f"score_mod.*({said})"):
            attention(*random_qkv(), score_mod=score_mod)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("argument", ["score_mod", "mask"])
def test_refs_are_read_before_the_call(argument, traced):
    q, k, v = random_qkv()

    def out(slopes):
        ref = jax.new_ref(slopes)
        options = {
            "score_mod": lambda s, b, h, q, kv: s * jax.jit(lambda: ref[h])(),
            "mask": jaxflash.masks.function(lambda b, h, q, kv: kv < ref[h].astype(q.dtype)),
        }
        return jaxflash.dot_product_attention(q, k, v, **{argument: options[argument]})

    said = rf"{argument}.* captures a Ref.*float32\[{N}\].*read it before the call, ref\[\.\.\.\]"
    with pytest.raises(ValueError, match=said):
        (jax.jit(out) if traced else out)(jnp.ones(N, jnp.float32))


def test_errors_inside_the_function_are_its_own():
    empty = jnp.zeros((0,))
    with pytest.raises((TypeError, ValueError, IndexError)):
        jaxflash.dot_product_attention(*random_qkv(), score_mod=lambda s, b, h, q, kv: s + empty[h])
    with pytest.raises(TypeError, match="positional argument"):
        jaxflash.dot_product_attention(
            *random_qkv(), score_mod=lambda s, b, h, q, kv: jnp.maximum(s)
        )


def test_errors_name_the_function():
    def magnitude(score, b, h, q, kv):
        return score if score > 0.0 else -score

    place = r"magnitude at .*test_score_mod\.py:\d+ .* the argument score"
    with pytest.raises(jax.errors.TracerBoolConversionError, match=place):
        jaxflash.dot_product_attention(*random_qkv(), score_mod=magnitude)


@pytest.mark.parametrize("result", [np.nan, np.inf, -np.inf])
def test_not_finite(result):
    """NaN and infinity are seen by their rows alone; a row of -inf sees no key."""

    def out(attention, qkv):
        return attention(
            *qkv, score_mod=lambda s, b, h, q, kv: jnp.where((q == 3) & (h == 1), result, s)
        )

    if not np.isnan(result):  # XLA's maximum on a CPU may lose a NaN, the reference with it
        assert_equal(out, random_qkv())
    x = jaxflash.dot_product_attention(
        *random_qkv(), score_mod=lambda s, b, h, q, kv: jnp.where(q == 3, result, s)
    )
    rows = np.asarray(x)[:, 3]
    assert (rows == 0.0).all() if result == -np.inf else np.isnan(rows).all()
    assert np.isfinite(np.delete(np.asarray(x), 3, axis=1)).all()


@pytest.mark.parametrize("cap", [1e-3, 1e4])
def test_extreme_caps(cap):
    def gradients(attention, qkv):
        def loss(qkv):
            return jnp.sum(jnp.sin(attention(*qkv, logits_soft_cap=cap)))

        return jax.value_and_grad(loss)(qkv)

    assert_equal(gradients, random_qkv())


@pytest.mark.parametrize(
    "factor", [jnp.log, jax.lax.rsqrt, lambda x: 1.0 / x], ids=["log", "rsqrt", "reciprocal"]
)
def test_gradients_are_finite_where_a_hidden_factor_is_not(factor):
    """Of a function that is linear in the score: its derivative is the factor."""

    def gradients(attention, qkv):
        def loss(qkv):
            def score_mod(score, b, h, q, kv):
                return score * factor((q - kv + 1).astype(jnp.float32))

            return jnp.sum(jnp.sin(attention(*qkv, score_mod=score_mod, is_causal=True)))

        gradient = jax.grad(loss)
        return gradient(qkv), jax.jvp(gradient, (qkv,), (qkv,))[1]

    for x in jax.tree.leaves(jax.jit(gradients, static_argnums=0)(ATTENTIONS[0], random_qkv())):
        assert np.isfinite(x).all()
    assert_equal(gradients, random_qkv())


def test_gradients_are_finite_where_the_logit_is_minus_infinity():
    def loss(qkv, table):
        def score_mod(score, b, h, q, kv):
            return jnp.log(jnp.maximum(score * table[h, q], 0.0))  # slope 1 / 0 in places

        return jnp.sum(jaxflash.dot_product_attention(*qkv, score_mod=score_mod))

    for x in jax.tree.leaves(jax.jit(jax.grad(loss, argnums=(0, 1)))(random_qkv(), random_table())):
        assert np.isfinite(x).all()
