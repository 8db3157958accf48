"""Facts, telemetry, processes and links of GPUs, as NVML and the CUDA driver report them.

NVML and CUDA number devices differently; their views are separate here and merged by UUID in
``devices``. A field is a value, or Unavailable with the reason; unknown values are never 0.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from cudakit.units import Unavailable

Scalar: TypeAlias = int | float | str | bool
Field: TypeAlias = Scalar | tuple[Scalar, ...] | Unavailable

_NOT_RECORDED = Unavailable("not simulated")
NOT_QUERIED = Unavailable("not queried")


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The facts of a device from one library. Field names carry their units."""

    # Index of the device in CUDA or NVML; for a MIG instance, the index in its GPU; -1 without an index.
    index: int
    uuid: str | Unavailable  # "GPU-..." or "MIG-..."
    # "0000:65:00.0" in lower case; a MIG instance has the address of its GPU.
    pci_bus_id: str | Unavailable
    fields: Mapping[str, Field]  # other fields by name; see devices/fields
    parent: int | None = None  # NVML index of the GPU of a MIG instance


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Values of a device that change: clocks, power, temperature, utilization, memory in use."""

    time_ns: int  # time of the query in ns since 1970-01-01
    fields: Mapping[str, Field]


@dataclass(frozen=True, slots=True)
class Process:
    """A process that uses a device; ``pid`` may belong to another PID namespace."""

    pid: int  # process id
    kind: str  # "compute", "graphics"
    used_bytes: int | Unavailable  # device memory that the process uses
    name: str | Unavailable  # the command line
    user: str | Unavailable  # name of the user who runs the process
    sm_percent: int | Unavailable = _NOT_RECORDED  # share of time in which the process ran kernels
    runtime_s: float | Unavailable = _NOT_RECORDED  # seconds since the process started


@dataclass(frozen=True, slots=True)
class Link:
    """The connection of two devices according to NVML (``nvidia-smi topo -m``, ``-p2p``)."""

    first: int  # NVML index of one device
    second: int  # NVML index of the other device
    # Topology as nvidia-smi abbreviates it: "NV18", "PIX", "PXB", "PHB", "NODE", "SYS".
    path: str | Unavailable
    nvlinks: int | Unavailable
    p2p_read: str | Unavailable  # "ok", or NVML's reason
    p2p_write: str | Unavailable
    p2p_atomics: str | Unavailable


@dataclass(frozen=True, slots=True)
class CudaView:
    """The devices that the CUDA driver reports, queried in a child process so that this process can fork."""

    driver_version: tuple[int, int] | Unavailable  # newest CUDA version that the driver supports
    devices: tuple[DeviceFacts, ...]  # visible devices in CUDA's order
    # Devices hidden by CUDA_VISIBLE_DEVICES, in CUDA's order without that variable; their index is -1.
    hidden: tuple[DeviceFacts, ...]
    peer_access: tuple[tuple[int, int], ...]  # pairs of ordinals with peer access
    peer_atomics: tuple[tuple[int, int], ...]  # pairs of ordinals with native peer atomics
    error: tuple[int, str, str] | None  # code, name and explanation of a failed cuInit
    libcuda: str | Unavailable  # path of the loaded libcuda
    visible_devices: str | None  # CUDA_VISIBLE_DEVICES at the query
    device_order: str | None  # CUDA_DEVICE_ORDER at the query
    order: tuple[str, ...] = ()  # UUIDs of all devices in CUDA's order without CUDA_VISIBLE_DEVICES


@dataclass(frozen=True, slots=True)
class NvmlView:
    """The devices that NVML reports."""

    driver_version: str | Unavailable
    nvml_version: str | Unavailable
    devices: tuple[DeviceFacts, ...]  # each GPU, followed by its MIG instances
    links: tuple[Link, ...]  # one per pair of GPUs, lower index first; empty unless requested


class Machine(Protocol):
    """The GPUs of a machine, observed without creating a context. Methods take devices of ``nvml()``."""

    @property
    def simulated(self) -> bool:
        """Whether the GPUs are simulated."""

    def nvml(self, *, links: bool = False) -> NvmlView | Unavailable:
        """Return the NVML view; ``links`` adds the connections between GPUs, which takes longer."""

    def cuda(self) -> CudaView | Unavailable:
        """Return the CUDA driver view, after waiting for the child process that queries it."""

    def telemetry(
        self, device: DeviceFacts, names: Collection[str] = ()
    ) -> Telemetry | Unavailable:
        """Read all telemetry fields, or only ``names``; Unavailable if the device is lost."""

    def activity(self, device: DeviceFacts, names: Collection[str] = ()) -> Telemetry | Unavailable:
        """Read the activity since the previous call (NVML GPM: Hopper and newer)."""

    def processes(self, device: DeviceFacts) -> tuple[Process, ...] | Unavailable:
        """List the processes that use the device."""


def throttling_cause(reason: str) -> str:
    """Return the name of a clock event reason in reports: "power limit", or NVML's name of another reason."""
    return "power limit" if reason == "software power cap" else reason
