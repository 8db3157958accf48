"""Out of memory and its error, in addition to the scenarios of tests/allocator_scenarios/limits.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from allocator import invariants
from allocator.device import GIB, MIB, Device
from allocator.summaries import blocks, segments
from allocator.virtual_device import VirtualDevice

from cudakit.allocator.allocator import DeviceCachingAllocator
from cudakit.allocator.oom import OutOfMemory
from cudakit.errors import UsageError
from cudakit.torch_rules.oom import OomReport
from cudakit.torch_rules.settings import Settings


def limited(memory_bytes: int, **more_settings: object) -> DeviceCachingAllocator:
    """Return an allocator with a limit of reserved bytes."""
    settings = Settings(memory_fraction=memory_bytes / (16 * GIB), **more_settings)  # type: ignore[arg-type]
    return DeviceCachingAllocator(Device(), settings)


def test_13_request_beyond_the_device_memory_says_so(allocator: DeviceCachingAllocator) -> None:
    live = allocator.alloc(MIB)
    words = r"Tried to allocate 800000000.00 GiB. GPU 0 has a total capacity of 16.00 GiB"
    with pytest.raises(OutOfMemory, match=words) as caught:
        allocator.alloc(800_000_000 * GIB)

    assert "the device has less memory" in caught.value.hint
    allocator.free(live)


def test_15_memory_fraction_limits_the_reserved_bytes(
    allocator: DeviceCachingAllocator, device: Device
) -> None:
    allocator.set_memory_fraction(0.5)
    allocator.free(allocator.alloc(int(0.499 * device.capacity)))
    allocator.empty_cache()

    with pytest.raises(OutOfMemory) as caught:
        allocator.alloc(device.capacity // 2 + 1)

    assert "8.00 GiB allowed" in caught.value.message
    assert "raise the memory fraction" in caught.value.hint
    assert "malloc" not in device.calls[-2:]


@pytest.mark.parametrize("max_split", [None, 1024 * MIB])
def test_16_observers_are_called_once_per_failure_and_can_take_a_snapshot(
    device: Device, max_split: int | None
) -> None:
    allocator = DeviceCachingAllocator(device, Settings(max_split_size_bytes=max_split))
    reports: list[tuple[OomReport, int]] = []
    allocator.on_out_of_memory(
        lambda report: reports.append((report, allocator.statistics()["num_ooms"]))
    )

    with pytest.raises(OutOfMemory) as caught:
        allocator.alloc(4 << 40)

    assert reports == [(caught.value.report, 1)]
    assert reports[0][0].segment_bytes == 4 << 40


@pytest.mark.parametrize("search_again", [False, True])
def test_22_search_again_finds_memory_freed_by_the_synchronization(search_again: bool) -> None:
    device = Device(20 * MIB)
    allocator = DeviceCachingAllocator(device, search_again=search_again)
    pending, live = allocator.alloc(9 * MIB), allocator.alloc(6 * MIB)
    allocator.record_use(pending, 11)
    allocator.free(pending)
    device.recorded[11] = 100  # The other stream has many later operations.

    if search_again:
        assert allocator.alloc(9 * MIB) == pending
        assert allocator.statistics()["num_ooms"] == 0
    else:
        with pytest.raises(OutOfMemory) as caught:
            allocator.alloc(9 * MIB)
        assert "search_again=True" in caught.value.hint
    assert allocator.counters()["num_sync_rescues"] == search_again
    allocator.free(live)


def test_throw_on_cudamalloc_oom_rejects_a_request_beyond_the_limit() -> None:
    allocator = limited(120 * MIB, throw_on_cudamalloc_oom=True)
    allocator.free(allocator.alloc(100 * MIB))

    with pytest.raises(OutOfMemory):
        allocator.alloc(110 * MIB)

    assert allocator.counters()["num_oom_rejections"] == 1
    assert allocator.statistics()["num_alloc_retries"] == 0
    assert segments(allocator) == [("large", 100 * MIB)]


@pytest.mark.parametrize("uses_expandable", [False, True])
def test_rejection_calls_no_driver_and_counts_no_oom(uses_expandable: bool) -> None:
    device = VirtualDevice(120 * MIB)
    settings = Settings(
        memory_fraction=0.5, throw_on_cudamalloc_oom=True, expandable_segments=uses_expandable
    )
    allocator = DeviceCachingAllocator(device, settings)
    cached = allocator.alloc(40 * MIB)
    allocator.free(cached)
    earlier_statistics = allocator.statistics()
    device.calls.clear()
    with pytest.raises(OutOfMemory):
        allocator.alloc(50 * MIB)

    assert set(device.calls) == {"memory_info"}
    assert allocator.statistics() == earlier_statistics
    assert allocator.counters()["num_oom_rejections"] == 1
    assert allocator.alloc(40 * MIB) == cached
    allocator.reset_sums()
    assert allocator.counters()["num_oom_rejections"] == 0


def test_rejection_calls_the_rejection_observers(tmp_path: Path) -> None:
    allocator = limited(60 * MIB, throw_on_cudamalloc_oom=True)
    allocator.alloc(40 * MIB)
    rejected: list[OomReport] = []
    failed: list[OomReport] = []
    allocator.on_rejection(rejected.append)
    allocator.on_rejection(
        lambda _: allocator.counters()
    )  # This call needs the guard, which is not held.
    allocator.on_out_of_memory(failed.append)
    allocator.save_on_out_of_memory(tmp_path / "oom.pickle")
    with pytest.raises(OutOfMemory) as caught:
        allocator.alloc(30 * MIB)

    (report,) = rejected
    assert report is caught.value.report
    assert (report.device, report.segment_bytes) == (0, 30 * MIB)
    assert (report.reserved_bytes, report.device_total_bytes) == (40 * MIB, 16 * GIB)
    assert failed == []
    assert list(tmp_path.iterdir()) == []


def test_driver_failure_is_not_a_rejection() -> None:
    device = Device(60 * MIB)
    settings = Settings(memory_fraction=0.9, throw_on_cudamalloc_oom=True)
    allocator = DeviceCachingAllocator(device, settings)
    device.held[1] = 40 * MIB  # Memory of another process.
    reports: list[str] = []
    allocator.on_rejection(lambda _: reports.append("rejected"))
    allocator.on_out_of_memory(lambda _: reports.append("failed"))
    with pytest.raises(OutOfMemory):
        allocator.alloc(50 * MIB)

    assert reports == ["failed"]
    assert allocator.statistics()["num_ooms"] == 1
    assert allocator.counters()["num_oom_rejections"] == 0


def test_garbage_is_collected_before_a_request_is_rejected() -> None:
    allocator = limited(120 * MIB, throw_on_cudamalloc_oom=True, garbage_collection_threshold=0.5)
    for ptr in [allocator.alloc(40 * MIB) for _ in range(2)]:
        allocator.free(ptr)

    allocator.alloc(80 * MIB)

    assert allocator.counters()["num_oom_rejections"] == 0


def test_no_rejection_without_a_limit() -> None:
    allocator = DeviceCachingAllocator(Device(60 * MIB), Settings(throw_on_cudamalloc_oom=True))
    with pytest.raises(OutOfMemory):
        allocator.alloc(70 * MIB)

    assert allocator.counters()["num_oom_rejections"] == 0
    assert allocator.statistics()["num_ooms"] == 1


def test_refused_segment_does_not_count_against_the_limit() -> None:
    device = Device(200 * MIB)
    allocator = DeviceCachingAllocator(device, Settings(memory_fraction=0.5))
    device.held[1] = 150 * MIB  # Memory of another process.
    with pytest.raises(OutOfMemory) as caught:
        allocator.alloc(90 * MIB)
    del device.held[1]

    allocator.alloc(90 * MIB)
    assert caught.value.report is not None
    assert caught.value.report.elsewhere_bytes == 150 * MIB


def test_shortage_helper_can_free_memory_for_the_request(device: Device) -> None:
    allocator = DeviceCachingAllocator(device)
    spare_blocks = [allocator.alloc(30 * MIB)]

    def give_up() -> bool:
        if not spare_blocks:
            return False
        allocator.free(spare_blocks.pop())
        return True

    spare_block = spare_blocks[0]
    allocator.on_shortage(give_up)

    assert allocator.alloc(30 * MIB) == spare_block
    assert allocator.alloc(30 * MIB) != spare_block


def test_oom_report_lists_where_the_memory_is() -> None:
    device = Device(60 * MIB)
    allocator = DeviceCachingAllocator(device)
    allocator.record_history(context="state")
    large = [allocator.alloc(9 * MIB) for _ in range(2)]
    pin = allocator.alloc(700)
    allocator.free(large[0])
    other = allocator.alloc(9 * MIB, 12)
    filler = allocator.alloc(9 * MIB, 12)
    allocator.free(other)

    with pytest.raises(OutOfMemory) as caught:
        allocator.alloc(19 * MIB)

    report = caught.value.report
    assert report is not None
    assert {(s.stream, s.is_small, s.free_bytes) for s in report.stream_pools} == {
        (0, True, 2 * MIB - 1024),
        (0, False, 11 * MIB),
        (12, False, 11 * MIB),
    }
    assert report.pins[0].address == pin
    assert report.pins[0].frames[0]["filename"] == __file__
    assert report.device_free_bytes == 18 * MIB
    assert report.elsewhere_bytes == 0
    allocator.free(filler)
    invariants.check(allocator)


def test_oom_hint_names_the_stream_whose_cache_would_suffice() -> None:
    allocator = DeviceCachingAllocator(Device(20 * MIB))
    blocks = [allocator.alloc(9 * MIB, 12), allocator.alloc(6 * MIB, 12)]
    allocator.free(blocks[0])

    with pytest.raises(OutOfMemory) as caught:
        allocator.alloc(8 * MIB)

    assert "a block of 9.00 MiB is cached in the large blocks on stream 0xc" in caught.value.hint


def test_oom_hint_counts_the_blocks_that_are_too_small() -> None:
    allocator = DeviceCachingAllocator(Device(20 * MIB))
    live_blocks = [allocator.alloc(4 * MIB) for _ in range(5)]
    allocator.free(live_blocks[0])
    allocator.free(live_blocks[2])

    with pytest.raises(OutOfMemory) as caught:
        allocator.alloc(8 * MIB)

    assert "8.00 MiB is free, but the largest free block is 4.00 MiB" in caught.value.hint
    assert blocks(allocator)[0][0] == (4 * MIB, "inactive")


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
