"""Free memory in segments, and the blocks that keep segments in use."""

from __future__ import annotations

import pytest
from hypothesis import given
from memory import builders
from memory.builders import KIB, MIB, Block, Segment
from memory.history import History
from memory.simulator import Allocator
from memory.strategies import LAW, recordings

from cudakit.memory.analyze import MemorySpec, analyze
from cudakit.memory.result import DeviceMemory, Fragmentation
from cudakit.memory.snapshot import BlockState, SegmentKind, Snapshot

BASE = 0x7F00_0000_0000


def device(snapshot: Snapshot, at: str | int = "end") -> DeviceMemory:
    return analyze([snapshot], MemorySpec(at=at)).devices[0]


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
def test_free_and_used_bytes_sum_to_reserved_bytes(history: History) -> None:
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
def test_free_bytes_are_in_segments_in_use_or_in_empty_segments(history: History) -> None:
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
