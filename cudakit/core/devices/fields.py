"""The registry of fields: unit, source and meaning of everything that can be known of a device."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from cudakit.errors import UsageError
from cudakit.gpu.api.attributes import Attribute, attributes
from cudakit.gpu.api.fields import FieldInfo, nvml_fields


@dataclass(frozen=True, slots=True)
class FieldsList:
    """All fields, as ``--list-fields`` gives them."""

    schema: ClassVar[str] = "cudakit.devices.list-fields/1"
    fields: tuple[FieldInfo, ...]  # in the order of a first reading


_IDENTITY = (
    ("cuda_index", "the driver", "Number that CUDA gives the device"),
    ("nvml_index", "nvmlDeviceGetIndex", "Number that NVML and nvidia-smi give the device"),
    ("uuid", "nvmlDeviceGetUUID, cuDeviceGetUuid", "UUID, the same for all who ask"),
    ("pci_bus_id", "nvmlDeviceGetPciInfo, cuDeviceGetPCIBusId", "Address on the PCI bus"),
    ("notes", "cudakit", "What is worth knowing"),
)
_USABLE_MEMORY = FieldInfo(
    "usable_memory_bytes",
    "bytes",
    "cuDeviceTotalMem",
    "Memory that CUDA can give out",
    "memory",
    "fact",
)


def registry() -> Mapping[str, FieldInfo]:
    """Return all fields by name, in the order of a first reading."""
    found: dict[str, FieldInfo] = {}
    for field in (
        *(
            FieldInfo(name, "", source, text, "identity", "identity")
            for name, source, text in _IDENTITY
        ),
        *(field.info for field in nvml_fields()),
        _USABLE_MEMORY,
        *map(_attribute, attributes()),
    ):
        # A field that NVML and CUDA both give is listed once.
        found.setdefault(field.name, field)
    return found


def named(names: Sequence[str]) -> tuple[FieldInfo, ...]:
    """Return fields by name. Raises UsageError, with similar names, for an unknown one."""
    known = registry()
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            meant = f"did you mean {' or '.join(near)}? " if near else ""
            raise UsageError(f"no field {name!r}", hint=f"{meant}--list-fields lists them all")
    return tuple(known[name] for name in names)


def _attribute(attribute: Attribute) -> FieldInfo:
    return FieldInfo(
        attribute.name,
        attribute.unit.replace("word", "").replace("mask", ""),
        f"cuDeviceGetAttribute({attribute.number})",
        attribute.description,
        _group(attribute),
        "fact",
    )


def _group(attribute: Attribute) -> str:
    if attribute.name.startswith("maximum_"):
        return "textures and surfaces"
    if attribute.name.startswith(("pci_", "gpu_pci_")):
        return "place"
    return "abilities" if attribute.unit == "bool" else "compute"
