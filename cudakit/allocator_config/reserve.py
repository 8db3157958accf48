"""How much address space an expandable segment sets aside."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from cudakit.errors import InputError

# What PyTorch sets aside unless told otherwise, of the memory of the device (ExpandableSegment).
FULL_RESERVE = 9 / 8
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Hold a size as PyTorch's configuration writes it: ``0.5``, a share of the device, or ``40G``.

    Raises InputError for a value that is not above 0, and for a share above 9/8, which PyTorch takes
    and does not follow.
    """

    value: float
    unit: Literal["share", "GiB"] = "share"

    def __post_init__(self) -> None:
        if self.unit not in ("share", "GiB"):
            raise InputError(f"the unit of a reserve is {self.unit!r}; it must be 'share' or 'GiB'")
        value: object = self.value  # of any type, where nobody checks types
        most = FULL_RESERVE if self.unit == "share" else sys.float_info.max
        if not isinstance(value, float) or not 0 < value <= most:
            raise InputError(
                f"a reserve is {value!r} ({self.unit}); it must be a float above 0, at most {most:g}",
                hint="an absolute size is in GiB: 40G",
            )

    def size_bytes(self, total_bytes: int) -> int:
        """Return the bytes on a device with so much memory; at most 9/8 of it, as in PyTorch."""
        whole = total_bytes if self.unit == "share" else _GIB
        return int(min(self.value * whole, FULL_RESERVE * total_bytes))
