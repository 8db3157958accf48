"""What agents leave for the supervisor beside their traces: lines in files of the spool."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class About(StrEnum):
    """What a line is about, and the suffix of the files that hold such lines."""

    FAILED = "failed"  # something that the agent was to do, and why it cannot
    SNAPSHOTS = "snapshots"  # a snapshot of memory was saved: its path


@dataclass(frozen=True, slots=True)
class Notice:
    """One line of one process."""

    process: int  # 0: the supervisor itself
    about: About
    text: str


class Notices:
    """Reads the lines that come."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[str, int] = {}

    def new(self) -> Iterator[Notice]:
        """Yield the lines since the last call."""
        for name in sorted(os.listdir(self._directory)):
            process, _, suffix = name.partition(".")
            if process.isdecimal() and suffix in set(About):
                for line in self._lines(name):
                    yield Notice(int(process), About(suffix), line)

    def _lines(self, name: str) -> Iterator[str]:
        content = (self._directory / name).read_bytes()[self._read.get(name, 0) :]
        whole = content[: content.rfind(b"\n") + 1]
        self._read[name] = self._read.get(name, 0) + len(whole)
        for line in whole.splitlines():
            yield line.decode("utf-8", "surrogateescape")
