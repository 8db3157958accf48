"""The current device and stream of a thread.

The current device is the driver's: the primary context current in the calling thread, which torch, CuPy and
the CUDA runtime share. As in the runtime, a context is never destroyed before the process ends. The driver
has no current stream; cudakit keeps its own in a context variable.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from cudakit.errors import UsageError
from cudakit.gpu.api import LEGACY, PER_THREAD, MemoryInfo
from cudakit.gpu.api.facts import Capability
from cudakit.gpu.cuda import driver
from cudakit.gpu.cuda.driver import check, cu, initialize
from cudakit.gpu.probe import start_probe

# Handle of cudakit's current stream.
CURRENT_STREAM: ContextVar[int] = ContextVar("cudakit_stream", default=LEGACY)
_STREAM_HINT = "pass a stream of torch, CuPy, Numba or cuda.core, or a driver handle (int)"


def is_available() -> bool:
    """Return whether at least one CUDA device is visible. Does not raise.

    >>> import cudakit
    >>> cudakit.is_available()  # doctest: +SKIP
    True
    """
    return device_count() > 0


def device_count() -> int:
    """Return the number of visible CUDA devices; 0 without a driver.

    CUDA_VISIBLE_DEVICES applies. Creates no context. If CUDA is not initialized in this process, a child
    process queries the driver, so that this process can still fork.

    >>> import cudakit
    >>> cudakit.device_count() >= 1  # doctest: +SKIP
    True
    """
    if driver.is_initialized():
        return int(check(cu.cuDeviceGetCount()))
    cuda_view = start_probe().answer()
    return len(getattr(cuda_view, "devices", ()))


def is_initialized() -> bool:
    """Return whether any library has initialized CUDA in this process; does not initialize it.

    >>> import cudakit
    >>> cudakit.synchronize()  # doctest: +SKIP
    >>> cudakit.is_initialized()  # doctest: +SKIP
    True
    """
    return driver.is_initialized()


def set_device(device: int) -> None:
    """Set the current device of this thread. Raises CudaError if there is no such device.

    >>> import cudakit
    >>> cudakit.set_device(0)  # doctest: +SKIP
    """
    check(cu.cuCtxSetCurrent(_context_of(device)))


def current_device() -> int:
    """Return the index of the current device of this thread, 0 by default.

    >>> import cudakit
    >>> cudakit.current_device()  # doctest: +SKIP
    0
    """
    if not driver.is_initialized() or not int(check(cu.cuCtxGetCurrent())):
        return 0
    return int(check(cu.cuCtxGetDevice()))


def device(device: int) -> AbstractContextManager[int]:
    """Set the current device of this thread within a ``with`` block.

    >>> import cudakit
    >>> with cudakit.device(0):  # doctest: +SKIP
    ...     cudakit.synchronize()
    """
    return _use_device(device)


def stream(stream: object) -> AbstractContextManager[int]:
    """Set cudakit's current stream of this thread, and its device, within a ``with`` block.

    The current streams of other libraries do not change. ``stream`` is a stream of torch, CuPy, Numba or
    cuda.core, or a driver handle (int) of an existing stream; the driver cannot detect a destroyed one.
    Raises UsageError for anything else.

    >>> import cudakit
    >>> with cudakit.stream(2):  # CU_STREAM_PER_THREAD
    ...     cudakit.current_stream()
    2
    """
    return _use_stream(stream)


def current_stream() -> int:
    """Return the driver handle of cudakit's current stream of this thread.

    >>> import cudakit
    >>> cudakit.current_stream()  # CU_STREAM_LEGACY
    1
    """
    return CURRENT_STREAM.get()


def device_name(device: int | None = None) -> str:
    """Return the name of a device, by default the current one. Raises CudaError if there is none.

    >>> import cudakit
    >>> cudakit.device_name().startswith("NVIDIA")  # doctest: +SKIP
    True
    """
    name: bytes = check(cu.cuDeviceGetName(256, _device_handle(device)))
    return name.partition(b"\0")[0].decode()


def capability(device: int | None = None) -> Capability:
    """Return the compute capability of a device, by default the current one, with its architecture.

    >>> import cudakit
    >>> cudakit.capability() >= (7, 5)  # doctest: +SKIP
    True
    >>> cudakit.capability().architecture != "Volta"  # doctest: +SKIP
    True
    """
    return driver.capability(_device_handle(device))


def synchronize(device: int | None = None) -> None:
    """Wait for all work of a device, by default the current one. Raises CudaError if work failed.

    >>> import cudakit
    >>> cudakit.synchronize()  # doctest: +SKIP
    """
    with _use_context(_context_of(device)):
        check(cu.cuCtxSynchronize())


def mem_get_info(device: int | None = None) -> MemoryInfo:
    """Return free and total memory of a device in bytes; creates its context if necessary.

    >>> import cudakit
    >>> info = cudakit.mem_get_info()  # doctest: +SKIP
    >>> 0 < info.free_bytes < info.total_bytes  # doctest: +SKIP
    True
    """
    with _use_context(_context_of(device)):
        free_bytes, total_bytes = check(cu.cuMemGetInfo())
    return MemoryInfo(free_bytes=free_bytes, total_bytes=total_bytes)


def can_access_peer(device: int, peer: int) -> bool:
    """Return whether kernels on ``device`` can access memory of ``peer``; False for the same device.

    >>> import cudakit
    >>> cudakit.can_access_peer(0, 0)  # doctest: +SKIP
    False
    """
    return bool(check(cu.cuDeviceCanAccessPeer(_device_handle(device), _device_handle(peer))))


def profiler_start() -> None:
    """Start data collection of an attached profiler (cuProfilerStart)."""
    with _use_context(_context_of(None)):
        check(cu.cuProfilerStart())


def profiler_stop() -> None:
    """Stop data collection of an attached profiler (cuProfilerStop)."""
    with _use_context(_context_of(None)):
        check(cu.cuProfilerStop())


@contextmanager
def _use_device(device: int) -> Iterator[int]:
    with _use_context(_context_of(device)):
        yield device


@contextmanager
def _use_stream(stream: object) -> Iterator[int]:
    handle = stream_handle(stream)
    with _use_context_of_stream(handle):
        token = CURRENT_STREAM.set(handle)
        try:
            yield handle
        finally:
            CURRENT_STREAM.reset(token)


def _device_handle(device: int | None) -> Any:
    initialize()
    index = current_device() if device is None else device
    return check(cu.cuDeviceGet(index), lambda: f"cuda:{index} of {device_count()}")


def _context_of(device: int | None) -> Any:
    """Return the primary context of a device; None is the current context, if there is one."""
    if device is None and driver.is_initialized():
        current_context = check(cu.cuCtxGetCurrent())
        if int(current_context):
            return current_context
    # The context is never released, as in the CUDA runtime, because its resources must stay valid.
    return check(cu.cuDevicePrimaryCtxRetain(_device_handle(device)))


@contextmanager
def _use_context(context: Any) -> Iterator[None]:
    check(cu.cuCtxPushCurrent(context))
    try:
        yield
    finally:
        check(cu.cuCtxPopCurrent())


def stream_handle(stream: object) -> int:
    """Return the driver handle of a stream object of any library, or of an int."""
    if hasattr(stream, "__cuda_stream__"):  # stream protocol of cuda.core: version and handle
        _, stream = stream.__cuda_stream__()
    for attribute in ("cuda_stream", "ptr"):  # torch, CuPy
        stream = getattr(stream, attribute, stream)
    try:
        return int(stream) or LEGACY  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise UsageError(f"not a CUDA stream: {stream!r}", hint=_STREAM_HINT) from None


@contextmanager
def _use_context_of_stream(handle: int) -> Iterator[None]:
    """Make the context of a stream current; default streams belong to the current context."""
    if handle in (LEGACY, PER_THREAD):
        yield
        return
    initialize()
    with _use_context(check(cu.cuStreamGetCtx(handle))):
        yield
