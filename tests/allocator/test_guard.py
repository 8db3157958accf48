"""Scenario 29: re-entrant calls; and threads."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
from allocator import invariants
from allocator.device import MIB, Device
from allocator.summaries import actions, current

from cudakit.allocator.allocator import DeviceCachingAllocator, InvalidPointer
from cudakit.allocator.guard import Reentered
from cudakit.allocator.oom import OutOfMemory
from cudakit.torch_rules.settings import Settings

CALLS = ("malloc", "free", "event", "record", "query_event", "sync_event", "memory_info")


class Interrupted(Device):
    """A device that runs a finalizer during a call."""

    def __init__(self, capacity: int = 1 << 34) -> None:
        super().__init__(capacity)
        self.finalizers: dict[str, Callable[[], object]] = {}

    def _call(self, name: str) -> None:
        super()._call(name)
        if name in self.finalizers:
            self.finalizers.pop(name)()


@pytest.fixture
def interrupted() -> Interrupted:
    return Interrupted(64 * MIB)


@pytest.mark.parametrize("call", CALLS)
def test_29_reentrant_free_is_performed_at_the_end_of_the_call(
    interrupted: Interrupted, call: str
) -> None:
    allocator = DeviceCachingAllocator(interrupted)
    freed_block = allocator.alloc(MIB)
    live, cached = allocator.alloc(20 * MIB), allocator.alloc(20 * MIB)
    freed_counts: list[int] = []

    def finalizer() -> None:
        allocator.free(freed_block)
        freed_counts.append(len(interrupted.calls))

    interrupted.finalizers[call] = finalizer
    allocator.free(cached)
    allocator.free(live, 11)
    allocator.alloc(30 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.alloc(60 * MIB)

    assert freed_counts
    with pytest.raises(InvalidPointer):
        allocator.free(freed_block)
    assert current(allocator, "allocated_bytes") == 30 * MIB
    invariants.check(allocator)


def test_29_reentrant_free_is_recorded_after_the_running_call(interrupted: Interrupted) -> None:
    allocator = DeviceCachingAllocator(interrupted)
    freed_block = allocator.alloc(MIB)
    allocator.record_history()
    interrupted.finalizers["malloc"] = lambda: allocator.free(freed_block)
    allocator.alloc(30 * MIB)

    assert actions(allocator) == ["segment_alloc", "alloc", "free_requested", "free_completed"]


def test_29_reentrant_calls_other_than_free_are_refused(interrupted: Interrupted) -> None:
    allocator = DeviceCachingAllocator(interrupted)
    refused: list[type[Exception]] = []

    def finalizer() -> None:
        for call in (lambda: allocator.alloc(1), allocator.empty_cache, allocator.snapshot):
            with pytest.raises(Reentered) as caught:
                call()
            refused.append(caught.type)
        with pytest.raises(InvalidPointer, match="from within"):
            allocator.free(12345)

    interrupted.finalizers["malloc"] = finalizer
    allocator.alloc(MIB)

    assert refused == [Reentered] * 3
    assert allocator.counters()["num_invalid_frees"] == 1
    invariants.check(allocator)


def test_29_refused_reentrant_alloc_keeps_the_allocator_usable(interrupted: Interrupted) -> None:
    allocator = DeviceCachingAllocator(interrupted)

    def finalizer() -> None:
        with pytest.raises(Reentered):
            allocator.alloc(MIB)

    interrupted.finalizers["malloc"] = finalizer
    ptr = allocator.alloc(MIB)
    allocator.free(ptr)

    assert allocator.alloc(MIB) == ptr


def test_free_does_not_wait_for_another_thread() -> None:
    device = Interrupted()
    allocator = DeviceCachingAllocator(device)
    freed_block = allocator.alloc(MIB)

    def elsewhere() -> None:
        thread = threading.Thread(target=allocator.free, args=(freed_block,))
        thread.start()
        thread.join(10)
        assert not thread.is_alive()

    device.finalizers["malloc"] = elsewhere
    allocator.alloc(30 * MIB)

    assert current(allocator, "allocated_bytes") == 30 * MIB


def test_thread_can_allocate_while_another_is_in_the_driver() -> None:
    device = Interrupted()
    allocator = DeviceCachingAllocator(device, Settings(release_lock_on_cudamalloc=True))
    allocator.free(allocator.alloc(MIB))
    addresses: list[int] = []

    def elsewhere() -> None:
        thread = threading.Thread(target=lambda: addresses.append(allocator.alloc(MIB)))
        thread.start()
        thread.join(10)

    device.finalizers["malloc"] = elsewhere
    allocator.alloc(30 * MIB)

    assert len(addresses) == 1
    invariants.check(allocator)


def test_threads_allocate_and_free_concurrently() -> None:
    allocator = DeviceCachingAllocator(Device())
    failures: list[Exception] = []

    def churn(seed: int) -> None:
        rng = random.Random(seed)
        live: list[int] = []
        try:
            for _ in range(400):
                if live and rng.random() < 0.5:
                    allocator.free(live.pop(rng.randrange(len(live))))
                else:
                    live.append(allocator.alloc(rng.randint(1, 3 * MIB), rng.choice((0, seed + 9))))
            for ptr in live:
                allocator.free(ptr)
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    invariants.check(allocator)
    statistics = allocator.statistics()
    assert statistics["active_bytes.all.current"] == 0
    allocator.empty_cache()
    assert current(allocator, "reserved_bytes") == 0
