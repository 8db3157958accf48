"""The CUDA driver bindings, and status checks of their calls.

Only ``initialize`` initializes CUDA. The bindings load libcuda at the first call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from cuda.bindings import driver as cu  # type: ignore[import-untyped]

from cudakit.errors import CudaError, GpuUnavailable
from cudakit.gpu.api.facts import Capability
from cudakit.gpu.driver_errors import Status, cuda_error

__all__ = ["call_if_available", "capability", "check", "cu", "initialize", "is_initialized"]

Result = tuple[Any, ...]


def initialize() -> None:
    """Initialize CUDA in this process; afterwards, forked children cannot use CUDA.

    Raises GpuUnavailable without a driver, CudaError if cuInit fails.
    """
    try:
        result = cu.cuInit(0)
    except RuntimeError as error:
        raise GpuUnavailable from error
    check(result)


def is_initialized() -> bool:
    """Return whether CUDA is initialized in this process, without initializing it."""
    try:
        (status, *_) = cu.cuCtxGetCurrent()
    except RuntimeError:
        return False
    return not status


def check(result: Result, detail: Callable[[], str] | None = None) -> Any:
    """Return the results of a call without the status: None, one value, or a tuple.

    Raises CudaError if the status is an error; ``detail`` returns text to append to the error message.
    """
    if result[0]:
        raise _driver_error(result[0], detail() if detail else "")
    return result[1] if len(result) == 2 else result[1:] or None


def call_if_available(name: str, *args: object) -> Result | None:
    """Call a function that older drivers lack; return status and results, or None if it is missing."""
    try:
        result: Result = getattr(cu, name)(*args)
    except (AttributeError, RuntimeError):
        return None
    return result


def capability(device: Any) -> Capability:
    """Return the compute capability of a CUdevice."""
    attributes = cu.CUdevice_attribute
    major = check(
        cu.cuDeviceGetAttribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    )
    minor = check(
        cu.cuDeviceGetAttribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
    )
    return Capability(major, minor)


def _driver_error(status: Any, detail: str) -> CudaError:
    name, text = (_text(get(status)) for get in (cu.cuGetErrorName, cu.cuGetErrorString))
    return cuda_error(int(status), detail=detail, name=name, text=text)


def _text(result: Result) -> str:
    return "" if result[0] or result[1] is None else str(result[1].decode())


# --- The primary context of a device, shared with torch, CuPy and the CUDA runtime, and calls in it ---

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
