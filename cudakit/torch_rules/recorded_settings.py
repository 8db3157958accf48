"""The settings of the allocator as a snapshot records them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cudakit.errors import InputError
from cudakit.torch_rules.setting_rules import DIVISION_SLOTS
from cudakit.torch_rules.settings import Settings, parse_config
from cudakit.torch_rules.sizes import UNLIMITED

_BYTES = {
    "max_split_size": "max_split_size_bytes",
    "max_non_split_rounding": "max_non_split_rounding_bytes",
    "large_segment_size": "large_segment_size_bytes",
}


def recorded_settings(recorded: Mapping[str, Any]) -> Settings:
    """Return the Settings of a snapshot's ``allocator_settings``; what no setting may be is left out.

    Starts from the string under PYTORCH_CUDA_ALLOC_CONF and applies the values recorded beside it
    (torch/csrc/cuda/Module.cpp, torch_cuda_memorySnapshot). Without a memory fraction, because no
    snapshot records the memory of the device.
    """
    settings = _parsed(recorded.get("PYTORCH_CUDA_ALLOC_CONF"))
    for changes in (_sizes(recorded), _collection(recorded), _divisions(recorded)):
        settings = changed(settings, changes)
    return settings


def changed(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """Return settings with changes, or unchanged if the changes are not valid."""
    try:
        return replace(settings, **changes)
    except InputError:
        return settings


def recorded_divisions(recorded: Mapping[str, Any]) -> list[int]:
    """Return the divisions of each power of two from 1 MiB on; 0: plain rounding. Empty if not recorded.

    More tolerant than Settings: what a file records is applied even if no setting may be so.
    """
    found = recorded.get("roundup_power2_divisions")
    if not isinstance(found, Mapping):
        return []
    slots = sorted((int(key), n) for key, n in found.items() if str(key).isdecimal())
    return [n if isinstance(n, int) and 0 <= n <= 1 << 20 else 0 for _, n in slots]


def recorded_max_split(recorded: Mapping[str, Any]) -> int:
    """Return the size from which blocks are never split; UNLIMITED if there is no limit."""
    found = recorded.get("max_split_size")
    return found if isinstance(found, int) and found > 0 else UNLIMITED


def flag_of_device(flag: object, ordinal: int) -> bool | None:
    """Return a flag that holds for all devices, or for each in a list or by its number; else None."""
    if isinstance(flag, list):
        flag = flag[ordinal] if 0 <= ordinal < len(flag) else None
    elif isinstance(flag, dict):
        flag = flag.get(str(ordinal))
    return flag if isinstance(flag, bool) else None


def _parsed(text: object) -> Settings:
    try:
        return parse_config(text) if isinstance(text, str) else Settings()
    except (
        InputError
    ):  # PyTorch accepts more than parse_config; the values beside the text count then
        return Settings()


def _sizes(recorded: Mapping[str, Any]) -> dict[str, int | None]:
    found = {field: recorded.get(name) for name, field in _BYTES.items()}
    return {
        field: value if value >= 0 else None
        for field, value in found.items()
        if isinstance(value, int) and (value >= 0 or field == "max_split_size_bytes")
    }


def _collection(recorded: Mapping[str, Any]) -> dict[str, float]:
    threshold = recorded.get("garbage_collection_threshold")
    return {"garbage_collection_threshold": threshold} if isinstance(threshold, float) else {}


def _divisions(recorded: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    by_mib = recorded.get("roundup_power2_divisions")
    if not isinstance(by_mib, dict):
        return {}
    slots = (by_mib.get(str(1 << slot), 0) for slot in range(DIVISION_SLOTS))
    return {"roundup_power2_divisions": tuple(slots)}
