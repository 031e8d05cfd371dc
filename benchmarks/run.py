"""Times jaxflash, jax.nn with cuDNN and jax.nn with XLA in one run and one process.

    python -m benchmarks.run                           # the grid, other shapes, host, memory
    python -m benchmarks.run --cases 'grid/128-*' --passes forward --quick
    python -m benchmarks.run --cases 'deterministic/*' --passes backward
    python -m benchmarks.run --cases 'score/*' 'mask/*' 'paged/*' 'derivative/*' --quick
    python -m benchmarks.run --cases 'grid/128-8192*' --passes gradient --profile
    python -m benchmarks.run --platform cpu            # the blockwise path against jax.nn
    python -m benchmarks.run --platform cpu --tiny     # that rows run and are right; no times

A full run writes benchmarks/results/<device>.json; a run with a selection writes only with
--output. What is timed, and how, is in benchmarks/timing.py; the bars are in benchmarks/cases.py.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# Command buffers (CUDA graphs) may run independent passes side by side, which is not what a pass
# takes. XLA reads its flags once, before its first use.
_NO_COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer="
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_NO_COMMAND_BUFFERS}".strip()

import jax  # noqa: E402

from benchmarks import cases, extra, report, timing  # noqa: E402
from jaxflash import _config, _extension  # noqa: E402

_HERE = Path(__file__).resolve().parent
_GPU_DEFAULTS = ("jaxflash", "cudnn")
_CPU_DEFAULTS = ("blockwise", "xla")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cases", nargs="+", metavar="GLOB", help="names of rows (see --list)")
    parser.add_argument(
        "--passes", nargs="+", choices=cases.PASSES, help="instead of the case's own"
    )
    parser.add_argument("--peers", nargs="+", choices=timing.PEERS, help="ours first")
    parser.add_argument("--xla", action="store_true", help="jax.nn's XLA path in every row too")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter samples")
    parser.add_argument("--tiny", action="store_true",
                        help="sizes of no meaning: whether rows run and are right")  # fmt: skip
    parser.add_argument("--profile", action="store_true", help="record the kernels of our passes")
    parser.add_argument("--limit", type=float, default=float("inf"), metavar="SECONDS",
                        help="skip, and say so, what has not begun by then")  # fmt: skip
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--output", type=Path, metavar="JSON", help="where to write the results")
    parser.add_argument("--list", action="store_true", help="print the names of the rows and exit")
    return parser.parse_args()


def rows_of(arguments: argparse.Namespace) -> dict[str, cases.Case | None]:
    """Every row that can be asked for, by name; what is not a case of `timing` is None."""
    if arguments.tiny:
        return {name: case.tiny(arguments.platform) for name, case in cases.BY_NAME.items()}
    on_gpu = arguments.platform == "gpu"
    others = [extra.LONG_GPU.name, *cases.HOST_LIMITS] if on_gpu else [extra.LONG_CPU.name]
    fitting = {n: c for n, c in cases.BY_NAME.items() if c.platform == arguments.platform}
    return dict.fromkeys(others) | fitting


def selected(arguments: argparse.Namespace) -> dict[str, cases.Case | None]:
    rows = rows_of(arguments)
    if not arguments.cases:
        return {name: case for name, case in rows.items() if case is None or case.by_default}
    for pattern in arguments.cases:
        if not fnmatch.filter(rows, pattern):
            raise SystemExit(f"--cases: nothing is called {pattern!r}; --list prints the names")
    return {
        name: case
        for name, case in rows.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in arguments.cases)
    }


def nvidia_smi() -> dict[str, str]:
    """Name, driver and the state of the GPU that JAX uses first."""
    fields = ("name", "driver_version", "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        line = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        return {"unknown": timing.first_line(error)}
    return dict(zip(fields, (word.strip() for word in line.split(",")), strict=True))


def commit() -> str:
    """JAXFLASH_COMMIT, or what git says of the checkout."""
    given = os.environ.get("JAXFLASH_COMMIT")
    if given:
        return given

    def git(*words: str) -> str:
        run = subprocess.run(
            ["git", *words], cwd=_HERE.parent, check=True, capture_output=True, text=True
        )
        return run.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
        return git("rev-parse", "HEAD") + ("-changed" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def kernel_of(case: cases.Case, pass_name: str) -> str | None:
    """What runs the pass on this GPU: the variant that dispatch picks, or one of the run time."""
    if not _extension.kernels or pass_name not in ("forward", "backward"):
        return None
    if not case.plain:
        return "run time"
    query, key, value = map(list, case.qkv_shapes.values())
    variant = _extension.variant(
        pass_name=pass_name,
        dtype=case.dtype,
        highest_precision=False,
        q=query,
        k=key,
        v=value,
    )
    if variant is None:
        return None
    family, *head_sizes = variant
    return f"{family} {'/'.join(dict.fromkeys(map(str, head_sizes)))}"


def labels_of(case: cases.Case, pass_name: str, arguments: argparse.Namespace) -> list[str]:
    """The peers asked for, or the usual ones, the yardstick of the bar and what is beside."""
    if arguments.peers:
        return list(dict.fromkeys((*arguments.peers, *(["xla"] if arguments.xla else []))))
    labels = list(_GPU_DEFAULTS if arguments.platform == "gpu" else _CPU_DEFAULTS)
    bar = getattr(case, pass_name)
    labels += [bar.peer] if bar is not None else []
    labels += [*case.beside, *(["xla"] if arguments.xla else [])]
    here = arguments.platform == "gpu"
    return [label for label in dict.fromkeys(labels) if here or label != "cudnn"]


def measure_case(case: cases.Case, arguments, late) -> list[dict[str, Any]]:
    results = []
    rows = rows_of(arguments)
    sets: dict[str, list[timing.InputSet]] = {}

    def contender(label: str, ours: str) -> timing.Contender:
        """A peer, or ours of another case."""
        peer, named = (label, case) if label in timing.PEERS else (ours, rows[label])
        assert named is not None
        if named.name not in sets:
            sets[named.name] = timing.input_sets(named)
        return timing.Contender(peer, named, sets[named.name])

    for pass_name in arguments.passes or case.passes:
        row: dict[str, Any] = {"case": case.name, "pass": pass_name}
        if late():
            results.append(row | {"skipped": "the time limit was reached"})
            continue
        labels = labels_of(case, pass_name, arguments)
        contenders = {label: contender(label, labels[0]) for label in labels}
        repeats, seconds = (3, 0.010) if arguments.quick else (7, 0.025)
        if arguments.tiny:
            repeats, seconds = 1, 0.0
        row["peers"] = timing.measure(contenders, pass_name, repeats=repeats, seconds=seconds)
        row["tflop"] = case.flops(pass_name) / 1e12
        ours = next((p for p in cases.OURS if "device" in row["peers"].get(p, ())), None)
        if ours == "jaxflash":
            row["kernel"] = kernel_of(case, pass_name)
        if arguments.profile and ours:
            row["launched"] = extra.launched(contenders[ours], pass_name)
        results.append(row)
        print(report.progress(row), file=sys.stderr, flush=True)
    return results


def measure_other(name: str, arguments, late) -> dict[str, Any]:
    if late():
        return {"case": name, "skipped": "the time limit was reached"}
    try:
        if name in cases.HOST_LIMITS:
            peers = list(arguments.peers or (*_GPU_DEFAULTS, "xla"))
            outcome = {"peers": extra.host_row(name, peers, repeats=3 if arguments.quick else 7)}
        else:
            on_gpu = name == extra.LONG_GPU.name
            outcome = {"memory": extra.gpu_memory() if on_gpu else extra.cpu_memory()}
    except Exception as error:
        outcome = {"skipped": timing.first_line(error), "failed": True}
    print(name, json.dumps(outcome), file=sys.stderr, flush=True)
    return {"case": name, **outcome}


def main() -> None:
    arguments = parse_arguments()
    if arguments.list:
        print(*rows_of(arguments), sep="\n")
        return
    if arguments.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "gpu":
        raise SystemExit("JAX finds no GPU here; --platform cpu times the blockwise path instead")
    config = _config.config()
    peers = arguments.peers or (_GPU_DEFAULTS if arguments.platform == "gpu" else _CPU_DEFAULTS)
    if "jaxflash" in peers and not config.kernels:
        raise SystemExit("this jaxflash was built without CUDA kernels")

    rows = selected(arguments)
    device = jax.devices()[0].device_kind
    start = time.monotonic()

    def late() -> bool:
        return time.monotonic() - start > arguments.limit

    command = shlex.join(sys.argv[1:]).replace(f"--output {arguments.output}", "")
    results: dict[str, Any] = {
        "command": f"python -m benchmarks.run {command}".strip(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "device": device if arguments.platform == "gpu" else f"{device}, {os.cpu_count()} cores",
        "platform": arguments.platform,
        "versions": {
            "jaxflash": config.version,
            "jax": config.jax_version,
            "jaxlib": config.jaxlib_version,
            "kernels": config.build_info or "none",
        },
        "xla_flags": os.environ["XLA_FLAGS"],
        "rows": [],
    }
    if arguments.platform == "gpu":
        results["gpu_before"] = nvidia_smi()
        if not arguments.peers or "jaxflash" in arguments.peers:
            timing.compile_ahead([case for case in rows.values() if case is not None])
            results["seconds_compiling_ahead"] = round(time.monotonic() - start, 1)
    for name, case in rows.items():  # memory first: see extra.gpu_memory
        if case is None:
            results["rows"].append(measure_other(name, arguments, late))
        else:
            results["rows"] += measure_case(case, arguments, late)
    if arguments.platform == "gpu":
        results["gpu_after"] = nvidia_smi()
    results["seconds"] = round(time.monotonic() - start, 1)

    output = arguments.output
    selection = (arguments.cases, arguments.passes, arguments.peers, arguments.tiny)
    if output is None and not any(selection) and not arguments.quick:
        slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
        output = _HERE / "results" / f"{slug}.json"
    print(f"{len(results['rows'])} passes ran" if arguments.tiny else report.text(results))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(results, indent=1) + "\n")
        print(f"\nwritten: {output}")
    failed = report.failures(results)
    if failed:
        raise SystemExit("\n".join(["", "FAILED:", *failed]))


if __name__ == "__main__":
    main()
