from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from core.sanitize.expected import pairs, told
from core.sanitize.random_traces import Step, steps, trace
from gpu.programs import Program, Run, programs
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cudakit.core.sanitize.engine import Engine
from cudakit.core.sanitize.races import Race
from cudakit.trace.events import Event
from cudakit.trace.layout import pack


def races(
    events: Sequence[Event], *, cuts: Sequence[int] = (), forgets_above: int = 1024
) -> list[Race]:
    """Feed a trace, in pieces that end before some of its calls."""
    engine, strings = Engine(forgets_above=forgets_above), {"": 0}
    records = pack(events, lambda text: strings.setdefault(text, len(strings)))
    ends = sorted({int((records["seq"] < seq).sum()) for seq in cuts})
    found: list[Race] = []
    for begin, end in zip([0, *ends], [*ends, len(records)], strict=True):
        found += engine.feed(records[begin:end], list(strings))
    return found


@settings(max_examples=300, deadline=None)
@given(steps())
@example([("graph", 40, 56, 4), ("kernel", 0, 2, 3), ("graph", 0, 47, 27)])
@example([("kernel", 0, 0, 2), ("graph", 16, 44, 6)])
def test_the_engine_tells_of_just_the_races_that_brute_force_finds(steps: list[Step]) -> None:
    events = trace(steps)

    assert told(races(events)) == pairs(events)


@settings(max_examples=100, deadline=None)
@given(steps())
def test_joining_bytes_that_are_alike_loses_no_race_and_makes_none(steps: list[Step]) -> None:
    events = trace(steps, one_site=True)

    found = Counter((race.current.seq, race.previous.stream) for race in races(events))

    streams = {event.seq: event.fact.stream for event in events if hasattr(event.fact, "stream")}
    expected = pairs(events).elements()
    assert found == Counter((later[0], streams[earlier[0]]) for later, earlier in expected)


@settings(max_examples=50, deadline=None)
@given(steps(), st.lists(st.integers(1, 60), max_size=6))
def test_it_makes_no_difference_how_a_trace_is_cut_into_batches(
    steps: list[Step], cuts: list[int]
) -> None:
    events = trace(steps)

    assert races(events, cuts=cuts) == races(events)


@settings(max_examples=100, deadline=None)
@given(steps())
def test_what_is_forgotten_makes_no_difference(steps: list[Step]) -> None:
    events = trace(steps)
    calls = [event.seq for event in events]

    assert told(races(events, cuts=calls, forgets_above=0)) == pairs(events)


@settings(max_examples=60, deadline=None)
@given(programs(), st.sampled_from([None, 1, 2]))
def test_what_a_simulated_device_tells_is_judged_alike(program: Program, seed: int | None) -> None:
    events = Run(program, seed=seed).trace

    assert told(races(events)) == pairs(events)
