"""Work on a CUDA stream that JAX knows nothing of, so that kernels meet others on the same GPU."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import importlib.util
import pathlib
import threading
from collections.abc import Callable, Iterator

_SIZE = 1024  # of the square matrices: products short enough to come and go during one kernel


@contextlib.contextmanager
def matrix_products(ordinal: int = 0) -> Iterator[Callable[[], int]]:
    """Products of cuBLAS, one after the other, from a thread of their own until the block ends.
    Yields a function that says how many have been computed."""
    worker = _Worker(ordinal)
    worker.start()
    worker.started.wait()
    try:
        yield lambda: worker.count
    finally:
        worker.stop.set()
        worker.join()
        if worker.error is not None:
            raise worker.error


class _Worker(threading.Thread):
    def __init__(self, ordinal: int):
        super().__init__(daemon=True)
        self.ordinal = ordinal
        self.count = 0
        self.error: Exception | None = None
        self.started = threading.Event()
        self.stop = threading.Event()

    def run(self) -> None:
        try:
            self._multiply()
        except Exception as error:  # raised again where the block ends
            self.error = error
        finally:
            self.started.set()

    def _multiply(self) -> None:
        driver = ctypes.CDLL("libcuda.so.1")
        blas = ctypes.CDLL(_cublas())

        def call(library: ctypes.CDLL, name: str, *arguments) -> None:
            status = getattr(library, name)(*arguments)
            assert status == 0, f"{name}: error {status}"

        device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        memory, handle = ctypes.c_uint64(), ctypes.c_void_p()
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        matrix_bytes = 4 * _SIZE * _SIZE
        with contextlib.ExitStack() as cleanup:
            call(driver, "cuInit", 0)
            call(driver, "cuDeviceGet", ctypes.byref(device), self.ordinal)
            call(driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            cleanup.callback(call, driver, "cuDevicePrimaryCtxRelease_v2", device)
            call(driver, "cuCtxSetCurrent", context)
            non_blocking = 1
            call(driver, "cuStreamCreate", ctypes.byref(stream), non_blocking)
            cleanup.callback(call, driver, "cuStreamDestroy_v2", stream)
            size = ctypes.c_size_t(3 * matrix_bytes)
            call(driver, "cuMemAlloc_v2", ctypes.byref(memory), size)
            cleanup.callback(call, driver, "cuMemFree_v2", memory)
            call(driver, "cuMemsetD8_v2", memory, ctypes.c_ubyte(0), size)
            call(blas, "cublasCreate_v2", ctypes.byref(handle))
            cleanup.callback(call, blas, "cublasDestroy_v2", handle)
            call(blas, "cublasSetStream_v2", handle, stream)
            a, b, c = (ctypes.c_void_p(memory.value + i * matrix_bytes) for i in range(3))
            while not self.stop.is_set():
                for _ in range(20):
                    call(
                        blas, "cublasSgemm_v2", handle, 0, 0, _SIZE, _SIZE, _SIZE,
                        ctypes.byref(one), a, _SIZE, b, _SIZE, ctypes.byref(zero), c, _SIZE,
                    )  # fmt: skip
                call(driver, "cuStreamSynchronize", stream)
                self.count += 20
                self.started.set()


def _cublas() -> str:
    """The library that JAX's CUDA wheels bring along, or the machine's."""
    wheels = importlib.util.find_spec("nvidia")
    for folder in (wheels.submodule_search_locations or ()) if wheels is not None else ():
        for path in sorted(pathlib.Path(folder).rglob("libcublas.so.*"), reverse=True):
            return str(path)
    found = ctypes.util.find_library("cublas")
    assert found, "no libcublas.so: neither in JAX's CUDA wheels nor on this machine"
    return found
