"""The trace walked backwards: when each allocation began and ended, and how much was held at every moment.

The state at the end of a snapshot is complete while its trace is only the last part of history, so
everything is anchored at the end and nothing is guessed about the beginning. Pure; knows no file.

Moments: moment 0 is before the first recorded event, moment ``i + 1`` is after event ``i``, moment ``n``
is the end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cudakit.core.memory.replay.allocations import Allocations as Allocations
from cudakit.core.memory.replay.allocations import allocations_of
from cudakit.core.memory.replay.allocations import pool_at as pool_at
from cudakit.core.memory.replay.curves import Curves as Curves
from cudakit.core.memory.replay.curves import curves_of
from cudakit.core.memory.replay.lifetimes import BEFORE, cut
from cudakit.core.memory.replay.mapped import mapped_ranges
from cudakit.core.memory.replay.matching import Inconsistencies as Inconsistencies
from cudakit.core.memory.replay.matching import match, rows_of
from cudakit.core.memory.replay.reserved import segment_contradictions
from cudakit.core.memory.snapshot import DeviceTrace, Snapshot


@dataclass(frozen=True, slots=True)
class Replay:
    """What a trace says when it is walked back from the state at its end."""

    allocations: Allocations
    curves: Curves
    inconsistencies: Inconsistencies
    begins_complete: bool  # the first event starts from nothing: no history is missing

    @property
    def n_events(self) -> int:
        """The number of events of the trace."""
        return len(self.curves.reserved) - 1


def replay(snapshot: Snapshot, trace: DeviceTrace) -> Replay:
    """Give every allocation of a device its interval, and every moment its totals."""
    rows = rows_of(trace.events)
    runs = cut(rows)
    matched = match(rows, runs, trace.blocks, len(trace.events))
    allocations = allocations_of(snapshot, trace, matched)
    curves = curves_of(trace, allocations)
    return Replay(
        allocations=allocations,
        curves=curves,
        inconsistencies=replace(
            matched.counts,
            segments=segment_contradictions(trace) + mapped_ranges(trace)[1],
            over_reserved=int(np.count_nonzero(curves.active > curves.reserved)),
        ),
        begins_complete=bool(curves.reserved[0] == 0 and not (allocations.begin == BEFORE).any()),
    )
