"""What is true of the devices of a machine. Field order is the order of JSON keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from cudakit.gpu.api.facts import NOT_ASKED, Field, Process
from cudakit.units import Unavailable


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU or MIG instance: what NVML and CUDA know of it, merged by UUID."""

    cuda_index: int | Unavailable  # what CUDA programs call it; null where CUDA does not show it
    nvml_index: int | Unavailable  # what nvidia-smi calls it; a MIG instance's is of its GPU
    parent: int | None  # of a MIG instance: the NVML index of its GPU
    uuid: str | Unavailable  # the same for all who ask
    pci_bus_id: str | Unavailable  # domain:bus:device.function
    name: str | Unavailable  # of the product
    hidden: bool  # whether CUDA_VISIBLE_DEVICES hides it
    lost: bool  # whether NVML can no longer reach it
    notes: tuple[str, ...]  # what is worth knowing
    fields: Mapping[str, Field]  # facts and telemetry, by the names of --list-fields
    processes: tuple[Process, ...] | Unavailable | None  # who uses it; null where not asked for

    def field(self, name: str) -> Field:
        """Return a field by its name, also one that stands beside ``fields``."""
        if name in ("cuda_index", "nvml_index", "uuid", "pci_bus_id", "notes"):
            value: Field = getattr(self, name)
            return value
        return self.fields.get(name, NOT_ASKED)


@dataclass(frozen=True, slots=True)
class Cuda:
    """What the CUDA driver says of itself."""

    version: str | Unavailable  # of CUDA that it supports
    library: str | Unavailable  # the file of libcuda that answered
    error: CudaFailure | None  # why it cannot start
    visible_devices: str | None  # CUDA_VISIBLE_DEVICES; null where it is not set
    device_order: str | None  # CUDA_DEVICE_ORDER; null where it is not set


@dataclass(frozen=True, slots=True)
class CudaFailure:
    """An error of cuInit."""

    code: int  # CUresult
    name: str  # CUDA_ERROR_...
    explanation: str  # in the driver's words


@dataclass(frozen=True, slots=True)
class Pair:
    """How two GPUs reach each other, by their NVML indices."""

    first: int  # NVML index
    second: int  # NVML index, the greater one
    path: str | Unavailable  # NV18, PIX, PXB, PHB, NODE or SYS, as nvidia-smi topo says
    nvlinks: int | Unavailable  # NVLinks between them
    nvml_read: str | Unavailable  # ok, or why NVML says that neither reads the other's memory
    nvml_write: str | Unavailable  # the same of writing
    nvml_atomics: str | Unavailable  # the same of atomics
    cuda_access: bool | Unavailable  # whether CUDA says that each can access the other
    cuda_atomics: bool | Unavailable  # whether atomics work at full speed
    disagreement: str | None  # where NVML and CUDA do not say the same


@dataclass(frozen=True, slots=True)
class DevicesResult:
    """The devices of a machine at one time."""

    schema: ClassVar[str] = "cudakit.devices/1"
    simulated: bool  # whether this is a recorded machine and not the one here
    time_ns: int  # since 1970
    driver_version: str | Unavailable  # of the kernel driver
    nvml_version: str | Unavailable  # of the management library
    cuda: Cuda | Unavailable  # the driver; null where it cannot be asked
    devices: tuple[Device, ...]  # in NVML's order, a GPU before its MIG instances
    pairs: tuple[Pair, ...] | None  # the topology; null where not asked for
    notes: tuple[str, ...]  # of the machine as a whole

    @property
    def visible(self) -> tuple[Device, ...]:
        """The devices that CUDA programs get, in CUDA's order."""
        shown = [device for device in self.devices if isinstance(device.cuda_index, int)]
        return tuple(sorted(shown, key=lambda device: int(str(device.cuda_index))))


@dataclass(frozen=True, slots=True)
class FieldsResult:
    """Some fields of each device, as ``--fields`` asks."""

    schema: ClassVar[str] = "cudakit.devices.fields/1"
    simulated: bool  # whether this is a recorded machine and not the one here
    time_ns: int  # since 1970
    devices: tuple[Mapping[str, Field], ...]  # a row for each device


@dataclass(frozen=True, slots=True)
class SelectResult:
    """The devices that ``--select`` chose."""

    schema: ClassVar[str] = "cudakit.devices.select/1"
    simulated: bool  # whether this is a recorded machine and not the one here
    visible_devices: str  # the value for CUDA_VISIBLE_DEVICES
    devices: tuple[Device, ...]  # those it names, in its order
