"""Mask functions of the distance alone, which become bands, and dilated ones, which become calls by
classes of positions."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxflash
from jaxflash import _api, _mask, _tile, masks
from marks import needs_kernels
from meshes import cpu_mesh
from small_calls import (
    ATTENTIONS,
    ORDERS,
    B,
    H,
    N,
    assert_equal,
    random_qkv,
    sum_of_sines,
    value_and_meaning,
)

pytestmark = pytest.mark.usefixtures("accurate_products", "quick_compilation")


# ---- Bands ---------------------------------------------------------------------------------------

# Functions and what they are a multiple of.
_BANDS = {
    "causal": (1, lambda b, h, q, kv: q >= kv),
    "window": (1, lambda b, h, q, kv: (kv > q - 5) & (kv <= q)),
    "both sides": (1, lambda b, h, q, kv: abs(q - kv) < 7),
    "chosen": (1, lambda b, h, q, kv: jnp.where(q >= kv, q - kv < 5, False)),
    "branches": (1, lambda b, h, q, kv: jax.lax.cond(q >= kv, lambda: q - kv < 5, lambda: False)),
    "cases": (
        1,
        lambda b, h, q, kv: jax.lax.switch(
            jnp.sign(q - kv) + 1, [lambda: kv - q < 3, lambda: True, lambda: q - kv < 6]
        ),
    ),
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
    query, key = (jax.ShapeDtypeStruct((1, n, 1, H), jnp.float32) for n in (q_len, kv_len))
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


# ---- Dilated masks -------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("transform", [*ORDERS, "vmap", "checkpoint"])
def test_transformed_calls_in_classes(transform):
    """Of a dilated mask, each class of positions is computed on its own."""
    mask, _ = value_and_meaning("every-fourth", (B, N, 64, 80))
    qkv = random_qkv(q_len=64, kv_len=80)
    assert _api.described(*qkv, mask=mask)[0].dilation == 4

    def transformed(attention, mask, qkv):
        def loss(qkv):
            return sum_of_sines(attention, mask, qkv)

        if transform in ORDERS:
            return ORDERS[transform](loss, qkv)
        if transform == "vmap":
            stacked = tuple(jnp.stack([x, -x], axis=2) for x in qkv[:2])
            return jax.vmap(lambda q, k: jax.grad(loss)((q, k, qkv[2])), 2)(*stacked)
        return jax.grad(jax.checkpoint(loss))(qkv)

    assert_equal(transformed, mask, qkv)


def test_plans_of_dilated_masks():
    """Are of use where more than distances matters, and no calls in classes have one."""
    qkv = random_qkv(q_len=16, kv_len=16)
    mask = masks.plan(masks.function(lambda b, h, q, kv: (q - kv) % 4 == 0), (B, N, 16, 16))
    assert isinstance(mask, _mask.Planned)
    assert mask.found
    for options in ({}, {"sink": jnp.ones(N)}):
        spec, operands = _api.described(*qkv, mask=mask, **options)
        assert (spec.dilation, operands.rows_hull is None) == ((1, False) if options else (4, True))
        ours, theirs = (attention(*qkv, mask=mask, **options) for attention in ATTENTIONS)
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


@needs_kernels
def test_classes_are_split_by_heads():
    """Those of a dilated mask lie between the positions and the heads, which are split."""
    mask = masks.causal() & masks.function(lambda b, h, q, kv: (q - kv) % 4 == 0)
    x = jax.device_put(
        jnp.zeros((4, 64, N, 16), jnp.float32),
        NamedSharding(cpu_mesh(b=2, h=2), P("b", None, "h")),
    )
    loss = functools.partial(sum_of_sines, jaxflash.dot_product_attention, implementation="cuda")
    traced = jax.jit(jax.grad(lambda x: loss(mask, (x, x, x)))).trace(x)
    text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
        assert collective not in text
    assert f"f32[2,16,{4 * N // 2},16]" in text
