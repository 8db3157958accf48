from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from contract.workbench import LONG_NS, Workbench, refused

from cudakit.gpu.api import LEGACY, Event, Gpu
from cudakit.gpu.driver_errors import Status

# globaltimer has a resolution of about a microsecond.
LONG_S = 0.99 * LONG_NS / 1e9


def test_wait_orders_stream_after_recorded_work(bench: Workbench) -> None:
    gpu, first, second = bench.gpu, bench.gpu.stream(), bench.gpu.stream(blocking=False)
    value, result = bench.ints(0), bench.ints(0)
    bench.spin(first)
    bench.store(value, 1, first)

    gpu.wait(second, bench.recorded(first, timing=False))
    bench.move(result, value, second)

    assert bench.read(result) == [1]


def test_wait_does_not_delay_earlier_work(bench: Workbench) -> None:
    gpu, first, second = bench.gpu, bench.gpu.stream(), bench.gpu.stream()
    value = bench.ints(0)
    bench.spin(first)
    bench.store(value, 5, second)
    first_record = bench.recorded(second)
    gpu.wait(second, bench.recorded(first))
    gpu.sync_event(first_record)

    assert not gpu.query_stream(first)


def test_unrecorded_event_is_complete_and_delays_no_work(bench: Workbench) -> None:
    gpu, event, value = bench.gpu, bench.gpu.event(), bench.ints(0)
    stream = gpu.stream()

    gpu.sync_event(event)
    gpu.wait(stream, event)
    bench.store(value, 2, stream)

    assert gpu.query_event(event)
    assert bench.read(value) == [2]


def test_wait_keeps_record_at_time_of_call(bench: Workbench) -> None:
    gpu, first, second = bench.gpu, bench.gpu.stream(), bench.gpu.stream()
    event = bench.recorded(first)
    gpu.wait(second, event)

    bench.spin(first)
    gpu.record(event, first)
    gpu.sync_stream(second)

    assert not gpu.query_stream(first)


def test_wait_after_second_record_uses_second_record(bench: Workbench) -> None:
    gpu, first, second = bench.gpu, bench.gpu.stream(), bench.gpu.stream()
    event = bench.recorded(first)
    bench.spin(first)
    gpu.record(event, first)

    gpu.wait(second, event)
    gpu.sync_stream(second)

    assert gpu.query_stream(first)


def test_event_is_done_after_recorded_work(bench: Workbench) -> None:
    gpu, stream = bench.gpu, bench.gpu.stream()
    first = bench.recorded(stream)
    bench.spin(stream)
    last_event = bench.recorded(stream)
    is_complete_during_work = gpu.query_event(last_event)
    gpu.sync_stream(stream)

    assert not is_complete_during_work
    assert gpu.query_event(first)
    assert gpu.query_event(last_event)


def test_sync_event_does_not_wait_for_later_work(bench: Workbench) -> None:
    gpu, stream, value = bench.gpu, bench.gpu.stream(), bench.ints(0)
    bench.spin(stream)
    bench.store(value, 8, stream)
    event = bench.recorded(stream)
    bench.spin(stream)

    gpu.sync_event(event)
    is_complete_during_work = gpu.query_stream(stream)

    assert not is_complete_during_work
    assert bench.read(value) == [8]


def test_destroyed_event_still_orders_waiting_stream(bench: Workbench) -> None:
    gpu, first, second = bench.gpu, bench.gpu.stream(), bench.gpu.stream()
    event = gpu.event()
    bench.spin(first)
    gpu.record(event, first)
    gpu.wait(second, event)

    gpu.destroy_event(event)
    gpu.sync_stream(second)

    assert gpu.query_stream(first)


def test_elapsed_time_grows_with_work_between_events(bench: Workbench) -> None:
    gpu, stream = bench.gpu, bench.gpu.stream()
    events = [bench.recorded(stream)]
    for _ in range(3):
        bench.spin(stream, LONG_NS // 10)
        events.append(bench.recorded(stream))
    gpu.sync()

    elapsed = [gpu.elapsed(events[0], event) for event in events]

    assert elapsed[0] == 0
    assert all(
        later_seconds - earlier_seconds >= LONG_S / 10
        for earlier_seconds, later_seconds in pairwise(elapsed)
    )
    assert gpu.elapsed(events[1], events[0]) == pytest.approx(-elapsed[1])


def test_time_elapses_between_events_of_different_streams(bench: Workbench) -> None:
    gpu, first, second = bench.gpu, bench.gpu.stream(), bench.gpu.stream()
    begin = bench.recorded(first)
    bench.spin(first)
    gpu.wait(second, bench.recorded(first))
    end = bench.recorded(second)
    gpu.sync()

    assert gpu.elapsed(begin, end) >= LONG_S


def test_elapsed_needs_timing(bench: Workbench) -> None:
    timed, untimed = bench.recorded(LEGACY), bench.recorded(LEGACY, timing=False)
    bench.gpu.sync()

    for event_pair in ((timed, untimed), (untimed, timed)):
        with refused(Status.INVALID_HANDLE) as caught:
            bench.gpu.elapsed(*event_pair)
        assert f"event {untimed} was created with timing=False" in caught.value.message


def test_elapsed_needs_completed_events(bench: Workbench) -> None:
    stream = bench.gpu.stream()
    begin = bench.recorded(stream)
    bench.spin(stream)

    with refused(Status.NOT_READY) as caught:
        bench.gpu.elapsed(begin, bench.recorded(stream))
    assert "synchronize" in caught.value.hint


def test_elapsed_needs_recorded_events(bench: Workbench) -> None:
    recorded = bench.recorded(LEGACY)
    bench.gpu.sync()

    with refused(Status.INVALID_HANDLE) as caught:
        bench.gpu.elapsed(recorded, bench.gpu.event())
    assert "recorded" in caught.value.message


USES: dict[str, Callable[[Gpu, Event], object]] = {
    "destroy": lambda gpu, event: gpu.destroy_event(event),
    "query": lambda gpu, event: gpu.query_event(event),
    "sync": lambda gpu, event: gpu.sync_event(event),
    "record": lambda gpu, event: gpu.record(event, LEGACY),
    "wait": lambda gpu, event: gpu.wait(LEGACY, event),
    "elapsed": lambda gpu, event: gpu.elapsed(event, event),
}


@pytest.mark.parametrize("call", USES.values(), ids=USES)
def test_destroyed_event_is_invalid(gpu: Gpu, call: Callable[[Gpu, Event], object]) -> None:
    event = gpu.event()
    gpu.destroy_event(event)

    with refused(Status.INVALID_HANDLE) as caught:
        call(gpu, event)
    assert f"event {event}" in caught.value.message
    assert gpu.event() != event
