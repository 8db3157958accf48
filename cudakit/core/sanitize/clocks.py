"""Vector clocks, and the calls and accesses that they order.

Each sequence of ordered operations (a stream, the host) is a timeline with its own slot in all clocks. A
timeline counts its releases in ticks: points that others can wait for. Operation A happens before operation B
exactly if B's timeline has acquired A's tick: ``a.tick <= b_past[a.slot]``. Clocks are never changed in
place, so references to them can be stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import Final, TypeAlias

from cudakit.core.sanitize.races import Sync
from cudakit.trace.kinds import AccessMode, Precision
from cudakit.trace.ranges import OpenRange

Clock: TypeAlias = list[int]  # by slot: the last tick that happens before
Reasons: TypeAlias = list[Sync | None]  # by slot: the synchronization that established this order

ALWAYS: Final = 1 << 62  # a timeline's entry for itself: its operations are ordered
NEVER: Final = 1 << 63  # the tick of a free: no later access is ordered after it


# Not frozen, because that makes creation four times as slow. Instances are never changed.
@dataclass(slots=True, eq=False)
class Release:
    """A point of a timeline, with its clock. A timeline that acquires it is ordered after the point."""

    slot: int
    tick: int
    past: Clock
    reasons: Reasons


class Timeline:
    """A sequence of ordered operations, with the clock of the next one."""

    __slots__ = ("_last", "past", "reasons", "slot", "tick")

    def __init__(self, slot: int, width: int, tick: int = 1) -> None:
        self.slot = slot
        self.tick = tick
        self.past: Clock = [0] * width
        self.past[slot] = ALWAYS
        self.reasons: Reasons = [None] * width
        self._last: Release | None = None

    def acquire(self, release: Release, reason: Sync | None) -> bool:
        """Order this timeline after a release. Return False if it already is.

        Without a ``reason``, the reasons of the release are stored.
        """
        if release.tick <= self.past[release.slot]:
            return False
        width = len(self.past)
        released = release.past + [0] * (width - len(release.past))
        released[release.slot] = release.tick
        reasons: Iterable[Sync | None] = repeat(reason)
        if reason is None:
            reasons = release.reasons + [None] * (width - len(release.reasons))
        self.reasons = [
            kept if own_tick >= released_tick else new
            for own_tick, released_tick, kept, new in zip(
                self.past, released, self.reasons, reasons, strict=False
            )
        ]
        self.past = list(map(max, self.past, released))
        return True

    def snapshot(self) -> Release:
        """Return the present clock as a release of the current tick."""
        return Release(self.slot, self.tick, self.past, self.reasons)

    def widen(self, width: int) -> None:
        """Extend the clock to more timelines."""
        more = width - len(self.past)
        self.past = self.past + [0] * more
        self.reasons = self.reasons + [None] * more


# Plain numbers, since they are compared for every record of a trace.
READ: Final = int(AccessMode.READ)
WRITE: Final = int(AccessMode.WRITE)
ATOMIC: Final = int(AccessMode.ATOMIC)
MERGED: Final = int(Precision.MERGED)
EXACT: Final = int(Precision.EXACT)
SUMMARY: Final = int(Precision.SUMMARY)
ASSUMED: Final = int(Precision.ASSUMED)
UNCERTAIN: Final = int(Precision.UNCERTAIN)


# These two are not frozen, because that makes creation four times as slow, and each launch creates them.
@dataclass(slots=True, eq=False)
class Call:
    """A call that enqueued work. Numbers are those of the trace; ``name`` is the number of a string."""

    seq: int
    kind: int
    name: int
    stream: int  # 0: the host itself
    context: int
    device: int
    thread: int
    site: int
    innermost_range: OpenRange | None = None  # of NVTX, when the call was made
    graph: int = 0
    node: int = 0
    release: Release | None = (
        None  # of a stream-ordered free: the next allocation is ordered after it
    )


@dataclass(slots=True, eq=False)
class MemoryAccess:
    """An access of a call to the bytes from ``lo`` up to ``hi``, at a tick of its timeline."""

    slot: int
    tick: int
    call: Call
    lo: int
    hi: int
    mode: int
    known: int


def are_equivalent(one: MemoryAccess | None, other: MemoryAccess | None) -> bool:
    """Return whether two accesses give the same order and the same report."""
    if one is other:
        return True
    if one is None or other is None:
        return False
    call, other_call = one.call, other.call
    return (
        (one.slot, one.tick, one.mode, one.known)
        == (other.slot, other.tick, other.mode, other.known)
        and (call.kind, call.name, call.site) == (other_call.kind, other_call.name, other_call.site)
        and call.node == other_call.node
    )
