"""Expandable segments: mapping of pages and search of blocks."""

from __future__ import annotations

import pytest
from allocator import invariants
from allocator.device import GIB, MIB, Device
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
from allocator.work import Work

from cudakit.allocator.allocator import DeviceCachingAllocator
from cudakit.errors import Unsupported
from cudakit.torch_rules.settings import Settings

# Growing.


def test_pages_are_mapped_on_demand_and_counted_as_reserved() -> None:
    device = VirtualDevice()
    allocator = expandable_allocator(device)
    with changes(allocator) as changed:
        first = allocator.alloc(9 * MIB)

    assert changed == {
        f"{metric}.{kind}": value
        for kind in ("all", "large_pool")
        for metric, value in (
            ("allocation", 1),
            ("allocated_bytes", 9 * MIB),
            ("active", 1),
            ("active_bytes", 9 * MIB),
            ("requested_bytes", 9 * MIB),
            ("reserved_bytes", PAGE),
        )
    }
    assert device.mapped == {first: PAGE}
    assert allocator.alloc(30 * MIB) == first + 9 * MIB
    assert blocks(allocator) == [[(9 * MIB, LIVE), (30 * MIB, LIVE), (MIB, FREE)]]
    assert allocator.statistics()["num_device_alloc"] == 2
    assert len(device.reserved) == 1
    invariants.check(allocator)


def test_small_requests_use_small_pages_and_a_separate_segment() -> None:
    device = VirtualDevice()
    allocator = expandable_allocator(device)
    allocator.alloc(700)
    allocator.alloc(2 * MIB)

    assert segments(allocator) == [("small", 2 * MIB), ("large", PAGE)]
    assert list(device.reserved.values()) == [18 * GIB, 18 * GIB + (-18 * GIB) % PAGE]


def test_expandable_segment_belongs_to_one_stream() -> None:
    device = VirtualDevice()
    allocator = expandable_allocator(device)
    allocator.free(allocator.alloc(30 * MIB))
    allocator.alloc(30 * MIB, SIDE)

    assert len(device.reserved) == 2
    assert [s["stream"] for s in allocator.snapshot()["segments"]] == [0, SIDE]


def test_only_missing_pages_are_mapped() -> None:
    device = VirtualDevice()
    allocator = expandable_allocator(device)
    low = allocator.alloc(15 * MIB)
    high = allocator.alloc(15 * MIB)
    allocator.free(high)
    with changes(allocator) as changed:
        assert allocator.alloc(26 * MIB) == high

    assert changed["reserved_bytes.all"] == PAGE
    assert low + 15 * MIB == high


def test_page_size_follows_the_large_segment_size() -> None:
    allocator = expandable_allocator(large_segment_size_bytes=32 * MIB)
    allocator.alloc(2 * MIB)
    assert segments(allocator) == [("large", 32 * MIB)]
    allocator.configure(Settings(expandable_segments=True))
    allocator.alloc(31 * MIB)  # grows the same reservation, whose pages stay as they are

    assert segments(allocator) == [("large", 64 * MIB)]


def test_rest_of_512_bytes_or_more_is_split_off_despite_the_limit() -> None:
    allocator = expandable_allocator(max_split_size_bytes=20 * MIB)
    allocator.alloc(PAGE - 512)
    ptr = allocator.alloc(30 * MIB)

    assert blocks(allocator) == [[(PAGE - 512, LIVE), (30 * MIB, LIVE), (10 * MIB + 512, FREE)]]
    assert current(allocator, "inactive_split") == 0
    assert allocator.statistics()["oversize_allocations.current"] == 1
    assert allocator.statistics()["oversize_segments.allocated"] == 0
    allocator.free(ptr)
    invariants.check(allocator)


def test_plain_blocks_are_split_like_expandable_ones_while_the_setting_is_on() -> None:
    allocator = DeviceCachingAllocator(VirtualDevice(), Settings())
    allocator.free(allocator.alloc(19 * MIB + 512))
    set_expandable(allocator, on=True)
    allocator.alloc(19 * MIB + 512)

    assert blocks(allocator) == [[(19 * MIB + 512, LIVE), (MIB - 512, FREE)]]
    assert current(allocator, "inactive_split") == 1


# Searching.


def test_unmapped_gaps_at_low_addresses_are_mapped_first() -> None:
    device = VirtualDevice()
    allocator = expandable_allocator(device)
    ptrs = [allocator.alloc(PAGE) for _ in range(4)]
    allocator.free(ptrs[1])
    allocator.empty_cache()
    assert segments(allocator) == [("large", PAGE), ("large", 2 * PAGE)]

    assert allocator.alloc(30 * MIB) == ptrs[3] + PAGE
    assert allocator.alloc(PAGE) == ptrs[1]
    assert segments(allocator) == [("large", 6 * PAGE)]


def test_free_blocks_on_both_sides_of_a_gap_are_merged_with_it() -> None:
    allocator = expandable_allocator()
    allocator.alloc(5 * MIB)
    wide = allocator.alloc(50 * MIB)
    allocator.alloc(PAGE)
    allocator.free(wide)
    for _ in range(2):  # The second call finds no whole page to release.
        allocator.empty_cache()
        assert blocks(allocator) == [
            [(5 * MIB, LIVE), (15 * MIB, FREE)],
            [(15 * MIB, FREE), (PAGE, LIVE), (5 * MIB, FREE)],
        ]

    with changes(allocator) as changed:
        assert allocator.alloc(50 * MIB) == wide
    assert changed["reserved_bytes.all"] == PAGE
    assert blocks(allocator) == [[(5 * MIB, LIVE), (50 * MIB, LIVE), (PAGE, LIVE), (5 * MIB, FREE)]]


def test_block_that_can_grow_less_is_preferred() -> None:
    allocator = expandable_allocator()
    hole = allocator.alloc(15 * MIB)
    fence = allocator.alloc(15 * MIB)
    assert blocks(allocator)[0][-1] == (10 * MIB, FREE)
    allocator.free(hole)

    # By size alone, the block of 10 MiB at the end would be the best fit.
    assert allocator.alloc(8 * MIB) == hole
    assert allocator.alloc(8 * MIB) == fence + 15 * MIB


def test_plain_and_expandable_blocks_are_searched_together() -> None:
    allocator = DeviceCachingAllocator(VirtualDevice(), Settings())
    plain = allocator.alloc(24 * MIB)
    set_expandable(allocator, on=True)
    ends, hole = allocator.alloc(30 * MIB), allocator.alloc(28 * MIB)
    allocator.alloc(21 * MIB)
    allocator.free(plain)
    allocator.free(hole)

    assert allocator.alloc(25 * MIB) == hole
    assert allocator.alloc(20 * MIB) == plain
    invariants.check(allocator)
    allocator.free(ends)


def test_larger_plain_block_can_be_preferred_to_an_expandable_one() -> None:
    allocator = DeviceCachingAllocator(VirtualDevice(), Settings())
    plain = allocator.alloc(30 * MIB)
    set_expandable(allocator, on=True)
    allocator.alloc(30 * MIB)  # Leaves 10 MiB, which could grow.
    allocator.free(plain)

    assert allocator.alloc(5 * MIB) == plain


def test_expandable_blocks_are_skipped_while_the_setting_is_off() -> None:
    device = VirtualDevice()
    allocator = expandable_allocator(device)
    live, freed = allocator.alloc(9 * MIB), allocator.alloc(PAGE)
    allocator.free(freed)
    set_expandable(allocator, on=False)
    plain = allocator.alloc(PAGE)

    assert list(device.held) == [plain]
    allocator.free(live)
    invariants.check(allocator)
    assert current(allocator, "segment") == 1
    set_expandable(allocator, on=True)
    assert allocator.alloc(9 * MIB) == live


def test_max_split_size_applies_to_expandable_blocks() -> None:
    allocator = expandable_allocator(max_split_size_bytes=40 * MIB)
    allocator.alloc(512)
    allocator.free(allocator.alloc(100 * MIB))

    with changes(allocator) as changed:
        ptr = allocator.alloc(30 * MIB)
    assert "reserved_bytes.all" not in changed, "memory is mapped, and the block before it is used"
    allocator.free(ptr)
    assert allocator.alloc(90 * MIB) == ptr


# Requirements.


def test_upstream_without_virtual_memory_is_refused() -> None:
    with pytest.raises(Unsupported, match="virtual memory"):
        DeviceCachingAllocator(Device(), Settings(expandable_segments=True))


def test_unsupported_page_size_is_refused_without_a_change() -> None:
    allocator = DeviceCachingAllocator(VirtualDevice(), Settings())
    with pytest.raises(Unsupported, match=r"11\.0 MiB") as caught:
        allocator.configure(Settings(expandable_segments=True, large_segment_size_bytes=11 * MIB))

    assert "large_segment_size_mb" in caught.value.hint
    assert allocator.settings == Settings()
    allocator.alloc(700)
    assert [s["is_expandable"] for s in allocator.snapshot()["segments"]] == [False]


def test_expandable_segments_work_on_the_simulated_device() -> None:
    with Work(settings=Settings(expandable_segments=True)) as work:
        free_bytes = work.gpu.memory_info().free_bytes
        side_stream = work.stream()
        ptr = work.allocator.alloc(30 * MIB, side_stream)
        small = work.allocator.alloc(700, side_stream)
        work.gpu.fill(ptr, 7, 30 * MIB, side_stream)
        work.busy(side_stream)
        assert free_bytes - work.gpu.memory_info().free_bytes == 42 * MIB
        work.allocator.free(ptr)
        work.allocator.empty_cache()
        assert work.gpu.query_stream(side_stream), "it was waited for"
        assert free_bytes - work.gpu.memory_info().free_bytes == 2 * MIB
        work.allocator.free(small)
        work.gpu.destroy_stream(side_stream)
        work.allocator.empty_cache()

        assert work.gpu.memory_info().free_bytes == free_bytes
