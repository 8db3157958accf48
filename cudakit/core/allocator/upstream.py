"""What the allocator needs of a device, and the upstream of a device, which provides it.

Streams are the allocator's numbers: 0 is the legacy default stream, a negative number is the default stream
of a thread, and all others are handles of the driver.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol, runtime_checkable

from cudakit.core.allocator.ipc import IpcDevice, IpcRegistry
from cudakit.errors import CudaError, Unsupported
from cudakit.gpu.api import (
    LEGACY,
    PER_THREAD,
    Backing,
    Event,
    Exported,
    GraphNode,
    Graphs,
    HandleKind,
    Ipc,
    Memory,
    MemoryInfo,
    Peers,
    Ptr,
    Stream,
    Streams,
)
from cudakit.gpu.api import (
    VirtualMemory as DeviceVirtualMemory,
)

DEFAULT_STREAM = 0
# CUresult values (CUDA Driver API): OUT_OF_MEMORY and INVALID_HANDLE, and NOT_PERMITTED and NOT_SUPPORTED,
# with which cuMemCreate refuses a kind of handle that is not available.
OUT_OF_MEMORY = 2
_INVALID_HANDLE = 400
_NO_SUCH_HANDLE = (800, 801)


class EventSource(Protocol):
    """Events of a device. Every failure is a CudaError."""

    def event(self) -> Event: ...
    def destroy_event(self, event: Event) -> None: ...
    def record(self, event: Event, stream: int) -> None: ...
    def query_event(self, event: Event) -> bool: ...
    def sync_event(self, event: Event) -> None: ...
    def sync(self) -> None: ...


class Upstream(EventSource, Protocol):
    """Where memory comes from. Every failure is a CudaError; out of memory has code 2."""

    def malloc(self, size_bytes: int, stream: int) -> int: ...
    def free(self, ptr: int) -> None: ...
    def memory_info(self) -> MemoryInfo: ...


class VirtualMemory(Protocol):
    """Where expandable segments come from. A failure is a CudaError, and changes nothing.

    ``map`` maps pages end to end, each with physical memory of its own: all of them or none. ``unmap``
    releases whole pages without waiting for work that uses them.
    """

    def granularity(self) -> int: ...
    def reserve(self, size_bytes: int) -> int: ...
    def unreserve(self, ptr: int, size_bytes: int) -> None: ...
    def map(self, ptr: int, page_bytes: int, count: int) -> None: ...
    def unmap(self, ptr: int, size_bytes: int) -> None: ...
    def sync_stream(self, stream: int) -> None: ...


class CaptureGraph(Protocol):
    """The graphs that captures have built so far. Each node has a number, which no other node gets."""

    def capture(self, stream: int) -> int | None:
        """Return the id of the capture that a stream is in, or None (cudaStreamGetCaptureInfo)."""
        ...

    def terminals(self, stream: int) -> Collection[int]:
        """Return the nodes that the next one on a stream will depend on (cudaStreamGetCaptureInfo)."""
        ...

    def predecessors(self, node: int) -> Collection[int]:
        """Return the nodes that a node depends on (cudaGraphNodeGetDependencies)."""
        ...


@runtime_checkable
class Paged(Protocol):
    """An upstream with virtual memory, which expandable segments need."""

    @property
    def pages(self) -> VirtualMemory: ...
    def memory_info(self) -> MemoryInfo: ...


@runtime_checkable
class Captured(Protocol):
    """An upstream whose streams may be captured, and that knows the graph."""

    @property
    def graph(self) -> CaptureGraph: ...


@runtime_checkable
class Reachable(Protocol):
    """An upstream whose memory other devices can use; ``mapped`` are the ranges of its pages."""

    @property
    def peers(self) -> Sequence[int]: ...
    def enable_peer(self, device: int, mapped: Iterable[tuple[int, int]]) -> None: ...


@runtime_checkable
class Shareable(Protocol):
    """An upstream whose memory other processes can use."""

    @property
    def ipc(self) -> IpcRegistry: ...


class _PagesDevice(DeviceVirtualMemory, Memory, Ipc, Streams, Protocol):
    """A device whose pages are mapped and exported."""


class UpstreamDevice(IpcDevice, Memory, Peers, Graphs, Protocol):
    """A device that an allocator takes memory from."""


class GpuEvents:
    """The events of a device."""

    def __init__(self, gpu: Streams) -> None:
        self._streams = gpu
        self._events: set[Event] = set()
        self.query_event = gpu.query_event
        self.sync_event = gpu.sync_event
        self.sync = gpu.sync

    def event(self) -> Event:
        event = self._streams.event(timing=False)
        self._events.add(event)
        return event

    def destroy_event(self, event: Event) -> None:
        self._streams.destroy_event(event)
        self._events.discard(event)

    def destroy_events(self) -> None:
        """Destroy the events that are left, except those that the driver refuses to destroy."""
        for event in list(self._events):
            with suppress(CudaError):
                self.destroy_event(event)

    def record(self, event: Event, stream: int) -> None:
        # Only its own thread can name the default stream of a thread. The legacy stream waits for it, as for
        # every blocking stream (CUDA Driver API, "Stream synchronization behavior").
        self._streams.record(event, Stream(stream) if stream > 0 else LEGACY)


class GpuUpstream(GpuEvents):
    """Memory of a device, at once (cuMemAlloc), during captures too; other processes can open it.

    Without ``shares`` they cannot open pages of expandable segments.
    """

    def __init__(self, gpu: UpstreamDevice, *, shares: bool = True) -> None:
        super().__init__(gpu)
        self._gpu = gpu
        self._segments: set[int] = set()
        self.pages = GpuPages(gpu, shares=shares)
        self.ipc = IpcRegistry(gpu, self.pages.export)
        self.peers = self.pages.peers
        self.graph = GpuGraph(gpu)
        self.memory_info = gpu.memory_info

    def malloc(self, size_bytes: int, stream: int) -> int:  # noqa: ARG002
        with self._gpu.relaxed():
            ptr = self._gpu.malloc(size_bytes)
        self._segments.add(ptr)
        return ptr

    def free(self, ptr: int) -> None:
        # Removed before the free: another thread may get the same address at once.
        self._segments.discard(ptr)
        try:
            self._gpu.free(Ptr(ptr))
        except CudaError:
            self._segments.add(ptr)
            raise

    def release_all(self) -> None:
        """Free all memory that was taken here, in use or not, except what the driver refuses to free.

        A finalizer may call this during a graph capture of another library. So memory is freed in relaxed
        mode, and nothing calls cuCtxSynchronize, which would end every capture.
        """
        with suppress(CudaError), self._gpu.relaxed():
            self.pages.release_all()
            for ptr in list(self._segments):
                with suppress(CudaError):
                    self.free(ptr)
            self.destroy_events()

    def enable_peer(self, device: int, mapped: Iterable[tuple[int, int]]) -> None:
        with self._gpu.relaxed():
            self._gpu.enable_peer(device)
            self.pages.enable_peer(device, mapped)


class GpuPages:
    """Virtual memory of a device, available during captures too.

    The reference to the physical memory of a page is released as soon as the page is mapped: the memory
    lives as long as the mapping (cuMemRelease, CUDA Driver API, "Virtual Memory Management"). It is created
    with the first kind of handle that is available, so that other processes can open it, unless ``shares``
    is off. ``peers`` are the other devices that can use it.
    """

    def __init__(self, gpu: _PagesDevice, *, shares: bool = True) -> None:
        self._gpu = gpu
        self.granularity = gpu.granularity
        self.peers: list[int] = []
        self._reserved: dict[int, int] = {}
        self._mapped: dict[int, int] = {}  # pages: address and size
        # The kinds of handle still to be tried, the best first; empty: not determined yet.
        self._kinds: list[HandleKind | None] = [] if shares else [None]
        self._exported: dict[int, Exported] = {}  # by the address of the page
        self._undone: list[Callable[[], None]] = []  # refused by the driver, repeated later

    def reserve(self, size_bytes: int) -> int:
        with self._gpu.relaxed():
            ptr = self._gpu.reserve(size_bytes)
        self._reserved[ptr] = size_bytes
        return ptr

    def unreserve(self, ptr: int, size_bytes: int) -> None:
        self._gpu.unreserve(Ptr(ptr), size_bytes)
        del self._reserved[ptr]

    def map(self, ptr: int, page_bytes: int, count: int) -> None:
        with self._gpu.relaxed():
            self._map(ptr, page_bytes, count)
        pages = range(ptr, ptr + count * page_bytes, page_bytes)
        self._mapped.update(dict.fromkeys(pages, page_bytes))

    def unmap(self, ptr: int, size_bytes: int) -> None:
        self._gpu.unmap(Ptr(ptr), size_bytes)
        end = ptr + size_bytes
        while ptr < end:
            ptr += self._mapped.pop(ptr)
        self._withdraw([page for page in self._exported if end - size_bytes <= page < end])

    def release_all(self) -> None:
        """Unmap all pages and free all reserved addresses; see GpuUpstream.release_all."""
        if self._mapped:
            self._wait_for_all_work()
        for ptr, size_bytes in list(self._mapped.items()):
            with suppress(CudaError):
                self.unmap(ptr, size_bytes)
        for ptr, size_bytes in list(self._reserved.items()):
            with suppress(CudaError):
                self.unreserve(ptr, size_bytes)
        self._finish([])

    def _wait_for_all_work(self) -> None:
        """Wait for the device. cuMemFree waits too, and unlike cuCtxSynchronize does not end captures."""
        try:
            self._gpu.free(self._gpu.malloc(1))
        except CudaError:  # without free memory for the byte
            self._gpu.sync()

    def sync_stream(self, stream: int) -> None:
        # As for events, the legacy stream stands for the default stream of a thread.
        try:
            self._gpu.sync_stream(Stream(stream) if stream > 0 else LEGACY)
        except CudaError as error:
            if error.code != _INVALID_HANDLE:
                raise
            self._gpu.sync()  # the stream was destroyed, its work may still run

    def enable_peer(self, device: int, mapped: Iterable[tuple[int, int]]) -> None:
        """Let another device use mapped memory, these ranges and later ones.

        On CudaError nothing is enabled.
        """
        done: list[tuple[int, int]] = []
        try:
            for ptr, size_bytes in mapped:
                self._gpu.set_access(Ptr(ptr), size_bytes, device)
                done.append((ptr, size_bytes))
        except BaseException:
            for ptr, size_bytes in done:
                with suppress(CudaError):  # more access than necessary, nothing is lost
                    self._gpu.set_access(Ptr(ptr), size_bytes, device, allowed=False)
            raise
        self.peers.append(device)

    def export(self, ptr: int, page_bytes: int, count: int) -> tuple[Exported, ...]:
        """Return handles of pages for other processes, the same each time until the pages are unmapped.

        On CudaError, and Unsupported for pages without handles, nothing is exported.
        """
        pages = range(ptr, ptr + count * page_bytes, page_bytes)
        new: list[int] = []
        try:
            for page in pages:
                if page not in self._exported:
                    self._exported[page] = self._export(page)
                    new.append(page)
        except BaseException:
            self._withdraw(new)
            raise
        return tuple(self._exported[page] for page in pages)

    def _export(self, page: int) -> Exported:
        backing = self._gpu.backing_at(Ptr(page))
        try:
            return self._gpu.export(backing)
        except Unsupported as error:
            error.hint = (
                "unset TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC, or set expandable_segments:False, "
                "before it is allocated"
            )
            raise
        finally:
            self._release([backing])

    def _withdraw(self, pages: list[int]) -> None:
        self._finish([partial(self._gpu.withdraw, self._exported.pop(page)) for page in pages])

    def _map(self, ptr: int, page_bytes: int, count: int) -> None:
        mapped, backings = 0, self._create(page_bytes, count)
        try:
            for backing in backings:
                self._gpu.map(Ptr(ptr + mapped), backing, page_bytes)
                mapped += page_bytes
            for device in self.peers:
                self._gpu.set_access(Ptr(ptr), mapped, device)
        except BaseException:
            if mapped:
                self._gpu.unmap(Ptr(ptr), mapped)
            raise
        finally:
            self._release(backings)

    def _create(self, page_bytes: int, count: int) -> list[Backing]:
        backings: list[Backing] = []
        try:
            for _ in range(count):
                backings.append(self._create_one(page_bytes))  # noqa: PERF401  # one may fail
        except BaseException:
            self._release(backings)
            raise
        return backings

    def _create_one(self, page_bytes: int) -> Backing:
        """Create memory with the first kind of handle that is available.

        A device may report a kind and then refuse it: that of an NVLink fabric without a channel (CUDA
        Driver API, cuMemCreate).
        """
        self._kinds = self._kinds or [*self._gpu.handle_kinds(), None]
        while True:
            kind = self._kinds[0]
            try:
                return self._gpu.create(page_bytes, kind)
            except CudaError as error:
                if kind is None or error.code not in _NO_SUCH_HANDLE:
                    raise
                del self._kinds[0]

    def _release(self, backings: list[Backing]) -> None:
        self._finish([partial(self._gpu.release, backing) for backing in backings])

    def _finish(self, steps: list[Callable[[], None]]) -> None:
        """Run clean-up steps, and those that were refused before. Refused steps are repeated later."""
        left, self._undone = [*self._undone, *steps], []
        for step in left:
            try:
                step()
            except CudaError:
                self._undone.append(step)


class GpuGraph:
    """The graphs that captures on the streams of a device have built so far."""

    def __init__(self, gpu: Graphs) -> None:
        self._gpu = gpu

    def capture(self, stream: int) -> int | None:
        known = _captured(stream)
        return None if known is None else self._gpu.capture_id(known)

    def terminals(self, stream: int) -> tuple[int, ...]:
        known = _captured(stream)
        return () if known is None else self._gpu.capture_ends(known)

    def predecessors(self, node: int) -> tuple[int, ...]:
        return self._gpu.dependencies(GraphNode(node))


def _captured(stream: int) -> Stream | None:
    """Return a stream that may be captured: not the legacy one, nor another thread's default stream."""
    if stream < 0:
        return PER_THREAD if stream == stream_number(PER_THREAD) else None
    return Stream(stream) if stream else None


def stream_number(stream: int) -> int:
    """Return the allocator's number of a stream, from its handle; 0 and LEGACY are the same."""
    if stream == LEGACY:
        return DEFAULT_STREAM
    if stream == PER_THREAD:
        return -threading.get_ident()
    return stream
