"""The front cache: what was freed last, handed out again for a request of exactly as many bytes.

It lies before the pools: a block in it is neither merged with its neighbours nor searched for, which is most
of what an allocation costs. Nobody waits for anybody there, since it has no lock: it is made of operations
that are one step each (of CPython with its global lock), those of lists, of dicts, and of the ledger. For the
pools, what is in it is still allocated; for the statistics it is free. It is flushed before anything but an
allocation or a free enters the allocator, and when an allocation finds no free block.
"""

from __future__ import annotations

import sys
from typing import TypeAlias

from cudakit.core.memory.allocator.block import Block
from cudakit.core.memory.allocator.cache import Cache
from cudakit.core.memory.allocator.pools import DEFAULT_POOL
from cudakit.errors import InputError, Unsupported

Bin: TypeAlias = list[Block]

# Of further sizes nothing is kept here: they are looked at each time that it is flushed.
_MOST_BINS = 4096


class FrontCache:
    """Bins of at most ``most`` freed blocks each, by stream and size of the request; 0 is no front cache.

    Raises InputError for a number below 0, Unsupported where Python has no global lock.
    """

    def __init__(self, cache: Cache, most: int) -> None:
        if most < 0:
            raise InputError(f"a front cache of {most} blocks", hint="0 for none")
        if most and not getattr(sys, "_is_gil_enabled", lambda: True)():
            raise Unsupported(
                "the front cache needs Python's global lock", hint="leave front_cache out"
            )
        self.most = most
        self.default: dict[int, Bin] = {}  # of the default stream
        self._cache = cache
        self._others: dict[int, dict[int, Bin]] = {}
        self._bins: list[Bin] = []

    def find(self, size_bytes: int, stream: int) -> Bin | None:
        """Return where to look for a block for a request on another stream than the default one."""
        bins = self._others.get(stream)
        return bins.get(size_bytes) if bins else None

    def bin_of(self, block: Block) -> Bin | None:
        """Return where a block goes that was just handed out, when it is freed; None for the pools.

        What is too large to be split is counted by itself, and belongs there.
        """
        if block.size >= self._cache.max_split_bytes or block.pool.id != DEFAULT_POOL:
            return None
        stream = block.stream
        bins = self._others.setdefault(stream, {}) if stream else self.default
        found = bins.get(block.requested)
        if found is None and len(self._bins) < _MOST_BINS:
            found = bins[block.requested] = []
            self._bins.append(found)
        return found

    def flush(self) -> bool:
        """Put every block back into its pool, and return whether there was any. The guard is held."""
        found = False
        for bin_ in self._bins:
            while bin_:
                try:
                    block = bin_.pop()
                except IndexError:  # another thread was faster
                    break
                block.allocated = False
                self._cache.put_back(block, None)
                found = True
        return found
