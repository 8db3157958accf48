"""Python stacks as people read them: which frame is the program's own, and where it stands."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cudakit.document import Frame

_LIBRARY = re.compile(
    r"""(?:^|/)(?:site-packages|dist-packages)/       # installed packages
    | /lib/python3[.\d]*/                             # the standard library
    | /cudakit/(?:api|core|gpu|run)/                  # ourselves, wherever installed
    | ^<(?!stdin>|string>|ipython)                    # generated code, not what a person typed
    | ^$                                              # unknown
    """,
    re.VERBOSE,
)


def site(frames: Sequence[Frame]) -> int:
    """Find the frame to see first: the innermost of the program's own, else the innermost."""
    return next((at for at, frame in enumerate(frames) if is_own(frame)), 0)


def is_own(frame: Frame) -> bool:
    """Say whether a frame is the program's own: not of a library, of Python or of cudakit."""
    return not _LIBRARY.search(frame.filename)


def place(frames: Sequence[Frame]) -> str:
    """Write where the frame to see first stands, ``train.py:15``; nothing where there is no frame."""
    if not frames:
        return ""
    frame = frames[site(frames)]
    return f"{frame.filename.rpartition('/')[2]}:{frame.line}"
