"""Single arguments as users give them: checked, cast, and as arrays, for `_spec`, `masks` and the
adapters. What is wrong is a ValueError that names the argument, what came and what is allowed.
Arrays may be `jax.ShapeDtypeStruct`.
"""

from __future__ import annotations

import inspect
import operator
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np


def array(name: str, x: Any) -> jax.Array:
    """The argument as an array; a `jax.ShapeDtypeStruct` stands for one."""
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return typing.cast(jax.Array, x)
    if x is None:
        raise ValueError(f"{name} must be an array, got None")
    _check_is_not_cut_off(name, x)
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be an array, got {type(x).__name__}: {error}") from error


def _check_is_not_cut_off(name: str, x: Any) -> None:
    """JAX takes the lower 32 bits of NumPy's integers of 64, without a word: of ids, for example,
    different ones would become the same."""
    if not isinstance(x, np.ndarray | np.integer) or x.dtype not in (np.int64, np.uint64):
        return
    limits = np.iinfo(jax.dtypes.canonicalize_dtype(x.dtype))
    if x.size > 0 and not (limits.min <= x.min() and x.max() <= limits.max):
        raise ValueError(
            f"{name} must lie in {limits.dtype} unless jax_enable_x64 is set, got {x.dtype} from "
            f"{x.min()} to {x.max()}"
        )


def unwrapped(x: Any) -> Any:
    """The array of what stands for one in JAX, such as a variable of Flax; others as they are."""
    as_array = getattr(x, "__jax_array__", None)  # None of tracers
    return x if as_array is None else as_array()


def is_abstract(x) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def promoted(query, key, value, dtype=None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The three in `dtype`; None: in their common one, by JAX's promotion."""
    query, key, value = array("query", query), array("key", key), array("value", value)
    if dtype is None:
        dtype = jnp.result_type(query, key, value)
    return query.astype(dtype), key.astype(dtype), value.astype(dtype)


def computed(function: Callable, *arrays) -> Any:
    """A function of arrays; its types alone where one of them is abstract."""
    if any(map(is_abstract, arrays)):
        return jax.eval_shape(function, *arrays)
    return function(*arrays)


def cast(x, dtype) -> Any:
    return computed(lambda x: x.astype(dtype), x)


def broadcastable(name: str, x, shape, words: str) -> Any:
    """`x` with leading axes of size 1 added or removed, so that it has the rank of `shape`, whose
    axes `words` names."""
    padded = (1,) * (len(shape) - len(x.shape)) + x.shape
    while len(padded) > len(shape) and padded[0] == 1:
        padded = padded[1:]
    if len(padded) != len(shape) or any(
        size not in (1, full) for size, full in zip(padded, shape, strict=True)
    ):
        raise ValueError(
            f"{name} must broadcast to {words} = {shape}, each axis 1 or full, got shape {x.shape}"
        )
    return x if padded == x.shape else computed(lambda x: x.reshape(padded), x)


def with_one_dtype(name: str, query_ids, key_ids) -> tuple[Any, Any]:
    """Integer ids in one dtype, none narrower than the ids: different ones must stay different."""
    dtypes = query_ids.dtype, key_ids.dtype
    for dtype in dtypes:
        if not jnp.issubdtype(dtype, jnp.integer):
            raise ValueError(f"{name} must have an integer dtype, got {dtype}")
    size = max(dtype.itemsize for dtype in dtypes)
    unsigned = [jnp.issubdtype(dtype, jnp.unsignedinteger) for dtype in dtypes]
    if any(unsigned) and not all(unsigned):
        large = dtypes[unsigned.index(True)].itemsize
        if large >= (8 if jax.config.jax_enable_x64 else 4):  # pyright: ignore
            raise ValueError(
                f"{name} must have one integer dtype, got {dtypes[0]} and {dtypes[1]}: no dtype "
                "has the values of both"
            )
        size = max(size, 2 * large)
    dtype = jnp.int64 if size > 4 else jnp.int32
    return cast(query_ids, dtype), cast(key_ids, dtype)


def window(name: str, sides) -> tuple[int | None, int | None]:
    """(left, right) of an int for both sides, or of a pair."""
    pair = sides if isinstance(sides, (tuple, list)) else (sides, sides)
    if len(pair) != 2:
        raise ValueError(f"{name} must be an int or a pair (left, right), got {sides}")
    allowed = "a non-negative int or a pair (left, right) of non-negative ints or None (no limit)"
    left, right = (window_side(name, side, allowed, sides) for side in pair)
    return left, right


def window_side(
    name: str, side, allowed: str = "a non-negative int or None (no limit)", given=None
) -> int | None:
    """One of a window's sides; `given`: what it is part of."""
    if side is None:
        return None
    if isinstance(side, jax.core.Tracer):
        raise ValueError(
            f"{name} must be {allowed} known at trace time, got a traced {side.dtype}: name it in "
            "static_argnames of jax.jit, or call once for each"
        )
    try:
        number = -1 if isinstance(side, bool) else operator.index(side)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"{name} must be {allowed}, got {side if given is None else given}")
    return number


def takes(name: str, function: Callable, words: str, count: int) -> None:
    """Checks that a function can be called with so many arguments, as far as Python can tell."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # it has none
        return
    try:
        signature.bind(*(None,) * count)
    except TypeError as error:
        raise ValueError(f"{name} must take {words}: {error}") from error


def number(name: str, x) -> float:
    if isinstance(x, jax.core.Tracer):
        raise ValueError(f"{name} must be a Python number known at trace time, got {x!r}")
    shape = getattr(x, "shape", ())
    is_real = not isinstance(x, bool | str | bytes | bytearray)
    if isinstance(x, np.generic | np.ndarray | jax.Array):  # others convert what is real alone
        is_real = any(jnp.issubdtype(x.dtype, kind) for kind in (jnp.floating, jnp.integer))
    if not is_real or shape != ():
        got = repr(x) if shape == () else f"an array of shape {shape}"
        raise ValueError(f"{name} must be a real number, got {got}")
    try:
        return float(x)
    except (TypeError, ValueError, OverflowError) as error:
        got = type(x).__name__
        raise ValueError(f"{name} must be a real number, got {got}: {error}") from error


def flag(name: str, x) -> bool:
    if isinstance(x, jax.core.Tracer):
        raise ValueError(
            f"{name} must be known at trace time, got a traced {x.dtype}: name it in "
            "static_argnames of jax.jit, or choose between two calls with jax.lax.cond"
        )
    if not isinstance(x, (bool, np.bool_)):
        raise ValueError(f"{name} must be True or False, got {x!r}")
    return bool(x)


def one_of(name: str, x, allowed, extra: str = "") -> Any:
    if not isinstance(x, str) or x not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}{extra}, got {x!r}")
    return x
