"""Other processes on the same device: what they may open of its memory, and what is open of theirs.

Each handle is opened once, however many use it, and closed when the last of them is gone. Source: PyTorch's
c10/cuda/CUDACachingAllocator.cpp (getIpcDevPtr, ExpandableSegment::fromShared).
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import cached_property, partial
from typing import TypeAlias, cast

from cudakit.core.allocator.pages import PagesOfGpu
from cudakit.core.allocator.shared import Handle, SharedMemory
from cudakit.errors import CudaError, UsageError
from cudakit.gpu.api import Exported, Fabric, Gpu, ProcessId, Ptr

# What is said where nothing is open any more: CUDA_ERROR_NOT_INITIALIZED, in a child that was forked, and
# CUDA_ERROR_CONTEXT_IS_DESTROYED (CUDA Driver API, CUresult).
_NOTHING_IS_OPEN = (3, 709)

# What is left to be done to close something, in this order.
_Steps: TypeAlias = "deque[Callable[[], None]]"


class Opening:
    """Memory of another process, at an address of this one, until nobody has this object any more."""

    __slots__ = ("__weakref__", "ptr")

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class Neighbours:
    """The other processes, as one Gpu knows them. May be used from any thread, and from finalizers."""

    def __init__(self, gpu: Gpu, pages: PagesOfGpu) -> None:
        self._gpu = gpu
        self._pages = pages
        self._captures: Callable[[], int] = lambda: 0
        self._lock = threading.Lock()
        self._openings = weakref.WeakValueDictionary[tuple[object, ...], Opening]()
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
        """Close nothing while there are captures: to wait for the device would break them."""
        self._captures = captures

    def ipc_handle(self, ptr: Ptr) -> bytes:
        """Return the handle of a plain segment. Raises CudaError."""
        with self._gpu.relaxed():
            return self._gpu.ipc_handle(ptr)

    def export(self, ptr: int, page_bytes: int, count: int) -> tuple[Exported, ...]:
        """Return the handles of pages. Raises CudaError, or Unsupported where they have none."""
        with self._gpu.relaxed():
            return self._pages.export(ptr, page_bytes, count)

    def open(self, shared: SharedMemory) -> Opening:
        """Open memory, unless it is open. Raises as open_shared of an allocator; then it is not open."""
        self._check(shared)
        self._sweep()
        key = (shared.process, shared.page_bytes, shared.handles)
        with self._lock:
            opening = self._openings.get(key)
            if opening is None:
                with self._gpu.relaxed():
                    ptr, steps = self._open(shared)
                opening = self._openings[key] = Opening(ptr)
                weakref.finalize(opening, self._leave, steps).atexit = False
        self._sweep()
        return opening

    def close_unused(self) -> None:
        """Close what nobody has any more. Raises CudaError, and tries again at the next call."""
        failure = self._sweep()
        if failure:
            raise failure

    def _sweep(self) -> CudaError | None:
        """Close what nobody has any more, and return what was refused."""
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
        self._sweep()  # what is refused nobody would see here; the next call tries again

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
        """Return where it is, and what is to be done to close it.

        That begins with a wait: neither cuIpcCloseMemHandle nor cuMemUnmap is said to wait for work that uses
        the memory.
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
        finally:  # it lives as long as the mapping
            self._undo(partial(self._gpu.release, backing))

    def _undo(self, step: Callable[[], None]) -> None:
        """Do something now, or, where the driver refuses, later."""
        try:
            step()
        except CudaError:
            self._unused.append(deque([step]))
