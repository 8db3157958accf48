"""The picture of a race: the streams as lanes, the order there is, and the order that is missing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cudakit.core.sanitize.names import place, short_kernel
from cudakit.core.sanitize.present.race_diagram import race_diagram
from cudakit.core.sanitize.races import SyncKind
from cudakit.core.sanitize.result import FoundRace, Side, Synchronisation
from cudakit.document import Column, Columns, Count, Node, Table, Text, Value, View

_SHORT = 32  # letters of a kernel's name in the picture
_HOST = "the host"
_NONE = -1


@dataclass(frozen=True, slots=True)
class Step:
    """A call, in its lane; the bytes race between the two that are an ``operation``."""

    lane: str
    seq: int
    words: str
    place: str
    operation: bool = False
    after: Step | None = None  # what it waits for, or should


def nodes(found: FoundRace, number: int) -> tuple[Node, ...]:
    """Draw a race: Columns with a row a call, and the View of them."""
    drawn = sorted(_steps(found), key=lambda step: step.seq or math.inf)
    lanes = _lanes(drawn, found)
    name = f"race-{number}"
    return (
        _columns(name, drawn, lanes),
        View("race", (name,), race_diagram, fallback=_table(drawn, lanes)),
    )


def _steps(found: FoundRace) -> Iterator[Step]:
    earlier, later = _lane_names(found)
    if found.last_sync:
        yield from _synchronised(found.last_sync, earlier, later)
    previous = _operation(found.previous, earlier)
    yield previous
    yield _operation(found.current, later, after=previous)


def _synchronised(sync: Synchronisation, earlier: str, later: str) -> Iterator[Step]:
    until, lane, wait = {
        SyncKind.EVENT: ("event recorded", later, "wait for the event"),
        SyncKind.HOST: ("work up to here", _HOST, "the host waits"),
        SyncKind.DEFAULT_STREAM: ("work up to here", later, "default stream's order"),
    }[sync.kind]
    recorded = Step(earlier, sync.recorded_seq, until, place(sync.recorded_stack))
    yield recorded
    yield Step(lane, sync.waited_seq, wait, place(sync.waited_stack), after=recorded)


def _operation(side: Side, lane: str, after: Step | None = None) -> Step:
    words = short_kernel(side.kernel, longest=_SHORT) if side.kernel else side.operation
    return Step(lane, side.seq, words, place(side.stack), True, after)


def _lane_names(found: FoundRace) -> tuple[str, str]:
    """Name the lanes; what runs in one stream is told apart by its node or its context."""
    sides = (found.previous, found.current)
    earlier, later = (side.stream for side in sides)
    if earlier != later:
        return earlier, later
    if found.current.graph:
        earlier, later = (f"node {side.node} of graph {side.graph}" for side in sides)
    else:
        earlier, later = (f"{side.stream}, context {side.context}" for side in sides)
    return earlier, later


def _lanes(drawn: Sequence[Step], found: FoundRace) -> tuple[str, ...]:
    names = _lane_names(found)
    host = any(step.lane == _HOST for step in drawn) and _HOST not in names
    return tuple(dict.fromkeys(((_HOST,) if host else ()) + names))


def _columns(name: str, drawn: Sequence[Step], lanes: tuple[str, ...]) -> Columns:
    rows = range(len(drawn))
    before = [drawn.index(step.after) if step.after else _NONE for step in drawn]
    return Columns(
        name,
        {
            "lane": np.array([lanes.index(step.lane) for step in drawn]),
            "seq": np.array([step.seq for step in drawn], np.uint64),
            "label": np.array(rows),
            "place": np.array(rows),
            "operation": np.array([step.operation for step in drawn]),
            "after": np.array(before),
        },
        text={
            "lane": lanes,
            "label": tuple(step.words for step in drawn),
            "place": tuple(step.place for step in drawn),
        },
    )


def _table(drawn: Sequence[Step], lanes: tuple[str, ...]) -> Table:
    columns = (Column("call", "number"), *(Column(lane) for lane in lanes))
    rows = tuple((_number(step), *(_cell(step, lane) for lane in lanes)) for step in drawn)
    return Table(columns, rows, caption=_missing(drawn))


def _number(step: Step) -> Value:
    return Count(step.seq) if step.seq else Text("?")


def _missing(drawn: Sequence[Step]) -> str:
    earlier, later = (step for step in drawn if step.operation)
    if 0 < earlier.seq < later.seq:
        return f"nothing makes call {later.seq:,} wait for call {earlier.seq:,}"
    return f"nothing makes {later.lane} wait for {earlier.lane}"


def _cell(step: Step, lane: str) -> Text:
    if step.lane != lane:
        return Text("")
    return Text(f"{step.words} ({step.place})" if step.place else step.words)
