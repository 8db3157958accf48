"""Compute by brute force which races the engine must report, from the order of the operations alone.

For each byte, a race hides its consequences: after it is reported, the later access counts as ordered after
the earlier one. The remaining accesses are reported against the last operation of each stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

from gpu.happens_before import Operation, Order

from cudakit.sanitize.races import Race
from cudakit.trace.events import Access, Event
from cudakit.trace.kinds import AccessMode

# The number of the call and the graph node: of the later operation, then of the earlier one.
Pair: TypeAlias = tuple[tuple[int, int], tuple[int, int]]


@dataclass(eq=False)
class OperationAccess:
    """One access of an operation."""

    operation: Operation
    access: Access

    @property
    def key(self) -> tuple[int, int]:
        return self.operation.event.seq, self.operation.node

    def is_ordered_after(self, earlier: OperationAccess) -> bool:
        return (
            earlier.operation is self.operation
            or earlier.operation.number in self.operation.predecessors
        )

    def conflicts_with(self, earlier: OperationAccess) -> bool:
        modes_of_either, modes_of_both = (
            self.access.mode | earlier.access.mode,
            self.access.mode & earlier.access.mode,
        )
        return bool(modes_of_either & AccessMode.WRITE) and not modes_of_both & AccessMode.ATOMIC


@dataclass
class ByteState:
    """All accesses to one byte, each with the accesses that count as ordered before it."""

    predecessors: dict[OperationAccess, set[OperationAccess]] = field(default_factory=dict)

    def add(self, access: OperationAccess) -> set[OperationAccess]:
        """Add an access; return the accesses that it must be reported against."""
        ordered = {earlier for earlier in self.predecessors if access.is_ordered_after(earlier)}
        ordered |= self._all_predecessors(ordered)
        races = {
            earlier
            for earlier in self.predecessors
            if earlier not in ordered and access.conflicts_with(earlier)
        }
        implied = self._all_predecessors(races)
        self.predecessors[access] = ordered | races | implied
        return races - implied

    def _all_predecessors(self, accesses: set[OperationAccess]) -> set[OperationAccess]:
        return {earlier for access in accesses for earlier in self.predecessors[access]}


def pairs(trace: Iterable[Event]) -> Counter[Pair]:
    """Count the pairs that an engine must report."""
    order = Order()
    for event in trace:
        order.feed(event)
    accesses = [
        OperationAccess(operation, access)
        for operation in order.operations
        for access in operation.accesses
    ]
    boundaries = sorted(
        {
            end
            for operation_access in accesses
            for end in (operation_access.access.lo, operation_access.access.hi)
        }
    )
    # All bytes between two boundaries have the same accesses, so one byte stands for them.
    states = {address: ByteState() for address, _ in pairwise(boundaries)}
    pair_counts: Counter[Pair] = Counter()
    for current in accesses:
        races: set[OperationAccess] = set()
        for address, state in states.items():
            if current.access.lo <= address < current.access.hi:
                races |= state.add(current)
        last_races = _last_of_each_stream(current, races)
        pair_counts.update((current.key, previous.key) for previous in last_races)
    return pair_counts


def reported(races: Sequence[Race]) -> Counter[Pair]:
    """Count the pairs that an engine reported."""
    return Counter(
        ((race.current.seq, race.current.node), (race.previous.seq, race.previous.node))
        for race in races
    )


def _last_of_each_stream(
    current: OperationAccess, races: set[OperationAccess]
) -> Iterator[OperationAccess]:
    """Yield the last operation of each stream; the nodes of one graph launch count separately."""
    last: dict[tuple[int, int], OperationAccess] = {}
    for previous in sorted(races, key=lambda access: access.operation.number):
        is_same_launch = previous.operation.event.seq == current.operation.event.seq
        node = previous.operation.node if is_same_launch else 0
        last[previous.operation.stream, node] = previous
    nodes = {previous for previous in last.values() if previous.key[0] == current.key[0]}
    for previous in last.values():
        is_implied = previous in nodes and any(
            node.is_ordered_after(previous) for node in nodes - {previous}
        )
        if not is_implied:
            yield previous
