"""Prints a score program as the CUDA struct that the kernels are compiled with.

The value of the program and its derivative become one graph of scalar expressions (`builder`,
`graph`), log2(e) of the result among their coefficients; the graph becomes instructions, each in
the earliest place that knows what it depends on (`lowering`), and these become text (`writer`), for
each part of the struct (`sections`). Here is what can be printed, in `request` what is asked for;
`cuda` prints, imported with the first call that has a program.
"""

from __future__ import annotations

# cuda/problem.h: kMaxLength, kMaxCaptures, kMaxCaptureRank, kMaxKeySums.
MAX_LENGTH, MAX_CAPTURES, MAX_CAPTURE_RANK, MAX_KEY_SUMS = 1 << 30, 8, 6, 2
# Nodes of the graph one within the other, which take up to three calls each of Python's thousand.
MAX_DEPTH = 200
# As Python names what a capture or a sink holds, and as the kernels store it.
CAPTURE_DTYPES = {
    "float32": "float",
    "bfloat16": "BFloat16",
    "float16": "Float16",
    "int32": "int32_t",
    "uint32": "uint32_t",
    "bool": "bool",
}


class NotPrintable(Exception):
    """Why a program cannot run in a kernel."""
