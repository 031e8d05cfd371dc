"""Masks in programs of the kernels: memory, operands of the custom calls, what each device has, and
the kernels that make ranges."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxflash
from jaxflash import _ffi, _kernels, _mask, _ranges, masks
from jaxprs import custom_calls, equations
from marks import needs_kernels
from meshes import cpu_mesh
from small_calls import B, N, sum_of_sines, value_and_meaning

pytestmark = pytest.mark.usefixtures("accurate_products", "quick_compilation")


# ---- Programs ------------------------------------------------------------------------------------


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
    x = jnp.zeros((B, 64, N, 64), jnp.bfloat16)
    table, sink = jnp.zeros((N, 5), jnp.float32), jnp.zeros(N, jnp.float32)
    ids = jnp.zeros((B, 64), jnp.int32)

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
    hulls = f"tensor<{B}x64x2xi32>, tensor<{B}x64x2xi32>, "
    own = f"tensor<1x{B}x64xi32>, tensor<{B}x64xi32>, tensor<1xi32>"
    for pass_, array in masks_of.items():
        (call,) = (line for line in text.splitlines() if f"@jaxflash_{pass_}_v" in line)
        assert f"tensor<1x{N}x5xf32>, {array}, {own}, tensor<1x{N}xf32>, {hulls}" in call, call
    assert len(custom_calls(text, _ffi.PREDICATE_TARGET)) == 1  # for both passes


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


# ---- Several devices -----------------------------------------------------------------------------


@needs_kernels
def test_sharded_programs_of_the_kernels_gather_nothing():
    mask, _ = value_and_meaning("documents-causal", (4, N, 64, 64))
    mesh = cpu_mesh(b=2, h=2)
    shape = jnp.zeros((4, 64, N, 16), jnp.float32)
    x = jax.device_put(shape, NamedSharding(mesh, P("b", None, "h")))
    loss = functools.partial(sum_of_sines, jaxflash.dot_product_attention, implementation="cuda")
    traced = jax.jit(jax.grad(lambda x: loss(mask, (x, x, x)))).trace(x)
    text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
        assert collective not in text
    assert f"f32[2,64,{N // 2},16]" in text


@needs_kernels
@pytest.mark.parametrize(
    ("shape", "spec", "part"),
    [((4, 1, 64, 70), P("b"), "2,1,64,70"), ((4, N, 64, 70), P("b", "h"), f"2,{N // 2},64,70")],
)
def test_arrays_are_read_where_they_lie(shape, spec, part):
    """Each device reads its part of a mask array, and has its bits alone."""
    mesh = cpu_mesh(b=2, h=2)

    def zeros(shape, dtype, spec):
        return jax.device_put(jnp.zeros(shape, dtype), NamedSharding(mesh, spec))

    query = zeros((4, 64, N, 16), jnp.float32, P("b", None, "h"))
    key = zeros((4, 70, N, 16), jnp.float32, P("b", None, "h"))
    attend = functools.partial(jaxflash.dot_product_attention, implementation="cuda")
    traced = jax.jit(lambda q, k, mask: attend(q, k, k, mask=mask)).trace(
        query, key, zeros(shape, jnp.bool_, spec)
    )
    text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    (call,) = (x for x in text.splitlines() if "custom-call(" in x and _ffi.DENSE_MASK_TARGET in x)
    words = part.rsplit(",", 2)[0] + ",1,64,4"
    assert f"u32[{words}]" in call
    assert "all-gather" not in text


@needs_kernels
@pytest.mark.parametrize("name", ["segments", "array", "segments and array"])
def test_ranges_are_made_where_they_lie(name):
    """Each device makes those of its sequences, and nothing is gathered for that."""
    mesh = cpu_mesh(b=2, h=2)

    def zeros(shape, dtype, spec):
        return jax.device_put(jnp.zeros(shape, dtype), NamedSharding(mesh, spec))

    query = zeros((4, 64, N, 16), jnp.float32, P("b", None, "h"))
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
    ("lead", "spec"), [((4, 1), P("b")), ((1, 1), P()), ((1, N), P(None, "h"))], ids=str
)
def test_visits_are_split(lead, spec):
    """Of long calls; an array of all sequences is of all on each device, too, and nothing is
    gathered."""
    mesh, length = cpu_mesh(b=2, h=2), 2048

    def zeros(shape, dtype, spec):
        return jax.device_put(jnp.zeros(shape, dtype), NamedSharding(mesh, spec))

    query = zeros((4, length, N, 16), jnp.bfloat16, P("b", None, "h"))
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


# ---- Kernels that make ranges --------------------------------------------------------------------


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
