"""Blocks: the pieces that a segment is divided into, and the free ones of a pool, sorted.

The attributes of Block and FreeBlocks are all that the rest of the allocator uses of them, so that a native
type with the same attributes can take their place.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from types import CodeType

    from cudakit.core.allocator.expandable_segment import ExpandableSegment
    from cudakit.core.allocator.pool_stats import BlockCounters
    from cudakit.core.allocator.pools import BlockPool
    from cudakit.gpu.api import Ptr

# A call stack: pairs of a code object and the offset of an instruction in it, innermost first.
RawStack: TypeAlias = "tuple[CodeType | int, ...]"
# Size and address: no two entries of a list are equal in both, so blocks are never compared.
Entry: TypeAlias = "tuple[int, int, Block]"

# A longer list is divided in two: moving its items would cost more than finding the part.
MOST_IN_PART = 1024


class Block:
    """A piece of a segment: free, allocated, or freed while other streams still use it.

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
        expandable_segment: ExpandableSegment | None = None,
    ) -> None:
        self.ptr: Ptr = ptr  # type: ignore[assignment]  # the call of Ptr would take half of this time
        self.size = size
        self.free_blocks = (
            free_blocks  # of its pool and stream: contains the block while it is free
        )
        self.expandable_segment = expandable_segment
        self.mapped = True  # False: addresses of an expandable segment without memory
        self.requested = 0  # bytes of the last request it served, before rounding
        self.free = self.allocated = False
        self.prev: Block | None = None  # the block before it in the segment
        self.next: Block | None = None
        self.stream_uses: dict[int, None] | None = None  # other streams, without an event yet
        self.event_count = 0  # recorded events it waits for
        self.gc_count_base = 0  # the count of searches in its pool when it became free
        self.stack: RawStack | None = None
        self.segment_stack: RawStack | None = None  # in one block of each segment

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

    def absorb_next(self) -> None:
        """Merge the next block, which must be in no list, into this one."""
        absorbed = self.next
        assert absorbed is not None  # noqa: S101
        self.size += absorbed.size
        self.next = after = absorbed.next
        if after is not None:
            after.prev = self


class FreeBlocks:
    """The free blocks of one pool and stream, sorted by size and address, in parts of limited length.

    No part is empty unless it is the only one. ``only_part`` is that part, or None if there are several.
    """

    __slots__ = ("counters", "only_part", "parts", "pool", "stream")

    def __init__(self, pool: BlockPool, stream: int, counters: BlockCounters) -> None:
        self.pool = pool
        self.stream = stream
        self.counters = counters
        self.only_part: list[Entry] | None = []
        self.parts = [self.only_part]

    def __bool__(self) -> bool:
        return bool(self.parts[0])

    def __iter__(self) -> Iterator[Block]:
        for part in self.parts:
            for entry in part:
                yield entry[2]

    def new_block(
        self, ptr: int, size: int, expandable_segment: ExpandableSegment | None = None
    ) -> Block:
        """Return a new block of this pool and stream, which is not free."""
        return Block(ptr, size, self, expandable_segment)

    def from_size(self, size: int) -> Iterable[Block]:
        """Return the blocks of at least a size, in order."""
        key = (size,)
        first = self._part_of(key) if self else 0
        for _, _, block in islice(self.parts[first], bisect_left(self.parts[first], key), None):
            yield block
        for part in self.parts[first + 1 :]:
            for _, _, block in part:
                yield block

    def add(self, block: Block) -> None:
        """Insert a block, which becomes free."""
        block.free = True
        block.gc_count_base = self.pool.searches
        entry = block.size, block.ptr, block
        part = self.only_part
        if part is None:
            part = self.parts[self._part_of(entry)]
        insort(part, entry)
        if len(part) > MOST_IN_PART:
            self._divide(part)

    def remove(self, block: Block) -> None:
        """Remove a free block."""
        block.free = False
        key = block.size, block.ptr
        part = self.only_part
        if part is None:
            part = self.parts[self._part_of(key)]
        del part[bisect_left(part, key)]
        if not part:
            self._drop(part)

    def take(self, size: int, limit: int) -> Block | None:
        """Remove and return the smallest block of at least a size, or None if it has ``limit`` or more."""
        key = (size,)
        part = self.only_part
        if part is None:
            part = self.parts[self._part_of(key)]
        index = bisect_left(part, key)
        if index == len(part) or part[index][0] >= limit:
            return None
        block = part.pop(index)[2]
        block.free = False
        if not part:
            self._drop(part)
        return block

    def _part_of(self, key: tuple[int] | tuple[int, int] | Entry) -> int:
        """Return the index of the part with the first entry not below a key, or of the last part."""
        return min(bisect_left(self.parts, key, key=_last), len(self.parts) - 1)

    def _divide(self, part: list[Entry]) -> None:
        half = len(part) // 2
        self.parts.insert(self._part_of(part[-1]) + 1, part[half:])
        del part[half:]
        self.only_part = None

    def _drop(self, empty: list[Entry]) -> None:
        if len(self.parts) > 1:
            self.parts.remove(empty)
        self.only_part = self.parts[0] if len(self.parts) == 1 else None


def _last(part: list[Entry]) -> Entry:
    return part[-1]


class Segment:
    """Memory taken from the device in one piece. ``number`` counts the segments of the device from 1."""

    __slots__ = ("first", "number", "pool", "ptr", "size", "stream")

    is_expandable = False

    def __init__(self, first: Block, stack: RawStack | None) -> None:
        self.first = first
        self.number = 0
        self.ptr = first.ptr
        self.size = first.size
        self.stream = first.stream
        self.pool = first.pool
        first.segment_stack = stack

    @property
    def stack(self) -> RawStack | None:
        """The stack of its allocation, if the first block still has it.

        When a block is split the upper part takes the stack, as in PyTorch, which makes a new object of the
        lower part (alloc_found_block, try_merge_blocks).
        """
        return self.first.segment_stack

    def releasable_bytes(self, block: Block) -> int:
        """Return the bytes of a free block that can be released: all, if it is the whole segment."""
        return 0 if block.is_split else block.size

    def blocks(self) -> list[Block]:
        """List the blocks by address."""
        found = [self.first]
        while (after := found[-1].next) is not None:
            found.append(after)
        return found


class Segments(dict[int, Segment]):
    """The segments of a device by address, numbered from 1 in the order of their registration.

    No number is given twice (PyTorch's registration_counter, by which NCCL registers segments in the same
    order everywhere; PyTorch numbers each Block object, so its numbers differ).
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        super().__init__()
        self._last = 0

    def __setitem__(self, ptr: int, segment: Segment) -> None:
        self._last += 1
        segment.number = self._last
        super().__setitem__(ptr, segment)

    def at(self, ptr: int) -> Segment | None:
        """Return the segment that an address lies in."""
        for segment in self.values():
            if segment.ptr <= ptr < segment.ptr + segment.size:
                return segment
        return None
