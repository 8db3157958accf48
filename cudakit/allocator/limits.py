"""Limits: monitors of memory, a limit of the cache, and reserved address ranges.

Callbacks run while the guard is released.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal, TypeAlias, get_args

from cudakit.allocator.engine import Engine
from cudakit.allocator.segments import Segment
from cudakit.allocator.state import AllocatorState
from cudakit.allocator.upstream import stream_number
from cudakit.errors import CudaError, UsageError
from cudakit.torch_rules.oom_facts import DEFAULT_POOL
from cudakit.torch_rules.setting_rules import is_class_name

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
        self._on_end: Callable[[Monitor], None] | None = None

    def end(self) -> None:
        """Stop monitoring the threshold."""
        if self._on_end is not None:
            self._on_end(self)
            self._on_end = None

    def update(self, value_bytes: int) -> bool:
        """Compare a new value with the threshold; return whether a crossing must be reported."""
        is_above = value_bytes >= self.threshold_bytes
        if is_above == self.is_above:
            return False
        self.is_above = is_above
        return self.direction in ("both", "up" if is_above else "down")


@dataclass(frozen=True, slots=True)
class AddressSpace:
    """The addresses that expandable segments reserve, including addresses without memory."""

    segments: int  # Number of reserved ranges.
    reserved_bytes: int


class Limits:
    """The methods of an allocator that monitor and limit memory."""

    def __init__(self, state: AllocatorState) -> None:
        self._state = state
        self._monitors: list[Monitor] = []
        self._callback_lock = threading.Lock()
        self.cache_limit_bytes: int | None = None

    # Methods for monitors.

    def monitor(
        self,
        metric: MonitoredMetric,
        threshold: int | float,
        callback: Callback,
        *,
        direction: Direction = "up",
    ) -> Monitor:
        """Call a function when the reserved, allocated or active bytes cross a threshold.

        ``threshold`` is a number of bytes, or a float: a fraction of the device's memory. The direction is
        "up" when the value reaches the threshold, and "down" when the value falls below it. The function is
        called right after the allocator call that crossed the threshold, in the same thread. It may allocate
        and free; its exceptions go to ``sys.unraisablehook``. Raises UsageError for an unknown metric or
        direction, or an invalid threshold.
        """
        if not isinstance(threshold, int):
            threshold = int(threshold * self._state.upstream.memory_info().total_bytes)
        _check_arguments(metric, threshold, direction)
        with self._state.locked():
            monitor = Monitor(metric, threshold, direction, callback)
            monitor.is_above = self._state.engine.stats.current_total(metric) >= threshold
            monitor._on_end = self._forget_monitor
            self._monitors.append(monitor)
            self._state.add_watcher(self._check_monitors)
            return monitor

    def _forget_monitor(self, monitor: Monitor) -> None:
        if monitor in self._monitors:
            self._monitors.remove(monitor)

    def _check_monitors(self) -> None:
        if self._monitors:
            self._call_monitors()
            return
        guard = self._state.guard
        if guard.try_enter():  # Another thread may be adding a monitor at this moment.
            try:
                if not self._monitors:
                    self._state.remove_watcher(self._check_monitors)
            finally:
                guard.leave()
                guard.drain_queue()

    def _call_monitors(self) -> None:
        """Call the callbacks whose threshold was crossed.

        Changes that callbacks make, and changes by other threads while callbacks run, are checked after the
        next call of the allocator. So callbacks cannot trigger each other endlessly.
        """
        if not self._callback_lock.acquire(blocking=False):
            return
        try:
            for monitor in list(self._monitors):
                value_bytes = self._state.engine.stats.current_total(monitor.metric)
                if monitor.update(value_bytes):
                    self._report_crossing(monitor, value_bytes)
        finally:
            self._callback_lock.release()

    def _report_crossing(self, monitor: Monitor, value_bytes: int) -> None:
        crossing = Crossing(
            monitor.metric,
            monitor.is_above,
            value_bytes,
            monitor.threshold_bytes,
            self._state.device,
        )
        try:
            monitor.callback(crossing)
        except Exception as error:  # noqa: BLE001  # The caller of the allocator did not cause it.
            _report_unraisable(error, monitor.callback)

    # Methods that limit the cached bytes.

    def set_cache_limit(self, limit_bytes: int | None) -> None:
        """Limit the cached bytes; None removes the limit.

        After a free that exceeds the limit, whole free segments are released: the smallest that suffices
        alone, else the largest ones. During captures nothing is released, and private pools and expandable
        segments are never released. A release waits for the device. Raises UsageError for a negative limit.
        """
        if limit_bytes is not None and limit_bytes < 0:
            raise UsageError(
                f"invalid cache limit: {limit_bytes} bytes", hint="0 is no cache, None is no limit"
            )
        with self._state.locked():
            self.cache_limit_bytes = limit_bytes
            if limit_bytes is None:
                self._state.remove_watcher(self._try_trim)
            else:
                self._state.add_watcher(self._try_trim)

    def _try_trim(self) -> None:
        """Release segments beyond the cache limit, unless another thread holds the guard."""
        limit_bytes, state = self.cache_limit_bytes, self._state
        if (
            limit_bytes is None
            or _cached_bytes(state.engine) <= limit_bytes
            or state.captures.capture_count
        ):
            return
        if state.guard.try_enter():  # Otherwise the thread with the guard trims the cache.
            try:
                with suppress(
                    CudaError
                ):  # The segment stays cached, and the next free tries again.
                    _trim_cache(state, limit_bytes)
            finally:
                state.guard.leave()
                state.guard.drain_queue()

    # Methods for the addresses of expandable segments (setExpandableSegmentReserveClassForStream,
    # getExpandableSegmentsReservedBytes of PyTorch 2.15).

    def set_reserve_class(self, stream: int, name: str) -> None:
        """Set the class of a stream, which determines the address range of its new expandable segments.

        The setting expandable_segments_reserve_by_class has a size for each class. For other classes, and for
        streams without a class (""), expandable_segments_reserve applies. Raises UsageError for an invalid
        name.
        """
        if name and not is_class_name(name):
            raise UsageError(
                f"{name!r} is not a valid name of a stream class",
                hint="a name has no ',', ':', '[', ']' and no space",
            )
        with self._state.locked():
            if name:
                self._state.engine.reserve_class_by_stream[stream_number(stream)] = name
            else:
                self._state.engine.reserve_class_by_stream.pop(stream_number(stream), None)

    def reserve_class(self, stream: int) -> str:
        """Return the class of a stream; "" for a stream without a class."""
        return self._state.engine.reserve_class_by_stream.get(stream_number(stream), "")

    def address_space(self) -> AddressSpace:
        """Return the number and the size of the address ranges that expandable segments reserve."""
        with self._state.locked():
            expandable_segments = self._state.engine.expandable_segments
            segments = expandable_segments.segments if expandable_segments else ()
            return AddressSpace(len(segments), sum(segment.size for segment in segments))


def _cached_bytes(engine: Engine) -> int:
    return engine.stats.current_total("reserved_bytes") - engine.stats.current_total("active_bytes")


def _trim_cache(state: AllocatorState, limit_bytes: int) -> None:
    """Release whole segments until the cached bytes are within the limit. Raises CudaError."""
    engine = state.engine
    free_segments = sorted(
        filter(_is_releasable, engine.segments.values()), key=lambda segment: segment.size
    )
    while free_segments and (excess_bytes := _cached_bytes(engine) - limit_bytes) > 0:
        large_enough_indices = (
            index for index, segment in enumerate(free_segments) if segment.size >= excess_bytes
        )
        released_index = next(large_enough_indices, len(free_segments) - 1)
        state.cache.release_block(free_segments.pop(released_index).first_block, None)


def _is_releasable(segment: Segment) -> bool:
    """Return whether a segment is free as a whole, not expandable, and in the default pool."""
    first_block = segment.first_block
    is_plain = not segment.is_expandable and segment.pool.id == DEFAULT_POOL
    return is_plain and first_block.is_free and first_block.size == segment.size


def _check_arguments(metric: str, threshold_bytes: int, direction: str) -> None:
    if metric not in get_args(MonitoredMetric):
        raise UsageError(
            f"{metric!r} cannot be monitored", hint=f"one of {', '.join(get_args(MonitoredMetric))}"
        )
    if direction not in get_args(Direction):
        raise UsageError(f"{direction!r} is not a direction", hint="one of 'up', 'down' or 'both'")
    if threshold_bytes <= 0:
        raise UsageError(
            f"invalid threshold: {threshold_bytes} bytes", hint="a threshold is above 0"
        )


def _report_unraisable(error: Exception, callback: Callback) -> None:
    """Report an exception by sys.unraisablehook, as Python does for finalizers."""
    sys.unraisablehook(
        SimpleNamespace(
            exc_type=type(error),
            exc_value=error,
            exc_traceback=error.__traceback__,
            err_msg="Exception ignored in a memory monitor",
            object=callback,
        )
    )
