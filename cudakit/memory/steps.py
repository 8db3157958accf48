"""Find the steps of a program and the named range at each event, and what grows from step to step."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from cudakit.memory.history import Allocations, History, live_at
from cudakit.memory.result import DiffRow, Leak, StepPeak, Steps
from cudakit.memory.snapshot import (
    Action,
    Annotation,
    DeviceTrace,
    Ids,
    Ints,
    Mask,
    Snapshot,
    StackTable,
    time_of,
)
from cudakit.stacks import Frame

_MIN_STEPS = 3
_DIGITS = "0123456789"
_SEPARATORS = " #_:-"
_MAX_DIGITS = 18
# Only the last part of long traces is searched for a period: the first part is warm-up, and the FFT stays
# fast.
_MAX_ALLOCATIONS = 1 << 17
# A lag is a period if this share of allocations has the same stack as the allocation one lag earlier.
_MIN_REPEATING_SHARE = 0.9


def step_moments(snapshot: Snapshot, trace: DeviceTrace) -> tuple[str, Ints, bool]:
    """Return the source of the steps (``"none"`` without steps), and the moments between steps.

    The third value is whether the last moment is the end of the last step.
    """
    name, moments, has_end = step_bounds(snapshot, trace)
    if len(moments) >= _MIN_STEPS:
        return f"annotation {name}", moments, has_end
    markers = np.flatnonzero(trace.events.action == Action.SNAPSHOT)
    if len(markers) >= _MIN_STEPS:
        return "snapshot markers", markers, False
    allocs = np.flatnonzero(trace.events.action == Action.ALLOC)
    loop = find_loop(snapshot, trace.events.stack[allocs], _MIN_STEPS)
    if loop is not None:
        return f"loop at {loop.first_line}", allocs[loop.starts], False
    allocs = allocs[-_MAX_ALLOCATIONS:]
    period = _period(trace.events.stack[allocs])
    if period and not _is_one_forward_pass(snapshot, trace, allocs, period):
        # Periods are counted back from the end, because the beginning is warm-up.
        moments = allocs[np.arange(len(allocs) - 1, -1, -period)[::-1]] + 1
        if len(moments) >= _MIN_STEPS:
            return "repeating allocations", moments, False
    return "none", np.zeros(0, np.int64), False


def _is_one_forward_pass(snapshot: Snapshot, trace: DeviceTrace, allocs: Ints, period: int) -> bool:
    """Return whether the allocations repeat in the layers of a network, which keep them, and not in steps."""
    actions = trace.events.action[allocs[0] : allocs[-1]]
    freed_count = np.count_nonzero(np.isin(actions, (Action.FREE_COMPLETED, Action.FREE)))
    keeps_allocations = bool(freed_count < 0.1 * len(allocs))
    return keeps_allocations and is_inside_one_call(snapshot, trace.events.stack[allocs[-period:]])


def _period(stacks: Ids) -> int:
    """Return the shortest period of a sequence; 0 if there is none.

    A period of 1 does not count: a single stack that repeats is a loop that fills a list, not a step.
    """
    count = len(stacks)
    if count < 2 * _MIN_STEPS or int(stacks.min()) == int(stacks.max()):
        return 0
    # A random sign per stack: in the autocorrelation equal stacks add up, and others cancel out.
    signs = np.random.default_rng(0).choice((-1.0, 1.0), int(stacks.max()) + 1)[stacks]
    spectrum = np.fft.rfft(signs - signs.mean(), 2 * count)
    correlation = np.fft.irfft(np.abs(spectrum) ** 2)[: count // _MIN_STEPS]
    for lag in (np.argsort(-correlation[1:], kind="stable")[:32] + 1).tolist():
        if _repeats_at_lag(stacks, lag):
            divisors = (divisor for divisor in range(1, min(lag, 64) + 1) if lag % divisor == 0)
            period: int = min(
                lag // divisor for divisor in divisors if _repeats_at_lag(stacks, lag // divisor)
            )
            return period if period > 1 else 0
    return 0


def _repeats_at_lag(stacks: Ids, lag: int) -> bool:
    after_warm_up = stacks[len(stacks) // 4 :]
    if lag >= len(after_warm_up):
        return False
    return float(np.mean(after_warm_up[lag:] == after_warm_up[:-lag])) >= _MIN_REPEATING_SHARE


def active_annotation(snapshot: Snapshot, trace: DeviceTrace) -> tuple[Ids, tuple[str, ...]]:
    """Return the innermost open range at each event, as an index into the returned names; 0 means no range.

    An end closes the innermost open range of its name, because ranges can overlap or lack an end.
    """
    index_by_name = {"": 0}
    open_ranges = _OpenRanges()
    times, innermost = [], [0]
    for annotation in annotations_of(snapshot, trace):
        open_ranges.apply(annotation)
        times.append(annotation.time_us)
        innermost.append(index_by_name.setdefault(open_ranges.innermost_name(), len(index_by_name)))
    if not times or not snapshot.has_times:
        return np.zeros(len(trace.events), np.int32), ("",)
    event_times = non_decreasing(trace.events.time_us)
    index = np.searchsorted(np.array(times, np.int64), event_times, side="right")
    return np.array(innermost, np.int32)[index], tuple(index_by_name)


def open_ranges_at(snapshot: Snapshot, trace: DeviceTrace, event_index: int) -> tuple[str, ...]:
    """Return the names of the ranges that are open at an event, outermost first."""
    if event_index < 0 or not snapshot.has_times:
        return ()
    time_us = non_decreasing(trace.events.time_us)[event_index]
    open_ranges = _OpenRanges()
    for annotation in annotations_of(snapshot, trace):
        if annotation.time_us > time_us:
            break
        open_ranges.apply(annotation)
    return open_ranges.names()


def last_mark_at(snapshot: Snapshot, trace: DeviceTrace, event_index: int) -> str:
    """Return the name of the last mark before an event; the empty text if there is none."""
    if event_index < 0 or not snapshot.has_times:
        return ""
    time_us = non_decreasing(trace.events.time_us)[event_index]
    marks = [mark for mark in snapshot.marks if mark.device == trace.device]
    earlier_marks = [mark for mark in marks if mark.time_us <= time_us]
    earlier_marks.sort(key=lambda mark: mark.time_us)
    return earlier_marks[-1].name if earlier_marks else ""


def step_bounds(snapshot: Snapshot, trace: DeviceTrace) -> tuple[str, Ints, bool]:
    """Return the name of the annotation that marks steps, and the moments between steps.

    The third value is whether the last moment is the end of the last step.

    A step is a range whose number rises (``step 7``, ``ProfilerStep#7``), else the outermost range that
    starts most often. Moments are the starts of steps, and the end of the last step if it has ended.
    """
    if not snapshot.has_times:
        return "", np.zeros(0, np.int64), False
    annotations = annotations_of(snapshot, trace)
    for ranges_by_name in (
        _group_numbered_ranges(annotations),
        _group_by_name(_outermost_ranges(annotations)),
        _group_by_name(annotations),
    ):
        name = max(ranges_by_name, key=lambda key: len(ranges_by_name[key]), default="")
        ranges = ranges_by_name.get(name, [])
        start_times = [annotation.time_us for annotation in ranges if annotation.is_start]
        if len(start_times) >= _MIN_STEPS:
            has_end = not ranges[-1].is_start
            times = start_times + [ranges[-1].time_us] * has_end
            moments = np.searchsorted(non_decreasing(trace.events.time_us), np.unique(times))
            return name, np.unique(moments).astype(np.int64), has_end
    return "", np.zeros(0, np.int64), False


def _group_numbered_ranges(annotations: list[Annotation]) -> dict[str, list[Annotation]]:
    """Group numbered ranges by name; leave out names whose numbers do not rise."""
    ranges_by_name: defaultdict[str, list[Annotation]] = defaultdict(list)
    numbers_by_name: defaultdict[str, list[int]] = defaultdict(list)
    for annotation in annotations:
        prefix = annotation.name.rstrip(_DIGITS)
        if digits := annotation.name[len(prefix) :]:
            name = f"{prefix.rstrip(_SEPARATORS)}#"
            ranges_by_name[name].append(annotation)
            if annotation.is_start:
                numbers_by_name[name].append(int(digits[-_MAX_DIGITS:]))
    return {
        name: ranges
        for name, ranges in ranges_by_name.items()
        if numbers_by_name[name] == sorted(numbers_by_name[name])
        and len({annotation.name for annotation in ranges}) > 1
    }


def _outermost_ranges(annotations: list[Annotation]) -> Iterator[Annotation]:
    open_ranges = _OpenRanges()
    for annotation in annotations:
        name_before = open_ranges.outermost_name()
        open_ranges.apply(annotation)
        if name_before in ("", annotation.name):
            yield annotation


def _group_by_name(annotations: Iterable[Annotation]) -> dict[str, list[Annotation]]:
    ranges_by_name: defaultdict[str, list[Annotation]] = defaultdict(list)
    for annotation in annotations:
        ranges_by_name[annotation.name].append(annotation)
    return ranges_by_name


class _OpenRanges:
    """The open ranges, by age; each operation takes constant (amortized) time."""

    def __init__(self) -> None:
        self._started_count = 0
        self._name_by_number: dict[int, str] = {}  # names of the open ranges
        # numbers of the open ranges with each name
        self._numbers_by_name: defaultdict[str, list[int]] = defaultdict(list)
        # numbers of ranges by age; the number of a closed range stays until it is first or last
        self._numbers_by_age: deque[int] = deque()

    def apply(self, annotation: Annotation) -> None:
        """Apply a start or an end: an end closes the innermost open range with its name, if there is one."""
        if annotation.is_start:
            self._name_by_number[self._started_count] = annotation.name
            self._numbers_by_name[annotation.name].append(self._started_count)
            self._numbers_by_age.append(self._started_count)
            self._started_count += 1
        elif self._numbers_by_name[annotation.name]:
            del self._name_by_number[self._numbers_by_name[annotation.name].pop()]

    def names(self) -> tuple[str, ...]:
        """Return the names of all open ranges, the oldest first."""
        return tuple(self._name_by_number.values())

    def innermost_name(self) -> str:
        """Return the name of the youngest open range; "" if none is open."""
        while self._numbers_by_age and self._numbers_by_age[-1] not in self._name_by_number:
            self._numbers_by_age.pop()
        return self._name_by_number[self._numbers_by_age[-1]] if self._numbers_by_age else ""

    def outermost_name(self) -> str:
        """Return the name of the oldest open range; "" if none is open."""
        while self._numbers_by_age and self._numbers_by_age[0] not in self._name_by_number:
            self._numbers_by_age.popleft()
        return self._name_by_number[self._numbers_by_age[0]] if self._numbers_by_age else ""


def non_decreasing(time_us: Ints) -> Ints:
    """Return the running maximum of times: a wall clock can be set back."""
    return np.maximum.accumulate(time_us) if len(time_us) else time_us


def annotations_of(snapshot: Snapshot, trace: DeviceTrace) -> list[Annotation]:
    """Return the annotations of a device, by time."""
    of_device = (each for each in snapshot.annotations if each.device == trace.device)
    return sorted(of_device, key=lambda annotation: annotation.time_us)


# --- Find the loop of the program that runs its steps, from the call stacks of the allocations -----
#
# Line numbers within one call of a function rise, until a loop starts its next iteration. So in the outermost
# function whose allocations go back to an earlier line several times, each such jump starts a step.

# The search ends at calls of a network, of the backward pass and of an optimizer: loops in these run over
# layers or parameters, not over steps.
_INNER_CALLS = frozenset({"_call_impl", "_wrapped_call_impl", "backward", "profile_hook_step"})
_INNER_FILES = ("torch/nn/", "torch/optim/", "torch/autograd/")
_MAX_DEPTH = 64
_MAX_STACKS = 100_000


@dataclass(frozen=True, slots=True)
class Loop:
    """The loop that runs the steps of a program."""

    first_line: str  # line at which each iteration starts, such as "train.py:40 train"
    starts: Ints  # index of the first allocation of each iteration


def find_loop(snapshot: Snapshot, stacks: Ids, min_iterations: int) -> Loop | None:
    """Return the outermost loop with enough iterations in a sequence of call stacks, or None."""
    allocation_indices = np.flatnonzero(stacks)  # stack 0 is empty
    distinct_stacks, stack_rows = np.unique(stacks[allocation_indices], return_inverse=True)
    if len(distinct_stacks) > _MAX_STACKS:
        return None
    stack_rows = stack_rows.reshape(-1)  # the row in ``frames`` of each allocation
    # Frame ids of each call stack by depth: column 0 is the outermost frame; -1 is beyond the innermost one.
    frames = _frames_by_depth(snapshot, distinct_stacks.tolist())
    for depth in range(frames.shape[1]):
        counts = np.bincount(stack_rows, minlength=len(frames))
        function, line_by_stack = _busiest_function(snapshot, frames[:, depth], counts)
        if not function or _is_inner_function(function):
            return None
        lines = line_by_stack[stack_rows]
        is_in_function = lines >= 0
        if not is_in_function.any():  # only a damaged file has a frame with a negative line
            return None
        allocation_indices, stack_rows, lines = (
            array[is_in_function] for array in (allocation_indices, stack_rows, lines)
        )
        starts = _iteration_starts(lines)
        if len(starts) >= min_iterations:
            name, path = function
            file_name = path.replace("\\", "/").rpartition("/")[2]
            return Loop(f"{file_name}:{lines[starts[0]]} {name}", allocation_indices[starts])
        frame_of_allocation = frames[stack_rows, depth]
        is_busiest = frame_of_allocation == np.bincount(frame_of_allocation).argmax()
        allocation_indices, stack_rows = allocation_indices[is_busiest], stack_rows[is_busiest]
    return None


def _frames_by_depth(snapshot: Snapshot, stacks: list[int]) -> Ids:
    paths = [snapshot.stacks[stack][::-1][:_MAX_DEPTH] for stack in stacks]
    table = np.full((len(paths), max(map(len, paths), default=0)), -1, np.int32)
    for row, path in zip(table, paths, strict=True):
        row[: len(path)] = path
    return table


def _busiest_function(
    snapshot: Snapshot, frames: Ids, count_by_stack: Ints
) -> tuple[tuple[str, str] | None, Ints]:
    """Return the function with most allocations, as name and file, and its line in each call stack.

    For each call stack, ``frames`` has the frame at one depth; ``count_by_stack`` counts the allocations.
    The line is -1 for call stacks without this function.
    """
    n_frames = len(snapshot.frames)
    count_by_frame = np.bincount(frames + 1, weights=count_by_stack, minlength=n_frames + 1)[1:]
    count_by_function: defaultdict[tuple[str, str], float] = defaultdict(float)
    used_frames = [(index, snapshot.frames[index]) for index in np.flatnonzero(count_by_frame)]
    for index, frame in used_frames:
        count_by_function[frame.name, frame.filename] += float(count_by_frame[index])
    function = max(count_by_function, key=lambda key: count_by_function[key], default=None)
    line_by_frame = np.full(n_frames + 1, -1, np.int64)  # the last item is for frame -1
    for index, frame in used_frames:
        if (frame.name, frame.filename) == function:
            line_by_frame[index] = frame.line
    return function, line_by_frame[frames]


def is_inside_one_call(snapshot: Snapshot, stacks: Ids) -> bool:
    """Return whether all these call stacks are in one call of a network, a backward pass or an optimizer."""
    paths = [snapshot.stacks[stack][::-1] for stack in np.unique(stacks).tolist()]
    for frames in zip(*paths, strict=False):
        if len(set(frames)) > 1:
            return False
        if is_inner_call(snapshot.frames[frames[0]]):
            return True
    return False


def is_inner_call(frame: Frame) -> bool:
    """Return whether a frame is a call of a network, of the backward pass or of an optimizer."""
    return _is_inner_function((frame.name, frame.filename))


def _is_inner_function(function: tuple[str, str]) -> bool:
    name, path = function
    return name in _INNER_CALLS or any(path_part in path for path_part in _INNER_FILES)


def _iteration_starts(lines: Ints) -> Ints:
    """Return the indices at which an iteration starts.

    The jumps of a nested loop lead to later lines, so only jumps to the first line of the outer loop count.
    """
    jump_indices = np.flatnonzero(np.diff(lines) < 0) + 1
    if not len(jump_indices):
        return jump_indices
    target_lines, jump_counts = np.unique(lines[jump_indices], return_counts=True)
    frequent_targets = target_lines[jump_counts >= min(2, int(jump_counts.max()))]
    jump_indices = jump_indices[lines[jump_indices] == frequent_targets.min()]
    # The first iteration starts at its first line, without a jump.
    first_line_indices = np.flatnonzero(lines[: jump_indices[0]] == lines[jump_indices[0]])
    return np.append(first_line_indices[:1], jump_indices)


# --- The peak of each step, and the growth from step to step by call site --------------------------

# Maximum number of compared steps: the median slope is taken over all pairs of steps.
_MAX_COMPARED_STEPS = 256
_MAX_LISTED_STEPS = 1000
# A smaller rise of the peaks, as a share of the last peak, counts as noise.
_MIN_RISE = 0.1
# Minimum share of the steps in the second half whose peak exceeds all earlier peaks.
_MIN_RECORD_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class StepHistory:
    """The steps of a trace, with the peak of each; most arrays have one item per step.

    A step lasts from one boundary in ``bounds`` to the next boundary. The last step lasts until its end if
    the trace records the end, else until the end of the trace.
    """

    source: str  # source of the steps, as in ``Steps``
    bounds: Ints  # the moments between steps
    first_moments: Ints  # the moment at which each step starts
    end_event: int  # the first event after the last step
    peak_bytes: Ints  # requested bytes at the peak of each step
    requested_bytes: Ints  # requested bytes at every moment of the trace

    def __len__(self) -> int:
        return len(self.first_moments)

    def number_at(self, moment: int) -> int:
        """Return the number of the step that contains a moment; -1: before the first step.

        After the last step, the number is that of the next step, which has not begun.
        """
        if moment >= self.end_event:
            return len(self)
        return int(np.searchsorted(self.first_moments, moment, side="right")) - 1

    def last_event(self, step: int) -> int:
        """Return the last event of a step."""
        return (int(self.first_moments[step + 1]) if step + 1 < len(self) else self.end_event) - 1

    def moments(self, step: int) -> slice:
        """Return the moments of a step. Those of the last step include the moment after its last event."""
        end = self.last_event(step) + (1 if step + 1 < len(self) else 2)
        return slice(int(self.first_moments[step]), end)

    def peak_moment(self, step: int) -> int:
        """Return the moment of the peak of a step."""
        moments = self.moments(step)
        return int(moments.start + self.requested_bytes[moments].argmax())


def step_history(snapshot: Snapshot, trace: DeviceTrace, history: History) -> StepHistory:
    """Return the steps of a trace; without any step, the arrays are empty."""
    source, bounds, has_end = step_moments(snapshot, trace)
    starts = bounds[:-1] if has_end else bounds
    end_event = int(bounds[-1]) if has_end else history.n_events
    requested = history.curves.requested
    first = np.unique(starts[starts < history.n_events])
    peaks = np.maximum.reduceat(requested[: end_event + 1], first) if len(first) else first
    return StepHistory(source, bounds, first, end_event, peaks, requested)


def is_rising(peaks: Ints) -> bool:
    """Return whether the peaks of consecutive steps keep rising, including the last steps.

    A single high peak at the end, or a rise of the first steps only, is not growth.
    """
    if len(peaks) < 3:
        return False
    half_count, highest_so_far = len(peaks) // 2, np.maximum.accumulate(peaks)
    is_record = peaks[half_count:] > np.maximum(highest_so_far[half_count - 1 : -1], 1)
    rise_bytes = int(peaks[half_count:].max() - highest_so_far[half_count - 1])
    last_rise_bytes = int(peaks[-1] - highest_so_far[-2])
    return bool(
        np.count_nonzero(is_record) >= max(2, _MIN_RECORD_SHARE * len(is_record))
        and rise_bytes >= _MIN_RISE * peaks[-1]
        and last_rise_bytes <= 0.7 * (peaks[-1] - peaks.min())
        and peaks[-1] >= 0.9 * peaks.max()
    )


def theil_sen(steps: Ints, values: Ints) -> float:
    """Return the median slope over all pairs of points (Sen 1968), which is robust against outliers."""
    first, second = np.triu_indices(len(steps), 1)
    return float(np.median((values[second] - values[first]) / (steps[second] - steps[first])))


def evenly_spaced(item_count: int, max_count: int) -> Ints:
    """Return up to ``max_count`` indices below ``item_count``, evenly spaced, with the first and the last."""
    if item_count == 0:
        return np.zeros(0, np.int64)
    return np.unique(
        np.linspace(0, item_count - 1, min(item_count, max_count)).round().astype(np.int64)
    )


def steps_of(
    steps: StepHistory,
    snapshot: Snapshot,
    trace: DeviceTrace,
    stacks: StackTable,
    history: History,
) -> Steps:
    """Return the peak of each step, and the memory that grew between the first and the last step."""
    compared = evenly_spaced(len(steps), _MAX_COMPARED_STEPS)
    slope = theil_sen(compared, steps.peak_bytes[compared]) if len(steps) > 1 else 0.0
    site_growth: tuple[DiffRow, ...] = ()
    if len(steps) > 1:
        first_peak, last_peak = steps.peak_moment(0), steps.peak_moment(len(steps) - 1)
        site_growth = growth_between(stacks, history.allocations, first_peak, last_peak)
    peaks = []
    for step in evenly_spaced(len(steps), _MAX_LISTED_STEPS).tolist():
        first_moment = int(steps.first_moments[step])
        peaks.append(
            StepPeak(
                step=step,
                first_event=first_moment,
                last_event=steps.last_event(step),
                peak_event=steps.peak_moment(step) - 1,
                time_us=time_of(snapshot, trace, first_moment),
                requested_bytes=int(steps.peak_bytes[step]),
                start_bytes=int(steps.requested_bytes[first_moment]),
                reserved_bytes=int(history.curves.reserved[steps.moments(step)].max()),
            )
        )
    return Steps(
        source=steps.source,
        count=len(steps.bounds),
        peaks=tuple(peaks),
        rising=is_rising(steps.peak_bytes),
        growth_bytes_per_step=round(slope),
        site_growth=site_growth,
    )


def growth_between(
    stacks: StackTable, allocations: Allocations, moment_before: int, moment_after: int
) -> tuple[DiffRow, ...]:
    """Return the requested bytes by call stack at two moments, the largest growth first."""
    n_stacks = len(stacks.snapshot.stacks)
    sums, counts = np.zeros((2, n_stacks), np.int64), np.zeros((2, n_stacks), np.int64)
    for row, moment in enumerate((moment_before, moment_after)):
        live = live_at(allocations, moment)
        stack_ids, requested = allocations.stack[live], allocations.requested[live]
        sums[row] = np.bincount(stack_ids, weights=requested, minlength=n_stacks)
        counts[row] = np.bincount(stack_ids, minlength=n_stacks)
    change_bytes = sums[1] - sums[0]
    changed = np.flatnonzero(change_bytes)
    return tuple(
        DiffRow(
            change_bytes=int(change_bytes[stack]),
            before_bytes=int(sums[0, stack]),
            after_bytes=int(sums[1, stack]),
            before_count=int(counts[0, stack]),
            after_count=int(counts[1, stack]),
            **stacks.call_site(stack),
        )
        for stack in changed[np.argsort(-change_bytes[changed], kind="stable")].tolist()
    )


def live_totals_at(allocations: Allocations, moments: Ints) -> tuple[Ints, Ints, Ints]:
    """Return stack ids, and their live bytes and counts as arrays of shape (stacks, moments)."""
    stack_ids, rows = np.unique(allocations.stack, return_inverse=True)
    # An allocation is live at the moments with begin < moment <= end: its bytes are added at the first of
    # these moments, and subtracted after the last one.
    shape = len(stack_ids), len(moments) + 1
    totals = np.zeros((2, int(np.prod(shape))))
    for events, sign in ((allocations.begin, 1), (allocations.end, -1)):
        cells = rows.reshape(-1) * shape[1] + np.searchsorted(moments, events, side="right")
        for total, weights in zip(totals, (allocations.size, None), strict=True):
            total += sign * np.bincount(cells, weights=weights, minlength=len(total))
    live_bytes, live_counts = np.cumsum(totals.reshape(2, *shape), axis=2)[..., :-1].astype(
        np.int64
    )
    return stack_ids.astype(np.int64), live_bytes, live_counts


def is_growing(live_bytes: Ints) -> Mask:
    """Return a mask: stacks whose bytes never shrink, and grow in most intervals, also in the second half."""
    changes = np.diff(live_bytes, axis=1)
    later_changes = changes[:, changes.shape[1] // 2 :]
    never_shrinks = (changes >= 0).all(axis=1)
    mostly_grows = (changes > 0).mean(axis=1) >= 0.5
    still_grows = (later_changes > 0).mean(axis=1) >= 0.5
    grows: Mask = never_shrinks & mostly_grows & still_grows
    return grows


# --- Find call stacks that hold more memory after each step ----------------------------------------

# Maximum number of compared steps: the slope is computed from all pairs of steps.
_MAX_STEPS = 64


@dataclass(frozen=True, slots=True)
class GrowingStacks:
    """Call stacks whose live memory grows from step to step; arrays have one row per stack."""

    ids: Ints
    live_bytes: Ints  # bytes of live blocks at each compared moment
    counts: Ints  # number of live blocks at each compared moment
    bytes_at_end: Ints  # live bytes at the end
    counts_at_end: Ints  # number of live blocks at the end
    steps: Ints  # step number of each compared moment


def growing_stacks(allocations: Allocations, bounds: Ints, end_moment: int) -> GrowingStacks:
    """Return the call stacks whose live bytes never shrink from step to step and grow in most steps.

    ``bounds`` are the moments between steps. Growth in the first half only (caches, optimizer state,
    workspaces) does not count. Neither does memory that is freed by ``end_moment``.
    """
    bounds = bounds[bounds <= end_moment]
    if len(bounds) < _MIN_STEPS:
        no_ids, no_rows = np.zeros(0, np.int64), np.zeros((0, len(bounds)), np.int64)
        return GrowingStacks(no_ids, no_rows, no_rows, no_ids, no_ids, np.arange(len(bounds)))
    sampled = evenly_spaced(len(bounds), _MAX_STEPS)
    ids, live_bytes, counts = live_totals_at(allocations, np.append(bounds[sampled], end_moment))
    grows = is_growing(live_bytes[:, :-1]) & (
        2 * live_bytes[:, -1] > live_bytes[:, 0] + live_bytes[:, -2]
    )
    ids, live_bytes, counts = ids[grows], live_bytes[grows], counts[grows]
    return GrowingStacks(
        ids, live_bytes[:, :-1], counts[:, :-1], live_bytes[:, -1], counts[:, -1], sampled
    )


def find_leaks(
    stacks: StackTable, allocations: Allocations, bounds: Ints, n_events: int
) -> tuple[Leak, ...]:
    """Return the growing call stacks, the fastest growth first."""
    growing = growing_stacks(allocations, bounds, n_events)
    leaks = [
        Leak(
            bytes_per_step=round(theil_sen(growing.steps, live_bytes)),
            count_per_step=theil_sen(growing.steps, counts),
            bytes=int(live_bytes[-1]),
            count=int(counts[-1]),
            growth=tuple(live_bytes.tolist()),
            **stacks.call_site(stack),
        )
        for stack, live_bytes, counts in zip(
            growing.ids.tolist(), growing.live_bytes, growing.counts, strict=True
        )
    ]
    return tuple(sorted(leaks, key=lambda leak: -leak.bytes_per_step))
