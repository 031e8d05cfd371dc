"""Marks that tests of several files have."""

import pytest

from jaxflash import _ffi

needs_kernels = pytest.mark.skipif(
    not _ffi.extension.kernels, reason="the library was built without kernels"
)
