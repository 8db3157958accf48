from __future__ import annotations

import random

import pytest
from allocator.device import MIB, Device
from allocator.expandable_allocator import PAGE, expandable_allocator, set_expandable

from cudakit.allocator.allocator import DeviceCachingAllocator
from cudakit.allocator.oom import StreamMemory


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
