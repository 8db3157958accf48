"""Streams and events (CUDA Driver API, "Stream Management", "Event Management")."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, SupportsInt, cast

from cudakit.gpu.api import LEGACY, PER_THREAD, Event, Stream
from cudakit.gpu.cuda.context import Context
from cudakit.gpu.cuda.driver import Result, check, cu
from cudakit.gpu.driver_errors import Status, cuda_error
from cudakit.gpu.handles import Handles

_DEFAULT_STREAMS = {LEGACY: cu.CUstream(LEGACY), PER_THREAD: cu.CUstream(PER_THREAD)}
_RELAXED = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
_DEFAULT_BY_HANDLE = {0: LEGACY, int(LEGACY): LEGACY, int(PER_THREAD): PER_THREAD}


class CudaStreams:
    """The streams and events of one device; ``gpu.api.Streams`` has the contract of each method."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._external_streams: dict[int, Stream] = {}
        self._streams: Handles[Any] = Handles("stream", first=PER_THREAD + 1)
        self._events: Handles[Any] = Handles("event")
        self._timed_events: set[Event] = set()

    def stream(self, *, blocking: bool = True, priority: int = 0) -> Stream:
        flag_names = cu.CUstream_flags
        flags = flag_names.CU_STREAM_DEFAULT if blocking else flag_names.CU_STREAM_NON_BLOCKING
        # The highest priority has the lowest number.
        lowest_priority, highest_priority = self._context.call(cu.cuCtxGetStreamPriorityRange)
        clamped_priority = max(highest_priority, min(lowest_priority, priority))
        return Stream(
            self._streams.add(
                self._context.call(cu.cuStreamCreateWithPriority, flags, clamped_priority)
            )
        )

    def priority(self, stream: Stream) -> int:
        return int(self._context.call(cu.cuStreamGetPriority, self.handle(stream)))

    def destroy_stream(self, stream: Stream) -> None:
        if stream in _DEFAULT_STREAMS:
            raise cuda_error(Status.INVALID_HANDLE, detail="a default stream cannot be destroyed")
        self._context.call(cu.cuStreamDestroy, self._streams.remove(stream))

    def handle(self, stream: Stream) -> object:
        """Return the driver object of a stream."""
        return _DEFAULT_STREAMS.get(stream) or self._streams[stream]

    def query_stream(self, stream: Stream) -> bool:
        return _is_complete(self._context.in_context(cu.cuStreamQuery, self.handle(stream)))

    def sync_stream(self, stream: Stream) -> None:
        self._context.call(cu.cuStreamSynchronize, self.handle(stream))

    def sync(self) -> None:
        self._context.call(cu.cuCtxSynchronize)

    def event(self, *, timing: bool = True) -> Event:
        flag_names = cu.CUevent_flags
        flags = flag_names.CU_EVENT_DEFAULT if timing else flag_names.CU_EVENT_DISABLE_TIMING
        event = Event(self._events.add(self._context.call(cu.cuEventCreate, flags)))
        if timing:
            self._timed_events.add(event)
        return event

    def destroy_event(self, event: Event) -> None:
        self._context.call(cu.cuEventDestroy, self._events.remove(event))
        self._timed_events.discard(event)

    def record(self, event: Event, stream: Stream) -> None:
        self._context.call(cu.cuEventRecord, self._events[event], self.handle(stream))

    def wait(self, stream: Stream, event: Event) -> None:
        self._context.call(cu.cuStreamWaitEvent, self.handle(stream), self._events[event], 0)

    def query_event(self, event: Event) -> bool:
        return _is_complete(self._context.in_context(cu.cuEventQuery, self._events[event]))

    def sync_event(self, event: Event) -> None:
        self._context.call(cu.cuEventSynchronize, self._events[event])

    def elapsed(self, begin: Event, end: Event) -> float:
        begin_event, end_event = self._events[begin], self._events[end]
        for event in (begin, end):
            if event not in self._timed_events:
                raise cuda_error(
                    Status.INVALID_HANDLE, detail=f"event {event} was created with timing=False"
                )
        milliseconds: float = self._context.call(
            cu.cuEventElapsedTime,
            begin_event,
            end_event,
            detail=lambda: f"events {begin} and {end} must both be recorded and complete",
        )
        return milliseconds / 1e3

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """Allow this thread to allocate during a stream capture; the allocation is not part of the graph.

        In other capture modes cuMemAlloc fails and invalidates the capture (CUDA Driver API,
        cuThreadExchangeStreamCaptureMode). PyTorch's allocator also uses the relaxed mode
        (CUDAStreamCaptureModeGuard).
        """
        previous_mode = self._context.call(cu.cuThreadExchangeStreamCaptureMode, _RELAXED)
        try:
            yield
        finally:
            self._context.call(cu.cuThreadExchangeStreamCaptureMode, previous_mode)

    def external_stream(self, handle: int) -> Stream:
        """Return an id for the handle of another library's stream, which ``close`` does not destroy."""
        if handle in _DEFAULT_BY_HANDLE:
            return _DEFAULT_BY_HANDLE[handle]
        if handle not in self._external_streams:
            self._external_streams[handle] = Stream(self._streams.add(cu.CUstream(handle)))
        return self._external_streams[handle]

    def address(self, stream: Stream) -> int:
        """Return the driver handle of a stream as an int, for other libraries."""
        return int(cast("SupportsInt", self.handle(stream)))

    def close(self) -> None:
        """Destroy all remaining streams and events that this object created.

        Errors are ignored: if the context is lost, all calls fail, and the driver has freed the objects.
        """
        for event in self._events.clear():
            self._context.in_context(cu.cuEventDestroy, event)
        for stream in self._external_streams.values():
            self._streams.remove(stream)
        self._external_streams.clear()
        for handle in self._streams.clear():
            self._context.in_context(cu.cuStreamDestroy, handle)


class HandleStreams(CudaStreams):
    """Streams whose ids are driver handles, so that streams of other libraries can be passed.

    A handle must belong to an existing stream: the driver reuses handles, and cannot detect a destroyed one.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._created_streams: dict[Stream, Stream] = {}

    def handle(self, stream: Stream) -> object:
        return cu.CUstream(_DEFAULT_BY_HANDLE.get(stream, stream))

    def external_stream(self, handle: int) -> Stream:
        return _DEFAULT_BY_HANDLE.get(handle, Stream(handle))

    def stream(self, *, blocking: bool = True, priority: int = 0) -> Stream:
        internal_id = super().stream(blocking=blocking, priority=priority)
        stream = Stream(int(self._streams[internal_id]))
        self._created_streams[stream] = internal_id
        return stream

    def destroy_stream(self, stream: Stream) -> None:
        if stream not in self._created_streams:
            raise cuda_error(
                Status.INVALID_HANDLE,
                detail=f"stream {stream:#x} belongs to another library, or was destroyed",
            )
        super().destroy_stream(self._created_streams.pop(stream))


def _is_complete(result: Result) -> bool:
    if int(result[0]) == Status.NOT_READY:
        return False
    check(result)
    return True
