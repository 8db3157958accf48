"""The keys of a configuration: the setting of each key, and how to parse and format its value."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from cudakit.torch_rules.setting_rules import (
    BACKENDS,
    DIVISION_SLOTS,
    LARGEST_MIB,
    Reserve,
    SettingRefused,
    is_power_of_two,
)
from cudakit.torch_rules.setting_text import Entry, Token
from cudakit.torch_rules.sizes import MIB

_INTEGER_PATTERN = re.compile(
    r"[+-]?[0-9]{1,400}"
)  # The limit is 400 digits, because Python cannot parse 5000.
_SHORT_INTEGER_PATTERN = re.compile(r"\+?[0-9]{1,40}")
_NUMBER_PATTERN = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_DIVISIONS_FORMAT = "divisions as one number (4) or by intervals in MiB ([256:1,512:2,>:4])"
_RESERVE_FORMAT = "a share of the device's memory above 0, up to 1.125 (0.5), or GiB (40G)"


def _read_switch(entry: Entry) -> bool:
    if entry.word("True or False") not in ("True", "False"):
        raise entry.value_error("True or False")
    return entry.value.text == "True"


def _read_backend(entry: Entry) -> str:
    if entry.word(" or ".join(BACKENDS)) not in BACKENDS:
        raise entry.value_error(" or ".join(BACKENDS))
    return entry.value.text


def _read_size(entry: Entry) -> int:
    """Parse a number of MiB; return bytes."""
    return _parse_whole(entry, "a whole number of MiB, without a unit", LARGEST_MIB) * MIB


def _read_size_above_0(entry: Entry) -> int:
    size = _read_size(entry)
    if size == 0:
        raise entry.value_error("a whole number of MiB above 0")
    return size


def _read_count(entry: Entry) -> int:
    return _parse_whole(entry, "a whole number", (1 << 63) - 1)


def _read_number(entry: Entry) -> float:
    if _NUMBER_PATTERN.fullmatch(entry.word("a number")) is None:
        raise entry.value_error("a number")
    return float(entry.value.text)


def _read_threshold(entry: Entry) -> float:
    threshold = _read_number(entry)
    if not 0 < threshold < 1:
        raise entry.value_error("a number above 0 and below 1")
    return threshold


def _read_divisions(entry: Entry) -> tuple[int, ...]:
    """Read roundup_power2_divisions: one number for all slots, or a list of intervals with a number each.

    The first number of a list also sets all earlier slots; ``>`` sets all later slots. Slots between two
    listed intervals are 0 (AcceleratorAllocatorConfig::parseRoundUpPower2Divisions).
    """
    if entry.pairs is None:
        return (_parse_divisions(entry, entry.value, minimum=1),) * DIVISION_SLOTS
    if not entry.pairs:
        raise entry.value.error(f"{entry.key.text} takes {_DIVISIONS_FORMAT}, not an empty list")
    slots, last_slot = [0] * DIVISION_SLOTS, -1
    for interval, token in entry.pairs:
        divisions = _parse_divisions(entry, token, minimum=0)
        if interval.text == ">":
            _check_open_interval(interval, last_slot, is_last=interval is entry.pairs[-1][0])
            slots[last_slot + 1 :] = [divisions] * (DIVISION_SLOTS - last_slot - 1)
        else:
            slot = _parse_slot(interval, last_slot)
            first_slot = slot if last_slot >= 0 else 0
            slots[first_slot : slot + 1] = [divisions] * (slot + 1 - first_slot)
            last_slot = slot
    return tuple(slots)


def _read_reserve(entry: Entry) -> Reserve:
    entry.word(_RESERVE_FORMAT)
    return _parse_reserve(entry, entry.value)


def _read_reserves(entry: Entry) -> tuple[tuple[str, Reserve], ...]:
    if not entry.pairs:
        expected = "a list of classes of streams ([serving:0.25,training:40G])"
        if entry.pairs is None:
            raise entry.value_error(expected)
        raise entry.value.error(f"{entry.key.text} takes {expected}, not an empty one")
    reserve_by_class: dict[str, Reserve] = {}
    for name, token in entry.pairs:
        if name.text in reserve_by_class:
            raise name.error(f"the class {name.shown} is listed twice")
        reserve_by_class[name.text] = _parse_reserve(entry, token)
    return tuple(reserve_by_class.items())


def _write_size(size_bytes: int) -> str:
    return f"{size_bytes // MIB:d}"


def _write_number(value: float) -> str:
    """Return the shortest text that is parsed as the same number."""
    return repr(float(value))


def _write_divisions(slots: tuple[int, ...]) -> str:
    """Format divisions: one number if all slots are equal, else a list without equal slots at both ends."""
    changed_slots = [
        slot
        for slot, (earlier_divisions, later_divisions) in enumerate(pairwise(slots))
        if earlier_divisions != later_divisions
    ]
    if not changed_slots and slots[0]:
        return f"{slots[0]:d}"
    first_slot, last_slot = (changed_slots[0], changed_slots[-1]) if changed_slots else (0, 0)
    intervals_text = "".join(
        f"{1 << slot}:{slots[slot]:d}," for slot in range(first_slot, last_slot + 1)
    )
    return f"[{intervals_text}>:{slots[-1]:d}]"


def _write_reserve(reserve: Reserve) -> str:
    return f"{float(reserve.value)!r}{'G' if reserve.unit == 'GiB' else ''}"


def _write_reserves(reserves: tuple[tuple[str, Reserve], ...]) -> str:
    return f"[{','.join(f'{name}:{_write_reserve(reserve)}' for name, reserve in reserves)}]"


def _parse_whole(entry: Entry, expected: str, maximum: int) -> int:
    if _INTEGER_PATTERN.fullmatch(entry.word(expected)) is None:
        raise entry.value_error(expected)
    number = int(entry.value.text)
    if not 0 <= number <= maximum:
        raise entry.value_error(f"{expected}, 0 to {maximum}", hint="omit it for the default")
    return number


def _parse_divisions(entry: Entry, token: Token, *, minimum: int) -> int:
    divisions = int(token.text) if _SHORT_INTEGER_PATTERN.fullmatch(token.text) else -1
    if (
        divisions < minimum
        or divisions >= 1 << 63
        or (divisions and not is_power_of_two(divisions))
    ):
        raise entry.value_error("powers of two" if minimum else "powers of two or 0", token)
    return divisions


def _parse_slot(interval: Token, last_slot: int) -> int:
    """Return the slot of an interval. Raises SettingRefused unless it follows the slot ``last_slot``."""
    interval_mib = int(interval.text) if _SHORT_INTEGER_PATTERN.fullmatch(interval.text) else -1
    if not is_power_of_two(interval_mib) or interval_mib > 1 << (DIVISION_SLOTS - 1):
        raise interval.error(
            f"an interval begins at a power of two of MiB, 1 to {1 << (DIVISION_SLOTS - 1)},"
            f" or is '>', not {interval.shown}"
        )
    slot = interval_mib.bit_length() - 1
    if slot <= last_slot:
        raise interval.error(
            f"intervals must increase: {interval_mib} comes after {1 << last_slot}"
        )
    return slot


def _check_open_interval(interval: Token, last_slot: int, *, is_last: bool) -> None:
    if not is_last or not 0 <= last_slot < DIVISION_SLOTS - 1:
        raise interval.error(
            "'>' means all later intervals: it must be last in the list, after another interval",
            hint="write for example [256:1,512:2,>:4]",
        )


def _parse_reserve(entry: Entry, token: Token) -> Reserve:
    is_gib = token.text[-1] in "Gg"
    number_text = token.text[:-1] if is_gib else token.text
    if _NUMBER_PATTERN.fullmatch(number_text) is None:
        raise entry.value_error(_RESERVE_FORMAT, token)
    try:
        return Reserve(value=float(number_text), unit="GiB" if is_gib else "share")
    except SettingRefused:
        raise entry.value_error(_RESERVE_FORMAT, token) from None


@dataclass(frozen=True, slots=True)
class Key:
    """A key of PyTorch's configuration."""

    field: str  # Name of the field of Settings.
    read: Callable[[Entry], Any]
    write: Callable[[Any], str]
    native: bool = True  # Whether only the native backend uses the setting.


def _switch_key(field: str, *, native: bool = True) -> Key:
    return Key(field, _read_switch, str, native)


def _size_key(field: str, *, native: bool = True) -> Key:
    return Key(field, _read_size, _write_size, native)


# The keys of PyTorch 2.15 (AcceleratorAllocatorConfig::getKeys, CUDAAllocatorConfig::getKeys).
KEYS: Mapping[str, Key] = MappingProxyType(
    {
        "backend": Key("backend", _read_backend, str, native=False),
        "expandable_segments": _switch_key("expandable_segments"),
        "expandable_segments_reserve": Key(
            "expandable_segments_reserve", _read_reserve, _write_reserve
        ),
        "expandable_segments_reserve_by_class": Key(
            "expandable_segments_reserve_by_class", _read_reserves, _write_reserves
        ),
        "garbage_collection_threshold": Key(
            "garbage_collection_threshold", _read_threshold, _write_number
        ),
        "graph_capture_record_stream_reuse": _switch_key("graph_capture_record_stream_reuse"),
        "large_segment_size_mb": _size_key("large_segment_size_bytes"),
        "max_non_split_rounding_mb": _size_key("max_non_split_rounding_bytes"),
        "max_split_size_mb": _size_key("max_split_size_bytes"),
        "per_process_memory_fraction": Key("memory_fraction", _read_number, _write_number),
        "pinned_free_catch_all": _switch_key("pinned_free_catch_all", native=False),
        "pinned_max_cached_size_mb": _size_key("pinned_max_cached_size_bytes", native=False),
        "pinned_max_round_threshold_mb": _size_key(
            "pinned_max_round_threshold_bytes", native=False
        ),
        "pinned_num_register_threads": Key(
            "pinned_num_register_threads", _read_count, str, native=False
        ),
        "pinned_reserve_segment_size_mb": Key(
            "pinned_reserve_segment_size_bytes",
            _read_size_above_0,
            _write_size,
            native=False,
        ),
        "pinned_use_background_threads": _switch_key("pinned_use_background_threads", native=False),
        "pinned_use_cuda_host_register": _switch_key("pinned_use_cuda_host_register", native=False),
        "release_lock_on_cudamalloc": _switch_key("release_lock_on_cudamalloc"),
        "roundup_power2_divisions": Key(
            "roundup_power2_divisions", _read_divisions, _write_divisions
        ),
        "throw_on_cudamalloc_oom": _switch_key("throw_on_cudamalloc_oom"),
    }
)

# Other spellings that PyTorch accepts on every device (CUDAAllocatorConfig::parseArgs).
KEY_BY_SPELLING: Mapping[str, str] = MappingProxyType(
    {
        "pinned_use_hip_host_register": "pinned_use_cuda_host_register",
        "release_lock_on_hipmalloc": "release_lock_on_cudamalloc",
    }
)

# Keys that PyTorch once accepted and now rejects.
DROPPED_KEYS = frozenset({"roundup_bypass_threshold_mb"})
