"""A recorded program replayed by an allocator under any settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol, TypeAlias

from cudakit.core.memory.replay.lifetimes import BEFORE
from cudakit.core.memory.whatif.program import AT_ONCE, Program, Step
from cudakit.core.memory.whatif.replica import Replica
from cudakit.core.memory.whatif.result import Held, Outcome, Shortage
from cudakit.torch_rules.settings import Settings

# Stream handles for the allocator, which treats those below 3 as default streams.
_FIRST_STREAM = 16
_FIRST_LANE = 1 << 40

PoolId: TypeAlias = tuple[int, int]


class ReplayAllocator(Protocol):
    """The allocator of a replay, as cudakit's caching allocator. ``alloc`` raises MemoryError."""

    def alloc(self, size_bytes: int, stream: int, /) -> int: ...
    def free(self, ptr: int, stream: int | None = None, /) -> None: ...
    def process_events(self) -> None:
        """Complete the frees whose streams are done, as the next request would."""

    def statistics(self) -> dict[str, int]: ...
    def reset_peaks(self) -> None: ...
    def reset_sums(self) -> None: ...
    def empty_cache(self) -> None: ...
    def graph_pool_handle(self) -> PoolId: ...
    def begin_allocate_to_pool(self, pool: PoolId, takes: Callable[[int], bool], /) -> None: ...
    def end_allocate_to_pool(self, pool: PoolId, /) -> None: ...
    def release_pool(self, pool: PoolId, /) -> None: ...
    def empty_pool(self, pool: PoolId, /) -> None: ...


# Makes an allocator for a device under settings; the flag is ``search_again`` of the caching allocator.
NewAllocator: TypeAlias = Callable[[Replica, Settings, bool], ReplayAllocator]


def replay(
    program: Program,
    settings: Settings,
    new_allocator: NewAllocator,
    *,
    name: str = "",
    limit_bytes: int | None,
    addresses: Iterable[tuple[int, int]] = (),
    search_again: bool = False,
) -> tuple[Outcome, Held]:
    """Replay a program to its end, or to the first request that was served in the record and fails here.

    ``addresses`` are the addresses and sizes of recorded segments, as Replica takes them. Returns the outcome
    under the given name, and the memory held when the trace began.
    Raises Unsupported for settings that the allocator does not have.
    """
    device = Replica(limit_bytes, addresses)
    replay = _Replay(program, device, new_allocator(device, settings, search_again))
    start, shortage = replay.run()
    if limit_bytes is not None and settings.memory_fraction < 1:
        limit_bytes = int(limit_bytes * settings.memory_fraction)
    return replay.outcome(name, settings, limit_bytes, shortage), start


class _OutOfMemory(Exception):
    """The end of a replay because a request failed."""

    def __init__(self, shortage: Shortage) -> None:
        self.shortage = shortage


class _Replay:
    """One replay: the allocator, and the addresses of what it allocated."""

    def __init__(self, program: Program, device: Replica, allocator: ReplayAllocator) -> None:
        self._program = program
        self._device = device
        self._allocator = allocator
        self._pool = 0  # of the current request
        self._pools: dict[int, PoolId] = {}
        self._released: set[int] = set()
        self._live: dict[int, int] = {}
        self._waiting: dict[int, int] = {}  # by pending free: the position in its lane
        self._ooms = 0
        self._at_peak: Held | None = None  # when most was requested in the record

    def run(self) -> tuple[Held, Shortage | None]:
        """Perform all steps; return what was held when the trace began, and the request that ended it."""
        shortage = None
        try:
            start = self._allocate_initial()
            self._take_steps()
        except _OutOfMemory as ended:
            shortage = ended.shortage
            if shortage.event < 0:
                start = self._held("current")
        self._allocator.process_events()
        return start, shortage

    def outcome(
        self, name: str, settings: Settings, limit_bytes: int | None, shortage: Shortage | None
    ) -> Outcome:
        statistics = self._allocator.statistics()
        at_peak = self._at_peak or self._held("current")
        free = at_peak.reserved_bytes - at_peak.active_bytes
        return Outcome(
            name=name,
            settings=settings.as_text(),
            limit_bytes=limit_bytes,
            peak=self._held("peak"),
            end=self._held("current"),
            fragmentation_bytes=free,
            fragmentation=free / max(at_peak.reserved_bytes, 1),
            device_allocations=statistics["num_device_alloc"],
            device_frees=statistics["num_device_free"],
            retries=statistics["num_alloc_retries"],
            ooms=self._ooms,
            shortage=shortage,
        )

    def _allocate_initial(self) -> Held:
        """Allocate what the program held when the trace began; counts and peaks begin after it."""
        for number in self._program.held:
            self._alloc(BEFORE, number)
        for number in self._program.freed_before:
            self._free(BEFORE, number)
        self._allocator.reset_peaks()
        self._allocator.reset_sums()
        if self._program.peak_event < 0:
            self._at_peak = self._held("current")
        return self._held("current")

    def _take_steps(self) -> None:
        steps: dict[Step, Callable[[int, int], None]] = {
            Step.ALLOC: self._alloc,
            Step.FREE: self._free,
            Step.COMPLETE_FREE: self._complete_free,
            Step.FAILED_ALLOC: self._failed_alloc,
            Step.RELEASE_POOL: self._release_pool,
            Step.EMPTY_POOL: self._empty_pool,
            Step.EMPTY_CACHE: self._empty_cache,
        }
        peak_event = self._program.peak_event
        for event, step, number in self._program.steps:
            steps[step](event, number)
            if event == peak_event:
                self._at_peak = self._held("current")

    # The steps.

    def _alloc(self, event: int, number: int) -> None:
        try:
            self._live[number] = self._request(number)
        except MemoryError:
            self._ooms += 1
            raise _OutOfMemory(Shortage(event, self._program.requests[number][0])) from None

    def _free(self, event: int, number: int) -> None:  # noqa: ARG002
        ptr, lane = self._live.pop(number), self._program.lanes[number]
        if lane == AT_ONCE or not ptr:
            self._allocator.free(ptr)
            return
        self._allocator.free(ptr, _FIRST_LANE + lane)
        self._waiting[number] = self._device.recorded_count(_FIRST_LANE + lane)

    def _complete_free(self, event: int, number: int) -> None:  # noqa: ARG002
        lane = _FIRST_LANE + self._program.lanes[number]
        self._device.complete(lane, self._waiting.pop(number, 0))
        self._allocator.process_events()

    def _failed_alloc(self, event: int, number: int) -> None:  # noqa: ARG002
        """Repeat a request that failed in the record; if it succeeds, its later use is unknown."""
        try:
            ptr = self._request(number)
        except MemoryError:
            self._ooms += 1
        else:
            self._allocator.free(ptr)

    def _release_pool(self, event: int, pool: int) -> None:  # noqa: ARG002
        if pool in self._pools and pool not in self._released:
            self._released.add(pool)
            self._allocator.end_allocate_to_pool(self._pools[pool])
            self._allocator.release_pool(self._pools[pool])

    def _empty_pool(self, event: int, pool: int) -> None:  # noqa: ARG002
        if pool in self._pools:
            self._allocator.empty_pool(self._pools[pool])

    def _empty_cache(self, event: int, number: int) -> None:  # noqa: ARG002
        self._allocator.empty_cache()

    def _request(self, number: int) -> int:
        size, stream, pool = self._program.requests[number]
        if pool and pool not in self._pools:
            self._pools[pool] = made = self._allocator.graph_pool_handle()
            self._allocator.begin_allocate_to_pool(made, partial(self._is_current_pool, pool))
        self._pool = pool
        return self._allocator.alloc(size, _FIRST_STREAM + stream)

    def _is_current_pool(self, pool: int, stream: int) -> bool:  # noqa: ARG002
        return self._pool == pool

    def _held(self, part: str) -> Held:
        statistics = self._allocator.statistics()
        names = ("reserved", "allocated", "requested", "active")
        return Held(*(statistics[f"{name}_bytes.all.{part}"] for name in names))
