"""Equinox's attention module on `jaxflash.dot_product_attention`. Needs Equinox, which importing
`jaxflash` does not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.core
from jax.typing import DTypeLike

try:
    import equinox as eqx
except ImportError as _error:
    raise ImportError(
        "jaxflash.equinox needs Equinox, which is not installed: pip install 'jaxflash[equinox]'"
    ) from _error

from jaxflash._api import dot_product_attention
from jaxflash._arguments import array, promoted
from jaxflash._mask import Mask

__all__ = ["MultiheadAttention"]

Heads = tuple[jax.Array, jax.Array, jax.Array]


class MultiheadAttention(eqx.Module):
    """Multi-head attention with the interface of `equinox.nn.MultiheadAttention`, plus grouped
    heads and every option of `jaxflash.dot_product_attention`.

    Created with the same arguments and the same `key`, it has the same parameters under the same
    names, and gives the same outputs and gradients. Parameters can be moved from one to the other::

        eqx.tree_at(eqx_parameters, ours, eqx_parameters(theirs))

    where ``eqx_parameters = lambda m: (m.query_proj, m.key_proj, m.value_proj, m.output_proj)``.

    As in Equinox, the module takes one example; under `jax.vmap` the whole batch is a single call.

    Three things differ. A query that sees no key has output 0 before the output projection
    (Equinox: the mean of all values). Dropout draws other random numbers from `key`, and its rate
    must be below 1 and known at trace time, as it is under `equinox.filter_jit`. `mask` must be
    bool; for a causal mask prefer ``is_causal=True``, which reads nothing from memory.

    Attributes:
      query_proj: `equinox.nn.Linear`, ``query_size`` to ``num_heads * qk_size``.
      key_proj: likewise, ``key_size`` to ``num_kv_heads * qk_size``.
      value_proj: likewise, ``value_size`` to ``num_kv_heads * vo_size``.
      output_proj: likewise, ``num_heads * vo_size`` to ``output_size``.
      dropout: `equinox.nn.Dropout`; its rate and `inference` flag apply to the probabilities.
    """

    query_proj: eqx.nn.Linear
    key_proj: eqx.nn.Linear
    value_proj: eqx.nn.Linear
    output_proj: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    num_heads: int = eqx.field(static=True)
    num_kv_heads: int = eqx.field(static=True)
    query_size: int = eqx.field(static=True)
    key_size: int = eqx.field(static=True)
    value_size: int = eqx.field(static=True)
    output_size: int = eqx.field(static=True)
    qk_size: int = eqx.field(static=True)
    vo_size: int = eqx.field(static=True)
    use_query_bias: bool = eqx.field(static=True)
    use_key_bias: bool = eqx.field(static=True)
    use_value_bias: bool = eqx.field(static=True)
    use_output_bias: bool = eqx.field(static=True)

    def __init__(
        self,
        num_heads: int,
        query_size: int,
        key_size: int | None = None,
        value_size: int | None = None,
        output_size: int | None = None,
        qk_size: int | None = None,
        vo_size: int | None = None,
        use_query_bias: bool = False,
        use_key_bias: bool = False,
        use_value_bias: bool = False,
        use_output_bias: bool = False,
        dropout_p: float = 0.0,
        inference: bool = False,
        dtype: DTypeLike | None = None,
        *,
        num_kv_heads: int | None = None,
        key: jax.Array,
    ) -> None:
        """Draws the parameters as `equinox.nn.MultiheadAttention` does.

        Args:
          num_heads: query heads.
          query_size: channels of the query.
          key_size: channels of the key; `query_size` by default.
          value_size: channels of the value; `query_size` by default.
          output_size: channels of the output; `query_size` by default.
          qk_size: head size of queries and keys; ``query_size // num_heads`` by default.
          vo_size: head size of values; ``query_size // num_heads`` by default.
          use_query_bias: whether the query projection has a bias; the other three likewise.
          use_key_bias: see use_query_bias.
          use_value_bias: see use_query_bias.
          use_output_bias: see use_query_bias.
          dropout_p: probability, below 1, of dropping an attention probability.
          inference: whether to leave out dropout; `equinox.nn.inference_mode` sets it.
          dtype: of the parameters; float32 by default, float64 in JAX's 64-bit mode.
          num_kv_heads: key and value heads, a divisor of `num_heads`, which is the default. Fewer
            of them are shared by groups of query heads (Ainslie et al. 2023).
          key: PRNG key from which the parameters are drawn.

        Raises:
          ValueError: `num_kv_heads` does not divide `num_heads`, or there are no heads, or heads
            have no channels.
        """
        if num_heads < 1:
            raise ValueError(f"num_heads must be at least 1, got {num_heads}")
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_kv_heads < 1 or num_heads % num_kv_heads != 0:
            raise ValueError(
                f"num_kv_heads must be a divisor of num_heads ({num_heads}), got {num_kv_heads}"
            )
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.query_size = query_size
        self.key_size = query_size if key_size is None else key_size
        self.value_size = query_size if value_size is None else value_size
        self.output_size = query_size if output_size is None else output_size
        self.qk_size = query_size // num_heads if qk_size is None else qk_size
        self.vo_size = query_size // num_heads if vo_size is None else vo_size
        for name, size in (("qk_size", self.qk_size), ("vo_size", self.vo_size)):
            if size < 1:
                raise ValueError(
                    f"{name} (query_size // num_heads = {query_size} // {num_heads} by default) "
                    f"must be at least 1, got {size}"
                )
        self.use_query_bias, self.use_key_bias = use_query_bias, use_key_bias
        self.use_value_bias, self.use_output_bias = use_value_bias, use_output_bias

        keys = jax.random.split(key, 4)
        q_width, k_width = num_heads * self.qk_size, num_kv_heads * self.qk_size
        v_width, o_width = num_kv_heads * self.vo_size, num_heads * self.vo_size
        linear = eqx.nn.Linear
        self.query_proj = linear(self.query_size, q_width, use_query_bias, dtype, key=keys[0])
        self.key_proj = linear(self.key_size, k_width, use_key_bias, dtype, key=keys[1])
        self.value_proj = linear(self.value_size, v_width, use_value_bias, dtype, key=keys[2])
        self.output_proj = linear(o_width, self.output_size, use_output_bias, dtype, key=keys[3])
        self.dropout = eqx.nn.Dropout(dropout_p, inference=inference)

    @jax.named_scope("jaxflash.equinox.MultiheadAttention")
    def __call__(
        self,
        query: jax.Array,
        key_: jax.Array,
        value: jax.Array,
        mask: jax.Array | Mask | None = None,
        *,
        key: jax.Array | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: Callable[[jax.Array, jax.Array, jax.Array], Heads] | None = None,
        **options: Any,
    ) -> jax.Array:
        """Attention of one example.

        Args:
          query: ``(T, query_size)``.
          key_: ``(S, key_size)``.
          value: ``(S, value_size)``.
          mask: bool ``(T, S)`` or ``(num_heads, T, S)``, True = attend; or a value of
            `jaxflash.masks`.
          key: PRNG key of the dropout; needed with dropout.
          inference: whether to leave out dropout; None follows the module's `dropout`.
          deterministic: deprecated name of `inference`.
          process_heads: function of the projected query ``(T, num_heads, qk_size)``, key
            ``(S, num_kv_heads, qk_size)`` and value ``(S, num_kv_heads, vo_size)`` that returns the
            three with the same shapes, for instance with rotary embeddings. Heads of several dtypes
            are cast to their common one.
          **options: of `jaxflash.dot_product_attention`, for this one example:
            ``is_causal=True``, ``local_window_size``, ``bias`` broadcastable to
            ``(num_heads, T, S)``, ``segment_ids`` ``(T,)``, ``sink`` ``(num_heads,)``,
            ``implementation`` and so on.

        Returns:
          ``(T, output_size)``.

        Raises:
          ValueError: as in `jaxflash.dot_product_attention`; or an input is not one example; or
            `process_heads` changes a shape; or `dropout_rate`, `dropout_rng` or `return_residual`
            is among the options; or `dropout_p` does not lie in [0, 1), or it or `inference` is
            traced.
          RuntimeError: there is dropout, and `key` is None.

        Examples:
          A causal window over a batch::

              attention = jaxflash.equinox.MultiheadAttention(
                  8, 512, num_kv_heads=2, key=jax.random.key(0)
              )
              one = lambda x: attention(x, x, x, local_window_size=(127, 0))
              x = jnp.ones((4, 256, 512))
              y = jax.vmap(one)(x)
        """
        if deterministic is not None:
            # The caller of this frame is the named scope.
            warnings.warn("deterministic is deprecated: use inference", stacklevel=3)
            inference = deterministic
        for name in ("dropout_rate", "dropout_rng", "return_residual"):
            if name in options:
                raise ValueError(
                    f"{name} is not an option of the module: dropout comes from dropout_p and key, "
                    "and the output alone is returned"
                )
        query, key_, value = array("query", query), array("key_", key_), array("value", value)
        if query.ndim != 2 or key_.ndim != 2 or value.ndim != 2:
            raise ValueError(
                "query, key_ and value must be one example, (length, channels), got shapes "
                f"{query.shape}, {key_.shape}, {value.shape}: map the module over a batch with "
                "jax.vmap"
            )
        sizes = dict(query=self.query_size, key_=self.key_size, value=self.value_size)
        for (name, size), x in zip(sizes.items(), (query, key_, value), strict=True):
            if x.shape[1] != size:
                raise ValueError(f"{name} must have {size} channels, got shape {x.shape}")
        if key_.shape[0] != value.shape[0]:
            raise ValueError(
                f"value must have the length of key_, {key_.shape[0]}, got {value.shape[0]}"
            )

        heads = (
            _project(self.query_proj, query, self.num_heads, self.qk_size),
            _project(self.key_proj, key_, self.num_kv_heads, self.qk_size),
            _project(self.value_proj, value, self.num_kv_heads, self.vo_size),
        )
        if process_heads is not None:
            shapes = [x.shape for x in heads]
            heads = process_heads(*heads)
            if not isinstance(heads, tuple | list | jax.Array):
                raise ValueError(
                    f"process_heads must return (query, key, value), got {type(heads).__name__}"
                )
            heads = [array("a result of process_heads", x) for x in heads]
            if [x.shape for x in heads] != shapes:
                raise ValueError(
                    f"process_heads must keep the shapes {shapes}, got {[x.shape for x in heads]}"
                )
        dropout = self._dropout(key, inference)
        out = dot_product_attention(*promoted(*heads), mask=mask, **dropout, **options)
        return jax.vmap(self.output_proj)(out.reshape(-1, self.num_heads * self.vo_size))

    def _dropout(self, key, inference) -> dict[str, Any]:
        inference = self.dropout.inference if inference is None else inference
        rate = self.dropout.p
        traced = isinstance(inference, jax.core.Tracer)
        if traced or (isinstance(rate, jax.core.Tracer) and not inference):
            raise ValueError(
                "dropout.p and inference must be known at trace time: use eqx.filter_jit, which "
                "leaves the numbers of a module as they are, instead of jax.jit, which traces them"
            )
        if inference or (isinstance(rate, (int, float)) and rate == 0):
            return {}
        if not 0 <= rate < 1:
            raise ValueError(f"dropout_p must lie in [0, 1), got {rate}")
        if key is None:
            raise RuntimeError(f"dropout of {rate} needs a key, or inference=True")
        if not hasattr(key, "dtype"):
            raise ValueError(f"key must be a PRNG key, got {type(key).__name__}")
        return dict(dropout_rate=rate, dropout_rng=key)


def _project(linear: eqx.nn.Linear, x, heads: int, size: int) -> jax.Array:
    return jax.vmap(linear)(x).reshape(-1, heads, size)
