"""Kernels compiled at run time: which tile a call gets and what the compiler spills in it. Those of
masks, biases and gradients have files of their own."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxflash
import programs
from compiled_kernels import (
    A100,
    H200,
    MORE_SPILLS,
    RANGES,
    RTX_4090,
    RTX_5090,
    S80,
    S90,
    SIZES,
    UNITS,
    call_sizes,
    check_shared_keys,
    compile_kernel,
    compile_program,
)
from covering import covering
from jaxflash import _api, _extension, _kernel_program
from score_mods import SCORE_MODS, Sizes

pytestmark = pytest.mark.usefixtures("kernel_cache")


# ---- Branches ------------------------------------------------------------------------------------


def _of_cases(name: str, pass_name: str, head_dim: int) -> str:
    row = SCORE_MODS[name]
    arrays = row.arrays(Sizes(2, 4, 64, 64), np.random.default_rng(0))
    qkv = 3 * (jnp.zeros((2, 64, 4, head_dim), jnp.bfloat16),)
    call = _api.described(*qkv, score_mod=row.bind(jax.tree.map(jnp.asarray, arrays)))
    if pass_name == "tangent":
        return _kernel_program.tangents(*call, ()).source
    program = _kernel_program.make(*call, pass_name)
    assert program is not None
    return program.source


@covering(
    "name, pass_name, head_dim", ["cond", "switch", "cases"], ["forward", "backward"],
    [64, 128, 256],
)  # fmt: skip
def test_choices_of_several_on_hopper(name, pass_name, head_dim):
    source = _of_cases(name, pass_name, head_dim)
    compiled = compile_program(source, pass_name=pass_name, head_dim=head_dim, **H200)
    assert not compiled.serialised, compiled
    assert compiled.spilled <= 64 + MORE_SPILLS, compiled


@covering(
    "name, pass_name, head_dim", ["cond", "switch", "cases"], ["forward", "backward", "tangent"],
    [64, 128],
)  # fmt: skip
def test_choices_of_several_elsewhere(name, pass_name, head_dim):
    source = _of_cases(name, pass_name, head_dim)
    compiled = compile_program(source, pass_name=pass_name, head_dim=head_dim, **A100)
    # At 128 every register of the forward pass is in use, and functions without branches that load
    # something for each element spill up to 452 bytes.
    bound = 352 if (pass_name, head_dim) == ("forward", 128) else 64
    assert compiled.spilled <= bound + MORE_SPILLS, compiled


# ---- Forward and backward ------------------------------------------------------------------------

_INCLUDE = pathlib.Path(_extension.__file__).parent / "include"


@pytest.mark.parametrize(
    "header", sorted(str(p.relative_to(_INCLUDE)) for p in _INCLUDE.rglob("*_kernel.cuh"))
)
def test_kernel_headers_need_no_others(header):
    """NVRTC has neither host nor standard headers."""
    compile_kernel(f'#include "{header}"\n__global__ void nothing() {{}}\n', "nothing")


def _forward90(tile: str) -> tuple[str, str, str]:
    traits = f"{S90}ForwardTraits<{S90}{tile}, jaxflash::Math::kBFloat16, jaxflash::BandMask>"
    name = f"{S90}forward_kernel<{traits}, {S90}ScaledScores>"
    return "sm90/forward_kernel.cuh", name, "sm_90a"


def _backward90(head_dim: int, value_dim: int) -> tuple[str, str, str]:
    tile = f"{S90}BackwardTileFor<{head_dim}, {value_dim}>::Type"
    traits = f"{S90}BackwardTraits<{tile}, jaxflash::Math::kBFloat16>"
    name = f"{S90}backward_kernel<{traits}, jaxflash::BandMask, {S90}ScaledLogits>"
    return "sm90/backward_kernel.cuh", name, "sm_90a"


def _forward80(head_dim: int) -> tuple[str, str, str]:
    tile = f"{S80}ForwardTiles<2, {head_dim}>::Large"
    name = f"{S80}forward_kernel<jaxflash::Math::kBFloat16, {head_dim}, {tile}>"
    return "sm80/forward_kernel.cuh", name, "sm_80"


def _backward80(head_dim: int) -> tuple[str, str, str]:
    tile = f"{S80}BackwardTiles<2, {head_dim}>::Large"
    traits = f"{S80}BackwardTraits<jaxflash::Math::kBFloat16, {head_dim}, {tile}>"
    name = f"{S80}backward_kernel<{traits}, jaxflash::BandMask, {S80}ScaledScores>"
    return "sm80/backward_kernel.cuh", name, "sm_80"


@pytest.mark.parametrize(
    ("header", "kernel", "architecture"),
    [
        _forward90("ForwardTileFor<64, 64>::Four"),
        _forward90("ForwardTileFor<96, 96>::Long"),
        _forward90("ForwardTileFor<128, 128>::Long"),
        _forward90("ForwardTileFor<192, 128>::Long"),
        _forward90("ForwardTileFor<192, 192>::Long"),
        _forward90("ForwardTileFor<256, 256>::Long"),
        *(_backward90(*sizes) for sizes in SIZES.values()),
        *(_forward80(head_dim) for head_dim in (64, 128, 256)),
        *(_backward80(head_dim) for head_dim in (64, 128, 256)),
    ],
)
def test_plain_tiles(header, kernel, architecture):
    """The tiles that are compiled ahead of time, by the compiler that score functions get."""
    source = f'#include "{header}"\n#include "{header.split("/")[0]}/tile_config.h"\n'
    compiled = compile_kernel(source, kernel, architecture)
    assert compiled.spilled <= MORE_SPILLS, compiled
    assert not compiled.serialised, compiled


@pytest.mark.parametrize("program", ["SCALE", "SINK", "ALIBI", "SOFT_CAP", "DROPOUT"])
@pytest.mark.parametrize("pass_name", ["forward", "backward"])
@pytest.mark.parametrize(("head_dim", "value_dim"), SIZES.values(), ids=SIZES)
def test_programs_on_hopper(program, pass_name, head_dim, value_dim):
    compiled = compile_program(
        getattr(programs, program), pass_name=pass_name, head_dim=head_dim, value_dim=value_dim,
        **H200,
    )  # fmt: skip
    # Tiles can be shared by head sizes: the name is that of the first.
    assert compiled.name.startswith(f"sm90 {pass_name} bfloat16 ")
    assert f"<{head_dim}, {value_dim}," in compiled.tile
    assert compiled.architecture == "sm_90a"
    assert compiled.spilled <= 64, compiled
    assert not compiled.serialised, compiled


@pytest.mark.parametrize(
    ("gpu", "dtype", "highest_precision", "head_dim", "name", "architecture"),
    [
        (H200, "float32", False, 64, "tf32 64", "sm_90"),
        (H200, "float32", True, 128, "float32 128", "sm_90"),
        (H200, "bfloat16", False, 20, "bfloat16 64", "sm_90"),  # rows that are not 16 bytes
        (A100, "bfloat16", False, 128, "bfloat16 128", "sm_80"),
        (RTX_4090, "bfloat16", False, 64, "bfloat16 64", "sm_89"),
        (RTX_5090, "float16", False, 64, "float16 64", "sm_120"),
    ],
)
@pytest.mark.parametrize("pass_name", ["forward", "backward"])
def test_programs_elsewhere(pass_name, gpu, dtype, highest_precision, head_dim, name, architecture):
    """The portable kernels: on other GPUs, and for what the Hopper kernels leave to them."""
    compiled = compile_program(
        programs.ALIBI, pass_name=pass_name, head_dim=head_dim, dtype=dtype,
        highest_precision=highest_precision, **gpu,
    )  # fmt: skip
    assert compiled.name == f"sm80 {pass_name} {name}"
    assert compiled.architecture == architecture
    # 12 to 24 bytes, where all 255 registers are in use.
    assert dtype == "float32" or compiled.spilled <= 24, compiled


def test_tile_follows_the_slope():
    """At head size 64 slopes need the registers that tiles of 128 rows take."""
    plain = compile_program(programs.ALIBI, pass_name="backward", head_dim=64, **H200)
    slopes = compile_program(programs.SOFT_CAP, pass_name="backward", head_dim=64, **H200)
    assert "BackwardTile<64, 64, 128, 128" in plain.tile
    assert "BackwardTile<64, 64, 64, 128" in slopes.tile
    assert slopes.spilled == 0, slopes


@pytest.mark.parametrize("one_sided", [False, True])
def test_warpgroups_take_turns_where_rows_see_many_keys(one_sided):
    """Of few keys, some see more than others, and would be waited for."""

    def takes_turns(length, mask, sequences=0):
        compiled = compile_program(
            programs.SOFT_CAP, pass_name="forward", head_dim=128, mask=mask, one_sided=one_sided,
            sizes=call_sizes(q_len=length, kv_len=length, sequences=sequences), **H200,
        )  # fmt: skip
        tile = r"ForwardTile<128, 128, 3, 64, 4, 2, .*, (true|false)>"
        (turns,) = re.findall(tile, compiled.tile)
        return turns == "true"

    packed = RANGES["ranges"]
    assert [takes_turns(16384, packed, n) for n in (1, 4, 8, 100)] == [True, True, False, False]
    # Of segments nobody knows how many there are.
    assert not takes_turns(16384, RANGES["segments"])
    assert [takes_turns(length, 0) for length in (960, 4096)] == [not one_sided, True]


def test_spills_lead_to_the_next_tile():
    source = programs.registers(24)
    before = len(jaxflash._config.config().compiled)
    chosen = compile_program(source, pass_name="forward", head_dim=64, **H200)
    first, *others = jaxflash._config.config().compiled[before:]
    assert first.spilled > 64, first
    assert others
    assert chosen in others
    assert chosen.tile != first.tile
    assert chosen.spilled < first.spilled


# ---- Pages and shared keys -----------------------------------------------------------------------

_SIZES_OF_PAGES = [(64, 64), (128, 128), (192, 128), (256, 256)]


@covering("sizes, shared_units, program", _SIZES_OF_PAGES, UNITS, ["SCALE", "SINK", "SOFT_CAP"])
def test_pages_on_hopper(sizes, shared_units, program):
    check_shared_keys(getattr(programs, program), *sizes, shared_units, paged=True)


@covering("sizes, shared_units, program", SIZES, UNITS, ["SINK", "ALIBI", "SOFT_CAP", "DROPOUT"])
def test_shared_keys_on_hopper(sizes, shared_units, program):
    """Rows are of several heads: each has its own slope and bits."""
    check_shared_keys(getattr(programs, program), *sizes, shared_units)


def test_shared_keys_in_shorter_boxes():
    """Of programs that take too many registers beside 128 keys."""
    tiles = [
        compile_program(
            programs.registers(count), pass_name="forward", head_dim=128, shared_units=1, **H200
        )
        for count in (8, 50)
    ]
    assert tiles[0].spilled == 0, tiles
    assert tiles[1].spilled <= 3 * MORE_SPILLS, tiles
    assert "<128, 128, 1, 128, 3," in tiles[0].tile
    assert "<128, 128, 1, 64, 6," in tiles[1].tile


@pytest.mark.parametrize(
    ("gpu", "dtype", "highest_precision", "head_dim"),
    [
        (H200, "float32", False, 64),
        (H200, "float32", True, 128),
        (H200, "bfloat16", False, 20),
        (A100, "bfloat16", False, 128),
        (RTX_4090, "float16", False, 256),
    ],
)
def test_pages_elsewhere(gpu, dtype, highest_precision, head_dim):
    compiled = compile_program(
        programs.SINK, pass_name="forward", head_dim=head_dim, dtype=dtype,
        highest_precision=highest_precision, paged=True, shared_units=1, **gpu,
    )  # fmt: skip
    assert compiled.name.startswith("sm80 forward")
    assert compiled.spilled <= 64, compiled


# ---- Tangents ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "head_dim", "highest_precision"),
    [(A100, 256, False), (RTX_4090, 256, True), (A100, 128, True), (RTX_4090, 128, False)],
)
def test_tangents_of_float32_elsewhere(gpu, head_dim, highest_precision):
    compiled = compile_program(
        programs.SCALE, pass_name="tangent", head_dim=head_dim, dtype="float32",
        highest_precision=highest_precision, **gpu,
    )  # fmt: skip
    math = "float32" if highest_precision else "tf32"
    assert compiled.name == f"sm80 tangent {math} {head_dim}"


@pytest.mark.parametrize(
    ("program", "head_dim", "mask", "gpu"),
    [
        ("SCALE", 64, 0, H200),
        ("SOFT_CAP", 64, 1, H200),
        ("SCALE", 128, 0, H200),
        ("SOFT_CAP", 128, 2, H200),
        ("DROPOUT", 128, 0, H200),
        *(("MOVES", head_dim, 0, H200) for head_dim in (64, 128, 256)),
        ("SCALE", 256, 0, H200),
        ("SOFT_CAP", 256, 0, H200),
        ("SINK", 256, 1, H200),
        ("SCALE", 128, 0, A100),
        ("SOFT_CAP", 256, 1, RTX_4090),
    ],
)
def test_tangents(program, head_dim, mask, gpu):
    source = getattr(programs, program)
    compiled = compile_program(source, pass_name="tangent", head_dim=head_dim, mask=mask, **gpu)
    family = "sm90" if gpu is H200 else "sm80"
    assert compiled.name == f"{family} tangent bfloat16 {head_dim}"
    assert not compiled.serialised, compiled
    # At 256 the output and a tile of scores fill the registers.
    assert compiled.spilled <= (64 if head_dim < 256 else 96), compiled
