"""The replay of a process's memory: segments, blocks of pools, and missing events."""

from __future__ import annotations

from typing import Any

import pytest

from cudakit.memory.process import HOST, MemoryModel
from cudakit.stacks import Frame
from cudakit.trace.kinds import AllocationKind

MIB = 1 << 20
BASE = 1 << 40
STACK = (Frame("f", "a.py", 1),)


@pytest.fixture
def model() -> MemoryModel:
    return MemoryModel(max_entries=100)


def driver(model: MemoryModel, address: int, size: int, **more: Any) -> None:
    fields = {"device": 0, "kind": AllocationKind.SYNC, "pool": "", "stream": 0, "stack": STACK}
    model.driver_alloc(address=address, size_bytes=size, time_ns=0, **(fields | more))


def pool(model: MemoryModel, address: int, size: int, name: str = "cupy") -> None:
    model.pool_alloc(
        device=0,
        address=address,
        size_bytes=size,
        requested_bytes=0,
        pool=name,
        stack=STACK,
        time_ns=0,
    )


def in_use(model: MemoryModel) -> list[tuple[int, str, list[int]]]:
    """List (size, pool, sizes of blocks) of the segments in use."""
    return [
        (each.size_bytes, each.pool, [block.size_bytes for block in each.blocks.values()])
        for each in model.segments
    ]


def actions(model: MemoryModel, device: int = 0) -> list[str]:
    return [entry.action for entry in model.entries[device]]


def test_first_block_decides_the_pool_of_a_segment(model: MemoryModel) -> None:
    driver(model, BASE, 2 * MIB)
    assert in_use(model) == [(2 * MIB, "driver", [])]

    pool(model, BASE + 512, 512)
    assert in_use(model) == [(2 * MIB, "cupy", [512])]


def test_block_outside_of_known_segments_is_a_segment_until_it_is_freed(model: MemoryModel) -> None:
    pool(model, BASE, 1000)
    assert in_use(model) == [(1024, "cupy", [1024])]

    model.pool_free(address=BASE, pool="cupy", stack=(), time_ns=1)
    assert in_use(model) == []


def test_block_at_the_address_of_another_pool_is_ignored(model: MemoryModel) -> None:
    pool(model, BASE, 512, "rmm")
    pool(model, BASE, 512, "numba")
    model.pool_free(address=BASE, pool="numba", stack=(), time_ns=1)

    assert in_use(model) == [(512, "rmm", [512])]


def test_new_segment_replaces_segments_whose_free_was_not_recorded(model: MemoryModel) -> None:
    driver(model, BASE, MIB)
    driver(model, BASE + MIB, MIB)
    pool(model, BASE + MIB, 512)
    driver(model, BASE, 4 * MIB)

    assert in_use(model) == [(4 * MIB, "driver", [])]
    assert actions(model).count("segment_free") == 2


def test_new_block_replaces_a_block_whose_free_was_not_recorded(model: MemoryModel) -> None:
    driver(model, BASE, MIB)
    pool(model, BASE, 512)
    pool(model, BASE, 1024)

    assert in_use(model) == [(MIB, "cupy", [1024])]


def test_frees_of_unknown_memory_are_ignored(model: MemoryModel) -> None:
    model.driver_free(address=BASE, stack=(), time_ns=0)
    model.pool_free(address=BASE, pool="cupy", stack=(), time_ns=0)

    assert model.is_empty


def test_pinned_memory_belongs_to_the_host(model: MemoryModel) -> None:
    driver(model, BASE, MIB, kind=AllocationKind.PINNED)

    assert list(model.entries) == [HOST]


def test_managed_memory_has_a_pool_of_its_own(model: MemoryModel) -> None:
    driver(model, BASE, MIB, kind=AllocationKind.MANAGED)

    assert in_use(model) == [(MIB, "managed memory", [])]


def test_only_the_last_events_are_kept_but_all_memory_in_use() -> None:
    model = MemoryModel(max_entries=4)
    for index in range(5):
        driver(model, BASE + index * MIB, MIB)

    assert len(model.entries[0]) == 4
    assert model.overflowed_devices == {0}
    assert len(in_use(model)) == 5


def test_blocks_of_a_pool_without_history_are_replaced(model: MemoryModel) -> None:
    driver(model, BASE, MIB)
    first, second, third = ((0, BASE + offset) for offset in (0, 512, 1024))
    model.replace_blocks("jax", {first: (512, STACK), second: (512, STACK)}, 1)
    events = len(model.entries[0])
    model.replace_blocks("jax", {second: (512, STACK), third: (512, ())}, 2)

    assert in_use(model) == [(MIB, "jax", [512, 512])]
    assert actions(model)[events:] == ["free_requested", "free_completed", "alloc"]
