"""Checks what pip installed under a folder: the right FFI version, and a kernel library that shows
its C symbols only and needs neither CUDA nor the C++ runtime of the machine."""

import argparse
import subprocess
from pathlib import Path

import jax._src.xla_bridge

import jaxflash
from jaxflash import _extension

# Handlers of this version register with jax 0.10 and everything newer.
FFI_API_VERSION = (0, 3)
NEEDED = {"libc.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


def lines_of(*command: object) -> list[str]:
    run = subprocess.run(
        [str(word) for word in command], check=True, capture_output=True, text=True
    )
    return run.stdout.splitlines()


def check_library(library: Path) -> None:
    exported = [line.split()[-1] for line in lines_of("nm", "-D", "--defined-only", library)]
    print("exported:", *exported)
    assert exported, f"{library} exports nothing"
    assert all(name.startswith("jaxflash_") for name in exported), "foreign symbols are exported"
    dynamic = lines_of("readelf", "-d", "--wide", library)
    needed = {line.split("[")[1].rstrip("]") for line in dynamic if "(NEEDED)" in line}
    print("needed:", *sorted(needed))
    assert needed <= NEEDED, f"{library} needs {sorted(needed - NEEDED)}"


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
        assert (package / "include" / "problem.h").exists(), "no headers to compile with"
    jaxflash.show_config()

    ones = jax.numpy.ones((1, 4, 2, 8))
    result = jaxflash.dot_product_attention(ones, ones, ones)
    assert (abs(result - 1) < 1e-6).all(), result


if __name__ == "__main__":
    main()
