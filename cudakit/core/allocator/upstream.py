"""What the allocator needs of a device, and a Gpu that gives it.

Streams are the allocator's numbers: 0 is the legacy default stream, a negative one the default stream of a
thread, all others are the Gpu's own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from cudakit.core.allocator.neighbours import Neighbours
from cudakit.core.allocator.pages import PagesOfGpu, VirtualMemory
from cudakit.core.allocator.reuse import CaptureGraph
from cudakit.gpu.api import LEGACY, PER_THREAD, Event, Gpu, GraphNode, MemoryInfo, Ptr, Stream

DEFAULT_STREAM = 0


class Upstream(Protocol):
    """Where memory comes from. Every call that fails raises a CudaError; no memory: of code 2."""

    def malloc(self, size_bytes: int, stream: int) -> int: ...
    def free(self, ptr: int) -> None: ...
    def memory_info(self) -> MemoryInfo: ...
    def event(self) -> Event: ...
    def destroy_event(self, event: Event) -> None: ...
    def record(self, event: Event, stream: int) -> None: ...
    def query_event(self, event: Event) -> bool: ...
    def sync_event(self, event: Event) -> None: ...
    def sync(self) -> None: ...


@runtime_checkable
class Paged(Protocol):
    """An upstream that has virtual memory too, which expandable segments need."""

    @property
    def pages(self) -> VirtualMemory: ...


@runtime_checkable
class Captured(Protocol):
    """An upstream whose streams may be captured, and that knows the graph."""

    @property
    def graph(self) -> CaptureGraph: ...


@runtime_checkable
class Reachable(Protocol):
    """An upstream whose memory other devices may use; ``mapped`` are the ranges of its pages."""

    @property
    def peers(self) -> Sequence[int]: ...
    def enable_peer(self, device: int, mapped: Iterable[tuple[int, int]]) -> None: ...


@runtime_checkable
class Shareable(Protocol):
    """An upstream whose memory other processes may use."""

    @property
    def neighbours(self) -> Neighbours: ...


class OfGpu:
    """Memory of a Gpu, at once (cuMemAlloc), whatever is captured; other processes may open it.

    Pages of expandable segments they may if it ``shares``.
    """

    def __init__(self, gpu: Gpu, *, shares: bool = True) -> None:
        self._gpu = gpu
        self.pages = PagesOfGpu(gpu, shares=shares)
        self.neighbours = Neighbours(gpu, self.pages)
        self.peers = self.pages.peers
        self.graph = GraphOfGpu(gpu)
        self.memory_info = gpu.memory_info
        self.destroy_event = gpu.destroy_event
        self.query_event = gpu.query_event
        self.sync_event = gpu.sync_event
        self.sync = gpu.sync

    def malloc(self, size_bytes: int, stream: int) -> int:  # noqa: ARG002
        with self._gpu.relaxed():
            return self._gpu.malloc(size_bytes)

    def free(self, ptr: int) -> None:
        self._gpu.free(Ptr(ptr))

    def enable_peer(self, device: int, mapped: Iterable[tuple[int, int]]) -> None:
        with self._gpu.relaxed():
            self._gpu.enable_peer(device)
            self.pages.enable_peer(device, mapped)

    def event(self) -> Event:
        return self._gpu.event(timing=False)

    def record(self, event: Event, stream: int) -> None:
        # The default stream of a thread can be named by that thread alone; the legacy one waits for it, as
        # for every blocking stream (CUDA Driver API, "Stream synchronization behavior").
        self._gpu.record(event, Stream(stream) if stream > 0 else LEGACY)


class GraphOfGpu:
    """What a Gpu tells of the captures that its streams are in."""

    def __init__(self, gpu: Gpu) -> None:
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
    """Return a stream that may be captured: not the legacy one, nor that of a thread to any other."""
    if stream < 0:
        return PER_THREAD if stream == stream_number(PER_THREAD) else None
    return Stream(stream) if stream else None


def stream_number(stream: int) -> int:
    """Return the allocator's number of a stream: by its handle, where 0 and LEGACY are the same."""
    if stream == LEGACY:
        return DEFAULT_STREAM
    if stream == PER_THREAD:
        return -threading.get_ident()
    return stream
