"""Attention in plain `jax.lax` loops over tiles, forward and backward: linear memory, any platform.

The forward pass takes blocks of queries one after the other and runs over the keys with an online
softmax; the backward pass takes blocks of keys and runs over the queries, recomputing the
probabilities from lse. Tiles that the band of the spec hides are never visited, nor are those
outside of the intervals of `_ranges`.

NaN and infinity in keys and values that no row sees, and in queries that see no key, reach neither
output nor gradient, as in `jaxflash.reference`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxflash import _dropout
from jaxflash._loops import Block, Blocks, blocks, cut, filled, loop, loop_over, put
from jaxflash._pages import Pages
from jaxflash._sizes import is_one
from jaxflash._spec import AttentionSpec, Operands, compute_dtype
from jaxflash._tile import Tile, Tiles, captures_of


def forward(spec: AttentionSpec, operands: Operands):
    """(out (*B, T, N, h) in the dtype of the query, lse (*B, T, N) in float32 or float64). Key and
    value may be `Pages`."""
    q, k, v = operands.query, operands.key, operands.value
    dtype = compute_dtype(q.dtype)
    *batch, q_len, q_heads, _ = q.shape
    kv_heads, value_dim = v.shape[-2:]

    out = filled(0, q, (*batch, q_len, q_heads, value_dim), q.dtype)
    lse = filled(-math.inf, q, (*batch, q_len, q_heads), dtype)
    if 0 in q.shape or 0 in k.shape:
        return out, lse

    rows, columns = tiling(spec, operands)
    tiles = Tiles(spec, operands, rows, columns)
    product = Products(spec, dtype, len(batch) + 1)
    captures = captures_of(spec, operands)
    sink = None if operands.sink is None else sink_of(operands, dtype)
    keys, values = _KeyBlocks(k, rows), _KeyBlocks(v, rows)
    # Not -inf, which is no number to be subtracted from one.
    lowest = float(jnp.finfo(dtype).min)
    # Of few keys the sums are there before the product: XLA for CPUs (jax 0.11) then makes one loop
    # of scores, maxima and exponentials, which saves more than the multiplications cost.
    normalises_first = is_one(columns.count) and columns.length <= _FEW_KEYS

    def query_block(i, results):
        out, lse = results
        row_block = rows[i]
        q_block = grouped(cut(q, row_block, -3), kv_heads)

        def key_block(j, state):
            column_block = columns[j]
            k_block, v_block = keys[column_block], values[column_block]
            tile = tiles.at(row_block, column_block, fresh_rows=False)
            scores = product.qk(q_block, k_block) * spec.scale
            logits = tiles.logits(scores, tiles.captured(captures, tile), tile)
            logits = tile.hide(logits, -jnp.inf)
            maximum = jnp.max(logits, axis=-1, keepdims=True, initial=lowest)
            if state is not None:
                maximum = jnp.maximum(state.maximum, maximum)
            p = jnp.exp(relative(logits, maximum))
            # Said, not left to exp: XLA's for CPUs (jax 0.10) makes numbers of NaN.
            total = jnp.sum(p, axis=-1, keepdims=True)
            total = jnp.where(jnp.isfinite(maximum), total, maximum - maximum)
            if normalises_first:
                p = p * _normalised(spec, maximum, total, sink).weight
            weighted = product.pv(tile.drop(p).astype(v.dtype), tile.hide_keys(v_block))
            if state is not None:
                rescale = jnp.exp(state.maximum - maximum)
                total = state.total * rescale + total
                weighted = state.weighted * rescale + weighted
            return _Softmax(maximum, total, weighted)

        if is_one(columns.count):
            state = key_block(0, None)
        else:
            row_shape = (*q_block.shape[:-1], 1)
            empty = _Softmax(
                maximum=filled(lowest, q_block, row_shape, dtype),
                total=filled(0, q_block, row_shape, dtype),
                weighted=filled(0, q_block, (*q_block.shape[:-1], value_dim), dtype),
            )
            state = loop_over(tiles.columns_seen_by(row_block), key_block, empty)
        normalised = _normalised(spec, state.maximum, state.total, sink)
        weighted = state.weighted if normalises_first else state.weighted * normalised.weight
        out_block = jnp.where(normalised.sees_no_key, 0.0, weighted)
        return (
            put(out, row_block, -3, ungrouped(out_block)),
            put(lse, row_block, -2, ungrouped(normalised.lse)[..., 0]),
        )

    # Rows after all sequences keep what they are filled with.
    return loop(0, tiles.row_count, query_block, (out, lse))


def backward(
    spec: AttentionSpec, operands: Operands, out, lse, dout, dlse, wanted: frozenset[str]
) -> Operands:
    """The gradients named in `wanted`, of the operands' shapes and dtypes; None for the others.

    Args:
        spec: what `forward` got.
        operands: what `forward` got.
        out: its result.
        lse: its result.
        dout: cotangent of out.
        dlse: cotangent of lse, or None for zero.
        wanted: names among those of `Operands.differentiable`.
    """
    q, k, v = operands.query, operands.key, operands.value
    dtype = compute_dtype(q.dtype)
    batch = q.shape[:-3]

    def zeros(name):
        x = operands.named()[name]
        return filled(0, x, x.shape, x.dtype)

    if 0 in q.shape or 0 in k.shape:
        return operands.holding({name: zeros(name) for name in wanted})

    rows, columns = tiling(spec, operands)
    tiles = Tiles(spec, operands, rows, columns)
    product = Products(spec, dtype, len(batch) + 1)
    captures = captures_of(spec, operands)
    fixed = {name: x for name, x in captures.items() if name not in wanted}
    moving = {name: x for name, x in captures.items() if name in wanted}

    # Sums of p * dp over a row's keys are those of dout * out. Of few keys they take no longer, and
    # a program that has no other use for out does without it.
    sums_dp = is_one(columns.count) and columns.length <= _FEW_SUMMED_KEYS
    all_rows = _Rows.of(operands, None if sums_dp else out, lse, dout, dlse, tiles.every_row_sees)
    kept_scale = _dropout.kept_scale(spec.dropout_rate)

    def key_block(i, gradients):
        # From the last block to the first: where the last one overlaps the one before it, it
        # counts nothing, and the block before it overwrites what it put there.
        column_block = columns[tiles.column_count - 1 - i]
        k_here, v_here = (cut(x, column_block, -3) for x in (k, v))
        k_block, v_block = keys_major(k_here), keys_major(v_here)

        def query_block(j, sums):
            row_block = rows[j]
            q_block, dout_block, lse_block, delta_block = all_rows.at(row_block)
            tile = tiles.at(row_block, column_block, fresh_rows=True)
            constants = tiles.captured(fixed, tile)
            logits, pull = jax.vjp(
                lambda scores, captured: tiles.logits(scores, captured | constants, tile),
                product.qk(q_block, k_block) * spec.scale,
                tiles.captured(moving, tile),
            )
            p = jnp.exp(tile.hide(relative(logits, lse_block), -jnp.inf))
            dp = tile.drop(product.qk(dout_block, v_block))
            dv, dk, dq = sums.value, sums.key, sums.query
            if dv is not None:
                dv = dv + product.over_rows(tile.drop(p).astype(v.dtype), dout_block)
            if spec.dropout_rate > 0.0:
                dp = dp * kept_scale
            if sums_dp:
                delta_block = delta_block + jnp.sum(tile.hide(p * dp, 0.0), axis=-1, keepdims=True)
            ds = tile.hide(p * (dp - delta_block), 0.0)
            ds, dcaptured = pull(ds)
            dcaptures = {
                name: tiles.add(name, sums.captures[name], tile, dcaptured[name]) for name in moving
            }
            ds = ds.astype(q.dtype)
            if dk is not None:
                dk = dk + product.over_rows(ds, cut(all_rows.seeing_query, row_block, -2))
            if dq is not None:
                dq_block = product.pv(ds, tile.hide_keys(k_block))
                dq = put(dq, row_block, -2, cut(dq, row_block, -2) + dq_block)
            return _Sums(dq, dk, dv, dcaptures)

        sums = gradients._replace(
            key=filled(0, k_here, k_here.shape, dtype) if "key" in wanted else None,
            value=filled(0, v_here, v_here.shape, dtype) if "value" in wanted else None,
        )
        sums = loop_over(tiles.rows_seeing(column_block), query_block, sums)
        dk, dv = gradients.key, gradients.value
        if dk is not None:
            dk = put(dk, column_block, -3, sums.key * spec.scale)
        if dv is not None:
            scale = kept_scale if spec.dropout_rate > 0.0 else 1.0
            dv = put(dv, column_block, -3, sums.value * scale)
        return sums._replace(key=dk, value=dv)

    sums = _Sums(
        query=filled(0, all_rows.query, all_rows.query.shape, dtype) if "query" in wanted else None,
        key=zeros("key") if "key" in wanted else None,
        value=zeros("value") if "value" in wanted else None,
        captures={
            name: filled(0, x, x.shape, compute_dtype(dtype, x.dtype)) for name, x in moving.items()
        },
    )
    sums = loop(0, tiles.column_count, key_block, sums)
    gradients = {"key": sums.key, "value": sums.value, **sums.captures}
    if "query" in wanted:
        gradients["query"] = ungrouped(sums.query * spec.scale)
    if "sink" in wanted:
        gradients["sink"] = sink_gradient(operands, out, lse, dout, dlse)
    given = operands.named()
    return operands.holding(
        {
            name: _shaped_as(given[name], gradients[name]).astype(given[name].dtype)
            for name in wanted
        }
    )


def sink_gradient(operands: Operands, out, lse, dout, dlse):
    """Of the call that gave out and lse; dlse may be None. Its value is 0, and so its dP."""
    alive = lse != -jnp.inf
    delta = jnp.sum(dout.astype(lse.dtype) * out.astype(lse.dtype), axis=-1)
    if dlse is not None:
        delta = delta - dlse.astype(lse.dtype)
    terms = jnp.where(alive, _sink_probability(operands, lse) * delta, 0.0)
    gradient = -jnp.sum(terms, axis=tuple(range(lse.ndim - 1)))
    return _shaped_as(operands.sink, gradient).astype(operands.sink.dtype)


def sink_tangent(operands: Operands, out, lse, t_sink):
    """What a tangent of the sink contributes to (tangent of out, tangent of lse)."""
    t_sink = t_sink.astype(lse.dtype).reshape((1,) * (lse.ndim - 1) + (-1,))
    t_lse = _sink_probability(operands, lse) * t_sink
    return (-t_lse[..., None] * out.astype(lse.dtype)).astype(out.dtype), t_lse


def _sink_probability(operands: Operands, lse):
    """Of each row, (*B, T, N); 0 where it sees no key."""
    sink = operands.sink.astype(lse.dtype).reshape((1,) * (lse.ndim - 1) + (-1,))
    return jnp.exp(sink - jnp.where(lse != -jnp.inf, lse, jnp.inf))


def tangent(spec: AttentionSpec, operands: Operands, out, lse, tangents: dict[str, Any]):
    """(tangent of out, tangent of lse), of their shapes and dtypes, given those of operands.

    With lse known, every probability is final on first sight: five products, one pass over the
    keys. A number that is the same for all logits of a row moves nothing but lse, so the tangents
    of a row's logits are taken relative to one of theirs: what cancels never arises.

    Args:
        spec: what `forward` got.
        operands: what `forward` got.
        out: its result.
        lse: its result.
        tangents: by name, of some that `Operands.differentiable` names; others are zero.
    """
    q, k, v = operands.query, operands.key, operands.value
    dtype = compute_dtype(q.dtype)
    *batch, _, _, _ = q.shape
    kv_heads, value_dim = v.shape[-2:]

    t_out = filled(0, q, out.shape, out.dtype)
    t_lse = filled(0, q, lse.shape, dtype)
    if 0 in q.shape or 0 in k.shape:
        return t_out, t_lse

    rows, columns = tiling(spec, operands)
    tiles = Tiles(spec, operands, rows, columns)
    product = Products(spec, dtype, len(batch) + 1)
    captures = captures_of(spec, operands)
    t_captures = captures_of(spec, operands.holding({"query": q, "key": k, **tangents}))
    moving = {name: captures[name] for name in t_captures}
    alive = lse != -jnp.inf

    def all_rows(x):
        return grouped(jnp.where(alive[..., None], x, 0), kv_heads)

    q_all, out_all = all_rows(q), all_rows(out)
    lse_all = grouped(jnp.where(alive, lse, jnp.inf)[..., None], kv_heads)
    t_q, t_k, t_v = (tangents.get(name) for name in ("query", "key", "value"))
    t_q_all = None if t_q is None else all_rows(t_q)
    keys, values = _KeyBlocks(k, rows), _KeyBlocks(v, rows)
    t_keys, t_values = (None if x is None else _KeyBlocks(x, rows) for x in (t_k, t_v))
    logits_move = t_q is not None or t_k is not None or bool(t_captures)
    # p * (tangent of the logit) has no bound, and float16 has one.
    wide = jnp.float32 if v.dtype == jnp.float16 else v.dtype

    def query_block(i, results):
        t_out, t_lse = results
        row_block = rows[i]
        q_block, out_block, lse_block = (cut(x, row_block, -2) for x in (q_all, out_all, lse_all))

        def key_block(j, state):
            column_block = columns[j]
            tile = tiles.at(row_block, column_block, fresh_rows=False)
            k_block, v_block = keys[column_block], values[column_block]
            scores = product.qk(q_block, k_block) * spec.scale
            t_scores = jnp.zeros_like(scores)
            if t_q_all is not None:
                t_scores += product.qk(cut(t_q_all, row_block, -2), k_block) * spec.scale
            if t_keys is not None:
                t_scores += product.qk(q_block, t_keys[column_block]) * spec.scale
            captured = tiles.captured(captures, tile)
            logits, t_logits = jax.jvp(
                lambda scores, moved: tiles.logits(scores, captured | moved, tile),
                (scores, tiles.captured(moving, tile)),
                (t_scores, tiles.captured(t_captures, tile)),
            )
            p = jnp.exp(tile.hide(relative(logits, lse_block), -jnp.inf))
            weighted = state.weighted
            if logits_move:
                state, moved = state.with_logits(p, t_logits, tile)
                weighted = weighted + product.pv(
                    tile.drop(moved).astype(wide), tile.hide_keys(v_block).astype(wide)
                )
            if t_values is not None:
                t_v_block = tile.hide_keys(t_values[column_block])
                weighted = weighted + product.pv(tile.drop(p).astype(v.dtype), t_v_block)
            return state._replace(weighted=weighted)

        zeros = filled(0, q_block, (*q_block.shape[:-1], 1), dtype)
        weighted = filled(0, q_block, (*q_block.shape[:-1], value_dim), dtype)
        state = _Tangent(zeros, zeros, zeros, weighted)
        state = loop_over(tiles.columns_seen_by(row_block), key_block, state)

        # Of lse, relative to the centre.
        moved = state.total
        if operands.sink is not None:
            t_sink = tangents.get("sink")
            t_sink = 0.0 if t_sink is None else sink_of(operands._replace(sink=t_sink), dtype)
            p_sink = jnp.exp(sink_of(operands, dtype) - lse_block)
            moved = moved + p_sink * (t_sink - state.centre)
        weighted = state.weighted
        if spec.dropout_rate > 0.0:
            weighted = weighted * _dropout.kept_scale(spec.dropout_rate)
        t_out_block = weighted - moved * out_block.astype(dtype)
        return (
            put(t_out, row_block, -3, ungrouped(t_out_block)),
            put(t_lse, row_block, -2, ungrouped(state.centre + moved)[..., 0]),
        )

    return loop(0, tiles.row_count, query_block, (t_out, t_lse))


class _Tangent(NamedTuple):
    """Sums over the keys so far, of a block of rows."""

    centre: Any  # (*B, K, G, rows, 1), what tangents of logits are relative to
    seen: Any  # (*B, K, G, rows, 1), sum of p
    total: Any  # (*B, K, G, rows, 1), sum of p * (tangent of the logit - centre)
    weighted: Any  # (*B, K, G, rows, h), that times value, plus p * (tangent of value)

    def with_logits(self, p, t_logits, tile: Tile) -> tuple[_Tangent, Any]:
        """These sums, but for `weighted`, with the keys of a tile; and their terms of `total`."""
        seen = jnp.sum(p, axis=-1, keepdims=True)
        some = jnp.where(seen == 0.0, 1.0, seen)
        mean = jnp.sum(tile.hide(p * t_logits, 0.0), axis=-1, keepdims=True) / some
        # Any number would do; what is not one does not.
        is_first = (self.seen == 0.0) & jnp.isfinite(mean)
        centre = jnp.where(is_first, mean, self.centre)
        seen = self.seen + seen
        moved = tile.hide(p * (t_logits - centre), 0.0)
        total = self.total + jnp.sum(moved, axis=-1, keepdims=True)
        return self._replace(centre=centre, seen=seen, total=total), moved


class _Rows(NamedTuple):
    """What the backward pass reads of query rows. Of those that see no key no NaN remains, and p =
    exp(logits - inf) = 0."""

    query: Any  # (*B, K, G, T, H), as it came
    seeing_query: Any  # that, 0 in such rows
    dout: Any  # (*B, K, G, T, h), likewise
    lse: Any  # (*B, K, G, T, 1), infinity there
    delta: Any  # (*B, K, G, T, 1), sums of dout * out, less dlse

    @staticmethod
    def of(operands: Operands, out, lse, dout, dlse, every_row_sees: bool) -> _Rows:
        """Without `out` the sums are left out; without `dlse` that is 0."""
        q, kv_heads = operands.query, operands.key.shape[-2]
        alive = lse != -jnp.inf
        if out is None:
            delta = jnp.zeros_like(lse)
        else:
            delta = jnp.sum(dout.astype(lse.dtype) * out.astype(lse.dtype), axis=-1)
        if dlse is not None:
            delta = delta - dlse.astype(lse.dtype)
        delta = grouped(jnp.where(alive, delta, 0.0)[..., None], kv_heads)
        lse = grouped(jnp.where(alive, lse, jnp.inf)[..., None], kv_heads)
        query = grouped(q, kv_heads)
        dout, seeing_query = (
            grouped(x if every_row_sees else jnp.where(alive[..., None], x, 0), kv_heads)
            for x in (dout, q)
        )
        return _Rows(query, seeing_query, dout, lse, delta)

    def at(self, block: Block):
        """(query, dout, lse, delta) of a block of them."""
        return tuple(cut(x, block, -2) for x in (self.query, self.dout, self.lse, self.delta))


class _Sums(NamedTuple):
    """Gradients while they are summed up; None for those that nobody wants."""

    query: Any  # (*B, K, G, T, H)
    key: Any  # (*B, S, K, H) of all keys; inside the loop over rows, (*B, columns, K, H) of a block
    value: Any  # likewise
    captures: dict[str, Any]


class _Softmax(NamedTuple):
    """Online softmax of a block of rows over the keys so far."""

    maximum: Any  # (*B, K, G, rows, 1), of the logits
    total: Any  # (*B, K, G, rows, 1), sum of exp(logits - maximum)
    weighted: Any  # (*B, K, G, rows, h), sum of exp(logits - maximum) * value


class _Normalised(NamedTuple):
    """Of a block of rows, (*B, K, G, rows, 1)."""

    weight: Any  # makes probabilities, kept ones, of exp(logits - maximum)
    lse: Any
    sees_no_key: Any


def _normalised(spec: AttentionSpec, maximum, total, sink) -> _Normalised:
    """Of a row's maximum and total, those of all keys (see `_Softmax`)."""
    rescale = 1.0
    # Not from the maximum: that of NaN logits may be any, and a row of NaN must stay one.
    sees_no_key = total == 0.0
    if sink is not None:
        of_keys, maximum = maximum, jnp.maximum(maximum, sink)
        rescale = jnp.exp(of_keys - maximum)
        total = total * rescale + jnp.exp(sink - maximum)
    total = jnp.where(sees_no_key, 1.0, total)
    weight = rescale / total
    if spec.dropout_rate > 0.0:
        weight = weight * _dropout.kept_scale(spec.dropout_rate)
    return _Normalised(
        weight, jnp.where(sees_no_key, -jnp.inf, maximum + jnp.log(total)), sees_no_key
    )


class Products:
    """Matrix products of tiles; (*B, K) are batch axes. They accumulate in `dtype`."""

    def __init__(self, spec: AttentionSpec, dtype, num_batch_axes: int):
        self._batch = tuple(range(num_batch_axes))
        self._dtype = dtype
        highest = spec.highest_precision
        self._precision = jax.lax.Precision.HIGHEST if highest else jax.lax.Precision.DEFAULT

    def qk(self, q, k):
        """(*B, K, G, rows, H) and (*B, K, columns, H) to (*B, K, G, rows, columns)."""
        if q.shape[-3:-1] == (1, 1):
            return self._of_one_row(k, q, k.ndim - 1)
        return self._dot(q, k, (q.ndim - 1,), (k.ndim - 1,))

    def pv(self, p, v):
        """(*B, K, G, rows, columns) and (*B, K, columns, h) to (*B, K, G, rows, h)."""
        if p.shape[-3:-1] == (1, 1):
            return self._of_one_row(v, p, v.ndim - 2)
        return self._dot(p, v, (p.ndim - 1,), (v.ndim - 2,))

    def over_rows(self, p, x):
        """(*B, K, G, rows, columns) and (*B, K, G, rows, h) to (*B, columns, K, h)."""
        *_, group, rows, columns = p.shape
        if (group, rows) == (1, 1):
            p, x = (y[..., 0, 0, :].astype(self._dtype) for y in (p, x))
            return keys_major(p[..., None] * x[..., None, :])
        # XLA for CPUs copies a first operand whose rows do not run along its last axis: p, or x and
        # then what comes of it. Small tiles are the smaller copy.
        axes = (p.ndim - 3, p.ndim - 2)
        dim = x.shape[-1]
        is_known = all(isinstance(n, int) for n in (group, rows, columns, dim))
        if is_known and group * rows * columns <= (group * rows + columns) * dim:
            return keys_major(self._dot(p, x, axes, axes))
        turned = self._dot(jnp.moveaxis(x, -1, -3), p, (p.ndim - 2, p.ndim - 1), axes)
        # Not to (*B, K, columns, h): XLA would exchange the operands, to a product of bfloat16 that
        # its CPU backend (jax 0.11) lacks.
        return jnp.moveaxis(turned, -1, -3)

    def _of_one_row(self, matrix, row, axis: int):
        """The row (*B, K, 1, 1, size) times the matrix (*B, K, size, n), or its transpose, as
        `axis` says, to (*B, K, 1, 1, n).

        Matrix first, then a vector without axes of size 1: up to 1.8 times as fast on a CPU as the
        products of elements and their sums, and 28 times under jax 0.10.
        """
        return self._dot(matrix, row[..., 0, 0, :], (axis,), (row.ndim - 3,))[..., None, None, :]

    def _dot(self, x, y, x_axes, y_axes):
        return jax.lax.dot_general(
            x,
            y,
            ((x_axes, y_axes), (self._batch, self._batch)),
            precision=self._precision,
            preferred_element_type=self._dtype,
        )


# Elements of a tile over all batches and heads: 8 MiB of float32, so that the few arrays of a tile
# live in cache. Measured on two cores of a server CPU, float32 (1, 4096, 4096, 8, 64), seconds of
# forward and value_and_grad, median of 5 (full; causal), against jax.nn's xla in the same run:
#   256 x 512      0.80, 1.76;  1.10, 1.41        512 x 1024     0.56, 2.15;  0.78, 2.26
#   512 x 512      0.49, 1.81;  0.35, 1.50        1024 x 1024    1.09, 2.16;  1.00, 2.29
#   jax.nn         2.98, 14.3;  2.37, 22.8
TILE_ELEMENTS = 1 << 21
# Tiles of many heads are larger than that: the products of small ones take longer, and blocks that
# overlap at the end are computed twice. Blocks of 128, then of 256, ms of forward and gradients:
# (32, 197, 197, 12, 64) 119 and 289, 89 and 239; (8, 1024, 1024, 16, 64) 414 and 1458, 446 and
# 1159; (16, 300, 300, 12, 64) 89 and 258, 95 and 264.
_SMALLEST_BLOCK, _LARGEST_BLOCK = 256, 1024
# Where blocks leave out what a band or sequences hide.
_SMALLEST_PART = 128
# Of the logits, and of the queries, of a tile of many sequences. Of 32 and 64 sequences of 64, 8
# heads of 64, gradients take 1.26 and 1.13 times the same as a batch; 1.9 and 1.45 from 1 << 20.
_TOGETHER_ELEMENTS = 1 << 18
# Of a packed sequence in blocks of `_SMALLEST_PART` the last one is another's in part: 8 sequences
# of 500 take 1.8 times the same as a batch.
_LONGEST_TOGETHER = 1024
_FEW_KEYS = 64
_FEW_SUMMED_KEYS = 256


def tiling(spec: AttentionSpec, operands: Operands) -> tuple[Blocks, Blocks]:
    """(rows, columns) as blocks: tiles of about `TILE_ELEMENTS`, wide where rows are few."""
    q, kv_len = operands.query, operands.key.shape[-3]
    # A symbolic number (jax.export) counts as 1.
    heads = math.prod(n for n in (*q.shape[:-3], q.shape[-2]) if isinstance(n, int))
    at_most = 1 << (max(math.isqrt(TILE_ELEMENTS // heads).bit_length() - 1, 0))
    at_most = min(max(at_most, _SMALLEST_BLOCK), _LARGEST_BLOCK)
    if operands.query_segment_ids is not None:
        # Of a block that is longer than a sequence, most is another's: 64 sequences of 128 take 1.1
        # and 1.4 times the same as a batch, 3.4 and 2.8 in blocks of 512 (forward; gradients), and
        # one sequence as long as all of them a quarter longer than in those.
        at_most = _SMALLEST_PART
    if spec.left is not None and spec.right is not None:
        # Of blocks much longer than the band, most is beside it. On two cores, (1, 4096, 4096, 8,
        # 64), ms, forward and gradients: 32 keys 201 and 441 in blocks of 512, 51 and 178 of 128;
        # 256 keys 157 and 687, 88 and 359.
        band = spec.left + spec.right + 1
        at_most = min(at_most, max(_SMALLEST_PART, 1 << ((band - 1) // 2).bit_length()))
    rows = blocks(q.shape[-3], at_most)
    # A band, lengths and other masks leave out whole blocks, the more the smaller they are.
    hiding = (
        spec.left,
        spec.right,
        spec.predicate,
        operands.key_value_seq_lengths,
        operands.query_segment_ids,
        operands.mask,
    )
    if all(x is None for x in hiding) and isinstance(rows.size, int):
        at_most = max(at_most, TILE_ELEMENTS // (heads * rows.size))
    if isinstance(operands.key, Pages):
        return rows, operands.key.blocks(at_most)
    return rows, blocks(kv_len, at_most)


def lengths_together(q_len: int, kv_len: int, count: int) -> list[tuple[int, int]]:
    """The lengths of queries and of keys, ascending, up to which packed sequences are computed as a
    batch; none where they are long.

    Args:
        q_len: of all sequences together.
        kv_len: likewise.
        count: how many sequences there are.
    """
    means = [-(-length // count) for length in (q_len, kv_len)]
    if max(means) >= _LONGEST_TOGETHER:
        return []
    # Of tiles of packed sequences that fill a block, fewer elements are another sequence's.
    percent = 150 if max(means) < _SMALLEST_PART else 125
    exact, longer = ([-(-mean * n // 400) * 4 for mean in means] for n in (100, percent))
    return [(exact[0], exact[1]), (longer[0], longer[1])]


def count_together(heads: int, head_dim: int, q_len: int, kv_len: int) -> int:
    """How many sequences of these lengths make a tile."""
    return max(_TOGETHER_ELEMENTS // (heads * q_len * max(kv_len, head_dim)), 1)


@jax.custom_jvp
def relative(logits, bound):
    """logits - bound, where no logit is above it but by rounding: then 0.

    Of large logits, exp of the mere difference is infinity or 0: XLA for CPUs subtracts from a
    product before it rounds it. It does not from what is chosen.
    """
    return jnp.where(logits > bound, bound, logits) - bound


@relative.defjvp
def _(primals, tangents):
    t_logits, t_bound = tangents
    return relative(*primals), t_logits - t_bound


def grouped(x, kv_heads: int):
    """(*B, T, N, h) to (*B, K, G, T, h)."""
    *batch, length, heads, dim = x.shape
    x = x.reshape(*batch, length, kv_heads, heads // kv_heads, dim)
    return jnp.moveaxis(x, -4, -2)


def ungrouped(x):
    """(*B, K, G, T, h) to (*B, T, N, h)."""
    x = jnp.moveaxis(x, -2, -4)
    *rest, kv_heads, group, dim = x.shape
    return x.reshape(*rest, kv_heads * group, dim)


class _KeyBlocks:
    """Blocks of keys or values (*B, S, K, h), as (*B, K, columns, h)."""

    def __init__(self, x, rows: Blocks):
        # Where there are more blocks of rows than one, turned once for all of them. Not pages: they
        # are longer than what a call sees of them.
        self._is_turned = not is_one(rows.count) and not isinstance(x, Pages)
        self._x = keys_major(x) if self._is_turned else x

    def __getitem__(self, block: Block):
        if isinstance(self._x, Pages):
            return keys_major(self._x.gathered(block))
        return cut(self._x, block, -2) if self._is_turned else keys_major(cut(self._x, block, -3))


def keys_major(x):
    """(*B, S, K, h) to (*B, K, S, h): a block of keys of one head is then contiguous."""
    return jnp.swapaxes(x, -3, -2)


def sink_of(operands: Operands, dtype):
    """The sinks (N) as (*1, K, G, 1, 1)."""
    ones, kv_heads = (1,) * (operands.key.ndim - 3), operands.key.shape[-2]
    sink = operands.sink.astype(dtype)
    return sink.reshape(*ones, kv_heads, sink.shape[0] // kv_heads, 1, 1)


def _shaped_as(like, x):
    """`x` in the shape of `like`, split as it is on an explicit mesh."""
    sharding = jax.typeof(like).sharding
    return jax.lax.reshape(x, like.shape, out_sharding=None if sharding.mesh.empty else sharding)
