"""Expandable segments: out of memory, and release of pages."""

from __future__ import annotations

import pytest
from allocator import invariants
from allocator.device import GIB, MIB
from allocator.expandable_allocator import (
    FREE,
    LIVE,
    PAGE,
    SIDE,
    expandable_allocator,
    set_expandable,
)
from allocator.summaries import blocks, changes, current, segments
from allocator.virtual_device import VirtualDevice

from cudakit.allocator.allocator import DeviceCachingAllocator
from cudakit.allocator.oom import OutOfMemory
from cudakit.torch_rules.setting_keys import Reserve
from cudakit.torch_rules.settings import Settings

# Out of memory


def test_17_three_requests_fit_and_the_fourth_fails_with_and_without_expandable_segments() -> None:
    allocator = DeviceCachingAllocator(
        VirtualDevice(),
        Settings(max_split_size_bytes=40 * MIB, memory_fraction=120 * MIB / (16 * GIB)),
    )
    live_blocks = []
    for on in (False, True, False):
        set_expandable(allocator, on=on)
        live_blocks.append(allocator.alloc(40 * MIB))
    with pytest.raises(OutOfMemory):
        allocator.alloc(40 * MIB)
    for ptr in live_blocks:
        allocator.free(ptr)
    allocator.alloc(120 * MIB)

    assert segments(allocator) == [("large", 120 * MIB)]


def test_18_garbage_collection_ignores_expandable_segments() -> None:
    allocator = DeviceCachingAllocator(
        VirtualDevice(),
        Settings(garbage_collection_threshold=0.5, memory_fraction=120 * MIB / (16 * GIB)),
    )
    first = allocator.alloc(40 * MIB)
    set_expandable(allocator, on=True)
    second = allocator.alloc(40 * MIB)
    allocator.free(first)
    allocator.free(second)
    allocator.alloc(80 * MIB)

    assert [s["is_expandable"] for s in allocator.snapshot()["segments"]] == [True]
    invariants.check(allocator)


def test_release_of_oversize_blocks_skips_expandable_blocks() -> None:
    device = VirtualDevice(200 * MIB)
    allocator = expandable_allocator(device, max_split_size_bytes=20 * MIB)
    allocator.free(allocator.alloc(60 * MIB))
    allocator.free(allocator.alloc(60 * MIB, SIDE))
    ptr = allocator.alloc(180 * MIB)

    assert device.used == 180 * MIB
    assert allocator.statistics()["num_alloc_retries"] == 1
    allocator.free(ptr)


def test_pages_mapped_before_out_of_memory_stay_free() -> None:
    device = VirtualDevice(110 * MIB)
    allocator = expandable_allocator(device)
    first, second, third = (allocator.alloc(PAGE) for _ in range(3))
    allocator.free(second)
    allocator.empty_cache()
    fourth = allocator.alloc(30 * MIB)
    allocator.free(third)
    allocator.free(fourth)
    allocator.begin_capture()  # During a capture no memory is released.
    with pytest.raises(OutOfMemory):
        allocator.alloc(
            100 * MIB
        )  # needs a page in the gap, the free block behind the gap, and one more page

    assert blocks(allocator) == [[(PAGE, LIVE), (4 * PAGE, FREE)]]
    assert device.used == 5 * PAGE
    invariants.check(allocator)
    allocator.free(first)
    assert allocator.alloc(5 * PAGE) == first


def test_request_beyond_the_reservation_is_out_of_memory() -> None:
    device = VirtualDevice()
    allocator = expandable_allocator(device, expandable_segments_reserve=Reserve(value=0.01))
    with pytest.raises(OutOfMemory):
        allocator.alloc(GIB)
    assert device.reserved == {}
    assert "map" not in device.calls
    allocator.alloc(160 * MIB)

    assert set(device.reserved.values()) == {180 * MIB}


def test_full_expandable_segment_is_followed_by_another() -> None:
    device = VirtualDevice()
    allocator = expandable_allocator(device, expandable_segments_reserve=Reserve(value=0.01))
    first = allocator.alloc(160 * MIB)
    second = allocator.alloc(40 * MIB)

    assert len(device.reserved) == 2
    assert segments(allocator) == [("large", 160 * MIB), ("large", 40 * MIB)]
    assert allocator.alloc(PAGE) == first + 160 * MIB
    assert allocator.alloc(PAGE) == second + 40 * MIB


# Release of pages


def test_empty_cache_unmaps_whole_pages_and_unreserves_empty_segments() -> None:
    device = VirtualDevice()
    allocator = expandable_allocator(device)
    low, middle, high = (allocator.alloc(15 * MIB) for _ in range(3))
    allocator.free(middle)
    allocator.free(high)
    with changes(allocator) as changed:
        allocator.empty_cache()

    assert changed == {"reserved_bytes.all": -2 * PAGE, "reserved_bytes.large_pool": -2 * PAGE}
    assert allocator.statistics()["num_device_free"] == 1
    assert blocks(allocator) == [[(15 * MIB, LIVE), (5 * MIB, FREE)]]
    allocator.free(low)
    allocator.empty_cache()
    assert (device.mapped, device.reserved) == ({}, {})
    assert allocator.snapshot()["segments"] == []


def test_stream_is_synchronized_before_its_pages_are_unmapped() -> None:
    device = VirtualDevice()
    allocator = expandable_allocator(device)
    allocator.free(allocator.alloc(PAGE, SIDE))
    calls = len(device.calls)
    allocator.empty_cache()

    assert device.calls[calls:] == ["sync_stream", "unmap", "unreserve"]


def test_expandable_segment_outlives_the_setting_until_it_is_empty() -> None:
    device = VirtualDevice()
    allocator = expandable_allocator(device)
    ptr = allocator.alloc(PAGE)
    set_expandable(allocator, on=False)
    allocator.empty_cache()
    assert device.mapped == {ptr: PAGE}
    allocator.free(ptr)
    allocator.empty_cache()

    assert device.reserved == {}


def test_close_releases_unused_memory() -> None:
    device = VirtualDevice()
    allocator = expandable_allocator(device)
    live = allocator.alloc(700)
    allocator.free(allocator.alloc(PAGE))
    allocator.close()

    assert device.mapped == {live: 2 * MIB}
    assert len(device.reserved) == 1


@pytest.mark.parametrize(
    ("size", "pages", "pages_afterwards"), [(10 * MIB - 512, 2, 2), (10 * MIB + 512, 2, 1)]
)
def test_30_live_result_of_a_graph_keeps_its_pages(
    size: int, pages: int, pages_afterwards: int
) -> None:
    allocator = expandable_allocator()
    with changes(allocator) as changed:
        result = allocator.alloc(size)
        for _ in range(5):
            copy, new = allocator.alloc(size), allocator.alloc(size)
            allocator.free(copy)
            allocator.free(result)
            result = new
    assert changed["reserved_bytes.all"] == pages * PAGE
    assert "segment.all" not in changed
    allocator.empty_cache()

    assert current(allocator, "reserved_bytes") == pages_afterwards * PAGE
    invariants.check(allocator)


def test_release_of_available_blocks_stops_at_an_expandable_block() -> None:
    settings = Settings(max_split_size_bytes=20 * MIB)
    for expandable_first in (False, True):
        device = VirtualDevice(300 * MIB)
        allocator = DeviceCachingAllocator(device, settings, search_again=False)
        plain = allocator.alloc(100 * MIB if expandable_first else 60 * MIB)
        set_expandable(allocator, on=True)
        allocator.free(allocator.alloc(80 * MIB))
        allocator.free(plain)
        set_expandable(allocator, on=False)
        allocator.alloc(160 * MIB)
        # Either the plain segment is released for the request, or the whole cache.
        assert allocator.statistics()["num_alloc_retries"] == expandable_first
        invariants.check(allocator)
