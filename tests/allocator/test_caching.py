"""Blocks, statistics and errors, in addition to the scenarios of tests/allocator_scenarios/basics.py."""

from __future__ import annotations

import random

import numpy as np
import pytest
from allocator import invariants
from allocator.device import MIB, Device
from allocator.summaries import changes, current

from cudakit.allocator.allocator import DeviceCachingAllocator, InvalidPointer, InvalidSize
from cudakit.errors import Unsupported
from cudakit.torch_rules.settings import Settings

FREE, LIVE = "inactive", "active_allocated"


def test_2_zero_bytes_return_address_0_and_are_not_counted(
    allocator: DeviceCachingAllocator, device: Device
) -> None:
    allocator.record_history()
    with changes(allocator) as changed:
        assert allocator.alloc(0) == 0
        allocator.free(0)

    assert changed == {}
    assert device.calls == []


@pytest.mark.parametrize(
    ("offset", "words"),
    [
        (0, "freed before"),
        (4096, "512 bytes into the allocation"),
        (1 << 40, "belongs to no segment"),
    ],
)
def test_2_invalid_free_is_refused_and_recorded(
    allocator: DeviceCachingAllocator, offset: int, words: str
) -> None:
    first, _ = allocator.alloc(512), allocator.alloc(100 << 10)
    allocator.free(first)
    invalid_ptr = first + (1024 if offset == 4096 else offset)

    with changes(allocator) as changed, pytest.raises(InvalidPointer, match=words) as caught:
        allocator.free(invalid_ptr)

    assert changed == {}
    assert hex(invalid_ptr) in caught.value.message
    assert [free.ptr for free in allocator.invalid_frees()] == [invalid_ptr]
    assert allocator.counters()["num_invalid_frees"] == 1


def test_2_record_use_of_an_unallocated_address_is_refused(
    allocator: DeviceCachingAllocator,
) -> None:
    with pytest.raises(InvalidPointer, match="no segment"):
        allocator.record_use(12345, 1)


def test_3_sums_of_freed_bytes_continue_after_empty_cache(
    allocator: DeviceCachingAllocator,
) -> None:
    ptr = allocator.alloc(1024)
    assert current(allocator, "active_bytes") == 1024
    allocator.free(ptr)
    allocator.empty_cache()

    statistics = allocator.statistics()
    assert statistics["active_bytes.all.freed"] == 1024
    assert statistics["active_bytes.all.current"] == 0
    assert statistics["num_sync_all_streams"] == 1
    assert statistics["num_device_free"] == 1


def test_10_growing_tensors_on_two_devices() -> None:
    allocators = [DeviceCachingAllocator(Device()), DeviceCachingAllocator(Device(), device=1)]
    live: list[tuple[DeviceCachingAllocator, int]] = []

    def take(elements: int) -> None:
        for allocator in allocators:
            live.append((allocator, allocator.alloc(4 * elements)))
            invariants.check(allocator)

    for elements in (1, 10 * 20, 200 * 300 * 2000):
        take(elements)
    for i in range(1, 18):
        take(i * 4 * i)
        allocators[i % 2].reset_peaks()
    for i in range(5, 22):
        take(i * 7 * i * 9 * i * 11 * i)
    take(0)
    random.Random(5).shuffle(live)
    half, live = live[: len(live) // 2], live[len(live) // 2 :]
    for allocator, ptr in half:
        allocator.free(ptr)
    for i in range(2, 25):
        take(i * 3 * i * 8 * i)
    for allocator, ptr in live:
        allocator.free(ptr)

    for allocator in allocators:
        check_end(allocator)


def check_end(allocator: DeviceCachingAllocator) -> None:
    earlier_statistics = allocator.statistics()
    assert earlier_statistics["allocated_bytes.all.current"] == 0
    allocator.empty_cache()
    statistics = allocator.statistics()
    assert statistics["num_sync_all_streams"] == earlier_statistics["num_sync_all_streams"] + 1
    assert (
        statistics["num_device_alloc"]
        == earlier_statistics["num_device_alloc"]
        == statistics["num_device_free"]
    )
    assert statistics["reserved_bytes.all.peak"] == earlier_statistics["reserved_bytes.all.peak"]
    invariants.check(allocator)


def test_12_without_caching_each_request_is_a_driver_call_and_not_counted(
    allocator: DeviceCachingAllocator, device: Device
) -> None:
    allocator.enable_caching(enabled=False)
    ptr = allocator.alloc(MIB)
    assert device.held == {ptr: MIB}
    allocator.enable_caching(enabled=True)
    allocator.free(ptr)

    assert device.held == {}
    assert allocator.statistics()["requested_bytes.all.allocated"] == 0
    allocator.alloc(MIB)
    assert allocator.statistics()["requested_bytes.all.allocated"] == MIB


def test_driver_call_may_run_without_the_lock(device: Device) -> None:
    allocator = DeviceCachingAllocator(device, Settings(release_lock_on_cudamalloc=True))

    with changes(allocator) as changed:
        allocator.alloc(84 * MIB)

    assert changed["active_bytes.all"] == 84 * MIB


def test_legacy_handle_is_the_default_stream(allocator: DeviceCachingAllocator) -> None:
    first = allocator.alloc(MIB, 0)
    allocator.free(first)

    assert allocator.alloc(MIB, 1) == first


def test_numpy_size_is_recorded_as_an_int(
    allocator: DeviceCachingAllocator,
) -> None:
    allocator.alloc(np.int64(700))

    (segment,) = allocator.snapshot()["segments"]
    assert type(segment["requested_size"]) is int


@pytest.mark.parametrize(("size", "error"), [(-1, InvalidSize), (1.5, TypeError), ("1", TypeError)])
def test_alloc_refuses_a_size_that_is_not_a_nonnegative_integer(
    allocator: DeviceCachingAllocator, size: int, error: type[Exception]
) -> None:
    with pytest.raises(error):
        allocator.alloc(size)


def test_unsupported_backend_is_refused(device: Device) -> None:
    with pytest.raises(Unsupported, match="cudaMallocAsync"):
        DeviceCachingAllocator(device, Settings(backend="cudaMallocAsync"))


def test_close_releases_unused_memory(device: Device) -> None:
    allocator = DeviceCachingAllocator(device)
    live = allocator.alloc(MIB)
    other = allocator.alloc(30 * MIB)
    allocator.record_use(other, 11)
    allocator.free(other)

    allocator.close()

    assert list(device.held) == [live]
    assert device.events == {}
