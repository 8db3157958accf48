"""Where the steps of a program begin: by annotations, by snapshot markers, or by its own repetition."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.analyze.annotations import step_bounds
from cudakit.core.memory.snapshot import DeviceTrace, Snapshot
from cudakit.torch_rules.actions import Action

_Ints = npt.NDArray[np.int64]

_FEWEST_STEPS = 3
# The repetition is looked for in the last part of long traces only: it is the steady part, and the
# transform stays cheap.
_MOST_ALLOCATIONS = 1 << 17
# A lag is a period when this share of allocations has the stack of the one a period before.
_SAME = 0.9


def step_moments(snapshot: Snapshot, trace: DeviceTrace) -> tuple[str, _Ints]:
    """Find the moments between steps, and say by what; no moments where there is no sign of steps."""
    name, moments = step_bounds(snapshot, trace)
    if len(moments) >= _FEWEST_STEPS:
        return f"annotation {name}", moments
    markers = np.flatnonzero(trace.events.action == Action.SNAPSHOT)
    if len(markers) >= _FEWEST_STEPS:
        return "snapshot markers", markers
    moments = _repetition(trace)
    if len(moments) >= _FEWEST_STEPS:
        return "repeating allocations", moments
    return "none", np.zeros(0, np.int64)


def _repetition(trace: DeviceTrace) -> _Ints:
    """Find the period of the sequence of allocating stacks, and a moment in each repetition."""
    event = np.flatnonzero(trace.events.action == Action.ALLOC)[-_MOST_ALLOCATIONS:]
    stack = trace.events.stack[event]
    period = _period(stack)
    if period == 0:
        return np.zeros(0, np.int64)
    # Count back from the end: the beginning is the part that differs (warm-up).
    starts = np.arange(len(event) - 1, -1, -period)[::-1]
    return event[starts] + 1


def _period(stack: npt.NDArray[np.int32]) -> int:
    """Find the shortest lag at which a sequence repeats itself; 0 where it does not.

    A lag of 1, one stack over and over, is a loop that fills a list and no sequence of steps.
    """
    n = len(stack)
    if n < 2 * _FEWEST_STEPS or int(stack.min()) == int(stack.max()):
        return 0
    # Random signs in place of stacks: the autocorrelation counts equal stacks, the rest cancels out.
    signs = np.random.default_rng(0).choice((-1.0, 1.0), int(stack.max()) + 1)[stack]
    spectrum = np.fft.rfft(signs - signs.mean(), 2 * n)
    correlation = np.fft.irfft(np.abs(spectrum) ** 2)[: n // _FEWEST_STEPS]
    for lag in np.argsort(-correlation[1:], kind="stable")[:32] + 1:
        if _repeats(stack, int(lag)):
            period = _shortest(stack, int(lag))
            return period if period > 1 else 0
    return 0


def _repeats(stack: npt.NDArray[np.int32], lag: int) -> bool:
    steady = stack[len(stack) // 4 :]
    return lag < len(steady) and float(np.mean(steady[lag:] == steady[:-lag])) >= _SAME


def _shortest(stack: npt.NDArray[np.int32], lag: int) -> int:
    """Reduce a multiple of the period to the period."""
    divisors = (d for d in range(2, min(lag, 64) + 1) if lag % d == 0)
    shorter = [lag // d for d in divisors if _repeats(stack, lag // d)]
    return min(shorter, default=lag)
