"""Render a Document as GitHub Flavored Markdown, for issues and pull requests.

A View is its fallback, a Chart a table of its numbers. Columns are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from cudakit.report.document import (
    LEVELS,
    NO_STACK,
    Chart,
    Document,
    Facts,
    Node,
    Note,
    Section,
    Stack,
    Table,
    Value,
    View,
    format_frame,
    format_value,
    x_value,
    y_value,
)
from cudakit.report.escape import escape_invisible

_ALIGNMENT_BY_KIND = {"number": "---:", "bar": "---:", "text": "---", "stack": "---"}
_DEEPEST_HEADING = 6
_MAX_POINTS = 40

# Characters that CommonMark and GitHub interpret anywhere in a line, and the beginnings of links.
_SPECIAL_CHARACTERS = re.compile(r"[\\`*_{}\[\]<>|~#$&]|(?<=[A-Za-z])(?=://)|(?<=www)(?=\.)")
# GitHub links @user and #1 in escaped text too, and notifies the user; a zero-width space prevents it.
_REFERENCE_PATTERN = re.compile(r"(?<!\w)(@|\\#)(?=\w)")
# Characters that begin a list, a rule or an underlined heading in CommonMark.
_BEGINNING_PATTERN = re.compile(r"^(\d*)([-+=.)])")


def render(document: Document) -> str:
    """Return a Document as Markdown; all of its text is escaped."""
    blocks = (f"# {_escape(document.title)}", *_node_texts(document.nodes, level=2))
    return "\n\n".join(blocks) + "\n"


def _node_texts(nodes: Sequence[Node], level: int) -> Iterator[str]:
    for node in nodes:
        match node:
            case Section(title, inner_nodes):
                # An empty section has no heading.
                if content := list(_node_texts(inner_nodes, level + 1)):
                    yield f"{'#' * min(level, _DEEPEST_HEADING)} {_escape(title)}"
                    yield from content
            case Facts(rows) if rows:
                yield "\n".join(
                    f"* **{_escape(label)}**: {_cell_text(value)}" for label, value in rows
                )
            case Table():
                yield _table_text(node)
            case Chart():
                yield _chart_text(node)
            case Note():
                lines = [f"> **{LEVELS[node.level]}**: {_escape(node.text)}"]
                lines += [f"> * {_paragraph_text(remedy)}" for remedy in node.remedies]
                yield "\n".join(lines)
            case View():
                yield from _node_texts([node.fallback], level)


def _table_text(table: Table) -> str:
    all_rows = [*table.rows, *([table.total_row] if table.total_row else [])]
    lines = [
        _table_line(_escape(column.name) for column in table.columns),
        _table_line(_ALIGNMENT_BY_KIND[column.kind] for column in table.columns),
        *(_table_line(map(_cell_text, row)) for row in all_rows),
    ]
    text = "\n".join(lines)
    return f"{text}\n\n{_paragraph_text(table.caption)}" if table.caption else text


def _chart_text(chart: Chart) -> str:
    """Return a chart as a table of at most about 40 points."""
    title = f"**{_escape(chart.title)}**"
    if not len(chart.x) or not chart.series:
        return f"{title}: no data"
    lines = [
        _table_line((_escape(chart.x_label), *(_escape(series.name) for series in chart.series))),
        _table_line("---:" for _ in range(len(chart.series) + 1)),
    ]
    for index in range(0, len(chart.x), -(-len(chart.x) // _MAX_POINTS)):
        x = format_value(x_value(chart, chart.x[index].item()))
        heights = (format_value(y_value(chart, float(series.y[index]))) for series in chart.series)
        lines.append(_table_line(map(_escape, (x, *heights))))
    return "\n".join((title, "", *lines))


def _table_line(cells: Iterator[str] | Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell_text(value: Value) -> str:
    if isinstance(value, Stack):
        return " ← ".join(_escape(format_frame(frame)) for frame in value.frames) or NO_STACK
    return _escape(format_value(value))


def _paragraph_text(text: str) -> str:
    return _BEGINNING_PATTERN.sub(r"\1\\\2", _escape(text))


def _escape(text: str) -> str:
    """Escape text for one line of Markdown."""
    visible_text = escape_invisible(" ".join(text.split()))
    return _REFERENCE_PATTERN.sub(
        r"\1&#8203;", _SPECIAL_CHARACTERS.sub(lambda match: f"\\{match[0]}", visible_text)
    )
