"""A graph of a capture in memory: the nodes, and the last nodes of each stream."""

from __future__ import annotations


class CaptureGraph:
    """A capture with id 1. A stream joins the capture by waiting for a stream that is captured."""

    def __init__(self, *streams: int) -> None:
        self.heads: dict[int, tuple[int, ...]] = dict.fromkeys(streams, ())
        self.before: dict[int, tuple[int, ...]] = {}

    def launch(self, stream: int) -> None:
        """Add a node to a stream."""
        node = len(self.before) + 1
        self.before[node] = self.heads[stream]
        self.heads[stream] = (node,)

    def wait(self, stream: int, awaited: int) -> None:
        """Make a stream wait for the stream ``awaited``."""
        heads = self.heads.get(stream, ())
        self.heads[stream] = tuple(dict.fromkeys((*heads, *self.heads[awaited])))

    def end(self) -> None:
        self.heads.clear()

    def capture(self, stream: int) -> int | None:
        return 1 if stream in self.heads else None

    def terminals(self, stream: int) -> tuple[int, ...]:
        return self.heads[stream]

    def predecessors(self, node: int) -> tuple[int, ...]:
        return self.before[node]
