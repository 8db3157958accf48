from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from document_views import no_picture
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from cudakit.errors import UsageError
from cudakit.report.document import (
    Chart,
    Columns,
    Document,
    Marker,
    Node,
    Note,
    Section,
    Series,
    View,
)
from cudakit.report.perfetto import render

Events = list[dict[str, Any]]


def events_of(*nodes: Node, title: str = "Run") -> Events:
    text = "".join(render(Document(title, nodes)))
    trace = json.loads(text.encode(), parse_float=float)
    assert trace["displayTimeUnit"] == "ms"
    events: Events = trace["traceEvents"]
    return events


def of_phase(events: Events, phase: str) -> Events:
    return [event for event in events if event["ph"] == phase]


def chart(x: Any, y: Any, **changes: Any) -> Chart:
    series = (Series("allocated", np.asarray(y)),)
    options: dict[str, Any] = {"title": "Memory", "x_unit": "seconds"}
    return Chart(**{**options, "x": np.asarray(x), "series": series, **changes})


def spans(start: Any, duration: Any, track: Any = None, **arguments: Any) -> Columns:
    start = np.asarray(start)
    track = np.zeros(len(start), dtype=np.int32) if track is None else np.asarray(track)
    arrays = {
        "start_us": start,
        "duration_us": np.asarray(duration),
        "track": track,
        "name": np.zeros(len(start), dtype=np.int32),
        **{name: np.asarray(items) for name, items in arguments.items()},
    }
    return Columns("spans", arrays, {"name": ("gemm",), "track": ("stream 0", "stream 7")})


def nanoseconds(microseconds: float) -> int:
    """Read a time as Perfetto does: a double, times 1000, truncated."""
    return int(microseconds * 1000)


def lanes_of(events: Events) -> dict[int, list[tuple[int, int]]]:
    lanes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in of_phase(events, "X"):
        start = nanoseconds(event["ts"])
        lanes[event["tid"]].append((start, start + nanoseconds(event["dur"])))
    return lanes


def thread_names(events: Events) -> list[str]:
    return [event["args"]["name"] for event in events if event["name"] == "thread_name"]


# --- charts --------------------------------------------------------------------------------------


def test_series_is_a_counter_in_microseconds_named_after_chart_and_series() -> None:
    events = of_phase(events_of(chart([0.0, 1.5], [10, 20])), "C")
    assert [(event["ts"], event["args"]) for event in events] == [
        (0, {"bytes": 10}),
        (1_500_000, {"bytes": 20}),
    ]
    assert {event["name"] for event in events} == {"Memory · allocated"}


def test_value_that_does_not_change_is_written_once() -> None:
    events = of_phase(events_of(chart(np.arange(6.0), [5, 5, 7, 7, 7, 5])), "C")
    assert [event["args"]["bytes"] for event in events] == [5, 7, 5]
    assert [event["ts"] for event in events] == [0, 2_000_000, 5_000_000]


def test_count_on_the_x_axis_is_shown_as_microseconds() -> None:
    events = of_phase(events_of(chart([3, 4], [1, 2], x_unit="count")), "C")
    assert [event["ts"] for event in events] == [3, 4]


def test_points_without_a_value_are_left_out() -> None:
    events = of_phase(events_of(chart([0.0, 1.0, np.nan], [np.nan, 0.5, 2.0], y_unit="ratio")), "C")
    assert [event["args"] for event in events] == [{"ratio": 0.5}]


def test_markers_are_instants_with_their_level() -> None:
    markers = (Marker(2.0, "oom", "error"), Marker(1.0, "step"))
    first, second = of_phase(events_of(chart([0.0], [1], markers=markers)), "i")
    assert (first["name"], first["ts"], first["args"]) == ("step", 1_000_000, {"level": "info"})
    assert (second["name"], second["ts"], second["args"]) == ("oom", 2_000_000, {"level": "error"})


def test_percent_sign_in_a_name_is_a_percent_sign() -> None:
    (event,) = of_phase(events_of(chart([0.0], [1], title="100 %s")), "C")
    assert event["name"] == "100 %s · allocated"


# --- spans ---------------------------------------------------------------------------------------


def test_span_is_a_slice_with_the_other_columns_as_arguments() -> None:
    columns = Columns(
        "spans",
        {
            "start_us": np.array([10]),
            "duration_us": np.array([5]),
            "track": np.array([1]),
            "name": np.array([0]),
            "address": np.array([0x7F00], dtype=np.uint64),
            "size_bytes": np.array([512]),
            "ratio": np.array([np.nan]),
            "100 %": np.array([True]),
            "stack": np.array([1]),
            "pool": np.array([-1]),
        },
        {"name": ("gemm",), "track": ("stream 0", "stream 7"), "stack": ("", "f"), "pool": ("a",)},
    )
    events = events_of(columns)
    (event,) = of_phase(events, "X")
    assert (event["ts"], event["dur"], event["name"]) == (10, 5, "gemm")
    assert event["args"] == {
        "address": "0x7f00",
        "size_bytes": 512,
        "ratio": None,
        "100 %": True,
        "stack": "f",
        "pool": None,
    }
    assert thread_names(events) == ["stream 7"]


def test_overlapping_spans_of_a_track_lie_on_numbered_lanes() -> None:
    events = events_of(spans([0, 1, 2, 3], [5, 1, 9, 1], [0, 0, 0, 1]))
    assert thread_names(events) == ["stream 0 · lane 1", "stream 0 · lane 2", "stream 7"]
    assert [event["tid"] for event in of_phase(events, "X")] == [2, 3, 3, 4]


def test_span_that_begins_where_another_ends_shares_its_lane() -> None:
    assert thread_names(events_of(spans([0.5, 1.001], [0.501, 1.0]))) == ["stream 0"]


@example(500, [501, 1000])  # 1.001 * 1000 is less than 1001
@given(st.integers(0, 10**14), st.lists(st.integers(1, 3000), min_size=2, max_size=30))
def test_adjacent_spans_share_a_lane(first: int, durations: list[int]) -> None:
    start_ns = first + np.cumsum([0, *durations[:-1]])
    events = events_of(spans(start_ns / 1000, np.array(durations) / 1000))
    assert thread_names(events) == ["stream 0"]
    (taken,) = lanes_of(events).values()
    assert [start for start, _ in taken] == start_ns.tolist()
    assert all(first[1] <= second[0] for first, second in pairwise(taken))


@pytest.mark.parametrize("last", [np.full(2, 2**63 - 1), np.full(2, 1e300)])
def test_times_beyond_64_bits_still_overlap(last: Any) -> None:
    assert len(thread_names(events_of(spans(last, last)))) == 2


def test_lowest_free_lane_is_reused() -> None:
    events = of_phase(events_of(spans([0, 0, 5, 6], [4, 9, 1, 1])), "X")
    assert [event["tid"] for event in events] == [2, 3, 2, 2]


def test_track_without_text_is_named_by_its_number() -> None:
    assert thread_names(events_of(spans([0], [1], [5]))) == ["track 5"]


def test_lanes_are_shown_in_the_order_of_their_tracks() -> None:
    events = events_of(spans([0, 0], [1, 1], [1, 0]))
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert thread_names(events) == ["stream 0", "stream 7"]
    assert list(order.values()) == sorted(order)


def test_two_sets_of_spans_never_share_a_thread() -> None:
    events = of_phase(events_of(spans([0], [1]), spans([0], [1])), "X")
    assert len({event["tid"] for event in events}) == 2


def test_negative_duration_is_zero_and_a_row_without_a_time_is_left_out() -> None:
    columns = spans([0.0, 1.0, np.nan, np.inf], [-1.0, np.nan, 1.0, 1.0])
    assert [(e["ts"], e["dur"]) for e in of_phase(events_of(columns), "X")] == [(0, 0)]


# --- the file ------------------------------------------------------------------------------------


def test_process_is_named_after_the_document() -> None:
    first = events_of(spans([0], [1]), title='a "title"')[0]
    assert (first["name"], first["args"]) == ("process_name", {"name": 'a "title"'})


def test_characters_above_u_ffff_are_not_escaped() -> None:
    text = "".join(render(Document("🚀", (spans([0], [1]),))))
    assert '"🚀"' in text


def test_invisible_characters_are_escaped() -> None:
    text = "".join(render(Document("a\ud800\x1b\x9b\u202e", (spans([0], [1]),))))
    assert r'"a\\ud800\\x1b\\x9b\\u202e"' in text


def test_nodes_are_found_in_sections_and_views() -> None:
    view = View("picture", (), no_picture, fallback=chart([0.0], [1]))
    events = events_of(Note("info", "first"), Section("a", (view, spans([0], [1]))))
    assert len(of_phase(events, "C")) == len(of_phase(events, "X")) == 1


@pytest.mark.parametrize(
    "node",
    [
        Note("info", "only words"),
        Columns("untimed", {"size": np.arange(3)}),
    ],
)
def test_document_without_a_time_axis_is_rejected_before_anything_is_written(node: Node) -> None:
    with pytest.raises(UsageError, match="nothing on a time axis"):
        render(Document("Run", (node,)))


def test_many_events_are_written_in_chunks_near_64_kib() -> None:
    columns = spans(np.arange(10_000), np.ones(10_000))
    chunks = list(render(Document("Run", (columns,))))
    assert len(chunks) > 5
    assert max(map(len, chunks)) < 2 * 64 * 1024


_times = arrays_of.arrays(
    np.float64, 40, elements=st.floats(0, 50, allow_subnormal=False) | st.integers(0, 20).map(float)
)


@given(_times, _times, arrays_of.arrays(np.int32, 40, elements=st.integers(0, 2)), st.booleans())
def test_no_two_slices_of_a_thread_overlap_and_none_is_lost(
    start: Any, duration: Any, track: Any, late: bool
) -> None:
    events = events_of(spans(start + 86_400e6 * late, duration, track))
    lanes = lanes_of(events)
    assert sum(map(len, lanes.values())) == len(start)
    for taken in lanes.values():
        assert all(first[1] <= second[0] for first, second in pairwise(taken))


@given(_times, _times)
def test_track_has_as_many_lanes_as_spans_overlap_at_most(start: Any, duration: Any) -> None:
    starts, lengths = np.rint(start), np.rint(duration)
    at_once = [int(((starts <= t) & (t < starts + lengths)).sum()) for t in starts]
    lanes = lanes_of(events_of(spans(starts, lengths)))
    assert max(at_once) <= len(lanes) <= max(1, *at_once) + 1


_whole = arrays_of.arrays(
    np.int64, 20, elements=st.integers(-(2**63), 2**63 - 1) | st.integers(-5, 5)
)


@given(_whole, _whole, _times)
def test_events_of_all_kinds_are_in_order_of_time(start: Any, duration: Any, x: Any) -> None:
    markers = (Marker(float(x[0]), "a"), Marker(float(x[1]), "b"))
    events = events_of(chart(x, np.arange(len(x)), markers=markers), spans(start, duration))
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    assert len(of_phase(events, "X")) == len(start)
    assert len(of_phase(events, "C")) == len(x)
