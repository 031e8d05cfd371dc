"""What Python tells the custom calls is what their handlers take; without a GPU."""

import itertools
import json
import re

import pytest

from another_process import run_python
from jaxflash import _extension, _ffi

pytestmark = pytest.mark.skipif(
    not _extension.kernels, reason="the library was built without kernels"
)

# The handlers of CUDA as those of the CPU. Compiling a program calls the first of each call's
# handlers, with the attributes; running it the last, with all it takes, of the first call alone,
# which fails because it has no stream. So each call is run as a program of its own, too.
_ON_CPU = """
import itertools, json, sys

import jax, jax.ffi, jax.numpy as jnp, numpy as np

jax.devices()
register_target, register_type = jax.ffi.register_ffi_target, jax.ffi.register_ffi_type
call_of, calls = jax.ffi.ffi_call, []

def as_cpu_target(name, handler, platform):
    if platform == "CUDA":
        register_target(name, handler, platform="cpu")

def recorded(target, results):
    def call(*operands, **attributes):
        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        calls.append((target, results, types, attributes))
        return call_of(target, results)(*operands, **attributes)

    return call

jax.ffi.register_ffi_target = as_cpu_target
jax.ffi.register_ffi_type = lambda name, info, platform: register_type(name, info, platform="cpu")
jax.ffi.ffi_call = recorded
import jaxflash

def failure(function, *operands):
    try:
        traced = jax.jit(function).trace(*operands)
        compiled = traced.lower(lowering_platforms=("cuda",)).compile()
        jax.block_until_ready(compiled(*operands))
    except Exception as error:
        return str(error)

def failure_of(target, results, types, attributes):
    zeros = [jnp.zeros(x.shape, x.dtype) for x in types]
    return failure(lambda *operands: call_of(target, results)(*operands, **attributes), *zeros)

def changes(attributes):
    for name, value in attributes.items():
        others = {other: x for other, x in attributes.items() if other != name}
        yield "without " + name, others
        if isinstance(value, dict):
            for change, changed in changes(value):
                yield change + " of " + name, {**others, name: changed}
    if attributes:
        yield "with another one", {**attributes, "another": np.int64(0)}

query = jnp.zeros((2, 16, 4, 64), jnp.float32)
key = value = jnp.zeros((2, 16, 2, 64), jnp.float32)
operands = query, key, value, jnp.full(2, 16, jnp.int32), jnp.zeros((4, 31), jnp.float32)

def moving(function, *places):
    def tangent(*operands):
        def of(*moved):
            moved = dict(zip(places, moved))
            return function(*(moved.get(i, x) for i, x in enumerate(operands)))

        moved = [operands[i] for i in places]
        return jax.jvp(of, moved, moved)

    return tangent

rows, changed = {}, {}
for function, options in json.load(sys.stdin):
    def attend(query, key, value, lengths, table):
        return jaxflash.dot_product_attention(
            query, key, value, implementation="cuda", is_causal=True,
            **eval(f"dict({options})", globals() | locals()),
        )

    def paged(query, key, value, lengths, table):
        return jaxflash.paged_attention(
            query, key, value, jnp.zeros((2, 3), jnp.int32), lengths, implementation="cuda",
            **eval(f"dict({options})", globals() | locals()),
        )

    def loss(*operands):
        return jnp.sum(attend(*operands))

    jax.clear_caches()  # or parts of it would be traced already, and their calls not recorded
    calls.clear()
    whole = failure(eval(function), *operands)
    rows[function + options] = [("whole", whole), *((call[0], failure_of(*call)) for call in calls)]
    for target, results, types, attributes in calls:
        if target not in changed:
            changed[target] = found = {}
            found["without operands"] = failure_of(target, results, [], attributes)
            for change, others in changes(attributes):
                found[change] = failure_of(target, results, types, others)
json.dump([rows, changed], sys.stdout)
"""

_FUNCTIONS = {
    "forward": "attend",
    "gradient": "jax.grad(loss)",
    "gradient of a capture": "jax.grad(loss, (0, 4))",
    "tangent": "moving(attend, 0, 1, 2)",
    "tangent of a capture": "moving(attend, 0, 4)",
}
_OPTIONS = {
    "plain": "",
    "lengths": "key_value_seq_lengths=lengths",
    "soft cap": "logits_soft_cap=3.0",
    "segments": "segment_ids=jnp.ones((2, 16), jnp.int32)",
    "mask": "mask=jnp.ones((2, 1, 16, 16), bool)",
    "mask of keys": "mask=jnp.ones((1, 1, 1, 16), bool), logits_soft_cap=3.0",
    "mask and segments": (
        "mask=jnp.ones((2, 1, 16, 16), bool), segment_ids=jnp.ones((2, 16), jnp.int32)"
    ),
    "function": "mask=jaxflash.masks.function(lambda b, h, q, kv: q + kv > 3)",
    "captures": (
        "bias=table[:, None, :16], score_mod=lambda s, b, h, q, kv: s + table[h, q - kv + 15]"
    ),
}
_OPTIONS_OF_PAGES = {"plain": "", "soft cap": "logits_soft_cap=3.0", "sink": "sink=table[:, 0]"}


@pytest.fixture(scope="module")
def failures():
    """Those of each row's program and calls, and of each target's first call with changes."""
    rows = (
        *itertools.product(_FUNCTIONS.values(), _OPTIONS.values()),
        *(("paged", options) for options in _OPTIONS_OF_PAGES.values()),
    )
    return json.loads(run_python(_ON_CPU, stdin=json.dumps(rows)))


def _lacks_only_a_stream(message: str | None) -> bool:
    """Which is operand 0."""
    parts = "[execute]", "bad operands at: 0)", "stream"
    return message is not None and all(part in message for part in parts)


@pytest.mark.parametrize("function", _FUNCTIONS.values(), ids=_FUNCTIONS)
@pytest.mark.parametrize("options", _OPTIONS.values(), ids=_OPTIONS)
def test_handlers_take_what_they_are_given(failures, function, options):
    _, *calls = row = failures[0][function + options]
    assert calls
    for name, message in row:
        assert _lacks_only_a_stream(message), (name, message)


@pytest.mark.parametrize("options", _OPTIONS_OF_PAGES.values(), ids=_OPTIONS_OF_PAGES)
def test_handler_of_pages(failures, options):
    _, *calls = row = failures[0]["paged" + options]
    assert [name for name, _ in calls] == [_ffi.PAGED_TARGET]
    for name, message in row:
        assert _lacks_only_a_stream(message), (name, message)


@pytest.mark.parametrize("handler", _ffi.TARGETS)
def test_handlers_take_nothing_else(failures, handler):
    """Every handler there is was called, and notices what is missing and what it does not know."""
    changed = failures[1][_ffi.TARGETS[handler]]
    for change, message in changed.items():
        assert message is not None, change
        assert re.search("arguments|attribute", message, re.IGNORECASE), (change, message)


def test_every_handler_has_a_target():
    assert set(_ffi.TARGETS) == set(_extension.cuda_handlers())
