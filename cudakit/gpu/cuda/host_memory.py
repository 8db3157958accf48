"""Memory of the host: pinned, which the device reaches, and pageable, which is any other."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

from cudakit.errors import CudaError
from cudakit.gpu.api import Ptr
from cudakit.gpu.cuda.driver import cu
from cudakit.gpu.cuda.sizes import check_size, forget
from cudakit.gpu.cuda.streams import Streams
from cudakit.gpu.explain import Status, cuda_error
from cudakit.units import format_bytes


class HostMemory(Streams):
    """What was allocated of the host's memory for one device."""

    def __init__(self, ordinal: int) -> None:
        super().__init__(ordinal)
        self._pinned: dict[Ptr, int] = {}
        self._pageable: dict[Ptr, ctypes.Array[Any]] = {}

    def host_malloc(self, size_bytes: int, *, pinned: bool = True) -> Ptr:
        check_size(size_bytes)
        return self._malloc_pinned(size_bytes) if pinned else self._malloc_pageable(size_bytes)

    def host_free(self, ptr: Ptr) -> None:
        if ptr in self._pageable:
            # Pinned memory is waited for by the driver; of this it does not hear.
            self.sync()
            del self._pageable[ptr]
            return
        size_bytes = forget(self._pinned, ptr, "no memory of the host")
        try:
            self.call(cu.cuMemFreeHost, ptr)
        except CudaError:
            self._pinned[ptr] = size_bytes
            raise

    def host_view(self, ptr: Ptr, size_bytes: int) -> memoryview:
        """Show memory of the host as bytes; the view must not be used after ``host_free``."""
        pageable = self._pageable.get(ptr)
        known_bytes = self._pinned.get(ptr, 0) if pageable is None else len(pageable)
        if not 0 <= size_bytes <= known_bytes:
            raise cuda_error(
                Status.INVALID_VALUE,
                seen=f"{size_bytes} bytes at {ptr:#x} were not allocated as memory of the host",
            )
        return memoryview((ctypes.c_ubyte * size_bytes).from_address(ptr)).cast("B")

    def close(self) -> None:
        for ptr in self._pinned:
            self.ask(cu.cuMemFreeHost, ptr)
        self._pinned.clear()
        self._pageable.clear()
        super().close()

    def _malloc_pinned(self, size_bytes: int) -> Ptr:
        ptr = Ptr(
            self.call(
                cu.cuMemHostAlloc,
                size_bytes,
                cu.CU_MEMHOSTALLOC_PORTABLE,
                seen=lambda: f"{format_bytes(size_bytes)} of pinned host memory asked",
            )
        )
        self._pinned[ptr] = size_bytes
        return ptr

    def _malloc_pageable(self, size_bytes: int) -> Ptr:
        """Map pages of this process alone, as malloc does for what is large; none is there until touched."""
        try:
            pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError):
            raise CudaError(
                Status.OUT_OF_MEMORY,
                "CUDA_ERROR_OUT_OF_MEMORY",
                f"the host has not enough memory: {format_bytes(size_bytes)} asked",
                hint="free memory, or ask for less; `free -h` shows how much there is",
            ) from None
        memory = (ctypes.c_ubyte * size_bytes).from_buffer(pages)  # which keeps the pages
        ptr = Ptr(ctypes.addressof(memory))
        self._pageable[ptr] = memory
        return ptr
