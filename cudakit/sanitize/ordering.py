"""Track happens-before between streams and the host: enqueueing, events, waits, host functions, memory words.

Rules: CUDA Runtime API, "Stream synchronization behavior" (the default streams), and CUDA Driver API, "Stream
Management" and "Event Management".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from operator import lt
from typing import Final, NamedTuple, TypeAlias

from cudakit.sanitize.races import CollectiveOperation, Sync, SyncKind
from cudakit.trace.kinds import AccessMode, HostCallPhase, MemopType, Precision, StreamFlag
from cudakit.trace.names import OpenRange

# --- Vector clocks, and the calls and accesses that they order -------------------------------------
#
# A timeline is a sequence of ordered operations: a stream, or a thread of the host. Each timeline has a slot:
# its index in all clocks. A release is a point of a timeline that other timelines can wait for; each release
# begins a new tick of its timeline. Operation A happens before operation B exactly if B's timeline has
# acquired A's tick: ``a.tick <= b_clock[a.slot]``. Clocks are never changed in place, so references to them
# can be stored.

# A clock has one tick for each slot: the last tick of the slot's timeline that happens before the operation.
Clock: TypeAlias = list[int]
# For each slot, the synchronization that set the tick of a clock; None if no synchronization did.
TickSyncs: TypeAlias = list[Sync | None]

# Tick that a timeline's clock has for the timeline itself, because its operations are ordered.
ALWAYS: Final = 1 << 62
# Tick of a stream-ordered free. No clock has a tick that is this high, so no later access is ordered after
# the free.
NEVER: Final = 1 << 63


# This class is not frozen, because that makes creation four times as slow. Instances are never changed.
@dataclass(slots=True, eq=False)
class Release:
    """A point of a timeline, with its clock. A timeline that acquires the release is ordered after it."""

    slot: int
    tick: int
    clock: Clock
    tick_syncs: TickSyncs


class Timeline:
    """A sequence of ordered operations, with the clock of the next operation."""

    __slots__ = ("_last_release", "clock", "slot", "tick", "tick_syncs")

    def __init__(self, slot: int, width: int, tick: int = 1) -> None:
        self.slot = slot
        self.tick = tick
        self.clock: Clock = [0] * width
        self.clock[slot] = ALWAYS
        self.tick_syncs: TickSyncs = [None] * width
        self._last_release: Release | None = None

    def acquire(self, release: Release, sync: Sync | None) -> bool:
        """Order this timeline after a release. Return False if this order already exists.

        ``sync`` is stored for each slot whose tick increases; if ``sync`` is None, the synchronizations
        in the release are stored.
        """
        if release.tick <= self.clock[release.slot]:
            return False
        # Most slots have the same tick in both clocks, so only the others are found and then changed.
        advanced_slots = [
            slot
            for slot, is_earlier in enumerate(map(lt, self.clock, release.clock))
            if is_earlier and slot != release.slot
        ]
        self.clock, self.tick_syncs = self.clock.copy(), self.tick_syncs.copy()
        for slot in advanced_slots:
            self.clock[slot] = release.clock[slot]
            self.tick_syncs[slot] = sync or release.tick_syncs[slot]
        self.clock[release.slot] = release.tick
        self.tick_syncs[release.slot] = sync or release.tick_syncs[release.slot]
        return True

    def snapshot(self) -> Release:
        """Return the current clock as a release of the current tick."""
        return Release(self.slot, self.tick, self.clock, self.tick_syncs)

    def widen(self, width: int) -> None:
        """Extend the clock to ``width`` slots."""
        new_slot_count = width - len(self.clock)
        self.clock = self.clock + [0] * new_slot_count
        self.tick_syncs = self.tick_syncs + [None] * new_slot_count


# The slot, the tick and the clock of an operation.
ClockPosition: TypeAlias = Timeline | Release


# Plain integers are faster to compare than enumerations, and the kinds below are compared for every
# record.
READ: Final = int(AccessMode.READ)
WRITE: Final = int(AccessMode.WRITE)
ATOMIC: Final = int(AccessMode.ATOMIC)
MERGED: Final = int(Precision.MERGED)
EXACT: Final = int(Precision.EXACT)
SUMMARY: Final = int(Precision.SUMMARY)
ASSUMED: Final = int(Precision.ASSUMED)
UNCERTAIN: Final = int(Precision.UNCERTAIN)


# `Call` and `MemoryAccess` are not frozen: frozen instances take four times as long to create, and each
# launch creates instances of both.
@dataclass(slots=True, eq=False)
class Call:
    """A CUDA call that enqueued work. All numbers are those of the trace."""

    seq: int
    kind: int  # value of an EventKind
    name: int  # index of the kernel's name in the string table
    stream: int  # number of the stream; 0 is the host
    context: int
    device: int
    thread: int
    site: int  # index of the call stack in the stack table
    # Number of the program call (``sanitize.owners``); 0 if it is unknown.
    program_call: int = 0
    innermost_range: OpenRange | None = None  # the innermost NVTX range that was open at the call
    template_id: int = 0  # template that has the accesses of the launch; 0 if they were recorded
    graph: int = 0  # number of the graph that has the node; 0 outside of graphs
    node: int = 0  # number of the graph node; 0 outside of graphs
    capturing_call: int = 0  # number of the program call that captured the graph node; 0 if unknown
    # The release of a stream-ordered free: the driver orders the next allocation of the memory after it.
    release: Release | None = None
    collective: CollectiveOperation | None = None  # the collective of the call, or None
    launch_site: int = 0  # call stack of the graph launch; 0 outside of graphs

    def in_launch(self, launch: Call) -> Call:
        """Return the call that added a graph node as a part of a launch of the graph."""
        # The record of a captured node has no context; the node then runs in that of the launch.
        context_call = self if self.context else launch
        return replace(
            self,
            seq=launch.seq,
            stream=launch.stream,
            context=context_call.context,
            device=context_call.device,
            site=self.site or launch.site,
            launch_site=launch.site,
            program_call=launch.program_call,
            capturing_call=self.program_call,
            innermost_range=launch.innermost_range,
            template_id=launch.template_id,
        )


@dataclass(slots=True, eq=False)
class MemoryAccess:
    """An access of a call to the bytes from ``lo`` up to ``hi``, at a tick of the call's timeline."""

    slot: int
    tick: int
    call: Call
    lo: int
    hi: int
    mode: int  # value of an AccessMode
    precision: int  # value of a Precision
    accessed_bytes: int = 0  # number of accessed bytes of a strided access; 0 for other accesses


_BLOCKING_FLAGS: Final = (StreamFlag.BLOCKING, StreamFlag.PER_THREAD)
# Clock version of a stream whose clock is outdated; less than any current version.
_OUTDATED_VERSION: Final = -1
# Minimum number of destroyed streams at which a new stream causes a search for slots that can be reused.
_MIN_DESTROYED_STREAMS: Final = 32


@dataclass(slots=True)
class ContextStreams:
    """The streams of one CUDA context."""

    legacy_stream: Stream | None = None
    blocking_streams: list[Stream] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)  # all of them

    def remove(self, stream: Stream) -> None:
        self.streams.remove(stream)
        if stream is self.legacy_stream:
            self.legacy_stream = None
        elif stream in self.blocking_streams:
            self.blocking_streams.remove(stream)


class Stream(Timeline):
    """The timeline of a stream.

    ``clock_version`` is the version of the order (``StreamOrder.current_version``) at the last clock update.
    """

    __slots__ = (
        "clock_version",
        "context",
        "first_tick",
        "flag",
        "graph",
        "number",
        "wait_before_first_use",
    )

    def __init__(
        self,
        stream_number: int,
        flag: StreamFlag,
        context: ContextStreams,
        *,
        slot: int,
        width: int,
        tick: int,
    ) -> None:
        super().__init__(slot, width, tick)
        self.number = stream_number
        self.flag = flag
        self.context = context
        self.first_tick = tick  # earlier ticks belong to a destroyed stream with the same slot
        self.clock_version = _OUTDATED_VERSION
        self.graph = 0  # number of the graph into which work is captured; 0 if it is not captured
        self.wait_before_first_use: HostWait | None = None

    def release(self) -> Release:
        """Return a release of all enqueued work. The next operation has a greater tick."""
        if self.clock_version != _OUTDATED_VERSION or self._last_release is None:
            self._last_release = self.snapshot()
            self.tick += 1
            self.clock_version = _OUTDATED_VERSION
        return self._last_release


class HostWait(NamedTuple):
    """A wait of the host for a stream without work, which orders nothing. Reports of races mention it."""

    sync: Sync
    slot: int  # slot of the host thread
    tick: int  # tick of the host thread that began with the wait


@dataclass(slots=True)
class UnusedStream:
    """A non-blocking stream without work.

    It has no slot: PyTorch and JAX create dozens of streams that they never use, and the time to update a
    clock is proportional to the number of slots.
    """

    context: int
    first_wait: HostWait | None = None  # the first wait of the host for the stream


class StreamOrder:
    """The clocks of all streams and of the host.

    ``current_version`` is increased whenever the clock of any stream may be outdated. The clock of a stream
    is up to date if its ``clock_version`` equals ``current_version``.
    """

    def __init__(self) -> None:
        self.current_version = 0
        self.unrecorded_stream_count = 0  # number of streams whose creation was not recorded
        self._clock_width = 8
        self._slot_count = 1
        # Slots of removed streams, with their next ticks.
        self._free_slots: list[tuple[int, int]] = []
        self._streams: dict[int, Stream] = {}
        self._unused_streams: dict[int, UnusedStream] = {}
        self._contexts: dict[int, ContextStreams] = {}
        self._destroyed_streams: list[Stream] = []
        # Number of destroyed streams at which a new stream causes the next search for slots.
        self._next_search_count = _MIN_DESTROYED_STREAMS
        self.host = Timeline(0, self._clock_width)
        self._host_timelines = [self.host]
        self._thread_timelines: dict[int, Timeline] = {}

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._streams.values())

    def has_stream(self, stream_number: int) -> bool:
        return stream_number in self._streams or stream_number in self._unused_streams

    def stream(self, call: Call) -> Stream:
        """Return the stream of a call. A stream whose creation was not recorded counts as blocking."""
        stream = self._streams.get(call.stream)
        if stream is None and (unused_stream := self._unused_streams.pop(call.stream, None)):
            stream = self._add_stream(call.stream, StreamFlag.NON_BLOCKING, unused_stream.context)
            stream.wait_before_first_use = unused_stream.first_wait
        if stream is None:
            self.unrecorded_stream_count += 1
            stream = self._add_stream(call.stream, StreamFlag.BLOCKING, call.context)
        return stream

    def enqueue(self, call: Call) -> Stream | None:
        """Return the stream of a call, with its clock up to date, or None if the work is captured."""
        stream = self._streams.get(call.stream) or self.stream(call)
        if stream.clock_version != self.current_version:
            if stream.graph:
                return None
            self._update_clock(stream, call)
        return stream

    def create_stream(self, call: Call, flag: int) -> None:
        """Add a stream, unless its creation was recorded before."""
        if self.has_stream(call.stream):
            return
        if flag == StreamFlag.NON_BLOCKING:
            self._unused_streams[call.stream] = UnusedStream(call.context)
        else:
            self._add_stream(call.stream, StreamFlag(flag), call.context)

    def _add_stream(self, stream_number: int, flag: StreamFlag, context: int) -> Stream:
        """Add a stream with a slot."""
        if not self._free_slots and len(self._destroyed_streams) >= self._next_search_count:
            self.reuse_slots()
            remaining_count = len(self._destroyed_streams)
            self._next_search_count = max(_MIN_DESTROYED_STREAMS, 2 * remaining_count)
        slot, tick = self._free_slots.pop() if self._free_slots else (self._new_slot(), 1)
        context_streams = self._contexts.setdefault(context, ContextStreams())
        width = self._clock_width
        stream = Stream(stream_number, flag, context_streams, slot=slot, width=width, tick=tick)
        self._streams[stream_number] = stream
        context_streams.streams.append(stream)
        if flag is StreamFlag.LEGACY:
            context_streams.legacy_stream = stream
        elif flag in _BLOCKING_FLAGS:
            context_streams.blocking_streams.append(stream)
        return stream

    def destroy_stream(self, call: Call) -> None:
        """Mark a stream as destroyed. Its enqueued work continues, and streams may wait for it."""
        self._unused_streams.pop(call.stream, None)
        stream = self._streams.get(call.stream)
        if stream is not None and stream not in self._destroyed_streams:
            stream.release()
            self._destroyed_streams.append(stream)

    def use_thread(self, thread: int) -> None:
        """Attribute the calls from now on to one host thread, which has a separate clock."""
        if not self._thread_timelines:
            self._thread_timelines[thread] = self.host
        if thread not in self._thread_timelines:
            self._thread_timelines[thread] = Timeline(self._new_slot(), self._clock_width)
            for host_thread in self._host_timelines:  # one of them started the new thread
                self._thread_timelines[thread].acquire(host_thread.snapshot(), None)
            self._host_timelines.append(self._thread_timelines[thread])
        self.host = self._thread_timelines[thread]
        self.current_version += 1

    def host_acquires(self, release: Release, call: Call, sync: Sync | None = None) -> None:
        """Order the host after a release, because ``call`` waits for it.

        ``sync`` is the synchronization to report; if it is None, ``call`` alone is reported.
        """
        if release.tick > self.host.clock[release.slot]:
            self.host.acquire(release, sync or _single_call(SyncKind.HOST, call))
            self.advance_host()

    def advance_host(self) -> None:
        """Begin another tick of the host, because its clock has changed or the host accesses memory."""
        self.host.tick += 1
        self.current_version += 1

    def sync_stream(self, call: Call) -> None:
        """Order the host after the stream of a call.

        If this is the legacy default stream, order the host also after all blocking streams.
        """
        if call.stream in self._unused_streams:
            self._wait_for_unused(self._unused_streams[call.stream], call)
            return
        stream = self.stream(call)
        if stream.flag is StreamFlag.LEGACY:
            for blocking_stream in stream.context.blocking_streams:
                self.host_acquires(blocking_stream.release(), call)
        self.host_acquires(stream.release(), call)

    def sync_context(self, call: Call) -> None:
        """Order the host after all streams of the context of a call."""
        context = self._contexts.get(call.context)
        for stream in context.streams if context else ():
            self.host_acquires(stream.release(), call)
        for unused_stream in self._unused_streams.values():
            if unused_stream.context == call.context:
                self._wait_for_unused(unused_stream, call)

    def reuse_slots(self) -> None:
        """Free the slots of destroyed streams whose work happens before all host threads."""
        for stream in self._destroyed_streams.copy():
            if self.precedes_future_work(stream.slot, stream.tick - 1):
                self._destroyed_streams.remove(stream)
                self._streams.pop(stream.number, None)
                stream.context.remove(stream)
                self._free_slots.append((stream.slot, stream.tick))

    def precedes_future_work(self, slot: int, tick: int) -> bool:
        """Return whether all work enqueued from now on happens after a tick."""
        return all(tick <= host.clock[slot] for host in self._host_timelines)

    def past_clock(self) -> Clock:
        """Return for each slot the last tick that all work enqueued from now on happens after."""
        return list(map(min, zip(*(host.clock for host in self._host_timelines), strict=True)))

    def last_sync(self, later_number: int, earlier_number: int, slot: int) -> Sync | None:
        """Return the last synchronization that ordered a stream after work of an earlier stream, or None.

        ``slot`` is the slot of the earlier stream.
        """
        later_timeline = self._streams.get(later_number, self.host)
        earlier_stream = self._streams.get(earlier_number)
        if earlier_stream is None:
            return None
        if later_timeline.clock[slot] >= earlier_stream.first_tick:
            return later_timeline.tick_syncs[slot]
        early_wait = earlier_stream.wait_before_first_use
        if early_wait is not None and later_timeline.clock[early_wait.slot] >= early_wait.tick:
            return early_wait.sync
        return None

    def _wait_for_unused(self, unused_stream: UnusedStream, call: Call) -> None:
        """Store the first wait of the host for a stream without work."""
        if unused_stream.first_wait is None:
            self.advance_host()
            sync = _single_call(SyncKind.HOST, call)
            unused_stream.first_wait = HostWait(sync, self.host.slot, self.host.tick)

    def _update_clock(self, stream: Stream, call: Call) -> None:
        """Order the next work of a stream after the host, and after streams that it waits for implicitly.

        The legacy default stream waits for all blocking streams, and a blocking stream waits for
        the legacy default stream. The awaited streams begin a new tick, so that their clocks are
        updated again.
        """
        host, context = self.host, stream.context
        if host.tick > stream.clock[host.slot]:
            stream.acquire(host.snapshot(), None)
        awaited_streams: list[Stream] = []
        if stream.flag is StreamFlag.LEGACY:
            awaited_streams = context.blocking_streams
        elif stream.flag in _BLOCKING_FLAGS and context.legacy_stream is not None:
            awaited_streams = [context.legacy_stream]
        for awaited_stream in awaited_streams:
            release = awaited_stream.release()
            if release.tick > stream.clock[awaited_stream.slot]:
                stream.acquire(release, _single_call(SyncKind.DEFAULT_STREAM, call))
        stream.clock_version = self.current_version

    def _new_slot(self) -> int:
        slot = self._slot_count
        self._slot_count += 1
        if self._slot_count > self._clock_width:
            self._clock_width *= 2
            for timeline in (*self._streams.values(), *self._host_timelines):
                timeline.widen(self._clock_width)
        return slot


def _single_call(kind: SyncKind, call: Call) -> Sync:
    """Return a synchronization by one call that both records and waits, such as a wait of the host."""
    return Sync(kind, call.seq, call.site, call.seq, call.site)


UNKNOWN_WORD = "wait for a memory word that no recorded operation wrote"


class Signal(NamedTuple):
    """A release that other streams can wait for: an event record, or a write of a memory word."""

    release: Release
    seq: int  # number of the call that made the release
    site: int  # index of the call stack of the call that made the release

    def sync(self, kind: SyncKind, call: Call) -> Sync:
        """Return the synchronization by a call that waits for the release."""
        return Sync(kind, self.seq, self.site, call.seq, call.site)


class SyncTracker:
    """Handles events, waits, host functions, stream capture and memory words.

    A wait for an event that was never recorded has no effect (CUDA Driver API, cuStreamWaitEvent).
    """

    def __init__(self, stream_order: StreamOrder, gap_counts: Counter[str]) -> None:
        self._stream_order = stream_order
        self._gap_counts = gap_counts
        self._events: dict[int, Signal] = {}  # the last record of each event
        # For each event whose last record was captured, the graph into which it was captured.
        self._captured_events: dict[int, int] = {}
        # The writes of each memory word, by address and by the slot of the stream that wrote it.
        self._memory_words: dict[int, dict[int, Signal]] = {}

    def __len__(self) -> int:
        return len(self._events) + len(self._memory_words)

    def record_event(self, call: Call, event: int) -> None:
        """Record an event on a stream. If the stream is captured, store the graph of the event."""
        stream = self._stream_order.enqueue(call)
        if stream is None:
            self._captured_events[event] = self._stream_order.stream(call).graph
            self._events.pop(event, None)
        else:
            self._captured_events.pop(event, None)
            self._events[event] = Signal(stream.release(), call.seq, call.site)

    def wait_for_event(self, call: Call, event: int) -> None:
        """Order a stream after an event. A wait for a captured event captures the stream, too."""
        if event in self._captured_events:
            self.begin_capture(call, self._captured_events[event])
        elif stream := self._stream_order.enqueue(call):
            _wait_for_signal(stream, self._events.get(event), call)

    def sync_event(self, call: Call, event: int) -> None:
        signal = self._events.get(event)
        if signal is not None:
            self._stream_order.host_acquires(signal.release, call)

    def run_host_function(self, call: Call, phase: int, event: int) -> None:
        """Order a host function after the work before it, and the stream's next work after the function.

        ``event`` was recorded in the stream before the function was enqueued, so it covers the work
        before the function. It is 0 in older traces: then all work of the stream counts as work before it.
        """
        if phase == HostCallPhase.END:
            self._events.pop(event, None)  # no other call waits for this event
            if self._stream_order.has_stream(call.stream):  # the stream may have been destroyed
                self._stream_order.enqueue(call)
        elif event:
            if signal := self._events.get(event):
                sync = signal.sync(SyncKind.HOST, call)
                self._stream_order.host_acquires(signal.release, call, sync)
        else:
            self._stream_order.sync_stream(call)

    def begin_capture(self, call: Call, graph: int) -> None:
        """Capture the later work of a stream into a graph."""
        stream = self._stream_order.stream(call)
        stream.release()
        stream.graph = graph

    def end_capture(self, _: Call, graph: int) -> None:
        for stream in self._stream_order:
            if stream.graph == graph:
                stream.graph = 0
        self._captured_events = {
            event: event_graph
            for event, event_graph in self._captured_events.items()
            if event_graph != graph
        }

    def apply_memop(self, call: Call, address: int, flag: int) -> None:
        """Write a memory word after the stream's work, or make the stream wait for the writes of a word."""
        stream = self._stream_order.enqueue(call)
        if stream is None:
            return
        if flag == MemopType.WRITE:
            signal = Signal(stream.release(), call.seq, call.site)
            self._memory_words.setdefault(address, {})[stream.slot] = signal
        elif address in self._memory_words:
            for signal in self._memory_words[address].values():
                _wait_for_signal(stream, signal, call)
        else:  # any other stream may write the word
            self._gap_counts[UNKNOWN_WORD] += 1
            for other_stream in self._stream_order:
                if other_stream is not stream:
                    signal = Signal(other_stream.release(), call.seq, call.site)
                    _wait_for_signal(stream, signal, call)

    def prune(self) -> None:
        """Remove the releases that happen before all future work."""
        precedes_future_work = self._stream_order.precedes_future_work
        self._events = {
            event: signal
            for event, signal in self._events.items()
            if not precedes_future_work(signal.release.slot, signal.release.tick)
        }
        # The address of a word stays, so that a wait for it is not counted as a wait for an unwritten word.
        for address, signal_by_slot in self._memory_words.items():
            self._memory_words[address] = {
                slot: signal
                for slot, signal in signal_by_slot.items()
                if not precedes_future_work(slot, signal.release.tick)
            }


def _wait_for_signal(stream: Stream, signal: Signal | None, call: Call) -> None:
    if signal is not None and signal.release.tick > stream.clock[signal.release.slot]:
        stream.acquire(signal.release, signal.sync(SyncKind.EVENT, call))
