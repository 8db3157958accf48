"""From a conflict to a race: what kind it is, and all that is known of both sides."""

from __future__ import annotations

from collections.abc import Sequence

from cudakit.core.sanitize.allocations import Allocations
from cudakit.core.sanitize.calls import ASSUMED, WRITE, Touch
from cudakit.core.sanitize.conflicts import Conflict
from cudakit.core.sanitize.races import Allocation, Operation, Race, RaceKind
from cudakit.core.sanitize.streams import Order
from cudakit.trace.kinds import Kind, Known, Mode


class Verdicts:
    """Makes races of conflicts."""

    def __init__(self, order: Order, memory: Allocations, pools: Allocations) -> None:
        self._order = order
        self._memory = memory
        self._pools = pools

    def race(self, conflict: Conflict, strings: Sequence[str]) -> Race:
        """Describe a conflict, as things are when its later side has just been enqueued."""
        previous, current = conflict.previous, conflict.current
        pooled = self._pools.at(conflict.lo)
        return Race(
            kind=_kind(previous, current, pooled),
            confidence=conflict.confidence,
            lo=conflict.lo,
            hi=conflict.hi,
            current=_operation(current, strings),
            previous=_operation(previous, strings),
            allocation=pooled or self._memory.at(conflict.lo),
            last_sync=self._order.last_sync(
                current.call.stream, previous.call.stream, previous.slot
            ),
            approximate=conflict.approximate,
        )


def _kind(previous: Touch, current: Touch, pooled: Allocation | None) -> RaceKind:
    if Kind.FREE in (previous.call.kind, current.call.kind):
        return RaceKind.USE_AFTER_FREE
    if previous.call.kind == Kind.ALLOC:
        return RaceKind.USE_BEFORE_ALLOCATION
    if 0 in (previous.call.stream, current.call.stream):
        return RaceKind.HOST
    if pooled is not None and previous.call.seq < pooled.seq:
        return RaceKind.REUSE
    if not _writes(previous, current):
        return RaceKind.WRITE_AFTER_READ
    return RaceKind.WRITE_AFTER_WRITE if _writes(current, previous) else RaceKind.READ_AFTER_WRITE


def _writes(one: Touch, other: Touch) -> bool:
    """Say whether a side counts as a write; of what is only assumed, what the other side does not do."""
    if one.known >= ASSUMED > other.known:
        return not other.mode & WRITE
    return bool(one.mode & ~Mode.READ)


def _operation(touch: Touch, strings: Sequence[str]) -> Operation:
    call = touch.call
    return Operation(
        seq=call.seq,
        kind=Kind(call.kind),
        name=strings[call.name] if call.name < len(strings) else "",
        stream=call.stream,
        context=call.context,
        device=call.device,
        thread=call.thread,
        site=call.site,
        mode=Mode(touch.mode),
        known=Known(touch.known),
        lo=touch.lo,
        hi=touch.hi,
        graph=call.graph,
        node=call.node,
    )
