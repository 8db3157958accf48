"""Memory segments in groups and rows: which are drawn, how wide, and beside which others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from cudakit.document import Columns
from cudakit.units import format_bytes

# Shares of a row: the least that can be seen and pointed at, and the space between two.
NARROWEST = 0.016
_SPACE = 0.004


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment as it is drawn: ``width`` is its share of a row."""

    index: int
    address: int
    size_bytes: int
    width: float


@dataclass(frozen=True, slots=True)
class Row:
    """Segments beside one another, with the left edge of each as a share of the row."""

    segments: tuple[Segment, ...]
    lefts: tuple[float, ...]

    @property
    def label(self) -> str:
        """Name the size of the segments, or how many of different sizes there are."""
        count, sizes = len(self.segments), {segment.size_bytes for segment in self.segments}
        if len(sizes) > 1:
            return f"{count} segments"
        size = format_bytes(sizes.pop())
        return size if count == 1 else f"{count} × {size}"


@dataclass(frozen=True, slots=True)
class Group:
    """Segments that can serve the same requests: one pool, one stream, one kind."""

    name: str
    segments: tuple[Segment, ...]  # largest first

    @property
    def size_bytes(self) -> int:
        """Sum the sizes of the segments."""
        return sum(segment.size_bytes for segment in self.segments)


def largest_segments(columns: Columns, *, most: int) -> npt.NDArray[np.int64]:
    """Return the indices of the largest segments, the lower address first among equals."""
    address, size = columns.arrays["address"], columns.arrays["size"]
    return np.lexsort((address, -size.astype(np.int64)))[:most]


def grouped(columns: Columns, chosen: npt.NDArray[np.int64]) -> list[Group]:
    """Group segments by pool, stream and kind; the group with the most memory comes first.

    Widths are relative to the largest segment of all, so that groups can be compared.
    """
    largest = max(int(columns.arrays["size"][chosen].max(initial=1)), 1)
    named = [(_group_name(columns, i), _segment(columns, i, largest)) for i in chosen.tolist()]
    named.sort(key=lambda pair: pair[0])
    groups = [
        Group(name, tuple(segment for _, segment in pairs))
        for name, pairs in groupby(named, key=lambda pair: pair[0])
    ]
    return sorted(groups, key=lambda group: -group.size_bytes)


def rows(segments: Sequence[Segment]) -> Iterator[Row]:
    """Fill rows from left to right, as words fill lines."""
    row: list[Segment] = []
    lefts: list[float] = []
    left = 0.0
    for segment in segments:
        if row and left + segment.width > 1 + 1e-9:
            yield Row(tuple(row), tuple(lefts))
            row, lefts, left = [], [], 0.0
        row.append(segment)
        lefts.append(left)
        left += segment.width + _SPACE
    if row:
        yield Row(tuple(row), tuple(lefts))


def _segment(columns: Columns, index: int, largest: int) -> Segment:
    size = int(columns.arrays["size"][index])
    address = int(columns.arrays["address"][index])
    # Segments of together the size of the largest fill its row, the spaces between them included.
    width = size / largest * (1 + _SPACE) - _SPACE
    return Segment(index, address, size, max(width, NARROWEST))


def _group_name(columns: Columns, index: int) -> str:
    return " · ".join(_decoded(columns, name, index) for name in ("pool", "stream", "kind"))


def _decoded(columns: Columns, name: str, index: int) -> str:
    """Read a code as its word, or as ``stream 3`` where there is none."""
    code = int(columns.arrays[name][index])
    texts = columns.text.get(name, ())
    return texts[code] if 0 <= code < len(texts) else f"{name} {code}"
