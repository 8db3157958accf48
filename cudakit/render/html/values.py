"""Values as the content of cells and facts."""

from __future__ import annotations

from cudakit.document import (
    Frame,
    Stack,
    Text,
    Value,
)
from cudakit.render.amounts import NO_STACK, leaf, place_words, site, words
from cudakit.render.markup import Markup, element, join
from cudakit.units import Unavailable

# A recursion that went wrong may have thousands of frames.
_FRAMES = 100


def cell(value: Value) -> Markup:
    """Write a value for a table: a stack as its site, which opens to all frames."""
    match value:
        case Stack():
            return _stack(value)
        case Frame():
            return _frame(value)
        case Unavailable(reason):
            return element("span", words(value), class_="muted", title=reason)
        case _:
            return join((words(value),))


def fact(value: Value) -> Markup:
    """Write a value that stands alone, with the reason where there is none."""
    match value:
        case Unavailable(reason):
            return element("span", f"{words(value)}: {reason}", class_="muted")
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
    """Write what the site's line called in the end, where that is another frame."""
    frame = leaf(stack)
    return (" → ", _frame(frame)) if frame else ()


def _frame(frame: Frame, *, whole: bool = False) -> Markup:
    """Write the function, then where it stands: the ``whole`` path, or what tells it apart."""
    place = f"{frame.filename}:{frame.line}" if whole and frame.line else place_words(frame)
    function = element("span", frame.name or "?", class_="function")
    return join((function, " ", element("span", place, class_="place")) if place else (function,))
