"""CUDA's ordering rules for streams, events, the host and its threads, and contexts."""

from __future__ import annotations

import pytest
from sanitize.trace_scene import (
    BLOCKING,
    LEGACY,
    NON_BLOCKING,
    PER_THREAD,
    Scene,
)

from cudakit.sanitize.ordering import UNKNOWN_WORD, Call, StreamOrder
from cudakit.trace.events import CaptureBegin, CaptureEnd, Gap, HostCall, Memop
from cudakit.trace.kinds import EventKind, HostCallPhase, MemopType


def test_work_of_one_stream_is_ordered() -> None:
    scene = Scene()
    assert (
        scene.write(1, "x") + scene.read(1, "x") + scene.write(1, "x") + scene.copy(1, "x", "y")
        == []
    )


def test_legacy_stream_and_blocking_streams_wait_for_each_other() -> None:
    scene = Scene(LEGACY, BLOCKING, BLOCKING)
    assert scene.write(2, "x") + scene.write(1, "x") + scene.write(3, "x") == []


def test_blocking_streams_are_unordered_without_legacy_work_between() -> None:
    scene = Scene(LEGACY, BLOCKING, BLOCKING)
    scene.write(1, "y")
    scene.write(2, "x")
    assert len(scene.write(3, "x")) == 1


def test_wait_in_legacy_stream_orders_blocking_streams() -> None:
    scene = Scene(LEGACY, BLOCKING, BLOCKING)
    scene.write(2, "x")
    scene.wait(1, 99)  # an event that was never recorded
    assert scene.write(3, "x") == []


def test_each_operation_in_the_legacy_stream_waits_for_blocking_streams() -> None:
    scene = Scene(LEGACY, BLOCKING, BLOCKING)
    for _ in range(3):
        assert (
            scene.write(2, "x")
            + scene.write(1, "x", "y")
            + scene.read(3, "x", "y")
            + scene.write(1, "y")
            == []
        )


def test_non_blocking_stream_is_not_ordered_with_legacy_stream() -> None:
    scene = Scene(LEGACY, NON_BLOCKING)
    scene.write(2, "x")
    assert len(scene.write(1, "x")) == 1
    assert len(scene.read(2, "x")) == 1


def test_per_thread_stream_is_a_blocking_stream_per_thread() -> None:
    scene = Scene(LEGACY, PER_THREAD, PER_THREAD)
    scene.write(2, "x")
    assert len(scene.write(3, "x")) == 1
    scene.write(2, "y")
    assert scene.write(1, "y") + scene.write(3, "y") == []


def test_legacy_stream_orders_only_its_own_context() -> None:
    scene = Scene(LEGACY)
    scene.create(2, LEGACY, context=2)
    scene.create(3, BLOCKING, context=2)
    scene.write(3, "x", context=2)
    assert len(scene.write(1, "x")) == 1
    scene.write(3, "y", context=2)
    assert scene.write(2, "y", context=2) == []


def test_legacy_stream_is_ordered_after_destroyed_stream() -> None:
    scene = Scene(LEGACY, BLOCKING)
    scene.write(2, "x")
    scene.destroy(2)
    assert scene.write(1, "x") == []


def test_event_of_legacy_stream_covers_blocking_streams() -> None:
    scene = Scene(LEGACY, BLOCKING, NON_BLOCKING)
    scene.write(2, "x")
    scene.record(1, 1)
    scene.wait(3, 1)
    assert scene.write(3, "x") == []


def test_wait_uses_the_last_record_before_it() -> None:
    scene = Scene()
    scene.write(1, "x")
    scene.record(1, 1)
    scene.wait(2, 1)
    scene.record(1, 3)
    assert scene.write(2, "x") == []


def test_wait_for_unrecorded_event_has_no_effect() -> None:
    scene = Scene()
    scene.write(1, "x")
    scene.wait(2, 7)
    assert len(scene.write(2, "x")) == 1


def test_event_orders_streams_of_two_devices() -> None:
    scene = Scene(NON_BLOCKING)
    scene.create(2, context=2, device=1)
    scene.write(1, "x")
    scene.record(1, 1)
    scene.wait(2, 1, context=2, device=1)
    assert scene.read(2, "x", context=2, device=1) == []


@pytest.mark.parametrize("sync_call", ["event_sync", "event_query"])
def test_host_is_ordered_after_completed_event(sync_call: str) -> None:
    scene = Scene()
    scene.write(1, "x")
    scene.record(1, 1)
    scene.write(1, "y")
    getattr(scene, sync_call)(1)
    assert scene.write(2, "x") == []
    assert len(scene.write(2, "y")) == 1


@pytest.mark.parametrize("sync_call", ["sync", "query"])
def test_host_is_ordered_after_empty_stream(sync_call: str) -> None:
    scene = Scene()
    scene.write(1, "x")
    scene.write(3, "y")
    getattr(scene, sync_call)(1)
    assert scene.write(2, "x") == []
    assert len(scene.write(2, "y")) == 1


def test_legacy_stream_sync_waits_for_blocking_streams() -> None:
    scene = Scene(LEGACY, BLOCKING, NON_BLOCKING, NON_BLOCKING)
    scene.write(2, "x")
    scene.write(3, "y")
    scene.sync(1)
    assert scene.write(4, "x") == []
    assert len(scene.write(4, "y")) == 1


def test_context_sync_covers_only_its_context() -> None:
    scene = Scene(NON_BLOCKING, NON_BLOCKING)
    scene.create(3, context=2)
    scene.write(1, "x")
    scene.write(3, "y", context=2)
    scene.device_sync(context=2)
    assert scene.read(2, "y") == []
    assert len(scene.read(2, "x")) == 1


def test_stream_destroy_does_not_synchronize() -> None:
    scene = Scene()
    scene.write(1, "x")
    scene.destroy(1)
    assert len(scene.write(2, "x")) == 1


def test_stream_with_reused_slot_is_a_new_stream() -> None:
    scene = Scene(NON_BLOCKING, NON_BLOCKING)
    for stream in range(3, 40):
        scene.create(stream)
        assert scene.write(stream, "x") == []
        scene.record(stream, stream)
        scene.destroy(stream)
        scene.device_sync()
    scene.create(40)
    scene.write(40, "y")
    scene.wait(1, 39)  # recorded on a stream whose slot stream 40 reuses
    assert len(scene.write(1, "y")) == 1


def test_destroying_a_stream_twice_or_unknown_is_ignored() -> None:
    scene = Scene()
    scene.write(1, "x")
    for stream in (1, 1, 77):
        scene.destroy(stream)
    scene.device_sync()
    assert scene.write(2, "x") == []


def test_clocks_grow_with_the_number_of_streams() -> None:
    scene = Scene(*[NON_BLOCKING] * 100)
    for stream in range(1, 101):
        assert scene.write(stream, "x") == []
        scene.record(1, stream)
        scene.wait(stream % 100 + 1, 1)
    assert len(scene.write(50, "x")) == 1


def test_captured_work_does_not_run() -> None:
    scene = Scene()
    scene.call(CaptureBegin(1, stream=1))
    scene.write(1, "x")
    scene.record(1, 1)
    scene.wait(2, 1)  # makes stream 2 part of the capture
    scene.write(2, "x")
    assert scene.write(3, "x") == []
    scene.call(CaptureEnd(1, stream=1))
    assert len(scene.write(2, "x")) == 1


def test_host_function_is_ordered_within_its_stream() -> None:
    scene = Scene(strict_threads=True)
    scene.write(1, "x", thread=1)
    scene.call(HostCall(1, HostCallPhase.BEGIN), thread=2)
    scene.write(3, "x", "y", thread=2)
    scene.sync(3, thread=2)
    scene.call(HostCall(1, HostCallPhase.END), thread=2)
    assert scene.write(1, "y", thread=1) == []
    assert len(scene.write(4, "y", thread=1)) == 1


def test_memory_word_wait_is_ordered_after_its_write() -> None:
    scene = Scene()
    scene.write(1, "x")
    scene.call(Memop(1, 0x42, MemopType.WRITE))
    scene.write(1, "y")
    scene.call(Memop(2, 0x42, MemopType.WAIT))
    assert scene.read(2, "x") == []
    assert len(scene.read(2, "y")) == 1


def test_wait_for_unwritten_word_makes_no_race_and_is_counted_as_gap() -> None:
    scene = Scene()
    scene.write(1, "x")
    scene.call(Memop(2, 0x42, MemopType.WAIT))
    assert scene.read(2, "x") == []
    assert scene.engine.gap_counts == {UNKNOWN_WORD: 1}


def test_peer_access_uses_the_same_addresses() -> None:
    scene = Scene(NON_BLOCKING)
    scene.create(2, context=2, device=1)
    scene.write(1, "x")
    (race,) = scene.copy(2, "y", "x", context=2, device=1)
    assert (race.previous.device, race.current.device) == (0, 1)


def test_clocks_do_not_grow_with_streams_that_were_destroyed() -> None:
    order = StreamOrder()
    for number in range(1, 2001):
        call = Call(number, EventKind.LAUNCH, 0, number, context=1, device=0, thread=1, site=0)
        order.create_stream(call, NON_BLOCKING)
        assert order.enqueue(call)
        order.sync_stream(call)
        order.destroy_stream(call)
    assert len(order.past_clock()) <= 64


def test_threads_share_the_host_clock_unless_strict() -> None:
    for strict in (False, True):
        scene = Scene(strict_threads=strict)
        scene.read(2, "y", thread=2)  # the thread starts before the wait
        scene.write(1, "x", thread=1)
        scene.sync(1, thread=1)
        assert len(scene.write(2, "x", thread=2)) == strict


def test_new_thread_is_ordered_after_earlier_threads() -> None:
    scene = Scene(strict_threads=True)
    scene.write(1, "x", thread=1)
    scene.sync(1, thread=1)
    assert scene.write(2, "x", thread=2) == []


def test_stream_used_by_two_threads_stays_ordered() -> None:
    scene = Scene(strict_threads=True)
    scene.write(1, "x", thread=1)
    assert scene.write(1, "x", thread=2) == []


def test_gaps_are_counted() -> None:
    scene = Scene()
    scene.call(Gap("an unsupported call", 3))
    scene.call(Gap("an unsupported call"))
    assert scene.engine.gap_counts == {"an unsupported call": 4}


def test_stream_without_recorded_creation_is_counted_as_gap() -> None:
    scene = Scene(NON_BLOCKING)
    scene.write(77, "x")
    assert len(scene.write(1, "x")) == 1
    assert scene.engine.gap_counts == {"stream whose creation was not recorded": 1}
