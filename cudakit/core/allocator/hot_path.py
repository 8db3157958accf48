"""The two calls that every allocation is made of, written for speed.

They are closures, made once for each allocator: what they need lies in their cells, not at the end of a chain
of attributes; what happens each time stands in them, and is not called; what happens seldom is. What can
change (settings, recording, captures) they look up where it is kept, so that it does not matter for how long
somebody has held them.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from typing import Protocol

from cudakit.core.allocator.block import Block, Trail
from cudakit.core.allocator.entrance import Entrance
from cudakit.core.allocator.ledger import ABOVE_PEAK
from cudakit.core.allocator.oom import OutOfMemory
from cudakit.core.allocator.pools import Pool, Pools
from cudakit.core.allocator.tracing import Level, gather
from cudakit.core.allocator.upstream import DEFAULT_STREAM, stream_number
from cudakit.gpu.api import LEGACY, PER_THREAD, Ptr
from cudakit.torch_rules.sizes import (
    MOST_SMALL,
    TOO_MANY_BYTES,
    rounded,
)

_OF_FREES = int(Level.ALL)


class Alloc(Protocol):
    """Allocate for use in the order of a stream. No bytes are the address 0.

    Raises OutOfMemory, ValueError for a negative size, CudaError for whatever else the driver refuses.
    """

    def __call__(self, size_bytes: int, stream: int = 0) -> Ptr: ...


class Free(Protocol):
    """Free an allocation; another stream than its own is one that uses it until now.

    From within the allocator, or while another thread is there, it is freed a moment later. Raises
    InvalidPointer where nothing is allocated, CudaError where the use of other streams cannot be
    recorded; the memory is then kept until they are known to be done.
    """

    def __call__(self, ptr: int, stream: int | None = None) -> None: ...


class HotPath(Entrance):
    """What makes the two calls, and what they call when things are not as usual."""

    def _make_calls(self) -> tuple[Alloc, Free]:
        """Return both calls."""
        return self._make_alloc(), self._make_free()

    def _make_alloc(self) -> Alloc:  # noqa: C901, PLR0915
        cache, uses, live, late, routes = (
            self._cache,
            self._uses,
            self._live,
            self._late,
            self._routes,
        )
        guard, take_late = self._guard, self._take_late
        watchers, after = self._watchers, self._after
        acquire, release = guard.lock.acquire, guard.lock.release
        default, find, hand_out = cache.default, cache.find, cache.hand_out
        route, obtain = self._route, self._obtain
        front, ledger, unusual = self._front, cache.statistics.ledger, self._unusual
        small, large = default.small, default.large
        fronted, default_bins = front.most > 0, front.default
        find_bin, bin_of = front.find, front.bin_of

        def alloc(size_bytes: int, stream: int = 0) -> Ptr:  # noqa: C901, PLR0915
            if fronted:
                bin_ = find_bin(size_bytes, stream) if stream else default_bins.get(size_bytes)
                if bin_ and not unusual and type(size_bytes) is int:
                    try:
                        kept = bin_.pop()
                    except IndexError:  # another thread was faster
                        pass
                    else:
                        kept.tab.times += 1  # type: ignore[union-attr]  # with a bin it has one
                        if not kept.counted:
                            kept.counted = True
                            ledger.used = used = ledger.used + kept.weight
                            if used & ABOVE_PEAK:
                                ledger.raise_peaks()
                        ptr = kept.ptr
                        live[ptr] = kept
                        return ptr
            if type(size_bytes) is not int or not 0 < size_bytes < TOO_MANY_BYTES:
                size_bytes = _checked_size(size_bytes)
                if size_bytes == 0:
                    return Ptr(0)
            if 0 < stream <= PER_THREAD:
                stream = stream_number(stream)
            stack = None
            if unusual:
                if not self._caches:
                    return self._alloc_uncached(size_bytes, stream)
                if self._level:
                    stack = gather()
            acquire()
            if guard.busy:
                guard.refuse()
            guard.busy = True
            try:
                if late:
                    take_late()
                if unusual and uses.waiting:
                    uses.process(stack, stream)
                divisions = cache.divisions
                size = rounded(size_bytes, divisions) if divisions else size_bytes + 511 & -512
                pool = small if size <= MOST_SMALL else large
                if routes:
                    pools = route(stream) or default
                    pool = pools.small if pool is small else pools.large
                row = pool.rows.get(stream)
                part = row.part if row is not None and cache.simple else None
                if part is None:
                    found = find(pool, size, stream)
                else:
                    index = bisect_left(part, (size,))
                    if index == len(part):
                        found = None
                    elif part[index][0] < cache.max_split_bytes:
                        found = part.pop(index)[2]
                        found.free = False
                    else:
                        found = find(pool, size, stream)
                block = found or obtain(pool, size, size_bytes, stream, stack)
                hand_out(block, size, size_bytes, stack)
                if fronted:
                    block.bin = bin_of(block)
                ptr = block.ptr
                live[ptr] = block
            finally:
                guard.busy = False
                release()
                if late or watchers:
                    after()
            return ptr

        return alloc

    def _make_free(self) -> Free:
        cache, live, late = self._cache, self._live, self._late
        guard, drain = self._guard, self._drain
        watchers, after = self._watchers, self._after
        acquire, release = guard.lock.acquire, guard.lock.release
        ledger = cache.statistics.ledger
        claim, put_back, give_up = live.pop, cache.put_back, self._give_up
        front, unusual = self._front, self._unusual
        most = front.most

        def free(ptr: int, stream: int | None = None) -> None:
            block = claim(ptr, None)
            if block is None:
                self._free_unusual(ptr)
                return
            bin_ = block.bin
            if (
                bin_ is not None
                and len(bin_) < most
                and not unusual
                and (
                    stream is None
                    or stream == block.row.stream
                    or (stream == LEGACY and block.row.stream == DEFAULT_STREAM)
                )
                and not block.other_streams
            ):
                if front.counts:
                    ledger.used -= block.weight
                    block.counted = False
                bin_.append(block)
                return
            stack = gather() if unusual and self._level >= _OF_FREES else None
            if guard.busy or not acquire(False):
                late.append((block, stack, stream))
                drain()
                return
            guard.busy = True
            try:
                if (
                    (stream is None or stream == block.row.stream)
                    and not block.other_streams
                    and cache.recorder is None
                    and block.size < cache.max_split_bytes
                ):
                    block.allocated = False
                    ledger.used -= block.weight
                    put_back(block, None)
                else:
                    give_up(block, stack, stream)
            finally:
                guard.busy = False
                release()
                if late or watchers:
                    after()

        return free

    # What is unusual.

    def _route(self, stream: int) -> Pools | None:
        """Return the pools that a request goes to, None for the default; asked while there are routes."""
        return self._cache.private.route(stream)

    def _obtain(
        self, pool: Pool, size: int, requested: int, stream: int, stack: Trail | None
    ) -> Block:
        raise NotImplementedError

    def _alloc_uncached(self, size_bytes: int, stream: int) -> Ptr:
        raise NotImplementedError

    def _free_unusual(self, ptr: int) -> None:
        raise NotImplementedError


def _checked_size(size_bytes: int) -> int:
    size_bytes = int(operator.index(size_bytes))
    if size_bytes < 0:
        raise ValueError(f"a size is not negative: {size_bytes}")
    if size_bytes >= TOO_MANY_BYTES:
        raise OutOfMemory("Tried to allocate more than 1EB memory.", hint="ask for less")
    return size_bytes
