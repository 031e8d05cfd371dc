"""Score programs over tiles, for the blockwise path.

A program is cut in two: the elements that it takes of its captures, and a scalar function of the
score, the indices and these elements. Elements whose indices follow rows and columns are slices of
their array, others are gathered. JAX maps the function over the elements of a tile and
differentiates it.

Arrays of a tile have the rank of the grouped logits (*B, K, G, rows, columns), G = N // K query
heads per key head, with size 1 where an axis does not matter.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxflash import _jaxpr
from jaxflash._jaxpr import is_literal
from jaxflash._program import ARGUMENTS, Program, View, constant
from jaxflash._sizes import at_most
from jaxflash._spec import compute_dtype
from jaxflash._split import padded

if TYPE_CHECKING:
    from jax.extend import core


class GroupedSizes(NamedTuple):
    """Of a call, in the words of the grouped logits."""

    batch: tuple[Any, ...]
    kv_heads: int
    group: int
    q_len: int
    kv_len: int
    is_part: bool  # of a batch, in which its elements have other numbers than 0, 1 ...


class Indices(NamedTuple):
    """The arguments of a program besides the score, as int32 arrays of a tile."""

    b: Any  # (*B, 1, 1, 1, 1)
    h: Any  # (*1, K, G, 1, 1)
    q: Any  # (*1, 1, 1, rows, 1)
    kv: Any  # (*1, 1, 1, 1, columns)
    distance: Any  # (*#B, 1, 1, rows, columns), or None where nothing asks for it


class Place(NamedTuple):
    """Where a tile lies."""

    row: Any  # number of its first row
    column: Any
    rows: int  # how many there are
    columns: int
    indices: Indices


class TileScores:
    """A program, for the tiles of a call.

    Captures come as `prepared` makes them, by their numbers. Those with a gradient are handed to
    each method; the others, `fixed`, are given once, as the caller has them.
    """

    def __init__(self, program: Program, sizes: GroupedSizes, dtype, fixed: dict[int, Any]):
        self._program = split = _split(program)
        self._sizes = sizes
        self._dtype = dtype
        self._rank = len(sizes.batch) + 4
        slicings = [_slicing(split, load, sizes) for load in split.loads]
        self._head_axes = [
            _head_axes(capture, split, slicings) for capture in range(len(split.captures))
        ]
        # Without its head axis split, a capture cannot be sliced by heads.
        self._slicings = [
            None if s is None or s.head_axes != self._head_axes[load.capture] else s
            for s, load in zip(slicings, split.loads, strict=True)
        ]
        self._fixed = {i: self.prepared(i, x) for i, x in fixed.items()}

    @property
    def asks_for_distance(self) -> bool:
        return self._program.asks_for_distance

    def prepared(self, capture: int, x):
        """A capture (*#B, *its shape in the program), as `read` and `add` want it: an axis of the
        heads is split into key heads and the query heads of each."""
        shape = list(x.shape)
        for axis in reversed(self._head_axes[capture]):
            axis += len(self._sizes.batch)
            shape[axis : axis + 1] = [self._sizes.kv_heads, self._sizes.group]
        return x.reshape(shape)

    def read(self, capture: int, x, place: Place) -> tuple[Any, ...]:
        """What a tile reads of a capture: an array for each element that the program takes of it,
        then all of it if the program uses more than elements. Linear in `x`; in the dtype of sums,
        that of the array's gradient among them."""
        dtype = compute_dtype(self._dtype, x.dtype)
        reads = tuple(
            self._element(number, x, place).astype(dtype)
            for number in self._program.numbers[capture]
        )
        return (*reads, x.astype(dtype)) if self._program.is_whole[capture] else reads

    def add(self, capture: int, total, place: Place, reads: tuple[Any, ...]):
        """The transpose of `read`, added to `total`, which is shaped like the capture."""
        for number, x in zip(self._program.numbers[capture], reads, strict=False):
            slicing = self._slicings[number]
            if slicing is None:
                index = self._gathered_index(number, total, place)
                total = total.at[index].add(x.astype(total.dtype), mode="promise_in_bounds")
            else:
                starts, sizes = slicing.block(total, place)
                sums = jax.lax.dynamic_slice(total, starts, sizes) + slicing.to_capture(x)
                total = jax.lax.dynamic_update_slice(total, sums, starts)
        return total + reads[-1] if self._program.is_whole[capture] else total

    def logits(self, scores, reads: dict[int, tuple[Any, ...]], place: Place, visible):
        """The logits of a tile. No derivative is NaN where `visible` is False or the logit is -inf:
        it is 0 there.

        Args:
            scores: (*B, K, G, rows, columns).
            reads: what `read` returns, of every capture with a gradient.
            place: of the tile.
            visible: bool, broadcastable to the tile; None where all is visible.
        """
        program = self._program
        elements: dict[Any, Any] = {program.score: scores, **self._integers(place)}
        wholes: dict[int, Any] = {i: x for i, x in self._fixed.items() if program.is_whole[i]}
        for capture, arrays in reads.items():
            for number, x in zip(program.numbers[capture], arrays, strict=False):
                elements[program.loads[number].result] = x
            if program.is_whole[capture]:
                wholes[capture] = arrays[-1]
        if visible is None:
            visible = jnp.ones((1,) * self._rank, jnp.bool_)
        whole = tuple(self._as_traced(i, wholes[i]) for i in program.whole)
        num_floats = len(program.floats)

        def value(whole, visible, *elements):
            return program.value(visible, elements[:num_floats], elements[num_floats:], whole)

        arrays = [elements[v] for v in (*program.floats, *program.integers)]
        logits = _over_tile(value, [visible, *arrays], whole)
        return jnp.broadcast_to(logits, scores.shape)

    def holds(self, place: Place):
        """The result of a program that looks at indices and fixed captures alone, as an array that
        broadcasts to the tile."""
        program = self._program
        elements = self._integers(place)
        whole = tuple(self._as_traced(i, self._fixed[i]) for i in program.whole)
        needed = (*program.floats, *program.integers)
        num_floats = len(program.floats)

        def value(whole, *elements):
            return program.of_indices(elements[:num_floats], elements[num_floats:], whole)

        result = _over_tile(value, [elements[v] for v in needed], whole)
        return jnp.broadcast_to(result, jnp.shape(result) or (1,) * self._rank)

    def _as_traced(self, capture: int, x):
        variable = self._program.captures[capture]
        x = x.reshape(variable.aval.shape)
        return x if x.dtype == variable.aval.dtype else x.astype(variable.aval.dtype)

    def _element(self, number: int, x, place: Place):
        slicing = self._slicings[number]
        if slicing is None:
            index = self._gathered_index(number, x, place)
            return x.at[index].get(mode="promise_in_bounds")
        return slicing.to_tile(jax.lax.dynamic_slice(x, *slicing.block(x, place)))

    def _gathered_index(self, number: int, x, place: Place) -> tuple[Any, ...]:
        """For each axis of a capture, an index array of the tile's rank."""
        load, batch_rank = self._program.loads[number], len(self._sizes.batch)
        integers = self._integers(place, before=number)
        index: list[Any] = []
        for axis in range(batch_rank):
            shape = [1] * self._rank
            shape[axis] = x.shape[axis]
            index.append(jax.lax.broadcasted_iota(jnp.int32, shape, axis))
        for atom, size in zip(load.index, x.shape[batch_rank:], strict=True):
            i = _clamped(self._program.index_over_tile(atom, integers), size)
            index.append(jnp.broadcast_to(i, i.shape or (1,) * self._rank))
        return tuple(index)

    def _integers(self, place: Place, before: int | None = None) -> dict[Any, Any]:
        """What the program computes with that has no derivative: indices, elements of captures."""
        known = dict(zip(self._program.indices, place.indices, strict=True))
        for number, load in enumerate(self._program.loads[:before]):
            if load.capture in self._fixed:
                known[load.result] = self._element(number, self._fixed[load.capture], place)
        return known


# Of finite operands they have finite results.
_KEEPING_FINITE = frozenset(
    {"convert_element_type", "neg", "abs", "max", "min", "clamp", "select_n", "copy"}
)
_FEW = 8  # elements of a capture: each element of a tile may have a gradient of its own by them
_TINY = 1e-30  # what a finite number can be divided by


def _clamped(i, size):
    """An index into an axis, as `dynamic_slice` has it."""
    i = jnp.asarray(i)
    if i.dtype.itemsize < 4:
        i = i.astype(jnp.int32)  # not every axis ends within smaller types
    i = jnp.clip(i, 0, size - 1)
    return i.astype(jnp.int32) if i.dtype.itemsize == 4 else i


# ---- A program in two parts ----------------------------------------------------------------------


class _Load(NamedTuple):
    """One element of a capture."""

    capture: int
    index: tuple[Any, ...]  # as a `View` has it
    casts: tuple[Any, ...]  # as a `View` has them
    result: core.Var


class _Split:
    """The elements that a program takes of its captures, and a function of them."""

    def __init__(self, program: Program):
        jaxpr = program.jaxpr.jaxpr
        self.score, *indices = jaxpr.invars[: len(ARGUMENTS)]
        self.indices = tuple(indices)
        self.captures: Any = tuple(jaxpr.invars[len(ARGUMENTS) :])
        self._eqns, self._result = jaxpr.eqns, jaxpr.outvars[0]
        self._source = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

        loads = self._find_loads()
        stops = {load.result for load in loads}
        self._value_eqns, leaves = self._needed([self._result], stops)
        needed = set(leaves)
        for load in reversed(loads):
            if load.result in needed:
                needed |= self._needed(load.index, stops)[1]
        self.loads = [load for load in loads if load.result in needed]
        self.asks_for_distance = self.indices[-1] in needed

        of_captures = [load.capture for load in self.loads]
        count = range(len(self.captures))
        # Of each capture: its loads, and whether the value needs all of it, if that is more than an
        # element.
        self.numbers = [[n for n, c in enumerate(of_captures) if c == i] for i in count]
        loaded = {load.result for load in self.loads}
        self.is_whole = [v in leaves and v not in loaded for v in self.captures]
        self.whole = [i for i in count if self.is_whole[i]]
        self._casts = {load.result: self._casts_of(load) for load in self.loads}
        # What else the value needs, those with a derivative first.
        moving = [self.score] + [load.result for load in self.loads if self._has_gradient(load)]
        others = [*self.indices, *(x.result for x in self.loads if not self._has_gradient(x))]
        self.floats = [v for v in moving if v in leaves]
        self.integers = [v for v in others if v in leaves]
        self._is_linear = self._find_linear()
        equations = str(self._value_eqns)
        self._reverse_only = "custom_vjp_call" in equations
        # `jax.vmap` of a branch stops the gradient of its operands, also where they are tangents,
        # which then have no transpose.
        self._whole_in_reverse = self._reverse_only or "cond[" in equations
        self._forward_only = "while[" in equations

    def _has_gradient(self, load: _Load) -> bool:
        return jnp.issubdtype(self.captures[load.capture].aval.dtype, jnp.floating)

    def _casts_of(self, load: _Load) -> tuple[Any, ...]:
        if any(dtype is not None for dtype in load.casts):
            return load.casts
        return (self.captures[load.capture].aval.dtype, *load.casts)

    def _find_loads(self) -> list[_Load]:
        views = {v: View.whole(i, v.aval.shape) for i, v in enumerate(self.captures)}
        for eqn in self._eqns:
            if not eqn.invars:  # a size that is symbolic
                continue
            view = None if is_literal(eqn.invars[0]) else views.get(eqn.invars[0])
            view = None if view is None else view.after(eqn, eqn.invars[1:])
            if view is not None:
                views[eqn.outvars[0]] = view
        loads: list[_Load] = []
        for result, view in views.items():
            dtype = self.captures[view.capture].aval.dtype
            if view.axes or jnp.issubdtype(dtype, jax.dtypes.extended):
                continue
            # Known before the score is, and without what has a derivative.
            known = {load.result for load in loads if not self._has_gradient(load)}
            _, leaves = self._needed(view.index, {load.result for load in loads})
            if leaves <= known | set(self.indices):
                loads.append(_Load(view.capture, view.index, view.casts, result))
        return loads

    def _needed(self, results: Iterable[Any], stops: set) -> tuple[list[Any], set]:
        """(equations, the variables they start from) of some results, none of it before `stops`."""
        wanted = {v for v in results if constant(v) is None}
        eqns = []
        for eqn in reversed(self._eqns):
            # `jax.debug.print` has no results.
            if not eqn.outvars or any(v in wanted and v not in stops for v in eqn.outvars):
                eqns.append(eqn)
                wanted |= {v for v in eqn.invars if not is_literal(v)}
        return eqns[::-1], {v for v in wanted if v in stops or v not in self._source}

    def _find_linear(self) -> bool:
        """Whether no derivative of the value depends on what has one, or can be infinite: then it
        need not be kept from what is hidden."""
        moving = {*self.floats, *(self.captures[i] for i in self.whole)}
        finite: set[Any] = set()  # floats that are

        def is_finite(atom) -> bool:
            if is_literal(atom):
                return bool(np.all(np.isfinite(atom.val)))
            return atom in finite or not jnp.issubdtype(atom.aval.dtype, jnp.inexact)

        for eqn in self._value_eqns:
            name = eqn.primitive.name
            moved = [not is_literal(v) and v in moving for v in eqn.invars]
            if not any(moved):
                if name in _KEEPING_FINITE and all(map(is_finite, eqn.invars)):
                    # Integers may be too large for float16.
                    finite |= {v for v in eqn.outvars if v.aval.dtype != jnp.float16}
                continue
            others = [v for v, moves in zip(eqn.invars, moved, strict=True) if not moves]
            if name == "mul":
                linear = sum(moved) == 1 and is_finite(others[0])
            elif name == "div":
                linear = not moved[1] and is_literal(others[0]) and abs(others[0].val) >= _TINY
            else:
                linear = name in ("add", "sub", "neg", "convert_element_type", "copy")
            if not linear:
                return False
            moving |= set(eqn.outvars)
        return True

    def base(self, atom, size):
        """The variable that an index comes from, without what makes negative ones count from the
        end of an axis: `i < 0 ? i + size : i`."""
        chosen = self._source.get(atom) if not is_literal(atom) else None
        if chosen is None or chosen.primitive.name != "select_n" or len(chosen.invars) != 3:
            return atom
        condition, i, moved = chosen.invars
        if self._is(condition, "lt", i, 0) and self._is(moved, "add", i, size):
            return i
        return atom

    def _is(self, atom, primitive: str, x, number) -> bool:
        """Whether it is an operation of a variable and a literal."""
        eqn = self._source.get(atom) if not is_literal(atom) else None
        if eqn is None or eqn.primitive.name != primitive:
            return False
        left, right = eqn.invars
        return left is x and is_literal(right) and right.val == number

    def index_over_tile(self, atom, integers: dict[Any, Any]):
        """An index of a load, as an array of a tile in the smallest shape."""
        if constant(atom) is not None:
            return jnp.asarray(constant(atom), jnp.int32)
        eqns, leaves = self._needed([atom], set(integers))
        ordered = [v for v in integers if v in leaves]

        def value(_, *elements):
            values = self._cast(dict(zip(ordered, elements, strict=True)))
            _jaxpr.evaluate(eqns, values)
            return values[atom]

        return _over_tile(value, [integers[v] for v in ordered])

    def value(self, visible, floats, integers, whole):
        """The program's value, of scalars: of whether it is visible, of what `floats` and
        `integers` name, and of the captures `whole`."""
        if self._is_linear:
            return self._plain(floats, integers, whole)
        return _hidden(self, visible, floats, integers, whole)

    def of_indices(self, floats, integers, whole):
        """The same where no derivative will be asked for."""
        return self._plain(floats, integers, whole)

    def _plain(self, floats, integers, whole):
        given = zip((*self.floats, *self.integers), (*floats, *integers), strict=True)
        values = self._cast(dict(given))
        values.update(zip((self.captures[i] for i in self.whole), whole, strict=True))
        _jaxpr.evaluate(self._value_eqns, values)
        result = self._result
        return result.val if is_literal(result) else values[result]

    def _cast(self, values: dict[Any, Any]) -> dict[Any, Any]:
        """The values as the program has them, of what was read in the dtype of sums."""
        for variable, casts in self._casts.items():
            for dtype in casts if variable in values else ():
                x = values[variable]
                values[variable] = (
                    jax.lax.stop_gradient(x)
                    if dtype is None
                    else jax.lax.convert_element_type(x, dtype)
                )
        return values

    def partials(self, floats, integers, whole):
        """The derivatives by each of `floats`."""
        if self._reverse_only:
            return jax.grad(self._plain)(floats, integers, whole)

        def partial(i):
            directions = tuple(jnp.full_like(x, float(i == j)) for j, x in enumerate(floats))
            return jax.jvp(lambda *x: self._plain(x, integers, whole), floats, directions)[1]

        return tuple(partial(i) for i in range(len(floats)))

    def moved_by_whole(self, visible, floats, integers, whole, t_whole):
        """The tangent of the value by those of the captures `whole`, where it is visible."""

        def value(whole):
            return self._plain(floats, integers, whole)

        if self._whole_in_reverse or (
            not self._forward_only and all(at_most(math.prod(x.shape), _FEW) for x in whole)
        ):
            gradients = jax.grad(value, allow_int=True)(whole)
            return jnp.asarray(
                sum(
                    jnp.sum(jnp.where(visible, g, jnp.zeros_like(g)) * t)  # exact, unlike a product
                    for g, t in zip(gradients, t_whole, strict=True)
                    if g.dtype != jax.dtypes.float0
                )
            )
        # A slope of NaN, which a cotangent of 0 would meet: not because of what hidden keys hold.
        floats = tuple(jnp.where(visible | jnp.isfinite(x), x, jnp.ones_like(x)) for x in floats)
        moved = jax.jvp(value, (whole,), (t_whole,))[1]
        return jnp.where(visible, moved, jnp.zeros_like(moved))


_split = functools.lru_cache(maxsize=256)(_Split)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _hidden(split: _Split, visible, floats, integers, whole):
    return split._plain(floats, integers, whole)


@_hidden.defjvp
def _hidden_tangent(split: _Split, primals, tangents):
    """0 where it is hidden, not 0 times the slope: that may be infinite or NaN there."""
    visible, *arguments = primals
    _, t_floats, _, t_whole = tangents
    value = split._plain(*arguments)
    visible = visible & (value != -jnp.inf)

    def shown(x):
        return jnp.where(visible, x, jnp.zeros_like(x))

    dtype = compute_dtype(value.dtype, *(t.dtype for t in t_floats))
    tangent = jnp.zeros_like(value, dtype)
    for partial, t in zip(split.partials(*arguments), t_floats, strict=True):
        tangent = tangent + shown(partial).astype(dtype) * t.astype(dtype)
    floats, integers, whole = arguments
    if whole:
        moved = split.moved_by_whole(visible, floats, integers, whole, t_whole)
        tangent = tangent + moved.astype(dtype)
    return value, tangent.astype(value.dtype)


# ---- Slices --------------------------------------------------------------------------------------


class _Slicing(NamedTuple):
    """How the elements of a tile that a load takes are a block of its capture.

    `axes` has, for each axis of a prepared capture, batch axes among them, the axis of the tile
    that it becomes, or None for one of which a single index is taken, that of `fixed`.
    """

    axes: tuple[int | None, ...]
    fixed: tuple[int, ...]
    head_axes: tuple[int, ...]  # which axes of the capture, without batch axes, are split
    rank: int  # of the tile

    def block(self, x, place: Place) -> tuple[list[Any], list[Any]]:
        """(starts, sizes)"""
        starts, sizes = [], []
        for axis, fixed, extent in zip(self.axes, self.fixed, x.shape, strict=True):
            start, size = 0, extent
            if axis is None:
                start, size = min(max(fixed, 0), extent - 1), 1
            elif axis == self.rank - 2:
                start, size = place.row, place.rows
            elif axis == self.rank - 1:
                start, size = place.column, place.columns
            starts.append(jnp.asarray(start, jnp.int32))
            sizes.append(size)
        return starts, sizes

    def to_tile(self, x):
        kept = [axis for axis in self.axes if axis is not None]
        x = jax.lax.squeeze(x, [i for i, axis in enumerate(self.axes) if axis is None])
        x = jnp.transpose(x, sorted(range(len(kept)), key=kept.__getitem__))
        return jax.lax.expand_dims(x, sorted(set(range(self.rank)) - set(kept)))

    def to_capture(self, x):
        """The transpose."""
        kept = [axis for axis in self.axes if axis is not None]
        x = jax.lax.squeeze(x, sorted(set(range(self.rank)) - set(kept)))
        x = jnp.transpose(x, [sorted(kept).index(axis) for axis in kept])
        return jax.lax.expand_dims(x, [i for i, axis in enumerate(self.axes) if axis is None])


def _slicing(program: _Split, load: _Load, sizes: GroupedSizes) -> _Slicing | None:
    """None if the elements of a tile are no block."""
    batch_rank = len(sizes.batch)
    rank = batch_rank + 4
    b, h, q, kv, _ = program.indices
    axes: list[int | None] = list(range(batch_rank))
    fixed, head_axes = [0] * batch_rank, []
    shape = program.captures[load.capture].aval.shape
    for number, (atom, size) in enumerate(zip(load.index, shape, strict=True)):
        index: Any = program.base(atom, size)
        fixed.append(0)
        if constant(index) is not None:
            axes.append(None)
            fixed[-1] = int(constant(index))
        elif index is h and size == sizes.kv_heads * sizes.group:
            axes += [batch_rank, batch_rank + 1]
            fixed.append(0)
            head_axes.append(number)
        elif index is q and size >= sizes.q_len:
            axes.append(rank - 2)
        elif index is kv and size >= sizes.kv_len:
            axes.append(rank - 1)
        elif index is b and sizes.batch == (size,) and axes[0] == 0 and not sizes.is_part:
            # Its own batch axis, of size 1, gives way to this one.
            axes[0] = None
            axes.append(0)
        else:
            return None
    kept = [axis for axis in axes if axis is not None]
    if len(set(kept)) != len(kept):
        return None
    return _Slicing(tuple(axes), tuple(fixed), tuple(head_axes), rank)


def _head_axes(capture: int, program: _Split, slicings) -> tuple[int, ...]:
    """The axes of a capture that are split, as all of its loads want it."""
    wanted = {
        s.head_axes if s else ()
        for s, x in zip(slicings, program.loads, strict=True)
        if x.capture == capture
    }
    return wanted.pop() if len(wanted) == 1 and not program.is_whole[capture] else ()


def _over_tile(function: Callable, arrays: Sequence[Any], whole: Sequence[Any] = ()):
    """A function of scalars, and of the sequence `whole`, over arrays of one rank and sizes 1 or
    full; so is the result."""
    rank = arrays[0].ndim if arrays else 0
    mapped = [axis for axis in range(rank) if any(x.shape[axis] != 1 for x in arrays)]
    for axis in reversed(mapped):
        in_axes = [0 if x.shape[axis] != 1 else None for x in arrays]
        function = jax.vmap(function, [None, *in_axes])
    squeezed = [
        jax.lax.squeeze(x, [axis for axis in range(rank) if x.shape[axis] == 1]) for x in arrays
    ]
    function = _with_compiler_shardings(function, arrays, whole, mapped)
    return jax.lax.expand_dims(
        function(whole, *squeezed), [axis for axis in range(rank) if axis not in mapped]
    )


def _with_compiler_shardings(
    function: Callable, arrays: Sequence[Any], whole: Sequence[Any], mapped: Sequence[int]
):
    """On an explicit mesh, the function of `whole` and those axes of the arrays as on others: there
    `jax.vmap` of what users write would ask for shardings that they did not think of."""
    mesh = _jaxpr.explicit_mesh([*arrays, *whole])
    if mesh is None:
        return function
    specs = [padded(jax.typeof(x).sharding.spec, x.ndim) for x in arrays]
    parts = [next((spec[axis] for spec in specs if spec[axis]), None) for axis in mapped]
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return jax.sharding.auto_axes(
        function,
        axes=tuple(name for name, kind in kinds if kind == AxisType.Explicit),
        out_sharding=NamedSharding(mesh, PartitionSpec(*parts)),
    )
