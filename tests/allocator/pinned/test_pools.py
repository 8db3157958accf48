"""Private pools of pinned memory: the pool that serves a request, and the lifetime of memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
from allocator.device import MIB, Device
from allocator.pinned import invariants
from allocator.pinned.host import Host
from hypothesis import given
from hypothesis import strategies as st

from cudakit.allocator.allocator import DeviceCachingAllocator
from cudakit.allocator.pinned import CachingHostAllocator
from cudakit.allocator.pools import MemPool
from cudakit.errors import CudaError
from cudakit.torch_rules.oom import DEFAULT_POOL, PoolId
from cudakit.torch_rules.settings import Settings

SIDE = 11


class Both:
    """The allocator of a device, and a pool of pinned memory that uses its private pools."""

    def __init__(self, *, capacity: int = 64 * MIB, **settings: int) -> None:
        self.host = Host(capacity)
        self.device = DeviceCachingAllocator(Device())
        self.pinned = CachingHostAllocator(
            self.host,
            Settings(**settings),  # type: ignore[arg-type]
            holders=self.device._engine.private_pools,
        )

    def pools(self) -> list[PoolId]:
        invariants.check(self.pinned, self.host)
        return [s["segment_pool_id"] for s in self.pinned.snapshot()["host_segments"]]


def test_private_pool_block_is_reused_only_in_its_pool() -> None:
    allocators = Both()
    pool = MemPool(allocators.device)
    with allocators.device.use_pool(pool):
        pool_block = allocators.pinned.alloc(MIB)
    allocators.pinned.free(pool_block)
    other = allocators.pinned.alloc(MIB)
    with allocators.device.use_pool(pool):
        reused_block = allocators.pinned.alloc(MIB)

    assert other != pool_block == reused_block
    assert set(allocators.pools()) == {DEFAULT_POOL, pool.id}


def test_request_without_a_stream_uses_the_pool_of_its_thread() -> None:
    allocators = Both()
    pools = [MemPool(allocators.device) for _ in range(2)]
    with allocators.device.use_pool(pools[0]):
        with allocators.device.use_pool(pools[1]):
            allocators.pinned.alloc(MIB)
        allocators.pinned.alloc(MIB)
        with ThreadPoolExecutor(1) as threads:
            threads.submit(allocators.pinned.alloc, MIB).result()

    assert sorted(allocators.pools()) == [DEFAULT_POOL, pools[0].id, pools[1].id]


def test_request_with_a_stream_is_routed_like_device_memory() -> None:
    allocators = Both()
    pool_id = allocators.device.graph_pool_handle()
    allocators.device.begin_allocate_to_pool(pool_id, lambda stream: stream == SIDE)
    allocators.pinned.alloc(MIB, SIDE)
    allocators.pinned.alloc(MIB, 0)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(allocators.pinned.alloc, MIB, SIDE).result()
    allocators.device.end_allocate_to_pool(pool_id)

    assert sorted(allocators.pools()) == [DEFAULT_POOL, pool_id, pool_id]


def test_pool_memory_is_released_after_its_last_holder() -> None:
    allocators = Both()
    pool = MemPool(allocators.device)
    with allocators.device.use_pool(pool):
        first, second = allocators.pinned.alloc(3 * MIB), allocators.pinned.alloc(700)
    allocators.pinned.free(first)
    allocators.pinned.empty_cache()
    assert len(allocators.host.held) == 2, "the pool is held"
    pool.close()
    allocators.pinned.empty_cache()
    assert len(allocators.host.held) == 1
    allocators.pinned.free(second)
    allocators.pinned.empty_cache()

    assert allocators.host.held == {}
    assert allocators.pinned.statistics()["num_host_free"] == 2


def test_free_block_beside_a_live_block_stays_in_its_pool() -> None:
    allocators = Both()
    pool = MemPool(allocators.device)
    with allocators.device.use_pool(pool):
        freed, live = allocators.pinned.alloc(600), allocators.pinned.alloc(600)
    allocators.pinned.free(freed)
    pool.close()
    allocators.pinned.empty_cache()

    assert allocators.pinned.alloc(600) != freed
    allocators.pinned.free(live)
    allocators.pinned.empty_cache()
    assert set(allocators.pools()) == {DEFAULT_POOL}


def captured(allocators: Both) -> tuple[int, int]:
    """Allocate two blocks in a capture, one of which a stream uses, and free both; return the addresses."""
    with allocators.device.capture() as memory:
        allocators.pinned.begin_capture()
        used_block, unused_block = allocators.pinned.alloc(MIB), allocators.pinned.alloc(MIB)
        allocators.pinned.record_use(used_block, SIDE)
        allocators.pinned.free(used_block)
        allocators.pinned.free(unused_block)
        allocators.pinned.end_capture()
        allocators.graph = memory  # type: ignore[attr-defined]
    allocators.host.finish(SIDE)
    return used_block, unused_block


def test_graphs_sharing_a_pool_reuse_blocks_without_stream_use() -> None:
    allocators = Both()
    used_block, unused_block = captured(allocators)
    with allocators.device.capture(allocators.graph.id) as second_capture:  # type: ignore[attr-defined]
        allocators.pinned.begin_capture()
        reused_blocks = [allocators.pinned.alloc(MIB) for _ in range(2)]
        allocators.pinned.end_capture()

    assert reused_blocks[0] == unused_block
    assert used_block not in reused_blocks
    assert second_capture.id == allocators.graph.id  # type: ignore[attr-defined]


def test_graph_memory_is_released_after_the_graph() -> None:
    allocators = Both()
    used_block, unused_block = captured(allocators)
    allocators.pinned.empty_cache()
    assert set(allocators.host.held) == {used_block, unused_block}
    assert allocators.pinned.counters()["captured_bytes"] == MIB
    allocators.graph.close()  # type: ignore[attr-defined]
    allocators.pinned.empty_cache()
    assert set(allocators.host.held) == {used_block}, "its stream may still use it"
    allocators.host.finish(SIDE)
    allocators.pinned.empty_cache()

    assert allocators.host.held == {}
    assert allocators.pools() == []


def test_block_freed_after_its_graph_waits_for_its_stream() -> None:
    allocators = Both()
    with allocators.device.capture() as memory:
        allocators.pinned.begin_capture()
        ptr = allocators.pinned.alloc(MIB)
        allocators.pinned.record_use(ptr, SIDE)
        allocators.pinned.end_capture()
    memory.close()
    allocators.pinned.free(ptr)
    assert allocators.pinned.waiting() == {SIDE: MIB}
    allocators.pinned.empty_cache()
    assert allocators.host.held
    allocators.host.finish(SIDE)
    allocators.pinned.empty_cache()

    assert allocators.host.held == {}


def test_request_on_an_uncaptured_stream_belongs_to_no_graph() -> None:
    allocators = Both()
    with allocators.device.capture(stream=SIDE), ThreadPoolExecutor(1) as threads:
        allocators.pinned.begin_capture()
        other_thread_block = threads.submit(allocators.pinned.alloc, MIB, SIDE + 1).result()
        unnamed = threads.submit(allocators.pinned.alloc, MIB).result()
        allocators.pinned.end_capture()
    for ptr in (other_thread_block, unnamed):
        allocators.pinned.record_use(ptr, SIDE + 1)
        allocators.pinned.free(ptr)
    allocators.host.finish(SIDE + 1)

    assert allocators.pinned.alloc(MIB) == other_thread_block
    assert allocators.pinned.counters()["captured_bytes"] == MIB, "the other may be of the capture"


def test_reserved_blocks_of_a_dropped_pool_go_to_the_default_pool() -> None:
    allocators = Both(pinned_reserve_segment_size_bytes=4 * MIB)
    pool = MemPool(allocators.device)
    with allocators.device.use_pool(pool):
        allocators.pinned.free(allocators.pinned.alloc(3 * MIB))
    pool.close()
    allocators.pinned.empty_cache()
    assert set(allocators.pools()) <= {DEFAULT_POOL}
    assert list(allocators.host.held.values())[:1] == [4 * MIB]
    held_count = len(allocators.host.held)
    allocators.pinned.alloc(3 * MIB)
    assert len(allocators.host.held) == held_count


def test_held_pool_ignores_the_cached_size_limit() -> None:
    allocators = Both(pinned_max_cached_size_bytes=MIB)
    pool = MemPool(allocators.device)
    with allocators.device.use_pool(pool):
        ptr = allocators.pinned.alloc(3 * MIB)
        allocators.pinned.free(ptr)
        assert allocators.pinned.alloc(3 * MIB) == ptr


def test_unheld_pool_is_released_before_out_of_memory() -> None:
    allocators = Both(capacity=8 * MIB)
    pool = MemPool(allocators.device)
    with allocators.device.use_pool(pool):
        ptr = allocators.pinned.alloc(8 * MIB)
    allocators.pinned.record_use(ptr, SIDE)
    allocators.pinned.free(ptr)
    with pytest.raises(MemoryError):
        allocators.pinned.alloc(8 * MIB)
    pool.close()

    assert allocators.pinned.alloc(8 * MIB)
    assert allocators.pinned.counters()["num_rescues"] == 1


def test_trace_names_the_pool_of_each_event() -> None:
    allocators = Both()
    allocators.pinned.record_history()
    pool = MemPool(allocators.device)
    with allocators.device.use_pool(pool):
        allocators.pinned.free(allocators.pinned.alloc(MIB))
    pool.close()
    allocators.pinned.empty_cache()
    traces = allocators.pinned.snapshot()["host_traces"]

    assert [entry["action"] for entry in traces] == [
        *("segment_alloc", "alloc", "free_requested", "free_completed", "segment_free"),
    ]
    assert {entry["pool_id"] for entry in traces} == {pool.id}


def test_failed_driver_call_leaks_nothing_of_any_pool() -> None:
    def program(allocators: Both) -> None:
        def attempt(operation: object, *args: int) -> int:
            try:
                return operation(*args) or 0  # type: ignore[operator]
            except (CudaError, KeyError):
                return 0
            finally:
                allocators.pools()

        pinned, pool = allocators.pinned, MemPool(allocators.device)
        with allocators.device.use_pool(pool):
            blocks = [attempt(pinned.alloc, size) for size in (3 * MIB, 700, 5 * MIB)]
        blocks.append(attempt(pinned.alloc, MIB))
        for ptr in filter(None, blocks[:2]):
            pinned.record_use(ptr, SIDE)
        for ptr in filter(None, blocks):
            attempt(pinned.free, ptr)
        with allocators.device.capture() as graph:
            pinned.begin_capture()
            if ptr := attempt(pinned.alloc, 2 * MIB):
                pinned.record_use(ptr, SIDE)
                attempt(pinned.free, ptr)
            pinned.end_capture()
        pool.close()
        attempt(pinned.empty_cache)
        graph.close()
        attempt(pinned.empty_cache)
        allocators.host.finish(SIDE)
        attempt(pinned.empty_cache)

    without_failures = Both()
    program(without_failures)
    assert without_failures.host.held == {}
    for fail_at in range(1, len(without_failures.host.calls) + 1):
        allocators = Both()
        allocators.host.device.fail_at = fail_at
        program(allocators)
        allocators.pinned.close()
        assert allocators.host.held == {}
        assert allocators.host.device.events == {}
        assert allocators.pools() == []


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("alloc"), st.integers(0, 3), st.integers(1, 3 * MIB)),
        st.tuples(st.just("free"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("use"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("close"), st.integers(1, 3), st.just(0)),
        st.tuples(st.sampled_from(("finish", "empty")), st.just(0), st.just(0)),
    ),
    max_size=40,
)


class Run:
    """A run of operations that records the first pool of each 512 bytes."""

    def __init__(self, *, reserve: int) -> None:
        self.allocators = Both(capacity=512 * MIB, pinned_reserve_segment_size_bytes=reserve)
        self.pools = {number: MemPool(self.allocators.device) for number in range(1, 4)}
        self.live: list[int] = []
        self.owners: dict[int, int] = {}

    def alloc(self, number: int, size: int) -> None:
        owner = number if number in self.pools else 0
        with self.allocators.device.use_pool(self.pools[owner]) if owner else nullcontext():
            self.live.append(self.allocators.pinned.alloc(size))
        for unit in range(self.live[-1] // 512, (self.live[-1] + size) // 512):
            previous_owner = self.owners.get(unit, 0)
            assert previous_owner == owner or previous_owner not in self.pools
            self.owners[unit] = owner

    def free(self, number: int, _: int) -> None:
        if self.live:
            self.allocators.pinned.free(self.live.pop(number % len(self.live)))

    def use(self, number: int, _: int) -> None:
        if self.live:
            self.allocators.pinned.record_use(self.live[number % len(self.live)], SIDE)

    def close(self, number: int, _: int) -> None:
        if number in self.pools:
            self.pools.pop(number).close()

    def finish(self, _: int, __: int) -> None:
        self.allocators.host.finish(SIDE)

    def empty(self, _: int, __: int) -> None:
        self.allocators.pinned.empty_cache()

    def end(self) -> None:
        for ptr in self.live:
            self.allocators.pinned.free(ptr)
        for pool in self.pools.values():
            pool.close()
        self.allocators.pinned.close()


@given(steps=STEPS, reserve=st.sampled_from([0, 4 * MIB]))
def test_held_pool_serves_no_request_of_another_pool(
    steps: list[tuple[str, int, int]], reserve: int
) -> None:
    run = Run(reserve=reserve)
    for operation, number, size in steps:
        getattr(run, operation)(number, size)
        run.allocators.pools()
    run.end()
    assert run.allocators.host.held == {}
    assert run.allocators.host.device.events == {}
