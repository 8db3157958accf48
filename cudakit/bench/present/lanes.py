"""A chart of lanes: a row per case, with its name on the left and its drawing over a common axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cudakit.report.axis import Axis
from cudakit.report.picture import Caption, Drawing, Shape, percent, shape

# Width of the drawings in units, which are stretched to the width of the page.
WIDTH = 2400
# Maximum number of lanes; further cases are not drawn.
MAX_LANES = 40

# Width of the column with the names of cases, as a share of the page, and the letters that fit into it.
_NAME_SHARE = 0.3
_NAME_LETTERS = 34
_TICK_PIXELS = 26  # Height of the axis labels.


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


def draw_lanes(
    lanes: Sequence[Lane], axis: Axis, mark: Mark, *, height: int, title: str
) -> Drawing:
    """Draw lanes of ``height`` pixels each above their axis."""
    bottom = len(lanes) * height
    drawings = shape(
        "svg",
        *_grid(axis, mark, bottom),
        *(_lane_drawing(lane, i * height, height) for i, lane in enumerate(lanes)),
        x=percent(_NAME_SHARE),
        width=percent(1 - _NAME_SHARE),
        height=bottom + _TICK_PIXELS,
        class_="strips",
    )
    names = (_lane_name(lane, i * height, height) for i, lane in enumerate(lanes))
    return Drawing(title, (drawings, *names), height=bottom + _TICK_PIXELS)


def omitted_lanes(count: int) -> tuple[Caption, ...]:
    """Return a caption with the number of cases without a lane, if any."""
    return (Caption(f"{count:,} more cases are not drawn."),) if count else ()


def _grid(axis: Axis, mark: Mark, bottom: int) -> Iterator[Shape]:
    for tick in axis.ticks:
        x = percent(axis.share(tick.value))
        is_mark = abs(tick.value - mark.value) < 1e-9
        line_class = "zero" if is_mark else "grid"
        label = mark.label if is_mark else tick.label
        yield shape("line", class_=line_class, x1=x, x2=x, y1=0, y2=bottom)
        yield shape("text", label, class_="tick middle", x=x, y=bottom + 19)


def _lane_drawing(lane: Lane, top: int, height: int) -> Shape:
    drawing = shape("svg", lane.drawing, y=top + 4, width="100%", height=height - 8)
    return shape("g", drawing, title=f"{lane.name}: {lane.remark}")


def _lane_name(lane: Lane, top: int, height: int) -> Shape:
    middle_y = top + height / 2
    return shape(
        "g",
        shape("text", lane.name, max_length=_NAME_LETTERS, class_="name", x=0, y=middle_y - 3),
        shape(
            "text", lane.remark, max_length=2 * _NAME_LETTERS, class_="remark", x=0, y=middle_y + 12
        ),
        title=f"{lane.name}: {lane.remark}",
    )
