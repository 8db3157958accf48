from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.core.bench.measurement import Samples
from cudakit.core.bench.stats import (
    Summary,
    autocorrelation_time,
    has_trend,
    is_bimodal,
    median_ci,
    relative_half_width,
    summarize,
)

Array = npt.NDArray[np.float64]

times = st.lists(st.floats(1e-7, 1e2), min_size=1, max_size=80)

# Distributions with the median that they truly have.
DISTRIBUTIONS: dict[str, tuple[Callable[[np.random.Generator, int], Array], float]] = {
    "normal": (lambda random, n: 10 + random.standard_normal(n), 10.0),
    "skewed": (lambda random, n: random.exponential(1.0, n), math.log(2)),
    "heavy-tailed": (lambda random, n: random.standard_cauchy(n) + 5, 5.0),
}


def correlated_series(random: np.random.Generator, n: int, *, correlation: float = 0.9) -> Array:
    """Return an autoregressive series around 100."""
    steps, at = random.standard_normal(n), 0.0
    series = []
    for step in steps.tolist():
        at = correlation * at + step
        series.append(100 + at)
    return np.array(series)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("n", [10, 101, 1500])
def test_median_ci_has_nominal_coverage(name: str, n: int) -> None:
    draw, median = DISTRIBUTIONS[name]
    random = np.random.default_rng(7)
    intervals = [median_ci(draw(random, n)) for _ in range(1000)]
    covered = sum(low <= median <= high for low, high in intervals) / 1000

    # Ranks are whole numbers: few samples cover more. Three deviations of chance either way.
    assert 0.93 < covered < (0.985 if n < 100 else 0.975)


def test_median_ci_has_tabulated_ranks() -> None:
    # Of 20 sorted samples the 6th and the 15th: coverage 95.9 %; the 7th and the 14th have 88.5 %.
    assert median_ci([float(i) for i in range(1, 21)]) == (6.0, 15.0)


def test_summed_and_approximated_tails_agree_where_they_meet() -> None:
    def ranks(n: int) -> float:
        low, high = median_ci([float(i) for i in range(n)])
        return high - low

    assert abs(ranks(1000) - ranks(1001)) <= 2


def test_fewer_than_six_samples_give_all_of_them() -> None:
    assert median_ci([3.0, 1.0, 2.0]) == (1.0, 3.0)


def test_no_samples_have_no_interval() -> None:
    with pytest.raises(ValueError, match="no samples"):
        median_ci([])


@given(times, st.randoms(use_true_random=False))
def test_order_does_not_move_the_interval_or_the_quantiles(
    values: list[float], random: object
) -> None:
    shuffled = sorted(values, key=lambda _: random.random())  # type: ignore[attr-defined]
    first, last = summarize(Samples(tuple(values))), summarize(Samples(tuple(shuffled)))

    assert median_ci(values) == median_ci(shuffled)
    for name in ("minimum_s", "q1_s", "median_s", "q3_s", "p99_s", "maximum_s", "mad_s", "bimodal"):
        assert getattr(first, name) == getattr(last, name)


@given(times, st.integers(-20, 20))
def test_statistics_scale_with_unit(values: list[float], exponent: int) -> None:
    scale = 2.0**exponent  # exact
    first = summarize(Samples(tuple(values)))
    last = summarize(Samples(tuple(scale * value for value in values)))

    assert last.median_s == scale * first.median_s
    assert last.ci95_s == tuple(scale * end for end in first.ci95_s)
    assert (last.trend, last.bimodal, last.n) == (first.trend, first.bimodal, first.n)
    assert last.mad_s == pytest.approx(scale * first.mad_s)
    assert last.stdev_s == pytest.approx(scale * first.stdev_s)


@given(times)
def test_quantiles_are_in_order_and_the_interval_holds_the_median(values: list[float]) -> None:
    found = summarize(Samples(tuple(values)))
    low, high = found.ci95_s
    ends = (found.minimum_s, found.p5_s, found.q1_s, found.median_s, found.q3_s, found.p95_s)

    assert list(ends) == sorted(ends)
    assert found.p95_s <= found.p99_s <= found.maximum_s
    assert found.minimum_s <= low <= found.median_s <= high <= found.maximum_s


@given(times, st.floats(1.0, 100.0), st.floats(0.5, 0.9), st.floats(0.9, 0.999))
def test_more_confidence_and_more_dependence_never_narrow_the_interval(
    values: list[float], factor: float, little: float, much: float
) -> None:
    low, high = median_ci(values, little)
    for wider in (
        median_ci(values, much),
        median_ci(values, little, correlation=factor),
    ):
        assert wider[0] <= low
        assert wider[1] >= high


@given(times, st.integers(0, 79), st.floats(0, 10))
def test_slower_sample_never_lowers_median_or_ci(values: list[float], at: int, more: float) -> None:
    slower = list(values)
    slower[at % len(values)] += more
    before, after = median_ci(values), median_ci(slower)

    assert np.median(slower) >= np.median(values)
    assert after[0] >= before[0]
    assert after[1] >= before[1]


def test_independent_samples_are_hardly_widened() -> None:
    random = np.random.default_rng(3)
    found = [autocorrelation_time(random.standard_normal(500)) for _ in range(50)]

    assert np.mean(found) < 1.3


def test_median_ci_of_correlated_samples_covers_median() -> None:
    random = np.random.default_rng(5)
    series = [correlated_series(random, 400) for _ in range(200)]
    naive = [median_ci(one) for one in series]
    wide = [summarize(Samples(tuple(one.tolist()))).ci95_s for one in series]

    assert sum(low <= 100 <= high for low, high in naive) < 0.7 * 200
    assert sum(low <= 100 <= high for low, high in wide) > 0.88 * 200


def test_constant_samples_have_an_interval_of_no_width() -> None:
    found = summarize(Samples((2.0,) * 100))

    assert (found.ci95_s, found.noise, found.mad_s, found.stdev_s) == ((2.0, 2.0), 0, 0, 0)
    assert not found.trend
    assert not found.bimodal


def test_summary_of_one_sample() -> None:
    found = summarize(Samples((2.0,)))

    assert isinstance(found, Summary)
    assert (found.median_s, found.stdev_s, found.ci95_s) == (2.0, 0.0, (2.0, 2.0))


def test_settling_clock_is_a_trend() -> None:
    random = np.random.default_rng(1)
    noise = 0.002 * random.standard_normal(300)

    assert has_trend(1 + np.linspace(0, 0.05, 300) + noise)
    assert has_trend(1 - np.linspace(0, 0.05, 300) + noise)


def test_noise_is_no_trend_and_neither_is_a_drift_too_small_to_matter() -> None:
    random = np.random.default_rng(2)
    noise = 0.01 * random.standard_normal(3000)

    assert not has_trend(1 + noise)
    assert not any(has_trend(1 + 0.2 * random.standard_normal(60)) for _ in range(5))
    assert not has_trend(1 + noise / 10 + np.linspace(0, 0.002, 3000))


def test_half_the_width_is_relative_to_the_median() -> None:
    assert relative_half_width((9.0, 11.0), 10.0) == 0.1
    assert relative_half_width((0.0, 0.0), 0.0) == 0.0


Draw = Callable[[np.random.Generator], npt.NDArray[np.float64]]

ONE_GROUP: dict[str, Draw] = {
    "normal": lambda random: 100 + random.standard_normal(400),
    "uniform": lambda random: random.uniform(1, 2, 400),
    "exponential": lambda random: 1 + random.exponential(1, 400),
    "outliers": lambda random: np.append(100 + random.standard_normal(390), [500.0] * 10),
    "two steps of the clock": lambda random: random.integers(0, 2, 400) + 50.0,
}


@pytest.mark.parametrize("name", ONE_GROUP)
def test_one_group_is_not_bimodal(name: str) -> None:
    random = np.random.default_rng(0)

    assert not any(is_bimodal(ONE_GROUP[name](random)) for _ in range(50))


@pytest.mark.parametrize("share", [0.15, 0.5, 0.85])
def test_two_groups_with_valley_are_bimodal(share: float) -> None:
    random = np.random.default_rng(0)
    found = [
        is_bimodal(100 + random.standard_normal(400) + 10 * (random.random(400) < share))
        for _ in range(50)
    ]

    assert all(found)


def test_few_samples_have_no_groups() -> None:
    assert not is_bimodal([1.0, 1.01, 1.02, 2.0, 2.01, 2.02])


def test_groups_that_are_near_each_other_compared_with_their_distance_from_zero_are_seen() -> None:
    random = np.random.default_rng(0)
    times = 1e10 + random.standard_normal(400) + 10 * (random.random(400) < 0.5)

    assert is_bimodal(times)
