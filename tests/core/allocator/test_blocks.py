from __future__ import annotations

import random

import pytest

from cudakit.core.allocator.blocks import Block, BlockPool
from cudakit.core.allocator.pool_stats import Peaks, PoolStats
from cudakit.torch_rules.oom_facts import DEFAULT_POOL


def pool() -> BlockPool:
    return BlockPool(DEFAULT_POOL, PoolStats(Peaks()), small=True)


@pytest.mark.parametrize("count", [10, 6000])
def test_free_blocks_are_found_as_in_a_sorted_list(count: int) -> None:
    rng, found = random.Random(3), pool().free_blocks(0)
    blocks: dict[tuple[int, int], Block] = {}
    for ptr in range(count):
        block = Block(ptr, 512 * rng.randint(1, 200), found)
        blocks[block.size, ptr] = block
        found.add(block)
    for _ in range(count // 2):
        key = rng.choice(list(blocks)) if count < 100 else next(iter(blocks))
        found.remove(blocks.pop(key))

    assert list(found) == [blocks[key] for key in sorted(blocks)]
    for size in range(256, 512 * 210, 512 * 7):
        expected = min((key for key in blocks if key[0] >= size), default=None)
        limit = 512 * 150
        if expected is None or expected[0] >= limit:
            assert found.take(size, limit) is None
        else:
            assert found.take(size, limit) is blocks.pop(expected)
    assert list(found) == [blocks[key] for key in sorted(blocks)]


@pytest.mark.parametrize("count", [0, 10, 3000])
def test_free_blocks_from_a_size_on_are_gone_through_in_order(count: int) -> None:
    found = pool().free_blocks(0)
    for ptr in range(count):
        found.add(Block(ptr, 512 * (1 + ptr * 7 % 30), found))

    for size in (1, 512, 513, 512 * 17, 512 * 30, 512 * 31):
        assert list(found.from_size(size)) == [b for b in found if b.size >= size]


def test_a_list_that_was_long_can_be_emptied() -> None:
    found = pool().free_blocks(0)
    blocks = [Block(ptr, 512, found) for ptr in range(5000)]
    for block in blocks:
        found.add(block)
    for block in blocks:
        found.remove(block)

    assert not found
    assert found.take(1, 1 << 40) is None


def test_a_pool_goes_by_stream_size_and_address() -> None:
    owner = pool()
    places = [(12, 512, 1), (0, 1024, 2), (12, 512, 0), (0, 512, 3), (-5, 2048, 4)]
    for stream, size, ptr in places:
        row = owner.free_blocks(stream)
        row.add(Block(ptr, size, row))

    assert [(b.stream, b.size, b.ptr) for b in owner] == sorted(places)
