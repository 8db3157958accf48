"""Annotations of the trace by the program, and their snapshots in memviz."""

from __future__ import annotations

from pathlib import Path
from time import time

import pytest
from allocator.device import MIB, Device
from allocator.pinned.host import Host
from allocator.summaries import actions

from cudakit.allocator.allocator import DeviceCachingAllocator, InvalidPointer
from cudakit.allocator.pinned import CachingHostAllocator
from cudakit.memory.load import load
from cudakit.memory.snapshot import HOST, BlockState, Snapshot
from cudakit.torch_rules.actions import Action
from cudakit.torch_rules.settings import Settings


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
