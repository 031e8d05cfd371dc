"""Kernels as programs compile them while they run, and the GPUs that they are compiled for.

Needs the compiler (NVRTC) but no GPU: a file of tests that imports this is skipped where there is
none. Such tests use the fixture kernel_cache. What runs on a GPU is in test_gpu_runtime.py.
"""

import itertools
import os
from collections.abc import Sequence

import pytest

from jaxflash import _config, _extension, _nvrtc

if not _extension.kernels:
    pytest.skip("the library was built without kernels", allow_module_level=True)
if _nvrtc.version() is None and os.environ.get("JAXFLASH_REQUIRE_NVRTC") != "1":
    pytest.skip(str(_nvrtc.reason_against()), allow_module_level=True)

H200 = dict(arch=90, shared_memory=227 * 1024)
A100 = dict(arch=80, shared_memory=163 * 1024)
RTX_4090 = dict(arch=89, shared_memory=99 * 1024)
RTX_5090 = dict(arch=120, shared_memory=99 * 1024)
# Bytes that the oldest compiler spills beyond the bounds below, which newer ones keep.
MORE_SPILLS = 12 if (_nvrtc.version() or (13, 0)) < (13, 0) else 0

# Namespaces of the kernels.
S90 = "jaxflash::sm90::"
S80 = "jaxflash::sm80::"

# Of rows, in blocks that share keys.
UNITS = {"one unit": 1, "two units": 2}
# Head sizes of queries and of values.
SIZES = {str(x): x for x in ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))}
# cuda/problem.h: MaskKind
RANGES = {"ranges": 1, "segments": 2}
BAND_OR_RANGES = {"band": 0, **RANGES}


def compile_kernel(
    source: str, kernel: str, architecture: str = "sm_90a"
) -> _config.CompiledKernel:
    return _config.CompiledKernel(*_extension.compile_kernel(source, kernel, architecture))


def compile_program(
    source: str,
    *,
    pass_name: str,
    head_dim: int,
    value_dim: int | None = None,
    dtype: str = "bfloat16",
    highest_precision: bool = False,
    arch: int,
    shared_memory: int,
    mask: int = 0,
    walks: bool = False,
    one_sided: bool = False,
    deterministic: bool = False,
    paged: bool = False,
    shared_units: int = 0,
    sizes: Sequence[int] = (),
    start_capture: int = -1,
) -> _config.CompiledKernel:
    return _config.CompiledKernel(
        *_extension.compile_program(
            pass_name=pass_name,
            source=source,
            unit_slope="kUnitSlope = true" in source,
            bounded="kBounded = true" in source,
            dtype=dtype,
            highest_precision=highest_precision,
            head_dim=head_dim,
            value_dim=value_dim or head_dim,
            scale=0.125,
            arch=arch,
            shared_memory=shared_memory,
            mask=mask,
            walks=walks,
            one_sided=one_sided,
            deterministic=deterministic,
            paged=paged,
            shared_units=shared_units,
            sizes=sizes,
            start_capture=start_capture,
        )
    )


def call_sizes(
    batch: int = 0,
    q_len: int = 0,
    kv_len: int = 0,
    q_heads: int = 3,
    kv_heads: int = 3,
    starts_shared: bool = False,
    sequences: int = 0,
) -> tuple[int, ...]:
    return batch, q_len, kv_len, q_heads, kv_heads, starts_shared, sequences


_unique = itertools.count()


def fresh_constant() -> float:
    """A constant that makes a kernel of its own."""
    return 1.0 + next(_unique) / 1024


def check_shared_keys(source, head_dim, value_dim, shared_units, spilled=0, **layout):
    """Compiles kernels whose blocks share keys: another one merges the parts."""
    source += f"// {fresh_constant()}\n"  # compiled here, so that the reports are of this program
    before = len(_config.config().compiled)
    compiled = compile_program(
        source, pass_name="forward", head_dim=head_dim, value_dim=value_dim,
        shared_units=shared_units, **layout, **H200,
    )  # fmt: skip
    assert f"<{head_dim}, {value_dim}, {shared_units}," in compiled.tile
    assert compiled.spilled <= spilled + MORE_SPILLS, compiled
    assert not compiled.serialised, compiled
    (merge,) = (x for x in _config.config().compiled[before:] if x.name == f"{compiled.name} merge")
    assert merge.tile == compiled.tile
    assert merge.spilled == 0, merge
