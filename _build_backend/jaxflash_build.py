"""scikit-build-core, with nvcc as a further build requirement where the machine has none."""

from __future__ import annotations

import os
import platform

from find_nvcc import WHEELS, find_nvcc
from scikit_build_core import build as _backend
from scikit_build_core.build import *  # noqa: F403  every hook, unless replaced below


def _option(name: str, config_settings: dict | None, default: str = "") -> str:
    """As cmake/options.cmake reads it."""
    given = (config_settings or {}).get(f"cmake.define.{name}")
    return str(given if given is not None else os.environ.get(name, default))


def _nvcc_requirements(config_settings: dict | None) -> list[str]:
    if (
        _option("JAXFLASH_CUDA", config_settings, "AUTO").upper() == "OFF"
        or _option("JAXFLASH_PREBUILT_KERNELS", config_settings)
        or platform.system() != "Linux"
        or platform.machine() not in ("x86_64", "aarch64")
        or find_nvcc(wheels=False)
    ):
        return []
    return WHEELS


def get_requires_for_build_wheel(config_settings=None):
    return _backend.get_requires_for_build_wheel(config_settings) + _nvcc_requirements(
        config_settings
    )


def get_requires_for_build_editable(config_settings=None):
    return _backend.get_requires_for_build_editable(config_settings) + _nvcc_requirements(
        config_settings
    )
