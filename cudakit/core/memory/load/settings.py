"""The allocator's settings as a file records them: words and numbers, whatever the file holds."""

from __future__ import annotations

from typing import TypeAlias

Number: TypeAlias = bool | int | float
Scalar: TypeAlias = Number | str | None
Setting: TypeAlias = Scalar | list[Scalar] | dict[str, Number]

# The names of numbers are powers of two (roundup_power2_divisions).
_LONGEST_NAME = 20


def plain_settings(found: object) -> dict[str, Setting]:
    """Keep what a setting can be: a scalar of at most 64 bits, a list of such, or numbers by name."""
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if _is_setting(value)}


def _is_setting(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_scalar, value))
    if isinstance(value, dict):
        return all(_is_number(n) and len(name) <= _LONGEST_NAME for name, n in value.items())
    return _is_scalar(value)


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, str) or _is_number(value)


def _is_number(value: object) -> bool:
    if isinstance(value, int):
        return -(1 << 63) <= value < 1 << 64
    return isinstance(value, float)
