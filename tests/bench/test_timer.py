""""""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.arrays.spin import Spin
from cudakit.arrays.timestamp import clock_hz
from cudakit.bench.timer import (
    MAX_SETS,
    SampleWork,
    Timer,
    buffer_sets,
    disabling_variable,
    is_cold,
)
from cudakit.gpu.api import Stream
from cudakit.gpu.sim import Sim
from cudakit.trace.events import Event, Launch

SPIN_NS = 10_000


@pytest.fixture
def timer() -> Iterator[Timer]:
    with closing(Sim()) as gpu, closing(Timer(gpu)) as timer:
        yield timer


def spinning(timer: Timer, times: int = 1, nanoseconds: int = SPIN_NS) -> SampleWork:
    spin = Spin(timer.gpu)

    def enqueue(stream: Stream) -> None:
        for _ in range(times):
            spin.for_(nanoseconds, stream)

    return SampleWork(enqueue)


def minimum_ns(timer: Timer) -> int:
    gpu = timer.gpu
    assert isinstance(gpu, Sim)
    return gpu.costs.minimum_ns


def test_reading_has_device_time_and_clock_of_work(timer: Timer) -> None:
    reading = timer.time(spinning(timer), is_blocked=True)

    assert reading.time_s == pytest.approx((SPIN_NS + minimum_ns(timer)) / 1e9, rel=1e-9)
    assert reading.sm_clock_hz == pytest.approx(1.98e9, rel=1e-3)
    assert reading.valid


def test_clock_is_read_on_every_multiprocessor() -> None:
    trace: list[Event] = []
    with closing(Sim(sink=trace.append)) as gpu, closing(Timer(gpu)) as timer:
        timer.time(spinning(timer))

    stamps = [
        event.body.grid
        for event in trace
        if isinstance(event.body, Launch) and event.body.name == "cudakit_timestamp"
    ]
    assert stamps == [(132, 1, 1)] * 2


def test_blocking_kernel_hides_launch_gaps(timer: Timer) -> None:
    work = spinning(timer, times=50, nanoseconds=0)

    blocked = timer.time(work, is_blocked=True)
    unblocked = timer.time(work, is_blocked=False)

    assert blocked.time_s == pytest.approx(50 * minimum_ns(timer) / 1e9, rel=1e-9)
    assert unblocked.time_s >= blocked.time_s


def test_gap_within_work_is_hidden_only_by_blocking_kernel(timer: Timer) -> None:
    spin = Spin(timer.gpu)

    def slow_to_enqueue(stream: Stream) -> None:
        spin.empty(stream)
        for _ in range(100):  # Calls of the simulated device take host time.
            timer.gpu.memory_info()
        spin.empty(stream)

    blocked, unblocked = (
        timer.time(SampleWork(slow_to_enqueue), is_blocked=blocked) for blocked in (True, False)
    )

    assert blocked.time_s == pytest.approx(2 * minimum_ns(timer) / 1e9, rel=1e-9)
    assert unblocked.time_s > 100 * 500e-9


def test_synchronizing_work_makes_blocking_kernel_time_out() -> None:
    with closing(Sim()) as gpu, closing(Timer(gpu, blocking_limit_s=0.25)) as timer:
        synchronizing = timer.time(SampleWork(lambda _: gpu.sync()), is_blocked=True)
        following = timer.time(spinning(timer), is_blocked=True)

    assert not synchronizing.valid
    assert following.valid
    assert following.time_s < 0.001


def test_failing_work_releases_stream(timer: Timer) -> None:
    def failing(stream: Stream) -> None:
        raise ZeroDivisionError(stream)

    with pytest.raises(ZeroDivisionError):
        timer.time(SampleWork(failing), is_blocked=True)

    timer.gpu.sync_stream(timer.stream)
    assert (
        timer.now_s() < 0.1
    )  # The stream was released before the time limit of the blocking kernel.
    assert timer.time(spinning(timer), is_blocked=True).valid


def test_work_before_sample_is_not_timed(timer: Timer) -> None:
    slow_work, quick_work = spinning(timer, nanoseconds=1_000_000), spinning(timer)

    work = replace(quick_work, enqueue_before=slow_work.enqueue)
    for blocked in (True, False):
        assert timer.time(work, is_blocked=blocked).time_s < 100e-6
    assert timer.time(replace(work, clock="host")).time_s < 100e-6


def test_host_time_includes_calls(timer: Timer) -> None:
    work = spinning(timer)

    host = timer.time(replace(work, clock="host"))
    assert host.time_s > timer.time(work, is_blocked=True).time_s


def test_flush_overwrites_twice_the_cache(timer: Timer) -> None:
    with closing(Sim()) as gpu, closing(Timer(gpu)) as timer:
        used = gpu.memory_info().free_bytes
        timer.flush(timer.stream)
        gpu.sync()

        assert used - gpu.memory_info().free_bytes == 2 * timer.l2_bytes


def test_closed_timer_has_released_all_memory() -> None:
    with closing(Sim()) as gpu:
        before = gpu.memory_info()
        timer = Timer(gpu)
        timer.flush(timer.stream)
        timer.time(spinning(timer), is_blocked=True)
        timer.close()

        assert gpu.memory_info() == before


def test_disabling_variable_is_named() -> None:
    assert disabling_variable({"CUDA_LAUNCH_BLOCKING": "1"}) == "CUDA_LAUNCH_BLOCKING"
    assert disabling_variable({"CUDA_INJECTION64_PATH": "/x.so"}) == "CUDA_INJECTION64_PATH"
    assert disabling_variable({"CUDA_LAUNCH_BLOCKING": "0", "CUDA_INJECTION64_PATH": ""}) == ""
    assert disabling_variable({}) == ""


def test_clock_uses_sm_with_two_stamps() -> None:
    def clock_of(*words: tuple[int, ...]) -> float | None:
        first, last = (memoryview(np.array(stamps, np.uint64)) for stamps in words)
        return clock_hz(first, last)

    assert clock_of((0, 0, 1000, 500), (2000, 900, 3000, 1500)) == 2e9
    assert clock_of((0, 0, 1000, 500), (2000, 900, 0, 0)) is None
    assert clock_of((1000, 500), (2000, 500)) is None


MIB = 1 << 20


def number_of_sets(
    footprint_bytes: int, *, free_bytes: int = 1 << 40, l2_bytes: int = 60 * MIB
) -> int:
    return buffer_sets(
        "rotate", l2_bytes=l2_bytes, footprint_bytes=footprint_bytes, free_bytes=free_bytes
    )


def test_rotated_sets_exceed_twice_the_cache() -> None:
    assert number_of_sets(MIB) == 121
    assert number_of_sets(50 * MIB) == 4
    assert number_of_sets(1024 * MIB) == 2


def test_rotated_sets_fit_free_memory() -> None:
    assert number_of_sets(1024 * MIB, free_bytes=1000 * MIB) == 1
    assert number_of_sets(MIB, free_bytes=100 * MIB) == 91


def test_number_of_tiny_sets_is_limited() -> None:
    assert number_of_sets(16) == MAX_SETS
    assert not is_cold(MAX_SETS, l2_bytes=60 * MIB, footprint_bytes=16)


def test_hot_flushed_or_empty_footprint_has_one_set() -> None:
    for cache in ("hot", "flush"):
        assert buffer_sets(cache, l2_bytes=MIB, footprint_bytes=MIB, free_bytes=1 << 40) == 1
    assert number_of_sets(0) == 1


@given(st.integers(1 << 18, 1 << 34), st.integers(1 << 20, 1 << 27))
def test_rotated_sets_are_cold(footprint_bytes: int, l2_bytes: int) -> None:
    set_count = number_of_sets(footprint_bytes, l2_bytes=l2_bytes)

    if set_count < MAX_SETS:
        assert is_cold(set_count, l2_bytes=l2_bytes, footprint_bytes=footprint_bytes)


def test_single_set_larger_than_cache_is_cold() -> None:
    assert is_cold(1, l2_bytes=60 * MIB, footprint_bytes=120 * MIB)
    assert not is_cold(1, l2_bytes=60 * MIB, footprint_bytes=119 * MIB)
    assert not is_cold(2, l2_bytes=60 * MIB, footprint_bytes=100 * MIB)
