"""Present one race: the sentence and its fix, the diagram, and the facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from cudakit.report.document import (
    Facts,
    Finding,
    Note,
    Section,
    Stack,
    Text,
    Value,
)
from cudakit.sanitize.hints import HEADINGS, MEANINGS, in_range, short_stream_name
from cudakit.sanitize.races import (
    Confidence,
    FoundRace,
    Memory,
    Process,
    Side,
    UnverifiedPair,
)
from cudakit.sanitize.report.race_diagram import diagram, is_used_after_free
from cudakit.stacks import is_backward
from cudakit.trace.kinds import AllocationKind, Precision
from cudakit.units import Unavailable, capitalized, format_bytes, format_count

_MAX_LISTED_RANKS: Final = 16

_PRECISION_TEXTS: Final = {
    Precision.EXACT: "exact",
    Precision.MERGED: "merged ranges, because there were too many exact ranges",
    Precision.SUMMARY: "a store to an unknown part of the tensor",
    Precision.ASSUMED: "assumed from a pointer argument",
    Precision.UNCERTAIN: "assumed from a pointer table among the arguments, which may be stale",
}

_ALLOCATION_KINDS: Final = {
    AllocationKind.SYNC: "device memory",
    AllocationKind.STREAM_ORDERED: "stream-ordered device memory",
    AllocationKind.VIRTUAL: "device memory mapped into a reserved address range",
    AllocationKind.PINNED: "pinned host memory",
    AllocationKind.MANAGED: "managed memory",
    AllocationKind.GRAPH: "allocated by a graph node",
}


def describe_place(address: int, memory: Memory | None) -> str:
    """Return an address relative to its allocation, because addresses differ between runs."""
    if memory is None:
        return f"{address:#x}"
    offset = address - memory.address
    if offset < 0:  # the address of an assumed access can be outside of the allocation
        return f"{-offset:,} B before the allocation"
    return f"offset {offset:,} B of the allocation" if offset else "the start of the allocation"


def describe_access(side: Side, memory: Memory | None) -> str:
    """Return the access of a side: ``writes 4.00 MiB at offset 512 B of the allocation``."""
    size_text, location = format_bytes(side.size_bytes), describe_place(side.address, memory)
    verbs = [verb for verb, applies in (("read", side.reads), ("write", side.writes)) if applies]
    if side.operation in ("allocation", "free") or not verbs:
        return f"{size_text} at {location}"
    if side.known >= Precision.ASSUMED:
        return f"receives a pointer to {location}; may {' and '.join(verbs)} up to {size_text} from there"
    adverb = " atomically" if side.atomic else ""
    if side.known is Precision.SUMMARY:
        size_text = f"an unknown part of the {size_text}"
    elif side.accessed_bytes:
        size_text = f"{format_bytes(side.accessed_bytes)} of the {size_text}"
    return f"{' and '.join(f'{verb}s' for verb in verbs)} {size_text} at {location}{adverb}"


def describe_precision(race: FoundRace) -> str:
    """Return the precision of both accesses."""
    if race.previous.known is race.current.known is Precision.EXACT:
        return "both accesses are exact"
    is_certain = race.confidence is Confidence.CERTAIN
    sides = [("earlier", race.previous), ("later", race.current)]
    if is_certain and race.current.known is not Precision.EXACT:
        sides.reverse()  # the exact access, which covers the other one, stands second
    (first_word, first), (second_word, second) = sides
    return (
        f"the {first_word} access is {_PRECISION_TEXTS[first.known]}, "
        f"the {second_word} one is {_PRECISION_TEXTS[second.known]}"
        f"{' and covers all of it' if is_certain else ''}"
    )


_LEVELS: Final[Mapping[Confidence, Literal["error", "warn", "info"]]] = {
    Confidence.CERTAIN: "error",
    Confidence.LIKELY: "warn",
    Confidence.POSSIBLE: "info",
}


def race_section(
    race: FoundRace, race_number: int, *, processes: Sequence[Process] = (), is_counted: bool = True
) -> Section:
    """Return the section of one race of the report. ``processes`` are the processes of the run.

    A race that does not count as a finding has no drawing, and is not shown as an error.
    """
    note = race_note(race, is_counted=is_counted)
    drawing_nodes = diagram(race, race_number) if is_counted else ()
    facts = Facts(tuple(_facts(race, processes)))
    occurrences_text = f", found {format_count(race.count)} times" if race.count > 1 else ""
    library_text = f" in {race.library}" if race.library else ""
    kind = HEADINGS.get(race.kind, race.kind.value)
    heading = f"{race_number}. {kind}{library_text}, {race.confidence.value}{occurrences_text}"
    return Section(heading, (note, *drawing_nodes, facts))


def race_note(race: FoundRace, *, is_counted: bool = True) -> Note:
    """Return the sentence of a race with its remedies, and the finding for structured formats.

    A race that does not count has the level "info".
    """
    locations = _locations(race.current, race.previous)
    if race.memory:
        locations.append(("allocated", Stack(race.memory.stack, race.memory.site)))
    finding = Finding(race.kind.value, MEANINGS[race.kind], tuple(locations), race.count)
    level = _LEVELS[race.confidence] if is_counted else "info"
    # The program cannot order the streams of a library, so the advice of the known issue replaces
    # the fix.
    remedies = (race.known_issue.advice,) if race.known_issue else (race.hint, *race.remedies)
    # The source line of the call site of each side, if the file is on this computer.
    call_sites = [
        (order_word, side.stack[side.site])
        for order_word, side in (("earlier", race.previous), ("later", race.current))
        if side.stack
    ]
    source_lines = tuple(
        f"{order_word}, {frame.filename}:{frame.line}: {line}"
        for order_word, frame in call_sites
        if (line := _source_line(Path(frame.filename), frame.line))
    )
    return Note(level, capitalized(race.sentence), remedies, finding, evidence=source_lines)


UNVERIFIED_MEANING: Final = (
    "Two operations are not ordered, and the accesses of one of them were not recorded, but taken from "
    "another launch of the same kernel."
)


def unverified_note(pair: UnverifiedPair) -> Note:
    """Return the sentence of two operations that may race, and the finding for structured formats."""
    locations = tuple(_locations(pair.current, pair.previous))
    finding = Finding("unverified-launch", UNVERIFIED_MEANING, locations)
    return Note("error", capitalized(pair.sentence), (pair.hint,), finding)


def _locations(current: Side, previous: Side) -> list[tuple[str, Stack]]:
    return [
        (f"{order_word}: {_operation_text(side)}", _stack(side))
        for order_word, side in (("later", current), ("earlier", previous))
    ]


# Larger files are not read for the source line of a call.
_MAX_SOURCE_BYTES: Final = 1 << 21
_MAX_SOURCE_LETTERS: Final = 200


def _source_line(file: Path, line_number: int) -> str:
    """Return a line of a Python file; "" if there is none.

    Other files are not read, because the names in a log from someone else could point to any file.
    """
    try:
        if file.suffix != ".py" or not file.is_file() or file.stat().st_size > _MAX_SOURCE_BYTES:
            return ""
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError):  # ValueError: a name with a null character
        return ""
    return (
        lines[line_number - 1].strip()[:_MAX_SOURCE_LETTERS]
        if 0 < line_number <= len(lines)
        else ""
    )


def _facts(race: FoundRace, processes: Sequence[Process]) -> Iterator[tuple[str, Value]]:
    if issue := race.known_issue:
        yield "known issue", Text(f"{issue.title}: {issue.reference}")
    on_two_devices = race.current.device != race.previous.device
    for order_word, side in (("earlier", race.previous), ("later", race.current)):
        device_text = f" of cuda:{side.device}" if on_two_devices else ""
        yield (
            order_word,
            Text(f"{_operation_text(side)}{device_text}; {describe_access(side, race.memory)}"),
        )
        # A race inside a library is shown with the frames of the library.
        innermost_index = int(is_backward(side.stack))
        yield "called at", Stack(side.stack, innermost_index) if race.library else _stack(side)
        if side.graph and side.launch_stack:
            yield "graph launched at", Stack(side.launch_stack, side.launch_site)
    yield "both access", Text(_bytes_text(race))
    if race.count > 1:
        yield (
            "found",
            Text(
                f"{format_count(race.count)} times, of which this is one; two operations that both "
                "access several separate ranges of bytes count several times"
            ),
        )
    yield "confidence", Text(f"{race.confidence.value}: {describe_precision(race)}")
    if race.memory is None:
        reason = "not allocated by CUDA, or allocated before recording began"
        yield "memory", Unavailable(reason)
    else:
        size_text, kind = format_bytes(race.memory.size_bytes), _ALLOCATION_KINDS[race.memory.how]
        yield "memory", Text(f"{size_text}, {kind}")
        yield "allocated at", Stack(race.memory.stack, race.memory.site)
    if not is_used_after_free(race):
        earlier_stream, later_stream = map(short_stream_name, (race.previous, race.current))
        last_wait = "none"
        if race.last_sync:
            last_wait = race.last_sync.sentence
        elif earlier_stream != later_stream:
            last_wait = f"none: {later_stream} never waited for {earlier_stream}"
        yield "last wait", Text(last_wait)
    if len(processes) > 1:
        yield from _process_facts(race, processes)


def _process_facts(race: FoundRace, processes: Sequence[Process]) -> Iterator[tuple[str, Value]]:
    """Yield the process of the described occurrence, and the number of processes or ranks with the race."""
    rank_by_process = {process.process: process.rank for process in processes}
    rank = rank_by_process.get(race.process)
    yield "process", Text(str(race.process) if rank is None else f"{race.process}, rank {rank}")
    if len(race.processes) > 1:
        ranks = [rank_by_process.get(process) for process in race.processes]
        known_ranks = sorted(rank for rank in ranks if rank is not None)
        place = f"{len(ranks)} processes"
        if len(known_ranks) == len(ranks):
            ellipsis = ", …" if len(ranks) > _MAX_LISTED_RANKS else ""
            place = f"ranks {', '.join(map(str, known_ranks[:_MAX_LISTED_RANKS]))}{ellipsis}"
        yield "found in", Text(place)


def _operation_text(side: Side) -> str:
    node_text = f" (node {side.node} of graph {side.graph})" if side.graph else ""
    return f"{side.operation_name}{node_text} on {side.stream}{in_range(side.ranges)}"


def _stack(side: Side) -> Stack:
    return Stack(side.stack, side.site)


def _bytes_text(race: FoundRace) -> str:
    caveat = (
        "; possibly fewer bytes: adjacent ranges were merged to save memory"
        if race.approximate
        else ""
    )
    sides = (race.current, race.previous)
    size_text = format_bytes(race.size_bytes)
    if any(side.known is Precision.SUMMARY for side in sides):
        size_text = f"up to {size_text}"
    if strided_sizes := [side.accessed_bytes for side in sides if side.accessed_bytes]:
        if race.size_bytes > min(strided_sizes):
            size_text = f"up to {format_bytes(min(strided_sizes))} of the {size_text}"
        else:
            caveat += "; a strided access may have more common bytes behind these"
    location = describe_place(race.address, race.memory)
    return f"{size_text} at {location}{caveat}"
