"""Tiny calls for compute-sanitizer, which slows a kernel down a hundredfold. Run by
test_sanitizer.py; checks values only as far as needed to know that the kernels ran."""

import sys

import jax
import numpy as np

from cases import CASES
from check import jitted

# One per dtype, band and kind of edge; every head size class once.
NAMES = (
    "float16", "float32-highest", "T-65-float32", "head-7-value-3", "head-80-value-112",
    "T-193-S-97", "T-1-S-1", "mqa-causal", "window-T>S", "lengths-batch-axes",
    "bottom-right-T>S", "empty-S", "gqa-causal-deterministic", "head-96-float16", "head-160",
    "head-192-value-128",
)  # fmt: skip

# Those of the portable kernels on every GPU: float32, or head sizes that TMA does not take.
PORTABLE_NAMES = ("float32-highest", "T-65-float32", "head-7-value-3")


def main(names: list[str]) -> None:
    cases = [case for case in CASES if case.name in names]
    assert len(cases) == len(names), sorted(set(names) - {case.name for case in cases})
    for case in cases:
        result = jax.device_get(jitted(case, "cuda")(case.arrays(), *case.cotangents()))
        assert not np.isnan(result["out"].astype(np.float32)).any(), case
        print("ran", case.name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
