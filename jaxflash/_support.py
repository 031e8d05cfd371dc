"""Why the kernels cannot take a call, its gradients or its tangents, and the warnings that say
so."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence

from jaxflash import _config, _kernel_program, _nvrtc, _platform
from jaxflash import _extension as extension
from jaxflash._pages import Pages
from jaxflash._printer import MAX_LENGTH, NotPrintable
from jaxflash._spec import AttentionSpec, Operands

# The kernels' name of the arithmetic, by dtype and whether float32 products must be exact.
_MATH = {
    ("float16", False): "float16",
    ("float16", True): "float16",
    ("bfloat16", False): "bfloat16",
    ("bfloat16", True): "bfloat16",
    ("float32", False): "tf32",
    ("float32", True): "float32",
}


def reasons_against_kernels(spec: AttentionSpec, operands: Operands) -> tuple[str, ...]:
    """Every reason why the kernels cannot take the call; empty when they can."""
    if not extension.kernels:
        return ("this installation was built without CUDA kernels (JAXFLASH_CUDA=OFF)",)
    query, key, value = operands.query, operands.key, operands.value
    reasons = _reasons_against_symbolic_sizes(operands)
    if reasons:
        return reasons
    reasons = [] if _platform.has_partitioner() else [_platform.NO_PARTITIONER]
    dtype = query.dtype.name
    math = _MATH.get((dtype, spec.highest_precision))
    if math is None:
        reasons.append(f"dtype {dtype}: the kernels take float16, bfloat16 and float32")
    else:
        largest = _largest_head_size(math)
        if largest == 0:
            reasons.append(f"dtype {dtype}: this installation lacks {math} kernels")
        for name, size in (("query/key", query.shape[-1]), ("value", value.shape[-1])):
            if size > largest > 0:
                reasons.append(
                    f"{name} head size {size}: the {math} kernels in this installation take "
                    f"1 to {largest}"
                )
    limit = f"2**{MAX_LENGTH.bit_length() - 1}"
    for name, length in (("query", query.shape[-3]), ("key", key.shape[-3])):
        if isinstance(length, int) and length > MAX_LENGTH:
            reasons.append(f"{name} length {length}: the kernels take at most {limit}")
    return (*reasons, *_reasons_against_program(spec, operands))


def _reasons_against_symbolic_sizes(operands: Operands) -> tuple[str, ...]:
    """Why the kernels cannot take sizes that `jax.export` leaves open: other ones compile."""
    query, key, value = operands.query, operands.key, operands.value
    sizes = {
        "number of query heads": query.shape[-2],
        "number of key heads": key.shape[-2],
        "query/key head size": query.shape[-1],
        "value head size": value.shape[-1],
    }
    return tuple(
        f"{name} {size}: the kernels need it when the program is exported"
        for name, size in sizes.items()
        if not isinstance(size, int)
    )


def _reasons_against_program(spec: AttentionSpec, operands: Operands) -> tuple[str, ...]:
    """Why the kernels cannot take what changes the scores of a call."""
    try:
        # A mask is another capture in the backward pass.
        _kernel_program.make(spec, operands, "backward")
        always = isinstance(operands.key, Pages)
        program = _kernel_program.make(spec, operands, "forward", always)
    except NotPrintable as reason:
        parts = spec.program.parts if spec.program is not None else ()
        if spec.predicate is not None or operands.mask is not None:
            parts = (*parts, "mask")
        return (f"{' with '.join(parts) or 'the call'} {reason}",)
    if program is None:
        return ()
    reasons = []
    if (no_compiler := _nvrtc.reason_against()) is not None:
        reasons.append(no_compiler)
    for name, x in (("query", operands.query), ("key", operands.key)):
        length, limit = x.shape[-3], program.exact_length
        if limit is not None and isinstance(length, int) and length > limit:
            reasons.append(
                f"{name} length {length}: with causal_alignment='bottom_right', score functions of "
                f"q - kv take at most {limit} in the kernels"
            )
    return tuple(reasons)


def plans_by_kernel(spec: AttentionSpec, operands: Operands) -> bool:
    """Whether a kernel finds what the predicate of a call shows, if the call runs on kernels."""
    if spec.predicate is None or not extension.kernels or _nvrtc.reason_against() is not None:
        return False
    lengths = operands.query.shape[-3], operands.key.shape[-3]
    if any(isinstance(n, int) and n > MAX_LENGTH for n in lengths):
        return False
    try:
        _kernel_program.predicate(spec.predicate)
    except NotPrintable:
        return False
    return True


def reasons_against_gradients(
    spec: AttentionSpec, operands: Operands, captures: Sequence[int]
) -> dict[int, tuple[str, ...]]:
    """Why the kernels, which take the call, cannot compute the gradients of some of its captures:
    of each, none if they can."""
    found = {i: _reasons_against_gradient(spec, operands, i) for i in captures}
    more = found
    # How one is summed depends on the others.
    while spec.deterministic_backward and more:
        taken = [i for i, reasons in found.items() if not reasons]
        more = _unordered(_kernel_program.gradients(spec, operands, taken))
        found |= more
    return found


def _reasons_against_gradient(
    spec: AttentionSpec, operands: Operands, capture: int
) -> tuple[str, ...]:
    try:
        gradients = _kernel_program.gradients(spec, operands, (capture,))
    except NotPrintable as reason:
        name = _captured_by(spec, capture)
        return (f"the derivative of {name} by what it captures {reason}",)
    if not spec.deterministic_backward:
        return ()
    return _unordered(gradients).get(capture, ())


def _unordered(gradients: _kernel_program.KernelGradients | None) -> dict[int, tuple[str, ...]]:
    """Of captures whose gradients have no order, the reasons."""
    found: dict[int, tuple[str, ...]] = {}
    for load in () if gradients is None else gradients.loads:
        if load.scatter:
            reason = (
                "deterministic_backward with the gradient of an array that score_mod reads "
                f"{load.scattered}"
            )
            found[load.capture] = tuple(dict.fromkeys((*found.get(load.capture, ()), reason)))
    return found


def reasons_against_tangents(
    spec: AttentionSpec, operands: Operands, captures: Sequence[int]
) -> tuple[str, ...]:
    """Why the kernels, which take the call, cannot compute tangents where some captures move."""
    if (no_compiler := _nvrtc.reason_against()) is not None:
        return (no_compiler,)
    try:
        _kernel_program.tangents(spec, operands, captures)
    except NotPrintable as reason:
        names = dict.fromkeys(_captured_by(spec, i) for i in captures)
        return (f"the tangent of {' and '.join(names)} {reason}",)
    return ()


def _captured_by(spec: AttentionSpec, capture: int) -> str:
    """The argument that brought a captured array."""
    assert spec.program is not None
    built_in = [name for name in ("bias", "alibi_slopes") if name in spec.program.parts]
    return built_in[capture] if capture < len(built_in) else "score_mod"


class SlowPathWarning(UserWarning):
    """A program for CUDA falls back to the blockwise path, many times slower than the kernels,
    because they do not take a call, its tangents or its first gradients. Given once for each
    reason, when the program is compiled.

    ``implementation="xla"`` asks for the blockwise path without this warning. `supported` returns
    the reasons against a call beforehand, not those against its tangents and gradients.

    Examples:
      As an error, to find such calls::

          warnings.simplefilter("error", jaxflash.SlowPathWarning)
    """


_warned: set[str] = set()


def warn_of_slow_path(reasons: tuple[str, ...]) -> None:
    """A `SlowPathWarning` of those reasons that had none yet."""
    _warn(
        "this call runs on the blockwise path, many times slower on a GPU than the CUDA kernels: "
        "{}. implementation='xla' asks for it without this warning",
        reasons,
    )


def warn_of_slow_gradients(reasons: tuple[str, ...]) -> None:
    """A `SlowPathWarning` of those reasons against gradients of captures that had none yet."""
    _warn(
        "gradients of captured arrays are computed by the blockwise path, many times slower on a "
        "GPU than the CUDA kernels, which compute the rest: {}. jax.lax.stop_gradient leaves them "
        "out",
        reasons,
    )


def warn_of_slow_tangents(reasons: tuple[str, ...]) -> None:
    """A `SlowPathWarning` of those reasons that had none yet."""
    _warn(
        "tangents are computed by the blockwise path, many times slower on a GPU than the CUDA "
        "kernels, which compute the rest: {}",
        reasons,
    )


def _warn(text: str, reasons: tuple[str, ...]) -> None:
    new = [reason for reason in reasons if reason not in _warned]
    if not new:
        return
    message = f"jaxflash: {text.format('; '.join(new))} (jaxflash.SlowPathWarning)"
    warnings.warn(message, SlowPathWarning, stacklevel=3)
    _warned.update(new)


@functools.cache
def reasons_against_machine() -> tuple[str, ...]:
    """Why the kernels, whatever the call, do not run on this machine; asks the CUDA driver, and
    starts no JAX backend."""
    if not extension.kernels:
        return ()  # a reason against the call already
    devices = _config.devices()
    if not devices:
        return (
            "this machine has no NVIDIA GPU, or no driver for CUDA "
            f"({extension.build_info()}): programs can be lowered and exported for CUDA here, "
            "not run",
        )
    reasons = [device.reason_against for device in devices]
    return tuple(dict.fromkeys(reasons)) if all(reasons) else ()


@functools.cache
def _largest_head_size(math: str) -> int:
    """Largest head size for which all passes are in the library."""
    sizes = {"forward": 0, "backward": 0, "tangent": 0}
    for _, pass_name, built_math, *head_sizes in extension.variants():
        if built_math == math:
            sizes[pass_name] = max(sizes[pass_name], min(head_sizes))
    return min(sizes.values())
