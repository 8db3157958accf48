"""Functions that are called when what is held crosses a threshold; never with the allocator's guard held."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal, TypeAlias, get_args

from cudakit.errors import UsageError

Held: TypeAlias = Literal["reserved_bytes", "allocated_bytes", "active_bytes"]
Direction: TypeAlias = Literal["up", "down", "both"]


@dataclass(frozen=True, slots=True)
class Crossing:
    """What was seen: that a value has come to a threshold, or has fallen below it."""

    metric: Held
    up: bool  # it is at least the threshold now; else below
    value_bytes: int  # when it was seen
    threshold_bytes: int
    device: int


Callback: TypeAlias = Callable[[Crossing], object]


class Monitor:
    """A threshold that is watched until ``end``."""

    def __init__(
        self, metric: Held, threshold_bytes: int, direction: Direction, callback: Callback
    ) -> None:
        self.metric = metric
        self.threshold_bytes = threshold_bytes
        self.direction = direction
        self.callback = callback
        self.above = False
        self._ends: Callable[[Monitor], None] | None = None

    def end(self) -> None:
        """Watch no longer."""
        if self._ends is not None:
            self._ends(self)
            self._ends = None

    def crossed(self, value: int) -> bool:
        """Note a value; return whether that is a crossing to be told."""
        above = value >= self.threshold_bytes
        if above == self.above:
            return False
        self.above = above
        return self.direction in ("both", "up" if above else "down")


class Monitors:
    """The monitors of one device. ``value_of`` reads what is watched, without any lock.

    ``watching`` is true while there are any; who changes what is held calls ``look`` then, without the guard.
    """

    def __init__(self, value_of: Callable[[Held], int], device: int) -> None:
        self._value_of = value_of
        self._device = device
        self._telling = threading.Lock()
        self.watching: list[Monitor] = []

    def add(
        self, metric: Held, threshold_bytes: int, callback: Callback, direction: Direction
    ) -> Monitor:
        """Watch from now on: what is above already is told when it has been below. Raises UsageError."""
        _check(metric, threshold_bytes, direction)
        monitor = Monitor(metric, threshold_bytes, direction, callback)
        monitor.above = self._value_of(metric) >= threshold_bytes
        monitor._ends = self._forget
        self.watching.append(monitor)
        return monitor

    def look(self) -> None:
        """Call whoever is to be told.

        What callbacks themselves allocate and free is looked at with the next call, so that they cannot go
        on for ever; and so is what another thread does while they run.
        """
        if not self._telling.acquire(blocking=False):
            return
        try:
            for monitor in list(self.watching):
                value = self._value_of(monitor.metric)
                if monitor.crossed(value):
                    self._tell(monitor, value)
        finally:
            self._telling.release()

    def _tell(self, monitor: Monitor, value: int) -> None:
        crossing = Crossing(
            monitor.metric, monitor.above, value, monitor.threshold_bytes, self._device
        )
        try:
            monitor.callback(crossing)
        except Exception as error:  # noqa: BLE001  # who allocates has done nothing wrong
            _report(error, monitor.callback)

    def _forget(self, monitor: Monitor) -> None:
        if monitor in self.watching:
            self.watching.remove(monitor)


def _check(metric: str, threshold_bytes: int, direction: str) -> None:
    if metric not in get_args(Held):
        raise UsageError(
            f"there is no {metric!r} to watch", hint=f"one of {', '.join(get_args(Held))}"
        )
    if direction not in get_args(Direction):
        raise UsageError(f"{direction!r} is no direction", hint="'up', 'down' or 'both'")
    if threshold_bytes <= 0:
        raise UsageError(
            f"a threshold of {threshold_bytes} bytes is never crossed", hint="give more than 0"
        )


def _report(error: Exception, callback: Callback) -> None:
    """Say what failed where Python says what finalizers do: nobody is there to catch it."""
    sys.unraisablehook(
        SimpleNamespace(
            exc_type=type(error),
            exc_value=error,
            exc_traceback=error.__traceback__,
            err_msg="Exception ignored in a monitor of memory",
            object=callback,
        )
    )
