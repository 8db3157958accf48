"""CaptureGraph captures, in addition to the scenarios 30 to 34 of tests/allocator_scenarios/streams.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from allocator import invariants
from allocator.capture_graph import CaptureGraph
from allocator.device import MIB, Device
from allocator.summaries import current

from cudakit.allocator.allocator import DeviceCachingAllocator
from cudakit.allocator.oom import OutOfMemory
from cudakit.allocator.pools import GraphMemory, MemPool, PoolError
from cudakit.errors import CudaError, UsageError
from cudakit.torch_rules.settings import Settings

SIZE = 30 * MIB
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
