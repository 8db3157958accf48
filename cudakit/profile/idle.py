"""Divide the idle time of a device into causes, which add up to the idle time exactly.

A gap is an interval in which no work of a process ran on a device. An API call of a host thread enqueued
the work that ends the gap. Until the end of this call, the causes of the thread's time (``ThreadTime``)
divide the gap. The rest of the gap is the latency of the launch, or a wait for other work if the work was
enqueued before the gap began.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import numpy as np

from cudakit.profile.timeline import Column, Timeline, WorkKind
from cudakit.trace.kinds import Direction, EventKind, MemoryKind

# --- the time of a host thread ---------------------------------------------------------------------
#
# A thread alternates between calls of the CUDA API and other code. Each call and each stretch between two
# calls has one cause, so that the causes of any interval add up to its length.


class IdleCause(IntEnum):
    """The reason why a GPU had no running work; docs/explanation/profile.md has the rule of each."""

    LAUNCH = 0  # the host enqueued work more slowly than the GPU completed it
    HOST_WAIT = 1  # the host waited for the GPU, so that no work was enqueued
    ALLOCATION = 2  # the host allocated or freed memory by the driver
    DATA_LOADING = 3  # the host was outside of CUDA for long, then copied data to the GPU
    OTHER_HOST = 4  # the host was outside of CUDA for long, for another reason
    DEPENDENCY = 5  # enqueued work waited for other streams, or for its predecessor to finish
    UNKNOWN = 6  # the call that launched the next work was not recorded
    NOT_STARTED = 7  # the first work was not enqueued yet
    ENDED = 8  # no further work was enqueued


# Time between two CUDA calls above which the host was busy with other work than launching. Python and the
# dispatcher of a framework need 5 to 200 microseconds between two launches.
LONG_STRETCH_NS: Final = 1_000_000

_ALLOCATION_FUNCTIONS = re.compile(
    r"^(?:cuda|cu)(?:Malloc|Free|HostAlloc|HostRegister|HostUnregister|MemAlloc|MemFree|MemHost|"
    r"MemCreate|MemRelease|MemMap|MemUnmap|MemSetAccess|MemAddress)(?!.*Async)"
)
_WAIT_FUNCTIONS = re.compile(r"Synchronize")
# Copies whose functions return after the copy has completed.
_BLOCKING_COPIES = re.compile(r"^(?:cudaMemcpy|cuMemcpy)(?!.*Async)")
_DATA_LOADER_FILES = re.compile(r"torch/utils/data/|/tensorflow/python/data/|/nvidia/dali/")


@dataclass(frozen=True, slots=True)
class ThreadTime:
    """The time of one thread as consecutive segments; the last segment has no end."""

    start_ns: Column  # start of each segment, sorted
    cause: Column  # IdleCause of each segment
    site: Column  # call stack of the API call, or of the next call after a stretch; 0 if there is none
    # The segments of each cause except LAUNCH, which has all remaining time.
    _segments_by_cause: Mapping[IdleCause, IntervalSet]

    def time_by_cause(self, start_ns: Column, end_ns: Column) -> Column:
        """Return the length of each cause (columns) in each interval (rows)."""
        lengths = np.zeros((len(start_ns), len(IdleCause)), np.int64)
        for cause, segments in self._segments_by_cause.items():
            lengths[:, cause] = segments.covered_within(start_ns, end_ns)
        lengths[:, IdleCause.LAUNCH] = end_ns - start_ns - lengths.sum(axis=1)
        return lengths

    def segment_indices(self, time_ns: Column) -> Column:
        """Return the index of the segment that contains each time."""
        return np.maximum(np.searchsorted(self.start_ns, time_ns, side="right") - 1, 0)


def call_causes(timeline: Timeline) -> Column:
    """Return the IdleCause of each API call: an allocation, a wait of the host, or launching."""
    calls = timeline.calls
    functions, function_of_call = np.unique(calls.name, return_inverse=True)
    causes = []
    for name in functions.tolist():
        function = timeline.names[name]
        if _ALLOCATION_FUNCTIONS.search(function):
            causes.append(IdleCause.ALLOCATION)
        elif _WAIT_FUNCTIONS.search(function) or _BLOCKING_COPIES.search(function):
            causes.append(IdleCause.HOST_WAIT)
        else:
            causes.append(IdleCause.LAUNCH)
    cause: Column = np.array(causes, np.int64)[function_of_call]
    # The host waits in the calls of copies of pageable memory.
    copies = timeline.activities.records[EventKind.COPY_RUN]
    is_pageable = (copies["source_memory"] == MemoryKind.PAGEABLE) | (
        copies["destination_memory"] == MemoryKind.PAGEABLE
    )
    correlations = copies["correlation"][is_pageable & (copies["graph_node"] == 0)]
    cause[np.isin(calls.correlation, correlations[correlations != 0])] = IdleCause.HOST_WAIT
    return cause


def divide_thread(timeline: Timeline, cause_of_call: Column, thread: int) -> ThreadTime:
    """Return the segments of one thread."""
    calls = timeline.calls
    call_rows = np.flatnonzero(calls.thread == thread)
    start, end = calls.start_ns[call_rows], calls.end_ns[call_rows]
    # Calls of one thread do not overlap, except in damaged traces: there the earlier call counts.
    previous_end = np.concatenate([[np.iinfo(np.int64).min], np.maximum.accumulate(end)[:-1]])
    is_outer = end > np.maximum(start, previous_end)
    call_rows, end = call_rows[is_outer], end[is_outer]
    start = np.maximum(start, previous_end[: len(start)])[is_outer]
    # Segment 0 is before the first call; then each call is followed by a stretch.
    segment_start = np.empty(2 * len(call_rows) + 1, np.int64)
    segment_start[0] = np.iinfo(np.int64).min // 4
    segment_start[1::2], segment_start[2::2] = start, end
    cause = np.full(len(segment_start), IdleCause.OTHER_HOST, np.int64)
    cause[1::2] = cause_of_call[call_rows]
    cause[2:-1:2] = _stretch_causes(timeline, call_rows, start[1:] - end[:-1])
    site = np.zeros(len(segment_start), np.int64)
    site[1::2] = calls.site[call_rows]
    site[0:-1:2] = calls.site[call_rows]  # a stretch has the site of the call after it
    segment_end = np.append(segment_start[1:], np.iinfo(np.int64).max // 4)
    segments_by_cause = {}
    for cause_number in np.unique(cause).tolist():
        if cause_number != IdleCause.LAUNCH:
            has_cause = cause == cause_number
            segments_by_cause[IdleCause(cause_number)] = IntervalSet(
                segment_start[has_cause], segment_end[has_cause]
            )
    return ThreadTime(segment_start, cause, site, segments_by_cause)


def _stretch_causes(timeline: Timeline, call_row: Column, length_ns: Column) -> Column:
    """Return the cause of each stretch between the calls of one thread."""
    cause = np.full(len(length_ns), IdleCause.LAUNCH, np.int64)
    is_long = length_ns >= LONG_STRETCH_NS
    if not is_long.any():
        return cause
    calls, work = timeline.calls, timeline.work
    has_work = np.zeros(len(calls.start_ns), bool)
    has_work[work.call[work.call >= 0]] = True
    copies = timeline.activities.records[EventKind.COPY_RUN]
    rows = np.flatnonzero((work.kind == WorkKind.COPY) & (work.call >= 0))
    is_to_device = copies["direction"][work.record[rows]] == Direction.HOST_TO_DEVICE
    is_copy_to_device = np.zeros(len(calls.start_ns), bool)
    is_copy_to_device[work.call[rows[is_to_device]]] = True
    # The first call at or after each call of the thread that enqueued work.
    positions = np.where(has_work[call_row], np.arange(len(call_row)), len(call_row))
    next_positions = np.minimum.accumulate(positions[::-1])[::-1][1:]
    next_rows = call_row[np.minimum(next_positions, len(call_row) - 1)]
    loads_data = is_copy_to_device[next_rows] & (next_positions < len(call_row))
    is_in_data_loader = np.array(
        [
            any(_DATA_LOADER_FILES.search(frame.filename) for frame in stack)
            for stack in timeline.stacks
        ],
        bool,
    )
    loads_data |= is_in_data_loader[calls.site[call_row[1:]]]
    causes = np.where(loads_data, IdleCause.DATA_LOADING, IdleCause.OTHER_HOST)
    cause[is_long] = causes[is_long]
    return cause


@dataclass(frozen=True, slots=True)
class Gaps:
    """The gaps between the first and the last work of a device, sorted by time."""

    start_ns: Column
    end_ns: Column
    by_cause_ns: Column  # a row for each gap, a column for each IdleCause; a row adds up to the gap
    next_work: Column  # row of ``Timeline.work`` that ends the gap
    blocking: BlockingTime


@dataclass(frozen=True, slots=True)
class BlockingTime:
    """The idle time of each wait and allocation of the host in a gap; a gap may have several."""

    gap: Column  # row of ``Gaps``
    cause: Column  # IdleCause.HOST_WAIT or IdleCause.ALLOCATION
    site: Column  # call stack of the API call
    idle_ns: Column


def busy_time(timeline: Timeline, rows: Column) -> IntervalSet:
    """Return the intervals in which work of the given rows ran."""
    return union(timeline.work.start_ns[rows], timeline.work.end_ns[rows])


def launched_work(timeline: Timeline, start_ns: int, end_ns: int) -> tuple[int, int]:
    """Return the busy time and the number of the work launched between two times of the host."""
    work, calls = timeline.work, timeline.calls
    rows = np.flatnonzero(work.call >= 0)
    call_end_ns = calls.start_ns[work.call[rows]]
    rows = rows[(call_end_ns >= start_ns) & (call_end_ns < end_ns)]
    return busy_time(timeline, rows).total_ns, len(rows)


def find_gaps(timeline: Timeline, device_rows: Column, threads: dict[int, ThreadTime]) -> Gaps:
    """Return the gaps between the work of one device.

    ``device_rows`` are the rows of ``Timeline.work`` of this device, sorted by start. ``threads`` has the
    time of each host thread.
    """
    work, calls = timeline.work, timeline.calls
    latest_end = np.maximum.accumulate(work.end_ns[device_rows])[:-1]
    ends_gap = np.flatnonzero(work.start_ns[device_rows][1:] > latest_end)
    start, next_work = latest_end[ends_gap], device_rows[1:][ends_gap]
    end = work.start_ns[next_work]
    by_cause_ns = np.zeros((len(start), len(IdleCause)), np.int64)
    call = work.call[next_work]
    blocking_rows = [np.zeros((4, 0), np.int64)]
    by_cause_ns[call < 0, IdleCause.UNKNOWN] = (end - start)[call < 0]
    for thread, thread_time in threads.items():
        gap_indices = np.flatnonzero(call >= 0)
        gap_indices = gap_indices[calls.thread[call[gap_indices]] == np.uint64(thread)]
        if len(gap_indices):
            by_cause_ns[gap_indices], rows = _divide_gaps(
                thread_time, start[gap_indices], end[gap_indices], calls.end_ns[call[gap_indices]]
            )
            rows[0] = gap_indices[rows[0]]
            blocking_rows.append(rows)
    return Gaps(
        start, end, by_cause_ns, next_work, BlockingTime(*np.concatenate(blocking_rows, axis=1))
    )


def _divide_gaps(
    thread_time: ThreadTime, start: Column, end: Column, call_end_ns: Column
) -> tuple[Column, Column]:
    """Return the causes of gaps, and the columns of ``BlockingTime`` as rows.

    The next work of each gap was enqueued by ``call_end_ns``.
    """
    launch_end = np.clip(call_end_ns, start, end)
    by_cause_ns = thread_time.time_by_cause(start, launch_end)
    # If the thread enqueued the work before the gap began, the work waited on the device.
    was_queued = call_end_ns <= start
    by_cause_ns[was_queued, IdleCause.DEPENDENCY] += (end - launch_end)[was_queued]
    by_cause_ns[~was_queued, IdleCause.LAUNCH] += (end - launch_end)[~was_queued]
    # If a gap began while the host waited, the wait emptied the queue. Then the time of the next launches
    # counts as wait, too, and is no sign of slow launching.
    segments = thread_time.segment_indices(start)
    cause_at_start = thread_time.cause[segments]
    blocking_rows = []
    for cause in (IdleCause.HOST_WAIT, IdleCause.ALLOCATION):
        blocking_rows.append(_time_within_calls(thread_time, cause, start, launch_end))
        drained_gaps = np.flatnonzero((cause_at_start == cause) & ~was_queued)
        launch_ns = by_cause_ns[drained_gaps, IdleCause.LAUNCH]
        by_cause_ns[drained_gaps, cause] += launch_ns
        by_cause_ns[drained_gaps, IdleCause.LAUNCH] = 0
        site = thread_time.site[segments[drained_gaps]]
        blocking_rows.append(
            np.stack([drained_gaps, np.full(len(site), cause, np.int64), site, launch_ns])
        )
    return by_cause_ns, np.concatenate(blocking_rows, axis=1)


def _time_within_calls(
    thread_time: ThreadTime, cause: IdleCause, start: Column, end: Column
) -> Column:
    """Return the columns of ``BlockingTime`` as rows, for the parts of intervals that are in calls."""
    calls = np.flatnonzero(thread_time.cause[:-1] == cause)
    call_start, call_end = thread_time.start_ns[calls], thread_time.start_ns[calls + 1]
    first_call = np.searchsorted(call_end, start, side="right")
    call_count = np.maximum(np.searchsorted(call_start, end, side="left") - first_call, 0)
    gap = np.repeat(np.arange(len(start)), call_count)
    position_in_gap = np.arange(len(gap)) - np.repeat(
        np.cumsum(call_count) - call_count, call_count
    )
    call = first_call[gap] + position_in_gap
    idle_ns = np.minimum(end[gap], call_end[call]) - np.maximum(start[gap], call_start[call])
    return np.stack(
        [gap, np.full(len(gap), cause, np.int64), thread_time.site[calls[call]], idle_ns]
    )


# --- sets of time intervals, in whole nanoseconds --------------------------------------------------
#
# An interval has a start and an end, and does not contain its end. ``IntervalSet`` holds sorted intervals
# that neither overlap nor touch, so that every operation is a few searches in sorted arrays.


@dataclass(frozen=True, slots=True, eq=False)
class IntervalSet:
    """A set of instants: sorted intervals that neither overlap nor touch."""

    start_ns: Column
    end_ns: Column
    # total length of the intervals before each interval, and of all intervals
    _lengths: Column = field(init=False)

    def __post_init__(self) -> None:
        lengths = np.zeros(len(self.start_ns) + 1, np.int64)
        np.cumsum(self.end_ns - self.start_ns, out=lengths[1:])
        object.__setattr__(self, "_lengths", lengths)

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def total_ns(self) -> int:
        """The length of all intervals together."""
        return int(self._lengths[-1])

    def covered_until(self, time_ns: Column) -> Column:
        """Return, for each time, the length of the set before that time."""
        if not len(self):
            return np.zeros(len(time_ns), np.int64)
        index = np.searchsorted(self.start_ns, time_ns, side="right")
        # The interval that begins before the time may end after it.
        excess_ns = np.where(index > 0, np.maximum(self.end_ns[index - 1] - time_ns, 0), 0)
        result: Column = self._lengths[index] - excess_ns
        return result

    def covered_within(self, start_ns: Column, end_ns: Column) -> Column:
        """Return the length of the set within each interval."""
        result: Column = self.covered_until(end_ns) - self.covered_until(start_ns)
        return result

    def part_between(self, start_ns: int, end_ns: int) -> IntervalSet:
        """Return the part of the set between two times."""
        start = np.clip(self.start_ns, start_ns, end_ns)
        end = np.clip(self.end_ns, start_ns, end_ns)
        is_inside = end > start
        return IntervalSet(start[is_inside], end[is_inside])


EMPTY = IntervalSet(np.empty(0, np.int64), np.empty(0, np.int64))


def union(start_ns: Column, end_ns: Column) -> IntervalSet:
    """Return the union of any intervals; empty intervals have no effect."""
    is_nonempty = end_ns > start_ns
    start, end = start_ns[is_nonempty], end_ns[is_nonempty]
    if not len(start):
        return EMPTY
    start_order = np.argsort(start, kind="stable")
    start, end = start[start_order], end[start_order]
    latest_end = np.maximum.accumulate(end)
    begins_group = np.concatenate([[True], start[1:] > latest_end[:-1]])
    group_begins = np.flatnonzero(begins_group)
    group_ends = np.append(group_begins[1:], len(start)) - 1
    return IntervalSet(start[group_begins], latest_end[group_ends])


def intersection(first_set: IntervalSet, second_set: IntervalSet) -> IntervalSet:
    """Return the instants that both sets contain."""
    if not len(first_set) or not len(second_set):
        return EMPTY
    # Every instant at which the number of covering sets changes, with the change.
    change_times = np.concatenate(
        [first_set.start_ns, first_set.end_ns, second_set.start_ns, second_set.end_ns]
    )
    change = np.repeat(
        [1, -1, 1, -1], [len(first_set), len(first_set), len(second_set), len(second_set)]
    )
    time_order = np.lexsort((change, change_times))
    change_times, depth = change_times[time_order], np.cumsum(change[time_order])
    is_common = depth[:-1] == 2
    return union(change_times[:-1][is_common], change_times[1:][is_common])


def gaps(busy_intervals: IntervalSet, start_ns: int, end_ns: int) -> IntervalSet:
    """Return the intervals between two times that a set does not contain."""
    busy_inside = busy_intervals.part_between(start_ns, end_ns)
    start = np.concatenate([[start_ns], busy_inside.end_ns])
    end = np.concatenate([busy_inside.start_ns, [end_ns]])
    is_nonempty = end > start
    return IntervalSet(start[is_nonempty], end[is_nonempty])
