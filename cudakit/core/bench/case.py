"""A case: a workload, its method, its baselines, and the memory that it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from cudakit.core.bench.method import Method
from cudakit.core.bench.roofline import Work
from cudakit.core.bench.workload import Axis, Baseline, Prepared, Workload
from cudakit.errors import InputError
from cudakit.gpu.api import Gpu
from cudakit.gpu.api.facts import NOT_QUERIED
from cudakit.units import Unavailable, format_bytes

# The value of ``library`` for workloads that are no baseline.
CUDAKIT = "cudakit"

_LATENCY = Unavailable("a latency has no theoretical peak")
# The rest is for kernels and the buffers of the timer.
_SHARE_OF_FREE = 0.95


@dataclass(frozen=True, slots=True, eq=False)  # a dict key by identity
class Implementation:
    """A workload in one library. It is a Workload too, whose name contains the library."""

    workload: Workload
    library: str = CUDAKIT

    @property
    def name(self) -> str:
        name = self.workload.name
        return name if self.library == CUDAKIT else f"{name} by {self.library}"

    @property
    def axes(self) -> Mapping[str, Axis]:
        return self.workload.axes

    def prepare(self, gpu: Gpu, seed: int) -> Prepared:
        return self.workload.prepare(gpu, seed)


@dataclass(frozen=True, slots=True)
class Case:
    """One result, and one for each baseline, whose samples are interleaved."""

    workload: Workload
    method: Method
    work: Work | Unavailable = _LATENCY  # of one execution, for the roofline
    size_bytes: int = 0  # of one buffer on the device
    buffers: int = 0  # number of such buffers in a buffer set
    host_bytes: int = 0  # host memory in buffers of ``size_bytes``
    more_bytes: int = 0  # device memory in other buffers, of all implementations
    fitting: Callable[[int], str] | None = None  # describes the largest case that fits N bytes
    baselines: tuple[Baseline, ...] = ()
    operation: str = "FLOP"  # unit of its arithmetic
    settings: Mapping[str, Axis] = field(default_factory=dict)  # recorded with the axes

    @property
    def implementations(self) -> tuple[Implementation, ...]:
        """The workload, then its baselines."""
        others = (Implementation(baseline, baseline.library) for baseline in self.baselines)
        return (Implementation(self.workload), *others)

    @property
    def needed_bytes(self) -> int:
        """Device memory of one buffer set of each implementation."""
        return self.size_bytes * self.buffers + self.more_bytes

    @property
    def title(self) -> str:
        """The name and axes: ``memory operation=copy size_bytes=4096``."""
        axes = (f"{name}={value}" for name, value in self.workload.axes.items())
        return " ".join((self.workload.name, *axes))


def check_fit(
    cases: Sequence[Case], free_bytes: int, host_free_bytes: int | Unavailable = NOT_QUERIED
) -> None:
    """Raise InputError if a case needs more memory than is free; its hint is the largest case that fits."""
    _check_host(cases, host_free_bytes)
    usable_bytes = int(_SHARE_OF_FREE * free_bytes)
    for case in cases:
        if case.needed_bytes > usable_bytes:
            fitting = case.fitting or partial(_fitting, case)
            raise InputError(
                f"{case.title} needs {_amount(case)}, but only {format_bytes(free_bytes)} is free",
                hint=f"{fitting(usable_bytes)} would fit",
            )


def _check_host(cases: Sequence[Case], free_bytes: int | Unavailable) -> None:
    if isinstance(free_bytes, Unavailable):
        return
    usable_bytes = int(_SHARE_OF_FREE * free_bytes)
    for case in cases:
        if case.host_bytes > usable_bytes:
            raise InputError(
                f"{case.title} needs {format_bytes(case.host_bytes)} of host memory, but only "
                f"{format_bytes(free_bytes)} is free",
                hint=f"{_rounded(usable_bytes * case.size_bytes // case.host_bytes)} would fit",
            )


def _amount(case: Case) -> str:
    total = f"{format_bytes(case.needed_bytes)} of device memory"
    return f"{total} in {case.buffers} buffers" if case.buffers > 1 else total


def _fitting(case: Case, usable_bytes: int) -> str:
    """Return the largest buffer size that fits."""
    return _rounded(usable_bytes // max(case.buffers, 1))


def _rounded(size_bytes: int) -> str:
    """Round down to 8 significant bits, which are easy to read and type."""
    unit = 1 << max(size_bytes.bit_length() - 8, 4)
    return format_bytes(size_bytes // unit * unit)
