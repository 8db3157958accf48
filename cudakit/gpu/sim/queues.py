"""State of streams, events and stream captures: the dependencies of the next task.

CUDA C++ Programming Guide, "Default Stream" and "Creating a Graph Using Stream Capture".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from cudakit.gpu.sim.schedule import Job, Task
from cudakit.trace.kinds import StreamFlag

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
