"""jaxflash.masks: what the values mean, how they behave as pytrees, what kernels are told of them,
and what is wrong with them."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxflash
import mask_values
from jaxflash import (
    _api,
    _blockwise,
    _derivatives,
    _kernel_program,
    _plan,
    _ranges,
    _scores,
    _support,
    masks,
)
from jaxprs import equations
from mask_values import MASK_VALUES
from score_mods import Sizes

pytestmark = pytest.mark.usefixtures("accurate_products")
_B, _T, _S, _N, _K, _H = 2, 12, 20, 4, 2, 8
_SHAPE = (_B, _N, _T, _S)

_needs_kernels = pytest.mark.skipif(
    not _support._ffi.extension.kernels, reason="needs the kernels' library"
)
_ATTENTIONS = (jaxflash.dot_product_attention, jaxflash.reference.dot_product_attention)


def _qkv(seed=0, q_len=_T, kv_len=_S, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = ((_B, q_len, _N, _H), (_B, kv_len, _K, _H), (_B, kv_len, _K, _H))
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def _value(name, shape=_SHAPE):
    """(mask, what it means)."""
    row = MASK_VALUES[name]
    batch, heads, q_len, kv_len = shape
    arrays = row.arrays(Sizes(batch, heads, q_len, kv_len), np.random.default_rng(1))
    return row.bind(arrays, (batch,)), mask_values.visible(row, arrays, shape)


def _loss(attention, mask, qkv, **options):
    return jnp.sum(jnp.sin(attention(*qkv, mask=mask, **options)))


def _assert_equal(transformed, *arguments, jit=jax.jit):
    """A function of the attention to call, with ours and with the reference."""
    ours, theirs = (jit(functools.partial(transformed, f))(*arguments) for f in _ATTENTIONS)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


# ---- What they mean ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MASK_VALUES)
def test_as_array(name):
    """Against numpy; and a mask that hides everything or nothing tests little."""
    shape = (_B, _N, 140, 150)
    mask, visible = _value(name, shape)
    actual = np.asarray(masks.as_array(mask, shape))
    assert actual.dtype == bool
    np.testing.assert_array_equal(actual, visible)
    if name not in ("everything", "nothing"):
        assert 0.01 < visible.mean() < 0.99


def test_as_array_of_no_elements():
    mask = masks.function(lambda b, h, q, kv, x: x[kv] > 0, jnp.zeros((0,), jnp.int32))
    assert masks.as_array(mask, (_N, _T, 0)).shape == (_N, _T, 0)


def test_extreme_sides_and_lengths():
    for mask in (
        masks.window(2**40, 2**40),
        ~~masks.window(2**31 - 1, None) | masks.window(0, 0),
        masks.lengths(2**40, 2**40),
        masks.intervals(jnp.int32(-(2**31)), jnp.int32(2**31 - 1)),
        masks.segments(jnp.full(_T, -(2**31)), jnp.full(_S, -(2**31))),
    ):
        assert np.asarray(masks.as_array(mask, _SHAPE)).all()
        np.testing.assert_array_equal(
            jaxflash.dot_product_attention(*_qkv(), mask=mask),
            jaxflash.dot_product_attention(*_qkv(), mask=mask & masks.window(None, None)),
        )
        _assert_equal(lambda attention, mask=mask: attention(*_qkv(), mask=mask))
    nothing = masks.as_array(masks.lengths(-3), _SHAPE)
    assert not np.asarray(nothing).any()


def test_values_in_64_bits():
    with jax.enable_x64(True):
        ids = jnp.asarray([2**40, 1, 2, 2**40] * 3)
        begin = jnp.asarray([-(2**50)] * _T)
        for mask in (
            masks.segments(ids, jnp.arange(_S)) | masks.segments(ids, jnp.full(_S, 2**40)),
            masks.intervals(begin, jnp.full(_T, 2**60)) & masks.intervals(0, jnp.arange(_T)),
            masks.function(lambda b, h, q, kv, x: x[q] == x[kv % _T], ids),
        ):
            _assert_equal(lambda attention, mask=mask: attention(*_qkv(), mask=mask))


def test_operators():
    a, b = masks.causal(), masks.lengths(key_value=7)
    array = np.random.default_rng(0).random((_T, _S)) < 0.5
    for mask, expected in (
        (a & array, np.tri(_T, _S, dtype=bool) & array),
        (array & a, np.tri(_T, _S, dtype=bool) & array),
        (a | jnp.asarray(array), np.tri(_T, _S, dtype=bool) | array),
        (jnp.asarray(array) | a, np.tri(_T, _S, dtype=bool) | array),
        (~a, ~np.tri(_T, _S, dtype=bool)),
        (a & b & ~b, np.zeros((_T, _S), bool)),
    ):
        np.testing.assert_array_equal(masks.as_array(mask, _SHAPE)[1, 2], expected)
    with pytest.raises(TypeError, match="neither true nor false"):
        a and b  # noqa: B018
    with pytest.raises(TypeError):
        a & 3.0
    with pytest.raises(TypeError):
        a | "causal"


def test_arguments_of_the_call_are_short_for_values():
    """The same program, not only the same numbers."""
    lengths = dict(query=jnp.array([12, 7], jnp.int32), key_value=jnp.array([20, 3], jnp.int32))
    ids = jnp.zeros((_B, _T), jnp.int32), jnp.ones((_B, _S), jnp.int32)
    array = jnp.ones((1, 1, _T, _S), bool)
    described = [
        _api.described(
            *_qkv(), None, array, is_causal=True, local_window_size=(4, 9),
            causal_alignment="bottom_right", query_seq_lengths=lengths["query"],
            key_value_seq_lengths=lengths["key_value"], segment_ids=ids,
        ),
        _api.described(
            *_qkv(), None,
            masks.causal("bottom_right") & masks.window(4, 9, "bottom_right") & array
            & masks.segments(*ids) & masks.lengths(**lengths),
        ),
    ]  # fmt: skip
    (spec, operands), (other_spec, other_operands) = described
    assert spec == other_spec
    assert spec.predicate is None
    for x, y in zip(operands, other_operands, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            np.testing.assert_array_equal(x, y)


# ---- Pytrees -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MASK_VALUES)
def test_pytrees(name):
    mask, visible = _value(name)
    leaves, tree = jax.tree.flatten(mask)
    assert all(isinstance(x, jax.Array | np.ndarray) for x in leaves)
    again = jax.tree.map(lambda x: x, mask)
    assert jax.tree.structure(again) == tree
    as_array = jax.jit(lambda mask: masks.as_array(mask, _SHAPE))
    np.testing.assert_array_equal(as_array(again), visible)


def test_other_arrays_compile_nothing():
    """As arguments of a program, and in eager calls of functions that are equal."""

    def call(widths, ids):
        mask = masks.function(lambda b, h, q, kv, x: q - kv < x[h], widths)
        mask |= masks.segments(ids, ids[:1])
        return jaxflash.dot_product_attention(*_qkv(), mask=mask)

    def arrays(seed):
        rng = np.random.default_rng(seed)
        return (
            jnp.asarray(rng.integers(0, 9, _N), jnp.int32),
            jnp.asarray(rng.integers(0, 3, _T), jnp.int32),
        )

    first = call(*arrays(0))
    before = _derivatives.attention._cache_size()
    second = call(*arrays(1))
    assert _derivatives.attention._cache_size() == before
    assert not np.array_equal(first, second)

    def visible(b, h, q, kv, x):
        return q - kv < x[h]

    step = jax.jit(lambda mask: jaxflash.dot_product_attention(*_qkv(), mask=mask))
    for seed in range(3):
        widths, ids = arrays(seed)
        step(masks.function(visible, widths) & masks.segments(ids, ids[:1]) | masks.window(0, 0))
    assert step._cache_size() == 1


def test_scan_over_masks():
    widths = jnp.arange(1, 1 + 3 * _N, dtype=jnp.int32).reshape(3, _N)
    stacked = masks.function(lambda b, h, q, kv, x: abs(q - kv) < x[h], widths)

    def layers(attention, stacked, qkv):
        q, k, v = qkv

        def layer(x, mask):
            return x + attention(x, k, v, mask=mask), None

        def loss(q):
            return jnp.sum(jnp.sin(jax.lax.scan(layer, q, stacked)[0]))

        return jax.value_and_grad(loss)(q)

    _assert_equal(layers, stacked, _qkv())


@pytest.mark.parametrize("mapped", ["mask", "query", "both"])
@pytest.mark.parametrize("name", ["head-windows", "intervals", "whole-lengths", "two-arrays"])
def test_vmap(name, mapped):
    mask, _ = _value(name)
    qkv = _qkv()
    axes = [None, None]
    if mapped != "query":
        other = jax.tree.map(lambda x: jnp.stack([x, jnp.flip(jnp.asarray(x))]), mask)
        mask, axes[0] = other, 0
    if mapped != "mask":
        qkv, axes[1] = tuple(jnp.stack([x, -x]) for x in qkv), 0

    def gradients(attention, mask, qkv):
        one = jax.grad(lambda qkv, mask: _loss(attention, mask, qkv))
        return jax.vmap(lambda mask, qkv: one(qkv, mask), axes)(mask, qkv)

    _assert_equal(gradients, mask, qkv)


# ---- Transformations -----------------------------------------------------------------------------


@pytest.fixture
def small_blocks(monkeypatch):
    """Several tiles, the last ones of which overlap the ones before them."""
    monkeypatch.setattr(_blockwise, "_LARGEST_BLOCK", 16)
    monkeypatch.setattr(_blockwise, "_SMALLEST_BLOCK", 16)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("order", ["jvp", "hvp", "grad of jvp"])
def test_derivatives_of_every_order(order):
    """By what is differentiated beside a mask that captures floats, which have none."""
    mask, _ = _value("float-captures", (_B, _N, 37, 41))
    mask &= masks.causal("bottom_right") | masks.window(None, 3)
    qkv = _qkv(q_len=37, kv_len=41)
    moved = jax.tree.map(jnp.cos, qkv)

    def transformed(attention, mask, qkv):
        def loss(qkv):
            return _loss(attention, mask, qkv)

        if order == "jvp":
            return jax.jvp(loss, (qkv,), (moved,))
        if order == "hvp":
            return jax.jvp(jax.grad(loss), (qkv,), (moved,))
        return jax.grad(lambda qkv: jax.jvp(loss, (qkv,), (moved,))[1])(qkv)

    _assert_equal(transformed, mask, qkv)


def test_masks_have_no_gradient():
    mask, _ = _value("float-captures")

    def gradient(attention, qkv):
        return jax.grad(lambda mask: _loss(attention, mask, qkv))(mask)

    for attention in _ATTENTIONS:
        for x in jax.tree.leaves(jax.jit(functools.partial(gradient, attention))(_qkv())):
            assert not np.asarray(x).any()
    tangent = jax.tree.map(jnp.ones_like, mask)
    out, t_out = jax.jvp(
        lambda mask: jaxflash.dot_product_attention(*_qkv(), mask=mask), (mask,), (tangent,)
    )
    assert np.asarray(out).any()
    assert not np.asarray(t_out).any()


def test_checkpoint():
    mask, _ = _value("prefix")

    def gradients(attention, mask, qkv):
        policy = jax.checkpoint_policies.save_only_these_names(jaxflash.CHECKPOINT_NAME)
        loss = jax.checkpoint(lambda qkv: _loss(attention, mask, qkv), policy=policy)
        return jax.grad(loss)(qkv)

    _assert_equal(gradients, mask, _qkv())


def test_without_jit():
    mask, _ = _value("prefix")
    expected = jax.grad(lambda q: _loss(_ATTENTIONS[1], mask, (q, *_qkv()[1:])))(_qkv()[0])
    with jax.disable_jit():
        actual = jax.grad(lambda q: _loss(_ATTENTIONS[0], mask, (q, *_qkv()[1:])))(_qkv()[0])
    np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-5)


@_needs_kernels
@pytest.mark.parametrize("symbolic", [False, True])
def test_export(symbolic):
    """Gradients, for CPU and CUDA; of symbolic lengths, what kernels do not take is blockwise."""
    sizes = "b, t" if symbolic else f"{_B}, {_T}"
    scope = export.SymbolicScope()
    query, ids = (
        jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), dtype)
        for shape, dtype in ((f"{sizes}, {_N}, {_H}", np.float32), (sizes, np.int32))
    )

    def gradient(query, ids):
        mask = masks.function(lambda b, h, q, kv, x: x[b, q] == x[b, kv], ids)
        mask = mask & masks.causal() | masks.window(0, 0, "bottom_right")
        return jax.grad(lambda q: _loss(jaxflash.dot_product_attention, mask, (q, q, q)))(query)

    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jaxflash.SlowPathWarning)
        exported = export.export(
            jax.jit(gradient), platforms=["cpu", "cuda"], disabled_checks=jaxflash.EXPORT_CHECKS
        )(query, ids)
    exported = export.deserialize(exported.serialize())
    x, ids = _qkv()[0], jnp.asarray(np.arange(_B * _T).reshape(_B, _T) // 5, jnp.int32)
    with jax.default_device(jax.devices("cpu")[0]):
        actual = exported.call(x, ids)
    np.testing.assert_allclose(actual, gradient(x, ids), rtol=2e-4, atol=2e-5)


def _mesh(kind=None):
    devices = np.array(jax.devices("cpu")[:4]).reshape(2, 2)
    options = {} if kind is None else dict(axis_types=(kind, kind))
    return Mesh(devices, ("b", "h"), **options)


_SHARDED = ("prefix", "head-windows", "intervals", "two-arrays", "array-or-band", "documents")


@pytest.mark.parametrize("kind", ["auto", "explicit", "shard_map"])
@pytest.mark.parametrize("name", _SHARDED)
def test_sharded(name, kind):
    """Batch and heads split; captures stand whole. Inside `shard_map` functions count the elements
    and heads of a device."""
    if kind == "shard_map" and name not in ("array-or-band", "two-arrays"):
        name = "global-tokens"
    mask, _ = _value(name)
    qkv = _qkv()
    mesh = _mesh(jax.sharding.AxisType.Explicit if kind == "explicit" else None)
    placed = jax.device_put(qkv, NamedSharding(mesh, P("b", None, "h")))

    def gradients(attention, mask, qkv):
        return jax.value_and_grad(lambda qkv: _loss(attention, mask, qkv))(qkv)

    with jax.default_device(jax.devices("cpu")[0]):
        expected = jax.jit(functools.partial(gradients, _ATTENTIONS[1]))(mask, qkv)[1]
    ours = functools.partial(gradients, _ATTENTIONS[0])
    if kind == "shard_map":
        spec = P("b", None, "h")
        # Arrays of the mask are split as the call's.
        specs = jax.tree.map(
            lambda x: (
                P(*(a if n != 1 else None for n, a in zip(x.shape, "bh"[2 - (x.ndim - 2) :])))
                if x.ndim > 1
                else P()
            ),
            mask,
        )
        run = jax.shard_map(
            lambda mask, *qkv: ours(mask, qkv)[1],
            mesh=mesh,
            in_specs=(specs, spec, spec, spec),
            out_specs=(spec,) * 3,
        )
        actual = jax.jit(run)(mask, *placed)
    else:
        with jax.set_mesh(mesh):
            actual = jax.jit(ours)(mask, placed)[1]
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)
