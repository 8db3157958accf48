"""Collect the races of all processes: count each race once, replace its numbers by names, and say its fix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import TypeAlias

from cudakit.sanitize.baseline import BaselineMatcher, Suppression
from cudakit.sanitize.hints import (
    Demangle,
    RacingStreams,
    advice_on_library,
    call_site,
    collective_name,
    in_range,
    is_wait,
    race_sentence,
    remedies,
    smallest_fix,
    stream_name,
    why_not_covered,
)
from cudakit.sanitize.owners import RaceOwnership, StreamUse, known_issue
from cudakit.sanitize.races import (
    Allocation,
    Confidence,
    Coverage,
    DifferentCalls,
    FoundRace,
    KnownRace,
    LastSync,
    Memory,
    Operation,
    Process,
    Race,
    RaceOwner,
    SanitizeResult,
    Side,
    Suppressed,
    Sync,
    UnverifiedPair,
)
from cudakit.stacks import Stack, call_site_index, is_library
from cudakit.trace.kinds import AccessMode, EventKind, Precision, StreamFlag
from cudakit.trace.names import short_kernel
from cudakit.units import format_bytes

_Key: TypeAlias = tuple[object, ...]

_CONFIDENCE_ORDER = tuple(Confidence)  # certain, likely, possible


class RaceCollector:
    """Collects the races of all processes, and counts their occurrences.

    Races with the same kind, operations and call stacks are one race, also in different processes. Races with
    less confidence than ``min_confidence`` are counted, but not reported. With ``counts_library_races``,
    races of libraries are findings, too.
    """

    def __init__(
        self,
        *,
        min_confidence: Confidence = Confidence.LIKELY,
        suppressions: Sequence[Suppression] = (),
        baseline: BaselineMatcher | None = None,
        counts_library_races: bool = False,
        demangle: Demangle = str,
    ) -> None:
        self._shown_confidences = _CONFIDENCE_ORDER[: _CONFIDENCE_ORDER.index(min_confidence) + 1]
        self._suppressions = suppressions
        self._baseline = baseline
        self._counts_library_races = counts_library_races
        self._demangle = demangle
        self._races: dict[_Key, _Occurrences] = {}
        self._suppression_indices: dict[_Key, int] = {}  # the suppression of each suppressed race
        self._known_races: dict[_Key, KnownRace] = {}  # races that the baseline has
        self._occurrence_counts: Counter[_Key] = Counter()
        self._occurrences_by_process: Counter[int] = Counter()
        # By the identities of both operations.
        self._unverified_pairs: dict[_Key, UnverifiedPair] = {}
        self._hidden_count = 0  # number of occurrences with less confidence than is shown
        # The call stacks by PID, trace number and index in the stack table; equal stacks are one object.
        self._stacks: dict[tuple[int, int, int], Stack] = {}
        self._interned_stacks: dict[Stack, Stack] = {}

    def add(
        self,
        process: int,
        races: Iterable[Race],
        unverified: Iterable[Race] = (),
        *,
        stacks: Sequence[Stack],
        flag_by_stream: Mapping[int, StreamFlag],
        trace_number: int = 0,
        stream_use: StreamUse | None = None,
    ) -> int:
        """Add the races of one trace; return the number of races that are reported.

        ``unverified`` are races with possible accesses of launches that were not recorded. ``stacks`` is the
        stack table of the trace, ``flag_by_stream`` has the flags of its streams by stream number,
        ``stream_use`` shows which of these streams only libraries use. ``trace_number`` is the number of the
        trace within the process.
        """
        stack_of = partial(self._stack, (process, trace_number), stacks)
        stream_use = stream_use or StreamUse()
        decoder = RaceDecoder(process, stack_of, flag_by_stream, self._demangle, stream_use)
        for race in unverified:
            self._add_unverified(decoder, race)
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
        different_calls: tuple[DifferentCalls, ...] = (),
        ranks: Mapping[int, int] | None = None,
    ) -> SanitizeResult:
        """Return the result. The keys of the mappings are PIDs; ``gaps`` are the counts of each trace."""
        counts = self._occurrence_counts
        races = (occurrences.found_race(counts[key]) for key, occurrences in self._races.items())
        total_coverage = sum(coverage.values(), Coverage(suspected=self._hidden_count))
        suppressed_keys: dict[int, list[_Key]] = {}
        for key, index in self._suppression_indices.items():
            suppressed_keys.setdefault(index, []).append(key)
        suppressed = (
            Suppressed(
                suppression.pattern, suppression.origin, len(keys), sum(counts[key] for key in keys)
            )
            for index, suppression in enumerate(self._suppressions)
            for keys in (suppressed_keys.get(index, []),)
        )
        baseline_use = None
        if self._baseline:
            known_count = sum(counts[key] for key in self._known_races)
            baseline_use = self._baseline.use(self._known_races.values(), known_count)
        racing_sides = {tuple(sides) for _, *sides in counts}
        return SanitizeResult(
            exit_status=exit_status,
            simulated=simulated,
            stopped=stopped,
            races=tuple(sorted(races, key=_sort_key)),
            coverage=total_coverage,
            gaps=dict(sum(map(Counter, gaps), Counter[str]()).most_common()),
            suppressed=tuple(suppressed),
            processes=tuple(
                Process(
                    process,
                    coverage[process].launches,
                    self._occurrences_by_process[process],
                    (ranks or {}).get(process),
                )
                for process in sorted(coverage)
            ),
            notes=tuple(notes),
            incomplete=tuple(incomplete),
            no_gpu_work=no_gpu_work,
            baseline=baseline_use,
            internal=self._counts_library_races,
            different_calls=different_calls,
            unverified=tuple(
                pair for sides, pair in self._unverified_pairs.items() if sides not in racing_sides
            ),
        )

    def _add(self, decoder: RaceDecoder, race: Race) -> bool:
        """Count a race, and store it if it is new. Return whether it is reported."""
        if race.confidence not in self._shown_confidences:
            self._hidden_count += 1
            return False
        key = (race.kind, *_identities(decoder, race))
        if key not in self._occurrence_counts:
            found_race = decoder.decode(race)
            if self._baseline and (known_race := self._baseline.find(found_race)):
                self._known_races[key] = known_race
            elif (index := self._covering(found_race.current, found_race.previous)) is not None:
                self._suppression_indices[key] = index
            else:
                ownership = RaceOwnership(found_race.current.stack, found_race.previous.stack)
                self._races[key] = _Occurrences(found_race, decoder, ownership)
        self._occurrence_counts[key] += 1
        if key not in self._races:
            return False
        self._occurrences_by_process[decoder.process] += 1
        self._races[key].add(race, decoder)
        return True

    def _add_unverified(self, decoder: RaceDecoder, race: Race) -> None:
        """Add a pair of operations. Suppressed pairs, and pairs inside libraries, are not findings."""
        current, previous = decoder.side(race.current), decoder.side(race.previous)
        ownership = RaceOwnership(current.stack, previous.stack)
        ownership.add(race, decoder.stream_use)
        is_counted = self._counts_library_races or ownership.owner is RaceOwner.PROGRAM
        if not is_counted or self._covering(current, previous) is not None:
            return
        unrecorded_side = "later" if race.current.precision >= Precision.ASSUMED else "earlier"
        sentence = (
            f"{current.operation_name} on {current.stream} is not ordered after {previous.operation_name} on "
            f"{previous.stream} and may access the same bytes: the accesses of the {unrecorded_side} launch "
            "were not recorded, but taken from another launch of the same kernel"
        )
        hint = "rerun with --accesses exact, which records the accesses of every launch"
        pair = UnverifiedPair(sentence, current, previous, decoder.process, hint)
        self._unverified_pairs.setdefault(_identities(decoder, race), pair)

    def _covering(self, current: Side, previous: Side) -> int | None:
        """Return the index of the first suppression that covers a race between these sides, or None."""
        covers = (suppression.covers(current, previous) for suppression in self._suppressions)
        return next((index for index, is_covered in enumerate(covers) if is_covered), None)

    def _stack(self, trace_id: tuple[int, int], stacks: Sequence[Stack], stack_index: int) -> Stack:
        """Return a call stack; ``trace_id`` is a PID and a trace number."""
        if not 0 <= stack_index < len(stacks):
            return ()
        key = (*trace_id, stack_index)
        if key not in self._stacks:
            stack = stacks[stack_index]
            self._stacks[key] = self._interned_stacks.setdefault(stack, stack)
        return self._stacks[key]


def _identities(decoder: RaceDecoder, race: Race) -> _Key:
    """Return the properties of both operations that are equal in all occurrences of a race.

    Equal stacks are one object, so ids are compared instead of frames. The name of a collective's kernel is
    not compared, because it depends on the size of the buffers.
    """
    return tuple(
        identity
        for side in (race.current, race.previous)
        for identity in (
            side.kind,
            side.collective.function if side.collective else side.name,
            id(decoder.stacks(side.site)),
        )
    )


@dataclass(slots=True)
class _Occurrences:
    """The occurrences of one race."""

    example: FoundRace
    decoder: RaceDecoder  # decoder of the example
    ownership: RaceOwnership
    # By PID: the streams of the earlier and of the later operations, each with its device.
    streams_by_process: dict[int, tuple[dict[int, int], dict[int, int]]] = field(
        default_factory=dict
    )

    def add(self, race: Race, decoder: RaceDecoder) -> None:
        """Add an occurrence of the race, which replaces the example if it is the better example."""
        earlier_streams, later_streams = self.streams_by_process.setdefault(
            decoder.process, ({}, {})
        )
        earlier_streams[race.previous.stream] = race.previous.device
        later_streams[race.current.stream] = race.current.device
        is_of_program = self.ownership.add(race, decoder.stream_use)
        if is_of_program or _is_better_example(race, self.example):
            self.example, self.decoder = decoder.decode(race), decoder

    def found_race(self, occurrence_count: int) -> FoundRace:
        """Return the race as the report shows it, with all its streams and processes."""
        race = replace(
            self.example, count=occurrence_count, processes=tuple(sorted(self.streams_by_process))
        )
        if self.ownership.owner is RaceOwner.LIBRARY:
            return replace(
                race,
                owner=RaceOwner.LIBRARY,
                library=self.ownership.library,
                hint=advice_on_library(self.ownership.library),
                hint_checked=False,
                remedies=(),
            )
        return self.decoder.with_streams(race, *self.streams_by_process[race.process])


def _sort_key(race: FoundRace) -> tuple[int, ...]:
    """Return the sort key of a race. It does not depend on addresses, because they differ between runs."""
    location = (race.memory.seq, race.offset_bytes or 0) if race.memory else (0, 0)
    return (
        race.owner is RaceOwner.LIBRARY,
        _CONFIDENCE_ORDER.index(race.confidence),
        race.current.seq,
        race.previous.seq,
        *location,
    )


def _is_better_example(race: Race, found_race: FoundRace) -> bool:
    """Return whether to report a race instead of an earlier race between the same call sites.

    A more certain race is better. Among the races of one operation, the race on the earliest allocation is
    better, because the order of the addresses differs between runs.
    """
    rank, found_rank = map(_CONFIDENCE_ORDER.index, (race.confidence, found_race.confidence))
    if rank != found_rank or not (race.allocation and found_race.memory):
        return rank < found_rank
    if race.current.seq != found_race.current.seq:
        return False
    location = race.allocation.seq, race.lo - race.allocation.address
    return (race.previous.seq, *location) < _sort_key(found_race)[3:]


_MAX_FRAMES = 4  # maximum number of frames that plain text shows, from the call site outwards


def findings(result: SanitizeResult) -> tuple[FoundRace, ...]:
    """Return the races that are findings: certain and likely races of the program.

    With ``--internal``, races of libraries are findings, too.
    """
    return tuple(
        race for race in result.races if race.confidence.is_finding and result.is_counted(race)
    )


def message(races: Sequence[FoundRace]) -> str:
    """Return races as plain text, after a line with the number of races."""
    headline = f"{len(races)} race{'' if len(races) == 1 else 's'} between operations on the GPU"
    return "\n\n".join((headline, *map(_race_text, races)))


def _race_text(race: FoundRace) -> str:
    occurrences_text = f", {race.count} times" if race.count > 1 else ""
    lines = [f"{race.kind} ({race.confidence}{occurrences_text}): {race.sentence}"]
    for label, side in (("later:", race.current), ("earlier:", race.previous)):
        operation = f"{side.operation_name} on {side.stream}{in_range(side.ranges)}"
        lines += _with_stack(f"{label:8} {operation}", side)
    if memory := race.memory:
        place = f"offset {race.offset_bytes or 0:,} B of {format_bytes(memory.size_bytes)}"
        lines += _with_stack(f"memory:  {format_bytes(race.size_bytes)} at {place}", memory)
    if race.last_sync:
        lines.append(f"  sync:    {race.last_sync.sentence}")
    if issue := race.known_issue:
        lines.append(f"  known:   {issue.title} ({issue.reference})")
    return "\n".join([*lines, f"  fix:     {issue.advice if issue else race.hint}"])


def _with_stack(first_line: str, source: Side | Memory) -> list[str]:
    """Return a line followed by the frames of the program, from the call site to the first library frame."""
    program_frames = tuple(
        takewhile(lambda frame: not is_library(frame.filename), source.stack[source.site :])
    )
    frames = program_frames or source.stack[:1]
    locations = (f"{frame.filename}:{frame.line} {frame.name}" for frame in frames[:_MAX_FRAMES])
    return [f"  {first_line}", *(f"           {location}" for location in locations)]


# --- Decode races: replace the numbers of a trace by names, call stacks and sentences --------------

_OPERATION_NAMES = {
    EventKind.COPY: "copy",
    EventKind.FILL: "fill",
    EventKind.ALLOC: "allocation",
    EventKind.FREE: "free",
}


@dataclass(frozen=True, slots=True)
class RaceDecoder:
    """Decodes the races of one process: replaces numbers of the trace by names, call stacks and sentences."""

    process: int
    stacks: Callable[[int], Stack]  # returns a call stack by its number
    flag_by_stream: Mapping[int, StreamFlag]
    demangle: Demangle
    stream_use: StreamUse = field(default_factory=StreamUse)

    def decode(self, race: Race) -> FoundRace:
        """Return a race in the form of the report, with one occurrence."""
        current_side, previous_side = self.side(race.current), self.side(race.previous)
        memory = self._memory(race.allocation) if race.allocation else None
        last_sync = None
        if race.last_sync:
            last_sync = self._last_sync(race.last_sync, current_side, previous_side)
        size_bytes = race.hi - race.lo
        return FoundRace(
            kind=race.kind,
            confidence=race.confidence,
            sentence=race_sentence(race.kind, current_side, previous_side, size_bytes),
            address=race.lo,
            size_bytes=size_bytes,
            offset_bytes=race.lo - memory.address if memory else None,
            count=1,
            current=current_side,
            previous=previous_side,
            hint=smallest_fix(race.kind, current_side, previous_side),
            hint_checked=is_wait(race.kind, previous_side),
            remedies=remedies(
                race.kind, current_side, previous_side, memory.stack if memory else ()
            ),
            memory=memory,
            last_sync=last_sync,
            approximate=race.is_approximate,
            process=self.process,
            known_issue=known_issue(current_side, previous_side),
        )

    def with_streams(
        self, race: FoundRace, earlier_streams: Mapping[int, int], later_streams: Mapping[int, int]
    ) -> FoundRace:
        """Return a race with a fix that names the streams of all its occurrences in the process.

        ``earlier_streams`` and ``later_streams`` have the device of each stream.
        """
        device_by_stream = {**earlier_streams, **later_streams}
        names = {stream: self._stream_name(stream) for stream in device_by_stream}
        if len(set(device_by_stream.values())) > 1:  # equal names get the device of their stream
            counts = Counter(names.values())
            names = {
                stream: name if counts[name] == 1 else f"{name} of cuda:{device_by_stream[stream]}"
                for stream, name in names.items()
            }
        unreachable_names = (
            self._stream_name(stream)
            for stream in sorted(device_by_stream)
            if not self.stream_use.is_reachable(stream)
        )
        streams = RacingStreams(
            earlier_names=tuple(names[stream] for stream in sorted(earlier_streams)),
            later_names=tuple(names[stream] for stream in sorted(later_streams)),
            unreachable_name=next(unreachable_names, ""),
        )
        sides = race.kind, race.current, race.previous
        allocation_stack = race.memory.stack if race.memory else ()
        return replace(
            race,
            hint=smallest_fix(*sides, streams),
            remedies=remedies(*sides, allocation_stack, streams),
        )

    def _stream_name(self, stream: int) -> str:
        """Return the name of a stream without its properties."""
        return stream_name(stream, self.flag_by_stream.get(stream)).partition(" (")[0]

    def side(self, operation: Operation) -> Side:
        """Return an operation as a side of a race."""
        stack = self.stacks(operation.site)
        launch_stack = self.stacks(operation.launch_site) if operation.launch_site else ()
        has_kernel = operation.kind in (EventKind.LAUNCH, EventKind.COLLECTIVE)
        kernel = self.demangle(operation.name) if has_kernel else None
        return Side(
            stream=stream_name(operation.stream, self.flag_by_stream.get(operation.stream)),
            operation=_operation_text(operation, kernel),
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
            ranges=operation.ranges,
            from_template=operation.from_template,
            collective=operation.collective,
            accessed_bytes=operation.accessed_bytes,
            launch_stack=launch_stack,
            launch_site=call_site_index(launch_stack),
        )

    def _memory(self, allocation: Allocation) -> Memory:
        stack = self.stacks(allocation.site)
        return Memory(
            address=allocation.address,
            size_bytes=allocation.size_bytes,
            how=allocation.kind,
            seq=allocation.seq,
            stack=stack,
            site=call_site_index(stack),
        )

    def _last_sync(self, sync: Sync, current_side: Side, previous_side: Side) -> LastSync:
        record_stack, wait_stack = self.stacks(sync.recorded_site), self.stacks(sync.waited_site)
        return LastSync(
            kind=sync.kind,
            sentence=why_not_covered(
                sync.kind, current_side, previous_side, *map(call_site, (record_stack, wait_stack))
            ),
            recorded_seq=sync.recorded_seq,
            recorded_stack=record_stack,
            recorded_site=call_site_index(record_stack),
            waited_seq=sync.waited_seq,
            waited_stack=wait_stack,
            waited_site=call_site_index(wait_stack),
        )


def _operation_text(operation: Operation, kernel: str | None) -> str:
    if operation.collective:
        return collective_name(operation.collective)
    if kernel is None:
        kind = operation.kind
        return _OPERATION_NAMES.get(kind, kind.name.lower().replace("_", " "))
    return f"kernel {short_kernel(kernel)}" if kernel else "a kernel without a name"
