"""Races in plain text, for the message of an exception or of a failed test."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from cudakit.core.sanitize.result import FoundRace, Memory, SanitizeResult, Side
from cudakit.core.sanitize.stacks import is_own
from cudakit.core.sanitize.watch import counts
from cudakit.units import format_bytes

# Innermost frames of a stack: enough to find the place, few enough to be read.
_FRAMES = 4


def findings(result: SanitizeResult) -> tuple[FoundRace, ...]:
    """Return the races that count: all but those that are only possible."""
    return tuple(race for race in result.races if counts(race.confidence))


def message(races: Sequence[FoundRace]) -> str:
    """Write races one below the other, behind a line that counts them."""
    return "\n\n".join((headline(races), *map(_race, races)))


def headline(races: Sequence[FoundRace]) -> str:
    """Count races in a few words."""
    return f"{len(races)} race{'' if len(races) == 1 else 's'} between operations on the GPU"


def _race(race: FoundRace) -> str:
    times = f", {race.count} times" if race.count > 1 else ""
    lines = [f"{race.kind} ({race.confidence}{times}): {race.sentence}"]
    lines += _side("later", race.current) + _side("earlier", race.previous)
    if memory := race.memory:
        size = f"memory:  {format_bytes(memory.size_bytes)} at {memory.address:#x}"
        lines += _with_stack(size, memory)
    if race.last_sync:
        lines.append(f"  order:   {race.last_sync.sentence}")
    return "\n".join([*lines, f"  fix:     {race.hint}"])


def _side(when: str, side: Side) -> list[str]:
    return _with_stack(f"{when + ':':8} {side.operation} on {side.stream}", side)


def _with_stack(line: str, holder: Side | Memory) -> list[str]:
    """Write the program's own frames below a line, without those of what called the program."""
    own = tuple(takewhile(is_own, holder.stack[holder.site :])) or holder.stack[:1]
    places = (f"{frame.filename}:{frame.line} {frame.name}" for frame in own[:_FRAMES])
    return [f"  {line}", *(f"           {place}" for place in places)]
