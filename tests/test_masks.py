"""jaxflash.masks: what the values mean, how they behave as pytrees, what kernels are told of them,
and what is wrong with them."""

from __future__ import annotations

import functools
import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxflash
import mask_values
from jaxflash import (
    _api,
    _derivatives,
    _ffi,
    _kernels,
    _mask,
    _passes,
    _plan,
    _ranges,
    _tile,
    masks,
)
from jaxflash._dense_mask import DenseMask
from jaxprs import equations
from marks import needs_kernels
from mask_values import MASK_VALUES
from meshes import cpu_mesh
from score_mods import Sizes

pytestmark = pytest.mark.usefixtures("accurate_products", "quick_compilation")
_B, _T, _S, _N, _K, _H = 2, 12, 20, 4, 2, 8
_SHAPE = (_B, _N, _T, _S)

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
    """Against numpy; and a mask that hides everything or nothing tests little: squares of 512 are
    for longer calls."""
    shape = (_B, _N, 140, 150)
    mask, visible = _value(name, shape)
    actual = np.asarray(masks.as_array(mask, shape))
    assert actual.dtype == bool
    np.testing.assert_array_equal(actual, visible)
    if name not in ("everything", "nothing", "checkerboard-512"):
        assert 0.01 < visible.mean() < 0.99


def test_as_array_of_no_elements():
    mask = masks.function(lambda b, h, q, kv, x: x[kv] > 0, jnp.zeros((0,), jnp.int32))
    assert masks.as_array(mask, (_N, _T, 0)).shape == (_N, _T, 0)
    for shape in ((_B, _N, _T, 0), (0, _N, _T, _S), (_B, 0, _T, _S)):
        assert jnp.shape(masks.as_array(masks.plan(mask, shape), shape)) == shape


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
        (a & np.bool_(True), np.tri(_T, _S, dtype=bool)),
        (np.bool_(True) | a, np.ones((_T, _S), bool)),
        (a & b & ~b, np.zeros((_T, _S), bool)),
    ):
        np.testing.assert_array_equal(masks.as_array(mask, _SHAPE)[1, 2], expected)
    with pytest.raises(TypeError, match="neither true nor false"):
        bool(a)
    for other in (3.0, "causal", None):
        with pytest.raises(TypeError, match="unsupported operand"):
            _ = a & other
        with pytest.raises(TypeError, match="unsupported operand"):
            _ = other | a


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


def test_lengths_of_a_value_move_what_the_call_aligns():
    """Of the definition too: `masks.lengths` are the lengths of the call."""
    q_lengths, kv_lengths = jnp.array([7, 12], jnp.int32), jnp.array([18, 3], jnp.int32)
    aligned = dict(
        is_causal=True,
        local_window_size=(6, None),
        causal_alignment="bottom_right",
        alibi_slopes=jnp.arange(1.0, _N + 1.0) / 8,
    )
    mask = masks.lengths(9) & masks.lengths(q_lengths, kv_lengths)
    for attention in _ATTENTIONS:
        np.testing.assert_allclose(
            attention(*_qkv(), mask=mask, **aligned),
            attention(
                *_qkv(),
                query_seq_lengths=jnp.minimum(q_lengths, 9),
                key_value_seq_lengths=kv_lengths,
                **aligned,
            ),
            rtol=1e-6,
        )
    _assert_equal(lambda attention: attention(*_qkv(), mask=mask, **aligned))


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


@pytest.mark.usefixtures("small_blocks")
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


def _moved(qkv):
    return jax.tree.map(jnp.cos, qkv)


_ORDERS = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (_moved(x),)),
    "hvp": lambda f, x: jax.jvp(jax.grad(f), (x,), (_moved(x),)),
    "grad of jvp": lambda f, x: jax.grad(lambda y: jax.jvp(f, (y,), (_moved(x),))[1])(x),
}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("order", _ORDERS)
def test_derivatives_of_every_order(order):
    """By what is differentiated beside a mask that captures floats, which have none."""
    mask, _ = _value("float-captures", (_B, _N, 37, 41))
    mask &= masks.causal("bottom_right") | masks.window(None, 3)
    qkv = _qkv(q_len=37, kv_len=41)

    def transformed(attention, mask, qkv):
        def loss(qkv):
            return _loss(attention, mask, qkv)

        return _ORDERS[order](loss, qkv)

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


@needs_kernels
@pytest.mark.parametrize("symbolic", [False, True])
def test_export(symbolic):
    """Gradients, for CPU and CUDA."""
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

    exported = export.export(
        jax.jit(gradient), platforms=["cpu", "cuda"], disabled_checks=jaxflash.EXPORT_CHECKS
    )(query, ids)
    exported = export.deserialize(exported.serialize())
    x, ids = _qkv()[0], jnp.asarray(np.arange(_B * _T).reshape(_B, _T) // 5, jnp.int32)
    with jax.default_device(jax.devices("cpu")[0]):
        actual = exported.call(x, ids)
    np.testing.assert_allclose(actual, gradient(x, ids), rtol=2e-4, atol=2e-5)


_SHARDED = [
    *(("auto", name) for name in ("prefix", "head-windows", "array-or-band", "every-fourth")),
    *(
        ("explicit", name)
        for name in ("prefix", "head-windows", "intervals", "array-or-band", "every-fourth")
    ),
    ("explicit", "head-windows, planned"),
    # Where functions count the batch elements and heads of a device.
    *(("shard_map", name) for name in ("global-tokens", "two-arrays", "array-or-band")),
]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("kind", "name"), _SHARDED)
def test_sharded(kind, name):
    """Batch and heads split; captures of functions stand whole."""
    mask, _ = _value(name.removesuffix(", planned"))
    if name.endswith("planned"):
        mask = masks.plan(mask, _SHAPE)
    qkv = _qkv()
    mesh = cpu_mesh(AxisType.Explicit if kind == "explicit" else AxisType.Auto, b=2, h=2)
    placed = jax.device_put(qkv, NamedSharding(mesh, P("b", None, "h")))

    def gradients(attention, mask, qkv):
        return jax.value_and_grad(lambda qkv: _loss(attention, mask, qkv))(qkv)

    with jax.default_device(jax.devices("cpu")[0]):
        expected = jax.jit(functools.partial(gradients, _ATTENTIONS[1]))(mask, qkv)[1]
    ours = functools.partial(gradients, _ATTENTIONS[0])
    if kind == "shard_map":
        spec = P("b", None, "h")
        specs = jax.tree.map(lambda x: {3: P("h"), 4: P("b")}.get(x.ndim, P()), mask)
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


# ---- What the kernels are told -------------------------------------------------------------------


# Where the plan of a function is made.
_ON_PATHS = pytest.mark.parametrize("path", ["xla", pytest.param("cuda", marks=pytest.mark.gpu)])


def _described(mask, path="xla", **options):
    """(spec, operands) with what every pass of a call shares."""
    shape = options.pop("shape", (_B, _N, 200, 330))
    batch, heads, q_len, kv_len = shape
    query, key = (
        jnp.zeros((batch, length, n, _H), jnp.float32)
        for length, n in ((q_len, heads), (kv_len, options.pop("kv_heads", heads // 2)))
    )
    spec, operands = _api.described(query, key, key, mask=mask, **options)
    return spec, _derivatives.with_plan(spec, path, operands)


def _ranges_of(spec, operands):
    return _ranges.of_call(spec, operands, *_ranges.of_dense_mask(operands))


def _intervals_of(visible):
    """(begin, end) of what is seen along the last axis."""
    numbers = np.arange(visible.shape[-1])
    begin = np.min(np.where(visible, numbers, numbers.size), axis=-1)
    end = np.max(np.where(visible, numbers + 1, 0), axis=-1)
    return np.stack((np.where(end > 0, begin, 0), end), axis=-1)


def _planned_rows():
    """Masks of which a plan is made, where that is, and how many elements are evaluated at once."""
    for name, row in MASK_VALUES.items():
        if row in (*mask_values.NATIVE, *mask_values.BANDS):
            continue
        yield pytest.param(name, "xla", 1 << 22, id=f"{name}-one block")
        yield pytest.param(name, "xla", 5000, id=f"{name}-blocks")
        if row.on_kernels:
            yield pytest.param(name, "cuda", 1, marks=pytest.mark.gpu, id=f"{name}-kernel")


@pytest.mark.parametrize(("name", "path", "elements"), list(_planned_rows()))
def test_hulls(name, path, elements, monkeypatch):
    """The first and the last key of each row and row of each key, of each head that has its own,
    and what follows for the ranges of the kernels; the pass widens nothing that does not ask."""
    monkeypatch.setattr(_plan, "_BLOCK_ELEMENTS", elements)
    shape = (_B, _N, 200, 330)
    mask, visible = _value(name, shape)
    spec, operands = _described(mask, path, shape=shape)
    widest = np.broadcast_shapes(operands.rows_hull.shape[:2], operands.keys_hull.shape[:2])
    asks_for_batch = (visible != visible[:1]).any()
    asks_for_heads = (visible != visible[:, :1]).any()
    if operands.query_seq_lengths is None and operands.query_segment_ids is None:
        assert widest == (_B if asks_for_batch else 1, _N if asks_for_heads else 1)
        if operands.mask is None:
            rows, keys = mask_values.hulls(visible), mask_values.hulls(visible.mT)
            np.testing.assert_array_equal(np.broadcast_to(operands.rows_hull, rows.shape), rows)
            np.testing.assert_array_equal(np.broadcast_to(operands.keys_hull, keys.shape), keys)
    ranges = _ranges_of(spec, operands)
    assert ranges is not None
    for intervals, seen in ((ranges.keys_of_row, visible), (ranges.rows_of_key, visible.mT)):
        of_heads = _intervals_of(seen.any(1))
        nonempty = of_heads[..., 1] > 0
        intervals = np.asarray(intervals)
        assert (intervals[..., 0] <= of_heads[..., 0])[nonempty].all()
        assert (intervals[..., 1] >= of_heads[..., 1])[nonempty].all()
    if operands.query_seq_lengths is None and operands.key_value_seq_lengths is None:
        _check_inside(ranges, visible)


def _check_inside(ranges, visible, is_longest: bool = False) -> None:
    """Where kernels test no element, every head sees all, and none sees what they skip:
    (B, N, T, S) `visible`. And of blocks of 64 x 64 that are visible as a whole, the longest
    run."""
    for blocks, of_heads in ((ranges.row_blocks, visible), (ranges.key_blocks, visible.mT)):
        shown, hidden = of_heads.all(1), ~of_heads.any(1)
        blocks = np.asarray(blocks)
        for batch, number in np.ndindex(blocks.shape[:2]):
            _, _, begin, end, gap_begin, gap_end = blocks[batch, number]
            rows = slice(64 * number, 64 * (number + 1))
            part = shown[batch, rows]
            assert part[:, begin : max(end, begin)].all()
            assert hidden[batch, rows, gap_begin:gap_end].all()
            if is_longest:
                columns = part.all(0)
                whole = [columns[i : i + 64].all() for i in range(0, columns.size, 64)]
                lengths = [len(list(run)) if key else 0 for key, run in itertools.groupby(whole)]
                assert max(end - begin, 0) == min(64 * max(lengths), columns.size - begin)
    _check_visits(ranges, visible, is_longest)


def _check_visits(ranges, visible, is_exact: bool) -> None:
    """Blocks that kernels leave out are hidden, and those that they do not test are visible."""
    if ranges.row_visits is None:
        return  # segments alone
    for visits, of_heads in ((ranges.row_visits, visible), (ranges.key_visits, visible.mT)):
        for number, of_batch in enumerate(of_heads):
            some, whole = _blocks_of(of_batch)
            words = np.broadcast_to(visits, (len(of_heads), *visits.shape[1:]))
            is_visited, is_whole = (_bits(x, some.shape[-1]) for x in np.moveaxis(words, -1, 0))
            some, whole = some.any(0), whole.all(0)
            assert (is_visited[number] >= some).all()
            if ranges.query_ids is None:  # of which visits do not know
                assert (is_whole[number] <= whole).all()
            if is_exact:
                np.testing.assert_array_equal(is_visited[number], some)
                np.testing.assert_array_equal(is_whole[number], whole)


def _blocks_of(visible):
    """(whether something of a block of 64 x 64 is visible, whether all is), by the last axes."""
    *lead, rows, keys = visible.shape
    amounts = *((0, 0),) * len(lead), (0, -rows % 64), (0, -keys % 64)
    shape = *lead, -(-rows // 64), 64, -(-keys // 64), 64
    some = np.pad(visible, amounts).reshape(shape).any((-3, -1))
    return some, np.pad(visible, amounts, constant_values=True).reshape(shape).all((-3, -1))


def _bits(words, count: int):
    """The lowest bits first, of words (..., n), as bools (..., count)."""
    bits = np.asarray(words, np.uint32)[..., None] >> np.arange(32, dtype=np.uint32) & 1
    return bits.reshape(*bits.shape[:-2], -1)[..., :count] != 0


@_ON_PATHS
@pytest.mark.parametrize("shape", [(2, 3, 200, 330), (1, 1, 130, 1), (2, 1, 1, 330), (1, 3, 9, 96)])
def test_whole_tiles(shape, path):
    """What a dense mask and a function leave untested is visible to all rows of all heads, what
    they skip to none."""
    rng = np.random.default_rng(0)
    full = (2, 3, 200 if shape[2] == 1 else shape[2], 330 if shape[3] == 1 else shape[3])
    holes = rng.random((*shape[:2], -(-shape[2] // 64), -(-shape[3] // 64))) < 0.4
    at = holes.repeat(64, 2).repeat(64, 3)[:, :, : shape[2], : shape[3]]
    dense = ~(at & (rng.random(shape) < 0.1))
    function = masks.function(lambda b, h, q, kv: (q // 70 != 1) | (kv > 70))
    of_function = np.asarray(masks.as_array(function, full))
    for mask, visible in (
        (dense, np.broadcast_to(dense, full)),
        (function, of_function),
        (dense & function, dense & of_function),
    ):
        spec, operands = _described(mask, path, shape=full, kv_heads=1)
        ranges = _ranges_of(spec, operands)
        assert ranges is not None
        _check_inside(ranges, visible)


def _left_out(blocks, visits, others: int) -> int:
    """Of 64 x 64, those between visited ones that no gap tells of."""
    count = 0
    bits = _bits(np.asarray(visits)[..., 0], -(-others // 64))
    for of_rows, shown in zip(np.concatenate(blocks), np.concatenate(bits), strict=True):
        begin, end, _, _, gap_begin, gap_end = of_rows
        for i in range(begin // 64, -(-min(end, others) // 64) if begin < end else 0):
            count += not shown[i] and not gap_begin <= 64 * i < 64 * (i + 1) <= gap_end
    return count


def _visited(blocks, visits, others: int) -> int:
    """How many blocks of 64 x 64 a kernel visits: of each block of rows those in the hull."""
    tiles = 0
    bits = _bits(np.asarray(visits)[..., 0], -(-others // 64))
    for of_rows, shown in zip(np.concatenate(blocks), np.concatenate(bits), strict=True):
        begin, end = of_rows[:2]
        tiles += shown[begin // 64 : -(-min(end, others) // 64)].sum() if begin < end else 0
    return tiles


# What a block of rows sees has one gap at most.
_VISITS = {
    "prefix of 100": masks.causal() | masks.function(lambda b, h, q, kv: kv < 100),
    "window": masks.function(lambda b, h, q, kv: (q >= kv) & (q - kv < 130 - q % 2)),
    "documents": masks.function(lambda b, h, q, kv: q // 200 == kv // 200),
    "documents, causal": masks.function(lambda b, h, q, kv: q // 200 == kv // 200) & masks.causal(),
    "intervals": masks.intervals(np.arange(640) // 3 * 2, np.arange(640) // 3 * 2 + 90),
    "blocks": masks.function(lambda b, h, q, kv: q // 128 == kv // 128),
    "window and global tokens": masks.causal()
    & (masks.window(130, 0) | masks.function(lambda b, h, q, kv: kv < 10)),
    "nothing": masks.function(lambda b, h, q, kv: q < 0),
}


_RANDOM_BLOCKS = np.random.default_rng(0).random((10, 10)) < 0.3
_MANY_GAPS = {
    "checkerboard": masks.function(lambda b, h, q, kv: (q // 128 + kv // 128) % 2 == 0),
    "blocks far apart": masks.causal()
    & masks.function(lambda b, h, q, kv: (q // 64 - kv // 64) % 3 == 0),
    "random blocks": masks.dense(_RANDOM_BLOCKS.repeat(64, 0).repeat(64, 1)),
}


@_ON_PATHS
@pytest.mark.parametrize(
    "mask", [*_VISITS.values(), *_MANY_GAPS.values()], ids=[*_VISITS, *_MANY_GAPS]
)
def test_visited_tiles(mask, path):
    """Kernels visit no empty tile."""
    length = 640
    visible = np.asarray(masks.as_array(mask, (1, length, length)))[0]
    spec, operands = _described(mask, path, shape=(1, 2, length, length))
    ranges = _ranges_of(spec, operands)
    tiles = visible.reshape(length // 64, 64, length // 64, 64).any((1, 3)).sum()
    assert tiles < 100 or tiles == 0
    assert _visited(ranges.row_blocks, ranges.row_visits, length) == tiles
    assert _visited(ranges.key_blocks, ranges.key_visits, length) == tiles
    left_out = _left_out(ranges.row_blocks, ranges.row_visits, length)
    np.testing.assert_array_equal(ranges.hulls[:, 6:], [[tiles, left_out]])
    if any(mask is x for x in _VISITS.values()):
        assert left_out == 0
    _check_inside(ranges, visible[None, None], is_longest=True)


@pytest.mark.gpu
@pytest.mark.parametrize("is_array", [False, True], ids=["function", "array"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_kernels_visit_no_empty_tile(head_dim, is_array):
    """What is not a number reaches whoever works on its tile, with a weight of 0 too: here those
    that see it, and nobody else."""
    length, square = 4096, 512
    mask = masks.function(lambda b, h, q, kv: (q // square + kv // square) % 2 == 0)
    if is_array:
        mask = masks.dense(masks.as_array(mask, (1, 1, length, length)))
    rng = np.random.default_rng(0)
    q, k, v, tv = (
        jnp.asarray(rng.standard_normal((1, length, 2, head_dim)), jnp.bfloat16) for _ in range(4)
    )
    bad = slice(square + 150, square + 300)  # of the second square, within its tiles
    expected = np.zeros(length, bool).reshape(-1, square)
    expected[1::2] = True

    def attend(q, k, v):
        return jaxflash.dot_product_attention(q, k, v, mask=mask, implementation="cuda")

    def reached(x):
        return np.isnan(np.asarray(x, np.float32)).any((0, 2, 3)).reshape(-1, square)

    assert not reached(attend(q, k, v)).any()
    with jax.debug_nans(False):
        np.testing.assert_array_equal(reached(attend(q, k, v.at[:, bad].set(jnp.nan))), expected)
        # A block of that kernel works on up to 192 rows, for all of which its tiles are.
        _, tangent = jax.jvp(attend, (q, k, v), (q, k, tv.at[:, bad].set(jnp.nan)))
        inside = slice(192, square - 192)
        np.testing.assert_array_equal(reached(tangent)[:, inside], expected[:, inside])


@pytest.mark.gpu
def test_vmap_of_kernels_that_walk(monkeypatch):
    """Under vmap, what a mask shows may be that of some batch axes alone."""
    monkeypatch.setattr(_passes, "_LEAST_WALK", 1)
    rng = np.random.default_rng(0)
    blocks = rng.random((2, 1, 17, 17)) < 0.25
    blocks[..., 0] = True
    mask = masks.dense(jnp.asarray(blocks.repeat(64, -1).repeat(64, -2)))
    q, k, v = (
        jnp.asarray(rng.standard_normal((3, 2, 1088, 2, 64)), jnp.bfloat16) for _ in range(3)
    )

    def attend(q, k, v):
        return jaxflash.dot_product_attention(q, k, v, mask=mask, implementation="cuda")

    def gradient(q, k, v):
        return jax.grad(lambda q: jnp.sum(attend(q, k, v).astype(jnp.float32) ** 2))(q)

    for f in (attend, gradient):
        expected = [f(*x) for x in zip(q, k, v, strict=True)]
        np.testing.assert_allclose(
            np.asarray(jax.vmap(f)(q, k, v), np.float32),
            np.asarray(jnp.stack(expected), np.float32),
            atol=2e-2,
        )
    # Other kernels, of which rows of several queries share keys.
    np.testing.assert_allclose(
        np.asarray(jax.vmap(attend, (0, None, None))(q, k[0], v[0]), np.float32)[0],
        np.asarray(attend(q[0], k[0], v[0]), np.float32),
        atol=2e-2,
    )


def test_plans_of_constants_are_not_folded():
    """An array that jit knows as a constant takes XLA minutes otherwise, while it compiles."""
    jaxpr = jax.make_jaxpr(_ranges.in_blocks)(np.ones((1, 1, 128, 128), bool))
    assert jaxpr.eqns[0].primitive.name == "optimization_barrier"


def test_who_walks():
    """The second kernel is for long calls of masks that are read or evaluated."""
    array = np.zeros((1, 1, 2048, 2048), bool)
    for mask, length, expected in (
        (masks.dense(array), 2048, True),
        (masks.dense(array[..., :2047, :2047]), 2047, False),
        (masks.causal(), 4096, False),
        (masks.segments(np.zeros(2048, np.int32)), 2048, False),
    ):
        spec, operands = _described(mask, shape=(1, 2, length, length))
        shown = _ranges.of_dense_mask(operands)
        ranges = _ranges.of_call(
            spec, operands, *shown, has_visits=_passes.may_walk(length, length)
        )
        kind = _passes.MaskKind.of(ranges, operands.mask is not None)
        assert kind.walks == expected, mask
        assert len(kind.axes) == len(kind.dense)


def test_intervals_to_any_end():
    mask = masks.intervals(-(2**40), 2**40) & masks.intervals(1, 2**31)
    np.testing.assert_array_equal(
        masks.as_array(mask, (1, 2, 3)), np.broadcast_to(np.arange(3) > 0, (1, 2, 3))
    )


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_intervals_of_segments(dtype):
    """The smallest ones, in any order of the ids, but for those that share a bucket of a table:
    they hold what they should, and what needs no test is of one id."""
    length = 300
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 8, (6, length // 10)).repeat(10, axis=1)
    numbers = np.concatenate((numbers, np.sort(numbers, axis=1)))
    apart = np.array([-5, 7, 2 * length - 5, -(2**31), 2**31 - 1, 0, 7 - 8 * length, 1])
    for ids, exact in ((numbers - 5, True), (numbers * 70, True), (apart[numbers], False)):
        with jax.enable_x64(dtype == "int64"):
            x = jnp.asarray(ids, dtype)
            mask = masks.segments(x, x[::-1])
            spec, operands = _described(mask, shape=(len(ids), 2, length, length))
            ranges = jax.tree.map(np.asarray, _ranges_of(spec, operands))
        visible = ids[:, :, None] == ids[::-1, None, :]
        for intervals, seen in ((ranges.keys_of_row, visible), (ranges.rows_of_key, visible.mT)):
            smallest = _intervals_of(seen)
            sees = smallest[..., 1] > 0
            if exact or dtype == "int64":  # those are ranks
                np.testing.assert_array_equal(intervals, smallest)
            assert (intervals[..., 0] <= smallest[..., 0])[sees].all()
            assert (intervals[..., 1] >= smallest[..., 1])[sees].all()
        _check_inside(ranges, visible[:, None].repeat(2, 1))


# Whose loops go over one interval.
_BLOCKWISE = _VISITS | _MANY_GAPS
_BLOCKWISE |= {
    "segments": masks.segments(np.arange(640, dtype=np.int32) // 200),
    "segments, causal": masks.segments(np.arange(640, dtype=np.int32) // 200) & masks.causal(),
    "array": masks.dense(np.tri(640, k=-64, dtype=bool)),
}


@pytest.mark.parametrize("mask", _BLOCKWISE.values(), ids=_BLOCKWISE)
def test_visited_tiles_of_the_blockwise_path(mask):
    length, size = 640, 64
    visible = np.asarray(masks.as_array(mask, (1, length, length)))[0]
    seen = visible.reshape(length // size, size, length // size, size).any((1, 3))
    spec, operands = _described(mask, shape=(1, 2, length, length))
    rows = columns = _tile.Blocks(length, size, length // size, ragged=False)
    tiles = _tile.Tiles(spec, operands, rows, columns)
    for i in range(rows.count):
        np.testing.assert_array_equal(_numbers(tiles.columns_seen_by(rows[i])), *seen[i].nonzero())
        np.testing.assert_array_equal(
            _numbers(tiles.rows_seeing(columns[i])), *seen[:, i].nonzero()
        )


def _numbers(visits) -> np.ndarray:
    """Of the blocks that a loop visits."""
    visited = np.arange(int(visits.begin), int(visits.end))
    return visited if visits.numbers is None else np.asarray(visits.numbers)[visited]


@pytest.mark.parametrize("window", [(130, 0), (None, 0), (70, 40)], ids=str)
@pytest.mark.parametrize("kv_lengths", [(600, 450), (640, 200)], ids=["alike", "apart"])
def test_visited_tiles_of_bands_that_end_with_the_keys(kv_lengths, window):
    """Of sequences whose lengths differ, those that a band of one of them meets, and few more."""
    length, size, q_lengths = 640, 64, (500, 350)
    q = k = jax.ShapeDtypeStruct((2, length, 2, 8), jnp.float32)
    spec, operands = _api.described(
        q, k, k, local_window_size=window, causal_alignment="bottom_right",
        query_seq_lengths=jnp.array(q_lengths, jnp.int32),
        key_value_seq_lengths=jnp.array(kv_lengths, jnp.int32),
    )  # fmt: skip
    row, column = np.ogrid[:length, :length]
    met = np.zeros((length // size, length // size), bool)
    for q_len, kv_len in zip(q_lengths, kv_lengths, strict=True):
        before = row + kv_len - q_len - column
        shown = (row < q_len) & (column < kv_len) & (before >= -window[1])
        shown &= before <= (length if window[0] is None else window[0])
        met |= shown.reshape(length // size, size, length // size, size).any((1, 3))
    rows = columns = _tile.Blocks(length, size, length // size, ragged=False)
    tiles = _tile.Tiles(spec, operands, rows, columns)
    visited = 0
    for i in range(-(-max(q_lengths) // size)):
        begin, end = map(int, tiles.columns_seen_by(rows[i])[:2])
        assert not met[i, : max(begin, 0)].any()
        assert not met[i, max(end, 0) :].any()
        visited += max(end - begin, 0)
    for j in range(-(-max(kv_lengths) // size)):
        begin, end = map(int, tiles.rows_seeing(columns[j])[:2])
        assert not met[: max(begin, 0), j].any()
        assert not met[max(end, 0) :, j].any()
    if kv_lengths == (600, 450):  # 100 more than queries, both
        assert visited <= met.sum() + 4


def test_plans_are_compiled_once():
    """Also where they are made outside of `jax.jit`, of masks that are equal and not the same."""

    def make(n):
        return masks.plan(
            masks.causal()
            | masks.function(lambda b, h, q, kv, n: kv < n[b], jnp.array([n], jnp.int32)),
            (1, 2, 300, 300),
        )

    make(7)
    before = _derivatives.planned._cache_size()
    make(9)
    assert _derivatives.planned._cache_size() == before


def test_hulls_of_several_parts():
    """Segments, an array and a function: what all of them allow."""
    ids = jnp.asarray(np.arange(640) // 160, jnp.int32)
    near = masks.function(lambda b, h, q, kv: abs(q - kv) < 64 + (q + kv) % 2)
    parts = masks.segments(ids), near
    spec, operands = _described(parts[0] & parts[1], shape=(1, 2, 640, 640))
    ranges = _ranges_of(spec, operands)
    of_segments, of_function = (np.asarray(masks.as_array(x, (1, 640, 640))) for x in parts)
    exact, hulls = _intervals_of(of_segments), mask_values.hulls(of_function)
    begin = np.maximum(exact[..., 0], hulls[..., 0])
    met = np.stack((begin, np.minimum(exact[..., 1], hulls[..., 1])), axis=-1)
    np.testing.assert_array_equal(ranges.keys_of_row, met)  # both are symmetric
    np.testing.assert_array_equal(ranges.rows_of_key, met)
    np.testing.assert_array_equal(ranges.query_ids[0], ids)

    array = np.tri(640, k=-64, dtype=bool)
    mask = masks.dense(array) & masks.function(lambda b, h, q, kv: (q < 300) & (kv >= 64))
    spec, operands = _described(mask, shape=(1, 2, 640, 640))
    ranges = _ranges_of(spec, operands)
    visible = np.asarray(masks.as_array(mask, (1, 640, 640)))
    tiles = visible[0].reshape(10, 64, 10, 64).any((1, 3)).sum()
    assert _visited(ranges.row_blocks, ranges.row_visits, 640) == tiles


# ---- Bands ---------------------------------------------------------------------------------------

# Functions and what they are a multiple of.
_BANDS = {
    "causal": (1, lambda b, h, q, kv: q >= kv),
    "window": (1, lambda b, h, q, kv: (kv > q - 5) & (kv <= q)),
    "both sides": (1, lambda b, h, q, kv: abs(q - kv) < 7),
    "chosen": (1, lambda b, h, q, kv: jnp.where(q >= kv, q - kv < 5, False)),
    "unsigned": (1, lambda b, h, q, kv: (q - kv).astype(jnp.uint32) < jnp.uint32(5)),
    "itself": (1, lambda b, h, q, kv: q == kv),
    "divided": (1, lambda b, h, q, kv: (q - kv) // 8 == 0),
    "all": (1, lambda b, h, q, kv: q - kv > -100),
    "all but two corners": (1, lambda b, h, q, kv: (kv - q < 31) & (q - kv < 31)),
    "every fourth": (4, lambda b, h, q, kv: (q - kv) % 4 == 0),
    "every third, of keys": (3, lambda b, h, q, kv: (kv - q) % 3 == 0),
    "every fourth, of both": (4, lambda b, h, q, kv: q % 4 == kv % 4),
    "every eighth, of both": (8, lambda b, h, q, kv: q * 3 % 8 == kv * 3 % 8),
    "every fourth, causal": (4, lambda b, h, q, kv: ((q - kv) & 3 == 0) & (q >= kv)),
    "every other, rounded to zero": (2, lambda b, h, q, kv: jax.lax.rem(q - kv, jnp.int32(2)) == 0),
}
_NO_BANDS = {
    "strictly before": lambda b, h, q, kv: q > kv,
    "nothing": lambda b, h, q, kv: q - kv > 100,
    "documents": lambda b, h, q, kv: q // 7 == kv // 7,
    "holes": lambda b, h, q, kv: (q - kv) % 4 != 0,
    "batch": lambda b, h, q, kv: (q - kv) % 4 == b,
    "heads": lambda b, h, q, kv: q - kv <= h,
    "odd": lambda b, h, q, kv: q % 2 != kv % 2,
    "shifted": lambda b, h, q, kv: q % 4 == (kv + 1) % 4,
    "classes together": lambda b, h, q, kv: jnp.minimum(q % 4, 2) == jnp.minimum(kv % 4, 2),
    "queries": lambda b, h, q, kv: (q % 4 == kv % 4) & (q % 8 < 4),
    "sum": lambda b, h, q, kv: q + kv < 9,
    "far away": lambda b, h, q, kv: q - 2**30 < kv,
    "captured": lambda b, h, q, kv: q - kv < jnp.arange(9, dtype=jnp.int32)[8],
    "floats": lambda b, h, q, kv: (q - kv).astype(jnp.float32) / 3 < 2,
}


def _spec_of(mask, q_len, kv_len):
    query, key = (jax.ShapeDtypeStruct((1, n, 1, _H), jnp.float32) for n in (q_len, kv_len))
    return _api.described(query, key, key, mask=mask)[0]


@pytest.mark.parametrize("lengths", [(32, 32), (16, 48), (48, 16), (9, 25)], ids=str)
@pytest.mark.parametrize("name", _BANDS)
def test_functions_of_a_distance_are_bands(name, lengths):
    dilation, function = _BANDS[name]
    mask = masks.function(function)
    spec = _spec_of(mask, *lengths)
    if any(n % dilation for n in lengths):
        assert spec.predicate is not None
        assert spec.dilation == 1
        return
    assert spec.predicate is None
    assert spec.dilation == dilation
    distance = np.arange(lengths[0])[:, None] - np.arange(lengths[1])
    expected = distance % dilation == 0
    expected &= distance <= (np.inf if spec.left is None else spec.left)
    expected &= distance >= -(np.inf if spec.right is None else spec.right)
    np.testing.assert_array_equal(masks.as_array(mask, (1, 1, *lengths))[0, 0], expected)


@pytest.mark.parametrize("name", _NO_BANDS)
def test_other_functions_are_no_bands(name):
    for lengths in ((32, 32), (16, 48), (48, 16), (1, 24)):
        assert _spec_of(masks.function(_NO_BANDS[name]), *lengths).predicate is not None


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("transform", [*_ORDERS, "vmap", "checkpoint"])
def test_transformed_calls_in_classes(transform):
    """Of a dilated mask, each class of positions is computed on its own."""
    mask, _ = _value("every-fourth", (_B, _N, 64, 80))
    qkv = _qkv(q_len=64, kv_len=80)
    assert _described(mask, shape=(_B, _N, 64, 80))[0].dilation == 4

    def transformed(attention, mask, qkv):
        def loss(qkv):
            return _loss(attention, mask, qkv)

        if transform in _ORDERS:
            return _ORDERS[transform](loss, qkv)
        if transform == "vmap":
            stacked = tuple(jnp.stack([x, -x], axis=2) for x in qkv[:2])
            return jax.vmap(lambda q, k: jax.grad(loss)((q, k, qkv[2])), 2)(*stacked)
        return jax.grad(jax.checkpoint(loss))(qkv)

    _assert_equal(transformed, mask, qkv)


def test_plans_of_dilated_masks():
    """Are of use where more than distances matters, and no calls in classes have one."""
    qkv = _qkv(q_len=16, kv_len=16)
    mask = masks.plan(masks.function(lambda b, h, q, kv: (q - kv) % 4 == 0), (_B, _N, 16, 16))
    assert isinstance(mask, _mask.Planned)
    assert mask.found
    for options in ({}, {"sink": jnp.ones(_N)}):
        spec, operands = _api.described(*qkv, mask=mask, **options)
        assert (spec.dilation, operands.rows_hull is None) == ((1, False) if options else (4, True))
        ours, theirs = (attention(*qkv, mask=mask, **options) for attention in _ATTENTIONS)
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("path", ["cuda", "xla"])
def test_classes_do_without_what_they_do_not_see(path):
    """A fourth of the logits, and for kernels no array is copied."""
    x = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.float32)
    mask = masks.function(lambda b, h, q, kv: (q - kv) % 4 == 0)

    def attend(x, mask):
        return jaxflash.dot_product_attention(x, x, x, mask=mask, implementation=path)

    lowered = jax.jit(attend).trace(x, mask).lower(lowering_platforms=(path.replace("xla", "cpu"),))
    text = lowered.as_text()
    if path == "cuda":
        assert "2x32x16x64xf32" in text
        assert "transpose" not in text
    else:
        of_all = jax.jit(lambda x: attend(x, None)).trace(x).lower(lowering_platforms=("cpu",))
        costs = [x.compile().cost_analysis() for x in (lowered, of_all)]
        flops = [cost["flops"] for cost in costs if cost is not None]
        assert flops[0] < 0.3 * flops[1]


# ---- Plans ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_blocks")
def test_plan_through_layers():
    """Made once, for all layers of a scan, and kept when something more is hidden."""
    mask, _ = _value("head-windows")
    plan = masks.plan(mask, _SHAPE)
    np.testing.assert_array_equal(masks.as_array(plan, _SHAPE), masks.as_array(mask, _SHAPE))

    def layers(attention, plan, qkv):
        q, k, v = qkv

        def layer(x, _):
            return x + attention(x, k, v, mask=plan & masks.window(5, None), is_causal=True), None

        return jax.value_and_grad(
            lambda q: jnp.sum(jnp.sin(jax.lax.scan(layer, q, None, length=2)[0]))
        )(q)

    _assert_equal(layers, plan, _qkv())

    def evaluations(mask):
        def pass_over_the_mask(equation):
            shapes = [variable.aval.shape for variable in equation.invars]
            return equation.primitive.name == "reduce_or" and len(shapes[0]) == 6

        traced = equations(lambda mask: layers(_ATTENTIONS[0], mask, _qkv()), mask)
        return sum(map(pass_over_the_mask, traced))

    assert evaluations(plan) < evaluations(mask)


@pytest.mark.parametrize("number", ["b", "h"])
def test_plans_of_functions_that_index_one_element(number):
    """An array that all share, as JAX clamps the index."""
    ends = jnp.array([23], jnp.int32)
    mask = masks.function(lambda b, h, q, kv: kv < ends[b if number == "b" else h])
    plan = masks.plan(mask, _SHAPE)
    np.testing.assert_array_equal(masks.as_array(plan, _SHAPE), masks.as_array(mask, _SHAPE))
    for value in (mask, plan):
        _assert_equal(lambda f: jax.grad(lambda qkv: _loss(f, value, qkv))(_qkv()))  # noqa: B023


@pytest.mark.parametrize("number", ["b", "h"])
def test_plans_on_explicit_meshes(number):
    """Of a function whose array is split."""
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("b", "h"), explicit, devices=jax.devices("cpu")[:4])
    count = _B if number == "b" else _N
    ends = jnp.arange(1, count + 1, dtype=jnp.int32) * 9

    def plan(ends):
        def sees(b, h, q, kv, ends):
            return kv < ends[b if number == "b" else h]

        return masks.plan(masks.function(sees, ends) | masks.causal(), _SHAPE)

    split = jax.device_put(ends, NamedSharding(mesh, P(number)))
    for make in (plan, jax.jit(plan)):
        np.testing.assert_array_equal(
            masks.as_array(make(split), _SHAPE), masks.as_array(plan(ends), _SHAPE)
        )
    ids = jnp.arange(_B * _T, dtype=jnp.int32).reshape(_B, _T) // 7
    split = jax.device_put(ids, NamedSharding(mesh, P("b", "h")))
    shape = (_B, _N, _T, _T)
    for of_ids in (masks.segments, lambda ids: masks.causal() | masks.segments(ids)):
        np.testing.assert_array_equal(
            masks.as_array(masks.plan(of_ids(split), shape), shape),
            masks.as_array(of_ids(ids), shape),
        )


def test_plans_in_combinations():
    prefix, _ = _value("prefix")
    plan = masks.plan(prefix, _SHAPE)
    for mask, same in (
        (~plan, ~prefix),
        (plan | masks.window(0, 3), prefix | masks.window(0, 3)),
        (plan & masks.plan(~prefix, _SHAPE), prefix & ~prefix),
        (masks.lengths(4, 7) & plan, masks.lengths(4, 7) & prefix),
    ):
        np.testing.assert_array_equal(
            jaxflash.dot_product_attention(*_qkv(), mask=mask),
            jaxflash.dot_product_attention(*_qkv(), mask=same),
        )
    nothing = masks.plan(masks.causal(), _SHAPE)  # to find out
    np.testing.assert_allclose(
        jaxflash.dot_product_attention(*_qkv(), mask=nothing),
        jaxflash.dot_product_attention(*_qkv(), is_causal=True),
    )


@pytest.mark.usefixtures("small_blocks")
def test_plans_do_not_know_lengths_of_the_call():
    """That move where a query stands: what was found without them is not used."""
    mask = masks.causal("bottom_right") & masks.window(30, 2) | masks.window(0, 0)
    shape = (_B, _N, 40, 60)
    plan = masks.plan(mask, shape)
    lengths = jnp.array([39, 9], jnp.int32), jnp.array([20, 55], jnp.int32)
    options = dict(query_seq_lengths=lengths[0], key_value_seq_lengths=lengths[1])
    qkv = _qkv(q_len=40, kv_len=60)
    _assert_equal(lambda attention: attention(*qkv, mask=plan, **options))
    _assert_equal(lambda attention: attention(*qkv, mask=plan & masks.lengths(*lengths)))
    planned = masks.plan(masks.lengths(*lengths) & mask, shape)
    assert _api.described(*qkv, mask=plan)[1].rows_hull is not None
    assert _api.described(*qkv, mask=planned)[1].rows_hull is not None
    assert _api.described(*qkv, mask=plan, **options)[1].rows_hull is None
    _assert_equal(lambda attention: attention(*qkv, mask=planned))


@pytest.mark.parametrize(
    "shape",
    [
        (_B, _N, _T, _S + 1),
        (_B, _N, _T - 1, _S),
        (_B, 3, _T, _S),
        # Of one batch element or head nothing tells whether it stands for others.
        (1, _N, _T, _S),
        (_B, 1, _T, _S),
    ],
)
def test_plans_for_other_sizes(shape):
    mask = masks.function(lambda b, h, q, kv: q + h + 5 * b > kv)
    with pytest.raises(ValueError, match=r"masks\.plan: made for"):
        jaxflash.dot_product_attention(*_qkv(), mask=masks.plan(mask, shape))
    with pytest.raises(ValueError, match=r"masks\.segments: query_ids"):
        masks.plan(masks.segments(np.zeros(_T + 2, np.int32), np.zeros(_S, np.int32)), shape)


def test_unseen_rows_and_keys():
    """What a mask hides from all is known to a kernel, or replaced before it meets one."""
    mask = masks.function(lambda b, h, q, kv: (kv >= 5) & ((h < 2) | (q < 7)) & (q != kv))
    mask &= np.arange(_S) != 9
    q, k, v = (jnp.full(x.shape, jnp.nan) for x in _qkv())
    spec, operands = _api.described(q, k, v, mask=mask)
    operands = _plan.with_plan(spec, operands, _plan.shown)
    visible = np.asarray(masks.as_array(mask, _SHAPE))
    keys = np.any(visible, (1, 2))[..., None, None]
    rows = np.swapaxes(np.any(visible, -1), -1, -2)[..., None]
    assert operands.mask is not None
    array = np.asarray(operands.mask)
    read = DenseMask(array, (), array.any(-1), array.any((-3, -2)))
    shown = _kernels._without_unseen(operands, read)
    for x, seen in ((shown.query, rows), (shown.key, keys), (shown.value, keys)):
        np.testing.assert_array_equal(np.isnan(x), np.broadcast_to(seen, x.shape))
    # Kernels that get ranges find such rows and keys themselves.
    ranges = _ranges_of(spec, operands)
    seen = np.asarray(ranges.rows_of_key)[..., 0] < np.asarray(ranges.rows_of_key)[..., 1]
    np.testing.assert_array_equal(seen, keys[..., 0, 0])
    assert rows.any(2).all()
    blocks = -(-_T // 64) * -(-_S // 64)
    hulls = [0, _S, 0, 10, 2**30, 0, blocks, 0]
    np.testing.assert_array_equal(ranges.hulls, np.tile(hulls, (_B, 1)))


def _largest(function, *arguments) -> int:
    """Elements of the largest array of a traced function."""
    return max(
        math.prod(variable.aval.shape)
        for equation in equations(function, *arguments)
        for variable in equation.outvars
        if hasattr(variable.aval, "shape")
    )


@needs_kernels
@pytest.mark.parametrize("path", ["xla", "cuda"])
def test_memory_is_linear(path):
    """No array of queries and keys: neither for the kernels, whose pass over the mask evaluates it
    block by block, nor on the blockwise path."""
    length, heads = 1 << 17, 2
    x = jax.ShapeDtypeStruct((1, length, heads, 64), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def gradient(x, ids):
        mask = masks.function(lambda b, h, q, kv, ids: ids[b, q] == ids[b, kv], ids)
        mask |= masks.causal()

        def loss(x):
            out = jaxflash.dot_product_attention(x, x, x, mask=mask, implementation=path)
            return jnp.sum(out.astype(jnp.float32) ** 2)

        return jax.grad(loss)(x)

    with jax.default_device(jax.devices("cpu")[0]):
        assert _largest(gradient, x, ids) <= 5 * length * heads * 64
    assert 5 * length * heads * 64 < length * length / 128


@needs_kernels
def test_operands_of_the_custom_calls():
    """Captures of the mask after those of scores, and before the sink's and dropout's; the hulls,
    found once for both passes."""
    x = jnp.zeros((_B, 64, _N, 64), jnp.bfloat16)
    table, sink = jnp.zeros((_N, 5), jnp.float32), jnp.zeros(_N, jnp.float32)
    ids = jnp.zeros((_B, 64), jnp.int32)

    def loss(x, table, ids, array, sink):
        mask = masks.function(lambda b, h, q, kv, ids: ids[b, q] == ids[b, kv], ids)
        mask = (mask | masks.intervals(ids[:, None], 7)) & array
        out = jaxflash.dot_product_attention(
            x,
            x,
            x,
            mask=mask,
            sink=sink,
            implementation="cuda",
            score_mod=lambda s, b, h, q, kv: s + table[h, q % 5],
        )
        return jnp.sum(out.astype(jnp.float32))

    traced = jax.jit(jax.grad(loss)).trace(x, table, ids, jnp.ones((1, 1, 1, 64), bool), sink)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    masks_of = {
        "forward": "tensor<1x1x4xui32>",  # a bit for each key, of 128
        "backward": "tensor<1x64xi1>",
    }
    hulls = f"tensor<{_B}x64x2xi32>, tensor<{_B}x64x2xi32>, "
    own = f"tensor<1x{_B}x64xi32>, tensor<{_B}x64xi32>, tensor<1xi32>"
    for pass_, array in masks_of.items():
        (call,) = (line for line in text.splitlines() if f"@jaxflash_{pass_}_v" in line)
        assert f"tensor<1x{_N}x5xf32>, {array}, {own}, tensor<1x{_N}xf32>, {hulls}" in call, call
    assert len(_custom_calls(text, _ffi.PREDICATE_TARGET)) == 1  # for both passes


def _custom_calls(text, target) -> list[str]:
    return [line for line in text.splitlines() if f"custom_call @{target}(" in line]


@needs_kernels
@pytest.mark.parametrize("implementation", ["cuda", None])
def test_plans_are_made_by_a_kernel(implementation):
    """One for both passes, which evaluates the function; elsewhere there is none."""
    x = jnp.zeros((_B, 200, _N, 64), jnp.bfloat16)
    lengths = jnp.array([30, 70], jnp.int32)

    def gradient(x, lengths):
        prefix = masks.function(lambda b, h, q, kv, n: (kv < n[b]) | (q >= kv), lengths)

        def loss(x):
            out = jaxflash.dot_product_attention(
                x, x, x, mask=prefix, implementation=implementation
            )
            return jnp.sum(out.astype(jnp.float32))

        return jax.grad(loss)(x)

    traced = jax.jit(gradient).trace(x, lengths)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (call,) = _custom_calls(text, _ffi.PREDICATE_TARGET)
    assert f"(tensor<{_B}x1xi32>, tensor<1x1xi32>, tensor<1x1x{_B}xi32>)" in call
    hulls, inside = f"tensor<{_B}x1x200x2xi32>", f"tensor<{_B}x1x4x4xi32>"
    assert f"({hulls}, {hulls}, {inside}, {inside}, tensor<" in call
    for operation in ("reduce_window", "while", "sort", "gather", "optimization_barrier"):
        assert f"stablehlo.{operation}" not in text
    if implementation is None:
        text = traced.lower(lowering_platforms=("cpu",)).as_text()
        assert _ffi.PREDICATE_TARGET not in text


def test_elements_are_evaluated_once():
    """Where no kernel does that: all that a plan says is made of bits of eight rows."""
    mask = masks.function(lambda b, h, q, kv: q * 7 % 5 > kv % 3)
    text = jax.jit(lambda: masks.plan(mask, (1, 1, 200, 200))).lower().as_text()
    (bits,) = re.findall(r"(%\w+) = stablehlo.reduce\(.*x4x8x8x200xui8>", text)
    assert f"stablehlo.optimization_barrier {bits} :" in text


@needs_kernels
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_plans_made_by_hand(platform):
    mask, _ = _value("prefix")
    traced = jax.jit(lambda mask: masks.plan(mask, _SHAPE)).trace(mask)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert len(_custom_calls(text, _ffi.PREDICATE_TARGET)) == (platform == "cuda")


@needs_kernels
def test_vmap_of_plans():
    """What the mask does not ask for is not mapped, and what it does is a leading axis."""
    x = jnp.zeros((3, _B, 70, _N, 64), jnp.bfloat16)
    limits = jnp.zeros((3, 5), jnp.int32)

    def attend(x, limits):
        mask = masks.function(lambda b, h, q, kv, n: (q >= kv) | (kv < n[0]), limits)
        return jaxflash.dot_product_attention(x, x, x, mask=mask, implementation="cuda")

    for axes, lead in (((0, None), "1x1"), ((0, 0), "3x1x1"), ((None, 0), "3x1x1")):
        arguments = [a if axis == 0 else a[0] for a, axis in zip((x, limits), axes, strict=True)]
        traced = jax.jit(jax.vmap(attend, axes)).trace(*arguments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        (call,) = _custom_calls(text, _ffi.PREDICATE_TARGET)
        assert f"tensor<{lead}x70x2xi32>, tensor<{lead}x70x2xi32>" in call


@needs_kernels
def test_plans_are_made_where_they_lie():
    """Each device makes those of its batch elements."""
    mesh = cpu_mesh(b=2, h=2)

    def placed(shape, dtype, spec):
        return jax.device_put(jnp.zeros(shape, dtype), NamedSharding(mesh, spec))

    x = placed((4, 70, _N, 16), jnp.float32, P("b", None, "h"))
    limits = placed((4, _N), jnp.int32, P("b", "h"))

    def attend(x, limits):
        mask = masks.intervals(0, limits[..., None]) | masks.causal()
        return jaxflash.dot_product_attention(x, x, x, mask=mask, implementation="cuda")

    text = jax.jit(attend).trace(x, limits).lower(lowering_platforms=("cuda",)).compile().as_text()
    (call,) = (x for x in text.splitlines() if f'"{_ffi.PREDICATE_TARGET}"' in x)
    assert f"s32[2,{_N},70,2]" in call


@needs_kernels
def test_sharded_programs_of_the_kernels_gather_nothing():
    mask, _ = _value("documents-causal", (4, _N, 64, 64))
    mesh = cpu_mesh(b=2, h=2)
    shape = jnp.zeros((4, 64, _N, 16), jnp.float32)
    x = jax.device_put(shape, NamedSharding(mesh, P("b", None, "h")))
    loss = functools.partial(_loss, jaxflash.dot_product_attention, implementation="cuda")
    traced = jax.jit(jax.grad(lambda x: loss(mask, (x, x, x)))).trace(x)
    text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
        assert collective not in text
    assert f"f32[2,64,{_N // 2},16]" in text


@needs_kernels
def test_classes_are_split_by_heads():
    """Those of a dilated mask lie between the positions and the heads, which are split."""
    mask = masks.causal() & masks.function(lambda b, h, q, kv: (q - kv) % 4 == 0)
    x = jax.device_put(
        jnp.zeros((4, 64, _N, 16), jnp.float32),
        NamedSharding(cpu_mesh(b=2, h=2), P("b", None, "h")),
    )
    loss = functools.partial(_loss, jaxflash.dot_product_attention, implementation="cuda")
    traced = jax.jit(jax.grad(lambda x: loss(mask, (x, x, x)))).trace(x)
    text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
        assert collective not in text
    assert f"f32[2,16,{4 * _N // 2},16]" in text


@needs_kernels
@pytest.mark.parametrize(
    ("shape", "spec", "part"),
    [((4, 1, 64, 70), P("b"), "2,1,64,70"), ((4, _N, 64, 70), P("b", "h"), f"2,{_N // 2},64,70")],
)
def test_arrays_are_read_where_they_lie(shape, spec, part):
    """Each device reads its part of a mask array, and has its bits alone."""
    mesh = cpu_mesh(b=2, h=2)

    def zeros(shape, dtype, spec):
        return jax.device_put(jnp.zeros(shape, dtype), NamedSharding(mesh, spec))

    query = zeros((4, 64, _N, 16), jnp.float32, P("b", None, "h"))
    key = zeros((4, 70, _N, 16), jnp.float32, P("b", None, "h"))
    attend = functools.partial(jaxflash.dot_product_attention, implementation="cuda")
    traced = jax.jit(lambda q, k, mask: attend(q, k, k, mask=mask)).trace(
        query, key, zeros(shape, jnp.bool_, spec)
    )
    text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    (call,) = (x for x in text.splitlines() if "custom-call(" in x and _ffi.DENSE_MASK_TARGET in x)
    words = part.rsplit(",", 2)[0] + ",1,64,4"
    assert f"u32[{words}]" in call
    assert "all-gather" not in text


def _random_intervals(rng, lead, length, other_length):
    """Pairs, some of them empty; whole blocks of 64 too, and the last one of a sequence."""
    begin, end = np.sort(rng.integers(0, other_length + 1, (2, *lead, length)), axis=0)
    empty = rng.random((*lead, length)) < rng.choice([0, 0.1, 0.9], (*lead, 1))
    if length > 64:
        empty[..., 64:128] = rng.random(lead)[..., None] < 0.5
    pairs = np.stack((begin, end), axis=-1)
    return np.where((empty | (begin >= end))[..., None], 0, pairs).astype(np.int32)


def _random_ranges(lead, lengths, has_solid, has_inside):
    rng = np.random.default_rng(3)
    hulls = [_random_intervals(rng, lead, *x) for x in (lengths, lengths[::-1])]
    solid: list[Any] = [None, None]
    inside: list[Any] = [None, None]
    if has_solid:
        solid = [rng.random((*lead, n)) < 0.99 for n in lengths]
    if has_inside:
        inside = [
            np.concatenate([_random_intervals(rng, lead, -(-n // 64), m) for _ in range(2)], -1)
            for n, m in (lengths, lengths[::-1])
        ]
        shapes = _ranges.shown_shapes(*lengths)[-2:]
        of_visits = (1,) if lead == (3,) else lead  # of all sequences, or of each
        inside += [rng.integers(-(2**31), 2**31, (*of_visits, *x)).astype(np.int32) for x in shapes]
    return _ranges.Intervals(*hulls, *solid, *inside)


@pytest.mark.gpu
@pytest.mark.parametrize("has_solid", [False, True])
@pytest.mark.parametrize("has_inside", [False, True])
@pytest.mark.parametrize("lead", [(), (3,), (2, 40)], ids=str)
@pytest.mark.parametrize("lengths", [(1, 64), (200, 330), (128, 20_000)], ids=str)
def test_ranges_are_summarised_on_the_gpu(lengths, lead, has_inside, has_solid):
    intervals = _random_ranges(lead, lengths, has_solid, has_inside)
    results = [jax.jit(f)(intervals) for f in (_kernels._summarised, _ranges.summarised)]
    for actual, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(actual, expected)


_LARGEST = 2**31 - 1


_KINDS_OF_IDS = ["documents", "unsorted", "far apart", "extreme", "one"]


def _random_ids(kind, lead, lengths):
    """Of queries and of keys."""
    rng = np.random.default_rng(5)
    for n in lengths:
        of_kind = {
            "documents": np.sort(rng.integers(-1, 6, (*lead, n))),
            "unsorted": rng.integers(-3, 40, (*lead, n)),
            # Several ids for a bucket, on either side.
            "far apart": rng.integers(-4, 4, (*lead, n)) * 2 * lengths[0] * lengths[1],
            "extreme": rng.choice([-_LARGEST - 1, -1, 0, _LARGEST - 1, _LARGEST], (*lead, n)),
            "one": np.full((*lead, n), 7),
        }
        yield of_kind[kind].astype(np.int32)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", _KINDS_OF_IDS)
@pytest.mark.parametrize("lead", [(), (3,), (2, 5)], ids=str)
@pytest.mark.parametrize("lengths", [(1, 64), (200, 331), (4096, 50)], ids=str)
def test_segments_are_matched_on_the_gpu(lengths, lead, kind):
    ids = list(_random_ids(kind, lead, lengths))
    actual, expected = (jax.jit(f)(*ids) for f in (_kernels._matched, _ranges.matched))
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y)
    # Both: all equal ids lie inside, and nothing else where an interval is solid.
    for own, other, intervals, solid in (
        (*ids, actual.keys_of_row, actual.keys_solid),
        (*ids[::-1], actual.rows_of_key, actual.rows_solid),
    ):
        equal = own[..., None] == other[..., None, :]
        number = np.arange(other.shape[-1])
        begin, end = np.asarray(intervals)[..., :1], np.asarray(intervals)[..., 1:]
        inside = (number >= begin) & (number < end)
        assert not (equal & ~inside).any()
        assert not (inside & ~equal & np.asarray(solid)[..., None]).any()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", _KINDS_OF_IDS)
@pytest.mark.parametrize("lead", [(), (2, 3)], ids=str)
@pytest.mark.parametrize(
    # One block, several, as many as a cluster has, and more than they have shared memory for.
    "lengths",
    [(1, 64), (200, 331), (4096, 50), (4096, 4096), (3000, 20_000), (50_000, 700)],
    ids=str,
)
def test_ranges_of_segments_on_the_gpu(lengths, lead, kind):
    ids = list(_random_ids(kind, lead, lengths))
    results = [jax.jit(f)(*ids) for f in (_kernels._of_segments, _ranges.of_segments)]
    for actual, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("of", [masks.plan, masks.as_array])
@pytest.mark.parametrize(
    "shape", [(2, 3), (1, 2, -3, 4), "abcd", 5, None, (1, 2, 3.0, 4), (1, 2, 3, None)], ids=repr
)
def test_shapes_that_are_none(of, shape):
    with pytest.raises(ValueError, match=r"shape must be \(\*batch, query heads, T, S\)"):
        of(masks.function(lambda b, h, q, kv: q >= kv), shape)


def test_shapes_of_numpy():
    mask = masks.function(lambda b, h, q, kv: q >= kv)
    for shape in (np.array([2, 3, 4]), (np.int64(2), 3, np.int8(4))):
        np.testing.assert_array_equal(
            masks.as_array(mask, shape), np.tril(np.ones((2, 3, 4), bool))
        )


@needs_kernels
@pytest.mark.parametrize("name", ["segments", "array", "segments and array"])
def test_ranges_are_made_where_they_lie(name):
    """Each device makes those of its sequences, and nothing is gathered for that."""
    mesh = cpu_mesh(b=2, h=2)

    def zeros(shape, dtype, spec):
        return jax.device_put(jnp.zeros(shape, dtype), NamedSharding(mesh, spec))

    query = zeros((4, 64, _N, 16), jnp.float32, P("b", None, "h"))
    ids = zeros((4, 64), jnp.int32, P("b"))
    array = zeros((4, 1, 64, 64), jnp.bool_, P("b"))
    attend = functools.partial(jaxflash.dot_product_attention, implementation="cuda")

    def on_kernels(q, ids, array):
        ids = ids if "segments" in name else None
        return attend(q, q, q, mask=array if "array" in name else None, segment_ids=ids)

    text = jax.jit(on_kernels).trace(query, ids, array).lower(lowering_platforms=("cuda",))
    text = text.compile().as_text()
    both = name == "segments and array"
    summary = _ffi.SEGMENT_RANGES_TARGET if name == "segments" else _ffi.RANGE_SUMMARY_TARGET
    for target in (summary, _ffi.SEGMENT_MATCHES_TARGET) if both else (summary,):
        (call,) = (x for x in text.splitlines() if f'"{target}"' in x)
        assert "s32[2,64,2]" in call
        if target == summary:
            assert "s32[2,1,6]" in call
            assert "s32[2,8]" in call
    assert "all-gather" not in text


@needs_kernels
@pytest.mark.parametrize(
    ("lead", "spec"), [((4, 1), P("b")), ((1, 1), P()), ((1, _N), P(None, "h"))], ids=str
)
def test_visits_are_split(lead, spec):
    """Of long calls; an array of all sequences is of all on each device, too, and nothing is
    gathered."""
    mesh, length = cpu_mesh(b=2, h=2), 2048

    def zeros(shape, dtype, spec):
        return jax.device_put(jnp.zeros(shape, dtype), NamedSharding(mesh, spec))

    query = zeros((4, length, _N, 16), jnp.bfloat16, P("b", None, "h"))
    array = zeros((*lead, length, length), jnp.bool_, spec)
    attend = functools.partial(jaxflash.dot_product_attention, implementation="cuda")

    def gradient(q, array):
        return jax.grad(lambda q: jnp.sum(attend(q, q, q, mask=array)))(q)

    text = jax.jit(gradient).trace(query, array).lower(lowering_platforms=("cuda",))
    text = text.compile().as_text()
    visits = f"s32[{2 if lead[0] == 4 else 1},32,1,2]"
    for target in (_ffi.RANGE_SUMMARY_TARGET, _ffi.FORWARD_TARGET, _ffi.BACKWARD_TARGET):
        calls = [x for x in text.splitlines() if f'"{target}"' in x]
        assert calls
        for call in calls:
            _, operands = call.split("operand_layout_constraints=")
            assert visits in operands, operands
    assert "all-gather" not in text


@needs_kernels
def test_vmap_of_summaries():
    """What is not mapped is the same for all."""
    intervals = _random_ranges((3,), (128, 70), True, False)
    keys = jnp.stack((jnp.asarray(intervals.keys_of_row),) * 2)

    def lowered(keys):
        of_one = jax.vmap(lambda x: _kernels._summarised(intervals._replace(keys_of_row=x)))
        return jax.jit(of_one).trace(keys).lower(lowering_platforms=("cuda",)).as_text()

    (call,) = (x for x in lowered(keys).splitlines() if f"@{_ffi.RANGE_SUMMARY_TARGET}" in x)
    assert "tensor<2x3x128x2xi32>, tensor<2x3x70x2xi32>, tensor<2x3x128xi1>" in call
    assert "tensor<2x3x2x6xi32>" in call


@needs_kernels
def test_supported_without_arrays():
    shape = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((2, 128), jnp.int32)
    always = jaxflash.supported(shape, shape, shape)
    for mask in (
        masks.causal() & masks.segments(ids) & masks.lengths(jax.ShapeDtypeStruct((2,), jnp.int32)),
        masks.function(lambda b, h, q, kv, x: x[b, q] == x[b, kv], ids) | masks.segments(ids, ids),
        masks.dense(jax.ShapeDtypeStruct((128,), jnp.bool_)) & jax.ShapeDtypeStruct((), jnp.bool_),
        ~masks.intervals(jax.ShapeDtypeStruct((128,), jnp.int8), ids),
    ):
        if isinstance(mask, _mask.Not):
            with pytest.raises(ValueError, match="end must broadcast"):
                jaxflash.supported(shape, shape, shape, mask=mask)
        else:
            assert jaxflash.supported(shape, shape, shape, mask=mask) == always
    mask = masks.function(lambda b, h, q, kv: jax.lax.while_loop(lambda x: x < q, abs, kv) > 3)
    reasons = jaxflash.supported(shape, shape, shape, mask=mask)
    assert any(reason.startswith("mask `while`") for reason in reasons)
    many = masks.function(lambda b, h, q, kv, *x: sum(y[b, q] for y in x) > 3, *(ids,) * 9)
    assert any("9 arrays" in x for x in jaxflash.supported(shape, shape, shape, mask=many))


# ---- Faults --------------------------------------------------------------------------------------


_OK = np.ones((_T, _S), bool)

# id: (what makes the mask, words of the error)
_WRONG = {
    "alignment": (lambda: masks.causal("left"), ["masks.causal", "alignment", "left", "top_left"]),
    "window side": (lambda: masks.window(-1, 0), ["masks.window", "-1"]),
    "window float": (lambda: masks.window(1.5, 0), ["masks.window", "1.5"]),
    "lengths dtype": (lambda: masks.lengths(jnp.ones(2)), ["masks.lengths: query", "float32"]),
    "lengths of text": (lambda: masks.lengths(key_value="3"), ["masks.lengths: key_value", "str"]),
    "ids dtype": (lambda: masks.segments(jnp.ones(_T)), ["masks.segments", "float32"]),
    "ids None": (lambda: masks.segments(None), ["masks.segments: query_ids", "None"]),
    "ids of two dtypes": (
        lambda: masks.segments(jnp.zeros(_T, jnp.uint32), jnp.zeros(_S, jnp.int32)),
        ["masks.segments", "uint32", "int32"],
    ),
    "interval dtype": (lambda: masks.intervals(0, jnp.ones(_T)), ["intervals: end", "float32"]),
    "interval of": (lambda: masks.intervals(0, 3, of="row"), ["masks.intervals: of", "row", "key"]),
    "dense dtype": (lambda: masks.dense(_OK.astype(np.int32)), ["masks.dense", "bool", "int32"]),
    "no function": (lambda: masks.function(_OK), ["masks.function", "ndarray"]),
    "mask for a function": (lambda: masks.function(masks.causal()), ["masks.function", "Window"]),
    "text captured": (lambda: masks.function(lambda *i: True, "abc"), ["function: a capture"]),
}  # fmt: skip

# Known when the sizes are.
_UNFIT = {
    "lengths shape": (masks.lengths(jnp.zeros(3, jnp.int32)), ["masks.lengths: query", "(3,)"]),
    "one array of ids": (masks.segments(jnp.zeros(_T, jnp.int32)), ["masks.segments", "12", "20"]),
    "ids shape": (
        masks.segments(jnp.zeros(_S, jnp.int32), jnp.zeros(_S, jnp.int32)),
        ["masks.segments: query_ids", "(*batch, T)", "(20,)"],
    ),
    "interval shape": (
        masks.intervals(0, jnp.zeros((_B, _T), jnp.int32)),
        ["masks.intervals: end", "(*batch, query heads, T)", "(2, 12)"],
    ),
    "interval of keys": (
        masks.intervals(0, jnp.zeros(_T, jnp.int32), of="key"),
        ["masks.intervals: end", "(*batch, query heads, S)", "(12,)"],
    ),
    "dense shape": (masks.causal() | _OK.T, ["masks.dense: array", "(20, 12)"]),
    "result dtype": (masks.function(lambda b, h, q, kv: q - kv), ["masks.function", "int32"]),
    "result shape": (
        ~masks.function(lambda b, h, q, kv: jnp.stack([q, kv]) > 0), ["masks.function", "(2,)"]
    ),
    "result None": (masks.function(lambda b, h, q, kv: None), ["masks.function", "NoneType"]),
    "leaves of another dtype": (
        jax.tree.map(lambda x: x.astype(jnp.float32), masks.dense(_OK)), ["masks.dense", "float32"]
    ),
    "a function": (lambda b, h, q, kv: True, ["mask", "function", "jaxflash.masks.function"]),
    "a list": ([masks.causal()], ["mask", "list"]),
}  # fmt: skip


@pytest.mark.parametrize("name", _WRONG)
def test_wrong_values(name):
    make, words = _WRONG[name]
    with jax.enable_x64(False), pytest.raises(ValueError, match="masks") as caught:
        make()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", _UNFIT)
def test_masks_that_do_not_fit(name):
    mask, words = _UNFIT[name]
    for attention in _ATTENTIONS:
        with pytest.raises(ValueError, match="mask") as caught:
            attention(*_qkv(), mask=mask)
        for word in words:
            assert word in str(caught.value)


def test_wrong_arguments_of_as_array():
    with pytest.raises(ValueError, match=r"jaxflash\.masks.*ndarray"):
        masks.as_array(_OK, _SHAPE)
    with pytest.raises(ValueError, match=r"shape must be.*\(12, 20\)"):
        masks.as_array(masks.causal(), (_T, _S))


def test_errors_inside_a_function_are_its_own():
    with pytest.raises(TypeError, match="positional argument"):
        jaxflash.dot_product_attention(*_qkv(), mask=masks.function(lambda b, h, q: q > 0))
    with pytest.raises(TypeError, match="positional argument"):
        jaxflash.dot_product_attention(*_qkv(), mask=masks.function(lambda b, h, q, kv: True, 3))
