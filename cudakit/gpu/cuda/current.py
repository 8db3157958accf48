"""The device and the stream that are current in a thread.

The device is the driver's own: the primary context that is current in the calling thread, so torch, CuPy
and the CUDA runtime see the same one. As in the runtime, a context that was made stays until the process
ends. The driver has no current stream, so that one is kept here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from cudakit.errors import UsageError
from cudakit.gpu.api import LEGACY, PER_THREAD, MemoryInfo
from cudakit.gpu.architectures import Capability
from cudakit.gpu.cuda import driver
from cudakit.gpu.cuda.driver import check, cu, initialize, is_initialized
from cudakit.gpu.probe import start_probe

_STREAM: ContextVar[int] = ContextVar("cudakit_stream", default=LEGACY)
_STREAM_HINT = "give a stream of torch, CuPy, Numba or cuda.core, or its handle as a number"


def device_count() -> int:
    """Return the number of visible devices; if CUDA is not initialized, ask in a child process."""
    if is_initialized():
        return int(check(cu.cuDeviceGetCount()))
    view = start_probe().answer()
    return len(getattr(view, "devices", ()))


def set_device(ordinal: int) -> None:
    """Make a device's primary context the current one of this thread."""
    check(cu.cuCtxSetCurrent(_context(ordinal)))


def current_device() -> int:
    """Return the device of this thread's context; without a context, 0, which calls would use."""
    if not is_initialized() or not int(check(cu.cuCtxGetCurrent())):
        return 0
    return int(check(cu.cuCtxGetDevice()))


@contextmanager
def device(ordinal: int) -> Iterator[int]:
    """Make a device current within a block."""
    with _entered(_context(ordinal)):
        yield ordinal


@contextmanager
def stream(stream: object) -> Iterator[int]:
    """Make a stream and its device current within a block."""
    handle = _stream_handle(stream)
    with _in_context_of(handle):
        token = _STREAM.set(handle)
        try:
            yield handle
        finally:
            _STREAM.reset(token)


def current_stream() -> int:
    """Return the driver's handle of the stream that is current in this thread."""
    return _STREAM.get()


def device_name(ordinal: int | None) -> str:
    """Return the driver's name of a device; None is the current device, here and below."""
    name: bytes = check(cu.cuDeviceGetName(256, _device(ordinal)))
    return name.partition(b"\0")[0].decode()


def capability(ordinal: int | None) -> Capability:
    """Return the compute capability of a device."""
    return driver.capability(_device(ordinal))


def synchronize(ordinal: int | None) -> None:
    """Wait for all the work of a device's context."""
    with _entered(_context(ordinal)):
        check(cu.cuCtxSynchronize())


def memory_info(ordinal: int | None) -> MemoryInfo:
    """Return the free and the total memory of a device."""
    with _entered(_context(ordinal)):
        free_bytes, total_bytes = check(cu.cuMemGetInfo())
    return MemoryInfo(free_bytes=free_bytes, total_bytes=total_bytes)


def can_access_peer(ordinal: int, peer: int) -> bool:
    """Return whether kernels on a device can use the memory of another."""
    return bool(check(cu.cuDeviceCanAccessPeer(_device(ordinal), _device(peer))))


def profiler_start() -> None:
    """Start the collection of an attached profiler (cuProfilerStart)."""
    with _entered(_context(None)):
        check(cu.cuProfilerStart())


def profiler_stop() -> None:
    """Stop the collection of an attached profiler (cuProfilerStop)."""
    with _entered(_context(None)):
        check(cu.cuProfilerStop())


def _device(ordinal: int | None) -> Any:
    initialize()
    wanted = current_device() if ordinal is None else ordinal
    return check(cu.cuDeviceGet(wanted), lambda: f"cuda:{wanted} of {device_count()}")


def _context(ordinal: int | None) -> Any:
    """Return the primary context of a device; for None, the current context if there is one."""
    if ordinal is None and is_initialized():
        current = check(cu.cuCtxGetCurrent())
        if int(current):
            return current
    # Never released, as in the runtime: what users created in it must stay valid.
    return check(cu.cuDevicePrimaryCtxRetain(_device(ordinal)))


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
