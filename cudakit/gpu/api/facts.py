"""Observations of GPUs without using one: constant facts, telemetry, processes and links.

NVML (the management library) and CUDA (the driver) each know a part, and number devices differently; the
views are separate here and merged by UUID in ``core/devices``. A field is a value, or Unavailable with the
reason: never 0 in place of an unknown value.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from cudakit.units import Unavailable

Scalar: TypeAlias = int | float | str | bool
Field: TypeAlias = Scalar | tuple[Scalar, ...] | Unavailable

NOT_ASKED = Unavailable("not queried")


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device as one library describes it. Names of fields carry their units."""

    index: int  # of this library, -1 for none; that of a MIG instance is relative to its GPU
    uuid: str | Unavailable  # "GPU-..." or "MIG-..."
    pci_bus_id: str | Unavailable  # "0000:65:00.0", in lower case; of a MIG instance, its GPU's
    fields: Mapping[str, Field]  # everything else, by the names of core/devices/fields
    parent: int | None = None  # of a MIG instance: the NVML index of its GPU


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Changing values: clocks, power, temperature, utilization, memory in use."""

    time_ns: int  # since 1970
    fields: Mapping[str, Field]


@dataclass(frozen=True, slots=True)
class Process:
    """A process that uses a device; its number may be of another namespace."""

    pid: int
    kind: str  # "compute", "graphics"
    used_bytes: int | Unavailable
    name: str | Unavailable
    user: str | Unavailable


@dataclass(frozen=True, slots=True)
class Link:
    """The connection of two devices according to NVML (``nvidia-smi topo -m``, ``-p2p``)."""

    first: int  # NVML index
    second: int
    path: str | Unavailable  # "NV18", "PIX", "PXB", "PHB", "NODE", "SYS"
    nvlinks: int | Unavailable
    p2p_read: str | Unavailable  # "ok", or NVML's reason
    p2p_write: str | Unavailable
    p2p_atomics: str | Unavailable


@dataclass(frozen=True, slots=True)
class CudaView:
    """The answer of the CUDA driver, queried in a child process so that this one can still fork."""

    driver_version: tuple[int, int] | Unavailable  # of the CUDA that the driver supports
    devices: tuple[DeviceFacts, ...]  # visible devices in CUDA's order
    hidden: tuple[
        DeviceFacts, ...
    ]  # devices hidden by CUDA_VISIBLE_DEVICES, in CUDA's order without it; index -1
    peer_access: tuple[tuple[int, int], ...]  # pairs of ordinals with peer access
    peer_atomics: tuple[tuple[int, int], ...]  # pairs of ordinals with native peer atomics
    error: tuple[int, str, str] | None  # code, name and explanation of a failed cuInit
    libcuda: str | Unavailable  # path of the library
    visible_devices: str | None  # CUDA_VISIBLE_DEVICES when asked
    device_order: str | None  # CUDA_DEVICE_ORDER when asked
    order: tuple[str, ...] = ()  # UUIDs of all devices in CUDA's order without CUDA_VISIBLE_DEVICES


@dataclass(frozen=True, slots=True)
class NvmlView:
    """The answer of NVML."""

    driver_version: str | Unavailable
    nvml_version: str | Unavailable
    devices: tuple[DeviceFacts, ...]  # each GPU, followed by its MIG instances
    links: tuple[Link, ...]  # each pair of GPUs once, the lower index first; empty unless requested


class Machine(Protocol):
    """The GPUs of one machine, observed without using them. A ``device`` is one of ``nvml()``."""

    @property
    def simulated(self) -> bool:
        """Whether the GPUs are simulated."""
        ...

    def nvml(self, *, links: bool = False) -> NvmlView | Unavailable:
        """Return the view of NVML; ``links`` adds the connections between GPUs, which takes longer."""
        ...

    def cuda(self) -> CudaView | Unavailable:
        """Return the view of the CUDA driver, waiting for the child process that queries it."""
        ...

    def telemetry(
        self, device: DeviceFacts, names: Collection[str] = ()
    ) -> Telemetry | Unavailable:
        """Read the telemetry, or ``names`` of it; Unavailable as a whole if the device is lost."""
        ...

    def activity(self, device: DeviceFacts, names: Collection[str] = ()) -> Telemetry | Unavailable:
        """Read the activity since the last such call (NVML's GPM: Hopper and newer)."""
        ...

    def processes(self, device: DeviceFacts) -> tuple[Process, ...] | Unavailable:
        """List the processes that use the device."""
        ...
