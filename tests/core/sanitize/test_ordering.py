"""CUDA's ordering rules for streams, events, the host and its threads, and contexts."""

from __future__ import annotations

import pytest
from core.sanitize.trace_scene import (
    BLOCKING,
    LEGACY,
    NON_BLOCKING,
    PER_THREAD,
    Scene,
)

from cudakit.core.sanitize.ordering import UNKNOWN_WORD
from cudakit.trace.events import CaptureBegin, CaptureEnd, Gap, HostCall, Memop
from cudakit.trace.kinds import HostCallPhase, MemopType


def test_work_of_one_stream_is_ordered() -> None:
    s = Scene()
    assert s.W(1, "x") + s.R(1, "x") + s.W(1, "x") + s.copy(1, "x", "y") == []


def test_legacy_stream_and_blocking_streams_wait_for_each_other() -> None:
    s = Scene(LEGACY, BLOCKING, BLOCKING)
    assert s.W(2, "x") + s.W(1, "x") + s.W(3, "x") == []


def test_blocking_streams_are_unordered_without_legacy_work_between() -> None:
    s = Scene(LEGACY, BLOCKING, BLOCKING)
    s.W(1, "y")
    s.W(2, "x")
    assert len(s.W(3, "x")) == 1


def test_wait_in_legacy_stream_orders_blocking_streams() -> None:
    s = Scene(LEGACY, BLOCKING, BLOCKING)
    s.W(2, "x")
    s.wait(1, 99)  # an event that was never recorded
    assert s.W(3, "x") == []


def test_each_operation_in_the_legacy_stream_waits_for_blocking_streams() -> None:
    s = Scene(LEGACY, BLOCKING, BLOCKING)
    for _ in range(3):
        assert s.W(2, "x") + s.W(1, "x", "y") + s.R(3, "x", "y") + s.W(1, "y") == []


def test_non_blocking_stream_is_not_ordered_with_legacy_stream() -> None:
    s = Scene(LEGACY, NON_BLOCKING)
    s.W(2, "x")
    assert len(s.W(1, "x")) == 1
    assert len(s.R(2, "x")) == 1


def test_per_thread_stream_is_a_blocking_stream_per_thread() -> None:
    s = Scene(LEGACY, PER_THREAD, PER_THREAD)
    s.W(2, "x")
    assert len(s.W(3, "x")) == 1
    s.W(2, "y")
    assert s.W(1, "y") + s.W(3, "y") == []


def test_legacy_stream_orders_only_its_own_context() -> None:
    s = Scene(LEGACY)
    s.create(2, LEGACY, context=2)
    s.create(3, BLOCKING, context=2)
    s.W(3, "x", context=2)
    assert len(s.W(1, "x")) == 1
    s.W(3, "y", context=2)
    assert s.W(2, "y", context=2) == []


def test_legacy_stream_is_ordered_after_destroyed_stream() -> None:
    s = Scene(LEGACY, BLOCKING)
    s.W(2, "x")
    s.destroy(2)
    assert s.W(1, "x") == []


def test_event_of_legacy_stream_covers_blocking_streams() -> None:
    s = Scene(LEGACY, BLOCKING, NON_BLOCKING)
    s.W(2, "x")
    s.record(1, 1)
    s.wait(3, 1)
    assert s.W(3, "x") == []


def test_wait_uses_the_last_record_before_it() -> None:
    s = Scene()
    s.W(1, "x")
    s.record(1, 1)
    s.wait(2, 1)
    s.record(1, 3)
    assert s.W(2, "x") == []


def test_wait_for_unrecorded_event_has_no_effect() -> None:
    s = Scene()
    s.W(1, "x")
    s.wait(2, 7)
    assert len(s.W(2, "x")) == 1


def test_event_orders_streams_of_two_devices() -> None:
    s = Scene(NON_BLOCKING)
    s.create(2, context=2, device=1)
    s.W(1, "x")
    s.record(1, 1)
    s.wait(2, 1, context=2, device=1)
    assert s.R(2, "x", context=2, device=1) == []


@pytest.mark.parametrize("way", ["event_sync", "event_query"])
def test_host_is_ordered_after_completed_event(way: str) -> None:
    s = Scene()
    s.W(1, "x")
    s.record(1, 1)
    s.W(1, "y")
    getattr(s, way)(1)
    assert s.W(2, "x") == []
    assert len(s.W(2, "y")) == 1


@pytest.mark.parametrize("way", ["sync", "query"])
def test_host_is_ordered_after_empty_stream(way: str) -> None:
    s = Scene()
    s.W(1, "x")
    s.W(3, "y")
    getattr(s, way)(1)
    assert s.W(2, "x") == []
    assert len(s.W(2, "y")) == 1


def test_legacy_stream_sync_waits_for_blocking_streams() -> None:
    s = Scene(LEGACY, BLOCKING, NON_BLOCKING, NON_BLOCKING)
    s.W(2, "x")
    s.W(3, "y")
    s.sync(1)
    assert s.W(4, "x") == []
    assert len(s.W(4, "y")) == 1


def test_context_sync_covers_only_its_context() -> None:
    s = Scene(NON_BLOCKING, NON_BLOCKING)
    s.create(3, context=2)
    s.W(1, "x")
    s.W(3, "y", context=2)
    s.device_sync(context=2)
    assert s.R(2, "y") == []
    assert len(s.R(2, "x")) == 1


def test_stream_destroy_does_not_synchronize() -> None:
    s = Scene()
    s.W(1, "x")
    s.destroy(1)
    assert len(s.W(2, "x")) == 1


def test_stream_with_reused_slot_is_a_new_stream() -> None:
    s = Scene(NON_BLOCKING, NON_BLOCKING)
    for stream in range(3, 40):
        s.create(stream)
        assert s.W(stream, "x") == []
        s.record(stream, stream)
        s.destroy(stream)
        s.device_sync()
    s.create(40)
    s.W(40, "y")
    s.wait(1, 39)  # recorded on a stream whose slot stream 40 reuses
    assert len(s.W(1, "y")) == 1


def test_destroying_a_stream_twice_or_unknown_is_ignored() -> None:
    s = Scene()
    s.W(1, "x")
    for stream in (1, 1, 77):
        s.destroy(stream)
    s.device_sync()
    assert s.W(2, "x") == []


def test_clocks_grow_with_the_number_of_streams() -> None:
    s = Scene(*[NON_BLOCKING] * 100)
    for stream in range(1, 101):
        assert s.W(stream, "x") == []
        s.record(1, stream)
        s.wait(stream % 100 + 1, 1)
    assert len(s.W(50, "x")) == 1


def test_captured_work_does_not_run() -> None:
    s = Scene()
    s.call(CaptureBegin(1, stream=1))
    s.W(1, "x")
    s.record(1, 1)
    s.wait(2, 1)  # makes stream 2 part of the capture
    s.W(2, "x")
    assert s.W(3, "x") == []
    s.call(CaptureEnd(1, stream=1))
    assert len(s.W(2, "x")) == 1


def test_host_function_is_ordered_within_its_stream() -> None:
    s = Scene(strict_threads=True)
    s.W(1, "x", thread=1)
    s.call(HostCall(1, HostCallPhase.BEGIN), thread=2)
    s.W(3, "x", "y", thread=2)
    s.sync(3, thread=2)
    s.call(HostCall(1, HostCallPhase.END), thread=2)
    assert s.W(1, "y", thread=1) == []
    assert len(s.W(4, "y", thread=1)) == 1


def test_memory_word_wait_is_ordered_after_its_write() -> None:
    s = Scene()
    s.W(1, "x")
    s.call(Memop(1, 0x42, MemopType.WRITE))
    s.W(1, "y")
    s.call(Memop(2, 0x42, MemopType.WAIT))
    assert s.R(2, "x") == []
    assert len(s.R(2, "y")) == 1


def test_wait_for_unwritten_word_makes_no_race_and_is_counted_as_gap() -> None:
    s = Scene()
    s.W(1, "x")
    s.call(Memop(2, 0x42, MemopType.WAIT))
    assert s.R(2, "x") == []
    assert s.engine.gaps == {UNKNOWN_WORD: 1}


def test_peer_access_uses_the_same_addresses() -> None:
    s = Scene(NON_BLOCKING)
    s.create(2, context=2, device=1)
    s.W(1, "x")
    (race,) = s.copy(2, "y", "x", context=2, device=1)
    assert (race.previous.device, race.current.device) == (0, 1)


def test_threads_share_the_host_clock_unless_strict() -> None:
    for strict in (False, True):
        s = Scene(strict_threads=strict)
        s.R(2, "y", thread=2)  # the thread starts before the wait
        s.W(1, "x", thread=1)
        s.sync(1, thread=1)
        assert len(s.W(2, "x", thread=2)) == strict


def test_new_thread_is_ordered_after_earlier_threads() -> None:
    s = Scene(strict_threads=True)
    s.W(1, "x", thread=1)
    s.sync(1, thread=1)
    assert s.W(2, "x", thread=2) == []


def test_stream_used_by_two_threads_stays_ordered() -> None:
    s = Scene(strict_threads=True)
    s.W(1, "x", thread=1)
    assert s.W(1, "x", thread=2) == []


def test_gaps_are_counted() -> None:
    s = Scene()
    s.call(Gap("an unsupported call", 3))
    s.call(Gap("an unsupported call"))
    assert s.engine.gaps == {"an unsupported call": 4}


def test_stream_without_recorded_creation_is_counted_as_gap() -> None:
    s = Scene(NON_BLOCKING)
    s.W(77, "x")
    assert len(s.W(1, "x")) == 1
    assert s.engine.gaps == {"stream whose creation was not recorded": 1}
