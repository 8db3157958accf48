"""CUDA graphs: the accesses of their nodes, the order of the nodes, and graph launches.

A graph launch is one operation of its stream: all nodes have the same tick, and the edges order them among
each other. CUDA C++ Programming Guide, "CUDA Graphs".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter

from cudakit.core.sanitize.clocks import ASSUMED, SUMMARY, Call, Clock, Release
from cudakit.core.sanitize.ordering import StreamOrder
from cudakit.core.sanitize.races import Coverage, Grade, Sync, SyncKind
from cudakit.core.sanitize.record_batch import ACCESS_FIELDS, AccessRow
from cudakit.core.sanitize.shadow_memory import Shadow
from cudakit.trace.kinds import EventKind, NodeType

_KNOWN = ACCESS_FIELDS.index("known")
_KINDS = {
    NodeType.LAUNCH: EventKind.LAUNCH,
    NodeType.COPY: EventKind.COPY,
    NodeType.FILL: EventKind.FILL,
    NodeType.ALLOC: EventKind.ALLOC,
    NodeType.FREE: EventKind.FREE,
    NodeType.HOST_CALL: EventKind.HOST_CALL,
    NodeType.MEMOP: EventKind.MEMOP,
}


@dataclass(slots=True)
class Node:
    """A node as it was added to its graph, and its accesses in each launch."""

    call: Call
    accesses: list[AccessRow] = field(default_factory=list)


class Graph:
    """The nodes of a graph and their order."""

    def __init__(self) -> None:
        self._nodes: dict[int, Node] = {}
        self._before: dict[int, list[int]] = {}
        self._ancestors: dict[int, int] | None = None

    def add(self, call: Call, node: int, work: int) -> None:
        """Add a node; it replaces a node of the same number."""
        call.kind = _KINDS.get(NodeType(work), EventKind.GRAPH_LAUNCH)
        call.node = node
        if node not in self._nodes:
            self._ancestors = None
        self._nodes[node] = Node(call)

    def order(self, before: int, after: int) -> None:
        """Order a node after another one."""
        self._before.setdefault(after, []).append(before)
        self._ancestors = None

    def add_access(self, row: AccessRow) -> None:
        """Add an access that a node makes in each launch."""
        if row[-1] in self._nodes:
            self._nodes[row[-1]].accesses.append(row)

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def ancestors(self) -> Mapping[int, int]:
        """For each node, in topological order, the nodes that happen before it as bits of a number."""
        if self._ancestors is None:
            self._ancestors = {}
            for node in self._topological_order():
                bits = 0
                for before in self._before.get(node, ()):
                    bits |= self._ancestors.get(before, 0) | 1 << before
                self._ancestors[node] = bits
        return self._ancestors

    def node(self, number: int) -> Node:
        return self._nodes[number]

    @property
    def kernels(self) -> Iterator[int]:
        """The numbers of the nodes that are kernels."""
        return (
            number for number, node in self._nodes.items() if node.call.kind == EventKind.LAUNCH
        )

    def _topological_order(self) -> list[int]:
        """List the nodes in topological order; by number if that is one."""
        if all(before < node for node, nodes in self._before.items() for before in nodes):
            return sorted(self._nodes)
        try:
            in_order = TopologicalSorter(self._before).static_order()
            known = dict.fromkeys([*in_order, *self._nodes])
        except CycleError:  # the trace is damaged: CUDA accepts no graph with a cycle
            return sorted(self._nodes)
        return [node for node in known if node in self._nodes]


@dataclass(slots=True)
class GraphLaunch:
    """A graph launch, while its accesses are collected."""

    call: Call
    graph: Graph
    slot: int
    tick: int
    past: Clock
    accesses: dict[int, list[AccessRow]] = field(default_factory=dict)
    exact: set[int] = field(default_factory=set)  # nodes whose accesses were all recorded
    lost: set[int] = field(default_factory=set)  # nodes of which some accesses were lost

    def work(self) -> Iterator[tuple[Call, list[AccessRow]]]:
        """Yield the accesses of each node, in topological order."""
        own = self.call
        for number in self.graph.ancestors:
            added = self.graph.node(number)
            accesses = self._accesses(number)
            if accesses:
                site = added.call.site or own.site
                call = replace(
                    added.call,
                    seq=own.seq,
                    stream=own.stream,
                    site=site,
                    innermost_range=own.innermost_range,
                )
                yield call, accesses

    def grade(self, number: int) -> Grade:
        """Return the precision of a node; a node without any recorded access counts as assumed."""
        accesses = self._accesses(number)
        worst = max((row[_KNOWN] for row in accesses), default=ASSUMED)
        if number not in self.exact and (number in self.lost or worst >= ASSUMED):
            return Grade.ASSUMED
        return Grade.WHOLE_TENSOR if accesses and worst == SUMMARY else Grade.EXACT

    def _accesses(self, number: int) -> list[AccessRow]:
        """List the accesses of a node: recorded ones and, unless exact, those from its parameters."""
        recorded = self.accesses.get(number, [])
        return recorded if number in self.exact else self.graph.node(number).accesses + recorded


UNKNOWN_GRAPH = "launch of a graph whose nodes were not recorded"


class GraphTracker:
    """All graphs, and the last launch of each executable, whose launches never overlap."""

    def __init__(
        self, order: StreamOrder, shadow: Shadow, coverage: Coverage, gaps: Counter[str]
    ) -> None:
        self._order = order
        self._shadow = shadow
        self._coverage = coverage
        self._gaps = gaps
        self._graphs: dict[int, Graph] = {}
        self._last: dict[int, tuple[Release, Call]] = {}  # by executable
        self._node_graph = Graph()  # the graph of the last added node
        self.launched: GraphLaunch | None = None  # the launch whose accesses are being collected

    def add_node(self, call: Call, graph: int, node: int, work: int) -> None:
        call.graph = graph
        self._node_graph = self._graph(graph)
        self._node_graph.add(call, node, work)

    def add_edge(self, _: Call, graph: int, before: int, after: int) -> None:
        self._graph(graph).order(before, after)

    def node_accesses(self, rows: Iterable[AccessRow]) -> None:
        """Add accesses of the last added nodes, which they perform in each launch."""
        for row in rows:
            self._node_graph.add_access(row)

    def launch(self, call: Call, graph: int, executable: int) -> None:
        """Enqueue a graph as one operation, with a tick of its own for all its nodes."""
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
        """Add accesses of nodes in the last launch."""
        for row in rows:
            if self.launched is not None:
                self.launched.accesses.setdefault(row[-1], []).append(row)

    def accessed(self, call: Call, node: int, exact: bool) -> None:
        """Mark a node of the last launch as exact, or as one with lost accesses."""
        if self.launched is not None and self.launched.call.seq == call.seq:
            (self.launched.exact if exact else self.launched.lost).add(node)

    def finish(self) -> None:
        """Check the accesses of the last launch, now that all of them are collected."""
        launched, self.launched = self.launched, None
        if launched is None:
            return
        for kernel in launched.graph.kernels:
            self._coverage.count(launched.grade(kernel))
        self._shadow.checker.ancestors = launched.graph.ancestors
        for call, accesses in launched.work():
            self._shadow.add_all(accesses, call, launched)

    def prune(self) -> None:
        """Remove the launches that all future work happens after."""
        known = self._order.precedes_future
        self._last = {
            executable: (release, call)
            for executable, (release, call) in self._last.items()
            if not known(release.slot, release.tick)
        }

    def _graph(self, number: int) -> Graph:
        return self._graphs.setdefault(number, Graph())
