"""Arrange the activities of a process as sorted columns: GPU work, API calls, ranges, marks and waits.

The exports and the interactive page read these columns. Times are nanoseconds on the clock of the trace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.profile.activities import Activities
from cudakit.stacks import Stack
from cudakit.trace.kinds import LIBRARY_DOMAINS, Direction, EventKind, MemoryKind
from cudakit.trace.trace_file import Records

Column: TypeAlias = npt.NDArray[Any]

# Times of damaged traces are clipped to 73 years, so that differences of times fit into 64 bits.
_LATEST_NS = 2**61
# Maximum number of ranges of one thread and domain that are open at once. Further pushes are ignored, so that
# programs that never end their ranges do not use ever more memory.
_MAX_OPEN_RANGES = 1024
_PROCESS = -1  # thread number of a range of the process, which any thread may end

_DIRECTION_NAMES = {
    Direction.HOST_TO_DEVICE: "HtoD",
    Direction.DEVICE_TO_HOST: "DtoH",
    Direction.DEVICE_TO_DEVICE: "DtoD",
    Direction.HOST_TO_HOST: "HtoH",
}


class WorkKind(IntEnum):
    """The kind of a piece of GPU work."""

    KERNEL = 0
    COPY = 1
    MEMSET = 2


_EVENT_KINDS = {
    WorkKind.KERNEL: EventKind.KERNEL_RUN,
    WorkKind.COPY: EventKind.COPY_RUN,
    WorkKind.MEMSET: EventKind.FILL_RUN,
}


@dataclass(frozen=True, slots=True)
class GpuWork:
    """Kernels, copies and memsets, sorted by start; every array has one item for each piece of work."""

    kind: Column  # WorkKind of each piece of work
    record: Column  # row in the activities of the kind, which has the details
    start_ns: Column
    end_ns: Column  # never before the start
    device: Column
    context: Column
    stream: Column
    name: Column  # index of ``Timeline.names``
    correlation: Column
    call: (
        Column  # row of ``Timeline.calls`` that launched the work; -1 if the call was not recorded
    )
    site: Column  # index of ``Timeline.stacks``
    graph_node: Column
    size_bytes: Column  # bytes that were copied or set; 0 for a kernel


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans of time on the host, sorted by start, outer spans first."""

    start_ns: Column
    end_ns: Column  # never before the start
    thread: Column  # thread number; 0 for a range of the process, which no thread contains
    name: Column  # index of ``Timeline.names``


@dataclass(frozen=True, slots=True)
class HostCalls(Spans):
    """Calls of the CUDA API."""

    correlation: Column
    site: Column  # index of ``Timeline.stacks``


@dataclass(frozen=True, slots=True)
class Timeline:
    """The activities of one process as columns."""

    process: int
    simulated: bool
    names: Sequence[str]
    stacks: Sequence[Stack]
    activities: Activities
    work: GpuWork
    calls: HostCalls
    ranges: Spans
    marks: Spans  # NVTX marks, whose ends equal their starts

    def first_ns(self) -> int | None:
        """Return the earliest start; None if nothing was recorded."""
        tables = (self.work, self.calls, self.ranges, self.marks)
        starts = [int(table.start_ns[0]) for table in tables if len(table.start_ns)]
        return min(starts, default=None)

    def last_ns(self) -> int | None:
        """Return the latest end; None if nothing was recorded."""
        tables = (self.work, self.calls, self.ranges, self.marks)
        ends = [int(table.end_ns.max()) for table in tables if len(table.end_ns)]
        return max(ends, default=None)


def first_time(timelines: Sequence[Timeline]) -> int:
    """Return the earliest start of all processes, in nanoseconds; 0 if nothing was recorded."""
    starts = [start for timeline in timelines if (start := timeline.first_ns()) is not None]
    return min(starts, default=0)


def timeline(activities: Activities) -> Timeline:
    """Return the activities of a process as sorted columns."""
    names = _Names(activities.strings)
    calls = _host_calls(activities)
    return Timeline(
        activities.process,
        activities.simulated,
        names.texts,
        activities.stacks,
        activities,
        _gpu_work(activities, calls, names),
        calls,
        _ranges(activities),
        _marks(activities),
    )


class _Names:
    """The strings of the trace, and the names of copies, memsets and waits after them."""

    def __init__(self, strings: Sequence[str]) -> None:
        self.texts = list(strings)
        self._index_by_text: dict[str, int] = {}

    def index(self, text: str) -> int:
        if text not in self._index_by_text:
            self._index_by_text[text] = len(self.texts)
            self.texts.append(text)
        return self._index_by_text[text]


# --- API calls and waits ---------------------------------------------------------------------------


def _times(records: Records) -> tuple[Column, Column]:
    """Return start and end of each record; an end before the start becomes the start."""
    start = np.clip(records["start_ns"], -_LATEST_NS, _LATEST_NS)
    return start, np.maximum(np.clip(records["end_ns"], -_LATEST_NS, _LATEST_NS), start)


def _host_calls(activities: Activities) -> HostCalls:
    records = activities.records_of(EventKind.API_CALL)
    start, end = _times(records)
    call_order = np.lexsort((-end, start))
    records = records[call_order]
    return HostCalls(
        start[call_order],
        end[call_order],
        records["thread"],
        records["function"].astype(np.int64),
        records["correlation"],
        records["site"],
    )


def _rows_by_number(numbers_of_rows: Column, searched_numbers: Column) -> Column:
    """Return the first row that has each number; -1 if no row has the number, or if it is 0."""
    if not len(numbers_of_rows):
        return np.full(len(searched_numbers), -1, np.int64)
    number_order = np.argsort(numbers_of_rows, kind="stable")
    places = np.minimum(
        np.searchsorted(numbers_of_rows[number_order], searched_numbers), len(numbers_of_rows) - 1
    )
    rows = number_order[places]
    return np.where((numbers_of_rows[rows] == searched_numbers) & (searched_numbers != 0), rows, -1)


def _values_at_rows_or_zero(column_values: Column, row: Column) -> Column:
    """Return the value of each row; 0 for row -1."""
    if not len(column_values):
        return np.zeros(len(row), column_values.dtype)
    return np.where(row >= 0, column_values[np.maximum(row, 0)], 0)


# --- GPU work --------------------------------------------------------------------------------------


def _gpu_work(activities: Activities, calls: HostCalls, names: _Names) -> GpuWork:
    tables_by_kind = {
        kind: activities.records_of(event_kind) for kind, event_kind in _EVENT_KINDS.items()
    }
    name_of_record = {
        WorkKind.KERNEL: tables_by_kind[WorkKind.KERNEL]["name"].astype(np.int64),
        WorkKind.COPY: _copy_names(tables_by_kind[WorkKind.COPY], names),
        WorkKind.MEMSET: _memset_names(tables_by_kind[WorkKind.MEMSET], names),
    }

    def join_field(field: str) -> Column:
        return np.concatenate([table[field] for table in tables_by_kind.values()])

    record_counts = [len(table) for table in tables_by_kind.values()]
    start_end_pairs = [_times(table) for table in tables_by_kind.values()]
    start = np.concatenate([start for start, _ in start_end_pairs])
    work_order = np.argsort(start, kind="stable")
    size_bytes = np.concatenate(
        [
            np.zeros(len(table), np.uint64) if kind is WorkKind.KERNEL else table["size_bytes"]
            for kind, table in tables_by_kind.items()
        ]
    )
    correlation, graph_node = (
        join_field("correlation")[work_order],
        join_field("graph_node")[work_order],
    )
    call = _rows_by_number(calls.correlation, correlation)
    return GpuWork(
        kind=np.repeat(np.array(list(tables_by_kind), np.uint8), record_counts)[work_order],
        record=np.concatenate([np.arange(record_count) for record_count in record_counts])[
            work_order
        ],
        start_ns=start[work_order],
        end_ns=np.concatenate([end for _, end in start_end_pairs])[work_order],
        device=join_field("device")[work_order],
        context=join_field("context")[work_order],
        stream=join_field("stream")[work_order],
        name=np.concatenate(list(name_of_record.values()))[work_order],
        correlation=correlation,
        call=call,
        site=_sites(activities, calls, call, graph_node),
        graph_node=graph_node,
        size_bytes=size_bytes[work_order],
    )


def _sites(activities: Activities, calls: HostCalls, call: Column, graph_node: Column) -> Column:
    """Return the call stack of each piece of work: that of its graph node's capture, or of its API call."""
    nodes = activities.records_of(EventKind.GRAPH_NODE_SITE)
    node_row = _rows_by_number(nodes["graph_node"], graph_node)
    site_of_node = _values_at_rows_or_zero(nodes["site"], node_row)
    return np.where(site_of_node != 0, site_of_node, _values_at_rows_or_zero(calls.site, call))


def _copy_names(copies: Records, names: _Names) -> Column:
    """Return the name of each copy, such as "Memcpy HtoD (Pageable -> Device)", as Kineto names it."""
    columns = ("direction", "source_memory", "destination_memory")
    is_peer = copies["peer_device"] >= 0
    copy_keys = np.stack(
        [*(copies[column].astype(np.int64) for column in columns), is_peer], axis=1
    )
    unique_keys, key_of_copy = np.unique(copy_keys, axis=0, return_inverse=True)
    indices = [
        names.index(
            f"Memcpy {'PtoP' if peer else _DIRECTION_NAMES[Direction(direction)]} "
            f"({_memory_name(source)} -> {_memory_name(destination)})"
        )
        for direction, source, destination, peer in unique_keys.tolist()
    ]
    return np.array(indices, np.int64)[key_of_copy.reshape(-1)]


def _memory_name(kind_number: int) -> str:
    return MemoryKind(kind_number).name.replace("_", " ").title()


def _memset_names(memsets: Records, names: _Names) -> Column:
    return np.full(len(memsets), names.index("Memset (Device)") if len(memsets) else 0, np.int64)


# --- ranges and marks ------------------------------------------------------------------------------


def _ranges(activities: Activities) -> Spans:
    """Pair the pushes and pops of NVTX ranges.

    A range that did not end lasts until the last known time, but an unended range of a library has no
    span: NCCL 2.28 does not end the range of ncclCommInitRankConfig.
    """
    pushes, pops = (
        activities.records_of(EventKind.RANGE_PUSH),
        activities.records_of(EventKind.RANGE_POP),
    )
    # A copied range repeats a range of the thread that called ``backward()``.
    pushes, pops = pushes[~pushes["is_copy"]], pops[~pops["is_copy"]]
    event_times = np.clip(
        np.concatenate([pushes["time_ns"], pops["time_ns"]]), -_LATEST_NS, _LATEST_NS
    )
    is_pop = np.repeat([False, True], [len(pushes), len(pops)])
    event_order = np.lexsort((is_pop, np.concatenate([pushes["seq"], pops["seq"]]), event_times))
    key_fields = ("thread", "domain", "number")
    key_columns = [
        np.concatenate([pushes[name], pops[name]])[event_order].tolist() for name in key_fields
    ]
    name_of_event = np.concatenate([pushes["name"], np.zeros(len(pops), np.uint32)])
    rows = zip(
        event_times[event_order].tolist(),
        is_pop[event_order].tolist(),
        name_of_event[event_order].tolist(),
        *key_columns,
        strict=True,
    )
    last_ns = int(event_times.max()) if len(event_times) else 0
    for kind in (EventKind.KERNEL_RUN, EventKind.API_CALL, EventKind.COPY_RUN):
        records = activities.records_of(kind)
        if len(records):
            last_ns = max(last_ns, int(_times(records)[1].max()))
    libraries = {
        domain_number
        for domain_number, text in enumerate(activities.strings)
        if text in LIBRARY_DOMAINS
    }
    return _spans(_paired_ranges(rows, last_ns, libraries))


def _paired_ranges(rows: Any, last_ns: int, libraries: Set[int]) -> list[tuple[int, int, int, int]]:
    """Return (start, end, thread, name) of each range, from its pushes and pops in the order of time.

    ``libraries`` has the domains whose ranges have no span if they do not end.
    """
    open_ranges: defaultdict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    paired_ranges = []
    for time, is_pop, name_index, thread, domain, range_number in rows:
        # A range of the process has a number, and any thread may end it.
        range_key = (_PROCESS, range_number) if range_number else (thread, domain)
        ranges = open_ranges[range_key]
        if not is_pop:
            if len(ranges) < _MAX_OPEN_RANGES:
                ranges.append((time, 0 if range_number else thread, name_index))
        elif ranges:
            start, range_thread, range_name = ranges.pop()
            paired_ranges.append((start, time, range_thread, range_name))
    for (thread_number, domain), ranges in open_ranges.items():
        if thread_number != _PROCESS and domain in libraries:
            continue
        paired_ranges += [
            (start, max(start, last_ns), thread, name_index) for start, thread, name_index in ranges
        ]
    return paired_ranges


def _spans(rows: list[tuple[int, int, int, int]]) -> Spans:
    start = np.array([row[0] for row in rows], np.int64)
    end = np.array([row[1] for row in rows], np.int64)
    span_order = np.lexsort((-end, start))
    thread = np.array([row[2] for row in rows], np.uint64)
    name = np.array([row[3] for row in rows], np.int64)
    return Spans(start[span_order], end[span_order], thread[span_order], name[span_order])


def _marks(activities: Activities) -> Spans:
    records = activities.records_of(EventKind.MARK)
    mark_times = np.clip(records["time_ns"], -_LATEST_NS, _LATEST_NS)
    mark_order = np.argsort(mark_times, kind="stable")
    mark_times, records = mark_times[mark_order], records[mark_order]
    return Spans(mark_times, mark_times, records["thread"], records["name"].astype(np.int64))
