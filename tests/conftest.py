"""Strict JAX, eight CPU devices, and the gate of the GPU tests."""

from __future__ import annotations

import functools
import os
import re
import zlib

import hypothesis
import jax
import pytest

import larger_machine

# Before any backend starts. On a GPU XLA compiles candidates for each matrix product, and times
# them; a test computes it once or twice, and compiling would be most of what the tests take.
_NO_CANDIDATES = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_NO_CANDIDATES}".strip()
# Shardings are tested on every machine.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Other draws each time: HYPOTHESIS_PROFILE=fresh pytest tests/test_random.py --hypothesis-seed=1
# Long runs: HYPOTHESIS_PROFILE=long pytest tests/test_random.py
hypothesis.settings.register_profile(
    "default",
    derandomize=True,
    deadline=None,
    max_examples=30,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.register_profile(
    "fresh", parent=hypothesis.settings.get_profile("default"), derandomize=False
)
hypothesis.settings.register_profile(
    "long", parent=hypothesis.settings.get_profile("fresh"), max_examples=2000
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

GPU_REQUIRED = os.environ.get("JAXFLASH_REQUIRE_GPU") == "1"


def pytest_collection_modifyitems(config, items):
    """JAXFLASH_TEST_SAMPLE=3:17 runs a third of the tests; 18 and 19 run the others. With
    3:17:test_masks all tests, but of those whose names match that expression a third."""
    sample = os.environ.get("JAXFLASH_TEST_SAMPLE")
    if not sample:
        return
    parts, number, names = (*sample.split(":", 2), "")[:3]

    def is_left_out(item):
        is_drawn = (zlib.crc32(item.nodeid.encode()) + int(number)) % int(parts) == 0
        return not is_drawn and re.search(names, item.nodeid) is not None

    config.hook.pytest_deselected(items=[x for x in items if is_left_out(x)])
    items[:] = [x for x in items if not is_left_out(x)]


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("no GPU")
    if item.get_closest_marker("two_gpus") and len(jax.devices("gpu")) < 2:
        larger_machine.skip("two GPUs, and there is one")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """On a GPU machine a GPU test that skips is an error, unless it needs a larger machine."""
    report = yield
    required = GPU_REQUIRED and item.get_closest_marker("gpu")
    if required and report.skipped and not larger_machine.was_skipped(report):
        report.outcome = "failed"
        report.longrepr = f"skipped although JAXFLASH_REQUIRE_GPU=1: {report.longrepr}"
    return report


@pytest.fixture
def cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture
def quick_compilation():
    """Small programs, many of them: compiling costs more than running."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def compilations():
    """The names of the programs that XLA has compiled, since the test began or cleared the list.
    `_cache_size` of a jitted function does not tell: JAX drops entries where it holds many."""
    names = []

    def listen(event, duration, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(details.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def accurate_products():
    """On a GPU too: results are compared with others, not with a rounding to TF32."""
    with jax.default_matmul_precision("highest"):
        yield


# The package is imported by tests first, where a warning of that is an error: not above.


@pytest.fixture
def small_blocks(monkeypatch):
    """Several tiles on the blockwise path, the last ones of which overlap the ones before them."""
    from jaxflash import _blockwise

    monkeypatch.setattr(_blockwise, "_LARGEST_BLOCK", 16)
    monkeypatch.setattr(_blockwise, "_SMALLEST_BLOCK", 16)
    monkeypatch.setattr(_blockwise, "_SMALLEST_PART", 16)
    monkeypatch.setattr(_blockwise, "_LONGEST_TOGETHER", 16)


@pytest.fixture(params=["xla", pytest.param("cuda", marks=pytest.mark.gpu)])
def attend(request):
    """The attention, on each path."""
    import jaxflash

    return functools.partial(
        jaxflash.dot_product_attention, implementation=request.param, precision="highest"
    )


@pytest.fixture
def kernel_cache(tmp_path, monkeypatch):
    """The folder of kernels that were compiled at run time: an own one for each test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("JAXFLASH_CACHE_DIR", str(folder))
    return folder
