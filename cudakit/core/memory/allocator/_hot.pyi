"""The two calls of an allocator in C (``hot/``), for when everything is usual."""

from collections import deque
from typing import Any

from cudakit.core.memory.allocator.block import Block
from cudakit.core.memory.allocator.cache import Cache
from cudakit.core.memory.allocator.front_cache import FrontCache
from cudakit.core.memory.allocator.guard import Guard
from cudakit.core.memory.allocator.hot_path import Alloc, Free

def calls(
    alloc: Alloc,
    free: Free,
    cache: Cache,
    front: FrontCache,
    guard: Guard,
    late: deque[Any],
    live: dict[int, Block],
    unusual: set[Any],
    block: Block,
    /,
) -> tuple[Alloc, Free]:
    """Return both calls of an allocator: they do what is usual, and call those given for all else.

    ``block`` is one that is nowhere, of which others are copies.
    """
