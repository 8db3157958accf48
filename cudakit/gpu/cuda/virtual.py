"""Virtual memory of a device (CUDA Driver API, "Virtual Memory Management")."""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from types import MappingProxyType
from typing import Any

from cudakit.errors import CudaError, Unsupported
from cudakit.gpu import device
from cudakit.gpu.api import (
    HANDLE_BYTES,
    Backing,
    DescriptorHandle,
    FabricHandle,
    HandleKind,
    ProcessId,
    Ptr,
    ShareableHandle,
)
from cudakit.gpu.cuda.driver import Context, check, cu
from cudakit.gpu.cuda.memory import CudaMemory
from cudakit.gpu.device import Handles
from cudakit.gpu.driver_errors import Status, cuda_error

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


# --- Memory sharing between processes --------------------------------------------------------------
#
# CUDA Driver API, "Memory Management" (cuIpc*) and "Virtual Memory Management" (shareable handles).

_SUPPORT_ATTRIBUTES = {
    "fabric": cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
    "descriptor": cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
}
_LAZY_PEER_ACCESS = cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class CudaIpc:
    """Exported allocations of this process, and mapped allocations of other processes."""

    def __init__(self, context: Context, memory: CudaMemory, virtual: CudaVirtualMemory) -> None:
        self._context, self._memory, self._virtual = context, memory, virtual
        self._open_counts: Counter[Ptr] = Counter()  # number of ``ipc_open`` calls by address
        self._exported_handles: set[DescriptorHandle] = set()
        self._serials = count(1)

    @property
    def process(self) -> ProcessId:
        """The id of this process, which differs in the child of a fork."""
        return device.this_process()

    def ipc_handle(self, ptr: Ptr) -> bytes:
        if ptr not in self._memory.device_allocations:
            raise cuda_error(
                Status.INVALID_VALUE,
                detail=f"no allocation of {self._context.name} begins at {ptr:#x}",
            )
        return _handle_bytes(
            self._context.call(cu.cuIpcGetMemHandle, ptr, detail=lambda: f"{ptr:#x}")
        )

    def ipc_open(self, handle: bytes) -> Ptr:
        ipc_handle = cu.CUipcMemHandle()
        ctypes.memmove(ipc_handle.getPtr(), _check_size(handle), HANDLE_BYTES)
        ptr = Ptr(
            int(
                self._context.call(
                    cu.cuIpcOpenMemHandle,
                    ipc_handle,
                    _LAZY_PEER_ACCESS,
                    detail=lambda: _UNAVAILABLE_MEMORY,
                )
            )
        )
        self._open_counts[ptr] += 1
        return ptr

    def ipc_close(self, ptr: Ptr) -> None:
        if not self._open_counts[ptr]:
            raise cuda_error(
                Status.INVALID_VALUE,
                detail=f"no open mapping begins at {ptr:#x}; it may already be closed",
            )
        self._context.call(cu.cuIpcCloseMemHandle, ptr, detail=lambda: f"{ptr:#x}")
        self._open_counts[ptr] -= 1

    def handle_kinds(self) -> tuple[HandleKind, ...]:
        return tuple(
            kind for kind in HANDLE_TYPES if self._has_attribute(_SUPPORT_ATTRIBUTES[kind])
        )

    def export(self, backing: Backing) -> ShareableHandle:
        handle = self._virtual.backings[backing]
        handle_type = self._context.call(
            cu.cuMemGetAllocationPropertiesFromHandle, handle
        ).requestedHandleTypes
        if int(handle_type) == int(HANDLE_TYPES["fabric"]):
            return FabricHandle(
                _handle_bytes(
                    self._context.call(cu.cuMemExportToShareableHandle, handle, handle_type, 0)
                )
            )
        if int(handle_type) != int(HANDLE_TYPES["descriptor"]):
            raise Unsupported(
                "the memory was created without a shareable handle and cannot be exported"
            )
        descriptor = int(
            self._context.call(cu.cuMemExportToShareableHandle, handle, handle_type, 0)
        )
        os.set_inheritable(descriptor, False)  # inherited descriptors would keep the memory alive
        exported_handle = DescriptorHandle(self.process, descriptor, next(self._serials))
        self._exported_handles.add(exported_handle)
        return exported_handle

    def revoke(self, handle: ShareableHandle) -> None:
        if isinstance(handle, DescriptorHandle) and handle in self._exported_handles:
            self._exported_handles.remove(handle)
            with suppress(OSError):  # the program may have closed the descriptor itself
                os.close(handle.number)

    def import_backing(self, handle: ShareableHandle) -> Backing:
        if isinstance(handle, FabricHandle):
            return self._import_handle(_check_size(handle.data), "fabric")
        descriptor = self._local_descriptor(handle)
        try:
            return self._import_handle(descriptor, "descriptor")
        finally:
            os.close(descriptor)

    @property
    def in_use(self) -> bool:
        """Whether memory of another process is open."""
        return any(self._open_counts.values())

    def close(self) -> None:
        """Close all mappings, and revoke all exports."""
        for ptr in self._open_counts.elements():
            self._context.in_context(cu.cuIpcCloseMemHandle, ptr)
        self._open_counts.clear()
        for exported_handle in [*self._exported_handles]:
            self.revoke(exported_handle)

    def _local_descriptor(self, exported_handle: DescriptorHandle) -> int:
        """Return a new file descriptor of this process for exported memory, which the caller must close."""
        if exported_handle not in self._exported_handles:
            return device.duplicate(exported_handle)
        return os.dup(exported_handle.number)

    def _import_handle(self, system_handle: int | bytes, kind: HandleKind) -> Backing:
        backing = self._context.call(
            cu.cuMemImportFromShareableHandle,
            system_handle,
            HANDLE_TYPES[kind],
            detail=lambda: _UNAVAILABLE_MEMORY,
        )
        return Backing(self._virtual.backings.add(backing))

    def _has_attribute(self, attribute: Any) -> bool:
        """Return whether a boolean device attribute is set; False if the driver does not know it."""
        result = cu.cuDeviceGetAttribute(attribute, self._context.device)
        if result[0] == cu.CUresult.CUDA_ERROR_INVALID_VALUE:
            return False
        return bool(check(result))


_UNAVAILABLE_MEMORY = (
    "the exporting process may have freed the memory, may have ended, or is this process"
)


def _handle_bytes(handle: Any) -> bytes:
    """Return the bytes of a handle structure, which the bindings do not expose."""
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def _check_size(handle: bytes) -> bytes:
    if len(handle) != HANDLE_BYTES:
        error_text = f"the handle has {len(handle)} bytes, {HANDLE_BYTES} expected"
        raise cuda_error(Status.INVALID_VALUE, detail=error_text)
    return handle
