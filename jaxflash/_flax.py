"""The function that Flax's attention modules call."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jaxflash._api import dot_product_attention
from jaxflash._arguments import broadcastable, flag, promoted
from jaxflash._mask import Mask, array_of
from jaxflash._spec import checked_lengths

# Flax's own words for these come by name below; a module needs an array back.
_OPTIONS = frozenset(inspect.signature(dot_product_attention).parameters) - {"return_residual"}


# Every keyword of Flax has its name here: linen passes only those that the signature names, nnx
# all of its own.
def attention_fn(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    broadcast_dropout: bool = False,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    module: None = None,
    promote_dtype: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] | None = None,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: None = None,
    attn_weights_value_einsum: None = None,
    einsum_dot_general: None = None,
    input_positions: None = None,
    mask_is_prefix: bool = False,
    **options: Any,
) -> jax.Array:
    """Attention as `flax.nnx.MultiHeadAttention` and `flax.linen.MultiHeadDotProductAttention`
    call it: ``MultiHeadAttention(..., attention_fn=jaxflash.attention_fn)``.

    Every other option of `jaxflash.dot_product_attention` can be set with `functools.partial`. What
    a module passes at each call overrides the partial: with linen `mask`, `dtype`, `precision` and
    the arguments of dropout, with nnx these and `is_causal`. Give those to the module, as in
    ``module(x, is_causal=True)`` for nnx. Linen modules have no `is_causal`; there, use
    ``functools.partial(jaxflash.attention_fn, is_causal=True)``.

    Args:
      query: ``(*B, T, N, H)``.
      key: ``(*B, S, K, H)``, where ``K`` divides ``N``.
      value: ``(*B, S, K, h)``; the head size of Flax's modules is ``H``.
      bias: as in `jaxflash.dot_product_attention`.
      mask: broadcasts to ``(*B, N, T, S)``; bool, or numbers of which 0 means do not attend (Flax's
        mask helpers make float32 ones); or a value of `jaxflash.masks`, which a module with
        ``decode=True`` does not take, as Flax combines it with the mask of its cache.
      dropout_rng: PRNG key.
      dropout_rate: see `jaxflash.dot_product_attention`.
      broadcast_dropout: True is not supported: every head and sequence draws its own mask. With
        True, which is the modules' default, a call with dropout warns.
      deterministic: whether to leave out dropout.
      dtype: dtype of the computation; query, key and value are cast to it. None: their common
        dtype, by JAX's promotion.
      precision: see `jaxflash.dot_product_attention`.
      module: must be None; the probabilities, which Flax would store in it, never exist.
      promote_dtype: function of ``((query, key, value), dtype=dtype)`` that returns the three in
        one dtype, instead of the rule of `dtype`.
      is_causal: see `jaxflash.dot_product_attention`.
      force_fp32_for_softmax: the softmax is float32 in any case.
      qk_attn_weights_einsum: must be None, as the products run inside one kernel.
      attn_weights_value_einsum: must be None, likewise.
      einsum_dot_general: must be None, likewise.
      input_positions: must be None: Flax passes positions for its own rotary embedding.
      mask_is_prefix: promises that the mask of a single query, the same for all heads, shows some
        number of first keys and hides the others, as that of a module with a cache does
        (``decode=True``). The number becomes `key_value_seq_lengths`, so that no more of the cache
        is read, and the query is at the position of the last visible key, from which windows and
        slopes count, and which is the ``q`` of a `score_mod`. Without the promise the mask is read
        as an array, because its contents are not known when the program is traced. If the promise
        is broken, the output is NaN. It has no effect on calls with several queries.
      **options: every other option of `jaxflash.dot_product_attention` except
        `return_residual`: `local_window_size`, `key_value_seq_lengths`, `segment_ids`, `scale`,
        `logits_soft_cap`, `sink`, `alibi_slopes`, `implementation` and so on.

    Returns:
      Output ``(*B, T, N, h)``.

    Raises:
      ValueError: as in `jaxflash.dot_product_attention`; or an argument that must be None is not;
        or ``is_causal``, ``local_window_size``, ``alibi_slopes`` or a ``score_mod`` that reads
        ``q`` was given for one query over several keys, as in a module with a cache
        (``decode=True``): the position of the query among the keys is not known here, and the mask
        of the cache is already causal. `mask_is_prefix` tells the position; so does an explicit
        ``causal_alignment``, but to a ``score_mod``, whose ``q`` then is 0.
      TypeError: an option that `jaxflash.dot_product_attention` does not have.

    Warns:
      UserWarning: dropout with ``broadcast_dropout=True``.
      SlowPathWarning: as in `jaxflash.dot_product_attention`.

    Examples:
      A causal window of 128 keys and a soft cap, in linen::

          attention_fn = functools.partial(
              jaxflash.attention_fn, local_window_size=(127, 0), logits_soft_cap=50.0
          )
          layer = linen.MultiHeadDotProductAttention(num_heads=8, attention_fn=attention_fn)

      A module that generates token by token::

          attention_fn = functools.partial(jaxflash.attention_fn, mask_is_prefix=True)
          layer = linen.MultiHeadDotProductAttention(
              num_heads=8, decode=True, attention_fn=attention_fn
          )
    """
    del force_fp32_for_softmax
    fused = "the products run inside one kernel"
    for name, given, why in (
        ("module", module, "the probabilities are never stored (sow_weights=False)"),
        ("qk_attn_weights_einsum", qk_attn_weights_einsum, fused),
        ("attn_weights_value_einsum", attn_weights_value_einsum, fused),
        ("einsum_dot_general", einsum_dot_general, fused),
        ("input_positions", input_positions, "rotate query and key before the call"),
        (
            "return_residual",
            options.pop("return_residual", False) or None,
            "a Flax module takes an array; jaxflash.dot_product_attention returns the lse",
        ),
    ):
        if given is not None:
            raise ValueError(f"{name} must be None: {why}")
    if unknown := sorted(options.keys() - _OPTIONS):
        raise TypeError(
            f"attention_fn got unknown options {unknown}; beside Flax's own it takes "
            f"{', '.join(sorted(_OPTIONS - _FLAX))}"
        )

    is_causal = flag("is_causal", is_causal)
    mask_is_prefix = flag("mask_is_prefix", mask_is_prefix)
    if promote_dtype is None:
        query, key, value = promoted(query, key, value, dtype)
    else:
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
    is_array = mask is not None and not isinstance(mask, Mask)
    if is_array:
        mask = array_of(mask)
        mask = mask if mask.dtype == jnp.bool_ else mask != 0
    is_prefix = None
    if mask_is_prefix and is_array and query.ndim >= 3 and query.shape[-3] == 1:
        lengths, is_prefix = _prefix(mask, (*query.shape[:-3], 1, 1, key.shape[-3]))
        mask = None
        if (others := options.get("key_value_seq_lengths")) is not None:
            others = checked_lengths("key_value_seq_lengths", others, query.shape[:-3])
            lengths = jnp.minimum(lengths, others)
        options = {"causal_alignment": "bottom_right", **options, "key_value_seq_lengths": lengths}
        if options.get("score_mod") is not None:
            options["score_mod"] = _at_last_key(options["score_mod"], lengths)
    _check_position(query, key, is_causal, options)
    if deterministic:
        dropout_rate, dropout_rng = 0.0, None
    elif dropout_rate and broadcast_dropout:
        warnings.warn(
            "broadcast_dropout=True is not followed: every head and sequence draws a dropout mask "
            "of its own; broadcast_dropout=False says so, and silences this warning",
            stacklevel=2,
        )
    out = dot_product_attention(
        query,
        key,
        value,
        bias,
        mask,
        is_causal=is_causal,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        precision=precision,
        **options,
    )
    if is_prefix is None:
        return out
    return jnp.where(is_prefix[..., None, None, None], out, jnp.nan)


_FLAX = frozenset(inspect.signature(attention_fn).parameters)


def _prefix(mask, shape) -> tuple[jax.Array, jax.Array]:
    """(keys that a mask of one query lets through, whether these are the first), (*B) each."""
    mask = broadcastable("mask_is_prefix: the mask", mask, shape, "(*batch, 1 for all heads, 1, S)")
    visible = jnp.broadcast_to(mask, shape)[..., 0, 0, :]
    lengths = jnp.sum(visible, axis=-1, dtype=jnp.int32)
    numbers = jax.lax.broadcasted_iota(jnp.int32, visible.shape, visible.ndim - 1)
    return lengths, jnp.all(visible == (numbers < lengths[..., None]), axis=-1)


def _at_last_key(score_mod, lengths):
    """The function for a query that is row 0 of the call and stands at the last of its keys."""
    if not callable(score_mod):
        return score_mod  # the call says what is wrong
    positions = lengths.reshape(-1) - 1

    def of_row(score, b, h, q, kv):
        return score_mod(score, b, h, q + positions[b], kv)

    return of_row


def _check_position(query, key, is_causal, options) -> None:
    """A module that decodes asks for one query over a cache: top-left would put it at key 0."""
    window = options.get("local_window_size")
    given = {
        "local_window_size": window is not None and window not in ((None, None), [None, None]),
        "alibi_slopes": options.get("alibi_slopes") is not None,
        "is_causal": is_causal,
    }
    if "causal_alignment" in options or query.ndim < 3 or key.ndim < 3:
        return
    if query.shape[-3] != 1 or key.shape[-3] == 1:
        return
    given["score_mod"] = _reads_row(options.get("score_mod"))
    by_position = [name for name, is_given in given.items() if is_given]
    if by_position:
        raise ValueError(
            f"{', '.join(by_position)}: one query over {key.shape[-3]} keys, as with a cache "
            "(decode=True), has no known position among them. Leave them out where the mask of "
            "the cache says what is visible, pass mask_is_prefix=True and that mask as an array, "
            "or causal_alignment ('bottom_right': the query stands at the last key, or at that of "
            "key_value_seq_lengths)"
        )


def _reads_row(score_mod) -> bool:
    """Whether the result of a score function depends on the number of the query."""
    integer = jax.ShapeDtypeStruct((), jnp.int32)
    score = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        jaxpr = jax.make_jaxpr(score_mod)(score, *(4 * (integer,))).jaxpr
    except Exception:  # None; or the call says what is wrong
        return False
    q = jaxpr.invars[3]
    return any(q in eqn.invars for eqn in jaxpr.eqns) or q in jaxpr.outvars
