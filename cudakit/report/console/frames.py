"""Format call stacks on one or two lines: the call site first, then its callers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from rich.cells import cell_len
from rich.text import Text

from cudakit.report.console import theme
from cudakit.report.console.text import cut, escape
from cudakit.report.document import Stack
from cudakit.report.values import (
    NO_STACK,
    distinct_caller,
    format_frame,
    format_place,
    leaf,
    site,
)
from cudakit.stacks import Frame, is_library

_CALLED_FROM = " ← "
_MIN_LEAF_WIDTH = 12  # minimum number of cells: shorter function names are ambiguous
_MAX_CALLERS = 12  # maximum number of callers; more never fit on a line


def format_stack(stack: Stack, *, with_callers: bool) -> str:
    """Format a stack: the call site, the innermost frame and the callers.

    ``model.py:8 forward (functional.py:7 relu) ← train.py:20 step``
    """
    if not stack.frames:
        return NO_STACK
    longest_form = next(_stack_forms(stack, 0))
    if distinct_caller(stack):
        return longest_form
    return _CALLED_FROM.join((longest_form, *(callers(stack) if with_callers else ())))


def callers(stack: Stack) -> list[str]:
    """Return the callers, innermost first; library frames only if the call site is one."""
    if not stack.frames:
        return []
    skips_libraries = not is_library(site(stack).filename)
    outer_frames = stack.frames[max(stack.site, 0) + 1 :]
    shown_frames = (
        frame for frame in outer_frames if not (skips_libraries and is_library(frame.filename))
    )
    return [escape(format_frame(frame)) for frame in islice(shown_frames, _MAX_CALLERS)]


def stack_line(stack: Stack, *, width: int, with_callers: bool) -> Text:
    """Format a stack in ``width`` columns: call site, innermost frame, and the callers that fit."""
    if not stack.frames:
        return _cut_line(Text(NO_STACK, theme.FAINT), width)
    forms = list(_stack_forms(stack, width))
    fitting_form = next((form for form in forms if cell_len(form) <= width), forms[-1])
    line = _cut_line(Text(fitting_form), width)
    for caller in callers(stack) if with_callers and not distinct_caller(stack) else ():
        if line.cell_len + cell_len(_CALLED_FROM + caller) > width:
            break
        line.append(_CALLED_FROM + caller, theme.FAINT)
    return line


def lacks_innermost_frame(line: str, stack: Stack) -> bool:
    """Return whether a line of ``stack_line`` shows the call site alone, for lack of columns."""
    return leaf(stack) is not None and distinct_caller(stack) is None and " (" not in line


def two_stack_lines(stack: Stack, *, width: int) -> list[Text]:
    """Format a stack in ``width`` columns: the call site and, on a second line, the frame beside it.

    Without a frame beside the call site, the list has one line. Tables use this form for stacks whose single
    lines would look the same.
    """
    if not stack.frames:
        return [_cut_line(Text(NO_STACK, theme.FAINT), width)]
    site_line = _first_fitting(_frame_forms(site(stack)), width)
    if caller := distinct_caller(stack):
        file_and_line = f"…/{escape(format_place(caller)).rpartition('/')[2]}"
        second_forms = [f"← {form}" for form in (*_frame_forms(caller), file_and_line)]
    else:
        second_forms = [form.strip() for form in _leaf_forms(stack)]
    if not second_forms:
        return [site_line]
    second_line = _first_fitting([f"  {form}" for form in second_forms], width)
    second_line.stylize(theme.FAINT)
    return [site_line, second_line]


def _first_fitting(forms: Sequence[str], width: int) -> Text:
    fitting_form = next((form for form in forms if cell_len(form) <= width), forms[-1])
    return _cut_line(Text(fitting_form), width)


def _stack_forms(stack: Stack, width: int) -> Iterator[str]:
    """Yield forms of a stack on one line, from long to short; an ellipsis marks omitted parts.

    The innermost frame is cut if that makes the call site fit into ``width`` columns.
    """
    site_text, short_site_text = _frame_forms(site(stack))
    if caller := distinct_caller(stack):
        caller_text, short_caller_text = _frame_forms(caller)
        is_direct = stack.distinct_index == max(stack.site, 0) + 1
        arrow = _CALLED_FROM if is_direct else f"{_CALLED_FROM}… "
        for leaf_form in dict.fromkeys((*_leaf_forms(stack), "")):
            yield f"{site_text}{leaf_form}{arrow}{caller_text}"
        yield f"{short_site_text}{_CALLED_FROM}{short_caller_text}"
        yield f"{short_site_text}{_CALLED_FROM}…/{escape(format_place(caller)).rpartition('/')[2]}"
        return
    leaf_forms = _leaf_forms(stack) or ("",)
    yield from (site_text + leaf_form for leaf_form in leaf_forms)
    yield from (short_site_text + leaf_form for leaf_form in leaf_forms[1:])
    leaf_frame = leaf(stack)
    is_cuttable = leaf_frame is not None and not leaf_frame.line  # a cut line number would be wrong
    leaf_width = width - cell_len(short_site_text)
    if is_cuttable and _MIN_LEAF_WIDTH <= leaf_width < cell_len(leaf_forms[-1]):
        yield cut(short_site_text + leaf_forms[-1], width)
    yield site_text
    yield short_site_text


def _frame_forms(frame: Frame) -> tuple[str, str]:
    """Return two texts of a frame: one with the full path, one with the file name only."""
    file_name = frame.filename.replace("\\", "/").rpartition("/")[2]
    full_text = escape(format_frame(frame))
    short_text = escape(format_frame(Frame(frame.name, file_name, frame.line)))
    return full_text, short_text if short_text == full_text else f"…/{short_text}"


def _leaf_forms(stack: Stack) -> tuple[str, ...]:
    """Return forms of the frame beside the call site, from long to short: ``(functional.py:7 relu)``.

    The shortest form has the file name and the line, or the function if the line is unknown.
    """
    frame = leaf(stack)
    if frame is None:
        return ()
    full_text, short_text = _frame_forms(frame)
    shortest_text = f"… {escape(frame.name)}"
    if frame.line:
        short_place = escape(format_place(Frame("", frame.filename.rpartition("/")[2], frame.line)))
        shortest_text = f"…/{short_place}"
    return tuple(f" ({form})" for form in dict.fromkeys((full_text, short_text, shortest_text)))


def _cut_line(line: Text, width: int) -> Text:
    line.truncate(max(width, 1), overflow="ellipsis")
    return line
