"""Checks this installation: what it was built with, a numerical self-test, times beside jax.nn.

    python -m jaxflash
    python -m jaxflash --batch 2 --length 2048 8192 --heads 32 --kv-heads 8 --head-size 128 --causal
    python -m jaxflash --length 4096 --window 1023 0 --soft-cap 50 --sink --no-backward
    python -m jaxflash --json report.json --plot times.png

Times are medians over back-to-back calls of compiled programs: forward is the output alone,
backward the gradients of query, key and value from what the forward pass saved. TFLOP/s count what
band, lengths and segments leave visible; the share is that of a large matrix product in the same
run. Memory is that of results and temporaries, as compiled. The error is the relative difference
to jaxflash.reference in the first heads of the first sequence.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxflash import _check, _config, _support
from jaxflash._mask import ALIGNMENTS
from jaxflash._spec import IMPLEMENTATIONS

_EXTRA = "pip install 'jaxflash[cli]'"


# ---- Arguments ---------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxflash",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shape = parser.add_argument_group("shape of the timed call (small by default, on a CPU tiny)")
    shape.add_argument("--batch", type=int, metavar="B")
    shape.add_argument("--length", type=int, nargs="+", metavar="T", help="each is timed")
    shape.add_argument("--kv-length", type=int, metavar="S", help="of keys and values; default T")
    shape.add_argument("--heads", type=int, metavar="N")
    shape.add_argument("--kv-heads", type=int, metavar="K", help="default N")
    shape.add_argument("--head-size", type=int, metavar="H")
    shape.add_argument("--value-head-size", type=int, metavar="h", help="default H")
    shape.add_argument("--dtype", choices=("bfloat16", "float16", "float32"))

    options = parser.add_argument_group("options of the call")
    options.add_argument("--causal", action="store_true")
    options.add_argument("--causal-alignment", choices=ALIGNMENTS, default="top_left")
    options.add_argument(
        "--window",
        type=_side,
        nargs="+",
        metavar="SIDE",
        help="local_window_size: left and right, or one for both; none is no limit",
    )
    options.add_argument("--query-lengths", type=int, nargs="+", metavar="L", help="B of them")
    options.add_argument("--kv-lengths", type=int, nargs="+", metavar="L", help="B of them")
    options.add_argument("--segments", type=int, metavar="COUNT", help="packed, of equal length")
    options.add_argument(
        "--bias",
        nargs="?",
        const="NTS",
        type=_axes,
        metavar="AXES",
        help="shape in the letters B, N, T, S and 1; NTS without it",
    )
    options.add_argument(
        "--mask",
        nargs="?",
        const="TS",
        type=_axes,
        metavar="AXES",
        help="likewise, half of it True; TS without it",
    )
    options.add_argument("--scale", type=float)
    options.add_argument("--soft-cap", type=float, metavar="CAP")
    options.add_argument("--sink", action="store_true")
    options.add_argument("--alibi", action="store_true")
    options.add_argument("--dropout", type=float, default=0.0, metavar="RATE")
    options.add_argument("--precision", choices=("default", "high", "highest"))
    options.add_argument("--deterministic-backward", action="store_true")

    run = parser.add_argument_group("run")
    run.add_argument(
        "--backward",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="time the gradient too",
    )
    run.add_argument(
        "--implementation",
        choices=IMPLEMENTATIONS,
        help="default: None, the kernels where they take the call",
    )
    run.add_argument("--seconds", type=float, default=0.25, help="of sampling per time")
    run.add_argument("--self-test", action=argparse.BooleanOptionalAction, default=True)
    run.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write everything as JSON; without FILE to stdout, in place of the text",
    )
    run.add_argument("--plot", type=Path, metavar="FILE", help="of the times (png, svg, pdf)")
    return parser  # fmt: skip


def _side(text: str) -> int | None:
    try:
        return None if text.lower() == "none" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"a side is a number of keys or none, got {text!r}"
        ) from None


def _axes(text: str) -> str:
    # Of the shape (B, N, T, S), any leading axes left out.
    if len(text) > 4 or any(
        letter not in (axis, "1") for letter, axis in zip(text.rjust(4, "1"), "BNTS", strict=True)
    ):
        raise argparse.ArgumentTypeError(
            "the axes are the last ones of B, N, T and S, each as its letter or as 1 (NTS, 1N1S), "
            f"got {text!r}"
        )
    return text


def _calls(arguments: argparse.Namespace) -> list[_check.Call]:
    """The calls to time, one for each length."""
    on_gpu = jax.default_backend() == "gpu"
    window = arguments.window
    if window is not None and len(window) > 2:
        raise ValueError(f"--window takes one side or two, got {window}")
    if not 0 < arguments.seconds < math.inf:
        raise ValueError(f"--seconds must be positive and finite, got {arguments.seconds:g}")
    heads = _or(arguments.heads, 16 if on_gpu else 2)
    head_size = _or(arguments.head_size, 128 if on_gpu else 64)
    batch = _or(arguments.batch, 2 if on_gpu else 1)
    for name in ("query_lengths", "kv_lengths"):
        lengths = getattr(arguments, name)
        if lengths is not None and len(lengths) != batch:
            raise ValueError(f"--{name.replace('_', '-')} takes {batch} lengths, got {lengths}")
    if arguments.segments is not None and arguments.segments < 1:
        raise ValueError(f"--segments must be at least 1, got {arguments.segments}")
    calls = []
    for length in arguments.length or ([4096] if on_gpu else [512]):
        kv_len = _or(arguments.kv_length, length)
        kv_heads = _or(arguments.kv_heads, heads)
        value_size = _or(arguments.value_head_size, head_size)
        sizes = dict(
            batch=batch,
            length=length,
            kv_length=kv_len,
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            value_head_size=value_size,
        )
        for name, size in sizes.items():
            if not 1 <= size < 2**31:
                raise ValueError(
                    f"--{name.replace('_', '-')} must be at least 1 and below 2**31, got {size}"
                )
        call = _check.Call(
            batch=batch,
            q_len=length,
            kv_len=kv_len,
            q_heads=heads,
            kv_heads=kv_heads,
            head_dim=head_size,
            value_dim=value_size,
            dtype=arguments.dtype or ("bfloat16" if on_gpu else "float32"),
            scale=arguments.scale,
            is_causal=arguments.causal,
            causal_alignment=arguments.causal_alignment,
            local_window_size=None if window is None else (window[0], window[-1]),
            query_lengths=arguments.query_lengths and tuple(arguments.query_lengths),
            kv_lengths=arguments.kv_lengths and tuple(arguments.kv_lengths),
            bias=arguments.bias,
            mask=arguments.mask,
            segments=arguments.segments,
            logits_soft_cap=arguments.soft_cap,
            sink=arguments.sink,
            alibi=arguments.alibi,
            dropout_rate=arguments.dropout,
            precision=arguments.precision,
            deterministic_backward=arguments.deterministic_backward,
        )
        memory = _check.memory()
        if memory is not None and call.operand_bytes > memory:
            raise ValueError(
                f"the arrays of the call would take {call.operand_bytes / 2**30:.1f} GiB, of "
                f"{memory / 2**30:.1f} GiB that there are"
            )
        reasons = call.check()
        if arguments.implementation == "cuda":
            reasons = (*reasons, *_support.reasons_against_machine())
        if reasons and arguments.implementation == "cuda":
            raise ValueError(f"--implementation cuda cannot take this call: {'; '.join(reasons)}")
        calls.append(call)
    return calls


def _or(given: int | None, default: int) -> int:
    return default if given is None else given


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Before anything is measured."""
    if arguments.plot is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError(f"--plot needs matplotlib: {_EXTRA}")
        from matplotlib.backend_bases import FigureCanvasBase

        formats = FigureCanvasBase.get_supported_filetypes()
        if arguments.plot.suffix[1:].lower() not in formats:
            raise ValueError(
                f"--plot must end in one of {', '.join(formats)}, got {arguments.plot}"
            )
    files = [arguments.plot] if arguments.plot else []
    files += [Path(arguments.json)] if arguments.json not in (None, "-") else []
    for file in files:
        if file.is_dir():
            raise ValueError(f"cannot write {file}: it is a folder")
        if not os.access(file.parent, os.W_OK):
            raise ValueError(f"cannot write {file}: no folder {file.parent} that can be written to")
        if file.exists() and not os.access(file, os.W_OK):
            raise ValueError(f"cannot write {file}: it may not be written to")


# ---- What is asked of the machine ----------------------------------------------------------------


def _environment() -> dict[str, Any]:
    variables = ("XLA_", "JAX_", "JAXFLASH_", "CUDA_VISIBLE", "TF_FORCE", "NVIDIA_TF32")
    return {
        "python": platform.python_version(),
        "machine": platform.platform(),
        "variables": {n: v for n, v in sorted(os.environ.items()) if n.startswith(variables)},
    }


def _backend() -> dict[str, Any]:
    """What JAX runs on; raises whatever JAX does where nothing can be run."""
    return {
        "backend": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
        "client": " ".join(jax.devices()[0].client.platform_version.split()),
    }


def _problems(config: _config.Config, environment: dict[str, Any]) -> list[str]:
    """What keeps the kernels of this installation from running."""
    if environment["backend"] != "gpu":
        if not config.devices:
            return []
        platforms = environment["variables"].get("JAX_PLATFORMS")
        why = f"JAX_PLATFORMS={platforms}" if platforms else "pip install 'jax[cuda13]'"
        return [f"JAX does not use the GPU of this machine: {why}"]
    if not config.kernels:
        return ["this installation has no CUDA kernels: calls take the blockwise path"]
    if not config.devices:
        return ["the CUDA driver shows no device to the kernels, although JAX runs on a GPU"]
    return [device.reason_against for device in config.devices if not device.has_kernels]


# ---- Text ----------------------------------------------------------------------------------------


def _self_test_table(tests: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            "ok" if test["passed"] else "FAILED",
            test["name"],
            test["path"],
            f"{test['error']:.1e}",
            f"{test['tolerance']:.0e}",
        ]
        for test in tests
    ]
    return ["", "self-test", "ran on", "error", "allowed"], rows


def _time_table(times: list[dict[str, Any]], rate: float) -> tuple[list[str], list[list[str]]]:
    header = ["T", "pass", "by", "ms", "TFLOP/s", "share", "MiB", "error"]
    rows = []
    for time in times:
        row = [str(time["call"]["q_len"]), time["pass"], time["peer"]]
        if "reason" in time:
            rows.append([*row, "-", "-", "-", "-", "-"])
            continue
        error, memory = time.get("error"), time["memory"]
        rows.append(
            [
                *row,
                f"{time['seconds'] * 1e3:.3f}",
                f"{time['flops_per_second'] / 1e12:.3g}",
                f"{time['flops_per_second'] / rate:.0%}",
                "-" if memory is None else f"{memory / 2**20:.1f}",
                "" if error is None else f"{error:.1e}" + ("" if time["passed"] else " FAILED"),
            ]
        )
    return header, rows


def _notes(times: list[dict[str, Any]]) -> list[str]:
    """What ran where, and why something did not; each said once."""
    notes = []
    for time in times:
        if "path" in time:
            why = f": {'; '.join(time['why'])}" if time["why"] else ""
            notes.append(f"jaxflash, {time['pass']}: {time['path']}{why}")
        if "reason" in time:
            notes.append(f"{time['peer']}, {time['pass']}: not run, {time['reason']}")
    return list(dict.fromkeys(notes))


class _Plain:
    """Text without rich."""

    def print(self, text: str = "") -> None:
        print(text)

    def table(self, header: list[str], rows: list[list[str]]) -> None:
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        for row in (header, *rows):
            line = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            print("  ".join(line).rstrip())

    @contextlib.contextmanager
    def progress(self, steps: int) -> Iterator[Callable[[str], None]]:
        yield lambda step: None


_WIDEST = 1000  # columns of a table


class _Rich(_Plain):
    """Text with a progress bar on stderr and tables with rules."""

    def __init__(self):
        import rich.console

        self._console = rich.console.Console(highlight=False)
        self._errors = rich.console.Console(stderr=True)

    def print(self, text: str = "") -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def table(self, header: list[str], rows: list[list[str]]) -> None:
        if not self._console.is_terminal:  # a file or a bug report: no fixed width, no rules
            return super().table(header, rows)
        import rich.box
        import rich.table

        table = rich.table.Table(*header, box=rich.box.SIMPLE_HEAD)
        for row in rows:
            bad = any("FAILED" in cell for cell in row)
            table.add_row(*row, style="bold red" if bad else "bold" if "jaxflash" in row else "")
        anywhere = self._console.options.update(width=_WIDEST)
        if self._console.measure(table, options=anywhere).minimum > self._console.width:
            return super().table(header, rows)  # whose lines are wrapped, and no number cut off
        self._console.print(table)

    @contextlib.contextmanager
    def progress(self, steps: int) -> Iterator[Callable[[str], None]]:
        import rich.progress

        shown = self._errors.is_terminal
        with rich.progress.Progress(console=self._errors, transient=True, disable=not shown) as bar:
            task = bar.add_task("", total=steps)

            def step(text: str) -> None:
                bar.update(task, advance=1, description=text)

            yield step


def _json(report: dict[str, Any]) -> str:
    """NaN and infinity, which are not JSON, as null."""

    def written(x):
        if isinstance(x, dict):
            return {name: written(value) for name, value in x.items()}
        if isinstance(x, (list, tuple)):
            return [written(value) for value in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(written(report), indent=1, allow_nan=False)


def _plot(times: list[dict[str, Any]], device: str, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    passes = list(dict.fromkeys(time["pass"] for time in times))
    figure, axes = pyplot.subplots(1, len(passes), figsize=(5 * len(passes), 4), squeeze=False)
    for axis, pass_name in zip(axes[0], passes, strict=True):
        ran = [time for time in times if time["pass"] == pass_name and "seconds" in time]
        for peer in dict.fromkeys(time["peer"] for time in ran):
            points = [time for time in ran if time["peer"] == peer]
            axis.plot(
                [point["call"]["q_len"] for point in points],
                [point["seconds"] * 1e3 for point in points],
                marker="o",
                label=peer,
            )
        axis.set(title=f"{pass_name}, {device}", xlabel="query length", ylabel="ms")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(file)


# ---- The run -------------------------------------------------------------------------------------


def _without_backend(error: Exception, arguments: argparse.Namespace) -> dict[str, Any]:
    """The report where JAX has nothing to run on, and nothing more can be asked of it."""
    config, environment = _config.config(), _environment()
    said = " ".join(str(error).split()) or type(error).__name__
    platforms = environment["variables"].get("JAX_PLATFORMS")
    problem = f"JAX does not start{f' with JAX_PLATFORMS={platforms}' if platforms else ''}: {said}"
    if arguments.json != "-":
        _print_installation(_Plain(), config, environment)
        print(f"problem: {problem}")
    return {
        "config": dataclasses.asdict(config),
        "environment": environment,
        "problems": [problem],
        "self_test": [],
        "times": [],
        "passed": False,
    }


def _print_installation(out: _Plain, config: _config.Config, environment: dict[str, Any]) -> None:
    out.print(str(config))
    out.print(f"  python    {environment['python']}, {environment['machine']}")
    if "backend" in environment:
        kinds = environment["devices"]
        out.print(f"  backend   {environment['backend']}: {len(kinds)} x {kinds[0]}")
    for name, value in environment["variables"].items():
        out.print(f"  {name}={value}")
    out.print()


def _run(arguments: argparse.Namespace, calls: list[_check.Call], out: _Plain) -> dict[str, Any]:
    config, environment = _config.config(), {**_environment(), **_backend()}
    passes = _check.PASSES if arguments.backward else _check.PASSES[:1]
    tests = _check.SELF_TEST if arguments.self_test else {}
    report: dict[str, Any] = {
        "config": dataclasses.asdict(config),
        "environment": environment,
        "problems": _problems(config, environment),
        "self_test": [],
        "times": [],
    }
    text = arguments.json != "-"
    if text:
        _print_installation(out, config, environment)
    with out.progress(len(tests) + 1 + len(calls) * len(passes)) as step:
        for name in tests:
            step(f"self-test: {name}")
            report["self_test"].append(_check.self_test(name, arguments.implementation))
        step("matrix product")
        rate = _check.matrix_rate(calls[0].dtype, arguments.precision, arguments.seconds)
        report["matrix_rate"] = rate
        for call in calls:
            for pass_name in passes:
                step(f"{pass_name}, T = {call.q_len}")
                report["times"] += _check.measure(
                    call, pass_name, arguments.implementation, arguments.seconds
                )
    report["passed"] = all(test["passed"] for test in report["self_test"]) and all(
        time.get("passed", False) for time in report["times"] if time["peer"] == "jaxflash"
    )
    if text:
        if tests:
            out.table(*_self_test_table(report["self_test"]))
            out.print()
        per_second = rate["flops_per_second"]
        out.print(str(calls[0]))
        out.print(f"matrix product, {rate['dtype']}, n = {rate['size']}: "
                  f"{per_second / 1e12:.3g} TFLOP/s")  # fmt: skip
        out.table(*_time_table(report["times"], per_second))
        for note in _notes(report["times"]):
            out.print(f"  {note}")
        for problem in report["problems"]:
            out.print(f"problem: {problem}")
        out.print("everything is right" if report["passed"] else "FAILED: see above")
    return report


@contextlib.contextmanager
def _written(parser: argparse.ArgumentParser, file: str | Path) -> Iterator[None]:
    """A disk that is full by now is no fault of the program."""
    try:
        yield
    except OSError as error:
        parser.exit(1, f"{parser.prog}: error: cannot write {file}: {error.strerror}\n")


def _write_json(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, report: dict[str, Any]
) -> None:
    if arguments.json == "-":
        print(_json(report))
    elif arguments.json:
        with _written(parser, arguments.json):
            Path(arguments.json).write_text(_json(report) + "\n")


def main() -> int:
    """Runs the command; the exit status is 1 if something is wrong with the results."""
    parser = _parser()
    arguments = parser.parse_args()
    try:
        _check_outputs(arguments)
    except ValueError as error:
        parser.error(str(error))
    try:
        _backend()
    except Exception as error:  # an AssertionError, too
        _write_json(parser, arguments, _without_backend(error, arguments))
        return 1
    try:
        calls = _calls(arguments)
    except ValueError as error:
        parser.error(str(error))
    pretty = importlib.util.find_spec("rich") is not None
    with jax.disable_jit(False):  # it measures compiled programs
        report = _run(arguments, calls, _Rich() if pretty else _Plain())
    _write_json(parser, arguments, report)
    if arguments.plot:
        with _written(parser, arguments.plot):
            _plot(report["times"], report["environment"]["devices"][0], arguments.plot)
    if not pretty and sys.stderr.isatty():
        print(f"for a progress bar and ruled tables: {_EXTRA}", file=sys.stderr)
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever read the output has seen enough; Python flushes what is left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
