"""Memory for other processes, and memory of theirs."""

from __future__ import annotations

from cudakit.core.allocator.block import Block
from cudakit.core.allocator.cache import Cache
from cudakit.core.allocator.growing import Growing
from cudakit.core.allocator.invalid import InvalidPointer
from cudakit.core.allocator.neighbours import Neighbours
from cudakit.core.allocator.observed import Observed
from cudakit.core.allocator.opened_memory import OpenedMemory
from cudakit.core.allocator.shared import Handle, SharedMemory
from cudakit.core.allocator.upstream import Shareable, Upstream
from cudakit.errors import CudakitError, Unsupported
from cudakit.gpu.api import IpcHandle, Ptr
from cudakit.torch_rules.settings import Settings


class Sharing(Observed):
    """The allocator of one device, whose memory other processes use, too."""

    _uncached: dict[int, int]

    def __init__(self, upstream: Upstream, settings: Settings, device: int) -> None:
        super().__init__(upstream, settings, device)
        if isinstance(upstream, Shareable):
            uses = self._uses
            upstream.neighbours.rest_during(lambda: uses.captures)

    def share(self, ptr: int) -> SharedMemory:
        """Return what another process opens by ``open_shared``: an allocation, from an address on.

        It can be pickled and sent. Let what was enqueued for the memory be done before, and keep it allocated
        until the other one has closed it: nobody counts who uses it. Raises InvalidPointer for what is not
        allocated, Unsupported for what cannot be shared, CudaError where the driver refuses.
        """
        neighbours = self._shareable()
        handles: tuple[Handle, ...]
        with self._inside(flushes=False):
            begin, size_bytes, block = self._allocation(ptr)
            if block is None or not isinstance(block.row, Growing):
                page_bytes, handles = 0, (neighbours.ipc_handle(Ptr(begin)),)
            else:
                reservation = block.row.reservation_of(block)
                page_bytes = reservation.page_bytes
                begin, count = reservation.pages_under(ptr, ptr + size_bytes)
                handles = neighbours.export(begin, page_bytes, count)
        process, device = neighbours.process, neighbours.device
        return SharedMemory(size_bytes, ptr - begin, device, process, page_bytes, handles)

    def ipc_handle(self, ptr: int) -> IpcHandle:
        """Return the handle of cuIpcGetMemHandle for the segment that an address is in, and where in it.

        For receivers that know nothing of cudakit. Raises as ``share``, and Unsupported in an expandable
        segment: that has no base allocation, and no such handle.
        """
        neighbours = self._shareable()
        with self._inside(flushes=False):
            base, _, block = self._allocation(ptr)
            if block is not None and isinstance(block.row, Growing):
                raise Unsupported(
                    f"the memory at {ptr:#x} is in an expandable segment, which was mapped page by page: "
                    "it has no base allocation that cuIpcGetMemHandle takes",
                    hint="use share() and open_shared(), or set expandable_segments:False",
                )
            return IpcHandle(neighbours.ipc_handle(Ptr(base)), ptr - base)

    def open_shared(self, shared: SharedMemory) -> OpenedMemory:
        """Open memory that another process shares. Each segment is opened once, whoever asks for it.

        It is open on this device, which is the one that has the memory, whichever number that has here, or,
        of pages with fabric handles, any of the fabric. Raises UsageError for memory of this process or of
        another device, EnvironmentUnusable where that process has ended or its file descriptors cannot be
        taken, CudaError where the driver refuses.
        """
        neighbours = self._shareable()
        return OpenedMemory(neighbours.open(shared), shared, neighbours, self)

    def _shareable(self) -> Neighbours:
        if not isinstance(self._upstream, Shareable):
            raise Unsupported("memory of this upstream cannot be shared with other processes")
        return self._upstream.neighbours

    def _allocation(self, ptr: int) -> tuple[int, int, Block | None]:
        """Return where the segment of an address begins, the bytes left of what was asked for, and the block.

        Of what was not cached there is none. The guard is held. Raises InvalidPointer, and Unsupported for
        memory of a pool with an allocator of its own.
        """
        if ptr in self._uncached:
            return ptr, self._uncached[ptr], None
        block = self._live.get(ptr) or self._live_around(ptr)
        left = 0 if block is None else block.ptr + block.requested - ptr
        if block is None or left <= 0:
            raise self._unknown(ptr)
        if self._cache.private.source(block.pool.id) is not None:
            raise Unsupported(
                f"the memory at {ptr:#x} is of a pool with an allocator of its own",
                hint="share it by what that allocator has for it",
            )
        return _first(block).ptr, left, block

    def _live_around(self, ptr: int) -> Block | None:
        """Find the live allocation that an address is inside of."""
        block = _block_at(self._cache, ptr)
        return None if block is None or self._live.get(block.ptr) is not block else block

    def _unknown(self, ptr: int) -> CudakitError:
        return InvalidPointer(
            f"nothing is allocated at {ptr:#x}: {self._reason_for(ptr)}",
            hint="share what is allocated, and no address of its own past the bytes that were asked for",
        )


def _block_at(cache: Cache, ptr: int) -> Block | None:
    for segment in cache.segments.values():
        if segment.ptr <= ptr < segment.ptr + segment.size:
            return max(
                (block for block in segment.blocks() if block.ptr <= ptr),
                key=lambda block: int(block.ptr),
            )
    return None


def _first(block: Block) -> Block:
    """Return the block that the segment of another begins with."""
    while block.previous is not None:
        block = block.previous
    return block
