"""Graphs: what their nodes touch, and which of them wait for which.

To the outside a launch is one operation of its stream, so its nodes have one tick; inside, the edges order
them. CUDA C++ Programming Guide, "CUDA Graphs".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter

from cudakit.core.sanitize.calls import ASSUMED, Call
from cudakit.core.sanitize.clocks import Clock
from cudakit.core.sanitize.columns import ACCESS_FIELDS, AccessRow
from cudakit.core.sanitize.races import Grade
from cudakit.trace.kinds import Kind, Work

_KNOWN = ACCESS_FIELDS.index("known")
_KINDS = {
    Work.LAUNCH: Kind.LAUNCH,
    Work.COPY: Kind.COPY,
    Work.FILL: Kind.FILL,
    Work.ALLOC: Kind.ALLOC,
    Work.FREE: Kind.FREE,
    Work.HOST_CALL: Kind.HOST_CALL,
    Work.MEMOP: Kind.MEMOP,
}


@dataclass(slots=True)
class Node:
    """A node, as it was added to its graph."""

    call: Call
    accesses: list[AccessRow] = field(default_factory=list)


class Graph:
    """The nodes of a graph and their order."""

    def __init__(self) -> None:
        self._nodes: dict[int, Node] = {}
        self._before: dict[int, list[int]] = {}
        self._ancestors: dict[int, int] | None = None

    def add(self, call: Call, node: int, work: int) -> None:
        """Append a node; a number that was there is replaced."""
        call.kind = _KINDS.get(Work(work), Kind.GRAPH_LAUNCH)
        call.node = node
        self._nodes[node] = Node(call)
        self._ancestors = None

    def order(self, before: int, after: int) -> None:
        """Let a node wait for another one."""
        self._before.setdefault(after, []).append(before)
        self._ancestors = None

    def touches(self, row: AccessRow) -> None:
        """Say what a node does in each launch."""
        if row[-1] in self._nodes:
            self._nodes[row[-1]].accesses.append(row)

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def ancestors(self) -> Mapping[int, int]:
        """For each node, the nodes before it as bits of a number; the mapping's order is one to work in."""
        if self._ancestors is None:
            self._ancestors = {}
            for node in self._in_order():
                bits = 0
                for before in self._before.get(node, ()):
                    bits |= self._ancestors.get(before, 0) | 1 << before
                self._ancestors[node] = bits
        return self._ancestors

    def node(self, number: int) -> Node:
        return self._nodes[number]

    @property
    def kernels(self) -> Iterator[int]:
        """The nodes that are kernels."""
        return (number for number, node in self._nodes.items() if node.call.kind == Kind.LAUNCH)

    def _in_order(self) -> list[int]:
        """List the nodes so that each stands behind those it waits for: as they were made, if they can."""
        if all(before < node for node, some in self._before.items() for before in some):
            return sorted(self._nodes)
        try:
            in_order = TopologicalSorter(self._before).static_order()
            known = dict.fromkeys([*in_order, *self._nodes])
        except CycleError:  # a damaged trace: CUDA refuses such a graph
            return sorted(self._nodes)
        return [node for node in known if node in self._nodes]


@dataclass(slots=True)
class GraphLaunch:
    """A launch whose accesses are still coming in."""

    call: Call
    graph: Graph
    slot: int
    tick: int
    past: Clock
    accesses: dict[int, list[AccessRow]] = field(default_factory=dict)
    exact: set[int] = field(default_factory=set)  # the nodes of which all is told
    lost: set[int] = field(default_factory=set)  # the nodes of which something was lost

    def work(self) -> Iterator[tuple[Call, list[AccessRow]]]:
        """Yield what each node does, in an order that keeps to the edges."""
        own = self.call
        for number in self.graph.ancestors:
            added = self.graph.node(number)
            accesses = self._accesses(number)
            if accesses:
                site = added.call.site or own.site
                yield replace(added.call, seq=own.seq, stream=own.stream, site=site), accesses

    def grade(self, number: int) -> Grade:
        """Say how well it is known what a node did; of nothing told, that it was assumed to do nothing."""
        if number in self.exact:
            return Grade.EXACT
        worst = max((row[_KNOWN] for row in self._accesses(number)), default=ASSUMED)
        return Grade.ASSUMED if number in self.lost or worst >= ASSUMED else Grade.EXACT

    def _accesses(self, number: int) -> list[AccessRow]:
        """List what a node did: what its description says, unless all is told of this launch."""
        told = self.accesses.get(number, [])
        return told if number in self.exact else self.graph.node(number).accesses + told
