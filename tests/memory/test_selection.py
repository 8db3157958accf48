"""Moments, devices, streams and pools, as text and as numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from memory import builders
from memory.builders import GIB, MIB, POOLS, STREAMS, Block, Entry, Segment, alloc, freed, oom
from memory.simulated_history import SimulatedHistory
from memory.strategies import LAW, recordings

from cudakit.errors import UsageError
from cudakit.memory.history import History, reconstruct
from cudakit.memory.selection import (
    filter_trace,
    parse_device,
    parse_moment,
    parse_pool,
    parse_stream,
)
from cudakit.memory.snapshot import HOST, POOL_IDS, Action, DeviceTrace


@pytest.mark.parametrize(("moment", "expected"), [("peak", "peak"), ("7", 7), (7, 7)])
def test_moment_is_a_name_or_an_index(moment: str | int, expected: str | int) -> None:
    assert parse_moment(moment) == expected


@pytest.mark.parametrize(
    ("device", "expected"), [("0", 0), ("cuda:1", 1), (2, 2), ("host", HOST), (HOST, HOST)]
)
def test_device_is_a_number_or_a_name(device: str | int, expected: int) -> None:
    assert parse_device(device) == expected


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        ("default", (0, 0)),
        ("0,0", (0, 0)),
        ("1,0", (1, 0)),
        ("graph 1,0", (1, 0)),
        ("MemPool 0,2", (0, 2)),
        ("cupy", POOL_IDS["cupy"]),
        ((1, 0), (1, 0)),
        ([0, 1], (0, 1)),
    ],
)
def test_pool_is_a_name_of_the_report_or_two_numbers(pool: Any, expected: tuple[int, int]) -> None:
    assert parse_pool(pool) == expected


@pytest.mark.parametrize(
    ("parse", "value", "message"),
    [
        (parse_moment, "foo", "'foo' is not a moment"),
        (parse_moment, 1.5, "1.5 is not a moment"),
        (parse_device, "gpu", "'gpu' is not a device"),
        (parse_device, "cuda:x", "'cuda:x' is not a device"),
        (parse_stream, "main", "'main' is not a stream"),
        (parse_stream, None, "None is not a stream"),
        (parse_pool, "1", "'1' is not a pool"),
        (parse_pool, (1, 2, 3), "(1, 2, 3) is not a pool"),
        (parse_pool, 5, "5 is not a pool"),
    ],
)
def test_other_value_is_a_usage_error_that_names_it(
    parse: Callable[[Any], object], value: object, message: str
) -> None:
    with pytest.raises(UsageError) as refused:
        parse(value)

    assert refused.value.message == message
    assert refused.value.hint.startswith("use ")


# --- Selections of one stream or one pool ----------------------------------------------------------

CURVES = ("requested", "allocated", "active", "reserved")
BASE, OTHER = 0x7F00_0000_0000, 0x7F00_4000_0000


def narrowed(
    trace: DeviceTrace, *, stream: int | None = None, pool: tuple[int, int] | None = None
) -> DeviceTrace:
    return filter_trace(builders.snapshot(trace), trace, stream=stream, pool=pool)


def by_stream(history: SimulatedHistory) -> list[History]:
    snapshot, trace = history.snapshot(), history.trace()
    parts = (filter_trace(snapshot, trace, stream=i, pool=None) for i in range(len(STREAMS)))
    return [reconstruct(snapshot, part) for part in parts]


def by_pool(history: SimulatedHistory) -> list[History]:
    snapshot, trace = history.snapshot(), history.trace()
    parts = (filter_trace(snapshot, trace, stream=None, pool=pool) for pool in POOLS)
    return [reconstruct(snapshot, part) for part in parts]


def check_sum(parts: list[History], whole: History) -> None:
    assert sum(len(part.allocations) for part in parts) == len(whole.allocations)
    for name in CURVES:
        together = np.sum([getattr(part.curves, name) for part in parts], axis=0)
        assert together.tolist() == getattr(whole.curves, name).tolist()


@LAW
@given(recordings(pools=3))
def test_streams_sum_to_the_whole(history: SimulatedHistory) -> None:
    check_sum(by_stream(history), history.reconstruct())


@LAW
@given(recordings(pools=3))
def test_pools_sum_to_the_whole(history: SimulatedHistory) -> None:
    check_sum(by_pool(history), history.reconstruct())


@LAW
@given(recordings(pools=3))
def test_each_stream_of_a_consistent_trace_is_consistent(history: SimulatedHistory) -> None:
    assert [part.inconsistencies.total for part in by_stream(history)] == [0] * len(STREAMS)


@LAW
@given(recordings(pools=3))
def test_curves_of_a_pool_equal_the_allocators(history: SimulatedHistory) -> None:
    assume(history.determines_every_size())
    for number, part in enumerate(by_pool(history)):
        assert part.inconsistencies.total == 0
        for moment, expected_state in enumerate(history.expected_states):
            own = [segment for segment in expected_state.segments if segment.pool == number]
            held = sum(block.size for segment in own for block in segment.blocks)
            assert part.curves.reserved[moment] == sum(segment.size for segment in own)
            assert part.curves.active[moment] == held


@LAW
@given(recordings(pools=3, records_pools=False))
def test_pools_without_names_in_events_sum_to_the_whole(history: SimulatedHistory) -> None:
    check_sum(by_pool(history), history.reconstruct())


def two_streams() -> DeviceTrace:
    entries = [
        alloc(BASE, 2 * MIB),
        alloc(OTHER, 3 * MIB, stream=1),
        Entry(Action.SNAPSHOT),
        oom(GIB, device_free=0, stream=1),
        *freed(BASE, 2 * MIB),
    ]
    final = [
        Segment(BASE, 20 * MIB),
        Segment(OTHER, 20 * MIB, [Block(OTHER, 3 * MIB)], stream=1, pool=2),
    ]
    return builders.trace(entries, final)


def test_other_events_become_unknown_and_keep_their_indices() -> None:
    narrow_trace = narrowed(two_streams(), stream=1)
    assert narrow_trace.events.action.tolist() == [
        Action.UNKNOWN,
        Action.ALLOC,
        Action.SNAPSHOT,
        Action.OOM,
        Action.UNKNOWN,
        Action.UNKNOWN,
    ]


def test_final_blocks_are_selected_with_their_segments() -> None:
    trace = narrowed(two_streams(), pool=(1, 0))
    assert trace.segments.address.tolist() == [OTHER]
    assert trace.blocks.segment.tolist() == [0, 0]
    layout = reconstruct(builders.snapshot(trace), trace).layout_at(6)
    assert layout.used_by_segment().tolist() == [3 * MIB]


def test_unnamed_pool_of_an_event_is_that_of_its_segment() -> None:
    trace = narrowed(two_streams(), pool=(1, 0))
    moves = np.flatnonzero((trace.events.action > 0) & (trace.events.action < Action.SNAPSHOT))
    assert moves.tolist() == [1]


def test_stream_and_pool_can_be_combined() -> None:
    trace = narrowed(two_streams(), stream=0, pool=(1, 0))
    assert len(trace.segments) == 0
    assert Action.ALLOC not in trace.events.action


def test_no_selection_keeps_the_trace() -> None:
    trace = two_streams()
    assert narrowed(trace) is trace


@pytest.mark.parametrize("stream", [-1, 4])
def test_unknown_stream_error_lists_the_streams(
    stream: int,
) -> None:
    with pytest.raises(UsageError, match=rf"no stream {stream} in snapshot\.pkl") as caught:
        narrowed(two_streams(), stream=stream)
    assert caught.value.hint == "streams of snapshot.pkl: 0, 1, 2, 3"


def test_unknown_pool_error_lists_the_pools() -> None:
    with pytest.raises(UsageError, match=r"no pool 7,7 in snapshot\.pkl") as caught:
        narrowed(two_streams(), pool=(7, 7))
    assert caught.value.hint == (
        "pools of snapshot.pkl: default; MemPool 0,1; graph 1,0; MemPool 0,2"
    )
