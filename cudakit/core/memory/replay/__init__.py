"""The trace walked backwards: when each allocation began and ended, and how much was held at every moment.

The state at the end of a snapshot is complete while its trace is only the last part of history, so
everything is anchored at the end and nothing is guessed about the beginning. Pure; knows no file.

Moments: moment 0 is before the first recorded event, moment ``i + 1`` is after event ``i``, moment ``n``
is the end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cudakit.core.memory.replay.allocations import Allocations, Curves, allocations_of, curves_of
from cudakit.core.memory.replay.block_sizes import with_unsplit_sizes
from cudakit.core.memory.replay.layout import Layout, layout_at
from cudakit.core.memory.replay.lifetimes import (
    BEFORE,
    Contradictions,
    allocation_rows,
    cut,
    match,
)
from cudakit.core.memory.replay.segments import SegmentHistory, segment_history
from cudakit.core.memory.snapshot import DeviceTrace, Snapshot


@dataclass(frozen=True, slots=True)
class Replay:
    """What a trace says when it is walked back from the state at its end."""

    segments: SegmentHistory
    allocations: Allocations
    curves: Curves
    inconsistencies: Contradictions
    begins_complete: bool  # the first event starts from nothing: no history is missing

    @property
    def n_events(self) -> int:
        """The number of events of the trace."""
        return len(self.curves.reserved) - 1

    def peak_moment(self) -> int:
        """Return the first moment at which most was requested."""
        return int(self.curves.requested.argmax())

    def layout_at(self, moment: int) -> Layout:
        """Return the layout of memory at a moment."""
        return layout_at(self.segments, self.allocations, moment)


def replay(snapshot: Snapshot, trace: DeviceTrace) -> Replay:
    """Return the lives of all segments and allocations of a device, and the totals of every moment."""
    segments = segment_history(trace)
    rows = allocation_rows(trace.events)
    matched = match(rows, cut(rows), trace.blocks, len(trace.events))
    allocations = allocations_of(snapshot, trace, segments, matched)
    allocations = with_unsplit_sizes(snapshot, segments.whole, allocations)
    curves = curves_of(segments, allocations)
    return Replay(
        segments=segments,
        allocations=allocations,
        curves=curves,
        inconsistencies=replace(
            matched.counts,
            segments=segments.contradictions,
            over_reserved=int(np.count_nonzero(curves.active > curves.reserved)),
        ),
        begins_complete=bool(curves.reserved[0] == 0 and not (allocations.begin == BEFORE).any()),
    )
