"""Generate random traces of streams, events, waits, graphs and exact accesses to a few bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from hypothesis import strategies as st

from cudakit.trace.events import (
    Access,
    Accessed,
    ContextSync,
    Copy,
    Event,
    EventBody,
    EventQueryOk,
    EventRecord,
    EventSync,
    Fill,
    GraphEdge,
    GraphLaunch,
    GraphNode,
    HostCall,
    Launch,
    StreamCreate,
    StreamDestroy,
    StreamQueryOk,
    StreamSync,
    StreamWait,
)
from cudakit.trace.kinds import AccessMode, HostCallPhase, NodeType, StreamFlag

# The name of a step, and numbers from which the step takes its parameters.
Step: TypeAlias = tuple[str, int, int, int]

FLAGS = (
    StreamFlag.LEGACY,
    StreamFlag.PER_THREAD,
    StreamFlag.BLOCKING,
    StreamFlag.BLOCKING,
    StreamFlag.NON_BLOCKING,
    StreamFlag.NON_BLOCKING,
)
EVENT_COUNT = 3
BYTE_COUNT = 5
READ, WRITE = AccessMode.READ, AccessMode.WRITE
ACCESS_MODES = (READ, READ, WRITE, READ | WRITE)
STEP_NAMES = (
    *("kernel", "kernel", "kernel", "kernel", "copy", "fill", "record", "record", "wait", "wait"),
    *("sync stream", "query stream", "sync event", "query event", "sync", "renew"),
    *("graph", "replay", "repeat", "change node", "host function", "run function"),
)
# Edges of graphs with four nodes.
GRAPH_EDGES = (
    (),
    ((1, 2), (2, 3), (3, 4)),
    ((1, 2), (1, 3), (2, 4), (3, 4)),
    ((1, 3), (2, 4)),
    ((1, 4),),
)


def steps(
    names: Sequence[str] = STEP_NAMES, *, max_size: int = 30
) -> st.SearchStrategy[list[Step]]:
    number = st.integers(0, 59)
    return st.lists(st.tuples(st.sampled_from(names), number, number, number), max_size=max_size)


def trace(steps: Sequence[Step], *, same_call_site: bool = False) -> list[Event]:
    """Return the events of some steps; each call has its own call stack, or all have the same."""
    builder = _TraceBuilder(same_call_site=same_call_site)
    for step in steps:
        builder.add_step(*step)
    return builder.events


class _TraceBuilder:
    def __init__(self, *, same_call_site: bool) -> None:
        self.events: list[Event] = []
        self.same_call_site = same_call_site
        self.streams: list[int] = []
        # The type of each node of each graph, by the number of the graph and the node.
        self.node_types: dict[int, dict[int, NodeType]] = {}
        self.host_functions: list[EventRecord] = []  # event before each function that has not run
        self.host_function_count = 0
        self.seq = 0
        for number, flag in enumerate(FLAGS, 1):
            self.streams.append(number)
            self.call(StreamCreate(number, flag))

    def call(self, *bodies: EventBody) -> None:
        self.seq += 1
        site = 1 if self.same_call_site else self.seq
        self.events += [
            Event(body, seq=self.seq, context=1, thread=1, site=site) for body in bodies
        ]

    def add_step(self, step_name: str, first: int, second: int, third: int) -> None:
        stream, event = self.streams[first % len(FLAGS)], second % EVENT_COUNT + 1
        match step_name:
            case "kernel":
                self.call(
                    Launch(stream, "k"),
                    _access(second, ACCESS_MODES[third % 4]),
                    _access(third, ACCESS_MODES[second % 4]),
                )
            case "copy":
                self.call(Copy(stream, second % BYTE_COUNT, third % BYTE_COUNT, 1))
            case "fill":
                self.call(
                    Fill(
                        stream, second % BYTE_COUNT, 1 + third % (BYTE_COUNT - second % BYTE_COUNT)
                    )
                )
            case "graph":
                self.add_graph(second, third)
                self.launch_graph(stream, second, third)
            case "replay" if self.node_types:
                self.launch_graph(stream, second, third)
            case "repeat" if self.node_types:
                self.launch_graph(stream, second, 0)
            case "change node" if self.node_types:
                self.add_node(second % len(self.node_types) + 1, third % 4 + 1, first, second)
            case "host function" | "run function":
                self.use_host_function(step_name, stream, second)
            case _:
                self.synchronize(step_name, stream, event)

    def use_host_function(self, step_name: str, stream: int, number: int) -> None:
        """Enqueue a host function, or run the first one of one of the streams that have any."""
        if step_name == "host function":
            self.host_function_count += 1
            self.host_functions.append(EventRecord(EVENT_COUNT + self.host_function_count, stream))
            self.call(self.host_functions[-1])
            return
        streams = sorted({function.stream for function in self.host_functions})
        if not streams:
            return
        stream = streams[number % len(streams)]
        function = next(each for each in self.host_functions if each.stream == stream)
        self.host_functions.remove(function)
        self.call(
            HostCall(stream, HostCallPhase.BEGIN, function.event),
            HostCall(stream, HostCallPhase.END, function.event),
        )

    def synchronize(self, step_name: str, stream: int, event: int) -> None:
        match step_name:
            case "record":
                self.call(EventRecord(event, stream))
            case "wait":
                self.call(StreamWait(stream, event))
            case "sync stream":
                self.call(StreamSync(stream))
            case "query stream":
                self.call(StreamQueryOk(stream))
            case "sync event":
                self.call(EventSync(event))
            case "query event":
                self.call(EventQueryOk(event))
            case "sync":
                self.call(ContextSync())
            case "renew" if stream > 2:
                self.call(StreamDestroy(stream))
                index, new_stream = self.streams.index(stream), stream + len(FLAGS)
                self.streams[index] = new_stream
                self.call(StreamCreate(new_stream, FLAGS[index]))

    def add_graph(self, second: int, third: int) -> None:
        graph = len(self.node_types) + 1
        self.node_types[graph] = {
            node: NodeType.COPY if (second + node) % 3 else NodeType.LAUNCH for node in range(1, 5)
        }
        for node in self.node_types[graph]:
            self.add_node(graph, node, second, third)
        for before, after in GRAPH_EDGES[third % len(GRAPH_EDGES)]:
            self.call(GraphEdge(graph, before, after))

    def add_node(self, graph: int, node: int, second: int, third: int) -> None:
        """Add a node, or change the accesses of a node of this graph."""
        node_type = self.node_types[graph][node]
        self.call(
            GraphNode(graph, node, node_type),
            *self.accesses(node, second, third, node_type),
        )

    def launch_graph(self, stream: int, second: int, third: int) -> None:
        graph = second % len(self.node_types) + 1
        kernels = [
            node
            for node, node_type in self.node_types[graph].items()
            if node_type is NodeType.LAUNCH
        ]
        accesses = [
            _access(third + node, ACCESS_MODES[(second + node) % 4], node) for node in kernels
        ]
        recorded = [Accessed(node) for node in kernels if third % 3]
        self.call(GraphLaunch(stream, graph, executable=graph), *accesses, *recorded)

    def accesses(self, node: int, second: int, third: int, node_type: NodeType) -> list[Access]:
        if node_type is NodeType.LAUNCH:
            return []
        return [_access(second // 5 + node * third, ACCESS_MODES[(node + third) % 4], node)]


def _access(number: int, mode: AccessMode, node: int = 0) -> Access:
    lo = number % BYTE_COUNT
    return Access(lo, lo + 1 + number // BYTE_COUNT % (BYTE_COUNT - lo), mode, node=node)
