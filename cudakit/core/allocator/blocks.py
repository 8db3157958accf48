"""Blocks, the parts of segments; sorted free blocks; and pools of free blocks.

The best fit is the smallest block that is large enough, of equal blocks that at the lowest address, and only
among blocks of the request's stream (PyTorch's BlockComparatorSize). The rest of the allocator uses Block and
FreeBlocks only through their public attributes, so that native types with the same attributes can replace
them (native.py).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from types import CodeType
from typing import NamedTuple, Protocol, TypeAlias

from cudakit.core.allocator.pool_stats import BlockCounters, PoolStats, Stat
from cudakit.gpu.api import Ptr
from cudakit.torch_rules.oom_facts import PoolId

# A call stack: pairs of a code object and the offset of an instruction in it, innermost first.
RawStack: TypeAlias = tuple[CodeType | int, ...]
# Size, address and block. No two entries have equal sizes and addresses, so blocks are never compared.
Entry: TypeAlias = "tuple[int, int, Block]"

# A longer list is split: moving its items would take longer than finding the part.
MOST_IN_PART = 1024


class PagedRange(Protocol):
    """The parts of an expandable segment that its blocks use."""

    ptr: int
    page_bytes: int

    def pages_within(self, block: Block) -> tuple[int, int]: ...
    def pages_under(self, begin: int, end: int) -> tuple[int, int]: ...


class Block:
    """A part of a segment: free, allocated, or pending: freed while other streams still use it.

    A block never changes its stream or its pool. When two blocks are merged the lower one stays, so that the
    first block of a segment is always the same object.
    """

    __slots__ = (
        "allocated",
        "event_count",
        "expandable_segment",
        "free",
        "free_blocks",
        "gc_count_base",
        "mapped",
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
        self.free_blocks = free_blocks  # contains the block while it is free
        self.expandable_segment = expandable_segment
        self.mapped = True  # False: an address range of an expandable segment without memory
        self.requested = 0  # bytes of its last request, before rounding
        self.free = self.allocated = False
        self.prev: Block | None = None  # the block before it in the segment
        self.next: Block | None = None
        self.stream_uses: dict[int, None] | None = None  # other streams, without an event yet
        self.event_count = 0  # recorded events that the block waits for
        self.gc_count_base = 0  # the pool's searches when the block became free
        self.stack: RawStack | None = None
        self.segment_stack: RawStack | None = None  # set in one block per segment

    @property
    def stream(self) -> int:
        """The stream in whose order the block is used."""
        return self.free_blocks.stream

    @property
    def pool(self) -> BlockPool:
        """The pool that the block belongs to."""
        return self.free_blocks.pool

    @property
    def is_split(self) -> bool:
        """Whether the block is only a part of its segment."""
        return self.prev is not None or self.next is not None


class FreeBlocks:
    """The free blocks of one pool and stream, sorted by size and address, in parts of limited length.

    No part is empty unless it is the only one. ``only_part`` is that part, or None if there are several.
    """

    __slots__ = ("counters", "only_part", "parts", "pool", "stats", "stream")

    def __init__(self, pool: BlockPool, stream: int) -> None:
        self.pool = pool
        self.stats = pool.stats
        self.counters = pool.stats.blocks
        self.stream = stream
        self.only_part: list[Entry] | None = []
        self.parts = [self.only_part]

    def __bool__(self) -> bool:
        return bool(self.parts[0])

    def __iter__(self) -> Iterator[Block]:
        for part in self.parts:
            for entry in part:
                yield entry[2]

    def new_block(self, ptr: int, size: int, expandable_segment: PagedRange | None = None) -> Block:
        """Return a new block of this pool and stream, which is not free."""
        return Block(ptr, size, self, expandable_segment)

    def from_size(self, size: int) -> Iterable[Block]:
        """Return the blocks of at least a size, in order."""
        key = (size,)
        first = self._part_index(key) if self else 0
        for _, _, block in islice(self.parts[first], bisect_left(self.parts[first], key), None):
            yield block
        for part in self.parts[first + 1 :]:
            for _, _, block in part:
                yield block

    def add(self, block: Block) -> None:
        """Insert a block, which becomes free."""
        block.free = True
        block.gc_count_base = self.counters.searches
        entry = block.size, block.ptr, block
        part = self.only_part
        if part is None:
            part = self.parts[self._part_index(entry)]
        insort(part, entry)
        if len(part) > MOST_IN_PART:
            self._divide(part)

    def remove(self, block: Block) -> None:
        """Remove a free block."""
        block.free = False
        key = block.size, block.ptr
        part = self.only_part
        if part is None:
            part = self.parts[self._part_index(key)]
        del part[bisect_left(part, key)]
        if not part:
            self._drop(part)

    def take(self, size: int, limit: int) -> Block | None:
        """Remove and return the smallest block of at least ``size``, or None if it is not below ``limit``."""
        key = (size,)
        part = self.only_part
        if part is None:
            part = self.parts[self._part_index(key)]
        index = bisect_left(part, key)
        if index == len(part) or part[index][0] >= limit:
            return None
        block = part.pop(index)[2]
        block.free = False
        if not part:
            self._drop(part)
        return block

    def _part_index(self, key: tuple[int] | tuple[int, int] | Entry) -> int:
        """Return the index of the part with the first entry not below a key, or of the last part."""
        return min(bisect_left(self.parts, key, key=_last), len(self.parts) - 1)

    def _divide(self, part: list[Entry]) -> None:
        half = len(part) // 2
        self.parts.insert(self._part_index(part[-1]) + 1, part[half:])
        del part[half:]
        self.only_part = None

    def _drop(self, empty: list[Entry]) -> None:
        if len(self.parts) > 1:
            self.parts.remove(empty)
        self.only_part = self.parts[0] if len(self.parts) == 1 else None


def _last(part: list[Entry]) -> Entry:
    return part[-1]


class SegmentSource(Protocol):
    """The source of the segments of one pool. Every failure is a CudaError; out of memory has code 2."""

    def malloc(self, size_bytes: int, stream: int) -> int: ...
    def free(self, ptr: int) -> None: ...


class BlockTypes(NamedTuple):
    """The types that an allocator uses: those of plain Python, or native ones."""

    free_blocks: type[FreeBlocks]  # which creates the blocks
    counters: type[BlockCounters]


PLAIN_TYPES = BlockTypes(FreeBlocks, BlockCounters)


class BlockPool:
    """The small or the large free blocks of one owner.

    ``reserved`` are the statistics of the bytes that a private pool reserves; ``stats`` counts all pools.
    """

    __slots__ = ("_type", "by_stream", "id", "no_split", "reserved", "small", "stats")

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

    def free_blocks(self, stream: int) -> FreeBlocks:
        """Return the free blocks of a stream."""
        free = self.by_stream.get(stream)
        if free is None:
            free = self.by_stream[stream] = self._type(self, stream)
        return free

    def age(self, block: Block) -> int:
        """Return the number of searches since a block became free."""
        return self.stats.blocks.searches - block.gc_count_base

    def __iter__(self) -> Iterator[Block]:
        """Iterate over the free blocks by stream, size and address."""
        for stream in sorted(self.by_stream):
            yield from self.by_stream[stream]


class Pools:
    """The small and the large pool of one owner: the default pool, or a private one.

    ``source`` provides the segments; None means the device.
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
