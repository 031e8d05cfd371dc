"""Score functions in programs of the kernels: operands and results of the custom calls, of a whole
call and of its shards."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxflash
from jaxflash import _api, _derivatives, _ffi, _kernel_program, _scores, _spec
from jaxprs import compiled_custom_calls, custom_calls
from marks import needs_kernels
from meshes import cpu_mesh

pytestmark = pytest.mark.usefixtures("accurate_products", "quick_compilation")


# ---- Programs and their captures -----------------------------------------------------------------


def _on_kernels(q, k, v, bias, table, sink, **options):
    """The call on the path of the kernels, whatever they cover."""
    options = {**_api.DEFAULTS, "sink": sink, "logits_soft_cap": 30.0, **options}
    del options["score_mod"]
    spec, operands = _spec.make(q, k, v, bias, None, **options)
    spec, operands = _scores.compose(
        spec, operands, lambda s, b, h, q, kv: s + table[h, q - kv + 7] * b.astype(jnp.float32)
    )
    return _derivatives.attention(spec, "cuda", operands)[0]


def _kernel_arguments(dtype=jnp.bfloat16, head_dim=64):
    q, k = jnp.zeros((4, 16, 8, head_dim), dtype), jnp.zeros((4, 16, 4, head_dim), dtype)
    others = (jnp.zeros(shape, jnp.float32) for shape in ((4, 1, 16, 16), (8, 15), (8,)))
    return q, k, k, *others


@needs_kernels
def test_operands_of_the_custom_calls():
    arguments = _kernel_arguments()
    gradient = jax.grad(
        lambda *args: jnp.sum(_on_kernels(*args).astype(jnp.float32)), argnums=(0, 4, 5)
    )
    text = jax.jit(gradient).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    captures = "tensor<4x16x16xf32>, tensor<1x8x15xf32>, tensor<1x8xf32>) ->"
    (forward,) = custom_calls(text, _ffi.FORWARD_TARGET)
    assert f"tensor<4xi32>, tensor<8xi32>, {captures}" in forward
    assert "capture_ranks = dense<[2, 2, 1]>" in forward
    assert "struct Program" in forward
    (backward,) = custom_calls(text, _ffi.BACKWARD_TARGET)
    assert f"tensor<4xi32>, tensor<8xi32>, {captures}" in backward


@needs_kernels
def test_operands_of_the_custom_call_under_vmap():
    q, k, v, bias, table, sink = _kernel_arguments()
    axes = (0, None, None, None, 0, None)
    mapped = jax.vmap(_on_kernels, axes)
    arguments = (jnp.stack([q, q]), k, v, bias, jnp.stack([table, table]), sink)
    text = jax.jit(mapped).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    (forward,) = custom_calls(text, _ffi.FORWARD_TARGET)
    assert "tensor<1x4xi32>, tensor<8xi32>, tensor<1x4x16x16xf32>, tensor<2x1x8x15xf32>" in forward


_FACTORS = jnp.linspace(0.5, 1.0, 3, dtype=jnp.float32)
_NUMBERED: dict[str, tuple[dict, bool]] = {
    "soft cap": (dict(logits_soft_cap=30.0), False),
    "segments": (dict(segment_ids=jnp.zeros((4, 16), jnp.int32)), False),
    "a bias that heads share": (dict(bias=jnp.zeros((4, 1, 16, 16), jnp.bfloat16)), False),
    "a bias of each head": (dict(bias=jnp.zeros((1, 8, 16, 16), jnp.bfloat16)), True),
    "slopes": (dict(alibi_slopes=jnp.zeros(8, jnp.float32)), True),
    "sink": (dict(sink=jnp.zeros(8, jnp.float32)), True),
    "dropout": (dict(dropout_rate=0.1, dropout_rng=jax.random.PRNGKey(0)), True),
    "heads": (dict(score_mod=lambda s, b, h, q, kv: jnp.where(h < 2, s, -s)), True),
    "batch elements": (
        dict(mask=jaxflash.masks.function(lambda b, h, q, kv: (q + b) % 3 != kv % 3)),
        True,
    ),
    "an index": (dict(score_mod=lambda s, b, h, q, kv: s * _FACTORS[jnp.minimum(b, 2)]), True),
}


@needs_kernels
@pytest.mark.parametrize(("options", "numbered"), _NUMBERED.values(), ids=_NUMBERED)
def test_numbers_go_to_programs_that_ask(options, numbered):
    """A kernel each would make the numbers of batch elements and heads."""
    q, k = _kernel_arguments()[:2]

    def loss(q, options):
        out = jaxflash.dot_product_attention(q, k, k, implementation="cuda", **options)
        return jnp.sum(out.astype(jnp.float32))

    arrays = {name: x for name, x in options.items() if isinstance(x, jax.Array)}
    others = {name: x for name, x in options.items() if name not in arrays}
    gradient = jax.grad(lambda q, arrays: loss(q, arrays | others), (0, 1), allow_int=True)
    text = jax.jit(gradient).trace(q, arrays).lower(lowering_platforms=("cuda",)).as_text()
    for target in (_ffi.FORWARD_TARGET, _ffi.BACKWARD_TARGET):
        (call,) = custom_calls(text, target)
        assert ("tensor<4xi32>, tensor<8xi32>" in call) == numbered


@needs_kernels
def test_shards_know_their_numbers():
    """Batch elements keep their numbers; captures are split as the heads that index them."""
    mesh = cpu_mesh(x=2, y=4)
    specs = (P("x", None, "y"), P("x", None, "y"), P("x", None, "y"), P("x"), P(), P())
    arguments = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(_kernel_arguments(), specs, strict=True)
    ]
    traced = jax.jit(_on_kernels).trace(*arguments)
    text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    (forward,) = compiled_custom_calls(text, _ffi.FORWARD_TARGET)
    layouts = forward.split("operand_layout_constraints=")[1]
    assert "s32[2]{0}, s32[2]{0}, f32[2,16,16]{2,1,0}, f32[1,2,15]{2,1,0}, f32[1,2]" in layouts
    assert "all-gather" not in text


def test_programs_for_the_kernels_do_not_depend_on_lengths():
    def source(q_len, kv_len):
        shapes = (1, q_len, 8, 64), (1, kv_len, 4, 64), (8, q_len, kv_len), (8,)
        q, k, bias, slopes = (jnp.zeros(shape, jnp.float32) for shape in shapes)
        options = {**_api.DEFAULTS, "alibi_slopes": slopes, "is_causal": True}
        del options["score_mod"]
        spec, operands = _spec.make(q, k, k, bias, None, **options)
        program = _kernel_program.make(*_scores.compose(spec, operands, None), "forward")
        assert program is not None
        return program

    assert source(16, 32) == source(100, 50)


# ---- Gradients of captures -----------------------------------------------------------------------


@needs_kernels
def test_gradients_of_captures_are_results_of_the_custom_call():
    """The backward call gives them, summed over what broadcasts; sinks need nothing but out."""
    arguments = _kernel_arguments()

    def gradient(argnums, **options):
        def loss(*args):
            return jnp.sum(_on_kernels(*args, **options).astype(jnp.float32))

        traced = jax.jit(jax.grad(loss, argnums)).trace(*arguments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        return custom_calls(text, _ffi.BACKWARD_TARGET), "dot_general" in text

    # Bias (4, 1, 16, 16) has a tile of rows and columns, the table (8, 15) an index of q - kv.
    (backward,), blockwise = gradient((0, 3, 4, 5))
    assert "xui8>, tensor<4x16x16xf32>, tensor<1x8x15xf32>)" in backward
    assert "gradient_loads = dense<[0, 0, 1, 0, 0, 0, 0, 0, 1, -1, -1, 1, 0, 0, 0, 0]>" in backward
    assert not blockwise
    (backward,), blockwise = gradient((3,))
    assert "xui8>, tensor<4x16x16xf32>)" in backward
    assert not blockwise
    (backward,), blockwise = gradient((0, 5))
    assert backward.rstrip().endswith("xui8>)")
    assert not blockwise
    # Nothing orders the additions to the table: the blockwise path makes its gradient.
    (backward,), blockwise = gradient((0, 3, 4), deterministic_backward=True)
    assert "xui8>, tensor<4x16x16xf32>)" in backward
    assert blockwise


@needs_kernels
@pytest.mark.parametrize("beside", [False, True])
def test_order_of_gradients_beside_others(beside):
    """With a bias of each batch element, more sums of a table are wanted than have an order."""
    x = jax.ShapeDtypeStruct((1100, 64, 64, 64), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((1100, 1, 1, 64), jnp.float32)
    table = jax.ShapeDtypeStruct((1100, 64, 64), jnp.float32)

    def loss(bias, table, x):
        return jnp.sum(
            jaxflash.dot_product_attention(
                x, x, x, bias, score_mod=lambda s, b, h, q, kv: s + table[b, h, kv],
                implementation="cuda", deterministic_backward=True,
            ).astype(jnp.float32)
        )  # fmt: skip

    gradient = jax.jit(jax.grad(loss, (0, 1) if beside else 1))
    text = gradient.trace(bias, table, x).lower(lowering_platforms=("cuda",)).as_text()
    assert ("dot_general" in text) == beside


def _bias_gradient(shape, dtype=jnp.bfloat16, head_dim=128, **options):
    q, k, *_ = _kernel_arguments(head_dim=head_dim)

    def loss(bias, q):
        out = jaxflash.dot_product_attention(
            q, k, k, bias, implementation="cuda", scale=0.125, **options
        )
        return jnp.sum(out.astype(jnp.float32))

    return jax.grad(loss), (jnp.zeros(shape, dtype), q)


@needs_kernels
def test_gradients_that_the_backward_kernel_stores():
    """Those of an element of the logits each, in the operands' dtype."""

    def gradient(*args, **options):
        function, arguments = _bias_gradient(*args, **options)
        traced = jax.jit(function).trace(*arguments)
        (call,) = custom_calls(
            traced.lower(lowering_platforms=("cuda",)).as_text(), _ffi.BACKWARD_TARGET
        )
        return call

    for options in ({}, dict(logits_soft_cap=2.0), dict(is_causal=True)):
        call = gradient((4, 8, 16, 16), **options)
        assert "gradient_loads = dense<[0, 1, 2, 0, 1, 1, 0, 0]>" in call
        assert "kStoresGradient = true" in call
        assert "xui8>, tensor<4x8x16x16xbf16>)" in call
    # Of the sum over the batch.
    lengths = jnp.array([16, 3, 0, 9], jnp.int32)
    for options in (
        {},
        dict(is_causal=True),
        dict(local_window_size=(5, 2)),
        dict(key_value_seq_lengths=lengths),
        dict(mask=jnp.ones((4, 1, 16, 16), bool)),
        dict(segment_ids=jnp.zeros((4, 16), jnp.int32)),
        dict(deterministic_backward=True),
        dict(head_dim=64),
    ):
        call = gradient((1, 8, 16, 16), **options)
        assert "gradient_loads = dense<[0, 1, 2, 0, 1, 1, 0, 1]>" in call
        assert "kSumsBatch = true" in call
        assert "xui8>, tensor<1x8x16x16xbf16>)" in call
    # Sums over heads, another dtype, blocks that have no tile to themselves.
    for args, options in (
        (((1, 8, 16, 16),), dict(head_dim=192)),
        (((4, 1, 16, 16),), {}),
        (((4, 8, 16, 16), jnp.float32), {}),
        (((4, 8, 16, 16), jnp.float16), {}),
    ):
        call = gradient(*args, **options)
        assert "kStoresGradient = false" in call
        assert call.split("gradient_loads = dense<")[1].split("]")[0].endswith(", 0, 0, 0, 0")


@needs_kernels
@pytest.mark.parametrize("batch", [4, 1])
def test_stored_gradients_under_vmap(batch):
    """What vmap adds is no part of a sum over the batch."""
    function, (bias, q) = _bias_gradient((batch, 8, 16, 16))
    traced = jax.jit(jax.vmap(function, (None, 0))).trace(bias, jnp.stack([q, q]))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (call,) = custom_calls(text, _ffi.BACKWARD_TARGET)
    assert "kStoresGradient = true" in call
    assert f"xui8>, tensor<2x{batch}x8x16x16xbf16>)" in call


@needs_kernels
def test_stored_gradients_in_shards():
    """A device has the matrices of its heads."""
    mesh = cpu_mesh(x=2, y=4)
    function, arguments = _bias_gradient((4, 8, 16, 16))
    specs = P("x"), P("x", None, "y")
    arguments = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(arguments, specs, strict=True)
    ]
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    text = text.compile().as_text()
    (call,) = compiled_custom_calls(text, _ffi.BACKWARD_TARGET)
    assert "bf16[2,2,16,16]" in call.split("custom-call(")[0]
    assert "all-reduce" not in text


@needs_kernels
def test_stored_sums_in_shards():
    """A device has the sum of its batch elements, which is then summed over the devices."""
    mesh = cpu_mesh(x=2, y=4)
    function, (bias, q) = _bias_gradient((1, 8, 16, 16))
    q = jax.device_put(q, NamedSharding(mesh, P("x", None, "y")))
    text = jax.jit(function).trace(bias, q).lower(lowering_platforms=("cuda",))
    text = text.compile().as_text()
    (call,) = compiled_custom_calls(text, _ffi.BACKWARD_TARGET)
    assert "bf16[1,2,16,16]" in call.split("custom-call(")[0]
    (total,) = [x for x in text.splitlines() if " all-reduce(" in x]
    assert "[1,2,16,16]" in total


@needs_kernels
def test_gradients_of_captures_are_summed_over_shards():
    mesh = cpu_mesh(x=2, y=4)
    specs = (P("x", None, "y"), P("x", None, "y"), P("x", None, "y"), P("x"), P(), P())
    arguments = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(_kernel_arguments(), specs, strict=True)
    ]

    def gradient(*args):
        return jax.grad(lambda *args: jnp.sum(_on_kernels(*args) * 1.0), (3, 4))(*args)

    traced = jax.jit(gradient).trace(*arguments)
    text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    sums = [x for x in text.splitlines() if " all-reduce(" in x]
    # The bias is split as the batch, and every head adds to it; of the table each device has the
    # part of its heads. Devices as JAX 0.11 names them, and as 0.10 lists them.
    along_y, along_x = ("{'y'}", "{{0,1,2,3},{4,5,6,7}}"), ("{'x'}", "{{0,4},{1,5},{2,6},{3,7}}")
    assert any("f32[2,16,16]" in x and any(d in x for d in along_y) for x in sums), sums
    assert any("f32[1,2,15]" in x and any(d in x for d in along_x) for x in sums), sums
    assert "all-gather" not in text
