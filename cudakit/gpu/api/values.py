"""Plain values that calls on a device take and return: addresses, ids, launch shapes, sizes, shared memory.

An id is a number that means something only to the device that returned it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NewType, TypeAlias

if TYPE_CHECKING:
    import numpy as np  # slow to import; commands that launch no kernel do without it

Ptr = NewType("Ptr", int)  # an address of the device, or of host memory
Backing = NewType("Backing", int)  # a reference to physical memory that can be mapped
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

# A kernel argument: a Ptr is passed as an address, a numpy scalar with its own width.
Argument: TypeAlias = "Ptr | np.generic"
Dim3: TypeAlias = tuple[int, int, int]

# Bytes of a CUipcMemHandle and of a CUmemFabricHandle (CUDA Driver API, CU_IPC_HANDLE_SIZE).
HANDLE_BYTES = 64

# Kinds of handles that physical memory is exported by (CUDA Driver API, CUmemAllocationHandleType).
HandleKind: TypeAlias = Literal["fabric", "descriptor"]


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Free and total bytes of a device's memory (cuMemGetInfo)."""

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process of this machine; a later process with the same number differs in ``started``."""

    pid: int
    started: int  # in clock ticks since the machine was (proc_pid_stat(5), starttime)


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Physical memory as a file descriptor of the process that exports it."""

    process: ProcessId
    number: int
    serial: int  # of the export: a number is reused after it was closed


@dataclass(frozen=True, slots=True)
class Fabric:
    """Physical memory as a handle for every process of the NVLink fabric, other machines included."""

    data: bytes


Exported: TypeAlias = Descriptor | Fabric


@dataclass(frozen=True, slots=True)
class IpcHandle:
    """The handle of an allocation of cuMemAlloc for other processes, and an offset into it."""

    data: bytes  # of a CUipcMemHandle
    offset_bytes: int
