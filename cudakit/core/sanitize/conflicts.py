"""Which pairs of unordered accesses are reported: each pair once, and none that another one implies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from cudakit.core.sanitize.access_state import ReportedPair
from cudakit.core.sanitize.clocks import ASSUMED, EXACT, UNCERTAIN, Clock, MemoryAccess
from cudakit.core.sanitize.races import Confidence

_RANK = {Confidence.POSSIBLE: 0, Confidence.LIKELY: 1, Confidence.CERTAIN: 2}


class ReportedState(Protocol):
    """A state of bytes that remembers which pairs were reported."""

    already_reported: tuple[ReportedPair, ...]

    @property
    def approximate(self) -> bool:
        """Whether accesses of adjacent bytes may be stored for these."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two unordered accesses, and the bytes that both of them access."""

    previous: MemoryAccess
    current: MemoryAccess
    lo: int
    hi: int
    confidence: Confidence
    approximate: bool


class ConflictChecker:
    """Reports the conflicts of one access after the other, to ``found``.

    ``ancestors`` orders the nodes of the graph whose launch is being checked: for each node, the nodes that
    happen before it, as bits of a number.
    """

    def __init__(self, found: Callable[[Conflict], None]) -> None:
        self._found = found
        self.ancestors: Mapping[int, int] = {}
        self.pending: dict[
            tuple[int, int], Conflict
        ] = {}  # conflicts of the current access, by stream and node

    def check(
        self,
        kept: ReportedState,
        previous: Iterable[MemoryAccess],
        current: MemoryAccess,
        past: Clock,
        shared: tuple[int, int],
        *,
        near: bool = False,
    ) -> None:
        """Check accesses that no clock orders; ``near``: they may share no bytes."""
        for access in previous:
            if not (
                self._is_in_order(access, current)
                or self._is_already_reported(kept, access, current, past)
            ):
                kept.already_reported = (*kept.already_reported, (access, current))
                confidence = Confidence.POSSIBLE if near else _confidence(kept, access, current)
                self._add(Conflict(access, current, *shared, confidence, kept.approximate))

    def report(self) -> None:
        """Report the conflicts of the current access."""
        for conflict in self.pending.values():
            if not self._is_implied(conflict):
                self._found(conflict)
        self.pending.clear()

    def _add(self, new: Conflict) -> None:
        """Store one conflict per stream: work ordered after its last operation is ordered after all others.

        A graph launch is one operation, except for conflicts among its own nodes.
        """
        previous = new.previous
        place = previous.slot, previous.call.node if _is_one_launch(new) else 0
        old = self.pending.get(place)
        if old is not None and old.previous is previous and old.confidence is new.confidence:
            new = replace(new, lo=min(old.lo, new.lo), hi=max(old.hi, new.hi))
        if old is None or _rank(old) <= _rank(new):
            self.pending[place] = new

    def _is_implied(self, conflict: Conflict) -> bool:
        """Return whether order after a later node of the same launch would also fix this conflict."""
        slot, node = conflict.previous.slot, conflict.previous.call.node
        return _is_one_launch(conflict) and any(
            at == slot and later != node and self.ancestors.get(later, 0) >> node & 1
            for at, later in self.pending
        )

    def _is_already_reported(
        self, kept: ReportedState, access: MemoryAccess, current: MemoryAccess, past: Clock
    ) -> bool:
        return any(
            who is access and (later.tick <= past[later.slot] or self._is_in_order(later, current))
            for who, later in kept.already_reported
        )

    def _is_in_order(self, one: MemoryAccess, other: MemoryAccess) -> bool:
        """Return whether two accesses are of one graph launch whose edges order them."""
        if (one.slot, one.tick) != (other.slot, other.tick):
            return False
        before, after = one.call.node, other.call.node
        return (
            before == after
            or bool(self.ancestors.get(after, 0) >> before & 1)
            or bool(self.ancestors.get(before, 0) >> after & 1)
        )


def _confidence(kept: ReportedState, one: MemoryAccess, other: MemoryAccess) -> Confidence:
    """Return how certain it is that two accesses share bytes."""
    known = {one.known, other.known}
    if known == {ASSUMED} or UNCERTAIN in known:
        return Confidence.POSSIBLE
    return Confidence.CERTAIN if known == {EXACT} and not kept.approximate else Confidence.LIKELY


def _is_one_launch(conflict: Conflict) -> bool:
    previous, current = conflict.previous, conflict.current
    return (previous.slot, previous.tick) == (current.slot, current.tick)


def _rank(conflict: Conflict) -> tuple[int, int, int]:
    call = conflict.previous.call
    return _RANK[conflict.confidence], call.seq, call.node
