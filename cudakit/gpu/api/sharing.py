"""What one process gives to another so that both use the same memory of a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

# Bytes of a CUipcMemHandle and of a CUmemFabricHandle (CUDA Driver API, CU_IPC_HANDLE_SIZE).
HANDLE_BYTES = 64

# How physical memory can be exported (CUDA Driver API, CUmemAllocationHandleType).
HandleKind: TypeAlias = Literal["fabric", "descriptor"]


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process of this machine, and no later one with the same number."""

    pid: int
    started: int  # in clock ticks since the machine was (proc_pid_stat(5), starttime)


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Physical memory as a file descriptor of the process that exports it."""

    process: ProcessId
    number: int
    serial: int  # of the export: a process gives a number again once it was closed


@dataclass(frozen=True, slots=True)
class Fabric:
    """Physical memory as a handle for every process of the NVLink fabric, of other machines too."""

    data: bytes


Exported: TypeAlias = Descriptor | Fabric


@dataclass(frozen=True, slots=True)
class IpcHandle:
    """An allocation of cuMemAlloc for other processes, and a place in it."""

    data: bytes  # of a CUipcMemHandle
    offset_bytes: int
