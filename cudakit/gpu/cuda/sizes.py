"""The sizes of allocations: what may be asked for, and what is still there."""

from __future__ import annotations

from cudakit.gpu.api import Ptr
from cudakit.gpu.explain import Status, cuda_error


def check_size(size_bytes: int) -> None:
    """Refuse an allocation of nothing."""
    if size_bytes <= 0:
        raise cuda_error(Status.INVALID_VALUE, seen=f"{size_bytes} bytes asked")


def forget(sizes: dict[Ptr, int], ptr: Ptr, what: str) -> int:
    """Take an allocation out. Raises CUDA_ERROR_INVALID_VALUE where none begins there."""
    try:
        return sizes.pop(ptr)
    except KeyError:
        raise cuda_error(
            Status.INVALID_VALUE, seen=f"{what} begins at {ptr:#x}; it may have been freed before"
        ) from None
