"""Axes: their range, ticks and tick labels."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.units import format_bytes, format_count, format_rate, format_seconds

Array: TypeAlias = npt.NDArray[Any]
Unit: TypeAlias = Literal["bytes", "seconds", "count", "ratio", "rate"]
LogUnit: TypeAlias = Literal["bytes", "seconds", "count", "rate"]

# The intended number of ticks, and the number of labels that fit in 700 pixels.
_TICK_COUNT = 5
_MAX_LABELS = 12
_MINUTE_SECONDS, _HOUR_SECONDS, _DAY_SECONDS = 60, 3600, 86400
_TIME_UNITS: Final = (
    (_DAY_SECONDS, "d"),
    (_HOUR_SECONDS, "h"),
    (_MINUTE_SECONDS, "min"),
    (1, "s"),
    (1e-3, "ms"),
    (1e-6, "us"),
)
_CLOCK_STEPS: Final = (
    *(_MINUTE_SECONDS * minutes for minutes in (1, 2, 5, 10, 15, 30)),
    *(_HOUR_SECONDS * hours for hours in (1, 2, 3, 6, 12, 24)),
)


@dataclass(frozen=True, slots=True)
class Tick:
    """A labelled value of an axis."""

    value: float
    label: str


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of finite values, ``low < high``, and its ticks; a logarithmic axis is positive."""

    low: float
    high: float
    ticks: tuple[Tick, ...]
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """Return the position of a value: 0 at ``low``, 1 at ``high``."""
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def shares(self, values: Array) -> Array:
        """Return the positions of an array of values."""
        if self.logarithmic:
            return np.log(values / self.low) / math.log(self.high / self.low)
        return (values - self.low) / (self.high - self.low)


def tight_axis(low: float, high: float, unit: Unit) -> Axis:
    """Return an axis from exactly ``low`` to ``high``, such as a time axis."""
    if not _is_range(low, high):
        half_width = max(0.5, abs(low) * 1e-9)
        low, high = low - half_width, high + half_width
    return Axis(low, high, _ticks(low, high, unit))


def rounded_axis(low: float, high: float, unit: Unit, *, amount_unit: str = "") -> Axis:
    """Return an axis that contains 0 and ends at ticks, such as an axis of bytes.

    ``amount_unit`` is the unit of the amount of a rate: ``B``, ``FLOP``.
    """
    low, high = min(low, 0.0), max(high, 0.0)
    if not _is_range(low, high):
        low, high = 0.0, 1.0
    tick_step = _tick_step(high - low, unit)
    low, high = math.floor(low / tick_step) * tick_step, math.ceil(high / tick_step) * tick_step
    return Axis(low, high, _ticks(low, high, unit, tick_step, amount_unit))


def log_axis(low: float, high: float, unit: LogUnit, *, amount_unit: str = "") -> Axis:
    """Return a logarithmic axis of positive values that covers at least a factor of two.

    Ticks of bytes are powers of two. Other ticks are powers of ten and, if there are few of these, multiples
    of them. ``amount_unit`` is the unit of the amount of a rate.
    """
    if high < 2 * low:
        low, high = low / 2, high * 2
    ticks = _binary_ticks(low, high) if unit == "bytes" else _decimal_ticks(low, high)
    label_of = (
        partial(_rate_label, amount_unit=amount_unit) if unit == "rate" else _LOG_LABELS[unit]
    )
    return Axis(low, high, tuple(Tick(tick, label_of(tick)) for tick in ticks), logarithmic=True)


def ticked_at(axis: Axis, values: Array, unit: Literal["bytes", "count"]) -> Axis:
    """Return the axis with a tick at each value, if the labels do not overlap."""
    ticks = np.unique(values)
    distances = np.diff(axis.shares(ticks))
    if len(ticks) > _MAX_LABELS or distances.min(initial=1) < 1 / _MAX_LABELS:
        return axis
    label_of = _LOG_LABELS[unit]
    return replace(axis, ticks=tuple(Tick(tick, label_of(tick)) for tick in ticks.tolist()))


def _binary_ticks(low: float, high: float) -> list[float]:
    first_index, last_index = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    power_step = max(math.ceil((last_index - first_index) / (2 * _TICK_COUNT)), 1)
    return [2.0**power for power in range(first_index, last_index + 1, power_step)]


def _decimal_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5), range(1, 10)):
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        ticks = [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        if len(ticks) >= _TICK_COUNT - 1:
            break
    return ticks[:: math.ceil(len(ticks) / (2 * _TICK_COUNT))]


def _is_range(low: float, high: float) -> bool:
    """Return whether the difference of two values is large enough for ticks between them."""
    return high - low > max(max(abs(low), abs(high)) * 1e-12, 1e-300)


def _ticks(
    low: float, high: float, unit: Unit, step: float | None = None, amount_unit: str = ""
) -> tuple[Tick, ...]:
    step = step or _tick_step(high - low, unit)
    # The tolerance keeps a tick at the end of the axis despite rounding errors.
    first_index, last_index = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    label_of = _label_function(unit, step, amount_unit)
    return tuple(
        Tick(tick_index * step, label_of(tick_index * step))
        for tick_index in range(first_index, last_index + 1)
    )


def _tick_step(span: float, unit: Unit) -> float:
    rough_step = span / _TICK_COUNT
    match unit:
        case "bytes":
            return 2.0 ** max(math.ceil(math.log2(rough_step)), 0)
        case "count":
            return max(_decimal_step(rough_step), 1.0)
        case "seconds" if rough_step > _MINUTE_SECONDS / 2:
            if rough_step > _DAY_SECONDS:
                return _decimal_step(rough_step / _DAY_SECONDS) * _DAY_SECONDS
            return _CLOCK_STEPS[bisect_left(_CLOCK_STEPS, rough_step)]
        case _:
            return _decimal_step(rough_step)


def _decimal_step(rough_step: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is at least ``rough_step``."""
    power = 10.0 ** math.floor(math.log10(rough_step))
    return next(
        factor * power for factor in (1, 2, 5, 10) if factor * power >= rough_step * (1 - 1e-9)
    )


def _label_function(unit: Unit, step: float, amount_unit: str) -> Callable[[float], str]:
    match unit:
        case "bytes":
            return _bytes_label
        case "count":
            return lambda value: format_count(round(value))
        case "ratio":
            return lambda value: f"{_plain_number(value * 100)}%"
        case "rate":
            return partial(_rate_label, amount_unit=amount_unit)
        case "seconds":
            # All labels have one unit.
            unit_seconds, name = next(
                (time_unit for time_unit in _TIME_UNITS if step >= time_unit[0] * (1 - 1e-9)),
                (1e-9, "ns"),
            )
            return lambda value: f"{_plain_number(value / unit_seconds)} {name}"


def _bytes_label(value: float) -> str:
    number_text, unit = format_bytes(round(value)).split(" ")
    return f"{number_text.rstrip('0').rstrip('.') if '.' in number_text else number_text} {unit}"


def _rate_label(value: float, amount_unit: str = "") -> str:
    return format_rate(value, amount_unit) if value else "0"


def _plain_number(number: float) -> str:
    return f"{number:.10g}"


_LOG_LABELS: Final[Mapping[LogUnit, Callable[[float], str]]] = {
    "bytes": lambda value: _bytes_label(value) if value >= 1 else f"{_plain_number(value)} B",
    "seconds": format_seconds,
    "count": lambda value: f"{value:,.10g}",
    "rate": _rate_label,
}
