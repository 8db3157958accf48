"""Streams and events: what orders the work of a device, and what times it."""

from __future__ import annotations

from cudakit.gpu.api import LEGACY, PER_THREAD, Event, Stream
from cudakit.gpu.cuda.context import Context, Handles
from cudakit.gpu.cuda.driver import Result, check, cu
from cudakit.gpu.explain import Status, cuda_error

_DEFAULT = {LEGACY: cu.CUstream(LEGACY), PER_THREAD: cu.CUstream(PER_THREAD)}


class Streams(Context):
    """The order of work on one device."""

    def __init__(self, ordinal: int) -> None:
        super().__init__(ordinal)
        self._streams = Handles("stream", first=PER_THREAD + 1)
        self._events = Handles("event")
        self._timed: set[Event] = set()

    def stream(self, *, blocking: bool = True, priority: int = 0) -> Stream:
        kind = cu.CUstream_flags
        flags = kind.CU_STREAM_DEFAULT if blocking else kind.CU_STREAM_NON_BLOCKING
        lowest, highest = self.call(
            cu.cuCtxGetStreamPriorityRange
        )  # the highest has the least number
        nearest = max(highest, min(lowest, priority))
        return Stream(self._streams.add(self.call(cu.cuStreamCreateWithPriority, flags, nearest)))

    def priority(self, stream: Stream) -> int:
        return int(self.call(cu.cuStreamGetPriority, self.handle(stream)))

    def destroy_stream(self, stream: Stream) -> None:
        if stream in _DEFAULT:
            raise cuda_error(Status.INVALID_HANDLE, seen="a default stream cannot be destroyed")
        self.call(cu.cuStreamDestroy, self._streams.remove(stream))

    def handle(self, stream: Stream) -> object:
        """Return the driver's own handle of a stream."""
        return _DEFAULT.get(stream) or self._streams[stream]

    def query_stream(self, stream: Stream) -> bool:
        return _done(self.ask(cu.cuStreamQuery, self.handle(stream)))

    def sync_stream(self, stream: Stream) -> None:
        self.call(cu.cuStreamSynchronize, self.handle(stream))

    def sync(self) -> None:
        self.call(cu.cuCtxSynchronize)

    def event(self, *, timing: bool = True) -> Event:
        kind = cu.CUevent_flags
        flags = kind.CU_EVENT_DEFAULT if timing else kind.CU_EVENT_DISABLE_TIMING
        event = Event(self._events.add(self.call(cu.cuEventCreate, flags)))
        if timing:
            self._timed.add(event)
        return event

    def destroy_event(self, event: Event) -> None:
        self.call(cu.cuEventDestroy, self._events.remove(event))
        self._timed.discard(event)

    def record(self, event: Event, stream: Stream) -> None:
        self.call(cu.cuEventRecord, self._events[event], self.handle(stream))

    def wait(self, stream: Stream, event: Event) -> None:
        self.call(cu.cuStreamWaitEvent, self.handle(stream), self._events[event], 0)

    def query_event(self, event: Event) -> bool:
        return _done(self.ask(cu.cuEventQuery, self._events[event]))

    def sync_event(self, event: Event) -> None:
        self.call(cu.cuEventSynchronize, self._events[event])

    def elapsed(self, begin: Event, end: Event) -> float:
        first, last = self._events[begin], self._events[end]
        for event in (begin, end):
            if event not in self._timed:
                raise cuda_error(
                    Status.INVALID_HANDLE, seen=f"event {event} was made with timing=False"
                )
        milliseconds: float = self.call(
            cu.cuEventElapsedTime,
            first,
            last,
            seen=lambda: f"events {begin} and {end} must both be recorded, and reached",
        )
        return milliseconds / 1e3

    def close(self) -> None:
        for event in self._events.clear():
            self.ask(cu.cuEventDestroy, event)
        for stream in self._streams.clear():
            self.ask(cu.cuStreamDestroy, stream)
        super().close()


def _done(result: Result) -> bool:
    if int(result[0]) == Status.NOT_READY:
        return False
    check(result)
    return True
