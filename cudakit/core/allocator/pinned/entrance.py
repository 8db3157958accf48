"""The way in: one thread at a time, and what is freed while somebody is inside is freed a moment later."""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress

from cudakit.core.allocator.blocks import RawStack
from cudakit.core.allocator.guard import Guard
from cudakit.core.allocator.history import FREE_COMPLETED, FREE_REQUESTED, History, Level
from cudakit.core.allocator.pinned.blocks import HostBlock
from cudakit.core.allocator.pinned.buckets import Buckets, bucket_of
from cudakit.core.allocator.pinned.holes import Holes
from cudakit.core.allocator.pinned.pools import Holders, HostPool, HostPools
from cudakit.core.allocator.pinned.statistics import HostStatistics
from cudakit.core.allocator.pinned.supply import Supply
from cudakit.core.allocator.pinned.upstream import HostUpstream
from cudakit.core.allocator.pinned.waiting import Waiting
from cudakit.core.allocator.pool_stats import PoolId
from cudakit.errors import CudaError
from cudakit.gpu.api import Event
from cudakit.torch_rules.settings import Settings
from cudakit.torch_rules.sizes import UNLIMITED


class HostEntrance:
    """What a pool of pinned memory consists of, and who may touch it."""

    def __init__(self, upstream: HostUpstream, holders: Holders, *, splits: bool) -> None:
        self._upstream = upstream
        self._splits = splits
        self._idle: list[Event] = []
        self.settings = Settings()
        self._guard: Guard[tuple[HostBlock, RawStack | None]] = Guard(
            lambda late: self._give_up(*late)
        )
        self._recorder = History()
        self._level = Level.NONE
        self._records = False
        self._statistics = HostStatistics()
        self._pools = HostPools(self._make_pool, holders)
        self._default = self._pools.default
        self._supply = Supply(upstream, self._default, self._statistics)
        self._live: dict[int, HostBlock] = {}
        self._captures = 0  # under way
        self._most_cached = UNLIMITED
        self._catches_all = False

    def _make_pool(self, pool_id: PoolId) -> HostPool:
        store = Holes() if self._splits else Buckets()
        store.configure(self.settings)
        return HostPool(pool_id, store, Waiting(self._upstream, self._complete, self._idle))

    def _pool(self, block: HostBlock) -> HostPool:
        """Return the pool that a block was handed out from."""
        return block.pool or self._default

    def _inside(self) -> AbstractContextManager[None]:
        return self._guard.inside()

    def _give_up(self, block: HostBlock, stack: RawStack | None) -> None:
        block.allocated = False
        self._record(FREE_REQUESTED, block, stack)
        pool = self._pool(block)
        if block.streams and block.captured and self._pools.is_held(pool):
            pool.kept.append(block)
        elif block.streams:
            pool.waiting.postpone(block, capturing=bool(self._captures))
        else:
            self._complete(block)

    def _complete(self, block: HostBlock) -> None:
        """Take a block back that nobody uses."""
        self._record(FREE_COMPLETED, block, None)
        self._statistics.unused(bucket_of(block.size), block.size)
        block.stack = None
        pool = self._pool(block)
        hole = pool.store.put(block)
        if hole.size > self._most_cached and hole.whole and not pool.private:
            with suppress(CudaError):  # it stays cached, and empty_cache tries again
                self._supply.give_back(hole, pool, self._recorder if self._records else None)

    def _record(self, action: str, block: HostBlock, stack: RawStack | None) -> None:
        if self._records:
            seen, pool = stack or block.stack, self._pool(block).id
            self._recorder.record(action, block.ptr, block.requested, 0, seen, pool)
