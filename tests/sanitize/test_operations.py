"""Accesses of allocations, copies and fills, and the waits of the host."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sanitize.trace_scene import (
    NON_BLOCKING,
    Scene,
    address_of,
)

from cudakit.sanitize.engine import Allocations
from cudakit.sanitize.races import Allocation, RaceKind
from cudakit.trace.kinds import AllocationKind, AllocationLayer, Direction, HostMemory


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(1, 10)), max_size=20))
def test_address_belongs_to_the_latest_overlapping_allocation(
    calls: list[tuple[bool, int, int]],
) -> None:
    table, allocation_by_byte = Allocations(), dict[int, Allocation]()
    for seq, (adds, address, size) in enumerate(calls):
        removed_allocations = {
            allocation_by_byte[address]
            for address in range(address, address + size)
            if address in allocation_by_byte
        }
        if adds:
            allocation = Allocation(address, size, AllocationKind.SYNC, site=0, seq=seq)
            table.add(allocation)
        else:
            removed_allocations = {
                allocation
                for allocation in set(allocation_by_byte.values())
                if allocation.address == address
            }
            assert table.remove(address) == next(iter(removed_allocations), None)
        allocation_by_byte = {
            address: allocation
            for address, allocation in allocation_by_byte.items()
            if allocation not in removed_allocations
        }
        if adds:
            allocation_by_byte |= dict.fromkeys(range(address, address + size), allocation)

        assert [table.find(address) for address in range(45)] == [
            allocation_by_byte.get(address) for address in range(45)
        ]


@pytest.mark.parametrize("kind", [AllocationKind.SYNC, AllocationKind.PINNED])
def test_synchronous_free_waits_for_the_context_and_allocation_does_not(
    kind: AllocationKind,
) -> None:
    scene = Scene(NON_BLOCKING, NON_BLOCKING)
    scene.create(3, context=2)
    scene.alloc("x", kind)
    scene.write(1, "y")
    scene.write(3, "z", context=2)
    scene.alloc("w", kind)
    assert len(scene.write(2, "y")) == 1
    scene.free("x", kind)
    assert scene.read(1, "y") == []
    assert len(scene.read(1, "z")) == 1


def test_use_before_stream_ordered_allocation_races() -> None:
    scene = Scene()
    scene.alloc("x", AllocationKind.STREAM_ORDERED, 1)
    assert scene.write(1, "x") == []
    scene.alloc("y", AllocationKind.STREAM_ORDERED, 1)
    (race,) = scene.write(2, "y")
    assert race.kind is RaceKind.USE_BEFORE_ALLOCATION
    assert race.previous.kind.name == "ALLOC"


def test_event_orders_allocation_before_use_in_another_stream() -> None:
    scene = Scene()
    scene.alloc("x", AllocationKind.STREAM_ORDERED, 1)
    scene.record(1, 1)
    scene.wait(2, 1)
    assert scene.write(2, "x") == []


def test_free_before_use_of_another_stream_completes_races() -> None:
    scene = Scene()
    scene.alloc("x", AllocationKind.STREAM_ORDERED, 1)
    scene.record(1, 1)
    scene.wait(2, 1)
    scene.read(2, "x")
    (race,) = scene.free("x", AllocationKind.STREAM_ORDERED, 1)
    assert race.kind is RaceKind.USE_AFTER_FREE
    assert (race.current.kind.name, race.previous.stream) == ("FREE", 2)


def test_use_after_stream_ordered_free_races_in_any_order() -> None:
    scene = Scene()
    scene.alloc("x", AllocationKind.STREAM_ORDERED, 1)
    scene.free("x", AllocationKind.STREAM_ORDERED, 1)
    (race,) = scene.write(1, "x")
    assert race.kind is RaceKind.USE_AFTER_FREE
    assert scene.write(1, "x") == []  # already reported
    scene.device_sync()
    assert scene.read(2, "x") == []


def test_reallocation_is_ordered_after_free() -> None:
    scene = Scene()
    scene.alloc("x", AllocationKind.STREAM_ORDERED, 1)
    scene.write(1, "x", "y")
    scene.free("x", AllocationKind.STREAM_ORDERED, 1)
    assert scene.alloc("x", AllocationKind.STREAM_ORDERED, 2) == []
    assert scene.write(2, "x", "y") == []


def test_free_races_with_each_stream_that_uses_the_memory() -> None:
    scene = Scene()
    scene.alloc("x", AllocationKind.STREAM_ORDERED, 1)
    scene.free("x", AllocationKind.STREAM_ORDERED, 1)
    for stream in (1, 2, 3):
        (race,) = scene.write(stream, "x")
        assert (race.kind, race.previous.kind.name) == (RaceKind.USE_AFTER_FREE, "FREE")


def test_use_after_free_does_not_race_with_the_next_allocation() -> None:
    scene = Scene()
    scene.alloc("x", AllocationKind.STREAM_ORDERED, 1)
    scene.free("x", AllocationKind.STREAM_ORDERED, 1)
    assert len(scene.write(2, "x")) == 1
    scene.alloc("x", AllocationKind.STREAM_ORDERED, 3)
    assert scene.write(3, "x") == []


def test_synchronous_free_of_stream_ordered_memory_is_ordered() -> None:
    scene = Scene()
    scene.alloc("x", AllocationKind.STREAM_ORDERED, 1)
    scene.write(1, "x", "y")
    scene.free("x")
    assert scene.write(2, "y") == []


def test_pool_free_does_not_synchronize() -> None:
    scene = Scene()
    scene.alloc("x", layer=AllocationLayer.POOL)
    scene.write(1, "x", "y")
    scene.free("x", layer=AllocationLayer.POOL)
    scene.alloc("x", layer=AllocationLayer.POOL)
    assert len(scene.write(2, "y")) == 1


def test_event_query_orders_reuse_of_a_block() -> None:
    scene = Scene()
    scene.alloc("x", layer=AllocationLayer.POOL)
    scene.write(1, "x")
    scene.free("x", layer=AllocationLayer.POOL)
    scene.record(1, 1)
    scene.event_query(1)
    scene.alloc("x", layer=AllocationLayer.POOL)
    assert scene.write(2, "x") == []


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
def test_completion_of_copy_depends_on_direction_and_host_memory(
    direction: Direction,
    host: HostMemory,
    asynchronous: bool,
    destination_done: bool,
    source_done: bool,
) -> None:
    scene = Scene()
    scene.copy(1, "x", "P", direction, host, asynchronous=asynchronous)
    assert (scene.read(2, "x") == []) == destination_done
    assert (scene.write(3, "P") == []) == source_done


def test_strict_threads_do_not_wait_for_copy_from_pageable_memory() -> None:
    scene = Scene(strict_threads=True)
    scene.copy(1, "P", "x", DEVICE_TO_HOST, PAGEABLE)
    (race,) = scene.copy(2, "y", "P", HOST_TO_DEVICE, PAGEABLE)
    assert race.kind is RaceKind.HOST


def test_synchronous_copy_from_pageable_memory_waits_for_its_stream() -> None:
    scene = Scene()
    scene.write(1, "x")
    scene.copy(1, "y", "P", HOST_TO_DEVICE, PAGEABLE, asynchronous=False)
    assert scene.write(2, "x") == []
    assert len(scene.write(2, "y")) == 1


def test_host_read_during_copy_to_host_races() -> None:
    scene = Scene()
    scene.copy(1, "P", "x", DEVICE_TO_HOST, PINNED)
    (race,) = scene.copy(2, "y", "P", HOST_TO_DEVICE, PAGEABLE)
    assert race.kind is RaceKind.HOST
    assert (race.current.stream, race.previous.stream) == (0, 1)
    assert race.lo == address_of("P")


def test_host_write_during_copy_from_host_races() -> None:
    scene = Scene()
    scene.copy(1, "x", "P", HOST_TO_DEVICE, PINNED)
    (race,) = scene.copy(2, "P", "Q", HOST_TO_HOST, PINNED)
    assert race.kind is RaceKind.HOST
    scene.sync(1)
    assert scene.copy(2, "P", "Q", HOST_TO_HOST, PINNED) == []


def test_two_copies_to_the_same_host_memory_race() -> None:
    scene = Scene()
    scene.copy(1, "P", "x", DEVICE_TO_HOST, PINNED)
    (race,) = scene.copy(2, "P", "y", DEVICE_TO_HOST, PINNED)
    assert race.kind is RaceKind.WRITE_AFTER_WRITE


@pytest.mark.parametrize(
    ("kind", "asynchronous", "is_done"),
    [
        (AllocationKind.PINNED, False, True),
        (AllocationKind.MANAGED, False, True),
        (AllocationKind.PINNED, True, False),
        (AllocationKind.SYNC, False, False),
    ],
)
def test_host_waits_for_synchronous_fill_of_host_memory(
    kind: AllocationKind, asynchronous: bool, is_done: bool
) -> None:
    scene = Scene()
    scene.alloc("x", kind)
    scene.fill(1, "x", asynchronous=asynchronous)
    assert (scene.write(2, "x") == []) == is_done
