"""Bar charts: groups of bars side by side, a group for each x."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cudakit.document import Array, Chart
from cudakit.render.markup import Markup, element, join
from cudakit.render.svg.plot import LegendItem, figure, percent, series_class
from cudakit.render.svg.scale import Axis, Tick, rounded_axis
from cudakit.render.svg.thin import finite
from cudakit.render.svg.words import x_words, y_words

_GROUPS = 200
_LABELS = 12
# Of the room that a group has, the part that its bars fill.
_FILLED = 0.72


def bars(node: Chart) -> Markup:
    """Draw groups of bars; of more than 200 groups the first ones."""
    groups = min(len(node.x), _GROUPS)
    if not groups or not node.series:
        return element("p", f"{node.title or 'Chart'}: no data", class_="muted")
    heights = np.nan_to_num(np.stack([finite(series.y)[:groups] for series in node.series]))
    y = rounded_axis(float(heights.min()), float(heights.max()), node.y_unit)
    names = x_words(node)
    drawing = join(
        _bar(node, row, i, heights, y, f"{names[i]}, {series.name}")
        for row, series in enumerate(node.series)
        for i in range(groups)
    )
    legend = [LegendItem(series.name) for series in node.series] if len(node.series) > 1 else []
    left_out = len(node.x) - groups
    description = f"bar chart of {groups} groups" + (f", {left_out:,} left out" if left_out else "")
    x = _names_axis(names[:groups])
    # An instant has no place among names.
    unmarked = replace(node, markers=())
    return figure(unmarked, drawing, x=x, y=y, legend=legend, description=description)


def _bar(node: Chart, row: int, group: int, heights: Array, y: Axis, name: str) -> Markup:
    rows, groups = heights.shape
    height = float(heights[row, group])
    top, bottom = 1 - y.share(max(height, 0)), 1 - y.share(min(height, 0))
    width = _FILLED / groups / rows
    left = (group + (1 - _FILLED) / 2) / groups + width * row
    return element(
        "rect",
        element("title", f"{name}: {y_words(node, height)}"),
        class_=f"bar {series_class(row)}",
        x=percent(left),
        y=percent(top),
        width=percent(width),
        height=percent(bottom - top),
    )


def _names_axis(names: list[str]) -> Axis:
    """Label the middle of each group, or of as many as have room."""
    every = -(-len(names) // _LABELS)
    ticks = (Tick(i + 0.5, names[i]) for i in range(0, len(names), every))
    return Axis(0, len(names), tuple(ticks))
