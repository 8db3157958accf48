"""Follow the named ranges of NVTX through a trace, to find the ranges that are open at each record.

The ranges of a thread nest within each domain. Ranges of the process have numbers, may be ended by any
thread, and are open for all threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.trace.kinds import EventKind
from cudakit.trace.layout import Records, take_records, view

# Maximum number of ranges that are open at once, in each thread and in the process. Further ranges are
# ignored, so that programs that never end their ranges do not use ever more memory.
_MAX_OPEN_RANGES: Final = 1024
# Plain integers are faster to compare than enumerations.
_PUSH: Final = int(EventKind.RANGE_PUSH)
_POP: Final = int(EventKind.RANGE_POP)


@dataclass(frozen=True, slots=True)
class OpenRange:
    """An open NVTX range, and the ranges that contain it."""

    name: int  # index of the name in the string table
    domain: int  # index of the domain's name in the string table; 0 for NVTX's default domain
    outer_range: OpenRange | None = None  # range that contains this range

    def __iter__(self) -> Iterator[OpenRange]:
        """Yield this range and the ranges that contain it, the innermost first."""
        open_range: OpenRange | None = self
        while open_range:
            yield open_range
            open_range = open_range.outer_range


# The innermost range that is open at each record.
OpenRanges: TypeAlias = npt.NDArray[np.object_]


class _Range(NamedTuple):
    name: int
    domain: int


class _ThreadRanges:
    """The open ranges of one thread."""

    __slots__ = ("nested_ranges", "ranges")

    def __init__(self) -> None:
        self.ranges: list[_Range] = []  # outermost first
        # The first of ``ranges``, each with the ranges that contain it, computed when a record needs them.
        self.nested_ranges: list[OpenRange] = []

    def push(self, new_range: _Range) -> None:
        if len(self.ranges) < _MAX_OPEN_RANGES:
            self.ranges.append(new_range)

    def pop(self, domain: int) -> None:
        """Remove the innermost range of a domain, if there is one."""
        for index in reversed(range(len(self.ranges))):
            if self.ranges[index].domain == domain:
                del self.ranges[index]
                del self.nested_ranges[index:]
                return

    def innermost(self, process_range: OpenRange | None) -> OpenRange | None:
        """Return the innermost range; ``process_range``, which contains all of them, if there is none."""
        nested_ranges = self.nested_ranges
        for name, domain in self.ranges[len(nested_ranges) :]:
            outer_range = nested_ranges[-1] if nested_ranges else process_range
            nested_ranges.append(OpenRange(name, domain, outer_range))
        return nested_ranges[-1] if nested_ranges else process_range


class RangeTracker:
    """Tracks the open NVTX ranges of one trace, whose records are passed in the order of their calls."""

    def __init__(self) -> None:
        # Ranges of the process by number, in the order in which they began.
        self._process_ranges: dict[int, _Range] = {}
        self._innermost_process_range: OpenRange | None = None
        # Ranges of each thread that has open ranges.
        self._thread_ranges: dict[int, _ThreadRanges] = {}

    def follow(self, records: Records) -> OpenRanges | None:
        """Return the innermost range that is open at each call; None if no call has an open range.

        Accesses and other records that are no calls have None.
        """
        kinds = records["kind"]
        is_change = (kinds == EventKind.RANGE_PUSH) | (kinds == EventKind.RANGE_POP)
        if not self._process_ranges and not self._thread_ranges and not is_change.any():
            return None
        is_call = (kinds != EventKind.ACCESS) & (kinds != EventKind.ACCESSED) & ~is_change
        rows = _Rows.of(take_records(records, is_change | is_call)).without_empty_ranges()
        ranges_of_calls: list[OpenRange | None] = []
        for kind, thread, name, domain, range_number in rows:
            if kind == _PUSH:
                self._push(thread, _Range(name, domain), range_number)
            elif kind == _POP:
                self._pop(thread, domain, range_number)
            else:
                thread_ranges = self._thread_ranges.get(thread)
                process_range = self._innermost_process_range
                ranges_of_calls.append(
                    thread_ranges.innermost(process_range) if thread_ranges else process_range
                )
        innermost_ranges = np.empty(len(records), np.object_)
        innermost_ranges[is_call] = ranges_of_calls
        return innermost_ranges

    def _push(self, thread: int, new_range: _Range, range_number: int) -> None:
        if not range_number:
            self._thread_ranges.setdefault(thread, _ThreadRanges()).push(new_range)
        elif len(self._process_ranges) < _MAX_OPEN_RANGES:
            self._process_ranges[range_number] = new_range
            self._nest_process_ranges()

    def _pop(self, thread: int, domain: int, range_number: int) -> None:
        if range_number:
            self._process_ranges.pop(range_number, None)
            self._nest_process_ranges()
        elif thread_ranges := self._thread_ranges.get(thread):
            thread_ranges.pop(domain)
            if not thread_ranges.ranges:
                del self._thread_ranges[thread]

    def _nest_process_ranges(self) -> None:
        """Compute the innermost range of the process after a change: the ranges of all threads are in it."""
        self._innermost_process_range = None
        for name, domain in self._process_ranges.values():
            self._innermost_process_range = OpenRange(name, domain, self._innermost_process_range)
        for thread_ranges in self._thread_ranges.values():
            thread_ranges.nested_ranges.clear()


class _Rows:
    """The kind, thread, name, domain and number of ranges' begins and ends, and of calls.

    Of a call, the name, domain and number have no meaning. An end has no name.
    """

    def __init__(self, columns: npt.NDArray[np.int64]) -> None:
        self._columns = columns

    @staticmethod
    def of(records: Records) -> _Rows:
        """Return the rows of records."""
        kinds = records["kind"]
        pushes, pops = view(records, EventKind.RANGE_PUSH), view(records, EventKind.RANGE_POP)
        is_push = kinds == EventKind.RANGE_PUSH
        names = np.where(is_push, pushes["name"], 0)
        domains = np.where(is_push, pushes["domain"], pops["domain"])
        range_numbers = np.where(is_push, pushes["number"], pops["number"])
        return _Rows(np.array([kinds, records["thread"], names, domains, range_numbers], np.int64))

    def __iter__(self) -> Iterator[tuple[int, int, int, int, int]]:
        kinds, threads, names, domains, range_numbers = self._columns.tolist()
        return zip(kinds, threads, names, domains, range_numbers, strict=True)

    def without_empty_ranges(self) -> _Rows:
        """Return the rows without the ranges of threads that contain no call, as most ranges of JAX."""
        columns = self._columns
        while True:
            kinds, threads, _, domains, range_numbers = columns
            is_empty_range = (
                (kinds[:-1] == EventKind.RANGE_PUSH)
                & (kinds[1:] == EventKind.RANGE_POP)
                & (threads[:-1] == threads[1:])
                & (domains[:-1] == domains[1:])
                & (range_numbers[:-1] == 0)
                & (range_numbers[1:] == 0)
            )
            if not is_empty_range.any():
                return _Rows(columns)
            is_dropped = np.append(is_empty_range, False)
            is_dropped[1:] |= is_empty_range
            columns = columns[:, ~is_dropped]
