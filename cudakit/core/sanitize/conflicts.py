"""Select the pairs of unordered accesses to report: each pair once, and only if no reported fix orders it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from cudakit.core.sanitize.access_state import ReportedPairs
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

_CONFIDENCE_RANK = {Confidence.POSSIBLE: 0, Confidence.LIKELY: 1, Confidence.CERTAIN: 2}


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

    During the check of a graph launch, ``ancestors`` maps each node to the nodes that happen before it, as
    the bits of a number.
    """

    def __init__(self, on_conflict: Callable[[Conflict], None]) -> None:
        self._on_conflict = on_conflict
        self.ancestors: Mapping[int, int] = {}
        # Conflicts of the current access, by slot and graph node of the earlier access.
        self.pending: dict[tuple[int, int], Conflict] = {}

    def check(
        self,
        already_reported: ReportedPairs,
        previous: Iterable[MemoryAccess],
        current: MemoryAccess,
        clock: Clock,
        shared_bytes: tuple[int, int],
        certainly_overlap: bool,
        approximate: bool,
    ) -> ReportedPairs:
        """Check an access against the earlier accesses of a state that do not happen before it.

        Returns the reported pairs of the state: ``already_reported`` and the new pairs. Unless
        ``certainly_overlap``, a race is only possible, because the stored ranges are not exact.
        With ``approximate``, the state was merged from several states, so each earlier access is to
        some of the bytes of the state.
        """
        for access in previous:
            if not (
                self._are_ordered_nodes(access, current)
                or self._is_already_reported(already_reported, access, current, clock)
            ):
                already_reported = (*already_reported, (access, current))
                confidence = (
                    _confidence(access, current) if certainly_overlap else Confidence.POSSIBLE
                )
                self._add(Conflict(access, current, *shared_bytes, confidence, approximate))
        return already_reported

    def report(self) -> None:
        """Report the conflicts of the current access."""
        for conflict in self.pending.values():
            if not self._is_implied(conflict):
                self._on_conflict(conflict)
        self.pending.clear()

    def _add(self, new_conflict: Conflict) -> None:
        """Store one conflict per stream, with the stream's last operation.

        A wait for the last operation also covers the earlier operations of the stream. A graph launch counts
        as one operation, except for conflicts between its own nodes.
        """
        previous = new_conflict.previous
        stream_and_node = previous.slot, previous.call.node if _is_one_launch(new_conflict) else 0
        old_conflict = self.pending.get(stream_and_node)
        if (
            old_conflict is not None
            and old_conflict.previous is previous
            and old_conflict.confidence is new_conflict.confidence
        ):
            new_conflict = replace(
                new_conflict,
                lo=min(old_conflict.lo, new_conflict.lo),
                hi=max(old_conflict.hi, new_conflict.hi),
            )
        if old_conflict is None or _conflict_rank(old_conflict) <= _conflict_rank(new_conflict):
            self.pending[stream_and_node] = new_conflict

    def _is_implied(self, conflict: Conflict) -> bool:
        """Return whether waiting for a later node of the same graph launch would also fix this conflict."""
        slot, node = conflict.previous.slot, conflict.previous.call.node
        return _is_one_launch(conflict) and any(
            pending_slot == slot
            and later_node != node
            and self.ancestors.get(later_node, 0) >> node & 1
            for pending_slot, later_node in self.pending
        )

    def _is_already_reported(
        self,
        already_reported: ReportedPairs,
        access: MemoryAccess,
        current: MemoryAccess,
        clock: Clock,
    ) -> bool:
        """Return whether a race of ``access`` was reported whose later access happens before ``current``."""
        return any(
            earlier_access is access
            and (
                later_access.tick <= clock[later_access.slot]
                or self._are_ordered_nodes(later_access, current)
            )
            for earlier_access, later_access in already_reported
        )

    def _are_ordered_nodes(self, first_access: MemoryAccess, second_access: MemoryAccess) -> bool:
        """Return whether two accesses are by nodes of one graph launch that the graph's edges order."""
        if (first_access.slot, first_access.tick) != (second_access.slot, second_access.tick):
            return False
        first_node, second_node = first_access.call.node, second_access.call.node
        return (
            first_node == second_node
            or bool(self.ancestors.get(second_node, 0) >> first_node & 1)
            or bool(self.ancestors.get(first_node, 0) >> second_node & 1)
        )


def _confidence(first_access: MemoryAccess, second_access: MemoryAccess) -> Confidence:
    """Return the confidence that two accesses, whose ranges overlap, share bytes.

    A merged range has bytes that were not accessed. So a race with it is only possible, unless the other
    access covers the whole merged range.
    """
    precisions = {first_access.precision, second_access.precision}
    uncovered_precisions = _uncovered_precision(first_access, second_access) | _uncovered_precision(
        second_access, first_access
    )
    if precisions == {ASSUMED} or UNCERTAIN in precisions or MERGED in uncovered_precisions:
        return Confidence.POSSIBLE
    return (
        Confidence.LIKELY
        if ASSUMED in precisions or SUMMARY in uncovered_precisions
        else Confidence.CERTAIN
    )


def _uncovered_precision(access: MemoryAccess, other_access: MemoryAccess) -> set[int]:
    """Return the precision of ``access``, or an empty set if an exact ``other_access`` covers its range."""
    is_covered = (
        other_access.precision == EXACT
        and other_access.lo <= access.lo
        and access.hi <= other_access.hi
    )
    return set() if is_covered else {access.precision}


def _is_one_launch(conflict: Conflict) -> bool:
    previous, current = conflict.previous, conflict.current
    return (previous.slot, previous.tick) == (current.slot, current.tick)


def _conflict_rank(conflict: Conflict) -> tuple[int, int, int]:
    call = conflict.previous.call
    return _CONFIDENCE_RANK[conflict.confidence], call.seq, call.node
