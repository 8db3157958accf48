"""Giving memory back: all that is cached, what stands in the way of a request, what is old.

Source: PyTorch's c10/cuda/CUDACachingAllocator.cpp (release_cached_blocks, release_available_cached_blocks,
garbage_collect_cached_blocks).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from cudakit.core.allocator.block import Block, Trail
from cudakit.core.allocator.cache import Cache, Request
from cudakit.core.allocator.events import Uses
from cudakit.core.allocator.pools import Pool
from cudakit.core.allocator.private import PrivatePool
from cudakit.torch_rules.sizes import UNLIMITED


def empty_cache(cache: Cache, uses: Uses, stack: Trail | None) -> None:
    """Wait for freed blocks that are still used, and give every segment back of which nothing is used.

    Raises CudaError where the driver refuses; what was not given back by then stays cached.
    """
    cache.statistics.num_sync_all_streams += 1
    uses.synchronize(stack)
    for pool in cache.default:
        _release_cached(cache, pool, stack)
    for private in cache.private:
        _release_private(cache, private, stack)


def empty_pool(cache: Cache, uses: Uses, pool: PrivatePool, stack: Trail | None) -> None:
    """Do that for one private pool, if nobody holds it any more. Raises CudaError."""
    if pool.uses:
        return
    cache.statistics.num_sync_all_streams += 1
    uses.synchronize(stack, pool=pool.id)
    _release_private(cache, pool, stack)


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
    enough = next((block for block in blocks if block.size >= needed), None)
    if enough is not None and not _is_after_expandable(cache, request, needed, enough):
        cache.release(enough, request.stack)
        return True
    released = 0
    smaller = [block for block in blocks if block.size < needed]
    for block in takewhile(lambda block: block.size >= limit, reversed(smaller)):
        if released >= needed:
            break
        cache.release(block, request.stack)
        released += block.size
    return released >= needed


def _is_after_expandable(cache: Cache, request: Request, size: int, block: Block) -> bool:
    """Say whether an expandable block of at least a size comes first: PyTorch then looks at smaller ones."""
    if cache.expandable is None:
        return False
    first = cache.expandable.first(request.pool, request.stream, size)
    return first is not None and (first.size, first.ptr) < (block.size, block.ptr)


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


def _release_private(cache: Cache, pool: PrivatePool, stack: Trail | None) -> None:
    """Give back what a pool caches that nobody holds, and forget it with its last segment."""
    if pool.uses:
        return
    for kind in pool:
        _release_cached(cache, kind, stack)
    if all(segment.pool.id != pool.id for segment in cache.segments.values()):
        cache.private.forget(pool)


def _release_cached(cache: Cache, pool: Pool, stack: Trail | None) -> None:
    """Give back every segment of a pool of which nothing is used, and every such page of expandable ones."""
    _release_all(cache, unsplit(pool), stack)
    if cache.expandable is not None:
        cache.expandable.release(pool, stack)


def _release_all(cache: Cache, blocks: Iterable[Block], stack: Trail | None) -> None:
    for block in blocks:
        cache.release(block, stack)
