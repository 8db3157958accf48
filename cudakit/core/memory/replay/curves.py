"""How much was held at every moment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.replay.allocations import Allocations
from cudakit.core.memory.snapshot import DeviceTrace, Events
from cudakit.torch_rules.actions import Action

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Curves:
    """Bytes at every moment: arrays of n + 1 items, named as in torch.cuda.memory_stats()."""

    requested: _Ints  # as asked for, in use and pending free
    allocated: _Ints  # block sizes, until the free is requested
    active: _Ints  # block sizes, in use and pending free
    reserved: _Ints  # segments


def curves_of(trace: DeviceTrace, allocations: Allocations) -> Curves:
    """Add up, at every moment, what the allocations held and what was reserved."""
    n = len(trace.events)
    reserve = _signed_segment_sizes(trace.events)
    reserved_end = int(trace.segments.size.sum())
    reserved = np.empty(n + 1, np.int64)
    np.cumsum(reserve, out=reserved[1:])
    reserved[0] = 0
    reserved += reserved_end - (reserved[n] if n else 0)
    begin, request, end = allocations.begin, allocations.free_requested, allocations.end
    return Curves(
        requested=_running(n, begin, end, allocations.requested),
        allocated=_running(n, begin, request, allocations.size),
        active=_running(n, begin, end, allocations.size),
        reserved=reserved,
    )


def _running(n: int, begin: _Ints, end: _Ints, amount: _Ints) -> _Ints:
    """Sum amounts over their intervals: held from the moment after ``begin`` to that before ``end``."""
    change = np.bincount(begin + 1, weights=amount, minlength=n + 2)
    change -= np.bincount(end + 1, weights=amount, minlength=n + 2)
    # Sums of bytes stay below 2**53, where float64 is exact.
    return np.cumsum(change[: n + 1]).astype(np.int64)


def _signed_segment_sizes(events: Events) -> _Ints:
    grows = (events.action == Action.SEGMENT_ALLOC) | (events.action == Action.SEGMENT_MAP)
    shrinks = (events.action == Action.SEGMENT_FREE) | (events.action == Action.SEGMENT_UNMAP)
    return np.where(grows, events.size, 0) - np.where(shrinks, events.size, 0)
