"""Adapters with which other libraries use the caching allocator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cudakit.gpu.api import Allocator


def cupy_allocator(*allocators: Allocator) -> Callable[[int], Any]:
    """Return an allocation function for CuPy, which uses the given allocators, one for each device.

    Pass it to ``cupy.cuda.set_allocator`` for the process, or to ``cupy.cuda.using_allocator`` for one thread
    and a block of code. Memory is allocated on CuPy's current stream and returned to that stream when its
    last array is deleted. Raises MissingDependency without CuPy, UsageError without an allocator.

    >>> allocator = cudakit.CachingAllocator()  # doctest: +SKIP
    >>> cupy.cuda.set_allocator(cudakit.cupy_allocator(allocator))  # doctest: +SKIP
    """
    from cudakit.arrays.plugs.libraries import cupy_function

    return cupy_function(allocators)


def numba_memory_manager(*allocators: Allocator, default_stream_only: bool = False) -> type:
    """Return a class for ``numba.cuda.set_memory_manager``; call that before Numba creates a context.

    Give one allocator for each device. Without allocators, each context creates an allocator with settings
    from the environment: ``numba.cuda.current_context().memory_manager.allocator``. The environment variable
    ``NUMBA_CUDA_MEMORY_MANAGER=cudakit.api.numba`` has the same effect without a change to the program.

    Numba does not report which streams use its memory. Therefore freed memory is reused only after all work
    that was enqueued before the free on the default stream and on blocking streams. Work on non-blocking
    streams is not waited for. With ``default_stream_only``, the program must use only the default stream, and
    freed memory is reused immediately. Raises MissingDependency without Numba.

    >>> allocator = cudakit.CachingAllocator()  # doctest: +SKIP
    >>> numba.cuda.set_memory_manager(cudakit.numba_memory_manager(allocator))  # doctest: +SKIP
    """
    from cudakit.api.allocator import CachingAllocator
    from cudakit.arrays.plugs.libraries import AllocatorByDevice, numba_manager

    find_allocator = AllocatorByDevice(allocators).__getitem__ if allocators else CachingAllocator
    return numba_manager(find_allocator, default_stream_only=default_stream_only)


def rmm_resource(allocator: Allocator) -> Any:
    """Return a ``rmm.mr.CallbackMemoryResource`` for RMM, which cuDF and cuML use.

    Raises MissingDependency without RMM.

    >>> allocator = cudakit.CachingAllocator()  # doctest: +SKIP
    >>> rmm.mr.set_current_device_resource(cudakit.rmm_resource(allocator))  # doctest: +SKIP
    """
    from cudakit.arrays.plugs.libraries import rmm_resource

    return rmm_resource(allocator)


def torch_pool(upstream: str, *, no_split: bool = False, use_on_oom: bool = False) -> Any:
    """Return a ``torch.cuda.MemPool`` that takes its segments from another function of the driver.

    ``upstream`` is "managed" (cuMemAllocManaged: may exceed the memory of the device), "async"
    (cuMemAllocAsync: the driver's pool; not during captures) or "driver" (cuMemAlloc). PyTorch divides the
    segments into blocks as usual, with its own statistics and snapshots, which ``cudakit memviz`` reads.
    ``no_split`` and ``use_on_oom`` are options of MemPool.

    An allocator in Python is refused: PyTorch calls it while holding its own lock, and the call would wait
    for the GIL, which may be held by a thread that waits for that lock. Raises UsageError for such an
    allocator and for unknown names, MissingDependency without PyTorch.

    >>> with torch.cuda.use_mem_pool(cudakit.torch_pool("managed")):  # doctest: +SKIP
    ...     weights = torch.empty(2**37, dtype=torch.int8, device="cuda")
    """
    from cudakit.arrays.plugs.libraries import torch_pool

    return torch_pool(upstream, {"no_split": no_split, "use_on_oom": use_on_oom})
