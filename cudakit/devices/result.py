"""The devices of a machine: the JSON of ``cudakit devices``. Field order is the order of JSON keys."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from cudakit.errors import UsageError, one_of
from cudakit.gpu.api.facts import (
    NOT_QUERIED,
    Attribute,
    Field,
    FieldInfo,
    Process,
    attributes,
    nvml_fields,
)
from cudakit.units import Unavailable


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU or MIG instance: the facts of NVML and CUDA, merged by UUID."""

    cuda_index: int | Unavailable  # CUDA index; null if the device is not visible to CUDA
    nvml_index: (
        int | Unavailable
    )  # NVML index, as in nvidia-smi; for a MIG instance its number within the GPU
    parent: int | None  # NVML index of the GPU of a MIG instance; null for a GPU
    uuid: str | Unavailable  # UUID (GPU-… or MIG-…), the same in every library
    pci_bus_id: str | Unavailable  # PCI address: domain:bus:device.function
    name: str | Unavailable  # product name
    hidden: bool  # whether CUDA_VISIBLE_DEVICES hides the device
    lost: bool  # whether the GPU has fallen off the bus
    notes: tuple[str, ...]  # unusual states: hidden, throttled, memory errors
    fields: Mapping[str, Field]  # facts and telemetry, by the names of --list-fields
    processes: tuple[Process, ...] | Unavailable | None  # processes; null without --processes

    def field(self, name: str) -> Field:
        """Return a field by its name in ``--list-fields``."""
        if name in ("cuda_index", "nvml_index", "uuid", "pci_bus_id", "notes"):
            field_value: Field = getattr(self, name)
            return field_value
        return self.fields.get(name, NOT_QUERIED)

    @property
    def total_memory(self) -> Field:
        """The size of the memory in bytes, or else the size that CUDA can use."""
        total = self.field("memory_total_bytes")
        return self.field("usable_memory_bytes") if isinstance(total, Unavailable) else total


@dataclass(frozen=True, slots=True)
class Cuda:
    """The CUDA driver."""

    version: str | Unavailable  # CUDA version that the driver supports
    library: str | Unavailable  # path of libcuda
    error: CudaFailure | None  # error of cuInit; null if cuInit succeeded
    visible_devices: str | None  # value of CUDA_VISIBLE_DEVICES; null if it is not set
    device_order: str | None  # value of CUDA_DEVICE_ORDER; null if it is not set


@dataclass(frozen=True, slots=True)
class CudaFailure:
    """An error of cuInit."""

    code: int  # error code (CUresult)
    name: str  # name of the error: CUDA_ERROR_...
    explanation: str  # description of the error by the driver


@dataclass(frozen=True, slots=True)
class Pair:
    """The connection of two GPUs."""

    first: int  # NVML index of the first GPU
    second: int  # NVML index of the second GPU, greater than ``first``
    path: str | Unavailable  # connection: NV18, PIX, PXB, PHB, NODE or SYS, as in nvidia-smi topo
    nvlinks: int | Unavailable  # number of NVLinks between the GPUs
    nvml_read: str | Unavailable  # status of peer reads, as NVML reports it: ok or the reason
    nvml_write: str | Unavailable  # status of peer writes, as NVML reports it: ok or the reason
    nvml_atomics: str | Unavailable  # status of peer atomics, as NVML reports it: ok or the reason
    cuda_access: bool | Unavailable  # whether CUDA reports peer access in both directions
    cuda_atomics: bool | Unavailable  # whether CUDA reports native peer atomics in both directions
    disagreement: str | None  # difference between the reports of NVML and CUDA; null if they agree


@dataclass(frozen=True, slots=True)
class DevicesResult:
    """The devices of a machine at one time."""

    schema: ClassVar[str] = "cudakit.devices/1"
    simulated: bool  # whether the GPUs are simulated
    time_ns: int  # time of the query, since 1970 in UTC
    driver_version: str | Unavailable  # version of the kernel driver
    nvml_version: str | Unavailable  # version of libnvidia-ml
    cuda: Cuda | Unavailable  # state of the CUDA driver; null if the query failed
    devices: tuple[Device, ...]  # devices in NVML's order, a GPU before its MIG instances
    pairs: tuple[Pair, ...] | None  # connections of GPUs; null without --topology
    notes: tuple[str, ...]  # problems that concern the whole machine

    @property
    def visible(self) -> tuple[Device, ...]:
        """The visible devices, by CUDA index."""
        devices_with_index = [
            device for device in self.devices if isinstance(device.cuda_index, int)
        ]
        return tuple(sorted(devices_with_index, key=lambda device: int(str(device.cuda_index))))


@dataclass(frozen=True, slots=True)
class FieldsResult:
    """The fields of each device that ``--fields`` selects."""

    schema: ClassVar[str] = "cudakit.devices.fields/1"
    simulated: bool  # whether the GPUs are simulated
    time_ns: int  # time of the query, since 1970 in UTC
    devices: tuple[Mapping[str, Field], ...]  # the selected fields of each device


@dataclass(frozen=True, slots=True)
class SelectResult:
    """The devices that ``--select`` selected."""

    schema: ClassVar[str] = "cudakit.devices.select/1"
    simulated: bool  # whether the GPUs are simulated
    visible_devices: str  # value for CUDA_VISIBLE_DEVICES that selects the devices
    devices: tuple[Device, ...]  # selected devices, in the order of ``visible_devices``


# --- The registry of fields: unit, source and meaning of every field of a device -------------------


@dataclass(frozen=True, slots=True)
class FieldsList:
    """All fields of a device: the JSON of ``--list-fields``."""

    schema: ClassVar[str] = "cudakit.devices.list-fields/1"
    fields: tuple[FieldInfo, ...]  # all fields, those that identify a device first


_IDENTITY_FIELDS = (
    ("cuda_index", "the driver", "CUDA index"),
    (
        "nvml_index",
        "nvmlDeviceGetIndex",
        "NVML index, as in nvidia-smi; MIG instance 1 of GPU 0 is shown as 0/1",
    ),
    ("uuid", "nvmlDeviceGetUUID, cuDeviceGetUuid", "UUID, the same in every library"),
    ("pci_bus_id", "nvmlDeviceGetPciInfo, cuDeviceGetPCIBusId", "PCI address"),
    ("notes", "cudakit", "Unusual states: hidden, throttled, memory errors"),
)
_USABLE_MEMORY = FieldInfo(
    "usable_memory_bytes",
    "bytes",
    "cuDeviceTotalMem",
    "Memory that CUDA can allocate",
    "memory",
    "fact",
)


def field_registry() -> Mapping[str, FieldInfo]:
    """Return all fields by name, those that identify a device first."""
    fields: dict[str, FieldInfo] = {}
    for field in (
        *(
            FieldInfo(name, "", source, description, "identity", "identity")
            for name, source, description in _IDENTITY_FIELDS
        ),
        *(field.info for field in nvml_fields()),
        _USABLE_MEMORY,
        *map(_attribute_field, attributes()),
    ):
        if field.name in fields:  # a field of both NVML and CUDA, listed once
            nvml_field = fields[field.name]
            fields[field.name] = replace(nvml_field, source=f"{nvml_field.source}, {field.source}")
        else:
            fields[field.name] = field
    return fields


def fields_by_name(names: Sequence[str]) -> tuple[FieldInfo, ...]:
    """Return the fields with these names. Raises UsageError, which suggests similar names."""
    fields = field_registry()
    for name in names:
        if name not in fields:
            similar_names = difflib.get_close_matches(name, fields, n=3, cutoff=0.5)
            suggestion = f"did you mean {one_of(similar_names)}? " if similar_names else ""
            raise UsageError(
                f"no field {name!r}", hint=f"{suggestion}--list-fields lists all fields"
            )
    return tuple(fields[name] for name in names)


def _attribute_field(attribute: Attribute) -> FieldInfo:
    group = "abilities" if attribute.unit == "bool" else "compute"
    if attribute.name.startswith("maximum_"):
        group = "textures and surfaces"
    elif attribute.name.startswith(("pci_", "gpu_pci_")):
        group = "location"
    return FieldInfo(
        attribute.name,
        attribute.unit.replace("word", "").replace("mask", ""),
        f"cuDeviceGetAttribute({attribute.number})",
        attribute.description,
        group,
        "fact",
    )
