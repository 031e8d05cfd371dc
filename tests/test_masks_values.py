"""jaxflash.masks: what the values mean, how they behave as pytrees and in transformations, and what
is wrong with them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxflash
from jaxflash import _api, masks
from marks import needs_kernels
from mask_values import MASK_VALUES
from meshes import cpu_mesh
from small_calls import (
    ATTENTIONS,
    ORDERS,
    SHAPE,
    B,
    H,
    N,
    S,
    T,
    assert_equal,
    random_qkv,
    sum_of_sines,
    value_and_meaning,
)

pytestmark = pytest.mark.usefixtures("accurate_products", "quick_compilation")


# ---- What they mean ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MASK_VALUES)
def test_as_array(name):
    """Against numpy; and a mask that hides everything or nothing tests little: squares of 512 are
    for longer calls."""
    shape = (B, N, 140, 150)
    mask, visible = value_and_meaning(name, shape)
    actual = np.asarray(masks.as_array(mask, shape))
    assert actual.dtype == bool
    np.testing.assert_array_equal(actual, visible)
    if name not in ("everything", "nothing", "checkerboard-512"):
        assert 0.01 < visible.mean() < 0.99


def test_as_array_of_no_elements():
    mask = masks.function(lambda b, h, q, kv, x: x[kv] > 0, jnp.zeros((0,), jnp.int32))
    assert masks.as_array(mask, (N, T, 0)).shape == (N, T, 0)
    for shape in ((B, N, T, 0), (0, N, T, S), (B, 0, T, S)):
        assert jnp.shape(masks.as_array(masks.plan(mask, shape), shape)) == shape


def test_extreme_sides_and_lengths():
    for mask in (
        masks.window(2**40, 2**40),
        ~~masks.window(2**31 - 1, None) | masks.window(0, 0),
        masks.lengths(2**40, 2**40),
        masks.intervals(jnp.int32(-(2**31)), jnp.int32(2**31 - 1)),
        masks.segments(jnp.full(T, -(2**31)), jnp.full(S, -(2**31))),
    ):
        assert np.asarray(masks.as_array(mask, SHAPE)).all()
        np.testing.assert_array_equal(
            jaxflash.dot_product_attention(*random_qkv(), mask=mask),
            jaxflash.dot_product_attention(*random_qkv(), mask=mask & masks.window(None, None)),
        )
        assert_equal(lambda attention, mask=mask: attention(*random_qkv(), mask=mask))
    nothing = masks.as_array(masks.lengths(-3), SHAPE)
    assert not np.asarray(nothing).any()


def test_values_in_64_bits():
    with jax.enable_x64(True):
        ids = jnp.asarray([2**40, 1, 2, 2**40] * 3)
        begin = jnp.asarray([-(2**50)] * T)
        for mask in (
            masks.segments(ids, jnp.arange(S)) | masks.segments(ids, jnp.full(S, 2**40)),
            masks.intervals(begin, jnp.full(T, 2**60)) & masks.intervals(0, jnp.arange(T)),
            masks.function(lambda b, h, q, kv, x: x[q] == x[kv % T], ids),
        ):
            assert_equal(lambda attention, mask=mask: attention(*random_qkv(), mask=mask))


def test_wide_integers_of_numpy_are_not_cut_off():
    """JAX takes their lower 32 bits: other documents would have the same id."""
    ids = np.array([7, 7 + 2**32] * (T // 2))
    query, _, _ = random_qkv()
    for name, call in {
        "segment_ids": lambda: jaxflash.dot_product_attention(
            query, query, query, segment_ids=np.tile(ids, (B, 1))
        ),
        "masks.segments: query_ids": lambda: masks.segments(ids),
        "masks.lengths: query": lambda: masks.lengths(np.int64(2**32 + 3)),
    }.items():
        with jax.enable_x64(False), pytest.raises(ValueError, match=f"{name} must lie in int32"):
            call()
    for end in (np.int64(2**32), np.full(T, 2**32), np.uint64(2**63)):
        assert np.asarray(masks.as_array(masks.intervals(0, end), SHAPE)).all()


def test_equal_values_without_arrays():
    """As static arguments and fields of modules, which are compared and hashed."""

    def make():
        return masks.causal() & ~masks.window(3, None) | masks.window(1, 2, "bottom_right")

    assert make() == make()
    assert hash(make()) == hash(make())
    assert masks.window(3, 0) != masks.window(3, 1)
    assert masks.causal() & masks.window(3, 0) != masks.causal() | masks.window(3, 0)
    with_array = masks.causal() & masks.dense(np.ones(SHAPE, bool))
    assert with_array == with_array
    assert with_array != masks.causal() & masks.dense(np.ones(SHAPE, bool))


def test_operators():
    a, b = masks.causal(), masks.lengths(key_value=7)
    array = np.random.default_rng(0).random((T, S)) < 0.5
    for mask, expected in (
        (a & array, np.tri(T, S, dtype=bool) & array),
        (array & a, np.tri(T, S, dtype=bool) & array),
        (a | jnp.asarray(array), np.tri(T, S, dtype=bool) | array),
        (jnp.asarray(array) | a, np.tri(T, S, dtype=bool) | array),
        (~a, ~np.tri(T, S, dtype=bool)),
        (a & np.bool_(True), np.tri(T, S, dtype=bool)),
        (np.bool_(True) | a, np.ones((T, S), bool)),
        (a & b & ~b, np.zeros((T, S), bool)),
    ):
        np.testing.assert_array_equal(masks.as_array(mask, SHAPE)[1, 2], expected)
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
    ids = jnp.zeros((B, T), jnp.int32), jnp.ones((B, S), jnp.int32)
    array = jnp.ones((1, 1, T, S), bool)
    described = [
        _api.described(
            *random_qkv(), None, array, is_causal=True, local_window_size=(4, 9),
            causal_alignment="bottom_right", query_seq_lengths=lengths["query"],
            key_value_seq_lengths=lengths["key_value"], segment_ids=ids,
        ),
        _api.described(
            *random_qkv(), None,
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
        alibi_slopes=jnp.arange(1.0, N + 1.0) / 8,
    )
    mask = masks.lengths(9) & masks.lengths(q_lengths, kv_lengths)
    for attention in ATTENTIONS:
        np.testing.assert_allclose(
            attention(*random_qkv(), mask=mask, **aligned),
            attention(
                *random_qkv(),
                query_seq_lengths=jnp.minimum(q_lengths, 9),
                key_value_seq_lengths=kv_lengths,
                **aligned,
            ),
            rtol=1e-6,
        )
    assert_equal(lambda attention: attention(*random_qkv(), mask=mask, **aligned))


def test_intervals_to_any_end():
    mask = masks.intervals(-(2**40), 2**40) & masks.intervals(1, 2**31)
    np.testing.assert_array_equal(
        masks.as_array(mask, (1, 2, 3)), np.broadcast_to(np.arange(3) > 0, (1, 2, 3))
    )


def test_shapes_of_numpy():
    mask = masks.function(lambda b, h, q, kv: q >= kv)
    for shape in (np.array([2, 3, 4]), (np.int64(2), 3, np.int8(4))):
        np.testing.assert_array_equal(
            masks.as_array(mask, shape), np.tril(np.ones((2, 3, 4), bool))
        )


# ---- Pytrees -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MASK_VALUES)
def test_pytrees(name):
    mask, visible = value_and_meaning(name)
    leaves, tree = jax.tree.flatten(mask)
    assert all(isinstance(x, jax.Array | np.ndarray) for x in leaves)
    again = jax.tree.map(lambda x: x, mask)
    assert jax.tree.structure(again) == tree
    as_array = jax.jit(lambda mask: masks.as_array(mask, SHAPE))
    np.testing.assert_array_equal(as_array(again), visible)


def test_other_arrays_compile_nothing(compilations):
    """As arguments of a program, and in eager calls of functions that are equal."""

    def call(widths, ids):
        mask = masks.function(lambda b, h, q, kv, x: q - kv < x[h], widths)
        mask |= masks.segments(ids, ids[:1])
        return jaxflash.dot_product_attention(*random_qkv(), mask=mask)

    def arrays(seed):
        rng = np.random.default_rng(seed)
        return (
            jnp.asarray(rng.integers(0, 9, N), jnp.int32),
            jnp.asarray(rng.integers(0, 3, T), jnp.int32),
        )

    first = call(*arrays(0))
    compilations.clear()
    second = call(*arrays(1))
    assert not compilations
    assert not np.array_equal(first, second)

    def visible(b, h, q, kv, x):
        return q - kv < x[h]

    step = jax.jit(lambda mask: jaxflash.dot_product_attention(*random_qkv(), mask=mask))
    for seed in range(3):
        widths, ids = arrays(seed)
        step(masks.function(visible, widths) & masks.segments(ids, ids[:1]) | masks.window(0, 0))
        if seed == 0:
            compilations.clear()
    assert not compilations


def test_scan_over_masks():
    widths = jnp.arange(1, 1 + 3 * N, dtype=jnp.int32).reshape(3, N)
    stacked = masks.function(lambda b, h, q, kv, x: abs(q - kv) < x[h], widths)

    def layers(attention, stacked, qkv):
        q, k, v = qkv

        def layer(x, mask):
            return x + attention(x, k, v, mask=mask), None

        def loss(q):
            return jnp.sum(jnp.sin(jax.lax.scan(layer, q, stacked)[0]))

        return jax.value_and_grad(loss)(q)

    assert_equal(layers, stacked, random_qkv())


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("mapped", ["mask", "query", "both"])
@pytest.mark.parametrize("name", ["head-windows", "intervals", "whole-lengths", "two-arrays"])
def test_vmap(name, mapped):
    mask, _ = value_and_meaning(name)
    qkv = random_qkv()
    axes = [None, None]
    if mapped != "query":
        other = jax.tree.map(lambda x: jnp.stack([x, jnp.flip(jnp.asarray(x))]), mask)
        mask, axes[0] = other, 0
    if mapped != "mask":
        qkv, axes[1] = tuple(jnp.stack([x, -x]) for x in qkv), 0

    def gradients(attention, mask, qkv):
        one = jax.grad(lambda qkv, mask: sum_of_sines(attention, mask, qkv))
        return jax.vmap(lambda mask, qkv: one(qkv, mask), axes)(mask, qkv)

    assert_equal(gradients, mask, qkv)


# ---- Transformations -----------------------------------------------------------------------------


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("order", ORDERS)
def test_derivatives_of_every_order(order):
    """By what is differentiated beside a mask that captures floats, which have none."""
    mask, _ = value_and_meaning("float-captures", (B, N, 37, 41))
    mask &= masks.causal("bottom_right") | masks.window(None, 3)
    qkv = random_qkv(q_len=37, kv_len=41)

    def transformed(attention, mask, qkv):
        def loss(qkv):
            return sum_of_sines(attention, mask, qkv)

        return ORDERS[order](loss, qkv)

    assert_equal(transformed, mask, qkv)


def test_masks_have_no_gradient():
    mask, _ = value_and_meaning("float-captures")

    def gradient(attention, qkv):
        return jax.grad(lambda mask: sum_of_sines(attention, mask, qkv))(mask)

    for attention in ATTENTIONS:
        for x in jax.tree.leaves(jax.jit(functools.partial(gradient, attention))(random_qkv())):
            assert not np.asarray(x).any()
    tangent = jax.tree.map(jnp.ones_like, mask)
    out, t_out = jax.jvp(
        lambda mask: jaxflash.dot_product_attention(*random_qkv(), mask=mask), (mask,), (tangent,)
    )
    assert np.asarray(out).any()
    assert not np.asarray(t_out).any()


def test_checkpoint():
    mask, _ = value_and_meaning("prefix")

    def gradients(attention, mask, qkv):
        policy = jax.checkpoint_policies.save_only_these_names(jaxflash.CHECKPOINT_NAME)
        loss = jax.checkpoint(lambda qkv: sum_of_sines(attention, mask, qkv), policy=policy)
        return jax.grad(loss)(qkv)

    assert_equal(gradients, mask, random_qkv())


def test_without_jit():
    mask, _ = value_and_meaning("prefix")
    expected = jax.grad(lambda q: sum_of_sines(ATTENTIONS[1], mask, (q, *random_qkv()[1:])))(
        random_qkv()[0]
    )
    with jax.disable_jit():
        actual = jax.grad(lambda q: sum_of_sines(ATTENTIONS[0], mask, (q, *random_qkv()[1:])))(
            random_qkv()[0]
        )
    np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-5)


@needs_kernels
@pytest.mark.parametrize("symbolic", [False, True])
def test_export(symbolic):
    """Gradients, for CPU and CUDA."""
    sizes = "b, t" if symbolic else f"{B}, {T}"
    scope = export.SymbolicScope()
    query, ids = (
        jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), dtype)
        for shape, dtype in ((f"{sizes}, {N}, {H}", np.float32), (sizes, np.int32))
    )

    def gradient(query, ids):
        mask = masks.function(lambda b, h, q, kv, x: x[b, q] == x[b, kv], ids)
        mask = mask & masks.causal() | masks.window(0, 0, "bottom_right")
        return jax.grad(lambda q: sum_of_sines(jaxflash.dot_product_attention, mask, (q, q, q)))(
            query
        )

    exported = export.export(
        jax.jit(gradient), platforms=["cpu", "cuda"], disabled_checks=jaxflash.EXPORT_CHECKS
    )(query, ids)
    exported = export.deserialize(exported.serialize())
    x, ids = random_qkv()[0], jnp.asarray(np.arange(B * T).reshape(B, T) // 5, jnp.int32)
    with jax.default_device(jax.devices("cpu")[0]):
        actual = exported.call(x, ids)
    np.testing.assert_allclose(actual, gradient(x, ids), rtol=2e-4, atol=2e-5)


# ---- Several devices -----------------------------------------------------------------------------

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
    mask, _ = value_and_meaning(name.removesuffix(", planned"))
    if name.endswith("planned"):
        mask = masks.plan(mask, SHAPE)
    qkv = random_qkv()
    mesh = cpu_mesh(AxisType.Explicit if kind == "explicit" else AxisType.Auto, b=2, h=2)
    placed = jax.device_put(qkv, NamedSharding(mesh, P("b", None, "h")))

    def gradients(attention, mask, qkv):
        return jax.value_and_grad(lambda qkv: sum_of_sines(attention, mask, qkv))(qkv)

    with jax.default_device(jax.devices("cpu")[0]):
        expected = jax.jit(functools.partial(gradients, ATTENTIONS[1]))(mask, qkv)[1]
    ours = functools.partial(gradients, ATTENTIONS[0])
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


# ---- Faults --------------------------------------------------------------------------------------

_OK = np.ones((T, S), bool)
# id: (what makes the mask, words of the error)
_WRONG = {
    "alignment": (lambda: masks.causal("left"), ["masks.causal", "alignment", "left", "top_left"]),
    "window side": (lambda: masks.window(-1, 0), ["masks.window: left", "-1"]),
    "window float": (lambda: masks.window(1.5, 0), ["masks.window", "1.5"]),
    "lengths dtype": (lambda: masks.lengths(jnp.ones(2)), ["masks.lengths: query", "float32"]),
    "lengths of text": (lambda: masks.lengths(key_value="3"), ["masks.lengths: key_value", "str"]),
    "ids dtype": (lambda: masks.segments(jnp.ones(T)), ["masks.segments", "float32"]),
    "ids None": (lambda: masks.segments(None), ["masks.segments: query_ids", "None"]),
    "ids of two dtypes": (
        lambda: masks.segments(jnp.zeros(T, jnp.uint32), jnp.zeros(S, jnp.int32)),
        ["masks.segments", "uint32", "int32"],
    ),
    "interval dtype": (lambda: masks.intervals(0, jnp.ones(T)), ["intervals: end", "float32"]),
    "interval of": (lambda: masks.intervals(0, 3, of="row"), ["masks.intervals: of", "row", "key"]),
    "dense dtype": (lambda: masks.dense(_OK.astype(np.int32)), ["masks.dense", "bool", "int32"]),
    "no function": (lambda: masks.function(_OK), ["masks.function", "ndarray"]),
    "mask for a function": (lambda: masks.function(masks.causal()), ["masks.function", "Window"]),
    "too few parameters": (lambda: masks.function(lambda q, kv: True), ["masks.function: f", "kv"]),
    "too many captures": (
        lambda: masks.function(lambda b, h, q, kv: True, _OK), ["masks.function: f", "(1 in number"]
    ),
    "with numbers": (lambda: masks.causal() & _OK.astype(np.float32), ["mask", "bool", "float32"]),
    "text captured": (lambda: masks.function(lambda *i: True, "abc"), ["function: a capture"]),
}  # fmt: skip
# Known when the sizes are.
_UNFIT = {
    "lengths shape": (masks.lengths(jnp.zeros(3, jnp.int32)), ["masks.lengths: query", "(3,)"]),
    "one array of ids": (masks.segments(jnp.zeros(T, jnp.int32)), ["masks.segments", "12", "20"]),
    "ids shape": (
        masks.segments(jnp.zeros(S, jnp.int32), jnp.zeros(S, jnp.int32)),
        ["masks.segments: query_ids", "(*batch, T)", "(20,)"],
    ),
    "interval shape": (
        masks.intervals(0, jnp.zeros((B, T), jnp.int32)),
        ["masks.intervals: end", "(*batch, query heads, T)", "(2, 12)"],
    ),
    "interval of keys": (
        masks.intervals(0, jnp.zeros(T, jnp.int32), of="key"),
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
    "a list": ([masks.causal()], ["mask", "list", "&"]),
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
    for attention in ATTENTIONS:
        with pytest.raises(ValueError, match="mask") as caught:
            attention(*random_qkv(), mask=mask)
        for word in words:
            assert word in str(caught.value)


@pytest.mark.parametrize("of", [masks.plan, masks.as_array])
@pytest.mark.parametrize(
    "shape", [(2, 3), (1, 2, -3, 4), "abcd", 5, None, (1, 2, 3.0, 4), (1, 2, 3, None)], ids=repr
)
def test_shapes_that_are_none(of, shape):
    with pytest.raises(ValueError, match=r"shape must be \(\*batch, query heads, T, S\)"):
        of(masks.function(lambda b, h, q, kv: q >= kv), shape)


def test_wrong_arguments_of_as_array():
    with pytest.raises(ValueError, match=r"jaxflash\.masks.*ndarray"):
        masks.as_array(_OK, SHAPE)
    with pytest.raises(ValueError, match=r"shape must be.*\(12, 20\)"):
        masks.as_array(masks.causal(), (T, S))


@pytest.mark.parametrize("replicated_first", [True, False])
def test_plans_of_what_varies_over_some_devices(replicated_first):
    """Inside `shard_map`: a function that reads what each device has, and what all have."""
    mesh = cpu_mesh(b=2)
    kinds, limits = jnp.arange(S, dtype=jnp.int32) % 3, jnp.array([0, 1], jnp.int32)
    qkv = random_qkv()

    def of(kinds, limits):
        if replicated_first:
            return masks.function(
                lambda b, h, q, kv, kinds, limits: kinds[kv] <= limits[b], kinds, limits
            )
        return masks.function(
            lambda b, h, q, kv, limits, kinds: kinds[kv] <= limits[b], limits, kinds
        )

    def attend(kinds, limits, *qkv):
        mask = masks.plan(of(kinds, limits), (B // 2, N, T, S))
        return jaxflash.dot_product_attention(*qkv, mask=mask)

    split = (P("b"),) * 4
    run = jax.shard_map(attend, mesh=mesh, in_specs=(P(), *split), out_specs=P("b"))
    expected = jaxflash.reference.dot_product_attention(*qkv, mask=of(kinds, limits))
    with jax.default_device(jax.devices("cpu")[0]):
        np.testing.assert_allclose(run(kinds, limits, *qkv), expected, rtol=1e-5, atol=1e-6)


def test_errors_inside_a_function_are_its_own():
    mask = masks.function(lambda b, h, q, kv: jnp.greater(q))
    with pytest.raises(TypeError, match="positional argument"):
        jaxflash.dot_product_attention(*random_qkv(), mask=mask)
