"""What is not a case: the host's cost of a call, memory, and the kernels that a pass launches."""

from __future__ import annotations

import collections
import concurrent.futures
import multiprocessing
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import timing
from benchmarks.cases import OURS, Case

# ---- The host's cost of a call -------------------------------------------------------------------

_TINY = Case("host/tiny", 1, 128, 2, 64)
_CHAIN = 64


def host_row(name: str, peers: Sequence[str], repeats: int) -> dict[str, Any]:
    """Microseconds per call of a tiny shape, back to back, whose work on the GPU takes less.

    host/jit: one jitted call. host/eager: without jit. host/chain: one of 64 dependent calls in a
    jitted function; no less than the handler and the launch take, or the kernel if that is longer.
    """
    operands = timing.input_sets(_TINY)[0].operands
    count = {"host/jit": 1000, "host/eager": 30, "host/chain": 20}[name]
    functions: dict[str, Callable] = {}
    outcome: dict[str, Any] = {}
    for peer in peers:
        op = timing.attention(peer, _TINY)

        def chain(operands, others, op=op):
            for _ in range(_CHAIN):
                operands = operands | {"query": op(operands, others)}
            return operands["query"]

        function = {"host/jit": jax.jit(op), "host/eager": op, "host/chain": jax.jit(chain)}[name]
        try:
            jax.block_until_ready(function(operands, {}))
            functions[peer] = function
        except Exception as error:
            reason = timing.first_line(error)
            outcome[peer] = {"reason": reason, "failed": peer in OURS}
    samples = {peer: [] for peer in functions}
    per_call = _CHAIN if name == "host/chain" else 1
    for _ in range(repeats):
        for peer, function in functions.items():
            start = time.perf_counter()
            for _ in range(count):
                result = function(operands, {})
            jax.block_until_ready(result)
            samples[peer].append((time.perf_counter() - start) / (count * per_call) * 1e6)
    for peer, values in samples.items():
        outcome[peer] = {"us": statistics.median(values), "min": min(values), "max": max(values)}
    return outcome


# ---- Memory --------------------------------------------------------------------------------------

LONG_GPU = Case("memory/float32-131072", None, 131072, 1, 128, dtype="float32")
LONG_CPU = Case("memory/cpu-32768", 1, 32768, 4, 64, dtype="float32", is_causal=True,
                platform="cpu")  # fmt: skip


def _forward_and_gradients(case: Case, peer: str):
    op = timing.attention(peer, case)

    def step(operands, dout):
        out, pullback = jax.vjp(lambda operands: op(operands, {}), operands)
        return out, pullback(dout)

    operands, _, dout = timing.draw(case, 0)
    return jax.jit(step).lower(operands, dout).compile(), operands, dout


def gpu_memory() -> dict[str, Any]:
    """Of ours on `LONG_GPU`. Call it first: the peak is that of the process so far."""
    compiled, operands, dout = _forward_and_gradients(LONG_GPU, "jaxflash")
    analysis = compiled.memory_analysis()
    device = jax.devices()[0]
    before = device.memory_stats()["bytes_in_use"]
    start = time.perf_counter()
    jax.block_until_ready(compiled(operands, dout))
    seconds = time.perf_counter() - start
    peak = device.memory_stats()["peak_bytes_in_use"]
    return {
        "temporary_bytes": analysis.temp_size_in_bytes,
        "output_bytes": analysis.output_size_in_bytes,
        "argument_bytes": analysis.argument_size_in_bytes,
        "judged_bytes": peak - before - analysis.output_size_in_bytes,
        "seconds": seconds,
    }


def _peak_rss() -> int:
    # Not getrusage: what it says is inherited from the parent process.
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(r"VmHWM:\s*(\d+) kB", status)[0])


def _peak_rss_of_gradient(case: Case) -> tuple[int, int, float]:
    """(resident bytes before the inputs exist, peak, seconds); in a process of its own."""
    jax.config.update("jax_platforms", "cpu")
    jax.block_until_ready(jnp.ones(1) + 1)
    before = _peak_rss()
    compiled, operands, dout = _forward_and_gradients(case, "blockwise")
    start = time.perf_counter()
    jax.block_until_ready(compiled(operands, dout))
    seconds = time.perf_counter() - start
    return before, _peak_rss(), seconds


def cpu_memory(case: Case = LONG_CPU) -> dict[str, Any]:
    """Peak resident memory of forward and gradients of the blockwise path."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        before, peak, seconds = pool.submit(_peak_rss_of_gradient, case).result()
    return {"judged_bytes": peak, "before_bytes": before, "seconds": seconds}


# ---- Kernels -------------------------------------------------------------------------------------


def launched(contender: timing.Contender, pass_name: str) -> list[dict[str, Any]]:
    """What one pass puts on the GPU's streams: name, how often, milliseconds together."""
    program = timing.Program(contender._replace(sets=contender.sets[:1]), pass_name)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            program.sample("call", 1)
        traces = list(Path(folder).rglob("*.xplane.pb"))
        assert len(traces) == 1, traces
        data = jax.profiler.ProfileData.from_file(str(traces[0]))
        totals: dict[str, list[float]] = collections.defaultdict(list)
        for plane in data.planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                # Other lines group the same events by XLA operation and module.
                if line.name.startswith("Stream"):
                    for event in line.events:
                        totals[event.name].append(event.duration_ns / 1e6)
    return [{"name": n, "count": len(t), "ms": sum(t)} for n, t in totals.items()]
