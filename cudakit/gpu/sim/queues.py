"""Streams, events and captured graphs as the simulator keeps them: what the next task has to wait for.

CUDA C++ Programming Guide, "Default Stream" and "Creating a Graph Using Stream Capture".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from cudakit.gpu.sim.schedule import Job, Task
from cudakit.trace.kinds import StreamFlag


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A node of a graph, and the nodes that it depends on. Numbers begin at 1 in each graph."""

    number: int
    job: Job
    before: tuple[Node, ...]

    @property
    def edges(self) -> tuple[int, ...]:
        """The numbers of the nodes that it depends on."""
        return tuple(node.number for node in self.before)


Nodes: TypeAlias = tuple[Node, ...]


def difference(these: Nodes, others: Nodes) -> str:
    """Return why an executable of one graph cannot become the other: a CUgraphExecUpdateResult, or "".

    Nodes are paired in the order in which they were captured (CUDA Driver API, cuGraphExecUpdate).
    """
    if [node.edges for node in these] != [node.edges for node in others]:
        return "CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED"
    if [node.job.work for node in these] != [node.job.work for node in others]:
        return "CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED"
    return ""


@dataclass(slots=True, eq=False)
class Capture:
    """A capture in progress, and the graph that it makes."""

    graph: int  # the number of the graph
    thread: int
    origin: int  # the stream where it began
    nodes: list[Node] = field(default_factory=list)
    invalidated: bool = False
    ended: bool = False

    def add(self, job: Job, before: Iterable[Node]) -> Node:
        """Append a node."""
        node = Node(len(self.nodes) + 1, job, tuple(dict.fromkeys(before)))
        self.nodes.append(node)
        return node

    def is_joined(self, end: Nodes) -> bool:
        """Return whether the end depends on every node."""
        seen: set[Node] = set()
        left = list(end)
        while left:
            node = left.pop()
            if node not in seen:
                seen.add(node)
                left += node.before
        return len(seen) == len(self.nodes)


@dataclass(slots=True, eq=False)
class Queue:
    """A stream: its order, and the end of its work."""

    number: int
    flag: StreamFlag
    priority: int = 0
    tail: tuple[Task, ...] = ()  # the tasks that the next one waits for
    capture: Capture | None = None
    nodes: Nodes = ()  # likewise, in a capture

    @property
    def blocks(self) -> bool:
        """Whether the stream and the legacy stream wait for each other."""
        return self.flag in (StreamFlag.BLOCKING, StreamFlag.PER_THREAD)


@dataclass(slots=True, eq=False)
class Queues:
    """The streams of a device, and the rules of order among them.

    CUDA C++ Programming Guide, "Default Stream": work in the legacy stream waits for all earlier work in
    blocking streams, and later work in blocking streams waits for it.
    """

    legacy: Queue
    others: list[Queue] = field(default_factory=list)
    _left: tuple[Task, ...] = ()  # the tails of destroyed blocking streams

    def before(self, queue: Queue) -> tuple[Task, ...]:
        """Return the tasks that a new task of a stream waits for."""
        if queue is self.legacy:
            blocking = (task for other in self.others if other.blocks for task in other.tail)
            return _without_past([*queue.tail, *self._left, *blocking])
        if queue.blocks:
            return _without_past([*queue.tail, *self.legacy.tail])
        return _without_past(queue.tail)

    def work_of(self, queue: Queue) -> tuple[Task, ...]:
        """Return the tasks to wait for until a stream is complete."""
        return self.before(queue) if queue is self.legacy else queue.tail

    def destroy(self, queue: Queue) -> None:
        """Remove a stream; its work completes."""
        self.others.remove(queue)
        if queue.blocks:
            self._left = _without_past([*self._left, *queue.tail])

    def captures(self) -> list[Capture]:
        """List the captures that blocking streams take part in."""
        return [queue.capture for queue in self.others if queue.blocks and queue.capture]


@dataclass(slots=True, eq=False)
class EventState:
    """An event: where it was last recorded, in a stream or in a capture."""

    number: int
    timing: bool
    task: Task | None = None
    capture: Capture | None = None
    nodes: Nodes = ()


def _without_past(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """Keep unfinished tasks and, of the finished ones, the last to end."""
    left = dict.fromkeys(tasks)
    done = [task for task in left if task.done]
    last = max(done, key=lambda task: task.end_ns, default=None)
    return tuple(task for task in left if not task.done or task is last)
