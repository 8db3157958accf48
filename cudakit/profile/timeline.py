"""Arrange the activities of a process as sorted columns: GPU work, API calls, ranges, marks and waits.

The exports and the interactive page read these columns. Column are nanoseconds on the clock of the trace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.profile.activities import Activities
from cudakit.stacks import Stack
from cudakit.trace.kinds import LIBRARY_DOMAINS, Direction, EventKind, MemoryKind
from cudakit.trace.trace_file import Records

Column: TypeAlias = npt.NDArray[Any]

# Column of damaged traces are clipped to 73 years, so that differences of times fit into 64 bits.
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
    call: Column  # row of ``Timeline.calls`` that launched the work; -1 if it was not recorded
    site: Column  # index of ``Timeline.stacks``
    graph_node: Column
    size_bytes: Column  # bytes that were copied or set; 0 for a kernel

    def rows(self, rows: Column) -> GpuWork:
        """Return a part of the work."""
        return GpuWork(*(getattr(self, field.name)[rows] for field in fields(self)))


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
    records = activities.records[EventKind.API_CALL]
    start, end = _times(records)
    call_order = np.lexsort((-end, start))
    records = records[call_order]
    calls = HostCalls(
        start[call_order],
        end[call_order],
        records["thread"],
        records["function"].astype(np.int64),
        records["correlation"],
        records["site"],
    )
    work, names = _gpu_work(activities, calls)
    return Timeline(
        activities.process,
        activities.simulated,
        names,
        activities.stacks,
        activities,
        work,
        calls,
        _ranges(activities),
        _marks(activities),
    )


# --- API calls and waits ---------------------------------------------------------------------------


def _times(records: Records) -> tuple[Column, Column]:
    """Return start and end of each record; an end before the start becomes the start."""
    start = np.clip(records["start_ns"], -_LATEST_NS, _LATEST_NS)
    return start, np.maximum(np.clip(records["end_ns"], -_LATEST_NS, _LATEST_NS), start)


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


def _gpu_work(activities: Activities, calls: HostCalls) -> tuple[GpuWork, Sequence[str]]:
    """Return the work, and the strings of the trace with the names of copies and memsets after them."""
    tables = {kind: activities.records[event_kind] for kind, event_kind in _EVENT_KINDS.items()}
    copy_names, copy_name = _copy_names(tables[WorkKind.COPY])
    first_name = len(activities.strings)
    names = [
        tables[WorkKind.KERNEL]["name"].astype(np.int64),
        first_name + copy_name,
        np.full(len(tables[WorkKind.MEMSET]), first_name + len(copy_names), np.int64),
    ]
    sizes = [
        np.zeros(len(table), np.uint64) if kind is WorkKind.KERNEL else table["size_bytes"]
        for kind, table in tables.items()
    ]
    starts, ends = zip(*map(_times, tables.values()), strict=True)
    lengths = list(map(len, tables.values()))
    start = np.concatenate(starts)
    order = np.argsort(start, kind="stable")

    def join(field: str) -> Column:
        return np.concatenate([table[field] for table in tables.values()])[order]

    correlation, graph_node = join("correlation"), join("graph_node")
    call = _rows_by_number(calls.correlation, correlation)
    nodes = activities.records[EventKind.GRAPH_NODE_SITE]
    node_site = _values_at_rows_or_zero(
        nodes["site"], _rows_by_number(nodes["graph_node"], graph_node)
    )
    work = GpuWork(
        kind=np.repeat(np.array(list(tables), np.uint8), lengths)[order],
        record=np.concatenate(list(map(np.arange, lengths)))[order],
        start_ns=start[order],
        end_ns=np.concatenate(ends)[order],
        device=join("device"),
        context=join("context"),
        stream=join("stream"),
        name=np.concatenate(names)[order],
        correlation=correlation,
        call=call,
        # The stack of the capture of a graph's node, or of the API call.
        site=np.where(node_site != 0, node_site, _values_at_rows_or_zero(calls.site, call)),
        graph_node=graph_node,
        size_bytes=np.concatenate(sizes)[order],
    )
    return work, (*activities.strings, *copy_names, "Memset (Device)")


def _copy_names(copies: Records) -> tuple[Sequence[str], Column]:
    """Return names such as "Memcpy HtoD (Pageable -> Device)", as Kineto has them, and that of each copy."""
    columns = ("direction", "source_memory", "destination_memory")
    keys = np.stack(
        [*(copies[column].astype(np.int64) for column in columns), copies["peer_device"] >= 0],
        axis=1,
    )
    unique_keys, key_of_copy = np.unique(keys, axis=0, return_inverse=True)
    numbers: dict[str, int] = {}
    number_of_key = []
    for direction, *memory, peer in unique_keys.tolist():
        source, destination = (MemoryKind(kind).name.replace("_", " ").title() for kind in memory)
        direction_name = "PtoP" if peer else _DIRECTION_NAMES[Direction(direction)]
        name = f"Memcpy {direction_name} ({source} -> {destination})"
        number_of_key.append(numbers.setdefault(name, len(numbers)))
    return list(numbers), np.array(number_of_key, np.int64)[key_of_copy.reshape(-1)]


# --- ranges and marks ------------------------------------------------------------------------------


def range_events(
    activities: Activities, *, with_copies: bool = True
) -> Iterator[tuple[int, bool, int, int, int, int]]:
    """Yield time, is_pop, name, domain, thread and number of the ends of NVTX ranges, sorted by time.

    A copy of a range repeats a range of the thread that called ``backward()``.
    """
    pushes = activities.records[EventKind.RANGE_PUSH]
    pops = activities.records[EventKind.RANGE_POP]
    if not with_copies:
        pushes, pops = pushes[~pushes["is_copy"]], pops[~pops["is_copy"]]
    time = np.clip(np.concatenate([pushes["time_ns"], pops["time_ns"]]), -_LATEST_NS, _LATEST_NS)
    is_pop = np.repeat([False, True], [len(pushes), len(pops)])
    order = np.lexsort((is_pop, np.concatenate([pushes["seq"], pops["seq"]]), time))
    columns = [time, is_pop, np.concatenate([pushes["name"], np.zeros(len(pops), np.uint32)])]
    columns += [
        np.concatenate([pushes[name], pops[name]]) for name in ("domain", "thread", "number")
    ]
    return zip(*(column[order].tolist() for column in columns), strict=True)


def _ranges(activities: Activities) -> Spans:
    """Pair the pushes and pops of NVTX ranges.

    A range that did not end lasts until the last known time, but an unended range of a library has no
    span: NCCL 2.28 does not end the range of ncclCommInitRankConfig.
    """
    # Start, thread and name of the open ranges of each thread and domain. A range of the process has a
    # number, and any thread may end it.
    open_ranges: defaultdict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    rows = []
    last_ns = 0
    for last_ns, is_pop, name, domain, thread, number in range_events(
        activities, with_copies=False
    ):
        ranges = open_ranges[(_PROCESS, number) if number else (thread, domain)]
        if is_pop and ranges:
            start, range_thread, range_name = ranges.pop()
            rows.append((start, last_ns, range_thread, range_name))
        elif not is_pop and len(ranges) < _MAX_OPEN_RANGES:
            ranges.append((last_ns, 0 if number else thread, name))
    for kind in (EventKind.KERNEL_RUN, EventKind.API_CALL, EventKind.COPY_RUN):
        last_ns = max(last_ns, int(_times(activities.records[kind])[1].max(initial=last_ns)))
    for (open_thread, domain), ranges in open_ranges.items():
        if open_thread == _PROCESS or activities.strings[domain] not in LIBRARY_DOMAINS:
            rows += [(start, max(start, last_ns), thread, name) for start, thread, name in ranges]
    starts, ends, threads, names = zip(*rows, strict=True) if rows else ((), (), (), ())
    start_ns, end_ns = np.array(starts, np.int64), np.array(ends, np.int64)
    order = np.lexsort((-end_ns, start_ns))
    return Spans(
        start_ns[order],
        end_ns[order],
        np.array(threads, np.uint64)[order],
        np.array(names, np.int64)[order],
    )


def _marks(activities: Activities) -> Spans:
    records = activities.records[EventKind.MARK]
    times = np.clip(records["time_ns"], -_LATEST_NS, _LATEST_NS)
    order = np.argsort(times, kind="stable")
    times, records = times[order], records[order]
    return Spans(times, times, records["thread"], records["name"].astype(np.int64))
