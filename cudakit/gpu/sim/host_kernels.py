"""Host kernels: Python functions that do to simulated memory what kernels do to a device's.

    @host_kernel("saxpy")
    def saxpy(launch: Launch, y: Ptr, x: Ptr, a: np.float32, n: np.int32) -> None:
        launch.update(y, np.float32, n)[:] += a * launch.read(x, np.float32, n)

A host kernel does at once what all threads of the launch do together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from cudakit.gpu.api import Dim3
from cudakit.gpu.driver_errors import Status, cuda_error
from cudakit.gpu.sim.schedule import Hold
from cudakit.gpu.sim.space import Bytes, Span
from cudakit.trace.events import Access
from cudakit.trace.kinds import Mode

HostKernel: TypeAlias = Callable[..., None]
_F = TypeVar("_F", bound=HostKernel)

# Filled by the decorator when a module with host kernels is imported.
_REGISTERED: dict[str, HostKernel] = {}


def host_kernel(name: str) -> Callable[[_F], _F]:
    """Run a function in place of the kernels of that name, on every simulated device.

    It is called with a Launch and the arguments of the kernel: pointers as addresses, numbers as scalars
    of numpy.
    """

    def register(function: _F) -> _F:
        _REGISTERED[name] = function
        return function

    return register


def registered() -> Mapping[str, HostKernel]:
    """Return every registered host kernel by the name of its kernel."""
    return MappingProxyType(_REGISTERED)


@dataclass(slots=True)
class Launch:
    """One launch while it runs: its shape, and its way to memory.

    Arrays are views of the device's memory from an address on, of ``count`` elements that are
    ``step_bytes`` apart, by default side by side. A range that is not allocated makes the launch fail as on
    a device.
    """

    name: str
    grid: Dim3
    block: Dim3
    shared_bytes: int
    span: Callable[[int, int, str], Span]
    begin_ns: int = 0  # of virtual time
    clock_khz: int = 1_000_000  # of the SMs
    busy_ns: int = 0
    held: Hold | None = None
    accesses: list[Access] = field(default_factory=list)
    _copies: list[tuple[Span, Bytes]] = field(default_factory=list)

    @property
    def threads(self) -> int:
        """How many threads there are in all blocks."""
        return prod(self.grid) * prod(self.block)

    def read(
        self, ptr: int, dtype: npt.DTypeLike, count: int = 1, *, step_bytes: int = 0
    ) -> npt.NDArray[Any]:
        """Return elements to be read only."""
        array = self._view(ptr, np.dtype(dtype), int(count), step_bytes, Mode.READ)
        array.flags.writeable = False
        return array

    def write(
        self, ptr: int, dtype: npt.DTypeLike, count: int = 1, *, step_bytes: int = 0
    ) -> npt.NDArray[Any]:
        """Return elements to be written, all of them, and not read."""
        return self._view(ptr, np.dtype(dtype), int(count), step_bytes, Mode.WRITE)

    def update(
        self, ptr: int, dtype: npt.DTypeLike, count: int = 1, *, step_bytes: int = 0
    ) -> npt.NDArray[Any]:
        """Return elements to be read and written."""
        return self._view(ptr, np.dtype(dtype), int(count), step_bytes, Mode.READ | Mode.WRITE)

    def atomic(
        self, ptr: int, dtype: npt.DTypeLike, count: int = 1, *, step_bytes: int = 0
    ) -> npt.NDArray[Any]:
        """Return elements to be read and written by atomic operations only."""
        mode = Mode.READ | Mode.WRITE | Mode.ATOMIC
        return self._view(ptr, np.dtype(dtype), int(count), step_bytes, mode)

    def busy(self, nanoseconds: int) -> None:
        """Say how long the kernel takes, beyond what its accesses do."""
        self.busy_ns += int(nanoseconds)

    def hold(self, is_over: Callable[[], bool], limit_ns: int, give_up: Callable[[], None]) -> None:
        """Say that the kernel goes on until the host has done something: a kernel that polls memory.

        Where that has not come within a time, ``give_up`` is called, and the kernel ends.
        """
        self.held = Hold(is_over, limit_ns, give_up)

    @property
    def begin_cycles(self) -> int:
        """What the cycle counters of the SMs said at the beginning."""
        return self.begin_ns * self.clock_khz // 1_000_000

    def finish(self) -> None:
        """Put back what was not written to memory itself."""
        for span, copy in self._copies:
            span.scatter(copy)

    def _view(
        self, ptr: int, dtype: np.dtype[Any], count: int, step_bytes: int, mode: Mode
    ) -> npt.NDArray[Any]:
        if count <= 0:
            return np.empty(0, dtype)
        step = step_bytes or dtype.itemsize
        if ptr % dtype.alignment or step % dtype.alignment:
            seen = f"{self.name} uses {ptr:#x} as {dtype}, step {step}"
            raise cuda_error(Status.MISALIGNED_ADDRESS, seen=seen)
        size_bytes = step * (count - 1) + dtype.itemsize
        content = self._content(ptr, size_bytes, mode)
        strided = step != dtype.itemsize
        self.accesses.append(
            Access(
                ptr,
                ptr + size_bytes,
                mode,
                stride_bytes=step if strided else 0,
                count=count if strided else 0,
            )
        )
        return np.ndarray((count,), dtype, content, strides=(step,))

    def _content(self, ptr: int, size_bytes: int, mode: Mode) -> Bytes:
        found = self.span(ptr, size_bytes, self.name)
        content = found.gather()
        if len(found.pieces) > 1 and mode != Mode.READ:
            self._copies.append((found, content))
        return content
