"""Divide overlapping spans of a track into lanes, because trace viewers require that spans nest.

The lowest lane that is free takes a span. In the lane of a GPU stream, no two spans overlap. In the lane of a
host thread, a span may be within another one, as an API call is within an NVTX range.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

import numpy as np

from cudakit.profile.timeline import Column

# Number of lanes that are searched for an enclosing span; further spans get lanes without nesting. This
# bounds the time for damaged traces, in which all spans of a thread may overlap.
_NESTED_LANES = 16


def flat_lanes(track: Column, start: Column, end: Column) -> Column:
    """Return the lane of each span, so that no two spans of one track and lane overlap."""
    lanes = np.zeros(len(track), np.int64)
    for rows in _overlapping_groups(track, start, end, np.lexsort((end, start, track))):
        lanes[rows] = _assign_flat_lanes(start[rows].tolist(), end[rows].tolist())
    return lanes


def nested_lanes(track: Column, start: Column, end: Column) -> Column:
    """Return the lane of each span, so that two spans of one track and lane nest or do not overlap."""
    lanes = np.zeros(len(track), np.int64)
    for rows in _overlapping_groups(track, start, end, np.lexsort((-end, start, track))):
        lane = np.array(_assign_nested_lanes(start[rows].tolist(), end[rows].tolist()))
        remaining_rows = rows[lane < 0]
        flat_lane = flat_lanes(track[remaining_rows], start[remaining_rows], end[remaining_rows])
        lane[lane < 0] = _NESTED_LANES + flat_lane
        lanes[rows] = lane
    return lanes


def _overlapping_groups(
    track: Column, start: Column, end: Column, order: Column
) -> Iterator[Column]:
    """Yield the rows of each group of two or more spans that are connected by overlaps, in ``order``."""
    for rows in np.split(order, np.flatnonzero(np.diff(track[order])) + 1):
        if len(rows) < 2:
            continue
        latest_end = np.maximum.accumulate(end[rows])
        begins_group = np.append(True, start[rows][1:] >= latest_end[:-1])
        group_begins = np.flatnonzero(begins_group)
        group_ends = np.append(group_begins[1:], len(rows))
        for group in np.flatnonzero(group_ends - group_begins > 1).tolist():
            yield rows[group_begins[group] : group_ends[group]]


def _assign_flat_lanes(starts: list[int], ends: list[int]) -> list[int]:
    """Return the lowest free lane for each span; spans are sorted by start."""
    busy_lanes: list[tuple[int, int]] = []  # heap of (end, lane)
    free_lanes: list[int] = []  # heap of lanes
    lanes = []
    for start, end in zip(starts, ends, strict=True):
        while busy_lanes and busy_lanes[0][0] <= start:
            heappush(free_lanes, heappop(busy_lanes)[1])
        lane = heappop(free_lanes) if free_lanes else len(busy_lanes)
        heappush(busy_lanes, (end, lane))
        lanes.append(lane)
    return lanes


def _assign_nested_lanes(starts: list[int], ends: list[int]) -> list[int]:
    """Return the lowest lane in which each span nests, or -1; spans are sorted by start, longest first."""
    open_ends: list[list[int]] = []  # ends of the open spans of each lane, the innermost last
    lanes = []
    for start, end in zip(starts, ends, strict=True):
        lane = -1
        for lane_number, stack in enumerate(open_ends):
            while stack and stack[-1] <= start:
                stack.pop()
            if not stack or stack[-1] >= end:
                lane = lane_number
                break
        if lane < 0 and len(open_ends) < _NESTED_LANES:
            lane = len(open_ends)
            open_ends.append([])
        if lane >= 0:
            open_ends[lane].append(end)
        lanes.append(lane)
    return lanes
