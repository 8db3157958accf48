"""The device of a replay: memory without content, a limit, and streams that are done when the record says."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Iterable

from cudakit.core.allocator.upstream import OUT_OF_MEMORY
from cudakit.errors import CudaError
from cudakit.gpu.api import Event, MemoryInfo
from cudakit.torch_rules.sizes import SEGMENT_STEP

# More than any device has, where nothing limits what is reserved.
_ENDLESS = 1 << 46
_ABOVE_ALL = 1 << 60


class Replica:
    """An upstream, and its own virtual memory.

    ``places`` are the addresses and sizes of recorded segments, in order: a segment gets that of the next
    one of its size, because blocks that fit equally well are chosen by address. Where that is in use, or
    there is none, the address is one that no record has.
    """

    def __init__(self, limit_bytes: int | None, places: Iterable[tuple[int, int]] = ()) -> None:
        self._limit = _ENDLESS if limit_bytes is None else limit_bytes
        self._used = 0
        self._held: dict[int, int] = {}
        self._order: list[int] = []  # the addresses of what is held
        self._next = _ABOVE_ALL
        self._places: defaultdict[int, deque[int]] = defaultdict(deque)
        for address, size in places:
            self._places[size].append(address)
        self._events = 0
        self._where: dict[int, tuple[int, int]] = {}  # of each event: stream, and how far that was
        self._recorded: defaultdict[int, int] = defaultdict(int)
        self._reached: defaultdict[int, int] = defaultdict(int)
        self.pages = self

    # Memory.

    def malloc(self, size_bytes: int, stream: int) -> int:  # noqa: ARG002
        self._take(size_bytes)
        ptr = self._place(size_bytes)
        self._held[ptr] = size_bytes
        insort(self._order, ptr)
        return ptr

    def free(self, ptr: int) -> None:
        self._used -= self._held.pop(ptr)
        self._order.remove(ptr)

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(self._limit - self._used, self._limit)

    def granularity(self) -> int:
        return SEGMENT_STEP

    def reserve(self, size_bytes: int) -> int:
        return self._new_address(size_bytes)

    def unreserve(self, ptr: int, size_bytes: int) -> None:
        pass

    def map(self, ptr: int, page_bytes: int, count: int) -> None:  # noqa: ARG002
        self._take(page_bytes * count)

    def unmap(self, ptr: int, size_bytes: int) -> None:  # noqa: ARG002
        self._used -= size_bytes

    # Streams.

    def come_so_far(self, stream: int, place: int) -> None:
        """Let a stream have done what was recorded on it up to a place."""
        self._reached[stream] = max(self._reached[stream], place)

    def last_place(self, stream: int) -> int:
        """Return how many events were recorded on a stream."""
        return self._recorded[stream]

    def event(self) -> Event:
        self._events += 1
        return Event(self._events)

    def destroy_event(self, event: Event) -> None:
        self._where.pop(event, None)

    def record(self, event: Event, stream: int) -> None:
        self._recorded[stream] += 1
        self._where[event] = stream, self._recorded[stream]

    def query_event(self, event: Event) -> bool:
        stream, place = self._where[event]
        return place <= self._reached[stream]

    def sync_event(self, event: Event) -> None:
        self.come_so_far(*self._where[event])

    def sync_stream(self, stream: int) -> None:
        pass

    def sync(self) -> None:
        self._reached.update(self._recorded)

    def _take(self, size_bytes: int) -> None:
        if self._used + size_bytes > self._limit:
            raise CudaError(OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "the limit of the replay")
        self._used += size_bytes

    def _place(self, size_bytes: int) -> int:
        recorded = self._places[size_bytes]
        while recorded:
            if self._is_free(ptr := recorded.popleft(), size_bytes):
                return ptr
        return self._new_address(size_bytes)

    def _is_free(self, ptr: int, size_bytes: int) -> bool:
        after = bisect_right(self._order, ptr)
        before = self._order[after - 1] if after else None
        clear_before = before is None or before + self._held[before] <= ptr
        return clear_before and (
            after == len(self._order) or ptr + size_bytes <= self._order[after]
        )

    def _new_address(self, size_bytes: int) -> int:
        # A gap behind each: segments are never neighbours.
        ptr, self._next = self._next, self._next + size_bytes + SEGMENT_STEP
        return ptr
