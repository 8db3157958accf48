"""What can be known of GPUs without using one: facts that stay, telemetry that moves.

NVML (the management library) and CUDA (the driver) each know a part, and number devices differently;
they are kept apart here and merged by UUID in ``core/devices``. A field is a value, or Unavailable with
the reason: never 0 in place of an unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from cudakit.units import Unavailable

Scalar: TypeAlias = int | float | str | bool
Field: TypeAlias = Scalar | tuple[Scalar, ...] | Unavailable


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device as one library sees it. Names of fields carry their units."""

    index: int  # the number that this library gives the device
    uuid: str | Unavailable  # "GPU-..." or "MIG-..."
    pci_bus_id: str | Unavailable  # "0000:65:00.0"
    fields: Mapping[str, Field]  # all else, by name; core/devices/fields.py describes each


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What moves: clocks, power, temperature, utilization, memory in use."""

    time_ns: int
    fields: Mapping[str, Field]


@dataclass(frozen=True, slots=True)
class Process:
    """A process that uses a device; its number may be of another namespace."""

    pid: int
    kind: str  # "compute", "graphics"
    used_bytes: int | Unavailable
    name: str | Unavailable


@dataclass(frozen=True, slots=True)
class Link:
    """How two devices are connected, as NVML says it (``nvidia-smi topo -m``, ``-p2p``)."""

    first: int  # NVML index
    second: int
    path: str  # "NV18", "PIX", "PXB", "PHB", "NODE", "SYS"
    nvlinks: int | Unavailable
    p2p_read: str | Unavailable  # "ok", or NVML's word for why not
    p2p_write: str | Unavailable


@dataclass(frozen=True, slots=True)
class CudaView:
    """What the CUDA driver says, asked in a child process so that this one stays able to fork."""

    driver_version: tuple[int, int] | Unavailable  # of CUDA that the driver supports
    devices: tuple[DeviceFacts, ...]  # in CUDA's order, what CUDA_VISIBLE_DEVICES leaves
    hidden: tuple[DeviceFacts, ...]  # what it hides; index -1
    peer_access: tuple[tuple[int, int], ...]  # pairs of ordinals that can
    error: tuple[int, str, str] | None  # code, name and explanation of a failed cuInit
    libcuda: str | Unavailable  # path of the library that answered


@dataclass(frozen=True, slots=True)
class NvmlView:
    """What NVML says."""

    driver_version: str | Unavailable
    nvml_version: str | Unavailable
    devices: tuple[DeviceFacts, ...]
    links: tuple[Link, ...]


class Machine(Protocol):
    """The GPUs of one machine, looked at and never touched."""

    @property
    def simulated(self) -> bool: ...

    def nvml(self) -> NvmlView | Unavailable: ...
    def cuda(self) -> CudaView | Unavailable: ...
    def telemetry(self, nvml_index: int) -> Telemetry | Unavailable: ...
    def processes(self, nvml_index: int) -> tuple[Process, ...] | Unavailable: ...
