"""Lengths around the edges of every tile, for every pair of head sizes that has a kernel; logits
that change along the keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxflash
from jaxflash import masks

# Tiles have 64, 80, 112, 128, 192 or 256 rows or keys; 96 is half of 192.
_EDGES = (1, 63, 64, 65, 79, 81, 95, 97, 111, 113, 127, 128, 129, 160, 161, 191, 193, 255, 257)
# (queries, keys): each edge on both sides at once and against another one.
_LENGTHS = (
    *((length, length) for length in _EDGES),
    *zip(_EDGES, _EDGES[6:] + _EDGES[:6], strict=True),
    (0, 65),
    (65, 0),
)
# Few queries, whose key tiles of 64, 112 or 128 are shared among blocks.
_FEW_QUERIES = (
    (1, 1025), (1, 1151), (2, 1152), (3, 1153), (4, 1343), (5, 1345), (8, 2047), (9, 1400),
    (16, 1281), (17, 1232), (31, 1233), (32, 2049), (33, 1088), (63, 1089), (64, 1344), (65, 1345),
    (127, 1200), (129, 1153), (200, 1250),
)  # fmt: skip
_HEAD_SIZES = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
_HEADS, _KV_HEADS = 4, 2
_NAMES = ("out", "lse", "dquery", "dkey", "dvalue")


def _arrays(seed, q_len, kv_len, head_dim, value_dim):
    """query, key, value, cotangent of out."""
    rng = np.random.default_rng(seed)
    shapes = (
        (1, q_len, _HEADS, head_dim),
        (1, kv_len, _KV_HEADS, head_dim),
        (1, kv_len, _KV_HEADS, value_dim),
        (1, q_len, _HEADS, value_dim),
    )
    return [rng.standard_normal(shape, np.float32).astype(jnp.bfloat16) for shape in shapes]


def _truth(query, key, value, dout, causal, bias=0.0):
    """out, lse and the gradients, in float64."""
    query, key, value, dout = (x[0].astype(np.float64) for x in (query, key, value, dout))
    group = _HEADS // _KV_HEADS
    scale = query.shape[-1] ** -0.5
    k, v = (np.repeat(x, group, axis=1) for x in (key, value))
    logits = scale * np.einsum("tnh,snh->nts", query, k) + bias
    if causal:
        logits[:, ~np.tri(*logits.shape[1:], dtype=bool)] = -np.inf
    top = logits.max(axis=-1, keepdims=True, initial=-1e30)
    p = np.exp(logits - top)
    total = p.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    p /= np.where(total == 0, 1, total)
    out = np.einsum("nts,snh->tnh", p, v)
    dp = np.einsum("tnh,snh->nts", dout, v)
    ds = scale * p * (dp - np.sum(dout * out, axis=-1).T[..., None])
    dkey = np.einsum("nts,tnh->snh", ds, query).reshape(*key.shape[:2], group, key.shape[2])
    dvalue = np.einsum("nts,tnh->snh", p, dout).reshape(*value.shape[:2], group, value.shape[2])
    return (
        out,
        lse.T,
        np.einsum("nts,snh->tnh", ds, k),
        dkey.sum(axis=2),
        dvalue.sum(axis=2),
    )


def _compare(name, actual, truth, where):
    """Per position and head: a wrong edge spoils whole rows."""
    actual = np.asarray(actual)[0].astype(np.float64)
    assert actual.shape == truth.shape, where
    if name == "lse":
        # Of logits of 5000, up to 1.2e-6 of them is lost.
        np.testing.assert_allclose(actual, truth, atol=2e-3, rtol=2.0**-19, err_msg=where)
        return
    if truth.size == 0:
        return
    error, size = (np.linalg.norm(x, axis=-1) for x in (actual - truth, truth))
    typical = np.sqrt(np.mean(size**2))
    # Operands are rounded to 8 bits; terms that cancel are of size 1 an element.
    allowed = 2.0**-6 * (size + typical) + 2.0**-9 * np.sqrt(truth.shape[-1])
    assert np.isfinite(error).all(), f"{name} is not finite{where}"
    worst = np.unravel_index(np.argmax(error / allowed), error.shape)
    assert error[worst] <= allowed[worst], (
        f"{name} at (position, head) {tuple(map(int, worst))}: error {error[worst]:.3g}, allowed "
        f"{allowed[worst]:.3g}{where}"
    )


def check_edges(head_dim, value_dim, lengths=_LENGTHS, implementation="cuda"):
    calls = [
        (_arrays(seed, *pair, head_dim, value_dim), seed % 2 == 1, seed % 3 == 1)
        for seed, pair in enumerate(lengths)
    ]

    def step(arrays, causal, deterministic):
        attend = functools.partial(
            jaxflash.dot_product_attention, implementation=implementation, return_residual=True,
            is_causal=causal, deterministic_backward=deterministic,
        )  # fmt: skip
        *qkv, dout = arrays
        (out, lse), pull = jax.vjp(attend, *qkv)
        return out, lse, *pull((dout, jnp.zeros_like(lse)))

    @jax.jit
    def all_of_them(inputs):  # in one program: compiling takes longest
        return [step(x, *call[1:]) for x, call in zip(inputs, calls, strict=True)]

    results = jax.device_get(all_of_them([arrays for arrays, _, _ in calls]))
    for (arrays, causal, deterministic), result, pair in zip(calls, results, lengths, strict=True):
        where = f"; lengths {pair}, causal {causal}, deterministic {deterministic}"
        for name, actual, truth in zip(_NAMES, result, _truth(*arrays, causal), strict=True):
            _compare(name, actual, truth, where)


# What is added to the logits along the keys. A kernel that walks over tiles of keys keeps a
# reference for its exponentials, and has to move it, or not, once the logits outgrow it.
def _drifts(count):
    keys = np.arange(count)
    return {
        "rising": 0.5 * keys,  # by more than 2^32 in 64 keys, in one direction or the other
        "falling": -0.5 * keys,
        "slowly": 0.1 * keys,  # not in every tile
        "plateau-first": np.where(keys < count - 100, 21.0, 0.0),  # sums pass 2^32, probabilities
        "plateau-last": np.where(keys < 100, 0.0, 21.0),  # hardly do
        "peaks": np.where(keys % 97 == 5, 60.0, 0.0),
        "beyond-range": np.where(keys == count // 2, 5e3, 0.0),  # exp of it is infinite
    }


def check_drifts(head_dim, value_dim, q_len=130, kv_len=700, implementation="cuda"):
    calls = []
    drifts = _drifts(kv_len)
    for seed, drift in enumerate(drifts.values()):
        query, key, value, _ = _arrays(seed, q_len, kv_len, head_dim, value_dim)
        query[..., 0] = 8
        key[..., 0] = (drift * head_dim**0.5 / 8)[:, None]
        calls.append((query, key, value))

    @jax.jit
    def all_of_them(calls):
        attend = functools.partial(
            jaxflash.dot_product_attention, implementation=implementation, return_residual=True
        )
        return [attend(*call) for call in calls]

    results = jax.device_get(all_of_them(calls))
    for name, call, result in zip(drifts, calls, results, strict=True):
        truth = _truth(*call, np.zeros_like(result[0]), causal=False)[:2]
        for array, actual, expected in zip(_NAMES, result, truth, strict=False):
            _compare(array, actual, expected, f"; logits {name}")


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "value_dim"), _HEAD_SIZES)
def test_lengths_around_tile_edges(head_dim, value_dim):
    check_edges(head_dim, value_dim)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "value_dim"), _HEAD_SIZES)
def test_few_queries_and_many_keys(head_dim, value_dim):
    check_edges(head_dim, value_dim, _FEW_QUERIES)
    check_drifts(head_dim, value_dim, q_len=3, kv_len=1500)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "value_dim"), _HEAD_SIZES)
def test_logits_that_change_along_the_keys(head_dim, value_dim):
    check_drifts(head_dim, value_dim)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "value_dim"), _HEAD_SIZES)
def test_bias_of_other_heads_is_not_seen(head_dim, value_dim):
    """What TMA loads of a bias ends in rows of the next head."""
    *arrays, dout = _arrays(0, 100, 136, head_dim, value_dim)
    bias = np.random.default_rng(1).standard_normal((1, _HEADS, 100, 136), np.float32)
    hidden = bias.copy()
    hidden[:, _HEADS // _KV_HEADS :] = np.nan  # but of the first head of keys

    @jax.jit
    def results(bias, *arrays):
        def attend(*arrays):
            return jaxflash.dot_product_attention(*arrays, bias=bias, implementation="cuda")

        out, pullback = jax.vjp(attend, *arrays)
        return out, *pullback(dout)

    expected, actual = (results(x.astype(jnp.bfloat16), *arrays) for x in (bias, hidden))
    for name, want, got in zip(("out", *_NAMES[2:]), expected, actual, strict=True):
        want, got = (np.asarray(x, np.float32) for x in (want, got))
        half = want.shape[2] // 2
        np.testing.assert_allclose(
            got[:, :, :half], want[:, :, :half], atol=0.02, rtol=0.02, err_msg=name
        )
        assert np.isnan(got[:, :, half:]).any(), name


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "value_dim"), _HEAD_SIZES)
def test_tiny_values_behind_a_bias(head_dim, value_dim):
    """Where scores rise, references lie far above them; probabilities times values of 1e-18 must
    still be numbers."""
    query, key, value, _ = _arrays(0, 130, 700, head_dim, value_dim)
    biases = {"level": np.zeros(700), "rising": _drifts(700)["rising"]}

    @jax.jit
    def all_of_them(query, key, value, biases):
        return [
            jaxflash.dot_product_attention(query, key, value, bias=bias, implementation="cuda")
            for bias in biases
        ]

    tiny = (value.astype(np.float32) * 1e-18).astype(jnp.bfloat16)
    rows = [jnp.asarray(bias[None, None, None], jnp.bfloat16) for bias in biases.values()]
    results = jax.device_get(all_of_them(query, key, tiny, rows))
    for name, bias, out in zip(biases, rows, results, strict=True):
        rounded = np.asarray(bias, np.float64)[0, 0, 0]
        expected = _truth(query, key, value, out, causal=False, bias=rounded)[0]
        _compare("out", np.asarray(out, np.float64) * 1e18, expected, f"; bias {name}")


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1e-15, 1e9])
@pytest.mark.parametrize(("head_dim", "value_dim"), _HEAD_SIZES)
def test_values_at_the_ends_of_a_soft_cap(head_dim, value_dim, size):
    """Where no reference is subtracted, probabilities are e^50 and e^-50."""
    query, key, value, _ = _arrays(0, 130, 1300, head_dim, value_dim)
    signs = np.where(np.arange(130) % 2 == 0, 100.0, -100.0)[:, None, None]
    query = np.broadcast_to(signs, query.shape).astype(jnp.bfloat16)
    value = ((value.astype(np.float32) + 1.0) * size).astype(jnp.bfloat16)
    out, lse = jax.jit(
        functools.partial(
            jaxflash.dot_product_attention,
            logits_soft_cap=50.0,
            return_residual=True,
            implementation="cuda",
        )
    )(query, np.abs(key) + 1, value)
    group = query.shape[2] // value.shape[2]
    mean = np.repeat(np.mean(np.asarray(value, np.float64), axis=1), group, axis=1)
    np.testing.assert_allclose(
        np.asarray(out, np.float64), np.broadcast_to(mean[:, None], out.shape), rtol=0.02
    )
    caps = np.where(np.arange(130) % 2 == 0, 50.0, -50.0)[:, None]
    np.testing.assert_allclose(lse, np.broadcast_to(caps + np.log(1300), lse.shape), rtol=1e-3)


@pytest.mark.parametrize("path", ["xla", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("lengths", [(130, 200), (2, 1300)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("low", [-1e9, -1e10, -1e30])
def test_rows_far_below_zero(path, dtype, lengths, head_dim, low):
    """As models have it instead of -inf. On the kernels rows below -1.49e9 (-9.3e7) see no key: the
    exponents of their probabilities would be hundreds (tens) off."""
    q_len, kv_len = lengths
    arrays = _arrays(0, q_len, kv_len, head_dim, head_dim)
    query, key, value, dout = (x.astype(dtype) for x in arrays)
    bias = np.zeros((1, 1, q_len, kv_len), np.float32)
    bias[..., ::2, :] = low
    bias[..., 1::2, 3::2] = low
    attend = functools.partial(
        jaxflash.dot_product_attention, return_residual=True, implementation=path
    )

    @jax.jit
    def run(query, key, value, bias, dout):
        (out, lse), pull = jax.vjp(lambda *x: attend(*x, bias), query, key, value)
        return out, lse, pull((dout, jnp.zeros_like(lse)))

    out, lse, gradients = jax.device_get(run(query, key, value, bias, dout))
    lowered = out.astype(np.float32)[:, ::2]
    if path == "cuda" and low < (-9.3e7 if dtype == jnp.float16 else -1.49e9):
        assert (lowered == 0).all()
        assert (lse[:, ::2] == -np.inf).all()
    elif path == "cuda":
        # Products that start from such a number are truncated to its last digit, which is 64.
        assert (np.abs(lowered) <= np.abs(value.astype(np.float32)).max()).all()
        np.testing.assert_allclose(lse[:, ::2], low, rtol=1e-6)
    else:
        group = _HEADS // _KV_HEADS
        mean = np.repeat(np.mean(value.astype(np.float32), axis=1), group, axis=1)
        mean = np.broadcast_to(mean[:, None], lowered.shape)
        np.testing.assert_allclose(lowered, mean, atol=0.01)
        np.testing.assert_allclose(lse[:, ::2], low, rtol=1e-6)
    assert (np.abs(lse[:, 1::2]) < 20).all()
    for name, x in zip(("query", "key", "value"), gradients, strict=True):
        assert np.isfinite(x.astype(np.float32)).all(), name


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_plans_beside_masks_that_hide_more(head_dim):
    """What a plan knows to be shown as a whole is not."""

    def in_blocks(b, h, q, kv):
        return (q // 128 == kv // 128) | (kv < 64)

    def not_by_three(b, h, q, kv):
        return (q * kv) % 3 != 0

    query, key, value, dout = _arrays(0, 330, 400, head_dim, head_dim)
    shape = (1, _HEADS, 330, 400)

    def run(mask):
        def loss(query, key, value):
            out = jaxflash.dot_product_attention(
                query, key, value, mask=mask, implementation="cuda"
            )
            return jnp.sum(out * dout, dtype=jnp.float32)

        return jax.device_get(jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(query, key, value))

    mask = masks.function(in_blocks) & masks.function(not_by_three)
    plan = masks.plan(masks.function(in_blocks), shape) & masks.function(not_by_three)
    expected = run(mask)
    for x, y in zip(*map(jax.tree.leaves, (run(plan), expected)), strict=True):
        x, y = x.astype(np.float32), y.astype(np.float32)
        assert np.linalg.norm(x - y) <= 1e-2 * np.linalg.norm(y)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("q_len", [0, 1, 65])
@pytest.mark.parametrize("path", ["xla", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_no_query_heads(path, q_len, dtype, deterministic):
    """Keys that no query head reads have gradients of 0, in memory that is not clean."""

    @jax.jit
    def run(query, key, value):
        attend = functools.partial(
            jaxflash.dot_product_attention, implementation=path, return_residual=True,
            deterministic_backward=deterministic, sink=jnp.ones(0) if q_len == 1 else None,
        )  # fmt: skip
        (out, lse), pull = jax.vjp(attend, query, key, value)
        return out, lse, pull((out, lse))

    query = jnp.ones((2, q_len, 0, 64), dtype)
    key = jnp.ones((2, 70, 2, 64), dtype)
    jax.block_until_ready([jnp.full(key.shape, jnp.nan, dtype) for _ in range(64)])
    out, lse, gradients = run(query, key, key)
    assert out.shape == query.shape
    assert lse.shape == query.shape[:-1]
    for gradient, x in zip(gradients, (query, key, key), strict=True):
        assert gradient.shape == x.shape
        np.testing.assert_array_equal(np.asarray(gradient, np.float32), np.zeros(x.shape))


def test_the_check_itself():
    """The blockwise path passes it, and a wrong row does not."""
    check_edges(96, 64, lengths=((1, 1), (65, 63), (20, 33), (0, 5), (5, 0)), implementation="xla")
    check_drifts(96, 64, implementation="xla")
    truth = _truth(*_arrays(0, 65, 63, 96, 64), causal=True)[0]
    wrong = truth.copy()
    wrong[64] = 0
    with pytest.raises(AssertionError, match=r"64, \d"):
        _compare("out", wrong[None], truth, "")
