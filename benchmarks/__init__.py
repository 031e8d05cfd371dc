"""Times jaxflash and jax.nn side by side: `python -m benchmarks.run` from the checkout."""

import sys
from pathlib import Path

# `python -m` puts the checkout first on the path, where jaxflash's sources would hide the installed
# package. Last, they are the fallback; whoever wants the sources says so with PYTHONPATH.
if sys.path[0] in ("", str(Path(__file__).resolve().parents[1])):
    sys.path.append(sys.path.pop(0))
