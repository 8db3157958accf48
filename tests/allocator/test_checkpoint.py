"""Scenario 42: checkpoints of private pools."""

from __future__ import annotations

import random
from typing import Any

import pytest
from allocator import invariants
from allocator.device import MIB, Device

from cudakit.allocator.allocator import DeviceCachingAllocator, InvalidPointer
from cudakit.allocator.pools import MemPool, PoolError
from cudakit.torch_rules.settings import Settings


def in_pool(allocator: DeviceCachingAllocator, pool: MemPool, *sizes: int) -> list[int]:
    with allocator.use_pool(pool):
        return [int(allocator.alloc(size)) for size in sizes]


def layout(pool: MemPool) -> list[Any]:
    """Return the segments of a pool: size, kind, and the size and state of each block."""
    return [
        (
            *(segment[key] for key in ("device", "total_size", "allocated_size", "active_size")),
            segment["segment_type"],
            segment["segment_pool_id"],
            [(block["size"], block["state"]) for block in segment["blocks"]],
        )
        for segment in pool.snapshot()
    ]


def addresses(pool: MemPool) -> set[int]:
    return {
        block["address"]
        for segment in pool.snapshot()
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


@pytest.mark.parametrize(
    ("sizes", "kept_blocks"),
    [
        ([512] * 11, [5]),
        ([512] * 11, [5, 8]),
        ([512] * 11, [5, 6]),
        ([8 * MIB, 8 * MIB, MIB, 8 * MIB, MIB, MIB], [1, 4]),
        ([30 * MIB, 12 * MIB], [0]),
        ([MIB] * 4, []),
    ],
)
def test_42_restore_recreates_the_blocks_of_a_pool(
    allocator: DeviceCachingAllocator, sizes: list[int], kept_blocks: list[int]
) -> None:
    pool = MemPool(allocator)
    checkpoint_blocks = in_pool(allocator, pool, *sizes)
    for number, ptr in enumerate(checkpoint_blocks):
        if number not in kept_blocks:
            allocator.free(ptr)
    layout_at_checkpoint, live = layout(pool), addresses(pool)
    state = allocator.checkpoint(pool)
    other_blocks = in_pool(allocator, pool, 700, 3 * MIB, 60 * MIB, 4096)
    for ptr in (*other_blocks[:2], *(checkpoint_blocks[number] for number in kept_blocks[:1])):
        allocator.free(ptr)
    now = addresses(pool)

    restored = allocator.restore(state)

    assert layout(pool)[: len(layout_at_checkpoint)] == layout_at_checkpoint
    assert all(segment[3] == 0 for segment in layout(pool)[len(layout_at_checkpoint) :])
    assert set(restored.freed) == now
    assert set(restored.created) == live == {checkpoint_blocks[number] for number in kept_blocks}
    invariants.check(allocator)


def test_42_only_restored_allocations_can_be_freed(allocator: DeviceCachingAllocator) -> None:
    pool = MemPool(allocator)
    first, second, _ = in_pool(allocator, pool, 512, 512, 512)
    state = allocator.checkpoint(pool)
    for ptr in (first, second):
        allocator.free(ptr)
    (later,) = in_pool(allocator, pool, 100 << 10)
    restored = allocator.restore(state)
    with pytest.raises(InvalidPointer):
        allocator.free(later)
    counts = []
    for ptr in restored.created:
        allocator.free(ptr)
        counts.append(len(addresses(pool)))

    assert counts == [2, 1, 0]


def test_42_holds_exactly_compares_the_live_addresses(allocator: DeviceCachingAllocator) -> None:
    pool = MemPool(allocator)
    first, second = in_pool(allocator, pool, 512, 30 * MIB)
    other = allocator.alloc(512)

    assert allocator.holds_exactly(pool, [first, second])
    assert not allocator.holds_exactly(pool, [first])
    assert not allocator.holds_exactly(pool, [first, second, other])
    assert not allocator.holds_exactly(pool, [])


def test_42_checkpoint_can_be_restored_repeatedly(allocator: DeviceCachingAllocator) -> None:
    pool, rng = MemPool(allocator), random.Random(3)
    live = in_pool(allocator, pool, *(rng.randint(1, 3 * MIB) for _ in range(20)))
    for ptr in rng.sample(live, 10):
        allocator.free(ptr)
    state, layout_at_checkpoint = allocator.checkpoint(pool), layout(pool)
    for _ in range(5):
        now = [
            *addresses(pool),
            *in_pool(allocator, pool, *(rng.randint(1, MIB) for _ in range(9))),
        ]
        for ptr in rng.sample(now, len(now) // 2):
            allocator.free(ptr)
        allocator.restore(state)
        invariants.check(allocator)
        assert layout(pool)[: len(layout_at_checkpoint)] == layout_at_checkpoint


def test_restore_splits_despite_changed_settings(device: Device) -> None:
    allocator = DeviceCachingAllocator(device)
    pool = MemPool(allocator)
    large, small = in_pool(allocator, pool, 30 * MIB, 4 * MIB)
    allocator.free(large)
    (block,) = in_pool(allocator, pool, 25 * MIB)
    state, layout_at_checkpoint = allocator.checkpoint(pool), layout(pool)
    allocator.free(block)
    allocator.free(small)
    allocator.configure(Settings(max_split_size_bytes=20 * MIB))
    allocator.restore(state)

    assert layout(pool) == layout_at_checkpoint
    invariants.check(allocator)
    assert allocator.statistics()["oversize_allocations.current"] == 1


def test_checkpoint_is_refused_if_other_streams_use_a_freed_block(
    allocator: DeviceCachingAllocator, device: Device
) -> None:
    pool = MemPool(allocator)
    ptr, _ = in_pool(allocator, pool, 512, 512)
    state, used_layout = allocator.checkpoint(pool), layout(pool)
    allocator.record_use(ptr, 11)
    assert allocator.checkpoint(pool) == state
    with pytest.raises(PoolError, match="other streams use"):
        allocator.restore(state)
    assert layout(pool) == used_layout
    allocator.free(ptr)
    for refused in (lambda: allocator.checkpoint(pool), lambda: allocator.restore(state)):
        with pytest.raises(PoolError, match="other streams use"):
            refused()
    device.finish(11)
    allocator.alloc(512)
    allocator.restore(state)

    assert layout(pool) == used_layout


def test_deferred_frees_are_recorded_before_a_checkpoint(allocator: DeviceCachingAllocator) -> None:
    pool = MemPool(allocator)
    with allocator.capture(pool):
        ptr = allocator.alloc(512)
        allocator.record_use(ptr, 11)
        allocator.free(ptr)
        with pytest.raises(PoolError, match="other streams use"):
            allocator.checkpoint(pool)

    (blocks,) = allocator.checkpoint(pool).segments
    assert [block.allocated for block in blocks] == [False]


def test_restore_is_refused_if_a_segment_was_released(allocator: DeviceCachingAllocator) -> None:
    pool = MemPool(allocator)
    with allocator.capture(pool) as memory:
        ptr = allocator.alloc(30 * MIB)
    state = allocator.checkpoint(pool)
    pool.close()
    memory.close()
    with pytest.raises(PoolError, match="has no holder"):
        allocator.restore(state)
    with pytest.raises(PoolError, match="has no holder"):
        allocator.checkpoint(memory.id)
    allocator.free(ptr)
    allocator.empty_cache()
    with pytest.raises(PoolError, match="has no memory"):
        allocator.restore(state)
    with allocator.capture(memory.id), pytest.raises(PoolError, match="was released"):
        allocator.restore(state)


def test_checkpoint_of_the_default_pool_is_refused(allocator: DeviceCachingAllocator) -> None:
    with pytest.raises(PoolError, match="is not the id of a private pool"):
        allocator.checkpoint((0, 0))
