"""Virtual memory: addresses are reserved, physical memory is created and mapped into them.

CUDA Driver API, Virtual Memory Management.
"""

from __future__ import annotations

from typing import Any

from cudakit.errors import CudaError
from cudakit.gpu.api import Backing, Ptr
from cudakit.gpu.cuda.context import Handles
from cudakit.gpu.cuda.driver import cu
from cudakit.gpu.cuda.memory import Memory
from cudakit.gpu.explain import Status, cuda_error


class VirtualMemory(Memory):
    """Address ranges of one device and the physical memory behind them."""

    def __init__(self, ordinal: int) -> None:
        super().__init__(ordinal)
        self._backings = Handles("backing")
        self._reserved: dict[Ptr, int] = {}
        self._mapped: dict[Ptr, int] = {}

    def granularity(self) -> int:
        kind = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self.call(cu.cuMemGetAllocationGranularity, self._properties(), kind))

    def reserve(self, size_bytes: int) -> Ptr:
        address = self.call(
            cu.cuMemAddressReserve, size_bytes, 0, 0, 0, seen=lambda: self._asked(size_bytes)
        )
        ptr = Ptr(int(address))
        self._reserved[ptr] = size_bytes
        return ptr

    def unreserve(self, ptr: Ptr, size_bytes: int) -> None:
        self.call(cu.cuMemAddressFree, ptr, size_bytes, seen=lambda: _range(ptr, size_bytes))
        self._reserved.pop(ptr, None)

    def create(self, size_bytes: int) -> Backing:
        handle = self.call(
            cu.cuMemCreate,
            size_bytes,
            self._properties(),
            0,
            seen=lambda: self._asked(size_bytes),
        )
        return Backing(self._backings.add(handle))

    def release(self, backing: Backing) -> None:
        self.call(cu.cuMemRelease, self._backings.remove(backing))

    def map(self, ptr: Ptr, backing: Backing, size_bytes: int) -> None:
        handle = self._backings[backing]
        self.call(cu.cuMemMap, ptr, size_bytes, 0, handle, 0, seen=lambda: _range(ptr, size_bytes))
        try:
            self.call(cu.cuMemSetAccess, ptr, size_bytes, [self._access()], 1)
        except CudaError:
            self.ask(cu.cuMemUnmap, ptr, size_bytes)
            raise
        self._mapped[ptr] = size_bytes

    def unmap(self, ptr: Ptr, size_bytes: int) -> None:
        # The driver unmaps in silence what is not mapped.
        starts = self._mappings(ptr, size_bytes)
        self.call(cu.cuMemUnmap, ptr, size_bytes, seen=lambda: _range(ptr, size_bytes))
        for start in starts:
            self._mapped.pop(start, None)

    def close(self) -> None:
        for ptr, size_bytes in self._mapped.items():
            self.ask(cu.cuMemUnmap, ptr, size_bytes)
        for handle in self._backings.clear():
            self.ask(cu.cuMemRelease, handle)
        for ptr, size_bytes in self._reserved.items():
            self.ask(cu.cuMemAddressFree, ptr, size_bytes)
        self._mapped.clear()
        self._reserved.clear()
        super().close()

    def _mappings(self, ptr: Ptr, size_bytes: int) -> list[Ptr]:
        """Return where the mappings begin that make up a range. Raises CudaError if they do not."""
        starts, at = [], ptr
        while at < ptr + size_bytes and at in self._mapped:
            starts.append(at)
            at = Ptr(at + self._mapped[at])
        if not starts or at != ptr + size_bytes:
            raise cuda_error(
                Status.INVALID_VALUE, seen=f"{_range(ptr, size_bytes)} are not whole mappings"
            )
        return starts

    def _properties(self) -> Any:
        properties = cu.CUmemAllocationProp()
        properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = self._location()
        return properties

    def _access(self) -> Any:
        access = cu.CUmemAccessDesc()
        access.location = self._location()
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    def _location(self) -> Any:
        location = cu.CUmemLocation()
        location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = int(self._device)
        return location

    def _asked(self, size_bytes: int) -> str:
        page = self.granularity()
        if size_bytes <= 0 or size_bytes % page:
            return f"{size_bytes} bytes asked, which is no multiple of {page}"
        return self.shortage(size_bytes)


def _range(ptr: Ptr, size_bytes: int) -> str:
    return f"{size_bytes} bytes at {ptr:#x}"
