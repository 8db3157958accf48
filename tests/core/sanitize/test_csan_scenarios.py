"""The scenarios of PyTorch's tests of its CUDA sanitizer, with their numbers of streams and buffers."""

from __future__ import annotations

import pytest
from core.sanitize.trace_scene import NON_BLOCKING, Scene


def scene(streams: int = 11) -> Scene:
    """Return a scene with streams 1 to 11; 11 replaces stream 0 of the scenarios."""
    return Scene(*[NON_BLOCKING] * streams)


def test_kernel_without_accesses_does_not_race() -> None:
    assert scene().kernel(1) == []


def test_two_reads_do_not_race() -> None:
    s = scene()
    assert s.R(1, "x") + s.R(2, "x") == []


def test_write_after_read_in_another_stream_races() -> None:
    s = scene()
    assert s.R(1, "x") == []
    assert len(s.W(2, "x")) == 1


def test_event_orders_write_after_read() -> None:
    s = scene()
    s.R(1, "x")
    s.record(1, 1)
    s.wait(2, 1)
    assert s.W(2, "x") == []


def test_each_reader_must_be_ordered_after_the_last_write() -> None:
    s = scene()
    s.W(1, "x")
    s.record(1, 1)
    s.wait(2, 1)
    assert s.R(2, "x") == []
    assert len(s.R(3, "x")) == 1


def test_two_streams_after_one_write_are_unordered() -> None:
    s = scene()
    s.W(1, "x")
    s.record(1, 1)
    s.wait(2, 1)
    s.wait(3, 1)
    assert s.R(2, "x") + s.R(3, "x") == []
    (race,) = s.W(2, "x")
    assert race.previous.stream == 3


def test_chain_of_events_orders_first_before_last() -> None:
    s = scene(12)
    s.R(1, "x")
    for i in range(1, 11):
        s.record(i, i)
        s.wait(i + 1, i)
    assert s.W(11, "x") == []


def test_work_after_event_record_is_not_waited_for() -> None:
    s = scene()
    s.R(1, "x")
    s.record(1, 1)
    s.R(1, "x")
    s.wait(2, 1)
    assert len(s.W(2, "x")) == 1


@pytest.mark.parametrize("case", ["destroyed and made", "destroyed", "made"])
def test_record_of_destroyed_event_is_ignored(case: str) -> None:
    s = scene()
    s.R(1, "x")
    s.record(1, 1)
    # A recreated event has another number and no record.
    s.wait(2, {"destroyed and made": 2, "destroyed": 3, "made": 4}[case])
    assert len(s.W(2, "x")) == 1


@pytest.mark.parametrize(("last_read", "races"), [(True, 1), (False, 0)])
def test_all_reads_since_the_last_write_are_checked(last_read: bool, races: int) -> None:
    s = scene()
    for i in range(1, 10):
        s.R(i, "x")
        s.record(i, i)
    for i in range(1, 10):
        s.wait(11, i)
    if last_read:
        s.R(10, "x")
        s.record(10, 9)  # on the wrong stream
        s.wait(11, 10)
    assert len(s.W(11, "x")) == races


def test_each_racing_buffer_is_reported() -> None:
    s = scene()
    buffers = [f"b{letter}" for letter in "abcdefghij"]
    s.W(11, *buffers)
    assert len(s.W(1, *buffers)) == 10


def test_waits_accumulate() -> None:
    s = scene()
    s.W(1, "a")
    s.W(2, "b")
    s.record(1, 1)
    s.record(2, 2)
    s.W(1, "a")
    s.W(2, "b")
    s.wait(2, 1)
    s.wait(1, 2)
    s.record(3, 2)
    s.wait(1, 3)
    assert s.W(1, "a", "b") == []


def test_second_record_replaces_the_first() -> None:
    s = scene()
    s.R(1, "a")
    s.R(2, "b")
    s.record(1, 1)
    s.record(1, 2)
    s.wait(3, 1)
    assert len(s.W(3, "a")) == 1
    assert s.W(3, "b") == []


def test_several_streams_wait_for_one_record() -> None:
    s = scene()
    s.W(1, "a")
    s.record(1, 1)
    s.wait(2, 1)
    s.wait(3, 1)
    assert s.R(2, "a") + s.R(3, "a") == []


def test_device_sync_orders_all_streams() -> None:
    s = scene()
    buffers = [f"x{letter}" for letter in "abcdefghi"]
    for i, buffer in enumerate(buffers, 1):
        s.W(i, buffer)
    s.device_sync()
    assert s.W(11, *buffers) == []


def test_device_sync_does_not_order_later_work() -> None:
    s = scene()
    s.W(1, "x")
    s.device_sync()
    s.W(1, "x")
    assert len(s.W(2, "x")) == 1


def test_stream_created_after_sync_is_ordered_after_it() -> None:
    s = scene(1)
    s.W(1, "x")
    s.device_sync()
    s.create(2)
    assert s.W(2, "x") == []


def test_stream_sync_orders_its_work_before_all_streams() -> None:
    s = scene()
    s.W(11, "a")
    s.W(1, "b")
    s.sync(11)
    assert s.R(2, "a") + s.R(3, "a") == []
    assert len(s.R(4, "b")) == 1


def test_event_sync_covers_work_before_its_record() -> None:
    s = scene()
    s.W(1, "a")
    s.record(1, 1)
    s.W(1, "b")
    s.event_sync(1)
    assert s.W(2, "a") == []
    assert len(s.W(2, "b")) == 1
