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
from jaxflash import _kernel_program, _nvrtc
from jaxflash._kernel_program import KernelProgram
from jaxflash._spec import AttentionSpec, Operands

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


def forward(spec: AttentionSpec, program: KernelProgram | None, operands: Operands):
    """(out, lse) of the kernels."""
    kernel = _Forward(spec, _Lengths.of(operands), program)
    return _mapped(kernel)(
        operands.query,
        operands.key,
        operands.value,
        *_given(operands.query_seq_lengths, operands.key_value_seq_lengths),
        *_program_operands(spec, program, operands),
    )


def backward(
    spec: AttentionSpec, program: KernelProgram | None, operands: Operands, out, lse, dout, dlse
):
    """(dq, dk, dv) of the kernels; dlse may be None."""
    kernel = _Backward(spec, _Lengths.of(operands), program, dlse is not None)
    return _mapped(kernel)(
        operands.query,
        operands.key,
        operands.value,
        out,
        dout,
        lse,
        *_given(operands.query_seq_lengths, operands.key_value_seq_lengths, dlse),
        *_program_operands(spec, program, operands),
    )


def _given(*optional) -> list[Any]:
    return [x for x in optional if x is not None]


def _program_operands(
    spec: AttentionSpec, program: KernelProgram | None, operands: Operands
) -> tuple[Any, ...]:
    """What the kernels get after all else: the numbers by which the program knows batch elements
    and heads, which a shard or a mapped call cannot count itself, and the captures.
    """
    if program is None:
        return ()
    *batch, _, heads, _ = operands.query.shape
    number = jnp.zeros((1,) * len(batch), jnp.int32)
    for axis, extent in enumerate(batch):
        iota = jax.lax.broadcasted_iota(jnp.int32, batch, axis)
        number = number * extent + iota
    numbers = (number, jnp.arange(heads, dtype=jnp.int32))
    axes = jax.typeof(operands.query).manual_axis_type.varying
    if axes:
        numbers = tuple(jax.lax.pcast(x, tuple(axes), to="varying") for x in numbers)
    return *numbers, *_kernel_program.captures(spec, operands)


class _Lengths(tuple):
    """Which of (query lengths, key/value lengths) are given."""

    def __new__(cls, query: bool, key_value: bool):
        return super().__new__(cls, (query, key_value))

    @classmethod
    def of(cls, operands: Operands):
        return cls(
            operands.query_seq_lengths is not None, operands.key_value_seq_lengths is not None
        )


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


def _program_attributes(program: KernelProgram | None, query, value) -> dict:
    return dict(
        program="" if program is None else program.source,
        unit_slope=np.bool_(program is None or program.unit_slope),
        head_dim=np.int64(query.shape[-1]),
        value_dim=np.int64(value.shape[-1]),
        dtype=query.dtype.name,
        capture_ranks=np.array(() if program is None else program.capture_ranks, np.int64),
    )


class _Pass:
    """One kernel pass: its custom call, and the axes of its arrays by name.

    `operand_axes` and `result_axes` name the trailing axes of each array: t, s lengths, n query
    heads, k key/value heads, h, v head sizes, c3x1 axis 1 of capture 3. Leading (batch) axes come
    before them, but for the operand `unbatched`, which has none.
    """

    operand_axes: tuple[Sequence[str], ...]
    result_axes: tuple[str, ...]
    # Which operands the kernel reads densely: never of size 1 in a batch axis of full extent.
    dense: tuple[bool, ...]

    def __init__(
        self,
        spec: AttentionSpec,
        lengths: _Lengths,
        program: KernelProgram | None,
        operand_axes: tuple[str, ...],
        dense: tuple[bool, ...],
    ):
        self.spec = spec
        self.lengths = lengths
        self.program = program
        self.operand_axes, self.dense = operand_axes, dense
        self.unbatched: int | None = None
        if program is not None:
            self.unbatched = len(operand_axes) + 1
            captures = (
                tuple(f"c{i}x{axis}" for axis in range(rank))
                for i, rank in enumerate(program.capture_ranks)
            )
            self.operand_axes = (*operand_axes, "", "n", *captures)
            self.dense = (*dense, *(False,) * (2 + len(program.capture_ranks)))

    def call(self, *operands):
        """The custom call itself."""
        raise NotImplementedError

    def __hash__(self):
        return hash((type(self), self._static()))

    def __eq__(self, other):
        return type(self) is type(other) and self._static() == other._static()

    def _static(self) -> tuple:
        return self.spec, self.lengths, self.program

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
            candidates = [
                (x.shape[axis], _mesh_axes(x)[axis])
                for i, x in enumerate(operands)
                if i != self.unbatched
            ]
            axes.append(next((c for c in candidates if c[0] != 1), candidates[0]))
        return axes


class _Forward(_Pass):
    def __init__(self, spec, lengths, program):
        num_lengths = sum(lengths)
        axes = ("tnh", "skh", "skv", *("",) * num_lengths)
        super().__init__(spec, lengths, program, axes, (False,) * 3 + (True,) * num_lengths)
        self.result_axes = ("tnv", "tn")

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
            **_program_attributes(self.program, query, value),
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
    def __init__(self, spec, lengths, program, has_dlse: bool):
        axes = ("tnh", "skh", "skv", "tnv", "tnv", "tn", *("",) * sum(lengths))
        if has_dlse:
            axes = (*axes, "tn")
        dense = (False,) * 5 + (True,) * (len(axes) - 5)
        super().__init__(spec, lengths, program, axes, dense)
        self.has_dlse = has_dlse
        self.result_axes = ("tnh", "skh", "skv")

    def _static(self) -> tuple:
        return *super()._static(), self.has_dlse

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
            **_program_attributes(self.program, query, value),
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
            if is_mapped or i == kernel.unbatched
            else jnp.broadcast_to(x, (axis_size, *x.shape))
            if dense or too_many
            else jnp.expand_dims(x, 0)
            for i, (x, is_mapped, dense) in enumerate(
                zip(operands, mapped, kernel.dense, strict=True)
            )
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
        ()
        if i == kernel.unbatched
        else tuple(n != full_n for n, full_n in zip(x.shape, full, strict=False))
        for i, x in enumerate(operands)
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
        result_shardings = tuple(split(axes, (False,) * batch_rank) for axes in kernel.result_axes)
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

    def split(axes: Sequence[str], broadcast: Sequence[bool]):
        # An operand without batch axes broadcasts in none.
        lead = (None if is_one else part for part, is_one in zip(batch, broadcast, strict=False))
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

    def factors(array: int | None, axes: Sequence[str]) -> str:
        broadcast = (False,) * len(broadcasts[0]) if array is None else broadcasts[array]
        batch = (f"one{array}x{i}" if is_one else f"b{i}" for i, is_one in enumerate(broadcast))
        return " ".join([*batch, *(query_heads if axis == "n" else axis for axis in axes)])

    operands = ", ".join(factors(i, axes) for i, axes in enumerate(kernel.operand_axes))
    results = ", ".join(factors(None, axes) for axes in kernel.result_axes)
    rule = f"{operands} -> {results}"
    names = dict.fromkeys(re.findall(r"\w+", rule))  # in order of appearance, as Shardy wants
    whole = tuple(name for name in names if name in "tshvg" or name.startswith(("one", "c")))
    return rule, whole, sizes
