"""What ``NUMBA_CUDA_MEMORY_MANAGER=cudakit.api.numba`` names: each context of Numba gets an allocator."""

from __future__ import annotations


def __getattr__(name: str) -> type:
    if name != "_numba_memory_manager":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cudakit.api.plugs import numba_memory_manager

    return numba_memory_manager()
