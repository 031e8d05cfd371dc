"""The module built from cuda/ffi."""

from collections.abc import Sequence

from typing_extensions import CapsuleType

ffi_api_version: tuple[int, int]
kernels: bool
constants: dict[str, int]  # that Python modules repeat, of the headers in cuda/

def wrong_platform_handler() -> CapsuleType: ...

# Without kernels the functions below do not exist.

def cuda_handlers() -> dict[str, dict[str, CapsuleType]]: ...
def state_types() -> dict[str, tuple[CapsuleType, CapsuleType]]: ...
def set_compiler(locations: list[tuple[str, str | None]], headers: str) -> None: ...
def compiler() -> tuple[tuple[int, int] | None, str]: ...
def compile_program(
    *,
    pass_name: str,
    source: str,
    unit_slope: bool,
    bounded: bool,
    dtype: str,
    highest_precision: bool,
    head_dim: int,
    value_dim: int,
    scale: float,
    arch: int,
    shared_memory: int,
    mask: int = 0,
    walks: bool = False,
    one_sided: bool = False,
    deterministic: bool = False,
    paged: bool = False,
    shared_units: int = 0,
    sizes: Sequence[int] = (),
    start_capture: int = -1,
) -> tuple[str, str, str, int, int, bool, float, bool]: ...
def compile_kernel(
    source: str, kernel: str, architecture: str
) -> tuple[str, str, str, int, int, bool, float, bool]: ...
def kernel_reports() -> list[tuple[str, str, str, int, int, bool, float, bool]]: ...
def cache_folder() -> str: ...
def forward_workspace_bytes(
    *,
    dtype: str,
    batch: int,
    q_len: int,
    kv_len: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    left: int,
    right: int,
    shared_units: int | None = None,
) -> int: ...
def shared_units(
    *,
    dtype: str,
    batch: int,
    q_len: int,
    kv_len: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    left: int,
    right: int,
    paged: bool,
) -> int: ...
def backward_workspace_bytes(
    *,
    batch: int,
    q_len: int,
    kv_len: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
) -> int: ...
def batch_sum_workspace_bytes(*, batch: int, kv_len: int, kv_heads: int, batch_sum: int) -> int: ...
def build_info() -> str: ...
def variants() -> list[tuple[str, str, str, int, int]]: ...
def devices() -> list[tuple[str, int, int, int, bool]]: ...
def variant(
    *,
    pass_name: str,
    dtype: str,
    highest_precision: bool,
    q: list[int],
    k: list[int],
    v: list[int],
) -> tuple[str, int, int] | None: ...
