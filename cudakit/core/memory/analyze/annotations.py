"""Named ranges of the program, brought together with the trace by time."""

from __future__ import annotations

import re
from collections import defaultdict

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.snapshot import Annotation, DeviceTrace, Snapshot

_Ints = npt.NDArray[np.int64]

_NUMBERED = re.compile(r"(.*?)[\s#_:-]*(\d+)")
_FEWEST_STEPS = 3


def active_annotation(
    snapshot: Snapshot, trace: DeviceTrace
) -> tuple[npt.NDArray[np.int32], tuple[str, ...]]:
    """Find the innermost range open at each event: its index into the names returned; 0 is none.

    Ranges that overlap without nesting, or lack an end, are closed by name as torch reports them.
    """
    names = {"": 0}
    open_names: list[str] = []
    times, innermost = [], []
    for annotation in _of_device(snapshot, trace):
        if annotation.start:
            open_names.append(annotation.name)
        elif annotation.name in open_names:
            last = len(open_names) - 1 - open_names[::-1].index(annotation.name)
            del open_names[last]
        times.append(annotation.time_us)
        current = open_names[-1] if open_names else ""
        innermost.append(names.setdefault(current, len(names)))
    if not times or not snapshot.has_times:
        return np.zeros(len(trace.events), np.int32), ("",)
    since = np.searchsorted(np.array(times, np.int64), steady(trace.events.time_us), side="right")
    return np.array([0, *innermost], np.int32)[since], tuple(names)


def step_bounds(snapshot: Snapshot, trace: DeviceTrace) -> tuple[str, _Ints]:
    """Find the moments between the steps of a loop by annotations: the name of the step, and moments.

    A numbered range (``step 7``, ``ProfilerStep#7``) is a step; failing that, whichever name starts most
    often. Moments are the starts of steps, and the end of the last one if it has ended.
    """
    if not snapshot.has_times:
        return "", np.zeros(0, np.int64)
    numbered: defaultdict[str, list[Annotation]] = defaultdict(list)
    named: defaultdict[str, list[Annotation]] = defaultdict(list)
    for annotation in _of_device(snapshot, trace):
        named[annotation.name].append(annotation)
        if match := _NUMBERED.fullmatch(annotation.name):
            numbered[f"{match[1]}#"].append(annotation)
    for candidates in (numbered, named):
        name = max(candidates, key=lambda key: len(candidates[key]), default="")
        ranges = candidates.get(name, [])
        starts = [annotation.time_us for annotation in ranges if annotation.start]
        if len(starts) >= _FEWEST_STEPS:
            times = starts if ranges[-1].start else [*starts, ranges[-1].time_us]
            return name, _moments(trace, times)
    return "", np.zeros(0, np.int64)


def _moments(trace: DeviceTrace, times: list[int]) -> _Ints:
    distinct = np.unique(np.array(times, np.int64))
    return np.unique(np.searchsorted(steady(trace.events.time_us), distinct)).astype(np.int64)


def steady(time_us: _Ints) -> _Ints:
    """Make times never step back, as a wall clock may."""
    return np.maximum.accumulate(time_us) if len(time_us) else time_us


def _of_device(snapshot: Snapshot, trace: DeviceTrace) -> list[Annotation]:
    own = [a for a in snapshot.annotations if a.device == trace.device]
    return sorted(own, key=lambda annotation: annotation.time_us)
