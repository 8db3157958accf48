"""Statistics of paired samples, and the final comparison that decides a search. Pure.

Two algorithms are measured in one round, so that both meet the same clock. Only the ratio of the two counts,
and of the ratios only ranks: whatever their distribution, at equal speed as many lie above 1 as below.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import comb
from statistics import median

from cudakit.core.bench.stats import dependence, median_interval

# Share of searches that find a winner although nothing is faster than the default.
LEVEL = 0.01
# A smaller gain does not justify another algorithm: the speed of one and the same algorithm differs by this
# much between addresses of its buffers.
LEAST_GAIN = 0.01


def chance(above: int, n: int) -> float:
    """Return the probability that ``above`` or more of n fair coins fall on one side: the sign test."""
    return sum(comb(n, k) for k in range(above, n + 1)) / 2.0**n


def is_above(ratios: Sequence[float], bar: float, level: float) -> bool:
    """Return whether the true median is above a bar, with an error probability of ``level`` at most."""
    return chance(sum(ratio > bar for ratio in ratios), len(ratios)) <= level


def ratio_interval(ratios: Sequence[float], level: float) -> tuple[float, float] | None:
    """Return an interval; the true median is below it with probability ``level`` at most, likewise above.

    Two order statistics (``stats.median_interval``), further apart if consecutive ratios are correlated; None
    for too few ratios.
    """
    if not ratios:
        return None
    alike = dependence(ratios)
    if 0.5 ** (len(ratios) / alike) > level:
        return None
    return median_interval(ratios, 1 - 2 * level, dependence=alike)


def middle(ratios: Sequence[float]) -> float:
    """Return the median, or infinity for no ratios."""
    return median(ratios) if ratios else float("inf")


class Final:
    """Ratios of finalists to the default, in parts with buffers of their own, sampled after they were chosen.

    Thousands of algorithms may be measured until then, and some are among the best by luck. The final uses no
    earlier sample, so only its few comparisons can be wrong: each has the level LEVEL over their number
    (Bonferroni), and all together are wrong with a probability of LEVEL at most.
    """

    def __init__(self, finalists: Sequence[int] = ()) -> None:
        self.finalists = tuple(finalists)
        self.rounds = 0
        self._parts: list[dict[int, list[float]]] = []

    def begin_part(self) -> None:
        """Start a part with other buffers."""
        self._parts.append(defaultdict(list))

    def add(self, ratios: dict[int, float]) -> None:
        """Add the ratios of a round."""
        self.rounds += 1
        for number, ratio in ratios.items():
            self._parts[-1][number].append(ratio)

    def ranked(self) -> list[int]:
        """List the finalists, the fastest first."""
        return sorted(self.finalists, key=lambda number: middle(self._all(number)))

    def gain(self, number: int) -> float | None:
        """Return the relative saving over the default; None without samples."""
        ratios = self._all(number)
        return 1 - middle(ratios) if ratios else None

    def gain_interval(self, number: int) -> tuple[float, float] | None:
        """Return the CI of the gain; None for too few samples."""
        found = ratio_interval(self._all(number), LEVEL / len(self.finalists))
        return (1 - found[1], 1 - found[0]) if found else None

    def is_faster(self, number: int) -> bool:
        """Return whether it is significantly faster, by LEAST_GAIN or more.

        If it is slower on the buffers of one of three parts, a third of its ratios is above 1: it is not.
        """
        gain, interval = self.gain(number), self.gain_interval(number)
        if gain is None or interval is None:
            return False
        return interval[0] > 0 and gain >= LEAST_GAIN

    def _all(self, number: int) -> list[float]:
        return [ratio for part in self._parts for ratio in part.get(number, ())]
