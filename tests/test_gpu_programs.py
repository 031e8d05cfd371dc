"""Score programs on a GPU, called as the custom calls that they are: operands, stages, results."""

import itertools
import os
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import programs
from another_process import run_python
from jaxflash import _config, _extension, _ffi, _nvrtc, reference

pytestmark = pytest.mark.gpu

_UNLIMITED = 1 << 30
_SCALE = 0.125
_CAP = 50.0


def _problem(causal: bool, highest: bool) -> dict:
    return dict(
        scale=np.float32(_SCALE), left=np.int64(_UNLIMITED), bottom_right=np.bool_(False),
        right=np.int64(0 if causal else _UNLIMITED), highest_precision=np.bool_(highest),
        has_q_lengths=np.bool_(False), has_kv_lengths=np.bool_(False), mask=np.int64(0),
        walks=np.bool_(False),
    )  # fmt: skip


def _program(source: str, query, value, captures, batch_rank: int) -> dict:
    return dict(
        program=source, unit_slope=np.bool_("kUnitSlope = true" in source),
        bounded=np.bool_(False),
        head_dim=np.int64(query.shape[-1]), value_dim=np.int64(value.shape[-1]),
        dtype=query.dtype.name,
        capture_ranks=np.array([x.ndim - batch_rank for x in captures], np.int64),
    )  # fmt: skip


def _numbers(query) -> tuple[jax.Array, jax.Array]:
    batch = query.shape[:-3]
    return (
        jnp.arange(np.prod(batch), dtype=jnp.int32).reshape(batch),
        jnp.arange(query.shape[-2], dtype=jnp.int32),
    )


def _forward(source, query, key, value, *captures, causal=False, highest=False):
    rows = query.shape[:-1]
    kv_len, kv_heads, value_dim = value.shape[-3:]
    workspace = _extension.forward_workspace_bytes(
        dtype=query.dtype.name, batch=int(np.prod(query.shape[:-3])), q_len=query.shape[-3],
        kv_len=kv_len, q_heads=query.shape[-2], kv_heads=kv_heads, head_dim=query.shape[-1],
        value_dim=value_dim, left=_UNLIMITED, right=0 if causal else _UNLIMITED, shared_units=0,
    )  # fmt: skip
    results = (
        jax.ShapeDtypeStruct((*rows, value_dim), query.dtype),
        jax.ShapeDtypeStruct(rows, jnp.float32),
        jax.ShapeDtypeStruct((workspace,), jnp.uint8),
    )
    out, lse, _ = jax.ffi.ffi_call(_ffi.FORWARD_TARGET, results)(
        query, key, value, *_numbers(query), *captures,
        problem=_problem(causal, highest),
        **_program(source, query, value, captures, query.ndim - 3), shared_units=np.int64(0),
        sizes=np.zeros(0, np.int64), start_capture=np.int64(-1),
    )  # fmt: skip
    return out, lse


def _backward(source, query, key, value, out, dout, lse, *captures, causal=False, highest=False):
    q_len, q_heads, head_dim = query.shape[-3:]
    kv_len, kv_heads, value_dim = value.shape[-3:]
    workspace = _extension.backward_workspace_bytes(
        batch=int(np.prod(query.shape[:-3])), q_len=q_len, kv_len=kv_len, q_heads=q_heads,
        kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim,
    )  # fmt: skip
    results = (
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key, value)),
        jax.ShapeDtypeStruct((workspace,), jnp.uint8),
    )
    return jax.ffi.ffi_call(_ffi.BACKWARD_TARGET, results)(
        query, key, value, out, dout, lse, *_numbers(query), *captures,
        problem=_problem(causal, highest),
        **_program(source, query, value, captures, query.ndim - 3),
        start_capture=np.int64(-1), has_dlse=np.bool_(False), deterministic=np.bool_(False),
        gradient_program="", gradient_loads=np.zeros(0, np.int64), key_sums=np.int64(0),
    )[:3]  # fmt: skip


def _case(name: str, head_dim: int, dtype, lengths=(200, 130)):
    """(source, captures, the same as arguments of `reference`, query, key, value, dout)"""
    keys = jax.random.split(jax.random.key(0), 5)
    q_len, kv_len = lengths
    query, dout = (jax.random.normal(k, (2, q_len, 4, head_dim), dtype) for k in keys[:2])
    key, value = (jax.random.normal(k, (2, kv_len, 2, head_dim), dtype) for k in keys[2:4])
    if name == "SOFT_CAP":
        captures, arguments = (), dict(logits_soft_cap=_CAP)
    elif name == "ALIBI":
        # Of its own for each batch element; the program reads it by the head alone.
        slopes = jax.random.uniform(keys[4], (2, 4), jnp.float32)
        captures, arguments = (slopes,), dict(alibi_slopes=slopes)
    else:
        # One for all batch elements; large enough to take most of a row's weight.
        sink = 4.0 + jax.random.normal(keys[4], (4,), jnp.bfloat16)
        captures, arguments = (sink[None],), dict(sink=sink.astype(jnp.float32))
    return getattr(programs, name), captures, arguments, query, key, value, dout


def _close(actual, expected, dtype, name):
    """Relative to the largest value, in units of what the arithmetic keeps."""
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    assert np.isfinite(actual).all(), name
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-20}[jnp.dtype(dtype).name]
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    assert error < 6 * unit, (name, error)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [("bfloat16", 64), ("bfloat16", 128), ("bfloat16", 256), ("bfloat16", 96), ("bfloat16", 20),
     ("float16", 128), ("float32", 64), ("float32", 128)],
)  # fmt: skip
@pytest.mark.parametrize("name", ["SOFT_CAP", "ALIBI", "SINK"])
def test_program(name, dtype, head_dim, causal):
    source, captures, arguments, query, key, value, dout = _case(name, head_dim, dtype)
    options = dict(causal=causal, highest=True)

    @jax.jit  # op by op there would be a program for each, and XLA for GPUs takes a while for it
    def expected(query, key, value, dout):
        (out, lse), transpose = jax.vjp(
            lambda *qkv: reference.dot_product_attention(
                *qkv, scale=_SCALE, is_causal=causal, precision="highest", return_residual=True,
                **arguments,
            ),
            *(x.astype(jnp.float32) for x in (query, key, value)),
        )  # fmt: skip
        return out, lse, transpose((dout.astype(jnp.float32), jnp.zeros_like(lse)))

    expected_out, expected_lse, gradients = expected(query, key, value, dout)

    out, lse = jax.jit(lambda *a: _forward(source, *a, **options))(query, key, value, *captures)
    _close(out, expected_out, dtype, "out")
    _close(lse, expected_lse, "float32" if dtype == "float32" else dtype, "lse")
    results = jax.jit(lambda *a: _backward(source, *a, **options))(
        query, key, value, out, dout, lse, *captures
    )
    for result, gradient, which in zip(results, gradients, ("dq", "dk", "dv"), strict=True):
        _close(result, gradient, dtype, which)


_serial = itertools.count()


def _own(source: str) -> str:
    """The same program, compiled anew."""
    return f"// {os.getpid()} {next(_serial)}\n{source}"


def test_other_shapes_compile_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXFLASH_CACHE_DIR", str(tmp_path))
    source, captures, _, *qkv, _ = _case("ALIBI", 128, "bfloat16")
    source = _own(source)
    before = len(_config.config().compiled)
    jax.jit(lambda *a: _forward(source, *a))(*qkv, *captures)
    compiled = _config.config().compiled[before:]
    assert [kernel.from_disk for kernel in compiled] == [False]
    _, captures, _, *qkv, _ = _case("ALIBI", 128, "bfloat16", lengths=(77, 515))
    jax.jit(lambda *a: _forward(source, *a))(*qkv, *captures)
    assert len(_config.config().compiled) == before + 1


def test_compiled_with_the_executable(monkeypatch, tmp_path):
    """Not by the first call."""
    monkeypatch.setenv("JAXFLASH_CACHE_DIR", str(tmp_path))
    source, captures, _, *qkv, _ = _case("SOFT_CAP", 64, "bfloat16")
    source = _own(source)
    before = len(_config.config().compiled)
    lowered = jax.jit(lambda *a: _forward(source, *a)).lower(*qkv, *captures)
    assert len(_config.config().compiled) == before
    call = lowered.compile()
    after = len(_config.config().compiled)
    assert after > before
    call(*qkv, *captures)
    assert len(_config.config().compiled) == after


def test_broken_program_fails_when_compiled():
    _, captures, _, *qkv, _ = _case("SOFT_CAP", 64, "bfloat16")
    lowered = jax.jit(lambda *a: _forward("no program", *a)).lower(*qkv, *captures)
    with pytest.raises(Exception, match="could not compile"):
        lowered.compile()


def test_operands_are_checked():
    source, captures, _, *qkv, _ = _case("ALIBI", 64, "bfloat16")
    for wrong in ((), (captures[0], captures[0][:, :1, None])):
        attributes = _program(source, qkv[0], qkv[2], captures, 1)
        attributes |= dict(
            shared_units=np.int64(0), sizes=np.zeros(0, np.int64), start_capture=np.int64(-1)
        )
        results = (
            jax.ShapeDtypeStruct(qkv[0].shape, qkv[0].dtype),
            jax.ShapeDtypeStruct(qkv[0].shape[:-1], jnp.float32),
            jax.ShapeDtypeStruct((0,), jnp.uint8),
        )
        call = jax.ffi.ffi_call(_ffi.FORWARD_TARGET, results)
        with pytest.raises(Exception, match="captured arrays"):
            jax.block_until_ready(
                call(*qkv, *_numbers(qkv[0]), *wrong, problem=_problem(False, False), **attributes)
            )


_REPLAY = """
import sys
sys.path.insert(0, {tests!r})
import jax, jax.numpy as jnp
import numpy as np
import jaxflash
import test_gpu_programs as tests

source, captures, _, query, key, value, dout = tests._case("ALIBI", 128, "bfloat16")

@jax.jit
def step(query, key, value, dout, captures):
    out, lse = tests._forward(source, query, key, value, *captures)
    return out, *tests._backward(source, query, key, value, out, dout, lse, *captures)[1:]

@jax.jit
def step_of_bias(query, key, value, dout, bias):
    def loss(bias):
        out = jaxflash.dot_product_attention(
            query, key, value, bias, implementation="cuda", deterministic_backward=True)
        return jnp.sum(out.astype(jnp.float32) * dout)

    return jax.grad(loss)(bias)  # whose parts wait for their turns, which are cleared before

bias = jnp.ones((query.shape[-3], key.shape[-3]))
for _ in range(3):
    results = step(query, key, value, dout, captures)
    results = *results, step_of_bias(query, key, value, dout, bias)
import hashlib
digest = hashlib.sha256()
for x in results:
    digest.update(np.asarray(x.astype(jnp.float32)).tobytes())
print(digest.hexdigest())
"""


def test_captured_from_the_first_call_on(tmp_path):
    """A command buffer that is recorded when nothing has run yet gives the same bits."""
    digests = set()
    for commands in ("", "FUSION,CUSTOM_CALL"):
        folder = tmp_path / (commands or "none")
        flags = (
            f"--xla_gpu_enable_command_buffer={commands} --xla_gpu_graph_min_graph_size=1 "
            f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
        )
        code = _REPLAY.format(tests=str(pathlib.Path(__file__).parent))
        digests.add(run_python(code, XLA_FLAGS=flags, XLA_PYTHON_CLIENT_PREALLOCATE="false"))
        if commands:
            texts = [p.read_text(errors="replace") for p in folder.rglob("*step*") if p.is_file()]
            assert any("kCommandBuffer" in t or "command_buffer" in t for t in texts)
    assert len(digests) == 1


def test_first_call_is_quick(monkeypatch, tmp_path):
    """At most 3 s a kernel, of the process's own time: others may be busy beside it."""
    monkeypatch.setenv("JAXFLASH_CACHE_DIR", str(tmp_path))
    assert _nvrtc.version() is not None
    for head_dim in (64, 128, 256):
        source, captures, _, query, key, value, dout = _case("SOFT_CAP", head_dim, "bfloat16")
        source = _own(source)
        before, begin = len(_config.config().compiled), time.process_time()
        out, lse = jax.jit(lambda *a, s=source: _forward(s, *a))(query, key, value, *captures)
        jax.jit(lambda *a, s=source: _backward(s, *a))(query, key, value, out, dout, lse, *captures)
        seconds, compiled = time.process_time() - begin, _config.config().compiled[before:]
        assert len(compiled) >= 2
        assert seconds < 3.0 * len(compiled), compiled
