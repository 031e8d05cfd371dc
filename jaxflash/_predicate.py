"""A mask value as a call has it: what the spec and the operands have a place for, and all else as
one function of (b, h, q, kv).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxflash import _mask
from jaxflash._arguments import computed
from jaxflash._mask import Mask, Sizes


class Placed(NamedTuple):
    """A mask in parts, all of which must allow what it allows. Shapes are those of `Operands`."""

    left: int | None
    right: int | None
    bottom_right: bool
    query_lengths: Any
    kv_lengths: Any
    segment_ids: tuple[Any, Any]  # of queries and keys, or two of None
    dense: Any
    rest: Mask | None = None
    plan: _mask.Planned | None = None


def place(mask: Mask, given: Placed, sizes: Sizes, alignment_is_free: bool) -> Placed:
    """What `given` and a mask allow.

    Args:
        mask: the caller's.
        given: what the other arguments of the call hide.
        sizes: of the call.
        alignment_is_free: whether nothing depends on `given.bottom_right`.
    """
    fitted = _mask.fitted(mask, sizes)
    parts = _mask.conjuncts(fitted)
    placed, rest = _in_places(parts, given, sizes, alignment_is_free)
    plan = _mask.plan_of(fitted)
    if plan is not None and not _knows_its_lengths(plan, parts, given):
        plan = None
    if plan is not None and not _is_of_all(plan, rest, sizes):
        plan = plan.beside_others()
    return placed._replace(plan=plan, rest=_mask.And(tuple(rest)) if rest else None)


def _in_places(
    parts: tuple[Mask, ...], given: Placed, sizes: Sizes, alignment_is_free: bool
) -> tuple[Placed, list[Mask]]:
    """What `given` and some parts of a mask allow, and those that have no place."""
    placed = given
    for part in parts:
        if isinstance(part, _mask.Lengths):
            placed = placed._replace(
                query_lengths=_shorter(placed.query_lengths, part.query, sizes.batch),
                kv_lengths=_shorter(placed.kv_lengths, part.key_value, sizes.batch),
            )
    # Both alignments are one where nothing moves the last query from the last key.
    is_square = (
        sizes.q_len == sizes.kv_len and placed.query_lengths is None and placed.kv_lengths is None
    )
    rest = []
    for part in parts:
        match part:
            case _mask.Lengths():
                pass
            case _mask.Window(left, right, alignment):
                bottom_right = alignment == "bottom_right"
                if alignment_is_free:
                    placed, alignment_is_free = placed._replace(bottom_right=bottom_right), False
                if is_square or bottom_right == placed.bottom_right:
                    placed = placed._replace(
                        left=smaller(placed.left, left), right=smaller(placed.right, right)
                    )
                else:
                    rest.append(part)
            case _mask.Segments(query_ids, key_ids) if placed.segment_ids[0] is None:
                full = (*sizes.batch, sizes.q_len), (*sizes.batch, sizes.kv_len)
                ids = zip((query_ids, key_ids), full, strict=True)
                placed = placed._replace(segment_ids=tuple(_broadcast(x, n) for x, n in ids))
            case _mask.Dense(array) if _is_within(array, placed.dense):
                both = array
                if placed.dense is not None:
                    both = computed(jnp.logical_and, placed.dense, array)
                placed = placed._replace(dense=both)
            case _:
                rest.append(part)
    return placed, rest


_NOTHING = Placed(None, None, False, None, None, (None, None), None)


def _is_of_all(plan: _mask.Planned, rest: list[Mask], sizes: Sizes) -> bool:
    """Whether a plan is of all that has no place in a call: alone, its mask had some of these."""
    of = _mask.conjuncts(plan.of)
    if len(rest) > len(of):
        return False
    _, own = _in_places(of, _NOTHING, sizes, alignment_is_free=True)
    return all(any(part is known for known in own) for part in rest)


def _knows_its_lengths(plan: _mask.Planned, parts: tuple[Mask, ...], given: Placed) -> bool:
    """Whether no lengths but a plan's own move what stands bottom right in it."""

    def count(parts):
        return sum(isinstance(part, _mask.Lengths) for part in parts)

    own = count(_mask.conjuncts(plan.of))
    has_others = given.query_lengths is not None or given.kv_lengths is not None
    return not (has_others or count(parts) > own) or not _stands_bottom_right(plan.of)


def _stands_bottom_right(mask: Mask) -> bool:
    bands = jax.tree.leaves(mask, is_leaf=lambda x: isinstance(x, _mask.Window))
    return any(isinstance(x, _mask.Window) and x.alignment == "bottom_right" for x in bands)


def smaller(x: int | None, y: int | None) -> int | None:
    """Of two sides of bands the narrower one."""
    given = [side for side in (x, y) if side is not None]
    return min(given) if given else None


def _shorter(x, y, batch):
    if y is None:
        return x
    y = _broadcast(y, batch)
    return y if x is None else computed(jnp.minimum, x, y)


def _broadcast(x, shape):
    return x if x.shape == shape else computed(lambda x: jnp.broadcast_to(x, shape), x)


def _is_within(array, dense) -> bool:
    """Whether two arrays of the rank of the logits, each axis 1 or full, together take no more than
    the larger one does."""
    if dense is None:
        return True
    pairs = list(zip(array.shape, dense.shape, strict=True))
    return all(y != 1 or x == 1 for x, y in pairs) or all(x != 1 or y == 1 for x, y in pairs)


# ---- The rest as a function ----------------------------------------------------------------------


class Capture(NamedTuple):
    """An array that a predicate reads."""

    array: Any
    batch: tuple[Any, ...]  # its batch axes, each 1 or full
    shape: tuple[Any, ...]  # as the predicate indexes it
    axes: str  # what indexes them: N query heads, T rows, S columns, _ something else


def function_of(
    mask: Mask, batch_rank: int, offset: Callable[[], Any]
) -> tuple[Callable, list[Capture]]:
    """``(b, h, q, kv, *captures) -> bool`` of scalars, and its captures.

    Args:
        mask: `Placed.rest`.
        batch_rank: of the call.
        offset: makes an int32 (*#B): how much further than at its number a query stands bottom
            right.
    """
    reader = _Reader(batch_rank, offset)
    read = reader.of(mask)

    def predicate(b, h, q, kv, *captures):
        return read(b, h, q, kv, captures)

    return predicate, reader.captures


class _Reader:
    """Makes functions (b, h, q, kv, captures) -> bool, and collects what they read."""

    def __init__(self, batch_rank: int, offset: Callable[[], Any]):
        self._batch_rank = batch_rank
        self._offset = offset
        self.captures: list[Capture] = []

    def of(self, mask: Mask) -> Callable:
        match mask:
            case _mask.And(terms):
                return _all(list(map(self.of, terms)))
            case _mask.Or(terms):
                read = list(map(self.of, terms))
                return lambda *i: functools.reduce(operator.or_, (term(*i) for term in read))
            case _mask.Not(of):
                inner = self.of(of)
                return lambda *i: ~inner(*i)
            case _mask.Planned(of):
                return self.of(of)
            case _mask.Window(left, right, alignment):
                return self._band(left, right, alignment == "bottom_right")
            case _mask.Lengths(query, key_value):
                return self._lengths(query, key_value)
            case _mask.Segments(query_ids, key_ids):
                of_query, of_key = self._array(query_ids, "T"), self._array(key_ids, "S")
                return lambda *i: of_query(*i) == of_key(*i)
            case _mask.Intervals(begin, end, of):
                begin, end = (self._array(x, "NT" if of == "query" else "NS") for x in (begin, end))

                def inside(b, h, q, kv, captures):
                    i, number = (b, h, q, kv, captures), kv if of == "query" else q
                    return (begin(*i) <= number) & (number < end(*i))

                return inside
            case _mask.Dense(array):
                return self._array(array, "NTS")
            case _mask.Function(captures=captures):
                return self._function(mask, captures)
        raise ValueError(f"{type(mask).__name__} is no mask of jaxflash.masks")

    def _band(self, left, right, bottom_right: bool) -> Callable:
        offset = self._array(self._offset(), "") if bottom_right else None

        def distance(b, h, q, kv, captures):
            return q - kv if offset is None else q + offset(b, h, q, kv, captures) - kv

        limits = []
        if left is not None:
            limits.append(lambda *i: distance(*i) <= min(left, _mask.INT32_MAX))
        if right is not None:
            limits.append(lambda *i: distance(*i) >= -min(right, _mask.INT32_MAX))
        return _all(limits)

    def _lengths(self, query, key_value) -> Callable:
        limits = []
        if query is not None:
            rows = self._array(query, "")
            limits.append(lambda b, h, q, kv, x: q < rows(b, h, q, kv, x))
        if key_value is not None:
            columns = self._array(key_value, "")
            limits.append(lambda b, h, q, kv, x: kv < columns(b, h, q, kv, x))
        return _all(limits)

    def _function(self, mask: _mask.Function, captures) -> Callable:
        leaves, tree = jax.tree.flatten(captures)
        first = len(self.captures)
        ones = (1,) * self._batch_rank
        self.captures += [Capture(x, ones, x.shape, "_" * len(x.shape)) for x in leaves]

        def visible(b, h, q, kv, captures):
            given = tree.unflatten(captures[first : first + len(leaves)])
            return mask(b, h, q, kv, *given)

        return visible

    def _array(self, x, axes: str) -> Callable:
        """The element of an array (*#B, *its axes, each 1 or full)."""
        batch, own = x.shape[: self._batch_rank], x.shape[self._batch_rank :]
        kept = [(axis, size) for axis, size in zip(axes, own, strict=True) if size != 1]
        number = len(self.captures)
        shape = tuple(size for _, size in kept)
        self.captures.append(Capture(x, batch, shape, "".join(axis for axis, _ in kept)))

        def element(b, h, q, kv, captures):
            numbers = {"N": h, "T": q, "S": kv}
            return captures[number][tuple(numbers[axis] for axis, _ in kept)]

        return element


def _all(terms: list[Callable]) -> Callable:
    if not terms:
        return lambda *i: np.bool_(True)
    return lambda *i: functools.reduce(operator.and_, (term(*i) for term in terms))
