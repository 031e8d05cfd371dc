"""Score functions on several devices: inside `jax.shard_map`, on explicit meshes, split arrays."""

from __future__ import annotations

import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxflash
from jaxflash import _ffi, _program, _support, masks
from jaxprs import compiled_custom_calls
from marks import needs_kernels
from meshes import cpu_mesh
from small_calls import B, N, S, T, random_qkv, random_table, relative_positions

pytestmark = pytest.mark.usefixtures("accurate_products", "quick_compilation")


# ---- Inside shard_map ----------------------------------------------------------------------------


def _bias_and_slopes(implementation):
    def gradients(q, k, v, bias, slopes):
        def loss(*args):
            q, k, v, bias, slopes = args
            out = jaxflash.dot_product_attention(
                q, k, v, bias, alibi_slopes=slopes, implementation=implementation
            )
            return jnp.sum(jnp.sin(out.astype(jnp.float32)))

        return jax.grad(loss, (0, 3, 4))(q, k, v, bias, slopes)

    return gradients


def _inside_shard_map(function, mesh, manual):
    split, whole = P("x"), P()
    return jax.jit(
        jax.shard_map(
            function,
            mesh=mesh,
            in_specs=(split, split, split, whole, whole),
            out_specs=(split, whole, whole),
            axis_names=manual,
        )
    )


def _split_arguments():
    mesh = cpu_mesh(x=2, y=4)
    q, k, v = random_qkv()
    bias = jnp.asarray(np.random.default_rng(2).standard_normal((N, T, S)), jnp.float32)
    return mesh, (q, k, v, bias, jnp.linspace(0.1, 0.4, N, dtype=jnp.float32))


@pytest.mark.parametrize("manual", [{"x"}, {"x", "y"}], ids=["part", "all"])
def test_gradients_of_captures_inside_shard_map(manual):
    mesh, arguments = _split_arguments()
    expected = jax.jit(_bias_and_slopes("xla"))(*arguments)
    actual = _inside_shard_map(_bias_and_slopes("xla"), mesh, manual)(*arguments)
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


# Values of two types, inside `shard_map`: what reads a table, and a score that does not.
_CHOICES = {
    "where": jnp.where,
    "cond": lambda condition, x, y: jax.lax.cond(condition, lambda: x, lambda: y),
    "loop": lambda condition, x, y: jax.lax.fori_loop(
        0, 2, lambda i, z: jnp.where(condition & (i > 0), x, z), y
    ),
}


def _of_shards(attention, mesh=None, choose=jnp.where, **options):
    """A loss of arrays and slopes split over batch and heads, by shards if there is a mesh."""

    def attend(q, k, v, table):
        def by_head(score, b, h, q, kv):
            moved = score * jnp.tanh(table[h, 1]) + table[h, 0]
            return choose(q > kv, moved, score)

        given = {"score_mod": by_head} | options
        return attention(q, k, v, sink=table[:, 0], **given)

    if mesh is not None:
        split = P("x", None, "y")
        attend = jax.shard_map(
            attend, mesh=mesh, in_specs=(split, split, split, P("y")), out_specs=split
        )
    return lambda *arguments: jnp.sum(jnp.sin(attend(*arguments).astype(jnp.float32)))


def _arguments_of_shards():
    rng = np.random.default_rng(3)
    q, k, v = (jnp.asarray(rng.standard_normal((2, T, N, 8)), jnp.float32) for _ in range(3))
    return q, k, v, jnp.asarray(rng.standard_normal((N, 2)), jnp.float32)


@pytest.mark.parametrize("choose", _CHOICES)
def test_captures_that_are_split_inside_shard_map(choose):
    """The score varies over more mesh axes than what the function reads."""
    choose = _CHOICES[choose]
    mesh, arguments = cpu_mesh(x=2, y=4), _arguments_of_shards()
    gradients = [
        jax.jit(jax.value_and_grad(loss, (0, 1, 3)))(*arguments)
        for loss in (
            _of_shards(jaxflash.dot_product_attention, mesh, choose),
            _of_shards(jaxflash.reference.dot_product_attention, choose=choose),
        )
    ]
    for x, y in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


@needs_kernels
@pytest.mark.parametrize("option", ["score_mod", "logits_soft_cap"])
def test_programs_inside_shard_map_run_on_the_kernels(option):
    options = {} if option == "score_mod" else {"score_mod": None, "logits_soft_cap": 3.0}
    mesh, arguments = cpu_mesh(x=2, y=4), _arguments_of_shards()
    loss = _of_shards(
        functools.partial(jaxflash.dot_product_attention, implementation="cuda"), mesh, **options
    )
    traced = jax.jit(jax.grad(loss, (0, 1, 3))).trace(*arguments)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "jaxflash_forward" in text
    assert "jaxflash_backward" in text


@needs_kernels
@pytest.mark.parametrize("manual", [{"x"}, {"x", "y"}], ids=["part", "all"])
def test_gradients_of_captures_of_the_custom_call_inside_shard_map(manual):
    """Where some mesh axes are automatic, no sum can name their devices: nothing is split there."""
    mesh, arguments = _split_arguments()
    function = _inside_shard_map(_bias_and_slopes("cuda"), mesh, manual)
    text = function.trace(*arguments).lower(lowering_platforms=("cuda",)).compile().as_text()
    (backward,) = compiled_custom_calls(text, _ffi.BACKWARD_TARGET)
    assert f"f32[1,{N},{T},{S}]" in backward


# ---- Meshes --------------------------------------------------------------------------------------


@needs_kernels
def test_gradients_of_captures_on_an_explicit_mesh():
    """Computed by the kernels, of the heads that a device has."""
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices("cpu")[:4], axis_types=kinds)
    _, arguments = _split_arguments()
    specs = (*(P("x", None, "y"),) * 3, P("y"), P("y"))
    arguments = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(arguments, specs, strict=True)
    ]
    _support._warned.clear()
    with jax.set_mesh(mesh):
        traced = jax.jit(_bias_and_slopes("cuda")).trace(*arguments)
        with warnings.catch_warnings():
            warnings.simplefilter("error", jaxflash.SlowPathWarning)
            lowered = traced.lower(lowering_platforms=("cuda",))
        text = lowered.compile().as_text()
    (backward,) = compiled_custom_calls(text, _ffi.BACKWARD_TARGET)
    assert f"f32[1,{N // 2},{T},{S}]" in backward.split("custom-call(")[0]


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_sharded_arrays_on_the_blockwise_path(kind):
    """Where shardings are part of types, too; what is built in gathers nothing."""
    q, k, v = random_qkv()
    bias = jnp.asarray(np.random.default_rng(2).standard_normal((B, N, T, S)), jnp.float32)
    arguments = (q, k, v, bias, jnp.linspace(0.1, 0.4, N, dtype=jnp.float32), random_table())

    def loss(score_mod, q, k, v, bias, slopes, table):
        options = dict(bias=bias, alibi_slopes=slopes, logits_soft_cap=3.0)
        if score_mod:
            options["score_mod"] = relative_positions(table)
        out = jaxflash.dot_product_attention(q, k, v, **options, implementation="xla")
        return jnp.sum(jnp.sin(out))

    mesh = jax.make_mesh(
        (2, 2), ("x", "y"), devices=jax.devices("cpu")[:4], axis_types=(kind, kind)
    )
    specs = (*(P("x", None, "y"),) * 3, P("x", "y"), P("y"), P())
    shardings = (NamedSharding(mesh, spec) for spec in specs)
    sharded = [jax.device_put(x, s) for x, s in zip(arguments, shardings, strict=True)]
    for score_mod in (False, True):
        gradients = jax.jit(jax.grad(functools.partial(loss, score_mod), argnums=range(6)))
        expected = gradients(*arguments)
        with jax.set_mesh(mesh):
            compiled = gradients.lower(*sharded).compile()
        for x, y in zip(compiled(*sharded), expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)
        assert score_mod or "all-gather" not in (compiled.as_text() or "")


_ELEMENTS = {
    "t[0, kv]": lambda t, h, kv: t[0, kv],
    "t[h, 3]": lambda t, h, kv: t[h, 3],
    "t[-1, kv]": lambda t, h, kv: t[-1, kv],
    "in a function": lambda t, h, kv: jax.jit(lambda t, kv: t[1, kv])(t, kv),
    "clipped": lambda t, h, kv: t.at[h, kv + 5].get(mode="clip"),
}


@needs_kernels
@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
@pytest.mark.parametrize("element", _ELEMENTS.values(), ids=_ELEMENTS)
def test_elements_of_an_array_of_several_devices(element, kind):
    """Which is no argument of `jax.jit`: JAX gathers its elements."""
    mesh = jax.make_mesh((4,), ("x",), (kind,), devices=jax.devices("cpu")[:4])
    table = jnp.asarray(np.random.default_rng(3).standard_normal((N, S)), jnp.float32)
    everywhere, *qkv = jax.device_put((table, *random_qkv()), NamedSharding(mesh, P()))

    def attend(table, *qkv, implementation=None):
        return jaxflash.dot_product_attention(
            *qkv, score_mod=lambda s, b, h, q, kv: s + element(table, h, kv),
            implementation=implementation,
        )  # fmt: skip

    np.testing.assert_allclose(
        jax.jit(functools.partial(attend, everywhere))(*qkv),
        jax.jit(attend)(table, *random_qkv()),
        rtol=1e-5,
        atol=1e-6,
    )
    on_kernels = jax.jit(functools.partial(attend, everywhere, implementation="cuda"))
    on_kernels.trace(*qkv).lower(lowering_platforms=("cuda",))


_POINTS = np.linspace(-3.0, 3.0, S, dtype=np.float32)
# Loops and branches that read an array, alone or together with the score.
_HOLDING_OTHERS = {
    "loop": lambda t, s, b, h, q, kv: jax.lax.fori_loop(0, 3, lambda _, x: 0.9 * x + t[0, 0], s),
    "loop over an array": lambda t, s, b, h, q, kv: jax.lax.fori_loop(
        0, 3, lambda n, x: jnp.sin(x) + t[h, n], s
    ),
    "loop from a constant": lambda t, s, b, h, q, kv: jax.lax.fori_loop(
        0, 3, lambda n, x: x.at[n].set(s * t[h, n]), jnp.zeros(3, s.dtype)
    ).sum(),
    "loop beside the score": lambda t, s, b, h, q, kv: (
        s + jax.lax.fori_loop(0, 2, lambda n, x: x * t[h, n], t[0, 0])
    ),
    "scan": lambda t, s, b, h, q, kv: jnp.hstack(
        jax.lax.scan(lambda x, y: (jnp.sin(x) + y, x * y), s, t[h], reverse=True, unroll=3)
    )[2],
    "while": lambda t, s, b, h, q, kv: (
        s * t[h, 0]
        + jax.lax.stop_gradient(jax.lax.while_loop(lambda x: x < t[h, 1], lambda x: x + 0.5, s))
    ),
    "mapped while": lambda t, s, b, h, q, kv: (
        s
        * jax.lax.stop_gradient(
            jax.vmap(
                lambda y: jax.lax.while_loop(lambda x: x < y, lambda x: x + 0.5 + 0.0 * t[0, 0], s)
            )(t[h])
        ).mean()
    ),
    "branch": lambda t, s, b, h, q, kv: jax.lax.cond(q > kv, lambda: s, lambda: s + t[h, kv]),
    "branch of operands": lambda t, s, b, h, q, kv: jax.lax.cond(
        q > kv, lambda x, y: x * y * t[0, 0], lambda x, y: x, s, t[h, 0]
    ),
    "switch": lambda t, s, b, h, q, kv: jax.lax.switch(
        (q + kv) % 3, [lambda x: x * t[h, 0], lambda x: x, jnp.sin], s
    ),
    "branch of a loop": lambda t, s, b, h, q, kv: jax.lax.fori_loop(
        0, 2, lambda n, x: jax.lax.cond(x > t[h, n], jnp.sin, jax.jit(lambda x: x * t[0, 1]), x), s
    ),
    "platform": lambda t, s, b, h, q, kv: jax.lax.platform_dependent(
        s, cpu=lambda x: x * t[h, 0], default=lambda x: x * t[h, 0]
    ),
    "interpolation": lambda t, s, b, h, q, kv: s + jnp.interp(s, _POINTS, t[1]),
}
_ON_EXPLICIT_MESHES = _HOLDING_OTHERS | {
    "index from the score": lambda t, s, b, h, q, kv: s + t[0, jnp.int32(4.0 * s)],
    "row": lambda t, s, b, h, q, kv: s + t[b].mean() + jnp.cumsum(t, 1)[h, kv],
    "function of the array": lambda t, s, b, h, q, kv: s + (2.0 * t).T[kv, h],
}
_fresh = itertools.count(1)


def _loss(attention, function):
    """A loss of queries, keys, values and a table, whose program no other call has had."""
    constant = 0.125 * next(_fresh)

    def loss(qkv, table):
        def score_mod(*arguments):
            return function(table, *arguments) + constant

        return jnp.sum(jnp.sin(attention(*qkv, score_mod=score_mod)))

    return jax.jit(jax.value_and_grad(loss, (0, 1)))


def _table():
    return jnp.asarray(np.random.default_rng(3).standard_normal((N, S)), jnp.float32)


_attention = functools.partial(jaxflash.dot_product_attention, implementation="xla")


@pytest.mark.parametrize("first", ["plain", "replicated"])
@pytest.mark.parametrize("function", _ON_EXPLICIT_MESHES.values(), ids=_ON_EXPLICIT_MESHES)
def test_functions_on_explicit_meshes(function, first):
    """Whatever a function does with scalars and arrays that no device shares, and wherever the
    program was traced first."""
    qkv, table = random_qkv(), _table()
    expected = _loss(jaxflash.reference.dot_product_attention, function)(qkv, table)
    mesh = cpu_mesh(jax.sharding.AxisType.Explicit, x=2, y=2)
    split = jax.device_put(qkv, NamedSharding(mesh, P("x", None, "y")))
    places = [table, jax.device_put(table, NamedSharding(mesh, P()))]
    step = _loss(_attention, function)
    for place in places if first == "plain" else reversed(places):
        actual = step(split, place)
        for x, y in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("function", _HOLDING_OTHERS.values(), ids=_HOLDING_OTHERS)
def test_programs_of_replicated_arrays(function):
    """They are those of arrays on no mesh."""
    mesh = cpu_mesh(jax.sharding.AxisType.Explicit, x=2)
    programs = []

    @jax.jit
    def trace(query, table):
        def program(score, b, h, q, kv, distance):
            return function(table, score, b, h, q, kv)

        of = jax.typeof(query).sharding.mesh
        programs.append(_program.trace(program, (), jnp.float32, mesh=of if of.shape else None)[0])
        return query

    query, table = jnp.zeros(2), _table()
    trace(query, table)
    trace(*(jax.device_put(x, NamedSharding(mesh, P())) for x in (query, table)))
    plain, replicated = programs
    assert plain == replicated


@pytest.mark.parametrize("function", _HOLDING_OTHERS.values(), ids=_HOLDING_OTHERS)
def test_replicated_arrays_inside_shard_map(function):
    """The score varies over mesh axes, and what loops and branches read does not."""
    qkv, table = random_qkv(), _table()
    expected = _loss(jaxflash.reference.dot_product_attention, function)(qkv, table)

    def loss(qkv, table):
        def attend(table, *qkv):
            return _attention(*qkv, score_mod=functools.partial(function, table))

        specs = dict(in_specs=(P(), *(P("x"),) * 3), out_specs=P("x"))
        out = jax.shard_map(attend, mesh=cpu_mesh(x=2), **specs)(table, *qkv)
        return jnp.sum(jnp.sin(out))

    actual = jax.jit(jax.value_and_grad(loss, (0, 1)))(qkv, table)
    for x, y in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


_MASKS = {
    "loop": lambda t, b, h, q, kv: jax.lax.fori_loop(
        0, 3, lambda n, x: x | (t[h, n] > t[0, kv]), q >= kv
    ),
    "branch": lambda t, b, h, q, kv: (
        (q == kv) | jax.lax.cond(q > kv, lambda y: t[h, y] > 0, lambda y: y % 2 == 0, kv)
    ),
}


@pytest.mark.parametrize("place", ["explicit", "shard_map"])
@pytest.mark.parametrize("function", _MASKS.values(), ids=_MASKS)
def test_masks_of_replicated_arrays(function, place):
    qkv, table = random_qkv(), _table()

    def attend(table, *qkv, attention=_attention):
        mask = masks.function(lambda b, h, q, kv: function(table, b, h, q, kv))
        return attention(*qkv, mask=mask)

    expected = attend(table, *qkv, attention=jaxflash.reference.dot_product_attention)
    if place == "explicit":
        mesh = cpu_mesh(jax.sharding.AxisType.Explicit, x=2)
        qkv = jax.device_put(qkv, NamedSharding(mesh, P("x")))
        actual = jax.jit(attend)(jax.device_put(table, NamedSharding(mesh, P())), *qkv)
    else:
        specs = dict(in_specs=(P(), *(P("x"),) * 3), out_specs=P("x"))
        actual = jax.jit(jax.shard_map(attend, mesh=cpu_mesh(x=2), **specs))(table, *qkv)
    np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-5)
