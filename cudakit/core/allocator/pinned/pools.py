"""Which blocks belong together: those of the default pool, and those of each private one.

A private pool of pinned memory goes by the id of the device's pool, and is held as that is: what is allocated
while a graph is captured is that graph's, so that nobody else writes to what it reads whenever it runs.
Source: PyTorch's aten/src/ATen/core/CachingHostAllocator.h (HostPrivatePool, begin_allocate_to_pool,
release_pool).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from cudakit.core.allocator.pinned.blocks import HostBlock
from cudakit.core.allocator.pinned.stores import Store
from cudakit.core.allocator.pinned.waiting import Waiting
from cudakit.core.allocator.pool_stats import PoolId
from cudakit.core.allocator.pools import DEFAULT_POOL


class Holders(Protocol):
    """Who has private pools: those of the device's allocator."""

    def pool_of(self, stream: int | None) -> PoolId:
        """Return where a request of this thread goes, on a stream or on none that is named."""
        ...

    def is_held(self, pool_id: PoolId) -> bool: ...


class NoHolders:
    """Nobody has private pools."""

    def pool_of(self, stream: int | None) -> PoolId:  # noqa: ARG002
        return DEFAULT_POOL

    def is_held(self, pool_id: PoolId) -> bool:
        return pool_id == DEFAULT_POOL


class HostPool:
    """The blocks of one owner that are not handed out.

    ``kept`` were freed, but a graph may use them whenever it runs.
    """

    __slots__ = ("id", "kept", "store", "waiting")

    def __init__(self, owner: PoolId, store: Store, waiting: Waiting) -> None:
        self.id = owner
        self.store = store
        self.waiting = waiting
        self.kept: list[HostBlock] = []

    @property
    def private(self) -> bool:
        """Whether it is not the default one."""
        return self.id != DEFAULT_POOL

    def __iter__(self) -> Iterator[HostBlock]:
        """Go through all blocks; one that waits for several streams comes more than once."""
        yield from self.kept
        yield from self.store
        yield from (block for _, block in self.waiting)


class HostPools:
    """The default pool, and the private ones from their first request on. The caller holds the guard."""

    def __init__(self, make: Callable[[PoolId], HostPool], holders: Holders) -> None:
        self._make = make
        self._holders = holders
        self.default = make(DEFAULT_POOL)
        self._private: dict[PoolId, HostPool] = {}

    def __iter__(self) -> Iterator[HostPool]:
        """Go through all pools, the default one first; private ones may be forgotten meanwhile."""
        yield self.default
        yield from list(self._private.values())

    def of_request(self, stream: int | None) -> HostPool:
        """Return the pool of a request of this thread."""
        pool_id = self._holders.pool_of(stream)
        if pool_id == DEFAULT_POOL:
            return self.default
        if pool_id not in self._private:
            self._private[pool_id] = self._make(pool_id)
        return self._private[pool_id]

    def is_held(self, pool: HostPool) -> bool:
        """Say whether a pool may still have requests, or a graph that uses it."""
        return self._holders.is_held(pool.id)

    def left(self) -> list[HostPool]:
        """List the private pools that nobody holds any more."""
        return [pool for pool in self._private.values() if not self.is_held(pool)]

    def forget(self, pool: HostPool) -> None:
        """Drop a private pool that has no blocks."""
        del self._private[pool.id]
