"""Times one pass of one case for several peers, interleaved.

Two times are taken of each peer, both on the host's clock over a batch of back-to-back calls that
ends with one `block_until_ready`:

- device time: each call is one jitted program with the pass written out once per input set, so
  JAX's cost of a call is spread over the sets and hidden behind the work before it. Command buffers
  are off (see run.py), so the passes run one after the other on one stream, as in a training step;
- call time: each call is the jitted pass alone, with what JAX adds to it. On a CPU the two are one.

forward is the output alone, from (q, k, v). backward is the pullback of `jax.vjp` as a program of
its own, from what the forward pass saved and a cotangent of the output. gradient is both in one
program, as a training step has it.

Inputs are random normal. Each pass reads another input set than the one before it, so nothing is
left in the L2 cache. Peers take turns sample by sample, so clocks and heat drift alike for all.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxflash
from benchmarks.cases import OURS, Case

PEERS = {
    "jaxflash": functools.partial(jaxflash.dot_product_attention, implementation="cuda"),
    "blockwise": functools.partial(jaxflash.dot_product_attention, implementation="xla"),
    "cudnn": functools.partial(jax.nn.dot_product_attention, implementation="cudnn"),
    "xla": functools.partial(jax.nn.dot_product_attention, implementation="xla"),
}

_SETS = 4  # input sets; each exceeds an H200's L2 cache of 60 MB in every case but the CPU's
_MAX_INPUT_BYTES = 24e9  # of all sets together
_MAX_DENSE_SHARE = 0.25  # of the GPU's memory, for a peer that stores logits
# Largest relative difference between two peers: bfloat16 rounds to 4e-3, TF32 to 5e-4.
_TOLERANCE = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 3e-3}

Arrays = Sequence[jax.Array]


def attention(peer: str, case: Case) -> Callable[..., jax.Array]:
    """The peer's op as a function of the differentiable operands."""
    options: dict[str, Any] = dict(is_causal=case.is_causal)
    if case.local_window_size is not None:
        options["local_window_size"] = case.local_window_size
    if case.kv_lengths is not None:
        options["key_value_seq_lengths"] = np.array(case.kv_lengths, np.int32)
    if peer in OURS and case.deterministic_backward:
        options["deterministic_backward"] = True
    return functools.partial(PEERS[peer], **options)


def input_sets(case: Case) -> list[tuple[Arrays, jax.Array]]:
    """Random (operands, cotangent of the output), several times."""
    dtype = jnp.dtype(case.dtype)
    shapes = (*case.operand_shapes, case.out_shape)
    set_bytes = dtype.itemsize * sum(float(np.prod(shape)) for shape in shapes)
    count = int(np.clip(_MAX_INPUT_BYTES // set_bytes, 2, _SETS))

    @jax.jit
    def draw(key):
        keys = jax.random.split(key, len(shapes))
        return [jax.random.normal(k, shape, dtype) for k, shape in zip(keys, shapes, strict=True)]

    drawn = [draw(key) for key in jax.random.split(jax.random.key(0), count)]
    return [(arrays[:-1], arrays[-1]) for arrays in drawn]


class Program:
    """One peer's compiled pass and the arguments that it is called with, one tuple per set."""

    def __init__(self, peer: str, case: Case, pass_name: str, sets):
        op = attention(peer, case)
        if peer == "xla":
            sets = sets[:2]  # what it saves for the backward pass is large, and evicts the rest
        if pass_name == "forward":
            call: Callable = op
            self.arguments = [tuple(operands) for operands, _ in sets]
        elif pass_name == "backward":
            # The pullback is a pytree of what the forward pass saved. It is taken apart here, so
            # that its flattening in Python does not count as a cost of the call.
            save = jax.jit(lambda *operands: jax.vjp(op, *operands)[1])
            saved = [jax.tree.flatten(save(*operands)) for operands, _ in sets]
            structure = saved[0][1]
            assert all(other == structure for _, other in saved)
            call = lambda leaves, dout: jax.tree.unflatten(structure, leaves)(dout)  # noqa: E731
            self.arguments = [
                (leaves, dout) for (leaves, _), (_, dout) in zip(saved, sets, strict=True)
            ]
        else:
            call = lambda operands, dout: jax.vjp(op, *operands)[1](dout)  # noqa: E731
            self.arguments = list(sets)
        self.once = jax.jit(call)
        # A peer that stores logits would hold those of all sets at once. Its passes are long, as
        # those on a CPU are, so JAX's cost of a call does not show.
        self.unrolled = 1 if peer == "xla" or case.platform == "cpu" else len(sets)
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
    if peer == "jaxflash":
        operands = [jax.ShapeDtypeStruct(shape, case.dtype) for shape in case.operand_shapes]
        reasons = jaxflash.supported(*operands, is_causal=case.is_causal)
        return "; ".join(reasons) or None
    memory = jax.devices()[0].memory_stats()
    if peer == "xla" and memory and case.dense_bytes > _MAX_DENSE_SHARE * memory["bytes_limit"]:
        return f"the stored logits would take {case.dense_bytes / 1e9:.0f} GB"
    return None


def measure(
    case: Case, pass_name: str, peers: Sequence[str], sets, *, repeats: int, seconds: float
) -> dict[str, Any]:
    """{peer: times or the reason why there are none} and how far the results are apart."""
    kinds = ("device", "call") if case.platform == "gpu" else ("device",)
    outcome: dict[str, Any] = {}
    programs: dict[str, Program] = {}
    calls: dict[tuple[str, str], int] = {}
    for peer in peers:
        reason = why_not(peer, case)
        if reason is None:
            try:
                program = Program(peer, case, pass_name, sets)
                for kind in kinds:
                    calls[peer, kind] = program.calls_for(kind, seconds)
                programs[peer] = program
            except Exception as error:  # a peer that cannot is a result, and reported as such
                reason = first_line(error)
        if reason is not None:
            # What the kernels say they take must run.
            failed = peer in OURS and why_not(peer, case) is None
            outcome[peer] = {"reason": reason, "failed": failed}

    samples: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for _ in range(repeats):
        for kind in kinds:
            for peer, program in programs.items():
                samples[peer, kind].append(program.sample(kind, calls[peer, kind]))
    for peer in programs:
        outcome[peer] = {kind: summary(samples[peer, kind]) for kind in kinds}

    ours = next((peer for peer in programs if peer in OURS), None)
    other = next((peer for peer in programs if peer not in OURS), None)
    if ours and other:
        difference = float(_difference(programs[ours].result, programs[other].result))
        outcome[ours]["difference"] = difference
        outcome[ours]["failed"] = not difference <= _TOLERANCE[case.dtype]
    return outcome
