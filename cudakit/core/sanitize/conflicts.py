"""Which unordered pairs are conflicts to tell of: each once, and none that follows from another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from cudakit.core.sanitize.access_state import Pardon
from cudakit.core.sanitize.clocks import ASSUMED, EXACT, UNCERTAIN, Clock, Touch
from cudakit.core.sanitize.races import Confidence

_RANK = {Confidence.POSSIBLE: 0, Confidence.LIKELY: 1, Confidence.CERTAIN: 2}


class Remembers(Protocol):
    """What touches are kept in."""

    pardons: tuple[Pardon, ...]

    @property
    def approximate(self) -> bool:
        """Whether touches of neighbouring bytes may be kept for these."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two touches that nothing orders, and the bytes that both of them touch."""

    previous: Touch
    current: Touch
    lo: int
    hi: int
    confidence: Confidence
    approximate: bool


class Judge:
    """Tells of the conflicts of one touch after the other, to ``found``.

    ``ancestors`` says what orders the nodes of the graph whose launch is looked at: for each node, the set
    of the nodes that come before it, as the bits of a number.
    """

    def __init__(self, found: Callable[[Conflict], None]) -> None:
        self._found = found
        self.ancestors: Mapping[int, int] = {}
        self.open: dict[tuple[int, int], Conflict] = {}  # of this touch, by stream and node

    def weigh(
        self,
        kept: Remembers,
        previous: Iterable[Touch],
        current: Touch,
        past: Clock,
        shared: tuple[int, int],
        *,
        near: bool = False,
    ) -> None:
        """Judge touches that are not in a clock; ``near``: it is not known that they share bytes."""
        for touch in previous:
            if not (
                self._is_in_order(touch, current) or self._is_pardoned(kept, touch, current, past)
            ):
                kept.pardons = (*kept.pardons, (touch, current))
                confidence = Confidence.POSSIBLE if near else _confidence(kept, touch, current)
                self._add(Conflict(touch, current, *shared, confidence, kept.approximate))

    def close(self) -> None:
        """End with the current touch."""
        for conflict in self.open.values():
            if not self._is_implied(conflict):
                self._found(conflict)
        self.open.clear()

    def _add(self, new: Conflict) -> None:
        """Keep one conflict with each stream: what comes after its last operation comes after all others.

        A launch of a graph is one operation, but for its own nodes.
        """
        previous = new.previous
        place = previous.slot, previous.call.node if _is_one_launch(new) else 0
        old = self.open.get(place)
        if old is not None and old.previous is previous and old.confidence is new.confidence:
            new = replace(new, lo=min(old.lo, new.lo), hi=max(old.hi, new.hi))
        if old is None or _weight(old) <= _weight(new):
            self.open[place] = new

    def _is_implied(self, conflict: Conflict) -> bool:
        """Say whether to come after a later node of the same launch is enough."""
        slot, node = conflict.previous.slot, conflict.previous.call.node
        return _is_one_launch(conflict) and any(
            at == slot and later != node and self.ancestors.get(later, 0) >> node & 1
            for at, later in self.open
        )

    def _is_pardoned(self, kept: Remembers, touch: Touch, current: Touch, past: Clock) -> bool:
        return any(
            who is touch and (later.tick <= past[later.slot] or self._is_in_order(later, current))
            for who, later in kept.pardons
        )

    def _is_in_order(self, one: Touch, other: Touch) -> bool:
        """Say whether two touches are of one launch of a graph, whose edges order them."""
        if (one.slot, one.tick) != (other.slot, other.tick):
            return False
        before, after = one.call.node, other.call.node
        return (
            before == after
            or bool(self.ancestors.get(after, 0) >> before & 1)
            or bool(self.ancestors.get(before, 0) >> after & 1)
        )


def _confidence(kept: Remembers, one: Touch, other: Touch) -> Confidence:
    """Say how sure it is that two touches share bytes."""
    known = {one.known, other.known}
    if known == {ASSUMED} or UNCERTAIN in known:
        return Confidence.POSSIBLE
    return Confidence.CERTAIN if known == {EXACT} and not kept.approximate else Confidence.LIKELY


def _is_one_launch(conflict: Conflict) -> bool:
    previous, current = conflict.previous, conflict.current
    return (previous.slot, previous.tick) == (current.slot, current.tick)


def _weight(conflict: Conflict) -> tuple[int, int, int]:
    call = conflict.previous.call
    return _RANK[conflict.confidence], call.seq, call.node
