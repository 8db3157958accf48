"""What orders streams and the host: enqueueing, events, waits, host callbacks and words in memory.

CUDA Runtime API, "Stream synchronization behavior" (the default streams), and CUDA Driver API, "Stream
Management" and "Event Management".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple

from cudakit.core.sanitize.clocks import Call, Release, Timeline
from cudakit.core.sanitize.races import Sync, SyncKind
from cudakit.trace.kinds import Flag, Phase, StreamFlag

_BLOCKING: Final = (StreamFlag.BLOCKING, StreamFlag.PER_THREAD)
_RELEASED: Final = -1  # a version of the order that never is


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
    """A stream. ``seen`` is the version of the order in which its next operation need not wait for more."""

    __slots__ = ("context", "first_tick", "flag", "graph", "number", "seen")

    def __init__(
        self, number: int, flag: StreamFlag, context: Context, *, slot: int, width: int, tick: int
    ) -> None:
        super().__init__(slot, width, tick)
        self.number = number
        self.flag = flag
        self.context = context
        self.first_tick = tick  # earlier ones are of another stream that had the slot
        self.seen = _RELEASED
        self.graph = 0  # that the stream is being captured into

    def release(self) -> Release:
        """Return all that is in the stream by now; the next operation has another tick."""
        if self.seen != _RELEASED or self._last is None:
            self._last = self.snapshot()
            self.tick += 1
            self.seen = _RELEASED
        return self._last


class Order:
    """What orders streams and the host, call by call.

    ``version`` changes when some stream may have more to wait for: one that has ``seen`` it has not.
    """

    def __init__(self) -> None:
        self.version = 0
        self.made_up = 0  # streams that were not seen to be made
        self._width = 8
        self._slots = 1
        self._free: list[tuple[int, int]] = []  # slots whose stream is gone, and their next tick
        self._streams: dict[int, Stream] = {}
        self._contexts: dict[int, Context] = {}
        self._gone: list[Stream] = []
        self.host = Timeline(0, self._width)
        self._hosts = [self.host]
        self._threads: dict[int, Timeline] = {}

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._streams.values())

    def has(self, number: int) -> bool:
        return number in self._streams

    def stream(self, call: Call) -> Stream:
        """Return the stream of a call; one that was not seen to be made counts as a blocking one."""
        found = self._streams.get(call.stream)
        if found is None:
            self.made_up += 1
            found = self.create(call.stream, StreamFlag.BLOCKING, call.context)
        return found

    def enqueue(self, call: Call) -> Stream | None:
        """Return the stream of a call, ready for what the call enqueues; None where that is captured."""
        stream = self._streams.get(call.stream) or self.stream(call)
        if stream.seen != self.version:
            if stream.graph:
                return None
            self._enter(stream, call)
        return stream

    def create(self, number: int, flag: StreamFlag, context: int) -> Stream:
        """Add a stream, which comes after all that the host knows of."""
        slot, tick = self._free.pop() if self._free else (self._new_slot(), 1)
        owner = self._contexts.setdefault(context, Context())
        stream = Stream(number, flag, owner, slot=slot, width=self._width, tick=tick)
        self._streams[number] = stream
        owner.add(stream)
        return stream

    def capture(self, stream: Stream, graph: int) -> None:
        """Let what comes next in a stream be captured."""
        stream.release()
        stream.graph = graph

    def destroy(self, stream: Stream) -> None:
        """Take no more work; what the stream has goes on, and others may still come after it."""
        if stream not in self._gone:
            stream.release()
            self._gone.append(stream)

    def act_as(self, thread: int) -> None:
        """Let the calls that follow be those of one host thread, with a clock of its own."""
        if not self._threads:
            self._threads[thread] = self.host
        if thread not in self._threads:
            self._threads[thread] = Timeline(self._new_slot(), self._width)
            for known in self._hosts:  # among them is the thread that started it
                self._threads[thread].acquire(known.snapshot(), None)
            self._hosts.append(self._threads[thread])
        self.host = self._threads[thread]
        self.version += 1

    def host_acquires(self, release: Release, call: Call) -> None:
        """Let the host wait, by a call, for something to be done."""
        if release.tick > self.host.past[release.slot]:
            self.host.acquire(release, _at_once(SyncKind.HOST, call))
            self.host_moves_on()

    def host_moves_on(self) -> None:
        """Begin another tick of the host: it knows of more, or does something itself."""
        self.host.tick += 1
        self.version += 1

    def host_waits_for(self, stream: Stream, call: Call) -> None:
        """Let the host wait for a stream; the legacy default stream waits for the blocking ones first."""
        if stream.flag is StreamFlag.LEGACY:
            for other in stream.context.blocking:
                self.host_acquires(other.release(), call)
        self.host_acquires(stream.release(), call)

    def host_waits_for_context(self, call: Call) -> None:
        """Let the host wait for all streams of the context of a call."""
        context = self._contexts.get(call.context)
        for stream in context.streams if context else ():
            self.host_acquires(stream.release(), call)

    def forget_gone(self) -> None:
        """Give away the slots of destroyed streams whose work all hosts know to be done."""
        for stream in [gone for gone in self._gone if self.is_known(gone.slot, gone.tick - 1)]:
            self._gone.remove(stream)
            self._streams.pop(stream.number, None)
            stream.context.remove(stream)
            self._free.append((stream.slot, stream.tick))

    def is_known(self, slot: int, tick: int) -> bool:
        """Say whether everything that is enqueued from now on comes after a tick."""
        return all(tick <= host.past[slot] for host in self._hosts)

    def last_sync(self, later: int, earlier: int, slot: int) -> Sync | None:
        """Return what last ordered a stream after part of another, given by its number and its slot."""
        timeline = self._streams.get(later, self.host)
        other = self._streams.get(earlier)
        known = other is not None and timeline.past[slot] >= other.first_tick
        return timeline.reasons[slot] if known else None

    def _enter(self, stream: Stream, call: Call) -> None:
        """Let what comes next in a stream wait for all that CUDA makes it wait for.

        What it waits for is released by that, and has to enter anew when it goes on.
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
                stream.acquire(release, _at_once(SyncKind.DEFAULT_STREAM, call))
        stream.seen = self.version

    def _new_slot(self) -> int:
        slot = self._slots
        self._slots += 1
        if self._slots > self._width:
            self._width *= 2
            for timeline in (*self._streams.values(), *self._hosts):
                timeline.widen(self._width)
        return slot


def _at_once(kind: SyncKind, call: Call) -> Sync:
    return Sync(kind, call.seq, call.site, call.seq, call.site)


UNKNOWN_WORD = "wait for a word in memory that nothing in the trace wrote"


class Signal(NamedTuple):
    """Something that can be waited for, and the call that set it."""

    release: Release
    seq: int
    site: int

    def reason(self, call: Call) -> Sync:
        """Say how the call that waited came after it."""
        return Sync(SyncKind.EVENT, self.seq, self.site, call.seq, call.site)


class Waits:
    """All that is waited for. Waiting for an event that was never recorded is nothing."""

    def __init__(self, order: Order, gaps: Counter[str]) -> None:
        self._order = order
        self._gaps = gaps
        self._events: dict[int, Signal] = {}
        self._captured: dict[int, int] = {}  # the graph that an event was last recorded in
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

    def host_waits_for_event(self, call: Call, event: int) -> None:
        signal = self._events.get(event)
        if signal is not None:
            self._order.host_acquires(signal.release, call)

    def host_waits_for_stream(self, call: Call) -> None:
        self._order.host_waits_for(self._order.stream(call), call)

    def host_waits_for_context(self, call: Call) -> None:
        self._order.host_waits_for_context(call)

    def host_call(self, call: Call, phase: int) -> None:
        """Begin a function of the host after what is in the stream; what comes later waits for its end."""
        if phase == Phase.BEGIN:
            self.host_waits_for_stream(call)
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
        """Write a word, and release what came before; or wait for it, and acquire that."""
        stream = self._order.enqueue(call)
        if stream is None:
            return
        if flag == Flag.WRITE:
            signal = Signal(stream.release(), call.seq, call.site)
            self._words.setdefault(address, {})[stream.slot] = signal
        elif address in self._words:
            for signal in self._words[address].values():
                _wait_for(stream, signal, call)
        else:
            self._wait_for_anything(stream, call)

    def prune(self) -> None:
        """Forget what everything from now on comes after: waiting for it is nothing."""
        known = self._order.is_known
        self._events = {
            event: signal
            for event, signal in self._events.items()
            if not known(signal.release.slot, signal.release.tick)
        }
        # A word stays known, with nobody left to wait for.
        for address, signals in self._words.items():
            self._words[address] = {
                slot: signal
                for slot, signal in signals.items()
                if not known(slot, signal.release.tick)
            }

    def _wait_for_anything(self, stream: Stream, call: Call) -> None:
        """Wait for whoever may write a word: to be told of a race that is none is worse than to miss one."""
        self._gaps[UNKNOWN_WORD] += 1
        for other in self._order:
            if other is not stream:
                _wait_for(stream, Signal(other.release(), call.seq, call.site), call)


def _wait_for(stream: Stream, signal: Signal | None, call: Call) -> None:
    if signal is not None and signal.release.tick > stream.past[signal.release.slot]:
        stream.acquire(signal.release, signal.reason(call))
