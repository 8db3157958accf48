"""Memory sharing between processes.

CUDA Driver API, "Memory Management" (cuIpc*) and "Virtual Memory Management" (shareable handles).
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from contextlib import suppress
from itertools import count
from typing import Any

from cudakit.errors import Unsupported
from cudakit.gpu import file_descriptors
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
from cudakit.gpu.cuda.context import Context
from cudakit.gpu.cuda.driver import check, cu
from cudakit.gpu.cuda.memory import CudaMemory
from cudakit.gpu.cuda.virtual import HANDLE_TYPES, CudaVirtualMemory
from cudakit.gpu.driver_errors import Status, cuda_error

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
        return file_descriptors.this_process()

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
            return file_descriptors.duplicate(exported_handle)
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
