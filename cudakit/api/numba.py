"""The module for ``NUMBA_CUDA_MEMORY_MANAGER=cudakit.api.numba``: each context gets a separate allocator."""

from __future__ import annotations

from cudakit.api.plugs import numba_memory_manager

_numba_memory_manager = numba_memory_manager()
