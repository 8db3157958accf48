"""Suppressions: known races that are not reported."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from cudakit.core.sanitize.names import short_kernel
from cudakit.core.sanitize.result import Side
from cudakit.document import Frame
from cudakit.errors import UsageError

COMMAND_LINE = "--suppress"

_FORMS = "write kernel:GLOB or site:FILE[:FUNCTION], for example kernel:nccl* or site:loader.py"
_COMMENT = re.compile(r"(?:^|\s)#.*")


@dataclass(frozen=True, slots=True)
class Suppression:
    """A pattern that hides races, by a kernel or a stack frame of either side."""

    pattern: str
    origin: str
    kernel: str = ""  # glob
    file: str = ""  # glob of a path, or of its end
    function: str = "*"  # glob

    def covers(self, *sides: Side) -> bool:
        """Return whether the pattern hides a race between these sides."""
        return any(self._covers(side) for side in sides)

    def _covers(self, side: Side) -> bool:
        if self.kernel:
            return any(fnmatchcase(name, self.kernel) for name in _kernel_names(side))
        return any(self._is_at(frame) for frame in side.stack)

    def _is_at(self, frame: Frame) -> bool:
        in_file = any(fnmatchcase(frame.filename, glob) for glob in (self.file, f"*/{self.file}"))
        return in_file and fnmatchcase(frame.name, self.function)


def suppressions(arguments: Iterable[str]) -> tuple[Suppression, ...]:
    """Parse suppressions from the command line: one pattern each, or ``@FILE`` with one per line.

    ``kernel:GLOB`` means the whole readable name of a kernel, its short or its mangled one.
    ``site:FILE[:FUNCTION]`` means a frame of a stack; FILE may be the end of a path. In a file, what
    follows a ``#`` is a comment. Raises UsageError for an invalid pattern or an unreadable file.
    """
    return tuple(
        suppression
        for argument in arguments
        for suppression in (
            _in_file(argument[1:]) if argument.startswith("@") else (parse(argument),)
        )
    )


def parse(pattern: str, *, origin: str = COMMAND_LINE) -> Suppression:
    """Parse one pattern. Raises UsageError, which names the origin."""
    kind, _, rest = pattern.partition(":")
    if kind == "kernel" and rest:
        return Suppression(pattern, origin, kernel=rest)
    file, _, function = rest.rpartition(":") if ":" in rest else (rest, "", "*")
    if kind == "site" and file and function:
        return Suppression(pattern, origin, file=file, function=function)
    raise UsageError(f"{origin}: {pattern!r} is not a suppression", hint=_FORMS)


def _in_file(name: str) -> Iterator[Suppression]:
    try:
        lines = Path(name).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise UsageError(
            f"cannot read the suppressions in {name}: {reason}", hint="name a file of patterns"
        ) from error
    for number, line in enumerate(lines, start=1):
        pattern = _COMMENT.sub("", line).strip()
        if pattern:
            yield parse(pattern, origin=f"{name}:{number}")


def _kernel_names(side: Side) -> Iterator[str]:
    if side.kernel is not None and side.mangled is not None:
        yield from (side.kernel, side.mangled, short_kernel(side.kernel))
