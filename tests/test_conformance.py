"""Every named row on every implementation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxflash
from attention_case import AttentionCase, visibility
from cases import CASES
from check import check_attention, check_tangents, on_gpu, split
from jaxflash import _passes


def _name(case):
    return case.name


def test_names_are_unique():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("case", [case for case in CASES if not case.gpu_only], ids=_name)
def test_xla(case):
    check_attention(case, "xla")


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if 0 in case.shapes["logits"] and not case.missing_in_kernels],
    ids=_name,
)
def test_default_of_nothing(case):
    """implementation=None: what the kernels are told is made on every platform."""
    check_attention(case, None)


@pytest.fixture(autouse=True)
def walks(request, monkeypatch):
    """Rows of that name are for the kernels that walk, which longer calls have."""
    if "walk-" in request.node.name:
        monkeypatch.setattr(_passes, "_LEAST_WALK", 1)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=_name)
def test_cuda(case):
    check_attention(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if not (case.missing_in_kernels or case.visible_nan)],
    ids=_name,
)
def test_tangents(case):
    check_tangents(case, "cuda")


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in CASES
        if case.name
        in (
            "bfloat16",
            "float16",
            "lengths-window-gqa",
            "segments",
            "poison-mask-64",
            "poison-segments-64",
        )
    ],
    ids=_name,
)
def test_tangents_xla(case):
    """A few; test_derivatives.py has the blockwise path's tangents of every option."""
    check_tangents(case, "xla")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        case
        for case in CASES
        if case.name
        in ("bfloat16", "lengths-window-gqa", "bias-bfloat16", "everything", "head-320")
    ],
    ids=_name,
)
def test_default_on_gpu(case):
    """implementation=None: the kernels, or the blockwise path on the same GPU."""
    assert on_gpu()
    check_attention(case, None)


_FAR_APART = (
    AttentionCase("millions", scale=1e6),
    AttentionCase("few keys", scale=1e9, q_heads=4, kv_heads=2),
    AttentionCase("causal", q_len=130, is_causal=True, scale=-1e9),
    AttentionCase("one row", q_len=1, kv_len=1024, scale=1e9),
    AttentionCase("blocks", q_len=300, kv_len=2500, batch=(1,), sink=True, scale=1e12),
    AttentionCase("packed", batch=(), q_len=60, packed=((20, 30, 10),), scale=1e9),
)


@pytest.mark.parametrize("case", _FAR_APART, ids=_name)
@pytest.mark.parametrize("path", ["xla", "reference"])
def test_logits_far_apart(path, case):
    """A row is the value of its largest logit, and so are its derivatives: XLA must not round a
    product in the maximum alone, and not where that is subtracted from it."""
    arrays = case.arrays()
    query, key = (arrays[name].astype(np.float64) for name in ("query", "key"))
    group = case.q_heads // case.num_kv_heads
    logits = case.scale * np.einsum("...tnh,...snh->...tns", query, key.repeat(group, axis=-2))
    visible = np.moveaxis(visibility(case, arrays), -3, -2)
    one_hot = np.where(visible, logits, -np.inf)
    one_hot = (one_hot == one_hot.max(-1, keepdims=True)).astype(np.float32)

    def rows(value):
        return np.einsum("...tns,...snh->...tnh", one_hot, value.repeat(group, axis=-2))

    with_gradient, others = split(arrays)
    if path == "xla":
        attend = functools.partial(case.function(jaxflash), implementation="xla")
    else:
        attend = case.function(jaxflash.reference)

    def loss(operands):
        out = attend(**case.arguments({**operands, **others}))
        return jnp.sum(jnp.sin(out)), out

    t_value = np.random.default_rng(1).standard_normal(arrays["value"].shape, np.float32)
    tangents = {name: np.zeros_like(x) for name, x in with_gradient.items()} | {"value": t_value}

    @jax.jit
    def run(operands, tangents):
        gradients, out = jax.grad(loss, has_aux=True)(operands)
        _, (_, t_out) = jax.jvp(loss, (operands,), (tangents,))
        second = jax.jvp(jax.grad(lambda x: loss(x)[0]), (operands,), (operands,))[1]
        return out, gradients, t_out, second

    out, gradients, t_out, second = jax.device_get(run(with_gradient, tangents))
    np.testing.assert_array_equal(out, rows(arrays["value"]))
    np.testing.assert_array_equal(t_out, rows(t_value))
    of_value = np.einsum("...tns,...tnh->...snh", one_hot, np.cos(out))
    of_value = of_value.reshape(*of_value.shape[:-2], case.num_kv_heads, group, -1).sum(-2)
    np.testing.assert_allclose(gradients["value"], of_value, rtol=1e-5, atol=1e-5)
    for name in ("query", "key"):
        np.testing.assert_allclose(gradients[name] / case.scale, 0, atol=1e-4, err_msg=name)
    assert all(np.isfinite(x).all() for x in second.values())
