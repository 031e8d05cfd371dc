"""The passes of the kernels as custom calls, a class for each, which `_partition` asks how to split
it."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxflash import _batch_axes, _distance, _ranges
from jaxflash import _extension as extension
from jaxflash._ffi import (
    BACKWARD_TARGET,
    FORWARD_TARGET,
    PAGED_TARGET,
    TANGENT_TARGET,
    UNLIMITED,
    band_attributes,
    mesh_axes_of,
    of_all_or_each,
    result_type,
)
from jaxflash._kernel_program import KernelGradients, KernelProgram, split_by_heads
from jaxflash._sizes import is_one
from jaxflash._spec import AttentionSpec, Operands

# cuda/problem.h: kKeyTerms, kDistanceTerms.
_KEY_TERMS = {None: -1, "key": -2, "distance": -3}
# cuda/common/workspace.h: kWorkspaceRows.
_WORKSPACE_ROWS = 128

# Elements of a head's scores from which on a second kernel is worth its launch, which takes 2 to
# 4 us: 1.6 % of a forward pass of 4 x 2048 queries, 16 heads of 128.
_LEAST_WALK = 1 << 22

# Axes of the arrays of ranges, in their order: t and s are the lengths.
_RANGES = (
    ("t", "cpair"),
    ("s", "cpair"),
    ("crowblock", "csix"),
    ("ckeyblock", "csix"),
    ("ceight",),
)
# Those that follow of a mask that a score program knows, and of ids.
_VISITS = (("crowblock", "ckeywords", "cpair"), ("ckeyblock", "crowwords", "cpair"))
_IDS = (("t",), ("s",))


class MaskKind(NamedTuple):
    """cuda/problem.h: MaskKind, with the axes of its arrays of ranges: t and s lengths, the others
    of their own."""

    number: int = 0
    axes: tuple[tuple[str, ...], ...] = ()
    walks: bool = False  # see `may_walk`; then there are visits

    @classmethod
    def of(cls, ranges: _ranges.Ranges | None, is_of_program: bool) -> MaskKind:
        """`is_of_program`: whether a score program hides something, which the ranges know."""
        if ranges is None:
            return cls()
        has_ids, walks = ranges.query_ids is not None, ranges.row_visits is not None
        axes = _RANGES + (_VISITS if walks else ()) + (_IDS if has_ids else ())
        return cls(1 + has_ids + 2 * is_of_program, axes, walks)

    @property
    def dense(self) -> tuple[bool, ...]:
        """See `Pass`."""
        return tuple(axes not in _VISITS for axes in self.axes)


def may_walk(q_len, kv_len) -> bool:
    """Whether calls of such lengths may have kernels that visit all that a score program shows and
    nothing else, see Walked in cuda/common/walked_mask.cuh."""
    is_known = isinstance(q_len, int) and isinstance(kv_len, int)
    return not is_known or q_len * kv_len >= _LEAST_WALK


class GivenLengths(tuple):
    """Which of (query lengths, key/value lengths) are given."""

    def __new__(cls, query: bool, key_value: bool):
        return super().__new__(cls, (query, key_value))

    @classmethod
    def of(cls, operands: Operands):
        return cls(
            operands.query_seq_lengths is not None, operands.key_value_seq_lengths is not None
        )


def _attributes(spec: AttentionSpec, lengths: GivenLengths, mask: MaskKind) -> dict:
    return dict(
        **band_attributes(spec),
        scale=np.float32(spec.scale),
        highest_precision=np.bool_(spec.highest_precision),
        has_q_lengths=np.bool_(lengths[0]),
        has_kv_lengths=np.bool_(lengths[1]),
        mask=np.int64(mask.number),
        walks=np.bool_(mask.walks),
    )


def _program_attributes(program: KernelProgram | None, query, value) -> dict:
    return dict(
        program="" if program is None else program.source,
        unit_slope=np.bool_(program is None or program.unit_slope),
        bounded=np.bool_(program is not None and program.bounded),
        head_dim=np.int64(query.shape[-1]),
        value_dim=np.int64(value.shape[-1]),
        dtype=query.dtype.name,
        capture_ranks=np.array(() if program is None else program.capture_ranks, np.int64),
    )


def _start_capture(program: KernelProgram | None) -> np.int64:
    if program is not None and program.start_capture is not None:
        return np.int64(program.start_capture)
    return np.int64(_KEY_TERMS[program.key_terms if program is not None else None])


def _gradient_attributes(gradients: KernelGradients | None) -> dict:
    numbers = [x.numbers for x in (() if gradients is None else gradients.loads)]
    return dict(
        gradient_program="" if gradients is None else gradients.source,
        gradient_loads=np.array(numbers, np.int64).reshape(-1),
        key_sums=np.int64(0 if gradients is None else gradients.key_sums),
    )


class Pass:
    """One kernel pass: its custom call, and the axes of its arrays by name.

    `operand_axes` and `result_axes` name the trailing axes of each array: t, s lengths, n query
    heads, k key/value heads, h, v head sizes, c3x1 axis 1 of capture 3. Leading (batch) axes come
    before them, but for the operands `unbatched`, which have none.
    """

    operand_axes: tuple[Sequence[str], ...]
    result_axes: tuple[Sequence[str], ...]
    # For each result its last batch axes: whether it is summed over them, and of size 1 there.
    result_sums: tuple[tuple[bool, ...], ...]
    # The operands whose gradients the last results are.
    captures: tuple[int, ...] = ()
    # Which operands the kernel reads densely: never of size 1 in a batch axis of full extent.
    dense: tuple[bool, ...]

    def __init__(
        self,
        spec: AttentionSpec,
        lengths: GivenLengths,
        program: KernelProgram | None,
        mask: MaskKind,
        operand_axes: tuple[Sequence[str], ...],
        dense: tuple[bool, ...],
        unbatched: frozenset[int] = frozenset(),
        gradients: KernelGradients | None = None,
    ):
        self.spec, self.dilation = _distance.of_class(spec), spec.dilation
        self.lengths = lengths
        self.program = program
        self.mask = mask
        self.operand_axes, self.dense = operand_axes, dense
        self.unbatched = unbatched
        # Whether operands before the captures tell the numbers by which the program knows batch
        # elements and heads, which a shard or a mapped call cannot count itself.
        self.numbered = program is not None and (
            program.numbered or (gradients is not None and gradients.numbered)
        )
        # Whether those of heads are 0, 1 ... on each device, which has their part of captures.
        self._counts_own_heads = False
        self._head_numbers = len(operand_axes) + 1
        if program is not None:
            numbers = ("", "n") if self.numbered else ()
            if numbers:
                self.unbatched = unbatched | {self._head_numbers}
            split = split_by_heads(program, gradients)
            self._counts_own_heads = self.numbered and any(axis is not None for axis in split)
            captures = (
                tuple("n" if axis == of_heads else f"c{i}x{axis}" for axis in range(rank))
                for i, (rank, of_heads) in enumerate(zip(program.capture_ranks, split, strict=True))
            )
            self.operand_axes = (*operand_axes, *numbers, *captures, *mask.axes)
            self.dense = (
                *dense,
                *(False,) * (len(numbers) + len(program.capture_ranks)),
                *mask.dense,
            )

    def call(self, *operands):
        """The custom call, in the body of what splits it over devices."""
        if self.dilation == 1:
            return self._with_few_axes(operands)
        batch_rank = operands[0].ndim - len(self.operand_axes[0])
        classes = [_distance.into_heads(x, batch_rank, self.dilation) for x in operands]
        results = self._with_few_axes(classes)
        return tuple(_distance.out_of_heads(x, batch_rank, self.dilation) for x in results)

    def _with_few_axes(self, operands) -> tuple:
        """The custom call; where kernels would count too many batch axes, of copies of operands,
        and with gradients that are added up here."""
        batch = self.full_batch(operands)
        rank = len(batch)
        if rank <= _batch_axes.MAX_COUNT:
            return self._call(*operands)
        # Ranges are of all batch elements, or of each.
        last = len(operands) - len(self.mask.axes)
        batched = [i for i in range(last) if i not in self.unbatched]
        sums = self.full_sums(rank)
        first = len(sums) - len(self.captures)
        shapes = [operands[i].shape for i in batched]
        for i, summed in zip(self.captures, sums[first:], strict=True):
            of_batch = (1 if one else n for n, one in zip(batch, summed, strict=True))
            shapes.append((*of_batch, *operands[i].shape[rank:]))
        leads = _batch_axes.merged(shapes, batch)

        operands = list(operands)
        copied = _batch_axes.with_lead([operands[i] for i in batched], leads[: len(batched)])
        for i, x in zip(batched, copied, strict=True):
            operands[i] = x
        fewer_sums = [
            tuple(one and is_one(n) for one, n in zip(summed, lead, strict=True))
            for summed, lead in zip(sums[first:], leads[len(batched) :], strict=True)
        ]
        kernel = copy.copy(self)
        kernel.result_sums = (*sums[:first], *fewer_sums)
        results = list(kernel._call(*operands))
        for i in range(first, len(results)):
            left = [a for a in range(rank) if sums[i][a] and not kernel.result_sums[i][a]]
            if left:
                results[i] = jnp.sum(results[i], left, keepdims=True)
        return tuple(results)

    def _call(self, *operands):
        """The custom call itself, of a band without dilation."""
        raise NotImplementedError

    def __hash__(self):
        return hash((type(self), self._static()))

    def __eq__(self, other):
        return type(self) is type(other) and self._static() == other._static()

    def _static(self) -> tuple:
        return self.spec, self.dilation, self.lengths, self.program, self.mask

    def of_device(self, operands) -> list[Any]:
        """A device's part of operands as `call` takes them."""
        operands = list(operands)
        if self._counts_own_heads:
            # A constant: on explicit meshes an operation would ask for a sharding, too late.
            operands[self._head_numbers] = np.arange(operands[0].shape[-2], dtype=np.int32)
        return operands

    def full_sums(self, batch_rank: int) -> tuple[tuple[bool, ...], ...]:
        """`result_sums` for all batch axes: those that `vmap` has added are not summed over."""
        return tuple((False,) * (batch_rank - len(sums)) + sums for sums in self.result_sums)

    def full_batch(self, operands) -> tuple:
        """Batch extents: those of the operands that do not broadcast."""
        return tuple(size for size, _ in self._batch_axes(operands))

    def result(self, operands, like, trailing, dtype):
        """The type of a result (*batch, *trailing), sharded and varying as `like` does."""
        axes = self._batch_axes(operands)
        batch_rank = len(axes)
        mesh_axes = [part for _, part in axes] + list(mesh_axes_of(like)[batch_rank:])
        shape = (*(size for size, _ in axes), *trailing)
        return result_type(like, shape, dtype, mesh_axes[: len(shape)])

    def result_of_rows(self, operands, value) -> tuple:
        """The types of out and lse, or of their tangents, for values like `value`."""
        query = operands[0]
        rows = query.shape[-3:-1]
        return (
            self.result(operands, query, (*rows, value.shape[-1]), query.dtype),
            self.result(operands, query, rows, jnp.float32),
        )

    def _with_visits(self, operands):
        """Operands as the custom call has them: visits of all batch elements, or of each."""
        if not self.mask.walks:
            return operands
        batch = self.full_batch(operands)
        first = len(operands) - len(self.mask.axes)
        return [
            x if i < first or self.mask.dense[i - first] else of_all_or_each(x, batch)
            for i, x in enumerate(operands)
        ]

    def _batch_axes(self, operands) -> list[tuple]:
        """(extent, mesh axes) of each batch axis, taken from an operand that does not broadcast."""
        batch_rank = operands[0].ndim - len(self.operand_axes[0])
        axes = []
        for axis in range(batch_rank):
            candidates = [
                (x.shape[axis], mesh_axes_of(x)[axis])
                for i, x in enumerate(operands)
                if i not in self.unbatched
            ]
            axes.append(next((c for c in candidates if c[0] != 1), candidates[0]))
        return axes


class Forward(Pass):
    def __init__(self, spec, lengths, program, mask):
        num_lengths = sum(lengths)
        axes = ("tnh", "skh", "skv", *("",) * num_lengths)
        dense = (False,) * 3 + (True,) * num_lengths
        super().__init__(spec, lengths, program, mask, axes, dense)
        self.result_axes = ("tnv", "tn")
        self.result_sums = ((), ())

    def _call(self, *operands):
        return self._forward(FORWARD_TARGET, operands, operands[2], paged=False)

    def _forward(self, target: str, operands, value, paged: bool):
        """`value`: whose trailing axes are those of the values."""
        query = operands[0]
        shared_units = self._shared_units(operands, value, paged)
        workspace = self._workspace_bytes(operands, value, shared_units)
        results = (
            *self.result_of_rows(operands, value),
            result_type(query, (workspace,), jnp.uint8, [None]),
        )
        out, lse, _ = jax.ffi.ffi_call(target, results)(
            *self._with_visits(operands),
            problem=_attributes(self.spec, self.lengths, self.mask),
            **_program_attributes(self.program, query, value),
            shared_units=np.int64(shared_units or 0),
            sizes=self._call_sizes(operands, paged),
            start_capture=_start_capture(self.program),
        )
        return out, lse

    def _shared_units(self, operands, value, paged: bool) -> int | None:
        """See cuda/common/key_shares.h; None for a plain call, whose kernels are chosen when they
        run."""
        if self.program is None:
            return None
        q_len = operands[0].shape[-3]
        # Of a symbolic length, which may be any: kernels for many queries.
        if not isinstance(q_len, int):
            return 2 if paged else 0
        # Of a symbolic batch as for many sequences, among which only few queries share.
        sizes = self._sizes(operands, value, q_len, symbolic_batch=64)
        return extension.shared_units(**sizes, paged=paged)

    def _call_sizes(self, operands, paged: bool) -> np.ndarray:
        """cuda/problem.h: CallSizes. Kernels of plain calls are chosen when they run, those for
        pages have one tile."""
        if self.program is None or paged:
            return np.zeros(0, np.int64)
        q_len, q_heads, _ = operands[0].shape[-3:]
        kv_len, kv_heads, _ = operands[2].shape[-3:]
        sizes = (math.prod(self.full_batch(operands)), q_len, kv_len, q_heads, kv_heads)
        starts_shared = False
        if self.program.start_capture is not None and all(isinstance(n, int) for n in sizes):
            first = len(operands) - len(self.mask.axes) - len(self.program.capture_ranks)
            shape = operands[first + self.program.start_capture].shape
            batch_rank = operands[0].ndim - 3
            starts_shared = math.prod(shape[:batch_rank]) == 1 and not self.program.start_of_batch
        known = (n if isinstance(n, int) else 0 for n in sizes)
        return np.array([*known, starts_shared, self.program.sequences], np.int64)

    def _workspace_bytes(self, operands, value, shared_units: int | None) -> int:
        # Where a size is symbolic, what is enough for every value: one sequence needs as much as
        # any number, all rows of a tile are in use from 64 or, without groups, 128 queries on.
        q_len = operands[0].shape[-3]
        q_lens = (q_len,) if isinstance(q_len, int) else (64, 128)
        sizes = (self._sizes(operands, value, rows, symbolic_batch=1) for rows in q_lens)
        return max(extension.forward_workspace_bytes(**x, shared_units=shared_units) for x in sizes)

    def _sizes(self, operands, value, q_len: int, symbolic_batch: int) -> dict[str, Any]:
        query = operands[0]
        batch, kv_len = math.prod(self.full_batch(operands)), value.shape[-3]
        sides = _attributes(self.spec, self.lengths, self.mask)
        return dict(
            dtype=query.dtype.name,
            batch=batch if isinstance(batch, int) else symbolic_batch,
            q_len=q_len,
            kv_len=kv_len if isinstance(kv_len, int) else UNLIMITED,
            q_heads=query.shape[-2],
            kv_heads=value.shape[-2],
            head_dim=query.shape[-1],
            value_dim=value.shape[-1],
            left=int(sides["left"]),
            right=int(sides["right"]),
        )


class Tangent(Pass):
    def __init__(self, spec, lengths, program, mask):
        axes = ("tnh", "skh", "skv", "tnh", "skh", "skv", "tnv", "tn", *("",) * sum(lengths))
        dense = (False,) * 7 + (True,) * (len(axes) - 7)
        super().__init__(spec, lengths, program, mask, axes, dense)
        self.result_axes = ("tnv", "tn")
        self.result_sums = ((), ())

    def _call(self, *operands):
        query, _, value = operands[:3]
        return jax.ffi.ffi_call(TANGENT_TARGET, self.result_of_rows(operands, value))(
            *self._with_visits(operands),
            problem=_attributes(self.spec, self.lengths, self.mask),
            **_program_attributes(self.program, query, value),
        )


class PagedForward(Forward):
    def __init__(self, spec, program):
        pool = ("cpage", "cslot", "k")
        axes = ("tnh", (*pool, "h"), (*pool, "v"), ("ctable",), "")
        lengths, dense, unbatched = GivenLengths(False, True), (True,) * 5, frozenset((1, 2))
        Pass.__init__(self, spec, lengths, program, MaskKind(), axes, dense, unbatched)
        self.result_axes = ("tnv", "tn")
        self.result_sums = ((), ())

    def _call(self, *operands):
        return self._forward(PAGED_TARGET, operands, operands[2], paged=True)


class Backward(Pass):
    def __init__(
        self,
        spec,
        lengths,
        program,
        mask,
        has_dlse: bool,
        gradients: KernelGradients | None,
        summed: tuple[tuple[bool, ...], ...],
    ):
        """`summed`: for each of the captures that have a gradient here, and each batch axis of the
        call, whether it has size 1 there."""
        axes = ("tnh", "skh", "skv", "tnv", "tnv", "tn", *("",) * sum(lengths))
        if has_dlse:
            axes = (*axes, "tn")
        dense = (False,) * 5 + (True,) * (len(axes) - 5)
        super().__init__(spec, lengths, program, mask, axes, dense, gradients=gradients)
        self.has_dlse = has_dlse
        self.gradients = gradients
        # The operands whose gradients the further results are.
        captures = () if gradients is None else gradients.captures
        first = len(axes) + (2 if self.numbered else 0)
        self.captures = tuple(first + i for i in captures)
        of_captures = (self.operand_axes[i] for i in self.captures)
        key_sums = 0 if gradients is None else gradients.key_sums
        self.result_axes = ("tnh", "skh", "skv", *("ns",) * key_sums, *of_captures)
        self.result_sums = ((),) * (3 + key_sums) + summed

    def _static(self) -> tuple:
        return *super()._static(), self.has_dlse, self.gradients, self.result_sums

    def _call(self, *operands):
        query, key, value = operands[:3]
        q_len, q_heads, head_dim = query.shape[-3:]
        kv_len, kv_heads, value_dim = value.shape[-3:]
        # Linear in the batch and, where it is symbolic (jax.export), in the length: parts of a
        # problem need at least as many bytes as the whole.
        parts = math.prod(self.full_batch(operands))
        if not isinstance(q_len, int):
            parts *= -(-q_len // _WORKSPACE_ROWS)
        workspace = parts * extension.backward_workspace_bytes(
            batch=1,
            q_len=q_len if isinstance(q_len, int) else _WORKSPACE_ROWS,
            kv_len=kv_len if isinstance(kv_len, int) else 1,  # does not matter
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
        )
        if (batch_sum := self._batch_sum(operands)) > 1:
            workspace += extension.batch_sum_workspace_bytes(
                batch=parts, kv_len=kv_len, kv_heads=kv_heads, batch_sum=batch_sum
            )
        results = (
            *(self.result(operands, x, x.shape[-3:], x.dtype) for x in (query, key, value)),
            result_type(query, (workspace,), jnp.uint8, [None]),
            *self._gradient_types(operands),
        )
        dq, dk, dv, _, *more = jax.ffi.ffi_call(BACKWARD_TARGET, results)(
            *self._with_visits(operands),
            problem=_attributes(self.spec, self.lengths, self.mask),
            **_program_attributes(self.program, query, value),
            start_capture=_start_capture(self.program),
            has_dlse=np.bool_(self.has_dlse),
            deterministic=np.bool_(self.spec.deterministic_backward),
            **_gradient_attributes(self.gradients),
        )
        return dq, dk, dv, *more

    def _batch_sum(self, operands) -> int:
        """Of how many batch elements the backward kernel stores a sum as a gradient, or 1."""
        gradients, batch = self.gradients, self.full_batch(operands)
        summed = [x.capture for x in (gradients.loads if gradients else ()) if x.sums_batch]
        if gradients is None or not summed:
            return 1
        first = 3 + gradients.key_sums
        sums = self.full_sums(len(batch))[first + gradients.captures.index(summed[0])]
        return math.prod(n for n, one in zip(batch, sums, strict=True) if one)

    def _gradient_types(self, operands):
        """Of sums over the queries, and of the gradients of captures."""
        if self.gradients is None:
            return
        axes = self._batch_axes(operands)
        query, key = operands[:2]
        shape = (*(size for size, _ in axes), query.shape[-2], key.shape[-3])
        mesh_axes = [*(part for _, part in axes), mesh_axes_of(query)[-2], None]
        for _ in range(self.gradients.key_sums):
            yield result_type(query, shape, jnp.float32, mesh_axes)
        sums = self.full_sums(len(axes))[3 + self.gradients.key_sums :]
        numbers = self.gradients.captures
        for number, operand, summed in zip(numbers, self.captures, sums, strict=True):
            x = operands[operand]
            own = x.shape[len(axes) :]
            batch = [(1, None) if one else axis for axis, one in zip(axes, summed, strict=True)]
            shape = (*(size for size, _ in batch), *own)
            heads = mesh_axes_of(query)[-2]
            of_own = (heads if name == "n" else None for name in self.operand_axes[operand])
            mesh_axes = [*(part for _, part in batch), *of_own]
            dtype = x.dtype if self.gradients.is_narrow(number) else jnp.float32
            yield result_type(operands[0], shape, dtype, mesh_axes)
