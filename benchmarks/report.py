"""Tables, plot and the block of docs/benchmarks.md from a results file: no figure is typed by hand.

python -m benchmarks.report benchmarks/results/nvidia-h200.json --page docs/benchmarks.md
python -m benchmarks.report benchmarks/results/nvidia-h200.json --plot docs/nvidia-h200.png
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import (
    BY_NAME,
    COPY_RATES,
    HOST_LIMITS,
    MEMORY_LIMITS,
    OURS,
    SOURCE,
    TANGENTS,
    Bar,
)

_NONE = "-"
Results = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Line:
    """One pass of one case, as the tables and the plot show it. Device times in ms."""

    case: str
    pass_name: str
    tflop: float | None
    ours: float | None
    peer: str  # the yardstick: a peer, or a row of ours
    yardstick: float | None
    call_ratio: float | None  # from call times
    others: dict[str, float | None]  # what else was timed in turns
    bar: Bar | None
    kernel: str

    @property
    def ratio(self) -> float | None:
        return self.yardstick / self.ours if self.ours and self.yardstick else None

    def of_bar(self, portable: bool = False) -> float | None:
        """The ratio over its bar; 1 passes."""
        bar = self.bar and (self.bar.portable if portable else self.bar.ratio)
        if bar:
            return self.ratio / bar if self.ratio else None
        return None if portable else self.of_goal()

    @property
    def wanted_ratio(self) -> float | None:
        """The bar as a ratio, from the goal where it has none."""
        if self.bar is None or self.bar.ratio:
            return self.bar and self.bar.ratio
        return self.yardstick / self.bar.goal if self.yardstick and self.bar.goal else None

    def of_goal(self) -> float | None:
        """The goal's time over ours."""
        return self.bar.goal / self.ours if self.bar and self.bar.goal and self.ours else None

    def rate(self, ms: float | None) -> float | None:
        """TFLOP/s."""
        return self.tflop / ms * 1e3 if self.tflop and ms else None


def _median(row: dict, peer: str, kind: str) -> float | None:
    times = row.get("peers", {}).get(peer, {}).get(kind)
    return times["median"] if times else None


def lines(results: Results) -> list[Line]:
    by_key = {(row["case"], row["pass"]): row for row in results["rows"] if "pass" in row}
    built = []
    for (name, pass_name), row in by_key.items():
        bar: Bar | None = getattr(BY_NAME[name], pass_name)
        peers = row.get("peers", {})
        ours = next((peer for peer in OURS if peer in peers), OURS[0])
        timed = [peer for peer in peers if peer != ours and _median(row, peer, "device")]
        other = bar.peer if bar else next(iter(timed), _NONE)
        # Ours of another case that was not timed in turns with it: from its own row.
        there = (row, other) if other in peers else (by_key.get((other, pass_name), {}), ours)
        their_call, our_call = _median(*there, "call"), _median(row, ours, "call")
        built.append(
            Line(
                case=name,
                pass_name=pass_name,
                tflop=row.get("tflop"),
                ours=_median(row, ours, "device"),
                peer=other,
                yardstick=_median(*there, "device"),
                call_ratio=their_call / our_call if their_call and our_call else None,
                others={peer: _median(row, peer, "device") for peer in timed if peer != other},
                bar=bar,
                kernel=row.get("kernel") or _NONE,
            )
        )
    return built


def _passes(built: list[Line]) -> list[str]:
    return list(dict.fromkeys(line.pass_name for line in built))


# ---- Tables --------------------------------------------------------------------------------------


def _number(value: float | None, digits: int = 2) -> str:
    return _NONE if value is None else f"{value:.{digits}f}"


def _verdict(of_bar: float | None) -> str:
    if of_bar is None:
        return _NONE
    return "pass" if of_bar >= 1 else f"{of_bar:.2f} of bar"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, aligned so that it also reads well in a terminal."""
    rows = [tuple(head), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        text.append(f"| {' | '.join(cells)} |")
    rules = ["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]
    text.insert(1, f"|{'|'.join(rules)}|")
    return "\n".join(text)


def _pass_table(built: list[Line], pass_name: str) -> str:
    head = (f"{pass_name}, device time", "kernel", "ms", "TFLOP/s", "yardstick", "ms", "ratio",
            "by call", "bar", "goal, ms", "verdict", "FA2's bar", "best peer TFLOP/s",
            "others, ms")  # fmt: skip
    rows = [
        (line.case, line.kernel, _number(line.ours, 3), _number(line.rate(line.ours), 1), line.peer,
         _number(line.yardstick, 3), _number(line.ratio), _number(line.call_ratio),
         _number(line.bar and line.bar.ratio), _number(line.bar and line.bar.goal, 3),
         _verdict(line.of_bar()), _verdict(line.of_bar(portable=True)),
         _number(line.bar and line.bar.best, 0),
         ", ".join(f"{ms:.3f} {peer}" for peer, ms in line.others.items()) or _NONE)
        for line in built
        if line.pass_name == pass_name
    ]  # fmt: skip
    return table(head, rows)


def _cache_table(results: Results, built: list[Line]) -> str:
    """How near few queries come to reading their cache as fast as memory is copied."""
    rate = COPY_RATES.get(results["device"])
    body = []
    for line in built:
        size = BY_NAME[line.case].cache_bytes
        if line.pass_name != "forward" or not size or not line.ours:
            continue
        speeds = [ms and size / ms * 1e3 for ms in (line.ours, line.yardstick)]
        body.append(
            (line.case, _number(size / 1e6, 0), _number(line.ours, 4),
             *(_number(s and s / 1e12) for s in speeds),
             _number(speeds[0] / rate if rate and speeds[0] else None))
        )  # fmt: skip
    head = ("few queries, forward", "MB read", "ms", "TB/s", "yardstick's", "of the copy rate")
    return table(head, body) if body else ""


def _other_tables(results: Results) -> list[str]:
    parts = []
    host = [row for row in results["rows"] if row["case"] in HOST_LIMITS and "peers" in row]
    if host:
        peers = list(host[0]["peers"])
        body = [
            (row["case"], *(_number(row["peers"][peer].get("us"), 1) for peer in peers),
             _number(HOST_LIMITS[row["case"]], 0))
            for row in host
        ]  # fmt: skip
        parts.append(table(("µs per call", *peers, "limit"), body))
    body = [
        (row["case"], _number(row["memory"]["judged_bytes"] / 1e9, 3),
         _number(MEMORY_LIMITS[row["case"]] / 1e9, 1), _number(row["memory"]["seconds"]))
        for row in results["rows"]
        if "memory" in row
    ]  # fmt: skip
    if body:
        parts.append(table(("forward and gradients", "GB", "limit", "s, first call"), body))
    return parts


def _summaries(built: list[Line]) -> str:
    """The grid as a whole, pass by pass."""
    text = []
    for pass_name in _passes(built):
        wanted = (("the bars", 512, False), ("FlashAttention-2's bars", 2048, True))
        for name, shortest, portable in wanted:
            found = {
                line.case: of_bar
                for line in built
                if line.case.startswith("grid/") and line.pass_name == pass_name
                if BY_NAME[line.case].q_len >= shortest and (of_bar := line.of_bar(portable))
            }
            if found:
                mean = math.exp(sum(map(math.log, found.values())) / len(found))
                worst = min(found, key=found.__getitem__)
                text.append(
                    f"- {pass_name}, ratios over {name}, {len(found)} rows of the grid with "
                    f"S >= {shortest}: geometric mean {mean:.3f}, lowest "
                    f"{found[worst]:.3f} ({worst})"
                )
    if not text:
        return ""
    explained = (
        "A ratio over a bar is that ratio divided by the bar. *FlashAttention-2's bar* is that of "
        "FlashAttention-2 as it was recorded, in place of the best peer."
    )
    return "\n".join((explained, "", *text))


def _intro(results: Results) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in results["versions"].items())
    return (
        f"`{results['command']}` on {results['device']}, {results['date'][:10]}, commit "
        f"{results['commit'][:12]}; {versions}.\nMedians of one run, peers interleaved, inputs "
        "random normal and not in the cache."
    )


def markdown(results: Results) -> str:
    """Every table of a run."""
    built = lines(results)
    intro = (
        _intro(results) + " *ratio*: speed of ours over the yardstick's; *bar*: "
        "that of the best recorded peer over jax.nn's, or a goal that was set."
    )
    tables = [_pass_table(built, pass_name) for pass_name in _passes(built)]
    parts = [intro, *tables, _summaries(built), _cache_table(results, built)]
    parts += [*_other_tables(results)]
    parts += [SOURCE] if results["platform"] == "gpu" else []
    return "\n\n".join(part for part in parts if part)


def page_block(results: Results) -> str:
    """What the page shows: a line per case, all passes; those with tangents by themselves."""
    built = lines(results)
    tangents = [line for line in built if line.pass_name in TANGENTS]
    others = [line for line in built if line not in tangents]
    explained = (
        "A case is head size, length and mask (16,384 tokens, 2048 / head size heads, bfloat16) or "
        "a shape of `benchmarks/cases.py`; *x* is the peer's time divided by ours; in brackets, "
        "its *bar*: the same for the best recorded peer of any framework or, without one, for a "
        "goal."
    )
    tables = [_page_table(group) for group in (others, tangents) if group]
    return "\n\n".join(
        part for part in (_intro(results), explained, *tables, _summaries(built), SOURCE) if part
    )


def _page_table(built: list[Line]) -> str:
    passes = _passes(built)
    by_case: dict[str, dict[str, Line]] = {}
    for line in built:
        if line.ours is not None and line.yardstick is not None:
            by_case.setdefault(line.case, {})[line.pass_name] = line

    def cells(line: Line | None) -> list[str]:
        if line is None:
            return [_NONE] * 3
        goal = line.wanted_ratio
        return [
            _number(line.ours, 3),
            f"{_number(line.yardstick, 3)} {line.peer}",
            _number(line.ratio) + (f" ({goal:.2f})" if goal else ""),
        ]

    head = ["case", *(f"{name}, {what}" for name in passes for what in ("ms", "peer, ms", "x"))]
    rows = [
        [case, *(cell for name in passes for cell in cells(of_passes.get(name)))]
        for case, of_passes in by_case.items()
    ]
    return table(head, rows)


def text(results: Results) -> str:
    """Everything, for a terminal."""
    parts = [markdown(results)]
    for key in ("gpu_before", "gpu_after"):
        if key in results:
            state = ", ".join(f"{name} {value}" for name, value in results[key].items())
            parts.append(f"{key.replace('_', ' ')}: {state}")
    for row in results["rows"]:
        name = f"{row['case']} {row.get('pass', '')}".strip()
        missing = [f"{p}: {e['reason']}" for p, e in row.get("peers", {}).items() if "reason" in e]
        missing += [row["skipped"]] if "skipped" in row else []
        parts += [f"{name}: {'; '.join(missing)}"] if missing else []
        parts += [f"{name} launches {k['count']} x {k['ms'] / k['count']:.4f} ms {k['name'][:90]}"
                  for k in row.get("launched", ())]  # fmt: skip
    return "\n\n".join([parts[0], "\n".join(parts[1:])]).rstrip()


def progress(row: dict) -> str:
    """One line about a row just measured."""
    peers = (
        f"{name} {_number(_median(row, name, 'device'), 3)} ms "
        f"(call {_number(_median(row, name, 'call'), 3)})"
        if "device" in entry
        else f"{name}: {entry['reason']}"
        for name, entry in row["peers"].items()
    )
    return f"{row['case']} {row['pass']}: " + ", ".join(peers)


def failures(results: Results) -> list[str]:
    """What should have run and did not, or gave another result than the peer."""
    found = [f"{row['case']}: {row['skipped']}" for row in results["rows"] if row.get("failed")]
    for row in results["rows"]:
        for peer, entry in row.get("peers", {}).items():
            if entry.get("failed"):
                why = entry.get("reason") or entry.get("unchecked")
                why = why or f"differs by {entry['difference']:.1e}"
                found.append(f"{row['case']} {row.get('pass', '')} {peer}: {why}")
    return found


def write_page(results: Results, name: str, path: Path) -> None:
    """Replaces what stands between the marks of that name."""
    block = f"<!-- {name} -->\n{page_block(results)}\n<!-- /{name} -->"
    pattern = rf"<!-- {name} -->.*?<!-- /{name} -->"
    new, count = re.subn(pattern, lambda _: block, path.read_text(), flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"{path} has {count} blocks between the marks <!-- {name} -->")
    path.write_text(new)


# ---- Plot ----------------------------------------------------------------------------------------


def plot(results: Results, path: Path) -> None:
    """TFLOP/s of ours and of the yardstick, and what the bar asks for."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("benchmarks.report --plot needs matplotlib") from None

    matplotlib.use("Agg")  # no display is needed
    import matplotlib.pyplot as plt

    drawn = [line for line in lines(results) if line.ours or line.yardstick]
    passes = _passes(drawn)
    if not drawn:
        return
    size = (max(6.0, 0.45 * len(drawn) / len(passes)), 4.5 * len(passes))
    figure, axes = plt.subplots(len(passes), 1, figsize=size, squeeze=False)
    for axis, pass_name in zip(axes[:, 0], passes, strict=True):
        chosen = [line for line in drawn if line.pass_name == pass_name]
        at = range(len(chosen))
        # A yardstick that is a row of ours has its own bar in the plot.
        theirs = [None if line.peer in BY_NAME else line.rate(line.yardstick) for line in chosen]
        ours = [line.rate(line.ours) for line in chosen]
        for shift, rates, label in (
            (-0.2, ours, "jaxflash"),
            (0.2, theirs, "jax.nn: cuDNN or XLA"),
        ):
            axis.bar([i + shift for i in at], [rate or 0 for rate in rates], 0.4, label=label)
        goals = [
            (line.rate(line.yardstick) or math.nan) * (line.wanted_ratio or math.nan)
            for line in chosen
        ]
        axis.scatter(at, goals, marker="_", c="black", label="bar")
        axis.set_xticks(at, [line.case for line in chosen], rotation=60, ha="right", fontsize=8)
        axis.set(ylabel="TFLOP/s", title=f"{pass_name}, {results['device']}")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("results", type=Path, help="a file that benchmarks.run wrote")
    parser.add_argument("--page", type=Path, help="replace the block of that name on this page")
    parser.add_argument("--plot", type=Path, help="draw the figure into this file")
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text())
    print(text(results))
    if arguments.plot:
        plot(results, arguments.plot)
    if arguments.page:
        write_page(results, arguments.results.stem, arguments.page)


if __name__ == "__main__":
    main()
