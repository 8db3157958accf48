"""Show the progress of long work on one line of the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO, TypeAlias

from cudakit.cli.output import is_capable_terminal, printable, terminal_width

# The arguments are the name of the current stage and the completed fraction of it, from 0 to 1.
Progress: TypeAlias = Callable[[str, float], None]


@contextmanager
def progress_line(*, quiet: bool = False) -> Iterator[Progress]:
    """Yield a Progress that writes to stderr if it is a terminal; clear the line at the end."""
    if quiet or not is_capable_terminal(sys.stderr):
        yield _ignore_progress
        return
    line = _Line(sys.stderr)
    try:
        yield line.show
    finally:
        line.replace("")


class _Line:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._text = ""

    def show(self, stage: str, fraction: float) -> None:
        text = f"{printable(stage)} {fraction:4.0%}"
        self.replace(text[: terminal_width(self._stream) - 1])

    def replace(self, text: str) -> None:
        # Write only changes: progress is reported often, and the terminal may be remote.
        if text != self._text:
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()
            self._text = text


def _ignore_progress(stage: str, fraction: float) -> None:
    pass
