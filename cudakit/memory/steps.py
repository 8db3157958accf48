"""Find the steps of a program, and the named range that is open at each event."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

import numpy as np

from cudakit.memory.snapshot import Action, Annotation, DeviceTrace, Ids, Ints, Snapshot
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
    marker_events = np.flatnonzero(trace.events.action == Action.SNAPSHOT)
    if len(marker_events) >= _MIN_STEPS:
        return "snapshot markers", marker_events, False
    alloc_events = np.flatnonzero(trace.events.action == Action.ALLOC)
    loop = find_loop(snapshot, trace.events.stack[alloc_events], _MIN_STEPS)
    if loop is not None:
        return f"loop at {loop.first_line}", alloc_events[loop.starts], False
    moments = _period_starts(snapshot, trace)
    if len(moments) >= _MIN_STEPS:
        return "repeating allocations", moments, False
    return "none", np.zeros(0, np.int64), False


def _period_starts(snapshot: Snapshot, trace: DeviceTrace) -> Ints:
    """Return the moment at which each period of the sequence of allocation stacks starts."""
    alloc_events = np.flatnonzero(trace.events.action == Action.ALLOC)[-_MAX_ALLOCATIONS:]
    alloc_stacks = trace.events.stack[alloc_events]
    period = _period(alloc_stacks)
    if period == 0 or _is_one_forward_pass(snapshot, trace, alloc_events, period):
        return np.zeros(0, np.int64)
    # Periods are counted back from the end, because the beginning is warm-up.
    period_starts = np.arange(len(alloc_events) - 1, -1, -period)[::-1]
    return alloc_events[period_starts] + 1


def _is_one_forward_pass(
    snapshot: Snapshot, trace: DeviceTrace, alloc_events: Ints, period: int
) -> bool:
    """Return whether the allocations repeat in the layers of a network, which keep them, and not in steps."""
    actions = trace.events.action[alloc_events[0] : alloc_events[-1]]
    freed_count = np.count_nonzero(np.isin(actions, (Action.FREE_COMPLETED, Action.FREE)))
    keeps_allocations = bool(freed_count < 0.1 * len(alloc_events))
    return keeps_allocations and is_inside_one_call(
        snapshot, trace.events.stack[alloc_events[-period:]]
    )


def _period(stacks: Ids) -> int:
    """Return the shortest period of a sequence; 0 if there is none.

    A period of 1 does not count: a single stack that repeats is a loop that fills a list, not a step.
    """
    allocation_count = len(stacks)
    if allocation_count < 2 * _MIN_STEPS or int(stacks.min()) == int(stacks.max()):
        return 0
    # A random sign per stack: in the autocorrelation equal stacks add up, and others cancel out.
    signs = np.random.default_rng(0).choice((-1.0, 1.0), int(stacks.max()) + 1)[stacks]
    spectrum = np.fft.rfft(signs - signs.mean(), 2 * allocation_count)
    correlation = np.fft.irfft(np.abs(spectrum) ** 2)[: allocation_count // _MIN_STEPS]
    for lag in np.argsort(-correlation[1:], kind="stable")[:32] + 1:
        if _repeats_at_lag(stacks, int(lag)):
            period = _shortest_period(stacks, int(lag))
            return period if period > 1 else 0
    return 0


def _repeats_at_lag(stacks: Ids, lag: int) -> bool:
    after_warm_up = stacks[len(stacks) // 4 :]
    if lag >= len(after_warm_up):
        return False
    return float(np.mean(after_warm_up[lag:] == after_warm_up[:-lag])) >= _MIN_REPEATING_SHARE


def _shortest_period(stacks: Ids, lag: int) -> int:
    """Return the shortest divisor of a lag that is a period."""
    divisors = (divisor for divisor in range(2, min(lag, 64) + 1) if lag % divisor == 0)
    shorter_periods = [
        lag // divisor for divisor in divisors if _repeats_at_lag(stacks, lag // divisor)
    ]
    return min(shorter_periods, default=lag)


def active_annotation(snapshot: Snapshot, trace: DeviceTrace) -> tuple[Ids, tuple[str, ...]]:
    """Return the innermost open range at each event, as an index into the returned names; 0 means no range.

    An end closes the innermost open range of its name, because ranges can overlap or lack an end.
    """
    index_by_name = {"": 0}
    open_ranges = _OpenRanges()
    times, innermost_names = [], []
    for annotation in _annotations_of(snapshot, trace):
        open_ranges.apply(annotation)
        times.append(annotation.time_us)
        innermost_names.append(
            index_by_name.setdefault(open_ranges.innermost_name(), len(index_by_name))
        )
    if not times or not snapshot.has_times:
        return np.zeros(len(trace.events), np.int32), ("",)
    range_index = np.searchsorted(
        np.array(times, np.int64), non_decreasing(trace.events.time_us), side="right"
    )
    return np.array([0, *innermost_names], np.int32)[range_index], tuple(index_by_name)


def open_ranges_at(snapshot: Snapshot, trace: DeviceTrace, event_index: int) -> tuple[str, ...]:
    """Return the names of the ranges that are open at an event, outermost first."""
    if event_index < 0 or not snapshot.has_times:
        return ()
    time_us = non_decreasing(trace.events.time_us)[event_index]
    open_ranges = _OpenRanges()
    for annotation in _annotations_of(snapshot, trace):
        if annotation.time_us > time_us:
            break
        open_ranges.apply(annotation)
    return open_ranges.names()


def last_mark_at(snapshot: Snapshot, trace: DeviceTrace, event_index: int) -> str:
    """Return the name of the last mark before an event; the empty text if there is none."""
    if event_index < 0 or not snapshot.has_times:
        return ""
    time_us = non_decreasing(trace.events.time_us)[event_index]
    marks = [
        mark for mark in snapshot.marks if mark.device == trace.device and mark.time_us <= time_us
    ]
    marks.sort(key=lambda mark: mark.time_us)
    return marks[-1].name if marks else ""


def step_bounds(snapshot: Snapshot, trace: DeviceTrace) -> tuple[str, Ints, bool]:
    """Return the name of the annotation that marks steps, and the moments between steps.

    The third value is whether the last moment is the end of the last step.

    A step is a range whose number rises (``step 7``, ``ProfilerStep#7``), else the outermost range that
    starts most often. Moments are the starts of steps, and the end of the last step if it has ended.
    """
    if not snapshot.has_times:
        return "", np.zeros(0, np.int64), False
    annotations = _annotations_of(snapshot, trace)
    for ranges_by_name in (
        _group_numbered_ranges(annotations),
        _group_outermost_ranges(annotations),
        _group_by_name(annotations),
    ):
        name = max(ranges_by_name, key=lambda key: len(ranges_by_name[key]), default="")
        ranges = ranges_by_name.get(name, [])
        start_times = [annotation.time_us for annotation in ranges if annotation.is_start]
        if len(start_times) >= _MIN_STEPS:
            end_times = [] if ranges[-1].is_start else [ranges[-1].time_us]
            return name, _moments_at(trace, start_times + end_times), bool(end_times)
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


def _group_outermost_ranges(annotations: list[Annotation]) -> dict[str, list[Annotation]]:
    """Group the outermost ranges by name."""
    ranges_by_name: defaultdict[str, list[Annotation]] = defaultdict(list)
    open_ranges = _OpenRanges()
    for annotation in annotations:
        name_before = open_ranges.outermost_name()
        open_ranges.apply(annotation)
        if name_before in ("", annotation.name):
            ranges_by_name[annotation.name].append(annotation)
    return ranges_by_name


def _group_by_name(annotations: list[Annotation]) -> dict[str, list[Annotation]]:
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


def _moments_at(trace: DeviceTrace, times: list[int]) -> Ints:
    distinct_times = np.unique(np.array(times, np.int64))
    return np.unique(np.searchsorted(non_decreasing(trace.events.time_us), distinct_times)).astype(
        np.int64
    )


def non_decreasing(time_us: Ints) -> Ints:
    """Return the running maximum of times: a wall clock can be set back."""
    return np.maximum.accumulate(time_us) if len(time_us) else time_us


def _annotations_of(snapshot: Snapshot, trace: DeviceTrace) -> list[Annotation]:
    annotations = [
        annotation for annotation in snapshot.annotations if annotation.device == trace.device
    ]
    return sorted(annotations, key=lambda annotation: annotation.time_us)


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
        count_by_stack = np.bincount(stack_rows, minlength=len(frames))
        function, line_by_stack = _busiest_function(snapshot, frames[:, depth], count_by_stack)
        if not function or _is_inner_function(function):
            return None
        allocation_lines = line_by_stack[stack_rows]
        is_in_function = allocation_lines >= 0
        if not is_in_function.any():  # only a damaged file has a frame with a negative line
            return None
        allocation_indices, stack_rows, allocation_lines = (
            allocation_indices[is_in_function],
            stack_rows[is_in_function],
            allocation_lines[is_in_function],
        )
        iteration_starts = _iteration_starts(allocation_lines)
        if len(iteration_starts) >= min_iterations:
            name, path = function
            file_name = path.replace(chr(92), "/").rpartition("/")[2]
            first_line = int(allocation_lines[iteration_starts[0]])
            return Loop(f"{file_name}:{first_line} {name}", allocation_indices[iteration_starts])
        allocation_frames = frames[stack_rows, depth]
        is_in_busiest_frame = allocation_frames == np.bincount(allocation_frames).argmax()
        allocation_indices, stack_rows = (
            allocation_indices[is_in_busiest_frame],
            stack_rows[is_in_busiest_frame],
        )
    return None


def _frames_by_depth(snapshot: Snapshot, stacks: list[int]) -> Ids:
    outer_first_stacks = [snapshot.stacks[stack_index][::-1][:_MAX_DEPTH] for stack_index in stacks]
    frame_table = np.full(
        (len(outer_first_stacks), max(map(len, outer_first_stacks), default=0)), -1, np.int32
    )
    for path_row, outer_first_stack in zip(frame_table, outer_first_stacks, strict=True):
        path_row[: len(outer_first_stack)] = outer_first_stack
    return frame_table


def _busiest_function(
    snapshot: Snapshot, frames: Ids, count_by_stack: Ints
) -> tuple[tuple[str, str] | None, Ints]:
    """Return the function with most allocations, as name and file, and its line in each call stack.

    For each call stack, ``frames`` has the frame at one depth; ``count_by_stack`` counts the allocations.
    The line is -1 for call stacks without this function.
    """
    n_frames = len(snapshot.frames)
    count_by_frame = np.bincount(frames + 1, weights=count_by_stack, minlength=n_frames + 1)[1:]
    count_by_function: dict[tuple[str, str], float] = {}
    used_frames = np.flatnonzero(count_by_frame).tolist()
    for frame_index in used_frames:
        function_key = snapshot.frames[frame_index].name, snapshot.frames[frame_index].filename
        count_by_function[function_key] = count_by_function.get(function_key, 0) + float(
            count_by_frame[frame_index]
        )
    function = max(
        count_by_function, key=lambda function_key: count_by_function[function_key], default=None
    )
    line_by_frame = np.full(n_frames + 1, -1, np.int64)  # the last item is for frame -1
    for frame_index in used_frames:
        if (snapshot.frames[frame_index].name, snapshot.frames[frame_index].filename) == function:
            line_by_frame[frame_index] = snapshot.frames[frame_index].line
    return function, line_by_frame[frames]


def is_inside_one_call(snapshot: Snapshot, stacks: Ids) -> bool:
    """Return whether all these call stacks are in one call of a network, a backward pass or an optimizer."""
    outer_first_stacks = [snapshot.stacks[stack][::-1] for stack in np.unique(stacks).tolist()]
    for frames in zip(*outer_first_stacks, strict=False):
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
