"""Tests of the exports: their formats, their nesting rules, and names that are hostile."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
from profile_recordings import (
    PROCESS,
    collect,
    hostile_program,
    odd_times,
    overlapping,
    small_program,
    training,
)

from cudakit.profile import exports
from cudakit.profile.report.page import explorer
from cudakit.profile.timeline import Activities, timeline
from cudakit.report import chrome, flame, perfetto
from cudakit.report import csv as csv_format
from cudakit.trace.events import (
    ApiCall,
    Event,
    KernelRun,
)
from cudakit.trace.kinds import EventKind


def written(suffix: str, *activities: Activities) -> bytes:
    timelines = {
        "trace.json": chrome.render,
        "trace.json.gz": chrome.render_compressed,
        "perfetto.json": chrome.render,
        "pftrace": perfetto.render,
    }
    pieces: Iterable[str | bytes]
    if suffix in timelines:
        pieces = timelines[suffix](exports.trace_timeline(activities))
    elif suffix == "csv":
        pieces = csv_format.render(exports.rows(activities))
    else:
        write = flame.collapsed if suffix == "collapsed" else flame.speedscope
        pieces = write(exports.flames(activities))
    return b"".join(piece if isinstance(piece, bytes) else piece.encode() for piece in pieces)


PROGRAMS = {
    "small": small_program,
    "training": lambda: training(3000),
    "hostile": hostile_program,
    "odd times": odd_times,
    "overlapping": overlapping,
    "empty": lambda: collect([]),
}


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> Activities:
    return PROGRAMS[request.param]()


def work_count(activities: Activities) -> int:
    kinds = (EventKind.KERNEL_RUN, EventKind.COPY_RUN, EventKind.FILL_RUN)
    return sum(len(activities.records[kind]) for kind in kinds)


def assert_nesting(spans: list[tuple[float, float]]) -> None:
    """Check that spans, in the order of a file, nest after a stable sort by start."""
    open_ends: list[float] = []
    for start, end in sorted(spans, key=lambda span: span[0]):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], (start, end)
        open_ends.append(end)


# --- Chrome trace ----------------------------------------------------------------------------------


def chrome_events(*activities: Activities) -> list[dict[str, Any]]:
    trace = json.loads(written("trace.json", *activities))
    assert trace["schemaVersion"] == 1
    return trace["traceEvents"]


def by_category(events: list[dict[str, Any]], category: str) -> list[dict[str, Any]]:
    return [event for event in events if event.get("cat") == category and event["ph"] == "X"]


def test_chrome_trace_has_the_fields_of_kineto() -> None:
    events = chrome_events(small_program())
    kernel = by_category(events, "kernel")[0]
    assert (kernel["name"], kernel["pid"], kernel["tid"]) == ("gemm", 0, 7)
    assert (int(kernel["ts"] * 1000), kernel["dur"]) == (1000, 1.001)
    assert kernel["args"] == {
        "External id": 1,
        "device": 0,
        "context": 1,
        "stream": 7,
        "correlation": 1,
        "registers per thread": 40,
        "shared memory": 4096,
        "grid": [8, 2, 1],
        "block": [128, 1, 1],
        "graph node id": 0,
        "Call site": "/home/user/train.py:41 step",
    }
    [copy] = by_category(events, "gpu_memcpy")
    assert copy["name"] == "Memcpy HtoD (Pageable -> Device)"
    assert (copy["args"]["bytes"], copy["args"]["memory bandwidth (GB/s)"]) == (5000, 5.0)
    [memset] = by_category(events, "gpu_memset")
    assert memset["name"] == "Memset (Device)"
    assert [event["name"] for event in by_category(events, "user_annotation")] == ["step 0"]
    assert [event["name"] for event in by_category(events, "cuda_driver")] == [
        "cuStreamSynchronize"
    ]
    assert {event["tid"] for event in by_category(events, "cuda_runtime")} == {77}
    devices = json.loads(written("trace.json", small_program()))["deviceProperties"]
    assert devices == [{"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 141 << 30, "numSms": 132}]


def test_kernel_of_a_graph_has_the_call_site_of_its_capture() -> None:
    kernels = by_category(chrome_events(small_program()), "kernel")
    sites = {kernel["name"]: kernel["args"]["Call site"] for kernel in kernels}
    assert sites["node a"] == "/home/user/graphs.py:7 capture"
    assert sites["node b"] == "/home/user/train.py:41 step"  # its capture was not recorded


def test_overlapping_kernels_of_a_stream_are_on_sibling_tracks() -> None:
    kernels = by_category(chrome_events(small_program()), "kernel")
    tracks = {kernel["name"]: kernel["tid"] for kernel in kernels}
    assert tracks["node a"] == 7
    assert tracks["node b"] != 7
    assert {kernel["args"]["stream"] for kernel in kernels} == {7}


def test_chrome_trace_has_every_span_once_and_spans_of_a_track_nest(program: Activities) -> None:
    events = chrome_events(program)
    assert sum(
        len(by_category(events, name)) for name in ("kernel", "gpu_memcpy", "gpu_memset")
    ) == (work_count(program))
    calls = len(by_category(events, "cuda_runtime")) + len(by_category(events, "cuda_driver"))
    assert calls == len(program.records[EventKind.API_CALL])
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start = round(event["ts"] * 1e4) // 10  # nanoseconds, without the added 0.1 ns
            tracks[event["pid"], event["tid"]].append((start, start + round(event["dur"] * 1e3)))
            assert start >= 0
    if program.records[EventKind.KERNEL_RUN]["end_ns"].max(initial=0) < 2**50:
        for spans in tracks.values():
            assert_nesting(spans)


def test_arrows_of_a_chrome_trace_join_a_call_and_its_work(program: Activities) -> None:
    events = chrome_events(program)
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    finishes = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == finishes.keys()
    spans = {
        (event["pid"], event["tid"], event["ts"]): event for event in events if event["ph"] == "X"
    }
    for number, finish in finishes.items():
        assert finish["bp"] == "e"
        work = spans[finish["pid"], finish["tid"], finish["ts"]]
        assert work["args"]["correlation"] == number
        start = starts[number]
        assert (start["pid"], start["tid"], start["ts"]) in spans


def test_two_processes_of_a_chrome_trace_have_different_devices_and_arrows() -> None:
    first, second = training(200, process=10), training(200, process=11)
    events = chrome_events(first, second)
    devices = {event["pid"] for event in by_category(events, "kernel")}
    assert len(devices) == 4
    ids = Counter(event["id"] for event in events if event["ph"] == "s")
    assert set(ids.values()) == {1}


def test_compressed_chrome_trace_is_the_same_and_deterministic() -> None:
    compressed = written("trace.json.gz", small_program())
    assert gzip.decompress(compressed) == written("trace.json", small_program())
    assert compressed == written("trace.json.gz", small_program())


# --- Perfetto --------------------------------------------------------------------------------------


def perfetto_packets(*activities: Activities) -> list[Any]:
    proto = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    trace = proto.Trace()
    trace.ParseFromString(written("pftrace", *activities))
    return list(trace.packet)


def assert_fields_are_known(message: Any) -> None:
    unknown_fields = pytest.importorskip("google.protobuf.unknown_fields")
    assert len(unknown_fields.UnknownFieldSet(message)) == 0
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for item in value if hasattr(value, "__len__") else [value]:
                assert_fields_are_known(item)


class PerfettoReader:
    """Follows the packets of a trace as Perfetto's trace processor does."""

    def __init__(self, packets: list[Any]) -> None:
        self.tracks: dict[int, Any] = {}
        self.interned: dict[str, dict[int, str]] = defaultdict(dict)
        self.events: dict[int, list[Any]] = defaultdict(list)
        for packet in packets:
            if packet.HasField("track_descriptor"):
                self.tracks[packet.track_descriptor.uuid] = packet.track_descriptor
            if packet.HasField("interned_data"):
                for field, values in packet.interned_data.ListFields():
                    for value in values:
                        text = value.str.decode() if hasattr(value, "str") else value.name
                        assert value.iid not in self.interned[field.name]
                        self.interned[field.name][value.iid] = text
            if packet.HasField("track_event"):
                event = packet.track_event
                assert event.track_uuid in self.tracks
                if event.type != event.TYPE_SLICE_END:
                    assert event.name_iid in self.interned["event_names"]
                self.events[event.track_uuid].append((packet.timestamp, event))

    def name(self, event: Any) -> str:
        return self.interned["event_names"][event.name_iid]

    def category(self, event: Any) -> str:
        return self.interned["event_categories"][event.category_iids[0]]

    def annotations(self, event: Any) -> dict[str, Any]:
        strings = self.interned["debug_annotation_string_values"]
        return {
            self.interned["debug_annotation_names"][annotation.name_iid]: strings[
                annotation.string_value_iid
            ]
            if annotation.string_value_iid
            else annotation.uint_value
            for annotation in event.debug_annotations
        }

    def spans(self) -> list[tuple[int, int, int, Any]]:
        """Return (track, begin, end, event) of each span; an end closes the innermost open span."""
        spans = []
        for track, events in self.events.items():
            open_events: list[tuple[int, Any]] = []
            for time, event in sorted(events, key=lambda item: item[0]):
                if event.type == event.TYPE_SLICE_BEGIN:
                    open_events.append((time, event))
                elif event.type == event.TYPE_SLICE_END:
                    begin, opened = open_events.pop()
                    spans.append((track, begin, time, opened))
            assert not open_events
        return spans


def test_perfetto_trace_has_only_fields_of_its_schema(program: Activities) -> None:
    packets = perfetto_packets(program)
    for packet in packets[:3000]:
        assert_fields_are_known(packet)
    assert packets[0].sequence_flags & 1
    assert {packet.trusted_packet_sequence_id for packet in packets} == {1}


def test_perfetto_trace_has_the_times_and_names_of_all_work(program: Activities) -> None:
    reader = PerfettoReader(perfetto_packets(program))
    process = timeline(program)
    base = process.first_ns() or 0
    expected = Counter(
        (start - base, end - base, name[:50])
        for start, end, name in zip(
            process.work.start_ns.tolist(),
            process.work.end_ns.tolist(),
            (process.names[name] for name in process.work.name.tolist()),
            strict=True,
        )
        if name.isprintable()
    )
    spans = Counter(
        (begin, end, reader.name(event)[:50])
        for _, begin, end, event in reader.spans()
        if reader.category(event) in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    assert spans.total() == work_count(program)
    assert expected - spans == Counter()


def test_perfetto_spans_of_a_thread_are_ranges_with_their_calls() -> None:
    reader = PerfettoReader(perfetto_packets(small_program()))
    events = {reader.name(event): (begin, end) for _, begin, end, event in reader.spans()}
    assert events["step 0"] == (0, 9_000)
    assert events["cudaLaunchKernel"] == (100, 200)
    names = [track.name for track in reader.tracks.values()]
    assert names == [
        f"process {PROCESS}",
        f"GPU 0 (NVIDIA H200) of process {PROCESS}",
        "stream 7",
        "stream 7 · lane 2",
        "thread 77",
    ]
    kernel = next(event for *_, event in reader.spans() if reader.name(event) == "gemm")
    assert reader.annotations(kernel) == {
        "stream": 7,
        "correlation": 1,
        "call site": "/home/user/train.py:41 step",
        "call stack": "/home/user/train.py:90 <module> ▸ /home/user/train.py:41 step",
        "grid": "8 × 2 × 1",
        "block": "128 × 1 × 1",
    }


def test_perfetto_arrows_end_at_work_of_the_call(program: Activities) -> None:
    reader = PerfettoReader(perfetto_packets(program))
    process = timeline(program)
    started = set(process.work.correlation[process.work.call >= 0].tolist())
    flows = Counter(
        flow for *_, event in reader.spans() for flow in event.flow_ids if flow < 1 << 63
    )
    assert set(flows) == started
    ends = {flow for *_, event in reader.spans() for flow in event.terminating_flow_ids}
    assert started <= ends


# --- stacks ----------------------------------------------------------------------------------------


def assert_is_speedscope(content: dict[str, Any]) -> None:
    """Check a file of sampled profiles against speedscope's schema (src/lib/file-format-spec.ts)."""
    assert content["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    assert isinstance(content["shared"]["frames"], list)
    for frame in content["shared"]["frames"]:
        assert isinstance(frame["name"], str)
        assert set(frame) <= {"name", "file", "line", "col"}
        assert isinstance(frame.get("file", ""), str)
        assert isinstance(frame.get("line", 0), int)
    assert 0 <= content["activeProfileIndex"] < max(len(content["profiles"]), 1)
    for profile in content["profiles"]:
        assert profile["type"] == "sampled"
        assert isinstance(profile["name"], str)
        units = ("none", "nanoseconds", "microseconds", "milliseconds", "seconds", "bytes")
        assert profile["unit"] in units
        assert len(profile["samples"]) == len(profile["weights"])
        assert profile["endValue"] - profile["startValue"] == sum(profile["weights"])
        for sample in profile["samples"]:
            assert all(0 <= index < len(content["shared"]["frames"]) for index in sample)


def gpu_time(activities: Activities) -> int:
    work = timeline(activities).work
    return int((work.end_ns - work.start_ns).sum())


def test_speedscope_file_is_valid_and_its_weights_are_the_gpu_time(program: Activities) -> None:
    content = json.loads(written("speedscope.json", program))
    assert_is_speedscope(content)
    [profile] = content["profiles"]
    if gpu_time(program) < 2**53:
        assert sum(profile["weights"]) == gpu_time(program)


def test_speedscope_stack_ends_with_the_kernel() -> None:
    content = json.loads(written("speedscope.json", small_program()))
    frames = content["shared"]["frames"]
    stacks = [
        [frames[index]["name"] for index in sample] for sample in content["profiles"][0]["samples"]
    ]
    assert stacks[0] == ["<module>", "step", "gemm"]
    assert ["capture", "forward", "node a"] in stacks


def test_collapsed_lines_have_a_stack_and_nanoseconds_that_add_up(program: Activities) -> None:
    lines = written("collapsed", program).decode().splitlines()
    total = 0
    for line in lines:
        stack, _, amount = line.rpartition(" ")
        assert all(stack.split(";"))
        total += int(amount)
    if gpu_time(program) < 2**53:
        assert total == gpu_time(program)


# --- CSV -------------------------------------------------------------------------------------------


def test_csv_has_a_row_for_each_piece_of_work(program: Activities) -> None:
    text = written("csv", program).decode()
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert len(rows) == work_count(program)
    assert all(None not in row and None not in row.values() for row in rows)
    assert not any(row["name"].startswith(("=", "+", "-", "@")) for row in rows)


def test_csv_of_a_kernel_has_its_launch_configuration() -> None:
    text = written("csv", small_program()).decode()
    kernel, copy, *_ = csv.DictReader(io.StringIO(text, newline=""))
    assert kernel["grid_x"] == "8"
    assert (kernel["block_x"], kernel["registers"], kernel["shared_bytes"]) == ("128", "40", "4096")
    assert kernel["call_site"] == "/home/user/train.py:41 step"
    assert (copy["grid_x"], copy["size_bytes"]) == ("", "5000")


@pytest.mark.parametrize("suffix", ["trace.json", "speedscope.json", "collapsed", "csv"])
def test_exports_of_hostile_names_have_no_control_characters(suffix: str) -> None:
    text = written(suffix, hostile_program()).decode()
    unprintable = {character for character in text if not character.isprintable()}
    assert unprintable <= {"\n", "\r"}
    assert len(text) < 400_000


def many_tracks() -> Activities:
    """Return kernels of many devices and streams, and calls that overlap without nesting."""
    count = 30_000
    calls = [
        Event(ApiCall("cuLaunchKernel", i, i, i + 50_000), thread=i % 2 + 1)
        for i in range(1, count)
    ]
    kernels = [
        Event(KernelRun(i, "k", i, i + 60_000, i + 60_010), device=i) for i in range(1, count)
    ]
    return collect([*calls, *kernels])


@pytest.mark.timeout(60)
def test_many_devices_streams_and_overlapping_calls_are_exported_in_bounded_time() -> None:
    activities = many_tracks()
    for suffix in ("trace.json", "pftrace", "speedscope.json", "collapsed", "csv"):
        assert written(suffix, activities)
    assert explorer([activities]).data().arrays
