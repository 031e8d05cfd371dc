"""Checks a kernel library without the package around it: what it says it holds, and that it stands
alone."""

import argparse
import ctypes
import subprocess
from pathlib import Path

NEEDED = {"libc.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


class Variant(ctypes.Structure):
    """cuda/attention.h: Variant."""

    _fields_ = (
        ("family", ctypes.c_char_p),
        ("pass_", ctypes.c_char_p),
        ("math", ctypes.c_char_p),
        ("head_dim", ctypes.c_int32),
        ("value_dim", ctypes.c_int32),
    )


def lines_of(*command: object) -> list[str]:
    run = subprocess.run(
        [str(word) for word in command], check=True, capture_output=True, text=True
    )
    return run.stdout.splitlines()


def check_library(library: Path) -> None:
    exported = [line.split()[-1] for line in lines_of("nm", "-D", "--defined-only", library)]
    print("exported:", *exported)
    assert exported, f"{library} exports nothing"
    assert all(name.startswith("jaxflash_") for name in exported), "foreign symbols are exported"
    dynamic = lines_of("readelf", "-d", "--wide", library)
    needed = {line.split("[")[1].rstrip("]") for line in dynamic if "(NEEDED)" in line}
    print("needed:", *sorted(needed))
    assert needed <= NEEDED, f"{library} needs {sorted(needed - NEEDED)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("--archs", required=True, help="as JAXFLASH_CUDA_ARCHS has them")
    parser.add_argument("--variants", required=True, help="as JAXFLASH_VARIANTS has them")
    arguments = parser.parse_args()
    check_library(arguments.library)

    library = ctypes.CDLL(str(arguments.library.resolve()))
    library.jaxflash_build_info.restype = ctypes.c_char_p
    build_info = library.jaxflash_build_info().decode()
    print(build_info)
    expected = [f"sm_{arch}" for arch in arguments.archs.split(";")]
    assert build_info.split("for ")[1].split() == expected, f"not for {expected}"

    rows = ctypes.POINTER(Variant)()
    count = library.jaxflash_variants(ctypes.byref(rows))
    built = [
        f"{row.family.decode()} {row.pass_.decode()} {row.math.decode()} {row.head_dim}"
        for row in rows[:count]
    ]
    print(*built, sep="\n")
    listed = [row.split() for row in arguments.variants.split(";")]
    assert built == [" ".join((*row[:3], size)) for row in listed for size in row[3:]]


if __name__ == "__main__":
    main()
