"""Pools of pinned memory: which blocks serve a request, and the private pools of graphs.

PyTorch keeps free blocks in bins of powers of two, and never splits one (``Pow2Bins``). The alternative is
the best fit of device memory, with splits and merges, so that no memory is wasted by rounding: the
engine's own FreeBlocks. A private pool has the id of the device's pool and is held with it: memory allocated
while a graph is captured belongs to the graph, since it is read whenever the graph runs. Source: PyTorch's
aten/src/ATen/core/CachingHostAllocator.h (get_free_block, HostPrivatePool, begin_allocate_to_pool,
release_pool).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Protocol

from cudakit.core.allocator.blocks import Block, BlockPool, FreeBlocks
from cudakit.core.allocator.pool_stats import BlockCounters, Peaks, PoolStats
from cudakit.core.allocator.streams import PendingFrees
from cudakit.torch_rules.oom_facts import DEFAULT_POOL, PoolId
from cudakit.torch_rules.settings import Settings
from cudakit.torch_rules.sizes import (
    MAX_SMALL_BYTES,
    SEGMENT_STEP,
    SMALL_SEGMENT,
    UNLIMITED,
    rounded,
)

# Of sizes that are not rounded to a power of two (CachingHostAllocator.cpp of PyTorch 2.13, kHostAlignment).
ALIGNMENT = 512
# Host memory has no stream order; all free blocks of a pool are in one list.
NO_STREAM = 0


def bin_of(size: int) -> int:
    """Return the exponent of the smallest power of two that is not below a size."""
    return (size - 1).bit_length()


class Pow2Bins(FreeBlocks):
    """Free blocks by power of two, the one freed last first."""

    __slots__ = ("_bins",)

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool, NO_STREAM)
        self._bins: defaultdict[int, list[Block]] = defaultdict(list)

    def __bool__(self) -> bool:
        return any(self._bins.values())

    def __iter__(self) -> Iterator[Block]:
        for number in sorted(self._bins):
            yield from self._bins[number]

    def add(self, block: Block) -> None:
        """Insert a block, which becomes free."""
        block.free = True
        self._bins[bin_of(block.size)].append(block)

    def remove(self, block: Block) -> None:
        """Remove a free block."""
        block.free = False
        self._bins[bin_of(block.size)].remove(block)

    def take(self, size: int, limit: int) -> Block | None:  # noqa: ARG002
        """Remove and return the block freed last among those of the same bin that are large enough.

        Blocks that are not rounded differ in size (PyTorch's pull request 192722).
        """
        blocks = self._bins[bin_of(size)]
        for index in range(len(blocks) - 1, -1, -1):
            if blocks[index].size >= size:
                block = blocks.pop(index)
                block.free = False
                return block
        return None


class Pow2Sizes:
    """The sizes of PyTorch's pinned memory: a power of two.

    Sizes above ``pinned_max_round_threshold_mb`` or ``pinned_max_cached_size_mb`` are multiples of 512 bytes
    instead (allocate).
    """

    def __init__(self) -> None:
        self._most_rounded = UNLIMITED

    def configure(self, settings: Settings) -> None:
        limits = settings.pinned_max_round_threshold_bytes, settings.pinned_max_cached_size_bytes
        self._most_rounded = min((n for n in limits if n is not None), default=UNLIMITED)

    def rounded(self, size_bytes: int) -> int:
        if size_bytes > self._most_rounded:
            return -(-size_bytes // ALIGNMENT) * ALIGNMENT
        return 1 << bin_of(size_bytes)

    def segment_bytes(self, size: int) -> int:
        return size


class BestFitSizes:
    """The sizes of device memory. The thresholds of rounding do not apply.

    Requests of at most 1 MiB have segments of their own, so that none keeps a large segment from being reused
    (PyTorch's issue 95823: 10 KiB that keep 4 GiB).
    """

    def configure(self, settings: Settings) -> None:
        pass

    def rounded(self, size_bytes: int) -> int:
        return rounded(size_bytes)

    def segment_bytes(self, size: int) -> int:
        if size <= MAX_SMALL_BYTES:
            return SMALL_SEGMENT
        return -(-size // SEGMENT_STEP) * SEGMENT_STEP


class Reserve:
    """Memory taken in advance and released at the end, from which blocks are carved."""

    def __init__(self, ptr: int, size: int) -> None:
        self.ptr = ptr
        self.size = size
        self._used = 0

    def contains(self, block: Block) -> bool:
        """Return whether a block is a part of the reserve."""
        return self.ptr <= block.ptr < self.ptr + self.size

    def carve(self, size: int) -> int | None:
        """Return the address of memory that was never used; None if too little is left."""
        begin = self._used
        if begin + size > self.size:
            return None
        self._used = begin + -(-size // ALIGNMENT) * ALIGNMENT
        return self.ptr + begin


class Holders(Protocol):
    """The holders of private pools, those of the device's allocator."""

    def pool_of(self, stream: int | None) -> PoolId:
        """Return the pool of a request of this thread, on a stream or without one."""
        ...

    def is_held(self, pool_id: PoolId) -> bool: ...


class NoHolders:
    """Holders for an allocator without private pools."""

    def pool_of(self, stream: int | None) -> PoolId:  # noqa: ARG002
        return DEFAULT_POOL

    def is_held(self, pool_id: PoolId) -> bool:
        return pool_id == DEFAULT_POOL


class HostPool:
    """The blocks of one owner that are not allocated.

    ``kept`` were freed, but a graph may use them whenever it runs.
    """

    __slots__ = ("_stats", "id", "kept", "large", "pending", "reserve", "small")

    def __init__(self, owner: PoolId, pending: PendingFrees, *, splits: bool) -> None:
        self.id = owner
        self.pending = pending
        self.kept: list[Block] = []
        # The statistics that users see are those of HostStats.
        self._stats = stats = PoolStats(BlockCounters(), Peaks(BlockCounters()))
        self.large = self.small = self.reserve = BlockPool(owner, stats, small=False)
        if splits:
            self.small = BlockPool(owner, stats, small=True)
            self.reserve = BlockPool(owner, stats, small=True)  # for all sizes, always split
        else:
            self.large.no_split = True
            self.large.by_stream[NO_STREAM] = Pow2Bins(self.large)

    @property
    def is_private(self) -> bool:
        """Whether it is not the default pool."""
        return self.id != DEFAULT_POOL

    @property
    def in_use(self) -> bool:
        """Whether any block is allocated, pending or kept."""
        return self._stats.active > 0

    def of_size(self, size: int) -> BlockPool:
        """Return the pool whose segments serve a size."""
        return self.small if size <= MAX_SMALL_BYTES else self.large

    def free_blocks(self) -> Iterator[Block]:
        """Iterate over the free blocks."""
        for pool in dict.fromkeys((self.small, self.large, self.reserve)):
            yield from pool

    def __iter__(self) -> Iterator[Block]:
        """Iterate over all blocks; a block that waits for several streams is repeated."""
        yield from self.kept
        yield from self.free_blocks()
        yield from (block for _, block in self.pending.awaited())


class HostPools:
    """The default pool, and private ones from their first request on. The caller holds the guard."""

    def __init__(self, make: Callable[[PoolId], HostPool], holders: Holders) -> None:
        self._make = make
        self._holders = holders
        self.default = make(DEFAULT_POOL)
        self._pools = {DEFAULT_POOL: self.default}

    def __iter__(self) -> Iterator[HostPool]:
        """Iterate over all pools, the default one first; private ones may be dropped meanwhile."""
        return iter(list(self._pools.values()))

    def of_block(self, block: Block) -> HostPool:
        """Return the pool of a block."""
        return self._pools[block.pool.id]

    def of_request(self, stream: int | None) -> HostPool:
        """Return the pool of a request of this thread."""
        pool_id = self._holders.pool_of(stream)
        if pool_id not in self._pools:
            self._pools[pool_id] = self._make(pool_id)
        return self._pools[pool_id]

    def is_held(self, pool: HostPool) -> bool:
        """Return whether a pool may still get requests, or a graph still uses it."""
        return self._holders.is_held(pool.id)

    def unheld(self) -> list[HostPool]:
        """List the private pools without holders."""
        return [pool for pool in self if pool.is_private and not self.is_held(pool)]

    def drop(self, pool: HostPool) -> None:
        """Drop a private pool without blocks."""
        del self._pools[pool.id]
