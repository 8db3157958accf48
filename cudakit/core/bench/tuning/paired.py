"""Pairs: two things measured in one round, so that both met the same clock and the same neighbours. Pure.

What is looked at are ratios, of one to the other in each round, and of them ranks alone: whatever their
distribution is, under equal speed as many lie above 1 as below.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import median

from cudakit.core.bench.stats import dependence, median_interval


def chance(above: int, n: int) -> float:
    """Return how probable it is that so many of n coins or more fall on one side: the sign test."""
    return sum(comb(n, k) for k in range(above, n + 1)) / 2.0**n


def is_above(ratios: Sequence[float], bar: float, level: float) -> bool:
    """Say whether the true median is above a bar, which is wrong with a probability of ``level`` at most."""
    return chance(sum(ratio > bar for ratio in ratios), len(ratios)) <= level


def ratio_interval(ratios: Sequence[float], level: float) -> tuple[float, float] | None:
    """Give an interval; the true median is below it, or above, with a probability of ``level`` each at most.

    Two order statistics (``stats.median_interval``), further apart where neighbours are alike; None where
    there are too few to be that sure.
    """
    if not ratios:
        return None
    alike = dependence(ratios)
    if 0.5 ** (len(ratios) / alike) > level:
        return None
    return median_interval(ratios, 1 - 2 * level, dependence=alike)


def middle(ratios: Sequence[float]) -> float:
    """Return the median; nothing is infinitely slow."""
    return median(ratios) if ratios else float("inf")
