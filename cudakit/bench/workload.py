"""The protocols of a workload, and the verification of the values that it computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from cudakit.errors import Unsupported
from cudakit.gpu.api import Event, Gpu, Memory, Ptr, Stream, Streams

# The value of a parameter of a case.
Axis: TypeAlias = str | int | float

# The value of the field ``library`` for workloads that are no baseline.
CUDAKIT = "cudakit"


@dataclass(frozen=True, slots=True)
class Verification:
    """A comparison of computed values with a reference of higher precision."""

    passed: bool  # Whether the error is within the tolerance and every value was written.
    error: float  # Frobenius norm of the difference, relative to that of the reference.
    tolerance: float  # The largest error that rounding explains.
    against: str  # Description of the reference: "an fp64 computation of 64 rows".
    detail: str = ""  # Description of an error: "3 values were never written"; else "".


def verification(error: float, tolerance: float, reference: str, detail: str = "") -> Verification:
    """Return a Verification that passes if the error is within the tolerance and ``detail`` is empty."""
    return Verification(not detail and error <= tolerance, error, tolerance, reference, detail)


def worst_verification(verifications: Iterable[Verification]) -> Verification:
    """Return a failed verification or, if all passed, the one with the largest error."""
    return max(
        verifications, key=lambda verification: (not verification.passed, verification.error)
    )


# The verification of a workload that computes no values.
NOTHING_TO_VERIFY = Verification(True, 0.0, 0.0, "nothing")


class PreparedWorkload(Protocol):
    """A workload whose buffers are allocated, its inputs filled and its outputs poisoned."""

    @property
    def footprint_bytes(self) -> int:
        """Bytes of one buffer set: the memory that one execution accesses."""
        ...

    @property
    def bytes_moved(self) -> int:
        """Minimum number of bytes that one execution reads and writes in device memory."""
        ...

    @property
    def operations(self) -> int:
        """Arithmetic operations of one execution: a multiply-add counts as two."""
        ...

    def rotate(self, set_count: int) -> None:
        """Allocate, fill and poison further buffer sets, up to ``set_count``.

        The pipeline calls this method at most once, before the first ``enqueue``.
        """
        ...

    def enqueue(self, stream: Stream, set_index: int) -> None:
        """Enqueue one execution on buffer set ``set_index`` modulo the number of sets, without blocking."""
        ...

    def verify(self) -> Verification:
        """Check the outputs of all buffer sets, and poison them again.

        The caller has waited for the device, and each set was used since the previous call.
        """
        ...

    def close(self) -> None:
        """Free the memory. A second call does nothing."""
        ...


@runtime_checkable
class ConfiguredWorkload(Protocol):
    """A prepared workload with settings that the result records."""

    @property
    def settings(self) -> Mapping[str, Axis]: ...


@runtime_checkable
class WorkloadWithUntimedWork(Protocol):
    """A prepared workload with untimed work next to each sample, such as work on another stream."""

    def enqueue_before_sample(self, stream: Stream) -> None:
        """Enqueue untimed work between the blocking kernel and the sample."""
        ...

    def enqueue_after_sample(self, stream: Stream) -> None:
        """Enqueue untimed work after the sample; ``stream`` must then wait for all other streams."""
        ...


class Workload(Protocol):
    """Work that can be prepared and measured on a device."""

    @property
    def name(self) -> str:
        """Name of the workload in results: ``gemm``."""
        ...

    @property
    def axes(self) -> Mapping[str, Axis]:
        """The parameters that identify a case among the cases with the same name."""
        ...

    def prepare(self, gpu: Gpu, seed: int) -> PreparedWorkload:
        """Allocate buffers and fill them with data that only depends on the seed."""
        ...


class Baseline(Workload, Protocol):
    """The same work as that of a case, computed by another library."""

    @property
    def library(self) -> str:
        """Name of the library."""
        ...


class UnsupportedCase(Unsupported):
    """The device or a library does not support a workload, or does not support it in the measurement mode."""

    def __init__(
        self, workload: Workload, reason: Unsupported, settings: Mapping[str, Axis]
    ) -> None:
        super().__init__(reason.message, hint=reason.hint)
        self.workload, self.settings = workload, settings


def allocate(gpu: Memory, cleanup: ExitStack, size_bytes: int) -> Ptr:
    """Allocate device memory that ``cleanup`` frees."""
    memory = gpu.malloc(size_bytes)
    cleanup.callback(gpu.free, memory)
    return memory


def create_stream(gpu: Streams, cleanup: ExitStack) -> Stream:
    """Create a non-blocking stream that ``cleanup`` destroys."""
    stream = gpu.stream(blocking=False)
    cleanup.callback(gpu.destroy_stream, stream)
    return stream


def create_event(gpu: Streams, cleanup: ExitStack) -> Event:
    """Create an event without timing that ``cleanup`` destroys."""
    event = gpu.event(timing=False)
    cleanup.callback(gpu.destroy_event, event)
    return event


class PreparedLatency:
    """A prepared workload without data, for latencies. ``close`` releases all resources in ``cleanup``."""

    footprint_bytes = 0
    bytes_moved = 0
    operations = 0

    def __init__(self) -> None:
        self.cleanup = ExitStack()

    def rotate(self, set_count: int) -> None:
        """Do nothing: a workload without memory has one buffer set."""

    def verify(self) -> Verification:
        """Return NOTHING_TO_VERIFY."""
        return NOTHING_TO_VERIFY

    def close(self) -> None:
        """Release all resources in ``cleanup``."""
        self.cleanup.close()
