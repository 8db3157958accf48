"""Render tables, and the values in table cells and in Facts, as HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cudakit.report.document import Column, Ratio, Stack, Table, Text, Value
from cudakit.report.markup import Markup, element, join
from cudakit.report.values import NO_STACK, distinct_caller, format_place, format_value, leaf, site
from cudakit.stacks import Frame
from cudakit.units import Unavailable

# Maximum number of frames of a call stack: an endless recursion has thousands.
_MAX_FRAMES = 100
_BAR_WIDTH = 72
_NEWLINE = Markup("\n")


def table(node: Table) -> Markup:
    """Return a table; a table wider than the page scrolls separately."""
    table_head = element("thead", element("tr", *map(_heading_cell, node.columns)))
    table_rows = (
        line_element
        for row_number, row in enumerate(node.rows)
        for line_element in (
            _NEWLINE,
            _row_element(node.columns, row, is_faint=row_number in node.faint_rows),
        )
    )
    total_row = node.total_row
    table_element = element(
        "table",
        table_head,
        element("tbody", *table_rows) if node.rows else None,
        element("tfoot", _row_element(node.columns, total_row)) if total_row else None,
    )
    is_wide = any(column.kind == "stack" for column in node.columns)
    frame_element = element(
        "div",
        table_element,
        class_="scroll wide" if is_wide else "scroll",
        # Only an element with focus can be scrolled with the keyboard.
        tabindex=0,
        role="region",
        aria_label=_table_name(node),
    )
    empty_note = None if node.rows else element("p", "nothing to list", class_="muted")
    caption = element("p", node.caption, class_="caption") if node.caption else None
    return join((frame_element, empty_note, caption))


def _table_name(node: Table) -> str:
    return "Table of " + ", ".join(column.name for column in node.columns if column.name)


def _heading_cell(column: Column) -> Markup:
    return element("th", column.name, scope="col", class_=column.kind)


def _row_element(
    columns: Sequence[Column], values: Sequence[Value], *, is_faint: bool = False
) -> Markup:
    return element("tr", *map(_table_cell, columns, values), class_="muted" if is_faint else None)


def _table_cell(column: Column, value: Value) -> Markup:
    is_bar = column.kind == "bar" and isinstance(value, Ratio) and math.isfinite(value.value)
    content = _bar_element(value) if is_bar and isinstance(value, Ratio) else cell(value)
    return element("td", content, class_=column.kind)


def _bar_element(ratio: Ratio) -> Markup:
    bar_length = round(min(max(ratio.value, 0.0), 1.0) * _BAR_WIDTH, 1)
    # A nonzero share is always visible.
    bar_length = max(bar_length, 1.0) if ratio.value > 0 else bar_length
    bar = element(
        "svg",
        element("rect", class_="track", width=_BAR_WIDTH, height=8, rx=2),
        element("rect", class_="fill", width=bar_length, height=8, rx=2),
        width=_BAR_WIDTH,
        height=8,
        aria_hidden="true",
    )
    return join((bar, element("span", format_value(ratio))))


def cell(value: Value) -> Markup:
    """Return a value for a table cell; a stack is its call site, which unfolds to all frames."""
    match value:
        case Stack():
            return _stack_element(value)
        case Frame():
            return _frame_element(value)
        case Unavailable(reason):
            return element("span", format_value(value), class_="muted", title=reason)
        case _:
            return join((format_value(value),))


def fact(value: Value) -> Markup:
    """Return the markup of a value in a list of Facts. An unavailable value is shown with its reason."""
    match value:
        case Unavailable(reason):
            return element("span", f"{format_value(value)}: {reason}", class_="muted")
        case Text(text):
            return element("span", text, class_="words")
        case _:
            return cell(value)


def _stack_element(stack: Stack) -> Markup:
    if not stack.frames:
        return element("span", NO_STACK, class_="muted")
    call_site = site(stack)
    if len(stack.frames) == 1:
        return _frame_element(call_site)
    frames = (
        element(
            "li",
            _frame_element(frame, full_path=True),
            class_="site" if frame is call_site else None,
        )
        for frame in stack.frames[:_MAX_FRAMES]
    )
    hidden_count = len(stack.frames) - _MAX_FRAMES
    hidden_frames = (
        element("li", f"{hidden_count:,} more frames", class_="muted") if hidden_count > 0 else None
    )
    return element(
        "details",
        element("summary", _frame_element(call_site), *_leaf_text(stack)),
        element("ol", *frames, hidden_frames),
        class_="stack",
    )


def _leaf_text(stack: Stack) -> tuple[Markup | str, ...]:
    """Return the innermost frame if it is not the call site, and the caller that distinguishes the stack."""
    leaf_frame, caller = leaf(stack), distinct_caller(stack)
    arrows_and_frames = ((" → ", leaf_frame), (" ← … ", caller))
    return tuple(
        text_part
        for arrow, frame in arrows_and_frames
        if frame
        for text_part in (arrow, _frame_element(frame))
    )


def _frame_element(frame: Frame, *, full_path: bool = False) -> Markup:
    """Return the function, file and line of a frame; ``full_path`` selects the full path."""
    location = f"{frame.filename}:{frame.line}" if full_path and frame.line else format_place(frame)
    function_element = element("span", frame.name or "?", class_="function")
    return join(
        (function_element, " ", element("span", location, class_="place"))
        if location
        else (function_element,)
    )
