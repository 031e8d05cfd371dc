"""The check that every conformance test uses: values, gradients by name, repeatability.

Truth is `jaxflash.reference` in float64. What error is allowed is not a constant: a second, plain
computation rounds the operands of each product to the arithmetic in question (float16, bfloat16,
TF32, float32), and a result may be at most twice as wrong as that, plus a floor of rounding errors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jaxflash
from attention_case import (
    CAPTURED,
    DIFFERENTIABLE,
    AttentionCase,
    local_indices,
    positions,
    to_rank,
    visibility,
)

# Exponent and mantissa bits of an operand of the matrix products.
_BITS = {
    name: dict(exponent_bits=exponent, mantissa_bits=mantissa)
    for name, exponent, mantissa in (
        ("float16", 5, 10),
        ("bfloat16", 8, 7),
        ("tf32", 8, 10),
        ("float32", 8, 23),
    )
}
# Factors under which the plain computation rounds: once says too little about the size of an error.
DITHERS = (1.0, 1.17, 1.37)
# And more for a gradient of few elements (one per head), whose error three may all make small; one
# of them rounds the output alone, of which delta is made: a perfect kernel does so, too. Likewise
# for the output of a large row: its largest elements are those of a few probabilities, and one that
# lies between two numbers of the dtype makes errors of them that three may not meet.
_FEW = 16
_ONLY_OUTPUT = 0.0
_DITHERS_OF_FEW = (*DITHERS, _ONLY_OUTPUT, 1.07, 1.13, 1.23, 1.29, 1.43, 1.51, 1.63, 1.81)
# The truth of most rows is small: compiling it takes longer than computing it.
_QUICK: dict[str, bool | int] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # which has no other emitters any more
    _QUICK["xla_cpu_use_fusion_emitters"] = False
# Of more elements than these, logits or keys of all query heads, it takes minutes on a CPU.
_SMALL = 2**20

FACTOR = 2.0  # allowed error / error of the plain computation
UNIT = 2.0**-24  # largest relative error of one rounding in float32
FLOOR = 16 * UNIT  # what the float32 accumulation may lose, relative to its summands


@dataclasses.dataclass(frozen=True)
class Bound:
    """Truth of one result, and the error that it may have."""

    truth: np.ndarray
    largest: float  # of the error of an element
    norm: float  # of the error over the array
    plain_error: float  # largest error of the plain computation, for the message


def check_attention(case: AttentionCase, implementation: str | None) -> None:
    """Runs `case` and checks everything about it; raises AssertionError with a line that repeats
    it. A call that the kernels do not take must say so."""
    if implementation == "cuda" and case.missing_in_kernels:
        return check_refused(case)
    bounds = expected(case, arithmetic(case, implementation), runs_kernels(case, implementation))
    run = jitted(case, implementation)
    actual = run(case.arrays(), *case.cotangents())
    for name, bound in bounds.items():
        if case.visible_nan and name != "out":
            continue  # XLA's maximum over an axis may lose a NaN, but out must not
        check_result(name, actual[name], bound, repro(case, implementation))
    check_dtypes(case, actual)

    again = run(case.arrays(), *case.cotangents())
    repeats = [name for name in bounds if repeatable(case, name, implementation)]
    for name in repeats:
        assert_same_bits(actual[name], again[name], f"{name}: {repro(case, implementation)}")


def check_refused(case: AttentionCase) -> None:
    """implementation="cuda" must name every argument that the kernels lack, and `supported` too."""
    arguments = case.arguments(jax.device_put(case.arrays()))
    try:
        case.function(jaxflash)(**arguments, implementation="cuda")
    except NotImplementedError as error:
        text = str(error)
    else:
        raise AssertionError(f"did not raise NotImplementedError: {repro(case, 'cuda')}")
    reasons = jaxflash.supported(**arguments)
    for name in case.missing_in_kernels:
        assert name in text, f"{name!r} is not in the error {text!r}"
        assert any(name in reason for reason in reasons), f"{name!r} is not in {reasons}"


def repro(case: AttentionCase, implementation: str | None, check: str = "check_attention") -> str:
    """A command that runs the case again, from the folder of the tests."""
    code = f"from check import *; {check}({case!r}, {implementation!r})"
    return f'\nrepeat with: python -c "{code}"'


def repeatable(case: AttentionCase, name: str, implementation: str | None) -> bool:
    """Where the same bits are promised from run to run."""
    if on_gpu() and name.startswith("dscore_mod") and implementation == "xla":
        return False  # XLA adds up what was gathered in any order
    if on_gpu() and name == "dscore_mod.table":
        return False  # read by an index computed of q and kv: by XLA, too
    return name in ("out", "lse") or case.deterministic_backward or implementation == "xla"


def runs_kernels(case: AttentionCase, implementation: str | None) -> bool:
    by_default = on_gpu() and not case.missing_in_kernels
    return implementation == "cuda" or (implementation is None and by_default)


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def arithmetic(case: AttentionCase, implementation: str | None) -> str:
    """How the products of this case are rounded where it runs."""
    highest = case.precision is not None and case.precision != "default"
    return "tf32" if case.dtype == "float32" and on_gpu() and not highest else case.dtype


def split(arrays) -> tuple[dict, dict]:
    """(operands with a gradient, the others)"""
    with_gradient = {name: arrays[name] for name in DIFFERENTIABLE if name in arrays}
    with_gradient |= {
        name: x
        for name, x in arrays.items()
        if name.startswith(CAPTURED) and jnp.issubdtype(x.dtype, jnp.floating)
    }
    return with_gradient, {name: x for name, x in arrays.items() if name not in with_gradient}


# ---- The truth's device --------------------------------------------------------------------------


def _compiled(case: AttentionCase):
    """`jax.jit` for truth and plain computation."""
    return functools.partial(jax.jit, compiler_options=None if _truth_on_gpu(case) else _QUICK)


@contextlib.contextmanager
def _in_float64(case: AttentionCase):
    """What computes the truth runs where XLA is quickest at it, its operands as they are given."""
    device = jax.devices("gpu" if _truth_on_gpu(case) else "cpu")[0]
    with jax.default_device(device), jax.enable_x64(True):
        yield


def _truth_on_gpu(case: AttentionCase) -> bool:
    keys = math.prod(case.batch) * case.kv_length * case.q_heads * case.head_dim
    return on_gpu() and max(math.prod(case.shapes["logits"]), keys) > _SMALL


# ---- Running ------------------------------------------------------------------------------------


def jitted(case: AttentionCase, implementation: str | None):
    """A function of (arrays, cotangent of out, cotangent of lse): out, lse and all gradients by
    name, in one program."""

    def attend(with_gradient, others):
        return case.function(jaxflash)(
            **case.arguments({**with_gradient, **others}),
            implementation=implementation,
            return_residual=True,
        )

    run = jax.jit(functools.partial(_values_and_gradients, attend))

    def of_arrays(arrays, dout, dlse):
        return run(*split(arrays), dout, dlse.astype(_lse_dtype(case)))

    return of_arrays


def _lse_dtype(case):
    return jnp.dtype("float64" if case.dtype == "float64" else "float32")


def _values_and_gradients(attend, with_gradient, others, dout, dlse):
    (out, lse), pull = jax.vjp(lambda operands: attend(operands, others), with_gradient)
    (gradients,) = pull((dout, dlse))
    return {"out": out, "lse": lse} | {f"d{name}": x for name, x in gradients.items()}


def check_tangents(case: AttentionCase, implementation: str | None) -> None:
    """Tangents of out and lse, given those of all operands that have one."""
    bounds = _expected_tangents(
        case, arithmetic(case, implementation), runs_kernels(case, implementation)
    )
    moving, others, tangents = _moving(case, case.arrays())

    @jax.jit
    def run(moving, others, tangents):
        def attend(moving):
            return case.function(jaxflash)(
                **case.arguments({**moving, **others}),
                implementation=implementation,
                return_residual=True,
            )

        return jax.jvp(attend, (moving,), (tangents,))[1]

    results = run(moving, others, tangents)
    assert results[0].dtype == jnp.dtype(case.dtype)
    repeated = run(moving, others, tangents)
    for name, actual, again in zip(bounds, results, repeated, strict=True):
        check_result(name, actual, bounds[name], repro(case, implementation, "check_tangents"))
        assert_same_bits(actual, again, name)


def _moving(case, arrays) -> tuple[dict, dict, dict]:
    """(operands with a tangent, the others, tangents)"""
    moving, others = split(arrays)
    rng = np.random.default_rng(case.seed + 1)
    tangents = {name: rng.standard_normal(x.shape).astype(x.dtype) for name, x in moving.items()}
    for name, x in moving.items():
        tangents[name][np.isnan(x)] = np.nan  # of poison
    return moving, others, tangents


def _expected_tangents(case, arithmetic: str, kernels: bool) -> dict[str, Bound]:
    moving, others, tangents = _moving(case, case.arrays(clean=True))
    wide = jnp.float64 if case.dtype == "float64" else jnp.float32

    @_compiled(case)
    def truth_of(moving, others, tangents):
        def attend(moving):
            arguments = case.arguments({**moving, **others})
            return case.function(jaxflash.reference)(
                **{**arguments, "precision": "highest"}, return_residual=True
            )

        (out, lse), (t_out, t_lse) = jax.jvp(attend, (moving,), (tangents,))
        # The tangent of the logits that a whole row has in common cancels.
        natural = jnp.abs(t_lse[..., None] * out), jnp.abs(t_lse) + 1
        return (t_out, t_lse), natural, lse

    @_compiled(case)
    def plain_of(moving, weights, tangents):
        def run(dither):
            attend = _plain_computation(
                case, others, weights, arithmetic, kernels, dither, _tangent_product
            )
            t_out, t_lse = jax.jvp(attend, (moving,), (tangents,))[1]
            return t_out.astype(case.dtype), t_lse

        return jax.lax.map(run, jnp.asarray(DITHERS, wide))

    def cast(operands, dtype):
        return {name: jnp.asarray(x, dtype) for name, x in operands.items()}

    with _in_float64(case):
        truth, natural, lse = jax.device_get(
            truth_of(cast(moving, np.float64), others, cast(tangents, np.float64))
        )
        weights = _dropout_weights(case, others) if case.dropout_rate else None
        plain = jax.device_get(plain_of(cast(moving, wide), weights, cast(tangents, wide)))
    return {
        name: _bound(name, *values, _floor_given_lse(lse))
        for name, *values in zip(("tout", "tlse"), truth, plain, natural, strict=True)
    }


@functools.lru_cache(maxsize=4)
def expected(case: AttentionCase, arithmetic: str, kernels: bool = False) -> dict[str, Bound]:
    """Truth and allowed error of out, lse and each gradient, computed by XLA."""
    arrays, (dout, dlse) = case.arrays(clean=True), case.cotangents(clean=True)
    with _in_float64(case):
        truth, natural = _truth(case, arrays, dout, dlse)
        few = {name for name, x in truth.items() if name[0] == "d" and x.size <= _FEW}
        if _truth_on_gpu(case):
            few.add("out")
        dithers = _DITHERS_OF_FEW if few else DITHERS
        plain = _plain(case, arrays, dout, dlse, arithmetic, kernels, dithers)
    given_lse = _floor_given_lse(truth["lse"])
    floors = {name: FLOOR if name in ("out", "lse") else given_lse for name in truth}
    return {
        name: _bound(
            name,
            truth[name],
            plain[name] if name in few else plain[name][: len(DITHERS)],
            natural[name],
            floors[name],
        )
        for name in truth
    }


def _floor_given_lse(lse) -> float:
    """Of a pass that recomputes p = exp(logit - lse) from the lse as it is stored, in float32."""
    return FLOOR + 2 * UNIT * np.max(np.abs(lse), where=np.isfinite(lse), initial=0.0)


def _truth(case, arrays, dout, dlse):
    """Results in float64, and for each the size of the summands that make it up."""

    def attend(with_gradient, others):
        arguments = case.arguments({**with_gradient, **others})
        return case.function(jaxflash.reference)(
            **{**arguments, "precision": "highest"}, return_residual=True
        )

    @_compiled(case)
    def run(with_gradient, others, dout, dlse):
        (out, lse), pull = jax.vjp(lambda operands: attend(operands, others), with_gradient)
        # The gradient of a logit is p * (dp - delta + dlse): what the delta part alone does says
        # how large the terms are that cancel.
        delta = jnp.sum(jnp.abs(dout * out), axis=-1) + jnp.abs(dlse)
        (gradients,) = pull((dout, dlse))
        (summands,) = pull((jnp.zeros_like(dout), delta))
        truth = {"out": out, "lse": lse} | {f"d{name}": x for name, x in gradients.items()}
        natural = {"out": out, "lse": jnp.where(jnp.isfinite(lse), jnp.abs(lse) + 1, 0)}
        return truth, natural | {f"d{name}": x for name, x in summands.items()}

    with_gradient, others = split(arrays)
    with_gradient = {name: x.astype(np.float64) for name, x in with_gradient.items()}
    return jax.device_get(
        run(with_gradient, others, dout.astype(np.float64), dlse.astype(np.float64))
    )


def _plain_computation(case, arrays, weights, arithmetic, kernels, dither, product):
    """(out, lse) of the operands that are differentiated, in the given arithmetic."""
    fast_tanh = kernels and arithmetic not in ("float32", "float64")
    rounding = functools.partial(_round, arithmetic, dither)
    # The GPU's instruction has the bits of TF32 (docs/precision.md).
    tanh_rounding = functools.partial(_round, "tf32" if fast_tanh else "float64", dither)
    return lambda operands: plain_attention(
        case, operands, arrays, rounding, weights, tanh_rounding, product
    )


def _plain(case, arrays, dout, dlse, arithmetic, kernels, dithers):
    """Results of plain computations of the given arithmetic, rounded to the dtypes of the call: one
    per dither, along a new first axis."""
    weights = _dropout_weights(case, arrays) if case.dropout_rate else None
    wide = jnp.float64 if case.dtype == "float64" else jnp.float32

    def run(with_gradient, weights, dout, dlse, dither):
        upcast = {name: jnp.asarray(x, wide) for name, x in with_gradient.items()}
        attend = _plain_computation(case, arrays, weights, arithmetic, kernels, dither, _product)
        (out, lse), pull = jax.vjp(attend, upcast)
        dout, dlse = dout.astype(wide), dlse.astype(wide)
        # A backward pass has the rounded output only, so its delta is off by dout * (its error);
        # delta enters the gradient as -dlse does.
        of_output = jnp.where(dither == _ONLY_OUTPUT, 1.0, dither)
        lost = jnp.sum(dout * (_round(case.dtype, of_output, out) - out), axis=-1)
        (gradients,) = pull((dout, dlse - lost))
        gradients = {name: x.astype(with_gradient[name].dtype) for name, x in gradients.items()}
        return {"out": out.astype(case.dtype), "lse": lse} | {
            f"d{name}": x for name, x in gradients.items()
        }

    @_compiled(case)
    def run_all(*arguments):
        return jax.lax.map(lambda dither: run(*arguments, dither), jnp.asarray(dithers, wide))

    return jax.device_get(run_all(split(arrays)[0], weights, dout, dlse))


def plain_attention(
    case, operands, arrays, rounding, dropout_weights, tanh_rounding=lambda x: x, product=None
):
    """(out, lse) with a dense array of logits, independent of the package."""
    product = product or _product
    group = case.q_heads // case.num_kv_heads
    query = operands["query"]
    wide = query.dtype
    key = jnp.repeat(operands["key"], group, axis=-2)
    value = jnp.repeat(operands["value"], group, axis=-2)
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    logits = product("...tnh,...snh->...nts", rounding, query, key) * jnp.asarray(scale, wide)
    if "bias" in operands:
        logits += to_rank(operands["bias"], logits.ndim)
    if "alibi_slopes" in operands:
        away = np.abs(positions(case, arrays)[..., :, None] - np.arange(case.kv_length))
        slopes = to_rank(operands["alibi_slopes"][..., None, None], logits.ndim)
        logits -= slopes * away[..., None, :, :].astype(wide)
    if case.logits_soft_cap is not None:
        logits = case.logits_soft_cap * tanh_rounding(jnp.tanh(logits / case.logits_soft_cap))
    if case.score_mod is not None:
        captured = {name: x for name, x in arrays.items() if name.startswith(CAPTURED)}
        captured = {**jax.tree.map(jnp.asarray, captured), **operands}
        score_mod = case.bound_score_mod(captured)
        *batch, heads, q_len, kv_len = logits.shape
        b = np.arange(math.prod(batch), dtype=np.int32).reshape(*batch, 1, 1, 1)
        h, q, kv = np.ogrid[:heads, :q_len, :kv_len]
        b, q, kv = local_indices(case, b, q, kv)
        indices = np.broadcast_arrays(*(x.astype(np.int32) for x in (b, h, q, kv)))
        flat = [jnp.asarray(x).reshape(-1) for x in indices]
        # What is its own in a score function, too.
        tanh = jnp.tanh
        with mock.patch.object(jnp, "tanh", lambda x: tanh_rounding(tanh(x))):
            flat = jax.vmap(score_mod)(logits.reshape(-1), *flat)
        logits = flat.astype(wide).reshape(logits.shape)
    logits = jnp.where(visibility(case, arrays), logits, -jnp.inf)

    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf))
    empty = top == -jnp.inf
    top = jnp.where(empty, 0, top)
    p = jnp.exp(logits - top)
    denominator = jnp.sum(p, axis=-1, keepdims=True)
    if "sink" in operands:
        denominator += jnp.exp(to_rank(operands["sink"][:, None, None], top.ndim) - top)
    denominator = jnp.where(empty, 1, denominator)
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(denominator))
    if dropout_weights is not None:
        p = p * dropout_weights.astype(wide)
    out = product("...nts,...snh->...tnh", rounding, p, value)
    out = out / jnp.swapaxes(denominator, -2, -3)
    return out, jnp.swapaxes(lse[..., 0], -1, -2)


def _product(equation, rounding, x, y):
    """An einsum whose operands are rounded, in its derivatives too."""

    @jax.custom_vjp
    def product(x, y):
        return forward(x, y)[0]

    def forward(x, y):
        x, y = rounding(x), rounding(y)
        return jnp.einsum(equation, x, y, precision="highest"), (x, y)

    def backward(operands, cotangent):
        _, pull = jax.vjp(functools.partial(jnp.einsum, equation, precision="highest"), *operands)
        return pull(rounding(cotangent))

    product.defvjp(forward, backward)
    return product(x, y)


def _tangent_product(equation, rounding, x, y):
    """The same, to be differentiated in forward mode."""

    def einsum(x, y):
        return jnp.einsum(equation, rounding(x), rounding(y), precision="highest")

    product = jax.custom_jvp(einsum)

    @product.defjvp
    def _(primals, tangents):
        (x, y), (t_x, t_y) = primals, tangents
        return einsum(x, y), einsum(t_x, y) + einsum(x, t_y)

    return product(x, y)


def _round(arithmetic, dither, x):
    """`x` with the bits that an operand has; `dither` moves the grid of what is not on it."""
    if arithmetic == "float64":
        return x
    round_ = functools.partial(jax.lax.reduce_precision, **_BITS[arithmetic])
    exact = (round_(x) == x) | (dither == _ONLY_OUTPUT)
    factor = jnp.where(exact, 1.0, dither).astype(x.dtype)
    return jnp.where(exact, x, round_(x * factor) / factor)


def _dropout_weights(case, arrays):
    """What dropout multiplies each probability by, (*B, N, T, S), seen through the reference: equal
    logits, and values that tell the keys apart."""
    if case.kv_length == 0:
        return np.zeros(case.shapes["logits"], np.float32)

    @_compiled(case)
    def attend(dropout_rng):
        query, key = (jnp.zeros(case.shapes[name], jnp.float32) for name in ("query", "key"))
        eye = jnp.eye(case.kv_length, dtype=jnp.float32)[:, None, :]
        shape = (*case.batch, case.kv_length, case.num_kv_heads, case.kv_length)
        return jaxflash.reference.dot_product_attention(
            query, key, jnp.broadcast_to(eye, shape), precision="highest",
            dropout_rate=case.dropout_rate, dropout_rng=dropout_rng,
        )  # fmt: skip

    probabilities = np.asarray(attend(arrays["dropout_rng"]))
    return np.moveaxis(probabilities * case.kv_length, -2, -3)


# ---- Comparing ----------------------------------------------------------------------------------


def _bound(name: str, truth, plain, natural, floor: float) -> Bound:
    """The error that a result may have, given what a plain computation of the same dtypes made."""
    unit = float(jnp.finfo(plain.dtype).eps)
    truth, plain, natural = (np.asarray(x, np.float64) for x in (truth, plain, natural))
    finite = np.isfinite(truth)
    error = np.abs(np.where(finite, plain, 0) - np.where(finite, truth, 0))
    truth_size, natural_size = (np.where(np.isfinite(x), np.abs(x), 0) for x in (truth, natural))
    floor *= min(1.0, unit / 2**-23)  # float64 has a smaller one

    def largest(x):
        return float(np.max(x, initial=0.0))

    def norm(x):
        return float(np.linalg.norm(x.ravel()))

    def allowed(size, of_error):
        return (
            FACTOR * of_error
            + floor * (size(truth_size) + size(natural_size))
            + unit / 8 * size(truth_size)
        )

    # Of all dithers together; of more than the usual ones, as if there were as many as those.
    error_norm = norm(error) * math.sqrt(len(DITHERS) / len(plain))
    bound = Bound(
        truth, allowed(largest, largest(error)), allowed(norm, error_norm), largest(error)
    )
    assert np.isfinite([bound.largest, bound.norm]).all(), f"{name}: no finite bound on the error"
    return bound


def check_result(name: str, actual, bound: Bound, where: str) -> None:
    """Positions of infinities and NaN first, then the error of each element, then its norm."""
    truth = bound.truth
    actual = np.asarray(actual).astype(np.float64)
    assert actual.shape == truth.shape, f"{name} has shape {actual.shape}, not {truth.shape}{where}"
    for kind, test in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        differ = test(actual) != test(truth)
        if differ.any():
            index = tuple(map(int, np.argwhere(differ)[0]))
            raise AssertionError(
                f"{name}: {kind} in other places than expected, {int(differ.sum())} of "
                f"{differ.size}; first at {index}: got {actual[index]}, expected {truth[index]}"
                f"{where}"
            )
    finite = np.isfinite(truth)
    error = np.abs(np.where(finite, actual, 0) - np.where(finite, truth, 0))
    if error.size and error.max() > bound.largest:
        index = np.unravel_index(int(error.argmax()), error.shape)
        raise AssertionError(
            f"{name}: largest error {error.max():.3g}, allowed {bound.largest:.3g} (plain "
            f"computation: {bound.plain_error:.3g}) at {tuple(map(int, index))}: got "
            f"{actual[index]:.9g}, expected {truth[index]:.9g}; "
            f"{int((error > bound.largest).sum())} of {error.size} elements are over it{where}"
        )
    norm = float(np.linalg.norm(error.ravel()))
    assert norm <= bound.norm, (
        f"{name}: norm of the error {norm:.3g}, allowed {bound.norm:.3g} (norm of the truth "
        f"{np.linalg.norm(np.where(finite, truth, 0).ravel()):.3g}){where}"
    )


def check_dtypes(case: AttentionCase, actual) -> None:
    arrays = case.arrays()
    assert actual["out"].dtype == jnp.dtype(case.dtype)
    assert actual["lse"].dtype == _lse_dtype(case)
    for name in split(arrays)[0]:
        assert actual[f"d{name}"].dtype == arrays[name].dtype, name


def assert_same_bits(x, y, what: str = "") -> None:
    """The same bytes, of arrays or of trees of them."""
    for first, second in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        a, b = np.asarray(first), np.asarray(second)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), what
        assert a.tobytes() == b.tobytes(), (
            f"not the same bits in {what}: {int((a != b).sum())} of {a.size} elements differ"
        )


def assert_close(actual, expected) -> None:
    """Trees of results in float32."""
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)
