"""Snapshots from trees, and recorded settings."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
from memory.load import files
from memory.load.files import LARGE, MIB, SMALL, event, frame
from memory.load.reading import TOP, Loader, Refused, only, said, untraced

from cudakit.memory.snapshot import Annotation, Mark, SegmentKind


def test_annotations_and_settings_equal_the_file(loaded: Loader) -> None:
    snapshot = loaded(files.snapshot())
    begin = 1_700_000_000_000_000
    assert snapshot.annotations == (
        Annotation("step 1", is_start=True, device=0, time_us=begin + 1),
        Annotation("step 1", is_start=False, device=0, time_us=begin + 8),
    )
    assert snapshot.settings == files.snapshot()["allocator_settings"]
    assert snapshot.has_times
    assert any(len(device.events) for device in snapshot.devices)


@pytest.mark.parametrize("form", files.FORMS)
def test_every_file_format_gives_the_same_snapshot(loaded: Loader, form: str) -> None:
    reference = loaded(files.snapshot())
    snapshot = loaded(files.snapshot(), form)
    assert said(snapshot) == said(reference)
    assert snapshot.source.endswith(form)
    assert snapshot.format == ("json" if "json" in form else "pickle")


def test_size_is_that_of_the_decompressed_content(loaded: Loader) -> None:
    packed = loaded(files.snapshot(), "gzip.pkl.gz")
    assert packed.size_bytes == len(files.pickled(files.snapshot()))


def test_list_of_segments_is_a_snapshot_without_a_trace(loaded: Loader) -> None:
    snapshot = loaded(files.segments())
    assert said(snapshot) == said(loaded(untraced()))
    assert not any(len(device.events) for device in snapshot.devices)


@pytest.mark.parametrize("pool", [(0, 7), [0, 7]])
def test_pool_id_is_a_tuple_or_a_list(loaded: Loader, pool: Any) -> None:
    segment = files.segment(LARGE, MIB, [], segment_pool_id=pool)
    trace = [event("alloc", LARGE, 512, pool_id=pool)]
    snapshot = loaded({"segments": [segment], "device_traces": [trace]})
    assert snapshot.pools == ((0, 0), (0, 7))
    assert only(snapshot).segments.pool.tolist() == [1]
    assert only(snapshot).events.pool.tolist() == [1]


def test_profiler_snapshot_has_categories_and_a_cpu_device(loaded: Loader) -> None:
    frames = [{"filename": "none", "line": 0, "name": "aten::empty"}]
    entry = {"addr": LARGE + 512, "size": 512, "stream": 0, "frames": frames}
    blocks = [
        {"size": 512, "state": "inactive"},
        {"size": 512, "state": "active_allocated", "requested_size": 512, "frames": frames},
        {"size": 1024, "state": "inactive"},
    ]
    segment = {"address": LARGE, "total_size": 2048, "stream": 0, "blocks": blocks}
    traces = [
        [{"action": "alloc", **entry, "category": "parameter"}],
        [],
        [
            {"action": "alloc", **entry, "category": "unknown"},
            {"action": "free_requested", **entry},
        ],
    ]
    segments = [{"device": 0, **segment}, {"device": 2, **segment}]
    snapshot = loaded({"segments": segments, "device_traces": traces})
    gpu, cpu = snapshot.devices
    assert (gpu.device, cpu.device) == (0, 2)
    assert [snapshot.texts[i] for i in cpu.events.category] == ["unknown", ""]
    assert [snapshot.texts[i] for i in gpu.events.category] == ["parameter"]
    assert gpu.blocks.address.tolist() == [LARGE, LARGE + 512, LARGE + 1024]
    assert gpu.segments.kind.tolist() == [SegmentKind.UNKNOWN]
    assert not snapshot.has_times


def test_annotation_numbers_stored_as_text_are_read(loaded: Loader) -> None:
    annotation = {"name": "step", "stage": "START", "device": "1", "time_us": "1700000000000000"}
    snapshot = loaded(files.snapshot(external_annotations=[annotation]))
    assert snapshot.annotations == (
        Annotation("step", is_start=True, device=1, time_us=1_700_000_000_000_000),
    )


def test_marks_are_read_and_those_without_time_are_ignored(loaded: Loader) -> None:
    marks = [
        {"name": "warm-up ended", "device": 1, "time_us": 5},
        {"name": "no time", "device": 0},
        {"name": 7, "time_us": 6},
    ]
    assert loaded(untraced(cudakit_marks=marks)).marks == (
        Mark("warm-up ended", device=1, time_us=5),
        Mark("", device=0, time_us=6),
    )


def test_file_without_frames_has_empty_stacks(loaded: Loader) -> None:
    snapshot = loaded(files.without(files.snapshot(), "frames"))
    assert snapshot.stacks == ((),)
    assert snapshot.frames == ()
    assert not only(snapshot).events.stack.any()


@pytest.mark.parametrize("traces", [{}, {"device_traces": []}, {"device_traces": [[], []]}])
def test_file_without_traces_has_its_final_state(loaded: Loader, traces: dict[str, Any]) -> None:
    snapshot = loaded({"segments": files.segments()} | traces)
    assert not any(len(device.events) for device in snapshot.devices)
    assert len(only(snapshot).segments) == 2
    assert len(only(snapshot).events) == 0


def test_snapshot_without_memory_has_an_empty_device(loaded: Loader) -> None:
    snapshot = loaded({"segments": [], "device_traces": [[], []]})
    assert (only(snapshot).device, len(only(snapshot).segments)) == (0, 0)


def test_unknown_keys_are_ignored(loaded: Loader) -> None:
    root = files.snapshot()
    for place in list(files.places(root)):
        node = functools.reduce(lambda inner, key: inner[key], place, root)
        if isinstance(node, dict) and "1" not in node:
            node["of_the_future"] = {"nested": [1, {"deep": None}]}
    snapshot = loaded(root)
    assert said(dataclasses.replace(snapshot, settings={})) == said(
        dataclasses.replace(loaded(files.snapshot()), settings={})
    )


def test_each_device_has_its_own_trace_segments_and_streams(loaded: Loader) -> None:
    traces = [[], [event("alloc", LARGE, 512, stream=9)], [], [event("free", SMALL, 512)]]
    segments = [files.segment(SMALL, MIB, [], device=3), files.segment(LARGE, MIB, [], device=5)]
    found = loaded({"segments": segments, "device_traces": traces}).devices
    assert [d.device for d in found] == [1, 3, 5]
    assert [len(d.events) for d in found] == [1, 1, 0]
    assert [len(d.segments) for d in found] == [0, 1, 1]
    assert [d.streams for d in found] == [(0, 9), (0,), (0,)]


@pytest.mark.parametrize("device", [-1, 128, 2**40, 2**64 - 1])
def test_impossible_device_index_is_rejected(refused: Refused, device: int) -> None:
    why = refused([files.segment(SMALL, MIB, [], device=device)])
    assert "which is impossible" in why


def test_annotation_without_stage_or_time_is_ignored(loaded: Loader) -> None:
    annotations = [
        {"name": "no stage", "device": 0, "time_us": 1},
        {"name": "odd stage", "stage": "MIDDLE", "device": 0, "time_us": 1},
        {"name": "no time", "stage": "START", "device": 0},
        {"name": "odd time", "stage": "START", "device": 0, "time_us": "soon"},
        {"stage": "END", "device": 0, "time_us": 5},
        {"name": 7, "stage": "START", "time_us": 6},
        {},
    ]
    assert loaded(untraced(external_annotations=annotations)).annotations == (
        Annotation("", is_start=False, device=0, time_us=5),
        Annotation("", is_start=True, device=0, time_us=6),
    )


@pytest.mark.parametrize(
    ("root", "why"),
    [
        ({}, "its dictionary is empty"),
        ({"model": 1, "optimizer": 2}, "its dictionary has other keys (model, optimizer)"),
        ([], "it is a list, but not of memory segments"),
        ([1, 2, 3], "it is a list, but not of memory segments"),
        ([{"a": 1}], "it is a list, but not of memory segments"),
        (5, "has an integer where a memory snapshot has a dictionary"),
        ({"segments": 5}, "has an integer where a memory snapshot has a list"),
        ({"segments": [5]}, "has an integer where a memory snapshot has a dictionary"),
        ({"device_traces": [[5]]}, "has an integer where a memory snapshot has a dictionary"),
        ([files.segment(LARGE, -5, [])], "a total_size of -5 bytes"),
        ([files.segment(LARGE, 2**50, [])], f"a total_size of {2**50} bytes"),
        ([files.segment(2**63, MIB, [])], "at 0x8000000000000000 is outside"),
        ([files.without(files.segment(LARGE, MIB, []), "address")], "segment has no address"),
        ([{"total_size": "x", "address": 0}], "a segment has no total_size that is a number"),
        (
            [files.segment(LARGE, MIB, [files.block(LARGE, 2**70, 0, "inactive")])],
            "a block has no size",
        ),
        (
            [files.segment(LARGE, MIB, [files.block(TOP, MIB, 0, "inactive")])],
            "a block at 0xffffffffffffffff is outside",
        ),
        ([files.segment(LARGE, 2**49, [])] * 17, "the segments add up to 1e+16 bytes"),
        ({"device_traces": [[event("alloc", 0, 2**49)] * 3000]}, "add up to 2e+18 bytes"),
    ],
)
def test_files_that_are_not_snapshots_are_rejected_with_a_reason(
    refused: Refused, root: Any, why: str
) -> None:
    assert why in refused(root)


def test_shared_lists_that_expand_too_much_are_rejected(refused: Refused) -> None:
    frames = [frame("f")] * 1000
    nested: list[Any] = [1]
    for _ in range(40):
        nested = [nested, nested]
    trace = [event("alloc", LARGE, 512, frames=frames)] * 1000
    name = frame("x" * 100_000)
    for root in (
        {"device_traces": [trace] * 100},
        {
            "segments": [files.segment(LARGE, MIB, [files.block(LARGE, 1, 1, "inactive")] * 1000)]
            * 1000
        },
        {"device_traces": [[event("alloc", 0, 1, frames=[name] * n) for n in range(200)]]},
    ):
        assert "describes more" in refused(root)
    settings = {"device_traces": [], "allocator_settings": nested}
    assert "more than 10,000 values" in refused(settings)


def test_list_shared_by_eight_devices_is_accepted(loaded: Loader) -> None:
    trace = [event("alloc", LARGE, 512, frames=[frame("f" * 200)])]
    assert len(loaded({"device_traces": [trace] * 8}).devices) == 8


@pytest.mark.parametrize("in_settings", [False, True])
@pytest.mark.parametrize(
    ("flag", "devices"),
    [
        (True, [True, True]),
        (False, [False, False]),
        ([True, False], [True, False]),
        ([False], [False, None]),
        ({"1": True}, [None, True]),
        ("yes", [None, None]),
    ],
)
def test_overflow_flag_is_read_from_both_places(
    loaded: Loader, flag: Any, devices: list[bool | None], *, in_settings: bool
) -> None:
    said_so = {"trace_alloc_overflowed": flag}
    root = {"device_traces": [[event("alloc", LARGE, 512)]] * 2}
    root |= {"allocator_settings": said_so} if in_settings else said_so
    assert [device.overflowed for device in loaded(root).devices] == devices


def test_missing_overflow_flag_is_none(loaded: Loader) -> None:
    assert only(loaded(files.snapshot())).overflowed is None


@pytest.mark.parametrize(
    "setting", [1 << 64, -(1 << 64), b"raw", [[1]], {"a": "b"}, {"9" * 50: 1}, [b"raw"], {"a": {}}]
)
def test_invalid_settings_are_omitted(loaded: Loader, setting: Any) -> None:
    settings = {"odd": setting, "max_split_size": 2**64 - 1, "list": [1, None, "x"]}
    found = loaded(untraced(allocator_settings=settings)).settings
    assert found == {"max_split_size": 2**64 - 1, "list": [1, None, "x"]}


@pytest.mark.parametrize("settings", [None, [], "text", 5])
def test_settings_that_are_not_a_dictionary_are_empty(loaded: Loader, settings: Any) -> None:
    assert loaded(untraced(allocator_settings=settings)).settings == {}
