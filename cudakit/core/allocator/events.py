"""Frees that wait for other streams: an event on each stream that used the block, recorded when it is freed.

Events are looked at when memory is asked for, those of one stream in their order; nothing waits for them
but ``synchronize``. While a stream is captured no event may be recorded or asked: frees are deferred then,
and of the streams that began to use a block in the capture nothing need be waited for afterwards, since what
they were given is in the graph. (PyTorch's insert_events, process_events, synchronize_and_free_events,
insert_events_deferred_until_no_capture, remove_cudagraph_stream_uses.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

from cudakit.core.allocator.block import Block, Trail
from cudakit.core.allocator.pools import PoolId
from cudakit.core.allocator.reuse import LastUses, Proofs
from cudakit.core.allocator.upstream import Upstream
from cudakit.errors import CudaError
from cudakit.gpu.api import Event


class Uses:
    """The blocks that other streams use after they were freed.

    ``complete`` is called with a block that nobody uses any more. A block whose events cannot be recorded
    yet, in a capture or since the driver refused, is deferred: tried again each time. ``captures`` is how
    many are under way, and ``proofs`` are of those whose graph may prove a block free.
    """

    def __init__(self, upstream: Upstream, complete: Callable[[Block, Trail | None], None]) -> None:
        self._upstream = upstream
        self._complete = complete
        self._queues: dict[int, deque[tuple[Event, Block]]] = {}
        self._deferred: dict[Block, LastUses | None] = {}
        self._captured: dict[Block, dict[int, None]] = {}  # streams that use it since a capture
        self._idle: list[Event] = []
        self.waiting = 0  # blocks
        self.captures = 0
        self.proofs: list[Proofs] = []

    def add(self, block: Block, stream: int) -> None:
        """Note that a stream uses a live block, unless it is the block's own.

        A stream that did so before the capture and does again in it is waited for after all, which PyTorch
        does not: what it did before is in no graph.
        """
        if stream == block.stream:
            return
        if block.other_streams is None:
            block.other_streams = {}
        if self.captures and stream not in block.other_streams:
            self._captured.setdefault(block, {})[stream] = None
        block.other_streams[stream] = None

    def postpone(self, block: Block) -> None:
        """Let a block wait for the streams that use it.

        Raises CudaError where an event cannot be recorded, or the graph not be asked; the block waits
        nevertheless.
        """
        self.waiting += 1
        if self.captures:
            self._deferred[block] = None
            found = (proofs.last_uses(block) for proofs in self.proofs)
            self._deferred[block] = next(filter(None, found), None)
            return
        self._captured.pop(block, None)
        try:
            self._record(block)
        except BaseException:
            self._deferred[block] = None
            raise

    def process(self, stack: Trail | None = None, stream: int = 0) -> None:
        """Complete the blocks whose streams have come so far, without waiting for any.

        During a capture those only that its graph proves free for a request on ``stream``.
        """
        if self.captures:
            if self.proofs:
                self._complete_proven(stack, stream)
            return
        self._record_deferred(stack)
        for other in list(self._queues):
            queue = self._queues[other]
            while queue and self._upstream.query_event(queue[0][0]):
                self._reached(*queue.popleft(), stack)
            if not queue:
                del self._queues[other]

    def synchronize(self, stack: Trail | None = None, *, pool: PoolId | None = None) -> None:
        """Wait for every stream that uses a freed block, or one of a pool, and complete them all."""
        self._record_deferred(stack)
        left = [block for block in self._deferred if pool is None or block.pool.id == pool]
        if left:  # the stream may be gone, and then only the device can be waited for
            self._upstream.sync()
            self._forget_deferred(left, stack)
        for stream in list(self._queues):
            self._synchronize_queue(self._queues[stream], stack, pool)
            if not self._queues[stream]:
                del self._queues[stream]

    def settle(self, stack: Trail | None = None) -> None:
        """Record what captures had deferred. Nothing is looked at."""
        if not self.captures:
            self._record_deferred(stack)

    def awaited(self) -> Iterator[tuple[int, Block]]:
        """Go through the streams that freed blocks wait for, and the block of each."""
        for stream, queue in self._queues.items():
            yield from ((stream, block) for _, block in queue)
        for block in self._deferred:
            yield from ((stream, block) for stream in block.other_streams or ())

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

    def _record_deferred(self, stack: Trail | None) -> None:
        """Record the events that could not be; what only captures used is complete."""
        for block in list(self._deferred):
            for stream in self._captured.pop(block, ()):
                if block.other_streams:
                    block.other_streams.pop(stream, None)
            with suppress(CudaError):
                self._record(block)
            if not block.other_streams:
                del self._deferred[block]
                if not block.waits:
                    self._done(block, stack)

    def _complete_proven(self, stack: Trail | None, stream: int) -> None:
        before = {proofs: proofs.before(stream) for proofs in self.proofs}
        for block, last in list(self._deferred.items()):
            if last is None or block.stream != stream or block.waits:
                continue
            if last.nodes <= before.get(last.proofs, frozenset()):
                del self._deferred[block]
                self._captured.pop(block, None)
                block.other_streams = None
                self._done(block, stack)

    def _synchronize_queue(
        self, queue: deque[tuple[Event, Block]], stack: Trail | None, pool: PoolId | None
    ) -> None:
        for entry in list(queue):
            event, block = entry
            if pool is None or block.pool.id == pool:
                self._upstream.sync_event(event)
                queue.remove(entry)
                self._reached(event, block, stack)

    def _forget_deferred(self, blocks: list[Block], stack: Trail | None) -> None:
        for block in blocks:
            del self._deferred[block]
            block.other_streams = None
            if not block.waits:
                self._done(block, stack)

    def _reached(self, event: Event, block: Block, stack: Trail | None) -> None:
        self._idle.append(event)
        block.waits -= 1
        if not block.waits and not block.other_streams:
            self._done(block, stack)

    def _done(self, block: Block, stack: Trail | None) -> None:
        self.waiting -= 1
        self._complete(block, stack)
