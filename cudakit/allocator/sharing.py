"""Sharing: an allocator shares memory with other processes and devices, and opens memory of other processes.

Source of peer access: PyTorch's c10/cuda/CUDACachingAllocator.cpp (enablePeerAccess,
ExpandableSegment::addPeer).
"""

from __future__ import annotations

from cudakit.allocator.blocks import Block
from cudakit.allocator.ipc import Handle, IpcRegistry, OpenedMemory, SharedMemory
from cudakit.allocator.state import AllocatorState, InvalidPointer
from cudakit.allocator.upstream import IpcUpstream, PeerAccessUpstream
from cudakit.errors import Unsupported
from cudakit.gpu.api import IpcHandle, Ptr


class Sharing:
    """The methods of an allocator that share memory with other processes and devices."""

    def __init__(self, state: AllocatorState) -> None:
        self._state = state
        self._upstream = state.upstream
        if isinstance(self._upstream, IpcUpstream):
            # The lambda refers to the captures only, not to the state: the allocator's finalizer keeps the
            # upstream alive, and a reference from it to the state would keep the allocator alive, too.
            captures = state.captures
            self._upstream.ipc.defer_during(lambda: captures.capture_count)

    def share(self, ptr: int) -> SharedMemory:
        """Return a description of an allocation, from an address on, that another process can open.

        Pickle the description or send it as text; the other process calls ``open_shared``. First synchronize
        the work on the memory. Keep the memory allocated until the other process has closed it: the allocator
        does not know of that use. Raises InvalidPointer if no allocation contains ``ptr``, Unsupported for
        memory that cannot be shared, CudaError if the driver refuses.
        """
        registry = self._registry()
        handles: tuple[Handle, ...]
        with self._state.locked():
            segment_address, size_bytes, block = self._find_allocation(ptr)
            segment = block.expandable_segment if block is not None else None
            if segment is None:
                page_bytes, handles = 0, (registry.ipc_handle(Ptr(segment_address)),)
            else:
                page_bytes = segment.page_bytes
                segment_address, page_count = segment.pages_containing(ptr, ptr + size_bytes)
                handles = registry.export_pages(segment_address, page_bytes, page_count)
        process, device = registry.process_id, registry.device_uuid
        return SharedMemory(size_bytes, ptr - segment_address, device, process, page_bytes, handles)

    def ipc_handle(self, ptr: int) -> IpcHandle:
        """Return the handle of the segment that contains an address, and the address's offset in the segment.

        Receivers without cudakit can open the handle (cuIpcGetMemHandle). Raises the errors of ``share``, and
        Unsupported for an expandable segment, which has no such handle.
        """
        registry = self._registry()
        with self._state.locked():
            segment_address, _, block = self._find_allocation(ptr)
            if block is not None and block.expandable_segment is not None:
                raise Unsupported(
                    f"the memory at {ptr:#x} is in an expandable segment, which has no handle of"
                    " cuIpcGetMemHandle",
                    hint="use share() and open_shared(), or set expandable_segments:False",
                )
            return IpcHandle(registry.ipc_handle(Ptr(segment_address)), ptr - segment_address)

    def open_shared(self, shared_memory: SharedMemory, owner: object) -> OpenedMemory:
        """Open memory of another process, and keep the allocator ``owner`` alive while the memory is open."""
        registry = self._registry()
        return OpenedMemory(registry.open_memory(shared_memory), shared_memory, registry, owner)

    def enable_peer_access(self, device: int) -> None:
        """Allow kernels of another device to access all current and later memory of this allocator.

        Repeated calls do nothing. The other device gets permanent access to all plain memory of this context
        (cuCtxEnablePeerAccess), and to the pages of expandable segments (cuMemSetAccess). Raises CudaError,
        and revokes the access that it enabled, if the device does not exist or has no peer access;
        Unsupported for an upstream without a device.
        """
        upstream = self._upstream
        if not isinstance(upstream, PeerAccessUpstream):
            raise Unsupported("this upstream has no device, and so no peer access")
        with self._state.locked():
            if device not in upstream.peers:
                expandable_segments = self._state.engine.expandable_segments
                upstream.enable_peer(
                    device, expandable_segments.mapped_ranges if expandable_segments else ()
                )

    def peers(self) -> tuple[int, ...]:
        """Return the other devices that can access the memory."""
        upstream = self._upstream
        return tuple(sorted(upstream.peers)) if isinstance(upstream, PeerAccessUpstream) else ()

    def _registry(self) -> IpcRegistry:
        if not isinstance(self._upstream, IpcUpstream):
            raise Unsupported("memory of this upstream cannot be shared with other processes")
        return self._upstream.ipc

    def _find_allocation(self, ptr: int) -> tuple[int, int, Block | None]:
        """Return the start of an address's segment, the requested bytes from the address on, and its block.

        The block is None for memory that was allocated without caching. The caller holds the guard. Raises
        InvalidPointer, and Unsupported for memory of a pool with its own upstream.
        """
        state = self._state
        if ptr in state.uncached_sizes:
            return ptr, state.uncached_sizes[ptr], None
        block = state.live_blocks.get(ptr) or self._find_live_block(ptr)
        remaining_bytes = 0 if block is None else block.ptr + block.requested - ptr
        if block is None or remaining_bytes <= 0:
            raise InvalidPointer(
                f"nothing is allocated at {ptr:#x}: {state.describe_invalid_pointer(ptr)}",
                hint="share an address within the requested bytes of a live allocation",
            )
        if state.engine.private_pools.segment_source(block.pool.id) is not None:
            raise Unsupported(
                f"the memory at {ptr:#x} belongs to a pool with its own upstream",
                hint="share it by the functions of that upstream",
            )
        first_block = block
        while first_block.prev is not None:
            first_block = first_block.prev
        return first_block.ptr, remaining_bytes, block

    def _find_live_block(self, ptr: int) -> Block | None:
        """Return the live block that contains an address, or None."""
        segment = self._state.engine.segments.find_segment(ptr)
        if segment is None:
            return None
        block = next(block for block in reversed(segment.blocks()) if block.ptr <= ptr)
        return block if self._state.live_blocks.get(block.ptr) is block else None
