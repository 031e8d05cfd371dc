"""What the printer is asked for: all that it knows of a call, and the key of what it printed."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxflash._program import Program


@dataclasses.dataclass(frozen=True)
class Request:
    """A program for a pass of the kernels, or for those of gradients of captures.

    Captures are numbered: those of the program, of the predicates, tangents, the sink, dropout.

    Attributes:
        program: of float32 scores.
        predicates: of bools, which all have to show an element.
        distance_is_difference: whether `distance` is q - kv in this call.
        lengths: of queries and of keys; where loads of gradients are asked for.
        sink_dtype: of the sink's logits (heads); or None.
        drops: whether there is a capture that is `_dropout.kernel_parameters`.
        paired: captures whose last axis has an even number of elements, one for each key, in a pass
            whose threads have neighbouring keys of a row.
        starts: those of `paired` whose elements may be loaded before the products of a tile, which
            then start from what the logit adds to the score, divided by the scale; none where the
            scale is so small that the quotient might overflow, or very large.
        sides: "before" and "behind", on which side of a query keys may be visible, where products
            can start from what is proportional to the distance; or none.
        moving: captures of the program that have tangents.
        words: whether the first predicate is a `_scores.dense_predicate` of words of keys.
        keys_are_rows: whether threads have many queries of few keys, as in the backward pass.
        wanted: captures of the program, of floats, whose gradients are wanted.
        sizes: how many numbers "b", "h" and "kv" there are, without those that a capture's gradient
            must not be indexed by; None: no sums over the queries.
        storable: captures whose last axes are those of queries and keys, and whose gradients have
            the form in which the backward kernel has that of the score. They have an element of
            their own for each batch element, or are asked for it by "b".
        sums_batch: whether it can also have the sum of all batch elements.
        sums_diagonals: whether backward kernels may add sums along diagonals to a gradient.
    """

    program: Program
    predicates: tuple[Program, ...] = ()
    distance_is_difference: bool = dataclasses.field(kw_only=True)
    lengths: tuple[Any, Any] | None = None
    sink_dtype: str | None = None
    drops: bool = False
    paired: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    sides: tuple[str, ...] = ()
    moving: tuple[int, ...] = ()
    words: bool = False
    keys_are_rows: bool = False
    wanted: tuple[int, ...] = ()
    sizes: tuple[tuple[str, Any], ...] | None = None
    storable: tuple[int, ...] = ()
    sums_batch: bool = False
    sums_diagonals: bool = False

    @property
    def capture_types(self) -> tuple[Any, ...]:
        """Those of the program and of the predicates."""
        return tuple(t for x in (self.program, *self.predicates) for t in x.capture_types)
