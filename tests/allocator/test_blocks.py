from __future__ import annotations

import random
from typing import Any

import pytest

from cudakit.allocator.blocks import Block, BlockPool, FreeBlocks
from cudakit.allocator.memory import native_module
from cudakit.allocator.stats import BlockCounters, DeviceStats
from cudakit.torch_rules.oom import DEFAULT_POOL

NATIVE = native_module()


@pytest.fixture(params=["plain", "native"])
def pool(request: Any) -> BlockPool:
    if request.param == "native" and NATIVE is None:
        pytest.skip("the native types were not compiled")
    types = NATIVE if request.param == "native" else None
    stats = DeviceStats(1 << 62, types.BlockCounters if types else BlockCounters).small
    free_blocks_type = types.FreeBlocks if types else FreeBlocks
    return BlockPool(DEFAULT_POOL, stats, is_small=True, free_blocks_type=free_blocks_type)


@pytest.mark.parametrize("count", [10, 6000])
def test_free_blocks_equal_a_sorted_list(pool: BlockPool, count: int) -> None:
    rng, sorted_blocks = random.Random(3), pool.free_blocks(0)
    blocks: dict[tuple[int, int], Block] = {}
    for ptr in range(count):
        block = sorted_blocks.new_block(ptr, 512 * rng.randint(1, 200))
        blocks[block.size, ptr] = block
        sorted_blocks.add(block)
    for _ in range(count // 2):
        key = rng.choice(list(blocks)) if count < 100 else next(iter(blocks))
        sorted_blocks.remove(blocks.pop(key))

    assert list(sorted_blocks) == [blocks[key] for key in sorted(blocks)]
    for size in range(256, 512 * 210, 512 * 7):
        expected = min((key for key in blocks if key[0] >= size), default=None)
        limit = 512 * 150
        if expected is None or expected[0] >= limit:
            assert sorted_blocks.take(size, limit) is None
        else:
            assert sorted_blocks.take(size, limit) is blocks.pop(expected)
    assert list(sorted_blocks) == [blocks[key] for key in sorted(blocks)]


@pytest.mark.parametrize("count", [0, 10, 3000])
def test_from_size_iterates_in_order(pool: BlockPool, count: int) -> None:
    sorted_blocks = pool.free_blocks(0)
    for ptr in range(count):
        sorted_blocks.add(sorted_blocks.new_block(ptr, 512 * (1 + ptr * 7 % 30)))

    for size in (1, 512, 513, 512 * 17, 512 * 30, 512 * 31):
        assert list(sorted_blocks.blocks_from_size(size)) == [
            b for b in sorted_blocks if b.size >= size
        ]


def test_long_list_of_free_blocks_can_be_emptied(pool: BlockPool) -> None:
    sorted_blocks = pool.free_blocks(0)
    blocks = [sorted_blocks.new_block(ptr, 512) for ptr in range(5000)]
    for block in blocks:
        sorted_blocks.add(block)
    for block in blocks:
        sorted_blocks.remove(block)

    assert not sorted_blocks
    assert sorted_blocks.take(1, 1 << 40) is None


def test_pool_iterates_by_stream_size_and_address(pool: BlockPool) -> None:
    places = [(12, 512, 1), (0, 1024, 2), (12, 512, 0), (0, 512, 3), (-5, 2048, 4)]
    for stream, size, ptr in places:
        row = pool.free_blocks(stream)
        row.add(row.new_block(ptr, size))

    assert [(b.stream, b.size, b.ptr) for b in pool] == sorted(places)
