"""What getting and giving memory orders, and what it must not race with."""

from __future__ import annotations

import pytest
from core.sanitize.scene import (
    NON_BLOCKING,
    Scene,
)

from cudakit.core.sanitize.races import RaceKind
from cudakit.trace.kinds import How, Layer


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


def test_every_stream_that_uses_freed_memory_is_told_of_by_the_free() -> None:
    s = Scene()
    s.alloc("x", How.STREAM_ORDERED, 1)
    s.free("x", How.STREAM_ORDERED, 1)
    for stream in (1, 2, 3):
        (race,) = s.W(stream, "x")
        assert (race.kind, race.previous.kind.name) == (RaceKind.USE_AFTER_FREE, "FREE")


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
