"""Blocks: the pieces that a segment is divided into."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from types import CodeType

    from cudakit.core.allocator.front_cache import Bin
    from cudakit.core.allocator.ledger import Tab
    from cudakit.core.allocator.pools import FreeBlocks, Pool
    from cudakit.gpu.api import Ptr

# Where something was called from: pairs of a code object and the offset in it, innermost first.
Trail: TypeAlias = "tuple[CodeType | int, ...]"


class Block:
    """A piece of a segment: free, handed out, or freed and still used by other streams.

    It is free while ``free`` is true, and then in its row. Blocks never change their stream or their pool.
    Of two that are merged the lower one stays, so that the first block of a segment is always the same
    object.
    """

    __slots__ = (
        "age_base",
        "allocated",
        "bin",
        "counted",
        "free",
        "next",
        "origin",
        "other_streams",
        "previous",
        "ptr",
        "requested",
        "row",
        "size",
        "stack",
        "tab",
        "waits",
        "weighed_request",
        "weighed_size",
        "weight",
    )

    def __init__(self, ptr: int, size: int, row: FreeBlocks) -> None:
        self.ptr: Ptr = ptr  # type: ignore[assignment]  # to make it one takes as long as half of this
        self.size = size
        self.row = row  # where it is while it is free
        self.requested = 0  # bytes of the last request that it served, before rounding
        self.free = self.allocated = False
        self.previous: Block | None = None  # the neighbour at lower addresses of the same segment
        self.next: Block | None = None
        self.other_streams: dict[int, None] | None = None  # that use it, no event recorded yet
        self.waits = 0  # events recorded that it waits for
        self.stack: Trail | None = None
        self.origin: Trail | None = None  # the stack of the segment, in one of its blocks
        self.bin: Bin | None = None  # of the front cache, to which it goes when it is freed
        self.counted = True  # what is kept in the front cache may be in the ledger, or not
        self.weight = (
            0  # in the ledger, when it was last handed out; with the sizes that this is made of
        )
        self.weighed_size = self.weighed_request = 0
        self.tab: Tab | None = None  # of its weight, once it has a bin
        self.age_base = 0  # of searches in the pool, when it became free

    @property
    def stream(self) -> int:
        """The stream in whose order it is used."""
        return self.row.stream

    @property
    def pool(self) -> Pool:
        """The pool that it belongs to."""
        return self.row.pool

    @property
    def split(self) -> bool:
        """Whether it is not the whole of its segment."""
        return self.previous is not None or self.next is not None


class Segment:
    """Memory taken from the device in one piece; ``number`` is its place in the order in which that was."""

    __slots__ = ("first", "number", "pool", "ptr", "size", "stream")

    expandable = False

    def __init__(self, first: Block, stack: Trail | None) -> None:
        self.first = first
        self.number = 0  # not yet among those of a device
        self.ptr = first.ptr
        self.size = first.size
        self.stream = first.stream
        self.pool = first.pool
        first.origin = stack

    @property
    def stack(self) -> Trail | None:
        """The stack of its allocation, as far as the first block has it.

        Of a block that is split the upper part takes it along, as PyTorch's do: it makes a new object of the
        lower one (alloc_found_block, try_merge_blocks).
        """
        return self.first.origin

    def releasable_bytes(self, block: Block) -> int:
        """Return how much of a free block of it can be given back: all, where that is the whole segment."""
        return 0 if block.split else block.size

    def blocks(self) -> list[Block]:
        """List its blocks by address."""
        found = [self.first]
        while (after := found[-1].next) is not None:
            found.append(after)
        return found


class Segments(dict[int, Segment]):
    """The segments of a device by their addresses, numbered from 1 in the order in which they come.

    No number is given twice (PyTorch's registration_counter, by which NCCL registers segments everywhere in
    the same order; there each object of a block has one, so that its numbers are others).
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        super().__init__()
        self._last = 0

    def __setitem__(self, ptr: int, segment: Segment) -> None:
        self._last += 1
        segment.number = self._last
        super().__setitem__(ptr, segment)
