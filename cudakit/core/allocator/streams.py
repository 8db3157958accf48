"""Frees that wait for other streams: an event on each stream that used the block, recorded at the free.

Events are queried when memory is requested, those of one queue in their order; only ``synchronize`` waits for
them. While a stream is captured, no event may be recorded or queried, and frees are deferred. A stream that
began to use a block during the capture is not waited for afterwards, since its work is in the graph. A block
that the graph built so far proves unused can be reused during the capture. Source: PyTorch's
c10/cuda/CUDACachingAllocator.cpp (insert_events, process_events, synchronize_and_free_events,
insert_events_deferred_until_no_capture, remove_cudagraph_stream_uses, record_free_markers, update_visited,
free_safe_blocks_in_capture).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from cudakit.core.allocator.blocks import Block, RawStack
from cudakit.core.allocator.upstream import CaptureGraph, EventSource
from cudakit.errors import CudaError
from cudakit.gpu.api import Event
from cudakit.torch_rules.oom_facts import PoolId

# Whether a request on a stream, made by the calling thread, matches.
StreamFilter: TypeAlias = Callable[[int], bool]
_Queue: TypeAlias = "deque[tuple[Event, int, Block]]"


@dataclass(frozen=True, slots=True)
class LastUses:
    """The graph nodes that used a freed block last."""

    graph: CapturedGraph
    nodes: frozenset[int]


class CapturedGraph:
    """The graph of one capture, which can prove that freed blocks are unused.

    A block that several streams used is free for its own stream once all nodes that those streams had at the
    free come before the next node of that stream. The nodes before it are kept: their set only grows.
    """

    def __init__(self, graph: CaptureGraph) -> None:
        self._graph = graph
        self._before: dict[tuple[int, int], set[int]] = {}  # by capture and stream

    def last_uses(self, block: Block) -> LastUses | None:
        """Return the last nodes of the streams that use a block; None if one of them is not captured."""
        streams = (block.stream, *(block.stream_uses or ()))
        if any(self._graph.capture(stream) is None for stream in streams):
            return None
        nodes = frozenset(node for stream in streams for node in self._graph.terminals(stream))
        return LastUses(self, nodes) if nodes else None

    def before(self, stream: int) -> Set[int]:
        """Return the nodes before the next one of a stream; none if the stream is not captured."""
        capture = self._graph.capture(stream)
        if capture is None:
            return frozenset()
        seen = self._before.setdefault((capture, stream), set())
        unvisited = list(self._graph.terminals(stream))
        while unvisited:
            node = unvisited.pop()
            if node not in seen:
                seen.add(node)
                unvisited += self._graph.predecessors(node)
        return seen


class Captures:
    """The captures that are under way: their number, and the graphs that permit reuse within."""

    def __init__(self) -> None:
        self.count = 0
        self.graphs: list[CapturedGraph] = []


class PendingFrees:
    """The freed blocks that other streams still use.

    ``complete`` is called with a block that no stream uses any more. A block whose events cannot be recorded
    yet, during a capture or since the driver refused, is deferred: tried again each time. With ``in_order``
    one queue holds the events of all streams, so that a slow stream delays the others (PyTorch's
    CachingHostAllocator.h, process_events). ``idle`` are unused events, which may be shared.
    """

    def __init__(
        self,
        upstream: EventSource,
        complete: Callable[[Block, RawStack | None], None],
        captures: Captures,
        *,
        in_order: bool = False,
        idle: list[Event] | None = None,
    ) -> None:
        self._upstream = upstream
        self._complete = complete
        self._captures = captures
        self._in_order = in_order
        self._queues: dict[int, _Queue] = {}
        self._deferred: dict[Block, LastUses | None] = {}
        # The streams that began to use a block during a capture.
        self._captured: dict[Block, dict[int, None]] = {}
        self._idle = [] if idle is None else idle
        self.count = 0  # of blocks

    def __bool__(self) -> bool:
        return self.count > 0

    def add_use(self, block: Block, stream: int) -> None:
        """Record that a stream uses a live block, unless it is the block's own stream.

        A stream that used the block before the capture and again in it is waited for, unlike in PyTorch: its
        work before the capture is in no graph.
        """
        if stream == block.stream:
            return
        if block.stream_uses is None:
            block.stream_uses = {}
        if self._captures.count and stream not in block.stream_uses:
            self._captured.setdefault(block, {})[stream] = None
        block.stream_uses[stream] = None

    def add(self, block: Block) -> None:
        """Add a freed block, which waits for the streams that use it.

        Raises CudaError if an event cannot be recorded or the graph cannot be queried; the block waits
        nevertheless.
        """
        self.count += 1
        if self._captures.count:
            self._deferred[block] = None
            uses_by_graph = (graph.last_uses(block) for graph in self._captures.graphs)
            self._deferred[block] = next(filter(None, uses_by_graph), None)
            return
        self._captured.pop(block, None)
        try:
            self._record(block)
        except BaseException:
            self._deferred[block] = None
            raise

    def process(self, stack: RawStack | None = None, stream: int = 0) -> None:
        """Complete the blocks whose events have occurred, without waiting.

        During a capture only those that its graph proves free for a request on ``stream``.
        """
        if self._captures.count:
            if self._captures.graphs:
                self._complete_proven(stack, stream)
            return
        self._record_deferred(stack)
        for key in list(self._queues):
            queue = self._queues[key]
            while queue and self._upstream.query_event(queue[0][0]):
                event, _, block = queue.popleft()
                self._occurred(event, block, stack)
            if not queue:
                del self._queues[key]

    def synchronize(self, stack: RawStack | None = None, *, pool: PoolId | None = None) -> None:
        """Wait for every stream that uses a freed block, or one of a pool, and complete them all."""
        self._record_deferred(stack)
        waiting = [block for block in self._deferred if pool is None or block.pool.id == pool]
        if waiting:  # the stream may be destroyed: only the device can be waited for
            self._upstream.sync()
            self._forget_deferred(waiting, stack)
        for key in list(self._queues):
            self._synchronize_queue(self._queues[key], stack, pool)
            if not self._queues[key]:
                del self._queues[key]

    def settle(self, stack: RawStack | None = None) -> None:
        """Record the events that captures deferred, without querying any."""
        if not self._captures.count:
            self._record_deferred(stack)

    def awaited(self) -> Iterator[tuple[int, Block]]:
        """Iterate over the streams that freed blocks wait for, each with its block."""
        for queue in self._queues.values():
            yield from ((stream, block) for _, stream, block in queue)
        for block in self._deferred:
            yield from ((stream, block) for stream in block.stream_uses or ())

    def close(self) -> None:
        """Destroy the unused events."""
        while self._idle:
            self._upstream.destroy_event(self._idle.pop())

    def _record(self, block: Block) -> None:
        """Record an event on each stream; those that succeed are not repeated."""
        while block.stream_uses:
            stream = next(iter(block.stream_uses))
            event = self._idle.pop() if self._idle else self._upstream.event()
            try:
                self._upstream.record(event, stream)
            except BaseException:
                self._idle.append(event)
                raise
            del block.stream_uses[stream]
            key = 0 if self._in_order else stream
            self._queues.setdefault(key, deque()).append((event, stream, block))
            block.event_count += 1

    def _record_deferred(self, stack: RawStack | None) -> None:
        """Record the deferred events; complete the blocks that only captures used."""
        for block in list(self._deferred):
            for stream in self._captured.pop(block, ()):
                if block.stream_uses:
                    block.stream_uses.pop(stream, None)
            with suppress(CudaError):
                self._record(block)
            if not block.stream_uses:
                del self._deferred[block]
                if not block.event_count:
                    self._done(block, stack)

    def _complete_proven(self, stack: RawStack | None, stream: int) -> None:
        before = {graph: graph.before(stream) for graph in self._captures.graphs}
        for block, last in list(self._deferred.items()):
            if last is None or block.stream != stream or block.event_count:
                continue
            if last.nodes <= before.get(last.graph, frozenset()):
                del self._deferred[block]
                self._captured.pop(block, None)
                block.stream_uses = None
                self._done(block, stack)

    def _synchronize_queue(
        self, queue: _Queue, stack: RawStack | None, pool: PoolId | None
    ) -> None:
        for entry in list(queue):
            event, _, block = entry
            if pool is None or block.pool.id == pool:
                self._upstream.sync_event(event)
                queue.remove(entry)
                self._occurred(event, block, stack)

    def _forget_deferred(self, blocks: list[Block], stack: RawStack | None) -> None:
        for block in blocks:
            del self._deferred[block]
            block.stream_uses = None
            if not block.event_count:
                self._done(block, stack)

    def _occurred(self, event: Event, block: Block, stack: RawStack | None) -> None:
        self._idle.append(event)
        block.event_count -= 1
        if not block.event_count and not block.stream_uses:
            self._done(block, stack)

    def _done(self, block: Block, stack: RawStack | None) -> None:
        self.count -= 1
        self._complete(block, stack)


def of_this_thread() -> StreamFilter:
    """Match the requests of the calling thread."""
    caller = threading.get_ident()
    return lambda stream: threading.get_ident() == caller  # noqa: ARG005


def of_capture(stream: int | None, graph: CaptureGraph | None) -> StreamFilter:
    """Match the requests on all streams of the capture that a stream is in.

    Without a graph, which alone knows those streams, match all requests of this thread and all on that
    stream: a request too many costs memory, one too few would let others use the memory of the graph.
    """
    is_same_thread = of_this_thread()
    if stream is None:
        return is_same_thread
    if graph is None:
        return lambda other: other == stream or is_same_thread(other)

    def matches(other: int) -> bool:
        capture = graph.capture(other)
        return capture is not None and capture == graph.capture(stream)

    return matches
