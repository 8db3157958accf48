"""Named ranges of the program, brought together with the trace by time."""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.snapshot import Annotation, DeviceTrace, Snapshot

_Ints = npt.NDArray[np.int64]

_DIGITS = "0123456789"
_SEPARATORS = " #_:-"
_LONGEST_NUMBER = 18  # digits
_FEWEST_STEPS = 3


def active_annotation(
    snapshot: Snapshot, trace: DeviceTrace
) -> tuple[npt.NDArray[np.int32], tuple[str, ...]]:
    """Find the innermost range open at each event: its index into the names returned; 0 is none.

    Ranges that overlap without nesting, or lack an end, are closed by name as torch reports them.
    """
    names = {"": 0}
    ranges = _OpenRanges()
    times, innermost = [], []
    for annotation in _of_device(snapshot, trace):
        ranges.follow(annotation)
        times.append(annotation.time_us)
        innermost.append(names.setdefault(ranges.innermost(), len(names)))
    if not times or not snapshot.has_times:
        return np.zeros(len(trace.events), np.int32), ("",)
    since = np.searchsorted(np.array(times, np.int64), steady(trace.events.time_us), side="right")
    return np.array([0, *innermost], np.int32)[since], tuple(names)


def step_bounds(snapshot: Snapshot, trace: DeviceTrace) -> tuple[str, _Ints]:
    """Find the moments between the steps of a loop by annotations: the name of the step, and moments.

    A range whose number rises (``step 7``, ``ProfilerStep#7``) is a step; failing that, whichever outermost
    name starts most often. Moments are the starts of steps, and the end of the last one if it has ended.
    """
    if not snapshot.has_times:
        return "", np.zeros(0, np.int64)
    annotations = _of_device(snapshot, trace)
    for candidates in (_numbered(annotations), _outermost(annotations), _by_name(annotations)):
        name = max(candidates, key=lambda key: len(candidates[key]), default="")
        ranges = candidates.get(name, [])
        starts = [annotation.time_us for annotation in ranges if annotation.start]
        if len(starts) >= _FEWEST_STEPS:
            times = starts if ranges[-1].start else [*starts, ranges[-1].time_us]
            return name, _moments(trace, times)
    return "", np.zeros(0, np.int64)


def _numbered(annotations: list[Annotation]) -> dict[str, list[Annotation]]:
    """Group ranges by name without number; what is numbered anew in each step is left out."""
    found: defaultdict[str, list[Annotation]] = defaultdict(list)
    numbers: defaultdict[str, list[int]] = defaultdict(list)
    for annotation in annotations:
        text = annotation.name.rstrip(_DIGITS)
        if digits := annotation.name[len(text) :]:
            name = f"{text.rstrip(_SEPARATORS)}#"
            found[name].append(annotation)
            if annotation.start:
                numbers[name].append(int(digits[-_LONGEST_NUMBER:]))
    return {name: own for name, own in found.items() if numbers[name] == sorted(numbers[name])}


def _outermost(annotations: list[Annotation]) -> dict[str, list[Annotation]]:
    """Group by name the ranges that lie in no other."""
    found: defaultdict[str, list[Annotation]] = defaultdict(list)
    ranges = _OpenRanges()
    for annotation in annotations:
        before = ranges.outermost()
        ranges.follow(annotation)
        if before in ("", annotation.name):
            found[annotation.name].append(annotation)
    return found


def _by_name(annotations: list[Annotation]) -> dict[str, list[Annotation]]:
    found: defaultdict[str, list[Annotation]] = defaultdict(list)
    for annotation in annotations:
        found[annotation.name].append(annotation)
    return found


class _OpenRanges:
    """The ranges open at a time, by age; each of its steps takes the same time however many are open."""

    def __init__(self) -> None:
        self._started = 0
        self._names: dict[int, str] = {}  # of the open ones
        self._numbers: defaultdict[str, list[int]] = defaultdict(list)  # of the open ones
        self._by_age: deque[int] = deque()  # with closed ones, until they stand at an end

    def follow(self, annotation: Annotation) -> None:
        """Open a range, or close the innermost of a name, if there is one."""
        if annotation.start:
            self._names[self._started] = annotation.name
            self._numbers[annotation.name].append(self._started)
            self._by_age.append(self._started)
            self._started += 1
        elif self._numbers[annotation.name]:
            del self._names[self._numbers[annotation.name].pop()]

    def innermost(self) -> str:
        """Name the youngest open range; "" where none is open."""
        while self._by_age and self._by_age[-1] not in self._names:
            self._by_age.pop()
        return self._names[self._by_age[-1]] if self._by_age else ""

    def outermost(self) -> str:
        """Name the oldest open range; "" where none is open."""
        while self._by_age and self._by_age[0] not in self._names:
            self._by_age.popleft()
        return self._names[self._by_age[0]] if self._by_age else ""


def _moments(trace: DeviceTrace, times: list[int]) -> _Ints:
    distinct = np.unique(np.array(times, np.int64))
    return np.unique(np.searchsorted(steady(trace.events.time_us), distinct)).astype(np.int64)


def steady(time_us: _Ints) -> _Ints:
    """Make times never step back, as a wall clock may."""
    return np.maximum.accumulate(time_us) if len(time_us) else time_us


def _of_device(snapshot: Snapshot, trace: DeviceTrace) -> list[Annotation]:
    own = [a for a in snapshot.annotations if a.device == trace.device]
    return sorted(own, key=lambda annotation: annotation.time_us)
