"""Mask values as named rows: what users write, and what is easy to get wrong.

Each makes its arrays for the sizes of a call, the value of `jaxflash.masks` of them, and, with
numpy alone, what that means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxflash import _dense_mask, _mask, masks
from score_mods import Sizes


class Index(NamedTuple):
    """Numbers of all elements, as int arrays that broadcast to (B, N, T, S), and how much further a
    query stands bottom right than at its number."""

    b: np.ndarray
    h: np.ndarray
    q: np.ndarray
    kv: np.ndarray
    offset: np.ndarray


@dataclasses.dataclass(frozen=True)
class MaskValue:
    name: str
    make: Callable  # (batch axes, **arrays) -> value
    visible: Callable  # (Index, **arrays) -> bool array that broadcasts to (B, N, T, S)
    arrays: Callable = lambda sizes, rng: {}
    lengths: Callable = lambda arrays: (None, None)  # flat ones of queries and keys, of the whole
    on_kernels: bool = True

    def bind(self, arrays: dict, batch: tuple[int, ...]) -> masks.Mask:
        # As users write functions: the package itself must do without.
        with jax.numpy_dtype_promotion("standard"):
            return _standard(self.make(batch, **arrays))


def _standard(mask):
    """The same with functions that are traced as users have it."""

    def standard(x):
        if not isinstance(x, _mask.Function):
            return x

        def traced(*arguments):
            with jax.numpy_dtype_promotion("standard"):
                return x.function(*arguments)

        return masks.function(traced, *x.captures)

    return jax.tree.map(standard, mask, is_leaf=lambda x: isinstance(x, _mask.Function))


def _shaped(x, batch):
    """A flat batch axis as the call's batch axes."""
    return jnp.reshape(x, (*batch, *x.shape[1:]))


def _integers(rng, low, high, *shape):
    return rng.integers(low, high, shape).astype(np.int32)


def _ids(sizes: Sizes, rng):
    return {
        "query_ids": np.sort(_integers(rng, 0, 4, sizes.batch, sizes.q_len)),
        "key_ids": np.sort(_integers(rng, 0, 4, sizes.batch, sizes.kv_len)),
    }


def _same_document(b, h, q, kv, query_ids, key_ids):
    return query_ids[b, q] == key_ids[b, kv]


def _documents_of(i: Index, query_ids, key_ids):
    return query_ids[i.b, i.q] == key_ids[i.b, i.kv]


def _pair(rng, high, *shape):
    return {"begin": _integers(rng, -3, high, *shape), "end": _integers(rng, 0, high + 9, *shape)}


def _hashed(b, h, q, kv):
    x = q * 73856093 ^ kv * 19349663 ^ h * 83492791 ^ b * 4256249
    return x % 5 < 3


# A value that has a place of its own in the call, or one that has none.
NATIVE = (
    MaskValue(
        "causal",
        lambda batch: masks.causal(),
        lambda i: i.kv <= i.q,
    ),
    MaskValue(
        "window-bottom-right",
        lambda batch: masks.window(9, 4, "bottom_right"),
        lambda i: (i.kv >= i.q + i.offset - 9) & (i.kv <= i.q + i.offset + 4),
    ),
    MaskValue(
        "two-windows",
        lambda batch: masks.window(20, 3) & masks.window(9, None) & masks.window(None, 5),
        lambda i: (i.kv >= i.q - 9) & (i.kv <= i.q + 3),
    ),
    MaskValue(
        "lengths",
        lambda batch, q_lens, kv_lens: masks.lengths(
            _shaped(q_lens, batch), _shaped(kv_lens, batch)
        ),
        lambda i, q_lens, kv_lens: (i.q < q_lens[i.b]) & (i.kv < kv_lens[i.b]),
        lambda s, r: {
            "q_lens": _integers(r, 0, s.q_len + 1, s.batch),
            "kv_lens": _integers(r, 0, s.kv_len + 1, s.batch),
        },
        lambda arrays: (arrays["q_lens"], arrays["kv_lens"]),
    ),
    MaskValue(
        "segments-shared",  # by all batch elements
        lambda batch, ids, key_ids: masks.segments(ids, key_ids),
        lambda i, ids, key_ids: ids[i.q] == key_ids[i.kv],
        lambda s, r: {"ids": _integers(r, 0, 3, s.q_len), "key_ids": _integers(r, 0, 3, s.kv_len)},
    ),
    MaskValue(
        "dense-heads",
        lambda batch, array: masks.dense(array),
        lambda i, array: array[i.h, i.q, i.kv],
        lambda s, r: {"array": r.random((s.heads, s.q_len, s.kv_len)) < 0.6},
    ),
)

_FUNCTIONS = (
    MaskValue(
        "prefix",
        lambda batch, prefix: (
            masks.causal() | masks.function(lambda b, h, q, kv, prefix: kv < prefix[b], prefix)
        ),
        lambda i, prefix: (i.kv <= i.q) | (i.kv < prefix[i.b]),
        lambda s, r: {"prefix": _integers(r, 1, s.kv_len // 2 + 2, s.batch)},
    ),
    MaskValue(
        "global-tokens",
        lambda batch: (
            masks.window(11, 0)
            | masks.function(lambda b, h, q, kv: ((kv < 3) & (kv <= q)) | (q < 2))
        ),
        lambda i: ((i.kv >= i.q - 11) & (i.kv <= i.q)) | ((i.kv < 3) & (i.kv <= i.q)) | (i.q < 2),
    ),
    MaskValue(
        "documents",
        lambda batch, query_ids, key_ids: masks.function(_same_document, query_ids, key_ids),
        _documents_of,
        _ids,
    ),
    MaskValue(
        "documents-causal",  # as a function, beside a band
        lambda batch, query_ids, key_ids: (
            masks.function(_same_document, query_ids, key_ids) & masks.causal()
        ),
        lambda i, **ids: _documents_of(i, **ids) & (i.kv <= i.q),
        _ids,
    ),
    MaskValue(
        "dilated",
        lambda batch: masks.function(lambda b, h, q, kv: ((q - kv) % 3 == 0) & (abs(q - kv) < 40)),
        lambda i: ((i.q - i.kv) % 3 == 0) & (abs(i.q - i.kv) < 40),
    ),
    MaskValue(
        "checkerboard",  # of the kernels' tiles
        lambda batch: masks.function(lambda b, h, q, kv: (q // 128 + kv // 128) % 2 == 0),
        lambda i: (i.q // 128 + i.kv // 128) % 2 == 0,
    ),
    MaskValue(
        "checkerboard-512",
        lambda batch: masks.function(lambda b, h, q, kv: (q // 512 + kv // 512) % 2 == 0),
        lambda i: (i.q // 512 + i.kv // 512) % 2 == 0,
    ),
    MaskValue(
        "checkerboard-16",
        lambda batch: masks.function(lambda b, h, q, kv: (q // 16 + kv // 16) % 2 == 1),
        lambda i: (i.q // 16 + i.kv // 16) % 2 == 1,
    ),
    MaskValue(
        "some-blocks",  # of 64 x 64, with many gaps between them
        lambda batch, table: masks.function(
            lambda b, h, q, kv, table: table[b, q // 64, kv // 64], table
        ),
        lambda i, table: table[i.b, i.q // 64, i.kv // 64],
        lambda s, r: {"table": _some_blocks(s, r)},
    ),
    MaskValue(
        "first-and-last",  # with a gap between them
        lambda batch, last: masks.function(lambda b, h, q, kv, last: (kv < 3) | (kv >= last), last),
        lambda i, last: (i.kv < 3) | (i.kv >= last),
        lambda s, r: {"last": np.asarray(s.kv_len * 7 // 8, np.int32)},
    ),
    MaskValue(
        "head-windows",
        lambda batch, widths: masks.function(
            lambda b, h, q, kv, widths: (q >= kv) & (q - kv < widths["of_heads"][h]),
            {"of_heads": widths},  # a pytree
        ),
        lambda i, widths: (i.kv <= i.q) & (i.q - i.kv < widths[i.h]),
        lambda s, r: {"widths": 1 + 7 * np.arange(s.heads, dtype=np.int32)},
    ),
    MaskValue(
        "random",
        lambda batch: masks.function(_hashed),
        lambda i: _hashed(*(x.astype(np.int32) for x in i[:4])),
    ),
    MaskValue(
        "float-captures",  # without a gradient, and negative indices
        lambda batch, importance: masks.function(
            lambda b, h, q, kv, x: x[b, h, -1 - q] <= 2.0 * x[b, h, kv], importance
        ),
        lambda i, importance: importance[i.b, i.h, -1 - i.q] <= 2.0 * importance[i.b, i.h, i.kv],
        lambda s, r: {
            "importance": r.random((s.batch, s.heads, max(s.q_len, s.kv_len)), np.float32)
        },
    ),
    MaskValue(
        "closed-over",
        lambda batch, widths, limit: masks.function(
            lambda b, h, q, kv: (q - kv < jnp.asarray(widths)[h]) & (kv < limit)
        ),
        lambda i, widths, limit: (i.q - i.kv < widths[i.h]) & (i.kv < limit),
        lambda s, r: {
            "widths": 1 + 7 * np.arange(s.heads, dtype=np.int32),
            "limit": np.asarray(s.kv_len * 3 // 4, np.int32),
        },
    ),
    MaskValue(
        "by-a-rule-of-its-own",  # what it has a derivative of does not matter
        lambda batch: masks.function(lambda b, h, q, kv: jax.nn.relu(1.0 * q - kv) > 3.0),
        lambda i: i.q - i.kv > 3,
    ),
    MaskValue(
        "cases",  # numbers beyond the ends are clamped
        lambda batch, kinds: masks.function(
            lambda b, h, q, kv, kinds: jax.lax.switch(
                kinds[b, q], [lambda: kv <= q, lambda: abs(q - kv) < 9, lambda: kv % 3 == h % 3]
            ),
            kinds,
        ),
        lambda i, kinds: np.choose(
            kinds[i.b, i.q], [i.kv <= i.q, abs(i.q - i.kv) < 9, i.kv % 3 == i.h % 3], mode="clip"
        ),
        lambda s, r: {"kinds": _integers(r, -2, 5, s.batch, s.q_len)},
    ),
    MaskValue(
        "cases-of-heads",
        lambda batch: masks.function(
            lambda b, h, q, kv: jax.lax.select_n(h % 3, q >= kv, q - kv < 9, kv < 20)
        ),
        lambda i: np.choose(i.h % 3, [i.q >= i.kv, i.q - i.kv < 9, i.kv < 20]),
    ),
    MaskValue(
        "loops",  # no kernel does
        lambda batch, table: masks.function(
            lambda b, h, q, kv, table: (
                jnp.any(jax.lax.fori_loop(0, 3, lambda n, x: x | (table[n] == q % 4), False))
                | jnp.any(table == kv % 5)
            ),
            table,
        ),
        lambda i, table: np.isin(i.q % 4, table[:3]) | np.isin(i.kv % 5, table),
        lambda s, r: {"table": _integers(r, 0, 3, 4)},
        on_kernels=False,
    ),
    MaskValue(
        "every-fourth",
        lambda batch: (
            masks.window(21, None) & masks.function(lambda b, h, q, kv: (q - kv) % 4 == 0)
        ),
        lambda i: ((i.q - i.kv) % 4 == 0) & (i.q - i.kv <= 21),
    ),
    MaskValue("nothing", lambda batch: masks.function(lambda b, h, q, kv: q < 0), lambda i: False),
)

# Of a distance alone: no function is left of them.
BANDS = (
    MaskValue(
        "band",
        lambda batch: masks.function(lambda b, h, q, kv: (kv > q - 9) & (q + 4 >= kv)),
        lambda i: (i.kv > i.q - 9) & (i.q + 4 >= i.kv),
    ),
    MaskValue(
        "band-by-branches",
        lambda batch: masks.function(
            lambda b, h, q, kv: jax.lax.cond(q >= kv, lambda: q - kv < 9, lambda: kv - q <= 4)
        ),
        lambda i: (i.q - i.kv < 9) & (i.kv - i.q <= 4),
    ),
    MaskValue("everything", lambda batch: masks.function(lambda b, h, q, kv: True), lambda i: True),
)

_COMBINED = (
    MaskValue(
        "intervals",
        lambda batch, begin, end: masks.intervals(_shaped(begin, batch), _shaped(end, batch)),
        lambda i, begin, end: (begin[i.b, i.h, i.q] <= i.kv) & (i.kv < end[i.b, i.h, i.q]),
        lambda s, r: _pair(r, s.kv_len, s.batch, s.heads, s.q_len),
    ),
    MaskValue(
        "intervals-of-keys",
        lambda batch, begin, end: masks.intervals(begin, end, of="key"),
        lambda i, begin, end: (begin[i.h, i.kv] <= i.q) & (i.q < end[i.h, 0]),
        lambda s, r: {
            "begin": _integers(r, -3, s.q_len, s.heads, s.kv_len),
            "end": _integers(r, 0, 2 * s.q_len, s.heads, 1),
        },
    ),
    MaskValue(
        "both-alignments",
        lambda batch: masks.window(None, 4) & masks.window(8, None, "bottom_right"),
        lambda i: (i.kv <= i.q + 4) & (i.kv >= i.q + i.offset - 8),
    ),
    MaskValue(
        "other-segments",
        lambda batch, query_ids, key_ids: (
            ~masks.segments(_shaped(query_ids, batch), _shaped(key_ids, batch))
        ),
        lambda i, **ids: ~_documents_of(i, **ids),
        _ids,
    ),
    MaskValue(
        "segments-twice",
        lambda batch, query_ids, key_ids: (
            masks.segments(_shaped(query_ids, batch), _shaped(key_ids, batch))
            & masks.segments(_shaped(query_ids % 2, batch), _shaped(key_ids // 2, batch))
        ),
        lambda i, query_ids, key_ids: (
            _documents_of(i, query_ids, key_ids) & _documents_of(i, query_ids % 2, key_ids // 2)
        ),
        _ids,
    ),
    MaskValue(
        "lengths-or",
        lambda batch, kv_lens: (
            masks.lengths(key_value=_shaped(kv_lens, batch))
            | masks.lengths(query=2)
            | masks.window(0, 0)
        ),
        lambda i, kv_lens: (i.kv < kv_lens[i.b]) | (i.q < 2) | (i.q == i.kv),
        lambda s, r: {"kv_lens": _integers(r, 0, s.kv_len, s.batch)},
    ),
    MaskValue(
        "two-arrays",
        lambda batch, keys, rows: masks.dense(keys) & rows,
        lambda i, keys, rows: keys[i.kv] & rows[i.h, i.q, 0],
        lambda s, r: {
            "keys": r.random(s.kv_len) < 0.8,
            "rows": r.random((s.heads, s.q_len, 1)) < 0.8,
        },
    ),
    MaskValue(
        "array-or-causal",  # of all batch elements and heads
        lambda batch, array: array | masks.causal(),
        lambda i, array: array[i.q, i.kv] | (i.kv <= i.q),
        lambda s, r: {"array": r.random((s.q_len, s.kv_len)) < 0.3},
    ),
    MaskValue(
        "full-array-or-function",
        lambda batch, array: (
            ~masks.dense(_shaped(array, batch)) | masks.function(lambda b, h, q, kv: q == kv)
        ),
        lambda i, array: ~array[i.b, i.h, i.q, i.kv] | (i.q == i.kv),
        lambda s, r: {"array": r.random((s.batch, s.heads, s.q_len, s.kv_len)) < 0.6},
    ),
    MaskValue(
        "some-arrays-or-others",  # each of other axes
        lambda batch, keys, rows, heads, one: (
            (masks.dense(_shaped(keys, batch)) | rows) & (masks.window(9, 5) | heads)
            | ~(masks.dense(one) | masks.window(None, 0))
        ),
        lambda i, keys, rows, heads, one: (
            (keys[i.b, 0, 0, i.kv] | rows[i.h, i.q, 0])
            & (((i.kv >= i.q - 9) & (i.kv <= i.q + 5)) | heads[i.h, 0, 0])
            | ~(one[0] | (i.kv <= i.q))
        ),
        lambda s, r: {
            "keys": r.random((s.batch, 1, 1, s.kv_len)) < 0.5,
            "rows": r.random((s.heads, s.q_len, 1)) < 0.3,
            "heads": r.random((s.heads, 1, 1)) < 0.5,
            "one": np.ones(1, bool),
        },
    ),
    MaskValue(
        "array-or-band",
        lambda batch, array: (
            ~(masks.dense(_shaped(array, batch)) | masks.window(3, 0))
            | ~~masks.causal("bottom_right")
        ),
        lambda i, array: (
            ~(array[i.b, 0, i.q, i.kv] | ((i.kv >= i.q - 3) & (i.kv <= i.q)))
            | (i.kv <= i.q + i.offset)
        ),
        lambda s, r: {"array": r.random((s.batch, 1, s.q_len, s.kv_len)) < 0.6},
    ),
    MaskValue(
        "whole-lengths",  # that move the last query, wherever the band is
        lambda batch, q_lens, kv_lens: (
            masks.lengths(_shaped(q_lens, batch))
            & masks.lengths(key_value=_shaped(kv_lens, batch))
            & (masks.causal("bottom_right") | masks.window(0, 1))
        ),
        lambda i, q_lens, kv_lens: (
            (i.q < q_lens[i.b])
            & (i.kv < kv_lens[i.b])
            & ((i.kv <= i.q + i.offset) | (i.kv == i.q) | (i.kv == i.q + 1))
        ),
        lambda s, r: {
            "q_lens": _integers(r, 0, s.q_len + 1, s.batch),
            "kv_lens": _integers(r, 0, s.kv_len + 1, s.batch),
        },
        lambda arrays: (arrays["q_lens"], arrays["kv_lens"]),
    ),
)


def _some_blocks(sizes, rng):
    blocks = rng.random((sizes.batch, -(-sizes.q_len // 64), -(-sizes.kv_len // 64))) < 0.3
    blocks[:, 1::3] = False  # whole rows, and keys
    blocks[:, 0], blocks[..., 0] = True, True
    blocks[..., 4:6] = False
    return blocks


MASK_VALUES = {row.name: row for row in (*NATIVE, *BANDS, *_FUNCTIONS, *_COMBINED)}


def visible(row: MaskValue, arrays: dict, shape, given=(None, None)) -> np.ndarray:
    """Who sees whom, (B, N, T, S) of flat batch axes; `given` are the call's lengths (B)."""
    batch, _, q_len, kv_len = shape
    ends = []
    for length, *lengths in zip((q_len, kv_len), given, row.lengths(arrays), strict=True):
        ends.append(np.full(batch, length))
        for x in lengths:
            if x is not None:
                ends[-1] = np.minimum(ends[-1], np.maximum(x, 0))
    offset = (ends[1] - ends[0]).reshape(-1, 1, 1, 1)
    index = Index(*np.ogrid[tuple(slice(n) for n in shape)], offset)
    return np.broadcast_to(row.visible(index, **arrays), shape)


def hulls(visible):
    """(begin, end) of what each row of (..., rows, columns) sees as the kernels have it: of blocks
    of 64 columns, those that one of its 64 rows sees; (0, 0) where it sees nothing itself."""
    *_, rows, columns = visible.shape
    starts = np.arange(0, rows, 64), np.arange(0, columns, 64)
    blocks = np.logical_or.reduceat(np.logical_or.reduceat(visible, starts[0], -2), starts[1], -1)
    begin = 64 * np.argmax(blocks, axis=-1)
    end = np.minimum(64 * (blocks.shape[-1] - np.argmax(blocks[..., ::-1], axis=-1)), columns)
    intervals = np.stack((begin, end), axis=-1).repeat(64, axis=-2)[..., :rows, :]
    return np.where(visible.any(-1)[..., None], intervals, 0)


def packed(mask, pass_):
    """A mask array (*B, N, T, S) as the kernels of a pass read it: words of bits, if it has the
    axis that these are of."""
    axis = _dense_mask.packed_axis(mask, pass_)
    if axis is None:
        return mask
    *lead, rows, keys = mask.shape
    matrix = mask[..., :1, :, :]  # of one head
    words = np.zeros((*lead, *_dense_mask.own_type(matrix, pass_).shape), np.uint32)
    q, kv = np.indices((rows, keys))
    index, bit = _dense_mask.place_of(_dense_mask.axes(matrix), axis, None, q, kv)
    for number in np.ndindex(*lead):
        np.bitwise_or.at(words[number], index, mask[number].astype(np.uint32) << sum(bit))
    return words
