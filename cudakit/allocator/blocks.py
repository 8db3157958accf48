"""Blocks, which are parts of segments; free blocks, sorted by size; and pools of free blocks.

The best fit is the smallest block of the request's stream that is large enough; among blocks of equal size,
it is the block at the lowest address (PyTorch's BlockComparatorSize). The rest of the allocator uses Block
and FreeBlocks only through their public attributes, so that native types with the same attributes can replace
them (native.py).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from types import CodeType
from typing import NamedTuple, Protocol, TypeAlias

from cudakit.allocator.pool_stats import BlockCounters, PoolStats, Stat
from cudakit.gpu.api import Ptr
from cudakit.torch_rules.oom_facts import PoolId

# A call stack: pairs of a code object and the offset of an instruction in it, innermost first.
RawStack: TypeAlias = tuple[CodeType | int, ...]
# A free block with its sort key: size, address, block. Addresses differ, so blocks are never compared.
SortedBlock: TypeAlias = "tuple[int, int, Block]"

# Maximum length of a chunk, which is a sorted list of free blocks. Inserting a block into a longer list would
# take longer than finding the chunk into which the block belongs.
MAX_CHUNK_LENGTH = 1024


class PagedRange(Protocol):
    """The attributes of an expandable segment that are read through its blocks."""

    ptr: int
    page_bytes: int

    def pages_within(self, block: Block) -> tuple[int, int]: ...
    def pages_containing(self, begin: int, end: int) -> tuple[int, int]: ...


class Block:
    """A part of a segment. It is free, allocated, or pending: freed while other streams still use it.

    A block never changes its stream or its pool. When two blocks are merged the lower one stays, so that the
    first block of a segment is always the same object.
    """

    __slots__ = (
        "event_count",
        "expandable_segment",
        "free_blocks",
        "gc_count_base",
        "is_allocated",
        "is_free",
        "is_mapped",
        "next",
        "prev",
        "ptr",
        "requested",
        "segment_stack",
        "size",
        "stack",
        "stream_uses",
    )

    def __init__(
        self,
        ptr: int,
        size: int,
        free_blocks: FreeBlocks,
        expandable_segment: PagedRange | None = None,
    ) -> None:
        self.ptr: Ptr = ptr  # type: ignore[assignment]  # calling Ptr would double the time
        self.size = size
        self.free_blocks = free_blocks  # The list that contains the block while it is free.
        self.expandable_segment = expandable_segment
        self.is_mapped = True  # Whether the addresses of the block have physical memory.
        self.requested = 0  # Bytes of the block's last request, before rounding.
        self.is_free = self.is_allocated = False
        self.prev: Block | None = None  # The block before this one in the segment.
        self.next: Block | None = None
        # Streams that use the block besides its own stream, and on which no event is recorded yet.
        self.stream_uses: dict[int, None] | None = None
        self.event_count = 0  # Number of recorded events that the block waits for.
        self.gc_count_base = 0  # Number of searches of the pool when the block became free.
        self.stack: RawStack | None = None
        self.segment_stack: RawStack | None = None  # Stack of the segment's allocation.

    @property
    def stream(self) -> int:
        """The stream whose requests the block serves."""
        return self.free_blocks.stream

    @property
    def pool(self) -> BlockPool:
        """The pool that the block belongs to."""
        return self.free_blocks.pool

    @property
    def is_split(self) -> bool:
        """Whether the segment contains more blocks than this one."""
        return self.prev is not None or self.next is not None


class FreeBlocks:
    """The free blocks of one pool and stream, sorted by size and address, in chunks of limited length.

    No chunk is empty unless it is the only one. ``only_chunk`` is the only chunk; None if there are several.
    """

    __slots__ = ("chunks", "counters", "only_chunk", "pool", "stats", "stream")

    def __init__(self, pool: BlockPool, stream: int) -> None:
        self.pool = pool
        self.stats = pool.stats
        self.counters = pool.stats.block_counters
        self.stream = stream
        self.only_chunk: list[SortedBlock] | None = []
        self.chunks = [self.only_chunk]

    def __bool__(self) -> bool:
        return bool(self.chunks[0])

    def __iter__(self) -> Iterator[Block]:
        for chunk in self.chunks:
            for sorted_block in chunk:
                yield sorted_block[2]

    def new_block(self, ptr: int, size: int, expandable_segment: PagedRange | None = None) -> Block:
        """Return a new block of this pool and stream, which is not free."""
        return Block(ptr, size, self, expandable_segment)

    def blocks_from_size(self, size: int) -> Iterable[Block]:
        """Return the blocks of at least a size, in sorted order."""
        key = (size,)
        first_index = self._chunk_index(key) if self else 0
        for _, _, block in islice(
            self.chunks[first_index], bisect_left(self.chunks[first_index], key), None
        ):
            yield block
        for chunk in self.chunks[first_index + 1 :]:
            for _, _, block in chunk:
                yield block

    def add(self, block: Block) -> None:
        """Insert a block, which becomes free."""
        block.is_free = True
        block.gc_count_base = self.counters.searches
        sorted_block = block.size, block.ptr, block
        chunk = self.only_chunk
        if chunk is None:
            chunk = self.chunks[self._chunk_index(sorted_block)]
        insort(chunk, sorted_block)
        if len(chunk) > MAX_CHUNK_LENGTH:
            self._split_chunk(chunk)

    def remove(self, block: Block) -> None:
        """Remove a free block."""
        block.is_free = False
        key = block.size, block.ptr
        chunk = self.only_chunk
        if chunk is None:
            chunk = self.chunks[self._chunk_index(key)]
        del chunk[bisect_left(chunk, key)]
        if not chunk:
            self._drop_chunk(chunk)

    def take(self, size: int, size_limit: int) -> Block | None:
        """Remove and return the smallest block of at least ``size`` bytes, if it is below ``size_limit``."""
        key = (size,)
        chunk = self.only_chunk
        if chunk is None:
            chunk = self.chunks[self._chunk_index(key)]
        index = bisect_left(chunk, key)
        if index == len(chunk) or chunk[index][0] >= size_limit:
            return None
        block = chunk.pop(index)[2]
        block.is_free = False
        if not chunk:
            self._drop_chunk(chunk)
        return block

    def _chunk_index(self, key: tuple[int] | tuple[int, int] | SortedBlock) -> int:
        """Return the index of the chunk with the first block not below a key, or of the last chunk."""
        return min(bisect_left(self.chunks, key, key=_last_block), len(self.chunks) - 1)

    def _split_chunk(self, chunk: list[SortedBlock]) -> None:
        middle_index = len(chunk) // 2
        self.chunks.insert(self._chunk_index(chunk[-1]) + 1, chunk[middle_index:])
        del chunk[middle_index:]
        self.only_chunk = None

    def _drop_chunk(self, empty_chunk: list[SortedBlock]) -> None:
        if len(self.chunks) > 1:
            self.chunks.remove(empty_chunk)
        self.only_chunk = self.chunks[0] if len(self.chunks) == 1 else None


def _last_block(chunk: list[SortedBlock]) -> SortedBlock:
    return chunk[-1]


class SegmentSource(Protocol):
    """The source of the segments of one pool. Every failure is a CudaError; out of memory has code 2."""

    def malloc(self, size_bytes: int, stream: int) -> int: ...
    def free(self, ptr: int) -> None: ...


class BlockTypes(NamedTuple):
    """The types of free blocks and counters that an allocator uses: plain Python types, or native ones."""

    free_blocks_type: type[
        FreeBlocks
    ]  # The class of the free lists, which also determines the type of the blocks.
    counters_type: type[BlockCounters]


PLAIN_TYPES = BlockTypes(FreeBlocks, BlockCounters)


class BlockPool:
    """The free blocks of the small or the large pool with one id, by stream.

    ``reserved_stats`` counts the bytes that a private pool reserves; ``stats`` counts the bytes of all pools.
    """

    __slots__ = (
        "_free_blocks_type",
        "by_stream",
        "id",
        "is_small",
        "no_split",
        "reserved_stats",
        "stats",
    )

    def __init__(
        self,
        pool_id: PoolId,
        stats: PoolStats,
        *,
        is_small: bool,
        free_blocks_type: type[FreeBlocks] = FreeBlocks,
    ) -> None:
        self._free_blocks_type = free_blocks_type
        self.id = pool_id
        self.is_small = is_small
        self.no_split = False
        self.stats = stats
        self.reserved_stats: tuple[Stat, ...] = ()
        self.by_stream: dict[int, FreeBlocks] = {}

    def free_blocks(self, stream: int) -> FreeBlocks:
        """Return the free blocks of a stream."""
        free_blocks = self.by_stream.get(stream)
        if free_blocks is None:
            free_blocks = self.by_stream[stream] = self._free_blocks_type(self, stream)
        return free_blocks

    def age(self, block: Block) -> int:
        """Return the number of searches of the pool since a block became free."""
        return self.stats.block_counters.searches - block.gc_count_base

    def __iter__(self) -> Iterator[Block]:
        """Iterate over the free blocks by stream, size and address."""
        for stream in sorted(self.by_stream):
            yield from self.by_stream[stream]


class Pools:
    """The small and the large pool with the same id: the id of the default pool or of a private pool.

    ``source`` provides the segments; None means the device.
    """

    __slots__ = ("id", "large", "small", "source")

    def __init__(
        self,
        pool_id: PoolId,
        small_stats: PoolStats,
        large_stats: PoolStats,
        free_blocks_type: type[FreeBlocks],
    ) -> None:
        self.id = pool_id
        self.small = BlockPool(
            pool_id, small_stats, is_small=True, free_blocks_type=free_blocks_type
        )
        self.large = BlockPool(
            pool_id, large_stats, is_small=False, free_blocks_type=free_blocks_type
        )
        self.source: SegmentSource | None = None

    def __iter__(self) -> Iterator[BlockPool]:
        """Iterate over both pools in the order in which cached memory is released."""
        yield self.large
        yield self.small


@dataclass(frozen=True, slots=True)
class Request:
    """A request that no free block can serve."""

    size: int  # Size of the block.
    requested_bytes: int
    segment_bytes: int
    stream: int
    pool: BlockPool
    stack: RawStack | None
