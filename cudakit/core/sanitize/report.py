"""Collects the races of all processes of a program, each once, into the Result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from cudakit.core.sanitize.names import Demangle
from cudakit.core.sanitize.races import Confidence, Coverage, Operation, Race
from cudakit.core.sanitize.reader import Reader
from cudakit.core.sanitize.result import FoundRace, Process, SanitizeResult, Suppressed
from cudakit.core.sanitize.suppress import Suppression
from cudakit.document import Frame
from cudakit.trace.kinds import StreamFlag
from cudakit.trace.log import Stack

_Frames: TypeAlias = tuple[Frame, ...]
_Key: TypeAlias = tuple[object, ...]

_SUREST_FIRST = tuple(Confidence)


class Report:
    """The races found so far, each with how often it was found.

    Two races are one when their kinds, their operations and the stacks that enqueued these are the same,
    in whatever process. What is less sure than ``show`` is only counted.
    """

    def __init__(
        self,
        *,
        show: Confidence = Confidence.LIKELY,
        suppressions: Sequence[Suppression] = (),
        demangle: Demangle = str,
    ) -> None:
        self._shown = _SUREST_FIRST[: _SUREST_FIRST.index(show) + 1]
        self._suppressions = suppressions
        self._demangle = demangle
        self._found: dict[_Key, FoundRace] = {}
        self._suppressed: dict[_Key, int] = {}  # the number of the suppression
        self._counts: Counter[_Key] = Counter()
        self._found_in: Counter[int] = Counter()  # by process
        self._hidden = 0
        self._frames: dict[tuple[int, int, int], _Frames] = {}  # by trace and number of the stack
        self._stacks: dict[_Frames, _Frames] = {}  # each once

    def add(
        self,
        process: int,
        races: Iterable[Race],
        *,
        stacks: Sequence[Stack],
        streams: Mapping[int, StreamFlag],
        chain: int = 0,
    ) -> int:
        """Take what the engine found in a process; return how many are neither hidden nor suppressed.

        ``stacks`` is the table of stacks of the trace, the ``chain``-th of the process, and ``streams``
        says what its streams are.
        """
        stack = partial(self._stack, (process, chain), stacks)
        reader = Reader(process, stack, streams, self._demangle)
        return sum(self._take(reader, race) for race in races)

    def result(
        self,
        *,
        exit_status: int | None,
        coverage: Mapping[int, Coverage],
        gaps: Iterable[Mapping[str, int]] = (),
        simulated: bool = False,
        stopped: bool = False,
        notes: Sequence[str] = (),
    ) -> SanitizeResult:
        """Make the Result; ``coverage`` is by process, ``gaps`` of any number of them."""
        whole = sum(coverage.values(), Coverage())
        return SanitizeResult(
            exit_status=exit_status,
            simulated=simulated,
            stopped=stopped,
            races=tuple(sorted(self._counted(), key=_doubt)),
            coverage=replace(whole, suspected=whole.suspected + self._hidden),
            gaps=dict(sum(map(Counter, gaps), Counter[str]()).most_common()),
            suppressed=tuple(self._uses()),
            processes=tuple(
                Process(process, coverage[process].launches, self._found_in[process])
                for process in sorted(coverage)
            ),
            notes=tuple(notes),
        )

    def _take(self, reader: Reader, race: Race) -> bool:
        if race.confidence not in self._shown:
            self._hidden += 1
            return False
        key = self._key(reader, race)
        if key not in self._counts:
            self._meet(key, reader.found(race))
        self._counts[key] += 1
        if key in self._suppressed:
            return False
        self._found_in[reader.process] += 1
        if _SUREST_FIRST.index(race.confidence) < _doubt(self._found[key]):
            self._found[key] = reader.found(race)
        return True

    def _meet(self, key: _Key, found: FoundRace) -> None:
        for number, suppression in enumerate(self._suppressions):
            if suppression.covers(found.current, found.previous):
                self._suppressed[key] = number
                return
        self._found[key] = found

    def _key(self, reader: Reader, race: Race) -> _Key:
        sides = (race.current, race.previous)
        return (race.kind, *(part for side in sides for part in self._identity(reader, side)))

    def _identity(self, reader: Reader, operation: Operation) -> tuple[object, ...]:
        # Interned stacks are the same object: to tell them apart costs no walk along their frames.
        return operation.kind, operation.name, id(reader.stacks(operation.site))

    def _stack(self, trace: tuple[int, int], stacks: Sequence[Stack], number: int) -> _Frames:
        if not 0 <= number < len(stacks):
            return ()
        known = self._frames.get((*trace, number))
        if known is None:
            known = self._frames[(*trace, number)] = self._interned(stacks[number])
        return known

    def _interned(self, stack: Stack) -> _Frames:
        frames = tuple(Frame(frame.function, frame.file, frame.line) for frame in stack)
        return self._stacks.setdefault(frames, frames)

    def _counted(self) -> Iterable[FoundRace]:
        return (replace(found, count=self._counts[key]) for key, found in self._found.items())

    def _uses(self) -> Iterable[Suppressed]:
        for number, suppression in enumerate(self._suppressions):
            hidden = [self._counts[key] for key, by in self._suppressed.items() if by == number]
            yield Suppressed(suppression.pattern, suppression.origin, len(hidden), sum(hidden))


def _doubt(found: FoundRace) -> int:
    return _SUREST_FIRST.index(found.confidence)
