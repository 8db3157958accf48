"""Find the call site of a call stack: its innermost frame in the program's own code."""

from __future__ import annotations

import re

from cudakit.document import Frame
from cudakit.trace.trace_file import Stack

_LIBRARY = re.compile(
    r"""(?:^|/)(?:site-packages|dist-packages)/       # installed packages
    | /lib/python3[.\d]*/                             # the standard library
    | /cudakit/(?:api|core|gpu|run)/                  # cudakit itself, also outside site-packages
    | ^<(?!stdin>|string>|ipython)                    # generated code, unless a person typed it
    | ^$                                              # a frame without a file
    """,
    re.VERBOSE,
)


def call_site_index(stack: Stack) -> int:
    """Return the index of the innermost frame outside of libraries; 0 if all frames are in libraries."""
    in_program = (index for index, frame in enumerate(stack) if not _LIBRARY.search(frame.file))
    return next(in_program, 0)


def document_frames(stack: Stack) -> tuple[Frame, ...]:
    """Return a call stack of a trace as frames of a document."""
    return tuple(Frame(frame.function, frame.file, frame.line) for frame in stack)
