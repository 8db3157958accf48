"""Timelines in the Trace Event Format."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from cudakit.report import perfetto
from cudakit.report.chrome import render, render_compressed
from cudakit.report.timeline import (
    Argument,
    Column,
    Counter,
    Group,
    Instants,
    SpanKind,
    Spans,
    Texts,
    Timeline,
    Track,
    distinct_rows,
    flat_lanes,
    with_lane,
)

Events = list[dict[str, Any]]
PROCESS = Group("Run", 1, 1)


def timeline(name: str = "Run", **parts: Any) -> Timeline:
    return Timeline([Group(name, 1, 1)], **parts)


def spans_of(start: Any, end: Any, track: Any = None, **changes: Any) -> Timeline:
    """Return spans on lanes of their tracks."""
    start, end = np.asarray(start, np.int64), np.asarray(end, np.int64)
    order = np.lexsort((end, start))
    track = np.zeros(len(start), np.int64) if track is None else np.asarray(track)
    start, end, track = start[order], end[order], track[order]
    lane = flat_lanes(track, start, end)
    first_rows, number = distinct_rows(track, lane)
    tracks = [
        Track(with_lane(f"stream {track[row]}", int(lane[row])), 0, 2 + index)
        for index, row in enumerate(first_rows.tolist())
    ]
    columns = {"name": np.zeros(len(start), np.int64), "names": Texts(["gemm"])}
    columns |= {"kind": np.zeros(len(start), np.int64), "kinds": [SpanKind("kernel")]}
    spans = Spans(start_ns=start, end_ns=end, track=number, **(columns | changes))
    return timeline(tracks=tracks, spans=[spans])


def events_of(shown: Timeline) -> Events:
    trace = json.loads("".join(render(shown)).encode())
    events: Events = trace["traceEvents"]
    return events


def of_phase(events: Events, phase: str) -> Events:
    return [event for event in events if event["ph"] == phase]


def nanoseconds(microseconds: float) -> int:
    """Read a time as Perfetto does: a double, times 1000, truncated."""
    return int(microseconds * 1000)


def lanes_of(events: Events) -> dict[int, list[tuple[int, int]]]:
    lanes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in of_phase(events, "X"):
        start = nanoseconds(event["ts"])
        lanes[event["tid"]].append((start, start + round(event["dur"] * 1000)))
    return lanes


def thread_names(events: Events) -> list[str]:
    return [event["args"]["name"] for event in events if event["name"] == "thread_name"]


def test_counter_has_an_event_for_each_value() -> None:
    counter = Counter("100 %s", "bytes", np.array([0, 1_500_000_000]), np.array([10, 20]))
    events = of_phase(events_of(timeline(counters=[counter])), "C")
    assert [(nanoseconds(event["ts"]), event["args"]) for event in events] == [
        (0, {"bytes": 10}),
        (1_500_000_000, {"bytes": 20}),
    ]
    assert {event["name"] for event in events} == {"100 %s"}


def test_instants_are_those_of_the_process_or_of_a_thread() -> None:
    instants = Instants(
        time_ns=np.array([1000, 2000]),
        track=np.array([-1, 0]),
        name=np.array([0, 1]),
        names=Texts(["oom", "step"]),
        arguments=[Argument("level", np.array([0, 1]), Texts(["error", "info"]))],
    )
    shown = timeline(tracks=[Track("thread 7", 0, 7)], instants=[instants])
    first, second = of_phase(events_of(shown), "i")
    assert (first["name"], first["s"], first["tid"], first["args"]) == (
        "oom",
        "p",
        1,
        {"level": "error"},
    )
    assert (second["name"], second["s"], second["tid"], second["args"]) == (
        "step",
        "t",
        7,
        {"level": "info"},
    )
    assert nanoseconds(second["ts"]) == 2000


def test_span_is_a_slice_with_its_arguments() -> None:
    def arguments(rows: Column) -> list[Argument]:
        return [
            Argument("address", np.array([0x7F00], np.uint64)[rows], is_address=True),
            Argument("size_bytes", np.array([512])[rows], chrome_name="bytes"),
            Argument("100 %", np.array([np.nan])[rows]),
            Argument("grid", np.array([[8, 2, 1]])[rows]),
            Argument("stack", np.array([1])[rows], Texts(["", "f"])),
            Argument("elsewhere", np.array([1])[rows], chrome_name=""),
        ]

    events = events_of(spans_of([10], [15], kinds=[SpanKind("kernel", arguments)]))
    (event,) = of_phase(events, "X")
    assert (nanoseconds(event["ts"]), event["dur"], event["name"]) == (10, 0.005, "gemm")
    assert event["args"] == {
        "address": "0x7f00",
        "bytes": 512,
        "100 %": None,
        "grid": [8, 2, 1],
        "stack": "f",
    }
    assert thread_names(events) == ["stream 0"]


def test_overlapping_spans_of_a_track_lie_on_lanes() -> None:
    events = events_of(spans_of([0, 1, 2, 3], [5, 2, 11, 4], [0, 0, 0, 1]))
    assert thread_names(events) == ["stream 0", "stream 0 · lane 2", "stream 1"]
    assert [event["tid"] for event in of_phase(events, "X")] == [2, 3, 3, 4]


def test_process_is_named() -> None:
    first = events_of(timeline('a "title"'))[0]
    assert (first["name"], first["args"]) == ("process_name", {"name": 'a "title"'})


def test_characters_above_u_ffff_are_not_escaped_and_invisible_ones_are() -> None:
    assert '"🚀"' in "".join(render(timeline("🚀")))
    assert r'"a\\ud800\\x1b\\x9b\\u202e"' in "".join(render(timeline("a\ud800\x1b\x9b\u202e")))


def test_compressed_trace_is_the_same() -> None:
    shown = spans_of(np.arange(10_000), np.arange(10_000) + 1)
    compressed = b"".join(render_compressed(shown))
    assert gzip.decompress(compressed).decode() == "".join(render(shown))


_times = arrays_of.arrays(np.int64, 40, elements=st.integers(0, 20) | st.integers(0, 2**61))


@given(_times, _times, arrays_of.arrays(np.int32, 40, elements=st.integers(0, 2)))
def test_no_two_slices_of_a_thread_overlap_and_none_is_lost(
    start: Any, duration: Any, track: Any
) -> None:
    start, duration = start % 2**40, duration % 2**40
    lanes = lanes_of(events_of(spans_of(start, start + duration, track)))
    assert sum(map(len, lanes.values())) == len(start)
    for taken in lanes.values():
        assert all(first[1] <= second[0] for first, second in pairwise(taken))


@given(_times, _times)
def test_every_timeline_is_written_for_perfetto(start: Any, duration: Any) -> None:
    end = np.minimum(start + duration, 2**62)
    shown = spans_of(start, np.maximum(end, start))
    assert b"".join(perfetto.render(shown)).count(b"gemm") == 1
