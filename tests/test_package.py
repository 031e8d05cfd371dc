"""The installed package: its import, its names, what it says about itself."""

import ast
import ctypes
import graphlib
import inspect
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import types
import typing

import jax.export
import pytest

import jaxflash
from another_process import run_python
from jaxflash import _api, _config, _extension, _ffi, _paged

_ROOT = pathlib.Path(__file__).parents[1]


def test_sources_alone_say_what_to_do(tmp_path):
    """As in a checkout, whose folder comes before the installed package."""
    sources = tmp_path / "jaxflash"
    shutil.copytree(
        pathlib.Path(jaxflash.__file__).parent, sources,
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", "import jaxflash"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONSAFEPATH": ""},
    )  # fmt: skip
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert message.startswith("ImportError: jaxflash: ")
    assert str(sources) in message
    assert "pip install" in message


@pytest.mark.parametrize(
    ("report", "fails"),
    [
        ("ptxas info : Used 168 registers", False),
        ("ptxas info : (C7508) Potential Performance Loss: 'setmaxnreg' ignored", True),
        ("ptxas info : (C7512) Potential Performance Loss: wgmma.mma_async serialized", True),
    ],
)
def test_build_stops_at_what_ptxas_calls_a_loss(tmp_path, report, fails):
    """And leaves no object that a second run would take for done."""
    built = tmp_path / "kernel.o"
    compiler = ["sh", "-c", f'echo "{report}"; touch "$1"', "nvcc-stand-in", str(built)]
    done = subprocess.run(
        [sys.executable, _ROOT / "cmake" / "compile_kernels.py", *compiler, "-o", built],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode != 0) == fails, done.stdout
    assert built.exists() != fails
    assert (report in done.stdout) == fails


@pytest.mark.skipif(not _extension.kernels, reason="the library was built without kernels")
def test_kernels_of_other_sources_are_refused(tmp_path):
    """A library whose hash is another than the one that the extension was built with."""
    package = pathlib.Path(jaxflash.__file__).parent
    extension = pathlib.Path(_extension.__file__)
    library = package / "libjaxflash_cuda.so"
    source_hash = ctypes.CDLL(str(library)).jaxflash_source_hash
    source_hash.restype = ctypes.c_char_p
    built = source_hash()
    other = built[::-1]
    contents = library.read_bytes()
    assert contents.count(built) == 1
    (tmp_path / library.name).write_bytes(contents.replace(built, other))
    shutil.copy(extension, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", "import _extension"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONSAFEPATH": ""},
    )  # fmt: skip
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert message.startswith("ImportError: jaxflash: ")
    assert built.decode() in message
    assert other.decode() in message


@pytest.mark.parametrize("name", ["train_gpt_flax", "train_gpt_equinox", "generate"])
@pytest.mark.parametrize("how", ["script", "module"])
def test_example_finds_its_module(name, how, tmp_path):
    """Without the script's own folder on the path: `python -P` and `python -m`."""
    # A copy, as `-m` in the checkout would import its source folder.
    shutil.copytree(_ROOT / "examples", tmp_path / "examples")
    where = {"script": ["-P", f"examples/{name}.py"], "module": ["-m", f"examples.{name}"]}
    done = subprocess.run(
        [sys.executable, *where[how], "--help"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--steps" in done.stdout


@pytest.mark.parametrize(
    ("option", "given", "text"),
    [
        ("--output", "curves.txt", "--output curves.txt: must end in one of"),
        ("--output", "curves", "--output curves: must end in one of"),
        ("--seed", str(2**64), "--seed must lie in [0, 2**32)"),
    ],
)
def test_example_refuses(option, given, text, tmp_path):
    """A plot that it cannot write and the like, before it trains."""
    done = subprocess.run(
        [sys.executable, "-P", _ROOT / "examples" / "train_gpt_flax.py", "--steps", "1",
         "--batch", "1", "--layers", "1", "--width", "8", "--heads", "1", "--no-compare",
         option, given],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert text in done.stderr
    assert "parameters" not in done.stdout
    assert not list(tmp_path.iterdir())


def test_import_starts_no_backend():
    run_python(
        "import jaxflash; from jax._src import xla_bridge; "
        "assert not xla_bridge.backends_are_initialized()"
    )


def test_supported_and_show_config_start_no_backend():
    run_python(
        "import jax, jaxflash; q = jax.ShapeDtypeStruct((1, 8, 2, 64), 'bfloat16')\n"
        "jaxflash.supported(q, q, q); jaxflash.show_config()\n"
        "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    )


def test_import_needs_no_gpu():
    """Nor a driver that answers."""
    run_python("import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''; import jaxflash")


def _imports() -> dict[str, set[str]]:
    """Of each module, those within functions and for types alone too; the package itself, of which
    all are part, aside."""
    package = pathlib.Path(jaxflash.__file__).parent
    files = {
        ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__"): path
        for path in package.rglob("*.py")
    }
    del files["__init__"]
    imports = {}
    for module, path in files.items():
        found = [x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.ImportFrom)]
        names = {
            name.removeprefix("jaxflash.")
            for x in found
            for name in (x.module, *(f"{x.module}.{alias.name}" for alias in x.names))
        }
        imports[module] = (names & files.keys()) - {module}
    return imports


def test_imports_go_one_way():
    imports = _imports()
    assert imports["masks"]
    assert imports["_printer.cuda"]
    graphlib.TopologicalSorter(imports).prepare()  # raises an error that names a cycle


def test_paths_are_apart():
    """Custom calls need nothing of the blockwise path, at any remove; the definition, against which
    both are tested, needs nothing of either, and calls no score programs itself."""
    imports = _imports()

    def below(module: str) -> set[str]:
        return imports[module].union(*map(below, imports[module]))

    blockwise = {"_blockwise", "_tile", "_tile_scores", "_tile_sum", "_loops"}
    calls = {"_ffi", "_passes", "_batch_calls", "_partition"}
    assert imports.keys() >= blockwise | calls
    for module in calls:
        assert not below(module) & blockwise, module
    assert not imports["reference"] & {"_program", "_scores"}
    assert not below("reference") & (blockwise | calls | {"_kernels", "_derivatives"})


def test_import_time():
    """At most a tenth of what `import jax` takes, with what the import pulls in from JAX."""
    code = (
        "import time; start = time.process_time(); import jax; middle = time.process_time(); "
        "import jaxflash; print(start, middle, time.process_time())"
    )
    times = [tuple(map(float, run_python(code).split())) for _ in range(5)]
    # Of one process, and the smallest: on a busy machine the others measure the machine.
    shares = [(end - middle) / (middle - start) for start, middle, end in times]
    assert min(shares) < 0.1, f"shares of the time of `import jax`: {shares}, times: {times}"


def test_public_names():
    names = {
        "dot_product_attention", "paged_attention", "varlen_attention", "attention_fn",
        "merge_attention", "supported", "show_config", "reference", "EXPORT_CHECKS",
        "CHECKPOINT_NAME", "SlowPathWarning", "masks",
    }  # fmt: skip
    assert set(jaxflash.__all__) == names
    for name in names:
        value = getattr(jaxflash, name)
        assert not callable(value) or "Examples:" in value.__doc__, name
    assert isinstance(jaxflash.reference, types.ModuleType)
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", jaxflash.__version__)
    with pytest.raises(AttributeError, match="module 'jaxflash' has no attribute 'attention'"):
        jaxflash.attention  # noqa: B018


def test_every_kernel_may_be_exported():
    targets = [target for name, target in vars(_ffi).items() if name.endswith("_TARGET")]
    assert len(targets) >= 4
    for target in targets:
        check = jax.export.DisabledSafetyCheck.custom_call(target)
        assert check in jaxflash.EXPORT_CHECKS, target


def test_show_config(capsys):
    jaxflash.show_config()
    text = capsys.readouterr().out
    assert jaxflash.__version__ in text
    for word in ("jax", "FFI API", "kernels"):
        assert word in text
    if _extension.kernels:
        assert "nvcc" in text
        assert "sm80" in text
        for line in re.findall(r"^    sm\d\d .*", text, re.MULTILINE):
            assert line.endswith("at run time") == ("tangent" in line)


def test_passes_compiled_at_run_time():
    text = (_ROOT / "cmake/kernels.cmake").read_text()
    assert f"set(run_time_passes {' '.join(_config.RUN_TIME_PASSES)})" in text


def test_ffi_api_version():
    """One build registers on every supported jaxlib only with the headers of the oldest."""
    assert tuple(_extension.ffi_api_version) == (0, 3)


@pytest.mark.skipif(not _extension.kernels, reason="the library was built without kernels")
def test_every_pass_has_every_arithmetic():
    built = {(pass_name, math) for _, pass_name, math, *_ in _extension.variants()}
    expected = {
        (pass_name, math)
        for pass_name in ("forward", "backward")
        for math in ("float16", "bfloat16", "tf32", "float32")
    }
    assert expected <= built


@pytest.mark.parametrize(
    ("function", "options", "others"),
    [
        (jaxflash.dot_product_attention, _api.Options, {"query", "key", "value", "bias", "mask"}),
        (jaxflash.varlen_attention, _api.PackedOptions, {"max_query_len", "max_kv_len"}),
        (jaxflash.paged_attention, _paged.PagedOptions, set()),
    ],
)
def test_types_of_options(function, options, others):
    """What a type checker knows of a call is what the function takes."""
    keywords = {
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    }
    assert set(typing.get_type_hints(options)) == keywords - others - {"return_residual"}


def test_typed():
    assert (pathlib.Path(jaxflash.__file__).parent / "py.typed").exists()


def test_tracing_is_quick():
    """A trace of forward and gradient costs what a model with many layers can afford."""
    import jax
    import jax.numpy as jnp

    q = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)

    def loss(*qkv):
        return jnp.sum(jaxflash.dot_product_attention(*qkv, is_causal=True)).astype(jnp.float32)

    jax.eval_shape(jax.grad(loss), q, q, q)
    start = time.process_time()
    jax.eval_shape(jax.grad(lambda *qkv: loss(*qkv)), q, q, q)
    assert time.process_time() - start < 1.0
