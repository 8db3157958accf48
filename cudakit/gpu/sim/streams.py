"""Streams: what orders the work of a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from cudakit.errors import CudaError
from cudakit.gpu.api import LEGACY, PER_THREAD, Stream
from cudakit.gpu.explain import Status, cuda_error
from cudakit.gpu.sim.capture import Capture, Node, Nodes
from cudakit.gpu.sim.context import Context, driver_call
from cudakit.gpu.sim.ids import Ids
from cudakit.gpu.sim.lanes import Lane, Lanes
from cudakit.gpu.sim.tasks import Job, Task
from cudakit.trace import events as facts
from cudakit.trace.kinds import StreamFlag

# The highest priority has the least number (CUDA Driver API, cuCtxGetStreamPriorityRange).
_HIGHEST, _LOWEST = -5, 0


class Streams(Context):
    """The order of work on one device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._streams: Ids[Lane] = Ids("stream", first=PER_THREAD + 1)
        self._of_threads: dict[int, Lane] = {}
        self.lanes = Lanes(Lane(LEGACY, StreamFlag.LEGACY))
        self.captures: list[Capture] = []  # that are under way
        self._relaxed: set[int] = set()  # threads
        self.emit(facts.StreamCreate(LEGACY, StreamFlag.LEGACY))

    @driver_call
    def stream(self, *, blocking: bool = True, priority: int = 0) -> Stream:
        flag = StreamFlag.BLOCKING if blocking else StreamFlag.NON_BLOCKING
        return Stream(self._new_lane(flag, max(_HIGHEST, min(_LOWEST, priority))).number)

    @driver_call
    def priority(self, stream: Stream) -> int:
        return self._lane(stream).priority

    @driver_call
    def destroy_stream(self, stream: Stream) -> None:
        if stream in (LEGACY, PER_THREAD):
            raise cuda_error(Status.INVALID_HANDLE, seen="a default stream cannot be destroyed")
        lane = self._streams.remove(stream)
        if lane.capture:
            lane.capture.spoiled = True
        self.lanes.destroy(lane)
        self.emit(facts.StreamDestroy(lane.number))

    @driver_call
    def query_stream(self, stream: Stream) -> bool:
        lane = self._uncaptured_lane(stream)
        done = self.schedule.reached(self.lanes.work_of(lane))
        if done:
            self.emit(facts.StreamQueryOk(lane.number))
        return done

    @driver_call
    def sync_stream(self, stream: Stream) -> None:
        lane = self._uncaptured_lane(stream)
        self.wait_for(self.lanes.work_of(lane))
        self.emit(facts.StreamSync(lane.number))

    @driver_call
    def sync(self) -> None:
        self._refuse_during(self._own_captures())
        self.wait_for_all()
        self.emit(facts.ContextSync())

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """Let this thread do what its captures do not permit, unless it conflicts with them by itself.

        CUDA Driver API, CU_STREAM_CAPTURE_MODE_RELAXED.
        """
        nested = self.thread in self._relaxed
        self._relaxed.add(self.thread)
        try:
            yield
        finally:
            if not nested:
                self._relaxed.discard(self.thread)

    def lane(self, stream: Stream) -> Lane:
        """Return a stream that something is to be done in."""
        lane = self._lane(stream)
        held = self.lanes.captures() if lane is self.lanes.legacy else []
        if held:
            raise _spoiled(held, Status.STREAM_CAPTURE_IMPLICIT)
        return lane

    def submit(self, lane: Lane, job: Job) -> Task | None:
        """Enqueue a job in a stream; where it is captured, append it to the graph and return None."""
        if lane.capture:
            lane.nodes = (self.append(lane.capture, job, lane.nodes),)
            return None
        return self.enqueue(lane, job)

    def append(self, capture: Capture, job: Job, before: Nodes) -> Node:
        """Append a node to the graph that is being captured."""
        if capture.spoiled:
            raise cuda_error(Status.STREAM_CAPTURE_INVALIDATED, seen=f"stream {capture.origin}")
        node = capture.add(job, before)
        self.emit(facts.GraphNode(capture.graph, node.number, job.work, job.name))
        for access in job.accesses:
            self.emit(replace(access, node=node.number))
        for earlier in node.before:
            self.emit(facts.GraphEdge(capture.graph, earlier.number, node.number))
        return node

    def enqueue(self, lane: Lane, job: Job) -> Task:
        """Enqueue a job in a stream that does not capture."""
        before = self.lanes.before(lane)
        delay_ns = self.costs.dispatch_ns
        task = self.schedule.add(job, before, delay_ns=delay_ns, priority=lane.priority)
        lane.tail = (task,)
        return task

    def wait_for(self, tasks: tuple[Task, ...]) -> None:
        """Let the host wait, and raise what failed meanwhile."""
        self.schedule.wait(tasks)
        self.check()

    def wait_for_all(self) -> None:
        """Let the host wait for all that was enqueued, and raise what failed meanwhile."""
        self.schedule.wait_for_all()
        self.check()

    def refuse_in_capture(self) -> None:
        """Refuse what a thread must not do while it captures unless relaxed, and spoil its captures."""
        if self.thread not in self._relaxed:
            self._refuse_during(self._own_captures())

    def close(self) -> None:
        super().close()
        self._streams.clear()

    def _own_captures(self) -> list[Capture]:
        return [capture for capture in self.captures if capture.thread == self.thread]

    def _refuse_during(self, captures: list[Capture]) -> None:
        if captures:
            raise _spoiled(captures, Status.STREAM_CAPTURE_UNSUPPORTED)

    def _new_lane(self, flag: StreamFlag, priority: int = 0) -> Lane:
        lane = self._streams.add(lambda number: Lane(number, flag, priority))
        self.lanes.others.append(lane)
        self.emit(facts.StreamCreate(lane.number, flag, priority))
        return lane

    def _lane(self, stream: Stream) -> Lane:
        if stream == LEGACY:
            return self.lanes.legacy
        if stream != PER_THREAD:
            return self._streams[stream]
        if self.thread not in self._of_threads:
            self._of_threads[self.thread] = self._new_lane(StreamFlag.PER_THREAD)
        return self._of_threads[self.thread]

    def _uncaptured_lane(self, stream: Stream) -> Lane:
        """Return a stream that the host may ask about."""
        lane = self.lane(stream)
        if lane.capture:
            raise _spoiled([lane.capture], Status.STREAM_CAPTURE_UNSUPPORTED)
        return lane


def _spoiled(captures: list[Capture], status: Status) -> CudaError:
    for capture in captures:
        capture.spoiled = True
    return cuda_error(status, seen=f"stream {captures[0].origin} is capturing")
