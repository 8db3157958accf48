"""What is measured: the protocols of a workload, and the verification of what it computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from cudakit.errors import Unsupported
from cudakit.gpu.api import Event, Gpu, Memory, Ptr, Stream, Streams

Axis: TypeAlias = str | int | float


@dataclass(frozen=True, slots=True)
class Verification:
    """A comparison of computed values with a reference of higher precision."""

    passed: bool  # whether the error is within the tolerance and every value was written
    error: float  # Frobenius norm of the difference, relative to that of the reference
    tolerance: float  # the largest error that rounding explains
    against: str  # what the reference is: "float64, 64 rows"
    detail: str = ""  # what is wrong, where it is: "3 values were never written"


def verification(error: float, tolerance: float, against: str, detail: str = "") -> Verification:
    """Return a verification that passed if the error is within the tolerance and nothing else is wrong."""
    return Verification(not detail and error <= tolerance, error, tolerance, against, detail)


def worst(found: Iterable[Verification]) -> Verification:
    """Return the verification that failed, or that has the largest error."""
    return max(found, key=lambda one: (not one.passed, one.error))


# Of a workload that computes no values.
NOTHING_TO_VERIFY = Verification(True, 0.0, 0.0, "nothing")


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
        """Grow to ``sets`` buffer sets, each filled and poisoned like the one that ``prepare`` made.

        Called at most once, before anything is enqueued.
        """
        ...

    def enqueue(self, stream: Stream, index: int) -> None:
        """Enqueue one run on buffer set ``index`` modulo their number. Must not wait for the device."""
        ...

    def verify(self) -> Verification:
        """Check the outputs of every buffer set, and poison them again.

        Called when the device has finished and each set was run since the previous call.
        """
        ...

    def close(self) -> None:
        """Free the memory. A second call does nothing."""
        ...


@runtime_checkable
class Configured(Protocol):
    """A Prepared that reports how it was set up, for the record."""

    @property
    def settings(self) -> Mapping[str, Axis]: ...


class Workload(Protocol):
    """One case of a bench."""

    @property
    def name(self) -> str:
        """Name in results, as ``gemm``."""
        ...

    @property
    def axes(self) -> Mapping[str, Axis]:
        """The parameters that distinguish this case from others of its name."""
        ...

    def prepare(self, gpu: Gpu, seed: int) -> Prepared:
        """Allocate memory and fill it; the seed determines every value."""
        ...


class Baseline(Workload, Protocol):
    """The same work, done by another library."""

    @property
    def library(self) -> str:
        """Name of that library."""
        ...


class Refused(Unsupported):
    """The device or a library does not offer a workload, or not in the mode that was asked."""

    def __init__(
        self, workload: Workload, refusal: Unsupported, settings: Mapping[str, Axis]
    ) -> None:
        super().__init__(refusal.message, hint=refusal.hint)
        self.workload, self.settings = workload, settings


def owned_memory(gpu: Memory, owned: ExitStack, size_bytes: int) -> Ptr:
    """Allocate device memory; ``owned`` frees it."""
    memory = gpu.malloc(size_bytes)
    owned.callback(gpu.free, memory)
    return memory


def owned_stream(gpu: Streams, owned: ExitStack) -> Stream:
    """Create a non-blocking stream; ``owned`` destroys it."""
    stream = gpu.stream(blocking=False)
    owned.callback(gpu.destroy_stream, stream)
    return stream


def owned_event(gpu: Streams, owned: ExitStack) -> Event:
    """Create an event without a time; ``owned`` destroys it."""
    event = gpu.event(timing=False)
    owned.callback(gpu.destroy_event, event)
    return event


class PreparedLatency:
    """A Prepared without data: nothing to rotate, move or verify. ``owned`` is released by ``close``."""

    footprint_bytes = 0
    bytes_moved = 0
    operations = 0

    def __init__(self) -> None:
        self.owned = ExitStack()

    def rotate(self, sets: int) -> None:
        """Do nothing: a workload without a footprint has one buffer set."""

    def verify(self) -> Verification:
        """Return NOTHING_TO_VERIFY."""
        return NOTHING_TO_VERIFY

    def close(self) -> None:
        """Release everything."""
        self.owned.close()
