"""The layout at a moment, compared with the simulated allocator and with examples."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given
from memory import builders
from memory.builders import KIB, MIB, Block, Entry, Segment, alloc, freed
from memory.history import History
from memory.strategies import LAW, garbage, recordings

from cudakit.memory.replay import replay
from cudakit.memory.replay.layout import Layout, live_at
from cudakit.memory.snapshot import BlockState, DeviceTrace, SegmentKind
from cudakit.torch_rules.actions import Action

BASE = 0x7F00_0000_0000


def lay_out(trace: DeviceTrace, moment: int) -> Layout:
    return replay(builders.snapshot(trace), trace).layout_at(moment)


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
def test_layout_equals_the_allocators_at_every_moment(history: History) -> None:
    assume(history.determines_every_size())
    replayed = history.replay()
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
def test_layout_streams_pools_and_kinds_equal_the_allocators(history: History) -> None:
    replayed = history.replay()
    for moment, expected_state in enumerate(history.expected_states):
        found = replayed.layout_at(moment).segments
        assert found.stream.tolist() == [segment.stream for segment in expected_state.segments]
        assert found.pool.tolist() == [segment.pool for segment in expected_state.segments]
        for kind, segment in zip(found.kind.tolist(), expected_state.segments, strict=True):
            empty = segment.expandable and not segment.blocks
            assert kind == segment.kind or (kind == SegmentKind.UNKNOWN and empty)


@LAW
@given(recordings(pools=2))
def test_blocks_and_free_blocks_fill_their_segments(history: History) -> None:
    replayed = history.replay()
    for moment in range(len(history.entries) + 1):
        layout = replayed.layout_at(moment)
        together = layout.used_by_segment() + layout.free_by_segment()
        assert together.tolist() == layout.segments.size.tolist()


@LAW
@given(garbage())
def test_inconsistent_traces_have_a_layout(trace: DeviceTrace) -> None:
    replayed = replay(builders.snapshot(trace), trace)
    for moment in range(len(trace.events) + 1):
        layout = replayed.layout_at(moment)
        assert (layout.free_block_size > 0).all()
        assert (layout.block_offset >= 0).all()
        assert (layout.free_by_segment() <= layout.segments.size).all()


def test_layout_has_a_block_from_its_allocation_to_its_free() -> None:
    trace = builders.trace([alloc(BASE, 512), *freed(BASE, 512)], [Segment(BASE, 2 * MIB)])
    replayed = replay(builders.snapshot(trace), trace)
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
