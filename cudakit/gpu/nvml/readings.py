"""What makes a field of NVML's answer: the pieces that the tables of facts and telemetry are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cudakit.gpu.nvml.ask import Convert, FieldValue, Question
from cudakit.units import Unavailable

# NVML's "not available" of a 64-bit and of a 32-bit value (nvml.h: NVML_VALUE_NOT_AVAILABLE).
_ABSENT = (2**64 - 1, 2**32 - 1)
_NO_VALUE = Unavailable("NVML has no value")


def call(
    function: str, *arguments: str | int, to: Convert | None = None
) -> tuple[Question, Convert]:
    """Read what a function returns."""
    return Question(function, arguments), to or same


def filled(
    function: str, structure: str, *, version: str = "", to: Convert
) -> tuple[Question, Convert]:
    """Read a structure that a function fills."""
    return Question(function, structure=structure, version=version), to


def value(
    identifier: str, *, scope: int = 0, alone: bool = False, to: Convert | None = None
) -> tuple[FieldValue, Convert]:
    """Read a value that NVML knows by number."""
    return FieldValue(f"NVML_FI_DEV_{identifier}", scope, alone), to or same


def same(answer: Any) -> Any:
    """Take the answer as it is, without NVML's number for no answer; bytes are text."""
    if isinstance(answer, bytes):
        return answer.decode(errors="replace")
    return _NO_VALUE if answer in _ABSENT else answer


def member(name: str, to: Convert = same) -> Convert:
    """Take a member of a structure."""

    def take(answer: Any) -> Any:
        found = getattr(answer, name)
        return _NO_VALUE if found in _ABSENT else to(found)

    return take


def item(index: int, to: Convert = same) -> Convert:
    """Take an item of a list."""

    def take(answer: Any) -> Any:
        found = answer[index]
        return _NO_VALUE if found in _ABSENT else to(found)

    return take


def scaled(factor: float) -> Callable[[float], Any]:
    """Multiply: NVML counts milliwatts, millijoules and KiB."""

    def multiply(answer: float) -> Any:
        return _NO_VALUE if answer in _ABSENT else answer * factor

    return multiply


def divided(divisor: int) -> Callable[[float], Any]:
    """Divide, for a result that is exact where the factor would not be: 700000 mW are 700.0 W."""

    def divide(answer: float) -> Any:
        return _NO_VALUE if answer in _ABSENT else answer / divisor

    return divide


def hexadecimal(answer: int) -> str:
    """Write an id as eight digits."""
    return f"{answer:#010x}"


def cpu_ranges(words: Any) -> str:
    """Write a set of CPUs, given as 64-bit words, as ``0-15,32-47``."""
    cpus = {64 * at + bit for at, word in enumerate(words) for bit in range(64) if word >> bit & 1}
    starts = sorted(cpu for cpu in cpus if cpu - 1 not in cpus)
    ends = sorted(cpu for cpu in cpus if cpu + 1 not in cpus)
    pairs = zip(starts, ends, strict=True)
    return ",".join(f"{start}-{end}" if end > start else str(start) for start, end in pairs)
