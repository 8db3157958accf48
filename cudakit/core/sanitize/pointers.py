"""What kernels may do through the pointers among their arguments.

How far they reach is not known, as pools hand out parts of large allocations: each pointer is a point.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

from cudakit.core.sanitize.calls import WRITE, Touch
from cudakit.core.sanitize.cells import Pardon, Touches, without
from cudakit.core.sanitize.clocks import Clock

# So many pointers are remembered; beyond, the half that was used longest ago is forgotten.
MOST_POINTERS = 1 << 16


class Pointer:
    """The kernels that were given one pointer: those that may write there, and those that only read.

    Of each, only those that no other one of them comes after.
    """

    __slots__ = ("address", "pardons", "readers", "writers")

    approximate = False

    def __init__(self, address: int) -> None:
        self.address = address
        self.writers: Touches = ()
        self.readers: Touches = ()
        self.pardons: tuple[Pardon, ...] = ()

    def takes(self, touch: Touch, past: Clock) -> bool:
        """Keep a kernel where nothing unordered was given the pointer; else return False."""
        writers = self.writers
        if self.readers or len(writers) > 1:
            return False
        if writers and writers[0].tick > past[writers[0].slot]:
            return False
        if not touch.mode & WRITE:
            return False
        self.writers = (touch,)
        return True

    def unordered(self, mode: int, past: Clock) -> Sequence[Touch]:
        """List what an access of a mode may conflict with, and does not come after."""
        touches = self.writers + self.readers if mode & WRITE else self.writers
        return [touch for touch in touches if touch.tick > past[touch.slot]]

    def store(self, touch: Touch, past: Clock) -> None:
        """Keep a kernel, and forget those that it comes after and stands for."""
        if touch.mode & WRITE:
            self.writers = without(self.writers, past, touch)
            self.readers = tuple(read for read in self.readers if read.tick > past[read.slot])
        else:
            self.readers = without(self.readers, past, touch)

    def clear(self) -> None:
        """Forget all: what conflicts with any of it conflicts with a later write, which is exact."""
        self.writers = self.readers = self.pardons = ()

    @property
    def last_seq(self) -> int:
        """The last call that was given the pointer."""
        return max((touch.call.seq for touch in self.writers + self.readers), default=0)


class Pointers:
    """All pointers that kernels were given."""

    def __init__(self) -> None:
        self.known: dict[int, Pointer] = {}
        self._addresses: list[int] = []

    def at(self, address: int) -> Pointer:
        """Return what is known of one pointer."""
        found = self.known.get(address)
        if found is None:
            if len(self.known) >= MOST_POINTERS:
                self._forget_half()
            found = self.known[address] = Pointer(address)
            insort(self._addresses, address)
        return found

    def within(self, lo: int, hi: int) -> list[Pointer]:
        """List the pointers into a range."""
        begin = bisect_left(self._addresses, lo)
        if begin == len(self._addresses) or self._addresses[begin] >= hi:
            return []
        end = bisect_left(self._addresses, hi, lo=begin)
        return [self.known[address] for address in self._addresses[begin:end]]

    def clear(self, lo: int, hi: int) -> None:
        """Forget the pointers into a range."""
        if self.within(lo, hi):
            self.keep(lambda pointer: not lo <= pointer.address < hi)

    def keep(self, wanted: Callable[[Pointer], bool]) -> None:
        """Forget all pointers but those."""
        for pointer in [one for one in self.known.values() if not wanted(one)]:
            del self.known[pointer.address]
        self._addresses = sorted(self.known)

    def _forget_half(self) -> None:
        seqs = sorted(pointer.last_seq for pointer in self.known.values())
        middle = seqs[len(seqs) // 2]
        self.keep(lambda pointer: pointer.last_seq > middle)
