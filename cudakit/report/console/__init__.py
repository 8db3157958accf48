"""Render a Document as text for a terminal or a pipe, independent of the environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from io import StringIO
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from cudakit.report import document as doc
from cudakit.report.console.table import (
    FAINT,
    HEADER,
    HEADING,
    INFO,
    LEVELS,
    PLAIN,
    TITLE,
    ascii_drawing,
    ascii_symbols,
    callers,
    cut,
    escape,
    format_value,
    place_side_by_side,
    stack_line,
    style_of,
    table_lines,
    wrap,
)
from cudakit.report.document import (
    NOT_AVAILABLE,
    SYMBOLS,
    Chart,
    Columns,
    Document,
    Explorer,
    Facts,
    Node,
    Note,
    Section,
    Stack,
    Table,
    Value,
    View,
)
from cudakit.units import Unavailable

_INDENT_WIDTH = 2
_ARROW = "→ "

# The kinds of parts of a document whose texts a report shows. Names in call stacks are not among them.
_PARTS_WITH_TEXTS = (
    *(Document, Section, Note, Facts, Table, doc.Column, Chart, doc.Series, doc.Marker, View),
    *(doc.Text, Unavailable),
)


def render(
    document: Document,
    *,
    width: int,
    color: bool,
    ascii_only: bool = False,
    height: int | None = None,
) -> str:
    """Return a document as lines of at most ``width`` cells, each with a newline at its end.

    The closing nodes follow if the document has more lines than ``height``; None is an endless screen.

    Without ``color`` the text has no escape sequences; with ``color`` only those of the sixteen colors, bold
    and dim. ``ascii_only`` draws lines, bars and curves with ASCII characters, and replaces symbols such as
    ± in texts. Text of the document is escaped.
    """
    if ascii_only:
        document = _with_ascii_symbols(document)
    title_lines = [Text(line, TITLE) for line in wrap(escape(document.title), width)]
    lines = [
        *title_lines,
        Text("━" * width, FAINT),
        *_stack_nodes(document.nodes, width, level=1),
    ]
    if height is not None and len(lines) > height:
        closing_lines = _stack_nodes(document.closing_nodes, width, level=1)
        lines += [Text(), Text("─" * width, FAINT), *closing_lines] if closing_lines else []
    for line in lines:
        line.truncate(width, overflow="ellipsis")
        line.rstrip()
    text = _colorize(lines) if color else "".join(f"{line.plain}\n" for line in lines)
    return ascii_drawing(text, width=width) if ascii_only else text


def _with_ascii_symbols(part: Any) -> Any:
    """Return a part of a document with ASCII in place of the symbols in its texts; call stacks stay."""
    if isinstance(part, str):
        return ascii_symbols(part)
    if isinstance(part, tuple):
        return tuple(map(_with_ascii_symbols, part))
    if isinstance(part, _PARTS_WITH_TEXTS):
        names = [field.name for field in fields(part)]
        return replace(part, **{name: _with_ascii_symbols(getattr(part, name)) for name in names})
    return part


def _stack_nodes(nodes: Sequence[Node], width: int, *, level: int) -> list[Text]:
    """Return the lines of nodes, with an empty line between nodes except between adjacent notes."""
    lines: list[Text] = []
    previous_node: Node | None = None
    for node in nodes:
        node_lines = _draw_node(node, width, level=level)
        if not node_lines:
            continue
        if previous_node is not None and not (
            isinstance(node, Note) and isinstance(previous_node, Note)
        ):
            lines.append(Text())
        lines += node_lines
        previous_node = node
    return lines


def _draw_node(node: Node, width: int, *, level: int) -> list[Text]:
    lines: list[Text]
    match node:
        case Section():
            # An empty section has no heading.
            lines = _stack_nodes(node.nodes, width, level=level + 1)
            return [*_heading_lines(node.title, width, level=level), *lines] if lines else []
        case Note():
            return _note_lines(node, width)
        case View():
            return _draw_node(node.fallback, width, level=level)
        case Columns() | Explorer():
            return []
        case Facts():
            lines = facts_lines(node, width - _INDENT_WIDTH)
        case Table():
            lines = table_lines(node, width - _INDENT_WIDTH)
        case Chart():
            # This import loads numpy, which is slow and only needed for charts.
            from cudakit.report.console.chart import chart_lines

            lines = chart_lines(node, width - _INDENT_WIDTH)
    return [Text(" " * _INDENT_WIDTH).append_text(line) for line in lines]


def _note_lines(note: Note, width: int) -> list[Text]:
    """Return the lines of a note, with its symbol in the margin."""
    margin = " " * _INDENT_WIDTH
    symbol = (SYMBOLS[note.level].ljust(_INDENT_WIDTH), LEVELS[note.level])
    style = HEADER if note.level == "error" else PLAIN
    first_line, *other_lines = wrap(escape(note.text), width - _INDENT_WIDTH)
    lines = [Text.assemble(symbol, (first_line, style))]
    lines += [Text(margin + line, style) for line in other_lines]
    for remedy in note.remedies:
        first_line, *other_lines = wrap(escape(remedy), width - _INDENT_WIDTH - len(_ARROW))
        lines.append(Text.assemble(margin, (_ARROW, INFO), first_line))
        lines += [Text(margin + " " * len(_ARROW) + line) for line in other_lines]
    return lines


def _heading_lines(title: str, width: int, *, level: int) -> list[Text]:
    """Return the lines of a heading; that of an outer section ends with a rule."""
    if level > 1:
        return [Text(line, HEADING) for line in wrap(escape(title), width)]
    *full_lines, last_line = wrap(escape(title), width - 6)
    rule = "─" * max(width - cell_len(last_line) - 4, 0)
    lines = [Text(line, HEADING) for line in full_lines]
    lines.append(Text.assemble((last_line, HEADING), (f" {rule}", FAINT)))
    margins = ["── "] + ["   "] * len(full_lines)
    return [
        Text(margin, FAINT).append_text(line) for margin, line in zip(margins, lines, strict=True)
    ]


def _colorize(lines: Sequence[Text]) -> str:
    # rich.console is slow to import, and text for a pipe does not need it.
    from rich.color import ColorSystem
    from rich.console import Console

    console = Console(file=StringIO(), legacy_windows=False, _environ={})
    return "".join(
        segment.style.render(segment.text, color_system=ColorSystem.STANDARD)
        if segment.style
        else segment.text
        for line in lines
        # Text.render ignores the style of the line itself. After append_text the style is a span.
        for segment in Text().append_text(line).render(console, end="\n")
    )


# --- facts: labels and values in columns, two pairs of them on a wide terminal ---------------------

_SIDE_BY_SIDE_MIN_WIDTH = 116  # number of columns of a terminal of 120 columns without its margins
_SIDE_BY_SIDE_MIN_ROWS = 4
_GAP_WIDTH = 2
_GUTTER_WIDTH = 6
_MAX_CALLERS = 4


def facts_lines(facts: Facts, width: int) -> list[Text]:
    """Return the lines of labelled values, in two columns on terminals of at least 120 columns."""
    rows = facts.rows
    if width < _SIDE_BY_SIDE_MIN_WIDTH or len(rows) < _SIDE_BY_SIDE_MIN_ROWS:
        return _column_lines(rows, width)
    left_count = (len(rows) + 1) // 2
    left_lines = _column_lines(rows[:left_count], (width - _GUTTER_WIDTH) // 2)
    right_column = max(line.cell_len for line in left_lines) + _GUTTER_WIDTH
    return place_side_by_side(
        left_lines, _column_lines(rows[left_count:], width - right_column), column=right_column
    )


def _column_lines(rows: tuple[tuple[str, Value], ...], width: int) -> list[Text]:
    labels = [cut(escape(label), width) for label, _ in rows]
    fitting_widths = [
        label_width for label_width in map(cell_len, labels) if label_width <= width // 2
    ]
    indent_width = max(fitting_widths, default=width // 2) + _GAP_WIDTH
    lines: list[Text] = []
    for row_index, (label, (_, value)) in enumerate(zip(labels, rows, strict=True)):
        if row_index and label == labels[row_index - 1]:
            label = ""  # the label of the row above holds for this row too
        label_text = Text(label, FAINT)
        first_line, *other_lines = _value_lines(value, width - indent_width)
        if cell_len(label) + _GAP_WIDTH > indent_width:
            # A long label has a line of its own, because a cut name could not be copied.
            lines.append(label_text)
            other_lines.insert(0, first_line)
        else:
            lines.append(
                Text.assemble(label_text, " " * (indent_width - cell_len(label)), first_line)
            )
        lines += [Text(" " * indent_width).append_text(line) for line in other_lines]
    return lines


def _value_lines(value: Value, width: int) -> list[Text]:
    match value:
        case Stack():
            shown_callers = [cut(f"← {caller}", width) for caller in callers(value)[:_MAX_CALLERS]]
            site_line = stack_line(value, width=width, with_callers=False)
            return [site_line, *(Text(caller, FAINT) for caller in shown_callers)]
        case Unavailable(reason) if reason:
            text = f"{NOT_AVAILABLE} ({escape(reason)})"
            return [Text(line, FAINT) for line in wrap(text, width)]
        case _:
            return [Text(line, style_of(value)) for line in wrap(format_value(value), width)]
