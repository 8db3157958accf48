"""Snapshots of recorded memory, alone and merged with a snapshot of PyTorch."""

from __future__ import annotations

import pickle
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

import cudakit
from cudakit.errors import SnapshotError
from cudakit.memory.process import NamedMark, NamedRange, ProcessMemory
from cudakit.memory.snapshot import POOL_IDS
from cudakit.memory.torch_snapshot import (
    LimitPassed,
    build_snapshot,
    find_limit_passed,
    read_snapshot,
    write_snapshot,
)
from cudakit.stacks import Frame
from cudakit.trace.kinds import AllocationKind

MIB = 1 << 20
TORCH, OTHER = 1 << 40, 1 << 41
FRAME = {"name": "train", "filename": "t.py", "line": 3}
STACK = (Frame("step", "t.py", 9),)
# The unit of the times below is a millisecond, in which the two clocks agree.
MS = 1_000_000


def torch_snapshot() -> dict[str, Any]:
    """Return the snapshot of a program that has one block, of two, in one segment."""

    def entry(action: str, address: int, size: int, time_ms: int, *frames: Any) -> dict[str, Any]:
        return {
            "action": action, "addr": address, "size": size, "stream": 0, "time_us": 1000 * time_ms,
            "frames": list(frames),
        }  # fmt: skip

    blocks = [
        {"address": TORCH, "size": 512, "requested_size": 500, "state": "active_allocated", "frames": []},
        {"address": TORCH + 512, "size": 2 * MIB - 512, "requested_size": 0, "state": "inactive",
         "frames": []},
    ]  # fmt: skip
    return {
        "segments": [
            {"device": 0, "address": TORCH, "total_size": 2 * MIB, "allocated_size": 512,
             "active_size": 512, "requested_size": 500, "stream": 0, "segment_type": "small",
             "segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": blocks}
        ],
        "device_traces": [
            [
                entry("segment_alloc", TORCH, 2 * MIB, 10, FRAME),
                entry("alloc", TORCH + 512, 100, 11, FRAME),
                entry("alloc", TORCH, 500, 20),
                entry("free_requested", TORCH + 512, 100, 40, FRAME),
                entry("free_completed", TORCH + 512, 100, 40, FRAME),
            ]
        ],
        "allocator_settings": {},
        "external_annotations": [],
    }  # fmt: skip


def driver_alloc(memory: ProcessMemory, address: int, size: int, time_ms: int) -> None:
    memory.model.driver_alloc(
        device=0, address=address, size_bytes=size, kind=AllocationKind.SYNC, pool="", stream=0,
        stack=STACK, time_ns=time_ms * MS,
    )  # fmt: skip


def built(memory: ProcessMemory, torch: dict[str, Any] | None = None) -> dict[str, Any]:
    return build_snapshot(memory, unix_offset_ns=0, torch_snapshot=torch)


@pytest.fixture
def memory() -> ProcessMemory:
    """A program in which PyTorch allocates a segment, and another library as well."""
    memory = ProcessMemory()
    driver_alloc(memory, TORCH, 2 * MIB, 9)
    driver_alloc(memory, OTHER, 3 * MIB, 15)
    return memory


def test_segment_of_pytorch_is_not_counted_twice(memory: ProcessMemory) -> None:
    snapshot = built(memory, torch_snapshot())

    assert [(s["address"], s["total_size"]) for s in snapshot["segments"]] == [
        (TORCH, 2 * MIB), (OTHER, 3 * MIB),
    ]  # fmt: skip
    actions = [entry["action"] for entry in snapshot["device_traces"][0]]
    assert actions == [
        "segment_alloc", "alloc", "segment_alloc", "alloc", "alloc", "free_requested", "free_completed",
    ]  # fmt: skip


def test_address_that_another_library_gets_after_pytorch_is_counted(memory: ProcessMemory) -> None:
    torch = torch_snapshot()
    end = {"action": "segment_free", "addr": TORCH, "size": 2 * MIB, "stream": 0, "time_us": 50_000}
    torch["device_traces"][0].append(end)
    torch["segments"] = []
    memory.model.driver_free(address=TORCH, stack=(), time_ns=51 * MS)
    driver_alloc(memory, TORCH, MIB, 60)

    snapshot = built(memory, torch)
    assert [(s["address"], s["total_size"]) for s in snapshot["segments"]] == [
        (TORCH, MIB), (OTHER, 3 * MIB),
    ]  # fmt: skip


def test_merged_snapshot_has_the_totals_of_both(memory: ProcessMemory, tmp_path: Path) -> None:
    path = tmp_path / "merged.pickle"
    write_snapshot(built(memory, torch_snapshot()), path)

    (device,) = cudakit.memviz(path).devices
    assert device.end.reserved_bytes == 5 * MIB
    assert device.end.requested_bytes == 3 * MIB + 500
    assert not any(astuple(device.health.contradictions))


def test_snapshot_is_not_written_through_a_symbolic_link(
    memory: ProcessMemory, tmp_path: Path
) -> None:
    victim, path = tmp_path / "victim", tmp_path / "merged.pickle"
    victim.write_text("unchanged")
    (tmp_path / "merged.pickle.part").symlink_to(victim)
    write_snapshot(built(memory, torch_snapshot()), path)

    assert victim.read_text() == "unchanged"
    assert sorted(place.name for place in tmp_path.glob("merged.pickle*")) == [
        "merged.pickle", "merged.pickle.part",
    ]  # fmt: skip


def backward(begin_ms: int, end_ms: int | None) -> NamedRange:
    end_ns = None if end_ms is None else end_ms * MS
    return NamedRange("backward pass", "cudakit", STACK, begin_ms * MS, end_ns)


def test_allocation_in_backward_pass_has_the_stack_of_its_caller(memory: ProcessMemory) -> None:
    memory.ranges.append(backward(18, 30))

    snapshot = built(memory, torch_snapshot())
    names = ["backward pass (autograd thread)", "step"]
    allocs = [e for e in snapshot["device_traces"][0] if e["action"] == "alloc" and e["size"] < MIB]
    assert [[frame["name"] for frame in entry["frames"]] for entry in allocs] == [["train"], names]
    block, _ = snapshot["segments"][0]["blocks"]
    assert [frame["name"] for frame in block["frames"]] == names


@pytest.mark.parametrize("other", [backward(19, 25), backward(19, None)], ids=["ended", "running"])
def test_allocation_in_two_backward_passes_has_no_stack(
    memory: ProcessMemory, other: NamedRange
) -> None:
    memory.ranges += (backward(18, 30), other)

    allocs = [e for e in built(memory, torch_snapshot())["device_traces"][0] if e["size"] == 500]
    assert [entry["frames"] for entry in allocs] == [[]]


def test_ranges_become_annotations(memory: ProcessMemory) -> None:
    memory.ranges += (NamedRange("step", "", STACK, 12 * MS, 50 * MS), backward(18, 30))

    found = [
        (each["name"], each["stage"], each["time_us"])
        for each in built(memory, torch_snapshot())["external_annotations"]
    ]
    assert found == [
        ("step", "START", 12_000), ("backward pass", "START", 18_000),
        ("backward pass", "END", 30_000), ("step", "END", 50_000),
    ]  # fmt: skip


def test_marks_have_their_own_key_so_that_other_viewers_ignore_them(memory: ProcessMemory) -> None:
    assert "cudakit_marks" not in built(memory, torch_snapshot())
    memory.marks.append(NamedMark("warm-up ended", 12 * MS))

    (mark,) = built(memory, torch_snapshot())["cudakit_marks"]
    assert mark == {"name": "warm-up ended", "device": 0, "time_us": 12_000}


def test_trace_is_cut_where_the_other_one_lost_events(memory: ProcessMemory) -> None:
    memory.model.max_entries = 2
    memory.model.forget_entries()
    for index in range(3):
        driver_alloc(memory, OTHER + (index + 1) * 4 * MIB, MIB, 21 + index)

    snapshot = built(memory, torch_snapshot())
    assert snapshot["trace_alloc_overflowed"] == [True]
    assert min(entry["time_us"] for entry in snapshot["device_traces"][0]) == 23_000


def test_limit_is_passed_at_the_allocation_that_exceeds_it(memory: ProcessMemory) -> None:
    snapshot = built(memory, torch_snapshot())

    assert find_limit_passed(snapshot, 5 * MIB) == []
    assert find_limit_passed(snapshot, 4 * MIB) == [
        LimitPassed(0, 5 * MIB, 5 * MIB, 3 * MIB, "driver", STACK)
    ]
    assert find_limit_passed(snapshot, MIB)[0].pool == "PyTorch"


def test_snapshot_without_pytorch_has_the_pools(memory: ProcessMemory) -> None:
    snapshot = built(memory)

    assert {s["segment_pool_id"] for s in snapshot["segments"]} == {POOL_IDS["driver"]}
    assert snapshot["device_traces"][0][0]["pool_id"] == POOL_IDS["driver"]


class Harmful:
    def __reduce__(self) -> Any:
        return (print, ("executed",))


@pytest.mark.parametrize(
    "content", [b"", b"\x80", pickle.dumps([]), pickle.dumps({"segments": Harmful()})]
)
def test_other_files_are_not_read_as_snapshots(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.pickle"
    path.write_bytes(content)

    with pytest.raises(SnapshotError):
        read_snapshot(path)
    assert capsys.readouterr().out == ""


def test_replay_of_pytorch_leaves_out_other_memory(memory: ProcessMemory, tmp_path: Path) -> None:
    path = tmp_path / "merged.pickle"
    write_snapshot(built(memory, torch_snapshot()), path)

    (device,) = cudakit.memviz_what_if(path, "expandable_segments:True").devices
    assert device.recorded.peak.reserved_bytes == 2 * MIB


def test_pool_of_a_library_is_selected_by_name(memory: ProcessMemory, tmp_path: Path) -> None:
    path = tmp_path / "merged.pickle"
    write_snapshot(built(memory, torch_snapshot()), path)

    (device,) = cudakit.memviz(path, pool=POOL_IDS["driver"]).devices
    assert device.end.reserved_bytes == 3 * MIB


def test_blocks_closer_than_the_rounded_size_do_not_overlap() -> None:
    memory = ProcessMemory()
    driver_alloc(memory, OTHER, 2 * MIB, 1)
    for offset in (0, 256, 2 * MIB - 256):
        memory.model.pool_alloc(
            device=0, address=OTHER + offset, size_bytes=200, requested_bytes=200, pool="rmm",
            stack=STACK, time_ns=2 * MS,
        )  # fmt: skip

    (segment,) = built(memory)["segments"]
    assert [(each["address"] - OTHER, each["size"]) for each in segment["blocks"]] == [
        (0, 256), (256, 512), (768, 2 * MIB - 1024), (2 * MIB - 256, 256),
    ]  # fmt: skip
