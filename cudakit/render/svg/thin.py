"""Reduce a long curve to the points that a screen can show, with every minimum and maximum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.document import Array

_Floats: TypeAlias = npt.NDArray[np.float64]
_Indices: TypeAlias = npt.NDArray[np.int64]

# The difference of two larger values may overflow to infinity. Measured values are much smaller.
_LARGEST = 1e300


@dataclass(frozen=True, slots=True)
class Points:
    """Points of a curve in drawing order; ``starts`` marks the first point after a gap."""

    x: _Floats
    y: _Floats
    starts: npt.NDArray[np.bool_]


def finite_or_nan(values: Array) -> _Floats:
    """Return values as floats; those that cannot be drawn become NaN."""
    floats = np.asarray(values, dtype=np.float64)
    drawable = np.abs(floats) <= _LARGEST
    return floats if drawable.all() else np.where(drawable, floats, np.nan)


def thin_curve(x: Array, y: Array, *, low: float, high: float, columns: int) -> Points:
    """Return about two points for each of ``columns`` equal parts of ``low`` to ``high``.

    Each part keeps its minimum and maximum in their order. If an adjacent part is empty, the point next to it
    is returned too, so that the curve has the correct value across the gap. NaN interrupts the curve.
    """
    x, y = _sort_by_x(finite_or_nan(x), finite_or_nan(y))
    is_finite = np.isfinite(x) & np.isfinite(y)
    gaps = np.cumsum(~is_finite)
    if gaps.size and gaps[-1]:
        x, y, gaps = x[is_finite], y[is_finite], gaps[is_finite]
    if len(x) == 0:
        return Points(x, y, is_finite[:0])
    indices = (
        _extreme_indices(y, _columns_of(x, low, high, columns))
        if len(x) > 2 * columns
        else np.arange(len(x))
    )
    is_gap_start = np.diff(gaps[indices], prepend=-1) != 0
    return Points(x[indices], y[indices], is_gap_start)


def _sort_by_x(x: _Floats, y: _Floats) -> tuple[_Floats, _Floats]:
    if (x[1:] >= x[:-1]).all():
        return x, y
    x_order = np.argsort(x, kind="stable")
    return x[x_order], y[x_order]


def _columns_of(x: _Floats, low: float, high: float, columns: int) -> _Indices:
    return np.clip((x - low) * (columns / (high - low)), 0, columns - 1).astype(np.int64)


def _extreme_indices(y: _Floats, column: _Indices) -> _Indices:
    """Return the indices of the points to draw, in ascending order without duplicates."""
    column_starts = np.flatnonzero(np.diff(column, prepend=-1))
    column_ends = np.append(column_starts[1:], len(y)) - 1
    column_at = column[column_starts]
    gap_before = np.diff(column_at, prepend=-1) > 1
    gap_after = np.diff(column_at, append=column_at[-1] + 2) > 1
    gap_before[0] = True
    return np.unique(
        np.concatenate(
            (
                _first_index_of(
                    y, column_starts, column_ends, np.minimum.reduceat(y, column_starts)
                ),
                _first_index_of(
                    y, column_starts, column_ends, np.maximum.reduceat(y, column_starts)
                ),
                column_starts[gap_before],
                column_ends[gap_after],
            )
        )
    )


def _first_index_of(
    y: _Floats, column_starts: _Indices, column_ends: _Indices, column_extremes: _Floats
) -> _Indices:
    """Return the index of the first point in each column that has the column's extreme value."""
    per_point: npt.NDArray[Any] = np.repeat(column_extremes, column_ends - column_starts + 1)
    match_indices = np.flatnonzero(y == per_point)
    return match_indices[np.searchsorted(match_indices, column_starts)]
