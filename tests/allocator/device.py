"""A simulated device with a capacity. Tests determine when events complete and which calls fail."""

from __future__ import annotations

from cudakit.errors import CudaError
from cudakit.gpu.api import Event, MemoryInfo

MIB = 1 << 20
GIB = 1 << 30
BASE = 0x7F00_0000_0000


class Device:
    """An upstream. ``fail_at`` is the number of the call that fails, counted from 1, with ``error``."""

    def __init__(self, capacity: int = 16 * GIB, base: int = BASE) -> None:
        self.capacity = capacity
        self.held: dict[int, int] = {}
        self.calls: list[str] = []
        self.fail_at = 0
        self.error = CudaError(999, "CUDA_ERROR_UNKNOWN", "requested by the test")
        self.destroyed_streams: set[int] = set()
        self.events: dict[int, int] = {}  # The stream on which each event was last recorded.
        self.reached: dict[int, int] = {}
        self.recorded: dict[int, int] = {}
        self._places: dict[int, int] = {}
        self._next = base
        self._next_event = 1

    @property
    def used(self) -> int:
        return sum(self.held.values())

    def finish(self, stream: int) -> None:
        """Complete all work of a stream."""
        self.reached[stream] = self.recorded.get(stream, 0)

    def malloc(self, size_bytes: int, stream: int) -> int:  # noqa: ARG002
        self._call("malloc")
        if self.used + size_bytes > self.capacity:
            raise CudaError(2, "CUDA_ERROR_OUT_OF_MEMORY", "the device is full")
        ptr, self._next = self._next, self._next + size_bytes + 2 * MIB
        self.held[ptr] = size_bytes
        return ptr

    def free(self, ptr: int) -> None:
        self._call("free")
        del self.held[ptr]

    def memory_info(self) -> MemoryInfo:
        self._call("memory_info")
        return MemoryInfo(self.capacity - self.used, self.capacity)

    def event(self) -> Event:
        self._call("event")
        self._next_event += 1
        self.events[self._next_event] = 0
        return Event(self._next_event)

    def destroy_event(self, event: Event) -> None:
        self._call("destroy_event")
        del self.events[event]

    def record(self, event: Event, stream: int) -> None:
        self._call("record")
        if stream in self.destroyed_streams:
            raise CudaError(400, "CUDA_ERROR_INVALID_HANDLE", f"stream {stream} was destroyed")
        self.recorded[stream] = self._places[event] = self.recorded.get(stream, 0) + 1
        self.events[event] = stream

    def query_event(self, event: Event) -> bool:
        self._call("query_event")
        return self._places[event] <= self.reached.get(self.events[event], 0)

    def sync_event(self, event: Event) -> None:
        self._call("sync_event")
        stream = self.events[event]
        self.reached[stream] = max(self.reached.get(stream, 0), self._places[event])

    def sync(self) -> None:
        self._call("sync")
        for stream in list(self.recorded):
            self.finish(stream)

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) == self.fail_at:
            raise self.error
