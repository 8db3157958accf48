"""Pictures that a View draws: shapes in SVG's terms, and figures made of them.

Everything here is a plain value: a renderer writes and escapes it. Colours and strokes belong to the
renderer's style sheet, which a shape names with ``class_``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from cudakit.document.axis import Array, Axis  # numpy is slow to import

ShapeKind: TypeAlias = Literal["svg", "g", "rect", "line", "path", "text"]
Attribute: TypeAlias = str | int | float | None

# Letters of a label, and of a name left of a picture.
LONGEST_LABEL = 2000
_LONGEST_NAME = 14

# The number of curve colours of the style sheet; the series after them are dashed.
_COLOURS = 7
_DASHES = 3


@dataclass(frozen=True, slots=True)
class Shape:
    """An SVG element. A string among ``children`` is a label, cut after ``longest`` letters.

    ``attributes`` are SVG's, with ``_`` for ``-`` and ``class_`` for ``class``; None leaves one out.
    ``title`` is the tooltip.
    """

    kind: ShapeKind
    children: tuple[Shape | str, ...]
    attributes: Mapping[str, Attribute]
    title: str | None = None
    longest: int = LONGEST_LABEL


@dataclass(frozen=True, slots=True)
class Key:
    """An entry of a Legend: a sample of the shape, its name and a remark."""

    sample: Shape
    name: str
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Legend:
    """The keys of a figure; ``width`` is that of a sample in pixels."""

    keys: tuple[Key, ...]
    width: int


@dataclass(frozen=True, slots=True)
class Heading:
    """A name above a drawing, and a remark beside it."""

    name: str
    remark: str


@dataclass(frozen=True, slots=True)
class Caption:
    """A sentence below a drawing."""

    text: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """Shapes over the whole width of the page and ``height`` pixels high, with a name for screen readers."""

    title: str
    shapes: tuple[Shape, ...]
    height: int
    description: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """Legends, headings, drawings and captions below one another; ``kind`` selects the style."""

    kind: str
    parts: tuple[Legend | Heading | Drawing | Caption, ...]
    title: str = ""


@dataclass(frozen=True, slots=True)
class PlotKey:
    """A series in the legend of a Plot; by default it has the colour of its number."""

    name: str
    remark: str = ""
    classes: str = ""
    hollow: bool = False  # whether the sample is a ring


@dataclass(frozen=True, slots=True)
class Plot:
    """Shapes between two axes, and a legend; ``height`` is that of the shapes in pixels.

    ``kind`` is the style of the keys in the legend.
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
    """A sentence in the place of a picture that has nothing to draw."""

    text: str


Picture: TypeAlias = Figure | Plot | NoData


def shape(
    kind: ShapeKind,
    *children: Shape | str,
    title: str | None = None,
    longest: int = LONGEST_LABEL,
    **attributes: Attribute,
) -> Shape:
    """Make a shape."""
    return Shape(kind, children, attributes, title, longest)


def stretched(shapes: Iterable[Shape], *, width: int, height: int) -> Shape:
    """Scale shapes, drawn in ``width`` by ``height`` units, to the area around them."""
    return shape(
        "svg",
        *shapes,
        width="100%",
        height="100%",
        viewBox=f"0 0 {width} {height}",
        preserveAspectRatio="none",
    )


def name_beside(name: str, *, y: float) -> Shape:
    """Write a name left of a picture, cut after 14 letters."""
    return shape(
        "text", name, title=name, longest=_LONGEST_NAME, class_="tick end", x=-8, y=y, dy="0.32em"
    )


def percent(share: float) -> str:
    """Write a share as an SVG length."""
    return f"{share * 100:.4g}%"


def series_class(index: int, dash: int | None = None) -> str:
    """Return the classes for the colour and the dashes of the series with this number.

    Without ``dash`` the series after the last colour are dashed.
    """
    dash = index // _COLOURS if dash is None else dash
    return f"s{index % _COLOURS} dash{dash % _DASHES}"


def to_units(shares: Array, extent: int) -> list[int]:
    """Scale shares of an axis to whole units of a drawing that is ``extent`` units long."""
    units: list[int] = (shares * extent).round().astype("int64").tolist()
    return units


def polyline(across: Sequence[int], down: Sequence[int]) -> str:
    """Return the path of straight lines through points."""
    return "M" + "L".join(f"{x} {y}" for x, y in zip(across, down, strict=True))


def dots(across: Sequence[int], down: Sequence[int]) -> str:
    """Return the path of a dot for each point: round caps draw a line without length as a dot."""
    return "".join(f"M{x} {y}h0" for x, y in zip(across, down, strict=True))
