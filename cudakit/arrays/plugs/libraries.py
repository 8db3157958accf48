"""Adapters with which CuPy, RMM, Numba and PyTorch allocate: ``cudakit.api.plugs`` describes them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from ctypes import c_void_p, memmove, string_at
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any

from cudakit.errors import EnvironmentUnusable, MissingDependency, UsageError
from cudakit.gpu.api import HANDLE_BYTES, LEGACY, Allocator

# The stream that Numba's memory is allocated on: Numba reports neither the stream of an allocation nor the
# streams that use it. No program uses this stream, so memory that is freed on the default stream is reused
# only after an event on that stream.
UNUSED_STREAM = -1

# The driver function that allocates the segments of a MemPool of PyTorch, by the value of ``upstream``.
UPSTREAMS = {
    "driver": "cuMemAlloc, which PyTorch uses by default",
    "managed": "cuMemAllocManaged: migrates between host and device, may exceed the device's memory",
    "async": "cuMemAllocAsync: the driver's pool, shared by the process",
}


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
    """Return a function for cupy.cuda.set_allocator. Raises MissingDependency without CuPy.

    The function allocates a MemoryPointer on the current device and stream, given a size. Freed memory can be
    reused by the stream of its allocation at once, as with CuPy's own pool: a program that uses the memory on
    another stream must synchronize the two streams, or call the allocator's ``record_use``.
    """
    try:
        import cupy  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise MissingDependency(
            "cupy", purpose="an allocator for CuPy", requirement="cupy-cuda13x"
        ) from error
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
        from rmm import mr  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise MissingDependency(
            "rmm", purpose="a memory resource of RMM", requirement="rmm-cu13"
        ) from error

    def allocate(size_bytes: int, stream: Any) -> int:
        # RMM turns a MemoryError into a std::bad_alloc, which its adaptors and libcudf catch.
        return allocator.alloc(size_bytes, stream.__cuda_stream__()[1])

    def deallocate(ptr: int, size_bytes: int, stream: Any) -> None:  # noqa: ARG001
        allocator.free(ptr, stream.__cuda_stream__()[1])

    return mr.CallbackMemoryResource(allocate, deallocate)


def numba_manager(find_allocator: Callable[[int], Allocator], *, default_stream_only: bool) -> type:
    """Return a class for numba.cuda.set_memory_manager (numba-cuda's documentation, "EMM").

    ``find_allocator`` returns the allocator of a device. Raises MissingDependency without Numba.
    """
    try:
        from numba import cuda  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise MissingDependency(
            "numba-cuda", purpose="a memory manager for Numba", requirement="numba-cuda[cu13]"
        ) from error
    alloc_stream, free_stream = (0, None) if default_stream_only else (UNUSED_STREAM, LEGACY)

    class MemoryManager(cuda.HostOnlyCUDAMemoryManager):  # type: ignore[misc,unused-ignore]
        """Allocates the memory of one context from ``allocator``."""

        interface_version = 1

        @cached_property
        def allocator(self) -> Allocator:
            # The allocator is looked up at its first use, because Numba queries the interface version from a
            # manager without a context.
            return find_allocator(self.context.device.id)

        def initialize(self) -> None:
            pass

        def memalloc(self, size: int) -> Any:
            allocator = self.allocator
            ptr = allocator.alloc(size, alloc_stream)
            finalizer = partial(allocator.free, ptr, free_stream)
            context = weakref.proxy(self.context)
            return cuda.MemoryPointer(context, c_void_p(ptr), size, finalizer=finalizer)

        def get_memory_info(self) -> Any:
            memory_info = self.allocator.memory_info()
            return cuda.MemoryInfo(free=memory_info.free_bytes, total=memory_info.total_bytes)

        def get_ipc_handle(self, memory: Any) -> Any:
            """Return Numba's IPC handle: the handle of the segment and the offset of the memory in it.

            Raises Unsupported for an expandable segment: Numba can only use cuIpcOpenMemHandle.
            """
            handle = self.allocator.ipc_handle(memory.device_pointer_value or 0)
            identity = self.context.device.get_device_identity()
            return _numba_handle(memory, handle.data, memory.size, identity, handle.offset_bytes)

    return MemoryManager


def _numba_handle(
    memory: Any, data: bytes, size_bytes: int, source_info: Any, offset_bytes: int
) -> Any:
    """Return an IPC handle of Numba that can be pickled.

    Numba's own class reads the attribute ``reserved`` of the handle, which some versions of cuda-bindings
    lack.
    """
    from cuda.bindings.driver import CUipcMemHandle  # type: ignore[import-untyped]
    from numba import cuda

    class IpcHandle(cuda.IpcHandle):  # type: ignore[misc,unused-ignore]
        """An IPC handle that is pickled as bytes."""

        def __reduce__(self) -> Any:
            data = string_at(self.handle.getPtr(), HANDLE_BYTES)
            return unpickle_handle, (data, self.size, self.source_info, self.offset)

    driver_handle = CUipcMemHandle()
    memmove(driver_handle.getPtr(), data, HANDLE_BYTES)
    return IpcHandle(memory, driver_handle, size_bytes, source_info, offset_bytes)


def unpickle_handle(data: bytes, size_bytes: int, source_info: Any, offset_bytes: int) -> Any:
    """Return Numba's IPC handle from the bytes that another process has pickled; needs no allocator."""
    return _numba_handle(None, data, size_bytes, source_info, offset_bytes)


def torch_pool(upstream: object, options: dict[str, bool]) -> Any:
    """Return a torch.cuda.MemPool whose segments come from the driver.

    PyTorch cannot use an allocator in Python; see ``cudakit.torch_pool``. Raises UsageError for anything but
    the name of an upstream, and for an option that torch lacks.
    """
    upstream_names = ", ".join(UPSTREAMS)
    if not isinstance(upstream, str):
        raise UsageError(
            f"torch cannot use {type(upstream).__name__} as an allocator: PyTorch calls it while holding its"
            " own lock, and a thread that waits for that lock may hold the GIL: a deadlock",
            hint=f"give an upstream that runs without Python: {upstream_names}",
        )
    if upstream not in UPSTREAMS:
        raise UsageError(f"no upstream is named {upstream!r}", hint=f"one of {upstream_names}")
    library_path = native_library()
    try:
        import torch  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise MissingDependency("torch", purpose="a MemPool") from error
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        library_path, f"cudakit_{upstream}_alloc", f"cudakit_{upstream}_free"
    )
    try:
        # Options that are off are not passed, because older versions of torch lack them.
        return torch.cuda.MemPool(
            allocator.allocator(), **{name: True for name, is_on in options.items() if is_on}
        )
    except TypeError as error:
        raise UsageError(
            f"torch {torch.__version__} cannot create this MemPool: {error}",
            hint="omit the option, or install a newer torch",
        ) from error


def native_library() -> str:
    """Return the path of the C functions. Raises EnvironmentUnusable if they were not compiled."""
    spec = find_spec("cudakit.arrays.plugs._torch_pool")
    if spec is None or spec.origin is None:
        raise EnvironmentUnusable(
            "cudakit was installed without its C extensions, which torch needs",
            hint="install a C compiler, then: pip install --force-reinstall --no-deps cudakit",
        )
    return spec.origin
