"""Pools: free blocks, found by stream, size and address.

A search takes the smallest block that is large enough, of those the one at the lowest address, and only of
the stream that asks (PyTorch's BlockComparatorSize).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

from cudakit.core.allocator.block import Block
from cudakit.core.allocator.metric import Metric
from cudakit.core.allocator.tally import Tally
from cudakit.torch_rules.sizes import MIB, SMALLEST_BLOCK

if TYPE_CHECKING:
    from cudakit.core.allocator.private import SegmentSource

PoolId: TypeAlias = tuple[int, int]
Entry: TypeAlias = tuple[
    int, int, Block
]  # size, address: no two are alike, so that blocks are never compared

DEFAULT_POOL: PoolId = (0, 0)

# A list longer than this is parted in two: to move its items would cost more than to find the part.
MOST_IN_PART = 1024


class FreeBlocks:
    """The free blocks of one pool and stream, in parts of ascending size and address.

    No part is empty, unless it is the only one, which then is ``part`` too: None where there are several.
    """

    __slots__ = ("part", "parts", "pool", "stream")

    def __init__(self, pool: Pool, stream: int) -> None:
        self.pool = pool
        self.stream = stream
        self.part: list[Entry] | None = []
        self.parts = [self.part]

    def __bool__(self) -> bool:
        return bool(self.parts[0])

    def __iter__(self) -> Iterator[Block]:
        for part in self.parts:
            for entry in part:
                yield entry[2]

    def from_size(self, size: int) -> Iterator[Entry]:
        """Go through the blocks of at least a size."""
        key = (size,)
        first = self._part_of(key) if self else 0
        yield from islice(self.parts[first], bisect_left(self.parts[first], key), None)
        for part in self.parts[first + 1 :]:
            yield from part

    def add(self, block: Block) -> None:
        """Take a block in, which is free from now on."""
        block.free = True
        block.age_base = self.pool.searches
        entry = block.size, block.ptr, block
        part = self.part
        if part is None:
            part = self.parts[self._part_of(entry)]
        insort(part, entry)
        if len(part) > MOST_IN_PART:
            self._divide(part)

    def discard(self, block: Block) -> None:
        """Take a free block out."""
        block.free = False
        key = block.size, block.ptr
        part = self.part
        if part is None:
            part = self.parts[self._part_of(key)]
        del part[bisect_left(part, key)]
        if not part:
            self._drop(part)

    def take(self, size: int, limit: int) -> Block | None:
        """Take out the smallest block of at least a size, unless that one is of the limit or more."""
        key = (size,)
        part = self.part
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
        """Find the part that has the first entry not below a key; the last where none has."""
        return min(bisect_left(self.parts, key, key=_last), len(self.parts) - 1)

    def _divide(self, part: list[Entry]) -> None:
        half = len(part) // 2
        self.parts.insert(self._part_of(part[-1]) + 1, part[half:])
        del part[half:]
        self.part = None

    def _drop(self, empty: list[Entry]) -> None:
        if len(self.parts) > 1:
            self.parts.remove(empty)
        self.part = self.parts[0] if len(self.parts) == 1 else None


def _last(part: list[Entry]) -> Entry:
    return part[-1]


class Pool:
    """Small or large blocks of one owner.

    A block is split where more than ``slack_bytes`` would be left of it, if the pool splits blocks at all.
    ``searches`` are counted while the garbage collection needs the age of blocks, and in ``reserved``, beside
    the tally, the bytes of its segments.
    """

    __slots__ = ("id", "reserved", "rows", "searches", "slack_bytes", "small", "splits", "tally")

    def __init__(self, owner: PoolId, tally: Tally, *, small: bool) -> None:
        self.id = owner
        self.small = small
        self.slack_bytes = SMALLEST_BLOCK - 1 if small else MIB
        self.splits = True
        self.tally = tally
        self.reserved: tuple[Metric, ...] = ()
        self.rows: dict[int, FreeBlocks] = {}
        self.searches = 0

    def row(self, stream: int) -> FreeBlocks:
        """Return where the free blocks of a stream are."""
        found = self.rows.get(stream)
        if found is None:
            found = self.rows[stream] = FreeBlocks(self, stream)
        return found

    def age(self, block: Block) -> int:
        """Return how many searches there were since a block became free."""
        return self.searches - block.age_base

    def __iter__(self) -> Iterator[Block]:
        """Go through the free blocks by stream, size and address."""
        for stream in sorted(self.rows):
            yield from self.rows[stream]


class Pools:
    """The small and the large pool of one owner: the default, or a private one.

    ``custom`` is where segments come from, None where that is the device.
    """

    __slots__ = ("custom", "id", "large", "small")

    def __init__(self, owner: PoolId, small: Tally, large: Tally) -> None:
        self.id = owner
        self.small = Pool(owner, small, small=True)
        self.large = Pool(owner, large, small=False)
        self.custom: SegmentSource | None = None

    def __iter__(self) -> Iterator[Pool]:
        """Go through both in the order in which memory is given back."""
        yield self.large
        yield self.small
