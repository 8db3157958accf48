"""Memory shared with other processes: exported and imported handles, and the description that is sent.

A handle is opened once in a process, even if several objects use it, and closed when no object uses it.
Source: PyTorch's c10/cuda/CUDACachingAllocator.cpp (getIpcDevPtr, ExpandableSegment::fromShared).
"""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol, Self, TypeAlias, cast

from cudakit.allocator.blocks import ExpandableSegment
from cudakit.errors import CudaError, InputError, UsageError
from cudakit.gpu.api import (
    HANDLE_BYTES,
    DescriptorHandle,
    DeviceInfo,
    FabricHandle,
    Ipc,
    ProcessId,
    Ptr,
    ShareableHandle,
    Streams,
    VirtualMemory,
)

SCHEMA = "cudakit.shared/1"

# The CUipcMemHandle of a plain segment, or the handle of a page of an expandable segment.
Handle: TypeAlias = bytes | FabricHandle | DescriptorHandle

_MAX_INTEGER = (1 << 63) - 1  # The largest size or address.
_MAX_PID = (1 << 31) - 1  # The largest process id: pid_t is an int.

_HANDLE_PATTERN = re.compile(r"([a-z]+):([0-9a-f]+)(?::([0-9]{1,19}))?")

# Error codes after which no handle is open any more: CUDA_ERROR_NOT_INITIALIZED, in a forked child, and
# CUDA_ERROR_CONTEXT_IS_DESTROYED (CUDA Driver API, CUresult).
_ERRORS_WITHOUT_CONTEXT = (3, 709)

# The remaining calls that close a handle, in order.
_ClosingCalls: TypeAlias = "deque[Callable[[], None]]"

# A function that exports pages of an expandable segment, given address, bytes of a page, and number of pages.
_ExportPages: TypeAlias = "Callable[[int, int, int], tuple[ShareableHandle, ...]]"


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """A description of a part of an allocation, which other processes of the machine can open.

    It can be pickled or written as text, and keeps neither the allocation nor the process alive. The receiver
    can access all memory in the same segment or pages: send the description only to trusted processes.
    """

    size_bytes: int  # Bytes from the shared address to the end of the requested bytes.
    offset_bytes: int  # Offset of the shared address in the opened memory.
    device: str  # UUID of the device.
    process: ProcessId  # The process that shares the memory.
    page_bytes: int  # Bytes of the page of each handle; 0: the handle is that of a whole segment.
    handles: tuple[Handle, ...]  # Handles of the pages in the order of their addresses.

    def as_text(self) -> str:
        """Return JSON that ``from_text`` reads."""
        return json.dumps(
            {
                "schema": SCHEMA,
                "size_bytes": self.size_bytes,
                "offset_bytes": self.offset_bytes,
                "device": self.device,
                "pid": self.process.pid,
                "started": self.process.started,
                "page_bytes": self.page_bytes,
                "handles": [_handle_text(handle) for handle in self.handles],
            }
        )

    @classmethod
    def from_text(cls, text: str) -> SharedMemory:
        """Return the SharedMemory that ``as_text`` wrote. Raises InputError for other texts and versions."""
        try:
            fields = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise InputError(f"not a text from SharedMemory.as_text(): {text!r:.60}") from error
        schema = fields.get("schema") if isinstance(fields, dict) else None
        if schema != SCHEMA:
            raise InputError(
                f"this cudakit reads {SCHEMA!r}, not {schema!r}",
                hint="use the same version of cudakit in both processes",
            )
        for name in ("size_bytes", "offset_bytes", "pid", "started", "page_bytes"):
            number, maximum = fields.get(name), _MAX_PID if name == "pid" else _MAX_INTEGER
            if type(number) is not int or not 0 <= number <= maximum:
                raise _invalid_field(name, number)
        device, handles = fields.get("device"), fields.get("handles")
        if not isinstance(device, str):
            raise _invalid_field("device", device)
        if not isinstance(handles, list) or not all(isinstance(text, str) for text in handles):
            raise _invalid_field("handles", handles)
        process = ProcessId(fields["pid"], fields["started"])
        shared_memory = cls(
            fields["size_bytes"],
            fields["offset_bytes"],
            device,
            process,
            fields["page_bytes"],
            tuple(_read_handle(handle_text, process) for handle_text in handles),
        )
        # Handles and sizes that ``share`` of an allocator never returns are refused.
        handle_types = {type(handle) for handle in shared_memory.handles}
        end_bytes = shared_memory.offset_bytes + shared_memory.size_bytes
        if shared_memory.page_bytes:
            opened_bytes = len(shared_memory.handles) * shared_memory.page_bytes
            is_inside = end_bytes <= opened_bytes <= _MAX_INTEGER
            is_valid = is_inside and len(handle_types) == 1 and bytes not in handle_types
        else:
            is_valid = handle_types == {bytes} and len(shared_memory.handles) == 1
        if not is_valid or not shared_memory.size_bytes:
            handle_type = ", ".join(sorted(handle_type.__name__ for handle_type in handle_types))
            raise _invalid_field(
                "handles",
                f"{len(shared_memory.handles)} ({handle_type}) for {shared_memory.size_bytes} bytes",
            )
        return shared_memory

    def __reduce__(self) -> tuple[Callable[[str], SharedMemory], tuple[str]]:
        return SharedMemory.from_text, (self.as_text(),)


def _handle_text(handle: Handle) -> str:
    match handle:
        case DescriptorHandle():
            return f"fd:{handle.number:x}:{handle.serial}"
        case FabricHandle():
            return f"fabric:{handle.data.hex()}"
        case _:
            return f"ipc:{handle.hex()}"


def _read_handle(text: str, process: ProcessId) -> Handle:
    match = _HANDLE_PATTERN.fullmatch(text)
    if match is None:
        raise _invalid_field("handles", text)
    handle_kind, hex_digits, serial = match.groups()
    if handle_kind == "fd" and serial and len(hex_digits) <= 8:
        return DescriptorHandle(process, int(hex_digits, 16), int(serial))
    if serial or len(hex_digits) != 2 * HANDLE_BYTES or handle_kind not in ("ipc", "fabric"):
        raise _invalid_field("handles", text)
    return (
        bytes.fromhex(hex_digits)
        if handle_kind == "ipc"
        else FabricHandle(bytes.fromhex(hex_digits))
    )


def _invalid_field(name: str, value: Any) -> InputError:
    return InputError(
        f"invalid {name} in shared memory: {value!r:.60}", hint="send the text unchanged"
    )


class ImportedHandle:
    """Memory of another process that is open in this process until this object is garbage-collected."""

    __slots__ = ("__weakref__", "ptr")

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class IpcDevice(DeviceInfo, VirtualMemory, Ipc, Streams, Protocol):
    """The protocols of a device whose memory is shared with other processes."""


class IpcRegistry:
    """The exported and the imported handles of one device. Any thread and finalizers may call its methods."""

    def __init__(self, gpu: IpcDevice, export_pages: _ExportPages) -> None:
        self._gpu = gpu
        self._export_pages = export_pages
        self._count_captures: Callable[[], int] = lambda: 0
        self._lock = threading.Lock()
        self._imported_handles = weakref.WeakValueDictionary[tuple[object, ...], ImportedHandle]()
        self._unused_handles = deque[_ClosingCalls]()

    @cached_property
    def device_uuid(self) -> str:
        """The UUID of the device."""
        return str(self._gpu.facts().uuid)

    def defer_during(self, count_captures: Callable[[], int]) -> None:
        """Close no handle while ``count_captures()`` is above 0, because closing waits for the device."""
        self._count_captures = count_captures

    def ipc_handle(self, ptr: Ptr) -> bytes:
        """Return the handle of a plain segment. Raises CudaError if the driver refuses."""
        with self._gpu.relaxed():
            return self._gpu.ipc_handle(ptr)

    def share(
        self,
        ptr: int,
        size_bytes: int,
        segment_address: int,
        expandable_segment: ExpandableSegment | None,
    ) -> SharedMemory:
        """Describe memory in a plain segment, or in the pages of an expandable segment.

        Raises CudaError, or Unsupported if the pages have no handles.
        """
        handles: tuple[Handle, ...]
        page_bytes = 0
        if expandable_segment is None:
            handles = (self.ipc_handle(Ptr(segment_address)),)
        else:
            page_bytes = expandable_segment.page_bytes
            segment_address, page_count = expandable_segment.pages_containing(ptr, ptr + size_bytes)
            with self._gpu.relaxed():
                handles = self._export_pages(segment_address, page_bytes, page_count)
        return SharedMemory(
            size_bytes,
            ptr - segment_address,
            self.device_uuid,
            self._gpu.process,
            page_bytes,
            handles,
        )

    def open_memory(self, shared_memory: SharedMemory) -> ImportedHandle:
        """Open shared memory, unless it is open already. Raises the errors of ``open_shared``."""
        if shared_memory.process == self._gpu.process:
            raise UsageError(
                "this process shared the memory itself, and CUDA opens memory of other processes only",
                hint="use the shared address",
            )
        is_fabric = isinstance(shared_memory.handles[0], FabricHandle)
        if not is_fabric and shared_memory.device != self.device_uuid:
            raise UsageError(
                f"the memory belongs to device {shared_memory.device},"
                f" and this allocator to {self.device_uuid}",
                hint="open it with an allocator of that device",
            )
        self._close_unused_handles()
        key = (shared_memory.process, shared_memory.page_bytes, shared_memory.handles)
        with self._lock:
            imported_handle = self._imported_handles.get(key)
            if imported_handle is None:
                with self._gpu.relaxed():
                    ptr, closing_calls = self._open_handles(shared_memory)
                imported_handle = self._imported_handles[key] = ImportedHandle(ptr)
                weakref.finalize(imported_handle, self._close_later, closing_calls).atexit = False
        self._close_unused_handles()
        return imported_handle

    def close_unused(self) -> None:
        """Close the handles that no object uses any more.

        If the driver refuses, raises CudaError; the next call then tries again.
        """
        failure = self._close_unused_handles()
        if failure:
            raise failure

    def _close_unused_handles(self) -> CudaError | None:
        """Close the handles that no object uses any more, and return the last failure."""
        failure: CudaError | None = None
        for _ in range(len(self._unused_handles)):
            if self._count_captures() or not self._lock.acquire(blocking=False):
                break  # A later call closes the remaining handles.
            try:
                closing_calls = self._unused_handles.popleft() if self._unused_handles else deque()
                try:
                    with self._gpu.relaxed():
                        while closing_calls:
                            closing_calls[0]()
                            closing_calls.popleft()
                except CudaError as error:
                    if error.code not in _ERRORS_WITHOUT_CONTEXT:
                        self._unused_handles.append(closing_calls)
                        failure = error
            finally:
                self._lock.release()
        return failure

    def _close_later(self, closing_calls: _ClosingCalls) -> None:
        self._unused_handles.append(closing_calls)
        self._close_unused_handles()  # A finalizer cannot report a failure, but the next call tries again.

    def _open_handles(self, shared_memory: SharedMemory) -> tuple[int, _ClosingCalls]:
        """Open handles; return the address of the memory, and the calls that close the handles.

        The first call waits for the device: cuIpcCloseMemHandle and cuMemUnmap are not documented to wait for
        work that uses the memory.
        """
        gpu, first_handle = self._gpu, shared_memory.handles[0]
        if isinstance(first_handle, bytes):
            ptr = gpu.ipc_open(first_handle)
            return ptr, deque([gpu.sync, partial(gpu.ipc_close, ptr)])
        size_bytes = shared_memory.page_bytes * len(shared_memory.handles)
        ptr = gpu.reserve(size_bytes)
        unreserve = partial(gpu.unreserve, ptr, size_bytes)
        try:
            mapped_bytes = 0
            try:
                for handle in shared_memory.handles:
                    backing = self._gpu.import_backing(cast("ShareableHandle", handle))
                    try:
                        self._gpu.map(Ptr(ptr + mapped_bytes), backing, shared_memory.page_bytes)
                    finally:  # Mapped memory exists without its handle.
                        self._clean_up(partial(self._gpu.release, backing))
                    mapped_bytes += shared_memory.page_bytes
            except BaseException:
                if mapped_bytes:
                    self._clean_up(partial(self._gpu.unmap, ptr, mapped_bytes))
                raise
        except BaseException:
            self._clean_up(unreserve)
            raise
        return ptr, deque([gpu.sync, partial(gpu.unmap, ptr, size_bytes), unreserve])

    def _clean_up(self, cleanup_call: Callable[[], None]) -> None:
        """Perform a clean-up call now; if the driver refuses, repeat the call later."""
        try:
            cleanup_call()
        except CudaError:
            self._unused_handles.append(deque([cleanup_call]))


class OpenedMemory:
    """Memory of another process: open until ``close``, the end of a with block, or garbage collection.

    Created by ``open_shared`` of an allocator. The memory is the ``size_bytes`` bytes from ``ptr`` on. Arrays
    created by ``__cuda_array_interface__``, such as by ``cupy.asarray``, have uint8 elements and keep this
    object alive.
    """

    def __init__(
        self,
        imported_handle: ImportedHandle,
        shared_memory: SharedMemory,
        registry: IpcRegistry,
        owner: object,
    ) -> None:
        self.size_bytes = shared_memory.size_bytes
        self._offset_bytes = shared_memory.offset_bytes
        self._imported_handle: ImportedHandle | None = imported_handle
        self._registry = registry
        self._owner = owner  # The allocator; it keeps the device open.

    @property
    def ptr(self) -> Ptr:
        """The address in this process. Raises UsageError after ``close``."""
        if self._imported_handle is None:
            raise UsageError("this OpenedMemory is closed", hint="call open_shared again")
        return Ptr(self._imported_handle.ptr + self._offset_bytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.size_bytes,),
            "typestr": "|u1",
            "data": (self.ptr, False),
            "strides": None,
            "stream": None,  # The stream that wrote the memory is unknown in this process.
            "version": 3,
        }

    def close(self) -> None:
        """Close this object. The memory is unmapped when this process has no other OpenedMemory of it.

        A second call does nothing. Unmapping waits for the device; during a capture of the allocator a later
        call unmaps the memory. Raises CudaError if the driver refuses; a later call tries again.
        """
        if self._imported_handle is not None:
            self._imported_handle = None
            self._registry.close_unused()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
