"""How samples are spread: a lane for each case, a dot for each sample, around the median."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cudakit.document import Array, Columns, Seconds
from cudakit.render.amounts import words
from cudakit.render.markup import Markup, element, escaped, join
from cudakit.render.svg.places import dots, places
from cudakit.render.svg.plot import percent, stretched
from cudakit.render.svg.scale import Axis, tight_axis

# Pixels, but for the width: the drawing is as wide as the page allows.
_LANE = 46
_STRIP = 20
_WORDS = 14  # from the top of a lane to the feet of its letters
_STRIP_TOP = _LANE - _STRIP - 6
_TICKS = 26

_WIDTH = 2400
_MOST_LANES = 40
_MOST_DOTS = 1000
_LETTERS = 70
# Shares of the samples: what lies beyond the outer ones is counted, not drawn.
_OUTER = (0.005, 0.995)
_QUARTERS = (0.25, 0.5, 0.75)
_LEAST_REACH = 0.005
# Where a dot stands in its lane says nothing: steps of the golden ratio keep neighbours apart.
_GOLDEN = 0.618033988749895


@dataclass(frozen=True, slots=True)
class _Lane:
    """A case: its samples relative to their median, which is 0."""

    name: str
    median_s: float
    deviations: Array

    @property
    def outer(self) -> tuple[float, float]:
        # The extremes of a few samples are drawn.
        low = np.quantile(self.deviations, _OUTER[0], method="lower")
        return float(low), float(np.quantile(self.deviations, _OUTER[1], method="higher"))


def spread(columns: Columns) -> Markup:
    """Draw the samples of each case by their distance from its median, with the middle half of them.

    The arrays of ``samples`` are ``case`` (decoded by ``text``) and ``time_s``, in the order taken.
    """
    lanes = _lanes(columns)
    if not lanes:
        return element("p", "No samples.", class_="muted")
    shown = lanes[:_MOST_LANES]
    x = _axis(shown)
    bottom = len(shown) * _LANE
    drawing = element(
        "svg",
        element("title", "Samples around the median of their case"),
        _grid(x, bottom),
        *(_lane(lane, x, i * _LANE) for i, lane in enumerate(shown)),
        class_="chart",
        role="img",
        width="100%",
        height=bottom + _TICKS,
    )
    return element("figure", drawing, _left_out(len(lanes) - len(shown)), class_="spread")


def _lanes(columns: Columns) -> list[_Lane]:
    case, time_s = columns.arrays["case"], columns.arrays["time_s"]
    lanes = []
    for i, name in enumerate(columns.text["case"]):
        times = time_s[case == i]
        median = float(np.median(times)) if len(times) else 0.0
        if median > 0:
            lanes.append(_Lane(name, median, times / median - 1))
    return lanes


def _axis(lanes: list[_Lane]) -> Axis:
    lows, highs = zip(*(lane.outer for lane in lanes), strict=True)
    return tight_axis(min(*lows, -_LEAST_REACH), max(*highs, _LEAST_REACH), "ratio")


def _grid(axis: Axis, bottom: int) -> Markup:
    parts = []
    for tick in axis.ticks:
        at = percent(axis.share(tick.value))
        kind = "grid" if tick.value else "zero"
        sign = "+" if tick.value > 0 else ""
        parts.append(element("line", class_=kind, x1=at, x2=at, y1=0, y2=bottom))
        label = f"{sign}{tick.label}" if tick.value else "median"
        parts.append(element("text", label, class_="tick middle", x=at, y=bottom + 19))
    return join(parts)


def _lane(lane: _Lane, axis: Axis, top: int) -> Markup:
    inside = lane.deviations[(lane.deviations >= axis.low) & (lane.deviations <= axis.high)]
    beyond = len(lane.deviations) - len(inside)
    remark = f"{words(Seconds(lane.median_s))}, {len(lane.deviations):,} samples" + (
        f", {beyond:,} beyond" if beyond else ""
    )
    return element(
        "g",
        element("title", f"{lane.name}: {remark}"),
        element(
            "text",
            element("tspan", escaped(lane.name, limit=_LETTERS), class_="name"),
            element("tspan", remark, class_="remark", dx=10),
            x=0,
            y=top + _WORDS,
        ),
        element(
            "svg",
            _strip(lane, inside, axis),
            y=top + _STRIP_TOP,
            width="100%",
            height=_STRIP,
        ),
    )


def _strip(lane: _Lane, inside: Array, axis: Axis) -> Markup:
    """Draw the middle half as a box behind the dots."""
    shown = inside[:: max(-(-len(inside) // _MOST_DOTS), 1)]
    steps = (np.arange(len(shown)) * _GOLDEN) % 1
    low, middle, high = places(axis.shares(np.quantile(lane.deviations, _QUARTERS)), _WIDTH)
    height = 10 * _STRIP
    box = element("rect", class_="half", x=low, y=0, width=max(high - low, 1), height=height)
    line = element("path", class_="line s1", d=f"M{middle} 0V{height}")
    cloud = dots(places(axis.shares(shown), _WIDTH), places(0.1 + 0.8 * steps, height))
    parts = (box, element("path", class_="scatter s0", d=cloud), line)
    return stretched(parts, width=_WIDTH, height=height)


def _left_out(count: int) -> Markup | None:
    return element("p", f"{count:,} more cases are not drawn.", class_="caption") if count else None
