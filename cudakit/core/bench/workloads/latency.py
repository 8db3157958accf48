"""What workloads have in common that compute nothing: there is no data to rotate, move or verify."""

from __future__ import annotations

from contextlib import ExitStack

from cudakit.core.bench.verification import NOTHING_TO_VERIFY, Verification


class Latency:
    """A prepared workload without data. What ``owned`` holds is given back by ``close``."""

    footprint_bytes = 0
    bytes_moved = 0
    operations = 0

    def __init__(self) -> None:
        self.owned = ExitStack()

    def rotate(self, sets: int) -> None:
        """Never called: nothing has a footprint."""

    def verify(self) -> Verification:
        """There are no values."""
        return NOTHING_TO_VERIFY

    def close(self) -> None:
        """Give everything back."""
        self.owned.close()
