from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cudakit.core.sanitize.reorder_buffer import ReorderBuffer, reordered
from cudakit.trace.events import Access, Accessed, Event, Fact, Fill, GraphLaunch, Launch
from cudakit.trace.kinds import Known, Mode
from cudakit.trace.layout import Records, pack, unpack

READ, WRITE = Mode.READ, Mode.WRITE
LAUNCH = Launch(1, "", pending=True)
STRINGS = ("",)


@dataclass(frozen=True, slots=True)
class Call:
    """A call, what is told of it at once, and what comes later, all of it or only some."""

    facts: Sequence[Fact]
    late: Sequence[Fact] = ()
    all_told: bool = True

    @property
    def is_replaced(self) -> bool:
        return Accessed(exact=True) in self.late

    def reordered(self) -> Iterator[Fact]:
        """Yield what stands, as if it were told at once."""
        for fact in (*self.facts, *self.late):
            if not (isinstance(fact, Access) and fact.known >= Known.ASSUMED and self.is_replaced):
                yield fact


@dataclass(slots=True)
class Told:
    """A trace as it is written: what is late somewhere behind its call."""

    events: list[Event] = field(default_factory=list)
    expected: list[Event] = field(default_factory=list)
    never_told: int = 0

    @property
    def records(self) -> Records:
        return records(*self.events)


def records(*events: Event) -> Records:
    return pack(events, STRINGS.index)


def told(found: Records) -> list[Event]:
    return list(unpack(found, STRINGS))


def accesses(*known: Known) -> st.SearchStrategy[list[Access]]:
    made = st.builds(
        Access, st.integers(0, 99), st.just(100), st.just(WRITE), st.sampled_from(known)
    )
    return st.lists(made, max_size=3)


@st.composite
def launches(draw: st.DrawFn) -> Call:
    assumed = draw(accesses(Known.ASSUMED, Known.UNCERTAIN))
    done = draw(accesses(Known.EXACT, Known.SUMMARY))
    if draw(st.booleans()):
        return Call([LAUNCH, *assumed], [*done, Accessed(exact=draw(st.booleans()))])
    return Call([LAUNCH, *assumed], done, all_told=False)


@st.composite
def graph_launches(draw: st.DrawFn) -> Call:
    nodes = draw(st.lists(accesses(Known.EXACT), min_size=1, max_size=3))
    count = draw(st.integers(0, len(nodes)))
    late: list[Fact] = []
    for node, done in enumerate(nodes[:count], start=1):
        late += [*done, Accessed(node, draw(st.booleans()))]
    launch = [GraphLaunch(1, 1, 1, pending=len(nodes)), *draw(accesses(Known.ASSUMED))]
    return Call(launch, late, all_told=count == len(nodes))


def calls() -> st.SearchStrategy[Call]:
    at_once = st.just(Call([Fill(1, 0, 8)])) | st.builds(
        lambda some: Call([Launch(1, ""), *some]), accesses(Known.ASSUMED, Known.EXACT)
    )
    return at_once | launches() | graph_launches()


@st.composite
def traces(draw: st.DrawFn) -> Told:
    trace, late = Told(), list[tuple[int, Sequence[Fact]]]()
    for seq, call in enumerate(draw(st.lists(calls(), max_size=12)), start=1):
        trace.events += [Event(fact, seq) for fact in call.facts]
        trace.expected += [Event(fact, seq) for fact in call.reordered()]
        trace.never_told += not call.all_told
        if call.late:
            late.append((seq, call.late))
        while late and draw(st.booleans()):
            _tell_some(draw, trace, late)
    while late:
        _tell_some(draw, trace, late)
    return trace


def _tell_some(draw: st.DrawFn, trace: Told, late: list[tuple[int, Sequence[Fact]]]) -> None:
    """Tell a part of what is late of one call, in its order."""
    seq, facts = late.pop(draw(st.integers(0, len(late) - 1)))
    count = draw(st.integers(1, len(facts)))
    trace.events += [Event(fact, seq) for fact in facts[:count]]
    if facts[count:]:
        late.append((seq, facts[count:]))


def batches(data: st.DataObject, found: Records) -> list[Records]:
    cuts = data.draw(st.lists(st.integers(0, len(found)), max_size=8).map(sorted))
    return np.split(found, cuts)


@given(st.data(), traces())
def test_late_accesses_are_returned_in_order_of_calls(data: st.DataObject, trace: Told) -> None:
    late = ReorderBuffer()
    found = [late.feed(batch) for batch in batches(data, trace.records)]
    found.append(late.flush())

    assert told(np.concatenate(found)) == trace.expected
    assert late.never_read == trace.never_told
    assert late.held == 0


@given(traces())
def test_whole_trace_is_reordered_at_once(trace: Told) -> None:
    found, never_read = reordered(trace.records)

    assert (told(found), never_read) == (trace.expected, trace.never_told)


@given(st.data(), traces(), st.integers(0, 20))
def test_held_records_are_bounded_and_only_late_accesses_are_lost(
    data: st.DataObject, trace: Told, most_held: int
) -> None:
    late, found = ReorderBuffer(most_held=most_held), list[Event]()
    for batch in batches(data, trace.records):
        found += told(late.feed(batch))
        assert late.held <= most_held
    found += told(late.flush())

    assert [event.seq for event in found] == sorted(event.seq for event in found)
    # What was given up stands as it was assumed; of the others all is there.
    whole = [event for event in found if not isinstance(event.fact, Access | Accessed)]
    assert whole == [e for e in trace.expected if not isinstance(e.fact, Access | Accessed)]
    assert late.never_read >= trace.never_told
    assert late.never_read or found == trace.expected


def test_records_without_pending_launches_are_returned_unchanged() -> None:
    late = ReorderBuffer()
    some = records(Event(Launch(1, ""), 1), Event(Access(0, 8, READ, Known.ASSUMED), 1))

    assert late.feed(some) is some
    assert late.held == 0


def test_records_after_pending_launch_are_held() -> None:
    late = ReorderBuffer()

    before = late.feed(records(Event(Fill(1, 0, 8), 1), Event(LAUNCH, 2), Event(Fill(2, 0, 8), 3)))
    assert [event.seq for event in told(before)] == [1]
    assert late.held == 2
    after = late.feed(records(Event(Access(0, 8, WRITE), 2), Event(Accessed(), 2)))
    assert [event.seq for event in told(after)] == [2, 2, 2, 3]


def test_accesses_of_given_up_launch_are_dropped() -> None:
    late = ReorderBuffer(most_held=2)
    assumed = Event(Access(0, 64, WRITE, Known.ASSUMED), 2)
    late.feed(records(Event(LAUNCH, 2), assumed))
    given_up = late.feed(records(Event(Fill(1, 0, 8), 3), Event(LAUNCH, 4)))

    assert [event.seq for event in told(given_up)] == [2, 2, 3]
    assert late.never_read == 1
    assert len(late.feed(records(Event(Access(0, 8, WRITE), 2), Event(Accessed(), 2)))) == 0
    call = Event(Fill(1, 0, 8), 1)  # of another thread, which was slow to write it
    assert told(late.feed(records(call))) == [call]
    last = [Event(LAUNCH, 4), Event(Accessed(), 4)]
    assert told(late.feed(records(last[1]))) == last
    assert late.never_read == 1
