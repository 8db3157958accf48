"""How the engine takes a trace: its batches, and what it counts."""

from __future__ import annotations

import numpy as np
from core.sanitize.scene import READ, SIZE, WRITE, Scene, place

from cudakit.core.sanitize.engine import STRAY_ACCESS, Engine
from cudakit.core.sanitize.races import Coverage
from cudakit.trace.events import (
    Access,
    Accessed,
    Arenas,
    Copy,
    Event,
    Fill,
    GraphLaunch,
    Launch,
    Mark,
    StreamCreate,
)
from cudakit.trace.kinds import Known
from cudakit.trace.layout import RECORD, Records, pack

X = place("x")


def records_of(*events: Event) -> Records:
    return pack(events, len)


def test_nothing_is_found_in_nothing() -> None:
    assert Engine().feed(np.zeros(0, RECORD), [""]) == []


def test_a_launch_and_its_accesses_may_be_in_two_batches() -> None:
    s = Scene()
    s.call(Launch(1, "k"))
    s.feed([Event(Access(X, X + 4, WRITE), seq=s.seq)])
    assert s.engine.coverage == Coverage(launches=1, launches_exact=1, accesses_exact=1)
    assert len(s.R(2, X, size=4)) == 1


def test_threads_may_write_between_a_launch_and_its_accesses() -> None:
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


def test_an_access_that_comes_too_late_is_counted_as_a_gap() -> None:
    s = Scene()
    s.call(Launch(1, "k"))
    s.W(2, "y")
    assert s.feed([Event(Access(X, X + 4, WRITE), seq=s.seq - 1)]) == []
    assert s.engine.gaps == {STRAY_ACCESS: 1}
    assert s.R(3, "x") == []


def test_an_access_of_nothing_touches_nothing() -> None:
    s = Scene()
    s.kernel(1, Access(X, X, WRITE))
    s.call(Copy(1, X, X + 64, 0))
    s.call(Fill(1, X, 0))
    assert s.W(2, "x") == []


def test_what_is_no_business_of_the_engine_is_passed_over() -> None:
    s = Scene()
    records = records_of(Event(Mark("here"), seq=50), Event(Launch(1, "k"), seq=51))
    records["kind"][0] = 999  # of some later version
    assert s.engine.feed(records, [""]) == []
    assert s.call(Mark("there")) == []
    assert s.engine.coverage.launches == 1


def test_the_engine_counts_what_it_saw() -> None:
    s = Scene()
    s.kernel(1, Access(X, X + 4, READ), Access(X, X + 4, READ, Known.SUMMARY))
    s.given(1, "x", "y")
    s.kernel(1)
    s.copy(1, "x", "y")
    s.fill(1, "x")
    s.call(GraphLaunch(1, 1, 1))
    assert s.engine.coverage == Coverage(
        launches=3,
        launches_unknown=1,
        launches_exact=1,
        launches_assumed=1,
        copies=1,
        fills=1,
        accesses_exact=1,
        accesses_summary=1,
        accesses_assumed=2,
        graph_launches=1,
    )


def test_a_launch_is_known_as_well_as_its_worst_access() -> None:
    s = Scene()
    s.kernel(1, Access(X, X + 4, READ), Access(X, X + 4, READ, Known.ASSUMED))
    s.kernel(1, Access(X, X + 4, READ, Known.UNCERTAIN), Access(X, X + 4, READ))
    s.kernel(1, Access(X, X + 4, READ), Accessed())
    s.kernel(1, Access(X, X + 4, READ), Accessed(exact=False))
    s.call(Launch(1, "touches nothing"), Accessed())
    s.call(Launch(1, "lost"), Accessed(exact=False))
    seen = s.engine.coverage
    assert (seen.launches, seen.launches_exact, seen.launches_assumed) == (6, 2, 4)
    assert seen.launches_unknown == 0


def test_what_is_told_of_a_launch_may_be_in_two_batches() -> None:
    s = Scene()
    s.call(Launch(1, "k"))
    for fact, counts in {
        Access(X, X + 4, READ): (0, 1, 0),
        Accessed(exact=False): (0, 0, 1),
        Access(X, X + 8, READ): (0, 0, 1),
    }.items():
        s.feed([Event(fact, seq=s.seq)])
        seen = s.engine.coverage
        assert (seen.launches_unknown, seen.launches_exact, seen.launches_assumed) == counts
    s.fill(1, "y")
    assert s.feed([Event(Accessed(), seq=s.seq)]) == []
    assert s.engine.coverage.launches_exact == 0


def test_the_memory_of_recording_is_counted_at_its_largest() -> None:
    s = Scene()
    for device, size_bytes in ((0, 30), (1, 20), (0, 10), (1, 35)):
        s.call(Arenas(size_bytes), device=device)
    assert s.engine.coverage.arenas_bytes == 50


def test_what_a_launch_did_is_of_its_thread_whoever_tells_it() -> None:
    s = Scene(strict_threads=True)
    s.kernel(1, Access(X, X + 4, WRITE), thread=1)
    s.sync(1, thread=1)
    s.seq += 1
    told = [
        Event(Launch(2, "k"), seq=s.seq, context=1, thread=1),
        Event(Access(X, X + 4, WRITE), seq=s.seq, context=1, thread=2),
        Event(Accessed(), seq=s.seq, context=1, thread=2),
        Event(Fill(2, X, 4), seq=s.seq + 1, context=1, thread=1),
    ]
    assert s.feed(told) == []
    assert (s.engine.gaps, s.engine.coverage.launches_exact) == ({}, 2)


def test_a_stream_is_made_once() -> None:
    s = Scene()
    s.W(1, "x")
    s.call(StreamCreate(1))
    assert s.W(1, "x", size=SIZE) == []


def test_races_are_told_of_once() -> None:
    s = Scene()
    s.W(1, "x")
    assert len(s.W(2, "x")) == 1
    assert s.feed([]) == []
