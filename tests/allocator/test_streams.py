"""Scenarios 23 to 28 and 33, on the simulated GPU: blocks are reused after the streams that use them."""

from __future__ import annotations

import pytest
from allocator import invariants
from allocator.device import MIB, Device
from allocator.summaries import blocks, changes, current
from allocator.work import Work

from cudakit.allocator.allocator import DeviceCachingAllocator
from cudakit.allocator.oom import OutOfMemory
from cudakit.errors import CudaError
from cudakit.gpu.api import PER_THREAD, Stream

SIZE = 30 * MIB
PENDING = "active_pending_free"


def test_23_block_used_by_another_stream_is_reused_after_that_stream(work: Work) -> None:
    allocator, other = work.allocator, work.stream()
    ptr = allocator.alloc(SIZE)
    work.busy(other)
    allocator.record_use(ptr, other)
    with changes(allocator) as freed:
        allocator.free(ptr)
    waiting = blocks(allocator)
    second = allocator.alloc(SIZE)
    work.gpu.sync_stream(other)
    third = allocator.alloc(SIZE)

    assert freed == {
        f"{metric}.{kind}": value
        for metric, value in (("allocation", -1), ("allocated_bytes", -SIZE))
        for kind in ("all", "large_pool")
    }
    assert waiting == [[(SIZE, PENDING)]]
    assert second != ptr
    assert third == ptr


def test_24_use_by_the_own_stream_is_ignored(work: Work) -> None:
    allocator, allocating_stream = work.allocator, work.stream()
    ptr = allocator.alloc(SIZE, allocating_stream)
    work.busy(allocating_stream)
    allocator.record_use(ptr, allocating_stream)
    allocator.free(ptr)

    assert allocator.alloc(SIZE, allocating_stream) == ptr


def test_free_on_another_stream_waits_for_it(work: Work) -> None:
    allocator, other = work.allocator, work.stream()
    ptr = allocator.alloc(SIZE)
    work.busy(other)
    allocator.free(ptr, other)

    assert allocator.alloc(SIZE) != ptr


def test_25_slow_stream_delays_only_its_own_blocks(work: Work) -> None:
    allocator, slow, fast = work.allocator, work.stream(), work.stream()
    first, second, third = (allocator.alloc(SIZE) for _ in range(3))
    work.busy(slow)
    for ptr, stream in ((first, slow), (second, slow), (third, fast)):
        allocator.free(ptr, stream)
    work.gpu.sync_stream(fast)
    allocator.alloc(512)

    assert [stream_blocks[0][1] for stream_blocks in blocks(allocator)[:3]] == [
        PENDING,
        PENDING,
        "inactive",
    ]


def test_25_frees_of_one_stream_complete_in_order(work: Work) -> None:
    allocator, other = work.allocator, work.stream()
    first, second = allocator.alloc(SIZE), allocator.alloc(SIZE)
    allocator.free(first, other)
    work.busy(other)
    allocator.free(second, other)
    work.gpu.sync_stream(work.stream())
    allocator.alloc(512)

    assert [stream_blocks[0][1] for stream_blocks in blocks(allocator)[:2]] == ["inactive", PENDING]


def test_27_empty_cache_waits_for_other_streams(work: Work) -> None:
    allocator, other = work.allocator, work.stream()
    ptr = allocator.alloc(SIZE)
    work.busy(other)
    allocator.free(ptr, other)
    allocator.empty_cache()

    assert work.gpu.query_stream(other)
    assert current(allocator, "reserved_bytes") == 0


def test_28_last_of_three_streams_completes_a_free(work: Work) -> None:
    allocator, streams = work.allocator, [work.stream() for _ in range(3)]
    ptr = allocator.alloc(SIZE)
    for seconds, stream in enumerate(streams, 1):
        work.busy(stream, seconds)
        allocator.record_use(ptr, stream)
        allocator.record_use(ptr, stream)
    allocator.free(ptr)
    states = []
    for stream in streams:
        work.gpu.sync_stream(stream)
        allocator.alloc(512)
        states.append(blocks(allocator)[0][0][1])

    assert states == [PENDING, PENDING, "inactive"]


def test_33_capture_queries_no_event_and_defers_frees(device: Device) -> None:
    allocator = DeviceCachingAllocator(device)
    free_releases, freed_during = allocator.alloc(SIZE), allocator.alloc(SIZE)
    allocator.record_use(freed_during, 12)
    allocator.free(free_releases, 11)
    device.finish(11)
    allocator.begin_capture()
    device.calls.clear()
    allocator.free(freed_during, 13)
    allocator.alloc(SIZE)
    allocator.empty_cache()
    assert device.calls == ["malloc"]
    allocator.end_capture()
    allocator.alloc(SIZE)

    assert device.calls[1:] == ["event", "record", "query_event", "query_event"]
    invariants.check(allocator)


def test_33_out_of_memory_in_a_capture_waits_for_no_stream() -> None:
    allocator = DeviceCachingAllocator(Device(SIZE))
    allocator.free(allocator.alloc(SIZE), 11)
    allocator.begin_capture()
    with pytest.raises(OutOfMemory):
        allocator.alloc(SIZE)

    assert allocator.statistics()["num_sync_all_streams"] == 0
    assert allocator.statistics()["num_alloc_retries"] == 0


def test_events_are_reused(device: Device) -> None:
    allocator = DeviceCachingAllocator(device)
    for _ in range(5):
        ptr = allocator.alloc(SIZE)
        allocator.free(ptr, 11)
        device.finish(11)

    assert device.calls.count("event") == 1


def test_block_of_a_destroyed_stream_waits_for_a_device_synchronization(
    device: Device,
) -> None:
    allocator = DeviceCachingAllocator(device)
    ptr = allocator.alloc(SIZE)
    allocator.record_use(ptr, 12)
    allocator.record_use(ptr, 11)
    device.destroyed_streams.add(11)

    with pytest.raises(CudaError, match="stream 11 was destroyed"):
        allocator.free(ptr)

    device.finish(12)
    assert allocator.alloc(SIZE) != ptr
    assert blocks(allocator)[0] == [(SIZE, PENDING)]
    allocator.empty_cache()
    assert "sync" in device.calls
    assert current(allocator, "active") == 1
    invariants.check(allocator)


def test_per_thread_default_stream_is_waited_for(work: Work) -> None:
    allocator = work.allocator
    ptr = allocator.alloc(SIZE)
    work.busy(PER_THREAD)
    allocator.record_use(ptr, PER_THREAD)
    allocator.free(ptr)
    waiting = allocator.alloc(SIZE)
    work.gpu.sync_stream(Stream(PER_THREAD))
    work.gpu.sync()

    assert waiting != ptr
    assert allocator.alloc(SIZE) == ptr


def test_threads_have_separate_default_streams(work: Work) -> None:
    allocator = work.allocator
    ptr = allocator.alloc(SIZE, PER_THREAD)
    allocator.free(ptr)

    assert allocator.alloc(SIZE, PER_THREAD) == ptr
    assert current(allocator, "segment") == 1
