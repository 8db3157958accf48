"""Values as the content of cells and facts."""

from __future__ import annotations

from cudakit.document import (
    Frame,
    Stack,
    Text,
    Value,
)
from cudakit.render.markup import Markup, element, join
from cudakit.render.values import NO_STACK, format_place, format_value, leaf, site
from cudakit.units import Unavailable

# A runaway recursion has thousands of frames.
_FRAMES = 100


def cell(value: Value) -> Markup:
    """Write a value for a table cell; a stack is its site, which opens to all frames."""
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
    """Write a single value; an Unavailable with its reason."""
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
    first = site(stack)
    if len(stack.frames) == 1:
        return _frame(first)
    frames = (
        element("li", _frame(frame, whole=True), class_="site" if frame is first else None)
        for frame in stack.frames[:_FRAMES]
    )
    beyond = len(stack.frames) - _FRAMES
    rest = element("li", f"{beyond:,} more frames", class_="muted") if beyond > 0 else None
    return element(
        "details",
        element("summary", _frame(first), *_leaf(stack)),
        element("ol", *frames, rest),
        class_="stack",
    )


def _leaf(stack: Stack) -> tuple[Markup | str, ...]:
    """Write the innermost frame if it is not the site."""
    frame = leaf(stack)
    return (" → ", _frame(frame)) if frame else ()


def _frame(frame: Frame, *, whole: bool = False) -> Markup:
    """Write the function, then its file and line: the ``whole`` path, or a shortened one."""
    place = f"{frame.filename}:{frame.line}" if whole and frame.line else format_place(frame)
    function = element("span", frame.name or "?", class_="function")
    return join((function, " ", element("span", place, class_="place")) if place else (function,))
