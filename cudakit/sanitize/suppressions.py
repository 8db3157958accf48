"""Parse and match suppressions: patterns of races that are not reported."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from cudakit.errors import UsageError
from cudakit.input_files import ExpectedFile, read_text
from cudakit.sanitize.result import Side
from cudakit.stacks import Frame
from cudakit.trace.kernel_names import short_kernel

COMMAND_LINE = "--suppress"

_PATTERN_HINT = (
    "use kernel:GLOB or site:FILE[:FUNCTION], for example kernel:nccl* or site:loader.py"
)
_SUPPRESSIONS_FILE = ExpectedFile(
    "a file of suppressions", "use a text file with one pattern per line: --suppress @FILE"
)
_COMMENT = re.compile(r"(?:^|\s)#.*")


@dataclass(frozen=True, slots=True)
class Suppression:
    """A pattern that hides races, by a kernel name or a stack frame of either side."""

    pattern: str  # pattern, as the user wrote it
    origin: str  # option of the pattern, or its file and line
    kernel: str = ""  # glob that a kernel name must match
    file: str = ""  # glob that the path of a frame's file, or the end of the path, must match
    function: str = "*"  # glob that the function name of the frame must match

    def covers(self, *sides: Side) -> bool:
        """Return whether the pattern hides a race between these sides."""
        return any(self._covers(side) for side in sides)

    def _covers(self, side: Side) -> bool:
        if self.kernel:
            return any(fnmatchcase(name, self.kernel) for name in _kernel_names(side))
        return any(self._matches_frame(frame) for frame in side.stack)

    def _matches_frame(self, frame: Frame) -> bool:
        globs = (self.file, f"*/{self.file}")
        matches_file = any(fnmatchcase(frame.filename, glob) for glob in globs)
        return matches_file and fnmatchcase(frame.name, self.function)


def suppressions(
    arguments: Iterable[str], *, origin: str = COMMAND_LINE
) -> tuple[Suppression, ...]:
    """Parse arguments of ``--suppress``: a pattern, or ``@FILE`` with a pattern per line and ``#`` comments.

    ``kernel:GLOB`` matches the demangled, the shortened or the mangled name of a kernel.
    ``site:FILE[:FUNCTION]`` matches any frame of a call stack; FILE may be the end of a path. Raises
    UsageError for an invalid pattern and InputError for an unreadable file.
    """
    return tuple(
        suppression
        for argument in arguments
        for suppression in (
            _patterns_in_file(argument[1:])
            if argument.startswith("@")
            else (parse_pattern(argument, origin=origin),)
        )
    )


def parse_pattern(pattern: str, *, origin: str = COMMAND_LINE) -> Suppression:
    """Parse one pattern. Raises UsageError, which names the origin, if the pattern is invalid."""
    kind, _, glob = pattern.partition(":")
    if kind == "kernel" and glob:
        return Suppression(pattern, origin, kernel=glob)
    file, _, function = glob.rpartition(":") if ":" in glob else (glob, "", "*")
    if kind == "site" and file and function:
        return Suppression(pattern, origin, file=file, function=function)
    raise UsageError(f"{origin}: {pattern!r} is not a suppression pattern", hint=_PATTERN_HINT)


def _patterns_in_file(name: str) -> Iterator[Suppression]:
    file_lines = read_text(Path(name), _SUPPRESSIONS_FILE, may_be_empty=True).splitlines()
    for line_number, line in enumerate(file_lines, start=1):
        pattern = _COMMENT.sub("", line).strip()
        if pattern:
            yield parse_pattern(pattern, origin=f"{name}:{line_number}")


def _kernel_names(side: Side) -> Iterator[str]:
    if side.kernel is not None and side.mangled is not None:
        yield from (side.kernel, side.mangled, short_kernel(side.kernel))
