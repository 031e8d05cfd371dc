"""Skips that are no errors where a GPU is required: of tests that need a larger machine."""

import pytest

_REASON = "needs a larger machine: "


def skip(why: str):
    pytest.skip(_REASON + why)


def was_skipped(report) -> bool:
    return report.skipped and _REASON in str(report.longrepr)
