"""Vector clocks, and what they order: calls and the accesses of calls.

Each sequence of operations (a stream, the host) is a timeline with a slot of its own, and counts its releases
in ticks. An operation has the tick of its timeline, and comes before another one exactly if that one's
timeline has acquired the tick: ``operation.tick <= past[operation.slot]``. Clocks are never changed in place,
so keeping a clock is keeping a reference.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import Final, TypeAlias

from cudakit.core.sanitize.races import Sync
from cudakit.trace.kinds import Known, Mode

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


# Plain numbers: these are compared for every record of a trace.
READ: Final = int(Mode.READ)
WRITE: Final = int(Mode.WRITE)
ATOMIC: Final = int(Mode.ATOMIC)
EXACT: Final = int(Known.EXACT)
ASSUMED: Final = int(Known.ASSUMED)
UNCERTAIN: Final = int(Known.UNCERTAIN)


# These two are not frozen: that would make them four times as slow to make, and one is made per launch.
@dataclass(slots=True, eq=False)
class Call:
    """A call that enqueued work. Numbers are the trace's, ``name`` is the number of a string."""

    seq: int
    kind: int
    name: int
    stream: int  # 0: the host itself
    context: int
    device: int
    thread: int
    site: int
    graph: int = 0
    node: int = 0
    release: Release | None = (
        None  # of a stream-ordered free: who gets the memory next comes after it
    )


@dataclass(slots=True, eq=False)
class Touch:
    """What a call does to the bytes from ``lo`` up to ``hi``, and when: at a tick of its timeline."""

    slot: int
    tick: int
    call: Call
    lo: int
    hi: int
    mode: int
    known: int


def are_alike(one: Touch | None, other: Touch | None) -> bool:
    """Say whether two touches are ordered alike and would be reported alike."""
    if one is other:
        return True
    if one is None or other is None:
        return False
    mine, theirs = one.call, other.call
    return (
        (one.slot, one.tick, one.mode, one.known)
        == (other.slot, other.tick, other.mode, other.known)
        and (mine.kind, mine.name, mine.site) == (theirs.kind, theirs.name, theirs.site)
        and mine.node == theirs.node
    )
