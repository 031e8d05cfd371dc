"""NVRTC, which compiles score functions: where to look for it, and whether it is fit."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from jaxflash import _extension as extension

# Newest first; of another major version the library has another name.
_MAJORS = (13, 12)


def register() -> None:
    """Tells the kernel library where the compiler and the kernels' headers are. Loads nothing."""
    extension.set_compiler(
        [(str(library), builtins and str(builtins)) for library, builtins in _locations()],
        str(Path(extension.__file__).parent / "include"),
    )


def version() -> tuple[int, int] | None:
    """The compiler's version; None without one. Loads it the first time."""
    return extension.compiler()[0] if extension.kernels else None


def reason_against() -> str | None:
    """Why score functions cannot be compiled here and what to install, or None where they can."""
    if not extension.kernels:
        return "this installation was built without CUDA kernels (JAXFLASH_CUDA=OFF)"
    found, text = extension.compiler()
    return text if found is None else None


def _locations() -> Iterator[tuple[Path | str, Path | None]]:
    """(library, the builtins that it opens by their bare name), best first."""
    for folder in _folders():
        for major in _MAJORS:
            library = folder / f"libnvrtc.so.{major}"
            if library.exists():
                builtins = sorted(folder.glob(f"libnvrtc-builtins.so.{major}.*"))
                yield library, builtins[-1] if builtins else None
    for major in _MAJORS:  # where the system's loader looks
        yield f"libnvrtc.so.{major}", None


def _folders() -> Iterator[Path]:
    # The wheels that jax[cuda13] and jax[cuda12] bring along.
    nvidia = importlib.util.find_spec("nvidia")
    for folder in (nvidia and nvidia.submodule_search_locations) or ():
        yield Path(folder, "cu13", "lib")
        yield Path(folder, "cuda_nvrtc", "lib")
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield from _libraries(Path(os.environ[variable]))
    yield from _libraries(Path("/usr/local/cuda"))


def _libraries(toolkit: Path) -> Iterator[Path]:
    yield toolkit / "lib64"
    yield toolkit / "lib"
