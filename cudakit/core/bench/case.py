"""A case of a bench: a workload, how it is measured, and what the device must have for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cudakit.core.bench.limits import Work
from cudakit.core.bench.method import Method
from cudakit.core.bench.workload import Workload
from cudakit.errors import InputError
from cudakit.units import Unavailable, format_bytes

_LATENCY = Unavailable("it is a latency, which no datasheet bounds")
# What is left over is for the kernels and for the buffers that the instrument itself needs.
_SHARE_OF_FREE = 0.95


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured as one line of a result."""

    workload: Workload
    method: Method
    work: Work | Unavailable = _LATENCY  # of one execution, which bounds its time
    size_bytes: int = 0  # of each of its buffers on the device
    buffers: int = 0  # of that size, in one buffer set

    @property
    def title(self) -> str:
        """Its name and axes."""
        axes = (f"{name}={value}" for name, value in self.workload.axes.items())
        return " ".join((self.workload.name, *axes))


def check_fit(cases: Sequence[Case], free_bytes: int) -> None:
    """Refuse what does not fit in the free memory of a device, before anything is allocated.

    Raises InputError, which says what would fit.
    """
    usable_bytes = int(_SHARE_OF_FREE * free_bytes)
    for case in cases:
        needed_bytes = case.size_bytes * case.buffers
        if needed_bytes > usable_bytes:
            raise InputError(
                f"{case.title} needs {_amount(case)}, and {format_bytes(free_bytes)} are free",
                hint=f"{format_bytes(_fitting(case, usable_bytes))} would fit",
            )


def _amount(case: Case) -> str:
    total = format_bytes(case.size_bytes * case.buffers)
    return total if case.buffers == 1 else f"{total} in {case.buffers} buffers"


def _fitting(case: Case, usable_bytes: int) -> int:
    """Give the largest size that fits, rounded down so that it can be read and typed."""
    most = usable_bytes // case.buffers
    unit = 1 << max(most.bit_length() - 8, 4)
    return most // unit * unit
