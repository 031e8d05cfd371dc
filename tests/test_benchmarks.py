"""The benchmarks' rows at toy sizes: that they run, are right, and say so when they are not."""

import importlib
import os
import pathlib
import subprocess
import sys
import types

import pytest

import jaxflash
from jaxflash import _extension, _nvrtc, _support

_ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(_ROOT))  # last: jaxflash stays the installed one
cases = importlib.import_module("benchmarks.cases")
report = importlib.import_module("benchmarks.report")
timing = importlib.import_module("benchmarks.timing")
tracing = importlib.import_module("benchmarks.tracing")

# Each kind of operand once.
_ROWS = (
    "score/dropout-causal", "score/bias-BN1S-gradient", "score/relative-gradient", "mask/padding",
    "mask/prefix", "mask/segments", "mask/packed-causal", "decode/ragged-64", "paged/ragged-64-64",
    "derivative/64",
)  # fmt: skip


def test_rows_run_and_are_right():
    """On the blockwise path, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.run", "--platform", "cpu", "--tiny",
         "--peers", "blockwise", "--cases", *_ROWS],
        capture_output=True, text=True, cwd=_ROOT, env={**os.environ, "PYTHONSAFEPATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    passes = sum(len(cases.BY_NAME[name].passes) for name in _ROWS)
    assert f"{passes} passes ran" in done.stdout


def test_combinations_run():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.combinations", "--platform", "cpu", "--tiny",
         "--cases", "64/cap/packed-causal", "cross/dropout/padding"],
        capture_output=True, text=True, cwd=_ROOT, env={**os.environ, "PYTHONSAFEPATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    table = done.stdout
    for name in ("64/cap/packed-causal", "64/plain/causal", "cross/plain/lengths"):
        assert f"| {name}" in table, table
    assert "Error" not in table, table


def _measured(labels, name="score/sink-causal", pass_name="forward"):
    def contender(label):
        is_peer = label in timing.PEERS
        case = cases.BY_NAME[name if is_peer else label].tiny("cpu")
        return timing.Contender(label if is_peer else "blockwise", case, timing.input_sets(case))

    contenders = {label: contender(label) for label in labels}
    return timing.measure(contenders, pass_name, repeats=1, seconds=0.0)


def test_wrong_results_are_found(monkeypatch):
    def broken(*args, implementation, **options):
        return jaxflash.dot_product_attention(*args, **options).at[:, 3].multiply(1.5)

    module = types.SimpleNamespace(dot_product_attention=broken)
    monkeypatch.setitem(timing.PEERS, "blockwise", (module, dict(implementation="xla")))
    entry = _measured(["blockwise"])["blockwise"]
    assert entry["failed"]
    assert entry["difference"] > 0.02


def test_what_stands_beside_a_row():
    """A peer without the feature says so; ours of another case is timed, not compared."""
    outcome = _measured(["blockwise", "xla", "score/causal"])
    assert list(outcome) == ["blockwise", "xla", "score/causal"]
    assert not outcome["blockwise"]["failed"]
    assert outcome["xla"] == {
        "reason": "NotImplementedError: jax.nn has no sink", "failed": False
    }  # fmt: skip
    assert outcome["score/causal"]["device"]["median"] > 0


def _row(name: str, pass_name: str, **ms: float) -> dict:
    peers = {peer.replace("__", "/"): {"device": {"median": time}} for peer, time in ms.items()}
    return {"case": name, "pass": pass_name, "peers": peers, "tflop": 1.0}


def test_goals_are_reported(tmp_path):
    """A goal is the bar where no peer has the feature, otherwise the ratio to the peer is."""
    rows = [
        _row("score/cap", "forward", jaxflash=1.25, score__plain=0.75),
        _row("score/bias-1NTS", "forward", jaxflash=1.0, cudnn=1.882, score__plain=0.75),
    ]
    alone, beside = report.lines({"rows": rows})
    assert (alone.peer, alone.ratio, alone.of_bar()) == ("score/plain", 0.6, 1.0 / 1.25)
    assert beside.peer == "cudnn"
    assert beside.of_bar() == pytest.approx(1.05)
    assert beside.others == {"score/plain": 0.75}
    results = dict.fromkeys(("command", "device", "date", "commit"), "")
    results |= {"rows": rows, "versions": {}, "platform": "gpu"}
    table = report.markdown(results)
    cells = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
    assert {"1.000", "0.80 of bar"} <= set(cells[-4])
    assert {"1.050", "pass", "0.750 score/plain"} <= set(cells[-3])
    report.plot(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(not _extension.kernels, reason="the library was built without kernels")
@pytest.mark.skipif(_nvrtc.reason_against() is not None, reason="no NVRTC")
def test_kernels_take_every_row():
    machine = set(_support.reasons_against_machine())
    for case in (*cases.SCORES, *cases.MASKS, *cases.DERIVATIVES):
        reasons = timing.why_not("jaxflash", case)
        assert reasons is None or reasons in machine, case.name


@pytest.mark.parametrize("name", tracing._options(16))
@pytest.mark.filterwarnings("ignore::jaxflash.SlowPathWarning")
def test_tracing_is_timed(name):
    assert min(tracing._measured(name, "vmap of grad", "cuda", 16)) > 0
