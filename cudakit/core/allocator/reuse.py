"""Reuse within a capture: what the graph so far proves that nobody uses any more.

A block that several streams used is free for its own stream once all that they had been given when it was
freed comes, in the graph, before whatever that stream is given next. No event is asked. Source:
c10/cuda/CUDACachingAllocator.cpp (record_free_markers, update_visited, free_safe_blocks_in_capture).
"""

from __future__ import annotations

from collections.abc import Collection, Set
from dataclasses import dataclass
from typing import Protocol

from cudakit.core.allocator.block import Block


class CaptureGraph(Protocol):
    """The graph that a capture makes, as far as it has come. Nodes are numbers, each of one node for ever."""

    def capture(self, stream: int) -> int | None:
        """Return the id of the capture that a stream is in; None for none (cudaStreamGetCaptureInfo)."""
        ...

    def terminals(self, stream: int) -> Collection[int]:
        """Return the nodes that the next one on a stream will depend on (cudaStreamGetCaptureInfo)."""
        ...

    def predecessors(self, node: int) -> Collection[int]:
        """Return what a node depends on (cudaGraphNodeGetDependencies)."""
        ...


@dataclass(frozen=True, slots=True)
class LastUses:
    """The nodes that used a freed block last, in the graph of some proofs."""

    proofs: Proofs
    nodes: frozenset[int]


class Proofs:
    """What one graph proves.

    The nodes before a stream's next one are remembered from one look to the next: there are only ever more.
    """

    def __init__(self, graph: CaptureGraph) -> None:
        self._graph = graph
        self._before: dict[tuple[int, int], set[int]] = {}  # by capture and stream

    def last_uses(self, block: Block) -> LastUses | None:
        """Return where the streams that use a block have come to; None where one of them is not captured."""
        streams = (block.stream, *(block.other_streams or ()))
        if any(self._graph.capture(stream) is None for stream in streams):
            return None
        nodes = frozenset(node for stream in streams for node in self._graph.terminals(stream))
        return LastUses(self, nodes) if nodes else None

    def before(self, stream: int) -> Set[int]:
        """Return the nodes that come before the next one on a stream; none where it is not captured."""
        capture = self._graph.capture(stream)
        if capture is None:
            return frozenset()
        seen = self._before.setdefault((capture, stream), set())
        left = list(self._graph.terminals(stream))
        while left:
            node = left.pop()
            if node not in seen:
                seen.add(node)
                left += self._graph.predecessors(node)
        return seen
