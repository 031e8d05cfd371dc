"""Attention within sequences of different lengths that are packed one after the other."""

from __future__ import annotations

import dataclasses
from typing import Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxflash import _ranges, _spec
from jaxflash._api import CausalAlignment, Implementation, PackedOptions, Window, run
from jaxflash._arguments import array, flag

_FEW_BOUNDARIES = 2048  # which are compared with one another


@overload
def varlen_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_kv: ArrayLike,
    *,
    return_residual: Literal[False] = ...,
    **options: Unpack[PackedOptions],
) -> jax.Array: ...


@overload
def varlen_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_kv: ArrayLike,
    *,
    return_residual: Literal[True],
    **options: Unpack[PackedOptions],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def varlen_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_kv: ArrayLike,
    *,
    return_residual: bool,
    **options: Unpack[PackedOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def varlen_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_kv: ArrayLike,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    local_window_size: Window = None,
    causal_alignment: CausalAlignment = "top_left",
    logits_soft_cap: float | None = None,
    sink: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    score_mod: _spec.ScoreMod | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
    deterministic_backward: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Scaled dot-product attention within each of ``n`` packed sequences.

    The tokens of all sequences follow one another without padding in between. Each sequence attends
    only to itself, as if `jaxflash.dot_product_attention` were called on it. The boundaries are
    arrays: other lengths compile nothing new, as long as the total number of tokens is the same.
    Tokens past the last sequence are padding: they see nothing (output 0, lse -inf), nothing sees
    them, and their gradients are 0.

    Args:
      query: ``(tokens, N, H)``.
      key: ``(key tokens, K, H)``, where ``K`` divides ``N``.
      value: ``(key tokens, K, h)``.
      cu_seqlens_q: int32 ``(n + 1,)``, ascending from 0: sequence ``i`` has the queries
        ``cu_seqlens_q[i]`` up to, but excluding, ``cu_seqlens_q[i + 1]``. It may be empty. Entries
        are clipped to the number of tokens; one that is less than those before counts as the
        largest of them.
      cu_seqlens_kv: int32 ``(n + 1,)``, the same for keys and values. With ``alibi_slopes``, or a
        ``score_mod`` that reads at ``q - kv``, faster where it is the same object as
        ``cu_seqlens_q``.
      scale: as in `jaxflash.dot_product_attention`, like all that follow.
      is_causal: counts positions from the start of the sequence.
      local_window_size: likewise.
      causal_alignment: ``"bottom_right"`` aligns the last query of a sequence with its last key.
      logits_soft_cap: as in `jaxflash.dot_product_attention`.
      sink: as in `jaxflash.dot_product_attention`.
      alibi_slopes: ``(N,)``; distances are those within the sequence.
      score_mod: ``b`` is the number of the sequence, ``q`` and ``kv`` are positions within it.
      dropout_rate: what is dropped depends on indices into the packed arrays.
      dropout_rng: as in `jaxflash.dot_product_attention`.
      precision: as in `jaxflash.dot_product_attention`.
      implementation: as in `jaxflash.dot_product_attention`.
      return_residual: also return the lse, ``(tokens, N)``.
      deterministic_backward: as in `jaxflash.dot_product_attention`.

    Returns:
      Output ``(tokens, N, h)`` in the dtype of query; with ``return_residual`` a pair of the output
      and the lse ``(tokens, N)``, as in `jaxflash.dot_product_attention`.

    Raises:
      ValueError: an argument is invalid; the text names it, what was given and what is allowed.
      NotImplementedError: ``implementation="cuda"``, and the kernels do not take this call, or the
        program is compiled for another platform than CUDA (then raised when it is lowered).

    Warns:
      SlowPathWarning: as in `jaxflash.dot_product_attention`.

    Examples:
      Documents of 100, 28 and 384 tokens::

          boundaries = jnp.array([0, 100, 128, 512], jnp.int32)
          query = key = value = jnp.ones((512, 8, 64), jnp.bfloat16)
          out = jaxflash.varlen_attention(
              query, key, value, boundaries, boundaries, is_causal=True
          )
    """
    return_residual = flag("return_residual", return_residual)
    query, key, value = array("query", query), array("key", key), array("value", value)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 3:
            raise ValueError(
                f"{name} must be packed, (tokens, heads, head_size), got shape {x.shape}"
            )
    # They are clipped to the tokens of each side.
    is_shared = cu_seqlens_kv is cu_seqlens_q and query.shape[0] == key.shape[0]
    cu_seqlens_q = _boundaries("cu_seqlens_q", cu_seqlens_q, query.shape[0])
    if is_shared:
        cu_seqlens_kv = cu_seqlens_q
    else:
        cu_seqlens_kv = _boundaries("cu_seqlens_kv", cu_seqlens_kv, key.shape[0])
    if cu_seqlens_q.shape != cu_seqlens_kv.shape:
        raise ValueError(
            "cu_seqlens_kv must have as many entries as cu_seqlens_q "
            f"{cu_seqlens_q.shape}, got shape {cu_seqlens_kv.shape}"
        )
    # Ids that no sequence has, and different ones: the tokens past the last sequence meet nobody.
    query_ids = _sequence_of(cu_seqlens_q, query.shape[0], outside=-1)
    key_ids = _sequence_of(cu_seqlens_kv, key.shape[0], outside=-2)
    spec, operands = _spec.make(
        query,
        key,
        value,
        None,
        None,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=None,
        key_value_seq_lengths=None,
        local_window_size=local_window_size,
        segment_ids=(query_ids, key_ids),
        causal_alignment=causal_alignment,
        logits_soft_cap=logits_soft_cap,
        sink=sink,
        alibi_slopes=alibi_slopes,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        precision=precision,
        deterministic_backward=deterministic_backward,
    )
    query_positions = key_positions = None
    # With the same boundaries numbers are as far apart as positions are.
    if not is_shared:
        query_positions = _positions(cu_seqlens_q, query_ids)
        key_positions = _positions(cu_seqlens_kv, key_ids)
        if spec.bottom_right:
            sequence = jnp.maximum(query_ids, 0)
            q_len, kv_len = (x[sequence + 1] - x[sequence] for x in (cu_seqlens_q, cu_seqlens_kv))
            query_positions = query_positions + kv_len - q_len
    spec = dataclasses.replace(spec, bottom_right=False)
    operands = operands._replace(
        query_positions=query_positions,
        key_positions=key_positions,
        query_boundaries=cu_seqlens_q,
        key_boundaries=cu_seqlens_kv,
    )
    out, lse = run(spec, operands, score_mod, implementation)
    return (out, lse) if return_residual else out


def _boundaries(name: str, cu_seqlens, tokens: int) -> jax.Array:
    """Ascending ones, between 0 and the number of tokens."""
    cu_seqlens = array(name, cu_seqlens)
    # A symbolic number (jax.export) is not compared.
    count = cu_seqlens.shape[0] if cu_seqlens.ndim == 1 else 0
    if cu_seqlens.dtype != jnp.int32 or (isinstance(count, int) and count < 2):
        raise ValueError(
            f"{name} must be int32 of shape (n + 1,) for n >= 1 sequences, "
            f"got {cu_seqlens.dtype} of shape {cu_seqlens.shape}"
        )
    cu_seqlens = jnp.clip(cu_seqlens, 0, tokens)
    if isinstance(count, int) and count > _FEW_BOUNDARIES:
        return jax.lax.cummax(cu_seqlens)
    # Each with those before it: one reduction, without the steps of a scan.
    shape = 2 * cu_seqlens.shape
    i, j = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return jnp.max(jnp.where(j <= i, jnp.broadcast_to(cu_seqlens, shape), 0), axis=1)


def _sequence_of(cu_seqlens, tokens: int, outside: int):
    """The sequence that each token belongs to, int32 (tokens,)."""
    token = jnp.arange(tokens, dtype=jnp.int32)
    if isinstance(cu_seqlens.shape[0], int):
        begun = _ranges.ranks(cu_seqlens, token, "right")
    else:
        # The steps of a search would follow from the number of sequences.
        begins = jnp.zeros(tokens + 1, jnp.int32).at[cu_seqlens].add(1)
        begun = jnp.cumsum(begins)[:tokens]
    sequence = begun - 1
    inside = (sequence >= 0) & (sequence < cu_seqlens.shape[0] - 1)
    return jnp.where(inside, sequence, outside)


def _positions(cu_seqlens, sequence):
    """Those of tokens in their sequences, of others anything, int32 (tokens,)."""
    return jnp.arange(sequence.shape[0], dtype=jnp.int32) - cu_seqlens[jnp.maximum(sequence, 0)]
