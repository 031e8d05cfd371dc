"""What kernels make of masks, predicates and segments: custom calls on arrays with leading axes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxflash import _dense_mask, _ranges
from jaxflash._ffi import (
    DENSE_MASK_TARGET,
    PREDICATE_TARGET,
    RANGE_SUMMARY_TARGET,
    SEGMENT_MATCHES_TARGET,
    SEGMENT_RANGES_TARGET,
    band_attributes,
    mesh_axes_of,
    of_all_or_each,
    result_type,
)
from jaxflash._kernel_program import KernelPredicate
from jaxflash._sizes import is_one
from jaxflash._spec import AttentionSpec

# cuda/problem.h: bytes of MaskBlock.
_MASK_BLOCK_BYTES = 24
# cuda/problem.h: bytes of SegmentBucket, two for each row and key.
_SEGMENT_BYTES = 2 * 20
# cuda/problem.h: of RangeSummaryParams::walks, for each block of rows.
_WALK_BYTES = 8


class BatchCall:
    """A custom call on arrays with leading axes of the same number, along which it may be split.

    They have the same sizes, or 1 where an operand `broadcasts`.
    """

    # The axes of each operand and result behind the leading ones, none of which is split.
    operand_axes: tuple[tuple[str, ...], ...]
    result_axes: tuple[tuple[str, ...], ...]
    broadcasts = False

    def call(self, *operands) -> tuple[Any, ...]:
        """The custom call itself."""
        raise NotImplementedError

    def lead(self, operands) -> list[tuple]:
        """(extent, mesh axes) of each leading axis, of the operands that do not broadcast there."""
        rank = operands[0].ndim - len(self.operand_axes[0])
        parts = [mesh_axes_of(x) for x in operands]
        axes = []
        for axis in range(rank):
            sizes = [x.shape[axis] for x in operands]
            full = next((n for n in sizes if not is_one(n)), 1)
            names = (part[axis] for part, n in zip(parts, sizes, strict=True) if n == full)
            axes.append((full, next(filter(None, names), None)))
        return axes

    def _call(
        self, target: str, operands, results, workspace=None, **attributes
    ) -> tuple[Any, ...]:
        """`results`: shapes behind the leading axes, and dtypes. `workspace`: bytes, of one."""
        axes = self.lead(operands)
        lead, mesh_axes = [n for n, _ in axes], [part for _, part in axes]
        split = (x for x in operands if any(mesh_axes_of(x)))
        like = next(split, operands[0])
        types = [
            result_type(like, (*lead, *own), dtype, [*mesh_axes, *(None for _ in own)])
            for own, dtype in results
        ]
        if workspace is not None:
            types.append(result_type(like, (math.prod(lead) * workspace,), jnp.uint8, [None]))
        found = jax.ffi.ffi_call(target, types)(*operands, **attributes)
        return tuple(found[: len(results)])


# cuda/problem.h: the arrays of MaskIntervals.
_INTERVAL_AXES = (
    ("row", "pair"),
    ("key", "pair"),
    ("rowblock", "four"),
    ("keyblock", "four"),
    ("rowblock", "keywords", "pair"),
    ("keyblock", "rowwords", "pair"),
)


def _intervals(q_len, kv_len):
    return [(own, jnp.int32) for own in _ranges.shown_shapes(q_len, kv_len)]


@dataclasses.dataclass(frozen=True)
class ReadMask(BatchCall):
    """Of a mask (*B, rows, keys) words along the keys or the rows, and intervals in a call of such
    lengths: see DenseMaskParams in cuda/problem.h."""

    q_len: Any
    kv_len: Any
    packs_keys: bool
    operand_axes = (("row", "key"),)

    @property
    def result_axes(self):
        words = ("group", "row", "sharer") if self.packs_keys else ("group", "key")
        return (words, *_INTERVAL_AXES)

    def call(self, *operands):
        rows, keys = operands[0].shape[-2:]
        words = _dense_mask.word_shape(rows, keys, "forward" if self.packs_keys else "backward")
        return self._call(
            DENSE_MASK_TARGET,
            operands,
            [(words, jnp.uint32), *_intervals(self.q_len, self.kv_len)],
            _range_blocks(rows) * _range_blocks(keys) * _MASK_BLOCK_BYTES,
            packs_keys=np.bool_(self.packs_keys),
        )


@dataclasses.dataclass(frozen=True)
class EvaluatePredicate(BatchCall):
    """Of a predicate and the band of a spec intervals in a call of such lengths: see
    PredicateParams in cuda/problem.h. Leading axes are (*batch, query heads); operands are numbers
    of batch elements and of heads, and captures."""

    spec: AttentionSpec
    predicate: KernelPredicate
    q_len: Any
    kv_len: Any
    capture_axes: tuple[str, ...]  # what indexes the axes of the first captures: `Program.axes`
    result_axes = _INTERVAL_AXES
    broadcasts = True

    @property
    def operand_axes(self):
        ranks = enumerate(self.predicate.capture_ranks)
        captures = (tuple(f"c{i}x{axis}" for axis in range(rank)) for i, rank in ranks)
        return ((), (), *captures)

    def lead(self, operands):
        *batch, (heads, part) = super().lead(operands)
        # A capture that heads index is split as they are.
        for x, axes in zip(operands[2:], self.capture_axes, strict=False):
            own = mesh_axes_of(x)[len(batch) + 1 :]
            of_heads = (p for p, axis in zip(own, axes, strict=True) if axis == "N")
            part = part or next(of_heads, None)
        return [*batch, (heads, None if is_one(heads) else part)]

    def call(self, *operands):
        row_blocks, key_blocks = _range_blocks(self.q_len), _range_blocks(self.kv_len)
        return self._call(
            PREDICATE_TARGET,
            operands,
            _intervals(self.q_len, self.kv_len),
            # A byte for each block, and a bit for each row and key.
            row_blocks * key_blocks + (row_blocks + key_blocks) * (_ranges.BLOCK // 8),
            program=self.predicate.source,
            **band_attributes(self.spec),
            capture_ranks=np.array(self.predicate.capture_ranks, np.int64),
        )


@dataclasses.dataclass(frozen=True)
class MatchSegments(BatchCall):
    """`_ranges.matched` of ids (*B, T) and (*B, S), int32."""

    operand_axes = (("row",), ("key",))
    result_axes = (("row", "pair"), ("key", "pair"), ("row",), ("key",))

    def call(self, *operands):
        rows, keys = (x.shape[-1] for x in operands)
        return self._call(
            SEGMENT_MATCHES_TARGET,
            operands,
            [
                ((rows, 2), jnp.int32),
                ((keys, 2), jnp.int32),
                ((rows,), jnp.bool_),
                ((keys,), jnp.bool_),
            ],
            (rows + keys) * _SEGMENT_BYTES,
        )


@dataclasses.dataclass(frozen=True)
class SummariseRanges(BatchCall):
    """`_ranges.summarised` of intervals of which these are given."""

    has_solid: bool
    has_inside: bool
    has_visits: bool
    broadcasts = True
    result_axes = (("rowblock", "eight"), ("keyblock", "eight"), ("eight",))

    @property
    def operand_axes(self):
        solid = (("row",), ("key",)) if self.has_solid else ()
        inside = (("rowblock", "four"), ("keyblock", "four")) if self.has_inside else ()
        visits = (("rowblock", "keywords", "pair"),) if self.has_visits else ()
        return (("row", "pair"), ("key", "pair"), *solid, *inside, *visits)

    def call(self, *operands):
        rows, keys = (x.shape[-2] for x in operands[:2])
        lead = [n for n, _ in self.lead(operands)]
        operands = [
            of_all_or_each(x, lead)
            if self.has_visits and i == len(operands) - 1
            else jnp.broadcast_to(x, (*lead, *x.shape[len(lead) :]))
            for i, x in enumerate(operands)
        ]
        return self._call(
            RANGE_SUMMARY_TARGET,
            operands,
            _summaries(rows, keys),
            _range_blocks(rows) * _WALK_BYTES,
            has_solid=np.bool_(self.has_solid),
            has_inside=np.bool_(self.has_inside),
            has_visits=np.bool_(self.has_visits),
        )


@dataclasses.dataclass(frozen=True)
class SegmentRanges(BatchCall):
    """Intervals and summaries of ids (*B, T) and (*B, S), int32: `MatchSegments` and
    `SummariseRanges` at once."""

    operand_axes = (("row",), ("key",))
    result_axes = (("row", "pair"), ("key", "pair"), *SummariseRanges.result_axes)

    def call(self, *operands):
        rows, keys = (x.shape[-1] for x in operands)
        return self._call(
            SEGMENT_RANGES_TARGET,
            operands,
            [((rows, 2), jnp.int32), ((keys, 2), jnp.int32), *_summaries(rows, keys)],
            # Buckets, and a byte for whether an interval is solid.
            (rows + keys) * (_SEGMENT_BYTES + 1),
        )


def _summaries(rows, keys):
    shapes = (_range_blocks(rows), 8), (_range_blocks(keys), 8), (8,)
    return [(own, jnp.int32) for own in shapes]


def _range_blocks(length):
    return -(-length // _ranges.BLOCK)
