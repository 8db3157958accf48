"""Upstreams: the protocols with which the allocator calls a device, and their implementation for a Gpu.

Streams are the allocator's numbers: 0 is the legacy default stream, a negative number is the default stream
of a thread, and all others are handles of the driver.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Protocol, runtime_checkable

from cudakit.allocator.ipc import IpcDevice, IpcRegistry
from cudakit.allocator.pages import GpuPages
from cudakit.errors import CudaError
from cudakit.gpu.api import (
    LEGACY,
    PER_THREAD,
    Event,
    GraphNode,
    Graphs,
    Memory,
    MemoryInfo,
    Peers,
    Ptr,
    Stream,
    Streams,
)

DEFAULT_STREAM = 0
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY (CUDA Driver API, CUresult)


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


class VirtualMemory(Protocol):
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
    def pages(self) -> VirtualMemory: ...
    def memory_info(self) -> MemoryInfo: ...


@runtime_checkable
class CapturableUpstream(Protocol):
    """An upstream that can query the graphs of captured streams."""

    @property
    def graph(self) -> CaptureGraph: ...


@runtime_checkable
class PeerAccessUpstream(Protocol):
    """An upstream whose memory other devices can access.

    ``mapped_ranges`` are the begins and ends of the mapped ranges of its pages.
    """

    @property
    def peers(self) -> Sequence[int]: ...
    def enable_peer(self, device: int, mapped_ranges: Iterable[tuple[int, int]]) -> None: ...


@runtime_checkable
class IpcUpstream(Protocol):
    """An upstream whose memory other processes can open."""

    @property
    def ipc(self) -> IpcRegistry: ...


class UpstreamDevice(IpcDevice, Memory, Peers, Graphs, Protocol):
    """The protocols of a device from which an allocator takes memory."""


class GpuEvents:
    """Creates and destroys the events of a device for an allocator."""

    def __init__(self, gpu: Streams) -> None:
        self._event_gpu = gpu
        self._events: set[Event] = set()
        self.query_event = gpu.query_event
        self.sync_event = gpu.sync_event
        self.sync = gpu.sync

    def event(self) -> Event:
        cuda_event = self._event_gpu.event(timing=False)
        self._events.add(cuda_event)
        return cuda_event

    def destroy_event(self, event: Event) -> None:
        self._event_gpu.destroy_event(event)
        self._events.discard(event)

    def destroy_events(self) -> None:
        """Destroy the remaining events; ignore errors of the driver."""
        for cuda_event in list(self._events):
            with suppress(CudaError):
                self.destroy_event(cuda_event)

    def record(self, event: Event, stream: int) -> None:
        # A thread cannot name the default stream of another thread. The legacy stream, which waits for all
        # blocking streams (CUDA Driver API, "Stream synchronization behavior"), is used instead.
        self._event_gpu.record(event, Stream(stream) if stream > 0 else LEGACY)


class GpuUpstream(GpuEvents):
    """Memory of a device, allocated by cuMemAlloc, also during captures.

    Without ``shares``, other processes cannot open pages of expandable segments.
    """

    def __init__(self, gpu: UpstreamDevice, *, shares: bool = True) -> None:
        super().__init__(gpu)
        self._gpu = gpu
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
