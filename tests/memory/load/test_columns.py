"""Events, segments and blocks as columns."""

from __future__ import annotations

from typing import Any

import pytest
from memory.load import files
from memory.load.files import GIB, LARGE, MIB, SIDE_STREAM, SMALL, STEP, event, frame
from memory.load.reading import TOP, Loader, only, said, stack, untraced

from cudakit.memory.snapshot import HOST, Action, BlockState, SegmentKind
from cudakit.stacks import Frame


def test_event_columns_equal_the_file(loaded: Loader) -> None:
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


def test_file_without_times_keeps_the_order_of_events(loaded: Loader) -> None:
    snapshot = loaded(files.without(files.snapshot(), "time_us"))
    assert not snapshot.has_times
    assert not only(snapshot).events.time_us.any()
    assert len(only(snapshot).events) == len(files.trace())


def test_unknown_action_becomes_unknown_with_a_warning(loaded: Loader) -> None:
    trace = [event("workspace_snapshot", 0, 0), event("alloc", LARGE, 512)]
    device = only(loaded(untraced(device_traces=[trace])))
    assert device.events.action.tolist() == [Action.UNKNOWN, Action.ALLOC]
    assert device.warnings == ("entries of the trace with an unknown action were skipped: 1",)


def test_free_is_read_as_one_action(loaded: Loader) -> None:
    device = only(loaded(untraced(device_traces=[[event("free", LARGE, 512)]])))
    assert device.events.action.tolist() == [Action.FREE]


def test_oom_entry_has_the_free_device_memory(loaded: Loader) -> None:
    entry = files.failed(2**62, device_free=5 * MIB)
    events = only(loaded(untraced(device_traces=[[entry]]))).events
    assert (events.action[0], events.address[0], events.size[0]) == (Action.OOM, 5 * MIB, 2**62)


def test_oom_entry_may_store_device_free_as_address(loaded: Loader) -> None:
    entry = event("oom", 5 * MIB, GIB)
    assert only(loaded(untraced(device_traces=[[entry]]))).events.address.tolist() == [5 * MIB]


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
def test_invalid_entry_becomes_unknown_with_a_warning(
    loaded: Loader, entry: dict[str, Any]
) -> None:
    device = only(loaded(untraced(device_traces=[[entry, event("alloc", LARGE, 512)]])))
    assert device.events.action.tolist() == [Action.UNKNOWN, Action.ALLOC]
    assert "entries of the trace without a valid address or size were skipped: 1" in device.warnings


@pytest.mark.parametrize("frames", [None, [], "main", 5, {}])
def test_frames_that_are_not_a_list_are_an_empty_stack(loaded: Loader, frames: Any) -> None:
    trace = [event("alloc", LARGE, 512, frames=frames)]
    assert only(loaded(untraced(device_traces=[trace]))).events.stack.tolist() == [0]


def test_frame_without_keys_is_empty(loaded: Loader) -> None:
    trace = [event("alloc", LARGE, 512, frames=[{}, {"name": None, "line": "x", "filename": 1}])]
    snapshot = loaded({"device_traces": [trace]})
    assert snapshot.frames == (Frame("", "", 0),)
    assert snapshot.stacks == ((), (0, 0))


def test_segment_columns_equal_the_file(loaded: Loader) -> None:
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


def test_block_columns_equal_the_file(loaded: Loader) -> None:
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


def test_sizes_and_stacks_come_from_the_history_before_torch_2_1(loaded: Loader) -> None:
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


def test_missing_block_addresses_follow_from_sizes(loaded: Loader) -> None:
    root = files.without(files.segments(), "requested_size")
    for segment in root:
        segment["blocks"] = files.without(segment["blocks"], "address")
    assert only(loaded(root)).blocks.address.tolist() == [
        block["address"] for segment in files.segments() for block in segment["blocks"]
    ]


@pytest.mark.parametrize("word", ["active_pending_free", "active_awaiting_free"])
def test_both_names_of_the_pending_state_are_known(loaded: Loader, word: str) -> None:
    block = files.block(LARGE, MIB, 1000, word)
    found = only(loaded([files.segment(LARGE, MIB, [block])])).blocks
    assert found.state.tolist() == [BlockState.PENDING_FREE]
    assert found.requested.tolist() == [1000]


def test_block_in_an_unknown_state_counts_as_free_with_a_warning(loaded: Loader) -> None:
    block = files.block(LARGE, MIB, 1000, "moved_elsewhere")
    device = only(loaded([files.segment(LARGE, MIB, [block])]))
    assert device.blocks.state.tolist() == [BlockState.INACTIVE]
    assert device.warnings == ("1 blocks with an unknown state count as free",)


def test_blocks_with_gaps_are_accepted(loaded: Loader) -> None:
    blocks = [
        files.block(LARGE + 5000, 700, 700, "active_allocated"),
        files.block(LARGE + 100, 300, 300, "active_allocated"),
    ]
    found = only(loaded([files.segment(LARGE, MIB, blocks)])).blocks
    assert found.address.tolist() == [LARGE + 100, LARGE + 5000]
    assert found.size.tolist() == [300, 700]


def test_segments_are_sorted_by_address(loaded: Loader) -> None:
    assert said(loaded(files.segments()[::-1])) == said(loaded(files.segments()))


def test_requested_size_is_at_most_the_block_size(loaded: Loader) -> None:
    block = files.block(LARGE, MIB, 2 * MIB, "active_allocated")
    assert only(loaded([files.segment(LARGE, MIB, [block])])).blocks.requested.tolist() == [MIB]


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
def test_host_segment_values_are_read_under_all_known_keys(
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


def test_host_segments_are_in_use_pending_or_free(loaded: Loader) -> None:
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


def test_host_segments_without_a_state_count_as_in_use(loaded: Loader) -> None:
    segments = [{"address": LARGE, "size": MIB}, {"address": "none", "size": MIB}]
    host = loaded({"host_segments": segments}).devices[-1]
    assert host.blocks.state.tolist() == [BlockState.ALLOCATED]
    assert host.warnings == (
        "1 host segments without a valid address or size were skipped",
        "1 host segments without a state count as in use",
    )


@pytest.mark.parametrize("nested", [False, True])
def test_host_trace_is_a_list_of_entries_or_of_lists(loaded: Loader, *, nested: bool) -> None:
    entries = [event("alloc", LARGE, 512), event("free_requested", LARGE, 512)]
    traces = [[], entries] if nested else entries
    snapshot = loaded({"device_traces": [[]], "host_traces": traces})
    assert snapshot.devices[-1].device == HOST
    assert snapshot.devices[-1].events.action.tolist() == [Action.ALLOC, Action.FREE_REQUESTED]
    assert snapshot.has_times
