"""Whether Numba can be used here."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np

WHY_NOT = "needs Numba, and a numpy that it works with"


def numba_is_ready() -> bool:
    """Return whether Numba is installed with a numpy that it can import: row_stack is missing since 2.5."""
    return find_spec("numba") is not None and hasattr(np, "row_stack")
