"""A number that goes up and down seldom enough to be counted by itself."""

from __future__ import annotations


class Metric:
    """Its value now, and its peak and what was added and taken away since they were reset."""

    __slots__ = ("added", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.added = self.freed = 0

    def increase(self, amount: int = 1) -> None:
        """Add to it."""
        self.current += amount
        self.added += amount
        self.peak = max(self.peak, self.current)

    def decrease(self, amount: int = 1) -> None:
        """Take away from it."""
        self.current -= amount
        self.freed += amount

    def reset_peak(self) -> None:
        """Let the peak be the value now."""
        self.peak = self.current

    def reset_sums(self) -> None:
        """Begin to add up anew."""
        self.added = self.freed = 0
