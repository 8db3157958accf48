"""Statistics of samples: the median and its CI, autocorrelation, trend and bimodality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.bench.measurement import Samples

_Times: TypeAlias = "Sequence[float] | npt.NDArray[np.float64]"

# Binomial tails are exact up to this number of samples, and a normal approximation beyond it.
_MAX_EXACT_BINOMIAL = 1000
# Minimum number of samples for an estimate of their autocorrelation.
_MIN_FOR_AUTOCORRELATION = 20
# Minimum number of samples for a trend. A third of them is 8, the smallest number for which the median has
# a CI of 99 %: 2 ** (1 - 8) < 1 %.
_MIN_FOR_TREND = 24
_TREND_CONFIDENCE = 0.99
# The 97.5 % quantiles of Student's t distribution for 1, 2, 3 ... degrees of freedom.
_STUDENT_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_NORMAL_QUANTILE = 1.96  # The 97.5 % quantile of the normal distribution.
# Minimum number of samples for two peaks, and the minimum share of samples in a peak: fewer are often chance.
_MIN_FOR_PEAKS = 30
_MIN_PEAK_SHARE = 0.1
# The valley between two peaks has less than this share of the samples of the lower peak, and the difference
# is at least this number of standard deviations.
_MAX_VALLEY_SHARE = 0.5
_VALLEY_DEVIATIONS = 3.0
# Peaks that are closer than this number of clock steps may be one time, rounded up or down.
_CLOCK_STEPS = 3
# Smaller relative drifts are ignored, because among thousands of samples every drift is significant.
_MIN_TREND = 0.01


@dataclass(frozen=True, slots=True)
class Summary:
    """The distribution of the times of one case."""

    n: int  # Number of samples.
    minimum_s: float  # Shortest sample.
    p5_s: float  # 5th percentile.
    q1_s: float  # First quartile.
    median_s: float  # Median of the samples.
    q3_s: float  # Third quartile.
    p95_s: float  # 95th percentile.
    p99_s: float  # 99th percentile.
    maximum_s: float  # Longest sample.
    mean_s: float  # Mean of the samples.
    stdev_s: float  # Sample standard deviation; 0 for one sample.
    mad_s: float  # Median absolute deviation, not scaled.
    ci95_s: tuple[float, float]  # 95% CI of the median.
    trend: bool  # Whether the first and last third differ significantly and by over 1%.
    bimodal: bool  # Whether the distribution has two peaks.

    @property
    def noise(self) -> float:
        """Half-width of the 95% CI relative to the median."""
        return relative_half_width(self.ci95_s, self.median_s)


def summarize(samples: Samples) -> Summary:
    """Summarize the samples of one case. Raises ValueError without samples."""
    times = _array(samples.times_s)
    shifted_times = without_round_offsets(times, samples.rounds)
    p5, q1, median, q3, p95, p99 = np.quantile(times, (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)).tolist()
    return Summary(
        n=len(times),
        minimum_s=float(times.min()),
        p5_s=p5,
        q1_s=q1,
        median_s=median,
        q3_s=q3,
        p95_s=p95,
        p99_s=p99,
        maximum_s=float(times.max()),
        mean_s=float(times.mean()),
        stdev_s=float(times.std(ddof=1)) if len(times) > 1 else 0.0,
        mad_s=float(np.median(np.abs(times - median))),
        ci95_s=ci_over_rounds(times, samples.rounds),
        trend=has_trend(times),
        bimodal=is_bimodal(shifted_times),
    )


def ci_over_rounds(times: _Times, rounds: Sequence[int] = ()) -> tuple[float, float]:
    """Return a 95% CI of the median that includes the differences between rounds.

    The speed depends on the addresses of buffers, so samples with one set of buffers vary less than runs do.
    Each round has new buffers: the medians of rounds vary like those of runs, and Student's t distribution
    gives the CI of their mean. The result contains ``median_ci`` and an interval around the median with the
    width of that CI.
    """
    values = _array(times)
    shifted_times = without_round_offsets(values, rounds)
    ci_low, ci_high = median_ci(shifted_times, correlation=autocorrelation_time(shifted_times))
    half_width = _ci_half_width(
        [float(np.median(times)) for times in _split_rounds(values, rounds)]
    )
    median_s = float(np.median(values))
    return max(min(ci_low, median_s - half_width), 0.0), max(ci_high, median_s + half_width)


def without_round_offsets(times: _Times, rounds: Sequence[int]) -> npt.NDArray[np.float64]:
    """Shift the samples of each round, so that all rounds have the same median."""
    values = _array(times)
    if len(rounds) < 2:
        return values
    median_of_all = np.median(values)
    return np.concatenate(
        [times - np.median(times) + median_of_all for times in _split_rounds(values, rounds)]
    )


def _split_rounds(
    values: npt.NDArray[np.float64], rounds: Sequence[int]
) -> list[npt.NDArray[np.float64]]:
    """Return the samples of each round that has samples."""
    round_values = np.split(values, np.cumsum(rounds)[:-1]) if len(rounds) > 1 else [values]
    return [times for times in round_values if len(times)]


def _ci_half_width(medians: Sequence[float]) -> float:
    """Return the half-width of the 95% CI of the mean of medians; 0 for one median."""
    median_count = len(medians)
    if median_count < 2:
        return 0.0
    quantile = (
        _STUDENT_QUANTILES[median_count - 2]
        if median_count - 2 < len(_STUDENT_QUANTILES)
        else _NORMAL_QUANTILE
    )
    standard_deviation = float(np.std(medians, ddof=1))
    return float(quantile * standard_deviation / median_count**0.5)


def median_ci(
    times: _Times, confidence: float = 0.95, *, correlation: float = 1.0
) -> tuple[float, float]:
    """Return a distribution-free confidence interval of the median.

    The number of samples below the true median is binomial with 1/2, so two order statistics enclose it
    (David and Nagaraja, Order Statistics, 7.1). Fewer than 6 samples cannot give 95 %: the interval is then
    the range of the samples. ``correlation`` is the autocorrelation time, which widens the interval. Raises
    ValueError without samples.
    """
    sorted_times = np.sort(_array(times))
    rank = _lower_rank(len(sorted_times), confidence)
    middle_index = (len(sorted_times) - 1) / 2
    rank = max(int(middle_index - (middle_index - rank) * correlation**0.5), 0)
    return float(sorted_times[rank]), float(sorted_times[len(sorted_times) - 1 - rank])


def autocorrelation_time(times: _Times) -> float:
    """Return the number of samples that give as much information as one independent sample; 1 or more.

    Clocks and temperatures correlate consecutive samples. The median depends on which samples are above it,
    so the function returns the integrated autocorrelation time of the sign of each sample minus the median
    (Sokal, Monte Carlo Methods in Statistical Mechanics, 1996), summed while pairs of lags are positive
    (Geyer, Statistical Science 7, 1992).
    """
    values = np.asarray(times, np.float64)
    if len(values) < _MIN_FOR_AUTOCORRELATION:
        return 1.0
    sign_of_deviation = np.sign(values - np.median(values))
    sign_of_deviation -= sign_of_deviation.mean()
    if not sign_of_deviation.any():
        return 1.0
    pair_sums = (
        _autocorrelation(sign_of_deviation)[: len(values) // 2 * 2].reshape(-1, 2).sum(axis=1)
    )
    negative_indices = np.flatnonzero(pair_sums <= 0)
    stop_index = int(negative_indices[0]) if len(negative_indices) else len(pair_sums)
    return float(min(max(2 * pair_sums[:stop_index].sum() - 1, 1.0), len(values)))


def relative_half_width(interval: tuple[float, float], median: float) -> float:
    """Return the half-width of an interval relative to the median; 0 for a median of 0."""
    return (interval[1] - interval[0]) / 2 / median if median else 0.0


def has_trend(times: _Times) -> bool:
    """Return whether the medians of the first and last third differ significantly and by over 1%."""
    values = np.asarray(times, np.float64)
    if len(values) < _MIN_FOR_TREND:
        return False
    third_size = len(values) // 3
    first_third, last_third = values[:third_size], values[-third_size:]
    lower_ci, upper_ci = sorted(
        median_ci(times, _TREND_CONFIDENCE) for times in (first_third, last_third)
    )
    is_significant = lower_ci[1] < upper_ci[0]
    median_change = abs(float(np.median(last_third) - np.median(first_third)))
    return bool(is_significant and median_change > _MIN_TREND * float(np.median(values)))


def is_bimodal(times: _Times) -> bool:
    """Return whether the distribution of times has two peaks with a valley between them.

    The times are split into two groups so that the variance inside the groups is smallest (Otsu, IEEE SMC 9,
    1979). Then the numbers of samples in three windows of one width are compared: around the median of each
    group, and half-way between these medians.
    """
    sorted_times = np.sort(np.asarray(times, np.float64))
    split_index = _best_split(sorted_times)
    if split_index is None:
        return False
    fast_peak, slow_peak = (
        float(np.median(sorted_times[:split_index])),
        float(np.median(sorted_times[split_index:])),
    )
    peak_distance = slow_peak - fast_peak
    if peak_distance <= _CLOCK_STEPS * _clock_step(sorted_times):
        return False
    valley_count = _count_within(sorted_times, (fast_peak + slow_peak) / 2, peak_distance / 6)
    peak_count = min(
        _count_within(sorted_times, fast_peak, peak_distance / 6),
        _count_within(sorted_times, slow_peak, peak_distance / 6),
    )
    return (
        valley_count < _MAX_VALLEY_SHARE * peak_count
        and peak_count - valley_count > _VALLEY_DEVIATIONS * (peak_count + valley_count) ** 0.5
    )


def _array(times: _Times) -> npt.NDArray[np.float64]:
    values = np.asarray(times, np.float64)
    if not len(values):
        raise ValueError("there are no samples")
    return values


def _lower_rank(n: int, confidence: float) -> int:
    """Return the index of the lower end of the CI among n sorted samples."""
    tail_probability = (1 - confidence) / 2
    if n > _MAX_EXACT_BINOMIAL:
        # The term 0.5 is the continuity correction of the normal approximation.
        return int(n / 2 - 0.5 + NormalDist().inv_cdf(tail_probability) * n**0.5 / 2)
    probability = cumulative_probability = 0.5**n
    rank = 0
    while cumulative_probability <= tail_probability:
        probability *= (n - rank) / (rank + 1)
        cumulative_probability += probability
        rank += 1
    return max(rank - 1, 0)


def _autocorrelation(centred_values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the autocorrelation at all lags, by the Fourier transform of the zero-padded series."""
    padded_size = 1 << (2 * len(centred_values) - 1).bit_length()
    power = np.abs(np.fft.rfft(centred_values, padded_size)) ** 2
    products = np.fft.irfft(power, padded_size)[: len(centred_values)]
    correlation: npt.NDArray[np.float64] = products / products[0]
    return correlation


def _best_split(sorted_times: npt.NDArray[np.float64]) -> int | None:
    """Return the index that splits values into groups with the smallest variance; None for too few values."""
    time_count = len(sorted_times)
    min_size = max(int(time_count * _MIN_PEAK_SHARE), 1)
    if time_count < _MIN_FOR_PEAKS:
        return None
    sizes = np.arange(min_size, time_count - min_size + 1)
    # The values are centred, because a difference of squares of large, nearly equal numbers loses precision.
    cumulative_sums = np.cumsum(sorted_times - sorted_times.mean())
    left_sums, total_sum = cumulative_sums[sizes - 1], cumulative_sums[-1]
    between_groups = left_sums**2 / sizes + (total_sum - left_sums) ** 2 / (time_count - sizes)
    return int(sizes[int(np.argmax(between_groups))])


def _clock_step(sorted_values: npt.NDArray[np.float64]) -> float:
    """Return the smallest difference between distinct values: an estimate of the clock's resolution."""
    steps = np.diff(sorted_values)
    steps = steps[steps > 0]
    return float(steps.min()) if len(steps) else 0.0


def _count_within(sorted_values: npt.NDArray[np.float64], centre: float, distance: float) -> int:
    """Return the number of values whose distance from ``centre`` is at most ``distance``."""
    begin_index, end_index = np.searchsorted(
        sorted_values, (centre - distance, centre + distance)
    ).tolist()
    return int(end_index - begin_index)
