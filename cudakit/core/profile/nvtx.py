"""Find the NVTX ranges that were open in a thread when it launched GPU work."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from cudakit.core.profile.activities import Activities
from cudakit.core.profile.intervals import Times
from cudakit.trace.kinds import EventKind

# Maximum number of ranges that are open at once in a thread. More are ignored, so that programs that never
# end their ranges do not use ever more memory.
_MAX_OPEN_RANGES: Final = 256


class RangeKey(NamedTuple):
    """The name and the domain of a range, as indices of the string table."""

    name: int
    domain: int


@dataclass(slots=True)
class OpenRanges:
    """The combinations of ranges that were open, the outermost range first; combination 0 is empty."""

    paths: list[tuple[RangeKey, ...]] = field(default_factory=lambda: [()])
    _numbers: dict[tuple[RangeKey, ...], int] = field(default_factory=lambda: {(): 0})

    def number(self, path: tuple[RangeKey, ...]) -> int:
        """Return the number of a combination of ranges."""
        if path not in self._numbers:
            self._numbers[path] = len(self.paths)
            self.paths.append(path)
        return self._numbers[path]


class _Changes(NamedTuple):
    """The times at which the open ranges of a thread change, and the combination after each."""

    time_ns: list[int]
    path: list[int]


def open_ranges(activities: Activities, thread: Times, time_ns: Times) -> tuple[OpenRanges, Times]:
    """Return the combinations of ranges, and the number of the one open in each thread at each time.

    Ranges of the process (``nvtxRangeStart``) contain the ranges of all threads.
    """
    ranges = OpenRanges()
    path = np.zeros(len(time_ns), np.int64)
    for key, changes in _changes(activities, ranges).items():
        rows = np.flatnonzero(thread == np.uint64(key))
        index = np.searchsorted(np.array(changes.time_ns, np.int64), time_ns[rows], side="right")
        path[rows] = np.array([0, *changes.path], np.int64)[index]
    return ranges, path


def _changes(activities: Activities, ranges: OpenRanges) -> dict[int, _Changes]:
    """Return the changes of every thread that has ranges; those of the process are part of each."""
    process_ranges: dict[int, RangeKey] = {}
    thread_ranges: defaultdict[int, list[RangeKey]] = defaultdict(list)
    changes: defaultdict[int, _Changes] = defaultdict(lambda: _Changes([], []))
    calling_threads = np.unique(activities.of(EventKind.API_CALL)["thread"]).tolist()
    for time, is_pop, name, domain, thread, number in _events(activities):
        if number:
            if is_pop:
                process_ranges.pop(number, None)
            elif len(process_ranges) < _MAX_OPEN_RANGES:
                process_ranges[number] = RangeKey(name, domain)
        elif not is_pop:
            if len(thread_ranges[thread]) < _MAX_OPEN_RANGES:
                thread_ranges[thread].append(RangeKey(name, domain))
        else:
            _pop(thread_ranges[thread], domain)
        for changed in calling_threads if number else (thread,):
            path = (*process_ranges.values(), *thread_ranges[changed])
            changes[changed].time_ns.append(time)
            changes[changed].path.append(ranges.number(path))
    return changes


def _pop(stack: list[RangeKey], domain: int) -> None:
    """Remove the innermost range of a domain."""
    for index in reversed(range(len(stack))):
        if stack[index].domain == domain:
            del stack[index]
            return


def _events(activities: Activities) -> Any:
    """Return time, whether it is a pop, name, domain, thread and number of each event, sorted by time."""
    pushes, pops = activities.of(EventKind.RANGE_PUSH), activities.of(EventKind.RANGE_POP)
    time = np.concatenate([pushes["time_ns"], pops["time_ns"]])
    is_pop = np.repeat([False, True], [len(pushes), len(pops)])
    order = np.lexsort((is_pop, np.concatenate([pushes["seq"], pops["seq"]]), time))
    name = np.concatenate([pushes["name"], np.zeros(len(pops), np.uint32)])
    columns = [time, is_pop, name]
    columns += [
        np.concatenate([pushes[field_name], pops[field_name]])
        for field_name in ("domain", "thread", "number")
    ]
    return zip(*(column[order].tolist() for column in columns), strict=True)
