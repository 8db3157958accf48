"""Render plots: axes, grid, legend and markers around shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

from cudakit.document import Marker
from cudakit.document.axis import Axis
from cudakit.document.picture import Plot, name_beside, percent, series_class
from cudakit.render.markup import Markup, element, escape, join
from cudakit.render.svg.figure import draw_shape

# Pixels. A plot is as wide as the page.
_TICKS = 26
_X_LABEL = 18
_MARKER_LINE = 18

_MARKERS = 200
_MARKER_LINES = 4
# Maximal number of characters of a marker label, and of a tick label.
_LABEL = 60
_NAME = 14
# Width of a character as a share of a medium plot, to detect labels that overlap.
_LETTER = 0.008

_DOT = "M12 5h0"
_KEYS = {"line": "M0 5h24", "scatter": _DOT}
_SYMBOLS = {"info": "▾", "warn": "!", "error": "✗"}


@dataclass(frozen=True, slots=True)
class _Flag:
    """A marker with the positions of its line and of the end of its label, as shares of the axis."""

    marker: Marker
    share: float
    end: float
    line: int = 0

    @property
    def extends_left(self) -> bool:
        return self.end < self.share

    @property
    def has_label(self) -> bool:
        return self.line < _MARKER_LINES

    def overlaps(self, other: _Flag) -> bool:
        mine, others = sorted((self.share, self.end)), sorted((other.share, other.end))
        return mine[0] < others[1] and others[0] < mine[1]


def plot(node: Plot, markers: Sequence[Marker] = ()) -> Markup:
    """Return shapes between axes, with legend and markers."""
    flags = _flags(markers, node.x)
    above = _MARKER_LINE * max((flag.line + 1 for flag in flags if flag.has_label), default=0)
    shapes = map(draw_shape, node.shapes)
    picture = element(
        "svg",
        element("title", node.title),
        element("desc", node.description),
        _y_grid(node.y, above, node.height),
        element("svg", *shapes, y=above, width="100%", height=node.height, class_="plot"),
        _x_labels(node.x, above + node.height, node.x_label),
        *(_flag(flag, above, above + node.height) for flag in flags),
        class_="chart",
        role="img",
        width="100%",
        height=above + node.height + _TICKS + (_X_LABEL if node.x_label else 0),
    )
    caption = element("figcaption", node.title) if node.title else None
    return element("figure", caption, _legend(node), picture, _left_out(markers), class_="plotted")


def _y_grid(axis: Axis, above: int, height: int) -> Markup:
    return join(
        part
        for tick in axis.ticks
        for at in (above + round(height * (1 - axis.share(tick.value)), 1),)
        for part in (
            element(
                "line",
                class_="grid" if tick.value else "zero",
                x2="100%",
                y1=at,
                y2=at,
            ),
            draw_shape(name_beside(tick.label, y=at)),
        )
    )


def _x_labels(axis: Axis, bottom: int, label: str) -> Markup:
    ticks = (
        join(
            (
                element("line", class_="axis", x1=at, x2=at, y1=bottom, y2=bottom + 5),
                element(
                    "text",
                    escape(tick.label, limit=_NAME),
                    class_="tick middle",
                    x=at,
                    y=bottom + 19,
                ),
            )
        )
        for tick in axis.ticks
        for at in (percent(axis.share(tick.value)),)
    )
    name = (
        element("text", escape(label, limit=_LABEL), class_="tick end", x="100%", y=bottom + 37)
        if label
        else None
    )
    return join((*ticks, name))


def _legend(node: Plot) -> Markup | None:
    if not node.legend:
        return None
    kind = node.kind
    keys = (
        element(
            "li",
            element(
                "svg",
                element("path", class_=f"{kind} {item.classes or series_class(i)}", d=_KEYS[kind]),
                element("path", class_="scatter hole", d=_DOT) if item.hollow else None,
                class_="key",
                width=24,
                height=10,
                aria_hidden="true",
            ),
            element("span", item.name),
            element("span", item.remark, class_="muted") if item.remark else None,
        )
        for i, item in enumerate(node.legend)
    )
    return element("ul", *keys, class_="legend")


def _flags(markers: Sequence[Marker], axis: Axis) -> list[_Flag]:
    """Place markers, each label below the labels that it would overlap; clip positions to the axis.

    Labels that extend to the left are placed from right to left, the others from left to right. In this order
    the line of a marker, which starts at its label, crosses no label placed before.
    """
    known = sorted((marker for marker in markers if isfinite(marker.x)), key=lambda m: m.x)
    unplaced = [_flag_at(marker, axis) for marker in known[:_MARKERS]]
    from_right = [flag for flag in reversed(unplaced) if flag.extends_left]
    flags: list[_Flag] = []
    for flag in from_right + [flag for flag in unplaced if not flag.extends_left]:
        lines = [other.line for other in flags if other.has_label and other.overlaps(flag)]
        flags.append(replace(flag, line=max(lines, default=-1) + 1))
    return flags


def _flag_at(marker: Marker, axis: Axis) -> _Flag:
    share = min(max(axis.share(marker.x), 0.0), 1.0)
    width = _LETTER * (min(len(marker.label), _LABEL) + 3)
    extends_left = share + width > 1
    return _Flag(marker, share, share - width if extends_left else share + width)


def _flag(flag: _Flag, above: int, bottom: int) -> Markup:
    at, marker = percent(flag.share), flag.marker
    top = flag.line * _MARKER_LINE + 4 if flag.has_label else above
    words = f"{_SYMBOLS[marker.level]} {marker.label}"
    label = element(
        "text",
        escape(words, limit=_LABEL),
        class_="end" if flag.extends_left else None,
        x=at,
        dx=-5 if flag.extends_left else 5,
        y=top + 9,
    )
    return element(
        "g",
        element("title", words),
        element("line", x1=at, x2=at, y1=top, y2=bottom),
        label if flag.has_label else None,
        class_=f"marker {marker.level}",
    )


def _left_out(markers: Sequence[Marker]) -> Markup | None:
    beyond = len(markers) - _MARKERS
    if beyond <= 0:
        return None
    return element("p", f"{beyond:,} more markers are not drawn.", class_="caption")
