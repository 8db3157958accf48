"""The ways of an allocator into other libraries; each takes the library's own call to switch it on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cudakit.gpu.api.allocator import Allocator


def cupy_allocator(*allocators: Allocator) -> Callable[[int], Any]:
    """Return a function that lets CuPy take its memory from allocators, one for each device that it uses.

    CuPy's own calls take it: ``cupy.cuda.set_allocator`` for the process, ``cupy.cuda.using_allocator`` for
    a thread and a block. Memory is of the stream that is current in CuPy, and goes back to that stream when
    its last array is gone. Raises MissingDependency without CuPy.

    >>> allocator = cudakit.CachingAllocator()  # doctest: +SKIP
    >>> cupy.cuda.set_allocator(cudakit.cupy_allocator(allocator))  # doctest: +SKIP
    """
    from cudakit.gpu.plugs.callbacks import cupy_function

    return cupy_function(allocators)


def numba_memory_manager(*allocators: Allocator, default_stream_only: bool = False) -> type:
    """Return a class for ``numba.cuda.set_memory_manager``, which is to be called before Numba has a context.

    There is one allocator for each device; without any, each context makes its own, from the environment:
    ``numba.cuda.current_context().memory_manager.allocator``. The environment variable
    ``NUMBA_CUDA_MEMORY_MANAGER=cudakit.api.numba`` does that without a change to the program.

    Numba does not say which streams use its memory. So what is freed is reused once all that was enqueued
    before has run, on the default stream and on all that wait for it; streams that were made to not wait
    (non-blocking) are not seen. ``default_stream_only`` says that the program uses no stream but the
    default one: what is freed is reused at once. Raises MissingDependency without Numba.

    >>> allocator = cudakit.CachingAllocator()  # doctest: +SKIP
    >>> numba.cuda.set_memory_manager(cudakit.numba_memory_manager(allocator))  # doctest: +SKIP
    """
    from cudakit.api.allocator import CachingAllocator
    from cudakit.gpu.plugs.numba import among, memory_manager

    source = among(allocators) if allocators else CachingAllocator
    return memory_manager(source, default_stream_only=default_stream_only)


def rmm_resource(allocator: Allocator) -> Any:
    """Return a ``rmm.mr.CallbackMemoryResource``, for RMM and so for cuDF and cuML.

    Raises MissingDependency without RMM.

    >>> allocator = cudakit.CachingAllocator()  # doctest: +SKIP
    >>> rmm.mr.set_current_device_resource(cudakit.rmm_resource(allocator))  # doctest: +SKIP
    """
    from cudakit.gpu.plugs.callbacks import rmm_resource

    return rmm_resource(allocator)


def torch_pool(upstream: str, *, no_split: bool = False, use_on_oom: bool = False) -> Any:
    """Return a ``torch.cuda.MemPool`` whose segments come from the driver by another way than torch's.

    ``upstream`` is "managed" (cuMemAllocManaged: more memory than the device has), "async" (cuMemAllocAsync:
    the driver's pool; not within captures) or "driver" (cuMemAlloc). The blocks in the segments are torch's
    as ever, and so are its statistics and snapshots, which ``cudakit memviz`` reads; ``no_split`` and
    ``use_on_oom`` are the MemPool's own.

    An allocator written in Python is refused: torch calls it inside the lock of its own, where it would
    wait for ever for the interpreter that another thread has, who waits for that lock. Raises UsageError
    for that and for unknown names, MissingDependency without torch.

    >>> with torch.cuda.use_mem_pool(cudakit.torch_pool("managed")):  # doctest: +SKIP
    ...     weights = torch.empty(2**37, dtype=torch.int8, device="cuda")
    """
    from cudakit.gpu.plugs.torch import pool

    return pool(upstream, {"no_split": no_split, "use_on_oom": use_on_oom})
