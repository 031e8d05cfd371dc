"""score_mod: what may be captured, how it is told apart, and what is wrong with it."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxflash
import mask_values
from jaxflash import (
    _api,
    _dense_mask,
    _derivatives,
    _ffi,
    _kernel_program,
    _kernels,
    _ranges,
    _scores,
    _spec,
    _support,
)
from marks import needs_kernels
from meshes import cpu_mesh

_B, _T, _S, _N, _K, _H = 2, 12, 20, 4, 2, 8

pytestmark = pytest.mark.usefixtures("accurate_products", "quick_compilation")


def _qkv(seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = ((_B, _T, _N, _H), (_B, _S, _K, _H), (_B, _S, _K, _H))
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def _table(seed=1):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((_N, _T + _S)), jnp.float32)


def _relative(table):
    return lambda score, b, h, q, kv: 2.0 * jnp.tanh(score) + table[h, q - kv + _S - 1]


def _loss(attention, table, qkv, make=_relative, **options):
    return jnp.sum(jnp.sin(attention(*qkv, score_mod=make(table), **options)))


_ATTENTIONS = (jaxflash.dot_product_attention, jaxflash.reference.dot_product_attention)


def _assert_equal(transformed, *arguments):
    """A function of the attention to call, with ours and with the reference."""
    ours, theirs = (jax.jit(functools.partial(transformed, f))(*arguments) for f in _ATTENTIONS)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


# ---- Captures ------------------------------------------------------------------------------------


def _assert_own_arrays(make):
    """Programs that differ in the arrays of inner functions alone are different programs."""
    arrays = (jnp.arange(_N, dtype=jnp.float32), 5.0 + jnp.arange(_N, dtype=jnp.float32))

    def value_and_gradient(attention, array, **options):
        def loss(q, k, v):
            return jnp.sum(jnp.sin(attention(q, k, v, score_mod=make(array), **options)))

        return jax.value_and_grad(loss, (0, 1))(*_qkv())

    for array in arrays:
        ours, theirs = (value_and_gradient(f, array) for f in _ATTENTIONS)
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

    _assert_equal(gradients, _qkv(), _table())


def test_whole_capture_with_a_reverse_derivative_of_its_own():
    @jax.custom_vjp
    def cap(x):
        return jnp.tanh(x)

    cap.defvjp(lambda x: (jnp.tanh(x), jnp.tanh(x)), lambda t, g: (g * (1 - t * t),))

    def make(table):
        return lambda score, b, h, q, kv: cap(score * jnp.sum(table))

    def gradients(attention, qkv, table):
        return jax.grad(lambda table: _loss(attention, table, qkv, make))(table)

    _assert_equal(gradients, _qkv(), 0.01 * _table())


def test_gradient_of_a_capture_of_branches():
    def make(table):
        return lambda score, b, h, q, kv: jax.lax.cond(
            q > kv, lambda: score * table[h, q], lambda: jnp.sin(score) - table[h, kv]
        )

    def gradients(attention, qkv, table):
        gradient = jax.grad(lambda table: _loss(attention, table, qkv, make))
        return gradient(table), jax.jvp(gradient, (table,), (jnp.cos(table),))

    _assert_equal(gradients, _qkv(), _table())


def test_without_jit():
    def gradients(attention, qkv, table):
        return jax.grad(lambda q: _loss(attention, table, (q, *qkv[1:])))(qkv[0])

    expected = gradients(_ATTENTIONS[1], _qkv(), _table())
    with jax.disable_jit():
        np.testing.assert_allclose(
            gradients(_ATTENTIONS[0], _qkv(), _table()), expected, rtol=2e-4, atol=2e-5
        )


def test_gradient_of_a_capture_under_scan():
    def step(attention, qkv, table, _):
        gradient = jax.grad(_loss, argnums=1)(attention, table, qkv)
        return table - 0.1 * gradient, jnp.sum(gradient**2)

    def trained(attention, qkv, table):
        return jax.lax.scan(functools.partial(step, attention, qkv), table, length=2)

    _assert_equal(trained, _qkv(), _table())


@pytest.mark.parametrize("mapped", ["capture", "query", "both"])
def test_vmap(mapped):
    axes = (0 if mapped != "query" else None, (0, None, None) if mapped != "capture" else None)
    table, (q, k, v) = _table(), _qkv()
    if axes[0] == 0:
        table = jnp.stack([table, 2 * table])
    if axes[1] is not None:
        q = jnp.stack([q, -q])

    def gradients(attention, table, qkv):
        one = jax.grad(lambda table, qkv: _loss(attention, table, qkv), argnums=(0, 1))
        return jax.vmap(one, axes)(table, qkv)

    _assert_equal(gradients, table, (q, k, v))


def test_second_derivatives():
    def product(attention, table, qkv):
        loss = jax.grad(lambda table, qkv: _loss(attention, table, qkv), argnums=(0, 1))
        return jax.jvp(loss, (table, qkv), (jnp.cos(table), jax.tree.map(jnp.cos, qkv)))[1]

    _assert_equal(product, _table(), _qkv())


def test_forward_mode():
    def tangent(attention, table, qkv):
        moved = (jnp.cos(table), jax.tree.map(jnp.cos, qkv))
        return jax.jvp(lambda table, qkv: _loss(attention, table, qkv), (table, qkv), moved)

    _assert_equal(tangent, _table(), _qkv())


def test_packed_sequences():
    edges = np.array([0, 5, 12], np.int32)
    q, k, v = (x[0, :_T] for x in _qkv())

    def loss(attention, table):
        return jnp.sum(jnp.sin(attention(q, k, v, edges, edges, score_mod=_relative(table))))

    ours, theirs = (
        jax.value_and_grad(functools.partial(loss, f))(_table())
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

    _assert_equal(gradients, _table(), _qkv())


@needs_kernels
def test_kernels_say_which_equation_they_do_not_take():
    q, k, v = _qkv()
    with pytest.raises(NotImplementedError, match=r"`random_\w+`.*in: .* = random_"):
        jaxflash.dot_product_attention(
            q, k, v, score_mod=_unprintable(_table()), implementation="cuda"
        )


def test_keys_can_be_captured():
    key = jax.random.key(5)

    def out(attention, qkv):
        def score_mod(score, b, h, q, kv):
            return score + jax.random.normal(jax.random.fold_in(key, q * _S + kv), (), jnp.float32)

        return attention(*qkv, score_mod=score_mod)

    _assert_equal(out, _qkv())


def test_float64_captures():
    with jax.enable_x64(True):
        table = _table().astype(jnp.float64)

        def make(table):
            return lambda score, b, h, q, kv: (score + table[h, q]).astype(jnp.float32)

        with jax.numpy_dtype_promotion("standard"):
            _assert_equal(lambda f, table: jax.grad(_loss, 1)(f, table, _qkv(), make), table)
            reasons = jaxflash.supported(*_qkv(), score_mod=make(table))
        if _ffi.extension.kernels:
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
            return _loss(attention, times, _qkv(), make)

        moved = jnp.cos(times) if whole else times
        return jax.jvp(loss, (times,), (moved,)), jax.jvp(jax.grad(loss), (times,), (moved,))

    with jax.enable_x64(True):
        _assert_equal(derivatives, 1.7e9 + jnp.arange(_S, dtype=jnp.float64) ** 2)


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
            return _loss(attention, jnp.exp(jax.lax.complex(0.1 * angles, angles)), _qkv(), make)

        by_themselves = jax.grad(_loss, 1)(
            attention, jax.lax.complex(angles, 1 - angles), _qkv(), make
        )
        return by_themselves, jax.jvp(jax.value_and_grad(loss), (angles,), (jnp.cos(angles),))

    with jax.enable_x64(x64):
        angles = jnp.linspace(0.0, 2.0, _S)
        _assert_equal(derivatives, angles)
        turns = jnp.exp(jax.lax.complex(angles, angles))
        if _ffi.extension.kernels:
            reason, *_ = jaxflash.supported(*_qkv(), score_mod=make(turns))
            assert ("dtype float64" if x64 else "`complex`") in reason


@needs_kernels
def test_more_captures_than_kernels_take():
    arrays = [jnp.full(_N, float(i)) for i in range(9)]

    def score_mod(score, b, h, q, kv):
        return score + sum(x[h] for x in arrays)

    assert any("9 arrays" in reason for reason in jaxflash.supported(*_qkv(), score_mod=score_mod))


# ---- One program, whichever function -------------------------------------------------------------


def test_equal_functions_compile_once():
    qkv = _qkv()

    def call(scale, table):
        return jaxflash.dot_product_attention(
            *qkv, score_mod=lambda s, b, h, q, kv: jax.nn.relu(scale * s) + table[h, q]
        )

    call(2.0, _table(1))
    before = _derivatives.attention._cache_size()
    call(2.0, _table(2))
    assert _derivatives.attention._cache_size() == before
    call(3.0, _table(2))
    assert _derivatives.attention._cache_size() == before + 1


def test_custom_derivatives_tell_programs_apart():
    def program(slope):
        @jax.custom_jvp
        def function(x):
            return jnp.abs(x)

        function.defjvp(lambda x, t: (jnp.abs(x[0]), slope * t[0]))
        return _scores.trace(lambda s, *_: function(s), (), jnp.float32)[0]

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
    ],
)
def test_wrong_functions(score_mod, said):
    for attention in _ATTENTIONS:
        with pytest.raises(ValueError, match=f"score_mod.*({said})"):
            attention(*_qkv(), score_mod=score_mod)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("argument", ["score_mod", "mask"])
def test_refs_are_read_before_the_call(argument, traced):
    q, k, v = _qkv()

    def out(slopes):
        ref = jax.new_ref(slopes)
        options = {
            "score_mod": lambda s, b, h, q, kv: s * jax.jit(lambda: ref[h])(),
            "mask": jaxflash.masks.function(lambda b, h, q, kv: kv < ref[h].astype(q.dtype)),
        }
        return jaxflash.dot_product_attention(q, k, v, **{argument: options[argument]})

    said = rf"{argument}.* captures a Ref.*float32\[{_N}\].*read it before the call, ref\[\.\.\.\]"
    with pytest.raises(ValueError, match=said):
        (jax.jit(out) if traced else out)(jnp.ones(_N, jnp.float32))


def test_errors_inside_the_function_are_its_own():
    empty = jnp.zeros((0,))
    with pytest.raises((TypeError, ValueError, IndexError)):
        jaxflash.dot_product_attention(*_qkv(), score_mod=lambda s, b, h, q, kv: s + empty[h])
    with pytest.raises(TypeError, match="positional argument"):
        jaxflash.dot_product_attention(*_qkv(), score_mod=lambda s: s)


@pytest.mark.parametrize("result", [np.nan, np.inf, -np.inf])
def test_not_finite(result):
    """NaN and infinity are seen by their rows alone; a row of -inf sees no key."""

    def out(attention, qkv):
        return attention(
            *qkv, score_mod=lambda s, b, h, q, kv: jnp.where((q == 3) & (h == 1), result, s)
        )

    if not np.isnan(result):  # XLA's maximum on a CPU may lose a NaN, the reference with it
        _assert_equal(out, _qkv())
    x = jaxflash.dot_product_attention(
        *_qkv(), score_mod=lambda s, b, h, q, kv: jnp.where(q == 3, result, s)
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

    _assert_equal(gradients, _qkv())


def test_gradients_are_finite_where_the_logit_is_minus_infinity():
    def loss(qkv, table):
        def score_mod(score, b, h, q, kv):
            return jnp.log(jnp.maximum(score * table[h, q], 0.0))  # slope 1 / 0 in places

        return jnp.sum(jaxflash.dot_product_attention(*qkv, score_mod=score_mod))

    for x in jax.tree.leaves(jax.jit(jax.grad(loss, argnums=(0, 1)))(_qkv(), _table())):
        assert np.isfinite(x).all()


# ---- What the kernels are told -------------------------------------------------------------------


def _on_kernels(q, k, v, bias, table, sink, **options):
    """The call on the path of the kernels, whatever they cover."""
    options = {**_api.DEFAULTS, "sink": sink, "logits_soft_cap": 30.0, **options}
    del options["score_mod"]
    spec, operands = _spec.make(q, k, v, bias, None, **options)
    spec, operands = _scores.compose(
        spec, operands, lambda s, b, h, q, kv: s + table[h, q - kv + 7] * b.astype(jnp.float32)
    )
    return _derivatives.attention(spec, "cuda", operands)[0]


def _kernel_arguments(dtype=jnp.bfloat16, head_dim=64):
    q, k = jnp.zeros((4, 16, 8, head_dim), dtype), jnp.zeros((4, 16, 4, head_dim), dtype)
    others = (jnp.zeros(shape, jnp.float32) for shape in ((4, 1, 16, 16), (8, 15), (8,)))
    return q, k, k, *others


# Custom calls as lowered text names them, and compiled text.
_FORWARD, _BACKWARD = (f"@{name}" for name in (_ffi.FORWARD_TARGET, _ffi.BACKWARD_TARGET))
_COMPILED_FORWARD, _COMPILED_BACKWARD = (
    f'"{name}"' for name in (_ffi.FORWARD_TARGET, _ffi.BACKWARD_TARGET)
)


def _custom_calls(text: str, target: str) -> list[str]:
    return [line for line in text.splitlines() if target in line]


@needs_kernels
def test_operands_of_the_custom_calls():
    arguments = _kernel_arguments()
    gradient = jax.grad(
        lambda *args: jnp.sum(_on_kernels(*args).astype(jnp.float32)), argnums=(0, 4, 5)
    )
    text = jax.jit(gradient).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    captures = "tensor<4x16x16xf32>, tensor<1x8x15xf32>, tensor<1x8xf32>) ->"
    (forward,) = _custom_calls(text, _FORWARD)
    assert f"tensor<4xi32>, tensor<8xi32>, {captures}" in forward
    assert "capture_ranks = dense<[2, 2, 1]>" in forward
    assert "struct Program" in forward
    (backward,) = _custom_calls(text, _BACKWARD)
    assert f"tensor<4xi32>, tensor<8xi32>, {captures}" in backward


@needs_kernels
def test_operands_of_the_custom_call_under_vmap():
    q, k, v, bias, table, sink = _kernel_arguments()
    axes = (0, None, None, None, 0, None)
    mapped = jax.vmap(_on_kernels, axes)
    arguments = (jnp.stack([q, q]), k, v, bias, jnp.stack([table, table]), sink)
    text = jax.jit(mapped).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    (forward,) = _custom_calls(text, _FORWARD)
    assert "tensor<1x4xi32>, tensor<8xi32>, tensor<1x4x16x16xf32>, tensor<2x1x8x15xf32>" in forward


_FACTORS = jnp.linspace(0.5, 1.0, 3, dtype=jnp.float32)
_NUMBERED: dict[str, tuple[dict, bool]] = {
    "soft cap": (dict(logits_soft_cap=30.0), False),
    "segments": (dict(segment_ids=jnp.zeros((4, 16), jnp.int32)), False),
    "a bias that heads share": (dict(bias=jnp.zeros((4, 1, 16, 16), jnp.bfloat16)), False),
    "a bias of each head": (dict(bias=jnp.zeros((1, 8, 16, 16), jnp.bfloat16)), True),
    "slopes": (dict(alibi_slopes=jnp.zeros(8, jnp.float32)), True),
    "sink": (dict(sink=jnp.zeros(8, jnp.float32)), True),
    "dropout": (dict(dropout_rate=0.1, dropout_rng=jax.random.PRNGKey(0)), True),
    "heads": (dict(score_mod=lambda s, b, h, q, kv: jnp.where(h < 2, s, -s)), True),
    "batch elements": (
        dict(mask=jaxflash.masks.function(lambda b, h, q, kv: (q + b) % 3 != kv % 3)),
        True,
    ),
    "an index": (dict(score_mod=lambda s, b, h, q, kv: s * _FACTORS[jnp.minimum(b, 2)]), True),
}


@needs_kernels
@pytest.mark.parametrize(("options", "numbered"), _NUMBERED.values(), ids=_NUMBERED)
def test_numbers_go_to_programs_that_ask(options, numbered):
    """A kernel each would make the numbers of batch elements and heads."""
    q, k = _kernel_arguments()[:2]

    def loss(q, options):
        out = jaxflash.dot_product_attention(q, k, k, implementation="cuda", **options)
        return jnp.sum(out.astype(jnp.float32))

    arrays = {name: x for name, x in options.items() if isinstance(x, jax.Array)}
    others = {name: x for name, x in options.items() if name not in arrays}
    gradient = jax.grad(lambda q, arrays: loss(q, arrays | others), (0, 1), allow_int=True)
    text = jax.jit(gradient).trace(q, arrays).lower(lowering_platforms=("cuda",)).as_text()
    for target in (_FORWARD, _BACKWARD):
        (call,) = _custom_calls(text, target)
        assert ("tensor<4xi32>, tensor<8xi32>" in call) == numbered


@needs_kernels
@pytest.mark.parametrize(
    ("shape", "capture"),
    [
        ((_B, _N, 16, 40), "tensor<2x4x1x16x4xui32>"),
        ((1, 1, 16, 40), "tensor<1x1x16x4xui32>"),
        ((_B, 1, 1, 40), "tensor<2x1x4xui32>"),
        ((1, 1, 16, 1), "tensor<1x16xi1>"),
        ((1, 1, 1, 1), "tensor<1xi1>"),
    ],
)
def test_masks_are_captures(shape, capture):
    """Of the axes that they have, after the captures of the program and before the sink; of 128
    keys four words."""
    x = jnp.zeros((_B, 16, _N, 16), jnp.float32)
    keys = jnp.zeros((_B, 40, _N, 16), jnp.float32)

    def attend(x, mask, sink):
        return jaxflash.dot_product_attention(
            x, keys, keys, mask=mask, sink=sink, logits_soft_cap=3.0, implementation="cuda"
        )

    traced = jax.jit(attend).trace(x, jnp.ones(shape, bool), jnp.ones(_N, jnp.float32))
    (forward,) = _custom_calls(traced.lower(lowering_platforms=("cuda",)).as_text(), _FORWARD)
    hulls = f"tensor<{_B}x16x2xi32>, tensor<{_B}x40x2xi32>"  # of every batch element
    assert f"{capture}, tensor<1x4xf32>, {hulls}, " in forward


_MASK_SHAPES = [
    (2, 3, 70, 45), (1, 1, 64, 96), (2, 1, 1, 45), (1, 3, 70, 1), (1, 3, 21, 300), (1, 1, 320, 304),
    (2, 2, 259, 700),
]  # fmt: skip


def _random_mask(shape):
    """With parts that are visible and parts that are hidden as a whole."""
    rng = np.random.default_rng(0)
    mask = rng.random(shape) < 0.1
    mask[..., 64:192, :128] = True
    for low, high in ((5, 9), (192, 256)):  # rows, then keys, if there are as many
        mask[0, :, low:high] = False
        mask[-1, ..., 2 * low : 2 * high] = False
    return mask


@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize("shape", _MASK_SHAPES[:5])
def test_masks_as_the_kernels_read_them(shape, pass_):
    """Every bit of a word is that of its element."""
    mask = _random_mask(shape)
    q_len, kv_len = 70 if shape[2] == 1 else shape[2], 45 if shape[3] == 1 else shape[3]
    own = _dense_mask.own_type(mask, pass_)
    words = mask_values.packed(mask, pass_).reshape(shape[0], *own.shape)
    packed = _dense_mask.packed_axis(mask, pass_)
    assert own.dtype == words.dtype == (jnp.bool_ if packed is None else jnp.uint32)
    predicate = _scores.dense_predicate(_dense_mask.axes(mask), own, packed)

    def visible(words, h, q, kv):
        distance = q - kv
        (visible,) = jaxpr_as_fun(predicate.jaxpr)(
            jnp.float32(2.0), jnp.int32(0), h, q, kv, distance, words
        )
        return visible

    h, q, kv = jnp.meshgrid(*map(jnp.arange, (3, q_len, kv_len)), indexing="ij")
    elements = jax.vmap(visible, (None, 0, 0, 0))
    for batch in range(shape[0]):
        shown = elements(words[batch], *(jnp.ravel(i).astype(jnp.int32) for i in (h, q, kv)))
        expected = np.broadcast_to(mask[batch], h.shape)
        np.testing.assert_array_equal(shown.reshape(h.shape), expected)


def _blocks_of(mask, axis):
    """Lists of the blocks of 64 along an axis of a mask (T, S), each with all of the other axis."""
    return [np.take(mask, range(i, min(i + 64, mask.shape[axis])), axis)
            for i in range(0, mask.shape[axis], 64)]  # fmt: skip


def _check_shown(shown, mask, q_len, kv_len):
    """Hulls hold what is visible, are no wider than blocks, and what lies inside is so."""
    q_blocks, kv_blocks = (-(-n // 64) for n in (q_len, kv_len))
    lead = mask.shape[:2]
    assert [x.shape for x in shown] == [
        (*lead, q_len, 2), (*lead, kv_len, 2), (*lead, q_blocks, 4), (*lead, kv_blocks, 4),
        (*lead, q_blocks, -(-kv_blocks // 32), 2), (*lead, kv_blocks, -(-q_blocks // 32), 2),
    ]  # fmt: skip
    full = np.broadcast_to(mask, (*lead, q_len, kv_len))
    for index in np.ndindex(lead):
        sides = (full[index], *(x[index] for x in shown[::2])), (
            full[index].T, *(x[index] for x in shown[1::2]),
        )  # fmt: skip
        for of_side, hulls, inside, visits in sides:
            blocks = _blocks_of(of_side, 0)
            for number, block in enumerate(blocks):
                seen = [part.any() for part in _blocks_of(block, 1)]
                whole = [part.all() for part in _blocks_of(block, 1)]
                for words, expected in zip(visits[number].T, (seen, whole), strict=True):
                    bits = [int(words[i // 32]) >> i % 32 & 1 for i in range(len(expected))]
                    assert bits == expected
                first = seen.index(True) if any(seen) else 0
                last = len(seen) - seen[::-1].index(True) if any(seen) else 0
                hull = [64 * first, min(64 * last, of_side.shape[1])]
                for row, interval in zip(block, hulls[64 * number : 64 * number + 64], strict=True):
                    np.testing.assert_array_equal(interval, hull if row.any() else [0, 0])
                begin, end, gap_begin, gap_end = (int(x) for x in inside[number])
                assert -(-(end - begin) // 64) == _longest(whole)
                assert block[:, begin:end].all()
                assert not block[:, gap_begin:gap_end].any()
                if any(seen):
                    hidden = [not x for x in seen[first:last]]
                    assert max(gap_end - gap_begin, 0) == 64 * _longest(hidden)
                else:
                    assert gap_begin == 0
                    assert gap_end >= of_side.shape[1]


def _longest(flags):
    """Of runs of true ones."""
    best = run = 0
    for flag in flags:
        run = run + 1 if flag else 0
        best = max(best, run)
    return best


@pytest.mark.parametrize("shape", _MASK_SHAPES)
def test_what_masks_show(shape):
    mask = _random_mask(shape)
    q_len, kv_len = 70 if shape[2] == 1 else shape[2], 45 if shape[3] == 1 else shape[3]
    spec, operands = _mask_operands(mask, q_len, kv_len)
    (shown,) = _ranges.of_dense_mask(operands)
    _check_shown([np.asarray(x) for x in shown], mask, q_len, kv_len)
    ranges = _ranges.of_call(spec, operands, shown)
    assert ranges is not None
    seen = np.broadcast_to(mask.any(1), (shape[0], q_len, kv_len))
    if max(q_len, kv_len) <= 96:
        np.testing.assert_array_equal(ranges.keys_of_row, mask_values.hulls(seen))
        np.testing.assert_array_equal(ranges.rows_of_key, mask_values.hulls(seen.mT))


def _mask_operands(mask, q_len, kv_len):
    q, k = (jnp.zeros((mask.shape[0], n, mask.shape[1], 8), jnp.float32) for n in (q_len, kv_len))
    options = dict(_api.DEFAULTS)
    del options["score_mod"]
    return _spec.make(q, k, k, None, mask, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize("shape", _MASK_SHAPES)
def test_masks_are_read_on_the_gpu(shape, pass_):
    mask = _random_mask(shape)
    q_len, kv_len = 70 if shape[2] == 1 else shape[2], 45 if shape[3] == 1 else shape[3]
    read = jax.jit(lambda mask: _kernels.read_mask(mask, pass_, q_len, kv_len))(mask)
    words = mask_values.packed(mask, pass_)
    np.testing.assert_array_equal(read.elements, words.reshape(read.elements.shape))
    sees, is_seen = mask.any(-1), mask.any((1, 2))
    np.testing.assert_array_equal(read.sees, np.broadcast_to(sees, (*sees.shape[:-1], q_len)))
    np.testing.assert_array_equal(read.is_seen, np.broadcast_to(is_seen, (len(mask), kv_len)))
    _check_shown([np.asarray(x) for x in read.shown], mask, q_len, kv_len)


@needs_kernels
def test_shards_know_their_numbers():
    """Batch elements keep their numbers; captures are split as the heads that index them."""
    mesh = cpu_mesh(x=2, y=4)
    specs = (P("x", None, "y"), P("x", None, "y"), P("x", None, "y"), P("x"), P(), P())
    arguments = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(_kernel_arguments(), specs, strict=True)
    ]
    traced = jax.jit(_on_kernels).trace(*arguments)
    text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    (forward,) = [x for x in _custom_calls(text, _COMPILED_FORWARD) if "custom-call" in x]
    layouts = forward.split("operand_layout_constraints=")[1]
    assert "s32[2]{0}, s32[2]{0}, f32[2,16,16]{2,1,0}, f32[1,2,15]{2,1,0}, f32[1,2]" in layouts
    assert "all-gather" not in text


@needs_kernels
def test_gradients_of_captures_are_results_of_the_custom_call():
    """The backward call gives them, summed over what broadcasts; sinks need nothing but out."""
    arguments = _kernel_arguments()

    def gradient(argnums, **options):
        def loss(*args):
            return jnp.sum(_on_kernels(*args, **options).astype(jnp.float32))

        traced = jax.jit(jax.grad(loss, argnums)).trace(*arguments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        return _custom_calls(text, _BACKWARD), "dot_general" in text

    # Bias (4, 1, 16, 16) has a tile of rows and columns, the table (8, 15) an index of q - kv.
    (backward,), blockwise = gradient((0, 3, 4, 5))
    assert "xui8>, tensor<4x16x16xf32>, tensor<1x8x15xf32>)" in backward
    assert "gradient_loads = dense<[0, 0, 1, 0, 0, 0, 0, 0, 1, -1, -1, 1, 0, 0, 0, 0]>" in backward
    assert not blockwise
    (backward,), blockwise = gradient((3,))
    assert "xui8>, tensor<4x16x16xf32>)" in backward
    assert not blockwise
    (backward,), blockwise = gradient((0, 5))
    assert backward.rstrip().endswith("xui8>)")
    assert not blockwise
    # Nothing orders the additions to the table: the blockwise path makes its gradient.
    (backward,), blockwise = gradient((0, 3, 4), deterministic_backward=True)
    assert "xui8>, tensor<4x16x16xf32>)" in backward
    assert blockwise


def _bias_gradient(shape, dtype=jnp.bfloat16, head_dim=128, **options):
    q, k, *_ = _kernel_arguments(head_dim=head_dim)

    def loss(bias, q):
        out = jaxflash.dot_product_attention(
            q, k, k, bias, implementation="cuda", scale=0.125, **options
        )
        return jnp.sum(out.astype(jnp.float32))

    return jax.grad(loss), (jnp.zeros(shape, dtype), q)


@needs_kernels
def test_gradients_that_the_backward_kernel_stores():
    """Those of an element of the logits each, in the operands' dtype."""

    def gradient(*args, **options):
        function, arguments = _bias_gradient(*args, **options)
        traced = jax.jit(function).trace(*arguments)
        (call,) = _custom_calls(traced.lower(lowering_platforms=("cuda",)).as_text(), _BACKWARD)
        return call

    for options in ({}, dict(logits_soft_cap=2.0), dict(is_causal=True)):
        call = gradient((4, 8, 16, 16), **options)
        assert "gradient_loads = dense<[0, 1, 2, 0, 1, 1, 0, 0]>" in call
        assert "kStoresGradient = true" in call
        assert "xui8>, tensor<4x8x16x16xbf16>)" in call
    # Of the sum over the batch, where all batch elements take the same steps.
    for options in ({}, dict(is_causal=True), dict(local_window_size=(5, 2))):
        call = gradient((1, 8, 16, 16), **options)
        assert "gradient_loads = dense<[0, 1, 2, 0, 1, 1, 0, 1]>" in call
        assert "kSumsBatch = true" in call
        assert "xui8>, tensor<1x8x16x16xbf16>)" in call
    # Sums over heads, another dtype, batch elements that differ, what another kernel does faster.
    lengths = jnp.array([16, 3, 0, 9], jnp.int32)
    mask = jnp.ones((4, 1, 16, 16), bool)
    for args, options in (
        (((1, 8, 16, 16),), dict(key_value_seq_lengths=lengths)),
        (((1, 8, 16, 16),), dict(mask=mask)),
        (((1, 8, 16, 16),), dict(head_dim=64)),
        (((1, 8, 16, 16),), dict(deterministic_backward=True)),
        (((1, 8, 16, 16),), dict(segment_ids=jnp.zeros((4, 16), jnp.int32))),
        (((4, 1, 16, 16),), {}),
        (((4, 8, 16, 16), jnp.float32), {}),
        (((4, 8, 16, 16), jnp.float16), {}),
    ):
        call = gradient(*args, **options)
        assert "kStoresGradient = false" in call
        assert call.split("gradient_loads = dense<")[1].split("]")[0].endswith(", 0, 0, 0, 0")


@needs_kernels
@pytest.mark.parametrize("batch", [4, 1])
def test_stored_gradients_under_vmap(batch):
    """What vmap adds is no part of a sum over the batch."""
    function, (bias, q) = _bias_gradient((batch, 8, 16, 16))
    traced = jax.jit(jax.vmap(function, (None, 0))).trace(bias, jnp.stack([q, q]))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (call,) = _custom_calls(text, _BACKWARD)
    assert "kStoresGradient = true" in call
    assert f"xui8>, tensor<2x{batch}x8x16x16xbf16>)" in call


@needs_kernels
def test_stored_gradients_in_shards():
    """A device has the matrices of its heads."""
    mesh = cpu_mesh(x=2, y=4)
    function, arguments = _bias_gradient((4, 8, 16, 16))
    specs = P("x"), P("x", None, "y")
    arguments = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(arguments, specs, strict=True)
    ]
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    text = text.compile().as_text()
    (call,) = [x for x in _custom_calls(text, _COMPILED_BACKWARD) if "custom-call" in x]
    assert "bf16[2,2,16,16]" in call.split("custom-call(")[0]
    assert "all-reduce" not in text


@needs_kernels
def test_stored_sums_in_shards():
    """A device has the sum of its batch elements, which is then summed over the devices."""
    mesh = cpu_mesh(x=2, y=4)
    function, (bias, q) = _bias_gradient((1, 8, 16, 16))
    q = jax.device_put(q, NamedSharding(mesh, P("x", None, "y")))
    text = jax.jit(function).trace(bias, q).lower(lowering_platforms=("cuda",))
    text = text.compile().as_text()
    (call,) = [x for x in _custom_calls(text, _COMPILED_BACKWARD) if "custom-call" in x]
    assert "bf16[1,2,16,16]" in call.split("custom-call(")[0]
    (total,) = [x for x in text.splitlines() if " all-reduce(" in x]
    assert "[1,2,16,16]" in total


@needs_kernels
def test_gradients_of_captures_are_summed_over_shards():
    mesh = cpu_mesh(x=2, y=4)
    specs = (P("x", None, "y"), P("x", None, "y"), P("x", None, "y"), P("x"), P(), P())
    arguments = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(_kernel_arguments(), specs, strict=True)
    ]

    def gradient(*args):
        return jax.grad(lambda *args: jnp.sum(_on_kernels(*args) * 1.0), (3, 4))(*args)

    traced = jax.jit(gradient).trace(*arguments)
    text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    sums = [x for x in text.splitlines() if " all-reduce(" in x]
    # The bias is split as the batch, and every head adds to it; of the table each device has the
    # part of its heads. Devices as JAX 0.11 names them, and as 0.10 lists them.
    along_y, along_x = ("{'y'}", "{{0,1,2,3},{4,5,6,7}}"), ("{'x'}", "{{0,4},{1,5},{2,6},{3,7}}")
    assert any("f32[2,16,16]" in x and any(d in x for d in along_y) for x in sums), sums
    assert any("f32[1,2,15]" in x and any(d in x for d in along_x) for x in sums), sums
    assert "all-gather" not in text


def _bias_and_slopes(implementation):
    def gradients(q, k, v, bias, slopes):
        def loss(*args):
            q, k, v, bias, slopes = args
            out = jaxflash.dot_product_attention(
                q, k, v, bias, alibi_slopes=slopes, implementation=implementation
            )
            return jnp.sum(jnp.sin(out.astype(jnp.float32)))

        return jax.grad(loss, (0, 3, 4))(q, k, v, bias, slopes)

    return gradients


def _inside_shard_map(function, mesh, manual):
    split, whole = P("x"), P()
    return jax.jit(
        jax.shard_map(
            function,
            mesh=mesh,
            in_specs=(split, split, split, whole, whole),
            out_specs=(split, whole, whole),
            axis_names=manual,
        )
    )


def _split_arguments():
    mesh = cpu_mesh(x=2, y=4)
    q, k, v = _qkv()
    bias = jnp.asarray(np.random.default_rng(2).standard_normal((_N, _T, _S)), jnp.float32)
    return mesh, (q, k, v, bias, jnp.linspace(0.1, 0.4, _N, dtype=jnp.float32))


@pytest.mark.parametrize("manual", [{"x"}, {"x", "y"}], ids=["part", "all"])
def test_gradients_of_captures_inside_shard_map(manual):
    mesh, arguments = _split_arguments()
    expected = jax.jit(_bias_and_slopes("xla"))(*arguments)
    actual = _inside_shard_map(_bias_and_slopes("xla"), mesh, manual)(*arguments)
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


# Values of two types, inside `shard_map`: what reads a table, and a score that does not.
_CHOICES = {
    "where": jnp.where,
    "cond": lambda condition, x, y: jax.lax.cond(condition, lambda: x, lambda: y),
    "loop": lambda condition, x, y: jax.lax.fori_loop(
        0, 2, lambda i, z: jnp.where(condition & (i > 0), x, z), y
    ),
}


def _of_shards(attention, mesh=None, choose=jnp.where, **options):
    """A loss of arrays and slopes split over batch and heads, by shards if there is a mesh."""

    def attend(q, k, v, table):
        def by_head(score, b, h, q, kv):
            moved = score * jnp.tanh(table[h, 1]) + table[h, 0]
            return choose(q > kv, moved, score)

        given = {"score_mod": by_head} | options
        return attention(q, k, v, sink=table[:, 0], **given)

    if mesh is not None:
        split = P("x", None, "y")
        attend = jax.shard_map(
            attend, mesh=mesh, in_specs=(split, split, split, P("y")), out_specs=split
        )
    return lambda *arguments: jnp.sum(jnp.sin(attend(*arguments).astype(jnp.float32)))


def _arguments_of_shards():
    rng = np.random.default_rng(3)
    q, k, v = (jnp.asarray(rng.standard_normal((2, _T, _N, 8)), jnp.float32) for _ in range(3))
    return q, k, v, jnp.asarray(rng.standard_normal((_N, 2)), jnp.float32)


@pytest.mark.parametrize("choose", _CHOICES)
def test_captures_that_are_split_inside_shard_map(choose):
    """The score varies over more mesh axes than what the function reads."""
    choose = _CHOICES[choose]
    mesh, arguments = cpu_mesh(x=2, y=4), _arguments_of_shards()
    gradients = [
        jax.jit(jax.value_and_grad(loss, (0, 1, 3)))(*arguments)
        for loss in (
            _of_shards(jaxflash.dot_product_attention, mesh, choose),
            _of_shards(jaxflash.reference.dot_product_attention, choose=choose),
        )
    ]
    for x, y in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


@needs_kernels
@pytest.mark.parametrize("option", ["score_mod", "logits_soft_cap"])
def test_programs_inside_shard_map_run_on_the_kernels(option):
    options = {} if option == "score_mod" else {"score_mod": None, "logits_soft_cap": 3.0}
    mesh, arguments = cpu_mesh(x=2, y=4), _arguments_of_shards()
    loss = _of_shards(
        functools.partial(jaxflash.dot_product_attention, implementation="cuda"), mesh, **options
    )
    traced = jax.jit(jax.grad(loss, (0, 1, 3))).trace(*arguments)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "jaxflash_forward" in text
    assert "jaxflash_backward" in text


@needs_kernels
@pytest.mark.parametrize("manual", [{"x"}, {"x", "y"}], ids=["part", "all"])
def test_gradients_of_captures_of_the_custom_call_inside_shard_map(manual):
    """Where some mesh axes are automatic, no sum can name their devices: nothing is split there."""
    mesh, arguments = _split_arguments()
    function = _inside_shard_map(_bias_and_slopes("cuda"), mesh, manual)
    text = function.trace(*arguments).lower(lowering_platforms=("cuda",)).compile().as_text()
    (backward,) = [x for x in _custom_calls(text, _COMPILED_BACKWARD) if "custom-call" in x]
    assert f"f32[1,{_N},{_T},{_S}]" in backward


@needs_kernels
def test_gradients_of_captures_on_an_explicit_mesh():
    """Computed by the kernels, of the heads that a device has."""
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices("cpu")[:4], axis_types=kinds)
    _, arguments = _split_arguments()
    specs = (*(P("x", None, "y"),) * 3, P("y"), P("y"))
    arguments = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(arguments, specs, strict=True)
    ]
    _support._warned.clear()
    with jax.set_mesh(mesh):
        traced = jax.jit(_bias_and_slopes("cuda")).trace(*arguments)
        with warnings.catch_warnings():
            warnings.simplefilter("error", jaxflash.SlowPathWarning)
            lowered = traced.lower(lowering_platforms=("cuda",))
        text = lowered.compile().as_text()
    (backward,) = [x for x in _custom_calls(text, _COMPILED_BACKWARD) if "custom-call" in x]
    assert f"f32[1,{_N // 2},{_T},{_S}]" in backward.split("custom-call(")[0]


def test_programs_for_the_kernels_do_not_depend_on_lengths():
    def source(q_len, kv_len):
        shapes = (1, q_len, 8, 64), (1, kv_len, 4, 64), (8, q_len, kv_len), (8,)
        q, k, bias, slopes = (jnp.zeros(shape, jnp.float32) for shape in shapes)
        options = {**_api.DEFAULTS, "alibi_slopes": slopes, "is_causal": True}
        del options["score_mod"]
        spec, operands = _spec.make(q, k, k, bias, None, **options)
        program = _kernel_program.make(*_scores.compose(spec, operands, None), "forward")
        assert program is not None
        return program

    assert source(16, 32) == source(100, 50)


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_sharded_arrays_on_the_blockwise_path(kind):
    """Where shardings are part of types, too; what is built in gathers nothing."""
    q, k, v = _qkv()
    bias = jnp.asarray(np.random.default_rng(2).standard_normal((_B, _N, _T, _S)), jnp.float32)
    arguments = (q, k, v, bias, jnp.linspace(0.1, 0.4, _N, dtype=jnp.float32), _table())

    def loss(score_mod, q, k, v, bias, slopes, table):
        options = dict(bias=bias, alibi_slopes=slopes, logits_soft_cap=3.0)
        if score_mod:
            options["score_mod"] = _relative(table)
        out = jaxflash.dot_product_attention(q, k, v, **options, implementation="xla")
        return jnp.sum(jnp.sin(out))

    mesh = jax.make_mesh(
        (2, 2), ("x", "y"), devices=jax.devices("cpu")[:4], axis_types=(kind, kind)
    )
    specs = (*(P("x", None, "y"),) * 3, P("x", "y"), P("y"), P())
    shardings = (NamedSharding(mesh, spec) for spec in specs)
    sharded = [jax.device_put(x, s) for x, s in zip(arguments, shardings, strict=True)]
    for score_mod in (False, True):
        gradients = jax.jit(jax.grad(functools.partial(loss, score_mod), argnums=range(6)))
        expected = gradients(*arguments)
        with jax.set_mesh(mesh):
            compiled = gradients.lower(*sharded).compile()
        for x, y in zip(compiled(*sharded), expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)
        assert score_mod or "all-gather" not in (compiled.as_text() or "")


_ELEMENTS = {
    "t[0, kv]": lambda t, h, kv: t[0, kv],
    "t[h, 3]": lambda t, h, kv: t[h, 3],
    "t[-1, kv]": lambda t, h, kv: t[-1, kv],
    "in a function": lambda t, h, kv: jax.jit(lambda t, kv: t[1, kv])(t, kv),
    "clipped": lambda t, h, kv: t.at[h, kv + 5].get(mode="clip"),
}


@needs_kernels
@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
@pytest.mark.parametrize("element", _ELEMENTS.values(), ids=_ELEMENTS)
def test_elements_of_an_array_of_several_devices(element, kind):
    """Which is no argument of `jax.jit`: JAX gathers its elements."""
    mesh = jax.make_mesh((4,), ("x",), (kind,), devices=jax.devices("cpu")[:4])
    table = jnp.asarray(np.random.default_rng(3).standard_normal((_N, _S)), jnp.float32)
    everywhere, *qkv = jax.device_put((table, *_qkv()), NamedSharding(mesh, P()))

    def attend(table, *qkv, implementation=None):
        return jaxflash.dot_product_attention(
            *qkv, score_mod=lambda s, b, h, q, kv: s + element(table, h, kv),
            implementation=implementation,
        )  # fmt: skip

    np.testing.assert_allclose(
        jax.jit(functools.partial(attend, everywhere))(*qkv),
        jax.jit(attend)(table, *_qkv()),
        rtol=1e-5,
        atol=1e-6,
    )
    on_kernels = jax.jit(functools.partial(attend, everywhere, implementation="cuda"))
    on_kernels.trace(*qkv).lower(lowering_platforms=("cuda",))


_POINTS = np.linspace(-3.0, 3.0, _S, dtype=np.float32)
_ON_EXPLICIT_MESHES = {
    "loop": lambda t, s, b, h, q, kv: jax.lax.fori_loop(0, 3, lambda _, x: 0.9 * x + t[0, 0], s),
    "branch": lambda t, s, b, h, q, kv: jax.lax.cond(q > kv, lambda: s, lambda: s + t[h, kv]),
    "index from the score": lambda t, s, b, h, q, kv: s + t[0, jnp.int32(4.0 * s)],
    "row": lambda t, s, b, h, q, kv: s + t[b].mean() + jnp.cumsum(t, 1)[h, kv],
    "function of the array": lambda t, s, b, h, q, kv: s + (2.0 * t).T[kv, h],
    "interpolation": lambda t, s, b, h, q, kv: s + jnp.interp(s, _POINTS, t[1]),
}


@pytest.mark.parametrize("function", _ON_EXPLICIT_MESHES.values(), ids=_ON_EXPLICIT_MESHES)
def test_functions_on_explicit_meshes(function):
    """Whatever a function does with scalars and arrays that no device shares."""
    qkv = _qkv()
    table = jnp.asarray(np.random.default_rng(3).standard_normal((_N, _S)), jnp.float32)

    def loss(qkv, table):
        score_mod = functools.partial(function, table)
        out = jaxflash.dot_product_attention(*qkv, score_mod=score_mod, implementation="xla")
        return jnp.sum(jnp.sin(out))

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    expected = step(qkv, table)
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("x", "y"), explicit, devices=jax.devices("cpu")[:4])
    split = jax.device_put(qkv, NamedSharding(mesh, P("x", None, "y")))
    for place in (lambda x: x, lambda x: jax.device_put(x, NamedSharding(mesh, P()))):
        actual = step(split, place(table))
        for x, y in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)
