"""Baselines: files of known races, which later runs do not report (``cudakit.sanitize.baseline/1``)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cudakit.errors import InputError
from cudakit.input_files import ExpectedFile, check_schema, read_json
from cudakit.sanitize.result import BaselineUse, FoundRace, KnownRace, KnownSide, Side
from cudakit.serialize import Mismatch, from_plain, to_plain
from cudakit.stacks import Frame, is_backward, is_library

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
    return KnownSide(
        side.operation,
        is_backward(side.stack),
        tuple(_location(frame, root) for frame in program_frames or side.stack),
    )


def _location(frame: Frame, root: Path) -> str:
    path = Path(frame.filename)
    name = path.relative_to(root).as_posix() if path.is_relative_to(root) else frame.filename
    return f"{name}:{frame.name}"


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
