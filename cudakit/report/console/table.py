"""Render tables, never wider than the terminal, the call stacks in them, and the text of every node."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from typing import Final, Literal, TypeAlias

from rich.cells import cell_len, chop_cells
from rich.text import Text

from cudakit.report import document
from cudakit.report.document import (
    NO_STACK,
    Change,
    Column,
    Ratio,
    Stack,
    Table,
    Value,
    distinct_caller,
    format_frame,
    format_place,
    leaf,
    site,
)
from cudakit.report.escape import escape_invisible, escape_sequence, shorten
from cudakit.stacks import Frame, is_library
from cudakit.units import Unavailable

# Tables of this width and above show the callers of a call site. A terminal of 120 columns has this width
# without its margins.
_CALLERS_MIN_WIDTH = 116
_COLUMN_GAP = 2

_ColumnKind: TypeAlias = Literal["number", "text", "stack", "bar"]
# The order in which columns shrink: first headers wrap, then stacks lose their callers, then bars shrink to
# their number, then stacks are cut after the call site, and finally text wraps.
_SHRINK_ORDER: tuple[tuple[_ColumnKind, Literal["width_without_callers", "min_width"]], ...] = (
    ("number", "min_width"),
    ("stack", "width_without_callers"),
    ("bar", "min_width"),
    ("stack", "min_width"),
    ("text", "min_width"),
)
# The order in which columns are hidden if their minimum widths do not fit: optional columns first, then by
# kind, and of each kind the rightmost first.
_HIDE_ORDER: tuple[_ColumnKind, ...] = ("bar", "number", "text", "stack")

# Widths of bars, numbers, stacks and texts, in cells of the terminal.
_BAR_WIDTH = 10
_FIGURE_WIDTH = 6  # the width of "100.0%"
_MIN_BAR_WIDTH = 1
_MIN_STACK_WIDTH = 24
_MIN_TEXT_WIDTH = 12
_MAX_WORD_WIDTH = 20
_MAX_CELL_LINES = 4
_SENTENCE_END = re.compile(r"(?<=\.) ")
_BAR_GLYPHS = " ▏▎▍▌▋▊▉█"


def table_lines(table: Table, width: int) -> list[Text]:
    """Return the lines of a table; columns that do not fit are named below it."""
    with_callers = width >= _CALLERS_MIN_WIDTH
    widths = _fit_widths(
        [
            _measure_column(
                column,
                [row[index] for row in (*table.rows, *filter(None, [table.total_row]))],
                with_callers=with_callers,
            )
            for index, column in enumerate(table.columns)
        ],
        width,
    )

    def row_lines(
        row: Sequence[Value], columns: Sequence[Column], repeated: Set[str] = frozenset()
    ) -> list[Text]:
        cells = {
            index: _cell_lines(
                columns[index], row[index], cell_width, repeated, with_callers=with_callers
            )
            for index, cell_width in widths.items()
        }
        return _join_cells(columns, cells, widths)

    rule = Text("─" * (sum(widths.values()) + _COLUMN_GAP * (len(widths) - 1)), FAINT)
    lines = [*_header_lines(table.columns, widths), rule]
    # Lines that several call stacks of a column share: these stacks get two lines each.
    counts = Counter(
        (index, _stack_cell_line(row[index], cell_width, with_callers=with_callers).plain)
        for index, cell_width in widths.items()
        for row in table.rows
        if isinstance(row[index], Stack | Frame)
    )
    repeated = {line for (_, line), count in counts.items() if count > 1}
    for row_number, row in enumerate(table.rows):
        lines_of_row = row_lines(row, table.columns, repeated)
        for line in lines_of_row if row_number in table.faint_rows else ():
            line.stylize(FAINT)
        lines += lines_of_row
    if not table.rows:
        lines.append(Text("(none)", FAINT))
    if table.total_row is not None:
        # A total is 100%, so its bar would always be full.
        columns = [
            replace(column, kind="number") if column.kind == "bar" else column
            for column in table.columns
        ]
        total_lines = row_lines(table.total_row, columns)
        for line in total_lines:
            line.stylize_before(TOTAL)
        lines += [rule, *total_lines]
    return lines + _lines_below(table, widths, width)


def _header_lines(columns: Sequence[Column], widths: Mapping[int, int]) -> list[Text]:
    lines_by_column = {
        index: [
            Text(cut(line, width), HEADER)
            for line in wrap(escape(columns[index].name), width, max_lines=_MAX_CELL_LINES)
        ]
        for index, width in widths.items()
    }
    height = max(map(len, lines_by_column.values()), default=0)
    bottom_aligned = {
        index: [Text()] * (height - len(lines)) + lines for index, lines in lines_by_column.items()
    }
    return _join_cells(columns, bottom_aligned, widths)


def _join_cells(
    columns: Sequence[Column], cells: Mapping[int, list[Text]], widths: Mapping[int, int]
) -> list[Text]:
    """Join the cells of a row into lines of text."""
    lines = []
    for number in range(max(map(len, cells.values()), default=0)):
        parts = []
        for index, width in widths.items():
            part = cells[index][number].copy() if number < len(cells[index]) else Text()
            kind = columns[index].kind
            # A column that is too narrow for its bars has only numbers.
            has_bars = width - _FIGURE_WIDTH - 1 >= _MIN_BAR_WIDTH
            is_number = kind == "number" or (kind == "bar" and not has_bars)
            parts.append(pad(part, width, is_right_aligned=is_number))
        lines.append(Text(" " * _COLUMN_GAP).join(parts))
    return lines


def _lines_below(table: Table, widths: Mapping[int, int], width: int) -> list[Text]:
    """Return the names of hidden columns, and the caption without the sentences that explain these."""
    hidden = [
        escape(column.name) for index, column in enumerate(table.columns) if index not in widths
    ]
    beginnings = tuple(f"{name.lower()}:" for name in hidden)
    caption = " ".join(
        sentence
        for sentence in _SENTENCE_END.split(escape(table.caption))
        if not sentence.lower().startswith(beginnings)
    )
    sentences = [f"Columns hidden at this width: {', '.join(hidden)}."] if hidden else []
    sentences += [caption] if caption else []
    return [Text(line, FAINT) for sentence in sentences for line in wrap(sentence, width)]


# --- widths of columns -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ColumnWidths:
    """The widths of a column in cells."""

    kind: _ColumnKind
    is_optional: bool  # whether the column is hidden before other columns
    natural_width: int  # width in which every cell fits on one line
    # width in which every cell fits on one line if stacks omit their callers
    width_without_callers: int
    min_width: int  # minimum width: a column that would be narrower is hidden


def _fit_widths(columns: Sequence[_ColumnWidths], width: int) -> dict[int, int]:
    """Return the width of each column that fits, by index; a column left out has no entry."""

    def hide_rank(index: int) -> tuple[int, int]:
        column = columns[index]
        return (-1 if column.is_optional else _HIDE_ORDER.index(column.kind), -index)

    visible = list(range(len(columns)))
    for hidden in sorted(visible, key=hide_rank)[:-1]:
        if sum(columns[i].min_width + _COLUMN_GAP for i in visible) - _COLUMN_GAP <= width:
            break
        visible.remove(hidden)
    available = width - _COLUMN_GAP * (len(visible) - 1)
    widths = {index: min(columns[index].natural_width, available) for index in visible}
    for kind, min_width in _SHRINK_ORDER:
        min_widths = {
            index: getattr(columns[index], min_width)
            for index in visible
            if columns[index].kind == kind
        }
        _shrink(widths, min_widths, available)
    return widths


def _shrink(
    width_by_column: dict[int, int], min_widths: dict[int, int], available_width: int
) -> None:
    """Shrink the widest of the columns in ``min_widths`` until all columns fit or none can shrink."""
    while sum(width_by_column.values()) > available_width:
        shrinkable_indices = [
            index for index, min_width in min_widths.items() if width_by_column[index] > min_width
        ]
        if not shrinkable_indices:
            return
        width_by_column[max(shrinkable_indices, key=width_by_column.__getitem__)] -= 1


# --- cells -----------------------------------------------------------------------------------------


def _measure_column(column: Column, cells: Sequence[Value], *, with_callers: bool) -> _ColumnWidths:
    """Return the widths that a column needs."""
    header = escape(column.name)
    content_width, width_without_callers = (
        max((_natural_width(column, cell, with_callers=shown) for cell in cells), default=0)
        for shown in (with_callers, False)
    )
    natural_width = max(content_width, cell_len(header), 1)
    min_width = {
        "number": max(content_width, _longest_word([header]), 1),
        "bar": max(_FIGURE_WIDTH, _longest_word([header])),
        "text": max(_MIN_TEXT_WIDTH, min(_longest_word(map(format_value, cells)), _MAX_WORD_WIDTH)),
        "stack": _MIN_STACK_WIDTH,
    }[column.kind]
    min_width = min(natural_width, min_width)
    return _ColumnWidths(
        column.kind,
        column.is_optional,
        natural_width,
        max(width_without_callers, min_width),
        min_width,
    )


def _cell_lines(
    column: Column, cell: Value, width: int, repeated_lines: Set[str], *, with_callers: bool
) -> list[Text]:
    """Return the lines of a cell; text and stacks can have several lines.

    A stack has two lines if its single line is cut, is in ``repeated_lines`` or lacks the innermost frame.
    """
    match column.kind, cell:
        case "bar", Ratio(ratio) if math.isfinite(ratio):
            return [_bar_text(ratio, width)]
        case "stack", Stack() | Frame():
            line = _stack_cell_line(cell, width, with_callers=with_callers)
            is_cut = line.plain.endswith("…")
            stack = _as_stack(cell)
            if is_cut or line.plain in repeated_lines or lacks_innermost_frame(line.plain, stack):
                return two_stack_lines(stack, width=width)
            return [line]
        case "text" | "stack", _:
            lines = wrap(format_value(cell), width, max_lines=_MAX_CELL_LINES)
            return [Text(line, style_of(cell)) for line in lines]
        case _:
            return [_cut_line(Text(format_value(cell), style_of(cell)), width)]


def _natural_width(column: Column, cell: Value, *, with_callers: bool) -> int:
    if column.kind == "bar" and isinstance(cell, Ratio):
        return _BAR_WIDTH + 1 + _FIGURE_WIDTH
    if column.kind == "stack" and isinstance(cell, Stack):
        return cell_len(format_stack(cell, with_callers=with_callers))
    return cell_len(format_value(cell))


def _longest_word(texts: Iterable[str]) -> int:
    return max((cell_len(word) for text in texts for word in text.split()), default=0)


def _bar_text(ratio: float, width: int) -> Text:
    """Return a bar with a resolution of 1/8 cell, which is never empty above 0, and its number."""
    figure = format_value(Ratio(ratio)).rjust(_FIGURE_WIDTH)
    bar_width = width - len(figure) - 1
    if bar_width < _MIN_BAR_WIDTH:
        return Text(cut(figure.strip(), width).rjust(width))
    eighths = round(min(max(ratio, 0.0), 1.0) * bar_width * 8)
    if ratio > 0:
        eighths = max(eighths, 1)
    bar = "█" * (eighths // 8) + _BAR_GLYPHS[eighths % 8].strip()
    return Text.assemble((bar.ljust(bar_width), BAR), f" {figure}")


def _stack_cell_line(cell: Value, width: int, *, with_callers: bool) -> Text:
    stack = _as_stack(cell) if isinstance(cell, Stack | Frame) else Stack(())
    return stack_line(stack, width=width, with_callers=with_callers)


def _as_stack(cell: Stack | Frame) -> Stack:
    return cell if isinstance(cell, Stack) else Stack((cell,))


# --- call stacks on one or two lines: the call site first, then its callers ------------------------

_CALLED_FROM = " ← "
_MIN_LEAF_WIDTH = 12  # minimum number of cells: shorter function names are ambiguous
_MAX_CALLERS = 12  # maximum number of callers; more never fit on a line


def format_stack(stack: Stack, *, with_callers: bool) -> str:
    """Format a stack: the call site, the innermost frame and the callers.

    ``model.py:8 forward (functional.py:7 relu) ← train.py:20 step``
    """
    if not stack.frames:
        return NO_STACK
    longest_form = next(_stack_forms(stack, 0))
    if distinct_caller(stack):
        return longest_form
    return _CALLED_FROM.join((longest_form, *(callers(stack) if with_callers else ())))


def callers(stack: Stack) -> list[str]:
    """Return the callers, innermost first; library frames only if the call site is one."""
    if not stack.frames:
        return []
    skips_libraries = not is_library(site(stack).filename)
    outer_frames = stack.frames[max(stack.site, 0) + 1 :]
    shown_frames = (
        frame for frame in outer_frames if not (skips_libraries and is_library(frame.filename))
    )
    return [escape(format_frame(frame)) for frame in islice(shown_frames, _MAX_CALLERS)]


def stack_line(stack: Stack, *, width: int, with_callers: bool) -> Text:
    """Format a stack in ``width`` columns: call site, innermost frame, and the callers that fit."""
    if not stack.frames:
        return _cut_line(Text(NO_STACK, FAINT), width)
    line = _first_fitting(list(_stack_forms(stack, width)), width)
    for caller in callers(stack) if with_callers and not distinct_caller(stack) else ():
        if line.cell_len + cell_len(_CALLED_FROM + caller) > width:
            break
        line.append(_CALLED_FROM + caller, FAINT)
    return line


def lacks_innermost_frame(line: str, stack: Stack) -> bool:
    """Return whether a line of ``stack_line`` shows the call site alone, for lack of columns."""
    return leaf(stack) is not None and distinct_caller(stack) is None and " (" not in line


def two_stack_lines(stack: Stack, *, width: int) -> list[Text]:
    """Format a stack in ``width`` columns: the call site and, on a second line, the frame beside it.

    Without a frame beside the call site, the list has one line. Tables use this form for stacks whose single
    lines would look the same.
    """
    if not stack.frames:
        return [_cut_line(Text(NO_STACK, FAINT), width)]
    lines = [_first_fitting(_frame_forms(site(stack)), width)]
    if caller := distinct_caller(stack):
        forms = [f"← {form}" for form in (*_frame_forms(caller), _file_and_line(caller))]
    else:
        forms = [form.strip() for form in _leaf_forms(stack)]
    if forms:
        lines.append(_first_fitting([f"  {form}" for form in forms], width))
        lines[1].stylize(FAINT)
    return lines


def _first_fitting(forms: Sequence[str], width: int) -> Text:
    form = next((form for form in forms if cell_len(form) <= width), forms[-1])
    return _cut_line(Text(form), width)


def _file_and_line(frame: Frame) -> str:
    return f"…/{escape(format_place(frame)).rpartition('/')[2]}"


def _stack_forms(stack: Stack, width: int) -> Iterator[str]:
    """Yield forms of a stack on one line, from long to short; an ellipsis marks omitted parts.

    The innermost frame is cut if that makes the call site fit into ``width`` columns.
    """
    site_text, short_site_text = _frame_forms(site(stack))
    if caller := distinct_caller(stack):
        caller_text, short_caller_text = _frame_forms(caller)
        is_direct = stack.distinct_index == max(stack.site, 0) + 1
        arrow = _CALLED_FROM if is_direct else f"{_CALLED_FROM}… "
        for leaf_form in dict.fromkeys((*_leaf_forms(stack), "")):
            yield f"{site_text}{leaf_form}{arrow}{caller_text}"
        yield f"{short_site_text}{_CALLED_FROM}{short_caller_text}"
        yield f"{short_site_text}{_CALLED_FROM}{_file_and_line(caller)}"
        return
    leaf_forms = _leaf_forms(stack) or ("",)
    yield from (site_text + leaf_form for leaf_form in leaf_forms)
    yield from (short_site_text + leaf_form for leaf_form in leaf_forms[1:])
    leaf_frame = leaf(stack)
    is_cuttable = leaf_frame is not None and not leaf_frame.line  # a cut line number would be wrong
    leaf_width = width - cell_len(short_site_text)
    if is_cuttable and _MIN_LEAF_WIDTH <= leaf_width < cell_len(leaf_forms[-1]):
        yield cut(short_site_text + leaf_forms[-1], width)
    yield site_text
    yield short_site_text


def _frame_forms(frame: Frame) -> tuple[str, str]:
    """Return two texts of a frame: one with the full path, one with the file name only."""
    file_name = frame.filename.replace("\\", "/").rpartition("/")[2]
    full_text = escape(format_frame(frame))
    short_text = escape(format_frame(Frame(frame.name, file_name, frame.line)))
    return full_text, short_text if short_text == full_text else f"…/{short_text}"


def _leaf_forms(stack: Stack) -> tuple[str, ...]:
    """Return forms of the frame beside the call site, from long to short: ``(functional.py:7 relu)``.

    The shortest form has the file name and the line, or the function if the line is unknown.
    """
    frame = leaf(stack)
    if frame is None:
        return ()
    full_text, short_text = _frame_forms(frame)
    shortest_text = _file_and_line(frame) if frame.line else f"… {escape(frame.name)}"
    return tuple(f" ({form})" for form in dict.fromkeys((full_text, short_text, shortest_text)))


def _cut_line(line: Text, width: int) -> Text:
    line.truncate(max(width, 1), overflow="ellipsis")
    return line


# --- Escape, wrap, cut and pad text for a terminal; format values as such text ---------------------

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
