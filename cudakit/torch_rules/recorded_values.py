"""Single settings as a snapshot records them, tolerant of values that no setting may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cudakit.torch_rules.sizes import UNLIMITED


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
