"""`jax.export`, with symbolic sizes too, and lowering for CUDA without a GPU."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxflash
from check import assert_close, assert_same_bits
from jaxflash import _api, _extension, _ffi, _kernel_program, _nvrtc, _ranges, _support, masks
from marks import needs_kernels
from transformed_calls import B, H, K, N, S, T, on_cpu, random_qkv, uneven_loss

pytestmark = pytest.mark.usefixtures("accurate_products", "quick_compilation")


# ---- Programs with a batch of any size -----------------------------------------------------------


def _gradients(query, key, value):
    attend = functools.partial(jaxflash.dot_product_attention, is_causal=True)
    return attend(query, key, value), jax.grad(uneven_loss(attend), (0, 1, 2))(query, key, value)


def test_export_round_trip():
    qkv = on_cpu(random_qkv(B))
    exported = export.export(jax.jit(_gradients), platforms=["cpu"])(*qkv)
    again = export.deserialize(exported.serialize())
    assert_same_bits(jax.jit(again.call)(*qkv), jax.jit(_gradients)(*qkv))


@pytest.mark.usefixtures("cpu")
def test_export_of_a_derivative():
    qkv = random_qkv(B)
    attend = jax.jit(functools.partial(jaxflash.dot_product_attention, is_causal=True))
    exported = export.export(attend, platforms=["cpu"])(*qkv)
    again = export.deserialize(exported.serialize(vjp_order=1))
    actual = jax.grad(lambda *qkv: jnp.sum(jnp.sin(again.call(*qkv))), (0, 1, 2))(*qkv)
    expected = jax.grad(lambda *qkv: jnp.sum(jnp.sin(attend(*qkv))), (0, 1, 2))(*qkv)
    assert_close(actual, expected)


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
        qkv = on_cpu(random_qkv(batch))
        # The loss divides by the size of the array, which is symbolic too.
        assert_close(jax.jit(again.call)(*qkv), jax.jit(_gradients)(*qkv))


# ---- Symbolic lengths ----------------------------------------------------------------------------


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
    has_kernels = bool(_extension.kernels) and _nvrtc.reason_against() is None

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
        assert_close(jax.jit(exported.call)(*placed), expected(*on_cpu(arrays)))


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
    has_kernels = bool(_extension.kernels) and _nvrtc.reason_against() is None

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
        assert_close(jax.jit(exported.call)(*placed), expected(*on_cpu(arrays)))


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
        arrays = on_cpu(_of_lengths("mask", shape, **sizes))
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
        arrays = on_cpu(arrays)
        assert_close(again(*arrays), jax.jit(run)(*arrays))


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
    query, key, _ = random_qkv(B)
    ids = (np.tile(np.arange(n, dtype=np.int32) // 7, (B, 1)) for n in (T, S))
    arguments = on_cpu([query[..., :8], key[..., :8], *ids])
    assert_close(jax.jit(exported.call)(*arguments), jax.jit(gradient)(*arguments))
    if _extension.kernels:
        with pytest.raises(NotImplementedError, match="when the program is exported"):
            jax.eval_shape(functools.partial(gradient, implementation="cuda"), *symbolic)


@needs_kernels
@pytest.mark.parametrize("path", ["cuda", None])
def test_gradient_exports_for_cuda_with_symbolic_lengths(path):
    attend = functools.partial(jaxflash.dot_product_attention, is_causal=True, implementation=path)
    symbolic = _types(("b, t, 4, 64", "b, s, 2, 64", "b, s, 2, 64"), (jnp.bfloat16,) * 3)
    step = jax.jit(jax.grad(uneven_loss(attend), (0, 1, 2)))
    exported = export.export(step, platforms=["cuda"], disabled_checks=jaxflash.EXPORT_CHECKS)
    assert _ffi.BACKWARD_TARGET in exported(*symbolic).mlir_module()


# ---- Programs for CUDA ---------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("symbolic", [False, True])
def test_export_for_cuda(symbolic):
    shapes = _symbolic(jnp.bfloat16) if symbolic else random_qkv(B, dtype=jnp.bfloat16)
    exported = export.export(
        jax.jit(_gradients), platforms=["cpu", "cuda"], disabled_checks=jaxflash.EXPORT_CHECKS
    )(*shapes)
    again = export.deserialize(exported.serialize())
    assert again.platforms == ("cpu", "cuda")
    for target in (_ffi.FORWARD_TARGET, _ffi.BACKWARD_TARGET):
        assert target in again.mlir_module()


def _workspace_bytes(batch, q_len, kv_len, heads, kv_heads, left=1 << 30, right=1 << 30):
    return _extension.forward_workspace_bytes(
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
    qkv = random_qkv(B, dtype=jnp.bfloat16)
    text = _lowered(_gradients, "cuda", *qkv)
    assert _ffi.FORWARD_TARGET in text
    assert _ffi.BACKWARD_TARGET in text
    assert "while" not in text  # no loop of the blockwise path
    assert "jaxflash" not in _lowered(_gradients, "cpu", *qkv)


def test_lowering_for_cuda_of_what_the_kernels_lack():
    qkv = random_qkv(B, dtype=jnp.bfloat16)

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
