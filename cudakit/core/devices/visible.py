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
    number = int(found[2])
    if found[1] == "-" and number:
        return None, f"{entry.strip()!r} is negative"
    if number >= count:
        return None, f"there is no device {number} (there are {count})"
    return number, ""


def _by_uuid(entry: str, uuids: Sequence[str]) -> tuple[int | None, str]:
    if not entry.startswith(_PREFIXES):
        return None, f"{entry!r} does not begin with GPU- or MIG- as the first entry does"
    matches = [at for at, uuid in enumerate(uuids) if uuid.lower().startswith(entry.lower())]
    if len(entry) == len(_PREFIXES[0]) or not matches:
        return None, f"no device has a UUID that begins with {entry!r}"
    if len(matches) > 1:
        return None, f"{len(matches)} devices have UUIDs that begin with {entry!r}"
    return matches[0], ""
