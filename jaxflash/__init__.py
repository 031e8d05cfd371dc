"""FlashAttention for JAX: CUDA kernels on NVIDIA GPUs, the same meaning everywhere else."""

from jax.export import DisabledSafetyCheck as _DisabledSafetyCheck

from jaxflash import _ffi
from jaxflash import reference as reference
from jaxflash._api import dot_product_attention as dot_product_attention
from jaxflash._api import supported as supported
from jaxflash._config import show_config as show_config
from jaxflash._derivatives import CHECKPOINT_NAME as CHECKPOINT_NAME
from jaxflash._flax import attention_fn as attention_fn
from jaxflash._merge import merge_attention as merge_attention
from jaxflash._varlen import varlen_attention as varlen_attention

__version__ = "0.1.0"

# What `jax.export.export(..., disabled_checks=jaxflash.EXPORT_CHECKS)` must be told.
EXPORT_CHECKS = (
    _DisabledSafetyCheck.custom_call(_ffi.FORWARD_TARGET),
    _DisabledSafetyCheck.custom_call(_ffi.BACKWARD_TARGET),
)
