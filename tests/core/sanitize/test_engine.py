"""The races that the engine finds in traces, compared with brute force."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from core.sanitize.expected_races import pairs, reported
from core.sanitize.random_traces import Step, steps, trace
from core.sanitize.trace_scene import (
    BLOCKING,
    LEGACY,
    NON_BLOCKING,
    READ,
    SIZE,
    WRITE,
    Scene,
    address_of,
)
from gpu.programs import Program, Run, programs
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cudakit.core.sanitize.engine import STRAY_ACCESS, Engine
from cudakit.core.sanitize.races import Coverage, NamedRange, Race, SyncKind
from cudakit.trace.events import (
    Access,
    Accessed,
    Arenas,
    Copy,
    Event,
    Fill,
    GraphLaunch,
    GraphNode,
    Launch,
    Mark,
    RangePop,
    RangePush,
    StreamCreate,
)
from cudakit.trace.kinds import NodeType, Precision
from cudakit.trace.layout import RECORD, Records, pack

X = address_of("x")


def records_of(*events: Event) -> Records:
    return pack(events, len)


def test_empty_trace_has_no_race() -> None:
    assert Engine().feed(np.zeros(0, RECORD), [""]) == []


def test_launch_and_its_accesses_may_be_in_two_batches() -> None:
    s = Scene()
    s.call(Launch(1, "k"))
    s.feed([Event(Access(X, X + 4, WRITE), seq=s.seq)])
    assert s.engine.coverage == Coverage(launches=1, launches_exact=1, accesses_exact=1)
    assert len(s.R(2, X, size=4)) == 1


def test_records_of_other_threads_may_precede_the_accesses_of_a_launch() -> None:
    s = Scene()
    (race,) = s.feed(
        [
            Event(Launch(1, "k"), seq=100),
            Event(Launch(2, "k"), seq=101),
            Event(Access(X, X + 4, WRITE), seq=100),
            Event(Access(X, X + 4, READ), seq=101),
        ]
    )
    assert (race.previous.seq, race.current.seq) == (100, 101)


def test_late_access_is_counted_as_gap() -> None:
    s = Scene()
    s.call(Launch(1, "k"))
    s.W(2, "y")
    assert s.feed([Event(Access(X, X + 4, WRITE), seq=s.seq - 1)]) == []
    assert s.engine.gaps == {STRAY_ACCESS: 1}
    assert s.R(3, "x") == []


def test_empty_access_does_not_race() -> None:
    s = Scene()
    s.kernel(1, Access(X, X, WRITE))
    s.call(Copy(1, X, X + 64, 0))
    s.call(Fill(1, X, 0))
    assert s.W(2, "x") == []


def test_unrelated_records_are_ignored() -> None:
    s = Scene()
    records = records_of(Event(Mark("here"), seq=50), Event(Launch(1, "k"), seq=51))
    records["kind"][0] = 999  # a kind of a later version
    assert s.engine.feed(records, [""]) == []
    assert s.call(Mark("there")) == []
    assert s.engine.coverage.launches == 1


def test_engine_counts_coverage() -> None:
    s = Scene()
    s.kernel(1, Access(X, X + 4, READ), Access(X, X + 4, READ, Precision.MERGED))
    s.kernel(1, Access(X, X + 4, READ), Access(X, X + 4, READ, Precision.SUMMARY), Accessed())
    s.launch_with_pointers(1, "x", "y")
    s.kernel(1)
    s.copy(1, "x", "y")
    s.fill(1, "x")
    s.call(GraphLaunch(1, 1, 1))
    assert s.engine.coverage == Coverage(
        launches=4,
        launches_unknown=1,
        launches_exact=2,
        launches_whole_tensor=1,
        launches_assumed=1,
        copies=1,
        fills=1,
        accesses_exact=2,
        accesses_summary=1,
        accesses_merged=1,
        accesses_assumed=2,
        graph_launches=1,
    )


def test_launch_precision_is_that_of_its_least_precise_access() -> None:
    s = Scene()
    s.kernel(1, Access(X, X + 4, READ), Access(X, X + 4, READ, Precision.ASSUMED))
    s.kernel(1, Access(X, X + 4, READ, Precision.UNCERTAIN), Access(X, X + 4, READ))
    s.kernel(1, Access(X, X + 4, READ), Accessed())
    s.kernel(1, Access(X, X + 4, READ), Accessed(exact=False))
    s.call(Launch(1, "touches nothing"), Accessed())
    s.call(Launch(1, "lost"), Accessed(exact=False))
    coverage = s.engine.coverage
    assert (coverage.launches, coverage.launches_exact, coverage.launches_assumed) == (6, 2, 4)
    assert coverage.launches_unknown == 0


def test_accesses_of_launch_may_span_batches() -> None:
    s = Scene()
    s.call(Launch(1, "k"))
    for body, counts in {
        Access(X, X + 4, READ): (0, 1, 0),
        Accessed(exact=False): (0, 0, 1),
        Access(X, X + 8, READ): (0, 0, 1),
    }.items():
        s.feed([Event(body, seq=s.seq)])
        coverage = s.engine.coverage
        assert (
            coverage.launches_unknown,
            coverage.launches_exact,
            coverage.launches_assumed,
        ) == counts
    s.fill(1, "y")
    assert s.feed([Event(Accessed(), seq=s.seq)]) == []
    assert s.engine.coverage.launches_exact == 0


def test_coverage_counts_launches_without_call_site() -> None:
    s = Scene()
    launches = (Event(Launch(1, "k"), seq=seq, site=site) for seq, site in ((5, 0), (6, 1), (7, 0)))
    s.engine.feed(records_of(*launches, Event(Fill(1, X, 4), seq=8)), [""])

    assert s.engine.coverage.launches == 3
    assert s.engine.coverage.launches_without_call_site == 2


def test_coverage_reports_peak_memory_of_recording() -> None:
    s = Scene()
    for device, size_bytes in ((0, 30), (1, 20), (0, 10), (1, 35)):
        s.call(Arenas(size_bytes), device=device)
    assert s.engine.coverage.arenas_bytes == 50


def test_accesses_belong_to_the_launching_thread() -> None:
    s = Scene(strict_threads=True)
    s.kernel(1, Access(X, X + 4, WRITE), thread=1)
    s.sync(1, thread=1)
    s.seq += 1
    recorded = [
        Event(Launch(2, "k"), seq=s.seq, context=1, thread=1),
        Event(Access(X, X + 4, WRITE), seq=s.seq, context=1, thread=2),
        Event(Accessed(), seq=s.seq, context=1, thread=2),
        Event(Fill(2, X, 4), seq=s.seq + 1, context=1, thread=1),
    ]
    assert s.feed(recorded) == []
    assert (s.engine.gaps, s.engine.coverage.launches_exact) == ({}, 2)


def test_repeated_creation_of_a_stream_is_ignored() -> None:
    s = Scene()
    s.W(1, "x")
    s.call(StreamCreate(1))
    assert s.W(1, "x", size=SIZE) == []


def test_race_is_returned_once() -> None:
    s = Scene()
    s.W(1, "x")
    assert len(s.W(2, "x")) == 1
    assert s.feed([]) == []


def test_last_synchronization_names_record_and_wait() -> None:
    s = Scene()
    s.record(1, 1)
    recorded = s.seq
    s.W(1, "x")
    s.wait(2, 1)
    (race,) = s.R(2, "x")
    sync = race.last_sync
    assert sync is not None
    assert (sync.kind, sync.recorded_seq, sync.waited_seq) == (
        SyncKind.EVENT,
        recorded,
        recorded + 2,
    )
    assert sync.recorded_seq < race.previous.seq


def test_last_synchronization_by_host_or_default_stream() -> None:
    s = Scene(LEGACY, BLOCKING, NON_BLOCKING, NON_BLOCKING)
    s.W(3, "y")
    s.sync(3)
    waited = s.seq
    s.W(3, "x")
    (race,) = s.R(4, "x")
    assert race.last_sync is not None
    assert (race.last_sync.kind, race.last_sync.waited_seq) == (SyncKind.HOST, waited)
    s.W(2, "z")
    s.W(1, "z")
    s.W(1, "w")
    s.record(1, 1)
    s.wait(3, 1)
    s.W(2, "v")
    (race,) = s.R(3, "v")
    assert race.last_sync is not None
    assert race.last_sync.kind is SyncKind.EVENT


def test_unsynchronized_streams_have_no_last_synchronization() -> None:
    s = Scene()
    s.W(1, "x")
    (race,) = s.W(2, "x")
    assert race.last_sync is None


def test_race_describes_both_operations() -> None:
    s = Scene()
    s.launch_with_accesses(1, ["x"], 2, 64, thread=5)
    (race,) = s.copy(2, "y", "x", thread=6)
    assert (race.previous.name, race.previous.thread, race.previous.site) == ("k", 5, 11)
    assert (race.current.name, race.current.kind.name, race.current.thread) == ("", "COPY", 6)
    assert (race.previous.lo, race.previous.hi) == (address_of("x"), address_of("x") + 64)


def races(
    events: Sequence[Event], *, batch_ends: Sequence[int] = (), prune_above: int = 1024
) -> list[Race]:
    """Return the races of a trace that is fed in batches; ``batch_ends`` are the calls after the batches."""
    engine, strings = Engine(prune_above=prune_above), {"": 0}
    records = pack(events, lambda text: strings.setdefault(text, len(strings)))
    ends = sorted({int((records["seq"] < seq).sum()) for seq in batch_ends})
    found_races: list[Race] = []
    for begin, end in zip([0, *ends], [*ends, len(records)], strict=True):
        found_races += engine.feed(records[begin:end], list(strings))
    return found_races


@settings(max_examples=300, deadline=None)
@given(steps())
@example([("graph", 40, 56, 4), ("kernel", 0, 2, 3), ("graph", 0, 47, 27)])
@example([("kernel", 0, 0, 2), ("graph", 16, 44, 6)])
def test_engine_finds_exactly_the_races_of_brute_force(steps: list[Step]) -> None:
    events = trace(steps)

    assert reported(races(events)) == pairs(events)


@settings(max_examples=100, deadline=None)
@given(steps())
def test_merging_equal_range_states_does_not_change_races(steps: list[Step]) -> None:
    events = trace(steps, same_call_site=True)

    found_races = Counter((race.current.seq, race.previous.stream) for race in races(events))

    streams = {event.seq: event.body.stream for event in events if hasattr(event.body, "stream")}
    expected = pairs(events).elements()
    assert found_races == Counter((later[0], streams[earlier[0]]) for later, earlier in expected)


@settings(max_examples=50, deadline=None)
@given(steps(), st.lists(st.integers(1, 60), max_size=6))
def test_batch_boundaries_make_no_difference(steps: list[Step], batch_ends: list[int]) -> None:
    events = trace(steps)

    assert races(events, batch_ends=batch_ends) == races(events)


@settings(max_examples=100, deadline=None)
@given(steps())
def test_pruning_makes_no_difference(steps: list[Step]) -> None:
    events = trace(steps)
    calls = [event.seq for event in events]

    assert reported(races(events, batch_ends=calls, prune_above=0)) == pairs(events)


@settings(max_examples=60, deadline=None)
@given(programs(), st.sampled_from([None, 1, 2]))
def test_trace_of_simulated_device_gives_the_same_races(program: Program, seed: int | None) -> None:
    events = Run(program, seed=seed).trace

    assert reported(races(events)) == pairs(events)


def test_race_has_ranges_of_both_sides() -> None:
    s = Scene()
    s.call(RangePush("step", "mine"))
    s.call(RangePush("prefetch"))
    s.W(1, "x")
    s.call(RangePop())
    (race,) = s.R(2, "x")

    assert race.previous.ranges == (NamedRange("step", "mine"), NamedRange("prefetch", ""))
    assert race.current.ranges == (NamedRange("step", "mine"),)


def test_graph_nodes_have_ranges_of_graph_launch() -> None:
    s = Scene()
    access = Access(address_of("x"), address_of("x") + SIZE, WRITE, node=1)
    s.call(RangePush("capture"))
    s.call(GraphNode(1, 1, NodeType.COPY), access)
    s.call(RangePop())
    s.call(RangePush("replay"))
    s.call(GraphLaunch(1, 1, executable=1))
    s.call(RangePop())
    (race,) = s.R(2, "x")

    assert [(one.name, race.current.ranges) for one in race.previous.ranges] == [("replay", ())]
