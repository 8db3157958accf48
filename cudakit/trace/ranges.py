"""Follow the named ranges of NVTX through a trace, to find the ranges that are open at each record.

The ranges of a thread nest within each domain. Ranges of the process have numbers, may be ended by any
thread, and are open for all threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.trace.kinds import EventKind
from cudakit.trace.layout import Records, view

# Maximum number of ranges that are open at once, in each thread and in the process. Further ranges are
# ignored, so that programs that never end their ranges do not use ever more memory.
_MAX_OPEN_RANGES: Final = 1024


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


class RangeTracker:
    """Tracks the open NVTX ranges of one trace, whose records are passed in the order of their calls."""

    def __init__(self) -> None:
        # Ranges of the process by number, in the order in which they began.
        self._process_ranges: dict[int, _Range] = {}
        # Ranges of each thread, outermost first.
        self._thread_ranges: dict[int, list[_Range]] = {}
        # The innermost open range of each thread, computed when a record of the thread needs it.
        self._innermost_by_thread: dict[int, OpenRange | None] = {}

    def follow(self, records: Records) -> OpenRanges | None:
        """Return the innermost range that is open at each record; None if no record has an open range."""
        kinds = records["kind"]
        changes = np.flatnonzero((kinds == EventKind.RANGE_PUSH) | (kinds == EventKind.RANGE_POP))
        if not len(changes) and not self._process_ranges and not self._thread_ranges:
            return None
        threads = records["thread"].tolist()
        innermost_ranges_of_rows: list[OpenRange | None] = []
        rows = zip(changes.tolist(), _rows(records[changes]), strict=True)
        for index, (kind, name, domain, range_number) in rows:
            innermost_ranges_of_rows += self._innermost_ranges(
                islice(threads, len(innermost_ranges_of_rows), index)
            )
            if kind == EventKind.RANGE_PUSH:
                self._push(threads[index], _Range(name, domain), range_number)
            else:
                self._pop(threads[index], domain, range_number)
        innermost_ranges_of_rows += self._innermost_ranges(
            islice(threads, len(innermost_ranges_of_rows), None)
        )
        innermost_ranges = np.empty(len(records), np.object_)
        innermost_ranges[:] = innermost_ranges_of_rows
        return innermost_ranges

    def _innermost_ranges(self, threads: Iterator[int]) -> Iterator[OpenRange | None]:
        """Yield the innermost open range of each thread."""
        computed_ranges = self._innermost_by_thread
        for thread in threads:
            if thread not in computed_ranges:
                computed_ranges[thread] = self._nested_ranges(thread)
            yield computed_ranges[thread]

    def _nested_ranges(self, thread: int) -> OpenRange | None:
        """Return the innermost open range of a thread, with the ranges that contain it."""
        innermost_range: OpenRange | None = None
        for name, domain in (*self._process_ranges.values(), *self._thread_ranges.get(thread, ())):
            innermost_range = OpenRange(name, domain, innermost_range)
        return innermost_range

    def _push(self, thread: int, new_range: _Range, range_number: int) -> None:
        if range_number:
            if len(self._process_ranges) < _MAX_OPEN_RANGES:
                self._process_ranges[range_number] = new_range
            self._innermost_by_thread.clear()
            return
        thread_ranges = self._thread_ranges.setdefault(thread, [])
        if len(thread_ranges) < _MAX_OPEN_RANGES:
            thread_ranges.append(new_range)
        self._innermost_by_thread.pop(thread, None)

    def _pop(self, thread: int, domain: int, range_number: int) -> None:
        if range_number:
            self._process_ranges.pop(range_number, None)
            self._innermost_by_thread.clear()
            return
        thread_ranges = self._thread_ranges.get(thread, [])
        for index in reversed(range(len(thread_ranges))):
            if thread_ranges[index].domain == domain:
                del thread_ranges[index]
                break
        if not thread_ranges:
            self._thread_ranges.pop(thread, None)
        self._innermost_by_thread.pop(thread, None)


def _rows(changes: Records) -> Iterator[tuple[Any, ...]]:
    """Yield kind, name, domain and number of the begins and ends of ranges; an end has no name."""
    kinds = changes["kind"]
    pushes, pops = view(changes, EventKind.RANGE_PUSH), view(changes, EventKind.RANGE_POP)
    is_push = kinds == EventKind.RANGE_PUSH
    names = np.where(is_push, pushes["name"], 0)
    domains = np.where(is_push, pushes["domain"], pops["domain"])
    range_numbers = np.where(is_push, pushes["number"], pops["number"])
    return zip(
        kinds.tolist(), names.tolist(), domains.tolist(), range_numbers.tolist(), strict=True
    )
