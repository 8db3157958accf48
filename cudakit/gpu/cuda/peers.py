"""Memory of peer devices (CUDA Driver API, "Peer Context Memory Access")."""

from __future__ import annotations

from typing import Any, NamedTuple

from cudakit.errors import CudaError
from cudakit.gpu.api import Ptr
from cudakit.gpu.cuda.context import Context
from cudakit.gpu.cuda.driver import check, cu
from cudakit.gpu.cuda.memory import CudaMemory
from cudakit.gpu.cuda.streams import CudaStreams
from cudakit.gpu.driver_errors import Status, cuda_error


class _Peer(NamedTuple):
    context: Context
    memory: CudaMemory


class CudaPeers:
    """Allocations on peer devices, whose primary contexts are retained until ``close``."""

    def __init__(self, context: Context, streams: CudaStreams) -> None:
        self._context, self._streams = context, streams
        self._peers: dict[int, _Peer] = {}

    def can_access_peer(self, ordinal: int) -> bool:
        """Return whether kernels of this device can access memory of a peer."""
        peer = check(cu.cuDeviceGet(ordinal), lambda: f"cuda:{ordinal} requested")
        return _can_access(self._context.device, peer)

    def enable_peer(self, ordinal: int) -> None:
        peer = self._peer(ordinal).context
        if not _can_access(peer.device, self._context.device):
            raise cuda_error(
                Status.PEER_ACCESS_UNSUPPORTED,
                detail=f"access from {peer.name} to memory of {self._context.name}",
            )

    def peer_malloc(self, ordinal: int, size_bytes: int) -> Ptr:
        return self._peer(ordinal).memory.malloc(size_bytes)

    def peer_free(self, ordinal: int, ptr: Ptr) -> None:
        peer = self._peers.get(ordinal)
        if peer is None:
            raise cuda_error(
                Status.INVALID_VALUE, detail=f"no allocation of cuda:{ordinal} begins at {ptr:#x}"
            )
        # cuMemFree waits for work of the peer only; copies are work of this device.
        self._streams.sync()
        peer.memory.free(ptr)

    def close(self) -> None:
        """Free all remaining allocations, and release the contexts of the peers."""
        for peer in self._peers.values():
            peer.memory.close()
            peer.context.close()
        self._peers.clear()

    def _peer(self, ordinal: int) -> _Peer:
        if ordinal == self._context.ordinal:
            raise cuda_error(
                Status.INVALID_DEVICE, detail=f"cuda:{ordinal} is not a peer of itself"
            )
        if ordinal not in self._peers:
            context = Context(ordinal)
            try:
                _enable_both_directions(self._context, context)
            except CudaError:
                context.close()
                raise
            self._peers[ordinal] = _Peer(context, CudaMemory(context, self._streams))
        return self._peers[ordinal]


def _enable_both_directions(context: Context, peer: Context) -> None:
    """Enable peer access in both directions, if supported."""
    was_disabled = _enable_access(context, peer)
    try:
        _enable_access(peer, context)
    except CudaError:
        if was_disabled:
            context.in_context(cu.cuCtxDisablePeerAccess, peer.handle)
        raise


def _enable_access(context: Context, peer: Context) -> bool:
    """Enable access of a context to memory of a peer, if supported; return whether it was disabled before.

    Without peer access, copies are staged through the host (CUDA C++ Programming Guide, "Peer-to-Peer Memory
    Copy"). Access is never disabled again, because other libraries in this process may rely on it.
    """
    if not _can_access(context.device, peer.device):
        return False
    result = context.in_context(cu.cuCtxEnablePeerAccess, peer.handle, 0)
    if result[0] == cu.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
        return False
    check(result)
    return True


def _can_access(device: Any, peer: Any) -> bool:
    return bool(check(cu.cuDeviceCanAccessPeer(device, peer)))
