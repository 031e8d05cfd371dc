"""The module built from cuda/ffi.cc."""

from typing_extensions import CapsuleType

ffi_api_version: tuple[int, int]
kernels: bool

def wrong_platform_handler() -> CapsuleType: ...

# Without kernels the functions below do not exist.

def cuda_handlers() -> dict[str, CapsuleType]: ...
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
def build_info() -> str: ...
def variants() -> list[tuple[str, str, str, int, int]]: ...
def devices() -> list[tuple[str, int, int, int]]: ...
def variant(
    *,
    pass_name: str,
    dtype: str,
    highest_precision: bool,
    q: list[int],
    k: list[int],
    v: list[int],
) -> tuple[str, int, int] | None: ...
