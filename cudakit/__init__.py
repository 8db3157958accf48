"""Tools for Python programs on CUDA: memory, races, benchmarks and the state of the GPUs.

Each public name is imported when it is first used, so that ``import cudakit`` is fast.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cudakit.api import devices as devices, profiler as profiler
    from cudakit.api.allocator import (
        CachingAllocator as CachingAllocator,
        ForkedAllocator as ForkedAllocator,
        GraphMemory as GraphMemory,
        InvalidPointer as InvalidPointer,
        InvalidSize as InvalidSize,
        MemPool as MemPool,
        OpenedMemory as OpenedMemory,
        OutOfMemory as OutOfMemory,
        PoolError as PoolError,
        Reentered as Reentered,
        SettingRefused as SettingRefused,
        SharedMemory as SharedMemory,
    )
    from cudakit.api.cuda_core import CachingMemoryResource as CachingMemoryResource
    from cudakit.arrays.generator import Generator as Generator
    from cudakit.arrays.cuda_kernel import CudaKernel as CudaKernel, kernel as kernel
    from cudakit.arrays.kernels import (
        DeviceArray as DeviceArray,
        Elementwise as Elementwise,
        Reduction as Reduction,
        elementwise as elementwise,
        reduction as reduction,
        to_device as to_device,
    )
    from cudakit.api.memory import (
        load_snapshot as load_snapshot,
        memviz as memviz,
        memviz_diff as memviz_diff,
        memviz_what_if as memviz_what_if,
    )
    from cudakit.arrays.nonfinite import (
        LossScaler as LossScaler,
        count_nonfinite as count_nonfinite,
    )
    from cudakit.api.pin import PinnedMemory as PinnedMemory, pin as pin
    from cudakit.api.plugs import (
        cupy_allocator as cupy_allocator,
        numba_memory_manager as numba_memory_manager,
        rmm_resource as rmm_resource,
        torch_pool as torch_pool,
    )
    from cudakit.api.profile import profile as profile, timed as timed
    from cudakit.api.record_memory import record_memory as record_memory
    from cudakit.api.sanitize import sanitize as sanitize
    from cudakit.arrays.softmax import softmax as softmax
    from cudakit.errors import (
        CudaError as CudaError,
        CudakitError as CudakitError,
        EnvironmentUnusable as EnvironmentUnusable,
        InputError as InputError,
        MissingDependency as MissingDependency,
        RaceError as RaceError,
        SnapshotError as SnapshotError,
        Unsupported as Unsupported,
        UsageError as UsageError,
    )
    from cudakit.gpu.cuda.current import (
        can_access_peer as can_access_peer,
        capability as capability,
        current_device as current_device,
        current_stream as current_stream,
        device as device,
        device_count as device_count,
        device_name as device_name,
        is_available as is_available,
        is_initialized as is_initialized,
        mem_get_info as mem_get_info,
        set_device as set_device,
        stream as stream,
        synchronize as synchronize,
    )
    from cudakit.arrays.graph import graph as graph
    from cudakit.gpu.nvtx import (
        mark as mark,
        pop_range as pop_range,
        push_range as push_range,
        range as range,  # noqa: A004 the term of NVTX
    )

    __version__: str

# Public names, each with the module that defines it.
_MODULES = {
    "CachingAllocator": "cudakit.api.allocator",
    "CachingMemoryResource": "cudakit.api.cuda_core",
    "CudaError": "cudakit.errors",
    "CudaKernel": "cudakit.arrays.cuda_kernel",
    "CudakitError": "cudakit.errors",
    "DeviceArray": "cudakit.arrays.kernels",
    "Elementwise": "cudakit.arrays.kernels",
    "EnvironmentUnusable": "cudakit.errors",
    "ForkedAllocator": "cudakit.api.allocator",
    "Generator": "cudakit.arrays.generator",
    "GraphMemory": "cudakit.api.allocator",
    "InputError": "cudakit.errors",
    "InvalidPointer": "cudakit.api.allocator",
    "InvalidSize": "cudakit.api.allocator",
    "LossScaler": "cudakit.arrays.nonfinite",
    "MemPool": "cudakit.api.allocator",
    "MissingDependency": "cudakit.errors",
    "OpenedMemory": "cudakit.api.allocator",
    "OutOfMemory": "cudakit.api.allocator",
    "PinnedMemory": "cudakit.api.pin",
    "PoolError": "cudakit.api.allocator",
    "RaceError": "cudakit.errors",
    "Reentered": "cudakit.api.allocator",
    "Reduction": "cudakit.arrays.kernels",
    "SettingRefused": "cudakit.api.allocator",
    "SharedMemory": "cudakit.api.allocator",
    "SnapshotError": "cudakit.errors",
    "Unsupported": "cudakit.errors",
    "UsageError": "cudakit.errors",
    "can_access_peer": "cudakit.gpu.cuda.current",
    "capability": "cudakit.gpu.cuda.current",
    "count_nonfinite": "cudakit.arrays.nonfinite",
    "cupy_allocator": "cudakit.api.plugs",
    "current_device": "cudakit.gpu.cuda.current",
    "current_stream": "cudakit.gpu.cuda.current",
    "device": "cudakit.gpu.cuda.current",
    "device_count": "cudakit.gpu.cuda.current",
    "device_name": "cudakit.gpu.cuda.current",
    "devices": "cudakit.api",
    "elementwise": "cudakit.arrays.kernels",
    "graph": "cudakit.arrays.graph",
    "is_available": "cudakit.gpu.cuda.current",
    "is_initialized": "cudakit.gpu.cuda.current",
    "kernel": "cudakit.arrays.cuda_kernel",
    "load_snapshot": "cudakit.api.memory",
    "mark": "cudakit.gpu.nvtx",
    "mem_get_info": "cudakit.gpu.cuda.current",
    "memviz": "cudakit.api.memory",
    "memviz_diff": "cudakit.api.memory",
    "memviz_what_if": "cudakit.api.memory",
    "numba_memory_manager": "cudakit.api.plugs",
    "pin": "cudakit.api.pin",
    "pop_range": "cudakit.gpu.nvtx",
    "profile": "cudakit.api.profile",
    "profiler": "cudakit.api",
    "push_range": "cudakit.gpu.nvtx",
    "range": "cudakit.gpu.nvtx",
    "record_memory": "cudakit.api.record_memory",
    "reduction": "cudakit.arrays.kernels",
    "rmm_resource": "cudakit.api.plugs",
    "sanitize": "cudakit.api.sanitize",
    "set_device": "cudakit.gpu.cuda.current",
    "softmax": "cudakit.arrays.softmax",
    "stream": "cudakit.gpu.cuda.current",
    "synchronize": "cudakit.gpu.cuda.current",
    "timed": "cudakit.api.profile",
    "to_device": "cudakit.arrays.kernels",
    "torch_pool": "cudakit.api.plugs",
}

__all__ = sorted(("__version__", *_MODULES))


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("cudakit")
    if name not in _MODULES:
        raise AttributeError(f"module 'cudakit' has no attribute {name!r}")
    from importlib import import_module

    # Stored as an attribute of the module, so that Python calls __getattr__ only once for each name.
    attribute = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return attribute


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """The package, whose public ``devices``, ``profile`` and ``sanitize`` are also names of subpackages."""

    def __setattr__(self, name: str, value: object) -> None:
        # The import of a subpackage binds it in the package, where the public name stays.
        if not (name in _MODULES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
