"""Samples, and their statistics: the median and its CI, autocorrelation, trend and bimodality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

_Array: TypeAlias = npt.NDArray[np.float64]
_Times: TypeAlias = "Sequence[float] | _Array"

# Minimum half-width of the CI with which two runs are compared, relative to the median.
RESOLUTION = 0.005

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
class Samples:
    """The samples of one case in the order measured."""

    times_s: tuple[float, ...]  # Time of one execution, for each sample.
    sm_clock_hz: tuple[float, ...] = ()  # Mean clock during each sample; empty if unknown.
    # Number of readings that are no samples: the clock was throttled, or the blocking kernel timed out.
    discarded: int = 0
    converged: bool = True  # Whether the stopping rule was met before the timeout.
    rounds: tuple[int, ...] = ()  # Number of samples of each round; empty for one round.


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
    times = np.array(samples.times_s, np.float64)
    if not len(times):
        raise ValueError("there are no samples")
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
        bimodal=is_bimodal(without_round_offsets(times, samples.rounds)),
    )


# --- the confidence interval --------------------------------------------------------------------------


def ci_over_rounds(times: _Times, rounds: Sequence[int] = ()) -> tuple[float, float]:
    """Return a 95% CI of the median that includes the differences between rounds.

    The speed depends on the addresses of buffers, so samples with one set of buffers vary less than runs do.
    Each round has new buffers: the medians of rounds vary like those of runs, and Student's t distribution
    gives the CI of their mean. The result contains ``median_ci`` and an interval around the median with the
    width of that CI.
    """
    values = np.asarray(times, np.float64)
    shifted = without_round_offsets(values, rounds)
    low, high = median_ci(shifted, correlation=autocorrelation_time(shifted))
    medians = [float(np.median(times)) for times in _split_rounds(values, rounds)]
    half_width = 0.0
    if len(medians) > 1:
        freedom = len(medians) - 2
        is_listed = freedom < len(_STUDENT_QUANTILES)
        quantile = _STUDENT_QUANTILES[freedom] if is_listed else _NORMAL_QUANTILE
        half_width = quantile * float(np.std(medians, ddof=1)) / len(medians) ** 0.5
    median = float(np.median(values))
    return max(min(low, median - half_width), 0.0), max(high, median + half_width)


def without_round_offsets(times: _Times, rounds: Sequence[int]) -> _Array:
    """Shift the samples of each round, so that all rounds have the same median."""
    values = np.asarray(times, np.float64)
    if len(rounds) < 2:
        return values
    median = np.median(values)
    return np.concatenate(
        [times - np.median(times) + median for times in _split_rounds(values, rounds)]
    )


def _split_rounds(values: _Array, rounds: Sequence[int]) -> list[_Array]:
    """Return the samples of each round that has samples."""
    round_values = np.split(values, np.cumsum(rounds)[:-1]) if len(rounds) > 1 else [values]
    return [times for times in round_values if len(times)]


def median_ci(
    times: _Times, confidence: float = 0.95, *, correlation: float = 1.0
) -> tuple[float, float]:
    """Return a distribution-free confidence interval of the median.

    The number of samples below the true median is binomial with 1/2, so two order statistics enclose it
    (David and Nagaraja, Order Statistics, 7.1). Fewer than 6 samples cannot give 95 %: the interval is then
    the range of the samples. ``correlation`` is the autocorrelation time, which widens the interval.
    """
    ordered = np.sort(np.asarray(times, np.float64))
    n, middle, tail_probability = len(ordered), (len(ordered) - 1) / 2, (1 - confidence) / 2
    # The rank of the lower end among the samples.
    if n > _MAX_EXACT_BINOMIAL:
        # The term 0.5 is the continuity correction of the normal approximation.
        rank = int(n / 2 - 0.5 + NormalDist().inv_cdf(tail_probability) * n**0.5 / 2)
    else:
        probability = cumulative = 0.5**n
        rank = 0
        while cumulative <= tail_probability:
            probability *= (n - rank) / (rank + 1)
            cumulative += probability
            rank += 1
        rank = max(rank - 1, 0)
    rank = max(int(middle - (middle - rank) * correlation**0.5), 0)
    return float(ordered[rank]), float(ordered[len(ordered) - 1 - rank])


def autocorrelation_time(times: _Times) -> float:
    """Return the number of samples that give as much information as one independent sample; 1 or more.

    Clocks and temperatures correlate consecutive samples. The median depends on which samples are above it,
    so the function returns the integrated autocorrelation time of the sign of each sample minus the median
    (Sokal, Monte Carlo Methods in Statistical Mechanics, 1996), summed while pairs of lags are positive
    (Geyer, Statistical Science 7, 1992).
    """
    values = np.asarray(times, np.float64)
    count = len(values)
    if count < _MIN_FOR_AUTOCORRELATION:
        return 1.0
    signs = np.sign(values - np.median(values))
    signs -= signs.mean()
    if not signs.any():
        return 1.0
    # The autocorrelation at all lags, by the Fourier transform of the zero-padded series.
    padded_size = 1 << (2 * count - 1).bit_length()
    products = np.fft.irfft(np.abs(np.fft.rfft(signs, padded_size)) ** 2, padded_size)[:count]
    pair_sums = (products / products[0])[: count // 2 * 2].reshape(-1, 2).sum(axis=1)
    negative = np.flatnonzero(pair_sums <= 0)
    end = int(negative[0]) if len(negative) else len(pair_sums)
    return float(min(max(2 * pair_sums[:end].sum() - 1, 1.0), count))


def relative_half_width(interval: tuple[float, float], median: float) -> float:
    """Return the half-width of an interval relative to the median; 0 for a median of 0."""
    return (interval[1] - interval[0]) / 2 / median if median else 0.0


# --- the shape of the distribution --------------------------------------------------------------------


def has_trend(times: _Times) -> bool:
    """Return whether the medians of the first and last third differ significantly and by over 1%."""
    values = np.asarray(times, np.float64)
    if len(values) < _MIN_FOR_TREND:
        return False
    size = len(values) // 3
    first, last = values[:size], values[-size:]
    lower_ci, upper_ci = sorted(median_ci(third, _TREND_CONFIDENCE) for third in (first, last))
    change = abs(float(np.median(last) - np.median(first)))
    return lower_ci[1] < upper_ci[0] and change > _MIN_TREND * float(np.median(values))


def is_bimodal(times: _Times) -> bool:
    """Return whether the distribution of times has two peaks with a valley between them.

    The times are split into two groups so that the variance inside the groups is smallest (Otsu, IEEE SMC 9,
    1979). Then the numbers of samples in three windows of one width are compared: around the median of each
    group, and half-way between these medians.
    """
    ordered = np.sort(np.asarray(times, np.float64))
    count = len(ordered)
    if count < _MIN_FOR_PEAKS:
        return False
    min_size = max(int(count * _MIN_PEAK_SHARE), 1)
    sizes = np.arange(min_size, count - min_size + 1)
    # The values are centred, because a difference of squares of large, nearly equal numbers loses precision.
    sums = np.cumsum(ordered - ordered.mean())
    left, total = sums[sizes - 1], sums[-1]
    between_groups = left**2 / sizes + (total - left) ** 2 / (count - sizes)
    split = int(sizes[int(np.argmax(between_groups))])
    fast, slow = float(np.median(ordered[:split])), float(np.median(ordered[split:]))
    # The smallest difference between distinct values estimates the resolution of the clock.
    steps = np.diff(ordered)
    if slow - fast <= _CLOCK_STEPS * float(np.min(steps[steps > 0], initial=np.inf)):
        return False

    def count_around(centre: float) -> int:
        ends = (centre - (slow - fast) / 6, centre + (slow - fast) / 6)
        begin, end = np.searchsorted(ordered, ends).tolist()
        return int(end - begin)

    valley = count_around((fast + slow) / 2)
    peak = min(count_around(fast), count_around(slow))
    is_deep = peak - valley > _VALLEY_DEVIATIONS * (peak + valley) ** 0.5
    return valley < _MAX_VALLEY_SHARE * peak and is_deep
