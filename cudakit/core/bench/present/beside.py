"""Our rate beside a peer's: a lane for each case, a dot at the share, a bar over its interval."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cudakit.core.bench.present.lanes import MOST_LANES, WIDTH, Lane, Mark, lanes, left_out
from cudakit.document import Array, Columns
from cudakit.document.axis import Axis, tight_axis
from cudakit.document.picture import Figure, dots, shape, stretched, to_units
from cudakit.units import format_ratio

# Pixels of a lane, and units of what is drawn in it.
_LANE = 38
_HEIGHT = 100
# The axis reaches at least so far from as fast.
_LEAST_REACH = 0.01
_MARGIN = 1.08


def beside(columns: Sequence[Columns]) -> Figure:
    """Draw our rate as a share of a peer's, with its 95 % interval; to the right of 100 % we are faster.

    The arrays of ``beside PEER`` are ``case`` (decoded by ``text``), ``ratio``, ``low`` and ``high``.
    """
    (shares,) = columns
    peer = shares.name.removeprefix("beside ")
    names = shares.text["case"][:MOST_LANES]
    ends = np.stack([shares.arrays[key][: len(names)] for key in ("low", "ratio", "high")], axis=1)
    axis = _axis(ends)
    title = f"Our rate as a share of {peer}'s"
    rows = [_lane(name, row, axis) for name, row in zip(names, ends, strict=True)]
    drawing = lanes(rows, axis, Mark(1.0, f"as fast as {peer}"), height=_LANE, title=title)
    beyond = left_out(len(shares.text["case"]) - len(names))
    return Figure("lanes", (drawing, *beyond), title)


def _axis(ends: Array) -> Axis:
    """Make an axis around 100 %, so that to the left is slower and to the right is faster."""
    reach = max(float(np.abs(ends - 1).max()), _LEAST_REACH) * _MARGIN
    return tight_axis(max(1 - reach, 0.0), 1 + reach, "ratio")


def _lane(name: str, ends: Array, axis: Axis) -> Lane:
    low, middle, high = to_units(axis.shares(ends), WIDTH)
    half = _HEIGHT // 2
    reach = (float(ends[2]) - float(ends[0])) / 2
    bar = shape("path", class_="line s0", d=f"M{low} {half}H{high}M{low} 30V70M{high} 30V70")
    dot = shape("path", class_="scatter case s0", d=dots([middle], [half]))
    remark = f"{ends[1]:.1%} ± {format_ratio(reach)}"
    return Lane(name, remark, stretched((bar, dot), width=WIDTH, height=_HEIGHT))
