"""The kernels inside XLA's runtime: capture, threads, devices, memory that is not clean, errors."""

import concurrent.futures
import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxflash
from cases import CASES
from check import assert_same_bits, jitted
from jaxflash import _ffi

pytestmark = pytest.mark.gpu


def _qkv(seed=0, length=200, dtype=jnp.bfloat16):
    rng = np.random.default_rng(seed)
    shape = (2, length, 4, 64)
    return [rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(3)]


def _step(query, key, value):
    """Forward and gradients, bitwise repeatable."""
    attend = functools.partial(
        jaxflash.dot_product_attention,
        implementation="cuda", is_causal=True, deterministic_backward=True,
    )  # fmt: skip
    out, pull = jax.vjp(attend, query, key, value)
    return out, *pull(jnp.sin(out))


# ---- Command buffers ----------------------------------------------------------------------------

_REPLAY = """
import hashlib, sys
sys.path.insert(0, {tests!r})
import jax
from test_gpu_runtime import _qkv, _step
step = jax.jit(_step)
digest = hashlib.sha256()
for repeat in range(3):
    for seed in range(3):
        for x in jax.device_get(step(*jax.device_put(_qkv(seed)))):
            digest.update(x.tobytes())
print(digest.hexdigest())
"""


def _replay(tmp_path, commands: str) -> tuple[str, str]:
    """(digest of the results, everything that XLA dumped) with these kinds of commands captured."""
    folder = tmp_path / (commands or "none")
    flags = (
        f"--xla_gpu_enable_command_buffer={commands} --xla_gpu_graph_min_graph_size=1 "
        f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
    )
    code = _REPLAY.format(tests=str(pathlib.Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    texts = [path.read_text(errors="replace") for path in folder.rglob("*step*") if path.is_file()]
    return done.stdout.strip(), "\n".join(texts)


def test_captured_and_replayed_gives_the_same_bits(tmp_path):
    captured, dump = _replay(tmp_path, "FUSION,CUSTOM_CALL")
    plain, plain_dump = _replay(tmp_path, "")
    assert captured == plain
    # XLA says so in its list of thunks; without the kernels' trait it would launch them one by one.
    assert "kCommandBuffer" in dump or "command_buffer" in dump
    assert "kCommandBuffer" not in plain_dump


# ---- Threads, streams, devices ------------------------------------------------------------------


def test_threads_give_the_same_bits():
    """Many threads dispatch at once, on every device."""
    step = jax.jit(_step)
    inputs = [
        jax.device_put(_qkv(seed, length), device)
        for seed in range(4)
        for length in (65, 200)
        for device in jax.devices("gpu")
    ]
    alone = [jax.device_get(step(*qkv)) for qkv in inputs]

    def work(i):
        return i % len(inputs), step(*inputs[i % len(inputs)])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for i, result in pool.map(work, range(200)):
            assert_same_bits(result, alone[i], f"input {i}")


def test_independent_calls_in_one_program():
    """XLA may run them on streams of its own."""
    inputs = [_qkv(seed, length) for seed, length in ((0, 65), (1, 200), (2, 129))]
    together = jax.jit(lambda inputs: [_step(*qkv) for qkv in inputs])(inputs)
    for qkv, result in zip(inputs, together, strict=True):
        assert_same_bits(result, jax.jit(_step)(*qkv))


def test_sharded_over_all_gpus():
    devices = jax.devices("gpu")
    mesh = jax.sharding.Mesh(np.array(devices), ("b",))
    qkv = [np.concatenate([x] * len(devices)) for x in _qkv()]
    sharding = NamedSharding(mesh, PartitionSpec("b"))
    step = jax.jit(_step)
    compiled = step.lower(*jax.device_put(qkv, sharding)).compile()
    assert "all-gather" not in compiled.as_text()
    assert_same_bits(step(*jax.device_put(qkv, sharding)), step(*qkv))


# ---- Memory that is not clean -------------------------------------------------------------------


def _poison_memory():
    """Fills freed memory with NaN, in pieces of many sizes, so that the next results lie in it."""
    pieces = [jnp.full(2**power, jnp.nan, jnp.float32) for power in range(6, 24) for _ in range(12)]
    for piece in jax.block_until_ready(pieces):
        piece.delete()


_POISONED = (
    "bfloat16", "float32-highest", "head-7-value-3", "head-80-value-112", "T-63-S-65", "window-T>S",
    "lengths-batch-axes", "lengths-q", "bottom-right-T>S", "empty-S", "gqa-causal-deterministic",
)  # fmt: skip


@pytest.mark.parametrize("case", [c for c in CASES if c.name in _POISONED], ids=lambda c: c.name)
def test_every_element_is_written(case):
    """Outputs, gradients and workspaces start as NaN."""
    run = jitted(case, "cuda")
    clean = jax.device_get(run(case.arrays(), *case.cotangents()))
    for _ in range(2):
        _poison_memory()
        result = jax.device_get(run(case.arrays(), *case.cotangents()))
        for name, x in result.items():
            x, y = x.astype(np.float32), clean[name].astype(np.float32)
            assert (np.isfinite(x) == np.isfinite(y)).all(), f"{name} was not written everywhere"
            if case.deterministic_backward or name in ("out", "lse"):
                assert_same_bits(x, y, name)


def test_neighbours_in_memory_are_not_written():
    """Results lie in the middle of one buffer that XLA assembles; the rest of it keeps its bits."""
    qkv = _qkv(length=63)

    @jax.jit
    def run(query, key, value, before, after):
        results = _step(query, key, value)
        return [jnp.concatenate([before, x.ravel(), after]) for x in results]

    before, after = (np.full(999, fill, jnp.bfloat16) for fill in (3.0, 5.0))
    for x, y in zip(run(*qkv, before, after), jax.jit(_step)(*qkv), strict=True):
        assert_same_bits(x[:999], before)
        assert_same_bits(x[-999:], after)
        assert_same_bits(x[999:-999], y.ravel())


def test_determinism_over_many_runs():
    step = jax.jit(_step)
    qkv = jax.device_put(_qkv(length=777))
    first = jax.device_get(step(*qkv))
    for _ in range(20):
        assert_same_bits(step(*qkv), first)


# ---- Host errors --------------------------------------------------------------------------------

_SPEC = dict(
    scale=np.float32(1), left=np.int64(1 << 30), right=np.int64(1 << 30),
    bottom_right=np.bool_(False), highest_precision=np.bool_(False),
    has_q_lengths=np.bool_(False), has_kv_lengths=np.bool_(False),
)  # fmt: skip


def _forward_call(query, key, value, out=None, lse=None, **attributes):
    """The custom call itself, past every check of the Python side."""
    out = query.shape if out is None else out
    lse = query.shape[:-1] if lse is None else lse
    results = (jax.ShapeDtypeStruct(out, query.dtype), jax.ShapeDtypeStruct(lse, jnp.float32))
    call = jax.ffi.ffi_call(_ffi.FORWARD_TARGET, results)
    return call(query, key, value, problem={**_SPEC, **attributes})


_GOOD = jax.ShapeDtypeStruct((2, 16, 4, 32), jnp.bfloat16)


def _like(*shape, dtype=jnp.bfloat16):
    return np.ones(shape or _GOOD.shape, dtype)


@pytest.mark.parametrize(
    ("arrays", "options", "word"),
    [
        ([_like(), _like(2, 16, 3, 32), _like(2, 16, 3, 32)], {}, "heads"),
        ([_like(), _like(2, 16, 4, 16), _like()], {}, "fit"),
        ([_like(), _like(2, 15, 4, 32), _like()], {}, "fit"),
        ([_like(), _like(3, 16, 4, 32), _like()], {}, "batch"),
        ([_like(), _like(dtype=jnp.float16), _like()], {}, "dtype"),
        ([_like(dtype=np.int32)] * 3, {}, "dtype"),
        ([_like(2, 4)] * 3, dict(out=(2, 4), lse=(2,)), "rank"),
        ([_like()] * 3, dict(has_q_lengths=np.bool_(True)), "lengths"),
        ([_like(1, 8, 1, 300)] * 3, {}, "head"),
    ],
    ids=[
        "head counts", "head sizes", "lengths", "batch", "dtypes differ", "integers", "rank",
        "no lengths given", "head size 300",
    ],
)  # fmt: skip
def test_handler_refuses(arrays, options, word):
    with pytest.raises(Exception, match=rf"(?s)jaxflash.*{word}"):
        jax.block_until_ready(jax.jit(functools.partial(_forward_call, **options))(*arrays))
    # The process survives, and so does the device.
    jax.block_until_ready(jax.jit(_step)(*_qkv()))


@pytest.mark.parametrize("workspace", [0, 16])
def test_handler_refuses_a_small_workspace(workspace):
    query = _like()
    lse = np.ones(query.shape[:-1], np.float32)
    results = [_GOOD, _GOOD, _GOOD, jax.ShapeDtypeStruct((workspace,), jnp.uint8)]

    @jax.jit
    def run(x, lse):
        call = jax.ffi.ffi_call(_ffi.BACKWARD_TARGET, results)
        return call(
            x, x, x, x, x, lse,
            problem=_SPEC, has_dlse=np.bool_(False), deterministic=np.bool_(False),
        )  # fmt: skip

    with pytest.raises(Exception, match=r"(?s)jaxflash.*workspace"):
        jax.block_until_ready(run(query, lse))


def test_host_cost_of_a_call():
    """Loose: the benchmark measures it. A call that recompiles or synchronises costs far more."""
    import time

    attend = jax.jit(functools.partial(jaxflash.dot_product_attention, implementation="cuda"))
    qkv = jax.device_put(_qkv(length=16))
    jax.block_until_ready(attend(*qkv))
    times = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(50):
            out = attend(*qkv)
        times.append((time.perf_counter() - start) / 50)
        jax.block_until_ready(out)
    assert min(times) < 150e-6, f"{min(times) * 1e6:.0f} microseconds per call"
