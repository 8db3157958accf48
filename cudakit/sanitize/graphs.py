"""Handle CUDA graphs: the accesses of their nodes, the order of the nodes, and graph launches.

A graph launch is one operation of its stream: all nodes have the same tick, and the edges of the graph order
the nodes. Rules: CUDA C++ Programming Guide, "CUDA Graphs".
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from cudakit.sanitize.conflicts import GraphAccesses, NodeAccesses, NodeOrder
from cudakit.sanitize.ordering import ASSUMED, SUMMARY, Call, Release, StreamOrder
from cudakit.sanitize.races import Coverage, LaunchPrecision, Sync, SyncKind
from cudakit.sanitize.records import (
    AccessRows,
    exact_and_lost_nodes,
    least_precise_access,
    rows_by_node,
    without_common_fields,
)
from cudakit.sanitize.templates import CheckedShadow
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
        self.version = 0  # number of changes
        self._nodes: dict[int, Node] = {}
        self._predecessors: dict[int, list[int]] = {}
        self._order: NodeOrder | None = None  # computed when first needed

    def add_node(self, call: Call, node: int, node_type: int) -> None:
        """Add a node, which replaces a node with the same number."""
        call.kind = _EVENT_KINDS.get(NodeType(node_type), EventKind.GRAPH_LAUNCH)
        call.node = node
        if node not in self._nodes:
            self._order = None
        self._nodes[node] = Node(call)
        self.version += 1

    def add_edge(self, predecessor: int, successor: int) -> None:
        """Order the node ``successor`` after the node ``predecessor``."""
        self._predecessors.setdefault(successor, []).append(predecessor)
        self._order = None
        self.version += 1

    def add_accesses(self, rows: AccessRows) -> None:
        """Add accesses that nodes perform in each launch."""
        for node, access_records in rows_by_node(rows):
            if node in self._nodes:
                self._nodes[node].accesses += access_records
        self.version += 1

    def add_collective(self, call: Call, rows: bytes) -> None:
        """Add a collective that a kernel node performs in each launch."""
        if call.node in self._nodes:
            self._nodes[call.node].collectives.append((call, rows))
        self.version += 1

    def __len__(self) -> int:
        return len(self._nodes)

    def launch_accesses(self, rows: AccessRows) -> GraphAccesses:
        """Return the accesses of a launch whose recorded accesses are ``rows``."""
        if self._order is None:
            self._order = NodeOrder(self._nodes, self._predecessors)
        recorded_accesses = dict(rows_by_node(rows))
        exact_nodes, lost_nodes = exact_and_lost_nodes(rows)
        accesses_of_nodes: list[NodeAccesses] = []
        kernel_counts: Counter[LaunchPrecision] = Counter()
        for position, node_number in enumerate(self._order.nodes):
            node, is_exact = self._nodes[node_number], node_number in exact_nodes
            access_records = recorded_accesses.get(node_number, b"")
            if not is_exact:
                access_records = node.accesses + access_records
            if node.call.kind == EventKind.LAUNCH:
                # A node without any access counts as assumed.
                least = least_precise_access(access_records) if access_records else ASSUMED
                precision = LaunchPrecision.EXACT
                if not node.collectives:
                    if not is_exact and (node_number in lost_nodes or least >= ASSUMED):
                        precision = LaunchPrecision.ASSUMED
                    elif least == SUMMARY:
                        precision = LaunchPrecision.WHOLE_TENSOR
                kernel_counts[precision] += 1
            accesses_of_nodes += [
                NodeAccesses(call, position, records)
                for call, records in (*node.collectives, (node.call, access_records))
                if records
            ]
        return GraphAccesses(self._order, accesses_of_nodes, sorted(kernel_counts.items()))


@dataclass(slots=True)
class GraphLaunch:
    """A graph launch whose accesses are being collected."""

    call: Call
    graph: int  # number of the graph
    position: Release  # the clock before the launch, and the tick of all its nodes
    # The records of the template of the launch, with 0 in their common fields; None without a template.
    template_rows: bytes | None = None
    # The records of the accesses that nodes performed in this launch.
    rows: list[AccessRows] = field(default_factory=list)

    def all_rows(self) -> bytes:
        """Return the records of the accesses of the launch, with 0 in their common fields."""
        if self.template_rows is not None and not self.rows:
            return self.template_rows
        rows = self.rows[0] if len(self.rows) == 1 else memoryview(b"".join(self.rows))
        return (self.template_rows or b"") + without_common_fields(rows)


# Maximum size in bytes of the accesses that are stored for later launches.
MAX_STORED_BYTES = 16 << 20


class LaunchAccessCache:
    """The accesses of the last graph launches, which later launches share if they have equal records."""

    def __init__(self) -> None:
        self.stored_bytes = 0
        # Accesses by the number of the graph and ``all_rows`` of the launch, least recently used first.
        self._accesses_by_key: dict[tuple[int, bytes], GraphAccesses] = {}
        # The rows in the keys of each graph, and the version of the graph to which the accesses belong.
        self._rows_by_graph: dict[int, set[bytes]] = {}
        self._version_by_graph: dict[int, int] = {}

    def accesses_of(self, launch: GraphLaunch, graph: Graph) -> GraphAccesses:
        """Return the accesses of a launch, after all its records were collected."""
        key = launch.graph, launch.all_rows()
        if self._version_by_graph.get(launch.graph) != graph.version:
            self.forget(launch.graph)
            self._version_by_graph[launch.graph] = graph.version
        accesses = self._accesses_by_key.pop(key, None)
        if accesses is None:
            accesses = graph.launch_accesses(memoryview(key[1]))
            self.stored_bytes += accesses.size_bytes + len(key[1])
            self._rows_by_graph.setdefault(launch.graph, set()).add(key[1])
        self._accesses_by_key[key] = accesses
        while self.stored_bytes > MAX_STORED_BYTES:
            self._remove(next(iter(self._accesses_by_key)))
        return accesses

    def forget(self, graph: int) -> None:
        """Remove the accesses of all launches of a graph."""
        for rows in list(self._rows_by_graph.get(graph, ())):
            self._remove((graph, rows))
        self._rows_by_graph.pop(graph, None)
        self._version_by_graph.pop(graph, None)

    def _remove(self, key: tuple[int, bytes]) -> None:
        graph, rows = key
        self.stored_bytes -= self._accesses_by_key.pop(key).size_bytes + len(rows)
        self._rows_by_graph[graph].remove(rows)


UNKNOWN_GRAPH = "launch of a graph whose nodes were not recorded"


class GraphTracker:
    """Handles all graphs and their launches. Launches of one executable graph never overlap."""

    def __init__(
        self,
        stream_order: StreamOrder,
        shadow: CheckedShadow,
        coverage: Coverage,
        gap_counts: Counter[str],
    ) -> None:
        self._stream_order = stream_order
        self._shadow = shadow
        self._coverage = coverage
        self._gap_counts = gap_counts
        self._graphs: defaultdict[int, Graph] = defaultdict(Graph)
        # The last launch of each executable graph.
        self._last_launches: dict[int, tuple[Release, Call]] = {}
        self._last_graph = Graph()  # graph to which a node was added last
        self._cache = LaunchAccessCache()
        # The records of the accesses of each graph launch with a template, by call.
        self.template_rows: Mapping[int, bytes] = {}
        # The launch whose accesses are being collected; None after ``finish_launch``.
        self.current_launch: GraphLaunch | None = None

    def add_node(self, call: Call, graph: int, node: int, node_type: int) -> None:
        call.graph = graph
        self._last_graph = self._graphs[graph]
        self._last_graph.add_node(call, node, node_type)

    def add_collective(self, call: Call, rows: bytes) -> None:
        """Add a collective that a node performs in each launch of its graph."""
        self._graphs[call.graph].add_collective(call, rows)

    def add_edge(self, _: Call, graph: int, predecessor: int, successor: int) -> None:
        self._graphs[graph].add_edge(predecessor, successor)

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
        if not self._graphs[graph]:
            self._gap_counts[UNKNOWN_GRAPH] += 1
        call.graph = graph
        stream.release()
        clock = stream.clock.copy()
        clock[stream.slot] = stream.tick - 1
        position = Release(stream.slot, stream.tick, clock, stream.tick_syncs)
        template_rows = self.template_rows.get(call.seq)
        self.current_launch = GraphLaunch(call, graph, position, template_rows)
        self._stream_order.enqueue(call)
        self._last_launches[executable] = stream.release(), call

    def add_launch_accesses(self, rows: AccessRows) -> None:
        """Add accesses that nodes performed in the current launch."""
        if self.current_launch is not None:
            self.current_launch.rows.append(rows)

    def finish_launch(self) -> None:
        """Check the accesses of the current launch, after all of them were collected."""
        graph_launch, self.current_launch = self.current_launch, None
        if graph_launch is None:
            return
        accesses = self._cache.accesses_of(graph_launch, self._graphs[graph_launch.graph])
        for launch_precision, kernel_count in accesses.kernel_counts:
            self._coverage.count(launch_precision, kernel_count)
        self._shadow.add_graph_launch(accesses, graph_launch.call, graph_launch.position)

    def forget(self, graph: int, executable: int) -> None:
        """Remove a graph and, unless it is 0, an executable graph, neither of which is launched any more."""
        self._graphs.pop(graph, None)
        self._cache.forget(graph)
        self._last_launches.pop(executable, None)

    def prune(self) -> None:
        """Remove the launches that all future work happens after."""
        self._last_launches = {
            executable: (release, call)
            for executable, (release, call) in self._last_launches.items()
            if not self._stream_order.precedes_future_work(release.slot, release.tick)
        }
