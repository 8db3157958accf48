"""Who allocates most over the whole trace, and how long it lives."""

from __future__ import annotations

import numpy as np

from cudakit.core.memory.analyze.sites import Stacks
from cudakit.core.memory.analyze.totals import totals
from cudakit.core.memory.replay.allocations import Allocations
from cudakit.core.memory.result import Churn
from cudakit.core.memory.snapshot import DeviceTrace, Snapshot


def churn(
    snapshot: Snapshot, trace: DeviceTrace, stacks: Stacks, allocations: Allocations
) -> tuple[Churn, ...]:
    """Sum the allocations made during the trace by call stack, most bytes first."""
    made = np.flatnonzero(allocations.begin >= 0)
    stack = allocations.stack[made]
    begin, end = allocations.begin[made], allocations.end[made]
    ended = end < len(trace.events)
    time = trace.events.time_us
    lifetime = np.zeros(len(made), np.int64)
    lifetime[ended] = time[end[ended]] - time[begin[ended]]
    n_stacks = len(snapshot.stacks)
    lifetimes = np.bincount(stack, weights=lifetime, minlength=n_stacks)
    ends = np.bincount(stack, weights=ended, minlength=n_stacks)
    found = []
    for total in totals(stack, allocations.requested[made]):
        frames = stacks.frames(total.key)
        measured = snapshot.has_times and ends[total.key] > 0
        found.append(
            Churn(
                bytes=total.bytes,
                count=total.count,
                share=total.share,
                mean_size_bytes=total.bytes // total.count,
                mean_lifetime_us=float(lifetimes[total.key] / ends[total.key])
                if measured
                else None,
                stack=frames,
                site=stacks.site(total.key),
            )
        )
    return tuple(found)
