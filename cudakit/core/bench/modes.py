"""Whether samples have two peaks: a clock that jumps, a second algorithm, somebody else on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# Fewer samples than this have peaks by chance, and a peak has this share of all.
_LEAST = 30
_LEAST_SHARE = 0.1
# A valley holds less than this share of what the lower peak beside it holds, by this many deviations.
_VALLEY = 0.5
_DEVIATIONS = 3.0
# Peaks nearer than this many steps of the clock may be the same time, rounded two ways.
_STEPS = 3


def is_bimodal(times: Sequence[float] | npt.NDArray[np.float64]) -> bool:
    """Say whether the times fall into two groups with a valley between them.

    The groups are those with the least squares within (Otsu, IEEE SMC 9, 1979). Then equal stretches are
    compared: around both medians, and half-way between them.
    """
    ordered = np.sort(np.asarray(times, np.float64))
    split = _best_split(ordered)
    if split is None:
        return False
    low, high = float(np.median(ordered[:split])), float(np.median(ordered[split:]))
    gap = high - low
    if gap <= _STEPS * _clock_step(ordered):
        return False
    valley = _count(ordered, (low + high) / 2, gap / 6)
    peak = min(_count(ordered, low, gap / 6), _count(ordered, high, gap / 6))
    return valley < _VALLEY * peak and peak - valley > _DEVIATIONS * (peak + valley) ** 0.5


def _best_split(ordered: npt.NDArray[np.float64]) -> int | None:
    """Find where to cut so that both sides hold together best; None for too few samples."""
    n = len(ordered)
    least = max(int(n * _LEAST_SHARE), 1)
    if n < _LEAST:
        return None
    sizes = np.arange(least, n - least + 1)
    # Around their mean: squares of nearly equal large numbers would lose what differs.
    sums = np.cumsum(ordered - ordered.mean())
    left, total = sums[sizes - 1], sums[-1]
    between = left**2 / sizes + (total - left) ** 2 / (n - sizes)
    return int(sizes[int(np.argmax(between))])


def _clock_step(ordered: npt.NDArray[np.float64]) -> float:
    steps = np.diff(ordered)
    steps = steps[steps > 0]
    return float(steps.min()) if len(steps) else 0.0


def _count(ordered: npt.NDArray[np.float64], centre: float, reach: float) -> int:
    first, last = np.searchsorted(ordered, (centre - reach, centre + reach)).tolist()
    return int(last - first)
