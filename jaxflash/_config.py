"""What this installation was built with and what it finds on this machine."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jaxlib.version

from jaxflash import _extension as extension

# cmake/kernels.cmake: run_time_passes.
RUN_TIME_PASSES = ("tangent",)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One kernel of this installation: it takes heads up to `head_dim` for queries and keys,
    `value_dim` for values. Those of `RUN_TIME_PASSES` are compiled when a program needs them."""

    family: str  # "sm80": every GPU from Ampere on; "sm90": Hopper
    pass_: str  # "forward", "backward", "tangent"
    math: str  # "float16", "bfloat16", "tf32", "float32"
    head_dim: int
    value_dim: int

    @property
    def head_sizes(self) -> str:
        same = self.head_dim == self.value_dim
        return str(self.head_dim) if same else f"{self.head_dim}/{self.value_dim}"


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU of this machine."""

    name: str
    compute_capability: tuple[int, int]
    shared_memory_per_block: int  # bytes
    has_kernels: bool  # this build has kernels for it

    @property
    def reason_against(self) -> str:
        """Why the kernels do not run on it; "" if they do."""
        if self.has_kernels:
            return ""
        capability = "{}.{}".format(*self.compute_capability)
        if self.compute_capability < (8, 0):
            return f"the kernels need compute capability 8.0 or newer, {self.name} has {capability}"
        return (
            f"no kernel of this build ({extension.build_info()}) runs on {self.name}, of compute "
            f"capability {capability}, which needs a build with it in JAXFLASH_CUDA_ARCHS"
        )


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    """A kernel that this process has compiled for a score function, or read from the cache. Of
    those that differ in the tile alone, calls run the first that neither spills nor is serialised.
    """

    name: str  # family, pass, arithmetic, largest head size
    tile: str
    architecture: str
    registers: int
    spilled: int  # bytes of a thread
    serialised: bool  # warpgroup instructions wait for one another
    seconds: float
    from_disk: bool

    def __str__(self) -> str:
        spills = f", {self.spilled} bytes spilled" if self.spilled else ""
        serialised = ", serialised" if self.serialised else ""
        source = "read" if self.from_disk else "compiled"
        return (
            f"{self.name} for {self.architecture}: {self.registers} registers{spills}{serialised}, "
            f"{source} in {self.seconds:.3f} s, {self.tile.removeprefix('jaxflash::')}"
        )


@dataclasses.dataclass(frozen=True)
class Config:
    """Printed by `show_config`."""

    version: str
    jax_version: str
    jaxlib_version: str
    ffi_api_version: tuple[int, int]  # of XLA's headers that the handlers were compiled with
    kernels: bool
    build_info: str  # versions of nvcc and ptxas, architectures; "" without kernels
    variants: tuple[Variant, ...]
    devices: tuple[Device, ...]  # empty without kernels, a driver or a GPU
    # What compiles score functions: its version, or None, and its path, or what is wrong.
    nvrtc_version: tuple[int, int] | None
    nvrtc: str
    cache_folder: str  # of compiled score functions; "" for none
    compiled: tuple[CompiledKernel, ...]  # by this process, in order

    def __str__(self) -> str:
        ffi_major, ffi_minor = self.ffi_api_version
        lines = [
            f"jaxflash {self.version}",
            f"  jax       {self.jax_version}, jaxlib {self.jaxlib_version}",
            f"  FFI API   {ffi_major}.{ffi_minor}",
        ]
        if not self.kernels:
            lines.append("  kernels   none: built with JAXFLASH_CUDA=OFF or without CUDA")
            return "\n".join(lines)
        lines.append(f"  kernels   {self.build_info}")
        by_kind = itertools.groupby(self.variants, lambda v: (v.family, v.pass_, v.math))
        for (family, pass_, math), variants in by_kind:
            head_sizes = " ".join(variant.head_sizes for variant in variants)
            when = ", compiled at run time" if pass_ in RUN_TIME_PASSES else ""
            lines.append(f"    {family} {pass_:<8} {math:<8} head sizes up to {head_sizes}{when}")
        for device in self.devices:
            major, minor = device.compute_capability
            lines.append(
                f"  device    {device.name}, compute capability {major}.{minor}, "
                f"{device.shared_memory_per_block} bytes of shared memory per block"
                f"{'' if device.has_kernels else '; no kernels for it'}"
            )
        if not self.devices:
            lines.append("  device    none: no NVIDIA GPU, or no driver for this CUDA version")
        if self.nvrtc_version is None:
            lines.append(f"  NVRTC     none: {self.nvrtc}")
        else:
            lines.append(f"  NVRTC     {'.'.join(map(str, self.nvrtc_version))}, {self.nvrtc}")
        lines.append(f"  cache     {self.cache_folder or 'in memory alone'}")
        lines += [f"    {kernel}" for kernel in self.compiled]
        return "\n".join(lines)


def devices() -> tuple[Device, ...]:
    """The GPUs of this machine, as the CUDA driver of the kernels shows them."""
    rows = extension.devices() if extension.kernels else ()
    return tuple(
        Device(name, (major, minor), shared_memory, has_kernels)
        for name, major, minor, shared_memory, has_kernels in rows
    )


def config() -> Config:
    """The data behind `show_config`. Asks the CUDA driver for devices; starts no JAX backend."""
    from jaxflash import __version__  # the package is complete once this is called

    kernels = extension.kernels
    nvrtc_version, nvrtc = extension.compiler() if kernels else (None, "")
    return Config(
        version=__version__,
        jax_version=jax.__version__,
        jaxlib_version=jaxlib.version.__version__,
        ffi_api_version=extension.ffi_api_version,
        kernels=kernels,
        build_info=extension.build_info() if kernels else "",
        variants=tuple(Variant(*row) for row in extension.variants()) if kernels else (),
        devices=devices(),
        nvrtc_version=nvrtc_version,
        nvrtc=nvrtc,
        cache_folder=extension.cache_folder() if kernels else "",
        compiled=tuple(
            CompiledKernel(*row) for row in (extension.kernel_reports() if kernels else ())
        ),
    )


def show_config() -> None:
    """Prints what this installation was built with, the GPUs that its kernels see, the compiler of
    kernels at run time (NVRTC) and its cache folder, and which kernels this process has compiled
    or read from the cache.

    The folder is ``$JAXFLASH_CACHE_DIR`` (empty: none), else ``$XDG_CACHE_HOME/jaxflash``, else
    ``~/.cache/jaxflash``. With ``JAXFLASH_KEEP_SOURCES=<folder>`` the source of each of these
    kernels is written to that folder, and they are compiled with line numbers for profilers and
    compute-sanitizer.

    ``python -m jaxflash`` also tests the numbers and times calls.

    Examples:
      ::

          jaxflash.show_config()
    """
    print(config())
