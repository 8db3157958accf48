from __future__ import annotations

import pytest
from core.allocator.device import MIB, Device
from core.allocator.watching import segments

from cudakit.core.allocator.allocator import CachingAllocator
from cudakit.errors import UsageError


def test_cache_limit_releases_segments_right_after_the_free(
    allocator: CachingAllocator, device: Device
) -> None:
    allocator.set_cache_limit(50 * MIB)
    for ptr in [allocator.alloc(size * MIB) for size in (20, 30, 40)]:
        allocator.free(ptr)

    assert [size for _, size in segments(allocator)] == [20 * MIB, 30 * MIB]
    assert device.used == 50 * MIB


def test_the_smallest_segment_that_is_enough_goes_and_without_one_the_largest(
    allocator: CachingAllocator,
) -> None:
    for ptr in [allocator.alloc(size * MIB) for size in (20, 30, 40)]:
        allocator.free(ptr)
    allocator.set_cache_limit(65 * MIB)
    allocator.free(allocator.alloc(1))
    assert [size for _, size in segments(allocator)] == [20 * MIB, 40 * MIB, 2 * MIB]
    allocator.set_cache_limit(0)
    allocator.free(allocator.alloc(1))

    assert segments(allocator) == []


def test_segments_of_which_something_is_used_stay(allocator: CachingAllocator) -> None:
    allocator.set_cache_limit(0)
    kept, freed = allocator.alloc(9 * MIB), allocator.alloc(9 * MIB)
    allocator.free(freed)

    assert [size for _, size in segments(allocator)] == [20 * MIB]
    allocator.free(kept)
    assert segments(allocator) == []


def test_segment_that_the_driver_refuses_stays_cached(
    allocator: CachingAllocator, device: Device
) -> None:
    allocator.set_cache_limit(0)
    ptr = allocator.alloc(20 * MIB)
    device.fail_at = len(device.calls) + 1
    allocator.free(ptr)
    assert device.used == 20 * MIB
    allocator.free(allocator.alloc(1))

    assert device.used == 0


def test_without_a_limit_all_is_kept_again(allocator: CachingAllocator, device: Device) -> None:
    allocator.set_cache_limit(0)
    allocator.set_cache_limit(None)
    allocator.free(allocator.alloc(20 * MIB))

    assert device.used == 20 * MIB
    assert allocator._state.guard.watchers == []


def test_the_limit_is_in_the_snapshot(allocator: CachingAllocator) -> None:
    assert allocator.snapshot()["allocator_settings"]["cudakit_cache_limit"] == -1
    allocator.set_cache_limit(7)
    assert allocator.snapshot()["allocator_settings"]["cudakit_cache_limit"] == 7
    with pytest.raises(UsageError, match="-1 bytes"):
        allocator.set_cache_limit(-1)
