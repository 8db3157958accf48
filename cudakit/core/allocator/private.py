"""Private pools: memory set apart for graphs and for who asks for it, and which requests go there.

A pool is known by its id: (number, 0) for a graph's, (0, number) for a user's. Graphs, MemPools and routes
hold it; when the last of them has let go, its memory may be given back, and it is gone with its last segment.

Two things that PyTorch 2.11 takes for one are apart here, as in 2.15: that requests are routed to a pool, and
that a stream is captured. Only a capture forbids to ask events and to give memory back (PyTorch issue
159674). Source: c10/cuda/CUDACachingAllocator.cpp (beginAllocateToPool, endAllocateToPool, releasePool,
get_pool, create_or_incref_pool).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from cudakit.core.allocator.pools import DEFAULT_POOL, Pool, PoolId, Pools
from cudakit.core.allocator.statistics import Statistics
from cudakit.core.allocator.tally import Tally
from cudakit.errors import UsageError

# Whether a request on a stream, from the thread that calls, goes to a pool.
Takes: TypeAlias = Callable[[int], bool]


class PoolError(UsageError):
    """A private pool was begun, ended, held or let go of when that could not be."""


class SegmentSource(Protocol):
    """Where the segments of one pool come from. What fails raises a CudaError; no memory: of code 2."""

    def malloc(self, size_bytes: int, stream: int) -> int: ...
    def free(self, ptr: int) -> None: ...


class PrivatePool(Pools):
    """The small and the large pool of one id, and how many hold it.

    ``use_on_oom`` lends its free blocks to requests for the default pool before memory is said to be out.
    """

    __slots__ = ("use_on_oom", "uses")

    def __init__(self, owner: PoolId, small: Tally, large: Tally, *, use_on_oom: bool) -> None:
        super().__init__(owner, small, large)
        self.use_on_oom = use_on_oom
        self.uses = 1

    def __iter__(self) -> Iterator[Pool]:
        """Go through both in the order in which memory is given back, which is not the default pool's."""
        yield self.small
        yield self.large


@dataclass(frozen=True, slots=True)
class Route:
    """Where the requests go that a pool takes, and the thread that began it."""

    pool: PrivatePool
    takes: Takes
    thread: int = field(default_factory=threading.get_ident)


class PrivatePools:
    """The private pools of one device. The caller holds the allocator's guard."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics
        self._pools: dict[PoolId, PrivatePool] = {}
        self._issued = {True: 0, False: 0}  # the last number, of graphs and of users
        self.routes: list[Route] = []  # the last begun is the last
        # Let go of by finalizers, which may come at any time; and whether to give back what they have.
        self.abandoned: deque[tuple[PoolId, bool]] = deque()

    def __iter__(self) -> Iterator[PrivatePool]:
        """Go through the pools, oldest first; they may be forgotten meanwhile."""
        return iter(list(self._pools.values()))

    def issue(self, *, graph: bool) -> PoolId:
        """Return an id that no pool has had."""
        self._issued[graph] += 1
        number = self._issued[graph]
        return (number, 0) if graph else (0, number)

    def find(self, pool_id: PoolId) -> PrivatePool:
        """Return a pool. Raises PoolError where there is none, or none any more."""
        self.check_issued(pool_id)
        pool = self._pools.get(pool_id)
        if pool is None:
            raise PoolError(
                f"private pool {pool_id} has no memory", hint="it was not begun, or it is gone"
            )
        return pool

    def is_known(self, pool_id: PoolId) -> bool:
        """Say whether a pool is there. Raises PoolError for an id that was never issued."""
        self.check_issued(pool_id)
        return pool_id in self._pools

    def is_routed(self, pool_id: PoolId) -> bool:
        """Say whether requests go to a pool, of whatever thread."""
        return any(route.pool.id == pool_id for route in self.routes)

    def live(self, pool_id: PoolId) -> PrivatePool:
        """Return a pool that somebody holds. Raises PoolError."""
        pool = self.find(pool_id)
        if not pool.uses:
            raise PoolError(
                f"nobody holds private pool {pool_id} any more: what it has is given back",
                hint="make a new pool, or keep the graph or MemPool that holds this one",
            )
        return pool

    def create(
        self,
        pool_id: PoolId,
        *,
        source: SegmentSource | None = None,
        use_on_oom: bool = False,
        splits: bool = True,
    ) -> PrivatePool:
        """Make the pool of an id that was issued, held once. Raises PoolError for any other id."""
        self.check_issued(pool_id)
        counted = self._statistics
        pool = PrivatePool(pool_id, counted.small, counted.large, use_on_oom=use_on_oom)
        pool.custom = source
        for kind in pool:
            kind.splits = splits
            kind.reserved = counted.reserved_by(pool_id, small=kind.small)
        self._pools[pool_id] = pool
        return pool

    def hold(self, pool_id: PoolId) -> PrivatePool:
        """Hold a pool once more, or make it. Raises PoolError where all who held it have let go."""
        if pool_id not in self._pools:
            return self.create(pool_id)
        pool = self.live(pool_id)
        pool.uses += 1
        return pool

    def let_go(self, pool_id: PoolId, *, unrouted: bool = False) -> None:
        """Hold a pool no longer.

        Raises PoolError where nobody does, and where requests go there: to be held by nobody then, or
        (``unrouted``) in any case.
        """
        pool = self.live(pool_id)
        if (unrouted or pool.uses == 1) and self.is_routed(pool_id):
            raise PoolError(
                f"requests still go to private pool {pool_id}",
                hint="first leave the use_pool or the capture that is under way",
            )
        pool.uses -= 1

    def forget(self, pool: PrivatePool) -> None:
        """Drop a pool that has no memory any more."""
        del self._pools[pool.id]

    def begin(self, pool_id: PoolId, takes: Takes) -> None:
        """Route requests to a pool from now on, and hold it.

        Of several that take a request the last begun has it. Raises PoolError where requests go there
        already.
        """
        if self.is_routed(pool_id):
            raise PoolError(
                f"requests go to private pool {pool_id} already",
                hint="one capture or use_pool at a time for each pool",
            )
        self.routes.append(Route(self.hold(pool_id), takes))

    def end(self, pool_id: PoolId) -> None:
        """Route requests to a pool no longer; it is still held. Raises PoolError where none go there."""
        for route in self.routes:
            if route.pool.id == pool_id:
                self.routes.remove(route)
                return
        raise PoolError(f"no requests go to private pool {pool_id}", hint="it was not begun")

    def route(self, stream: int) -> PrivatePool | None:
        """Return the pool that a request of this thread on a stream goes to; None for the default one."""
        for route in reversed(self.routes):
            if route.takes(stream):
                return route.pool
        return None

    # Of the pools of pinned memory, which are under another guard.

    def pool_of(self, stream: int | None) -> PoolId:
        """Return where a request of this thread for pinned memory goes: as one for the device's would.

        One that names no stream goes where the thread has begun last.
        """
        own = threading.get_ident()
        for route in reversed(list(self.routes)):
            if route.thread == own if stream is None else route.takes(stream):
                return route.pool.id
        return DEFAULT_POOL

    def is_held(self, pool_id: PoolId) -> bool:
        """Say whether somebody holds a pool; the default one is held for ever."""
        pool = self._pools.get(pool_id)
        return pool_id == DEFAULT_POOL or (pool is not None and pool.uses > 0)

    def source(self, pool_id: PoolId) -> SegmentSource | None:
        """Return where a pool has its segments from; None where from the device."""
        pool = self._pools.get(pool_id)
        return None if pool is None else pool.custom

    def lenders(self) -> Iterator[PrivatePool]:
        """Go through the pools whose free blocks serve others before memory is out."""
        return (pool for pool in self if pool.use_on_oom and pool.uses)

    def check_issued(self, pool_id: PoolId) -> None:
        """Raise PoolError for what is no id, or one that was never issued."""
        match pool_id:
            case (int(number), 0) if 0 < number <= self._issued[True]:
                return
            case (0, int(number)) if 0 < number <= self._issued[False]:
                return
        raise PoolError(
            f"{pool_id!r} is the id of no private pool", hint="graph_pool_handle() issues ids"
        )
