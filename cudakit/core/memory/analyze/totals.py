"""Sums by group, largest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Total:
    """What the members of one group add up to."""

    key: int
    bytes: int
    count: int
    share: float


def totals(keys: npt.NDArray[np.integer], amounts: _Ints) -> Iterator[Total]:
    """Sum amounts (bytes) by key (at least -1), largest sum first; nothing for keys that do not occur."""
    if not len(keys):
        return
    shifted = keys.astype(np.int64) + 1
    count = np.bincount(shifted)
    # Sums of bytes stay below 2**53, where float64 is exact.
    summed = np.bincount(shifted, weights=amounts).astype(np.int64)
    whole = max(int(summed.sum()), 1)
    present = np.flatnonzero(count)
    for key in present[np.argsort(-summed[present], kind="stable")].tolist():
        yield Total(key - 1, int(summed[key]), int(count[key]), int(summed[key]) / whole)
