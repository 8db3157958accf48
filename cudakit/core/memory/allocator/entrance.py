"""The way in: one thread at a time, and what is freed while somebody is inside is freed a moment later."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from cudakit.core.memory.allocator.block import Block, Trail
from cudakit.core.memory.allocator.cache import Cache
from cudakit.core.memory.allocator.events import Uses
from cudakit.core.memory.allocator.guard import Guard
from cudakit.core.memory.allocator.settings import Settings
from cudakit.core.memory.allocator.tracing import FREE_REQUESTED, Level, Recorder
from cudakit.core.memory.allocator.upstream import Upstream, stream_number
from cudakit.errors import CudaError


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
        self._captures = 0  # under way
        # Freed while somebody was inside, by a finalizer or another thread.
        self._late: deque[tuple[Block, Trail | None, int | None]] = deque()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._guard.enter()
        try:
            self._take_late()
            yield
        finally:
            self._guard.leave()
            if self._late:
                self._drain()

    def _give_up(self, block: Block, stack: Trail | None, stream: int | None) -> None:
        cache = self._cache
        if stream is not None:
            add_use(block, stream)
        block.allocated = False
        if cache.recorder is not None:
            seen = stack or block.stack
            cache.recorder.record(
                FREE_REQUESTED, block.ptr, block.requested, block.stream, seen, block.pool.id
            )
        if block.size >= cache.max_split_bytes:
            cache.statistics.oversize_allocations.decrease()
        if block.other_streams:
            block.pool.tally.postponed(block.size)
            self._uses.postpone(block, capturing=bool(self._captures))
        else:
            cache.put_back(block, stack, was_postponed=False)

    def _complete(self, block: Block, stack: Trail | None) -> None:
        self._cache.put_back(block, stack, was_postponed=True)

    def _take_late(self) -> None:
        while self._late:
            block, stack, stream = self._late.popleft()
            with suppress(CudaError):  # of streams that use it: it waits, and they are tried again
                self._give_up(block, stack, stream)

    def _drain(self) -> None:
        """Free what came late, unless somebody is inside, who does it when he leaves."""
        while self._late and self._guard.try_enter():
            try:
                self._take_late()
            finally:
                self._guard.leave()


def add_use(block: Block, stream: int) -> None:
    """Note that a stream uses a block, unless it is the block's own."""
    number = stream_number(stream)
    if number == block.stream:
        return
    if block.other_streams is None:
        block.other_streams = {}
    block.other_streams[number] = None
