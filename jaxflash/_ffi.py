"""The CUDA kernels as XLA custom calls: their names and registration, and what they have in common.
`_passes` and `_batch_calls` have the calls.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxflash import _extension as extension
from jaxflash import _nvrtc, _split
from jaxflash._sizes import is_one
from jaxflash._spec import AttentionSpec

# The names are part of exported programs: a changed contract gets a new number.
FORWARD_TARGET = "jaxflash_forward_v8"
BACKWARD_TARGET = "jaxflash_backward_v8"
TANGENT_TARGET = "jaxflash_tangent_v4"
PAGED_TARGET = "jaxflash_paged_v5"
DENSE_MASK_TARGET = "jaxflash_dense_mask_v3"
PREDICATE_TARGET = "jaxflash_predicate_v2"
SEGMENT_MATCHES_TARGET = "jaxflash_segment_matches_v1"
RANGE_SUMMARY_TARGET = "jaxflash_range_summary_v2"
SEGMENT_RANGES_TARGET = "jaxflash_segment_ranges_v2"
# By the names of their handlers.
TARGETS = {
    "forward": FORWARD_TARGET,
    "backward": BACKWARD_TARGET,
    "tangent": TANGENT_TARGET,
    "paged": PAGED_TARGET,
    "dense_mask": DENSE_MASK_TARGET,
    "predicate": PREDICATE_TARGET,
    "segment_matches": SEGMENT_MATCHES_TARGET,
    "range_summary": RANGE_SUMMARY_TARGET,
    "segment_ranges": SEGMENT_RANGES_TARGET,
}
_STATE_TYPES = {"program": "jaxflash_program_v2", "predicate": "jaxflash_predicate_v1"}

# cuda/problem.h: kUnlimited.
UNLIMITED = 1 << 30


def _register() -> None:
    handlers = {}
    if extension.kernels:
        _nvrtc.register()
        handlers = extension.cuda_handlers()
        for name, (type_id, type_info) in extension.state_types().items():
            state: Any = {"type_id": type_id, "type_info": type_info}
            jax.ffi.register_ffi_type(_STATE_TYPES[name], state, platform="CUDA")
    for name, target in TARGETS.items():
        # On other platforms the target exists to say that it needs CUDA.
        jax.ffi.register_ffi_target(target, extension.wrong_platform_handler(), platform="cpu")
        if handlers:
            jax.ffi.register_ffi_target(target, handlers[name], platform="CUDA")


_register()


def band_attributes(spec: AttentionSpec) -> dict:
    return dict(
        left=np.int64(UNLIMITED if spec.left is None else min(spec.left, UNLIMITED)),
        right=np.int64(UNLIMITED if spec.right is None else min(spec.right, UNLIMITED)),
        bottom_right=np.bool_(spec.bottom_right),
    )


def of_all_or_each(x, lead):
    """The array broadcast to the leading axes `lead`; as it is where its own are all of size 1."""
    if all(is_one(n) for n in x.shape[: len(lead)]):
        return x
    return jnp.broadcast_to(x, (*lead, *x.shape[len(lead) :]))


def mesh_axes_of(x) -> tuple:
    """The mesh axes that split each axis of `x`, as its type tells (explicit sharding)."""
    return _split.padded(jax.typeof(x).sharding.spec, x.ndim)


def result_type(like, shape, dtype, mesh_axes):
    """A result type on the mesh of `like`, varying over the same manual axes (shard_map)."""
    typ = jax.typeof(like)
    mesh = typ.sharding.mesh
    sharding = None if mesh.empty else NamedSharding(mesh, PartitionSpec(*mesh_axes))
    return jax.ShapeDtypeStruct(
        shape, dtype, sharding=sharding, manual_axis_type=typ.manual_axis_type
    )
