"""Lanes: a row for each case, its name on the left, and on the right what is drawn of it on a common axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cudakit.render.markup import Markup, element, escaped, join
from cudakit.render.svg.plot import percent
from cudakit.render.svg.scale import Axis

# Units of a strip, which is as wide as the page allows.
WIDTH = 2400
# What a picture can hold.
MOST_LANES = 40

# Of the width of the page; and how many letters have room in it.
_NAMES = 0.3
_LETTERS = 34
# Pixels.
_TICKS = 26


@dataclass(frozen=True, slots=True)
class Lane:
    """A case: its name, a remark below it, and what is drawn."""

    name: str
    remark: str
    drawing: Markup


@dataclass(frozen=True, slots=True)
class Mark:
    """A value of the axis that all lanes are seen against, and what it is called."""

    value: float
    label: str


def lanes(shown: Sequence[Lane], axis: Axis, mark: Mark, *, height: int, title: str) -> Markup:
    """Stack lanes of ``height`` pixels over the ticks of their axis."""
    bottom = len(shown) * height
    return element(
        "svg",
        element("title", title),
        element(
            "svg",
            _grid(axis, mark, bottom),
            *(_strip(lane, i * height, height) for i, lane in enumerate(shown)),
            x=percent(_NAMES),
            width=percent(1 - _NAMES),
            height=bottom + _TICKS,
            class_="strips",
        ),
        *(_name(lane, i * height, height) for i, lane in enumerate(shown)),
        class_="chart",
        role="img",
        width="100%",
        height=bottom + _TICKS,
    )


def left_out(count: int) -> Markup | None:
    """Say how many cases have no lane."""
    return element("p", f"{count:,} more cases are not drawn.", class_="caption") if count else None


def _grid(axis: Axis, mark: Mark, bottom: int) -> Markup:
    parts = []
    for tick in axis.ticks:
        at = percent(axis.share(tick.value))
        is_mark = abs(tick.value - mark.value) < 1e-9
        kind = "zero" if is_mark else "grid"
        label = mark.label if is_mark else tick.label
        parts.append(element("line", class_=kind, x1=at, x2=at, y1=0, y2=bottom))
        parts.append(element("text", label, class_="tick middle", x=at, y=bottom + 19))
    return join(parts)


def _strip(lane: Lane, top: int, height: int) -> Markup:
    strip = element("svg", lane.drawing, y=top + 4, width="100%", height=height - 8)
    return element("g", element("title", f"{lane.name}: {lane.remark}"), strip)


def _name(lane: Lane, top: int, height: int) -> Markup:
    middle = top + height / 2
    return element(
        "g",
        element("title", f"{lane.name}: {lane.remark}"),
        element("text", escaped(lane.name, limit=_LETTERS), class_="name", x=0, y=middle - 3),
        element(
            "text", escaped(lane.remark, limit=2 * _LETTERS), class_="remark", x=0, y=middle + 12
        ),
    )
