"""One race: what happened and what to do, a picture of it, and the figures behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal

from cudakit.core.sanitize.hints import stream_words
from cudakit.core.sanitize.present import picture
from cudakit.core.sanitize.present.words import MEANINGS, accessed, how_known, memory_words
from cudakit.core.sanitize.races import Confidence
from cudakit.core.sanitize.result import FoundRace, Side
from cudakit.document import (
    Facts,
    Finding,
    Note,
    Section,
    Stack,
    Text,
    Value,
)
from cudakit.units import Unavailable, format_bytes, format_count

_LEVELS: Final[Mapping[Confidence, Literal["error", "warn", "info"]]] = {
    Confidence.CERTAIN: "error",
    Confidence.LIKELY: "warn",
    Confidence.POSSIBLE: "info",
}


def race(found: FoundRace, number: int, *, several_processes: bool) -> Section:
    """Lay out one race, the ``number``-th of the report."""
    facts = Facts(tuple(_facts(found, several_processes=several_processes)))
    return Section(_heading(found, number), (_note(found), *picture.nodes(found, number), facts))


def _heading(found: FoundRace, number: int) -> str:
    times = f", found {format_count(found.count)} times" if found.count > 1 else ""
    return f"{number}. {found.kind.value}, {found.confidence.value}{times}"


def _note(found: FoundRace) -> Note:
    sides = (("later", found.current), ("earlier", found.previous))
    places = [(f"{when}: {_what(side)}", _stack(side)) for when, side in sides]
    if found.memory:
        places.append(("allocated", Stack(found.memory.stack, found.memory.site)))
    finding = Finding(found.kind.value, MEANINGS[found.kind], tuple(places), found.count)
    level = _LEVELS[found.confidence]
    return Note(level, found.sentence, (found.hint, *found.remedies), finding)


def _facts(found: FoundRace, *, several_processes: bool) -> Iterator[tuple[str, Value]]:
    across = found.current.device != found.previous.device
    for when, side in (("earlier", found.previous), ("later", found.current)):
        device = f" of cuda:{side.device}" if across else ""
        yield when, Text(f"{_what(side)}{device}; {accessed(side)}")
        yield "called at", _stack(side)
    yield "both touch", Text(_bytes(found))
    yield "known", Text(f"{found.confidence.value}: {how_known(found)}")
    yield from _memory(found)
    yield "last wait", Text(_last_wait(found))
    if several_processes:
        yield "in process", Text(str(found.process))


def _what(side: Side) -> str:
    node = f" (node {side.node} of graph {side.graph})" if side.graph else ""
    return f"{side.operation}{node} on {side.stream}"


def _stack(side: Side) -> Stack:
    return Stack(side.stack, side.site)


def _bytes(found: FoundRace) -> str:
    within = (
        f", {format_bytes(found.offset_bytes)} into the allocation"
        if found.offset_bytes is not None
        else ""
    )
    fewer = "; perhaps fewer, its map became too fine" if found.approximate else ""
    return f"{format_bytes(found.size_bytes)} at {found.address:#x}{within}{fewer}"


def _memory(found: FoundRace) -> Iterator[tuple[str, Value]]:
    memory = found.memory
    if memory is None:
        yield "memory", Unavailable("not allocated by CUDA, or before it was watched")
        return
    yield "memory", Text(memory_words(memory))
    yield "allocated at", Stack(memory.stack, memory.site)


def _last_wait(found: FoundRace) -> str:
    if found.last_sync:
        return found.last_sync.sentence
    a, b = stream_words(found.previous), stream_words(found.current)
    return f"none: {b} never waited for {a}" if a != b else "none"
