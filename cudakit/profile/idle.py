"""Divide the idle time of a device into causes, which add up to the idle time exactly.

A gap is an interval in which no work of a process ran on a device. An API call of a host thread enqueued
the work that ends the gap. Until the end of this call, the causes of the thread's time (``host_time``)
divide the gap. The rest of the gap is the latency of the launch, or a wait for other work if the work was
enqueued before the gap began.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cudakit.profile.host_time import IdleCause, ThreadTime
from cudakit.profile.intervals import IntervalSet, Ints, Times, union
from cudakit.profile.timeline import Timeline

_QUEUE_DRAINING_CAUSES = (IdleCause.HOST_WAIT, IdleCause.ALLOCATION)


@dataclass(frozen=True, slots=True)
class Gaps:
    """The gaps between the first and the last work of a device, sorted by time."""

    start_ns: Times
    end_ns: Times
    by_cause_ns: Times  # a row for each gap, a column for each IdleCause; a row adds up to the gap
    next_work: Ints  # row of ``Timeline.work`` that ends the gap
    blocking: BlockingTime


@dataclass(frozen=True, slots=True)
class BlockingTime:
    """The idle time of each wait and allocation of the host in a gap; a gap may have several."""

    gap: Ints  # row of ``Gaps``
    cause: Ints  # IdleCause.HOST_WAIT or IdleCause.ALLOCATION
    site: Ints  # call stack of the API call
    idle_ns: Times


def busy_time(timeline: Timeline, rows: Ints) -> IntervalSet:
    """Return the intervals in which work of the given rows ran."""
    return union(timeline.work.start_ns[rows], timeline.work.end_ns[rows])


def launched_work(timeline: Timeline, start_ns: int, end_ns: int) -> tuple[int, int]:
    """Return the busy time and the number of the work launched between two times of the host."""
    work, calls = timeline.work, timeline.calls
    rows = np.flatnonzero(work.call >= 0)
    call_end_ns = calls.start_ns[work.call[rows]]
    rows = rows[(call_end_ns >= start_ns) & (call_end_ns < end_ns)]
    return busy_time(timeline, rows).total_ns, len(rows)


def find_gaps(timeline: Timeline, device_rows: Ints, threads: dict[int, ThreadTime]) -> Gaps:
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
    thread_time: ThreadTime, start: Times, end: Times, call_end_ns: Times
) -> tuple[Times, Ints]:
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
    for cause in _QUEUE_DRAINING_CAUSES:
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


def _time_within_calls(thread_time: ThreadTime, cause: IdleCause, start: Times, end: Times) -> Ints:
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
