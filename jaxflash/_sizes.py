"""What is known of sizes that may be symbolic (`jax.export`)."""

from __future__ import annotations

from typing import Any

import jax


def is_one(count) -> bool:
    """Whether a count, which may be symbolic or an array, is known to be 1."""
    return isinstance(count, int) and count == 1


def at_most(size: Any, limit: Any) -> bool:
    """Whether one is no larger than the other, for sure where they are symbolic."""
    try:
        return bool(size <= limit)
    except jax.errors.InconclusiveDimensionOperation:
        return False
