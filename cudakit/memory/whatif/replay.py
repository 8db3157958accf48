"""Replay a recorded program with an allocator and any settings."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

from cudakit.errors import CudaError
from cudakit.gpu.api import Event, MemoryInfo
from cudakit.memory.result import MemoryTotals, Outcome, Shortage
from cudakit.memory.snapshot import BEFORE_TRACE, PoolId
from cudakit.memory.whatif.program import NO_WAIT, Program, Step
from cudakit.torch_rules.settings import SEGMENT_STEP, Settings

# --- The device of a replay: memory without content, a limit, and streams that complete as recorded ---

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
        addresses = self._sorted_addresses
        index = bisect_right(addresses, ptr)
        if index and addresses[index - 1] + self._size_by_address[addresses[index - 1]] > ptr:
            return False
        return index == len(addresses) or ptr + size_bytes <= addresses[index]

    def _new_address(self, size_bytes: int) -> int:
        # The gap keeps segments from being adjacent.
        ptr, self._next_address = self._next_address, self._next_address + size_bytes + SEGMENT_STEP
        return ptr


# Stream handles for the allocator, which treats those below 3 as default streams.
_FIRST_STREAM = 16
_FIRST_WAIT_STREAM = 1 << 40


class ReplayAllocator(Protocol):
    """The calls of cudakit's caching allocator that a replay makes. ``alloc`` raises MemoryError."""

    def alloc(self, size_bytes: int, stream: int, /) -> int: ...
    def free(self, ptr: int, stream: int | None = None, /) -> None: ...
    def process_events(self) -> None:
        """Complete pending frees whose streams have finished, as the next request would."""

    def statistics(self) -> dict[str, int]: ...
    def reset_peaks(self) -> None: ...
    def reset_sums(self) -> None: ...
    def empty_cache(self) -> None: ...
    def graph_pool_handle(self) -> PoolId: ...
    def begin_allocate_to_pool(self, pool: PoolId, uses_pool: Callable[[int], bool], /) -> None: ...
    def end_allocate_to_pool(self, pool: PoolId, /) -> None: ...
    def release_pool(self, pool: PoolId, /) -> None: ...
    def empty_pool(self, pool: PoolId, /) -> None: ...


# A function that returns an allocator for a device and settings; the flag is ``search_again`` of
# CachingAllocator.
NewAllocator: TypeAlias = Callable[[ReplayDevice, Settings, bool], ReplayAllocator]


def replay(
    program: Program,
    settings: Settings,
    new_allocator: NewAllocator,
    *,
    name: str = "",
    limit_bytes: int | None,
    addresses: Iterable[tuple[int, int]] = (),
    search_again: bool = False,
) -> tuple[Outcome, MemoryTotals]:
    """Replay a program to its end, or to the first request that fails although it succeeded in the recording.

    ``addresses`` are the addresses and sizes of recorded segments, for ReplayDevice. Returns the outcome, and
    the memory in use when the trace starts. Raises Unsupported for settings that the allocator lacks.
    """
    device = ReplayDevice(limit_bytes, addresses)
    running_replay = _Replay(program, device, new_allocator(device, settings, search_again))
    initial_totals, shortage = running_replay.run()
    if limit_bytes is not None and settings.memory_fraction < 1:
        limit_bytes = int(limit_bytes * settings.memory_fraction)
    return running_replay.outcome(name, settings, limit_bytes, shortage), initial_totals


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """The last request of a replayed program."""

    succeeded: (
        bool  # whether the last request succeeded, as did all that succeeded in the recording
    )
    peak_reserved_bytes: int


def replay_request(
    program: Program,
    settings: Settings,
    new_allocator: NewAllocator,
    *,
    limit_bytes: int | None,
    addresses: Iterable[tuple[int, int]] = (),
    search_again: bool = False,
    max_searched_blocks: int,
) -> ReplayedRequest:
    """Replay a program whose last step is a failed request; arguments and errors as for ``replay``.

    Raises ReplayTooLong if the blocks in use, summed over all searches for memory to release, exceed
    ``max_searched_blocks``. A search visits the free blocks: at most one between two blocks in use.
    """
    device = ReplayDevice(limit_bytes, addresses)
    running_replay = _Replay(program, device, new_allocator(device, settings, search_again))
    return running_replay.run_to_last_request(max_searched_blocks)


class ReplayTooLong(Exception):
    """Raised if a replay searches the free blocks too often."""


class _OutOfMemory(Exception):
    """Raised if a request fails although it succeeded in the recording."""

    def __init__(self, shortage: Shortage) -> None:
        self.shortage = shortage


class _Replay:
    def __init__(self, program: Program, device: ReplayDevice, allocator: ReplayAllocator) -> None:
        self._program = program
        self._device = device
        self._allocator = allocator
        self._current_pool_index = 0  # pool of the current request
        self._pool_handles: dict[int, PoolId] = {}
        self._released_pools: set[int] = set()
        self._live_ptrs: dict[int, int] = {}
        # By allocation: the number of events on the wait stream at which its pending free completes.
        self._wait_positions: dict[int, int] = {}
        self._oom_count = 0
        self._totals_at_peak: MemoryTotals | None = None  # totals at the peak of the recording

    def run(self) -> tuple[MemoryTotals, Shortage | None]:
        """Run all steps; return the memory in use at the start of the trace, and the shortage, if any."""
        shortage = None
        try:
            initial_totals = self._allocate_initial()
            for event, step, target in self._program.steps:
                self._run_step(event, step, target)
                if event == self._program.peak_event:
                    self._totals_at_peak = self._read_totals("current")
        except _OutOfMemory as out_of_memory:
            shortage = out_of_memory.shortage
            if shortage.event < 0:
                initial_totals = self._read_totals("current")
        self._allocator.process_events()
        return initial_totals, shortage

    def run_to_last_request(self, max_searched_blocks: int) -> ReplayedRequest:
        """Run all steps; return whether the last one, a failed request, succeeded."""
        *steps, (_, _, last_request) = self._program.steps
        searched_blocks = refusal_count = 0
        try:
            self._allocate_initial()
            for event, step, target in steps:
                self._run_step(event, step, target)
                # A refusal by the device, as well as emptying the cache, searches for memory to release.
                search_count = self._device.refusal_count - refusal_count
                search_count += step == Step.EMPTY_CACHE
                refusal_count = self._device.refusal_count
                searched_blocks += search_count * len(self._live_ptrs)
                if searched_blocks > max_searched_blocks:
                    raise ReplayTooLong
            previous_oom_count = self._oom_count
            self._run_failed_alloc(last_request)
            succeeded = self._oom_count == previous_oom_count
        except _OutOfMemory:
            succeeded = False
        return ReplayedRequest(succeeded, self._read_totals("peak").reserved_bytes)

    def outcome(
        self, name: str, settings: Settings, limit_bytes: int | None, shortage: Shortage | None
    ) -> Outcome:
        statistics = self._allocator.statistics()
        totals_at_peak = self._totals_at_peak or self._read_totals("current")
        free_bytes = totals_at_peak.reserved_bytes - totals_at_peak.active_bytes
        return Outcome(
            name=name,
            settings=settings.as_text(),
            limit_bytes=limit_bytes,
            peak=self._read_totals("peak"),
            end=self._read_totals("current"),
            fragmentation_bytes=free_bytes,
            fragmentation=free_bytes / max(totals_at_peak.reserved_bytes, 1),
            device_allocations=statistics["num_device_alloc"],
            device_frees=statistics["num_device_free"],
            retries=statistics["num_alloc_retries"],
            ooms=self._oom_count,
            shortage=shortage,
        )

    def _allocate_initial(self) -> MemoryTotals:
        """Allocate the memory from before the trace; then reset counts and peaks."""
        for allocation_index in self._program.allocations_before:
            self._run_alloc(BEFORE_TRACE, allocation_index)
        for allocation_index in self._program.pending_frees_before:
            self._run_free(allocation_index)
        self._allocator.reset_peaks()
        self._allocator.reset_sums()
        if self._program.peak_event < 0:
            self._totals_at_peak = self._read_totals("current")
        return self._read_totals("current")

    def _run_step(self, event_index: int, step: Step, target_index: int) -> None:
        match step:
            case Step.ALLOC:
                self._run_alloc(event_index, target_index)
            case Step.FREE:
                self._run_free(target_index)
            case Step.COMPLETE_FREE:
                wait_stream = _FIRST_WAIT_STREAM + self._program.wait_streams[target_index]
                self._device.complete_events(wait_stream, self._wait_positions.pop(target_index, 0))
                self._allocator.process_events()
            case Step.FAILED_ALLOC:
                self._run_failed_alloc(target_index)
            case Step.RELEASE_POOL:
                if target_index in self._pool_handles and target_index not in self._released_pools:
                    self._released_pools.add(target_index)
                    self._allocator.end_allocate_to_pool(self._pool_handles[target_index])
                    self._allocator.release_pool(self._pool_handles[target_index])
            case Step.EMPTY_POOL if target_index in self._pool_handles:
                self._allocator.empty_pool(self._pool_handles[target_index])
            case Step.EMPTY_CACHE:
                self._allocator.empty_cache()

    def _run_alloc(self, event_index: int, allocation_index: int) -> None:
        try:
            self._live_ptrs[allocation_index] = self._alloc_request(allocation_index)
        except MemoryError:
            self._oom_count += 1
            raise _OutOfMemory(
                Shortage(event_index, self._program.requests[allocation_index][0])
            ) from None

    def _run_free(self, allocation_index: int) -> None:
        ptr = self._live_ptrs.pop(allocation_index)
        wait_stream = self._program.wait_streams[allocation_index]
        if wait_stream == NO_WAIT or not ptr:
            self._allocator.free(ptr)
            return
        stream = _FIRST_WAIT_STREAM + wait_stream
        self._allocator.free(ptr, stream)
        self._wait_positions[allocation_index] = self._device.recorded_count(stream)

    def _run_failed_alloc(self, request_index: int) -> None:
        """Repeat a request that failed in the recording. If it succeeds, free it: its lifetime is unknown."""
        try:
            ptr = self._alloc_request(request_index)
        except MemoryError:
            self._oom_count += 1
        else:
            self._allocator.free(ptr)

    def _alloc_request(self, request_index: int) -> int:
        size_bytes, stream, pool_index = self._program.requests[request_index]
        if pool_index and pool_index not in self._pool_handles:
            self._pool_handles[pool_index] = pool_handle = self._allocator.graph_pool_handle()
            self._allocator.begin_allocate_to_pool(
                pool_handle, partial(self._is_current_pool, pool_index)
            )
        self._current_pool_index = pool_index
        return self._allocator.alloc(size_bytes, _FIRST_STREAM + stream)

    def _is_current_pool(self, pool_index: int, stream: int) -> bool:  # noqa: ARG002
        return self._current_pool_index == pool_index

    def _read_totals(self, current_or_peak: str) -> MemoryTotals:
        statistics = self._allocator.statistics()
        names = ("reserved", "allocated", "requested", "active")
        return MemoryTotals(*(statistics[f"{name}_bytes.all.{current_or_peak}"] for name in names))
