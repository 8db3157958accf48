"""Expandable segments: ranges of addresses into which memory is mapped page by page.

A reservation is a chain of blocks. At first it is a single unmapped one, from which what is mapped is taken
at its left end; where pages are given back, there are unmapped blocks in between. Nothing here calls the
driver. Source: PyTorch's c10/cuda/CUDACachingAllocator.cpp (ExpandableSegment, map_block, unmap_block).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from itertools import pairwise
from typing import cast

from cudakit.core.allocator.block import Block, Segment, Trail
from cudakit.core.allocator.growing import Growing, Unmapped, by_address


class Range(Segment):
    """A contiguous mapped range of a reservation, which is what PyTorch shows as an expandable segment."""

    __slots__ = ("_stack",)

    expandable = True

    def __init__(self, first: Block, size: int, stack: Trail | None) -> None:
        super().__init__(first, None)
        self.size = size
        self._stack = stack

    @property
    def stack(self) -> Trail | None:
        """The stack of its first mapping."""
        return self._stack

    @property
    def end(self) -> int:
        """The first address beyond it."""
        return self.ptr + self.size

    def releasable_bytes(self, block: Block) -> int:
        """Return how much of a free block of it can be given back: the whole pages that lie in it."""
        begin, end = cast("Growing", block.row).reservation_of(block).pages_within(block)
        return end - begin

    def blocks(self) -> list[Block]:
        """List its blocks by address."""
        found = [self.first]
        while (after := found[-1].next) is not None and not isinstance(after, Unmapped):
            found.append(after)
        return found


class Reservation:
    """A range of addresses for one pool and stream.

    Its mapped ranges are kept in ``segments`` too, by their addresses. The stack of its first mapping is
    that of the range at its beginning.
    """

    __slots__ = ("first", "page_bytes", "ptr", "ranges", "row", "segments", "size", "stack")

    def __init__(
        self, ptr: int, size: int, page_bytes: int, row: Growing, segments: dict[int, Segment]
    ) -> None:
        self.ptr = ptr
        self.size = size
        self.page_bytes = page_bytes
        self.row = row
        self.segments = segments
        self.ranges: list[Range] = []
        self.stack: Trail | None = None
        whole = Unmapped(ptr, size, self)
        self.first: Block = whole
        row.add_unmapped(whole)
        insort(row.reservations, self, key=by_address)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is mapped."""
        return not self.ranges

    def leave(self) -> None:
        """Take the reservation out of its row; nothing is mapped."""
        self.row.discard_unmapped(self.first)
        self.row.reservations.remove(self)

    def pages_within(self, block: Block) -> tuple[int, int]:
        """Return where the whole pages that lie in a block begin and end; the same where there are none."""
        page, start = self.page_bytes, block.ptr - self.ptr
        begin = -(-start // page) * page
        end = (start + block.size) // page * page
        return self.ptr + begin, self.ptr + max(begin, end)

    def pages_under(self, begin: int, end: int) -> tuple[int, int]:
        """Return where the pages that a range lies on begin, and how many they are."""
        page = self.page_bytes
        first, last = (begin - self.ptr) // page, -(-(end - self.ptr) // page)
        return self.ptr + first * page, last - first

    def mapped(self, place: Unmapped, size: int) -> Block:
        """Make the beginning of unmapped addresses a free block, as one with its free neighbours."""
        row = self.row
        block = Block(place.ptr, size, row)
        block.requested = place.requested
        row.discard_unmapped(place)
        chain: list[Block] = [block]
        if size < place.size:
            rest = Unmapped(place.ptr + size, place.size - size, self)
            row.add_unmapped(rest)
            chain.append(rest)
        self._replace(place, chain)
        self._grow(block)
        return self._merge_free(block)

    def unmapped(self, block: Block, begin: int, end: int) -> None:
        """Make a part of a free block unmapped addresses, as one with its unmapped neighbours."""
        row, after_bytes = self.row, block.ptr + block.size - end
        row.discard(block)
        gap = Unmapped(begin, end - begin, self)
        gap.requested = block.requested
        chain: list[Block] = [gap]
        if block.ptr < begin:
            block.size, block.requested = begin - block.ptr, 0
            chain.insert(0, block)
        if after_bytes:
            chain.append(Block(end, after_bytes, row))
        self._replace(block, chain)
        for piece in chain:
            if piece is not gap:
                row.add(piece)
        self._cut(gap)
        self._merge_unmapped(gap)

    def _replace(self, old: Block, chain: list[Block]) -> None:
        """Put blocks into the place of one, which may be the first of them."""
        before, after = old.previous, old.next
        for left, right in pairwise([before, *chain, after]):
            if left is not None:
                left.next = right
            if right is not None:
                right.previous = left
        if before is None:
            self.first = chain[0]

    def _merge_free(self, block: Block) -> Block:
        row, before, after = self.row, block.previous, block.next
        if after is not None and after.free:
            row.discard(after)
            _absorb(block, after)
        if before is not None and before.free:
            row.discard(before)
            before.requested = block.requested
            _absorb(before, block)
            block = before
        row.add(block)
        return block

    def _merge_unmapped(self, gap: Unmapped) -> None:
        row, before, after = self.row, gap.previous, gap.next
        if isinstance(after, Unmapped):
            row.discard_unmapped(after)
            _absorb(gap, after)
        if isinstance(before, Unmapped):
            row.discard_unmapped(before)
            before.requested = gap.requested
            _absorb(before, gap)
            gap = before
        row.add_unmapped(gap)

    def _grow(self, block: Block) -> None:
        """Add a new block to the mapped ranges: at the end of one, at the beginning of another, or both."""
        ranges, end, size = self.ranges, block.ptr + block.size, block.size
        index = bisect_right(ranges, block.ptr, key=by_address)
        if index < len(ranges) and ranges[index].ptr == end:
            after = ranges.pop(index)
            del self.segments[after.ptr]
            size += after.size
        if index and ranges[index - 1].end == block.ptr:
            ranges[index - 1].size += size
        else:
            self._add_range(index, Range(block, size, self.stack))  # at the beginning of all

    def _cut(self, gap: Unmapped) -> None:
        """Take a new gap out of the mapped range that it lies in."""
        ranges, end = self.ranges, gap.ptr + gap.size
        index = bisect_right(ranges, gap.ptr, key=by_address) - 1
        cut = ranges[index]
        after_bytes = cut.end - end
        cut.size = gap.ptr - cut.ptr
        if not cut.size:
            del ranges[index], self.segments[cut.ptr]
            index -= 1
        if after_bytes:
            self._add_range(index + 1, Range(cast("Block", gap.next), after_bytes, None))

    def _add_range(self, index: int, new: Range) -> None:
        self.ranges.insert(index, new)
        self.segments[new.ptr] = new


def _absorb(block: Block, after: Block) -> None:
    """Let a block take in the one behind it."""
    block.size += after.size
    block.next = follower = after.next
    if follower is not None:
        follower.previous = block
