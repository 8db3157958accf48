from __future__ import annotations

import pytest
from allocator.device import MIB, Device
from allocator.summaries import segments

from cudakit.allocator.allocator import DeviceCachingAllocator
from cudakit.errors import UsageError


def test_cache_limit_releases_segments_right_after_the_free(
    allocator: DeviceCachingAllocator, device: Device
) -> None:
    allocator.set_cache_limit(50 * MIB)
    for ptr in [allocator.alloc(size * MIB) for size in (20, 30, 40)]:
        allocator.free(ptr)

    assert [size for _, size in segments(allocator)] == [20 * MIB, 30 * MIB]
    assert device.used == 50 * MIB


def test_cache_limit_releases_the_smallest_sufficient_segment_else_the_largest(
    allocator: DeviceCachingAllocator,
) -> None:
    for ptr in [allocator.alloc(size * MIB) for size in (20, 30, 40)]:
        allocator.free(ptr)
    allocator.set_cache_limit(65 * MIB)
    allocator.free(allocator.alloc(1))
    assert [size for _, size in segments(allocator)] == [20 * MIB, 40 * MIB, 2 * MIB]
    allocator.set_cache_limit(0)
    allocator.free(allocator.alloc(1))

    assert segments(allocator) == []


def test_cache_limit_keeps_segments_in_use(allocator: DeviceCachingAllocator) -> None:
    allocator.set_cache_limit(0)
    live, freed = allocator.alloc(9 * MIB), allocator.alloc(9 * MIB)
    allocator.free(freed)

    assert [size for _, size in segments(allocator)] == [20 * MIB]
    allocator.free(live)
    assert segments(allocator) == []


def test_segment_that_the_driver_refuses_stays_cached(
    allocator: DeviceCachingAllocator, device: Device
) -> None:
    allocator.set_cache_limit(0)
    ptr = allocator.alloc(20 * MIB)
    device.fail_at = len(device.calls) + 1
    allocator.free(ptr)
    assert device.used == 20 * MIB
    allocator.free(allocator.alloc(1))

    assert device.used == 0


def test_removed_cache_limit_releases_nothing(
    allocator: DeviceCachingAllocator, device: Device
) -> None:
    allocator.set_cache_limit(0)
    allocator.set_cache_limit(None)
    allocator.free(allocator.alloc(20 * MIB))

    assert device.used == 20 * MIB
    assert allocator._guard.watchers == []


def test_snapshot_has_the_cache_limit(allocator: DeviceCachingAllocator) -> None:
    assert allocator.snapshot()["allocator_settings"]["cudakit_cache_limit"] == -1
    allocator.set_cache_limit(7)
    assert allocator.snapshot()["allocator_settings"]["cudakit_cache_limit"] == 7
    with pytest.raises(UsageError, match="-1 bytes"):
        allocator.set_cache_limit(-1)
