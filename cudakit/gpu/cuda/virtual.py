"""Virtual memory of a device (CUDA Driver API, "Virtual Memory Management")."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cudakit.errors import CudaError
from cudakit.gpu.api import Backing, HandleKind, Ptr
from cudakit.gpu.cuda.context import Context
from cudakit.gpu.cuda.driver import check, cu
from cudakit.gpu.cuda.memory import CudaMemory
from cudakit.gpu.driver_errors import Status, cuda_error
from cudakit.gpu.handles import Handles

_NO_ACCESS = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE
_READ_AND_WRITE = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

HANDLE_TYPES: Mapping[HandleKind, Any] = MappingProxyType(
    {
        "fabric": cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC,
        "descriptor": cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
    }
)


class CudaVirtualMemory:
    """Reservations, physical memory and mappings of one device."""

    def __init__(self, context: Context, memory: CudaMemory) -> None:
        self._context, self._memory = context, memory
        self.backings: Handles[Any] = Handles("backing")
        self._reserved_sizes: dict[Ptr, int] = {}
        self._mapped_sizes: dict[Ptr, int] = {}

    def granularity(self) -> int:
        minimum_granularity = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(
            self._context.call(
                cu.cuMemGetAllocationGranularity, self._properties(), minimum_granularity
            )
        )

    def reserve(self, size_bytes: int) -> Ptr:
        address = self._context.call(
            cu.cuMemAddressReserve,
            size_bytes,
            0,
            0,
            0,
            detail=lambda: self._describe_request(size_bytes),
        )
        ptr = Ptr(int(address))
        self._reserved_sizes[ptr] = size_bytes
        return ptr

    def unreserve(self, ptr: Ptr, size_bytes: int) -> None:
        self._context.call(
            cu.cuMemAddressFree, ptr, size_bytes, detail=lambda: _range_text(ptr, size_bytes)
        )
        self._reserved_sizes.pop(ptr, None)

    def create(self, size_bytes: int, handle_kind: HandleKind | None = None) -> Backing:
        properties = self._properties()
        if handle_kind:
            properties.requestedHandleTypes = HANDLE_TYPES[handle_kind]
        allocation = self._context.call(
            cu.cuMemCreate,
            size_bytes,
            properties,
            0,
            detail=lambda: self._describe_request(size_bytes),
        )
        return Backing(self.backings.add(allocation))

    def backing_at(self, ptr: Ptr) -> Backing:
        error_text = f"nothing is mapped at {ptr:#x}"
        return Backing(
            self.backings.add(
                self._context.call(cu.cuMemRetainAllocationHandle, ptr, detail=lambda: error_text)
            )
        )

    def release(self, backing: Backing) -> None:
        self._context.call(cu.cuMemRelease, self.backings[backing])
        self.backings.remove(backing)

    def map(self, ptr: Ptr, backing: Backing, size_bytes: int) -> None:
        handle = self.backings[backing]
        self._context.call(
            cu.cuMemMap, ptr, size_bytes, 0, handle, 0, detail=lambda: _range_text(ptr, size_bytes)
        )
        try:
            self._set_access(ptr, size_bytes, self._location(), _READ_AND_WRITE)
        except CudaError:
            self._context.in_context(cu.cuMemUnmap, ptr, size_bytes)
            raise
        self._mapped_sizes[ptr] = size_bytes

    def set_access(self, ptr: Ptr, size_bytes: int, ordinal: int, *, allowed: bool = True) -> None:
        flags = _READ_AND_WRITE if allowed else _NO_ACCESS
        self._set_access(ptr, size_bytes, self._location_of(ordinal), flags)

    def has_access(self, ptr: Ptr, ordinal: int) -> bool:
        location = self._location_of(ordinal)
        error_text = f"nothing is mapped at {ptr:#x}"
        flags = self._context.call(cu.cuMemGetAccess, location, ptr, detail=lambda: error_text)
        return int(flags) == int(_READ_AND_WRITE)

    def unmap(self, ptr: Ptr, size_bytes: int) -> None:
        # Check the range here, because cuMemUnmap accepts unmapped ranges without an error.
        mapping_starts = self._mappings(ptr, size_bytes)
        self._context.call(
            cu.cuMemUnmap, ptr, size_bytes, detail=lambda: _range_text(ptr, size_bytes)
        )
        for start in mapping_starts:
            self._mapped_sizes.pop(start, None)

    @property
    def in_use(self) -> bool:
        """Whether memory is mapped."""
        return bool(self._mapped_sizes)

    def close(self) -> None:
        """Unmap and release all physical memory, and free all reservations."""
        for ptr, size_bytes in self._mapped_sizes.items():
            self._context.in_context(cu.cuMemUnmap, ptr, size_bytes)
        for handle in self.backings.clear():
            self._context.in_context(cu.cuMemRelease, handle)
        for ptr, size_bytes in self._reserved_sizes.items():
            self._context.in_context(cu.cuMemAddressFree, ptr, size_bytes)
        self._mapped_sizes.clear()
        self._reserved_sizes.clear()

    def _mappings(self, ptr: Ptr, size_bytes: int) -> list[Ptr]:
        """Return the first addresses of the mappings in a range. Raises CudaError if the range splits one."""
        mapping_starts, address = [], ptr
        while address < ptr + size_bytes and address in self._mapped_sizes:
            mapping_starts.append(address)
            address = Ptr(address + self._mapped_sizes[address])
        if not mapping_starts or address != ptr + size_bytes:
            raise cuda_error(
                Status.INVALID_VALUE,
                detail=f"{_range_text(ptr, size_bytes)} do not consist of whole mappings",
            )
        return mapping_starts

    def _properties(self) -> Any:
        properties = cu.CUmemAllocationProp()
        properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = self._location()
        return properties

    def _set_access(self, ptr: Ptr, size_bytes: int, location: Any, flags: Any) -> None:
        access = cu.CUmemAccessDesc()
        access.location = location
        access.flags = flags
        self._context.call(
            cu.cuMemSetAccess,
            ptr,
            size_bytes,
            [access],
            1,
            detail=lambda: f"{_range_text(ptr, size_bytes)}, for cuda:{location.id}",
        )

    def _location_of(self, ordinal: int) -> Any:
        check(cu.cuDeviceGet(ordinal), lambda: f"cuda:{ordinal} requested")
        location = self._location()
        location.id = ordinal
        return location

    def _location(self) -> Any:
        location = cu.CUmemLocation()
        location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = int(self._context.device)
        return location

    def _describe_request(self, size_bytes: int) -> str:
        page_bytes = self.granularity()
        if size_bytes <= 0 or size_bytes % page_bytes:
            return f"{size_bytes} bytes requested; sizes are positive multiples of {page_bytes}"
        return self._memory.describe_shortage(size_bytes)


def _range_text(ptr: Ptr, size_bytes: int) -> str:
    return f"{size_bytes} bytes at {ptr:#x}"
