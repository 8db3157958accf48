"""A case: a workload, how it is measured, its baselines, and the memory that it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from cudakit.bench.labels import CUDAKIT, MEASUREMENT_AXIS, Axis, axes_label
from cudakit.bench.roofline import Work
from cudakit.errors import InputError, Unsupported
from cudakit.gpu.api import Event, Gpu, Memory, Ptr, Stream, Streams
from cudakit.gpu.api.facts import NOT_QUERIED
from cudakit.units import Unavailable, format_bytes

# --- the method of a measurement ----------------------------------------------------------------------

# A sample is, in mode isolated: one execution between two events; batch: many executions between two events;
# graph: a graph of many executions between two events; host: host time of the call and a synchronization;
# call: host time of the call alone, or the mean of several calls.
Mode: TypeAlias = Literal["isolated", "batch", "graph", "host", "call"]

# The L2 state. rotate: executions use buffer sets in rotation, which together exceed the cache. flush: the
# cache is overwritten before each sample. hot: all executions use the same buffers.
Cache: TypeAlias = Literal["rotate", "flush", "hot"]

# device: the time between two events; host: the host time until the device has finished; call: the host time
# until the call returns.
Clock: TypeAlias = Literal["device", "host", "call"]

_SETTLING_S = 3.0


@dataclass(frozen=True, slots=True)
class Rule:
    """The stopping rule of sampling: how many samples, and how long."""

    min_samples: int = 10  # Minimum number of samples.
    min_time_s: float = 0.5  # Minimum time since the start of the first sample.
    precision: float = 0.01  # Maximum half-width of the 95% CI, relative to the median.
    timeout_s: float = 15.0  # Maximum time since the start of the first sample.


@dataclass(frozen=True, slots=True)
class Method:
    """How the samples of one case are measured."""

    mode: Mode  # How a sample is timed.
    cache: Cache  # L2 state before each sample.
    warmup_s: float = 0.0  # Minimum or, in a result, actual duration of the warm-up.
    rule: Rule = field(default_factory=Rule)  # When sampling stops.
    blocker: bool = True  # Whether a blocking kernel hides the gaps between launches.
    # Number of rounds. Each has new buffers, because the addresses of buffers affect the speed.
    rounds: int = 1
    # Approximate duration of a sample of many executions. It makes the resolution of events, 0.5 us (CUDA
    # Driver API, cuEventElapsedTime), negligible.
    sample_s: float = 1e-3
    # Number of executions per sample; the sample is their mean. In mode "call", the case sets this
    # number; in the other modes, a trial measurement determines it.
    executions: int = 1
    buffer_sets: int = 1  # Number of buffer sets in rotation.
    # Input data: uniform (in (-1, 1)), normal, int or small integers, bits, zeros, ones, or no (no data).
    fill: str = "uniform"
    seed: int = 0  # Seed of the random data.
    interleaved: tuple[str, ...] = ()  # Libraries or workloads whose samples alternate.
    # Maximum duration of the warm-up; null: 3 s, or twice the minimum if that is longer.
    warmup_most_s: float | None = None
    energy_s: float = 0.0  # Minimum duration of the energy measurement; 0 measures no energy.

    @property
    def clock(self) -> Clock:
        """The clock that times the samples of the mode."""
        return self.mode if self.mode == "host" or self.mode == "call" else "device"

    @property
    def max_warmup_s(self) -> float:
        """Maximum duration of the warm-up."""
        if self.warmup_most_s is not None:
            return self.warmup_most_s
        return max(_SETTLING_S, 2 * self.warmup_s) if self.warmup_s else 0.0

    def differences_from(self, after: Method) -> tuple[str, ...]:
        """Return the differences that make results of two methods incomparable."""
        words = {True: "on", False: "off"}
        return tuple(
            f"{name}: {words.get(ours, ours)} before, {words.get(theirs, theirs)} after"
            for name in ("mode", "cache", "blocker", "fill")
            if (ours := getattr(self, name)) != (theirs := getattr(after, name))
        )


# --- workloads, and the check of their values ---------------------------------------------------------

# Outputs are filled with this byte before a run; as fp32 it is NaN.
POISON = 0xFF


@dataclass(frozen=True, slots=True)
class Verification:
    """A comparison of computed values with a reference of higher precision."""

    passed: bool  # Whether the error is within the tolerance and every value was written.
    error: float  # Frobenius norm of the difference, relative to that of the reference.
    tolerance: float  # The largest error that rounding explains.
    against: str  # Description of the reference: "an fp64 computation of 64 rows".
    detail: str = ""  # Description of an error: "3 values were never written"; else "".


# The verification of a workload that computes no values.
NOTHING_TO_VERIFY = Verification(True, 0.0, 0.0, "nothing")


def verification(error: float, tolerance: float, reference: str, detail: str = "") -> Verification:
    """Return a Verification that passes if the error is within the tolerance and ``detail`` is empty."""
    return Verification(not detail and error <= tolerance, error, tolerance, reference, detail)


def exact_verification(wrong: int, total: int, reference: str, defect: str) -> Verification:
    """Return a Verification that passes if no item is wrong; ``defect`` follows ``3 of 8 `` otherwise."""
    detail = f"{wrong} of {total} {defect}" if wrong else ""
    return Verification(not wrong, wrong / max(total, 1), 0.0, reference, detail)


def worst_verification(verifications: Iterable[Verification]) -> Verification:
    """Return a failed verification or, if all passed, the one with the largest error."""
    return max(verifications, key=lambda checked: (not checked.passed, checked.error))


class PreparedWorkload(Protocol):
    """A workload whose buffers are allocated, its inputs filled and its outputs poisoned.

    If it has an attribute ``settings`` (Mapping[str, Axis]), the result records them.
    """

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


def create_event(gpu: Streams, cleanup: ExitStack, *, timing: bool = False) -> Event:
    """Create an event that ``cleanup`` destroys."""
    event = gpu.event(timing=timing)
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
        return NOTHING_TO_VERIFY

    def close(self) -> None:
        self.cleanup.close()


# --- cases, and the memory that they need -------------------------------------------------------------

_LATENCY = Unavailable("a latency has no theoretical peak")
# Share of the free memory that a case may use. The rest is left for kernels and the timer's buffers.
_SHARE_OF_FREE = 0.95
# The same for a simulated device: its kernels allocate temporary arrays, and its host buffers are in the same
# memory.
_SIMULATED_SHARE_OF_FREE = 0.5


# eq=False: instances are dict keys, compared by identity.
@dataclass(frozen=True, slots=True, eq=False)
class Implementation:
    """A workload as one library computes it: a Workload whose name contains the library."""

    workload: Workload
    library: str = CUDAKIT

    @property
    def name(self) -> str:
        name = self.workload.name
        return name if self.library == CUDAKIT else f"{name} by {self.library}"

    @property
    def axes(self) -> Mapping[str, Axis]:
        return self.workload.axes

    def prepare(self, gpu: Gpu, seed: int) -> PreparedWorkload:
        return self.workload.prepare(gpu, seed)


@dataclass(frozen=True, slots=True)
class Case:
    """A workload and its baselines: their samples are interleaved, and each has one result."""

    workload: Workload
    method: Method
    work: Work | Unavailable = _LATENCY  # Arithmetic and traffic of one execution.
    size_bytes: int = 0  # Size of one buffer on the device.
    buffers: int = 0  # Number of buffers of ``size_bytes`` in a buffer set.
    host_bytes: int = 0  # Host memory in buffers of ``size_bytes``.
    other_buffer_bytes: int = 0  # Device memory in buffers of other sizes, of all implementations.
    # A function that describes the largest case that fits in a number of bytes. None: errors state the
    # largest buffer size instead.
    describe_fitting: Callable[[int], str] | None = None
    baselines: tuple[Baseline, ...] = ()
    operation: str = "FLOP"  # Unit of the case's arithmetic.
    # Parameters that the result records besides the axes.
    settings: Mapping[str, Axis] = field(default_factory=dict)

    @property
    def implementations(self) -> tuple[Implementation, ...]:
        """The implementations of the case: the workload, then its baselines."""
        baselines = (Implementation(baseline, baseline.library) for baseline in self.baselines)
        return (Implementation(self.workload), *baselines)

    @property
    def needed_bytes(self) -> int:
        """Device memory that one buffer set of each implementation needs."""
        return self.size_bytes * self.buffers + self.other_buffer_bytes

    @property
    def title(self) -> str:
        """The title in messages: name and axes, as in ``memory copy 4.00 KiB``."""
        axes = self.workload.axes
        return axes_label(
            self.workload.name, {name: axes[name] for name in axes if name != MEASUREMENT_AXIS}
        )


def check_fit(
    cases: Sequence[Case],
    free_bytes: int,
    host_free_bytes: int | Unavailable = NOT_QUERIED,
    *,
    simulated: bool = False,
    rank_count: int = 1,
) -> None:
    """Raise InputError if a case needs more memory than is free; the hint of the error is a size that fits.

    The hint is computed for the case that needs the most memory, so that all cases fit with its size. The
    memory of a simulated device is host memory, which the ``rank_count`` ranks on the host share.
    """
    if not cases:
        return
    host_share = _SIMULATED_SHARE_OF_FREE if simulated else _SHARE_OF_FREE
    usable_bytes = int(_SHARE_OF_FREE * free_bytes)
    rank_text, free_text = "", f"only {format_bytes(free_bytes)} is free"
    if not isinstance(host_free_bytes, Unavailable):
        usable_host_bytes = int(host_share * host_free_bytes)
        case = max(cases, key=lambda case: case.host_bytes)
        if case.host_bytes > usable_host_bytes:
            fitting_bytes = usable_host_bytes * case.size_bytes // case.host_bytes
            raise InputError(
                f"{case.title} needs {format_bytes(case.host_bytes)} of host memory, but only "
                f"{format_bytes(host_free_bytes)} is free"
                f"{', of which a simulated device can use half' if simulated else ''}",
                hint=f"a size of {_format_rounded_down(fitting_bytes)} would fit",
            )
        if simulated and usable_host_bytes // rank_count < usable_bytes:
            usable_bytes = usable_host_bytes // rank_count
            devices, them = ("their devices", "them") if rank_count > 1 else ("the device", "it")
            rank_text = f" on each of {rank_count} ranks" if rank_count > 1 else ""
            free_text = (
                f"the host, which simulates {devices}, has only "
                f"{format_bytes(usable_host_bytes)} for {them}: half of its free memory"
            )
    case = max(cases, key=lambda case: case.needed_bytes)
    if case.needed_bytes > usable_bytes:
        buffers = f" in {case.buffers} buffers" if case.buffers > 1 else ""
        fitting_text = (
            case.describe_fitting(usable_bytes)
            if case.describe_fitting
            else f"a size of {_format_rounded_down(usable_bytes // max(case.buffers, 1))}"
        )
        raise InputError(
            f"{case.title} needs {format_bytes(case.needed_bytes)} of device memory{buffers}"
            f"{rank_text}, but {free_text}",
            hint=f"{fitting_text} would fit",
        )


def _format_rounded_down(size_bytes: int) -> str:
    """Format a size, rounded down to 8 significant bits so that it is easy to read and type."""
    rounding_unit = 1 << max(size_bytes.bit_length() - 8, 4)
    return format_bytes(size_bytes // rounding_unit * rounding_unit)
