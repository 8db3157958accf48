"""Graphs in a trace: how they are made, and what their launches do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cudakit.core.sanitize.calls import Call
from cudakit.core.sanitize.clocks import Release
from cudakit.core.sanitize.columns import AccessRow
from cudakit.core.sanitize.graphs import Graph, GraphLaunch
from cudakit.core.sanitize.races import Coverage, Sync, SyncKind
from cudakit.core.sanitize.shadow import Shadow
from cudakit.core.sanitize.streams import Order

UNKNOWN_GRAPH = "launch of a graph whose nodes were not seen"


class Replays:
    """All graphs, and how far the last launch of each executable is: it never overlaps itself."""

    def __init__(
        self, order: Order, shadow: Shadow, coverage: Coverage, gaps: Counter[str]
    ) -> None:
        self._order = order
        self._shadow = shadow
        self._coverage = coverage
        self._gaps = gaps
        self._graphs: dict[int, Graph] = {}
        self._last: dict[int, tuple[Release, Call]] = {}  # by executable
        self._node_graph = Graph()  # that a node was last added to
        self.launched: GraphLaunch | None = None  # whose accesses are still coming in

    def add_node(self, call: Call, graph: int, node: int, work: int) -> None:
        call.graph = graph
        self._node_graph = self._graph(graph)
        self._node_graph.add(call, node, work)

    def add_edge(self, _: Call, graph: int, before: int, after: int) -> None:
        self._graph(graph).order(before, after)

    def node_accesses(self, rows: Iterable[AccessRow]) -> None:
        """Take accesses of the last nodes: they happen in every launch."""
        for row in rows:
            self._node_graph.touches(row)

    def launch(self, call: Call, graph: int, executable: int) -> None:
        """Enqueue a graph as one operation: it has a tick of its own, in which its nodes are ordered."""
        self._coverage.graph_launches += 1
        stream = self._order.enqueue(call)
        if stream is None:
            return
        if executable in self._last:
            release, earlier = self._last[executable]
            reason = Sync(SyncKind.EVENT, earlier.seq, earlier.site, call.seq, call.site)
            stream.acquire(release, reason)
        if not self._graph(graph):
            self._gaps[UNKNOWN_GRAPH] += 1
        call.graph = graph
        stream.release()
        past = stream.past.copy()
        past[stream.slot] = stream.tick - 1
        self.launched = GraphLaunch(call, self._graph(graph), stream.slot, stream.tick, past)
        self._order.enqueue(call)
        self._last[executable] = stream.release(), call

    def launch_accesses(self, rows: Iterable[AccessRow]) -> None:
        """Take accesses of the nodes in the last launch."""
        for row in rows:
            if self.launched is not None:
                self.launched.accesses.setdefault(row[-1], []).append(row)

    def accessed(self, call: Call, node: int, exact: bool) -> None:
        """Take that all is told of a node in the last launch, or that something of it was lost."""
        if self.launched is not None and self.launched.call.seq == call.seq:
            (self.launched.exact if exact else self.launched.lost).add(node)

    def finish(self) -> None:
        """Look at all that the last launch does, now that it is known."""
        launched, self.launched = self.launched, None
        if launched is None:
            return
        for kernel in launched.graph.kernels:
            self._coverage.count(launched.grade(kernel))
        self._shadow.judge.ancestors = launched.graph.ancestors
        for call, accesses in launched.work():
            self._shadow.add_all(accesses, call, launched)

    def prune(self) -> None:
        """Forget the launches that everything from now on comes after."""
        known = self._order.is_known
        self._last = {
            executable: (release, call)
            for executable, (release, call) in self._last.items()
            if not known(release.slot, release.tick)
        }

    def _graph(self, number: int) -> Graph:
        return self._graphs.setdefault(number, Graph())
