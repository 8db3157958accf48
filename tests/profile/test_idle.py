"""Idle time is divided into causes that add up exactly, and each cause has a program that shows it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_synthetic import MS, US, Program

from cudakit.profile.analysis import analyze
from cudakit.profile.idle import IntervalSet, gaps, intersection, union
from cudakit.profile.result import Device, IdleTime, TimeDivision
from cudakit.trace.kinds import Direction, MemoryKind


def _device(program: Program) -> Device:
    (device,) = analyze([program.activities()]).result.devices
    return device


def _nonzero(idle: IdleTime) -> dict[str, int]:
    causes = {name: getattr(idle, name) for name in idle.__dataclass_fields__}
    return {name: time for name, time in causes.items() if time}


def _assert_exact(time: TimeDivision) -> None:
    idle = sum(_nonzero(time.idle).values())
    assert time.busy_ns + idle == time.length_ns
    assert min(time.busy_ns, *_nonzero(time.idle).values(), 0) == 0


def test_slow_launches_are_launch_bound() -> None:
    program = Program()
    for _ in range(3):
        program.kernel("k", 2 * US)
        program.host(8 * US)
    idle = _device(program).measured.idle
    # Each kernel starts 13 us after the previous one, and runs for 2 us.
    assert _nonzero(idle) == {"launch_ns": 2 * 11 * US}


def test_queued_kernels_leave_no_gap() -> None:
    program = Program()
    for _ in range(5):
        program.kernel("k", 50 * US)
    time = _device(program).measured
    assert time.busy_ns == time.length_ns == 250 * US


def test_gap_after_a_wait_belongs_to_the_wait() -> None:
    program = Program()
    program.kernel("k", 100 * US)
    program.synchronize(line=41)
    program.host(20 * US)
    program.kernel("k", 100 * US)
    device = _device(program)
    assert _nonzero(device.measured.idle) == {"host_wait_ns": 27 * US}
    (wait,) = device.waits
    assert (wait.calls, wait.blocked_ns, wait.idle_ns) == (1, 102 * US, 27 * US)
    assert wait.stack[wait.site].line == 41


def test_wait_that_begins_in_a_gap_has_the_idle_time_of_its_call() -> None:
    program = Program()
    program.kernel("k", 1 * US)
    program.host(50 * US)
    program.call("cudaStreamSynchronize", 20 * US, line=7)
    program.kernel("k", 1 * US)
    device = _device(program)
    assert device.measured.idle.host_wait_ns == 20 * US
    assert [(wait.stack[wait.site].line, wait.idle_ns) for wait in device.waits] == [(7, 20 * US)]


def test_gap_after_a_driver_allocation_belongs_to_the_allocation() -> None:
    program = Program()
    program.kernel("k", 30 * US)
    program.call("cudaMalloc", 200 * US, line=9)
    program.kernel("k", 30 * US)
    device = _device(program)
    assert _nonzero(device.measured.idle) == {"allocation_ns": 175 * US}
    assert [(wait.kind, wait.function) for wait in device.waits] == [("allocation", "cudaMalloc")]


def test_stream_ordered_allocation_is_no_driver_allocation() -> None:
    program = Program()
    program.kernel("k", 1 * US)
    program.call("cudaMallocAsync", 20 * US)
    program.kernel("k", 1 * US)
    assert _nonzero(_device(program).measured.idle) == {"launch_ns": 24 * US}


def test_long_host_time_before_a_copy_to_the_device_is_data_loading() -> None:
    program = Program()
    program.kernel("k", 30 * US)
    program.host(5 * MS)
    program.copy(1 << 20, 20 * US)
    idle = _device(program).measured.idle
    assert _nonzero(idle) == {"data_loading_ns": 5 * MS - 30 * US, "launch_ns": 5 * US}


def test_long_host_time_before_a_kernel_is_other_host_work() -> None:
    program = Program()
    program.kernel("k", 30 * US)
    program.host(5 * MS)
    program.kernel("k", 30 * US)
    idle = _device(program).measured.idle
    assert _nonzero(idle) == {"other_host_ns": 5 * MS - 30 * US, "launch_ns": 5 * US}


def test_queued_work_that_waits_is_a_dependency() -> None:
    program = Program()
    end = program.kernel("k", 30 * US)
    program.kernel("k", 30 * US, stream=2, after_ns=end + 40 * US)
    assert _nonzero(_device(program).measured.idle) == {"dependency_ns": 40 * US}


def test_work_without_its_call_has_an_unknown_cause() -> None:
    program = Program()
    program.kernel("k", 2 * US)
    program.host(50 * US)
    program.kernel("k", 2 * US)
    program.events = [event for event in program.events if event.seq != 4]
    assert _nonzero(_device(program).measured.idle) == {"unknown_ns": 53 * US}


def test_recorded_time_contains_the_time_before_and_after_all_work() -> None:
    program = Program()
    program.call("cudaGetDevice", 1 * US)
    program.host(50 * MS)
    program.kernel("k", 30 * US)
    program.host(7 * MS)
    program.call("cudaGetDevice", 1 * US)
    time = _device(program).recorded
    assert time.idle.not_started_ns == 50 * MS + 6 * US
    assert time.idle.ended_ns == 7 * MS + 1 * US - 30 * US
    _assert_exact(time)


_ACTIONS = st.one_of(
    st.tuples(st.just("host"), st.integers(0, 3 * MS)),
    st.tuples(st.just("kernel"), st.integers(0, 200 * US)),
    st.tuples(st.just("other stream"), st.integers(0, 200 * US)),
    st.tuples(st.just("pinned"), st.integers(0, 200 * US)),
    st.tuples(st.just("pageable"), st.integers(0, 200 * US)),
    st.tuples(st.just("fill"), st.integers(0, 20 * US)),
    st.tuples(st.just("wait"), st.integers(0, 9 * US)),
    st.tuples(st.just("allocation"), st.integers(0, 90 * US)),
    st.tuples(st.just("graph"), st.integers(0, 90 * US)),
    st.tuples(st.just("mark"), st.just(0)),
    st.tuples(st.just("kernel without its call"), st.integers(0, 90 * US)),
)


_PERFORM: dict[str, Callable[[Program, int], object]] = {
    "host": Program.host,
    "kernel": lambda program, duration: program.kernel("k", duration, line=duration % 5),
    "other stream": lambda program, duration: program.kernel(
        "k", duration, stream=2, after_ns=program.now_ns + duration
    ),
    "pinned": lambda program, duration: program.copy(duration, duration),
    "pageable": lambda program, duration: program.copy(
        duration, duration, direction=Direction.DEVICE_TO_HOST, host=MemoryKind.PAGEABLE
    ),
    "fill": lambda program, duration: program.fill(duration, duration),
    "wait": lambda program, duration: program.synchronize(line=41, latency_ns=duration),
    "allocation": lambda program, duration: program.call("cudaFree", duration, line=9),
    "graph": lambda program, duration: program.graph(["a", "b"], duration),
    "mark": lambda program, _: program.mark("optimizer step", "cudakit"),
    "kernel without its call": lambda program, duration: program.kernel_without_call("k", duration),
}


@settings(max_examples=200, deadline=None)
@given(st.lists(_ACTIONS, min_size=1, max_size=40))
def test_causes_add_up_to_the_idle_time(actions: list[tuple[str, int]]) -> None:
    program = Program()
    for action, duration in actions:
        _PERFORM[action](program, duration)
    for device in analyze([program.activities()]).result.devices:
        _assert_exact(device.recorded)
        _assert_exact(device.measured)
        for step in device.steps.steps:
            _assert_exact(step.time)
        idle = device.measured.idle
        for kind, idle_ns in (("wait", idle.host_wait_ns), ("allocation", idle.allocation_ns)):
            assert sum(wait.idle_ns for wait in device.waits if wait.kind == kind) == idle_ns
        steady = [
            step.time.length_ns
            for step in device.steps.steps
            if not step.is_warm_up and not step.is_slow
        ]
        assert not steady or sum(steady) == device.measured.length_ns
        assert device.recorded.length_ns == device.recorded.end_ns - device.recorded.start_ns


# --- intervals, compared with sets of instants -----------------------------------------------------

_INTERVALS = st.lists(
    st.tuples(st.integers(-5, 40), st.integers(-5, 40)).map(lambda pair: tuple(sorted(pair))),
    max_size=12,
)


def _set(pairs: list[tuple[int, int]]) -> IntervalSet:
    array = np.array(pairs, np.int64).reshape(-1, 2)
    return union(array[:, 0], array[:, 1])


def _instants(intervals: IntervalSet) -> set[int]:
    pairs = zip(intervals.start_ns.tolist(), intervals.end_ns.tolist(), strict=True)
    return {instant for start, end in pairs for instant in range(start, end)}


def _brute_force(pairs: list[tuple[int, int]]) -> set[int]:
    return {instant for start, end in pairs for instant in range(start, end)}


def _assert_normal(intervals: IntervalSet) -> None:
    """Check that the intervals are not empty, are sorted, and do not touch."""
    assert (intervals.end_ns > intervals.start_ns).all()
    assert (intervals.start_ns[1:] > intervals.end_ns[:-1]).all()


@given(_INTERVALS)
def test_union_contains_the_instants_of_all_intervals(pairs: list[tuple[int, int]]) -> None:
    result = _set(pairs)
    _assert_normal(result)
    assert _instants(result) == _brute_force(pairs)
    assert result.total_ns == len(_brute_force(pairs))


@given(_INTERVALS, _INTERVALS)
def test_intersection_contains_the_common_instants(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    result = intersection(_set(first), _set(second))
    _assert_normal(result)
    assert _instants(result) == _brute_force(first) & _brute_force(second)


@given(_INTERVALS, st.integers(-10, 45), st.integers(0, 50))
def test_gaps_and_busy_time_divide_a_window(
    pairs: list[tuple[int, int]], start: int, length: int
) -> None:
    busy = _set(pairs)
    idle = gaps(busy, start, start + length)
    _assert_normal(idle)
    assert _instants(idle) == set(range(start, start + length)) - _brute_force(pairs)
    assert idle.total_ns + busy.part_between(start, start + length).total_ns == length


@given(_INTERVALS, _INTERVALS)
def test_covered_within_counts_the_instants_of_each_interval(
    pairs: list[tuple[int, int]], windows: list[tuple[int, int]]
) -> None:
    array = np.array(windows, np.int64).reshape(-1, 2)
    covered = _set(pairs).covered_within(array[:, 0], array[:, 1])
    instants = _brute_force(pairs)
    assert covered.tolist() == [len(instants & set(range(*window))) for window in windows]
