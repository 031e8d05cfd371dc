"""Kernels compiled at run time for biases: products that start from them, tiles that load or hold
them, what is added for keys."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxflash
import programs
from cases import CASES
from compiled_kernels import (
    H200,
    MORE_SPILLS,
    SIZES,
    UNITS,
    call_sizes,
    check_shared_keys,
    compile_program,
)
from covering import covering
from jaxflash import _api, _extension, _kernel_program

pytestmark = pytest.mark.usefixtures("kernel_cache")


def _dense_bias_program(
    head_dim: int, dtype: str, pass_name="forward", bias=(1, 2, 64, 64), **options
) -> _kernel_program.KernelProgram:
    query = jnp.zeros((1, 64, 2, head_dim), jnp.bfloat16)
    key = jnp.zeros((1, bias[-1], 2, head_dim), jnp.bfloat16)
    call = _api.described(query, key, key, bias=jnp.zeros(bias, dtype), **options)
    program = _kernel_program.make(*call, pass_name)
    assert program is not None
    return program


def _dense_bias(head_dim: int, dtype: str, pass_name="forward", **options) -> str:
    return _dense_bias_program(head_dim, dtype, pass_name, **options).source


# ---- In the forward kernel -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_dense_bias_on_hopper(head_dim, dtype):
    """Products start from it, in the registers of the scores."""
    source = _dense_bias(head_dim, dtype)
    assert "kStarts = true" in source
    compiled = compile_program(source, pass_name="forward", head_dim=head_dim, **H200)
    assert not compiled.serialised, compiled
    assert compiled.spilled <= 4, compiled  # of the planning warp, which has 32 registers


@pytest.mark.parametrize("options", ["alone", "dropout"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_dense_bias_beside_the_keys_on_hopper(sizes, options):
    """Rows that follow one another as queries do come by TMA."""
    dropout = dict(dropout_rate=0.1, dropout_rng=jax.random.key(0))
    options = dict(alone={}, dropout=dropout)[options]
    program = _dense_bias_program(sizes[0], "bfloat16", **options)
    assert program.start_capture == 0
    compiled = compile_program(
        program.source, pass_name="forward", head_dim=sizes[0], value_dim=sizes[1],
        start_capture=0, **H200,
    )  # fmt: skip
    assert compiled.tile.endswith("false, true>"), compiled  # ForwardTile::kLoadsStarts
    assert not compiled.serialised, compiled
    assert compiled.spilled == 0, compiled


@pytest.mark.parametrize("mask", [1, 2], ids=["ranges", "segments"])
def test_dense_bias_beside_segments_on_hopper(mask):
    program = _dense_bias_program(128, "bfloat16")
    compiled = compile_program(
        program.source, pass_name="forward", head_dim=128, mask=mask,
        start_capture=program.start_capture, **H200,
    )  # fmt: skip
    assert compiled.tile.endswith("false, true>"), compiled  # ForwardTile::kLoadsStarts
    assert compiled.spilled <= 64, compiled


@pytest.mark.parametrize(
    ("bias", "dtype", "loaded"),
    [
        ((1, 1, 64, 64), "float16", True),
        ((64, 72), "bfloat16", True),
        ((1, 2, 64, 68), "bfloat16", False),  # rows of no multiple of 16 bytes
        ((1, 2, 64, 64), "float32", False),
        ((1, 2, 1, 64), "bfloat16", False),
        ((1, 1, 1, 64), "bfloat16", False),
    ],
)
def test_which_biases_come_beside_the_keys(bias, dtype, loaded):
    program = _dense_bias_program(64, dtype, bias=bias)
    assert "kStarts = true" in program.source
    assert program.start_capture == (0 if loaded else None)


@pytest.mark.parametrize("row", ["q + 1", "63 - q", "q // 2"])
def test_rows_in_another_order_do_not_come_beside_the_keys(row):
    bias = jnp.zeros((64, 64), jnp.bfloat16)
    rows = {"q + 1": lambda q: q + 1, "63 - q": lambda q: 63 - q, "q // 2": lambda q: q // 2}
    qkv = 3 * (jnp.zeros((1, 64, 2, 64), jnp.bfloat16),)
    call = _api.described(
        *qkv, score_mod=lambda s, b, h, q, kv: s + bias[rows[row](q), kv].astype(s.dtype)
    )
    program = _kernel_program.make(*call, "forward")
    assert program is not None
    assert "kStarts = true" in program.source
    assert program.start_capture is None


@covering("head_dim, dtype, shared_units", [64, 128, 256], ["bfloat16", "float32"], UNITS)
def test_dense_bias_and_shared_keys_on_hopper(head_dim, dtype, shared_units):
    """Products do not start from it where rows are of several heads."""
    check_shared_keys(_dense_bias(head_dim, dtype), head_dim, head_dim, shared_units)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_dense_bias_and_dropout_in_the_forward_on_hopper(head_dim):
    """Bits are dense, where the registers of the scores are in use while they are drawn."""
    options = dict(dropout_rate=0.1, dropout_rng=jax.random.key(0))
    source = _dense_bias(head_dim, "bfloat16", "forward", **options)
    assert "kStarts = true" in source
    compiled = compile_program(source, pass_name="forward", head_dim=head_dim, **H200)
    assert not compiled.serialised, compiled
    assert compiled.spilled <= 24 + MORE_SPILLS, compiled


@pytest.mark.parametrize("scale", [0.0, -0.125, 1e-30])
def test_bias_is_not_divided_by_any_scale(scale):
    assert "kStarts = false" in _dense_bias(64, "bfloat16", scale=scale)


# ---- Tiles that lengths fill ---------------------------------------------------------------------


@pytest.mark.parametrize("program", ["bias", "SOFT_CAP", "DROPOUT"])
@pytest.mark.parametrize(
    ("head_dim", "q_len", "warpgroups"),
    [(64, 256, 4), (64, 384, 3), (64, 512, 4), (64, 576, 3), (64, 1024, 4), (96, 256, 2),
     (96, 384, 3), (128, 128, 2), (128, 192, 3), (128, 256, 2), (128, 384, 3), (128, 4096, 3)],
)  # fmt: skip
def test_tile_that_the_queries_fill(head_dim, q_len, warpgroups, program):
    """Where a tile of fewer rows has fewer empty ones, it is taken."""
    start = -1
    source = getattr(programs, program, "")
    if program == "bias":
        bias = _dense_bias_program(head_dim, "bfloat16")
        source, start = bias.source, bias.start_capture
    compiled = compile_program(
        source,
        pass_name="forward",
        head_dim=head_dim,
        sizes=call_sizes(q_len=q_len),
        start_capture=start,
        **H200,
    )
    assert f"ForwardTile<{head_dim}, {head_dim}, {warpgroups}, " in compiled.tile, compiled
    assert compiled.tile.endswith("false, true>") == (program == "bias"), compiled
    assert compiled.spilled == 0, compiled


@pytest.mark.parametrize(("kv_heads", "warpgroups"), [(6, 2), (2, 3)])
def test_queries_of_a_group_fill_tiles_together(kv_heads, warpgroups):
    """100 of 6 heads: two units for each key head, or six."""
    sizes = call_sizes(q_len=100, q_heads=6, kv_heads=kv_heads)
    compiled = compile_program(
        programs.SOFT_CAP, pass_name="forward", head_dim=128, sizes=sizes, **H200
    )
    assert f"ForwardTile<128, 128, {warpgroups}, " in compiled.tile, compiled


@pytest.mark.parametrize(
    ("q_len", "kv_len", "keys"),
    [
        (384, 384, 128),
        (384, 321, 128),
        (384, 320, 64),
        (384, 392, 64),
        (384, 0, 64),
        (256, 384, 64),
    ],
)
def test_tile_that_the_keys_fill(q_len, kv_len, keys):
    bias = _dense_bias_program(64, "bfloat16")
    compiled = compile_program(
        bias.source, pass_name="forward", head_dim=64, start_capture=bias.start_capture,
        sizes=call_sizes(q_len=q_len, kv_len=kv_len), **H200,
    )  # fmt: skip
    assert f"ForwardTile<64, 64, {3 if q_len == 384 else 4}, {keys}, " in compiled.tile, compiled
    assert not compiled.serialised, compiled
    assert compiled.spilled == 0, compiled


# ---- Tiles that hold a bias ----------------------------------------------------------------------

# Of pair attention.
_PAIRS = dict(batch=384, q_len=384, kv_len=384, q_heads=4, kv_heads=4, starts_shared=True)


def _is_held(tile: str) -> bool:
    return "ForwardTile<32, 32, 4, 64, " in tile and tile.endswith(
        ("true, 6, false, 2>", "true, 6, false, 4>")  # ForwardTile::kBatches
    )


@pytest.mark.parametrize("options", ["alone", "dropout", "mask", "mask and dropout", "soft cap"])
@pytest.mark.parametrize(
    ("head_dim", "q_len", "kv_len", "batches"), [(24, 384, 384, 2), (32, 320, 328, 4)]
)
def test_bias_that_blocks_hold(head_dim, q_len, kv_len, batches, options):
    """In shared memory, for some batch elements after the others."""
    dropout = dict(dropout_rate=0.1, dropout_rng=jax.random.key(0))
    mask = dict(mask=np.ones((1, 1, 1, 64), bool))
    options = {
        "alone": {}, "dropout": dropout, "mask": mask, "mask and dropout": mask | dropout,
        "soft cap": dict(logits_soft_cap=20.0, sink=jnp.zeros(2, jnp.float32)),
    }[options]  # fmt: skip
    program = _dense_bias_program(head_dim, "bfloat16", **options)
    compiled = compile_program(
        program.source, pass_name="forward", head_dim=head_dim,
        sizes=call_sizes(**_PAIRS | dict(q_len=q_len, kv_len=kv_len)),
        start_capture=-1 if program.start_capture is None else program.start_capture,
        mask=3 if "mask" in options else 0, **H200,
    )  # fmt: skip
    if program.start_capture is not None:
        assert _is_held(compiled.tile), compiled
        assert compiled.tile.endswith(f"{batches}>"), compiled
    assert not compiled.serialised, compiled
    assert compiled.spilled <= (64 if "mask" in options else 16), compiled  # of producers


@pytest.mark.parametrize(
    ("sizes", "one_sided", "held"),
    [
        (dict(kv_len=200), False, True),
        (dict(q_len=256), False, True),
        (dict(q_len=128, batch=199), False, True),
        (dict(q_len=192), False, True),  # tiles of four batch elements
        (dict(q_heads=22, kv_heads=11, batch=8), False, True),  # 66 tiles, two rounds
        (dict(), True, False),
        (dict(kv_len=392), False, False),
        (dict(kv_len=192), False, False),
        (dict(kv_len=0), False, False),
        (dict(batch=22), False, False),  # one round
        (dict(batch=0), False, False),
        (dict(q_heads=45, kv_heads=45), False, False),  # 135 tiles
        (dict(q_heads=23, kv_heads=23), False, False),  # 69, which leave 63 multiprocessors idle
        (dict(starts_shared=False), False, False),
    ],
)
def test_when_blocks_hold_a_bias(sizes, one_sided, held):
    bias = _dense_bias_program(32, "bfloat16")
    compiled = compile_program(
        bias.source, pass_name="forward", head_dim=32, start_capture=bias.start_capture,
        one_sided=one_sided, sizes=call_sizes(**_PAIRS | sizes), **H200,
    )  # fmt: skip
    assert _is_held(compiled.tile) == held, compiled


@pytest.mark.parametrize(
    "case", [x for x in CASES if x.name.startswith("capture-bias-held")], ids=lambda x: x.name
)
def test_rows_of_a_held_bias_are_such(case):
    arguments = case.arguments(jax.tree.map(jnp.asarray, case.arrays()))
    static = {n: arguments.pop(n) for n in (*case.options, "score_mod") if n in arguments}
    text = (
        jax.jit(functools.partial(jaxflash.dot_product_attention, implementation="cuda", **static))
        .trace(**arguments)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    (sizes,) = re.findall(r"sizes = dense<\[([0-9, ]+)\]>", text)
    bias = _dense_bias_program(case.head_dim, case.dtype)
    compiled = compile_program(
        bias.source, pass_name="forward", head_dim=case.head_dim, value_dim=case.value_dim,
        dtype=case.dtype, start_capture=bias.start_capture, one_sided=case.is_causal,
        sizes=[int(n) for n in sizes.split(",")], **H200,
    )  # fmt: skip
    assert _is_held(compiled.tile) == ("-not" not in case.name), compiled


# ---- Columns of keys -----------------------------------------------------------------------------

_KEY_TERMS, _DISTANCE_TERMS = (
    _extension.constants[name] for name in ("key_terms", "distance_terms")
)


@pytest.mark.parametrize("options", ["alone", "causal", "sink", "dropout", "mask"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_columns_of_keys_on_hopper(sizes, options):
    """What is added for the key alone: in the tiles of plain calls, or nearly."""
    of_program = {
        "sink": dict(sink=jnp.zeros(2, jnp.float32)),
        "dropout": dict(dropout_rate=0.1, dropout_rng=jax.random.key(0)),
        "mask": dict(mask=np.ones((1, 1, 64, 64), bool)),
    }.get(options, {})
    program = _dense_bias_program(sizes[0], "float32", bias=(1, 2, 1, 64), **of_program)
    assert program.key_terms == "key"
    call = dict(pass_name="forward", head_dim=sizes[0], value_dim=sizes[1], **H200)
    call |= dict(one_sided=options == "causal", mask=3 if options == "mask" else 0)
    compiled = compile_program(program.source, start_capture=_KEY_TERMS, **call)
    assert compiled.tile.endswith("0, true>"), compiled  # ForwardTile::kKeyTerms
    assert not compiled.serialised, compiled
    assert compiled.spilled <= (64 if options == "mask" else 0), compiled  # of the planning warp
    if options == "alone":
        for other in (dict(start_capture=-1), dict(start_capture=_KEY_TERMS, dtype="float16")):
            assert not compile_program(program.source, **call | other).tile.endswith("0, true>")


_TABLE = jnp.zeros(64, jnp.float32)
_ADDED = {
    "bias of each head": (dict(bias=np.zeros((2, 4, 1, 64), np.float32)), True, False),
    "bias of all heads": (dict(bias=np.zeros((1, 1, 1, 64), np.float16)), True, True),
    "b": (lambda s, b, h, q, kv: s + b * _TABLE[kv], True, True),
    "h": (lambda s, b, h, q, kv: s + (h + 1) * _TABLE[kv], True, False),
    "a part": (lambda s, b, h, q, kv: s + jnp.where(kv < 9, _TABLE[kv], 0.0), True, True),
    "q": (lambda s, b, h, q, kv: s + q * _TABLE[kv], False, False),
    "no array": (lambda s, b, h, q, kv: s + kv.astype(s.dtype), False, False),
    "keys in another order": (lambda s, b, h, q, kv: s + _TABLE[63 - kv], False, False),
    "a factor": (lambda s, b, h, q, kv: s * _TABLE[kv], False, False),
    "slopes": (dict(alibi_slopes=np.ones(4, np.float32)), False, False),
    "matrix": (dict(bias=np.zeros((1, 1, 64, 64), np.float32)), False, False),
    "bias and slopes": (
        dict(bias=np.zeros((1, 1, 1, 64), np.float32), alibi_slopes=np.ones(4, np.float32)),
        False,
        False,
    ),
    "a distance": (
        dict(score_mod=lambda s, b, h, q, kv: s + _TABLE[kv] - 0.1 * (q - kv).astype(s.dtype)),
        False,
        False,
    ),
    "a factor of the distance": (
        dict(score_mod=lambda s, b, h, q, kv: s + _TABLE[kv] * (q - kv).astype(s.dtype)),
        False,
        False,
    ),
    "a step": (
        dict(score_mod=lambda s, b, h, q, kv: s + _TABLE[kv] + jnp.where(q - kv > 3, 1.0, 0.0)),
        False,
        False,
    ),
}


@pytest.mark.parametrize(("added", "alone", "grouped"), _ADDED.values(), ids=_ADDED)
def test_which_programs_add_columns_of_keys(added, alone, grouped):
    """Where heads share those of a key, only what heads do not ask for."""
    if callable(score_mod := added):
        added = dict(
            score_mod=lambda s, *i: score_mod(s, *(x.astype(s.dtype) for x in i[:3]), i[3])
        )
    query = jnp.zeros((2, 64, 4, 64), jnp.bfloat16)
    for kv_heads, expected in ((4, alone), (2, grouped)):
        key = jnp.zeros((2, 64, kv_heads, 64), jnp.bfloat16)
        call = _api.described(query, key, key, **added)
        program = _kernel_program.make(*call, "forward")
        assert program is not None
        assert program.key_terms == ("key" if expected else None)
        backward = _kernel_program.make(*call, "backward")
        assert backward is not None
        assert not backward.key_terms


_SLOPES = dict(alibi_slopes=jnp.ones(4, jnp.float32))
_FOLLOWING = {
    "causal": (dict(is_causal=True, **_SLOPES), True, False),
    "causal, of heads together": (
        dict(is_causal=True, score_mod=lambda s, b, h, q, kv: s - 0.1 * (q - kv).astype(s.dtype)),
        True,
        True,
    ),
    "keys behind": (dict(local_window_size=(0, 9), **_SLOPES), True, False),
    "short, both sides": (_SLOPES, False, False),
    "long, both sides": (dict(length=2048, **_SLOPES), True, False),
    "window of both sides": (dict(length=2048, local_window_size=(9, 9), **_SLOPES), False, False),
    "wide window": (dict(length=4096, local_window_size=(2000, 99), **_SLOPES), True, False),
    "small heads, both sides": (dict(length=2048, head_dim=64, **_SLOPES), False, False),
    "small heads, causal": (dict(head_dim=64, is_causal=True, **_SLOPES), True, False),
    "cap": (dict(is_causal=True, logits_soft_cap=9.0, **_SLOPES), False, False),
    "bias": (dict(is_causal=True, bias=jnp.zeros((1, 1, 64, 64)), **_SLOPES), False, False),
    "scale": (dict(is_causal=True, scale=1e-9, **_SLOPES), False, False),
}


@pytest.mark.parametrize(("options", "alone", "grouped"), _FOLLOWING.values(), ids=_FOLLOWING)
def test_which_programs_follow_the_distance(options, alone, grouped):
    options = dict(options)
    length, head_dim = options.pop("length", 64), options.pop("head_dim", 128)
    query = jnp.zeros((2, length, 4, head_dim), jnp.bfloat16)
    for kv_heads, expected in ((4, alone), (2, grouped)):
        key = jnp.zeros((2, length, kv_heads, head_dim), jnp.bfloat16)
        call = _api.described(query, key, key, **options)
        program = _kernel_program.make(*call, "forward")
        assert program is not None
        assert program.key_terms == ("distance" if expected else None)
        backward = _kernel_program.make(*call, "backward")
        assert backward is not None
        assert not backward.key_terms
        assert "kFollowsDistance = true" not in backward.source


@pytest.mark.parametrize("options", ["causal", "sink", "dropout", "mask", "both sides"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_parts_of_keys_in_the_distance_on_hopper(sizes, options):
    """The tiles are those of what is added for the key alone."""
    of_program = {
        "sink": dict(sink=jnp.zeros(4, jnp.float32)),
        "dropout": dict(dropout_rate=0.1, dropout_rng=jax.random.key(0)),
        "mask": dict(mask=np.ones((1, 1, 2048, 2048), bool)),
    }.get(options, {})
    is_causal = options != "both sides"
    query, value = (jnp.zeros((1, 2048, 4, size), jnp.bfloat16) for size in sizes)
    call = _api.described(query, query, value, is_causal=is_causal, **_SLOPES, **of_program)
    program = _kernel_program.make(*call, "forward")
    assert program is not None
    if options == "both sides" and sizes == (64, 64):
        assert program.key_terms is None
        return
    assert program.key_terms == "distance"
    compiled = compile_program(
        program.source, pass_name="forward", head_dim=sizes[0], value_dim=sizes[1],
        start_capture=_DISTANCE_TERMS, one_sided=is_causal, mask=3 if options == "mask" else 0,
        **H200,
    )  # fmt: skip
    assert compiled.tile.endswith("0, true>"), compiled  # ForwardTile::kKeyTerms
    assert not compiled.serialised, compiled
    # With a mask those of the planning warp; with dropout of a tile's end.
    assert compiled.spilled <= {"mask": 64, "dropout": 20}.get(options, 0), compiled


# ---- In the backward kernel ----------------------------------------------------------------------


@pytest.mark.parametrize("mask_shape", [(1, 1, 1, 64), (1, 1, 64, 64)], ids=["padding", "dense"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_dense_bias_beside_a_mask_on_hopper(head_dim, mask_shape):
    """The backward kernel loads starts as without the mask; what its loading warp spills does not
    matter."""
    mask = jnp.ones(mask_shape, jnp.bool_)
    program = _dense_bias_program(head_dim, "bfloat16", "backward", mask=mask)
    compiled = compile_program(
        program.source, pass_name="backward", head_dim=head_dim, mask=3,
        start_capture=program.start_capture, **H200,
    )  # fmt: skip
    assert f"BackwardTile<{head_dim}, {head_dim}, 64, 128" in compiled.tile, compiled
    assert compiled.tile.endswith("0, 2>"), compiled  # BackwardTile::kStartStages
    assert not compiled.serialised, compiled
    assert compiled.spilled <= (116 if MORE_SPILLS else 88), compiled


@pytest.mark.parametrize("options", ["alone", "dropout"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_dense_bias_beside_the_queries_on_hopper(head_dim, options):
    """The same in the backward pass."""
    dropout = dict(dropout_rate=0.1, dropout_rng=jax.random.key(0))
    options = dict(alone={}, dropout=dropout)[options]
    program = _dense_bias_program(head_dim, "bfloat16", "backward", **options)
    assert program.start_capture == 0
    compiled = compile_program(
        program.source, pass_name="backward", head_dim=head_dim, start_capture=0, **H200
    )
    assert "kBlock" in compiled.tile, compiled
    assert not compiled.serialised, compiled
    assert compiled.spilled <= 48 + MORE_SPILLS, compiled  # mostly of the warp that loads rows


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_dense_bias_in_the_backward_on_hopper(head_dim, dropout):
    options = dict(dropout_rate=0.1, dropout_rng=jax.random.key(0)) if dropout else {}
    source = _dense_bias(head_dim, "bfloat16", "backward", **options)
    assert "kStarts = true" in source
    assert "load_of_pair" not in source
    compiled = compile_program(source, pass_name="backward", head_dim=head_dim, **H200)
    assert not compiled.serialised, compiled
    assert compiled.spilled <= 64, compiled
