"""Vector clocks, and the calls and accesses that they order.

A timeline is a sequence of ordered operations: a stream, or a thread of the host. Each timeline has a slot:
its index in all clocks. A release is a point of a timeline that other timelines can wait for; each release
begins a new tick of its timeline. Operation A happens before operation B exactly if B's timeline has acquired
A's tick: ``a.tick <= b_clock[a.slot]``. Clocks are never changed in place, so references to them can be
stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import lt
from typing import Final, TypeAlias

from cudakit.sanitize.races import CollectiveOperation, Sync
from cudakit.trace.kinds import AccessMode, Precision
from cudakit.trace.ranges import OpenRange

# A clock has one tick for each slot: the last tick of the slot's timeline that happens before the operation.
Clock: TypeAlias = list[int]
# For each slot, the synchronization that set the tick of a clock; None if no synchronization did.
TickSyncs: TypeAlias = list[Sync | None]

# Tick that a timeline's clock has for the timeline itself, because its operations are ordered.
ALWAYS: Final = 1 << 62
# Tick of a stream-ordered free. No clock has a tick that is this high, so no later access is ordered after
# the free.
NEVER: Final = 1 << 63


# This class is not frozen, because that makes creation four times as slow. Instances are never changed.
@dataclass(slots=True, eq=False)
class Release:
    """A point of a timeline, with its clock. A timeline that acquires the release is ordered after it."""

    slot: int
    tick: int
    clock: Clock
    tick_syncs: TickSyncs


class Timeline:
    """A sequence of ordered operations, with the clock of the next operation."""

    __slots__ = ("_last_release", "clock", "slot", "tick", "tick_syncs")

    def __init__(self, slot: int, width: int, tick: int = 1) -> None:
        self.slot = slot
        self.tick = tick
        self.clock: Clock = [0] * width
        self.clock[slot] = ALWAYS
        self.tick_syncs: TickSyncs = [None] * width
        self._last_release: Release | None = None

    def acquire(self, release: Release, sync: Sync | None) -> bool:
        """Order this timeline after a release. Return False if this order already exists.

        ``sync`` is stored for each slot whose tick increases; if ``sync`` is None, the synchronizations
        in the release are stored.
        """
        if release.tick <= self.clock[release.slot]:
            return False
        # Most slots have the same tick in both clocks, so only the others are found and then changed.
        advanced_slots = [
            slot
            for slot, is_earlier in enumerate(map(lt, self.clock, release.clock))
            if is_earlier and slot != release.slot
        ]
        self.clock, self.tick_syncs = self.clock.copy(), self.tick_syncs.copy()
        for slot in advanced_slots:
            self.clock[slot] = release.clock[slot]
            self.tick_syncs[slot] = sync or release.tick_syncs[slot]
        self.clock[release.slot] = release.tick
        self.tick_syncs[release.slot] = sync or release.tick_syncs[release.slot]
        return True

    def snapshot(self) -> Release:
        """Return the current clock as a release of the current tick."""
        return Release(self.slot, self.tick, self.clock, self.tick_syncs)

    def widen(self, width: int) -> None:
        """Extend the clock to ``width`` slots."""
        new_slot_count = width - len(self.clock)
        self.clock = self.clock + [0] * new_slot_count
        self.tick_syncs = self.tick_syncs + [None] * new_slot_count


# Plain integers are faster to compare than enumerations, and the kinds below are compared for every
# record.
READ: Final = int(AccessMode.READ)
WRITE: Final = int(AccessMode.WRITE)
ATOMIC: Final = int(AccessMode.ATOMIC)
MERGED: Final = int(Precision.MERGED)
EXACT: Final = int(Precision.EXACT)
SUMMARY: Final = int(Precision.SUMMARY)
ASSUMED: Final = int(Precision.ASSUMED)
UNCERTAIN: Final = int(Precision.UNCERTAIN)


# `Call` and `MemoryAccess` are not frozen: frozen instances take four times as long to create, and each
# launch creates instances of both.
@dataclass(slots=True, eq=False)
class Call:
    """A CUDA call that enqueued work. All numbers are those of the trace."""

    seq: int
    kind: int  # value of an EventKind
    name: int  # index of the kernel's name in the string table
    stream: int  # number of the stream; 0 is the host
    context: int
    device: int
    thread: int
    site: int  # index of the call stack in the stack table
    # Number of the program call (``sanitize.owners``); 0 if it is unknown.
    program_call: int = 0
    innermost_range: OpenRange | None = None  # the innermost NVTX range that was open at the call
    template_id: int = 0  # template that has the accesses of the launch; 0 if they were recorded
    graph: int = 0  # number of the graph that has the node; 0 outside of graphs
    node: int = 0  # number of the graph node; 0 outside of graphs
    capturing_call: int = 0  # number of the program call that captured the graph node; 0 if unknown
    # The release of a stream-ordered free: the driver orders the next allocation of the memory after it.
    release: Release | None = None
    collective: CollectiveOperation | None = None  # the collective of the call, or None
    launch_site: int = 0  # call stack of the graph launch; 0 outside of graphs

    def in_launch(self, launch: Call) -> Call:
        """Return the call that added a graph node as a part of a launch of the graph."""
        # The record of a captured node has no context; the node then runs in that of the launch.
        context_call = self if self.context else launch
        return replace(
            self,
            seq=launch.seq,
            stream=launch.stream,
            context=context_call.context,
            device=context_call.device,
            site=self.site or launch.site,
            launch_site=launch.site,
            program_call=launch.program_call,
            capturing_call=self.program_call,
            innermost_range=launch.innermost_range,
            template_id=launch.template_id,
        )


@dataclass(slots=True, eq=False)
class MemoryAccess:
    """An access of a call to the bytes from ``lo`` up to ``hi``, at a tick of the call's timeline."""

    slot: int
    tick: int
    call: Call
    lo: int
    hi: int
    mode: int  # value of an AccessMode
    precision: int  # value of a Precision
    accessed_bytes: int = 0  # number of accessed bytes of a strided access; 0 for other accesses


def are_equivalent(first_access: MemoryAccess | None, second_access: MemoryAccess | None) -> bool:
    """Return whether two accesses race with the same accesses, and are reported in the same way.

    ``native/access.c`` has the same rule.
    """
    if first_access is second_access:
        return True
    if first_access is None or second_access is None:
        return False
    if first_access.tick == NEVER:
        return False  # the next allocation of the memory is ordered after this free, not after another one
    return (
        (first_access.slot, first_access.tick, first_access.mode, first_access.precision)
        == (second_access.slot, second_access.tick, second_access.mode, second_access.precision)
        and (first_access.call.kind, first_access.call.name, first_access.call.site)
        == (second_access.call.kind, second_access.call.name, second_access.call.site)
        and (first_access.call.program_call, first_access.call.node)
        == (second_access.call.program_call, second_access.call.node)
    )
