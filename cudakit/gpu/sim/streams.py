"""Streams and events of a simulated device, and enqueuing work in streams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from cudakit.errors import CudaError
from cudakit.gpu.api import LEGACY, PER_THREAD, Event, Stream
from cudakit.gpu.device import Handles
from cudakit.gpu.driver_errors import Status, cuda_error
from cudakit.gpu.sim.context import Context, driver_call
from cudakit.gpu.sim.schedule import Job, Task
from cudakit.trace import events as trace_events
from cudakit.trace.kinds import NodeType, StreamFlag

# The highest priority has the lowest number (CUDA Driver API, cuCtxGetStreamPriorityRange).
_HIGHEST_PRIORITY, _LOWEST_PRIORITY = -5, 0
_EMPTY_JOB = Job(NodeType.EMPTY)


class SimStreams:
    """The streams and events of one device."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._streams: Handles[Queue] = Handles("stream", first=PER_THREAD + 1)
        self._events: Handles[EventState] = Handles("event")
        self._per_thread_queues: dict[int, Queue] = {}
        self.queues = Queues(Queue(LEGACY, StreamFlag.LEGACY))
        self.captures: list[Capture] = []  # captures in progress
        self._relaxed_threads: set[int] = set()  # numbers of the threads in relaxed capture mode
        context.emit(trace_events.StreamCreate(LEGACY, StreamFlag.LEGACY))

    @driver_call
    def stream(self, *, blocking: bool = True, priority: int = 0) -> Stream:
        flag = StreamFlag.BLOCKING if blocking else StreamFlag.NON_BLOCKING
        return Stream(
            self._new_queue(flag, max(_HIGHEST_PRIORITY, min(_LOWEST_PRIORITY, priority))).number
        )

    @driver_call
    def priority(self, stream: Stream) -> int:
        return self.queue_of(stream).priority

    @driver_call
    def destroy_stream(self, stream: Stream) -> None:
        if stream in (LEGACY, PER_THREAD):
            raise cuda_error(Status.INVALID_HANDLE, detail="a default stream cannot be destroyed")
        queue = self._streams.remove(stream)
        if queue.capture:
            queue.capture.is_invalidated = True
        self.queues.destroy(queue)
        self.context.emit(trace_events.StreamDestroy(queue.number))

    @driver_call
    def query_stream(self, stream: Stream) -> bool:
        queue = self.uncaptured_queue(stream)
        is_complete = self.context.schedule.are_complete(self.queues.unfinished_work(queue))
        if is_complete:
            self.context.emit(trace_events.StreamQueryOk(queue.number))
        return is_complete

    @driver_call
    def sync_stream(self, stream: Stream) -> None:
        queue = self.uncaptured_queue(stream)
        self.context.wait_for(self.queues.unfinished_work(queue))
        self.context.emit(trace_events.StreamSync(queue.number))

    @driver_call
    def sync(self) -> None:
        self._invalidate_captures_of_thread()
        self.context.wait_for_all()
        self.context.emit(trace_events.ContextSync())

    @driver_call
    def event(self, *, timing: bool = True) -> Event:
        return Event(self._events.make(lambda number: EventState(number, timing)).number)

    @driver_call
    def destroy_event(self, event: Event) -> None:
        self._events.remove(event)

    @driver_call
    def record(self, event: Event, stream: Stream) -> None:
        event_state, queue = self._events[event], self.checked_queue(stream)
        event_state.task, event_state.capture, event_state.nodes = None, queue.capture, queue.nodes
        if not queue.capture:
            event_state.task = self.enqueue(queue, _EMPTY_JOB)
            self.context.emit(trace_events.EventRecord(event_state.number, queue.number))

    @driver_call
    def wait(self, stream: Stream, event: Event) -> None:
        queue, event_state = self.checked_queue(stream), self._events[event]
        if capture := event_state.capture:
            # The stream joins the capture in which the event was recorded.
            if capture.is_ended:
                raise cuda_error(Status.CAPTURED_EVENT, detail=f"event {event}")
            if queue.capture not in (None, capture):
                raise cuda_error(
                    Status.STREAM_CAPTURE_MERGE, detail=f"event {event}, stream {queue.number}"
                )
            queue.capture = capture
            queue.nodes = tuple(dict.fromkeys((*queue.nodes, *event_state.nodes)))
        elif queue.capture:
            queue.capture.is_invalidated = True
            raise cuda_error(
                Status.STREAM_CAPTURE_ISOLATION,
                detail=f"event {event} was not recorded in the capture of stream {stream}",
            )
        elif event_state.task:
            queue.tail = (*self.queues.dependencies_of(queue), event_state.task)
            self.context.emit(trace_events.StreamWait(queue.number, event_state.number))

    @driver_call
    def query_event(self, event: Event) -> bool:
        event_state = self._uncaptured_event(event)
        is_complete = event_state.task is None or self.context.schedule.are_complete(
            [event_state.task]
        )
        if is_complete:
            self.context.emit(trace_events.EventQueryOk(event_state.number))
        return is_complete

    @driver_call
    def sync_event(self, event: Event) -> None:
        event_state = self._uncaptured_event(event)
        self.context.wait_for((event_state.task,) if event_state.task else ())
        self.context.emit(trace_events.EventSync(event_state.number))

    @driver_call
    def elapsed(self, begin: Event, end: Event) -> float:
        begin_task, end_task = self._recording_task(begin), self._recording_task(end)
        if not self.context.schedule.are_complete((begin_task, end_task)):
            raise cuda_error(
                Status.NOT_READY, detail=f"events {begin} and {end} must both be complete"
            )
        self.context.emit(trace_events.EventQueryOk(begin))
        self.context.emit(trace_events.EventQueryOk(end))
        return (end_task.end_ns - begin_task.end_ns) / 1e9

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """Allow calls of this thread that its own captures in progress would reject."""
        thread, relaxed_threads = self.context.thread, self._relaxed_threads
        is_nested = thread in relaxed_threads
        relaxed_threads.add(thread)
        try:
            yield
        finally:
            if not is_nested:
                relaxed_threads.discard(thread)

    def checked_queue(self, stream: Stream) -> Queue:
        """Return the queue of a stream for new work. LEGACY invalidates captures of blocking streams."""
        queue = self.queue_of(stream)
        captures = self.queues.captures() if queue is self.queues.legacy_queue else []
        if captures:
            raise _invalidate_captures(captures, Status.STREAM_CAPTURE_IMPLICIT)
        return queue

    def queue_of(self, stream: Stream) -> Queue:
        """Return the queue of a stream, without checking or invalidating captures."""
        if stream == LEGACY:
            return self.queues.legacy_queue
        if stream != PER_THREAD:
            return self._streams[stream]
        if self.context.thread not in self._per_thread_queues:
            self._per_thread_queues[self.context.thread] = self._new_queue(StreamFlag.PER_THREAD)
        return self._per_thread_queues[self.context.thread]

    def uncaptured_queue(self, stream: Stream) -> Queue:
        """Return the queue of a stream. If the stream is capturing, invalidate the capture and raise."""
        queue = self.checked_queue(stream)
        if queue.capture:
            raise _invalidate_captures([queue.capture], Status.STREAM_CAPTURE_UNSUPPORTED)
        return queue

    def submit(self, queue: Queue, job: Job) -> Task | None:
        """Enqueue a job; in a captured stream, append it to the graph and return None."""
        if queue.capture:
            queue.nodes = (self.append(queue.capture, job, queue.nodes),)
            return None
        return self.enqueue(queue, job)

    def append(self, capture: Capture, job: Job, dependencies: Nodes) -> Node:
        """Append a node to the captured graph. Raises if the capture was invalidated."""
        if capture.is_invalidated:
            raise cuda_error(
                Status.STREAM_CAPTURE_INVALIDATED, detail=f"stream {capture.origin_stream}"
            )
        node = capture.add(job, dependencies)
        if self.context.activity:
            self.context.activity.record_graph_node(capture.graph * NODES_PER_GRAPH + node.number)
        self.context.emit(
            trace_events.GraphNode(capture.graph, node.number, job.node_type, job.name)
        )
        for access in job.accesses:
            self.context.emit(replace(access, node=node.number))
        for dependency in node.dependencies:
            self.context.emit(trace_events.GraphEdge(capture.graph, dependency.number, node.number))
        return node

    def enqueue(self, queue: Queue, job: Job) -> Task:
        """Enqueue a job in a stream that is not capturing."""
        dependencies = self.queues.dependencies_of(queue)
        delay_ns = self.context.costs.dispatch_ns
        task = self.context.schedule.add(
            job, dependencies, delay_ns=delay_ns, priority=queue.priority
        )
        queue.tail = (task,)
        if self.context.activity:
            self.context.activity.record_enqueued(task, queue.number)
        return task

    def reject_in_capture(self) -> None:
        """Raise and invalidate this thread's captures, unless it has none or is in relaxed mode."""
        if self.context.thread not in self._relaxed_threads:
            self._invalidate_captures_of_thread()

    def close(self) -> None:
        """Remove all streams and events."""
        self._streams.clear()
        self._events.clear()

    def _invalidate_captures_of_thread(self) -> None:
        if captures := [
            capture for capture in self.captures if capture.thread == self.context.thread
        ]:
            raise _invalidate_captures(captures, Status.STREAM_CAPTURE_UNSUPPORTED)

    def _new_queue(self, flag: StreamFlag, priority: int = 0) -> Queue:
        queue = self._streams.make(lambda number: Queue(number, flag, priority))
        self.queues.other_queues.append(queue)
        self.context.emit(trace_events.StreamCreate(queue.number, flag, priority))
        return queue

    def _uncaptured_event(self, event: Event) -> EventState:
        """Return an event. Raises CUDA_ERROR_CAPTURED_EVENT if the event was recorded in a capture."""
        event_state = self._events[event]
        if event_state.capture:
            event_state.capture.is_invalidated = True
            raise cuda_error(Status.CAPTURED_EVENT, detail=f"event {event}")
        self.reject_in_capture()
        return event_state

    def _recording_task(self, event: Event) -> Task:
        """Return the task that recorded an event. Raises CUDA_ERROR_INVALID_HANDLE if there is none."""
        event_state = self._uncaptured_event(event)
        if not event_state.has_timing:
            raise cuda_error(
                Status.INVALID_HANDLE, detail=f"event {event} was created with timing=False"
            )
        if event_state.task is None:
            raise cuda_error(Status.INVALID_HANDLE, detail=f"event {event} was never recorded")
        return event_state.task


def _invalidate_captures(captures: list[Capture], status: Status) -> CudaError:
    for capture in captures:
        capture.is_invalidated = True
    return cuda_error(status, detail=f"stream {captures[0].origin_stream} is capturing")


# --- State of streams, events and stream captures: the dependencies of the next task ---------------
#
# CUDA C++ Programming Guide, "Default Stream" and "Creating a Graph Using Stream Capture".

# The id of a graph node is the number of its graph times this constant, plus the number of the node.
NODES_PER_GRAPH = 1 << 32


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A graph node and its dependencies. Numbers start at 1 in each graph."""

    number: int
    job: Job
    dependencies: tuple[Node, ...]

    @property
    def dependency_numbers(self) -> tuple[int, ...]:
        """The numbers of the nodes that this node depends on."""
        return tuple(node.number for node in self.dependencies)


Nodes: TypeAlias = tuple[Node, ...]


def update_error(old_nodes: Nodes, new_nodes: Nodes) -> str:
    """Return the CUgraphExecUpdateResult that prevents an update between two graphs, or "".

    Nodes are paired in the order in which they were captured (CUDA Driver API, cuGraphExecUpdate).
    """
    if [node.dependency_numbers for node in old_nodes] != [
        node.dependency_numbers for node in new_nodes
    ]:
        return "CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED"
    if [node.job.node_type for node in old_nodes] != [node.job.node_type for node in new_nodes]:
        return "CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED"
    return ""


@dataclass(slots=True, eq=False)
class Capture:
    """A stream capture and its graph."""

    graph: int  # number of the graph
    thread: int  # number of the thread that began the capture
    origin_stream: int  # number of the stream that began the capture
    nodes: list[Node] = field(default_factory=list)
    is_invalidated: bool = False
    is_ended: bool = False

    def add(self, job: Job, dependencies: Iterable[Node]) -> Node:
        """Append a node to the captured graph."""
        node = Node(len(self.nodes) + 1, job, tuple(dict.fromkeys(dependencies)))
        self.nodes.append(node)
        return node

    def is_joined(self, end: Nodes) -> bool:
        """Return whether the last nodes of the origin stream depend, transitively, on every node."""
        visited_nodes: set[Node] = set()
        unvisited_nodes = list(end)
        while unvisited_nodes:
            node = unvisited_nodes.pop()
            if node not in visited_nodes:
                visited_nodes.add(node)
                unvisited_nodes += node.dependencies
        return len(visited_nodes) == len(self.nodes)


@dataclass(slots=True, eq=False)
class Queue:
    """The state of a stream."""

    number: int
    flag: StreamFlag
    priority: int = 0
    tail: tuple[Task, ...] = ()  # dependencies of the next task
    capture: Capture | None = None
    nodes: Nodes = ()  # dependencies of the next node during a capture

    @property
    def is_blocking(self) -> bool:
        """Whether the stream synchronizes with the legacy default stream."""
        return self.flag in (StreamFlag.BLOCKING, StreamFlag.PER_THREAD)


@dataclass(slots=True, eq=False)
class Queues:
    """The streams of a device and their implicit synchronization.

    Work in the legacy stream waits for earlier work in blocking streams, and later work in blocking streams
    waits for the legacy stream (CUDA C++ Programming Guide, "Default Stream").
    """

    legacy_queue: Queue
    other_queues: list[Queue] = field(default_factory=list)  # all streams but the legacy stream
    _destroyed_tails: tuple[Task, ...] = ()  # the tails of destroyed blocking streams

    def dependencies_of(self, queue: Queue) -> tuple[Task, ...]:
        """Return the tasks that a new task of a stream depends on."""
        if queue is self.legacy_queue:
            blocking_tasks = (
                task
                for blocking_queue in self.other_queues
                if blocking_queue.is_blocking
                for task in blocking_queue.tail
            )
            return _prune_finished([*queue.tail, *self._destroyed_tails, *blocking_tasks])
        if queue.is_blocking:
            return _prune_finished([*queue.tail, *self.legacy_queue.tail])
        return _prune_finished(queue.tail)

    def unfinished_work(self, queue: Queue) -> tuple[Task, ...]:
        """Return the tasks that must complete before a stream is complete."""
        return self.dependencies_of(queue) if queue is self.legacy_queue else queue.tail

    def destroy(self, queue: Queue) -> None:
        """Remove a stream; its enqueued work still completes."""
        self.other_queues.remove(queue)
        if queue.is_blocking:
            self._destroyed_tails = _prune_finished([*self._destroyed_tails, *queue.tail])

    def captures(self) -> list[Capture]:
        """Return the captures that include a blocking stream."""
        return [queue.capture for queue in self.other_queues if queue.is_blocking and queue.capture]


@dataclass(slots=True, eq=False)
class EventState:
    """An event and its last record: a task of a stream, or nodes of a capture."""

    number: int
    has_timing: bool
    task: Task | None = None
    capture: Capture | None = None
    nodes: Nodes = ()


def _prune_finished(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """Return the unfinished tasks and the finished task that ended last."""
    distinct_tasks = dict.fromkeys(tasks)
    finished_tasks = [task for task in distinct_tasks if task.is_done]
    last_finished_task = max(finished_tasks, key=lambda task: task.end_ns, default=None)
    return tuple(task for task in distinct_tasks if not task.is_done or task is last_finished_task)
