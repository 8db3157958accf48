"""A curve of any length as one height per column of the terminal."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cudakit.document import Array

Heights = npt.NDArray[np.float64]


def column_maxima(x: Array, y: Array, *, columns: int, step: bool) -> Heights:
    """Reduce a curve to the maximum that it reaches within each column, so that no peak is lost.

    ``x`` ascends. A column without a sample shows the value held (``step``) or interpolated at its
    left edge; NaN stands where the curve has no value.
    """
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    known = np.isfinite(x)
    x, y = x[known], np.where(np.isfinite(y[known]), y[known], np.nan)
    if len(x) == 0:
        return np.full(columns, np.nan)
    edges = x[0] + (x[-1] - x[0]) * np.arange(columns) / columns
    held = np.maximum(np.searchsorted(x, edges, side="right") - 1, 0)
    heights: Heights = y[held] if step else np.interp(edges, x, y)
    np.fmax.at(heights, columns_of(x, x, columns=columns), y)
    return heights


def columns_of(positions: Array, x: Array, *, columns: int) -> npt.NDArray[np.int64]:
    """Find the columns in which positions of the x axis lie; outside it, the nearest."""
    first, last = float(x[0]), float(x[-1])
    shares = (np.asarray(positions, np.float64) - first) / ((last - first) or 1.0)
    return np.clip(np.nan_to_num(shares) * columns, 0, columns - 1).astype(np.int64)
