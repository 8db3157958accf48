"""Select the pairs of unordered accesses to report, and the order and the accesses of the nodes of a graph.

Each pair is reported once, and only if no reported fix orders it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate
from typing import Final, NamedTuple, TypeAlias

from cudakit.sanitize.ordering import (
    ASSUMED,
    EXACT,
    MERGED,
    SUMMARY,
    UNCERTAIN,
    Call,
    Clock,
    MemoryAccess,
)
from cudakit.sanitize.races import Confidence, LaunchPrecision
from cudakit.sanitize.records import AccessRows

# The earlier and the later access of a reported race. A third access that races with the earlier one, and
# that is ordered after the later one, is not reported: the fix of the reported race would order it, too.
ReportedPairs: TypeAlias = tuple[tuple[MemoryAccess, MemoryAccess], ...]

_CONFIDENCE_RANK = {Confidence.POSSIBLE: 0, Confidence.LIKELY: 1, Confidence.CERTAIN: 2}


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two unordered accesses, and the bytes that both of them access."""

    previous_access: MemoryAccess
    current_access: MemoryAccess
    lo: int
    hi: int
    confidence: Confidence
    is_approximate: bool

    @property
    def is_in_one_launch(self) -> bool:
        """Whether both accesses are by nodes of one graph launch."""
        previous, current = self.previous_access, self.current_access
        return (previous.slot, previous.tick) == (current.slot, current.tick)

    @property
    def rank(self) -> tuple[int, int, int]:
        """The more certain and then the later conflict has the higher rank."""
        call = self.previous_access.call
        return _CONFIDENCE_RANK[self.confidence], call.seq, call.node


class ConflictChecker:
    """Collects the conflicts of one access at a time, and calls ``on_conflict`` for those that are reported.

    During the check of a graph launch, ``node_order`` is the order of the graph's nodes.
    """

    def __init__(self, on_conflict: Callable[[Conflict], None]) -> None:
        self._on_conflict = on_conflict
        self.node_order = NodeOrder((), {})
        # Conflicts of the current access, by slot and graph node of the earlier access.
        self.pending_conflicts: dict[tuple[int, int], Conflict] = {}

    def check(
        self,
        reported_pairs: ReportedPairs,
        previous_accesses: Iterable[MemoryAccess],
        current_access: MemoryAccess,
        clock: Clock,
        common_range: tuple[int, int],
        certainly_overlap: bool,
        is_merged_state: bool,
    ) -> ReportedPairs:
        """Check an access against the earlier accesses of a state that do not happen before it.

        Returns the reported pairs of the state: ``reported_pairs`` and the new pairs. Unless
        ``certainly_overlap``, a race is only possible, because the stored ranges are not exact.
        With ``is_merged_state``, the state was merged from several states, so each earlier access is to
        some of the bytes of the state.
        """
        for access in previous_accesses:
            if not (
                self._are_ordered_nodes(access, current_access)
                or self._is_already_reported(reported_pairs, access, current_access, clock)
            ):
                reported_pairs = (*reported_pairs, (access, current_access))
                confidence = Confidence.POSSIBLE
                if certainly_overlap:
                    confidence = _confidence(access, current_access)
                self._add_conflict(
                    Conflict(access, current_access, *common_range, confidence, is_merged_state)
                )
        return reported_pairs

    def report(self) -> None:
        """Report the conflicts of the current access."""
        for conflict in self.pending_conflicts.values():
            if not self._is_implied(conflict):
                self._on_conflict(conflict)
        self.pending_conflicts.clear()

    def _add_conflict(self, new_conflict: Conflict) -> None:
        """Store one conflict per stream, with the stream's last operation.

        A wait for the last operation also covers the earlier operations of the stream. A graph launch counts
        as one operation, except for conflicts between its own nodes.
        """
        access = new_conflict.previous_access
        key = access.slot, access.call.node if new_conflict.is_in_one_launch else 0
        old_conflict = self.pending_conflicts.get(key)
        if old_conflict is None:
            self.pending_conflicts[key] = new_conflict
            return
        if (
            old_conflict.previous_access is access
            and old_conflict.confidence is new_conflict.confidence
        ):
            lo, hi = min(old_conflict.lo, new_conflict.lo), max(old_conflict.hi, new_conflict.hi)
            new_conflict = replace(new_conflict, lo=lo, hi=hi)
        if old_conflict.rank <= new_conflict.rank:
            self.pending_conflicts[key] = new_conflict

    def _is_implied(self, conflict: Conflict) -> bool:
        """Return whether waiting for a later node of the same graph launch would also fix this conflict."""
        slot, node = conflict.previous_access.slot, conflict.previous_access.call.node
        return conflict.is_in_one_launch and any(
            pending_slot == slot
            and later_node != node
            and self.node_order.precedes(node, later_node)
            for pending_slot, later_node in self.pending_conflicts
        )

    def _is_already_reported(
        self,
        reported_pairs: ReportedPairs,
        access: MemoryAccess,
        current_access: MemoryAccess,
        clock: Clock,
    ) -> bool:
        """Return whether a race of ``access`` was reported whose later access happens before this one."""
        return any(
            earlier_access is access
            and (
                later_access.tick <= clock[later_access.slot]
                or self._are_ordered_nodes(later_access, current_access)
            )
            for earlier_access, later_access in reported_pairs
        )

    def _are_ordered_nodes(self, first_access: MemoryAccess, second_access: MemoryAccess) -> bool:
        """Return whether two accesses are by nodes of one graph launch that the graph's edges order."""
        if (first_access.slot, first_access.tick) != (second_access.slot, second_access.tick):
            return False
        first_node, second_node = first_access.call.node, second_access.call.node
        return (
            first_node == second_node
            or self.node_order.precedes(first_node, second_node)
            or self.node_order.precedes(second_node, first_node)
        )


def _confidence(first_access: MemoryAccess, second_access: MemoryAccess) -> Confidence:
    """Return the confidence that two accesses, whose ranges overlap, share bytes.

    A merged range has bytes that were not accessed. So a race with it is only possible, unless the other
    access is exact and covers the whole merged range.
    """
    precisions = {first_access.precision, second_access.precision}
    uncovered_precisions = {
        access.precision
        for access, other in ((first_access, second_access), (second_access, first_access))
        if not (other.precision == EXACT and other.lo <= access.lo and access.hi <= other.hi)
    }
    if precisions == {ASSUMED} or UNCERTAIN in precisions or MERGED in uncovered_precisions:
        return Confidence.POSSIBLE
    is_likely = ASSUMED in precisions or SUMMARY in uncovered_precisions
    return Confidence.LIKELY if is_likely else Confidence.CERTAIN


# --- The order of a graph's nodes and the accesses of its launches, which equal launches share -----

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
