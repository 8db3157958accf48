"""Answers about the GPU for people who write Python on CUDA.

The public names are imported when they are first used, so that ``import cudakit`` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cudakit.api import profiler
    from cudakit.api.allocator import (
        CachingAllocator,
        GraphMemory,
        MemPool,
        OpenedMemory,
        OutOfMemory,
        PoolError,
        SharedMemory,
    )
    from cudakit.api.cuda_core import CachingMemoryResource
    from cudakit.api.device import (
        can_access_peer,
        capability,
        current_device,
        current_stream,
        device,
        device_count,
        device_name,
        devices,
        is_available,
        is_initialized,
        mem_get_info,
        set_device,
        stream,
        synchronize,
    )
    from cudakit.api.graph import graph
    from cudakit.api.memory import (
        load_snapshot,
        memviz,
        memviz_diff,
        memviz_what_if,
        record_memory,
    )
    from cudakit.api.plugs import (
        cupy_allocator,
        numba_memory_manager,
        rmm_resource,
        torch_pool,
    )
    from cudakit.api.sanitize import sanitize
    from cudakit.errors import (
        CudaError,
        CudakitError,
        EnvironmentUnusable,
        InputError,
        MissingDependency,
        RaceError,
        SnapshotError,
        UsageError,
    )
    from cudakit.gpu.nvtx import (
        mark,
        pop_range,
        push_range,
        range,  # noqa: A004 the term of NVTX
    )

    __version__: str

_HOMES = {
    "CachingAllocator": "cudakit.api.allocator",
    "CachingMemoryResource": "cudakit.api.cuda_core",
    "CudaError": "cudakit.errors",
    "CudakitError": "cudakit.errors",
    "EnvironmentUnusable": "cudakit.errors",
    "GraphMemory": "cudakit.api.allocator",
    "InputError": "cudakit.errors",
    "MemPool": "cudakit.api.allocator",
    "MissingDependency": "cudakit.errors",
    "OpenedMemory": "cudakit.api.allocator",
    "OutOfMemory": "cudakit.api.allocator",
    "PoolError": "cudakit.api.allocator",
    "RaceError": "cudakit.errors",
    "SharedMemory": "cudakit.api.allocator",
    "SnapshotError": "cudakit.errors",
    "UsageError": "cudakit.errors",
    "can_access_peer": "cudakit.api.device",
    "capability": "cudakit.api.device",
    "cupy_allocator": "cudakit.api.plugs",
    "current_device": "cudakit.api.device",
    "current_stream": "cudakit.api.device",
    "device": "cudakit.api.device",
    "device_count": "cudakit.api.device",
    "device_name": "cudakit.api.device",
    "devices": "cudakit.api.device",
    "graph": "cudakit.api.graph",
    "is_available": "cudakit.api.device",
    "is_initialized": "cudakit.api.device",
    "load_snapshot": "cudakit.api.memory",
    "mark": "cudakit.gpu.nvtx",
    "mem_get_info": "cudakit.api.device",
    "memviz": "cudakit.api.memory",
    "memviz_diff": "cudakit.api.memory",
    "memviz_what_if": "cudakit.api.memory",
    "numba_memory_manager": "cudakit.api.plugs",
    "pop_range": "cudakit.gpu.nvtx",
    "profiler": "cudakit.api",
    "push_range": "cudakit.gpu.nvtx",
    "range": "cudakit.gpu.nvtx",
    "record_memory": "cudakit.api.memory",
    "rmm_resource": "cudakit.api.plugs",
    "sanitize": "cudakit.api.sanitize",
    "set_device": "cudakit.api.device",
    "stream": "cudakit.api.device",
    "synchronize": "cudakit.api.device",
    "torch_pool": "cudakit.api.plugs",
}

__all__ = [
    "CachingAllocator",
    "CachingMemoryResource",
    "CudaError",
    "CudakitError",
    "EnvironmentUnusable",
    "GraphMemory",
    "InputError",
    "MemPool",
    "MissingDependency",
    "OpenedMemory",
    "OutOfMemory",
    "PoolError",
    "RaceError",
    "SharedMemory",
    "SnapshotError",
    "UsageError",
    "__version__",
    "can_access_peer",
    "capability",
    "cupy_allocator",
    "current_device",
    "current_stream",
    "device",
    "device_count",
    "device_name",
    "devices",
    "graph",
    "is_available",
    "is_initialized",
    "load_snapshot",
    "mark",
    "mem_get_info",
    "memviz",
    "memviz_diff",
    "memviz_what_if",
    "numba_memory_manager",
    "pop_range",
    "profiler",
    "push_range",
    "range",
    "record_memory",
    "rmm_resource",
    "sanitize",
    "set_device",
    "stream",
    "synchronize",
    "torch_pool",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("cudakit")
    if name not in _HOMES:
        raise AttributeError(f"module 'cudakit' has no attribute {name!r}")
    from importlib import import_module

    # Kept, so that a range inside a loop pays for the look-up once.
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
