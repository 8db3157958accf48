"""Shadow memory: for each accessed byte range, the last accesses that a later access may race with.

Host and device addresses are treated alike. Exact accesses are stored for ranges (``segments``) and for
strided rows (``strided``), pointer arguments of kernels for single addresses (``pointers``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, islice
from typing import Final, Protocol

from cudakit.core.sanitize.access_state import (
    Accesses,
    AccessState,
    Pointer,
    Pointers,
    Segment,
    Segments,
)
from cudakit.core.sanitize.clocks import (
    ASSUMED,
    MERGED,
    NEVER,
    UNCERTAIN,
    WRITE,
    Call,
    Clock,
    MemoryAccess,
    Release,
)
from cudakit.core.sanitize.conflicts import ConflictChecker
from cudakit.core.sanitize.races import Allocation
from cudakit.core.sanitize.record_batch import AccessRow
from cudakit.core.sanitize.strided import Rows, Strided, rows_of

# Up to this count, rows are stored as ordinary ranges.
_FEW_ROWS = 16


class Position(Protocol):
    """A timeline, or one point of it."""

    @property
    def slot(self) -> int:
        """The index of the timeline in clocks."""

    @property
    def tick(self) -> int:
        """The tick of the next operation."""

    @property
    def past(self) -> Clock:
        """The clock of the next operation."""


class Shadow:
    """The shadow memory of one process.

    ``checks_nearby``: check also pointers that may be stale, and pointers to lower addresses of the same
    allocation, through which a kernel may reach the bytes. Such races are only possible.
    """

    def __init__(self, checker: ConflictChecker, *, checks_nearby: bool = False) -> None:
        self.checker = checker
        self.segments = Segments()
        self.strided = Strided()
        self.pointers = Pointers()
        self._checks_nearby = checks_nearby
        self._rows = self.strided.states
        self._points = self.pointers.known

    def add(self, access: MemoryAccess, past: Clock, stride: int = 0, count: int = 0) -> None:
        """Check and store an access, strided or not, exact or assumed."""
        if access.known == UNCERTAIN and not self._checks_nearby:
            return
        if access.known >= ASSUMED:
            self.add_pointer(access, past)
        elif count > 1:
            self.add_rows(access, past, rows_of(access.lo, access.hi, stride, count))
        elif access.lo < access.hi:
            self.add_range(access, past)

    def add_all(self, rows: Iterable[AccessRow], call: Call, position: Position) -> None:
        """Check and store the accesses of a launch.

        Inlines the two most frequent cases: an access to exactly one segment, and a pointer seen before, both
        without states of other kinds at these addresses.
        """
        slot, tick, past = position.slot, position.tick, position.past
        segments, pointers = self.segments.by_start, self.pointers.known
        strided, checks_nearby = self.strided.states, self._checks_nearby
        for lo, hi, mode, known, stride, count, _ in rows:
            access = MemoryAccess(slot, tick, call, lo, hi, mode, known)
            if strided or count > 1 or checks_nearby or known == UNCERTAIN:
                self.add(access, past, stride, count)
            elif known == ASSUMED:
                pointer = pointers.get(lo)
                is_beside = not segments or self.segments.at(lo).hi <= lo
                if pointer and is_beside and pointer.add_if_ordered(access, past):
                    continue
                self.add_pointer(access, past)
            else:
                segment = segments.get(lo)
                if (
                    segment
                    and segment.hi == hi
                    and not pointers
                    and segment.add_if_ordered(access, past)
                ):
                    continue
                self.add(access, past)

    def add_range(self, access: MemoryAccess, past: Clock) -> None:
        """Check and store an access to a contiguous range."""
        self._add_range(access, past)
        if self.checker.pending:
            self.checker.report()

    def add_rows(self, access: MemoryAccess, past: Clock, rows: Rows) -> None:
        """Check and store an access to rows."""
        if rows.count <= _FEW_ROWS:
            for lo, hi in rows.ranges():
                self._add_range(_sub_access(access, lo, hi), past)
            self.checker.report()
            return
        check, mode = self.checker.check, access.mode
        for segment in self.segments.overlapping(rows.lo, rows.hi):
            if shared := rows.shared_with_range(segment.lo, segment.hi):
                conflicting = segment.unordered(mode, past)
                exact = not segment.merged and all(other.known != MERGED for other in conflicting)
                check(segment, conflicting, access, past, shared, share_bytes=exact)
        for state, shared in self.strided.sharing_rows(rows):
            check(state, state.unordered(mode, past), access, past, shared)
        for pointer in self.pointers.overlapping(rows.lo, rows.hi):
            if shared := rows.shared_with_range(pointer.address, pointer.address + 1):
                check(pointer, pointer.unordered(mode, past), access, past, shared)
        own = self.strided.state(rows)
        check(own, own.unordered(mode, past), access, past, (rows.lo, rows.hi))
        own.store(access, past)
        self.checker.report()

    def add_pointer(self, access: MemoryAccess, past: Clock) -> None:
        """Check and store a pointer argument of a kernel."""
        lo = access.lo
        pointer = self._points.get(lo) or self.pointers.at(lo)
        if not pointer.add_if_ordered(access, past):
            conflicting = pointer.unordered(access.mode, past)
            self.checker.check(pointer, conflicting, access, past, (lo, lo + 1))
            pointer.store(access, past)
        segment = self.segments.at(lo)
        if segment.hi > lo and (conflicting := segment.unordered(access.mode, past)):
            shared = (lo, min(segment.hi, access.hi))
            exact = not segment.merged
            self.checker.check(segment, conflicting, access, past, shared, share_bytes=exact)
        if self._rows:
            for state, shared in self.strided.sharing_range(lo, lo + 1):
                self.checker.check(state, state.unordered(access.mode, past), access, past, shared)
        if self._checks_nearby:
            self._check_ranges_behind(access, past)
        if self.checker.pending:
            self.checker.report()

    def freed_before(self, lo: int, hi: int) -> list[Release]:
        """List the releases of stream-ordered frees after which memory of a range can be reused."""
        writes = (segment.write for segment in self.segments.overlapping(lo, hi))
        releases = (write.call.release for write in writes if write and write.tick == NEVER)
        return [release for release in releases if release is not None]

    def clear(self, lo: int, hi: int) -> None:
        """Remove all accesses to a range."""
        self.segments.clear(lo, hi)
        self.strided.clear(lo, hi)
        self.pointers.clear(lo, hi)

    def _add_range(self, access: MemoryAccess, past: Clock) -> None:
        segment = self.segments.by_start.get(access.lo)
        if segment is None or segment.hi != access.hi or not segment.add_if_ordered(access, past):
            self._add_to_segments(access, past)
        if self._rows:
            self._check_strided(access, past)
        if self._points or self._checks_nearby:
            self._check_pointers(access, past)

    def _add_to_segments(self, access: MemoryAccess, past: Clock) -> None:
        """Check and store an access to several segments, and join those that become equivalent."""
        for segment in self.segments.split(access.lo, access.hi):
            if conflicting := segment.unordered(access.mode, past):
                shared = (segment.lo, segment.hi)
                exact = not segment.approximate
                self.checker.check(segment, conflicting, access, past, shared, share_bytes=exact)
            segment.store(access, past)
        self.segments.merge(access.lo, access.hi)

    def _check_strided(self, access: MemoryAccess, past: Clock) -> None:
        exact = access.known != MERGED
        for state, shared in self.strided.sharing_range(access.lo, access.hi):
            conflicting = state.unordered(access.mode, past)
            self.checker.check(state, conflicting, access, past, shared, share_bytes=exact)
        if access.mode & WRITE:
            self.strided.clear(access.lo, access.hi)

    def _check_pointers(self, access: MemoryAccess, past: Clock) -> None:
        for pointer in self.pointers.overlapping(access.lo, access.hi):
            if conflicting := pointer.unordered(access.mode, past):
                self.checker.check(pointer, conflicting, access, past, (pointer.address, access.hi))
            if access.mode & WRITE:
                pointer.clear()
        if self._checks_nearby:
            self._check_pointers_before(access, past)

    def _check_pointers_before(self, access: MemoryAccess, past: Clock) -> None:
        for pointer in self.pointers.overlapping(0, access.lo):
            conflicting = [
                one for one in pointer.unordered(access.mode, past) if one.hi > access.lo
            ]
            self.checker.check(
                pointer, conflicting, access, past, (access.lo, access.hi), share_bytes=False
            )

    def _check_ranges_behind(self, access: MemoryAccess, past: Clock) -> None:
        for segment in self.segments.overlapping(access.lo + 1, access.hi):
            if segment.lo > access.lo:
                conflicting = segment.unordered(access.mode, past)
                self.checker.check(
                    segment, conflicting, access, past, (segment.lo, segment.hi), share_bytes=False
                )


def _sub_access(access: MemoryAccess, lo: int, hi: int) -> MemoryAccess:
    return MemoryAccess(access.slot, access.tick, access.call, lo, hi, access.mode, access.known)


# Above this count, the segments of one allocation are merged to half as many.
MOST_SEGMENTS: Final = 1 << 15

# Returns whether all work enqueued from now on happens after a tick of a slot.
PrecedesFuture = Callable[[int, int], bool]


def prune(shadow: Shadow, precedes_future: PrecedesFuture) -> None:
    """Remove the accesses that all future work happens after."""
    shadow.segments.rebuild(
        lambda segments: [one for one in segments if _clean_state(one, precedes_future)]
    )
    shadow.strided.keep(lambda _, state: _clean_state(state, precedes_future))
    shadow.pointers.keep(lambda pointer: _clean_pointer(pointer, precedes_future))


def coarsen(shadow: Shadow, allocation_at: Callable[[int], Allocation | None]) -> None:
    """Merge segments of the allocations that have too many.

    A later access to a part of a merged segment makes a race possible at most. Outside known
    allocations, the oldest segments are removed instead.
    """

    def change(segments: list[Segment]) -> list[Segment]:
        changed: list[Segment] = []
        for owner, group in groupby(segments, key=lambda segment: allocation_at(segment.lo)):
            owned = list(group)
            if len(owned) > MOST_SEGMENTS:
                owned = list(_merged(owned)) if owner else _most_recent(owned)
            changed += owned
        return changed

    shadow.segments.rebuild(change)


def _clean_state(state: AccessState, precedes_future: PrecedesFuture) -> bool:
    """Remove the accesses that all future work happens after; return whether any is left."""
    if state.write is not None and precedes_future(state.write.slot, state.write.tick):
        state.write = None
    state.reads = _relevant(state.reads, precedes_future)
    state.atomics = _relevant(state.atomics, precedes_future)
    left = {id(access) for access in (state.write, *state.reads, *state.atomics)}
    state.already_reported = tuple(pair for pair in state.already_reported if id(pair[0]) in left)
    return left != {id(None)}


def _clean_pointer(pointer: Pointer, precedes_future: PrecedesFuture) -> bool:
    pointer.writers = _relevant(pointer.writers, precedes_future)
    pointer.readers = _relevant(pointer.readers, precedes_future)
    left = {id(access) for access in pointer.writers + pointer.readers}
    pointer.already_reported = tuple(
        pair for pair in pointer.already_reported if id(pair[0]) in left
    )
    return bool(left)


def _relevant(accesses: Accesses, precedes_future: PrecedesFuture) -> Accesses:
    return tuple(access for access in accesses if not precedes_future(access.slot, access.tick))


def _merged(segments: list[Segment]) -> Iterator[Segment]:
    """Merge adjacent segments, to half of the limit. Drop those of freed memory."""
    live = iter(
        [segment for segment in segments if segment.write is None or segment.write.tick != NEVER]
    )
    count = -(-len(segments) * 2 // MOST_SEGMENTS)
    while adjacent := list(islice(live, count)):
        merged = Segment(adjacent[0].lo, adjacent[-1].hi)
        writes = [segment.write for segment in adjacent if segment.write]
        merged.write = max(writes, key=lambda write: write.call.seq, default=None)
        merged.reads = _last_per_stream(
            [access for segment in adjacent for access in segment.reads]
        )
        merged.atomics = _last_per_stream(
            [access for segment in adjacent for access in segment.atomics]
        )
        merged.already_reported = tuple(
            pair for segment in adjacent for pair in segment.already_reported
        )
        merged.merged = True
        merged.approximate = any(segment.approximate for segment in adjacent)
        yield merged


def _last_per_stream(accesses: list[MemoryAccess]) -> Accesses:
    """Return the last access of each stream."""
    in_order = sorted(accesses, key=lambda access: access.tick)
    return tuple({(access.slot, access.call.node): access for access in in_order}.values())


def _most_recent(segments: list[Segment]) -> list[Segment]:
    seqs = sorted(_last_seq(segment) for segment in segments)
    middle = seqs[-MOST_SEGMENTS // 2]
    return [segment for segment in segments if _last_seq(segment) >= middle][-MOST_SEGMENTS:]


def _last_seq(segment: Segment) -> int:
    accesses = (segment.write, *segment.reads, *segment.atomics)
    return max((access.call.seq for access in accesses if access), default=0)
