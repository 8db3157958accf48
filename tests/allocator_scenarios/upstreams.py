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


class UpstreamInMemory:
    """An upstream whose addresses rise or fall; ``finish`` completes the work of a stream."""

    def __init__(self, capacity_bytes: int = 16 * GIB, *, rising: bool = True) -> None:
        self._capacity = capacity_bytes
        self._allocated_bytes: dict[int, int] = {}
        self.pages = PagesInMemory(self)
        self._rising = rising
        self._next = BASE
        # Stream of each event, and the number of the work item that the event waits for.
        self._events: dict[int, tuple[int, int]] = {}
        # Numbers of work items that each stream was given and has finished.
        self._enqueued: dict[int, int] = {}
        self._finished: dict[int, int] = {}
        self._last_event = 0

    def malloc(self, size_bytes: int, stream: int) -> int:  # noqa: ARG002
        self.check_capacity(size_bytes)
        return self.allocate_at(self.address(size_bytes), size_bytes)

    def address(self, size_bytes: int) -> int:
        """Return an unused address range."""
        step = -(-size_bytes // GAP) * GAP + GAP
        ptr = self._next if self._rising else self._next - step
        self._next += step if self._rising else -step
        return ptr

    def allocate_at(self, ptr: int, size_bytes: int) -> int:
        """Allocate memory at an address."""
        self.check_capacity(size_bytes)
        self._allocated_bytes[ptr] = size_bytes
        return ptr

    def check_capacity(self, size_bytes: int) -> None:
        """Raise CudaError if too little memory is left."""
        if sum(self._allocated_bytes.values()) + size_bytes > self._capacity:
            raise CudaError(2, "CUDA_ERROR_OUT_OF_MEMORY", "the device is full")

    def free(self, ptr: int) -> None:
        del self._allocated_bytes[ptr]

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(self._capacity - sum(self._allocated_bytes.values()), self._capacity)

    def event(self) -> Event:
        self._last_event += 1
        return Event(self._last_event)

    def destroy_event(self, event: Event) -> None:
        self._events.pop(event, None)

    def record(self, event: Event, stream: int) -> None:
        self._enqueued[stream] = self._enqueued.get(stream, 0) + 1
        self._events[event] = stream, self._enqueued[stream]

    def query_event(self, event: Event) -> bool:
        stream, work_item = self._events[event]
        return work_item <= self._finished.get(stream, 0)

    def sync_event(self, event: Event) -> None:
        stream, work_item = self._events[event]
        self._finished[stream] = max(self._finished.get(stream, 0), work_item)

    def sync(self) -> None:
        for stream in list(self._enqueued):
            self.finish(stream)

    def finish(self, stream: int) -> None:
        self._finished[stream] = self._enqueued.get(stream, 0)


class PagesInMemory:
    """The virtual memory of this device."""

    def __init__(self, device: UpstreamInMemory) -> None:
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
                self._map_pages(ptr + mapped, page_bytes)
                mapped += page_bytes
        except CudaError:
            self.unmap(ptr, mapped)
            raise

    def unmap(self, ptr: int, size_bytes: int) -> None:
        for page in range(ptr, ptr + size_bytes, 2 * MIB):
            self._device.free(page)

    def sync_stream(self, stream: int) -> None:
        self._device.finish(stream)

    def _map_pages(self, ptr: int, size_bytes: int) -> None:
        for page in range(ptr, ptr + size_bytes, 2 * MIB):
            self._device.allocate_at(page, 2 * MIB)


class UpstreamAtAddresses:
    """An upstream that reports given addresses for its segments; they must not be accessed.

    The device gets each call with the address that it chose itself.
    """

    def __init__(self, upstream: Any, addresses: Addresses) -> None:
        self._upstream = upstream
        self._next_addresses = deque(addresses.segments)
        self._real_addresses: dict[int, int] = {}
        self.pages = PagesAtAddresses(upstream.pages, addresses)

    def malloc(self, size_bytes: int, stream: int) -> int:
        real_address: int = self._upstream.malloc(size_bytes, stream)
        address = self._next_addresses.popleft() if self._next_addresses else real_address
        self._real_addresses[address] = real_address
        return address

    def free(self, ptr: int) -> None:
        self._upstream.free(self._real_addresses[ptr])
        del self._real_addresses[ptr]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._upstream, name)


class PagesAtAddresses:
    """Virtual memory whose reserved ranges have given addresses."""

    def __init__(self, pages: Any, addresses: Addresses) -> None:
        self._pages = pages
        self._next_addresses = deque(addresses.reservations)
        # Size and real address of each reserved range, by its reported address.
        self._ranges: dict[int, tuple[int, int]] = {}

    def reserve(self, size_bytes: int) -> int:
        real_address: int = self._pages.reserve(size_bytes)
        address = self._next_addresses.popleft() if self._next_addresses else real_address
        self._ranges[address] = size_bytes, real_address
        return address

    def unreserve(self, ptr: int, size_bytes: int) -> None:
        self._pages.unreserve(self._real_address(ptr), size_bytes)
        del self._ranges[ptr]

    def map(self, ptr: int, page_bytes: int, count: int) -> None:
        self._pages.map(self._real_address(ptr), page_bytes, count)

    def unmap(self, ptr: int, size_bytes: int) -> None:
        self._pages.unmap(self._real_address(ptr), size_bytes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pages, name)

    def _real_address(self, ptr: int) -> int:
        for begin, (size, real_address) in self._ranges.items():
            if begin <= ptr < begin + size:
                return real_address + ptr - begin
        raise LookupError(f"nothing is reserved at {ptr:#x}")
