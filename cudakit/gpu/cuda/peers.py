"""Memory of peer devices (CUDA Driver API, "Peer Context Memory Access")."""

from __future__ import annotations

from typing import Any

from cudakit.errors import CudaError
from cudakit.gpu.api import Ptr
from cudakit.gpu.cuda.context import Context
from cudakit.gpu.cuda.driver import check, cu
from cudakit.gpu.cuda.streams import CudaStreams
from cudakit.gpu.driver_errors import Status, cuda_error
from cudakit.gpu.handles import check_size, pop_allocation
from cudakit.units import format_bytes


class CudaPeers:
    """Allocations on peer devices, whose primary contexts are retained until ``close``."""

    def __init__(self, context: Context, streams: CudaStreams) -> None:
        self._context, self._streams = context, streams
        self._peers: dict[int, _Peer] = {}

    def can_access_peer(self, ordinal: int) -> bool:
        """Return whether kernels of this device can access memory of a peer."""
        other = check(cu.cuDeviceGet(ordinal), lambda: f"cuda:{ordinal} requested")
        return _can_access(self._context.device, other)

    def enable_peer(self, ordinal: int) -> None:
        other = self._peer(ordinal)
        if not _can_access(other.device, self._context.device):
            raise cuda_error(
                Status.PEER_ACCESS_UNSUPPORTED,
                seen=f"access from {other.name} to memory of {self._context.name}",
            )

    def peer_malloc(self, ordinal: int, size_bytes: int) -> Ptr:
        check_size(size_bytes)
        return self._peer(ordinal).malloc(size_bytes)

    def peer_free(self, ordinal: int, ptr: Ptr) -> None:
        peer = self._peers.get(ordinal)
        if peer is None:
            raise cuda_error(
                Status.INVALID_VALUE, seen=f"no allocation of cuda:{ordinal} begins at {ptr:#x}"
            )
        # cuMemFree waits for work of the peer only; copies are work of this device.
        self._streams.sync()
        peer.free(ptr)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def _peer(self, ordinal: int) -> _Peer:
        if ordinal == self._context.ordinal:
            raise cuda_error(Status.INVALID_DEVICE, seen=f"cuda:{ordinal} is not a peer of itself")
        if ordinal not in self._peers:
            peer = _Peer(ordinal)
            try:
                peer.connect(self._context)
            except CudaError:
                peer.close()
                raise
            self._peers[ordinal] = peer
        return self._peers[ordinal]


class _Peer(Context):
    """A peer device and the allocations there."""

    def __init__(self, ordinal: int) -> None:
        super().__init__(ordinal)
        self._allocated: dict[Ptr, int] = {}

    def connect(self, other: Context) -> None:
        """Enable peer access in both directions, if supported."""
        enabled = _enable_access(other, self)
        try:
            _enable_access(self, other)
        except CudaError:
            if enabled:
                other.ask(cu.cuCtxDisablePeerAccess, self.handle)
            raise

    def malloc(self, size_bytes: int) -> Ptr:
        address = self.call(
            cu.cuMemAlloc, size_bytes, seen=lambda: self._describe_shortage(size_bytes)
        )
        ptr = Ptr(int(address))
        self._allocated[ptr] = size_bytes
        return ptr

    def free(self, ptr: Ptr) -> None:
        size_bytes = pop_allocation(self._allocated, ptr, f"no allocation of {self.name}")
        try:
            self.call(cu.cuMemFree, ptr)
        except CudaError:
            self._allocated[ptr] = size_bytes
            raise

    def close(self) -> None:
        for ptr in self._allocated:
            self.ask(cu.cuMemFree, ptr)
        self._allocated.clear()
        super().close()

    def _describe_shortage(self, size_bytes: int) -> str:
        free, total = (format_bytes(amount) for amount in self.call(cu.cuMemGetInfo))
        return f"{format_bytes(size_bytes)} requested, {free} of {total} free on {self.name}"


def _enable_access(context: Context, other: Context) -> bool:
    """Enable access of a context to memory of another, if supported; return whether it was disabled before.

    Without peer access, copies are staged through the host (CUDA C++ Programming Guide, "Peer-to-Peer Memory
    Copy"). Access is never disabled again, because other libraries in this process may rely on it.
    """
    if not _can_access(context.device, other.device):
        return False
    result = context.ask(cu.cuCtxEnablePeerAccess, other.handle, 0)
    if result[0] == cu.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
        return False
    check(result)
    return True


def _can_access(device: Any, other: Any) -> bool:
    return bool(check(cu.cuDeviceCanAccessPeer(device, other)))
