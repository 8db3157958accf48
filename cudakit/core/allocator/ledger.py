"""The ledger: what is allocated, in one number, since every allocation and every free changes it.

Blocks handed out, their bytes and the bytes that were asked for; each of the small pools, of the large ones
and of all: nine metrics, which lie in one integer side by side. To add to all of them is one addition, and to
see whether any is higher than ever one more: a lane of ``used`` is the metric less its peak, with so much
added that the highest bit of the lane is set where it is above.

A change is a statement in which nothing is called. CPython with its global lock switches threads, and runs
finalizers and handlers of signals, at calls and at the ends of loops only: for them it has happened or has
not, whoever holds a lock.
"""

from __future__ import annotations

from operator import mul
from typing import Final

METRICS: Final = ("allocation", "allocated_bytes", "requested_bytes")
SMALL, LARGE, ALL = range(3)

_MOST_TABS = 1 << 14
LANE_BITS: Final = 80  # bytes that are allocated and freed for a year fit in
_KINDS = 3
_LANES = range(0, LANE_BITS * _KINDS * len(METRICS), LANE_BITS)
_LANE = (1 << LANE_BITS) - 1
_AT_PEAK = sum((1 << LANE_BITS - 1) - 1 << lane for lane in _LANES)
ABOVE_PEAK: Final = sum(1 << LANE_BITS - 1 << lane for lane in _LANES)


class Tab:
    """How often blocks of one weight were handed out that are not in ``Ledger.added``."""

    __slots__ = ("times", "weight")

    def __init__(self, weight: int) -> None:
        self.weight = weight
        self.times = 0


class Ledger:
    """What is allocated now, at most, and in sum; ``pending`` blocks were freed, but other streams use them.

    Whoever adds to ``used`` looks at ABOVE_PEAK and calls ``raise_peaks`` where it is met. What is added is
    added to ``added`` as well, or 1 to the Tab of its weight.
    """

    __slots__ = ("_base", "_peaks", "_tabs", "added", "pending", "used")

    def __init__(self) -> None:
        self.used = _AT_PEAK
        self.added = 0
        self.pending = 0
        self._peaks = 0
        self._base = 0  # what was in use at the last reset of sums
        self._tabs: dict[int, Tab] = {}

    def tab(self, weight: int) -> Tab | None:
        """Return where to count blocks of a weight; None where there are too many tabs."""
        found = self._tabs.get(weight)
        if found is None and len(self._tabs) < _MOST_TABS:
            found = self._tabs[weight] = Tab(weight)
        return found

    def current(self, kind: int, metric: int) -> int:
        """Return the value of a metric."""
        return self._peaks + self.used - _AT_PEAK >> _place(kind, metric) & _LANE

    def read(self, kind: int, metric: int) -> tuple[int, int, int, int]:
        """Return the value of a metric, its peak, and what was added and taken away since the last resets."""
        place = _place(kind, metric)
        current = self.current(kind, metric)
        added = self.added >> place & _LANE
        base = self._base >> place & _LANE
        return current, self._peaks >> place & _LANE, added, base + added - current

    def copy(self) -> Ledger:
        """Return what it is at this moment."""
        found = Ledger()
        weights, tabs = list(self._tabs), list(self._tabs.values())
        names = "used", "added", "_peaks", "_base", *["times"] * len(tabs)
        # All of it in one step, in which no other thread has a turn.
        values = list(map(getattr, (self, self, self, self, *tabs), names))
        found.used, added, found._peaks, found._base = values[:4]
        found.added = added + sum(map(mul, weights, values[4:]))
        return found

    def raise_peaks(self) -> None:
        """Let the peaks that something is above be what it is."""
        met = self.used & ABOVE_PEAK
        lowest = met >> LANE_BITS - 1
        above = (self.used & met - lowest) + lowest
        self.used -= above
        self._peaks += above

    def reset_peaks(self) -> None:
        """Let every peak be the value now."""
        self._peaks += self.used - _AT_PEAK
        self.used = _AT_PEAK

    def reset_sums(self) -> None:
        """Begin to add up anew."""
        now = self.copy()
        self._base = now._peaks + now.used - _AT_PEAK
        self.added -= now.added


def unit(kind: int, metric: int) -> int:
    """Return what adds 1 to a metric of a kind of pools, and of all."""
    return (1 << _place(kind, metric)) + (1 << _place(ALL, metric))


def _place(kind: int, metric: int) -> int:
    return (kind * len(METRICS) + metric) * LANE_BITS
