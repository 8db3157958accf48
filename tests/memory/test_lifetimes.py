"""Steps at addresses, split into lifetimes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory import builders
from memory.builders import MIB, Block, Entry, Segment, alloc, segment_alloc, segment_free
from memory.simulated_history import SimulatedHistory
from memory.strategies import LAW, garbage, recordings

from cudakit.memory.lifetimes import (
    BEGIN,
    COMPLETE,
    REQUEST,
    Lifetimes,
    LifetimeSteps,
    SegmentLifetimes,
    mapped_ranges,
    segment_history,
    sorted_by_address,
    split_into_lifetimes,
)
from cudakit.memory.snapshot import BEFORE_TRACE, Action, DeviceTrace, SegmentKind

Step = tuple[int, int]  # address and step


def ordered(steps: list[Step]) -> LifetimeSteps:
    return sorted_by_address(
        np.arange(len(steps)),
        np.array([address for address, _ in steps], np.uint64),
        np.array([step for _, step in steps], np.uint8),
        np.zeros(len(steps), np.int64),
    )


def lifetimes(steps: list[Step]) -> list[tuple[int, int, int]]:
    found = split_into_lifetimes(ordered(steps))
    columns = (found.begin, found.request, found.complete)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def one_by_one(steps: list[Step]) -> list[tuple[int, int, int]]:
    """Group steps with a simple loop: a step belongs to the open lifetime of its address if it can follow."""
    lifetimes: dict[int, list[dict[int, int]]] = {}
    for event, (address, step) in enumerate(steps):
        own = lifetimes.setdefault(address, [])
        if not own or max(own[-1]) >= step:
            own.append({})
        own[-1][step] = event
    return [
        (lifetime.get(BEGIN, -1), lifetime.get(REQUEST, -1), lifetime.get(COMPLETE, -1))
        for address in sorted(lifetimes)
        for lifetime in lifetimes[address]
    ]


ADDRESSES = st.sampled_from((0, 512, 1024, 1 << 47, (1 << 47) + 513, (1 << 64) - 1))


@LAW
@given(st.lists(st.tuples(ADDRESSES, st.sampled_from((BEGIN, REQUEST, COMPLETE))), max_size=40))
def test_lifetimes_equal_a_naive_implementation(steps: list[Step]) -> None:
    assert lifetimes(steps) == one_by_one(steps)


@LAW
@given(st.lists(ADDRESSES, max_size=40))
def test_steps_are_sorted_by_address_then_time(addresses: list[int]) -> None:
    rows = ordered([(address, BEGIN) for address in addresses])
    assert rows.event.tolist() == sorted(range(len(addresses)), key=lambda i: (addresses[i], i))


def test_complete_lifetime_has_three_events() -> None:
    assert lifetimes([(512, BEGIN), (512, REQUEST), (512, COMPLETE)]) == [(0, 1, 2)]


def test_step_out_of_order_starts_a_new_lifetime() -> None:
    assert lifetimes([(512, BEGIN), (512, COMPLETE), (512, REQUEST), (512, BEGIN)]) == [
        (0, -1, 1),
        (-1, 2, -1),
        (3, -1, -1),
    ]


def test_oldest_and_newest_lifetime_of_each_address_are_marked() -> None:
    found: Lifetimes = split_into_lifetimes(
        ordered([(512, BEGIN), (0, BEGIN), (512, BEGIN), (512, BEGIN)])
    )
    assert found.is_oldest.tolist() == [True, True, False, False]
    assert found.is_newest.tolist() == [True, False, False, True]


def test_no_steps_give_no_lifetimes() -> None:
    assert lifetimes([]) == []


# --- Lifetimes of segments that are not expandable -------------------------------------------------

BASE = 0x7F00_0000_0000
OTHER = BASE + 64 * MIB

Row = tuple[int, ...]


def plain_segments(trace: DeviceTrace) -> SegmentLifetimes:
    return segment_history(trace).plain_segments


def contradictions(trace: DeviceTrace) -> int:
    return segment_history(trace).contradictions


def segment_rows(trace: DeviceTrace) -> list[Row]:
    found = plain_segments(trace)
    columns = (found.address, found.size, found.begin, found.end)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


@LAW
@given(recordings(pools=3))
def test_segments_equal_the_allocators_at_every_moment(history: SimulatedHistory) -> None:
    names = ("address", "size", "stream", "pool", "kind")
    found = plain_segments(history.trace())
    for moment, expected_state in enumerate(history.expected_states):
        now = found.at(moment)
        rows = zip(*(getattr(now, name).tolist() for name in names), strict=True)
        plain = [segment for segment in expected_state.segments if not segment.expandable]
        assert list(rows) == [tuple(getattr(s, name) for name in names) for s in plain]


@LAW
@given(recordings(pools=3))
def test_segments_of_an_allocator_have_no_contradictions(history: SimulatedHistory) -> None:
    assert contradictions(history.trace()) == 0


def test_segment_without_events_exists_during_the_whole_trace() -> None:
    assert segment_rows(builders.trace([Entry(Action.SNAPSHOT)], [Segment(BASE, 2 * MIB)])) == [
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
    assert segment_rows(trace) == [
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
    assert segment_rows(trace) == [(BASE, 2 * MIB, 0, 1)]


def test_final_segment_begins_at_its_last_allocation_or_before_the_trace() -> None:
    entries = [
        segment_alloc(BASE, 2 * MIB),
        segment_free(BASE, 2 * MIB),
        segment_alloc(BASE, 2 * MIB),
    ]
    final = [Segment(BASE, 2 * MIB), Segment(OTHER, 2 * MIB)]
    assert segment_history(builders.trace(entries, final)).final_begin.tolist() == [2, BEFORE_TRACE]


# --- Mapped ranges of expandable segments ----------------------------------------------------------

PAGE = 20 * MIB


def map_(page: int, pages: int = 1, **more: int) -> Entry:
    return Entry(Action.SEGMENT_MAP, BASE + page * PAGE, pages * PAGE, **more)


def unmap(page: int, pages: int = 1, **more: int) -> Entry:
    return Entry(Action.SEGMENT_UNMAP, BASE + page * PAGE, pages * PAGE, **more)


def final(page: int, pages: int = 1, *blocks: Block, stream: int = 0, pool: int = 0) -> Segment:
    address = BASE + page * PAGE
    return Segment(address, pages * PAGE, blocks, stream=stream, pool=pool, expandable=True)


def mapped_at(trace: DeviceTrace, moment: int) -> SegmentLifetimes:
    return segment_history(trace).expandable_at(moment)


def pages_at(trace: DeviceTrace, moment: int) -> list[tuple[int, int]]:
    found = mapped_at(trace, moment)
    rows = zip(found.address.tolist(), found.size.tolist(), strict=True)
    return [((address - BASE) // PAGE, size // PAGE) for address, size in rows]


def range_contradictions(entries: list[Entry], *segments: Segment) -> int:
    return mapped_ranges(builders.trace(entries, segments))[1]


@LAW
@given(recordings(pools=3))
def test_expandable_segments_equal_the_allocators_at_every_moment(
    history: SimulatedHistory,
) -> None:
    trace = history.trace()
    names = ("address", "size", "stream", "pool")
    for moment, expected_state in enumerate(history.expected_states):
        found = mapped_at(trace, moment)
        rows = zip(*(getattr(found, name).tolist() for name in names), strict=True)
        runs = [segment for segment in expected_state.segments if segment.expandable]
        assert list(rows) == [tuple(getattr(run, name) for name in names) for run in runs]
        for kind, run in zip(found.kind.tolist(), runs, strict=True):
            assert kind in (run.kind, SegmentKind.UNKNOWN)


@LAW
@given(recordings(pools=3))
def test_mappings_of_an_allocator_have_no_contradictions(history: SimulatedHistory) -> None:
    assert mapped_ranges(history.trace())[1] == 0


@LAW
@given(garbage())
def test_joined_ranges_never_overlap(trace: DeviceTrace) -> None:
    for moment in range(len(trace.events) + 1):
        found = mapped_at(trace, moment)
        places = list(zip(found.address.tolist(), found.size.tolist(), strict=True))
        for (address, size), (following, _) in itertools.pairwise(places):
            assert address + size <= following


def test_joined_range_grows_with_each_adjacent_mapping() -> None:
    trace = builders.trace([map_(0), map_(1, 2)], [final(0, 3)])
    assert [pages_at(trace, moment) for moment in range(3)] == [[], [(0, 1)], [(0, 3)]]


def test_unmapping_the_middle_splits_a_range_and_mapping_joins_it() -> None:
    trace = builders.trace([unmap(1), map_(1)], [final(0, 3)])
    assert [pages_at(trace, moment) for moment in range(3)] == [
        [(0, 3)],
        [(0, 1), (2, 1)],
        [(0, 3)],
    ]


def test_unmapping_may_cover_several_mappings_and_a_part_of_one() -> None:
    trace = builders.trace([map_(0), map_(1), map_(2, 3), unmap(0, 4)], [final(4)])
    assert [pages_at(trace, moment) for moment in range(5)] == [
        [],
        [(0, 1)],
        [(0, 2)],
        [(0, 5)],
        [(4, 1)],
    ]
    assert mapped_ranges(trace)[1] == 0


def test_addresses_can_be_mapped_for_another_stream_later() -> None:
    entries = [map_(0, stream=1), unmap(0, stream=1), map_(0, stream=2)]
    trace = builders.trace(entries, [final(0, stream=2)])
    assert mapped_at(trace, 1).stream.tolist() == [1]
    assert mapped_at(trace, 3).stream.tolist() == [2]


def test_ranges_of_different_streams_are_not_joined() -> None:
    trace = builders.trace([], [final(0, stream=1), final(1, stream=2)])
    assert pages_at(trace, 0) == [(0, 1), (1, 1)]


def test_unmapped_range_keeps_the_pool_and_kind_of_its_segment() -> None:
    trace = builders.trace([unmap(1)], [final(0, pool=2)])
    before = mapped_at(trace, 0)
    assert before.pool.tolist() == [2]
    assert before.kind.tolist() == [SegmentKind.LARGE]


@pytest.mark.parametrize(
    ("entries", "kind"),
    [
        ([Entry(Action.SEGMENT_MAP, BASE, 2 * MIB)], SegmentKind.SMALL),
        ([Entry(Action.SEGMENT_MAP, BASE, 40 * MIB)], SegmentKind.LARGE),
        ([Entry(Action.SEGMENT_UNMAP, BASE, 6 * MIB)], SegmentKind.SMALL),
        ([Entry(Action.SEGMENT_UNMAP, BASE, 20 * MIB)], SegmentKind.UNKNOWN),
    ],
)
def test_kind_of_a_mapping_follows_from_its_page_size(
    entries: list[Entry], kind: SegmentKind
) -> None:
    mapped = entries[0].action == Action.SEGMENT_MAP
    undone = [Entry(Action.SEGMENT_UNMAP, BASE, entries[0].size)] if mapped else []
    trace = builders.trace([*entries, *undone])
    assert mapped_at(trace, int(mapped)).kind.tolist() == [kind]


def test_mapping_or_unmapping_twice_is_a_contradiction() -> None:
    assert range_contradictions([map_(0), map_(0)], final(0)) == 1
    assert range_contradictions([unmap(0), unmap(0)]) == 1


def test_final_state_that_differs_from_the_mappings_is_a_contradiction() -> None:
    assert range_contradictions([map_(0)]) == 1
    assert range_contradictions([unmap(0)], final(0)) == 1
    assert range_contradictions([map_(0, 2)], final(0)) == 1


def test_mapping_ends_at_the_end_of_the_address_space() -> None:
    last = Entry(Action.SEGMENT_UNMAP, (1 << 64) - 512, 20 * MIB)
    assert mapped_at(builders.trace([last]), 0).size.tolist() == [512]


def test_other_events_do_not_change_mappings() -> None:
    trace = builders.trace([alloc(BASE, 512)], [final(0)])
    assert pages_at(trace, 0) == pages_at(trace, 1) == [(0, 1)]
