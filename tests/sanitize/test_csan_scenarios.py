"""The scenarios of PyTorch's tests of its CUDA sanitizer, with their numbers of streams and buffers."""

from __future__ import annotations

import pytest
from sanitize.trace_scene import NON_BLOCKING, Scene


def scene_with_streams(streams: int = 11) -> Scene:
    """Return a scene with streams 1 to 11; 11 replaces stream 0 of the scenarios."""
    return Scene(*[NON_BLOCKING] * streams)


def test_kernel_without_accesses_does_not_race() -> None:
    assert scene_with_streams().kernel(1) == []


def test_two_reads_do_not_race() -> None:
    scene = scene_with_streams()
    assert scene.read(1, "x") + scene.read(2, "x") == []


def test_write_after_read_in_another_stream_races() -> None:
    scene = scene_with_streams()
    assert scene.read(1, "x") == []
    assert len(scene.write(2, "x")) == 1


def test_event_orders_write_after_read() -> None:
    scene = scene_with_streams()
    scene.read(1, "x")
    scene.record(1, 1)
    scene.wait(2, 1)
    assert scene.write(2, "x") == []


def test_each_reader_must_be_ordered_after_the_last_write() -> None:
    scene = scene_with_streams()
    scene.write(1, "x")
    scene.record(1, 1)
    scene.wait(2, 1)
    assert scene.read(2, "x") == []
    assert len(scene.read(3, "x")) == 1


def test_two_streams_after_one_write_are_unordered() -> None:
    scene = scene_with_streams()
    scene.write(1, "x")
    scene.record(1, 1)
    scene.wait(2, 1)
    scene.wait(3, 1)
    assert scene.read(2, "x") + scene.read(3, "x") == []
    (race,) = scene.write(2, "x")
    assert race.previous.stream == 3


def test_chain_of_events_orders_first_before_last() -> None:
    scene = scene_with_streams(12)
    scene.read(1, "x")
    for i in range(1, 11):
        scene.record(i, i)
        scene.wait(i + 1, i)
    assert scene.write(11, "x") == []


def test_work_after_event_record_is_not_waited_for() -> None:
    scene = scene_with_streams()
    scene.read(1, "x")
    scene.record(1, 1)
    scene.read(1, "x")
    scene.wait(2, 1)
    assert len(scene.write(2, "x")) == 1


@pytest.mark.parametrize("case", ["destroyed and made", "destroyed", "made"])
def test_record_of_destroyed_event_is_ignored(case: str) -> None:
    scene = scene_with_streams()
    scene.read(1, "x")
    scene.record(1, 1)
    # A recreated event has another number and no record.
    scene.wait(2, {"destroyed and made": 2, "destroyed": 3, "made": 4}[case])
    assert len(scene.write(2, "x")) == 1


@pytest.mark.parametrize(("last_read", "races"), [(True, 1), (False, 0)])
def test_all_reads_since_the_last_write_are_checked(last_read: bool, races: int) -> None:
    scene = scene_with_streams()
    for i in range(1, 10):
        scene.read(i, "x")
        scene.record(i, i)
    for i in range(1, 10):
        scene.wait(11, i)
    if last_read:
        scene.read(10, "x")
        scene.record(10, 9)  # on the wrong stream
        scene.wait(11, 10)
    assert len(scene.write(11, "x")) == races


def test_each_racing_buffer_is_reported() -> None:
    scene = scene_with_streams()
    buffers = [f"b{letter}" for letter in "abcdefghij"]
    scene.write(11, *buffers)
    assert len(scene.write(1, *buffers)) == 10


def test_waits_accumulate() -> None:
    scene = scene_with_streams()
    scene.write(1, "a")
    scene.write(2, "b")
    scene.record(1, 1)
    scene.record(2, 2)
    scene.write(1, "a")
    scene.write(2, "b")
    scene.wait(2, 1)
    scene.wait(1, 2)
    scene.record(3, 2)
    scene.wait(1, 3)
    assert scene.write(1, "a", "b") == []


def test_second_record_replaces_the_first() -> None:
    scene = scene_with_streams()
    scene.read(1, "a")
    scene.read(2, "b")
    scene.record(1, 1)
    scene.record(1, 2)
    scene.wait(3, 1)
    assert len(scene.write(3, "a")) == 1
    assert scene.write(3, "b") == []


def test_several_streams_wait_for_one_record() -> None:
    scene = scene_with_streams()
    scene.write(1, "a")
    scene.record(1, 1)
    scene.wait(2, 1)
    scene.wait(3, 1)
    assert scene.read(2, "a") + scene.read(3, "a") == []


def test_device_sync_orders_all_streams() -> None:
    scene = scene_with_streams()
    buffers = [f"x{letter}" for letter in "abcdefghi"]
    for i, buffer in enumerate(buffers, 1):
        scene.write(i, buffer)
    scene.device_sync()
    assert scene.write(11, *buffers) == []


def test_device_sync_does_not_order_later_work() -> None:
    scene = scene_with_streams()
    scene.write(1, "x")
    scene.device_sync()
    scene.write(1, "x")
    assert len(scene.write(2, "x")) == 1


def test_stream_created_after_sync_is_ordered_after_it() -> None:
    scene = scene_with_streams(1)
    scene.write(1, "x")
    scene.device_sync()
    scene.create(2)
    assert scene.write(2, "x") == []


def test_stream_sync_orders_its_work_before_all_streams() -> None:
    scene = scene_with_streams()
    scene.write(11, "a")
    scene.write(1, "b")
    scene.sync(11)
    assert scene.read(2, "a") + scene.read(3, "a") == []
    assert len(scene.read(4, "b")) == 1


def test_event_sync_covers_work_before_its_record() -> None:
    scene = scene_with_streams()
    scene.write(1, "a")
    scene.record(1, 1)
    scene.write(1, "b")
    scene.event_sync(1)
    assert scene.write(2, "a") == []
    assert len(scene.write(2, "b")) == 1
