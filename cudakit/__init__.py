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

# The public names that each module defines.
_NAMES = {
    "cudakit.api": "devices profiler",
    "cudakit.api.allocator": (
        "CachingAllocator ForkedAllocator GraphMemory InvalidPointer InvalidSize MemPool "
        "OpenedMemory OutOfMemory PoolError Reentered SettingRefused SharedMemory"
    ),
    "cudakit.api.cuda_core": "CachingMemoryResource",
    "cudakit.api.memory": "load_snapshot memviz memviz_diff memviz_what_if",
    "cudakit.api.pin": "PinnedMemory pin",
    "cudakit.api.plugs": "cupy_allocator numba_memory_manager rmm_resource torch_pool",
    "cudakit.api.profile": "profile timed",
    "cudakit.api.record_memory": "record_memory",
    "cudakit.api.sanitize": "sanitize",
    "cudakit.arrays.cuda_kernel": "CudaKernel kernel",
    "cudakit.arrays.generator": "Generator",
    "cudakit.arrays.graph": "graph",
    "cudakit.arrays.kernels": "DeviceArray Elementwise Reduction elementwise reduction to_device",
    "cudakit.arrays.nonfinite": "LossScaler count_nonfinite",
    "cudakit.arrays.softmax": "softmax",
    "cudakit.errors": (
        "CudaError CudakitError EnvironmentUnusable InputError MissingDependency RaceError "
        "SnapshotError Unsupported UsageError"
    ),
    "cudakit.gpu.cuda.current": (
        "can_access_peer capability current_device current_stream device device_count "
        "device_name is_available is_initialized mem_get_info set_device stream synchronize"
    ),
    "cudakit.gpu.nvtx": "mark pop_range push_range range",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

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
