"""Scenario 29: re-entrant calls; and threads."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from allocator import invariants
from allocator.device import GIB, MIB, Device
from allocator.summaries import actions, current

from cudakit.allocator.allocator import DeviceCachingAllocator, InvalidPointer
from cudakit.allocator.guard import Crossing, MonitoredMetric, Reentered
from cudakit.allocator.oom import OutOfMemory
from cudakit.errors import UsageError
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


METRICS: tuple[MonitoredMetric, ...] = ("reserved_bytes", "allocated_bytes", "active_bytes")


@pytest.mark.parametrize("metric", METRICS)
def test_monitor_calls_back_when_a_threshold_is_crossed(
    allocator: DeviceCachingAllocator, metric: MonitoredMetric
) -> None:
    crossings: list[Crossing] = []
    allocator.monitor(metric, 30 * MIB, crossings.append, direction="both")
    first, second = allocator.alloc(20 * MIB), allocator.alloc(20 * MIB)
    third = allocator.alloc(20 * MIB)
    for ptr in (first, second, third):
        allocator.free(ptr)
    allocator.empty_cache()

    assert [(c.metric, c.up, c.threshold_bytes) for c in crossings] == [
        (metric, True, 30 * MIB),
        (metric, False, 30 * MIB),
    ]
    assert crossings[0].value_bytes == 40 * MIB
    assert crossings[1].value_bytes < 30 * MIB


@pytest.mark.parametrize(
    ("direction", "expected_ups"), [("up", [True, True]), ("down", [False, False])]
)
def test_monitor_can_report_one_direction(
    allocator: DeviceCachingAllocator, direction: Any, expected_ups: list[bool]
) -> None:
    crossings: list[Crossing] = []
    allocator.monitor("allocated_bytes", MIB, crossings.append, direction=direction)
    for _ in range(2):
        allocator.free(allocator.alloc(MIB))

    assert [crossing.up for crossing in crossings] == expected_ups


def test_monitor_share_is_of_the_device_memory(
    allocator: DeviceCachingAllocator, device: Device
) -> None:
    crossings: list[Crossing] = []
    allocator.monitor("reserved_bytes", 0.5, crossings.append)
    allocator.alloc(device.capacity // 2)

    assert [crossing.threshold_bytes for crossing in crossings] == [8 * GIB]


def test_value_already_above_is_reported_after_it_was_below(
    allocator: DeviceCachingAllocator,
) -> None:
    crossings: list[Crossing] = []
    first = allocator.alloc(MIB)
    allocator.monitor("allocated_bytes", MIB, crossings.append)
    second = allocator.alloc(MIB)
    assert crossings == []
    allocator.free(first)
    allocator.free(second)
    allocator.alloc(MIB)
    assert len(crossings) == 1


def test_pending_block_counts_as_active_for_monitors(
    allocator: DeviceCachingAllocator, device: Device
) -> None:
    crossings: list[Crossing] = []
    ptr = allocator.alloc(MIB)
    allocator.monitor("active_bytes", MIB, crossings.append, direction="down")
    allocator.record_use(ptr, 11)
    allocator.free(ptr)
    assert crossings == []
    device.finish(11)
    allocator.alloc(512)

    assert [crossing.value_bytes for crossing in crossings] == [512]


def test_monitor_sees_calls_by_saved_methods(allocator: DeviceCachingAllocator) -> None:
    alloc, crossings = allocator.alloc, []
    allocator.monitor("allocated_bytes", MIB, crossings.append)
    alloc(MIB)

    assert len(crossings) == 1


def test_stopped_monitor_is_silent_and_turns_the_fast_path_on(
    allocator: DeviceCachingAllocator,
) -> None:
    crossings: list[Crossing] = []
    monitor = allocator.monitor("allocated_bytes", MIB, crossings.append)
    monitor.end()
    monitor.end()
    allocator.alloc(MIB)

    assert crossings == []
    assert allocator._guard.watchers == []


def test_monitor_callback_can_use_the_allocator(allocator: DeviceCachingAllocator) -> None:
    spare_blocks = [allocator.alloc(30 * MIB)]
    crossings: list[int] = []

    def give_up(_: Crossing) -> None:
        while spare_blocks:
            allocator.free(spare_blocks.pop())
        allocator.empty_cache()
        crossings.append(allocator.statistics()["reserved_bytes.all.current"])

    allocator.monitor("reserved_bytes", 50 * MIB, give_up)
    allocator.alloc(30 * MIB)

    assert crossings == [30 * MIB]


def test_opposing_monitor_callbacks_terminate(allocator: DeviceCachingAllocator) -> None:
    blocks: list[int] = [allocator.alloc(MIB)]
    calls: list[bool] = []

    def undo(crossing: Crossing) -> None:
        calls.append(crossing.up)
        if crossing.up:
            allocator.free(blocks.pop())
        else:
            blocks.append(allocator.alloc(MIB))

    monitor = allocator.monitor("allocated_bytes", 2 * MIB, undo, direction="both")
    blocks.append(allocator.alloc(MIB))
    monitor.end()

    assert 0 < len(calls) < 4


@contextmanager
def unraisable() -> Iterator[list[Any]]:
    caught: list[Any] = []
    original_hook, sys.unraisablehook = sys.unraisablehook, caught.append
    try:
        yield caught
    finally:
        sys.unraisablehook = original_hook


def test_failing_monitor_callback_does_not_affect_the_request(
    allocator: DeviceCachingAllocator,
) -> None:
    def fail(_: Crossing) -> None:
        raise RuntimeError("requested by the test")

    crossings: list[Crossing] = []
    allocator.monitor("allocated_bytes", MIB, fail)
    allocator.monitor("allocated_bytes", MIB, crossings.append)
    with unraisable() as caught:
        assert allocator.alloc(MIB)

    assert [str(each.exc_value) for each in caught] == ["requested by the test"]
    assert len(crossings) == 1


def test_memory_released_by_a_failed_request_is_reported() -> None:
    allocator = DeviceCachingAllocator(Device(64 * MIB))
    crossings: list[Crossing] = []
    allocator.free(allocator.alloc(40 * MIB))
    allocator.monitor("reserved_bytes", MIB, crossings.append, direction="down")
    with pytest.raises(OutOfMemory):
        allocator.alloc(80 * MIB)

    assert [crossing.value_bytes for crossing in crossings] == [0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("peak_bytes", 1, "up"), "'peak_bytes'"),
        (("reserved_bytes", 0, "up"), "threshold: 0 bytes"),
        (("reserved_bytes", 1, "sideways"), "'sideways' is not a direction"),
    ],
)
def test_invalid_monitor_is_refused(
    allocator: DeviceCachingAllocator, arguments: Any, words: str
) -> None:
    metric, threshold, direction = arguments
    with pytest.raises(UsageError, match=words):
        allocator.monitor(metric, threshold, print, direction=direction)


def test_monitor_callbacks_of_threads_do_not_block_each_other() -> None:
    allocator = DeviceCachingAllocator(Device())
    crossings: list[Crossing] = []
    allocator.monitor("allocated_bytes", 3 * MIB, crossings.append, direction="both")

    def work() -> None:
        for _ in range(200):
            allocator.free(allocator.alloc(MIB))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    allocator.alloc(512)

    assert [c.up for c in crossings] == [n % 2 == 0 for n in range(len(crossings))]
