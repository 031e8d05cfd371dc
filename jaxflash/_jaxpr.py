"""Jaxprs of score functions and masks: traced, calls inlined, equations evaluated one by one,
differentiated, told apart."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
    AbstractMesh,
    AxisType,
    NamedSharding,
    PartitionSpec,
    get_abstract_mesh,
    use_abstract_mesh,
)

if TYPE_CHECKING:
    from jax.extend import core  # takes as long to import as the rest of the package

# Equations that call a jaxpr, and the parameter that holds it.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}
# Those with a derivative of their own, which stays with them until they have been differentiated.
CUSTOM_DERIVATIVES = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
# Those with one of several, by an index: inlined, all are computed, and their results chosen from.
# The derivative of such a choice is not that of the branch, where another one's is not finite.
BRANCHES = {"cond": "branches"}


def is_literal(atom) -> TypeGuard[core.Literal]:
    """Whether an operand of an equation is a constant, and no variable."""
    return hasattr(atom, "val")


def traced(function: Callable, types, mesh: Any = None) -> core.ClosedJaxpr:
    """The jaxpr of a function of the given types: on no mesh, or replicated on an explicit one."""
    if mesh is None:
        types = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in types]
        with outside_of_explicit_meshes():
            return jax.make_jaxpr(function)(*types)
    replicated = NamedSharding(mesh, PartitionSpec())
    types = [jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=replicated) for t in types]
    with use_abstract_mesh(mesh):
        return jax.make_jaxpr(function)(*types)


def in_place_of(users: Callable) -> Callable[[Callable], Callable]:
    """Decorates what JAX traces instead of a user's function: its errors name that one, and where
    it is defined."""

    def decorate(function: Any) -> Callable:
        signature = inspect.signature(function)  # errors name arguments as well
        functools.update_wrapper(function, users, updated=())
        function.__signature__ = signature
        return function

    return decorate


def outside_of_explicit_meshes() -> contextlib.AbstractContextManager:
    """Where what a function makes is of the types of its arguments, which have no mesh."""
    axis_types = get_abstract_mesh().axis_types
    if AxisType.Explicit in axis_types and AxisType.Manual not in axis_types:
        return use_abstract_mesh(AbstractMesh((), ()))
    return contextlib.nullcontext()


def explicit_mesh(arrays: Sequence[Any]) -> Any:
    """The mesh of arrays with explicit axes, or None."""
    meshes = (jax.typeof(x).sharding.mesh for x in arrays)
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def as_function(closed: core.ClosedJaxpr) -> Callable[..., list[Any]]:
    from jax.extend.core import jaxpr_as_fun  # not with the package: see above

    return jaxpr_as_fun(closed)


def inlined(closed: core.ClosedJaxpr, calls: dict[str, str]) -> core.ClosedJaxpr:
    """The same jaxpr without equations of the given kinds of calls, and with slices where single
    elements are gathered; its constants are its last arguments, and its own constants are those of
    the calls.
    """
    jaxpr = closed.jaxpr
    if not (jaxpr.constvars or closed.effects or _has_calls(jaxpr, calls)):
        return closed

    def function(*arguments):
        count = len(jaxpr.invars)
        values = dict(zip(jaxpr.invars, arguments, strict=False))
        values.update(zip(jaxpr.constvars, arguments[count:], strict=True))
        evaluate(jaxpr.eqns, values, calls)
        return [read(values, atom) for atom in jaxpr.outvars]

    return _without_indices(traced(function, [v.aval for v in (*jaxpr.invars, *jaxpr.constvars)]))


def _has_calls(jaxpr, calls: dict[str, str]) -> bool:
    """Whether `evaluate` would inline something, in branches, too."""
    return bool(_gathered_elements(jaxpr.eqns)) or any(
        _is_inlined(eqn, calls)
        or _is_of_types_alone(eqn)
        or any(_has_calls(held.jaxpr, calls) for held in eqn.params.get("branches", ()))
        for eqn in jaxpr.eqns
    )


def _without_indices(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same jaxpr without equations that put indices together of which nothing is left."""
    jaxpr = closed.jaxpr
    kept = []
    used = {atom for atom in jaxpr.outvars if not is_literal(atom)}
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive.name not in _OF_INDICES or not used.isdisjoint(eqn.outvars):
            kept.append(eqn)
            used |= {atom for atom in eqn.invars if not is_literal(atom)}
    return closed.replace(jaxpr=jaxpr.replace(eqns=kept[::-1]))


def inputs_read(closed: core.ClosedJaxpr) -> tuple[bool, ...]:
    """Which arguments the results depend on."""
    jaxpr = closed.jaxpr
    needed = {atom for atom in jaxpr.outvars if not is_literal(atom)}
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed |= {atom for atom in eqn.invars if not is_literal(atom)}
    return tuple(v in needed for v in jaxpr.invars)


# Equations that choose elements of their first operand.
_CHOOSING = frozenset({"dynamic_slice", "slice", "squeeze", "reshape"})


def of_real_arrays(
    closed: core.ClosedJaxpr, arrays: list[Any]
) -> tuple[core.ClosedJaxpr, list[Any]]:
    """The same jaxpr of real arrays instead of `arrays`, its last arguments: of complex ones the
    real and the imaginary part, so that all arrays with a derivative are floating. Elements are
    chosen of the parts, and put together then."""
    jaxpr = closed.jaxpr
    count = len(jaxpr.invars) - len(arrays)
    split = [jnp.iscomplexobj(x) for x in arrays]
    if not any(split):
        return closed, arrays
    pairs = [
        (x.real, x.imag) if is_split else (x,) for x, is_split in zip(arrays, split, strict=True)
    ]
    real = list(itertools.chain(*pairs))

    def function(*arguments):
        values = dict(zip(jaxpr.invars, arguments[:count], strict=False))
        parts: dict[core.Var, list[Any]] = {}
        rest = iter(arguments[count:])
        for variable, is_split in zip(jaxpr.invars[count:], split, strict=True):
            if is_split:
                parts[variable] = [next(rest), next(rest)]
            else:
                values[variable] = next(rest)
        for eqn in jaxpr.eqns:
            complex_ones = [x for x in eqn.invars if not is_literal(x) and x in parts]
            if complex_ones and eqn.primitive.name in _CHOOSING:
                (array,), (chosen,) = complex_ones, eqn.outvars
                of_each = [{**values, array: part} for part in parts[array]]
                for of_one in of_each:
                    evaluate([eqn], of_one)
                parts[chosen] = [of_one[chosen] for of_one in of_each]
                continue
            values |= {x: jax.lax.complex(*parts[x]) for x in complex_ones if x not in values}
            evaluate([eqn], values)
        return [read(values, atom) for atom in jaxpr.outvars]

    return traced(function, [*closed.in_avals[:count], *real]), real


def evaluate(eqns, values: dict[core.Var, Any], calls: dict[str, str] | None = None) -> None:
    """Adds to `values` the results of equations, those of the given kinds of calls inlined."""
    elements = _gathered_elements(eqns) if calls else {}
    for eqn in eqns:
        inputs = [read(values, atom) for atom in eqn.invars]
        if eqn.outvars and eqn.outvars[0] in elements:
            starts = [read(values, atom) for atom in elements[eqn.outvars[0]]]
            sizes = (1,) * len(starts)
            element = jax.lax.dynamic_slice(inputs[0], starts, sizes, allow_negative_indices=False)
            results = [element.reshape(())]
        elif calls and _is_inlined(eqn, calls):
            held = eqn.params[calls[eqn.primitive.name]]
            inline = _chosen if eqn.primitive.name in BRANCHES else _evaluated
            results = inline(held, inputs, calls)
        elif _is_of_types_alone(eqn):
            results = inputs
        else:
            results = bound(eqn, inputs, calls)
        values.update(zip(eqn.outvars, results, strict=True))


def _evaluated(held, inputs: Sequence[Any], calls: dict[str, str]) -> list[Any]:
    """The results of a jaxpr that an equation holds."""
    jaxpr = getattr(held, "jaxpr", held)
    values = dict(zip(jaxpr.invars, inputs, strict=True))
    values.update(zip(jaxpr.constvars, getattr(held, "consts", ()), strict=True))
    evaluate(jaxpr.eqns, values, calls)
    return [read(values, atom) for atom in jaxpr.outvars]


def _is_inlined(eqn, calls: dict[str, str]) -> bool:
    name = eqn.primitive.name
    if name not in calls or name not in BRANCHES:
        return name in calls
    of_scalars = all(variable.aval.shape == () for variable in eqn.outvars)
    return of_scalars and eqn.params.get("branches_platforms") is None


def _chosen(branches, inputs: Sequence[Any], calls: dict[str, str]) -> list[Any]:
    """The results of one of several jaxprs, of which the first of `inputs` is the index."""
    index, *operands = inputs
    results = [_evaluated(held, operands, calls) for held in branches]
    types = map(jax.typeof, (index, *itertools.chain(*results)))
    axes = frozenset().union(*(t.manual_axis_type.varying for t in types))
    (index,) = _varying([index], axes)
    cases = zip(*(_varying(of_branch, axes) for of_branch in results), strict=True)
    return [jax.lax.select_n(index, *of_result) for of_result in cases]


_OF_INDICES = frozenset({"broadcast_in_dim", "concatenate"})


def _gathered_elements(eqns) -> dict[core.Var, list[Any]]:
    """The indices, all scalars, of each element that is gathered: so JAX indexes a concrete array
    of several devices, where it slices others."""
    modes = jax.lax.GatherScatterMode
    parts: dict[core.Var, list[Any]] = {}  # the scalars that an index is put together of
    elements: dict[core.Var, list[Any]] = {}
    for eqn in eqns:
        name, params, operands = eqn.primitive.name, eqn.params, eqn.invars
        of_parts = all(not is_literal(x) and x in parts for x in operands)
        if name == "broadcast_in_dim" and operands[0].aval.shape == () and params["shape"] == (1,):
            parts[eqn.outvars[0]] = [operands[0]]
        elif name == "concatenate" and of_parts:
            parts[eqn.outvars[0]] = [scalar for x in operands for scalar in parts[x]]
        elif name == "gather" and not is_literal(operands[1]) and operands[1] in parts:
            numbers, index = params["dimension_numbers"], parts[operands[1]]
            is_element = eqn.outvars[0].aval.shape == () and not numbers.operand_batching_dims
            in_order = tuple(numbers.start_index_map) == tuple(range(len(operands[0].aval.shape)))
            # As `dynamic_slice` has it.
            clamps = params["mode"] in (modes.CLIP, modes.PROMISE_IN_BOUNDS)
            if is_element and in_order and clamps:
                elements[eqn.outvars[0]] = index
    return elements


def _is_of_types_alone(eqn) -> bool:
    """Whether an equation is there for the types that values have: inside `shard_map` a cast to one
    that varies over more mesh axes, of which `bound` adds those that are needed, or a sum over no
    axes, as transposes have it; on an explicit mesh another sharding."""
    name = eqn.primitive.name
    return name in ("pvary", "reshard") or (name == "reduce_sum" and not eqn.params["axes"])


def bound(eqn, inputs: Sequence[Any], calls: dict[str, str] | None = None) -> Sequence[Any]:
    """The results of an equation, with the given kinds of calls inlined in what it holds."""
    # Inside `shard_map` an equation wants operands that vary over the same mesh axes.
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in inputs))
    inputs = _varying(inputs, axes)
    name = eqn.primitive.name
    if name in _HOLDING_OTHERS:

        def function(held):
            return lambda *inputs: _varying(_evaluated(held, inputs, calls or CALLS), axes)

        return _HOLDING_OTHERS[name](eqn, inputs, function)
    params = {
        key: None if key in _SHARDINGS and _names_explicit_mesh(value) else value
        for key, value in eqn.params.items()
    }
    results = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(params))
    return results if eqn.primitive.multiple_results else [results]


def _varying(values: Sequence[Any], axes: frozenset[Any]) -> list[Any]:
    """Values as those that vary over all of these mesh axes."""
    missing = [tuple(axes - jax.typeof(x).manual_axis_type.varying) for x in values]
    return [
        jax.lax.pcast(x, more, to="varying") if more else x
        for x, more in zip(values, missing, strict=True)
    ]


# Parameters that say where a result lies.
_SHARDINGS = frozenset({"sharding", "out_sharding"})


def _names_explicit_mesh(sharding) -> bool:
    return isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types


# ---- Equations that hold others ------------------------------------------------------------------

# The types in what they hold, with meshes and mesh axes, are those of the place where they were
# traced. So they are made anew of functions, which take the types of their operands; these, and
# what the functions return, vary over the same mesh axes.


def _branches(eqn, inputs: Sequence[Any], function: Callable) -> Sequence[Any]:
    index, *operands = inputs
    branches = [function(held) for held in eqn.params["branches"]]
    if eqn.params.get("branches_platforms") is None:
        return jax.lax.switch(index, branches, *operands)
    # `jax.lax.platform_dependent`, whose branches say which platform they are for.
    branches = tuple(jax.make_jaxpr(branch)(*operands) for branch in branches)
    return eqn.primitive.bind(*inputs, **{**eqn.params, "branches": branches})


def _scan(eqn, inputs: Sequence[Any], function: Callable) -> Sequence[Any]:
    params, held = eqn.params, eqn.params["jaxpr"]

    def are_carried(outside, inside):
        """Others than those of each step have the rank of one step outside, too."""
        pairs = zip(outside, inside, strict=True)
        return [len(x.aval.shape) == len(y.shape) for x, y in pairs]

    num_carried = sum(are_carried(eqn.outvars, held.out_avals))
    first_step = sum(are_carried(eqn.invars, held.in_avals))  # of what each step has its own of
    first_carried = first_step - num_carried
    constants, step = inputs[:first_carried], function(held)

    def body(carry, of_step):
        results = step(*constants, *carry, *of_step)
        return results[:num_carried], results[num_carried:]

    initial, of_steps = list(inputs[first_carried:first_step]), list(inputs[first_step:])
    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, of_steps = jax.lax.scan(body, initial, of_steps, **options)
    return [*carry, *of_steps]


def _while(eqn, inputs: Sequence[Any], function: Callable) -> Sequence[Any]:
    of_condition, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    first = of_condition + of_body
    condition, body = function(eqn.params["cond_jaxpr"]), function(eqn.params["body_jaxpr"])

    def goes_on(carry):
        return condition(*inputs[:of_condition], *carry)[0]

    def step(carry):
        return body(*inputs[of_condition:first], *carry)

    # Of `jax.vmap` of a loop: every element has its own end.
    def some_go_on(carry):
        return jnp.any(goes_on(carry))

    def step_of_some(carry):
        going = goes_on(carry)

        def moved(x, y):
            return jnp.where(jax.lax.expand_dims(going, range(going.ndim, x.ndim)), x, y)

        return list(map(moved, step(carry), carry))

    is_batched = eqn.params["cond_jaxpr"].out_avals[0].shape != ()
    loop = (some_go_on, step_of_some) if is_batched else (goes_on, step)
    return jax.lax.while_loop(*loop, list(inputs[first:]))


_HOLDING_OTHERS = {"cond": _branches, "scan": _scan, "while": _while}


# ---- Branches that know scalars alone ------------------------------------------------------------


def reading_ahead(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same jaxpr, in which what branches read of arrays is read ahead of them: so it is told
    which elements these are."""
    if not any(_reads_inside(eqn) for eqn in closed.jaxpr.eqns):
        return closed
    jaxpr = closed.jaxpr

    def function(*arguments):
        values = dict(zip(jaxpr.invars, arguments, strict=True))
        values.update(zip(jaxpr.constvars, closed.consts, strict=True))
        for eqn in jaxpr.eqns:
            if _reads_inside(eqn):
                index, *operands = (read(values, atom) for atom in eqn.invars)
                branches = [_after_reads(held, operands) for held in eqn.params["branches"]]
                values.update(zip(eqn.outvars, jax.lax.switch(index, branches), strict=True))
            else:
                evaluate([eqn], values, CALLS)
        return [read(values, atom) for atom in jaxpr.outvars]

    return traced(function, closed.in_avals)


def _reads_inside(eqn) -> bool:
    """Whether it is a choice of branches that are given arrays."""
    has_branches = eqn.primitive.name in BRANCHES and eqn.params.get("branches_platforms") is None
    return has_branches and _takes_arrays(eqn)


def _takes_arrays(eqn) -> bool:
    return any(atom.aval.shape != () for atom in eqn.invars)


def _after_reads(held: core.ClosedJaxpr, operands: Sequence[Any]) -> Callable[[], list[Any]]:
    """The rest of a branch, all elements of arrays read, and their indices computed."""
    held = reading_ahead(held)
    jaxpr = held.jaxpr
    values = dict(zip(jaxpr.invars, operands, strict=True))
    values.update(zip(jaxpr.constvars, held.consts, strict=True))
    ahead = set()
    needed: set[Any] = set()
    for number, eqn in reversed(list(enumerate(jaxpr.eqns))):
        if _takes_arrays(eqn) or not needed.isdisjoint(eqn.outvars):
            ahead.add(number)
            needed |= {atom for atom in eqn.invars if not is_literal(atom)}
    evaluate([eqn for number, eqn in enumerate(jaxpr.eqns) if number in ahead], values, CALLS)

    def rest():
        known = dict(values)
        eqns = [eqn for number, eqn in enumerate(jaxpr.eqns) if number not in ahead]
        evaluate(eqns, known, CALLS)
        return [read(known, atom) for atom in jaxpr.outvars]

    return rest


def read(values: dict[core.Var, Any], atom):
    return atom.val if is_literal(atom) else values[atom]


# ---- Derivatives and identity -------------------------------------------------------------------


def differentiated(
    closed: core.ClosedJaxpr, positions: tuple[int, ...]
) -> tuple[core.ClosedJaxpr, tuple[Any, ...]]:
    """The value and its derivatives by the arguments at some positions, every call inlined, and the
    arrays that rules of custom derivatives hold: its last arguments."""
    function = as_function(closed)
    both = jax.value_and_grad(lambda *arguments: function(*arguments)[0], argnums=positions)
    flat = traced(lambda *arguments: jax.tree.leaves(both(*arguments)), closed.in_avals)
    derivatives = inlined(flat, {**CALLS, **CUSTOM_DERIVATIVES})
    return derivatives, (*flat.consts, *derivatives.consts)


def has_gradients(closed: core.ClosedJaxpr, positions: Sequence[int]) -> bool:
    """Whether the value can be differentiated by the arguments at some positions."""
    try:
        differentiated(closed, tuple(positions))
    except Exception:  # of the caller's rule, or of a class that JAX keeps to itself
        return False
    return True


_unique = itertools.count()


def identity(closed: core.ClosedJaxpr) -> str:
    """Equal for programs of equal value and derivatives, those of many orders; what it cannot tell
    apart, such as two callbacks, it takes for different."""
    text, is_whole = _printed(closed)
    if is_whole and not any(name in text for name in CUSTOM_DERIVATIVES):
        return text
    # Rules of custom derivatives are objects, new ones for every trace. What they do counts.
    try:
        return _with_rules(closed)
    except Exception:  # it has no reverse mode, which rules of the caller say in their own way
        return f"{text}\n{next(_unique)}"


# What a program's key tells of rules: a family of functions whose rules call the next one ends.
_MOST_RULES = 32


def _with_rules(closed: core.ClosedJaxpr) -> str:
    """The text of the value and the first derivative, and of those of each function with a rule of
    its own that the derivative calls, from which those of higher order are made."""
    texts = []

    def add(closed: core.ClosedJaxpr, callers: tuple[str, ...]) -> None:
        flat = _with_pullback(closed)
        derivatives = inlined(flat, {**CALLS, **CUSTOM_DERIVATIVES})
        text, is_whole = _printed(derivatives, (*flat.consts, *derivatives.consts))
        texts.append(text if is_whole else f"{text}\n{next(_unique)}")
        if text in callers:  # a rule that calls its own function, as that of softplus does
            return
        for eqn in equations(flat):
            if eqn.primitive.name in CUSTOM_DERIVATIVES and len(texts) < _MOST_RULES:
                add(_alone(eqn), (*callers, text))

    add(closed, ())
    return "\n".join(texts)


def _with_pullback(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The results and what they pull back to the arguments, where both have a derivative, of the
    arguments and the cotangents."""
    function = as_function(closed)

    def with_pullback(arguments, cotangents):
        def of_floats(floats):
            results = function(*(floats.get(i, x) for i, x in enumerate(arguments)))
            return [x for x in results if jnp.issubdtype(x.dtype, jnp.inexact)], results

        floats = {i: x for i, x in enumerate(arguments) if jnp.issubdtype(x.dtype, jnp.inexact)}
        _, pull, results = jax.vjp(of_floats, floats, has_aux=True)
        return results, pull(cotangents)

    types: list[Any] = closed.in_avals
    results: list[Any] = closed.out_avals
    cotangents = [t for t in results if jnp.issubdtype(t.dtype, jnp.inexact)]
    count = len(types)
    return traced(
        lambda *xs: jax.tree.leaves(with_pullback(xs[:count], list(xs[count:]))),
        [*types, *cotangents],
    )


def _alone(eqn) -> core.ClosedJaxpr:
    """An equation as a jaxpr of its operands, constants among them, which its caller's text has."""
    return traced(lambda *inputs: bound(eqn, inputs), [atom.aval for atom in eqn.invars])


def _printed(closed: core.ClosedJaxpr, constants: Sequence[Any] = ()) -> tuple[str, bool]:
    """(the text of a jaxpr with these constants beside its own, whether that says everything)"""
    # Types name their mesh, and a program cannot be evaluated with another one.
    mesh = jax.sharding.get_abstract_mesh()
    text = f"{closed}\n{mesh}" if mesh.shape else str(closed)
    text += "".join(map(_digest, (*constants, *_constants(closed))))
    calls_python = any("callback" in eqn.params for eqn in equations(closed))
    # An address says nothing about what lies there; JAX 0.11 writes X for its digits.
    return text, not (calls_python or re.search("0x([0-9a-fA-F]{6}|X{6})", text))


def _constants(jaxpr) -> list[Any]:
    """Those of a jaxpr and of all that its equations call, which its text does not show; with
    `jax_use_simplified_jaxpr_constants` arrays are literals, of which it shows the ends."""
    literals = (
        atom.val
        for eqn in equations(jaxpr)
        for atom in eqn.invars
        if is_literal(atom) and np.ndim(atom.val) > 0
    )
    of_inner = (
        x.consts
        for eqn in equations(jaxpr)
        for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr)
        if _is_jaxpr(x) and hasattr(x, "consts")
    )
    return [*jaxpr.consts, *itertools.chain.from_iterable(of_inner), *literals]


def _digest(x) -> str:
    """Equal for equal arrays; those that are not known are none of them equal."""
    known = not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True)
    if not known:
        return f"\n{next(_unique)}"
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    return f"\n{x.dtype}{x.shape}{hashlib.sha256(x.tobytes()).hexdigest()}"


def equations(jaxpr) -> Iterator[Any]:
    """Those of a jaxpr and of all that they call."""
    for eqn in jaxpr.eqns:
        yield eqn
        for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(x):
                yield from equations(x)


def _is_jaxpr(x) -> bool:
    return hasattr(x, "eqns")  # closed ones, too
