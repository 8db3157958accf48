"""Find the NVTX ranges that were open in a thread when it launched GPU work."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from cudakit.profile.activities import Activities
from cudakit.profile.intervals import Ints, Times
from cudakit.trace.kinds import EventKind

# Maximum number of ranges that are open at once in a thread. Further ranges are ignored, so that programs
# that never end their ranges do not use ever more memory.
_MAX_OPEN_RANGES: Final = 64


class RangeKey(NamedTuple):
    """The name and the domain of a range, as indices of the string table."""

    name: int
    domain: int


@dataclass(slots=True)
class OpenRanges:
    """The combinations of ranges that were open, the outermost range first; combination 0 is empty."""

    paths: list[tuple[RangeKey, ...]] = field(default_factory=lambda: [()])
    _path_numbers: dict[tuple[RangeKey, ...], int] = field(default_factory=lambda: {(): 0})

    def path_number(self, path: tuple[RangeKey, ...]) -> int:
        """Return the number of a combination of ranges."""
        if path not in self._path_numbers:
            self._path_numbers[path] = len(self.paths)
            self.paths.append(path)
        return self._path_numbers[path]


@dataclass(slots=True)
class _Changes:
    """The times at which the open ranges change, and the number of the combination after each change."""

    time_ns: list[int] = field(default_factory=list)
    path: list[int] = field(default_factory=list)

    def paths_at(self, time_ns: Times) -> Ints:
        """Return the number of the combination of ranges that is open at each time."""
        index = np.searchsorted(np.array(self.time_ns, np.int64), time_ns, side="right")
        result: Ints = np.array([0, *self.path], np.int64)[index]
        return result


def open_ranges(
    activities: Activities, thread_numbers: Ints, times_ns: Times
) -> tuple[OpenRanges, Ints]:
    """Return the combinations of ranges, and for each thread and time the number of the open combination.

    Ranges of the process (``nvtxRangeStart``) contain the ranges of all threads.
    """
    ranges = OpenRanges()
    process_changes, thread_changes = _collect_changes(activities, ranges)
    process_path = process_changes.paths_at(times_ns)
    thread_path = np.zeros(len(times_ns), np.int64)
    for thread_number, changes in thread_changes.items():
        rows = np.flatnonzero(thread_numbers == np.uint64(thread_number))
        thread_path[rows] = changes.paths_at(times_ns[rows])
    if not process_changes.path:
        return ranges, thread_path
    path_count = len(ranges.paths)
    path_pairs, pair_of_time = np.unique(
        process_path * path_count + thread_path, return_inverse=True
    )
    path_numbers = [
        ranges.path_number(
            ranges.paths[path_pair // path_count] + ranges.paths[path_pair % path_count]
        )
        for path_pair in path_pairs.tolist()
    ]
    return ranges, np.array(path_numbers, np.int64)[pair_of_time]


def _collect_changes(
    activities: Activities, ranges: OpenRanges
) -> tuple[_Changes, dict[int, _Changes]]:
    """Return the changes of the ranges of the process, and those of each thread."""
    process_ranges: dict[int, RangeKey] = {}
    thread_ranges: defaultdict[int, list[RangeKey]] = defaultdict(list)
    process_changes = _Changes()
    thread_changes: defaultdict[int, _Changes] = defaultdict(_Changes)
    for time, is_pop, name, domain, thread, range_number in _read_events(activities):
        stack = thread_ranges[thread]
        if range_number and is_pop:
            process_ranges.pop(range_number, None)
        elif range_number and len(process_ranges) < _MAX_OPEN_RANGES:
            process_ranges[range_number] = RangeKey(name, domain)
        elif not range_number and is_pop:
            _remove_innermost(stack, domain)
        elif not range_number and len(stack) < _MAX_OPEN_RANGES:
            stack.append(RangeKey(name, domain))
        changes = process_changes if range_number else thread_changes[thread]
        path = tuple(process_ranges.values()) if range_number else tuple(stack)
        changes.time_ns.append(time)
        changes.path.append(ranges.path_number(path))
    return process_changes, thread_changes


def _remove_innermost(stack: list[RangeKey], domain: int) -> None:
    """Remove the innermost range of a domain."""
    for index in reversed(range(len(stack))):
        if stack[index].domain == domain:
            del stack[index]
            return


def _read_events(activities: Activities) -> Any:
    """Return the columns of the begins and ends of all NVTX ranges, sorted by time."""
    pushes, pops = (
        activities.records_of(EventKind.RANGE_PUSH),
        activities.records_of(EventKind.RANGE_POP),
    )
    time = np.concatenate([pushes["time_ns"], pops["time_ns"]])
    is_pop = np.repeat([False, True], [len(pushes), len(pops)])
    event_order = np.lexsort((is_pop, np.concatenate([pushes["seq"], pops["seq"]]), time))
    name = np.concatenate([pushes["name"], np.zeros(len(pops), np.uint32)])
    event_columns = [time, is_pop, name]
    event_columns += [
        np.concatenate([pushes[field_name], pops[field_name]])
        for field_name in ("domain", "thread", "number")
    ]
    return zip(*(column[event_order].tolist() for column in event_columns), strict=True)
