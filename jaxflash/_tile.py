"""One tile of the logits for the blockwise path: where it lies, who sees whom, what it contains.

Arrays are brought to the rank of the grouped logits (*B, K, G, T, S), G = N // K query heads per
key head, with size 1 where an axis does not matter; no leading axis is ever merged with another,
so that each keeps its sharding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxflash import _dropout, _ranges
from jaxflash._loops import Block, Blocks, Visits, cut
from jaxflash._mask import INT32_MAX
from jaxflash._sizes import is_one
from jaxflash._spec import AttentionSpec, Operands, compute_dtype
from jaxflash._tile_scores import GroupedSizes, Indices, Place, TileScores


class Tile(NamedTuple):
    """Where a tile (*B, K, G, rows, columns) lies, and who sees whom in it."""

    rows: Block
    columns: Block
    place: Place | None  # for score program and predicate, if there is one
    visible: Any  # bool, broadcastable to the tile, or None: everything is
    seen: Any  # bool (*#B, #K, columns), the keys that a row sees, or None: all
    kept: Any  # bool, what dropout keeps, or None: everything

    def hide(self, x, value):
        return x if self.visible is None else jnp.where(self.visible, x, value)

    def drop(self, x):
        return x if self.kept is None else jnp.where(self.kept, x, 0.0)

    def hide_keys(self, x):
        """Zero for the keys (axis -2 of `x`, (*B, K, columns, dim)) that no row of the tile sees:
        a product with probability 0 would let their NaN through.
        """
        return x if self.seen is None else jnp.where(self.seen[..., None], x, 0)


class Tiles:
    """Computes tiles. Everything here is one pass over O(T) or O(S) data, or a slice of what the
    caller passed.

    The step from scores (scaled products) to logits is `logits`, a function of JAX: the passes let
    JAX differentiate it tile by tile, any number of times, and know nothing of its content.
    """

    def __init__(self, spec: AttentionSpec, operands: Operands, rows: Blocks, columns: Blocks):
        self._spec = spec
        self._rows, self._columns = rows, columns
        self._batch = operands.query.shape[:-3]
        self._kv_heads = operands.key.shape[-2]
        self._group = operands.query.shape[-2] // self._kv_heads
        self._rank = len(self._batch) + 4
        self.dtype = compute_dtype(operands.query.dtype)

        self._mask = None if operands.mask is None else _grouped(operands.mask, operands)
        self._q_len = self._per_batch(operands.query_seq_lengths)
        self._kv_len = self._per_batch(operands.key_value_seq_lengths)
        self._q_ids = self._per_row(operands.query_segment_ids)
        self._kv_ids = self._per_column(operands.key_segment_ids)
        self._seed = operands.dropout_seed
        self._first_element = operands.first_element

        self._scores = None
        if spec.program is not None:
            fixed = {i: x for i, x in enumerate(operands.captures) if _is_fixed(x)}
            self._scores = TileScores(spec.program, sizes_of(operands), self.dtype, fixed)
        self._predicate = None
        if spec.predicate is not None:
            captures = dict(enumerate(operands.mask_captures))
            self._predicate = TileScores(spec.predicate, sizes_of(operands), self.dtype, captures)

        # Sides beyond int32 limit nothing.
        self._left, self._right = (
            None if side is None or side >= INT32_MAX else side for side in (spec.left, spec.right)
        )
        self._q_positions = self._per_row(operands.query_positions)
        self._kv_positions = self._per_column(operands.key_positions)
        self._offset = 0
        if spec.bottom_right:
            self._offset = columns.length - rows.length
            if self._q_len is not None or self._kv_len is not None:
                q_len = rows.length if self._q_len is None else self._q_len.clip(0, rows.length)
                kv_len = columns.length
                if self._kv_len is not None:
                    kv_len = self._kv_len.clip(0, kv_len)
                self._offset = kv_len - q_len
        # Where there is something to be left out, the blocks that hold what rows (keys) see. Of
        # lengths that are symbolic there are no ranges.
        self._columns_of = self._rows_of = self._shown = None
        counts = rows.count, columns.count
        if all(isinstance(count, int) for count in counts) and counts != (1, 1):
            ranges = _ranges.of_call(spec, operands, *_ranges.of_dense_mask(operands))
            if ranges is not None:
                self._columns_of = _blocks_of(ranges.keys_of_row, rows, columns)
                self._rows_of = _blocks_of(ranges.rows_of_key, columns, rows)
                # A gap lies between two blocks.
                if ranges.row_visits is not None and max(counts) > 2:
                    self._shown = _shown_tiles(ranges.row_visits, rows, columns)
        # How many blocks hold a row or a key of any sequence.
        self.row_count = _count_up_to(operands.query_seq_lengths, rows)
        self.column_count = _count_up_to(operands.key_value_seq_lengths, columns)
        # Positions bound no loop: they may be batched by vmap, and a loop with them.
        has_positions = self._q_positions is not None or self._kv_positions is not None
        self._static_band = not isinstance(self._offset, jax.Array) and not has_positions
        # The least and the most that positions of rows exceed their numbers by; None: unknown.
        self._offsets = (self._offset, self._offset) if self._static_band else None
        has_band = (self._left, self._right) != (None, None)
        if has_band and not has_positions and not self._static_band:
            self._offsets = -largest(-self._offset), largest(self._offset)

    @property
    def every_row_sees(self) -> bool:
        """Whether each row is known to see a key, whose logit then is a number unless an operand
        has none."""
        others = (self._scores, self._predicate, self._mask, self._q_len, self._kv_len, self._q_ids)
        sizes = (self._rows.length, self._columns.length, self._offset)
        if not self._static_band or any(x is not None for x in others):
            return False
        if not all(isinstance(n, int) for n in sizes):
            return False
        num_rows, num_columns, offset = sizes
        # The first row's last key, the last row's first one, and one between the two of each row.
        return (
            (self._right is None or offset + self._right >= 0)
            and (self._left is None or num_rows - 1 + offset - self._left < num_columns)
            and (self._left is None or self._right is None or self._left + self._right >= 0)
        )

    def columns_seen_by(self, rows: Block) -> Visits:
        """The column blocks in which these rows may see something."""
        begin, end = 0, self.column_count
        if self._offsets is not None and not is_one(self._columns.count):
            begin, end = _blocks_met(rows, self._offsets, self._left, self._right, self._columns)
        end = _smaller(end, self.column_count)
        number = rows.fresh // rows.size
        begin, end = _within(begin, end, self._columns_of, number)
        return _visits(begin, end, None if self._shown is None else self._shown[number])

    def rows_seeing(self, columns: Block) -> Visits:
        """The row blocks that may see something of these columns."""
        begin, end = 0, self.row_count
        if self._offsets is not None and not is_one(self._rows.count):
            least, most = self._offsets
            begin, end = _blocks_met(columns, (-most, -least), self._right, self._left, self._rows)
        end = _smaller(end, self.row_count)
        number = columns.fresh // columns.size
        begin, end = _within(begin, end, self._rows_of, number)
        return _visits(begin, end, None if self._shown is None else self._shown[:, number])

    def at(self, rows: Block, columns: Block, *, fresh_rows: bool) -> Tile:
        """The tile of these rows and columns.

        Args:
            rows: where it lies.
            columns: where it lies; columns before its `fresh` are invisible.
            fresh_rows: whether the rows before `rows.fresh` are invisible too.
        """
        difference = self._position_difference(rows, columns)
        place = None
        if self._scores is not None or self._predicate is not None:
            indices = Indices(
                *self._batch_and_head_numbers(),
                self._row_numbers(rows),
                self._column_numbers(columns),
                difference if self._asks_for_distance else None,
            )
            place = Place(rows.start, columns.start, rows.size, columns.size, indices)
        visible = self._visible(rows, columns, difference, fresh_rows, place)
        kept = self._kept(rows, columns) if self._spec.dropout_rate > 0.0 else None
        seen = None if visible is None else self._seen(rows, columns, visible, fresh_rows)
        return Tile(rows, columns, place, visible, seen, kept)

    def captured(self, captures: dict[str, Any], tile: Tile) -> dict[str, Any]:
        """What a tile reads of the arrays of `captures_of`, or of tangents of theirs: for each a
        tuple of arrays that broadcast to the tile."""
        scores, place = self._scores, tile.place
        if scores is None or place is None:
            return {}
        return {name: scores.read(_number(name), x, place) for name, x in captures.items()}

    def add(self, name: str, total, tile: Tile, reads):
        """The transpose of `captured` for one capture, added to `total`, shaped like it."""
        assert self._scores is not None
        assert tile.place is not None
        return self._scores.add(_number(name), total, tile.place, reads)

    def logits(self, scores, captured: dict[str, Any], tile: Tile):
        """The logits of a tile, meaningless where not visible; no derivative there is NaN.

        Args:
            scores: scale * q k^T, (*B, K, G, rows, columns).
            captured: what the method `captured` returns, of all of `captures_of`.
            tile: where the tile lies.
        """
        if self._scores is None or tile.place is None:
            return scores
        reads = {_number(name): x for name, x in captured.items()}
        return self._scores.logits(scores, reads, tile.place, tile.visible)

    def _position_difference(self, rows: Block, columns: Block):
        """Query position minus key position, int32. It overflows for invisible elements only."""
        if self._left is None and self._right is None and not self._asks_for_distance:
            return None
        if self._q_positions is None:
            row = self._row_numbers(rows) + self._offset
        else:
            row = cut(self._q_positions, rows, -2)
        if self._kv_positions is None:
            column = self._column_numbers(columns)
        else:
            column = cut(self._kv_positions, columns, -1)
        return row - column

    @property
    def _asks_for_distance(self) -> bool:
        return self._scores is not None and self._scores.asks_for_distance

    def _visible(self, rows: Block, columns: Block, difference, fresh_rows: bool, place):
        row, column = self._row_numbers(rows), self._column_numbers(columns)
        terms = []
        if self._columns.ragged:
            terms.append(column >= columns.fresh)
        if self._rows.ragged and fresh_rows:
            terms.append(row >= rows.fresh)
        if self._left is not None:
            terms.append(difference <= self._left)
        if self._right is not None:
            terms.append(difference >= -self._right)
        if self._q_len is not None:
            terms.append(row < self._q_len)
        if self._kv_len is not None:
            terms.append(column < self._kv_len)
        if self._q_ids is not None:
            terms.append(cut(self._q_ids, rows, -2) == cut(self._kv_ids, columns, -1))
        if self._mask is not None:
            terms.append(cut(cut(self._mask, rows, -2), columns, -1))
        if self._predicate is not None:
            terms.append(self._predicate.holds(place))
        if not terms:
            return None
        visible = terms[0]
        for term in terms[1:]:
            visible = visible & term
        # Both block axes in full, so that reductions over them need not know what broadcasts.
        return jnp.broadcast_to(visible, (*visible.shape[:-2], rows.size, columns.size))

    def _seen(self, rows: Block, columns: Block, visible, fresh_rows: bool):
        others = (self._q_len, self._kv_len, self._q_ids, self._mask, self._predicate)
        if not self._static_band or any(x is not None for x in others):
            return jnp.any(visible, axis=(-3, -2))
        # Of a band, the first and the last row know, and nothing is summed over rows.
        column = self._column_numbers(columns)
        first = (rows.fresh if fresh_rows else rows.start) + self._offset
        last = rows.start + (rows.size - 1) + self._offset
        seen = column >= columns.fresh
        if self._left is not None:
            seen &= first - column <= self._left
        if self._right is not None:
            seen &= last - column >= -self._right
        return seen[..., 0, 0, :]

    def _kept(self, rows: Block, columns: Block):
        rank = self._rank
        batch, head = self._batch_and_head_numbers()
        return _dropout.keep(
            self._seed,
            self._spec.dropout_rate,
            batch=batch,
            head=head,
            row=self._row_numbers(rows).reshape((1,) * (rank - 2) + (rows.size, 1)),
            first_column=columns.start,
            num_columns=columns.size,
        )

    def _batch_and_head_numbers(self):
        nb = len(self._batch)
        batch = self._iota(0, 1)
        for axis, extent in enumerate(self._batch):
            batch = batch * extent + self._iota(axis, extent)
        if self._first_element is not None:
            batch = batch + self._first_element
        head = self._iota(nb, self._kv_heads) * self._group + self._iota(nb + 1, self._group)
        return batch, head

    def _row_numbers(self, rows: Block):
        return self._iota(self._rank - 2, rows.size) + rows.start

    def _column_numbers(self, columns: Block):
        return self._iota(self._rank - 1, columns.size) + columns.start

    def _iota(self, axis: int, extent: int):
        shape = [1] * self._rank
        shape[axis] = extent
        return jax.lax.broadcasted_iota(jnp.int32, shape, axis)

    def _per_batch(self, x):
        return None if x is None else x[..., None, None, None, None]

    def _per_row(self, x):
        return None if x is None else x[..., None, None, :, None]

    def _per_column(self, x):
        return None if x is None else x[..., None, None, None, :]


def captures_of(spec: AttentionSpec, operands: Operands) -> dict[str, Any]:
    """The captures with a gradient, by name, as `Tiles` wants them."""
    if spec.program is None:
        return {}
    dtype = compute_dtype(operands.query.dtype)
    scores = TileScores(spec.program, sizes_of(operands), dtype, {})
    return {
        name: scores.prepared(_number(name), x)
        for name, x in operands.named().items()
        if name.startswith("captures[") and not _is_fixed(x)
    }


def sizes_of(operands: Operands) -> GroupedSizes:
    *batch, q_len, q_heads, _ = operands.query.shape
    kv_len, kv_heads = operands.key.shape[-3:-1]
    is_part = operands.first_element is not None
    return GroupedSizes(tuple(batch), kv_heads, q_heads // kv_heads, q_len, kv_len, is_part)


def _number(name: str) -> int:
    """3 for captures[3]."""
    return int(name.removeprefix("captures[").removesuffix("]"))


def _is_fixed(x) -> bool:
    """Whether a capture has no gradient; None stands for one that has, and is not here."""
    return x is not None and not jnp.issubdtype(x.dtype, jnp.floating)


def _grouped(x, operands: Operands):
    """(*#B, #N, #T, #S) with N split into (K, G)."""
    *batch, heads, q_len, kv_len = x.shape
    kv_heads = operands.key.shape[-2]
    split = (1, 1) if heads == 1 else (kv_heads, heads // kv_heads)
    return x.reshape(*batch, *split, q_len, kv_len)


@jax.custom_batching.custom_vmap
def largest(lengths):
    """Over all sequences, those that vmap maps over included: one loop runs for all of them."""
    return jnp.max(lengths)


@largest.def_vmap
def _(axis_size, mapped, lengths):
    return largest(lengths), False


def _count_up_to(lengths, blocks: Blocks):
    """How many blocks hold one of the first elements that the sequences have."""
    if lengths is None or 0 in lengths.shape or is_one(blocks.count):
        return blocks.count
    longest = jnp.clip(largest(lengths), 0, blocks.length)
    return (longest + (blocks.size - 1)) // blocks.size


@jax.custom_batching.custom_vmap
def _largest_of_all(x):
    """The largest, element by element, of all that `vmap` maps over: one loop runs for all."""
    return x


@_largest_of_all.def_vmap
def _(axis_size, mapped, x):
    return _largest_of_all(jnp.max(x, axis=0)), False


def _blocks_of(intervals, blocks: Blocks, others: Blocks):
    """(begin, end) of the blocks of `others` that hold the intervals of each block's elements, in
    all batch elements together, (count) each; None where there is no more than one.

    Args:
        intervals: (*B, length, 2), elements of `others` for each of those of `blocks`.
        blocks: of the elements that have intervals.
        others: of what the intervals are of.
    """
    if is_one(others.count):
        return None
    begin, end = intervals[..., 0], intervals[..., 1]
    lead = tuple(range(begin.ndim - 1))
    begin = jnp.max(jnp.where(begin < end, -begin, -others.length), axis=lead)
    begin, end = -_largest_of_all(begin), _largest_of_all(jnp.max(end, axis=lead))
    starts = jnp.arange(blocks.count, dtype=jnp.int32) * blocks.size
    starts = jnp.minimum(starts, blocks.length - blocks.size)
    elements = starts[:, None] + jnp.arange(blocks.size, dtype=jnp.int32)[None, :]
    first, last = jnp.min(begin[elements], axis=1), jnp.max(end[elements], axis=1)
    return first // others.size, (last + (others.size - 1)) // others.size


def _within(begin, end, of_blocks, number):
    """A range of blocks without what lies outside of that of block `number`."""
    if of_blocks is None:
        return begin, end
    first, last = (x[number] for x in of_blocks)
    return jnp.maximum(begin, first), jnp.minimum(end, last)


def _visits(begin, end, shown) -> Visits:
    """Those of a range of blocks that are shown, (count), or all of them."""
    if shown is None:
        return Visits(begin, end)
    number = np.arange(shown.shape[0], dtype=np.int32)
    visited = shown & (number >= begin) & (number < end)
    numbers = jnp.sort(jnp.where(visited, number, number.size))
    return Visits(0, jnp.sum(visited, dtype=jnp.int32), numbers)


def _shown_tiles(visits, rows: Blocks, columns: Blocks):
    """Of which tiles any batch element's visits show something, (rows.count, columns.count)."""
    shown = _ranges.unpacked(visits[..., 0])
    shown = jnp.any(shown, axis=tuple(range(shown.ndim - 2))).astype(jnp.float32)
    shown = _largest_of_all(shown)
    of_rows, of_columns = (
        _holding(x, count) for x, count in zip((rows, columns), shown.shape, strict=True)
    )
    return of_rows @ shown @ of_columns.T > 0


def _holding(blocks: Blocks, count: int):
    """Whether each block holds something of each of `count` blocks of 64 elements, as float32."""
    starts = np.minimum(np.arange(blocks.count) * blocks.size, blocks.length - blocks.size)
    first, last = starts // _ranges.BLOCK, (starts + blocks.size - 1) // _ranges.BLOCK
    number = np.arange(count)[None]
    return ((first[:, None] <= number) & (number <= last[:, None])).astype(np.float32)


def _smaller(x, y):
    """The smaller count; a number where both are."""
    return min(x, y) if isinstance(x, int) and isinstance(y, int) else jnp.minimum(x, y)


def _blocks_met(block: Block, offsets, before, after, others: Blocks):
    """(begin, end) of the blocks of `others` that meet positions first + least - before ...
    last + most + after of a block first ... last, (least, most) = `offsets`. Written so that no sum
    leaves int32.
    """
    least, most = offsets
    begin, end = 0, others.count
    if before is not None:
        begin = (jnp.maximum(block.start + least, before) - before) // others.size
    if after is not None:
        last = jnp.minimum(block.start + (block.size - 1) + most, others.length - 1 - after)
        end = (last + after) // others.size + 1
    return begin, end
