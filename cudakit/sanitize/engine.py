"""The race detection engine: finds the races in a trace, batch by batch.

The engine uses no device, no time and no file. Happens-before is fixed when work is enqueued, so a trace can
be analyzed at any later time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from cudakit.sanitize.collectives import PEER_KERNELS, CollectiveTracker, are_peer_kernels
from cudakit.sanitize.conflicts import Conflict, ConflictChecker
from cudakit.sanitize.graphs import GraphTracker
from cudakit.sanitize.ordering import (
    ASSUMED,
    EXACT,
    READ,
    WRITE,
    Call,
    Clock,
    ClockPosition,
    MemoryAccess,
    Stream,
    StreamOrder,
    SyncTracker,
)
from cudakit.sanitize.races import (
    Allocation,
    Confidence,
    Coverage,
    LaunchPrecision,
    NamedRange,
    Operation,
    Race,
    RaceKind,
)
from cudakit.sanitize.records import AccessRows, RecordBatch, sorted_by_call
from cudakit.sanitize.shadow import MAX_RANGE_STATES, new_shadow
from cudakit.sanitize.templates import CheckedShadow, PossibleAccesses
from cudakit.trace.kinds import (
    AccessMode,
    AllocationKind,
    AllocationLayer,
    Direction,
    EventKind,
    HostMemory,
    Precision,
)
from cudakit.trace.names import RangeTracker
from cudakit.trace.trace_file import ADDRESS_END, Records

_LAUNCH: Final = int(EventKind.LAUNCH)
_AccessHandler: TypeAlias = Callable[[AccessRows], None]

# Number of records that are decoded at a time, which limits the memory that decoding needs.
_MAX_DECODED_RECORDS: Final = 1 << 14
STRAY_ACCESS: Final = "access without a recorded launch"
UNKNOWN_STREAM: Final = "stream whose creation was not recorded"


class Engine:
    """Finds the races in the trace of one process.

    All host threads are one timeline, in the order of their calls, because locks between threads are not
    recorded; with ``strict_threads``, each thread is a separate timeline. Possible races are counted, and
    returned only with ``report_possible``. When there are more than ``prune_above`` stored states, the states
    that no race can involve any more are removed. An allocation with more than ``max_range_states`` stored
    ranges gets fewer, larger ranges. ``native`` selects the shadow memory: compiled, in Python, or if None
    compiled if that is installed.
    """

    def __init__(
        self,
        *,
        strict_threads: bool = False,
        report_possible: bool = False,
        prune_above: int = 1024,
        max_range_states: int = MAX_RANGE_STATES,
        native: bool | None = None,
    ) -> None:
        self.coverage = Coverage()
        self.gap_counts: Counter[str] = Counter()
        self._strict_threads = strict_threads
        self._report_possible = report_possible
        self._races: list[Race] = []
        # Possible races with a launch that was not recorded and may have accessed other bytes than an earlier
        # launch of the same kernel: one race for each pair of call sites. See ``take_unverified``.
        self._unverified_race_by_key: dict[tuple[int, ...], Race] = {}
        self._possible_accesses: PossibleAccesses = {}
        self._strings: Sequence[str] = ()
        self._stream_order = stream_order = StreamOrder()
        checker = ConflictChecker(self._report_conflict)
        stored = new_shadow(checker, find_possible_races=report_possible, native=native)
        self._shadow = shadow = CheckedShadow(stored, self._report_unverified)
        self._work = MemoryWork(stream_order, shadow, self.coverage, strict=strict_threads)
        self._syncs = SyncTracker(stream_order, self.gap_counts)
        self._graphs = GraphTracker(stream_order, shadow, self.coverage, self.gap_counts)
        self._collectives = CollectiveTracker(
            stream_order, shadow, self._graphs, self.coverage, self.gap_counts
        )
        self._handlers = self._all_handlers()
        self._access_handlers: dict[int, _AccessHandler] = {
            EventKind.GRAPH_NODE: self._graphs.add_node_accesses,
            EventKind.GRAPH_LAUNCH: self._graphs.add_launch_accesses,
        }
        # The function that adds the accesses of the last launch, graph node or graph launch.
        self._add_accesses: _AccessHandler = self._work.add_accesses
        self._ranges = RangeTracker()
        self._last_seq = 0
        # LaunchPrecision of the last call; None if it was not a launch.
        self._last_launch_precision: int | None = None
        # Size of the recorder's arenas in device memory, by device.
        self._arena_bytes: dict[int, int] = {}
        self._prune_above = prune_above
        self._max_range_states = max_range_states
        # The clock of the last removal of states, as ``StreamOrder.past_clock`` returns it.
        self._pruned_clock: Clock = []
        self._next_prune_count = prune_above  # number of stored states at which to prune next

    def feed(
        self,
        records: Records,
        strings: Sequence[str],
        possible_accesses: PossibleAccesses | None = None,
        graph_rows: Mapping[int, bytes] | None = None,
    ) -> list[Race]:
        """Analyze the next records of the trace; return the races whose later operation is among them.

        ``strings`` is the string table of the trace. It has at least the strings to which the records refer.
        ``possible_accesses`` has the accesses of launches that were not recorded, if they may have accessed
        other bytes than those of their template. ``graph_rows`` has the records of the accesses of each graph
        launch with a template, by call, with 0 in their common fields.
        """
        self._strings = strings
        self._possible_accesses = possible_accesses or {}
        self._graphs.template_rows = graph_rows or {}
        records = sorted_by_call(records)
        for begin in range(0, len(records), _MAX_DECODED_RECORDS):
            for thread_records in self._split_by_thread(
                records[begin : begin + _MAX_DECODED_RECORDS]
            ):
                self._analyze(RecordBatch(thread_records, self._last_seq, self._ranges))
                self._last_seq = int(thread_records["seq"][-1])
            self._prune_states()
        self._finish_graph_launch()
        races, self._races = self._races, []
        return races

    def forget_graphs(self, destroyed_graphs: Records) -> None:
        """Free the nodes of graphs that are not launched any more; takes the GraphDestroy records."""
        for graph, executable in destroyed_graphs[["graph", "executable"]].tolist():
            self._graphs.forget(graph, executable)

    def take_unverified(self) -> list[Race]:
        """Return the races with possible accesses since the last call, one for each pair of call sites."""
        races, self._unverified_race_by_key = list(self._unverified_race_by_key.values()), {}
        return races

    def _split_by_thread(self, records: Records) -> Iterator[Records]:
        """Yield consecutive records of one thread at a time, and select the thread's clock for the host.

        Unless threads are strict, yields all records at once.
        """
        if not self._strict_threads:
            yield records
            return
        threads = records["thread"]
        thread_changes = np.flatnonzero(threads[1:] != threads[:-1]) + 1
        for thread_records in np.split(records, thread_changes):
            if len(thread_records):
                self._stream_order.use_thread(int(thread_records["thread"][0]))
            yield thread_records

    def _analyze(self, batch: RecordBatch) -> None:
        """Call the handler of each call in the batch, with the accesses that follow the call."""
        handlers, access_handlers = self._handlers, self._access_handlers
        calls = batch.rows
        graphs, add_launch = self._graphs, self._work.add_launch
        possible_accesses = self._possible_accesses
        self._update_coverage(batch)
        if batch.leading_rows is not None:
            self._add_accesses(batch.leading_rows)
        for kind, rows in zip(batch.kinds, batch.following_rows, strict=True):
            if graphs.current_launch is not None:
                self._finish_graph_launch()
            if kind == _LAUNCH:  # the most frequent kind is handled without a lookup
                call = next(calls[_LAUNCH])[0]
                self._add_accesses = add_launch(call, rows)
                if call.seq in possible_accesses:
                    self._add_unrecorded(call, self._stream_order.stream(call))
                continue
            handlers[kind](*next(calls[kind]))
            if kind in access_handlers:
                self._add_accesses = access_handlers[kind]
            if rows is not None:
                self._add_accesses(rows)

    def _finish_graph_launch(self) -> None:
        """Check the accesses of the current graph launch, after all of them were added."""
        graph_launch = self._graphs.current_launch
        self._graphs.finish_launch()
        if graph_launch is not None and graph_launch.call.seq in self._possible_accesses:
            self._add_unrecorded(graph_launch.call, graph_launch.position)

    def _add_unrecorded(self, call: Call, position: ClockPosition) -> None:
        """Check and add the possible accesses of a launch that was not recorded."""
        accesses = self._possible_accesses[call.seq]
        self._shadow.add_unrecorded(call, position, accesses, self._work.innermost_at)

    def _report_unverified(self, conflict: Conflict) -> None:
        calls = conflict.previous_access.call, conflict.current_access.call
        sides = tuple(number for call in calls for number in (call.kind, call.name, call.site))
        if sides not in self._unverified_race_by_key and not are_peer_kernels(
            *calls, self._strings
        ):
            self._unverified_race_by_key[sides] = self._race(conflict)

    def _update_coverage(self, batch: RecordBatch) -> None:
        """Add the launches and accesses of a batch to the coverage."""
        coverage = self.coverage
        if batch.stray_access_count:
            self.gap_counts[STRAY_ACCESS] += batch.stray_access_count
        if (
            self._last_launch_precision is not None
            and batch.leading_precision > self._last_launch_precision
        ):
            # The last launch has less precise accesses in this batch: count the launch with the
            # precision of these accesses instead.
            coverage.count(self._last_launch_precision, -1)
            coverage.count(batch.leading_precision)
            self._last_launch_precision = batch.leading_precision
        if batch.kinds:
            self._last_launch_precision = (
                batch.launch_precisions[-1] if batch.kinds[-1] == _LAUNCH else None
            )
        coverage.launches += len(batch.launch_precisions)
        coverage.launches_without_call_site += batch.launches_without_call_site
        for launch_precision in LaunchPrecision:
            coverage.count(launch_precision, batch.launch_precisions.count(launch_precision))
        coverage.count_accesses(batch.precision_counts)

    def _report_conflict(self, conflict: Conflict) -> None:
        calls = conflict.previous_access.call, conflict.current_access.call
        if are_peer_kernels(*calls, self._strings):
            self.gap_counts[PEER_KERNELS] += 1
        elif conflict.confidence is Confidence.POSSIBLE and not self._report_possible:
            self.coverage.suspected += 1
        else:
            self._races.append(self._race(conflict))

    def _race(self, conflict: Conflict) -> Race:
        """Return the race of a conflict. Call it before later work is enqueued."""
        previous, current = conflict.previous_access, conflict.current_access
        pool_block = self._work.pool_blocks.find(conflict.lo)
        return Race(
            kind=_race_kind(previous, current, pool_block),
            confidence=conflict.confidence,
            lo=conflict.lo,
            hi=conflict.hi,
            current=_operation(current, self._strings),
            previous=_operation(previous, self._strings),
            allocation=self._work.innermost_at(conflict.lo),
            last_sync=self._stream_order.last_sync(
                current.call.stream, previous.call.stream, previous.slot
            ),
            is_approximate=conflict.is_approximate,
        )

    def _prune_states(self) -> None:
        """Remove the states that no race can involve any more, once there are many states."""
        self._stream_order.reuse_slots()
        if self._stream_order.unrecorded_stream_count:
            self.gap_counts[UNKNOWN_STREAM] = self._stream_order.unrecorded_stream_count
        if self._state_count < self._next_prune_count:
            return
        past_clock = self._stream_order.past_clock()
        if past_clock != self._pruned_clock:  # an equal clock leaves nothing to remove
            self._pruned_clock = past_clock
            self._shadow.prune(past_clock)
            self._syncs.prune()
            self._graphs.prune()
        if self._shadow.stored.range_state_count > self._max_range_states:
            self._shadow.stored.coarsen(self._work.driver_allocations.find, self._max_range_states)
        self._next_prune_count = self._prune_above + 2 * self._state_count

    @property
    def _state_count(self) -> int:
        stored = self._shadow.stored
        return (
            stored.range_state_count
            + stored.pointer_state_count
            + stored.strided_state_count
            + self._shadow.possible_count
            + len(self._syncs)
        )

    def _add_gap(self, _: Call, reason_index: int, event_count: int) -> None:
        self.gap_counts[self._strings[reason_index]] += event_count

    def _set_arena_size(self, call: Call, size_bytes: int) -> None:
        self._arena_bytes[call.device] = size_bytes
        total_bytes = sum(self._arena_bytes.values())
        self.coverage.arenas_bytes = max(self.coverage.arenas_bytes, total_bytes)

    def _all_handlers(self) -> dict[int, Callable[..., Any]]:
        """Return for each event kind the function that gets its call and the fields of its body."""
        work, order, syncs, graphs = self._work, self._stream_order, self._syncs, self._graphs
        return {
            EventKind.ALLOC: work.add_allocation,
            EventKind.FREE: work.add_free,
            EventKind.COPY: work.add_copy,
            EventKind.FILL: work.add_fill,
            EventKind.STREAM_CREATE: order.create_stream,
            EventKind.STREAM_DESTROY: order.destroy_stream,
            EventKind.EVENT_RECORD: syncs.record_event,
            EventKind.STREAM_WAIT: syncs.wait_for_event,
            EventKind.EVENT_SYNC: syncs.sync_event,
            EventKind.EVENT_QUERY_OK: syncs.sync_event,
            EventKind.STREAM_SYNC: order.sync_stream,
            EventKind.STREAM_QUERY_OK: order.sync_stream,
            EventKind.CONTEXT_SYNC: order.sync_context,
            EventKind.HOST_CALL: syncs.run_host_function,
            EventKind.CAPTURE_BEGIN: syncs.begin_capture,
            EventKind.CAPTURE_END: syncs.end_capture,
            EventKind.GRAPH_NODE: graphs.add_node,
            EventKind.GRAPH_EDGE: graphs.add_edge,
            EventKind.GRAPH_LAUNCH: graphs.add_launch,
            EventKind.MEMOP: syncs.apply_memop,
            EventKind.GAP: self._add_gap,
            EventKind.ARENAS: self._set_arena_size,
            EventKind.COMMUNICATOR: self._collectives.add_communicator,
            EventKind.COLLECTIVE: self._collectives.add_collective,
        }


def _race_kind(
    previous_access: MemoryAccess, current_access: MemoryAccess, pool_block: Allocation | None
) -> RaceKind:
    if EventKind.FREE in (previous_access.call.kind, current_access.call.kind):
        return RaceKind.USE_AFTER_FREE
    if previous_access.call.kind == EventKind.ALLOC:
        return RaceKind.USE_BEFORE_ALLOCATION
    if 0 in (previous_access.call.stream, current_access.call.stream):
        return RaceKind.HOST
    if pool_block is not None and previous_access.call.seq < pool_block.seq:
        return RaceKind.REUSE
    if not _counts_as_write(previous_access, current_access):
        return RaceKind.WRITE_AFTER_READ
    return (
        RaceKind.WRITE_AFTER_WRITE
        if _counts_as_write(current_access, previous_access)
        else RaceKind.READ_AFTER_WRITE
    )


def _counts_as_write(access: MemoryAccess, other_access: MemoryAccess) -> bool:
    """Return whether an access of a race counts as a write; ``other_access`` is the other access of the race.

    An assumed access may be a read or a write. If the other access is exact, the assumed access
    counts as a write if the exact one is a read, because one of the two must be a write.
    """
    if access.precision >= ASSUMED > other_access.precision:
        return not other_access.mode & WRITE
    return bool(access.mode & ~AccessMode.READ)


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
        program_call=call.program_call,
        capturing_call=call.capturing_call,
        mode=AccessMode(access.mode),
        precision=Precision(access.precision),
        lo=access.lo,
        hi=access.hi,
        graph=call.graph,
        node=call.node,
        ranges=tuple(
            NamedRange(strings[open_range.name], strings[open_range.domain])
            for open_range in reversed(list(call.innermost_range or ()))
        ),
        collective=call.collective,
        from_template=call.kind == EventKind.LAUNCH and call.template_id != 0,
        accessed_bytes=access.accessed_bytes,
        launch_site=call.launch_site,
    )


# --- Add the accesses of allocations, launches, copies and fills, and apply the waits that they imply ---
#
# Rules: CUDA Runtime API and CUDA Driver API, "API synchronization behavior" and "Stream Ordered Memory
# Allocator".


class Allocations:
    """The allocations of the driver, or the blocks of pools. They do not overlap each other."""

    def __init__(self) -> None:
        self._addresses: list[int] = []
        self._allocations: list[Allocation] = []

    def add(self, allocation: Allocation) -> None:
        """Add an allocation, and remove the allocations that overlap it."""
        begin = bisect_right(self._addresses, allocation.address)
        begin -= self.find(allocation.address) is not None
        end = bisect_left(self._addresses, allocation.address + allocation.size_bytes, lo=begin)
        self._addresses[begin:end] = [allocation.address]
        self._allocations[begin:end] = [allocation]

    def remove(self, address: int) -> Allocation | None:
        """Remove and return the allocation that starts at an address, or return None."""
        index = bisect_left(self._addresses, address)
        if index == len(self._addresses) or self._addresses[index] != address:
            return None
        del self._addresses[index]
        return self._allocations.pop(index)

    def find(self, address: int) -> Allocation | None:
        """Return the allocation that contains an address, or None."""
        index = bisect_right(self._addresses, address) - 1
        if index < 0:
            return None
        allocation = self._allocations[index]
        return allocation if address < allocation.address + allocation.size_bytes else None


class MemoryWork:
    """Handles allocations, frees, and the launches, copies and fills outside of graphs.

    A pool synchronizes nothing, so the shadow memory of a reused block keeps its earlier accesses. A
    stream-ordered allocation or free counts as a write, because each use of the memory must be ordered after
    the allocation and before the free (CUDA Driver API, "Stream Ordered Memory Allocator").
    """

    def __init__(
        self,
        stream_order: StreamOrder,
        shadow: CheckedShadow,
        coverage: Coverage,
        *,
        strict: bool,
    ) -> None:
        self.driver_allocations = Allocations()
        self.pool_blocks = Allocations()
        self._stream_order = stream_order
        self._shadow = shadow
        self._coverage = coverage
        self._strict = strict
        self._last_launch: Call | None = None
        # Stream of the last launch; None if it was captured.
        self._last_stream: Stream | None = None

    def innermost_at(self, address: int) -> Allocation | None:
        """Return the block of a pool that contains an address, else the driver's allocation, or None."""
        return self.pool_blocks.find(address) or self.driver_allocations.find(address)

    def add_allocation(
        self, call: Call, address: int, size_bytes: int, kind: int, layer: int
    ) -> None:
        """Add an allocation, and remove earlier accesses to its memory unless a pool reuses the memory."""
        allocation = Allocation(address, size_bytes, AllocationKind(kind), call.site, call.seq)
        if layer == AllocationLayer.POOL:
            self.pool_blocks.add(allocation)
            return
        self.driver_allocations.add(allocation)
        if kind == AllocationKind.STREAM_ORDERED:
            self._alloc_in_stream(call, address, min(address + size_bytes, ADDRESS_END))
        else:
            self._shadow.clear(address, min(address + size_bytes, ADDRESS_END))

    def add_free(self, call: Call, address: int, size_bytes: int, kind: int, layer: int) -> None:
        """Remove an allocation. ``size_bytes`` may be 0 for an allocation that was recorded."""
        if layer == AllocationLayer.POOL:
            self.pool_blocks.remove(address)
            return
        allocation = self.driver_allocations.find(address)
        hi = address + (size_bytes or (allocation.size_bytes if allocation else 0))
        hi = min(hi, ADDRESS_END)
        if kind == AllocationKind.STREAM_ORDERED:
            self._free_in_stream(call, address, hi)
            return
        if kind in (AllocationKind.SYNC, AllocationKind.PINNED, AllocationKind.MANAGED):
            self._stream_order.sync_context(call)
        self.driver_allocations.remove(address)
        self._shadow.clear(address, hi)

    def _alloc_in_stream(self, call: Call, lo: int, hi: int) -> None:
        """Add a stream-ordered allocation. The driver orders it after the free of the same memory."""
        stream = self._stream_order.enqueue(call)
        if stream is None or lo >= hi:
            return
        for release in self._shadow.stored.free_releases(lo, hi):
            stream.acquire(release, None)
        self._shadow.clear(lo, hi)
        access = MemoryAccess(stream.slot, stream.tick, call, lo, hi, WRITE, EXACT)
        self._shadow.add(access, stream.clock)

    def _free_in_stream(self, call: Call, lo: int, hi: int) -> None:
        """Add a stream-ordered free. Every later access to the memory is a race, even if it is ordered."""
        stream = self._stream_order.enqueue(call)
        if stream is None or lo >= hi:
            return
        access = MemoryAccess(stream.slot, stream.tick, call, lo, hi, WRITE, EXACT)
        self._shadow.add_free(access, stream.clock)
        call.release = stream.release()

    def add_launch(self, call: Call, rows: AccessRows | None) -> Callable[[AccessRows], None]:
        """Add a launch and its accesses; return the function that adds further accesses of it."""
        self._last_launch = call
        self._last_stream = stream = self._stream_order.enqueue(call)
        if stream is not None and rows is not None:
            self._shadow.add_all(rows, call, stream)
        return self.add_accesses

    def add_accesses(self, rows: AccessRows) -> None:
        """Add further accesses of the last launch."""
        if self._last_launch is not None and self._last_stream is not None:
            self._shadow.add_all(rows, self._last_launch, self._last_stream)

    def add_copy(
        self,
        call: Call,
        destination: int,
        source: int,
        size_bytes: int,
        rows: int,
        destination_pitch_bytes: int,
        source_pitch_bytes: int,
        direction: int,
        host_memory: int,
        asynchronous: bool,
    ) -> None:
        """Add the read and the write of a copy, before and after which the host may wait."""
        self._coverage.copies += 1
        if self._stream_order.stream(call).graph:
            return
        role = host_role(direction, host_memory, asynchronous=asynchronous, strict=self._strict)
        if role.waits_before:
            self._stream_order.sync_stream(call)
        source_rows = source, size_bytes, rows, source_pitch_bytes
        destination_rows = destination, size_bytes, rows, destination_pitch_bytes
        self._add_access(call, *source_rows, READ, is_by_host=role.reads_source)
        self._add_access(call, *destination_rows, WRITE, is_by_host=role.writes_destination)
        if role.waits_after:
            self._stream_order.sync_stream(call)

    def add_fill(
        self,
        call: Call,
        address: int,
        size_bytes: int,
        rows: int,
        pitch_bytes: int,
        asynchronous: bool,
    ) -> None:
        """Add the write of a fill, and apply the wait of the host."""
        self._coverage.fills += 1
        self._add_access(call, address, size_bytes, rows, pitch_bytes, WRITE, is_by_host=False)
        allocation = self.driver_allocations.find(address)
        kind = allocation.kind if allocation else None
        if host_waits_for_fill(kind, asynchronous=asynchronous):
            self._stream_order.sync_stream(call)

    def _add_access(
        self, call: Call, lo: int, width: int, rows: int, pitch: int, mode: int, *, is_by_host: bool
    ) -> None:
        """Add an access to rows of ``width`` bytes, by the host or in the call's stream."""
        timeline = self._stream_order.host if is_by_host else self._stream_order.enqueue(call)
        if timeline is None or width * rows <= 0:
            return
        if is_by_host:
            self._stream_order.advance_host()
            call = replace(call, stream=0)
        hi = lo + (rows - 1) * pitch + width
        if rows == 1 or pitch in (0, width):
            hi, rows, pitch = lo + width * rows, 1, 0
        if hi > ADDRESS_END:
            return  # no memory has such addresses, so the trace is damaged
        access = MemoryAccess(timeline.slot, timeline.tick, call, lo, hi, mode, EXACT)
        self._shadow.add(access, timeline.clock, pitch, rows)


class HostRole(NamedTuple):
    """The part of a copy that the host performs before the call returns."""

    waits_before: bool = False  # whether the host first waits for all work in the stream
    # whether the source is read by the host, and not in the order of the stream
    reads_source: bool = False
    # whether the destination is written by the host, and not in the order of the stream
    writes_destination: bool = False
    # whether the host waits for the stream and the copy before the call returns
    waits_after: bool = False


def host_role(
    direction: int, host_memory_kind: int, *, asynchronous: bool, strict: bool
) -> HostRole:
    """Return the part of a copy that the host performs before the call returns.

    CUDA documents that an asynchronous copy to pageable memory "might be synchronous". In practice, the host
    waits for it. With ``strict``, the host does not wait.
    """
    if direction == Direction.DEVICE_TO_DEVICE:
        return HostRole()
    if direction == Direction.HOST_TO_HOST:
        return HostRole(waits_before=True, reads_source=True, writes_destination=True)
    is_pageable = host_memory_kind == HostMemory.PAGEABLE
    if direction == Direction.HOST_TO_DEVICE and is_pageable:
        # The host has copied the source to a staging buffer; the transfer to the device may still be running.
        return HostRole(waits_before=not asynchronous, reads_source=True)
    return HostRole(waits_after=not asynchronous or (is_pageable and not strict))


def host_waits_for_fill(kind: AllocationKind | None, *, asynchronous: bool) -> bool:
    """Return whether the host waits for a fill of memory that was this kind of allocation."""
    return not asynchronous and kind in (AllocationKind.PINNED, AllocationKind.MANAGED)
