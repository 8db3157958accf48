"""The virtual memory of a device: pages of expandable segments, which other processes and devices can use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Protocol

from cudakit.errors import CudaError, Unsupported
from cudakit.gpu.api import (
    LEGACY,
    Backing,
    HandleKind,
    Ipc,
    Memory,
    Ptr,
    ShareableHandle,
    Stream,
    Streams,
    VirtualMemory,
)

# CUresult values (CUDA Driver API): CUDA_ERROR_INVALID_HANDLE; CUDA_ERROR_NOT_PERMITTED and _NOT_SUPPORTED,
# with which cuMemCreate refuses a kind of handle that is not available.
_INVALID_HANDLE = 400
_HANDLE_KIND_REFUSED_CODES = (800, 801)


class _PagesDevice(VirtualMemory, Memory, Ipc, Streams, Protocol):
    """The protocols of a device whose pages are mapped and exported."""


class GpuPages:
    """Virtual memory of a device, available during captures too.

    The handle of a page's physical memory is released as soon as the page is mapped: the memory exists as
    long as the mapping (cuMemRelease, CUDA Driver API, "Virtual Memory Management"). With ``shares``, memory
    is created with the first kind of shareable handle that is available, so that other processes can open it.
    ``peers`` are the other devices that can access the memory.
    """

    def __init__(self, gpu: _PagesDevice, *, shares: bool = True) -> None:
        self._gpu = gpu
        self.granularity = gpu.granularity
        self.peers: list[int] = []
        self._reserved_ranges: dict[int, int] = {}
        self._mapped_pages: dict[int, int] = {}  # Sizes of the mapped pages by address.
        # Kinds of handle that were not refused, the best first; empty if they are not determined yet.
        self._handle_kinds: list[HandleKind | None] = [] if shares else [None]
        self._exported_handles: dict[
            int, ShareableHandle
        ] = {}  # Handles by the address of the page.
        self._failed_cleanup_calls: list[Callable[[], None]] = []  # Clean-up steps to repeat later.

    def reserve(self, size_bytes: int) -> int:
        with self._gpu.relaxed():
            ptr = self._gpu.reserve(size_bytes)
        self._reserved_ranges[ptr] = size_bytes
        return ptr

    def unreserve(self, ptr: int, size_bytes: int) -> None:
        self._gpu.unreserve(Ptr(ptr), size_bytes)
        del self._reserved_ranges[ptr]

    def map(self, ptr: int, page_bytes: int, page_count: int) -> None:
        with self._gpu.relaxed():
            self._map_pages(ptr, page_bytes, page_count)
        page_addresses = range(ptr, ptr + page_count * page_bytes, page_bytes)
        self._mapped_pages.update(dict.fromkeys(page_addresses, page_bytes))

    def unmap(self, ptr: int, size_bytes: int) -> None:
        self._gpu.unmap(Ptr(ptr), size_bytes)
        end = ptr + size_bytes
        while ptr < end:
            ptr += self._mapped_pages.pop(ptr)
        self._revoke_handles(
            [
                page_address
                for page_address in self._exported_handles
                if end - size_bytes <= page_address < end
            ]
        )

    def release_all(self) -> None:
        """Unmap all pages and free all reserved addresses; see GpuUpstream.release_all."""
        if self._mapped_pages:
            self._wait_for_all_work()
        for ptr, size_bytes in list(self._mapped_pages.items()):
            with suppress(CudaError):
                self.unmap(ptr, size_bytes)
        for ptr, size_bytes in list(self._reserved_ranges.items()):
            with suppress(CudaError):
                self.unreserve(ptr, size_bytes)
        self._run_cleanup([])

    def _wait_for_all_work(self) -> None:
        """Wait for the device by a cuMemFree, which does not invalidate captures, unlike cuCtxSynchronize."""
        try:
            self._gpu.free(self._gpu.malloc(1))
        except CudaError:  # The device has no memory for this byte.
            self._gpu.sync()

    def sync_stream(self, stream: int) -> None:
        # A negative number is the default stream of a thread. Another thread cannot name this stream, so the
        # legacy stream, which waits for it, is synchronized instead.
        try:
            self._gpu.sync_stream(Stream(stream) if stream > 0 else LEGACY)
        except CudaError as error:
            if error.code != _INVALID_HANDLE:
                raise
            self._gpu.sync()  # The stream was destroyed, but its work may still run.

    def enable_peer(self, device: int, mapped_ranges: Iterable[tuple[int, int]]) -> None:
        """Allow another device to access the given mapped ranges, and all ranges that are mapped later.

        If the driver refuses, raises CudaError and enables no access.
        """
        enabled_ranges: list[tuple[int, int]] = []
        try:
            for ptr, size_bytes in mapped_ranges:
                self._gpu.set_access(Ptr(ptr), size_bytes, device)
                enabled_ranges.append((ptr, size_bytes))
        except BaseException:
            for ptr, size_bytes in enabled_ranges:
                # On failure the peer device keeps an access that it does not need.
                with suppress(CudaError):
                    self._gpu.set_access(Ptr(ptr), size_bytes, device, allowed=False)
            raise
        self.peers.append(device)

    def export(self, ptr: int, page_bytes: int, page_count: int) -> tuple[ShareableHandle, ...]:
        """Return handles of pages for other processes: the same handles until the pages are unmapped.

        Raises CudaError, and Unsupported for pages without handles; then no page is exported.
        """
        page_addresses = range(ptr, ptr + page_count * page_bytes, page_bytes)
        new_pages: list[int] = []
        try:
            for page_address in page_addresses:
                if page_address not in self._exported_handles:
                    self._exported_handles[page_address] = self._export_page(page_address)
                    new_pages.append(page_address)
        except BaseException:
            self._revoke_handles(new_pages)
            raise
        return tuple(self._exported_handles[page_address] for page_address in page_addresses)

    def _export_page(self, page_address: int) -> ShareableHandle:
        backing = self._gpu.backing_at(Ptr(page_address))
        try:
            return self._gpu.export(backing)
        except Unsupported as error:
            error.hint = (
                "unset TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC, or set expandable_segments:False, "
                "before it is allocated"
            )
            raise
        finally:
            self._release_backings([backing])

    def _revoke_handles(self, page_addresses: list[int]) -> None:
        self._run_cleanup(
            [
                partial(self._gpu.revoke, self._exported_handles.pop(page_address))
                for page_address in page_addresses
            ]
        )

    def _map_pages(self, ptr: int, page_bytes: int, page_count: int) -> None:
        mapped_bytes, backings = 0, self._create_backings(page_bytes, page_count)
        try:
            for backing in backings:
                self._gpu.map(Ptr(ptr + mapped_bytes), backing, page_bytes)
                mapped_bytes += page_bytes
            for device in self.peers:
                self._gpu.set_access(Ptr(ptr), mapped_bytes, device)
        except BaseException:
            if mapped_bytes:
                self._gpu.unmap(Ptr(ptr), mapped_bytes)
            raise
        finally:
            self._release_backings(backings)

    def _create_backings(self, page_bytes: int, page_count: int) -> list[Backing]:
        backings: list[Backing] = []
        try:
            for _ in range(page_count):
                backings.append(self._create_backing(page_bytes))  # noqa: PERF401  # a call may fail
        except BaseException:
            self._release_backings(backings)
            raise
        return backings

    def _create_backing(self, page_bytes: int) -> Backing:
        """Create memory with the first kind of handle that is available.

        A device may report a kind of handle and then refuse it, such as fabric handles without access to an
        IMEX channel (CUDA Driver API, cuMemCreate).
        """
        self._handle_kinds = self._handle_kinds or [*self._gpu.handle_kinds(), None]
        while True:
            handle_kind = self._handle_kinds[0]
            try:
                return self._gpu.create(page_bytes, handle_kind)
            except CudaError as error:
                if handle_kind is None or error.code not in _HANDLE_KIND_REFUSED_CODES:
                    raise
                del self._handle_kinds[0]

    def _release_backings(self, backings: list[Backing]) -> None:
        self._run_cleanup([partial(self._gpu.release, backing) for backing in backings])

    def _run_cleanup(self, cleanup_calls: list[Callable[[], None]]) -> None:
        """Run clean-up steps, and the steps that failed before. Steps that fail now are repeated later."""
        cleanup_calls, self._failed_cleanup_calls = (
            [*self._failed_cleanup_calls, *cleanup_calls],
            [],
        )
        for cleanup_call in cleanup_calls:
            try:
                cleanup_call()
            except CudaError:
                self._failed_cleanup_calls.append(cleanup_call)
