"""The way in: one thread at a time, and what is freed while somebody is inside is freed a moment later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from cudakit.core.allocator.block import Block, Trail
from cudakit.core.allocator.cache import Cache
from cudakit.core.allocator.events import Uses
from cudakit.core.allocator.front_cache import FrontCache, Unusual
from cudakit.core.allocator.guard import Guard
from cudakit.core.allocator.tracing import FREE_REQUESTED, Level, Recorder
from cudakit.core.allocator.upstream import Upstream, stream_number
from cudakit.errors import CudaError
from cudakit.torch_rules.settings import Settings


class Entrance:
    """What one device's allocator consists of, and who may touch it."""

    def __init__(self, upstream: Upstream, settings: Settings) -> None:
        self._upstream = upstream
        self._guard = Guard()
        self._recorder = Recorder()
        self._level = Level.NONE
        self._cache = Cache(upstream, settings)
        self._uses = Uses(upstream, self._complete)
        self._live: dict[int, Block] = {}
        self._caches = True
        self._routes = self._cache.private.routes  # changed, but never another list
        # Why not everything is as usual: the front cache rests, and the two calls look what it is.
        self._unusual: set[Unusual] = set()
        self._front = FrontCache(self._cache, 0, self._unusual)
        # Called after whatever may have changed what is held, when nobody is inside any more.
        self._watchers: list[Callable[[], None]] = []
        # Freed while somebody was inside, by a finalizer or another thread.
        self._late: deque[tuple[Block, Trail | None, int | None]] = deque()

    @contextmanager
    def _inside(self, *, flushes: bool = True) -> Iterator[None]:
        self._guard.enter()
        try:
            self._take_late()
            if flushes:
                self._front.begin_anew()
            yield
        finally:
            self._guard.leave()
            if self._late or self._watchers:
                self._after()

    def _give_up(self, block: Block, stack: Trail | None, stream: int | None) -> None:
        cache = self._cache
        if stream is not None:
            self._uses.add(block, stream_number(stream))
        block.allocated = False
        if cache.recorder is not None:
            seen = stack or block.stack
            cache.recorder.record(
                FREE_REQUESTED, block.ptr, block.requested, block.stream, seen, block.pool.id
            )
        if block.size >= cache.max_split_bytes:
            cache.statistics.oversize_allocations.decrease()
        if block.other_streams:
            self._unusual.add("awaited")
            self._front.settle()
            block.pool.tally.postponed(block.size)
            self._uses.postpone(block)
        else:
            block.pool.tally.ledger.used -= block.weight
            cache.put_back(block, stack)

    def _complete(self, block: Block, stack: Trail | None) -> None:
        block.pool.tally.completed(block.size, block.requested)
        self._let("awaited", on=self._cache.statistics.ledger.pending > 0)
        self._cache.put_back(block, stack)

    def _take_late(self) -> None:
        while self._late:
            block, stack, stream = self._late.popleft()
            with suppress(CudaError):  # of streams that use it: it waits, and they are tried again
                self._give_up(block, stack, stream)

    def _let(self, what: Unusual, *, on: bool) -> None:
        """Note that something is unusual, or is no more."""
        if on:
            self._unusual.add(what)
        else:
            self._unusual.discard(what)

    def _watch(self, watcher: Callable[[], None]) -> None:
        """Call a function after whatever may have changed what is held. The guard is held."""
        if watcher not in self._watchers:
            self._watchers.append(watcher)
        self._unusual.add("watched")
        self._front.flush()

    def _unwatch(self, watcher: Callable[[], None]) -> None:
        """Call it no more. The guard is held."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)
        self._let("watched", on=bool(self._watchers))

    def _after(self) -> None:
        """Do what waited for nobody to be inside."""
        self._drain()
        for watcher in list(self._watchers):
            watcher()

    def _drain(self) -> None:
        """Free what came late, unless somebody is inside, who does it when he leaves."""
        while self._late and self._guard.try_enter():
            try:
                self._take_late()
            finally:
                self._guard.leave()
