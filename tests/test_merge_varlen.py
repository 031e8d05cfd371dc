"""Partial results merged, and packed sequences."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxflash
from check import assert_same_bits
from jaxflash import _blockwise, _extension, _ffi

N, K, H, VALUE = 4, 2, 16, 8

_dense = jaxflash.reference.dot_product_attention

pytestmark = pytest.mark.usefixtures("accurate_products", "quick_compilation")


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _close(actual, expected, **tolerance):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, **{"rtol": 1e-4, "atol": 1e-5, **tolerance})


# ---- merge_attention ----------------------------------------------------------------------------


def _parts(query, key, value, cuts, **options):
    ends = (0, *cuts, key.shape[1])
    return [
        jaxflash.dot_product_attention(
            query, key[:, i:j], value[:, i:j], return_residual=True, implementation="xla", **options
        )
        for i, j in itertools.pairwise(ends)
    ]


@pytest.mark.parametrize("cuts", [(), (20,), (1, 20, 49)], ids=str)
def test_merge_is_the_whole(cuts):
    """Values, lse, and the gradients of both."""
    qkv = _normal(2, 30, N, H), _normal(2, 50, K, H, seed=1), _normal(2, 50, K, VALUE, seed=2)

    def merged(*qkv):
        outs, lses = zip(*_parts(*qkv, cuts), strict=True)
        return jaxflash.merge_attention(outs, lses)

    def whole(*qkv):
        return _dense(*qkv, return_residual=True)

    def run(f):
        values, pull = jax.vjp(f, *qkv)
        return values, pull((_normal(2, 30, N, VALUE, seed=3), _normal(2, 30, N, seed=4)))

    _close(jax.jit(run, static_argnums=0)(merged), jax.jit(run, static_argnums=0)(whole))


def test_merge_of_rows_without_keys():
    """Parts that saw nothing, some with garbage in them, and rows that no part saw."""
    outs = _normal(3, 2, 5, N, VALUE)
    lses = _normal(3, 2, 5, N)
    lses[0, :, 0] = -np.inf
    outs[0, :, 0] = np.nan
    lses[:, :, 1] = -np.inf
    outs[:, :, 1] = 0.0

    def run(outs, lses):
        (out, lse), pull = jax.vjp(jaxflash.merge_attention, outs, lses)
        return out, lse, *pull((jnp.ones_like(out), jnp.ones_like(lse)))

    out, lse, douts, dlses = jax.jit(run)(outs, lses)
    assert (out[:, 1] == 0).all()
    assert np.isneginf(lse[:, 1]).all()
    assert np.isfinite(out).all()
    for gradient in (douts, dlses):
        assert np.isfinite(gradient).all()
        assert (gradient[:, :, 1] == 0).all()
    _close((out[:, 0], lse[:, 0]), jaxflash.merge_attention(outs[1:, :, 0], lses[1:, :, 0]))


def test_merge_adds_a_sink():
    """One part shows some rows nothing, and all parts show nothing to some."""
    query, key, value = (_normal(2, 8, N, H, seed=i) for i in range(3))
    sink, lengths = _normal(N, seed=3), np.array([8, 3], np.int32)

    def whole(query, key, value, sink):
        return jaxflash.dot_product_attention(
            query, key, value, sink=sink, query_seq_lengths=lengths, is_causal=True,
            return_residual=True,
        )  # fmt: skip

    def merged(query, key, value, sink):
        attend = functools.partial(
            jaxflash.dot_product_attention, query_seq_lengths=lengths,
            return_residual=True,
        )  # fmt: skip
        later = jaxflash.masks.function(lambda b, h, q, kv: q >= kv + 4)
        parts = (
            attend(query, key[:, :4], value[:, :4], is_causal=True),
            attend(query, key[:, 4:], value[:, 4:], mask=later),
        )
        return jaxflash.merge_attention(*zip(*parts, strict=True), sink=sink)

    def run(f):
        values, pull = jax.vjp(f, query, key, value, sink)
        return values, pull((_normal(2, 8, N, H, seed=4), _normal(2, 8, N, seed=5)))

    _close(jax.jit(run, static_argnums=0)(merged), jax.jit(run, static_argnums=0)(whole))
    for wrong in (np.ones(N + 1, np.float32), np.ones(N, np.int32)):
        with pytest.raises(ValueError, match="sink must be a floating array"):
            jaxflash.merge_attention([query], [query[..., 0]], sink=wrong)


def test_merge_is_associative():
    outs, lses = _normal(3, 2, 5, N, VALUE), _normal(3, 2, 5, N, seed=1)
    out, lse = jaxflash.merge_attention(outs[:2], lses[:2])
    nested = jaxflash.merge_attention((out, outs[2]), (lse, lses[2]))
    _close(nested, jaxflash.merge_attention(outs, lses))


def test_merge_keeps_the_dtype():
    outs = jnp.ones((2, 5, N, VALUE), jnp.bfloat16)
    lses = jnp.zeros((2, 5, N), jnp.float32)
    out, lse = jaxflash.merge_attention(outs, lses)
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize(
    ("outs", "lses", "word"),
    [
        (np.ones((2, 5, N, VALUE)), np.ones((2, 5, N, VALUE)), "lses"),
        (np.ones((2, 5, N, VALUE)), np.ones((3, 5, N)), "lses"),
        ([], [], "outs"),
        ([np.ones((5, N, VALUE)), np.ones((4, N, VALUE))], np.ones((2, 5, N)), "outs"),
        (np.ones((2, 5, N, VALUE), np.int32), np.ones((2, 5, N)), "outs"),
        (np.ones((2, 5, N, VALUE)), None, "lses"),
        (np.ones((2, 5)), np.ones(2), r"\(P, \*B, T, N, h\)"),
        ([np.ones((5, N, VALUE)), None], np.ones((2, 5, N)), "outs"),
    ],
)  # fmt: skip
def test_merge_errors(outs, lses, word):
    with pytest.raises(ValueError, match=word):
        jaxflash.merge_attention(outs, lses)


# ---- varlen_attention ---------------------------------------------------------------------------

_Q_LENGTHS = (7, 0, 20, 1, 13)
_KV_LENGTHS = (9, 4, 20, 0, 5)
_TOKENS, _KV_TOKENS = 50, 41  # some tokens follow the last sequence


def _boundaries(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _one_by_one(query, key, value, q_lengths, kv_lengths, **options):
    """(out, lse) of each sequence alone; what follows the last one sees nothing."""
    outs, lses = [], []
    q_ends, kv_ends = _boundaries(q_lengths), _boundaries(kv_lengths)
    for i in range(len(q_lengths)):
        rows, keys = slice(q_ends[i], q_ends[i + 1]), slice(kv_ends[i], kv_ends[i + 1])
        out, lse = _dense(query[rows], key[keys], value[keys], return_residual=True, **options)
        outs.append(out)
        lses.append(lse)
    rest = query.shape[0] - q_ends[-1]
    outs.append(jnp.zeros((rest, *outs[0].shape[1:]), outs[0].dtype))
    lses.append(jnp.full((rest, query.shape[1]), -jnp.inf))
    return jnp.concatenate(outs), jnp.concatenate(lses)


_VARLEN = {
    "plain": dict(),
    "causal": dict(is_causal=True),
    "bottom right": dict(is_causal=True, causal_alignment="bottom_right"),
    "window": dict(local_window_size=(3, 2), causal_alignment="bottom_right"),
    "alibi": dict(is_causal=True, alibi_slopes=np.linspace(0.1, 0.5, N, dtype=np.float32)),
    "sink and cap": dict(sink=np.zeros(N, np.float32), logits_soft_cap=3.0),
}


@pytest.mark.parametrize("options", _VARLEN.values(), ids=_VARLEN)
def test_varlen_is_each_sequence_alone(options):
    qkv = (
        _normal(_TOKENS, N, H),
        _normal(_KV_TOKENS, K, H, seed=1),
        _normal(_KV_TOKENS, K, VALUE, seed=2),
    )
    dout, dlse = _normal(_TOKENS, N, VALUE, seed=3), _normal(_TOKENS, N, seed=4)

    def packed(*qkv):
        return jaxflash.varlen_attention(
            *qkv, _boundaries(_Q_LENGTHS), _boundaries(_KV_LENGTHS), return_residual=True, **options
        )

    def alone(*qkv):
        return _one_by_one(*qkv, _Q_LENGTHS, _KV_LENGTHS, **options)

    @functools.partial(jax.jit, static_argnums=0)
    def run(f):
        values, pull = jax.vjp(f, *qkv)
        return values, pull((dout, dlse))

    tolerance = {} if jax.default_backend() == "cpu" else dict(rtol=2e-2, atol=2e-2)
    _close(run(packed), run(alone), **tolerance)


@pytest.mark.parametrize("options", [{}, dict(causal_alignment="bottom_right", is_causal=True)])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "ends",
    [(0, 30, 10, 41), (5, 2, 60, 41), (-9, 4, 4, 3), (0, 20, -(2**31), 2**31 - 1),
     (-(2**30) - 5, 2**30 + 5, 2**30 + 6, 2**30 + 7)],
    ids=["less", "first", "negative", "largest", "far apart"],
)  # fmt: skip
def test_boundaries_that_do_not_ascend(ends, shared, options):
    """They are clipped, then none is less than those before: on all paths the same."""
    qkv = _normal(41, N, H), _normal(41, K, H, seed=1), _normal(41, K, VALUE, seed=2)
    ends = np.array(ends, np.int32)
    meant = np.maximum.accumulate(np.clip(ends, 0, 41))

    def value_and_gradient(attend, ends):
        def loss(qkv):
            of_keys = ends if shared else ends.copy()
            return jnp.sum(jnp.sin(attend(*qkv, ends, of_keys, **options)))

        return jax.value_and_grad(loss)(qkv)

    expected = value_and_gradient(jaxflash.reference.varlen_attention, meant)
    _close(value_and_gradient(jaxflash.varlen_attention, ends), expected)
    _close(value_and_gradient(jaxflash.reference.varlen_attention, ends), expected)


@pytest.mark.parametrize("options", [{}, dict(causal_alignment="bottom_right", is_causal=True)])
@pytest.mark.parametrize("tokens", [(30, 41), (41, 30)])
def test_shared_boundaries_of_other_numbers_of_tokens(tokens, options):
    """One array for both sides, of which each has what lies within its tokens."""
    q, k, v = _normal(tokens[0], N, H), _normal(tokens[1], K, H), _normal(tokens[1], K, VALUE)
    ends = np.array([0, 12, 25, 41], np.int32)

    def value_and_gradient(attend):
        def loss(qkv):
            return jnp.sum(jnp.sin(attend(*qkv, ends, ends, **options)))

        return jax.value_and_grad(loss)((q, k, v))

    expected = value_and_gradient(jaxflash.reference.varlen_attention)
    _close(value_and_gradient(jaxflash.varlen_attention), expected)


_SHORT = {
    "as long as the mean": (10, 9, 12, 10, 9),
    "some longer": (16, 0, 13, 16, 5),
    "one much longer": (1, 33, 0, 9, 7),
    "all empty": (0, 0, 0, 0, 0),
}


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("tokens", ["48", "n"])
def test_export_of_any_number_of_sequences(tokens, alignment):
    scope = export.SymbolicScope()
    packed, ends = (export.symbolic_shape(x, scope=scope) for x in (f"{tokens}, 4, 16", "m"))

    @jax.jit
    def gradients(query, ends):
        def loss(query):
            key_ends = jnp.maximum(ends - 2, 0)
            return jnp.sum(
                jaxflash.varlen_attention(
                    query, query, query, ends, key_ends,
                    is_causal=True, causal_alignment=alignment,
                ) ** 2
            )  # fmt: skip

        return jax.grad(loss)(query)

    exported = export.export(
        gradients, platforms=["cpu", "cuda"], disabled_checks=jaxflash.EXPORT_CHECKS
    )(jax.ShapeDtypeStruct(packed, jnp.float32), jax.ShapeDtypeStruct(ends, jnp.int32))
    query = _normal(48, 4, 16)
    for lengths in ([48], [5, 0, 30, 13], [7, 8]):
        ends = _boundaries(lengths)
        _close(exported.call(query, ends), gradients(query, ends))


@pytest.mark.skipif(not _extension.kernels, reason="needs the kernels' library")
@pytest.mark.parametrize("options", [{}, dict(is_causal=True)], ids=str)
def test_packed_sequences_are_intervals(options):
    """Kernels test no element of a tile for its sequence: cuda/problem.h, MaskKind::kRanges."""
    shape = jax.ShapeDtypeStruct((256, 4, 64), jnp.bfloat16)
    ends = jax.ShapeDtypeStruct((4,), jnp.int32)

    def attend(q, ends):
        return jaxflash.varlen_attention(q, q, q, ends, ends, implementation="cuda", **options)

    call = _forward_call(attend, shape, ends)
    assert re.search(r"\bmask = 1 : i64", call), call


@pytest.mark.skipif(not _extension.kernels, reason="needs the kernels' library")
@pytest.mark.parametrize("shared", [True, False])
def test_band_of_packed_sequences(shared):
    """Of numbers in the packed arrays, where these are as far apart as positions are; else it is
    part of the intervals."""
    shape = jax.ShapeDtypeStruct((256, 4, 64), jnp.bfloat16)
    ends = jax.ShapeDtypeStruct((4,), jnp.int32)

    def attend(q, ends, others):
        return jaxflash.varlen_attention(
            q, q, q, ends, ends if shared else others, is_causal=True, implementation="cuda"
        )

    call = _forward_call(attend, shape, ends, ends)
    (right,) = re.findall(r"\bright = (\d+) : i64", call)
    assert int(right) == (0 if shared else 1 << 30), call


def _forward_call(function, *types) -> str:
    text = jax.jit(function).trace(*types).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = (x for x in text.splitlines() if f"@{_ffi.FORWARD_TARGET}" in x)
    return call


@pytest.mark.skipif(not _extension.kernels, reason="needs the kernels' library")
@pytest.mark.parametrize("shared", [True, False])
def test_relative_positions_of_packed_sequences(shared):
    """Boundaries that queries and keys share leave differences of positions what they are, so that
    slopes capture nothing more, and tables are read along diagonals."""

    def attend(q, ends, others, table, slopes):
        def relative(score, b, h, q, kv):
            return score + table[h, q - kv + 255]

        attend = functools.partial(
            jaxflash.varlen_attention, q, q, q, ends, ends if shared else others,
            implementation="cuda",
        )  # fmt: skip
        return attend(score_mod=relative) if slopes is None else attend(alibi_slopes=slopes)

    q = jax.ShapeDtypeStruct((256, 4, 64), jnp.bfloat16)
    ends = jax.ShapeDtypeStruct((4,), jnp.int32)
    table = jax.ShapeDtypeStruct((4, 511), jnp.float32)
    slopes = jax.ShapeDtypeStruct((4,), jnp.float32)
    call = _forward_call(attend, q, ends, ends, table, None)
    assert f"kHasDiagonals = {'true' if shared else 'false'}" in call
    call = _forward_call(attend, q, ends, ends, table, slopes)
    ranks = "dense<1> : tensor<1xi64>" if shared else "dense<[1, 2]> : tensor<2xi64>"
    assert f"capture_ranks = {ranks}" in call


@pytest.mark.parametrize(
    ("name", "at_once"), [("plain", 1), ("bottom right", 5), *((name, 2) for name in _VARLEN)]
)
def test_varlen_of_short_sequences(name, at_once, monkeypatch):
    """Lengths in each of the ways in which they are computed, in one program; sequences one by one,
    in groups of which the last repeats one of the group before it, and all together."""
    monkeypatch.setattr(_blockwise, "count_together", lambda *_: at_once)
    options = _VARLEN[name]
    qkv = (
        _normal(_TOKENS, N, H),
        _normal(_TOKENS, K, H, seed=1),
        _normal(_TOKENS, K, VALUE, seed=2),
    )
    dout, dlse = _normal(_TOKENS, N, VALUE, seed=3), _normal(_TOKENS, N, seed=4)

    def values_and_gradients(f):
        values, pull = jax.vjp(f, *qkv)
        return values, pull((dout, dlse))

    @jax.jit
    def packed(q_ends, kv_ends):
        attend = functools.partial(
            jaxflash.varlen_attention, implementation="xla", return_residual=True, **options
        )
        return values_and_gradients(lambda *qkv: attend(*qkv, q_ends, kv_ends))

    # Other lengths of keys than of queries.
    for lengths in _SHORT.values():
        alone = jax.jit(
            lambda lengths=lengths: values_and_gradients(
                lambda *qkv: _one_by_one(*qkv, lengths, lengths[::-1], **options)
            )
        )
        _close(packed(_boundaries(lengths), _boundaries(lengths[::-1])), alone())


@pytest.mark.parametrize("lengths", [(150, 150, 150), (185, 120, 145), (300, 50, 100)])
def test_varlen_of_sequences_longer_than_a_block(lengths):
    """As a batch of the mean length, or of a quarter more, and in blocks."""
    qkv = [_normal(sum(lengths), heads, H, seed=seed) for seed, heads in enumerate((N, K, K))]
    attend = functools.partial(jaxflash.varlen_attention, is_causal=True, implementation="xla")
    ends = _boundaries(lengths)
    _close(
        jax.jit(lambda *qkv: attend(*qkv, ends, ends, return_residual=True))(*qkv),
        _one_by_one(*qkv, lengths, lengths, is_causal=True),
    )


def test_varlen_of_short_sequences_keeps_them_apart():
    """NaN in one of them, and what it does to the gradients of the others: nothing."""
    qkv = [_normal(20, N, H, seed=seed) for seed in range(3)]
    dout = _normal(20, N, H, seed=3)
    ends = _boundaries((7, 6, 7))

    @jax.jit
    def gradients(dout, *qkv):
        attend = functools.partial(jaxflash.varlen_attention, implementation="xla")
        out, pull = jax.vjp(lambda *qkv: attend(*qkv, ends, ends), *qkv)
        return out, pull(dout)

    clean = gradients(dout, *qkv)
    for x in (*qkv, dout):
        x[7:13] = np.nan
    others = np.r_[:7, 13:20]
    assert_same_bits(
        *(jax.tree.map(lambda x: x[others], f) for f in (gradients(dout, *qkv), clean))
    )


def test_varlen_of_short_sequences_under_vmap():
    """Mapped over boundaries, of which each element would choose another way, and over arrays."""
    qkv = [_normal(4, _TOKENS, N, H, seed=seed) for seed in range(3)]
    ends = np.stack([_boundaries(lengths) for lengths in _SHORT.values()])

    def gradients(ends, *qkv):
        attend = functools.partial(jaxflash.varlen_attention, implementation="xla")
        out, pull = jax.vjp(lambda *qkv: attend(*qkv, ends, ends), *qkv)
        return out, pull(out)

    one_by_one = [jax.jit(gradients)(*x) for x in zip(ends, *qkv, strict=True)]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *one_by_one)
    _close(jax.jit(jax.vmap(gradients))(ends, *qkv), expected)
    same_ends = jax.jit(jax.vmap(gradients, (None, 0, 0, 0)))(ends[1], *qkv)
    _close(jax.tree.map(lambda x: x[1], same_ends), one_by_one[1])


def test_varlen_lengths_do_not_compile_again(compilations):
    qkv = _normal(32, N, H), _normal(32, K, H), _normal(32, K, H)
    attend = jax.jit(jaxflash.varlen_attention)
    first, *others = map(_boundaries, ((32, 0), (1, 31), (0, 16)))
    attend(*qkv, first, first)
    compilations.clear()
    for ends in others:
        attend(*qkv, ends, ends)
    assert not compilations


def test_varlen_takes_a_traced_scale():
    ends = _boundaries((8, 12))
    qkv = _normal(20, N, H), _normal(20, K, H, seed=1), _normal(20, K, H, seed=2)

    def attend(scale):
        return jaxflash.varlen_attention(*qkv, ends, ends, scale=scale)

    _close(jax.jit(attend)(np.float32(0.3)), attend(0.3))


def test_varlen_padding_is_not_read():
    qkv = [_normal(20, N, H), _normal(20, K, H), _normal(20, K, H)]
    ends = _boundaries((8, 7))

    def gradients(*qkv):
        attend = functools.partial(jaxflash.varlen_attention, cu_seqlens_q=ends, cu_seqlens_kv=ends)
        out, pull = jax.vjp(attend, *qkv)
        return out, pull(jnp.ones_like(out))

    clean = jax.jit(gradients)(*qkv)
    for x in qkv:
        x[15:] = np.nan
    assert_same_bits(jax.jit(gradients)(*qkv), clean)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        (dict(query=_normal(1, 8, N, H)), "query"),
        (dict(key=None), "key"),
        (dict(cu_seqlens_kv=None), "cu_seqlens_kv"),
        (dict(cu_seqlens_q=np.array([0.0, 8.0], np.float32)), "cu_seqlens_q"),
        (dict(cu_seqlens_kv=np.array([0, 4, 8], np.int32)), "cu_seqlens_kv"),
        (dict(cu_seqlens_q=np.array([0], np.int32)), "cu_seqlens_q"),
        (dict(cu_seqlens_q=np.array([[0, 8]], np.int32)), "cu_seqlens_q"),
        (dict(implementation="flash"), "implementation"),
        (dict(local_window_size=-1), "local_window_size"),
    ],
)  # fmt: skip
def test_varlen_errors(changes, word):
    ends = np.array([0, 8], np.int32)
    arguments = dict(
        query=_normal(8, N, H), key=_normal(8, K, H), value=_normal(8, K, H),
        cu_seqlens_q=ends, cu_seqlens_kv=ends,
    )  # fmt: skip
    with pytest.raises(ValueError, match=word):
        jaxflash.varlen_attention(**{**arguments, **changes})
