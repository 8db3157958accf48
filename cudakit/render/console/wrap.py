"""Words into lines of a given number of terminal cells."""

from __future__ import annotations

from collections.abc import Iterator

from rich.cells import cell_len, chop_cells
from rich.text import Text


def wrapped(text: str, width: int, *, most: int | None = None) -> list[str]:
    """Break text at spaces into lines of at most ``width`` cells; an over-long word is folded.

    With ``most``, the last line allowed ends in an ellipsis where words were left out.
    """
    lines = list(_broken(text, max(width, 2)))
    if most is None or len(lines) <= most:
        return lines
    return [*lines[: most - 1], cut(f"{lines[most - 1]} {lines[most]}", max(width, 2))]


def cut(text: str, width: int) -> str:
    """Cut text to ``width`` cells, with an ellipsis where something went."""
    if width < 1:
        return ""
    line = Text(text)
    line.truncate(width, overflow="ellipsis")
    return line.plain


def _broken(text: str, width: int) -> Iterator[str]:
    line = ""
    for word in text.split():
        joined = f"{line} {word}" if line else word
        if cell_len(joined) <= width:
            line = joined
            continue
        if line:
            yield line
        # Of a word that takes no room at all, as marks over nothing, no pieces are made.
        *whole, line = chop_cells(word, width) or [word]
        yield from whole
    yield line
