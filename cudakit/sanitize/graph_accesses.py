"""The order of a graph's nodes and the accesses of its launches, which equal launches share."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate
from typing import Final, NamedTuple

from cudakit.sanitize.clocks import Call
from cudakit.sanitize.races import LaunchPrecision
from cudakit.sanitize.record_batch import AccessRows

_PACKED_NODE: Final = struct.Struct("<qqqqQQ")


class NodeOrder:
    """The nodes of a graph in topological order, and which of them happen before which.

    ``predecessors`` has the nodes from which an edge leads to each node.
    """

    def __init__(self, nodes: Iterable[int], predecessors: Mapping[int, Sequence[int]]) -> None:
        self.nodes = _topological_order(set(nodes), predecessors)
        # Number of bytes of each node in ``ancestor_bytes``.
        self.bytes_per_node = len(self.nodes) + 7 >> 3
        self._positions = {node: position for position, node in enumerate(self.nodes)}
        # For each node, a bit mask of the positions of the nodes that happen before it.
        self._ancestor_bits: list[int] = []
        for node in self.nodes:
            ancestor_bits = 0
            for predecessor in predecessors.get(node, ()):
                if predecessor in self._positions:
                    position = self._positions[predecessor]
                    ancestor_bits |= 1 << position
                    # In a damaged trace with a cycle, the predecessor may come later.
                    if position < len(self._ancestor_bits):
                        ancestor_bits |= self._ancestor_bits[position]
            self._ancestor_bits.append(ancestor_bits)

    def precedes(self, first_node: int, second_node: int) -> bool:
        """Return whether a node happens before another node."""
        first, second = self._positions.get(first_node), self._positions.get(second_node)
        return (
            first is not None
            and second is not None
            and bool(self._ancestor_bits[second] >> first & 1)
        )

    @cached_property
    def ancestor_bytes(self) -> bytes:
        """For each node in order, a bit mask of the positions of the nodes that happen before it."""
        return b"".join(
            bits.to_bytes(self.bytes_per_node, "little") for bits in self._ancestor_bits
        )


def _topological_order(nodes: set[int], predecessors: Mapping[int, Sequence[int]]) -> list[int]:
    """List nodes in topological order: in order of their numbers if no edge contradicts that."""
    if all(
        predecessor < node
        for node, node_predecessors in predecessors.items()
        for predecessor in node_predecessors
    ):
        return sorted(nodes)
    try:
        sorted_nodes = TopologicalSorter(predecessors).static_order()
        all_nodes = dict.fromkeys([*sorted_nodes, *sorted(nodes)])
    except CycleError:  # the trace is damaged: CUDA accepts no graph with a cycle
        return sorted(nodes)
    return [node for node in all_nodes if node in nodes]


class NodeAccesses(NamedTuple):
    """The accesses that a graph node, or a collective of the node, performs in a launch."""

    call: Call  # the call that added the node
    position: int  # position of the node in the order of the graph's nodes
    rows: bytes  # records of the accesses


class GraphAccesses:
    """The accesses of a graph launch. Launches with equal accesses share one object.

    ``nodes`` are in topological order. ``kernel_counts`` has the number of kernel nodes of each precision.
    """

    def __init__(
        self,
        order: NodeOrder,
        nodes: Sequence[NodeAccesses],
        kernel_counts: Sequence[tuple[LaunchPrecision, int]] = (),
    ) -> None:
        self.order = order
        self.kernel_counts = kernel_counts
        self.calls = tuple(node.call for node in nodes)
        self.rows = b"".join(node.rows for node in nodes)  # records of the accesses of all nodes
        self._row_ends = list(accumulate(len(node.rows) for node in nodes))
        # The numbers of all nodes that the native core needs: ``native/module.c`` has the same structure.
        self.packed_nodes = b"".join(
            _PACKED_NODE.pack(
                node.call.kind,
                node.call.name,
                node.call.site,
                node.call.node,
                node.position,
                len(node.rows),
            )
            for node in nodes
        )

    def calls_in_launch(self, launch: Call) -> Iterator[tuple[Call, AccessRows]]:
        """Yield the call of each node as a part of a launch, with the records of its accesses."""
        all_rows = memoryview(self.rows)
        for call, begin, end in zip(self.calls, (0, *self._row_ends), self._row_ends, strict=False):
            yield call.in_launch(launch), all_rows[begin:end]

    @property
    def size_bytes(self) -> int:
        return len(self.rows) + len(self.packed_nodes)
