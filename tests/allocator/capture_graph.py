"""A graph of a capture in memory: the nodes, and the last nodes of each stream."""

from __future__ import annotations


class CaptureGraph:
    """A capture with id 1. A stream joins the capture by waiting for a stream that is captured."""

    def __init__(self, *streams: int) -> None:
        self.last_nodes: dict[int, tuple[int, ...]] = dict.fromkeys(streams, ())
        self.predecessors_of_node: dict[int, tuple[int, ...]] = {}

    def launch(self, stream: int) -> None:
        """Add a node to a stream."""
        node = len(self.predecessors_of_node) + 1
        self.predecessors_of_node[node] = self.last_nodes[stream]
        self.last_nodes[stream] = (node,)

    def wait(self, stream: int, awaited: int) -> None:
        """Make a stream wait for the stream ``awaited``."""
        nodes = self.last_nodes.get(stream, ())
        self.last_nodes[stream] = tuple(dict.fromkeys((*nodes, *self.last_nodes[awaited])))

    def end(self) -> None:
        self.last_nodes.clear()

    def capture(self, stream: int) -> int | None:
        return 1 if stream in self.last_nodes else None

    def terminals(self, stream: int) -> tuple[int, ...]:
        return self.last_nodes[stream]

    def predecessors(self, node: int) -> tuple[int, ...]:
        return self.predecessors_of_node[node]
