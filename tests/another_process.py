"""Python in a process of its own, where what is installed is imported."""

from __future__ import annotations

import os
import subprocess
import sys


def run_python(code: str, *, stdin: str | None = None, **environment: str) -> str:
    """What the code prints; an AssertionError with its messages if it fails."""
    # -P: started in a checkout, Python would import its source folder.
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], input=stdin, env=os.environ | environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
