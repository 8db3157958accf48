"""The replay, compared with a simulated allocator that knows the state at every moment."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from memory import builders
from memory.builders import (
    GIB,
    KIB,
    MIB,
    Block,
    Entry,
    Segment,
    alloc,
    free_completed,
    free_requested,
    freed,
    oom,
    segment_alloc,
    segment_free,
)
from memory.simulated_history import SimulatedHistory
from memory.strategies import LAW, garbage, histories, recordings

from cudakit.memory.history import Allocations, History, Layout, live_at, reconstruct
from cudakit.memory.lifetimes import Contradictions
from cudakit.memory.snapshot import BEFORE_TRACE, HOST, Action, BlockState, DeviceTrace, SegmentKind

CURVES = ("requested", "allocated", "active", "reserved")
BASE = 0x7F00_0000_0000


def replayed(trace: DeviceTrace) -> History:
    return reconstruct(builders.snapshot(trace), trace)


def intervals(allocations: Allocations) -> list[tuple[int, int, int]]:
    columns = (allocations.begin, allocations.free_request, allocations.end)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def rows(allocations: Allocations) -> list[tuple[int, ...]]:
    names = ("address", "size", "requested", "stream", "pool", "stack")
    names += ("begin", "free_request", "end")
    return sorted(zip(*(getattr(allocations, n).tolist() for n in names), strict=True))


# Properties of complete and shortened recordings.


@LAW
@given(recordings(pools=3))
def test_curves_equal_the_allocators_totals_at_every_moment(history: SimulatedHistory) -> None:
    assume(history.determines_every_size())
    curves = history.reconstruct().curves
    for name in CURVES:
        assert getattr(curves, name).tolist() == [
            getattr(expected_state, name) for expected_state in history.expected_states
        ]


@LAW
@given(recordings(pools=3))
def test_allocations_equal_the_allocators(history: SimulatedHistory) -> None:
    assume(history.determines_every_size())
    lifetimes = [
        (
            lifetime.address,
            lifetime.size,
            lifetime.requested,
            lifetime.stream,
            lifetime.pool,
            history.knowable_stack(lifetime),
            lifetime.begin,
            lifetime.free_request,
            lifetime.end,
        )
        for lifetime in history.lifetimes
    ]
    assert rows(history.reconstruct().allocations) == sorted(lifetimes)


@LAW
@given(recordings(pools=3))
def test_traces_of_an_allocator_have_no_contradictions(history: SimulatedHistory) -> None:
    assert history.reconstruct().inconsistencies == Contradictions()


@LAW
@given(histories())
def test_trace_of_an_empty_allocator_is_complete(history: SimulatedHistory) -> None:
    assert history.reconstruct().begins_complete


@LAW
@given(recordings(), st.integers(0, 30))
def test_truncated_trace_keeps_its_curves(history: SimulatedHistory, n: int) -> None:
    assume(history.determines_every_size())
    shorter = history.last(min(n, len(history.entries)))
    assume(shorter.determines_every_size())
    long, short = history.reconstruct().curves, shorter.reconstruct().curves
    kept = len(shorter.entries) + 1
    for name in CURVES:
        assert getattr(long, name)[-kept:].tolist() == getattr(short, name).tolist()


# Properties of recordings with missing entries.


def entries_of(history: SimulatedHistory, action: Action) -> set[int]:
    return {i for i, entry in enumerate(history.entries) if entry.action == action}


def check_end(found: History, history: SimulatedHistory) -> None:
    for name in CURVES:
        assert getattr(found.curves, name)[-1] == getattr(history.expected_states[-1], name)


def check_agrees_or_says_so(history: SimulatedHistory) -> None:
    found = history.reconstruct()
    check_end(found, history)
    if found.inconsistencies.total == 0 and found.begins_complete:
        for name in CURVES:
            expected = [getattr(expected_state, name) for expected_state in history.expected_states]
            assert getattr(found.curves, name).tolist() == expected


@LAW
@given(histories(pools=2), st.integers(0, 500))
def test_lost_event_is_counted(history: SimulatedHistory, n: int) -> None:
    assume(history.entries)
    check_agrees_or_says_so(history.without({n % len(history.entries)}))


@LAW
@given(histories(pools=2), st.sets(st.integers(0, 100)))
def test_end_is_exact_despite_lost_events(history: SimulatedHistory, lost: set[int]) -> None:
    left = history.without(lost)
    check_end(left.reconstruct(), left)


@pytest.mark.parametrize("action", [a for a in Action if a not in (Action.UNKNOWN, Action.FREE)])
@settings(max_examples=20, deadline=None)
@given(history=histories())
def test_skipped_kind_of_event_is_counted(action: Action, history: SimulatedHistory) -> None:
    check_agrees_or_says_so(history.without(entries_of(history, action)))


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        (Action.FREE_COMPLETED, "lost_frees"),
        (Action.FREE_REQUESTED, "lost_requests"),
        (Action.ALLOC, "lost_allocations"),
    ],
)
def test_skipped_action_is_counted_by_its_kind(action: Action, kind: str) -> None:
    entries = [
        segment_alloc(BASE, 2 * MIB),
        *(entry for _ in range(3) for entry in (alloc(BASE, 512), *freed(BASE, 512))),
    ]
    kept = [entry for entry in entries if entry.action != action]
    found = replayed(builders.trace(kept, [Segment(BASE, 2 * MIB)])).inconsistencies
    assert getattr(found, kind) >= 2


@LAW
@given(garbage())
def test_inconsistent_traces_end_in_the_final_state(
    trace: DeviceTrace,
) -> None:
    curves = replayed(trace).curves
    blocks = trace.blocks
    active = blocks.state != BlockState.INACTIVE
    assert curves.requested[-1] == blocks.requested[active].sum()
    assert curves.active[-1] == blocks.size[active].sum()
    assert curves.allocated[-1] == blocks.size[blocks.state == BlockState.ALLOCATED].sum()
    assert curves.reserved[-1] == trace.segments.size.sum()


# Examples: one allocation.


def test_trace_without_events_has_one_moment() -> None:
    block = Block(BASE, 512, 100)
    found = replayed(builders.trace([], [Segment(BASE, 2 * MIB, [block])]))
    assert found.n_events == 0
    assert found.curves.requested.tolist() == [100]
    assert found.curves.reserved.tolist() == [2 * MIB]
    assert intervals(found.allocations) == [(BEFORE_TRACE, 0, 0)]


def test_empty_trace_is_complete() -> None:
    found = replayed(builders.trace())
    assert found.begins_complete
    assert found.curves.active.tolist() == [0]


def test_reused_address_is_another_allocation() -> None:
    entries = [alloc(BASE, 100), *freed(BASE, 100), alloc(BASE, 200)]
    found = replayed(builders.trace(entries, [Segment(BASE, 2 * MIB, [Block(BASE, 512, 200)])]))
    assert intervals(found.allocations) == [(0, 1, 2), (3, 4, 4)]
    assert found.curves.requested.tolist() == [0, 100, 100, 0, 200]
    assert found.curves.allocated.tolist() == [0, 512, 0, 0, 512]


def test_block_freed_without_an_allocation_is_from_before_the_trace() -> None:
    found = replayed(builders.trace(freed(BASE, 100), [Segment(BASE, 2 * MIB)]))
    assert intervals(found.allocations) == [(BEFORE_TRACE, 0, 1)]
    assert found.inconsistencies.total == 0
    assert not found.begins_complete


def test_free_requested_before_the_trace_can_complete_in_it() -> None:
    found = replayed(builders.trace([free_completed(BASE, 100)], [Segment(BASE, 2 * MIB)]))
    assert intervals(found.allocations) == [(BEFORE_TRACE, BEFORE_TRACE, 0)]
    assert found.curves.allocated.tolist() == [0, 0]
    assert found.curves.active.tolist() == [512, 0]


def test_free_pending_during_the_whole_trace_counts_as_active_only() -> None:
    pending = Block(BASE, 512, 100, BlockState.PENDING_FREE)
    trace = builders.trace([Entry(Action.SNAPSHOT)], [Segment(BASE, 2 * MIB, [pending])])
    found = replayed(trace)
    assert intervals(found.allocations) == [(BEFORE_TRACE, BEFORE_TRACE, 1)]
    assert found.curves.allocated.tolist() == [0, 0]
    assert found.curves.active.tolist() == [512, 512]
    assert found.inconsistencies.total == 0


def test_single_free_entry_is_both_steps() -> None:
    entries = [alloc(BASE, 100), Entry(Action.FREE, BASE, 100)]
    found = replayed(builders.trace(entries, [Segment(BASE, 2 * MIB)]))
    assert intervals(found.allocations) == [(0, 1, 1)]
    assert found.inconsistencies.total == 0


def test_request_of_0_bytes_has_a_block() -> None:
    entries = [alloc(BASE, 0), *freed(BASE, 0)]
    found = replayed(builders.trace(entries, [Segment(BASE, 2 * MIB)]))
    assert found.curves.requested.tolist() == [0, 0, 0, 0]
    assert found.curves.active.tolist() == [0, 512, 512, 0]


def test_pinned_host_segment_is_one_block() -> None:
    entries = [segment_alloc(BASE, 4 * MIB), alloc(BASE, 4 * MIB)]
    final = [Segment(BASE, 4 * MIB, [Block(BASE, 4 * MIB)])]
    found = replayed(builders.trace(entries, final, device=HOST))
    assert found.curves.active.tolist() == [0, 0, 4 * MIB]
    assert found.inconsistencies.total == 0


def test_failed_allocation_changes_no_curve() -> None:
    found = replayed(builders.trace([oom(GIB, device_free=BASE)], [Segment(BASE, 2 * MIB)]))
    assert found.curves.active.tolist() == [0, 0]
    assert len(found.allocations) == 0


def test_stack_comes_from_the_allocation_or_the_block_not_from_the_free() -> None:
    entries = [
        *freed(BASE, 512, stack=1, stream=1),
        alloc(BASE, 512, stack=2, stream=1),
    ]
    blocks = [Block(BASE, 512, stack=2), Block(BASE + KIB, 512, stack=3)]
    found = replayed(builders.trace(entries, [Segment(BASE, 2 * MIB, blocks, stream=1)]))
    assert found.allocations.stack.tolist() == [0, 2, 3]
    assert found.allocations.stream.tolist() == [1, 1, 1]
    assert found.allocations.source.tolist() == [0, 2, -1]


def test_stack_of_a_live_block_replaces_a_missing_one() -> None:
    final = [Segment(BASE, 2 * MIB, [Block(BASE, 512, stack=3)])]
    found = replayed(builders.trace([alloc(BASE, 512)], final))
    assert found.allocations.stack.tolist() == [3]


def test_stack_of_a_live_block_precedes_that_of_its_event() -> None:
    final = [Segment(BASE, 2 * MIB, [Block(BASE, 512, stack=3)])]
    found = replayed(builders.trace([alloc(BASE, 512, stack=1)], final))
    assert found.allocations.stack.tolist() == [3]


def test_pool_comes_from_the_event_else_from_the_segment() -> None:
    other = BASE + 64 * MIB
    entries = [
        alloc(other, 2 * MIB, pool=3),
        segment_alloc(BASE, 20 * MIB),
        alloc(BASE, 2 * MIB),
        *freed(BASE, 2 * MIB),
        segment_free(BASE, 20 * MIB),
        segment_alloc(BASE, 20 * MIB),
        alloc(BASE, 2 * MIB),
    ]
    final = [
        Segment(BASE, 20 * MIB, [Block(BASE, 2 * MIB)], pool=2),
        Segment(other, 20 * MIB, [Block(other, 2 * MIB)], pool=3),
    ]
    found = replayed(builders.trace(entries, final)).allocations
    by_begin = np.argsort(found.begin)
    assert found.pool[by_begin].tolist() == [3, 0, 2]


# Examples: contradictions.


def test_allocation_at_a_live_address_is_a_lost_free() -> None:
    entries = [alloc(BASE, 512), alloc(BASE, 1024)]
    found = replayed(builders.trace(entries, [Segment(BASE, 2 * MIB, [Block(BASE, 1024)])]))
    assert found.inconsistencies == Contradictions(lost_frees=1)
    assert found.curves.active.tolist() == [0, 512, 1024]


def test_allocation_missing_at_the_end_is_a_lost_free() -> None:
    found = replayed(builders.trace([alloc(BASE, 512)], [Segment(BASE, 2 * MIB)]))
    assert found.inconsistencies == Contradictions(lost_frees=1)
    assert found.curves.active[-1] == 0


def test_live_block_at_a_freed_address_is_a_lost_allocation() -> None:
    entries = [alloc(BASE, 512), *freed(BASE, 512)]
    found = replayed(builders.trace(entries, [Segment(BASE, 2 * MIB, [Block(BASE, 512)])]))
    assert found.inconsistencies == Contradictions(lost_allocations=1)
    assert found.curves.active[-1] == 512


def test_lost_allocation_begins_at_the_previous_free() -> None:
    entries = [*freed(BASE, 512), *freed(BASE, 512), free_completed(BASE, 512)]
    found = replayed(builders.trace(entries, [Segment(BASE, 2 * MIB)]))
    assert found.inconsistencies == Contradictions(lost_allocations=2, lost_requests=1)
    assert intervals(found.allocations) == [(BEFORE_TRACE, 0, 1), (1, 2, 3), (3, 4, 4)]


def test_completion_without_a_request_is_a_lost_request() -> None:
    entries = [alloc(BASE, 512), free_completed(BASE, 512)]
    found = replayed(builders.trace(entries, [Segment(BASE, 2 * MIB)]))
    assert found.inconsistencies == Contradictions(lost_requests=1)
    assert intervals(found.allocations) == [(0, 1, 1)]


def test_block_in_use_after_its_free_request_is_a_contradiction() -> None:
    entries = [alloc(BASE, 512), free_requested(BASE, 512)]
    found = replayed(builders.trace(entries, [Segment(BASE, 2 * MIB, [Block(BASE, 512)])]))
    assert found.inconsistencies == Contradictions(lost_requests=1)
    assert found.curves.allocated[-1] == 512


def test_contradicting_sizes_are_counted_and_the_final_state_wins() -> None:
    entries = [alloc(BASE, 100), alloc(BASE + KIB, 300), free_requested(BASE + KIB, 301)]
    pending = Block(BASE + KIB, 512, 301, BlockState.PENDING_FREE)
    final = [Segment(BASE, 2 * MIB, [Block(BASE, 512, 200), pending])]
    found = replayed(builders.trace(entries, final))
    assert found.inconsistencies == Contradictions(sizes=3)
    assert found.curves.requested[-1] == 501


def test_contradictions_of_segments_and_mappings_are_summed() -> None:
    page = 20 * MIB
    entries = [
        segment_free(BASE, 2 * MIB),
        segment_free(BASE, 2 * MIB),
        Entry(Action.SEGMENT_UNMAP, BASE + page, page),
        Entry(Action.SEGMENT_UNMAP, BASE + page, page),
    ]
    assert replayed(builders.trace(entries)).inconsistencies == Contradictions(segments=2)


def test_moments_with_more_active_than_reserved_are_counted() -> None:
    entries = [alloc(BASE, 512), *freed(BASE, 512), alloc(BASE, 512), *freed(BASE, 512)]
    found = replayed(builders.trace(entries))
    assert found.inconsistencies == Contradictions(over_reserved=4)


# --- The layout at a moment, compared with the simulated allocator and with examples ---------------


def lay_out(trace: DeviceTrace, moment: int) -> Layout:
    return reconstruct(builders.snapshot(trace), trace).layout_at(moment)


def blocks(layout: Layout) -> list[tuple[int, ...]]:
    address = layout.segments.address[layout.block_segment] + layout.block_offset.astype(np.uint64)
    columns = (address, layout.block_size, layout.block_requested, layout.block_pending)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def holes(layout: Layout) -> list[tuple[int, int]]:
    address = layout.segments.address[layout.free_block_segment] + layout.free_block_offset.astype(
        np.uint64
    )
    return sorted(zip(address.tolist(), layout.free_block_size.tolist(), strict=True))


def gaps(segment: Segment) -> list[tuple[int, int]]:
    found, place = [], segment.address
    for block in segment.blocks:
        found.append((place, block.address - place))
        place = block.address + block.size
    found.append((place, segment.address + segment.size - place))
    return [gap for gap in found if gap[1]]


@LAW
@given(recordings(pools=3))
def test_layout_equals_the_allocators_at_every_moment(history: SimulatedHistory) -> None:
    assume(history.determines_every_size())
    replayed = history.reconstruct()
    for moment, expected_state in enumerate(history.expected_states):
        layout = replayed.layout_at(moment)
        found = layout.segments
        held = [block for segment in expected_state.segments for block in segment.blocks]
        assert found.address.tolist() == [segment.address for segment in expected_state.segments]
        assert found.size.tolist() == [segment.size for segment in expected_state.segments]
        assert blocks(layout) == sorted(
            (b.address, b.size, b.requested, b.state == BlockState.PENDING_FREE) for b in held
        )
        assert holes(layout) == sorted(gap for s in expected_state.segments for gap in gaps(s))


@LAW
@given(recordings(pools=3))
def test_layout_streams_pools_and_kinds_equal_the_allocators(history: SimulatedHistory) -> None:
    replayed = history.reconstruct()
    for moment, expected_state in enumerate(history.expected_states):
        found = replayed.layout_at(moment).segments
        assert found.stream.tolist() == [segment.stream for segment in expected_state.segments]
        assert found.pool.tolist() == [segment.pool for segment in expected_state.segments]
        for kind, segment in zip(found.kind.tolist(), expected_state.segments, strict=True):
            empty = segment.expandable and not segment.blocks
            assert kind == segment.kind or (kind == SegmentKind.UNKNOWN and empty)


@LAW
@given(recordings(pools=2))
def test_blocks_and_free_blocks_fill_their_segments(history: SimulatedHistory) -> None:
    replayed = history.reconstruct()
    for moment in range(len(history.entries) + 1):
        layout = replayed.layout_at(moment)
        together = layout.used_by_segment() + layout.free_by_segment()
        assert together.tolist() == layout.segments.size.tolist()


@LAW
@given(garbage())
def test_inconsistent_traces_have_a_layout(trace: DeviceTrace) -> None:
    replayed = reconstruct(builders.snapshot(trace), trace)
    for moment in range(len(trace.events) + 1):
        layout = replayed.layout_at(moment)
        assert (layout.free_block_size > 0).all()
        assert (layout.block_offset >= 0).all()
        assert (layout.free_by_segment() <= layout.segments.size).all()


def test_layout_has_a_block_from_its_allocation_to_its_free() -> None:
    trace = builders.trace([alloc(BASE, 512), *freed(BASE, 512)], [Segment(BASE, 2 * MIB)])
    replayed = reconstruct(builders.snapshot(trace), trace)
    assert [len(live_at(replayed.allocations, moment)) for moment in range(4)] == [0, 1, 1, 0]
    pending = [replayed.layout_at(moment).block_pending.tolist() for moment in (1, 2)]
    assert pending == [[False], [True]]


def test_empty_segment_is_one_free_block_and_a_full_one_has_none() -> None:
    full = Segment(BASE, 2 * MIB, [Block(BASE, MIB), Block(BASE + MIB, MIB)])
    empty = Segment(BASE + 2 * MIB, 2 * MIB)
    layout = lay_out(builders.trace([], [full, empty]), 0)
    assert holes(layout) == [(BASE + 2 * MIB, 2 * MIB)]
    assert layout.used_by_segment().tolist() == [2 * MIB, 0]


def test_blocks_outside_segments_are_omitted() -> None:
    final = [Segment(BASE, 2 * MIB, [Block(BASE + 2 * MIB - 512, KIB)])]
    below, above = BASE - 512, BASE + 4 * MIB
    entries = [alloc(below, 512), alloc(above, 512), *freed(below, 512), *freed(above, 512)]
    layout = lay_out(builders.trace(entries, final), 2)
    assert len(layout.allocation) == 0
    assert holes(layout) == [(BASE, 2 * MIB)]


def test_layout_without_segments_is_empty() -> None:
    layout = lay_out(builders.trace([alloc(BASE, 512)]), 1)
    assert len(layout.segments) == len(layout.allocation) == len(layout.free_block_size) == 0


def test_unknown_kind_of_an_expandable_segment_follows_from_its_blocks() -> None:
    entries = [*freed(BASE, 512), Entry(Action.SEGMENT_UNMAP, BASE, 20 * MIB)]
    trace = builders.trace(entries)
    assert lay_out(trace, 0).segments.kind.tolist() == [SegmentKind.SMALL]
    assert lay_out(trace, 2).segments.kind.tolist() == [SegmentKind.UNKNOWN]


# --- Sizes of blocks whose remainder was not split off ---------------------------------------------


@LAW
@given(recordings(pools=2))
def test_block_sizes_equal_the_allocators(history: SimulatedHistory) -> None:
    known = {
        (lifetime.address, lifetime.begin, lifetime.end): lifetime.size
        for lifetime in history.lifetimes
        if history.determines_size(lifetime)
    }
    columns = ("address", "begin", "end", "size")
    allocations = history.reconstruct().allocations
    rows = zip(*(getattr(allocations, name).tolist() for name in columns), strict=True)
    found = {tuple(key): size for *key, size in rows}
    assert {key: found[key] for key in known} == known


@LAW
@given(recordings())
def test_sizes_of_freed_blocks_are_marked_as_derived(history: SimulatedHistory) -> None:
    found = history.reconstruct().allocations
    assert found.size_known.tolist() == (found.end == len(history.entries)).tolist()


def sizes(trace: DeviceTrace, **settings: object) -> dict[int, int]:
    snapshot = builders.snapshot(trace, settings=settings)
    found = reconstruct(snapshot, trace).allocations
    return dict(zip((found.address - np.uint64(BASE)).tolist(), found.size.tolist(), strict=True))


def one_block(requested: int, segment: int, **settings: object) -> int:
    entries = [segment_alloc(BASE, segment), alloc(BASE, requested), *freed(BASE, requested)]
    return sizes(builders.trace(entries, [Segment(BASE, segment)]), **settings)[0]


def test_remainder_of_1_mib_at_a_segment_end_is_not_split_off() -> None:
    assert one_block(19 * MIB, 20 * MIB) == 20 * MIB
    assert one_block(19 * MIB - 1, 20 * MIB) == 20 * MIB
    assert one_block(19 * MIB - 512, 20 * MIB) == 19 * MIB - 512


def test_small_blocks_are_always_split() -> None:
    assert one_block(MIB, 2 * MIB) == MIB
    assert one_block(1, 2 * MIB) == 512


def test_blocks_from_the_split_limit_on_are_not_split() -> None:
    assert one_block(30 * MIB, 44 * MIB, max_split_size=30 * MIB) == 44 * MIB
    assert one_block(30 * MIB, 44 * MIB, max_split_size=30 * MIB + 1) == 30 * MIB


def test_blocks_of_expandable_segments_are_always_split() -> None:
    assert one_block(19 * MIB + KIB, 20 * MIB, expandable_segments=True) == 19 * MIB + KIB


def test_block_extends_to_the_next_block_in_use() -> None:
    entries = [
        segment_alloc(BASE, 20 * MIB),
        alloc(BASE, 5 * MIB),
        alloc(BASE + 5 * MIB, 2 * MIB),
        *freed(BASE, 5 * MIB),
        alloc(BASE, 4 * MIB + 100),
        *freed(BASE, 4 * MIB + 100),
    ]
    final = [Segment(BASE, 20 * MIB, [Block(BASE + 5 * MIB, 2 * MIB)])]
    trace = builders.trace(entries, final)
    found = reconstruct(builders.snapshot(trace), trace).allocations
    assert found.size[found.begin == 5].tolist() == [5 * MIB]


def test_block_from_before_the_trace_extends_to_a_later_adjacent_block() -> None:
    behind = BASE + 6 * MIB
    entries = [alloc(behind, 2 * MIB), *freed(BASE, 5 * MIB + 200 * KIB), *freed(behind, 2 * MIB)]
    found = sizes(builders.trace(entries, [Segment(BASE, 20 * MIB)]))
    assert found == {0: 6 * MIB, 6 * MIB: 2 * MIB}


def test_adjacent_blocks_from_before_the_trace_have_exact_sizes() -> None:
    behind = BASE + 6 * MIB
    entries = [*freed(BASE, 5 * MIB + 200 * KIB), *freed(behind, 2 * MIB)]
    found = sizes(builders.trace(entries, [Segment(BASE, 20 * MIB)]))
    assert found == {0: 6 * MIB, 6 * MIB: 2 * MIB}


def test_block_from_before_the_trace_keeps_its_rounded_size() -> None:
    behind = BASE + 6 * MIB
    entries = [*freed(BASE, 5 * MIB + 200 * KIB), alloc(behind, 2 * MIB), *freed(behind, 2 * MIB)]
    trace = builders.trace(entries, [Segment(BASE, 20 * MIB)])
    found = reconstruct(builders.snapshot(trace), trace).allocations
    assert found.size[found.begin == BEFORE_TRACE].tolist() == [5 * MIB + 200 * KIB]
    assert not found.size_known.any()
