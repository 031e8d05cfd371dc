"""Rows of tests over several axes: all combinations are many, and those of two values are what goes
wrong."""

import itertools
import os

import pytest

# All combinations, of which most take a compilation each: JAXFLASH_TEST_COMBINATIONS=1 pytest tests
_ALL = os.environ.get("JAXFLASH_TEST_COMBINATIONS") == "1"


def covering(names: str, *axes):
    """`pytest.mark.parametrize` of some combinations, in which any two values of two axes meet.

    An axis is a sequence, or a dictionary of values by the ids that the rows have.
    """
    values = [axis if isinstance(axis, dict) else {str(x): x for x in axis} for axis in axes]
    rows = list(itertools.product(*values))
    if not _ALL:
        rows = pairwise(rows)
    return pytest.mark.parametrize(
        names.split(", "),
        [tuple(axis[x] for axis, x in zip(values, row, strict=True)) for row in rows],
        ids=map("-".join, rows),
    )


def pairwise(rows):
    """The first of those rows that show the most new pairs, until there are none."""
    chosen, missing = [], set().union(*map(_pairs, rows))
    while missing:
        best = max(rows, key=lambda row: len(missing & _pairs(row)))
        chosen.append(best)
        missing -= _pairs(best)
    return sorted(chosen, key=rows.index)


def _pairs(row):
    return {(i, x, j, y) for (i, x), (j, y) in itertools.combinations(enumerate(row), 2)}
