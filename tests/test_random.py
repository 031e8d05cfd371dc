"""Random combinations of sizes and arguments. A failure prints a line that repeats it.

Long runs: HYPOTHESIS_PROFILE=long pytest tests/test_random.py
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_case import AttentionCase
from check import check_attention
from jaxflash import _distance
from jaxflash._program import trace_predicate

# Around the edges of tiles, and nothing at all.
_LENGTHS = st.sampled_from([0, 1, 2, 15, 16, 17, 31, 33, 48, 63, 64, 65, 80])
_HEAD_SIZES = st.sampled_from([1, 2, 7, 8, 16, 24, 33, 64, 72, 96, 136, 192])
_WINDOW_SIDES = st.one_of(st.none(), st.integers(0, 70))


@st.composite
def plain_cases(draw) -> AttentionCase:
    """Calls of the kernels that are compiled ahead of time."""
    batch = draw(st.sampled_from([(), (1,), (2,), (3,), (2, 2)]))
    count = 1
    for size in batch:
        count *= size
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    q_len, kv_len = draw(_LENGTHS), draw(_LENGTHS)
    head_dim = draw(_HEAD_SIZES)

    def lengths(longest):
        given = st.lists(st.integers(0, longest), min_size=count, max_size=count).map(tuple)
        return draw(st.one_of(st.none(), given))

    return AttentionCase(
        "random",
        q_len=q_len,
        kv_len=kv_len,
        q_heads=kv_heads * draw(st.sampled_from([1, 1, 2, 3])),
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=draw(st.one_of(st.just(head_dim), _HEAD_SIZES)),
        batch=batch,
        dtype=draw(st.sampled_from(["float16", "bfloat16", "float32"])),
        precision=draw(st.sampled_from([None, "highest"])),
        scale=draw(st.sampled_from([None, None, 0.05, -0.3])),
        is_causal=draw(st.booleans()),
        causal_alignment=draw(st.sampled_from(["top_left", "bottom_right"])),
        local_window_size=draw(st.one_of(st.none(), st.tuples(_WINDOW_SIDES, _WINDOW_SIDES))),
        query_lengths=lengths(q_len),
        kv_lengths=lengths(kv_len),
        deterministic_backward=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


_AXES = st.sampled_from(["BNTS", "1NTS", "B1TS", "BN1S", "BNT1", "NTS", "TS", "11TS", "B11S"])


_MASK_VALUES = st.sampled_from(
    ["prefix", "global-tokens", "head-windows", "intervals", "whole-lengths", "array-or-band"]
)


@st.composite
def all_cases(draw) -> AttentionCase:
    """Those, with every argument that changes scores or who sees whom."""
    case = draw(plain_cases())
    same_length = case.q_len == case.kv_len
    return dataclasses.replace(
        case,
        bias=draw(st.one_of(st.none(), _AXES)),
        bias_dtype=draw(st.sampled_from([None, "float32", "bfloat16"])),
        mask=draw(st.one_of(st.none(), _AXES)),
        mask_value=draw(st.one_of(st.none(), st.none(), _MASK_VALUES)),
        segments=draw(st.sampled_from([None, "pair", "shared"] if same_length else [None, "pair"])),
        logits_soft_cap=draw(st.sampled_from([None, None, 2.0, 20.0])),
        sink=draw(st.booleans()),
        alibi=draw(st.sampled_from([None, "N", "BN"])),
        # The compilation of the dropout's generator takes longest: not every time.
        dropout_rate=draw(st.sampled_from([0.0, 0.0, 0.0, 0.4])),
    )


_SEQUENCES = st.lists(st.sampled_from([0, 1, 2, 5, 15, 16, 17, 33, 64, 65, 80]), max_size=4)


@st.composite
def packed_cases(draw) -> AttentionCase:
    """Calls of `varlen_attention`, of one set of boundaries or two, some with tokens behind the
    last sequence."""
    plain = draw(plain_cases())
    lengths = (*draw(_SEQUENCES), draw(st.sampled_from([1, 7, 64])))
    packed = (lengths,)
    if draw(st.booleans()):
        other = st.lists(st.sampled_from(lengths), min_size=len(lengths), max_size=len(lengths))
        packed = (lengths, tuple(draw(other)))
    padding = st.sampled_from([0, 0, 3])
    return dataclasses.replace(
        plain,
        batch=(),
        query_lengths=None,
        kv_lengths=None,
        packed=packed,
        q_len=sum(packed[0]) + draw(padding),
        kv_len=max(sum(packed[-1]) + draw(padding), 1),
        logits_soft_cap=draw(st.sampled_from([None, 2.0])),
        sink=draw(st.booleans()),
        alibi=draw(st.sampled_from([None, "N"])),
        score_mod=draw(st.sampled_from([None, "relative-table", "rows-of-heads", "dense-bias"])),
    )


@given(packed_cases())
def test_packed_xla(case):
    check_attention(case, "xla")


@pytest.mark.gpu
@settings(max_examples=10)
@given(packed_cases())
def test_packed_cuda(case):
    check_attention(case, "cuda")


@given(all_cases())
def test_xla(case):
    check_attention(case, "xla")


@pytest.mark.gpu
@given(plain_cases())
def test_cuda(case):
    check_attention(case, "cuda")


# Fewer: most of them compile two kernels.
@pytest.mark.gpu
@settings(max_examples=10)
@given(all_cases())
def test_cuda_scores(case):
    check_attention(dataclasses.replace(case, mask=None), "cuda")


_CONSTANTS = st.sampled_from([0, 1, 3, 4, 7, 8, 20, -1, -5, 2**31 - 1]).map("int32({})".format)
_NUMBERS = st.recursive(
    st.sampled_from(["q", "kv", "(q - kv)", "(kv - q)"]) | _CONSTANTS,
    lambda x: st.one_of(
        st.builds("({} {} {})".format, x, st.sampled_from("+-&^"), x),
        st.builds(
            "({} {} int32({}))".format,
            x,
            st.sampled_from(["*", "//", "%"]),
            st.sampled_from([1, 2, 3, 4, 5, 8, -1, -2, -3]),
        ),
        st.builds("{}({}, {})".format, st.sampled_from(["minimum", "maximum"]), x, x),
        st.builds("{}({})".format, st.sampled_from(["abs", "-"]), x),
    ),
    max_leaves=3,
)
_CONDITIONS = st.recursive(
    st.builds(
        "({} {} {})".format,
        _NUMBERS,
        st.sampled_from(["<", "<=", ">", ">=", "==", "!="]),
        _NUMBERS | _CONSTANTS,
    ),
    lambda x: st.builds("({} {} {})".format, x, st.sampled_from("&&|"), x),
    max_leaves=3,
)


@settings(max_examples=300)
@given(_CONDITIONS, st.sampled_from([(24, 24), (8, 40), (36, 12), (1, 30)]))
def test_masks_that_are_bands(condition, lengths):
    """What is taken for a band is one, and the one that it is taken for."""

    def visible(module, q, kv):
        names = {name: getattr(module, name) for name in ("int32", "abs", "minimum", "maximum")}
        return eval(condition, {}, {**names, "q": q, "kv": kv})

    predicate, _ = trace_predicate(lambda b, h, q, kv: jnp.asarray(visible(jnp, q, kv)), ())
    band = _distance.band_of(predicate, *lengths)
    if band is None:
        return
    q, kv = np.indices(lengths, np.int32)
    expected = (q - kv) % band.dilation == 0
    if band.left is not None:
        expected &= q - kv <= band.left
    if band.right is not None:
        expected &= kv - q <= band.right
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(visible(np, q, kv) & np.ones(lengths, bool), expected)
