"""Format call stacks on one line: the call site first, then its callers."""

from __future__ import annotations

from itertools import islice

from rich.cells import cell_len
from rich.text import Text

from cudakit.document import Frame, Stack
from cudakit.render.console import theme
from cudakit.render.console.text import escape
from cudakit.render.values import NO_STACK, format_frame, leaf, site

# Paths of library code. Library frames between frames of the program are left out.
_LIBRARY = ("site-packages/", "dist-packages/", "/lib/python3", "<frozen ")
_CALLED_FROM = " ← "
_MIN_LEAF_WIDTH = 12  # cells; shorter function names are ambiguous
_MAX_CALLERS = 12  # more than fit on a line


def format_stack(stack: Stack, *, with_callers: bool) -> str:
    """Format a stack: the call site, the innermost frame and the callers.

    ``model.py:8 forward (functional.py:7 relu) ← train.py:20 step``
    """
    if not stack.frames:
        return NO_STACK
    first = escape(format_frame(site(stack))) + next(iter(format_leaf(stack)), "")
    return _CALLED_FROM.join((first, *(callers(stack) if with_callers else ())))


def callers(stack: Stack) -> list[str]:
    """Return the callers, innermost first; library frames only if the call site is one."""
    if not stack.frames:
        return []
    skips_libraries = not _is_library(site(stack))
    outer_frames = stack.frames[max(stack.site, 0) + 1 :]
    shown_frames = (frame for frame in outer_frames if not (skips_libraries and _is_library(frame)))
    return [escape(format_frame(frame)) for frame in islice(shown_frames, _MAX_CALLERS)]


def format_leaf(stack: Stack) -> tuple[str, ...]:
    """Return forms of the innermost frame, from long to short: ``(functional.py:7 relu)``."""
    frame = leaf(stack)
    if frame is None:
        return ()
    file = frame.filename.replace("\\", "/").rpartition("/")[2]
    forms = (frame, Frame(frame.name, file, frame.line), Frame(frame.name, "", 0))
    return tuple(f" ({escape(format_frame(form))})" for form in forms)


def stack_line(stack: Stack, *, width: int, with_callers: bool) -> Text:
    """Format a stack in ``width`` columns: call site, innermost frame, and the callers that fit."""
    if not stack.frames:
        return _cut(Text(NO_STACK, theme.FAINT), width)
    line = _cut(Text(_site_and_leaf(stack, width)), width)
    for caller in callers(stack) if with_callers else ():
        if line.cell_len + cell_len(_CALLED_FROM + caller) > width:
            break
        line.append(_CALLED_FROM + caller, theme.FAINT)
    return line


def _site_and_leaf(stack: Stack, width: int) -> str:
    """Return the longest form that fits; the directory of the call site is dropped last."""
    frame = site(stack)
    file = frame.filename.replace("\\", "/").rpartition("/")[2]
    full_name, short_name = (
        escape(format_frame(form)) for form in (frame, Frame(frame.name, file, frame.line))
    )
    leaves = format_leaf(stack) or ("",)
    forms = (*(full_name + leaf for leaf in leaves), *(short_name + leaf for leaf in leaves[1:]))
    if fitting := next((form for form in forms if cell_len(form) <= width), ""):
        return fitting
    if cell_len(short_name) + min(cell_len(leaves[-1]), _MIN_LEAF_WIDTH) <= width:
        return short_name + leaves[-1]  # the end is cut
    return full_name if cell_len(full_name) <= width else short_name


def _cut(line: Text, width: int) -> Text:
    line.truncate(max(width, 1), overflow="ellipsis")
    return line


def _is_library(frame: Frame) -> bool:
    return any(mark in frame.filename for mark in _LIBRARY)
