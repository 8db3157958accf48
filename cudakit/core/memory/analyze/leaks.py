"""Find call stacks that hold more memory after each step."""

from __future__ import annotations

import numpy as np

from cudakit.core.memory.analyze.call_sites import StackTable
from cudakit.core.memory.analyze.steps import step_moments
from cudakit.core.memory.replay.allocations import Allocations
from cudakit.core.memory.result import Leak, Steps
from cudakit.core.memory.snapshot import DeviceTrace, Ints, Mask, Snapshot

_MIN_STEPS = 3
# Limits the pairs of steps that the slope is computed from.
_MAX_STEPS = 64


def find_leaks(
    snapshot: Snapshot, trace: DeviceTrace, stacks: StackTable, allocations: Allocations
) -> tuple[Steps, tuple[Leak, ...]]:
    """Return the call stacks whose live bytes never shrink from step to step and grow in most steps.

    Not leaks: growth in the first half only (caches, optimizer state, workspaces), and memory that is freed
    by the end of the trace.
    """
    source, moments = step_moments(snapshot, trace)
    steps = Steps(source, len(moments))
    if len(moments) < _MIN_STEPS:
        return steps, ()
    sample = _evenly_spaced(len(moments), _MAX_STEPS)
    compared = np.append(moments[sample], len(trace.events))
    ids, held, counts = _held_at(allocations, compared)
    held, counts, at_end = held[:, :-1], counts[:, :-1], held[:, -1]
    growing = _is_growing(held) & (2 * at_end > held[:, 0] + held[:, -1])
    leaks = [
        _leak(stacks, stack, bytes_held, count_held, sample)
        for stack, bytes_held, count_held in zip(
            ids[growing].tolist(), held[growing], counts[growing], strict=True
        )
    ]
    return steps, tuple(sorted(leaks, key=lambda leak: -leak.bytes_per_step))


def _evenly_spaced(n: int, count: int) -> Ints:
    return np.unique(np.linspace(0, n - 1, min(n, count)).round().astype(np.int64))


def _held_at(allocations: Allocations, moments: Ints) -> tuple[Ints, Ints, Ints]:
    """Return stack ids, and their live bytes and counts as arrays of (stacks, moments)."""
    ids, row = np.unique(allocations.stack, return_inverse=True)
    # Live at a moment: begin < moment <= end. Add at the first such moment, subtract after the last.
    first_live = np.searchsorted(moments, allocations.begin, side="right")
    first_dead = np.searchsorted(moments, allocations.end, side="right")
    shape = len(ids), len(moments) + 1
    live_bytes, live_count = np.zeros(np.prod(shape)), np.zeros(np.prod(shape))
    for moment, sign in ((first_live, 1), (first_dead, -1)):
        cell = row * shape[1] + moment
        live_bytes += sign * np.bincount(cell, weights=allocations.size, minlength=len(live_bytes))
        live_count += sign * np.bincount(cell, minlength=len(live_count))
    return (
        ids.astype(np.int64),
        np.cumsum(live_bytes.reshape(shape), axis=1)[:, :-1].astype(np.int64),
        np.cumsum(live_count.reshape(shape), axis=1)[:, :-1].astype(np.int64),
    )


def _is_growing(held: Ints) -> Mask:
    change = np.diff(held, axis=1)
    second_half = change[:, change.shape[1] // 2 :]
    never_shrinks = (change >= 0).all(axis=1)
    mostly_grows = (change > 0).mean(axis=1) >= 0.5
    still_grows = (second_half > 0).mean(axis=1) >= 0.5
    growing: Mask = never_shrinks & mostly_grows & still_grows
    return growing


def _leak(stacks: StackTable, stack: int, held: Ints, count: Ints, step: Ints) -> Leak:
    return Leak(
        bytes_per_step=round(_theil_sen(step, held)),
        count_per_step=_theil_sen(step, count),
        bytes=int(held[-1]),
        count=int(count[-1]),
        growth=tuple(held.tolist()),
        stack=stacks.frames(stack),
        site=stacks.site(stack),
    )


def _theil_sen(step: Ints, value: Ints) -> float:
    """Return the median slope over all pairs (Sen 1968), which is robust against outliers."""
    first, second = np.triu_indices(len(step), 1)
    return float(np.median((value[second] - value[first]) / (step[second] - step[first])))
