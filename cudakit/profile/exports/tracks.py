"""Assign GPU work and host spans to the tracks of a trace viewer: one for each stream and for each thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from cudakit.profile.exports.lanes import flat_lanes, nested_lanes
from cudakit.profile.timeline import Column, Spans, Timeline
from cudakit.trace.kinds import EventKind

# Distinct values below this limit are found with a table, which is faster than sorting.
_MAX_TABLE_VALUE = 1 << 22


@dataclass(frozen=True, slots=True)
class Track:
    """A row of a trace viewer. Its spans do not overlap, or they nest if the row is that of a thread."""

    name: str
    group: int  # number of the device, or the number of the thread; 0 for ranges of the process
    number: int  # number of the stream or thread
    lane: int  # number of the lane: 0 for the first track of a stream or thread


class HostSource(IntEnum):
    """The table of a Timeline that has a host span."""

    RANGE = 0
    CALL = 1


@dataclass(frozen=True, slots=True)
class WorkTracks:
    """The track of each piece of GPU work of a Timeline."""

    tracks: Sequence[Track]
    track: Column


@dataclass(frozen=True, slots=True)
class HostTracks:
    """The ranges and API calls of a Timeline, sorted by start, outer spans first."""

    tracks: Sequence[Track]
    track: Column
    source: Column  # a HostSource
    row: Column  # row in the table of the source
    start_ns: Column
    end_ns: Column


def distinct_rows(*columns: Column) -> tuple[Column, Column]:
    """Return the first index of each distinct row, and for each row the number of its distinct row."""
    row_numbers, distinct_count = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        value_number, value_count = _numbers_of_values(column)
        row_numbers, distinct_count = _numbers_of_values(row_numbers * value_count + value_number)
    first_rows = np.empty(distinct_count, np.int64)
    first_rows[row_numbers[::-1]] = np.arange(len(row_numbers))[
        ::-1
    ]  # numpy performs the assignments in order: the last assignment to an index remains
    return first_rows, row_numbers


def _numbers_of_values(column: Column) -> tuple[Column, int]:
    """Return the index of each value among the sorted distinct values, and the number of distinct values."""
    if len(column) and column.min() >= 0 and column.max() < _MAX_TABLE_VALUE:
        is_present = np.zeros(int(column.max()) + 1, np.bool_)
        is_present[column] = True
        return (np.cumsum(is_present) - 1)[column], int(is_present.sum())
    distinct_values, value_numbers = np.unique(column, return_inverse=True)
    return value_numbers.reshape(-1), len(distinct_values)


def work_tracks(timeline: Timeline) -> WorkTracks:
    """Return one track for each device and stream; work that overlaps other work gets sibling tracks."""
    work = timeline.work
    _, stream = distinct_rows(work.device, work.stream)
    lane = flat_lanes(stream, work.start_ns, work.end_ns)
    first_rows, track = distinct_rows(work.device, work.stream, lane)
    rows = zip(
        work.device[first_rows].tolist(),
        work.stream[first_rows].tolist(),
        lane[first_rows].tolist(),
        strict=True,
    )
    tracks = [
        Track(_with_lane(f"stream {stream}", lane), device, stream, lane)
        for device, stream, lane in rows
    ]
    return WorkTracks(tracks, track)


def host_tracks(timeline: Timeline) -> HostTracks:
    """Return one track for each thread; spans that do not nest get sibling tracks."""
    span_tables: tuple[Spans, ...] = (timeline.ranges, timeline.calls)
    start = np.concatenate([table.start_ns for table in span_tables])
    end = np.concatenate([table.end_ns for table in span_tables])
    thread = np.concatenate([table.thread.astype(np.uint64) for table in span_tables])
    source = np.repeat(np.arange(len(span_tables)), [len(table.start_ns) for table in span_tables])
    row = np.concatenate([np.arange(len(table.start_ns)) for table in span_tables])
    # If a range and a call have the same times, the range contains the call.
    span_order = np.lexsort((source, -end, start))
    start, end, thread, source, row = (
        column[span_order] for column in (start, end, thread, source, row)
    )
    _, thread_number = distinct_rows(thread)
    lane = nested_lanes(thread_number, start, end)
    first_rows, track = distinct_rows(thread, lane)
    tracks = [
        Track(_with_lane(_thread_name(thread), lane), thread, thread, lane)
        for thread, lane in zip(thread[first_rows].tolist(), lane[first_rows].tolist(), strict=True)
    ]
    return HostTracks(tracks, track, source.astype(np.uint8), row, start, end)


def _thread_name(thread: int) -> str:
    return f"thread {thread}" if thread else "ranges of the process"


def _with_lane(name: str, lane: int) -> str:
    return f"{name} · lane {lane + 1}" if lane else name


def device_names(timeline: Timeline) -> dict[int, str]:
    """Return a name for each device that has work or properties: "GPU 0 (NVIDIA H200)"."""
    devices = sorted(set(np.unique(timeline.work.device).tolist()))
    name_by_device = {device: f"GPU {device}" for device in devices}
    for record in timeline.activities.records_of(EventKind.DEVICE_INFO):
        device, name = int(record["device"]), timeline.names[int(record["name"])]
        name_by_device[device] = f"GPU {device} ({name})" if name else f"GPU {device}"
    return name_by_device
