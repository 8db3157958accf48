"""Sizes of blocks whose remainder was not split off."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from memory import builders
from memory.builders import KIB, MIB, Block, Segment, alloc, freed, segment_alloc
from memory.simulated_history import SimulatedHistory
from memory.strategies import LAW, recordings

from cudakit.memory.history import reconstruct
from cudakit.memory.snapshot import BEFORE_TRACE, DeviceTrace

BASE = 0x7F00_0000_0000


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
