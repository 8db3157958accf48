"""Memory of the other devices of this machine, which copies in the streams of this one reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from cudakit.errors import CudaError
from cudakit.gpu.api import Ptr
from cudakit.gpu.cuda.context import Context
from cudakit.gpu.cuda.driver import Result, check, cu
from cudakit.gpu.cuda.sizes import check_size, forget
from cudakit.gpu.cuda.streams import Streams
from cudakit.gpu.explain import Status, cuda_error
from cudakit.units import format_bytes

# Calls the driver with one context current.
_Ask: TypeAlias = Callable[..., Result]


class Peers(Streams):
    """What was allocated on other devices. Their primary contexts are retained until ``close``."""

    def __init__(self, ordinal: int) -> None:
        super().__init__(ordinal)
        self._peers: dict[int, _Peer] = {}

    def can_access_peer(self, ordinal: int) -> bool:
        """Say whether kernels here can use the memory of another device."""
        other = check(cu.cuDeviceGet(ordinal), lambda: f"cuda:{ordinal} asked")
        return _can_access(self._device, other)

    def enable_peer(self, ordinal: int) -> None:
        other = self._peer(ordinal)
        if not other.reaches(self._device):
            raise cuda_error(
                Status.PEER_ACCESS_UNSUPPORTED, seen=f"memory of {self.name} from {other.name}"
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
        self.sync()  # cuMemFree waits for the work of its own device, and this is where the copies are
        peer.free(ptr)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        super().close()

    def _peer(self, ordinal: int) -> _Peer:
        if ordinal == self.ordinal:
            raise cuda_error(Status.INVALID_DEVICE, seen=f"cuda:{ordinal} is no peer of itself")
        if ordinal not in self._peers:
            peer = _Peer(ordinal)
            try:
                peer.connect(self.ask, self._device, self._context)
            except CudaError:
                peer.close()
                raise
            self._peers[ordinal] = peer
        return self._peers[ordinal]


class _Peer(Context):
    """Another device, and what was allocated there."""

    def __init__(self, ordinal: int) -> None:
        super().__init__(ordinal)
        self._allocated: dict[Ptr, int] = {}

    def connect(self, ask: _Ask, device: Any, context: Any) -> None:
        """Let this context and another use the memory of each other; ``ask`` calls the driver in that one."""
        began = _reach(ask, device, self._device, self._context)
        try:
            _reach(self.ask, self._device, device, context)
        except CudaError:
            if began:
                ask(cu.cuCtxDisablePeerAccess, self._context)
            raise

    def reaches(self, device: Any) -> bool:
        """Say whether kernels there can use the memory of a device."""
        return _can_access(self._device, device)

    def malloc(self, size_bytes: int) -> Ptr:
        address = self.call(cu.cuMemAlloc, size_bytes, seen=lambda: self._shortage(size_bytes))
        ptr = Ptr(int(address))
        self._allocated[ptr] = size_bytes
        return ptr

    def free(self, ptr: Ptr) -> None:
        size_bytes = forget(self._allocated, ptr, f"no allocation of {self.name}")
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

    def _shortage(self, size_bytes: int) -> str:
        free, total = (format_bytes(amount) for amount in self.call(cu.cuMemGetInfo))
        return f"{format_bytes(size_bytes)} asked, {free} of {total} free on {self.name}"


def _reach(ask: _Ask, device: Any, other: Any, context: Any) -> bool:
    """Let a context use that of another device directly, where the machine can; say if it did not before.

    What is out of reach is copied by way of the host (CUDA C++ Programming Guide, "Peer-to-Peer Memory
    Copy"). It is not taken back later: torch and others of this process may have come to rely on it.
    """
    if not _can_access(device, other):
        return False
    result = ask(cu.cuCtxEnablePeerAccess, context, 0)
    if result[0] == cu.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
        return False
    check(result)
    return True


def _can_access(device: Any, other: Any) -> bool:
    return bool(check(cu.cuDeviceCanAccessPeer(device, other)))
