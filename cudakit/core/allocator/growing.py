"""What expandable segments consist of: free blocks, unmapped addresses, and how they are counted."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from operator import attrgetter
from typing import TYPE_CHECKING

from cudakit.core.allocator.block import Block
from cudakit.core.allocator.pools import FreeBlocks, Pool
from cudakit.core.allocator.tally import Tally
from cudakit.torch_rules.sizes import SMALLEST_BLOCK

if TYPE_CHECKING:
    from cudakit.core.allocator.mapping import Reservation

by_address = attrgetter("ptr")


class Unmapped(Block):
    """Addresses of a reservation that have no memory behind them; never free, and never handed out."""

    __slots__ = ("reservation",)

    def __init__(self, ptr: int, size: int, reservation: Reservation) -> None:
        super().__init__(ptr, size, reservation.row)
        self.reservation = reservation


class Growing(FreeBlocks):
    """The free blocks of one pool and stream that lie in reservations, and the addresses left there."""

    __slots__ = ("reservations", "tally", "unmapped")

    def __init__(self, pool: Pool, stream: int) -> None:
        self.tally = GrowingTally(pool)
        super().__init__(GrowingPool(pool, self.tally), stream)
        self.reservations: list[Reservation] = []  # by address, as the others
        self.unmapped: list[Unmapped] = []

    def reservation_of(self, block: Block) -> Reservation:
        """Return the reservation that a block lies in."""
        return self.reservations[bisect_right(self.reservations, block.ptr, key=by_address) - 1]

    def place_for(self, size: int) -> Block | None:
        """Find the lowest free or unmapped block from which free and unmapped ones make up a size."""
        for unmapped in self.unmapped:
            before = unmapped.previous
            start = before if before is not None and before.free else unmapped
            if _has_room(start, size):
                return start
        return None

    def discard_unmapped(self, block: Block) -> None:
        """Take an unmapped block out."""
        del self.unmapped[bisect_left(self.unmapped, block.ptr, key=by_address)]

    def add_unmapped(self, block: Unmapped) -> None:
        """Take an unmapped block in."""
        insort(self.unmapped, block, key=by_address)


class GrowingPool(Pool):
    """What a pool is for its expandable blocks: split wherever they can be, counted otherwise."""

    __slots__ = ()

    def __init__(self, pool: Pool, tally: Tally) -> None:
        super().__init__(pool.id, tally, small=pool.small)
        self.slack_bytes = SMALLEST_BLOCK - 1
        self.splits = pool.splits


class GrowingTally(Tally):
    """The tally of a pool, but that memory is mapped into no segment, and no piece counts as split off."""

    __slots__ = ("_own", "_pool")

    def __init__(self, pool: Pool) -> None:
        own = pool.tally
        super().__init__(own.whole, own.ledger, own.kind)
        self._own = own
        self._pool = pool
        self.other = own.other

    def mapped(self, size: int) -> None:
        """Count memory that was mapped."""
        own = self._own
        own.reserved_bytes += size
        own.reserved_bytes_added += size
        own.raise_to("reserved_bytes", own.reserved_bytes)
        own.whole.raise_to("reserved_bytes", own.reserved_bytes + own.other.reserved_bytes)
        for metric in self._pool.reserved:
            metric.increase(size)

    def unmapped(self, size: int) -> None:
        """Count memory that was given back."""
        self._own.reserved_bytes -= size
        for metric in self._pool.reserved:
            metric.decrease(size)

    def postponed(self, size: int) -> None:
        self._own.postponed(size)

    def completed(self, size: int, requested: int) -> None:
        self._own.completed(size, requested)

    def raise_active(self) -> None:
        self._own.raise_active()

    def pieces_changed(self, count: int, size: int) -> None:
        """Count nothing: whole pages can be given back, whatever is in use beside them."""


def room_of(block: Block) -> int:
    """Return how large a free block can become: with the unmapped addresses behind it."""
    after = block.next
    return block.size + (after.size if isinstance(after, Unmapped) else 0)


def _has_room(start: Block, size: int) -> bool:
    found, block = 0, start
    while found < size and (block.free or isinstance(block, Unmapped)):
        found += block.size
        if block.next is None:
            break
        block = block.next
    return found >= size
