"""The kernels inside XLA's runtime: capture, threads, streams, devices, memory that is not clean,
errors."""

import concurrent.futures
import functools
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxflash
from another_process import run_python
from busy_stream import matrix_products
from cases import CASES
from check import assert_same_bits, jitted
from jaxflash import _api, _extension, _ffi, _kernel_program, masks

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

@jax.jit
def steps(inputs):  # independent of each other
    return [_step(*qkv) for qkv in inputs]

digest = hashlib.sha256()
for repeat in range(3):
    inputs = [_qkv(3 * repeat + i, length) for i, length in enumerate((200, 1024, 65))]
    inputs = jax.device_put(inputs)
    for x in jax.tree.leaves(jax.device_get(steps(inputs))):
        digest.update(x.tobytes())
print(digest.hexdigest())
"""


def _replay(tmp_path, commands: str, scheduling: str) -> tuple[str, str]:
    """(digest of the results, everything that XLA dumped) with these kinds of commands captured."""
    folder = tmp_path / (commands + scheduling)
    flags = (
        f"--xla_gpu_enable_command_buffer={commands} --xla_gpu_graph_min_graph_size=1 "
        f"--xla_gpu_command_buffer_scheduling_mode={scheduling} "
        f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
    )
    code = _REPLAY.format(tests=str(pathlib.Path(__file__).parent))
    digest = run_python(code, XLA_FLAGS=flags, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    texts = [path.read_text(errors="replace") for path in folder.rglob("*steps*") if path.is_file()]
    return digest, "\n".join(texts)


def test_captured_and_replayed_gives_the_same_bits(tmp_path):
    """Launched one by one, captured in a row, and captured as a graph of concurrent branches."""
    plain, plain_dump = _replay(tmp_path, "", "SERIALIZE")
    assert "kCommandBuffer" not in plain_dump
    for scheduling in ("SERIALIZE", "CONCURRENT"):
        captured, dump = _replay(tmp_path, "FUSION,CUSTOM_CALL", scheduling)
        assert captured == plain, scheduling
        # XLA says so in its list of thunks; without the kernels' trait it would launch them one by
        # one.
        assert "kCommandBuffer" in dump or "command_buffer" in dump


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


@pytest.mark.two_gpus
def test_two_devices_at_once():
    """A thread each; XLA's calls on one device do not wait for those on the other."""
    step = jax.jit(_step)
    qkv = _qkv(length=1500)
    inputs = [jax.device_put(qkv, device) for device in jax.devices("gpu")[:2]]
    alone = jax.device_get(step(*inputs[0]))

    def work(operands):
        return [step(*operands) for _ in range(50)]

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for operands, results in zip(inputs, pool.map(work, inputs), strict=True):
            for result in results:
                assert result[0].devices() == operands[0].devices()
                assert_same_bits(result, alone, str(result[0].devices()))


@pytest.mark.two_gpus
@pytest.mark.parametrize("manual", [(), ("b",)], ids=["automatic", "partly manual"])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_heads_over_two_devices(kv_heads, manual):
    """With one key head, each device has half of the query heads and of the sums for the key."""
    mesh = jax.sharding.Mesh(np.array(jax.devices("gpu")[:2]).reshape(1, 2), ("b", "h"))
    query, key, value = _qkv()
    qkv = (query, key[:, :, :kv_heads], value[:, :, :kv_heads])
    attend = functools.partial(
        jaxflash.dot_product_attention, implementation="cuda", is_causal=True
    )

    def step(attend, *qkv):
        return jax.jit(jax.value_and_grad(lambda *qkv: jnp.sum(jnp.sin(attend(*qkv))), (0, 1, 2)))(
            *qkv
        )

    expected = jax.device_get(step(attend, *qkv))
    split = NamedSharding(mesh, PartitionSpec(None, None, "h"))
    whole = NamedSharding(mesh, PartitionSpec())
    placed = jax.device_put(qkv, (split, *((whole,) * 2 if kv_heads == 1 else (split,) * 2)))
    if manual:
        spec = PartitionSpec("b")
        attend = jax.shard_map(
            attend, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=set(manual)
        )
    for x, y in zip(*map(jax.tree.leaves, (step(attend, *placed), expected)), strict=True):
        np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=2e-2, atol=2e-2
        )


def _of_table(s, b, h, q, kv, table):
    return s + table[h, jnp.clip(q - kv, 0, 15)]


def _of_table_and_head(s, b, h, q, kv, table):
    return _of_table(s, b, h, q, kv, table) * (1.0 + 0.1 * h.astype(jnp.float32))


@pytest.mark.two_gpus
@pytest.mark.parametrize("option", ["bias", "mask", "sink", _of_table, _of_table_and_head])
def test_captures_over_two_devices(option):
    """Each has the part of its heads, unless their numbers matter."""
    mesh = jax.sharding.Mesh(np.array(jax.devices("gpu")[:2]), ("h",))
    query, key, value = _qkv()
    heads, length = query.shape[2], query.shape[1]
    rng = np.random.default_rng(3)
    if option in ("bias", "mask"):
        capture, spec = rng.standard_normal((1, heads, length, length)), (None, "h")
    else:
        capture, spec = rng.standard_normal((heads, 16) if callable(option) else heads), ("h",)
    capture = capture > 0 if option == "mask" else capture.astype(np.float32)

    def loss(query, key, value, capture):
        options = {option: capture}
        if callable(option):
            options = dict(score_mod=functools.partial(option, table=capture))
        out = jaxflash.dot_product_attention(query, key, value, implementation="cuda", **options)
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2) if option == "mask" else (0, 1, 2, 3)))
    expected = jax.device_get(step(query, key, value, capture))
    split = NamedSharding(mesh, PartitionSpec(None, None, "h"))
    placed = jax.device_put((query, key, value), split)
    capture = jax.device_put(capture, NamedSharding(mesh, PartitionSpec(*spec)))
    actual = step(*placed, capture)
    for x, y in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=2e-2, atol=2e-2
        )
    text = step.lower(*placed, capture).compile().as_text()
    assert option is _of_table_and_head or "all-gather" not in text


@pytest.mark.two_gpus
@pytest.mark.parametrize("placed", [0, 1], ids=["query", "key"])
def test_explicit_mesh_of_two_devices(placed):
    """The kernels of both run where one operand alone is on the mesh."""
    devices = np.array(jax.devices("gpu")[:2])
    mesh = jax.sharding.Mesh(devices, ("b",), axis_types=(jax.sharding.AxisType.Explicit,))
    qkv = _qkv()
    expected = jax.jit(_step)(*qkv)
    qkv[placed] = jax.device_put(qkv[placed], NamedSharding(mesh, PartitionSpec("b")))
    actual = jax.jit(_step)(*qkv)
    assert len(actual[0].devices()) == 2
    assert_same_bits(actual, expected)


def test_other_work_on_the_gpu():
    """Matrix products on another stream come and go: blocks start late, and in another order."""
    qkv = jax.device_put(_qkv(length=2000))
    dout = jax.device_put(_qkv(seed=9, length=2000)[0])

    def gradients(deterministic, *qkv):
        attend = functools.partial(
            jaxflash.dot_product_attention, implementation="cuda", is_causal=True,
            deterministic_backward=deterministic,
        )  # fmt: skip
        out, pull = jax.vjp(attend, *qkv)
        return out, *pull(dout)

    ordered, free = (jax.jit(functools.partial(gradients, kind)) for kind in (True, False))
    quiet = jax.device_get(ordered(*qkv))
    jax.block_until_ready(free(*qkv))
    with matrix_products() as count:
        before = count()
        differ = _differing_runs(functools.partial(ordered, *qkv), 300)
        results = [free(*qkv) for _ in range(20)]
        jax.block_until_ready(results)
        assert count() > before, "the other stream did not run meanwhile"
    assert differ == 0
    assert_same_bits(ordered(*qkv), quiet)
    for out, *found in jax.device_get(results):
        assert_same_bits(out, quiet[0])
        for x, y in zip(found, quiet[1:], strict=True):
            x, y = x.astype(np.float32), y.astype(np.float32)
            assert np.linalg.norm(x - y) <= 1e-2 * np.linalg.norm(y)


def test_sharded_over_all_gpus():
    devices = jax.devices("gpu")
    mesh = jax.sharding.Mesh(np.array(devices), ("b",))
    qkv = [np.concatenate([x] * len(devices)) for x in _qkv()]
    sharding = NamedSharding(mesh, PartitionSpec("b"))
    step = jax.jit(_step)
    text = step.lower(*jax.device_put(qkv, sharding)).compile().as_text()
    assert text is not None
    assert "all-gather" not in text
    assert_same_bits(step(*jax.device_put(qkv, sharding)), step(*qkv))


# ---- Memory that is not clean -------------------------------------------------------------------


def _poison_memory():
    """Fills freed memory with NaN, in pieces of many sizes, so that the next results lie in it."""
    pieces = [jnp.full(2**power, jnp.nan, jnp.float32) for power in range(6, 24) for _ in range(12)]
    for piece in jax.block_until_ready(pieces):
        piece.delete()


_POISONED = (
    "bfloat16", "float32-highest", "head-7-value-3", "head-80-value-112", "head-96-float16",
    "head-160", "head-192-value-128-long", "T-63-S-65", "window-T>S", "lengths-batch-axes",
    "lengths-q", "bottom-right-T>S", "empty-S", "gqa-causal-deterministic", "decode-2-ragged",
    "decode-9-group-3", "decode-chunk", "decode-cap-12-group-8", "decode-sink-1",
    "decode-dropout-20-group-3", "decode-mask-value-gap", "capture-bias-stored-64",
    "capture-bias-stored-causal-64", "capture-bias-stored-window-128",
    "capture-bias-stored-lengths-64", "capture-bias-stored-gaps-128",
    "capture-bias-summed-three-128", "capture-bias-summed-causal-128",
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


# ---- Repeatability ------------------------------------------------------------------------------


def _differing_runs(run, count: int) -> int:
    """How many of so many runs differ from the first in any bit; compared on the device, so that
    the runs follow each other closely."""

    @jax.jit
    def compare(differing, first, again):
        bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.uint16)
        same = [jnp.all(bits(x) == bits(y)) for x, y in zip(first, again, strict=True)]
        return differing + jnp.where(jnp.stack(same).all(), 0, 1)

    first = run()
    differing = jnp.int32(0)
    for _ in range(count):
        differing = compare(differing, first, run())
    return int(differing)


@pytest.mark.parametrize(
    ("runs", "head_dim", "kv_heads", "is_causal"),
    [
        (1000, 64, 8, False), (500, 64, 2, True), (300, 128, 8, True), (300, 128, 8, False),
        (300, 192, 4, True), (300, 256, 8, True), (300, 256, 8, False),
    ],
)  # fmt: skip
def test_determinism_over_many_runs(runs, head_dim, kv_heads, is_causal):
    """As many blocks as the GPU takes, of which several add to the same rows."""
    rng = np.random.default_rng(0)
    heads = (8, kv_heads, kv_heads, 8)
    arrays = [rng.standard_normal((2, 1024, n, head_dim), np.float32) for n in heads]
    *qkv, dout = jax.device_put([x.astype(jnp.bfloat16) for x in arrays])

    @jax.jit
    def step(*qkv):
        attend = functools.partial(
            jaxflash.dot_product_attention, implementation="cuda", is_causal=is_causal,
            deterministic_backward=True,
        )  # fmt: skip
        out, pull = jax.vjp(attend, *qkv)
        return out, *pull(dout)

    assert _differing_runs(functools.partial(step, *qkv), runs) == 0


# ---- Choice of the kernel -----------------------------------------------------------------------


@pytest.mark.parametrize("pass_name", ["forward", "backward"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_smallest_variant_that_fits(pass_name, dtype):
    math = "tf32" if dtype == "float32" else dtype
    sizes = (8, 64, 72, 96, 104, 128, 136, 160, 192, 200, 256)
    for head_dim, value_dim in itertools.product(sizes, sizes):
        query, value = [2, 96, 4, head_dim], [2, 96, 4, value_dim]
        variant = _extension.variant(
            pass_name=pass_name, dtype=dtype, highest_precision=False, q=query, k=query, v=value
        )
        assert variant is not None
        family, *found = variant
        fitting = [
            [largest_head, largest_value]
            for *kind, largest_head, largest_value in _extension.variants()
            if kind == [family, pass_name, math]
            and largest_head >= head_dim
            and largest_value >= value_dim
        ]
        assert found == min(fitting, key=sum), (head_dim, value_dim)


# ---- Host errors --------------------------------------------------------------------------------

_SPEC = dict(
    scale=np.float32(1), left=np.int64(1 << 30), right=np.int64(1 << 30),
    bottom_right=np.bool_(False), highest_precision=np.bool_(False),
    has_q_lengths=np.bool_(False), has_kv_lengths=np.bool_(False), mask=np.int64(0),
    walks=np.bool_(False),
)  # fmt: skip


def _plain(query, value) -> dict:
    """The attributes of a call without a score program."""
    return dict(
        program="", unit_slope=np.bool_(True), bounded=np.bool_(False),
        head_dim=np.int64(query.shape[-1]),
        value_dim=np.int64(value.shape[-1]), dtype=query.dtype.name,
        capture_ranks=np.array((), np.int64),
    )  # fmt: skip


def _forward_call(query, key, value, out=None, lse=None, workspace=0, **attributes):
    """The custom call itself, past every check of the Python side."""
    out = query.shape if out is None else out
    lse = query.shape[:-1] if lse is None else lse
    results = (
        jax.ShapeDtypeStruct(out, query.dtype),
        jax.ShapeDtypeStruct(lse, jnp.float32),
        jax.ShapeDtypeStruct((workspace,), jnp.uint8),
    )
    call = jax.ffi.ffi_call(_ffi.FORWARD_TARGET, results)
    return call(
        query, key, value, problem={**_SPEC, **attributes}, **_plain(query, value),
        shared_units=np.int64(0), sizes=np.zeros(0, np.int64), start_capture=np.int64(-1),
    )  # fmt: skip


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
        ([_like()] * 3, dict(lse=(2, 16, 3)), "lse"),
        ([_like()] * 3, dict(lse=(2, 16 * 4)), "lse"),
    ],
    ids=[
        "head counts", "head sizes", "lengths", "batch", "dtypes differ", "integers", "rank",
        "no lengths given", "head size 300", "lse heads", "lse rank",
    ],
)  # fmt: skip
def test_handler_refuses(arrays, options, word):
    with pytest.raises(Exception, match=rf"(?s)jaxflash.*{word}"):
        jax.block_until_ready(jax.jit(functools.partial(_forward_call, **options))(*arrays))
    # The process survives, and so does the device.
    jax.block_until_ready(jax.jit(_step)(*_qkv()))


# Of a predicate in a call of (2, 3, 70, 130): numbers of batch elements and heads, what it
# captures; what comes of them.
_PREDICATE_OPERANDS = ((2, 1), (1, 3), (1, 1, 2, 2))
_PREDICATE_BYTES = 6 * (2 * 3 + (2 + 3) * 8)
_PREDICATE_RESULTS = (
    (2, 3, 70, 2), (2, 3, 130, 2), (2, 3, 2, 4), (2, 3, 3, 4), (2, 3, 2, 1, 2), (2, 3, 3, 1, 2),
)  # fmt: skip


@pytest.mark.parametrize(
    ("number", "shape"),
    [
        (0, (3, 1)), (0, (2,)), (0, (2, 1, 1)), (1, (1, 2)), (1, ()), (2, (1, 1, 2)),
        (2, (2, 3, 2, 2, 2)), (2, (1, 2, 2, 2)), (3, (2, 1, 70, 2)), (3, (70, 2)), (3, (2,)),
        (4, (2, 3, 130)), (5, (2, 3, 1, 4)), (6, (2, 3, 3, 2)), (7, (2, 3, 3, 1, 2)),
        (8, (2, 3, 3, 2)),
    ],
)  # fmt: skip
def test_predicates_are_checked(number, shape):
    q = jnp.zeros((2, 70, 3, 8))
    array = jnp.zeros((2, 2), jnp.int32)
    mask = masks.function(lambda b, h, q, kv, x: (q >= kv) | (x[b, kv // 70] > h), array)
    spec, _ = _api.described(q, jnp.zeros((2, 130, 3, 8)), jnp.zeros((2, 130, 3, 8)), mask=mask)
    program = _kernel_program.predicate(spec.predicate)
    shapes = [*_PREDICATE_OPERANDS, *_PREDICATE_RESULTS]

    def call(*shapes, workspace=_PREDICATE_BYTES):
        results = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes[3:]]
        results.append(jax.ShapeDtypeStruct((workspace,), jnp.uint8))
        options = dict(
            program=program.source,
            left=np.int64(1 << 30),
            right=np.int64(1 << 30),
            bottom_right=np.bool_(False),
            capture_ranks=np.array(program.capture_ranks, np.int64),
        )
        run = jax.jit(lambda *x: jax.ffi.ffi_call(_ffi.PREDICATE_TARGET, results)(*x, **options))
        return jax.block_until_ready(run(*(np.zeros(shape, np.int32) for shape in shapes[:3])))

    call(*shapes)
    with pytest.raises(Exception, match=r"(?s)jaxflash.*workspace"):
        call(*shapes, workspace=_PREDICATE_BYTES - 1)
    shapes[number] = shape
    with pytest.raises(Exception, match=r"(?s)jaxflash.*(mask|intervals|axes)"):
        call(*shapes)


# Of intervals of (2, 70) rows and (2, 130) keys.
_SUMMARY_SHAPES = ((2, 70, 2), (2, 130, 2), (2, 2, 8), (2, 3, 8), (2, 8))
_SUMMARY_BYTES = 2 * 2 * 8


@pytest.mark.parametrize(
    ("number", "shape"),
    [
        (0, (2, 70, 1)), (0, (2, 70, 4)), (0, (2, 70)), (0, (70, 2)), (0, (3, 70, 2)),
        (1, (2, 130, 1)), (1, (2, 130, 4)), (1, (1, 130, 2)), (2, (2, 1, 8)), (2, (2, 2, 6)),
        (3, (2, 2, 8)), (4, (2, 4)),
    ],
)  # fmt: skip
def test_summaries_are_checked(number, shape):
    options = dict.fromkeys(("has_solid", "has_inside", "has_visits"), np.bool_(False))

    def call(*shapes, workspace=_SUMMARY_BYTES):
        results = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes[2:]]
        results.append(jax.ShapeDtypeStruct((workspace,), jnp.uint8))
        run = functools.partial(jax.ffi.ffi_call(_ffi.RANGE_SUMMARY_TARGET, results), **options)
        return jax.block_until_ready(jax.jit(run)(*(np.zeros(s, np.int32) for s in shapes[:2])))

    call(*_SUMMARY_SHAPES)
    with pytest.raises(Exception, match=r"(?s)jaxflash.*workspace"):
        call(*_SUMMARY_SHAPES, workspace=_SUMMARY_BYTES - 1)
    shapes = [*_SUMMARY_SHAPES]
    shapes[number] = shape
    with pytest.raises(Exception, match=r"(?s)jaxflash.*(intervals|axes)"):
        call(*shapes)


def _backward_call(arrays, results, workspace=1 << 24, has_dlse=False):
    """The custom call itself: q, k, v, out, dout, lse and maybe dlse to dq, dk, dv."""
    results = [*results, jax.ShapeDtypeStruct((workspace,), jnp.uint8)]

    @jax.jit
    def run(*arrays):
        call = jax.ffi.ffi_call(_ffi.BACKWARD_TARGET, results)
        return call(
            *arrays,
            problem=_SPEC,
            **_plain(arrays[0], arrays[2]),
            start_capture=np.int64(-1),
            has_dlse=np.bool_(has_dlse),
            deterministic=np.bool_(False),
            gradient_program="",
            gradient_loads=np.zeros(0, np.int64),
            key_sums=np.int64(0),
        )

    return jax.block_until_ready(run(*arrays))


_LSE = np.ones(_GOOD.shape[:-1], np.float32)


@pytest.mark.parametrize("workspace", [0, 16])
def test_handler_refuses_a_small_workspace(workspace):
    with pytest.raises(Exception, match=r"(?s)jaxflash.*workspace"):
        _backward_call([*[_like()] * 5, _LSE], [_GOOD] * 3, workspace)


# (what is changed: its place among q, k, v, out, dout, lse, dlse, dq, dk, dv; its shape), the word.
_WRONG_BACKWARD = {
    "out heads": ((3, (2, 16, 3, 32)), "out"),
    "out rank": ((3, (16, 4, 32)), "out"),
    "out batch": ((3, (3, 16, 4, 32)), "out"),
    "dout length": ((4, (2, 15, 4, 32)), "dout"),
    "dout rank": ((4, (2, 1, 16, 4, 32)), "dout"),
    "lse heads": ((5, (2, 16, 3)), "lse"),
    "lse rank": ((5, (2 * 16, 4)), "lse"),
    "dlse length": ((6, (2, 15, 4)), "dlse"),
    "dk length": ((8, (2, 15, 4, 32)), "dk"),
    "dk batch": ((8, (1, 16, 4, 32)), "dk"),
    "dv heads": ((9, (2, 16, 3, 32)), "dv"),
    "dv rank": ((9, (2, 16, 4)), "dv"),
}


@pytest.mark.parametrize(("change", "word"), _WRONG_BACKWARD.values(), ids=_WRONG_BACKWARD)
def test_backward_handler_refuses(change, word):
    shapes = [_GOOD.shape] * 5 + [_LSE.shape] * 2 + [_GOOD.shape] * 3
    place, shape = change
    shapes[place] = shape
    arrays = [np.ones(shape, jnp.bfloat16) for shape in shapes[:5]]
    arrays += [np.ones(shape, np.float32) for shape in shapes[5:7]]
    results = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes[7:]]
    with pytest.raises(Exception, match=rf"(?s)jaxflash.*{word}"):
        _backward_call(arrays, results, has_dlse=True)


@pytest.mark.parametrize("workspace", [0, 16])
def test_handler_refuses_a_small_forward_workspace(workspace):
    query, cache = _like(2, 1, 4, 64), _like(2, 2000, 4, 64)
    with pytest.raises(Exception, match=r"(?s)jaxflash.*workspace"):
        jax.block_until_ready(
            jax.jit(functools.partial(_forward_call, workspace=workspace))(query, cache, cache)
        )


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
