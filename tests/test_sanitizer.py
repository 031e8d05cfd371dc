"""compute-sanitizer over a set of tiny calls: memory, races, uninitialised reads, barriers."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from sanitizer_cases import NAMES

pytestmark = pytest.mark.gpu

_FOUND_ERRORS = 77


def _sanitizer() -> str:
    places = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    path = os.pathsep.join([os.environ["PATH"], *(f"{place}/bin" for place in places if place)])
    found = shutil.which("compute-sanitizer", path=path)
    assert found, "compute-sanitizer is not installed (it comes with the CUDA toolkit)"
    return found


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_is_clean(tool):
    """Only our kernels are looked at: what XLA leaves allocated at exit is its own affair."""
    command = [
        _sanitizer(), "--tool", tool, "--kernel-name", "kns=jaxflash", "--report-api-errors", "no",
        "--error-exitcode", str(_FOUND_ERRORS), "--print-limit", "20",
        sys.executable, "sanitizer_cases.py",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=pathlib.Path(__file__).parent,
        # Every array gets an allocation of its own, with bounds that memcheck knows.
        env={**os.environ, "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"},
    )  # fmt: skip
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-8000:]
    assert all(f"ran {name}" in text for name in NAMES), text[-8000:]
    assert "ERROR SUMMARY: 0 errors" in text or "0 hazards" in text, text[-2000:]
