"""Frees that wait for other streams: an event on each stream that used the block, recorded when it is freed.

Events are looked at when memory is asked for, those of one stream in their order; nothing waits for them
but ``synchronize`` (PyTorch's insert_events, process_events, synchronize_and_free_events).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress

from cudakit.core.memory.allocator.block import Block, Trail
from cudakit.core.memory.allocator.upstream import Upstream
from cudakit.errors import CudaError
from cudakit.gpu.api import Event


class Uses:
    """The blocks that other streams use after they were freed.

    ``complete`` is called with a block that nobody uses any more. A block whose events cannot be recorded
    yet, in a capture or since the driver refused, is deferred: tried again each time.
    """

    def __init__(self, upstream: Upstream, complete: Callable[[Block, Trail | None], None]) -> None:
        self._upstream = upstream
        self._complete = complete
        self._queues: dict[int, deque[tuple[Event, Block]]] = {}
        self._deferred: list[Block] = []
        self._idle: list[Event] = []
        self.waiting = 0  # blocks

    def postpone(self, block: Block, *, capturing: bool = False) -> None:
        """Let a block wait for the streams that use it.

        Raises CudaError where an event cannot be recorded; the block waits nevertheless.
        """
        self.waiting += 1
        if capturing:
            self._deferred.append(block)
            return
        try:
            self._record(block)
        except BaseException:
            self._deferred.append(block)
            raise

    def process(self, stack: Trail | None = None) -> None:
        """Complete the blocks whose streams have come so far, without waiting for any."""
        self._record_deferred()
        for stream in list(self._queues):
            queue = self._queues[stream]
            while queue and self._upstream.query_event(queue[0][0]):
                self._reached(queue, stack)
            if not queue:
                del self._queues[stream]

    def synchronize(self, stack: Trail | None = None) -> None:
        """Wait for every stream that uses a freed block, and complete them all."""
        self._record_deferred()
        if self._deferred:  # the stream may be gone, and then only the device can be waited for
            self._upstream.sync()
            self._forget_deferred(stack)
        for stream in list(self._queues):
            queue = self._queues[stream]
            while queue:
                self._upstream.sync_event(queue[0][0])
                self._reached(queue, stack)
            del self._queues[stream]

    def close(self) -> None:
        """Give the events back."""
        while self._idle:
            self._upstream.destroy_event(self._idle.pop())

    def _record(self, block: Block) -> None:
        """Record an event on each stream; those that succeed are not tried again."""
        while block.other_streams:
            stream = next(iter(block.other_streams))
            event = self._idle.pop() if self._idle else self._upstream.event()
            try:
                self._upstream.record(event, stream)
            except BaseException:
                self._idle.append(event)
                raise
            del block.other_streams[stream]
            self._queues.setdefault(stream, deque()).append((event, block))
            block.waits += 1

    def _record_deferred(self) -> None:
        if not self._deferred:
            return
        still = []
        for block in self._deferred:
            with suppress(CudaError):
                self._record(block)
            if block.other_streams:
                still.append(block)
        self._deferred = still

    def _forget_deferred(self, stack: Trail | None) -> None:
        settled, self._deferred = self._deferred, []
        for block in settled:
            block.other_streams = None
            if not block.waits:
                self._done(block, stack)

    def _reached(self, queue: deque[tuple[Event, Block]], stack: Trail | None) -> None:
        event, block = queue.popleft()
        self._idle.append(event)
        block.waits -= 1
        if not block.waits and not block.other_streams:
            self._done(block, stack)

    def _done(self, block: Block, stack: Trail | None) -> None:
        self.waiting -= 1
        self._complete(block, stack)
