"""Finds the fastest tiles of a Hopper kernel: compiles candidates, checks each, times each.

    python -m benchmarks.sweep forward/128                 # which row of tile_config.h is best?
    python -m benchmarks.sweep backward/64 --shapes 32,512,512,32,32,64:causal
    python -m benchmarks.sweep forward/128 --tile "wide=ForwardTile<128, 128, 2, 176, ...>"
    python -m benchmarks.sweep forward/64 forward/128 --build-only --output build
    python -m benchmarks.sweep --output build              # runs what was built there

Needs nvcc to build and a Hopper GPU to run, and nothing of JAX. Candidates take turns shape by
shape, so that heat and clocks hit all alike (whoever comes first meets a cooler chip: 5 %); a
figure is the median of its rounds. What was learnt goes into docs/experiments.md and, as the reason
of a row, into cuda/sm90/tile_config.h.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import re
import runpy
import statistics
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent

# Tiles by pass and head size (query/value where they differ): those of tile_config.h by name, and
# others that have come close to them at some shape.
CANDIDATES: dict[str, dict[str, str]] = {
    "forward/64": {
        "four": "ForwardTileFor<64, 64>::Four",
        "short": "ForwardTileFor<64, 64>::Short",
        "turns": "ForwardTile<64, 64, 4, 64, 8, 2, Overlap::kNone, Output::kStaged, true>",
        "one-unit": "ForwardTileFor<64, 64>::OneUnit",
        "two-units": "ForwardTileFor<64, 64>::TwoUnits",
        "three": "ForwardTile<64, 64, 3, 128, 4, 2, Overlap::kNone, Output::kStaged, true>",
    },
    "forward/96": {
        "long": "ForwardTileFor<96, 96>::Long",
        "medium": "ForwardTileFor<96, 96>::Medium",
        "short": "ForwardTileFor<96, 96>::Short",
        "values": "ForwardTile<96, 96, 3, 112, 2, 2, Overlap::kValues, Output::kStaged, false>",
    },
    "forward/128": {
        "long": "ForwardTileFor<128, 128>::Long",
        "medium": "ForwardTileFor<128, 128>::Medium",
        "diagonal": "ForwardTileFor<128, 128>::Diagonal",
        "short": "ForwardTileFor<128, 128>::Short",
        "one-unit": "ForwardTileFor<128, 128>::OneUnit",
        "two-units": "ForwardTileFor<128, 128>::TwoUnits",
        "direct": "ForwardTile<128, 128, 3, 80, 4, 1, Overlap::kNone, Output::kDirect, true>",
        "values": "ForwardTile<128, 128, 3, 80, 3, 2, Overlap::kValues, Output::kStaged, true>",
        "wide": "ForwardTile<128, 128, 2, 176, 2, 1, Overlap::kValues, Output::kStaged, true>",
    },
    "forward/192/128": {
        "long": "ForwardTileFor<192, 128>::Long",
        "short": "ForwardTileFor<192, 128>::Short",
        "values": "ForwardTile<192, 128, 3, 80, 3, 1, Overlap::kValues, Output::kStaged, true>",
    },
    "forward/192": {
        "long": "ForwardTileFor<192, 192>::Long",
        "96": "ForwardTile<192, 192, 2, 96, 2, 1, Overlap::kValues, Output::kDirect, true>",
    },
    "forward/256": {
        "long": "ForwardTileFor<256, 256>::Long",
        "one-unit": "ForwardTileFor<256, 256>::OneUnit",
        "two-units": "ForwardTileFor<256, 256>::TwoUnits",
        "80": "ForwardTile<256, 256, 2, 80, 2, 1, Overlap::kValues, Output::kDirect, true>",
        "free": "ForwardTile<256, 256, 2, 64, 2, 1, Overlap::kValues, Output::kDirect, false>",
    },
    "backward/64": {
        "now": "BackwardTileFor<64, 64>::Type",
        "one-key-stage": "BackwardTile<64, 64, 128, 128, 2, 2, KeyOwners::kBlock, 1, 2>",
        "none-held": "BackwardTile<64, 64, 128, 128, 2, 2, KeyOwners::kBlock, 2>",
    },
    "backward/128": {
        "now": "BackwardTileFor<128, 128>::Type",
        "none-held": "BackwardTile<128, 128, 64, 128, 2, 2, KeyOwners::kBlock>",
    },
    "backward/96": {
        "now": "BackwardTileFor<96, 96>::Type",
        "none-held": "BackwardTile<96, 96, 64, 128, 2, 2, KeyOwners::kBlock>",
        "of-128": "BackwardTileFor<128, 128>::Type",
    },
    "backward/192/128": {
        "now": "BackwardTileFor<192, 128>::Type",
        "one-dout": "BackwardTile<192, 128, 64, 64, 2, 1, KeyOwners::kPair>",
        "of-256": "BackwardTileFor<256, 256>::Type",
    },
    "backward/192": {
        "now": "BackwardTileFor<192, 192>::Type",
        "one-dout": "BackwardTile<192, 192, 64, 64, 2, 1, KeyOwners::kPair>",
        "of-256": "BackwardTileFor<256, 256>::Type",
    },
    "backward/256": {
        "now": "BackwardTileFor<256, 256>::Type",
    },
}


def grid(group: str, lengths: list[int]) -> list[str]:
    """The benchmark's grid: 16,384 tokens a call, 2,048 columns of queries."""
    dims = group.split("/", 1)[1].split("/")
    heads = max(2048 // int(dims[0]), 1)
    return [
        f"{16384 // length},{length},{length},{heads},{heads},{','.join(dims)}{mask}"
        for mask in ("", ":causal")
        for length in lengths
    ]


def wgmma_of_all_sizes(cuda: Path) -> str:
    """wgmma.cuh as the library has it, but for every size that a tile may want to try."""
    script = runpy.run_path(str(cuda / "sm90" / "hardware" / "generate_wgmma.py"))
    return script["HEADER"] + "".join(map(script["struct"], range(8, 257, 8))) + script["FOOTER"]


# Of the candidate: kernels around it are the library's own.
_SPILLS = re.compile(r"entry function '\w*ward_kernel.*\n.*\n.* ([1-9]\d* bytes spill stores)")


def build(group: str, name: str, tile: str, cuda: Path, folder: Path) -> str | None:
    """Compiles one candidate; returns what ptxas complained of, if anything."""
    hardware = folder / "sm90" / "hardware"
    hardware.mkdir(parents=True, exist_ok=True)
    (hardware / "wgmma.cuh").write_text(wgmma_of_all_sizes(cuda))
    (folder / "candidate.h").write_text(
        f"#define SWEEP_FORWARD {int(group.startswith('forward/'))}\n#define SWEEP_TILE {tile}\n"
    )
    command = [
        os.environ.get("NVCC", "nvcc"), "-std=c++17", "-O3", "-cudart=static", "-Xptxas=-v",
        "-gencode=arch=compute_90a,code=sm_90a", f"-I{folder}", f"-I{cuda}",
        "-include", folder / "candidate.h", _HERE / "sweep.cu", cuda / "delta.cu",
        "-o", folder / "sweep",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    log = done.stdout + done.stderr
    (folder / "build.log").write_text(log)
    if done.returncode != 0:
        return log
    complaints = re.findall(r"^.*C75\d\d.*$", log, re.MULTILINE)
    spills = _SPILLS.findall(log)
    return "; ".join(dict.fromkeys(complaints + spills)) or None


def run(folder: Path, *arguments: str, limit: float = 60.0) -> tuple[int, list[dict]]:
    """What an executable prints, one object a line. One that hangs is stopped."""
    try:
        done = subprocess.run(
            [folder / "sweep", *arguments], capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return 124, [{"failed": f"no answer in {limit:.0f} s"}]
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def sweep(
    group: str, folders: list[Path], shapes: list[str], *, rounds: int, check: bool, burst: bool
) -> bool:
    """Prints a table of times and the winner of each shape; false where a check failed."""
    right = []
    for folder in folders:
        code, lines = run(folder, "check") if check else (0, [])
        if code == 0:
            right.append(folder)
            continue
        print(f"{group} {folder.name}: WRONG")
        for line in lines[:12] + lines[-1:]:
            print("   ", json.dumps(line))
    lines_of: dict[tuple[str, str], list[dict]] = {}
    for i in range(rounds):
        for shape in shapes:
            for folder in right if i % 2 == 0 else reversed(right):
                for line in run(folder, "burst" if burst else "time", shape)[1]:
                    if "ms" in line:
                        lines_of.setdefault((folder.name, shape), []).append(line)
                    else:
                        print(f"{group} {folder.name}: {line}")

    def median(name: str, shape: str, figure: str) -> float:
        return statistics.median(line[figure] for line in lines_of[name, shape])

    print(f"{group}: TFLOP/s, ms, share of the matrix units' rate at the clock")
    width = max((len(shape) for shape in shapes), default=0)
    print(" " * width, *(f"{folder.name:>20}" for folder in right))
    for shape in shapes:
        names = [folder.name for folder in right if (folder.name, shape) in lines_of]
        cells = {
            name: f"{median(name, shape, 'tflops'):.0f} {median(name, shape, 'ms'):.4f} "
            f"{median(name, shape, 'use'):.2f}"
            for name in names
        }
        best = min(names, key=lambda name: median(name, shape, "ms"), default="-")
        print(f"{shape:{width}}", *(f"{cells.get(f.name, '-'):>20}" for f in right), f" {best}")
    sys.stdout.flush()
    return len(right) == len(folders)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(CANDIDATES))
    parser.add_argument("--tile", action="append", default=[], metavar="NAME=TILE",
                        help="instead of the listed candidates")  # fmt: skip
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048, 8192, 16384],
                        help="of the grid of shapes")  # fmt: skip
    parser.add_argument("--shapes", nargs="+", help="instead of the grid (see sweep.cu)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--burst", action="store_true",
                        help="the first 15 ms after a pause instead of sustained load")  # fmt: skip
    parser.add_argument("--no-check", action="store_true", help="time only")
    parser.add_argument("--cuda", type=Path, default=_HERE.parent / "cuda", help="the sources")
    parser.add_argument("--output", type=Path, default=Path("build/sweep"))
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()

    given = dict(tile.split("=", 1) for tile in arguments.tile)
    for group in arguments.groups:
        if not re.fullmatch(r"(forward|backward)/\d+(/\d+)?", group):
            parser.error(f"a group is forward/HEAD_DIM[/VALUE_DIM] or backward/..., not {group!r}")
        if not given and group not in CANDIDATES:
            parser.error(f"no candidates are listed for {group}: give some with --tile")
    complaints = 0
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        jobs = {
            (group, name): pool.submit(
                build, group, name, tile, arguments.cuda.resolve(),
                (arguments.output / group.replace("/", "-") / name).resolve(),
            )
            for group in arguments.groups
            for name, tile in (given or CANDIDATES[group]).items()
        }  # fmt: skip
        for (group, name), job in jobs.items():
            if complaint := job.result():
                complaints += 1
                print(f"{group} {name}: {complaint}")
    if arguments.build_only:
        return 1 if complaints else 0

    ok = complaints == 0
    for path in sorted(arguments.output.iterdir()):
        group = path.name.replace("-", "/")
        if arguments.groups and group not in arguments.groups:
            continue
        folders = sorted(folder for folder in path.iterdir() if (folder / "sweep").exists())
        shapes = arguments.shapes or grid(group, arguments.lengths)
        ok &= sweep(
            group, folders, shapes,
            rounds=arguments.rounds, check=not arguments.no_check, burst=arguments.burst,
        )  # fmt: skip
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
