"""Outliers among comparable values: each value is compared with the median and spread of all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# A value is an outlier if its modified z-score is above 3.5 (Iglewicz and Hoaglin, "How to Detect and Handle
# Outliers", 1993).
MAX_SCORE = 3.5
# For normally distributed values, the standard deviation is the MAD multiplied by this factor.
SIGMA_PER_MAD = 1.4826


@dataclass(frozen=True, slots=True)
class PeerStatistics:
    """The peers of one value, and the limit beyond which the value is an outlier."""

    peer_count: int  # Number of peers.
    peer_median: float  # Median of the peers.
    peer_mad: float  # Median absolute deviation of the peers from their median.
    limit: float  # Worst value that is no outlier.

    def has_outlier(self, value: float, *, higher_is_better: bool) -> bool:
        """Return whether a value is worse than the limit."""
        return value < self.limit if higher_is_better else value > self.limit


def compare_with_peers(
    values: Sequence[float], *, higher_is_better: bool, tolerance: float
) -> tuple[PeerStatistics, ...]:
    """Compare each value with all other values; return nothing for fewer than two values.

    The limit is worse than the peers' median by ``tolerance`` times the median, or by 3.5 robust standard
    deviations of the peers if that is more. The value itself does not affect its limit.
    """
    if len(values) < 2:
        return ()
    array = np.array(values, np.float64)
    return tuple(
        _describe_peers(np.delete(array, i), higher_is_better, tolerance) for i in range(len(array))
    )


def _describe_peers(
    peers: np.ndarray[tuple[int], np.dtype[np.float64]], higher_is_better: bool, tolerance: float
) -> PeerStatistics:
    median = float(np.median(peers))
    mad = float(np.median(np.abs(peers - median)))
    distance = max(tolerance * median, MAX_SCORE * SIGMA_PER_MAD * mad)
    limit = median - distance if higher_is_better else median + distance
    return PeerStatistics(len(peers), median, mad, limit)
