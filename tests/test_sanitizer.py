"""compute-sanitizer over a set of tiny calls: memory, races, uninitialised reads, barriers."""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

from sanitizer_cases import NAMES, PAGED, PORTABLE_NAMES

pytestmark = pytest.mark.gpu


def _sanitizer() -> str:
    places = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    path = os.pathsep.join([os.environ["PATH"], *(f"{place}/bin" for place in places if place)])
    found = shutil.which("compute-sanitizer", path=path)
    assert found, "compute-sanitizer is not installed (it comes with the CUDA toolkit)"
    return found


# What racecheck reports although it is ordered, by functions that read or write.
_NOT_RACES = (
    # A copy of lse and delta into shared memory: its readers wait for an mbarrier that counts the
    # bytes, which racecheck does not follow.
    ("::bulk_load(",),
    # p of a pair of blocks, from one warpgroup to the other and through a named barrier: reported
    # for single warps of single blocks, and also where all threads of both meet in a bar.sync
    # between the store and the load. Of an unrolled loop the tool names the function of the first
    # load only; that the others are these too is seen in the machine code.
    ("::load_shared_f32x4(",),
    ("::backward_kernel<", "KeyOwners)1", "::store_shared_f32x4("),
    # What a loading warp clears of a tile of keys: all lanes, then a __syncwarp, then one of them
    # arrives at the mbarrier that readers wait for.
    ("::store_shared_zero(", "::ldmatrix_x4("),
    # What a warp reads of a message before another one overwrites it: all lanes, then a __syncwarp,
    # then one of them arrives at the mbarrier that the writer waits for.
    ("::TicketBox<", "::TicketReader<"),
    ("operator ()(jaxflash::sm90::GradientMessage<",),
    ("Write access at void jaxflash::sm90::ForwardProducers<", ">::load_q<"),  # Mailbox: plans
)

# synccheck takes two warpgroups that wait for the same named barrier at two places of the code for
# a divergent __syncthreads, and stops the kernel (a kernel of a few lines shows it). The backward
# kernels of head sizes above 64 do so, where a warpgroup has a step, or a role, of its own; with
# such a function, or a bias that TMA does not take, a head size of 64 takes the tile of 128.
_OPTIONS = {
    "synccheck": (
        "--gradients-up-to", "64", "--forward-only", "mask-value-causal-window",
        "--forward-only", "capture-bias-64", "--forward-only", "packed-keys-relative",
    ),
}  # fmt: skip


def _races(text: str) -> list[str]:
    """What racecheck reports, an entry each: between one access, "and" others on further lines."""
    entries: list[str] = []
    for line in text.splitlines():
        if "Race reported" in line:
            entries.append(line)
        elif entries and line.startswith("=========     and "):
            entries[-1] += "\n" + line
    return entries


# initcheck does not see what TMA stores, so that all of an output seems to lack its values, nor
# what XLA's kernels store, such as the numbers of heads that a score program gets.
_NAMES = {"initcheck": PORTABLE_NAMES}
# A few cases for a process: several of them can then run at once, and one that is stuck or slow is
# known by its number.
_OF_PROCESS = 4
_SECONDS = 240  # of a process, which takes ten
# The tool itself dies now and then of a segmentation fault, amid cases that pass (racecheck of CUDA
# 13.0: 14 of 80 processes, ten at a time). The fault of a case would come each time.
_ATTEMPTS = 4


def _run(command: list[str], output: pathlib.Path, **environment: str) -> tuple[int | None, str]:
    """(exit status, or None where the time was over; what was printed). Into a file: where the tool
    dies, the program may wait for it forever, and hold the output open."""
    with output.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=pathlib.Path(__file__).parent,
            env={**os.environ, **environment}, start_new_session=True,
        )  # fmt: skip
        status = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return status, output.read_text(errors="replace")


def _shares():
    for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
        names = _NAMES.get(tool, (*NAMES, *PAGED))
        number = -(-len(names) // _OF_PROCESS)
        for i in range(number):
            yield pytest.param(tool, names[i::number], id=f"{tool}-{i + 1}-of-{number}")


@pytest.mark.parametrize(("tool", "names"), [*_shares()])
def test_is_clean(tool, names, tmp_path):
    """Only our kernels are looked at: what XLA leaves allocated at exit is its own affair."""
    command = [
        _sanitizer(), "--tool", tool, "--kernel-name", "kns=jaxflash", "--report-api-errors", "no",
        "--show-backtrace", "device", "--print-limit", "1000",
        sys.executable, "sanitizer_cases.py", *names, *_OPTIONS.get(tool, ()),
    ]  # fmt: skip
    for _ in range(_ATTEMPTS):
        status, text = _run(
            command,
            tmp_path / "output",
            # Every array gets an allocation of its own, with bounds that memcheck knows.
            XLA_PYTHON_CLIENT_ALLOCATOR="platform",
            # Kernels that are compiled at run time know the names of their functions.
            JAXFLASH_KEEP_SOURCES=str(tmp_path),
        )
        if status != -signal.SIGSEGV:
            break
        print(f"the tool died behind {text[-500:]}")
    # What the tool and the cases say, without what XLA says when a kernel was stopped.
    said = [line for line in text.splitlines() if line.startswith(("=========", "ran "))]
    report = "\n".join(said[:100])
    ended = f"over {_SECONDS} seconds" if status is None else f"exit status {status}"
    assert status == 0, f"{ended}\n{report}\n{text[-4000:]}"
    assert all(f"ran {name}" in text for name in names), report
    assert "SUMMARY" in text, text[-2000:]
    if tool == "racecheck":
        unexplained = [
            race
            for race in _races(text)
            if not any(all(name in race for name in names) for names in _NOT_RACES)
        ]
        assert not unexplained, "\n".join(unexplained)
    else:
        assert "ERROR SUMMARY: 0 errors" in text, report
