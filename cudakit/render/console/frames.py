"""Call stacks in one line: the site first, then its callers."""

from __future__ import annotations

from itertools import islice

from rich.cells import cell_len
from rich.text import Text

from cudakit.document import Frame, Stack
from cudakit.render.console import theme
from cudakit.render.console.text import escaped
from cudakit.render.values import NO_STACK, format_frame, leaf, site

# Paths of library code: its frames are left out between frames of the program.
_LIBRARY = ("site-packages/", "dist-packages/", "/lib/python3", "<frozen ")
_CALLED_FROM = " ← "
_MOST_CALLERS = 12  # more than fit on a line


def format_stack(stack: Stack, *, with_callers: bool) -> str:
    """Format a stack: its site, the innermost frame, and the callers.

    ``model.py:8 forward (functional.py:7 relu) ← train.py:20 step``
    """
    if not stack.frames:
        return NO_STACK
    first = escaped(format_frame(site(stack))) + next(iter(leaf_forms(stack)), "")
    return _CALLED_FROM.join((first, *(callers(stack) if with_callers else ())))


def callers(stack: Stack) -> list[str]:
    """Format the callers of the site, nearest first; library frames only if the site is one."""
    if not stack.frames:
        return []
    only_own = not _is_library(site(stack))
    beyond = stack.frames[max(stack.site, 0) + 1 :]
    wanted = (frame for frame in beyond if not (only_own and _is_library(frame)))
    return [escaped(format_frame(frame)) for frame in islice(wanted, _MOST_CALLERS)]


def leaf_forms(stack: Stack) -> tuple[str, ...]:
    """Format the innermost frame, in ever shorter forms: ``(functional.py:7 relu)``."""
    frame = leaf(stack)
    if frame is None:
        return ()
    file = frame.filename.replace("\\", "/").rpartition("/")[2]
    forms = (frame, Frame(frame.name, file, frame.line), Frame(frame.name, "", 0))
    return tuple(f" ({escaped(format_frame(form))})" for form in forms)


def stack_line(stack: Stack, *, room: int, with_callers: bool) -> Text:
    """Format a stack in ``room`` columns: site and innermost frame, then the callers that fit, faint."""
    if not stack.frames:
        return _cut(Text(NO_STACK, theme.FAINT), room)
    line = _cut(Text(_site_words_within(site(stack), room)), room)
    left = room - line.cell_len
    line.append(
        next((form for form in leaf_forms(stack) if cell_len(form) <= left), ""), theme.PLAIN
    )
    for caller in callers(stack) if with_callers else ():
        if line.cell_len + cell_len(_CALLED_FROM + caller) > room:
            break
        line.append(_CALLED_FROM + caller, theme.FAINT)
    return line


def _site_words_within(frame: Frame, room: int) -> str:
    words = escaped(format_frame(frame))
    if cell_len(words) <= room:
        return words
    # The folder is the least important part: file, line and function are kept.
    file = frame.filename.replace("\\", "/").rpartition("/")[2]
    return escaped(format_frame(Frame(frame.name, file, frame.line)))


def _cut(line: Text, room: int) -> Text:
    line.truncate(max(room, 1), overflow="ellipsis")
    return line


def _is_library(frame: Frame) -> bool:
    return any(mark in frame.filename for mark in _LIBRARY)
