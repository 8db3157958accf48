"""Lifetimes of segments that are not expandable."""

from __future__ import annotations

from hypothesis import given
from memory import builders
from memory.builders import MIB, Entry, Segment, segment_alloc, segment_free
from memory.history import History
from memory.strategies import LAW, recordings

from cudakit.memory.replay.lifetimes import BEFORE_TRACE
from cudakit.memory.replay.segments import SegmentLifetimes, segment_history
from cudakit.memory.snapshot import DeviceTrace, SegmentKind
from cudakit.torch_rules.actions import Action

BASE = 0x7F00_0000_0000
OTHER = BASE + 64 * MIB

Row = tuple[int, ...]


def plain_segments(trace: DeviceTrace) -> SegmentLifetimes:
    return segment_history(trace).plain_segments


def contradictions(trace: DeviceTrace) -> int:
    return segment_history(trace).contradictions


def lifetimes(trace: DeviceTrace) -> list[Row]:
    found = plain_segments(trace)
    columns = (found.address, found.size, found.begin, found.end)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


@LAW
@given(recordings(pools=3))
def test_segments_equal_the_allocators_at_every_moment(history: History) -> None:
    names = ("address", "size", "stream", "pool", "kind")
    found = plain_segments(history.trace())
    for moment, expected_state in enumerate(history.expected_states):
        now = found.at(moment)
        rows = zip(*(getattr(now, name).tolist() for name in names), strict=True)
        plain = [segment for segment in expected_state.segments if not segment.expandable]
        assert list(rows) == [tuple(getattr(s, name) for name in names) for s in plain]


@LAW
@given(recordings(pools=3))
def test_segments_of_an_allocator_have_no_contradictions(history: History) -> None:
    assert contradictions(history.trace()) == 0


def test_segment_without_events_exists_during_the_whole_trace() -> None:
    assert lifetimes(builders.trace([Entry(Action.SNAPSHOT)], [Segment(BASE, 2 * MIB)])) == [
        (BASE, 2 * MIB, BEFORE_TRACE, 1)
    ]


def test_reused_segment_address_is_another_segment() -> None:
    entries = [
        segment_free(BASE, 20 * MIB),
        segment_alloc(BASE, 2 * MIB),
        segment_alloc(BASE + 2 * MIB, 2 * MIB),
        segment_free(BASE, 2 * MIB),
    ]
    trace = builders.trace(entries, [Segment(BASE + 2 * MIB, 2 * MIB)])
    assert lifetimes(trace) == [
        (BASE, 2 * MIB, 1, 3),
        (BASE, 20 * MIB, BEFORE_TRACE, 0),
        (BASE + 2 * MIB, 2 * MIB, 2, 4),
    ]
    assert contradictions(trace) == 0


def test_pool_of_a_released_segment_is_the_default_unless_recorded() -> None:
    entries = [
        segment_alloc(BASE, 2 * MIB),
        segment_free(BASE, 2 * MIB),
        segment_alloc(OTHER, 2 * MIB, pool=2),
        segment_free(OTHER, 2 * MIB, pool=2),
    ]
    assert plain_segments(builders.trace(entries)).pool.tolist() == [0, 2]


def test_segment_of_2_mib_belongs_to_the_small_pool() -> None:
    entries = [segment_free(BASE, 2 * MIB), segment_free(OTHER, 20 * MIB)]
    found = plain_segments(builders.trace(entries))
    assert found.kind.tolist() == [SegmentKind.SMALL, SegmentKind.LARGE]


def test_kind_and_pool_of_a_final_segment_come_from_the_file() -> None:
    kept = Segment(BASE, 2 * MIB, kind=SegmentKind.LARGE, pool=2)
    found = plain_segments(builders.trace([segment_alloc(BASE, 2 * MIB)], [kept]))
    assert found.kind.tolist() == [SegmentKind.LARGE]
    assert found.pool.tolist() == [2]


def test_segment_allocated_or_freed_twice_or_resized_is_a_contradiction() -> None:
    twice = [segment_alloc(BASE, 2 * MIB), segment_alloc(BASE, 2 * MIB)]
    assert contradictions(builders.trace(twice, [Segment(BASE, 2 * MIB)])) == 1
    twice = [segment_free(BASE, 2 * MIB), segment_free(BASE, 2 * MIB)]
    assert contradictions(builders.trace(twice)) == 1
    resized = [segment_alloc(BASE, 2 * MIB), segment_free(BASE, 20 * MIB)]
    assert contradictions(builders.trace(resized)) == 1
    assert contradictions(builders.trace(twice[:1], [Segment(BASE, 20 * MIB)])) == 1


def test_segment_that_differs_from_the_final_state_is_a_contradiction() -> None:
    assert contradictions(builders.trace([segment_alloc(BASE, 2 * MIB)])) == 1
    final = [Segment(BASE, 2 * MIB)]
    assert contradictions(builders.trace([segment_free(BASE, 2 * MIB)], final)) == 1
    grown = [segment_alloc(BASE, 2 * MIB)]
    assert contradictions(builders.trace(grown, [Segment(BASE, 20 * MIB)])) == 1


def test_addresses_of_a_freed_segment_can_become_expandable() -> None:
    entries = [
        segment_alloc(BASE, 2 * MIB),
        segment_free(BASE, 2 * MIB),
        Entry(Action.SEGMENT_MAP, BASE, 20 * MIB),
    ]
    trace = builders.trace(entries, [Segment(BASE, 20 * MIB, expandable=True)])
    assert contradictions(trace) == 0
    assert lifetimes(trace) == [(BASE, 2 * MIB, 0, 1)]


def test_final_segment_begins_at_its_last_allocation_or_before_the_trace() -> None:
    entries = [
        segment_alloc(BASE, 2 * MIB),
        segment_free(BASE, 2 * MIB),
        segment_alloc(BASE, 2 * MIB),
    ]
    final = [Segment(BASE, 2 * MIB), Segment(OTHER, 2 * MIB)]
    assert segment_history(builders.trace(entries, final)).final_begin.tolist() == [2, BEFORE_TRACE]
