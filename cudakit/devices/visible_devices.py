"""Determine the devices that CUDA_VISIBLE_DEVICES leaves visible, and why the others are hidden.

The rules are from the CUDA Programming Guide ("Environment variables") and from experiments with driver 580.
The driver alone decides which devices are visible; this module explains the driver's decision.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

VARIABLE = "CUDA_VISIBLE_DEVICES"

# The driver parses numbers like strtoul: a sign and trailing characters are accepted.
_NUMBER_PATTERN = re.compile(r"\s*([+-]?)([0-9]+)")
_PREFIXES = ("GPU-", "MIG-")
_PREFIX_LENGTH = 4
_ULONG_MAX = 2**64 - 1
_UINT_MAX = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Visibility:
    """The effect of a value of CUDA_VISIBLE_DEVICES."""

    visible: tuple[int, ...]  # positions of the visible devices among all devices, in CUDA's order
    notes: tuple[str, ...]  # sentences on invalid entries and their effect


def visibility(value: str | None, uuids: Sequence[str]) -> Visibility:
    """Apply a value of CUDA_VISIBLE_DEVICES.

    ``uuids`` are the UUIDs of all devices, in the order that they have without the variable. None (the
    variable is not set) shows all devices, "" hides all. The first entry that matches no device ends the
    list; a repeated device hides all devices. If the first entry is an index, all entries must be indices; if
    it is a UUID, all must be UUIDs.
    """
    if value is None:
        return Visibility(tuple(range(len(uuids))), ())
    if not value.strip():
        return Visibility((), (f"{VARIABLE} is empty, which hides every device",))
    find_position = _find_by_uuid if value.startswith(_PREFIXES) else _find_by_index
    visible_positions: list[int] = []
    entries = value.split(",")
    for entry_number, device_entry in enumerate(entries, start=1):
        position, reason = find_position(device_entry, uuids)
        if position is None:
            is_last = entry_number == len(entries)
            effect = "" if is_last else ", so CUDA ignores this and all later entries"
            return Visibility(tuple(visible_positions), (f"{VARIABLE}={value}: {reason}{effect}",))
        if position in visible_positions:
            repetition_note = f"{device_entry.strip()!r} repeats a device, so CUDA does not start"
            return Visibility((), (f"{VARIABLE}={value}: {repetition_note}",))
        visible_positions.append(position)
    return Visibility(tuple(visible_positions), ())


def _find_by_index(device_entry: str, uuids: Sequence[str]) -> tuple[int | None, str]:
    """Return the position of a device, or None with the reason."""
    device_count = len(uuids)
    index_match = _NUMBER_PATTERN.match(device_entry)
    if index_match is None:
        return None, f"{device_entry.strip()!r} is not a number"
    device_index = _as_unsigned(int(index_match[2]), negative=index_match[1] == "-")
    if device_index < device_count:
        return device_index, ""
    if index_match[1] == "-":
        return None, f"{device_entry.strip()!r} is negative"
    return None, f"no device has index {int(index_match[2])} (of {device_count})"


def _as_unsigned(number: int, *, negative: bool) -> int:
    # strtoul saturates at ULONG_MAX; the driver keeps the low 32 bits.
    saturated_number = min(number, _ULONG_MAX)
    return (-saturated_number if negative else saturated_number) & _UINT_MAX


def _find_by_uuid(device_entry: str, uuids: Sequence[str]) -> tuple[int | None, str]:
    """Return the position of the only device with a UUID prefix, or None with the reason."""
    if not device_entry.startswith(_PREFIXES):
        return None, f"{device_entry!r} does not start with GPU- or MIG-"
    # The driver treats GPU- and MIG- alike, and ignores the case of the digits.
    digits = device_entry[_PREFIX_LENGTH:].rstrip().lower()
    positions = [
        position
        for position, uuid in enumerate(uuids)
        if uuid[_PREFIX_LENGTH:].lower().startswith(digits)
    ]
    if not digits or not positions:
        return None, f"no UUID starts with {device_entry!r}"
    if len(positions) > 1:
        return None, f"{len(positions)} UUIDs start with {device_entry!r}"
    return positions[0], ""
