"""Render tables, and values in cells and facts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cudakit.document import Column, Frame, Ratio, Stack, Table, Text, Value
from cudakit.render.markup import Markup, element, join
from cudakit.render.values import NO_STACK, distinct_caller, format_place, format_value, leaf, site
from cudakit.units import Unavailable

# Maximum number of frames of a call stack: an endless recursion has thousands.
_MAX_FRAMES = 100
_BAR_WIDTH = 72
_NEWLINE = Markup("\n")


def table(node: Table) -> Markup:
    """Return a table; a table wider than the page scrolls separately."""
    table_head = element("thead", element("tr", *map(_heading, node.columns)))
    rows = (
        line
        for number, row in enumerate(node.rows)
        for line in (_NEWLINE, _row(node.columns, row, is_faint=number in node.faint_rows))
    )
    total = node.total_row
    grid = element(
        "table",
        table_head,
        element("tbody", *rows) if node.rows else None,
        element("tfoot", _row(node.columns, total)) if total else None,
    )
    is_wide = any(column.kind == "stack" for column in node.columns)
    frame = element(
        "div",
        grid,
        class_="scroll wide" if is_wide else "scroll",
        # Only an element with focus can be scrolled with the keyboard.
        tabindex=0,
        role="region",
        aria_label=_name(node),
    )
    empty_note = None if node.rows else element("p", "nothing to list", class_="muted")
    caption = element("p", node.caption, class_="caption") if node.caption else None
    return join((frame, empty_note, caption))


def _name(node: Table) -> str:
    return "Table of " + ", ".join(column.name for column in node.columns if column.name)


def _heading(column: Column) -> Markup:
    return element("th", column.name, scope="col", class_=column.kind)


def _row(columns: Sequence[Column], values: Sequence[Value], *, is_faint: bool = False) -> Markup:
    return element("tr", *map(_cell, columns, values), class_="muted" if is_faint else None)


def _cell(column: Column, value: Value) -> Markup:
    is_bar = column.kind == "bar" and isinstance(value, Ratio) and math.isfinite(value.value)
    content = _bar(value) if is_bar and isinstance(value, Ratio) else cell(value)
    return element("td", content, class_=column.kind)


def _bar(ratio: Ratio) -> Markup:
    length = round(min(max(ratio.value, 0.0), 1.0) * _BAR_WIDTH, 1)
    # A nonzero share is always visible.
    length = max(length, 1.0) if ratio.value > 0 else length
    bar = element(
        "svg",
        element("rect", class_="track", width=_BAR_WIDTH, height=8, rx=2),
        element("rect", class_="fill", width=length, height=8, rx=2),
        width=_BAR_WIDTH,
        height=8,
        aria_hidden="true",
    )
    return join((bar, element("span", format_value(ratio))))


def cell(value: Value) -> Markup:
    """Return a value for a table cell; a stack is its call site, which unfolds to all frames."""
    match value:
        case Stack():
            return _stack(value)
        case Frame():
            return _frame(value)
        case Unavailable(reason):
            return element("span", format_value(value), class_="muted", title=reason)
        case _:
            return join((format_value(value),))


def fact(value: Value) -> Markup:
    """Return a value of Facts; an Unavailable has its reason."""
    match value:
        case Unavailable(reason):
            return element("span", f"{format_value(value)}: {reason}", class_="muted")
        case Text(text):
            return element("span", text, class_="words")
        case _:
            return cell(value)


def _stack(stack: Stack) -> Markup:
    if not stack.frames:
        return element("span", NO_STACK, class_="muted")
    call_site = site(stack)
    if len(stack.frames) == 1:
        return _frame(call_site)
    frames = (
        element("li", _frame(frame, full_path=True), class_="site" if frame is call_site else None)
        for frame in stack.frames[:_MAX_FRAMES]
    )
    n_hidden = len(stack.frames) - _MAX_FRAMES
    hidden_frames = (
        element("li", f"{n_hidden:,} more frames", class_="muted") if n_hidden > 0 else None
    )
    return element(
        "details",
        element("summary", _frame(call_site), *_leaf(stack)),
        element("ol", *frames, hidden_frames),
        class_="stack",
    )


def _leaf(stack: Stack) -> tuple[Markup | str, ...]:
    """Return the innermost frame if it is not the call site, and the caller that distinguishes the stack."""
    leaf_frame, caller = leaf(stack), distinct_caller(stack)
    arrows_and_frames = ((" → ", leaf_frame), (" ← … ", caller))
    return tuple(
        part for arrow, frame in arrows_and_frames if frame for part in (arrow, _frame(frame))
    )


def _frame(frame: Frame, *, full_path: bool = False) -> Markup:
    """Return the function, file and line of a frame; ``full_path`` selects the full path."""
    location = f"{frame.filename}:{frame.line}" if full_path and frame.line else format_place(frame)
    function = element("span", frame.name or "?", class_="function")
    return join(
        (function, " ", element("span", location, class_="place")) if location else (function,)
    )
