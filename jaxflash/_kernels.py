"""The passes of the CUDA kernels, as the differentiation rule calls them: what a custom call gets
of a call's operands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxflash import (
    _batch_calls,
    _dense_mask,
    _kernel_program,
    _pages,
    _partition,
    _passes,
    _plan,
    _ranges,
)
from jaxflash._dense_mask import DenseMask, PassName
from jaxflash._kernel_program import KernelGradients, KernelProgram
from jaxflash._mask import Sizes
from jaxflash._ranges import Shown
from jaxflash._spec import AttentionSpec, Operands, PagedOperands


def forward(spec: AttentionSpec, program: KernelProgram | None, operands: Operands):
    """(out, lse) of the kernels."""
    mask = _read(operands, "forward")
    ranges = _ranges_of(spec, operands, mask)
    kernel = _passes.Forward(*_made_for(spec, program, operands, ranges))
    return _partition.mapped(kernel)(
        operands.query,
        operands.key,
        operands.value,
        *_given(operands.query_seq_lengths, operands.key_value_seq_lengths),
        *_program_operands(kernel, operands, mask),
        *_given(*(ranges or ())),
    )


def paged_forward(spec: AttentionSpec, arrays: PagedOperands):
    """(out, lse) of the kernels; `jax.vmap` must have been dealt with."""
    operands = _pages.operands_of(arrays)
    # Its kernels are compiled at run time, all of them.
    program = _kernel_program.make(spec, operands, "forward", always=True)
    kernel = _passes.PagedForward(spec, program)
    return _partition.sharded(kernel)(
        arrays.query,
        arrays.key_pages,
        arrays.value_pages,
        arrays.page_table,
        arrays.lengths,
        *_program_operands(kernel, operands),
    )


def backward(
    spec: AttentionSpec,
    program: KernelProgram | None,
    gradients: KernelGradients | None,
    operands: Operands,
    out,
    lse,
    dout,
    dlse,
):
    """((dq, dk, dv), gradients of captures by their numbers) of the kernels; dlse may be None."""
    mask = _read(operands, "backward")
    ranges = _ranges_of(spec, operands, mask)
    captures = () if gradients is None else gradients.captures
    batch_rank = operands.query.ndim - 3
    kernel = _passes.Backward(
        *_made_for(spec, program, operands, ranges),
        dlse is not None,
        gradients,
        tuple(tuple(n == 1 for n in operands.captures[i].shape[:batch_rank]) for i in captures),
    )
    dq, dk, dv, *results = _partition.mapped(kernel)(
        operands.query,
        operands.key,
        operands.value,
        out,
        dout,
        lse,
        *_given(operands.query_seq_lengths, operands.key_value_seq_lengths, dlse),
        *_program_operands(kernel, operands, mask),
        *_given(*(ranges or ())),
    )
    of_captures: dict[int, Any] = {}
    if gradients is not None:
        sums, results = results[: gradients.key_sums], results[gradients.key_sums :]
        of_captures |= zip(captures, results, strict=True)
        for load in gradients.key_loads:
            x = _kernel_program.gradient_of_sum(
                load, sums[load.sum], operands.captures[load.capture]
            )
            of_captures[load.capture] = of_captures.get(load.capture, 0.0) + x
    return (dq, dk, dv), {i: x.astype(operands.captures[i].dtype) for i, x in of_captures.items()}


def tangent(
    spec: AttentionSpec,
    program: KernelProgram,
    operands: Operands,
    out,
    lse,
    tangents: Mapping[str, Any],
    of_captures: Sequence[Any],
):
    """Tangents of out and lse, given those of query, key and value, 0 where one is left out, and of
    the captures that move in the program."""
    names = ("query", "key", "value")
    moved = [
        tangents[name] if name in tangents else jnp.zeros_like(x)
        for name, x in zip(names, operands[:3], strict=True)
    ]
    mask = _read(operands, "forward")
    ranges = _ranges_of(spec, operands, mask)
    kernel = _passes.Tangent(*_made_for(spec, program, operands, ranges))
    return _partition.mapped(kernel)(
        operands.query,
        operands.key,
        operands.value,
        *moved,
        out,
        lse,
        *_given(operands.query_seq_lengths, operands.key_value_seq_lengths),
        *_program_operands(kernel, operands, mask, of_captures),
        *_given(*(ranges or ())),
    )


def read_mask(mask, pass_: PassName, q_len, kv_len) -> DenseMask:
    """What a pass reads of a mask for calls of such lengths."""
    packed = _dense_mask.packed_axis(mask, pass_)
    read = _partition.over_batch(
        _batch_calls.ReadMask(q_len, kv_len, packs_keys=pass_ == "forward")
    )
    words, *intervals = read(mask)
    shown = Shown(*intervals)
    own = _dense_mask.own_type(mask, pass_)
    elements = (mask if packed is None else words).reshape(*mask.shape[:-3], *own.shape)
    return DenseMask(elements, shown)


def shown(spec: AttentionSpec, sizes: Sizes, captures: Sequence[Any]) -> Shown:
    """As `_plan.shown`."""
    assert spec.predicate is not None
    evaluate = _batch_calls.EvaluatePredicate(
        spec,
        _kernel_program.predicate(spec.predicate),
        sizes.q_len,
        sizes.kv_len,
        spec.predicate.axes,
    )
    (*batch, heads), _ = _plan.lead(spec.predicate, sizes, captures)
    like = captures[0] if captures else None
    of_batch, of_heads = _numbers(tuple(batch), heads, like)
    numbers = of_batch[..., None], of_heads.reshape(*(1,) * len(batch), -1)
    with_heads = (jnp.expand_dims(x, len(batch)) for x in captures)
    return Shown(*_partition.over_batch(evaluate)(*numbers, *with_heads))


def _read(operands: Operands, pass_: PassName) -> DenseMask | None:
    if operands.mask is None:
        return None
    return read_mask(operands.mask, pass_, operands.query.shape[-3], operands.key.shape[-3])


def _ranges_of(spec: AttentionSpec, operands: Operands, mask: DenseMask | None):
    shown = () if mask is None else (mask.shown,)
    steps = _ranges.Steps(_matched, _summarised, _of_segments)
    has_visits = _passes.may_walk(operands.query.shape[-3], operands.key.shape[-3])
    return _ranges.of_call(spec, operands, *shown, steps=steps, has_visits=has_visits)


def _matched(query_ids, key_ids) -> _ranges.ElementIntervals:
    return _ranges.ElementIntervals(
        *_partition.over_batch(_batch_calls.MatchSegments())(query_ids, key_ids)
    )


def _summarised(intervals: _ranges.ElementIntervals):
    kernel = _batch_calls.SummariseRanges(
        has_solid=intervals.keys_solid is not None,
        has_inside=intervals.keys_inside is not None,
        has_visits=intervals.row_visits is not None,
    )
    return _partition.over_batch(kernel)(*_given(*intervals[:7]))


def _of_segments(query_ids, key_ids) -> tuple[Any, ...]:
    return _partition.over_batch(_batch_calls.SegmentRanges())(query_ids, key_ids)


def _banded(spec: AttentionSpec, operands: Operands) -> AttentionSpec:
    """The call without the band that is part of its ranges."""
    if operands.query_positions is None:
        return spec
    return dataclasses.replace(spec, left=None, right=None)


def _made_for(
    spec: AttentionSpec,
    program: KernelProgram | None,
    operands: Operands,
    ranges: _ranges.Ranges | None,
):
    """What a pass has to know of a call."""
    has_predicate = operands.mask is not None or spec.predicate is not None
    mask = _passes.MaskKind.of(ranges, has_predicate)
    return _banded(spec, operands), _passes.GivenLengths.of(operands), program, mask


def _given(*optional) -> list[Any]:
    return [x for x in optional if x is not None]


def _program_operands(
    kernel: _passes.Pass,
    operands: Operands,
    mask: DenseMask | None = None,
    tangents: Sequence[Any] = (),
) -> tuple[Any, ...]:
    """What the kernels get for their program after all else: see `_passes.Pass`."""
    if kernel.program is None:
        return ()
    captures = _kernel_program.captures(kernel.spec, operands, mask, tangents)
    if not kernel.numbered:
        return captures
    *batch, _, heads, _ = operands.query.shape
    return *_numbers(tuple(batch), heads, operands.query), *captures


def _numbers(batch: tuple[Any, ...], heads, like) -> tuple[Any, Any]:
    """Of the elements of a batch and of heads, varying over the mesh axes that `like` does."""
    number = jnp.zeros((1,) * len(batch), jnp.int32)
    for axis, extent in enumerate(batch):
        iota = jax.lax.broadcasted_iota(jnp.int32, batch, axis)
        number = number * extent + iota
    numbers = (number, jnp.arange(heads, dtype=jnp.int32))
    axes = () if like is None else tuple(jax.typeof(like).manual_axis_type.varying)
    return tuple(jax.lax.pcast(x, axes, to="varying") for x in numbers) if axes else numbers
