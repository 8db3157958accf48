"""Write a profile in the Trace Event Format with the field names of Kineto, PyTorch's profiler library.

Tools for Kineto's traces, such as Holistic Trace Analysis, read the categories and arguments that
libkineto/src/output_json.cpp and CuptiActivity.cpp write. In such traces, the device is the process of
GPU work, and the stream is the thread.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from cudakit.profile.activities import Activities
from cudakit.profile.call_sites import call_site
from cudakit.profile.exports.texts import (
    cache_texts,
    json_string,
    json_string_getter,
    row_slices,
)
from cudakit.profile.exports.tracks import (
    HostSource,
    HostTracks,
    Track,
    WorkTracks,
    device_names,
    host_tracks,
    work_tracks,
)
from cudakit.profile.timeline import (
    Column,
    GpuWork,
    Timeline,
    WorkKind,
    first_time,
    timeline,
)
from cudakit.trace.kinds import EventKind

_SCHEMA_VERSION = 1  # version of the schema of Kineto's traces
_COMPRESSION_LEVEL = 3
_CHUNK_CHARACTERS = 1 << 18
# First number of the tracks of overlapping spans, above all numbers of streams and threads.
_FIRST_SIBLING = 1 << 30
# First number of devices if several processes used GPUs: the devices of each process get different
# numbers.
_FIRST_DEVICE = 10_000_000
_DEVICES_PER_PROCESS = 1000
_MOST_SMALL_NUMBER = (1 << 31) - 1

_TIMES = '"ts":%d.%03d1,"dur":%d.%03d'
_WORK_ARGS = '"External id":%d,"device":%d,"context":%d,"stream":%d,"correlation":%d,"Call site":%s'
_KERNEL_ARGS = (
    '"registers per thread":%d,"shared memory":%d,"grid":[%d,%d,%d],"block":[%d,%d,%d],'
    '"graph node id":%d'
)
_CATEGORIES = {
    WorkKind.KERNEL: "kernel",
    WorkKind.COPY: "gpu_memcpy",
    WorkKind.MEMSET: "gpu_memset",
}


def write_chrome_trace(activities: Sequence[Activities], file: BinaryIO) -> None:
    """Write the profiles of processes as one Chrome trace in JSON, in pieces of bounded size."""
    _write_texts(activities, file)


def write_compressed_chrome_trace(activities: Sequence[Activities], file: BinaryIO) -> None:
    """Write the Chrome trace compressed by gzip."""
    with gzip.GzipFile(
        filename="", mode="wb", compresslevel=_COMPRESSION_LEVEL, fileobj=file, mtime=0
    ) as compressed_file:
        _write_texts(activities, compressed_file)


def _write_texts(activities: Sequence[Activities], file: BinaryIO | gzip.GzipFile) -> None:
    pending_texts: list[str] = []
    pending_characters = 0
    for json_text in _texts(activities):
        pending_texts.append(json_text)
        pending_characters += len(json_text)
        if pending_characters >= _CHUNK_CHARACTERS:
            file.write("".join(pending_texts).encode())
            pending_texts, pending_characters = [], 0
    file.write("".join(pending_texts).encode())


def _texts(activities: Sequence[Activities]) -> Iterator[str]:
    timelines = [timeline(process_activities) for process_activities in activities]
    base_ns = first_time(timelines)
    processes = [
        _Process(
            process_timeline,
            base_ns,
            flow_offset=index << 32,
            first_device=_FIRST_DEVICE + index * _DEVICES_PER_PROCESS if len(timelines) > 1 else 0,
        )
        for index, process_timeline in enumerate(timelines)
    ]
    devices_json = ",".join(text for process in processes for text in process.device_properties())
    yield (
        f'{{"schemaVersion":{_SCHEMA_VERSION},"deviceProperties":[{devices_json}],'
        f'"displayTimeUnit":"ns","baseTimeNanoseconds":{base_ns},"traceEvents":['
    )
    separator = "\n"
    for process in processes:
        for event in process.events():
            yield separator + event
            separator = ",\n"
    yield "\n]}\n"


@dataclass(frozen=True, slots=True)
class _TrackNumbers:
    """The process number and the thread number of a track in the trace."""

    pid: int
    tid: int


class _Process:
    """Formats the events of one process."""

    def __init__(
        self, process_timeline: Timeline, base_ns: int, *, flow_offset: int, first_device: int
    ) -> None:
        self._timeline = process_timeline
        self._base_ns = base_ns
        self._flow_offset = flow_offset
        self._first_device = first_device
        self._name_json = json_string_getter(process_timeline.names)
        self._site_json = cache_texts(
            lambda site: json_string(call_site(process_timeline.stacks[site]))
        )
        self._work_tracks: WorkTracks = work_tracks(process_timeline)
        self._host_tracks: HostTracks = host_tracks(process_timeline)
        self._work_numbers = [
            self._track_numbers(first_device + track.group, track, index)
            for index, track in enumerate(self._work_tracks.tracks)
        ]
        self._host_numbers = [
            self._track_numbers(process_timeline.process, track, index)
            for index, track in enumerate(self._host_tracks.tracks)
        ]

    def _track_numbers(self, pid: int, track: Track, index: int) -> _TrackNumbers:
        is_sibling = track.lane > 0 or track.number > _MOST_SMALL_NUMBER
        return _TrackNumbers(pid, _FIRST_SIBLING + index if is_sibling else track.number)

    def device_properties(self) -> Iterator[str]:
        """Yield the properties of each device as JSON objects."""
        for record in self._timeline.activities.records_of(EventKind.DEVICE_INFO):
            yield (
                f'{{"id":{int(record["device"])},"name":{self._name_json(int(record["name"]))},'
                f'"totalGlobalMem":{int(record["memory_bytes"])},'
                f'"numSms":{int(record["multiprocessors"])}}}'
            )

    def events(self) -> Iterator[str]:
        """Yield all events as JSON objects: names of tracks, host spans, marks, GPU work, and arrows."""
        yield from self._track_names()
        yield from self._host_spans()
        yield from self._marks()
        for kind in WorkKind:
            yield from self._work_of_kind(kind)
        yield from self._arrows()

    # --- names of tracks ---------------------------------------------------------------------------

    def _track_names(self) -> Iterator[str]:
        process = self._timeline.process
        simulated_suffix = " (simulated)" if self._timeline.simulated else ""
        yield _metadata("process_name", process, 0, f'"name":"process {process}"')
        yield _metadata("process_labels", process, 0, '"labels":"CPU"')
        yield _metadata("process_sort_index", process, 0, f'"sort_index":{process}')
        process_suffix = f" of process {process}" if self._first_device else ""
        for device, name in device_names(self._timeline).items():
            pid = self._first_device + device
            label = json_string(f"{name}{process_suffix}{simulated_suffix}")
            yield _metadata("process_name", pid, 0, f'"name":{label}')
            yield _metadata("process_labels", pid, 0, f'"labels":"GPU {device}"')
            yield _metadata("process_sort_index", pid, 0, f'"sort_index":{5_000_000 + pid}')
        tracks = (*self._work_tracks.tracks, *self._host_tracks.tracks)
        track_numbers = (*self._work_numbers, *self._host_numbers)
        for index, (track, track_number) in enumerate(zip(tracks, track_numbers, strict=True)):
            yield _metadata(
                "thread_name",
                track_number.pid,
                track_number.tid,
                f'"name":{json_string(track.name)}',
            )
            yield _metadata(
                "thread_sort_index", track_number.pid, track_number.tid, f'"sort_index":{index}'
            )

    # --- the host ----------------------------------------------------------------------------------

    def _host_spans(self) -> Iterator[str]:
        host = self._host_tracks
        template = f'{{"ph":"X",%s,"pid":%d,"tid":%d,{_TIMES}%s}}'
        pids, tids = _number_columns(self._host_numbers)
        for row_slice in row_slices(len(host.row)):
            head_texts = np.empty(len(host.row[row_slice]), object)
            arguments = np.empty(len(head_texts), object)
            for source in HostSource:
                is_of_source = host.source[row_slice] == source
                if is_of_source.any():
                    rows = host.row[row_slice][is_of_source]
                    head_texts[is_of_source], arguments[is_of_source] = self._host_texts(
                        source, rows
                    )
            track = host.track[row_slice]
            columns = (
                head_texts.tolist(),
                pids[track].tolist(),
                tids[track].tolist(),
                *self._time_columns(host.start_ns[row_slice], host.end_ns[row_slice]),
                arguments.tolist(),
            )
            yield from map(template.__mod__, zip(*columns, strict=True))

    def _host_texts(self, source: HostSource, rows: Column) -> tuple[list[str], list[str]]:
        """Return the category and name of each host span, and its arguments, as JSON members."""
        if source is HostSource.RANGE:
            ranges = self._timeline.ranges.name[rows].tolist()
            return [f'"cat":"user_annotation","name":{self._name_json(name)}' for name in ranges], [
                ""
            ] * len(rows)
        return self._call_texts(rows)

    def _call_texts(self, rows: Column) -> tuple[list[str], list[str]]:
        calls = self._timeline.calls
        functions = calls.name[rows].tolist()
        head_texts = [
            f'"cat":"{self._category(name_index)}","name":{self._name_json(name_index)}'
            for name_index in functions
        ]
        template = ',"args":{"External id":%d,"correlation":%d,"Call site":%s}'
        correlation = calls.correlation[rows].tolist()
        sites = map(self._site_json, calls.site[rows].tolist())
        return head_texts, list(
            map(template.__mod__, zip(correlation, correlation, sites, strict=True))
        )

    def _category(self, name: int) -> str:
        return "cuda_runtime" if self._timeline.names[name].startswith("cuda") else "cuda_driver"

    def _marks(self) -> Iterator[str]:
        marks = self._timeline.marks
        rows = zip(
            map(self._name_json, marks.name.tolist()),
            marks.thread.tolist(),
            *self._time_columns(marks.start_ns, marks.end_ns)[:2],
            strict=True,
        )
        pid = self._timeline.process
        for name, thread, microseconds, nanoseconds in rows:
            tid = min(thread, _MOST_SMALL_NUMBER)
            yield (
                f'{{"ph":"i","s":"t","cat":"user_annotation","name":{name},"pid":{pid},"tid":{tid},'
                f'"ts":{microseconds}.{nanoseconds:03d}1}}'
            )

    # --- GPU work ----------------------------------------------------------------------------------

    def _work_of_kind(self, kind: WorkKind) -> Iterator[str]:
        work = self._timeline.work
        arguments_json = _KERNEL_ARGS if kind is WorkKind.KERNEL else '"bytes":%d,%s'
        template = (
            f'{{"ph":"X","cat":"{_CATEGORIES[kind]}","name":%s,"pid":%d,"tid":%d,{_TIMES},'
            f'"args":{{{_WORK_ARGS},{arguments_json}}}}}'
        )
        pids, tids = _number_columns(self._work_numbers)
        rows_of_kind = np.flatnonzero(work.kind == kind)
        for row_slice in row_slices(len(rows_of_kind)):
            rows = rows_of_kind[row_slice]
            correlation = work.correlation[rows].tolist()
            columns: tuple[Iterable[object], ...] = (
                map(self._name_json, work.name[rows].tolist()),
                pids[self._work_tracks.track[rows]].tolist(),
                tids[self._work_tracks.track[rows]].tolist(),
                *self._time_columns(work.start_ns[rows], work.end_ns[rows]),
                correlation,
                work.device[rows].tolist(),
                work.context[rows].tolist(),
                work.stream[rows].tolist(),
                correlation,
                map(self._site_json, work.site[rows].tolist()),
                *(
                    self._kernel_columns(work, rows)
                    if kind is WorkKind.KERNEL
                    else _copy_columns(work, rows)
                ),
            )
            yield from map(template.__mod__, zip(*columns, strict=True))

    def _kernel_columns(self, work: GpuWork, rows: Column) -> list[Iterable[object]]:
        records = self._timeline.activities.records_of(EventKind.KERNEL_RUN)[work.record[rows]]
        return [
            records["registers"].tolist(),
            records["shared_bytes"].tolist(),
            *(records["grid"][:, axis].tolist() for axis in range(3)),
            *(records["block"][:, axis].tolist() for axis in range(3)),
            records["graph_node"].tolist(),
        ]

    def _arrows(self) -> Iterator[str]:
        """Yield an arrow from each API call to the first work that it started."""
        work, host = self._timeline.work, self._host_tracks
        calls = self._timeline.calls
        track_of_call = np.zeros(len(calls.start_ns), np.int64)
        is_call = host.source == HostSource.CALL
        track_of_call[host.row[is_call]] = host.track[is_call]
        rows_with_call = np.flatnonzero(work.call >= 0)
        _, first_indices = np.unique(work.call[rows_with_call], return_index=True)
        rows = rows_with_call[first_indices]
        start_template = (
            '{"ph":"s","cat":"ac2g","name":"ac2g","id":%d,"pid":%d,"tid":%d,"ts":%d.%03d1}'
        )
        finish_template = (
            '{"ph":"f","bp":"e","cat":"ac2g","name":"ac2g","id":%d,"pid":%d,"tid":%d,"ts":%d.%03d1}'
        )
        for row_slice in row_slices(len(rows)):
            work_rows = rows[row_slice]
            call_rows = work.call[work_rows]
            ids = (self._flow_offset + work.correlation[work_rows].astype(np.int64)).tolist()
            arrow_ends = (
                (
                    start_template,
                    self._host_numbers,
                    track_of_call[call_rows],
                    calls.start_ns[call_rows],
                ),
                (
                    finish_template,
                    self._work_numbers,
                    self._work_tracks.track[work_rows],
                    work.start_ns[work_rows],
                ),
            )
            for template, track_numbers, track, time in arrow_ends:
                pids, tids = _number_columns(track_numbers)
                times = self._time_columns(time, time)[:2]
                columns = (ids, pids[track].tolist(), tids[track].tolist(), *times)
                yield from map(template.__mod__, zip(*columns, strict=True))

    def _time_columns(self, start_ns: Column, end_ns: Column) -> list[list[int]]:
        """Return starts and durations, each as microseconds and the remaining nanoseconds."""
        columns = (*np.divmod(start_ns - self._base_ns, 1000), *np.divmod(end_ns - start_ns, 1000))
        return [column.tolist() for column in columns]


def _copy_columns(work: GpuWork, rows: Column) -> list[Iterable[object]]:
    size_bytes = work.size_bytes[rows].tolist()
    durations = (work.end_ns[rows] - work.start_ns[rows]).tolist()
    bandwidths = [
        f'"memory bandwidth (GB/s)":{size / duration if duration else 0:.6g}'
        for size, duration in zip(size_bytes, durations, strict=True)
    ]
    return [size_bytes, bandwidths]


def _number_columns(track_numbers: Sequence[_TrackNumbers]) -> tuple[Column, Column]:
    return (
        np.array([track_number.pid for track_number in track_numbers], np.int64),
        np.array([track_number.tid for track_number in track_numbers], np.int64),
    )


def _metadata(kind: str, pid: int, tid: int, argument: str) -> str:
    return f'{{"ph":"M","name":{json.dumps(kind)},"pid":{pid},"tid":{tid},"ts":0,"args":{{{argument}}}}}'
