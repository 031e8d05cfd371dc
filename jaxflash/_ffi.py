"""The CUDA kernels as XLA custom calls: the only file that touches `jax.ffi` and the extension.

`forward` and `backward` are what the differentiation rule calls. Each is
``custom_vmap(custom_partitioning(ffi_call))``: under `vmap` an operand that is not mapped gets a
leading axis of size 1, which the kernels read with stride 0, so nothing is copied; under sharding
the batch axes and the key/value heads split, and the body stays a bare `ffi_call`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from jaxflash import _extension as extension
from jaxflash import _kernel_program, _nvrtc, _pages, _plan, _ranges, _split
from jaxflash._dense_mask import Pass
from jaxflash._kernel_program import KernelGradients, KernelProgram
from jaxflash._spec import AttentionSpec, Operands, PagedOperands

# The names are part of exported programs: a changed contract gets a new number.
FORWARD_TARGET = "jaxflash_forward_v2"
BACKWARD_TARGET = "jaxflash_backward_v2"
TANGENT_TARGET = "jaxflash_tangent_v1"
PAGED_TARGET = "jaxflash_paged_v1"
_STATE_TYPE = "jaxflash_program_v2"

# cuda/problem.h: kUnlimited, kMaxBatchAxes.
_UNLIMITED = 1 << 30
_MAX_BATCH_AXES = 8
# cuda/common/workspace.h: kWorkspaceRows.
_WORKSPACE_ROWS = 128

# Axes of the arrays of ranges, in their order: t and s are the lengths.
_RANGES = (
    ("t", "cpair"),
    ("s", "cpair"),
    ("crowblock", "cfour"),
    ("ckeyblock", "cfour"),
    ("cpair",),
)


def _register() -> None:
    handlers = {}
    if extension.kernels:
        _nvrtc.register()
        handlers = extension.cuda_handlers()
        type_id, type_info = extension.program_state_type()
        state: Any = {"type_id": type_id, "type_info": type_info}
        jax.ffi.register_ffi_type(_STATE_TYPE, state, platform="CUDA")
    targets = {
        "forward": FORWARD_TARGET,
        "backward": BACKWARD_TARGET,
        "tangent": TANGENT_TARGET,
        "paged": PAGED_TARGET,
    }
    for pass_name, target in targets.items():
        # On other platforms the target exists to say that it needs CUDA.
        jax.ffi.register_ffi_target(target, extension.wrong_platform_handler(), platform="cpu")
        if handlers:
            jax.ffi.register_ffi_target(target, handlers[pass_name], platform="CUDA")


_register()


# ---- The platform, known when a program is lowered -----------------------------------------------


def checked(arrays, only_cuda: bool):
    """The pytree `arrays`, in a program that will hold the kernels: its lowering raises
    NotImplementedError for another platform than CUDA, unless it has something else to run there.
    """
    return _bind_first(_platform_primitives()[0], arrays, only_cuda=only_cuda)


def announced(arrays, announce: Callable[[], None]):
    """The pytree `arrays`; a program that holds it calls `announce` (hashable) if it is lowered for
    CUDA."""
    return _bind_first(_platform_primitives()[1], arrays, announce=announce)


def _bind_first(primitive, arrays, **options):
    (first, *others), tree = jax.tree.flatten(arrays)
    return tree.unflatten([primitive.bind(first, **options), *others])


@functools.cache
def _platform_primitives():
    """(checked, announced): identities whose lowering knows the platform."""
    # Here, because its import takes longer than that of all the rest.
    from jax.extend.core import Primitive

    primitives = checked, announced = Primitive("jaxflash_checked"), Primitive("jaxflash_announced")
    for primitive in primitives:
        primitive.def_impl(lambda x, **_: x)  # under `jax.disable_jit`
        primitive.def_abstract_eval(lambda x, **_: x)
        batching.primitive_batchers[primitive] = functools.partial(_batch_identity, primitive)
    mlir.register_lowering(checked, _check_on_cuda, platform="cuda")
    mlir.register_lowering(checked, _check_elsewhere)
    # Not from a cache: a program is to warn however much of it was lowered before. A rule for each
    # platform JAX takes for several at once (jax.export) from its cache alone.
    mlir.register_lowering(announced, _announce, cacheable=False)
    return primitives


def _check_on_cuda(ctx, x, *, only_cuda):
    if not jax.config.jax_use_shardy_partitioner:  # pyright: ignore
        raise NotImplementedError(
            "the CUDA kernels need the Shardy partitioner, which tells them how arrays are split: "
            "leave jax_use_shardy_partitioner at True, or use implementation='xla'"
        )
    return [x]


def _check_elsewhere(ctx, x, *, only_cuda):
    if only_cuda:
        raise NotImplementedError(
            "implementation='cuda' needs an NVIDIA GPU and JAX's CUDA platform (pip install "
            "'jax[cuda13]'); this computation is compiled for another platform. Use "
            "implementation='xla' or None; jaxflash.show_config() prints what is there"
        )
    return [x]


def _announce(ctx, x, *, announce):
    if "cuda" in (ctx.platforms or ctx.module_context.platforms):
        announce()
    return [x]


def _batch_identity(primitive, args, axes, **options):
    return primitive.bind(*args, **options), axes[0]


# ---- The passes ----------------------------------------------------------------------------------


def forward(spec: AttentionSpec, program: KernelProgram | None, operands: Operands):
    """(out, lse) of the kernels."""
    operands = _without_unseen(operands, "forward", values_only=True)
    ranges = _ranges.of_call(spec, operands, "forward")
    kernel = _Forward(_banded(spec, operands), _Lengths.of(operands), program, _kind_of(ranges))
    return _mapped(kernel)(
        operands.query,
        operands.key,
        operands.value,
        *_given(operands.query_seq_lengths, operands.key_value_seq_lengths),
        *_program_operands(spec, program, operands, "forward"),
        *_given(*(ranges or ())),
    )


def paged_forward(spec: AttentionSpec, arrays: PagedOperands):
    """(out, lse) of the kernels; `jax.vmap` must have been dealt with."""
    operands = _pages.operands_of(arrays)
    # Its kernels are compiled at run time, all of them.
    program = _kernel_program.make(spec, operands, "forward", always=True)
    kernel = _PagedForward(spec, program)
    return _sharded(kernel)(
        arrays.query,
        arrays.key_pages,
        arrays.value_pages,
        arrays.page_table,
        arrays.lengths,
        *_program_operands(spec, program, operands, "forward"),
    )


def backward(
    spec: AttentionSpec,
    program: KernelProgram | None,
    gradients: KernelGradients | None,
    operands: Operands,
    out,
    lse,
    dout,
    dlse,
):
    """((dq, dk, dv), gradients of captures by their numbers) of the kernels; dlse may be None."""
    operands = _without_unseen(operands, "backward")
    # The deterministic order of blocks is not one of ranges: a mask's tiles are all visited.
    ranges = None if spec.deterministic_backward else _ranges.of_call(spec, operands, "backward")
    captures = () if gradients is None else gradients.captures
    batch_rank = operands.query.ndim - 3
    kernel = _Backward(
        _banded(spec, operands),
        _Lengths.of(operands),
        program,
        _kind_of(ranges),
        dlse is not None,
        gradients,
        tuple(tuple(n == 1 for n in operands.captures[i].shape[:batch_rank]) for i in captures),
    )
    dq, dk, dv, *more = _mapped(kernel)(
        operands.query,
        operands.key,
        operands.value,
        out,
        dout,
        lse,
        *_given(operands.query_seq_lengths, operands.key_value_seq_lengths, dlse),
        *_program_operands(spec, program, operands, "backward"),
        *_given(*(ranges or ())),
    )
    of_captures = {
        i: x.astype(operands.captures[i].dtype) for i, x in zip(captures, more, strict=True)
    }
    return (dq, dk, dv), of_captures


def tangent(
    spec: AttentionSpec,
    program: KernelProgram,
    operands: Operands,
    out,
    lse,
    tangents: Mapping[str, Any],
    of_captures: Sequence[Any],
):
    """Tangents of out and lse, given those of query, key and value, 0 where one is left out, and of
    the captures that move in the program."""
    names = ("query", "key", "value")
    moved = [
        tangents[name] if name in tangents else jnp.zeros_like(x)
        for name, x in zip(names, operands[:3], strict=True)
    ]
    operands = _without_unseen(operands, "forward")
    of_tangents = operands._replace(**dict(zip(names, moved, strict=True)))
    moved = _without_unseen(of_tangents, "forward")[:3]
    ranges = _ranges.of_call(spec, operands, "forward")
    kernel = _TangentPass(_banded(spec, operands), _Lengths.of(operands), program, _kind_of(ranges))
    return _mapped(kernel)(
        operands.query,
        operands.key,
        operands.value,
        *moved,
        out,
        lse,
        *_given(operands.query_seq_lengths, operands.key_value_seq_lengths),
        *_program_operands(spec, program, operands, "forward", of_captures),
        *_given(*(ranges or ())),
    )


def _without_unseen(operands: Operands, pass_: Pass, values_only: bool = False) -> Operands:
    """With zeros where a mask hides a whole row or key: a kernel multiplies what it hides by 0,
    which NaN and infinity survive; in the forward pass the values alone."""
    keys = _plan.seen_keys(operands, pass_)
    if keys is None:
        return operands

    def shown(x, visible):
        return jnp.where(visible, x, jnp.zeros_like(x))

    operands = operands._replace(value=shown(operands.value, keys))
    if values_only:
        return operands
    rows = _plan.seeing_rows(operands, pass_)
    return operands._replace(query=shown(operands.query, rows), key=shown(operands.key, keys))


def _banded(spec: AttentionSpec, operands: Operands) -> AttentionSpec:
    """The call without the band that is part of its ranges."""
    if operands.query_boundaries is None:
        return spec
    return dataclasses.replace(spec, left=None, right=None)


# cuda/problem.h: MaskKind, by the axes of the arrays of ranges: t and s lengths, the others of
# their own.
_MASK_KINDS: dict[tuple[tuple[str, ...], ...], int] = {
    (): 0,
    _RANGES: 1,
    (*_RANGES, ("t",), ("s",)): 2,
}


def _kind_of(ranges: _ranges.Ranges | None) -> tuple[tuple[str, ...], ...]:
    if ranges is None:
        return ()
    return _RANGES if ranges.query_ids is None else (*_RANGES, ("t",), ("s",))


def _given(*optional) -> list[Any]:
    return [x for x in optional if x is not None]


def _program_operands(
    spec: AttentionSpec,
    program: KernelProgram | None,
    operands: Operands,
    pass_: Pass,
    tangents: Sequence[Any] = (),
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
    return *numbers, *_kernel_program.captures(spec, operands, pass_, tangents)


class _Lengths(tuple):
    """Which of (query lengths, key/value lengths) are given."""

    def __new__(cls, query: bool, key_value: bool):
        return super().__new__(cls, (query, key_value))

    @classmethod
    def of(cls, operands: Operands):
        return cls(
            operands.query_seq_lengths is not None, operands.key_value_seq_lengths is not None
        )


def _attributes(spec: AttentionSpec, lengths: _Lengths, ranges: tuple) -> dict:
    return dict(
        scale=np.float32(spec.scale),
        left=np.int64(_UNLIMITED if spec.left is None else min(spec.left, _UNLIMITED)),
        right=np.int64(_UNLIMITED if spec.right is None else min(spec.right, _UNLIMITED)),
        bottom_right=np.bool_(spec.bottom_right),
        highest_precision=np.bool_(spec.highest_precision),
        has_q_lengths=np.bool_(lengths[0]),
        has_kv_lengths=np.bool_(lengths[1]),
        mask=np.int64(_MASK_KINDS[ranges]),
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


def _gradient_attributes(gradients: KernelGradients | None) -> dict:
    # cuda/ffi/call.h: GradientAttributes.
    numbers = [
        (load.capture, load.query_axis, load.key_axis, load.scatter, load.narrow)
        for load in (() if gradients is None else gradients.loads)
    ]
    return dict(
        gradient_program="" if gradients is None else gradients.source,
        gradient_loads=np.array(numbers, np.int64).reshape(-1),
    )


class _Pass:
    """One kernel pass: its custom call, and the axes of its arrays by name.

    `operand_axes` and `result_axes` name the trailing axes of each array: t, s lengths, n query
    heads, k key/value heads, h, v head sizes, c3x1 axis 1 of capture 3. Leading (batch) axes come
    before them, but for the operands `unbatched`, which have none.
    """

    operand_axes: tuple[Sequence[str], ...]
    result_axes: tuple[Sequence[str], ...]
    # For each result its last batch axes: whether it is summed over them, and of size 1 there.
    result_sums: tuple[tuple[bool, ...], ...]
    # The operands whose gradients the last results are.
    captures: tuple[int, ...] = ()
    # Which operands the kernel reads densely: never of size 1 in a batch axis of full extent.
    dense: tuple[bool, ...]

    def __init__(
        self,
        spec: AttentionSpec,
        lengths: _Lengths,
        program: KernelProgram | None,
        ranges: tuple[tuple[str, ...], ...],
        operand_axes: tuple[Sequence[str], ...],
        dense: tuple[bool, ...],
        unbatched: frozenset[int] = frozenset(),
    ):
        self.spec = spec
        self.lengths = lengths
        self.program = program
        self.ranges = ranges
        self.operand_axes, self.dense = operand_axes, dense
        self.unbatched = unbatched
        if program is not None:
            self.unbatched = unbatched | {len(operand_axes) + 1}
            captures = (
                tuple(f"c{i}x{axis}" for axis in range(rank))
                for i, rank in enumerate(program.capture_ranks)
            )
            self.operand_axes = (*operand_axes, "", "n", *captures, *ranges)
            self.dense = (
                *dense,
                *(False,) * (2 + len(program.capture_ranks)),
                *(True,) * len(ranges),
            )

    def call(self, *operands):
        """The custom call itself."""
        raise NotImplementedError

    def __hash__(self):
        return hash((type(self), self._static()))

    def __eq__(self, other):
        return type(self) is type(other) and self._static() == other._static()

    def _static(self) -> tuple:
        return self.spec, self.lengths, self.program, self.ranges

    def full_sums(self, batch_rank: int) -> tuple[tuple[bool, ...], ...]:
        """`result_sums` for all batch axes: those that `vmap` has added are not summed over."""
        return tuple((False,) * (batch_rank - len(sums)) + sums for sums in self.result_sums)

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
                if i not in self.unbatched
            ]
            axes.append(next((c for c in candidates if c[0] != 1), candidates[0]))
        return axes


class _Forward(_Pass):
    def __init__(self, spec, lengths, program, ranges):
        num_lengths = sum(lengths)
        axes = ("tnh", "skh", "skv", *("",) * num_lengths)
        dense = (False,) * 3 + (True,) * num_lengths
        super().__init__(spec, lengths, program, ranges, axes, dense)
        self.result_axes = ("tnv", "tn")
        self.result_sums = ((), ())

    def call(self, *operands):
        query, _, value = operands[:3]
        rows = query.shape[-3:-1]
        results = (
            self.result(operands, query, (*rows, value.shape[-1]), query.dtype),
            self.result(operands, query, rows, jnp.float32),
            _result_type(query, (self._workspace_bytes(operands, value),), jnp.uint8, [None]),
        )
        out, lse, _ = jax.ffi.ffi_call(FORWARD_TARGET, results)(
            *operands,
            problem=_attributes(self.spec, self.lengths, self.ranges),
            **_program_attributes(self.program, query, value),
        )
        return out, lse

    def _workspace_bytes(self, operands, value, paged: bool = False) -> int:
        """`value`: whose trailing axes are those of the values."""
        query = operands[0]
        q_len, q_heads, head_dim = query.shape[-3:]
        kv_len, kv_heads, value_dim = value.shape[-3:]
        batch = math.prod(self.full_batch(operands))
        sides = _attributes(self.spec, self.lengths, self.ranges)

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
                paged=paged,
            )
            for rows in q_lens
        )


class _TangentPass(_Pass):
    def __init__(self, spec, lengths, program, ranges):
        axes = ("tnh", "skh", "skv", "tnh", "skh", "skv", "tnv", "tn", *("",) * sum(lengths))
        dense = (False,) * 7 + (True,) * (len(axes) - 7)
        super().__init__(spec, lengths, program, ranges, axes, dense)
        self.result_axes = ("tnv", "tn")
        self.result_sums = ((), ())

    def call(self, *operands):
        query, _, value = operands[:3]
        rows = query.shape[-3:-1]
        results = (
            self.result(operands, query, (*rows, value.shape[-1]), query.dtype),
            self.result(operands, query, rows, jnp.float32),
        )
        return jax.ffi.ffi_call(TANGENT_TARGET, results)(
            *operands,
            problem=_attributes(self.spec, self.lengths, self.ranges),
            **_program_attributes(self.program, query, value),
        )


class _PagedForward(_Forward):
    def __init__(self, spec, program):
        pool = ("cpage", "cslot", "k")
        axes = ("tnh", (*pool, "h"), (*pool, "v"), ("ctable",), "")
        _Pass.__init__(
            self, spec, _Lengths(False, True), program, (), axes, (True,) * 5, frozenset((1, 2))
        )
        self.result_axes = ("tnv", "tn")
        self.result_sums = ((), ())

    def call(self, *operands):
        query, key_pages, value_pages = operands[:3]
        q_len, q_heads, _ = query.shape[-3:]
        # Of a symbolic length any tile will do.
        one_unit = isinstance(q_len, int) and extension.fits_one_unit(
            q_len=q_len, q_heads=q_heads, kv_heads=key_pages.shape[-2]
        )
        rows = query.shape[-3:-1]
        workspace = self._workspace_bytes(operands, value_pages, paged=True)
        results = (
            self.result(operands, query, (*rows, value_pages.shape[-1]), query.dtype),
            self.result(operands, query, rows, jnp.float32),
            _result_type(query, (workspace,), jnp.uint8, [None]),
        )
        out, lse, _ = jax.ffi.ffi_call(PAGED_TARGET, results)(
            *operands,
            problem=_attributes(self.spec, self.lengths, self.ranges),
            **_program_attributes(self.program, query, value_pages),
            one_unit=np.bool_(one_unit),
        )
        return out, lse


class _Backward(_Pass):
    def __init__(
        self,
        spec,
        lengths,
        program,
        ranges,
        has_dlse: bool,
        gradients: KernelGradients | None,
        summed: tuple[tuple[bool, ...], ...],
    ):
        """`summed`: for each of the captures that have a gradient here, and each batch axis of the
        call, whether it has size 1 there."""
        axes = ("tnh", "skh", "skv", "tnv", "tnv", "tn", *("",) * sum(lengths))
        if has_dlse:
            axes = (*axes, "tn")
        dense = (False,) * 5 + (True,) * (len(axes) - 5)
        super().__init__(spec, lengths, program, ranges, axes, dense)
        self.has_dlse = has_dlse
        self.gradients = gradients
        # The operands whose gradients the further results are.
        captures = () if gradients is None else gradients.captures
        self.captures = tuple(len(axes) + 2 + i for i in captures)
        of_captures = (self.operand_axes[i] for i in self.captures)
        self.result_axes = ("tnh", "skh", "skv", *of_captures)
        self.result_sums = ((), (), (), *summed)

    def _static(self) -> tuple:
        return *super()._static(), self.has_dlse, self.gradients, self.result_sums

    def call(self, *operands):
        query, key, value = operands[:3]
        q_len, q_heads, head_dim = query.shape[-3:]
        kv_len, kv_heads, value_dim = value.shape[-3:]
        # Linear in the batch and, where it is symbolic (jax.export), in the length: parts of a
        # problem need at least as many bytes as the whole.
        parts = math.prod(self.full_batch(operands))
        if not isinstance(q_len, int):
            parts *= -(-q_len // _WORKSPACE_ROWS)
        workspace = parts * extension.backward_workspace_bytes(
            batch=1,
            q_len=q_len if isinstance(q_len, int) else _WORKSPACE_ROWS,
            kv_len=kv_len if isinstance(kv_len, int) else 1,  # does not matter
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
        )
        results = (
            *(self.result(operands, x, x.shape[-3:], x.dtype) for x in (query, key, value)),
            _result_type(query, (workspace,), jnp.uint8, [None]),
            *self._gradient_types(operands),
        )
        dq, dk, dv, _, *more = jax.ffi.ffi_call(BACKWARD_TARGET, results)(
            *operands,
            problem=_attributes(self.spec, self.lengths, self.ranges),
            **_program_attributes(self.program, query, value),
            has_dlse=np.bool_(self.has_dlse),
            deterministic=np.bool_(self.spec.deterministic_backward),
            **_gradient_attributes(self.gradients),
        )
        return dq, dk, dv, *more

    def _gradient_types(self, operands):
        """Of the gradients of captures."""
        if self.gradients is None:
            return
        axes = self._batch_axes(operands)
        sums = self.full_sums(len(axes))[3:]
        numbers = self.gradients.captures
        for number, operand, summed in zip(numbers, self.captures, sums, strict=True):
            x = operands[operand]
            own = x.shape[len(axes) :]
            batch = [(1, None) if one else axis for axis, one in zip(axes, summed, strict=True)]
            shape = (*(size for size, _ in batch), *own)
            mesh_axes = [*(part for _, part in batch), *(None for _ in own)]
            dtype = x.dtype if self.gradients.is_narrow(number) else jnp.float32
            yield _result_type(operands[0], shape, dtype, mesh_axes)


def _mesh_axes(x) -> tuple:
    """The mesh axes that split each axis of `x`, as its type tells (explicit sharding)."""
    return _split.padded(jax.typeof(x).sharding.spec, x.ndim)


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
    op = jax.custom_batching.custom_vmap(_sharded(kernel))

    @op.def_vmap
    def rule(axis_size: int, mapped: Sequence[bool], *operands):
        too_many = operands[0].ndim - 3 >= _MAX_BATCH_AXES
        operands = [
            x
            if is_mapped or i in kernel.unbatched
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


def _sharded(kernel: _Pass) -> Callable:
    """The custom call, which splits as its operands do."""

    def op(*operands):
        return _partitioned(
            kernel,
            _batch_pattern(kernel, operands),
            _groups(operands),
            _automatic_devices(operands),
        )(*operands)

    return op


def _groups(operands) -> tuple[int, int]:
    """(key/value heads, query heads of each)."""
    q_heads, kv_heads = operands[0].shape[-2], operands[1].shape[-2]
    return kv_heads, q_heads // kv_heads


def _batch_pattern(kernel: _Pass, operands) -> tuple[tuple[bool, ...], ...]:
    """For each operand and batch axis: whether the operand broadcasts there."""
    full = kernel.full_batch(operands)
    return tuple(
        ()
        if i in kernel.unbatched
        else tuple(n != full_n for n, full_n in zip(x.shape, full, strict=False))
        for i, x in enumerate(operands)
    )


def _automatic_devices(operands) -> int | None:
    """Inside a `shard_map` over some of the mesh's axes: how many devices the others span."""
    mesh = jax.typeof(operands[0]).sharding.mesh
    manual = [kind == jax.sharding.AxisType.Manual for kind in mesh.axis_types]
    if not any(manual):
        return None
    return math.prod(
        n for n, is_manual in zip(mesh.axis_sizes, manual, strict=True) if not is_manual
    )


@functools.cache
def _partitioned(
    kernel: _Pass, broadcasts, groups: tuple[int, int], automatic_devices: int | None
) -> Callable:
    """The custom call under a sharding rule: batch axes and heads may be split."""
    sums = kernel.full_sums(len(broadcasts[0]))
    first_capture = len(sums) - len(kernel.captures)
    of_captures = sums[first_capture:]

    def partition(mesh, operand_types, result_types):
        # dq or out, (*B, T, N, ·), and the key, (*B, S, K, H).
        split = _split.of(mesh, result_types[0], operand_types[1], groups, automatic_devices)
        if automatic_devices and kernel.captures:
            # A sum over devices could not name them.
            split = split.without_heads(any(summed) for summed in zip(*of_captures, strict=True))
        operand_shardings = tuple(
            split.of(axes, operand_broadcasts)
            for axes, operand_broadcasts in zip(kernel.operand_axes, broadcasts, strict=True)
        )
        result_shardings = tuple(
            split.of(axes, summed) for axes, summed in zip(kernel.result_axes, sums, strict=True)
        )

        def call(*operands):
            results = kernel.call(*operands)
            # Devices that share a key head each have the part of their own query heads, and
            # gradients of captures are sums over all heads.
            by_heads = [
                split.heads if i >= first_capture else split.group if "k" in axes else ()
                for i, axes in enumerate(kernel.result_axes)
            ]
            return tuple(
                _sum_over((*split.batch_of(summed), *heads), x)
                for x, summed, heads in zip(results, sums, by_heads, strict=True)
            )

        return split.mesh, call, result_shardings, operand_shardings

    op = custom_partitioning(kernel.call)
    rule, replicated = _sharding_rule(kernel, broadcasts)
    op.def_partition(partition=partition, sharding_rule=rule, need_replication_factors=replicated)
    return op


def _sum_over(mesh_axes: tuple[str, ...], x):
    if not mesh_axes:
        return x
    return jax.lax.psum(x.astype(jnp.float32), mesh_axes).astype(x.dtype)


def _sharding_rule(kernel: _Pass, broadcasts) -> tuple[str, tuple[str, ...]]:
    """Shardy's einsum-like rule, and its factors that must stay whole.

    Query heads and key heads are factors of their own: one that they shared would split key heads
    over a part of a mesh axis, which JAX cannot name. `_split_of` brings them together.
    """

    def factors(array: str, axes: Sequence[str], broadcast: Sequence[bool]) -> str:
        batch = (f"one{array}x{i}" if is_one else f"b{i}" for i, is_one in enumerate(broadcast))
        return " ".join([*batch, *axes])

    sums = kernel.full_sums(len(broadcasts[0]))
    operands, results = (
        ", ".join(
            factors(f"{kind}{i}", axes, broadcast)
            for i, (axes, broadcast) in enumerate(zip(all_axes, all_broadcasts, strict=True))
        )
        for kind, all_axes, all_broadcasts in (
            ("operand", kernel.operand_axes, broadcasts),
            ("result", kernel.result_axes, sums),
        )
    )
    rule = f"{operands} -> {results}"
    names = dict.fromkeys(re.findall(r"\w+", rule))  # in order of appearance, as Shardy wants
    return rule, tuple(name for name in names if name in "tshv" or name.startswith(("one", "c")))
