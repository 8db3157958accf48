"""Events: places in streams that others wait for, and the times when they were reached."""

from __future__ import annotations

from typing import Any

from cudakit.gpu.api import Event, Stream
from cudakit.gpu.explain import Status, cuda_error
from cudakit.gpu.sim.capture import Capture
from cudakit.gpu.sim.context import driver_call
from cudakit.gpu.sim.ids import Ids
from cudakit.gpu.sim.lanes import Lane, Mark
from cudakit.gpu.sim.streams import Streams
from cudakit.gpu.sim.tasks import Job, Task
from cudakit.trace import events as facts
from cudakit.trace.kinds import Work

_NOTHING = Job(Work.EMPTY)


class Events(Streams):
    """The events of one device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._events: Ids[Mark] = Ids("event")

    @driver_call
    def event(self, *, timing: bool = True) -> Event:
        return Event(self._events.add(lambda number: Mark(number, timing)).number)

    @driver_call
    def destroy_event(self, event: Event) -> None:
        self._events.remove(event)

    @driver_call
    def record(self, event: Event, stream: Stream) -> None:
        mark, lane = self._events[event], self.lane(stream)
        mark.task, mark.capture, mark.nodes = None, lane.capture, lane.nodes
        if not lane.capture:
            mark.task = self.enqueue(lane, _NOTHING)
            self.emit(facts.EventRecord(mark.number, lane.number))

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
            self.emit(facts.StreamWait(lane.number, mark.number))

    @driver_call
    def query_event(self, event: Event) -> bool:
        mark = self._uncaptured(event)
        done = mark.task is None or self.schedule.reached([mark.task])
        if done:
            self.emit(facts.EventQueryOk(mark.number))
        return done

    @driver_call
    def sync_event(self, event: Event) -> None:
        mark = self._uncaptured(event)
        self.wait_for((mark.task,) if mark.task else ())
        self.emit(facts.EventSync(mark.number))

    @driver_call
    def elapsed(self, begin: Event, end: Event) -> float:
        first, last = self._timed(begin), self._timed(end)
        if not self.schedule.reached((first, last)):
            raise cuda_error(
                Status.NOT_READY, seen=f"events {begin} and {end} must both be reached"
            )
        self.emit(facts.EventQueryOk(begin))
        self.emit(facts.EventQueryOk(end))
        return (last.end_ns - first.end_ns) / 1e9

    def close(self) -> None:
        super().close()
        self._events.clear()

    def _uncaptured(self, event: Event) -> Mark:
        """Return an event that the host may ask about."""
        mark = self._events[event]
        if mark.capture:
            mark.capture.spoiled = True
            raise cuda_error(Status.CAPTURED_EVENT, seen=f"event {event}")
        self.refuse_in_capture()
        return mark

    def _timed(self, event: Event) -> Task:
        mark = self._uncaptured(event)
        if not mark.timing:
            raise cuda_error(
                Status.INVALID_HANDLE, seen=f"event {event} was made with timing=False"
            )
        if mark.task is None:
            raise cuda_error(Status.INVALID_HANDLE, seen=f"event {event} was never recorded")
        return mark.task


def _join(lane: Lane, capture: Capture, mark: Mark) -> None:
    """Take a stream into the capture that an event was recorded in."""
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
