"""The CUDA kernels as XLA custom calls: the only file that touches `jax.ffi` and the extension.

`forward` and `backward` are what the differentiation rule calls. Each is
``custom_vmap(custom_partitioning(ffi_call))``: under `vmap` an operand that is not mapped gets a
leading axis of size 1, which the kernels read with stride 0, so nothing is copied; under sharding
the batch axes and the key/value heads split, and the body stays a bare `ffi_call`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from jaxflash import _extension as extension
from jaxflash import _nvrtc
from jaxflash._spec import AttentionSpec

# The names are part of exported programs: a changed contract gets a new number.
FORWARD_TARGET = "jaxflash_forward_v2"
BACKWARD_TARGET = "jaxflash_backward_v2"
_STATE_TYPE = "jaxflash_program_v2"

# cuda/attention.h: kUnlimited, kMaxBatchAxes.
_UNLIMITED = 1 << 30
_MAX_BATCH_AXES = 8


def _register() -> None:
    handlers = {}
    if extension.kernels:
        _nvrtc.register()
        handlers = extension.cuda_handlers()
        type_id, type_info = extension.program_state_type()
        state = {"type_id": type_id, "type_info": type_info}
        jax.ffi.register_ffi_type(_STATE_TYPE, state, platform="CUDA")
    for target, pass_name in ((FORWARD_TARGET, "forward"), (BACKWARD_TARGET, "backward")):
        # On other platforms the target exists to say that it needs CUDA.
        jax.ffi.register_ffi_target(target, extension.wrong_platform_handler(), platform="cpu")
        if handlers:
            jax.ffi.register_ffi_target(target, handlers[pass_name], platform="CUDA")


_register()


def forward(spec: AttentionSpec, query, key, value, query_seq_lengths, key_value_seq_lengths):
    """(out, lse) of the kernels; lengths may be None."""
    lengths = _Lengths(query_seq_lengths is not None, key_value_seq_lengths is not None)
    given = [x for x in (query_seq_lengths, key_value_seq_lengths) if x is not None]
    return _mapped(_Forward(spec, lengths))(query, key, value, *given)


def backward(
    spec: AttentionSpec,
    query,
    key,
    value,
    query_seq_lengths,
    key_value_seq_lengths,
    out,
    lse,
    dout,
    dlse,
):
    """(dq, dk, dv) of the kernels; lengths and dlse may be None."""
    lengths = _Lengths(query_seq_lengths is not None, key_value_seq_lengths is not None)
    given = [x for x in (query_seq_lengths, key_value_seq_lengths, dlse) if x is not None]
    return _mapped(_Backward(spec, lengths, dlse is not None))(
        query, key, value, out, dout, lse, *given
    )


class _Lengths(tuple):
    """Which of (query lengths, key/value lengths) are given."""

    def __new__(cls, query: bool, key_value: bool):
        return super().__new__(cls, (query, key_value))


def _attributes(spec: AttentionSpec, lengths: _Lengths) -> dict:
    return dict(
        scale=np.float32(spec.scale),
        left=np.int64(_UNLIMITED if spec.left is None else min(spec.left, _UNLIMITED)),
        right=np.int64(_UNLIMITED if spec.right is None else min(spec.right, _UNLIMITED)),
        bottom_right=np.bool_(spec.bottom_right),
        highest_precision=np.bool_(spec.highest_precision),
        has_q_lengths=np.bool_(lengths[0]),
        has_kv_lengths=np.bool_(lengths[1]),
    )


def _plain_call(query, value) -> dict:
    """The attributes of a call without a score program."""
    return dict(
        program="",
        unit_slope=np.bool_(True),
        head_dim=np.int64(query.shape[-1]),
        value_dim=np.int64(value.shape[-1]),
        dtype=query.dtype.name,
        capture_ranks=np.zeros(0, np.int64),
    )


class _Pass:
    """One kernel pass: its custom call, and the axes of its arrays by name.

    `operand_axes` and `result_axes` name the trailing axes of each array: t, s lengths, n query
    heads, k key/value heads, h, v head sizes. Leading (batch) axes come before them.
    """

    operand_axes: tuple[str, ...]
    result_axes: tuple[str, ...]
    # Which operands the kernel reads densely: never of size 1 in a batch axis of full extent.
    dense: tuple[bool, ...]

    def __init__(self, spec: AttentionSpec, lengths: _Lengths):
        self.spec = spec
        self.lengths = lengths
        self.length_axes = ("",) * sum(lengths)

    def call(self, *operands):
        """The custom call itself."""
        raise NotImplementedError

    def __hash__(self):
        return hash((type(self), self._static()))

    def __eq__(self, other):
        return type(self) is type(other) and self._static() == other._static()

    def _static(self) -> tuple:
        return self.spec, self.lengths

    def full_batch(self, operands) -> tuple:
        """Batch extents: those of the operands that do not broadcast."""
        return tuple(size for size, _ in self._batch_axes(operands))

    def result(self, operands, like, trailing, dtype):
        """The type of a result (*batch, *trailing), sharded and varying as `like` does."""
        axes = self._batch_axes(operands)
        batch_rank = len(axes)
        mesh_axes = [part for _, part in axes] + list(_mesh_axes(like)[batch_rank:])
        shape = (*(size for size, _ in axes), *trailing)
        return _result_type(like, shape, dtype, mesh_axes[: len(shape)])

    def _batch_axes(self, operands) -> list[tuple]:
        """(extent, mesh axes) of each batch axis, taken from an operand that does not broadcast."""
        batch_rank = operands[0].ndim - len(self.operand_axes[0])
        axes = []
        for axis in range(batch_rank):
            candidates = [(x.shape[axis], _mesh_axes(x)[axis]) for x in operands]
            axes.append(next((c for c in candidates if c[0] != 1), candidates[0]))
        return axes


class _Forward(_Pass):
    def __init__(self, spec, lengths):
        super().__init__(spec, lengths)
        self.operand_axes = ("tnh", "skh", "skv", *self.length_axes)
        self.result_axes = ("tnv", "tn")
        self.dense = (False,) * 3 + (True,) * len(self.length_axes)

    def call(self, *operands):
        query, _, value = operands[:3]
        rows = query.shape[-3:-1]
        results = (
            self.result(operands, query, (*rows, value.shape[-1]), query.dtype),
            self.result(operands, query, rows, jnp.float32),
            _result_type(query, (self._workspace_bytes(operands),), jnp.uint8, [None]),
        )
        out, lse, _ = jax.ffi.ffi_call(FORWARD_TARGET, results)(
            *operands,
            problem=_attributes(self.spec, self.lengths),
            **_plain_call(query, value),
        )
        return out, lse

    def _workspace_bytes(self, operands) -> int:
        query, _, value = operands[:3]
        q_len, q_heads, head_dim = query.shape[-3:]
        kv_len, kv_heads, value_dim = value.shape[-3:]
        batch = math.prod(self.full_batch(operands))
        sides = _attributes(self.spec, self.lengths)

        # Where a size is symbolic, what is enough for every value: one sequence needs as much as
        # any number, all rows of a tile are in use from 64 or, without groups, 128 queries on.
        q_lens = (q_len,) if isinstance(q_len, int) else (64, 128)
        return max(
            extension.forward_workspace_bytes(
                dtype=query.dtype.name,
                batch=batch if isinstance(batch, int) else 1,
                q_len=rows,
                kv_len=kv_len if isinstance(kv_len, int) else _UNLIMITED,
                q_heads=q_heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                value_dim=value_dim,
                left=int(sides["left"]),
                right=int(sides["right"]),
            )
            for rows in q_lens
        )


class _Backward(_Pass):
    def __init__(self, spec, lengths, has_dlse: bool):
        super().__init__(spec, lengths)
        self.has_dlse = has_dlse
        dlse_axes = ("tn",) if has_dlse else ()
        self.operand_axes = (
            *("tnh", "skh", "skv", "tnv", "tnv", "tn"),
            *self.length_axes,
            *dlse_axes,
        )
        self.result_axes = ("tnh", "skh", "skv")
        self.dense = (False,) * 5 + (True,) * (1 + len(self.length_axes) + len(dlse_axes))

    def _static(self) -> tuple:
        return self.spec, self.lengths, self.has_dlse

    def call(self, *operands):
        query, key, value = operands[:3]
        q_len, q_heads, head_dim = query.shape[-3:]
        kv_len, kv_heads, value_dim = value.shape[-3:]
        # Linear in the batch, so that a symbolic batch size exports.
        workspace = math.prod(self.full_batch(operands)) * extension.backward_workspace_bytes(
            batch=1,
            q_len=q_len,
            kv_len=kv_len,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
        )
        results = (
            *(self.result(operands, x, x.shape[-3:], x.dtype) for x in (query, key, value)),
            _result_type(query, (workspace,), jnp.uint8, [None]),
        )
        dq, dk, dv, _ = jax.ffi.ffi_call(BACKWARD_TARGET, results)(
            *operands,
            problem=_attributes(self.spec, self.lengths),
            **_plain_call(query, value),
            has_dlse=np.bool_(self.has_dlse),
            deterministic=np.bool_(self.spec.deterministic_backward),
        )
        return dq, dk, dv


def _mesh_axes(x) -> tuple:
    """The mesh axes that split each axis of `x`, as its type tells (explicit sharding)."""
    spec = tuple(jax.typeof(x).sharding.spec)
    return spec + (None,) * (x.ndim - len(spec))


def _result_type(like, shape, dtype, mesh_axes):
    """A result type on the mesh of `like`, varying over the same manual axes (shard_map)."""
    typ = jax.typeof(like)
    mesh = typ.sharding.mesh
    sharding = None if mesh.empty else NamedSharding(mesh, PartitionSpec(*mesh_axes))
    return jax.ShapeDtypeStruct(
        shape, dtype, sharding=sharding, manual_axis_type=typ.manual_axis_type
    )


# ---- vmap ----------------------------------------------------------------------------------------


@functools.cache
def _mapped(kernel: _Pass) -> Callable:
    @jax.custom_batching.custom_vmap
    def op(*operands):
        return _partitioned(kernel, _batch_pattern(kernel, operands), _groups(operands))(*operands)

    @op.def_vmap
    def rule(axis_size: int, mapped: Sequence[bool], *operands):
        too_many = operands[0].ndim - 3 >= _MAX_BATCH_AXES
        operands = [
            x
            if is_mapped
            else jnp.broadcast_to(x, (axis_size, *x.shape))
            if dense or too_many
            else jnp.expand_dims(x, 0)
            for x, is_mapped, dense in zip(operands, mapped, kernel.dense, strict=True)
        ]
        return op(*operands), (True,) * len(kernel.result_axes)

    return op


# ---- Sharding ------------------------------------------------------------------------------------


def _groups(operands) -> tuple[int, int]:
    """(key/value heads, query heads of each)."""
    q_heads, kv_heads = operands[0].shape[-2], operands[1].shape[-2]
    return kv_heads, q_heads // kv_heads


def _batch_pattern(kernel: _Pass, operands) -> tuple[tuple[bool, ...], ...]:
    """For each operand and batch axis: whether the operand broadcasts there."""
    full = kernel.full_batch(operands)
    return tuple(
        tuple(n != full_n for n, full_n in zip(x.shape, full, strict=False)) for x in operands
    )


@functools.cache
def _partitioned(kernel: _Pass, broadcasts, groups: tuple[int, int]) -> Callable:
    """The custom call under a sharding rule: batch axes and key/value heads may be split."""
    kv_heads, group = groups
    batch_rank = len(broadcasts[0])

    def partition(mesh, operand_types, result_types):
        split = _split_axes(mesh, result_types[0].sharding, batch_rank, kv_heads)
        operand_shardings = tuple(
            split(axes, operand_broadcasts)
            for axes, operand_broadcasts in zip(kernel.operand_axes, broadcasts, strict=True)
        )
        result_shardings = tuple(split(axes) for axes in kernel.result_axes)
        return mesh, kernel.call, result_shardings, operand_shardings

    op = custom_partitioning(kernel.call)
    rule, replicated, sizes = _sharding_rule(kernel, broadcasts, kv_heads, group)
    op.def_partition(
        partition=partition,
        sharding_rule=rule,
        need_replication_factors=replicated,
        **sizes,
    )
    return op


def _split_axes(mesh, sharding, batch_rank: int, kv_heads: int):
    """Shardings of every array that agree with the first result's (dq or out, (*B, T, N, ·))."""
    spec = tuple(sharding.spec) + (None,) * (batch_rank + 3 - len(sharding.spec))
    batch = spec[:batch_rank]
    heads = spec[batch_rank + 1]
    names = (heads,) if isinstance(heads, str) else tuple(heads or ())
    if kv_heads % math.prod(mesh.shape[name] for name in names):
        heads = None

    def split(axes: str, broadcast: Sequence[bool] = ()):
        broadcast = broadcast or (False,) * batch_rank
        lead = (None if is_one else part for part, is_one in zip(batch, broadcast, strict=True))
        trail = (heads if axis in "nk" else None for axis in axes)
        return NamedSharding(mesh, PartitionSpec(*lead, *trail))

    return split


def _sharding_rule(
    kernel: _Pass, broadcasts, kv_heads: int, group: int
) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    """Shardy's einsum-like rule, its factors that must stay whole, and sizes it cannot infer.

    Query heads are (k g), of which k splits as the key heads do. Factors of size 1 cannot be part
    of a compound one.
    """
    query_heads = "k" if group == 1 else "g" if kv_heads == 1 else "(k g)"
    sizes = {"g": group} if query_heads == "(k g)" else {}

    def factors(array: int | None, axes: str) -> str:
        batch = (
            f"b{axis}" if array is None or not broadcasts[array][axis] else f"one{array}x{axis}"
            for axis in range(len(broadcasts[0]))
        )
        return " ".join([*batch, *(query_heads if axis == "n" else axis for axis in axes)])

    operands = ", ".join(factors(i, axes) for i, axes in enumerate(kernel.operand_axes))
    results = ", ".join(factors(None, axes) for axes in kernel.result_axes)
    rule = f"{operands} -> {results}"
    names = dict.fromkeys(re.findall(r"\w+", rule))  # in order of appearance, as Shardy wants
    whole = tuple(name for name in names if name in "tshvg" or name.startswith("one"))
    return rule, whole, sizes
