"""The rules of ``--accesses auto`` in Python, applied to the log of a run with exact accesses.

``Policy.apply`` returns the records that the recorder would have written with ``--accesses auto``. The rules
are those of ``exact/templates.c`` and ``model/stream_order.c`` of the recorder, except that patches are
never removed from modules, that unused templates are never forgotten, and that a log has no arguments that
are not pointers.
"""

from __future__ import annotations

import enum
import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from cudakit.trace.kinds import (
    AccessMode,
    AllocationKind,
    AllocationLayer,
    EventKind,
    NodeType,
    Precision,
    TemplateCheck,
)
from cudakit.trace.trace_file import RECORD, Records, layout, view

EQUAL_LAUNCHES = 2
CHANGES_WITHOUT_EFFECT = 2
FIRST_CHECK, MAX_CHECK_INTERVAL, MAX_SHARED_CHECK_INTERVAL = 4, 4096, 512
MAX_RANGES = 8192
# Number of recorded launches next to unordered work, before such launches use the template.
MIN_UNORDERED_LAUNCHES = 128
IDLE_COUNT_TO_REMOVE = 64  # number of waits for all work after which ordered accesses are forgotten
CONTESTED_ACCESSES = 64  # number of accesses for which bytes stay contested
# Gaps in bytes between the ranges of a footprint that are joined: always, and of addresses at most.
MIN_GAP, MAX_ADDRESS_GAP = 256, 512
SIMPLE_FOOTPRINT = 32  # number of ranges of a template's footprint at which joining stops

Operation: TypeAlias = tuple[int, int]  # stream, and number of the operation in the stream
Clock: TypeAlias = defaultdict[int, int]  # last operation that happens before, by stream


class StreamOrder:
    """The order that streams, events and waits of the host create."""

    def __init__(self) -> None:
        self._clocks: defaultdict[int, Clock] = defaultdict(lambda: defaultdict(int))
        self._contexts: dict[int, int] = {}
        self._events: dict[int, Clock] = {}
        self._host: Clock = defaultdict(int)  # operations before all later work of the host
        self._waited: Clock = defaultdict(int)  # operations that calls of the host have waited for
        self.idle_count = 0  # number of times that the host had waited for all work
        self._operation_count = self._idle_operation_count = 0

    def enqueue(self, stream: int, context: int) -> Operation:
        clock = self._clock(stream, context)
        clock[stream] += 1
        self._operation_count += 1
        return stream, clock[stream]

    def is_before(self, earlier: Operation, later: Operation) -> bool:
        return earlier[1] <= self._clocks[later[0]][earlier[0]]

    def record_event(self, event: int, stream: int, context: int) -> None:
        self._events[event] = self._clock(stream, context).copy()

    def wait_for_event(self, event: int, stream: int, context: int) -> None:
        _join(self._clock(stream, context), self._events.get(event, {}))

    def host_waits_for_event(self, event: int) -> None:
        self._add_waits([self._events[event]] if event in self._events else [])

    def host_function_runs(self, event: int) -> None:
        """Order the host after the event before a host function.

        The device is not idle while the function runs, so this is not a wait.
        """
        _join(self._host, self._events.get(event, {}))

    def host_waits_for_stream(self, stream: int, context: int) -> None:
        self._add_waits([self._clock(stream, context)])

    def host_waits_for_context(self, context: int) -> None:
        self._add_waits(
            [
                self._clocks[stream]
                for stream, stream_context in self._contexts.items()
                if stream_context == context
            ]
        )

    def _add_waits(self, clocks: list[Clock]) -> None:
        for clock in clocks:
            _join(self._host, clock)
            _join(self._waited, clock)
        is_idle = all(
            self._waited[stream] == stream_clock[stream]
            for stream, stream_clock in self._clocks.items()
        )
        if is_idle and self._operation_count != self._idle_operation_count:
            self._idle_operation_count = self._operation_count
            self.idle_count += 1

    def _clock(self, stream: int, context: int) -> Clock:
        self._contexts.setdefault(stream, context)
        _join(self._clocks[stream], self._host)
        return self._clocks[stream]


def _join(clock: Clock, other: dict[int, int]) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock[stream], number)


class Order(enum.Enum):
    """The order of a launch and earlier work on the memory that it reaches."""

    ORDERED = enum.auto()
    SHARED = enum.auto()  # ordered after all earlier accesses to the bytes of the footprint
    UNORDERED = enum.auto()  # unordered work accesses these bytes, or the footprint is unknown
    CONTESTED = enum.auto()  # the order of some work on the allocations is unknown


@dataclass(frozen=True)
class ByteAccess:
    """An access to all bytes of a range; an assumed one is that of an operation with unknown accesses."""

    operation: Operation
    is_write: bool = True
    is_assumed: bool = False


@dataclass
class Interval:
    """Bytes, and the accesses that later work may be unordered with."""

    lo: int
    hi: int
    accesses: list[ByteAccess]
    contested_count: int = 0  # number of accesses for which the bytes stay contested


@dataclass
class Memory:
    """An allocation, and the last operations that may access it.

    ``intervals`` has its bytes if operations on it were not ordered.
    """

    lo: int
    hi: int
    last_work: Operation | None = None
    is_contested: bool = False
    intervals: list[Interval] = field(default_factory=list)
    has_conflicts: bool = False  # whether bytes were contested since ``intervals`` was created
    # Values of StreamOrder.idle_count at the last access, and at the last unordered access.
    last_idle_count: int = 0
    last_unordered_idle_count: int = 0

    def intervals_in(self, lo: int, hi: int) -> list[Interval]:
        """Return the intervals of some bytes, which are divided at their ends."""
        lo, hi = max(lo, self.lo), min(hi, self.hi)
        if lo >= hi:
            return []
        for cut in (lo, hi):
            i = bisect_right(self.intervals, cut, key=lambda part: part.lo) - 1
            old = self.intervals[i]
            if old.lo < cut < old.hi:
                rest = Interval(cut, old.hi, list(old.accesses), old.contested_count)
                self.intervals.insert(i + 1, rest)
                old.hi = cut
        begin = bisect_left(self.intervals, lo, key=lambda part: part.lo)
        return self.intervals[begin : bisect_left(self.intervals, hi, key=lambda part: part.lo)]


@dataclass
class Signature:
    """The state of the launches of one kernel with the same grid, block and equal pointers."""

    digest: object = None
    pointers: tuple[int, ...] = ()  # pointers of the last recorded launch
    template_pointers: tuple[int, ...] = ()
    equal_count: int = 0
    template: int = 0
    uses: int = 0
    next_check: int = 0
    pointer_changes: int = 0
    distance_changes: int = 0
    is_untrusted: bool = False
    footprint: list[tuple[int | None, int, int, bool]] | None = (
        None  # accesses of the last recorded launch
    )
    is_checked_in_shared_memory: bool = False
    unordered_equal_count: int = 0  # number of recorded launches on the bytes of unordered work
    is_contiguous: bool = (
        False  # whether the last launch accessed contiguous bytes from its pointers on
    )

    def serves(self, order: Order) -> bool:
        """Return whether the template applies to launches with this order."""
        match order:
            case Order.ORDERED:
                return True
            case Order.SHARED:
                return self.serves_shared_memory
            case Order.UNORDERED:
                return self.is_contiguous and self.unordered_equal_count >= MIN_UNORDERED_LAUNCHES
            case Order.CONTESTED:
                return False

    @property
    def serves_shared_memory(self) -> bool:
        """Whether the template applies to launches on memory that unordered work uses as well."""
        return self.is_checked_in_shared_memory and self.is_contiguous

    def applies(self, pointers: tuple[int, ...]) -> bool:
        """Return whether the template applies to a launch with these pointers."""
        if not self.template:
            return False
        return (
            pointers == self.template_pointers
            or self.distance_changes >= CHANGES_WITHOUT_EFFECT
            or (
                _distances(pointers) == _distances(self.template_pointers)
                and self.pointer_changes >= CHANGES_WITHOUT_EFFECT
            )
        )

    def ranges(self, pointers: tuple[int, ...]) -> list[tuple[int, int, bool]] | None:
        """Return the bytes that a launch is expected to access, and whether it writes them.

        Return None if no launch was recorded.
        """
        if self.footprint is None:
            return None
        return [
            (base + begin, base + end, is_write)
            for index, begin, end, is_write in self.footprint
            for base in [0 if index is None else pointers[index]]
        ]


def _distances(pointers: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(pointer - pointers[0] for pointer in pointers)


@dataclass
class Policy:
    """Decides for each launch of a trace whether it is recorded."""

    _order: StreamOrder = field(default_factory=StreamOrder)
    _allocations: list[Memory] = field(default_factory=list)  # sorted by address
    _signatures: dict[object, Signature] = field(default_factory=dict)
    # The name and the accesses of each node, by graph and node.
    _graph_nodes: defaultdict[int, dict[int, tuple[int, ...]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    _graphs_with_copies: set[int] = field(default_factory=set)
    _graph_edges: defaultdict[int, list[tuple[int, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _last_template: int = 0
    _random: int = 0x2545F4914F6CDD1D

    def apply(self, records: Records) -> Records:
        """Return the records that would have been written; ``records`` are in the order of their calls."""
        return np.concatenate([self._apply_call(call) for call in _calls(records)] or [records])

    def _apply_call(self, call: Records) -> Records:
        kind = EventKind(int(call["kind"][0]))
        head = view(call[:1], kind)[0]
        match kind:
            case EventKind.LAUNCH:
                return self._launch(call, head)
            case EventKind.GRAPH_LAUNCH:
                return self._launch_graph(call, head)
            case EventKind.GRAPH_NODE:
                self._add_nodes(call)
            case EventKind.GRAPH_EDGE:
                edge = int(head["before"]), int(head["after"])
                self._graph_edges[int(head["graph"])].append(edge)
            case EventKind.COPY | EventKind.FILL | EventKind.ALLOC | EventKind.FREE:
                self._use_memory(kind, call, head)
            case _:
                self._synchronize(kind, head)
        return call

    def _synchronize(self, kind: EventKind, head: np.void) -> None:
        """Apply the order that a call creates."""
        stream, context, order = int(head["stream"]), int(head["context"]), self._order
        match kind:
            case EventKind.EVENT_RECORD:
                order.record_event(int(head["event"]), stream, context)
            case EventKind.STREAM_WAIT:
                order.wait_for_event(int(head["event"]), stream, context)
            case EventKind.EVENT_SYNC | EventKind.EVENT_QUERY_OK:
                order.host_waits_for_event(int(head["event"]))
            case EventKind.HOST_CALL:
                order.host_function_runs(int(head["event"]))
            case EventKind.STREAM_SYNC:
                order.host_waits_for_stream(stream, context)
            case EventKind.CONTEXT_SYNC:
                order.host_waits_for_context(context)

    # --- memory

    def _use_memory(self, kind: EventKind, call: Records, head: np.void) -> None:
        """Apply a copy, a fill, an allocation or a free."""
        stream, context = int(head["stream"]), int(head["context"])
        if kind is EventKind.COPY:
            operation = self._order.enqueue(stream, context)
            rows = view(call[call["kind"] == kind], kind)
            for side, is_write in (("source", False), ("destination", True)):
                begins = rows[side].tolist()
                size = int(head["size_bytes"]) + (int(head["rows"]) - 1) * int(
                    head[f"{side}_pitch_bytes"]
                )
                access = ByteAccess(operation, is_write)
                self._access(min(begins), max(begins) + size, access)
        elif kind is EventKind.FILL:
            size = int(head["size_bytes"]) + (int(head["rows"]) - 1) * int(head["pitch_bytes"])
            lo = int(head["address"])
            self._access(lo, lo + size, ByteAccess(self._order.enqueue(stream, context)))
        elif head["layer"] == AllocationLayer.DRIVER:
            if kind is EventKind.ALLOC:
                self._allocate(head, stream, context)
            else:
                freed = int(head["address"])
                self._allocations = [m for m in self._allocations if m.lo != freed]

    def _access(self, lo: int, hi: int, access: ByteAccess) -> None:
        for memory in self._allocations:
            if memory.lo < hi and lo < memory.hi:
                self._begin_work(memory, access.operation)
                self._add_access(memory, lo, hi, access)

    def _allocate(self, head: np.void, stream: int, context: int) -> None:
        lo = int(head["address"])
        memory = Memory(lo, lo + int(head["size_bytes"]))
        self._allocations = [m for m in self._allocations if m.hi <= memory.lo or m.lo >= memory.hi]
        self._allocations.append(memory)
        self._allocations.sort(key=lambda item: item.lo)
        if head["allocation_kind"] == AllocationKind.STREAM_ORDERED:
            self._access(lo, memory.hi, ByteAccess(self._order.enqueue(stream, context)))

    def _find(self, address: int) -> Memory | None:
        index = bisect_right(self._allocations, address, key=lambda item: item.lo) - 1
        memory = self._allocations[index] if index >= 0 else None
        return memory if memory and address < memory.hi else None

    def _reached(self, addresses: list[int], operation: Operation) -> list[Memory]:
        """Begin an operation on the allocations that addresses reach, and return these allocations."""
        reached = list({id(m): m for address in addresses if (m := self._find(address))}.values())
        for memory in reached:
            self._begin_work(memory, operation)
        return reached

    def _begin_work(self, memory: Memory, operation: Operation) -> None:
        last = memory.last_work
        idle_count = self._order.idle_count
        if (
            not memory.has_conflicts
            and memory.last_idle_count != idle_count
            and idle_count - memory.last_unordered_idle_count >= IDLE_COUNT_TO_REMOVE
        ):
            memory.intervals = []
        if last is not None and not self._order.is_before(last, operation):
            memory.last_unordered_idle_count = idle_count
        if memory.intervals or last is None or self._order.is_before(last, operation):
            return
        memory.intervals = [Interval(memory.lo, memory.hi, [ByteAccess(last, is_assumed=True)])]
        memory.last_idle_count = memory.last_unordered_idle_count = idle_count

    def _add_access(self, memory: Memory, lo: int, hi: int, access: ByteAccess) -> None:
        memory.last_work = access.operation
        memory.last_idle_count = self._order.idle_count
        for part in memory.intervals_in(lo, hi) if memory.intervals else ():
            part.contested_count = max(0, part.contested_count - 1)
            if not access.is_assumed and any(
                self._is_conflict(earlier, access) and not earlier.is_assumed
                for earlier in part.accesses
            ):
                part.contested_count = CONTESTED_ACCESSES
            memory.has_conflicts |= part.contested_count > 0
            if not all(self._order.is_before(e.operation, access.operation) for e in part.accesses):
                memory.last_unordered_idle_count = self._order.idle_count
            part.accesses = [
                earlier
                for earlier in part.accesses
                if not self._order.is_before(earlier.operation, access.operation)
                or (earlier.is_write and not access.is_write)
            ]
            part.accesses.append(access)

    def _is_conflict(self, earlier: ByteAccess, later: ByteAccess) -> bool:
        is_before = self._order.is_before(earlier.operation, later.operation)
        return (earlier.is_write or later.is_write) and not is_before

    def _is_ordered(self, lo: int, hi: int, access: ByteAccess) -> bool:
        """Return whether an access is ordered after all conflicting ones, and no byte is contested."""
        return not any(
            memory.is_contested
            or any(
                part.contested_count or any(self._is_conflict(e, access) for e in part.accesses)
                for part in (memory.intervals_in(lo, hi) if memory.intervals else ())
            )
            for memory in self._allocations
            if memory.lo < hi and lo < memory.hi
        )

    # --- launches

    def _launch(self, call: Records, head: np.void) -> Records:
        pointers = _assumed_pointers(call)
        operation = self._order.enqueue(int(head["stream"]), int(head["context"]))
        reached = self._reached(pointers, operation)
        alignments = tuple(pointer & 255 for pointer in pointers)
        shape = int(head["name"]), *head["grid"].tolist(), *head["block"].tolist()
        return self._decide(call, (shape, alignments), tuple(pointers), reached, operation)

    def _launch_graph(self, call: Records, head: np.void) -> Records:
        graph = int(head["graph"])
        operation = self._order.enqueue(int(head["stream"]), int(head["context"]))
        nodes = sorted(self._graph_nodes[graph].items())
        reached = self._reached([begin for _, node in nodes for begin in node[1::2]], operation)
        key = "graph", int(head["context"]), tuple(nodes)
        if not self._is_path(graph):
            self._add_launch(None, reached, operation)
            return call
        return self._decide(
            call, key, (), reached, operation, has_footprint=graph not in self._graphs_with_copies
        )

    def _add_nodes(self, call: Records) -> None:
        nodes = view(call[call["kind"] == EventKind.GRAPH_NODE], EventKind.GRAPH_NODE)
        accesses = view(call[call["kind"] == EventKind.ACCESS], EventKind.ACCESS)
        for node in nodes:
            graph = int(node["graph"])
            node_accesses = accesses[accesses["node"] == node["node"]]
            bounds = [
                int(bound) for access in node_accesses for bound in (access["lo"], access["hi"])
            ]
            self._graph_nodes[graph][int(node["node"])] = (int(node["name"]), *bounds)
            if node["node_type"] in (NodeType.COPY, NodeType.FILL):
                self._graphs_with_copies.add(graph)

    def _is_path(self, graph: int) -> bool:
        """Return whether the edges of a graph order all nodes one after the other."""
        edges = self._graph_edges[graph]
        starts, ends = ({edge[side] for edge in edges} for side in (0, 1))
        node_count = len(self._graph_nodes[graph])
        return len(edges) + 1 == node_count == len(starts) + 1 == len(ends) + 1

    def _decide(
        self,
        call: Records,
        key: object,
        pointers: tuple[int, ...],
        reached: list[Memory],
        operation: Operation,
        *,
        has_footprint: bool = True,
    ) -> Records:
        signature = self._signatures.setdefault(key, Signature())
        applies = signature.applies(pointers)
        expected = signature.ranges(pointers) if has_footprint else None
        order = self._order_of(expected, reached, operation)
        uses_template = (
            applies
            and signature.serves(order)
            and not self._is_check_due(signature, order is not Order.ORDERED)
        )
        self._add_launch(expected, reached, operation, is_assumed=not applies)
        if uses_template:
            signature.uses += 1
            return _with_template(call, signature, pointers)
        return self._compare(
            call, signature, pointers, reached, order if applies else Order.ORDERED
        )

    def _order_of(
        self,
        expected: list[tuple[int, int, bool]] | None,
        reached: list[Memory],
        operation: Operation,
    ) -> Order:
        """Return the order of a launch and earlier work on its memory."""
        if any(memory.is_contested for memory in reached):
            return Order.CONTESTED
        if not any(memory.intervals for memory in reached):
            return Order.ORDERED
        if expected is not None and all(
            self._is_ordered(lo, hi, ByteAccess(operation, is_write))
            for lo, hi, is_write in expected
        ):
            return Order.SHARED
        return Order.UNORDERED

    def _add_launch(
        self,
        expected: list[tuple[int, int, bool]] | None,
        reached: list[Memory],
        operation: Operation,
        *,
        is_assumed: bool = True,
    ) -> None:
        """Add the accesses of a launch: those that are expected, or unknown ones."""
        for memory in reached:
            if not memory.intervals or expected is None:
                access = ByteAccess(operation, is_assumed=True)
                self._add_access(memory, memory.lo, memory.hi, access)
        for lo, hi, is_write in expected or ():
            for memory in self._allocations:
                if memory.intervals and memory.lo < hi and lo < memory.hi:
                    self._add_access(memory, lo, hi, ByteAccess(operation, is_write, is_assumed))

    def _is_check_due(self, signature: Signature, is_shared: bool) -> bool:
        if signature.uses < signature.next_check:
            return False
        limit = MAX_SHARED_CHECK_INTERVAL if is_shared else MAX_CHECK_INTERVAL
        signature.next_check = signature.uses + self._check_interval(signature.uses, limit)
        return True

    def _compare(
        self,
        call: Records,
        signature: Signature,
        pointers: tuple[int, ...],
        reached: list[Memory],
        order: Order,
    ) -> Records:
        """Compare the accesses of a recorded launch; return its records, with a Template if there is one."""
        accessed = view(call[call["kind"] == EventKind.ACCESSED], EventKind.ACCESSED)
        accesses = view(call[call["kind"] == EventKind.ACCESS], EventKind.ACCESS)
        accesses = accesses[accesses["precision"] < Precision.ASSUMED]
        pieces = list(_pieces(accesses, pointers))
        are_inside = [self._is_inside(lo, hi, reached) for _, lo, hi in pieces]
        is_below = all(
            not pointers or (base is not None and self._find(base) is self._find(lo))
            for (_, base, *_), lo, _ in pieces
        )
        if not len(accessed) or not accessed["exact"].all():
            return call
        signature.footprint = _footprint(pieces)
        signature.is_contiguous = not accesses["count"].any() and _are_contiguous(pieces)
        if signature.is_untrusted:
            return call
        digest = _digest(pieces)
        is_equal = (
            all(are_inside)
            and is_below
            and (not signature.equal_count or signature.digest == digest)
        )
        check, template = TemplateCheck.NONE, 0
        if signature.applies(pointers):
            check = TemplateCheck.EQUAL if is_equal else TemplateCheck.DIFFERENT
        signature.is_checked_in_shared_memory |= is_equal and order is Order.SHARED
        signature.unordered_equal_count += is_equal and order is Order.UNORDERED
        if is_equal:
            template = self._learn(signature, pointers, len(accesses))
        else:
            signature.is_untrusted, signature.template = True, 0
        signature.digest, signature.pointers = digest, pointers
        if check is TemplateCheck.NONE and not template:
            return call
        added = _template_records(call[:1], template, check, pointers)
        return np.concatenate([call[:-1], added, call[-1:]])

    def _is_inside(self, lo: int, hi: int, reached: list[Memory]) -> bool:
        """Return whether bytes are in reached allocations; other allocations become contested."""
        while lo < hi and (memory := next((m for m in reached if m.lo <= lo < m.hi), None)):
            lo = memory.hi
        for outside in self._allocations if lo < hi else ():
            outside.is_contested |= outside.lo < hi and lo < outside.hi
        return lo >= hi

    def _learn(
        self,
        signature: Signature,
        pointers: tuple[int, ...],
        range_count: int,
    ) -> int:
        """Count a launch with equal accesses; return its new template, or 0."""
        if signature.equal_count:
            last = signature.pointers
            signature.pointer_changes += pointers != last
            signature.distance_changes += _distances(pointers) != _distances(last)
        signature.equal_count += 1
        if signature.equal_count < EQUAL_LAUNCHES or signature.template or range_count > MAX_RANGES:
            return 0
        self._last_template += 1
        signature.template, signature.template_pointers = self._last_template, pointers
        signature.next_check = self._check_interval(0, MAX_CHECK_INTERVAL)
        return self._last_template

    def _check_interval(self, uses: int, limit: int) -> int:
        interval = min(max(uses, FIRST_CHECK), limit)
        return interval // 2 + self._random_below(interval) + 1

    def _random_below(self, limit: int) -> int:
        state = self._random
        state ^= state << 13 & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 7
        state ^= state << 17 & 0xFFFFFFFFFFFFFFFF
        self._random = state
        return (state >> 32) % limit


_Piece: TypeAlias = tuple[int, int | None, int, int]


def _pieces(accesses: Records, pointers: tuple[int, ...]) -> Iterator[tuple[_Piece, int, int]]:
    """Yield contiguous bytes, divided at the pointers, with the nearest pointer at or below each."""
    for row in accesses.tolist():
        access = dict(zip(accesses.dtype.names, row, strict=True))
        lo, hi, stride = access["lo"], access["hi"], access["stride_bytes"]
        count = access["count"] or 1
        size = hi - lo - (count - 1) * stride
        inner = sorted(p for p in pointers if lo < p < hi)
        mode = access["mode"] + 16 * (access["precision"] == Precision.SUMMARY)
        for i in range(count):
            first, last = lo + i * stride, lo + i * stride + size
            cuts = [p for p in inner if first < p < last]
            for begin, end in itertools.pairwise([first, *cuts, last]):
                base = max((p for p in pointers if p <= begin), default=None)
                index = pointers.index(base) if base is not None else 0
                yield (index, base, mode, access["node"]), begin, end


def _digest(pieces: list[tuple[_Piece, int, int]]) -> object:
    """Return the accessed bytes relative to the pointers, without how they are divided into pieces."""
    ranges: defaultdict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
    for (index, base, mode, node), begin, end in pieces:
        ranges[index, mode, node].append((begin - (base or 0), end - (base or 0)))
    return {key: _joined(parts) for key, parts in ranges.items()}


def _footprint(
    pieces: list[tuple[_Piece, int, int]],
) -> list[tuple[int | None, int, int, bool]]:
    """Return the bytes of pieces relative to their pointers, and whether they are written."""
    ranges: defaultdict[tuple[int | None, int, bool], list[tuple[int, int]]] = defaultdict(list)
    for (index, base, mode, _), begin, end in pieces:
        key = index if base is not None else None, base or 0, mode != AccessMode.READ
        ranges[key].append((begin - (base or 0), end - (base or 0)))
    ranges = defaultdict(list, {key: _joined(parts, MIN_GAP) for key, parts in ranges.items()})
    gap = 0
    while True:
        footprint = [
            (index, begin, end, is_write)
            for (index, _, is_write), parts in ranges.items()
            for begin, end in _joined(parts, min(gap, MAX_ADDRESS_GAP) if index is None else gap)
        ]
        if len(footprint) <= SIMPLE_FOOTPRINT or gap > 1 << 48:
            return footprint
        gap = max(gap * 4, 256)


def _are_contiguous(pieces: list[tuple[_Piece, int, int]]) -> bool:
    """Return whether the reads and the writes through each pointer are contiguous from the pointer on."""
    ranges: defaultdict[tuple[int, bool], list[tuple[int, int]]] = defaultdict(list)
    for (_, base, mode, _), begin, end in pieces:
        if base is None:
            return False
        ranges[base, mode != AccessMode.READ].append((begin, end))
    return all(
        len(joined) == 1 and joined[0][0] == base
        for (base, _), parts in ranges.items()
        for joined in [_joined(parts)]
    )


def _joined(ranges: list[tuple[int, int]], gap: int = 0) -> list[tuple[int, int]]:
    """Return the ranges in order; ranges at most ``gap`` bytes apart are joined."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if joined and begin <= joined[-1][1] + gap:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def _calls(records: Records) -> Iterator[Records]:
    """Yield the records of each call."""
    seqs = records["seq"]
    begins = np.flatnonzero(np.append(True, seqs[1:] != seqs[:-1]))
    yield from np.split(records, begins[1:])


def _assumed_pointers(call: Records) -> list[int]:
    accesses = view(call[call["kind"] == EventKind.ACCESS], EventKind.ACCESS)
    pointers: list[int] = accesses["lo"][accesses["precision"] >= Precision.ASSUMED].tolist()
    return pointers


def _with_template(call: Records, signature: Signature, pointers: tuple[int, ...]) -> Records:
    """Return the records of a launch that names a template instead of accesses."""
    launch = call[:1].copy()
    body = launch.view(layout(EventKind(int(launch["kind"][0]))))
    body["pending"] = 0
    body["template_id"] = signature.template
    body["is_checked"] = signature.serves_shared_memory
    if pointers == signature.template_pointers:
        return launch
    body["is_relative"] = True
    return np.concatenate([launch, _pointer_records(launch, pointers)])


def _template_records(
    launch: Records, template: int, check: TemplateCheck, pointers: tuple[int, ...]
) -> Records:
    """Return a Template record and, for a new template, the records of its pointers."""
    record = _records_of_call(launch, 1, EventKind.TEMPLATE)
    body = record.view(layout(EventKind.TEMPLATE))
    body["template_id"], body["check"] = template, check
    return np.concatenate([record, _pointer_records(launch, pointers if template else ())])


def _pointer_records(launch: Records, pointers: tuple[int, ...]) -> Records:
    records = _records_of_call(launch, -(-len(pointers) // 7), EventKind.TEMPLATE_POINTERS)
    padded = [*pointers, *([0] * (7 * len(records) - len(pointers)))]
    body = records.view(layout(EventKind.TEMPLATE_POINTERS))
    body["pointers"] = np.array(padded, np.uint64).reshape(-1, 7)
    return records


def _records_of_call(launch: Records, count: int, kind: EventKind) -> Records:
    records = np.zeros(count, RECORD)
    for name in ("seq", "time_ns", "thread", "stream", "context", "site", "device"):
        records[name] = launch[name]
    records["kind"] = kind
    return records
