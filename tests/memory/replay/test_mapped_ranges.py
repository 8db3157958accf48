"""Mapped ranges of expandable segments."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from memory import builders
from memory.builders import MIB, Block, Entry, Segment, alloc
from memory.history import History
from memory.strategies import LAW, garbage, recordings

from cudakit.memory.replay.mapped_ranges import mapped_ranges
from cudakit.memory.replay.segments import SegmentLifetimes, segment_history
from cudakit.memory.snapshot import DeviceTrace, SegmentKind
from cudakit.torch_rules.actions import Action

BASE = 0x7F00_0000_0000
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


def contradictions(entries: list[Entry], *segments: Segment) -> int:
    return mapped_ranges(builders.trace(entries, segments))[1]


@LAW
@given(recordings(pools=3))
def test_expandable_segments_equal_the_allocators_at_every_moment(history: History) -> None:
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
def test_mappings_of_an_allocator_have_no_contradictions(history: History) -> None:
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
    assert contradictions([map_(0), map_(0)], final(0)) == 1
    assert contradictions([unmap(0), unmap(0)]) == 1


def test_final_state_that_differs_from_the_mappings_is_a_contradiction() -> None:
    assert contradictions([map_(0)]) == 1
    assert contradictions([unmap(0)], final(0)) == 1
    assert contradictions([map_(0, 2)], final(0)) == 1


def test_mapping_ends_at_the_end_of_the_address_space() -> None:
    last = Entry(Action.SEGMENT_UNMAP, (1 << 64) - 512, 20 * MIB)
    assert mapped_at(builders.trace([last]), 0).size.tolist() == [512]


def test_other_events_do_not_change_mappings() -> None:
    trace = builders.trace([alloc(BASE, 512)], [final(0)])
    assert pages_at(trace, 0) == pages_at(trace, 1) == [(0, 1)]
