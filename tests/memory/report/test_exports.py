"""Exports for other tools."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest

from cudakit.memory.analyze import analyze
from cudakit.memory.load import load
from cudakit.memory.report import exports
from cudakit.memory.result import MemoryResult
from cudakit.memory.selection import MemorySpec
from cudakit.report import chrome, flame, perfetto
from cudakit.report import csv as csv_render

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def result() -> MemoryResult:
    return analyze([load(str(ROOT / "tests/data/oom.pkl.gz"))], MemorySpec())


def test_csv_export_has_a_row_per_allocation(result: MemoryResult) -> None:
    rows = list(
        csv.DictReader(io.StringIO("".join(csv_render.render(exports.allocations(result)))))
    )
    live = [row for row in rows if not row["end_event"]]

    assert len(rows) == len(result.devices[0].history.allocations)
    assert sum(int(row["size_bytes"]) for row in live) == result.devices[0].end.active_bytes
    assert all(int(row["begin_event"]) < int(row["end_event"]) for row in rows if row["end_event"])


def test_csv_export_of_several_files_keeps_their_texts() -> None:
    names = [str(ROOT / "tests/data" / f"{name}.pkl.gz") for name in ("leak", "pools")]
    both = analyze([load(name) for name in names], MemorySpec())
    text = "".join(csv_render.render(exports.allocations(both)))
    rows = list(csv.DictReader(io.StringIO(text)))

    assert {row["file"] for row in rows} == set(names)
    assert {row["pool"] for row in rows if row["file"] == names[1]} == {"0,0", "1,0", "0,1"}
    assert any("_forgotten" in row["line"] for row in rows if row["file"] == names[0])
    assert not any("_forgotten" in row["line"] for row in rows if row["file"] == names[1])


def test_flame_graph_sums_to_the_holders(result: MemoryResult) -> None:
    lines = "".join(flame.collapsed(exports.flames(result))).splitlines()
    total = sum(int(line.rpartition(" ")[2]) for line in lines)

    assert total == sum(holder.bytes for holder in result.devices[0].holders)
    assert all(line.startswith("cuda:0;") for line in lines)


def test_speedscope_export_has_a_profile_per_device(result: MemoryResult) -> None:
    profiles = json.loads("".join(flame.speedscope(exports.flames(result))))["profiles"]

    assert [profile["name"] for profile in profiles] == ["cuda:0"]
    assert profiles[0]["unit"] == "bytes"


def test_timeline_export_has_counters_and_large_allocations(
    result: MemoryResult,
) -> None:
    events = json.loads("".join(chrome.render(exports.timeline(result))))["traceEvents"]
    counters = [event for event in events if event["ph"] == "C"]
    slices = [event for event in events if event["ph"] == "X"]
    highest = max(value for event in counters for value in event["args"].values())

    assert highest == result.devices[0].peak.highest_reserved_bytes
    assert slices
    assert min(s["args"]["size_bytes"] for s in slices) >= result.devices[0].peak.active_bytes / 200


def test_timeline_is_a_trace_of_perfetto_too(result: MemoryResult) -> None:
    proto = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    trace = proto.Trace()
    trace.ParseFromString(b"".join(perfetto.render(exports.timeline(result))))
    tracks = [
        packet.track_descriptor for packet in trace.packet if packet.HasField("track_descriptor")
    ]
    counters = {track.uuid: track.name for track in tracks if track.HasField("counter")}
    values: dict[str, int] = {}
    for packet in trace.packet:
        event = packet.track_event
        if event.type == event.TYPE_COUNTER:
            name = counters[event.track_uuid]
            values[name] = max(values.get(name, 0), event.counter_value)
    assert (
        values["cuda:0 memory · cuda:0 reserved"] == result.devices[0].peak.highest_reserved_bytes
    )
    assert any(
        packet.track_event.type == packet.track_event.TYPE_SLICE_BEGIN for packet in trace.packet
    )


def test_timeline_export_without_times_uses_event_indices(result: MemoryResult) -> None:
    from dataclasses import replace

    device = result.devices[0]
    timeless = replace(device, snapshot=replace(device.snapshot, has_times=False))

    assert np.array_equal(exports._event_clock(timeless), 1000 * np.arange(device.events))
