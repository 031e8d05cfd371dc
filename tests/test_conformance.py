"""Every named row on every implementation."""

import pytest

from cases import CASES
from check import check_attention, check_tangents, on_gpu


def _name(case):
    return case.name


def test_names_are_unique():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("case", [case for case in CASES if not case.gpu_only], ids=_name)
def test_xla(case):
    check_attention(case, "xla")


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if 0 in case.shapes["logits"] and not case.missing_in_kernels],
    ids=_name,
)
def test_default_of_nothing(case):
    """implementation=None: what the kernels are told is made on every platform."""
    check_attention(case, None)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=_name)
def test_cuda(case):
    check_attention(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if not (case.missing_in_kernels or case.visible_nan)],
    ids=_name,
)
def test_tangents(case):
    check_tangents(case, "cuda")


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in CASES
        if case.name in ("bfloat16", "float16", "lengths-window-gqa", "segments")
    ],
    ids=_name,
)
def test_tangents_xla(case):
    """A few; test_derivatives.py has the blockwise path's tangents of every option."""
    check_tangents(case, "xla")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        case
        for case in CASES
        if case.name
        in ("bfloat16", "lengths-window-gqa", "bias-bfloat16", "everything", "head-320")
    ],
    ids=_name,
)
def test_default_on_gpu(case):
    """implementation=None: the kernels, or the blockwise path on the same GPU."""
    assert on_gpu()
    check_attention(case, None)
