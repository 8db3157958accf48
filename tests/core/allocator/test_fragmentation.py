from __future__ import annotations

import random

import pytest
from core.allocator.device import MIB, Device
from core.allocator.expandable_allocator import PAGE, expandable_allocator, set_expandable

from cudakit.core.allocator.allocator import CachingAllocator
from cudakit.core.allocator.fragmentation import StreamMemory


def test_empty_allocator_is_not_fragmented(allocator: CachingAllocator) -> None:
    found = allocator.fragmentation()

    assert (found.internal, found.external, found.free_bytes, found.streams) == (0, 0, 0, ())


def test_internal_fragmentation_is_allocated_minus_requested(
    allocator: CachingAllocator,
) -> None:
    allocator.alloc(1)
    allocator.alloc(700)

    found = allocator.fragmentation()

    assert found.internal_bytes == 511 + 324
    assert found.internal == (511 + 324) / (512 + 1024)


def test_external_fragmentation_is_free_memory_outside_the_largest_block(
    allocator: CachingAllocator,
) -> None:
    held = [allocator.alloc(4 * MIB) for _ in range(5)]
    allocator.free(held[0])
    allocator.free(held[2])
    allocator.free(held[3])

    found = allocator.fragmentation()

    assert (found.free_bytes, found.largest_hole_bytes) == (12 * MIB, 8 * MIB)
    assert found.external == 1 - 8 / 12
    assert found.releasable_bytes == 0


def test_free_bytes_are_listed_by_stream(allocator: CachingAllocator) -> None:
    whole, part = allocator.alloc(30 * MIB, 12), allocator.alloc(9 * MIB, 12)
    kept = allocator.alloc(12 * MIB)
    allocator.free(whole)

    own, other = allocator.fragmentation().streams

    assert own == StreamMemory(12, 41 * MIB, 30 * MIB, 30 * MIB, 0, 0)
    assert other == StreamMemory(0, 0, 0, 0, 0, 0)
    allocator.free(part)
    allocator.free(kept)


def test_pending_free_is_awaited_from_each_stream_that_uses_it(
    allocator: CachingAllocator, device: Device
) -> None:
    ptr = allocator.alloc(12 * MIB)
    allocator.record_use(ptr, 11)
    allocator.record_use(ptr, 12)
    allocator.free(ptr)

    found = allocator.fragmentation()

    assert found.pending_bytes == 12 * MIB
    assert found.allocated_bytes == 0
    assert {m.stream: (m.pending_bytes, m.awaited_bytes) for m in found.streams} == {
        0: (12 * MIB, 0),
        11: (0, 12 * MIB),
        12: (0, 12 * MIB),
    }
    device.finish(11)
    device.finish(12)
    allocator.empty_cache()
    assert allocator.fragmentation().streams == ()


def test_cached_memory_of_a_private_pool_is_not_releasable(allocator: CachingAllocator) -> None:
    pool = allocator.graph_pool_handle()
    with allocator.use_pool(pool):
        allocator.free(allocator.alloc(30 * MIB))

        (each,) = allocator.fragmentation().stream_pools

    assert (each.pool, each.free_bytes, each.releasable_bytes) == (pool, 30 * MIB, 0)


def test_fragmentation_sums_equal_the_statistics(allocator: CachingAllocator) -> None:
    held = [allocator.alloc(size * 1000, size % 3) for size in range(1, 2000, 37)]
    for ptr in held[::2]:
        allocator.free(ptr)
    found, statistics = allocator.fragmentation(), allocator.statistics()

    assert found.reserved_bytes == statistics["reserved_bytes.all.current"]
    assert found.allocated_bytes == statistics["allocated_bytes.all.current"]
    assert found.requested_bytes == statistics["requested_bytes.all.current"]
    assert found.free_bytes == found.reserved_bytes - found.allocated_bytes
    assert sum(m.stranded_bytes for m in found.streams) == found.free_bytes


def test_releasable_bytes_include_whole_pages_beside_live_blocks() -> None:
    allocator = expandable_allocator()
    held = [allocator.alloc(15 * MIB) for _ in range(4)]
    for ptr in held[1:3]:
        allocator.free(ptr)

    found = allocator.fragmentation()

    assert (found.free_bytes, found.largest_hole_bytes) == (30 * MIB, 30 * MIB)
    assert found.releasable_bytes == PAGE


@pytest.mark.parametrize("expands", [False, True])
def test_releasable_bytes_are_those_that_empty_cache_releases(expands: bool) -> None:
    allocator, rng = expandable_allocator(), random.Random(3)
    set_expandable(allocator, on=expands)
    live: list[int] = []
    for _ in range(20):
        for _ in range(40):
            if live and rng.random() < 0.6:
                allocator.free(live.pop(rng.randrange(len(live))))
            else:
                live.append(
                    allocator.alloc(rng.choice([512, MIB, 9 * MIB, 33 * MIB]), rng.randrange(2))
                )
        before = allocator.fragmentation()
        allocator.empty_cache()
        after = allocator.fragmentation()
        assert before.reserved_bytes - after.reserved_bytes == before.releasable_bytes
        assert after.releasable_bytes == 0
