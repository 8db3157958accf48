"""Private pools with expandable segments."""

from __future__ import annotations

import pytest
from allocator import invariants
from allocator.device import MIB, Device
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
from cudakit.allocator.pools import MemPool

ELSEWHERE = 0x6F00_0000_0000


@pytest.mark.parametrize(
    ("size", "mapped_pages", "remaining"), [(10 * MIB - 512, 40, 40), (10 * MIB + 512, 40, 20)]
)
def test_30_capture_maps_pages_and_a_live_result_keeps_its_pages(
    size: int, mapped_pages: int, remaining: int
) -> None:
    allocator = expandable_allocator()
    with changes(allocator) as changed, allocator.capture() as graph:
        result = allocator.alloc(size)
        for _ in range(5):
            copy, new = allocator.alloc(size), allocator.alloc(size)
            allocator.free(copy)
            allocator.free(result)
            result = new
    assert changed["reserved_bytes.all"] == mapped_pages * MIB
    assert "segment.all" not in changed
    allocator.empty_cache()
    assert current(allocator, "reserved_bytes") == mapped_pages * MIB, "the graph may run again"
    graph.close()
    allocator.empty_cache()

    assert current(allocator, "reserved_bytes") == remaining * MIB
    invariants.check(allocator)


def test_41_pool_with_its_own_upstream_is_not_expandable() -> None:
    device = VirtualDevice()
    allocator, pool_device = expandable_allocator(device), Device(base=ELSEWHERE)
    with allocator.use_pool(MemPool(allocator, upstream=pool_device)):
        inside = allocator.alloc(MIB)
    device_block = allocator.alloc(MIB)

    is_expandable = {s["address"]: s["is_expandable"] for s in allocator.snapshot()["segments"]}
    assert is_expandable == {inside: False, device_block: True}
    assert pool_device.held == {inside: 2 * MIB}
    assert device.mapped == {device_block: 2 * MIB}


def test_41_max_split_size_applies_to_a_pool_with_its_own_upstream() -> None:
    allocator = expandable_allocator(max_split_size_bytes=40 * MIB)
    pool_device = Device(base=ELSEWHERE)
    pool = MemPool(allocator, upstream=pool_device)
    with allocator.use_pool(pool):
        allocator.free(allocator.alloc(100 * MIB))
        allocator.alloc(100 * MIB, SIDE)
    allocator.alloc(90 * MIB)
    with allocator.use_pool(pool):
        allocator.alloc(90 * MIB)
        allocator.free(allocator.alloc(30 * MIB))
        allocator.alloc(25 * MIB)

    is_expandable = {
        s["address"] in pool_device.held: [block["size"] // MIB for block in s["blocks"]]
        for s in allocator.snapshot()["segments"]
        if s["stream"] == 0 and s["total_size"] != 30 * MIB
    }
    assert is_expandable == {False: [90, 10], True: [100]}
    invariants.check(allocator)


def test_pools_have_separate_expandable_segments() -> None:
    device = VirtualDevice()
    allocator = expandable_allocator(device)
    pool = MemPool(allocator)
    allocator.free(allocator.alloc(9 * MIB))
    with allocator.use_pool(pool):
        allocator.free(allocator.alloc(9 * MIB))

    assert len(device.reserved) == 2
    assert {s["segment_pool_id"] for s in allocator.snapshot()["segments"]} == {(0, 0), pool.id}
    pool.close()
    assert len(device.reserved) == 1
    assert allocator.private_pools() == ()


def test_empty_expandable_segment_is_unreserved_with_its_pool() -> None:
    device = VirtualDevice(30 * MIB)
    allocator = expandable_allocator(device)
    pool = MemPool(allocator)
    live = allocator.alloc(9 * MIB)
    allocator.begin_capture()  # During a capture no memory is released.
    with allocator.use_pool(pool), pytest.raises(OutOfMemory):
        allocator.alloc(9 * MIB)
    allocator.end_capture()
    assert len(device.reserved) == 2
    pool.close()

    assert device.mapped == {live: PAGE}
    assert len(device.reserved) == 1


def test_no_split_pool_allocates_whole_pages() -> None:
    allocator = expandable_allocator()
    with allocator.use_pool(MemPool(allocator, no_split=True)):
        allocator.alloc(4 * MIB)
        allocator.alloc(4 * MIB)

    assert segments(allocator) == [("large", 2 * PAGE)]
    assert current(allocator, "allocated_bytes") == 2 * PAGE


def test_pool_lends_no_expandable_blocks() -> None:
    allocator = expandable_allocator(VirtualDevice(80 * MIB))
    pool = MemPool(allocator, use_on_oom=True)
    with allocator.use_pool(pool):
        allocator.free(allocator.alloc(40 * MIB))
    allocator.alloc(40 * MIB)

    with pytest.raises(OutOfMemory):
        allocator.alloc(30 * MIB)
    invariants.check(allocator)


def lender_of_both_kinds(allocator: DeviceCachingAllocator) -> tuple[MemPool, int]:
    """Create a pool with 50 MiB in a cached plain segment (returned) and 40 MiB in an expandable one."""
    pool = MemPool(allocator, use_on_oom=True)
    set_expandable(allocator, on=False)
    with allocator.use_pool(pool):
        plain_block = allocator.alloc(50 * MIB)
    set_expandable(allocator, on=True)
    with allocator.use_pool(pool):
        grown = allocator.alloc(40 * MIB)
    allocator.free(plain_block)
    allocator.free(grown)
    return pool, plain_block


def test_pool_lends_a_plain_block_instead_of_a_better_fitting_expandable_one() -> None:
    device = VirtualDevice(120 * MIB)
    allocator = expandable_allocator(device)
    pool, plain_block = lender_of_both_kinds(allocator)
    allocator.alloc(20 * MIB)
    earlier_statistics = allocator.statistics()
    device.calls.clear()

    assert allocator.alloc(30 * MIB) == plain_block
    assert len(pool.snapshot()) == 2
    assert "malloc" not in device.calls
    assert "unmap" not in device.calls
    statistics = allocator.statistics()
    for name in ("num_alloc_retries", "num_device_free", "num_sync_all_streams"):
        assert statistics[name] == earlier_statistics[name]
    invariants.check(allocator)


@pytest.mark.parametrize(
    ("size", "max_split", "expected_blocks"),
    [
        (49 * MIB, None, [(50 * MIB, LIVE)]),  # The rest would be 1 MiB, which is not split off.
        (49 * MIB - 512, None, [(49 * MIB - 512, LIVE), (MIB + 512, FREE)]),
        (40 * MIB, 40 * MIB, [(50 * MIB, LIVE)]),  # A block of this size is not split.
    ],
)
def test_lent_block_is_split_as_if_no_segment_were_expandable(
    size: int, max_split: int | None, expected_blocks: list[tuple[int, str]]
) -> None:
    allocator = expandable_allocator(VirtualDevice(120 * MIB), max_split_size_bytes=max_split)
    pool, plain_block = lender_of_both_kinds(allocator)
    allocator.alloc(20 * MIB)
    allocator.alloc(size)

    assert pool.snapshot()[0]["address"] == plain_block
    assert blocks(allocator)[0] == expected_blocks
    invariants.check(allocator)


def test_lent_block_does_not_change_the_split_of_expandable_segments() -> None:
    allocator = expandable_allocator(VirtualDevice(160 * MIB))
    pool, plain_block = lender_of_both_kinds(allocator)
    first = allocator.alloc(60 * MIB)
    assert allocator.alloc(30 * MIB) == plain_block
    allocator.free(first)
    allocator.alloc(59 * MIB + 512)

    assert len(pool.snapshot()) == 2
    assert blocks(allocator)[-1] == [(59 * MIB + 512, LIVE), (MIB - 512, FREE)]
    invariants.check(allocator)


def test_expandable_blocks_of_a_lender_are_skipped_while_the_setting_is_off() -> None:
    device = VirtualDevice(120 * MIB)
    allocator = expandable_allocator(device)
    pool, plain_block = lender_of_both_kinds(allocator)
    set_expandable(allocator, on=False)
    allocator.alloc(20 * MIB)

    assert allocator.alloc(30 * MIB) == plain_block
    with pytest.raises(OutOfMemory):
        allocator.alloc(40 * MIB)
    assert [segment["is_expandable"] for segment in pool.snapshot()] == [False, True]
    invariants.check(allocator)


def test_42_checkpoint_restores_expandable_segments() -> None:
    allocator = expandable_allocator()
    with allocator.use_pool(pool := MemPool(allocator)):
        ptrs = [allocator.alloc(size) for size in (8 * MIB, MIB, 30 * MIB, MIB, 9 * MIB)]
        for ptr in (ptrs[0], ptrs[3]):
            allocator.free(ptr)
        earlier_segments = allocator.snapshot()["segments"]
        state = allocator.checkpoint(pool)
        for ptr in (ptrs[1], ptrs[2], ptrs[4]):
            allocator.free(ptr)
        later = allocator.alloc(45 * MIB)
        restored = allocator.restore(state)

    assert restored.freed == (later,)
    assert set(restored.created) == {ptrs[1], ptrs[2], ptrs[4]}
    shape = [[(b["address"], b["size"], b["state"]) for b in s["blocks"]] for s in earlier_segments]
    segments = allocator.snapshot()["segments"]
    assert [[(b["address"], b["size"], b["state"]) for b in s["blocks"]] for s in segments] == shape
    invariants.check(allocator)
