"""Parameter and result types of device calls: addresses, ids, launch shapes, sizes, shareable handles.

An id is valid only on the device that returned it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NewType, TypeAlias

if TYPE_CHECKING:
    import numpy as np  # slow to import, and not needed by commands that launch no kernel

Ptr = NewType("Ptr", int)  # device or host address
Backing = NewType("Backing", int)  # reference to physical memory
Stream = NewType("Stream", int)
Event = NewType("Event", int)
Module = NewType("Module", int)
Kernel = NewType("Kernel", int)
Graph = NewType("Graph", int)
GraphExec = NewType("GraphExec", int)
GraphNode = NewType("GraphNode", int)

# CU_STREAM_LEGACY and CU_STREAM_PER_THREAD (CUDA Driver API, data types).
LEGACY = Stream(1)
PER_THREAD = Stream(2)

# A kernel argument: an address, or a numpy scalar, which has a fixed size.
Argument: TypeAlias = "Ptr | np.generic"
Dim3: TypeAlias = tuple[int, int, int]

# Size of a CUipcMemHandle and of a CUmemFabricHandle (CUDA Driver API, CU_IPC_HANDLE_SIZE).
HANDLE_BYTES = 64

# Kinds of shareable handles of physical memory (CUDA Driver API, CUmemAllocationHandleType).
HandleKind: TypeAlias = Literal["fabric", "descriptor"]


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Free and total bytes of a device's memory (cuMemGetInfo)."""

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process of this machine; ``started`` distinguishes processes that reuse a pid."""

    pid: int
    started: int  # start time in clock ticks since boot (proc_pid_stat(5), starttime)


@dataclass(frozen=True, slots=True)
class DescriptorHandle:
    """A shareable handle: a POSIX file descriptor of the exporting process."""

    process: ProcessId
    number: int  # file descriptor number in the exporting process
    serial: int  # unique id of the export, because descriptor numbers are reused


@dataclass(frozen=True, slots=True)
class FabricHandle:
    """A shareable handle that all processes on the NVLink fabric can import, also on other machines."""

    data: bytes


ShareableHandle: TypeAlias = DescriptorHandle | FabricHandle


@dataclass(frozen=True, slots=True)
class IpcHandle:
    """The IPC handle of a cuMemAlloc allocation, and an offset into the allocation."""

    data: bytes  # content of a CUipcMemHandle
    offset_bytes: int
