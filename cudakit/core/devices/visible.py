"""What CUDA_VISIBLE_DEVICES leaves, and why: the rules of the driver, to explain what it did.

The CUDA Programming Guide ("Environment variables") gives them in part; the rest is what driver 580 was
seen to do. Which devices there are, the driver itself is asked: this only says why.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

VARIABLE = "CUDA_VISIBLE_DEVICES"

# A number may have a sign and anything behind it: the driver reads it as strtoul does.
_NUMBER = re.compile(r"\s*([+-]?)([0-9]+)")
_PREFIXES = ("GPU-", "MIG-")
_PREFIX_LENGTH = 4
_ULONG_MAX = 2**64 - 1
_UINT_MAX = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Visibility:
    """What a value of CUDA_VISIBLE_DEVICES leaves."""

    kept: tuple[int, ...]  # positions among all devices, in the order that CUDA then gives them
    notes: tuple[str, ...]  # what does not do what it seems to


class _Stop(Exception):
    """The list ends here, for a reason."""


def visibility(value: str | None, uuids: Sequence[str]) -> Visibility:
    """Apply CUDA_VISIBLE_DEVICES to all devices, given by UUID in CUDA's order without it.

    None, for unset, keeps all; "" none. An entry that is no device ends the list, silently; one that
    comes twice leaves no device at all. Numbers and UUIDs do not mix: the first entry decides.
    """
    if value is None:
        return Visibility(tuple(range(len(uuids))), ())
    if not value.strip():
        return Visibility((), (f"{VARIABLE} is empty: it hides every device",))
    kept: list[int] = []
    try:
        for entry, position in _positions(value, uuids):
            if position in kept:
                return Visibility((), (_twice(value, entry),))
            kept.append(position)
    except _Stop as stop:
        return Visibility(tuple(kept), (str(stop),))
    return Visibility(tuple(kept), ())


def _twice(value: str, entry: str) -> str:
    return f"{VARIABLE}={value}: {entry.strip()!r} names a device for the second time: CUDA refuses to start"


def _positions(value: str, uuids: Sequence[str]) -> Iterator[tuple[str, int]]:
    by_uuid = value.startswith(_PREFIXES)
    entries = value.split(",")
    for at, entry in enumerate(entries):
        position, reason = _by_uuid(entry, uuids) if by_uuid else _by_number(entry, len(uuids))
        if position is None:
            behind = ", and all entries behind it are ignored" if at + 1 < len(entries) else ""
            raise _Stop(f"{VARIABLE}={value}: {reason}{behind}")
        yield entry, position


def _by_number(entry: str, count: int) -> tuple[int | None, str]:
    found = _NUMBER.match(entry)
    if found is None:
        return None, f"{entry.strip()!r} is not a number"
    number = _as_unsigned(int(found[2]), negative=found[1] == "-")
    if number < count:
        return number, ""
    if found[1] == "-":
        return None, f"{entry.strip()!r} is negative"
    there = "there is 1" if count == 1 else f"there are {count}"
    return None, f"there is no device {int(found[2])} ({there})"


def _as_unsigned(number: int, *, negative: bool) -> int:
    # What strtoul makes of it, and of that an unsigned int has room for.
    large = min(number, _ULONG_MAX)
    return (-large if negative else large) & _UINT_MAX


def _by_uuid(entry: str, uuids: Sequence[str]) -> tuple[int | None, str]:
    if not entry.startswith(_PREFIXES):
        return None, f"{entry!r} does not begin with GPU- or MIG-"
    # The driver does not mind which of the two it is, nor the case of the digits.
    digits = entry[_PREFIX_LENGTH:].rstrip().lower()
    matches = [
        at for at, uuid in enumerate(uuids) if uuid[_PREFIX_LENGTH:].lower().startswith(digits)
    ]
    if not digits or not matches:
        return None, f"no device has a UUID that begins with {entry!r}"
    if len(matches) > 1:
        return None, f"{len(matches)} devices have UUIDs that begin with {entry!r}"
    return matches[0], ""
