"""The valid values of each setting of the allocator."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeGuard

from cudakit.errors import InputError
from cudakit.torch_rules.sizes import MIB

# The default address range of an expandable segment, as a share of the device's memory (ExpandableSegment).
FULL_RESERVE = 9 / 8
_GIB = 1 << 30
# The largest size in MiB. A snapshot stores sizes as signed 64-bit numbers, so larger sizes would become
# negative.
LARGEST_MIB = (1 << 63) // MIB - 1
BACKENDS = ("native", "cudaMallocAsync")
# Number of slots of the setting roundup_power2_divisions. Slot i is for sizes in [2^i MiB, 2^(i+1) MiB), the
# first slot also for smaller sizes, the last one also for larger sizes (c10/core/AllocatorConfig.cpp,
# kRoundUpPowerOfTwoIntervals).
DIVISION_SLOTS = 16
# Maximum of pinned_num_register_threads (CUDAAllocatorConfig::pinned_max_register_threads).
MAX_REGISTER_THREADS = 128


class SettingRefused(InputError):
    """A setting is unknown, its value is not valid, or the text of settings is malformed.

    ``field``, ``value_text`` and ``valid_values`` describe the value of a field that is not valid. They are
    empty for other errors.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        field: str = "",
        value_text: str = "",
        valid_values: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.field = field
        self.value_text = value_text
        self.valid_values = valid_values


def refused_value(field: str, value_text: str, valid_values: str) -> SettingRefused:
    """Return the error for a value that a field of the settings cannot have."""
    return SettingRefused(
        f"{field} is {value_text}; it must be {valid_values}",
        field=field,
        value_text=value_text,
        valid_values=valid_values,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """The size of an address range: ``0.5`` is a share of the device's memory, ``40G`` is GiB.

    Raises SettingRefused for a value that is not above 0, and for a share above 9/8, which PyTorch accepts
    but does not apply.
    """

    value: float
    unit: Literal["share", "GiB"] = "share"

    def __post_init__(self) -> None:
        if self.unit not in ("share", "GiB"):
            raise SettingRefused(
                f"the unit of a reserve is {self.unit!r}; it must be 'share' or 'GiB'"
            )
        value: object = self.value  # Callers without a type checker can pass any type.
        maximum = FULL_RESERVE if self.unit == "share" else sys.float_info.max
        if not isinstance(value, float) or not 0 < value <= maximum:
            raise SettingRefused(
                f"a reserve is {value!r} ({self.unit}); it must be a float above 0, at most {maximum:g}",
                hint="an absolute size is in GiB: 40G",
            )

    def size_bytes(self, total_bytes: int) -> int:
        """Return the size on a device with ``total_bytes`` of memory; at most 9/8 of it, as in PyTorch."""
        unit_bytes = total_bytes if self.unit == "share" else _GIB
        return int(min(self.value * unit_bytes, FULL_RESERVE * total_bytes))


@dataclass(frozen=True, slots=True)
class Rule:
    """The condition that the value of a setting must meet, and its description for error messages."""

    holds: Callable[[object], bool]
    expected: str


def shown_value(field: str, value: object) -> str:
    """Return the value of a setting for a message: in MiB if whole, else its shortened repr."""
    # Python cannot convert a number of 5000 digits to text.
    if isinstance(value, int) and value.bit_length() > 80:
        return f"a number of {value.bit_length()} bits"
    if field.endswith("_bytes") and isinstance(value, int) and value and value % MIB == 0:
        return f"{value // MIB} MiB"
    try:
        return " ".join(reprlib.repr(value).split())
    except ValueError:
        return f"a {type(value).__name__}"


def is_power_of_two(value: int) -> bool:
    """Return whether a number is 1, 2, 4 and so on."""
    return value > 0 and value & (value - 1) == 0


def is_class_name(name: object) -> bool:
    """Return whether a name is valid for a class of streams in a configuration."""
    return (
        isinstance(name, str)
        and name != ""
        and not any(character in ",:[]" or character.isspace() for character in name)
    )


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole_mib(min_mib: int) -> Rule:
    def holds(value: object) -> bool:
        return _is_int(value) and value % MIB == 0 and min_mib <= value // MIB <= LARGEST_MIB

    return Rule(holds, f"a whole number of MiB, {min_mib} to {LARGEST_MIB}")


def _or_none(rule: Rule) -> Rule:
    return Rule(lambda value: value is None or rule.holds(value), f"{rule.expected}, or None")


def _are_divisions(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == DIVISION_SLOTS
        and all(
            _is_int(division)
            and (division == 0 or is_power_of_two(division))
            and division < 1 << 63
            for division in value
        )
    )


def _is_register_threads(value: object) -> bool:
    return _is_int(value) and is_power_of_two(value) and value <= MAX_REGISTER_THREADS


def _are_reserves(value: object) -> bool:
    if not isinstance(value, tuple) or not all(
        isinstance(pair, tuple) and len(pair) == 2 for pair in value
    ):
        return False
    return len({name for name, _ in value if is_class_name(name)}) == len(value) and all(
        isinstance(reserve, Reserve) for _, reserve in value
    )


_BOOLEAN_RULE = Rule(lambda value: isinstance(value, bool), "True or False")
_RESERVES_RULE = Rule(
    _are_reserves,
    "pairs of a class of streams and a Reserve, each class once, named without ',', ':', '[', ']', space",
)

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "backend": Rule(BACKENDS.__contains__, " or ".join(map(repr, BACKENDS))),
        "max_split_size_bytes": _or_none(_whole_mib(0)),
        "max_non_split_rounding_bytes": _or_none(_whole_mib(0)),
        # Requests of 10 MiB or more have their own segments.
        "large_segment_size_bytes": _whole_mib(11),
        "roundup_power2_divisions": Rule(
            _are_divisions, f"a tuple of {DIVISION_SLOTS}, each a power of two or 0"
        ),
        "garbage_collection_threshold": Rule(
            lambda value: isinstance(value, float) and 0.0 <= value < 1.0,
            "a float from 0.0 (off) to below 1.0",
        ),
        "memory_fraction": Rule(
            lambda value: isinstance(value, float) and 0.0 <= value <= 1.0,
            "a float from 0.0 to 1.0",
        ),
        "throw_on_cudamalloc_oom": _BOOLEAN_RULE,
        "release_lock_on_cudamalloc": _BOOLEAN_RULE,
        "graph_capture_record_stream_reuse": _BOOLEAN_RULE,
        "expandable_segments": _BOOLEAN_RULE,
        "expandable_segments_reserve": Rule(
            lambda value: value is None or isinstance(value, Reserve), "a Reserve or None"
        ),
        "expandable_segments_reserve_by_class": _RESERVES_RULE,
        "pinned_use_background_threads": _BOOLEAN_RULE,
        "pinned_use_cuda_host_register": _BOOLEAN_RULE,
        "pinned_num_register_threads": Rule(
            _is_register_threads, f"a power of two, at most {MAX_REGISTER_THREADS}"
        ),
        "pinned_max_round_threshold_bytes": _or_none(_whole_mib(0)),
        "pinned_max_cached_size_bytes": _or_none(_whole_mib(0)),
        "pinned_reserve_segment_size_bytes": _whole_mib(0),
        "pinned_free_catch_all": _BOOLEAN_RULE,
    }
)
