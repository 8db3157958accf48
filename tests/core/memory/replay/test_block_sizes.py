"""How large the block of a request is: rounding, and what the allocator does not split off."""

from __future__ import annotations

import numpy as np
import pytest
from core.memory import builders
from core.memory.builders import KIB, MIB, Block, Segment, alloc, freed, segment_alloc
from core.memory.history import History
from core.memory.strategies import LAW, recordings
from hypothesis import given
from hypothesis import strategies as st

from cudakit.core.memory.replay import replay
from cudakit.core.memory.replay.block_sizes import max_split, rounded, segment_size
from cudakit.core.memory.replay.lifetimes import BEFORE
from cudakit.core.memory.snapshot import DeviceTrace

BASE = 0x7F00_0000_0000


def round_up(requested: int, divisions: dict[str, int] | None = None) -> int:
    settings = {} if divisions is None else {"roundup_power2_divisions": divisions}
    return int(rounded(np.array([requested], np.int64), settings)[0])


def every_power(divisions: int) -> dict[str, int]:
    return {str(1 << i): divisions for i in range(16)}


@pytest.mark.parametrize(
    ("requested", "block"), [(0, 512), (1, 512), (512, 512), (513, KIB), (MIB + 1, MIB + 512)]
)
def test_requests_round_up_to_512_bytes(requested: int, block: int) -> None:
    assert round_up(requested) == block


@pytest.mark.parametrize(
    ("requested", "divisions", "block"),
    [
        (84 * MIB, 4, 96 * MIB),
        (84 * MIB, 8, 88 * MIB),
        (400 * MIB, 2, 512 * MIB),
        (64 * MIB, 4, 64 * MIB),
        (1200, 4, 1536),  # at most 512 bytes a division: rounded plainly
        (84 * MIB, 0, 84 * MIB),
        (84 * MIB, 1, 84 * MIB),
    ],
)
def test_requests_round_up_to_divisions_of_a_power_of_two(
    requested: int, divisions: int, block: int
) -> None:
    assert round_up(requested, every_power(divisions)) == block


def test_each_power_of_two_has_its_own_number_of_divisions() -> None:
    divisions = every_power(0) | {"1": 4, "64": 2}
    assert round_up(700 * KIB, divisions) == 768 * KIB  # below 1 MiB the first holds
    assert round_up(5 * MIB, divisions) == 5 * MIB
    assert round_up(65 * MIB, divisions) == 96 * MIB


@pytest.mark.parametrize("divisions", [None, "4", {"x": 4}, {"1": "4"}, {"1": -4}, {}, {"1": 1e9}])
def test_settings_that_make_no_sense_round_plainly(divisions: object) -> None:
    settings = {"roundup_power2_divisions": divisions}
    assert rounded(np.array([MIB + 1], np.int64), settings).tolist() == [MIB + 512]


@LAW
@given(st.integers(0, 1 << 40), st.sampled_from((0, 1, 2, 4, 8, 16)))
def test_a_block_is_never_smaller_than_its_request_and_always_a_multiple_of_512(
    requested: int, divisions: int
) -> None:
    block = round_up(requested, every_power(divisions))
    assert block >= max(requested, 512)
    assert block % 512 == 0
    assert block <= 2 * max(requested, 512)


@pytest.mark.parametrize(
    ("block", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (100 * MIB + 512, 102 * MIB),
    ],
)
def test_segments_are_reserved_in_the_sizes_of_the_allocator(block: int, segment: int) -> None:
    assert segment_size(block) == segment


@pytest.mark.parametrize("setting", [None, -1, 0, "21"])
def test_a_split_limit_that_is_none_lets_everything_be_split(setting: object) -> None:
    assert max_split({"max_split_size": setting}) == max_split({}) > 1 << 60


# What is not split off.


@LAW
@given(recordings(pools=2))
def test_the_size_of_every_block_is_found_that_the_trace_can_tell(history: History) -> None:
    known = {
        (life.address, life.begin, life.end): life.size
        for life in history.lives
        if history.shows_end(life)
    }
    columns = ("address", "begin", "end", "size")
    allocations = history.replay().allocations
    rows = zip(*(getattr(allocations, name).tolist() for name in columns), strict=True)
    found = {tuple(key): size for *key, size in rows}
    assert {key: found[key] for key in known} == known


@LAW
@given(recordings())
def test_sizes_that_the_final_state_does_not_give_are_said_to_be_derived(history: History) -> None:
    found = history.replay().allocations
    assert found.size_known.tolist() == (found.end == len(history.entries)).tolist()


def sizes(trace: DeviceTrace, **settings: object) -> dict[int, int]:
    snapshot = builders.snapshot(trace, settings=settings)
    found = replay(snapshot, trace).allocations
    return dict(zip((found.address - np.uint64(BASE)).tolist(), found.size.tolist(), strict=True))


def one_block(requested: int, segment: int, **settings: object) -> int:
    entries = [segment_alloc(BASE, segment), alloc(BASE, requested), *freed(BASE, requested)]
    return sizes(builders.trace(entries, [Segment(BASE, segment)]), **settings)[0]


def test_up_to_1_mib_at_the_end_of_a_segment_is_not_split_off() -> None:
    assert one_block(19 * MIB, 20 * MIB) == 20 * MIB
    assert one_block(19 * MIB - 1, 20 * MIB) == 20 * MIB
    assert one_block(19 * MIB - 512, 20 * MIB) == 19 * MIB - 512


def test_small_blocks_are_always_split() -> None:
    assert one_block(MIB, 2 * MIB) == MIB
    assert one_block(1, 2 * MIB) == 512


def test_from_the_split_limit_on_nothing_is_split_off() -> None:
    assert one_block(30 * MIB, 44 * MIB, max_split_size=30 * MIB) == 44 * MIB
    assert one_block(30 * MIB, 44 * MIB, max_split_size=30 * MIB + 1) == 30 * MIB


def test_with_expandable_segments_everything_is_split() -> None:
    assert one_block(19 * MIB + KIB, 20 * MIB, expandable_segments=True) == 19 * MIB + KIB


def test_a_block_reaches_up_to_the_next_one_in_use() -> None:
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
    found = replay(builders.snapshot(trace), trace).allocations
    assert found.size[found.begin == 5].tolist() == [5 * MIB]


def test_an_old_block_ends_where_another_came_to_lie_close_behind_it() -> None:
    behind = BASE + 6 * MIB
    entries = [alloc(behind, 2 * MIB), *freed(BASE, 5 * MIB + 200 * KIB), *freed(behind, 2 * MIB)]
    found = sizes(builders.trace(entries, [Segment(BASE, 20 * MIB)]))
    assert found == {0: 6 * MIB, 6 * MIB: 2 * MIB}


def test_old_blocks_beside_one_another_show_where_the_first_ends() -> None:
    behind = BASE + 6 * MIB
    entries = [*freed(BASE, 5 * MIB + 200 * KIB), *freed(behind, 2 * MIB)]
    found = sizes(builders.trace(entries, [Segment(BASE, 20 * MIB)]))
    assert found == {0: 6 * MIB, 6 * MIB: 2 * MIB}


def test_an_old_block_that_nothing_shows_the_end_of_keeps_its_rounded_size() -> None:
    behind = BASE + 6 * MIB
    entries = [*freed(BASE, 5 * MIB + 200 * KIB), alloc(behind, 2 * MIB), *freed(behind, 2 * MIB)]
    trace = builders.trace(entries, [Segment(BASE, 20 * MIB)])
    found = replay(builders.snapshot(trace), trace).allocations
    assert found.size[found.begin == BEFORE].tolist() == [5 * MIB + 200 * KIB]
    assert not found.size_known.any()
