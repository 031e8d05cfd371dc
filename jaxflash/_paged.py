"""Attention over a cache whose keys and values lie in pages."""

from __future__ import annotations

import functools
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxflash import _blockwise, _derivatives, _kernels, _pages, _scores, _sharding, _spec
from jaxflash._api import Implementation, Window, choose_path
from jaxflash._arguments import flag
from jaxflash._spec import AttentionSpec, PagedOperands


class PagedOptions(TypedDict, total=False):
    """Keyword arguments of `paged_attention`."""

    scale: ArrayLike | None
    is_causal: bool
    local_window_size: Window
    logits_soft_cap: float | None
    sink: ArrayLike | None
    precision: jax.lax.PrecisionLike
    implementation: Implementation | None


@overload
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    *,
    return_residual: Literal[False] = ...,
    **options: Unpack[PagedOptions],
) -> jax.Array: ...


@overload
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    *,
    return_residual: Literal[True],
    **options: Unpack[PagedOptions],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    *,
    return_residual: bool,
    **options: Unpack[PagedOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


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
    r"""Scaled dot-product attention of new queries over a cache in pages (Kwon et al. 2023).

    Keys and values of all sequences lie in a pool of pages. The row of a sequence in `page_table`
    lists its pages in order: key ``i`` is slot ``i % page_size`` of page
    ``page_table[..., i // page_size]``. The result is that of `jaxflash.dot_product_attention`
    over the concatenated pages of each sequence, with ``key_value_seq_lengths=lengths`` and
    ``causal_alignment="bottom_right"``, but the pages are never concatenated, and slots beyond a
    sequence's length are not read.

    The ``T`` queries of a sequence are its last tokens, whose keys are already in the cache and
    counted in `lengths`: query ``i`` is at key position ``length - T + i``.

    Args:
      query: ``(*B, T, N, H)``, float16, bfloat16, float32, or float64 (blockwise path only).
      key_pages: ``(P, page_size, K, H)``, of the dtype of query; ``page_size`` is 16, 32, 64, 128
        or 256, and ``K`` divides ``N``.
      value_pages: ``(P, page_size, K, h)``, likewise.
      page_table: int32 ``(*B, M)``. Sequences may share pages. Numbers are clamped to
        ``0 ... P - 1``; entries beyond a sequence's length are ignored.
      lengths: int32 ``(*B)``, the valid keys of each sequence, clamped to ``0 ... M * page_size``.
      scale: as in `jaxflash.dot_product_attention`, like all that follow.
      is_causal: a query sees the keys up to its own position; for a single query, that is all.
      local_window_size: counts from the query's position.
      logits_soft_cap: as in `jaxflash.dot_product_attention`.
      sink: as in `jaxflash.dot_product_attention`.
      precision: as in `jaxflash.dot_product_attention`.
      implementation: as in `jaxflash.dot_product_attention`.
      return_residual: also return the lse, ``(*B, T, N)``.

    Returns:
      Output ``(*B, T, N, h)`` in the dtype of query; with ``return_residual`` a pair of the output
      and the lse ``(*B, T, N)``, as in `jaxflash.dot_product_attention`. A query that sees no key,
      such as any query of a sequence of length 0, has output 0 and lse -inf.

    Raises:
      ValueError: an argument is invalid; the text names it, what was given and what is allowed.
      NotImplementedError: ``implementation="cuda"``, and the kernels do not take this call, or the
        program is compiled for another platform than CUDA (then raised when it is lowered); or a
        derivative was asked for, which this function does not have; or `jax.vmap` maps `sink`.

    Warns:
      SlowPathWarning: as in `jaxflash.dot_product_attention`.

    Under `jax.vmap`, mapped pages become one pool. Arrays may be sharded over batch axes and heads;
    the page axes of the pool are gathered.

    Examples:
      Two sequences of 20 and 5 tokens in a pool of eight pages of 16, one new query each::

          key_pages = value_pages = jnp.ones((8, 16, 2, 64), jnp.bfloat16)
          page_table = jnp.array([[3, 0], [5, 0]], jnp.int32)
          lengths = jnp.array([20, 5], jnp.int32)
          query = jnp.ones((2, 1, 8, 64), jnp.bfloat16)
          out = jaxflash.paged_attention(query, key_pages, value_pages, page_table, lengths)
    """
    return_residual = flag("return_residual", return_residual)
    spec, arrays = _spec.make_paged(
        query,
        key_pages,
        value_pages,
        page_table,
        lengths,
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        sink=sink,
        precision=precision,
    )
    with _sharding.mesh_of(*jax.tree.leaves(arrays)):
        # A soft cap captures no arrays.
        spec, operands = _scores.compose(spec, _pages.operands_of(arrays), None)
        out, lse = _attention(spec, choose_path(spec, operands, implementation), arrays)
    return (out, lse) if return_residual else out


# Compiled once per spec and shapes, so that an eager call costs a dispatch and no retracing.
@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _attention(spec: AttentionSpec, path: _derivatives.Path, arrays: PagedOperands):
    """(out (*B, T, N, h), lse (*B, T, N)) of checked arrays."""
    arrays = _derivatives.with_scaled_query(arrays)
    results: Any = _forward_only(spec, path, _sharding.alike_in_pages(arrays))
    return _sharding.as_of_query(arrays.query, *results)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _forward_only(spec: AttentionSpec, path: _derivatives.Path, arrays: PagedOperands):
    return _mapped(spec, path)(arrays)


@_forward_only.defjvp
def _no_derivative(*_):
    raise NotImplementedError(
        "jaxflash.paged_attention has no derivatives, in reverse or in forward mode: it is for "
        "inference. Use jax.lax.stop_gradient on its arguments, or gather the pages and call "
        "jaxflash.dot_product_attention"
    )


@functools.lru_cache(maxsize=256)
def _mapped(spec: AttentionSpec, path: _derivatives.Path):
    """The call as a function of its arrays, which `jax.vmap` maps to one more batch axis."""

    @jax.custom_batching.custom_vmap
    def op(arrays: PagedOperands):
        def blockwise(arrays):
            return _blockwise.forward(spec, _pages.operands_of(arrays))

        def kernels(arrays):
            return _kernels.paged_forward(spec, arrays)

        return _derivatives.on_path(path, kernels, blockwise)(arrays)

    @op.def_vmap
    def rule(axis_size: int, mapped: list, arrays: PagedOperands):
        (is_mapped,) = mapped
        if is_mapped.sink:
            raise NotImplementedError(
                "jaxflash.paged_attention: jax.vmap cannot map sink; map the other arguments alone"
            )

        def of_all(name: str):
            x = getattr(arrays, name)
            return x if getattr(is_mapped, name) else jnp.broadcast_to(x, (axis_size, *x.shape))

        query, table, lengths = (of_all(name) for name in ("query", "page_table", "lengths"))
        pages = arrays.key_pages, arrays.value_pages
        if is_mapped.key_pages or is_mapped.value_pages:
            # One pool of all, and the numbers in it.
            pages = tuple(of_all(name) for name in ("key_pages", "value_pages"))
            count = pages[0].shape[1]
            first = jnp.arange(axis_size, dtype=jnp.int32) * count
            first = first.reshape(-1, *(1,) * (table.ndim - 1))
            table = jnp.clip(table, 0, count - 1) + first
            pages = tuple(jax.lax.collapse(x, 0, 2) for x in pages)
        return op(PagedOperands(query, *pages, table, lengths, arrays.sink)), (True, True)

    return op
