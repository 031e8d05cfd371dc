"""The definition of attention in this package: dense, in plain jnp, written to be read.

A module: its functions `dot_product_attention`, `paged_attention` and `varlen_attention` take the
arguments of the package's functions of these names.

The kernels and the blockwise path are tested against it. Its memory is quadratic in the sequence
length. JAX differentiates it any number of times, forward and reverse.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxflash import _dropout, _mask, _spec
from jaxflash._mask import Mask
from jaxflash._mask_array import as_array
from jaxflash._spec import CausalAlignment, Implementation, Window

__all__ = ["dot_product_attention", "paged_attention", "varlen_attention"]


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: Window = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
    causal_alignment: CausalAlignment = "top_left",
    logits_soft_cap: float | None = None,
    sink: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    score_mod: Callable[..., Any] | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    precision: jax.lax.PrecisionLike = None,
    deterministic_backward: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Scaled dot-product attention by its definition; arguments and result are those of
    `jaxflash.dot_product_attention`.

        dropout(softmax(mask(f(c * tanh((s * Q @ K^T + bias - a * |i - j|) / c))))) @ V

    Computed in float32 with float32-accurate products on every platform (float64 for float64
    inputs), so `precision` changes nothing here; nor do `implementation` and
    `deterministic_backward`, which are accepted only so that the signatures are the same.

    A query row that sees no key, because of the masks or because its logits are all -inf, has
    output 0, lse -inf and gradients 0. NaN and infinity in keys and values that no row sees, in
    queries that see no key, and in bias elements behind a mask reach neither the output nor a
    gradient. A key that some rows see is not hidden from the others in this sense: 0 * NaN = NaN.

    In the formula, s is `scale`, a the slope of a head, i and j the positions of query and key that
    windows and `causal_alignment` speak of, c the soft cap and f the score function; a sink is one
    more logit of the softmax, whose value is 0. A value of `jaxflash.masks` means its
    `jaxflash.masks.as_array`. What is dropped is a function of key and indices that
    `jaxflash._dropout` defines.

    Examples:
        `jaxflash.reference` is a module; the definition is a function of it::

            expected = jaxflash.reference.dot_product_attention(query, key, value, is_causal=True)
    """
    if isinstance(mask, Mask):
        mask, query_seq_lengths, key_value_seq_lengths = _dense(
            mask, query, key, query_seq_lengths, key_value_seq_lengths
        )
    spec, operands = _spec.make(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        segment_ids=segment_ids,
        causal_alignment=causal_alignment,
        logits_soft_cap=logits_soft_cap,
        sink=sink,
        alibi_slopes=alibi_slopes,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        precision=precision,
        deterministic_backward=deterministic_backward,
    )
    out, lse = attention(spec, operands, score_mod)
    return (out, lse) if return_residual else out


def varlen_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_kv: ArrayLike,
    **arguments: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""The definition of `jaxflash.varlen_attention`: each sequence by itself.

    `cu_seqlens_q` and `cu_seqlens_kv` must be known here, that is, not traced. Dropout is left out:
    its mask counts rows and columns of the packed arrays.

    Args:
        query: (tokens, N, H).
        key: (key tokens, K, H).
        value: (key tokens, K, h).
        cu_seqlens_q: (n + 1), where the sequences begin and end among the queries.
        cu_seqlens_kv: (n + 1), the same for the keys.
        **arguments: other arguments of `jaxflash.varlen_attention`.

    Returns:
        The output (tokens, N, h); with `return_residual` also lse (tokens, N).

    Raises:
        ValueError: `dropout_rate` is not 0.
    """
    if arguments.get("dropout_rate", 0.0) != 0.0:
        raise ValueError("dropout_rate must be 0 in the reference of varlen_attention")
    return_residual = arguments.pop("return_residual", False)
    score_mod = arguments.pop("score_mod", None)
    # NumPy arrays stay concrete inside `jax.jit`.
    cu_seqlens_q, cu_seqlens_kv = (
        np.maximum.accumulate(np.clip(np.asarray(edges), 0, x.shape[0]))
        for edges, x in ((cu_seqlens_q, query), (cu_seqlens_kv, key))
    )
    padding = int(cu_seqlens_q[0]), query.shape[0] - int(cu_seqlens_q[-1])
    of_queries, of_keys = (
        [slice(int(begin), int(end)) for begin, end in itertools.pairwise(edges)]
        for edges in (cu_seqlens_q, cu_seqlens_kv)
    )

    def one(sequence: int, i: slice, j: slice):
        def of_sequence(score, b, h, q, kv):
            return score_mod(score, jnp.int32(sequence), h, q, kv)

        options: dict[str, Any] = {**arguments, "return_residual": True}
        options["score_mod"] = None if score_mod is None else of_sequence
        return dot_product_attention(query[i], key[j], value[j], **options)

    results = list(map(one, itertools.count(), of_queries, of_keys))
    outs, lses = zip(*results, strict=True)
    out = jnp.pad(jnp.concatenate(outs), (padding, (0, 0), (0, 0)))
    lse = jnp.pad(jnp.concatenate(lses), (padding, (0, 0)), constant_values=-jnp.inf)
    return (out, lse) if return_residual else out


def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    local_window_size: Window = None,
    logits_soft_cap: float | None = None,
    sink: ArrayLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""The definition of `jaxflash.paged_attention`: the pages of each sequence put together.

    Unlike that function, it has derivatives.

    Args:
        query: (\*B, T, N, H).
        key_pages: (P, page size, K, H).
        value_pages: (P, page size, K, h).
        page_table: (\*B, M) int32, clamped to 0 ... P - 1.
        lengths: (\*B) int32, clamped to 0 ... M * page size.
        scale: as in `dot_product_attention`, like all that follow.
        is_causal: see there.
        local_window_size: see there.
        logits_soft_cap: see there.
        sink: see there.
        precision: ignored.
        implementation: ignored.
        return_residual: see there.

    Returns:
        The output (\*B, T, N, h); with `return_residual` also lse (\*B, T, N).
    """
    options: dict[str, Any] = dict(
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        sink=sink,
        precision=precision,
    )
    _, arrays = _spec.make_paged(query, key_pages, value_pages, page_table, lengths, **options)

    def contiguous(pages):
        count, size, *trailing = pages.shape
        *batch, number = arrays.page_table.shape
        of_sequences = pages[jnp.clip(arrays.page_table, 0, count - 1)]
        return of_sequences.reshape(*batch, number * size, *trailing)

    return dot_product_attention(
        arrays.query,
        contiguous(arrays.key_pages),
        contiguous(arrays.value_pages),
        **options,
        key_value_seq_lengths=arrays.lengths,
        causal_alignment="bottom_right",
        implementation=implementation,
        return_residual=return_residual,
    )


def attention(
    spec: _spec.AttentionSpec, operands: _spec.Operands, score_mod: Callable[..., Any] | None = None
) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of validated arguments."""
    dtype = jnp.float64 if operands.query.dtype == jnp.float64 else jnp.float32
    q_heads, kv_heads = operands.query.shape[-2], operands.key.shape[-2]
    group = q_heads // kv_heads

    distance = _query_minus_key_position(spec, operands)  # (*B, 1, T, S)
    visible = _visible(spec, operands, distance)  # (*B, N, T, S)

    # What takes no part is replaced before it meets a product: 0 * NaN would be NaN, in the
    # gradient too.
    row_sees = jnp.swapaxes(jnp.any(visible, axis=-1), -1, -2)[..., None]  # (*B, T, N, 1)
    key_seen = jnp.swapaxes(jnp.any(visible, axis=-2), -1, -2)  # (*B, S, N)
    key_seen = key_seen.reshape(*key_seen.shape[:-1], kv_heads, group)
    key_seen = jnp.any(key_seen, axis=-1)[..., None]  # (*B, S, K, 1)
    q = jnp.where(row_sees, operands.query.astype(dtype), 0.0)
    k = jnp.where(key_seen, operands.key.astype(dtype), 0.0)
    v = jnp.where(key_seen, operands.value.astype(dtype), 0.0)
    k, v = jnp.repeat(k, group, axis=-2), jnp.repeat(v, group, axis=-2)

    logits = spec.scale * _product("...tnh,...snh->...nts", q, k)
    if operands.scale is not None:
        logits = logits * operands.scale.astype(dtype)
    if operands.bias is not None:
        logits = logits + operands.bias.astype(dtype)
    if operands.alibi_slopes is not None:
        slopes = _align(operands.alibi_slopes.astype(dtype), logits.ndim - 2)[..., None, None]
        logits = logits - slopes * jnp.abs(distance).astype(dtype)
    if spec.logits_soft_cap is not None:
        logits = jnp.where(visible, logits, 0.0)
        logits = spec.logits_soft_cap * jnp.tanh(logits / spec.logits_soft_cap)
    if score_mod is not None:
        logits = _modified(_spec.checked_score_mod(score_mod), jnp.where(visible, logits, 0.0))
    logits = jnp.where(visible, logits, -jnp.inf)

    # Softmax. The maximum only keeps exp in range: its gradient is zero.
    maximum = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf))
    no_key = maximum == -jnp.inf
    sink = None
    if operands.sink is not None:
        sink = _align(operands.sink.astype(dtype), logits.ndim - 2)[..., None, None]
        maximum = jnp.maximum(maximum, jax.lax.stop_gradient(sink))
    maximum = jnp.where(maximum == -jnp.inf, 0.0, maximum)
    exponentials = jnp.exp(_below(maximum, logits))
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    # XLA's maximum for CPUs loses a NaN, and a row of NaN is none without a key.
    no_key &= total == 0.0
    if sink is not None:
        total = total + jnp.exp(sink - maximum)
    total = jnp.where(no_key, 1.0, total)
    probabilities = exponentials / total
    lse = jnp.where(no_key, -jnp.inf, maximum + jnp.log(total))

    if spec.dropout_rate > 0.0:
        keep = _keep(operands.dropout_seed, spec.dropout_rate, logits.shape)
        probabilities = jnp.where(keep, probabilities * _dropout.kept_scale(spec.dropout_rate), 0.0)
    out = jnp.where(row_sees, _product("...nts,...snh->...tnh", probabilities, v), 0.0)
    return out.astype(operands.query.dtype), jnp.swapaxes(lse[..., 0], -1, -2)


@jax.custom_jvp
def _below(maximum, logits):
    """logits - maximum, at most 0.

    XLA for CPUs may subtract from a product before it rounds it, as it did in the maximum, but not
    from the choice of two numbers. That choice is rounding: derivatives are those of the logits,
    and the maximum has none.
    """
    return jnp.where(logits > maximum, maximum, logits) - maximum


@_below.defjvp
def _(primals, tangents):
    _, t_logits = tangents
    return _below(*primals), t_logits


def _product(expression: str, a, b):
    return jnp.einsum(expression, a, b, precision=jax.lax.Precision.HIGHEST)


def _modified(score_mod, logits):
    """`score_mod` of every logit (*B, N, T, S)."""
    *batch, q_heads, q_len, kv_len = logits.shape
    of_rows = jax.vmap(score_mod, (0, None, None, None, 0))
    of_heads = jax.vmap(of_rows, (0, None, None, 0, None))
    of_batch = jax.vmap(of_heads, (0, None, 0, None, None))
    of_all = jax.vmap(of_batch, (0, 0, None, None, None))
    numbers = (jnp.arange(n, dtype=jnp.int32) for n in (math.prod(batch), q_heads, q_len, kv_len))
    flat = logits.reshape(math.prod(batch), q_heads, q_len, kv_len)
    return of_all(flat, *numbers).astype(logits.dtype).reshape(logits.shape)


def _query_minus_key_position(spec, operands):
    """(*B, 1, T, S) int32: the query's position minus the key's; B may be 1 here."""
    q_len, kv_len = operands.query.shape[-3], operands.key.shape[-3]
    ones = (1,) * (operands.query.ndim - 3)
    q_positions, key_positions = operands.query_positions, operands.key_positions
    if q_positions is None:
        q_positions = jnp.arange(q_len, dtype=jnp.int32).reshape(*ones, q_len)
    if key_positions is None:
        key_positions = jnp.arange(kv_len, dtype=jnp.int32).reshape(*ones, kv_len)
    if spec.bottom_right:
        valid_queries = _valid_length(operands.query_seq_lengths, q_len, ones)
        valid_keys = _valid_length(operands.key_value_seq_lengths, kv_len, ones)
        q_positions = q_positions + (valid_keys - valid_queries)[..., None]
    return q_positions[..., None, :, None] - key_positions[..., None, None, :]


def _visible(spec, operands, distance):
    """(*B, N, T, S) bool: which row sees which key."""
    batch, (q_len, q_heads) = operands.query.shape[:-3], operands.query.shape[-3:-1]
    kv_len = operands.key.shape[-3]
    ones = (1,) * len(batch)
    rows = jnp.arange(q_len, dtype=jnp.int32).reshape(*ones, 1, q_len, 1)
    columns = jnp.arange(kv_len, dtype=jnp.int32).reshape(*ones, 1, 1, kv_len)
    visible = jnp.ones((*batch, q_heads, q_len, kv_len), jnp.bool_)
    if operands.mask is not None:
        visible &= operands.mask
    if spec.left is not None:
        visible &= distance <= min(spec.left, _mask.INT32_MAX)
    if spec.right is not None:
        visible &= distance >= -min(spec.right, _mask.INT32_MAX)
    if operands.query_seq_lengths is not None:
        visible &= rows < operands.query_seq_lengths[..., None, None, None]
    if operands.key_value_seq_lengths is not None:
        visible &= columns < operands.key_value_seq_lengths[..., None, None, None]
    if operands.query_segment_ids is not None:
        q_ids = operands.query_segment_ids[..., None, :, None]
        visible &= q_ids == operands.key_segment_ids[..., None, None, :]
    return visible


def _dense(mask: Mask, query, key, query_seq_lengths, key_value_seq_lengths):
    """A mask value as an array (*B, N, T, S), for what it means in a call with these lengths; and
    the lengths of the call with it, (*B) each."""
    *batch, q_len, q_heads, _ = jnp.shape(query)
    kv_len = jnp.shape(key)[-3]
    mask &= _mask.lengths(query_seq_lengths, key_value_seq_lengths)
    array = as_array(mask, (*batch, q_heads, q_len, kv_len))
    lengths = _mask.valid_lengths(mask, q_len, kv_len)
    return array, *(jnp.broadcast_to(x, batch) for x in lengths)


def _valid_length(lengths, full: int, ones):
    if lengths is None:
        return jnp.full(ones, full, jnp.int32)
    return jnp.clip(lengths, 0, full)


def _keep(seed, rate, logits_shape):
    *batch, q_heads, q_len, kv_len = logits_shape

    def numbers(count, *shape):
        return jnp.arange(count, dtype=jnp.int32).reshape(shape)

    ones = (1,) * len(batch)
    return _dropout.keep(
        seed,
        rate,
        batch=numbers(math.prod(batch), *batch, 1, 1, 1),
        head=numbers(q_heads, *ones, q_heads, 1, 1),
        row=numbers(q_len, *ones, 1, q_len, 1),
        first_column=0,
        num_columns=kv_len,
    )


def _align(x, rank: int):
    """`x` with leading axes of size 1, up to `rank` axes."""
    return x.reshape((1,) * (rank - x.ndim) + x.shape)
