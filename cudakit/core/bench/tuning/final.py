"""The final: samples of the few best, taken after they were chosen, and what they decide. Pure.

Thousands may be looked at until then, and luck decides on some of them. But the final forgets what was
measured before, so that only its few comparisons can be wrong: each is held to LEVEL over their number
(Bonferroni), and all together are wrong with a probability of LEVEL at most.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from cudakit.core.bench.tuning.limits import LEAST_GAIN, LEVEL
from cudakit.core.bench.tuning.paired import middle, ratio_interval


class Final:
    """Ratios of finalists to the default, in parts that have buffers of their own."""

    def __init__(self, finalists: Sequence[int] = ()) -> None:
        self.finalists = tuple(finalists)
        self.rounds = 0
        self._parts: list[dict[int, list[float]]] = []

    def begin_part(self) -> None:
        """Go on to other buffers."""
        self._parts.append(defaultdict(list))

    def add(self, ratios: dict[int, float]) -> None:
        """Take in what is known of a round."""
        self.rounds += 1
        for number, ratio in ratios.items():
            self._parts[-1][number].append(ratio)

    def ranked(self) -> list[int]:
        """List the finalists, the fastest first."""
        return sorted(self.finalists, key=lambda number: middle(self._all(number)))

    def gain(self, number: int) -> float | None:
        """Return what it takes less than the default, as a share of that; None without samples."""
        ratios = self._all(number)
        return 1 - middle(ratios) if ratios else None

    def gain_interval(self, number: int) -> tuple[float, float] | None:
        """Give the least and the most that the gain may be; None where that is not known so well."""
        found = ratio_interval(self._all(number), LEVEL / len(self.finalists))
        return (1 - found[1], 1 - found[0]) if found else None

    def is_faster(self, number: int) -> bool:
        """Say whether it is surely faster, and by enough to matter.

        What is slower on the buffers of one part in three is not: a third of its ratios lies above 1.
        """
        gain, interval = self.gain(number), self.gain_interval(number)
        if gain is None or interval is None:
            return False
        return interval[0] > 0 and gain >= LEAST_GAIN

    def _all(self, number: int) -> list[float]:
        return [ratio for part in self._parts for ratio in part.get(number, ())]
