"""Races that are not reported: those of a baseline (``cudakit.sanitize.baseline/1``), and of suppressions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import ClassVar

from cudakit.errors import InputError, UsageError
from cudakit.input_files import ExpectedFile, check_schema, read_json, read_text
from cudakit.sanitize.races import BaselineUse, FoundRace, KnownRace, KnownSide, Side
from cudakit.serialize import Mismatch, from_plain, to_plain
from cudakit.stacks import is_backward, is_library
from cudakit.trace.names import short_kernel

_BASELINE_FILE = ExpectedFile(
    "a baseline of races",
    "write a baseline with: cudakit run --sanitize --write-baseline races.json PROGRAM",
)


@dataclass(frozen=True, slots=True)
class Baseline:
    """The known races of a program."""

    schema: ClassVar[str] = "cudakit.sanitize.baseline/1"
    races: tuple[KnownRace, ...]


class BaselineMatcher:
    """Finds the races that a baseline has. ``root`` is the directory that its paths are relative to."""

    def __init__(self, path: str, baseline: Baseline, *, root: Path) -> None:
        self._path = path
        self._baseline = baseline
        self._races = frozenset(baseline.races)
        self._root = root

    def find(self, race: FoundRace) -> KnownRace | None:
        """Return the race of the baseline that equals a race of the run, or None."""
        known_race = identify(race, root=self._root)
        return known_race if known_race in self._races else None

    def use(self, occurred_races: Iterable[KnownRace], occurrence_count: int) -> BaselineUse:
        """Return the use of the baseline by a run in which these races of the baseline occurred."""
        races = tuple(sorted(set(occurred_races), key=_sort_key))
        return BaselineUse(self._path, races, occurrence_count, len(self._races) - len(races))


def identify(race: FoundRace, *, root: Path) -> KnownRace:
    """Return the properties of a race that are the same in other runs and checkouts.

    The properties are the kind of the race and, for each side, the operation and the functions of
    the program that led to the operation. Line numbers are left out, so that a change elsewhere in
    a file does not make a known race new.
    """
    return KnownRace(
        race.kind, _identify_side(race.current, root), _identify_side(race.previous, root)
    )


def _identify_side(side: Side, root: Path) -> KnownSide:
    program_frames = [frame for frame in side.stack if not is_library(frame.filename)]
    # A race without a frame of the program is identified by the frames of libraries.
    calls: list[str] = []
    for frame in program_frames or side.stack:
        path = Path(frame.filename)
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else frame.filename
        calls.append(f"{name}:{frame.name}")
    return KnownSide(side.operation, is_backward(side.stack), tuple(calls))


def load_baseline(path: str) -> Baseline:
    """Read a baseline. Raises InputError if the file is missing, damaged or of another version."""
    document = read_json(Path(path), _BASELINE_FILE)
    document = check_schema(path, document, Baseline.schema, _BASELINE_FILE)
    try:
        return from_plain(Baseline, document)
    except Mismatch as mismatch:
        raise InputError(f"{path} is damaged: {mismatch}", hint=_BASELINE_FILE.hint) from None


def format_baseline(
    races: Iterable[FoundRace], use: BaselineUse | None = None, *, root: Path
) -> str:
    """Return a baseline as JSON: the new races, and the races of an earlier baseline that occurred again.

    The order depends on the races alone, so that a file under version control changes only with the
    races.
    """
    known_races = {identify(race, root=root) for race in races} | set(use.races if use else ())
    baseline = Baseline(tuple(sorted(known_races, key=_sort_key)))
    return json.dumps(to_plain(baseline), indent=2, ensure_ascii=False) + "\n"


def _sort_key(race: KnownRace) -> tuple[object, ...]:
    sides = (race.current, race.previous)
    return (str(race.kind), *((side.calls, side.operation, side.is_backward) for side in sides))


# --- Parse and match suppressions: patterns of races that are not reported -------------------------

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
        if not self.kernel:
            return any(
                fnmatchcase(frame.filename, glob) and fnmatchcase(frame.name, self.function)
                for frame in side.stack
                for glob in (self.file, f"*/{self.file}")
            )
        if side.kernel is None or side.mangled is None:
            return False
        names = (side.kernel, side.mangled, short_kernel(side.kernel))
        return any(fnmatchcase(name, self.kernel) for name in names)


def suppressions(
    arguments: Iterable[str], *, origin: str = COMMAND_LINE
) -> tuple[Suppression, ...]:
    """Parse arguments of ``--suppress``: a pattern, or ``@FILE`` with a pattern per line and ``#`` comments.

    ``kernel:GLOB`` matches the demangled, the shortened or the mangled name of a kernel.
    ``site:FILE[:FUNCTION]`` matches any frame of a call stack; FILE may be the end of a path. Raises
    UsageError for an invalid pattern and InputError for an unreadable file.
    """
    parsed: list[Suppression] = []
    for argument in arguments:
        if not argument.startswith("@"):
            parsed.append(parse_pattern(argument, origin=origin))
            continue
        name = argument[1:]
        file_lines = read_text(Path(name), _SUPPRESSIONS_FILE, may_be_empty=True).splitlines()
        for line_number, line in enumerate(file_lines, start=1):
            if pattern := _COMMENT.sub("", line).strip():
                parsed.append(parse_pattern(pattern, origin=f"{name}:{line_number}"))
    return tuple(parsed)


def parse_pattern(pattern: str, *, origin: str = COMMAND_LINE) -> Suppression:
    """Parse one pattern. Raises UsageError, which names the origin, if the pattern is invalid."""
    kind, _, glob = pattern.partition(":")
    if kind == "kernel" and glob:
        return Suppression(pattern, origin, kernel=glob)
    file, _, function = glob.rpartition(":") if ":" in glob else (glob, "", "*")
    if kind == "site" and file and function:
        return Suppression(pattern, origin, file=file, function=function)
    raise UsageError(f"{origin}: {pattern!r} is not a suppression pattern", hint=_PATTERN_HINT)
