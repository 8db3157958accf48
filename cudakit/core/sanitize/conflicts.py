"""Select the pairs of unordered accesses to report: each pair once, and none that another report covers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from cudakit.core.sanitize.access_state import ReportedPair
from cudakit.core.sanitize.clocks import (
    ASSUMED,
    EXACT,
    MERGED,
    SUMMARY,
    UNCERTAIN,
    Clock,
    MemoryAccess,
)
from cudakit.core.sanitize.races import Confidence

_RANK = {Confidence.POSSIBLE: 0, Confidence.LIKELY: 1, Confidence.CERTAIN: 2}


class ReportedState(Protocol):
    """A state of shadow memory with the pairs that were reported."""

    already_reported: tuple[ReportedPair, ...]

    @property
    def merged(self) -> bool:
        """Whether the state has accesses to a part of its bytes, because segments were merged."""


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
    """Collects the conflicts of one access at a time, and passes those to report to ``on_conflict``.

    ``ancestors`` orders the nodes of the graph whose launch is being checked: for each node, the nodes that
    happen before it, as the bits of a number.
    """

    def __init__(self, on_conflict: Callable[[Conflict], None]) -> None:
        self._on_conflict = on_conflict
        self.ancestors: Mapping[int, int] = {}
        # Conflicts of the current access, by the slot and the graph node of the earlier one.
        self.pending: dict[tuple[int, int], Conflict] = {}

    def check(
        self,
        state: ReportedState,
        previous: Iterable[MemoryAccess],
        current: MemoryAccess,
        past: Clock,
        shared: tuple[int, int],
        *,
        share_bytes: bool = True,
    ) -> None:
        """Check an access against the earlier accesses of a state that do not happen before it.

        ``share_bytes``: the accesses share bytes, as far as their own ranges are exact.
        """
        for access in previous:
            if not (
                self._are_ordered_nodes(access, current)
                or self._is_already_reported(state, access, current, past)
            ):
                state.already_reported = (*state.already_reported, (access, current))
                confidence = _confidence(access, current) if share_bytes else Confidence.POSSIBLE
                self._add(Conflict(access, current, *shared, confidence, state.merged))

    def report(self) -> None:
        """Report the conflicts of the current access."""
        for conflict in self.pending.values():
            if not self._is_implied(conflict):
                self._on_conflict(conflict)
        self.pending.clear()

    def _add(self, new: Conflict) -> None:
        """Keep one conflict per stream, with its last operation: a wait for that covers all earlier ones.

        A graph launch is one operation, except for conflicts among its own nodes.
        """
        previous = new.previous
        key = previous.slot, previous.call.node if _is_one_launch(new) else 0
        old = self.pending.get(key)
        if old is not None and old.previous is previous and old.confidence is new.confidence:
            new = replace(new, lo=min(old.lo, new.lo), hi=max(old.hi, new.hi))
        if old is None or _rank(old) <= _rank(new):
            self.pending[key] = new

    def _is_implied(self, conflict: Conflict) -> bool:
        """Return whether waiting for a later node of the same graph launch would also fix this conflict."""
        slot, node = conflict.previous.slot, conflict.previous.call.node
        return _is_one_launch(conflict) and any(
            at == slot and later != node and self.ancestors.get(later, 0) >> node & 1
            for at, later in self.pending
        )

    def _is_already_reported(
        self, state: ReportedState, access: MemoryAccess, current: MemoryAccess, past: Clock
    ) -> bool:
        """Return whether the access was reported against a later one that happens before the current one."""
        return any(
            earlier is access
            and (later.tick <= past[later.slot] or self._are_ordered_nodes(later, current))
            for earlier, later in state.already_reported
        )

    def _are_ordered_nodes(self, one: MemoryAccess, other: MemoryAccess) -> bool:
        """Return whether two accesses are by nodes of one graph launch that the graph's edges order."""
        if (one.slot, one.tick) != (other.slot, other.tick):
            return False
        before, after = one.call.node, other.call.node
        return (
            before == after
            or bool(self.ancestors.get(after, 0) >> before & 1)
            or bool(self.ancestors.get(before, 0) >> after & 1)
        )


def _confidence(one: MemoryAccess, other: MemoryAccess) -> Confidence:
    """Return the confidence that two accesses, whose ranges overlap, share bytes.

    Merged ranges have bytes that were not accessed. They never make a race certain or likely, unless the
    other access is to all of their bytes.
    """
    known = {one.known, other.known}
    unsure = _unsure(one, other) | _unsure(other, one)
    if known == {ASSUMED} or UNCERTAIN in known or MERGED in unsure:
        return Confidence.POSSIBLE
    return Confidence.LIKELY if ASSUMED in known or SUMMARY in unsure else Confidence.CERTAIN


def _unsure(one: MemoryAccess, other: MemoryAccess) -> set[int]:
    """Return the precision of an access if another access may be to bytes that it did not access."""
    is_whole = other.known == EXACT and other.lo <= one.lo and one.hi <= other.hi
    return set() if is_whole else {one.known}


def _is_one_launch(conflict: Conflict) -> bool:
    previous, current = conflict.previous, conflict.current
    return (previous.slot, previous.tick) == (current.slot, current.tick)


def _rank(conflict: Conflict) -> tuple[int, int, int]:
    call = conflict.previous.call
    return _RANK[conflict.confidence], call.seq, call.node
