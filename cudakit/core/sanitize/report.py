"""Collect the races of all processes of a program, each once, as the result and as plain text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Protocol, TypeAlias

from cudakit.core.sanitize.hints import fix, remedies, sentence, why_not_covered
from cudakit.core.sanitize.names import (
    Demangle,
    call_site,
    call_site_index,
    is_program_frame,
    short_kernel,
    stream_name,
)
from cudakit.core.sanitize.races import Allocation, Confidence, Coverage, Operation, Race, Sync
from cudakit.core.sanitize.result import (
    FoundRace,
    LastSync,
    Memory,
    Process,
    SanitizeResult,
    Side,
    Suppressed,
)
from cudakit.core.sanitize.suppressions import Suppression
from cudakit.document import Frame
from cudakit.trace.kinds import AccessMode, EventKind, StreamFlag
from cudakit.trace.trace_file import Stack
from cudakit.units import format_bytes

_OPERATIONS = {
    EventKind.COPY: "copy",
    EventKind.FILL: "fill",
    EventKind.ALLOC: "allocation",
    EventKind.FREE: "free",
}


class Stacks(Protocol):
    """Returns the frames of a stack by its number, innermost first."""

    def __call__(self, number: int, /) -> tuple[Frame, ...]: ...


@dataclass(frozen=True, slots=True)
class RaceDecoder:
    """Decodes the races of one process: numbers of the trace become names, call stacks and sentences."""

    process: int
    stacks: Stacks
    streams: Mapping[int, StreamFlag]
    demangle: Demangle

    def decode(self, race: Race) -> FoundRace:
        """Return a race as in the report, with a count of one."""
        current, previous = self.side(race.current), self.side(race.previous)
        memory = self._memory(race.allocation)
        size_bytes = race.hi - race.lo
        return FoundRace(
            kind=race.kind,
            confidence=race.confidence,
            sentence=sentence(race.kind, current, previous, size_bytes),
            address=race.lo,
            size_bytes=size_bytes,
            offset_bytes=race.lo - memory.address if memory else None,
            count=1,
            current=current,
            previous=previous,
            hint=fix(race.kind, current, previous),
            remedies=remedies(race.kind, current, previous, memory.stack if memory else ()),
            memory=memory,
            last_sync=self._last_sync(race.last_sync, current, previous),
            approximate=race.approximate,
            process=self.process,
        )

    def side(self, operation: Operation) -> Side:
        """Return an operation as a side of a race."""
        stack = self.stacks(operation.site)
        kernel = self.demangle(operation.name) if operation.kind is EventKind.LAUNCH else None
        return Side(
            stream=stream_name(operation.stream, self.streams.get(operation.stream)),
            operation=_operation(operation.kind, kernel),
            stack=stack,
            site=call_site_index(stack),
            stream_number=operation.stream,
            device=operation.device,
            context=operation.context,
            thread=operation.thread,
            seq=operation.seq,
            kernel=kernel,
            mangled=None if kernel is None else operation.name,
            reads=AccessMode.READ in operation.mode,
            writes=AccessMode.WRITE in operation.mode,
            atomic=AccessMode.ATOMIC in operation.mode,
            known=operation.precision,
            address=operation.lo,
            size_bytes=operation.hi - operation.lo,
            graph=operation.graph,
            node=operation.node,
        )

    def _memory(self, allocation: Allocation | None) -> Memory | None:
        if allocation is None:
            return None
        stack = self.stacks(allocation.site)
        return Memory(
            address=allocation.address,
            size_bytes=allocation.size_bytes,
            how=allocation.how,
            seq=allocation.seq,
            stack=stack,
            site=call_site_index(stack),
        )

    def _last_sync(self, sync: Sync | None, current: Side, previous: Side) -> LastSync | None:
        if sync is None:
            return None
        recorded, waited = self.stacks(sync.recorded_site), self.stacks(sync.waited_site)
        return LastSync(
            kind=sync.kind,
            sentence=why_not_covered(
                sync.kind, current, previous, call_site(recorded), call_site(waited)
            ),
            recorded_seq=sync.recorded_seq,
            recorded_stack=recorded,
            recorded_site=call_site_index(recorded),
            waited_seq=sync.waited_seq,
            waited_stack=waited,
            waited_site=call_site_index(waited),
        )


def _operation(kind: EventKind, kernel: str | None) -> str:
    if kernel is None:
        return _OPERATIONS.get(kind, kind.name.lower().replace("_", " "))
    return f"kernel {short_kernel(kernel)}" if kernel else "a kernel without a name"


_Frames: TypeAlias = tuple[Frame, ...]
_Key: TypeAlias = tuple[object, ...]

_BY_CONFIDENCE = tuple(Confidence)  # certain, likely, possible


class Report:
    """The races found so far, each with its count.

    Races with the same kind, operations and call stacks are one race, also in different processes. Races with
    less confidence than ``show`` are only counted.
    """

    def __init__(
        self,
        *,
        show: Confidence = Confidence.LIKELY,
        suppressions: Sequence[Suppression] = (),
        demangle: Demangle = str,
    ) -> None:
        self._shown = _BY_CONFIDENCE[: _BY_CONFIDENCE.index(show) + 1]
        self._suppressions = suppressions
        self._demangle = demangle
        self._found: dict[_Key, FoundRace] = {}
        self._suppressed: dict[_Key, int] = {}  # index of the suppression
        self._counts: Counter[_Key] = Counter()
        self._found_in: Counter[int] = Counter()  # by process
        self._hidden = 0
        self._frames: dict[tuple[int, int, int], _Frames] = {}  # by trace and number of the stack
        self._stacks: dict[_Frames, _Frames] = {}  # interned

    def add(
        self,
        process: int,
        races: Iterable[Race],
        *,
        stacks: Sequence[Stack],
        streams: Mapping[int, StreamFlag],
        chain: int = 0,
    ) -> int:
        """Add the races of one trace; return the number of those neither hidden nor suppressed.

        ``stacks`` is the stack table of the trace, ``streams`` has its streams; ``chain`` is the number of
        the trace within the process.
        """
        stack = partial(self._stack, (process, chain), stacks)
        decoder = RaceDecoder(process, stack, streams, self._demangle)
        return sum(self._add(decoder, race) for race in races)

    def result(
        self,
        *,
        exit_status: int | None,
        coverage: Mapping[int, Coverage],
        gaps: Iterable[Mapping[str, int]] = (),
        simulated: bool = False,
        stopped: bool = False,
        notes: Sequence[str] = (),
        incomplete: Sequence[str] = (),
        no_gpu_work: str | None = None,
    ) -> SanitizeResult:
        """Return the result; ``coverage`` has one entry per process, ``gaps`` any number."""
        whole = sum(coverage.values(), Coverage())
        return SanitizeResult(
            exit_status=exit_status,
            simulated=simulated,
            stopped=stopped,
            races=tuple(sorted(self._counted(), key=_order)),
            coverage=replace(whole, suspected=whole.suspected + self._hidden),
            gaps=dict(sum(map(Counter, gaps), Counter[str]()).most_common()),
            suppressed=tuple(self._suppressed_counts()),
            processes=tuple(
                Process(process, coverage[process].launches, self._found_in[process])
                for process in sorted(coverage)
            ),
            notes=tuple(notes),
            incomplete=tuple(incomplete),
            no_gpu_work=no_gpu_work,
        )

    def _add(self, decoder: RaceDecoder, race: Race) -> bool:
        if race.confidence not in self._shown:
            self._hidden += 1
            return False
        key = self._key(decoder, race)
        if key not in self._counts:
            self._add_new(key, decoder.decode(race))
        self._counts[key] += 1
        if key in self._suppressed:
            return False
        self._found_in[decoder.process] += 1
        if _is_better_example(race, self._found[key]):
            self._found[key] = decoder.decode(race)
        return True

    def _add_new(self, key: _Key, reported: FoundRace) -> None:
        for number, suppression in enumerate(self._suppressions):
            if suppression.covers(reported.current, reported.previous):
                self._suppressed[key] = number
                return
        self._found[key] = reported

    def _key(self, decoder: RaceDecoder, race: Race) -> _Key:
        sides = (race.current, race.previous)
        return (race.kind, *(part for side in sides for part in self._identity(decoder, side)))

    def _identity(self, decoder: RaceDecoder, operation: Operation) -> tuple[object, ...]:
        # Equal stacks are one object, so their identity replaces a comparison of all frames.
        return operation.kind, operation.name, id(decoder.stacks(operation.site))

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
        return (replace(reported, count=self._counts[key]) for key, reported in self._found.items())

    def _suppressed_counts(self) -> Iterable[Suppressed]:
        for number, suppression in enumerate(self._suppressions):
            hidden = [self._counts[key] for key, by in self._suppressed.items() if by == number]
            yield Suppressed(suppression.pattern, suppression.origin, len(hidden), sum(hidden))


def _order(reported: FoundRace) -> tuple[int, ...]:
    """Return the position of a race in the report, which does not depend on addresses."""
    memory = (reported.memory.seq, reported.offset_bytes or 0) if reported.memory else (0, 0)
    return _confidence_rank(reported), reported.current.seq, reported.previous.seq, *memory


def _is_better_example(race: Race, reported: FoundRace) -> bool:
    """Return whether to report a race instead of an earlier one between the same call sites.

    It is if it is more certain. Among several that one operation causes, the order of their addresses, which
    differs between runs, must not decide: the first allocation does.
    """
    rank = _BY_CONFIDENCE.index(race.confidence)
    if rank != _confidence_rank(reported) or not (race.allocation and reported.memory):
        return rank < _confidence_rank(reported)
    if race.current.seq != reported.current.seq:
        return False
    allocation = race.allocation
    memory = allocation.seq, race.lo - allocation.address
    return (race.previous.seq, *memory) < _order(reported)[2:]


def _confidence_rank(reported: FoundRace) -> int:
    return _BY_CONFIDENCE.index(reported.confidence)


_FRAMES = 4  # frames shown in plain text, from the call site outwards


def findings(result: SanitizeResult) -> tuple[FoundRace, ...]:
    """Return the races that are findings: certain and likely ones."""
    return tuple(race for race in result.races if race.confidence.is_finding)


def message(races: Sequence[FoundRace]) -> str:
    """Return races as plain text, below a line with their number."""
    return "\n\n".join((headline(races), *map(_race, races)))


def headline(races: Sequence[FoundRace]) -> str:
    """Return the line with the number of races."""
    return f"{len(races)} race{'' if len(races) == 1 else 's'} between operations on the GPU"


def _race(race: FoundRace) -> str:
    times = f", {race.count} times" if race.count > 1 else ""
    lines = [f"{race.kind} ({race.confidence}{times}): {race.sentence}"]
    lines += _side("later", race.current) + _side("earlier", race.previous)
    if memory := race.memory:
        size, whole = format_bytes(race.size_bytes), format_bytes(memory.size_bytes)
        place = f"memory:  {size} at offset {race.offset_bytes or 0:,} B of {whole}"
        lines += _with_stack(place, memory)
    if race.last_sync:
        lines.append(f"  sync:    {race.last_sync.sentence}")
    return "\n".join([*lines, f"  fix:     {race.hint}"])


def _side(when: str, side: Side) -> list[str]:
    return _with_stack(f"{when + ':':8} {side.operation} on {side.stream}", side)


def _with_stack(line: str, holder: Side | Memory) -> list[str]:
    """Return a line followed by the frames of the program, from the call site to the first library frame."""
    own = tuple(takewhile(is_program_frame, holder.stack[holder.site :])) or holder.stack[:1]
    places = (f"{frame.filename}:{frame.line} {frame.name}" for frame in own[:_FRAMES])
    return [f"  {line}", *(f"           {place}" for place in places)]
