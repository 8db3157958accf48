"""What is kept of the accesses to some bytes: enough to find every race, and never a growing list.

That is the last write, and of the reads since (and, apart, of the atomic operations) those that no other
one of them comes after: at most one for each stream, as what one stream does is ordered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from cudakit.core.sanitize.calls import ATOMIC, WRITE, Touch, are_alike
from cudakit.core.sanitize.clocks import NEVER, Clock

Touches: TypeAlias = tuple[Touch, ...]

# A touch that was reported against a later one, and that: what comes after the later one is not reported
# again, as it would come after both if the first report were mended.
Pardon: TypeAlias = tuple[Touch, Touch]


class Cell:
    """The accesses to some bytes. Its lists are tuples, so that a copy can share them."""

    __slots__ = ("approximate", "atomics", "pardons", "reads", "write")

    def __init__(self) -> None:
        self.write: Touch | None = None
        self.reads: Touches = ()
        self.atomics: Touches = ()
        self.pardons: tuple[Pardon, ...] = ()
        self.approximate = False

    def takes(self, touch: Touch, past: Clock) -> bool:
        """Keep an access that conflicts with nothing; False, and it is not kept, where it may.

        Says the same as ``unordered`` and ``store``, at once: nearly every access of a program ends here.
        """
        write, reads = self.write, self.reads
        if self.atomics or touch.mode & ATOMIC:
            return False
        if touch.mode & WRITE:
            if reads:
                for read in reads:
                    if read.tick > past[read.slot]:
                        return False
            elif write is not None and write.tick > past[write.slot]:
                return False
            self.write = touch
            self.reads = self.pardons = ()
            return True
        if write is not None and write.tick > past[write.slot]:
            return False
        if len(reads) > 1:
            self.reads = without(reads, past, touch)
        elif not reads or reads[0].tick <= past[reads[0].slot]:
            self.reads = (touch,)
        else:
            self.reads = (reads[0], touch)
        return True

    def unordered(self, mode: int, past: Clock) -> Sequence[Touch]:
        """List what an access of a mode conflicts with, and does not come after.

        What shares the bytes comes after the last write, or is reported: so the write needs no look then.
        """
        if mode & ATOMIC:
            others = self.reads
        elif mode & WRITE:
            others = self.reads + self.atomics if self.atomics else self.reads
        else:
            others = self.atomics
        if others:
            return [other for other in others if other.tick > past[other.slot]]
        write = self.write
        if write is not None and write.tick > past[write.slot]:
            return [write]
        return ()

    def store(self, touch: Touch, past: Clock) -> None:
        """Keep an access, and forget those that it comes after and stands for."""
        write, mode = self.write, touch.mode
        if write is not None and write.tick == NEVER:
            return  # of what is done to freed memory nothing else follows
        if mode & ATOMIC:
            self.atomics = without(self.atomics, past, touch)
        elif mode & WRITE:
            self.write = touch
            self.reads = self.atomics = self.pardons = ()
        else:
            self.reads = without(self.reads, past, touch)

    def take_from(self, other: Cell) -> None:
        """Become a copy of another cell."""
        self.write, self.reads, self.atomics = other.write, other.reads, other.atomics
        self.pardons, self.approximate = other.pardons, other.approximate

    def is_like(self, other: Cell) -> bool:
        """Say whether two cells would answer and be reported alike."""
        return (
            are_alike(self.write, other.write)
            and _are_all_alike(self.reads, other.reads)
            and _are_all_alike(self.atomics, other.atomics)
            and not self.pardons
            and not other.pardons
            and self.approximate == other.approximate
        )


def without(touches: Touches, past: Clock, new: Touch) -> Touches:
    """Replace what comes before a new touch by it."""
    if not touches or (len(touches) == 1 and touches[0].tick <= past[touches[0].slot]):
        return (new,)
    return (*[touch for touch in touches if touch.tick > past[touch.slot]], new)


def _are_all_alike(some: Touches, others: Touches) -> bool:
    return len(some) == len(others) and all(map(are_alike, some, others))
