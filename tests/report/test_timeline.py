from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cudakit.report.timeline import flat_lanes, nested_lanes

SPANS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 25)), max_size=60
).map(lambda rows: np.array(rows, np.int64).reshape(-1, 3))


def columns(spans: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return spans[:, 0], spans[:, 1], spans[:, 1] + spans[:, 2]


def pairs_of_lanes(
    spans: np.ndarray, lanes: np.ndarray
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return all pairs of spans that are on one track and lane."""
    track, start, end = columns(spans)
    rows = list(zip(track.tolist(), lanes.tolist(), start.tolist(), end.tolist(), strict=True))
    return [
        (first[2:], second[2:])
        for i, first in enumerate(rows)
        for second in rows[:i]
        if first[:2] == second[:2]
    ]


def do_not_overlap(first: tuple[int, int], second: tuple[int, int]) -> bool:
    return first[1] <= second[0] or second[1] <= first[0]


def contains(outer: tuple[int, int], inner: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


@given(SPANS)
def test_spans_of_a_flat_lane_do_not_overlap(spans: np.ndarray) -> None:
    lanes = flat_lanes(*columns(spans))
    assert all(do_not_overlap(*pair) for pair in pairs_of_lanes(spans, lanes))


@given(SPANS)
def test_spans_of_a_nested_lane_nest_or_do_not_overlap(spans: np.ndarray) -> None:
    lanes = nested_lanes(*columns(spans))
    for first, second in pairs_of_lanes(spans, lanes):
        assert do_not_overlap(first, second) or contains(first, second) or contains(second, first)


@given(SPANS)
def test_flat_lanes_are_as_few_as_the_most_spans_that_overlap(spans: np.ndarray) -> None:
    lanes = flat_lanes(*columns(spans))
    for track in np.unique(spans[:, 0]).tolist():
        rows = spans[spans[:, 0] == track]
        # Zero-length spans occupy no time, but a lane if they begin within another span.
        start, end = rows[:, 1], rows[:, 1] + rows[:, 2]
        most = max(int(((start <= s) & (s < end)).sum()) for s in start.tolist())
        assert lanes[spans[:, 0] == track].max() <= max(most, 1)


def test_work_without_overlaps_stays_in_the_first_lane() -> None:
    start = np.arange(0, 1000, 10)
    track = np.zeros(len(start), np.int64)
    assert not flat_lanes(track, start, start + 10).any()
    assert all(a < b for a, b in pairwise(start.tolist()))


def test_many_spans_that_do_not_nest_need_bounded_time() -> None:
    start = np.arange(20_000)
    track = np.zeros(len(start), np.int64)
    lanes = nested_lanes(track, start, start + 30_000)
    assert len(np.unique(lanes)) == len(start)
