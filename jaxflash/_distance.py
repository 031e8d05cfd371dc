"""Functions of a mask that ask for nothing but how far a key is from a query: bands, and dilated
ones, of which nothing has to be evaluated.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxflash._jaxpr import is_literal
from jaxflash._program import Program
from jaxflash._spec import AttentionSpec, Operands


class Band(NamedTuple):
    """Every `dilation`-th key, from ``left`` before to ``right`` after a query; None: no limit."""

    left: int | None
    right: int | None
    dilation: int


# 64 MB for each operation of a function.
_MOST_DISTANCES = 1 << 24


@functools.lru_cache(maxsize=256)
def band_of(predicate: Program, q_len: int, kv_len: int) -> Band | None:
    """What a predicate shows in a call of such lengths, which are not 0; None: no band.

    It is evaluated at every distance that the call has, in integers: what it computes, not how it
    is written, decides.
    """
    if q_len + kv_len > _MOST_DISTANCES:
        return None
    distance = np.arange(1 - kv_len, q_len, dtype=np.int32)
    visible = _evaluated(predicate, distance)
    if visible is None:
        return None
    seen = distance[np.broadcast_to(visible, distance.shape)]
    if seen.size == 0 or not seen[0] <= 0 <= seen[-1]:
        return None
    left, right = int(seen[-1]), -int(seen[0])
    dilation = int(np.gcd.reduce(seen)) or 1
    if seen.size != (left + right) // dilation + 1:
        return None
    return Band(
        None if left + dilation >= q_len else left,
        None if right + dilation >= kv_len else right,
        dilation,
    )


# Of equal dtypes; all are exact, and wrap around as in XLA.
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "abs": np.abs,
    "add": np.add,
    "and": np.bitwise_and,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "sign": np.sign,
    "sub": np.subtract,
    "xor": np.bitwise_xor,
}
# Of two positions these are functions of their distance, and of 0.
_OF_DISTANCE = ("sub", "eq", "ge", "gt", "le", "lt", "ne")
# No sum of two of them and a distance wraps around.
_LARGEST_OFFSET = 2**28


class _Values(NamedTuple):
    """Of a variable, at all numbers that `of` may have: "q", "kv", "distance"; "": one for all."""

    of: str
    numbers: np.ndarray


def _evaluated(predicate: Program, distance: np.ndarray) -> np.ndarray | None:
    """The result at each distance; None where it is not known to be a function of it."""
    jaxpr = predicate.value().jaxpr
    _score, _b, _h, q, kv, *_ = jaxpr.invars
    positions = np.arange(max(-distance[0], distance[-1]) + 1, dtype=np.int32)
    values = {q: _Values("q", positions), kv: _Values("kv", positions)}

    def value(atom) -> _Values | None:
        if not is_literal(atom):
            return values.get(atom)
        aval: Any = atom.aval
        x = np.asarray(atom.val, aval.dtype)
        return _Values("", x) if x.dtype.kind in "biu" else None

    eqn: Any
    for eqn in jaxpr.eqns:
        inputs = [x for atom in eqn.invars if (x := value(atom)) is not None]
        if len(inputs) < len(eqn.invars):
            continue  # perhaps nobody asks for it
        name, arrays = eqn.primitive.name, [x.numbers for x in inputs]
        of, result = {x.of for x in inputs} - {""}, None
        if of == {"q", "kv"} and len(inputs) == 2:
            of, result = {"distance"}, _of_both(name, inputs[0].of == "q", arrays, distance)
        elif len(of) <= 1:
            result = _result(name, arrays, eqn.outvars[0].aval.dtype)
        if result is not None:
            values[eqn.outvars[0]] = _Values("".join(of), result)
    result = value(jaxpr.outvars[0])
    return None if result is None or result.of not in ("", "distance") else result.numbers


def _of_both(
    name: str, query_first: bool, arrays: list[np.ndarray], distance: np.ndarray
) -> np.ndarray | None:
    """Of something of q and something of kv."""
    positions = np.arange(arrays[0].size)
    if (
        name in _OF_DISTANCE
        and all(x.dtype == np.int32 and abs(int(x[0])) < _LARGEST_OFFSET for x in arrays)
        and all(np.array_equal(x, positions + x[0]) for x in arrays)
    ):
        # As kv > q - 5.
        apart = (distance if query_first else -distance) + (arrays[0][0] - arrays[1][0])
        return _OPERATIONS[name](apart, np.zeros_like(apart))
    if name in ("eq", "ne") and np.array_equal(arrays[0], arrays[1]):
        # Such as q % 4 == kv % 4: equal where positions are a multiple of the period apart.
        (again,) = np.nonzero(arrays[0][1:] == arrays[0][0])
        period = int(again[0]) + 1 if again.size else arrays[0].size
        once = arrays[0][:period]
        if np.unique(once).size == period and np.array_equal(
            np.resize(once, arrays[0].shape), arrays[0]
        ):
            return (distance % period == 0) == (name == "eq")
    return None


def _result(name: str, inputs: list[np.ndarray], dtype) -> np.ndarray | None:
    if name == "convert_element_type" and dtype.kind in "biu":
        return inputs[0].astype(dtype)
    if name == "select_n":
        which, result, *others = inputs
        for number, case in enumerate(others, 1):
            result = np.where(which >= number, case, result)
        return result
    if name in ("rem", "div") and np.all(inputs[1] != 0):
        # Towards zero.
        rest = np.fmod(*inputs)
        return rest if name == "rem" else (inputs[0] - rest) // inputs[1]
    if name not in _OPERATIONS:
        return None
    with np.errstate(over="ignore"):
        return _OPERATIONS[name](*inputs)


# ---- Dilated calls -------------------------------------------------------------------------------


def of_class(spec: AttentionSpec) -> AttentionSpec:
    """The spec of the positions that are a multiple of the dilation apart, numbered anew."""
    left, right = (
        None if side is None else side // spec.dilation for side in (spec.left, spec.right)
    )
    return dataclasses.replace(spec, left=left, right=right, dilation=1)


def in_classes(way: Callable, spec: AttentionSpec, operands: Operands, *arrays) -> Any:
    """`way(spec, operands, *arrays)`: of a dilated call with the classes as one more batch axis.
    All arrays, and those that it returns, are (*B, length, ...)."""
    if spec.dilation == 1:
        return way(spec, operands, *arrays)
    axis = operands.query.ndim - 3

    def split(x):
        shape = (*x.shape[:axis], x.shape[axis] // spec.dilation, spec.dilation)
        return jnp.moveaxis(x.reshape(*shape, *x.shape[axis + 1 :]), axis + 1, axis)

    def joined(x):
        x = jnp.moveaxis(x, axis, axis + 1)
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

    return jax.tree.map(joined, way(of_class(spec), *jax.tree.map(split, (operands, *arrays))))


def into_heads(x, batch_rank: int, dilation: int):
    """An array (*B, length, heads, ...) as (*B, length // dilation, dilation * heads, ...): each
    class of positions that are a multiple of the dilation apart becomes further heads. Nothing
    moves: `dilation` neighbouring positions are read as one with that many times the heads."""
    *batch, length, heads = x.shape[: batch_rank + 2]
    return x.reshape(*batch, length // dilation, dilation * heads, *x.shape[batch_rank + 2 :])


def out_of_heads(x, batch_rank: int, dilation: int):
    """The inverse of `into_heads`."""
    *batch, length, heads = x.shape[: batch_rank + 2]
    return x.reshape(*batch, length * dilation, heads // dilation, *x.shape[batch_rank + 2 :])
