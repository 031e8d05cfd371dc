"""The score program of a call, and what of its mask is a function.

`compose` builds them: bias, ALiBi and soft cap are written here as functions of a score program
(`_program`), the caller's `score_mod` follows them.

Of packed sequences, a program's b, q and kv are those of the packed arrays, too: what a caller's
function is told of its sequence, and ALiBi's distance, are computed from them here.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxflash import _dense_mask, _distance, _jaxpr, _predicate
from jaxflash._arguments import computed, is_abstract
from jaxflash._predicate import smaller
from jaxflash._program import Program, trace, trace_predicate
from jaxflash._spec import (
    PLANNED,
    AttentionSpec,
    Operands,
    ScoreMod,
    checked_score_mod,
    compute_dtype,
)


def compose(
    spec: AttentionSpec, operands: Operands, score_mod: ScoreMod | None, in_classes: bool = True
) -> tuple[AttentionSpec, Operands]:
    """The same call, with all that changes its scores as one program and its captures.

    The only place where the order is written down: scale, bias, ALiBi, soft cap, `score_mod`. The
    mask comes after it; what of it is a function is traced here, too.

    Args:
        spec: as the caller's arguments say.
        operands: likewise.
        score_mod: ``(score, b, h, q, kv) -> score`` of scalars, or None.
        in_classes: whether the spec may have a dilation.

    Returns:
        A spec with `program` instead of `logits_soft_cap` and `predicate`, and operands with
        `captures` instead of `bias` and `alibi_slopes` and `mask_captures` instead of
        `mask_value`. Each capture is (*#B, *its shape in the program), # meaning "or 1": the batch
        axes of the call come first. A call without logits has no program.

    Raises:
        ValueError: score_mod is not a function from scalars to a floating scalar, or a function of
            the mask is none to a bool.
    """
    if 0 in (*operands.query.shape[:-1], operands.key.shape[-3]):
        # Nothing could be indexed in axes of size 0.
        spec = dataclasses.replace(spec, logits_soft_cap=None)
        nothing = dict.fromkeys(("bias", "mask", "alibi_slopes", "mask_value", *PLANNED))
        sink = operands.sink if operands.query.shape[-2] > 0 else None
        return spec, operands._replace(**nothing, sink=sink)
    spec, operands = _with_predicate(spec, operands, in_classes and score_mod is None)
    batch_rank = len(operands.query.shape) - 3
    dtype = compute_dtype(operands.query.dtype)
    built_in, own = _BuiltIn(None, False, spec.logits_soft_cap), []
    if operands.bias is not None:
        shape = operands.bias.shape
        axes = tuple(i for i, size in enumerate(shape[batch_rank:]) if size != 1)
        built_in = dataclasses.replace(built_in, bias_axes=axes)
        sizes = tuple(shape[batch_rank + i] for i in axes)
        own.append((operands.bias, shape[:batch_rank], sizes))
    if operands.alibi_slopes is not None:
        *batch, heads = operands.alibi_slopes.shape
        built_in = dataclasses.replace(built_in, slopes=True)
        own.append((operands.alibi_slopes, batch or (1,) * batch_rank, (heads,)))
    if operands.query_boundaries is not None:
        packing = _Packing(is_shared=operands.query_boundaries is operands.key_boundaries)
        built_in = dataclasses.replace(built_in, packing=packing)
        if score_mod is not None or (built_in.slopes and not packing.is_shared):
            rows = packing.rows(operands)
            own.append((rows, (1,) * batch_rank, rows.shape))
    types = tuple(jax.ShapeDtypeStruct(sizes, x.dtype) for x, _, sizes in own)
    if score_mod is not None:
        program, closed_over = _with_score_mod(built_in, types, score_mod, dtype, _mesh(operands))
    elif built_in.parts:
        mesh = jax.sharding.get_abstract_mesh()  # see `_jaxpr.identity`
        program, closed_over = _built_in_program(built_in, types, dtype, mesh), ()
    else:
        return spec, operands
    captures = [_reshaped(x, (*batch, *sizes)) for x, batch, sizes in own]
    captures += [_reshaped(x, (1,) * batch_rank + x.shape) for x in closed_over]
    spec = dataclasses.replace(spec, logits_soft_cap=None, program=program)
    return spec, operands._replace(bias=None, alibi_slopes=None, captures=tuple(captures))


def _mesh(operands: Operands):
    """The mesh with explicit axes that a call lies on, or None."""
    arrays = (operands.query, operands.key, operands.value)
    return _jaxpr.explicit_mesh([x for x in arrays if not is_abstract(x)])


def _reshaped(x, shape):
    shape = tuple(shape)
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, x.dtype)
    if x.shape == shape:
        return x
    if isinstance(x, jax.core.Tracer):
        return x.reshape(shape)
    # The mesh of the other operands has no devices that an array of one could be computed with.
    with _jaxpr.outside_of_explicit_meshes():
        return x.reshape(shape)


@dataclasses.dataclass(frozen=True)
class _Packing:
    """Packed sequences, as a program gets to know them: by what each query has of its own, because
    the keys that it sees are of its sequence.

    Attributes:
        is_shared: queries and keys have the same boundaries, so that differences of their numbers
            are those of their positions.
    """

    is_shared: bool

    def rows(self, operands: Operands):
        """(T, 2) or (T, 4) int32: a query's sequence, where that begins among the queries, among
        the keys, and what the distance exceeds the difference of numbers by."""
        sequence = jnp.maximum(operands.query_segment_ids, 0)
        begin = operands.query_boundaries[sequence]
        if self.is_shared:
            return jnp.stack((sequence, begin), axis=-1)
        key_begin = operands.key_boundaries[sequence]
        number = jnp.arange(sequence.shape[0], dtype=jnp.int32)
        further = operands.query_positions - number + key_begin
        return jnp.stack((sequence, begin, key_begin, further), axis=-1)

    def local(self, rows, q, kv):
        """(sequence, positions of query and key in it)"""
        return rows[q, 0], q - rows[q, 1], kv - rows[q, 1 if self.is_shared else 2]

    def distance(self, rows, q, kv):
        return q - kv if self.is_shared else q - kv + rows[q, 3]


@dataclasses.dataclass(frozen=True)
class _BuiltIn:
    """The built-in part of a program, a function of (score, h, q, kv, distance, *captures).

    Attributes:
        bias_axes: which of (h, q, kv) index the bias, the first capture; None without a bias.
        slopes: whether slopes (heads) are the next capture.
        soft_cap: or None.
        packing: or None. What it says of rows is the next capture, if something asks for it.
    """

    bias_axes: tuple[int, ...] | None
    slopes: bool
    soft_cap: float | None
    packing: _Packing | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        used = {
            "bias": self.bias_axes is not None,
            "alibi_slopes": self.slopes,
            "logits_soft_cap": self.soft_cap is not None,
        }
        return tuple(name for name, is_used in used.items() if is_used)

    @property
    def axes(self) -> tuple[str, ...]:
        """See `Program`."""
        bias = () if self.bias_axes is None else ("".join("NTS"[i] for i in self.bias_axes),)
        slopes = ("N",) if self.slopes else ()
        return (*bias, *slopes, *(() if self.packing is None else ("T_",)))

    def __call__(self, score, h, q, kv, distance, *captures):
        rest = iter(captures)
        if self.bias_axes is not None:
            index = tuple((h, q, kv)[axis] for axis in self.bias_axes)
            score = score + next(rest)[index].astype(score.dtype)
        if self.slopes:
            slope = next(rest)[h].astype(score.dtype)
            if self.packing is not None:
                distance = self.packing.distance(next(rest, None), q, kv)
            score = score - slope * jnp.abs(distance).astype(score.dtype)
        if self.soft_cap is not None:
            score = self.soft_cap * jnp.tanh(score / self.soft_cap)
        return score


# Programs of built-in features depend on types alone: an eager call traces nothing.
@functools.lru_cache(maxsize=256)
def _built_in_program(built_in: _BuiltIn, types, dtype, mesh) -> Program:
    def function(score, b, h, q, kv, distance, *captures):
        return built_in(score, h, q, kv, distance, *captures)

    del mesh
    program, _ = trace(function, types, dtype)
    return dataclasses.replace(program, parts=built_in.parts, axes=built_in.axes)


def _with_score_mod(built_in: _BuiltIn, types, score_mod: ScoreMod, dtype, mesh):
    """(program, arrays that score_mod captures)."""
    checked = checked_score_mod(score_mod)

    @_jaxpr.in_place_of(score_mod)
    def function(score, b, h, q, kv, distance, *captures):
        score = built_in(score, h, q, kv, distance, *captures)
        if built_in.packing is not None:
            b, q, kv = built_in.packing.local(captures[-1], q, kv)
        return checked(score, b, h, q, kv).astype(dtype)

    program, captures = trace(function, types, dtype, mesh=mesh)
    parts = (*built_in.parts, "score_mod")
    program = dataclasses.replace(program, parts=parts, axes=built_in.axes)
    return program, captures[len(types) :]


def _with_predicate(
    spec: AttentionSpec, operands: Operands, in_classes: bool
) -> tuple[AttentionSpec, Operands]:
    """The same call without `mask_value`: with `predicate` and `mask_captures`, or with a band."""
    if operands.mask_value is None:
        return spec, operands
    batch_rank = len(operands.query.shape) - 3
    offset = functools.partial(_offset, operands)
    function, own = _predicate.function_of(operands.mask_value, batch_rank, offset)
    types = tuple(jax.ShapeDtypeStruct(x.shape, x.array.dtype) for x in own)
    predicate, captures = trace_predicate(function, types, _mesh(operands))
    banded = None if captures else _as_band(spec, operands, predicate, in_classes)
    if banded is not None:
        nothing = dict.fromkeys(("mask_value", *PLANNED))
        return banded, operands._replace(**nothing)
    predicate = dataclasses.replace(predicate, axes=tuple(x.axes for x in own))
    arrays = [_reshaped(x.array, (*x.batch, *x.shape)) for x in own]
    arrays += [_reshaped(x, (1,) * batch_rank + x.shape) for x in captures[len(own) :]]
    spec = dataclasses.replace(spec, predicate=predicate)
    arrays = tuple(map(_without_gradient, arrays))
    return spec, operands._replace(mask_value=None, mask_captures=arrays)


# Operands of calls that know of distances alone.
_DISTANCES_ALONE = frozenset(("query", "key", "value", "scale", "mask_value", *PLANNED))


def _as_band(
    spec: AttentionSpec, operands: Operands, predicate: Program, in_classes: bool
) -> AttentionSpec | None:
    """The spec with what a predicate shows as part of its band, where that is one."""
    q_len, kv_len = operands.query.shape[-3], operands.key.shape[-3]
    if not (isinstance(q_len, int) and isinstance(kv_len, int)):
        return None
    given = operands.named().keys()
    has_lengths = not given.isdisjoint(("query_seq_lengths", "key_value_seq_lengths"))
    if spec.bottom_right and (q_len != kv_len or has_lengths):
        return None
    band = _distance.band_of(predicate, q_len, kv_len)
    if band is None:
        return None
    if band.dilation > 1 and (
        not in_classes
        or q_len % band.dilation
        or kv_len % band.dilation
        or spec.dropout_rate > 0.0
        or not given <= _DISTANCES_ALONE
    ):
        return None
    return dataclasses.replace(
        spec,
        left=smaller(spec.left, band.left),
        right=smaller(spec.right, band.right),
        dilation=band.dilation,
    )


def _offset(operands: Operands):
    """How much further than at its number a query stands bottom right, int32 (*#B)."""
    ones = (1,) * (len(operands.query.shape) - 3)

    def valid(lengths, length):
        if lengths is not None:
            return computed(lambda x: jnp.clip(x, 0, length), lengths)
        numbers = np if isinstance(length, int) else jnp  # symbolic
        return numbers.asarray(length, np.int32).reshape(ones)

    queries = valid(operands.query_seq_lengths, operands.query.shape[-3])
    keys = valid(operands.key_value_seq_lengths, operands.key.shape[-3])
    return computed(lambda keys, queries: keys - queries, keys, queries)


def _without_gradient(x):
    is_array = not is_abstract(x) and jnp.issubdtype(x.dtype, jnp.inexact)
    return jax.lax.stop_gradient(x) if is_array else x


@functools.lru_cache(maxsize=256)
def dense_predicate(mask_axes: tuple[int, ...], mask_type, packed: int | None) -> Program:
    """What a dense mask says, its capture, which depends on those of (h, q, kv) that `mask_axes`
    numbers; along that of `packed` it is in words."""

    def visible(b, h, q, kv, mask):
        if packed is None:
            return mask[tuple((h, q, kv)[axis] for axis in mask_axes)]
        index, (first, further) = _dense_mask.place_of(mask_axes, packed, h, q, kv)
        return (((mask[index] >> first) >> further) & np.uint32(1)) != np.uint32(0)

    return trace_predicate(visible, (mask_type,))[0]
