"""Pools: the free blocks of one owner, small and large, by stream (PyTorch's BlockPool, PrivatePool).

A search takes the smallest block that is large enough, and of equal ones that at the lowest address; only on
the stream of the request (PyTorch's BlockComparatorSize).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cudakit.core.allocator.blocks import Block, FreeBlocks, RawStack
from cudakit.core.allocator.pool_stats import BlockCounters, PoolId, PoolStats, Stat

DEFAULT_POOL: PoolId = (0, 0)


class SegmentSource(Protocol):
    """Where the segments of one pool come from. Every failure is a CudaError; out of memory has code 2."""

    def malloc(self, size_bytes: int, stream: int) -> int: ...
    def free(self, ptr: int) -> None: ...


class BlockTypes(NamedTuple):
    """The types of one allocator that are either plain Python or native."""

    free_blocks: type[FreeBlocks]  # it makes the blocks
    counters: type[BlockCounters]


PLAIN_TYPES = BlockTypes(FreeBlocks, BlockCounters)


class BlockPool:
    """The small or the large free blocks of one owner.

    ``searches`` are counted while the garbage collection needs the age of blocks. ``reserved`` are the
    statistics of a private pool's bytes, beside ``stats``.
    """

    __slots__ = ("_type", "by_stream", "id", "no_split", "reserved", "searches", "small", "stats")

    def __init__(
        self,
        owner: PoolId,
        stats: PoolStats,
        *,
        small: bool,
        free_blocks: type[FreeBlocks] = FreeBlocks,
    ) -> None:
        self._type = free_blocks
        self.id = owner
        self.small = small
        self.no_split = False
        self.stats = stats
        self.reserved: tuple[Stat, ...] = ()
        self.by_stream: dict[int, FreeBlocks] = {}
        self.searches = 0

    def free_blocks(self, stream: int) -> FreeBlocks:
        """Return the free blocks of a stream."""
        found = self.by_stream.get(stream)
        if found is None:
            found = self.by_stream[stream] = self._type(self, stream, self.stats.blocks)
        return found

    def age(self, block: Block) -> int:
        """Return the number of searches since a block became free."""
        return self.searches - block.gc_count_base

    def __iter__(self) -> Iterator[Block]:
        """Iterate over the free blocks by stream, size and address."""
        for stream in sorted(self.by_stream):
            yield from self.by_stream[stream]


class Pools:
    """The small and the large pool of one owner: the default pool, or a private one.

    ``source`` provides segments; None: the device does.
    """

    __slots__ = ("id", "large", "small", "source")

    def __init__(
        self, owner: PoolId, small: PoolStats, large: PoolStats, free_blocks: type[FreeBlocks]
    ) -> None:
        self.id = owner
        self.small = BlockPool(owner, small, small=True, free_blocks=free_blocks)
        self.large = BlockPool(owner, large, small=False, free_blocks=free_blocks)
        self.source: SegmentSource | None = None

    def __iter__(self) -> Iterator[BlockPool]:
        """Iterate over both in the order in which cached memory is released."""
        yield self.large
        yield self.small


@dataclass(frozen=True, slots=True)
class Request:
    """A request that no free block served."""

    size: int  # of the block
    requested: int
    segment_bytes: int
    stream: int
    pool: BlockPool
    stack: RawStack | None
