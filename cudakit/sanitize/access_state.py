"""Access states: for some bytes, the earlier accesses that a later access may race with.

A state has the last write, and the latest reads and atomics since that write. A read that happens before
another read is dropped, because every access that races with the earlier read also races with the later one.
So a state has at most one read per stream: it stays small, and no race is lost. There are states for ranges
of bytes and for the pointer arguments of kernels.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

from cudakit.sanitize.clocks import ATOMIC, NEVER, WRITE, Clock, MemoryAccess, are_equivalent

Accesses: TypeAlias = tuple[MemoryAccess, ...]

# The earlier and the later access of a reported race. A third access that races with the earlier one, and
# that is ordered after the later one, is not reported: the fix of the reported race would order it, too.
ReportedPairs: TypeAlias = tuple[tuple[MemoryAccess, MemoryAccess], ...]


class AccessState:
    """The accesses to some bytes. The collections are tuples, so that copies of a state can share them."""

    __slots__ = (
        "atomics",
        "is_approximate",
        "is_merged",
        "last_write",
        "reads",
        "reported_pairs",
    )

    def __init__(self) -> None:
        self.last_write: MemoryAccess | None = None
        self.reads: Accesses = ()
        self.atomics: Accesses = ()
        self.reported_pairs: ReportedPairs = ()
        # Whether this state was merged from several states, so that each access is to some of the
        # bytes only.
        self.is_merged = False
        # Whether this state was split off a merged state, so that an access may be to none of the
        # bytes.
        self.is_approximate = False

    def unordered_accesses(self, mode: int, clock: Clock) -> Sequence[MemoryAccess]:
        """List the stored accesses that conflict with an access of this mode and do not happen before it.

        Reads and atomics are ordered after the last write, or were reported. So if there is a conflicting
        read or atomic, the write needs no check, except in a merged state, whose accesses may be to different
        bytes.
        """
        if mode & ATOMIC:
            candidates = self.reads
        elif mode & WRITE:
            candidates = self.reads + self.atomics if self.atomics else self.reads
        else:
            candidates = self.atomics
        conflicting_accesses = [access for access in candidates if access.tick > clock[access.slot]]
        if not candidates or self.is_merged:
            write = self.last_write
            if write is not None and write.tick > clock[write.slot]:
                conflicting_accesses.append(write)
        return conflicting_accesses

    def store(self, access: MemoryAccess, clock: Clock) -> None:
        """Store an access, and remove the accesses of the same kind that happen before it."""
        write, mode = self.last_write, access.mode
        if write is not None and write.tick == NEVER:
            return  # the memory was freed, and one use after a free is enough to report
        if mode & ATOMIC:
            self.atomics = replace_ordered(self.atomics, clock, access)
        elif mode & WRITE:
            self.last_write = access
            self.reads = self.atomics = self.reported_pairs = ()
            self.is_merged = self.is_approximate = False
        else:
            self.reads = replace_ordered(self.reads, clock, access)

    def copy_from(self, source_state: AccessState) -> None:
        """Become a copy of another state."""
        self.last_write, self.reads, self.atomics = (
            source_state.last_write,
            source_state.reads,
            source_state.atomics,
        )
        self.reported_pairs = source_state.reported_pairs
        self.is_merged, self.is_approximate = source_state.is_merged, source_state.is_approximate

    def is_equivalent(self, other_state: AccessState) -> bool:
        """Return whether two states conflict with the same accesses, and are reported in the same way."""
        return (
            are_equivalent(self.last_write, other_state.last_write)
            and _are_all_equivalent(self.reads, other_state.reads)
            and _are_all_equivalent(self.atomics, other_state.atomics)
            and not self.reported_pairs
            and not other_state.reported_pairs
            and (self.is_merged, self.is_approximate)
            == (other_state.is_merged, other_state.is_approximate)
        )


def replace_ordered(accesses: Accesses, clock: Clock, new_access: MemoryAccess) -> Accesses:
    """Return the accesses and a new access, without the accesses that happen before the new one."""
    if not accesses or (len(accesses) == 1 and accesses[0].tick <= clock[accesses[0].slot]):
        return (new_access,)
    return (*[access for access in accesses if access.tick > clock[access.slot]], new_access)


def _are_all_equivalent(accesses: Accesses, other_accesses: Accesses) -> bool:
    return len(accesses) == len(other_accesses) and all(
        map(are_equivalent, accesses, other_accesses)
    )


class RangeState(AccessState):
    """The state of the bytes from ``lo`` up to ``hi``, all of which have the same accesses."""

    __slots__ = ("hi", "lo")

    def __init__(self, lo: int, hi: int) -> None:
        super().__init__()
        self.lo = lo
        self.hi = hi


class RangeStates:
    """The states of all accessed bytes: disjoint ranges, in order of their addresses."""

    def __init__(self) -> None:
        # A sentinel below all addresses, so that each address has a range that begins at or below it.
        self._states = [RangeState(-1, -1)]
        self._starts = [-1]

    def __len__(self) -> int:
        return len(self._states) - 1

    def __iter__(self) -> Iterator[RangeState]:
        return iter(self._states[1:])

    def last_beginning_at_or_below(self, address: int) -> RangeState:
        """Return the last range that begins at or below an address. The range may end below the address."""
        return self._states[bisect_right(self._starts, address) - 1]

    def find_overlapping(self, lo: int, hi: int) -> list[RangeState]:
        """List the states that have bytes between two addresses."""
        begin = bisect_right(self._starts, lo) - 1
        if self._states[begin].hi <= lo:
            begin += 1
        return self._states[begin : bisect_left(self._starts, hi, lo=begin)]

    def split_to_cover(self, lo: int, hi: int) -> list[RangeState]:
        """Return states that cover exactly the bytes from ``lo`` up to ``hi``.

        Splits existing ranges at both ends, and adds new states in the gaps.
        """
        self._split_at(lo)
        self._split_at(hi)
        begin, end = bisect_left(self._starts, lo), bisect_left(self._starts, hi)
        covering_states = list(_fill_gaps(self._states[begin:end], lo, hi))
        if len(covering_states) != end - begin:
            self._replace(begin, end, covering_states)
        return covering_states

    def merge_equivalent(self, lo: int, hi: int) -> None:
        """Merge adjacent equivalent states, from the one before ``lo`` to the one after ``hi``."""
        begin = max(bisect_left(self._starts, lo) - 1, 1)
        end = bisect_right(self._starts, hi)
        states = self._states[begin:end]
        merged_states = states[:1]
        for state, next_state in pairwise(states):
            if state.hi == next_state.lo and merged_states[-1].is_equivalent(next_state):
                merged_states[-1].hi = next_state.hi
            else:
                merged_states.append(next_state)
        if len(merged_states) != len(states):
            self._replace(begin, end, merged_states)

    def clear(self, lo: int, hi: int) -> None:
        """Remove all accesses to the bytes from ``lo`` up to ``hi``."""
        if self.find_overlapping(lo, hi):
            self._split_at(lo)
            self._split_at(hi)
            self._replace(bisect_left(self._starts, lo), bisect_left(self._starts, hi), [])

    def rebuild(self, transform: Callable[[list[RangeState]], list[RangeState]]) -> None:
        """Replace all states by those that a function returns for them."""
        self._replace(1, len(self._states), transform(self._states[1:]))

    def _split_at(self, address: int) -> None:
        """Split the range that has an address inside; do nothing if there is no such range."""
        index = bisect_left(self._starts, address) - 1
        left_state = self._states[index]
        if left_state.hi > address:
            left_state.is_approximate |= left_state.is_merged
            right_state = RangeState(address, left_state.hi)
            right_state.copy_from(left_state)
            left_state.hi = address
            self._replace(index + 1, index + 1, [right_state])

    def _replace(self, begin: int, end: int, new_states: list[RangeState]) -> None:
        """Replace the states from one index up to another."""
        self._states[begin:end] = new_states
        self._starts[begin:end] = [state.lo for state in new_states]


def _fill_gaps(states: list[RangeState], lo: int, hi: int) -> Iterator[RangeState]:
    """Yield the states between two addresses, with new states in the gaps."""
    for state in states:
        if lo < state.lo:
            yield RangeState(lo, state.lo)
        yield state
        lo = state.hi
    if lo < hi:
        yield RangeState(lo, hi)


# Maximum number of stored pointers. Above it, the least recently used half is removed.
MAX_POINTER_STATES = 1 << 16


class PointerState:
    """The kernels that got one pointer as an argument, without those that happen before another of them.

    The number of bytes that a kernel accesses through the pointer is unknown, because pools divide large
    allocations. Therefore the access counts as an access to one address.
    """

    __slots__ = ("address", "readers", "reported_pairs", "writers")

    is_merged = False

    def __init__(self, address: int) -> None:
        self.address = address
        self.writers: Accesses = ()
        self.readers: Accesses = ()
        self.reported_pairs: ReportedPairs = ()

    def unordered_accesses(self, mode: int, clock: Clock) -> Sequence[MemoryAccess]:
        """List the stored kernels that may race with an access of this mode whose clock is ``clock``."""
        accesses = self.writers + self.readers if mode & WRITE else self.writers
        return [access for access in accesses if access.tick > clock[access.slot]]

    def store(self, access: MemoryAccess, clock: Clock) -> None:
        """Store a kernel, and remove the kernels that happen before it."""
        if access.mode & WRITE:
            self.writers = replace_ordered(self.writers, clock, access)
            self.readers = tuple(read for read in self.readers if read.tick > clock[read.slot])
        else:
            self.readers = replace_ordered(self.readers, clock, access)

    def clear(self) -> None:
        """Remove all kernels. Call it after an exact write, which conflicts with the same later accesses."""
        self.writers = self.readers = self.reported_pairs = ()

    @property
    def last_seq(self) -> int:
        """The number of the last call with the pointer among its arguments; 0 if there is none."""
        return max((access.call.seq for access in self.writers + self.readers), default=0)


class PointerStates:
    """The pointer arguments of all kernels."""

    def __init__(self) -> None:
        self.states_by_address: dict[int, PointerState] = {}
        self._addresses: list[int] = []

    def __len__(self) -> int:
        return len(self.states_by_address)

    def get_or_create(self, address: int) -> PointerState:
        """Return the state of a pointer; create it if there is none."""
        pointer = self.states_by_address.get(address)
        if pointer is None:
            if len(self.states_by_address) >= MAX_POINTER_STATES:
                self._remove_half()
            pointer = self.states_by_address[address] = PointerState(address)
            insort(self._addresses, address)
        return pointer

    def find_overlapping(self, lo: int, hi: int) -> list[PointerState]:
        """List the pointers to bytes from ``lo`` up to ``hi``."""
        begin = bisect_left(self._addresses, lo)
        if begin == len(self._addresses) or self._addresses[begin] >= hi:
            return []
        end = bisect_left(self._addresses, hi, lo=begin)
        return [self.states_by_address[address] for address in self._addresses[begin:end]]

    def clear(self, lo: int, hi: int) -> None:
        """Remove the pointers to bytes from ``lo`` up to ``hi``."""
        if self.find_overlapping(lo, hi):
            self.remove_unless(lambda pointer: not lo <= pointer.address < hi)

    def remove_unless(self, predicate: Callable[[PointerState], bool]) -> None:
        """Remove all pointers for which the predicate is False."""
        for pointer_state in [
            state for state in self.states_by_address.values() if not predicate(state)
        ]:
            del self.states_by_address[pointer_state.address]
        self._addresses = sorted(self.states_by_address)

    def _remove_half(self) -> None:
        """Remove the least recently used half of the pointers."""
        seqs = sorted(pointer_state.last_seq for pointer_state in self.states_by_address.values())
        median_seq = seqs[len(seqs) // 2]
        self.remove_unless(lambda pointer_state: pointer_state.last_seq > median_seq)
