"""MemPools, in addition to the scenarios 35 to 42 of tests/allocator_scenarios/pools.py."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
from allocator import invariants
from allocator.device import MIB, Device
from allocator.summaries import current
from allocator.virtual_device import VirtualDevice

from cudakit.allocator.allocator import DeviceCachingAllocator
from cudakit.allocator.oom import OutOfMemory
from cudakit.allocator.pools import MemPool, PoolError
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
