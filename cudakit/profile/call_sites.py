"""Find the call site of a stack, the innermost frame in the program's own code, and format stacks."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cudakit.trace.trace_file import Frame, Stack

NO_STACK = "no call stack recorded"

_LIBRARY_FILE_PATTERN = re.compile(
    r"""(?:^|/)(?:site-packages|dist-packages)/       # installed packages
    | /lib/python3[.\d]*/                             # the standard library
    # cudakit itself, also outside site-packages; logs of earlier versions have core and run
    | /cudakit/(?:allocator|api|arrays|bench|core|devices|gpu|memory|profile|record|run|sanitize|trace)/
    | ^<(?!stdin>|string>|ipython)                    # generated code, unless a person typed it
    | ^$                                              # a frame without a file
    """,
    re.VERBOSE,
)


def call_site_index(stack: Sequence[Frame]) -> int:
    """Return the index of the innermost frame outside of libraries; 0 if all frames are in libraries.

    Frames of files are preferred to frames of generated code, which has no file and may belong to a
    library.
    """
    program_indices = [
        index for index, frame in enumerate(stack) if not _LIBRARY_FILE_PATTERN.search(frame.file)
    ]
    file_indices = (index for index in program_indices if not stack[index].file.startswith("<"))
    return next(file_indices, program_indices[0] if program_indices else 0)


def frame_text(frame: Frame) -> str:
    """Return a frame as "train.py:12 step"."""
    location = f"{frame.file}:{frame.line}" if frame.line else frame.file
    return f"{location} {frame.function}".strip()


def call_site(stack: Stack) -> str:
    """Return the call site of a stack as text."""
    return frame_text(stack[call_site_index(stack)]) if stack else NO_STACK


def call_path(stack: Stack) -> list[str]:
    """Return the frames of a call stack as texts, the outermost first."""
    return [frame_text(frame) for frame in reversed(stack)] or [NO_STACK]
