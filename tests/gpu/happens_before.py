"""A brute-force reference for the happens-before order of a trace, from CUDA's rules.

Every operation stores the set of all earlier operations: slow, but simple.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from cudakit.trace.events import (
    Access,
    Alloc,
    ContextSync,
    Copy,
    Event,
    EventQueryOk,
    EventRecord,
    EventSync,
    Fill,
    Free,
    GraphEdge,
    GraphLaunch,
    GraphNode,
    HostCall,
    Launch,
    StreamCreate,
    StreamQueryOk,
    StreamSync,
    StreamWait,
)
from cudakit.trace.kinds import AccessMode, AllocationKind, HostCallPhase, StreamFlag

OperationNumbers = frozenset[int]
NO_OPERATIONS: OperationNumbers = frozenset()


@dataclass(eq=False)
class Operation:
    """A memory operation of a trace."""

    number: int
    predecessors: OperationNumbers
    event: Event
    stream: int
    node: int
    accesses: list[Access] = field(default_factory=list)


class Race(NamedTuple):
    """Two conflicting operations without an order, in enqueue order."""

    first: Event
    second: Event


class Order:
    """The happens-before order of a trace."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._flags: dict[int, StreamFlag] = {}
        self._streams: defaultdict[int, OperationNumbers] = defaultdict(frozenset)
        self._events: dict[int, OperationNumbers] = {}
        self._host: OperationNumbers = NO_OPERATIONS
        self._nodes: defaultdict[int, dict[int, list[Access]]] = defaultdict(dict)
        self._edges: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self._executables: defaultdict[int, OperationNumbers] = defaultdict(frozenset)
        self._of_call: dict[tuple[int, int], list[Access]] = {}

    def feed(self, event: Event) -> None:
        match event.body:
            case StreamCreate(stream, flag):
                self._flags[stream] = flag
            case Free(allocation_kind=AllocationKind.SYNC | AllocationKind.PINNED) | ContextSync():
                self._host |= frozenset(operation.number for operation in self.operations)
            case EventRecord(number, stream):
                self._events[number] = self._streams[stream] = self._preceding(stream)
            case StreamWait(stream, number):
                self._streams[stream] = self._preceding(stream) | self._events.get(
                    number, NO_OPERATIONS
                )
            case EventSync(number) | EventQueryOk(number):
                self._host |= self._events.get(number, NO_OPERATIONS)
            case StreamSync(stream) | StreamQueryOk(stream):
                legacy = self._flags[stream] is StreamFlag.LEGACY
                self._host |= self._preceding(stream) if legacy else self._streams[stream]
            case HostCall(phase=HostCallPhase.BEGIN, event=number):
                self._host |= self._events.get(number, NO_OPERATIONS)
            case _:
                self._feed_work(event)

    def _feed_work(self, event: Event) -> None:
        match event.body:
            case Launch(stream):
                self._operate(event, stream, [])
            case Copy(stream, destination, source, size_bytes):
                read = Access(source, source + size_bytes, AccessMode.READ)
                written = Access(destination, destination + size_bytes, AccessMode.WRITE)
                self._operate(event, stream, [read, written])
            case Fill(stream, address, size_bytes):
                self._operate(
                    event, stream, [Access(address, address + size_bytes, AccessMode.WRITE)]
                )
            case Alloc(address, size_bytes, AllocationKind.STREAM_ORDERED, stream) | Free(
                address, size_bytes, AllocationKind.STREAM_ORDERED, stream
            ):
                self._operate(
                    event, stream, [Access(address, address + size_bytes, AccessMode.WRITE)]
                )
            case _:
                self._feed_graphs(event)

    def _feed_graphs(self, event: Event) -> None:
        match event.body:
            case GraphNode(graph, node):
                self._nodes[graph][node] = self._of_call[event.seq, node] = []
            case GraphEdge(graph, before, after):
                self._edges[graph].append((before, after))
            case GraphLaunch(stream, graph, executable):
                self._launch(event, stream, graph, executable)
            case Access(node=node) as access:
                self._of_call[event.seq, node].append(access)

    def races(self) -> Iterator[Race]:
        for first, second in combinations(self.operations, 2):
            ordered = first.number in second.predecessors or second.number in first.predecessors
            if not ordered and _conflict(first.accesses, second.accesses):
                yield Race(first.event, second.event)

    def _operate(self, event: Event, stream: int, accesses: list[Access]) -> None:
        predecessors = self._preceding(stream)
        operation = self._new(event, predecessors, accesses, stream)
        self._of_call[event.seq, 0] = operation.accesses
        self._streams[stream] = predecessors | {operation.number}

    def _launch(self, event: Event, stream: int, graph: int, executable: int) -> None:
        begin = self._preceding(stream) | self._executables[executable]
        operations: dict[int, Operation] = {}
        for node, template in self._nodes[graph].items():
            predecessors = begin
            for predecessor, successor in self._edges[graph]:
                if successor == node:
                    predecessors |= operations[predecessor].predecessors | {
                        operations[predecessor].number
                    }
            operations[node] = self._new(event, predecessors, list(template), stream, node)
            self._of_call[event.seq, node] = operations[node].accesses
        completed = begin | {operation.number for operation in operations.values()}
        self._streams[stream] = self._executables[executable] = completed

    def _new(
        self,
        event: Event,
        predecessors: OperationNumbers,
        accesses: list[Access],
        stream: int,
        node: int = 0,
    ) -> Operation:
        operation = Operation(len(self.operations), predecessors, event, stream, node, accesses)
        self.operations.append(operation)
        return operation

    def _preceding(self, stream: int) -> OperationNumbers:
        """Return all operations that precede new work in a stream."""
        predecessors = self._streams[stream] | self._host
        flag = self._flags[stream]
        if flag is StreamFlag.LEGACY:
            return predecessors.union(*(self._streams[stream] for stream in self._blocking()))
        if flag is StreamFlag.NON_BLOCKING:
            return predecessors
        return predecessors.union(
            *(
                self._streams[stream]
                for stream, flag in self._flags.items()
                if flag is StreamFlag.LEGACY
            )
        )

    def _blocking(self) -> list[int]:
        kinds = (StreamFlag.BLOCKING, StreamFlag.PER_THREAD)
        return [stream for stream, flag in self._flags.items() if flag in kinds]


def races(trace: Iterable[Event]) -> list[Race]:
    order = Order()
    for event in trace:
        order.feed(event)
    return list(order.races())


def _conflict(first_accesses: list[Access], second_accesses: list[Access]) -> bool:
    return any(
        first_access.lo < second_access.hi
        and second_access.lo < first_access.hi
        and (first_access.mode | second_access.mode) & AccessMode.WRITE
        for first_access in first_accesses
        for second_access in second_accesses
    )
