"""Virtual memory of a device: addresses are reserved, and pages of memory mapped into them."""

from __future__ import annotations

from typing import Protocol

from cudakit.errors import CudaError
from cudakit.gpu.api import LEGACY, Backing, Gpu, Ptr, Stream

# CUDA_ERROR_INVALID_HANDLE (CUDA Driver API, CUresult).
_INVALID_HANDLE = 400


class VirtualMemory(Protocol):
    """Where expandable segments come from. Calls fail as those of Upstream do, and then change nothing."""

    def granularity(self) -> int: ...
    def reserve(self, size_bytes: int) -> int: ...
    def unreserve(self, ptr: int, size_bytes: int) -> None: ...

    # Maps pages end to end, each with memory of its own; all of them or none.
    def map(self, ptr: int, page_bytes: int, count: int) -> None: ...

    # Unmaps whole pages, and gives their memory back. It does not wait for who uses it.
    def unmap(self, ptr: int, size_bytes: int) -> None: ...
    def sync_stream(self, stream: int) -> None: ...


class PagesOfGpu:
    """Virtual memory of a Gpu, to be had whatever is captured.

    The physical memory of a page is released as soon as it is mapped: it lives as long as the mapping
    (cuMemRelease, CUDA Driver API, Virtual Memory Management).
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.granularity = gpu.granularity
        self._unreleased: list[Backing] = []  # which the driver refused to release

    def reserve(self, size_bytes: int) -> int:
        with self._gpu.relaxed():
            return self._gpu.reserve(size_bytes)

    def unreserve(self, ptr: int, size_bytes: int) -> None:
        self._gpu.unreserve(Ptr(ptr), size_bytes)

    def map(self, ptr: int, page_bytes: int, count: int) -> None:
        with self._gpu.relaxed():
            self._map(ptr, page_bytes, count)

    def unmap(self, ptr: int, size_bytes: int) -> None:
        self._gpu.unmap(Ptr(ptr), size_bytes)
        self._release([])

    def sync_stream(self, stream: int) -> None:
        # The default stream of a thread can be named by that thread alone; the legacy one waits for it.
        try:
            self._gpu.sync_stream(Stream(stream) if stream > 0 else LEGACY)
        except CudaError as error:
            if error.code != _INVALID_HANDLE:
                raise
            self._gpu.sync()  # the stream is gone, what was enqueued on it may still run

    def _map(self, ptr: int, page_bytes: int, count: int) -> None:
        mapped, backings = 0, self._create(page_bytes, count)
        try:
            for backing in backings:
                self._gpu.map(Ptr(ptr + mapped), backing, page_bytes)
                mapped += page_bytes
        except BaseException:
            if mapped:
                self._gpu.unmap(Ptr(ptr), mapped)
            raise
        finally:
            self._release(backings)

    def _create(self, page_bytes: int, count: int) -> list[Backing]:
        backings: list[Backing] = []
        try:
            for _ in range(count):
                backings.append(self._gpu.create(page_bytes))  # noqa: PERF401  # one may fail
        except BaseException:
            self._release(backings)
            raise
        return backings

    def _release(self, backings: list[Backing]) -> None:
        """Release memory, and what could not be released before. What is refused is tried again later."""
        left, self._unreleased = [*self._unreleased, *backings], []
        for backing in left:
            try:
                self._gpu.release(backing)
            except CudaError:
                self._unreleased.append(backing)
