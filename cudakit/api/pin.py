"""``cudakit.pin``: pin host memory that exists, for copies that do not block the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import finalize

import numpy as np

from cudakit.arrays.kernels import open_device
from cudakit.errors import CudaError, UsageError

if TYPE_CHECKING:
    import numpy.typing as npt

    from cudakit.gpu.api import Gpu, Ptr

_COPY_HINT = "pass a contiguous numpy array, a bytearray, an mmap or a CPU tensor"


class PinnedMemory:
    """Pinned host memory, which ``cudakit.pin`` returns.

    ``close``, leaving a ``with`` block, or garbage collection unpins the memory.
    """

    def __init__(
        self, gpu: Gpu, memory: npt.NDArray[np.uint8], array: object, *, read_only: bool
    ) -> None:
        self.array = array  # The object whose memory is pinned.
        self.size_bytes = memory.nbytes
        # Address for copies; on a real device, the address of the array.
        self.ptr = gpu.pin(memory, read_only=read_only)
        # The finalizer keeps the memory allocated until it is unpinned.
        self._finalizer = finalize(self, _unpin, gpu, self.ptr, memory)
        # At the end of the process the driver unpins all memory.
        self._finalizer.atexit = False

    @property
    def is_pinned(self) -> bool:
        """Whether the memory is still pinned."""
        return self._finalizer.alive

    def close(self) -> None:
        """Wait for the work of the device, and unpin the memory. A second call has no effect."""
        self._finalizer()

    def __enter__(self) -> PinnedMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pin(
    array: object, *, read_only: bool = False, device: int | str | Gpu | None = None
) -> PinnedMemory:
    """Pin the memory of a host array in place, so that copies to and from the GPU do not block the host.

    ``array`` is a contiguous numpy array, any other object with the buffer protocol (``bytearray``,
    ``mmap.mmap``), or a CPU tensor with DLPack. ``read_only=True`` pins memory that the GPU must only read,
    and is required for arrays that are not writable. ``device`` is a CUDA index (the current device by
    default), "sim" or "sim:MODEL", or an opened device of cudakit; all devices of the process can use the
    memory.

    Keep the returned object: the memory is pinned while it exists. Its attributes are ``array``, ``ptr``,
    ``size_bytes`` and ``is_pinned``. Pinning is slow and keeps the pages in RAM: pin buffers that are copied
    often.

    Raises UsageError if the memory cannot be pinned in place or is already pinned, CudaError if the
    operating system refuses, such as for a lack of memory.

    >>> import numpy as np
    >>> batch = np.zeros((64, 1024), np.float32)
    >>> with cudakit.pin(batch, device="sim") as pinned:
    ...     print(pinned.size_bytes)
    262144
    """
    memory, is_read_only = _bytes_of(array)
    if not memory.nbytes:
        raise UsageError("the array has no elements to pin")
    if is_read_only and not read_only:
        raise UsageError("the array is read-only", hint="pass read_only=True")
    try:
        return PinnedMemory(open_device(device), memory, array, read_only=read_only)
    except CudaError as error:
        if error.name == "CUDA_ERROR_INVALID_VALUE":
            error.hint = "memory that its library allocated as pinned cannot be pinned again"
        if error.name != "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED":
            raise
        raise UsageError(
            f"the array, or a part of it, is already pinned: {memory.nbytes} bytes",
            hint="pin it once, and keep the returned object",
        ) from None


def _bytes_of(array: Any) -> tuple[npt.NDArray[np.uint8], bool]:
    """Return the memory of an array as bytes, without a copy, and whether it is read-only.

    Raises UsageError if the array is not contiguous.
    """
    try:
        values = np.asarray(memoryview(array))
        is_read_only = not values.flags.writeable
    except TypeError:
        # Capsules of DLPack before version 1.0 have no flag for read-only memory.
        values, is_read_only = _from_dlpack(array), False
    if not values.flags.c_contiguous:
        raise UsageError("the array is not contiguous", hint=_COPY_HINT)
    return values.reshape(-1).view(np.uint8), is_read_only


def _from_dlpack(array: Any) -> npt.NDArray[Any]:
    try:
        return np.from_dlpack(array)
    except (AttributeError, TypeError, ValueError, RuntimeError, BufferError):
        raise UsageError(
            f"{type(array).__module__}.{type(array).__qualname__} has no host memory that can be pinned",
            hint=_COPY_HINT,
        ) from None


def _unpin(gpu: Gpu, ptr: Ptr, memory: npt.NDArray[np.uint8]) -> None:  # noqa: ARG001
    """Unpin memory, unless the device was closed, which unpins all memory itself."""
    if not getattr(gpu, "closed", False):
        gpu.unpin(ptr)
