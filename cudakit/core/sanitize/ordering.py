"""Track happens-before between streams and the host: enqueueing, events, waits, callbacks, memory words.

Rules: CUDA Runtime API, "Stream synchronization behavior" (the default streams), and CUDA Driver API, "Stream
Management" and "Event Management".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple

from cudakit.core.sanitize.clocks import Call, Release, Timeline
from cudakit.core.sanitize.races import Sync, SyncKind
from cudakit.trace.kinds import HostCallPhase, MemopType, StreamFlag

_BLOCKING: Final = (StreamFlag.BLOCKING, StreamFlag.PER_THREAD)
_RELEASED: Final = -1  # less than any version of the order


class Context:
    """The streams of one context."""

    __slots__ = ("blocking", "legacy", "streams")

    def __init__(self) -> None:
        self.legacy: Stream | None = None
        self.blocking: list[Stream] = []
        self.streams: list[Stream] = []

    def add(self, stream: Stream) -> None:
        self.streams.append(stream)
        if stream.flag is StreamFlag.LEGACY:
            self.legacy = stream
        elif stream.flag in _BLOCKING:
            self.blocking.append(stream)

    def remove(self, stream: Stream) -> None:
        self.streams.remove(stream)
        if stream is self.legacy:
            self.legacy = None
        elif stream in self.blocking:
            self.blocking.remove(stream)


class Stream(Timeline):
    """A stream. ``seen`` is the version of the order that its clock includes."""

    __slots__ = ("context", "first_tick", "flag", "graph", "number", "seen")

    def __init__(
        self, number: int, flag: StreamFlag, context: Context, *, slot: int, width: int, tick: int
    ) -> None:
        super().__init__(slot, width, tick)
        self.number = number
        self.flag = flag
        self.context = context
        self.first_tick = tick  # earlier ticks belong to a destroyed stream with the same slot
        self.seen = _RELEASED
        self.graph = 0  # the graph that its work is captured into; 0: not captured

    def release(self) -> Release:
        """Return a release of all enqueued work; the next operation gets another tick."""
        if self.seen != _RELEASED or self._last is None:
            self._last = self.snapshot()
            self.tick += 1
            self.seen = _RELEASED
        return self._last


class StreamOrder:
    """The clocks of all streams and of the host.

    ``version`` changes whenever the clock of any stream may be outdated. The clock of a stream is up to date
    if its ``seen`` equals ``version``.
    """

    def __init__(self) -> None:
        self.version = 0
        self.unseen_streams = 0  # streams whose creation was not recorded
        self._width = 8
        self._slots = 1
        self._free: list[tuple[int, int]] = []  # slots of removed streams, with their next ticks
        self._streams: dict[int, Stream] = {}
        self._contexts: dict[int, Context] = {}
        self._destroyed: list[Stream] = []
        self.host = Timeline(0, self._width)
        self._hosts = [self.host]
        self._threads: dict[int, Timeline] = {}

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._streams.values())

    def has(self, number: int) -> bool:
        return number in self._streams

    def stream(self, call: Call) -> Stream:
        """Return the stream of a call; one whose creation was not recorded counts as blocking."""
        stream = self._streams.get(call.stream)
        if stream is None:
            self.unseen_streams += 1
            stream = self.create(call.stream, StreamFlag.BLOCKING, call.context)
        return stream

    def enqueue(self, call: Call) -> Stream | None:
        """Return the stream of a call, its clock up to date; None if the work is captured."""
        stream = self._streams.get(call.stream) or self.stream(call)
        if stream.seen != self.version:
            if stream.graph:
                return None
            self._update_clock(stream, call)
        return stream

    def create(self, number: int, flag: StreamFlag, context: int) -> Stream:
        """Add a stream."""
        slot, tick = self._free.pop() if self._free else (self._new_slot(), 1)
        owner = self._contexts.setdefault(context, Context())
        stream = Stream(number, flag, owner, slot=slot, width=self._width, tick=tick)
        self._streams[number] = stream
        owner.add(stream)
        return stream

    def capture(self, stream: Stream, graph: int) -> None:
        """Capture the later work of a stream into a graph."""
        stream.release()
        stream.graph = graph

    def destroy(self, stream: Stream) -> None:
        """Mark a stream as destroyed; its work continues, and others may still be ordered after it."""
        if stream not in self._destroyed:
            stream.release()
            self._destroyed.append(stream)

    def use_thread(self, thread: int) -> None:
        """Attribute the following calls to one host thread, with a clock of its own."""
        if not self._threads:
            self._threads[thread] = self.host
        if thread not in self._threads:
            self._threads[thread] = Timeline(self._new_slot(), self._width)
            for known in self._hosts:  # a known thread started the new one
                self._threads[thread].acquire(known.snapshot(), None)
            self._hosts.append(self._threads[thread])
        self.host = self._threads[thread]
        self.version += 1

    def host_acquires(self, release: Release, call: Call) -> None:
        """Order the host after a release, by a call that waits."""
        if release.tick > self.host.past[release.slot]:
            self.host.acquire(release, _single_call(SyncKind.HOST, call))
            self.advance_host()

    def advance_host(self) -> None:
        """Begin another tick of the host, because its clock grew or it accesses memory itself."""
        self.host.tick += 1
        self.version += 1

    def sync_stream(self, stream: Stream, call: Call) -> None:
        """Order the host after a stream; for the legacy default stream, after all blocking streams too."""
        if stream.flag is StreamFlag.LEGACY:
            for other in stream.context.blocking:
                self.host_acquires(other.release(), call)
        self.host_acquires(stream.release(), call)

    def sync_context(self, call: Call) -> None:
        """Order the host after all streams of the context of a call."""
        context = self._contexts.get(call.context)
        for stream in context.streams if context else ():
            self.host_acquires(stream.release(), call)

    def reuse_slots(self) -> None:
        """Free the slots of destroyed streams whose work happens before all host threads."""
        for stream in [
            gone for gone in self._destroyed if self.precedes_future(gone.slot, gone.tick - 1)
        ]:
            self._destroyed.remove(stream)
            self._streams.pop(stream.number, None)
            stream.context.remove(stream)
            self._free.append((stream.slot, stream.tick))

    def precedes_future(self, slot: int, tick: int) -> bool:
        """Return whether all work enqueued from now on happens after a tick."""
        return all(tick <= host.past[slot] for host in self._hosts)

    def last_sync(self, later: int, earlier: int, slot: int) -> Sync | None:
        """Return the last synchronization that ordered one stream after work of another, or None."""
        timeline = self._streams.get(later, self.host)
        other = self._streams.get(earlier)
        known = other is not None and timeline.past[slot] >= other.first_tick
        return timeline.reasons[slot] if known else None

    def _update_clock(self, stream: Stream, call: Call) -> None:
        """Order the next work of a stream after the host, and after streams that it waits for implicitly.

        Those are the legacy default stream or, if the stream is that one, all blocking streams. They get a
        new tick, so their own next work comes through here again.
        """
        host, context = self.host, stream.context
        if host.tick > stream.past[host.slot]:
            stream.acquire(host.snapshot(), None)
        others: list[Stream] = []
        if stream.flag is StreamFlag.LEGACY:
            others = context.blocking
        elif stream.flag in _BLOCKING and context.legacy is not None:
            others = [context.legacy]
        for other in others:
            release = other.release()
            if release.tick > stream.past[other.slot]:
                stream.acquire(release, _single_call(SyncKind.DEFAULT_STREAM, call))
        stream.seen = self.version

    def _new_slot(self) -> int:
        slot = self._slots
        self._slots += 1
        if self._slots > self._width:
            self._width *= 2
            for timeline in (*self._streams.values(), *self._hosts):
                timeline.widen(self._width)
        return slot


def _single_call(kind: SyncKind, call: Call) -> Sync:
    """Return a synchronization in which one call both releases and waits."""
    return Sync(kind, call.seq, call.site, call.seq, call.site)


UNKNOWN_WORD = "wait for a memory word that no recorded operation wrote"


class Signal(NamedTuple):
    """A release to wait for, and the call that made it: an event record, or a write of a memory word."""

    release: Release
    seq: int
    site: int

    def reason(self, call: Call) -> Sync:
        """Return the synchronization by a call that waits for the release."""
        return Sync(SyncKind.EVENT, self.seq, self.site, call.seq, call.site)


class SyncTracker:
    """Events, waits, host functions and memory words.

    A wait for an event that was never recorded does nothing (CUDA Driver API, ``cuStreamWaitEvent``).
    """

    def __init__(self, order: StreamOrder, gaps: Counter[str]) -> None:
        self._order = order
        self._gaps = gaps
        self._events: dict[int, Signal] = {}
        self._captured: dict[
            int, int
        ] = {}  # by event: the graph into which its last record was captured
        self._words: dict[int, dict[int, Signal]] = {}  # by address, then by slot

    def __len__(self) -> int:
        return len(self._events) + len(self._words)

    def create_stream(self, call: Call, flag: int) -> None:
        if not self._order.has(call.stream):
            self._order.create(call.stream, StreamFlag(flag), call.context)

    def destroy_stream(self, call: Call) -> None:
        if self._order.has(call.stream):
            self._order.destroy(self._order.stream(call))

    def record(self, call: Call, event: int) -> None:
        stream = self._order.enqueue(call)
        if stream is None:
            self._captured[event] = self._order.stream(call).graph
            self._events.pop(event, None)
        else:
            self._captured.pop(event, None)
            self._events[event] = Signal(stream.release(), call.seq, call.site)

    def wait(self, call: Call, event: int) -> None:
        if event in self._captured:
            self._order.capture(self._order.stream(call), self._captured[event])
        elif stream := self._order.enqueue(call):
            _wait_for(stream, self._events.get(event), call)

    def sync_event(self, call: Call, event: int) -> None:
        signal = self._events.get(event)
        if signal is not None:
            self._order.host_acquires(signal.release, call)

    def sync_stream(self, call: Call) -> None:
        self._order.sync_stream(self._order.stream(call), call)

    def sync_context(self, call: Call) -> None:
        self._order.sync_context(call)

    def host_call(self, call: Call, phase: int) -> None:
        """Order a host function after the stream's work, and the stream's next work after its end."""
        if phase == HostCallPhase.BEGIN:
            self.sync_stream(call)
        else:
            self._order.enqueue(call)

    def capture_begin(self, call: Call, graph: int) -> None:
        self._order.capture(self._order.stream(call), graph)

    def capture_end(self, _: Call, graph: int) -> None:
        for stream in self._order:
            if stream.graph == graph:
                stream.graph = 0
        self._captured = {event: g for event, g in self._captured.items() if g != graph}

    def memop(self, call: Call, address: int, flag: int) -> None:
        """Write a memory word after the stream's work, or wait for the streams that wrote it."""
        stream = self._order.enqueue(call)
        if stream is None:
            return
        if flag == MemopType.WRITE:
            signal = Signal(stream.release(), call.seq, call.site)
            self._words.setdefault(address, {})[stream.slot] = signal
        elif address in self._words:
            for signal in self._words[address].values():
                _wait_for(stream, signal, call)
        else:
            self._wait_for_anything(stream, call)

    def prune(self) -> None:
        """Remove releases that all future work is ordered after anyway."""
        known = self._order.precedes_future
        self._events = {
            event: signal
            for event, signal in self._events.items()
            if not known(signal.release.slot, signal.release.tick)
        }
        # The address stays: a wait for a word that was written is not a gap.
        for address, signals in self._words.items():
            self._words[address] = {
                slot: signal
                for slot, signal in signals.items()
                if not known(slot, signal.release.tick)
            }

    def _wait_for_anything(self, stream: Stream, call: Call) -> None:
        """Order a stream after all others, since any of them may write the word."""
        self._gaps[UNKNOWN_WORD] += 1
        for other in self._order:
            if other is not stream:
                _wait_for(stream, Signal(other.release(), call.seq, call.site), call)


def _wait_for(stream: Stream, signal: Signal | None, call: Call) -> None:
    if signal is not None and signal.release.tick > stream.past[signal.release.slot]:
        stream.acquire(signal.release, signal.reason(call))
