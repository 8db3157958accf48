"""Named instants below a chart's axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.cells import cell_len
from rich.text import Text

from cudakit.document import Array, Marker
from cudakit.render.console import theme
from cudakit.render.console.escape import escaped
from cudakit.render.console.sampling import columns_of
from cudakit.render.console.wrap import cut

_POINTERS = {"info": "▲", "warn": "!", "error": "✗"}
_MOST_LINES = 3
_GAP = 2


def marker_lines(markers: Sequence[Marker], x: Array, columns: int) -> list[Text]:
    """Draw each marker under its instant, in as few lines as hold them all side by side."""
    lines: list[Text] = []
    left_out = 0
    ordered = sorted(markers, key=lambda marker: marker.x)
    places = columns_of(np.array([marker.x for marker in ordered]), x, columns=columns)
    for marker, place in zip(ordered, places.tolist(), strict=True):
        start, text = _placed(marker, place, columns)
        line = next((line for line in lines if _is_free(line, start)), None)
        if line is None and len(lines) == _MOST_LINES:
            left_out += 1
            continue
        if line is None:
            lines.append(line := Text())
        line.pad_right(start - line.cell_len)
        line.append_text(text)
    if left_out:
        lines.append(Text(f"… {left_out:,} more markers", theme.FAINT))
    return lines


def _placed(marker: Marker, column: int, columns: int) -> tuple[int, Text]:
    """Put the label right of the pointer, or left of it where the right has no room."""
    pointer, style = _POINTERS[marker.level], theme.LEVELS[marker.level]
    label = escaped(marker.label)
    if column + 2 + cell_len(label) <= columns or column < columns // 2:
        return column, Text(pointer, style).append(f" {cut(label, columns - column - 2)}", style)
    label = cut(label, column - 1)
    return column - 1 - cell_len(label), Text(f"{label} {pointer}", style)


def _is_free(line: Text, start: int) -> bool:
    return line.cell_len + _GAP <= start
