"""The way in: one thread at a time, and what is freed while somebody is inside is freed a moment later."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from cudakit.core.memory.allocator.block import Trail
from cudakit.core.memory.allocator.guard import Guard
from cudakit.core.memory.allocator.pinned.blocks import HostBlock
from cudakit.core.memory.allocator.pinned.buckets import Buckets, bucket_of
from cudakit.core.memory.allocator.pinned.holes import Holes
from cudakit.core.memory.allocator.pinned.statistics import HostStatistics
from cudakit.core.memory.allocator.pinned.stores import Store
from cudakit.core.memory.allocator.pinned.supply import Supply
from cudakit.core.memory.allocator.pinned.upstream import HostUpstream
from cudakit.core.memory.allocator.pinned.waiting import Waiting
from cudakit.core.memory.allocator.sizes import UNLIMITED
from cudakit.core.memory.allocator.tracing import FREE_COMPLETED, FREE_REQUESTED, Level, Recorder
from cudakit.errors import CudaError


class HostEntrance:
    """What a pool of pinned memory consists of, and who may touch it."""

    def __init__(self, upstream: HostUpstream, *, splits: bool) -> None:
        self._guard = Guard()
        self._recorder = Recorder()
        self._level = Level.NONE
        self._records = False
        self._statistics = HostStatistics()
        self._store: Store = Holes() if splits else Buckets()
        self._supply = Supply(upstream, self._store, self._statistics)
        self._waiting = Waiting(upstream, self._complete)
        self._live: dict[int, HostBlock] = {}
        self._kept: list[HostBlock] = []  # freed, but a graph may use them whenever it runs
        self._captures = 0  # under way
        self._most_cached = UNLIMITED
        self._catches_all = False
        self._late: deque[tuple[HostBlock, Trail | None]] = deque()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._guard.enter()
        try:
            self._take_late()
            yield
        finally:
            self._guard.leave()
            self._drain()

    def _give_up(self, block: HostBlock, stack: Trail | None) -> None:
        block.allocated = False
        self._record(FREE_REQUESTED, block, stack)
        if block.streams and block.captured:
            self._kept.append(block)
        elif block.streams:
            self._waiting.postpone(block, capturing=bool(self._captures))
        else:
            self._complete(block)

    def _complete(self, block: HostBlock) -> None:
        """Take a block back that nobody uses."""
        self._record(FREE_COMPLETED, block, None)
        self._statistics.unused(bucket_of(block.size), block.size)
        block.stack = None
        hole = self._store.put(block)
        if hole.size > self._most_cached and hole.whole:
            with suppress(CudaError):  # it stays cached, and empty_cache tries again
                self._supply.give_back(hole, self._recorder if self._records else None)

    def _record(self, action: str, block: HostBlock, stack: Trail | None) -> None:
        if self._records:
            self._recorder.record(action, block.ptr, block.requested, 0, stack or block.stack)

    def _take_late(self) -> None:
        while self._late:
            block, stack = self._late.popleft()
            with suppress(CudaError):  # of streams that use it: it waits, and they are tried again
                self._give_up(block, stack)

    def _drain(self) -> None:
        """Free what came late, unless somebody is inside, who does it when he leaves."""
        while self._late and self._guard.try_enter():
            try:
                self._take_late()
            finally:
                self._guard.leave()
