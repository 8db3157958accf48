"""Call stacks in one line: the reader's own frame first, then those that led there."""

from __future__ import annotations

from itertools import islice

from rich.cells import cell_len
from rich.text import Text

from cudakit.document import Frame, Stack
from cudakit.render.amounts import NO_STACK, frame_words, leaf, site
from cudakit.render.console import theme
from cudakit.render.console.text import escaped

# What stands between a program and its own frames when a library calls back into it.
_LIBRARY = ("site-packages/", "dist-packages/", "/lib/python3", "<frozen ")
_CALLED_FROM = " ← "
_MOST_CALLERS = 12  # more than fit on any line; a stack may have any depth


def stack_words(stack: Stack, *, with_callers: bool) -> str:
    """Write a stack: its site, what that called in the end, and what led there.

    ``model.py:8 forward (functional.py:7 relu) ← train.py:20 step``
    """
    if not stack.frames:
        return NO_STACK
    first = escaped(frame_words(site(stack))) + next(iter(leaf_words(stack)), "")
    return _CALLED_FROM.join((first, *(callers(stack) if with_callers else ())))


def callers(stack: Stack) -> list[str]:
    """Write the frames that led to the site, nearest first; a library's only where all are."""
    if not stack.frames:
        return []
    only_own = not _is_library(site(stack))
    beyond = stack.frames[max(stack.site, 0) + 1 :]
    wanted = (frame for frame in beyond if not (only_own and _is_library(frame)))
    return [escaped(frame_words(frame)) for frame in islice(wanted, _MOST_CALLERS)]


def leaf_words(stack: Stack) -> tuple[str, ...]:
    """Write what the site's line called in the end, in ever fewer words: ``(functional.py:7 relu)``."""
    frame = leaf(stack)
    if frame is None:
        return ()
    file = frame.filename.replace("\\", "/").rpartition("/")[2]
    forms = (frame, Frame(frame.name, file, frame.line), Frame(frame.name, "", 0))
    return tuple(f" ({escaped(frame_words(form))})" for form in forms)


def stack_line(stack: Stack, *, room: int, with_callers: bool) -> Text:
    """Write a stack in ``room`` columns: site and leaf, then as many whole callers as fit, faint."""
    if not stack.frames:
        return _cut(Text(NO_STACK, theme.FAINT), room)
    line = _cut(Text(_site_words_within(site(stack), room)), room)
    left = room - line.cell_len
    line.append(
        next((form for form in leaf_words(stack) if cell_len(form) <= left), ""), theme.PLAIN
    )
    for caller in callers(stack) if with_callers else ():
        if line.cell_len + cell_len(_CALLED_FROM + caller) > room:
            break
        line.append(_CALLED_FROM + caller, theme.FAINT)
    return line


def _site_words_within(frame: Frame, room: int) -> str:
    words = escaped(frame_words(frame))
    if cell_len(words) <= room:
        return words
    # The folder is what a reader misses least; the file, its line and the function come first.
    file = frame.filename.replace("\\", "/").rpartition("/")[2]
    return escaped(frame_words(Frame(frame.name, file, frame.line)))


def _cut(line: Text, room: int) -> Text:
    line.truncate(max(room, 1), overflow="ellipsis")
    return line


def _is_library(frame: Frame) -> bool:
    return any(mark in frame.filename for mark in _LIBRARY)
