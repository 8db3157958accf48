"""Find call stacks that hold more memory after each step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cudakit.memory.analyze.call_sites import StackTable
from cudakit.memory.analyze.step_peaks import (
    evenly_spaced,
    is_growing,
    live_totals_at,
    theil_sen,
)
from cudakit.memory.replay.allocations import Allocations
from cudakit.memory.result import Leak
from cudakit.memory.snapshot import Ints

_MIN_STEPS = 3
# Maximum number of compared steps: the slope is computed from all pairs of steps.
_MAX_STEPS = 64


@dataclass(frozen=True, slots=True)
class GrowingStacks:
    """Call stacks whose live memory grows from step to step; arrays have one row per stack."""

    ids: Ints
    live_bytes: Ints  # bytes of live blocks at each compared moment
    counts: Ints  # number of live blocks at each compared moment
    bytes_at_end: Ints  # live bytes at the end
    counts_at_end: Ints  # number of live blocks at the end
    steps: Ints  # step number of each compared moment


def growing_stacks(allocations: Allocations, bounds: Ints, end_moment: int) -> GrowingStacks:
    """Return the call stacks whose live bytes never shrink from step to step and grow in most steps.

    ``bounds`` are the moments between steps. Growth in the first half only (caches, optimizer state,
    workspaces) does not count. Neither does memory that is freed by ``end_moment``.
    """
    bounds = bounds[bounds <= end_moment]
    if len(bounds) < _MIN_STEPS:
        no_ids, no_rows = np.zeros(0, np.int64), np.zeros((0, len(bounds)), np.int64)
        return GrowingStacks(no_ids, no_rows, no_rows, no_ids, no_ids, np.arange(len(bounds)))
    sampled_indices = evenly_spaced(len(bounds), _MAX_STEPS)
    stack_ids, live_bytes, live_counts = live_totals_at(
        allocations, np.append(bounds[sampled_indices], end_moment)
    )
    bytes_at_end, counts_at_end = live_bytes[:, -1], live_counts[:, -1]
    live_bytes, live_counts = live_bytes[:, :-1], live_counts[:, :-1]
    is_growing_stack = is_growing(live_bytes) & (
        2 * bytes_at_end > live_bytes[:, 0] + live_bytes[:, -1]
    )
    return GrowingStacks(
        stack_ids[is_growing_stack],
        live_bytes[is_growing_stack],
        live_counts[is_growing_stack],
        bytes_at_end[is_growing_stack],
        counts_at_end[is_growing_stack],
        sampled_indices,
    )


def find_leaks(
    stacks: StackTable, allocations: Allocations, bounds: Ints, n_events: int
) -> tuple[Leak, ...]:
    """Return the growing call stacks, the fastest growth first."""
    growing = growing_stacks(allocations, bounds, n_events)
    leaks = [
        _leak(stacks, stack, live_bytes, block_counts, growing.steps)
        for stack, live_bytes, block_counts in zip(
            growing.ids.tolist(),
            growing.live_bytes,
            growing.counts,
            strict=True,
        )
    ]
    return tuple(sorted(leaks, key=lambda leak: -leak.bytes_per_step))


def _leak(
    stacks: StackTable, stack_index: int, live_bytes: Ints, block_counts: Ints, step_numbers: Ints
) -> Leak:
    return Leak(
        bytes_per_step=round(theil_sen(step_numbers, live_bytes)),
        count_per_step=theil_sen(step_numbers, block_counts),
        bytes=int(live_bytes[-1]),
        count=int(block_counts[-1]),
        growth=tuple(live_bytes.tolist()),
        stack=stacks.frames(stack_index),
        site=stacks.site_index(stack_index),
    )
