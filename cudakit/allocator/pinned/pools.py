"""Pools of pinned memory: the choice of a block for a request, and the private pools of graphs.

PyTorch has bins of free blocks by power of two, and never splits a block (``Pow2Bins``). The alternative is
the best fit of device memory with splits and merges (``FreeBlocks``), which wastes no memory by rounding. A
private pool has the id of a private pool of the device, and the same holders: memory that is allocated while
a graph is captured belongs to the graph, because the graph reads it whenever it runs. Source: PyTorch's
aten/src/ATen/core/CachingHostAllocator.h (get_free_block, HostPrivatePool, begin_allocate_to_pool,
release_pool).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Protocol

from cudakit.allocator.blocks import Block, BlockPool, FreeBlocks
from cudakit.allocator.pool_stats import BlockCounters, Peaks, PoolStats
from cudakit.allocator.streams import PendingFrees
from cudakit.torch_rules.oom_facts import DEFAULT_POOL, PoolId
from cudakit.torch_rules.settings import Settings
from cudakit.torch_rules.sizes import (
    MAX_SMALL_BYTES,
    SEGMENT_STEP,
    SMALL_SEGMENT,
    UNLIMITED,
    rounded,
)

# Sizes that are not rounded to a power of two are multiples of this size (CachingHostAllocator.cpp of PyTorch
# 2.13, kHostAlignment).
ALIGNMENT = 512
# Host memory has no stream order; all free blocks of a pool are in one list.
NO_STREAM = 0


def bin_of(size: int) -> int:
    """Return the exponent of the smallest power of two that is not below a size."""
    return (size - 1).bit_length()


class Pow2Bins(FreeBlocks):
    """Free blocks in bins by power of two. In a bin, the block that was freed last is used first."""

    __slots__ = ("_bins",)

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool, NO_STREAM)
        self._bins: defaultdict[int, list[Block]] = defaultdict(list)

    def __bool__(self) -> bool:
        return any(self._bins.values())

    def __iter__(self) -> Iterator[Block]:
        for bin_index in sorted(self._bins):
            yield from self._bins[bin_index]

    def add(self, block: Block) -> None:
        """Insert a block, which becomes free."""
        block.is_free = True
        self._bins[bin_of(block.size)].append(block)

    def remove(self, block: Block) -> None:
        """Remove a free block."""
        block.is_free = False
        self._bins[bin_of(block.size)].remove(block)

    def take(self, size: int, size_limit: int) -> Block | None:  # noqa: ARG002
        """Remove and return the block of the bin that was freed last and is large enough, or None.

        Blocks that are not rounded differ in size (PyTorch's pull request 192722).
        """
        blocks = self._bins[bin_of(size)]
        for index in range(len(blocks) - 1, -1, -1):
            if blocks[index].size >= size:
                block = blocks.pop(index)
                block.is_free = False
                return block
        return None


class Pow2Sizes:
    """The block sizes of PyTorch's pinned memory: powers of two.

    Sizes above ``pinned_max_round_threshold_mb`` or ``pinned_max_cached_size_mb`` are multiples of 512
    bytes instead (PyTorch: CachingHostAllocatorImpl::allocate).
    """

    def __init__(self) -> None:
        self._max_rounded_bytes = UNLIMITED

    def configure(self, settings: Settings) -> None:
        limits = settings.pinned_max_round_threshold_bytes, settings.pinned_max_cached_size_bytes
        self._max_rounded_bytes = min(
            (limit for limit in limits if limit is not None), default=UNLIMITED
        )

    def round_size(self, size_bytes: int) -> int:
        if size_bytes > self._max_rounded_bytes:
            return -(-size_bytes // ALIGNMENT) * ALIGNMENT
        return 1 << bin_of(size_bytes)

    def segment_bytes(self, size: int) -> int:
        return size


class BestFitSizes:
    """The block sizes of device memory. The settings for rounding to a power of two have no effect.

    Requests of at most 1 MiB are served from separate segments, so that no small block keeps a large segment
    in use (PyTorch's issue 95823: a block of 10 KiB in a segment of 4 GiB).
    """

    def configure(self, settings: Settings) -> None:
        pass

    def round_size(self, size_bytes: int) -> int:
        return rounded(size_bytes)

    def segment_bytes(self, size: int) -> int:
        if size <= MAX_SMALL_BYTES:
            return SMALL_SEGMENT
        return -(-size // SEGMENT_STEP) * SEGMENT_STEP


class Reserve:
    """Memory that is taken from the driver in advance and released at the end. Blocks are carved from it."""

    def __init__(self, ptr: int, size: int) -> None:
        self.ptr = ptr
        self.size = size
        self._carved_bytes = 0

    def contains(self, block: Block) -> bool:
        """Return whether a block is a part of the reserve."""
        return self.ptr <= block.ptr < self.ptr + self.size

    def carve(self, size: int) -> int | None:
        """Return the address of unused memory in the reserve; None if too little is left."""
        begin_offset = self._carved_bytes
        if begin_offset + size > self.size:
            return None
        self._carved_bytes = begin_offset + -(-size // ALIGNMENT) * ALIGNMENT
        return self.ptr + begin_offset


class Holders(Protocol):
    """The methods of the device's private pools that the allocator of pinned memory calls."""

    def pool_id_of_request(self, stream: int | None) -> PoolId:
        """Return the pool id of this thread's request; ``stream`` is None if the request has no stream."""
        ...

    def is_held(self, pool_id: PoolId) -> bool: ...


class NoHolders:
    """Replaces Holders for an allocator without private pools."""

    def pool_id_of_request(self, stream: int | None) -> PoolId:  # noqa: ARG002
        return DEFAULT_POOL

    def is_held(self, pool_id: PoolId) -> bool:
        return pool_id == DEFAULT_POOL


class HostPool:
    """The blocks with one pool id that are not allocated.

    The blocks in ``kept_for_graphs`` were freed, but a graph may use them whenever it runs.
    """

    __slots__ = ("_stats", "id", "kept_for_graphs", "large", "pending_frees", "reserve", "small")

    def __init__(self, pool_id: PoolId, pending_frees: PendingFrees, *, splits: bool) -> None:
        self.id = pool_id
        self.pending_frees = pending_frees
        self.kept_for_graphs: list[Block] = []
        # Statistics that the engine needs; users see the statistics of HostStats instead.
        self._stats = stats = PoolStats(BlockCounters(), Peaks(BlockCounters()))
        self.large = self.small = self.reserve = BlockPool(pool_id, stats, is_small=False)
        if splits:
            self.small = BlockPool(pool_id, stats, is_small=True)
            self.reserve = BlockPool(
                pool_id, stats, is_small=True
            )  # The reserve serves all sizes, and its blocks are always split.
        else:
            self.large.no_split = True
            self.large.by_stream[NO_STREAM] = Pow2Bins(self.large)

    @property
    def is_private(self) -> bool:
        """Whether the pool is a private pool."""
        return self.id != DEFAULT_POOL

    @property
    def is_in_use(self) -> bool:
        """Whether a block is allocated, pending, or kept for graphs."""
        return self._stats.active > 0

    def pool_for_size(self, size: int) -> BlockPool:
        """Return the pool whose segments serve a size."""
        return self.small if size <= MAX_SMALL_BYTES else self.large

    def free_blocks(self) -> Iterator[Block]:
        """Iterate over the free blocks."""
        for pool in dict.fromkeys((self.small, self.large, self.reserve)):
            yield from pool

    def __iter__(self) -> Iterator[Block]:
        """Iterate over all blocks; a block that waits for several streams is repeated."""
        yield from self.kept_for_graphs
        yield from self.free_blocks()
        yield from (block for _, block in self.pending_frees.awaited_streams())


class HostPools:
    """The default pool, and private pools created by their first request. The caller holds the guard."""

    def __init__(self, make_pool: Callable[[PoolId], HostPool], holders: Holders) -> None:
        self._make_pool = make_pool
        self._holders = holders
        self.default_pool = make_pool(DEFAULT_POOL)
        self._pools = {DEFAULT_POOL: self.default_pool}

    def __iter__(self) -> Iterator[HostPool]:
        """Iterate over all pools, the default pool first; private pools may be dropped meanwhile."""
        return iter(list(self._pools.values()))

    def pool_of_block(self, block: Block) -> HostPool:
        """Return the pool of a block."""
        return self._pools[block.pool.id]

    def pool_of_request(self, stream: int | None) -> HostPool:
        """Return the pool of a request of this thread."""
        pool_id = self._holders.pool_id_of_request(stream)
        if pool_id not in self._pools:
            self._pools[pool_id] = self._make_pool(pool_id)
        return self._pools[pool_id]

    def is_held(self, pool: HostPool) -> bool:
        """Return whether a pool has holders: it may get requests, or a graph may use its memory."""
        return self._holders.is_held(pool.id)

    def pools_without_holders(self) -> list[HostPool]:
        """List the private pools without holders."""
        return [pool for pool in self if pool.is_private and not self.is_held(pool)]

    def drop_pool(self, pool: HostPool) -> None:
        """Drop a private pool without blocks."""
        del self._pools[pool.id]
