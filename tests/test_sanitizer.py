"""compute-sanitizer over a set of tiny calls: memory, races, uninitialised reads, barriers."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from sanitizer_cases import NAMES, PORTABLE_NAMES

pytestmark = pytest.mark.gpu


def _sanitizer() -> str:
    places = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    path = os.pathsep.join([os.environ["PATH"], *(f"{place}/bin" for place in places if place)])
    found = shutil.which("compute-sanitizer", path=path)
    assert found, "compute-sanitizer is not installed (it comes with the CUDA toolkit)"
    return found


# Ordered by an mbarrier that counts the bytes of the copy, which racecheck does not follow: a copy
# of lse and delta into shared memory looks to it as if nothing came between it and its readers.
_BULK_COPY = "::bulk_load("


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_is_clean(tool):
    """Only our kernels are looked at: what XLA leaves allocated at exit is its own affair."""
    # initcheck does not see what TMA stores, so that all of an output seems to lack its values.
    names = PORTABLE_NAMES if tool == "initcheck" else NAMES
    command = [
        _sanitizer(), "--tool", tool, "--kernel-name", "kns=jaxflash", "--report-api-errors", "no",
        "--show-backtrace", "device", "--print-limit", "1000",
        sys.executable, "sanitizer_cases.py", *names,
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=pathlib.Path(__file__).parent,
        # Every array gets an allocation of its own, with bounds that memcheck knows.
        env={**os.environ, "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"},
    )  # fmt: skip
    text = done.stdout + done.stderr
    # What the tool and the cases say, without what XLA says when a kernel was stopped.
    said = [line for line in text.splitlines() if line.startswith(("=========", "ran "))]
    report = "\n".join(said[:100])
    assert done.returncode == 0, report
    assert all(f"ran {name}" in text for name in names), report
    assert "SUMMARY" in text, text[-2000:]
    if tool == "racecheck":
        races = [line for line in text.splitlines() if "Race reported" in line]
        unexplained = [line for line in races if _BULK_COPY not in line]
        assert not unexplained, "\n".join(unexplained)
    else:
        assert "ERROR SUMMARY: 0 errors" in text, report
