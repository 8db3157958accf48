"""Tables: aligned columns under a thin rule, never wider than the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rich.text import Text

from cudakit.document import Column, Table, Value
from cudakit.render.console import theme
from cudakit.render.console.cells import cell_lines, header_lines, need
from cudakit.render.console.escape import escaped
from cudakit.render.console.fit import GAP, fitted
from cudakit.render.console.grid import padded
from cudakit.render.console.wrap import wrapped

_CALLERS_FROM = 116  # columns inside the margins of a terminal of 120


def table_lines(table: Table, width: int) -> list[Text]:
    """Draw a table; columns that do not fit even when narrow are named below it."""
    widths = _widths(table, width)
    rule = Text("─" * (sum(widths.values()) + GAP * (len(widths) - 1)), theme.FAINT)
    lines = [*_header(table.columns, widths), rule]
    for number, row in enumerate(table.rows):
        drawn = _row(table.columns, row, widths, width)
        lines += _faint(drawn) if number in table.faint else drawn
    if not table.rows:
        lines.append(Text("(none)", theme.FAINT))
    if table.total_row is not None:
        lines += [rule, *_total(table.columns, table.total_row, widths, width)]
    return lines + _below(table, widths, width)


def _widths(table: Table, width: int) -> dict[int, int]:
    rows = table.rows if table.total_row is None else (*table.rows, table.total_row)
    needs = [
        need(column, [row[index] for row in rows], with_callers=width >= _CALLERS_FROM)
        for index, column in enumerate(table.columns)
    ]
    return fitted(needs, width)


def _header(columns: Sequence[Column], widths: Mapping[int, int]) -> list[Text]:
    cells = {index: header_lines(columns[index], width) for index, width in widths.items()}
    height = max(map(len, cells.values()), default=0)
    sunk = {index: [Text()] * (height - len(lines)) + lines for index, lines in cells.items()}
    return _joined(columns, sunk, widths)


def _row(
    columns: Sequence[Column], row: Sequence[Value], widths: Mapping[int, int], width: int
) -> list[Text]:
    with_callers = width >= _CALLERS_FROM
    cells = {
        index: cell_lines(columns[index], row[index], room, with_callers=with_callers)
        for index, room in widths.items()
    }
    return _joined(columns, cells, widths)


def _faint(lines: list[Text]) -> list[Text]:
    for line in lines:
        line.stylize(theme.FAINT)
    return lines


def _total(
    columns: Sequence[Column], row: Sequence[Value], widths: Mapping[int, int], width: int
) -> list[Text]:
    # A bar of the whole would only say that the whole is the whole: its figure is enough.
    plain = [
        replace(column, kind="number") if column.kind == "bar" else column for column in columns
    ]
    lines = _row(plain, row, widths, width)
    for line in lines:
        line.stylize_before(theme.TOTAL)
    return lines


def _joined(
    columns: Sequence[Column], cells: Mapping[int, list[Text]], widths: Mapping[int, int]
) -> list[Text]:
    """Put the cells of a row side by side, as many lines as the highest has."""
    lines = []
    for level in range(max(map(len, cells.values()), default=0)):
        parts = [
            padded(
                cells[index][level].copy() if level < len(cells[index]) else Text(),
                width,
                right=columns[index].kind == "number",
            )
            for index, width in widths.items()
        ]
        lines.append(Text(" " * GAP).join(parts))
    return lines


def _below(table: Table, widths: Mapping[int, int], width: int) -> list[Text]:
    missing = [escaped(column.name) for i, column in enumerate(table.columns) if i not in widths]
    said = [f"Too narrow to show: {', '.join(missing)}."] if missing else []
    said += [escaped(table.caption)] if table.caption else []
    return [Text(line, theme.FAINT) for text in said for line in wrapped(text, width)]
