"""Looking into traced programs, and lowered and compiled ones."""

from __future__ import annotations

from collections.abc import Iterator

import jax

from jaxflash._primitive import Op


def equations(function, *arguments) -> Iterator:
    """Every equation of the traced function, those of inner jaxprs as often as they are called.

    The package's own primitives count as what they lower to.
    """
    yield from _equations(jax.make_jaxpr(function)(*arguments).jaxpr)


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        op = equation.params.get("op")
        if isinstance(op, Op):
            types = [variable.aval for variable in equation.invars]
            yield from _equations(jax.make_jaxpr(op)(*types).jaxpr)
        for parameter in equation.params.values():
            for inner in jax.tree.leaves(parameter, is_leaf=_has_jaxpr):
                inner = _jaxpr_of(inner)
                if inner is not None:
                    yield from _equations(inner)


def _has_jaxpr(x) -> bool:
    return _jaxpr_of(x) is not None


def _jaxpr_of(x):
    """The jaxpr in a parameter of an equation, closed or not; None if it is something else."""
    x = getattr(x, "jaxpr", x)
    return x if hasattr(x, "eqns") and hasattr(x, "outvars") else None


def products(function, *arguments) -> int:
    """How many matrix products or custom calls the function is traced to."""
    return sum(
        equation.primitive.name in ("dot_general", "ffi_call")
        for equation in equations(function, *arguments)
    )


def calls_of(target: str, function, *arguments) -> int:
    return sum(
        equation.primitive.name == "ffi_call" and equation.params["target_name"] == target
        for equation in equations(function, *arguments)
    )


def custom_calls(text: str, target: str) -> list[str]:
    """The lines of a lowered program that call the target."""
    return [line for line in text.splitlines() if f"custom_call @{target}(" in line]


def compiled_custom_calls(text: str, target: str) -> list[str]:
    """The lines of a compiled program that call the target."""
    return [line for line in text.splitlines() if f'custom_call_target="{target}"' in line]
