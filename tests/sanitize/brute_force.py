"""Find the unordered pairs of a recorded trace by brute force.

``gpu.happens_before`` implements the ordering rules only. This module translates the trace of a real program
into its terms: copies become accesses with host waits around them, captured work runs only as a graph, and
memory words, contexts and reused memory become events and waits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
from gpu.happens_before import Operation, Order

from cudakit.sanitize.engine import host_role, host_waits_for_fill
from cudakit.sanitize.shadow import strided_range
from cudakit.trace.events import (
    Access,
    Accessed,
    Alloc,
    CaptureBegin,
    CaptureEnd,
    ContextSync,
    Copy,
    Event,
    EventBody,
    EventQueryOk,
    EventRecord,
    EventSync,
    Fill,
    Free,
    Gap,
    GraphEdge,
    GraphLaunch,
    GraphNode,
    HostCall,
    Launch,
    Memop,
    StreamCreate,
    StreamQueryOk,
    StreamSync,
    StreamWait,
)
from cudakit.trace.kinds import (
    AccessMode,
    AllocationKind,
    EventKind,
    HostCallPhase,
    MemopType,
    Precision,
    StreamFlag,
)
from cudakit.trace.trace_file import RECORD, Records, concatenate_records

# Events that ``Order`` handles without translation.
_UNTRANSLATED = (
    *(Launch, GraphEdge),
    *(EventRecord, StreamWait, EventSync, EventQueryOk, StreamSync, StreamQueryOk),
)
# Event numbers that no trace uses.
_FIRST_NEW_EVENT = 1 << 24
_MAX_ROWS = 1 << 16
_ASSUMED = "an access that is not known exactly"


class Pair(NamedTuple):
    """Two unordered operations that access the same bytes, at least one of them writing."""

    earlier: Operation
    later: Operation


@dataclass(slots=True)
class UnorderedPairs:
    """The unordered pairs, and the reasons why the list may be wrong."""

    pairs: list[Pair]
    uncertainties: Counter[str]


def unordered_accesses(trace: Iterable[Event]) -> UnorderedPairs:
    """Find the pairs in the trace of one process, whose records are sorted by call (``reorder_records``)."""
    order, translator = Order(), _Translator()
    nodes: defaultdict[int, set[int]] = defaultdict(set)  # nodes of each graph
    # The calls and graph nodes that can have accesses.
    nodes_with_accesses: set[tuple[int, int]] = set()
    for event in chain.from_iterable(map(translator.translate, trace)):
        match event.body:
            case Access(node=node) if (event.seq, node) not in nodes_with_accesses:
                translator.uncertainties["an access without its launch"] += 1
                continue
            case GraphNode(graph, node):
                nodes[graph].add(node)
                nodes_with_accesses.add((event.seq, node))
            case GraphLaunch(graph=graph):
                nodes_with_accesses |= {(event.seq, node) for node in nodes[graph]}
            case Launch():
                nodes_with_accesses.add((event.seq, 0))
        order.feed(event)
    translator.end()
    return UnorderedPairs(_pairs(order.operations), translator.uncertainties)


def with_graph_rows(records: Records, graph_rows: Mapping[int, bytes]) -> Records:
    """Insert the accesses of graph launches with a template, which ``TemplateAccesses`` does not insert."""
    parts: list[Records] = []
    begin = 0
    for index in np.flatnonzero(records["kind"] == EventKind.GRAPH_LAUNCH).tolist():
        accesses = np.frombuffer(graph_rows.get(int(records["seq"][index]), b""), RECORD).copy()
        for name in ("seq", "thread", "stream", "context", "site"):
            accesses[name] = records[name][index]
        parts += [records[begin : index + 1], accesses]
        begin = index + 1
    return concatenate_records([*parts, records[begin:]])


@dataclass(slots=True)
class _Translator:
    """Translates the events of a trace into events that ``Order`` handles."""

    uncertainties: Counter[str] = field(default_factory=Counter)
    _flags: dict[int, StreamFlag] = field(default_factory=dict)
    _streams: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    _capturing: dict[int, int] = field(default_factory=dict)  # graph of each capturing stream
    _captured: dict[int, int] = field(default_factory=dict)  # graph of each captured event
    _skipped: set[int] = field(default_factory=set)  # numbers of the captured calls
    _allocations: dict[int, Alloc] = field(default_factory=dict)
    _events_of_word: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    # The first address, the end and the event of each stream-ordered free.
    _freed_ranges: list[tuple[int, int, int]] = field(default_factory=list)
    _assumed: Counter[tuple[int, int]] = field(default_factory=Counter)  # count by graph and node
    _graphs: dict[int, int] = field(
        default_factory=dict
    )  # the graph of each call that added a node
    _last_graph_launch: tuple[int, int] = (
        0,
        0,
    )  # number of the last graph launch, and of its graph
    _complete_nodes: set[int] = field(
        default_factory=set
    )  # nodes of the last graph launch whose accesses are complete
    _events: int = _FIRST_NEW_EVENT

    def translate(self, event: Event) -> Iterator[Event]:
        """Yield the events for ``Order`` that replace an event of the trace."""
        body = event.body
        stream = int(getattr(body, "stream", 0))
        if isinstance(body, StreamCreate):
            yield from self._create(event, stream, body.flag)
            return
        if stream and stream not in self._flags:
            self.uncertainties["a stream that was not seen to be made"] += 1
            yield from self._create(event, stream, StreamFlag.BLOCKING)
        bodies = self._captures(event, stream)
        for translated_event in self._bodies(event) if bodies is None else bodies:
            yield replace(event, body=translated_event)

    def _create(self, event: Event, stream: int, flag: StreamFlag) -> Iterator[Event]:
        if stream not in self._flags:
            self._flags[stream] = flag
            self._streams[event.context].append(stream)
            blocking = [
                known_flag
                for known_flag in self._flags.values()
                if known_flag is not StreamFlag.NON_BLOCKING
            ]
            if len(self._streams) > 1 and len(blocking) > 1:
                self.uncertainties["default streams of several contexts"] += 1
            yield replace(event, body=StreamCreate(stream, flag))

    def _captures(self, event: Event, stream: int) -> Sequence[EventBody] | None:
        """Handle an event of a capture; return None for other events."""
        match event.body:
            case HostCall():  # the function was enqueued before the capture, and runs outside of it
                return None
            case CaptureBegin(graph):
                self._capturing[stream] = graph
            case CaptureEnd(graph):
                for graph_by_number in (self._capturing, self._captured):
                    for number in [key for key, value in graph_by_number.items() if value == graph]:
                        del graph_by_number[number]
            case StreamWait(event=awaited) if awaited in self._captured:
                self._capturing[stream] = self._captured[awaited]
            case EventRecord(recorded) if stream in self._capturing:
                self._captured[recorded] = self._capturing[stream]
            case Access() if event.seq in self._skipped:
                pass
            case _ if stream in self._capturing:
                self._skipped.add(event.seq)
            case _:
                return None
        return ()

    def end(self) -> None:
        """Count the assumed accesses of the nodes of the last graph launch."""
        _, graph = self._last_graph_launch
        for (node_graph, node), count in self._assumed.items():
            if node_graph == graph and node not in self._complete_nodes:
                self.uncertainties[_ASSUMED] += count
        self._last_graph_launch, self._complete_nodes = (0, 0), set()

    def _bodies(self, event: Event) -> Iterator[EventBody]:
        match event.body:
            case Access() as access:
                yield from self._translate_access(event, access)
            case Copy() as copy:
                yield from self._translate_copy(copy)
            case Fill() as fill:
                yield from self._translate_fill(fill)
            case Alloc() | Free() as memory:
                yield from self._translate_memory(memory)
            case Memop() as memop:
                yield from self._translate_memop(memop)
            case Gap(what, count):
                self.uncertainties[what] += count
            case ContextSync():
                yield from (StreamSync(stream) for stream in self._streams[event.context])
            case HostCall(stream, phase, event_before):
                self.uncertainties["a function of the host in a stream"] += 1
                if phase is HostCallPhase.BEGIN:
                    yield EventSync(event_before) if event_before else StreamSync(stream)
            case _:
                yield from self._translate_graph_event(event)

    def _translate_graph_event(self, event: Event) -> Iterator[EventBody]:
        match event.body:
            case GraphNode(graph, node) as node_event:
                self._graphs[event.seq] = graph
                # A changed node replaces the earlier node of the same number.
                del self._assumed[graph, node]
                yield node_event
            case GraphLaunch(graph=graph) as launch:
                self.end()
                self._last_graph_launch = event.seq, graph
                yield launch
            case Accessed(node, True) if event.seq == self._last_graph_launch[0]:
                self._complete_nodes.add(node)
            case body if isinstance(body, _UNTRANSLATED):
                yield body

    def _translate_access(self, event: Event, access: Access) -> Iterator[EventBody]:
        if access.precision >= Precision.ASSUMED and event.seq in self._graphs:
            self._assumed[self._graphs[event.seq], access.node] += 1
        elif access.precision is not Precision.EXACT:
            self.uncertainties[_ASSUMED] += 1
        elif access.count > _MAX_ROWS:
            self.uncertainties["an access with more rows than brute force has time for"] += 1
        else:
            yield access

    def _translate_copy(self, copy: Copy) -> Iterator[EventBody]:
        role = host_role(copy.direction, copy.host, asynchronous=copy.asynchronous, strict=False)
        if role.waits_before:
            yield StreamSync(copy.stream)
        yield Launch(copy.stream, "copy")
        size, rows = copy.size_bytes, copy.rows
        if not role.reads_source:
            yield _rows(copy.source, size, rows, copy.source_pitch_bytes, AccessMode.READ)
        if not role.writes_destination:
            yield _rows(
                copy.destination, size, rows, copy.destination_pitch_bytes, AccessMode.WRITE
            )
        if role.waits_after:
            yield StreamSync(copy.stream)

    def _translate_fill(self, fill: Fill) -> Iterator[EventBody]:
        yield Launch(fill.stream, "fill")
        yield _rows(fill.address, fill.size_bytes, fill.rows, fill.pitch_bytes, AccessMode.WRITE)
        allocation = next(
            (a for a in self._allocations.values() if 0 <= fill.address - a.address < a.size_bytes),
            None,
        )
        if host_waits_for_fill(
            allocation.allocation_kind if allocation else None, asynchronous=fill.asynchronous
        ):
            yield StreamSync(fill.stream)

    def _translate_memory(self, memory: Alloc | Free) -> Iterator[EventBody]:
        """Order a reallocation after the free of the same memory."""
        lo = memory.address
        if isinstance(memory, Alloc):
            self._allocations[lo] = memory
            if memory.allocation_kind is AllocationKind.STREAM_ORDERED:
                for begin, end, event in self._freed_ranges:
                    if begin < lo + memory.size_bytes and lo < end:
                        yield StreamWait(memory.stream, event)
                yield memory
            return
        allocation = self._allocations.pop(lo, None)
        size = memory.size_bytes or (allocation.size_bytes if allocation else 0)
        if memory.allocation_kind is AllocationKind.STREAM_ORDERED:
            self._events += 1
            self._freed_ranges.append((lo, lo + size, self._events))
            yield replace(memory, size_bytes=size)
            yield EventRecord(self._events, memory.stream)
        elif memory.allocation_kind in (
            AllocationKind.SYNC,
            AllocationKind.PINNED,
            AllocationKind.MANAGED,
        ):
            yield Free(lo, size)
        else:
            self.uncertainties["memory that is mapped anew"] += 1

    def _translate_memop(self, memop: Memop) -> Iterator[EventBody]:
        if memop.flag is MemopType.WRITE:
            self._events += 1
            self._events_of_word[memop.address].append(self._events)
            yield EventRecord(self._events, memop.stream)
        elif memop.address in self._events_of_word:
            yield from (StreamWait(memop.stream, e) for e in self._events_of_word[memop.address])
        else:
            self.uncertainties["a wait for a word that nothing in the trace wrote"] += 1


def _rows(lo: int, width: int, rows: int, pitch: int, mode: AccessMode) -> Access:
    return Access(lo, lo + (rows - 1) * pitch + width, mode, stride_bytes=pitch, count=rows)


def _pairs(operations: Sequence[Operation]) -> list[Pair]:
    """Find the unordered pairs that share bytes, in a sweep over the addresses."""
    pairs_by_number: dict[tuple[int, int], Pair] = {}
    active: list[tuple[int, int, AccessMode, Operation]] = []
    for lo, hi, mode, operation in sorted(
        _access_ranges(operations), key=lambda access_range: access_range[:2]
    ):
        active = [access_range for access_range in active if access_range[1] > lo]
        for _, _, active_mode, active_operation in active:
            earlier_operation, later_operation = sorted(
                (active_operation, operation), key=lambda operation: operation.number
            )
            numbers = earlier_operation.number, later_operation.number
            if (
                numbers not in pairs_by_number
                and _modes_conflict(mode, active_mode)
                and _is_unordered(earlier_operation, later_operation)
            ):
                pairs_by_number[numbers] = Pair(earlier_operation, later_operation)
        active.append((lo, hi, mode, operation))
    return list(pairs_by_number.values())


def _access_ranges(
    operations: Iterable[Operation],
) -> Iterator[tuple[int, int, AccessMode, Operation]]:
    for operation in operations:
        for access in operation.accesses:
            rows = strided_range(access.lo, access.hi, access.stride_bytes, max(access.count, 1))
            for lo, hi in rows.row_ranges():
                yield lo, hi, access.mode, operation


def _modes_conflict(earlier: AccessMode, later: AccessMode) -> bool:
    return bool((earlier | later) & AccessMode.WRITE) and not earlier & later & AccessMode.ATOMIC


def _is_unordered(earlier_operation: Operation, later_operation: Operation) -> bool:
    return (
        earlier_operation is not later_operation
        and earlier_operation.number not in later_operation.predecessors
        and later_operation.number not in earlier_operation.predecessors
    )
