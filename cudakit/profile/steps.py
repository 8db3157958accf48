"""Find the steps of a program, such as the iterations of a training loop, and the NVTX ranges of its work.

A step is found on the host, by a range, a mark or a repeated sequence of launches. Its time is measured on
the device: it lasts from the first work of the device's main stream that the step launched to the first such
work of the next step. Thus a step contains all idle time, also that between two iterations of the loop.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from cudakit.profile.result import StepSource
from cudakit.profile.timeline import Activities, Column, Timeline, WorkKind, range_events
from cudakit.trace.kinds import EventKind

_STEP_NAME = re.compile(
    r"(?:^|[\W_])(?:step|iteration|iter|batch|train_step)(?:[\W_]|$)", re.IGNORECASE
)
_NOT_A_STEP = re.compile(r"optimizer|zero_grad|scheduler|dataloader", re.IGNORECASE)
# NVTX mark that the agent records after each step of a PyTorch optimizer.
_OPTIMIZER_MARK = ("optimizer step", "cudakit")
# Leading steps that are slower than the median by this factor are warm-up: compilation, autotuning, caches.
_WARM_UP_FACTOR: Final = 1.5
# Later steps that are slower than the median by this factor are not measured, if they are few.
_SLOW_FACTOR: Final = 3
_MAX_SLOW_SHARE: Final = 0.1
_MIN_REPETITIONS: Final = 4
# Largest deviation of a repetition from the median number of launches: some steps also log or copy results.
_MAX_DEVIATION: Final = 0.1
# Share of the launches between the first and the last repetition that must be in repetitions of usual length.
_MIN_USUAL_SHARE: Final = 0.8
# Share of all launches that the repetitions of usual length must contain.
_MIN_COVERAGE: Final = 0.5
# Number of signatures that are tried as the beginning of a step.
_MAX_CANDIDATES: Final = 500


@dataclass(frozen=True, slots=True)
class HostSteps:
    """The times at which steps begin on the host, sorted, and the end of the last step."""

    source: StepSource
    name: str  # name of the range or mark, with # for each number; empty if steps have no name
    begin_ns: Column
    end_ns: int


@dataclass(frozen=True, slots=True)
class DeviceSteps:
    """The steps of one device: step ``i`` lasts from ``begin_ns[i]`` to ``begin_ns[i + 1]``."""

    begin_ns: Column  # begin of each step, then the end of the last step
    number: Column  # number of each step among the steps on the host
    warm_up: int = 0  # number of leading steps that are warm-up
    # Whether each step counts: steps of the warm-up and very slow steps do not count.
    is_measured: Column = field(default_factory=lambda: np.empty(0, bool))

    @property
    def count(self) -> int:
        """The number of steps."""
        return len(self.number)

    def contains(self, time_ns: Column) -> Column:
        """Return whether each time is in a measured step."""
        step = np.searchsorted(self.begin_ns, time_ns, side="right") - 1
        is_inside = (step >= 0) & (step < self.count)
        result: Column = is_inside & self.is_measured[np.clip(step, 0, self.count - 1)]
        return result

    def contains_on_host(self, host: HostSteps, time_ns: Column) -> Column:
        """Return whether the host was in a measured step at each time."""
        step = np.searchsorted(host.begin_ns, time_ns, side="right") - 1
        result: Column = np.isin(step, self.number[self.is_measured]) & (time_ns < host.end_ns)
        return result


def find_steps(timeline: Timeline, range_name: str | None = None) -> HostSteps:
    """Return the steps of a process; ``range_name`` selects the NVTX range that is a step."""
    steps = _steps_of_ranges(timeline, range_name)
    if range_name is None:
        steps = steps or _steps_of_marks(timeline) or _steps_by_repetition(timeline)
    return steps or HostSteps("none", "", np.empty(0, np.int64), 0)


def steps_of_device(timeline: Timeline, rows: Column, steps: HostSteps) -> DeviceSteps:
    """Return the steps of a device; ``rows`` is its work, sorted by start."""
    work, calls = timeline.work, timeline.calls
    no_steps = DeviceSteps(np.empty(0, np.int64), np.empty(0, np.int64))
    launched = rows[work.call[rows] >= 0]
    if not len(steps.begin_ns) or not len(launched):
        return no_steps
    launch_times = calls.start_ns[work.call[launched]]
    step = np.searchsorted(steps.begin_ns, launch_times, side="right") - 1
    is_inside = (step >= 0) & (launch_times < steps.end_ns)
    launched, step = launched[is_inside], step[is_inside]
    # The main stream has the most kernel time, or without kernels the most work.
    kernels = rows[work.kind[rows] == WorkKind.KERNEL]
    candidates = kernels if len(kernels) else rows
    streams, index = np.unique(work.stream[candidates], return_inverse=True)
    times = np.bincount(index, weights=work.end_ns[candidates] - work.start_ns[candidates])
    is_main = work.stream[launched] == streams[np.argmax(times)]
    if not is_main.any():
        return no_steps
    # Work is sorted by start, so the first row of a step is its earliest work.
    numbers, first = np.unique(step[is_main], return_index=True)
    begins = np.maximum.accumulate(work.start_ns[launched[is_main][first]])
    end = max(int(work.end_ns[launched].max()), int(begins[-1]))
    is_nonempty = np.diff(np.append(begins, end)) > 0
    boundaries = np.append(begins[is_nonempty], end)
    durations = np.diff(boundaries)
    warm_up = _warm_up_count(durations)
    return DeviceSteps(boundaries, numbers[is_nonempty], warm_up, _is_measured(durations, warm_up))


def _warm_up_count(durations: Column) -> int:
    """Return the number of leading steps that are slower than the later steps; at least one remains."""
    if len(durations) < 3:
        return 0
    median = float(np.median(durations[len(durations) // 2 :]))
    is_usual = np.flatnonzero(durations <= _WARM_UP_FACTOR * median)
    return int(is_usual[0]) if len(is_usual) else 0


def _is_measured(durations: Column, warm_up: int) -> Column:
    """Return which steps count: steps after the warm-up, without a few that are much slower than the median.

    In such steps a program saves a checkpoint or evaluates a model, for example.
    """
    is_after_warm_up = np.arange(len(durations)) >= warm_up
    is_slow = is_after_warm_up & (durations > _SLOW_FACTOR * np.median(durations[is_after_warm_up]))
    if is_slow.sum() > _MAX_SLOW_SHARE * is_after_warm_up.sum():
        return is_after_warm_up
    result: Column = is_after_warm_up & ~is_slow
    return result


# --- ranges and marks ------------------------------------------------------------------------------


def without_numbers(name: str) -> str:
    """Return a name with # for each number: the iterations of a loop often have their number in the name."""
    return re.sub(r"\d+", "#", name)


def _steps_of_ranges(timeline: Timeline, range_name: str | None) -> HostSteps | None:
    """Return the steps of the range that is named, or of the step-like range with the most time."""
    ranges = timeline.ranges
    names_by_label: defaultdict[str, list[int]] = defaultdict(list)
    for name in np.unique(ranges.name).tolist():
        text = timeline.names[name]
        if range_name is not None:
            is_step = range_name in (text, without_numbers(text))
        else:
            is_step = bool(_STEP_NAME.search(text)) and not _NOT_A_STEP.search(text)
        if is_step:
            names_by_label[without_numbers(text)].append(name)
    best_steps: HostSteps | None = None
    best_ns = 0
    for label, names in names_by_label.items():
        rows = np.flatnonzero(np.isin(ranges.name, names))
        start, end = ranges.start_ns[rows], ranges.end_ns[rows]
        # Only ranges that begin after all earlier ones have ended: the outermost.
        is_outermost = np.append(True, start[1:] >= np.maximum.accumulate(end)[:-1])
        start, end = start[is_outermost], end[is_outermost]
        time_ns = int((end - start).sum())
        if len(start) >= (1 if range_name else 2) and time_ns > best_ns:
            best_ns = time_ns
            best_steps = HostSteps("range", label, start, int(end.max()))
    return best_steps


def _steps_of_marks(timeline: Timeline) -> HostSteps | None:
    """Return the steps that end with the mark after a step of the optimizer."""
    strings, marks = timeline.activities.strings, timeline.activities.records[EventKind.MARK]
    name, domain = (strings.index(text) if text in strings else -1 for text in _OPTIMIZER_MARK)
    times = np.sort(marks["time_ns"][(marks["name"] == name) & (marks["domain"] == domain)])
    work = timeline.work
    launches = timeline.calls.start_ns[work.call[work.call >= 0]]
    if len(times) < 2 or not len(launches):
        return None
    # The first step begins with the first launch before its mark; the last mark ends the last step.
    begins = np.concatenate([[min(int(launches.min()), int(times[0]))], times[:-1]])
    return HostSteps("mark", _OPTIMIZER_MARK[0], begins, int(times[-1]))


# --- repetition ------------------------------------------------------------------------------------


def _steps_by_repetition(timeline: Timeline) -> HostSteps | None:
    """Return the steps between the launches of work that recurs regularly.

    Each kind of work (by name and call site) that occurs at least four times is tried. The kind is chosen
    that occurs most often, with about the same number of launches between its occurrences: the layers of
    a model recur, too, but between the last layer of a step and the first one of the next step is other
    work.
    """
    work, calls = timeline.work, timeline.calls
    rows = np.flatnonzero(work.call >= 0)
    of_graphs = rows[work.graph_node[rows] != 0]
    # One row for each launch of a graph.
    _, first = np.unique(work.call[of_graphs], return_index=True)
    rows = np.concatenate([rows[work.graph_node[rows] == 0], of_graphs[first]])
    rows = rows[np.lexsort((rows, calls.start_ns[work.call[rows]]))]
    if len(rows) < 2 * _MIN_REPETITIONS:
        return None
    pairs = work.name[rows].astype(np.int64) << 32 | work.site[rows].astype(np.int64)
    _, signature = np.unique(pairs, return_inverse=True)
    begins = _regular_positions(signature)
    if begins is None:
        return None
    times = calls.start_ns[work.call[rows]]
    # The last repetition ends after the usual number of launches, or with the last call of the program.
    end = begins[-1] + int(np.median(np.diff(begins)))
    end_ns = int(times[end]) if end < len(times) else int(calls.end_ns.max()) + 1
    return HostSteps("repetition", "", times[begins], end_ns)


def _regular_positions(signature: Column) -> Column | None:
    """Return the positions of the chosen signature among the launches; None if none is suitable."""
    counts = np.bincount(signature)
    by_count = np.argsort(-counts, kind="stable")
    candidates = by_count[counts[by_count] >= _MIN_REPETITIONS]
    order = np.argsort(signature, kind="stable")
    first = np.concatenate([[0], np.cumsum(counts)])
    best: Column | None = None
    for candidate in candidates[:: max(len(candidates) // _MAX_CANDIDATES, 1)].tolist():
        positions = order[first[candidate] : first[candidate + 1]]
        if best is not None and len(positions) < len(best):
            break
        is_earlier = best is None or positions[0] < best[0]
        if is_earlier and _is_regular(positions, len(signature)):
            best = positions
    return best


def _is_regular(positions: Column, launches: int) -> bool:
    """Return whether positions are at regular distances, and cover most launches."""
    distances = np.diff(positions)
    median = float(np.median(distances))
    is_usual = np.abs(distances - median) <= _MAX_DEVIATION * median
    usual_launches = int(distances[is_usual].sum())
    # A single kernel that is repeated is no step.
    return (
        median >= 2
        and usual_launches >= _MIN_USUAL_SHARE * (positions[-1] - positions[0])
        and usual_launches >= _MIN_COVERAGE * launches
    )


# --- NVTX ranges that were open at the launch of work ----------------------------------------------

# Maximum number of ranges that are open at once in a thread. Further ranges are ignored, so that programs
# that never end their ranges do not use ever more memory.
_MAX_OPEN_RANGES: Final = 64


# The name and the domain of each open range as indices of the string table, the outermost range first.
RangePath: TypeAlias = tuple[tuple[int, int], ...]


def open_ranges(
    activities: Activities, threads: Column, times_ns: Column
) -> tuple[Sequence[RangePath], Column]:
    """Return the combinations of ranges, and for each thread and time the index of the open combination.

    Ranges of the process (``nvtxRangeStart``) contain the ranges of all threads. Combination 0 is empty.
    """
    numbers: dict[RangePath, int] = {(): 0}
    process_ranges: dict[int, tuple[int, int]] = {}
    thread_ranges: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    # The times at which the open ranges of each thread change, and the combination after each change; the
    # thread of the ranges of the process is None.
    changes: defaultdict[int | None, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for time, is_pop, name, domain, thread, number in range_events(activities):
        stack = thread_ranges[thread]
        if number and is_pop:
            process_ranges.pop(number, None)
        elif number and len(process_ranges) < _MAX_OPEN_RANGES:
            process_ranges[number] = name, domain
        elif not number and is_pop:
            same_domain = [index for index, key in enumerate(stack) if key[1] == domain]
            if same_domain:
                del stack[same_domain[-1]]
        elif not number and len(stack) < _MAX_OPEN_RANGES:
            stack.append((name, domain))
        path = tuple(process_ranges.values()) if number else tuple(stack)
        times, paths = changes[None if number else thread]
        times.append(time)
        paths.append(numbers.setdefault(path, len(numbers)))

    def paths_at(thread: int | None, times_ns: Column) -> Column:
        times, paths = changes[thread]
        index = np.searchsorted(np.array(times, np.int64), times_ns, side="right")
        result: Column = np.array([0, *paths], np.int64)[index]
        return result

    thread_path = np.zeros(len(times_ns), np.int64)
    for changed_thread in changes:
        if changed_thread is not None:
            rows = np.flatnonzero(threads == np.uint64(changed_thread))
            thread_path[rows] = paths_at(changed_thread, times_ns[rows])
    if None not in changes:
        return list(numbers), thread_path
    all_paths = list(numbers)
    pairs, pair_of_time = np.unique(
        paths_at(None, times_ns) * len(all_paths) + thread_path, return_inverse=True
    )
    path_of_pair = []
    for process_number, thread_number in (divmod(pair, len(all_paths)) for pair in pairs.tolist()):
        path = all_paths[process_number] + all_paths[thread_number]
        path_of_pair.append(numbers.setdefault(path, len(numbers)))
    return list(numbers), np.array(path_of_pair, np.int64)[pair_of_time]
