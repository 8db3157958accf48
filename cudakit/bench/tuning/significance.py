"""Statistics of paired samples, and the final comparison that decides a search.

Two algorithms are measured in the same round, at the same clock. The statistics only use whether the ratio of
their times is above 1: if both are equally fast, that has a probability of 1/2 for every distribution.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import comb
from statistics import median

from cudakit.bench.stats import autocorrelation_time, median_ci

# The probability that a search finds a winner although no algorithm is faster than the default.
FALSE_POSITIVE_RATE = 0.01
# The minimum gain of a winner. The speed of an algorithm differs by this much between addresses of its
# buffers.
MIN_GAIN = 0.01


def sign_test(count_above: int, count: int) -> float:
    """Return the probability that ``count_above`` or more of ``count`` ratios are above 1 by chance."""
    return sum(comb(count, i) for i in range(count_above, count + 1)) / 2.0**count


def is_median_above(ratios: Sequence[float], threshold: float, level: float) -> bool:
    """Return whether the true median is above a threshold, with an error probability of at most ``level``."""
    return sign_test(sum(ratio > threshold for ratio in ratios), len(ratios)) <= level


def ratio_interval(ratios: Sequence[float], level: float) -> tuple[float, float] | None:
    """Return a CI of the median of ratios, or None if there are too few ratios.

    The true median is below the CI with a probability of at most ``level``, and above it likewise. Correlated
    ratios widen the CI; see ``stats.median_ci``.
    """
    if not ratios:
        return None
    correlation = autocorrelation_time(ratios)
    if 0.5 ** (len(ratios) / correlation) > level:
        return None
    return median_ci(ratios, 1 - 2 * level, correlation=correlation)


def median_or_inf(ratios: Sequence[float]) -> float:
    """Return the median of ratios, or infinity if there are none."""
    return median(ratios) if ratios else float("inf")


class FinalComparison:
    """The ratios of finalists to the default, measured after the finalists were chosen.

    Among thousands of algorithms, some are the fastest by chance. The final does not use the samples that
    selected the finalists. It makes one comparison per finalist, each with the significance level
    FALSE_POSITIVE_RATE divided by the number of finalists (Bonferroni). Each part of the final has new
    buffers.
    """

    def __init__(self, finalists: Sequence[int] = ()) -> None:
        self.finalists = tuple(finalists)
        self.round_count = 0
        self._ratios_by_part: list[dict[int, list[float]]] = []

    def begin_part(self) -> None:
        """Begin a part of the final, which is measured with new buffers."""
        self._ratios_by_part.append(defaultdict(list))

    def add(self, ratios: dict[int, float]) -> None:
        """Add the ratio of each finalist in one round."""
        self.round_count += 1
        for finalist_index, ratio in ratios.items():
            self._ratios_by_part[-1][finalist_index].append(ratio)

    def ranked_finalists(self) -> list[int]:
        """Return the finalists, the fastest first."""
        return sorted(self.finalists, key=lambda number: median_or_inf(self._ratios(number)))

    def gain(self, finalist_index: int) -> float | None:
        """Return the relative time saved compared with the default; None without samples."""
        ratios = self._ratios(finalist_index)
        return 1 - median_or_inf(ratios) if ratios else None

    def gain_interval(self, finalist_index: int) -> tuple[float, float] | None:
        """Return the CI of the gain; None for too few samples."""
        interval = ratio_interval(
            self._ratios(finalist_index), FALSE_POSITIVE_RATE / len(self.finalists)
        )
        return (1 - interval[1], 1 - interval[0]) if interval else None

    def is_faster(self, finalist_index: int) -> bool:
        """Return whether a finalist is significantly faster than the default, by MIN_GAIN or more.

        A finalist that is slower in one of three parts has a third of its ratios above 1, and is therefore
        not significantly faster.
        """
        gain, interval = self.gain(finalist_index), self.gain_interval(finalist_index)
        if gain is None or interval is None:
            return False
        return interval[0] > 0 and gain >= MIN_GAIN

    def _ratios(self, finalist_index: int) -> list[float]:
        return [
            ratio for ratios in self._ratios_by_part for ratio in ratios.get(finalist_index, ())
        ]
