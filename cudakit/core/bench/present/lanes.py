"""Lanes: a row per case, its name on the left, its drawing over a common axis on the right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cudakit.document.axis import Axis
from cudakit.document.picture import Caption, Drawing, Shape, percent, shape

# Width of the right part in drawing units; it is stretched to the page.
WIDTH = 2400
# More cases are not drawn.
MAX_LANES = 40

# The left part: its share of the width of the page, and the number of letters that fit.
_NAMES = 0.3
_LETTERS = 34
_TICKS = 26  # height of the labels of the axis in pixels


@dataclass(frozen=True, slots=True)
class Lane:
    """A case: its name, a remark below it, and its drawing."""

    name: str
    remark: str
    drawing: Shape


@dataclass(frozen=True, slots=True)
class Mark:
    """A reference value of the axis, and its label."""

    value: float
    label: str


def lanes(shown: Sequence[Lane], axis: Axis, mark: Mark, *, height: int, title: str) -> Drawing:
    """Draw lanes of ``height`` pixels each above their axis."""
    bottom = len(shown) * height
    strips = shape(
        "svg",
        *_grid(axis, mark, bottom),
        *(_strip(lane, i * height, height) for i, lane in enumerate(shown)),
        x=percent(_NAMES),
        width=percent(1 - _NAMES),
        height=bottom + _TICKS,
        class_="strips",
    )
    names = (_name(lane, i * height, height) for i, lane in enumerate(shown))
    return Drawing(title, (strips, *names), height=bottom + _TICKS)


def omitted_lanes(count: int) -> tuple[Caption, ...]:
    """Return a caption with the number of cases without a lane, if any."""
    return (Caption(f"{count:,} more cases are not drawn."),) if count else ()


def _grid(axis: Axis, mark: Mark, bottom: int) -> Iterator[Shape]:
    for tick in axis.ticks:
        at = percent(axis.share(tick.value))
        is_mark = abs(tick.value - mark.value) < 1e-9
        kind = "zero" if is_mark else "grid"
        label = mark.label if is_mark else tick.label
        yield shape("line", class_=kind, x1=at, x2=at, y1=0, y2=bottom)
        yield shape("text", label, class_="tick middle", x=at, y=bottom + 19)


def _strip(lane: Lane, top: int, height: int) -> Shape:
    strip = shape("svg", lane.drawing, y=top + 4, width="100%", height=height - 8)
    return shape("g", strip, title=f"{lane.name}: {lane.remark}")


def _name(lane: Lane, top: int, height: int) -> Shape:
    middle = top + height / 2
    return shape(
        "g",
        shape("text", lane.name, longest=_LETTERS, class_="name", x=0, y=middle - 3),
        shape("text", lane.remark, longest=2 * _LETTERS, class_="remark", x=0, y=middle + 12),
        title=f"{lane.name}: {lane.remark}",
    )
