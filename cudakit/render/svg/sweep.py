"""Figures along one axis: how a bench depends on the size of its problem."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cudakit.document import Array, Chart, Columns
from cudakit.render.markup import Markup, element
from cudakit.render.svg.places import dots, outline, places
from cudakit.render.svg.plot import LegendItem, figure, series_class, stretched
from cudakit.render.svg.scale import Axis, log_axis, rounded_axis, tight_axis

_WIDTH, _HEIGHT = 2400, 1000
# An axis that spans more than this is drawn by its logarithm.
_WIDE = 32
# Between the least time and the lower end of such an axis.
_MARGIN = 1.5


@dataclass(frozen=True, slots=True)
class _Curves:
    """Points in order of their lines, each with what it may be at least and at most."""

    line: Array
    x: Array
    y: Array
    low: Array
    high: Array


def sweep(columns: Columns) -> Markup:
    """Draw a curve for each line of ``sweep AXIS``: the share of the limit, else the time.

    The arrays are ``line`` (decoded by ``text``), AXIS, ``median_s``, ``ci95_low_s``, ``ci95_high_s`` and
    ``ratio_to_limit``; bars span the confidence intervals.
    """
    name = columns.name.removeprefix("sweep ")
    by_limit = bool(np.isfinite(columns.arrays["ratio_to_limit"]).all())
    curves = _curves(columns, name, by_limit=by_limit)
    x, y = _x_axis(curves.x, name), _y_axis(curves, by_limit=by_limit)
    names = columns.text["line"]
    paths = (path for i in range(len(names)) for path in _paths(curves, i, x, y))
    title = "Share of the limit" if by_limit else "Time"
    return figure(
        Chart("line", title, curves.x, (), x_label=_title(name)),
        stretched(paths, width=_WIDTH, height=_HEIGHT),
        x=x,
        y=y,
        legend=[LegendItem(words) for words in names] if len(names) > 1 else [],
        description=f"{title} along {_title(name)}: {', '.join(names[:8])}",
    )


def _curves(columns: Columns, name: str, *, by_limit: bool) -> _Curves:
    arrays = columns.arrays
    median, low, high = (arrays[key] for key in ("median_s", "ci95_low_s", "ci95_high_s"))
    line, across = arrays["line"], arrays[name].astype(np.float64)
    if not by_limit:
        return _Curves(line, across, median, low, high)
    # The least time is the largest share.
    ratio = arrays["ratio_to_limit"]
    return _Curves(line, across, ratio, ratio * median / high, ratio * median / low)


def _x_axis(values: Array, name: str) -> Axis:
    low, high = float(values.min()), float(values.max())
    unit: Literal["bytes", "count"] = "bytes" if name.endswith("_bytes") else "count"
    wide = low > 0 and high / low > _WIDE
    return log_axis(low, high, unit) if wide else tight_axis(low, high, unit)


def _y_axis(curves: _Curves, *, by_limit: bool) -> Axis:
    if by_limit:
        return rounded_axis(0.0, max(float(curves.high.max()), 1.0), "ratio")
    low, high = float(curves.low.min()), float(curves.high.max())
    wide = low > 0 and high / low > _WIDE
    return log_axis(low / _MARGIN, high, "seconds") if wide else rounded_axis(0.0, high, "seconds")


def _paths(curves: _Curves, number: int, x: Axis, y: Axis) -> Iterator[Markup]:
    which = curves.line == number
    across = places(x.shares(curves.x[which]), _WIDTH)
    middle, low, high = (
        places(1 - y.shares(heights[which]), _HEIGHT)
        for heights in (curves.y, curves.low, curves.high)
    )
    bars = "".join(f"M{at} {a}V{b}" for at, a, b in zip(across, low, high, strict=True))
    for kind, path in (
        ("line", outline(across, middle)),
        ("line", bars),
        ("scatter", dots(across, middle)),
    ):
        yield element("path", class_=f"{kind} {series_class(number)}", d=path)


def _title(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")
