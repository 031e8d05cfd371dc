"""What the kernels are told of a call's scores: the printed program and the arrays it reads."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp

from jaxflash import _dropout, _printer, _scores
from jaxflash._printer import NotPrintable
from jaxflash._spec import AttentionSpec, Operands


@dataclasses.dataclass(frozen=True)
class KernelProgram:
    """A score program, with sink and dropout, for the kernels.

    Attributes:
        source: the C++ struct `jaxflash::Program`.
        unit_slope: see `_printer.Printed`.
        exact_length: see there.
        capture_ranks: how many axes each of `captures` has, without batch axes.
    """

    source: str
    unit_slope: bool
    exact_length: int | None
    capture_ranks: tuple[int, ...]


def make(spec: AttentionSpec, operands: Operands) -> KernelProgram | None:
    """The program of a call, or None where the kernels need none.

    Raises:
        NotPrintable: the text says why, naming the equation.
    """
    drops = spec.dropout_rate > 0.0
    has_ranges = operands.query_segment_ids is not None
    if (
        spec.program is None
        and operands.sink is None
        and operands.mask is None
        and not (drops or has_ranges)
    ):
        return None
    program = _identity() if spec.program is None else spec.program
    if operands.mask is not None:
        axes = _mask_axes(operands)
        program = _scores.masked(program, axes, _mask_sizes(operands))
    ranks = tuple(len(t.shape) for t in program.capture_types)
    if operands.sink is not None:
        ranks = (*ranks, 1)
    if drops:
        ranks = (*ranks, 1)
    if len(ranks) > _printer.MAX_CAPTURES:
        raise NotPrintable(
            f"captures {len(ranks)} arrays, bias, slopes, sink and seed among them; allowed are "
            f"{_printer.MAX_CAPTURES}"
        )
    sink_dtype = None if operands.sink is None else operands.sink.dtype.name
    if sink_dtype not in (None, *_printer.CAPTURE_DTYPES):
        raise NotPrintable(
            f"has a sink of dtype {sink_dtype}; allowed are {', '.join(_printer.CAPTURE_DTYPES)}"
        )
    is_difference = not spec.bottom_right and operands.query_positions is None
    printed = _printed(program, is_difference, sink_dtype, drops)
    if isinstance(printed, NotPrintable):
        raise printed
    return KernelProgram(printed.source, printed.unit_slope, printed.exact_length, ranks)


def captures(spec: AttentionSpec, operands: Operands) -> tuple[Any, ...]:
    """The captures as the kernels get them, then mask, sink and dropout: (*#B, *own axes) each."""
    more = []
    if operands.sink is not None:
        more.append(operands.sink)
    if spec.dropout_rate > 0.0:
        more.append(_dropout.kernel_parameters(operands.dropout_seed, spec.dropout_rate))
    ones = (1,) * (operands.query.ndim - 3)
    mask = operands.mask
    masks = () if mask is None else (mask.reshape(*mask.shape[:-3], *_mask_sizes(operands)),)
    return *operands.captures, *masks, *(x.reshape(*ones, -1) for x in more)


def _mask_axes(operands: Operands) -> tuple[int, ...]:
    """Which of heads, rows and columns a mask depends on."""
    return tuple(i for i, size in enumerate(operands.mask.shape[-3:]) if size != 1)


def _mask_sizes(operands: Operands) -> tuple[Any, ...]:
    return tuple(operands.mask.shape[-3:][axis] for axis in _mask_axes(operands))


@functools.lru_cache(maxsize=256)
def _printed(
    program: _scores.Program, distance_is_difference: bool, sink_dtype: str | None, drops: bool
) -> _printer.Printed | NotPrintable:
    try:
        return _printer.print_cuda(
            program,
            distance_is_difference=distance_is_difference,
            sink_dtype=sink_dtype,
            drops=drops,
        )
    except NotPrintable as reason:
        return reason


@functools.cache
def _identity() -> _scores.Program:
    """Of a call with a sink, dropout or a mask alone."""
    return _scores.trace(lambda score, *_: score, (), jnp.float32)[0]
