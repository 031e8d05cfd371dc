"""Masks as intervals, for the kernels: the keys that each row sees lie in one interval, and so do
the rows that see a key. Segments and packed sequences are such masks; what lies in an interval may
still be of another segment, where ids are not sorted. Of a dense mask and of a predicate they are
the hulls: tiles outside are skipped, inside the score program has the last word.

Everything is linear in the lengths; the layout is that of `Ranges` in cuda/problem.h.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from jaxflash._spec import AttentionSpec, Operands

# cuda/problem.h: kRangeBlock, bits of a word of Ranges::row_visits, kMaxLength.
BLOCK = 64
_WORD = 32
_FAR = 1 << 30


class ElementIntervals(NamedTuple):
    """What the ranges of a call are made of."""

    keys_of_row: Any  # as in Ranges
    rows_of_key: Any
    # Which intervals hold nothing hidden, (*B, T) and (*B, S); None: all of them.
    keys_solid: Any = None
    rows_solid: Any = None
    # Of masks that say so, see `Shown`: (*B, ceil(T / 64), 4) and (*B, ceil(S / 64), 4).
    keys_inside: Any = None
    rows_inside: Any = None
    # Likewise, (*#B, ceil(T / 64), ceil(S / 2048), 2) and (*#B, ceil(S / 64), ceil(T / 2048), 2).
    row_visits: Any = None
    key_visits: Any = None


class Steps(NamedTuple):
    """How ranges are made; the kernels have faster ways."""

    matched: Callable[[Any, Any], ElementIntervals]
    summarised: Callable[[ElementIntervals], tuple[Any, Any, Any]]
    # From the ids: the fields of `Ranges` up to `hulls`.
    of_segments: Callable[[Any, Any], tuple[Any, ...]]


class Ranges(NamedTuple):
    """Of a call with lengths T and S; int32. Intervals are pairs (begin, end)."""

    keys_of_row: Any  # (*B, T, 2)
    rows_of_key: Any  # (*B, S, 2)
    # (*B, ceil(T / 64), 8), of 64 rows: hull, what all of them see, a gap, and as bits of two words
    # which see nothing.
    row_blocks: Any
    key_blocks: Any  # (*B, ceil(S / 64), 8), likewise of 64 keys
    # (*B, 8), hulls: of all rows; of keys that no row sees, of a program's mask those among them
    # alone; of rows that see no key. The last pair: blocks of 64 rows and 64 keys of which rows see
    # something, and how many more lie in the hulls of blocks of rows, outside of their gaps.
    hulls: Any
    row_visits: Any = None  # as in ElementIntervals
    key_visits: Any = None
    query_ids: Any = None  # (*B, T); with ids, equal ones see each other
    key_ids: Any = None  # (*B, S)


def of_call(
    spec: AttentionSpec,
    operands: Operands,
    *masks: Shown,
    steps: Steps | None = None,
    has_visits: bool = True,
) -> Ranges | None:
    """Those of a call's segments or packed sequences, of what its predicate shows and what other
    masks do; or None. Where packed ones have positions, the band of the spec (causal, window) is
    part of the intervals. `steps`: those of this module, or others that do the same. `has_visits`:
    whether visits are wanted."""
    steps = Steps(matched, summarised, of_segments) if steps is None else steps
    if 0 in (*operands.query.shape, *operands.key.shape):
        return None  # nothing to see
    shown = _of_batch(operands, _of_predicate(operands) + masks, has_visits)
    ids = operands.query_segment_ids, operands.key_segment_ids
    if ids[0] is None:
        if shown is None:
            return None
        intervals, ids = shown, ()
    elif operands.query_boundaries is None:
        if ids[0].dtype != jnp.int32:
            ids = _over_batch(_as_ranks, operands)(*ids)
        if shown is None:
            found = steps.of_segments(*ids)
            return Ranges(*found, query_ids=ids[0], key_ids=ids[1])
        intervals = steps.matched(*ids)
        intervals = intervals._replace(
            keys_of_row=_met(intervals.keys_of_row, shown.keys_of_row),
            rows_of_key=_met(intervals.rows_of_key, shown.rows_of_key),
            keys_inside=shown.keys_inside,
            rows_inside=shown.rows_inside,
            row_visits=shown.row_visits,
            key_visits=shown.key_visits,
        )
    else:
        boundaries = operands.query_boundaries, operands.key_boundaries
        if operands.query_positions is None:
            intervals = _over_batch(_of_packed, operands)(*ids, *boundaries)
        else:
            positions = operands.query_positions, operands.key_positions
            banded = functools.partial(_of_packed_band, spec)
            intervals = _over_batch(banded, operands)(*ids, *positions, *boundaries)
        ids = ()  # sequences are intervals
    visits = intervals.row_visits, intervals.key_visits
    summaries = steps.summarised(intervals)
    return Ranges(intervals.keys_of_row, intervals.rows_of_key, *summaries, *visits, *ids)


def _over_batch(for_one: Callable[..., Any], operands: Operands) -> Callable[..., Any]:
    for _ in operands.query.shape[:-3]:
        for_one = jax.vmap(for_one)
    return for_one


class Shown(NamedTuple):
    """What a mask shows."""

    keys_of_row: Any  # (*#B, #N, T, 2), hulls of the keys of each row
    rows_of_key: Any  # (*#B, #N, S, 2)
    keys_inside: Any  # (*#B, #N, ceil(T / 64), 4), of keys that all and none of 64 rows see
    rows_inside: Any  # (*#B, #N, ceil(S / 64), 4)
    # Bits of 32 blocks of 64 keys at a time: of which some of 64 rows see something, and which all
    # of them see as a whole, (*#B, #N, ceil(T / 64), ceil(S / 2048), 2); the lowest bit is the
    # first block's.
    row_visits: Any
    key_visits: Any  # (*#B, #N, ceil(S / 64), ceil(T / 2048), 2), likewise of blocks of 64 rows


def shown_shapes(q_len, kv_len) -> tuple[tuple[Any, ...], ...]:
    """The own shapes of `Shown`."""
    rows, keys = -(-q_len // BLOCK), -(-kv_len // BLOCK)
    row_words, key_words = -(-rows // _WORD), -(-keys // _WORD)
    lengths = (q_len, 2), (kv_len, 2)
    return *lengths, (rows, 4), (keys, 4), (rows, key_words, 2), (keys, row_words, 2)


def _of_predicate(operands: Operands) -> tuple[Shown, ...]:
    if operands.rows_hull is None:
        return ()
    hulls = operands.rows_hull, operands.keys_hull
    inside = operands.rows_inside, operands.keys_inside
    return (Shown(*hulls, *inside, operands.rows_visits, operands.keys_visits),)


def of_dense_mask(operands: Operands) -> tuple[Shown, ...]:
    """What a dense mask shows, on any platform."""
    mask = operands.mask
    if mask is None:
        return ()
    q_len, kv_len = operands.query.shape[-3], operands.key.shape[-3]
    return (of_blocks(*in_blocks(mask), q_len=q_len, kv_len=kv_len),)


def in_blocks(mask):
    """What blocks of a dense mask show, the arguments of `of_blocks`."""
    # Of a constant XLA would compute it while it compiles, which takes two minutes for 4096 x 4096.
    mask = jax.lax.optimization_barrier(mask)
    if 1 not in mask.shape[-2:]:
        return blocks_of_rows(mask)
    some = whole = mask
    for axis in (-1, -2):
        if mask.shape[axis] != 1:
            some, whole = any_of_groups(some, axis, BLOCK), all_of_groups(whole, axis, BLOCK)
    return BlockSummary(whole, ~some, jnp.any(mask, axis=-1), jnp.any(mask, axis=-2))


class BlockSummary(NamedTuple):
    """See `of_blocks`."""

    whole: Any
    empty: Any
    row_sees: Any
    key_is_seen: Any


def blocks_of_rows(sees, first=None) -> BlockSummary:
    """What blocks of rows (..., T, S) show, which begin with the first of a block or, if that
    is given, with number `first` of its 64, which may be traced: then there is a block more."""
    *lead, count, _ = sees.shape
    blocks = -(-count // BLOCK) + (first is not None)

    def by_eights(x):
        """Bools (..., T, n) as bits of eight rows, (..., blocks, 8, n)."""
        amounts = *((0, 0),) * len(lead), (0, BLOCK * blocks - count), (0, 0)
        x = jnp.pad(x, amounts)
        x = x if first is None else jnp.roll(x, first, axis=-2)
        x = x.reshape(*x.shape[:-2], blocks, 8, 8, x.shape[-1])
        return jnp.sum(x.astype(jnp.uint8) << _bits(x.ndim, -2), axis=-2, dtype=jnp.uint8)

    # What blocks show of such bits takes a fraction of the time. A GPU would evaluate what the
    # elements are made of for each of the results.
    eights = jax.lax.optimization_barrier(by_eights(sees))
    exist = by_eights(jnp.ones((*(1,) * len(lead), count, 1), jnp.bool_))
    some = jnp.bitwise_or.reduce(eights, axis=-2) != np.uint8(0)
    every = jnp.bitwise_and.reduce(eights | ~exist, axis=-2) == np.uint8(255)
    of_eight = jnp.bitwise_or.reduce(eights, axis=-1)[..., None]
    row_sees = of_eight >> _bits(of_eight.ndim, -1) & np.uint8(1) != 0
    row_sees = row_sees.reshape(*lead, BLOCK * blocks)
    row_sees = row_sees if first is None else jnp.roll(row_sees, -first, axis=-1)
    return BlockSummary(
        all_of_groups(every, -1, BLOCK),
        ~any_of_groups(some, -1, BLOCK),
        row_sees[..., :count],
        jnp.any(some, axis=-2),
    )


def _bits(rank: int, axis: int):
    """The numbers of eight bits along an axis."""
    shape = [1] * rank
    shape[axis] = 8
    return np.arange(8, dtype=np.uint8).reshape(shape)


def of_blocks(whole, empty, row_sees, key_is_seen, *, q_len, kv_len) -> Shown:
    """What a mask shows, as intervals.

    Args:
        whole: which blocks of 64 rows and 64 keys are visible as a whole, each of the last two axes
            of full extent or 1, for all.
        empty: which are hidden, likewise.
        row_sees: which rows see a key, (..., q_len) or (..., 1).
        key_is_seen: which keys are seen, (..., kv_len) or (..., 1).
        q_len: number of rows.
        kv_len: number of keys.
    """
    rows, keys_inside, row_visits = _of_blocks(whole, empty, row_sees, q_len, kv_len)
    keys, rows_inside, key_visits = _of_blocks(whole.mT, empty.mT, key_is_seen, kv_len, q_len)
    return Shown(rows, keys, keys_inside, rows_inside, row_visits, key_visits)


def all_of_groups(x, axis: int, size: int):
    """Whether all of `size` neighbours along an axis are true; the last ones may be fewer."""
    return jnp.all(_in_groups(x, axis, size, True), axis=axis)


def any_of_groups(x, axis: int, size: int):
    """Whether one of them is."""
    return jnp.any(_in_groups(x, axis, size, False), axis=axis)


def _in_groups(x, axis: int, size: int, padding: bool):
    """Groups come before `axis`, which is counted from the end, and takes what is in them."""
    count = -(-x.shape[axis] // size)
    before, after = x.shape[:axis], x.shape[x.ndim + axis + 1 :]
    amounts = [(0, 0)] * x.ndim
    amounts[axis] = (0, size * count - x.shape[axis])
    return jnp.pad(x, amounts, constant_values=padding).reshape(*before, count, size, *after)


def _of_blocks(whole, empty, sees, length, other_length):
    """(hulls of what each row sees, what lies inside them for blocks of rows, their visits)."""
    count, other_count = (-(-n // BLOCK) for n in (length, other_length))
    axis = whole.ndim - 1
    number = jax.lax.broadcasted_iota(jnp.int32, whole.shape, axis)
    unit = BLOCK if whole.shape[-1] == other_count else other_length

    def interval(begin, end):
        return begin * unit, jnp.minimum(end * unit, other_length)

    def longest_run(x):
        # Up to each block, those since the last one that is none.
        run = number - jax.lax.cummax(jnp.where(x, -1, number), axis=axis)
        longest = jnp.max(run, axis=-1)
        end = jnp.max(jnp.where(run == longest[..., None], number + 1, 0), axis=-1)
        return interval(end - longest, end)

    first = jnp.min(jnp.where(empty, other_count, number), axis=-1)
    last = jnp.max(jnp.where(empty, -1, number), axis=-1)
    hull = jnp.stack(interval(first, last + 1), axis=-1)
    hull = jnp.broadcast_to(hull, (*hull.shape[:-2], count, 2))
    hull = jnp.repeat(hull, BLOCK, axis=-2)[..., :length, :]

    gap = longest_run(empty & (first[..., None] < number) & (number < last[..., None]))
    # Rows that see nothing are no obstacle to a gap of those beside them.
    gap = jnp.where(last < 0, 0, gap[0]), jnp.where(last < 0, _FAR, gap[1])
    inside = jnp.stack((*longest_run(whole), *gap), axis=-1)
    inside = jnp.broadcast_to(inside, (*inside.shape[:-2], count, 4))

    visits = jnp.stack((_words(~empty, other_count), _words(whole, other_count)), axis=-1)
    visits = jnp.broadcast_to(visits, (*visits.shape[:-3], count, *visits.shape[-2:]))
    return jnp.where(sees[..., None], hull, 0), inside, visits


def _words(blocks, count):
    """Bools of `count` blocks, or of one for all, as bits (..., words)."""
    if blocks.shape[-1] != count:
        words = jnp.where(blocks, np.int32(-1), np.int32(0))
        return jnp.broadcast_to(words, (*blocks.shape[:-1], -(-count // _WORD)))
    return _of_bits(_in_groups(blocks, -1, _WORD, False).astype(jnp.int32))


def _of_bits(bits):
    """Words of bits (..., 32), the lowest of which is the first."""
    return jnp.sum(bits << _word_bits(bits.ndim), axis=-1, dtype=jnp.int32)


def unpacked(words):
    """Words (..., n) as bools (..., 32 n), see `Shown`."""
    bits = words[..., None] >> _word_bits(words.ndim + 1) & 1 != 0
    return bits.reshape(*words.shape[:-1], words.shape[-1] * _WORD)


def _word_bits(rank: int):
    """The numbers of a word's bits, along the last axis."""
    return np.arange(_WORD, dtype=np.int32).reshape(*(1,) * (rank - 1), _WORD)


def _of_batch(
    operands: Operands, shown: tuple[Shown, ...], has_visits: bool
) -> ElementIntervals | None:
    """What all of some masks show, of all heads together, without that axis: since the kernels read
    ranges of every batch element."""
    if not shown:
        return None
    batch = operands.query.shape[:-3]
    *hulls, keys_inside, rows_inside, row_visits, key_visits = zip(*shown, strict=True)
    hulls = [_joined(functools.reduce(_met, of), axis=-3) for of in hulls]
    insides = [
        _common_inside(functools.reduce(_met_inside, of), axis=-3)
        for of in (keys_inside, rows_inside)
    ]
    keys, rows, keys_inside, rows_inside = (
        jnp.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (*hulls, *insides)
    )
    intervals = ElementIntervals(keys, rows, keys_inside=keys_inside, rows_inside=rows_inside)
    if not has_visits:
        return intervals
    visits = (
        _joined_visits(functools.reduce(jnp.bitwise_and, of), axis=-4)
        for of in (row_visits, key_visits)
    )
    return intervals._replace(**dict(zip(("row_visits", "key_visits"), visits, strict=True)))


def _met(intervals, others):
    """What intervals share with others."""
    begin = jnp.maximum(intervals[..., 0], others[..., 0])
    end = jnp.minimum(intervals[..., 1], others[..., 1])
    shares = begin < end
    return jnp.stack((jnp.where(shares, begin, 0), jnp.where(shares, end, 0)), axis=-1)


def _met_inside(inside, others):
    """What two masks together show to all, and the longer of their gaps."""
    (whole, gap), (other_whole, other_gap) = (jnp.split(x, 2, axis=-1) for x in (inside, others))
    is_longer = gap[..., 1:] - gap[..., :1] >= other_gap[..., 1:] - other_gap[..., :1]
    gap = jnp.where(is_longer, gap, other_gap)
    return jnp.concatenate((_met(whole, other_whole), gap), axis=-1)


def _common_inside(inside, axis: int):
    """What both intervals of several heads share."""
    if inside.shape[axis] == 1:
        return jnp.squeeze(inside, axis)
    begin, end = jnp.max(inside[..., ::2], axis=axis), jnp.min(inside[..., 1::2], axis=axis)
    return jnp.stack((begin, end), axis=-1).reshape(*begin.shape[:-1], 4)


def _joined_visits(visits, axis: int):
    """Of several heads the blocks that some of them visit, and those that all see as a whole."""
    if visits.shape[axis] == 1:
        return jnp.squeeze(visits, axis)
    # Bit by bit: over devices that share the heads, words have maxima, but no unions.
    bits = visits[..., None] >> _word_bits(visits.ndim + 1) & 1
    some, whole = jnp.max(bits[..., 0, :], axis), jnp.min(bits[..., 1, :], axis)
    return _of_bits(jnp.stack((some, whole), axis=-2))


def _joined(intervals, axis: int):
    """The hull of intervals along an axis; empty ones are (0, 0)."""
    if intervals.shape[axis] == 1:
        return jnp.squeeze(intervals, axis)
    begin, end = intervals[..., 0], intervals[..., 1]
    axis += 1
    first = jnp.min(jnp.where(begin < end, begin, _FAR), axis=axis)
    last = jnp.max(end, axis=axis)
    return jnp.stack((jnp.where(last > 0, first, 0), last), axis=-1)


def _as_ranks(query_ids, key_ids):
    """Ids of 64 bits as their rank among the keys: -1 for those that no key has."""
    order = jnp.sort(key_ids)
    key_ids, query_ranks = ranks(order, key_ids), ranks(order, query_ids)
    known = order[jnp.minimum(query_ranks, order.shape[0] - 1)] == query_ids
    return jnp.where(known, query_ranks, -1), key_ids


def matched(query_ids, key_ids) -> ElementIntervals:
    """Of segments, ids (*B, T) and (*B, S) of int32."""

    def for_one(query_ids, key_ids):
        keys, keys_solid = _matches(query_ids, key_ids)
        rows, rows_solid = _matches(key_ids, query_ids)
        return ElementIntervals(keys, rows, keys_solid, rows_solid)

    for _ in range(query_ids.ndim - 1):
        for_one = jax.vmap(for_one)
    return for_one(query_ids, key_ids)


def _matches(ids, others):
    """Of each id an interval of `others` that holds its equals, (n, 2), and whether all in it are
    such. It is the smallest one if no two ids are a multiple of twice the number of `others` apart.
    """
    if is_partly_explicit(ids):
        return _sorted_matches(ids, others)
    # A table of as many buckets, by the remainder of the id, because a GPU sorts 4096 ids in 27 us.
    count = others.shape[0]
    number = jnp.arange(count, dtype=jnp.int32)
    bucket = others % (2 * count)
    table = jnp.full((2 * count, 4), jnp.iinfo(jnp.int32).max, jnp.int32)
    least = jnp.stack((number, ~number, others, ~others), axis=-1)  # ~x falls where x rises
    table = table.at[bucket].min(least, mode="promise_in_bounds")
    amount = jnp.zeros(2 * count, jnp.int32).at[bucket].add(1, mode="promise_in_bounds")
    bucket = ids % (2 * count)
    first, last, low, high = jnp.unstack(table[bucket], axis=-1)
    last, high = ~last, ~high  # in an empty bucket below the first ones
    is_shared = low < high
    found = jnp.where(is_shared, True, low == ids) & (first <= last)
    solid = ~found | (~is_shared & (amount[bucket] == last + 1 - first))
    interval = jnp.stack((jnp.where(found, first, 0), jnp.where(found, last + 1, 0)), axis=-1)
    return interval, solid


def _sorted_matches(ids, others):
    order = jnp.argsort(others, stable=True).astype(jnp.int32)
    ordered = others[order]
    first, end = (ranks(ordered, ids, side) for side in ("left", "right"))
    last = others.shape[0] - 1
    begin = order[jnp.minimum(first, last)]
    stop = order[jnp.maximum(end - 1, 0)] + 1
    found = end > first
    interval = jnp.stack((jnp.where(found, begin, 0), jnp.where(found, stop, 0)), axis=-1)
    return interval.astype(jnp.int32), ~found | (stop - begin == end - first)


def is_partly_explicit(x) -> bool:
    """Whether scatters and scans under `jax.vmap` fail: on explicit meshes, and inside a
    `shard_map` over some axes of a mesh."""
    axis_types = set(jax.typeof(x).sharding.mesh.axis_types)
    is_partly_manual = AxisType.Manual in axis_types and len(axis_types) > 1
    return AxisType.Explicit in axis_types or is_partly_manual


def ranks(ordered, ids, side: str = "left"):
    """Where ids stand in an ordered array, int32."""
    # Elsewhere the scan is what was measured.
    method = "sort" if is_partly_explicit(ids) else "scan_unrolled"
    return jnp.searchsorted(ordered, ids, side=side, method=method).astype(jnp.int32)


def _of_packed(query_ids, key_ids, query_boundaries, key_boundaries) -> ElementIntervals:
    keys = _present(query_ids, *_bounds(query_ids, key_boundaries, key_ids.shape[0]))
    rows = _present(key_ids, *_bounds(key_ids, query_boundaries, query_ids.shape[0]))
    return ElementIntervals(keys, rows)


def _of_packed_band(
    spec: AttentionSpec, query_ids, key_ids, query_positions, key_positions, *boundaries
) -> ElementIntervals:
    query_boundaries, key_boundaries = boundaries
    left, right = (_FAR if side is None else min(side, _FAR) for side in (spec.left, spec.right))
    # Row i of a sequence has the position of its first row plus i, which may be shifted.
    first_row = query_boundaries[jnp.maximum(key_ids, 0)]
    shift = query_positions[jnp.clip(first_row, 0, query_ids.shape[0] - 1)]
    keys = _within(query_ids, key_boundaries, query_positions, left, right, key_ids.shape[0])
    rows = _within(
        key_ids,
        query_boundaries,
        key_positions - shift,
        right,
        left,
        query_ids.shape[0],
    )
    return ElementIntervals(keys, rows)


def _within(ids, boundaries, positions, before: int, after: int, length: int):
    """The interval of a sequence's elements at positions - before ... positions + after."""
    begin, end = _bounds(ids, boundaries, length)
    # No sum leaves int32: positions and sides are below 2^30 in size.
    first = jnp.clip(positions - before, 0, _FAR)
    last = jnp.clip(positions + after, -1, _FAR)
    return _present(
        ids, begin + jnp.minimum(first, end - begin), jnp.minimum(begin + last + 1, end)
    )


def _bounds(ids, boundaries, length: int):
    """Where the sequences of ids begin and end."""
    sequence = jnp.maximum(ids, 0)
    return (jnp.clip(boundaries[sequence + i], 0, length) for i in (0, 1))


def _present(ids, begin, end):
    """Intervals, those of no sequence and empty ones as (0, 0)."""
    sees = (ids >= 0) & (begin < end)
    return jnp.stack((jnp.where(sees, begin, 0), jnp.where(sees, end, 0)), axis=-1)


def summarised(intervals: ElementIntervals) -> tuple[Any, Any, Any]:
    """(row_blocks, key_blocks, hulls) of `Ranges`, as cuda/ranges.cu makes them."""
    solid = jnp.ones((), jnp.bool_)

    def for_one(intervals: ElementIntervals):
        keys, rows, keys_solid, rows_solid, keys_inside, rows_inside, row_visits, _ = intervals
        row_blocks = _blocks(keys, solid if keys_solid is None else keys_solid)
        key_blocks = _blocks(rows, solid if rows_solid is None else rows_solid)
        begin, end = jnp.min(row_blocks[:, 0]), jnp.max(row_blocks[:, 1])
        # Zeros that are split over an explicit mesh as `begin` is.
        walk = (begin * 0,) * 2
        hidden_keys = _hidden(rows) if keys_inside is None else _hidden(rows, begin, end)
        if keys_inside is not None and row_visits is not None:
            walk = _count_walk(row_blocks[:, :2], keys_inside[:, 2:], row_visits[..., 0])
        hulls = jnp.stack((begin, end, *hidden_keys, *_hidden(keys), *walk))
        row_blocks = _with_inside(row_blocks, keys_inside, _hidden_words(keys))
        key_blocks = _with_inside(key_blocks, rows_inside, _hidden_words(rows))
        return row_blocks, key_blocks, hulls

    *batch, _, _ = intervals.keys_of_row.shape
    if intervals.row_visits is not None:
        own = intervals.row_visits.shape[len(batch) :]
        visits = jnp.broadcast_to(intervals.row_visits, (*batch, *own))
        intervals = intervals._replace(row_visits=visits, key_visits=None)
    for _ in batch:
        for_one = jax.vmap(for_one)
    return for_one(intervals)


def of_segments(query_ids, key_ids) -> tuple[Any, ...]:
    """Intervals and summaries of segments, ids (*B, T) and (*B, S) of int32."""
    intervals = matched(query_ids, key_ids)
    return intervals.keys_of_row, intervals.rows_of_key, *summarised(intervals)


def _hidden(intervals, begin: Any = 0, end: Any = _FAR):
    """The hull of elements of begin ... end whose intervals are empty."""
    number = jnp.arange(intervals.shape[0], dtype=jnp.int32)
    is_hidden = (number >= begin) & (number < end) & (intervals[:, 0] >= intervals[:, 1])
    first = jnp.min(jnp.where(is_hidden, number, _FAR))
    return first, jnp.max(jnp.where(is_hidden, number + 1, 0))


def _hidden_words(intervals):
    """A bit for each interval that is empty, two words for 64 of them."""
    is_hidden = intervals[:, 0] >= intervals[:, 1]
    return _of_bits(_in_groups(is_hidden, -1, BLOCK, False).reshape(-1, 2, _WORD).astype(jnp.int32))


def _count_walk(hulls, gaps, visits):
    """The last pair of `Ranges.hulls`, of blocks of rows."""
    shown = unpacked(visits)
    block = jax.lax.broadcasted_iota(jnp.int32, shown.shape, 1)
    is_inside = (hulls[:, :1] < (block + 1) * BLOCK) & (block * BLOCK < hulls[:, 1:])
    in_gap = (gaps[:, :1] <= block * BLOCK) & ((block + 1) * BLOCK <= gaps[:, 1:])
    visited = is_inside & shown
    left_out = is_inside & ~shown & ~in_gap
    # In float32: 2^31 blocks are few.
    sums = (jnp.minimum(jnp.sum(x, dtype=jnp.float32), _FAR) for x in (visited, left_out))
    return tuple(x.astype(jnp.int32) for x in sums)


def _blocks(intervals, solid):
    """(hull begin, hull end, common begin, common end) of blocks of intervals, (ceil(n / 64), 4).
    An empty interval is not part of the hull and has nothing in common with others, and nor has one
    that is not solid."""
    begin, end = intervals[:, 0], intervals[:, 1]
    empty = begin >= end
    shared = ~empty & solid

    def reduced(values, neutral, reduce):
        count = -(-values.shape[0] // BLOCK)
        padding = (0, count * BLOCK - values.shape[0])
        padded = jnp.pad(values, padding, constant_values=neutral)
        return reduce(padded.reshape(count, BLOCK), axis=1)

    return jnp.stack(
        (
            reduced(jnp.where(empty, _FAR, begin), _FAR, jnp.min),
            reduced(jnp.where(empty, 0, end), 0, jnp.max),
            reduced(jnp.where(shared, begin, _FAR), 0, jnp.max),
            reduced(jnp.where(shared, end, 0), _FAR, jnp.min),
        ),
        axis=-1,
    )


def _with_inside(blocks, inside, hidden):
    """Blocks of intervals, their common parts cut to what a mask shows to all, with its gaps and
    what is hidden."""
    hulls, common = jnp.split(blocks, 2, axis=-1)
    if inside is None:
        whole, gap = common, hulls[..., 1:].repeat(2, axis=-1)  # an empty one
    else:
        whole, gap = jnp.split(inside, 2, axis=-1)
    return jnp.concatenate((hulls, _met(common, whole), gap, hidden), axis=-1)
