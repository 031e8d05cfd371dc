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
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxflash
import mask_values
from jaxflash import _api, _dense_mask, _ffi, _kernels, _mask, _ranges, _scores, _spec, masks
from jaxprs import compiled_custom_calls, custom_calls, equations
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


# ---- Mask arrays ---------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize(
    ("shape", "capture"),
    [
        ((B, N, 16, 40), "tensor<2x4x1x16x4xui32>"),
        ((1, 1, 16, 40), "tensor<1x1x16x4xui32>"),
        ((B, 1, 1, 40), "tensor<2x1x4xui32>"),
        ((1, 1, 16, 1), "tensor<1x16xi1>"),
        ((1, 1, 1, 1), "tensor<1xi1>"),
    ],
)
def test_masks_are_captures(shape, capture):
    """Of the axes that they have, after the captures of the program and before the sink; of 128
    keys four words."""
    x = jnp.zeros((B, 16, N, 16), jnp.float32)
    keys = jnp.zeros((B, 40, N, 16), jnp.float32)

    def attend(x, mask, sink):
        return jaxflash.dot_product_attention(
            x, keys, keys, mask=mask, sink=sink, logits_soft_cap=3.0, implementation="cuda"
        )

    traced = jax.jit(attend).trace(x, jnp.ones(shape, bool), jnp.ones(N, jnp.float32))
    (forward,) = custom_calls(
        traced.lower(lowering_platforms=("cuda",)).as_text(), _ffi.FORWARD_TARGET
    )
    hulls = f"tensor<{B}x16x2xi32>, tensor<{B}x40x2xi32>"  # of every batch element
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
    _check_shown([np.asarray(x) for x in read.shown], mask, q_len, kv_len)


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
    (call,) = compiled_custom_calls(text, _ffi.DENSE_MASK_TARGET)
    words = part.rsplit(",", 2)[0] + ",1,64,4"
    assert f"u32[{words}]" in call
    assert "all-gather" not in text


@needs_kernels
@pytest.mark.parametrize(
    ("shape", "spec", "lead"),
    [
        ((64, 64), P(), "1"),
        ((4, 1, 64, 64), P("b"), "2"),
        ((1, N, 64, 64), P(None, "h"), f"1,{N // 2}"),
        ((4, N, 64, 64), P("b", "h"), f"2,{N // 2}"),
    ],
)
def test_arrays_beside_other_masks_are_read_where_they_lie(shape, spec, lead):
    """By the passes, of heads, too; the plan is of those that an array has, on each device."""
    mesh = cpu_mesh(b=2, h=2)
    query = jnp.zeros((4, 64, N, 16), jnp.float32)
    query = jax.device_put(query, NamedSharding(mesh, P("b", None, "h")))
    array = jax.device_put(jnp.zeros(shape, jnp.bool_), NamedSharding(mesh, spec))

    def gradient(q, array):
        mask = masks.causal() | ~masks.dense(array)
        loss = functools.partial(
            sum_of_sines, jaxflash.dot_product_attention, mask, implementation="cuda"
        )
        return jax.grad(lambda q: loss((q, q, q)))(q)

    traced = jax.jit(gradient).trace(query, array)
    text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    for target in (_ffi.FORWARD_TARGET, _ffi.BACKWARD_TARGET):
        (call,) = compiled_custom_calls(text, target)
        assert f"pred[{lead},64,64]" in call.split("operand_layout_constraints=")[1]
    (call,) = compiled_custom_calls(text, _ffi.PREDICATE_TARGET)
    batch, *heads = lead.split(",")
    assert f"s32[{batch},{N if heads else 1},64,2]" in call
    assert ("all-gather" in text) == bool(heads)


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
        (call,) = compiled_custom_calls(text, target)
        assert "s32[2,64,2]" in call
        if target == summary:
            assert "s32[2,1,8]" in call
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
        calls = compiled_custom_calls(text, target)
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
    return _ranges.ElementIntervals(*hulls, *solid, *inside)


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

    (call,) = custom_calls(lowered(keys), _ffi.RANGE_SUMMARY_TARGET)
    assert "tensor<2x3x128x2xi32>, tensor<2x3x70x2xi32>, tensor<2x3x128xi1>" in call
    assert "tensor<2x3x2x8xi32>" in call


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
