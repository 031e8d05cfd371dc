"""What Python tells the custom calls is what their handlers take; without a GPU."""

import pytest

from another_process import run_python
from jaxflash import _ffi

# The handlers of CUDA as those of the CPU. Compiling calls those of both passes with the
# attributes, running that of the forward with all of it; the stream alone, operand 0, is missing.
_ON_CPU = """
import jax, jax.ffi, jax.numpy as jnp

jax.devices()
register_target, register_type = jax.ffi.register_ffi_target, jax.ffi.register_ffi_type

def as_cpu_target(name, handler, platform):
    if platform == "CUDA":
        register_target(name, handler, platform="cpu")

jax.ffi.register_ffi_target = as_cpu_target
jax.ffi.register_ffi_type = lambda name, info, platform: register_type(name, info, platform="cpu")
import jaxflash

def attend(query, key, value, lengths, table):
    return jaxflash.dot_product_attention(
        query, key, value, implementation="cuda", is_causal=True, {options}
    )

def loss(*operands):
    return jnp.sum(attend(*operands))

query = jnp.zeros((2, 16, 4, 64), jnp.float32)
key = value = jnp.zeros((2, 16, 2, 64), jnp.float32)
operands = query, key, value, jnp.full(2, 16, jnp.int32), jnp.zeros((4, 31), jnp.float32)

def paged(query, key, value, lengths, table):
    return jaxflash.paged_attention(
        query, key, value, jnp.zeros((2, 3), jnp.int32), lengths, implementation="cuda", {options}
    )

function = {function}
compiled = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).compile()
try:
    jax.block_until_ready(compiled(*operands))
except Exception as error:
    print(error)
"""


@pytest.mark.skipif(not _ffi.extension.kernels, reason="the library was built without kernels")
@pytest.mark.parametrize(
    "function",
    ["attend", "jax.grad(loss)", "jax.grad(loss, (0, 4))"],
    ids=["forward", "gradient", "gradient of a capture"],
)
@pytest.mark.parametrize(
    "options",
    [
        "",
        "key_value_seq_lengths=lengths",
        "logits_soft_cap=3.0",
        "segment_ids=jnp.ones((2, 16), jnp.int32)",
        "mask=jnp.ones((2, 1, 16, 16), bool)",
        "mask=jnp.ones((1, 1, 1, 16), bool), logits_soft_cap=3.0",
        "mask=jaxflash.masks.function(lambda b, h, q, kv: q + kv > 3)",
        "bias=table[:, None, :16], score_mod=lambda s, b, h, q, kv: s + table[h, q - kv + 15]",
    ],
    ids=[
        "plain",
        "lengths",
        "soft cap",
        "segments",
        "mask",
        "mask of keys",
        "function",
        "captures",
    ],
)
def test_handlers_take_what_they_are_given(function, options):
    printed = run_python(_ON_CPU.format(function=function, options=options))
    assert "bad operands at: 0)" in printed, printed
    assert "stream" in printed


@pytest.mark.skipif(not _ffi.extension.kernels, reason="the library was built without kernels")
@pytest.mark.parametrize(
    "options", ["", "logits_soft_cap=3.0", "sink=table[:, 0]"], ids=["plain", "soft cap", "sink"]
)
def test_handler_of_pages(options):
    printed = run_python(_ON_CPU.format(function="paged", options=options))
    assert "bad operands at: 0)" in printed, printed
    assert "stream" in printed
