"""Marks that tests of several files have."""

import pytest

from jaxflash import _extension

needs_kernels = pytest.mark.skipif(
    not _extension.kernels, reason="the library was built without kernels"
)
