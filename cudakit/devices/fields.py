"""The registry of fields: unit, source and meaning of every field of a device."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from cudakit.errors import UsageError, one_of
from cudakit.gpu.api.attributes import Attribute, attributes
from cudakit.gpu.api.fields import FieldInfo, nvml_fields


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
    return FieldInfo(
        attribute.name,
        attribute.unit.replace("word", "").replace("mask", ""),
        f"cuDeviceGetAttribute({attribute.number})",
        attribute.description,
        _attribute_group(attribute),
        "fact",
    )


def _attribute_group(attribute: Attribute) -> str:
    if attribute.name.startswith("maximum_"):
        return "textures and surfaces"
    if attribute.name.startswith(("pci_", "gpu_pci_")):
        return "location"
    return "abilities" if attribute.unit == "bool" else "compute"
