"""Runs nvcc (the arguments are its command line) and reads what ptxas reports.

Warpgroup instructions that wait for one another (C7510 ... C7519), and registers that a warpgroup
asks for and does not get (C7508 and its like), are mere information to ptxas but cost most of a
Hopper kernel's speed: they fail the build. The report of registers and spills is folded into a line
per kernel; everything else passes through.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

_LOSS = re.compile(r"\(C75\d\d\)")
_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_CHATTER = re.compile(r"ptxas info\s*:|Function properties for|^\s*$")


def fold(lines: list[str]) -> list[str]:
    """The report of `ptxas -v` as a line per kernel; other lines as they are."""
    folded = []
    entry, arch, spills = "", "", ""
    for line in lines:
        if found := _ENTRY.search(line):
            entry, arch, spills = found[1], found[2], ""
        elif found := _SPILLS.search(line):
            stack, stores, loads = found.groups()
            spills = f", {stores}/{loads} bytes spilled" if int(stores) or int(loads) else ""
            spills += f", {stack} bytes of stack" if int(stack) and not spills else ""
        elif (found := _USED.search(line)) and entry:
            folded.append(f"  {arch} {found[1]} registers{spills}: {entry[:160]}")
            entry = ""
        elif not _CHATTER.search(line) or _LOSS.search(line):
            folded.append(line)
    return folded


def main(command: list[str]) -> int:
    start = time.monotonic()
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = run.stdout.splitlines()
    source = next((Path(word).name for word in command if word.endswith((".cu", ".cc"))), "")
    print(f"{source}: {time.monotonic() - start:.0f} s", *fold(lines), sep="\n", flush=True)
    if run.returncode:
        return run.returncode
    if any(_LOSS.search(line) for line in lines):
        print(
            f"{source}: error: ptxas serialised warpgroups or ignored setmaxnreg", file=sys.stderr
        )
        # What fails leaves no object, or a second run of the build would find it up to date.
        if "-o" in command:
            Path(command[command.index("-o") + 1]).unlink(missing_ok=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
