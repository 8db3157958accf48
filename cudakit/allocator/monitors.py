"""Monitors: functions of the program that are called when the memory in use crosses a threshold."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal, TypeAlias, get_args

from cudakit.errors import UsageError

MonitoredMetric: TypeAlias = Literal["reserved_bytes", "allocated_bytes", "active_bytes"]
Direction: TypeAlias = Literal["up", "down", "both"]


@dataclass(frozen=True, slots=True)
class Crossing:
    """A report that a monitored value has reached a threshold, or has fallen below the threshold."""

    metric: MonitoredMetric
    up: bool  # Whether the value is now at or above the threshold.
    value_bytes: int  # Monitored value when the threshold was checked.
    threshold_bytes: int
    device: int


Callback: TypeAlias = Callable[[Crossing], object]


class Monitor:
    """A threshold that is monitored until ``end``."""

    def __init__(
        self,
        metric: MonitoredMetric,
        threshold_bytes: int,
        direction: Direction,
        callback: Callback,
    ) -> None:
        self.metric = metric
        self.threshold_bytes = threshold_bytes
        self.direction = direction
        self.callback = callback
        self.is_above = False
        self.has_ended = False

    def end(self) -> None:
        """Stop monitoring the threshold."""
        self.has_ended = True

    def update(self, value_bytes: int) -> bool:
        """Compare a new value with the threshold; return whether a crossing must be reported."""
        is_above = value_bytes >= self.threshold_bytes
        if is_above == self.is_above:
            return False
        self.is_above = is_above
        return self.direction in ("both", "up" if is_above else "down")


class Monitors:
    """The monitors of one allocator. ``current_total`` returns the current value of a metric."""

    def __init__(self, device: int, current_total: Callable[[str], int]) -> None:
        self._device = device
        self._current_total = current_total
        self._monitors: list[Monitor] = []
        self._callback_lock = threading.Lock()

    def __bool__(self) -> bool:
        for monitor in self._monitors:  # noqa: SIM110  any() would double the time of each request
            if not monitor.has_ended:
                return True
        return False

    def add(
        self,
        metric: MonitoredMetric,
        threshold_bytes: int,
        direction: Direction,
        callback: Callback,
    ) -> Monitor:
        """Add a monitor. The caller holds the guard. Raises UsageError for invalid arguments."""
        if metric not in get_args(MonitoredMetric):
            raise UsageError(
                f"{metric!r} cannot be monitored",
                hint=f"one of {', '.join(get_args(MonitoredMetric))}",
            )
        if direction not in get_args(Direction):
            raise UsageError(
                f"{direction!r} is not a direction", hint="one of 'up', 'down' or 'both'"
            )
        if threshold_bytes <= 0:
            raise UsageError(
                f"invalid threshold: {threshold_bytes} bytes", hint="a threshold is above 0"
            )
        monitor = Monitor(metric, threshold_bytes, direction, callback)
        monitor.is_above = self._current_total(metric) >= threshold_bytes
        self._monitors = [each for each in self._monitors if not each.has_ended] + [monitor]
        return monitor

    def call_crossed(self) -> None:
        """Call the functions whose threshold was crossed, without the allocator's guard.

        Changes that the functions make, and changes by other threads while functions run, are checked after
        the next call of the allocator. So the functions cannot trigger each other endlessly.
        """
        if not self._callback_lock.acquire(blocking=False):
            return
        try:
            for monitor in list(self._monitors):
                value_bytes = self._current_total(monitor.metric)
                if monitor.has_ended or not monitor.update(value_bytes):
                    continue
                try:
                    monitor.callback(
                        Crossing(
                            monitor.metric,
                            monitor.is_above,
                            value_bytes,
                            monitor.threshold_bytes,
                            self._device,
                        )
                    )
                except Exception as error:  # noqa: BLE001  # The caller of the allocator did not cause it.
                    # Reported as Python reports the exceptions of finalizers.
                    sys.unraisablehook(
                        SimpleNamespace(
                            exc_type=type(error),
                            exc_value=error,
                            exc_traceback=error.__traceback__,
                            err_msg="Exception ignored in a memory monitor",
                            object=monitor.callback,
                        )
                    )
        finally:
            self._callback_lock.release()
