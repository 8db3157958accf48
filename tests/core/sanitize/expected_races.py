"""Compute by brute force which races the engine must report, from the order of the operations alone.

For each byte, a race hides its consequences: once it is reported, the later side counts as ordered after the
earlier one. The remaining accesses are reported against the last operation of each stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

from gpu.happens_before import Operation, Order

from cudakit.core.sanitize.races import Race
from cudakit.trace.events import Access, Event
from cudakit.trace.kinds import AccessMode

# The later and the earlier side: the call and the graph node of each.
Pair: TypeAlias = tuple[tuple[int, int], tuple[int, int]]


@dataclass(eq=False)
class Touch:
    """One access of an operation."""

    operation: Operation
    access: Access

    @property
    def key(self) -> tuple[int, int]:
        return self.operation.event.seq, self.operation.node

    def comes_after(self, other: Touch) -> bool:
        one = self.operation
        return other.operation is one or other.operation.number in one.predecessors

    def conflicts_with(self, other: Touch) -> bool:
        one, two = self.access.mode, other.access.mode
        return bool((one | two) & AccessMode.WRITE) and not one & two & AccessMode.ATOMIC


@dataclass
class Byte:
    """All accesses to one byte, each with the accesses that happen before it or count as such."""

    predecessors: dict[Touch, set[Touch]] = field(default_factory=dict)

    def add(self, new: Touch) -> set[Touch]:
        """Add an access; return the accesses that it must be reported against."""
        known = {old for old in self.predecessors if new.comes_after(old)}
        known |= {older for old in known for older in self.predecessors[old]}
        races = {old for old in self.predecessors if old not in known and new.conflicts_with(old)}
        implied = {older for old in races for older in self.predecessors[old]}
        self.predecessors[new] = known | races | implied
        return races - implied


def pairs(trace: Iterable[Event]) -> Counter[Pair]:
    """Count the pairs that an engine must report."""
    order = Order()
    for event in trace:
        order.feed(event)
    touches = [Touch(one, access) for one in order.operations for access in one.accesses]
    ends = sorted({end for t in touches for end in (t.access.lo, t.access.hi)})
    bytes_ = {lo: Byte() for lo, _ in pairwise(ends)}
    found: Counter[Pair] = Counter()
    for touch in touches:
        lo, hi = touch.access.lo, touch.access.hi
        races = {race for at in bytes_ if lo <= at < hi for race in bytes_[at].add(touch)}
        found.update((touch.key, race.key) for race in _last_of_each_stream(touch, races))
    return found


def reported(races: Sequence[Race]) -> Counter[Pair]:
    """Count the pairs that an engine reported."""
    return Counter(
        ((r.current.seq, r.current.node), (r.previous.seq, r.previous.node)) for r in races
    )


def _last_of_each_stream(current: Touch, races: set[Touch]) -> Iterator[Touch]:
    """Yield the last operation of each stream; the nodes of one graph launch count separately."""
    last: dict[tuple[int, int], Touch] = {}
    for race in sorted(races, key=lambda race: race.operation.number):
        own = race.operation.event.seq == current.operation.event.seq
        last[race.operation.stream, race.operation.node if own else 0] = race
    nodes = {race for race in last.values() if race.key[0] == current.key[0]}
    for race in last.values():
        if not any(race in nodes and other.comes_after(race) for other in nodes - {race}):
            yield race
