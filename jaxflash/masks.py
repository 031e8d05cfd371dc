"""Masks as values: which query sees which key, without an array over queries and keys.

Each function makes an immutable value, a pytree whose leaves are the arrays that it was given. It
can be an argument of `jax.jit`, `jax.vmap` or `jax.lax.scan`; other arrays compile nothing new.
Values are combined with ``&``, ``|`` and ``~``, also with bool arrays, and the argument `mask` of
`jaxflash.dot_product_attention` takes the result::

    from jaxflash import masks

    mask = masks.causal() & masks.segments(ids) | masks.function(lambda b, h, q, kv: kv < 4)
    out = jaxflash.dot_product_attention(query, key, value, mask=mask)

In shapes, ``*B`` is any number of batch axes, ``N`` query heads, ``T`` query length and ``S`` key
length.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxflash import _api, _arguments, _derivatives, _mask, _platform, _sharding, _support
from jaxflash._mask import (
    Mask,
    causal,
    dense,
    function,
    intervals,
    lengths,
    segments,
    window,
)
from jaxflash._mask_array import as_array
from jaxflash._mask_array import checked as _checked

__all__ = [
    "Mask",
    "as_array",
    "causal",
    "dense",
    "function",
    "intervals",
    "lengths",
    "plan",
    "segments",
    "window",
]


def plan(mask: Mask, shape: tuple[int, ...]) -> Mask:
    """The same mask, together with what a call would first find out: which tiles it can skip.

    To find that out, a call evaluates a mask function, or a mask made with ``|`` or ``~``, once for
    each query and key. If several calls share a mask, such as the layers of a network, they can
    share a plan that is made once. A plan is itself a mask. ``plan & other`` keeps what was found,
    or, where ``other`` is a function or a choice, what was found to be hidden; ``|`` and ``~``
    discard it.

    Args:
      mask: a value of this module. Those made of bands, lengths, segments and arrays with ``&``
        alone need no plan.
      shape: ``(*B, N, T, S)``, the sizes of the calls; a 1 does not stand for others.

    Raises:
      ValueError: the mask does not fit the shape; or, in a call, what the plan holds does not fit
        its sizes (that of a mask which is the same for all batch elements fits any number of them,
        if it was made for more than one).

    Examples:
      One plan for all layers of a scan::

          mask = masks.plan(prefix_lm, (batch, heads, length, length))
          x, _ = jax.lax.scan(lambda x, weights: (layer(weights, x, mask), None), x, layers)
    """
    mask, (batch, heads, q_len, kv_len) = _checked(mask, shape)
    query = jax.ShapeDtypeStruct((*batch, q_len, heads, 1), jnp.float32)
    key_heads = 1 if heads == 0 else heads
    key = jax.ShapeDtypeStruct((*batch, kv_len, key_heads, 1), jnp.float32)
    with _sharding.mesh_of(*jax.tree.leaves(mask)):
        # Calls may have more than masks, beside which a dilated one is evaluated.
        spec, operands = _api.described(query, key, key, mask=mask, in_classes=False)
        if spec.predicate is None:
            return _mask.Planned(mask, {}, (*batch, heads))
        # Whatever path the calls will take.
        by_kernel = _platform.has_partitioner() and _support.plans_by_kernel(spec, operands)
        path = "auto" if by_kernel else "xla"
        given = operands.named().items()
        types = tuple((name, x) for name, x in given if _arguments.is_abstract(x))
        arrays = {name: x for name, x in given if not _arguments.is_abstract(x)}
        found = _derivatives.planned(spec, path, types, arrays)
    return _mask.Planned(mask, found, (*batch, heads))
