"""The oracle of all other tests against a numpy loop, jax.nn, and finite differences."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxflash
import naive
import sampled
from attention_case import AttentionCase, visibility
from cases import BANDS, BASE, CASES, FAULTS, PACKED, SCORES
from check import split

_reference = jaxflash.reference.dot_product_attention

pytestmark = pytest.mark.usefixtures("accurate_products", "quick_compilation")


def _name(case):
    return case.name


def _upcast(arrays):
    """Every floating array in float64."""
    return jax.tree.map(
        lambda x: x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, arrays
    )


@pytest.mark.parametrize(
    "case",
    [
        c
        for c in (*BASE, *BANDS, *SCORES, *PACKED, *FAULTS)
        if not (c.dropout_rate or c.score_mod) and c.q_len <= 80
    ],
    ids=_name,
)
def test_is_the_numpy_loop(case):
    arrays = case.arrays()
    with np.errstate(invalid="ignore"):
        expected_out, expected_lse = naive.attention(case, arrays)
    with jax.enable_x64(True):
        attend = jax.jit(
            lambda arrays: case.function(jaxflash.reference)(
                **case.arguments(arrays), return_residual=True
            )
        )
        out, lse = jax.device_get(attend(_upcast(arrays)))
    np.testing.assert_allclose(out, expected_out, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-9, atol=1e-12)


def _jax_nn_takes(case):
    return (
        not case.missing_in_kernels
        and not any((case.segments, case.logits_soft_cap, case.sink, case.alibi, case.score_mod))
        and case.mask_value is None
        and case.packed is None
        and not case.dropout_rate
        and not (case.gpu_only or case.bias_hides or case.poison or case.visible_nan)
        and case.causal_alignment == "top_left"
        and case.value_dim is None
        and len(case.batch) <= 1
        and 0 not in case.shapes["logits"]
        and not (isinstance(case.local_window_size, tuple) and None in case.local_window_size)
        and case.dtype == "float32"
        and visibility(case, case.arrays()).any()
    )


@pytest.mark.parametrize("case", [c for c in CASES if _jax_nn_takes(c)], ids=_name)
def test_is_jax_nn_where_a_row_sees_a_key(case):
    arrays = case.arrays()
    options = {k: v for k, v in case.options.items() if k != "precision"}
    # jax.nn wants an axis of one where there is no batch.
    lengths = {name: x.reshape(-1) for name, x in arrays.items() if name.endswith("lengths")}
    attend = functools.partial(jax.nn.dot_product_attention, **options, return_residual=True)
    # With 64-bit types, jax.nn compares int32 lengths to int64 positions.
    with jax.default_matmul_precision("highest"), jax.numpy_dtype_promotion("standard"):
        expected, expected_lse = jax.device_get(jax.jit(attend)(**(arrays | lengths)))
    attend = functools.partial(_reference, **options, return_residual=True)
    out, lse = jax.device_get(jax.jit(attend)(**arrays))
    sees = np.moveaxis(visibility(case, arrays).any(axis=-1), -1, -2)
    np.testing.assert_allclose(out[sees], expected[sees], rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(lse[sees], expected_lse[sees], rtol=1e-5, atol=1e-5)
    assert (out[~sees] == 0).all()
    assert np.isneginf(lse[~sees]).all()


_ALL_FEATURES = AttentionCase(
    "finite differences", q_len=5, kv_len=6, q_heads=4, kv_heads=2, head_dim=3, value_dim=2,
    batch=(2,), bias="BNTS", mask="11TS", sink=True, alibi="BN", logits_soft_cap=2.0,
    dropout_rate=0.3, is_causal=True, local_window_size=(3, 1), query_lengths=(5, 4),
    kv_lengths=(6, 3), dtype="float64",
)  # fmt: skip


def test_gradients_are_finite_differences():
    case = _ALL_FEATURES
    with jax.enable_x64(True):
        operands, others = split(_upcast(case.arrays()))
        dout, dlse = (x.astype(np.float64) for x in case.cotangents())

        def loss(operands):
            out, lse = _reference(**operands, **others, **case.options, return_residual=True)
            return jnp.sum(out * dout) + jnp.sum(jnp.where(jnp.isfinite(lse), lse * dlse, 0))

        gradients = jax.device_get(jax.jit(jax.grad(loss))(operands))
        loss = jax.jit(loss)
        rng = np.random.default_rng(0)
        step = 1e-6
        for name, gradient in gradients.items():
            direction = rng.standard_normal(gradient.shape)
            ends = [
                float(loss({**operands, name: operands[name] + sign * step * direction}))
                for sign in (1, -1)
            ]
            slope = (ends[0] - ends[1]) / (2 * step)
            assert abs(slope) > 1e-3, f"{name}: nothing to compare"
            np.testing.assert_allclose(np.sum(gradient * direction), slope, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("case", [c for c in FAULTS if c.poison], ids=_name)
def test_poison_reaches_no_gradient(case):
    def gradients(arrays, dout, dlse):
        operands, others = split(arrays)

        def attend(operands):
            return _reference(**operands, **others, **case.options, return_residual=True)

        return jax.vjp(attend, operands)[1]((dout, dlse))[0]

    gradients = jax.jit(gradients)
    poisoned, clean = (
        gradients(case.arrays(clean), *case.cotangents(clean)) for clean in (False, True)
    )
    for name in clean:
        np.testing.assert_array_equal(poisoned[name], clean[name], err_msg=name)


@pytest.mark.parametrize(("left", "right"), [(None, None), (None, 0), (9, 0), (3, 5)])
def test_sampled_checks(left, right):
    """The checks that the large GPU tests use accept what is right and see what is wrong."""
    shapes = (2, 40, 4, 16), (2, 40, 2, 16), (2, 40, 2, 8)
    call = sampled.run(shapes, jnp.float32, "float32", left=left, right=right, implementation="xla")
    rows = [(batch, row, head) for batch in (0, 1) for row in (0, 7, 39) for head in (0, 3)]
    keys = [(batch, key, head) for batch in (0, 1) for key in (0, 7, 39) for head in (0, 1)]
    sampled.check(call, rows, keys)
    for name, which in (("out", "rows"), ("lse", "rows"), ("dquery", "rows"), ("dkey", "keys"),
                        ("dvalue", "keys")):  # fmt: skip
        wrong = dataclasses.replace(call, **{name: getattr(call, name) * 1.001})
        with pytest.raises(AssertionError, match=name):
            sampled.check(
                wrong, **{"rows": [], "keys": [], which: dict(rows=rows, keys=keys)[which]}
            )


# ---- Dropout ------------------------------------------------------------------------------------


def _dropped(shape=(3, 2, 40, 56), rate=0.25, seed=(1, 2), offset=(0, 0)):
    """What dropout multiplies the probabilities by, as (B, N, T, S); equal logits."""
    batch, heads, rows, columns = shape
    eye = np.broadcast_to(
        np.eye(columns, dtype=np.float32)[:, None, :], (batch, columns, 1, columns)
    )
    out = jax.jit(functools.partial(_reference, dropout_rate=rate))(
        np.zeros((batch, rows, heads, 4), np.float32),
        np.zeros((batch, columns, 1, 4), np.float32),
        eye,
        dropout_rng=np.array(seed, np.uint32),
    )
    return np.moveaxis(np.asarray(out), 2, 1) * columns


def test_dropout_keeps_the_mean_and_draws_every_element_anew():
    weights = _dropped()
    kept = weights > 0
    deviation = np.sqrt(0.25 * 0.75 / kept.size)
    assert abs(kept.mean() - 0.75) < 5 * deviation
    np.testing.assert_allclose(weights[kept], 1 / 0.75, rtol=1e-4)
    # Neighbours along every axis are independent.
    for axis in range(4):
        first, second = np.split(np.take(kept, range(kept.shape[axis] // 2 * 2), axis), 2, axis)
        agree = (first == second).mean()
        assert abs(agree - (0.75**2 + 0.25**2)) < 5 * 0.5 / np.sqrt(first.size), axis


def test_dropout_depends_on_the_index_alone():
    weights = _dropped()
    np.testing.assert_array_equal(_dropped((3, 2, 17, 56)) > 0, weights[:, :, :17] > 0)
    np.testing.assert_array_equal(_dropped((3, 2, 40, 33)) > 0, weights[..., :33] > 0)
    np.testing.assert_array_equal(_dropped((2, 1, 40, 56)) > 0, weights[:2, :1] > 0)
    assert ((_dropped(seed=(1, 3)) > 0) != (weights > 0)).any()
    assert ((_dropped(seed=(2, 2)) > 0) != (weights > 0)).any()
    # A higher rate drops more, and nothing that it keeps was dropped before.
    assert not ((_dropped(rate=0.5) > 0) & ~(weights > 0)).any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes(dtype):
    """Of the results, in jax's strict promotion mode, with a bias of another dtype."""
    with jax.enable_x64(True):
        x = jnp.ones((1, 5, 2, 8), dtype)
        out, lse = _reference(x, x, x, jnp.ones((5, 5), jnp.float16), return_residual=True)
    assert out.dtype == dtype
    assert lse.dtype == (jnp.float64 if dtype == "float64" else jnp.float32)


def test_key_styles_give_one_mask():
    x = np.random.default_rng(0).standard_normal((1, 16, 2, 8)).astype(np.float32)
    old = _reference(x, x, x, dropout_rate=0.5, dropout_rng=jax.random.PRNGKey(3))
    new = _reference(x, x, x, dropout_rate=0.5, dropout_rng=jax.random.key(3))
    np.testing.assert_array_equal(old, new)


def test_arguments_that_change_nothing_here():
    x = np.random.default_rng(0).standard_normal((1, 9, 2, 8)).astype(np.float32)
    expected = _reference(x, x, x)
    for options in (
        dict(implementation="xla"),
        dict(precision="highest"),
        dict(deterministic_backward=True),
    ):
        np.testing.assert_array_equal(_reference(x, x, x, **options), expected)
