"""Pictures of Views: SVG shapes, and figures that consist of them.

All classes are plain values; a renderer writes and escapes them. Colors and strokes are in the style sheet of
the renderer, which a shape refers to with ``class_``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from cudakit.report.axis import Array, Axis  # numpy is slow to import

ShapeKind: TypeAlias = Literal["svg", "g", "rect", "line", "path", "text"]
Attribute: TypeAlias = str | int | float | None

# Maximum number of characters of a label, and of a name to the left of a picture.
LONGEST_LABEL = 2000
_LONGEST_NAME = 14

# Number of colors and of dash patterns of curves in the style sheet.
_COLOR_COUNT = 7
_DASH_COUNT = 3


@dataclass(frozen=True, slots=True)
class Shape:
    """An SVG element; a string in ``children`` is a label, cut to ``max_length`` characters.

    ``attributes`` are those of SVG, with "_" for "-" and "class_" for "class". An attribute that is None is
    left out. ``title`` is the tooltip.
    """

    kind: ShapeKind
    children: tuple[Shape | str, ...]
    attributes: Mapping[str, Attribute]
    title: str | None = None
    max_length: int = LONGEST_LABEL


@dataclass(frozen=True, slots=True)
class Key:
    """An entry of a Legend: a sample shape, its name and a remark."""

    sample: Shape
    name: str
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Legend:
    """The legend of a figure; ``width`` is the width of each sample in pixels."""

    keys: tuple[Key, ...]
    width: int


@dataclass(frozen=True, slots=True)
class Caption:
    """A sentence below a drawing."""

    text: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """Shapes as wide as the page and ``height`` pixels high; ``title`` is for screen readers."""

    title: str
    shapes: tuple[Shape, ...]
    height: int
    description: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """Legends, drawings and captions below one another; ``kind`` selects the style."""

    kind: str
    parts: tuple[Legend | Drawing | Caption, ...]
    title: str = ""


@dataclass(frozen=True, slots=True)
class PlotKey:
    """A series in the legend of a Plot; its default color follows from its index."""

    name: str
    remark: str = ""
    classes: str = ""
    hollow: bool = False  # whether the sample is a ring


@dataclass(frozen=True, slots=True)
class Plot:
    """Shapes between two axes, and a legend; ``height`` is the height of the shapes in pixels.

    ``kind`` selects the style of the samples in the legend.
    """

    kind: Literal["line", "scatter"]
    title: str
    x: Axis
    y: Axis
    shapes: tuple[Shape, ...]
    legend: tuple[PlotKey, ...]
    description: str
    x_label: str = ""
    height: int = 240


@dataclass(frozen=True, slots=True)
class NoData:
    """A sentence instead of a picture without data."""

    text: str


Picture: TypeAlias = Figure | Plot | NoData


def shape(
    kind: ShapeKind,
    *children: Shape | str,
    title: str | None = None,
    max_length: int = LONGEST_LABEL,
    **attributes: Attribute,
) -> Shape:
    """Return an SVG element as a Shape; all further keyword arguments are its attributes."""
    return Shape(kind, children, attributes, title, max_length)


def stretch_shapes(shapes: Iterable[Shape], *, width: int, height: int) -> Shape:
    """Return shapes with coordinates in ``width`` by ``height`` units, scaled to the surrounding area."""
    return shape(
        "svg",
        *shapes,
        width="100%",
        height="100%",
        viewBox=f"0 0 {width} {height}",
        preserveAspectRatio="none",
    )


def name_beside(name: str, *, y: float) -> Shape:
    """Return the name at the left of a picture, cut to 14 characters."""
    return shape(
        "text",
        name,
        title=name,
        max_length=_LONGEST_NAME,
        class_="tick end",
        x=-8,
        y=y,
        dy="0.32em",
    )


def percent(share: float) -> str:
    """Return a share as an SVG length: ``12.5%``."""
    return f"{share * 100:.4g}%"


def series_class(index: int, dash: int | None = None) -> str:
    """Return the style classes for the color and the dashes of a series.

    By default the first series are solid, and those after the last color are dashed.
    """
    dash = index // _COLOR_COUNT if dash is None else dash
    return f"s{index % _COLOR_COUNT} dash{dash % _DASH_COUNT}"


def to_units(shares: Array, extent: int) -> list[int]:
    """Scale positions from 0 to 1 to integers from 0 to ``extent``."""
    units: list[int] = (shares * extent).round().astype("int64").tolist()
    return units


def polyline(x_units: Sequence[int], y_units: Sequence[int]) -> str:
    """Return the SVG path of straight lines through points."""
    return "M" + "L".join(f"{x} {y}" for x, y in zip(x_units, y_units, strict=True))


def dots(x_units: Sequence[int], y_units: Sequence[int]) -> str:
    """Return the SVG path of a dot for each point: round caps draw a line of length 0 as a dot."""
    return "".join(f"M{x} {y}h0" for x, y in zip(x_units, y_units, strict=True))
