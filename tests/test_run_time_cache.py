"""Kernels compiled at run time: their caches, in memory and on disk, what is told of them, and what
is wrong with a compiler or a program."""

import json
import re
import threading
from pathlib import Path

import pytest

import jaxflash
import programs
from another_process import run_python
from compiled_kernels import H200, compile_kernel, compile_program, fresh_constant
from jaxflash import _config, _extension, _nvrtc

pytestmark = pytest.mark.usefixtures("kernel_cache")

_TINY = '#include "problem.h"\n__global__ void tiny(float* x) { *x = %s; }'


def _tiny(value: float) -> _config.CompiledKernel:
    return compile_kernel(_TINY % value, "tiny")


# ---- Caches --------------------------------------------------------------------------------------


def test_second_request_compiles_nothing():
    value = fresh_constant()
    _tiny(value)
    count = len(_config.config().compiled)
    _tiny(value)
    assert len(_config.config().compiled) == count
    _tiny(fresh_constant())
    assert len(_config.config().compiled) == count + 1


def test_threads_share_a_compilation():
    """Of those that ask for the same kernel at once, one compiles it."""
    values = [fresh_constant(), fresh_constant()]
    count = len(_config.config().compiled)
    start = threading.Barrier(8)
    results = []

    def ask(value):
        start.wait()
        results.append(_tiny(value))

    threads = [threading.Thread(target=ask, args=(values[i % 2],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert len(_config.config().compiled) == count + 2


_IN_ANOTHER_PROCESS = """
import json, sys
from jaxflash import _extension
source, kernel, limit = json.load(sys.stdin)
if limit is not None:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
row = _extension.compile_kernel(source, kernel, "sm_90a")
print(json.dumps(row))
"""


def _elsewhere(value: float, *, limit: int | None = None, **environment) -> _config.CompiledKernel:
    """What another process gets; with `limit`, one that cannot write larger files."""
    printed = run_python(
        _IN_ANOTHER_PROCESS, stdin=json.dumps([_TINY % value, "tiny", limit]), **environment
    )
    return _config.CompiledKernel(*json.loads(printed))


def test_cache_on_disk_serves_other_processes(kernel_cache):
    value = fresh_constant()
    assert not _tiny(value).from_disk
    (file,) = kernel_cache.iterdir()
    again = _elsewhere(value)
    assert again.from_disk
    assert again.registers == _tiny(value).registers
    assert list(kernel_cache.iterdir()) == [file]


@pytest.mark.parametrize("damage", ["empty", "cut", "changed", "other version", "folder"])
def test_damaged_file_is_replaced(kernel_cache, damage):
    value = fresh_constant()
    _tiny(value)
    (file,) = kernel_cache.iterdir()
    sound = file.read_bytes()
    if damage == "empty":
        file.write_bytes(b"")
    elif damage == "cut":
        file.write_bytes(sound[:-1])
    elif damage == "changed":
        middle = len(sound) // 2
        file.write_bytes(sound[:middle] + bytes([sound[middle] ^ 1]) + sound[middle + 1 :])
    elif damage == "other version":
        file.write_bytes(sound.replace(b"jaxflash kernel", b"jaxflash Kernel", 1))
    else:
        file.unlink()
        file.mkdir()
    assert not _elsewhere(value).from_disk
    if damage == "folder":
        return
    assert len(file.read_bytes()) == len(sound)
    assert _elsewhere(value).from_disk


def test_file_of_another_kernel_is_not_taken(kernel_cache):
    one, other = fresh_constant(), fresh_constant()
    _tiny(one)
    (first,) = kernel_cache.iterdir()
    _tiny(other)
    (second,) = set(kernel_cache.iterdir()) - {first}
    second.write_bytes(first.read_bytes())
    assert not _elsewhere(other).from_disk


def test_unusable_folder_does_no_harm(kernel_cache, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "below", "/proc/jaxflash", ""):
        assert not _elsewhere(fresh_constant(), JAXFLASH_CACHE_DIR=str(folder)).from_disk
    assert not kernel_cache.exists()
    assert file.read_text() == ""


def test_remains_of_killed_processes_do_no_harm(kernel_cache):
    value = fresh_constant()
    _tiny(value)
    (file,) = kernel_cache.iterdir()
    sound = file.read_bytes()
    file.unlink()
    # The next process has the number of one that was killed while it wrote this file.
    run_python(f"""if True:
        import os, pathlib
        from jaxflash import _extension
        for number in range(3):
            name = f".{file.name}.{{os.getpid()}}.{{number}}.tmp"
            pathlib.Path({str(kernel_cache)!r}, name).touch()
        _extension.compile_kernel({_TINY % value!r}, "tiny", "sm_90a")
    """)
    assert len(file.read_bytes()) == len(sound)


def test_full_disk_does_no_harm(kernel_cache):
    value = fresh_constant()
    assert not _elsewhere(value, limit=100).from_disk
    assert list(kernel_cache.iterdir()) == []
    assert not _elsewhere(value).from_disk
    assert _elsewhere(value).from_disk


def _loaded_compiler() -> tuple[Path, Path]:
    """The files of NVRTC and of its builtins that this process has loaded."""
    maps = Path("/proc/self/maps").read_text()
    names = "libnvrtc.so", "libnvrtc-builtins.so"
    of_name = (re.search(rf"/.*/{re.escape(name)}.*", maps) for name in names)
    library, builtins = (Path(found.group()) for found in of_name if found is not None)
    return library, builtins


def test_another_build_of_the_compiler_compiles_again(kernel_cache, tmp_path):
    """Of the same version to `nvrtcVersion`, as patch releases are."""
    value = fresh_constant()
    _tiny(value)
    library, builtins = _loaded_compiler()
    contents = bytearray(library.read_bytes())
    note = b"\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0"  # precedes the build ID, 20 bytes
    contents[contents.index(note) + len(note)] ^= 1
    other = tmp_path / library.name
    other.write_bytes(contents)

    def is_from_disk(library: Path) -> bool:
        printed = run_python(f"""if True:
            from pathlib import Path
            from jaxflash import _extension
            headers = Path(_extension.__file__).parent / "include"
            _extension.set_compiler([({str(library)!r}, {str(builtins)!r})], str(headers))
            *_, from_disk = _extension.compile_kernel({_TINY % value!r}, "tiny", "sm_90a")
            assert _extension.compiler() == ({_nvrtc.version()!r}, {str(library)!r})
            print(from_disk)
        """)
        return printed.strip() == "True"

    assert is_from_disk(library)
    assert not is_from_disk(other)
    assert is_from_disk(other)
    assert len(list(kernel_cache.iterdir())) == 2


def test_folder_in_the_home_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder, expected in (
        ("~/x/y", f"{tmp_path}/x/y"),
        ("~", str(tmp_path)),
        ("~x", "~x"),
        ("/a/~/b", "/a/~/b"),
    ):
        monkeypatch.setenv("JAXFLASH_CACHE_DIR", folder)
        assert _extension.cache_folder() == expected
    monkeypatch.setenv("JAXFLASH_CACHE_DIR", "~/cache")
    assert not _elsewhere(1.0).from_disk
    assert len(list((tmp_path / "cache").iterdir())) == 1
    # A home directory that nobody knows: as if there were no folder.
    monkeypatch.delenv("HOME")
    assert _extension.cache_folder() == ""


def test_default_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("JAXFLASH_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _extension.cache_folder() == str(tmp_path / "jaxflash")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _extension.cache_folder() == str(tmp_path / ".cache" / "jaxflash")


@pytest.mark.parametrize("given", ["{}", "~/sources"])
def test_kept_sources(monkeypatch, tmp_path, given):
    folder = tmp_path / "sources"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("JAXFLASH_KEEP_SOURCES", given.format(folder))
    source = _TINY % fresh_constant()
    compile_kernel(source, "tiny")
    (file,) = folder.iterdir()
    assert source in file.read_text()
    assert "-arch=sm_90a" in file.read_text()
    assert "-lineinfo" in file.read_text()


# ---- What is told --------------------------------------------------------------------------------


def test_show_config_tells_what_was_compiled(capsys, kernel_cache):
    compile_program(programs.SCALE, pass_name="forward", head_dim=64, **H200)
    jaxflash.show_config()
    text = capsys.readouterr().out
    version = _nvrtc.version()
    assert version is not None
    assert f"NVRTC     {version[0]}.{version[1]}" in text
    assert str(kernel_cache) in text
    assert "sm90 forward bfloat16 64 for sm_90a: " in text
    assert "sm90::ForwardTile<64, 64, 4, 64, 8, 2, " in text


def test_error_of_the_compiler():
    with pytest.raises(RuntimeError, match=r"NVRTC .* could not compile.*undefined"):
        compile_program("int x = undefined_name;", pass_name="forward", head_dim=64, **H200)


def test_unknown_architecture():
    with pytest.raises(RuntimeError, match="NVRTC"):
        compile_kernel("__global__ void tiny() {}", "tiny", "sm_31")


def test_head_size_without_a_kernel():
    with pytest.raises(RuntimeError, match="head sizes 512 and 512"):
        compile_program(programs.SCALE, pass_name="forward", head_dim=512, **H200)


@pytest.mark.parametrize(
    "libraries",
    [
        ["/nonexistent/libnvrtc.so.13"],
        [f"/{'long' * 20}/{i}/libnvrtc.so.13" for i in range(9)],
        ["libc.so.6"],
        [],
    ],
    ids=["missing", "many", "another", "none"],
)
def test_without_a_compiler(libraries):
    """Told in one sentence, with what to install; plain calls do not care."""
    locations = [(library, None) for library in libraries]
    run_python(f"""if True:
        from jaxflash import _extension, _nvrtc
        _extension.set_compiler({locations!r}, "/nonexistent")
        assert _nvrtc.version() is None
        reason = _nvrtc.reason_against()
        assert "pip install" in reason and "NVRTC" in reason, reason
        try:
            _extension.compile_kernel("", "x", "sm_90a")
        except RuntimeError as error:
            assert str(error) == reason, error
        else:
            raise AssertionError
    """)


def test_without_headers():
    run_python("""if True:
        from jaxflash import _extension, _nvrtc
        _extension.set_compiler(
            [(str(a), b and str(b)) for a, b in _nvrtc._locations()], "/nonexistent")
        try:
            _extension.compile_kernel("", "x", "sm_90a")
        except RuntimeError as error:
            assert "/nonexistent" in str(error), error
        else:
            raise AssertionError
    """)


def test_headers_that_could_not_be_read_are_read_again():
    """With one file descriptor left the first folder opens, and those in it do not."""
    run_python("""if True:
        import os, resource
        from jaxflash import _extension
        source = '#include "common/integers.h"\\n__global__ void tiny(int* x) { *x = 1; }'
        _extension.compiler()  # loaded while there are descriptors
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        taken = []
        try:
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            os.close(taken.pop())
        try:
            _extension.compile_kernel(source, "tiny", "sm_90a")
        except RuntimeError as error:
            assert "cannot read" in str(error) and "Too many open files" in str(error), error
        else:
            raise AssertionError
        for descriptor in taken:
            os.close(descriptor)
        _extension.compile_kernel(source, "tiny", "sm_90a")
    """)


# ---- Stages --------------------------------------------------------------------------------------

_STAGES = """if True:
    import jax, numpy as np
    from jaxflash import _extension
    # The CPU runs instantiation as a GPU does; there is no GPU to compile for.
    jax.devices()  # the CPU's registers kept handlers before kept types, the CUDA platform's after
    type_id, type_info = _extension.state_types()["program"]
    jax.ffi.register_ffi_type("state", dict(type_id=type_id, type_info=type_info), platform="cpu")
    handlers = _extension.cuda_handlers()
    for name in ("forward", "paged", "backward"):
        jax.ffi.register_ffi_target(name, handlers[name], platform="cpu")
    problem = dict(
        scale=np.float32(1), left=np.int64(1), right=np.int64(1), bottom_right=np.bool_(False),
        highest_precision=np.bool_(False), has_q_lengths=np.bool_(False),
        has_kv_lengths=np.bool_(False), mask=np.int64(0), walks=np.bool_(False))

    def instantiate(name, **attributes):
        attributes = dict(
            problem=problem, program="", unit_slope=np.bool_(True), bounded=np.bool_(False),
            head_dim=np.int64(64),
            value_dim=np.int64(64), dtype="bfloat16", capture_ranks=np.zeros(0, np.int64),
            start_capture=np.int64(-1),
        ) | attributes
        if name == "backward":
            attributes = dict(
                has_dlse=np.bool_(False), deterministic=np.bool_(False), gradient_program="",
                gradient_loads=np.zeros(0, np.int64), key_sums=np.int64(0)) | attributes
        else:
            attributes = dict(
                shared_units=np.int64(1), sizes=np.zeros(0, np.int64)) | attributes
        x = jax.ShapeDtypeStruct((4,), "float32")
        jax.jit(lambda x: jax.ffi.ffi_call(name, x)(x, **attributes)).lower(x).compile()

    def refused(text, name="forward", **attributes):
        try:
            instantiate(name, **attributes)
        except Exception as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)

    program = "namespace jaxflash { struct Program {}; }"
    for name in ("forward", "backward"):
        instantiate(name)
        instantiate(name, program=program, capture_ranks=np.array([0, 6], np.int64))
        for rank in (7, -1):
            ranks = np.array([rank], np.int64)
            text = f"at most 6 axes beside those of the batch, got {rank}"
            refused(text, name, program=program, capture_ranks=ranks)
        ranks = np.zeros(9, np.int64)
        refused("at most 8 arrays, got 9", name, program=program, capture_ranks=ranks)
        refused("float32, got float64", name, program=program, dtype="float64")
        refused("0 to 4, got 5", name, program=program, problem=problem | dict(mask=np.int64(5)))
    for name, units in (("forward", -1), ("forward", 3), ("paged", 0), ("paged", 3)):
        text = f"one unit or two{'' if name == 'paged' else ', or none'}, got {units}"
        refused(text, name, program=program, shared_units=np.int64(units))
    for name, capture in (("forward", -4), ("forward", 0), ("backward", -2), ("backward", 0)):
        text = f"not captured: got number {capture} of 0"
        refused(text, name, program=program, start_capture=np.int64(capture))
    for sizes in ([1], [1, 1, 1, 1, 1, 0], [1, 1, 1, 1, -1, 0, 0], [1, 1 << 31, 1, 1, 1, 0, 0]):
        text = f"none or 7 numbers from 0, all but the first to 2147483647, got {tuple(sizes)}"
        refused(text.replace(",)", ")"), program=program, sizes=np.array(sizes, np.int64))
    instantiate("forward", program=program, shared_units=np.int64(0))
    instantiate("paged", program=program)
    ranges = problem | dict(mask=np.int64(1))
    instantiate("forward", program=program, problem=ranges)
    refused("no ranges, got a mask of kind 1", "paged", program=program, problem=ranges)
    one = dict(program=program, capture_ranks=np.array([2], np.int64), gradient_program=program)
    for loads in (
        [0, 0, 1, 0, 0, 0, 0, 0], [0, 0, 1, 0, 1, 1, 0, 0], [0, 0, 1, 0, 1, 1, 0, 1],
        [0, -1, -1, 1, 0, 0, 1, 0],
    ):  # fmt: skip
        instantiate("backward", **one, gradient_loads=np.array(loads, np.int64))
    for why, *several in (
        ("8 numbers", [0], [0, 0, 1, 0, 0, 0, 0]),
        ("one of 1 captured arrays", [1, 0, 1, 0, 0, 0, 0, 0], [-1, 0, 1, 0, 0, 0, 0, 0]),
        ("an axis of queries", [0, 2, 1, 0, 0, 0, 0, 0], [0, 0, -2, 0, 0, 0, 0, 0]),
        ("one is stored", [0, 0, 1, 0, 0, 1, 0, 0], [0, 0, 1, 1, 1, 1, 0, 0],
         [0, 1, 0, 0, 1, 1, 0, 0], [0, 0, -1, 0, 1, 1, 0, 0]),
        ("not stored", [0, 0, 1, 0, 1, 0, 0, 1]),
        ("one is summed", [0, 0, 1, 0, 0, 0, 1, 0], [0, -1, -1, 1, 1, 0, 1, 0],
         2 * [0, -1, -1, 1, 0, 0, 1, 0]),
    ):  # fmt: skip
        for loads in several:
            numbers = str(tuple(loads)).replace(",)", ")")
            loads = np.array(loads, np.int64)
            for text in ("unknown loads", why, numbers):
                refused(text, "backward", **one, gradient_loads=loads)
    instantiate("backward", **one, key_sums=np.int64(2))
    for count in (-1, 3):
        refused(f"{count} key sums: at most 2", "backward", **one, key_sums=np.int64(count))
    refused("a gradient program", "backward", program=program, key_sums=np.int64(1))
"""


def test_instantiation():
    """What is wrong with a program's attributes is told when XLA compiles."""
    if _extension.devices():
        pytest.skip("there is a GPU to compile for, and the program is not a whole one")
    run_python(_STAGES)
