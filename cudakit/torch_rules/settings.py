"""The sizes of PyTorch's allocator, and its configuration: all settings, and a strict parser."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from cudakit.errors import InputError
from cudakit.torch_rules.setting_keys import (
    DIVISION_SLOTS,
    DROPPED_KEYS,
    KEY_BY_SPELLING,
    KEYS,
    Entry,
    Key,
    Reserve,
    SettingRefused,
    Token,
    read_entries,
    refused_value,
    shown_value,
)
from cudakit.units import MIB

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


# --- Sizes: rounding of requests, and the size of the segment that is allocated for a block --------
#
# The rules and constants come from PyTorch's c10/cuda/CUDACachingAllocator.cpp; comments give its names.

SMALLEST_BLOCK = 512  # kMinBlockSize: the size of every block is a multiple of this size
MAX_SMALL_BYTES = MIB  # kSmallSize: larger blocks come from the large pool
SMALL_SEGMENT = 2 * MIB  # PyTorch's kSmallBuffer: the size of a segment of the small pool
LARGE_SEGMENT = 20 * MIB  # kLargeBuffer; the default of the setting large_segment_size_mb
# kMinLargeAlloc: a block of at least this size gets a new segment of its size.
OWN_SEGMENT = 10 * MIB
# kRoundLarge: the size of a segment for a block of at least OWN_SEGMENT is a multiple of this size.
SEGMENT_STEP = 2 * MIB

# PyTorch rejects a request of 1 EiB before it calls the allocator (aten/src/ATen/EmptyTensor.cpp).
TOO_MANY_BYTES = 1 << 60
# The value of a limit that means "no limit": SIZE_MAX in PyTorch, here the largest signed 64-bit number.
UNLIMITED = (1 << 63) - 1

# The setting of divisions has a slot for each power of two from 1 MiB on; the last slot is for 32 GiB and
# above.
_FIRST_SLOT_BITS = MIB.bit_length()


def rounded(size_bytes: int, divisions: Sequence[int] = ()) -> int:
    """Round a request up to the size of its block.

    ``divisions`` are the 16 values of the setting ``roundup_power2_divisions``; empty: multiples of 512
    bytes. Source: round_size.
    """
    if size_bytes < SMALLEST_BLOCK:
        return SMALLEST_BLOCK
    if divisions:
        division = division_of(size_bytes, divisions)
        if division > 1 and size_bytes > SMALLEST_BLOCK * division:
            return rounded_to_division(size_bytes, division)
    return -(-size_bytes // SMALLEST_BLOCK) * SMALLEST_BLOCK


def division_of(size_bytes: int, divisions: Sequence[int]) -> int:
    """Return the number of divisions between the two powers of two around ``size_bytes``.

    Source: CUDAAllocatorConfig::roundup_power2_divisions (c10/core/AllocatorConfig.cpp).
    """
    slot = size_bytes.bit_length() - _FIRST_SLOT_BITS
    return divisions[min(max(slot, 0), len(divisions) - 1)]


def rounded_to_division(size_bytes: int, division: int) -> int:
    """Round up to the next of ``division`` equal steps between two powers of two.

    Source: roundup_power2_next_division.
    """
    power = 1 << (size_bytes.bit_length() - 1)
    if power == size_bytes:
        return size_bytes
    step = power // division
    return -(-size_bytes // step) * step if step else 2 * power


def segment_size(block_bytes: int, large_segment_bytes: int = LARGE_SEGMENT) -> int:
    """Return the size of the segment that is allocated for a block. Source: get_allocation_size."""
    if block_bytes <= MAX_SMALL_BYTES:
        return SMALL_SEGMENT
    if block_bytes < OWN_SEGMENT:
        return large_segment_bytes
    return -(-block_bytes // SEGMENT_STEP) * SEGMENT_STEP


def rounded_array(
    sizes_bytes: npt.NDArray[np.int64], divisions: Sequence[int] = ()
) -> npt.NDArray[np.int64]:
    """Round up each request of an array, as ``rounded`` does."""
    import numpy as np  # imported here, so that the allocator works without numpy

    rounded_to_block = np.maximum(
        -(-sizes_bytes // SMALLEST_BLOCK) * SMALLEST_BLOCK, SMALLEST_BLOCK
    )
    if not any(divisions):
        return rounded_to_block
    log2 = np.floor(np.log2(np.maximum(sizes_bytes, 1))).astype(np.int64)
    slots = np.clip(log2 + 1 - _FIRST_SLOT_BITS, 0, len(divisions) - 1)
    divisions_of_sizes = np.array(divisions, np.int64)[slots]
    power = np.int64(1) << np.minimum(log2, 60)
    step = np.maximum(power // np.maximum(divisions_of_sizes, 1), 1)
    next_step = np.where(sizes_bytes == power, sizes_bytes, -(-sizes_bytes // step) * step)
    is_divided = (divisions_of_sizes > 1) & (sizes_bytes > SMALLEST_BLOCK * divisions_of_sizes)
    return np.where(is_divided, next_step, rounded_to_block)


Backend: TypeAlias = Literal["native", "cudaMallocAsync"]
RecordedValue: TypeAlias = bool | int | float | str | dict[str, int]

_NO_DIVISIONS = (0,) * DIVISION_SLOTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a caching allocator, with the meanings, limits and defaults of PyTorch.

    The source is PyTorch 2.15's c10/core/AllocatorConfig and c10/cuda/CUDAAllocatorConfig, whose keys have
    the same names, with two exceptions: a key that ends in "_mb" ends in "_bytes" here, and its value is a
    whole number of MiB; ``per_process_memory_fraction`` is ``memory_fraction`` here. Omitted settings have
    their defaults.

    Raises SettingRefused, an InputError with the field, its value and the valid values.
    """

    # cudaMallocAsync uses only the settings of pinned memory.
    backend: Backend = "native"

    # Blocks of at least this size are not split; None: no limit.
    max_split_size_bytes: int | None = None
    # Maximum unused bytes of a block that serves a request without being split; None:
    # large_segment_size_bytes.
    max_non_split_rounding_bytes: int | None = None
    # Size of the segment for a request above 1 MiB and below 10 MiB.
    large_segment_size_bytes: int = 20 * MIB
    # For each slot i, the number of steps between 2^i and 2^(i+1) MiB to which sizes are rounded; 0 and 1: no
    # rounding.
    roundup_power2_divisions: tuple[int, ...] = _NO_DIVISIONS
    # The share of the limit above which unused segments are released, oldest first; 0: off.
    garbage_collection_threshold: float = 0.0
    # The memory limit, as a share of the device's memory; 1: no limit.
    memory_fraction: float = 1.0
    # Whether requests above the limit are rejected without a driver call.
    throw_on_cudamalloc_oom: bool = False
    # Whether the allocator's lock is released during driver allocations.
    release_lock_on_cudamalloc: bool = False
    # Whether a capture reuses blocks that are free according to the graph captured so far.
    graph_capture_record_stream_reuse: bool = False

    # Whether segments grow within a range of addresses.
    expandable_segments: bool = False
    # The size of the address range; None: 9/8 of the device's memory.
    expandable_segments_reserve: Reserve | None = None
    # The size of the address range for each class of streams, by name.
    expandable_segments_reserve_by_class: tuple[tuple[str, Reserve], ...] = ()

    # Whether a background thread processes the events of pinned memory.
    pinned_use_background_threads: bool = False
    # Whether pinned memory is allocated by cudaHostRegister instead of cudaHostAlloc.
    pinned_use_cuda_host_register: bool = False
    # Number of threads that populate the pages for cudaHostRegister.
    pinned_num_register_threads: int = 1
    # Requests above this size are not rounded to a power of two; None: all requests are rounded.
    pinned_max_round_threshold_bytes: int | None = None
    # Blocks above this size are released when freed; None: all blocks are cached.
    pinned_max_cached_size_bytes: int | None = None
    # Size of the pinned memory that is reserved at the first use and divided into blocks; 0: none.
    pinned_reserve_segment_size_bytes: int = 0
    # Whether errors are ignored when pinned memory is freed.
    pinned_free_catch_all: bool = False

    def __post_init__(self) -> None:
        for key in KEYS.values():
            value = getattr(self, key.field)
            if not key.holds(value):
                raise refused_value(key.field, value, key.expected)
        minimum = self.large_segment_size_bytes
        for field in ("max_split_size_bytes", "max_non_split_rounding_bytes"):
            value = getattr(self, field)
            if value is not None and value < minimum:
                size_text = shown_value("large_segment_size_bytes", minimum)
                expected = f"at least the size of a large segment, {size_text}"
                raise refused_value(field, value, expected)
        if self.backend != "native":
            for key in self._changed_keys().values():
                if key.native:
                    expected = f"left out: with backend {self.backend} it does nothing"
                    raise refused_value(key.field, getattr(self, key.field), expected)

    @property
    def slack_bytes(self) -> int:
        """Return the maximum unused bytes of a block that serves a request without being split."""
        max_unused_bytes = self.max_non_split_rounding_bytes
        return self.large_segment_size_bytes if max_unused_bytes is None else max_unused_bytes

    def as_text(self) -> str:
        """Return the non-default settings as a string that PyTorch and ``parse_config`` read."""
        return ",".join(
            f"{name}:{key.write(getattr(self, key.field))}"
            for name, key in self._changed_keys().items()
        )

    def as_torch(self) -> dict[str, RecordedValue]:
        """Return the ``allocator_settings`` that PyTorch 2.11 writes into a snapshot.

        Sizes are in bytes, -1 for no limit; divisions are keyed by the first MiB of their interval. The
        string under PYTORCH_CUDA_ALLOC_CONF is ``as_text``, which also has settings that PyTorch omits
        (torch/csrc/cuda/Module.cpp, torch_cuda_memorySnapshot).
        """
        max_split_bytes = self.max_split_size_bytes
        return {
            "PYTORCH_CUDA_ALLOC_CONF": self.as_text(),
            "max_split_size": -1 if max_split_bytes is None else max_split_bytes,
            "garbage_collection_threshold": self.garbage_collection_threshold,
            "expandable_segments": self.expandable_segments,
            "pinned_num_register_threads": self.pinned_num_register_threads,
            "release_lock_on_cudamalloc": self.release_lock_on_cudamalloc,
            "pinned_use_cuda_host_register": self.pinned_use_cuda_host_register,
            "graph_capture_record_stream_reuse": self.graph_capture_record_stream_reuse,
            "roundup_power2_divisions": {
                str(1 << slot): divisions
                for slot, divisions in enumerate(self.roundup_power2_divisions)
            },
        }

    def as_recorded(self) -> dict[str, RecordedValue]:
        """Return the settings of a cudakit snapshot: those that PyTorch writes, then all effective settings.

        Names are the keys without ``_mb``; sizes are in bytes, -1 for no limit.
        """
        recorded: dict[str, RecordedValue] = {}
        for name, key in KEYS.items():
            value = getattr(self, key.field)
            if value is None:
                value = -1
            elif not isinstance(value, bool | int | float | str):
                value = key.write(value)
            recorded[name.removesuffix("_mb")] = value
        recorded["max_non_split_rounding"] = self.slack_bytes
        torch_settings = self.as_torch()
        return torch_settings | {
            name: value for name, value in recorded.items() if name not in torch_settings
        }

    def _changed_keys(self) -> dict[str, Key]:
        defaults = {field.name: field.default for field in fields(self)}
        return {
            name: key
            for name, key in KEYS.items()
            if getattr(self, key.field) != defaults[key.field]
        }


# The environment variables of PyTorch in their order of precedence: the old name comes first
# (AcceleratorAllocatorConfig::instance; the comment in its header is wrong).
PYTORCH_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# The variable that only cudakit's allocator reads comes first.
VARIABLES = ("CUDAKIT_ALLOC_CONF", *PYTORCH_VARIABLES)
# Names of sizes in a snapshot, and the fields of Settings that they set.
_RECORDED_BYTES = {
    "max_split_size": "max_split_size_bytes",
    "max_non_split_rounding": "max_non_split_rounding_bytes",
    "large_segment_size": "large_segment_size_bytes",
}


class SettingsWarning(UserWarning):
    """Warns that several environment variables configure the allocator."""


def effective(environment: Mapping[str, str]) -> Settings:
    """Return the settings that environment variables configure.

    The first of CUDAKIT_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF that is set is the whole
    configuration, even if it is empty: variables are not merged. If the other variables differ from it, a
    SettingsWarning names the variable that applies. Raises the errors of ``parse_config``.
    """
    defined_variables = [variable for variable in VARIABLES if variable in environment]
    if not defined_variables:
        return Settings()
    used_variable, *unused_variables = defined_variables
    if ignored_variables := [
        name for name in unused_variables if environment[name] != environment[used_variable]
    ]:
        warnings.warn(
            f"{' and '.join([used_variable, *ignored_variables])} are set;"
            f" this allocator uses {used_variable}",
            SettingsWarning,
            stacklevel=2,
        )
    return parse_config(environment[used_variable], variable=used_variable)


def parse_config(text: str, *, variable: str = "PYTORCH_CUDA_ALLOC_CONF") -> Settings:
    """Parse a configuration: ``key:value,key:[a:b,c:d]``. Omitted keys have their defaults.

    Accepts the configurations of PyTorch 2.15, except those that PyTorch silently ignores or
    misreads: missing separators, spaces within words, duplicate keys, negative numbers and
    numbers with other characters after them, intervals of roundup_power2_divisions that do not ascend or
    that exceed the largest interval, address reserves that are not a share or a size in GiB, and keys of
    the native backend with another backend.

    Raises SettingRefused with one line: the variable, the position (from 1), the value there, and the valid
    values.
    """
    entries: dict[str, Entry] = {}
    value_by_field: dict[str, object] = {}
    for entry in read_entries(variable, text):
        name = _key_name(entry.key)
        key = KEYS[name]
        if key.field in entries:
            earlier_key = entries[key.field].key
            raise entry.key.error(
                f"{name} is set twice, first at character {earlier_key.position + 1}",
                hint="keep one of them",
            )
        entries[key.field] = entry
        value_by_field[key.field] = key.read(entry)
    backend = value_by_field.get("backend", "native")
    if backend != "native":
        for entry in entries.values():
            if KEYS[_key_name(entry.key)].native:
                raise entry.key.error(
                    f"{entry.key.text} does nothing with backend:{backend}",
                    hint="leave out one of them",
                )
    try:
        return Settings(**value_by_field)  # type: ignore[arg-type]  # Key.read returns the type of its field
    except SettingRefused as refusal:
        entry = entries[refusal.field]
        raise entry.value.error(
            f"{entry.key.text} is {refusal.value_text}; it must be {refusal.valid_values}"
        ) from None


def _key_name(key: Token) -> str:
    """Return the name under which PyTorch documents a key."""
    name = KEY_BY_SPELLING.get(key.text, key.text)
    if name in KEYS:
        return name
    if name in DROPPED_KEYS:
        raise key.error(f"PyTorch removed {name} and rejects it", hint="leave it out")
    similar_names = get_close_matches(name[:80], KEYS, n=1)
    suggestion = f"; did you mean {similar_names[0]!r}?" if similar_names else ""
    hint = "see PyTorch's documentation of PYTORCH_CUDA_ALLOC_CONF"
    raise key.error(
        f"PyTorch has no setting {key.shown}{suggestion}",
        hint=hint if similar_names else f"settings: {', '.join(KEYS)}",
    )


def recorded_settings(recorded_values: Mapping[str, Any]) -> Settings:
    """Return the Settings of a snapshot's ``allocator_settings``; invalid values are omitted.

    Starts from the string under PYTORCH_CUDA_ALLOC_CONF and applies the other recorded values
    (torch/csrc/cuda/Module.cpp, torch_cuda_memorySnapshot). The memory fraction is omitted, because no
    snapshot records the memory of the device.
    """
    text = recorded_values.get("PYTORCH_CUDA_ALLOC_CONF")
    try:
        settings = parse_config(text) if isinstance(text, str) else Settings()
    except InputError:
        # PyTorch accepts configurations that parse_config rejects; the other recorded values then apply.
        settings = Settings()
    sizes: dict[str, int | None] = {}
    for name, field in _RECORDED_BYTES.items():
        value = recorded_values.get(name)
        if isinstance(value, int) and (value >= 0 or field == "max_split_size_bytes"):
            sizes[field] = value if value >= 0 else None
    settings = with_changes(settings, sizes)
    threshold = recorded_values.get("garbage_collection_threshold")
    if isinstance(threshold, float):
        settings = with_changes(settings, {"garbage_collection_threshold": threshold})
    divisions_by_mib = recorded_values.get("roundup_power2_divisions")
    if isinstance(divisions_by_mib, dict):
        slots = tuple(divisions_by_mib.get(str(1 << slot), 0) for slot in range(DIVISION_SLOTS))
        settings = with_changes(settings, {"roundup_power2_divisions": slots})
    return settings


def with_changes(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """Return settings with changes, or unchanged if the changes are not valid."""
    try:
        return replace(settings, **changes)
    except InputError:
        return settings


def recorded_divisions(recorded_values: Mapping[str, Any]) -> list[int]:
    """Return the divisions of each power of two from 1 MiB on; 0: plain rounding. Empty if not recorded.

    More tolerant than Settings: recorded values are applied even if they are not valid settings.
    """
    divisions = recorded_values.get("roundup_power2_divisions")
    if not isinstance(divisions, Mapping):
        return []
    slots = sorted(
        (int(key), division) for key, division in divisions.items() if str(key).isdecimal()
    )
    return [
        division if isinstance(division, int) and 0 <= division <= 1 << 20 else 0
        for _, division in slots
    ]


def recorded_max_split(recorded_values: Mapping[str, Any]) -> int:
    """Return the size from which blocks are never split; UNLIMITED if there is no limit."""
    limit = recorded_values.get("max_split_size")
    return limit if isinstance(limit, int) and limit > 0 else UNLIMITED


def flag_of_device(flag: object, ordinal: int) -> bool | None:
    """Return the flag of a device, from one flag, a list, or a dict by device index; None if missing."""
    if isinstance(flag, list):
        flag = flag[ordinal] if 0 <= ordinal < len(flag) else None
    elif isinstance(flag, dict):
        flag = flag.get(str(ordinal))
    return flag if isinstance(flag, bool) else None
