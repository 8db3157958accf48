"""A few rows of characters on which up to three curves stay apart without colour."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import numpy.typing as npt
from rich.text import Text

from cudakit.render.console.sampling import Heights


@dataclass(frozen=True, slots=True)
class Pen:
    """How a curve is drawn: ``tops`` by how full its highest cell is, ``fill`` in those below."""

    tops: str
    style: str
    fill: str = ""

    @property
    def sample(self) -> str:
        """Show the pen in a legend."""
        return self.fill or self.tops[len(self.tops) // 2]


_EMPTY = Pen(" ", "")


@dataclass(slots=True)
class Canvas:
    """Rows of cells, the lowest first; a cell is a glyph and the pen that drew it."""

    columns: int
    rows: int
    cells: list[list[tuple[str, Pen]]] = field(init=False)

    def __post_init__(self) -> None:
        self.cells = [[(" ", _EMPTY)] * self.columns for _ in range(self.rows)]

    def curves(self, curves: Sequence[tuple[Heights, Pen]]) -> None:
        """Draw curves of heights from 0 to 1, in every column the lower in front of the higher."""
        for column in range(self.columns):
            tops = [(float(heights[column]), pen) for heights, pen in curves]
            known = [top for top in reversed(tops) if not math.isnan(top[0])]
            for height, pen in sorted(known, key=lambda top: -top[0]):
                self._column(column, height * self.rows, pen)

    def points(self, columns: npt.NDArray[np.int64], heights: Heights, pen: Pen) -> None:
        """Draw points at heights from 0 to 1; one whose height is not a number is left out."""
        known = np.isfinite(heights)
        rows = np.minimum(heights[known] * self.rows, self.rows - 1).astype(np.int64)
        for row, column in set(zip(rows.tolist(), columns[known].tolist(), strict=True)):
            self.cells[row][column] = (pen.tops, pen)

    def lines(self) -> list[Text]:
        """Give the rows from the top down, each curve in its colour."""
        return [_line(cells) for cells in reversed(self.cells)]

    def _column(self, column: int, height: float, pen: Pen) -> None:
        if pen.fill and height <= 0:
            return
        top = min(max(math.ceil(height) - 1, 0), self.rows - 1)
        for row in range(top if pen.fill else 0):
            self.cells[row][column] = (pen.fill, pen)
        level = math.ceil((height - top) * len(pen.tops)) - 1
        glyph = pen.tops[min(max(level, 0), len(pen.tops) - 1)]
        if glyph != " ":
            self.cells[top][column] = (glyph, pen)


def _line(cells: Sequence[tuple[str, Pen]]) -> Text:
    line = Text()
    for style, run in groupby(cells, key=lambda cell: cell[1].style):
        line.append("".join(glyph for glyph, _ in run), style)
    return line
