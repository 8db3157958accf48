"""Text that takes its own place again and again, and the time between."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

from cudakit.cli.output import Output, is_capable_terminal

_TO_END = "\x1b[J"
_HOME = "\x1b[H"
# Between the first two looks at counters, which say nothing alone.
_FIRST_LOOK_SECONDS = 0.2


@dataclass(slots=True)
class Redraw:
    """Shows a text in the place of the one before."""

    output: Output
    _above: int = 0  # lines that stand there

    def show(self, text: str) -> None:
        """Replace what was shown last; a pipe or a file gets one text after another."""
        if is_capable_terminal(self.output.stream):
            self.output.write(self._back() + text)
            self._above = text.count("\n")
        else:
            self.output.write(text)
        self.output.stream.flush()

    def _back(self) -> str:
        if not self._above:
            return ""
        height = os.get_terminal_size(self.output.stream.fileno()).lines
        # What has scrolled out of sight cannot be written over; a height of 0 is unknown.
        hidden = 0 < height <= self._above
        return (_HOME if hidden else f"\x1b[{self._above}F") + _TO_END


def ticks(seconds: float, *, twice: bool) -> Iterator[int]:
    """Count looks, one every so many seconds; ``twice``, the first is followed at once by another."""
    yield 0
    if twice:
        time.sleep(min(_FIRST_LOOK_SECONDS, seconds))
        yield 1
    due, number = time.monotonic(), 2
    while True:
        now = time.monotonic()
        # What comes late is not made up for.
        due = max(due + seconds, now)
        time.sleep(due - now)
        yield number
        number += 1
