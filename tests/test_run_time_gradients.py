"""Kernels compiled at run time for gradients of biases and captures."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compiled_kernels import (
    A100,
    BAND_OR_RANGES,
    H200,
    MORE_SPILLS,
    S80,
    S90,
    compile_kernel,
    compile_program,
)
from covering import covering
from jaxflash import _api, _config, _kernel_program
from jaxflash._printer import cuda
from jaxflash._printer.request import Request
from jaxflash._program import trace

pytestmark = pytest.mark.usefixtures("kernel_cache")


# ---- In the backward kernel ----------------------------------------------------------------------

_KEY_BIAS = np.zeros((2, 2, 1, 64), np.float32)
_KEY_SUMS = {
    "keys": dict(bias=_KEY_BIAS),
    "slopes": dict(alibi_slopes=np.ones(2, np.float32)),
    "keys and slopes": dict(bias=_KEY_BIAS, alibi_slopes=np.ones(2, np.float32)),
    "soft cap": dict(bias=_KEY_BIAS, logits_soft_cap=30.0),
    "dropout": dict(bias=_KEY_BIAS, dropout_rate=0.1, dropout_rng=jax.random.key(0)),
}


def _summing(name: str, head_dim: int) -> tuple[str, str]:
    """Sources: of the backward kernel, and of the one that sums instead of it."""
    qkv = 3 * (jnp.zeros((2, 64, 2, head_dim), jnp.bfloat16),)
    spec, operands = _api.described(*qkv, **_KEY_SUMS[name])
    wanted = range(len(operands.captures))
    program = _kernel_program.make(spec, operands, "backward", wanted=wanted)
    gradients = _kernel_program.gradients(spec, operands, tuple(wanted))
    assert program is not None
    assert gradients is not None
    assert not gradients.loads
    assert f"kKeySums = {gradients.key_sums};" in program.source
    return program.source, gradients.source


@covering("head_dim, name, mask", [64, 96, 128, 192, 256], list(_KEY_SUMS), BAND_OR_RANGES)
def test_sums_over_queries_on_hopper(head_dim, name, mask):
    source, _ = _summing(name, head_dim)
    compiled = compile_program(source, pass_name="backward", head_dim=head_dim, mask=mask, **H200)
    assert not compiled.serialised, compiled
    # Slopes of logits, segments and a sum are too much for the registers of any tile.
    bound = 152 if (name, mask) == ("soft cap", 2) else 64
    assert compiled.spilled <= bound + MORE_SPILLS, compiled
    if mask == 0 and head_dim == 128 and name in ("keys", "slopes"):
        assert compiled.spilled == 0, compiled


_TABLES = {
    "table": lambda s, b, h, q, kv, x: s + x[h, q - kv + 64],
    "reversed": lambda s, b, h, q, kv, x: s + x[h, kv - q + 64],
    "clipped": lambda s, b, h, q, kv, x: s + x[h, jnp.clip(q - kv, -9, 9) + 9],
    "soft cap": lambda s, b, h, q, kv, x: 30.0 * jnp.tanh((s + x[h, q - kv + 64]) / 30.0),
}


@covering("head_dim, name, mask", [64, 96, 128], list(_TABLES), BAND_OR_RANGES)
def test_tables_of_distances_on_hopper(head_dim, name, mask):
    qkv = 3 * (jnp.zeros((2, 64, 2, head_dim), jnp.bfloat16),)
    table = jnp.zeros((2, 128), jnp.float32)
    call = _api.described(*qkv, score_mod=lambda *xs: _TABLES[name](*xs, table))
    for pass_name, wanted in (("forward", ()), ("backward", ()), ("backward", (0,))):
        program = _kernel_program.make(*call, pass_name, wanted=wanted)
        assert program is not None
        sums = len(wanted) > 0
        assert f"kSumsDiagonals = {'true' if sums else 'false'};" in program.source
        compiled = compile_program(
            program.source, pass_name=pass_name, head_dim=head_dim, mask=mask, **H200
        )
        assert not compiled.serialised, compiled
        bound = 152 if (name, mask) == ("soft cap", 2) else 64  # as of sums over queries
        assert compiled.spilled <= bound + MORE_SPILLS, compiled


@pytest.mark.parametrize("name", ["keys", "slopes", "soft cap"])
def test_sums_over_queries_elsewhere(name):
    """The backward kernel leaves them to that of gradients, as it does where TMA cannot read."""
    backward, gradient = _summing(name, 64)
    compiled = compile_program(backward, pass_name="backward", head_dim=64, **A100)
    assert compiled.name.startswith("sm80 backward")
    for family, architecture, traits in (
        ("sm80", "sm_80", f"{S80}CaptureGradientChoice<jaxflash::Math::kBFloat16, 64>::Large"),
        ("sm90", "sm_90a", "jaxflash::sm90::CaptureGradientTraits<jaxflash::Math::kBFloat16, 64, "
                           "jaxflash::sm90::CaptureGradientTile<128>, "
                           "jaxflash::sm90::GradientStaging::kSums>"),
    ):  # fmt: skip
        name = f"jaxflash::{family}::capture_gradient_kernel<{traits}, jaxflash::BandMask, "
        source = f"""
            #include "common/program.cuh"
            #include "common/range_mask.cuh"
            {gradient}
            #include "{family}/capture_gradient_kernel.cuh"
        """
        name += "jaxflash::Program, jaxflash::Program::Load0>"
        compiled = compile_kernel(source, name, architecture)
        assert compiled.spilled <= 24, compiled


_STORED = {
    "alone": {},
    "causal": dict(is_causal=True),
    "dropout": dict(dropout_rate=0.1, dropout_rng=jax.random.key(0)),
    "soft cap": dict(logits_soft_cap=30.0),
}


def _storing(name: str, head_dim: int, batch: int = 2) -> tuple[_kernel_program.KernelProgram, str]:
    """Of the backward kernel, and the source of the one that has the gradient instead of it."""
    qkv = 3 * (jnp.zeros((2, 64, 2, head_dim), jnp.bfloat16),)
    bias = jnp.zeros((batch, 2, 64, 64), jnp.bfloat16)
    spec, operands = _api.described(*qkv, bias=bias, **_STORED[name])
    program = _kernel_program.make(spec, operands, "backward", wanted=(0,))
    gradients = _kernel_program.gradients(spec, operands, (0,))
    assert program is not None
    assert gradients is not None
    assert "kStoresGradient = true" in program.source
    (load,) = gradients.loads
    assert load.stored
    assert load.narrow
    return program, gradients.source


@covering("head_dim, name, mask", [64, 96, 128, 192, 256], list(_STORED), BAND_OR_RANGES)
def test_stored_gradient_on_hopper(head_dim, name, mask):
    """It takes no registers of those that compute; 2 with a soft cap and ranges at 128."""
    program, _ = _storing(name, head_dim)
    start = -1 if program.start_capture is None else program.start_capture
    options = dict(pass_name="backward", head_dim=head_dim, mask=mask, start_capture=start, **H200)
    compiled = compile_program(program.source, **options)
    other = program.source.replace("kStoresGradient = true", "kStoresGradient = false")
    without = compile_program(other, **options)
    assert not compiled.serialised, compiled
    assert compiled.tile == without.tile
    more = 8 if (head_dim, name, mask) == (128, "soft cap", 1) else 0
    assert compiled.spilled <= without.spilled + more + MORE_SPILLS, (compiled, without)


@covering("head_dim, name, mask", [64, 96, 128], list(_STORED), BAND_OR_RANGES)
def test_stored_sum_over_the_batch_on_hopper(head_dim, name, mask):
    """Turns take none of the registers of those that compute."""
    program, _ = _storing(name, head_dim, batch=1)
    assert "kSumsBatch = true" in program.source
    start = -1 if program.start_capture is None else program.start_capture
    options = dict(pass_name="backward", head_dim=head_dim, mask=mask, start_capture=start, **H200)
    compiled = compile_program(program.source, **options)
    without = compile_program(
        program.source.replace("kSumsBatch = true", "kSumsBatch = false"), **options
    )
    assert not compiled.serialised, compiled
    assert compiled.tile == without.tile
    assert compiled.spilled <= without.spilled + MORE_SPILLS, (compiled, without)


def test_stored_gradient_elsewhere():
    """Portable kernels leave it to that of gradients."""
    program, gradient = _storing("alone", 64)
    compiled = compile_program(program.source, pass_name="backward", head_dim=64, **A100)
    assert compiled.name.startswith("sm80 backward")
    traits = f"{S80}CaptureGradientChoice<jaxflash::Math::kBFloat16, 64>::Large"
    source = f"""
        #include "common/program.cuh"
        #include "common/range_mask.cuh"
        {gradient}
        #include "sm80/capture_gradient_kernel.cuh"
    """
    name = (
        f"jaxflash::sm80::capture_gradient_kernel<{traits}, jaxflash::BandMask, "
        "jaxflash::Program, jaxflash::Program::Load0>"
    )
    assert not compile_kernel(source, name, "sm_80").spilled


# ---- In a kernel of their own --------------------------------------------------------------------

_LOADS = {
    # A tile of the gradient in registers; its sums over rows; over all; along diagonals; none.
    "bias": (lambda s, b, h, q, kv, distance, x: s + x[h, q, kv], (4, 64, 64)),
    "keys": (lambda s, b, h, q, kv, distance, x: s + x[h, kv], (4, 64)),
    "slopes": (lambda s, b, h, q, kv, distance, x: s - x[h] * jnp.abs(q - kv), (4,)),
    "table": (lambda s, b, h, q, kv, distance, x: s + x[h, jnp.clip(q - kv, 0, 8)], (4, 9)),
    "branches": (
        lambda s, b, h, q, kv, distance, x: jax.lax.switch(
            (q + kv) % 3, [lambda s: s * x[h, q], lambda s: s + x[h, kv], jnp.tanh], s
        ),
        (4, 64),
    ),
    "lookup": (lambda s, b, h, q, kv, distance, x: s + x[h, (q + kv) % 9], (4, 9)),
}


def _capture_gradient(
    load: str, dtype: str, lengths: tuple[int, int] = (64, 64), **options
) -> cuda.PrintedGradients:
    function, shape = _LOADS[load]
    if load == "bias":
        shape = (shape[0], *lengths)
    with jax.numpy_dtype_promotion("standard"):
        program, _ = trace(function, (jax.ShapeDtypeStruct(shape, dtype),), "float32")
    return cuda.print_gradients(
        Request(program, wanted=(0,), lengths=lengths, distance_is_difference=True, **options)
    )


def _compiled_gradient(
    printed: cuda.PrintedGradients, family: str, traits: str, mask: str, architecture: str
) -> _config.CompiledKernel:
    source = f"""
        #include "common/program.cuh"
        #include "common/range_mask.cuh"
        {printed.source}
        #include "{family}/capture_gradient_kernel.cuh"
    """
    name = f"jaxflash::{family}::capture_gradient_kernel<{traits}, jaxflash::{mask}, "
    return compile_kernel(
        source, f"{name}jaxflash::Program, jaxflash::Program::Load0>", architecture
    )


@pytest.mark.parametrize(
    ("load", "math", "head_dim", "architecture", "options"),
    [
        *(("bias", "kBFloat16", head_dim, "sm_80", {}) for head_dim in (64, 128, 256)),
        *((load, "kBFloat16", 128, "sm_80", {}) for load in ("keys", "slopes", "table", "lookup")),
        ("branches", "kBFloat16", 128, "sm_80", {}),
        ("bias", "kFloat16", 128, "sm_80", {}),
        ("bias", "kTF32", 128, "sm_90", {}),
        ("bias", "kFloat32", 64, "sm_80", {}),
        *(("bias", "kBFloat16", n, "sm_80", dict(dropout=1)) for n in (64, 128, 256)),
        *(("bias", "kBFloat16", 128, "sm_80", dict(mask=f"RangeMask<{ids}>")) for ids in (0, 1)),
        ("table", "kBFloat16", 128, "sm_80", dict(mask="RangeMask<true>", dropout=1)),
    ],
)
def test_gradients_of_captures(load, math, head_dim, architecture, options):
    dropout = options.get("dropout")
    compiled = _compiled_gradient(
        _capture_gradient(load, "float32", drops=dropout is not None),
        "sm80",
        f"{S80}CaptureGradientChoice<jaxflash::Math::{math}, {head_dim}>::Large",
        options.get("mask", "BandMask"),
        architecture,
    )
    # 4 to 24 bytes, where all 255 registers are in use, 40 with the bits of dropout.
    assert compiled.spilled <= (24 if dropout is None else 40), compiled


_NARROW = (1 << 10, 1 << 11)  # queries and keys whose bias has a gradient of 16 bits


@pytest.mark.parametrize(
    ("load", "math", "head_dim", "keys", "options"),
    [
        *(
            ("bias", "kBFloat16", n, 128, dict(staging=staging, lengths=lengths))
            for n in (64, 128, 256)
            for staging in ("kTiles", "kStartTiles")
            for lengths in ((64, 64), _NARROW)
        ),
        *((load, "kFloat16", 128, 128, {}) for load in ("keys", "slopes", "table")),
        ("lookup", "kFloat16", 128, 64, {}),
        ("bias", "kBFloat16", 128, 64, dict(starts=(), lengths=_NARROW)),
        *(
            ("bias", "kBFloat16", n, 128, dict(dropout=1, staging=staging, lengths=_NARROW))
            for n in (64, 128, 256)
            for staging in ("kTiles", "kStartTiles")
        ),
        *(
            ("bias", "kBFloat16", 128, 128,
             dict(mask=f"RangeMask<{ids}>", staging="kStartTiles", lengths=_NARROW))
            for ids in (0, 1)
        ),
        ("table", "kBFloat16", 128, 128, dict(mask="RangeMask<true>", dropout=1)),
    ],
)  # fmt: skip
def test_gradients_of_captures_on_hopper(load, math, head_dim, keys, options):
    paired = (0,) if load in ("bias", "keys") else ()
    printed = _capture_gradient(
        load,
        "bfloat16" if paired else "float32",
        options.get("lengths", (64, 64)),
        drops="dropout" in options,
        paired=paired,
        starts=options.get("starts", paired),
    )
    narrow = "lengths" in options and options["lengths"] == _NARROW
    assert printed.loads[0].narrow == narrow
    staging = options.get("staging", "kTiles" if load == "bias" else "kSums")
    tile = f"{S90}CaptureGradientTile<{keys}>, {S90}GradientStaging::{staging}"
    compiled = _compiled_gradient(
        printed,
        "sm90",
        f"{S90}CaptureGradientTraits<jaxflash::Math::{math}, {head_dim}, {tile}>",
        options.get("mask", "BandMask"),
        "sm_90a",
    )
    assert not compiled.serialised
    # More than 64 bytes, and another tile is tried.
    assert compiled.spilled <= 64, compiled


def test_which_load_products_start_from():
    """Another load of the same capture has terms of other starts in one tile."""
    function, _ = _LOADS["bias"]
    table = jax.ShapeDtypeStruct((4, 64, 64), "bfloat16")

    def both_ways(s, b, h, q, kv, distance, x):
        return function(s, b, h, q, kv, distance, x) + x[0, kv, q]

    for of, expected in ((function, ["true"]), (both_ways, ["false", "true"])):
        with jax.numpy_dtype_promotion("standard"):
            program, _ = trace(of, (table,), "float32")
        options = dict(lengths=(64, 64), paired=(0,), starts=(0,))
        request = Request(program, wanted=(0,), distance_is_difference=True, **options)
        printed = cuda.print_gradients(request)
        assert "kStarts = true" in printed.source
        assert sorted(re.findall(r"kOfStart = (\w+);", printed.source)) == expected
