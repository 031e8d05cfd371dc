"""The truth's truth: attention as a numpy loop over rows in float64, written without the package.

Also recomputes single rows of arrays that are too large for a dense truth.
"""

from __future__ import annotations

import numpy as np

from attention_case import AttentionCase, positions, to_rank, visibility


def attention(case: AttentionCase, arrays) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of every row; no dropout, whose mask only the package defines."""
    assert not case.dropout_rate
    out = np.zeros(case.shapes["out"])
    lse = np.full(case.shapes["lse"], -np.inf)
    visible = visibility(case, arrays)
    position = positions(case, arrays)
    query, key, value = (arrays[name].astype(np.float64) for name in ("query", "key", "value"))
    logits_shape = case.shapes["logits"]
    bias = to_rank(arrays.get("bias", np.float32(0)).astype(np.float64), len(logits_shape))
    bias = np.broadcast_to(bias, logits_shape)
    slopes = arrays.get("alibi_slopes", np.float32(0)).astype(np.float64)
    slopes = np.broadcast_to(slopes, (*case.batch, case.q_heads))
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    for index in np.ndindex(*case.shapes["lse"]):
        *batch, row, head = index
        batch = tuple(batch)
        seen = np.flatnonzero(visible[(*batch, head, row)])
        kv_head = head // (case.q_heads // case.num_kv_heads)
        logits = scale * (key[batch][seen, kv_head] @ query[index])
        logits += bias[(*batch, head, row)][seen]
        logits -= slopes[(*batch, head)] * np.abs(position[(*batch, row)] - seen)
        if case.logits_soft_cap is not None:
            logits = case.logits_soft_cap * np.tanh(logits / case.logits_soft_cap)
        if not np.isneginf(logits).all():  # also false for a row without a key
            sink = [arrays["sink"][head].astype(np.float64)] if case.sink else []
            out[index], lse[index] = softmax_sum(logits, value[batch][seen, kv_head], sink)
    return out, lse


def softmax_sum(logits, values, sink=()):
    """(sum of softmax(logits) * values, log of the denominator) of one row, in float64."""
    top = max(logits.max(), *sink) if len(sink) else logits.max()
    weights = np.exp(logits - top)
    total = weights.sum() + sum(np.exp(s - top) for s in sink)
    return (weights / total) @ values, top + np.log(total)
