"""Generate random traces of streams, events, waits, graphs and exact accesses to a few bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from hypothesis import strategies as st

from cudakit.trace.events import (
    Access,
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
    Launch,
    StreamCreate,
    StreamDestroy,
    StreamQueryOk,
    StreamSync,
    StreamWait,
)
from cudakit.trace.kinds import AccessMode, NodeType, StreamFlag

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
EVENTS = 3
BYTES = 5
READ, WRITE = AccessMode.READ, AccessMode.WRITE
MODES = (READ, READ, WRITE, READ | WRITE)
WORDS = (
    *("kernel", "kernel", "kernel", "kernel", "copy", "fill", "record", "record", "wait", "wait"),
    *("sync stream", "query stream", "sync event", "query event", "sync", "renew"),
    *("graph", "replay"),
)
# Edges of graphs with four nodes.
SHAPES = (
    (),
    ((1, 2), (2, 3), (3, 4)),
    ((1, 2), (1, 3), (2, 4), (3, 4)),
    ((1, 3), (2, 4)),
    ((1, 4),),
)


def steps() -> st.SearchStrategy[list[Step]]:
    number = st.integers(0, 59)
    return st.lists(st.tuples(st.sampled_from(WORDS), number, number, number), max_size=30)


def trace(steps: Sequence[Step], *, one_site: bool = False) -> list[Event]:
    """Return the events of some steps; each call has its own call stack, or all have the same."""
    writer = _Trace(one_site=one_site)
    for step in steps:
        writer.do(*step)
    return writer.events


class _Trace:
    def __init__(self, *, one_site: bool) -> None:
        self.events: list[Event] = []
        self.one_site = one_site
        self.streams: list[int] = []
        self.graphs = 0
        self.seq = 0
        for number, flag in enumerate(FLAGS, 1):
            self.streams.append(number)
            self.call(StreamCreate(number, flag))

    def call(self, *bodies: EventBody) -> None:
        self.seq += 1
        site = 1 if self.one_site else self.seq
        self.events += [
            Event(body, seq=self.seq, context=1, thread=1, site=site) for body in bodies
        ]

    def do(self, word: str, a: int, b: int, c: int) -> None:
        stream, event = self.streams[a % len(FLAGS)], b % EVENTS + 1
        match word:
            case "kernel":
                self.call(Launch(stream, "k"), _access(b, MODES[c % 4]), _access(c, MODES[b % 4]))
            case "copy":
                self.call(Copy(stream, b % BYTES, c % BYTES, 1))
            case "fill":
                self.call(Fill(stream, b % BYTES, 1 + c % (BYTES - b % BYTES)))
            case "record":
                self.call(EventRecord(event, stream))
            case "wait":
                self.call(StreamWait(stream, event))
            case "graph" | "replay":
                self.use_graph(word, stream, b, c)
            case _:
                self.wait(word, stream, event)

    def wait(self, word: str, stream: int, event: int) -> None:
        match word:
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
                index, new = self.streams.index(stream), stream + len(FLAGS)
                self.streams[index] = new
                self.call(StreamCreate(new, FLAGS[index]))

    def use_graph(self, word: str, stream: int, b: int, c: int) -> None:
        if word == "graph":
            self.graphs += 1
            for node in range(1, 5):
                work = NodeType.COPY if (b + node) % 3 else NodeType.LAUNCH
                self.call(GraphNode(self.graphs, node, work), *self.accesses(node, b, c, work))
            for before, after in SHAPES[c % len(SHAPES)]:
                self.call(GraphEdge(self.graphs, before, after))
        if self.graphs:
            graph = b % self.graphs + 1
            bodies = [e.body for e in self.events]
            kernels = [
                body.node
                for body in bodies
                if isinstance(body, GraphNode)
                and body.graph == graph
                and body.work is NodeType.LAUNCH
            ]
            touched = [_access(c + node, MODES[(b + node) % 4], node) for node in kernels]
            self.call(GraphLaunch(stream, graph, executable=graph), *touched)

    def accesses(self, node: int, b: int, c: int, work: NodeType) -> list[Access]:
        if work is NodeType.LAUNCH:
            return []
        return [_access(b // 5 + node * c, MODES[(node + c) % 4], node)]


def _access(number: int, mode: AccessMode, node: int = 0) -> Access:
    lo = number % BYTES
    return Access(lo, lo + 1 + number // BYTES % (BYTES - lo), mode, node=node)
