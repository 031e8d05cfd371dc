"""`python -m jaxflash`: what it measures is right, and what is wrong it says."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxflash
from jaxflash import __main__ as command
from jaxflash import _check, _config, _extension, _support

_TINY = ["--batch", "1", "--heads", "2", "--kv-heads", "1", "--head-size", "8", "--length", "16"]
_QUICK = [*_TINY, "--dtype", "float32", "--seconds", "0.01"]


def _main(monkeypatch, *arguments) -> int:
    monkeypatch.setattr(sys, "argv", ["jaxflash", *_QUICK, *map(str, arguments)])
    return command.main()


def test_report(tmp_path):
    """Every feature at once, two lengths, to JSON and a plot, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxflash", *_QUICK, "--length", "16", "24",
         "--causal", "--window", "7", "none",
         "--kv-length", "32", "--causal-alignment", "bottom_right", "--soft-cap", "5", "--sink",
         "--alibi", "--bias", "--mask", "1N1S", "--dropout", "0.1", "--segments", "2",
         "--kv-lengths", "30", "--query-lengths", "15", "--scale", "0.5", "--precision", "highest",
         "--deterministic-backward", "--no-self-test", "--json", "report.json", "--plot", "t.png"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"]
    assert report["config"]["version"] == jaxflash.__version__
    assert report["matrix_rate"]["flops_per_second"] > 0
    ours = [row for row in report["times"] if row["peer"] == "jaxflash"]
    assert [(row["call"]["q_len"], row["pass"]) for row in ours] == [
        (length, pass_name) for length in (16, 24) for pass_name in ("forward", "backward")
    ]
    for row in ours:
        assert row["seconds"] > 0
        assert row["memory"] > 0
        assert row["path"] == "blockwise path" or "kernel" in row["path"]
        assert 0 <= row["error"] <= row["tolerance"]
    theirs = [row for row in report["times"] if row["peer"] != "jaxflash"]
    for name in ("alibi_slopes", "causal_alignment", "dropout_rate", "logits_soft_cap", "sink"):
        assert all(name in row["reason"] for row in theirs)
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    for text in (
        jaxflash.__version__,
        "jaxflash, forward: ",
        "TFLOP/s",
        "jax.nn has no",
        "is right",
    ):
        assert text in done.stdout


@pytest.mark.parametrize(("width", "ruled"), [(40, False), (200, True)])
def test_tables_are_never_cut_off(width, ruled, monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")
    row = ["4096", "backward", "jaxflash", "123.456", "1.8e-05 FAILED", "some more of a line"]
    command._Rich().table([f"column {i}" for i in range(len(row))], [row])
    text = capsys.readouterr().out
    assert ("\u2500" in text) == ruled
    assert all(cell in text for cell in row)


def test_plain_text_without_rich(tmp_path):
    code = (
        "import runpy, sys; sys.modules['rich'] = None\n"
        "runpy.run_module('jaxflash', run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *_QUICK, "--causal", "--no-backward"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name in _check.SELF_TEST:
        assert f"ok  {name}" in done.stdout
    assert "is_causal=True" in done.stdout
    assert "backward  jaxflash" not in done.stdout


def test_json_alone_on_stdout(monkeypatch, capsys):
    assert _main(monkeypatch, "--no-self-test", "--no-backward", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert {row["peer"] for row in report["times"]} >= {"jaxflash", "jax.nn xla"}
    assert all("seconds" in row for row in report["times"] if row["peer"] == "jax.nn xla")


@pytest.mark.parametrize("window", [("none",), (3, "none"), ("none", "0")], ids=str)
def test_sides_without_a_limit(monkeypatch, capsys, window):
    """Which jax.nn writes as numbers."""
    arguments = ["--no-self-test", "--no-backward", "--json", "--window", *window]
    assert _main(monkeypatch, *arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert all("seconds" in row for row in report["times"] if row["peer"] == "jax.nn xla")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the machine has no /dev/full")
def test_full_disk(monkeypatch, capsys):
    with pytest.raises(SystemExit) as exit_:
        _main(monkeypatch, "--no-self-test", "--no-backward", "--json", "/dev/full")
    assert exit_.value.code == 1
    assert "error: cannot write /dev/full: No space left" in capsys.readouterr().err


def test_closed_pipe(tmp_path):
    """As of `| head`: no traceback."""
    command = subprocess.Popen(
        [sys.executable, "-m", "jaxflash", *_QUICK, "--no-self-test", "--no-backward", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
    )  # fmt: skip
    command.stdout.close()
    assert command.wait() == 1
    assert "Error" not in command.stderr.read()
    command.stderr.close()


def test_without_jit(monkeypatch, capsys):
    """JAX_DISABLE_JIT in the environment: compiled programs are measured all the same."""
    with jax.disable_jit():
        assert _main(monkeypatch, "--no-self-test", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert all("seconds" in row for row in report["times"] if row["peer"] != "jax.nn cudnn")


def _broken(call, implementation):
    """The op with one wrong row."""

    def op(query, key, value, **options):
        out = jaxflash.dot_product_attention(query, key, value, **call.static, **options)
        return out.at[:, 3].multiply(1.5)

    return op


@pytest.mark.parametrize("pass_name", ["forward", "backward"])
def test_wrong_results_are_found(monkeypatch, pass_name):
    monkeypatch.setattr(_check, "_ours", _broken)
    call = _check.Call(1, 16, 16, 2, 1, 8, 8, is_causal=True)
    ours, *_ = _check.measure(call, pass_name, None, 0.01)
    assert ours["error"] > ours["tolerance"]


def test_wrong_results_are_an_exit_status(monkeypatch, capsys):
    name, test = next(iter(_check.SELF_TEST.items()))
    monkeypatch.setattr(_check, "SELF_TEST", {name: test})
    monkeypatch.setattr(_check, "_ours", _broken)
    assert _main(monkeypatch, "--no-backward") == 1
    text = capsys.readouterr().out
    assert f"FAILED  {name}" in text
    assert "FAILED: see above" in text


def test_wrong_results_of_the_definition_are_no_number(monkeypatch):
    """NaN is an error, not a pass."""
    monkeypatch.setattr(
        _check, "_ours", lambda call, implementation: lambda q, k, v: q * jnp.float32(np.nan)
    )
    call = _check.Call(1, 16, 16, 2, 2, 8, 8)
    ours, *_ = _check.measure(call, "forward", None, 0.01)
    assert not ours["error"] <= ours["tolerance"]


def _refused(constant: str):
    raise ValueError(f"{constant} is not JSON")


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("file", [False, True], ids=["stdout", "file"])
def test_json_has_no_nan_and_no_infinity(monkeypatch, capsys, tmp_path, number, file):
    """Strict parsers refuse them. Such an error is null, and so is one that is not known."""
    monkeypatch.setattr(
        _check, "_ours", lambda call, implementation: lambda q, k, v: q * jnp.float32(number)
    )
    arguments = ["--no-self-test", "--no-backward", "--json"]
    path = tmp_path / "report.json"
    assert _main(monkeypatch, *arguments, *[path] * file) == 1
    text = path.read_text() if file else capsys.readouterr().out
    report = json.loads(text, parse_constant=_refused)
    (ours,) = (row for row in report["times"] if row["peer"] == "jaxflash")
    assert ours["error"] is None
    assert not ours["passed"]
    assert not report["passed"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--kv-heads", "3"], "multiple of the number of key heads"),
        (["--head-size", "0"], "--head-size must be at least 1"),
        (["--value-head-size", "-3"], "--value-head-size must be at least 1"),
        (["--kv-heads", "-1"], "--kv-heads must be at least 1"),
        (["--heads", "9" * 20], "--heads must be at least 1 and below 2**31"),
        (["--length", "2000000000", "--heads", "64"], "the arrays of the call would take"),
        (["--length", "4000000", "--bias", "TS"], "the arrays of the call would take"),
        (["--length", "40000000", "--mask", "TS"], "the arrays of the call would take"),
        (["--window", "1", "2", "3"], "--window takes one side or two"),
        (["--kv-lengths", "1", "2"], "--kv-lengths takes 1 lengths"),
        (["--dropout", "1"], "dropout_rate must lie in [0, 1)"),
        (["--bias", "BT"], "each as its letter or as 1"),
        (["--segments", "0"], "--segments must be at least 1"),
        (["--implementation", "cuda", "--head-size", "400"], "cannot take this call"),
        (["--json", "no/such/folder/x.json"], "cannot write no/such/folder/x.json"),
        (["--plot", "no/such/folder/x.png"], "cannot write no/such/folder/x.png"),
        (["--plot", "times.txt"], "--plot must end in"),
        (["--plot", "times"], "--plot must end in"),
        (["--window", "x"], "--window: a side is a number of keys or none, got 'x'"),
        (["--seconds", "nan"], "--seconds must be positive and finite, got nan"),
        (["--seconds", "0"], "--seconds must be positive and finite, got 0"),
    ],
)
def test_wrong_arguments(monkeypatch, capsys, arguments, text):
    """Said before anything is measured."""
    with pytest.raises(SystemExit) as exit_:
        _main(monkeypatch, *arguments)
    assert exit_.value.code == 2
    assert text in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(is_causal=True),
        dict(is_causal=True, causal_alignment="bottom_right"),
        dict(local_window_size=(3, 2)),
        dict(local_window_size=(None, 1), kv_lengths=(13, 5), query_lengths=(12, 3)),
        dict(causal_alignment="bottom_right", local_window_size=(4, 0), kv_lengths=(13, 5)),
        dict(segments=3, is_causal=True),
        dict(query_lengths=(100, -3), kv_lengths=(100, 5)),
        dict(is_causal=True, causal_alignment="bottom_right", kv_lengths=(100, -3)),
    ],
)
def test_flops_count_what_is_visible(options):
    call = _check.Call(2, 12, 17, 2, 1, 8, 4, **options)
    qkv, _ = call.draw()
    # A row of ones and zeros for each key: the output is the keys that a row sees.
    value = jnp.broadcast_to(jnp.eye(17, dtype=jnp.float32)[:, None], (2, 17, 1, 17))
    qkv = (jnp.zeros_like(qkv[0]), jnp.zeros_like(qkv[1]), value)
    seen = jaxflash.reference.dot_product_attention(*qkv, **call.static, **call.arrays()) > 0
    assert call.flops("forward") == 2 * (8 + 4) * int(seen.sum())
    assert call.flops("backward") == 2 * (3 * 8 + 2 * 4) * int(seen.sum())


def test_error_on_a_slice_of_rows(monkeypatch):
    """Where the logits are too large for the definition, the first rows are compared, backward
    too, although gradients of keys collect from all rows."""
    call = _check.Call(
        2, 48, 48, 4, 2, 8, 8, is_causal=True, bias="BNTS", mask="T1", segments=2, dropout_rate=0.1,
        sink=True, alibi=True, query_lengths=(48, 30), kv_lengths=(40, 48),
        precision="highest",
    )  # fmt: skip
    monkeypatch.setattr(_check, "_SLICE_BYTES", 4 * 2 * 48 * 20)
    for pass_name in _check.PASSES:
        ours, *_ = _check.measure(call, pass_name, None, 0.01)
        assert ours["error"] < 1e-5
    # From the bottom right the position of a row depends on how many there are.
    call = dataclasses.replace(call, causal_alignment="bottom_right")
    ours, *_ = _check.measure(call, "forward", None, 0.01)
    assert ours["error"] is None


def test_gradients_of_nothing():
    """Where each query sees one key, the gradients of query and key are what rounding leaves."""
    call = _check.Call(1, 128, 128, 2, 2, 16, 16, segments=200)
    ours, *_ = _check.measure(call, "backward", None, 0.01)
    assert ours["passed"], ours


@pytest.mark.parametrize("file", [True, False])
def test_report_of_a_jax_that_does_not_start(monkeypatch, capsys, tmp_path, file):
    """When a report of a fault is needed most."""

    def fails():
        raise RuntimeError("no such backend")

    monkeypatch.setattr(jax, "default_backend", fails)
    path = tmp_path / "report.json"
    assert _main(monkeypatch, "--json", *[str(path)] * file) == 1
    text = capsys.readouterr().out
    report = json.loads(path.read_text() if file else text)
    assert len(report["problems"]) == 1
    assert "no such backend" in report["problems"][0]
    assert not report["passed"]
    if file:
        assert text.startswith(f"jaxflash {jaxflash.__version__}\n")
        assert text.endswith(f"problem: {report['problems'][0]}\n")


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        ((7, 5), "need compute capability 8.0 or newer, a GPU has 7.5"),
        ((8, 6), "runs on a GPU, of compute capability 8.6, .*JAXFLASH_CUDA_ARCHS"),
    ],
)
def test_gpu_without_kernels(monkeypatch, capability, reason):
    if not _extension.kernels:
        pytest.skip("there are kernels for none")
    device = _config.Device("a GPU", capability, 1, has_kernels=False)
    config = dataclasses.replace(_config.config(), devices=(device,))
    assert "a GPU" in str(config)
    assert "no kernels for it" in str(config)
    monkeypatch.setattr(_config, "devices", lambda: (device,))
    _support.reasons_against_machine.cache_clear()
    try:
        found = _support.reasons_against_machine()
    finally:
        _support.reasons_against_machine.cache_clear()
    assert command._problems(config, {"backend": "gpu"}) == list(found)
    assert len(found) == 1
    assert re.search(reason, found[0])


def test_gpu_that_jax_does_not_use(monkeypatch):
    config = dataclasses.replace(
        _config.config(), devices=(_config.Device("a GPU", (9, 0), 1, True),)
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    (problem,) = command._problems(config, {**command._environment(), **command._backend()})
    assert "pip install 'jax[cuda13]'" in problem
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    (problem,) = command._problems(config, {**command._environment(), **command._backend()})
    assert problem.endswith("JAX_PLATFORMS=cpu")


def test_paths():
    call = _check.Call(dtype="float32", head_dim=400)
    ran, why = _check.path(call, "forward", None)
    assert ran == "blockwise path"
    reason = "head size 400" if _extension.kernels else "without CUDA kernels"
    assert any(reason in text for text in why)
    assert _check.path(call, "forward", "xla") == ("blockwise path", ("implementation='xla'",))


@pytest.mark.gpu
def test_kernels_are_named():
    call = _check.Call(dtype="bfloat16", head_dim=100, value_dim=100)
    ran, why = _check.path(call, "forward", None)
    assert "kernel, head size" in ran
    assert not why
    assert jax.default_backend() == "gpu"
