"""The peak of each step, and the growth from step to step by call site."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cudakit.memory.history import Allocations, History, live_at
from cudakit.memory.result import DiffRow, Leak, StepPeak, Steps
from cudakit.memory.snapshot import DeviceTrace, Ints, Mask, Snapshot, StackTable, time_of
from cudakit.memory.steps import step_moments

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

_MIN_STEPS = 3
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
