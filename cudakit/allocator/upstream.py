"""Upstreams: the protocols with which the allocators call a device, and their implementation for a Gpu.

An upstream provides segments, events, pages of expandable segments, or pinned memory. Streams are the
allocator's numbers: 0 is the legacy default stream, a negative number is the default stream of a thread, and
all others are handles of the driver.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import partial
from typing import Protocol, runtime_checkable

from cudakit.allocator.ipc import IpcDevice, IpcRegistry
from cudakit.errors import CudaError, Unsupported
from cudakit.gpu.api import (
    LEGACY,
    PER_THREAD,
    Backing,
    Event,
    GraphNode,
    Graphs,
    HandleKind,
    Memory,
    MemoryInfo,
    Peers,
    Ptr,
    ShareableHandle,
    Stream,
)

DEFAULT_STREAM = 0
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY (CUDA Driver API, CUresult)
# CUresult values (CUDA Driver API): CUDA_ERROR_INVALID_HANDLE; CUDA_ERROR_NOT_PERMITTED and _NOT_SUPPORTED,
# with which cuMemCreate refuses a kind of handle that is not available.
_INVALID_HANDLE = 400
_HANDLE_KIND_REFUSED_CODES = (800, 801)


class EventSource(Protocol):
    """Events of a device. Every failure is a CudaError."""

    def event(self) -> Event: ...
    def destroy_event(self, event: Event) -> None: ...
    def record(self, event: Event, stream: int) -> None: ...
    def query_event(self, event: Event) -> bool: ...
    def sync_event(self, event: Event) -> None: ...
    def sync(self) -> None: ...


class Upstream(EventSource, Protocol):
    """The source of segments and events. Every failure is a CudaError; out of memory has code 2."""

    def malloc(self, size_bytes: int, stream: int) -> int: ...
    def free(self, ptr: int) -> None: ...
    def memory_info(self) -> MemoryInfo: ...


class PageSource(Protocol):
    """The source of expandable segments. A failure is a CudaError, and changes nothing.

    ``map`` maps consecutive pages, each with its own physical memory; if it fails, it maps no page. ``unmap``
    releases whole pages without waiting for work that uses the pages.
    """

    def granularity(self) -> int: ...
    def reserve(self, size_bytes: int) -> int: ...
    def unreserve(self, ptr: int, size_bytes: int) -> None: ...
    def map(self, ptr: int, page_bytes: int, count: int) -> None: ...
    def unmap(self, ptr: int, size_bytes: int) -> None: ...
    def sync_stream(self, stream: int) -> None: ...


class CaptureGraph(Protocol):
    """The graphs that captures have built so far. Each node has a unique number."""

    def capture(self, stream: int) -> int | None:
        """Return the id of a stream's capture; None if it is in no capture (cudaStreamGetCaptureInfo)."""
        ...

    def terminals(self, stream: int) -> Collection[int]:
        """Return the nodes that the next node of a stream will depend on (cudaStreamGetCaptureInfo)."""
        ...

    def predecessors(self, node: int) -> Collection[int]:
        """Return the nodes that a node depends on (cudaGraphNodeGetDependencies)."""
        ...


@runtime_checkable
class PagedUpstream(Protocol):
    """An upstream with virtual memory, which expandable segments need."""

    @property
    def pages(self) -> PageSource: ...
    def memory_info(self) -> MemoryInfo: ...


@runtime_checkable
class CapturableUpstream(Protocol):
    """An upstream that can query the graphs of captured streams."""

    @property
    def graph(self) -> CaptureGraph: ...


class UpstreamDevice(IpcDevice, Memory, Peers, Graphs, Protocol):
    """The protocols of a device from which the allocators take memory."""


class HostUpstream(EventSource, Protocol):
    """The source of pinned memory. Every failure is a CudaError; out of memory has code 2."""

    def malloc(self, size_bytes: int) -> int: ...
    def malloc_registered(self, size_bytes: int, thread_count: int) -> int:
        """Pin memory after its allocation, which locks the driver for less time."""
        ...

    def free(self, ptr: int) -> None: ...


class GpuEvents:
    """Creates and destroys the events of a device for an allocator."""

    def __init__(self, gpu: UpstreamDevice) -> None:
        self._gpu = gpu
        self._events: set[Event] = set()
        self.query_event = gpu.query_event
        self.sync_event = gpu.sync_event
        self.sync = gpu.sync

    def event(self) -> Event:
        cuda_event = self._gpu.event(timing=False)
        self._events.add(cuda_event)
        return cuda_event

    def destroy_event(self, event: Event) -> None:
        self._gpu.destroy_event(event)
        self._events.discard(event)

    def destroy_events(self) -> None:
        """Destroy the remaining events; ignore errors of the driver."""
        for cuda_event in list(self._events):
            with suppress(CudaError):
                self.destroy_event(cuda_event)

    def record(self, event: Event, stream: int) -> None:
        # A thread cannot name the default stream of another thread. The legacy stream, which waits for all
        # blocking streams (CUDA Driver API, "Stream synchronization behavior"), is used instead.
        self._gpu.record(event, Stream(stream) if stream > 0 else LEGACY)


class GpuUpstream(GpuEvents):
    """Memory of a device, allocated by cuMemAlloc, also during captures.

    Without ``shares``, other processes cannot open pages of expandable segments.
    """

    def __init__(self, gpu: UpstreamDevice, *, shares: bool = True) -> None:
        super().__init__(gpu)
        self._segment_addresses: set[int] = set()
        self.pages = GpuPages(gpu, shares=shares)
        self.ipc = IpcRegistry(gpu, self.pages.export)
        self.peers = self.pages.peers
        self.graph = GpuGraph(gpu)
        self.memory_info = gpu.memory_info

    def malloc(self, size_bytes: int, stream: int) -> int:  # noqa: ARG002
        with self._gpu.relaxed():
            ptr = self._gpu.malloc(size_bytes)
        self._segment_addresses.add(ptr)
        return ptr

    def free(self, ptr: int) -> None:
        # The address is removed before the free, because another thread may get the same address right after
        # it.
        self._segment_addresses.discard(ptr)
        try:
            self._gpu.free(Ptr(ptr))
        except CudaError:
            self._segment_addresses.add(ptr)
            raise

    def release_all(self) -> None:
        """Free all memory that this object allocated; ignore errors of the driver.

        A finalizer may call this method during a graph capture of another library. So memory is freed in
        relaxed mode, and without cuCtxSynchronize, which would invalidate every capture.
        """
        with suppress(CudaError), self._gpu.relaxed():
            self.pages.release_all()
            for ptr in list(self._segment_addresses):
                with suppress(CudaError):
                    self.free(ptr)
            self.destroy_events()

    def enable_peer(self, device: int, mapped_ranges: Iterable[tuple[int, int]]) -> None:
        with self._gpu.relaxed():
            self._gpu.enable_peer(device)
            self.pages.enable_peer(device, mapped_ranges)


class GpuGraph:
    """The unfinished graphs of the stream captures of a device."""

    def __init__(self, gpu: Graphs) -> None:
        self._gpu = gpu

    def capture(self, stream: int) -> int | None:
        capturable_stream = _capturable_stream(stream)
        return None if capturable_stream is None else self._gpu.capture_id(capturable_stream)

    def terminals(self, stream: int) -> tuple[int, ...]:
        capturable_stream = _capturable_stream(stream)
        return (
            () if capturable_stream is None else self._gpu.capture_dependencies(capturable_stream)
        )

    def predecessors(self, node: int) -> tuple[int, ...]:
        return self._gpu.dependencies(GraphNode(node))


def _capturable_stream(stream: int) -> Stream | None:
    """Return a stream that may be captured; None for the legacy and another thread's default stream."""
    if stream < 0:
        return PER_THREAD if stream == stream_number(PER_THREAD) else None
    return Stream(stream) if stream else None


def stream_number(stream: int) -> int:
    """Return the allocator's number of the stream with a handle; 0 and LEGACY are the same stream."""
    if stream == LEGACY:
        return DEFAULT_STREAM
    if stream == PER_THREAD:
        return -threading.get_ident()
    return stream


class GpuPages:
    """Virtual memory of a device, available during captures too.

    The handle of a page's physical memory is released as soon as the page is mapped: the memory exists as
    long as the mapping (cuMemRelease, CUDA Driver API, "Virtual Memory Management"). With ``shares``, memory
    is created with the first kind of shareable handle that is available, so that other processes can open it.
    ``peers`` are the other devices that can access the memory.
    """

    def __init__(self, gpu: UpstreamDevice, *, shares: bool = True) -> None:
        self._gpu = gpu
        self.granularity = gpu.granularity
        self.peers: list[int] = []
        self._reserved_ranges: dict[int, int] = {}
        self._mapped_pages: dict[int, int] = {}  # Sizes of the mapped pages by address.
        # Kinds of handle that were not refused, the best first; empty if they are not determined yet.
        self._handle_kinds: list[HandleKind | None] = [] if shares else [None]
        self._exported_handles: dict[int, ShareableHandle] = {}  # By the address of the page.
        self._failed_cleanup_calls: list[Callable[[], None]] = []  # Clean-up steps to repeat later.

    def reserve(self, size_bytes: int) -> int:
        with self._gpu.relaxed():
            ptr = self._gpu.reserve(size_bytes)
        self._reserved_ranges[ptr] = size_bytes
        return ptr

    def unreserve(self, ptr: int, size_bytes: int) -> None:
        self._gpu.unreserve(Ptr(ptr), size_bytes)
        del self._reserved_ranges[ptr]

    def map(self, ptr: int, page_bytes: int, page_count: int) -> None:
        mapped_bytes = 0
        backings: list[Backing] = []
        with self._gpu.relaxed():
            try:
                for _ in range(page_count):
                    backings.append(self._create_backing(page_bytes))  # noqa: PERF401  # a call may fail
                for backing in backings:
                    self._gpu.map(Ptr(ptr + mapped_bytes), backing, page_bytes)
                    mapped_bytes += page_bytes
                for device in self.peers:
                    self._gpu.set_access(Ptr(ptr), mapped_bytes, device)
            except BaseException:
                if mapped_bytes:
                    self._gpu.unmap(Ptr(ptr), mapped_bytes)
                raise
            finally:
                self._release_backings(backings)
        page_addresses = range(ptr, ptr + page_count * page_bytes, page_bytes)
        self._mapped_pages.update(dict.fromkeys(page_addresses, page_bytes))

    def unmap(self, ptr: int, size_bytes: int) -> None:
        self._gpu.unmap(Ptr(ptr), size_bytes)
        end = ptr + size_bytes
        while ptr < end:
            ptr += self._mapped_pages.pop(ptr)
        self._revoke_handles(
            [page for page in self._exported_handles if end - size_bytes <= page < end]
        )

    def release_all(self) -> None:
        """Unmap all pages and free all reserved addresses; see GpuUpstream.release_all."""
        if self._mapped_pages:
            # A cuMemFree waits for the device, and does not invalidate captures, unlike cuCtxSynchronize.
            try:
                self._gpu.free(self._gpu.malloc(1))
            except CudaError:  # The device has no memory for this byte.
                self._gpu.sync()
        for ptr, size_bytes in list(self._mapped_pages.items()):
            with suppress(CudaError):
                self.unmap(ptr, size_bytes)
        for ptr, size_bytes in list(self._reserved_ranges.items()):
            with suppress(CudaError):
                self.unreserve(ptr, size_bytes)
        self._run_cleanup([])

    def sync_stream(self, stream: int) -> None:
        # A negative number is the default stream of a thread. Another thread cannot name this stream, so the
        # legacy stream, which waits for it, is synchronized instead.
        try:
            self._gpu.sync_stream(Stream(stream) if stream > 0 else LEGACY)
        except CudaError as error:
            if error.code != _INVALID_HANDLE:
                raise
            self._gpu.sync()  # The stream was destroyed, but its work may still run.

    def enable_peer(self, device: int, mapped_ranges: Iterable[tuple[int, int]]) -> None:
        """Allow another device to access the given mapped ranges, and all ranges that are mapped later.

        If the driver refuses, raises CudaError and enables no access.
        """
        enabled_ranges: list[tuple[int, int]] = []
        try:
            for ptr, size_bytes in mapped_ranges:
                self._gpu.set_access(Ptr(ptr), size_bytes, device)
                enabled_ranges.append((ptr, size_bytes))
        except BaseException:
            for ptr, size_bytes in enabled_ranges:
                # On failure the peer device keeps an access that it does not need.
                with suppress(CudaError):
                    self._gpu.set_access(Ptr(ptr), size_bytes, device, allowed=False)
            raise
        self.peers.append(device)

    def export(self, ptr: int, page_bytes: int, page_count: int) -> tuple[ShareableHandle, ...]:
        """Return handles of pages for other processes: the same handles until the pages are unmapped.

        Raises CudaError, and Unsupported for pages without handles; then no page is exported.
        """
        page_addresses = range(ptr, ptr + page_count * page_bytes, page_bytes)
        new_pages: list[int] = []
        try:
            for page_address in page_addresses:
                if page_address not in self._exported_handles:
                    self._exported_handles[page_address] = self._export_page(page_address)
                    new_pages.append(page_address)
        except BaseException:
            self._revoke_handles(new_pages)
            raise
        return tuple(self._exported_handles[page_address] for page_address in page_addresses)

    def _export_page(self, page_address: int) -> ShareableHandle:
        backing = self._gpu.backing_at(Ptr(page_address))
        try:
            return self._gpu.export(backing)
        except Unsupported as error:
            error.hint = (
                "unset TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC, or set expandable_segments:False, "
                "before it is allocated"
            )
            raise
        finally:
            self._release_backings([backing])

    def _revoke_handles(self, page_addresses: list[int]) -> None:
        self._run_cleanup(
            [partial(self._gpu.revoke, self._exported_handles.pop(page)) for page in page_addresses]
        )

    def _create_backing(self, page_bytes: int) -> Backing:
        """Create memory with the first kind of handle that is available.

        A device may report a kind of handle and then refuse it, such as fabric handles without access to an
        IMEX channel (CUDA Driver API, cuMemCreate).
        """
        self._handle_kinds = self._handle_kinds or [*self._gpu.handle_kinds(), None]
        while True:
            handle_kind = self._handle_kinds[0]
            try:
                return self._gpu.create(page_bytes, handle_kind)
            except CudaError as error:
                if handle_kind is None or error.code not in _HANDLE_KIND_REFUSED_CODES:
                    raise
                del self._handle_kinds[0]

    def _release_backings(self, backings: list[Backing]) -> None:
        self._run_cleanup([partial(self._gpu.release, backing) for backing in backings])

    def _run_cleanup(self, cleanup_calls: list[Callable[[], None]]) -> None:
        """Run clean-up steps, and the steps that failed before. Steps that fail now are repeated later."""
        cleanup_calls, self._failed_cleanup_calls = (
            [*self._failed_cleanup_calls, *cleanup_calls],
            [],
        )
        for cleanup_call in cleanup_calls:
            try:
                cleanup_call()
            except CudaError:
                self._failed_cleanup_calls.append(cleanup_call)


class GpuHostUpstream(GpuEvents):
    """Host memory that a device can access (cuMemHostAlloc, cuMemHostRegister), during captures too.

    Memory is freed with the function that matches its allocation, even if the settings changed, as in PyTorch
    (aten/src/ATen/cuda/CachingHostAllocator.cpp, free_block).
    """

    def __init__(self, gpu: UpstreamDevice) -> None:
        super().__init__(gpu)
        self._allocated_addresses: set[int] = set()
        self._registered_addresses: set[int] = set()

    def malloc(self, size_bytes: int) -> int:
        with self._gpu.relaxed():
            ptr = self._gpu.host_malloc(size_bytes, pinned=True)
        self._allocated_addresses.add(ptr)
        return ptr

    def malloc_registered(self, size_bytes: int, thread_count: int) -> int:
        with self._gpu.relaxed():
            ptr = self._gpu.host_malloc(size_bytes, pinned=False)
            try:
                self._gpu.host_register(ptr, thread_count=thread_count)
            except BaseException:
                self._gpu.host_free(ptr)
                raise
        self._registered_addresses.add(ptr)
        self._allocated_addresses.add(ptr)
        return ptr

    def free(self, ptr: int) -> None:
        if ptr in self._registered_addresses:
            self._gpu.host_unregister(Ptr(ptr))
            self._registered_addresses.discard(ptr)
        self._allocated_addresses.discard(ptr)
        try:
            self._gpu.host_free(Ptr(ptr))
        except CudaError:
            self._allocated_addresses.add(ptr)
            raise

    def release_all(self) -> None:
        """Free all memory that this object allocated, in use or not; see GpuUpstream.release_all."""
        with suppress(CudaError), self._gpu.relaxed():
            for ptr in list(self._allocated_addresses):
                with suppress(CudaError):
                    self.free(ptr)
            self.destroy_events()
