"""What is measured: something to run over and over, what it is worth, and a check of what it computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from cudakit.core.bench.verification import Verification
from cudakit.errors import Unsupported
from cudakit.gpu.api import Gpu, Stream


class Prepared(Protocol):
    """A workload in the memory of a device, its inputs filled and its outputs poisoned."""

    @property
    def footprint_bytes(self) -> int:
        """Memory that one run touches: one buffer set."""
        ...

    @property
    def bytes_moved(self) -> int:
        """Bytes of the device's memory that one run reads and writes at least."""
        ...

    @property
    def operations(self) -> int:
        """Arithmetic operations of one run, a multiplication and its addition are two; 0 for bytes only."""
        ...

    def rotate(self, sets: int) -> None:
        """Have so many buffer sets, each filled and poisoned like the one that ``prepare`` made.

        Called at most once, before anything is enqueued.
        """
        ...

    def enqueue(self, stream: Stream, index: int) -> None:
        """Run once on a buffer set: number ``index`` modulo their number. Must not wait for the device."""
        ...

    def verify(self) -> Verification:
        """Check the outputs of every buffer set, and poison them again.

        Called when the device has finished and each set was run since the last time.
        """
        ...

    def close(self) -> None:
        """Give the memory back. A second time does nothing."""
        ...


class RefusedLater(Unsupported):
    """A workload was prepared, and turned out not to run in the way that was asked, as in a graph."""

    def __init__(self, workload: Workload, refusal: Unsupported) -> None:
        super().__init__(refusal.message, hint=refusal.hint)
        self.workload = workload


class Workload(Protocol):
    """One case of a bench."""

    @property
    def name(self) -> str:
        """What it is called in results, as ``gemm``."""
        ...

    @property
    def axes(self) -> Mapping[str, str | int | float]:
        """What tells this case from the others of its name."""
        ...

    def prepare(self, gpu: Gpu, seed: int) -> Prepared:
        """Take memory and fill it; the seed decides on every value."""
        ...
