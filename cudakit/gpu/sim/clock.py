"""Virtual time."""

from __future__ import annotations


class Clock:
    """Integer nanoseconds since the device was opened. They only move on, and never by themselves."""

    __slots__ = ("_now_ns",)

    def __init__(self) -> None:
        self._now_ns = 0

    @property
    def now_ns(self) -> int:
        """The time at the host."""
        return self._now_ns

    def advance(self, nanoseconds: int) -> None:
        """Let time pass."""
        self._now_ns += max(nanoseconds, 0)

    def reach(self, time_ns: int) -> None:
        """Wait for a time; one that is past takes none."""
        self._now_ns = max(self._now_ns, time_ns)
