"""The blockwise path on one CPU, which takes a batch in parts: here of one element each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxflash
from cases import CASES
from check import check_attention, check_tangents
from jaxflash import _parts, _primitive
from meshes import cpu_mesh

_ROWS = (
    "lengths-window-gqa",
    "mask-keys",
    "mask-rows",
    "bias-keys",
    "bias-bfloat16",
    "segments-causal-gqa",
    "dropout",
    "dropout-causal-gqa",
    "everything",
    "poison-mask",
    "score-mod-bias-batch-axes",
    "score-mod-hash",
    "score-mod-slopes",
    "score-mod-learned-cap",
    "score-mod-everything",
    "mask-value-batch-axes",
    "mask-value-array-or-band",
)
_IN_PARTS = {case.name: case for case in CASES if case.name in _ROWS}


@pytest.fixture
def parts(monkeypatch):
    """How many parts each pass has been cut into since then."""
    counts = []
    in_turn = _parts._in_turn

    def counted(parts, like, of_part):
        counts.append(parts.count)
        return in_turn(parts, like, of_part)

    monkeypatch.setattr(_parts, "_in_turn", counted)
    for name in ("_ELEMENTS", "_AT_ONCE", "_FEW_ROWS"):
        monkeypatch.setattr(_parts, name, 0)
    for clear in (_primitive._traced_once.cache_clear, jax.clear_caches):
        clear()
    yield counts
    for clear in (_primitive._traced_once.cache_clear, jax.clear_caches):
        clear()


@pytest.mark.parametrize("name", _ROWS)
def test_values_and_gradients(name, parts):
    case = _IN_PARTS[name]
    check_attention(case, "xla")
    assert parts == [case.batch[0]] * 2  # forward and backward


@pytest.mark.parametrize("name", ["lengths-window-gqa", "score-mod-everything"])
def test_tangents(name, parts):
    check_tangents(_IN_PARTS[name], "xla")
    assert len(parts) > 1


def _operands(batch=5, length=40):
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, batch, length, 4, 16)).astype(np.float32)
    return query, key[..., :2, :], value[..., :2, :], np.arange(1, length, 8, dtype=np.int32)


@pytest.mark.parametrize("in_axes", [(0, 0, 0, 0), (1, None, 2, 0), (None, None, None, 0)])
def test_vmap(in_axes, parts):
    """Of calls without a batch, as in Equinox: whatever is mapped, all passes go in parts."""

    def loss(attend):
        def of_one(query, key, value, length):
            options = dict(key_value_seq_lengths=length, logits_soft_cap=2.0, is_causal=True)
            return attend(query, key, value, **options)

        def of_all(qkv, lengths):
            return jnp.sum(jnp.sin(jax.vmap(of_one, in_axes)(*qkv, lengths)))

        return jax.jit(jax.value_and_grad(of_all))

    *qkv, lengths = _operands()
    qkv = [
        x[0] if axis is None else np.moveaxis(x, 0, axis)
        for x, axis in zip(qkv, in_axes, strict=False)
    ]
    actual = loss(jaxflash.dot_product_attention)(qkv, lengths)
    expected = loss(jaxflash.reference.dot_product_attention)(qkv, lengths)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)
    assert set(parts) == {5}


def test_vmap_of_a_capture_that_all_share(parts):
    """It has no axis at all, and its gradient is a sum."""
    query, key, value, _ = _operands()

    def loss(attend, cap):
        def of_one(*qkv):
            return attend(*qkv, score_mod=lambda score, b, h, q, kv: cap * jnp.tanh(score / cap))

        return jnp.sum(jax.vmap(of_one)(query, key, value) ** 2)

    actual, expected = (
        jax.jit(jax.grad(functools.partial(loss, module.dot_product_attention)))(jnp.float32(2.0))
        for module in (jaxflash, jaxflash.reference)
    )
    np.testing.assert_allclose(actual, expected, rtol=2e-5)
    assert set(parts) == {5}


def test_a_float64_capture_that_all_share(parts):
    query, key, value, _ = _operands()

    def loss(attend, times):
        def score_mod(score, b, h, q, kv):
            return score - 0.1 * jnp.abs(times[q] - times[kv]).astype(jnp.float32)

        return jnp.sum(attend(query, key, value, score_mod=score_mod) ** 2)

    with jax.enable_x64(True):
        times = 1.7e9 + jnp.arange(40, dtype=jnp.float64)
        actual, expected = (
            jax.jit(jax.grad(functools.partial(loss, module.dot_product_attention)))(times)
            for module in (jaxflash, jaxflash.reference)
        )
    np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-5)
    assert set(parts) == {5}


def test_parts_of_several_elements(parts, monkeypatch):
    """Of 5 elements two at a time: the last part takes an element again."""
    query, key, value, _ = _operands()
    alone = jax.jit(jaxflash.dot_product_attention)(query, key, value)
    monkeypatch.setattr(_parts, "_ELEMENTS", 2 * 4 * 40 * 40)
    monkeypatch.setattr(_parts, "_cores", lambda: 1)
    _primitive._traced_once.cache_clear()
    jax.clear_caches()
    in_twos = jax.jit(jaxflash.dot_product_attention)(query, key, value)
    assert parts == [5, 3]
    np.testing.assert_allclose(alone, in_twos, rtol=1e-6, atol=1e-6)


def test_numbers_beyond_a_captured_array(parts, monkeypatch):
    """Clamped: they are those of the whole batch, also where the array has as many as a part."""
    monkeypatch.setattr(_parts, "_ELEMENTS", 2 * 4 * 40 * 40)
    monkeypatch.setattr(_parts, "_cores", lambda: 1)
    qkv = [jnp.asarray(x) for x in _operands()[:3]]
    factors, ends = jnp.array([0.3, 1.5], jnp.float32), jnp.array([7, 30], jnp.int32)

    def gradients(attention):
        def loss(qkv, factors):
            of_score = attention(*qkv, score_mod=lambda s, b, h, q, kv: s * factors[b])
            mask = jaxflash.masks.function(lambda b, h, q, kv: kv < ends[b])
            return jnp.sum(jnp.sin(of_score) * attention(*qkv, mask=mask))

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(qkv, factors)

    actual, expected = map(
        gradients, (jaxflash.dot_product_attention, jaxflash.reference.dot_product_attention)
    )
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)
    assert 3 in parts


@pytest.mark.parametrize("exported", [False, True])
def test_what_is_sharded_stays_whole(exported, parts):
    """Cutting an axis that is split over devices would gather it; what is exported on one device
    may be called on several."""
    mesh = cpu_mesh(x=2, y=2)
    sharding = NamedSharding(mesh, P("x", None, "y"))
    qkv = [jnp.asarray(x) for x in _operands(4)[:3]]
    sharded = [jax.device_put(x, sharding) for x in qkv]

    def loss(qkv):
        return jnp.sum(jaxflash.dot_product_attention(*qkv, is_causal=True) ** 2)

    step = jax.jit(jax.value_and_grad(loss))
    if exported:
        step = jax.jit(export.export(step, platforms=["cpu"])(qkv).call)
    text = step.lower(sharded).compile().as_text()
    assert "all-gather" not in text
    assert not parts


def test_few_queries_stay_together(parts, monkeypatch):
    """It takes longer to cut their keys than to use them."""
    monkeypatch.setattr(_parts, "_FEW_ROWS", 16)
    query, key, value, _ = _operands()
    jax.jit(jaxflash.dot_product_attention)(query[:, :3], key, value)
    assert not parts
