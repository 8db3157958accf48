"""The keys of a configuration: the valid values of each setting, and how they are parsed and formatted.

The grammar of a configuration is:

    configuration   [entry {"," entry} [","]]
    entry           word ":" (word | "[" [pair {"," pair} [","]] "]")
    pair            word ":" word

Space around words is ignored. PyTorch also ignores space within words and missing separators
(c10/core/AllocatorConfig.h, ConfigTokenizer); here both are errors.
"""

from __future__ import annotations

import re
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal, TypeGuard

from cudakit.errors import InputError
from cudakit.units import MIB

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
# The limit is 400 digits, because Python cannot parse 5000.
_INTEGER_PATTERN = re.compile(r"[+-]?[0-9]{1,400}")
_SHORT_INTEGER_PATTERN = re.compile(r"\+?[0-9]{1,40}")
_NUMBER_PATTERN = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_DIVISIONS_FORMAT = "divisions as one number (4) or by intervals in MiB ([256:1,512:2,>:4])"
_RESERVE_FORMAT = "a share of the device's memory above 0, up to 1.125 (0.5), or GiB (40G)"
_TOKEN_PATTERN = re.compile(r"[,:\[\]]|[^,:\[\]]+")
_SPACE_CHARACTERS = " \t\n\v\f\r"  # isspace of C
_MAX_SHOWN_LENGTH = 40


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


def refused_value(field: str, value: object, valid_values: str) -> SettingRefused:
    """Return the error for a value that a field of the settings cannot have."""
    value_text = shown_value(field, value)
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
    return isinstance(name, str) and re.fullmatch(r"[^,:\[\]\s]+", name) is not None


@dataclass(frozen=True, slots=True)
class Token:
    """A word or a separator in the value of a variable. An empty token is the end of the value."""

    variable: str
    position: int  # Index of the token's first character.
    text: str

    @property
    def shown(self) -> str:
        """Return the token for an error message: on one line, shortened."""
        is_long = len(self.text) > _MAX_SHOWN_LENGTH
        shown_text = f"{self.text[:_MAX_SHOWN_LENGTH]}..." if is_long else self.text
        return repr(shown_text) if self.text else "the end"

    def error(self, reason: str, *, hint: str = "") -> SettingRefused:
        """Return an error with the position of this token; characters count from 1."""
        return SettingRefused(
            f"{self.variable}, character {self.position + 1}: {reason}", hint=hint
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """A key and its value: a word, or pairs in brackets."""

    key: Token
    value: Token  # The word, or the opening bracket of the pairs.
    pairs: tuple[tuple[Token, Token], ...] | None = None

    def word(self, expected: str) -> str:
        """Return the value if it is a word. ``expected`` describes the valid values in the error."""
        if self.pairs is not None:
            raise self.value.error(f"{self.key.text} takes {expected}, not a list")
        return self.value.text

    def value_error(
        self, expected: str, wrong_token: Token | None = None, *, hint: str = ""
    ) -> SettingRefused:
        """Return the error for an invalid value."""
        token = wrong_token or self.value
        return token.error(f"{self.key.text} takes {expected}, not {token.shown}", hint=hint)


def read_entries(variable: str, text: str) -> Iterator[Entry]:
    """Read entries one by one. Raises SettingRefused at the first token that the grammar does not allow."""
    tokens = []
    for match in _TOKEN_PATTERN.finditer(text):
        if word := match[0].lstrip(_SPACE_CHARACTERS):
            position = match.end() - len(word)
            tokens.append(Token(variable, position, word.rstrip(_SPACE_CHARACTERS)))
    cursor = _Cursor([*tokens, Token(variable, len(text), "")])
    while cursor.current.text:
        yield cursor.entry()
        if cursor.current.text:
            cursor.separator(",")


class _Cursor:
    """A position in a sequence of tokens: the current token, and the tokens after it."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = iter(tokens)
        self.current = next(self._tokens)
        self._previous_token = self.current

    def entry(self) -> Entry:
        key = self.word("the name of a setting")
        self.separator(":")
        if self.current.text != "[":
            return Entry(key, self.word(f"the value of {key.text}"))
        bracket = self.take()
        return Entry(key, bracket, tuple(self._pairs()))

    def _pairs(self) -> Iterator[tuple[Token, Token]]:
        while self.current.text != "]":
            name = self.word("a pair or ']'")
            self.separator(":")
            yield name, self.word("a value")
            if self.current.text not in (",", "]"):
                raise self.current.error(
                    f"expected ',' or ']' after {self._previous_token.shown}, found {self.current.shown}",
                    hint="write a list as [NAME:VALUE,NAME:VALUE]",
                )
            if self.current.text == ",":
                self.take()
        self.take()

    def word(self, expected: str) -> Token:
        if self.current.text in ("", ",", ":", "[", "]"):
            raise self.current.error(f"expected {expected}, found {self.current.shown}")
        if space := re.search(r"\s", self.current.text):
            position = self.current.position + space.start()
            raise Token(self.current.variable, position, space[0]).error(
                f"there is space inside {self.current.shown}", hint="separate settings by ','"
            )
        return self.take()

    def separator(self, sign: str) -> None:
        if self.current.text != sign:
            raise self.current.error(
                f"expected {sign!r} after {self._previous_token.shown}, found {self.current.shown}",
                hint="write settings as NAME:VALUE, separated by commas",
            )
        self.take()

    def take(self) -> Token:
        self._previous_token = self.current
        self.current = next(self._tokens, self.current)
        return self._previous_token


@dataclass(frozen=True, slots=True)
class Key:
    """A key of PyTorch's configuration: its field of Settings, the values of the field, and their texts."""

    field: str  # Name of the field of Settings.
    holds: Callable[[object], bool]  # Returns whether the field can have a value.
    expected: str  # The valid values, for error messages.
    read: Callable[[Entry], Any]
    write: Callable[[Any], str] = str
    native: bool = True  # Whether only the native backend uses the setting.


def _read_choice(entry: Entry, choices: tuple[str, ...]) -> str:
    if entry.word(" or ".join(choices)) not in choices:
        raise entry.value_error(" or ".join(choices))
    return entry.value.text


def _switch(field: str, *, native: bool = True) -> Key:
    return Key(
        field,
        lambda value: isinstance(value, bool),
        "True or False",
        lambda entry: _read_choice(entry, ("True", "False")) == "True",
        native=native,
    )


def _size(field: str, *, min_mib: int = 0, is_optional: bool = True, native: bool = True) -> Key:
    """Return a key whose text is a number of MiB, and whose value is in bytes."""

    def holds(value: object) -> bool:
        if value is None:
            return is_optional
        return _is_int(value) and value % MIB == 0 and min_mib <= value // MIB <= LARGEST_MIB

    expected = f"a whole number of MiB, {min_mib} to {LARGEST_MIB}"
    return Key(
        field,
        holds,
        f"{expected}, or None" if is_optional else expected,
        _read_size,
        lambda size_bytes: f"{size_bytes // MIB:d}",
        native,
    )


def _read_size(entry: Entry) -> int:
    return _parse_whole(entry, "a whole number of MiB, without a unit", LARGEST_MIB) * MIB


def _read_size_above_0(entry: Entry) -> int:
    size_bytes = _read_size(entry)
    if size_bytes == 0:
        raise entry.value_error("a whole number of MiB above 0")
    return size_bytes


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _parse_whole(entry: Entry, expected: str, maximum: int) -> int:
    if _INTEGER_PATTERN.fullmatch(entry.word(expected)) is None:
        raise entry.value_error(expected)
    number = int(entry.value.text)
    if not 0 <= number <= maximum:
        raise entry.value_error(f"{expected}, 0 to {maximum}", hint="omit it for the default")
    return number


def _read_number(entry: Entry) -> float:
    if _NUMBER_PATTERN.fullmatch(entry.word("a number")) is None:
        raise entry.value_error("a number")
    return float(entry.value.text)


def _write_number(value: float) -> str:
    """Return the shortest text that is parsed as the same number."""
    return repr(float(value))


def _read_threshold(entry: Entry) -> float:
    threshold = _read_number(entry)
    if not 0 < threshold < 1:
        raise entry.value_error("a number above 0 and below 1")
    return threshold


def _is_division(number: int) -> bool:
    return number == 0 or (is_power_of_two(number) and number < 1 << 63)


def _are_divisions(value: object) -> bool:
    if not isinstance(value, tuple) or len(value) != DIVISION_SLOTS:
        return False
    return all(_is_int(number) and _is_division(number) for number in value)


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
            is_last = interval is entry.pairs[-1][0]
            if not is_last or not 0 <= last_slot < DIVISION_SLOTS - 1:
                raise interval.error(
                    "'>' means all later intervals: it must be last in the list, after another interval",
                    hint="write for example [256:1,512:2,>:4]",
                )
            slots[last_slot + 1 :] = [divisions] * (DIVISION_SLOTS - last_slot - 1)
        else:
            slot = _parse_slot(interval, last_slot)
            first_slot = slot if last_slot >= 0 else 0
            slots[first_slot : slot + 1] = [divisions] * (slot + 1 - first_slot)
            last_slot = slot
    return tuple(slots)


def _parse_divisions(entry: Entry, token: Token, *, minimum: int) -> int:
    divisions = int(token.text) if _SHORT_INTEGER_PATTERN.fullmatch(token.text) else -1
    if divisions < minimum or not _is_division(divisions):
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


def _write_divisions(slots: tuple[int, ...]) -> str:
    """Format divisions: one number if all slots are equal, else a list without equal slots at both ends."""
    changed = [slot for slot, (before, after) in enumerate(pairwise(slots)) if before != after]
    if not changed and slots[0]:
        return f"{slots[0]:d}"
    first, last = (changed[0], changed[-1]) if changed else (0, 0)
    intervals = "".join(f"{1 << slot}:{slots[slot]:d}," for slot in range(first, last + 1))
    return f"[{intervals}>:{slots[-1]:d}]"


def _read_reserve(entry: Entry) -> Reserve:
    entry.word(_RESERVE_FORMAT)
    return _parse_reserve(entry, entry.value)


def _parse_reserve(entry: Entry, token: Token) -> Reserve:
    is_gib = token.text[-1] in "Gg"
    number_text = token.text[:-1] if is_gib else token.text
    if _NUMBER_PATTERN.fullmatch(number_text) is None:
        raise entry.value_error(_RESERVE_FORMAT, token)
    try:
        return Reserve(value=float(number_text), unit="GiB" if is_gib else "share")
    except SettingRefused:
        raise entry.value_error(_RESERVE_FORMAT, token) from None


def _write_reserve(reserve: Reserve) -> str:
    return f"{float(reserve.value)!r}{'G' if reserve.unit == 'GiB' else ''}"


def _are_reserves(value: object) -> bool:
    if not isinstance(value, tuple):
        return False
    is_valid = all(
        isinstance(pair, tuple)
        and len(pair) == 2
        and is_class_name(pair[0])
        and isinstance(pair[1], Reserve)
        for pair in value
    )
    return is_valid and len({name for name, _ in value}) == len(value)


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


# The keys of PyTorch 2.15 (AcceleratorAllocatorConfig::getKeys, CUDAAllocatorConfig::getKeys).
_KEYS = {
    "backend": Key(
        "backend",
        BACKENDS.__contains__,
        " or ".join(map(repr, BACKENDS)),
        lambda entry: _read_choice(entry, BACKENDS),
        native=False,
    ),
    "expandable_segments": _switch("expandable_segments"),
    "expandable_segments_reserve": Key(
        "expandable_segments_reserve",
        lambda value: value is None or isinstance(value, Reserve),
        "a Reserve or None",
        _read_reserve,
        _write_reserve,
    ),
    "expandable_segments_reserve_by_class": Key(
        "expandable_segments_reserve_by_class",
        _are_reserves,
        "pairs of a class of streams and a Reserve, each class once, named without ',', ':', '[', ']', space",
        _read_reserves,
        lambda pairs: f"[{','.join(f'{name}:{_write_reserve(value)}' for name, value in pairs)}]",
    ),
    "garbage_collection_threshold": Key(
        "garbage_collection_threshold",
        lambda value: isinstance(value, float) and 0.0 <= value < 1.0,
        "a float from 0.0 (off) to below 1.0",
        _read_threshold,
        _write_number,
    ),
    "graph_capture_record_stream_reuse": _switch("graph_capture_record_stream_reuse"),
    # Requests of 10 MiB or more have their own segments.
    "large_segment_size_mb": _size("large_segment_size_bytes", min_mib=11, is_optional=False),
    "max_non_split_rounding_mb": _size("max_non_split_rounding_bytes"),
    "max_split_size_mb": _size("max_split_size_bytes"),
    "per_process_memory_fraction": Key(
        "memory_fraction",
        lambda value: isinstance(value, float) and 0.0 <= value <= 1.0,
        "a float from 0.0 to 1.0",
        _read_number,
        _write_number,
    ),
    "pinned_free_catch_all": _switch("pinned_free_catch_all", native=False),
    "pinned_max_cached_size_mb": _size("pinned_max_cached_size_bytes", native=False),
    "pinned_max_round_threshold_mb": _size("pinned_max_round_threshold_bytes", native=False),
    "pinned_num_register_threads": Key(
        "pinned_num_register_threads",
        lambda value: _is_int(value) and is_power_of_two(value) and value <= MAX_REGISTER_THREADS,
        f"a power of two, at most {MAX_REGISTER_THREADS}",
        lambda entry: _parse_whole(entry, "a whole number", (1 << 63) - 1),
        native=False,
    ),
    "pinned_reserve_segment_size_mb": replace(
        _size("pinned_reserve_segment_size_bytes", is_optional=False, native=False),
        read=_read_size_above_0,
    ),
    "pinned_use_background_threads": _switch("pinned_use_background_threads", native=False),
    "pinned_use_cuda_host_register": _switch("pinned_use_cuda_host_register", native=False),
    "release_lock_on_cudamalloc": _switch("release_lock_on_cudamalloc"),
    "roundup_power2_divisions": Key(
        "roundup_power2_divisions",
        _are_divisions,
        f"a tuple of {DIVISION_SLOTS}, each a power of two or 0",
        _read_divisions,
        _write_divisions,
    ),
    "throw_on_cudamalloc_oom": _switch("throw_on_cudamalloc_oom"),
}
KEYS: Mapping[str, Key] = MappingProxyType(_KEYS)

# Other spellings that PyTorch accepts on every device (CUDAAllocatorConfig::parseArgs).
KEY_BY_SPELLING: Mapping[str, str] = MappingProxyType(
    {
        "pinned_use_hip_host_register": "pinned_use_cuda_host_register",
        "release_lock_on_hipmalloc": "release_lock_on_cudamalloc",
    }
)

# Keys that PyTorch once accepted and now rejects.
DROPPED_KEYS = frozenset({"roundup_bypass_threshold_mb"})
