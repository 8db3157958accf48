"""Events, waits, host callbacks and words in memory: what makes one thing come after another."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from cudakit.core.sanitize.calls import Call
from cudakit.core.sanitize.clocks import Release
from cudakit.core.sanitize.races import Sync, SyncKind
from cudakit.core.sanitize.streams import Order, Stream
from cudakit.trace.kinds import Flag, Phase, StreamFlag

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
