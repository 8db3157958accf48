"""Expandable segments: mapping of pages and search of blocks."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from allocator.summaries import actions, blocks, changes, current, segments
from allocator.virtual_device import VirtualDevice
from allocator.work import Work

from cudakit.allocator.allocator import DeviceCachingAllocator
from cudakit.allocator.oom import OutOfMemory
from cudakit.allocator.pools import MemPool
from cudakit.errors import CudaError, Unsupported
from cudakit.memory.history import reconstruct
from cudakit.memory.lifetimes import Contradictions, segment_history
from cudakit.memory.load import load
from cudakit.memory.snapshot import Snapshot
from cudakit.torch_rules.setting_keys import Reserve
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


# --- Every driver call of expandable segments can fail: nothing leaks, and statistics stay right ---

CAPACITY = 160 * MIB
EXPANDING = Settings(expandable_segments=True)
SETTINGS = (
    EXPANDING,
    replace(EXPANDING, memory_fraction=0.75, garbage_collection_threshold=0.4),
    replace(EXPANDING, max_split_size_bytes=20 * MIB),
)


def program(allocator: DeviceCachingAllocator, device: VirtualDevice) -> list[CudaError]:
    """Run all kinds of operations, continue after failures, and return the failures."""
    live: dict[str, int] = {}
    failures: list[CudaError] = []
    settings = allocator.settings

    def do(operation: str, name: str = "", size: int = 0, stream: int = 0) -> None:
        try:
            if operation == "alloc":
                live[name] = allocator.alloc(size, stream)
            elif operation == "switch":
                allocator.configure(replace(settings, expandable_segments=bool(size)))
            elif operation == "empty":
                allocator.empty_cache()
            elif name in live:
                allocator.free(live.pop(name), stream or None)
        except CudaError as error:
            failures.append(error)
        invariants.check(allocator)

    do("alloc", "a", 9 * MIB)
    do("alloc", "b", 700)
    do("alloc", "c", 30 * MIB)
    do("alloc", "d", 22 * MIB, 12)
    do("free", "c", stream=11)
    do("empty")
    do("switch")
    do("alloc", "e", 20 * MIB)
    do("free", "e")
    do("switch", size=1)
    do("alloc", "f", 44 * MIB)
    do("free", "a")
    device.finish(11)
    do("alloc", "g", 130 * MIB)
    do("free", "f")
    do("alloc", "h", 90 * MIB, 12)
    do("empty")
    for name in "abcdefgh":
        do("free", name)
    return failures


@pytest.mark.parametrize("settings", SETTINGS)
def test_failed_driver_call_is_reported_and_leaks_nothing(settings: Settings) -> None:
    device = VirtualDevice(CAPACITY)
    expected = program(DeviceCachingAllocator(device, settings), device)
    assert {"map", "unmap", "reserve", "malloc", "free"} <= set(device.calls)
    failed = set()
    first = len(device_and_allocator(settings)[0].calls)
    for fail_at in range(first + 1, len(device.calls) + 1):
        failing, allocator = device_and_allocator(settings)
        failing.fail_at = fail_at
        failures = program(allocator, failing)
        allocator.close()

        invariants.check(allocator)
        assert (failing.held, failing.mapped, failing.reserved) == ({}, {}, {})
        assert failing.events == {}
        assert allocator.statistics()["reserved_bytes.all.current"] == 0
        name = failing.calls[fail_at - 1]
        reported_errors = [error for error in failures if error is failing.error]
        assert reported_errors or name in ("record", "event"), name
        assert all(error.code in (2, 999) for error in failures)
        failed.add(name)
    assert {"map", "unmap", "reserve", "unreserve", "sync_stream"} <= failed
    assert {error.code for error in expected} == {2}


def device_and_allocator(settings: Settings) -> tuple[VirtualDevice, DeviceCachingAllocator]:
    device = VirtualDevice(CAPACITY)
    return device, DeviceCachingAllocator(device, settings)


# --- Expandable segments in traces, snapshots and memviz -------------------------------------------

CURVES = ("requested", "allocated", "active", "reserved")


@pytest.fixture
def allocator() -> DeviceCachingAllocator:
    return DeviceCachingAllocator(VirtualDevice(256 * MIB), EXPANDING)


def trace(allocator: DeviceCachingAllocator) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = allocator.snapshot()["device_traces"][0]
    return entries


def loaded(allocator: DeviceCachingAllocator, folder: Path) -> Snapshot:
    path = folder / "snapshot.pkl"
    path.write_bytes(pickle.dumps(allocator.snapshot()))
    return load(str(path))


def take(allocator: DeviceCachingAllocator, size: int) -> int:
    return allocator.alloc(size)


def empty(allocator: DeviceCachingAllocator) -> None:
    allocator.empty_cache()


def check_replay(allocator: DeviceCachingAllocator, folder: Path) -> None:
    """Undo the trace from the final state: it must be consistent and begin empty."""
    snapshot, statistics = loaded(allocator, folder), allocator.statistics()
    (device,) = snapshot.devices
    replayed = reconstruct(snapshot, device)
    assert device.warnings == ()
    assert replayed.inconsistencies == Contradictions(0, 0, 0, 0)
    assert replayed.begins_complete
    for name in CURVES:
        curve = getattr(replayed.curves, name)
        assert curve[-1] == statistics[f"{name}_bytes.all.current"], name
        assert curve.max() == statistics[f"{name}_bytes.all.peak"], name


def test_43_mapping_and_unmapping_are_in_the_trace(allocator: DeviceCachingAllocator) -> None:
    allocator.record_history()
    ptr = take(allocator, 30 * MIB)
    allocator.free(ptr)
    empty(allocator)

    entries = trace(allocator)
    assert [(e["action"], e["addr"], e["size"]) for e in entries] == [
        ("segment_map", ptr, 2 * PAGE),
        ("alloc", ptr, 30 * MIB),
        ("free_requested", ptr, 30 * MIB),
        ("free_completed", ptr, 30 * MIB),
        ("segment_unmap", ptr, 2 * PAGE),
    ]
    assert entries[0]["frames"][0]["name"] == "take"
    assert entries[-1]["frames"][0]["name"] == "empty"


def test_unmap_event_without_a_stack_has_the_stack_of_the_first_mapping(
    allocator: DeviceCachingAllocator,
) -> None:
    allocator.record_history(context="alloc")
    allocator.free(take(allocator, 30 * MIB))
    empty(allocator)

    assert trace(allocator)[-1]["frames"][0]["name"] == "take"


def test_each_mapped_range_is_a_segment(allocator: DeviceCachingAllocator) -> None:
    allocator.record_history("state")
    low, middle, high = (take(allocator, n * PAGE + MIB) for n in (1, 2, 1))
    allocator.free(middle)
    empty(allocator)

    first, second = allocator.snapshot()["segments"]
    assert (first["address"], first["total_size"]) == (low, 2 * PAGE)
    begin = low + 3 * PAGE
    assert (second["address"], second["total_size"]) == (begin, 2 * PAGE)
    assert [b["address"] for b in second["blocks"]] == [begin, high, high + PAGE + MIB]
    for segment in (first, second):
        assert segment["is_expandable"] is True
        assert segment["segment_type"] == "large"
        assert segment["allocated_size"] == PAGE + MIB
    assert [bool(segment["frames"]) for segment in (first, second)] == [True, False]


def test_remapped_gap_joins_its_ranges_into_one_segment(allocator: DeviceCachingAllocator) -> None:
    ptrs = [take(allocator, PAGE) for _ in range(3)]
    for ptr in ptrs[:2]:
        allocator.free(ptr)
    empty(allocator)
    assert [s["address"] for s in allocator.snapshot()["segments"]] == ptrs[2:]
    take(allocator, PAGE)
    assert [s["address"] for s in allocator.snapshot()["segments"]] == [ptrs[0], ptrs[2]]
    take(allocator, PAGE)

    (segment,) = allocator.snapshot()["segments"]
    assert (segment["address"], segment["total_size"]) == (ptrs[0], 3 * PAGE)
    assert [block["address"] for block in segment["blocks"]] == ptrs


def test_47_memviz_replays_the_trace_to_the_ranges_of_the_snapshot(
    allocator: DeviceCachingAllocator, tmp_path: Path
) -> None:
    allocator.record_history()
    blocks = [allocator.alloc(size) for size in (700, 9 * MIB, 30 * MIB, PAGE, 3000)]
    allocator.free(blocks[2])
    allocator.free(blocks[1], 11)
    allocator.empty_cache()
    with pytest.raises(OutOfMemory):
        allocator.alloc(240 * MIB)
    allocator.alloc(PAGE, 12)
    allocator.free(allocator.alloc(40 * MIB), 11)

    check_replay(allocator, tmp_path)
    snapshot = loaded(allocator, tmp_path)
    (device,) = snapshot.devices
    assert device.segments.expandable.all()
    runs = segment_history(device).expandable_at(len(device.events))
    assert runs.address.tolist() == device.segments.address.tolist()
    assert runs.size.tolist() == device.segments.size.tolist()


@pytest.mark.parametrize("seed", range(4))
def test_47_memviz_replays_a_long_run_with_expandable_and_plain_segments(
    allocator: DeviceCachingAllocator, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    live: list[int] = []
    allocator.record_history(context=None)
    for step in range(400):
        if step % 100 == 99:
            allocator.configure(Settings(expandable_segments=step % 200 == 199))
            allocator.empty_cache()
        if live and rng.random() < 0.45:
            allocator.free(live.pop(rng.randrange(len(live))), rng.choice((None, 11)))
            continue
        try:
            small = rng.random() < 0.5
            size = rng.randint(1, MIB) if small else 512 * rng.randint(2050, 80000)
            live.append(allocator.alloc(size, rng.choice((0, 12))))
        except OutOfMemory:
            allocator.free(live.pop())

    check_memory(allocator, tmp_path)


def check_memory(allocator: DeviceCachingAllocator, folder: Path) -> None:
    """Like ``check_replay``, except the sizes of freed blocks, which depend on a setting that has changed."""
    snapshot, statistics = loaded(allocator, folder), allocator.statistics()
    replayed = reconstruct(snapshot, snapshot.devices[0])
    assert replayed.inconsistencies == Contradictions(0, 0, 0, 0)
    assert replayed.begins_complete
    for name in ("requested", "reserved"):
        curve = getattr(replayed.curves, name)
        assert curve[-1] == statistics[f"{name}_bytes.all.current"], name
        assert curve.max() == statistics[f"{name}_bytes.all.peak"], name


def test_memviz_reads_a_snapshot_of_the_simulated_gpu(tmp_path: Path) -> None:
    with Work(settings=EXPANDING) as work:
        work.allocator.record_history()
        other = work.stream()
        ptr = work.allocator.alloc(30 * MIB)
        work.allocator.alloc(700, other)
        work.busy(other)
        work.allocator.free(ptr, other)
        work.allocator.empty_cache()
        work.allocator.alloc(9 * MIB)

        assert actions(work.allocator).count("segment_unmap") == 1
        check_replay(work.allocator, tmp_path)


# --- Private pools with expandable segments --------------------------------------------------------

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


# --- Expandable segments: out of memory, and release of pages --------------------------------------

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
