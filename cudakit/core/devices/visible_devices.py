"""The devices that CUDA_VISIBLE_DEVICES leaves visible, by the rules of the driver, with reasons.

The rules are from the CUDA Programming Guide ("Environment variables") and from experiments with driver 580.
The driver alone decides which devices are visible; this module explains its decision.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

VARIABLE = "CUDA_VISIBLE_DEVICES"

# The driver parses numbers like strtoul: a sign and trailing characters are accepted.
_NUMBER = re.compile(r"\s*([+-]?)([0-9]+)")
_PREFIXES = ("GPU-", "MIG-")
_PREFIX_LENGTH = 4
_ULONG_MAX = 2**64 - 1
_UINT_MAX = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Visibility:
    """The effect of a value of CUDA_VISIBLE_DEVICES."""

    kept: tuple[int, ...]  # positions among all devices, in the resulting order of CUDA
    notes: tuple[str, ...]  # invalid entries and their effect


def visibility(value: str | None, uuids: Sequence[str]) -> Visibility:
    """Apply CUDA_VISIBLE_DEVICES to all devices, given by UUID in CUDA's order without it.

    None (not set) keeps all devices, "" keeps none. The first entry that matches no device ends the list; a
    repeated device hides all devices. Indices and UUIDs cannot be mixed: the first entry decides.
    """
    if value is None:
        return Visibility(tuple(range(len(uuids))), ())
    if not value.strip():
        return Visibility((), (f"{VARIABLE} is empty, which hides every device",))
    find = _by_uuid if value.startswith(_PREFIXES) else _by_number
    kept: list[int] = []
    entries = value.split(",")
    for at, entry in enumerate(entries, start=1):
        position, reason = find(entry, uuids)
        if position is None:
            ignored = ", so CUDA ignores this and all later entries" if at < len(entries) else ""
            return Visibility(tuple(kept), (f"{VARIABLE}={value}: {reason}{ignored}",))
        if position in kept:
            twice = f"{entry.strip()!r} repeats a device, so CUDA does not start"
            return Visibility((), (f"{VARIABLE}={value}: {twice}",))
        kept.append(position)
    return Visibility(tuple(kept), ())


def _by_number(entry: str, uuids: Sequence[str]) -> tuple[int | None, str]:
    count = len(uuids)
    parsed = _NUMBER.match(entry)
    if parsed is None:
        return None, f"{entry.strip()!r} is not a number"
    number = _as_unsigned(int(parsed[2]), negative=parsed[1] == "-")
    if number < count:
        return number, ""
    if parsed[1] == "-":
        return None, f"{entry.strip()!r} is negative"
    return None, f"no device has index {int(parsed[2])} (of {count})"


def _as_unsigned(number: int, *, negative: bool) -> int:
    # strtoul saturates at ULONG_MAX; the driver keeps the low 32 bits.
    large = min(number, _ULONG_MAX)
    return (-large if negative else large) & _UINT_MAX


def _by_uuid(entry: str, uuids: Sequence[str]) -> tuple[int | None, str]:
    if not entry.startswith(_PREFIXES):
        return None, f"{entry!r} does not start with GPU- or MIG-"
    # The driver ignores which of the two prefixes it is, and the case of the digits.
    digits = entry[_PREFIX_LENGTH:].rstrip().lower()
    matches = [
        at for at, uuid in enumerate(uuids) if uuid[_PREFIX_LENGTH:].lower().startswith(digits)
    ]
    if not digits or not matches:
        return None, f"no UUID starts with {entry!r}"
    if len(matches) > 1:
        return None, f"{len(matches)} UUIDs start with {entry!r}"
    return matches[0], ""
