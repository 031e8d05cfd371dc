"""Times combinations of features over a few shapes, to find what takes longer than its parts.

    python -m benchmarks.combinations                     # all masks, all changes of scores
    python -m benchmarks.combinations --cases '64/*' '*/bias*/segments*' --limit 200
    python -m benchmarks.combinations --platform cpu --tiny --cases '64/cap/*'  # that they run

A row is a shape, what changes its scores and what hides keys: 64/cap/causal. Beside it stands the
call without what costs: the plain one with the same mask, and for segments and packed sequences the
same sequences as a batch. Times are those of jitted calls back to back, of the output and of output
and gradients in one program; the slowest rows, relative to what stands beside them, come first. Two
runs differ by a few per cent.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import fnmatch
import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from benchmarks import report, timing
from benchmarks.cases import Case

_SHAPES = (
    Case("128", 4, 4096, 16, 128),
    Case("gqa", 2, 8192, 32, 128, kv_heads=8),
    Case("64", 8, 2048, 32, 64),
    Case("256", 2, 4096, 16, 256, kv_heads=8),
    Case("short", 32, 512, 16, 128),
    Case("short-64", 64, 256, 12, 64),
    Case("96", 4, 4096, 16, 96),
    Case("192-128", 4, 4096, 8, 192, value_dim=128),
    Case("float16", 4, 4096, 16, 128, dtype="float16"),
    Case("cross", 4, 1024, 16, 128, kv_len=8192),
    Case("float32", 2, 2048, 16, 64, dtype="float32"),
)

_SEGMENTS = 8
_PACKED = 512  # tokens of a short packed sequence
_CAUSAL = dict(is_causal=True)
# What changes scores, by name.
_SCORES: dict[str, dict[str, Any]] = {
    "cap": dict(logits_soft_cap=30.0),
    "sink": dict(sink=True),
    "alibi": dict(alibi=True),
    "dropout": dict(dropout_rate=0.1),
    "bias": dict(bias="1NTS", capture_gradient=False),
    "bias-gradient": dict(bias="1NTS"),
    "key-bias": dict(bias="BN1S", capture_gradient=False),
    "key-bias-gradient": dict(bias="BN1S"),
    "row-bias": dict(bias="B11S", capture_gradient=False),
    "relative": dict(relative=True, capture_gradient=False),
    "relative-gradient": dict(relative=True),
    "bias-cap": dict(bias="1NTS", capture_gradient=False, logits_soft_cap=30.0),
    "bias-dropout": dict(bias="1NTS", capture_gradient=False, dropout_rate=0.1),
    "alibi-cap": dict(alibi=True, logits_soft_cap=30.0),
    "alibi-dropout": dict(alibi=True, dropout_rate=0.1),
}


def _masks(shape: Case) -> dict[str, tuple[dict[str, Any], str]]:
    """By name what hides, and the mask whose plain call stands beside it."""
    assert shape.batch is not None
    length, kv_len = shape.q_len, shape.kv_len or shape.q_len
    lengths = tuple(kv_len * (shape.batch - i) // shape.batch for i in range(shape.batch))
    masks: dict[str, tuple[dict[str, Any], str]] = {
        "full": ({}, "full"),
        "random": (dict(mask="random"), "full"),
        "lengths": (dict(kv_lengths=lengths), "lengths"),
        "padding": (dict(mask="padding", kv_lengths=lengths), "lengths"),
    }
    if kv_len != length:
        return masks
    tokens = shape.batch * length
    each = length // _SEGMENTS
    masks |= {
        "causal": (_CAUSAL, "causal"),
        "window": (dict(local_window_size=(length // 16 - 1, 0), **_CAUSAL), "window"),
        "causal-array": (dict(mask="causal"), "causal"),
        "prefix": (dict(mask="prefix"), "causal"),
    }
    for name, changes in (("", {}), ("-causal", _CAUSAL)):
        batch = f"batch-{each}{name}"
        masks[batch] = dict(batch=shape.batch * _SEGMENTS, q_len=each, **changes), batch
        masks[f"segments{name}"] = dict(segments=_SEGMENTS, **changes), batch
        flat = dict(batch=None, q_len=tokens, **changes)
        masks[f"packed{name}"] = dict(packed=(length,) * shape.batch, **flat), name[1:] or "full"
        if length > _PACKED:
            count = tokens // _PACKED
            batch = f"batch-{_PACKED}{name}"
            masks[batch] = dict(batch=count, q_len=_PACKED, **changes), batch
            masks[f"packed-{_PACKED}{name}"] = dict(packed=(_PACKED,) * count, **flat), batch
    return masks


def rows() -> dict[str, tuple[Case, str]]:
    """By name a case, and the name of the one that stands beside it."""
    found: dict[str, tuple[Case, str]] = {}
    for shape in _SHAPES:
        for mask, (hiding, beside) in _masks(shape).items():
            for scores, changing in {"plain": {}, **_SCORES}.items():
                if "packed" in hiding and "bias" in changing:
                    continue  # has none
                name = f"{shape.name}/{scores}/{mask}"
                case = dataclasses.replace(shape, name=name, **{**hiding, **changing})
                found[name] = case, f"{shape.name}/plain/{beside}"
    return found


_PASSES = {"forward": timing.forward_of, "gradient": timing.gradient_of}


def _compiled(peer: str, case: Case) -> dict[str, Any]:
    """A program for each pass, or the reason why there is none."""
    try:
        op = timing.attention(peer, case)
        inputs = jax.eval_shape(functools.partial(timing.draw, case), 0)
        return {
            name: jax.jit(functools.partial(run, op)).lower(*inputs).compile()
            for name, run in _PASSES.items()
        }
    except Exception as error:
        return {"reason": timing.first_line(error)}


def _milliseconds(program: Callable, inputs, seconds: float) -> float:
    """The least of three samples, each of about that length."""
    jax.block_until_ready(program(*inputs))
    start = time.perf_counter()
    jax.block_until_ready(program(*inputs))
    calls = max(3, round(seconds / (time.perf_counter() - start)))
    samples = []
    for _ in range(3):
        start = time.perf_counter()
        result = None
        for _ in range(calls):
            result = program(*inputs)
        jax.block_until_ready(result)
        samples.append((time.perf_counter() - start) / calls)
    return min(samples) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.combinations", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--cases", nargs="+", metavar="GLOB",
                        default=["*/plain/*", "*/*/full", "*/*/causal"])  # fmt: skip
    parser.add_argument("--limit", type=float, default=float("inf"), metavar="SECONDS",
                        help="leave out, and say so, what has not begun by then")  # fmt: skip
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--tiny", action="store_true", help="sizes of no meaning")
    parser.add_argument("--output", type=Path, metavar="JSON")
    arguments = parser.parse_args()
    begin = time.monotonic()
    if arguments.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "gpu":
        raise SystemExit("JAX finds no GPU here; --platform cpu times the blockwise path instead")

    known = rows()
    names = [n for n in known if any(fnmatch.fnmatchcase(n, x) for x in arguments.cases)]
    if not names:
        raise SystemExit(f"--cases: nothing is called {' or '.join(arguments.cases)}")
    names = list(dict.fromkeys(x for name in names for x in (known[name][1], name)))
    cases = {name: known[name][0] for name in names}
    if arguments.tiny:
        cases = {name: case.tiny(arguments.platform) for name, case in cases.items()}
    peer = "jaxflash" if arguments.platform == "gpu" else "blockwise"
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = dict(
            zip(names, pool.map(functools.partial(_compiled, peer), cases.values()), strict=True)
        )

    results: dict[str, dict[str, Any]] = {}
    for name, case in cases.items():
        if "reason" in programs[name]:
            results[name] = programs[name]
        elif time.monotonic() - begin > arguments.limit:
            results[name] = {"reason": "the time limit was reached"}
        else:
            inputs = jax.jit(functools.partial(timing.draw, case))(0)
            seconds = 0.0 if arguments.tiny else 0.04
            results[name] = {
                pass_name: _milliseconds(program, inputs, seconds)
                for pass_name, program in programs.pop(name).items()
            }
    if arguments.output is not None:
        about = {"device": jax.devices()[0].device_kind, "milliseconds": results}
        arguments.output.write_text(json.dumps(about, indent=1) + "\n")
    print(_table(results, {name: known[name][1] for name in names}))


def _table(results: dict[str, dict[str, Any]], beside: dict[str, str]) -> str:
    def ratio(name: str, pass_name: str) -> float:
        return results[name][pass_name] / results[beside[name]][pass_name]

    timed = [n for n in results if "reason" not in results[n] | results[beside[n]]]
    timed.sort(key=lambda name: -max(ratio(name, x) for x in _PASSES))
    lines = [
        (name, *(text for x in _PASSES for text in (f"{results[name][x]:.3f}",
                                                     f"{ratio(name, x):.2f}")))
        for name in timed
    ]  # fmt: skip
    heads = ("row", *(text for x in _PASSES for text in (f"{x}, ms", "x")))
    others = [f"{n}: {results[n].get('reason', 'no time beside it')}" for n in results
              if n not in timed]  # fmt: skip
    return "\n".join([report.table(heads, lines), *others])


if __name__ == "__main__":
    main()
