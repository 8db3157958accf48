"""Host kernels: Python functions that replace kernels on a simulated device.

    @host_kernel("saxpy")
    def saxpy(launch: Launch, y: Ptr, x: Ptr, a: np.float32, n: np.int32) -> None:
        launch.update(y, np.float32, n)[:] += a * launch.read(x, np.float32, n)

One call of a host kernel performs the work of all threads of a launch. Real devices ignore host kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy.typing as npt

HostKernel: TypeAlias = Callable[..., None]
_F = TypeVar("_F", bound=HostKernel)

# The decorator adds the kernels when a module with host kernels is imported.
_REGISTERED_KERNELS: dict[str, HostKernel] = {}


def host_kernel(name: str) -> Callable[[_F], _F]:
    """Return a decorator that makes simulated devices call a function in place of the kernels with a name.

    The function is called with a Launch and the kernel's arguments: pointers as addresses, numbers as numpy
    scalars.
    """

    def register(function: _F) -> _F:
        _REGISTERED_KERNELS[name] = function
        return function

    return register


def registered_kernels() -> Mapping[str, HostKernel]:
    """Return every registered host kernel by the name of its kernel."""
    return MappingProxyType(_REGISTERED_KERNELS)


class Launch(Protocol):
    """A running launch: its shape, and its access to simulated memory.

    Arrays are views of device memory that start at an address: ``count`` elements, ``step_bytes`` apart or
    by default adjacent. Access to unallocated memory fails the launch, as on a device.
    """

    @property
    def threads(self) -> int:
        """The number of threads of all blocks."""

    @property
    def begin_ns(self) -> int:
        """The virtual time at which the kernel began."""

    @property
    def begin_cycles(self) -> int:
        """The cycle counters of the SMs when the kernel began."""

    def read(
        self, ptr: int, dtype: npt.DTypeLike, count: int = 1, *, step_bytes: int = 0
    ) -> npt.NDArray[Any]:
        """Return a read-only view of elements that the kernel reads."""

    def write(
        self, ptr: int, dtype: npt.DTypeLike, count: int = 1, *, step_bytes: int = 0
    ) -> npt.NDArray[Any]:
        """Return a view of elements that the kernel overwrites completely, without reading."""

    def update(
        self, ptr: int, dtype: npt.DTypeLike, count: int = 1, *, step_bytes: int = 0
    ) -> npt.NDArray[Any]:
        """Return a view of elements that the kernel reads and writes."""

    def atomic(
        self, ptr: int, dtype: npt.DTypeLike, count: int = 1, *, step_bytes: int = 0
    ) -> npt.NDArray[Any]:
        """Return a view of elements that the kernel accesses by atomic operations only."""

    def busy(self, nanoseconds: int) -> None:
        """Add to the duration of the kernel, which otherwise is that of its memory accesses."""

    def poll(
        self, is_done: Callable[[], bool], timeout_ns: int, on_timeout: Callable[[], None]
    ) -> None:
        """Keep the kernel running until ``is_done()`` is true, as a kernel that polls memory does.

        After ``timeout_ns`` of virtual time, ``on_timeout`` is called and the kernel ends.
        """
