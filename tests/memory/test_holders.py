"""Memory by call stack and call site at a moment, and allocations over the whole trace."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory import builders
from memory.builders import KIB, MIB, START_US, Block, Segment, alloc, annotated, freed
from memory.simulated_history import SimulatedHistory
from memory.simulator import Allocator
from memory.strategies import LAW, recordings

from cudakit.memory.analyze import analyze
from cudakit.memory.result import Churn, DeviceMemory, Facet, Fragmentation
from cudakit.memory.selection import MemorySpec
from cudakit.memory.snapshot import Action, BlockState, SegmentKind, Snapshot
from cudakit.stacks import Frame

BASE = 0x7F00_0000_0000


def device(snapshot: Snapshot, at: str | int = "end") -> DeviceMemory:
    return analyze([snapshot], MemorySpec(at=at)).devices[0]


def holding(*blocks: Block, **more: object) -> Snapshot:
    entries = [alloc(block.address, block.size, stack=block.stack) for block in blocks]
    return builders.snapshot(builders.trace(entries, [Segment(BASE, 20 * MIB, blocks)]), **more)


def place(number: int, size: int, stack: int) -> Block:
    return Block(BASE + number * MIB, size, stack=stack)


def facet(found: DeviceMemory, name: str) -> dict[str, int]:
    (only,) = [each for each in found.facets if each.name == name]
    return {group.name: group.bytes for group in only.groups}


@LAW
@given(recordings(pools=2), st.integers(0, 200))
def test_holders_and_call_sites_sum_to_active_bytes(history: SimulatedHistory, event: int) -> None:
    at = event % (len(history.entries) + 1) - 1
    found = device(history.snapshot(), at)
    state = found.at.state
    for rows in (found.holders, found.lines):
        assert sum(row.bytes for row in rows) == state.active_bytes
        assert sum(row.count for row in rows) == state.blocks
        assert sum(row.share for row in rows) == pytest.approx(1 if state.active_bytes else 0)
        assert [row.bytes for row in rows] == sorted((row.bytes for row in rows), reverse=True)
    assert sum(row.requested_bytes for row in found.holders) == state.requested_bytes


def test_allocations_of_one_stack_are_one_row() -> None:
    found = device(holding(place(0, KIB, 1), place(1, KIB, 1), place(2, 3 * KIB, 2))).holders
    rows = [(row.stack[row.site].name, row.bytes, row.count) for row in found]
    assert rows == [("place2", 3 * KIB, 1), ("place1", 2 * KIB, 2)]
    assert found[0].share == pytest.approx(0.6)


def test_stacks_with_one_call_site_are_one_row() -> None:
    library = Frame("empty", "/usr/lib/python3/dist-packages/torch/functional.py", 7)
    own = Frame("forward", "model.py", 30)
    other = Frame("init", "model.py", 10)
    found = device(
        holding(
            place(0, KIB, 1),
            place(1, KIB, 2),
            place(2, KIB, 3),
            frames=(own, library, other),
            stacks=((), (0,), (1, 0), (1, 2)),
        )
    )
    assert [(line.frame, line.bytes) for line in found.lines] == [
        (own, 2 * KIB),
        (other, KIB),
    ]
    assert len(found.holders) == 3


def test_allocations_without_a_stack_have_no_call_site() -> None:
    (line,) = device(holding(place(0, KIB, 0))).lines
    assert line.frame is None


def test_holders_depend_on_the_moment() -> None:
    first, second = place(0, KIB, 1), place(1, KIB, 2)
    entries = [
        alloc(first.address, KIB, stack=1),
        *freed(first.address, KIB),
        alloc(second.address, KIB, stack=2),
    ]
    snapshot = builders.snapshot(builders.trace(entries, [Segment(BASE, 20 * MIB, [second])]))
    holders = [device(snapshot, at).holders for at in (-1, 0, 1, 2, 3)]
    names = [[row.stack[row.site].name for row in rows] for rows in holders]
    assert names == [[], ["place1"], ["place1"], [], ["place2"]]


def test_facets_group_memory_by_recorded_property() -> None:
    blocks = [place(i, KIB, 1) for i in range(4)]
    words = ("", "N/A", "0/0", "layer", "parameter")
    entries = [
        alloc(blocks[0].address, KIB, compile_context=2, user_metadata=3),
        alloc(blocks[1].address, KIB, compile_context=1, category=4),
        alloc(blocks[2].address, KIB, compile_context=2),
    ]
    trace = builders.trace(entries, [Segment(BASE, 20 * MIB, blocks)])
    ranges = annotated("step 1", START_US + 1, START_US + 2)
    found = device(builders.snapshot(trace, texts=words, annotations=ranges))
    assert facet(found, "compile_context") == {"0/0": 2 * KIB, "": 2 * KIB}
    assert facet(found, "user_metadata") == {"layer": KIB, "": 3 * KIB}
    assert facet(found, "category") == {"parameter": KIB, "": 3 * KIB}
    assert facet(found, "annotation") == {"step 1": KIB, "": 3 * KIB}


def test_facet_sums_to_active_bytes() -> None:
    blocks = [place(i, (i + 1) * KIB, 1) for i in range(3)]
    ranges = annotated("step 1", START_US, START_US + 1)
    found = device(holding(*blocks, annotations=ranges))
    (only,) = found.facets
    assert only == Facet("annotation", only.groups)
    assert sum(group.bytes for group in only.groups) == found.at.state.active_bytes
    assert sum(group.share for group in only.groups) == pytest.approx(1)


def test_empty_facets_are_omitted() -> None:
    assert device(holding(place(0, KIB, 1))).facets == ()
    words = ("", "N/A")
    entries = [alloc(BASE, KIB, compile_context=1)]
    trace = builders.trace(entries, [Segment(BASE, 2 * MIB, [Block(BASE, KIB)])])
    assert device(builders.snapshot(trace, texts=words)).facets == ()


def churned(snapshot: Snapshot) -> tuple[Churn, ...]:
    return analyze([snapshot], MemorySpec()).devices[0].churn


@LAW
@given(recordings(pools=2))
def test_churn_counts_every_allocation_once(history: SimulatedHistory) -> None:
    found = churned(history.snapshot())
    made = [entry for entry in history.entries if entry.action == Action.ALLOC]
    assert sum(row.count for row in found) == len(made)
    assert sum(row.bytes for row in found) == sum(entry.size for entry in made)
    assert sum(row.share for row in found) == pytest.approx(1 if made else 0)
    assert len(found) == len({entry.stack for entry in made})


def test_stack_with_most_allocated_bytes_comes_first() -> None:
    entries = []
    for stack, size, times in ((1, KIB, 4), (2, MIB, 2)):
        for _ in range(times):
            entries += [alloc(BASE, size, stack=stack), *freed(BASE, size, stack=stack)]
    found = churned(builders.snapshot(builders.trace(entries, [Segment(BASE, 2 * MIB)])))
    rows = [(r.stack[r.site].name, r.bytes, r.count, r.mean_size_bytes) for r in found]
    assert rows == [("place2", 2 * MIB, 2, MIB), ("place1", 4 * KIB, 4, KIB)]


def test_mean_lifetime_covers_freed_allocations_only() -> None:
    entries = [
        alloc(BASE, 512, stack=1, time_us=100),
        alloc(BASE + KIB, 512, stack=1, time_us=100),
        alloc(BASE + 2 * KIB, 512, stack=1, time_us=100),
        *freed(BASE, 512, time_us=110),
        *freed(BASE + KIB, 512, time_us=130),
    ]
    final = [Segment(BASE, 2 * MIB, [Block(BASE + 2 * KIB, 512)])]
    (row,) = churned(builders.snapshot(builders.trace(entries, final)))
    assert row.mean_lifetime_us == 20


def test_mean_lifetime_is_missing_without_frees_or_times() -> None:
    live = builders.trace([alloc(BASE, 512)], [Segment(BASE, 2 * MIB, [Block(BASE, 512)])])
    assert churned(builders.snapshot(live))[0].mean_lifetime_us is None
    ended = builders.trace([alloc(BASE, 512), *freed(BASE, 512)], [Segment(BASE, 2 * MIB)])
    assert churned(builders.snapshot(ended, has_times=False))[0].mean_lifetime_us is None


def test_churn_excludes_allocations_from_before_the_trace() -> None:
    trace = builders.trace(freed(BASE, 512), [Segment(BASE, 2 * MIB, [Block(BASE + KIB, 512)])])
    assert churned(builders.snapshot(trace)) == ()


# --- Free memory in segments, and the blocks that keep segments in use -----------------------------


def measured(*segments: Segment) -> Fragmentation:
    return device(builders.snapshot(builders.trace([], segments))).fragmentation


def large(number: int, *blocks: tuple[int, int, int], **more: object) -> Segment:
    """Return a segment of 20 MiB with blocks of (offset, size, stack), in MiB."""
    base = BASE + number * 20 * MIB
    held = [Block(base + at * MIB, size * MIB, stack=stack) for at, size, stack in blocks]
    return Segment(base, 20 * MIB, held, **more)  # type: ignore[arg-type]


def names(found: Fragmentation) -> list[str]:
    return [pin.stack[pin.site].name for pin in found.pins]


@LAW
@given(recordings(pools=3))
def test_free_and_used_bytes_sum_to_reserved_bytes(history: SimulatedHistory) -> None:
    for at in ("end", "peak"):
        found = device(history.snapshot(), at)
        free, state = found.fragmentation.free_bytes, found.at.state
        assert free + state.active_bytes == state.reserved_bytes
        assert sum(group.free_bytes for group in found.segments) == free
        assert sum(group.used_bytes for group in found.segments) == state.active_bytes
        assert sum(group.reserved_bytes for group in found.segments) == state.reserved_bytes
        assert sum(group.segments for group in found.segments) == state.segments


@LAW
@given(recordings(pools=3))
def test_free_bytes_are_in_segments_in_use_or_in_empty_segments(history: SimulatedHistory) -> None:
    found = device(history.snapshot()).fragmentation
    assert found.stranded_bytes + found.releasable_bytes == found.free_bytes
    assert all(0 < pin.pinned_bytes <= found.stranded_bytes for pin in found.pins)
    assert all(pin.alone_bytes <= pin.pinned_bytes for pin in found.pins)
    assert sum(pin.alone_bytes for pin in found.pins) <= found.stranded_bytes


def test_small_block_keeps_a_whole_segment_in_use() -> None:
    found = measured(large(0, (18, 2, 5)), large(1))
    assert found.free_bytes == 38 * MIB
    assert found.stranded_bytes == 18 * MIB
    assert found.releasable_bytes == 20 * MIB
    assert found.largest_hole_bytes == 20 * MIB
    assert found.holes == 2
    assert found.free_share == pytest.approx(0.95)
    (pin,) = found.pins
    assert (pin.blocks, pin.segments) == (1, 1)
    assert (pin.bytes, pin.pinned_bytes, pin.alone_bytes) == (2 * MIB, 18 * MIB, 18 * MIB)
    assert names(found) == ["place5"]


def test_small_tensors_between_activations_keep_segments_in_use() -> None:
    allocator = Allocator()
    for _ in range(4):
        held = [allocator.alloc(9 * MIB, stack=1) for _ in range(2)]
        allocator.alloc(2 * MIB, stack=2)
        for address in held:
            assert address is not None
            allocator.free(address)
    found = device(allocator.history().snapshot()).fragmentation
    assert names(found) == ["place2"]
    assert found.pins[0].segments * 20 * MIB - found.pins[0].bytes == found.pins[0].pinned_bytes


def test_free_bytes_of_a_segment_with_two_stacks_are_shared() -> None:
    found = measured(large(0, (0, 2, 1), (4, 2, 1), (10, 3, 2)))
    assert {pin.pinned_bytes for pin in found.pins} == {13 * MIB}
    assert {pin.alone_bytes for pin in found.pins} == {0}
    assert sorted(pin.blocks for pin in found.pins) == [1, 2]
    assert [pin.segments for pin in found.pins] == [1, 1]


def test_segments_of_a_stack_include_those_without_free_memory() -> None:
    (pin,) = measured(large(0, (0, 20, 1)), large(1, (0, 2, 1))).pins
    assert (pin.segments, pin.blocks, pin.bytes) == (2, 2, 22 * MIB)
    assert pin.pinned_bytes == 18 * MIB


def test_stacks_with_most_unshared_free_bytes_come_first() -> None:
    together = [large(i, (0, 2, 1), (2, 2, 2)) for i in range(3)]
    found = measured(*together, large(3, (0, 15, 3)))
    assert names(found)[0] == "place3"
    assert found.pins[0].pinned_bytes < found.pins[1].pinned_bytes


def test_full_segments_have_no_pins() -> None:
    found = measured(large(0, (0, 20, 1)))
    assert found.pins == ()
    assert found.free_bytes == found.holes == found.largest_hole_bytes == 0


def test_pending_block_keeps_its_segment_in_use() -> None:
    pending = Block(BASE, 2 * MIB, state=BlockState.PENDING_FREE, stack=4)
    found = measured(Segment(BASE, 20 * MIB, [pending]))
    assert names(found) == ["place4"]


def test_rounding_is_block_sizes_minus_requests() -> None:
    found = measured(Segment(BASE, 2 * MIB, [Block(BASE, KIB, 768), Block(BASE + KIB, KIB, 1024)]))
    assert found.rounding_bytes == 256
    assert found.rounding_share == pytest.approx(0.125)


def test_empty_allocator_has_no_fragmentation() -> None:
    found = measured()
    assert (found.free_share, found.rounding_share) == (0, 0)
    assert found.pins == ()


def test_segments_are_grouped_by_pool_stream_kind_and_expandability_largest_first() -> None:
    small = Segment(BASE + 200 * MIB, 2 * MIB, kind=SegmentKind.SMALL)
    pieces = [
        large(0, (0, 5, 1)),
        large(1, (0, 1, 1)),
        large(2, stream=1, pool=2),
        large(4, expandable=True),
        small,
    ]
    found = device(builders.snapshot(builders.trace([], pieces))).segments
    rows = [(g.pool, g.stream, g.kind, g.expandable, g.segments) for g in found]
    assert rows[0] == ((0, 0), 0, "large", False, 2)
    assert rows[-1] == ((0, 0), 0, "small", False, 1)
    assert set(rows[1:3]) == {((0, 0), 0, "large", True, 1), ((1, 0), 1, "large", False, 1)}
    assert found[0].used_bytes == 6 * MIB
    assert found[0].largest_hole_bytes == 19 * MIB
