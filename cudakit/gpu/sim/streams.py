"""The streams and events of a simulated device, and the work that is enqueued in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from cudakit.errors import CudaError
from cudakit.gpu.api import LEGACY, PER_THREAD, Event, Stream
from cudakit.gpu.driver_errors import Status, cuda_error
from cudakit.gpu.handles import Handles
from cudakit.gpu.sim.context import Context, driver_call
from cudakit.gpu.sim.lanes import Capture, Lane, Lanes, Mark, Node, Nodes
from cudakit.gpu.sim.schedule import Job, Task
from cudakit.trace import events as facts
from cudakit.trace.kinds import StreamFlag, Work

# The highest priority has the least number (CUDA Driver API, cuCtxGetStreamPriorityRange).
_HIGHEST, _LOWEST = -5, 0
_NOTHING = Job(Work.EMPTY)


class SimStreams:
    """The streams and events of one device. Their work is enqueued in lanes, one a stream."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._streams: Handles[Lane] = Handles("stream", first=PER_THREAD + 1)
        self._events: Handles[Mark] = Handles("event")
        self._of_threads: dict[int, Lane] = {}
        self.lanes = Lanes(Lane(LEGACY, StreamFlag.LEGACY))
        self.captures: list[Capture] = []  # that have not ended
        self._relaxed: set[int] = set()  # threads that captures do not restrict
        context.emit(facts.StreamCreate(LEGACY, StreamFlag.LEGACY))

    @driver_call
    def stream(self, *, blocking: bool = True, priority: int = 0) -> Stream:
        flag = StreamFlag.BLOCKING if blocking else StreamFlag.NON_BLOCKING
        return Stream(self._new_lane(flag, max(_HIGHEST, min(_LOWEST, priority))).number)

    @driver_call
    def priority(self, stream: Stream) -> int:
        return self.lane_of(stream).priority

    @driver_call
    def destroy_stream(self, stream: Stream) -> None:
        if stream in (LEGACY, PER_THREAD):
            raise cuda_error(Status.INVALID_HANDLE, seen="a default stream cannot be destroyed")
        lane = self._streams.remove(stream)
        if lane.capture:
            lane.capture.spoiled = True
        self.lanes.destroy(lane)
        self.context.emit(facts.StreamDestroy(lane.number))

    @driver_call
    def query_stream(self, stream: Stream) -> bool:
        lane = self.uncaptured_lane(stream)
        done = self.context.schedule.reached(self.lanes.work_of(lane))
        if done:
            self.context.emit(facts.StreamQueryOk(lane.number))
        return done

    @driver_call
    def sync_stream(self, stream: Stream) -> None:
        lane = self.uncaptured_lane(stream)
        self.context.wait_for(self.lanes.work_of(lane))
        self.context.emit(facts.StreamSync(lane.number))

    @driver_call
    def sync(self) -> None:
        self._refuse_during(self._own_captures())
        self.context.wait_for_all()
        self.context.emit(facts.ContextSync())

    @driver_call
    def event(self, *, timing: bool = True) -> Event:
        return Event(self._events.make(lambda number: Mark(number, timing)).number)

    @driver_call
    def destroy_event(self, event: Event) -> None:
        self._events.remove(event)

    @driver_call
    def record(self, event: Event, stream: Stream) -> None:
        mark, lane = self._events[event], self.lane(stream)
        mark.task, mark.capture, mark.nodes = None, lane.capture, lane.nodes
        if not lane.capture:
            mark.task = self.enqueue(lane, _NOTHING)
            self.context.emit(facts.EventRecord(mark.number, lane.number))

    @driver_call
    def wait(self, stream: Stream, event: Event) -> None:
        lane, mark = self.lane(stream), self._events[event]
        if mark.capture:
            _join(lane, mark.capture, mark)
        elif lane.capture:
            lane.capture.spoiled = True
            raise cuda_error(
                Status.STREAM_CAPTURE_ISOLATION,
                seen=f"event {event} was not recorded in the capture of stream {stream}",
            )
        elif mark.task:
            lane.tail = (*self.lanes.before(lane), mark.task)
            self.context.emit(facts.StreamWait(lane.number, mark.number))

    @driver_call
    def query_event(self, event: Event) -> bool:
        mark = self._uncaptured_event(event)
        done = mark.task is None or self.context.schedule.reached([mark.task])
        if done:
            self.context.emit(facts.EventQueryOk(mark.number))
        return done

    @driver_call
    def sync_event(self, event: Event) -> None:
        mark = self._uncaptured_event(event)
        self.context.wait_for((mark.task,) if mark.task else ())
        self.context.emit(facts.EventSync(mark.number))

    @driver_call
    def elapsed(self, begin: Event, end: Event) -> float:
        first, last = self._timed(begin), self._timed(end)
        if not self.context.schedule.reached((first, last)):
            raise cuda_error(
                Status.NOT_READY, seen=f"events {begin} and {end} must both be reached"
            )
        self.context.emit(facts.EventQueryOk(begin))
        self.context.emit(facts.EventQueryOk(end))
        return (last.end_ns - first.end_ns) / 1e9

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """Let this thread do what its captures prohibit, unless it conflicts with them by itself."""
        thread, relaxed = self.context.thread, self._relaxed
        nested = thread in relaxed
        relaxed.add(thread)
        try:
            yield
        finally:
            if not nested:
                relaxed.discard(thread)

    def lane(self, stream: Stream) -> Lane:
        """Return the lane of a stream to enqueue work in. LEGACY invalidates captures of blocking streams."""
        lane = self.lane_of(stream)
        held = self.lanes.captures() if lane is self.lanes.legacy else []
        if held:
            raise _spoiled(held, Status.STREAM_CAPTURE_IMPLICIT)
        return lane

    def lane_of(self, stream: Stream) -> Lane:
        """Return the lane of a stream, to look at."""
        if stream == LEGACY:
            return self.lanes.legacy
        if stream != PER_THREAD:
            return self._streams[stream]
        if self.context.thread not in self._of_threads:
            self._of_threads[self.context.thread] = self._new_lane(StreamFlag.PER_THREAD)
        return self._of_threads[self.context.thread]

    def uncaptured_lane(self, stream: Stream) -> Lane:
        """Return the lane of a stream that the host may query or wait for."""
        lane = self.lane(stream)
        if lane.capture:
            raise _spoiled([lane.capture], Status.STREAM_CAPTURE_UNSUPPORTED)
        return lane

    def submit(self, lane: Lane, job: Job) -> Task | None:
        """Enqueue a job; in a captured stream, append it to the graph and return None."""
        if lane.capture:
            lane.nodes = (self.append(lane.capture, job, lane.nodes),)
            return None
        return self.enqueue(lane, job)

    def append(self, capture: Capture, job: Job, before: Nodes) -> Node:
        """Append a node to the graph that is being captured."""
        if capture.spoiled:
            raise cuda_error(Status.STREAM_CAPTURE_INVALIDATED, seen=f"stream {capture.origin}")
        node = capture.add(job, before)
        self.context.emit(facts.GraphNode(capture.graph, node.number, job.work, job.name))
        for access in job.accesses:
            self.context.emit(replace(access, node=node.number))
        for earlier in node.before:
            self.context.emit(facts.GraphEdge(capture.graph, earlier.number, node.number))
        return node

    def enqueue(self, lane: Lane, job: Job) -> Task:
        """Enqueue a job in a stream that does not capture."""
        before = self.lanes.before(lane)
        delay_ns = self.context.costs.dispatch_ns
        task = self.context.schedule.add(job, before, delay_ns=delay_ns, priority=lane.priority)
        lane.tail = (task,)
        return task

    def refuse_in_capture(self) -> None:
        """Invalidate the captures of this thread and raise, unless it is relaxed or captures nothing."""
        if self.context.thread not in self._relaxed:
            self._refuse_during(self._own_captures())

    def close(self) -> None:
        """Forget all streams and events."""
        self._streams.clear()
        self._events.clear()

    def _own_captures(self) -> list[Capture]:
        return [capture for capture in self.captures if capture.thread == self.context.thread]

    def _refuse_during(self, captures: list[Capture]) -> None:
        if captures:
            raise _spoiled(captures, Status.STREAM_CAPTURE_UNSUPPORTED)

    def _new_lane(self, flag: StreamFlag, priority: int = 0) -> Lane:
        lane = self._streams.make(lambda number: Lane(number, flag, priority))
        self.lanes.others.append(lane)
        self.context.emit(facts.StreamCreate(lane.number, flag, priority))
        return lane

    def _uncaptured_event(self, event: Event) -> Mark:
        """Return an event that the host may query or wait for."""
        mark = self._events[event]
        if mark.capture:
            mark.capture.spoiled = True
            raise cuda_error(Status.CAPTURED_EVENT, seen=f"event {event}")
        self.refuse_in_capture()
        return mark

    def _timed(self, event: Event) -> Task:
        mark = self._uncaptured_event(event)
        if not mark.timing:
            raise cuda_error(
                Status.INVALID_HANDLE, seen=f"event {event} was made with timing=False"
            )
        if mark.task is None:
            raise cuda_error(Status.INVALID_HANDLE, seen=f"event {event} was never recorded")
        return mark.task


def _spoiled(captures: list[Capture], status: Status) -> CudaError:
    for capture in captures:
        capture.spoiled = True
    return cuda_error(status, seen=f"stream {captures[0].origin} is capturing")


def _join(lane: Lane, capture: Capture, mark: Mark) -> None:
    """Add a stream to the capture that an event was recorded in."""
    if capture.ended:
        raise cuda_error(Status.CAPTURED_EVENT, seen=f"event {mark.number}")
    if lane.capture not in (None, capture):
        raise cuda_error(
            902,  # which has no words of its own
            name="CUDA_ERROR_STREAM_CAPTURE_MERGE",
            text="the event belongs to another capture than the stream",
            seen=f"event {mark.number}, stream {lane.number}",
        )
    lane.capture = capture
    lane.nodes = tuple(dict.fromkeys((*lane.nodes, *mark.nodes)))
