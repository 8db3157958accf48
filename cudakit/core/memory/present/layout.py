"""The picture of the memory layout: a bar per segment, with its blocks coloured by use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from cudakit.core.memory.present.layout_pieces import (
    IN_USE,
    PENDING,
    ROUNDING,
    USES,
    Pieces,
    Spans,
    bytes_by_segment,
    pieces_of,
    spans_of,
)
from cudakit.core.memory.present.layout_rows import (
    MIN_WIDTH,
    Group,
    Row,
    Segment,
    grouped,
    largest_segments,
    rows,
)
from cudakit.core.memory.snapshot import Ints, take
from cudakit.document import Columns
from cudakit.document.picture import (
    Caption,
    Drawing,
    Figure,
    Heading,
    Key,
    Legend,
    Shape,
    name_beside,
    percent,
    shape,
)
from cudakit.units import format_bytes, format_ratio

_PiecesOrSpans = TypeVar("_PiecesOrSpans", Pieces, Spans)

_MAX_SEGMENTS = 200
# In pixels.
_BAR_HEIGHT = 18
_ROW_HEIGHT = 24
# The width of a row in drawing units: half pixels of a wide page.
_ROW_UNITS = 2000
# Only the largest pieces have tooltips, because each takes about 100 bytes of the page.
_MAX_TOOLTIPS = 600
# In drawing units. Gaps after wider blocks make them countable.
_MIN_WIDTH_WITH_GAP = 8

_USE_NAMES: Final = {IN_USE: "in use", ROUNDING: "lost to rounding", PENDING: "pending free"}
_CSS_CLASSES: Final = {IN_USE: "used", ROUNDING: "waste", PENDING: "pending"}


@dataclass(frozen=True, slots=True)
class _Contents:
    """The pieces to draw; ``used_bytes`` and ``units`` (width) have an item per segment."""

    spans: Mapping[int, Spans]  # by index of the segment
    tooltips: Mapping[int, Pieces]  # by index of the segment
    used_bytes: Ints
    units: Ints


def memory_layout(columns: Sequence[Columns]) -> Figure:
    """Draw segments and their blocks; of more than 200 segments, the largest.

    The first Columns has an item per segment: ``address``, ``size`` (bytes), ``stream``, ``pool``, ``kind``;
    the second one per block: ``segment`` (index into the first), ``offset`` (bytes from its start), ``size``,
    ``requested``, ``state`` (0 inactive, 1 allocated, 2 pending free).
    """
    segments, blocks = columns
    sizes = segments.arrays["size"].astype(np.int64)
    pieces = pieces_of(blocks, sizes)
    chosen = largest_segments(segments, limit=_MAX_SEGMENTS)
    groups = grouped(segments, chosen)
    contents = _contents(pieces, groups, sizes)
    drawn = [part for group in groups for part in _drawn_group(group, contents)]
    remarks = " ".join(_remarks(sizes, chosen))
    captions = (Caption(remarks),) if remarks else ()
    return Figure("layout", (_legend(pieces, sizes), *drawn, *captions))


def _contents(pieces: Pieces, groups: Sequence[Group], sizes: Ints) -> _Contents:
    units = np.zeros(len(sizes), np.int64)
    for group in groups:
        for segment in group.segments:
            units[segment.index] = max(round(segment.width * _ROW_UNITS), 1)
    visible = take(pieces, units[pieces.segment] > 0)
    spans = spans_of(visible, units / np.maximum(sizes, 1))
    largest = np.sort(np.argsort(-visible.size, kind="stable")[:_MAX_TOOLTIPS])
    used = bytes_by_segment(pieces, IN_USE, segments=len(sizes))
    tooltips = _by_segment(take(visible, largest))
    return _Contents(_by_segment(spans), tooltips, used, units)


def _by_segment(arrays: _PiecesOrSpans) -> dict[int, _PiecesOrSpans]:
    return {int(i): take(arrays, arrays.segment == i) for i in np.unique(arrays.segment)}


def _legend(pieces: Pieces, sizes: Ints) -> Legend:
    totals = {use: int(pieces.size[pieces.use == use].sum()) for use in range(USES)}
    free = int(sizes.sum()) - sum(totals.values())
    used = (_legend_key(_CSS_CLASSES[use], _USE_NAMES[use], total) for use, total in totals.items())
    return Legend((*used, _legend_key("free", "free", free)), width=24)


def _legend_key(class_name: str, name: str, total_bytes: int) -> Key:
    sample = shape("rect", class_=class_name, width=24, height=12)
    return Key(sample, name, format_bytes(total_bytes))


def _drawn_group(group: Group, contents: _Contents) -> tuple[Heading, Drawing]:
    lines = tuple(rows(group.segments))
    used = sum(int(contents.used_bytes[segment.index]) for segment in group.segments)
    count = len(group.segments)
    remark = (
        f"{count} segment{'s' if count > 1 else ''} · {format_bytes(group.size_bytes)} · "
        f"{format_ratio(used / max(group.size_bytes, 1))} in use"
    )
    shapes = tuple(_drawn_row(line, i * _ROW_HEIGHT, contents) for i, line in enumerate(lines))
    picture = Drawing(
        f"Layout of {group.name}", shapes, len(lines) * _ROW_HEIGHT, description=remark
    )
    return Heading(group.name, remark), picture


def _drawn_row(row: Row, top: int, contents: _Contents) -> Shape:
    label = name_beside(row.label, y=top + _BAR_HEIGHT / 2)
    bars = (
        _drawn_segment(segment, left, top, contents)
        for segment, left in zip(row.segments, row.lefts, strict=True)
    )
    return shape("g", label, *bars)


def _drawn_segment(segment: Segment, left: float, top: int, contents: _Contents) -> Shape:
    used = int(contents.used_bytes[segment.index])
    tooltip = (
        f"{segment.address:#x}: {format_bytes(segment.size_bytes)}, {format_bytes(used)} in use"
    )
    x, width = percent(left), percent(segment.width)
    units = int(contents.units[segment.index])
    contents_shape = shape(
        "svg",
        *_paths(contents.spans.get(segment.index)),
        *_tooltips(contents.tooltips.get(segment.index), units / max(segment.size_bytes, 1)),
        viewBox=f"0 0 {units} 1",
        preserveAspectRatio="none",
        x=x,
        y=top,
        width=width,
        height=_BAR_HEIGHT,
    )
    background = shape("rect", class_="free ground", x=x, y=top, width=width, height=_BAR_HEIGHT)
    return shape("g", background, contents_shape, title=tooltip)


def _paths(spans: Spans | None) -> list[Shape]:
    """Draw all spans of one use as the dashes of one line, which is as thick as the bar."""
    if spans is None:
        return []
    order = np.argsort(spans.low, kind="stable")
    gap = np.where(spans.high - spans.low >= _MIN_WIDTH_WITH_GAP, 1, 0)
    widths = np.maximum(spans.high - spans.low - gap, 1)
    return [
        shape("path", class_=_CSS_CLASSES[use], d=_dashes(spans.low[rows], widths[rows]))
        for use in np.unique(spans.use).tolist()
        for rows in (order[spans.use[order] == use],)
    ]


def _dashes(lows: Ints, widths: Ints) -> str:
    steps = lows - np.concatenate(([0], (lows + widths)[:-1]))
    return "M0 .5" + "".join(
        f"m{step} 0h{width}" for step, width in zip(steps.tolist(), widths.tolist(), strict=True)
    )


def _tooltips(pieces: Pieces | None, scale: float) -> list[Shape]:
    """Return transparent rectangles with tooltips over the largest pieces."""
    if pieces is None:
        return []
    return [
        shape(
            "rect",
            title=f"{format_bytes(size)} {_USE_NAMES[use]}, at offset {format_bytes(start)}",
            class_="over",
            x=round(start * scale),
            width=max(round(size * scale), 1),
            height=1,
        )
        for start, size, use in zip(
            pieces.start.tolist(), pieces.size.tolist(), pieces.use.tolist(), strict=True
        )
    ]


def _remarks(sizes: Ints, chosen: Ints) -> Iterator[str]:
    """Yield how the drawing differs from the data."""
    threshold = int(sizes.max(initial=0) * MIN_WIDTH)
    if (sizes[chosen] < threshold).any():
        yield f"Segments below {format_bytes(threshold)} are drawn at that size."
    omitted = len(sizes) - len(chosen)
    if omitted > 0:
        size = format_bytes(int(sizes.sum() - sizes[chosen].sum()))
        yield f"Only the largest {len(chosen)} segments are drawn; {omitted:,} others ({size}) are not."
