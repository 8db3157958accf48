from __future__ import annotations

import json
import pickle

import pytest
from allocator.device import GIB, MIB
from allocator.pinned.host import Host

from cudakit.allocator.allocator import InvalidPointer, InvalidSize
from cudakit.allocator.pinned import CachingHostAllocator, OutOfPinnedMemory
from cudakit.errors import Unsupported
from cudakit.torch_rules.settings import Settings

KIB = 1024


def sizes(pool: CachingHostAllocator) -> list[int]:
    return [segment["size"] for segment in pool.snapshot()["host_segments"]]


@pytest.mark.parametrize(
    ("requested", "size"), [(1, 1), (3, 4), (512, 512), (513, 1024), (3 * MIB, 4 * MIB)]
)
def test_request_is_rounded_to_a_power_of_two(
    pool: CachingHostAllocator, requested: int, size: int
) -> None:
    pool.alloc(requested)

    assert sizes(pool) == [size]


def test_zero_bytes_return_address_0(pool: CachingHostAllocator, host: Host) -> None:
    assert pool.alloc(0) == 0
    pool.free(0)

    assert host.calls == []


def test_alloc_of_a_negative_size_raises_invalid_size(pool: CachingHostAllocator) -> None:
    with pytest.raises(InvalidSize, match="cannot allocate -1 bytes"):
        pool.alloc(-1)


def test_block_freed_last_serves_the_next_request_of_its_bin(
    pool: CachingHostAllocator, host: Host
) -> None:
    first, second = pool.alloc(3000), pool.alloc(4096)
    pool.free(first)
    pool.free(second)

    assert pool.alloc(2049) == second
    assert pool.alloc(4000) == first
    assert host.calls == ["malloc", "malloc"]


def test_block_of_a_larger_bin_does_not_serve_a_smaller_one(pool: CachingHostAllocator) -> None:
    large = pool.alloc(4 * GIB)
    pool.free(large)

    assert pool.alloc(10 * KIB) != large


def test_request_above_the_threshold_is_rounded_to_512_bytes(host: Host) -> None:
    pool = CachingHostAllocator(host, Settings(pinned_max_round_threshold_bytes=MIB))
    for size in (MIB - 1, MIB + 1, 3 * MIB + 100):
        pool.alloc(size)

    assert sizes(pool) == [MIB, MIB + 512, 3 * MIB + 512]


def test_unrounded_block_does_not_serve_a_larger_request(host: Host) -> None:
    pool = CachingHostAllocator(host, Settings(pinned_max_round_threshold_bytes=MIB))
    small, large = pool.alloc(150 * MIB), pool.alloc(220 * MIB)
    pool.free(large)
    pool.free(small)

    assert pool.alloc(200 * MIB) == large
    assert pool.alloc(200 * MIB) != small
    assert pool.alloc(140 * MIB) == small


def test_block_above_the_cached_size_is_released_at_its_free(host: Host) -> None:
    pool = CachingHostAllocator(host, Settings(pinned_max_cached_size_bytes=2 * MIB))
    for ptr in (pool.alloc(2 * MIB), pool.alloc(2 * MIB + 1)):
        pool.free(ptr)

    assert sizes(pool) == [2 * MIB]
    assert pool.statistics()["num_host_free"] == 1


def test_block_is_reused_after_every_stream_that_uses_it(
    pool: CachingHostAllocator, host: Host
) -> None:
    block = pool.alloc(MIB)
    pool.record_use(block, 11)
    pool.record_use(block, 12)
    pool.free(block)
    host.finish(11)
    assert pool.waiting() == {11: MIB, 12: MIB}
    assert pool.alloc(MIB) != block
    host.finish(12)

    assert pool.alloc(MIB) == block
    assert pool.waiting() == {}


def test_pending_event_delays_later_events_of_the_queue(
    pool: CachingHostAllocator, host: Host
) -> None:
    slow, fast = pool.alloc(MIB), pool.alloc(MIB)
    pool.record_use(slow, 11)
    pool.record_use(fast, 12)
    pool.free(slow)
    pool.free(fast)
    host.finish(12)

    assert pool.alloc(MIB) not in (slow, fast)
    host.finish(11)
    assert {pool.alloc(MIB), pool.alloc(MIB)} == {slow, fast}


def test_empty_cache_does_not_wait(pool: CachingHostAllocator, host: Host) -> None:
    live, pending, idle = pool.alloc(MIB), pool.alloc(MIB), pool.alloc(MIB)
    pool.record_use(pending, 11)
    pool.free(pending)
    pool.free(idle)

    pool.empty_cache()

    assert list(host.held) == [live, pending]
    assert "sync_event" not in host.calls


def test_invalid_free_is_refused_and_counted(pool: CachingHostAllocator) -> None:
    ptr = pool.alloc(1)
    pool.free(ptr)
    for invalid_ptr in (ptr, 0xBAD):
        with pytest.raises(InvalidPointer, match=f"{invalid_ptr:#x}"):
            pool.free(invalid_ptr)
        with pytest.raises(InvalidPointer, match="nothing pinned is allocated"):
            pool.record_use(invalid_ptr, 11)

    assert pool.counters()["num_invalid_frees"] == 2


def test_free_never_raises_if_so_configured(host: Host) -> None:
    pool = CachingHostAllocator(host, Settings(pinned_free_catch_all=True))
    host.device.destroyed_streams.add(11)
    ptr = pool.alloc(MIB)
    pool.record_use(ptr, 11)

    pool.free(ptr)
    pool.free(ptr)

    assert pool.counters()["waiting_bytes"] == MIB
    pool.close()
    assert host.held == {}


def test_cached_memory_is_released_before_out_of_memory() -> None:
    host = Host(4 * MIB)
    pool = CachingHostAllocator(host)
    for ptr in (pool.alloc(MIB), pool.alloc(2 * MIB)):
        pool.record_use(ptr, 11)
        pool.free(ptr)

    assert pool.alloc(4 * MIB)
    assert pool.counters()["num_rescues"] == 1
    assert pool.waiting() == {}


def test_out_of_memory_error_lists_the_bytes_of_the_pool() -> None:
    host = Host(16 * MIB)
    pool = CachingHostAllocator(host)
    pool.alloc(8 * MIB)

    with pytest.raises(OutOfPinnedMemory) as caught:
        pool.alloc(10 * MIB)

    assert "tried to allocate 16.0 MiB of pinned memory; this pool holds" in str(caught.value)
    assert "8.00 MiB, of which 0 B is free" in str(caught.value)
    assert caught.value.code == 2
    assert pool.statistics()["active_requests.current"] == 1


def test_reserve_is_allocated_once_and_used_until_exhausted(host: Host) -> None:
    pool = CachingHostAllocator(host, Settings(pinned_reserve_segment_size_bytes=4 * MIB))
    reserve_blocks = [pool.alloc(2 * MIB) for _ in range(2)]
    assert list(host.held.values()) == [4 * MIB]
    assert reserve_blocks == [min(host.held), min(host.held) + 2 * MIB]
    pool.alloc(2 * MIB)
    assert list(host.held.values()) == [4 * MIB, 2 * MIB]


def test_reserve_stays_cached_until_close(host: Host) -> None:
    pool = CachingHostAllocator(host, Settings(pinned_reserve_segment_size_bytes=4 * MIB))
    ptr = pool.alloc(2 * MIB)
    pool.free(ptr)
    pool.empty_cache()

    assert pool.alloc(2 * MIB) == ptr
    pool.free(ptr)
    pool.close()
    assert host.held == {}
    assert pool.statistics()["allocated_bytes.current"] == 0


def test_block_of_the_reserve_is_cached_whatever_its_size(host: Host) -> None:
    settings = Settings(
        pinned_reserve_segment_size_bytes=4 * MIB, pinned_max_cached_size_bytes=1 * MIB
    )
    pool = CachingHostAllocator(host, settings)
    pool.free(pool.alloc(2 * MIB))

    assert pool.counters()["free_bytes"] == 2 * MIB
    assert pool.counters()["num_free_failures"] == 0


def test_failed_reserve_error_names_its_setting() -> None:
    settings = Settings(pinned_reserve_segment_size_bytes=4 * MIB)
    pool = CachingHostAllocator(Host(2 * MIB), settings)

    with pytest.raises(OutOfPinnedMemory, match="pinned_reserve_segment_size_mb"):
        pool.alloc(1)


def test_registration_is_refused_without_upstream_support(host: Host) -> None:
    with pytest.raises(Unsupported, match="cannot register host memory"):
        CachingHostAllocator(host, Settings(pinned_use_cuda_host_register=True))


def test_capture_queries_no_events(pool: CachingHostAllocator, host: Host) -> None:
    pending = pool.alloc(MIB)
    pool.record_use(pending, 11)
    pool.begin_capture()
    pool.free(pending)
    pool.alloc(MIB)
    pool.empty_cache()
    assert not {"record", "query_event", "free"} & set(host.calls)
    pool.end_capture()
    assert pool.alloc(MIB) != pending  # Only this call records the event.
    host.finish(11)

    assert pool.alloc(MIB) == pending


def test_block_of_a_graph_is_not_reused_until_the_graph_is_gone(
    pool: CachingHostAllocator, host: Host
) -> None:
    pool.begin_capture()
    used_block, unused_block = pool.alloc(MIB), pool.alloc(MIB)
    pool.record_use(used_block, 11)
    pool.end_capture()
    pool.free(used_block)
    pool.free(unused_block)
    host.finish(11)

    assert pool.alloc(MIB) == unused_block
    assert pool.alloc(MIB) != used_block
    assert pool.counters()["captured_bytes"] == MIB
    pool.forget_graphs()
    assert pool.alloc(MIB) == used_block


def test_host_statistics_equal_pytorchs(pool: CachingHostAllocator) -> None:
    first, second = pool.alloc(3 * MIB), pool.alloc(100)
    pool.free(first)
    pool.alloc(4 * MIB)
    pool.free(second)
    pool.empty_cache()
    statistics = pool.statistics()

    assert len(statistics) == 28
    assert list(statistics) == sorted(statistics)
    assert {
        name: statistics[f"active_requests.{name}"] for name in ("current", "peak", "freed")
    } == {
        "current": 1,
        "peak": 2,
        "freed": 2,
    }
    assert statistics["active_bytes.current"] == 4 * MIB
    assert statistics["allocated_bytes.peak"] == 4 * MIB + 128
    assert (statistics["num_host_alloc"], statistics["num_host_free"]) == (2, 1)
    assert (statistics["host_alloc_time.count"], statistics["host_free_time.count"]) == (2, 1)


def test_reset_of_sums_and_peaks(host: Host) -> None:
    pool = CachingHostAllocator(host)
    pool.free(pool.alloc(100))
    pool.alloc(4 * MIB)
    pool.empty_cache()
    pool.reset_sums()
    pool.reset_peaks()
    statistics = pool.statistics()

    assert statistics["active_requests.allocated"] == statistics["num_host_alloc"] == 0
    assert statistics["allocated_bytes.peak"] == 4 * MIB


def test_reentrant_free_is_performed_after_the_call(host: Host) -> None:
    """The free comes from a finalizer that runs during an allocation by the driver."""
    pool = CachingHostAllocator(host)
    garbage = [pool.alloc(MIB)]
    malloc = host.device.malloc

    def with_a_finalizer(size_bytes: int, stream: int) -> int:
        while garbage:
            pool.free(garbage.pop())
        return malloc(size_bytes, stream)

    host.device.malloc = with_a_finalizer  # type: ignore[method-assign]
    live = pool.alloc(2 * MIB)

    assert live
    assert pool.statistics()["active_requests.current"] == 1


def test_host_trace_and_segments_have_pytorchs_format(pool: CachingHostAllocator) -> None:
    pool.record_history()
    ptr = pool.alloc(700)
    pool.free(ptr)
    pool.empty_cache()
    live = pool.alloc(3)
    snapshot = pool.snapshot()

    actions = [entry["action"] for entry in snapshot["host_traces"]]
    assert actions == [
        *("segment_alloc", "alloc", "free_requested", "free_completed", "segment_free"),
        *("segment_alloc", "alloc"),
    ]
    assert [entry["size"] for entry in snapshot["host_traces"]] == [1024, 700, 700, 700, 1024, 4, 3]
    assert snapshot["host_segments"] == [
        {
            "address": live,
            "size": 4,
            "requested_size": 3,
            "allocated": 1,
            "active": 1,
            "segment_pool_id": (0, 0),
            "frames": snapshot["host_segments"][0]["frames"],
        }
    ]
    assert snapshot["host_segments"][0]["frames"][0]["filename"] == __file__
    assert pickle.loads(pickle.dumps(snapshot)) == snapshot  # noqa: S301
    json.dumps(snapshot)
