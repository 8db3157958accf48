"""Arrange segments in groups and rows, with the width of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from cudakit.core.memory.snapshot import Ints
from cudakit.document import Columns
from cudakit.units import format_bytes

# As shares of a row: the minimum width of a segment, and the gap between two segments.
MIN_WIDTH = 0.016
_GAP = 0.004


@dataclass(frozen=True, slots=True)
class Segment:
    """A drawn segment; ``width`` is its share of a row."""

    index: int
    address: int
    size_bytes: int
    width: float


@dataclass(frozen=True, slots=True)
class Row:
    """The segments of a row, with their left edges as shares of the row."""

    segments: tuple[Segment, ...]
    lefts: tuple[float, ...]

    @property
    def label(self) -> str:
        """The number of segments, and their size if all are equal."""
        count, sizes = len(self.segments), {segment.size_bytes for segment in self.segments}
        if len(sizes) > 1:
            return f"{count} segments"
        size = format_bytes(sizes.pop())
        return size if count == 1 else f"{count} × {size}"


@dataclass(frozen=True, slots=True)
class Group:
    """Segments of one pool, stream and kind, which serve the same requests."""

    name: str
    segments: tuple[Segment, ...]  # largest first

    @property
    def size_bytes(self) -> int:
        """The sum of the segments' sizes."""
        return sum(segment.size_bytes for segment in self.segments)


def largest_segments(columns: Columns, *, limit: int) -> Ints:
    """Return the indices of the largest segments, the lower address first among equals."""
    address, size = columns.arrays["address"], columns.arrays["size"]
    return np.lexsort((address, -size.astype(np.int64)))[:limit]


def grouped(columns: Columns, chosen: Ints) -> list[Group]:
    """Group segments by pool, stream and kind, the largest group first.

    Widths are relative to the largest segment of all groups.
    """
    largest = max(int(columns.arrays["size"][chosen].max(initial=1)), 1)
    named_segments = [
        (_group_name(columns, i), _segment(columns, i, largest)) for i in chosen.tolist()
    ]
    named_segments.sort(key=lambda pair: pair[0])
    groups = [
        Group(name, tuple(segment for _, segment in pairs))
        for name, pairs in groupby(named_segments, key=lambda pair: pair[0])
    ]
    return sorted(groups, key=lambda group: -group.size_bytes)


def rows(segments: Sequence[Segment]) -> Iterator[Row]:
    """Arrange segments in rows from left to right."""
    row: list[Segment] = []
    lefts: list[float] = []
    left = 0.0
    for segment in segments:
        if row and left + segment.width > 1 + 1e-9:
            yield Row(tuple(row), tuple(lefts))
            row, lefts, left = [], [], 0.0
        row.append(segment)
        lefts.append(left)
        left += segment.width + _GAP
    if row:
        yield Row(tuple(row), tuple(lefts))


def _segment(columns: Columns, index: int, largest: int) -> Segment:
    size = int(columns.arrays["size"][index])
    address = int(columns.arrays["address"][index])
    # Includes gaps: segments whose sizes sum to the largest one fill a row exactly.
    width = size / largest * (1 + _GAP) - _GAP
    return Segment(index, address, size, max(width, MIN_WIDTH))


def _group_name(columns: Columns, index: int) -> str:
    return " · ".join(_code_text(columns, name, index) for name in ("pool", "stream", "kind"))


def _code_text(columns: Columns, name: str, index: int) -> str:
    """Return the text of a code; a code without text is shown as ``stream 3``."""
    code = int(columns.arrays[name][index])
    names = columns.text.get(name, ())
    return names[code] if 0 <= code < len(names) else f"{name} {code}"
