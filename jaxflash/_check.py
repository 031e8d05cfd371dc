"""What `python -m jaxflash` measures: a self-test against the definition, and times beside jax.nn.

Everything here returns data; `__main__` prints it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxflash import _api, _spec, _support, reference
from jaxflash import _extension as extension

PASSES = ("forward", "backward")
# Largest relative difference to the reference: bfloat16 rounds to 4e-3, TF32 to 5e-4.
_TOLERANCE = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 3e-3}
_EXACT_TOLERANCE = 1e-4  # float32 with float32-accurate products
_SLICE_BYTES = 2**27  # of the logits of the slice that is compared with the definition
_ROUNDS = 5  # samples of a time; the peers take turns


# ---- A call ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of the op. `bias` and `mask` are shapes in the letters B, N, T, S and 1."""

    batch: int = 1
    q_len: int = 256
    kv_len: int = 256
    q_heads: int = 4
    kv_heads: int = 4
    head_dim: int = 64
    value_dim: int = 64
    dtype: str = "float32"
    scale: float | None = None
    is_causal: bool = False
    causal_alignment: str = "top_left"
    local_window_size: tuple[int | None, int | None] | None = None
    query_lengths: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    bias: str | None = None
    mask: str | None = None
    segments: int | None = None  # of equal length, packed one after the other
    logits_soft_cap: float | None = None
    sink: bool = False
    alibi: bool = False
    dropout_rate: float = 0.0
    precision: str | None = None
    deterministic_backward: bool = False

    def __str__(self) -> str:
        """Sizes but the lengths, and the options that differ from their defaults."""
        sizes = (
            f"batch {self.batch}, {self.q_heads} heads over {self.kv_heads}, head size "
            f"{self.head_dim}"
        )
        if self.value_dim != self.head_dim:
            sizes += f" and {self.value_dim}"
        options = (
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)[8:]
            if getattr(self, field.name) != field.default
        )
        return ", ".join((sizes, self.dtype, *options))

    @property
    def query_shape(self) -> tuple[int, ...]:
        return self.batch, self.q_len, self.q_heads, self.head_dim

    @property
    def qkv_shapes(self) -> tuple[tuple[int, ...], ...]:
        keys = self.batch, self.kv_len, self.kv_heads
        return self.query_shape, (*keys, self.head_dim), (*keys, self.value_dim)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return *self.query_shape[:-1], self.value_dim

    @property
    def operand_bytes(self) -> int:
        """Of query, key, value and output, a bias and a mask."""
        shapes = [*self.qkv_shapes, self.out_shape]
        if self.bias is not None:
            shapes.append(self._shape_of_axes(self.bias))
        of_mask = 0 if self.mask is None else math.prod(self._shape_of_axes(self.mask))
        return jnp.dtype(self.dtype).itemsize * sum(map(math.prod, shapes)) + of_mask

    def _shape_of_axes(self, axes: str) -> tuple[int, ...]:
        sizes = {"B": self.batch, "N": self.q_heads, "T": self.q_len, "S": self.kv_len, "1": 1}
        return tuple(sizes[letter] for letter in axes.rjust(4, "1"))

    @property
    def logits_bytes(self) -> int:
        return 4 * self.batch * self.q_heads * self.q_len * self.kv_len

    @property
    def static(self) -> dict[str, Any]:
        """The options without arrays that differ from their defaults."""
        options = dict(
            scale=self.scale,
            is_causal=self.is_causal or None,
            causal_alignment=self.causal_alignment,
            local_window_size=self.local_window_size,
            logits_soft_cap=self.logits_soft_cap,
            dropout_rate=self.dropout_rate or None,
            precision=self.precision,
            deterministic_backward=self.deterministic_backward or None,
        )
        if self.causal_alignment == "top_left":
            del options["causal_alignment"]
        return {name: option for name, option in options.items() if option is not None}

    @functools.lru_cache(maxsize=1)  # noqa: B019  asked for several times, and may be large
    def arrays(self) -> dict[str, Any]:
        """The options that are arrays, by their names in the op."""
        random = np.random.default_rng(0)
        arrays: dict[str, Any] = {}
        if self.bias is not None:
            shape = self._shape_of_axes(self.bias)
            arrays["bias"] = random.standard_normal(shape, np.float32).astype(self.dtype)
        if self.mask is not None:
            shape = self._shape_of_axes(self.mask)
            arrays["mask"] = random.random(shape, np.float32) < 0.5
        if self.query_lengths is not None:
            arrays["query_seq_lengths"] = np.array(self.query_lengths, np.int32)
        if self.kv_lengths is not None:
            arrays["key_value_seq_lengths"] = np.array(self.kv_lengths, np.int32)
        if self.segments is not None:
            arrays["segment_ids"] = tuple(
                np.tile(
                    (np.arange(length) * self.segments // length).astype(np.int32), (self.batch, 1)
                )
                for length in (self.q_len, self.kv_len)
            )
        if self.sink:
            arrays["sink"] = np.linspace(-1, 1, self.q_heads, dtype=np.float32)
        if self.alibi:
            exponents = np.arange(1, self.q_heads + 1) * (8 / self.q_heads)
            arrays["alibi_slopes"] = (2.0**-exponents).astype(np.float32)
        if self.dropout_rate:
            arrays["dropout_rng"] = np.array([0, 1], np.uint32)
        return arrays

    @property
    def _described(self) -> tuple[_spec.AttentionSpec, _spec.Operands]:
        qkv = [jax.ShapeDtypeStruct(shape, self.dtype) for shape in self.qkv_shapes]
        return _api.described(*qkv, **self.arrays(), **self.static)

    def check(self) -> tuple[str, ...]:
        """Reasons why the kernels do not take the call; ValueError if nothing can."""
        return _support.reasons_against_kernels(*self._described)

    @property
    def highest_precision(self) -> bool:
        return self._described[0].highest_precision

    def draw(self) -> tuple[list[jax.Array], jax.Array]:
        """Random normal (query, key, value) and a cotangent of the output."""
        shapes = (*self.qkv_shapes, self.out_shape)

        @jax.jit
        def normal(key):  # rbg: compiles in no time, which the default does not
            keys = jax.random.split(key, len(shapes))
            return [
                jax.random.normal(key, shape, self.dtype)
                for key, shape in zip(keys, shapes, strict=True)
            ]

        *qkv, dout = normal(jax.random.key(0, impl="rbg"))
        return qkv, dout

    def flops(self, pass_name: str) -> float:
        """Of the products over the pairs that band, lengths and segments leave visible."""
        products = self.head_dim + self.value_dim
        if pass_name == "backward":  # dq, dk and the logits again; dv and dp
            products = 3 * self.head_dim + 2 * self.value_dim
        return 2.0 * products * self.q_heads * self._visible_pairs()

    def _visible_pairs(self) -> int:
        spec, _ = self._described
        left, right = spec.left, spec.right
        row, pairs = np.arange(self.q_len), 0
        all_alike = self.query_lengths is None and self.kv_lengths is None
        for b in range(1 if all_alike else self.batch):
            q_len, kv_len = self.q_len, self.kv_len
            if self.query_lengths is not None:
                q_len = min(max(self.query_lengths[b], 0), q_len)
            if self.kv_lengths is not None:
                kv_len = min(max(self.kv_lengths[b], 0), kv_len)
            position = row + (kv_len - q_len if self.causal_alignment == "bottom_right" else 0)
            first = np.zeros_like(row)
            last = np.full_like(row, kv_len)  # excluded
            if left is not None:
                first = np.maximum(first, position - left)
            if right is not None:
                last = np.minimum(last, position + right + 1)
            if self.segments is not None:
                segment = row * self.segments // self.q_len
                ids = np.arange(self.kv_len) * self.segments // self.kv_len
                first = np.maximum(first, np.searchsorted(ids, segment, "left"))
                last = np.minimum(last, np.searchsorted(ids, segment, "right"))
            pairs += int(np.maximum(last - first, 0)[:q_len].sum())
        return pairs * (self.batch if all_alike else 1)


def path(call: Call, pass_name: str, implementation: str | None) -> tuple[str, tuple[str, ...]]:
    """(what runs the pass, why not a kernel)."""
    if implementation == "xla":
        return "blockwise path", ("implementation='xla'",)
    reasons = call.check()
    if (backend := jax.default_backend()) != "gpu":
        reasons += (f"JAX runs on the {backend}, not on a GPU",)
    if reasons:
        return "blockwise path", reasons
    query, key, value = (list(shape) for shape in call.qkv_shapes)
    variant = extension.variant(
        pass_name=pass_name,
        dtype=call.dtype,
        highest_precision=call.highest_precision,
        q=query,
        k=key,
        v=value,
    )
    if variant is None:
        return "CUDA kernel", ()
    family, head_dim, value_dim = variant
    size = f"{head_dim}" if head_dim == value_dim else f"{head_dim}/{value_dim}"
    return f"{family} kernel, head size {size}", ()


# ---- Programs ----------------------------------------------------------------------------------


def _ours(call: Call, implementation: str | None) -> Callable:
    return functools.partial(
        _api.dot_product_attention, **call.static, implementation=implementation
    )


def _jax_nn(call: Call, implementation: str | None) -> Callable:
    known = inspect.signature(jax.nn.dot_product_attention).parameters
    ignored = ("precision", "deterministic_backward")  # change how, not what
    options = {name: x for name, x in call.static.items() if name not in ignored}
    if "local_window_size" in options:  # which has numbers alone
        unlimited = max(call.q_len, call.kv_len)
        sides = options["local_window_size"]
        options["local_window_size"] = tuple(unlimited if x is None else x for x in sides)
    missing = sorted((options.keys() | call.arrays().keys()) - known.keys())
    if missing:
        raise NotImplementedError(f"jax.nn has no {', '.join(missing)}")
    return functools.partial(jax.nn.dot_product_attention, **options, implementation=implementation)


class _Program:
    """One pass, compiled, with its arguments: operands and options, or what forward saved."""

    def __init__(self, op: Callable, pass_name: str, qkv, arrays, dout):
        def forward(qkv, arrays):
            return op(*qkv, **arrays)

        if pass_name == "forward":
            self.arguments: tuple = (qkv, arrays)
            self.compiled = jax.jit(forward).lower(qkv, arrays).compile()
            return

        # The pullback is a pytree of what the forward pass saved.
        def save(qkv, arrays):
            return jax.vjp(lambda *qkv: forward(qkv, arrays), *qkv)[1]

        leaves, structure = jax.tree.flatten(jax.jit(save)(qkv, arrays))

        def backward(leaves, dout):
            return jax.tree.unflatten(structure, leaves)(dout)

        self.arguments = (leaves, dout)
        self.compiled = jax.jit(backward).lower(leaves, dout).compile()

    def __call__(self, *arguments):
        return self.compiled(*(arguments or self.arguments))

    @property
    def memory(self) -> int | None:
        """Bytes of results and temporaries; None where the compiler does not say."""
        analysis = self.compiled.memory_analysis()
        if analysis is None:
            return None
        return analysis.output_size_in_bytes + analysis.temp_size_in_bytes


def _sample(function: Callable[[], Any], calls: int) -> float:
    """Seconds per call of back-to-back calls."""
    result = None
    start = time.perf_counter()
    for _ in range(calls):
        result = function()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def _calls(function: Callable[[], Any], seconds: float) -> int:
    """How many calls take that long; warms up."""
    _sample(function, 1)
    return max(1, round(seconds / _sample(function, 1)))


# ---- The self-test -----------------------------------------------------------------------------

SELF_TEST = {
    "bfloat16, causal, grouped heads": Call(
        2, 130, 130, 4, 2, 128, 128, "bfloat16", is_causal=True
    ),
    "float16, window, key lengths": Call(
        2, 100, 140, 2, 2, 64, 64, "float16", local_window_size=(40, 20), kv_lengths=(140, 77)
    ),
    "float32, accurate products": Call(
        1, 65, 65, 2, 1, 96, 96, "float32", is_causal=True, precision="highest"
    ),
    "float32, bias, segments, soft cap, slopes, sink, dropout": Call(
        1, 70, 70, 2, 2, 32, 32, "float32", bias="NTS", segments=3, logits_soft_cap=5.0,
        alibi=True, sink=True, dropout_rate=0.2,
    ),
}  # fmt: skip


def tolerance(call: Call) -> float:
    if call.dtype == "float32" and call.highest_precision:
        return _EXACT_TOLERANCE
    return _TOLERANCE[call.dtype]


def self_test(name: str, implementation: str | None = None) -> dict[str, Any]:
    """Output and gradients of one row of `SELF_TEST` against the definition."""
    call = SELF_TEST[name]
    qkv, dout = call.draw()
    arrays = call.arrays()

    def results(op):
        @jax.jit
        def run(qkv, arrays, dout):
            out, pullback = jax.vjp(lambda *qkv: op(*qkv, **arrays), *qkv)
            return out, *pullback(dout)

        return run(qkv, arrays, dout)

    actual = results(_ours(call, implementation))
    expected = results(functools.partial(reference.dot_product_attention, **call.static))
    ran, why = path(call, "forward", implementation)
    error = _error(actual, expected)
    return {
        "name": name,
        "path": ran,
        "why": list(why),
        "error": error,
        "tolerance": tolerance(call),
        "passed": error <= tolerance(call),
    }


def _error(actual, expected) -> float:
    """Largest relative difference of any array, in the 2-norm; NaN if one has a NaN. An array that
    is next to nothing beside the others, as dq is where each query sees one key, counts as 1 % of
    those: what it holds has been rounded away."""
    actual, expected = (
        [np.asarray(x, np.float32) for x in jax.device_get(arrays)] for arrays in (actual, expected)
    )
    typical = max(np.linalg.norm(x) / max(x.size, 1) ** 0.5 for x in expected)
    errors = []
    for ours, right in zip(actual, expected, strict=True):
        size = max(np.linalg.norm(right), 0.01 * typical * right.size**0.5, 1e-30)
        errors.append(np.linalg.norm(ours - right) / size)
    return float(np.max(errors))


# ---- Times -------------------------------------------------------------------------------------


def matrix_rate(dtype: str, precision: str | None, seconds: float) -> dict[str, Any]:
    """FLOP/s of a large square matrix product, the most that attention could reach."""
    size = 8192 if jax.default_backend() == "gpu" else 1024
    a = jax.random.normal(jax.random.key(0, impl="rbg"), (size, size), dtype)
    product = jax.jit(functools.partial(jnp.matmul, precision=precision))
    calls = _calls(lambda: product(a, a), seconds / _ROUNDS)
    best = min(_sample(lambda: product(a, a), calls) for _ in range(_ROUNDS))
    return {"dtype": dtype, "size": size, "flops_per_second": 2 * size**3 / best}


def measure(
    call: Call, pass_name: str, implementation: str | None, seconds: float
) -> Iterator[dict[str, Any]]:
    """Of ours and of jax.nn: time, memory, and error of ours against the definition on a slice.

    Yields one dictionary for each; what could not run has a `reason` in place of a time.
    """
    qkv, dout = call.draw()
    arrays = jax.device_put(call.arrays())
    on_gpu = jax.default_backend() == "gpu"
    peers: dict[str, Callable[[], Callable]] = {"jaxflash": lambda: _ours(call, implementation)}
    if on_gpu:
        peers["jax.nn cudnn"] = lambda: _jax_nn(call, "cudnn")
    peers["jax.nn xla"] = lambda: _jax_nn(call, "xla")

    programs: dict[str, _Program] = {}
    reasons: dict[str, str] = {}
    calls: dict[str, int] = {}
    for peer, op in peers.items():
        if peer == "jax.nn xla" and call.logits_bytes > _dense_limit():
            reasons[peer] = f"its logits alone would take {call.logits_bytes / 2**30:.1f} GiB"
            continue
        try:
            program = _Program(op(), pass_name, qkv, arrays, dout)
            calls[peer] = _calls(program, seconds / _ROUNDS)
            programs[peer] = program
        except Exception as error:  # that a peer cannot is a result
            text = str(error).strip() or repr(error)
            reasons[peer] = f"{type(error).__name__}: {text.splitlines()[0][:200]}"
    samples = {peer: [] for peer in programs}
    for _ in range(_ROUNDS):
        for peer, program in programs.items():
            samples[peer].append(_sample(program, calls[peer]))

    flops = call.flops(pass_name)
    for peer in peers:
        row: dict[str, Any] = {"peer": peer, "pass": pass_name, "call": dataclasses.asdict(call)}
        if peer == "jaxflash":
            row["path"], why = path(call, pass_name, implementation)
            row["why"] = list(why)
        if peer in reasons:
            yield {**row, "reason": reasons[peer]}
            continue
        program = programs[peer]
        row["seconds"] = statistics.median(samples[peer])
        row["flops_per_second"] = flops / row["seconds"]
        row["memory"] = program.memory
        if peer == "jaxflash":
            error = _slice_error(call, pass_name, program, qkv, arrays, dout)
            row["error"], row["tolerance"] = error, tolerance(call)
            row["passed"] = error is None or error <= tolerance(call)
        yield row


def _device_memory() -> int | None:
    stats = jax.devices()[0].memory_stats()
    return stats["bytes_limit"] if stats else None


def memory() -> int | None:
    """Bytes of the device, or of the machine where the device does not say; None: unknown."""
    if (of_device := _device_memory()) is not None:
        return of_device
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _dense_limit() -> float:
    of_device = _device_memory()
    return 2.0**29 if of_device is None else 0.15 * of_device


def _slice_error(call: Call, pass_name: str, program: _Program, qkv, arrays, dout) -> float | None:
    """Error of the first group of heads of the first sequence, in as many first rows as the dense
    definition can take; None where the rows' positions depend on the others (bottom right)."""
    group = call.q_heads // max(call.kv_heads, 1)
    rows = min(call.q_len, _SLICE_BYTES // (4 * group * call.kv_len))
    if rows < 1 or (rows < call.q_len and call.causal_alignment == "bottom_right"):
        return None

    def heads_and_rows(x):  # of the shape of the logits, axes possibly 1
        return x[:1, :group, :rows]

    cuts: dict[str, Callable] = {
        "bias": heads_and_rows,
        "mask": heads_and_rows,
        "query_seq_lengths": lambda x: jnp.minimum(x[:1], rows),
        "key_value_seq_lengths": lambda x: x[:1],
        "segment_ids": lambda ids: (ids[0][:1, :rows], ids[1][:1]),
        "sink": lambda x: x[:group],
        "alibi_slopes": lambda x: x[:group],
        "dropout_rng": lambda x: x,
    }
    few = {name: cuts[name](x) for name, x in arrays.items()}
    query, key, value = qkv
    few_qkv = query[:1, :rows, :group], key[:1, :, :1], value[:1, :, :1]
    definition = functools.partial(reference.dot_product_attention, **call.static)

    @jax.jit
    def expected(qkv, arrays, dout):
        out, pullback = jax.vjp(lambda *qkv: definition(*qkv, **arrays), *qkv)
        return (out,) if pass_name == "forward" else pullback(dout)

    few_dout = dout[:1, :rows, :group]
    wanted = expected(few_qkv, few, few_dout)
    if pass_name == "forward":
        return _error((program()[:1, :rows, :group],), wanted)
    # Rows without a cotangent reach no gradient.
    leaves, _ = program.arguments
    dq, dk, dv = program(leaves, jnp.zeros_like(dout).at[:1, :rows, :group].set(few_dout))
    return _error((dq[:1, :rows, :group], dk[:1, :, :1], dv[:1, :, :1]), wanted)
