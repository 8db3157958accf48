"""A case of a bench: a workload, its method, and the memory that it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from cudakit.core.bench.method import Method
from cudakit.core.bench.roofline import Work
from cudakit.core.bench.workload import Axis, Baseline, Prepared, Workload
from cudakit.errors import InputError
from cudakit.gpu.api import Gpu
from cudakit.gpu.api.facts import NOT_ASKED
from cudakit.units import Unavailable, format_bytes

# The library of a workload of ours.
OURSELVES = "cudakit"

_LATENCY = Unavailable("it is a latency, which no datasheet bounds")
# The rest is for kernels and for the buffers of the timer.
_SHARE_OF_FREE = 0.95


@dataclass(frozen=True, slots=True, eq=False)  # a key of what was measured, by identity
class Implementation:
    """A workload, and the library that runs it. It is a Workload, whose name tells libraries apart."""

    workload: Workload
    library: str = OURSELVES

    @property
    def name(self) -> str:
        own = self.workload.name
        return own if self.library == OURSELVES else f"{own} by {self.library}"

    @property
    def axes(self) -> Mapping[str, Axis]:
        return self.workload.axes

    def prepare(self, gpu: Gpu, seed: int) -> Prepared:
        return self.workload.prepare(gpu, seed)


@dataclass(frozen=True, slots=True)
class Case:
    """One line of a result, and one more for each baseline, whose samples are interleaved."""

    workload: Workload
    method: Method
    work: Work | Unavailable = _LATENCY  # of one execution: bounds its time
    size_bytes: int = 0  # of each of its buffers on the device
    buffers: int = 0  # of that size, in one buffer set
    host_bytes: int = 0  # of the host, in buffers of that size
    more_bytes: int = 0  # on the device, in buffers of other sizes, of all implementations
    fitting: Callable[[int], str] | None = None  # describes what would fit into N bytes
    baselines: tuple[Baseline, ...] = ()
    operation: str = "FLOP"  # unit of its arithmetic, if any
    settings: Mapping[str, Axis] = field(default_factory=dict)  # recorded besides the axes

    @property
    def implementations(self) -> tuple[Implementation, ...]:
        """Return the workload and its baselines, ours first."""
        others = (Implementation(baseline, baseline.library) for baseline in self.baselines)
        return (Implementation(self.workload), *others)

    @property
    def needed_bytes(self) -> int:
        """Device memory for one buffer set of each implementation."""
        return self.size_bytes * self.buffers + self.more_bytes

    @property
    def title(self) -> str:
        """Return name and axes."""
        axes = (f"{name}={value}" for name, value in self.workload.axes.items())
        return " ".join((self.workload.name, *axes))


def check_fit(
    cases: Sequence[Case], free_bytes: int, host_free_bytes: int | Unavailable = NOT_ASKED
) -> None:
    """Check that the cases fit in the free memory of device and host, before anything is allocated.

    Raises InputError, which states what would fit.
    """
    _check_host(cases, host_free_bytes)
    usable_bytes = int(_SHARE_OF_FREE * free_bytes)
    for case in cases:
        if case.needed_bytes > usable_bytes:
            fitting = case.fitting or partial(_fitting, case)
            raise InputError(
                f"{case.title} needs {_amount(case)}, and {format_bytes(free_bytes)} are free",
                hint=f"{fitting(usable_bytes)} would fit",
            )


def _check_host(cases: Sequence[Case], free_bytes: int | Unavailable) -> None:
    if isinstance(free_bytes, Unavailable):
        return
    usable_bytes = int(_SHARE_OF_FREE * free_bytes)
    for case in cases:
        if case.host_bytes > usable_bytes:
            raise InputError(
                f"{case.title} needs {format_bytes(case.host_bytes)} of the host's memory, and "
                f"{format_bytes(free_bytes)} are free",
                hint=f"{_rounded(usable_bytes * case.size_bytes // case.host_bytes)} would fit",
            )


def _amount(case: Case) -> str:
    total = format_bytes(case.needed_bytes)
    return f"{total} in {case.buffers} buffers" if case.buffers > 1 else total


def _fitting(case: Case, usable_bytes: int) -> str:
    """Describe the largest size that fits."""
    return _rounded(usable_bytes // max(case.buffers, 1))


def _rounded(most: int) -> str:
    """Round down to a size that is easy to read and type."""
    unit = 1 << max(most.bit_length() - 8, 4)
    return format_bytes(most // unit * unit)
