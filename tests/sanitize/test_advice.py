"""Tests that the wait that a report suggests ends the race: the trace is analyzed again with this wait."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TypeAlias

from hypothesis import given, settings
from hypothesis import strategies as st
from sanitize.random_traces import Step, steps, trace

from cudakit.sanitize.engine import Engine
from cudakit.sanitize.races import Operation, Race, RaceKind
from cudakit.trace.events import (
    Access,
    Copy,
    Event,
    EventBody,
    EventRecord,
    Fill,
    GraphEdge,
    GraphLaunch,
    Launch,
    StreamCreate,
    StreamWait,
)
from cudakit.trace.kinds import AccessMode, EventKind, StreamFlag
from cudakit.trace.trace_file import pack

# The kind, name and call stack of an operation, and the graph that contains it.
Identity: TypeAlias = tuple[EventKind, str, int, int]
# Races with the same kind, earlier and later operation are one race of the report.
Key: TypeAlias = tuple[RaceKind, Identity, Identity]

FIRST_NEW_EVENT = 1_000


def found_races(events: Sequence[Event]) -> list[Race]:
    strings = {"": 0}
    records = pack(events, lambda text: strings.setdefault(text, len(strings)))
    return Engine().feed(records, list(strings))


def identity(operation: Operation) -> Identity:
    return operation.kind, operation.name, operation.site, operation.graph


def occurrences_by_key(races: Iterable[Race]) -> Mapping[Key, list[Race]]:
    occurrences: defaultdict[Key, list[Race]] = defaultdict(list)
    for race in races:
        occurrences[race.kind, identity(race.previous), identity(race.current)].append(race)
    return occurrences


def is_enqueued_by(event: Event, operation: Identity) -> bool:
    """Return whether a call enqueues an operation, or the graph that contains it."""
    kind, name, site, graph = operation
    body = event.body
    if graph:
        return isinstance(body, GraphLaunch) and body.graph == graph
    return (body.kind, getattr(body, "name", ""), event.site) == (kind, name, site)


def with_waits(
    events: Sequence[Event], races: Sequence[Race], streams: Iterable[int]
) -> list[Event]:
    """Return a trace with the wait that a report suggests for all occurrences of a race.

    The later operation waits for the earlier operation on each of these streams.
    """
    earlier, later = identity(races[0].previous), identity(races[0].current)
    streams = sorted(streams)
    is_one_graph = bool(later[-1]) and earlier[-1] == later[-1]
    changed: list[Event] = []
    for _, calls in groupby(events, key=lambda event: event.seq):
        call = list(calls)
        work = call[0]
        if is_one_graph and is_enqueued_by(work, later):
            edges = {(race.previous.node, race.current.node) for race in races}
            changed += _calls(work, (GraphEdge(later[-1], *edge) for edge in edges))
        elif is_enqueued_by(work, later):
            stream = _stream(work)
            changed += _calls(
                work, (StreamWait(stream, FIRST_NEW_EVENT + awaited) for awaited in streams)
            )
        changed += call
        if not is_one_graph and is_enqueued_by(work, earlier) and _stream(work) in streams:
            changed += _calls(work, [EventRecord(FIRST_NEW_EVENT + _stream(work), _stream(work))])
    return list(_renumbered(changed))


def _stream(event: Event) -> int:
    body = event.body
    assert isinstance(body, Launch | Copy | Fill | GraphLaunch)
    return body.stream


def _calls(work: Event, bodies: Iterable[EventBody]) -> list[Event]:
    return [replace(work, body=body, site=0, seq=0) for body in bodies]


def _renumbered(events: Sequence[Event]) -> Iterator[Event]:
    """Number the calls in their order. The call of a new event is 0: each of them is a call of its own."""
    seq, last_seq = 0, -1
    for event in events:
        seq += event.seq != last_seq or not event.seq
        last_seq = event.seq
        yield replace(event, seq=seq)


@settings(max_examples=300, deadline=None)
@given(steps(), st.booleans())
def test_suggested_wait_ends_the_race_and_makes_none(
    steps: list[Step], same_call_site: bool
) -> None:
    events = trace(steps, same_call_site=same_call_site)
    found = occurrences_by_key(found_races(events))

    for key, races in found.items():
        streams = {race.previous.stream for race in races}
        remaining = occurrences_by_key(found_races(with_waits(events, races, streams)))
        assert key not in remaining
        assert remaining.keys() <= found.keys()


def test_wait_for_one_of_two_streams_leaves_the_race() -> None:
    bodies = (
        *(StreamCreate(stream, StreamFlag.NON_BLOCKING) for stream in (1, 2, 3)),
        Fill(1, 0, 8),
        Fill(2, 8, 8),
        Launch(3, "sum"),
        Access(0, 16, AccessMode.READ),
    )
    seqs = (1, 2, 3, 4, 5, 6, 6)
    sites = (0, 0, 0, 7, 7, 8, 8)
    events = [
        Event(body, seq=seq, site=site, context=1)
        for body, seq, site in zip(bodies, seqs, sites, strict=True)
    ]
    races = found_races(events)

    assert len(occurrences_by_key(races)) == 1
    assert len(races) == 2
    assert found_races(with_waits(events, races, {1, 2})) == []
    assert [race.previous.stream for race in found_races(with_waits(events, races, {1}))] == [2]
