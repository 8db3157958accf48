"""The device of a replay: memory without content, a limit, and streams that complete as recorded."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Iterable

from cudakit.errors import CudaError
from cudakit.gpu.api import Event, MemoryInfo
from cudakit.torch_rules.sizes import SEGMENT_STEP

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY

# Memory of a device without a limit: more than any device has.
_UNLIMITED_BYTES = 1 << 46
_FIRST_NEW_ADDRESS = 1 << 60  # an address above all recorded addresses


class ReplayDevice:
    """The memory, virtual memory, streams and events that the allocator of a replay uses.

    ``addresses`` are the addresses and sizes of recorded segments, in order of allocation. A new segment gets
    the next recorded address of its size, because the allocator chooses between blocks of equal size by
    address. If this address is in use, or there is none, the segment gets an address that is not in the
    recording.
    """

    def __init__(self, limit_bytes: int | None, addresses: Iterable[tuple[int, int]] = ()) -> None:
        self._limit_bytes = _UNLIMITED_BYTES if limit_bytes is None else limit_bytes
        self._used_bytes = 0
        self.refusal_count = 0  # number of requests that exceeded the limit
        self._size_by_address: dict[int, int] = {}
        self._sorted_addresses: list[int] = []  # the keys of _size_by_address
        self._next_address = _FIRST_NEW_ADDRESS
        self._recorded_addresses: defaultdict[int, deque[int]] = defaultdict(deque)
        for address, segment_bytes in addresses:
            self._recorded_addresses[segment_bytes].append(address)
        self._last_event_handle = 0
        # stream of each event, and position in the stream
        self._position_by_event: dict[int, tuple[int, int]] = {}
        self._event_counts: defaultdict[int, int] = defaultdict(int)
        self._completed_counts: defaultdict[int, int] = defaultdict(int)
        self.pages = self

    # --- memory

    def malloc(self, size_bytes: int, stream: int) -> int:  # noqa: ARG002
        self._use_bytes(size_bytes)
        ptr = self._next_segment_address(size_bytes)
        self._size_by_address[ptr] = size_bytes
        insort(self._sorted_addresses, ptr)
        return ptr

    def free(self, ptr: int) -> None:
        self._used_bytes -= self._size_by_address.pop(ptr)
        self._sorted_addresses.remove(ptr)

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(self._limit_bytes - self._used_bytes, self._limit_bytes)

    def granularity(self) -> int:
        return SEGMENT_STEP

    def reserve(self, size_bytes: int) -> int:
        return self._new_address(size_bytes)

    def unreserve(self, ptr: int, size_bytes: int) -> None:
        pass

    def map(self, ptr: int, page_bytes: int, count: int) -> None:  # noqa: ARG002
        self._use_bytes(page_bytes * count)

    def unmap(self, ptr: int, size_bytes: int) -> None:  # noqa: ARG002
        self._used_bytes -= size_bytes

    # --- streams

    def complete_events(self, stream: int, position: int) -> None:
        """Complete the events of a stream up to a position."""
        self._completed_counts[stream] = max(self._completed_counts[stream], position)

    def recorded_count(self, stream: int) -> int:
        """Return the number of events recorded on a stream."""
        return self._event_counts[stream]

    def event(self) -> Event:
        self._last_event_handle += 1
        return Event(self._last_event_handle)

    def destroy_event(self, event: Event) -> None:
        self._position_by_event.pop(event, None)

    def record(self, event: Event, stream: int) -> None:
        self._event_counts[stream] += 1
        self._position_by_event[event] = stream, self._event_counts[stream]

    def query_event(self, event: Event) -> bool:
        stream, position = self._position_by_event[event]
        return position <= self._completed_counts[stream]

    def sync_event(self, event: Event) -> None:
        self.complete_events(*self._position_by_event[event])

    def sync_stream(self, stream: int) -> None:
        pass

    def sync(self) -> None:
        self._completed_counts.update(self._event_counts)

    def _use_bytes(self, size_bytes: int) -> None:
        if self._used_bytes + size_bytes > self._limit_bytes:
            self.refusal_count += 1
            raise CudaError(_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "the limit of the replay")
        self._used_bytes += size_bytes

    def _next_segment_address(self, size_bytes: int) -> int:
        recorded_addresses = self._recorded_addresses[size_bytes]
        while recorded_addresses:
            if self._is_free(ptr := recorded_addresses.popleft(), size_bytes):
                return ptr
        return self._new_address(size_bytes)

    def _is_free(self, ptr: int, size_bytes: int) -> bool:
        next_index = bisect_right(self._sorted_addresses, ptr)
        previous_address = self._sorted_addresses[next_index - 1] if next_index else None
        starts_after_previous = (
            previous_address is None
            or previous_address + self._size_by_address[previous_address] <= ptr
        )
        return starts_after_previous and (
            next_index == len(self._sorted_addresses)
            or ptr + size_bytes <= self._sorted_addresses[next_index]
        )

    def _new_address(self, size_bytes: int) -> int:
        # The gap keeps segments from being adjacent.
        ptr, self._next_address = self._next_address, self._next_address + size_bytes + SEGMENT_STEP
        return ptr
