"""Device and host memory: allocations, copies, fills (CUDA Driver API, "Memory Management")."""

from __future__ import annotations

import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cudakit.errors import CudaError, Unsupported
from cudakit.gpu.api import MemoryInfo, Ptr, Stream
from cudakit.gpu.cuda.driver import Context, check, cu
from cudakit.gpu.cuda.streams import CudaStreams
from cudakit.gpu.device import check_size, pop_allocation
from cudakit.gpu.driver_errors import Status, cuda_error
from cudakit.units import format_bytes

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE (madvise(2))
_READ_ONLY = cu.CU_MEMHOSTREGISTER_READ_ONLY
_REGISTER_FLAGS = cu.CU_MEMHOSTREGISTER_PORTABLE | cu.CU_MEMHOSTREGISTER_DEVICEMAP


class CudaMemory:
    """Device and host allocations, copies and fills of one device."""

    def __init__(self, context: Context, streams: CudaStreams) -> None:
        self._context, self._streams = context, streams
        self.device_allocations: dict[Ptr, int] = {}
        self._pinned_sizes: dict[Ptr, int] = {}
        self._pageable_memory: dict[Ptr, ctypes.Array[Any]] = {}
        self._registered_memory: dict[Ptr, ctypes.Array[Any]] = {}
        # Memory of other libraries that ``pin`` registered.
        self._pinned_arrays: dict[Ptr, npt.NDArray[np.uint8]] = {}

    def memory_info(self) -> MemoryInfo:
        free_bytes, total_bytes = self._context.call(cu.cuMemGetInfo)
        return MemoryInfo(free_bytes=free_bytes, total_bytes=total_bytes)

    def malloc(self, size_bytes: int, stream: Stream | None = None) -> Ptr:
        check_size(size_bytes)
        stream_args = () if stream is None else (self._streams.handle(stream),)
        address = self._context.call(
            cu.cuMemAllocAsync if stream_args else cu.cuMemAlloc,
            size_bytes,
            *stream_args,
            detail=lambda: self.describe_shortage(size_bytes),
        )
        ptr = Ptr(int(address))
        self.device_allocations[ptr] = size_bytes
        return ptr

    def free(self, ptr: Ptr, stream: Stream | None = None) -> None:
        stream_args = () if stream is None else (self._streams.handle(stream),)
        # Remove the allocation from the table first: after the free, another thread may get the same address.
        size_bytes = pop_allocation(
            self.device_allocations, ptr, f"no allocation of {self._context.name}"
        )
        try:
            self._context.call(
                cu.cuMemFreeAsync if stream_args else cu.cuMemFree, ptr, *stream_args
            )
        except CudaError:
            self.device_allocations[ptr] = size_bytes
            raise

    def host_malloc(self, size_bytes: int, *, pinned: bool = True) -> Ptr:
        check_size(size_bytes)
        return self._malloc_pinned(size_bytes) if pinned else self._malloc_pageable(size_bytes)

    def host_free(self, ptr: Ptr) -> None:
        if ptr in self._pageable_memory:
            # cuMemFreeHost waits for device work, but the driver does not know of pageable memory.
            self._streams.sync()
            del self._pageable_memory[ptr]
            return
        if ptr in self._registered_memory:
            raise cuda_error(
                Status.INVALID_VALUE,
                detail=f"the memory at {ptr:#x} is registered: unregister it first",
            )
        size_bytes = pop_allocation(self._pinned_sizes, ptr, "no host allocation")
        try:
            self._context.call(cu.cuMemFreeHost, ptr)
        except CudaError:
            self._pinned_sizes[ptr] = size_bytes
            raise

    def host_register(self, ptr: Ptr, *, thread_count: int = 1) -> None:
        memory = pop_allocation(self._pageable_memory, ptr, "no pageable host allocation")
        try:
            _populate_pages(memory, thread_count)
            self._register_pages(ptr, len(memory))
        except BaseException:
            self._pageable_memory[ptr] = memory
            raise
        self._registered_memory[ptr] = memory

    def host_unregister(self, ptr: Ptr) -> None:
        memory = pop_allocation(self._registered_memory, ptr, "no registered host allocation")
        try:
            self._streams.sync()  # cuMemHostUnregister is not documented to wait for device work
            self._context.call(cu.cuMemHostUnregister, ptr)
        except CudaError:
            self._registered_memory[ptr] = memory
            raise
        self._pageable_memory[ptr] = memory

    def pin(self, memory: npt.NDArray[np.uint8], *, read_only: bool = False) -> Ptr:
        check_size(memory.nbytes)
        ptr = Ptr(memory.ctypes.data)
        self._register_pages(ptr, memory.nbytes, _READ_ONLY if read_only else 0)
        self._pinned_arrays[ptr] = memory
        return ptr

    def unpin(self, ptr: Ptr) -> None:
        memory = pop_allocation(self._pinned_arrays, ptr, "no pinned memory of another library")
        try:
            self._streams.sync()  # cuMemHostUnregister is not documented to wait for device work
            self._context.call(cu.cuMemHostUnregister, ptr)
        except CudaError:
            self._pinned_arrays[ptr] = memory
            raise

    def host_view(self, ptr: Ptr, size_bytes: int) -> memoryview:
        """Return host memory as bytes; the view is invalid after ``host_free``."""
        pageable_memory = self._pageable_memory.get(ptr, self._registered_memory.get(ptr))
        allocated_bytes = (
            self._pinned_sizes.get(ptr, 0) if pageable_memory is None else len(pageable_memory)
        )
        if not 0 <= size_bytes <= allocated_bytes:
            raise cuda_error(
                Status.INVALID_VALUE,
                detail=f"{size_bytes} bytes at {ptr:#x} are not allocated host memory",
            )
        return memoryview((ctypes.c_ubyte * size_bytes).from_address(ptr)).cast("B")

    def copy(self, dst: Ptr, src: Ptr, size_bytes: int, stream: Stream) -> None:
        self._context.call(
            cu.cuMemcpyAsync,
            dst,
            src,
            size_bytes,
            self._streams.handle(stream),
            detail=lambda: f"{format_bytes(size_bytes)} from {src:#x} to {dst:#x}",
        )

    def fill(self, ptr: Ptr, value: int, size_bytes: int, stream: Stream) -> None:
        if not 0 <= value <= 255:
            raise cuda_error(
                Status.INVALID_VALUE, detail=f"fill value {value} is not a byte (0 to 255)"
            )
        self._context.call(
            cu.cuMemsetD8Async,
            ptr,
            value,
            size_bytes,
            self._streams.handle(stream),
            detail=lambda: f"{format_bytes(size_bytes)} at {ptr:#x}",
        )

    def describe_shortage(self, size_bytes: int) -> str:
        """Return the requested and the available memory as text for a message."""
        requested_text = f"{format_bytes(size_bytes)} requested"
        try:
            memory_info = self.memory_info()
        except CudaError:
            return f"{requested_text} on {self._context.name}"
        free_text, total_text = (
            format_bytes(memory_info.free_bytes),
            format_bytes(memory_info.total_bytes),
        )
        return f"{requested_text}, {free_text} of {total_text} free on {self._context.name}"

    @property
    def has_unsynchronized_host_memory(self) -> bool:
        """Whether registered or pageable host memory remains, whose release does not wait for device work."""
        return bool(self._registered_memory or self._pageable_memory or self._pinned_arrays)

    def close(self) -> None:
        """Free all remaining allocations."""
        for ptr in self.device_allocations:
            self._context.in_context(cu.cuMemFree, ptr)
        for ptr in self._pinned_sizes:
            self._context.in_context(cu.cuMemFreeHost, ptr)
        for ptr in (*self._registered_memory, *self._pinned_arrays):
            self._context.in_context(cu.cuMemHostUnregister, ptr)
        self.device_allocations.clear()
        self._pinned_sizes.clear()
        self._registered_memory.clear()
        self._pinned_arrays.clear()
        self._pageable_memory.clear()

    def _malloc_pinned(self, size_bytes: int) -> Ptr:
        ptr = Ptr(
            self._context.call(
                cu.cuMemHostAlloc,
                size_bytes,
                cu.CU_MEMHOSTALLOC_PORTABLE,
                detail=lambda: f"{format_bytes(size_bytes)} of pinned host memory requested",
            )
        )
        self._pinned_sizes[ptr] = size_bytes
        return ptr

    def _register_pages(self, ptr: Ptr, size_bytes: int, flags: int = 0) -> None:
        """Pin pages. Raises Unsupported if their device addresses differ from the host addresses."""
        self._context.call(
            cu.cuMemHostRegister,
            ptr,
            size_bytes,
            _REGISTER_FLAGS | flags,
            detail=lambda: f"{format_bytes(size_bytes)} of host memory to register",
        )
        # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM may be 0 (cuMemHostRegister).
        if int(self._context.call(cu.cuMemHostGetDevicePointer, ptr, 0)) != ptr:
            self._context.call(cu.cuMemHostUnregister, ptr)
            raise Unsupported(
                f"{self._context.name} cannot use registered host memory at the addresses of the host",
                hint="allocate pinned memory instead",
            )

    def _malloc_pageable(self, size_bytes: int) -> Ptr:
        """Map private anonymous pages, which the system populates at the first access."""
        try:
            pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError):
            raise CudaError(
                Status.OUT_OF_MEMORY,
                "CUDA_ERROR_OUT_OF_MEMORY",
                f"the host has not enough memory: {format_bytes(size_bytes)} requested",
                hint="free memory, or allocate less; `free -h` shows what is available",
            ) from None
        memory = (ctypes.c_ubyte * size_bytes).from_buffer(pages)  # keeps the pages alive
        ptr = Ptr(ctypes.addressof(memory))
        self._pageable_memory[ptr] = memory
        return ptr


def _populate_pages(memory: ctypes.Array[Any], thread_count: int) -> None:
    """Populate pages with several threads, because the driver uses one; contents are preserved.

    Without MADV_POPULATE_WRITE (before Linux 5.14) the driver populates the pages.
    """
    begin, size = ctypes.addressof(memory), len(memory)
    if thread_count == 1 or size < thread_count * mmap.PAGESIZE:
        return
    populate = ctypes.CDLL(None).madvise  # ctypes releases the GIL
    populate.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    part_bytes = -(-size // (thread_count * mmap.PAGESIZE)) * mmap.PAGESIZE
    with ThreadPoolExecutor(thread_count) as pool:
        for offset in range(0, size, part_bytes):
            pool.submit(populate, begin + offset, min(part_bytes, size - offset), _POPULATE_WRITE)


# --- Memory of peer devices (CUDA Driver API, "Peer Context Memory Access") ------------------------


class _Peer(NamedTuple):
    context: Context
    memory: CudaMemory


class CudaPeers:
    """Allocations on peer devices, whose primary contexts are retained until ``close``."""

    def __init__(self, context: Context, streams: CudaStreams) -> None:
        self._context, self._streams = context, streams
        self._peers: dict[int, _Peer] = {}

    def can_access_peer(self, ordinal: int) -> bool:
        """Return whether kernels of this device can access memory of a peer."""
        peer = check(cu.cuDeviceGet(ordinal), lambda: f"cuda:{ordinal} requested")
        return _can_access(self._context.device, peer)

    def enable_peer(self, ordinal: int) -> None:
        peer = self._peer(ordinal).context
        if not _can_access(peer.device, self._context.device):
            raise cuda_error(
                Status.PEER_ACCESS_UNSUPPORTED,
                detail=f"access from {peer.name} to memory of {self._context.name}",
            )

    def peer_malloc(self, ordinal: int, size_bytes: int) -> Ptr:
        return self._peer(ordinal).memory.malloc(size_bytes)

    def peer_free(self, ordinal: int, ptr: Ptr) -> None:
        peer = self._peers.get(ordinal)
        if peer is None:
            raise cuda_error(
                Status.INVALID_VALUE, detail=f"no allocation of cuda:{ordinal} begins at {ptr:#x}"
            )
        # cuMemFree waits for work of the peer only; copies are work of this device.
        self._streams.sync()
        peer.memory.free(ptr)

    def close(self) -> None:
        """Free all remaining allocations, and release the contexts of the peers."""
        for peer in self._peers.values():
            peer.memory.close()
            peer.context.close()
        self._peers.clear()

    def _peer(self, ordinal: int) -> _Peer:
        if ordinal == self._context.ordinal:
            raise cuda_error(
                Status.INVALID_DEVICE, detail=f"cuda:{ordinal} is not a peer of itself"
            )
        if ordinal not in self._peers:
            context = Context(ordinal)
            try:
                _enable_both_directions(self._context, context)
            except CudaError:
                context.close()
                raise
            self._peers[ordinal] = _Peer(context, CudaMemory(context, self._streams))
        return self._peers[ordinal]


def _enable_both_directions(context: Context, peer: Context) -> None:
    """Enable peer access in both directions, if supported."""
    was_disabled = _enable_access(context, peer)
    try:
        _enable_access(peer, context)
    except CudaError:
        if was_disabled:
            context.in_context(cu.cuCtxDisablePeerAccess, peer.handle)
        raise


def _enable_access(context: Context, peer: Context) -> bool:
    """Enable access of a context to memory of a peer, if supported; return whether it was disabled before.

    Without peer access, copies are staged through the host (CUDA C++ Programming Guide, "Peer-to-Peer Memory
    Copy"). Access is never disabled again, because other libraries in this process may rely on it.
    """
    if not _can_access(context.device, peer.device):
        return False
    result = context.in_context(cu.cuCtxEnablePeerAccess, peer.handle, 0)
    if result[0] == cu.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
        return False
    check(result)
    return True


def _can_access(device: Any, peer: Any) -> bool:
    return bool(check(cu.cuDeviceCanAccessPeer(device, peer)))
