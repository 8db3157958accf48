"""The stopping rule of sampling: it decides when a case has enough samples."""

from __future__ import annotations

from collections import deque
from typing import Literal

from cudakit.bench.method import Rule
from cudakit.bench.stats import autocorrelation_time, median_ci, relative_half_width

# A check sorts all samples. Each check waits until the number of samples has grown by this factor, so that
# the cost of checks per sample stays constant.
_CHECK_GROWTH = 1.1
# The spread is stable if it differs by less than _MAX_SPREAD_CHANGE from the mean of the spreads at this
# number of latest checks, during which the number of samples doubles.
_SPREADS_IN_MEAN = 8
_MAX_SPREAD_CHANGE = 0.05
_MIN_FOR_STABLE = 64


class Stopping:
    """Decides after each sample whether to stop.

    ``reason`` is ``precision`` if the precision is reached; ``stable`` if the spread is stable and the
    precision cannot be reached before the timeout (as in nvbench's stdrel criterion); ``timeout``; or empty
    while sampling continues.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.reason: Literal["", "precision", "stable", "timeout"] = ""
        self._times: list[float] = []
        self._elapsed_s = 0.0
        self._next_check_count = rule.min_samples
        self._spreads: deque[float] = deque(maxlen=_SPREADS_IN_MEAN)

    @property
    def converged(self) -> bool:
        """Whether sampling stopped before the timeout."""
        return self.reason in ("precision", "stable")

    def add(self, time_s: float, *, elapsed_s: float | None = None) -> bool:
        """Add a sample, and return whether to stop.

        ``elapsed_s`` is the time since the start of the first sample, including pauses and flushes. The
        default is the sum of the samples.
        """
        self._times.append(time_s)
        self._elapsed_s = self._elapsed_s + time_s if elapsed_s is None else elapsed_s
        if self._elapsed_s >= self.rule.timeout_s:
            is_precise = self._may_stop() and self._relative_half_widths()[0] < self.rule.precision
            self.reason = "precision" if is_precise else "timeout"
        elif len(self._times) >= self._next_check_count:
            self._check()
        return bool(self.reason)

    def _check(self) -> None:
        self._next_check_count = max(len(self._times) + 1, int(len(self._times) * _CHECK_GROWTH))
        half_width, spread = self._relative_half_widths()
        self._spreads.append(spread)
        if not self._may_stop():
            return
        if half_width < self.rule.precision:
            self.reason = "precision"
        elif self._is_stable() and self._exceeds_timeout(half_width):
            self.reason = "stable"

    def _may_stop(self) -> bool:
        has_min_samples = len(self._times) >= self.rule.min_samples
        return has_min_samples and self._elapsed_s >= self.rule.min_time_s

    def _relative_half_widths(self) -> tuple[float, float]:
        """Return the half-widths of the CI and of the interquartile range, relative to the median."""
        sorted_times = sorted(self._times)
        sample_count = len(sorted_times)
        median = (sorted_times[(sample_count - 1) // 2] + sorted_times[sample_count // 2]) / 2
        interval = median_ci(sorted_times, correlation=autocorrelation_time(self._times))
        quartiles = (
            sorted_times[sample_count // 4],
            sorted_times[sample_count - 1 - sample_count // 4],
        )
        return relative_half_width(interval, median), relative_half_width(quartiles, median)

    def _is_stable(self) -> bool:
        if len(self._spreads) < _SPREADS_IN_MEAN or len(self._times) < _MIN_FOR_STABLE:
            return False
        mean_spread = sum(self._spreads) / _SPREADS_IN_MEAN
        return all(
            abs(spread - mean_spread) <= _MAX_SPREAD_CHANGE * mean_spread
            for spread in self._spreads
        )

    def _exceeds_timeout(self, half_width: float) -> bool:
        # The half-width of a CI is inversely proportional to the root of the number of samples.
        needed_s = self._elapsed_s * (half_width / self.rule.precision) ** 2
        return needed_s > self.rule.timeout_s
