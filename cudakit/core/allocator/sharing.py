"""Sharing: an allocator's memory for other processes and other devices, and memory of other processes.

Source of peer access: PyTorch's c10/cuda/CUDACachingAllocator.cpp (enablePeerAccess,
ExpandableSegment::addPeer).
"""

from __future__ import annotations

from cudakit.core.allocator.blocks import Block
from cudakit.core.allocator.ipc import Handle, IpcRegistry, OpenedMemory, SharedMemory
from cudakit.core.allocator.state import AllocatorState, InvalidPointer
from cudakit.core.allocator.upstream import Reachable, Shareable
from cudakit.errors import Unsupported
from cudakit.gpu.api import IpcHandle, Ptr


class Sharing:
    """The calls of an allocator that other processes and devices need."""

    def __init__(self, state: AllocatorState) -> None:
        self._state = state
        self._upstream = state.upstream
        if isinstance(self._upstream, Shareable):
            captures = (
                state.captures
            )  # not the state: the finalizer of the allocator keeps the upstream
            self._upstream.ipc.rest_during(lambda: captures.count)

    def share(self, ptr: int) -> SharedMemory:
        """Return what another process opens by ``open_shared``: an allocation, from an address on.

        The result can be pickled and sent. Synchronize work on the memory before, and keep the memory
        allocated until the other process has closed it: its use is not counted. Raises InvalidPointer if
        nothing is allocated there, Unsupported for memory that cannot be shared, CudaError if the driver
        refuses.
        """
        registry = self._registry()
        handles: tuple[Handle, ...]
        with self._state.inside():
            begin, size_bytes, block = self._allocation(ptr)
            segment = block.expandable_segment if block is not None else None
            if segment is None:
                page_bytes, handles = 0, (registry.ipc_handle(Ptr(begin)),)
            else:
                page_bytes = segment.page_bytes
                begin, count = segment.pages_under(ptr, ptr + size_bytes)
                handles = registry.export(begin, page_bytes, count)
        process, device = registry.process, registry.device
        return SharedMemory(size_bytes, ptr - begin, device, process, page_bytes, handles)

    def ipc_handle(self, ptr: int) -> IpcHandle:
        """Return the handle of cuIpcGetMemHandle for the segment that an address is in, and where in it.

        For receivers without cudakit. Raises as ``share``, and Unsupported in an expandable segment, which
        has no base allocation and so no such handle.
        """
        registry = self._registry()
        with self._state.inside():
            base, _, block = self._allocation(ptr)
            if block is not None and block.expandable_segment is not None:
                raise Unsupported(
                    f"the memory at {ptr:#x} is in an expandable segment, which was mapped page by page: "
                    "it has no base allocation that cuIpcGetMemHandle takes",
                    hint="use share() and open_shared(), or set expandable_segments:False",
                )
            return IpcHandle(registry.ipc_handle(Ptr(base)), ptr - base)

    def open_shared(self, shared: SharedMemory, owner: object) -> OpenedMemory:
        """Open memory of another process for an allocator, ``owner``, which stays open meanwhile."""
        registry = self._registry()
        return OpenedMemory(registry.open(shared), shared, registry, owner)

    def enable_peer_access(self, device: int) -> None:
        """Let kernels of another device use all that is allocated here, now and later.

        Repeating it does nothing. The context of that device gets access to plain segments, for good, and
        to all other memory of this context (cuCtxEnablePeerAccess); pages of expandable segments have
        access rights of their own (cuMemSetAccess). Raises CudaError if the devices are not linked or the
        device does not exist, and revokes the access rights set by then; Unsupported for an upstream
        without a device.
        """
        upstream = self._upstream
        if not isinstance(upstream, Reachable):
            raise Unsupported("memory of this upstream is that of no device with peers")
        with self._state.inside():
            if device not in upstream.peers:
                expandable = self._state.engine.expandable
                upstream.enable_peer(device, expandable.mapped if expandable else ())

    def peers(self) -> tuple[int, ...]:
        """Return the other devices that can use the memory."""
        upstream = self._upstream
        return tuple(sorted(upstream.peers)) if isinstance(upstream, Reachable) else ()

    def _registry(self) -> IpcRegistry:
        if not isinstance(self._upstream, Shareable):
            raise Unsupported("memory of this upstream cannot be shared with other processes")
        return self._upstream.ipc

    def _allocation(self, ptr: int) -> tuple[int, int, Block | None]:
        """Return where the segment of an address begins, the requested bytes after it, and the block.

        None for memory that is not cached. The guard is held. Raises InvalidPointer, and Unsupported for
        memory of a pool with an allocator of its own.
        """
        state = self._state
        if ptr in state.uncached:
            return ptr, state.uncached[ptr], None
        block = state.live.get(ptr) or self._live_around(ptr)
        left = 0 if block is None else block.ptr + block.requested - ptr
        if block is None or left <= 0:
            raise InvalidPointer(
                f"nothing is allocated at {ptr:#x}: {state.reason_for(ptr)}",
                hint="share what is allocated, and no address of its own past the bytes that were asked for",
            )
        if state.engine.private.source(block.pool.id) is not None:
            raise Unsupported(
                f"the memory at {ptr:#x} is of a pool with an allocator of its own",
                hint="share it by what that allocator has for it",
            )
        first = block
        while first.prev is not None:
            first = first.prev
        return first.ptr, left, block

    def _live_around(self, ptr: int) -> Block | None:
        """Return the live allocation that an address is inside of."""
        segment = self._state.engine.segments.at(ptr)
        if segment is None:
            return None
        block = next(block for block in reversed(segment.blocks()) if block.ptr <= ptr)
        return block if self._state.live.get(block.ptr) is block else None
