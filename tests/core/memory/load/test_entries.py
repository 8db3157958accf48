from __future__ import annotations

from typing import Any

import pytest
from core.memory.load import files
from core.memory.load.files import GIB, LARGE, MIB, event
from core.memory.load.reading import TOP, Loader, only, said, stack, untraced

from cudakit.document import Frame
from cudakit.torch_rules.actions import Action


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


def test_a_file_without_times_is_in_order_of_its_events(loaded: Loader) -> None:
    snapshot = loaded(files.without(files.snapshot(), "time_us"))
    assert not snapshot.has_times
    assert not only(snapshot).events.time_us.any()
    assert len(only(snapshot).events) == len(files.trace())


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


def test_an_out_of_memory_entry_says_how_much_the_device_had(loaded: Loader) -> None:
    entry = files.failed(2**62, device_free=5 * MIB)
    events = only(loaded(untraced(device_traces=[[entry]]))).events
    assert (events.action[0], events.address[0], events.size[0]) == (Action.OOM, 5 * MIB, 2**62)


def test_an_out_of_memory_entry_may_say_so_as_its_address(loaded: Loader) -> None:
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
def test_an_entry_that_cannot_be_stays_as_a_marker_and_is_reported(
    loaded: Loader, entry: dict[str, Any]
) -> None:
    device = only(loaded(untraced(device_traces=[[entry, event("alloc", LARGE, 512)]])))
    assert device.events.action.tolist() == [Action.UNKNOWN, Action.ALLOC]
    assert "1 trace entries have no usable address or size and are passed over" in device.warnings


@pytest.mark.parametrize("frames", [None, [], "main", 5, {}])
def test_frames_that_are_no_list_are_an_empty_stack(loaded: Loader, frames: Any) -> None:
    trace = [event("alloc", LARGE, 512, frames=frames)]
    assert only(loaded(untraced(device_traces=[trace]))).events.stack.tolist() == [0]


def test_a_frame_that_lacks_its_parts_is_an_unknown_one(loaded: Loader) -> None:
    trace = [event("alloc", LARGE, 512, frames=[{}, {"name": None, "line": "x", "filename": 1}])]
    snapshot = loaded({"device_traces": [trace]})
    assert snapshot.frames == (Frame("", "", 0),)
    assert snapshot.stacks == ((), (0, 0))
