from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cudakit.sanitize.records import ReorderBuffer, reorder_records
from cudakit.trace.events import (
    Access,
    Accessed,
    Event,
    EventBody,
    Fill,
    GraphLaunch,
    Launch,
    LaunchDelayed,
)
from cudakit.trace.kinds import AccessMode, Precision
from cudakit.trace.trace_file import Records, pack, unpack

READ, WRITE = AccessMode.READ, AccessMode.WRITE
LAUNCH = Launch(1, "", pending=True)
STRINGS = ("",)


@dataclass(frozen=True, slots=True)
class Call:
    """A call with the events written at once and later; some of the late events may be missing."""

    bodies: Sequence[EventBody]
    late_events: Sequence[EventBody] = ()
    complete: bool = True

    @property
    def has_exact_accesses(self) -> bool:
        return Accessed(exact=True) in self.late_events

    def reorder_records(self) -> Iterator[EventBody]:
        """Yield the events as the buffer must return them: exact accesses replace assumed ones."""
        for body in (*self.bodies, *self.late_events):
            if not (
                isinstance(body, Access)
                and body.precision >= Precision.ASSUMED
                and self.has_exact_accesses
            ):
                yield body


@dataclass(slots=True)
class WrittenTrace:
    """A trace in the order in which it is written: late events somewhere after their call."""

    events: list[Event] = field(default_factory=list)
    expected: list[Event] = field(default_factory=list)
    never_read_count: int = 0

    @property
    def records(self) -> Records:
        return records(*self.events)


def records(*events: Event) -> Records:
    return pack(events, STRINGS.index)


def events_of(records_returned: Records) -> list[Event]:
    return list(unpack(records_returned, STRINGS))


def accesses(*precisions: Precision) -> st.SearchStrategy[list[Access]]:
    access_strategy = st.builds(
        Access, st.integers(0, 99), st.just(100), st.just(WRITE), st.sampled_from(precisions)
    )
    return st.lists(access_strategy, max_size=3)


@st.composite
def launches(draw: st.DrawFn) -> Call:
    assumed = draw(accesses(Precision.ASSUMED, Precision.UNCERTAIN))
    exact_accesses = draw(accesses(Precision.EXACT, Precision.SUMMARY))
    if draw(st.booleans()):
        return Call([LAUNCH, *assumed], [*exact_accesses, Accessed(exact=draw(st.booleans()))])
    return Call([LAUNCH, *assumed], exact_accesses, complete=False)


@st.composite
def graph_launches(draw: st.DrawFn) -> Call:
    nodes = draw(st.lists(accesses(Precision.EXACT), min_size=1, max_size=3))
    count = draw(st.integers(0, len(nodes)))
    late_events: list[EventBody] = []
    for node, exact_accesses in enumerate(nodes[:count], start=1):
        late_events += [*exact_accesses, Accessed(node, draw(st.booleans()))]
    launch = [GraphLaunch(1, 1, 1, pending=len(nodes)), *draw(accesses(Precision.ASSUMED))]
    return Call(launch, late_events, complete=count == len(nodes))


def calls() -> st.SearchStrategy[Call]:
    at_once = st.just(Call([Fill(1, 0, 8)])) | st.builds(
        lambda records_of_two_launches: Call([Launch(1, ""), *records_of_two_launches]),
        accesses(Precision.ASSUMED, Precision.EXACT),
    )
    return at_once | launches() | graph_launches()


@st.composite
def traces(draw: st.DrawFn) -> WrittenTrace:
    trace, late_events = WrittenTrace(), list[tuple[int, Sequence[EventBody]]]()
    for seq, call in enumerate(draw(st.lists(calls(), max_size=12)), start=1):
        trace.events += [Event(body, seq) for body in call.bodies]
        trace.expected += [Event(body, seq) for body in call.reorder_records()]
        trace.never_read_count += not call.complete
        if call.late_events:
            late_events.append((seq, call.late_events))
        while late_events and draw(st.booleans()):
            _write_some(draw, trace, late_events)
    while late_events:
        _write_some(draw, trace, late_events)
    return trace


def _write_some(
    draw: st.DrawFn, trace: WrittenTrace, late_events: list[tuple[int, Sequence[EventBody]]]
) -> None:
    """Write some of the late events of one call, in their order."""
    seq, bodies = late_events.pop(draw(st.integers(0, len(late_events) - 1)))
    count = draw(st.integers(1, len(bodies)))
    trace.events += [Event(body, seq) for body in bodies[:count]]
    if bodies[count:]:
        late_events.append((seq, bodies[count:]))


def batches(data: st.DataObject, records_returned: Records) -> list[Records]:
    cuts = data.draw(st.lists(st.integers(0, len(records_returned)), max_size=8).map(sorted))
    return np.split(records_returned, cuts)


@given(st.data(), traces())
def test_late_accesses_are_returned_in_order_of_calls(
    data: st.DataObject, trace: WrittenTrace
) -> None:
    buffer = ReorderBuffer()
    records_returned = [buffer.feed(batch) for batch in batches(data, trace.records)]
    records_returned.append(buffer.flush())

    assert events_of(np.concatenate(records_returned)) == trace.expected
    assert buffer.never_read_count == trace.never_read_count
    assert buffer.held_count == 0


@given(traces())
def test_whole_trace_is_reordered_at_once(trace: WrittenTrace) -> None:
    records_returned, never_read_count = reorder_records(trace.records)

    assert (events_of(records_returned), never_read_count) == (
        trace.expected,
        trace.never_read_count,
    )


@given(st.data(), traces(), st.integers(0, 20))
def test_held_records_are_bounded_and_only_late_accesses_are_lost(
    data: st.DataObject, trace: WrittenTrace, max_held: int
) -> None:
    buffer, records_returned = ReorderBuffer(max_held=max_held), list[Event]()
    for batch in batches(data, trace.records):
        records_returned += events_of(buffer.feed(batch))
        assert buffer.held_count <= max_held
    records_returned += events_of(buffer.flush())

    assert [event.seq for event in records_returned] == sorted(
        event.seq for event in records_returned
    )
    # Launches that were given up keep their assumed accesses; no other record is lost.
    other_events = [
        event for event in records_returned if not isinstance(event.body, Access | Accessed)
    ]
    assert other_events == [e for e in trace.expected if not isinstance(e.body, Access | Accessed)]
    incomplete_count = buffer.never_read_count + buffer.given_up_count
    assert incomplete_count >= trace.never_read_count
    assert incomplete_count or records_returned == trace.expected


def test_records_without_pending_launches_are_returned_unchanged() -> None:
    buffer = ReorderBuffer()
    records_of_two_launches = records(
        Event(Launch(1, ""), 1), Event(Access(0, 8, READ, Precision.ASSUMED), 1)
    )

    assert buffer.feed(records_of_two_launches) is records_of_two_launches
    assert buffer.held_count == 0


def test_records_after_pending_launch_are_held() -> None:
    buffer = ReorderBuffer()

    records_before = buffer.feed(
        records(Event(Fill(1, 0, 8), 1), Event(LAUNCH, 2), Event(Fill(2, 0, 8), 3))
    )
    assert [event.seq for event in events_of(records_before)] == [1]
    assert buffer.held_count == 2
    records_after = buffer.feed(records(Event(Access(0, 8, WRITE), 2), Event(Accessed(), 2)))
    assert [event.seq for event in events_of(records_after)] == [2, 2, 2, 3]


def test_accesses_of_given_up_launch_are_dropped() -> None:
    buffer = ReorderBuffer(max_held=2)
    assumed = Event(Access(0, 64, WRITE, Precision.ASSUMED), 2)
    buffer.feed(records(Event(LAUNCH, 2), assumed))
    given_up = buffer.feed(records(Event(Fill(1, 0, 8), 3), Event(LAUNCH, 4)))

    assert [event.seq for event in events_of(given_up)] == [2, 2, 3]
    assert (buffer.given_up_count, buffer.never_read_count) == (1, 0)
    assert len(buffer.feed(records(Event(Access(0, 8, WRITE), 2), Event(Accessed(), 2)))) == 0
    call = Event(Fill(1, 0, 8), 1)  # written late, by another thread
    assert events_of(buffer.feed(records(call))) == [call]
    last_call = [Event(LAUNCH, 4), Event(Accessed(), 4)]
    assert events_of(buffer.feed(records(last_call[1]))) == last_call
    assert (buffer.given_up_count, buffer.never_read_count) == (1, 0)


DELAY_BEGIN, DELAY_END = LaunchDelayed(pending=True), LaunchDelayed(pending=False)


def test_delayed_launch_is_before_calls_that_were_recorded_during_the_delay() -> None:
    buffer = ReorderBuffer()
    fill = Event(Fill(2, 0, 1), seq=2)
    launch, accessed = Event(LAUNCH, seq=1), Event(Accessed(), seq=1)

    assert events_of(buffer.feed(records(Event(DELAY_BEGIN, seq=1), fill))) == []
    assert events_of(buffer.feed(records(launch))) == []
    assert events_of(buffer.feed(records(Event(DELAY_END, seq=1)))) == []
    assert events_of(buffer.feed(records(accessed))) == [launch, accessed, fill]


def test_delayed_launch_without_pending_accesses_ends_with_the_delay() -> None:
    launch, fill = Event(Launch(1, ""), seq=1), Event(Fill(2, 0, 1), seq=2)
    written = [Event(DELAY_BEGIN, seq=1), fill, launch, Event(DELAY_END, seq=1)]

    for size in range(1, len(written) + 1):
        buffer = ReorderBuffer()
        returned = [
            event
            for begin in range(0, len(written), size)
            for event in events_of(buffer.feed(records(*written[begin : begin + size])))
        ]
        assert returned == [launch, fill]
        assert buffer.held_count == 0


def test_delay_of_failed_launch_leaves_no_event() -> None:
    fill = Event(Fill(2, 0, 1), seq=2)
    ordered, never_read_count = reorder_records(
        records(Event(DELAY_BEGIN, seq=1), fill, Event(DELAY_END, seq=1))
    )
    assert (events_of(ordered), never_read_count) == ([fill], 0)


def test_delay_that_never_ends_holds_records_until_the_end_of_the_trace() -> None:
    fill = Event(Fill(2, 0, 1), seq=2)
    ordered, never_read_count = reorder_records(records(Event(DELAY_BEGIN, seq=1), fill))
    assert (events_of(ordered), never_read_count) == ([fill], 1)
