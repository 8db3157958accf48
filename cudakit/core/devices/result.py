"""The devices of a machine: the JSON of ``cudakit devices``. Field order is the order of JSON keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from cudakit.gpu.api.facts import NOT_QUERIED, Field, Process
from cudakit.units import Unavailable


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU or MIG instance: the facts of NVML and CUDA, merged by UUID."""

    cuda_index: int | Unavailable  # CUDA index; null if the device is not visible to CUDA
    nvml_index: (
        int | Unavailable
    )  # NVML index, as in nvidia-smi; of a MIG instance, its number on its GPU
    parent: int | None  # the NVML index of the GPU of a MIG instance; null for a GPU
    uuid: str | Unavailable  # GPU-… or MIG-…, the same in every library
    pci_bus_id: str | Unavailable  # domain:bus:device.function
    name: str | Unavailable  # product name
    hidden: bool  # whether CUDA_VISIBLE_DEVICES hides it
    lost: bool  # whether the GPU has fallen off the bus
    notes: tuple[str, ...]  # unusual states: hidden, throttled, memory errors
    fields: Mapping[str, Field]  # facts and telemetry, by the names of --list-fields
    processes: tuple[Process, ...] | Unavailable | None  # with --processes; else null

    def field(self, name: str) -> Field:
        """Return a field by its name in ``--list-fields``."""
        if name in ("cuda_index", "nvml_index", "uuid", "pci_bus_id", "notes"):
            value: Field = getattr(self, name)
            return value
        return self.fields.get(name, NOT_QUERIED)


@dataclass(frozen=True, slots=True)
class Cuda:
    """The CUDA driver."""

    version: str | Unavailable  # the CUDA version that it supports
    library: str | Unavailable  # the path of libcuda
    error: CudaFailure | None  # the error of cuInit; null if it succeeded
    visible_devices: str | None  # CUDA_VISIBLE_DEVICES; null if it is not set
    device_order: str | None  # CUDA_DEVICE_ORDER; null if it is not set


@dataclass(frozen=True, slots=True)
class CudaFailure:
    """An error of cuInit."""

    code: int  # CUresult
    name: str  # CUDA_ERROR_...
    explanation: str  # the text of the driver


@dataclass(frozen=True, slots=True)
class Pair:
    """The connection of two GPUs."""

    first: int  # NVML index
    second: int  # NVML index, greater than ``first``
    path: str | Unavailable  # NV18, PIX, PXB, PHB, NODE or SYS, as in nvidia-smi topo
    nvlinks: int | Unavailable  # number of NVLinks between the two
    nvml_read: str | Unavailable  # reading the other's memory, by NVML: ok or the reason
    nvml_write: str | Unavailable  # writing to the other's memory
    nvml_atomics: str | Unavailable  # atomics on the other's memory
    cuda_access: bool | Unavailable  # peer access in both directions, by CUDA
    cuda_atomics: bool | Unavailable  # native atomics in both directions
    disagreement: str | None  # the difference if NVML and CUDA disagree


@dataclass(frozen=True, slots=True)
class DevicesResult:
    """The devices of a machine at one time."""

    schema: ClassVar[str] = "cudakit.devices/1"
    simulated: bool  # whether the GPUs are simulated
    time_ns: int  # since 1970
    driver_version: str | Unavailable  # of the kernel driver
    nvml_version: str | Unavailable  # of libnvidia-ml
    cuda: Cuda | Unavailable  # null if the query failed
    devices: tuple[Device, ...]  # in NVML's order, a GPU before its MIG instances
    pairs: tuple[Pair, ...] | None  # with --topology; else null
    notes: tuple[str, ...]  # problems of the whole machine

    @property
    def visible(self) -> tuple[Device, ...]:
        """The visible devices, by CUDA index."""
        with_index = [device for device in self.devices if isinstance(device.cuda_index, int)]
        return tuple(sorted(with_index, key=lambda device: int(str(device.cuda_index))))


@dataclass(frozen=True, slots=True)
class FieldsResult:
    """The fields of each device that ``--fields`` selects."""

    schema: ClassVar[str] = "cudakit.devices.fields/1"
    simulated: bool  # whether the GPUs are simulated
    time_ns: int  # since 1970
    devices: tuple[Mapping[str, Field], ...]  # one row for each device


@dataclass(frozen=True, slots=True)
class SelectResult:
    """The devices that ``--select`` selected."""

    schema: ClassVar[str] = "cudakit.devices.select/1"
    simulated: bool  # whether the GPUs are simulated
    visible_devices: str  # the value for CUDA_VISIBLE_DEVICES
    devices: tuple[Device, ...]  # the selected devices, in this order
