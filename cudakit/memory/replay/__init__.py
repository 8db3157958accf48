"""Reconstruct the lifetimes of all allocations and segments, and the memory at every moment.

The final state of a snapshot is complete, but its trace can lack earlier events. So the reconstruction goes
back from the final state, and assumes nothing about the state before the trace.

Moment 0 is before the first recorded event, moment ``i + 1`` is after event ``i``, and moment ``n`` is the
end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cudakit.memory.replay.allocations import Allocations, Curves, allocations_of, curves_of
from cudakit.memory.replay.block_sizes import with_unsplit_sizes
from cudakit.memory.replay.layout import Layout, layout_at
from cudakit.memory.replay.lifetimes import (
    BEFORE_TRACE,
    Contradictions,
    allocation_lifetime_steps,
    match_final_blocks,
    split_into_lifetimes,
)
from cudakit.memory.replay.segments import SegmentHistory, segment_history
from cudakit.memory.snapshot import DeviceTrace, Snapshot


@dataclass(frozen=True, slots=True)
class Replay:
    """The reconstructed history of one device."""

    segments: SegmentHistory
    allocations: Allocations
    curves: Curves
    inconsistencies: Contradictions
    begins_complete: bool  # whether the trace starts with no memory reserved

    @property
    def n_events(self) -> int:
        """The number of events of the trace."""
        return len(self.curves.reserved) - 1

    def peak_moment(self) -> int:
        """Return the first moment with the most requested memory."""
        return int(self.curves.requested.argmax())

    def layout_at(self, moment: int) -> Layout:
        """Return the layout at a moment."""
        return layout_at(self.segments, self.allocations, moment)


def replay(snapshot: Snapshot, trace: DeviceTrace) -> Replay:
    """Reconstruct the history of a device from its trace and final state."""
    segments = segment_history(trace)
    lifetime_steps = allocation_lifetime_steps(trace.events)
    matched_lifetimes = match_final_blocks(
        lifetime_steps, split_into_lifetimes(lifetime_steps), trace.blocks, len(trace.events)
    )
    allocations = allocations_of(snapshot, trace, segments, matched_lifetimes)
    allocations = with_unsplit_sizes(snapshot, segments.plain_segments, allocations)
    curves = curves_of(segments, allocations)
    return Replay(
        segments=segments,
        allocations=allocations,
        curves=curves,
        inconsistencies=replace(
            matched_lifetimes.counts,
            segments=segments.contradictions,
            over_reserved=int(np.count_nonzero(curves.active > curves.reserved)),
        ),
        begins_complete=bool(
            curves.reserved[0] == 0 and not (allocations.begin == BEFORE_TRACE).any()
        ),
    )
