"""Attention inside Flax and Equinox, against the same modules with their own attention."""

import functools
import inspect
import io

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import export

import jaxflash
from another_process import run_python
from jaxflash import _extension

pytestmark = pytest.mark.usefixtures("accurate_products", "quick_compilation")
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


def _mask_value():
    """A value, and the bool array (T, T) that it means."""
    mask = jaxflash.masks.causal() | jaxflash.masks.function(lambda b, h, q, kv: kv < 3)
    return mask, np.asarray(jaxflash.masks.as_array(mask, (1, T, T)))[0]


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_mask_values(kind):
    """The modules pass them on as they are."""
    mask, array = _mask_value()
    if kind == "nnx":
        layer = _nnx_module(attention_fn=jaxflash.attention_fn)
    else:
        module = linen.MultiHeadDotProductAttention(HEADS, attention_fn=jaxflash.attention_fn)
        layer = module.bind(module.init(jax.random.key(0), _x()))
    _close(layer(_x(), mask=mask), layer(_x(), mask=array))


def test_nnx_bfloat16():
    module = _nnx_module(attention_fn=jaxflash.attention_fn, dtype=jnp.bfloat16)
    assert nnx.jit(module)(_x()).dtype == jnp.bfloat16


def test_nnx_dropout():
    module = _nnx_module(
        attention_fn=jaxflash.attention_fn, dropout_rate=0.5, broadcast_dropout=False
    )
    run = nnx.jit(lambda module, rngs: module(_x(), deterministic=False, rngs=rngs))
    first, second = run(module, nnx.Rngs(1)), run(module, nnx.Rngs(2))
    assert not np.allclose(first, second)
    np.testing.assert_array_equal(first, run(module, nnx.Rngs(1)))
    _close(module(_x(), deterministic=True), _nnx_module()(_x()))


def test_nnx_sowing_is_refused():
    module = _nnx_module(attention_fn=jaxflash.attention_fn)
    with pytest.raises(ValueError, match="sow_weights"):
        module(_x(), sow_weights=True)


def test_nnx_causal_and_grouped():
    expected = _nnx_loss_and_gradient(_nnx_module(num_kv_heads=2), _x(), is_causal=True)
    module = _nnx_module(num_kv_heads=2, attention_fn=jaxflash.attention_fn)
    _close(_nnx_loss_and_gradient(module, _x(), is_causal=True), expected)


def test_nnx_options():
    """A window, fixed by `functools.partial`, is the band mask of Flax's own attention."""
    attention_fn = functools.partial(
        jaxflash.attention_fn, local_window_size=(3, 0), implementation="xla"
    )
    offset = np.arange(T)[:, None] - np.arange(T)
    band = np.broadcast_to((offset >= 0) & (offset <= 3), (B, 1, T, T))
    expected = _nnx_loss_and_gradient(_nnx_module(), _x(), mask=band)
    _close(_nnx_loss_and_gradient(_nnx_module(attention_fn=attention_fn), _x()), expected)


def _with_variables(**names):
    """A layer whose options are its own variables: what nnx differentiates and carries."""

    class Layer(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.float32(0.3))
            self.sink = nnx.Param(jnp.linspace(-1, 1, HEADS, dtype=jnp.float32))
            self.mask = nnx.Variable(jnp.tril(jnp.ones((T, T), bool)))
            self.key = nnx.Variable(jax.random.key(3))

        def __call__(self, qkv, read):
            options = {name: read(getattr(self, own)) for name, own in names.items()}
            rate = 0.3 if "dropout_rng" in names else 0.0
            return jaxflash.dot_product_attention(*qkv, **options, dropout_rate=rate)

    return Layer()


@pytest.mark.parametrize(
    "names",
    [
        {"scale": "scale", "sink": "sink"},
        {"mask": "mask", "dropout_rng": "key"},
    ],
    ids=["learned", "others"],
)
def test_nnx_variables_are_arrays(names):
    """As in the functions of jax.numpy."""

    def run(read):
        def loss(layer):
            return jnp.sum(jnp.sin(layer(_qkv(), read)))

        value, gradient = nnx.jit(nnx.value_and_grad(loss))(_with_variables(**names))
        return value, nnx.to_pure_dict(nnx.state(gradient, nnx.Param))

    as_array = run(lambda variable: variable[...])
    _close(run(lambda variable: variable), as_array)
    assert ("scale" not in names) or abs(as_array[1]["scale"]) > 1e-3


def test_nnx_variables_in_masks():
    layer, causal = _with_variables(mask="mask"), jaxflash.masks.causal()
    for of in (lambda x: causal & x, lambda x: ~causal | x):
        actual = layer(_qkv(), of)
        _close(actual, layer(_qkv(), lambda variable, of=of: of(variable[...])))


# Where types have 64 bits, the caches of Flax compare int64 with int32.
_as_flax_promotes = jax.numpy_dtype_promotion("standard")


_with_lengths = functools.partial(jaxflash.attention_fn, mask_is_prefix=True)
_DECODING = {"mask": jaxflash.attention_fn, "lengths": _with_lengths}


@_as_flax_promotes
@pytest.mark.parametrize("attention_fn", _DECODING.values(), ids=_DECODING)
def test_nnx_decode(attention_fn):
    """Token by token through the cache."""

    def run(**options):
        module = _nnx_module(num_kv_heads=2, **options)
        module.init_cache((B, 5, FEATURES))
        step = nnx.jit(lambda module, x: module(x, decode=True))
        return [step(module, _x()[:, i : i + 1]) for i in range(5)]

    _close(run(attention_fn=attention_fn), run())


@_as_flax_promotes
def test_nnx_decode_in_a_window():
    """With lengths the query has a position; Flax says the same with a mask of its own."""

    def run(masks, **options):
        module = _nnx_module(**options)
        module.init_cache((B, 6, FEATURES))
        step = nnx.jit(lambda module, x, mask: module(x, decode=True, mask=mask))
        return [step(module, _x()[:, i : i + 1], masks(i)) for i in range(6)]

    def window(i):
        return jnp.broadcast_to(jnp.arange(6) > i - 3, (B, 1, 1, 6))

    attention_fn = functools.partial(_with_lengths, local_window_size=(2, 0))
    _close(run(lambda i: None, attention_fn=attention_fn), run(window))


@_as_flax_promotes
def test_nnx_decode_with_a_score_function():
    """It gets the query's position, as without a cache."""
    table = jax.random.normal(jax.random.key(5), (HEADS, 11))

    def score_mod(score, b, h, q, kv):
        return score + table[h, q - kv + 5]

    def module(**options):
        attention_fn = functools.partial(jaxflash.attention_fn, score_mod=score_mod, **options)
        return _nnx_module(attention_fn=attention_fn)

    expected = module()(_x()[:, :5], is_causal=True)
    decoding = module(mask_is_prefix=True)
    decoding.init_cache((B, 5, FEATURES))
    step = nnx.jit(lambda module, x: module(x, decode=True))
    outs = [step(decoding, _x()[:, i : i + 1]) for i in range(5)]
    _close(jnp.concatenate(outs, axis=1), expected)


def _one_query():
    query, key, value = _qkv()
    return query[:, :1], key, value


def test_prefix_masks_become_lengths():
    """A program for CUDA holds the kernels of plain calls, which share the keys, and no mask."""
    query, key, value = (x.astype(jnp.bfloat16) for x in _one_query())
    mask = jnp.broadcast_to(jnp.arange(T) < 5, (B, 1, 1, T))

    def attend(query, key, value, mask):
        return _with_lengths(query, key, value, mask=mask, implementation="cuda")

    if not _extension.kernels:
        pytest.skip("the library was built without kernels")
    traced = jax.jit(attend).trace(query, key, value, mask)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert 'program = ""' in text
    assert "has_kv_lengths = true" in text


def test_prefix_masks():
    query, key, value = _one_query()
    mask = np.zeros((B, 1, 1, T), bool)
    mask[0, ..., :5] = True
    expected = jaxflash.attention_fn(query, key, value, mask=mask)
    _close(_with_lengths(query, key, value, mask=mask), expected)
    _close(_with_lengths(query, key, value, mask=mask.astype(np.float32)), expected)
    lengths = jnp.full(B, 3, jnp.int32)
    _close(
        _with_lengths(query, key, value, mask=mask, key_value_seq_lengths=lengths),
        jaxflash.attention_fn(query, key, value, mask=mask, key_value_seq_lengths=lengths),
    )
    _close(
        _with_lengths(query, key, value, mask=mask, key_value_seq_lengths=[np.int32(3)] * B),
        jaxflash.attention_fn(query, key, value, mask=mask, key_value_seq_lengths=lengths),
    )
    # Neither without a mask nor of several queries does the promise say anything.
    _close(_with_lengths(query, key, value), jaxflash.attention_fn(query, key, value))
    query = _qkv()[0]
    _close(
        _with_lengths(query, key, value, mask=~mask),
        jaxflash.attention_fn(query, key, value, mask=~mask),
    )


def test_broken_promise_of_a_prefix():
    query, key, value = _one_query()
    mask = np.ones((B, 1, 1, T), bool)
    mask[1, ..., 2] = False
    out = _with_lengths(query, key, value, mask=mask)
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()
    of_heads = np.ones((B, HEADS, 1, T), bool)
    with pytest.raises(ValueError, match="mask_is_prefix: the mask must broadcast"):
        _with_lengths(query, key, value, mask=of_heads)
    with pytest.raises(ValueError, match="key_value_seq_lengths must have the batch shape"):
        _with_lengths(query, key, value, mask=mask, key_value_seq_lengths=np.int32(3))
    with pytest.raises(ValueError, match="mask_is_prefix must be True or False"):
        jaxflash.attention_fn(query, key, value, mask_is_prefix=1)
    # Leading axes of one may be too many, as without the promise.
    mask[1] = False
    _close(
        _with_lengths(query, key, value, mask=mask[None]),
        jaxflash.attention_fn(query, key, value, mask=mask[None]),
    )


@pytest.mark.parametrize("name", ["is_causal", "mask_is_prefix"])
def test_traced_flags_are_named(name):
    with pytest.raises(ValueError, match=f"{name} must be known at trace time"):
        jax.jit(lambda flag: jaxflash.attention_fn(*_qkv(), **{name: flag}))(True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (dict(key=None), "key must be an array"),
        (dict(mask="causal"), "mask must be an array"),
        (dict(mask=lambda b, h, q, kv: True), r"mask must be .*jaxflash\.masks\.function"),
    ],
)
def test_what_is_no_array_is_named(arguments, text):
    query, key, value = _qkv()
    with pytest.raises(ValueError, match=text):
        jaxflash.attention_fn(**{"query": query, "key": key, "value": value, **arguments})


def test_masks_in_variables():
    """Which can be called, as functions can."""
    mask = np.tril(np.ones((T, T), bool))
    expected = jaxflash.attention_fn(*_qkv(), mask=mask)
    for attend in (jaxflash.attention_fn, jaxflash.dot_product_attention):
        _close(attend(*_qkv(), mask=nnx.Variable(jnp.asarray(mask))), expected)


def test_window_without_sides_has_no_position():
    query, key, value = _qkv()
    attend = functools.partial(jaxflash.attention_fn, query[:, :1], key, value)
    _close(attend(local_window_size=(None, None)), attend())


@_as_flax_promotes
def test_nnx_decode_with_a_window_is_refused():
    attention_fn = functools.partial(jaxflash.attention_fn, local_window_size=(3, 0))
    module = _nnx_module(attention_fn=attention_fn)
    module.init_cache((B, T, FEATURES))
    with pytest.raises(ValueError, match="local_window_size: one query over 12 keys"):
        module(_x()[:, :1], decode=True)


def test_score_function_without_a_position_is_refused():
    """One query over several keys would be row 0; what does not read its number may be."""
    query, key, value = _qkv()
    attend = functools.partial(jaxflash.attention_fn, query[:, :1], key, value)

    def by_row(score, b, h, q, kv):
        return score - (q - kv).astype(score.dtype)

    with pytest.raises(ValueError, match="score_mod: one query over"):
        attend(score_mod=by_row)
    for options in (dict(causal_alignment="top_left"), dict(score_mod=lambda s, *_: jnp.tanh(s))):
        options = {"score_mod": by_row, **options}
        _close(attend(**options), jaxflash.dot_product_attention(
            query[:, :1], key, value, score_mod=options["score_mod"]
        ))  # fmt: skip


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
        num_heads=HEADS,
        dropout_rate=0.5,
        broadcast_dropout=False,
        attention_fn=jaxflash.attention_fn,
    )
    parameters = module.init(jax.random.key(0), _x(), deterministic=True)

    def run(seed):
        return module.apply(
            parameters, _x(), deterministic=False, rngs={"dropout": jax.random.key(seed)}
        )

    assert not np.allclose(run(1), run(2))
    np.testing.assert_array_equal(run(1), run(1))


def test_linen_options():
    """Linen has no word for causal; `functools.partial` fixes it."""
    own = linen.MultiHeadDotProductAttention(num_heads=HEADS)
    parameters = own.init(jax.random.key(0), _x())
    causal = linen.MultiHeadDotProductAttention(
        num_heads=HEADS, attention_fn=functools.partial(jaxflash.attention_fn, is_causal=True)
    )
    mask = linen.make_causal_mask(np.ones((B, T)))
    _close(causal.apply(parameters, _x()), own.apply(parameters, _x(), mask=mask))


@_as_flax_promotes
@pytest.mark.parametrize("attention_fn", _DECODING.values(), ids=_DECODING)
def test_linen_decode(attention_fn):
    def run(**options):
        module = linen.MultiHeadDotProductAttention(num_heads=HEADS, decode=True, **options)
        variables = module.init(jax.random.key(0), _x()[:, :5])
        step = jax.jit(functools.partial(module.apply, mutable=["cache"]))
        outs = []
        for i in range(5):
            out, updated = step(variables, _x()[:, i : i + 1])
            variables = {**variables, **updated}
            outs.append(out)
        return outs

    _close(run(attention_fn=attention_fn), run())
    causal = functools.partial(jaxflash.attention_fn, is_causal=True)
    with pytest.raises(ValueError, match="is_causal: one query over 5 keys"):
        run(attention_fn=causal)


def test_linen_sowing_and_einsums_are_refused():
    module = functools.partial(
        linen.MultiHeadDotProductAttention, num_heads=HEADS, attention_fn=jaxflash.attention_fn
    )
    parameters = module().init(jax.random.key(0), _x())
    with pytest.raises(ValueError, match="sow_weights"):
        module().apply(parameters, _x(), sow_weights=True)
    with pytest.raises(ValueError, match="qk_attn_weights_einsum must be None"):
        module(
            qk_attn_weights_einsum_cls=lambda: jnp.einsum,
            attn_weights_value_einsum_cls=lambda: jnp.einsum,
        ).apply(parameters, _x())


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


@pytest.mark.parametrize(
    "name",
    [
        "qk_attn_weights_einsum",
        "attn_weights_value_einsum",
        "einsum_dot_general",
        "input_positions",
        "module",
    ],
)
def test_what_a_fused_kernel_cannot_do(name):
    with pytest.raises(ValueError, match=name):
        jaxflash.attention_fn(*_qkv(), **{name: jnp.einsum})


# An argument for every option of the op; a new one needs a line here.
_OPTIONS = dict(
    scale=0.7,
    query_seq_lengths=np.array([7, T], np.int32),
    key_value_seq_lengths=np.array([5, T], np.int32),
    local_window_size=(4, 2),
    implementation="xla",
    segment_ids=np.repeat([[0, 1]], B, axis=0).repeat(T // 2, axis=1),
    causal_alignment="bottom_right",
    logits_soft_cap=2.0,
    sink=np.linspace(-1, 1, HEADS, dtype=np.float32),
    alibi_slopes=np.linspace(0.1, 1, HEADS, dtype=np.float32),
    deterministic_backward=True,
    score_mod=lambda score, b, h, q, kv: 0.5 * score,
)


def test_every_option_reaches_the_op():
    assert _OPTIONS.keys() == (
        inspect.signature(jaxflash.dot_product_attention).parameters.keys()
        - inspect.signature(jaxflash.attention_fn).parameters.keys()
        - {"return_residual"}
    )
    plain = jaxflash.dot_product_attention(*_qkv())
    for name, option in _OPTIONS.items():
        call = {name: option, "is_causal": name == "causal_alignment"}
        actual = functools.partial(jaxflash.attention_fn, **call)(*_qkv())
        _close(actual, jaxflash.dot_product_attention(*_qkv(), **call))
        changes = name not in ("implementation", "deterministic_backward")
        assert np.allclose(actual, plain, rtol=1e-4, atol=1e-5) != changes, name
    everything = jaxflash.attention_fn(*_qkv(), **_OPTIONS)
    _close(everything, jaxflash.dot_product_attention(*_qkv(), **_OPTIONS))


def test_unknown_options():
    with pytest.raises(TypeError, match=r"unknown options \['causal'\].*local_window_size"):
        jaxflash.attention_fn(*_qkv(), causal=True)
    with pytest.raises(ValueError, match="return_residual"):
        jaxflash.attention_fn(*_qkv(), return_residual=True)


def test_dtypes_are_promoted_as_in_flax():
    q, k, v = _qkv()
    mixed = (q, k.astype(jnp.bfloat16), v)
    with jax.numpy_dtype_promotion("standard"):
        assert jaxflash.attention_fn(*mixed).dtype == jnp.float32

    def to_half(arrays, dtype):
        assert dtype is None
        return tuple(jnp.asarray(x, jnp.float16) for x in arrays)

    assert jaxflash.attention_fn(q, k, v, promote_dtype=to_half).dtype == jnp.float16
    assert jaxflash.attention_fn(q, k, v, dtype=jnp.bfloat16).dtype == jnp.bfloat16


def test_broadcast_dropout_warns():
    options = dict(dropout_rate=0.5, dropout_rng=jax.random.key(0), broadcast_dropout=True)
    with pytest.warns(UserWarning, match="broadcast_dropout=True is not followed"):
        jaxflash.attention_fn(*_qkv(), **options)
    jaxflash.attention_fn(*_qkv(), **options, deterministic=True)  # nothing is dropped


def test_one_query_over_a_cache():
    """Only an explicit alignment says where a single query stands."""
    q, k, v = _qkv()
    call = dict(local_window_size=(3, 0), causal_alignment="bottom_right")
    _close(
        jaxflash.attention_fn(q[:, -1:], k, v, **call),
        jaxflash.dot_product_attention(q, k, v, local_window_size=(3, 0))[:, -1:],
    )
    for call in (dict(is_causal=True), dict(alibi_slopes=np.ones(HEADS, np.float32))):
        with pytest.raises(ValueError, match=f"{next(iter(call))}: one query over 12 keys"):
            jaxflash.attention_fn(q[:, -1:], k, v, **call)


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


def _multihead(kind, **options):
    return kind(HEADS, FEATURES, dtype=jnp.float32, key=jax.random.key(0), **options)


def _parameters(module):
    return module.query_proj, module.key_proj, module.value_proj, module.output_proj


def _rotate(query, key, value):
    embedding = eqx.nn.RotaryPositionalEmbedding(query.shape[-1], dtype=query.dtype)
    rope = jax.vmap(embedding, in_axes=1, out_axes=1)
    return rope(query), rope(key), value


_SIZES = dict(key_size=24, value_size=20, output_size=12, qk_size=6, vo_size=10)
_BIASES = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
_LOWER = np.tril(np.ones((T, T), bool))
_PER_HEAD = np.stack([_LOWER, _LOWER.T, _LOWER | _LOWER.T, np.eye(T, dtype=bool)])


@pytest.mark.parametrize(
    ("options", "call"),
    [
        ({}, {}),
        ({**_SIZES, **_BIASES}, dict(mask=_LOWER)),
        (_BIASES, dict(mask=_PER_HEAD)),
        ({}, dict(process_heads=_rotate)),
        (dict(dropout_p=0.5, inference=True), {}),
        (dict(dropout_p=0.5), dict(inference=True)),
    ],
    ids=["plain", "sizes", "mask per head", "process_heads", "inference", "inference of the call"],
)
def test_multihead_attention(options, call):
    """In place of Equinox's module, same key: outputs, and gradients of parameters and inputs."""
    x = _x()
    inputs = (x, x[..., : options.get("key_size", FEATURES)])
    inputs += (x[..., : options.get("value_size", FEATURES)],)

    def run(kind):
        @eqx.filter_value_and_grad
        def loss(arguments):
            module, inputs = arguments
            outs = jax.vmap(lambda q, k, v: module(q, k, v, **call))(*inputs)
            return jnp.sum(jnp.sin(outs))

        arguments = (_multihead(kind, **options), tuple(map(jnp.asarray, inputs)))
        value, (gradient, input_gradients) = eqx.filter_jit(loss)(arguments)
        return value, jax.tree.leaves(_parameters(gradient)), input_gradients

    # Equinox promotes its float32 mask value implicitly.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        expected = run(eqx.nn.MultiheadAttention)
    _close(run(jaxflash.equinox.MultiheadAttention), expected)


def test_multihead_attention_with_a_mask_value():
    mask, array = _mask_value()
    layer = _multihead(jaxflash.equinox.MultiheadAttention)
    with_value, with_array = (
        jax.vmap(lambda x, mask=mask: layer(x, x, x, mask=mask))(_x()) for mask in (mask, array)
    )
    _close(with_value, with_array)


def test_multihead_attention_takes_over_parameters():
    theirs = eqx.nn.MultiheadAttention(HEADS, FEATURES, dtype=jnp.float32, key=jax.random.key(3))
    ours = eqx.tree_at(
        _parameters, _multihead(jaxflash.equinox.MultiheadAttention), _parameters(theirs)
    )
    x = _x()[0]
    _close(ours(x, x, x), theirs(x, x, x))
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, theirs)
    file.seek(0)
    loaded = eqx.tree_deserialise_leaves(file, _multihead(jaxflash.equinox.MultiheadAttention))
    _close(loaded(x, x, x), theirs(x, x, x))


def test_multihead_attention_grouped():
    """Two key heads: Equinox's module with each of them written twice."""
    ours = _multihead(jaxflash.equinox.MultiheadAttention, num_kv_heads=2)
    assert ours.key_proj.weight.shape == (FEATURES // 2, FEATURES)

    def twice(linear):
        weight = linear.weight.reshape(2, FEATURES // HEADS, FEATURES)
        weight = jnp.repeat(weight, 2, axis=0).reshape(FEATURES, FEATURES)
        return eqx.tree_at(lambda other: other.weight, theirs.key_proj, weight)

    theirs = _multihead(eqx.nn.MultiheadAttention)
    query, key, value, output = _parameters(ours)
    theirs = eqx.tree_at(_parameters, theirs, (query, twice(key), twice(value), output))
    x = _x()[0]
    _close(ours(x, x, x), theirs(x, x, x))
    with pytest.raises(ValueError, match="num_kv_heads must be a divisor of num_heads"):
        _multihead(jaxflash.equinox.MultiheadAttention, num_kv_heads=3)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(num_heads=0), "num_heads must be at least 1, got 0"),
        (dict(num_heads=2 * FEATURES), "qk_size .* must be at least 1, got 0"),
        (dict(num_heads=2 * FEATURES, qk_size=4), "vo_size .* must be at least 1, got 0"),
    ],
)
def test_multihead_attention_of_no_size(sizes, message):
    with pytest.raises(ValueError, match=message):
        jaxflash.equinox.MultiheadAttention(query_size=FEATURES, key=jax.random.key(0), **sizes)


def test_multihead_attention_options():
    """Every option of the op, on one example."""
    module = _multihead(jaxflash.equinox.MultiheadAttention)
    x = _x()[0]
    q, k, v = (jax.vmap(p)(x).reshape(T, HEADS, -1) for p in _parameters(module)[:3])
    plain = module(x, x, x)
    one_example = ("query_seq_lengths", "key_value_seq_lengths", "segment_ids")
    more = dict(bias=np.ones((T, T), np.float32) * np.arange(T, dtype=np.float32), is_causal=True)
    for name, option in {**_OPTIONS, **more, "precision": "highest"}.items():
        call = {name: option[0] if name in one_example else option}
        call.setdefault("is_causal", name == "causal_alignment")
        out = jaxflash.dot_product_attention(q, k, v, **call)
        actual = module(x, x, x, **call)
        _close(actual, jax.vmap(module.output_proj)(out.reshape(T, -1)))
        changes = name not in ("implementation", "deterministic_backward", "precision")
        assert np.allclose(actual, plain, rtol=1e-4, atol=1e-5) != changes, name


def test_multihead_attention_dropout():
    module = _multihead(jaxflash.equinox.MultiheadAttention, dropout_p=0.5)
    x = _x()[0]
    run = eqx.filter_jit(lambda key: module(x, x, x, key=key))
    first = run(jax.random.key(1))
    np.testing.assert_array_equal(first, run(jax.random.key(1)))
    assert not np.allclose(first, run(jax.random.key(2)))
    plain = _multihead(jaxflash.equinox.MultiheadAttention)(x, x, x)
    assert not np.allclose(first, plain)
    _close(eqx.nn.inference_mode(module)(x, x, x), plain)
    with pytest.raises(RuntimeError, match="needs a key"):
        module(x, x, x)
    with pytest.raises(ValueError, match="key must be a PRNG key, got int"):
        module(x, x, x, key=3)
    for rate in (1.0, -0.5):
        wrong = _multihead(jaxflash.equinox.MultiheadAttention, dropout_p=rate)
        with pytest.raises(ValueError, match=rf"dropout_p must lie in \[0, 1\), got {rate}"):
            wrong(x, x, x, key=jax.random.key(1))
        _close(wrong(x, x, x, inference=True), plain)
    with pytest.warns(UserWarning, match="deterministic is deprecated") as warned:
        _close(module(x, x, x, deterministic=True), plain)
    assert warned[0].filename == __file__
    # jax.jit traces every number of a module; eqx.filter_jit does not.
    with pytest.raises(ValueError, match=r"dropout\.p .* eqx\.filter_jit"):
        jax.jit(lambda module: module(x, x, x, key=jax.random.key(1), inference=False))(module)


def _widened(query, key, value):
    return query.astype(jnp.float32), key.astype(jnp.float32), value


@pytest.mark.parametrize(
    ("dtypes", "process_heads"),
    [
        ((jnp.bfloat16, jnp.float32, jnp.float32), None),
        ((jnp.bfloat16, jnp.float32, jnp.bfloat16), None),
        ((jnp.bfloat16,) * 3, _widened),
    ],
    ids=["query", "query and value", "process_heads"],
)
def test_multihead_attention_of_several_dtypes(dtypes, process_heads):
    """Parameters in 16 bits, and not all heads: Equinox promotes in its products."""
    inputs = [jnp.asarray(_x()[0], dtype) for dtype in dtypes]

    def run(kind):
        module = kind(HEADS, FEATURES, dtype=jnp.bfloat16, key=jax.random.key(0))
        with jax.numpy_dtype_promotion("standard"):
            return module(*inputs, process_heads=process_heads)

    actual, expected = map(run, (jaxflash.equinox.MultiheadAttention, eqx.nn.MultiheadAttention))
    assert actual.dtype == expected.dtype == jnp.float32
    np.testing.assert_allclose(actual, expected, rtol=1e-2, atol=1e-3)


def test_multihead_attention_of_symbolic_and_empty_lengths():
    module = _multihead(jaxflash.equinox.MultiheadAttention)
    shape = export.symbolic_shape(f"b, t, {FEATURES}")
    run = jax.jit(jax.vmap(lambda x: module(x, x, x, is_causal=True)))
    exported = export.export(run)(jax.ShapeDtypeStruct(shape, jnp.float32))
    for x in (_x(), _x()[:1, :1]):
        _close(exported.call(x), run(x))
    empty = _x()[0, :0]
    assert module(empty, _x()[0], _x()[0]).shape == empty.shape
    assert not module(_x()[0], empty, empty).any()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (dict(dropout_rate=0.5), "dropout_rate is not an option"),
        (dict(return_residual=True), "return_residual is not an option"),
        (dict(process_heads=lambda q, k, v: (q[:-1], k, v)), "process_heads must keep the shapes"),
        (dict(process_heads=lambda *_: None), "process_heads must return .*, got NoneType"),
        (dict(value=_x()[0, :-1]), "value must have the length of key_"),
        (dict(value="none"), "value must be an array, got str"),
        (dict(query=_x()), "jax.vmap"),
        (dict(key_=_x()[0, :, :-1]), f"key_ must have {FEATURES} channels"),
    ],
)
def test_multihead_attention_refuses(call, text):
    module = _multihead(jaxflash.equinox.MultiheadAttention)
    x = _x()[0]
    with pytest.raises(ValueError, match=text):
        module(**{"query": x, "key_": x, "value": x, **call})


def test_equinox_is_not_needed():
    code = (
        "import sys; sys.modules['equinox'] = None\n"
        "import jaxflash\n"
        "try: jaxflash.equinox\n"
        "except ImportError as error: print(error)\n"
    )
    assert "pip install 'jaxflash[equinox]'" in run_python(code)
