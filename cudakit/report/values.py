"""Format values as plain text, which a renderer then escapes, cuts and colors."""

from __future__ import annotations

import math

from cudakit.report.document import (
    Bytes,
    Change,
    Chart,
    Count,
    Rate,
    Ratio,
    Seconds,
    Stack,
    Text,
    Value,
)
from cudakit.stacks import Frame
from cudakit.units import (
    Unavailable,
    format_bytes,
    format_count,
    format_rate,
    format_ratio,
    format_seconds,
)

NOT_AVAILABLE = "n/a"
NO_STACK = "no stack recorded"

# The levels of notes in words and as symbols.
LEVELS = {"ok": "OK", "info": "Note", "warn": "Warning", "error": "Error"}
SYMBOLS = {"ok": "✓", "info": "i", "warn": "!", "error": "✗"}

_INSTALL_FOLDERS = ("site-packages/", "dist-packages/")
_UNKNOWN_FILE = ("", "??")


def format_value(value: Value) -> str:
    """Format a value; ``~`` marks a derived size, a stack is its call site."""
    match value:
        case Text(text):
            return text
        case Frame():
            return format_frame(value)
        case Stack():
            return format_frame(site(value)) if value.frames else NO_STACK
        case Unavailable():
            return NOT_AVAILABLE
        case _:
            return _amount_text(value) if math.isfinite(value.value) else NOT_AVAILABLE


def site(stack: Stack) -> Frame:
    """Return the call site of a stack. Raises IndexError for an empty stack."""
    return stack.frames[min(max(stack.site, 0), len(stack.frames) - 1)]


def leaf(stack: Stack) -> Frame | None:
    """Return the frame to show beside the call site; None if it is the call site.

    This is the frame that distinguishes the stack from others, if the stack has one inside of the call site,
    else the innermost frame.
    """
    if not stack.frames:
        return None
    is_inside = stack.distinct_index is not None and stack.distinct_index < max(stack.site, 0)
    frame = stack.frames[
        stack.distinct_index if is_inside and stack.distinct_index is not None else 0
    ]
    return None if frame == site(stack) else frame


def distinct_caller(stack: Stack) -> Frame | None:
    """Return the caller of the call site that distinguishes the stack from others; None if none does."""
    if stack.distinct_index is None or stack.distinct_index <= max(stack.site, 0):
        return None
    return stack.frames[stack.distinct_index]


def format_frame(frame: Frame) -> str:
    """Format a frame as ``train.py:15 step``, or the function alone if the file is unknown."""
    return f"{format_place(frame)} {frame.name}".strip()


def format_place(frame: Frame) -> str:
    """Format the file and line of a frame, ``loop/train.py:15``; empty if the file is unknown."""
    if frame.filename in _UNKNOWN_FILE:
        return ""
    line_text = f":{frame.line}" if frame.line > 0 else ""
    return _shorten_path(frame.filename) + line_text


def _shorten_path(path: str) -> str:
    """Shorten a path to the part after site-packages, or else to its last two components."""
    normal_path = path.replace("\\", "/")
    for folder in _INSTALL_FOLDERS:
        _, separator, path_in_folder = normal_path.rpartition(folder)
        if separator:
            return path_in_folder
    return "/".join(normal_path.rsplit("/", 2)[-2:])


def _amount_text(value: Bytes | Change | Seconds | Rate | Ratio | Count) -> str:
    match value:
        case Bytes(size_bytes, derived):
            return ("~" if derived else "") + format_bytes(size_bytes)
        case Change(size_bytes):
            return ("+" if size_bytes > 0 else "") + format_bytes(size_bytes)
        case Seconds(seconds):
            # An int is exact and gets no trailing zeros.
            return format_seconds(seconds, pad=isinstance(seconds, float)) if seconds else "0 s"
        case Rate(amount, unit):
            return format_rate(amount, unit, pad=True)
        case Ratio(ratio):
            return format_ratio(ratio)
        case Count(count):
            return format_count(count)


def x_value(chart: Chart, x: float) -> Value:
    """Return a position on the x axis as a value with its unit."""
    return _with_unit(chart.x_unit, x)


def y_value(chart: Chart, y: float) -> Value:
    """Return a value on the y axis with its unit."""
    return _with_unit(chart.y_unit, y)


def format_y(chart: Chart, y: float) -> str:
    """Format a value on the y axis with its unit."""
    return format_value(y_value(chart, y))


def _with_unit(unit: str, number: float) -> Value:
    if not math.isfinite(number):
        return Unavailable("not a number")
    match unit:
        case "bytes":
            return Bytes(round(number))
        case "seconds":
            return Seconds(int(number) if number == int(number) else number)
        case "ratio":
            return Ratio(number)
        case _:
            return Count(round(number))
