"""Tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cudakit.document import Column, Ratio, Table, Value
from cudakit.render.html.values import cell
from cudakit.render.markup import Markup, element, join
from cudakit.render.values import format_value

_BAR = 72
_NEWLINE = Markup("\n")


def table(node: Table) -> Markup:
    """Write a table; one wider than the page scrolls by itself."""
    head = element("thead", element("tr", *map(_heading, node.columns)))
    rows = (
        line
        for number, row in enumerate(node.rows)
        for line in (_NEWLINE, _row(node.columns, row, faint=number in node.faint))
    )
    total = node.total_row
    grid = element(
        "table",
        head,
        element("tbody", *rows) if node.rows else None,
        element("tfoot", _row(node.columns, total)) if total else None,
    )
    is_wide = any(column.kind == "stack" for column in node.columns)
    frame = element(
        "div",
        grid,
        class_="scroll wide" if is_wide else "scroll",
        # The keyboard scrolls only elements with focus.
        tabindex=0,
        role="region",
        aria_label=_name(node),
    )
    empty = None if node.rows else element("p", "nothing to list", class_="muted")
    caption = element("p", node.caption, class_="caption") if node.caption else None
    return join((frame, empty, caption))


def _name(node: Table) -> str:
    return "Table of " + ", ".join(column.name for column in node.columns if column.name)


def _heading(column: Column) -> Markup:
    return element("th", column.name, scope="col", class_=column.kind)


def _row(columns: Sequence[Column], values: Sequence[Value], *, faint: bool = False) -> Markup:
    return element("tr", *map(_cell, columns, values), class_="muted" if faint else None)


def _cell(column: Column, value: Value) -> Markup:
    is_bar = column.kind == "bar" and isinstance(value, Ratio) and math.isfinite(value.value)
    content = _bar(value) if is_bar and isinstance(value, Ratio) else cell(value)
    return element("td", content, class_=column.kind)


def _bar(ratio: Ratio) -> Markup:
    length = round(min(max(ratio.value, 0.0), 1.0) * _BAR, 1)
    # A nonzero share is always visible.
    length = max(length, 1.0) if ratio.value > 0 else length
    bar = element(
        "svg",
        element("rect", class_="track", width=_BAR, height=8, rx=2),
        element("rect", class_="fill", width=length, height=8, rx=2),
        width=_BAR,
        height=8,
        aria_hidden="true",
    )
    return join((bar, element("span", format_value(ratio))))
