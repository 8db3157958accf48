"""Expandable segments in traces, snapshots and memviz."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import pytest
from allocator.device import MIB
from allocator.summaries import actions
from allocator.virtual_device import VirtualDevice
from allocator.work import Work

from cudakit.allocator.allocator import DeviceCachingAllocator
from cudakit.allocator.oom import OutOfMemory
from cudakit.memory.load import load
from cudakit.memory.replay import replay
from cudakit.memory.replay.lifetimes import Contradictions
from cudakit.memory.replay.segments import segment_history
from cudakit.memory.snapshot import Snapshot
from cudakit.torch_rules.settings import Settings

EXPANDING = Settings(expandable_segments=True)
PAGE = 20 * MIB
CURVES = ("requested", "allocated", "active", "reserved")


@pytest.fixture
def allocator() -> DeviceCachingAllocator:
    return DeviceCachingAllocator(VirtualDevice(256 * MIB), EXPANDING)


def trace(allocator: DeviceCachingAllocator) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = allocator.snapshot()["device_traces"][0]
    return entries


def loaded(allocator: DeviceCachingAllocator, folder: Path) -> Snapshot:
    path = folder / "snapshot.pkl"
    path.write_bytes(pickle.dumps(allocator.snapshot()))
    return load(str(path))


def take(allocator: DeviceCachingAllocator, size: int) -> int:
    return allocator.alloc(size)


def empty(allocator: DeviceCachingAllocator) -> None:
    allocator.empty_cache()


def check_replay(allocator: DeviceCachingAllocator, folder: Path) -> None:
    """Undo the trace from the final state: it must be consistent and begin empty."""
    snapshot, statistics = loaded(allocator, folder), allocator.statistics()
    (device,) = snapshot.devices
    replayed = replay(snapshot, device)
    assert device.warnings == ()
    assert replayed.inconsistencies == Contradictions(0, 0, 0, 0)
    assert replayed.begins_complete
    for name in CURVES:
        curve = getattr(replayed.curves, name)
        assert curve[-1] == statistics[f"{name}_bytes.all.current"], name
        assert curve.max() == statistics[f"{name}_bytes.all.peak"], name


def test_43_mapping_and_unmapping_are_in_the_trace(allocator: DeviceCachingAllocator) -> None:
    allocator.record_history()
    ptr = take(allocator, 30 * MIB)
    allocator.free(ptr)
    empty(allocator)

    entries = trace(allocator)
    assert [(e["action"], e["addr"], e["size"]) for e in entries] == [
        ("segment_map", ptr, 2 * PAGE),
        ("alloc", ptr, 30 * MIB),
        ("free_requested", ptr, 30 * MIB),
        ("free_completed", ptr, 30 * MIB),
        ("segment_unmap", ptr, 2 * PAGE),
    ]
    assert entries[0]["frames"][0]["name"] == "take"
    assert entries[-1]["frames"][0]["name"] == "empty"


def test_unmap_event_without_a_stack_has_the_stack_of_the_first_mapping(
    allocator: DeviceCachingAllocator,
) -> None:
    allocator.record_history(context="alloc")
    allocator.free(take(allocator, 30 * MIB))
    empty(allocator)

    assert trace(allocator)[-1]["frames"][0]["name"] == "take"


def test_each_mapped_range_is_a_segment(allocator: DeviceCachingAllocator) -> None:
    allocator.record_history("state")
    low, middle, high = (take(allocator, n * PAGE + MIB) for n in (1, 2, 1))
    allocator.free(middle)
    empty(allocator)

    first, second = allocator.snapshot()["segments"]
    assert (first["address"], first["total_size"]) == (low, 2 * PAGE)
    begin = low + 3 * PAGE
    assert (second["address"], second["total_size"]) == (begin, 2 * PAGE)
    assert [b["address"] for b in second["blocks"]] == [begin, high, high + PAGE + MIB]
    for segment in (first, second):
        assert segment["is_expandable"] is True
        assert segment["segment_type"] == "large"
        assert segment["allocated_size"] == PAGE + MIB
    assert [bool(segment["frames"]) for segment in (first, second)] == [True, False]


def test_remapped_gap_joins_its_ranges_into_one_segment(allocator: DeviceCachingAllocator) -> None:
    ptrs = [take(allocator, PAGE) for _ in range(3)]
    for ptr in ptrs[:2]:
        allocator.free(ptr)
    empty(allocator)
    assert [s["address"] for s in allocator.snapshot()["segments"]] == ptrs[2:]
    take(allocator, PAGE)
    assert [s["address"] for s in allocator.snapshot()["segments"]] == [ptrs[0], ptrs[2]]
    take(allocator, PAGE)

    (segment,) = allocator.snapshot()["segments"]
    assert (segment["address"], segment["total_size"]) == (ptrs[0], 3 * PAGE)
    assert [block["address"] for block in segment["blocks"]] == ptrs


def test_47_memviz_replays_the_trace_to_the_ranges_of_the_snapshot(
    allocator: DeviceCachingAllocator, tmp_path: Path
) -> None:
    allocator.record_history()
    blocks = [allocator.alloc(size) for size in (700, 9 * MIB, 30 * MIB, PAGE, 3000)]
    allocator.free(blocks[2])
    allocator.free(blocks[1], 11)
    allocator.empty_cache()
    with pytest.raises(OutOfMemory):
        allocator.alloc(240 * MIB)
    allocator.alloc(PAGE, 12)
    allocator.free(allocator.alloc(40 * MIB), 11)

    check_replay(allocator, tmp_path)
    snapshot = loaded(allocator, tmp_path)
    (device,) = snapshot.devices
    assert device.segments.expandable.all()
    runs = segment_history(device).expandable_at(len(device.events))
    assert runs.address.tolist() == device.segments.address.tolist()
    assert runs.size.tolist() == device.segments.size.tolist()


@pytest.mark.parametrize("seed", range(4))
def test_47_memviz_replays_a_long_run_with_expandable_and_plain_segments(
    allocator: DeviceCachingAllocator, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    live: list[int] = []
    allocator.record_history(context=None)
    for step in range(400):
        if step % 100 == 99:
            allocator.configure(Settings(expandable_segments=step % 200 == 199))
            allocator.empty_cache()
        if live and rng.random() < 0.45:
            allocator.free(live.pop(rng.randrange(len(live))), rng.choice((None, 11)))
            continue
        try:
            small = rng.random() < 0.5
            size = rng.randint(1, MIB) if small else 512 * rng.randint(2050, 80000)
            live.append(allocator.alloc(size, rng.choice((0, 12))))
        except OutOfMemory:
            allocator.free(live.pop())

    check_memory(allocator, tmp_path)


def check_memory(allocator: DeviceCachingAllocator, folder: Path) -> None:
    """Like ``check_replay``, except the sizes of freed blocks, which depend on a setting that has changed."""
    snapshot, statistics = loaded(allocator, folder), allocator.statistics()
    replayed = replay(snapshot, snapshot.devices[0])
    assert replayed.inconsistencies == Contradictions(0, 0, 0, 0)
    assert replayed.begins_complete
    for name in ("requested", "reserved"):
        curve = getattr(replayed.curves, name)
        assert curve[-1] == statistics[f"{name}_bytes.all.current"], name
        assert curve.max() == statistics[f"{name}_bytes.all.peak"], name


def test_memviz_reads_a_snapshot_of_the_simulated_gpu(tmp_path: Path) -> None:
    with Work(settings=EXPANDING) as work:
        work.allocator.record_history()
        other = work.stream()
        ptr = work.allocator.alloc(30 * MIB)
        work.allocator.alloc(700, other)
        work.busy(other)
        work.allocator.free(ptr, other)
        work.allocator.empty_cache()
        work.allocator.alloc(9 * MIB)

        assert actions(work.allocator).count("segment_unmap") == 1
        check_replay(work.allocator, tmp_path)
