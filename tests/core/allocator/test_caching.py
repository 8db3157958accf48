"""Scenarios 1 to 12 of PyTorch's allocator: blocks, statistics, errors."""

from __future__ import annotations

import random

import numpy as np
import pytest
from core.allocator import law
from core.allocator.device import MIB, Device
from core.allocator.watching import blocks, changes, current, segments

from cudakit.core.allocator.allocator import CachingAllocator
from cudakit.core.allocator.state import InvalidPointer, InvalidSize
from cudakit.errors import Unsupported
from cudakit.torch_rules.settings import Settings

FREE, LIVE = "inactive", "active_allocated"


def test_1_one_byte_takes_a_block_of_512_bytes_in_a_segment_of_2_mib(
    allocator: CachingAllocator,
) -> None:
    with changes(allocator) as taken:
        ptr = allocator.alloc(1)
    with changes(allocator) as given:
        allocator.free(ptr)

    both = {
        "allocation": 1,
        "allocated_bytes": 512,
        "active": 1,
        "active_bytes": 512,
        "requested_bytes": 1,
        "inactive_split": 1,
        "inactive_split_bytes": 2 * MIB - 512,
    }
    kept = {"segment": 1, "reserved_bytes": 2 * MIB}
    kinds = ("all", "small_pool")
    assert taken == {f"{m}.{k}": v for m, v in (both | kept).items() for k in kinds}
    assert given == {f"{m}.{k}": -v for m, v in both.items() for k in kinds}


def test_2_zero_bytes_return_address_0_and_are_not_counted(
    allocator: CachingAllocator, device: Device
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
    allocator: CachingAllocator, offset: int, words: str
) -> None:
    first, _ = allocator.alloc(512), allocator.alloc(100 << 10)
    allocator.free(first)
    wrong = first + (1024 if offset == 4096 else offset)

    with changes(allocator) as changed, pytest.raises(InvalidPointer, match=words) as caught:
        allocator.free(wrong)

    assert changed == {}
    assert hex(wrong) in caught.value.message
    assert [free.ptr for free in allocator.invalid_frees()] == [wrong]
    assert allocator.counters()["num_invalid_frees"] == 1


def test_2_record_use_of_an_unallocated_address_is_refused(allocator: CachingAllocator) -> None:
    with pytest.raises(InvalidPointer, match="no segment"):
        allocator.record_use(12345, 1)


def test_3_sums_of_freed_bytes_continue_after_empty_cache(allocator: CachingAllocator) -> None:
    ptr = allocator.alloc(1024)
    assert current(allocator, "active_bytes") == 1024
    allocator.free(ptr)
    allocator.empty_cache()

    statistics = allocator.statistics()
    assert statistics["active_bytes.all.freed"] == 1024
    assert statistics["active_bytes.all.current"] == 0
    assert statistics["num_sync_all_streams"] == 1
    assert statistics["num_device_free"] == 1


@pytest.mark.parametrize(
    ("size", "segment", "kind"),
    [
        (1, 2, "small"),
        (512, 2, "small"),
        (513, 2, "small"),
        (MIB, 2, "small"),
        (MIB + 512, 20, "large"),
        (10 * MIB - 512, 20, "large"),
        (10 * MIB, 10, "large"),
        (10 * MIB + 512, 12, "large"),
        (84 * MIB, 84, "large"),
        (100 * MIB + 1, 102, "large"),
    ],
)
def test_4_segment_size_follows_its_first_request(
    allocator: CachingAllocator, size: int, segment: int, kind: str
) -> None:
    allocator.alloc(size)

    assert segments(allocator) == [(kind, segment * MIB)]


def test_5_two_blocks_of_1_mib_share_a_segment(allocator: CachingAllocator) -> None:
    counts = []
    for _ in range(3):
        allocator.alloc(MIB)
        counts.append(len(segments(allocator)))

    assert counts == [1, 1, 2]


def test_6_large_block_is_split_if_more_than_1_mib_is_left(
    allocator: CachingAllocator,
) -> None:
    allocator.free(allocator.alloc(9 * MIB))
    with changes(allocator) as whole:
        ptr = allocator.alloc(19 * MIB)
    allocator.free(ptr)
    with changes(allocator) as parted:
        allocator.alloc(19 * MIB - 512)

    assert whole["allocated_bytes.all"] == 20 * MIB
    assert whole["requested_bytes.all"] == 19 * MIB
    assert "inactive_split.all" not in whole
    assert parted["inactive_split_bytes.all"] == MIB + 512


def test_7_adjacent_free_blocks_are_merged(allocator: CachingAllocator) -> None:
    a, b, c = (allocator.alloc(512) for _ in range(3))
    found = []
    for ptr in (b, a, c):
        allocator.free(ptr)
        found.append(
            (current(allocator, "inactive_split"), current(allocator, "inactive_split_bytes"))
        )

    assert found == [(2, 2 * MIB - 1024), (2, 2 * MIB - 512), (0, 0)]
    assert blocks(allocator) == [[(2 * MIB, FREE)]]


@pytest.mark.parametrize(
    ("kept", "layout"),
    [
        ((5,), [(2560, FREE), (512, LIVE), (2 * MIB - 3072, FREE)]),
        (
            (5, 8),
            [(2560, FREE), (512, LIVE), (1024, FREE), (512, LIVE), (2 * MIB - 4608, FREE)],
        ),
        ((5, 6), [(2560, FREE), (512, LIVE), (512, LIVE), (2 * MIB - 3584, FREE)]),
    ],
)
def test_7_live_blocks_separate_free_blocks(
    allocator: CachingAllocator, kept: tuple[int, ...], layout: list[tuple[int, str]]
) -> None:
    held = [allocator.alloc(512) for _ in range(11)]
    for number, ptr in enumerate(held):
        if number not in kept:
            allocator.free(ptr)

    assert blocks(allocator) == [layout]


def test_8_best_fit_is_the_smallest_block_at_the_lowest_address(
    allocator: CachingAllocator,
) -> None:
    held = [allocator.alloc(size) for size in (1024, 512, 1024, 512, 2048, 512)]
    low, high, large = held[0], held[2], held[4]
    for ptr in (high, large, low):
        allocator.free(ptr)

    assert allocator.alloc(1024) == low
    assert allocator.alloc(1500) == large
    assert (512, FREE) in blocks(allocator)[0]


def test_9_reset_of_peaks_and_sums(allocator: CachingAllocator) -> None:
    def bytes_now() -> list[int]:
        found = allocator.statistics()
        return [
            found[f"allocated_bytes.all.{part}"]
            for part in ("current", "peak", "allocated", "freed")
        ]

    allocator.free(allocator.alloc(MIB))
    small = allocator.alloc(512)
    assert bytes_now() == [512, MIB, MIB + 512, MIB]
    allocator.reset_peaks()
    assert bytes_now()[1] == 512
    allocator.reset_sums()
    assert bytes_now() == [512, 512, 0, 0]
    allocator.free(small)
    assert bytes_now() == [0, 512, 0, 512]


def test_10_growing_tensors_on_two_devices() -> None:
    both = [CachingAllocator(Device()), CachingAllocator(Device(), device=1)]
    live: list[tuple[CachingAllocator, int]] = []

    def take(elements: int) -> None:
        for allocator in both:
            live.append((allocator, allocator.alloc(4 * elements)))
            law.check(allocator)

    for elements in (1, 10 * 20, 200 * 300 * 2000):
        take(elements)
    for i in range(1, 18):
        take(i * 4 * i)
        both[i % 2].reset_peaks()
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

    for allocator in both:
        check_end(allocator)


def check_end(allocator: CachingAllocator) -> None:
    before = allocator.statistics()
    assert before["allocated_bytes.all.current"] == 0
    allocator.empty_cache()
    after = allocator.statistics()
    assert after["num_sync_all_streams"] == before["num_sync_all_streams"] + 1
    assert after["num_device_alloc"] == before["num_device_alloc"] == after["num_device_free"]
    assert after["reserved_bytes.all.peak"] == before["reserved_bytes.all.peak"]
    law.check(allocator)


def test_11_live_allocations_of_a_random_run_never_overlap(allocator: CachingAllocator) -> None:
    rng = random.Random(123)
    live: dict[int, int] = {}
    for _ in range(3000):
        action = rng.choices(("alloc", "free", "empty"), (1, 1, 0.1))[0]
        if action == "alloc" and sum(live.values()) < 100 * MIB:
            size = rng.randint(2 * MIB, 20 * MIB)
            ptr = allocator.alloc(size)
            assert all(ptr + size <= p or p + s <= ptr for p, s in live.items())
            live[ptr] = size
        elif action == "free" and live:
            ptr = rng.choice(list(live))
            del live[ptr]
            allocator.free(ptr)
        elif action == "empty":
            allocator.empty_cache()
        assert current(allocator, "requested_bytes") == sum(live.values())


def test_12_without_caching_each_request_is_a_driver_call_and_not_counted(
    allocator: CachingAllocator, device: Device
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


def test_20_divisions_round_up_until_they_are_reset(allocator: CachingAllocator) -> None:
    def taken(size: int, *divisions: int) -> int:
        slots = (divisions * 16)[:16] if divisions else (0,) * 16
        allocator.configure(Settings(roundup_power2_divisions=slots))
        with changes(allocator) as changed:
            allocator.alloc(size)
        assert changed["requested_bytes.all"] == size
        return changed["active_bytes.all"]

    assert taken(84 * MIB) == 84 * MIB
    assert taken(84 * MIB, 4) == 96 * MIB
    assert taken(84 * MIB, 8) == 88 * MIB
    assert taken(400 * MIB, 2) == 512 * MIB
    assert taken(1200, 4) == 1536


def test_driver_call_may_run_without_the_lock(device: Device) -> None:
    allocator = CachingAllocator(device, Settings(release_lock_on_cudamalloc=True))

    with changes(allocator) as changed:
        allocator.alloc(84 * MIB)

    assert changed["active_bytes.all"] == 84 * MIB


def test_26_streams_have_separate_segments(allocator: CachingAllocator) -> None:
    allocator.free(allocator.alloc(MIB, 11))
    allocator.alloc(MIB, 12)

    assert current(allocator, "segment") == 2


def test_legacy_handle_is_the_default_stream(allocator: CachingAllocator) -> None:
    first = allocator.alloc(MIB, 0)
    allocator.free(first)

    assert allocator.alloc(MIB, 1) == first


def test_numpy_size_is_recorded_as_an_int(
    allocator: CachingAllocator,
) -> None:
    allocator.alloc(np.int64(700))

    (segment,) = allocator.snapshot()["segments"]
    assert type(segment["requested_size"]) is int


@pytest.mark.parametrize(("size", "error"), [(-1, InvalidSize), (1.5, TypeError), ("1", TypeError)])
def test_alloc_refuses_a_size_that_is_not_a_nonnegative_integer(
    allocator: CachingAllocator, size: int, error: type[Exception]
) -> None:
    with pytest.raises(error):
        allocator.alloc(size)


def test_unsupported_backend_is_refused(device: Device) -> None:
    with pytest.raises(Unsupported, match="cudaMallocAsync"):
        CachingAllocator(device, Settings(backend="cudaMallocAsync"))


def test_close_releases_unused_memory(device: Device) -> None:
    allocator = CachingAllocator(device)
    kept = allocator.alloc(MIB)
    other = allocator.alloc(30 * MIB)
    allocator.record_use(other, 11)
    allocator.free(other)

    allocator.close()

    assert list(device.held) == [kept]
    assert device.events == {}
