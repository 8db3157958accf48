"""Accesses in many rows, each set of rows with a cell of its own.

A bounding box would make interleaved columns race; a segment for each row would be too many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cudakit.core.sanitize.cells import Cell
from cudakit.core.sanitize.rows import Range, Rows

# So many sets of rows are remembered; the oldest one makes room, and races with it are missed.
MOST_SETS = 256


class Strided:
    """The accesses in rows."""

    def __init__(self) -> None:
        self.cells: dict[Rows, Cell] = {}

    def cell(self, rows: Rows) -> Cell:
        """Return the cell of some rows."""
        found = self.cells.get(rows)
        if found is None:
            if len(self.cells) >= MOST_SETS:
                del self.cells[next(iter(self.cells))]
            found = self.cells[rows] = Cell()
        return found

    def sharing_range(self, lo: int, hi: int) -> Iterator[tuple[Cell, Range]]:
        """Yield the cells that have bytes in a range, and those bytes."""
        for rows, cell in self.cells.items():
            if rows.lo < hi and lo < rows.hi and (shared := rows.shared_with_range(lo, hi)):
                yield cell, shared

    def sharing_rows(self, rows: Rows) -> Iterator[tuple[Cell, Range]]:
        """Yield the cells of other rows that share bytes with these."""
        for others, cell in self.cells.items():
            if others != rows and (shared := rows.shared_with(others)):
                yield cell, shared

    def clear(self, lo: int, hi: int) -> None:
        """Forget the rows that are wholly in a range."""
        self.keep(lambda rows, _: rows.lo < lo or hi < rows.hi)

    def keep(self, wanted: Callable[[Rows, Cell], bool]) -> None:
        """Forget all rows but those."""
        for rows in [rows for rows, cell in self.cells.items() if not wanted(rows, cell)]:
            del self.cells[rows]
