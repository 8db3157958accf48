"""Graphs while they are captured: nodes, their order, and what spoils a capture.

CUDA C++ Programming Guide, "Creating a Graph Using Stream Capture".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from cudakit.gpu.sim.tasks import Job


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A job of a graph, and the nodes that it waits for. Nodes count from 1 in each graph."""

    number: int
    job: Job
    before: tuple[Node, ...]

    @property
    def edges(self) -> tuple[int, ...]:
        """The numbers of the nodes that it waits for."""
        return tuple(node.number for node in self.before)


Nodes: TypeAlias = tuple[Node, ...]


def difference(these: Nodes, others: Nodes) -> str:
    """Name what keeps an executable of one graph from becoming the other: a CUgraphExecUpdateResult, or "".

    Nodes are paired in the order in which they were captured (CUDA Driver API, cuGraphExecUpdate).
    """
    if [node.edges for node in these] != [node.edges for node in others]:
        return "CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED"
    if [node.job.work for node in these] != [node.job.work for node in others]:
        return "CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED"
    return ""


@dataclass(slots=True, eq=False)
class Capture:
    """A capture that is under way, and the graph that it makes."""

    graph: int  # the number that the graph has, or will have
    thread: int
    origin: int  # the stream where it began
    nodes: list[Node] = field(default_factory=list)
    spoiled: bool = False
    ended: bool = False

    def add(self, job: Job, before: Iterable[Node]) -> Node:
        """Append a node."""
        node = Node(len(self.nodes) + 1, job, tuple(dict.fromkeys(before)))
        self.nodes.append(node)
        return node

    def is_joined(self, end: Nodes) -> bool:
        """Say whether every node is waited for by what comes at the end."""
        seen: set[Node] = set()
        left = list(end)
        while left:
            node = left.pop()
            if node not in seen:
                seen.add(node)
                left += node.before
        return len(seen) == len(self.nodes)
