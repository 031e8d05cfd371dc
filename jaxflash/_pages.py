"""Keys or values in pages, as the array that they stand for: the blockwise path takes blocks of it,
gathered one at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxflash._loops import Block, Blocks, blocks
from jaxflash._spec import Operands, PagedOperands


class Pages(NamedTuple):
    """(*B, S, K, H), where S is the number of keys in the pages of a table's row. Numbers of pages
    that do not exist are those of the nearest that does."""

    array: Any  # (P, page size, K, H)
    table: Any  # (*B, M) int32

    @property
    def page_size(self) -> int:
        return self.array.shape[1]

    @property
    def shape(self) -> tuple:
        *batch, count = self.table.shape
        return (*batch, count * self.page_size, *self.array.shape[2:])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self):
        return self.array.dtype

    def blocks(self, at_most: int) -> Blocks:
        """Blocks of whole pages, of at most so many keys or one page."""
        size = self.page_size
        pages = blocks(self.table.shape[-1], max(at_most // size, 1), multiple=1)
        return Blocks(pages.length * size, pages.size * size, pages.count, pages.ragged)

    def gathered(self, block: Block):
        """One of those blocks, (*B, columns, K, H)."""
        count, size = self.array.shape[:2]
        number = block.size // size
        first = block.start // size
        table = jax.lax.dynamic_slice_in_dim(self.table, first, number, self.table.ndim - 1)
        # Clamped here: indexing would count a negative number from the end.
        pages = self.array.at[jnp.clip(table, 0, count - 1)].get(
            mode="clip", out_sharding=self._sharding()
        )
        return jax.lax.collapse(pages, table.ndim - 1, table.ndim + 1)

    def _sharding(self) -> NamedSharding | None:
        """On an explicit mesh that of gathered pages, (*B, pages, page size, K, H)."""
        of_array, of_table = jax.typeof(self.array).sharding, jax.typeof(self.table).sharding
        if of_array.mesh.empty or not any((*of_array.spec, *of_table.spec)):
            return None
        batch = (*of_table.spec, *(None,) * self.table.ndim)[: self.table.ndim - 1]
        trailing = (*of_array.spec, *(None,) * 4)[1:4]
        return NamedSharding(of_array.mesh, PartitionSpec(*batch, None, *trailing))


def operands_of(arrays: PagedOperands) -> Operands:
    """The call with keys and values as the arrays that their pages stand for."""
    return Operands(
        query=arrays.query,
        key=Pages(arrays.key_pages, arrays.page_table),
        value=Pages(arrays.value_pages, arrays.page_table),
        key_value_seq_lengths=arrays.lengths,
        sink=arrays.sink,
        scale=arrays.scale,
    )
