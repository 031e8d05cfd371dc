"""The values of `jaxflash.masks`: what they hold, how they are made and combined, and how they fit
the sizes of a call.

They are what `_spec` sorts into a call, below everything that computes with them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxflash import _arguments

Alignment = Literal["top_left", "bottom_right"]

ALIGNMENTS = ("top_left", "bottom_right")
# What arrays broadcast to, for errors.
LOGITS = "(*batch, query heads, T, S)"
INT32_MAX = 2**31 - 1


class Mask:
    """Which keys each query sees; made by the functions of this module.

    ``a & b`` shows what both show, ``a | b`` what at least one shows, ``~a`` what `a` hides. One
    side may be a bool array that broadcasts to ``(*B, N, T, S)``.
    """

    __array_ufunc__ = None  # NumPy arrays leave the operators to this class

    def __and__(self, other: Mask | ArrayLike) -> Mask:
        return _combined(And, self, other)

    def __rand__(self, other: ArrayLike) -> Mask:
        return _combined(And, other, self)

    def __or__(self, other: Mask | ArrayLike) -> Mask:
        return _combined(Or, self, other)

    def __ror__(self, other: ArrayLike) -> Mask:
        return _combined(Or, other, self)

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError("a mask is neither true nor false: combine masks with &, | and ~")


def _combined(kind, *terms):
    flat: list[Mask] = []
    for term in map(_arguments.unwrapped, terms):
        if isinstance(term, jax.Array | np.ndarray | np.bool_ | jax.ShapeDtypeStruct):
            if term.dtype != jnp.bool_:
                raise ValueError(
                    "a mask is combined with masks and bool arrays (True = attend), got an array "
                    f"of dtype {term.dtype}"
                )
            term = dense(term)  # pyright: ignore[reportArgumentType]
        if not isinstance(term, Mask):
            return NotImplemented
        # One of many terms is easier on the eye than a chain of two.
        flat += term.terms if isinstance(term, And | Or) and type(term) is kind else (term,)
    return kind(tuple(flat))


def array_of(mask: Any) -> jax.Array:
    """That of an argument `mask` which is none of these values."""
    allowed = "mask must be a bool array or a value of jaxflash.masks"
    mask = _arguments.unwrapped(mask)
    if callable(mask):
        if mask in (causal, window, lengths, segments, intervals, dense, function):
            raise ValueError(f"{allowed}, got {mask.__name__} without its arguments: call it")
        raise ValueError(
            f"{allowed}, got {type(mask).__name__}; jaxflash.masks.function(f) makes one of a "
            "function"
        )
    if isinstance(mask, tuple | list) and any(isinstance(x, Mask) for x in mask):
        raise ValueError(f"{allowed}, got a {type(mask).__name__} of these: combine them with &")
    return _arguments.array("mask", mask)


def _registered(*data: str):
    """A frozen dataclass as a pytree whose children are these fields."""

    def register(cls):
        static = [field.name for field in dataclasses.fields(cls) if field.name not in data]
        jax.tree_util.register_dataclass(cls, data_fields=list(data), meta_fields=static)
        return cls

    return register


# ---- The values ----------------------------------------------------------------------------------

# Their fields are checked by the functions that make them, not here: JAX puts all kinds of objects
# into a pytree. Masks without arrays are equal where they mean the same, so that they can be static
# arguments; those with arrays only where they are the same object.


@_registered()
@dataclasses.dataclass(frozen=True)
class Window(Mask):
    """Keys from ``left`` before to ``right`` after a query's position; None is no limit."""

    left: int | None
    right: int | None
    alignment: Alignment


@_registered("query", "key_value")
@dataclasses.dataclass(frozen=True, eq=False)
class Lengths(Mask):
    query: Any  # int32, broadcasts to (*B), or None
    key_value: Any  # likewise


@_registered("query_ids", "key_ids")
@dataclasses.dataclass(frozen=True, eq=False)
class Segments(Mask):
    query_ids: Any  # integers, broadcast to (*B, T)
    key_ids: Any  # to (*B, S); None: those of the queries


@_registered("begin", "end")
@dataclasses.dataclass(frozen=True, eq=False)
class Intervals(Mask):
    begin: Any  # int32, broadcast to (*B, N, T), of keys (*B, N, S)
    end: Any  # likewise
    of: Literal["query", "key"]


@_registered("array")
@dataclasses.dataclass(frozen=True, eq=False)
class Dense(Mask):
    array: Any  # bool, broadcasts to (*B, N, T, S)


@_registered("captures")
@dataclasses.dataclass(frozen=True, eq=False)
class Function(Mask):
    function: Callable[..., Any]
    captures: tuple[Any, ...]

    def __call__(self, b: Any, h: Any, q: Any, kv: Any, *captures: Any) -> jax.Array:
        """The function's result, checked: one bool."""
        result = self.function(b, h, q, kv, *captures)
        expected = "masks.function: f must return one bool scalar"
        if not isinstance(result, jax.Array | np.ndarray | np.generic | bool):
            raise ValueError(f"{expected}, got {type(result).__name__}")
        if jnp.shape(result) != ():
            raise ValueError(f"{expected}, got an array of shape {jnp.shape(result)}")
        if jnp.result_type(result) != jnp.bool_:
            raise ValueError(f"{expected}, got dtype {jnp.result_type(result)}")
        return jnp.asarray(result)


@_registered("terms")
@dataclasses.dataclass(frozen=True)
class And(Mask):
    terms: tuple[Mask, ...]


@_registered("terms")
@dataclasses.dataclass(frozen=True)
class Or(Mask):
    terms: tuple[Mask, ...]


@_registered("of")
@dataclasses.dataclass(frozen=True)
class Not(Mask):
    of: Mask

    def __invert__(self) -> Mask:
        return self.of


@_registered("of", "found")
@dataclasses.dataclass(frozen=True, eq=False)
class Planned(Mask):
    of: Mask
    found: dict[str, Any]  # operands of a call, those of `_spec.PLANNED`
    lead: tuple[Any, ...]  # (*batch, query heads), for which it was made

    def beside_others(self) -> Planned:
        """What is known where others hide something, too: what is hidden, but not what is shown as
        a whole."""

        # See `_ranges.Shown`.
        of_wholes = {"inside": np.arange(4) < 2, "visits": np.arange(2) == 1}

        def without_wholes(name, x):
            numbers = of_wholes.get(name.partition("_")[2])
            if numbers is None:
                return x
            return _arguments.computed(lambda x: jnp.where(numbers, np.int32(0), x), x)

        found = {name: without_wholes(name, x) for name, x in self.found.items()}
        return dataclasses.replace(self, found=found)


# ---- How they are made ---------------------------------------------------------------------------


def causal(alignment: Alignment = "top_left") -> Mask:
    """A query sees the keys at positions up to its own.

    Args:
      alignment: the position of query ``i`` among the keys: ``i`` (``"top_left"``) or
        ``i + S - T`` (``"bottom_right"``; where sequence lengths are given, as arguments of the
        call or by ``& masks.lengths(...)``, these are S and T).

    Raises:
      ValueError: `alignment` is neither of the two.

    Examples:
      Four new queries, which are the last of the keys::

          mask = masks.causal("bottom_right")
    """
    return Window(None, 0, _arguments.one_of("masks.causal: alignment", alignment, ALIGNMENTS))


def window(left: int | None, right: int | None, alignment: Alignment = "top_left") -> Mask:
    """A query at position ``p`` sees the keys from ``p - left`` to ``p + right``, both included.

    Args:
      left: a Python int, not negative; None is no limit.
      right: likewise.
      alignment: as for `causal`.

    Raises:
      ValueError: a side or the alignment is invalid.

    Examples:
      The query's own position and 127 before it::

          mask = masks.window(127, 0)
    """
    left = _arguments.window_side("masks.window: left", left)
    right = _arguments.window_side("masks.window: right", right)
    alignment = _arguments.one_of("masks.window: alignment", alignment, ALIGNMENTS)
    return Window(left, right, alignment)


def lengths(query: ArrayLike | None = None, key_value: ArrayLike | None = None) -> Mask:
    """Queries and keys from a length on are padding, which sees nothing and is not seen.

    Args:
      query: int32, broadcasts to ``(*B)``, or an int; None is no limit.
      key_value: likewise.

    Raises:
      ValueError: an array of lengths is not int32.

    Examples:
      A batch of two padded sequences::

          lengths = jnp.array([100, 60], jnp.int32)
          mask = masks.causal() & masks.lengths(lengths, lengths)
    """

    def checked(name, x):
        if x is None:
            return None
        if isinstance(x, int) and not isinstance(x, bool):
            return np.asarray(min(max(x, 0), INT32_MAX), np.int32)
        x = _arguments.array(f"masks.lengths: {name}", x)
        if x.dtype != jnp.int32:
            raise ValueError(f"masks.lengths: {name} must have dtype int32, got {x.dtype}")
        return x

    return Lengths(checked("query", query), checked("key_value", key_value))


def segments(query_ids: ArrayLike, key_ids: ArrayLike | None = None) -> Mask:
    """Queries see the keys with their own id: documents packed into a row, in any order.

    Args:
      query_ids: integers that broadcast to ``(*B, T)``.
      key_ids: integers that broadcast to ``(*B, S)``; None: those of the queries, if T is S.

    Raises:
      ValueError: ids are not integers, or no dtype holds the values of both.

    Examples:
      Two documents of three and two tokens::

          mask = masks.causal() & masks.segments(jnp.array([0, 0, 0, 1, 1]))
    """
    name = "masks.segments"
    query_ids = _arguments.array(f"{name}: query_ids", query_ids)
    if key_ids is None:
        return Segments(_arguments.with_one_dtype(name, query_ids, query_ids)[0], None)
    key_ids = _arguments.array(f"{name}: key_ids", key_ids)
    return Segments(*_arguments.with_one_dtype(name, query_ids, key_ids))


def intervals(begin: ArrayLike, end: ArrayLike, of: Literal["query", "key"] = "query") -> Mask:
    """Each query sees the keys of one interval, from `begin` up to, but excluding, `end`.

    Args:
      begin: integers that broadcast to ``(*B, N, T)``; a negative number counts as 0.
      end: likewise; where it is not above `begin`, the query sees nothing.
      of: with ``"key"`` the roles are exchanged: each key is seen by the queries of one interval,
        and the arrays broadcast to ``(*B, N, S)``.

    Raises:
      ValueError: `begin` or `end` is not of integers, or `of` is neither of the two.

    Examples:
      Blocks of 64 queries that see the keys of their own block::

          begin = jnp.arange(length) // 64 * 64
          mask = masks.intervals(begin, begin + 64)
    """

    def checked(name, x):
        name = f"masks.intervals: {name}"
        if isinstance(x, int):  # of any size
            x = max(-INT32_MAX, min(x, INT32_MAX))
        elif isinstance(x, np.ndarray | np.integer) and np.issubdtype(x.dtype, np.integer):
            x = np.clip(x, -INT32_MAX, INT32_MAX).astype(np.int32)
        x = _arguments.array(name, x)
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} must have an integer dtype, got {x.dtype}")
        if x.dtype == jnp.int32:
            return x
        # Beyond int32 is beyond every array.
        limits = jnp.iinfo(x.dtype)
        low, high = max(limits.min, -INT32_MAX), min(limits.max, INT32_MAX)
        return _arguments.computed(lambda x: jnp.clip(x, low, high).astype(jnp.int32), x)

    of = _arguments.one_of("masks.intervals: of", of, ("query", "key"))
    return Intervals(checked("begin", begin), checked("end", end), of)


def dense(array: ArrayLike) -> Mask:
    """A bool array, True = attend. The argument `mask` also takes such an array directly.

    Args:
      array: bool, broadcasts to ``(*B, N, T, S)``, each axis 1 or full.

    Raises:
      ValueError: the dtype is not bool.

    Examples:
      Keys that are padding, for all heads and queries, from a bool array (B, S)::

          mask = masks.dense(~is_padding[:, None, None, :])
    """
    x = _arguments.array("masks.dense: array", array)
    if x.dtype != jnp.bool_:
        raise ValueError(f"masks.dense: array must have dtype bool (True = attend), got {x.dtype}")
    return Dense(x)


def function(f: Callable[..., Any], *captures: Any) -> Mask:
    """What a function written in JAX shows: ``f(b, h, q, kv, *captures) -> bool``, of scalars.

    It is never stored as an array over queries and keys: it is compiled into the kernels, and one
    pass over it finds which tiles they can skip. One of integers that depends on ``q - kv`` alone
    needs neither if it shows a band that contains distance 0, or every n-th key of one, in a call
    of known lengths, at most 2**24 together (from the bottom right: equal ones, and no sequence
    lengths). Arrays that it captures are operands of the call: other values compile nothing new.
    They have no gradient, and an index out of bounds is clamped, as always in JAX.

    Args:
      f: traced once for each call and identified by what it computes: equal functions compile once.
        ``b`` is the index of the batch element (row-major over the batch axes, 0 without any),
        ``h`` of the query head, ``q`` of the query and ``kv`` of the key, all int32. It may also
        close over arrays. But `jax.jit` identifies a mask among its arguments by the function
        object: define `f` once, and pass what changes as captures.
      *captures: arrays, or pytrees of them, that `f` gets as further arguments.

    Returns:
      The mask. That `f` returns one bool is checked when it is traced.

    Raises:
      ValueError: `f` is not a function.

    Examples:
      A prefix that every query sees, of a different length in each sequence::

          def in_prefix(b, h, q, kv, lengths):
              return kv < lengths[b]

          mask = masks.causal() | masks.function(in_prefix, prefix_lengths)
    """
    if not callable(f) or isinstance(f, Mask):
        raise ValueError(
            f"masks.function: f must be a function (b, h, q, kv) -> bool, got {type(f).__name__}"
        )
    words = "(b, h, q, kv)"
    if captures:
        words += f" and what it captures ({len(captures)} in number)"
    _arguments.takes("masks.function: f", f, words, 4 + len(captures))
    name = "masks.function: a capture"
    return Function(f, jax.tree.map(functools.partial(_arguments.array, name), captures))


# ---- Their sizes ---------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """Of a call."""

    batch: tuple[Any, ...]
    heads: int
    q_len: int
    kv_len: int


def fitted(mask: Mask, sizes: Sizes) -> Mask:
    """The same mask with arrays of the ranks of what they broadcast to.

    Raises:
        ValueError: an array does not broadcast.
    """
    batch, heads, q_len, kv_len = sizes

    def fit(name, x, shape, words):
        return None if x is None else _arguments.broadcastable(name, x, shape, words)

    mask = _anew(mask)
    match mask:
        case And(terms) | Or(terms):
            return type(mask)(tuple(fitted(term, sizes) for term in terms))
        case Not(of):
            return Not(fitted(of, sizes))
        case Planned(of, found, lead):
            full = (*batch, heads)
            for name, hull, length in (("T", "rows_hull", q_len), ("S", "keys_hull", kv_len)):
                if hull not in found:
                    continue
                *axes, planned, _ = found[hull].shape
                # Size 1 is one for all, but where there was no other. `vmap` takes leading axes.
                fits = len(axes) == len(full) <= len(lead) and planned == length
                if not fits or any(
                    size != there and (size != 1 or made_for == 1)
                    for size, made_for, there in zip(axes, lead[-len(full) :], full, strict=True)
                ):
                    raise ValueError(
                        f"masks.plan: made for (*batch, query heads) = {lead} and {name} = "
                        f"{planned}, got {full} and {name} = {length}"
                    )
            return Planned(fitted(of, sizes), found, lead)
        case Lengths(query, key_value):
            return Lengths(
                fit("masks.lengths: query", query, batch, "(*batch)"),
                fit("masks.lengths: key_value", key_value, batch, "(*batch)"),
            )
        case Segments(query_ids, key_ids):
            if key_ids is None:
                key_ids = query_ids
                if q_len != kv_len:
                    raise ValueError(
                        f"masks.segments: key_ids must be given where queries ({q_len}) and keys "
                        f"({kv_len}) differ in length; got query_ids {query_ids.shape} alone"
                    )
            return Segments(
                fit("masks.segments: query_ids", query_ids, (*batch, q_len), "(*batch, T)"),
                fit("masks.segments: key_ids", key_ids, (*batch, kv_len), "(*batch, S)"),
            )
        case Intervals(begin, end, of):
            length, letter = (q_len, "T") if of == "query" else (kv_len, "S")
            shape, words = (*batch, heads, length), f"(*batch, query heads, {letter})"
            return Intervals(
                fit("masks.intervals: begin", begin, shape, words),
                fit("masks.intervals: end", end, shape, words),
                of,
            )
        case Dense(array):
            shape = (*batch, heads, q_len, kv_len)
            return Dense(fit("masks.dense: array", array, shape, LOGITS))
    return mask


def _anew(mask: Mask) -> Mask:
    """Of new arrays: what became of the leaves of a pytree, nobody has checked."""
    match mask:
        case Lengths(query, key_value):
            return lengths(query, key_value)
        case Segments(query_ids, key_ids):
            return segments(query_ids, key_ids)
        case Intervals(begin, end, of):
            return intervals(begin, end, of)
        case Dense(array):
            return dense(array)
        case Function(f, captures):
            return function(f, *captures)
    return mask


def conjuncts(mask: Mask) -> tuple[Mask, ...]:
    """The masks that all must allow what `mask` allows: by them it holds for a call as a whole."""
    if isinstance(mask, Planned):
        return conjuncts(mask.of)
    if not isinstance(mask, And):
        return (mask,)
    return tuple(part for term in mask.terms for part in conjuncts(term))


def valid_lengths(mask: Mask, q_len, kv_len) -> tuple[jax.Array, jax.Array]:
    """Queries and keys of each sequence, (*#B) each, by the lengths that hold for a call as a
    whole."""
    valid_queries, valid_keys = jnp.int32(q_len), jnp.int32(kv_len)
    for part in conjuncts(mask):
        if isinstance(part, Lengths):
            if part.query is not None:
                valid_queries = jnp.minimum(valid_queries, jnp.maximum(part.query, 0))
            if part.key_value is not None:
                valid_keys = jnp.minimum(valid_keys, jnp.maximum(part.key_value, 0))
    return valid_queries, valid_keys


def plan_of(mask: Mask) -> Planned | None:
    """A plan that holds for the mask as a whole, if it was given one."""
    if isinstance(mask, Planned):
        return mask
    terms = mask.terms if isinstance(mask, And) else ()
    return next((plan for plan in map(plan_of, terms) if plan is not None), None)
