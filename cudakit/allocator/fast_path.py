"""The usual case of ``alloc`` and ``free``, in Python.

In the usual case the settings are the defaults, no stacks are recorded, there are no monitors, routes to
private pools or pending frees, and a free block serves the request. All other calls go to the slow path,
which handles every case. ``native.FastPath`` replaces FastPath if it was compiled; it has the same methods,
and also records stacks.
"""

from __future__ import annotations

from typing import Any, Protocol

from cudakit.allocator.blocks import Block
from cudakit.allocator.engine import Engine
from cudakit.allocator.guard import Guard
from cudakit.allocator.history import History
from cudakit.allocator.upstream import DEFAULT_STREAM
from cudakit.gpu.api import LEGACY, PER_THREAD, Ptr
from cudakit.torch_rules.sizes import MAX_SMALL_BYTES, MIB, SMALLEST_BLOCK, UNLIMITED

_SMALL_SLACK, _LARGE_SLACK = SMALLEST_BLOCK - 1, MIB
_ROUND_UP, _ROUND_MASK = SMALLEST_BLOCK - 1, -SMALLEST_BLOCK


class Alloc(Protocol):
    """Allocate memory for the work of a stream. A request of 0 bytes returns the address 0.

    Raises OutOfMemory, InvalidSize for a negative size, CudaError for every other failure of the driver.
    """

    def __call__(self, size_bytes: int, stream: int = 0) -> Ptr: ...


class Free(Protocol):
    """Free an allocation; if ``stream`` is not the stream of the allocation, its use is recorded first.

    If the allocator is in use, by another thread or by this one, the free is queued and performed at the end
    of that call. Raises InvalidPointer if no allocation begins at ``ptr``, CudaError if an event cannot be
    recorded on a stream that used the memory; the memory then stays pending until the stream has finished.
    """

    def __call__(self, ptr: int, stream: int | None = None) -> None: ...


class SlowCalls(Protocol):
    """``alloc`` and ``free`` of the slow path, which handles every case."""

    @property
    def slow_alloc(self) -> Alloc: ...
    @property
    def slow_free(self) -> Free: ...


class FastPath:
    """``alloc`` and ``free`` of one allocator. While ``gate.slow`` is True, every call takes the slow path.

    ``python_frames`` is the number of Python frames between the caller and the slow path.
    """

    __slots__ = (
        "_acquire_lock",
        "_engine",
        "_gate",
        "_guard",
        "_large_by_stream",
        "_live_blocks",
        "_release_lock",
        "_slow_alloc",
        "_slow_free",
        "_small_by_stream",
    )

    python_frames = 1

    def __init__(
        self,
        engine: Engine,
        guard: Guard[Any],
        live_blocks: dict[int, Block],
        slow_calls: SlowCalls,
    ) -> None:
        self._engine = engine
        self._guard = guard
        self._gate = guard.gate
        self._live_blocks = live_blocks
        self._slow_alloc, self._slow_free = slow_calls.slow_alloc, slow_calls.slow_free
        self._small_by_stream, self._large_by_stream = (
            engine.default_pools.small.by_stream,
            engine.default_pools.large.by_stream,
        )
        self._acquire_lock, self._release_lock = guard.lock.acquire, guard.lock.release

    def record_events(self, history: History | None) -> bool:
        """Set the history of events, or None; return whether the fast path records all events."""
        self._engine.history = history
        return history is None or not history.level

    def alloc(self, size_bytes: int, stream: int = DEFAULT_STREAM) -> Ptr:
        """Allocate memory; see the protocol Alloc."""
        gate = self._gate
        if stream == LEGACY:
            stream = DEFAULT_STREAM
        if (
            gate.slow
            or type(size_bytes) is not int
            or size_bytes <= 0
            or stream == PER_THREAD
            or gate.busy
            or not self._acquire_lock(False)
        ):
            return self._slow_alloc(size_bytes, stream)
        gate.busy = True
        try:
            block_bytes = size_bytes + _ROUND_UP & _ROUND_MASK
            is_small = block_bytes <= MAX_SMALL_BYTES
            free_blocks = (self._small_by_stream if is_small else self._large_by_stream).get(stream)
            block = free_blocks.take(block_bytes, UNLIMITED) if free_blocks is not None else None
            if block is not None:
                should_split = block.size - block_bytes > (
                    _SMALL_SLACK if is_small else _LARGE_SLACK
                )
                self._engine.alloc_found_block(
                    block, block_bytes, size_bytes, None, splits=should_split
                )
                self._live_blocks[block.ptr] = block
        finally:
            gate.busy = False
            self._release_lock()
            if self._guard.queued_frees:
                self._guard.drain_queue()
        if block is None:
            return self._slow_alloc(size_bytes, stream)
        return block.ptr

    def free(self, ptr: int, stream: int | None = None) -> None:
        """Free memory; see the protocol Free."""
        gate = self._gate
        if gate.slow or gate.busy or not self._acquire_lock(False):
            self._slow_free(ptr, stream)
            return
        gate.busy = True
        try:
            block = self._live_blocks.get(ptr)
            if block is not None and not block.stream_uses and _is_stream_of(block, stream):
                block = self._live_blocks.pop(ptr)
                self._engine.free(block, None)
            else:
                block = None
        finally:
            gate.busy = False
            self._release_lock()
            if self._guard.queued_frees:
                self._guard.drain_queue()
        if block is None:
            self._slow_free(ptr, stream)


def _is_stream_of(block: Block, stream: int | None) -> bool:
    """Return whether a stream is the stream of a block; True if the stream is None."""
    block_stream = block.free_blocks.stream
    return (
        stream is None
        or stream == block_stream
        or (stream == LEGACY and block_stream == DEFAULT_STREAM)
    )
