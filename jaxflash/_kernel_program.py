"""What the kernels are told of a call's scores: the printed program and the arrays it reads."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import jax.numpy as jnp

from jaxflash import _dense_mask, _dropout, _scores
from jaxflash._dense_mask import DenseMask, PassName
from jaxflash._printer import CAPTURE_DTYPES, MAX_CAPTURES, NotPrintable
from jaxflash._printer.request import Request
from jaxflash._program import Program, trace
from jaxflash._spec import AttentionSpec, Operands

if TYPE_CHECKING:
    from jaxflash._printer.cuda import KeyLoad, Load, Printed, PrintedGradients


# Backward kernels for larger head sizes divide a tile of keys between blocks
# (cuda/sm90/tile_config.h: KeyOwners).
_MAX_SINGLE_HEAD_DIM = 128
# cuda/problem.h: kMaxBatchSum.
_MAX_SUMMED_BATCH = 4
# From how many keys of a query on products start from what is proportional to the distance, where
# they are on both sides: tiles that have both add it element by element, which takes longer than
# without (0.294 ms against 0.287 for 1024 keys). Nor do the short steps of small heads gain.
_LONG_OF_BOTH_SIDES = 2048
_TOO_QUICK_HEAD_DIM = 64


# (capture, axis whose index is the query head or None) of captures that are loaded; None where the
# number of the head is asked for elsewhere, or an axis does not hold all heads.
HeadAxes = tuple[tuple[int, int | None], ...] | None


_T = TypeVar("_T")


class KernelProgram(NamedTuple):
    """A score program, with sink and dropout, for the kernels.

    Attributes:
        source: the C++ struct `jaxflash::Program`.
        numbered: see `_printer.cuda.Printed`.
        unit_slope: see there.
        bounded: see there.
        exact_length: see there.
        capture_ranks: how many axes each of `captures` has, without batch axes.
        start_capture: the capture of which kernels can load what products start from in tiles, or
            None.
        start_of_batch: see `_printer.cuda.Printed`.
        key_terms: whether what products start from depends on the "key" alone, or is proportional
            to the "distance"; None where it does not, or differs for heads that share those of
            keys.
        sequences: how many are packed, 0 if unknown or none.
        head_axes: see `split_by_heads`.
    """

    source: str
    numbered: bool
    unit_slope: bool
    bounded: bool
    exact_length: int | None
    capture_ranks: tuple[int, ...]
    start_capture: int | None
    start_of_batch: bool
    key_terms: Literal["key", "distance"] | None
    sequences: int
    head_axes: HeadAxes


class KernelPredicate(NamedTuple):
    """What of a mask is a function, for the kernel that evaluates it.

    Attributes:
        source: the C++ struct `jaxflash::Program`.
        capture_ranks: as in `KernelProgram`.
    """

    source: str
    capture_ranks: tuple[int, ...]


class KernelGradients(NamedTuple):
    """Which gradients of captures the kernels compute, and how.

    Attributes:
        source: the C++ struct `jaxflash::Program` with a struct for each load.
        numbered: see `_printer.cuda.PrintedGradients`.
        loads: see there.
        key_sums: see there.
        key_loads: see there.
        head_axes: see `split_by_heads`.
    """

    source: str
    numbered: bool
    loads: tuple[Load, ...]
    key_sums: int
    key_loads: tuple[KeyLoad, ...]
    head_axes: HeadAxes

    @property
    def captures(self) -> tuple[int, ...]:
        """Numbers of the captures, in the order of their gradients, without those of key loads."""
        return tuple(dict.fromkeys(load.capture for load in self.loads))

    def is_narrow(self, capture: int) -> bool:
        """Whether a gradient has the capture's dtype, not float32."""
        return any(load.narrow for load in self.loads if load.capture == capture)


def split_by_heads(
    program: KernelProgram, gradients: KernelGradients | None
) -> tuple[int | None, ...]:
    """For each capture of a pass the axis of which a device needs the part of its own heads alone,
    by whose numbers the pass then knows them. None: one that is needed as a whole."""
    axes = None if program.head_axes is None else dict(program.head_axes)
    if axes is not None and gradients is not None:
        own = gradients.head_axes
        differs = own is None or any(axes.get(i, axis) != axis for i, axis in own)
        axes = None if own is None or differs else {**axes, **dict(own)}
    return tuple((axes or {}).get(i) for i in range(len(program.capture_ranks)))


def make(
    spec: AttentionSpec,
    operands: Operands,
    pass_: PassName,
    always: bool = False,
    wanted: Sequence[int] = (),
) -> KernelProgram | None:
    """The program of a call, or None where a pass of the kernels needs none, unless it has one
    `always`. `wanted`: captures whose gradients are computed along with the backward pass.

    Raises:
        NotPrintable: the text says why, naming the equation.
    """
    has_ranges = operands.query_segment_ids is not None
    if (
        spec.program is None
        and operands.sink is None
        and operands.mask is None
        and spec.predicate is None
        and not (spec.dropout_rate > 0.0 or has_ranges or always)
    ):
        return None
    return _program(spec, operands, pass_, wanted=tuple(wanted))


def tangents(spec: AttentionSpec, operands: Operands, moving: Sequence[int]) -> KernelProgram:
    """The program of the tangent pass, which always has one, where some captures have tangents.

    Raises:
        NotPrintable: the text says why, naming the equation.
    """
    return _program(spec, operands, "forward", tuple(moving))


def predicate(predicate: Program) -> KernelPredicate:
    """A predicate alone.

    Raises:
        NotPrintable: the text says why, naming the equation.
    """
    ranks = tuple(len(t.shape) for t in predicate.capture_types)
    _check_count(len(ranks))
    printed = _unless_refused(
        _printed(Request(identity(), (predicate,), distance_is_difference=True))
    )
    return KernelPredicate(printed.source, ranks)


def _check_count(captures: int, more: str = "") -> None:
    if captures > MAX_CAPTURES:
        raise NotPrintable(
            f"captures {captures} arrays, bias, slopes, masks, sink and seed among them{more}; "
            f"allowed are {MAX_CAPTURES}"
        )


def _program(
    spec: AttentionSpec,
    operands: Operands,
    pass_: PassName,
    moving: tuple[int, ...] = (),
    wanted: tuple[int, ...] = (),
) -> KernelProgram:
    request = _request(spec, operands, pass_, wanted)
    shapes = [t.shape for t in request.capture_types]
    shapes_of_all = [*shapes, *(shapes[i] for i in moving)]
    if operands.sink is not None:
        shapes_of_all.append(operands.sink.shape)
    ranks = (*map(len, shapes_of_all), *(1,) * request.drops)
    _check_count(len(ranks), more=", and tangents" if moving else "")
    if request.sink_dtype not in (None, *CAPTURE_DTYPES):
        raise NotPrintable(
            f"has a sink of dtype {request.sink_dtype}; allowed are {', '.join(CAPTURE_DTYPES)}"
        )
    paired = request.paired if pass_ == "forward" else ()
    paired += tuple(len(shapes) + j for j, i in enumerate(moving) if i in paired)
    mask = operands.mask
    words = pass_ == "forward" and mask is not None
    words = words and _dense_mask.packed_axis(mask, pass_) is not None
    request = dataclasses.replace(
        request,
        paired=paired,
        starts=() if moving else request.starts,
        moving=moving,
        words=words,
        keys_are_rows=pass_ == "backward",
        sides=_sides(spec, operands) if pass_ == "forward" and not moving else (),
    )
    printed = _unless_refused(_printed(request))
    start = printed.start_capture
    if start is not None and not _comes_in_tiles(operands.captures[start], operands):
        start = None
    shares_key_heads = operands.query.shape[-2] != operands.key.shape[-2]
    terms = printed.key_terms
    if terms is not None and terms.of_head and shares_key_heads:
        terms = None
    return KernelProgram(
        printed.source,
        printed.numbered,
        printed.unit_slope,
        printed.bounded,
        printed.exact_length,
        ranks,
        start,
        printed.start_of_batch,
        None if terms is None else ("distance" if terms.of_distance else "key"),
        _sequences(operands),
        _head_axes(printed, shapes_of_all, operands),
    )


def gradients(
    spec: AttentionSpec, operands: Operands, wanted: Sequence[int]
) -> KernelGradients | None:
    """How the kernels compute the gradients of some captures, those left out that the logits do not
    depend on; None where they depend on none.

    Raises:
        NotPrintable: the text says why, naming the equation.
    """
    if spec.program is None:
        return None
    request = _request(spec, operands, "backward", tuple(wanted))
    lengths = (operands.query.shape[-3], operands.key.shape[-3])
    printed = _unless_refused(_printed_gradients(dataclasses.replace(request, lengths=lengths)))
    if not (printed.loads or printed.key_loads):
        return None
    shapes = [t.shape for t in request.capture_types]
    return KernelGradients(
        printed.source,
        printed.numbered,
        printed.loads,
        printed.key_sums,
        printed.key_loads,
        _head_axes(printed, shapes, operands),
    )


def _request(
    spec: AttentionSpec, operands: Operands, pass_: PassName, wanted: tuple[int, ...]
) -> Request:
    """What programs of a pass and gradients have in common."""
    request = Request(
        *_parts(spec, operands, pass_),
        distance_is_difference=not spec.bottom_right,
        sink_dtype=None if operands.sink is None else operands.sink.dtype.name,
        drops=spec.dropout_rate > 0.0,
        wanted=wanted,
        sizes=_sizes(operands, wanted),
        storable=_storable(operands, wanted),
        sums_batch=bool(wanted) and _sums_batch(operands),
        sums_diagonals=bool(wanted) and _sums_diagonals(spec, operands),
    )
    of_neighbours = _paired(request.capture_types, operands)
    starts = of_neighbours if _divides_by_scale(spec) else ()
    return dataclasses.replace(request, paired=of_neighbours, starts=starts)


def _head_axes(
    printed: Printed | PrintedGradients, shapes: Sequence[tuple], operands: Operands
) -> HeadAxes:
    if printed.head_axes is None:
        return None
    heads = operands.query.shape[-2]
    axes = sorted(printed.head_axes.items())
    if any(axis is not None and shapes[i][axis] != heads for i, axis in axes):
        return None
    return tuple(axes)


def _sequences(operands: Operands) -> int:
    boundaries = operands.query_boundaries
    count = 0 if boundaries is None else boundaries.shape[-1] - 1
    return count if isinstance(count, int) else 0


def _sizes(operands: Operands, wanted: Sequence[int]) -> tuple[tuple[str, Any], ...]:
    """How many batch elements, heads and keys index gradients of some captures."""
    *batch, _, heads, _ = operands.query.shape
    sizes = {"h": heads, "kv": operands.key.shape[-3]}
    # An array with batch axes of its own has them in its gradient.
    if all(n == 1 for i in wanted for n in operands.captures[i].shape[: len(batch)]):
        sizes["b"] = math.prod(batch)
    return tuple(sizes.items())


def _storable(operands: Operands, wanted: Sequence[int]) -> tuple[int, ...]:
    """Captures of which the backward kernel can store the gradient by TMA: matrices of queries and
    keys, of its own dtype, with a batch element for each of the call."""
    query = operands.query
    *batch, q_len, _, _ = query.shape
    of_numbers = "b" in dict(_sizes(operands, wanted))

    def is_storable(x) -> bool:
        of_batch, own = x.shape[: len(batch)], x.shape[len(batch) :]
        return (
            all(isinstance(n, int) for n in (*x.shape, *query.shape))
            and x.dtype == query.dtype
            and x.dtype.itemsize == 2
            and own[-2:] == (q_len, operands.key.shape[-3])
            and own[-1] % 8 == 0
            and (of_numbers or of_batch == tuple(batch))
            # Strides and coordinates of TMA.
            and math.prod(own[-2:]) < 2**38
            and math.prod(x.shape[:-2]) < 2**30
        )

    return tuple(i for i in wanted if is_storable(operands.captures[i]))


def _sums_batch(operands: Operands) -> bool:
    """Whether the backward kernel may add up what it stores for all batch elements."""
    count = math.prod(operands.query.shape[:-3])
    return (
        isinstance(count, int) and 1 < count <= _MAX_SUMMED_BATCH and _has_single_blocks(operands)
    )


def _sums_diagonals(spec: AttentionSpec, operands: Operands) -> bool:
    """Whether the backward kernel may add sums along diagonals to a gradient: in no fixed order."""
    return _has_single_blocks(operands) and not spec.deterministic_backward


def _has_single_blocks(operands: Operands) -> bool:
    """Whether a block of the Hopper backward kernel has a tile of keys to itself."""
    sizes = operands.query.shape[-1], operands.value.shape[-1]
    return all(isinstance(n, int) and n <= _MAX_SINGLE_HEAD_DIM for n in sizes)


def gradient_of_sum(load: KeyLoad, x, capture):
    """The gradient of a capture's load, given the sum over the queries (*B, N, S) that it is made
    of: summed over what does not index the load, float32."""
    batch_rank = x.ndim - 2
    x = x.reshape(*(1,) * batch_rank, -1, *x.shape[-2:]) if "b" in load.axes else x[..., None, :, :]
    numbers = {name: batch_rank + i for i, name in enumerate(("b", "h", "kv"))}
    own = [numbers[name] for name in load.axes if name is not None]
    summed = [axis for axis in numbers.values() if axis not in own]
    batch = [i for i in range(batch_rank) if capture.shape[i] == 1]
    x = x.sum((*batch, *summed), keepdims=True)
    return x.transpose(*range(batch_rank), *own, *summed).reshape(capture.shape)


def _parts(
    spec: AttentionSpec, operands: Operands, pass_: PassName
) -> tuple[Program, tuple[Program, ...]]:
    """The score program, and the predicates of masks."""
    predicates = []
    if operands.mask is not None:
        own = _dense_mask.own_type(operands.mask, pass_)
        axes = _dense_mask.axes(operands.mask)
        packed = _dense_mask.packed_axis(operands.mask, pass_)
        predicates.append(_scores.dense_predicate(axes, own, packed))
    if spec.predicate is not None:
        predicates.append(spec.predicate)
    return identity() if spec.program is None else spec.program, tuple(predicates)


def _paired(capture_types: Sequence[Any], operands: Operands) -> tuple[int, ...]:
    """Captures that may have an element for each key, of which neighbours can be loaded at once."""
    kv_len = operands.key.shape[-3]
    if not isinstance(kv_len, int) or kv_len % 2:
        return ()
    types = enumerate(capture_types)
    return tuple(i for i, t in types if t.shape and t.shape[-1] == kv_len)


def _comes_in_tiles(capture: Any, operands: Operands) -> bool:
    """Whether a capture whose last axes are those of queries and keys is a matrix to TMA."""
    *others, q_len, kv_len = capture.shape
    return (
        all(isinstance(n, int) for n in capture.shape)
        and q_len == operands.query.shape[-3]
        and kv_len % 8 == 0
        and math.prod(others) * q_len < 2**30
        and capture.dtype.itemsize == 2
    )


def _divides_by_scale(spec: AttentionSpec) -> bool:
    """Whether addends may be divided by the scale: of those beyond 3.4e38 times it, which become
    infinite, none is below 3e35."""
    return 2.0**-10 <= spec.scale <= 2.0**10


def _sides(spec: AttentionSpec, operands: Operands) -> tuple[str, ...]:
    """See `Request`."""
    if spec.program is None or not _divides_by_scale(spec):
        return ()
    if spec.right is not None and spec.right <= 0:
        return ("before",)
    if spec.left is not None and spec.left <= 0:
        return ("behind",)
    seen = operands.key.shape[-3]
    if spec.left is not None and spec.right is not None:
        seen = min(seen, spec.left + spec.right + 1) if isinstance(seen, int) else seen
    is_long = isinstance(seen, int) and seen >= _LONG_OF_BOTH_SIDES
    is_quick = operands.query.shape[-1] <= _TOO_QUICK_HEAD_DIM
    return ("before", "behind") if is_long and not is_quick else ()


def captures(
    spec: AttentionSpec,
    operands: Operands,
    mask: DenseMask | None = None,
    tangents: Sequence[Any] = (),
) -> tuple[Any, ...]:
    """The captures as the kernels get them, those of masks, tangents of captures, sink and dropout:
    (*#B, *own axes) each."""
    more = []
    if operands.sink is not None:
        more.append(operands.sink)
    if spec.dropout_rate > 0.0:
        more.append(_dropout.kernel_parameters(operands.dropout_seed, spec.dropout_rate))
    ones = (1,) * (operands.query.ndim - 3)
    masks = () if mask is None else (mask.elements,)
    masks += operands.mask_captures
    return *operands.captures, *masks, *tangents, *(x.reshape(*ones, -1) for x in more)


@functools.lru_cache(maxsize=256)
def _printed(request: Request) -> Printed | Refusal:
    from jaxflash._printer import cuda  # a tenth of the time of `import jaxflash`

    try:
        return cuda.print_program(request)
    except NotPrintable as reason:
        return Refusal(str(reason))


@functools.lru_cache(maxsize=256)
def _printed_gradients(request: Request) -> PrintedGradients | Refusal:
    from jaxflash._printer import cuda  # a tenth of the time of `import jaxflash`

    try:
        return cuda.print_gradients(request)
    except NotPrintable as reason:
        return Refusal(str(reason))


class Refusal(NamedTuple):
    """Why a program is not printable. An exception that is kept would keep the frames of all who
    have raised it, and the arrays in them."""

    reason: str


def _unless_refused(printed: _T | Refusal) -> _T:
    if isinstance(printed, Refusal):
        raise NotPrintable(printed.reason)
    return printed


@functools.cache
def identity() -> Program:
    """Of a call with a sink, dropout or a mask alone."""
    return trace(lambda score, *_: score, (), jnp.float32)[0]
