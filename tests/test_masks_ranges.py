"""What kernels and the blockwise path know of a mask: what rows and keys see, which tiles they
visit, and which of these need no test."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxflash
import mask_values
from jaxflash import _api, _derivatives, _passes, _plan, _ranges, _tile, masks
from mask_values import MASK_VALUES
from small_calls import SHAPE, B, H, N, S, T, random_qkv, value_and_meaning

pytestmark = pytest.mark.usefixtures("accurate_products", "quick_compilation")

# Where the plan of a function is made.
_ON_PATHS = pytest.mark.parametrize("path", ["xla", pytest.param("cuda", marks=pytest.mark.gpu)])


def _described(mask, path="xla", **options):
    """(spec, operands) with what every pass of a call shares."""
    shape = options.pop("shape", (B, N, 200, 330))
    batch, heads, q_len, kv_len = shape
    query, key = (
        jnp.zeros((batch, length, n, H), jnp.float32)
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
    shape = (B, N, 200, 330)
    mask, visible = value_and_meaning(name, shape)
    spec, operands = _described(mask, path, shape=shape)
    widest = np.broadcast_shapes(operands.rows_hull.shape[:2], operands.keys_hull.shape[:2])
    asks_for_batch = (visible != visible[:1]).any()
    asks_for_heads = (visible != visible[:, :1]).any()
    if operands.query_seq_lengths is None and operands.query_segment_ids is None:
        assert widest == (B if asks_for_batch else 1, N if asks_for_heads else 1)
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
    _check_hidden(ranges)
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
            _, _, begin, end, gap_begin, gap_end, *_ = blocks[batch, number]
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


def _check_hidden(ranges) -> None:
    """The last two words of a block say of each element whether its interval is empty."""
    of_rows, of_keys = (
        (ranges.keys_of_row, ranges.row_blocks),
        (ranges.rows_of_key, ranges.key_blocks),
    )
    for intervals, blocks in (of_rows, of_keys):
        is_empty = np.asarray(intervals[..., 0] >= intervals[..., 1])
        words = np.asarray(blocks)[..., -2:].reshape(*is_empty.shape[:-1], -1)
        np.testing.assert_array_equal(_bits(words, is_empty.shape[-1]), is_empty)


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


# ---- Tiles that are visited ----------------------------------------------------------------------


def _left_out(blocks, visits, others: int) -> int:
    """Of 64 x 64, those between visited ones that no gap tells of."""
    count = 0
    bits = _bits(np.asarray(visits)[..., 0], -(-others // 64))
    for of_rows, shown in zip(np.concatenate(blocks), np.concatenate(bits), strict=True):
        begin, end, _, _, gap_begin, gap_end, *_ = of_rows
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


# ---- Segments, several parts, and what none sees -------------------------------------------------


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


def test_unseen_rows_and_keys():
    """What a mask hides from all is known to the kernels."""
    mask = masks.function(lambda b, h, q, kv: (kv >= 5) & ((h < 2) | (q < 7)) & (q != kv))
    mask &= np.arange(S) != 9
    q, k, v = random_qkv()
    spec, operands = _api.described(q, k, v, mask=mask)
    operands = _plan.with_plan(spec, operands, _plan.shown)
    visible = np.asarray(masks.as_array(mask, SHAPE))
    keys = np.any(visible, (1, 2))[..., None, None]
    ranges = _ranges_of(spec, operands)
    seen = np.asarray(ranges.rows_of_key)[..., 0] < np.asarray(ranges.rows_of_key)[..., 1]
    np.testing.assert_array_equal(seen, keys[..., 0, 0])
    assert np.any(visible, (1, 3)).all()
    blocks = -(-T // 64) * -(-S // 64)
    hulls = [0, S, 0, 10, 2**30, 0, blocks, 0]
    np.testing.assert_array_equal(ranges.hulls, np.tile(hulls, (B, 1)))
