"""Scenarios 43 to 48: the trace, its stacks, and snapshots that memviz reads."""

from __future__ import annotations

import dis
import json
import pickle
from pathlib import Path
from time import time
from typing import Any

import pytest
from allocator.device import MIB, Device
from allocator.pinned.host import Host
from allocator.summaries import actions
from allocator.work import Work

from cudakit.allocator.allocator import DeviceCachingAllocator, InvalidPointer
from cudakit.allocator.history import Stacks, gather_stack
from cudakit.allocator.oom import OutOfMemory
from cudakit.allocator.pinned import CachingHostAllocator
from cudakit.allocator.pools import MemPool
from cudakit.errors import UsageError
from cudakit.memory.history import reconstruct
from cudakit.memory.lifetimes import Contradictions
from cudakit.memory.load import load
from cudakit.memory.snapshot import HOST, Action, BlockState, Snapshot
from cudakit.torch_rules.settings import Settings

SIZE = 311 * 411 * 4


def take(allocator: DeviceCachingAllocator) -> int:
    return allocator.alloc(SIZE)


def give(allocator: DeviceCachingAllocator, ptr: int) -> None:
    allocator.free(ptr)


def empty(allocator: DeviceCachingAllocator) -> None:
    allocator.empty_cache()


def trace(allocator: DeviceCachingAllocator) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = allocator.snapshot()["device_traces"][0]
    return entries


def loaded(allocator: DeviceCachingAllocator, folder: Path) -> Snapshot:
    path = folder / "snapshot.pkl"
    path.write_bytes(pickle.dumps(allocator.snapshot()))
    return load(str(path))


def test_43_live_block_has_the_stack_of_its_allocation(allocator: DeviceCachingAllocator) -> None:
    allocator.record_history("state", context="all")
    ptr = take(allocator)

    (segment,) = allocator.snapshot()["segments"]
    block = segment["blocks"][0]
    assert block["address"] == ptr
    assert block["frames"][0] == {
        "name": "take",
        "filename": __file__,
        "line": take.__code__.co_firstlineno + 1,
    }
    assert segment["frames"] == []  # the upper part of the split block has the stack, as in PyTorch
    assert len(trace(allocator)) == 1
    allocator.free(ptr)
    allocator.empty_cache()
    assert trace(allocator)[-1]["action"] == "segment_free"


def test_whole_segment_has_the_stack_of_its_allocation(
    allocator: DeviceCachingAllocator,
) -> None:
    allocator.record_history("all", context="alloc")
    allocator.free(allocator.alloc(30 * MIB))
    (segment,) = allocator.snapshot()["segments"]
    assert segment["frames"]

    allocator.free(allocator.alloc(20 * MIB))
    allocator.empty_cache()
    assert "frames" not in trace(allocator)[-1]


def test_large_segments_are_released_before_small_ones(allocator: DeviceCachingAllocator) -> None:
    for ptr in [allocator.alloc(size) for size in (512, 30 * MIB, MIB, MIB, 20 * MIB)]:
        allocator.free(ptr)
    allocator.record_history()
    allocator.empty_cache()

    assert [e["size"] // MIB for e in trace(allocator)] == [20, 30, 2, 2]


@pytest.mark.parametrize(
    ("context", "expected_names"),
    [("state", set()), ("alloc", {"take"}), ("all", {"take", "give", "empty"}), (None, set())],
)
def test_44_context_selects_the_stacks_in_the_trace(
    allocator: DeviceCachingAllocator, context: Any, expected_names: set[str]
) -> None:
    allocator.record_history("all", context=context)
    give(allocator, take(allocator))
    empty(allocator)

    names = {frame["name"] for entry in trace(allocator) for frame in entry.get("frames", [])}
    assert names & {"take", "give", "empty"} == expected_names


def test_free_event_without_a_stack_has_the_stack_of_the_allocation(
    allocator: DeviceCachingAllocator,
) -> None:
    allocator.record_history(context="alloc")
    give(allocator, take(allocator))

    assert {entry["frames"][0]["name"] for entry in trace(allocator)} == {"take"}


def test_45_skipped_actions_are_omitted(allocator: DeviceCachingAllocator) -> None:
    allocator.record_history(skip_actions=["free_requested", "segment_alloc"])
    give(allocator, take(allocator))

    assert actions(allocator) == ["alloc", "free_completed"]


def test_45_metadata_is_in_every_entry_while_it_is_set(allocator: DeviceCachingAllocator) -> None:
    allocator.record_history()
    allocator.set_metadata("step 1")
    ptr = take(allocator)
    allocator.set_metadata("")
    give(allocator, ptr)

    assert [entry["user_metadata"] for entry in trace(allocator)] == ["step 1"] * 2 + [""] * 2


def test_45_history_without_stacks(allocator: DeviceCachingAllocator) -> None:
    allocator.record_history()
    ptr = take(allocator)
    allocator.record_history(context=None)
    take(allocator)
    allocator.record_history()
    give(allocator, ptr)

    assert ["frames" in entry for entry in trace(allocator)] == [True, True, False, True, True]


def test_46_latest_entries_are_kept_in_order(allocator: DeviceCachingAllocator) -> None:
    allocator.record_history(max_entries=10)
    for size in range(1, 9):
        allocator.free(allocator.alloc(512 * size))
    entries = trace(allocator)

    assert len(entries) == 10
    assert [entry["size"] // 512 for entry in entries] == [5, 6, 6, 6, 7, 7, 7, 8, 8, 8]
    assert [e["time_us"] for e in entries] == sorted(e["time_us"] for e in entries)
    assert allocator.snapshot()["trace_alloc_overflowed"] == [True]
    allocator.record_history(clear=True)
    allocator.alloc(512)
    assert allocator.snapshot()["trace_alloc_overflowed"] == [False]


def test_segments_are_numbered_in_order_of_allocation(
    allocator: DeviceCachingAllocator, tmp_path: Path
) -> None:
    first = allocator.alloc(30 * MIB)
    allocator.alloc(700)
    allocator.free(first)
    allocator.empty_cache()
    allocator.alloc(9 * MIB)

    by_place = {
        s["total_size"]: s["registration_counter"] for s in allocator.snapshot()["segments"]
    }
    assert by_place == {2 * MIB: 2, 20 * MIB: 3}
    assert loaded(allocator, tmp_path).devices[0].warnings == ()


def test_events_of_a_restore_have_internal_metadata(
    allocator: DeviceCachingAllocator, tmp_path: Path
) -> None:
    allocator.record_history()
    allocator.set_metadata("step 1")
    pool = MemPool(allocator)
    with allocator.use_pool(pool):
        blocks = [allocator.alloc(700), allocator.alloc(700)]
        allocator.free(blocks[0])
        state = allocator.checkpoint(pool)
        allocator.free(blocks[1])
    count_before = len(trace(allocator))
    allocator.restore(state)
    count_after = len(trace(allocator))
    allocator.free(blocks[1])
    entries = trace(allocator)
    pool.close()

    tagged = [entry for entry in entries if "internal_metadata" in entry]
    assert tagged == [
        entry for entry in entries[count_before:count_after] if entry["action"] != "snapshot"
    ]
    assert len(tagged) == 7  # three blocks are allocated in the segment, and two are freed
    assert {entry["internal_metadata"] for entry in tagged} == {"restore"}
    assert {entry["user_metadata"] for entry in entries} == {"step 1"}
    assert loaded(allocator, tmp_path).devices[0].warnings == ()


def test_stopped_history_keeps_its_entries(
    allocator: DeviceCachingAllocator,
) -> None:
    allocator.record_history()
    ptr = take(allocator)
    allocator.record_history(None)
    give(allocator, ptr)

    assert actions(allocator) == ["segment_alloc", "alloc"]
    allocator.record_history(clear=True)
    assert actions(allocator) == []


def test_snapshot_event_is_in_the_next_snapshot(allocator: DeviceCachingAllocator) -> None:
    allocator.record_history()
    allocator.alloc(MIB)
    allocator.snapshot()

    last_entry = trace(allocator)[-1]
    assert (last_entry["action"], last_entry["addr"], last_entry["size"]) == ("snapshot", 0, MIB)


@pytest.mark.parametrize(
    ("invalid", "words"),
    [
        ({"history": "some"}, "'some'"),
        ({"context": "many"}, "'many'"),
        ({"max_entries": 0}, "0 entries"),
        ({"skip_actions": ["allocate"]}, "'allocate'"),
    ],
)
def test_invalid_history_setting_is_refused(
    allocator: DeviceCachingAllocator, invalid: Any, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        allocator.record_history(**invalid)


def program(allocator: DeviceCachingAllocator) -> None:
    """Record a trace with all kinds of entries."""
    allocator.record_history()
    blocks = [allocator.alloc(size) for size in (700, 9 * MIB, 3000, 30 * MIB, MIB)]
    allocator.free(blocks[0])
    allocator.free(blocks[1], 11)
    allocator.free(blocks[3])
    allocator.empty_cache()
    allocator.alloc(5 * MIB, 12)
    with pytest.raises(OutOfMemory):
        allocator.alloc(1 << 40)
    waits = allocator.alloc(8 * MIB)
    allocator.free(waits, 11)


def test_47_memviz_replays_the_trace_to_the_blocks_of_the_snapshot(
    allocator: DeviceCachingAllocator, tmp_path: Path
) -> None:
    program(allocator)
    snapshot = loaded(allocator, tmp_path)

    (device,) = snapshot.devices
    assert device.warnings == ()
    assert reconstruct(snapshot, device).inconsistencies == Contradictions(0, 0, 0, 0)
    assert device.overflowed is False
    assert len(device.segments) == 3
    states = set(device.blocks.state.tolist())
    assert states == {BlockState.ALLOCATED, BlockState.PENDING_FREE, BlockState.INACTIVE}
    assert Action.OOM in device.events.action.tolist()
    assert Action.UNKNOWN not in device.events.action.tolist()
    assert any(frame.filename == __file__ for frame in snapshot.frames)


def test_47_replay_curves_end_at_the_statistics(
    allocator: DeviceCachingAllocator, tmp_path: Path
) -> None:
    program(allocator)
    snapshot = loaded(allocator, tmp_path)
    curves = reconstruct(snapshot, snapshot.devices[0]).curves

    statistics = allocator.statistics()
    for curve in ("requested", "allocated", "active", "reserved"):
        ends = getattr(curves, curve)
        assert ends[-1] == statistics[f"{curve}_bytes.all.current"], curve
        assert ends.max() == statistics[f"{curve}_bytes.all.peak"], curve


def test_48_snapshot_survives_json(allocator: DeviceCachingAllocator) -> None:
    program(allocator)
    snapshot = allocator.snapshot()

    decoded = json.loads(json.dumps(snapshot))
    assert decoded["segments"][0]["blocks"] == snapshot["segments"][0]["blocks"]
    assert decoded["allocator_settings"].items() >= Settings().as_torch().items()


def test_second_device_has_its_own_trace(tmp_path: Path) -> None:
    allocator = DeviceCachingAllocator(Device(), device=2)
    program(allocator)
    snapshot = loaded(allocator, tmp_path)

    (device,) = snapshot.devices
    assert device.device == 2
    assert len(device.events) > 10


def test_memviz_reads_a_snapshot_of_the_simulated_gpu(work: Work, tmp_path: Path) -> None:
    work.allocator.record_history()
    other = work.stream()
    ptr = work.allocator.alloc(30 * MIB)
    work.busy(other)
    work.allocator.free(ptr, other)
    take(work.allocator)
    snapshot = loaded(work.allocator, tmp_path)

    assert snapshot.devices[0].warnings == ()
    assert reconstruct(snapshot, snapshot.devices[0]).inconsistencies == Contradictions(0, 0, 0, 0)


# --- Annotations of the trace by the program, and their snapshots in memviz ------------------------


def test_annotation_of_a_live_allocation_is_in_the_trace(allocator: DeviceCachingAllocator) -> None:
    allocator.record_history()
    allocator.set_metadata("of all")
    ptr = allocator.alloc(700)
    allocator.annotate(ptr, "weights")
    trace_entry = allocator.snapshot()["device_traces"][0][-1]

    assert (trace_entry["action"], trace_entry["addr"], trace_entry["size"]) == (
        "annotate",
        ptr,
        700,
    )
    assert trace_entry["user_metadata"] == "weights"
    assert trace_entry["frames"][0]["filename"] == __file__


def test_annotating_an_address_without_allocation_is_refused(
    allocator: DeviceCachingAllocator,
) -> None:
    with pytest.raises(InvalidPointer, match="nothing is allocated at 0xbad"):
        allocator.annotate(0xBAD, "weights")


def test_annotation_without_history_is_ignored(allocator: DeviceCachingAllocator) -> None:
    allocator.annotate(allocator.alloc(1), "weights")
    with allocator.annotated("step"):
        pass

    assert actions(allocator) == []
    assert allocator.snapshot()["external_annotations"] == []


def test_annotated_range_ends_if_its_body_raises(
    allocator: DeviceCachingAllocator,
) -> None:
    allocator.record_history()
    with pytest.raises(ZeroDivisionError), allocator.annotated("step 1"):
        raise ZeroDivisionError
    annotations = allocator.snapshot()["external_annotations"]

    assert [(mark["name"], mark["stage"], mark["device"]) for mark in annotations] == [
        ("step 1", "START", 0),
        ("step 1", "END", 0),
    ]
    assert abs(annotations[0]["time_us"] / 1e6 - time()) < 60


def test_ranges_are_limited_to_max_entries(allocator: DeviceCachingAllocator) -> None:
    allocator.record_history(max_entries=2)
    for step in range(3):
        with allocator.annotated(f"step {step}"):
            pass

    annotations = allocator.snapshot()["external_annotations"]
    assert [mark["name"] for mark in annotations] == ["step 2", "step 2"]
    allocator.record_history(clear=True)
    assert allocator.snapshot()["external_annotations"] == []


def test_snapshot_has_pytorchs_settings_then_all_effective_settings() -> None:
    settings = Settings(large_segment_size_bytes=40 * MIB, memory_fraction=0.5)
    snapshot_settings = DeviceCachingAllocator(Device(), settings).snapshot()["allocator_settings"]

    torch_settings = settings.as_torch()
    assert list(snapshot_settings)[: len(torch_settings)] == list(torch_settings)
    assert (
        snapshot_settings["large_segment_size"]
        == snapshot_settings["max_non_split_rounding"]
        == 40 * MIB
    )
    assert snapshot_settings["per_process_memory_fraction"] == 0.5
    assert snapshot_settings["backend"] == "native"
    assert snapshot_settings["cudakit_search_again"] is True


def recorded(tmp_path: Path) -> Snapshot:
    """Record all kinds of entries, save a snapshot, and load it as memviz does."""
    allocator, host = DeviceCachingAllocator(Device(64 * MIB)), Host()
    pool = CachingHostAllocator(host)
    allocator.include_pinned(pool)
    allocator.record_history()
    pool.record_history()
    live = pool.alloc(3 * MIB)
    pending = pool.alloc(MIB)
    pool.record_use(pending, 11)
    pool.free(pending)
    with allocator.annotated("step 1"):
        ptr = allocator.alloc(9 * MIB)
        allocator.annotate(ptr, "weights")
        allocator.free(allocator.alloc(700, 12))
    allocator.save_snapshot(tmp_path / "memory.pickle")
    assert live
    return load(str(tmp_path / "memory.pickle"))


def test_annotated_snapshot_opens_in_memviz(tmp_path: Path) -> None:
    snapshot = recorded(tmp_path)
    device, host = snapshot.devices

    assert device.warnings == host.warnings == ()
    assert [Action(action).name for action in device.events.action] == [
        *("SEGMENT_ALLOC", "ALLOC", "ANNOTATE"),
        *("SEGMENT_ALLOC", "ALLOC", "FREE_REQUESTED", "FREE_COMPLETED"),
    ]
    assert [(mark.name, mark.is_start) for mark in snapshot.annotations] == [
        ("step 1", True),
        ("step 1", False),
    ]
    assert snapshot.settings["large_segment_size"] == 20 * MIB
    assert host.device == HOST
    assert host.blocks.size.tolist() == [4 * MIB, MIB]
    assert host.blocks.state.tolist() == [BlockState.ALLOCATED, BlockState.PENDING_FREE]
    assert len(host.events) == 5


def outer() -> tuple[object, ...]:
    return gather_stack()


def test_frames_have_the_line_of_each_instruction() -> None:
    stacks = Stacks()
    code = program.__code__
    for instruction in dis.get_instructions(code):
        if instruction.positions and instruction.positions.lineno:
            (frame,) = stacks.frames((code, instruction.offset))
            assert frame["line"] == instruction.positions.lineno


def test_gathered_stack_begins_at_the_caller() -> None:
    frames = Stacks().frames(outer())  # type: ignore[arg-type]

    code = test_gathered_stack_begins_at_the_caller.__code__
    assert frames[0]["name"] == code.co_name
    assert frames[0]["line"] == code.co_firstlineno + 1


def test_equal_stacks_give_the_same_object() -> None:
    stacks, trail = Stacks(), (outer.__code__, 0)

    assert stacks.frames(trail) is stacks.frames((outer.__code__, 0))
    assert stacks.frames(None) == []
