"""Every block of Python in the README, the documentation and the docstrings runs."""

import ast
import functools
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import warnings

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import jaxflash
from jaxflash import masks

_ROOT = pathlib.Path(__file__).parents[1]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_PAGES = sorted(
    page.relative_to(_ROOT).as_posix()
    for page in (_ROOT / "README.md", *(_ROOT / "docs").rglob("*.md"))
    if _BLOCK.search(page.read_text())
)


def _program(page: str) -> str:
    """The blocks of a page, each on the lines on which it stands there, a check where it ends."""
    text = (_ROOT / page).read_text()
    lines = [""] * text.count("\n")
    for block in _BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1))
        code = block.group(1).splitlines()
        lines[first : first + len(code)] = code
        lines[first + len(code)] = _FINITE
    return "\n".join(lines)


# On one line, so that those of the page keep their numbers. What the kernels lack is said on the
# pages; the warning is tested elsewhere.
_STRICT = (
    "import jax as _jax, warnings; warnings.simplefilter('error'); "
    "warnings.filterwarnings('ignore', 'jaxflash: (this call runs on the blockwise path|"
    "gradients of captured arrays)'); "
)

# Of what a block calls so, if it does.
_FINITE = (
    "assert all(_jax.numpy.isfinite(x).all() for x in _jax.tree.leaves(globals().get('gradients')))"
)


@pytest.mark.parametrize("page", _PAGES)
def test_page(page, tmp_path):
    file = tmp_path / pathlib.Path(page).name
    file.write_text(_STRICT + _program(page))
    done = subprocess.run(
        [sys.executable, file],
        # Accurate products on GPUs too, where the pages compare results.
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "8", "JAX_DEFAULT_MATMUL_PRECISION": "highest"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{page}, by its own lines:\n{done.stderr}"


# What is indented below a line that ends with two colons.
_EXAMPLE = re.compile(r"^( *)(?:\S.*)?::\n((?:(?:\1 +\S.*)?\n)+)", re.MULTILINE)


def _docstrings():
    """What the examples of each docstring are, together."""
    for file in sorted((_ROOT / "jaxflash").rglob("*.py")):
        module = ast.parse(file.read_text())
        for node in ast.walk(module):
            if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
                examples = _EXAMPLE.finditer(f"{ast.get_docstring(node) or ''}\n")
                program = "\n".join(textwrap.dedent(example[2]) for example in examples)
                if program:
                    name = getattr(node, "name", "module")
                    yield pytest.param(program, id=f"{file.stem}.{name}")


@pytest.fixture
def given():
    """What the examples of the docstrings take for granted."""
    query = jnp.ones((2, 16, 8, 64))
    half = jnp.ones((2, 16, 2, 64))
    ours, theirs = (
        module(2, 8, key=jax.random.key(0))
        for module in (jaxflash.equinox.MultiheadAttention, equinox.nn.MultiheadAttention)
    )
    return dict(
        functools=functools, warnings=warnings, jax=jax, jnp=jnp, linen=linen, eqx=equinox,
        jaxflash=jaxflash, masks=masks,
        query=query, key=half, value=half, q=query, k=half, v=half, s=8,
        ids=jnp.zeros((2, 16), jnp.int32), is_padding=np.zeros((2, 16), bool),
        length=128, prefix_lengths=jnp.array([3, 5], jnp.int32),
        prefix_lm=masks.causal(), batch=2, heads=8, x=query, layers=jnp.ones(3),
        layer=lambda weights, x, mask: weights * x,
        ours=ours, theirs=theirs,
        eqx_parameters=lambda m: (m.query_proj, m.key_proj, m.value_proj, m.output_proj),
    )  # fmt: skip


@pytest.mark.parametrize("program", list(_docstrings()))
def test_docstring(program, given):
    with warnings.catch_warnings():
        exec(compile(program, "<docstring>", "exec"), given)


def test_figures_of_the_readme():
    """Six rows of the page that the benchmark writes."""
    (block,) = re.findall(
        r"<!-- six rows -->\n(.*?)<!-- /six rows -->", (_ROOT / "README.md").read_text(), re.DOTALL
    )
    rows = block.splitlines()
    assert len(rows) == 2 + 6
    assert set(rows) <= set((_ROOT / "docs/benchmarks.md").read_text().splitlines())


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links(page):
    """mkdocs checks those of the documentation."""
    for target in re.findall(r"\]\(([^)#]+)", (_ROOT / page).read_text()):
        assert (_ROOT / target).exists(), target


def test_pages_are_found():
    """The marks of a block are what the pattern takes them for."""
    assert "README.md" in _PAGES
    assert "docs/frameworks.md" in _PAGES
    assert {"_api.dot_product_attention", "masks.module"} <= {x.id for x in _docstrings()}
    for page in (_ROOT / "README.md", *(_ROOT / "docs").rglob("*.md")):
        text = page.read_text()
        assert len(_BLOCK.findall(text)) == len(re.findall(r"```\s*(?:python|py)\b", text)), page
