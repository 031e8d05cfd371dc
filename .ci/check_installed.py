"""Checks what pip installed under a folder: the right FFI version, and a kernel library that is not
too large, shows its C symbols only and needs neither CUDA nor the C++ runtime of the machine."""

import argparse
from pathlib import Path

import jax._src.xla_bridge
from check_kernels import check_library

import jaxflash
from jaxflash import _extension

# Handlers of this version register with jax 0.10 and everything newer.
FFI_API_VERSION = (0, 3)
LARGEST_LIBRARY = 20_000_000  # bytes; 60 MB if nvcc did not compress it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prefix", type=Path, help="where the package must have come from")
    parser.add_argument("--without-kernels", action="store_true")
    arguments = parser.parse_args()

    package = Path(jaxflash.__file__).parent
    assert package.is_relative_to(arguments.prefix), f"imported from {package}"
    assert not jax._src.xla_bridge.backends_are_initialized(), "importing started a backend"
    assert _extension.ffi_api_version == FFI_API_VERSION, _extension.ffi_api_version
    assert _extension.kernels is not arguments.without_kernels
    library = package / "libjaxflash_cuda.so"
    assert library.exists() is not arguments.without_kernels
    if not arguments.without_kernels:
        check_library(library)
        size = library.stat().st_size
        assert size <= LARGEST_LIBRARY, f"{library} has {size} bytes"
        assert (package / "include" / "problem.h").exists(), "no headers to compile with"
    jaxflash.show_config()

    ones = jax.numpy.ones((1, 4, 2, 8))
    result = jaxflash.dot_product_attention(ones, ones, ones)
    assert (abs(result - 1) < 1e-6).all(), result


if __name__ == "__main__":
    main()
