"""Combining attention over parts of the keys."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxflash._arguments import array


def merge_attention(
    outs: ArrayLike | Sequence[ArrayLike],
    lses: ArrayLike | Sequence[ArrayLike],
    *,
    sink: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Merges attention results over disjoint sets of keys into the result over all of them.

        lse = log(sum_p exp(lse_p))
        out = sum_p exp(lse_p - lse) * out_p

    Each partial result comes from `jaxflash.dot_product_attention` with
    `return_residual=True` for the same queries. This is what ring attention needs: every device
    attends to the keys that it holds, passes keys and values on with ``jax.lax.ppermute``, and
    merges its result so far with each new partial result. Other uses are keys split over devices in
    decoding, and a prefix that many sequences share. Up to rounding, merging is associative and
    commutative, so partial results may be merged in any order and grouping.

    A sink counts once: give it to the last merge, and to none of the partial calls. (One of these
    may have it instead if every row sees a key there: one that sees none has an lse of -inf, sink
    or not.)

    A row that sees no key in any part has output 0, lse -inf and gradients 0.

    Args:
        outs: the partial outputs, stacked as ``(P, *B, T, N, h)`` or a sequence of P arrays
            ``(*B, T, N, h)``, of one floating dtype.
        lses: the logarithms of their softmax denominators, stacked as ``(P, *B, T, N)`` or a
            sequence of P arrays ``(*B, T, N)``, of one floating dtype.
        sink: ``(N,)``, as of `jaxflash.dot_product_attention`, of which no part knows. None:
            without.

    Returns:
        The pair (out, lse): out ``(*B, T, N, h)`` in the dtype of `outs`, lse ``(*B, T, N)`` in
        float32.
        Both are differentiable. The arithmetic is float32 (float64, as is lse, for float64).

    Raises:
        ValueError: the parts of `outs`, or those of `lses`, differ in shape or dtype, or are not
            floating; or the shape of `lses` is not that of `outs` without its last axis; or `sink`
            is no floating array ``(N,)``.

    Examples:
        Two halves of the keys::

            attend = functools.partial(jaxflash.dot_product_attention, return_residual=True)
            first, second = attend(q, k[:, :s], v[:, :s]), attend(q, k[:, s:], v[:, s:])
            outs, lses = zip(first, second)
            out, lse = jaxflash.merge_attention(outs, lses)
    """
    outs, lses = _stacked("outs", outs), _stacked("lses", lses)
    if outs.ndim < 4 or outs.shape[:-1] != lses.shape:
        raise ValueError(
            "outs must have shape (P, *B, T, N, h) and lses that without its last axis, "
            f"got outs {outs.shape} and lses {lses.shape}"
        )
    dtype = jnp.float64 if jnp.float64 in (outs.dtype, lses.dtype) else jnp.float32
    lses = lses.astype(dtype)

    # The maximum only keeps exp in range: its gradient is zero.
    maximum = jax.lax.stop_gradient(jnp.max(lses, axis=0))
    no_key = maximum == -jnp.inf
    if sink is not None:
        sink = array("sink", sink)
        if sink.shape != lses.shape[-1:] or not jnp.issubdtype(sink.dtype, jnp.floating):
            raise ValueError(
                f"sink must be a floating array of shape (N,) = {lses.shape[-1:]}, "
                f"got {sink.dtype}{list(sink.shape)}"
            )
        sink = jnp.broadcast_to(sink.astype(dtype), maximum.shape)
        maximum = jnp.maximum(maximum, jax.lax.stop_gradient(sink))
    maximum = jnp.where(no_key, 0.0, maximum)
    weights = jnp.exp(lses - maximum[None])
    total = jnp.sum(weights, axis=0)
    if sink is not None:
        total += jnp.exp(jnp.where(no_key, -jnp.inf, sink) - maximum)
    total = jnp.where(no_key, 1.0, total)
    lse = jnp.where(no_key, -jnp.inf, maximum + jnp.log(total))
    # Whatever stands in a part that saw no key: 0 * NaN would be NaN.
    parts = jnp.where((weights > 0.0)[..., None], outs.astype(dtype), 0.0)
    out = jnp.sum(parts * (weights / total[None])[..., None], axis=0)
    return out.astype(outs.dtype), lse


def _stacked(name: str, parts):
    if isinstance(parts, (list, tuple)):
        arrays = [array(name, part) for part in parts]
        kinds = {(x.shape, x.dtype.name) for x in arrays}
        if len(kinds) != 1:
            raise ValueError(
                f"{name} must be at least one array, all of one shape and dtype, "
                f"got {[f'{x.dtype}{list(x.shape)}' for x in arrays]}"
            )
        parts = jnp.stack(arrays)
    parts = array(name, parts)
    if parts.ndim < 1 or parts.shape[0] == 0 or not jnp.issubdtype(parts.dtype, jnp.floating):
        raise ValueError(
            f"{name} must be a sequence of floating arrays or one array stacked along its first "
            f"axis, got {parts.dtype}{list(parts.shape)}"
        )
    return parts
