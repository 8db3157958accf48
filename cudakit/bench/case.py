"""A case: a workload, its measurement method, its baselines, and the memory that it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from cudakit.bench.labels import MEASUREMENT_AXIS, workload_label
from cudakit.bench.method import Method
from cudakit.bench.roofline import Work
from cudakit.bench.workload import CUDAKIT, Axis, Baseline, PreparedWorkload, Workload
from cudakit.errors import InputError
from cudakit.gpu.api import Gpu
from cudakit.gpu.api.facts import NOT_QUERIED
from cudakit.units import Unavailable, format_bytes

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
        return workload_label(self.workload, omitted_axes=(MEASUREMENT_AXIS,))


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
    _check_host_fit(max(cases, key=lambda case: case.host_bytes), host_free_bytes, host_share)
    rank_text, free_text = "", f"only {format_bytes(free_bytes)} is free"
    usable_bytes = int(_SHARE_OF_FREE * free_bytes)
    if simulated and not isinstance(host_free_bytes, Unavailable):
        usable_host_bytes = int(host_share * host_free_bytes / rank_count)
        if usable_host_bytes < usable_bytes:
            usable_bytes = usable_host_bytes
            rank_text = f" on each of {rank_count} ranks" if rank_count > 1 else ""
            device_text = "the device" if rank_count == 1 else "their devices"
            pronoun = "it" if rank_count == 1 else "them"
            free_text = (
                f"the host, which simulates {device_text}, has only "
                f"{format_bytes(int(host_share * host_free_bytes))} for {pronoun}: half of its free memory"
            )
    largest_case = max(cases, key=lambda case: case.needed_bytes)
    if largest_case.needed_bytes > usable_bytes:
        describe_fitting = largest_case.describe_fitting or partial(
            _describe_buffer_size, largest_case
        )
        raise InputError(
            f"{largest_case.title} needs {_describe_needed_memory(largest_case)}{rank_text}, "
            f"but {free_text}",
            hint=f"{describe_fitting(usable_bytes)} would fit",
        )


def _check_host_fit(case: Case, free_bytes: int | Unavailable, share: float) -> None:
    if isinstance(free_bytes, Unavailable):
        return
    usable_bytes = int(share * free_bytes)
    if case.host_bytes > usable_bytes:
        largest_size_text = _format_rounded_down(usable_bytes * case.size_bytes // case.host_bytes)
        raise InputError(
            f"{case.title} needs {format_bytes(case.host_bytes)} of host memory, but only "
            f"{format_bytes(free_bytes)} is free"
            f"{', of which a simulated device can use half' if share < _SHARE_OF_FREE else ''}",
            hint=f"a size of {largest_size_text} would fit",
        )


def _describe_needed_memory(case: Case) -> str:
    total_text = f"{format_bytes(case.needed_bytes)} of device memory"
    return f"{total_text} in {case.buffers} buffers" if case.buffers > 1 else total_text


def _describe_buffer_size(case: Case, usable_bytes: int) -> str:
    """Describe the largest buffer size with which a case fits in ``usable_bytes``."""
    return f"a size of {_format_rounded_down(usable_bytes // max(case.buffers, 1))}"


def _format_rounded_down(size_bytes: int) -> str:
    """Format a size, rounded down to 8 significant bits so that it is easy to read and type."""
    rounding_unit = 1 << max(size_bytes.bit_length() - 8, 4)
    return format_bytes(size_bytes // rounding_unit * rounding_unit)
