"""A case of a bench: a workload, how it is measured, and what the device must have for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from cudakit.core.bench.limits import Work
from cudakit.core.bench.method import Method
from cudakit.core.bench.workload import Workload
from cudakit.errors import InputError
from cudakit.units import Unavailable, format_bytes

_LATENCY = Unavailable("it is a latency, which no datasheet bounds")
_NOT_ASKED = Unavailable("nobody was there to ask")
# What is left over is for the kernels and for the buffers that the instrument itself needs.
_SHARE_OF_FREE = 0.95


class Rival(Workload, Protocol):
    """The same work, done by somebody else."""

    @property
    def library(self) -> str:
        """Who does it."""
        ...


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured as one line of a result, and one more for each rival, who takes turns with it."""

    workload: Workload
    method: Method
    work: Work | Unavailable = _LATENCY  # of one execution, which bounds its time
    size_bytes: int = 0  # of each of its buffers on the device
    buffers: int = 0  # of that size, in one buffer set
    host_bytes: int = 0  # of the host, in buffers of that size
    more_bytes: int = 0  # on the device, in buffers of other sizes: of all that take turns
    fitting: Callable[[int], str] | None = None  # what would fit into so many bytes, in words
    rivals: tuple[Rival, ...] = ()
    operation: str = "FLOP"  # what it does, where that is arithmetic
    # What is recorded with the result besides the axes.
    settings: Mapping[str, str | int | float] = field(default_factory=dict)

    @property
    def needed_bytes(self) -> int:
        """Memory of the device that must be there for one buffer set of each who takes turns."""
        return self.size_bytes * self.buffers + self.more_bytes

    @property
    def title(self) -> str:
        """Its name and axes."""
        axes = (f"{name}={value}" for name, value in self.workload.axes.items())
        return " ".join((self.workload.name, *axes))


def check_fit(
    cases: Sequence[Case], free_bytes: int, host_free_bytes: int | Unavailable = _NOT_ASKED
) -> None:
    """Refuse what does not fit in the free memory of a device or its host, before anything is allocated.

    Raises InputError, which says what would fit.
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
    """Give the largest size that fits."""
    return _rounded(usable_bytes // max(case.buffers, 1))


def _rounded(most: int) -> str:
    """Round down, so that it can be read and typed."""
    unit = 1 << max(most.bit_length() - 8, 4)
    return format_bytes(most // unit * unit)
