"""The race detection engine: finds the races in a trace, batch by batch.

It is pure: it uses no device, no clock and no file. The order of work is fixed when the work is enqueued, so
a trace can be analyzed at any later time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, TypeAlias

import numpy as np

from cudakit.core.sanitize.clocks import ASSUMED, WRITE, Call, MemoryAccess
from cudakit.core.sanitize.conflicts import Conflict, ConflictChecker
from cudakit.core.sanitize.graphs import GraphTracker
from cudakit.core.sanitize.operations import AllocationEvents, Allocations, StreamWork
from cudakit.core.sanitize.ordering import StreamOrder, SyncTracker
from cudakit.core.sanitize.races import (
    Allocation,
    Confidence,
    Coverage,
    Grade,
    NamedRange,
    Operation,
    Race,
    RaceKind,
)
from cudakit.core.sanitize.record_batch import AccessRow, RecordBatch, sorted_by_call
from cudakit.core.sanitize.shadow_memory import MOST_SEGMENTS, Shadow, coarsen, prune
from cudakit.trace.kinds import AccessMode, EventKind, Precision
from cudakit.trace.layout import Records
from cudakit.trace.ranges import RangeTracker


class RaceDescriber:
    """Turns conflicts into races: adds the kind, the allocation and the last synchronization."""

    def __init__(self, order: StreamOrder, memory: Allocations, pools: Allocations) -> None:
        self._order = order
        self._memory = memory
        self._pools = pools

    def race(self, conflict: Conflict, strings: Sequence[str]) -> Race:
        """Return the race of a conflict whose later side was just enqueued."""
        previous, current = conflict.previous, conflict.current
        pooled = self._pools.at(conflict.lo)
        return Race(
            kind=_kind(previous, current, pooled),
            confidence=conflict.confidence,
            lo=conflict.lo,
            hi=conflict.hi,
            current=_operation(current, strings),
            previous=_operation(previous, strings),
            allocation=pooled or self._memory.at(conflict.lo),
            last_sync=self._order.last_sync(
                current.call.stream, previous.call.stream, previous.slot
            ),
            approximate=conflict.approximate,
        )


def _kind(previous: MemoryAccess, current: MemoryAccess, pooled: Allocation | None) -> RaceKind:
    if EventKind.FREE in (previous.call.kind, current.call.kind):
        return RaceKind.USE_AFTER_FREE
    if previous.call.kind == EventKind.ALLOC:
        return RaceKind.USE_BEFORE_ALLOCATION
    if 0 in (previous.call.stream, current.call.stream):
        return RaceKind.HOST
    if pooled is not None and previous.call.seq < pooled.seq:
        return RaceKind.REUSE
    if not _writes(previous, current):
        return RaceKind.WRITE_AFTER_READ
    return RaceKind.WRITE_AFTER_WRITE if _writes(current, previous) else RaceKind.READ_AFTER_WRITE


def _writes(one: MemoryAccess, other: MemoryAccess) -> bool:
    """Return whether a side counts as a write.

    An assumed access may be either; against an exact one it counts as the opposite, which makes the race.
    """
    if one.known >= ASSUMED > other.known:
        return not other.mode & WRITE
    return bool(one.mode & ~AccessMode.READ)


def _operation(access: MemoryAccess, strings: Sequence[str]) -> Operation:
    call = access.call
    return Operation(
        seq=call.seq,
        kind=EventKind(call.kind),
        name=strings[call.name] if call.name < len(strings) else "",
        stream=call.stream,
        context=call.context,
        device=call.device,
        thread=call.thread,
        site=call.site,
        mode=AccessMode(access.mode),
        known=Precision(access.known),
        lo=access.lo,
        hi=access.hi,
        graph=call.graph,
        node=call.node,
        ranges=tuple(_ranges(call, strings)),
    )


def _ranges(call: Call, strings: Sequence[str]) -> Iterator[NamedRange]:
    """Yield the NVTX ranges that were open at a call, outermost first."""
    for each in reversed(list(call.innermost_range or ())):
        yield NamedRange(strings[each.name], strings[each.domain])


_LAUNCH: Final = int(EventKind.LAUNCH)
_ACCESSED: Final = int(EventKind.ACCESSED)
_AccessHandler: TypeAlias = Callable[[Iterable[AccessRow]], None]

# Records decoded at a time, to bound memory.
_RECORDS_AT_ONCE: Final = 1 << 14
STRAY_ACCESS: Final = "access without a recorded launch"
UNKNOWN_STREAM: Final = "stream whose creation was not recorded"


class Engine:
    """Finds the races in the trace of one process.

    All host threads are one timeline, in the order of their calls, because locks between threads are not
    recorded; ``strict_threads`` gives each thread its own timeline. Possible races are counted, and returned
    only with ``report_possible``. Above ``forgets_above`` stored states, those that no race can involve any
    more are removed.
    """

    def __init__(
        self,
        *,
        strict_threads: bool = False,
        report_possible: bool = False,
        forgets_above: int = 1024,
    ) -> None:
        self.coverage = Coverage()
        self.gaps: Counter[str] = Counter()
        self._strict = strict_threads
        self._report_possible = report_possible
        self._races: list[Race] = []
        self._strings: Sequence[str] = ()
        self._order = order = StreamOrder()
        self._shadow = shadow = Shadow(
            ConflictChecker(self._report_conflict), checks_nearby=report_possible
        )
        self._memory = AllocationEvents(order, shadow)
        self._describer = RaceDescriber(order, self._memory.driver, self._memory.pools)
        self._syncs = SyncTracker(order, self.gaps)
        self._graphs = GraphTracker(order, shadow, self.coverage, self.gaps)
        self._work = StreamWork(
            order, shadow, self._memory.driver, self.coverage, strict=strict_threads
        )
        self._handlers = self._all_handlers()
        self._access_handlers: dict[int, _AccessHandler] = {
            EventKind.GRAPH_NODE: self._graphs.node_accesses,
            EventKind.GRAPH_LAUNCH: self._graphs.launch_accesses,
        }
        # Adds accesses to the last call that can have any.
        self._add_accesses: _AccessHandler = self._work.accesses
        self._ranges = RangeTracker()
        self._last_seq = 0
        self._last_grade: int | None = None  # of the last call, if it was a launch
        self._arenas: dict[int, int] = {}  # device memory used for recording, by device
        self._forgets_above = self._forget_at = forgets_above

    def feed(self, records: Records, strings: Sequence[str]) -> list[Race]:
        """Analyze the next records of the trace; return the races whose later side is among them.

        ``strings`` is the string table of the trace, at least as far as the records refer to it.
        """
        self._strings = strings
        records = sorted_by_call(records)
        for begin in range(0, len(records), _RECORDS_AT_ONCE):
            for thread_records in self._by_thread(records[begin : begin + _RECORDS_AT_ONCE]):
                self._feed(RecordBatch(thread_records, self._last_seq, self._ranges))
                self._last_seq = int(thread_records["seq"][-1])
            self._forget_ordered()
        self._graphs.finish()
        races, self._races = self._races, []
        return races

    def _by_thread(self, records: Records) -> Iterator[Records]:
        """Yield the records in runs of one thread, whose clock the host uses; in one run unless strict."""
        if not self._strict:
            yield records
            return
        threads = records["thread"]
        for run in np.split(records, np.flatnonzero(threads[1:] != threads[:-1]) + 1):
            if len(run):
                self._order.use_thread(int(run["thread"][0]))
            yield run

    def _feed(self, batch: RecordBatch) -> None:
        handlers, access_handlers = self._handlers, self._access_handlers
        rows, accesses = batch.rows, batch.accesses
        graphs, launch = self._graphs, self._work.launch
        self._count(batch)
        if batch.leading:
            self._add_accesses(islice(accesses, batch.leading))
        for kind, following in zip(batch.kinds, batch.following, strict=True):
            if graphs.launched is not None and kind != _ACCESSED:
                graphs.finish()
            if kind == _LAUNCH:  # the most frequent kind, without a lookup
                self._add_accesses = launch(next(rows[_LAUNCH])[0], islice(accesses, following))
                continue
            handlers[kind](*next(rows[kind]))
            if kind in access_handlers:
                self._add_accesses = access_handlers[kind]
            if following:
                self._add_accesses(islice(accesses, following))

    def _count(self, batch: RecordBatch) -> None:
        coverage, known = self.coverage, batch.known
        if batch.strays:
            self.gaps[STRAY_ACCESS] += batch.strays
        if self._last_grade is not None and batch.leading_grade > self._last_grade:
            coverage.count(self._last_grade, -1)  # the last launch has more accesses in this batch
            coverage.count(batch.leading_grade)
            self._last_grade = batch.leading_grade
        if batch.kinds:
            self._last_grade = batch.grades[-1] if batch.kinds[-1] == _LAUNCH else None
        coverage.launches += len(batch.grades)
        coverage.launches_without_call_site += batch.launches_without_call_site
        for grade in Grade:
            coverage.count(grade, batch.grades.count(grade))
        coverage.accesses_exact += known[Precision.EXACT]
        coverage.accesses_summary += known[Precision.SUMMARY]
        coverage.accesses_merged += known[Precision.MERGED]
        coverage.accesses_assumed += known[Precision.ASSUMED]
        coverage.accesses_uncertain += known[Precision.UNCERTAIN]

    def _report_conflict(self, conflict: Conflict) -> None:
        if conflict.confidence is Confidence.POSSIBLE and not self._report_possible:
            self.coverage.suspected += 1
        else:
            self._races.append(self._describer.race(conflict, self._strings))

    def _forget_ordered(self) -> None:
        """Remove the states that no race can involve any more, once there are many states."""
        self._order.reuse_slots()
        if self._order.unseen_streams:
            self.gaps[UNKNOWN_STREAM] = self._order.unseen_streams
        if self._stored_states < self._forget_at:
            return
        prune(self._shadow, self._order.precedes_future)
        self._syncs.prune()
        self._graphs.prune()
        if len(self._shadow.segments) > MOST_SEGMENTS:
            coarsen(self._shadow, self._memory.driver.at)
        self._forget_at = self._forgets_above + 2 * self._stored_states

    @property
    def _stored_states(self) -> int:
        shadow = self._shadow
        return len(shadow.segments) + len(shadow.pointers.known) + len(self._syncs)

    def _gap(self, _: Call, what: int, count: int) -> None:
        self.gaps[self._strings[what]] += count

    def _arenas_changed(self, call: Call, size_bytes: int) -> None:
        self._arenas[call.device] = size_bytes
        self.coverage.arenas_bytes = max(self.coverage.arenas_bytes, sum(self._arenas.values()))

    def _all_handlers(self) -> dict[int, Callable[..., Any]]:
        work, memory, waits, graphs = self._work, self._memory, self._syncs, self._graphs
        return {
            EventKind.ALLOC: memory.alloc,
            EventKind.FREE: memory.free,
            EventKind.COPY: work.copy,
            EventKind.FILL: work.fill,
            EventKind.STREAM_CREATE: waits.create_stream,
            EventKind.STREAM_DESTROY: waits.destroy_stream,
            EventKind.EVENT_RECORD: waits.record,
            EventKind.STREAM_WAIT: waits.wait,
            EventKind.EVENT_SYNC: waits.sync_event,
            EventKind.EVENT_QUERY_OK: waits.sync_event,
            EventKind.STREAM_SYNC: waits.sync_stream,
            EventKind.STREAM_QUERY_OK: waits.sync_stream,
            EventKind.CONTEXT_SYNC: waits.sync_context,
            EventKind.HOST_CALL: waits.host_call,
            EventKind.CAPTURE_BEGIN: waits.capture_begin,
            EventKind.CAPTURE_END: waits.capture_end,
            EventKind.GRAPH_NODE: graphs.add_node,
            EventKind.GRAPH_EDGE: graphs.add_edge,
            EventKind.GRAPH_LAUNCH: graphs.launch,
            EventKind.MEMOP: waits.memop,
            EventKind.GAP: self._gap,
            EventKind.ACCESSED: graphs.accessed,
            EventKind.ARENAS: self._arenas_changed,
        }
