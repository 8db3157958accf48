"""Virtual memory of a device: addresses are reserved, and pages of memory mapped into them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Protocol

from cudakit.errors import CudaError, Unsupported
from cudakit.gpu.api import LEGACY, Backing, Exported, Gpu, HandleKind, Ptr, Stream

# CUDA_ERROR_INVALID_HANDLE, and what is said to a kind of handle that is not to be had:
# CUDA_ERROR_NOT_PERMITTED and CUDA_ERROR_NOT_SUPPORTED (CUDA Driver API, CUresult; cuMemCreate).
_INVALID_HANDLE = 400
_NO_SUCH_HANDLE = (800, 801)


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
    (cuMemRelease, CUDA Driver API, Virtual Memory Management). It is created with the first kind of handle
    that can be had, so that other processes can open it, unless it never ``shares``. ``peers`` are the other
    devices that may use it.
    """

    def __init__(self, gpu: Gpu, *, shares: bool = True) -> None:
        self._gpu = gpu
        self.granularity = gpu.granularity
        self.peers: list[int] = []
        # The kinds of handle that are left to be tried, the best first; empty: not asked yet.
        self._kinds: list[HandleKind | None] = [] if shares else [None]
        self._exported: dict[int, Exported] = {}  # by the address of the page
        self._undone: list[Callable[[], None]] = []  # which the driver refused, and is asked again

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
        self._withdraw([page for page in self._exported if ptr <= page < ptr + size_bytes])

    def sync_stream(self, stream: int) -> None:
        # The default stream of a thread can be named by that thread alone; the legacy one waits for it.
        try:
            self._gpu.sync_stream(Stream(stream) if stream > 0 else LEGACY)
        except CudaError as error:
            if error.code != _INVALID_HANDLE:
                raise
            self._gpu.sync()  # the stream is gone, what was enqueued on it may still run

    def enable_peer(self, device: int, mapped: Iterable[tuple[int, int]]) -> None:
        """Let another device use what is mapped, these ranges and later ones. Raises CudaError; then not."""
        done: list[tuple[int, int]] = []
        try:
            for ptr, size_bytes in mapped:
                self._gpu.set_access(Ptr(ptr), size_bytes, device)
                done.append((ptr, size_bytes))
        except BaseException:
            for ptr, size_bytes in done:
                with suppress(CudaError):  # it may do more than was told, and nothing is lost
                    self._gpu.set_access(Ptr(ptr), size_bytes, device, allowed=False)
            raise
        self.peers.append(device)

    def export(self, ptr: int, page_bytes: int, count: int) -> tuple[Exported, ...]:
        """Return pages for other processes, always the same for each, until they are unmapped.

        Raises CudaError, or Unsupported where they have no handles; then nothing is exported.
        """
        pages = range(ptr, ptr + count * page_bytes, page_bytes)
        new: list[int] = []
        try:
            for page in pages:
                if page not in self._exported:
                    self._exported[page] = self._export(page)
                    new.append(page)
        except BaseException:
            self._withdraw(new)
            raise
        return tuple(self._exported[page] for page in pages)

    def _export(self, page: int) -> Exported:
        backing = self._gpu.backing_at(Ptr(page))
        try:
            return self._gpu.export(backing)
        except Unsupported as error:
            error.hint = (
                "unset TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC, or set expandable_segments:False, "
                "before it is allocated"
            )
            raise
        finally:
            self._release([backing])

    def _withdraw(self, pages: list[int]) -> None:
        self._finish([partial(self._gpu.withdraw, self._exported.pop(page)) for page in pages])

    def _map(self, ptr: int, page_bytes: int, count: int) -> None:
        mapped, backings = 0, self._create(page_bytes, count)
        try:
            for backing in backings:
                self._gpu.map(Ptr(ptr + mapped), backing, page_bytes)
                mapped += page_bytes
            for device in self.peers:
                self._gpu.set_access(Ptr(ptr), mapped, device)
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
                backings.append(self._create_one(page_bytes))  # noqa: PERF401  # one may fail
        except BaseException:
            self._release(backings)
            raise
        return backings

    def _create_one(self, page_bytes: int) -> Backing:
        """Create memory with the first kind of handle that can be had.

        A device may say that it has one, and refuse it: that of an NVLink fabric to which there is no channel
        (CUDA Driver API, cuMemCreate).
        """
        self._kinds = self._kinds or [*self._gpu.handle_kinds(), None]
        while True:
            kind = self._kinds[0]
            try:
                return self._gpu.create(page_bytes, kind)
            except CudaError as error:
                if kind is None or error.code not in _NO_SUCH_HANDLE:
                    raise
                del self._kinds[0]

    def _release(self, backings: list[Backing]) -> None:
        self._finish([partial(self._gpu.release, backing) for backing in backings])

    def _finish(self, steps: list[Callable[[], None]]) -> None:
        """Undo something, and what could not be undone before. What is refused is tried again later."""
        left, self._undone = [*self._undone, *steps], []
        for step in left:
            try:
                step()
            except CudaError:
                self._undone.append(step)
