"""What other tools show: timelines (tracks, spans, instants, counters, arrows) and weighted call stacks.

A feature says what happened when, as columns of numbers; ``chrome`` and ``perfetto`` write it, and ``flame``
writes weighted call stacks. Times are nanoseconds, and the spans of a track nest or do not overlap, because
trace viewers drop others. ``flat_lanes`` and ``nested_lanes`` divide spans that overlap into tracks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.report.escape import escape_invisible
from cudakit.stacks import Frame

Column: TypeAlias = npt.NDArray[Any]

# Number of characters to which a name is cut. Names of C++ templates have thousands of characters.
_MAX_CHARACTERS = 4000
# Number of lanes that are searched for an enclosing span; further spans get lanes without nesting. This
# bounds the time for damaged traces, in which all spans of a thread may overlap.
_NESTED_LANES = 16
# Distinct values below this limit are found with a table, which is faster than sorting.
_MAX_TABLE_VALUE = 1 << 22


def printable_text(text: str) -> str:
    """Return untrusted text in one line of bounded length, without invisible characters."""
    return escape_invisible(text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…")


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """Texts by index; ``text_of`` makes a text from an item, for the indices that a file contains."""

    items: Sequence[Any]
    text_of: Callable[[Any], str] = str

    def text(self, index: int) -> str:
        """Return a text, printable and in one line."""
        return printable_text(self.text_of(self.items[index]))


@dataclass(frozen=True, slots=True)
class Argument:
    """A detail of spans: one number, text or size of a grid for each span.

    ``values`` are numbers, or indices of ``texts``, or have three columns, which are the sizes of a grid.
    Some details have another name in Chrome traces, in which tools for Kineto's traces look them up. A detail
    without a name is not in the format.
    """

    name: str
    values: Column
    texts: Texts | None = None
    chrome_name: str | None = None  # None: as ``name``
    is_address: bool = False


@dataclass(frozen=True, slots=True)
class SpanKind:
    """A category of spans, and a function that returns their details by row."""

    category: str
    arguments: Callable[[Column], Sequence[Argument]] = lambda _rows: ()
    chrome_category: str = ""  # empty: as ``category``


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Spans of time, sorted by start, outer spans first; every column has one item for each span."""

    start_ns: Column
    end_ns: Column  # never before the start
    track: Column  # index of ``Timeline.tracks``
    name: Column  # index of ``names``
    names: Texts
    kind: Column  # index of ``kinds``
    kinds: Sequence[SpanKind]
    nest: bool = False  # whether spans of a track contain others; otherwise none overlap
    # Number of the arrow that begins or ends at each span; 0 for none. An arrow has one begin.
    arrow: Column | None = None
    begins_arrows: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Instants:
    """Named instants of tracks; track -1 is the first group."""

    time_ns: Column
    track: Column
    name: Column  # index of ``names``
    names: Texts
    category: str = ""
    arguments: Sequence[Argument] = ()


@dataclass(frozen=True, slots=True)
class Counter:
    """A curve, which keeps each value until the next time."""

    name: str
    unit: str  # such as "bytes"
    time_ns: Column
    values: Column


@dataclass(frozen=True, slots=True)
class Group:
    """A process, or a device that a process uses: the heading of tracks."""

    name: str
    number: int  # number of the process in Chrome traces
    process: int  # PID
    is_device: bool = False
    label: str = ""
    remark: str = ""  # follows the name


@dataclass(frozen=True, slots=True)
class Track:
    """A row of a trace viewer."""

    name: str
    group: int  # index of ``Timeline.groups``
    number: int  # number of the thread in Chrome traces


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happened when; times count from ``begin_ns``."""

    groups: Sequence[Group]
    tracks: Sequence[Track] = ()
    spans: Sequence[Spans] = ()
    instants: Sequence[Instants] = ()
    counters: Sequence[Counter] = ()
    begin_ns: int = 0
    # Members of a Chrome trace beside its events.
    chrome_head: Mapping[str, Any] = field(default_factory=dict)


def row_blocks(row_count: int, block_rows: int) -> Iterator[Column]:
    """Yield the numbers of rows in blocks, which bound the memory of an export."""
    for first in range(0, row_count, block_rows):
        yield np.arange(first, min(first + block_rows, row_count))


# --- weighted call stacks --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Flame:
    """Call stacks, outermost frame first, with the bytes or the time of each alone."""

    name: str
    unit: Literal["bytes", "nanoseconds"]
    stacks: Iterable[tuple[Sequence[Frame], int]]
    # first frame of each collapsed stack, if there are several Flames; may be empty
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class Flames:
    """The call stacks of a report: a Flame for each process or device."""

    title: str
    flames: Sequence[Flame]


# --- distinct rows ---------------------------------------------------------------------------------


def distinct_rows(*columns: Column) -> tuple[Column, Column]:
    """Return the first index of each distinct row, and for each row the number of its distinct row."""
    row_numbers, distinct_count = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        value_number, value_count = _numbers_of_values(column)
        row_numbers, distinct_count = _numbers_of_values(row_numbers * value_count + value_number)
    first_rows = np.empty(distinct_count, np.int64)
    # numpy performs the assignments in order: the last assignment to an index remains.
    first_rows[row_numbers[::-1]] = np.arange(len(row_numbers))[::-1]
    return first_rows, row_numbers


def _numbers_of_values(column: Column) -> tuple[Column, int]:
    """Return the index of each value among the sorted distinct values, and the number of distinct values."""
    if len(column) and column.min() >= 0 and column.max() < _MAX_TABLE_VALUE:
        is_present = np.zeros(int(column.max()) + 1, np.bool_)
        is_present[column] = True
        return (np.cumsum(is_present) - 1)[column], int(is_present.sum())
    distinct_values, value_numbers = np.unique(column, return_inverse=True)
    return value_numbers.reshape(-1), len(distinct_values)


# --- lanes -----------------------------------------------------------------------------------------


def with_lane(name: str, lane: int) -> str:
    """Return the name of a lane of a track."""
    return f"{name} · lane {lane + 1}" if lane else name


def flat_lanes(track: Column, start: Column, end: Column) -> Column:
    """Return the lowest free lane of each span, so that no two spans of one track and lane overlap."""
    lanes = np.zeros(len(track), np.int64)
    for rows in _overlapping_groups(track, start, end, np.lexsort((end, start, track))):
        busy_lanes: list[tuple[int, int]] = []  # heap of (end, lane)
        free_lanes: list[int] = []  # heap of lanes
        lanes_of_group = []
        for span_start, span_end in zip(start[rows].tolist(), end[rows].tolist(), strict=True):
            while busy_lanes and busy_lanes[0][0] <= span_start:
                heappush(free_lanes, heappop(busy_lanes)[1])
            lane = heappop(free_lanes) if free_lanes else len(busy_lanes)
            heappush(busy_lanes, (span_end, lane))
            lanes_of_group.append(lane)
        lanes[rows] = lanes_of_group
    return lanes


def nested_lanes(track: Column, start: Column, end: Column) -> Column:
    """Return the lane of each span, so that two spans of one track and lane nest or do not overlap."""
    lanes = np.zeros(len(track), np.int64)
    for rows in _overlapping_groups(track, start, end, np.lexsort((-end, start, track))):
        open_ends: list[list[int]] = []  # ends of the open spans of each lane, the innermost last
        lanes_of_group = []
        for span_start, span_end in zip(start[rows].tolist(), end[rows].tolist(), strict=True):
            lane = -1
            for lane_number, ends in enumerate(open_ends):
                while ends and ends[-1] <= span_start:
                    ends.pop()
                if not ends or ends[-1] >= span_end:
                    lane = lane_number
                    break
            if lane < 0 and len(open_ends) < _NESTED_LANES:
                lane = len(open_ends)
                open_ends.append([])
            if lane >= 0:
                open_ends[lane].append(span_end)
            lanes_of_group.append(lane)
        lane_of_row = np.array(lanes_of_group)
        remaining = rows[lane_of_row < 0]
        lane_of_row[lane_of_row < 0] = _NESTED_LANES + flat_lanes(
            track[remaining], start[remaining], end[remaining]
        )
        lanes[rows] = lane_of_row
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
