"""The differentiation rule, and the choice between kernels and blockwise path.

Attention is a `jax.custom_jvp` whose tangent is one linear op, the transpose of which is the
backward pass. So forward mode exists, and reverse mode runs what it would under a `jax.custom_vjp`:
the forward pass once and the backward pass once. Both ops have derivatives of their own, as sums
over tiles (`_tile_sum`) on every path. Tangents and cotangents that are zero are not computed.

Residuals are the operands, out and lse; out and lse carry `CHECKPOINT_NAME`, so that
``jax.checkpoint(policy=save_only_these_names(CHECKPOINT_NAME))`` does not run attention twice.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jaxflash import (
    _blockwise,
    _kernel_program,
    _kernels,
    _parts,
    _plan,
    _platform,
    _primitive,
    _program,
    _sharding,
    _short,
    _support,
    _tile_sum,
)
from jaxflash._distance import in_classes
from jaxflash._loops import filled
from jaxflash._mask import Sizes
from jaxflash._spec import PLANNED, AttentionSpec, Operands, compute_dtype

CHECKPOINT_NAME = "context"


class Fallback(tuple):
    """The blockwise path where the caller left the choice to us: the reasons against the kernels,
    of which a program for CUDA warns."""

    def warn(self) -> None:
        _support.warn_of_slow_path(self)


# "auto": the kernels on CUDA, the blockwise path elsewhere, decided when the platform is known.
Path = Literal["cuda", "xla", "auto"] | Fallback


# Compiled once per spec and shapes, so that an eager call costs a dispatch and no retracing.
@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def attention(spec: AttentionSpec, path: Path, operands: Operands):
    """(out (*B, T, N, h), lse (*B, T, N)) of checked operands."""
    # jax 0.10 does not take NumPy arrays for residuals, which they may be under vmap; a copy costs
    # nothing in a compiled program.
    operands = with_scaled_query(jax.tree.map(jnp.copy, operands))
    alike = _sharding.alike(spec, operands)
    results: Any = _attention(spec, path, with_plan(spec, path, alike))
    return _sharding.as_of_query(operands.query, *results)


def with_scaled_query(operands):
    """A factor of the logits that only the program knows multiplies the query, in float32."""
    query, scale = operands.query, operands.scale
    if scale is None:
        return operands
    dtype = compute_dtype(query.dtype)
    scaled = _scaled(query.astype(dtype), scale.astype(dtype))
    return operands._replace(query=scaled.astype(query.dtype), scale=None)


@jax.custom_jvp
def _scaled(query, scale):
    return query * scale


@_scaled.defjvp
def _scaled_tangent(primals, tangents):
    """NaN and infinity in a query that sees no key reach no derivative by the scale; in one that
    sees keys, its cotangent is NaN."""
    (query, scale), (t_query, t_scale) = primals, tangents
    known = jnp.where(jnp.isfinite(query), query, jnp.zeros_like(query))
    return _scaled(query, scale), t_query * scale + known * t_scale


def with_plan(spec: AttentionSpec, path: Path, operands: Operands) -> Operands:
    """The operands with a plan of their predicate, which a kernel makes where kernels use it."""
    # Of a fallback the passes warn.
    path = "xla" if isinstance(path, Fallback) else path

    def shown(spec: AttentionSpec, sizes: Sizes, captures: Sequence[Any]) -> list[Any]:
        op = _Plan(spec, path, sizes)
        return _primitive.bind(op, *captures) if _primitive.available else op(*captures)

    return _plan.with_plan(spec, operands, shown)


# Compiled as one program: operation by operation, evaluating a mask takes many times as long, and
# more memory.
@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def planned(
    spec: AttentionSpec,
    path: Path,
    types: tuple[tuple[str, jax.ShapeDtypeStruct], ...],
    arrays: dict[str, Any],
) -> dict[str, Any]:
    """The plan of a call, by name, of operands of which some are given by their types alone."""
    operands = Operands.of_named({**dict(types), **arrays})
    captures = _sharding.alike_in_mask(spec, operands.mask_captures, len(operands.query.shape) - 3)
    operands = operands._replace(mask_captures=tuple(captures))
    given = with_plan(spec, path, operands).named()
    return {name: given[name] for name in PLANNED if name in given}


_OF_KERNELS = frozenset(("query", "key", "value"))


def _forward(spec: AttentionSpec, path: Path, operands: Operands, in_parts: bool = False):
    def blockwise(operands):
        return in_classes((_parts if in_parts else _short).forward, spec, operands)

    def kernels(operands):
        return _kernels.forward(spec, _kernel_program.make(spec, operands, "forward"), operands)

    if not _primitive.available:
        blockwise = _mapped_together(blockwise)
    return on_path(path, kernels, blockwise)(operands)


def _backward(
    spec: AttentionSpec,
    path: Path,
    wanted: tuple[str, ...],
    operands: Operands,
    out,
    lse,
    dout,
    dlse,
    in_parts: bool = False,
) -> Operands:
    """Gradients of the operands `wanted`, None for others; dlse may be None."""

    def blockwise(operands, out, lse, dout, dlse):
        way = _parts if in_parts else _short
        of_wanted = functools.partial(way.backward, wanted=frozenset(wanted))
        return in_classes(of_wanted, spec, operands, out, lse, dout, dlse)

    def kernels(operands, out, lse, dout, dlse):
        gradients = {}
        of_wanted = [i for i in range(len(operands.captures)) if f"captures[{i}]" in wanted]
        captures = _support.reasons_against_gradients(spec, operands, of_wanted)
        taken = [i for i, reasons in captures.items() if not reasons]
        of_captures = _kernel_program.gradients(spec, operands, taken)
        if _OF_KERNELS & set(wanted) or of_captures is not None:
            program = _kernel_program.make(spec, operands, "backward", wanted=taken)
            dqkv, more = _kernels.backward(
                spec, program, of_captures, operands, out, lse, dout, dlse
            )
            gradients.update(zip(("query", "key", "value"), dqkv, strict=True))
            gradients.update((f"captures[{i}]", x) for i, x in more.items())
        if "sink" in wanted:
            gradients["sink"] = _blockwise.sink_gradient(operands, out, lse, dout, dlse)
        # What the kernels lack: a pass of its own.
        lacking = {f"captures[{i}]": reasons for i, reasons in captures.items() if reasons}
        if lacking:
            reasons = tuple(dict.fromkeys(x for of in lacking.values() for x in of))
            warn = functools.partial(_support.warn_of_slow_gradients, reasons)
            announced = _platform.announced(operands, warn)
            names = frozenset(lacking)
            rest = _blockwise.backward(spec, announced, out, lse, dout, dlse, names)
            gradients.update(rest.named())
        # A capture that the logits do not depend on.
        for i in taken:
            gradients.setdefault(f"captures[{i}]", jnp.zeros_like(operands.captures[i]))
        return operands.holding({name: gradients[name] for name in wanted})

    return on_path(path, kernels, blockwise)(operands, out, lse, dout, dlse)


def _tangent(
    spec: AttentionSpec,
    path: Path,
    operands: Operands,
    out,
    lse,
    tangents: dict[str, Any],
    in_parts: bool = False,
):
    """(tangent of out, tangent of lse), of their dtypes, given those of operands by name."""

    def blockwise(operands, out, lse, tangents):
        way = _parts if in_parts else _blockwise
        return in_classes(way.tangent, spec, operands, out, lse, tangents)

    def kernels(operands, out, lse, tangents):
        terms = []
        if "sink" in tangents:
            terms.append(_blockwise.sink_tangent(operands, out, lse, tangents["sink"]))
        arrays = {name: t for name, t in tangents.items() if name in _OF_KERNELS}
        captures = [i for i in range(len(operands.captures)) if f"captures[{i}]" in tangents]
        passes = [(arrays, captures)]
        if captures and _support.reasons_against_tangents(spec, operands, captures):
            # More arrays than one program reads, most likely.
            passes = [(arrays, []), *(({}, [i]) for i in captures)]
        lacking: dict[str, Any] = {}
        why: dict[str, None] = {}
        for arrays, captures in passes:
            moving = {f"captures[{i}]": tangents[f"captures[{i}]"] for i in captures}
            if not (arrays or moving):
                continue
            if reasons := _support.reasons_against_tangents(spec, operands, captures):
                lacking |= arrays | moving
                why |= dict.fromkeys(reasons)
                continue
            program = _kernel_program.tangents(spec, operands, captures)
            of_captures = list(moving.values())
            terms.append(_kernels.tangent(spec, program, operands, out, lse, arrays, of_captures))
        # What the kernels lack: a pass of its own.
        if lacking:
            warn = functools.partial(_support.warn_of_slow_tangents, tuple(why))
            announced = _platform.announced(operands, warn)
            terms.append(in_classes(_blockwise.tangent, spec, announced, out, lse, lacking))
        t_out, t_lse = zip(*terms, strict=True)
        return functools.reduce(jnp.add, t_out), functools.reduce(jnp.add, t_lse)

    return on_path(path, kernels, blockwise)(operands, out, lse, tangents)


# ---- Every derivative ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _OnPath(_primitive.Op):
    """What kernels do on CUDA, and the blockwise path elsewhere."""

    spec: AttentionSpec
    path: Path

    @property
    def partitioned(self):
        return self.path != "xla"

    def on_platform(self, platform):
        # Without the other path's operations, which take long to trace.
        if self.path != "auto":
            return self
        return dataclasses.replace(self, path="cuda" if platform == "cuda" else "xla")


@dataclasses.dataclass(frozen=True)
class _Plan(_OnPath):
    """The operands `PLANNED`, of what the predicate of a call of such sizes captures."""

    sizes: Sizes

    def __call__(self, *captures):
        def of(way) -> Callable:
            return lambda *captures: tuple(way.shown(self.spec, self.sizes, captures))

        # The passes of the call check that they run where they are to.
        if self.path == "auto":
            found = jax.lax.platform_dependent(*captures, cuda=of(_kernels), default=of(_plan))
        else:
            found = of(_kernels if self.path == "cuda" else _plan)(*captures)
        return list(found)

    def result_types(self, types):
        return _plan.types(self.spec, self.sizes, types)

    def jvp(self, primals, results, tangents):
        return [None] * len(results)  # it has no derivative


@dataclasses.dataclass(frozen=True)
class _OfCall(_OnPath):
    """A pass over a call whose operands are its first arguments."""

    given: tuple[str, ...]  # the operands of the call
    in_parts: bool = dataclasses.field(default=False, kw_only=True)  # see `_parts`

    def on_one_cpu(self, types, calls=1):
        divides = _parts.divides(self.spec, self._operands(types), calls)
        return dataclasses.replace(self, in_parts=True) if divides else self

    def mapped(self, in_axes, args):
        if not self.in_parts:
            return super().mapped(in_axes, args)
        types = (_primitive.one_of(x, axis) for x, axis in zip(args, in_axes, strict=True))
        return _parts.mapped(self.spec, self._operands(types), self, in_axes, args)

    def _operands(self, args) -> Operands:
        return Operands.of_named(dict(zip(self.given, args, strict=False)))


@dataclasses.dataclass(frozen=True)
class _Pass(_OfCall):
    """A linear pass, whose arguments are (operands, out, lse) and what it is linear in."""

    moving: tuple[str, ...]  # the operands whose tangents or gradients it is about

    def _split(self, args) -> tuple[tuple[Operands, Any, Any], Sequence]:
        """((operands, out, lse), what the pass is linear in)."""
        out, lse, *linear = args[len(self.given) :]
        return (self._operands(args), out, lse), linear

    def _linear(self, saved: Sequence, linear: Sequence) -> list:
        """The pass for other linear arguments, of which some may be None, that is zero."""
        raise NotImplementedError

    def _differentiable(self, saved, linear) -> list:
        """The pass in operations that have all derivatives."""
        raise NotImplementedError

    def jvp(self, primals, results, tangents):
        num_saved = len(self.given) + 2
        saved, linear = primals[:num_saved], primals[num_saved:]
        t_saved, t_linear = tangents[:num_saved], tangents[num_saved:]
        terms = []
        if any(t is not None for t in t_linear):
            terms.append(self._linear(saved, t_linear))
        moved = {i: t for i, t in enumerate(t_saved) if t is not None}
        if moved:

            def of_saved(replaced):
                args = [replaced.get(i, x) for i, x in enumerate(saved)]
                return self._differentiable(self._split(args)[0], linear)

            terms.append(jax.jvp(of_saved, ({i: saved[i] for i in moved},), (moved,))[1])
        return terms[0] if len(terms) == 1 else [x + y for x, y in zip(*terms, strict=True)]

    def transpose(self, cotangents, args):
        num_saved = len(self.given) + 2
        saved, linear = args[:num_saved], args[num_saved:]
        if all(x is None for x in cotangents):
            return [None] * len(args)
        # The last one may be of a cotangent of lse that the pass did without.
        results = self._transposed(saved, cotangents)
        return [None] * num_saved + [
            x if arg is None else None for x, arg in zip(results, linear, strict=False)
        ]

    def _transposed(self, saved: Sequence, cotangents: Sequence) -> list:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class _Tangent(_Pass):
    """(tangent of out, tangent of lse), linear in the tangents of the operands `moving`."""

    def __call__(self, *args):
        (operands, out, lse), tangents = self._split(args)
        tangents = dict(zip(self.moving, tangents, strict=True))
        return list(
            _tangent(self.spec, self.path, operands, out, lse, tangents, in_parts=self.in_parts)
        )

    def result_types(self, types):
        (_, out, lse), _ = self._split(types)
        return [_type_of(out), _type_of(lse)]

    def _differentiable(self, saved, linear):
        tangents = dict(zip(self.moving, linear, strict=True))
        operands, out, lse = saved
        return list(in_classes(_tile_sum.tangent, self.spec, operands, out, lse, tangents))

    def _linear(self, saved, linear):
        tangents = _named(self.moving, linear)
        op = dataclasses.replace(self, moving=tuple(tangents))
        return _primitive.bind(op, *saved, *tangents.values())

    def _transposed(self, saved, cotangents):
        return _gradient(self, saved, *cotangents)


@dataclasses.dataclass(frozen=True)
class _Gradient(_Pass):
    """Gradients of the operands `moving`, linear in the cotangents of out and lse; that of lse is
    left out where it is zero."""

    def __call__(self, *args):
        (operands, out, lse), (dout, *dlse) = self._split(args)
        dlse = dlse[0] if dlse else None
        gradients = _backward(
            self.spec, self.path, self.moving, operands, out, lse, dout, dlse, self.in_parts
        )
        gradients = gradients.named()
        return [gradients[name] for name in self.moving]

    def result_types(self, types):
        (operands, _, _), _ = self._split(types)
        given = operands.named()
        return [_type_of(given[name]) for name in self.moving]

    def _differentiable(self, saved, linear):
        dout, *dlse = linear
        dlse = dlse[0] if dlse else None
        operands, out, lse = saved
        of_moving = functools.partial(_tile_sum.gradient, wanted=self.moving)
        gradients = in_classes(of_moving, self.spec, operands, out, lse, dout, dlse)
        return [gradients[name] for name in self.moving]

    def _linear(self, saved, linear):
        return _gradient(self, saved, *linear)

    def _transposed(self, saved, cotangents):
        tangents = _named(self.moving, cotangents)
        op = _Tangent(self.spec, self.path, self.given, tuple(tangents))
        return _primitive.bind(op, *saved, *tangents.values())


def _type_of(x) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _named(names, values) -> dict[str, Any]:
    return {name: x for name, x in zip(names, values, strict=True) if x is not None}


def _gradient(of: _Pass, saved, dout, dlse=None) -> list:
    """The gradients of the operands that the pass `of` is about; a cotangent may be None."""
    if dout is None:
        dout = jnp.zeros_like(saved[-2])
    op = _Gradient(of.spec, of.path, of.given, of.moving)
    return _primitive.bind(op, *saved, dout, *(() if dlse is None else (dlse,)))


@dataclasses.dataclass(frozen=True)
class _Forward(_OfCall):
    """(out, lse) of the operands `given`."""

    def __call__(self, *args):
        return list(_forward(self.spec, self.path, self._operands(args), self.in_parts))

    def result_types(self, types):
        operands = self._operands(types)
        query, value = operands.query, operands.value
        rows = query.shape[:-1]
        return [
            jax.ShapeDtypeStruct((*rows, value.shape[-1]), query.dtype),
            jax.ShapeDtypeStruct(rows, compute_dtype(query.dtype)),
        ]

    def jvp(self, primals, results, tangents):
        moving = {
            name: t
            for name, t in zip(self.given, tangents, strict=True)
            if t is not None and name in self._differentiable(primals)
        }
        return list(_tangents(self, primals, results, moving))

    def transpose(self, cotangents, args):
        """Of `jax.linear_transpose` by the value, in which out is linear and lse constant."""
        operands = dict(zip(self.given, args, strict=True))
        linear = [name for name, x in operands.items() if x is None]
        if linear != ["value"]:
            raise NotImplementedError(
                f"attention is linear in value alone, and was transposed by {', '.join(linear)}"
            )
        results: list[Any] = [None] * len(args)
        dout, _ = cotangents
        if dout is not None:
            key = operands["key"]
            shape = (*key.shape[:-1], dout.shape[-1])
            operands["value"] = filled(0, key, shape, key.dtype)
            saved = [*operands.values(), *_primitive.bind(self, *operands.values())]
            gradient = _Gradient(self.spec, self.path, self.given, ("value",))
            (results[self.given.index("value")],) = _primitive.bind(gradient, *saved, dout)
        return results

    def _differentiable(self, primals):
        return self._operands(primals).differentiable()


def _tangents(forward: _Forward, args: Sequence, results: Sequence, moving: dict[str, Any]):
    """Those of the results, given those of operands by name."""
    op = _Tangent(forward.spec, forward.path, forward.given, tuple(moving))
    return _primitive.bind(op, *args, *results, *moving.values())


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _with_every_derivative(spec: AttentionSpec, path: Path, operands: Operands):
    # Partial evaluation (of a scan or a checkpoint whose gradient is taken) keeps the equations of
    # this function and drops its custom_jvp rule. A derivative of that gradient meets the primitive
    # alone, which has a rule of its own.
    given = operands.named()
    return tuple(_primitive.bind(_Forward(spec, path, tuple(given)), *given.values()))


def _tangent_rule(spec: AttentionSpec, path: Path, primals, tangents):
    if spec.program is not None:
        _program.check_rules(spec.program)
    (operands,), (tangents,) = primals, tangents
    results: Any = _with_every_derivative(spec, path, operands)
    out, lse = (checkpoint_name(x, CHECKPOINT_NAME) for x in results)
    given = operands.named()
    # Integers have tangents without content, or zero ones.
    moving = {
        name: t
        for name, t in tangents.named().items()
        if name in operands.differentiable() and not isinstance(t, SymbolicZero)
    }
    forward = _Forward(spec, path, tuple(given))
    t_out, t_lse = _tangents(forward, list(given.values()), (out, lse), moving)
    return (out, lse), (t_out, t_lse)


_with_every_derivative.defjvp(_tangent_rule, symbolic_zeros=True)


# ---- First derivatives, where JAX lacks what the above needs -------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_first_derivatives(spec: AttentionSpec, path: Path, operands: Operands):
    return _forward_once(spec, path, operands)


@jax.tree_util.register_static
class _Wanted(tuple):
    """Names of the operands whose gradient somebody asked for."""


def _forward_rule(spec: AttentionSpec, path: Path, primals: Operands):
    if spec.program is not None:
        _program.check_rules(spec.program)
    given = primals.named()
    wanted = _Wanted(name for name, x in given.items() if x.perturbed)
    operands = primals.replacing({name: x.value for name, x in given.items()})
    results: Any = _forward_once(spec, path, operands)
    out, lse = (checkpoint_name(x, CHECKPOINT_NAME) for x in results)
    return (out, lse), (wanted, operands, out, lse)


def _backward_rule(spec: AttentionSpec, path: Path, residuals, cotangents):
    wanted, *saved = residuals
    dout, dlse = cotangents
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros_like(saved[1])
    if isinstance(dlse, SymbolicZero):
        dlse = None
    return (_backward_once(spec, path, tuple(wanted), *saved, dout, dlse),)


_with_first_derivatives.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _no_second_derivative(*_):
    raise NotImplementedError(
        f"jaxflash has first derivatives in reverse mode only under jax {jax.__version__}, which "
        "lacks what the others need; jaxflash.reference.dot_product_attention has them all"
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _forward_once(spec: AttentionSpec, path: Path, operands: Operands):
    return _forward(spec, path, operands)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _backward_once(spec: AttentionSpec, path: Path, wanted: tuple[str, ...], *arrays):
    return _backward(spec, path, wanted, *arrays)


_forward_once.defjvp(_no_second_derivative)
_backward_once.defjvp(_no_second_derivative)

_attention = _with_every_derivative if _primitive.available else _with_first_derivatives


# ---- The choice of the path ----------------------------------------------------------------------


def _mapped_together(function):
    """`function` of one pytree with two results, both of which `vmap` maps if it maps anything, as
    it does those of a primitive.

    Otherwise lse is not mapped where only the values are, and the rule of a custom_vjp with one
    mapped result and one that is not counts the cotangent of the latter once for every element.
    """
    op = jax.custom_batching.custom_vmap(function)

    @op.def_vmap
    def _(axis_size, mapped, operands):
        _, tree = jax.tree.flatten(operands)
        in_axes = [0 if is_mapped else None for is_mapped in jax.tree.leaves(mapped)]

        def batched(operands):
            return jax.vmap(
                lambda *arrays: function(tree.unflatten(arrays)), in_axes, axis_size=axis_size
            )(*jax.tree.leaves(operands))

        return _mapped_together(batched)(operands), (True, True)

    return op


def on_path(path: Path, kernels: Callable, blockwise: Callable) -> Callable[..., Any]:
    """Whichever of two functions of a pytree and more is to run."""
    if path == "xla":
        return blockwise
    if isinstance(path, Fallback):
        return lambda first, *others: blockwise(_platform.announced(first, path.warn), *others)

    def checked(first, *others):
        return kernels(_platform.checked(first, only_cuda=path == "cuda"), *others)

    if path == "cuda":
        return checked
    return functools.partial(jax.lax.platform_dependent, cuda=checked, default=blockwise)
