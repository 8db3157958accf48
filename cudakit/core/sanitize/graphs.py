"""Handle CUDA graphs: the accesses of their nodes, the order of the nodes, and graph launches.

A graph launch is one operation of its stream: all nodes have the same tick, and the edges of the graph order
the nodes. Rules: CUDA C++ Programming Guide, "CUDA Graphs".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter

from cudakit.core.sanitize.clocks import ASSUMED, SUMMARY, Call, Clock, Release
from cudakit.core.sanitize.ordering import StreamOrder
from cudakit.core.sanitize.races import Coverage, LaunchPrecision, Sync, SyncKind
from cudakit.core.sanitize.record_batch import AccessRows, least_precise_access, rows_by_node
from cudakit.core.sanitize.shadow_memory import Shadow
from cudakit.trace.kinds import EventKind, NodeType

_EVENT_KINDS = {
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
    """A node of a graph."""

    call: Call  # the call that added the node
    accesses: bytes = b""  # records of the accesses that the node performs in each launch
    # The collectives of NCCL that the kernel performs, each with its accesses. Such a node has no
    # other accesses.
    collectives: list[tuple[Call, bytes]] = field(default_factory=list)


class Graph:
    """The nodes of a graph and their order."""

    def __init__(self) -> None:
        self._nodes: dict[int, Node] = {}
        self._predecessors: dict[int, list[int]] = {}
        self._ancestors: dict[int, int] | None = None  # computed when first needed

    def add_node(self, call: Call, node: int, node_type: int) -> None:
        """Add a node, which replaces a node with the same number."""
        call.kind = _EVENT_KINDS.get(NodeType(node_type), EventKind.GRAPH_LAUNCH)
        call.node = node
        if node not in self._nodes:
            self._ancestors = None
        self._nodes[node] = Node(call)

    def add_edge(self, predecessor: int, successor: int) -> None:
        """Order the node ``successor`` after the node ``predecessor``."""
        self._predecessors.setdefault(successor, []).append(predecessor)
        self._ancestors = None

    def add_accesses(self, rows: AccessRows) -> None:
        """Add accesses that nodes perform in each launch."""
        for node, access_records in rows_by_node(rows):
            if node in self._nodes:
                self._nodes[node].accesses += access_records

    def add_collective(self, call: Call, rows: bytes) -> None:
        """Add a collective that a kernel node performs in each launch."""
        if call.node in self._nodes:
            self._nodes[call.node].collectives.append((call, rows))

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def ancestors(self) -> Mapping[int, int]:
        """For each node, in topological order, a bit mask of the nodes that happen before it."""
        if self._ancestors is None:
            self._ancestors = {}
            for node in self._topological_order():
                ancestor_bits = 0
                for predecessor in self._predecessors.get(node, ()):
                    ancestor_bits |= self._ancestors.get(predecessor, 0) | 1 << predecessor
                self._ancestors[node] = ancestor_bits
        return self._ancestors

    def node(self, node_number: int) -> Node:
        return self._nodes[node_number]

    @property
    def kernel_nodes(self) -> Iterator[int]:
        """The numbers of the kernel nodes."""
        return (
            node_number
            for node_number, node in self._nodes.items()
            if node.call.kind == EventKind.LAUNCH
        )

    def _topological_order(self) -> list[int]:
        """List the nodes in topological order: in order of their numbers if no edge contradicts that."""
        if all(
            predecessor < node
            for node, predecessors in self._predecessors.items()
            for predecessor in predecessors
        ):
            return sorted(self._nodes)
        try:
            sorted_nodes = TopologicalSorter(self._predecessors).static_order()
            all_nodes = dict.fromkeys([*sorted_nodes, *self._nodes])
        except CycleError:  # the trace is damaged: CUDA accepts no graph with a cycle
            return sorted(self._nodes)
        return [node for node in all_nodes if node in self._nodes]


@dataclass(slots=True)
class GraphLaunch:
    """A graph launch whose accesses are being collected."""

    call: Call
    graph: Graph
    slot: int
    tick: int
    clock: Clock
    accesses_by_node: dict[int, bytes] = field(default_factory=dict)  # recorded accesses by node
    exact_nodes: set[int] = field(default_factory=set)  # nodes whose accesses were all recorded
    lost_nodes: set[int] = field(default_factory=set)  # nodes of which some accesses were lost

    def node_accesses(self) -> Iterator[tuple[Call, AccessRows]]:
        """Yield the call and the accesses of each node that has accesses, in topological order."""
        launch = self.call
        for node_number in self.graph.ancestors:
            node = self.graph.node(node_number)
            for node_call, access_records in (
                *node.collectives,
                (node.call, self._accesses(node_number)),
            ):
                if access_records:
                    call = replace(
                        node_call,
                        seq=launch.seq,
                        stream=launch.stream,
                        site=node_call.site or launch.site,
                        program_call=launch.program_call,
                        capturing_call=node_call.program_call,
                        innermost_range=launch.innermost_range,
                    )
                    yield call, memoryview(access_records)

    def launch_precision(self, node_number: int) -> LaunchPrecision:
        """Return the precision of a node; a node without any recorded access counts as assumed."""
        if self.graph.node(node_number).collectives:
            return LaunchPrecision.EXACT
        access_records = self._accesses(node_number)
        least_precise_value = least_precise_access(access_records) if access_records else ASSUMED
        if node_number not in self.exact_nodes and (
            node_number in self.lost_nodes or least_precise_value >= ASSUMED
        ):
            return LaunchPrecision.ASSUMED
        return (
            LaunchPrecision.WHOLE_TENSOR
            if access_records and least_precise_value == SUMMARY
            else LaunchPrecision.EXACT
        )

    def _accesses(self, node_number: int) -> bytes:
        """Return the accesses of a node: the recorded ones and, unless they are exact, the assumed ones."""
        recorded_accesses = self.accesses_by_node.get(node_number, b"")
        return (
            recorded_accesses
            if node_number in self.exact_nodes
            else self.graph.node(node_number).accesses + recorded_accesses
        )


UNKNOWN_GRAPH = "launch of a graph whose nodes were not recorded"


class GraphTracker:
    """Handles all graphs and their launches. Launches of one executable graph never overlap."""

    def __init__(
        self,
        stream_order: StreamOrder,
        shadow: Shadow,
        coverage: Coverage,
        gap_counts: Counter[str],
    ) -> None:
        self._stream_order = stream_order
        self._shadow = shadow
        self._coverage = coverage
        self._gap_counts = gap_counts
        self._graphs: dict[int, Graph] = {}
        self._last_launches: dict[
            int, tuple[Release, Call]
        ] = {}  # the last launch of each executable graph
        self._last_graph = Graph()  # graph to which a node was added last
        # The launch whose accesses are being collected; None after ``finish_launch``.
        self.current_launch: GraphLaunch | None = None

    def add_node(self, call: Call, graph: int, node: int, node_type: int) -> None:
        call.graph = graph
        self._last_graph = self._graph(graph)
        self._last_graph.add_node(call, node, node_type)

    def add_collective(self, call: Call, rows: bytes) -> None:
        """Add a collective that a node performs in each launch of its graph."""
        self._graph(call.graph).add_collective(call, rows)

    def add_edge(self, _: Call, graph: int, predecessor: int, successor: int) -> None:
        self._graph(graph).add_edge(predecessor, successor)

    def add_node_accesses(self, rows: AccessRows) -> None:
        """Add accesses that nodes of the last graph perform in each launch."""
        self._last_graph.add_accesses(rows)

    def add_launch(self, call: Call, graph: int, executable: int) -> None:
        """Enqueue a graph as one operation, with one new tick for all its nodes."""
        self._coverage.graph_launches += 1
        stream = self._stream_order.enqueue(call)
        if stream is None:
            return
        if executable in self._last_launches:
            release, earlier_call = self._last_launches[executable]
            sync = Sync(SyncKind.EVENT, earlier_call.seq, earlier_call.site, call.seq, call.site)
            stream.acquire(release, sync)
        if not self._graph(graph):
            self._gap_counts[UNKNOWN_GRAPH] += 1
        call.graph = graph
        stream.release()
        clock = stream.clock.copy()
        clock[stream.slot] = stream.tick - 1
        self.current_launch = GraphLaunch(call, self._graph(graph), stream.slot, stream.tick, clock)
        self._stream_order.enqueue(call)
        self._last_launches[executable] = stream.release(), call

    def add_launch_accesses(self, rows: AccessRows) -> None:
        """Add accesses that nodes performed in the current launch."""
        if self.current_launch is not None:
            recorded_accesses = self.current_launch.accesses_by_node
            for node, access_records in rows_by_node(rows):
                recorded_accesses[node] = recorded_accesses.get(node, b"") + access_records

    def mark_accessed(self, call: Call, node: int, is_exact: bool) -> None:
        """Record whether all accesses of a node in the current launch are exact, or some were lost."""
        if self.current_launch is not None and self.current_launch.call.seq == call.seq:
            (self.current_launch.exact_nodes if is_exact else self.current_launch.lost_nodes).add(
                node
            )

    def finish_launch(self) -> None:
        """Check the accesses of the current launch, after all of them were collected."""
        graph_launch, self.current_launch = self.current_launch, None
        if graph_launch is None:
            return
        for kernel_node in graph_launch.graph.kernel_nodes:
            self._coverage.count(graph_launch.launch_precision(kernel_node))
        self._shadow.checker.ancestors = graph_launch.graph.ancestors
        for call, accesses in graph_launch.node_accesses():
            self._shadow.add_all(accesses, call, graph_launch)

    def prune(self) -> None:
        """Remove the launches that all future work happens after."""
        self._last_launches = {
            executable: (release, call)
            for executable, (release, call) in self._last_launches.items()
            if not self._stream_order.precedes_future_work(release.slot, release.tick)
        }

    def _graph(self, graph_number: int) -> Graph:
        return self._graphs.setdefault(graph_number, Graph())
