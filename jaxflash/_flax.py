"""The function that Flax's attention modules call."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxflash._api import dot_product_attention


# Every keyword has its name here: linen passes only those that the signature names, nnx all.
def attention_fn(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    dropout_rng=None,
    dropout_rate=0.0,
    broadcast_dropout=True,
    deterministic=False,
    dtype=None,
    precision=None,
    module=None,
    is_causal=False,
    force_fp32_for_softmax=False,
    qk_attn_weights_einsum=None,
    attn_weights_value_einsum=None,
) -> jax.Array:
    """Attention as `flax.nnx.MultiHeadAttention` and `flax.linen.MultiHeadDotProductAttention`
    call it: ``MultiHeadAttention(..., attention_fn=jaxflash.attention_fn)``.

    Args:
      query: ``(*B, T, N, H)``; key and value ``(*B, S, K, H)``.
      key: see query.
      value: see query.
      bias: as in :func:`jaxflash.dot_product_attention`.
      mask: broadcasts to ``(*B, N, T, S)``; bool, or numbers of which 0 means do not attend (Flax's
        mask helpers make float32 ones).
      dropout_rng: PRNG key.
      dropout_rate: see :func:`jaxflash.dot_product_attention`.
      broadcast_dropout: accepted and not followed: every head and sequence draws its own mask.
      deterministic: Flax's word for no dropout.
      dtype: dtype of the computation; query, key and value are cast to it. None keeps theirs.
      precision: see :func:`jaxflash.dot_product_attention`.
      module: must be None; the probabilities, which Flax would store in it, never exist.
      is_causal: see :func:`jaxflash.dot_product_attention`.
      force_fp32_for_softmax: the softmax is float32 in any case.
      qk_attn_weights_einsum: must be None.
      attn_weights_value_einsum: must be None.

    Returns:
      ``(*B, T, N, H)``.

    Raises:
      ValueError: as in :func:`jaxflash.dot_product_attention`, and if ``module`` or an einsum is
        given.
    """
    del broadcast_dropout, force_fp32_for_softmax
    if module is not None:
        raise ValueError(
            "module must be None (sow_weights=False): the attention probabilities are never stored"
        )
    for name, einsum in (
        ("qk_attn_weights_einsum", qk_attn_weights_einsum),
        ("attn_weights_value_einsum", attn_weights_value_einsum),
    ):
        if einsum is not None:
            raise ValueError(f"{name} must be None: the products run inside one kernel")
    if dtype is not None:
        query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
    if mask is not None:
        mask = jnp.asarray(mask)
        mask = mask if mask.dtype == jnp.bool_ else mask != 0
    drops = dropout_rate > 0.0 and not deterministic
    return dot_product_attention(
        query,
        key,
        value,
        bias,
        mask,
        is_causal=is_causal,
        dropout_rate=dropout_rate if drops else 0.0,
        dropout_rng=dropout_rng if drops else None,
        precision=precision,
    )
