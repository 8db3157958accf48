"""The places that copies go between: memory of the device, of the host, and of other devices."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import count
from typing import Literal, TypeAlias

import numpy as np

from cudakit.core.bench.workloads.moved import POISON
from cudakit.errors import CudaError
from cudakit.gpu.api import LEGACY, Gpu, Ptr

Place: TypeAlias = Literal["device", "host", "pageable", "peer"]
Access: TypeAlias = Literal["direct", "staged"]

# Memory that kernels of the device may not reach: what is there is looked at in a copy of it.
_OUT_OF_REACH = ("pageable", "peer")
# What that copy is made over: neither the poison, nor random bits.
_UNSEEN = 0x5A
_ALIGNMENT_BYTES = 16


def peers(gpu: Gpu) -> dict[int, Access]:
    """Number the other devices that CUDA shows, and say whether copies go there or by way of the host."""
    own, found = gpu.facts().index, dict[int, Access]()
    for ordinal in count():
        if ordinal == own:
            continue
        try:
            found[ordinal] = "direct" if gpu.can_access_peer(ordinal) else "staged"
        except CudaError as error:
            if error.name != "CUDA_ERROR_INVALID_DEVICE":
                raise
            return found
    raise AssertionError("devices without end")


def witnesses(*places: Place) -> int:
    """Count the buffers of the device that it takes to look at what is in places."""
    return int(any(place in _OUT_OF_REACH for place in places))


class Places:
    """Buffers of one size, in every place; ``owned`` gives them back. Nothing here waits for the device."""

    def __init__(self, gpu: Gpu, size_bytes: int, owned: ExitStack, peer: int | None) -> None:
        self.owned = owned
        self._gpu, self._size_bytes, self._peer = gpu, size_bytes, peer
        self._witness: Ptr | None = None

    def malloc(self, place: Place) -> Ptr:
        """Take a buffer."""
        gpu, peer = self._gpu, self._peer
        size_bytes = -(-self._size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if place == "peer" and peer is not None:
            ptr = gpu.peer_malloc(peer, size_bytes)
            self.owned.callback(gpu.peer_free, peer, ptr)
            return ptr
        if place == "device":
            ptr = gpu.malloc(size_bytes)
            self.owned.callback(gpu.free, ptr)
            return ptr
        ptr = gpu.host_malloc(size_bytes, pinned=place != "pageable")
        self.owned.callback(gpu.host_free, ptr)
        return ptr

    def poison(self, ptr: Ptr, place: Place) -> None:
        """Fill a buffer with what no copy writes; copies to the host must have ended."""
        gpu, size_bytes = self._gpu, self._size_bytes
        if place in ("host", "pageable"):
            np.frombuffer(gpu.host_view(ptr, size_bytes), np.uint8)[:] = POISON
        elif place == "peer":
            witness = self._filled_witness(POISON)
            gpu.copy(ptr, witness, size_bytes, LEGACY)
        else:
            gpu.fill(ptr, POISON, size_bytes, LEGACY)

    def visible(self, ptr: Ptr, place: Place) -> Ptr:
        """Return where kernels find what is in a buffer, until the next call.

        They reach pinned memory of the host by its own address (CUDA C++ Programming Guide, "Unified Virtual
        Address Space").
        """
        if place not in _OUT_OF_REACH:
            return ptr
        witness = self._filled_witness(_UNSEEN)
        self._gpu.copy(witness, ptr, self._size_bytes, LEGACY)
        return witness

    def _filled_witness(self, value: int) -> Ptr:
        if self._witness is None:
            self._witness = self.malloc("device")
        self._gpu.fill(self._witness, value, self._size_bytes, LEGACY)
        return self._witness
