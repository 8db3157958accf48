"""Blocks and segments: parts of segments, free blocks sorted by size, pools of free blocks, and segments.

The best fit is the smallest block of the request's stream that is large enough; among blocks of equal size,
it is the block at the lowest address (PyTorch's BlockComparatorSize). The rest of the allocator uses Block
and FreeBlocks only through their public attributes, so that the native types of ``fast/``, which have the
same attributes, can replace them.

A segment is memory taken from the device in one piece, or mapped into reserved addresses page by page. The
address range of an expandable segment is a chain of blocks: at first a single unmapped block, whose lowest
pages are mapped first. Released pages become unmapped blocks between mapped blocks. Nothing here calls the
driver. Source: PyTorch's c10/cuda/CUDACachingAllocator.cpp (ExpandableSegment, map_block, unmap_block).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from types import CodeType
from typing import Protocol, TypeAlias, cast

from cudakit.allocator.stats import BlockCounters, DeviceStats, PoolStats, Stat
from cudakit.gpu.api import Ptr
from cudakit.torch_rules.oom import PoolId

# A call stack: pairs of a code object and the offset of an instruction in it, innermost first.
RawStack: TypeAlias = tuple[CodeType | int, ...]


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
        expandable_segment: ExpandableSegment | None = None,
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
        return self.free_blocks.stream

    @property
    def pool(self) -> BlockPool:
        return self.free_blocks.pool

    @property
    def is_split(self) -> bool:
        """Whether the segment contains more blocks than this one."""
        return self.prev is not None or self.next is not None


class FreeBlocks:
    """The free blocks of one pool and stream, sorted by size and address."""

    __slots__ = ("_sorted_blocks", "counters", "pool", "pool_id", "stream")

    def __init__(
        self, pool: BlockPool, pool_id: PoolId, stream: int, counters: BlockCounters
    ) -> None:
        self.pool = pool
        self.pool_id = pool_id
        self.stream = stream
        self.counters = counters
        # Size, address and block. Addresses differ, so blocks are never compared.
        self._sorted_blocks: list[tuple[int, int, Block]] = []

    def __bool__(self) -> bool:
        return bool(self._sorted_blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks_from_size(0))

    def new_block(
        self, ptr: int, size: int, expandable_segment: ExpandableSegment | None = None
    ) -> Block:
        """Return a new block of this pool and stream, which is not free."""
        return Block(ptr, size, self, expandable_segment)

    def blocks_from_size(self, size: int) -> list[Block]:
        """Return the blocks of at least a size, in sorted order."""
        first_index = bisect_left(self._sorted_blocks, (size,))
        return [block for _, _, block in self._sorted_blocks[first_index:]]

    def add(self, block: Block) -> None:
        """Insert a block, which becomes free."""
        block.is_free = True
        block.gc_count_base = self.counters.searches
        insort(self._sorted_blocks, (block.size, block.ptr, block))

    def remove(self, block: Block) -> None:
        block.is_free = False
        del self._sorted_blocks[bisect_left(self._sorted_blocks, (block.size, block.ptr))]

    def take(self, size: int, size_limit: int) -> Block | None:
        """Remove and return the smallest block of at least ``size`` bytes, if it is below ``size_limit``."""
        index = bisect_left(self._sorted_blocks, (size,))
        if index == len(self._sorted_blocks) or self._sorted_blocks[index][0] >= size_limit:
            return None
        block = self._sorted_blocks.pop(index)[2]
        block.is_free = False
        return block


class SegmentSource(Protocol):
    """The source of the segments of one pool. Every failure is a CudaError; out of memory has code 2."""

    def malloc(self, size_bytes: int, stream: int) -> int: ...
    def free(self, ptr: int) -> None: ...


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
        free_blocks = self.by_stream.get(stream)
        if free_blocks is None:
            free_blocks = self.by_stream[stream] = self._free_blocks_type(
                self, self.id, stream, self.stats.block_counters
            )
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
        self, pool_id: PoolId, stats: DeviceStats, free_blocks_type: type[FreeBlocks]
    ) -> None:
        self.id = pool_id
        self.small = BlockPool(
            pool_id, stats.small, is_small=True, free_blocks_type=free_blocks_type
        )
        self.large = BlockPool(
            pool_id, stats.large, is_small=False, free_blocks_type=free_blocks_type
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


_address_of = attrgetter("ptr")


class Segment:
    """Memory taken from the device in one piece. Registration numbers count the device's segments from 1."""

    __slots__ = ("first_block", "pool", "ptr", "registration_number", "size", "stream")

    is_expandable = False

    def __init__(self, first_block: Block, stack: RawStack | None) -> None:
        self.first_block = first_block
        self.registration_number = 0
        self.ptr = first_block.ptr
        self.size = first_block.size
        self.stream = first_block.stream
        self.pool = first_block.pool
        first_block.segment_stack = stack

    @property
    def stack(self) -> RawStack | None:
        """The stack of the segment's allocation, if the first block still has it.

        When a block is split, the stack stays with the upper part, as in PyTorch, where the lower part
        becomes a new object (alloc_found_block, try_merge_blocks).
        """
        return self.first_block.segment_stack

    def releasable_bytes(self, block: Block) -> int:
        """Return the releasable bytes of a free block: all bytes of a whole segment, otherwise 0."""
        return 0 if block.is_split else block.size

    def blocks(self) -> list[Block]:
        """List the blocks of the segment by address."""
        blocks = [self.first_block]
        while (next_block := blocks[-1].next) is not None:
            blocks.append(next_block)
        return blocks


class Segments(dict[int, Segment]):
    """The segments of a device by address, numbered from 1 in the order of their registration.

    No number is used twice. The numbers serve the same purpose as PyTorch's registration_counter: NCCL
    registers segments in the same order on all ranks. The values differ, because PyTorch numbers each Block
    object.
    """

    __slots__ = ("_last_number",)

    def __init__(self) -> None:
        super().__init__()
        self._last_number = 0

    def __setitem__(self, ptr: int, segment: Segment) -> None:
        self._last_number += 1
        segment.registration_number = self._last_number
        super().__setitem__(ptr, segment)

    def block_at(self, ptr: int) -> Block | None:
        for segment in self.values():
            if segment.ptr <= ptr < segment.ptr + segment.size:
                return next(block for block in reversed(segment.blocks()) if block.ptr <= ptr)
        return None

    def of_pool(self, pool: PoolId) -> list[Segment]:
        """List the segments of a pool by address."""
        pool_segments = [segment for segment in self.values() if segment.pool.id == pool]
        return sorted(pool_segments, key=_address_of)

    def allocated_blocks(self, pool: PoolId) -> list[Block]:
        """List the allocated blocks of a pool by address."""
        return [
            block
            for segment in self.of_pool(pool)
            for block in segment.blocks()
            if block.is_allocated
        ]


class MappedRange(Segment):
    """A contiguous mapped range of an expandable segment; PyTorch's snapshots contain it as a segment."""

    __slots__ = ("_stack",)

    is_expandable = True

    def __init__(self, first_block: Block, size: int, stack: RawStack | None) -> None:
        super().__init__(first_block, None)
        self.size = size
        self._stack = stack

    @property
    def stack(self) -> RawStack | None:
        """The stack of the request for which the first page of the range was mapped, or None."""
        return self._stack

    @property
    def end(self) -> int:
        return self.ptr + self.size

    def releasable_bytes(self, block: Block) -> int:
        """Return the number of bytes of a free block that can be released: the whole pages in the block."""
        assert block.expandable_segment is not None  # noqa: S101
        begin_address, end_address = block.expandable_segment.pages_within(block)
        return end_address - begin_address

    def blocks(self) -> list[Block]:
        """List the blocks of the segment by address."""
        blocks = [self.first_block]
        while (next_block := blocks[-1].next) is not None and next_block.is_mapped:
            blocks.append(next_block)
        return blocks


class StreamSegments:
    """The expandable segments of one pool and stream, and their unmapped blocks, both sorted by address."""

    __slots__ = ("free_blocks", "segments", "unmapped_blocks")

    def __init__(self, free_blocks: FreeBlocks) -> None:
        self.free_blocks = free_blocks
        self.segments: list[ExpandableSegment] = []
        self.unmapped_blocks: list[Block] = []

    def find_start_block(self, min_bytes: int) -> Block | None:
        """Return the lowest block that begins a chain of free and unmapped blocks of at least a size."""
        for unmapped_block in self.unmapped_blocks:
            previous_block = unmapped_block.prev
            start_block = (
                previous_block
                if previous_block is not None and previous_block.is_free
                else unmapped_block
            )
            if _has_min_size(start_block, min_bytes):
                return start_block
        return None

    def add_unmapped(self, block: Block) -> None:
        insort(self.unmapped_blocks, block, key=_address_of)

    def remove_unmapped(self, block: Block) -> None:
        del self.unmapped_blocks[bisect_left(self.unmapped_blocks, block.ptr, key=_address_of)]


class ExpandableSegment:
    """A range of reserved addresses of one pool and stream.

    The mapped ranges are added to ``registry``, which has all segments of the device. ``stack`` is the stack
    of the first mapping; snapshots contain it for the range at the beginning of the segment.
    """

    __slots__ = ("first_block", "group", "page_bytes", "ptr", "ranges", "registry", "size", "stack")

    def __init__(
        self,
        ptr: int,
        size: int,
        page_bytes: int,
        stream_segments: StreamSegments,
        registry: dict[int, Segment],
    ) -> None:
        self.ptr = ptr
        self.size = size
        self.page_bytes = page_bytes
        self.group = stream_segments
        self.registry = registry
        self.ranges: list[MappedRange] = []
        self.stack: RawStack | None = None
        self.first_block = self._unmapped_block(ptr, size)
        stream_segments.add_unmapped(self.first_block)
        insort(stream_segments.segments, self, key=_address_of)

    def remove_from_stream(self) -> None:
        """Remove the segment, which has no mapped pages, from the segments of its stream."""
        self.group.remove_unmapped(self.first_block)
        self.group.segments.remove(self)

    def pages_within(self, block: Block) -> tuple[int, int]:
        """Return the begin and the end of the pages that lie completely in a block; equal if no page does."""
        page_bytes, start_offset = self.page_bytes, block.ptr - self.ptr
        begin_offset = -(-start_offset // page_bytes) * page_bytes
        end_offset = (start_offset + block.size) // page_bytes * page_bytes
        return self.ptr + begin_offset, self.ptr + max(begin_offset, end_offset)

    def pages_containing(self, begin: int, end: int) -> tuple[int, int]:
        """Return the first address and the number of the pages that contain an address range."""
        page_bytes = self.page_bytes
        first_page, end_page = (begin - self.ptr) // page_bytes, -(-(end - self.ptr) // page_bytes)
        return self.ptr + first_page * page_bytes, end_page - first_page

    def map(self, unmapped_block: Block, size: int) -> Block:
        """Turn the beginning of an unmapped block into a free block; merge it with adjacent free blocks."""
        block = self.group.free_blocks.new_block(unmapped_block.ptr, size, self)
        block.requested = unmapped_block.requested
        self.group.remove_unmapped(unmapped_block)
        chain = [block]
        if size < unmapped_block.size:
            rest_block = self._unmapped_block(unmapped_block.ptr + size, unmapped_block.size - size)
            self.group.add_unmapped(rest_block)
            chain.append(rest_block)
        self._replace_block(unmapped_block, chain)
        self._extend_ranges(block)
        return self._merge_free(block)

    def unmap(self, block: Block, begin: int, end: int) -> None:
        """Turn a part of a free block into an unmapped block, and merge it with adjacent unmapped blocks."""
        free_blocks, after_bytes = self.group.free_blocks, block.ptr + block.size - end
        free_blocks.remove(block)
        gap = self._unmapped_block(begin, end - begin)
        gap.requested = block.requested
        chain = [gap]
        if block.ptr < begin:
            block.size, block.requested = begin - block.ptr, 0
            chain.insert(0, block)
        if after_bytes:
            chain.append(free_blocks.new_block(end, after_bytes, self))
        self._replace_block(block, chain)
        for chain_block in chain:
            if chain_block is not gap:
                free_blocks.add(chain_block)
        self._cut_range(gap)
        self._merge_unmapped(gap)

    def _unmapped_block(self, ptr: int, size_bytes: int) -> Block:
        block = self.group.free_blocks.new_block(ptr, size_bytes, self)
        block.is_mapped = False
        return block

    def _replace_block(self, old_block: Block, chain: list[Block]) -> None:
        """Replace a block of the segment by a chain of blocks; its first block may be the replaced block."""
        previous_block, next_block = old_block.prev, old_block.next
        for lower_block, upper_block in pairwise([previous_block, *chain, next_block]):
            if lower_block is not None:
                lower_block.next = upper_block
            if upper_block is not None:
                upper_block.prev = lower_block
        if previous_block is None:
            self.first_block = chain[0]

    def _merge_free(self, block: Block) -> Block:
        free_blocks, previous_block, next_block = self.group.free_blocks, block.prev, block.next
        if next_block is not None and next_block.is_free:
            free_blocks.remove(next_block)
            _absorb_next(block)
        if previous_block is not None and previous_block.is_free:
            free_blocks.remove(previous_block)
            previous_block.requested = block.requested
            _absorb_next(previous_block)
            block = previous_block
        free_blocks.add(block)
        return block

    def _merge_unmapped(self, gap: Block) -> None:
        stream_segments, previous_block, next_block = self.group, gap.prev, gap.next
        if next_block is not None and not next_block.is_mapped:
            stream_segments.remove_unmapped(next_block)
            _absorb_next(gap)
        if previous_block is not None and not previous_block.is_mapped:
            stream_segments.remove_unmapped(previous_block)
            previous_block.requested = gap.requested
            _absorb_next(previous_block)
            gap = previous_block
        stream_segments.add_unmapped(gap)

    def _extend_ranges(self, block: Block) -> None:
        """Add a newly mapped block to the mapped ranges, and join the ranges before and after the block."""
        ranges, end, block_bytes = self.ranges, block.ptr + block.size, block.size
        index = bisect_right(ranges, block.ptr, key=_address_of)
        if index < len(ranges) and ranges[index].ptr == end:
            next_range = ranges.pop(index)
            del self.registry[next_range.ptr]
            block_bytes += next_range.size
        if index and ranges[index - 1].end == block.ptr:
            ranges[index - 1].size += block_bytes
        else:
            # Only the range at the beginning of the segment has a stack.
            self._add_range(index, MappedRange(block, block_bytes, self.stack))

    def _cut_range(self, gap: Block) -> None:
        """Remove an unmapped block from the mapped range that contains its addresses."""
        ranges, end = self.ranges, gap.ptr + gap.size
        index = bisect_right(ranges, gap.ptr, key=_address_of) - 1
        containing_range = ranges[index]
        after_bytes = containing_range.end - end
        containing_range.size = gap.ptr - containing_range.ptr
        if not containing_range.size:
            del ranges[index], self.registry[containing_range.ptr]
            index -= 1
        if after_bytes:
            self._add_range(index + 1, MappedRange(cast("Block", gap.next), after_bytes, None))

    def _add_range(self, index: int, new_range: MappedRange) -> None:
        self.ranges.insert(index, new_range)
        self.registry[new_range.ptr] = new_range


def is_whole_segment(block: Block) -> bool:
    """Return whether a block is the only block of a segment that is not expandable."""
    return not block.is_split and block.expandable_segment is None


def _absorb_next(block: Block) -> None:
    """Merge the next block, which must be in no list of free blocks, into a block."""
    absorbed_block = block.next
    assert absorbed_block is not None  # noqa: S101
    block.size += absorbed_block.size
    block.next = next_block = absorbed_block.next
    if next_block is not None:
        next_block.prev = block


def expandable_size(block: Block) -> int:
    """Return the size to which a free block can grow: its size plus the unmapped block after it."""
    next_block = block.next
    return block.size + (
        next_block.size if next_block is not None and not next_block.is_mapped else 0
    )


def _has_min_size(start_block: Block, min_bytes: int) -> bool:
    """Return whether the free and unmapped blocks from ``start_block`` on have ``min_bytes`` in total."""
    chain_bytes = 0
    block: Block | None = start_block
    while block is not None and chain_bytes < min_bytes and (block.is_free or not block.is_mapped):
        chain_bytes += block.size
        block = block.next
    return chain_bytes >= min_bytes
