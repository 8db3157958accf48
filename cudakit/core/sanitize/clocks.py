"""Vector clocks: what comes after what.

Whatever acts one step after the other is a timeline with a slot of its own: a stream, the host. It counts
its releases in ticks. An operation has the tick of its timeline, and comes before another one exactly if
that one's timeline knows of the tick: ``operation.tick <= past[operation.slot]``. Clocks are never changed
in place, so that to keep one is to keep a reference.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import Final, TypeAlias

from cudakit.core.sanitize.races import Sync

Clock: TypeAlias = list[int]  # by slot: the last tick that is known of
Reasons: TypeAlias = list[Sync | None]  # by slot: the synchronisation by which it is known

ALWAYS: Final = 1 << 62  # what a timeline knows of itself
NEVER: Final = 1 << 63  # the tick of what nothing may come after


# Not frozen, as that would make it four times as slow to make; it is never changed.
@dataclass(slots=True, eq=False)
class Release:
    """All that a timeline had done and learnt at some moment: who acquires it comes after that."""

    slot: int
    tick: int
    past: Clock
    reasons: Reasons


class Timeline:
    """A sequence of operations, and what each next one of them comes after."""

    __slots__ = ("_last", "past", "reasons", "slot", "tick")

    def __init__(self, slot: int, width: int, tick: int = 1) -> None:
        self.slot = slot
        self.tick = tick
        self.past: Clock = [0] * width
        self.past[slot] = ALWAYS
        self.reasons: Reasons = [None] * width
        self._last: Release | None = None

    def acquire(self, release: Release, reason: Sync | None) -> bool:
        """Come after a release, for a reason, or for those that led to it; False where that is so already."""
        if release.tick <= self.past[release.slot]:
            return False
        width = len(self.past)
        theirs = release.past + [0] * (width - len(release.past))
        theirs[release.slot] = release.tick
        reasons: Iterable[Sync | None] = repeat(reason)
        if reason is None:
            reasons = release.reasons + [None] * (width - len(release.reasons))
        self.reasons = [
            kept if mine >= their else new
            for mine, their, kept, new in zip(
                self.past, theirs, self.reasons, reasons, strict=False
            )
        ]
        self.past = list(map(max, self.past, theirs))
        return True

    def snapshot(self) -> Release:
        """Return all that is done and known by now, as a release of the current tick."""
        return Release(self.slot, self.tick, self.past, self.reasons)

    def widen(self, width: int) -> None:
        """Make room for more timelines."""
        more = width - len(self.past)
        self.past = self.past + [0] * more
        self.reasons = self.reasons + [None] * more
