"""Times one pass of one case for several peers, interleaved.

Two times are taken of each peer, both on the host's clock over a batch of back-to-back calls that
ends with one `block_until_ready`:

- device time: each call is one jitted program with the pass written out once per input set, so
  JAX's cost of a call is spread over the sets and hidden behind the work before it. Command buffers
  are off (see run.py), so the passes run one after the other on one stream, as in a training step;
- call time: each call is the jitted pass alone, with what JAX adds to it. On a CPU the two are one.

forward is the output alone, from (q, k, v). backward is the pullback of `jax.vjp` as a program of
its own, from what the forward pass saved and a cotangent of the output. gradient is both in one
program, as a training step has it. jvp is the output and its tangent along all operands, hvp the
gradient and its tangent. Gradients are those of `Case.operand_shapes`; masks, lengths and the like
are arguments of the program, too.

Inputs are random normal. Each pass reads another input set than the one before it, so nothing is
left in the L2 cache. Peers take turns sample by sample, so clocks and heat drift alike for all.
"""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxflash
from benchmarks.cases import OURS, PREFIX, RANDOM_SHARE, TANGENTS, Case
from jaxflash import masks

PEERS = {
    "jaxflash": (jaxflash, dict(implementation="cuda")),
    "blockwise": (jaxflash, dict(implementation="xla")),
    "cudnn": (jax.nn, dict(implementation="cudnn")),
    "xla": (jax.nn, dict(implementation="xla")),
}
_DEFINITION = "reference"  # is not timed
_JAX_NN_ARGUMENTS = inspect.signature(jax.nn.dot_product_attention).parameters.keys()
_DENSE = ("xla", _DEFINITION)  # peers that store logits

_SETS = 4  # input sets; each exceeds an H200's L2 cache of 60 MB in every case but the CPU's
_MAX_INPUT_BYTES = 24e9  # of all sets together
_MAX_DENSE_SHARE = 0.25  # of the GPU's memory, for a peer that stores logits
# Largest relative difference between two peers: bfloat16 rounds to 4e-3, TF32 to 5e-4.
_TOLERANCE = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 3e-3}

Arrays = dict[str, jax.Array]


class InputSet(NamedTuple):
    operands: Arrays  # by name, what has a gradient
    others: Arrays
    dout: jax.Array


class Contender(NamedTuple):
    """What is timed in a row."""

    peer: str
    case: Case  # of the row, or another one for comparison
    sets: Sequence[InputSet]


def attention(peer: str, case: Case) -> Callable[[Arrays, Arrays], jax.Array]:
    """The peer's op as a function of the differentiable operands and the other arrays."""
    module, how = (jaxflash.reference, {}) if peer == _DEFINITION else PEERS[peer]
    if not hasattr(module, case.function):
        raise NotImplementedError(f"{module.__name__} has no {case.function}")
    function = getattr(module, case.function)

    def op(operands: Arrays, others: Arrays) -> jax.Array:
        if module is jaxflash.reference:
            # On GPUs a gather's gradient is added up in its operand's type: 6 % off in 16 bits.
            operands = jax.tree.map(lambda x: x.astype(jnp.float32), operands)
        arguments = {**_arguments(case, operands, others), **how}
        if module is jaxflash.reference and case.packed is not None:
            # Must be known when it is traced.
            arguments["cu_seqlens_q"] = arguments["cu_seqlens_kv"] = case.boundaries
        if module is jax.nn:
            arguments.pop("deterministic_backward", None)  # changes how, not what
            if isinstance(arguments.get("mask"), masks.Mask):
                raise NotImplementedError("jax.nn has no masks as values")
            if missing := sorted(arguments.keys() - _JAX_NN_ARGUMENTS):
                raise NotImplementedError(f"jax.nn has no {', '.join(missing)}")
        return function(**arguments).astype(case.dtype)

    return op


def _arguments(case: Case, operands: Arrays, others: Arrays) -> dict[str, Any]:
    arguments = {**operands, **others, **case.options}
    if case.packed is not None:
        arguments["cu_seqlens_kv"] = arguments["cu_seqlens_q"]
    if case.relative:
        table = arguments.pop("table")
        kv_len = table.shape[1] - case.q_len
        arguments["score_mod"] = lambda score, b, h, q, kv: (
            score + table[h, q - kv + kv_len].astype(jnp.float32)
        )
    return arguments


def input_sets(case: Case) -> list[InputSet]:
    """Random inputs, several times."""
    itemsize = jnp.dtype(case.dtype).itemsize
    shapes = (*case.operand_shapes.values(), case.out_shape)
    set_bytes = itemsize * sum(float(np.prod(shape)) for shape in shapes)
    count = int(np.clip(_MAX_INPUT_BYTES // set_bytes, 2, _SETS))
    drawn = jax.jit(functools.partial(draw, case))
    return [drawn(i) for i in range(count)]


def draw(case: Case, number: int | jax.Array) -> InputSet:
    """Of random normal numbers, but for masks, lengths and the like."""
    shapes = {**case.qkv_shapes, **case.capture_shapes, "out": case.out_shape}
    # rbg compiles in no time, which neither the default nor a split does.
    *keys, other_key = (
        jax.random.wrap_key_data(jnp.array([number, i, 0, 0], jnp.uint32), impl="rbg")
        for i in range(len(shapes) + 1)
    )
    arrays = {
        name: jax.random.normal(k, shape, case.dtype)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    dout = arrays.pop("out")
    operands = {name: arrays.pop(name) for name in case.operand_shapes}
    lengths = None if case.kv_lengths is None else jnp.array(case.kv_lengths, jnp.int32)
    if case.page_size is not None:
        table = jax.random.permutation(other_key, math.prod(case.page_table_shape))
        arrays["page_table"] = table.astype(jnp.int32).reshape(case.page_table_shape)
        full = jnp.full(case.batch or 1, case.kv_len, jnp.int32)
        arrays["lengths"] = full if lengths is None else lengths
    elif case.mask is not None:
        arrays["mask"] = _mask(case, other_key, lengths)
    elif lengths is not None:
        arrays["key_value_seq_lengths"] = lengths
    if case.segments is not None:
        ids = jnp.arange(case.q_len, dtype=jnp.int32) * case.segments // case.q_len
        arrays["segment_ids"] = jnp.tile(ids, (case.batch or 1, 1))
    if case.packed is not None:
        arrays["cu_seqlens_q"] = jnp.array(case.boundaries, jnp.int32)
    if case.sink:
        arrays["sink"] = jnp.linspace(-1.0, 1.0, case.q_heads, dtype=jnp.float32)
    if case.alibi:
        numbers = jnp.arange(1, case.q_heads + 1, dtype=jnp.float32)
        arrays["alibi_slopes"] = jnp.exp2(-8 / case.q_heads * numbers)
    if case.dropout_rate:
        arrays["dropout_rng"] = jax.random.key(1)
    return InputSet(operands, arrays, dout)


def _in_prefix(b, h, q, kv, lengths):
    return kv < lengths[b]


def _mask(case: Case, key: jax.Array, lengths: jax.Array | None) -> jax.Array | masks.Mask:
    kv_len = case.kv_len or case.q_len
    if case.mask == "random":
        return jax.random.bernoulli(key, RANDOM_SHARE, (case.batch or 1, 1, case.q_len, kv_len))
    if case.mask == "keys":
        return jax.random.bernoulli(key, RANDOM_SHARE, (case.batch or 1, 1, 1, kv_len))
    if case.mask == "causal":
        return jnp.tril(jnp.ones((1, 1, case.q_len, kv_len), bool))
    if case.mask == "prefix":
        prefix = jnp.full(case.batch or 1, case.q_len // PREFIX, jnp.int32)
        return masks.causal() | masks.function(_in_prefix, prefix)
    assert lengths is not None
    return (jnp.arange(kv_len, dtype=jnp.int32)[None] < lengths[:, None])[:, None, None]


class Program:
    """One peer's compiled pass and the arguments that it is called with, one tuple per set."""

    def __init__(self, contender: Contender, pass_name: str):
        peer, case, sets = contender
        op = attention(peer, case)
        if peer in _DENSE:
            sets = sets[:2]  # what it saves for the backward pass is large, and evicts the rest
        call: Callable
        if pass_name == "forward":
            call = op
            self.arguments: list[tuple] = [(one.operands, one.others) for one in sets]
        elif pass_name == "backward":
            # The pullback is a pytree of what the forward pass saved. It is taken apart here, so
            # that its flattening in Python does not count as a cost of the call.
            save = jax.jit(lambda operands, others: jax.vjp(lambda x: op(x, others), operands)[1])
            saved = [jax.tree.flatten(save(one.operands, one.others)) for one in sets]
            structure = saved[0][1]
            assert all(other == structure for _, other in saved)
            call = lambda leaves, dout: jax.tree.unflatten(structure, leaves)(dout)  # noqa: E731
            self.arguments = [
                (leaves, one.dout) for (leaves, _), one in zip(saved, sets, strict=True)
            ]
        elif pass_name == "gradient":
            call = functools.partial(gradient_of, op)
            self.arguments = list(sets)
        else:
            call = functools.partial(_tangent if pass_name == "jvp" else _gradient_tangent, op)
            # Random normal as well: the operands of another set.
            tangents = [one.operands for one in (*sets[1:], sets[0])]
            self.arguments = [(*one, tangent) for one, tangent in zip(sets, tangents, strict=True)]
        self.once = jax.jit(call)
        # A peer that stores logits would hold those of all sets at once. Its passes are long, as
        # derivatives and those on a CPU are, so JAX's cost of a call does not show.
        long = peer in _DENSE or case.platform == "cpu" or pass_name in TANGENTS
        self.unrolled = 1 if long else len(sets)
        self.every = jax.jit(lambda arguments: [call(*a) for a in arguments])
        self.result = jax.block_until_ready(self.once(*self.arguments[0]))

    def sample(self, kind: str, calls: int) -> float:
        """Seconds per pass, over `calls` back-to-back calls."""
        if kind == "call" or self.unrolled == 1:
            batches, function, per_call = self.arguments, self.once, 1
        else:
            batches, function, per_call = [(self.arguments,)], self.every, self.unrolled
        result = None
        start = time.perf_counter()
        for i in range(calls):
            result = function(*batches[i % len(batches)])
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / (calls * per_call)

    def calls_for(self, kind: str, seconds: float) -> int:
        """How many calls make a sample of that length; compiles and warms up."""
        self.sample(kind, 1)
        per_call = self.sample(kind, 2) * (self.unrolled if kind == "device" else 1)
        return max(1, round(seconds / per_call))


def compile_ahead(chosen: Sequence[Case]) -> None:
    """The kernels that are compiled at run time, side by side: NVRTC takes seconds for each."""

    def compile_one(case: Case) -> None:
        op = attention("jaxflash", case)
        inputs = jax.eval_shape(functools.partial(draw, case), 0)
        calls: list[tuple[Callable, tuple]] = []
        if "backward" in case.passes or "gradient" in case.passes:  # the forward kernel among them
            calls.append((gradient_of, inputs))
        elif "forward" in case.passes:
            calls.append((forward_of, inputs))
        if "jvp" in case.passes:
            calls.append((_tangent, (*inputs, inputs.operands)))
        if "hvp" in case.passes:
            calls.append((_gradient_tangent, (*inputs, inputs.operands)))
        try:
            for call, arguments in calls:
                jax.jit(functools.partial(call, op)).lower(*arguments).compile()
        except Exception as error:  # comes again in its row
            print(f"{case.name}: {first_line(error)}", file=sys.stderr)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, [case for case in chosen if case.compiled_at_run_time]))


def forward_of(op, operands, others, dout):
    return op(operands, others)


def gradient_of(op, operands, others, dout):
    return jax.vjp(lambda x: op(x, others), operands)[1](dout)


def _tangent(op, operands, others, dout, tangents):
    return jax.jvp(lambda x: op(x, others), (operands,), (tangents,))


def _gradient_tangent(op, operands, others, dout, tangents):
    return jax.jvp(lambda x: gradient_of(op, x, others, dout), (operands,), (tangents,))


@jax.jit
def _difference(ours, theirs) -> jax.Array:
    """Largest relative difference of any result, NaN if one is NaN."""

    def one(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.linalg.norm(a - b) / jnp.linalg.norm(b)

    return jnp.stack(jax.tree.leaves(jax.tree.map(one, ours, theirs))).max()


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Of samples in seconds: statistics in milliseconds."""
    low, median, high = map(float, np.percentile(np.asarray(samples) * 1e3, (25, 50, 75)))
    return dict(
        median=median, quartile_low=low, quartile_high=high, min=min(samples) * 1e3,
        max=max(samples) * 1e3, samples=len(samples),
    )  # fmt: skip


def first_line(error: Exception) -> str:
    text = str(error).strip() or repr(error)
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}"


def why_not(peer: str, case: Case) -> str | None:
    """A reason not to try, known beforehand."""
    if peer == "jaxflash" and case.function == "dot_product_attention":
        reasons = []

        def ask(inputs: InputSet):
            reasons.extend(jaxflash.supported(**_arguments(case, inputs.operands, inputs.others)))

        inputs = jax.eval_shape(functools.partial(draw, case), 0)
        jax.eval_shape(ask, inputs)
        return "; ".join(reasons) or None
    memory = jax.devices()[0].memory_stats()
    if peer in _DENSE and memory and case.dense_bytes > _MAX_DENSE_SHARE * memory["bytes_limit"]:
        return f"the stored logits would take {case.dense_bytes / 1e9:.0f} GB"
    return None


def measure(
    contenders: dict[str, Contender], pass_name: str, *, repeats: int, seconds: float
) -> dict[str, Any]:
    """{label: times or the reason why there are none} and how far the results are apart. The first
    one is ours."""
    mine, ours = next(iter(contenders.items()))
    kinds = ("device", "call") if ours.case.platform == "gpu" else ("device",)
    outcome: dict[str, Any] = {}
    programs: dict[str, Program] = {}
    calls: dict[tuple[str, str], int] = {}
    for label, contender in contenders.items():
        reason = why_not(contender.peer, contender.case)
        if reason is None:
            try:
                program = Program(contender, pass_name)
                for kind in kinds:
                    calls[label, kind] = program.calls_for(kind, seconds)
                programs[label] = program
            except Exception as error:  # a peer that cannot is a result, and reported as such
                # What the kernels say they take must run.
                outcome[label] = {"reason": first_line(error), "failed": contender.peer in OURS}
        else:
            outcome[label] = {"reason": reason, "failed": False}

    samples: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for _ in range(repeats):
        for kind in kinds:
            for label, program in programs.items():
                samples[label, kind].append(program.sample(kind, calls[label, kind]))
    for label in programs:
        outcome[label] = {kind: summary(samples[label, kind]) for kind in kinds}

    if mine in programs and ours.peer in OURS:
        theirs = [label for label in programs if contenders[label].peer not in OURS]
        result = programs[mine].result
        expected = programs[theirs[0]].result if theirs else None
        programs.clear()  # what they have saved
        outcome[mine] |= _verdict(ours, pass_name, result, expected)
    return {label: outcome[label] for label in contenders}


def _verdict(ours: Contender, pass_name: str, result, expected) -> dict[str, Any]:
    """How far our result is from a peer's or, without one, from the definition's or, where that
    takes too much memory, from that of the path in plain JAX."""
    why: str | None = None
    for peer in (_DEFINITION, "blockwise"):
        if expected is None and peer != ours.peer:
            why = why_not(peer, ours.case)
            try:
                expected = Program(ours._replace(peer=peer), pass_name).result if not why else None
            except Exception as error:
                why = first_line(error)
    if expected is None:
        return {"unchecked": why, "failed": True}
    difference = float(_difference(result, expected))
    return {"difference": difference, "failed": not difference <= _TOLERANCE[ours.case.dtype]}
