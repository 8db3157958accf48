"""The allocator during stream capture: which memory belongs to the graph, and which can be reused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from contract.workbench import Workbench

from cudakit.allocator.pools import GraphMemory
from cudakit.api.allocator import CachingAllocator
from cudakit.gpu.api import PER_THREAD, Gpu, Stream
from cudakit.torch_rules.settings import Settings

MIB = 1 << 20
SIZE = 30 * MIB

Make = Callable[..., CachingAllocator]


@pytest.fixture
def make(gpu: Gpu) -> Iterator[Make]:
    allocators: list[CachingAllocator] = []

    def allocator(**settings: bool) -> CachingAllocator:
        allocators.append(CachingAllocator(gpu, settings=Settings(**settings).as_text()))
        return allocators[-1]

    yield allocator
    for allocator in allocators:
        allocator.close()


def pools(allocator: CachingAllocator) -> list[tuple[int, int]]:
    return [segment["segment_pool_id"] for segment in allocator.snapshot()["segments"]]


def host_pools(allocator: CachingAllocator) -> list[tuple[int, int]]:
    return sorted(
        segment["segment_pool_id"] for segment in allocator.pinned.snapshot()["host_segments"]
    )


@pytest.mark.parametrize("expandable", [False, True])
def test_captured_allocations_are_usable_by_graph(
    bench: Workbench, make: Make, expandable: bool
) -> None:
    gpu, stream, result = bench.gpu, bench.gpu.stream(), bench.ints(0)
    allocator = make(expandable_segments=expandable)
    with allocator.capture(stream=stream) as memory:
        gpu.capture_begin(stream)
        ptr = allocator.alloc(SIZE, stream)
        gpu.fill(ptr, 0, SIZE, stream)
        bench.add(ptr, 1, 7, stream)
        bench.move(result, ptr, stream)
        allocator.free(ptr)
        executable = gpu.instantiate(gpu.capture_end(stream))
    assert set(pools(allocator)) == {memory.id}

    for _ in range(2):
        gpu.graph_launch(executable, stream)
        assert bench.read(result) == [7]
    gpu.destroy_graph_exec(executable)
    memory.close()
    allocator.empty_cache()
    assert pools(allocator) == []


def test_pinned_memory_is_allocated_during_capture(bench: Workbench, make: Make) -> None:
    gpu, stream = bench.gpu, bench.gpu.stream()
    allocator, value = make(), bench.ints(5)
    gpu.capture_begin(stream)
    pinned = allocator.pinned.alloc(4)
    gpu.copy(pinned, value, 4, stream)
    executable = gpu.instantiate(gpu.capture_end(stream))
    gpu.graph_launch(executable, stream)
    gpu.sync_stream(stream)

    assert bytes(gpu.host_view(pinned, 4)) == b"\5\0\0\0"


def test_pinned_memory_events_are_not_queried_during_capture(gpu: Gpu, make: Make) -> None:
    stream, allocator = gpu.stream(blocking=False), make()
    ptr = allocator.pinned.alloc(MIB)
    allocator.pinned.record_use(ptr, stream)
    allocator.pinned.free(ptr)
    with allocator.capture(stream=stream):
        gpu.capture_begin(stream)
        allocated_during_capture = allocator.pinned.alloc(MIB)
        gpu.destroy_graph(gpu.capture_end(stream))
    gpu.sync_stream(stream)

    assert allocated_during_capture != ptr
    assert allocator.pinned.alloc(MIB) == ptr


@pytest.mark.parametrize("named", [False, True])
def test_pinned_memory_used_by_graph_is_not_reused(gpu: Gpu, make: Make, named: bool) -> None:
    stream, allocator = gpu.stream(), make()
    # The snapshot before any pinned allocation.
    with allocator.capture(stream=stream) as memory:
        gpu.capture_begin(stream)
        ptr = allocator.pinned.alloc(MIB, stream if named else None)
        allocator.pinned.record_use(ptr, stream)
        gpu.destroy_graph(gpu.capture_end(stream))
    allocator.pinned.free(ptr)
    gpu.sync_stream(stream)

    assert allocator.pinned.alloc(MIB) != ptr
    assert host_pools(allocator) == [(0, 0), memory.id]
    allocator.pinned.empty_cache()
    assert host_pools(allocator) == [(0, 0), memory.id]
    memory.close()
    allocator.pinned.empty_cache()
    gpu.sync_stream(stream)
    allocator.pinned.empty_cache()
    assert host_pools(allocator) == [(0, 0)]


def test_pinned_memory_of_uncaptured_stream_does_not_belong_to_graph(gpu: Gpu, make: Make) -> None:
    stream, other_stream, allocator = gpu.stream(blocking=False), gpu.stream(blocking=False), make()
    with allocator.capture(stream=stream):
        gpu.capture_begin(stream)
        ptr = allocator.pinned.alloc(MIB, other_stream)
        gpu.destroy_graph(gpu.capture_end(stream))
    allocator.pinned.record_use(ptr, other_stream)
    allocator.pinned.free(ptr)
    gpu.sync_stream(other_stream)

    assert host_pools(allocator) == [(0, 0)]
    assert allocator.pinned.alloc(MIB) == ptr


def test_only_requests_on_captured_streams_use_graph_memory(bench: Workbench, make: Make) -> None:
    gpu, allocator = bench.gpu, make()
    first, second, third = (gpu.stream(blocking=False) for _ in range(3))
    with allocator.capture(stream=first) as memory:
        gpu.capture_begin(first)
        gpu.wait(second, bench.recorded(first))
        for stream in (first, second, third, Stream(0), PER_THREAD):
            allocator.alloc(SIZE, stream)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(allocator.alloc, 2 * SIZE, second).result()
        gpu.wait(first, bench.recorded(second))
        gpu.destroy_graph(gpu.capture_end(first))
        allocator.alloc(SIZE, first)

    segments = allocator.snapshot()["segments"]
    streams = [segment["stream"] for segment in segments if segment["segment_pool_id"] == memory.id]
    assert sorted(streams) == [first, second, second]
    assert len(segments) == 7


def test_per_thread_default_stream_is_queried_by_its_thread(bench: Workbench, make: Make) -> None:
    gpu, allocator = bench.gpu, make()
    with allocator.capture(stream=PER_THREAD) as memory:
        gpu.capture_begin(PER_THREAD)
        allocator.alloc(SIZE, PER_THREAD)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(allocator.alloc, SIZE, PER_THREAD).result()
        gpu.destroy_graph(gpu.capture_end(PER_THREAD))

    assert sorted(pools(allocator)) == [(0, 0), memory.id]


def reused(bench: Workbench, allocator: CachingAllocator) -> tuple[bool, bool, GraphMemory]:
    """Free memory that two streams used; return whether it is reused before and after they join."""
    gpu, first, second = bench.gpu, bench.gpu.stream(), bench.gpu.stream()
    with allocator.capture(stream=first) as memory:
        gpu.capture_begin(first)
        ptr = allocator.alloc(SIZE, first)
        bench.store(ptr, 1, first)
        gpu.wait(second, bench.recorded(first))
        allocator.record_use(ptr, second)
        bench.store(ptr, 2, second)
        allocator.free(ptr)
        bench.store(allocator.alloc(4, first), 3, first)
        is_reused_before = allocator.alloc(SIZE, first) == ptr
        gpu.wait(first, bench.recorded(second))
        is_reused_after = allocator.alloc(SIZE, first) == ptr
        gpu.destroy_graph(gpu.capture_end(first))
    return is_reused_before, is_reused_after, memory


def test_memory_freed_in_capture_is_reused_if_graph_orders_it(bench: Workbench, make: Make) -> None:
    allocator = make(graph_capture_record_stream_reuse=True)
    for _ in range(2):  # captures are independent of each other
        is_reused_before, is_reused_after, memory = reused(bench, allocator)
        assert (is_reused_before, is_reused_after) == (False, True)
        memory.close()


def test_capture_reuses_no_memory_without_setting(bench: Workbench, make: Make) -> None:
    assert reused(bench, make())[:2] == (False, False)
