"""The device and the stream that are current in a thread.

The device is the driver's own: the primary context that is current in the calling thread, so torch, CuPy
and the CUDA runtime see the same one. As in the runtime, a context that was made stays until the process
ends. The driver has no current stream, so that one is kept here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from cudakit.errors import UsageError
from cudakit.gpu.api import LEGACY, PER_THREAD, MemoryInfo
from cudakit.gpu.architectures import Capability
from cudakit.gpu.cuda import driver
from cudakit.gpu.cuda.driver import check, cu, initialize
from cudakit.gpu.probe import start_probe

_STREAM: ContextVar[int] = ContextVar("cudakit_stream", default=LEGACY)
_STREAM_HINT = "pass a stream of torch, CuPy, Numba or cuda.core, or a driver handle (int)"


def is_available() -> bool:
    """Say whether CUDA shows at least one device here; asks as ``device_count`` does, and never raises.

    >>> import cudakit
    >>> cudakit.is_available()  # doctest: +SKIP
    True
    """
    return device_count() > 0


def device_count() -> int:
    """Count the devices that CUDA_VISIBLE_DEVICES leaves; 0 without a driver.

    Makes no context. Where CUDA is not initialized in this process, the driver is asked in a child
    process, so that this one can still fork.

    >>> import cudakit
    >>> cudakit.device_count() >= 1  # doctest: +SKIP
    True
    """
    if driver.is_initialized():
        return int(check(cu.cuDeviceGetCount()))
    view = start_probe().answer()
    return len(getattr(view, "devices", ()))


def is_initialized() -> bool:
    """Say whether CUDA is initialized in this process, by anyone; initializes nothing.

    >>> import cudakit
    >>> cudakit.synchronize()  # doctest: +SKIP
    >>> cudakit.is_initialized()  # doctest: +SKIP
    True
    """
    return driver.is_initialized()


def set_device(device: int) -> None:
    """Make a device the current one of this thread. Raises CudaError where there is no such device.

    >>> import cudakit
    >>> cudakit.set_device(0)  # doctest: +SKIP
    """
    check(cu.cuCtxSetCurrent(_context(device)))


def current_device() -> int:
    """Return the number of the device that is current in this thread: 0 until one is set.

    >>> import cudakit
    >>> cudakit.current_device()  # doctest: +SKIP
    0
    """
    if not driver.is_initialized() or not int(check(cu.cuCtxGetCurrent())):
        return 0
    return int(check(cu.cuCtxGetDevice()))


def device(device: int) -> AbstractContextManager[int]:
    """Make a device the current one of this thread within a ``with`` block.

    >>> import cudakit
    >>> with cudakit.device(0):  # doctest: +SKIP
    ...     cudakit.synchronize()
    """
    return _device_entered(device)


def stream(stream: object) -> AbstractContextManager[int]:
    """Make a stream, and its device, the current ones of this thread within a ``with`` block.

    What cudakit itself enqueues there goes to that stream; the current streams of other libraries stay
    what they are. ``stream`` is one of torch, CuPy, Numba or cuda.core, or the driver's handle of one,
    which must be alive: the driver cannot tell. Raises UsageError for anything else.

    >>> import cudakit
    >>> with cudakit.stream(2):  # CU_STREAM_PER_THREAD
    ...     cudakit.current_stream()
    2
    """
    return _stream_entered(stream)


def current_stream() -> int:
    """Return the driver's handle of the stream that is current in this thread for cudakit.

    >>> import cudakit
    >>> cudakit.current_stream()  # CU_STREAM_LEGACY
    1
    """
    return _STREAM.get()


def device_name(device: int | None = None) -> str:
    """Return the name of a device, or of the current one. Raises CudaError where there is none.

    >>> import cudakit
    >>> cudakit.device_name().startswith("NVIDIA")  # doctest: +SKIP
    True
    """
    name: bytes = check(cu.cuDeviceGetName(256, _device(device)))
    return name.partition(b"\0")[0].decode()


def capability(device: int | None = None) -> Capability:
    """Return the compute capability of a device, or of the current one, with its architecture's name.

    >>> import cudakit
    >>> cudakit.capability() >= (7, 5)  # doctest: +SKIP
    True
    >>> cudakit.capability().architecture != "Volta"  # doctest: +SKIP
    True
    """
    return driver.capability(_device(device))


def synchronize(device: int | None = None) -> None:
    """Wait until a device, or the current one, has done all its work. Raises CudaError for what failed.

    >>> import cudakit
    >>> cudakit.synchronize()  # doctest: +SKIP
    """
    with _entered(_context(device)):
        check(cu.cuCtxSynchronize())


def mem_get_info(device: int | None = None) -> MemoryInfo:
    """Return the bytes of a device that are free, and all that it has; makes its context if need be.

    >>> import cudakit
    >>> info = cudakit.mem_get_info()  # doctest: +SKIP
    >>> 0 < info.free_bytes < info.total_bytes  # doctest: +SKIP
    True
    """
    with _entered(_context(device)):
        free_bytes, total_bytes = check(cu.cuMemGetInfo())
    return MemoryInfo(free_bytes=free_bytes, total_bytes=total_bytes)


def can_access_peer(device: int, peer: int) -> bool:
    """Say whether kernels on a device can use the memory of another; of itself, never.

    >>> import cudakit
    >>> cudakit.can_access_peer(0, 0)  # doctest: +SKIP
    False
    """
    return bool(check(cu.cuDeviceCanAccessPeer(_device(device), _device(peer))))


def profiler_start() -> None:
    """Start the collection of an attached profiler (cuProfilerStart)."""
    with _entered(_context(None)):
        check(cu.cuProfilerStart())


def profiler_stop() -> None:
    """Stop the collection of an attached profiler (cuProfilerStop)."""
    with _entered(_context(None)):
        check(cu.cuProfilerStop())


@contextmanager
def _device_entered(device: int) -> Iterator[int]:
    with _entered(_context(device)):
        yield device


@contextmanager
def _stream_entered(stream: object) -> Iterator[int]:
    handle = _stream_handle(stream)
    with _in_context_of(handle):
        token = _STREAM.set(handle)
        try:
            yield handle
        finally:
            _STREAM.reset(token)


def _device(device: int | None) -> Any:
    initialize()
    wanted = current_device() if device is None else device
    return check(cu.cuDeviceGet(wanted), lambda: f"cuda:{wanted} of {device_count()}")


def _context(device: int | None) -> Any:
    """Return the primary context of a device; for None, the current context if there is one."""
    if device is None and driver.is_initialized():
        current = check(cu.cuCtxGetCurrent())
        if int(current):
            return current
    # Never released, as in the runtime: what users created in it must stay valid.
    return check(cu.cuDevicePrimaryCtxRetain(_device(device)))


@contextmanager
def _entered(context: Any) -> Iterator[None]:
    check(cu.cuCtxPushCurrent(context))
    try:
        yield
    finally:
        check(cu.cuCtxPopCurrent())


def _stream_handle(stream: object) -> int:
    """Return the driver's handle of a stream of any library, or of one given as a number."""
    if hasattr(stream, "__cuda_stream__"):  # the protocol of cuda.core: version and handle
        _, stream = stream.__cuda_stream__()
    for attribute in ("cuda_stream", "ptr"):  # torch, CuPy
        stream = getattr(stream, attribute, stream)
    try:
        return int(stream) or LEGACY  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise UsageError(f"not a CUDA stream: {stream!r}", hint=_STREAM_HINT) from None


@contextmanager
def _in_context_of(handle: int) -> Iterator[None]:
    """Make a stream's device current; the default streams belong to the current device."""
    if handle in (LEGACY, PER_THREAD):
        yield
        return
    initialize()
    with _entered(check(cu.cuStreamGetCtx(handle))):
        yield
