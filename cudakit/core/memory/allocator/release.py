"""Giving memory back: all that is cached, what stands in the way of a request, what is old.

Source: PyTorch's c10/cuda/CUDACachingAllocator.cpp (release_cached_blocks, release_available_cached_blocks,
garbage_collect_cached_blocks).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from cudakit.core.memory.allocator.block import Block, Trail
from cudakit.core.memory.allocator.cache import Cache, Request
from cudakit.core.memory.allocator.events import Uses
from cudakit.core.memory.allocator.pools import Pool
from cudakit.core.memory.allocator.sizes import UNLIMITED


def empty_cache(cache: Cache, uses: Uses, stack: Trail | None) -> None:
    """Wait for freed blocks that are still used, and give every segment back of which nothing is used.

    Raises CudaError where the driver refuses; what was not given back by then stays cached.
    """
    cache.statistics.num_sync_all_streams += 1
    uses.synchronize(stack)
    for pool in cache.default:
        _release_all(cache, unsplit(pool), stack)


def release_available(cache: Cache, request: Request) -> bool:
    """Give back segments that are not to be split, as many as a request needs; return whether that is enough.

    One that is large enough by itself, the smallest; else from the largest down. Does nothing without a
    limit to splitting.
    """
    limit = cache.max_split_bytes
    if limit == UNLIMITED:
        return False
    needed = max(request.size, limit)
    row = request.pool.rows.get(request.stream)
    blocks = [block for block in row or () if not block.split]
    enough = [block for block in blocks if block.size >= needed]
    if enough:
        cache.release(enough[0], request.stack)
        return True
    released = 0
    for block in takewhile(lambda block: block.size >= limit, reversed(blocks)):
        if released >= needed:
            break
        cache.release(block, request.stack)
        released += block.size
    return released >= needed


def collect_garbage(cache: Cache, stack: Trail | None) -> None:
    """Give back segments of the large pool that nobody has asked for, until little enough is reserved.

    Each pass gives back all that are at least of the mean age of those that are left.
    """
    threshold = int(cache.settings.garbage_collection_threshold * cache.limit_bytes)
    pool = cache.default.large
    left = list(unsplit(pool))
    target = cache.reserved_bytes - threshold
    while left and target > 0:
        mean = sum(map(pool.age, left)) / len(left)
        # Fixed before the first is given back, as in PyTorch.
        old = [block for block in left if pool.age(block) >= mean]
        _release_all(cache, old, stack)
        target -= sum(block.size for block in old)
        left = [block for block in left if pool.age(block) < mean]


def unsplit(pool: Pool) -> Iterable[Block]:
    """List the free blocks of a pool that are whole segments."""
    return [block for block in pool if not block.split]


def _release_all(cache: Cache, blocks: Iterable[Block], stack: Trail | None) -> None:
    for block in blocks:
        cache.release(block, stack)
