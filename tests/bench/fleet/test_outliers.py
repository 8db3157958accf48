from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.bench.fleet.outliers import (
    MAX_SCORE,
    SIGMA_PER_MAD,
    PeerStatistics,
    compare_with_peers,
)

VALUES = st.lists(st.floats(1e-6, 1e15), max_size=12)
TOLERANCES = st.floats(0, 0.5)


def brute_force_limit(
    values: Sequence[float], index: int, *, higher_is_better: bool, tolerance: float
) -> float:
    """Compute the limit of one value by the definition, without numpy."""
    peers = [value for i, value in enumerate(values) if i != index]
    middle = median(peers)
    mad = median([abs(peer - middle) for peer in peers])
    distance = max(tolerance * middle, MAX_SCORE * SIGMA_PER_MAD * mad)
    return middle - distance if higher_is_better else middle + distance


def outliers(values: Sequence[float], *, higher_is_better: bool = True) -> list[int]:
    statistics = compare_with_peers(values, higher_is_better=higher_is_better, tolerance=0.07)
    return [
        i
        for i, (value, peers) in enumerate(zip(values, statistics, strict=False))
        if peers.has_outlier(value, higher_is_better=higher_is_better)
    ]


@given(VALUES, st.booleans(), TOLERANCES)
def test_limits_equal_brute_force(
    values: list[float], higher_is_better: bool, tolerance: float
) -> None:
    statistics = compare_with_peers(values, higher_is_better=higher_is_better, tolerance=tolerance)

    if len(values) < 2:
        assert statistics == ()
        return
    for i, peers in enumerate(statistics):
        expected = brute_force_limit(
            values, i, higher_is_better=higher_is_better, tolerance=tolerance
        )
        assert peers.limit == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert peers.peer_count == len(values) - 1
        assert peers.peer_median == pytest.approx(median(values[:i] + values[i + 1 :]))


@given(VALUES, st.booleans(), st.integers(-20, 20))
def test_outliers_do_not_depend_on_unit(
    values: list[float], higher_is_better: bool, exponent: int
) -> None:
    scaled = [value * 2.0**exponent for value in values]

    assert outliers(values, higher_is_better=higher_is_better) == outliers(
        scaled, higher_is_better=higher_is_better
    )


@given(st.permutations(range(8)), VALUES.filter(lambda values: len(values) >= 8))
def test_outliers_do_not_depend_on_order(order: list[int], values: list[float]) -> None:
    values = values[:8]

    assert {values[i] for i in outliers(values)} == {
        values[order[i]] for i in outliers([values[i] for i in order])
    }


@given(
    st.lists(st.floats(0.99, 1.01), min_size=2, max_size=64),
    st.floats(0.1, 0.85),
    st.integers(0, 63),
)
def test_planted_slow_value_is_the_only_outlier(
    healthy: list[float], slow: float, position: int
) -> None:
    position %= len(healthy) + 1
    values = [*healthy[:position], slow, *healthy[position:]]

    # With two healthy values, each has the slow value and one healthy value as peers.
    assert outliers(values) == [position]


@given(st.lists(st.floats(0.97, 1.03), max_size=64), st.booleans())
def test_values_within_the_tolerance_have_no_outlier(
    values: list[float], higher_is_better: bool
) -> None:
    assert outliers(values, higher_is_better=higher_is_better) == []


@given(st.integers(3, 40), st.floats(0.2, 0.8))
def test_slow_minority_is_named(count: int, slow: float) -> None:
    slow_count = (count - 1) // 2
    values = [slow] * slow_count + [1.0] * (count - slow_count)

    assert outliers(values) == list(range(slow_count))


def test_wide_spread_of_peers_widens_the_limit() -> None:
    assert outliers([100, 101, 99, 100, 90]) == [4]
    assert outliers([100, 110, 90, 105, 95, 84]) == []


def test_value_at_the_limit_is_no_outlier() -> None:
    peers = PeerStatistics(3, 100.0, 0.0, 93.0)

    assert not peers.has_outlier(93.0, higher_is_better=True)
    assert peers.has_outlier(92.9, higher_is_better=True)
    assert peers.has_outlier(93.1, higher_is_better=False)
