"""Every transformation of JAX, against the same transformation of the plain reference."""

import functools
import math
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxflash
from check import assert_same_bits, on_gpu
from jaxflash import _api, _ffi, _kernel_program, _nvrtc, _ranges, _support, masks
from jaxprs import calls_of, equations, products
from marks import needs_kernels
from meshes import cpu_mesh

pytestmark = pytest.mark.usefixtures("accurate_products", "quick_compilation")
B, T, S, N, K, H = 2, 24, 20, 4, 2, 16

_dense = jaxflash.reference.dot_product_attention


def _qkv(*batch, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((*batch, T, N, H), (*batch, S, K, H), (*batch, S, K, H))
    return tuple(rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes)


def _loss(attend, **options):
    """A scalar function of query, key, value that depends on out and lse, unevenly."""

    def loss(query, key, value):
        out, lse = attend(query, key, value, return_residual=True, **options)
        weights = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
        seen = jnp.where(jnp.isfinite(lse), lse, 0)
        return jnp.sum(jnp.sin(out) * weights) + jnp.sum(seen**2).astype(out.dtype)

    return loss


def _close(actual, expected):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


def _both(attend, transform, *arguments):
    """`transform(attention)` on arguments gives what it gives for the reference."""
    actual = jax.jit(transform(attend))(*arguments)
    expected = jax.jit(transform(_dense))(*arguments)
    _close(actual, expected)


# ---- jit, grad, vmap ----------------------------------------------------------------------------


def test_jit_is_eager(attend):
    """To the bit; XLA's own products on a GPU follow what surrounds them."""
    qkv = _qkv(B)
    compare = (
        _close if on_gpu() and attend.keywords["implementation"] == "xla" else assert_same_bits
    )
    compare(jax.jit(attend)(*qkv), attend(*qkv))


def test_residual_changes_nothing(attend):
    qkv = _qkv(B)
    assert_same_bits(attend(*qkv), attend(*qkv, return_residual=True)[0])


def test_new_lengths_do_not_compile_again(attend):
    compiled = jax.jit(attend)
    for length in (S, 3, 0):
        compiled(*_qkv(B), key_value_seq_lengths=np.array([length, S], np.int32))
    assert compiled._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_some_gradients(attend, wanted):
    _both(attend, lambda f: jax.grad(_loss(f, is_causal=True), wanted), *_qkv(B))


@pytest.mark.parametrize("result", [0, 1], ids=["out", "lse"])
def test_gradient_of_one_result(attend, result):
    """The other one has a symbolic zero for its cotangent."""

    def transform(f):
        def loss(*qkv):
            return jnp.sum(jnp.cos(f(*qkv, return_residual=True)[result]))

        return jax.grad(loss, (0, 1, 2))

    _both(attend, transform, *_qkv(B))


_IN_AXES = {
    "query": (0, None, None),
    "key": (None, 0, None),
    "value": (None, None, 0),
    "key and value": (None, 0, 0),
    "odd axes": (1, 2, 4),
    "last axes": (-1, None, -2),
}


def _mapped_arrays(in_axes, size=3):
    arrays = []
    for axis, x, i in zip(in_axes, _qkv(B), range(3), strict=True):
        if axis is not None:
            rng = np.random.default_rng(i)
            x = np.stack([x, *rng.standard_normal((size - 1, *x.shape), np.float32)], axis)
        arrays.append(x)
    return arrays


@pytest.mark.parametrize("in_axes", _IN_AXES.values(), ids=_IN_AXES)
def test_vmap(attend, in_axes):
    """vmap, vmap of grad and grad of vmap in one program."""

    def transform(f):
        f = functools.partial(f, is_causal=True)
        gradient = jax.grad(_loss(f), (0, 1, 2))

        def total(*qkv):
            losses = jax.vmap(_loss(f), in_axes)(*qkv)
            return jnp.vdot(jnp.cos(jnp.arange(losses.size, dtype=losses.dtype)), losses)

        def run(*qkv):
            return (
                jax.vmap(f, in_axes)(*qkv),
                jax.vmap(gradient, in_axes)(*qkv),
                jax.grad(total, (0, 1, 2))(*qkv),
            )

        return run

    _both(attend, transform, *_mapped_arrays(in_axes))


def test_nested_vmap(attend):
    """Every operand mapped by another subset of three maps, unbatched inside."""
    rng = np.random.default_rng(0)
    query = rng.standard_normal((2, 3, T, N, H), np.float32)
    key = rng.standard_normal((S, 2, K, H), np.float32)
    value = rng.standard_normal((3, S, 2, K, H), np.float32)

    def transform(f):
        inner = jax.grad(_loss(f), (0, 1, 2))
        inner = jax.vmap(inner, (0, None, 1))
        inner = jax.vmap(inner, (None, 1, None))
        return jax.vmap(inner, (1, None, 0))

    _both(attend, transform, query, key, value)


def test_numpy_constants_under_vmap(attend):
    """Mapped, inside a compiled function: they reach the differentiation rule as they are."""
    arrays = _mapped_arrays((0, 0, 0))
    gradient = jax.vmap(jax.grad(_loss(attend), (0, 1, 2)))
    _close(jax.jit(lambda: gradient(*arrays))(), gradient(*map(jnp.asarray, arrays)))


def test_vmap_over_lengths(attend):
    lengths = np.array([[S, 3], [0, 7], [5, 5]], np.int32)

    def transform(f):
        def run(query, key, value, lengths):
            def loss(*qkv):
                return _loss(f, key_value_seq_lengths=lengths)(*qkv)

            return jax.grad(loss, (0, 1, 2))(query, key, value)

        return jax.vmap(run, (None, None, None, 0))

    _both(attend, transform, *_qkv(B), lengths)


def test_vmap_over_lengths_of_several_blocks():
    """The loops end at the longest sequence, whatever is mapped; what follows stays 0."""
    rng = np.random.default_rng(0)
    shapes = ((1, 300, 16, 4), (1, 700, 16, 4), (1, 700, 16, 4))
    qkv = [rng.standard_normal(shape, np.float32) for shape in shapes]
    q_lengths = np.array([[3], [140], [0]], np.int32)
    kv_lengths = np.array([[700], [5], [600]], np.int32)

    def transform(f):
        def run(q_length, kv_length):
            options = dict(query_seq_lengths=q_length, key_value_seq_lengths=kv_length)
            return jax.value_and_grad(_loss(f, **options), (0, 1, 2))(*qkv)

        return lambda q, kv: (jax.vmap(run)(q, kv), jax.vmap(run, (None, 0))(q[1], kv))

    attend = functools.partial(jaxflash.dot_product_attention, implementation="xla")
    _both(attend, transform, q_lengths, kv_lengths)


def test_vmap_over_features():
    """A mapped bias and mapped sinks on shared arrays, and their gradients."""
    rng = np.random.default_rng(0)
    bias = rng.standard_normal((3, N, T, S), np.float32)
    sink = rng.standard_normal((N, 3), np.float32)
    ids = np.sort(rng.integers(0, 3, (3, B, T)), axis=-1)

    def transform(f):
        def loss(query, key, value, bias, sink, ids):
            options = dict(bias=bias, sink=sink, segment_ids=(ids, ids[:, :S]))
            return _loss(f, **options)(query, key, value)

        gradient = jax.grad(loss, (0, 1, 2, 3, 4))
        return jax.vmap(gradient, (None, None, None, 0, 1, 0))

    attend = functools.partial(jaxflash.dot_product_attention, implementation="xla")
    _both(attend, transform, *_qkv(B), bias, sink, ids)


def test_vmap_draws_dropout_per_key():
    """Mapped keys give what each key gives alone."""
    keys = jax.random.split(jax.random.key(0), 3)
    qkv = _qkv(B)

    def dropped(key):
        return jaxflash.dot_product_attention(
            *qkv, dropout_rate=0.5, dropout_rng=key, implementation="xla"
        )

    mapped = jax.jit(jax.vmap(dropped))(keys)
    assert not np.allclose(mapped[0], mapped[1])
    for i in range(3):
        np.testing.assert_allclose(mapped[i], dropped(keys[i]), rtol=1e-5, atol=1e-6)


def test_many_leading_axes(attend):
    """More axes than the kernels have strides for."""
    axes = (2, *(1,) * 8, 2)
    _both(attend, lambda f: jax.grad(_loss(f), (0, 1, 2)), *_qkv(*axes))


def test_jacrev(attend):
    """Only the cotangent is mapped."""
    qkv = tuple(x[:3] for x in _qkv())

    def transform(f):
        return jax.jacrev(lambda *qkv: jnp.sum(f(*qkv), axis=(0, 1)), (0, 1, 2))

    _both(attend, transform, *qkv)


def test_scan(attend):
    """Layers with and without rematerialisation of what has no name."""
    policy = jax.checkpoint_policies.save_only_these_names(jaxflash.CHECKPOINT_NAME)

    def transform(f):
        def run(query, key, value):
            def layer(x, scale):
                x = x + f(x, key * scale, value, is_causal=True)
                return jnp.tanh(x), None

            layer = jax.checkpoint(layer, policy=policy)
            scales = jnp.arange(1, 4, dtype=query.dtype)
            return jnp.sum(jax.lax.scan(layer, query, scales)[0] ** 2)

        return jax.grad(run, (0, 1, 2))

    _both(attend, transform, *_qkv(B))


@pytest.mark.parametrize("path", ["xla", pytest.param("cuda", marks=needs_kernels)])
def test_checkpoint_runs_the_forward_once(path):
    qkv = _qkv(B)
    forward = functools.partial(jaxflash.dot_product_attention, implementation=path)

    def loss(wrap):
        return jax.grad(lambda *qkv: jnp.sum(jnp.sin(wrap(forward)(*qkv))), (0, 1, 2))

    saves = jax.checkpoint_policies.save_only_these_names(jaxflash.CHECKPOINT_NAME)
    once = products(forward, *qkv)
    without = products(loss(lambda f: f), *qkv)
    assert 0 < once < without
    assert products(loss(functools.partial(jax.checkpoint, policy=saves)), *qkv) == without
    assert products(loss(jax.checkpoint), *qkv) == without + once
    if path == "cuda":
        named = loss(functools.partial(jax.checkpoint, policy=saves))
        assert calls_of(_ffi.FORWARD_TARGET, named, *qkv) == 1
        assert calls_of(_ffi.BACKWARD_TARGET, named, *qkv) == 1


def test_no_bias_gradient_unless_asked_for():
    bias = np.zeros((B, N, T, S), np.float32)

    def count(wanted):
        def loss(query, key, value, bias):
            return jnp.sum(jaxflash.dot_product_attention(query, key, value, bias))

        return sum(1 for _ in equations(jax.grad(loss, wanted), *_qkv(B), bias))

    assert count((0, 1, 2)) < count((0, 1, 2, 3))


def test_traced_scale(attend):
    """Its value and gradient, mapped too; another one compiles nothing new."""
    query, key, value = _qkv(B)
    scales = np.array([0.1, -1.5, 0.0], np.float32)

    def transform(f):
        def loss(scale, query, key, value):
            return _loss(f, is_causal=True, scale=scale)(query, key, value)

        return jax.vmap(jax.value_and_grad(loss, (0, 1, 2, 3)), (0, None, None, None))

    _both(attend, transform, scales, query, key, value)
    compiled = jax.jit(lambda scale: attend(query, key, value, scale=scale))
    for scale in scales:
        _close(compiled(scale), attend(query, key, value, scale=float(scale)))
    assert compiled._cache_size() == 1


# ---- Other dtypes -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_traced_scale_of_other_dtypes(attend, dtype):
    """Neither is promoted to the other: JAX may be told not to."""
    qkv = [x.astype(dtype) for x in _qkv(B)]
    scaled = jax.jit(lambda scale: attend(*qkv, scale=scale))(np.float32(0.5))
    assert scaled.dtype == dtype
    # A power of two: rounding the scaled query changes nothing.
    np.testing.assert_allclose(
        scaled.astype(np.float32), attend(*qkv, scale=0.5).astype(np.float32), 1e-2, 1e-2
    )


def test_float64():
    with jax.enable_x64(True):
        qkv = tuple(x.astype(np.float64) for x in _qkv(B))
        options = dict(is_causal=True)
        loss = _loss(jaxflash.dot_product_attention, **options)
        actual = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*qkv)
        expected = jax.jit(jax.value_and_grad(_loss(_dense, **options), (0, 1, 2)))(*qkv)
        for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            assert x.dtype == np.float64
            np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-12)
        out, lse = jaxflash.dot_product_attention(*qkv, return_residual=True)
        assert out.dtype == lse.dtype == np.float64
        scaled = jax.jit(lambda scale: jaxflash.dot_product_attention(*qkv, scale=scale))
        expected = jaxflash.dot_product_attention(*qkv, scale=0.5)
        np.testing.assert_allclose(scaled(np.float32(0.5)), expected, rtol=1e-11, atol=1e-12)


def test_x64_mode_changes_nothing(attend):
    """Nothing of the call turns into int64 or float64 because it could."""
    qkv = _qkv(B)
    options = dict(is_causal=True, local_window_size=7, causal_alignment="bottom_right")
    run = functools.partial(attend, return_residual=True, **options)
    expected = run(*qkv)
    with jax.enable_x64(True):
        lengths = np.full(B, S, np.int32)
        actual = jax.jit(run)(*qkv, key_value_seq_lengths=lengths)
        gradients = jax.jit(jax.grad(_loss(attend, **options), (0, 1, 2)))(*qkv)
    assert [x.dtype for x in jax.tree.leaves((actual, gradients))] == [np.float32] * 5
    _close(actual, expected)


# ---- Export, ahead-of-time lowering -------------------------------------------------------------


def _gradients(query, key, value):
    attend = functools.partial(jaxflash.dot_product_attention, is_causal=True)
    return attend(query, key, value), jax.grad(_loss(attend), (0, 1, 2))(query, key, value)


def _on_cpu(tree):
    return jax.device_put(tree, jax.devices("cpu")[0])


def test_export_round_trip():
    qkv = _on_cpu(_qkv(B))
    exported = export.export(jax.jit(_gradients), platforms=["cpu"])(*qkv)
    again = export.deserialize(exported.serialize())
    assert_same_bits(jax.jit(again.call)(*qkv), jax.jit(_gradients)(*qkv))


@pytest.mark.usefixtures("cpu")
def test_export_of_a_derivative():
    qkv = _qkv(B)
    attend = jax.jit(functools.partial(jaxflash.dot_product_attention, is_causal=True))
    exported = export.export(attend, platforms=["cpu"])(*qkv)
    again = export.deserialize(exported.serialize(vjp_order=1))
    actual = jax.grad(lambda *qkv: jnp.sum(jnp.sin(again.call(*qkv))), (0, 1, 2))(*qkv)
    expected = jax.grad(lambda *qkv: jnp.sum(jnp.sin(attend(*qkv))), (0, 1, 2))(*qkv)
    _close(actual, expected)


def _symbolic(dtype=np.float32):
    scope = export.SymbolicScope()
    trailing = ((T, N, H), (S, K, H), (S, K, H))
    return [
        jax.ShapeDtypeStruct(
            export.symbolic_shape("b, " + ", ".join(map(str, shape)), scope=scope), dtype
        )
        for shape in trailing
    ]


def _types(shapes, dtypes):
    """Of symbolic shapes, in which equal names are equal sizes."""
    scope = export.SymbolicScope()
    return [
        jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


def test_export_with_a_symbolic_batch():
    exported = export.export(jax.jit(_gradients), platforms=["cpu"])(*_symbolic())
    again = export.deserialize(exported.serialize())
    for batch in (1, 3):
        qkv = _on_cpu(_qkv(batch))
        # The loss divides by the size of the array, which is symbolic too.
        _close(jax.jit(again.call)(*qkv), jax.jit(_gradients)(*qkv))


def _everything(bias, lengths, ids, key_ids, slopes):
    return dict(
        bias=bias, key_value_seq_lengths=lengths, segment_ids=(ids, key_ids), alibi_slopes=slopes,
        local_window_size=(700, 50), causal_alignment="bottom_right", dropout_rate=0.2,
        dropout_rng=np.array([1, 2], np.uint32),
    )  # fmt: skip


_OVER_LENGTHS = [
    ("bias", "4, t, s"),
    ("bias", "b, 1, 1, s"),
    ("mask", "b, 1, t, s"),
    ("mask", "1, 4, t, s"),
    ("mask", "b, 1, 1, s"),
    ("mask", "b, 4, t, 1"),
    ("score_mod", "t"),
]


def _over_lengths(option, shape):
    """Types of query, key and the array of an option, of symbolic sizes of a scope of their own."""
    scope = export.SymbolicScope()
    dtypes = np.float32, np.float32, np.bool_ if option == "mask" else np.float32
    return [
        jax.ShapeDtypeStruct(export.symbolic_shape(own, scope=scope), dtype)
        for own, dtype in zip(("b, t, 4, 8", "b, s, 2, 8", shape), dtypes, strict=True)
    ]


def _of_lengths(option, shape, **sizes):
    """Such arrays."""
    rng = np.random.default_rng(0)
    query, key, array = (
        rng.standard_normal([sizes.get(n) or int(n) for n in own.split(", ")], np.float32)
        for own in ("b, t, 4, 8", "b, s, 2, 8", shape)
    )
    return query, key, array > 0.5 if option == "mask" else array


def _with_array(option, array):
    if option == "score_mod":  # by a negative index, too
        return dict(score_mod=lambda score, b, h, q, kv: score + array[q - kv])
    return {option: array}


@pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("option", "shape"), _OVER_LENGTHS)
def test_export_of_arrays_over_symbolic_lengths(option, shape, platform):
    """Gradients, for CPU and, with the kernels where there are any, for CUDA; again in another
    scope, whose sizes have the same names."""
    has_kernels = bool(_ffi.extension.kernels) and _nvrtc.reason_against() is None

    def gradients(*arguments, path=None):
        def loss(query, key, array):
            out = jaxflash.dot_product_attention(
                query, key, key, precision="highest", implementation=path,
                **_with_array(option, array),
            )  # fmt: skip
            return jnp.sum(jnp.sin(out))

        return jax.grad(loss, (0, 1) if option == "mask" else (0, 1, 2))(*arguments)

    for _ in range(2):
        with warnings.catch_warnings():
            _support._warned.clear()
            warnings.simplefilter("error" if has_kernels else "ignore", jaxflash.SlowPathWarning)
            exported = export.export(
                jax.jit(gradients),
                platforms=["cpu", "cuda"],
                disabled_checks=jaxflash.EXPORT_CHECKS,
            )(*_over_lengths(option, shape))
        assert (f"@{_ffi.BACKWARD_TARGET}" in exported.mlir_module()) == has_kernels
    expected = jax.jit(functools.partial(gradients, path="xla"))
    for sizes in (dict(b=2, t=24, s=20), dict(b=1, t=130, s=70)):
        arrays = _of_lengths(option, shape, **sizes)
        placed = jax.device_put(arrays, jax.devices(platform)[0])
        _close(jax.jit(exported.call)(*placed), expected(*_on_cpu(arrays)))


def _attend_segments(query, key, query_ids, key_ids, **options):
    return jaxflash.dot_product_attention(
        query, key, key, segment_ids=(query_ids, key_ids), is_causal=True, **options
    )


def _attend_strided_segments(*arguments, **options):
    stride = jaxflash.masks.function(lambda b, h, q, kv: (q - kv) % 3 != 1)
    return _attend_segments(*arguments, mask=stride, **options)


def _attend_packed(query, key, *boundaries, **options):
    return jaxflash.varlen_attention(query, key, key, *boundaries, is_causal=True, **options)


@pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("attend", "shapes"),
    [
        (_attend_segments, ("b, t, 4, 16", "b, s, 2, 16", "b, t", "b, s")),
        (_attend_strided_segments, ("b, t, 4, 16", "b, s, 2, 16", "b, t", "b, s")),
        (_attend_packed, ("t, 4, 16", "s, 2, 16", "b", "b")),
    ],
)
def test_export_of_segments_of_symbolic_lengths(attend, shapes, platform):
    """Gradients, for CPU and, with the kernels where there are any, for CUDA."""
    has_kernels = bool(_ffi.extension.kernels) and _nvrtc.reason_against() is None

    def gradients(query, key, *of_mask, path=None):
        def loss(query, key):
            out = attend(query, key, *of_mask, precision="highest", implementation=path)
            return jnp.sum(jnp.sin(out))

        return jax.value_and_grad(loss, (0, 1))(query, key)

    dtypes = np.float32, np.float32, np.int32, np.int32
    symbolic = _types(shapes, dtypes)
    with warnings.catch_warnings():
        _support._warned.clear()
        warnings.simplefilter("error" if has_kernels else "ignore", jaxflash.SlowPathWarning)
        exported = export.export(
            jax.jit(gradients), platforms=["cpu", "cuda"], disabled_checks=jaxflash.EXPORT_CHECKS
        )(*symbolic)
    assert (f"@{_ffi.BACKWARD_TARGET}" in exported.mlir_module()) == has_kernels
    expected = jax.jit(functools.partial(gradients, path="xla"))
    rng = np.random.default_rng(0)
    for sizes in (dict(b=3, t=24, s=20), dict(b=2, t=300, s=170)):
        arrays = []
        for shape, dtype in zip(shapes, dtypes, strict=True):
            shape = [sizes.get(n.strip()) or int(n) for n in shape.split(",")]
            if dtype == np.float32:
                arrays.append(rng.standard_normal(shape, np.float32))
            else:
                arrays.append(np.sort(rng.integers(0, 20, shape).astype(np.int32)))
        placed = jax.device_put(arrays, jax.devices(platform)[0])
        _close(jax.jit(exported.call)(*placed), expected(*_on_cpu(arrays)))


@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize(("option", "shape"), [x for x in _OVER_LENGTHS if x[0] != "score_mod"])
def test_programs_over_symbolic_lengths(option, shape, pass_):
    """They are those of lengths that nothing divides, as sizes are read from the arrays."""

    def program(query, key, array):
        return _kernel_program.make(*_api.described(query, key, key, **{option: array}), pass_)

    expected = program(*_of_lengths(option, shape, b=2, t=197, s=321))
    assert expected is not None
    assert program(*_over_lengths(option, shape)) == expected


@pytest.mark.parametrize("shape", [shape for option, shape in _OVER_LENGTHS if option == "mask"])
def test_ranges_of_symbolic_lengths(shape):
    """What the kernels can skip of a mask."""

    @jax.jit
    def ranges(query, key, mask):
        spec, operands = _api.described(query, key, key, mask=mask)
        found = _ranges.of_call(spec, operands, *_ranges.of_dense_mask(operands))
        assert found is not None
        return found[:5]  # without the ids of segments

    exported = export.export(ranges, platforms=["cpu"])(*_over_lengths("mask", shape))
    for sizes in (dict(b=2, t=25, s=33), dict(b=1, t=1, s=3), dict(b=2, t=197, s=321)):
        arrays = _on_cpu(_of_lengths("mask", shape, **sizes))
        for actual, expected in zip(exported.call(*arrays), ranges(*arrays), strict=True):
            np.testing.assert_array_equal(_intervals(actual), _intervals(expected))


def _intervals(x):
    """Pairs (begin, end), empty ones as (0, 0)."""
    pairs = np.asarray(x).reshape(*x.shape[:-1], -1, 2)
    return np.where(pairs[..., :1] < pairs[..., 1:], pairs, 0)


@pytest.mark.parametrize("features", [False, True], ids=["causal", "features"])
def test_export_with_symbolic_lengths(features):
    """One program for all lengths: shorter than a block, and longer."""

    def run(query, key, value, *others):
        options = _everything(*others) if features else dict(is_causal=True)

        def loss(query, key, value):
            out, lse = jaxflash.dot_product_attention(
                query, key, value, return_residual=True, implementation="xla", **options
            )
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(lse > -jnp.inf, jnp.cos(lse), 0))

        return jax.value_and_grad(loss, (0, 1, 2))(query, key, value)

    dtypes = [np.float32] * 3 + ([np.float32] + [np.int32] * 3 + [np.float32]) * features
    shapes = ["b, t, 4, 8", "b, s, 2, 8", "b, s, 2, 8"]
    shapes += ["4, t, s", "b", "b, t", "b, s", "4"] * features
    symbolic = _types(shapes, dtypes)
    exported = export.export(jax.jit(run), platforms=["cpu"])(*symbolic)
    again = jax.jit(export.deserialize(exported.serialize()).call)
    rng = np.random.default_rng(0)
    short = dict(b=2, t=24, s=20) if features else dict(b=1, t=1, s=1)
    for sizes in (short, dict(b=1, t=40, s=1100)):
        arrays = []
        for shape, dtype in zip(shapes, dtypes, strict=True):
            shape = [sizes.get(n.strip()) or int(n) for n in shape.split(",")]
            if dtype == np.float32:
                arrays.append(rng.standard_normal(shape, np.float32))
            else:
                arrays.append(rng.integers(1, 3 + 20 * (len(shape) == 1), shape).astype(np.int32))
        arrays = _on_cpu(arrays)
        _close(again(*arrays), jax.jit(run)(*arrays))


_OPEN_SIZES = {
    "open heads": ("b, 24, 2*n, 8", "b, 20, n, 8", "b, 24", "b, 20"),
    "an open head size": ("b, 24, 4, d", "b, 20, 2, d", "b, 24", "b, 20"),
}


@pytest.mark.parametrize("shapes", _OPEN_SIZES.values(), ids=_OPEN_SIZES)
def test_export_of_sizes_that_the_kernels_need(shapes):
    """The blockwise path does without; on CUDA it warns."""

    def gradient(query, key, query_ids, key_ids, implementation=None):
        def loss(query, key):
            out = jaxflash.dot_product_attention(
                query, key, key, segment_ids=(query_ids, key_ids), scale=0.5,
                implementation=implementation,
            )  # fmt: skip
            return jnp.sum(jnp.sin(out))

        return jax.grad(loss, (0, 1))(query, key)

    dtypes = np.float32, np.float32, np.int32, np.int32
    symbolic = _types(shapes, dtypes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jaxflash.SlowPathWarning)
        exported = export.export(jax.jit(gradient), platforms=["cpu", "cuda"])(*symbolic)
    query, key, _ = _qkv(B)
    ids = (np.tile(np.arange(n, dtype=np.int32) // 7, (B, 1)) for n in (T, S))
    arguments = _on_cpu([query[..., :8], key[..., :8], *ids])
    _close(jax.jit(exported.call)(*arguments), jax.jit(gradient)(*arguments))
    if _ffi.extension.kernels:
        with pytest.raises(NotImplementedError, match="when the program is exported"):
            jax.eval_shape(functools.partial(gradient, implementation="cuda"), *symbolic)


@needs_kernels
@pytest.mark.parametrize("path", ["cuda", None])
def test_gradient_exports_for_cuda_with_symbolic_lengths(path):
    attend = functools.partial(jaxflash.dot_product_attention, is_causal=True, implementation=path)
    symbolic = _types(("b, t, 4, 64", "b, s, 2, 64", "b, s, 2, 64"), (jnp.bfloat16,) * 3)
    step = jax.jit(jax.grad(_loss(attend), (0, 1, 2)))
    exported = export.export(step, platforms=["cuda"], disabled_checks=jaxflash.EXPORT_CHECKS)
    assert _ffi.BACKWARD_TARGET in exported(*symbolic).mlir_module()


@needs_kernels
@pytest.mark.parametrize("symbolic", [False, True])
def test_export_for_cuda(symbolic):
    shapes = _symbolic(jnp.bfloat16) if symbolic else _qkv(B, dtype=jnp.bfloat16)
    exported = export.export(
        jax.jit(_gradients), platforms=["cpu", "cuda"], disabled_checks=jaxflash.EXPORT_CHECKS
    )(*shapes)
    again = export.deserialize(exported.serialize())
    assert again.platforms == ("cpu", "cuda")
    for target in (_ffi.FORWARD_TARGET, _ffi.BACKWARD_TARGET):
        assert target in again.mlir_module()


def _workspace_bytes(batch, q_len, kv_len, heads, kv_heads, left=1 << 30, right=1 << 30):
    return _ffi.extension.forward_workspace_bytes(
        dtype="bfloat16", batch=batch, q_len=q_len, kv_len=kv_len, q_heads=heads,
        kv_heads=kv_heads, head_dim=64, value_dim=64, left=left, right=right,
    )  # fmt: skip


@needs_kernels
def test_reasons_against_symbolic_sizes():
    def supported(query, key, **options):
        query, key = _types((query, key), (jnp.bfloat16,) * 2)
        first, *_ = jaxflash.supported(query, key, key, **options)
        return first

    assert supported("b, t, 2*n, 64", "b, s, n, 64").startswith("number of query heads 2*n: ")
    (size,) = export.symbolic_shape("2*s")

    def score_mod(score, b, h, q, kv):
        return jnp.where(kv < size, score, 0.0)

    reason = supported("b, 3, 8, 64", "b, s, 2, 64", score_mod=score_mod)
    assert reason.startswith("score_mod depends on a symbolic size that no array has, 2*s")


@needs_kernels
@pytest.mark.parametrize("heads", [(1, 1), (8, 2), (64, 8), (128, 128)])
def test_export_for_cuda_with_symbolic_lengths(heads):
    """The workspace is enough for every batch and length that the program may be called with."""
    scope = export.SymbolicScope()
    query, key = (
        jax.ShapeDtypeStruct(export.symbolic_shape(f"b, {n}, {h}, 64", scope=scope), jnp.bfloat16)
        for n, h in zip("ts", heads, strict=True)
    )
    attend = functools.partial(jaxflash.dot_product_attention, implementation="cuda")
    exported = export.export(
        jax.jit(attend), platforms=["cuda"], disabled_checks=jaxflash.EXPORT_CHECKS
    )(query, key, key)
    (planned,) = re.findall(r"@jaxflash_forward_v\d.*tensor<(\d+)xui8>", exported.mlir_module())
    most = max(
        _workspace_bytes(batch, q_len, 1 << 20, *heads)
        for batch in (1, 2, 50, 4000)
        for q_len in (1, 2, 3, 5, 31, 33, 63, 64, 65, 100, 128, 129, 192, 193, 1000, 20000)
    )
    assert 0 < most <= int(planned)


@needs_kernels
def test_workspace_of_the_forward_pass():
    """None where no keys are shared, little where there are few rows."""
    assert _workspace_bytes(4, 4096, 4096, 16, 16) == 0
    assert _workspace_bytes(8, 1, 1024, 32, 8) == 0
    assert _workspace_bytes(8, 1, 100_000, 32, 8, left=500, right=0) == 0
    assert 0 < _workspace_bytes(64, 1, 8192, 32, 8) < 1 << 20
    assert 0 < _workspace_bytes(1, 300, 8192, 8, 8) < 20 << 20


# Where keys are not shared, the counter of drawn tiles (cuda/common/key_shares.h).
_COUNTER_BYTES = 4


def _sharing_of_programs(text: str) -> tuple[int, int]:
    """(shared units, bytes of workspace) of the forward pass that a lowered program holds."""
    (call,) = (line for line in text.splitlines() if f"@{_ffi.FORWARD_TARGET}" in line)
    (units,), (workspace,) = (
        re.findall(pattern, call)
        for pattern in (r"shared_units = (\d) : i64", r"tensor<(\d+)xui8>")
    )
    return int(units), int(workspace)


@needs_kernels
@pytest.mark.parametrize(
    ("query", "key", "options", "units"),
    [
        ((8, 1, 32, 64), (8, 8192, 8, 64), {}, 1),
        ((8, 16, 32, 64), (8, 8192, 8, 64), {}, 1),
        ((8, 17, 32, 64), (8, 8192, 8, 64), {}, 2),
        ((64, 64, 8, 64), (64, 1025, 8, 64), {}, 1),
        ((1, 300, 8, 64), (1, 8192, 8, 64), dict(is_causal=True), 2),
        ((8, 1, 32, 64), (8, 1024, 8, 64), {}, 0),
        ((8, 1, 32, 64), (8, 8192, 8, 64), dict(local_window_size=(1000, 0)), 0),
        ((1, 2048, 16, 64), (1, 2048, 16, 64), {}, 0),
        ((1, 2048, 8, 64), (1, 2048, 8, 64), {}, 0),  # a plain call shares
        ((4, 4096, 16, 64), (4, 4096, 16, 64), dict(is_causal=True), 0),
        ((64, 64, 32, 64), (64, 8192, 8, 64), {}, 0),  # a plain call shares
        # Of a symbolic batch or cache few queries share, many do not; a symbolic number of them
        # never does.
        (("b", "1", "32", "64"), ("b", "s", "8", "64"), {}, 1),
        (("b", "48", "8", "64"), ("b", "8192", "8", "64"), {}, 1),
        (("b", "512", "32", "64"), ("b", "s", "8", "64"), {}, 0),
        (("1", "t", "8", "64"), ("1", "8192", "8", "64"), {}, 0),
    ],
)
def test_programs_that_share_keys(query, key, options, units):
    scope = export.SymbolicScope()
    query, key = (
        x if isinstance(x[0], int) else export.symbolic_shape(", ".join(x), scope=scope)
        for x in (query, key)
    )
    query, key = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in (query, key))
    attend = functools.partial(
        jaxflash.dot_product_attention, implementation="cuda", logits_soft_cap=20.0, **options
    )
    exported = export.export(
        jax.jit(attend), platforms=["cuda"], disabled_checks=jaxflash.EXPORT_CHECKS
    )(query, key, key)
    shared_units, workspace = _sharing_of_programs(exported.mlir_module())
    assert shared_units == units
    assert workspace > _COUNTER_BYTES if units > 0 else workspace == _COUNTER_BYTES


@needs_kernels
@pytest.mark.parametrize(
    "options",
    [
        dict(sink=jnp.zeros(8, jnp.float32)),
        dict(alibi_slopes=jnp.zeros(8, jnp.float32)),
        dict(bias=jnp.zeros((1, 8, 2, 2048), jnp.float32)),
        dict(score_mod=lambda s, b, h, q, kv: 2.0 * s),
        dict(dropout_rate=0.1, dropout_rng=np.array([1, 2], np.uint32)),
        dict(mask=jnp.ones((3, 1, 1, 2048), bool)),
        dict(mask=masks.function(lambda b, h, q, kv: kv % 7 != 0)),
        dict(segment_ids=(jnp.zeros((3, 2), jnp.int32), jnp.zeros((3, 2048), jnp.int32))),
        dict(
            key_value_seq_lengths=jnp.array([1, 0, 2048], jnp.int32),
            sink=jnp.zeros(8, jnp.float32),
        ),
    ],
    ids=[
        "sink",
        "alibi",
        "bias",
        "score_mod",
        "dropout",
        "mask",
        "function",
        "segments",
        "lengths",
    ],
)
def test_every_program_shares_keys(options):
    query, key = jnp.zeros((3, 2, 8, 64), jnp.bfloat16), jnp.zeros((3, 2048, 2, 64), jnp.bfloat16)
    attend = functools.partial(jaxflash.dot_product_attention, implementation="cuda", **options)
    units, workspace = _sharing_of_programs(_lowered(attend, "cuda", query, key, key))
    assert units == 1
    assert workspace > _COUNTER_BYTES
    wide = (x.astype(jnp.float32) for x in (query, key, key))
    assert _sharing_of_programs(_lowered(attend, "cuda", *wide)) == (0, _COUNTER_BYTES)


def _lowered(function, platform, *arguments):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


@needs_kernels
def test_lowering_for_cuda_without_a_gpu():
    qkv = _qkv(B, dtype=jnp.bfloat16)
    text = _lowered(_gradients, "cuda", *qkv)
    assert _ffi.FORWARD_TARGET in text
    assert _ffi.BACKWARD_TARGET in text
    assert "while" not in text  # no loop of the blockwise path
    assert "jaxflash" not in _lowered(_gradients, "cpu", *qkv)


def test_lowering_for_cuda_of_what_the_kernels_lack():
    qkv = _qkv(B, dtype=jnp.bfloat16)

    def score_mod(score, b, h, q, kv):
        return jax.lax.fori_loop(0, h, lambda i, x: 0.5 * x, score)

    attend = functools.partial(jaxflash.dot_product_attention, score_mod=score_mod)
    assert "custom_call @jaxflash" not in _lowered(attend, "cuda", *qkv)


def test_target_names_are_versioned():
    """They are part of exported programs: a changed contract gets a new number."""
    assert (_ffi.FORWARD_TARGET, _ffi.BACKWARD_TARGET) == (
        "jaxflash_forward_v8",
        "jaxflash_backward_v8",
    )


# ---- Several devices ----------------------------------------------------------------------------


def _sharded(arrays, mesh, *specs):
    return [
        jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
        for x, spec in zip(arrays, specs, strict=True)
    ]


def _compiled(loss, path, arguments):
    """The gradient of a function, compiled for the devices of its arguments, CPUs. A program of the
    kernels, lowered for CUDA, compiles there too; it does not run."""
    traced = jax.jit(jax.grad(loss, tuple(range(len(arguments))))).trace(*arguments)
    return traced.lower(lowering_platforms=("cuda" if path == "cuda" else "cpu",)).compile()


@pytest.mark.parametrize("options", [dict(is_causal=True), dict(key_value_seq_lengths=0)], ids=str)
def test_no_nan_on_the_way(options):
    """Which people hunt operation by operation; a row that sees no key has none, either."""
    qkv = [x[:, :5] for x in _qkv(2)]
    if "key_value_seq_lengths" in options:
        options = dict(key_value_seq_lengths=jnp.array([3, 0], jnp.int32))
    attend = functools.partial(jaxflash.dot_product_attention, **options)
    gradient = jax.grad(lambda qkv: jnp.sum(jnp.sin(attend(*qkv))))
    with jax.debug_nans(True), jax.disable_jit():
        jax.jvp(gradient, (qkv,), (qkv,))


_SPLITS = {
    "batch": ((("b", "h"),),) * 3,
    "batch and heads": (("b", None, "h"),) * 3,
    "heads": ((None, None, "h"),) * 3,
}


@pytest.mark.parametrize("path", ["xla", pytest.param("cuda", marks=needs_kernels)])
@pytest.mark.parametrize("split", _SPLITS.values(), ids=_SPLITS)
def test_sharded_program_gathers_nothing(split, path):
    """Batch and key/value heads split; each device works on its own part."""
    qkv = _sharded(_qkv(8), cpu_mesh(b=4, h=2), *split)
    attend = functools.partial(jaxflash.dot_product_attention, implementation=path)
    text = _compiled(lambda *qkv: jnp.sum(jnp.sin(attend(*qkv))), path, qkv).as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text


# Query heads over more devices than there are key heads: (key heads, mesh, split of the heads).
_MORE_DEVICES = {
    "one key head": (1, dict(b=2, h=4), "h"),
    "two key heads": (2, dict(b=2, h=4), "h"),
    "two axes": (2, dict(g=2, h=4), ("g", "h")),
    "between two axes": (2, dict(h=4, g=2), ("h", "g")),
}


@needs_kernels
@pytest.mark.parametrize("row", _MORE_DEVICES.values(), ids=_MORE_DEVICES)
def test_more_devices_than_key_heads(row):
    """Each device takes its query heads and the key head that they share; of its gradients only
    those of keys and values are summed and, where key heads are whole everywhere, put together."""
    kv_heads, axes, heads = row
    shapes = ((2, T, 16, H), (2, S, kv_heads, H), (2, S, kv_heads, H))
    split = ((None, None, heads), (), ())
    qkv = _sharded([np.ones(shape, np.float32) for shape in shapes], cpu_mesh(**axes), *split)
    attend = functools.partial(jaxflash.dot_product_attention, implementation="cuda")
    text = _compiled(lambda *qkv: jnp.sum(jnp.sin(attend(*qkv))), "cuda", qkv).as_text()
    shards = math.prod(n for name, n in axes.items() if name in heads)
    q_heads = f"{T},{16 // shards},{H}"
    calls = [line for line in text.splitlines() if "custom-call" in line and "jaxflash" in line]
    assert len(calls) == 2
    for call in calls:
        assert f"f32[2,{q_heads}]" in call
        assert f"f32[2,{S},1,{H}]" in call
    assert "all-reduce" in text
    for line in text.splitlines():
        if "all-gather(" in line:
            assert f"f32[2,{S},{kv_heads},{H}]" in line


@pytest.mark.parametrize("path", ["xla", pytest.param("cuda", marks=needs_kernels)])
def test_partly_manual_shard_map(path):
    """One axis manual, the other left to the compiler."""
    mesh = cpu_mesh(d=2, h=2, b=2)
    attend = functools.partial(jaxflash.dot_product_attention, implementation=path)
    whole = PartitionSpec("d")
    mapped = jax.shard_map(
        attend, mesh=mesh, in_specs=whole, out_specs=whole, axis_names={"d"}, check_vma=True
    )
    qkv = _sharded(_qkv(8), mesh, *(((("d", "b"), None, "h"),) * 3))
    text = _compiled(lambda *qkv: jnp.sum(jnp.sin(mapped(*qkv))), path, qkv).as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text


@needs_kernels
def test_kernels_need_shardy():
    """Without it, jax 0.10 would end the process."""
    qkv = _sharded(_qkv(8), cpu_mesh(b=4, h=2), *_SPLITS["batch and heads"])
    attend = functools.partial(jaxflash.dot_product_attention, implementation="cuda")
    shardy = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        with pytest.raises(NotImplementedError, match="jax_use_shardy_partitioner"):
            _compiled(lambda *qkv: jnp.sum(attend(*qkv)), "cuda", qkv)
        # Of which the blockwise path can make use.
        mask = masks.function(lambda b, h, q, kv: q + kv > 3)
        plan = jax.jit(lambda: masks.plan(mask, (1, 1, 8, 8))).trace()
        plan.lower(lowering_platforms=("cuda",))
    finally:
        jax.config.update("jax_use_shardy_partitioner", shardy)


@pytest.mark.parametrize("split", _SPLITS.values(), ids=_SPLITS)
def test_sharded_is_unsharded(split):
    qkv = _qkv(8)
    step = jax.jit(jax.value_and_grad(_loss(jaxflash.dot_product_attention), (0, 1, 2)))
    sharded = _sharded(qkv, cpu_mesh(b=4, h=2), *split)
    actual = step(*sharded)
    _close(actual, step(*_on_cpu(qkv)))
    for gradient, operand in zip(actual[1], sharded, strict=True):
        assert gradient.sharding.is_equivalent_to(operand.sharding, gradient.ndim)


# Query, key and value on an explicit mesh b=2, h=4; what else is given is on every device. N = 8
# query heads, K = 2 key heads.
_EXPLICIT = {
    "batch": ((("b", "h"),),) * 3,
    "heads": ((None, None, "b"),) * 3,
    "batch and heads": (("h", None, "b"),) * 3,
    "more devices than key heads": ((None, None, "h"), (), ()),
    "query alone": (("b", None, None), (), ()),
    "query length": ((None, "h"), (), ()),
    "query length, batch and heads": (("h", "b"), ("h", None, "b"), ("h", None, "b")),
    "key length": ((), (None, "h"), (None, "h")),
}


def _explicit_mesh():
    return cpu_mesh(AxisType.Explicit, b=2, h=4)


def _explicit_case():
    """Arrays of lengths that take several tiles, and a loss of a dictionary of them."""
    rng = np.random.default_rng(0)
    shapes = dict(
        query=(8, 160, 8, H), key=(8, 132, 2, H), value=(8, 132, 2, H), bias=(8, 1, 132), sink=(8,),
        alibi_slopes=(8,),
    )  # fmt: skip
    arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}

    def loss(attend):
        def of_arrays(arrays):
            ids = jnp.broadcast_to(jnp.arange(160) // 32, (8, 160))
            out, lse = attend(
                **arrays, is_causal=True, segment_ids=(ids, ids[:, :132]), return_residual=True
            )
            seen = jnp.where(jnp.isfinite(lse), lse, 0)
            return jnp.sum(jnp.sin(3 * out)) + jnp.sum(jnp.sin(seen))

        # Compiling takes longest.
        options = {"xla_backend_optimization_level": 0}
        return jax.jit(jax.value_and_grad(of_arrays), compiler_options=options)

    return arrays, loss


@functools.cache
def _explicit_expected():
    arrays, loss = _explicit_case()
    return loss(_dense)(arrays)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("specs", _EXPLICIT.values(), ids=_EXPLICIT)
def test_explicit_mesh(specs):
    """Gradients of what is split and of what stands whole on every device (bias, sink, slopes)."""
    arrays, loss = _explicit_case()
    mesh = _explicit_mesh()
    placed = _sharded(arrays.values(), mesh, *specs, (), (), ())
    attend = functools.partial(jaxflash.dot_product_attention, implementation="xla")
    with jax.set_mesh(mesh):
        actual = loss(attend)(dict(zip(arrays, placed, strict=True)))
    _close(actual, _explicit_expected())
    for name, x in zip(arrays, placed, strict=True):
        assert actual[1][name].sharding.is_equivalent_to(x.sharding, x.ndim), name


_LENGTHS_ON_A_MESH = np.array([1, 2, 3, 9, 20, 0, 7, 8], np.int32)
_SLOPES_ON_A_MESH = np.linspace(0.1, 1, N, dtype=np.float32)
_ON_A_MESH = {
    "nothing": {},
    "mask function": dict(
        mask=masks.causal()
        | masks.function(lambda b, h, q, kv, lengths: kv < lengths[b], _LENGTHS_ON_A_MESH)
    ),
    "bias, sink, slopes, cap": dict(
        bias=np.ones((8, 1, 1, S), np.float32),
        sink=_SLOPES_ON_A_MESH,
        alibi_slopes=_SLOPES_ON_A_MESH,
        logits_soft_cap=3.0,
    ),
    "score_mod": dict(
        score_mod=lambda score, b, h, q, kv: score * jnp.asarray(_SLOPES_ON_A_MESH)[h]
    ),
    "lengths, bottom right": dict(
        key_value_seq_lengths=_LENGTHS_ON_A_MESH, is_causal=True, causal_alignment="bottom_right"
    ),
    "segments": dict(
        segment_ids=(np.zeros((8, T), np.int32), np.tile(np.arange(S, dtype=np.int32) // 9, (8, 1)))
    ),
    "dropout": dict(dropout_rate=0.3, dropout_rng=jax.random.PRNGKey(0)),
}


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("options", _ON_A_MESH.values(), ids=_ON_A_MESH)
def test_explicit_mesh_of_the_arguments(options):
    """`jax.set_mesh` is not needed, and `jax.make_mesh` makes explicit ones."""
    qkv = _qkv(8)
    placed = _sharded(qkv, _explicit_mesh(), *((("h", None, "b"),) * 3))

    def run(attend, qkv):
        attend = functools.partial(attend, **options)

        def all_of(*qkv):
            mapped = jax.vmap(attend, 1, 1)(*(x[:, None] for x in qkv))
            return mapped, jax.jvp(jax.grad(_loss(attend), (0, 1, 2)), qkv, qkv)

        return jax.jit(all_of, compiler_options={"xla_backend_optimization_level": 0})(*qkv)

    _close(run(jaxflash.dot_product_attention, placed), run(_dense, qkv))


# How the operand is split that alone is on the mesh.
_ALONE = {
    "query": ("b", None, "h"),
    "key": ("h", None, "b"),
    "value": ("h",),
    "bias": ("b", "h"),
    "mask": ("b", None, "h"),
    "query_seq_lengths": ("b",),
    "key_value_seq_lengths": ("h",),
    "query_ids": ("b",),
    "key_ids": ("b", "h"),
    "sink": ("h",),
    "alibi_slopes": ("b", "h"),
    "table": ("h",),
}
if jax.__version_info__ < (0, 11):  # which does not index what is split, in any function
    del _ALONE["table"]


def _of_all_operands(attend):
    """Arrays by the names of `_ALONE`, and what gives a loss and the gradients of them."""
    rng = np.random.default_rng(0)
    arrays = dict(
        zip(("query", "key", "value"), _qkv(8), strict=True),
        bias=rng.standard_normal((8, N, 1, S), np.float32),
        mask=rng.random((8, 1, T, S)) < 0.8,
        query_seq_lengths=_LENGTHS_ON_A_MESH,
        key_value_seq_lengths=_LENGTHS_ON_A_MESH,
        query_ids=np.tile(np.arange(T, dtype=np.int32) // 9, (8, 1)),
        key_ids=np.tile(np.arange(S, dtype=np.int32) // 9, (8, 1)),
        sink=_SLOPES_ON_A_MESH,
        alibi_slopes=np.tile(_SLOPES_ON_A_MESH, (8, 1)),
        table=rng.standard_normal((N, T), np.float32),
    )

    def loss(query, key, value, query_ids, key_ids, table, **others):
        def score_mod(score, b, h, q, kv):
            return score + table[h, q]

        ids = query_ids, key_ids
        return _loss(attend, segment_ids=ids, score_mod=score_mod, **others)(query, key, value)

    def run(arrays):
        floats = {name: x for name, x in arrays.items() if x.dtype == np.float32}
        others = {name: x for name, x in arrays.items() if name not in floats}
        step = jax.value_and_grad(lambda floats, others: loss(**floats, **others))
        return jax.jit(step, compiler_options={"xla_backend_optimization_level": 0})(floats, others)

    return arrays, run


@functools.cache
def _expected_of_all_operands():
    arrays, run = _of_all_operands(_dense)
    return run(arrays)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("name", _ALONE)
def test_explicit_mesh_of_one_argument(name):
    """Whichever it is, the others go there with it, and its gradient stays where it is."""
    arrays, run = _of_all_operands(jaxflash.dot_product_attention)
    placed = jax.tree.map(jnp.asarray, arrays)
    (placed[name],) = _sharded([arrays[name]], _explicit_mesh(), _ALONE[name])
    actual = run(placed)
    _close(actual, _expected_of_all_operands())
    if name in actual[1]:
        gradient = actual[1][name]
        assert gradient.sharding.is_equivalent_to(placed[name].sharding, gradient.ndim)


def test_explicit_mesh_of_two_batch_axes():
    """Which operands split over the same mesh axis."""
    qkv = [x.reshape(2, 4, *x.shape[1:]) for x in _qkv(8)]
    placed = _sharded(qkv, _explicit_mesh(), ("b",), (None, "b"), ("b", "h"))
    gradient = jax.jit(jax.grad(_loss(jaxflash.dot_product_attention), (0, 1, 2)))
    actual = gradient(*placed)
    _close(actual, gradient(*qkv))
    for x, y in zip(actual, placed, strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


@needs_kernels
@pytest.mark.parametrize("specs", _EXPLICIT.values(), ids=_EXPLICIT)
def test_explicit_mesh_of_the_kernels(specs):
    """The output is split as the query; the program compiles, gradient included."""
    mesh = _explicit_mesh()
    arrays, _ = _explicit_case()
    placed = _sharded([arrays[name] for name in ("query", "key", "value")], mesh, *specs)
    attend = functools.partial(
        jaxflash.dot_product_attention, implementation="cuda", return_residual=True
    )
    with jax.set_mesh(mesh):
        out, lse = jax.eval_shape(attend, *placed)
        _compiled(_loss(attend), "cuda", placed)
    spec = (*specs[0], None, None, None)
    assert out.sharding.spec == PartitionSpec(*spec[:3], None)
    assert lse.sharding.spec == PartitionSpec(*spec[:3])


# The mesh is of CPU devices, whatever else the machine has.
@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize(
    "specs",
    [(("b", None, "h"),) * 3, (("b", None, "h"), (None, None, "h"), (None, None, "h"))],
    ids=["all", "shared keys"],
)
def test_shard_map(specs):
    """With the check of varying axes, which also asks it of the gradients and of a scan's carry."""
    mesh = cpu_mesh(b=4, h=2)
    query, key, value = _qkv(8)
    if specs[1][0] is None:
        key, value = key[:1], value[:1]
    specs = tuple(PartitionSpec(*spec) for spec in specs)

    def of(attend, shard):
        def per_device(query, key, value):
            batch = (query.shape[0],)
            key, value = (jnp.broadcast_to(x, batch + x.shape[1:]) for x in (key, value))

            def layer(x, _):
                return x + attend(x, key, value, is_causal=True), None

            return jax.lax.scan(layer, query, None, length=2)[0]

        run = per_device
        if shard:
            run = jax.shard_map(
                per_device, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=True
            )
        return jax.jit(jax.value_and_grad(lambda *qkv: jnp.sum(jnp.sin(run(*qkv))), (0, 1, 2)))(
            query, key, value
        )

    _close(of(jaxflash.dot_product_attention, True), of(_dense, False))


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("key_is_split", [False, True])
def test_dropout_in_shard_map(key_is_split):
    """Each device counts its own batch elements; with a key for all, or one for each."""
    mesh = cpu_mesh(b=4, rest=2)
    query, key, value = _qkv(8)
    options = dict(dropout_rate=0.3, is_causal=True)

    def per_device(query, key, value, rng):
        if key_is_split:
            rng = jax.random.fold_in(rng, jax.lax.axis_index("b"))
        return jaxflash.dot_product_attention(query, key, value, dropout_rng=rng, **options)

    split = PartitionSpec("b")
    run = jax.shard_map(
        per_device, mesh=mesh, in_specs=(split, split, split, PartitionSpec()), out_specs=split
    )
    rng = jax.random.key(3)
    rngs = [jax.random.fold_in(rng, i) if key_is_split else rng for i in range(4)]
    expected = [
        _dense(*(x[2 * i : 2 * i + 2] for x in (query, key, value)), dropout_rng=rngs[i], **options)
        for i in range(4)
    ]
    _close(jax.jit(run)(query, key, value, rng), jnp.concatenate(expected))


def test_dropout_keys_of_each_example_on_an_explicit_mesh():
    """As Equinox's modules are mapped: keys are split like the examples."""
    query, keys = _qkv(B)[0], jax.random.split(jax.random.key(0), B)

    def run(query, keys):
        def attend(x, key):
            return jaxflash.dot_product_attention(x, x, x, dropout_rate=0.3, dropout_rng=key)

        return jax.grad(lambda query: jnp.sum(jnp.sin(jax.vmap(attend)(query, keys))))(query)

    placed = _sharded((query, keys), _explicit_mesh(), ("b",), ("b",))
    with jax.set_mesh(_explicit_mesh()):
        actual = jax.jit(run)(*placed)
    _close(actual, run(*_on_cpu([query, keys])))


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("ids_spec", [(), ("b",)], ids=["whole ids", "split ids"])
def test_segments_on_an_explicit_mesh(ids_spec):
    """With the kernels as a possibility, whose ranges are computed before the platform is known."""
    mesh = _explicit_mesh()
    ids = np.tile(np.array([0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 4], np.int32), (8, 1))
    query = np.random.default_rng(0).standard_normal((8, 12, N, H), np.float32)
    expected = _dense(query, query, query, segment_ids=ids)
    placed = _sharded([query, ids], mesh, ("b",), ids_spec)

    def attend(query, ids):
        return jaxflash.dot_product_attention(query, query, query, segment_ids=ids)

    with jax.set_mesh(mesh):
        _close(jax.jit(attend)(*placed), expected)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("kind", ["segments", "packed"])
def test_segments_in_a_partly_manual_shard_map(kind):
    """JAX cannot scan for their ranges there."""
    mesh = cpu_mesh(d=2, rest=2)
    ids = np.array([[0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 2]], np.int32)
    boundaries = np.array([[0, 2, 5, 8], [0, 1, 7, 8]], np.int32)
    query = np.random.default_rng(0).standard_normal((2, 8, N, H), np.float32)

    def attend(query, ids, boundaries):
        if kind == "segments":
            return jaxflash.dot_product_attention(query, query, query, segment_ids=ids)
        packed, boundaries = query[0], boundaries[0]
        return jaxflash.varlen_attention(packed, packed, packed, boundaries, boundaries)[None]

    split = PartitionSpec("d")
    mapped = jax.shard_map(
        attend, mesh=mesh, in_specs=(split,) * 3, out_specs=split, axis_names={"d"}
    )
    expected = _dense(query, query, query, segment_ids=ids)
    _close(jax.jit(mapped)(query, ids, boundaries), expected)


@pytest.mark.usefixtures("cpu")
def test_ring_of_partial_results():
    """Keys split over devices: each merges what it makes of every part, as it comes around."""
    mesh = cpu_mesh(s=4, rest=2)
    query, key, value = _qkv(B)

    def per_device(query, key, value):
        outs, lses = [], []
        for _ in range(4):
            out, lse = jaxflash.dot_product_attention(query, key, value, return_residual=True)
            outs.append(out)
            lses.append(lse)
            shift = [(i, (i + 1) % 4) for i in range(4)]
            key, value = (jax.lax.ppermute(x, "s", shift) for x in (key, value))
        return jaxflash.merge_attention(jnp.stack(outs), jnp.stack(lses))[0]

    keys = PartitionSpec(None, "s")
    run = jax.shard_map(
        per_device, mesh=mesh, in_specs=(keys, keys, keys), out_specs=keys, check_vma=True
    )

    def loss(f):
        return jax.jit(jax.value_and_grad(lambda *qkv: jnp.sum(jnp.sin(f(*qkv))), (0, 1, 2)))

    _close(loss(run)(query, key, value), loss(_dense)(query, key, value))


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_donated_arguments(attend):
    expected = jax.jit(jax.grad(_loss(attend), (0, 1, 2)))(*_qkv(B))
    donated = jax.jit(jax.grad(_loss(attend), (0, 1, 2)), donate_argnums=(0, 1, 2))
    assert_same_bits(donated(*map(jnp.array, _qkv(B))), expected)
