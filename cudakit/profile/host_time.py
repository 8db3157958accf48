"""Divide the time of a host thread into causes for which a GPU may have no work.

A thread alternates between calls of the CUDA API and other code. Each call and each stretch between two calls
has one cause, so that the causes of any interval add up to its length.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np

from cudakit.profile.intervals import IntervalSet, Ints, Mask, Times
from cudakit.profile.timeline import Timeline, WorkKind
from cudakit.trace.kinds import Direction, EventKind, MemoryKind


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

    start_ns: Times  # start of each segment, sorted
    cause: Ints  # IdleCause of each segment
    site: (
        Ints  # call stack of the API call, or of the next call after a stretch; 0 if there is none
    )
    # The segments of each cause except LAUNCH, which has all remaining time.
    _segments_by_cause: Mapping[IdleCause, IntervalSet]

    def time_by_cause(self, start_ns: Times, end_ns: Times) -> Times:
        """Return the length of each cause (columns) in each interval (rows)."""
        lengths = np.zeros((len(start_ns), len(IdleCause)), np.int64)
        for cause, segments in self._segments_by_cause.items():
            lengths[:, cause] = segments.covered_within(start_ns, end_ns)
        lengths[:, IdleCause.LAUNCH] = end_ns - start_ns - lengths.sum(axis=1)
        return lengths

    def segment_indices(self, time_ns: Times) -> Ints:
        """Return the index of the segment that contains each time."""
        return np.maximum(np.searchsorted(self.start_ns, time_ns, side="right") - 1, 0)


def call_causes(timeline: Timeline) -> Ints:
    """Return the IdleCause of each API call: an allocation, a wait of the host, or launching."""
    calls = timeline.calls
    functions, function_of_call = np.unique(calls.name, return_inverse=True)
    cause_by_function = np.array(
        [_function_cause(timeline.names[name]) for name in functions.tolist()], np.int64
    )
    cause: Ints = cause_by_function[function_of_call] if len(functions) else np.empty(0, np.int64)
    cause[np.isin(calls.correlation, _pageable_copies(timeline))] = IdleCause.HOST_WAIT
    return cause


def _function_cause(function: str) -> IdleCause:
    if _ALLOCATION_FUNCTIONS.search(function):
        return IdleCause.ALLOCATION
    wait_match = _WAIT_FUNCTIONS.search(function) or _BLOCKING_COPIES.search(function)
    return IdleCause.HOST_WAIT if wait_match else IdleCause.LAUNCH


def _pageable_copies(timeline: Timeline) -> Ints:
    """Return the correlations of copies of pageable memory: the host waits in their calls."""
    copies = timeline.activities.records_of(EventKind.COPY_RUN)
    is_pageable = (copies["source_memory"] == MemoryKind.PAGEABLE) | (
        copies["destination_memory"] == MemoryKind.PAGEABLE
    )
    correlations: Ints = copies["correlation"][is_pageable & (copies["graph_node"] == 0)]
    return np.unique(correlations[correlations != 0])


def divide_thread(timeline: Timeline, cause_of_call: Ints, thread: int) -> ThreadTime:
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


def _stretch_causes(timeline: Timeline, call_row: Ints, length_ns: Times) -> Ints:
    """Return the cause of each stretch between the calls of one thread."""
    cause = np.full(len(length_ns), IdleCause.LAUNCH, np.int64)
    is_long_stretch = length_ns >= LONG_STRETCH_NS
    if not is_long_stretch.any():
        return cause
    calls, work = timeline.calls, timeline.work
    is_copy_to_device = np.zeros(len(calls.start_ns), bool)
    has_work = np.zeros(len(calls.start_ns), bool)
    has_work[work.call[work.call >= 0]] = True
    copies = timeline.activities.records_of(EventKind.COPY_RUN)
    rows = np.flatnonzero((work.kind == WorkKind.COPY) & (work.call >= 0))
    is_to_device = copies["direction"][work.record[rows]] == Direction.HOST_TO_DEVICE
    is_copy_to_device[work.call[rows[is_to_device]]] = True
    # The first call at or after each call of the thread that enqueued work.
    work_positions = np.where(has_work[call_row], np.arange(len(call_row)), len(call_row))
    next_positions = np.minimum.accumulate(work_positions[::-1])[::-1][1:]
    next_call_rows = call_row[np.minimum(next_positions, len(call_row) - 1)]
    loads_data = is_copy_to_device[next_call_rows] & (next_positions < len(call_row))
    loads_data |= _is_in_data_loader(timeline.stacks)[calls.site[call_row[1:]]]
    cause[is_long_stretch] = np.where(loads_data, IdleCause.DATA_LOADING, IdleCause.OTHER_HOST)[
        is_long_stretch
    ]
    return cause


def _is_in_data_loader(stacks: Sequence[object]) -> Mask:
    """Return, for each call stack, whether one of its frames is that of a data loader."""
    return np.array(
        [any(_DATA_LOADER_FILES.search(frame.file) for frame in stack) for stack in stacks],  # type: ignore[attr-defined]
        bool,
    )
