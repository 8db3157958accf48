"""Collect the events of a profile, and arrange those of a process as sorted columns.

The columns have GPU work, API calls, ranges, marks and waits. The exports and the interactive page read them.
Times are nanoseconds on the clock of the trace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from cudakit.errors import InputError
from cudakit.input_files import ExpectedFile, check_schema, read_error, read_json
from cudakit.profile.result import Collective, Copies, HostWait, Kernel, ProfileResult
from cudakit.serialize import Mismatch, from_plain
from cudakit.stacks import Frame, Stack
from cudakit.trace.kinds import LIBRARY_DOMAINS, Direction, EventKind, MemoryKind
from cudakit.trace.run_log import LogReader, Outcome
from cudakit.trace.spool import Batch
from cudakit.trace.trace_file import Records, layout

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


# --- Collect the events of a profile, one table of columns for each kind; read saved profiles ------

# Kinds of events that make up a profile.
_PROFILE_EVENT_KINDS = (
    EventKind.API_CALL,
    EventKind.KERNEL_RUN,
    EventKind.COPY_RUN,
    EventKind.FILL_RUN,
    EventKind.GRAPH_NODE_SITE,
    EventKind.PROFILE_WINDOW,
    EventKind.DEVICE_INFO,
    EventKind.RANGE_PUSH,
    EventKind.RANGE_POP,
    EventKind.MARK,
    EventKind.GAP,
    EventKind.COMMUNICATOR,
    EventKind.COLLECTIVE,
)
# Kinds of events that are work of a GPU.
_GPU_WORK = (EventKind.KERNEL_RUN, EventKind.COPY_RUN, EventKind.FILL_RUN)
# The fields of each kind that are indices of the string table.
_TEXT_FIELDS: dict[EventKind, tuple[str, ...]] = {
    EventKind.API_CALL: ("function",),
    EventKind.KERNEL_RUN: ("name",),
    EventKind.DEVICE_INFO: ("name",),
    EventKind.RANGE_PUSH: ("name", "domain"),
    EventKind.RANGE_POP: ("domain",),
    EventKind.MARK: ("name", "domain"),
    EventKind.GAP: ("reason",),
    EventKind.COMMUNICATOR: ("name",),
}


@dataclass(frozen=True, slots=True)
class Activities:
    """The activities of one process, as numpy records in the order of the trace (``trace_file.layout``).

    Text fields are indices of ``strings``; ``site`` is an index of ``stacks``, where 0 is the empty stack.
    Records of CUPTI arrive in buffers, so rows are not sorted by time. The site of a kernel, copy or
    memset is that of the API call with the same correlation, or of its graph node.
    """

    process: int
    simulated: bool
    strings: Sequence[str]
    stacks: Sequence[Stack]
    records: dict[EventKind, Records]

    @property
    def rank(self) -> int | None:
        """The rank of the process in a job, as of torchrun, or None if it is unknown."""
        ranks = self.records[EventKind.PROFILE_WINDOW]["rank"]
        return int(ranks[0]) if len(ranks) and ranks[0] >= 0 else None

    @property
    def has_work(self) -> bool:
        """Whether a kernel, copy or memset of the process ran on a device."""
        return any(len(self.records[kind]) for kind in _GPU_WORK)

    @property
    def has_cuda_calls(self) -> bool:
        """Whether the process called CUDA while it was profiled."""
        return bool(len(self.records[EventKind.API_CALL]))


class _Process:
    """The records of one process, and the strings and stacks of all of its traces, each stored once."""

    def __init__(self) -> None:
        self.simulated = False
        self.chunks: dict[EventKind, list[Records]] = {kind: [] for kind in _PROFILE_EVENT_KINDS}
        self.strings: dict[str, int] = {}
        self.stacks: dict[Stack, int] = {(): 0}
        # For each trace, the indices of its strings and of its stacks in these tables, by the number of
        # the trace.
        self.string_indices: dict[int, _Index] = {}
        self.stack_indices: dict[int, _Index] = {}

    def add(self, batch: Batch) -> None:
        self.simulated |= batch.simulated
        trace = batch.trace_number
        strings = _extend_indices(self.string_indices, trace, batch.strings, self.strings)
        sites = _extend_indices(self.stack_indices, trace, batch.stacks, self.stacks)
        kinds = batch.records["kind"]
        for kind, chunks in self.chunks.items():
            is_kind = kinds == kind
            if not is_kind.any():
                continue
            rows = batch.records[is_kind].view(layout(kind))
            rows["site"] = sites[rows["site"]]
            for name in _TEXT_FIELDS.get(kind, ()):
                rows[name] = strings[rows[name]]
            chunks.append(rows)


class ActivityCollector:
    """Collects the batches of records of all processes."""

    def __init__(self) -> None:
        self._processes: defaultdict[int, _Process] = defaultdict(_Process)

    def add(self, batch: Batch) -> None:
        """Keep the records of a batch that belong to a profile."""
        self._processes[batch.process].add(batch)

    def activities(self) -> list[Activities]:
        """Return the activities of each process, in the order of their PIDs."""
        return [
            Activities(
                number,
                process.simulated,
                tuple(process.strings),
                tuple(process.stacks),
                {
                    kind: np.concatenate(chunks) if chunks else np.empty(0, layout(kind))
                    for kind, chunks in process.chunks.items()
                },
            )
            for number, process in sorted(self._processes.items())
        ]


_Index = npt.NDArray[np.uint32]
_Item = TypeVar("_Item", str, Stack)


def _extend_indices(
    indices_of_trace: dict[int, _Index],
    trace_number: int,
    items: Sequence[_Item],
    index_by_item: dict[_Item, int],
) -> _Index:
    """Return the index of each string or stack of a trace; only new strings and stacks are looked up."""
    indices = indices_of_trace.get(trace_number, np.empty(0, np.uint32))
    if len(items) > len(indices):
        new_indices = [
            index_by_item.setdefault(item, len(index_by_item)) for item in items[len(indices) :]
        ]
        indices = np.concatenate([indices, np.array(new_indices, np.uint32)])
        indices_of_trace[trace_number] = indices
    return indices


# --- reading logs and saved results ----------------------------------------------------------------

# Kinds of events that only a log of run --sanitize has.
_SANITIZE_KINDS: Final = (EventKind.LAUNCH, EventKind.COPY, EventKind.FILL, EventKind.GRAPH_LAUNCH)
_PROFILE_FILE: Final = ExpectedFile(
    "a profile", "write a profile with: cudakit run --profile --log profile.log PROGRAM"
)


def is_saved_result(path: Path) -> bool:
    """Return whether a file begins as JSON. Raises InputError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"["))
    except OSError as error:
        raise read_error(path, error) from None


def load_log(
    path: Path, progress: Callable[[str, float], None] = lambda _stage, _fraction: None
) -> tuple[Sequence[Activities], Outcome]:
    """Return the activities of a log, and the outcome of its run.

    Raises InputError if the log is damaged or has no profile.
    """
    collector = ActivityCollector()
    has_launches = False
    with LogReader(path, _PROFILE_FILE) as log:
        for batch in log.batches():
            collector.add(batch)
            has_launches |= bool(np.isin(batch.records["kind"], _SANITIZE_KINDS).any())
            progress("reading the log", log.fraction)
    activities = collector.activities()
    if has_launches and not any(process_activities.has_work for process_activities in activities):
        raise InputError(
            f"{path} was written by run --sanitize, so it has no times for a profile",
            hint=f"find its races with: cudakit sanitize {path}",
        )
    return activities, log.outcome


def load_result(path: Path) -> ProfileResult:
    """Read a saved result. Raises InputError if it is damaged, or has another schema."""
    document = read_json(path, _PROFILE_FILE)
    document = check_schema(path, document, ProfileResult.schema, _PROFILE_FILE)
    try:
        result = from_plain(ProfileResult, document)
    except Mismatch as mismatch:
        raise InputError(f"{path} is damaged: {mismatch}", hint=_PROFILE_FILE.hint) from None
    if contradiction := _contradiction(result):
        raise InputError(f"{path} is damaged: {contradiction}", hint=_PROFILE_FILE.hint)
    return result


def _contradiction(result: ProfileResult) -> str:
    """Return a sentence on two parts of a result that contradict each other, or an empty text."""
    devices = {(device.process, device.device) for device in result.devices}
    for index, finding in enumerate(result.findings):
        if (finding.process, finding.device) not in devices:
            return f"findings[{index}] is of a device that is not in devices"
        if not _has_site(finding.stack, finding.site):
            return f"findings[{index}].site is not in its stack"
    for index, device in enumerate(result.devices):
        if not 0 <= device.steps.warm_up <= len(device.steps.steps):
            return f"devices[{index}].steps.warm_up is not the number of some steps"
        rows: tuple[Kernel | Copies | Collective | HostWait, ...] = (
            *device.kernels,
            *device.copies,
            *device.collectives,
            *device.waits,
        )
        if not all(_has_site(row.stack, row.site) for row in rows):
            return f"devices[{index}] has a site that is not in its stack"
    return ""


def _has_site(stack: Sequence[Frame], site: int) -> bool:
    """Return whether a call site is the index of a frame; the call site of an empty stack is 0."""
    return 0 <= site < max(len(stack), 1)
