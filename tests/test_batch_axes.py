"""More batch axes than the kernels count. Programs are lowered as for a GPU; what a custom call
computes stands here in jnp, so that a CPU runs it."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxflash
import kernels_in_jnp
from jaxflash import _batch_axes, _ffi, _passes, masks
from jaxprs import compiled_custom_calls
from marks import needs_kernels
from meshes import cpu_mesh

_AXES = 10
_ALL, _HALF = (2,) * _AXES, (2, 1) * (_AXES // 2)
_T, _N, _H = 4, 2, 4


def _array(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def _bias(attend, q, bias):
    return attend(q, q, q, bias=bias)


def _two_biases(attend, q, bias, other):
    def score(s, b, h, q_, kv):
        # What is added to all keys of a query has no gradient.
        return s + other[h, b % 2] * kv.astype(jnp.float32)

    return attend(q, q, q, bias=bias, score_mod=score)


def _mapped_in_turn(function):
    """The function of two arrays, of which `jax.vmap` maps one axis after the other."""
    for axis in reversed(range(_AXES)):
        function = jax.vmap(function, (0, None) if axis % 2 else (None, 0))
    return function


def _table(attend, q, table):
    def one(q, table):
        def score(s, b, h, q_, kv):
            return s + table[h, q_ - kv + _T - 1]

        return attend(q, q, q, score_mod=score)

    return _mapped_in_turn(one)(q, table)


def _mask(attend, q, begin, end):
    def one(begin, end):
        begin, end = (jnp.abs(2 * x).astype(jnp.int32) for x in (begin, end))
        mask = masks.function(lambda b, h, q, kv: (kv >= begin[h]) | (kv < end[h]))
        return attend(q, q, q, mask=mask)

    return _mapped_in_turn(one)(begin, end)


_FIVE = (2,) * (_AXES // 2)
_TOKENS = (_T, _N, _H)
# (function, shapes of its arrays)
_CALLS = {
    "bias": (_bias, (*_ALL, *_TOKENS), (*_HALF, _N, _T, _T)),
    "biases": (_two_biases, (*_ALL, *_TOKENS), (*_HALF, 1, _T, _T), (_N, 2)),
    "table": (_table, (*_FIVE, *_TOKENS), (*_FIVE, _N, 2 * _T)),
    "mask": (_mask, _TOKENS, (*_FIVE, _N), (*_FIVE, _N)),
}


def _forward(attend, *arrays):
    return attend(*arrays)


def _gradients(attend, *arrays):
    def loss(*arrays):
        return jnp.sum(jnp.sin(attend(*arrays)))

    return jax.grad(loss, tuple(range(len(arrays))))(*arrays)


def _tangent(attend, *arrays):
    return jax.jvp(attend, arrays, tuple(map(jnp.cos, arrays)))


_FUNCTIONS = (_forward, _gradients, _tangent)
_PASSES = (_ffi.FORWARD_TARGET, _ffi.BACKWARD_TARGET, _ffi.TANGENT_TARGET)


def _traced(function, row, implementation):
    call, *shapes = row
    attend = functools.partial(jaxflash.dot_product_attention, implementation=implementation)
    arrays = [_array(i, *shape) for i, shape in enumerate(shapes)]
    step = jax.jit(functools.partial(function, functools.partial(call, attend)))
    return step.trace(*arrays), arrays


def _count(shapes) -> int:
    """How many batch axes kernels count of arrays (*batch, ...)."""
    patterns = [tuple(shape[axis] == 1 for shape in shapes) for axis in range(_AXES)]
    return len([pattern for pattern, _ in itertools.groupby(patterns) if not all(pattern)])


def _shapes(call: str):
    """Of the operands and results of a line of a lowered program."""
    for dims in re.findall(r"tensor<([\dx]*)x\w+>", call[call.rindex(" : (") :]):
        yield tuple(map(int, dims.split("x")))


@needs_kernels
@pytest.mark.parametrize("function", _FUNCTIONS)
@pytest.mark.parametrize("row", _CALLS.values(), ids=_CALLS)
def test_kernels_get_as_many_as_they_take(row, function):
    traced, _ = _traced(function, row, "cuda")
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    targets = "|".join((*_PASSES, _ffi.PREDICATE_TARGET))
    calls = re.findall(rf".*custom_call @(?:{targets})\(.*", text)
    assert calls
    for call in calls:
        # Numbers of heads have no batch axes, and neither has a workspace.
        shapes = [shape for shape in _shapes(call) if len(shape) >= _AXES]
        assert len(shapes) > 2
        assert _count(shapes) <= _batch_axes.MAX_COUNT, call


@pytest.fixture
def in_jnp(monkeypatch):
    monkeypatch.setattr(_passes.Forward, "_call", kernels_in_jnp.forward)
    monkeypatch.setattr(_passes.Backward, "_call", kernels_in_jnp.backward)
    # What was made for calls of other tests, and of these.
    jax.clear_caches()
    yield
    jax.clear_caches()


@needs_kernels
@pytest.mark.usefixtures("in_jnp")
@pytest.mark.parametrize("function", [_forward, _gradients])
@pytest.mark.parametrize("name", ["bias", "biases", "table"])
def test_results_are_those_of_the_call(name, function):
    """Gradients too, of which the kernels do not add up all batch elements."""
    traced, arrays = _traced(function, _CALLS[name], "cuda")
    actual = traced.lower(lowering_platforms=("cuda",)).compile()(*arrays)
    traced, _ = _traced(function, _CALLS[name], "xla")
    expected = traced.lower().compile()(*arrays)
    for x, y in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@needs_kernels
@pytest.mark.usefixtures("in_jnp")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_results_on_a_mesh(kind):
    mesh = cpu_mesh(kind, a=2, b=2, h=2)
    call, *shapes = _CALLS["bias"]
    specs = P("a", "b", *(None,) * (_AXES - 1), "h"), P("a", *(None,) * (_AXES - 1), "h")
    arrays = [_array(i, *shape) for i, shape in enumerate(shapes)]
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)
    ]

    def step(implementation, *arrays):
        attend = functools.partial(jaxflash.dot_product_attention, implementation=implementation)
        return _gradients(functools.partial(call, attend), *arrays)

    expected = jax.jit(functools.partial(step, "xla"))(*arrays)
    with jax.set_mesh(mesh):
        traced = jax.jit(functools.partial(step, "cuda")).trace(*placed)
        actual = traced.lower(lowering_platforms=("cuda",)).compile()(*placed)
    for x, y in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_masks_on_a_mesh(kind):
    """Compiled, not run."""
    mesh = cpu_mesh(kind, a=2)
    _, *shapes = _CALLS["mask"]
    attend = functools.partial(jaxflash.dot_product_attention, implementation="cuda")

    def step(q, begin, end):
        return jax.vmap(functools.partial(_mask, attend), (0, 0, None))(q, begin, end)

    q, begin = (
        jax.device_put(_array(i, 2, *shape), NamedSharding(mesh, P("a")))
        for i, shape in enumerate(shapes[:2])
    )
    with jax.set_mesh(mesh):
        traced = jax.jit(step).trace(q, begin, _array(2, *shapes[2]))
        text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    assert compiled_custom_calls(text or "", _ffi.PREDICATE_TARGET)


@pytest.mark.gpu
@pytest.mark.parametrize("function", _FUNCTIONS)
@pytest.mark.parametrize("row", _CALLS.values(), ids=_CALLS)
def test_kernels(row, function, accurate_products):
    actual, expected = (
        traced.lower().compile()(*arrays)
        for traced, arrays in (_traced(function, row, path) for path in ("cuda", "xla"))
    )
    for x, y in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)
