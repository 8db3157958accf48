"""MemPools, in addition to the scenarios 35 to 42 of tests/allocator_scenarios/pools.py."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
from allocator import invariants
from allocator.device import MIB, Device
from allocator.summaries import changes, current
from allocator.virtual_device import VirtualDevice

from cudakit.allocator.allocator import DeviceCachingAllocator
from cudakit.allocator.oom import OutOfMemory
from cudakit.allocator.pools import MemPool, PoolError
from cudakit.errors import CudaError
from cudakit.torch_rules.settings import Settings

ELSEWHERE = 0x6F00_0000_0000


def limited(device: Device, size_bytes: int) -> DeviceCachingAllocator:
    """Return an allocator with a limit of reserved bytes."""
    return DeviceCachingAllocator(device, Settings(memory_fraction=size_bytes / device.capacity))


def test_36_pool_takes_segments_from_its_own_upstream(
    allocator: DeviceCachingAllocator, device: Device
) -> None:
    pool_device = Device(base=ELSEWHERE)
    pool = MemPool(allocator, upstream=pool_device)
    allocator.alloc(30 * MIB)
    with allocator.use_pool(pool):
        ptr = allocator.alloc(40 * MIB)
    allocator.alloc(50 * MIB)
    allocator.free(ptr)

    assert pool_device.held == {ptr: 40 * MIB}
    assert sorted(device.held.values()) == [30 * MIB, 50 * MIB]
    pool.close()
    assert pool_device.calls == ["malloc", "free"]
    assert "free" not in device.calls


def test_36_allocation_that_outlives_its_pool_returns_to_its_upstream(device: Device) -> None:
    allocator, pool_device = DeviceCachingAllocator(device), Device(base=ELSEWHERE)
    pool = MemPool(allocator, upstream=pool_device)
    with allocator.use_pool(pool):
        ptr = allocator.alloc(40 * MIB)
    del pool
    gc.collect()
    assert pool_device.held == {ptr: 40 * MIB}

    allocator.free(ptr)
    allocator.empty_cache()

    assert pool_device.held == {}
    assert allocator.private_pools() == ()


def test_collected_mem_pool_is_emptied(allocator: DeviceCachingAllocator, device: Device) -> None:
    pool = MemPool(allocator)
    with allocator.use_pool(pool):
        allocator.free(allocator.alloc(30 * MIB))
    assert len(device.held) == 1
    del pool
    gc.collect()

    assert device.held == {}


class Interrupted(Device):
    """A device that runs a finalizer during an allocation."""

    finalizer: Callable[[], object] = staticmethod(lambda: None)

    def malloc(self, size_bytes: int, stream: int) -> int:
        self.finalizer()
        return super().malloc(size_bytes, stream)


def test_mem_pool_can_be_collected_during_an_allocation() -> None:
    device = Interrupted()
    allocator = DeviceCachingAllocator(device)
    pools = [MemPool(allocator)]
    with allocator.use_pool(pools[0]):
        allocator.free(allocator.alloc(30 * MIB))
    device.finalizer = pools.clear
    live = allocator.alloc(40 * MIB)
    device.finalizer = lambda: None
    allocator.empty_cache()

    assert list(device.held) == [live]
    assert allocator.private_pools() == ()
    invariants.check(allocator)


def test_37_pool_lends_cached_blocks_before_out_of_memory(device: Device) -> None:
    allocator = limited(device, 80 * MIB)
    lending_pool, other_pool = MemPool(allocator, use_on_oom=True), MemPool(allocator)
    with allocator.use_pool(lending_pool):
        first = allocator.alloc(40 * MIB)
    with allocator.use_pool(other_pool):
        second = allocator.alloc(40 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        allocator.alloc(40 * MIB)
    assert caught.value.report is not None
    assert caught.value.report.private_free_bytes == 0
    allocator.free(first)
    allocator.free(second)
    lent_block = allocator.alloc(30 * MIB)

    assert lent_block == first
    with pytest.raises(OutOfMemory) as caught:
        allocator.alloc(30 * MIB)
    assert caught.value.report is not None
    assert caught.value.report.private_free_bytes == 50 * MIB
    allocator.free(lent_block)
    with allocator.use_pool(lending_pool):
        assert allocator.alloc(40 * MIB) == first


def test_37_closed_pool_lends_nothing(device: Device) -> None:
    allocator = limited(device, 80 * MIB)
    pool = MemPool(allocator, use_on_oom=True)
    with allocator.use_pool(pool):
        first, second = allocator.alloc(40 * MIB), allocator.alloc(10 * MIB)
        allocator.alloc(10 * MIB)
    allocator.free(first)
    pool.close()
    assert current(allocator, "reserved_bytes") == 20 * MIB
    allocator.free(second)
    allocator.alloc(55 * MIB)

    with pytest.raises(OutOfMemory):
        allocator.alloc(9 * MIB)


def test_37_private_pool_borrows_from_no_other_pool(device: Device) -> None:
    allocator = limited(device, 60 * MIB)
    lending_pool, other_pool = MemPool(allocator, use_on_oom=True), MemPool(allocator)
    with allocator.use_pool(lending_pool):
        allocator.free(allocator.alloc(40 * MIB))

    with allocator.use_pool(other_pool), pytest.raises(OutOfMemory):
        allocator.alloc(40 * MIB)


def test_statistics_keep_the_reserved_bytes_of_closed_pools(
    allocator: DeviceCachingAllocator,
) -> None:
    earlier_statistics = allocator.statistics()
    assert len(earlier_statistics) == 122
    with MemPool(allocator) as pool, allocator.use_pool(pool):
        allocator.free(allocator.alloc(30 * MIB))
        allocator.alloc(700)
        inside = of_pool(allocator, pool)
    statistics_of_pool = of_pool(allocator, pool)
    allocator.reset_sums()
    allocator.reset_peaks()

    assert inside["all"] == (32 * MIB, 32 * MIB, 32 * MIB, 0)
    assert inside["small_pool"] == (2 * MIB, 2 * MIB, 2 * MIB, 0)
    assert statistics_of_pool["all"] == (2 * MIB, 32 * MIB, 32 * MIB, 30 * MIB)
    assert statistics_of_pool["large_pool"] == (0, 30 * MIB, 30 * MIB, 30 * MIB)
    assert of_pool(allocator, pool)["all"] == (2 * MIB, 2 * MIB, 0, 0)
    statistics = allocator.statistics()
    assert len(statistics) == 122 + 12
    assert list(statistics) == sorted(statistics)


def of_pool(allocator: DeviceCachingAllocator, pool: MemPool) -> dict[str, tuple[int, ...]]:
    """Return the reserved bytes of a pool by kind: current, peak, allocated and freed."""
    statistics = allocator.statistics()
    name = "reserved_bytes_by_private_pools.{}_{}".format(*pool.id)
    return {
        kind: tuple(
            statistics[f"{name}.{kind}.{value}"]
            for value in ("current", "peak", "allocated", "freed")
        )
        for kind in ("all", "small_pool", "large_pool")
    }


def test_40_use_pool_applies_to_one_thread(allocator: DeviceCachingAllocator) -> None:
    pool = MemPool(allocator)
    inside, done = threading.Event(), threading.Event()

    def elsewhere() -> None:
        with allocator.use_pool(pool):
            inside.set()
            done.wait(10)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    inside.wait(10)
    for _ in range(3):
        allocator.alloc(MIB)
    done.set()
    thread.join()

    assert len(allocator.snapshot()["segments"]) == 2
    assert pool.snapshot() == []


def test_41_pool_with_its_own_upstream_is_not_expandable() -> None:
    device, pool_device = VirtualDevice(), Device(base=ELSEWHERE)
    allocator = DeviceCachingAllocator(device, Settings(expandable_segments=True))
    with allocator.use_pool(MemPool(allocator, upstream=pool_device)):
        inside = allocator.alloc(19 * MIB)
        allocator.free(inside)
        later_block = allocator.alloc(19 * MIB)
    allocator.alloc(19 * MIB)

    segments = allocator.snapshot()["segments"]
    assert [segment["is_expandable"] for segment in segments] == [False, True]
    assert [len(segment["blocks"]) for segment in segments] == [1, 2]
    assert later_block == inside
    invariants.check(allocator)


def test_41_pool_of_the_device_is_expandable() -> None:
    allocator = DeviceCachingAllocator(VirtualDevice(), Settings(expandable_segments=True))
    pool = MemPool(allocator)
    with allocator.use_pool(pool):
        ptr = allocator.alloc(30 * MIB)
    state = allocator.checkpoint(pool)
    with allocator.use_pool(pool):
        allocator.alloc(50 * MIB)
    restored = allocator.restore(state)
    assert restored.created == (ptr,)
    assert [s["is_expandable"] for s in pool.snapshot()] == [True]
    invariants.check(allocator)
    allocator.free(ptr)
    pool.close()

    assert allocator.snapshot()["segments"] == []
    assert allocator.private_pools() == ()


def test_use_pool_queries_events_and_releases_memory_as_usual(device: Device) -> None:
    allocator = DeviceCachingAllocator(device)
    waiting = allocator.alloc(30 * MIB)
    allocator.free(waiting, 11)
    device.finish(11)
    device.capacity = 60 * MIB

    with allocator.use_pool(MemPool(allocator)):
        allocator.alloc(50 * MIB)

    assert allocator.statistics()["num_alloc_retries"] == 1
    assert waiting not in device.held
    invariants.check(allocator)


def test_use_pool_ends_if_its_body_raises(allocator: DeviceCachingAllocator) -> None:
    pool = MemPool(allocator)
    with pytest.raises(KeyError), allocator.use_pool(pool):
        raise KeyError

    allocator.alloc(MIB)
    assert pool.uses == 1
    assert pool.snapshot() == []


def test_pool_cannot_be_used_twice_at_a_time(allocator: DeviceCachingAllocator) -> None:
    pool = MemPool(allocator)
    with allocator.use_pool(pool):
        with pytest.raises(PoolError, match="already serves"), allocator.use_pool(pool):
            pass
        with pytest.raises(PoolError, match="still routed"):
            pool.close()
        assert pool.uses == 2
    pool.close()
    pool.close()

    assert pool.uses == 0
    with pytest.raises(PoolError, match="closed"), allocator.use_pool(pool):
        pass
    allocator.empty_cache(pool)


def test_mem_pool_with_block_closes_the_pool(device: Device) -> None:
    allocator = DeviceCachingAllocator(device)
    with MemPool(allocator) as pool, allocator.use_pool(pool):
        allocator.free(allocator.alloc(MIB))

    assert device.held == {}


def test_empty_pool_upstream_raises_out_of_memory(allocator: DeviceCachingAllocator) -> None:
    pool = MemPool(allocator, upstream=Device(20 * MIB, ELSEWHERE))
    with allocator.use_pool(pool), pytest.raises(OutOfMemory):
        allocator.alloc(30 * MIB)

    invariants.check(allocator)


# --- Private pools, step by step: ids, holders, routing and release --------------------------------


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


# --- Every driver call can fail in a program with private pools: nothing leaks ---------------------

CAPACITY = 96 * MIB
SETTINGS = (Settings(), Settings(expandable_segments=True), Settings(max_split_size_bytes=20 * MIB))


def program(allocator: DeviceCachingAllocator, device: Device) -> list[CudaError]:
    """Use pools and captures, continue after failures, and return the failures."""
    failures: list[CudaError] = []
    live: list[int] = []

    def attempt(operation: Callable[[], object]) -> None:
        try:
            operation()
        except CudaError as error:
            failures.append(error)
        invariants.check(allocator)

    def alloc(size: int, stream: int = 0) -> None:
        live.append(allocator.alloc(size))
        allocator.record_use(live[-1], stream)

    def captured() -> None:
        with allocator.capture() as memory:
            attempt(lambda: alloc(9 * MIB, 11))
            attempt(lambda: alloc(700))
            while live:
                attempt(lambda: allocator.free(live.pop()))
        memory.close()

    pools = [MemPool(allocator, use_on_oom=True), MemPool(allocator, upstream=device)]
    for pool in pools:
        with allocator.use_pool(pool):
            attempt(lambda: alloc(30 * MIB, 12))
            attempt(lambda: alloc(700))
    attempt(captured)
    attempt(lambda: alloc(50 * MIB))
    device.finish(11)
    attempt(lambda: alloc(25 * MIB))
    while live:
        attempt(lambda: allocator.free(live.pop()))
    for pool in pools:
        attempt(pool.close)
        pool.close()
    attempt(allocator.empty_cache)
    return failures


@pytest.mark.parametrize("settings", SETTINGS)
def test_failed_driver_call_is_reported_and_leaks_nothing(settings: Settings) -> None:
    without_failures = VirtualDevice(CAPACITY)
    program(DeviceCachingAllocator(without_failures, settings), without_failures)
    assert len(without_failures.calls) > 20

    for fail_at in range(1, len(without_failures.calls) + 1):
        device = VirtualDevice(CAPACITY)
        device.fail_at = fail_at
        try:
            allocator = DeviceCachingAllocator(device, settings)
        except CudaError:
            continue
        failures = program(allocator, device)
        for _ in range(2):
            with suppress(CudaError):
                allocator.empty_cache()

        quiet = device.calls[fail_at - 1] in ("record", "event", "memory_info")
        assert quiet or any(error is device.error for error in failures), device.calls[fail_at - 1]
        assert (device.held, device.mapped) == ({}, {})
        assert allocator.private_pools() == ()
        allocator.close()
        assert device.events == {}


def test_threads_use_pools_concurrently() -> None:
    device = Device()
    allocator = DeviceCachingAllocator(device)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for iteration in range(30):
                with MemPool(allocator, no_split=iteration % 2 > 0) as pool:
                    with allocator.use_pool(pool):
                        blocks = [allocator.alloc(MIB * seed + 512 * i) for i in range(1, 6)]
                    assert {int(ptr) for ptr in blocks} == {
                        block["address"]
                        for segment in pool.snapshot()
                        for block in segment["blocks"]
                        if block["state"] != "inactive"
                    }
                    for ptr in blocks:
                        allocator.free(ptr)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    allocator.empty_cache()

    assert failures == []
    assert device.held == {}
    assert allocator.private_pools() == ()
    invariants.check(allocator)
