"""The usual case of ``alloc`` and ``free``, and the front cache.

The usual case has default settings, no recorded stacks, monitors, routes to private pools or pending frees,
and a free block. All other calls go to the slow calls, which handle every case. ``native.FastPath`` replaces
FastPath if it was compiled; it has the same attributes and methods, and also records stacks.
"""

from __future__ import annotations

from typing import Any, Protocol

from cudakit.core.allocator.blocks import Block
from cudakit.core.allocator.engine import Engine
from cudakit.core.allocator.guard import Guard
from cudakit.core.allocator.history import History
from cudakit.core.allocator.upstream import DEFAULT_STREAM
from cudakit.errors import InputError
from cudakit.gpu.api import LEGACY, PER_THREAD, Ptr
from cudakit.torch_rules.oom_facts import DEFAULT_POOL
from cudakit.torch_rules.sizes import MIB, MOST_SMALL, SMALLEST_BLOCK, UNLIMITED

_SMALL_SLACK, _LARGE_SLACK = SMALLEST_BLOCK - 1, MIB
_ROUND_UP, _ROUND_MASK = SMALLEST_BLOCK - 1, -SMALLEST_BLOCK


class Alloc(Protocol):
    """Allocate for use in the order of a stream. A request of 0 bytes returns the address 0.

    Raises OutOfMemory, InvalidSize for a negative size, CudaError for every other failure of the driver.
    """

    def __call__(self, size_bytes: int, stream: int = 0) -> Ptr: ...


class Free(Protocol):
    """Free an allocation; a ``stream`` other than its own is recorded as a use first, as by ``record_use``.

    If the allocator is in use, by another thread or by this one, the free is queued and performed at the end
    of that call. Raises InvalidPointer if nothing is allocated there, CudaError if an event cannot be
    recorded on a stream that used the memory; the memory then stays pending until the stream has finished.
    """

    def __call__(self, ptr: int, stream: int | None = None) -> None: ...


class SlowCalls(Protocol):
    """The calls for every case. ``slow_free`` gets the block of ``ptr``, which is no longer live."""

    def slow_alloc(self, size_bytes: int, stream: int) -> Ptr: ...
    def slow_free(self, ptr: int, block: Block | None, stream: int | None) -> None: ...


class FrontCache:
    """Freed blocks of the default pool, kept for requests of the same number of bytes on the same stream.

    Statistics count kept blocks as free, but pools treat them as in use: they are neither merged nor found by
    a search. At most ``limit`` blocks are kept of each size and stream; 0 disables the front cache. Raises
    InputError for a negative limit.
    """

    __slots__ = ("_engine", "_kept", "active", "limit")

    def __init__(self, engine: Engine, limit: int) -> None:
        if limit < 0:
            raise InputError(f"a front cache of {limit} blocks", hint="0 for none")
        self.limit = limit
        self.active = limit > 0  # False while history is recorded, for example
        self._engine = engine
        self._kept: dict[tuple[int, int], list[Block]] = {}

    def take(self, size_bytes: int, stream: int) -> Block | None:
        """Allocate the latest kept block of this size and stream, or return None."""
        kept = self._kept.get((stream, size_bytes))
        if not kept:
            return None
        block = kept.pop()
        block.allocated = True
        block.free_blocks.counters.count_alloc(block.size, size_bytes)
        return block

    def keep(self, block: Block) -> bool:
        """Free a block and keep it; False if it must go to the pools."""
        free = block.free_blocks
        key = free.stream, block.requested
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = []
        if (
            len(kept) >= self.limit
            or free.pool.id != DEFAULT_POOL
            or block.stack is not None
            or block.size >= self._engine.max_split_bytes
        ):
            return False
        block.allocated = False
        free.counters.count_free(block.size, block.requested)
        kept.append(block)
        return True

    def flush(self) -> bool:
        """Return all blocks to the pools; return whether there were any."""
        found = False
        while self._kept:
            for block in self._kept.popitem()[1]:
                self._engine.free_block(block, None)
                found = True
        return found


class FastPath:
    """``alloc`` and ``free`` of one allocator. While ``slow`` is set, every call goes to the slow calls.

    ``python_frames`` is the number of frames between the caller and the slow calls.
    """

    __slots__ = (
        "_acquire",
        "_engine",
        "_front",
        "_guard",
        "_large",
        "_live",
        "_release",
        "_slow_calls",
        "_small",
        "slow",
    )

    python_frames = 1

    def __init__(
        self,
        engine: Engine,
        guard: Guard[Any],
        live: dict[int, Block],
        front: FrontCache,
        slow_calls: SlowCalls,
    ) -> None:
        self.slow = False
        self._engine = engine
        self._guard = guard
        self._live = live
        self._front = front
        self._slow_calls = slow_calls
        self._small, self._large = engine.default.small.by_stream, engine.default.large.by_stream
        self._acquire, self._release = guard.lock.acquire, guard.lock.release

    def record_events(self, history: History | None) -> bool:
        """Record events in a history, or none; return whether the fast path records all of it."""
        self._engine.trace = history
        return history is None or not history.level

    def alloc(self, size_bytes: int, stream: int = DEFAULT_STREAM) -> Ptr:
        """Allocate; see Alloc."""
        guard = self._guard
        if stream == LEGACY:
            stream = DEFAULT_STREAM
        if (
            self.slow
            or type(size_bytes) is not int
            or size_bytes <= 0
            or stream == PER_THREAD
            or guard.busy
            or not self._acquire(False)
        ):
            return self._slow_calls.slow_alloc(size_bytes, stream)
        guard.busy = True
        try:
            block = self._front.take(size_bytes, stream) if self._front.active else None
            if block is None:
                size = size_bytes + _ROUND_UP & _ROUND_MASK
                small = size <= MOST_SMALL
                free = (self._small if small else self._large).get(stream)
                block = free.take(size, UNLIMITED) if free is not None else None
                if block is not None:
                    split = block.size - size > (_SMALL_SLACK if small else _LARGE_SLACK)
                    self._engine.alloc_found_block(block, size, size_bytes, None, split=split)
            if block is not None:
                self._live[block.ptr] = block
        finally:
            guard.busy = False
            self._release()
            if guard.late:
                guard.drain()
        if block is None:
            return self._slow_calls.slow_alloc(size_bytes, stream)
        return block.ptr

    def free(self, ptr: int, stream: int | None = None) -> None:
        """Free; see Free."""
        block = self._live.pop(ptr, None)
        guard = self._guard
        if (
            block is None
            or self.slow
            or block.stream_uses
            or (stream is not None and not _is_own(block, stream))
            or guard.busy
            or not self._acquire(False)
        ):
            self._slow_calls.slow_free(ptr, block, stream)
            return
        guard.busy = True
        try:
            if not (self._front.active and self._front.keep(block)):
                self._engine.free(block, None)
        finally:
            guard.busy = False
            self._release()
            if guard.late:
                guard.drain()


def _is_own(block: Block, stream: int) -> bool:
    """Return whether a stream is that of a block."""
    own = block.free_blocks.stream
    return stream == own or (stream == LEGACY and own == DEFAULT_STREAM)
