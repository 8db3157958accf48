"""The guard of an allocator: a lock that its holder cannot acquire a second time, with a queue of frees.

While a thread holds the lock, Python may run a finalizer in this thread, and the finalizer may free memory. A
plain lock would deadlock; a re-entrant lock would let the finalizer see half-updated blocks. So a free that
cannot acquire the lock is queued, and performed when the running call ends.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias, get_args

from cudakit.errors import CudaError, UsageError


class Reentered(UsageError):
    """A finalizer, signal handler or MemPool upstream called the allocator during another call of it."""

    def __init__(self) -> None:
        super().__init__(
            "the allocator was called while it was running in the same thread",
            hint="finalizers and signal handlers may only free memory",
        )


class Gate:
    """Two flags that stop the fast path from changing the allocator.

    ``busy`` is set while a call changes the allocator, ``slow`` while an option is on that the fast path does
    not implement.
    """

    __slots__ = ("busy", "slow")

    def __init__(self) -> None:
        self.busy = self.slow = False


class Guard:
    """A lock that its holder cannot acquire a second time, with a queue of frees that could not acquire it.

    ``perform_free`` is called with the arguments of each queued free. ``watchers`` are called, without the
    lock, after every change.
    """

    __slots__ = ("gate", "lock", "perform_free", "queued_frees", "watchers")

    def __init__(self, perform_free: Callable[..., None], gate: Gate | None = None) -> None:
        self.lock = threading.RLock()
        self.gate = gate or Gate()
        self.perform_free = perform_free
        self.queued_frees: deque[tuple[Any, ...]] = deque()
        self.watchers: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        """Hold the lock during a ``with`` block. Raises Reentered if this thread holds it already."""
        self.enter()
        if self.queued_frees:
            try:
                self.perform_queued()
            except BaseException:
                self.exit()
                raise

    def __exit__(self, *_: object) -> None:
        self.exit()

    @contextmanager
    def unlocked(self) -> Iterator[None]:
        self.leave()
        try:
            yield
        finally:
            self.enter()

    def replace_lock(self) -> None:
        """Replace the lock: the thread that held it does not exist in a forked process."""
        self.lock = threading.RLock()
        self.gate.busy = False

    def enter(self) -> None:
        """Acquire the lock. Raises Reentered if this thread holds it already."""
        self.lock.acquire()
        if self.gate.busy:
            self.lock.release()
            raise Reentered
        self.gate.busy = True

    def try_enter(self) -> bool:
        """Acquire the lock and return True; return False if any thread holds it, including this one."""
        if self.gate.busy or not self.lock.acquire(blocking=False):
            return False
        self.gate.busy = True
        return True

    def leave(self) -> None:
        """Release the lock without performing queued frees or calling watchers."""
        self.gate.busy = False
        self.lock.release()

    def exit(self) -> None:
        """Release the lock, perform queued frees and call the watchers."""
        self.leave()
        if self.queued_frees:
            self.drain_queue()
        if self.watchers:
            for watcher in list(self.watchers):
                watcher()

    def queue_free(self, *free_arguments: Any) -> None:
        self.queued_frees.append(free_arguments)
        # The thread with the lock may have released the lock before the queue contained this free.
        self.drain_queue()

    def drain_queue(self) -> None:
        """Perform queued frees, unless a thread holds the lock: that thread performs the frees later."""
        while self.queued_frees and self.try_enter():
            try:
                self.perform_queued()
            finally:
                self.leave()

    def perform_queued(self) -> None:
        """Perform queued frees. The caller holds the lock."""
        while self.queued_frees:
            # If an event cannot be recorded, the block stays pending, and the event is recorded later.
            with suppress(CudaError):
                self.perform_free(*self.queued_frees.popleft())


# --- Monitors: functions of the program that are called when the memory in use crosses a threshold ---

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
