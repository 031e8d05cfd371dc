"""How the kernels' calls are divided among devices, in numbers: what a call computes stands here in
jnp, so that CPU devices run what GPUs would.
"""

import dataclasses
import functools
import gc
import math
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxflash
import kernels_in_jnp
from jaxflash import _api, _batch_calls, _extension, _ffi, _partition, _passes
from meshes import cpu_mesh

pytestmark = pytest.mark.skipif(not _extension.kernels, reason="needs the kernels' library")

_B, _T, _N, _K, _H = 4, 20, 8, 4, 4


@pytest.fixture
def in_jnp(monkeypatch):
    monkeypatch.setattr(_passes.Forward, "call", kernels_in_jnp.forward)
    monkeypatch.setattr(_passes.Backward, "call", kernels_in_jnp.backward)
    yield
    # What was made for calls of these tests.
    jax.clear_caches()
    _forget()


def _forget() -> None:
    """As if so many other calls had been made that the caches hold no op of earlier ones."""
    _partition.mapped.cache_clear()
    _partition._partitioned.cache_clear()
    gc.collect()


def _table(s, b, h, q, kv, table):
    return s + table[h, jnp.clip(q - kv + 3, 0, 6)]


def _head_itself(s, b, h, q, kv, table):
    return s + table[h, jnp.clip(q - kv + 3, 0, 6)] * (0.1 * h.astype(jnp.float32))


def _other_heads(s, b, h, q, kv, table):
    return s + table[h, jnp.clip(q - kv + 3, 0, 6)] + table[(h + 1) % _N, 0]


# (axes of the mesh, those that split batch and heads of the query, split of the captured array, its
# shape, option, whether each device needs the part of its own heads alone)
_MESH = dict(b=2, h=4)
_OF_HEADS = (1, _N, _T, _T)
_ROWS = {
    "bias of each head": (_MESH, "b", "h", P(None, "h"), _OF_HEADS, "bias", True),
    "bias of all": (_MESH, "b", "h", P("b", "h"), (_B, _N, _T, _T), "bias", True),
    "bias of the batch": (_MESH, "b", "h", P("b"), (_B, 1, _T, _T), "bias", False),
    "sink": (_MESH, "b", "h", P("h"), (_N,), "sink", True),
    "table": (_MESH, "b", "h", P("h"), (_N, 7), _table, True),
    "head itself": (_MESH, "b", "h", P("h"), (_N, 7), _head_itself, False),
    "other heads": (_MESH, "b", "h", P("h"), (_N, 7), _other_heads, False),
    "part of a key head": (dict(h=8), None, "h", P(None, "h"), _OF_HEADS, "bias", True),
    "two axes": (dict(g=2, h=4), None, ("g", "h"), P(None, ("g", "h")), _OF_HEADS, "bias", True),
}


def _attend(implementation, option, q, k, v, capture):
    options = {option: capture}
    if callable(option):
        options = dict(score_mod=functools.partial(option, table=capture))
    return jaxflash.dot_product_attention(q, k, v, implementation=implementation, **options)


def _check(attend, option, shape, mesh, specs) -> str:
    """That `attend` computes what one device does, and its program."""
    rng = np.random.default_rng(0)
    shapes = (_B, _T, _N, _H), (_B, _T, _K, _H), (_B, _T, _K, _H), shape
    arrays = [jnp.asarray(rng.standard_normal(x), jnp.float32) for x in shapes]
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)
    ]

    def step(attend, *arrays):
        def loss(*arrays):
            return jnp.sum(jnp.sin(attend(*arrays)))

        return jax.value_and_grad(loss, (0, 1, 2, 3))(*arrays)

    on_one = functools.partial(_attend, "xla", option)
    expected = jax.jit(functools.partial(step, on_one))(*arrays)
    traced = jax.jit(functools.partial(step, attend)).trace(*placed)
    compiled = traced.lower(lowering_platforms=("cuda",)).compile()
    for x, y in zip(*map(jax.tree.leaves, (compiled(*placed), expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)
    return compiled.as_text() or ""


def _gathered(text: str) -> list[int]:
    """Elements of the arrays that devices gather."""
    shapes = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather", text)
    return [math.prod(map(int, x.split(","))) for x in shapes]


@pytest.mark.usefixtures("in_jnp")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["automatic", "explicit"])
@pytest.mark.parametrize("row", _ROWS.values(), ids=_ROWS)
def test_captures_of_heads(row, kind):
    """Devices have the parts of captures that their heads index, and exchange none of them."""
    axes, batch, heads, of_capture, shape, option, splits = row
    mesh = cpu_mesh(**axes)
    mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(kind,) * len(axes))
    shares_keys = math.prod(axes[name] for name in heads) > _K
    keys = P(batch, None, None if shares_keys else heads)
    if callable(option) and kind == AxisType.Explicit:
        of_capture, splits = P(), False  # replicated there, as docs/sharding.md says
    specs = P(batch, None, heads), keys, keys, of_capture
    text = _check(functools.partial(_attend, "cuda", option), option, shape, mesh, specs)
    assert not splits or math.prod(shape) not in _gathered(text)


@pytest.mark.parametrize("batch", [1, _B])
def test_captures_in_partly_manual_calls(batch):
    """Heads are split there, too, if no gradient has to be summed over them. Compiled, not run."""
    mesh = cpu_mesh(m=2, b=2, h=2)
    of_batch = P("m") if batch == _B else P()
    attend = jax.shard_map(
        functools.partial(_attend, "cuda", "bias"),
        mesh=mesh,
        in_specs=(P("m"), P("m"), P("m"), of_batch),
        out_specs=P("m"),
        axis_names={"m"},
    )
    split = NamedSharding(mesh, P(("m", "b"), None, "h"))
    query, key = (
        jax.device_put(jnp.zeros((_B, _T, heads, _H), jnp.float32), split) for heads in (_N, _K)
    )
    bias = jnp.zeros((batch, _N, _T, _T), jnp.float32)
    bias = jax.device_put(bias, NamedSharding(mesh, P(("m", "b") if batch == _B else None, "h")))

    def gradients(*arrays):
        return jax.grad(lambda *x: jnp.sum(attend(*x)), (0, 1, 2, 3))(*arrays)

    traced = jax.jit(gradients).trace(query, key, key, bias)
    text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    assert math.prod(bias.shape) not in _gathered(text)
    (call,) = (x for x in text.splitlines() if f'"{_ffi.BACKWARD_TARGET}"' in x)
    of_device = f"f32[{batch // 4 or 1},{_N // 2},{_T},{_T}]"
    for operands in call.split("operand_layout_constraints="):
        assert of_device in operands, call


@pytest.mark.parametrize("option", ["bias", "alibi_slopes", "sink"])
def test_captures_on_explicit_meshes(option):
    """Compiled, not run."""
    explicit = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 4), ("b", "h"), explicit, devices=jax.devices("cpu")[:8])
    query = jnp.zeros((_B, _T, _N, _H), jnp.float32)
    capture, part = (
        (jnp.zeros((1, _N, _T, _T), jnp.float32), f"1,2,{_T},{_T}")
        if option == "bias"
        else (jnp.zeros(_N, jnp.float32), "1,2")
    )
    of_capture = P(None, "h") if option == "bias" else P("h")
    query, capture = (
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in ((query, P("b", None, "h")), (capture, of_capture))
    )
    with jax.set_mesh(mesh):
        attend = functools.partial(_attend, "cuda", option)
        traced = jax.jit(lambda q, x: attend(q, q, q, x)).trace(query, capture)
        text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    (call,) = (x for x in text.splitlines() if f'"{_ffi.FORWARD_TARGET}"' in x)
    assert f"f32[{part}]" in call.split("operand_layout_constraints=")[1]
    assert not _gathered(text)


@pytest.mark.usefixtures("in_jnp")
def test_ops_outlive_their_caches():
    """Between the steps of a call on eight devices."""
    mesh = cpu_mesh(b=2, h=4)
    rng = np.random.default_rng(0)
    shapes = (_B, _T, _N, _H), (_B, _T, _K, _H), _OF_HEADS
    arrays = [jnp.asarray(rng.standard_normal(x), jnp.float32) for x in shapes]
    specs = P("b", None, "h"), P("b", None, "h"), P(None, "h")
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)
    ]

    def step(implementation, q, k, bias):
        def loss(q, k, bias):
            return jnp.sum(jnp.sin(_attend(implementation, "bias", q, k, k, bias)))

        return jax.value_and_grad(loss, (0, 1, 2))(q, k, bias)

    def compiled(function):
        traced = function.trace(*placed)
        _forget()
        lowered = traced.lower(lowering_platforms=("cuda",))
        _forget()
        program = lowered.compile()
        _forget()
        return program

    expected = jax.jit(functools.partial(step, "xla"))(*arrays)
    function = jax.jit(functools.partial(step, "cuda"))
    # Traced; the same again, from JAX's caches; traced by another function.
    for program in map(compiled, (function, function, jax.jit(functools.partial(step, "cuda")))):
        for x, y in zip(*map(jax.tree.leaves, (program(*placed), expected)), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


def test_caches_forget():
    """Of ever other scales and lengths, whose programs they would keep alive."""
    spec, _ = _api.described(*3 * (jnp.zeros((1, 8, 1, 8), jnp.float32),))
    lengths, mask = _passes.GivenLengths(False, False), _passes.MaskKind()
    made = []
    for number in range(300):
        kernel = _passes.Forward(dataclasses.replace(spec, scale=1.0 + number), lengths, None, mask)
        _partition.mapped(kernel)
        _partition._partitioned(kernel, ((False,),) * 3, (1, 1), None)
        call = _batch_calls.ReadMask(8, 8 + number, packs_keys=True)
        _partition.over_batch(call)
        _partition._partitioned_over_batch(call, ((False,),), None)
        made += map(weakref.ref, (kernel, call))
    gc.collect()
    assert made[0]() is None
    assert made[1]() is None
