"""Finds the CUDA compiler; as a script, prints its path or fails. Used by the build backend and by
CMake, so that both mean the same compiler."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

OLDEST = (12, 9)

# nvcc, nvvm and crt must be of one release. 13.0: a later release's PTX is refused by the drivers
# that came with CUDA 13.0.
WHEELS = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
]


def _version(nvcc: str) -> tuple[int, int]:
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _toolkits() -> Iterator[str | None]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield str(Path(os.environ[variable], "bin", "nvcc"))
    yield shutil.which("nvcc")
    yield "/usr/local/cuda/bin/nvcc"


def _wheels() -> Iterator[str]:
    nvidia = importlib.util.find_spec("nvidia")
    for folder in (nvidia and nvidia.submodule_search_locations) or ():
        for nvcc in sorted(Path(folder).glob("cu*/bin/nvcc"), reverse=True):
            yield str(nvcc)


def find_nvcc(wheels: bool = True) -> str | None:
    """CUDACXX where it is set, otherwise the first nvcc that is new enough: of a toolkit, then,
    with `wheels`, of wheels in this environment."""
    if given := os.environ.get("CUDACXX"):
        return shutil.which(given) or given
    candidates = list(_toolkits())
    if wheels:
        candidates += _wheels()
    for nvcc in candidates:
        if nvcc is None or not os.access(nvcc, os.X_OK):
            continue
        if _version(nvcc) >= OLDEST:
            return nvcc
        print(f"jaxflash: {nvcc} is older than CUDA {OLDEST[0]}.{OLDEST[1]}", file=sys.stderr)
    return None


if __name__ == "__main__":
    path = find_nvcc()
    if path is None:
        sys.exit(1)
    print(path)
