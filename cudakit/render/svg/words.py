"""Numbers of a chart in words."""

from __future__ import annotations

import math

from cudakit.document import Bytes, Chart, Count, Ratio, Seconds, Unavailable, Value
from cudakit.render.amounts import words


def x_words(chart: Chart) -> list[str]:
    """Write every item of the x axis: names as they are, numbers with their unit."""
    if chart.x.dtype.kind in "OSU":
        return [str(item) for item in chart.x.tolist()]
    return [words(_value(chart.x_unit, item)) for item in chart.x.tolist()]


def y_words(chart: Chart, y: float) -> str:
    """Write a height with its unit."""
    return words(_value(chart.y_unit, y))


def _value(unit: str, number: float) -> Value:
    if not math.isfinite(number):
        return Unavailable("not a number")
    match unit:
        case "bytes":
            return Bytes(round(number))
        case "seconds":
            return Seconds(number)
        case "ratio":
            return Ratio(number)
        case _:
            return Count(round(number))
