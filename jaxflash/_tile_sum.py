"""Sums over tiles that JAX differentiates any number of times, in memory linear in the length.

What is summed is a function of one tile: of the blocks of rows, the blocks of keys and the slices
of captured arrays that meet there. The derivative of such a sum is the sum of the function's
derivative over the same tiles, and its transpose that of the function's transpose: JAX derives the
functions of a tile, and no loop is ever differentiated. All of it begins with one function,
attention whose lse is given.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxflash import _blockwise, _dropout
from jaxflash._loops import cut, filled, loop, loop_over, put
from jaxflash._primitive import Op, bind
from jaxflash._spec import AttentionSpec, Operands, compute_dtype
from jaxflash._tile import Tile, Tiles, captures_of


def tangent(spec: AttentionSpec, operands: Operands, out, lse, tangents: dict[str, Any]):
    """What `_blockwise.tangent` computes, with derivatives of every order."""

    def moving(moved):
        return _weighed(spec, operands.replacing(moved), lse)

    given = operands.named()
    primals = {name: given[name] for name in tangents}
    _, (t_weighted, t_total) = jax.jvp(moving, (primals,), (tangents,))
    # Rows that see no key: the transpose of this lets no NaN of theirs through.
    alive = lse != -jnp.inf
    t_weighted = jnp.where(alive[..., None], t_weighted, 0.0)
    t_total = jnp.where(alive, t_total, 0.0)
    t_out = t_weighted - t_total[..., None] * out.astype(t_total.dtype)
    return t_out.astype(out.dtype), t_total


def gradient(
    spec: AttentionSpec, operands: Operands, out, lse, dout, dlse, wanted: tuple[str, ...]
) -> dict[str, Any]:
    """What `_blockwise.backward` computes, with derivatives of every order: the transpose of
    `tangent`. dlse may be None."""

    def moving(moved):
        return _weighed(spec, operands.replacing(moved), lse)

    given = operands.named()
    _, pull = jax.vjp(moving, {name: given[name] for name in wanted})
    dout, out = dout.astype(lse.dtype), out.astype(lse.dtype)
    dtotal = -jnp.sum(dout * out, axis=-1)
    if dlse is not None:
        dtotal = dtotal + dlse
    # Rows that see no key: no NaN of theirs remains.
    alive = lse != -jnp.inf
    dout = jnp.where(alive[..., None], dout, 0.0)
    (gradients,) = pull((dout, jnp.where(alive, dtotal, 0.0)))
    return gradients


def _weighed(spec: AttentionSpec, operands: Operands, lse):
    """(sum of p * value (*B, T, N, h), sum of p (*B, T, N)) with p = exp(logits - lse), that of the
    sink among them: out and 1, where lse is that of the call.

    Of this function's derivative with lse held, (t_weighted, t_total), that of attention is made:
    t_lse = t_total and t_out = t_weighted - t_total * out.
    """
    kv_heads = operands.key.shape[-2]
    alive = lse != -jnp.inf
    lse_rows = _blockwise.grouped(jnp.where(alive, lse, jnp.inf)[..., None], kv_heads)
    captures = captures_of(spec, operands)
    moving = operands.differentiable()
    fixed = {name: x for name, x in operands.named().items() if name not in moving}
    weighted, total = bind(
        _TileSum(spec, tuple(fixed), _Weigh(tuple(captures))),
        *fixed.values(),
        _blockwise.grouped(jnp.where(alive[..., None], operands.query, 0), kv_heads),
        lse_rows,
        _blockwise.keys_major(operands.key),
        _blockwise.keys_major(operands.value),
        *captures.values(),
    )
    if operands.sink is not None:
        sink = _blockwise.sink_of(operands, lse.dtype)
        total = total + jnp.exp(sink - lse_rows)
    return _blockwise.ungrouped(weighted), _blockwise.ungrouped(total)[..., 0]


# ---- Functions of a tile -------------------------------------------------------------------------

# Kinds of arguments and results, by what they are shaped like: "query", "lse" and "out" are rows,
# (*B, K, G, T, ·), "key" and "value" columns, (*B, K, S, ·), and names of captures mean arrays of
# `captures_of`, of which a tile gets what `Tiles.captured` returns.
_ROWS = ("query", "lse", "out")
_COLUMNS = ("key", "value")


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a function of a tile is evaluated, and with what."""

    spec: AttentionSpec
    tiles: Tiles
    tile: Tile
    product: _blockwise.Products


class _TileFunction:
    """A differentiable function of (place, *blocks). Its first arguments are those of `_Weigh`."""

    ins: tuple[str, ...]
    outs: tuple[str, ...]

    def __call__(self, place: _Place, *blocks) -> tuple:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class _Weigh(_TileFunction):
    """Attention whose lse is given: what a tile adds to the sum of p * value and to that of p."""

    captures: tuple[str, ...]

    @property
    def ins(self):
        return ("query", "lse", "key", "value", *self.captures)

    @property
    def outs(self):
        return ("out", "lse")

    def __call__(self, place, query, lse, key, value, *captured):
        spec, tile = place.spec, place.tile
        key, value = tile.hide_keys(key), tile.hide_keys(value)
        scores = place.product.qk(query, key) * spec.scale
        captured = dict(zip(self.captures, captured, strict=True))
        logits = place.tiles.logits(scores, captured, tile)
        # Hidden before exp: its slope is 0 there, whatever the logit.
        p = jnp.exp(tile.hide(_blockwise.relative(logits, lse), -jnp.inf))
        kept = tile.drop(p)
        if spec.dropout_rate > 0.0:
            kept = kept * _dropout.kept_scale(spec.dropout_rate)
        return place.product.pv(kept, value), jnp.sum(p, axis=-1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class _Jvp(_TileFunction):
    """The tangents of a function's results, given those of the arguments `moved`."""

    of: _TileFunction
    moved: tuple[int, ...]

    @property
    def ins(self):
        return self.of.ins + tuple(self.of.ins[i] for i in self.moved)

    @property
    def outs(self):
        return self.of.outs

    def __call__(self, place, *blocks):
        primals, tangents = blocks[: len(self.of.ins)], blocks[len(self.of.ins) :]

        def moving(*moved):
            replaced = dict(zip(self.moved, moved, strict=True))
            return self.of(place, *(replaced.get(i, x) for i, x in enumerate(primals)))

        return jax.jvp(moving, tuple(primals[i] for i in self.moved), tangents)[1]


@dataclasses.dataclass(frozen=True)
class _Transpose(_TileFunction):
    """The cotangents of the arguments `linear`, given the other arguments and the cotangents of the
    results `given`."""

    of: _TileFunction
    linear: tuple[int, ...]
    given: tuple[int, ...]

    @property
    def _known(self):
        return tuple(i for i in range(len(self.of.ins)) if i not in self.linear)

    @property
    def ins(self):
        known = tuple(self.of.ins[i] for i in self._known)
        return known + tuple(self.of.outs[i] for i in self.given)

    @property
    def outs(self):
        return tuple(self.of.ins[i] for i in self.linear)

    def __call__(self, place, *blocks):
        known = dict(zip(self._known, blocks, strict=False))
        given = dict(zip(self.given, blocks[len(known) :], strict=True))

        def of_linear(*linear):
            args = known | dict(zip(self.linear, linear, strict=True))
            return self.of(place, *(args[i] for i in range(len(args))))

        def zeros(kind):
            if kind == "out":
                row, value = blocks[1], blocks[3]
                return jnp.zeros_like(jnp.broadcast_to(row, (*row.shape[:-1], value.shape[-1])))
            return jax.tree.map(jnp.zeros_like, blocks[self.ins.index(kind)])

        # Linear: the same at every point.
        _, pull = jax.vjp(of_linear, *map(zeros, self.outs))
        return pull(tuple(given.get(i, zeros(kind)) for i, kind in enumerate(self.of.outs)))


# ---- Their sum -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _TileSum(Op):
    """The sum of a function over all tiles: row results over the keys, results of keys over the
    rows, those of captures over the tiles that read them.

    Arguments are the operands named in `fixed`, which have no derivative, then the function's.
    """

    spec: AttentionSpec
    fixed: tuple[str, ...]
    function: _TileFunction

    def jvp(self, primals, results, tangents):
        tangents = tangents[len(self.fixed) :]
        moved = tuple(i for i, tangent in enumerate(tangents) if tangent is not None)
        op = dataclasses.replace(self, function=_Jvp(self.function, moved))
        return bind(op, *primals, *(tangents[i] for i in moved))

    def transpose(self, cotangents, args):
        num_fixed = len(self.fixed)
        linear = tuple(i for i, arg in enumerate(args[num_fixed:]) if arg is None)
        given = tuple(i for i, cotangent in enumerate(cotangents) if cotangent is not None)
        op = dataclasses.replace(self, function=_Transpose(self.function, linear, given))
        known = [arg for arg in args if arg is not None]
        results = bind(op, *known, *(cotangents[i] for i in given))
        placed: list[Any] = [None] * len(args)
        for i, x in zip(linear, results, strict=True):
            placed[num_fixed + i] = x
        return placed

    def __call__(self, *args):
        spec, function = self.spec, self.function
        fixed = dict(zip(self.fixed, args, strict=False))
        arrays = args[len(fixed) :]
        by_kind = dict(zip(reversed(function.ins), reversed(arrays), strict=True))
        q, k, v = (by_kind[kind] for kind in ("query", "key", "value"))
        *batch, kv_heads, group, q_len, head_dim = q.shape
        kv_len = k.shape[-2]
        dtype = compute_dtype(q.dtype)

        def result_type(kind):
            if kind == "out":
                return q, (*q.shape[:-1], v.shape[-1]), dtype
            like = by_kind[kind]
            return like, like.shape, like.dtype

        types = [result_type(kind) for kind in function.outs]

        def zeros(i, accumulated: bool):
            like, shape, result_dtype = types[i]
            summed_dtype = compute_dtype(dtype, result_dtype) if accumulated else result_dtype
            return filled(0, like, shape, summed_dtype)

        if 0 in q.shape or 0 in k.shape:
            return [zeros(i, False) for i in range(len(types))]

        operands = Operands(
            query=jax.ShapeDtypeStruct((*batch, q_len, kv_heads * group, head_dim), q.dtype),
            key=jax.ShapeDtypeStruct((*batch, kv_len, kv_heads, head_dim), k.dtype),
            value=None,
            captures=(None,) * (len(spec.program.capture_types) if spec.program else 0),
            mask_captures=(None,) * (len(spec.predicate.capture_types) if spec.predicate else 0),
        ).replacing(fixed)
        rows, columns = _blockwise.tiling(spec, operands)
        tiles = Tiles(spec, operands, rows, columns)
        product = _blockwise.Products(spec, dtype, len(batch) + 1)

        def key_block(i, totals):
            # From the last block to the first: where the last one overlaps the one before it, it
            # counts nothing, and the block before it overwrites what it put there.
            column_block = columns[columns.count - 1 - i]

            def query_block(j, sums):
                row_block = rows[j]
                tile = tiles.at(row_block, column_block, fresh_rows=True)

                def block(kind, x):
                    if kind in _ROWS:
                        return cut(x, row_block, -2).astype(dtype)
                    if kind in _COLUMNS:
                        return cut(x, column_block, -2).astype(dtype)
                    return tiles.captured({kind: x}, tile)[kind]

                def added(kind, total, x):
                    if kind in _ROWS:
                        return put(total, row_block, -2, cut(total, row_block, -2) + x)
                    if kind in _COLUMNS:
                        return total + x
                    return tiles.add(kind, total, tile, x)

                blocks = map(block, function.ins, arrays)
                results = function(_Place(spec, tiles, tile, product), *blocks)
                return [added(*x) for x in zip(function.outs, sums, results, strict=True)]

            def of_block(i):
                like, shape, _ = types[i]
                shape = (*shape[:-2], column_block.size, shape[-1])
                return filled(0, like, shape, dtype)

            of_columns = [kind in _COLUMNS for kind in function.outs]
            sums = [of_block(i) if of_columns[i] else total for i, total in enumerate(totals)]
            sums = loop_over(tiles.rows_seeing(column_block), query_block, sums)
            return [
                put(total, column_block, -2, x) if is_column else x
                for is_column, total, x in zip(of_columns, totals, sums, strict=True)
            ]

        totals = [zeros(i, kind not in _COLUMNS) for i, kind in enumerate(function.outs)]
        totals = loop(0, columns.count, key_block, totals)
        return [x.astype(of[-1]) for x, of in zip(totals, types, strict=True)]
