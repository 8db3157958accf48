"""Curves of a chart made ready to draw: heights, pens that differ without colour, and the legend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.text import Text

from cudakit.document import Array, Chart, Series
from cudakit.render.console import theme
from cudakit.render.console.canvas import Pen
from cudakit.render.console.escape import escaped
from cudakit.render.console.figures import y_value
from cudakit.render.console.sampling import Heights, column_maxima
from cudakit.render.console.words import words
from cudakit.render.console.wrap import cut, wrapped

# More curves than this cannot be told apart without colour.
MOST_CURVES = 3
_BETWEEN = "   "

# Glyphs by how full a curve's highest cell is, and what fills the cells below; darkest first.
_AREAS = (("▁▂▃▄▅▆▇█", "█"), (" ▒", "▒"), (" ░", "░"))
_LINES = (("▁━▔", ""), ("⣀⠤⠒⠉", ""), (".·˙", ""))
_POINTS = (("●", ""), ("x", ""), ("+", ""))
_NO_PEN = Pen("", "")


@dataclass(frozen=True, slots=True)
class Plane:
    """What the lowest and the highest edge of a picture stand for, and its size in cells."""

    low: float
    high: float
    columns: int
    rows: int

    def scaled(self, y: Array) -> Heights:
        """Give heights from 0 to 1."""
        heights: Heights = (np.asarray(y, np.float64) - self.low) / ((self.high - self.low) or 1)
        return heights


@dataclass(frozen=True, slots=True)
class Curve:
    """A series with its heights, by column or (scatter) by point; ``like`` names its twin."""

    series: Series
    heights: Heights
    pen: Pen = _NO_PEN
    like: str = ""


def curves(chart: Chart, plane: Plane) -> list[Curve]:
    """Prepare the first MOST_CURVES series; one that would hide in another's cells gets no pen."""
    found: list[Curve] = []
    for series in chart.series[:MOST_CURVES]:
        heights = plane.scaled(_reduced(chart, series, plane))
        twin = None if chart.kind == "scatter" else _twin(heights, found, plane)
        found.append(Curve(series, heights, like=twin.series.name if twin else ""))
    pens = iter(_pens(chart, [curve for curve in found if not curve.like]))
    return [curve if curve.like else replace(curve, pen=next(pens)) for curve in found]


def legend(chart: Chart, found: Sequence[Curve], width: int) -> list[Text]:
    """Name each curve and its highest value, as many on a line as fit."""
    lines: list[Text] = []
    for entry in [_entry(chart, curve, width) for curve in found if not curve.like]:
        if lines and lines[-1].cell_len + len(_BETWEEN) + entry.cell_len <= width:
            lines[-1].append(_BETWEEN).append_text(entry)
        else:
            lines.append(entry)
    remarks = [_remark(chart, curve) for curve in found if curve.like]
    others = ", ".join(escaped(series.name) for series in chart.series[MOST_CURVES:])
    remarks += [f"Not drawn: {others}."] if others else []
    return lines + [Text(line, theme.FAINT) for text in remarks for line in wrapped(text, width)]


def _reduced(chart: Chart, series: Series, plane: Plane) -> Array:
    if chart.kind == "scatter":
        return series.y
    return column_maxima(chart.x, series.y, columns=plane.columns, step=series.step)


def _twin(heights: Heights, earlier: Sequence[Curve], plane: Plane) -> Curve | None:
    for curve in earlier:
        apart = np.abs(curve.heights - heights)
        same_gaps = bool(np.all(np.isnan(curve.heights) == np.isnan(heights)))
        if same_gaps and not curve.like and not np.any(apart * plane.rows >= 1):
            return curve
    return None


def _pens(chart: Chart, found: Sequence[Curve]) -> list[Pen]:
    """Choose pens in the order of the series; of areas, the lower on average is the darker."""
    if chart.kind != "area":
        kinds = _LINES if chart.kind == "line" else _POINTS
        return [
            Pen(tops, style, fill) for (tops, fill), style in zip(kinds, theme.SERIES, strict=False)
        ]
    shades = _AREAS[::2] if len(found) == 2 else _AREAS
    means = [float(np.mean(curve.heights)) for curve in found]
    ranks = np.argsort(np.argsort(means, kind="stable")).tolist()
    return [
        Pen(tops, style, fill)
        for (tops, fill), style in zip([shades[rank] for rank in ranks], theme.SERIES, strict=False)
    ]


def _entry(chart: Chart, curve: Curve, width: int) -> Text:
    highest = f"  max {_highest(chart, curve)}"
    name = cut(escaped(curve.series.name), max(width - len(highest) - 2, 8))
    sample = (curve.pen.sample, curve.pen.style)
    return Text.assemble(sample, f" {name}", (highest, theme.FAINT))


def _remark(chart: Chart, curve: Curve) -> str:
    name, like = escaped(curve.series.name), escaped(curve.like)
    return f"{name}, max {_highest(chart, curve)}, is too close to {like} to be drawn."


def _highest(chart: Chart, curve: Curve) -> str:
    known = np.asarray(curve.series.y, np.float64)
    known = known[np.isfinite(known)]
    return words(y_value(chart, float(known.max()) if len(known) else float("nan")))
