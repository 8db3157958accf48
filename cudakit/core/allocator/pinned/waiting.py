"""Blocks that were freed while streams use them: an event on each stream, looked at in their order.

One queue for all streams, of which the first event that is not reached holds up the rest, as in PyTorch's
CachingHostAllocator.h (process_events).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

from cudakit.core.allocator.pinned.blocks import HostBlock
from cudakit.core.allocator.pinned.upstream import HostUpstream
from cudakit.errors import CudaError
from cudakit.gpu.api import Event


class Waiting:
    """Freed blocks that are in use; ``complete`` is called with one that is not any more.

    A block whose events cannot be recorded yet, in a capture or since the driver refused, is deferred: tried
    again each time. ``idle`` are events that nothing waits for, of all pools.
    """

    def __init__(
        self, upstream: HostUpstream, complete: Callable[[HostBlock], None], idle: list[Event]
    ) -> None:
        self._upstream = upstream
        self._complete = complete
        self._queue: deque[tuple[Event, int, HostBlock]] = deque()
        self._deferred: list[HostBlock] = []
        self._idle = idle

    def __bool__(self) -> bool:
        return bool(self._queue or self._deferred)

    def __iter__(self) -> Iterator[tuple[int, HostBlock]]:
        """Go through the streams that are waited for, and the block of each."""
        yield from ((stream, block) for _, stream, block in self._queue)
        yield from ((stream, block) for block in self._deferred for stream in block.streams)

    def postpone(self, block: HostBlock, *, capturing: bool) -> None:
        """Let a block wait for the streams that use it.

        Raises CudaError where an event cannot be recorded; the block waits nevertheless.
        """
        if capturing:
            self._deferred.append(block)
            return
        try:
            self._record(block)
        except BaseException:
            self._deferred.append(block)
            raise

    def process(self) -> None:
        """Complete what is reached, in order, up to the first that is not."""
        self._record_deferred()
        while self._queue and self._upstream.query_event(self._queue[0][0]):
            self._reached()

    def synchronize(self) -> None:
        """Wait for every stream that uses a freed block, and complete them all."""
        self._record_deferred()
        if self._deferred:  # the stream may be gone, and then only the device can be waited for
            self._upstream.sync()
            self._settle_deferred()
        while self._queue:
            self._upstream.sync_event(self._queue[0][0])
            self._reached()

    def _record(self, block: HostBlock) -> None:
        """Record an event on each stream; those that succeed are not tried again."""
        while block.streams:
            stream = next(iter(block.streams))
            event = self._idle.pop() if self._idle else self._upstream.event()
            try:
                self._upstream.record(event, stream)
            except BaseException:
                self._idle.append(event)
                raise
            del block.streams[stream]
            block.waits += 1
            self._queue.append((event, stream, block))

    def _record_deferred(self) -> None:
        still = []
        for block in self._deferred:
            with suppress(CudaError):
                self._record(block)
            if block.streams:
                still.append(block)
        self._deferred = still

    def _settle_deferred(self) -> None:
        settled, self._deferred = self._deferred, []
        for block in settled:
            block.streams.clear()
            if not block.waits:
                self._complete(block)

    def _reached(self) -> None:
        event, _, block = self._queue.popleft()
        self._idle.append(event)
        block.waits -= 1
        if not block.waits and not block.streams:
            self._complete(block)
