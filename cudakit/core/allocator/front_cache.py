"""The front cache: what was freed last, handed out again for a request of exactly as many bytes.

It lies before the pools: a block in it is neither merged with its neighbours nor searched for, which is most
of what an allocation costs. Nobody waits for anybody there, since it has no lock: it is made of operations
that are one step each (of CPython with its global lock), those of lists, of dicts, and of the ledger. For the
pools, what is in it is still allocated; for the statistics it is free. It is flushed before anything but an
allocation or a free enters the allocator, and when an allocation finds no free block.
"""

from __future__ import annotations

import sys
from typing import Literal, TypeAlias

from cudakit.core.allocator.block import Block
from cudakit.core.allocator.cache import Cache
from cudakit.core.allocator.ledger import ABOVE_PEAK
from cudakit.core.allocator.pools import DEFAULT_POOL
from cudakit.errors import InputError, Unsupported
from cudakit.gpu.api import LEGACY

Bin: TypeAlias = list[Block]
Unusual: TypeAlias = Literal["uncached", "recorded", "watched", "routed", "awaited", "settled"]

# Of further sizes nothing is kept here: they are looked at each time that it is flushed.
_MOST_BINS = 4096
# Whether anything is kept is asked of so many bins at most, each time that a peak rises.
_MOST_TO_ASK = 64


class FrontCache:
    """Bins of at most ``most`` freed blocks each, by stream and size of the request; 0 is no front cache.

    What is kept stays in the ledger while ``counts`` is false, so that neither an allocation nor a free need
    touch it: all that is in use, with all that is kept, is no more than the peaks then. When it would be,
    what is kept is taken out of the ledger, and is counted each time, until the next flush from outside.

    ``unusual`` are the reasons for which it rests. Raises InputError for a number below 0, Unsupported where
    Python has no global lock.
    """

    __slots__ = (
        "_bins",
        "_cache",
        "_ledger",
        "_others",
        "_unusual",
        "counts",
        "default",
        "most",
    )

    def __init__(self, cache: Cache, most: int, unusual: set[Unusual]) -> None:
        if most < 0:
            raise InputError(f"a front cache of {most} blocks", hint="0 for none")
        if most and not getattr(sys, "_is_gil_enabled", lambda: True)():
            raise Unsupported(
                "the front cache needs Python's global lock", hint="leave front_cache out"
            )
        self.most = most
        self.counts = not most
        self._unusual = unusual
        self._ledger = cache.statistics.ledger
        if most:
            cache.peaked = self._peaked
        self.default: dict[int, Bin] = {}  # of the default stream
        self._cache = cache
        self._others: dict[int, dict[int, Bin]] = {LEGACY: self.default}
        self._bins: list[Bin] = []

    def find(self, size_bytes: int, stream: int) -> Bin | None:
        """Return where to look for a block for a request on another stream than the default one."""
        bins = self._others.get(stream)
        return bins.get(size_bytes) if bins else None

    def bin_of(self, block: Block) -> Bin | None:
        """Return where a block goes that was just handed out, when it is freed; None for the pools.

        What is too large to be split is counted by itself, and belongs there; so does what has a stack, which
        is to be seen no longer than it is allocated.
        """
        if (
            block.size >= self._cache.max_split_bytes
            or block.stack is not None
            or block.row.pool.id != DEFAULT_POOL
        ):
            return None
        stream = block.stream
        bins = self._others.setdefault(stream, {}) if stream else self.default
        found = bins.get(block.requested)
        if found is None and len(self._bins) < _MOST_BINS:
            found = bins[block.requested] = []
            self._bins.append(found)
        tab = block.tab
        if tab is None or tab.weight != block.weight:
            tab = block.tab = self._ledger.tab(block.weight)
        return found if tab else None

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
                if block.counted:
                    self._ledger.used -= block.weight
                block.counted = True
                self._cache.put_back(block, None)
                found = True
        return found

    def begin_anew(self) -> None:
        """Flush, and let what is kept from now on be in the ledger. The guard is held."""
        self.flush()
        self.counts = not self.most or self._ledger.pending > 0

    def settle(self) -> None:
        """Take what is kept out of the ledger, and count what is allocated and freed. The guard is held."""
        if self.counts:
            return
        self._unusual.add("settled")  # nothing comes and goes meanwhile
        try:
            self.counts = True
            for bin_ in filter(None, self._bins):
                self._take_out(bin_)
        finally:
            self._unusual.discard("settled")

    def _take_out(self, bin_: Bin) -> None:
        taken: Bin = []
        try:
            while bin_:
                block = bin_.pop()
                if block.counted:
                    self._ledger.used -= block.weight
                    block.counted = False
                taken.append(block)
        except IndexError:  # another thread was faster
            pass
        finally:
            bin_.extend(reversed(taken))

    def _peaked(self) -> None:
        """Raise the peaks to what is in use without what is kept."""
        if not self.counts and (len(self._bins) > _MOST_TO_ASK or any(self._bins)):
            self.settle()
        if self._ledger.used & ABOVE_PEAK:
            self._ledger.raise_peaks()
