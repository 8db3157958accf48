"""Memory shared with other processes: handles of this process's memory, and imported handles of theirs.

A handle is opened once, however many objects use it, and closed after the last of them. Source: PyTorch's
c10/cuda/CUDACachingAllocator.cpp (getIpcDevPtr, ExpandableSegment::fromShared).
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import cached_property, partial
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias, cast

from cudakit.core.allocator.shared_memory import Handle, SharedMemory
from cudakit.errors import CudaError, UsageError
from cudakit.gpu.api import (
    DeviceInfo,
    Exported,
    Fabric,
    Ipc,
    ProcessId,
    Ptr,
    Streams,
    VirtualMemory,
)

# The driver's answers if nothing is open any more: CUDA_ERROR_NOT_INITIALIZED, in a forked child, and
# CUDA_ERROR_CONTEXT_IS_DESTROYED (CUDA Driver API, CUresult).
_NOTHING_IS_OPEN = (3, 709)

# The remaining steps of closing a handle, in order.
_Steps: TypeAlias = "deque[Callable[[], None]]"


# Exports the pages of an expandable segment: address, bytes of a page, number of pages.
_ExportPages: TypeAlias = "Callable[[int, int, int], tuple[Exported, ...]]"


class ImportedHandle:
    """Memory of another process at an address of this one. It is closed when this object is collected."""

    __slots__ = ("__weakref__", "ptr")

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class IpcDevice(DeviceInfo, VirtualMemory, Ipc, Streams, Protocol):
    """A device whose memory is shared with other processes."""


class IpcRegistry:
    """The exported and the imported handles of one device. Any thread may use it, and finalizers."""

    def __init__(self, gpu: IpcDevice, export_pages: _ExportPages) -> None:
        self._gpu = gpu
        self._export_pages = export_pages
        self._captures: Callable[[], int] = lambda: 0
        self._lock = threading.Lock()
        self._imported = weakref.WeakValueDictionary[tuple[object, ...], ImportedHandle]()
        self._unused = deque[_Steps]()

    @property
    def process(self) -> ProcessId:
        """This process."""
        return self._gpu.process

    @cached_property
    def device(self) -> str:
        """The UUID of the device."""
        return str(self._gpu.facts().uuid)

    def rest_during(self, captures: Callable[[], int]) -> None:
        """Close nothing while there are captures: waiting for the device would invalidate them."""
        self._captures = captures

    def ipc_handle(self, ptr: Ptr) -> bytes:
        """Return the handle of a plain segment. Raises CudaError."""
        with self._gpu.relaxed():
            return self._gpu.ipc_handle(ptr)

    def export(self, ptr: int, page_bytes: int, count: int) -> tuple[Exported, ...]:
        """Return the handles of pages. Raises CudaError, or Unsupported if they have none."""
        with self._gpu.relaxed():
            return self._export_pages(ptr, page_bytes, count)

    def open(self, shared: SharedMemory) -> ImportedHandle:
        """Open memory, unless it is open already. Raises as ``open_shared`` of an allocator."""
        self._check(shared)
        self._sweep()
        key = (shared.process, shared.page_bytes, shared.handles)
        with self._lock:
            imported = self._imported.get(key)
            if imported is None:
                with self._gpu.relaxed():
                    ptr, steps = self._open(shared)
                imported = self._imported[key] = ImportedHandle(ptr)
                weakref.finalize(imported, self._leave, steps).atexit = False
        self._sweep()
        return imported

    def close_unused(self) -> None:
        """Close what nobody uses any more. On CudaError the next call tries again."""
        failure = self._sweep()
        if failure:
            raise failure

    def _sweep(self) -> CudaError | None:
        """Close what nobody uses any more, and return the last failure."""
        failure: CudaError | None = None
        for _ in range(len(self._unused)):
            if self._captures() or not self._lock.acquire(blocking=False):
                break  # a later call does it
            try:
                failure = self._close_one() or failure
            finally:
                self._lock.release()
        return failure

    def _close_one(self) -> CudaError | None:
        try:
            steps = self._unused.popleft()
        except IndexError:
            return None
        try:
            with self._gpu.relaxed():
                while steps:
                    steps[0]()
                    steps.popleft()
        except CudaError as error:
            if error.code in _NOTHING_IS_OPEN:
                return None
            self._unused.append(steps)
            return error
        return None

    def _leave(self, steps: _Steps) -> None:
        self._unused.append(steps)
        self._sweep()  # nobody would see a failure here; the next call tries again

    def _check(self, shared: SharedMemory) -> None:
        if shared.process == self.process:
            raise UsageError(
                "the memory was shared by this process itself, and CUDA opens that of others only",
                hint="use the address that was shared",
            )
        if not isinstance(shared.handles[0], Fabric) and shared.device != self.device:
            raise UsageError(
                f"the memory is of {shared.device}, and this allocator of {self.device}",
                hint="open it with an allocator of the same device, by whichever number that has here",
            )

    def _open(self, shared: SharedMemory) -> tuple[int, _Steps]:
        """Return the address, and the steps that close it.

        The first step waits for the device: cuIpcCloseMemHandle and cuMemUnmap are not documented to wait for
        work that uses the memory.
        """
        gpu, first = self._gpu, shared.handles[0]
        if isinstance(first, bytes):
            ptr = gpu.ipc_open(first)
            return ptr, deque([gpu.sync, partial(gpu.ipc_close, ptr)])
        size_bytes = shared.page_bytes * len(shared.handles)
        ptr = gpu.reserve(size_bytes)
        unreserve = partial(gpu.unreserve, ptr, size_bytes)
        try:
            self._map(ptr, shared.page_bytes, shared.handles)
        except BaseException:
            self._undo(unreserve)
            raise
        return ptr, deque([gpu.sync, partial(gpu.unmap, ptr, size_bytes), unreserve])

    def _map(self, ptr: Ptr, page_bytes: int, handles: tuple[Handle, ...]) -> None:
        mapped = 0
        try:
            for handle in handles:
                self._map_one(Ptr(ptr + mapped), page_bytes, handle)
                mapped += page_bytes
        except BaseException:
            if mapped:
                self._undo(partial(self._gpu.unmap, ptr, mapped))
            raise

    def _map_one(self, ptr: Ptr, page_bytes: int, handle: Handle) -> None:
        backing = self._gpu.import_backing(cast("Exported", handle))
        try:
            self._gpu.map(ptr, backing, page_bytes)
        finally:  # the memory lives as long as the mapping
            self._undo(partial(self._gpu.release, backing))

    def _undo(self, step: Callable[[], None]) -> None:
        """Perform a step now, or later if the driver refuses."""
        try:
            step()
        except CudaError:
            self._unused.append(deque([step]))


class OpenedMemory:
    """Memory of another process, until ``close``, the end of a with block, or the end of this object.

    ``open_shared`` of an allocator makes it; ``size_bytes`` is what was shared, from ``ptr`` on. Whoever
    takes it by ``__cuda_array_interface__``, as ``cupy.asarray`` does, has it as bytes, and keeps it.
    """

    def __init__(
        self, imported: ImportedHandle, shared: SharedMemory, registry: IpcRegistry, owner: object
    ) -> None:
        self.size_bytes = shared.size_bytes
        self._offset_bytes = shared.offset_bytes
        self._imported: ImportedHandle | None = imported
        self._registry = registry
        self._owner = owner  # keeps its device open

    @property
    def ptr(self) -> Ptr:
        """The address in this process. Raises UsageError after ``close``."""
        if self._imported is None:
            raise UsageError("this memory of another process was closed", hint="open it again")
        return Ptr(self._imported.ptr + self._offset_bytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.size_bytes,),
            "typestr": "|u1",
            "data": (self.ptr, False),
            "strides": None,
            "stream": None,  # unknown in this process
            "version": 3,
        }

    def close(self) -> None:
        """Be done with it: it is unmapped when all who have opened it here are. A second time does nothing.

        Waits for the device; while the allocator is in a capture that is left to a later call. Raises
        CudaError where the driver refuses, which is tried again later.
        """
        if self._imported is not None:
            self._imported = None
            self._registry.close_unused()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
