from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.bench.stats import (
    Samples,
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

# Distributions, each with its true median.
DISTRIBUTIONS: dict[str, tuple[Callable[[np.random.Generator, int], Array], float]] = {
    "normal": (lambda random, n: 10 + random.standard_normal(n), 10.0),
    "skewed": (lambda random, n: random.exponential(1.0, n), math.log(2)),
    "heavy-tailed": (lambda random, n: random.standard_cauchy(n) + 5, 5.0),
}


def correlated_series(random: np.random.Generator, n: int, *, correlation: float = 0.9) -> Array:
    """Return an autoregressive series around 100."""
    steps, index = random.standard_normal(n), 0.0
    series = []
    for step in steps.tolist():
        index = correlation * index + step
        series.append(100 + index)
    return np.array(series)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("n", [10, 101, 1500])
def test_median_ci_has_nominal_coverage(name: str, n: int) -> None:
    draw, median = DISTRIBUTIONS[name]
    random = np.random.default_rng(7)
    intervals = [median_ci(draw(random, n)) for _ in range(1000)]
    covered = sum(low <= median <= high for low, high in intervals) / 1000

    # Ranks are integers, so the coverage with few samples exceeds 95 %. The limits are three standard
    # deviations away.
    assert 0.93 < covered < (0.985 if n < 100 else 0.975)


def test_median_ci_has_tabulated_ranks() -> None:
    # Of 20 sorted samples the 6th and the 15th: coverage 95.9 %; the 7th and the 14th have 88.5 %.
    assert median_ci([float(i) for i in range(1, 21)]) == (6.0, 15.0)


def test_exact_and_approximate_ranks_agree_at_their_boundary() -> None:
    def ranks(n: int) -> float:
        low, high = median_ci([float(i) for i in range(n)])
        return high - low

    assert abs(ranks(1000) - ranks(1001)) <= 2


def test_ci_of_fewer_than_six_samples_is_their_range() -> None:
    assert median_ci([3.0, 1.0, 2.0]) == (1.0, 3.0)


def test_summary_without_samples_raises() -> None:
    with pytest.raises(ValueError, match="no samples"):
        summarize(Samples(()))


@given(times, st.randoms(use_true_random=False))
def test_order_of_samples_does_not_change_ci_or_quantiles(
    values: list[float], random: object
) -> None:
    shuffled = sorted(values, key=lambda _: random.random())  # type: ignore[attr-defined]
    first, last = summarize(Samples(tuple(values))), summarize(Samples(tuple(shuffled)))

    assert median_ci(values) == median_ci(shuffled)
    for name in ("minimum_s", "q1_s", "median_s", "q3_s", "p99_s", "maximum_s", "mad_s", "bimodal"):
        assert getattr(first, name) == getattr(last, name)


@given(times, st.integers(-20, 20))
def test_statistics_scale_with_unit(values: list[float], exponent: int) -> None:
    scale = 2.0**exponent  # Multiplication by a power of two is exact.
    first = summarize(Samples(tuple(values)))
    last = summarize(Samples(tuple(scale * value for value in values)))

    assert last.median_s == scale * first.median_s
    assert last.ci95_s == tuple(scale * end for end in first.ci95_s)
    assert (last.trend, last.bimodal, last.n) == (first.trend, first.bimodal, first.n)
    assert last.mad_s == pytest.approx(scale * first.mad_s)
    assert last.stdev_s == pytest.approx(scale * first.stdev_s)


@given(times)
def test_quantiles_are_in_order_and_ci_contains_median(values: list[float]) -> None:
    summary = summarize(Samples(tuple(values)))
    low, high = summary.ci95_s
    ends = (
        summary.minimum_s,
        summary.p5_s,
        summary.q1_s,
        summary.median_s,
        summary.q3_s,
        summary.p95_s,
    )

    assert list(ends) == sorted(ends)
    assert summary.p95_s <= summary.p99_s <= summary.maximum_s
    assert summary.minimum_s <= low <= summary.median_s <= high <= summary.maximum_s


@given(times, st.floats(1.0, 100.0), st.floats(0.5, 0.9), st.floats(0.9, 0.999))
def test_more_confidence_and_more_correlation_never_narrow_ci(
    values: list[float], factor: float, low_confidence: float, high_confidence: float
) -> None:
    low, high = median_ci(values, low_confidence)
    for wider in (
        median_ci(values, high_confidence),
        median_ci(values, low_confidence, correlation=factor),
    ):
        assert wider[0] <= low
        assert wider[1] >= high


@given(times, st.integers(0, 79), st.floats(0, 10))
def test_slower_sample_never_lowers_median_or_ci(
    values: list[float], index: int, delay_s: float
) -> None:
    slower = list(values)
    slower[index % len(values)] += delay_s
    before, after = median_ci(values), median_ci(slower)

    assert np.median(slower) >= np.median(values)
    assert after[0] >= before[0]
    assert after[1] >= before[1]


def test_autocorrelation_time_of_independent_samples_is_about_one() -> None:
    random = np.random.default_rng(3)
    summary = [autocorrelation_time(random.standard_normal(500)) for _ in range(50)]

    assert np.mean(summary) < 1.3


def test_median_ci_of_correlated_samples_covers_median() -> None:
    random = np.random.default_rng(5)
    series = [correlated_series(random, 400) for _ in range(200)]
    uncorrected = [median_ci(samples) for samples in series]
    corrected = [summarize(Samples(tuple(samples.tolist()))).ci95_s for samples in series]

    assert sum(low <= 100 <= high for low, high in uncorrected) < 0.7 * 200
    assert sum(low <= 100 <= high for low, high in corrected) > 0.88 * 200


def test_ci_of_constant_samples_has_no_width() -> None:
    summary = summarize(Samples((2.0,) * 100))

    assert (summary.ci95_s, summary.noise, summary.mad_s, summary.stdev_s) == ((2.0, 2.0), 0, 0, 0)
    assert not summary.trend
    assert not summary.bimodal


def test_summary_of_one_sample() -> None:
    summary = summarize(Samples((2.0,)))

    assert isinstance(summary, Summary)
    assert (summary.median_s, summary.stdev_s, summary.ci95_s) == (2.0, 0.0, (2.0, 2.0))


def test_five_percent_drift_is_a_trend() -> None:
    random = np.random.default_rng(1)
    noise = 0.002 * random.standard_normal(300)

    assert has_trend(1 + np.linspace(0, 0.05, 300) + noise)
    assert has_trend(1 - np.linspace(0, 0.05, 300) + noise)


def test_noise_and_small_drift_are_no_trend() -> None:
    random = np.random.default_rng(2)
    noise = 0.01 * random.standard_normal(3000)

    assert not has_trend(1 + noise)
    assert not any(has_trend(1 + 0.2 * random.standard_normal(60)) for _ in range(5))
    assert not has_trend(1 + noise / 10 + np.linspace(0, 0.002, 3000))


def test_half_width_is_relative_to_median() -> None:
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
    summary = [
        is_bimodal(100 + random.standard_normal(400) + 10 * (random.random(400) < share))
        for _ in range(50)
    ]

    assert all(summary)


def test_few_samples_are_not_bimodal() -> None:
    assert not is_bimodal([1.0, 1.01, 1.02, 2.0, 2.01, 2.02])


def test_close_groups_of_large_values_are_bimodal() -> None:
    random = np.random.default_rng(0)
    times = 1e10 + random.standard_normal(400) + 10 * (random.random(400) < 0.5)

    assert is_bimodal(times)
