"""Upstreams without a real device: counted memory, and given addresses."""

from __future__ import annotations

from collections import deque
from typing import Any

from allocator_scenarios.canonical import Addresses
from cudakit.errors import CudaError
from cudakit.gpu.api import Event, MemoryInfo

MIB = 1 << 20
GIB = 1 << 30
GAP = 2 << 20
BASE = 0x7F00_0000_0000


class InMemory:
    """An upstream whose addresses rise or fall; ``finish`` completes the work of a stream."""

    def __init__(self, capacity_bytes: int = 16 * GIB, *, rising: bool = True) -> None:
        self._capacity = capacity_bytes
        self._held: dict[int, int] = {}
        self.pages = PagesInMemory(self)
        self._rising = rising
        self._next = BASE
        self._events: dict[int, tuple[int, int]] = {}  # the stream, and how far it was
        self._given: dict[int, int] = {}
        self._done: dict[int, int] = {}
        self._last_event = 0

    def malloc(self, size_bytes: int, stream: int) -> int:  # noqa: ARG002
        self.check_capacity(size_bytes)
        return self.back(self.address(size_bytes), size_bytes)

    def address(self, size_bytes: int) -> int:
        """Return an unused address range."""
        step = -(-size_bytes // GAP) * GAP + GAP
        ptr = self._next if self._rising else self._next - step
        self._next += step if self._rising else -step
        return ptr

    def back(self, ptr: int, size_bytes: int) -> int:
        """Allocate memory at an address."""
        self.check_capacity(size_bytes)
        self._held[ptr] = size_bytes
        return ptr

    def check_capacity(self, size_bytes: int) -> None:
        """Raise CudaError if too little memory is left."""
        if sum(self._held.values()) + size_bytes > self._capacity:
            raise CudaError(2, "CUDA_ERROR_OUT_OF_MEMORY", "the device is full")

    def free(self, ptr: int) -> None:
        del self._held[ptr]

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(self._capacity - sum(self._held.values()), self._capacity)

    def event(self) -> Event:
        self._last_event += 1
        return Event(self._last_event)

    def destroy_event(self, event: Event) -> None:
        self._events.pop(event, None)

    def record(self, event: Event, stream: int) -> None:
        self._given[stream] = self._given.get(stream, 0) + 1
        self._events[event] = stream, self._given[stream]

    def query_event(self, event: Event) -> bool:
        stream, place = self._events[event]
        return place <= self._done.get(stream, 0)

    def sync_event(self, event: Event) -> None:
        stream, place = self._events[event]
        self._done[stream] = max(self._done.get(stream, 0), place)

    def sync(self) -> None:
        for stream in list(self._given):
            self.finish(stream)

    def finish(self, stream: int) -> None:
        self._done[stream] = self._given.get(stream, 0)


class PagesInMemory:
    """The virtual memory of this device."""

    def __init__(self, device: InMemory) -> None:
        self._device = device

    def granularity(self) -> int:
        return 2 * MIB

    def reserve(self, size_bytes: int) -> int:
        return self._device.address(size_bytes)

    def unreserve(self, ptr: int, size_bytes: int) -> None: ...

    def map(self, ptr: int, page_bytes: int, count: int) -> None:
        mapped = 0
        try:
            for _ in range(count):
                self._put(ptr + mapped, page_bytes)
                mapped += page_bytes
        except CudaError:
            self.unmap(ptr, mapped)
            raise

    def unmap(self, ptr: int, size_bytes: int) -> None:
        for place in range(ptr, ptr + size_bytes, 2 * MIB):
            self._device.free(place)

    def sync_stream(self, stream: int) -> None:
        self._device.finish(stream)

    def _put(self, ptr: int, size_bytes: int) -> None:
        for place in range(ptr, ptr + size_bytes, 2 * MIB):
            self._device.back(place, 2 * MIB)


class Placed:
    """An upstream whose segments have given addresses, which must not be accessed.

    Every call is made, with what the device gave itself.
    """

    def __init__(self, upstream: Any, addresses: Addresses) -> None:
        self._upstream = upstream
        self._left = deque(addresses.segments)
        self._given: dict[int, int] = {}
        self.pages = PlacedPages(upstream.pages, addresses)

    def malloc(self, size_bytes: int, stream: int) -> int:
        own: int = self._upstream.malloc(size_bytes, stream)
        address = self._left.popleft() if self._left else own
        self._given[address] = own
        return address

    def free(self, ptr: int) -> None:
        self._upstream.free(self._given[ptr])
        del self._given[ptr]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._upstream, name)


class PlacedPages:
    """Virtual memory whose reserved ranges have given addresses."""

    def __init__(self, pages: Any, addresses: Addresses) -> None:
        self._pages = pages
        self._left = deque(addresses.reservations)
        self._given: dict[int, tuple[int, int]] = {}  # begin: the size, and where it is

    def reserve(self, size_bytes: int) -> int:
        own: int = self._pages.reserve(size_bytes)
        address = self._left.popleft() if self._left else own
        self._given[address] = size_bytes, own
        return address

    def unreserve(self, ptr: int, size_bytes: int) -> None:
        self._pages.unreserve(self._own(ptr), size_bytes)
        del self._given[ptr]

    def map(self, ptr: int, page_bytes: int, count: int) -> None:
        self._pages.map(self._own(ptr), page_bytes, count)

    def unmap(self, ptr: int, size_bytes: int) -> None:
        self._pages.unmap(self._own(ptr), size_bytes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pages, name)

    def _own(self, ptr: int) -> int:
        for begin, (size, own) in self._given.items():
            if begin <= ptr < begin + size:
                return own + ptr - begin
        raise LookupError(f"nothing is reserved at {ptr:#x}")
