"""What copies and fills mean for the host."""

from __future__ import annotations

import pytest
from core.sanitize.scene import (
    Scene,
    place,
)

from cudakit.core.sanitize.races import RaceKind
from cudakit.trace.kinds import Direction, HostMemory, How

HOST_TO_DEVICE, DEVICE_TO_HOST = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST
DEVICE_TO_DEVICE, HOST_TO_HOST = Direction.DEVICE_TO_DEVICE, Direction.HOST_TO_HOST
PINNED, PAGEABLE = HostMemory.PINNED, HostMemory.PAGEABLE


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
