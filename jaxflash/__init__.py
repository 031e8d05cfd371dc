"""FlashAttention for JAX: CUDA kernels on NVIDIA GPUs, the same meaning everywhere else."""

import importlib as _importlib
from importlib.util import find_spec as _find_spec
from types import ModuleType as _ModuleType

if _find_spec("jaxflash._extension") is None:
    raise ImportError(
        f"jaxflash: {__path__[0]} holds sources, but no extension built for this Python; install "
        "the package (pip install . in a checkout) and start Python in another folder, or with -P, "
        "so that the installed one is imported"
    )

from jax.export import DisabledSafetyCheck as _DisabledSafetyCheck

from jaxflash import _ffi, masks, reference
from jaxflash._api import dot_product_attention, supported
from jaxflash._config import show_config
from jaxflash._derivatives import CHECKPOINT_NAME
from jaxflash._flax import attention_fn
from jaxflash._merge import merge_attention
from jaxflash._paged import paged_attention
from jaxflash._support import SlowPathWarning
from jaxflash._varlen import varlen_attention

__all__ = [
    "CHECKPOINT_NAME",
    "EXPORT_CHECKS",
    "SlowPathWarning",
    "attention_fn",
    "dot_product_attention",
    "masks",
    "merge_attention",
    "paged_attention",
    "reference",
    "show_config",
    "supported",
    "varlen_attention",
]

__version__ = "0.1.0"

# What `jax.export.export(..., disabled_checks=jaxflash.EXPORT_CHECKS)` must be told.
EXPORT_CHECKS: tuple[_DisabledSafetyCheck, ...] = tuple(
    map(_DisabledSafetyCheck.custom_call, _ffi.TARGETS.values())
)


def __getattr__(name: str) -> _ModuleType:
    """`jaxflash.equinox` is imported when it is asked for: Equinox need not be installed."""
    if name == "equinox":
        return _importlib.import_module("jaxflash.equinox")
    raise AttributeError(f"module 'jaxflash' has no attribute {name!r}")
