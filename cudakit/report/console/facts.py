"""Render Facts: labels and values in aligned columns, in two pairs of columns on a wide terminal."""

from __future__ import annotations

from rich.cells import cell_len
from rich.text import Text

from cudakit.report.console import theme
from cudakit.report.console.frames import callers, stack_line
from cudakit.report.console.text import (
    cut,
    escape,
    format_value,
    place_side_by_side,
    style_of,
    wrap,
)
from cudakit.report.document import (
    Facts,
    Stack,
    Value,
)
from cudakit.report.values import NOT_AVAILABLE
from cudakit.units import Unavailable

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
        label_text = Text(label, theme.FAINT)
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
            return _stack_lines(value, width)
        case Unavailable(reason) if reason:
            text = f"{NOT_AVAILABLE} ({escape(reason)})"
            return [Text(line, theme.FAINT) for line in wrap(text, width)]
        case _:
            return [Text(line, style_of(value)) for line in wrap(format_value(value), width)]


def _stack_lines(stack: Stack, width: int) -> list[Text]:
    site_line = stack_line(stack, width=width, with_callers=False)
    callers_of_site = [cut(f"← {caller}", width) for caller in callers(stack)[:_MAX_CALLERS]]
    return [site_line, *(Text(caller, theme.FAINT) for caller in callers_of_site)]
