"""Every derivative of every order, against the same derivative of the plain reference."""

import collections
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding, PartitionSpec
from jax.test_util import check_grads

import jaxflash
from another_process import run_python
from attention_case import DIFFERENTIABLE
from jaxflash import _blockwise, _derivatives, _ffi, _primitive
from jaxflash._spec import AttentionSpec, Operands
from jaxflash._tile import Tiles
from jaxprs import equations, products
from marks import needs_kernels
from meshes import cpu_mesh

pytestmark = pytest.mark.usefixtures("accurate_products", "quick_compilation", "small_blocks")

_any_path = jaxflash.dot_product_attention
_blockwise_path = functools.partial(_any_path, implementation="xla")
_dense = jaxflash.reference.dot_product_attention

# ---- Every option --------------------------------------------------------------------------------

B, T, S, N, K, H, VALUE_SIZE = 2, 21, 35, 4, 2, 4, 3


def _option_rows():
    rng = np.random.default_rng(0)
    normal = rng.standard_normal
    segments = [np.sort(rng.integers(0, 3, (B, length))) for length in (T, S)]
    band = dict(is_causal=True, local_window_size=(9, None))
    rows = {
        "grouped heads": {},
        "band": band,
        "band, bottom right": dict(causal_alignment="bottom_right", **band),
        "lengths": dict(
            query_seq_lengths=np.array([T, 9], np.int32),
            key_value_seq_lengths=np.array([30, 0], np.int32),
        ),
        "mask, segments": dict(
            mask=rng.random((B, 1, T, S)) > 0.2, segment_ids=tuple(segments), scale=0.8
        ),
        "bias, soft cap": dict(bias=normal((1, N, T, S)), logits_soft_cap=1.5),
        "broadcast bias, sink": dict(bias=normal((B, 1, 1, S)), sink=normal(N)),
        "slopes, dropout": dict(
            alibi_slopes=rng.random((B, N)), dropout_rate=0.3, dropout_rng=jax.random.PRNGKey(1)
        ),
    }
    everything = {}
    for row in rows.values():
        everything |= row
    return rows | {"everything": everything}


OPTIONS = _option_rows()


def _operands(options, shape=(B, T, S)):
    """(operands with a derivative, the other arguments) in float64."""
    batch, q_len, kv_len = shape
    rng = np.random.default_rng(1)
    moving = {name: options[name] for name in DIFFERENTIABLE if name in options}
    moving |= {
        "query": rng.standard_normal((batch, q_len, N, H)),
        "key": rng.standard_normal((batch, kv_len, K, H)),
        "value": rng.standard_normal((batch, kv_len, K, VALUE_SIZE)),
    }
    return moving, {name: x for name, x in options.items() if name not in moving}


def _like(tree, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.standard_normal(np.shape(x)).astype(x.dtype), tree)


def _finite(x):
    return jnp.where(jnp.isfinite(x), x, 0)


def _loss(attend):
    """A scalar function of a dict of operands that depends on out and lse, unevenly."""

    def loss(operands):
        out, lse = attend(**operands, return_residual=True)
        weights = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
        return jnp.sum(jnp.sin(out) * weights) + jnp.sum(jnp.cos(_finite(lse))).astype(out.dtype)

    return loss


def _loss_of_jvp(attend):
    """The same of the values and tangents of attention."""

    def loss(operands, tangents):
        attend_all = functools.partial(attend, return_residual=True)
        (out, lse), (t_out, t_lse) = jax.jvp(
            lambda operands: attend_all(**operands), (operands,), (tangents,)
        )
        waves = jnp.sin(_finite(lse) + 2 * t_lse).astype(out.dtype)
        return jnp.sum(jnp.sin(out) * jnp.cos(t_out)) + jnp.sum(waves)

    return loss


def _jvp(attend):
    def run(operands, tangents):
        attend_all = functools.partial(attend, return_residual=True)
        return jax.jvp(lambda operands: attend_all(**operands), (operands,), (tangents,))

    return run


def _hvp(attend):
    return lambda operands, tangents: jax.jvp(jax.grad(_loss(attend)), (operands,), (tangents,))


def _grad_of_jvp(attend):
    return jax.grad(_loss_of_jvp(attend), (0, 1))


def _grad_of_grad(attend):
    def loss(operands, tangents):
        gradients = jax.tree.leaves(jax.grad(_loss(attend))(operands))
        weights = jax.tree.leaves(tangents)
        return sum(jnp.sum(jnp.sin(x) * w) for x, w in zip(gradients, weights, strict=True))

    return jax.grad(loss, (0, 1))


_TRANSFORMS = {
    "jvp": _jvp, "hvp": _hvp, "grad of jvp": _grad_of_jvp, "grad of grad": _grad_of_grad,
}  # fmt: skip


def _close(actual, expected, rtol=2e-4, atol=2e-5):
    paths = jax.tree_util.tree_leaves_with_path(actual)
    for (path, x), y in zip(paths, jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, rtol, atol, err_msg=jax.tree_util.keystr(path))


def _of_transforms(names, attend, options, *arguments):
    def run(*arguments):
        attend_with = functools.partial(attend, **options)
        return {name: _TRANSFORMS[name](attend_with)(*arguments) for name in names}

    return jax.jit(run)(*arguments)


@pytest.mark.parametrize("name", OPTIONS)
def test_second_order_is_that_of_the_reference(name):
    # The gradient of a jvp contains every pass; the others differ in how they are put together.
    names = _TRANSFORMS if name in ("grouped heads", "everything") else ["grad of jvp"]
    with jax.enable_x64(True):
        operands, options = _operands(OPTIONS[name])
        arguments = operands, _like(operands, 2)
        actual = _of_transforms(names, _blockwise_path, options, *arguments)
        _close(actual, _of_transforms(names, _dense, options, *arguments), 1e-10, 1e-10)


@pytest.mark.gpu
@pytest.mark.filterwarnings("error::jaxflash.SlowPathWarning")
@pytest.mark.parametrize("name", OPTIONS)
def test_tangents_of_all_operands_on_the_kernels(name):
    operands, options = _operands(OPTIONS[name])
    operands = jax.tree.map(np.float32, operands)

    def run(attend):
        attend = functools.partial(attend, precision="highest", **options)
        return jax.jit(_jvp(attend))(operands, _like(operands, 2))

    _close(run(functools.partial(_any_path, implementation="cuda")), run(_dense))


def test_third_order():
    with jax.enable_x64(True):
        operands, options = _operands(OPTIONS["everything"])
        tangents = _like(operands, 2)

        def run(attend):
            gradient = jax.grad(_loss_of_jvp(functools.partial(attend, **options)))
            moved = (operands, tangents), (_like(operands, 3), _like(operands, 4))
            return jax.jit(lambda moved: jax.jvp(gradient, *moved)[1])(moved)

        _close(run(_blockwise_path), run(_dense), 1e-10, 1e-10)


def test_lse_of_rows_that_see_no_key():
    """What is chosen after the fact has a NaN for a cotangent there, which goes nowhere."""
    operands, options = _operands(OPTIONS["broadcast bias, sink"])
    options["query_seq_lengths"] = np.array([T, 9], np.int32)

    def gradients(attend):
        def loss(operands):
            _, lse = attend(**operands, **options, return_residual=True)
            return jnp.sum(jnp.where(jnp.isfinite(lse), jnp.cos(lse), 0.0))

        def tangent(operands):
            return jax.jvp(loss, (operands,), (_like(operands, 2),))[1]

        return jax.jit(jax.grad(tangent))(operands)

    with jax.enable_x64(True):
        _close(gradients(_blockwise_path), gradients(_dense), 1e-10, 1e-10)


@pytest.fixture
def traces(monkeypatch):
    """How often each pass of the blockwise path is traced."""
    counts = collections.Counter()

    def counted(name):
        function = getattr(_blockwise, name)

        def traced(*args):
            counts[name] += 1
            return function(*args)

        monkeypatch.setattr(_blockwise, name, traced)

    for name in ("forward", "backward", "tangent"):
        counted(name)
    _primitive._traced_once.cache_clear()
    jax.clear_caches()
    return counts


def _loss_of_layers(x):
    """With as many layers as attention is traced once for."""
    for _ in range(3):
        x = jnp.sin(_any_path(x, x, x, is_causal=True))
    return jnp.sum(x)


@needs_kernels
@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_what_is_not_run_is_not_traced(traces, transform):
    """Neither the blockwise path in a program for CUDA, nor a tangent to be transposed."""
    gradient, shape = jax.grad(_loss_of_layers), (1, 24, 2, 8)
    if transform == "vmap":
        gradient, shape = jax.vmap(gradient), (3, *shape)
    traced = jax.jit(gradient).trace(jnp.zeros(shape, jnp.float32))
    assert not traces
    traced.lower(lowering_platforms=("cuda",))
    assert not traces
    traced.lower(lowering_platforms=("cpu",))
    assert traces == dict(forward=1, backward=1)


@pytest.mark.parametrize("name", OPTIONS)
def test_types_of_results_are_those_of_their_trace(name, monkeypatch):
    seen = set()

    def checked(op):
        of_op = op.result_types

        def result_types(self, types):
            found = of_op(self, types)
            traced = jax.make_jaxpr(_primitive._traced_once(self))(*types).out_avals
            assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in traced]
            seen.add((op, types[0].ndim))
            return found

        monkeypatch.setattr(op, "result_types", result_types)

    passes = _derivatives._Forward, _derivatives._Tangent, _derivatives._Gradient
    for op in passes:
        checked(op)
    jax.clear_caches()
    operands, options = _operands(OPTIONS[name])
    operands = {
        x: jnp.asarray(a, jnp.bfloat16 if x in ("query", "key", "value") else jnp.float32)
        for x, a in operands.items()
    }

    def run(operands):
        attend = functools.partial(_any_path, **options)
        return jax.grad(_loss(attend))(operands), _jvp(attend)(operands, operands)

    jax.make_jaxpr(run)(operands)
    jax.make_jaxpr(jax.vmap(run))(jax.tree.map(lambda x: jnp.stack((x, x)), operands))
    assert seen == {(op, 4) for op in passes}


_NUMERICALLY = {
    "who sees whom": ["band, bottom right", "lengths", "mask, segments"],
    "logits and probabilities": ["bias, soft cap", "slopes, dropout", "broadcast bias, sink"],
}


@pytest.mark.parametrize("names", _NUMERICALLY.values(), ids=_NUMERICALLY)
def test_against_finite_differences(names):
    with jax.enable_x64(True):
        options = {}
        for name in names:
            options |= OPTIONS[name]
        operands, others = _operands(options)

        @jax.jit
        def attend(operands):
            out, lse = _blockwise_path(**operands, **others, return_residual=True)
            return out, _finite(lse)

        check_grads(attend, (operands,), order=2, modes=("fwd", "rev"))


def test_varlen():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        operands = dict(
            query=rng.standard_normal((T, N, H)),
            key=rng.standard_normal((S, K, H)),
            value=rng.standard_normal((S, K, H)),
            alibi_slopes=rng.random(N),
        )
        edges = dict(
            cu_seqlens_q=np.array([0, 4, 4, 20], np.int32),
            cu_seqlens_kv=np.array([0, 7, 12, 33], np.int32),
        )
        options = dict(is_causal=True, causal_alignment="bottom_right", logits_soft_cap=3.0)

        def of(attend, **path):
            attend = functools.partial(attend, **edges, **path)
            return _of_transforms(["grad of jvp"], attend, options, operands, _like(operands, 2))

        actual = of(jaxflash.varlen_attention, implementation="xla")
        _close(actual, of(jaxflash.reference.varlen_attention), 1e-10, 1e-10)


# ---- Every transformation of JAX -----------------------------------------------------------------


def _qkv(*batch, seed=0, dtype=np.float32, head_dim=8, lengths=(T, S)):
    rng = np.random.default_rng(seed)
    q_len, kv_len = lengths
    shapes = ((q_len, N, head_dim), (kv_len, K, head_dim), (kv_len, K, head_dim))
    return tuple(rng.standard_normal((*batch, *s), np.float32).astype(dtype) for s in shapes)


def _both(attend, transform, *arguments):
    """`transform(attention)` on arguments gives what it gives for the reference."""
    actual = jax.jit(transform(functools.partial(attend, is_causal=True)))(*arguments)
    _close(actual, jax.jit(transform(functools.partial(_dense, is_causal=True)))(*arguments))


def _scalar_loss_of_jvp(attend):
    def loss(qkv, tangents):
        names = ("query", "key", "value")
        return _loss_of_jvp(attend)(*(dict(zip(names, x, strict=True)) for x in (qkv, tangents)))

    return loss


def _grad_of_grad_of_one_result(attend):
    """A gradient penalty, say: the loss knows nothing of the other result."""

    def run(qkv, tangents):
        def loss_of(result):
            def loss(qkv):
                return jnp.sum(jnp.sin(attend(*qkv, return_residual=True)[result]))

            def penalty(qkv):
                gradients = jax.grad(loss)(qkv)
                return sum(jnp.vdot(x, t) for x, t in zip(gradients, tangents, strict=True))

            return jax.grad(penalty)(qkv)

        return loss_of(0), loss_of(1)

    return run


def _mean_flow(attend):
    """Geng et al. 2025, "Mean Flows for One-step Generative Modeling": the target contains a
    tangent, and no gradient flows through it."""

    def loss(qkv, tangents):
        out, t_out = jax.jvp(attend, qkv, tangents)
        target = jax.lax.stop_gradient(0.5 - 0.3 * t_out)
        return jnp.mean((out - target) ** 2)

    return jax.value_and_grad(loss)


def _linearized(attend):
    def run(qkv, *many):
        out, linear = jax.linearize(attend, *qkv)
        return out, [linear(*tangents) for tangents in many]

    return run


def _tangents_of_one_operand(attend):
    def run(qkv, tangents):
        def of(i):
            def one(x):
                return attend(*qkv[:i], x, *qkv[i + 1 :], return_residual=True)

            return jax.jvp(one, (qkv[i],), (tangents[i],))[1]

        return [of(i) for i in range(3)]

    return run


def _transposed(attend):
    def run(qkv, tangents):
        query, key, value = qkv

        def of_value(value, dout):
            return jax.linear_transpose(lambda x: attend(query, key, x), value)(dout)

        dout = tangents[0]
        mapped = jax.vmap(of_value)(jnp.stack([value, 2 * value]), jnp.stack([dout, -dout]))
        return mapped, jax.jvp(functools.partial(of_value, value), (dout,), (query,))

    return run


def _layers(attend, wrap):
    def run(query, key, value):
        def layer(x, scale):
            return jnp.tanh(x + attend(x, key * scale, value)), None

        scales = jnp.array([1.0, 0.5], jnp.float32)
        return jnp.sum(jax.lax.scan(wrap(layer), query, scales)[0] ** 2)

    return run


_SAVED = functools.partial(
    jax.checkpoint,
    policy=jax.checkpoint_policies.save_only_these_names(jaxflash.CHECKPOINT_NAME),
)


def _all_of_layers(wrap):
    def transform(attend):
        loss = _layers(attend, wrap)

        def run(qkv, tangents):
            gradient = jax.grad(loss, (0, 1, 2))
            tangent = functools.partial(jax.jvp, loss, tangents=tangents)
            return (
                jax.jvp(gradient, qkv, tangents),
                jax.grad(lambda qkv: tangent(qkv)[1])(qkv),
            )

        return run

    return transform


def _in_a_branch(attend):
    def run(qkv, tangents):
        def branch(*qkv):
            return jax.lax.cond(jnp.sum(qkv[0]) < 1e6, attend, lambda q, k, v: 0 * q, *qkv)

        return jax.jvp(branch, qkv, tangents)

    return run


_ON_QKV = {
    "tangents of one operand": _tangents_of_one_operand,
    "linearize": _linearized,
    "linear_transpose": _transposed,
    "MeanFlow": _mean_flow,
    "grad of jvp": lambda attend: jax.grad(_scalar_loss_of_jvp(attend), (0, 1)),
    "grad of grad of one result": _grad_of_grad_of_one_result,
    "cond": _in_a_branch,
    "scan": _all_of_layers(lambda f: f),
    "checkpoint": _all_of_layers(jax.checkpoint),
    "checkpoint with names": _all_of_layers(_SAVED),
}


@pytest.mark.parametrize("transform", _ON_QKV.values(), ids=_ON_QKV)
def test_transform(attend, transform):
    _both(attend, transform, _qkv(B), _qkv(B, seed=1))


@needs_kernels
@pytest.mark.parametrize("transform", _ON_QKV.values(), ids=_ON_QKV)
def test_transform_lowers_for_the_kernels(transform):
    """Whatever JAX makes of a call on the way: nothing that has no derivative is left to be
    differentiated."""
    attend = functools.partial(jaxflash.dot_product_attention, implementation="cuda")
    traced = jax.jit(transform(attend)).trace(_qkv(B), _qkv(B, seed=1))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert _ffi.FORWARD_TARGET in text


def test_transposed_by_what_it_is_not_linear_in():
    query, key, value = _qkv(B)
    transposed = jax.linear_transpose(lambda x: _any_path(x, key, value), query)
    with pytest.raises(NotImplementedError, match=r"linear in value alone.* by query\n"):
        transposed(query)


def test_eager(attend):
    """Without jit around it."""
    qkv, tangents = _qkv(B), _qkv(B, seed=1)
    attend = functools.partial(attend, is_causal=True)
    dense = functools.partial(_dense, is_causal=True)
    _close(jax.jvp(attend, qkv, tangents), jax.jvp(dense, qkv, tangents))
    gradients = [jax.grad(_scalar_loss_of_jvp(f), (0, 1))(qkv, tangents) for f in (attend, dense)]
    _close(*gradients)


_JACOBIANS = {"jacfwd": jax.jacfwd, "jacrev": jax.jacrev, "hessian": jax.hessian}


@pytest.mark.parametrize("jacobian", _JACOBIANS.values(), ids=_JACOBIANS)
def test_jacobian(attend, jacobian):
    """Only tangents or cotangents are mapped."""

    def transform(attend):
        return jacobian(lambda *qkv: jnp.sum(attend(*qkv) ** 2, axis=(1, 2)), (0, 1, 2))

    _both(attend, transform, *_qkv(lengths=(3, 3), head_dim=2))


_IN_AXES = {"all": (0, 1, -1), "query": (0, None, None), "value": (None, None, 2)}


@pytest.mark.parametrize("in_axes", _IN_AXES.values(), ids=_IN_AXES)
def test_vmap(attend, in_axes):
    """Of tangents and of second derivatives, of some operands."""
    qkv = tuple(
        x if axis is None else np.stack([x, -x, 2 * x], axis)
        for x, axis in zip(_qkv(B), in_axes, strict=True)
    )
    tangents = _qkv(B, seed=1)

    def transform(attend):
        def of_one(*qkv):
            gradient = jax.grad(_scalar_loss_of_jvp(attend), (0, 1))(qkv, tangents)
            return jax.jvp(attend, qkv, tangents), gradient

        def of_all(*qkv):
            mapped = jax.vmap(attend, in_axes)
            moved = tuple(jnp.cos(x) for x in qkv)
            return jnp.sum(jnp.sin(jax.jvp(mapped, qkv, moved)[1]))

        return lambda *qkv: (jax.vmap(of_one, in_axes)(*qkv), jax.grad(of_all, (0, 1, 2))(*qkv))

    _both(attend, transform, *qkv)


def test_vmap_over_tangents_alone(attend):
    many = _qkv(3, B, seed=1)

    def transform(attend):
        return lambda qkv, many: jax.vmap(lambda t: jax.jvp(attend, qkv, t))(many)

    _both(attend, transform, _qkv(B), many)


def test_vmap_over_tangents_computes_probabilities_once():
    def run(qkv, many):
        return jax.vmap(lambda t: jax.jvp(_blockwise_path, qkv, t))(many)

    exponentials = [e for e in equations(run, _qkv(B), _qkv(7, B)) if e.primitive.name == "exp"]
    assert exponentials
    assert all(7 not in e.outvars[0].aval.shape for e in exponentials)


def test_nothing_is_computed_for_operands_that_do_not_move():
    qkv, tangents = _qkv(B), _qkv(B, seed=1)

    def count(*moving):
        def run(*moved):
            args = [dict(zip(moving, moved, strict=True)).get(i, x) for i, x in enumerate(qkv)]
            return _blockwise_path(*args)

        primals, moved = (tuple(x[i] for i in moving) for x in (qkv, tangents))
        return products(lambda *moved: jax.jvp(run, primals, moved)[1], *moved)

    forward = products(_blockwise_path, *qkv)
    assert [count(i) - forward for i in range(3)] == [3, 3, 2]
    assert count(0, 1, 2) - forward == 5


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradient_of_one_tile_computes_scores_once(dtype):
    """What XLA makes of scores, their two gradients, and those of probabilities and values."""
    arrays = [jax.ShapeDtypeStruct((1, 16, 4, 64), dtype)] * 4

    def loss(q, k, v, w):
        out = jaxflash.dot_product_attention(q, k, v, implementation="xla")
        return jnp.sum((out * w).astype(jnp.float32))

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arrays).compile()
    assert compiled.as_text().count(" dot(") == 5


# ---- Several devices, export ---------------------------------------------------------------------


def _all_derivatives(attend):
    def run(qkv, tangents):
        return (
            jax.jvp(attend, qkv, tangents),
            jax.grad(_scalar_loss_of_jvp(attend), (0, 1))(qkv, tangents),
        )

    return run


_SPLIT = PartitionSpec("b", None, "h")


@pytest.mark.usefixtures("cpu")
def test_sharded():
    mesh = cpu_mesh(b=4, h=2)
    arguments = _qkv(8), _qkv(8, seed=1)
    sharded = jax.device_put(arguments, NamedSharding(mesh, _SPLIT))
    compiled = jax.jit(_all_derivatives(_blockwise_path)).lower(*sharded).compile()
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in compiled.as_text()
    _close(compiled(*sharded), jax.jit(_all_derivatives(_dense))(*arguments))


@pytest.mark.usefixtures("cpu")
def test_shard_map():
    """Inside and around it, with keys that all devices share."""
    mesh = cpu_mesh(b=4, h=2)
    specs = (_SPLIT, PartitionSpec(None, None, "h"), PartitionSpec(None, None, "h"))
    (query, key, value), tangents = _qkv(8), _qkv(8, seed=1)
    arguments = (query, key[:1], value[:1]), (tangents[0], tangents[1][:1], tangents[2][:1])

    def of(attend, shard):
        def one_key(query, key, value):
            batch = query.shape[:1]
            return attend(query, *(jnp.broadcast_to(x, batch + x.shape[1:]) for x in (key, value)))

        def inside(qkv, tangents):
            return jax.jvp(one_key, qkv, tangents)

        around = one_key
        if shard:
            shard = functools.partial(jax.shard_map, mesh=mesh, check_vma=True)
            around = shard(one_key, in_specs=specs, out_specs=_SPLIT)
            inside = shard(inside, in_specs=(specs, specs), out_specs=(_SPLIT, _SPLIT))

        def run(qkv, tangents):
            def loss(qkv):
                return jnp.sum(jnp.sin(jax.jvp(around, qkv, tangents)[1]))

            return inside(qkv, tangents), jax.grad(loss)(qkv)

        return jax.jit(run)(*arguments)

    _close(of(_blockwise_path, True), of(_dense, False))


@pytest.mark.usefixtures("cpu")
def test_export():
    """For any batch size."""
    scope = export.SymbolicScope()

    def any_batch(x):
        shape = export.symbolic_shape("b, " + ", ".join(map(str, x.shape)), scope=scope)
        return jax.ShapeDtypeStruct(shape, x.dtype)

    run = _all_derivatives(jaxflash.dot_product_attention)
    shapes = jax.tree.map(any_batch, (_qkv(), _qkv()))
    exported = export.export(jax.jit(run), platforms=["cpu"])(*shapes)
    again = export.deserialize(exported.serialize())
    arguments = _qkv(B), _qkv(B, seed=1)
    _close(jax.jit(again.call)(*arguments), jax.jit(run)(*arguments), 1e-6, 1e-6)


# ---- What runs on the kernels --------------------------------------------------------------------


def _calls(function, *arguments) -> tuple[int, ...]:
    """Custom calls of the (forward, backward, tangent) kernels in a compiled program. Lowered for
    CUDA, it compiles for CPUs too; it does not run."""
    traced = jax.jit(function).trace(*arguments)
    text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    targets = (_ffi.FORWARD_TARGET, _ffi.BACKWARD_TARGET, _ffi.TANGENT_TARGET)
    return tuple(len(re.findall(f'custom_call_target="{target}"', text)) for target in targets)


def _kernels(*qkv):
    return jaxflash.dot_product_attention(*qkv, implementation="cuda")


def _gradient(attend, wanted=(0, 1, 2)):
    return jax.value_and_grad(lambda *qkv: jnp.sum(jnp.sin(attend(*qkv))), wanted)


def _mapped_gradient(*qkv):
    return jax.vmap(_gradient(_kernels), (0, None, None))(*qkv)


def _sharded_gradient(*qkv):
    attend = jax.shard_map(
        _kernels, mesh=cpu_mesh(b=4, h=2), in_specs=(_SPLIT,) * 3, out_specs=_SPLIT
    )
    return _gradient(attend)(*qkv)


_RUNS = {
    "value_and_grad": (_gradient(_kernels), (1, 1, 0)),
    "grad of one": (_gradient(_kernels, 1), (1, 1, 0)),
    "checkpoint with names": (_gradient(_SAVED(_kernels)), (1, 1, 0)),
    # Once in the loop of the forward, once in that of the backward.
    "scan": (jax.grad(_layers(_kernels, lambda f: f), (0, 1, 2)), (1, 1, 0)),
    "scan of checkpoints with names": (jax.grad(_layers(_kernels, _SAVED), (0, 1, 2)), (1, 1, 0)),
    "vmap": (lambda q, k, v: _mapped_gradient(jnp.stack([q, q]), k, v), (1, 1, 0)),
    "shard_map": (_sharded_gradient, (1, 1, 0)),
    "jvp": (lambda *qkv: jax.jvp(_kernels, qkv, qkv), (1, 0, 1)),
    "MeanFlow": (lambda *qkv: _mean_flow(_kernels)(qkv, qkv), (1, 1, 1)),
}


@needs_kernels
@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("name", _RUNS)
def test_calls_of_the_kernels(name):
    function, expected = _RUNS[name]
    assert _calls(function, *_qkv(8)) == expected


@needs_kernels
@pytest.mark.usefixtures("cpu")
def test_calls_of_the_kernels_of_sharded_arrays():
    sharded = jax.device_put(_qkv(8), NamedSharding(cpu_mesh(b=4, h=2), _SPLIT))
    assert _calls(_gradient(_kernels), *sharded) == (1, 1, 0)


@needs_kernels
def test_calls_of_the_kernels_in_an_exported_program():
    exported = export.export(
        jax.jit(_gradient(_kernels)), platforms=["cuda"], disabled_checks=jaxflash.EXPORT_CHECKS
    )(*_qkv(B))
    text = export.deserialize(exported.serialize()).mlir_module()
    for target in (_ffi.FORWARD_TARGET, _ffi.BACKWARD_TARGET):
        assert text.count(f"custom_call @{target}") == 1


# ---- Faults --------------------------------------------------------------------------------------


def test_hidden_tangents_reach_nothing():
    """NaN in the tangents of keys and values that no row sees, and of queries that see no key."""
    lengths = dict(
        query_seq_lengths=np.array([T, 9], np.int32),
        key_value_seq_lengths=np.array([S - 3, 0], np.int32),
    )
    qkv, clean = _qkv(B), _qkv(B, seed=1)
    dirty = [x.copy() for x in clean]
    dirty[0][1] = np.nan
    for x in dirty[1:]:
        x[0, S - 3 :] = np.nan
        x[1] = np.inf

    def run(attend, tangents):
        attend = functools.partial(attend, return_residual=True, **lengths)

        def loss(qkv, tangents):
            (out, lse), (t_out, t_lse) = jax.jvp(attend, qkv, tangents)
            return jnp.sum(out * t_out) + jnp.sum(_finite(lse) * t_lse)

        return jax.jit(lambda qkv, t: (jax.jvp(attend, qkv, t), jax.grad(loss, (0, 1))(qkv, t)))(
            qkv, tuple(tangents)
        )

    tangents, gradients = run(_blockwise_path, dirty)
    (expected, _) = run(_dense, clean)
    _close(tangents, expected)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
    for x in tangents[1]:  # rows without a key
        np.testing.assert_array_equal(x[1], 0)


@pytest.mark.parametrize("kv_len", [3, 16, 40])
def test_rows_outside_of_the_window_reach_nothing(kv_len):
    """NaN in queries that see no key and in their cotangents."""
    q_len, left = 24, 5
    q, k, v, w = (
        np.random.default_rng(n).standard_normal((1, n, 2, 8), np.float32)
        for n in (q_len, kv_len, kv_len, q_len)
    )
    sees = np.arange(q_len) - left < kv_len
    assert sees.all() == (kv_len == 40)
    for x in (q, w):
        x[:, ~sees] = np.nan

    def gradients(rows):
        def loss(q, k, v):
            out = jaxflash.dot_product_attention(
                q, k, v, local_window_size=(left, 0), implementation="xla"
            )
            return jnp.vdot(out, w[:, rows])

        return jax.grad(loss, (0, 1, 2))(q[:, rows], k, v)

    (dq, *dkv), (dq_seeing, *dkv_seeing) = gradients(slice(None)), gradients(slice(sees.sum()))
    _close((dq[:, sees], *dkv), (dq_seeing, *dkv_seeing))
    np.testing.assert_array_equal(dq[:, ~sees], 0)


@pytest.mark.parametrize("bottom_right", [False, True])
def test_which_bands_show_each_row_a_key(bottom_right):
    for q_len, kv_len, left, right in itertools.product(
        (1, 3, 8), (1, 3, 8), (None, -2, 0, 2, 9), (None, -2, 0, 2)
    ):
        arrays = (np.zeros((1, n, 1, 1), np.float32) for n in (q_len, kv_len, kv_len))
        operands = Operands(*arrays)
        spec = AttentionSpec(1.0, left, right, bottom_right, None, 0.0, True, False)
        tiles = Tiles(spec, operands, *_blockwise.tiling(spec, operands))
        offset = kv_len - q_len if bottom_right else 0
        difference = np.arange(q_len)[:, None] + offset - np.arange(kv_len)
        visible = np.ones(difference.shape, bool)
        if left is not None:
            visible &= difference <= left
        if right is not None:
            visible &= difference >= -right
        assert tiles.every_row_sees == visible.any(axis=1).all()


def test_integer_operands_have_no_tangent():
    lengths = np.array([S - 3, 4], np.int32)
    qkv, tangents = _qkv(B), _qkv(B, seed=1)

    def attend(*arguments):
        return _blockwise_path(*arguments[:3], key_value_seq_lengths=arguments[3])

    nothing = np.zeros(lengths.shape, jax.dtypes.float0)
    actual = jax.jvp(attend, (*qkv, lengths), (*tangents, nothing))
    expected = jax.jvp(lambda *qkv: attend(*qkv, lengths), qkv, tangents)
    _close(actual, expected, 0, 0)


def test_float16_overflows_to_infinity():
    """Where a tangent is out of range, and NaN nowhere: its sums are float32."""
    qkv = _qkv(B, dtype=np.float16)
    tangents = [x.astype(np.float16) for x in _qkv(B, seed=1)]
    tangents[0][0, 3] *= 6e4 / np.abs(tangents[0][0, 3]).max()
    out, t_out = jax.jvp(lambda *qkv: 64 * _blockwise_path(*qkv), qkv, tuple(tangents))
    assert np.isfinite(out).all()
    assert not np.isnan(t_out).any()
    rows = np.isinf(t_out).any(axis=(-2, -1))
    assert rows[0, 3]
    assert rows.sum() == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_error_of_tangents(dtype):
    """At most twice that of the plain computation in the same dtype, where the tangents of a row's
    logits differ little from each other and all but cancel."""
    qkv = _qkv(B, dtype=dtype, head_dim=16)
    t_query, t_key, t_value = _qkv(B, seed=1, head_dim=16)
    constant = np.float32(10)
    tangents = tuple(
        jnp.asarray(x, dtype) for x in (0 * t_query, t_key * 0.01 + constant, t_value * 0)
    )

    def tangent_of(attend, dtype):
        primals, moved = ([jnp.asarray(x, dtype) for x in xs] for xs in (qkv, tangents))
        return np.asarray(jax.jit(lambda p, t: jax.jvp(attend, p, t)[1])(primals, moved))

    def plain(query, key, value):
        key, value = (jnp.repeat(x, N // K, axis=-2) for x in (key, value))
        logits = jnp.einsum("btnh,bsnh->bnts", query, key) * jnp.asarray(16**-0.5, query.dtype)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), value)

    with jax.enable_x64(True):
        truth = tangent_of(_dense, np.float64)

    def error(attend):
        return np.abs(tangent_of(attend, dtype).astype(np.float64) - truth).max()

    unit = float(jnp.finfo(dtype).eps)
    assert error(_blockwise_path) <= 2 * error(plain) + unit * np.abs(truth).max()


def test_without_the_private_name_of_jax():
    """What a JAX without it has: reverse mode as ever, and clear errors for the rest."""
    code = """
import jax, jax.numpy as jnp, numpy as np
from jax._src import dispatch

needing_devices = dispatch.prim_requires_devices_during_lowering
del dispatch.prim_requires_devices_during_lowering
import jaxflash
dispatch.prim_requires_devices_during_lowering = needing_devices

jax.config.update("jax_default_matmul_precision", "highest")
rng = np.random.default_rng(0)
qkv = tuple(rng.standard_normal((2, 8, 2, 4), np.float32) for _ in range(3))

def of(attend):
    def loss(*qkv):
        out, lse = attend(*qkv, is_causal=True, return_residual=True)
        return jnp.sum(jnp.sin(out)) + jnp.sum(lse**2)
    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))

gradient = of(jaxflash.dot_product_attention)
expected = of(jaxflash.reference.dot_product_attention)(*qkv)
for x, y in zip(jax.tree.leaves(gradient(*qkv)), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
if jaxflash._extension.kernels:
    kernels = lambda *qkv: jnp.sum(jaxflash.dot_product_attention(*qkv, implementation="cuda"))
    traced = jax.jit(jax.value_and_grad(kernels, (0, 1, 2))).trace(*qkv)
    compiled = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    for target in (jaxflash._ffi.FORWARD_TARGET, jaxflash._ffi.BACKWARD_TARGET):
        assert compiled.count(f'custom_call_target="{target}"') == 1
try:
    jax.jvp(jaxflash.dot_product_attention, qkv, qkv)
except TypeError as error:
    assert "forward-mode" in str(error), error
else:
    raise AssertionError("jvp")
try:
    jax.grad(lambda *qkv: sum(jnp.sum(x) for x in gradient(*qkv)[1]))(*qkv)
except NotImplementedError as error:
    assert jax.__version__ in str(error), error
else:
    raise AssertionError("grad of grad")
"""
    run_python(code)
