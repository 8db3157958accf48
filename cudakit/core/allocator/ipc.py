"""Memory shared with other processes: exported and imported handles, and the value that is sent.

A handle is opened once, however many objects use it, and closed after the last of them. Source: PyTorch's
c10/cuda/CUDACachingAllocator.cpp (getIpcDevPtr, ExpandableSegment::fromShared).
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
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias, cast

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

_BEYOND = 1 << 63  # above every size and address
_PIDS = 1 << 31  # above every process id: pid_t is an int

_KIND = re.compile(r"([a-z]+):([0-9a-f]+)(?::([0-9]{1,19}))?")

# The driver's answers if nothing is open any more: CUDA_ERROR_NOT_INITIALIZED, in a forked child, and
# CUDA_ERROR_CONTEXT_IS_DESTROYED (CUDA Driver API, CUresult).
_NOTHING_IS_OPEN = (3, 709)

# The remaining steps of closing a handle, in order.
_Steps: TypeAlias = "deque[Callable[[], None]]"

# Exports the pages of an expandable segment: address, bytes of a page, number of pages.
_ExportPages: TypeAlias = "Callable[[int, int, int], tuple[ShareableHandle, ...]]"


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Part of an allocation, for other processes of the machine to open; can be pickled, and written as text.

    It describes the memory, and keeps neither the allocation nor the process alive. Its receiver can access
    everything in the same segment or pages: send it only to processes that may do so.
    """

    size_bytes: int  # from the shared address to the end of the requested bytes
    offset_bytes: int  # from the beginning of the opened memory
    device: str  # its UUID
    process: ProcessId  # the sharing process
    page_bytes: int  # of each handle; 0: one handle, of a whole segment
    handles: tuple[Handle, ...]  # of the pages, in the order of their addresses

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
                "handles": [_written(handle) for handle in self.handles],
            }
        )

    @classmethod
    def from_text(cls, text: str) -> SharedMemory:
        """Return the value that ``as_text`` wrote. Raises InputError for other texts and versions."""
        fields = _Fields(text)
        process = ProcessId(fields.number("pid", _PIDS), fields.number("started"))
        shared = cls(
            fields.number("size_bytes"),
            fields.number("offset_bytes"),
            fields.text("device"),
            process,
            fields.number("page_bytes"),
            tuple(_read(each, process) for each in fields.texts("handles")),
        )
        shared._check()
        return shared

    def __reduce__(self) -> tuple[Callable[[str], SharedMemory], tuple[str]]:
        return SharedMemory.from_text, (self.as_text(),)

    def _check(self) -> None:
        """Raise InputError for handles and sizes that no allocator shares."""
        kinds = {type(handle) for handle in self.handles}
        if self.page_bytes:
            opened_bytes = len(self.handles) * self.page_bytes
            fits = self.offset_bytes + self.size_bytes <= opened_bytes < _BEYOND
            right = fits and len(kinds) == 1 and bytes not in kinds
        else:
            right = kinds == {bytes} and len(self.handles) == 1
        if not right or not self.size_bytes:
            kind = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise _refused("handles", f"{len(self.handles)} ({kind}) for {self.size_bytes} bytes")


class _Fields:
    """The fields of the text; reading one raises InputError if it is invalid."""

    def __init__(self, text: str) -> None:
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
        self._fields = fields

    def number(self, name: str, beyond: int = _BEYOND) -> int:
        value = self._fields.get(name)
        if type(value) is not int or not 0 <= value < beyond:
            raise _refused(name, value)
        return value

    def text(self, name: str) -> str:
        value = self._fields.get(name)
        if not isinstance(value, str):
            raise _refused(name, value)
        return value

    def texts(self, name: str) -> list[str]:
        value = self._fields.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise _refused(name, value)
        return value


def _written(handle: Handle) -> str:
    match handle:
        case DescriptorHandle():
            return f"fd:{handle.number:x}:{handle.serial}"
        case FabricHandle():
            return f"fabric:{handle.data.hex()}"
        case _:
            return f"ipc:{handle.hex()}"


def _read(text: str, process: ProcessId) -> Handle:
    match = _KIND.fullmatch(text)
    if match is None:
        raise _refused("handles", text)
    kind, digits, serial = match.groups()
    if kind == "fd" and serial and len(digits) <= 8:
        return DescriptorHandle(process, int(digits, 16), int(serial))
    if serial or len(digits) != 2 * HANDLE_BYTES or kind not in ("ipc", "fabric"):
        raise _refused("handles", text)
    return bytes.fromhex(digits) if kind == "ipc" else FabricHandle(bytes.fromhex(digits))


def _refused(name: str, value: Any) -> InputError:
    return InputError(
        f"invalid {name} in shared memory: {value!r:.60}", hint="send the text unchanged"
    )


class ImportedHandle:
    """Memory of another process that is open in this one, and closed when this object is collected."""

    __slots__ = ("__weakref__", "ptr")

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class IpcDevice(DeviceInfo, VirtualMemory, Ipc, Streams, Protocol):
    """A device whose memory is shared with other processes."""


class IpcRegistry:
    """The exported and the imported handles of one device. Threads and finalizers may call it."""

    def __init__(self, gpu: IpcDevice, export_pages: _ExportPages) -> None:
        self._gpu = gpu
        self._export_pages = export_pages
        self._captures: Callable[[], int] = lambda: 0
        self._lock = threading.Lock()
        self._imported = weakref.WeakValueDictionary[tuple[object, ...], ImportedHandle]()
        self._unused = deque[_Steps]()

    @property
    def process(self) -> ProcessId:
        """This process."""
        return self._gpu.process

    @cached_property
    def device(self) -> str:
        """The UUID of the device."""
        return str(self._gpu.facts().uuid)

    def defer_during(self, captures: Callable[[], int]) -> None:
        """Close nothing while ``captures`` returns a number above 0: closing waits for the device."""
        self._captures = captures

    def ipc_handle(self, ptr: Ptr) -> bytes:
        """Return the handle of a plain segment. Raises CudaError."""
        with self._gpu.relaxed():
            return self._gpu.ipc_handle(ptr)

    def export(self, ptr: int, page_bytes: int, count: int) -> tuple[ShareableHandle, ...]:
        """Return the handles of pages. Raises CudaError, or Unsupported if they have none."""
        with self._gpu.relaxed():
            return self._export_pages(ptr, page_bytes, count)

    def open(self, shared: SharedMemory) -> ImportedHandle:
        """Open memory, unless it is open already. Raises as ``open_shared`` of an allocator."""
        self._check(shared)
        self._sweep()
        key = (shared.process, shared.page_bytes, shared.handles)
        with self._lock:
            imported = self._imported.get(key)
            if imported is None:
                with self._gpu.relaxed():
                    ptr, steps = self._open(shared)
                imported = self._imported[key] = ImportedHandle(ptr)
                weakref.finalize(imported, self._close_later, steps).atexit = False
        self._sweep()
        return imported

    def close_unused(self) -> None:
        """Close the handles that are not used any more. On CudaError the next call tries again."""
        failure = self._sweep()
        if failure:
            raise failure

    def _sweep(self) -> CudaError | None:
        """Close the handles that are not used any more, and return the last failure."""
        failure: CudaError | None = None
        for _ in range(len(self._unused)):
            if self._captures() or not self._lock.acquire(blocking=False):
                break  # a later call closes the rest
            try:
                failure = self._close_one() or failure
            finally:
                self._lock.release()
        return failure

    def _close_one(self) -> CudaError | None:
        try:
            steps = self._unused.popleft()
        except IndexError:
            return None
        try:
            with self._gpu.relaxed():
                while steps:
                    steps[0]()
                    steps.popleft()
        except CudaError as error:
            if error.code in _NOTHING_IS_OPEN:
                return None
            self._unused.append(steps)
            return error
        return None

    def _close_later(self, steps: _Steps) -> None:
        self._unused.append(steps)
        self._sweep()  # a finalizer cannot report a failure; the next call tries again

    def _check(self, shared: SharedMemory) -> None:
        if shared.process == self.process:
            raise UsageError(
                "this process shared the memory itself, and CUDA opens memory of other processes only",
                hint="use the shared address",
            )
        if not isinstance(shared.handles[0], FabricHandle) and shared.device != self.device:
            raise UsageError(
                f"the memory belongs to device {shared.device}, and this allocator to {self.device}",
                hint="open it with an allocator of that device",
            )

    def _open(self, shared: SharedMemory) -> tuple[int, _Steps]:
        """Return the address, and the steps that close it.

        The first step waits for the device: cuIpcCloseMemHandle and cuMemUnmap are not documented to wait for
        work that uses the memory.
        """
        gpu, first = self._gpu, shared.handles[0]
        if isinstance(first, bytes):
            ptr = gpu.ipc_open(first)
            return ptr, deque([gpu.sync, partial(gpu.ipc_close, ptr)])
        size_bytes = shared.page_bytes * len(shared.handles)
        ptr = gpu.reserve(size_bytes)
        unreserve = partial(gpu.unreserve, ptr, size_bytes)
        try:
            self._map(ptr, shared.page_bytes, shared.handles)
        except BaseException:
            self._undo(unreserve)
            raise
        return ptr, deque([gpu.sync, partial(gpu.unmap, ptr, size_bytes), unreserve])

    def _map(self, ptr: Ptr, page_bytes: int, handles: tuple[Handle, ...]) -> None:
        mapped = 0
        try:
            for handle in handles:
                self._map_one(Ptr(ptr + mapped), page_bytes, handle)
                mapped += page_bytes
        except BaseException:
            if mapped:
                self._undo(partial(self._gpu.unmap, ptr, mapped))
            raise

    def _map_one(self, ptr: Ptr, page_bytes: int, handle: Handle) -> None:
        backing = self._gpu.import_backing(cast("ShareableHandle", handle))
        try:
            self._gpu.map(ptr, backing, page_bytes)
        finally:  # the memory lives as long as the mapping
            self._undo(partial(self._gpu.release, backing))

    def _undo(self, step: Callable[[], None]) -> None:
        """Perform a step now, or later if the driver refuses."""
        try:
            step()
        except CudaError:
            self._unused.append(deque([step]))


class OpenedMemory:
    """Memory of another process, until ``close``, the end of a with block, or the end of this object.

    Created by ``open_shared`` of an allocator. The memory has ``size_bytes`` from ``ptr`` on. Arrays created
    by ``__cuda_array_interface__``, such as by ``cupy.asarray``, have uint8 elements and keep this object
    alive.
    """

    def __init__(
        self, imported: ImportedHandle, shared: SharedMemory, registry: IpcRegistry, owner: object
    ) -> None:
        self.size_bytes = shared.size_bytes
        self._offset_bytes = shared.offset_bytes
        self._imported: ImportedHandle | None = imported
        self._registry = registry
        self._owner = owner  # the allocator, which keeps its device open

    @property
    def ptr(self) -> Ptr:
        """The address in this process. Raises UsageError after ``close``."""
        if self._imported is None:
            raise UsageError("this OpenedMemory is closed", hint="call open_shared again")
        return Ptr(self._imported.ptr + self._offset_bytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.size_bytes,),
            "typestr": "|u1",
            "data": (self.ptr, False),
            "strides": None,
            "stream": None,  # unknown in this process
            "version": 3,
        }

    def close(self) -> None:
        """Close the memory; it is unmapped when every OpenedMemory of it in this process is closed.

        Closing twice does nothing. Unmapping waits for the device; during a capture of the allocator it is
        left to a later call. Raises CudaError if the driver refuses; a later call tries again.
        """
        if self._imported is not None:
            self._imported = None
            self._registry.close_unused()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
