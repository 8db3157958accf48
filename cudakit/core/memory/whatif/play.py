"""A program played through cudakit's own allocator, under any settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from cudakit.core.allocator.allocator import CachingAllocator
from cudakit.core.allocator.oom import OutOfMemory
from cudakit.core.allocator.pool_stats import PoolId
from cudakit.core.memory.replay.lifetimes import BEFORE
from cudakit.core.memory.whatif.program import AT_ONCE, Act, Program
from cudakit.core.memory.whatif.replica import Replica
from cudakit.core.memory.whatif.result import Held, Shortage
from cudakit.torch_rules.settings import Settings

# Numbers of streams for the allocator, which takes those below 3 for default streams.
_FIRST_STREAM = 16
_FIRST_LANE = 1 << 40


@dataclass(frozen=True, slots=True)
class Played:
    """What a program needed."""

    start: Held  # when the trace began
    peak: Held
    end: Held
    at_peak: Held  # when most was requested in the record
    device_allocations: int
    device_frees: int
    retries: int
    ooms: int
    shortage: Shortage | None


def play(
    program: Program,
    settings: Settings,
    *,
    limit_bytes: int | None,
    places: Iterable[tuple[int, int]] = (),
    search_again: bool = False,
) -> Played:
    """Play a program to its end, or to the first request that was served in the record and is not here.

    ``places`` are the addresses and sizes of recorded segments, as Replica takes them.
    Raises Unsupported for settings that the allocator has not.
    """
    player = _Player(program, settings, Replica(limit_bytes, places), search_again=search_again)
    return player.play()


class _Ran(Exception):
    """The end of a replay for want of memory."""

    def __init__(self, shortage: Shortage) -> None:
        self.shortage = shortage


class _Player:
    """One replay: the allocator, and where what it handed out lies."""

    def __init__(
        self, program: Program, settings: Settings, device: Replica, *, search_again: bool
    ) -> None:
        self._program = program
        self._device = device
        self._allocator = CachingAllocator(device, settings, search_again=search_again)
        self._pool = 0  # of the request at hand
        self._pools: dict[int, PoolId] = {}
        self._let_gone: set[int] = set()
        self._live: dict[int, int] = {}
        self._places: dict[int, int] = {}  # in their lanes, of frees that wait
        self._ooms = 0
        self._at_peak: Held | None = None

    def play(self) -> Played:
        shortage = None
        try:
            start = self._put_in()
            self._walk()
        except _Ran as ran:
            shortage = ran.shortage
            if shortage.event < 0:
                start = self._held("current")
        self._allocator.process_events()
        known = self._allocator.statistics()
        return Played(
            start=start,
            peak=self._held("peak"),
            end=self._held("current"),
            at_peak=self._at_peak or self._held("current"),
            device_allocations=known["num_device_alloc"],
            device_frees=known["num_device_free"],
            retries=known["num_alloc_retries"],
            ooms=self._ooms,
            shortage=shortage,
        )

    def _put_in(self) -> Held:
        """Allocate what the program held when the trace began; only what comes then is counted."""
        for number in self._program.held:
            self._alloc(BEFORE, number)
        for number in self._program.freed_before:
            self._free(BEFORE, number)
        self._allocator.reset_peaks()
        self._allocator.reset_sums()
        if self._program.peak_event < 0:
            self._at_peak = self._held("current")
        return self._held("current")

    def _walk(self) -> None:
        acts: dict[Act, Callable[[int, int], None]] = {
            Act.ALLOC: self._alloc,
            Act.FREE: self._free,
            Act.COMPLETE: self._complete,
            Act.ASK: self._ask,
            Act.LET_GO: self._let_go,
            Act.EMPTY_POOL: self._empty_pool,
            Act.EMPTY_CACHE: self._empty_cache,
        }
        peak_event = self._program.peak_event
        for event, act, number in self._program.steps:
            acts[act](event, number)
            if event == peak_event:
                self._at_peak = self._held("current")

    # The acts.

    def _alloc(self, event: int, number: int) -> None:
        try:
            self._live[number] = self._request(number)
        except OutOfMemory:
            self._ooms += 1
            raise _Ran(Shortage(event, self._program.requests[number][0])) from None

    def _free(self, event: int, number: int) -> None:  # noqa: ARG002
        ptr, lane = self._live.pop(number), self._program.lanes[number]
        if lane == AT_ONCE or not ptr:
            self._allocator.free(ptr)
            return
        self._allocator.free(ptr, _FIRST_LANE + lane)
        self._places[number] = self._device.last_place(_FIRST_LANE + lane)

    def _complete(self, event: int, number: int) -> None:  # noqa: ARG002
        lane = _FIRST_LANE + self._program.lanes[number]
        self._device.come_so_far(lane, self._places.pop(number, 0))
        self._allocator.process_events()

    def _ask(self, event: int, number: int) -> None:  # noqa: ARG002
        """Ask for what the record could not have; where it is there, nobody knows what became of it."""
        try:
            ptr = self._request(number)
        except OutOfMemory:
            self._ooms += 1
        else:
            self._allocator.free(ptr)

    def _let_go(self, event: int, pool: int) -> None:  # noqa: ARG002
        if pool in self._pools and pool not in self._let_gone:
            self._let_gone.add(pool)
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
            self._allocator.begin_allocate_to_pool(made, partial(self._goes_to, pool))
        self._pool = pool
        return self._allocator.alloc(size, _FIRST_STREAM + stream)

    def _goes_to(self, pool: int, stream: int) -> bool:  # noqa: ARG002
        return self._pool == pool

    def _held(self, part: str) -> Held:
        known = self._allocator.statistics()
        names = ("reserved", "allocated", "requested", "active")
        return Held(*(known[f"{name}_bytes.all.{part}"] for name in names))
