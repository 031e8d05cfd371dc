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
    "decode-cap-12-group-8", "decode-sink-3-window", "decode-dropout-20-group-3",
    "decode-mask-value-gap",
    "capture-bias-64", "capture-bias-tiles", "capture-bias-tiles-deterministic", "capture-table",
    "capture-keys-deterministic", "T-330-lengths-64",
    "mask-value-causal-window", "mask-value-intervals", "tiles-bias-loaded-64",
    "tiles-bias-loaded-128", "capture-bias-stored-64", "capture-bias-stored-causal-128",
    "capture-bias-summed-axes-128", "capture-bias-held-264", "poison-mask-64", "poison-mask-128",
    "poison-segments-128", "packed-poison-64", "packed-keys-relative", "packed-deterministic",
    "tiles-bias-key-columns-64", "tiles-bias-key-columns-segments-128",
)  # fmt: skip

# Of caches in pages: (lengths, page size, queries, head size, dtype). Tables hold numbers outside
# of the pool, and garbage behind the lengths.
PAGED = {
    "paged-16": ((0, 37, 2100), 16, 1, 64, "bfloat16"),
    "paged-64-five-queries": ((100, 1, 1500), 64, 5, 128, "float16"),
    "paged-32-many-queries": ((130, 90), 32, 70, 256, "bfloat16"),
    "paged-portable": ((100, 0, 50), 128, 3, 20, "float32"),
}

# Those of the portable kernels on every GPU: float32, or head sizes that TMA does not take.
PORTABLE_NAMES = ("float32-highest", "T-65-float32", "head-7-value-3")


def run_paged(lengths, page_size, queries, head_dim, dtype):
    random = np.random.default_rng(0)
    number = -(-max(lengths) // page_size) + 1
    pool, batch = 7, len(lengths)
    query = random.standard_normal((batch, queries, 4, head_dim), np.float32)
    pages = random.standard_normal((pool, page_size, 2, head_dim), np.float32)
    table = random.integers(-3, pool + 3, (batch, number)).astype(np.int32)
    for row, length in zip(table, lengths, strict=True):
        row[-(-length // page_size) :] = random.integers(-(2**31), 2**31 - 1)
    attend = functools.partial(
        jaxflash.paged_attention, is_causal=True, sink=np.ones(4, np.float32), implementation="cuda"
    )
    query, pages = (x.astype(dtype) for x in (query, pages))
    return jax.device_get(jax.jit(attend)(query, pages, pages, table, np.array(lengths, np.int32)))


def forward(case, arrays):
    return case.function(jaxflash)(**case.arguments(arrays), implementation="cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--gradients-up-to", type=int, default=256, metavar="HEAD_SIZE",
                        help="of larger heads the forward pass alone")  # fmt: skip
    parser.add_argument("--forward-only", action="append", default=[], metavar="NAME",
                        help="of this case the forward pass alone")  # fmt: skip
    arguments = parser.parse_args()
    cases = [case for case in CASES if case.name in arguments.names]
    known = {case.name for case in cases} | PAGED.keys()
    assert known.issuperset(arguments.names), set(arguments.names) - known
    for name in PAGED.keys() & set(arguments.names):
        assert not np.isnan(run_paged(*PAGED[name]).astype(np.float32)).any(), name
        print("ran", name, flush=True)
    for case in cases:
        too_large = max(case.head_dim, case.value_size) > arguments.gradients_up_to
        if too_large or case.name in arguments.forward_only:
            out = jax.device_get(jax.jit(functools.partial(forward, case))(case.arrays()))
        else:
            out = jax.device_get(jitted(case, "cuda")(case.arrays(), *case.cotangents()))["out"]
        assert not np.isnan(out.astype(np.float32)).any(), case
        print("ran", case.name, flush=True)


if __name__ == "__main__":
    main()
