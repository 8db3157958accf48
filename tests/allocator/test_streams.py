"""Scenarios 23 to 28 and 33, on the simulated GPU: blocks are reused after the streams that use them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from allocator import invariants
from allocator.capture_graph import CaptureGraph
from allocator.device import MIB, Device
from allocator.summaries import blocks, changes, current
from allocator.work import Work

from cudakit.allocator.allocator import DeviceCachingAllocator
from cudakit.allocator.oom import OutOfMemory
from cudakit.allocator.pools import GraphMemory, MemPool, PoolError
from cudakit.errors import CudaError, UsageError
from cudakit.gpu.api import PER_THREAD, Stream
from cudakit.torch_rules.settings import Settings

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


# --- CaptureGraph captures, in addition to the scenarios 30 to 34 of tests/allocator_scenarios/streams.py ---

REUSE = Settings(graph_capture_record_stream_reuse=True)


def record(
    allocator: DeviceCachingAllocator, size: int, memory: GraphMemory | None = None
) -> tuple[GraphMemory, int]:
    """Capture b = copy(a), then five times b = copy(b) + 1; return also the last b."""
    with allocator.capture(memory) as captured:
        b = allocator.alloc(size)
        for _ in range(5):
            copy, old_b = allocator.alloc(size), b
            b = allocator.alloc(size)
            allocator.free(copy)
            allocator.free(old_b)
    return captured, b


def test_31_third_graph_reuses_memory_of_the_second(allocator: DeviceCachingAllocator) -> None:
    memory, first = record(allocator, SIZE)
    _second_memory, second = record(allocator, SIZE, memory)
    allocator.free(second)
    reserved_bytes = current(allocator, "reserved_bytes")
    _third_memory, third = record(allocator, SIZE, memory)

    assert current(allocator, "reserved_bytes") == reserved_bytes
    assert memory.uses == 3
    assert third != first


def test_33_streams_used_only_in_a_capture_are_not_waited_for(
    allocator: DeviceCachingAllocator, device: Device
) -> None:
    early, late = allocator.alloc(SIZE), allocator.alloc(SIZE)
    allocator.record_use(early, 11)
    with allocator.capture():
        allocator.record_use(early, 12)
        allocator.record_use(late, 12)
        device.calls.clear()
        allocator.free(early)
        allocator.free(late)
        assert device.calls == []
    assert current(allocator, "active") == 2

    assert allocator.alloc(SIZE) == late
    assert device.calls == ["event", "record", "query_event"]
    device.finish(11)
    assert allocator.alloc(SIZE) == early


def test_33_stream_used_before_and_in_a_capture_is_waited_for(
    allocator: DeviceCachingAllocator, device: Device
) -> None:
    ptr = allocator.alloc(SIZE)
    allocator.record_use(ptr, 11)
    with allocator.capture():
        allocator.record_use(ptr, 11)
        allocator.free(ptr)

    assert allocator.alloc(SIZE) != ptr
    device.finish(11)
    assert allocator.alloc(SIZE) == ptr


def test_33_use_in_a_capture_counts_if_the_block_outlives_the_capture(
    allocator: DeviceCachingAllocator, device: Device
) -> None:
    ptr = allocator.alloc(SIZE)
    with allocator.capture():
        allocator.record_use(ptr, 11)
    allocator.free(ptr)

    assert allocator.alloc(SIZE) != ptr
    device.finish(11)
    assert allocator.alloc(SIZE) == ptr


def test_33_use_in_a_capture_is_dropped_with_its_allocation(
    allocator: DeviceCachingAllocator, device: Device
) -> None:
    ptr = allocator.alloc(SIZE)
    with allocator.capture():
        allocator.record_use(ptr, 11)
    allocator.free(ptr)
    device.finish(11)
    assert allocator.alloc(SIZE) == ptr
    allocator.record_use(ptr, 11)
    with allocator.capture():
        allocator.free(ptr)

    assert allocator.alloc(SIZE) != ptr


def test_34_block_is_reused_after_its_last_graph_node(device: Device) -> None:
    allocator, graph = DeviceCachingAllocator(device, REUSE), CaptureGraph(11)
    with allocator.capture(stream=11, graph=graph):
        ptr = allocator.alloc(SIZE, 11)
        graph.launch(11)
        graph.wait(12, 11)
        graph.launch(12)
        allocator.record_use(ptr, 12)
        allocator.free(ptr)
        graph.launch(11)
        first_block = allocator.alloc(SIZE, 11)
        graph.wait(11, 12)
        graph.launch(11)
        elsewhere = allocator.alloc(SIZE, 12)
        second_block = allocator.alloc(SIZE, 11)
        graph.end()

    assert ptr not in (first_block, elsewhere)
    assert second_block == ptr
    assert set(device.calls) == {"malloc"}
    invariants.check(allocator)


@pytest.mark.parametrize("settings", [REUSE, Settings()])
def test_34_block_without_proof_of_the_graph_waits_for_the_end_of_the_capture(
    device: Device, settings: Settings
) -> None:
    allocator, graph = DeviceCachingAllocator(device, settings), CaptureGraph(11)
    with allocator.capture(stream=11, graph=graph):
        ptr = allocator.alloc(SIZE, 11)
        graph.launch(11)
        allocator.record_use(ptr, 15)  # stream 15 is not captured
        if settings is not REUSE:
            graph.wait(15, 11)
        allocator.free(ptr)
        graph.launch(11)
        during = allocator.alloc(SIZE, 11)
        graph.end()
    with allocator.capture(stream=11, graph=graph):
        pass
    allocator.alloc(SIZE, 11)

    assert during != ptr
    assert current(allocator, "active") == 2
    invariants.check(allocator)


class Unasked(CaptureGraph):
    """A capture graph whose queries fail."""

    def terminals(self, stream: int) -> tuple[int, ...]:
        raise CudaError(999, "CUDA_ERROR_UNKNOWN", f"stream {stream}")


def test_34_failed_graph_query_defers_the_block(device: Device) -> None:
    allocator, graph = DeviceCachingAllocator(device, REUSE), Unasked(11)
    with allocator.capture(stream=11, graph=graph):
        ptr = allocator.alloc(SIZE, 11)
        allocator.record_use(ptr, 12)
        graph.wait(12, 11)
        with pytest.raises(CudaError, match="UNKNOWN"):
            allocator.free(ptr)
        graph.end()
    allocator.alloc(SIZE, 11)

    assert current(allocator, "active") == 1
    invariants.check(allocator)


def test_requests_on_captured_streams_use_the_pool_of_the_capture(
    allocator: DeviceCachingAllocator,
) -> None:
    graph = CaptureGraph(11)
    with allocator.capture(stream=11, graph=graph) as memory:
        graph.wait(12, 11)
        for stream in (11, 12, 13):
            allocator.alloc(SIZE, stream)

    segments = allocator.snapshot()["segments"]
    assert [s["segment_pool_id"] for s in segments] == [memory.id, memory.id, (0, 0)]


def test_capture_can_use_a_mem_pool(allocator: DeviceCachingAllocator) -> None:
    pool = MemPool(allocator)
    with allocator.capture(pool) as memory:
        allocator.free(allocator.alloc(SIZE))
    assert memory.id == pool.id
    pool.close()
    assert pool.uses == 1
    memory.close()
    allocator.empty_cache()

    assert allocator.private_pools() == ()


def test_failed_capture_holds_no_pool(allocator: DeviceCachingAllocator, device: Device) -> None:
    with pytest.raises(KeyError), allocator.capture() as memory:
        allocator.free(allocator.alloc(SIZE))
        raise KeyError
    assert memory.closed
    assert [usage.uses for usage in allocator.private_pools()] == [0]
    allocator.free(allocator.alloc(SIZE, 11), 12)
    allocator.empty_cache()

    assert device.held == {}


def test_out_of_memory_in_a_capture_releases_nothing() -> None:
    device = Device(50 * MIB)
    allocator = DeviceCachingAllocator(device)
    allocator.free(allocator.alloc(SIZE))
    with pytest.raises(OutOfMemory), allocator.capture():
        allocator.alloc(SIZE)

    assert "free" not in device.calls
    assert allocator.alloc(50 * MIB)


def test_end_without_begin_is_refused(allocator: DeviceCachingAllocator) -> None:
    with pytest.raises(PoolError, match="no capture was begun"):
        allocator.end_capture()
    allocator.begin_capture()
    allocator.end_capture()
    with pytest.raises(PoolError, match="no capture was begun"):
        allocator.end_capture()


def test_pool_of_a_capture_is_released_once(
    allocator: DeviceCachingAllocator,
) -> None:
    memory, output = record(allocator, SIZE)
    memory.close()
    memory.close()
    with pytest.raises(PoolError, match="closed"), allocator.capture(memory):
        pass

    allocator.free(output)
    assert allocator.alloc(512)


def test_request_of_a_capture_is_refused_without_caching(
    allocator: DeviceCachingAllocator, device: Device
) -> None:
    allocator.enable_caching(enabled=False)
    with allocator.capture(stream=11):
        with pytest.raises(UsageError, match="graph of stream 0xb"):
            allocator.alloc(MIB, 11)
        with ThreadPoolExecutor(1) as thread:
            uncaptured_block = thread.submit(allocator.alloc, MIB).result()
    later_block = allocator.alloc(MIB, 11)
    assert device.held == {uncaptured_block: MIB, later_block: MIB}
    allocator.free(uncaptured_block)
    allocator.free(later_block)
    allocator.enable_caching(enabled=True)
