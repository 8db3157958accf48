"""Shares of axes as whole units of a drawing, and paths through them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cudakit.document import Array


def places(shares: Array, extent: int) -> list[int]:
    """Scale shares of an axis to a drawing that is so many units long."""
    found: list[int] = np.rint(shares * extent).astype(np.int64).tolist()
    return found


def outline(across: Sequence[int], down: Sequence[int]) -> str:
    """Join points by straight lines."""
    return "M" + "L".join(f"{x} {y}" for x, y in zip(across, down, strict=True))


def dots(across: Sequence[int], down: Sequence[int]) -> str:
    """Draw lines without length, which round caps turn into dots of a fixed size."""
    return "".join(f"M{x} {y}h0" for x, y in zip(across, down, strict=True))
