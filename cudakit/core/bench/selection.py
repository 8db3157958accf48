"""Which readings are samples: not those during which the clock of the SMs was far below the usual."""

from __future__ import annotations

from collections import deque
from statistics import median

from cudakit.core.bench.timer import Reading

# nvbench discards below this share of the default clock; here the usual one is what the device shows.
_LEAST_CLOCK = 0.75
_REMEMBERED = 101
_LEAST_REMEMBERED = 5
# What was low this often, and as often as it was not, is no exception any more.
_MOST_LOW = 10


class Selection:
    """Readings, sorted into samples and others; none is forgotten."""

    def __init__(self) -> None:
        self.kept: list[Reading] = []
        self.discarded: list[Reading] = []
        self.gave_up = False  # whether low clocks became usual, and count since then
        self._clocks: deque[float] = deque(maxlen=_REMEMBERED)

    def look(self, reading: Reading) -> None:
        """Learn the usual clock from a reading that is no sample."""
        if reading.sm_clock_hz is not None:
            self._clocks.append(reading.sm_clock_hz)

    def add(self, reading: Reading) -> bool:
        """Take in a reading; True means that it is a sample."""
        good = reading.valid and not self._is_low(reading)
        (self.kept if good else self.discarded).append(reading)
        if good:
            self.look(reading)
        return good

    def _is_low(self, reading: Reading) -> bool:
        if reading.sm_clock_hz is None or self.gave_up or len(self._clocks) < _LEAST_REMEMBERED:
            return False
        low = reading.sm_clock_hz < _LEAST_CLOCK * median(self._clocks)
        if low and len(self.discarded) >= max(_MOST_LOW, len(self.kept)):
            self.gave_up = True
            return False
        return low
