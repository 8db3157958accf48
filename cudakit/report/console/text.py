"""Escape, wrap, cut and pad text for a terminal; format values as such text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Final

from rich.cells import cell_len, chop_cells
from rich.text import Text

from cudakit.report import document
from cudakit.report.document import Change, Value
from cudakit.report.escape import escape_invisible, escape_sequence, shorten
from cudakit.units import Unavailable

# Maximum length of a text in characters. Sentences of reports are shorter; a longer name would fill the
# terminal.
MAX_TEXT_LENGTH = 600

# Minimum width of a cell in which a number and its unit always stay on one line.
_LEAST_PROSE_WIDTH = 40
# A unit after a number, with the punctuation that may follow.
_UNIT_PATTERN = re.compile(r"(?:[KMGTPE]i)?B[.,;:)]*|(?:[mun]?s|min|%)[.,;:)]*")

# The end of a part of a name such as nvmlDeviceGetName, max_split_size_mb or a:b.
_PART_OF_NAME = re.compile(r"[_:](?=[^_:])|[a-z0-9](?=[A-Z])")

# Python counts variation selectors as printable; they change the width or look of the preceding character.
_VARIATION_SELECTOR = re.compile("[\ufe00-\ufe0f\U000e0100-\U000e01ef]")


# The ASCII forms of the symbols that the texts of reports contain. The layout follows this replacement, so
# that a form may be wider than its symbol.
_ASCII_SYMBOLS = str.maketrans(
    {
        "±": "+/-",
        "→": "->",
        "←": "<-",
        "…": "...",
        "×": "x",
        "°": "",
        "³": "^3",
        "µ": "u",
        "·": "-",
        "“": '"',
        "”": '"',
    }
)
# Each character that the layout draws has one ASCII character, so that columns stay aligned.
_ASCII_DRAWING = str.maketrans(
    {
        **dict.fromkeys("━", "="),
        **dict.fromkeys("─", "-"),
        **dict.fromkeys("│├└┤┼", "|"),
        **dict.fromkeys("█▉▊▋▌", "#"),
        **dict.fromkeys("▍▎▏", "-"),
        **dict(zip("▁▂▃▄▅▆▇", "_.-=+*%", strict=True)),
        **dict.fromkeys("⣤⠶⠛", "#"),
        **dict.fromkeys("⣀⠤⠒⠉", "="),
        **dict.fromkeys("⡀⠄⠂⠁·", "."),
        **dict(zip("✓✗▲→←…", "+x^><*", strict=True)),
    }
)
# The ellipsis of a text that the layout cut, and the two characters before it, where "..." has space.
_CUT_END_PATTERN = re.compile(r"[!-~]{2}…(?=\s|\)|$)", re.MULTILINE)
# Any other ellipsis, and the spaces between its cell and the next one. Two of them make space for "...".
_ELLIPSIS_PATTERN = re.compile(r"(← )?…((?:[^\s…]| (?! ))*)( {4,})?")
_COLOR_PATTERN = re.compile(r"\x1b\[[0-9;]*m")


def escape(text: str, *, limit: int = MAX_TEXT_LENGTH) -> str:
    """Escape line ends and invisible characters, and cut the text to ``limit`` characters."""
    visible_head = escape_invisible(text[: limit + 1])
    return shorten(
        _VARIATION_SELECTOR.sub(lambda match: escape_sequence(match[0]), visible_head), limit
    )


def wrap(text: str, width: int, *, max_lines: int | None = None) -> list[str]:
    """Break text at spaces into lines of at most ``width`` cells; a longer word is broken too.

    With ``max_lines`` lines, the last one ends with an ellipsis if words were left out.
    """
    lines = list(_break_lines(text, max(width, 2)))
    if max_lines is None or len(lines) <= max_lines:
        return lines
    return [
        *lines[: max_lines - 1],
        cut(f"{lines[max_lines - 1]} {lines[max_lines]}", max(width, 2)),
    ]


def cut(text: str, width: int) -> str:
    """Cut text to ``width`` cells, with an ellipsis at the end."""
    if width < 1:
        return ""
    line = Text(text)
    line.truncate(width, overflow="ellipsis")
    return line.plain


def _break_lines(text: str, width: int) -> Iterator[str]:
    line = ""
    for word in _words(text, width):
        joined_line = f"{line} {word}" if line else word
        if cell_len(joined_line) <= width:
            line = joined_line
            continue
        if line:
            yield line
        *full_lines, line = _break_word(word, width)
        yield from full_lines
    yield line


def _words(text: str, width: int) -> Iterator[str]:
    """Yield the words of a text; except in narrow cells, a number and its unit are one word."""
    number = ""
    for word in text.split():
        if number and _UNIT_PATTERN.fullmatch(word):
            yield f"{number} {word}"
            number = ""
            continue
        if number:
            yield number
        number = word if width >= _LEAST_PROSE_WIDTH and word[-1].isdigit() else ""
        if not number:
            yield word
    if number:
        yield number


def _break_word(word: str, width: int) -> list[str]:
    """Cut a word into pieces of at most ``width`` cells: after ``/``, or between the words of a name."""
    pieces = []
    while cell_len(word) > width:
        piece = chop_cells(word, width)[0]
        ends = [match.end() for match in _PART_OF_NAME.finditer(piece + word[len(piece)])]
        if "/" in piece:
            piece = piece[: piece.rfind("/") + 1]
        elif ends:
            piece = piece[: ends[-1]]
        pieces.append(piece)
        word = word[len(piece) :]
    return [*pieces, word]


def format_value(value: Value) -> str:
    """Format a value on one line; a stack is its call site."""
    return escape(document.format_value(value))


def style_of(value: Value) -> str:
    """Return the style of a value: changes are colored, unavailable values faint."""
    match value:
        case Unavailable():
            return FAINT
        case Change(size_bytes) if size_bytes > 0:
            return WARN
        case Change(size_bytes) if size_bytes < 0:
            return OK
        case _:
            return PLAIN


def pad(line: Text, width: int, *, is_right_aligned: bool = False) -> Text:
    """Pad a line with spaces to ``width`` cells; ``is_right_aligned`` aligns it to the right."""
    add_padding = line.pad_left if is_right_aligned else line.pad_right
    add_padding(max(width - line.cell_len, 0))
    return line


def place_side_by_side(left: Sequence[Text], right: Sequence[Text], *, column: int) -> list[Text]:
    """Join two lists of lines side by side; the right list begins in column ``column``, counted from 0."""
    line_pairs = zip_longest(left, right, fillvalue=None)
    return [
        pad(left_line.copy() if left_line else Text(), column).append_text(right_line or Text())
        for left_line, right_line in line_pairs
    ]


def ascii_symbols(text: str) -> str:
    """Replace the symbols in the text of a report by ASCII, which may be wider; other text stays."""
    return text.translate(_ASCII_SYMBOLS)


def ascii_drawing(text: str, *, width: int | None = None) -> str:
    """Replace lines, bars and other drawn characters by ASCII of the same width; other text stays.

    The ellipsis at the end of a cut text becomes ``...`` over its last two characters. Others become ``...``
    and use two of the spaces after the text. Without these spaces the line becomes wider, or the ellipsis
    becomes ``*`` if the line would not fit into ``width`` columns.
    """
    lines = []
    for line in _CUT_END_PATTERN.sub("...", text).split("\n"):
        wider = _ELLIPSIS_PATTERN.sub(_three_dots, line)
        is_too_wide = width is not None and cell_len(_COLOR_PATTERN.sub("", wider)) > width
        lines.append(line if is_too_wide else wider)
    return "\n".join(lines).translate(_ASCII_DRAWING)


def _three_dots(match: re.Match[str]) -> str:
    arrow, rest, spaces = match.groups(default="")
    # The arrow loses its space, so that one or two characters fewer are needed.
    return f"<...{rest}{spaces}" if arrow else f"...{rest}{spaces[2:]}"


# --- styles in the sixteen colors of the terminal; color is never the only difference --------------

TITLE: Final = "bold"
HEADING: Final = "bold cyan"
HEADER: Final = "bold"
TOTAL: Final = "bold"
FAINT: Final = "dim"
PLAIN: Final = ""
BAR: Final = "cyan"

OK: Final = "green"
INFO: Final = "cyan"
WARN: Final = "yellow"
ERROR: Final = "bold red"

LEVELS: Final = {"ok": OK, "info": INFO, "warn": WARN, "error": ERROR}
SERIES: Final = ("cyan", "magenta", "yellow")
