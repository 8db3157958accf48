"""What other tools show of a profile: its timeline, the GPU time of call stacks, and a row for each work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cudakit.profile.timeline import Activities, Column, Timeline, WorkKind, first_time, timeline
from cudakit.report.document import Columns
from cudakit.report.timeline import (
    Argument,
    Flame,
    Flames,
    Group,
    Instants,
    SpanKind,
    Spans,
    Texts,
    Track,
    distinct_rows,
    flat_lanes,
    nested_lanes,
    printable_text,
    with_lane,
)
from cudakit.report.timeline import Timeline as ViewedTimeline
from cudakit.stacks import Frame, Stack, call_site_index, frame_text
from cudakit.trace.kinds import EventKind

NO_STACK = "no call stack recorded"

_SCHEMA_VERSION = 1  # version of the schema of Kineto's traces
# First number of the tracks of overlapping spans in Chrome traces, above all numbers of streams and threads.
_FIRST_SIBLING = 1 << 30
# First number of devices if several processes used GPUs: the devices of each process get different
# numbers.
_FIRST_DEVICE = 10_000_000
_DEVICES_PER_PROCESS = 1000
_MOST_SMALL_NUMBER = (1 << 31) - 1

_CATEGORIES = {
    WorkKind.KERNEL: "kernel",
    WorkKind.COPY: "gpu_memcpy",
    WorkKind.MEMSET: "gpu_memset",
}


# --- tracks ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LaneOf:
    """A stream of a device, or a thread, or one of its further lanes if its spans overlap."""

    name: str
    device: int  # 0 for a thread
    number: int  # number of the stream or thread; thread 0 has the ranges of the process
    lane: int


def work_tracks(process: Timeline) -> tuple[list[LaneOf], Column]:
    """Return a track for each device and stream, with siblings for overlaps; and the track of each work."""
    work = process.work
    _, stream = distinct_rows(work.device, work.stream)
    lane = flat_lanes(stream, work.start_ns, work.end_ns)
    first_rows, track = distinct_rows(work.device, work.stream, lane)
    columns = (work.device, work.stream, lane)
    rows = zip(*(column[first_rows].tolist() for column in columns), strict=True)
    return [LaneOf(with_lane(f"stream {row[1]}", row[2]), *row) for row in rows], track


def device_names(process: Timeline) -> dict[int, str]:
    """Return a name for each device that has work or properties: "GPU 0 (NVIDIA H200)"."""
    devices = sorted(set(np.unique(process.work.device).tolist()))
    name_by_device = {device: f"GPU {device}" for device in devices}
    for record in process.activities.records[EventKind.DEVICE_INFO]:
        device, name = int(record["device"]), process.names[int(record["name"])]
        name_by_device[device] = f"GPU {device} ({name})" if name else f"GPU {device}"
    return name_by_device


# --- the timeline ----------------------------------------------------------------------------------


def trace_timeline(activities: Sequence[Activities]) -> ViewedTimeline:
    """Return the work, calls, ranges and marks of all processes.

    Categories and details of Chrome traces have the names of Kineto, PyTorch's profiler library
    (libkineto/src/output_json.cpp and CuptiActivity.cpp), which tools such as Holistic Trace Analysis read.
    In such traces, the device is the process of GPU work, and the stream is the thread.
    """
    timelines = [timeline(process_activities) for process_activities in activities]
    begin_ns = first_time(timelines)
    groups: list[Group] = []
    tracks: list[Track] = []
    spans: list[Spans] = []
    instants: list[Instants] = []
    for index, process in enumerate(timelines):
        first_device = _FIRST_DEVICE + index * _DEVICES_PER_PROCESS if len(timelines) > 1 else 0
        remark = " (simulated)" if process.simulated else ""
        pid = process.process
        process_group = len(groups)
        groups.append(Group(f"process {pid}", pid, pid, label="CPU"))
        group_by_device = {}
        for device, name in device_names(process).items():
            group_by_device[device] = len(groups)
            number, label = first_device + device, f"GPU {device}"
            groups.append(Group(name, number, pid, is_device=True, label=label, remark=remark))
        work_lanes, track_of_work = work_tracks(process)
        first_track = len(tracks)
        tracks += [
            Track(lane.name, group_by_device[lane.device], _thread_number(lane, number))
            for number, lane in enumerate(work_lanes)
        ]
        call_texts = _CallTexts(process)
        work_spans = _work_spans(process, call_texts, first_track + track_of_work, index << 32)
        spans.append(work_spans)
        host_spans, thread_lanes = _host_spans(process, call_texts, len(tracks), index << 32)
        spans.append(host_spans)
        track_by_thread = {
            lane.number: len(tracks) + number
            for number, lane in enumerate(thread_lanes)
            if not lane.lane
        }
        tracks += [
            Track(lane.name, process_group, _thread_number(lane, number))
            for number, lane in enumerate(thread_lanes)
        ]
        mark_tracks = [track_by_thread[thread] for thread in process.marks.thread.tolist()]
        instants.append(
            Instants(
                time_ns=process.marks.start_ns,
                track=np.array(mark_tracks, np.int64),
                name=process.marks.name,
                names=call_texts.names,
                category="user_annotation",
            )
        )
    return ViewedTimeline(
        groups,
        tracks,
        spans,
        instants,
        begin_ns=begin_ns,
        chrome_head={
            "schemaVersion": _SCHEMA_VERSION,
            "deviceProperties": [
                {
                    "id": int(record["device"]),
                    "name": printable_text(process.names[int(record["name"])]),
                    "totalGlobalMem": int(record["memory_bytes"]),
                    "numSms": int(record["multiprocessors"]),
                }
                for process in timelines
                for record in process.activities.records[EventKind.DEVICE_INFO]
            ],
            "displayTimeUnit": "ns",
            "baseTimeNanoseconds": begin_ns,
        },
    )


def _thread_number(lane: LaneOf, index: int) -> int:
    is_sibling = lane.lane > 0 or lane.number > _MOST_SMALL_NUMBER
    return _FIRST_SIBLING + index if is_sibling else lane.number


class _CallTexts:
    """The names of a process, its call sites and its call stacks."""

    def __init__(self, process: Timeline) -> None:
        self.names = Texts(process.names)
        self.sites = Texts(process.stacks, _call_site)
        self.stacks = Texts(
            process.stacks, lambda stack: " ▸ ".join(map(frame_text, reversed(stack))) or NO_STACK
        )


def _call_site(stack: Stack) -> str:
    return frame_text(stack[call_site_index(stack)]) if stack else NO_STACK


def _work_spans(process: Timeline, texts: _CallTexts, track: Column, first_arrow: int) -> Spans:
    work = process.work
    kernels = process.activities.records[EventKind.KERNEL_RUN]

    def common(rows: Column) -> list[Argument]:
        return [
            Argument("", work.correlation[rows], chrome_name="External id"),
            Argument("", work.device[rows], chrome_name="device"),
            Argument("", work.context[rows], chrome_name="context"),
            Argument("stream", work.stream[rows]),
            Argument("correlation", work.correlation[rows]),
            Argument("call site", work.site[rows], texts.sites, chrome_name="Call site"),
            Argument("call stack", work.site[rows], texts.stacks, chrome_name=""),
        ]

    def of_kernels(rows: Column) -> list[Argument]:
        records = kernels[work.record[rows]]
        return [
            *common(rows),
            Argument("", records["registers"], chrome_name="registers per thread"),
            Argument("", records["shared_bytes"], chrome_name="shared memory"),
            Argument("grid", records["grid"]),
            Argument("block", records["block"]),
            Argument("", records["graph_node"], chrome_name="graph node id"),
        ]

    def of_copies(rows: Column) -> list[Argument]:
        size, duration = work.size_bytes[rows], work.end_ns[rows] - work.start_ns[rows]
        bandwidth = np.where(duration > 0, size / np.maximum(duration, 1), 0.0)
        return [
            *common(rows),
            Argument("bytes", size),
            Argument("", bandwidth, chrome_name="memory bandwidth (GB/s)"),
        ]

    return Spans(
        start_ns=work.start_ns,
        end_ns=work.end_ns,
        track=track,
        name=work.name,
        names=texts.names,
        kind=work.kind,
        kinds=[
            SpanKind(_CATEGORIES[kind], of_kernels if kind is WorkKind.KERNEL else of_copies)
            for kind in WorkKind
        ],
        arrow=np.where(work.call >= 0, first_arrow + work.correlation.astype(np.int64), 0),
    )


def _host_spans(
    process: Timeline, texts: _CallTexts, first_track: int, first_arrow: int
) -> tuple[Spans, list[LaneOf]]:
    """Return the ranges and API calls with their lanes: one for each thread, and more if they do not nest."""
    ranges, calls = process.ranges, process.calls
    is_launch = np.zeros(len(calls.start_ns), np.bool_)
    is_launch[process.work.call[process.work.call >= 0]] = True
    is_runtime = np.array([name.startswith("cuda") for name in process.names], np.bool_)
    kind = np.where(is_runtime[calls.name], 1, 2) if len(calls.name) else np.empty(0, np.int64)
    no_values = np.zeros(len(ranges.start_ns), np.int64)
    start = np.concatenate([ranges.start_ns, calls.start_ns])
    end = np.concatenate([ranges.end_ns, calls.end_ns])
    thread = np.concatenate([ranges.thread.astype(np.uint64), calls.thread.astype(np.uint64)])
    correlation = np.concatenate([no_values, calls.correlation.astype(np.int64)])
    arrow = np.where(is_launch, first_arrow + calls.correlation.astype(np.int64), 0)
    columns = (
        start,
        end,
        thread,
        np.concatenate([ranges.name, calls.name]),
        np.concatenate([no_values, kind]),
        correlation,
        np.concatenate([no_values, calls.site.astype(np.int64)]),
        np.concatenate([no_values, arrow]),
    )
    # If a range and a call have the same times, the range contains the call.
    order = np.lexsort((columns[4] > 0, -end, start))
    start, end, thread, name, kind, correlation, site, arrow = (column[order] for column in columns)
    _, thread_number = distinct_rows(thread)
    lane = nested_lanes(thread_number, start, end)
    first_rows, track = distinct_rows(thread, lane)
    lanes = [
        LaneOf(with_lane(_thread_name(number), lane), 0, number, lane)
        for number, lane in zip(thread[first_rows].tolist(), lane[first_rows].tolist(), strict=True)
    ]
    known_threads = {lane.number for lane in lanes}
    lanes += [
        LaneOf(_thread_name(number), 0, number, 0)
        for number in np.unique(process.marks.thread).tolist()
        if number not in known_threads
    ]

    def details_of_ranges(rows: Column) -> list[Argument]:
        return [
            Argument("correlation", correlation[rows], chrome_name=""),
            Argument("call site", site[rows], texts.sites, chrome_name=""),
        ]

    def details_of_calls(rows: Column) -> list[Argument]:
        return [
            Argument("", correlation[rows], chrome_name="External id"),
            Argument("correlation", correlation[rows]),
            Argument("call site", site[rows], texts.sites, chrome_name="Call site"),
        ]

    host = Spans(
        start_ns=start,
        end_ns=end,
        track=first_track + track,
        name=name,
        names=texts.names,
        kind=kind,
        kinds=[
            SpanKind("user_annotation", details_of_ranges),
            SpanKind("cuda_api", details_of_calls, chrome_category="cuda_runtime"),
            SpanKind("cuda_api", details_of_calls, chrome_category="cuda_driver"),
        ],
        nest=True,
        arrow=arrow,
        begins_arrows=True,
    )
    return host, lanes


def _thread_name(thread: int) -> str:
    return f"thread {thread}" if thread else "ranges of the process"


# --- call stacks -----------------------------------------------------------------------------------


def flames(activities: Sequence[Activities]) -> Flames:
    """Return the GPU time of the call stacks of each process, with the kernel, copy or memset as leaf."""
    result = []
    for process_activities in activities:
        process = timeline(process_activities)
        remark = " (simulated)" if process.simulated else ""
        name = f"process {process.process}"
        result.append(Flame(f"{name}{remark}", "nanoseconds", _stack_times(process), prefix=name))
    return Flames("GPU time by call stack", result)


def _stack_times(process: Timeline) -> Iterator[tuple[Stack, int]]:
    """Yield each distinct call stack and name of GPU work with its time, first occurrence first."""
    work = process.work
    if not len(work.start_ns):
        return
    first_rows, row_numbers = distinct_rows(work.site, work.name)
    # Sums of integers as floating-point numbers are exact below 2**53 ns, which is 104 days.
    totals = np.bincount(row_numbers, work.end_ns - work.start_ns, len(first_rows)).astype(np.int64)
    order = np.argsort(first_rows)
    columns = (work.site[first_rows], work.name[first_rows], totals)
    for site, name, total_ns in zip(*(column[order].tolist() for column in columns), strict=True):
        calls = process.stacks[site] or (Frame(NO_STACK, "", 0),)
        yield (*reversed(calls), Frame(process.names[name], "", 0)), total_ns


# --- rows ------------------------------------------------------------------------------------------


def rows(activities: Sequence[Activities]) -> list[Columns]:
    """Return a row for each kernel, copy and memset, in the order of their starts within each process."""
    return [_rows(timeline(process_activities)) for process_activities in activities]


def _rows(process: Timeline) -> Columns:
    work = process.work
    is_kernel = work.kind == WorkKind.KERNEL
    records = process.activities.records[EventKind.KERNEL_RUN][work.record[is_kernel]]

    def of_kernels(values: Column) -> Column:
        column = np.zeros(len(is_kernel), values.dtype)
        column[is_kernel] = values
        masked: Column = np.ma.masked_array(column, ~is_kernel)
        return masked

    sizes = {
        f"{name}_{axis}": of_kernels(records[name][:, index])
        for name in ("grid", "block")
        for index, axis in enumerate("xyz")
    }
    return Columns(
        "GPU work",
        {
            "process": np.full(len(is_kernel), process.process),
            "device": work.device,
            "stream": work.stream,
            "kind": work.kind,
            "name": work.name,
            "start_ns": work.start_ns,
            "duration_ns": work.end_ns - work.start_ns,
            "correlation": work.correlation,
            "graph_node": work.graph_node,
            "size_bytes": work.size_bytes,
            **sizes,
            "registers": of_kernels(records["registers"]),
            "shared_bytes": of_kernels(records["shared_bytes"]),
            "call_site": work.site,
        },
        text={
            "kind": tuple(kind.name.lower() for kind in WorkKind),
            "name": tuple(map(printable_text, process.names)),
            "call_site": tuple(
                printable_text(_call_site(stack)) if stack else "" for stack in process.stacks
            ),
        },
    )
