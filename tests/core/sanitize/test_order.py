"""What comes after what, by the rules of CUDA: streams, the host, contexts, memory."""

from __future__ import annotations

import pytest
from core.sanitize.scene import (
    BLOCKING,
    LEGACY,
    NON_BLOCKING,
    PER_THREAD,
    Scene,
    place,
)

from cudakit.core.sanitize.races import RaceKind, SyncKind
from cudakit.core.sanitize.waits import UNKNOWN_WORD
from cudakit.trace.events import CaptureBegin, CaptureEnd, Gap, HostCall, Memop
from cudakit.trace.kinds import Direction, Flag, HostMemory, How, Layer, Phase

HOST_TO_DEVICE, DEVICE_TO_HOST = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST
DEVICE_TO_DEVICE, HOST_TO_HOST = Direction.DEVICE_TO_DEVICE, Direction.HOST_TO_HOST
PINNED, PAGEABLE = HostMemory.PINNED, HostMemory.PAGEABLE


def test_work_of_one_stream_is_ordered() -> None:
    s = Scene()
    assert s.W(1, "x") + s.R(1, "x") + s.W(1, "x") + s.copy(1, "x", "y") == []


def test_the_legacy_stream_comes_after_blocking_streams_and_they_after_it() -> None:
    s = Scene(LEGACY, BLOCKING, BLOCKING)
    assert s.W(2, "x") + s.W(1, "x") + s.W(3, "x") == []


def test_blocking_streams_without_the_legacy_one_between_are_not_ordered() -> None:
    s = Scene(LEGACY, BLOCKING, BLOCKING)
    s.W(1, "y")
    s.W(2, "x")
    assert len(s.W(3, "x")) == 1


def test_a_wait_in_the_legacy_stream_orders_blocking_streams_too() -> None:
    s = Scene(LEGACY, BLOCKING, BLOCKING)
    s.W(2, "x")
    s.wait(1, 99)  # an event that was never recorded
    assert s.W(3, "x") == []


def test_the_legacy_stream_is_reordered_with_every_turn() -> None:
    s = Scene(LEGACY, BLOCKING, BLOCKING)
    for _ in range(3):
        assert s.W(2, "x") + s.W(1, "x", "y") + s.R(3, "x", "y") + s.W(1, "y") == []


def test_a_non_blocking_stream_has_nothing_to_do_with_the_legacy_one() -> None:
    s = Scene(LEGACY, NON_BLOCKING)
    s.W(2, "x")
    assert len(s.W(1, "x")) == 1
    assert len(s.R(2, "x")) == 1


def test_the_stream_of_a_thread_is_a_blocking_one_and_apart_from_those_of_others() -> None:
    s = Scene(LEGACY, PER_THREAD, PER_THREAD)
    s.W(2, "x")
    assert len(s.W(3, "x")) == 1
    s.W(2, "y")
    assert s.W(1, "y") + s.W(3, "y") == []


def test_the_legacy_stream_of_one_context_has_nothing_to_do_with_another_context() -> None:
    s = Scene(LEGACY)
    s.create(2, LEGACY, context=2)
    s.create(3, BLOCKING, context=2)
    s.W(3, "x", context=2)
    assert len(s.W(1, "x")) == 1
    s.W(3, "y", context=2)
    assert s.W(2, "y", context=2) == []


def test_the_legacy_stream_comes_after_what_a_destroyed_stream_left() -> None:
    s = Scene(LEGACY, BLOCKING)
    s.W(2, "x")
    s.destroy(2)
    assert s.W(1, "x") == []


def test_an_event_of_the_legacy_stream_stands_for_blocking_streams_too() -> None:
    s = Scene(LEGACY, BLOCKING, NON_BLOCKING)
    s.W(2, "x")
    s.record(1, 1)
    s.wait(3, 1)
    assert s.W(3, "x") == []


def test_a_wait_takes_the_record_of_its_own_time() -> None:
    s = Scene()
    s.W(1, "x")
    s.record(1, 1)
    s.wait(2, 1)
    s.record(1, 3)
    assert s.W(2, "x") == []


def test_a_wait_for_what_was_never_recorded_is_nothing() -> None:
    s = Scene()
    s.W(1, "x")
    s.wait(2, 7)
    assert len(s.W(2, "x")) == 1


def test_an_event_orders_streams_of_two_devices() -> None:
    s = Scene(NON_BLOCKING)
    s.create(2, context=2, device=1)
    s.W(1, "x")
    s.record(1, 1)
    s.wait(2, 1, context=2, device=1)
    assert s.R(2, "x", context=2, device=1) == []


@pytest.mark.parametrize("way", ["event_sync", "event_query"])
def test_the_host_knows_what_an_event_stands_for_once_it_is_reached(way: str) -> None:
    s = Scene()
    s.W(1, "x")
    s.record(1, 1)
    s.W(1, "y")
    getattr(s, way)(1)
    assert s.W(2, "x") == []
    assert len(s.W(2, "y")) == 1


@pytest.mark.parametrize("way", ["sync", "query"])
def test_the_host_knows_what_is_in_a_stream_once_it_is_empty(way: str) -> None:
    s = Scene()
    s.W(1, "x")
    s.W(3, "y")
    getattr(s, way)(1)
    assert s.W(2, "x") == []
    assert len(s.W(2, "y")) == 1


def test_a_sync_of_the_legacy_stream_waits_for_blocking_streams() -> None:
    s = Scene(LEGACY, BLOCKING, NON_BLOCKING, NON_BLOCKING)
    s.W(2, "x")
    s.W(3, "y")
    s.sync(1)
    assert s.W(4, "x") == []
    assert len(s.W(4, "y")) == 1


def test_a_sync_of_a_context_is_none_of_another() -> None:
    s = Scene(NON_BLOCKING, NON_BLOCKING)
    s.create(3, context=2)
    s.W(1, "x")
    s.W(3, "y", context=2)
    s.device_sync(context=2)
    assert s.R(2, "y") == []
    assert len(s.R(2, "x")) == 1


def test_to_destroy_a_stream_is_not_to_wait_for_it() -> None:
    s = Scene()
    s.W(1, "x")
    s.destroy(1)
    assert len(s.W(2, "x")) == 1


def test_a_stream_in_the_place_of_a_destroyed_one_is_another_stream() -> None:
    s = Scene(NON_BLOCKING, NON_BLOCKING)
    for stream in range(3, 40):
        s.create(stream)
        assert s.W(stream, "x") == []
        s.record(stream, stream)
        s.destroy(stream)
        s.device_sync()
    s.create(40)
    s.W(40, "y")
    s.wait(1, 39)  # the record of a stream whose place stream 40 has now
    assert len(s.W(1, "y")) == 1


def test_streams_may_be_many() -> None:
    s = Scene(*[NON_BLOCKING] * 100)
    for stream in range(1, 101):
        assert s.W(stream, "x") == []
        s.record(1, stream)
        s.wait(stream % 100 + 1, 1)
    assert len(s.W(50, "x")) == 1


def pinned_read_while_overwritten(s: Scene) -> int:
    return len(s.copy(2, "P", "z", DEVICE_TO_HOST, PINNED))


@pytest.mark.parametrize(
    ("direction", "host", "asynchronous", "destination_done", "source_done"),
    [
        (HOST_TO_DEVICE, PINNED, False, True, True),
        (HOST_TO_DEVICE, PINNED, True, False, False),
        (HOST_TO_DEVICE, PAGEABLE, False, False, True),
        (HOST_TO_DEVICE, PAGEABLE, True, False, True),
        (DEVICE_TO_HOST, PINNED, False, True, True),
        (DEVICE_TO_HOST, PINNED, True, False, False),
        (DEVICE_TO_HOST, PAGEABLE, False, True, True),
        (DEVICE_TO_HOST, PAGEABLE, True, True, True),
        (DEVICE_TO_DEVICE, HostMemory.NONE, False, False, False),
        (HOST_TO_HOST, PINNED, True, True, True),
    ],
)
def test_what_is_done_when_a_copy_returns(
    direction: Direction,
    host: HostMemory,
    asynchronous: bool,
    destination_done: bool,
    source_done: bool,
) -> None:
    s = Scene()
    s.copy(1, "x", "P", direction, host, asynchronous=asynchronous)
    assert (s.R(2, "x") == []) == destination_done
    assert (s.W(3, "P") == []) == source_done


def test_without_joined_threads_a_copy_to_pageable_memory_may_still_be_under_way() -> None:
    s = Scene(strict_threads=True)
    s.copy(1, "P", "x", DEVICE_TO_HOST, PAGEABLE)
    (race,) = s.copy(2, "y", "P", HOST_TO_DEVICE, PAGEABLE)
    assert race.kind is RaceKind.HOST


def test_a_synchronous_copy_from_pageable_memory_waits_for_its_stream_first() -> None:
    s = Scene()
    s.W(1, "x")
    s.copy(1, "y", "P", HOST_TO_DEVICE, PAGEABLE, asynchronous=False)
    assert s.W(2, "x") == []
    assert len(s.W(2, "y")) == 1


def test_the_host_must_not_read_what_a_copy_still_writes() -> None:
    s = Scene()
    s.copy(1, "P", "x", DEVICE_TO_HOST, PINNED)
    (race,) = s.copy(2, "y", "P", HOST_TO_DEVICE, PAGEABLE)
    assert race.kind is RaceKind.HOST
    assert (race.current.stream, race.previous.stream) == (0, 1)
    assert race.lo == place("P")


def test_the_host_must_not_write_what_a_copy_still_reads() -> None:
    s = Scene()
    s.copy(1, "x", "P", HOST_TO_DEVICE, PINNED)
    (race,) = s.copy(2, "P", "Q", HOST_TO_HOST, PINNED)
    assert race.kind is RaceKind.HOST
    s.sync(1)
    assert s.copy(2, "P", "Q", HOST_TO_HOST, PINNED) == []


def test_two_copies_to_the_same_place_of_the_host_race() -> None:
    s = Scene()
    s.copy(1, "P", "x", DEVICE_TO_HOST, PINNED)
    (race,) = s.copy(2, "P", "y", DEVICE_TO_HOST, PINNED)
    assert race.kind is RaceKind.WRITE_AFTER_WRITE


@pytest.mark.parametrize(
    ("how", "asynchronous", "is_done"),
    [
        (How.PINNED, False, True),
        (How.MANAGED, False, True),
        (How.PINNED, True, False),
        (How.SYNC, False, False),
    ],
)
def test_the_host_waits_for_a_fill_of_its_own_memory(
    how: How, asynchronous: bool, is_done: bool
) -> None:
    s = Scene()
    s.alloc("x", how)
    s.fill(1, "x", asynchronous=asynchronous)
    assert (s.W(2, "x") == []) == is_done


@pytest.mark.parametrize("how", [How.SYNC, How.PINNED])
def test_to_free_memory_is_to_wait_for_the_context_and_to_get_some_is_not(how: How) -> None:
    s = Scene(NON_BLOCKING, NON_BLOCKING)
    s.create(3, context=2)
    s.alloc("x", how)
    s.W(1, "y")
    s.W(3, "z", context=2)
    s.alloc("w", how)
    assert len(s.W(2, "y")) == 1
    s.free("x", how)
    assert s.R(1, "y") == []
    assert len(s.R(1, "z")) == 1


def test_memory_cannot_be_used_before_it_is_there_in_the_order_of_its_stream() -> None:
    s = Scene()
    s.alloc("x", How.STREAM_ORDERED, 1)
    assert s.W(1, "x") == []
    s.alloc("y", How.STREAM_ORDERED, 1)
    (race,) = s.W(2, "y")
    assert race.kind is RaceKind.USE_BEFORE_ALLOCATION
    assert race.previous.kind.name == "ALLOC"


def test_an_event_makes_memory_usable_in_another_stream() -> None:
    s = Scene()
    s.alloc("x", How.STREAM_ORDERED, 1)
    s.record(1, 1)
    s.wait(2, 1)
    assert s.W(2, "x") == []


def test_memory_cannot_be_freed_before_others_are_done_with_it() -> None:
    s = Scene()
    s.alloc("x", How.STREAM_ORDERED, 1)
    s.record(1, 1)
    s.wait(2, 1)
    s.R(2, "x")
    (race,) = s.free("x", How.STREAM_ORDERED, 1)
    assert race.kind is RaceKind.USE_AFTER_FREE
    assert (race.current.kind.name, race.previous.stream) == ("FREE", 2)


def test_memory_cannot_be_used_after_it_is_freed_in_whatever_order() -> None:
    s = Scene()
    s.alloc("x", How.STREAM_ORDERED, 1)
    s.free("x", How.STREAM_ORDERED, 1)
    (race,) = s.W(1, "x")
    assert race.kind is RaceKind.USE_AFTER_FREE
    assert s.W(1, "x") == []  # told of already
    s.device_sync()
    assert s.R(2, "x") == []


def test_whoever_gets_memory_again_comes_after_its_free() -> None:
    s = Scene()
    s.alloc("x", How.STREAM_ORDERED, 1)
    s.W(1, "x", "y")
    s.free("x", How.STREAM_ORDERED, 1)
    assert s.alloc("x", How.STREAM_ORDERED, 2) == []
    assert s.W(2, "x", "y") == []


def test_a_use_after_the_free_leaves_nothing_for_who_has_the_memory_next() -> None:
    s = Scene()
    s.alloc("x", How.STREAM_ORDERED, 1)
    s.free("x", How.STREAM_ORDERED, 1)
    assert len(s.W(2, "x")) == 1
    s.alloc("x", How.STREAM_ORDERED, 3)
    assert s.W(3, "x") == []


def test_memory_of_a_stream_may_be_freed_by_waiting() -> None:
    s = Scene()
    s.alloc("x", How.STREAM_ORDERED, 1)
    s.W(1, "x", "y")
    s.free("x")
    assert s.W(2, "y") == []


def test_a_pool_orders_nothing() -> None:
    s = Scene()
    s.alloc("x", layer=Layer.POOL)
    s.W(1, "x", "y")
    s.free("x", layer=Layer.POOL)
    s.alloc("x", layer=Layer.POOL)
    assert len(s.W(2, "y")) == 1


def test_a_query_of_an_event_makes_a_reused_block_safe() -> None:
    s = Scene()
    s.alloc("x", layer=Layer.POOL)
    s.W(1, "x")
    s.free("x", layer=Layer.POOL)
    s.record(1, 1)
    s.event_query(1)
    s.alloc("x", layer=Layer.POOL)
    assert s.W(2, "x") == []


def test_what_is_captured_does_not_run() -> None:
    s = Scene()
    s.call(CaptureBegin(1, stream=1))
    s.W(1, "x")
    s.record(1, 1)
    s.wait(2, 1)  # which takes stream 2 into the capture
    s.W(2, "x")
    assert s.W(3, "x") == []
    s.call(CaptureEnd(1, stream=1))
    assert len(s.W(2, "x")) == 1


def test_a_function_of_the_host_comes_after_its_stream_and_before_what_follows() -> None:
    s = Scene(strict_threads=True)
    s.W(1, "x", thread=1)
    s.call(HostCall(1, Phase.BEGIN), thread=2)
    s.W(3, "x", "y", thread=2)
    s.sync(3, thread=2)
    s.call(HostCall(1, Phase.END), thread=2)
    assert s.W(1, "y", thread=1) == []
    assert len(s.W(4, "y", thread=1)) == 1


def test_a_word_that_one_stream_writes_and_another_waits_for_orders_them() -> None:
    s = Scene()
    s.W(1, "x")
    s.call(Memop(1, 0x42, Flag.WRITE))
    s.W(1, "y")
    s.call(Memop(2, 0x42, Flag.WAIT))
    assert s.R(2, "x") == []
    assert len(s.R(2, "y")) == 1


def test_a_wait_for_a_word_of_unknown_origin_makes_no_false_alarm_and_is_counted() -> None:
    s = Scene()
    s.W(1, "x")
    s.call(Memop(2, 0x42, Flag.WAIT))
    assert s.R(2, "x") == []
    assert s.engine.gaps == {UNKNOWN_WORD: 1}


def test_a_peer_reads_the_same_memory() -> None:
    s = Scene(NON_BLOCKING)
    s.create(2, context=2, device=1)
    s.W(1, "x")
    (race,) = s.copy(2, "y", "x", context=2, device=1)
    assert (race.previous.device, race.current.device) == (0, 1)


def test_threads_are_one_host_unless_they_are_to_be_strict() -> None:
    for strict in (False, True):
        s = Scene(strict_threads=strict)
        s.R(2, "y", thread=2)  # the thread is there before the wait
        s.W(1, "x", thread=1)
        s.sync(1, thread=1)
        assert len(s.W(2, "x", thread=2)) == strict


def test_a_thread_that_begins_knows_what_others_knew() -> None:
    s = Scene(strict_threads=True)
    s.W(1, "x", thread=1)
    s.sync(1, thread=1)
    assert s.W(2, "x", thread=2) == []


def test_a_stream_that_two_threads_use_is_still_one_stream() -> None:
    s = Scene(strict_threads=True)
    s.W(1, "x", thread=1)
    assert s.W(1, "x", thread=2) == []


def test_gaps_are_counted() -> None:
    s = Scene()
    s.call(Gap("a thing", 3))
    s.call(Gap("a thing"))
    assert s.engine.gaps == {"a thing": 4}


def test_a_stream_that_was_not_seen_to_be_made_is_counted_as_a_gap() -> None:
    s = Scene(NON_BLOCKING)
    s.W(77, "x")
    assert len(s.W(1, "x")) == 1
    assert s.engine.gaps == {"stream that was not seen to be made": 1}


def test_the_last_synchronisation_says_what_was_waited_for_and_when() -> None:
    s = Scene()
    s.record(1, 1)
    recorded = s.seq
    s.W(1, "x")
    s.wait(2, 1)
    (race,) = s.R(2, "x")
    sync = race.last_sync
    assert sync is not None
    assert (sync.kind, sync.recorded_seq, sync.waited_seq) == (
        SyncKind.EVENT,
        recorded,
        recorded + 2,
    )
    assert sync.recorded_seq < race.previous.seq


def test_the_last_synchronisation_may_be_the_hosts_or_the_default_streams() -> None:
    s = Scene(LEGACY, BLOCKING, NON_BLOCKING, NON_BLOCKING)
    s.W(3, "y")
    s.sync(3)
    waited = s.seq
    s.W(3, "x")
    (race,) = s.R(4, "x")
    assert race.last_sync is not None
    assert (race.last_sync.kind, race.last_sync.waited_seq) == (SyncKind.HOST, waited)
    s.W(2, "z")
    s.W(1, "z")
    s.W(1, "w")
    s.record(1, 1)
    s.wait(3, 1)
    s.W(2, "v")
    (race,) = s.R(3, "v")
    assert race.last_sync is not None
    assert race.last_sync.kind is SyncKind.EVENT


def test_streams_that_never_synchronised_have_no_last_synchronisation() -> None:
    s = Scene()
    s.W(1, "x")
    (race,) = s.W(2, "x")
    assert race.last_sync is None


def test_a_race_says_who_did_what() -> None:
    s = Scene()
    s.touch(1, ["x"], 2, 64, thread=5)
    (race,) = s.copy(2, "y", "x", thread=6)
    assert (race.previous.name, race.previous.thread, race.previous.site) == ("k", 5, 11)
    assert (race.current.name, race.current.kind.name, race.current.thread) == ("", "COPY", 6)
    assert (race.previous.lo, race.previous.hi) == (place("x"), place("x") + 64)
