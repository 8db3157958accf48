from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core.memory.load import files
from core.memory.load.files import GIB, LARGE, MIB, SIDE_STREAM, SMALL, STEP, event, frame

from cudakit.core.memory.load import load
from cudakit.core.memory.snapshot import (
    HOST,
    Action,
    Annotation,
    BlockState,
    DeviceTrace,
    SegmentKind,
    Snapshot,
)
from cudakit.document import Frame
from cudakit.errors import SnapshotError

Loader = Callable[..., Snapshot]

TOP = 2**64 - 1


@pytest.fixture
def loaded(tmp_path: Path) -> Loader:
    """Write a snapshot to a file, and load that."""

    def write_and_load(root: Any, form: str = "protocol-4.pkl") -> Snapshot:
        path = tmp_path / form
        path.write_bytes(files.FORMS[form](root))
        return load(str(path))

    return write_and_load


@pytest.fixture
def refused(loaded: Loader) -> Callable[[Any], str]:
    """Write what is no snapshot to a file, and return why it is not loaded."""

    def reason(root: Any) -> str:
        with pytest.raises(SnapshotError) as caught:
            loaded(root)
        assert caught.value.hint
        return caught.value.message

    return reason


def content(value: Any) -> Any:
    """Reduce to what can be compared: every column, with its type."""
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, Frame):
        return {
            field.name: content(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, tuple):
        return [content(item) for item in value]
    return value


def said(snapshot: Snapshot) -> Any:
    """Reduce to what the file says, whatever its name, form and size."""
    return content(dataclasses.replace(snapshot, source="", format="", size_bytes=0))


def only(snapshot: Snapshot) -> DeviceTrace:
    (device,) = snapshot.devices
    return device


def stack(snapshot: Snapshot, index: int) -> list[str]:
    return [snapshot.frames[i].name for i in snapshot.stacks[index]]


def untraced(**more: Any) -> dict[str, Any]:
    return {"segments": files.segments(), "device_traces": []} | more


# Everything that torch 2.11 writes.


def test_every_column_of_a_trace_is_what_the_file_says(loaded: Loader) -> None:
    snapshot = loaded(files.snapshot())
    events, raw = only(snapshot).events, files.numbered(files.trace())
    assert [Action(a).name.lower() for a in events.action] == [e["action"] for e in raw]
    assert events.address.tolist() == [e.get("addr", e.get("device_free")) for e in raw]
    assert events.size.tolist() == [e["size"] for e in raw]
    assert [only(snapshot).streams[i] for i in events.stream] == [e["stream"] for e in raw]
    assert events.time_us.tolist() == [e["time_us"] for e in raw]
    assert [stack(snapshot, i) for i in events.stack] == [
        [f["name"] for f in e["frames"]] for e in raw
    ]
    for column in ("compile_context", "user_metadata"):
        texts = [snapshot.texts[i] for i in getattr(events, column)]
        assert texts == [e[column] for e in raw]
    pools = [snapshot.pools[i] if i >= 0 else None for i in events.pool]
    assert pools == [e.get("pool_id") for e in raw]
    assert not events.category.any()


def test_every_column_of_segments_is_what_the_file_says(loaded: Loader) -> None:
    snapshot = loaded(files.snapshot())
    segments, raw = only(snapshot).segments, files.segments()
    assert segments.address.tolist() == [SMALL, LARGE]
    assert segments.size.tolist() == [2 * MIB, 40 * MIB]
    assert [only(snapshot).streams[i] for i in segments.stream] == [0, SIDE_STREAM]
    assert segments.kind.tolist() == [SegmentKind.SMALL, SegmentKind.LARGE]
    assert [snapshot.pools[i] for i in segments.pool] == [(0, 0), (0, 1)]
    assert segments.expandable.tolist() == [False, True]
    assert [stack(snapshot, i) for i in segments.stack] == [
        [f["name"] for f in s["frames"]] for s in raw
    ]


def test_every_column_of_blocks_is_what_the_file_says(loaded: Loader) -> None:
    snapshot = loaded(files.snapshot())
    blocks = only(snapshot).blocks
    raw = [block for segment in files.segments() for block in segment["blocks"]]
    assert blocks.segment.tolist() == [0, 0, 1, 1, 1]
    for column, key in (("address", "address"), ("size", "size"), ("requested", "requested_size")):
        assert getattr(blocks, column).tolist() == [block[key] for block in raw]
    assert [BlockState(s).name for s in blocks.state] == [
        "ALLOCATED",
        "INACTIVE",
        "ALLOCATED",
        "PENDING_FREE",
        "INACTIVE",
    ]
    assert [stack(snapshot, i) for i in blocks.stack] == [
        [f["name"] for f in block["frames"]] for block in raw
    ]


def test_annotations_and_settings_are_what_the_file_says(loaded: Loader) -> None:
    snapshot = loaded(files.snapshot())
    begin = 1_700_000_000_000_000
    assert snapshot.annotations == (
        Annotation("step 1", start=True, device=0, time_us=begin + 1),
        Annotation("step 1", start=False, device=0, time_us=begin + 8),
    )
    assert snapshot.settings == files.snapshot()["allocator_settings"]
    assert snapshot.has_times
    assert snapshot.has_traces


@pytest.mark.parametrize("form", files.FORMS)
def test_every_form_of_a_file_gives_the_same_snapshot(loaded: Loader, form: str) -> None:
    reference = loaded(files.snapshot())
    snapshot = loaded(files.snapshot(), form)
    assert said(snapshot) == said(reference)
    assert snapshot.source.endswith(form)
    assert snapshot.format == ("json" if "json" in form else "pickle")


def test_the_size_is_that_of_the_unpacked_content(loaded: Loader) -> None:
    packed = loaded(files.snapshot(), "gzip.pkl.gz")
    assert packed.size_bytes == len(files.pickled(files.snapshot()))


# Other producers.


def test_a_bare_list_of_segments_is_a_snapshot_without_a_trace(loaded: Loader) -> None:
    snapshot = loaded(files.segments())
    assert said(snapshot) == said(loaded(untraced()))
    assert not snapshot.has_traces


@pytest.mark.parametrize("pool", [(0, 7), [0, 7]])
def test_a_pool_id_is_a_tuple_or_a_list(loaded: Loader, pool: Any) -> None:
    segment = files.segment(LARGE, MIB, [], segment_pool_id=pool)
    trace = [event("alloc", LARGE, 512, pool_id=pool)]
    snapshot = loaded({"segments": [segment], "device_traces": [trace]})
    assert snapshot.pools == ((0, 0), (0, 7))
    assert only(snapshot).segments.pool.tolist() == [1]
    assert only(snapshot).events.pool.tolist() == [1]


def test_a_profilers_snapshot_has_categories_and_the_cpu_as_its_last_device(loaded: Loader) -> None:
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


def test_annotations_whose_numbers_are_text_are_read_as_numbers(loaded: Loader) -> None:
    annotation = {"name": "step", "stage": "START", "device": "1", "time_us": "1700000000000000"}
    snapshot = loaded(files.snapshot(external_annotations=[annotation]))
    assert snapshot.annotations == (
        Annotation("step", start=True, device=1, time_us=1_700_000_000_000_000),
    )


# Older and newer versions.


def test_files_from_before_torch_2_1_say_sizes_and_stacks_in_a_history(loaded: Loader) -> None:
    newest = {"addr": SMALL, "real_size": 1000, "frames": STEP}
    older = {"addr": SMALL, "real_size": 77, "frames": [frame("older")]}
    blocks = [
        {"size": 1024, "state": "active_allocated", "history": [newest, older]},
        {"size": 512, "state": "active_allocated"},
        {"size": 512, "state": "inactive", "history": [older]},
        {"size": 2 * MIB - 2048, "state": "inactive"},
    ]
    keys = ("device", "address", "total_size", "stream", "segment_type")
    segment = {key: files.segment(SMALL, 2 * MIB, [])[key] for key in keys} | {"blocks": blocks}
    snapshot = loaded([segment])
    found = only(snapshot).blocks
    assert found.address.tolist() == [SMALL, SMALL + 1024, SMALL + 1536, SMALL + 2048]
    assert found.requested.tolist() == [1000, 512, 0, 0]
    assert [stack(snapshot, i) for i in found.stack] == [
        ["forward", "step", "main"],
        [],
        ["older"],
        [],
    ]
    assert only(snapshot).segments.pool.tolist() == [0]


def test_addresses_are_counted_from_the_start_of_each_segment(loaded: Loader) -> None:
    root = files.without(files.segments(), "requested_size")
    for segment in root:
        segment["blocks"] = files.without(segment["blocks"], "address")
    assert only(loaded(root)).blocks.address.tolist() == [
        block["address"] for segment in files.segments() for block in segment["blocks"]
    ]


def test_a_file_without_times_is_in_order_of_its_events(loaded: Loader) -> None:
    snapshot = loaded(files.without(files.snapshot(), "time_us"))
    assert not snapshot.has_times
    assert not only(snapshot).events.time_us.any()
    assert len(only(snapshot).events) == len(files.trace())


def test_a_file_without_frames_has_empty_stacks(loaded: Loader) -> None:
    snapshot = loaded(files.without(files.snapshot(), "frames"))
    assert snapshot.stacks == ((),)
    assert snapshot.frames == ()
    assert not only(snapshot).events.stack.any()


@pytest.mark.parametrize("traces", [{}, {"device_traces": []}, {"device_traces": [[], []]}])
def test_a_file_recorded_without_traces_has_the_state_at_its_end(
    loaded: Loader, traces: dict[str, Any]
) -> None:
    snapshot = loaded({"segments": files.segments()} | traces)
    assert not snapshot.has_traces
    assert len(only(snapshot).segments) == 2
    assert len(only(snapshot).events) == 0


def test_a_file_of_a_process_that_used_no_memory_has_an_empty_device(loaded: Loader) -> None:
    snapshot = loaded({"segments": [], "device_traces": [[], []]})
    assert (only(snapshot).device, len(only(snapshot).segments)) == (0, 0)


def test_unknown_keys_are_passed_over(loaded: Loader) -> None:
    root = files.snapshot()
    for place in list(files.places(root)):
        node = functools.reduce(lambda inner, key: inner[key], place, root)
        if isinstance(node, dict) and "1" not in node:
            node["of_the_future"] = {"nested": [1, {"deep": None}]}
    snapshot = loaded(root)
    assert said(dataclasses.replace(snapshot, settings={})) == said(
        dataclasses.replace(loaded(files.snapshot()), settings={})
    )


def test_an_unknown_action_stays_as_a_marker_and_is_reported(loaded: Loader) -> None:
    trace = [event("workspace_snapshot", 0, 0), event("alloc", LARGE, 512)]
    device = only(loaded(untraced(device_traces=[trace])))
    assert device.events.action.tolist() == [Action.UNKNOWN, Action.ALLOC]
    assert device.warnings == (
        "1 trace entries have an action that is not known and are passed over",
    )


def test_free_is_an_action_of_its_own(loaded: Loader) -> None:
    device = only(loaded(untraced(device_traces=[[event("free", LARGE, 512)]])))
    assert device.events.action.tolist() == [Action.FREE]


@pytest.mark.parametrize("word", ["active_pending_free", "active_awaiting_free"])
def test_both_words_for_a_pending_free_are_known(loaded: Loader, word: str) -> None:
    block = files.block(LARGE, MIB, 1000, word)
    found = only(loaded([files.segment(LARGE, MIB, [block])])).blocks
    assert found.state.tolist() == [BlockState.PENDING_FREE]
    assert found.requested.tolist() == [1000]


def test_a_block_in_an_unknown_state_counts_as_free_and_is_reported(loaded: Loader) -> None:
    block = files.block(LARGE, MIB, 1000, "moved_elsewhere")
    device = only(loaded([files.segment(LARGE, MIB, [block])]))
    assert device.blocks.state.tolist() == [BlockState.INACTIVE]
    assert device.warnings == ("1 blocks are in a state that is not known and count as free",)


def test_blocks_that_do_not_tile_their_segment_are_taken_as_they_are(loaded: Loader) -> None:
    blocks = [
        files.block(LARGE + 5000, 700, 700, "active_allocated"),
        files.block(LARGE + 100, 300, 300, "active_allocated"),
    ]
    found = only(loaded([files.segment(LARGE, MIB, blocks)])).blocks
    assert found.address.tolist() == [LARGE + 100, LARGE + 5000]
    assert found.size.tolist() == [300, 700]


def test_segments_are_put_in_order_of_their_addresses(loaded: Loader) -> None:
    assert said(loaded(files.segments()[::-1])) == said(loaded(files.segments()))


def test_an_out_of_memory_entry_says_how_much_the_device_had(loaded: Loader) -> None:
    entry = files.failed(2**62, device_free=5 * MIB)
    events = only(loaded(untraced(device_traces=[[entry]]))).events
    assert (events.action[0], events.address[0], events.size[0]) == (Action.OOM, 5 * MIB, 2**62)


def test_an_out_of_memory_entry_may_say_so_as_its_address(loaded: Loader) -> None:
    entry = event("oom", 5 * MIB, GIB)
    assert only(loaded(untraced(device_traces=[[entry]]))).events.address.tolist() == [5 * MIB]


# Numbers.


def test_integers_of_nine_bytes_keep_their_value(loaded: Loader) -> None:
    trace = [event("snapshot", TOP, 0), files.failed(MIB, device_free=2**63), event("x", 2**63, 0)]
    snapshot = loaded(untraced(device_traces=[trace]))
    assert only(snapshot).events.address.tolist() == [TOP, 2**63, 2**63]
    assert said(snapshot) == said(loaded(untraced(device_traces=[trace]), "plain.json"))


@pytest.mark.parametrize(
    "entry",
    [
        event("alloc", TOP, 512),
        event("alloc", -1, 512),
        event("alloc", 2**70, 512),
        event("alloc", LARGE, -1),
        event("alloc", LARGE, 2**50),
        event("alloc", LARGE, 2**70),
        event("free_completed", LARGE, 0) | {"size": "512"},
        event("segment_map", LARGE, 0) | {"size": None},
        files.without(event("alloc", LARGE, 512), "addr"),
        files.without(event("segment_free", LARGE, 512), "size"),
        files.failed(-1, device_free=0),
    ],
    ids=lambda entry: f"{entry['action']} {entry.get('addr')} {entry.get('size')}",
)
def test_an_entry_that_cannot_be_stays_as_a_marker_and_is_reported(
    loaded: Loader, entry: dict[str, Any]
) -> None:
    device = only(loaded(untraced(device_traces=[[entry, event("alloc", LARGE, 512)]])))
    assert device.events.action.tolist() == [Action.UNKNOWN, Action.ALLOC]
    assert "1 trace entries have no usable address or size and are passed over" in device.warnings


def test_a_request_larger_than_its_block_is_cut_to_the_block(loaded: Loader) -> None:
    block = files.block(LARGE, MIB, 2 * MIB, "active_allocated")
    assert only(loaded([files.segment(LARGE, MIB, [block])])).blocks.requested.tolist() == [MIB]


# Devices and host memory.


def test_devices_have_their_own_traces_segments_and_streams(loaded: Loader) -> None:
    traces = [[], [event("alloc", LARGE, 512, stream=9)], [], [event("free", SMALL, 512)]]
    segments = [files.segment(SMALL, MIB, [], device=3), files.segment(LARGE, MIB, [], device=5)]
    found = loaded({"segments": segments, "device_traces": traces}).devices
    assert [d.device for d in found] == [1, 3, 5]
    assert [len(d.events) for d in found] == [1, 1, 0]
    assert [len(d.segments) for d in found] == [0, 1, 1]
    assert [d.streams for d in found] == [(0, 9), (0,), (0,)]


@pytest.mark.parametrize("device", [-1, 128, 2**40, 2**64 - 1])
def test_a_device_that_cannot_be_is_refused(refused: Callable[[Any], str], device: int) -> None:
    why = refused([files.segment(SMALL, MIB, [], device=device)])
    assert "which cannot be" in why


@pytest.mark.parametrize(
    "keys",
    [
        {"size": MIB, "allocated": 1, "active": 1},
        {"size": MIB, "allocated": True, "active": True},
        {"size": MIB, "allocated": MIB, "active": MIB},
        {"total_size": MIB, "allocated_size": MIB, "active_size": MIB},
        {"total_size": MIB, "is_allocated": True},
    ],
)
def test_host_segments_are_read_under_every_plausible_key(
    loaded: Loader, keys: dict[str, Any]
) -> None:
    segment = {"address": LARGE, "segment_pool_id": (0, 0), "frames": STEP} | keys
    snapshot = loaded({"segments": [], "device_traces": [], "host_segments": [segment]})
    host = snapshot.devices[-1]
    assert host.device == HOST
    assert (host.segments.address.tolist(), host.segments.size.tolist()) == ([LARGE], [MIB])
    assert host.blocks.state.tolist() == [BlockState.ALLOCATED]
    assert stack(snapshot, int(host.blocks.stack[0])) == ["forward", "step", "main"]
    assert host.warnings == ()


def test_host_segments_are_in_use_pending_or_cached(loaded: Loader) -> None:
    states = ((1, 1), (0, 1), (0, 0))
    segments = [
        {"addr": LARGE + i * MIB, "size": MIB, "allocated": used, "active": active}
        for i, (used, active) in enumerate(states)
    ]
    found = loaded({"host_segments": segments, "host_traces": []}).devices[-1].blocks
    assert found.state.tolist() == [
        BlockState.ALLOCATED,
        BlockState.PENDING_FREE,
        BlockState.INACTIVE,
    ]
    assert found.requested.tolist() == [MIB, MIB, 0]


def test_host_segments_that_say_nothing_of_their_use_count_as_in_use(loaded: Loader) -> None:
    segments = [{"address": LARGE, "size": MIB}, {"address": "none", "size": MIB}]
    host = loaded({"host_segments": segments}).devices[-1]
    assert host.blocks.state.tolist() == [BlockState.ALLOCATED]
    assert host.warnings == (
        "1 host segments have no usable address or size and are passed over",
        "1 host segments do not say whether they are in use, and count as such",
    )


@pytest.mark.parametrize("nested", [False, True])
def test_a_host_trace_is_a_list_of_entries_or_of_lists(loaded: Loader, *, nested: bool) -> None:
    entries = [event("alloc", LARGE, 512), event("free_requested", LARGE, 512)]
    traces = [[], entries] if nested else entries
    snapshot = loaded({"device_traces": [[]], "host_traces": traces})
    assert snapshot.devices[-1].device == HOST
    assert snapshot.devices[-1].events.action.tolist() == [Action.ALLOC, Action.FREE_REQUESTED]
    assert snapshot.has_times


# Settings, flags and annotations that are not quite right.


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
def test_the_overflow_flag_is_read_in_either_place(
    loaded: Loader, flag: Any, devices: list[bool | None], *, in_settings: bool
) -> None:
    said_so = {"trace_alloc_overflowed": flag}
    root = {"device_traces": [[event("alloc", LARGE, 512)]] * 2}
    root |= {"allocator_settings": said_so} if in_settings else said_so
    assert [device.overflowed for device in loaded(root).devices] == devices


def test_a_file_that_is_silent_about_overflow_leaves_it_open(loaded: Loader) -> None:
    assert only(loaded(files.snapshot())).overflowed is None


@pytest.mark.parametrize(
    "setting", [1 << 64, -(1 << 64), b"raw", [[1]], {"a": "b"}, {"9" * 50: 1}, [b"raw"], {"a": {}}]
)
def test_a_setting_that_is_none_is_left_out(loaded: Loader, setting: Any) -> None:
    settings = {"odd": setting, "max_split_size": 2**64 - 1, "list": [1, None, "x"]}
    found = loaded(untraced(allocator_settings=settings)).settings
    assert found == {"max_split_size": 2**64 - 1, "list": [1, None, "x"]}


@pytest.mark.parametrize("settings", [None, [], "text", 5])
def test_settings_that_are_no_dictionary_are_none(loaded: Loader, settings: Any) -> None:
    assert loaded(untraced(allocator_settings=settings)).settings == {}


def test_an_annotation_without_stage_or_time_is_no_end_of_a_range(loaded: Loader) -> None:
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
        Annotation("", start=False, device=0, time_us=5),
        Annotation("", start=True, device=0, time_us=6),
    )


@pytest.mark.parametrize("frames", [None, [], "main", 5, {}])
def test_frames_that_are_no_list_are_an_empty_stack(loaded: Loader, frames: Any) -> None:
    trace = [event("alloc", LARGE, 512, frames=frames)]
    assert only(loaded(untraced(device_traces=[trace]))).events.stack.tolist() == [0]


def test_a_frame_that_lacks_its_parts_is_an_unknown_one(loaded: Loader) -> None:
    trace = [event("alloc", LARGE, 512, frames=[{}, {"name": None, "line": "x", "filename": 1}])]
    snapshot = loaded({"device_traces": [trace]})
    assert snapshot.frames == (Frame("", "", 0),)
    assert snapshot.stacks == ((), (0, 0))


# What is refused.


@pytest.mark.parametrize(
    ("root", "why"),
    [
        ({}, "a dictionary, but not a memory snapshot (its keys: none)"),
        ({"model": 1, "optimizer": 2}, "(its keys: model, optimizer)"),
        ([], "a list, but not of memory segments"),
        ([1, 2, 3], "a list, but not of memory segments"),
        ([{"a": 1}], "a list, but not of memory segments"),
        (5, "has int where a memory snapshot has a dictionary"),
        ({"segments": 5}, "has int where a memory snapshot has a list"),
        ({"segments": [5]}, "has int where a memory snapshot has a dictionary"),
        ({"device_traces": [[5]]}, "has int where a memory snapshot has a dictionary"),
        ([files.segment(LARGE, -5, [])], "a total_size of -5 bytes"),
        ([files.segment(LARGE, 2**50, [])], f"a total_size of {2**50} bytes"),
        ([files.segment(2**63, MIB, [])], "at 0x8000000000000000 lies beyond"),
        ([files.without(files.segment(LARGE, MIB, []), "address")], "segment has no address"),
        ([{"total_size": "x", "address": 0}], "a segment has no total_size"),
        (
            [files.segment(LARGE, MIB, [files.block(LARGE, 2**70, 0, "inactive")])],
            "a block has no size",
        ),
        (
            [files.segment(LARGE, MIB, [files.block(TOP, MIB, 0, "inactive")])],
            "a block at 0xffffffffffffffff lies beyond",
        ),
        ([files.segment(LARGE, 2**49, [])] * 17, "the segments add up to 1e+16 bytes"),
        ({"device_traces": [[event("alloc", 0, 2**49)] * 3000]}, "add up to 2e+18 bytes"),
    ],
)
def test_what_is_no_snapshot_is_refused_with_a_reason(
    refused: Callable[[Any], str], root: Any, why: str
) -> None:
    assert why in refused(root)


def test_lists_that_are_shared_to_multiply_are_refused(refused: Callable[[Any], str]) -> None:
    frames = [frame("f")] * 1000
    nested: list[Any] = [1]
    for _ in range(40):
        nested = [nested, nested]
    trace = [event("alloc", LARGE, 512, frames=frames)] * 1000
    name = frame("x" * 100_000)
    for root in (
        {"device_traces": [trace] * 100},
        {"device_traces": [], "allocator_settings": nested},
        {
            "segments": [files.segment(LARGE, MIB, [files.block(LARGE, 1, 1, "inactive")] * 1000)]
            * 1000
        },
        {"device_traces": [[event("alloc", 0, 1, frames=[name] * n) for n in range(200)]]},
    ):
        assert "shared to multiply" in refused(root)


def test_a_list_shared_by_all_devices_of_a_machine_is_no_attack(loaded: Loader) -> None:
    trace = [event("alloc", LARGE, 512, frames=[frame("f" * 200)])]
    assert len(loaded({"device_traces": [trace] * 8}).devices) == 8
