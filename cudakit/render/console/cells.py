"""Cells of a table: how wide each would like to be, and its lines in a given width."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.text import Text

from cudakit.document import Column, Frame, Ratio, Stack, Value
from cudakit.render.console import theme
from cudakit.render.console.escape import escaped
from cudakit.render.console.fit import Need
from cudakit.render.console.frames import stack_line, stack_words
from cudakit.render.console.words import style_of, styled, words
from cudakit.render.console.wrap import cut, wrapped

_BAR = 10
_FIGURE = 6  # "100.0%"
_LEAST_BAR = 1
_LEAST_STACK = 24
_LEAST_TEXT = 12
_LONGEST_WORD = 20
_MOST_LINES = 3
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def need(column: Column, cells: Sequence[Value], *, with_callers: bool) -> Need:
    """Measure a column: the width that shows all of it, and the least that is still of use."""
    header = escaped(column.name)
    longest_word = _longest_word([header])
    content = max((_natural(column, cell, with_callers=with_callers) for cell in cells), default=0)
    natural = max(content, cell_len(header), 1)
    enough = max((_natural(column, cell, with_callers=False) for cell in cells), default=0)
    least = {
        "number": max(content, longest_word, 1),
        "bar": max(_FIGURE, longest_word),
        "text": max(_LEAST_TEXT, min(_longest_word(map(words, cells)), _LONGEST_WORD)),
        "stack": _LEAST_STACK,
    }
    return Need(
        column.kind,
        natural,
        enough=max(enough, min(natural, least[column.kind])),
        least=min(natural, least[column.kind]),
    )


def cell_lines(column: Column, cell: Value, width: int, *, with_callers: bool) -> list[Text]:
    """Draw a cell in ``width`` columns; only text takes more than one line."""
    match column.kind, cell:
        case "bar", Ratio(ratio) if math.isfinite(ratio):
            return [_bar(ratio, width)]
        case "stack", Stack() | Frame():
            return [stack_line(_as_stack(cell), room=width, with_callers=with_callers)]
        case "text", _:
            lines = wrapped(words(cell), width, most=_MOST_LINES)
            return [Text(line, style_of(cell)) for line in lines]
        case _:
            line = styled(cell)
            line.truncate(width, overflow="ellipsis")
            return [line]


def header_lines(column: Column, width: int) -> list[Text]:
    """Draw a column's name, wrapped where its cells are narrower."""
    name = escaped(column.name)
    return [Text(cut(line, width), theme.HEADER) for line in wrapped(name, width, most=_MOST_LINES)]


def bar(ratio: float, width: int) -> str:
    """Draw a share of ``width`` cells, to an eighth of a cell; what is not zero stays visible."""
    eighths = round(min(max(ratio, 0.0), 1.0) * width * 8)
    if ratio > 0:
        eighths = max(eighths, 1)
    whole, part = divmod(eighths, 8)
    return "█" * whole + _EIGHTHS[part].strip()


def _natural(column: Column, cell: Value, *, with_callers: bool) -> int:
    match column.kind, cell:
        case "bar", Ratio():
            return _BAR + 1 + _FIGURE
        case "stack", Stack():
            return cell_len(stack_words(cell, with_callers=with_callers))
        case _:
            return cell_len(words(cell))


def _longest_word(texts: Iterable[str]) -> int:
    return max((cell_len(word) for text in texts for word in text.split()), default=0)


def _bar(ratio: float, width: int) -> Text:
    figure = words(Ratio(ratio)).rjust(_FIGURE)
    room = width - len(figure) - 1
    if room < _LEAST_BAR:
        return Text(cut(figure.strip(), width).rjust(width))
    return Text.assemble((bar(ratio, room).ljust(room), theme.BAR), f" {figure}")


def _as_stack(cell: Stack | Frame) -> Stack:
    return cell if isinstance(cell, Stack) else Stack((cell,))
