"""Private pools, step by step: ids, holders, routing and release."""

from __future__ import annotations

import threading

import pytest
from allocator.device import MIB, Device
from allocator.summaries import changes, current

from cudakit.allocator.allocator import DeviceCachingAllocator
from cudakit.allocator.pools import PoolError


def match_all(stream: int) -> bool:  # noqa: ARG001
    return True


def match_none(stream: int) -> bool:  # noqa: ARG001
    return False


def pool_ids(allocator: DeviceCachingAllocator) -> list[tuple[int, int]]:
    return [segment["segment_pool_id"] for segment in allocator.snapshot()["segments"]]


def test_35_user_pool_ids_are_unique_across_threads(
    allocator: DeviceCachingAllocator,
) -> None:
    pool_ids: list[tuple[int, int]] = []

    def take() -> None:
        pool_ids.extend(allocator.graph_pool_handle() for _ in range(50))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(pool_ids) == [(0, number) for number in range(1, 201)]


def test_graph_pool_ids_differ_from_user_pool_ids(allocator: DeviceCachingAllocator) -> None:
    with allocator.capture() as first:
        pass
    with allocator.capture() as second:
        pass

    assert (first.id, second.id) == ((1, 0), (2, 0))
    assert allocator.graph_pool_handle() == (0, 1)


def test_requests_use_a_pool_from_begin_to_end(allocator: DeviceCachingAllocator) -> None:
    pool = allocator.graph_pool_handle()
    default_block = allocator.alloc(30 * MIB)
    allocator.free(default_block)
    allocator.begin_allocate_to_pool(pool, match_all)
    inside = allocator.alloc(30 * MIB)
    allocator.end_allocate_to_pool(pool)

    assert inside != default_block
    assert pool_ids(allocator) == [(0, 0), pool]
    assert allocator.alloc(30 * MIB) == default_block
    allocator.free(inside)
    assert allocator.alloc(30 * MIB) not in (inside, default_block)


def test_last_begun_matching_pool_serves_a_request(allocator: DeviceCachingAllocator) -> None:
    first, second, third = (allocator.graph_pool_handle() for _ in range(3))
    allocator.begin_allocate_to_pool(first, match_all)
    allocator.begin_allocate_to_pool(second, lambda stream: stream == 11)
    allocator.begin_allocate_to_pool(third, match_none)
    for stream in (0, 11):
        allocator.alloc(MIB, stream)
    allocator.end_allocate_to_pool(second)
    allocator.alloc(30 * MIB, 11)

    assert pool_ids(allocator) == [first, second, first]


def test_trace_names_the_private_pool(allocator: DeviceCachingAllocator) -> None:
    pool = allocator.graph_pool_handle()
    allocator.record_history()
    allocator.begin_allocate_to_pool(pool, match_all)
    allocator.free(allocator.alloc(MIB))
    allocator.end_allocate_to_pool(pool)
    allocator.release_pool(pool)
    allocator.empty_cache()

    trace = allocator.snapshot()["device_traces"][0]
    assert [entry["action"] for entry in trace] == [
        "segment_alloc",
        "alloc",
        "free_requested",
        "free_completed",
        "segment_free",
    ]
    assert {entry["pool_id"] for entry in trace} == {pool}


def test_held_pool_is_not_released(allocator: DeviceCachingAllocator) -> None:
    pool = allocator.graph_pool_handle()
    allocator.begin_allocate_to_pool(pool, match_all)
    allocator.free(allocator.alloc(30 * MIB))
    allocator.end_allocate_to_pool(pool)
    allocator.empty_cache()
    allocator.empty_cache(pool)
    reserved_bytes = current(allocator, "reserved_bytes")
    allocator.release_pool(pool)
    with changes(allocator) as released:
        pass
    allocator.empty_cache()

    assert reserved_bytes == 30 * MIB
    assert released == {}
    assert current(allocator, "reserved_bytes") == 0
    assert allocator.pool_uses(pool) == 0
    assert allocator.private_pools() == ()


def test_pool_is_dropped_with_its_last_segment(allocator: DeviceCachingAllocator) -> None:
    pool = allocator.graph_pool_handle()
    allocator.begin_allocate_to_pool(pool, match_all)
    live, cached = allocator.alloc(30 * MIB), allocator.alloc(40 * MIB)
    allocator.free(cached)
    allocator.end_allocate_to_pool(pool)
    allocator.release_pool(pool)
    allocator.empty_cache()

    (usage,) = allocator.private_pools()
    assert (usage.id, usage.uses, usage.segments) == (pool, 0, 1)
    assert usage.reserved_bytes == usage.allocated_bytes == 30 * MIB
    allocator.free(live)
    allocator.empty_cache()
    assert allocator.private_pools() == ()


def test_empty_cache_of_one_pool_leaves_the_others(
    allocator: DeviceCachingAllocator, device: Device
) -> None:
    pools = [allocator.graph_pool_handle() for _ in range(2)]
    allocator.free(allocator.alloc(30 * MIB))
    for pool in pools:
        allocator.begin_allocate_to_pool(pool, match_all)
        ptr = allocator.alloc(30 * MIB)
        allocator.record_use(ptr, 11)
        allocator.free(ptr)
        allocator.end_allocate_to_pool(pool)
        allocator.release_pool(pool)

    allocator.empty_cache(pools[1])

    assert pool_ids(allocator) == [(0, 0), pools[0]]
    assert device.calls.count("sync_event") == 1
    assert allocator.statistics()["num_sync_all_streams"] == 1
    allocator.empty_cache(pools[1])  # The pool no longer exists.
    assert allocator.statistics()["num_sync_all_streams"] == 1
    allocator.empty_cache()
    assert pool_ids(allocator) == []


def test_small_segments_of_a_private_pool_are_released_first(
    allocator: DeviceCachingAllocator,
) -> None:
    pool = allocator.graph_pool_handle()
    allocator.begin_allocate_to_pool(pool, match_all)
    for ptr in [allocator.alloc(size) for size in (30 * MIB, MIB)]:
        allocator.free(ptr)
    allocator.end_allocate_to_pool(pool)
    allocator.release_pool(pool)
    allocator.record_history()
    allocator.empty_cache()

    assert [entry["size"] for entry in allocator.snapshot()["device_traces"][0]] == [
        2 * MIB,
        30 * MIB,
    ]


def test_misuse_is_refused_and_changes_nothing(allocator: DeviceCachingAllocator) -> None:
    pool = allocator.graph_pool_handle()
    allocator.begin_allocate_to_pool(pool, match_all)
    with pytest.raises(PoolError, match="already serves"):
        allocator.begin_allocate_to_pool(pool, match_all)
    assert allocator.pool_uses(pool) == 1
    with pytest.raises(PoolError, match="still routed"):
        allocator.release_pool(pool)
    allocator.end_allocate_to_pool(pool)
    with pytest.raises(PoolError, match="no requests are routed"):
        allocator.end_allocate_to_pool(pool)
    block = allocator.alloc(MIB)
    allocator.release_pool(pool)
    with pytest.raises(PoolError, match="has no holder"):
        allocator.release_pool(pool)
    with pytest.raises(PoolError, match="has no holder"):
        allocator.begin_allocate_to_pool(pool, match_all)
    allocator.free(block)

    assert pool_ids(allocator) == [(0, 0)]


@pytest.mark.parametrize("unknown", [(0, 0), (0, 7), (7, 0), (1, 1), (0, -1), "pool", None, (0,)])
def test_id_that_was_never_issued_is_refused(
    allocator: DeviceCachingAllocator, unknown: tuple[int, int]
) -> None:
    allocator.graph_pool_handle()
    with pytest.raises(PoolError, match="is not the id of a private pool"):
        allocator.begin_allocate_to_pool(unknown, match_all)
    with pytest.raises(PoolError, match="is not the id of a private pool"):
        allocator.release_pool(unknown)
    with pytest.raises(PoolError, match="is not the id of a private pool"):
        allocator.pool_uses(unknown)
    with pytest.raises(PoolError, match="no requests are routed"):
        allocator.end_allocate_to_pool(unknown)


def test_release_of_an_unused_pool_id_is_refused(allocator: DeviceCachingAllocator) -> None:
    with pytest.raises(PoolError, match="has no memory"):
        allocator.release_pool(allocator.graph_pool_handle())
