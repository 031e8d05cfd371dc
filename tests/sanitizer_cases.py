"""Tiny calls for compute-sanitizer, which slows a kernel down a hundredfold. Run by
test_sanitizer.py; checks values only as far as needed to know that the kernels ran."""

import argparse
import functools

import jax
import numpy as np

import jaxflash
from cases import CASES
from check import jitted

# One per dtype, band and kind of edge; every head size class once.
NAMES = (
    "float16", "float32-highest", "T-65-float32", "head-7-value-3", "head-80-value-112",
    "T-193-S-97", "T-1-S-1", "mqa-causal", "window-T>S", "lengths-batch-axes",
    "bottom-right-T>S", "empty-S", "gqa-causal-deterministic", "head-96-float16", "head-160",
    "head-192-value-128", "decode-9-group-3", "decode-4-ragged-queries", "decode-64-256",
    "capture-bias-64", "capture-table", "capture-keys-deterministic", "mask-value-causal-window",
    "mask-value-intervals",
)  # fmt: skip

# Those of the portable kernels on every GPU: float32, or head sizes that TMA does not take.
PORTABLE_NAMES = ("float32-highest", "T-65-float32", "head-7-value-3")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--gradients-up-to", type=int, default=256, metavar="HEAD_SIZE",
                        help="of larger heads the forward pass alone")  # fmt: skip
    arguments = parser.parse_args()
    cases = [case for case in CASES if case.name in arguments.names]
    assert len(cases) == len(arguments.names), set(arguments.names) - {case.name for case in cases}
    for case in cases:
        if max(case.head_dim, case.value_size) > arguments.gradients_up_to:
            forward = functools.partial(
                jaxflash.dot_product_attention, implementation="cuda", **case.options
            )
            out = jax.device_get(jax.jit(forward)(**case.arrays()))
        else:
            out = jax.device_get(jitted(case, "cuda")(case.arrays(), *case.cotangents()))["out"]
        assert not np.isnan(out.astype(np.float32)).any(), case
        print("ran", case.name, flush=True)


if __name__ == "__main__":
    main()
