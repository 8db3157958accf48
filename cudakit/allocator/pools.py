"""Private pools: pools of graphs and of users, the routing of requests to pools, and objects that hold pools.

The id of a pool is (number, 0) for the pool of a graph, and (0, number) for the pool of a user. Graphs,
MemPools and routes are holders of a pool. The memory of a pool without holders can be released, and the pool
is dropped with its last segment.

Routing to a pool and capturing a stream are independent, as in PyTorch 2.15; in 2.11 routing implies a
capture. Only a capture forbids querying events and releasing memory (PyTorch issue 159674).

Source: c10/cuda/CUDACachingAllocator.cpp (beginAllocateToPool, endAllocateToPool, releasePool,
get_pool, create_or_incref_pool, MemPool) and torch/cuda/memory.py (MemPool).
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from cudakit.allocator.blocks import BlockPool, FreeBlocks, Pools, SegmentSource
from cudakit.allocator.stats import DeviceStats
from cudakit.allocator.streams import StreamFilter
from cudakit.errors import UsageError
from cudakit.torch_rules.oom import DEFAULT_POOL, PoolId


class PoolError(UsageError):
    """A private pool is used, closed or released at the wrong time."""


class PrivatePool(Pools):
    """The small and the large pool of one id, and the number of its holders, ``holder_count``.

    With ``use_on_oom``, requests for the default pool may use the pool's free blocks before they fail.
    """

    use_on_oom = False
    holder_count = 1

    def __iter__(self) -> Iterator[BlockPool]:
        """Iterate over both pools in the order of release, which differs from that of the default pool."""
        yield self.small
        yield self.large


@dataclass(frozen=True, slots=True)
class Route:
    """A rule that routes requests to a pool, and the thread that created it."""

    pool: PrivatePool
    matches: StreamFilter
    thread_id: int = field(default_factory=threading.get_ident)


class PrivatePools:
    """The private pools of one device. The caller holds the allocator's guard."""

    def __init__(self, stats: DeviceStats, free_blocks_type: type[FreeBlocks]) -> None:
        self._stats = stats
        self._free_blocks_type = free_blocks_type
        self._pools: dict[PoolId, PrivatePool] = {}
        # The last number issued as a pool id: to a pool of a graph (True), or of a user (False).
        self._last_issued_numbers = {True: 0, False: 0}
        self.routes: list[Route] = []  # The oldest route is first.
        # Pools whose holder was garbage-collected, and whether to release their cached memory.
        self.abandoned_pools: deque[tuple[PoolId, bool]] = deque()

    def __iter__(self) -> Iterator[PrivatePool]:
        """Iterate over the pools, oldest first; pools may be dropped meanwhile."""
        return iter(list(self._pools.values()))

    def issue_id(self, *, for_graph: bool) -> PoolId:
        self._last_issued_numbers[for_graph] += 1
        pool_number = self._last_issued_numbers[for_graph]
        return (pool_number, 0) if for_graph else (0, pool_number)

    def find_pool(self, pool_id: PoolId) -> PrivatePool:
        """Return the pool with an id. Raises PoolError if the pool does not exist."""
        self.check_issued(pool_id)
        pool = self._pools.get(pool_id)
        if pool is None:
            raise PoolError(
                f"private pool {pool_id} has no memory", hint="it was not begun, or was dropped"
            )
        return pool

    def exists(self, pool_id: PoolId) -> bool:
        """Return whether a pool exists. Raises PoolError for an id that was never issued."""
        self.check_issued(pool_id)
        return pool_id in self._pools

    def is_routed(self, pool_id: PoolId) -> bool:
        """Return whether requests of any thread go to a pool."""
        return any(route.pool.id == pool_id for route in self.routes)

    def find_held_pool(self, pool_id: PoolId) -> PrivatePool:
        """Return the pool with an id. Raises PoolError if the pool has no holder."""
        pool = self.find_pool(pool_id)
        if not pool.holder_count:
            raise PoolError(
                f"private pool {pool_id} has no holder any more",
                hint="create a new pool, or keep the GraphMemory or MemPool that holds this one",
            )
        return pool

    def create_pool(
        self,
        pool_id: PoolId,
        *,
        source: SegmentSource | None = None,
        use_on_oom: bool = False,
        no_split: bool = False,
    ) -> PrivatePool:
        """Create the pool of an id, with one holder. Raises PoolError for an id that was never issued."""
        self.check_issued(pool_id)
        pool = PrivatePool(pool_id, self._stats, self._free_blocks_type)
        pool.source = source
        pool.use_on_oom = use_on_oom
        for block_pool in pool:
            block_pool.no_split = no_split
            block_pool.reserved_stats = self._stats.reserved_stats_of(
                pool_id, is_small=block_pool.is_small
            )
        self._pools[pool_id] = pool
        return pool

    def add_holder(self, pool_id: PoolId) -> PrivatePool:
        """Add a holder to a pool, or create the pool. Raises PoolError if an existing pool has no holder."""
        if pool_id not in self._pools:
            return self.create_pool(pool_id)
        pool = self.find_held_pool(pool_id)
        pool.holder_count += 1
        return pool

    def release_holder(self, pool_id: PoolId, *, must_be_unrouted: bool = False) -> None:
        """Remove a holder of a pool.

        Raises PoolError if the pool has no holder, or if this is its only holder and requests are still
        routed to the pool. With ``must_be_unrouted``, raises PoolError whenever requests are routed to the
        pool.
        """
        pool = self.find_held_pool(pool_id)
        if (must_be_unrouted or pool.holder_count == 1) and self.is_routed(pool_id):
            raise PoolError(
                f"requests are still routed to private pool {pool_id}",
                hint="first leave its use_pool or capture context",
            )
        pool.holder_count -= 1

    def drop_pool(self, pool: PrivatePool) -> None:
        del self._pools[pool.id]

    def begin_route(self, pool_id: PoolId, matches: StreamFilter) -> None:
        """Route requests to a pool from now on, and hold the pool.

        If several pools accept a request, the pool whose routing began last serves it. Raises PoolError if
        requests are routed to the pool already.
        """
        if self.is_routed(pool_id):
            raise PoolError(
                f"private pool {pool_id} already serves a use_pool() or a capture",
                hint="a pool serves one at a time: end the first one, or use another pool",
            )
        self.routes.append(Route(self.add_holder(pool_id), matches))

    def end_route(self, pool_id: PoolId) -> None:
        """Stop routing requests to a pool, which stays held. Raises PoolError if no route leads to it."""
        for route in self.routes:
            if route.pool.id == pool_id:
                self.routes.remove(route)
                return
        raise PoolError(
            f"no requests are routed to private pool {pool_id}", hint="it was not begun"
        )

    def pool_for_request(self, stream: int) -> PrivatePool | None:
        """Return the pool for a request of this thread on a stream; None for the default pool."""
        for route in reversed(self.routes):
            if route.matches(stream):
                return route.pool
        return None

    # Methods for pinned memory, whose allocator has another guard.

    def pool_id_of_request(self, stream: int | None) -> PoolId:
        """Return the pool of this thread's request for pinned memory: the same as for device memory.

        Without a stream, return the pool whose routing this thread began last.
        """
        caller_thread_id = threading.get_ident()
        for route in reversed(list(self.routes)):
            if route.thread_id == caller_thread_id if stream is None else route.matches(stream):
                return route.pool.id
        return DEFAULT_POOL

    def is_held(self, pool_id: PoolId) -> bool:
        """Return whether a pool has a holder; True for the default pool."""
        pool = self._pools.get(pool_id)
        return pool_id == DEFAULT_POOL or (pool is not None and pool.holder_count > 0)

    def segment_source(self, pool_id: PoolId) -> SegmentSource | None:
        """Return the source of the segments of a pool; None means the device."""
        pool = self._pools.get(pool_id)
        return None if pool is None else pool.source

    def lending_pools(self) -> Iterator[PrivatePool]:
        """Iterate over the pools that lend free blocks to the default pool before a request fails."""
        return (pool for pool in self if pool.use_on_oom and pool.holder_count)

    def check_issued(self, pool_id: PoolId) -> None:
        """Raise PoolError for an id that was never issued."""
        match pool_id:
            case (int(number), 0) if 0 < number <= self._last_issued_numbers[True]:
                return
            case (0, int(number)) if 0 < number <= self._last_issued_numbers[False]:
                return
        raise PoolError(
            f"{pool_id!r} is not the id of a private pool", hint="graph_pool_handle() returns ids"
        )


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """The use and the memory of a private pool."""

    id: PoolId
    uses: int  # Number of holders; if it is 0, the cached memory can be released.
    segments: int  # Number of segments.
    reserved_bytes: int
    allocated_bytes: int


class HeldPool:
    """A holder of a private pool, until ``close``, the end of a with block, or garbage collection.

    ``allocator`` is the allocator of the pool (memory.DeviceMemory, which uses this module).
    """

    _releases_cache = False  # Whether the cached memory is released when the pool is closed.

    def __init__(self, allocator: Any, pool_id: PoolId) -> None:
        self.id = pool_id
        self._allocator = allocator
        self._finalizer = weakref.finalize(
            self, allocator.abandon_pool, pool_id, self._releases_cache
        )
        self._finalizer.atexit = False  # The device may be closed already at exit.

    @property
    def uses(self) -> int:
        """The number of holders of the pool, this object included."""
        uses: int = self._allocator.pool_uses(self.id)
        return uses

    @property
    def closed(self) -> bool:
        """Whether this object does not hold the pool any more."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Stop holding the pool. Live allocations stay, and closing twice does nothing.

        Raises PoolError while requests are routed to the pool, CudaError if the driver refuses.
        """
        if self._finalizer.alive:
            self._allocator.release_pool(self.id, must_be_unrouted=self._releases_cache)
            self._finalizer.detach()
            if self._releases_cache:
                self._allocator.empty_pool(self.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pool_id_of(pool: HeldPool | PoolId) -> PoolId:
    """Return the id of a pool."""
    return pool.id if isinstance(pool, HeldPool) else pool


def id_of_open_pool(pool: HeldPool | PoolId) -> PoolId:
    """Return the id of a pool. Raises PoolError if the pool is closed."""
    if isinstance(pool, HeldPool) and pool.closed:
        raise PoolError(f"private pool {pool.id} is closed", hint="create a new one")
    return pool_id_of(pool)


class GraphMemory(HeldPool):
    """The holder of a captured graph's pool. Close it when the graph will not run any more.

    ``empty_cache`` then releases the cached memory of the pool, as after the deletion of a
    torch.cuda.CUDAGraph.
    """


class MemPool(HeldPool):
    """A private pool for the allocations within ``allocator.use_pool(pool)``.

    ``upstream`` allocates and frees the segments of the pool, and is kept alive until the last segment is
    freed. Its methods are called while the allocator is locked, and must not call the allocator. With
    ``use_on_oom``, the pool lends cached blocks to the default pool before a request fails. With
    ``no_split``, each block is a whole segment. When the pool is closed or garbage-collected, its cached
    memory is released.
    """

    _releases_cache = True

    def __init__(
        self,
        allocator: Any,
        *,
        upstream: SegmentSource | None = None,
        use_on_oom: bool = False,
        no_split: bool = False,
    ) -> None:
        pool_id = allocator.create_pool(source=upstream, use_on_oom=use_on_oom, splits=not no_split)
        super().__init__(allocator, pool_id)

    def snapshot(self) -> list[dict[str, Any]]:
        """Return the pool's segments, in PyTorch's format."""
        segments = self._allocator.snapshot()["segments"]
        return [segment for segment in segments if segment["segment_pool_id"] == self.id]
