"""Score programs: what happens to a logit between the product of query and key and the mask, and
mask functions, as values.

A program is a scalar function of (score, b, h, q, kv, distance) and of the arrays that it captures,
traced once to a jaxpr. The blockwise path evaluates it over tiles, `_printer` prints it for the
kernels; derivatives are JAX's own.

The score is scale * q k^T. b is the batch element (row-major over the batch axes), h the query
head, q and kv are row and column number, and distance is query position minus key position as
causal, window and ALiBi compare them; all int32.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxflash import _jaxpr
from jaxflash._jaxpr import is_literal

if TYPE_CHECKING:
    from jax.extend import core  # takes as long to import as the rest of the package

# Arguments of a program; its captures follow them.
ARGUMENTS = ("score", "b", "h", "q", "kv", "distance")


def constant(index) -> Any:
    """The number that an entry of `View.index` is, None if it is a variable."""
    return index.val if is_literal(index) else index if isinstance(index, int) else None


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced score program. Equal programs are equal values, whichever functions they came from.

    Attributes:
        text: value and derivative, printed; two programs with one text and the same shapes are the
            same program.
        shapes: of the captures; in the text, symbolic sizes of two scopes look alike.
        jaxpr: of `ARGUMENTS` and the captures, without constants. Calls are inlined, but for those
            with derivatives of their own.
        parts: the arguments of the call that it is made of.
        axes: of the first captures, those of built-in features, what indexes each of their axes:
            N query heads, T rows, S columns.
    """

    text: str
    shapes: tuple[tuple[Any, ...], ...]
    jaxpr: core.ClosedJaxpr = dataclasses.field(compare=False, repr=False)
    parts: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    axes: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    @property
    def capture_types(self) -> tuple[Any, ...]:
        """Type of each capture: the shape that the program indexes, without batch axes."""
        return tuple(self.jaxpr.in_avals[len(ARGUMENTS) :])

    def value(self) -> core.ClosedJaxpr:
        """The result, of the same arguments, every branch inlined."""
        return _value(self)

    def value_and_slope(self) -> core.ClosedJaxpr:
        """(logit, d logit / d score) of the same arguments, every call and branch inlined."""
        return _value_and_slope(self)

    def value_and_partials(self, capture: int) -> tuple[core.ClosedJaxpr, tuple[View, ...]]:
        """The derivatives by what is loaded of a capture.

        Returns:
            A jaxpr of a float for each load (that is 0) and the arguments, with the results logit,
            the derivative of the logit by each loaded value, and the indices of each load that are
            not constant; every call and branch inlined. And the loads: elements of the capture,
            whose indices are ints or None, where the only index is 0, or the `Result` that they
            are.
        """
        return _value_and_partials(self, capture)


# What is known by its arguments alone, with branches once their derivatives are.
_EVERYTHING = {**_jaxpr.CALLS, **_jaxpr.CUSTOM_DERIVATIVES, **_jaxpr.BRANCHES}


@functools.lru_cache(maxsize=256)
def _value(program: Program) -> core.ClosedJaxpr:
    return _jaxpr.inlined(program.jaxpr, _jaxpr.BRANCHES)


@functools.lru_cache(maxsize=256)
def _value_and_slope(program: Program) -> core.ClosedJaxpr:
    derivatives, constants = _jaxpr.differentiated(program.jaxpr, (0,))
    closed = _jaxpr.inlined(derivatives, _EVERYTHING)
    if constants or closed.consts:
        raise NotImplementedError("its rule for derivatives has arrays of its own")
    return closed


@functools.lru_cache(maxsize=256)
def _value_and_partials(
    program: Program, capture: int
) -> tuple[core.ClosedJaxpr, tuple[View, ...]]:
    return _with_partials(program.jaxpr, capture)


@functools.lru_cache(maxsize=256)
def check_rules(program: Program) -> None:
    """Raises NotImplementedError where the program's custom derivatives cannot be computed here: a
    backward rule that is not linear in its cotangent, as what it makes of 1 is multiplied by
    cotangents; or rules with traced arrays, which are no longer known where they are called."""
    text = str(program.jaxpr)
    if not any(name in text for name in _jaxpr.CUSTOM_DERIVATIVES):
        return
    try:
        _, constants = _jaxpr.differentiated(program.jaxpr, (0,))
    except Exception:  # in its own words, where it is differentiated
        return
    traced = [x for x in constants if isinstance(x, jax.core.Tracer)]  # pyright: ignore
    if traced:
        raise NotImplementedError(
            "score_mod has a function with a derivative of its own, whose rule closes over a "
            f"traced array, {jax.typeof(traced[0])}: pass what it reads of the array as an argument"
        )
    if "custom_vjp_call" not in text:
        return
    function = _jaxpr.as_function(program.jaxpr)

    def transpose_of_pullback(score, *others):
        logit, pull = jax.vjp(lambda score: function(score, *others)[0], score)
        return jax.linear_transpose(pull, logit)((score,))

    try:
        _jaxpr.traced(transpose_of_pullback, program.jaxpr.in_avals)
    except Exception as error:  # JAX has many for what has no transpose
        raise NotImplementedError(
            "score_mod has a jax.custom_vjp whose backward rule is not linear in the cotangent, as "
            "rules that clip it are: its derivative cannot be multiplied by cotangents"
        ) from error


def trace(
    function: Callable,
    captures: Sequence[Any],
    dtype,
    inlined: dict[str, str] = _jaxpr.CALLS,
    mesh: Any = None,
) -> tuple[Program, tuple[Any, ...]]:
    """The program of ``function(score, b, h, q, kv, distance, *captures)``, and all its captures:
    the given ones, then the arrays that the function closes over, complex ones as two each.

    Args:
        function: of scalars, and of captures of the given types.
        captures: arrays that the function takes as arguments, or their types.
        dtype: of the score and of the result.
        inlined: equations that are replaced by what they call.
        mesh: an explicit one that the call lies on, or None.

    Raises:
        ValueError: the function closes over a Ref, which is no array.
        NotImplementedError: it asks for an axis of `jax.vmap`.
    """
    closed = _traced(function, (*_argument_types(dtype), *captures), mesh)
    for x in closed.consts:
        if isinstance(x, jax.Ref):
            raise ValueError(
                "score_mod and functions of a mask must capture arrays, and one of them captures a "
                f"Ref, {jax.typeof(x)}: read it before the call, ref[...]"
            )
    _check_axes(closed)
    closed_over = []
    # Constants become arguments after the given captures; those of an inner call come to light
    # when the call is inlined.
    while True:
        closed_over += closed.consts
        closed = _jaxpr.inlined(closed, inlined)
        if not closed.consts:
            break
    closed, closed_over = _jaxpr.of_real_arrays(closed, closed_over)
    closed, closed_over = _without_missing_derivatives(closed, closed_over)
    types: list[Any] = closed.in_avals[len(ARGUMENTS) :]
    shapes = tuple(t.shape for t in types)
    return Program(_jaxpr.identity(closed), shapes, closed), (*captures, *closed_over)


def trace_predicate(
    function: Callable, captures: Sequence[Any], mesh: Any = None
) -> tuple[Program, tuple[Any, ...]]:
    """As `trace`, of ``function(b, h, q, kv, *captures) -> bool``; no derivative is asked for."""

    def of_score(score, b, h, q, kv, distance, *captures):
        return function(b, h, q, kv, *captures)

    calls = {**_jaxpr.CALLS, **_jaxpr.CUSTOM_DERIVATIVES}
    return trace(of_score, captures, jnp.float32, calls, mesh)


def _check_axes(jaxpr) -> None:
    """An axis of `jax.vmap` is gone where the program is evaluated; one of a mesh is not."""
    known = jax.sharding.get_abstract_mesh().manual_axes
    for eqn in _jaxpr.equations(jaxpr):
        axes = eqn.params.get("axis_name", eqn.params.get("axes", ()))
        for axis in axes if isinstance(axes, tuple) else (axes,):
            if isinstance(axis, str) and axis not in known:
                raise NotImplementedError(
                    f"score_mod and functions of a mask cannot use the axis {axis!r} of jax.vmap "
                    f"({eqn.primitive.name}): compute it before the call, and capture the result"
                )


def _without_missing_derivatives(
    closed: core.ClosedJaxpr, arrays: list[Any]
) -> tuple[core.ClosedJaxpr, list[Any]]:
    """The same jaxpr and its last arguments, where a `jax.custom_vjp` closes over arrays: for those
    it has no derivative, which JAX refuses where somebody asks for it."""
    first = len(closed.in_avals) - len(arrays)
    floats = [i for i, x in enumerate(arrays, first) if jnp.issubdtype(x.dtype, jnp.floating)]
    if not floats or "custom_vjp_call" not in str(closed) or _jaxpr.has_gradients(closed, floats):
        return closed, arrays
    missing = {i for i in floats if not _jaxpr.has_gradients(closed, [i])}
    if not _jaxpr.has_gradients(closed, [0]):
        return closed, arrays

    def function(*arguments):
        values = [jax.lax.stop_gradient(x) if i in missing else x for i, x in enumerate(arguments)]
        return _jaxpr.as_function(closed)(*values)

    arrays = [_without_derivative(x) if i in missing else x for i, x in enumerate(arrays, first)]
    return _jaxpr.traced(function, closed.in_avals), arrays


@jax.custom_jvp
def _without_derivative(x):
    return x


@_without_derivative.defjvp
def _(primals, tangents):
    (x,) = primals
    raise NotImplementedError(
        f"score_mod has a jax.custom_vjp that closes over an array, {jax.typeof(x)}, by which it "
        "has no derivative: pass what it reads of the array as an argument"
    )


def _traced(function: Callable, types, mesh: Any) -> core.ClosedJaxpr:
    """The jaxpr of a function and what it closes over. Its loops and branches want values of one
    type, with mesh and mesh axes, and what the arguments are mixed with has those of the call:
    types of the arguments are tried until they go together."""
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    ways = [functools.partial(_jaxpr.traced, function, types)]
    if axes:
        # As the arguments of a call inside `shard_map` may.
        ways.insert(0, functools.partial(_jaxpr.traced, _of_varying(function, axes), types))
    elif mesh is not None:
        ways.append(functools.partial(_jaxpr.traced, function, types, mesh))
    try:
        return ways[0]()
    except Exception:
        for way in ways[1:]:
            with contextlib.suppress(Exception):
                return way()
        raise


def _of_varying(function: Callable, axes: tuple[str, ...]) -> Callable:
    """The function, of arguments that vary over mesh axes."""

    def of_varying(*arguments):
        return function(*(jax.lax.pcast(x, axes, to="varying") for x in arguments))

    return of_varying


def _argument_types(dtype) -> tuple[jax.ShapeDtypeStruct, ...]:
    integers = (jax.ShapeDtypeStruct((), jnp.int32),) * (len(ARGUMENTS) - 1)
    return jax.ShapeDtypeStruct((), dtype), *integers


def _with_partials(
    closed: core.ClosedJaxpr, capture: int
) -> tuple[core.ClosedJaxpr, tuple[View, ...]]:
    jaxpr = _jaxpr.reading_ahead(closed).jaxpr
    variable = jaxpr.invars[len(ARGUMENTS) + capture]
    aval: Any = variable.aval
    whole = View.whole(capture, aval.shape)

    def run(shifts, arguments):
        """(logit, loads, values of their indices), each load shifted by the next of `shifts`."""
        values = dict(zip(jaxpr.invars, arguments, strict=True))
        views = {variable: whole}
        loads: dict[core.Var, View] = {}
        shifts = iter(shifts)

        def read(atom):
            if is_literal(atom) or atom not in views or not views[atom].has_derivative:
                return _jaxpr.read(values, atom)
            if atom not in loads:
                loads[atom] = views[atom]
                shift = next(shifts, None)
                if shift is not None and values[atom].size == 1:
                    value = values[atom]
                    values[atom] = value + shift.astype(value.dtype).reshape(value.shape)
            return values[atom]

        for eqn in jaxpr.eqns:
            first = eqn.invars[0] if eqn.invars else None
            view = None
            if first is not None and not is_literal(first) and first in views:
                view = views[first].after(eqn, eqn.invars[1:])
            if view is None:
                inputs = [read(atom) for atom in eqn.invars]
            else:
                inputs = [_jaxpr.read(values, first), *map(read, eqn.invars[1:])]
                views[eqn.outvars[0]] = view
            values.update(zip(eqn.outvars, _jaxpr.bound(eqn, inputs), strict=True))
        logit = read(jaxpr.outvars[0])
        indices = [
            _jaxpr.read(values, i) for view in loads.values() for i in view.index if _is_read(i)
        ]
        return logit, tuple(loads.values()), indices

    found: list[View] = []

    def find(*arguments):
        logit, views, _ = run((), arguments)
        found.extend(views)
        return logit

    _jaxpr.traced(find, closed.in_avals)
    loads = tuple(found)
    numbers = itertools.count(1 + len(loads))
    numbered = tuple(
        dataclasses.replace(
            load,
            index=tuple(Result(next(numbers)) if _is_read(i) else constant(i) for i in load.index),
        )
        for load in loads
    )

    def function(*arguments):
        def logit_of(shifts):
            logit, _, indices = run(shifts, arguments[len(loads) :])
            return logit, (logit, indices)

        partials, (logit, indices) = jax.grad(logit_of, has_aux=True)(list(arguments[: len(loads)]))
        return logit, *partials, *indices

    score: Any = closed.in_avals[0]
    types = (*(jax.ShapeDtypeStruct((), score.dtype),) * len(loads), *closed.in_avals)
    flat = _jaxpr.traced(function, types)
    inlined = _jaxpr.inlined(flat, _EVERYTHING)
    if flat.consts or inlined.consts:
        raise NotImplementedError("its rule for derivatives has arrays of its own")
    return inlined, numbered


def _is_read(index) -> bool:
    """Whether an entry of `View.index` is a variable."""
    return index is not None and constant(index) is None


@dataclasses.dataclass(frozen=True)
class Result:
    """A result of a jaxpr, by its number."""

    number: int


@dataclasses.dataclass(frozen=True)
class View:
    """A part of a capture in which axes are fixed by scalar indices, on the way to one element."""

    capture: int
    shape: tuple[int, ...]  # of the capture
    # For each axis of the capture an int, a literal or a variable; None while it is whole.
    index: tuple[Any, ...]
    axes: tuple[int | None, ...]  # for each axis of the view, that of the capture; None: of size 1
    # Dtypes that it is converted to, one after the other; None: no derivative reaches the capture.
    casts: tuple[Any, ...] = ()

    @classmethod
    def whole(cls, capture: int, shape: tuple[int, ...]) -> View:
        return cls(capture, shape, (None,) * len(shape), tuple(range(len(shape))))

    @property
    def has_derivative(self) -> bool:
        """Whether what is done with the view has a derivative by the capture."""
        return all(
            dtype is not None and jnp.issubdtype(dtype, jnp.floating) for dtype in self.casts
        )

    def after(self, eqn, scalars: Sequence[Any]) -> View | None:
        """The view that an equation makes of this one (its first operand) and of scalar operands;
        None if it makes something else.
        """
        if not eqn.outvars:  # `jax.debug.print`
            return None
        name, params, out = eqn.primitive.name, eqn.params, eqn.outvars[0].aval
        if name in ("convert_element_type", "stop_gradient", "copy", "copy_p", "pvary"):
            more = {"convert_element_type": (out.dtype,), "stop_gradient": (None,)}.get(name, ())
            return dataclasses.replace(self, casts=(*self.casts, *more))
        if name == "dynamic_slice":
            return self._cut(scalars, params["slice_sizes"])
        if name == "slice" and params["strides"] is None:
            starts, limits = params["start_indices"], params["limit_indices"]
            sizes = tuple(end - start for start, end in zip(starts, limits, strict=True))
            return self._cut(starts, sizes)
        if name == "squeeze":
            rank = len(self.axes)
            return self._keeping(
                d for d in range(rank) if d not in {n % rank for n in params["dimensions"]}
            )
        if name == "reshape" and params["dimensions"] is None and math.prod(out.shape) == 1:
            return self._keeping(())._padded(len(out.shape))
        return None

    def _cut(self, starts, sizes) -> View | None:
        index, axes = list(self.index), list(self.axes)
        for d, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            axis = self.axes[d]
            if axis is None or size == self.shape[axis]:
                continue
            if size != 1:
                return None
            index[axis], axes[d] = start, None
        return dataclasses.replace(self, index=tuple(index), axes=tuple(axes))

    def _keeping(self, kept) -> View:
        """Without the other axes, which are of size 1."""
        kept = tuple(kept)
        index = list(self.index)
        for d, axis in enumerate(self.axes):
            if d not in kept and axis is not None:
                index[axis] = 0
        return dataclasses.replace(self, index=tuple(index), axes=tuple(self.axes[d] for d in kept))

    def _padded(self, rank: int) -> View:
        return dataclasses.replace(self, axes=(None,) * (rank - len(self.axes)) + self.axes)
