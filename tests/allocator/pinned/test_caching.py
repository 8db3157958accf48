""""""

from __future__ import annotations

import gc
import json
import pickle
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from time import monotonic, sleep

import pytest
from allocator.device import GIB, MIB
from allocator.pinned import invariants
from allocator.pinned.host import Host

from cudakit.allocator.allocator import InvalidPointer, InvalidSize
from cudakit.allocator.pinned import BackgroundThread, CachingHostAllocator, OutOfPinnedMemory
from cudakit.allocator.upstream import GpuHostUpstream
from cudakit.errors import CudaError
from cudakit.gpu.api import LEGACY, Gpu, Ptr
from cudakit.gpu.open import open_gpu
from cudakit.gpu.sim import Sim
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


IN_BACKGROUND = Settings(pinned_use_background_threads=True)


def soon(condition: Callable[[], bool]) -> bool:
    end = monotonic() + 10
    while not condition() and monotonic() < end:
        sleep(0.002)
    return condition()


class Work:
    def __init__(self, times: int) -> None:
        self.remaining = times

    def once(self) -> bool:
        self.remaining -= 1
        return self.remaining > 0


def test_background_worker_sleeps_without_work_and_continues_when_woken() -> None:
    work = Work(3)
    background = BackgroundThread(work.once)
    background.wake()
    assert soon(lambda: work.remaining == 0)
    work.remaining = 2
    background.wake()
    assert soon(lambda: work.remaining == 0)
    background.stop()


def test_background_thread_frees_blocks_without_a_request(host: Host) -> None:
    pool = CachingHostAllocator(host, IN_BACKGROUND)
    ptr = pool.alloc(MIB)
    pool.record_use(ptr, 11)
    pool.free(ptr)
    host.finish(11)

    assert soon(lambda: pool.counters()["free_bytes"] == MIB)
    assert pool.alloc(MIB) == ptr
    pool.close()


def test_request_processes_events_before_calling_the_driver(host: Host) -> None:
    pool = CachingHostAllocator(host, IN_BACKGROUND)
    ptr = pool.alloc(MIB)
    pool.record_use(ptr, 11)
    host.device.recorded[11] = 1
    pool.free(ptr)
    host.finish(11)

    assert pool.alloc(MIB) == ptr
    pool.close()


def test_background_thread_ends_with_its_pool() -> None:
    earlier_threads = set(threading.enumerate())
    pool = CachingHostAllocator(Host(), IN_BACKGROUND)
    ptr = pool.alloc(MIB)
    pool.record_use(ptr, 11)
    pool.free(ptr)
    pool_reference = weakref.ref(pool)
    del pool
    gc.collect()

    assert soon(lambda: pool_reference() is None and set(threading.enumerate()) <= earlier_threads)


# --- Every driver call can fail: nothing leaks, and statistics stay right --------------------------

CAPACITY = 32 * MIB
SETTINGS = (
    Settings(),
    Settings(pinned_max_cached_size_bytes=2 * MIB),
    Settings(pinned_reserve_segment_size_bytes=4 * MIB),
    Settings(pinned_free_catch_all=True),
)


def program(pool: CachingHostAllocator, host: Host) -> list[CudaError]:
    """Run all kinds of operations, continue after failures, and return the failures."""
    live: dict[str, int] = {}
    failures: list[CudaError] = []

    def do(operation: str, name: str = "", size: int = 0) -> None:
        try:
            if operation == "alloc":
                live[name] = pool.alloc(size)
            elif operation == "empty":
                pool.empty_cache()
            elif operation == "use":
                pool.record_use(live[name], 11)
            elif name in live:
                pool.free(live.pop(name))
        except (CudaError, KeyError) as error:
            failures.extend([error] if isinstance(error, CudaError) else [])
        invariants.check(pool, host)

    do("alloc", "a", 3 * MIB)
    do("alloc", "b", 700)
    do("alloc", "c", 7 * MIB)
    do("use", "a")
    do("use", "c")
    do("free", "a")
    do("free", "b")
    do("alloc", "d", 600)
    host.finish(11)
    do("free", "c")
    do("alloc", "e", 4 * MIB)
    do("alloc", "f", 14 * MIB)  # more memory than is free before the other blocks are released
    do("alloc", "g", 40 * MIB)
    do("free", "e")
    do("empty")
    for name in "abcdefg":
        do("free", name)
    return failures


@pytest.mark.parametrize("settings", SETTINGS)
def test_failed_driver_call_is_reported_and_leaks_nothing(settings: Settings) -> None:
    host = Host(CAPACITY)
    expected = program(CachingHostAllocator(host, settings), host)
    calls = len(host.calls)
    assert calls > 10
    assert {error.code for error in expected} == {2}

    for fail_at in range(1, calls + 1):
        failing = Host(CAPACITY)
        failing.device.fail_at = fail_at
        pool = CachingHostAllocator(failing, settings)
        failures = program(pool, failing)
        pool.close()

        assert failing.held == {}
        assert failing.device.events == {}
        invariants.check(pool, failing)
        is_reported = any(error is failing.error for error in failures)
        quiet = failing.calls[fail_at - 1] in ("record", "event", "free")
        assert is_reported or quiet, failing.calls[fail_at - 1]


def test_memory_stays_cached_if_its_release_fails(host: Host) -> None:
    pool = CachingHostAllocator(host)
    for ptr in [pool.alloc(MIB) for _ in range(3)]:
        pool.free(ptr)
    host.device.fail_at = len(host.calls) + 2

    with pytest.raises(CudaError, match="requested by the test"):
        pool.empty_cache()

    assert len(host.held) == 2
    assert pool.counters()["num_free_failures"] == 1
    invariants.check(pool, host)
    pool.empty_cache()
    assert host.held == {}


# --- Pinned memory that the host allocated and the driver registered -------------------------------

REGISTERED = Settings(pinned_use_cuda_host_register=True, pinned_num_register_threads=4)


class HostGpu(Sim):
    """A simulated GPU that counts calls for host memory. Tests determine which call fails."""

    def __init__(self) -> None:
        super().__init__(capacity_bytes=MIB)
        self.calls: list[str] = []
        self.fail_at = 0
        self.code = 999
        self.held: dict[int, bool] = {}  # Whether each allocation is registered, by address.
        self.threads: set[int] = set()

    def host_malloc(self, size_bytes: int, *, pinned: bool = True) -> Ptr:
        self._count("host_malloc")
        ptr = super().host_malloc(size_bytes, pinned=pinned)
        self.held[ptr] = False
        return ptr

    def host_free(self, ptr: Ptr) -> None:
        self._count("host_free")
        super().host_free(ptr)
        del self.held[ptr]

    def host_register(self, ptr: Ptr, *, thread_count: int = 1) -> None:
        self._count("host_register")
        super().host_register(ptr, thread_count=thread_count)
        self.held[ptr] = True
        self.threads.add(thread_count)

    def host_unregister(self, ptr: Ptr) -> None:
        self._count("host_unregister")
        super().host_unregister(ptr)
        self.held[ptr] = False

    def _count(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) == self.fail_at:
            raise CudaError(self.code, "CUDA_ERROR", "requested by the test")


def test_registration_uses_the_configured_number_of_threads() -> None:
    gpu = HostGpu()
    pool = CachingHostAllocator(GpuHostUpstream(gpu), REGISTERED)
    ptr = pool.alloc(3 * MIB)
    assert gpu.held == {ptr: True}
    assert gpu.threads == {4}
    pool.free(ptr)
    assert pool.alloc(3 * MIB) == ptr, "what is cached stays registered"
    pool.free(ptr)
    pool.empty_cache()

    assert gpu.held == {}
    assert gpu.calls == ["host_malloc", "host_register", "host_unregister", "host_free"]
    assert pool.statistics()["num_host_free"] == 1


def test_memory_is_freed_the_way_it_was_allocated_after_a_change_of_settings() -> None:
    gpu = HostGpu()
    pool = CachingHostAllocator(GpuHostUpstream(gpu), REGISTERED)
    registered = pool.alloc(MIB)
    pool.configure(replace(REGISTERED, pinned_use_cuda_host_register=False))
    allocated_block = pool.alloc(MIB)
    assert gpu.held == {registered: True, allocated_block: False}
    pool.configure(REGISTERED)
    for ptr in (registered, allocated_block):
        pool.free(ptr)
    pool.empty_cache()

    assert gpu.held == {}
    assert gpu.calls.count("host_unregister") == 1


def test_reserve_is_registered() -> None:
    gpu = HostGpu()
    settings = replace(REGISTERED, pinned_reserve_segment_size_bytes=4 * MIB)
    pool = CachingHostAllocator(GpuHostUpstream(gpu), settings)
    pool.free(pool.alloc(MIB))
    assert list(gpu.held.values()) == [True]
    pool.close()
    assert gpu.held == {}


@pytest.mark.parametrize("code", [2, 999])
def test_failed_registration_leaves_nothing_pinned(code: int) -> None:
    def program(gpu: HostGpu) -> CachingHostAllocator:
        pool = CachingHostAllocator(GpuHostUpstream(gpu), REGISTERED)
        live = []
        for size in (MIB, 3 * MIB, 5 * MIB):
            with suppress(CudaError):
                live.append(pool.alloc(size))
        assert len(gpu.held) == len(live)
        for ptr in live:
            pool.free(ptr)
        with suppress(CudaError):
            pool.empty_cache()
        assert len(gpu.held) == pool.statistics()["allocations.current"]
        pool.empty_cache()
        return pool

    without_failures = HostGpu()
    program(without_failures)
    assert len(without_failures.calls) == 12
    for fail_at in range(1, 13):
        gpu = HostGpu()
        gpu.fail_at, gpu.code = fail_at, code
        pool = program(gpu)
        assert gpu.held == {}
        assert pool.statistics()["allocated_bytes.current"] == 0


def copied_through(gpu: Gpu) -> None:
    pool = CachingHostAllocator(GpuHostUpstream(gpu), REGISTERED)
    host, device = pool.alloc(3 * MIB), gpu.malloc(3 * MIB)
    gpu.fill(device, 7, 3 * MIB, LEGACY)
    gpu.copy(host, device, 3 * MIB, LEGACY)
    gpu.sync()
    assert bytes(gpu.host_view(host, 3 * MIB)) == b"\7" * (3 * MIB)
    pool.free(host)
    pool.close()
    gpu.free(device)


def test_registered_memory_copies_to_and_from_a_simulated_device() -> None:
    copied_through(open_gpu("sim"))


@pytest.mark.gpu
def test_registered_memory_copies_to_and_from_a_real_device() -> None:
    copied_through(open_gpu("cuda"))


def use_it(gpu: Gpu) -> None:
    pool = CachingHostAllocator(GpuHostUpstream(gpu))
    stream, device = gpu.stream(), gpu.malloc(MIB)
    first = pool.alloc(MIB)
    gpu.host_view(first, MIB)[:4] = b"abcd"
    gpu.copy(device, first, MIB, stream)
    pool.record_use(first, stream)
    pool.free(first)
    gpu.sync_stream(stream)
    second_block = pool.alloc(MIB)
    assert second_block == first
    gpu.host_view(second_block, MIB)[:4] = b"...."
    gpu.copy(second_block, device, MIB, stream)
    gpu.sync_stream(stream)
    assert bytes(gpu.host_view(second_block, MIB)[:4]) == b"abcd"
    pool.free(second_block)
    pool.close()
    assert pool.statistics()["num_host_free"] == 1


def test_pinned_memory_copies_to_and_from_a_simulated_device() -> None:
    gpu = open_gpu("sim")
    use_it(gpu)
    gpu.close()


@pytest.mark.gpu
def test_pinned_memory_copies_to_and_from_a_real_device() -> None:
    gpu = open_gpu("cuda")
    use_it(gpu)
    gpu.close()
