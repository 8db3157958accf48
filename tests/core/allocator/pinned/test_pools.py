"""Private pools of pinned memory: the pool that serves a request, and the lifetime of memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
from core.allocator.device import MIB, Device
from core.allocator.pinned import invariants
from core.allocator.pinned.host import Host
from hypothesis import given
from hypothesis import strategies as st

from cudakit.core.allocator.allocator import CachingAllocator
from cudakit.core.allocator.pinned.allocator import CachingHostAllocator
from cudakit.core.allocator.private_pools import MemPool
from cudakit.errors import CudaError
from cudakit.torch_rules.oom_facts import DEFAULT_POOL, PoolId
from cudakit.torch_rules.settings import Settings

SIDE = 11


class Both:
    """The allocator of a device, and a pool of pinned memory that uses its private pools."""

    def __init__(self, *, splits: bool = False, capacity: int = 64 * MIB, **settings: int) -> None:
        self.host = Host(capacity)
        self.device = CachingAllocator(Device())
        self.pinned = CachingHostAllocator(
            self.host,
            Settings(**settings),  # type: ignore[arg-type]
            holders=self.device._state.engine.private,
            splits=splits,
        )

    def pools(self) -> list[PoolId]:
        invariants.check(self.pinned, self.host)
        return [s["segment_pool_id"] for s in self.pinned.snapshot()["host_segments"]]


@pytest.mark.parametrize("splits", [False, True])
def test_private_pool_block_is_reused_only_in_its_pool(splits: bool) -> None:
    both = Both(splits=splits)
    pool = MemPool(both.device)
    with both.device.use_pool(pool):
        own = both.pinned.alloc(MIB)
    both.pinned.free(own)
    other = both.pinned.alloc(MIB)
    with both.device.use_pool(pool):
        again = both.pinned.alloc(MIB)

    assert other != own == again
    assert set(both.pools()) == {DEFAULT_POOL, pool.id}


def test_request_without_a_stream_uses_the_pool_of_its_thread() -> None:
    both = Both()
    pools = [MemPool(both.device) for _ in range(2)]
    with both.device.use_pool(pools[0]):
        with both.device.use_pool(pools[1]):
            both.pinned.alloc(MIB)
        both.pinned.alloc(MIB)
        with ThreadPoolExecutor(1) as threads:
            threads.submit(both.pinned.alloc, MIB).result()

    assert sorted(both.pools()) == [DEFAULT_POOL, pools[0].id, pools[1].id]


def test_request_with_a_stream_is_routed_like_device_memory() -> None:
    both = Both()
    taken = both.device.graph_pool_handle()
    both.device.begin_allocate_to_pool(taken, lambda stream: stream == SIDE)
    both.pinned.alloc(MIB, SIDE)
    both.pinned.alloc(MIB, 0)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(both.pinned.alloc, MIB, SIDE).result()
    both.device.end_allocate_to_pool(taken)

    assert sorted(both.pools()) == [DEFAULT_POOL, taken, taken]


@pytest.mark.parametrize("splits", [False, True])
def test_pool_memory_is_released_after_its_last_holder(splits: bool) -> None:
    both = Both(splits=splits)
    pool = MemPool(both.device)
    with both.device.use_pool(pool):
        first, second = both.pinned.alloc(3 * MIB), both.pinned.alloc(700)
    both.pinned.free(first)
    both.pinned.empty_cache()
    assert len(both.host.held) == 2, "the pool is held"
    pool.close()
    both.pinned.empty_cache()
    assert len(both.host.held) == 1
    both.pinned.free(second)
    both.pinned.empty_cache()

    assert both.host.held == {}
    assert both.pinned.statistics()["num_host_free"] == 2


@pytest.mark.parametrize("splits", [False, True])
def test_free_block_beside_a_live_block_stays_in_its_pool(splits: bool) -> None:
    both = Both(splits=splits)
    pool = MemPool(both.device)
    with both.device.use_pool(pool):
        freed, live = both.pinned.alloc(600), both.pinned.alloc(600)
    both.pinned.free(freed)
    pool.close()
    both.pinned.empty_cache()

    assert both.pinned.alloc(600) != freed
    both.pinned.free(live)
    both.pinned.empty_cache()
    assert set(both.pools()) == {DEFAULT_POOL}


def captured(both: Both) -> tuple[int, int]:
    """Allocate two blocks in a capture, one of which a stream uses, and free both; return the addresses."""
    with both.device.capture() as memory:
        both.pinned.begin_capture()
        used, unused = both.pinned.alloc(MIB), both.pinned.alloc(MIB)
        both.pinned.record_use(used, SIDE)
        both.pinned.free(used)
        both.pinned.free(unused)
        both.pinned.end_capture()
        both.graph = memory  # type: ignore[attr-defined]
    both.host.finish(SIDE)
    return used, unused


def test_graphs_sharing_a_pool_reuse_blocks_without_stream_use() -> None:
    both = Both()
    used, unused = captured(both)
    with both.device.capture(both.graph.id) as again:  # type: ignore[attr-defined]
        both.pinned.begin_capture()
        found = [both.pinned.alloc(MIB) for _ in range(2)]
        both.pinned.end_capture()

    assert found[0] == unused
    assert used not in found
    assert again.id == both.graph.id  # type: ignore[attr-defined]


def test_graph_memory_is_released_after_the_graph() -> None:
    both = Both()
    used, unused = captured(both)
    both.pinned.empty_cache()
    assert set(both.host.held) == {used, unused}
    assert both.pinned.counters()["captured_bytes"] == MIB
    both.graph.close()  # type: ignore[attr-defined]
    both.pinned.empty_cache()
    assert set(both.host.held) == {used}, "its stream may still use it"
    both.host.finish(SIDE)
    both.pinned.empty_cache()

    assert both.host.held == {}
    assert both.pools() == []


def test_block_freed_after_its_graph_waits_for_its_stream() -> None:
    both = Both()
    with both.device.capture() as memory:
        both.pinned.begin_capture()
        ptr = both.pinned.alloc(MIB)
        both.pinned.record_use(ptr, SIDE)
        both.pinned.end_capture()
    memory.close()
    both.pinned.free(ptr)
    assert both.pinned.waiting() == {SIDE: MIB}
    both.pinned.empty_cache()
    assert both.host.held
    both.host.finish(SIDE)
    both.pinned.empty_cache()

    assert both.host.held == {}


def test_request_on_an_uncaptured_stream_belongs_to_no_graph() -> None:
    both = Both()
    with both.device.capture(stream=SIDE), ThreadPoolExecutor(1) as threads:
        both.pinned.begin_capture()
        named = threads.submit(both.pinned.alloc, MIB, SIDE + 1).result()
        unnamed = threads.submit(both.pinned.alloc, MIB).result()
        both.pinned.end_capture()
    for ptr in (named, unnamed):
        both.pinned.record_use(ptr, SIDE + 1)
        both.pinned.free(ptr)
    both.host.finish(SIDE + 1)

    assert both.pinned.alloc(MIB) == named
    assert both.pinned.counters()["captured_bytes"] == MIB, "the other may be of the capture"


@pytest.mark.parametrize("splits", [False, True])
def test_reserved_blocks_of_a_dropped_pool_go_to_the_default_pool(splits: bool) -> None:
    both = Both(splits=splits, pinned_reserve_segment_size_bytes=4 * MIB)
    pool = MemPool(both.device)
    with both.device.use_pool(pool):
        both.pinned.free(both.pinned.alloc(3 * MIB))
    pool.close()
    both.pinned.empty_cache()
    assert set(both.pools()) <= {DEFAULT_POOL}
    assert list(both.host.held.values())[:1] == [4 * MIB]
    before = len(both.host.held)
    both.pinned.alloc(3 * MIB)
    assert len(both.host.held) == before


def test_held_pool_ignores_the_cached_size_limit() -> None:
    both = Both(pinned_max_cached_size_bytes=MIB)
    pool = MemPool(both.device)
    with both.device.use_pool(pool):
        ptr = both.pinned.alloc(3 * MIB)
        both.pinned.free(ptr)
        assert both.pinned.alloc(3 * MIB) == ptr


def test_unheld_pool_is_released_before_out_of_memory() -> None:
    both = Both(capacity=8 * MIB)
    pool = MemPool(both.device)
    with both.device.use_pool(pool):
        ptr = both.pinned.alloc(8 * MIB)
    both.pinned.record_use(ptr, SIDE)
    both.pinned.free(ptr)
    with pytest.raises(MemoryError):
        both.pinned.alloc(8 * MIB)
    pool.close()

    assert both.pinned.alloc(8 * MIB)
    assert both.pinned.counters()["num_rescues"] == 1


def test_trace_names_the_pool_of_each_event() -> None:
    both = Both()
    both.pinned.record_history()
    pool = MemPool(both.device)
    with both.device.use_pool(pool):
        both.pinned.free(both.pinned.alloc(MIB))
    pool.close()
    both.pinned.empty_cache()
    traces = both.pinned.snapshot()["host_traces"]

    assert [entry["action"] for entry in traces] == [
        *("segment_alloc", "alloc", "free_requested", "free_completed", "segment_free"),
    ]
    assert {entry["pool_id"] for entry in traces} == {pool.id}


@pytest.mark.parametrize("splits", [False, True])
def test_failed_driver_call_leaks_nothing_of_any_pool(splits: bool) -> None:
    def program(both: Both) -> None:
        def attempt(what: object, *args: int) -> int:
            try:
                return what(*args) or 0  # type: ignore[operator]
            except (CudaError, KeyError):
                return 0
            finally:
                both.pools()

        pinned, pool = both.pinned, MemPool(both.device)
        with both.device.use_pool(pool):
            held = [attempt(pinned.alloc, size) for size in (3 * MIB, 700, 5 * MIB)]
        held.append(attempt(pinned.alloc, MIB))
        for ptr in filter(None, held[:2]):
            pinned.record_use(ptr, SIDE)
        for ptr in filter(None, held):
            attempt(pinned.free, ptr)
        with both.device.capture() as graph:
            pinned.begin_capture()
            if ptr := attempt(pinned.alloc, 2 * MIB):
                pinned.record_use(ptr, SIDE)
                attempt(pinned.free, ptr)
            pinned.end_capture()
        pool.close()
        attempt(pinned.empty_cache)
        graph.close()
        attempt(pinned.empty_cache)
        both.host.finish(SIDE)
        attempt(pinned.empty_cache)

    plain = Both(splits=splits)
    program(plain)
    assert plain.host.held == {}
    for fail_at in range(1, len(plain.host.calls) + 1):
        both = Both(splits=splits)
        both.host.device.fail_at = fail_at
        program(both)
        both.pinned.close()
        assert both.host.held == {}
        assert both.host.device.events == {}
        assert both.pools() == []


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

    def __init__(self, *, splits: bool, reserve: int) -> None:
        self.both = Both(
            splits=splits, capacity=512 * MIB, pinned_reserve_segment_size_bytes=reserve
        )
        self.pools = {number: MemPool(self.both.device) for number in range(1, 4)}
        self.live: list[int] = []
        self.owners: dict[int, int] = {}

    def alloc(self, which: int, size: int) -> None:
        owner = which if which in self.pools else 0
        with self.both.device.use_pool(self.pools[owner]) if owner else nullcontext():
            self.live.append(self.both.pinned.alloc(size))
        for place in range(self.live[-1] // 512, (self.live[-1] + size) // 512):
            before = self.owners.get(place, 0)
            assert before == owner or before not in self.pools
            self.owners[place] = owner

    def free(self, which: int, _: int) -> None:
        if self.live:
            self.both.pinned.free(self.live.pop(which % len(self.live)))

    def use(self, which: int, _: int) -> None:
        if self.live:
            self.both.pinned.record_use(self.live[which % len(self.live)], SIDE)

    def close(self, which: int, _: int) -> None:
        if which in self.pools:
            self.pools.pop(which).close()

    def finish(self, _: int, __: int) -> None:
        self.both.host.finish(SIDE)

    def empty(self, _: int, __: int) -> None:
        self.both.pinned.empty_cache()

    def end(self) -> None:
        for ptr in self.live:
            self.both.pinned.free(ptr)
        for pool in self.pools.values():
            pool.close()
        self.both.pinned.close()


@given(steps=STEPS, splits=st.booleans(), reserve=st.sampled_from([0, 4 * MIB]))
def test_held_pool_serves_no_request_of_another_pool(
    steps: list[tuple[str, int, int]], splits: bool, reserve: int
) -> None:
    run = Run(splits=splits, reserve=reserve)
    for what, which, size in steps:
        getattr(run, what)(which, size)
        run.both.pools()
    run.end()
    assert run.both.host.held == {}
    assert run.both.host.device.events == {}
