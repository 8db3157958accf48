"""Find the unordered pairs of a recorded trace by brute force.

``gpu.happens_before`` implements the ordering rules only. This module translates the trace of a real program
into its terms: copies become accesses with host waits around them, captured work runs only as a graph, and
memory words, contexts and reused memory become events and waits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from gpu.happens_before import Operation, Order

from cudakit.core.sanitize.operations import host_role, host_waits_for_fill
from cudakit.core.sanitize.strided import strided_range
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
from cudakit.trace.kinds import AccessMode, AllocationKind, MemopType, Precision, StreamFlag

# Events that ``Order`` handles without translation.
_PLAIN = (
    *(Launch, GraphEdge),
    *(EventRecord, StreamWait, EventSync, EventQueryOk, StreamSync, StreamQueryOk),
)
# Event numbers that no trace uses.
_FIRST_OWN_EVENT = 1 << 24
_MOST_ROWS = 1 << 16
_ASSUMED = "an access that is not known exactly"


class Pair(NamedTuple):
    """Two unordered operations that access the same bytes, at least one of them writing."""

    earlier: Operation
    later: Operation


@dataclass(slots=True)
class Found:
    """The unordered pairs, and the reasons why the list may be wrong."""

    pairs: list[Pair]
    doubts: Counter[str]


def unordered_accesses(trace: Iterable[Event]) -> Found:
    """Find the pairs in the trace of one process, whose records are sorted by call (``reordered``)."""
    order, translator = Order(), _Translator()
    nodes: defaultdict[int, set[int]] = defaultdict(set)  # by graph
    touching: set[tuple[int, int]] = set()  # the calls and graph nodes that can have accesses
    for event in (plain for one in trace for plain in translator.translated(one)):
        match event.body:
            case Access(node=node) if (event.seq, node) not in touching:
                translator.doubts["an access without its launch"] += 1
                continue
            case GraphNode(graph, node):
                nodes[graph].add(node)
                touching.add((event.seq, node))
            case GraphLaunch(graph=graph):
                touching |= {(event.seq, node) for node in nodes[graph]}
            case Launch():
                touching.add((event.seq, 0))
        order.feed(event)
    translator.end()
    return Found(_pairs(order.operations), translator.doubts)


@dataclass(slots=True)
class _Translator:
    """Translates the events of a trace into those that ``Order`` handles."""

    doubts: Counter[str] = field(default_factory=Counter)
    _flags: dict[int, StreamFlag] = field(default_factory=dict)
    _streams: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    _capturing: dict[int, int] = field(default_factory=dict)  # stream: graph
    _captured: dict[int, int] = field(default_factory=dict)  # event: graph
    _skipped: set[int] = field(default_factory=set)  # calls that are captured
    _memory: dict[int, Alloc] = field(default_factory=dict)
    _words: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    _freed: list[tuple[int, int, int]] = field(default_factory=list)  # from, up to, event
    _assumed: Counter[tuple[int, int]] = field(default_factory=Counter)  # of nodes, by graph
    _graphs: dict[int, int] = field(default_factory=dict)  # by the call that added a node
    _launched: tuple[int, int] = (0, 0)  # the last graph launch and its graph
    _complete: set[int] = field(default_factory=set)  # its nodes whose accesses are complete
    _events: int = _FIRST_OWN_EVENT

    def translated(self, event: Event) -> Iterator[Event]:
        """Yield the events for ``Order`` that replace an event of the trace."""
        body = event.body
        stream = int(getattr(body, "stream", 0))
        if isinstance(body, StreamCreate):
            yield from self._create(event, stream, body.flag)
            return
        if stream and stream not in self._flags:
            self.doubts["a stream that was not seen to be made"] += 1
            yield from self._create(event, stream, StreamFlag.BLOCKING)
        bodies = self._captures(event, stream)
        for plain in self._bodies(event) if bodies is None else bodies:
            yield replace(event, body=plain)

    def _create(self, event: Event, stream: int, flag: StreamFlag) -> Iterator[Event]:
        if stream not in self._flags:
            self._flags[stream] = flag
            self._streams[event.context].append(stream)
            blocking = [one for one in self._flags.values() if one is not StreamFlag.NON_BLOCKING]
            if len(self._streams) > 1 and len(blocking) > 1:
                self.doubts["default streams of several contexts"] += 1
            yield replace(event, body=StreamCreate(stream, flag))

    def _captures(self, event: Event, stream: int) -> Sequence[EventBody] | None:
        """Handle an event of a capture; return None for other events."""
        match event.body:
            case CaptureBegin(graph):
                self._capturing[stream] = graph
            case CaptureEnd(graph):
                for kept in (self._capturing, self._captured):
                    for number in [key for key, value in kept.items() if value == graph]:
                        del kept[number]
            case StreamWait(event=waited) if waited in self._captured:
                self._capturing[stream] = self._captured[waited]
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
        _, graph = self._launched
        for (of, node), count in self._assumed.items():
            if of == graph and node not in self._complete:
                self.doubts[_ASSUMED] += count
        self._launched, self._complete = (0, 0), set()

    def _bodies(self, event: Event) -> Iterator[EventBody]:
        match event.body:
            case Access() as access:
                yield from self._access(event, access)
            case Copy() as copy:
                yield from self._copy(copy)
            case Fill() as fill:
                yield from self._fill(fill)
            case Alloc() | Free() as memory:
                yield from self._reuse(memory)
            case Memop() as memop:
                yield from self._memop(memop)
            case Gap(what, count):
                self.doubts[what] += count
            case ContextSync():
                yield from (StreamSync(stream) for stream in self._streams[event.context])
            case HostCall(stream):
                self.doubts["a function of the host in a stream"] += 1
                yield StreamSync(stream)
            case _:
                yield from self._rest(event)

    def _rest(self, event: Event) -> Iterator[EventBody]:
        match event.body:
            case GraphNode(graph, node) as made:
                self._graphs[event.seq] = graph
                del self._assumed[graph, node]  # a changed node replaces the one of its number
                yield made
            case GraphLaunch(graph=graph) as launch:
                self.end()
                self._launched = event.seq, graph
                yield launch
            case Accessed(node, True) if event.seq == self._launched[0]:
                self._complete.add(node)
            case body if isinstance(body, _PLAIN):
                yield body

    def _access(self, event: Event, access: Access) -> Iterator[EventBody]:
        if access.known >= Precision.ASSUMED and event.seq in self._graphs:
            self._assumed[self._graphs[event.seq], access.node] += 1
        elif access.known is not Precision.EXACT:
            self.doubts[_ASSUMED] += 1
        elif access.count > _MOST_ROWS:
            self.doubts["an access with more rows than brute force has time for"] += 1
        else:
            yield access

    def _copy(self, copy: Copy) -> Iterator[EventBody]:
        side = host_role(copy.direction, copy.host, asynchronous=copy.asynchronous, strict=False)
        if side.waits_before:
            yield StreamSync(copy.stream)
        yield Launch(copy.stream, "copy")
        size, rows = copy.size_bytes, copy.rows
        if not side.reads_source:
            yield _rows(copy.source, size, rows, copy.source_pitch_bytes, AccessMode.READ)
        if not side.writes_destination:
            yield _rows(
                copy.destination, size, rows, copy.destination_pitch_bytes, AccessMode.WRITE
            )
        if side.waits_after:
            yield StreamSync(copy.stream)

    def _fill(self, fill: Fill) -> Iterator[EventBody]:
        yield Launch(fill.stream, "fill")
        yield _rows(fill.address, fill.size_bytes, fill.rows, fill.pitch_bytes, AccessMode.WRITE)
        owner = next(
            (a for a in self._memory.values() if 0 <= fill.address - a.address < a.size_bytes), None
        )
        if host_waits_for_fill(owner.how if owner else None, asynchronous=fill.asynchronous):
            yield StreamSync(fill.stream)

    def _reuse(self, memory: Alloc | Free) -> Iterator[EventBody]:
        """Order a reallocation after the free of the same memory."""
        lo = memory.address
        if isinstance(memory, Alloc):
            self._memory[lo] = memory
            if memory.how is AllocationKind.STREAM_ORDERED:
                for begin, end, event in self._freed:
                    if begin < lo + memory.size_bytes and lo < end:
                        yield StreamWait(memory.stream, event)
                yield memory
            return
        known = self._memory.pop(lo, None)
        size = memory.size_bytes or (known.size_bytes if known else 0)
        if memory.how is AllocationKind.STREAM_ORDERED:
            self._events += 1
            self._freed.append((lo, lo + size, self._events))
            yield replace(memory, size_bytes=size)
            yield EventRecord(self._events, memory.stream)
        elif memory.how in (AllocationKind.SYNC, AllocationKind.PINNED, AllocationKind.MANAGED):
            yield Free(lo, size)
        else:
            self.doubts["memory that is mapped anew"] += 1

    def _memop(self, memop: Memop) -> Iterator[EventBody]:
        if memop.flag is MemopType.WRITE:
            self._events += 1
            self._words[memop.address].append(self._events)
            yield EventRecord(self._events, memop.stream)
        elif memop.address in self._words:
            yield from (StreamWait(memop.stream, e) for e in self._words[memop.address])
        else:
            self.doubts["a wait for a word that nothing in the trace wrote"] += 1


def _rows(lo: int, width: int, rows: int, pitch: int, mode: AccessMode) -> Access:
    return Access(lo, lo + (rows - 1) * pitch + width, mode, stride_bytes=pitch, count=rows)


def _pairs(operations: Sequence[Operation]) -> list[Pair]:
    """Find the unordered pairs that share bytes, in a sweep over the addresses."""
    found: dict[tuple[int, int], Pair] = {}
    active: list[tuple[int, int, AccessMode, Operation]] = []
    for lo, hi, mode, new in sorted(_touches(operations), key=lambda touch: touch[:2]):
        active = [touch for touch in active if touch[1] > lo]
        for _, _, other, old in active:
            one, two = sorted((old, new), key=lambda operation: operation.number)
            numbers = one.number, two.number
            if numbers not in found and _conflict(mode, other) and _is_unordered(one, two):
                found[numbers] = Pair(one, two)
        active.append((lo, hi, mode, new))
    return list(found.values())


def _touches(operations: Iterable[Operation]) -> Iterator[tuple[int, int, AccessMode, Operation]]:
    for operation in operations:
        for access in operation.accesses:
            rows = strided_range(access.lo, access.hi, access.stride_bytes, max(access.count, 1))
            for lo, hi in rows.row_ranges():
                yield lo, hi, access.mode, operation


def _conflict(one: AccessMode, other: AccessMode) -> bool:
    return bool((one | other) & AccessMode.WRITE) and not one & other & AccessMode.ATOMIC


def _is_unordered(one: Operation, two: Operation) -> bool:
    return (
        one is not two and one.number not in two.predecessors and two.number not in one.predecessors
    )
