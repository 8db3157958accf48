"""Notes: a symbol, a sentence, and below it what to do."""

from __future__ import annotations

from rich.text import Text

from cudakit.document import Note
from cudakit.render.console import theme
from cudakit.render.console.escape import escaped
from cudakit.render.console.wrap import wrapped

INDENT = 2
_ARROW = "→ "


def note_lines(note: Note, width: int) -> list[Text]:
    """Draw a note; its symbol stands in the margin, so that it is found without colour."""
    symbol = (theme.SYMBOLS[note.level].ljust(INDENT), theme.LEVELS[note.level])
    style = theme.HEADER if note.level == "error" else theme.PLAIN
    first, *rest = wrapped(escaped(note.text), width - INDENT)
    lines = [Text.assemble(symbol, (first, style))]
    lines += [Text(" " * INDENT + part, style) for part in rest]
    for remedy in note.remedies:
        lines += _remedy_lines(escaped(remedy), width)
    return lines


def _remedy_lines(remedy: str, width: int) -> list[Text]:
    first, *rest = wrapped(remedy, width - INDENT - len(_ARROW))
    margin = " " * INDENT
    lines = [Text.assemble(margin, (_ARROW, theme.INFO), first)]
    return lines + [Text(margin + " " * len(_ARROW) + part) for part in rest]
