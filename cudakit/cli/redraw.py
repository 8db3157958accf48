"""Text that takes its own place again and again on a terminal, and follows itself elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

from cudakit.cli.output import Output, is_capable_terminal

_TO_END = "\x1b[J"
_HOME = "\x1b[H"


@dataclass(slots=True)
class Redraw:
    """Shows one text in the place of the one before."""

    output: Output
    _above: int = 0  # lines that stand there

    def show(self, text: str) -> None:
        """Replace what was shown last; a pipe or a file gets one text after another."""
        if not is_capable_terminal(self.output.stream):
            self.output.write(text)
        else:
            self.output.write(self._back() + text)
            self._above = text.count("\n")
        self.output.stream.flush()

    def _back(self) -> str:
        if not self._above:
            return ""
        # What has scrolled out of sight cannot be written over.
        higher = self._above >= os.get_terminal_size(self.output.stream.fileno()).lines
        return (_HOME if higher else f"\x1b[{self._above}F") + _TO_END


def ticks(seconds: float) -> Iterator[None]:
    """Give a tick at once and then one every so many seconds; what comes late is not made up for."""
    due = time.monotonic()
    while True:
        yield
        now = time.monotonic()
        due = max(due + seconds, now)
        time.sleep(due - now)
