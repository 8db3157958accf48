""""""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path

import pytest
from allocator.device import GIB, MIB, Device
from allocator.expandable_allocator import PAGE, expandable_allocator, set_expandable

from cudakit.allocator.allocator import DeviceCachingAllocator
from cudakit.allocator.oom import OutOfMemory, StreamMemory
from cudakit.errors import UsageError
from cudakit.gpu.api.facts import Process
from cudakit.torch_rules.oom import OomReport
from cudakit.units import Unavailable


def run_out(allocator: DeviceCachingAllocator) -> OutOfMemory:
    with pytest.raises(OutOfMemory) as caught:
        allocator.alloc(64 * GIB)
    return caught.value


def test_snapshot_is_written_before_the_error_is_raised(
    allocator: DeviceCachingAllocator, tmp_path: Path
) -> None:
    path = tmp_path / "oom.pickle"
    allocator.record_history()
    allocator.save_on_out_of_memory(path)
    ptr = allocator.alloc(700)
    error = run_out(allocator)
    snapshot = pickle.loads(path.read_bytes())  # noqa: S301

    assert [entry["action"] for entry in snapshot["device_traces"][0]][-1] == "oom"
    assert snapshot["segments"][0]["address"] == ptr
    assert not hasattr(error, "__notes__")
    assert os.listdir(tmp_path) == ["oom.pickle"]


def test_save_on_out_of_memory_replaces_the_file_and_can_be_turned_off(
    allocator: DeviceCachingAllocator, tmp_path: Path
) -> None:
    path = tmp_path / "oom.pickle"
    allocator.save_on_out_of_memory(path)
    run_out(allocator)
    allocator.alloc(1)
    run_out(allocator)
    assert len(pickle.loads(path.read_bytes())["segments"]) == 1  # noqa: S301
    path.unlink()
    allocator.save_on_out_of_memory(None)
    run_out(allocator)

    assert not path.exists()


def test_failed_snapshot_on_out_of_memory_becomes_a_note(
    allocator: DeviceCachingAllocator, tmp_path: Path
) -> None:
    missing_directory = tmp_path / "gone"
    missing_directory.mkdir()
    allocator.save_on_out_of_memory(missing_directory / "oom.pickle")
    missing_directory.rmdir()
    (note,) = run_out(allocator).__notes__

    assert note.startswith("the observer save_on_out_of_memory failed: UsageError: cannot write")
    assert "No such file or directory" in note


def test_failed_write_leaves_no_file(allocator: DeviceCachingAllocator, tmp_path: Path) -> None:
    path = tmp_path / "oom.pickle"
    allocator.save_on_out_of_memory(path)
    path.mkdir()
    (note,) = run_out(allocator).__notes__

    assert "cannot write" in note
    assert os.listdir(tmp_path) == ["oom.pickle"]


def test_unwritable_path_is_refused_at_once(
    allocator: DeviceCachingAllocator, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="it is a directory"):
        allocator.save_on_out_of_memory(tmp_path)
    with pytest.raises(UsageError, match="there is no directory"):
        allocator.save_snapshot(tmp_path / "none" / "file")


def test_save_snapshot_writes_a_file(allocator: DeviceCachingAllocator, tmp_path: Path) -> None:
    allocator.save_snapshot(tmp_path / "now.pickle")

    snapshot = pickle.loads((tmp_path / "now.pickle").read_bytes())  # noqa: S301
    assert snapshot == allocator.snapshot()


def test_failing_observer_becomes_a_note(
    allocator: DeviceCachingAllocator,
) -> None:
    def failing(_: OomReport) -> None:
        raise RuntimeError("requested by the test")

    reports: list[OomReport] = []
    allocator.on_out_of_memory(failing)
    allocator.on_out_of_memory(reports.append)
    error = run_out(allocator)

    assert reports == [error.report]
    assert len(error.__notes__) == 1
    assert "failing failed: RuntimeError: requested by the test" in str(error.__notes__)


def test_process_query_runs_without_the_guard() -> None:
    allocator = DeviceCachingAllocator(Device())

    def processes() -> tuple[Process, ...]:
        allocator.statistics()  # this call would raise an error if the guard were held
        unavailable = Unavailable("in another container")
        return (Process(os.getpid(), "compute", 3 * GIB, unavailable, unavailable),)

    allocator.ask_processes(processes)

    assert "this process has 3.00 GiB memory in use." in run_out(allocator).message


def test_failing_process_query_is_reported_as_unavailable() -> None:
    allocator = DeviceCachingAllocator(Device())

    def processes() -> tuple[Process, ...]:
        raise OSError("no NVML")

    allocator.ask_processes(processes)
    error = run_out(allocator)

    assert "is in use outside of this allocator" in error.message
    assert error.report is not None
    assert error.report.processes == Unavailable("no NVML")


def test_allocator_works_after_out_of_memory() -> None:
    allocator = DeviceCachingAllocator(Device(64 * MIB))
    allocator.on_out_of_memory(lambda _: allocator.empty_cache())
    run_out(allocator)

    assert allocator.alloc(60 * MIB)


def test_empty_allocator_is_not_fragmented(allocator: DeviceCachingAllocator) -> None:
    fragmentation = allocator.fragmentation()

    assert (
        fragmentation.internal,
        fragmentation.external,
        fragmentation.free_bytes,
        fragmentation.streams,
    ) == (0, 0, 0, ())


def test_internal_fragmentation_is_allocated_minus_requested(
    allocator: DeviceCachingAllocator,
) -> None:
    allocator.alloc(1)
    allocator.alloc(700)

    fragmentation = allocator.fragmentation()

    assert fragmentation.internal_bytes == 511 + 324
    assert fragmentation.internal == (511 + 324) / (512 + 1024)


def test_external_fragmentation_is_free_memory_outside_the_largest_block(
    allocator: DeviceCachingAllocator,
) -> None:
    blocks = [allocator.alloc(4 * MIB) for _ in range(5)]
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    allocator.free(blocks[3])

    fragmentation = allocator.fragmentation()

    assert (fragmentation.free_bytes, fragmentation.largest_hole_bytes) == (12 * MIB, 8 * MIB)
    assert fragmentation.external == 1 - 8 / 12
    assert fragmentation.releasable_bytes == 0


def test_free_bytes_are_listed_by_stream(allocator: DeviceCachingAllocator) -> None:
    whole_segment, part_of_segment = allocator.alloc(30 * MIB, 12), allocator.alloc(9 * MIB, 12)
    live = allocator.alloc(12 * MIB)
    allocator.free(whole_segment)

    calling_stream, other_stream = allocator.fragmentation().streams

    assert calling_stream == StreamMemory(12, 41 * MIB, 30 * MIB, 30 * MIB, 0, 0)
    assert other_stream == StreamMemory(0, 0, 0, 0, 0, 0)
    allocator.free(part_of_segment)
    allocator.free(live)


def test_pending_free_is_awaited_from_each_stream_that_uses_it(
    allocator: DeviceCachingAllocator, device: Device
) -> None:
    ptr = allocator.alloc(12 * MIB)
    allocator.record_use(ptr, 11)
    allocator.record_use(ptr, 12)
    allocator.free(ptr)

    fragmentation = allocator.fragmentation()

    assert fragmentation.pending_bytes == 12 * MIB
    assert fragmentation.allocated_bytes == 0
    assert {
        memory.stream: (memory.pending_bytes, memory.awaited_bytes)
        for memory in fragmentation.streams
    } == {
        0: (12 * MIB, 0),
        11: (0, 12 * MIB),
        12: (0, 12 * MIB),
    }
    device.finish(11)
    device.finish(12)
    allocator.empty_cache()
    assert allocator.fragmentation().streams == ()


def test_cached_memory_of_a_private_pool_is_not_releasable(
    allocator: DeviceCachingAllocator,
) -> None:
    pool = allocator.graph_pool_handle()
    with allocator.use_pool(pool):
        allocator.free(allocator.alloc(30 * MIB))

        (stream_pool,) = allocator.fragmentation().stream_pools

    assert (stream_pool.pool, stream_pool.free_bytes, stream_pool.releasable_bytes) == (
        pool,
        30 * MIB,
        0,
    )


def test_fragmentation_sums_equal_the_statistics(allocator: DeviceCachingAllocator) -> None:
    blocks = [allocator.alloc(size * 1000, size % 3) for size in range(1, 2000, 37)]
    for ptr in blocks[::2]:
        allocator.free(ptr)
    fragmentation, statistics = allocator.fragmentation(), allocator.statistics()

    assert fragmentation.reserved_bytes == statistics["reserved_bytes.all.current"]
    assert fragmentation.allocated_bytes == statistics["allocated_bytes.all.current"]
    assert fragmentation.requested_bytes == statistics["requested_bytes.all.current"]
    assert fragmentation.free_bytes == fragmentation.reserved_bytes - fragmentation.allocated_bytes
    assert (
        sum(memory.stranded_bytes for memory in fragmentation.streams) == fragmentation.free_bytes
    )


def test_releasable_bytes_include_whole_pages_beside_live_blocks() -> None:
    allocator = expandable_allocator()
    blocks = [allocator.alloc(15 * MIB) for _ in range(4)]
    for ptr in blocks[1:3]:
        allocator.free(ptr)

    fragmentation = allocator.fragmentation()

    assert (fragmentation.free_bytes, fragmentation.largest_hole_bytes) == (30 * MIB, 30 * MIB)
    assert fragmentation.releasable_bytes == PAGE


@pytest.mark.parametrize("uses_expandable", [False, True])
def test_releasable_bytes_are_those_that_empty_cache_releases(uses_expandable: bool) -> None:
    allocator, rng = expandable_allocator(), random.Random(3)
    set_expandable(allocator, on=uses_expandable)
    live: list[int] = []
    for _ in range(20):
        for _ in range(40):
            if live and rng.random() < 0.6:
                allocator.free(live.pop(rng.randrange(len(live))))
            else:
                live.append(
                    allocator.alloc(rng.choice([512, MIB, 9 * MIB, 33 * MIB]), rng.randrange(2))
                )
        earlier = allocator.fragmentation()
        allocator.empty_cache()
        later = allocator.fragmentation()
        assert earlier.reserved_bytes - later.reserved_bytes == earlier.releasable_bytes
        assert later.releasable_bytes == 0
