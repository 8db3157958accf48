"""Frees that wait for other streams: at a free, an event is recorded on each stream that used the block.

Events are queried when memory is requested, in the order of their queue; only ``synchronize`` waits for
events. While a stream is captured, events may be neither recorded nor queried, and frees are deferred. After
the capture, the free does not wait for streams that began to use the block during the capture, because their
work is in the graph. If the graph built so far proves that a block is unused, the block can be reused during
the capture. Source: PyTorch's c10/cuda/CUDACachingAllocator.cpp (insert_events, process_events,
synchronize_and_free_events, insert_events_deferred_until_no_capture, remove_cudagraph_stream_uses,
record_free_markers, update_visited, free_safe_blocks_in_capture).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from cudakit.allocator.blocks import Block, RawStack
from cudakit.allocator.upstream import CaptureGraph, EventSource
from cudakit.errors import CudaError
from cudakit.gpu.api import Event
from cudakit.torch_rules.oom import PoolId

# A function that selects requests: it returns whether a request of the calling thread on a stream is
# selected.
StreamFilter: TypeAlias = Callable[[int], bool]
_EventQueue: TypeAlias = "deque[tuple[Event, int, Block]]"


@dataclass(frozen=True, slots=True)
class LastUses:
    """The graph nodes that used a freed block last."""

    graph: CapturedGraph
    nodes: frozenset[int]


class CapturedGraph:
    """The graph of one capture, which can prove that freed blocks are unused.

    A block that several streams used can be reused by the block's stream if all nodes that these streams had
    at the free come before the next node of the block's stream. The set of nodes before the next node only
    grows, so it is stored and extended.
    """

    def __init__(self, graph: CaptureGraph) -> None:
        self._graph = graph
        # Predecessors of the next node of each stream, as far as they were queried, by capture and stream.
        self._nodes_before: dict[tuple[int, int], set[int]] = {}

    def last_uses(self, block: Block) -> LastUses | None:
        """Return the last nodes of the streams that use a block; None if one of them is not captured."""
        streams = (block.stream, *(block.stream_uses or ()))
        if any(self._graph.capture(stream) is None for stream in streams):
            return None
        nodes = frozenset(node for stream in streams for node in self._graph.terminals(stream))
        return LastUses(self, nodes) if nodes else None

    def nodes_before(self, stream: int) -> Set[int]:
        """Return the nodes before the next node of a stream; no nodes if the stream is not captured."""
        capture_id = self._graph.capture(stream)
        if capture_id is None:
            return frozenset()
        visited_nodes = self._nodes_before.setdefault((capture_id, stream), set())
        unvisited_nodes = list(self._graph.terminals(stream))
        while unvisited_nodes:
            node = unvisited_nodes.pop()
            if node not in visited_nodes:
                visited_nodes.add(node)
                unvisited_nodes += self._graph.predecessors(node)
        return visited_nodes


class Captures:
    """The current captures: their number, and the graphs that prove which blocks can be reused."""

    def __init__(self) -> None:
        self.capture_count = 0
        self.graphs: list[CapturedGraph] = []

    def begin(self, graph: CapturedGraph | None = None) -> None:
        """Count a capture, whose ``graph`` may prove which blocks can be reused."""
        self.capture_count += 1
        if graph is not None:
            self.graphs.append(graph)

    def end(self, graph: CapturedGraph | None = None) -> None:
        """End a capture that began with this graph."""
        self.capture_count -= 1
        if graph is not None:
            self.graphs.remove(graph)


class PendingFrees:
    """The freed blocks that other streams still use.

    ``complete_free`` is called with a block that no stream uses any more. If the events of a block cannot be
    recorded, during a capture or because the driver refuses, the block is deferred: each call tries again.
    With ``in_order``, the events of all streams are in one queue, so that a slow stream delays the others
    (PyTorch's CachingHostAllocator.h, process_events). ``unused_events`` is a list that several objects may
    share.
    """

    def __init__(
        self,
        upstream: EventSource,
        complete_free: Callable[[Block, RawStack | None], None],
        captures: Captures,
        *,
        in_order: bool = False,
        unused_events: list[Event] | None = None,
    ) -> None:
        self._upstream = upstream
        self._complete_free = complete_free
        self._captures = captures
        self._is_in_order = in_order
        self._queues: dict[int, _EventQueue] = {}
        self._deferred_frees: dict[Block, LastUses | None] = {}
        # For each block, the streams that began to use the block during a capture.
        self._uses_in_captures: dict[Block, dict[int, None]] = {}
        self._unused_events = [] if unused_events is None else unused_events
        self.pending_count = 0  # Number of pending blocks.

    def __bool__(self) -> bool:
        return self.pending_count > 0

    def add_use(self, block: Block, stream: int) -> None:
        """Record that a stream uses a live block, unless it is the block's own stream.

        If a stream used the block before a capture and again in the capture, the free waits for the stream,
        unlike in PyTorch: the stream's work before the capture is in no graph.
        """
        if stream == block.stream:
            return
        if block.stream_uses is None:
            block.stream_uses = {}
        if self._captures.capture_count and stream not in block.stream_uses:
            self._uses_in_captures.setdefault(block, {})[stream] = None
        block.stream_uses[stream] = None

    def add_block(self, block: Block) -> None:
        """Add a freed block, which waits for the streams that use it.

        Raises CudaError if an event cannot be recorded or the graph cannot be queried. The block is added in
        this case too.
        """
        self.pending_count += 1
        if self._captures.capture_count:
            self._deferred_frees[block] = None
            last_uses = (graph.last_uses(block) for graph in self._captures.graphs)
            self._deferred_frees[block] = next(filter(None, last_uses), None)
            return
        self._uses_in_captures.pop(block, None)
        try:
            self._record_events(block)
        except BaseException:
            self._deferred_frees[block] = None
            raise

    def process_events(self, stack: RawStack | None = None, stream: int = 0) -> None:
        """Complete the blocks whose events have occurred, without waiting.

        During a capture, complete only the blocks that its graph proves to be free for a request on
        ``stream``.
        """
        if self._captures.capture_count:
            if self._captures.graphs:
                self._complete_proven(stack, stream)
            return
        self._record_deferred(stack)
        for stream_key in list(self._queues):
            queue = self._queues[stream_key]
            while queue and self._upstream.query_event(queue[0][0]):
                cuda_event, _, block = queue.popleft()
                self._handle_event(cuda_event, block, stack)
            if not queue:
                del self._queues[stream_key]

    def synchronize(self, stack: RawStack | None = None, *, pool: PoolId | None = None) -> None:
        """Wait for the streams that use freed blocks of all pools, or of ``pool``; complete the blocks."""
        self._record_deferred(stack)
        deferred_blocks = [
            block
            for block in self._deferred_frees
            if pool is None or block.free_blocks.pool_id == pool
        ]
        if deferred_blocks:  # A stream may have been destroyed, so wait for the whole device.
            self._upstream.sync()
        for block in deferred_blocks:
            del self._deferred_frees[block]
            block.stream_uses = None
            if not block.event_count:
                self._complete_block(block, stack)
        for stream_key in list(self._queues):
            queue = self._queues[stream_key]
            for queued_free in list(queue):
                cuda_event, _, block = queued_free
                if pool is None or block.free_blocks.pool_id == pool:
                    self._upstream.sync_event(cuda_event)
                    queue.remove(queued_free)
                    self._handle_event(cuda_event, block, stack)
            if not queue:
                del self._queues[stream_key]

    def record_deferred_events(self, stack: RawStack | None = None) -> None:
        """Record the events that captures deferred, without querying events."""
        if not self._captures.capture_count:
            self._record_deferred(stack)

    def awaited_streams(self) -> Iterator[tuple[int, Block]]:
        """Iterate over the streams that freed blocks wait for, each with its block."""
        for queue in self._queues.values():
            yield from ((stream, block) for _, stream, block in queue)
        for block in self._deferred_frees:
            yield from ((stream, block) for stream in block.stream_uses or ())

    def close(self) -> None:
        """Destroy the unused events."""
        while self._unused_events:
            self._upstream.destroy_event(self._unused_events.pop())

    def _record_events(self, block: Block) -> None:
        """Record an event on each stream that uses a block; after a CudaError, a later call continues."""
        while block.stream_uses:
            stream = next(iter(block.stream_uses))
            cuda_event = (
                self._unused_events.pop() if self._unused_events else self._upstream.event()
            )
            try:
                self._upstream.record(cuda_event, stream)
            except BaseException:
                self._unused_events.append(cuda_event)
                raise
            del block.stream_uses[stream]
            stream_key = 0 if self._is_in_order else stream
            self._queues.setdefault(stream_key, deque()).append((cuda_event, stream, block))
            block.event_count += 1

    def _record_deferred(self, stack: RawStack | None) -> None:
        """Record the deferred events; complete the blocks that were used in captures only."""
        for block in list(self._deferred_frees):
            for stream in self._uses_in_captures.pop(block, ()):
                if block.stream_uses:
                    block.stream_uses.pop(stream, None)
            with suppress(CudaError):
                self._record_events(block)
            if not block.stream_uses:
                del self._deferred_frees[block]
                if not block.event_count:
                    self._complete_block(block, stack)

    def _complete_proven(self, stack: RawStack | None, stream: int) -> None:
        nodes_before = {graph: graph.nodes_before(stream) for graph in self._captures.graphs}
        for block, last_uses in list(self._deferred_frees.items()):
            if last_uses is None or block.stream != stream or block.event_count:
                continue
            if last_uses.nodes <= nodes_before.get(last_uses.graph, frozenset()):
                del self._deferred_frees[block]
                self._uses_in_captures.pop(block, None)
                block.stream_uses = None
                self._complete_block(block, stack)

    def _handle_event(self, cuda_event: Event, block: Block, stack: RawStack | None) -> None:
        self._unused_events.append(cuda_event)
        block.event_count -= 1
        if not block.event_count and not block.stream_uses:
            self._complete_block(block, stack)

    def _complete_block(self, block: Block, stack: RawStack | None) -> None:
        self.pending_count -= 1
        self._complete_free(block, stack)


def calling_thread_filter() -> StreamFilter:
    """Return a filter that selects the requests of the calling thread."""
    caller_thread_id = threading.get_ident()
    return lambda stream: threading.get_ident() == caller_thread_id  # noqa: ARG005


def capture_filter(stream: int | None, graph: CaptureGraph | None) -> StreamFilter:
    """Return a filter that selects the requests on all streams of the capture to which ``stream`` belongs.

    Only the graph shows which streams belong to the capture. Without a graph, the filter selects all requests
    of this thread, and all requests on the stream. The filter may then select requests of other work, which
    wastes memory; but if it missed a request of the capture, other work could use the memory of the graph.
    """
    is_same_thread = calling_thread_filter()
    if stream is None:
        return is_same_thread
    if graph is None:
        return lambda other: other == stream or is_same_thread(other)

    def selects_request(request_stream: int) -> bool:
        capture_id = graph.capture(request_stream)
        return capture_id is not None and capture_id == graph.capture(stream)

    return selects_request
