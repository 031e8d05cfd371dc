"""jaxflash.masks.plan: what a plan serves for, when one is made, and by whom."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxflash
from jaxflash import _api, _ffi, _mask, _ranges, masks
from jaxprs import compiled_custom_calls, custom_calls, equations
from marks import needs_kernels
from meshes import cpu_mesh
from small_calls import (
    ATTENTIONS,
    SHAPE,
    B,
    N,
    S,
    T,
    assert_equal,
    random_qkv,
    sum_of_sines,
    value_and_meaning,
)

pytestmark = pytest.mark.usefixtures("accurate_products", "quick_compilation")


# ---- What they serve for -------------------------------------------------------------------------


@pytest.mark.usefixtures("small_blocks")
def test_plan_through_layers():
    """Made once, for all layers of a scan, and kept when something more is hidden."""
    mask, _ = value_and_meaning("head-windows")
    plan = masks.plan(mask, SHAPE)
    np.testing.assert_array_equal(masks.as_array(plan, SHAPE), masks.as_array(mask, SHAPE))

    def layers(attention, plan, qkv):
        q, k, v = qkv

        def layer(x, _):
            return x + attention(x, k, v, mask=plan & masks.window(5, None), is_causal=True), None

        return jax.value_and_grad(
            lambda q: jnp.sum(jnp.sin(jax.lax.scan(layer, q, None, length=2)[0]))
        )(q)

    assert_equal(layers, plan, random_qkv())

    def evaluations(mask):
        def pass_over_the_mask(equation):
            shapes = [variable.aval.shape for variable in equation.invars]
            return equation.primitive.name == "reduce_or" and len(shapes[0]) == 6

        traced = equations(lambda mask: layers(ATTENTIONS[0], mask, random_qkv()), mask)
        return sum(map(pass_over_the_mask, traced))

    assert evaluations(plan) < evaluations(mask)


@pytest.mark.parametrize("number", ["b", "h"])
def test_plans_of_functions_that_index_one_element(number):
    """An array that all share, as JAX clamps the index."""
    ends = jnp.array([23], jnp.int32)
    mask = masks.function(lambda b, h, q, kv: kv < ends[b if number == "b" else h])
    plan = masks.plan(mask, SHAPE)
    np.testing.assert_array_equal(masks.as_array(plan, SHAPE), masks.as_array(mask, SHAPE))
    for value in (mask, plan):
        assert_equal(lambda f: jax.grad(lambda qkv: sum_of_sines(f, value, qkv))(random_qkv()))  # noqa: B023


@pytest.mark.parametrize("number", ["b", "h"])
def test_plans_on_explicit_meshes(number):
    """Of a function whose array is split."""
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("b", "h"), explicit, devices=jax.devices("cpu")[:4])
    count = B if number == "b" else N
    ends = jnp.arange(1, count + 1, dtype=jnp.int32) * 9

    def plan(ends):
        def sees(b, h, q, kv, ends):
            return kv < ends[b if number == "b" else h]

        return masks.plan(masks.function(sees, ends) | masks.causal(), SHAPE)

    split = jax.device_put(ends, NamedSharding(mesh, P(number)))
    for make in (plan, jax.jit(plan)):
        np.testing.assert_array_equal(
            masks.as_array(make(split), SHAPE), masks.as_array(plan(ends), SHAPE)
        )
    ids = jnp.arange(B * T, dtype=jnp.int32).reshape(B, T) // 7
    split = jax.device_put(ids, NamedSharding(mesh, P("b", "h")))
    shape = (B, N, T, T)
    for of_ids in (masks.segments, lambda ids: masks.causal() | masks.segments(ids)):
        np.testing.assert_array_equal(
            masks.as_array(masks.plan(of_ids(split), shape), shape),
            masks.as_array(of_ids(ids), shape),
        )


def test_plans_in_combinations():
    prefix, _ = value_and_meaning("prefix")
    plan = masks.plan(prefix, SHAPE)
    for mask, same in (
        (~plan, ~prefix),
        (plan | masks.window(0, 3), prefix | masks.window(0, 3)),
        (plan & masks.plan(~prefix, SHAPE), prefix & ~prefix),
        (masks.lengths(4, 7) & plan, masks.lengths(4, 7) & prefix),
    ):
        np.testing.assert_array_equal(
            jaxflash.dot_product_attention(*random_qkv(), mask=mask),
            jaxflash.dot_product_attention(*random_qkv(), mask=same),
        )
    nothing = masks.plan(masks.causal(), SHAPE)  # to find out
    np.testing.assert_allclose(
        jaxflash.dot_product_attention(*random_qkv(), mask=nothing),
        jaxflash.dot_product_attention(*random_qkv(), is_causal=True),
    )


_LONG = (1, 1, 256, 256)


def _in_blocks(b, h, q, kv):
    return (q // 128 == kv // 128) | (kv < 64)


def _not_by_three(b, h, q, kv):
    return (q * kv) % 3 != 0


def _beside_plans():
    """name: (mask, options of the call, what of the mask is no band and no segments of the call,
    whether some of it is known to be shown as a whole)"""
    blocks, thirds = masks.function(_in_blocks), masks.function(_not_by_three)
    rng = np.random.default_rng(0)
    many, rows = (masks.dense(rng.random(shape) < 0.9) for shape in ((256, 256), (256, 1)))
    ends = jnp.arange(256, dtype=jnp.int32) + 10
    near = masks.intervals(0 * ends, ends)
    ids = jnp.arange(256, dtype=jnp.int32)[None] // 100
    documents, given = masks.segments(ids), dict(segment_ids=ids // 2)
    plan = masks.plan(blocks, _LONG)
    in_documents = masks.plan(documents & blocks, _LONG)
    of_rows = masks.plan(rows & blocks, _LONG)
    other = masks.causal("bottom_right")
    return {
        "alone": (plan, {}, blocks, True),
        "same function": (plan & blocks, {}, blocks, False),
        "causal": (plan & masks.causal(), {}, blocks, True),
        "causal in the plan": (masks.plan(blocks & masks.causal(), _LONG), {}, blocks, True),
        "other alignment": (plan & other, dict(is_causal=True), blocks, True),
        "function": (plan & thirds, {}, blocks & thirds, False),
        "plan": (plan & masks.plan(thirds, _LONG), {}, blocks & thirds, False),
        "intervals": (plan & near, {}, blocks & near, False),
        "choice": (plan & (thirds | near), {}, blocks & (thirds | near), False),
        "array": (plan & many, {}, blocks & many, False),
        "array of the plan": (of_rows, {}, rows & blocks, False),
        "array without a place": (of_rows & many, {}, rows & blocks & many, False),
        "segments": (plan, given, blocks, True),
        "segments of the plan": (in_documents, {}, blocks, True),
        "segments without a place": (in_documents, given, documents & blocks, False),
    }


@pytest.mark.parametrize("name", _beside_plans())
def test_what_plans_know_beside_other_masks(name):
    """Kernels test no element of what is shown as a whole, but for bands and segments."""
    mask, options, shown, knows = _beside_plans()[name]
    x = jnp.zeros((1, 256, 1, 8), jnp.float32)
    spec, operands = _api.described(x, x, x, mask=mask, **options)
    assert spec.predicate is not None
    ranges = _ranges.of_call(spec, operands, *_ranges.of_dense_mask(operands))
    assert ranges is not None
    shown = np.asarray(masks.as_array(shown, _LONG))[0, 0]
    known = np.zeros_like(shown)
    for of_rows, (begin, end) in zip(np.split(known, 4), ranges.row_blocks[0, :, 2:4], strict=True):
        of_rows[:, begin:end] = True
    for of_keys, (begin, end) in zip(
        np.split(known, 4, axis=1), ranges.key_blocks[0, :, 2:4], strict=True
    ):
        of_keys[begin:end] = True
    if ranges.row_visits is not None:
        blocks = _ranges.unpacked(ranges.row_visits[0, ..., 1])[:, :4]
        known |= np.repeat(np.repeat(blocks, 64, axis=0), 64, axis=1)
    assert not (known & ~shown).any()
    assert known.any() == knows


@pytest.mark.usefixtures("small_blocks")
def test_plans_do_not_know_lengths_of_the_call():
    """That move where a query stands: what was found without them is not used."""
    mask = masks.causal("bottom_right") & masks.window(30, 2) | masks.window(0, 0)
    shape = (B, N, 40, 60)
    plan = masks.plan(mask, shape)
    lengths = jnp.array([39, 9], jnp.int32), jnp.array([20, 55], jnp.int32)
    options = dict(query_seq_lengths=lengths[0], key_value_seq_lengths=lengths[1])
    qkv = random_qkv(q_len=40, kv_len=60)
    assert_equal(lambda attention: attention(*qkv, mask=plan, **options))
    assert_equal(lambda attention: attention(*qkv, mask=plan & masks.lengths(*lengths)))
    planned = masks.plan(masks.lengths(*lengths) & mask, shape)
    assert _api.described(*qkv, mask=plan)[1].rows_hull is not None
    assert _api.described(*qkv, mask=planned)[1].rows_hull is not None
    assert _api.described(*qkv, mask=plan, **options)[1].rows_hull is None
    assert_equal(lambda attention: attention(*qkv, mask=planned))


@pytest.mark.parametrize(
    "shape",
    [
        (B, N, T, S + 1),
        (B, N, T - 1, S),
        (B, 3, T, S),
        # Of one batch element or head nothing tells whether it stands for others.
        (1, N, T, S),
        (B, 1, T, S),
    ],
)
def test_plans_for_other_sizes(shape):
    mask = masks.function(lambda b, h, q, kv: q + h + 5 * b > kv)
    with pytest.raises(ValueError, match=r"masks\.plan: made for"):
        jaxflash.dot_product_attention(*random_qkv(), mask=masks.plan(mask, shape))
    with pytest.raises(ValueError, match=r"masks\.segments: query_ids"):
        masks.plan(masks.segments(np.zeros(T + 2, np.int32), np.zeros(S, np.int32)), shape)


# ---- How they are made ---------------------------------------------------------------------------


def test_plans_are_compiled_once(compilations):
    """Also where they are made outside of `jax.jit`, of masks that are equal and not the same."""

    def make(n):
        return masks.plan(
            masks.causal()
            | masks.function(lambda b, h, q, kv, n: kv < n[b], jnp.array([n], jnp.int32)),
            (1, 2, 300, 300),
        )

    make(7)
    compilations.clear()
    make(9)
    assert not compilations


def test_plans_of_constants_are_not_folded():
    """An array that jit knows as a constant takes XLA minutes otherwise, while it compiles."""
    jaxpr = jax.make_jaxpr(_ranges.in_blocks)(np.ones((1, 1, 128, 128), bool))
    assert jaxpr.eqns[0].primitive.name == "optimization_barrier"


@needs_kernels
@pytest.mark.parametrize("implementation", ["cuda", None])
def test_plans_are_made_by_a_kernel(implementation):
    """One for both passes, which evaluates the function; elsewhere there is none."""
    x = jnp.zeros((B, 200, N, 64), jnp.bfloat16)
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
    (call,) = custom_calls(text, _ffi.PREDICATE_TARGET)
    assert f"(tensor<{B}x1xi32>, tensor<1x1xi32>, tensor<1x1x{B}xi32>)" in call
    hulls, inside = f"tensor<{B}x1x200x2xi32>", f"tensor<{B}x1x4x4xi32>"
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
    mask, _ = value_and_meaning("prefix")
    traced = jax.jit(lambda mask: masks.plan(mask, SHAPE)).trace(mask)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert len(custom_calls(text, _ffi.PREDICATE_TARGET)) == (platform == "cuda")


@needs_kernels
def test_vmap_of_plans():
    """What the mask does not ask for is not mapped, and what it does is a leading axis."""
    x = jnp.zeros((3, B, 70, N, 64), jnp.bfloat16)
    limits = jnp.zeros((3, 5), jnp.int32)

    def attend(x, limits):
        mask = masks.function(lambda b, h, q, kv, n: (q >= kv) | (kv < n[0]), limits)
        return jaxflash.dot_product_attention(x, x, x, mask=mask, implementation="cuda")

    for axes, lead in (((0, None), "1x1"), ((0, 0), "3x1x1"), ((None, 0), "3x1x1")):
        arguments = [a if axis == 0 else a[0] for a, axis in zip((x, limits), axes, strict=True)]
        traced = jax.jit(jax.vmap(attend, axes)).trace(*arguments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        (call,) = custom_calls(text, _ffi.PREDICATE_TARGET)
        assert f"tensor<{lead}x70x2xi32>, tensor<{lead}x70x2xi32>" in call


_LEADS = {
    (T, S): (1, 1), (1, S): (1, 1), (B, 1, T, S): (B, 1), (N, 1, S): (1, N), (B, N, T, 1): (B, N),
    (B, 1, 1, 1): (B, 1), (1,): (1, 1),
}  # fmt: skip


@pytest.mark.parametrize("shape", _LEADS, ids=str)
def test_plans_of_arrays_beside_other_masks(shape):
    """Have the batch axes and the heads that the array has."""
    array = np.random.default_rng(0).random(shape) < 0.5
    for mask in (masks.dense(array) | masks.causal(), ~masks.dense(array)):
        plan = masks.plan(mask, SHAPE)
        assert isinstance(plan, _mask.Planned)
        assert plan.found["rows_hull"].shape == (*_LEADS[shape], T, 2)
        assert plan.found["keys_hull"].shape == (*_LEADS[shape], S, 2)
        assert_equal(lambda f: jax.grad(lambda qkv: sum_of_sines(f, plan, qkv))(random_qkv()))  # noqa: B023


@needs_kernels
@pytest.mark.parametrize("shape", _LEADS, ids=str)
def test_vmap_of_arrays_beside_other_masks(shape):
    x = jax.ShapeDtypeStruct((B, T, N, 64), jnp.bfloat16)
    y = jax.ShapeDtypeStruct((B, S, N, 64), jnp.bfloat16)

    def attend(x, y, array):
        mask = masks.causal() | ~masks.dense(array)
        return jaxflash.dot_product_attention(x, y, y, mask=mask, implementation="cuda")

    def mapped(x, y, array):
        return jax.vmap(attend, (None, None, -1))(x, y, array)

    for function, stacked, lead in ((attend, (), ()), (mapped, (3,), (3,))):
        array = jax.ShapeDtypeStruct((*shape, *stacked), jnp.bool_)
        text = jax.jit(function).trace(x, y, array).lower(lowering_platforms=("cuda",)).as_text()
        (call,) = custom_calls(text, _ffi.PREDICATE_TARGET)
        sizes = "x".join(map(str, (*lead, *_LEADS[shape])))
        assert f"(tensor<{sizes}x{T}x2xi32>, tensor<{sizes}x{S}x2xi32>, " in call


@needs_kernels
def test_plans_are_made_where_they_lie():
    """Each device makes those of its batch elements."""
    mesh = cpu_mesh(b=2, h=2)

    def placed(shape, dtype, spec):
        return jax.device_put(jnp.zeros(shape, dtype), NamedSharding(mesh, spec))

    x = placed((4, 70, N, 16), jnp.float32, P("b", None, "h"))
    limits = placed((4, N), jnp.int32, P("b", "h"))

    def attend(x, limits):
        mask = masks.intervals(0, limits[..., None]) | masks.causal()
        return jaxflash.dot_product_attention(x, x, x, mask=mask, implementation="cuda")

    text = jax.jit(attend).trace(x, limits).lower(lowering_platforms=("cuda",)).compile().as_text()
    (call,) = compiled_custom_calls(text, _ffi.PREDICATE_TARGET)
    assert f"s32[2,{N},70,2]" in call
