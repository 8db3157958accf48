"""The primary context of a device, shared with torch, CuPy and the CUDA runtime, and calls in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from cudakit.gpu.architectures import Capability
from cudakit.gpu.cuda.driver import Result, capability, check, cu, initialize
from cudakit.gpu.driver_errors import Status, cuda_error

_T = TypeVar("_T")

_CLOSED_ADDRESS = -1


class Context:
    """A device and its primary context, retained until ``close``."""

    def __init__(self, ordinal: int) -> None:
        initialize()
        self.ordinal = ordinal
        self.device = check(cu.cuDeviceGet(ordinal), lambda: _count_devices(ordinal))
        self.handle = check(cu.cuDevicePrimaryCtxRetain(self.device))
        self._address = int(self.handle)

    @property
    def capability(self) -> Capability:
        """The compute capability of the device."""
        return capability(self.device)

    @property
    def name(self) -> str:
        """The device name in messages, such as "cuda:0"."""
        return f"cuda:{self.ordinal}"

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._address == _CLOSED_ADDRESS

    def in_context(self, function: Callable[..., _T], *args: object) -> _T:
        """Call a function with this context current in this thread; restore the previous context."""
        status, current_context = cu.cuCtxGetCurrent()
        if not status and int(current_context) == self._address:
            return function(*args)
        self._push_context()
        try:
            return function(*args)
        finally:
            check(cu.cuCtxPopCurrent())

    def call(
        self,
        function: Callable[..., Result],
        *args: object,
        detail: Callable[[], str] | None = None,
    ) -> Any:
        """Call a driver function in this context, and return its results. Raises CudaError."""
        return check(self.in_context(function, *args), detail)

    def close(self) -> None:
        """Release the context; the last release in the process destroys it and its resources."""
        self._address = _CLOSED_ADDRESS
        # The status is ignored, because it repeats sticky errors of earlier work.
        cu.cuDevicePrimaryCtxRelease(self.device)

    def _push_context(self) -> None:
        if self.closed:
            raise cuda_error(Status.CONTEXT_IS_DESTROYED, detail=f"{self.name} was closed")
        check(cu.cuCtxPushCurrent(self.handle))


def _count_devices(ordinal: int) -> str:
    return f"cuda:{ordinal} requested, CUDA sees {check(cu.cuDeviceGetCount())}"
