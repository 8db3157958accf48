"""Adapters for CuPy and RMM, which call two functions of an allocator: alloc and free."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from cudakit.errors import MissingDependency, UsageError
from cudakit.gpu.api.allocator import Allocator


class AllocatorByDevice(dict[int, Allocator]):
    """Allocators by CUDA device index. Raises UsageError for a device without an allocator, or with two."""

    def __init__(self, allocators: Iterable[Allocator]) -> None:
        super().__init__()
        for allocator in allocators:
            if allocator.device in self:
                raise UsageError(
                    f"two allocators were given for cuda:{allocator.device}",
                    hint="give one for each device",
                )
            self[allocator.device] = allocator
        if not self:
            raise UsageError(
                "no allocator was given",
                hint="give one for each device: cudakit.CachingAllocator(0)",
            )

    def __missing__(self, device: int) -> Allocator:
        devices_text = ", ".join(f"cuda:{device_index}" for device_index in sorted(self))
        raise UsageError(
            f"no allocator was given for cuda:{device}, only for {devices_text}",
            hint=f"add cudakit.CachingAllocator({device})",
        )


def cupy_function(allocators: Iterable[Allocator]) -> Callable[[int], Any]:
    """Return a function for cupy.cuda.set_allocator. Raises MissingDependency without CuPy."""
    try:
        import cupy  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise MissingDependency(
            "cupy", purpose="an allocator for CuPy", requirement="cupy-cuda13x"
        ) from error
    return cupy_function_of(cupy, allocators)


def cupy_function_of(cupy: Any, allocators: Iterable[Allocator]) -> Callable[[int], Any]:
    """Return a function that allocates a MemoryPointer on the current device and stream, given a size.

    Freed memory can be reused by the stream of its allocation at once, as with CuPy's own pool: a program
    that uses the memory on another stream must synchronize the two streams, or call the allocator's
    ``record_use``.
    """
    allocator_by_device = AllocatorByDevice(allocators)
    current_stream = cupy.cuda.get_current_stream

    def malloc(size_bytes: int, device: int) -> int:
        return allocator_by_device[device].alloc(size_bytes, current_stream().ptr)

    def free(ptr: int, device: int) -> None:
        allocator_by_device[device].free(ptr)

    # This is the fastest interface of CuPy, because its memory objects are created and destroyed in C++.
    function: Callable[[int], Any] = cupy.cuda.PythonFunctionAllocator(malloc, free).malloc
    return function


def rmm_resource(allocator: Allocator) -> Any:
    """Return a rmm.mr.CallbackMemoryResource. Raises MissingDependency without RMM."""
    try:
        import rmm.mr  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise MissingDependency(
            "rmm", purpose="a memory resource of RMM", requirement="rmm-cu13"
        ) from error
    return rmm_resource_of(rmm.mr, allocator)


def rmm_resource_of(mr: Any, allocator: Allocator) -> Any:
    """Return a CallbackMemoryResource, given the module ``rmm.mr``."""

    def allocate(size_bytes: int, stream: Any) -> int:
        # RMM turns a MemoryError into a std::bad_alloc, which its adaptors and libcudf catch.
        return allocator.alloc(size_bytes, stream.__cuda_stream__()[1])

    def deallocate(ptr: int, size_bytes: int, stream: Any) -> None:  # noqa: ARG001
        allocator.free(ptr, stream.__cuda_stream__()[1])

    return mr.CallbackMemoryResource(allocate, deallocate)
